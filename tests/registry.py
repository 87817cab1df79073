"""Registries of the contract tests: one table per kind. A new layer or prior is one row and inherits every test."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpyro.distributions as dist
import pytest
from numpyro.infer import NUTS, Gibbs

from numpyro_bnn import guides, infer, nn, priors, symmetry


class LayerRow(NamedTuple):
    """A layer, an input shape it takes, and one it must refuse (``None``: it takes every shape)."""

    layer: nn.Layer
    input_shape: tuple[int, ...]
    wrong_shape: tuple[int, ...] | None = None


class PriorRow(NamedTuple):
    """A prior, and the hyper-sites (suffix: shape) it adds for the dense kernel of shape (4, 3)."""

    prior: Any
    hyper_sites: Mapping[str, tuple[int, ...]] = {}


IMAGE = (7, 6, 2)
NORM = nn.BatchNorm()

LAYERS: dict[str, LayerRow] = {
    "Dense": LayerRow(nn.Dense(4), (3,), (7, 6, 2)),
    "Dense without bias": LayerRow(nn.Dense(4, use_bias=False), (3,), (7, 4)),
    "Conv2d SAME": LayerRow(nn.Conv2d(4, 3), IMAGE, (3,)),
    "Conv2d VALID, strides, no bias": LayerRow(
        nn.Conv2d(4, (3, 2), (2, 1), "VALID", use_bias=False), IMAGE, (2, 6, 2)
    ),
    "Conv2d padded": LayerRow(nn.Conv2d(4, 5, 2, padding=1), IMAGE, (2, 6, 2)),
    "MaxPool": LayerRow(nn.MaxPool(2), IMAGE, (1, 6, 2)),
    "MaxPool SAME": LayerRow(nn.MaxPool(3, 2, "SAME"), IMAGE, (3,)),
    "MaxPool global": LayerRow(nn.MaxPool(None), IMAGE, (7, 6)),
    "AvgPool": LayerRow(nn.AvgPool((2, 3), 1), IMAGE, (7, 2, 2)),
    "AvgPool SAME": LayerRow(nn.AvgPool(3, 2, "SAME"), IMAGE, (7, 6)),
    "AvgPool global": LayerRow(nn.AvgPool(None), IMAGE, (3,)),
    "Flatten": LayerRow(nn.Flatten(), IMAGE, (7, 6)),
    "Flatten rank 2": LayerRow(nn.Flatten(rank=2), (4, 3), (3,)),
    **{f"Activation {name}": LayerRow(nn.Activation(name), (3,)) for name in nn.ACTIVATIONS},
    "BatchNorm": LayerRow(nn.BatchNorm(), (3,), ()),
    "BatchNorm of images": LayerRow(nn.BatchNorm(use_bias=False), IMAGE, ()),
    "BatchNorm without gain and shift": LayerRow(nn.BatchNorm(False, False), (3,), ()),
    "LayerNorm": LayerRow(nn.LayerNorm(), (3,), ()),
    "LayerNorm without gain": LayerRow(nn.LayerNorm(use_scale=False), IMAGE, ()),
    "Residual": LayerRow(nn.Residual(nn.Sequential([nn.Dense(3), "tanh"])), (3,), (4,)),
    "Residual with shortcut": LayerRow(nn.Residual(nn.Conv2d(4, 3, 2), nn.Conv2d(4, 1, 2)), IMAGE, (3,)),
    "Sequential": LayerRow(nn.Sequential([nn.Flatten(), nn.Sequential([nn.Dense(3), "erf"])]), IMAGE, (3,)),
    "MLP": LayerRow(nn.MLP([5, 4, 1], "tanh"), (3,), (7, 4)),
    "MLP with norm": LayerRow(nn.MLP([5, 1], norm=nn.LayerNorm()), (3,), (7, 4)),
    "CNN": LayerRow(nn.CNN([3, 4], [5, 2], window=3, norm=NORM), IMAGE, (3,)),
    "ResNet": LayerRow(nn.ResNet([3, 4], 2, norm=NORM), IMAGE, (3,)),
}

GIVEN = {  # the parameters of the contract tests
    "Dense_0.kernel": (4, 3),
    "Conv2d_0.kernel": (2, 3, 2, 3),
    "Dense_0.bias": (3,),
    "BatchNorm_0.scale": (3,),
    "layers[0].weight": (3, 4),
    "layers[0].bias": (3,),
    "norm.weight": (3,),
}
PRIORS: dict[str, PriorRow] = {
    "Normal": PriorRow(priors.Normal(2.0)),
    "Normal without scaling": PriorRow(priors.Normal(0.5, fan_in_scaling=False)),
    "Laplace": PriorRow(priors.Laplace(1.5)),
    "StudentT": PriorRow(priors.StudentT(4.0, 0.7)),
    "ScaleMixture": PriorRow(priors.ScaleMixture(0.3, 1.0, 0.1)),
    "Hierarchical": PriorRow(priors.Hierarchical(), {"scale": ()}),
    "Hierarchical centered": PriorRow(priors.Hierarchical(dist.Gamma(3.0, 2.0), centered=True), {"scale": ()}),
    "ARD": PriorRow(priors.ARD(), {"scale": (4,)}),
    "ARD centered": PriorRow(priors.ARD(dist.Uniform(0.5, 1.5), centered=True), {"scale": (4,)}),
    "GammaPrecision": PriorRow(priors.GammaPrecision(0.5, 3.0), {"precision": ()}),
    "GammaPrecision centered": PriorRow(priors.GammaPrecision(0.5, 3.0, centered=True), {"precision": ()}),
    "GammaPrecision integrated": PriorRow(priors.GammaPrecision(0.5, 3.0, marginal=True)),
    "Horseshoe": PriorRow(priors.Horseshoe(0.5), {"global": (), "local": (4, 3)}),
    "Horseshoe of inputs": PriorRow(priors.Horseshoe(unit="input"), {"global": (), "local": (4,)}),
    "Horseshoe of outputs, centered": PriorRow(
        priors.Horseshoe(unit="output", centered=True), {"global": (), "local": (3,)}
    ),
    "RegularizedHorseshoe": PriorRow(priors.RegularizedHorseshoe(), {"global": (), "local": (4, 3), "slab": ()}),
    "GPFilters": PriorRow(priors.GPFilters(dist.HalfNormal(1.0), dist.LogNormal(0.0, 0.3), other=priors.Normal(2.0))),
    "GPFilters centered": PriorRow(priors.GPFilters(1.0, 2.0, "matern32", centered=True)),
    "Centered": PriorRow(priors.Centered({name: np.ones(shape) for name, shape in GIVEN.items()}, 0.5)),
    "BySite": PriorRow(priors.BySite({"*kernel": priors.Hierarchical()}, default=priors.Normal()), {"scale": ()}),
}

# Variants that another row of the same family also tests.
PRIOR_VARIANTS = {
    "Normal without scaling",
    "Hierarchical centered",
    "ARD centered",
    "GammaPrecision centered",
    "Horseshoe of inputs",
    "GPFilters centered",
}
LAYER_VARIANTS = {
    "Dense without bias",
    "Conv2d VALID, strides, no bias",
    "Conv2d padded",
    "MaxPool SAME",
    "MaxPool global",
    "AvgPool SAME",
    "AvgPool global",
    "Flatten rank 2",
    "BatchNorm of images",
    "BatchNorm without gain and shift",
    "LayerNorm without gain",
    "Residual with shortcut",
    "MLP with norm",
    "CNN",
    "ResNet",
    *(f"Activation {name}" for name in nn.ACTIVATIONS if name != "relu"),
}

# (test, row): cause. A row that no longer fails, fails the suite.
KNOWN_FAILURES: dict[tuple[str, str], str] = {
    ("test_prior_takes_equinox_convolutions", "GPFilters"): (
        "refuses kernels (out, in, h, w): its grid is the first two axes of a Flax kernel"
    ),
    ("test_prior_takes_equinox_convolutions", "GPFilters centered"): (
        "refuses kernels (out, in, h, w): its grid is the first two axes of a Flax kernel"
    ),
    ("test_prior_takes_equinox_convolutions", "Centered"): "its given values are those of a dense layer of this name",
}


def rows(table: Mapping[str, Any], test: str, slow: Collection[str] = ()) -> list[Any]:
    """Parameters of a contract test; known failures must fail. Rows in ``slow`` run in `make test-all`."""
    params = []
    for name, row in table.items():
        cause = KNOWN_FAILURES.get((test, name))
        marks: list[Any] = [pytest.mark.xfail(reason=cause, strict=True)] if cause else []
        marks += [pytest.mark.slow] if name in slow else []
        params.append(pytest.param(row, id=name, marks=marks))
    return params


# -- SG-MCMC kernels --------------------------------------------------------------------------------


class KernelRow(NamedTuple):
    """A kernel as a function of its model, and the fields of its states in addition to the common ones."""

    make: Callable[..., infer.SGMCMCKernel]
    momentum: bool = False
    exact: bool = False
    microcanonical: bool = False


# Few steps per draw, all stages of the warm-up, every option at least once.
_SHORT: dict[str, Any] = {"steps_per_draw": 3, "warm_start": 0.5}

KERNELS: dict[str, KernelRow] = {
    "SGLD": KernelRow(partial(infer.SGLD, **_SHORT)),
    "PSGLD": KernelRow(partial(infer.PSGLD, step_size=1e-3, **_SHORT)),
    "PSGLD of the warm start": KernelRow(
        partial(infer.PSGLD, step_size=infer.schedules.polynomial(1e-3), preconditioner="warm_start", **_SHORT)
    ),
    "SGHMC": KernelRow(partial(infer.SGHMC, step_size=1e-3, **_SHORT), momentum=True),
    "SGHMC with control variates": KernelRow(
        partial(infer.SGHMC, gradient="control_variates", **_SHORT), momentum=True
    ),
    "SGNHT": KernelRow(partial(infer.SGNHT, minibatches="epochs", **_SHORT), momentum=True),
    "CyclicalSGLD": KernelRow(partial(infer.CyclicalSGLD, step_size=1e-3, cycle_length=12, draws_per_cycle=2)),
    "MALA": KernelRow(partial(infer.MALA, **_SHORT), exact=True),
    "GGMC": KernelRow(partial(infer.GGMC, num_steps=2, **_SHORT), momentum=True, exact=True),
    "GHMC": KernelRow(
        partial(infer.GHMC, step_size=1e-3, num_steps=3, momentum_decay=0.5, **_SHORT), momentum=True, exact=True
    ),
    "MCLMC": KernelRow(partial(infer.MCLMC, **_SHORT), microcanonical=True),
    "MCLMC with noise preconditioning": KernelRow(
        partial(
            infer.MCLMC,
            integrator="leapfrog",
            preconditioner="gradient_noise",
            decoherence_length=2.0,
            energy_variance=(0.1, 0.01),
            steps_per_draw=12,
        ),
        microcanonical=True,
    ),
}

# Variants of a class that another row also tests.
KERNEL_VARIANTS = {"PSGLD of the warm start", "SGHMC with control variates", "MCLMC with noise preconditioning"}


# -- symmetries -------------------------------------------------------------------------------------


class SymmetryRow(NamedTuple):
    """A symmetry, the shapes of the sites of a model that has it, and which of them are positive."""

    symmetry: symmetry.Symmetry
    shapes: Mapping[str, tuple[int, ...]]
    positive: tuple[str, ...] = ()


_DENSE = {"w": (3, 4), "b": (4,), "v": (4, 2)}
_HYPER = {"w": (3, 4), "v": (4, 2), "s": ()}

SYMMETRIES: dict[str, SymmetryRow] = {
    "Scale of units": SymmetryRow(symmetry.Scale([("w", 1), ("b", 0)]), _DENSE),
    "Scale of a layer": SymmetryRow(symmetry.Scale(["w", "b"]), _DENSE),
    "Scale of filters": SymmetryRow(symmetry.Scale([("w", -1)]), {"w": (2, 3, 2, 4)}),
    "Scale behind Flatten": SymmetryRow(symmetry.Scale([("w", 3), ("a", 0, 5)]), {"w": (2, 2, 1, 3), "a": (15,)}),
    "Rescale": SymmetryRow(symmetry.Rescale([("w", 1), ("b", 0)], [("v", 0)]), _DENSE),
    "Rescale through Flatten": SymmetryRow(
        symmetry.Rescale([("w", 3), ("b", 0)], [("v", 0, 3)]), {"w": (2, 2, 1, 4), "b": (4,), "v": (12, 2)}
    ),
    "Rescale of a residual stream": SymmetryRow(
        symmetry.Rescale([("w", 1), ("r", 1)], [("r", 0), ("v", 0)]), {"w": (3, 4), "r": (4, 4), "v": (4, 2)}
    ),
    "JointScale": SymmetryRow(symmetry.JointScale(["w", "v"], "s"), _HYPER, ("s",)),
    "JointScale of a precision": SymmetryRow(symmetry.JointScale("w", "s", -2.0), _HYPER, ("s",)),
    "JointScale non-centered": SymmetryRow(symmetry.JointScale([], "s"), _HYPER, ("s",)),
    "JointRescale": SymmetryRow(symmetry.JointRescale("w", "v", [("s", 1.0)]), _HYPER, ("s",)),
    "Shift of units": SymmetryRow(symmetry.Shift([("b", 0)]), _DENSE),
    "Shift of logits": SymmetryRow(symmetry.Shift("b"), _DENSE),
    "Shift of logits by input": SymmetryRow(symmetry.Shift([("w", 0)]), _DENSE),
    "SignFlip": SymmetryRow(symmetry.SignFlip([("w", 1), ("b", 0), ("v", 0)]), _DENSE),
    "SignFlip of a layer": SymmetryRow(symmetry.SignFlip(["w", "b", "v"]), _DENSE),
    "SignFlip of a residual stream": SymmetryRow(
        symmetry.SignFlip([("w", 1), ("r", 1), ("r", 0)]), {"w": (3, 4), "r": (4, 4)}
    ),
    "Permutation": SymmetryRow(symmetry.Permutation([("w", 1), ("b", 0), ("v", 0)]), _DENSE),
    "Permutation through Flatten": SymmetryRow(
        symmetry.Permutation([("w", 3), ("v", 0, 3)]), {"w": (2, 2, 1, 4), "v": (12, 2)}
    ),
    "Permutation with hyper-parameters": SymmetryRow(
        symmetry.Permutation([("w", 1), ("v", 0), ("s", 0)]), {"w": (3, 4), "v": (4, 2), "s": (4,)}, ("s",)
    ),
    "Permutation of a residual stream": SymmetryRow(
        symmetry.Permutation([("w", 1), ("r", 1), ("r", 0)]), {"w": (3, 4), "r": (4, 4)}
    ),
}


SYMMETRY_VARIANTS = {
    "Scale of filters",
    "Rescale through Flatten",
    "JointScale of a precision",
    "Shift of logits",
    "Shift of logits by input",
    "SignFlip of a layer",
    "Permutation through Flatten",
    "Scale of a layer",
    "Rescale of a residual stream",
    "JointScale non-centered",
    "SignFlip of a residual stream",
    "Permutation with hyper-parameters",
    "Permutation of a residual stream",
}


class NetRow(NamedTuple):
    """A network and how many symmetries of each kind it has."""

    net: nn.Layer
    input_shape: tuple[int, ...]
    kinds: Mapping[str, int]


def _kinds(scale: int = 0, rescale: int = 0, shift: int = 0, flip: int = 0, order: int = 0) -> dict[str, int]:
    counts = {"Scale": scale, "Rescale": rescale, "Shift": shift, "SignFlip": flip, "Permutation": order}
    return {kind: count for kind, count in counts.items() if count}


def _normed(norm: nn.Layer, activation: str) -> nn.Layer:
    return nn.MLP([4, 3, 2], activation, norm)


def _before(norm: nn.Layer, activation: str) -> nn.Layer:
    """Pre-activation residual network."""
    block = nn.Residual(nn.Sequential([norm, activation, nn.Dense(4)]))
    return nn.Sequential([nn.Dense(4), block, block, norm, activation, nn.Dense(2)])


_FEATURES, _BN, _LN = (3,), nn.BatchNorm, nn.LayerNorm
_AVG = nn.AvgPool(2)

# Two hidden layers each, unless stated.
NETS: dict[str, NetRow] = {
    "linear": NetRow(nn.Dense(2), _FEATURES, {}),
    "MLP relu": NetRow(nn.MLP([4, 3, 2], "relu"), _FEATURES, _kinds(rescale=2, order=2)),
    "MLP leaky relu": NetRow(nn.MLP([4, 3, 2], "leaky_relu"), _FEATURES, _kinds(rescale=2, order=2)),
    "MLP tanh": NetRow(nn.MLP([4, 3, 2], "tanh"), _FEATURES, _kinds(flip=2, order=2)),
    "MLP erf": NetRow(nn.MLP([4, 3, 2], "erf"), _FEATURES, _kinds(flip=2, order=2)),
    "MLP identity": NetRow(nn.MLP([4, 3, 2], "identity"), _FEATURES, _kinds(rescale=2, flip=2, order=2)),
    **{f"MLP {a}": NetRow(nn.MLP([4, 2], a), _FEATURES, _kinds(order=1)) for a in ("softplus", "silu", "gelu")},
    "one hidden unit": NetRow(nn.MLP([1, 2], "relu"), _FEATURES, _kinds(rescale=1)),
    "BatchNorm tanh": NetRow(_normed(_BN(), "tanh"), _FEATURES, _kinds(scale=2, shift=2, flip=4, order=2)),
    "BatchNorm tanh, no gain": NetRow(
        _normed(_BN(False), "tanh"), _FEATURES, _kinds(scale=2, shift=2, flip=2, order=2)
    ),
    "BatchNorm relu": NetRow(_normed(_BN(), "relu"), _FEATURES, _kinds(scale=2, rescale=2, shift=2, flip=2, order=2)),
    "BatchNorm relu, no gain or shift": NetRow(
        _normed(_BN(False, False), "relu"), _FEATURES, _kinds(scale=2, shift=2, order=2)
    ),
    "BatchNorm softplus": NetRow(_normed(_BN(), "softplus"), _FEATURES, _kinds(scale=2, shift=2, flip=2, order=2)),
    # A shift of all units comes from the bias, and from every input.
    "LayerNorm tanh": NetRow(_normed(_LN(), "tanh"), _FEATURES, _kinds(scale=2, shift=4, flip=4, order=2)),
    "LayerNorm tanh, no gain": NetRow(
        _normed(_LN(False, False), "tanh"), _FEATURES, _kinds(scale=2, shift=4, flip=2, order=2)
    ),
    "LayerNorm relu": NetRow(_normed(_LN(), "relu"), _FEATURES, _kinds(scale=2, rescale=2, shift=4, flip=2, order=2)),
    "BatchNorm after relu": NetRow(
        nn.Sequential([nn.Dense(4), "relu", _BN(), nn.Dense(2)]),
        _FEATURES,
        _kinds(scale=1, rescale=1, flip=1, order=1),
    ),
    "BatchNorm, then LayerNorm": NetRow(
        nn.Sequential([nn.Dense(4), _BN(), _LN(), "tanh", nn.Dense(2)]),
        _FEATURES,
        _kinds(scale=2, shift=2, flip=3, order=1),
    ),
    "LayerNorm of the inputs": NetRow(
        nn.Sequential([_LN(), "relu", nn.Dense(4), "tanh", nn.Dense(2)]),
        _FEATURES,
        _kinds(rescale=1, flip=1, order=1),
    ),
    "CNN max": NetRow(nn.CNN([3, 4], [5, 2], 3), IMAGE, _kinds(rescale=3, order=3)),
    # A maximum does not commute with a change of sign.
    "CNN max tanh": NetRow(nn.CNN([3, 4], [5, 2], 3, activation="tanh"), IMAGE, _kinds(flip=1, order=3)),
    "CNN average tanh": NetRow(
        nn.CNN([3, 4], [5, 2], 3, pool=_AVG, activation="tanh"), IMAGE, _kinds(flip=3, order=3)
    ),
    "CNN BatchNorm relu": NetRow(
        nn.CNN([3, 4], [5, 2], 3, norm=_BN()), IMAGE, _kinds(scale=3, rescale=3, shift=3, flip=3, order=3)
    ),
    "CNN LayerNorm tanh, no gain": NetRow(
        nn.CNN([3, 4], [5, 2], 3, pool=_AVG, activation="tanh", norm=_LN(False)),
        IMAGE,
        _kinds(scale=3, shift=6, flip=3, order=3),
    ),
    "norms behind Flatten": NetRow(
        nn.Sequential([nn.Conv2d(3, 3), nn.Flatten(), _BN(), "relu", nn.Dense(4), _LN(), "relu", nn.Dense(2)]),
        IMAGE,
        _kinds(scale=2, rescale=2, shift=3, flip=2, order=2),
    ),
    # The contribution of an input pixel differs between pixels: only the bias shifts all of them.
    "LayerNorm over pixels": NetRow(
        nn.Sequential([nn.Conv2d(3, 3), nn.Flatten(), _LN(), "relu", nn.Dense(2)]),
        IMAGE,
        _kinds(scale=1, rescale=1, shift=1, flip=1, order=1),
    ),
    "LayerNorm after a maximum": NetRow(
        nn.Sequential([nn.Conv2d(3, 3), nn.MaxPool(2), _LN(False), "relu", nn.Flatten(), nn.Dense(2)]),
        IMAGE,
        _kinds(scale=1, shift=1, order=1),
    ),
    # Residual stream and inside of the block, in each of two stages.
    "ResNet": NetRow(nn.ResNet([3, 4], 2), IMAGE, _kinds(rescale=4, order=4)),
    "ResNet tanh": NetRow(nn.ResNet([3, 4], 2, activation="tanh"), IMAGE, _kinds(flip=4, order=4)),
    # Five convolutions feed a normalization.
    "ResNet BatchNorm": NetRow(
        nn.ResNet([3, 4], 2, norm=_BN()), IMAGE, _kinds(scale=5, rescale=4, shift=5, flip=5, order=4)
    ),
    "ResNet LayerNorm": NetRow(
        nn.ResNet([3, 4], 2, norm=_LN()), IMAGE, _kinds(scale=5, rescale=4, shift=10, flip=5, order=4)
    ),
    "ResNet BatchNorm tanh, no gain": NetRow(
        nn.ResNet([3, 4], 2, activation="tanh", norm=_BN(False)), IMAGE, _kinds(scale=5, shift=5, flip=4, order=4)
    ),
    # Three normalizations read one stream: its three biases shift, the outputs with gains rescale and flip.
    "pre-activation BatchNorm": NetRow(
        _before(_BN(), "relu"), _FEATURES, _kinds(scale=1, rescale=3, shift=3, flip=1, order=1)
    ),
    "pre-activation LayerNorm tanh, no gain": NetRow(
        _before(_LN(False), "tanh"), _FEATURES, _kinds(scale=1, shift=4, flip=1, order=1)
    ),
    "block that ends with BatchNorm": NetRow(
        nn.Sequential(
            [nn.Dense(4), nn.Residual(nn.Sequential([_BN(), "relu", nn.Dense(4), _BN()])), _BN(), "relu", nn.Dense(2)]
        ),
        _FEATURES,
        _kinds(scale=2, rescale=2, shift=3, flip=2, order=1),
    ),
    "residual of a dense layer": NetRow(
        nn.Sequential([nn.Dense(4), "relu", nn.Residual(nn.Dense(4)), "relu", nn.Dense(2)]),
        _FEATURES,
        _kinds(rescale=1, order=1),
    ),
    "residual of BatchNorm": NetRow(
        nn.Sequential([nn.Dense(4), nn.Residual(_BN()), "tanh", nn.Dense(2)]), _FEATURES, _kinds(flip=1, order=1)
    ),
    "residual of the inputs": NetRow(nn.Sequential([nn.Residual(nn.Dense(3)), "relu", nn.Dense(2)]), _FEATURES, {}),
    "residual with projection": NetRow(
        nn.Sequential([nn.Dense(4), "relu", nn.Residual(nn.MLP([5, 6]), nn.Dense(6)), "relu", nn.Dense(2)]),
        _FEATURES,
        _kinds(rescale=3, order=3),
    ),
}

# Networks whose layers are connected as in another row.
NET_VARIANTS = {
    "MLP leaky relu",
    "MLP erf",
    "MLP gelu",
    "MLP silu",
    "BatchNorm tanh, no gain",
    "BatchNorm softplus",
    "LayerNorm tanh",
    "LayerNorm relu",
    "CNN max",
    "CNN average tanh",
    "ResNet tanh",
    "ResNet LayerNorm",
    "ResNet BatchNorm tanh, no gain",
    "pre-activation BatchNorm",
    "residual of BatchNorm",
    "CNN LayerNorm tanh, no gain",
    "MLP identity",
    "MLP softplus",
    "BatchNorm tanh",
    "BatchNorm relu, no gain or shift",
    "BatchNorm after relu",
    "LayerNorm of the inputs",
    "CNN BatchNorm relu",
    "ResNet BatchNorm",
    "residual with projection",
    "ResNet",
    "one hidden unit",
    "LayerNorm over pixels",
    "LayerNorm after a maximum",
    "block that ends with BatchNorm",
    "residual of a dense layer",
    "BatchNorm, then LayerNorm",
    "CNN max tanh",
}


# -- wrappers ---------------------------------------------------------------------------------------


class WrapperRow(NamedTuple):
    """A kernel around another one, or around a model that was transformed.

    :param model: name of a model of the zoo.
    :param make: the kernel, from a model and its arguments.
    :param stats: extra statistic -> its dimensions beyond chain and draw.
    :param new_sites: names of latent sites that the transformation adds.
    """

    model: str
    make: Callable[..., Any]
    stats: Mapping[str, tuple[str, ...]] = {}
    new_sites: Collection[str] = ()


_ORBIT, _UNIT = {"orbit_accept_prob": ("symmetry",)}, {"unit_accept_prob": ()}
_HIDDEN, _OUTPUT = ("net/Dense_0.kernel", "net/Dense_0.bias"), ("net/Dense_1.kernel", "net/Dense_1.bias")
_UNITS = [(_HIDDEN[0], 1), (_HIDDEN[1], 0), (_OUTPUT[0], 0)]
_GAUGE = tuple(f"{name}_gauge" for name, _ in _UNITS)


def _nuts(model: Callable) -> Any:
    return NUTS(model, step_size=0.1, adapt_step_size=False, max_tree_depth=3)


def _mclmc(model: Callable) -> Any:
    return infer.MCLMC(model, steps_per_draw=3)


def _mala(model: Callable) -> Any:
    return infer.MALA(model, 1e-3, steps_per_draw=3, warm_start=0.0)


def _orbit(kernel: Any) -> Any:
    return infer.OrbitMoves(kernel, [symmetry.SignFlip(_UNITS), symmetry.Permutation(_UNITS)])


def _unit(kernel: Any) -> Any:
    return infer.UnitMoves(kernel, {_HIDDEN[0]: -1, _HIDDEN[1]: 0}, num_moves=5)


def _gibbs(model: Callable, inner: Callable = _nuts) -> Any:
    return Gibbs([(infer.PrecisionGibbs(model), ["sigma"]), (inner(model), None)])


def _collapsed(model: Callable, args: tuple) -> Callable:
    return infer.collapse(model, list(_OUTPUT), *args)


def _quotient(model: Callable, args: tuple) -> Callable:
    return symmetry.quotient(model, symmetry.find(model, *args), *args)


WRAPPERS: dict[str, WrapperRow] = {
    "OrbitMoves around NUTS": WrapperRow("network", lambda m, _: _orbit(_nuts(m)), _ORBIT),
    "OrbitMoves around MALA": WrapperRow("network", lambda m, _: _orbit(_mala(m)), _ORBIT),
    "UnitMoves around MCLMC": WrapperRow("network", lambda m, _: _unit(_mclmc(m)), _UNIT),
    "UnitMoves around NUTS": WrapperRow("network", lambda m, _: _unit(_nuts(m)), _UNIT),
    "UnitMoves around OrbitMoves": WrapperRow("network", lambda m, _: _unit(_orbit(_nuts(m))), _UNIT),
    "UnitMoves around Gibbs": WrapperRow(
        "spread", lambda m, _: infer.UnitMoves(_gibbs(m), {"w": 0}, num_moves=5), _UNIT
    ),
    "PrecisionGibbs beside NUTS": WrapperRow("spread", lambda m, _: _gibbs(m)),
    "PrecisionGibbs beside UnitMoves": WrapperRow(
        "spread", lambda m, _: _gibbs(m, lambda m: infer.UnitMoves(_nuts(m), {"w": 0}, num_moves=5))
    ),
    "collapse under NUTS": WrapperRow("network", lambda m, args: _nuts(_collapsed(m, args))),
    "collapse under MALA": WrapperRow("network", lambda m, args: _mala(_collapsed(m, args))),
    "collapse under MCLMC": WrapperRow("network", lambda m, args: _mclmc(_collapsed(m, args))),
    "collapse under OrbitMoves": WrapperRow(
        "network",
        lambda m, args: infer.OrbitMoves(_nuts(_collapsed(m, args)), [symmetry.Permutation(_UNITS[:2])]),
        _ORBIT,
    ),
    "collapse under ParallelTempering": WrapperRow(
        "network", lambda m, args: infer.ParallelTempering(_nuts(_collapsed(m, args)), 2)
    ),
    "quotient under NUTS": WrapperRow("network", lambda m, args: _nuts(_quotient(m, args)), new_sites=_GAUGE),
    "quotient under MALA": WrapperRow("network", lambda m, args: _mala(_quotient(m, args)), new_sites=_GAUGE),
}
# Rows whose wrapper and whose inner kernel other rows test.
WRAPPER_VARIANTS = {
    "OrbitMoves around MALA",
    "UnitMoves around MCLMC",
    "UnitMoves around NUTS",
    "UnitMoves around OrbitMoves",
    "PrecisionGibbs beside NUTS",
    "PrecisionGibbs beside UnitMoves",
    "collapse under NUTS",
    "collapse under MCLMC",
    "collapse under OrbitMoves",
    "collapse under ParallelTempering",
    "quotient under NUTS",
    "quotient under MALA",
}


# -- guides -----------------------------------------------------------------------------------------


class GuideRow(NamedTuple):
    """A guide as a function of the model and keywords such as ``prefix``, and the parts of the contract it lacks.

    :param make: a class of guides, or a ``partial`` of one.
    :param lacks: part of the contract -> why; the parts are the fields of ``PARTS``.
    :param slow: a variant of a class that another row tests; it runs only in ``make test-all``.
    """

    make: Callable[..., Any]
    lacks: Mapping[str, str] = {}
    slow: bool = False


PARTS = {
    "density": "log q equals the change of variables by autodiff",
    "quantiles of bases": "quantiles of non-centered sites are those of their draws",
    "list": "can be a part of an AutoGuideList",
}

_OF_LAPLACE = {
    "list": "its precision needs the observation of the model",
    "density": "it reads the model in each call, which uses up the noise that the test gives; test_laplace has it",
}

GUIDES: dict[str, GuideRow] = {
    "AutoADF": GuideRow(
        guides.AutoADF,
        {
            "list": "learns all sites at once, and needs the observation of the model",
            "quantiles of bases": "it gives those of the weights; a base is the weight over its scale, each at q",
        },
    ),
    "AutoLaplace": GuideRow(guides.AutoLaplace, _OF_LAPLACE),
    "AutoLaplace low rank": GuideRow(
        partial(guides.AutoLaplace, structure="low_rank", rank=3), _OF_LAPLACE, slow=True
    ),
    "AutoMeanField": GuideRow(guides.AutoMeanField),
    "AutoMeanField given scales": GuideRow(partial(guides.AutoMeanField, condition_on_scales=True), slow=True),
    "AutoBlocks given scales": GuideRow(
        partial(
            guides.AutoBlocks,
            blocks={("*_scale", "*kernel"): guides.FullRank(), "*.bias": guides.Diagonal()},
            condition_on_scales=True,
        )
    ),
    "AutoStructured": GuideRow(guides.AutoStructured),
    "AutoStructured low rank": GuideRow(
        partial(guides.AutoStructured, family=guides.LowRank(2), include_scales=True), slow=True
    ),
    "AutoStructured, one block": GuideRow(partial(guides.AutoStructured, blocks=["*"]), slow=True),
    "AutoCoupling": GuideRow(partial(guides.AutoCoupling, num_flows=2, hidden=(4,))),
    "AutoCoupling of scales": GuideRow(
        partial(guides.AutoCoupling, blocks="*_scale", mask="random", condition_on_scales=True), slow=True
    ),
}
