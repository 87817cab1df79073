"""Registries of the contract tests: one table per kind. A new layer or prior is one row
and inherits every test.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import numpyro.distributions as dist
import pytest
from helpers import mala
from numpyro.infer import NUTS, Gibbs

from numpyro_bnn import guides, infer, nn, priors, symmetry


class LayerRow(NamedTuple):
    """A layer, an input shape it takes, and one it must refuse (or ``None``)."""

    layer: nn.Layer
    input_shape: tuple[int, ...]
    wrong_shape: tuple[int, ...] | None = None


class PriorRow(NamedTuple):
    """A prior, and the hyper-sites (suffix: shape) of a dense kernel (4, 3)."""

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
    **{
        f"Activation {name}": LayerRow(nn.Activation(name), (3,))
        for name in nn.ACTIVATIONS
    },
    "BatchNorm": LayerRow(nn.BatchNorm(), (3,), ()),
    "BatchNorm of images": LayerRow(nn.BatchNorm(use_bias=False), IMAGE, ()),
    "BatchNorm without gain and shift": LayerRow(nn.BatchNorm(False, False), (3,), ()),
    "LayerNorm": LayerRow(nn.LayerNorm(), (3,), ()),
    "LayerNorm without gain": LayerRow(nn.LayerNorm(use_scale=False), IMAGE, ()),
    "Residual": LayerRow(nn.Residual(nn.Sequential([nn.Dense(3), "tanh"])), (3,), (4,)),
    "Residual with shortcut": LayerRow(
        nn.Residual(nn.Conv2d(4, 3, 2), nn.Conv2d(4, 1, 2)), IMAGE, (3,)
    ),
    "Sequential": LayerRow(
        nn.Sequential([nn.Flatten(), nn.Sequential([nn.Dense(3), "erf"])]), IMAGE, (3,)
    ),
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
    "Hierarchical centered": PriorRow(
        priors.Hierarchical(dist.Gamma(3.0, 2.0), centered=True), {"scale": ()}
    ),
    "ARD": PriorRow(priors.ARD(), {"scale": (4,)}),
    "ARD centered": PriorRow(
        priors.ARD(dist.Uniform(0.5, 1.5), centered=True), {"scale": (4,)}
    ),
    "GammaPrecision": PriorRow(priors.GammaPrecision(0.5, 3.0), {"precision": ()}),
    "GammaPrecision centered": PriorRow(
        priors.GammaPrecision(0.5, 3.0, centered=True), {"precision": ()}
    ),
    "GammaPrecision integrated": PriorRow(
        priors.GammaPrecision(0.5, 3.0, marginal=True)
    ),
    "Horseshoe": PriorRow(priors.Horseshoe(0.5), {"global": (), "local": (4, 3)}),
    "Horseshoe of inputs": PriorRow(
        priors.Horseshoe(unit="input"), {"global": (), "local": (4,)}
    ),
    "Horseshoe of outputs, centered": PriorRow(
        priors.Horseshoe(unit="output", centered=True), {"global": (), "local": (3,)}
    ),
    "RegularizedHorseshoe": PriorRow(
        priors.RegularizedHorseshoe(), {"global": (), "local": (4, 3), "slab": ()}
    ),
    "GPFilters": PriorRow(
        priors.GPFilters(
            dist.HalfNormal(1.0), dist.LogNormal(0.0, 0.3), other=priors.Normal(2.0)
        )
    ),
    "GPFilters centered": PriorRow(
        priors.GPFilters(1.0, 2.0, "matern32", centered=True)
    ),
    "Centered": PriorRow(
        priors.Centered({name: np.ones(shape) for name, shape in GIVEN.items()}, 0.5)
    ),
    "BySite": PriorRow(
        priors.BySite({"*kernel": priors.Hierarchical()}, default=priors.Normal()),
        {"scale": ()},
    ),
}

# (test, row): cause. A row that no longer fails, fails the suite.
GRID = (
    "refuses kernels (out, in, h, w): its grid is the first two axes of a Flax kernel"
)
KNOWN_FAILURES: dict[tuple[str, str], str] = {
    ("test_prior_takes_equinox_convolutions", "GPFilters"): GRID,
    ("test_prior_takes_equinox_convolutions", "GPFilters centered"): GRID,
    (
        "test_prior_takes_equinox_convolutions",
        "Centered",
    ): "its given values are those of a dense layer of this name",
}


def firsts(table: Mapping[str, Any]) -> set[str]:
    """Names of the rows whose class no earlier row has; the others are its variants."""
    found: dict[Any, str] = {}
    for name, row in table.items():
        made = getattr(row[0], "func", row[0])
        found.setdefault(made if isinstance(made, type) else type(made), name)
    return set(found.values())


def rows(
    table: Mapping[str, Any], test: str = "", fast: Collection[str] | None = None
) -> list[Any]:
    """Parameters of a contract test; known failures must fail. Only the ``fast`` rows
    run in `make test`.

    :param fast: names of rows, by default the first row of each class.
    """
    fast, params = firsts(table) if fast is None else fast, []
    for name, row in table.items():
        cause = KNOWN_FAILURES.get((test, name))
        marks: list[Any] = (
            [pytest.mark.xfail(reason=cause, strict=True)] if cause else []
        )
        marks += [] if name in fast else [pytest.mark.slow]
        params.append(pytest.param(row, id=name, marks=marks))
    return params


# -- SG-MCMC kernels -------------------------------------------------------------------


class Truth(NamedTuple):
    """How a kernel meets the exact answers of ``tests/truth``.

    :param options: of the kernel, with a small step size: chains start at exact draws.
    :param chains: of ``truth.ways.chains``: warm-up, draws, minibatch, allowed bias.
    """

    options: Mapping[str, Any]
    chains: Mapping[str, Any] = {}


class KernelRow(NamedTuple):
    """A kernel, and what all tests of kernels have to know of it.

    :param usual: as users make it first: the class, with what it requires.
    :param options: those of the contract tests.
    :param momentum: whether it has the fields of such states, and so on.
    :param truth: of one row for each ``usual``.
    """

    usual: Callable[..., infer.SGMCMCKernel]
    options: Mapping[str, Any]
    truth: Truth | None = None
    momentum: bool = False
    exact: bool = False
    microcanonical: bool = False

    @property
    def make(self) -> Callable[..., infer.SGMCMCKernel]:
        """The kernel of the contract tests, as a function of its model."""
        return partial(self.usual, **self.options)


# Few steps per draw, every option at least once; all stages of the warm-up for one
# kernel of each kind.
_SHORT: dict[str, Any] = {"steps_per_draw": 3, "warm_start": 0.0}
_WARM = _SHORT | {"warm_start": 0.5}

# Steps with little bias, and as many per draw as chains need to forget their start.
_NOISY = {"allowed": 0.03, "minibatch": True}
_SLOW = {"warm_start": 0.0, "step_size": 5e-4, "steps_per_draw": 300}
_INERTIAL = {"warm_start": 0.0, "step_size": 1e-3, "steps_per_draw": 50}

KERNELS: dict[str, KernelRow] = {
    "SGLD": KernelRow(infer.SGLD, _WARM, Truth(_SLOW, _NOISY)),
    "PSGLD": KernelRow(
        infer.PSGLD,
        {"step_size": 1e-3} | _SHORT,
        Truth(_SLOW, {"warmup": 5, "draws": 100} | _NOISY),
    ),
    "PSGLD of the warm start": KernelRow(
        infer.PSGLD,
        {
            "step_size": infer.schedules.polynomial(1e-3),
            "preconditioner": "warm_start",
            **_WARM,
        },
    ),
    "SGHMC": KernelRow(
        infer.SGHMC,
        {"step_size": 1e-3} | _SHORT,
        Truth(_INERTIAL, _NOISY),
        momentum=True,
    ),
    "SGHMC with control variates": KernelRow(
        infer.SGHMC, {"gradient": "control_variates"} | _WARM, momentum=True
    ),
    "SGNHT": KernelRow(
        infer.SGNHT,
        {"minibatches": "epochs"} | _SHORT,
        Truth(_INERTIAL, _NOISY),
        momentum=True,
    ),
    "CyclicalSGLD": KernelRow(
        partial(infer.CyclicalSGLD, step_size=1e-3),
        {"cycle_length": 12, "draws_per_cycle": 2},
        Truth({"cycle_length": 400, "draws_per_cycle": 4}, _NOISY),
    ),
    "MALA": KernelRow(
        mala,
        _WARM,
        Truth({"step_size": 0.05, "warm_start": 0.0, "steps_per_draw": 20}),
        momentum=True,
        exact=True,
    ),
    "GHMC": KernelRow(
        infer.GHMC,
        {"step_size": 1e-3, "num_steps": 3, "momentum_decay": 0.5} | _SHORT,
        Truth(
            {"step_size": 0.1, "num_steps": 3, "warm_start": 0.0}
            | {"steps_per_draw": 5}
        ),
        momentum=True,
        exact=True,
    ),
    "MCLMC": KernelRow(
        infer.MCLMC,
        _WARM,
        Truth(
            {
                "warm_start": 0.0,
                "step_size": 0.025,
                "decoherence_length": 1.0,
                "steps_per_draw": 120,
            },
            {"allowed": 0.05, "minibatch": True},
        ),
        microcanonical=True,
    ),
    "MCLMC with noise preconditioning": KernelRow(
        infer.MCLMC,
        {
            "integrator": "leapfrog",
            "preconditioner": "gradient_noise",
            "decoherence_length": 2.0,
            "energy_variance": (0.1, 0.01),
            "steps_per_draw": 12,
        },
        microcanonical=True,
    ),
}
# Every kernel with its defaults, once.
USUAL = {name: row.usual for name, row in KERNELS.items() if row.truth is not None}

# -- symmetries ------------------------------------------------------------------------


class SymmetryRow(NamedTuple):
    """A symmetry, the shapes of the sites that have it, and the positive ones."""

    symmetry: symmetry.Symmetry
    shapes: Mapping[str, tuple[int, ...]]
    positive: tuple[str, ...] = ()


_DENSE = {"w": (3, 4), "b": (4,), "v": (4, 2)}
_HYPER = {"w": (3, 4), "v": (4, 2), "s": ()}

SYMMETRIES: dict[str, SymmetryRow] = {
    "Scale of units": SymmetryRow(symmetry.Scale([("w", 1), ("b", 0)]), _DENSE),
    "Scale of a layer": SymmetryRow(symmetry.Scale(["w", "b"]), _DENSE),
    "Scale of filters": SymmetryRow(symmetry.Scale([("w", -1)]), {"w": (2, 3, 2, 4)}),
    "Scale behind Flatten": SymmetryRow(
        symmetry.Scale([("w", 3), ("a", 0, 5)]), {"w": (2, 2, 1, 3), "a": (15,)}
    ),
    "Rescale": SymmetryRow(symmetry.Rescale([("w", 1), ("b", 0)], [("v", 0)]), _DENSE),
    "Rescale through Flatten": SymmetryRow(
        symmetry.Rescale([("w", 3), ("b", 0)], [("v", 0, 3)]),
        {"w": (2, 2, 1, 4), "b": (4,), "v": (12, 2)},
    ),
    "Rescale of a residual stream": SymmetryRow(
        symmetry.Rescale([("w", 1), ("r", 1)], [("r", 0), ("v", 0)]),
        {"w": (3, 4), "r": (4, 4), "v": (4, 2)},
    ),
    "JointScale": SymmetryRow(symmetry.JointScale(["w", "v"], "s"), _HYPER, ("s",)),
    "JointScale of a precision": SymmetryRow(
        symmetry.JointScale("w", "s", -2.0), _HYPER, ("s",)
    ),
    "JointScale non-centered": SymmetryRow(
        symmetry.JointScale([], "s"), _HYPER, ("s",)
    ),
    "JointRescale": SymmetryRow(
        symmetry.JointRescale("w", "v", [("s", 1.0)]), _HYPER, ("s",)
    ),
    "Shift of units": SymmetryRow(symmetry.Shift([("b", 0)]), _DENSE),
    "Shift of logits": SymmetryRow(symmetry.Shift("b"), _DENSE),
    "Shift of logits by input": SymmetryRow(symmetry.Shift([("w", 0)]), _DENSE),
    "SignFlip": SymmetryRow(symmetry.SignFlip([("w", 1), ("b", 0), ("v", 0)]), _DENSE),
    "SignFlip of a layer": SymmetryRow(symmetry.SignFlip(["w", "b", "v"]), _DENSE),
    "SignFlip of a residual stream": SymmetryRow(
        symmetry.SignFlip([("w", 1), ("r", 1), ("r", 0)]), {"w": (3, 4), "r": (4, 4)}
    ),
    "Permutation": SymmetryRow(
        symmetry.Permutation([("w", 1), ("b", 0), ("v", 0)]), _DENSE
    ),
    "Permutation through Flatten": SymmetryRow(
        symmetry.Permutation([("w", 3), ("v", 0, 3)]), {"w": (2, 2, 1, 4), "v": (12, 2)}
    ),
    "Permutation with hyper-parameters": SymmetryRow(
        symmetry.Permutation([("w", 1), ("v", 0), ("s", 0)]),
        {"w": (3, 4), "v": (4, 2), "s": (4,)},
        ("s",),
    ),
    "Permutation of a residual stream": SymmetryRow(
        symmetry.Permutation([("w", 1), ("r", 1), ("r", 0)]), {"w": (3, 4), "r": (4, 4)}
    ),
}


class NetRow(NamedTuple):
    """A network, and how many symmetries of each of ``NET_KINDS`` it has."""

    net: nn.Layer
    input_shape: tuple[int, ...]
    counts: tuple[int, int, int, int, int]


NET_KINDS = ("Scale", "Rescale", "Shift", "SignFlip", "Permutation")


def _mlp(activation: str, *counts: int, norm: nn.Layer | None = None) -> NetRow:
    return NetRow(nn.MLP([4, 3, 2], activation, norm), (3,), counts)


def _dense(layers: list[Any], *counts: int) -> NetRow:
    return NetRow(nn.Sequential([*layers, nn.Dense(2)]), (3,), counts)


def _cnn(*counts: int, **options: Any) -> NetRow:
    return NetRow(nn.CNN([3, 4], [5, 2], 3, **options), IMAGE, counts)


def _resnet(*counts: int, **options: Any) -> NetRow:
    return NetRow(nn.ResNet([3, 4], 2, **options), IMAGE, counts)


def _conv(layers: list[Any], *counts: int) -> NetRow:
    return NetRow(nn.Sequential([nn.Conv2d(3, 3), *layers, nn.Dense(2)]), IMAGE, counts)


def _before(norm: nn.Layer, activation: str, *counts: int) -> NetRow:
    """Pre-activation residual network."""
    block = nn.Residual(nn.Sequential([norm, activation, nn.Dense(4)]))
    return _dense([nn.Dense(4), block, block, norm, activation], *counts)


_BN = nn.BatchNorm
_LN = nn.LayerNorm
_RES = nn.Residual
_FOUR = nn.Dense(4)
_FLAT = nn.Flatten()
_MEAN_TANH: dict[str, Any] = {"pool": nn.AvgPool(2), "activation": "tanh"}
_ENDS_WITH_NORM = _RES(nn.Sequential([_BN(), "relu", _FOUR, _BN()]))

NETS: dict[str, NetRow] = {
    "linear": NetRow(nn.Dense(2), (3,), (0, 0, 0, 0, 0)),
    "MLP relu": _mlp("relu", 0, 2, 0, 0, 2),
    "MLP leaky relu": _mlp("leaky_relu", 0, 2, 0, 0, 2),
    "MLP tanh": _mlp("tanh", 0, 0, 0, 2, 2),
    "MLP erf": _mlp("erf", 0, 0, 0, 2, 2),
    "MLP identity": _mlp("identity", 0, 2, 0, 2, 2),
    **{f"MLP {a}": _mlp(a, 0, 0, 0, 0, 2) for a in ("softplus", "silu", "gelu")},
    "one hidden unit": NetRow(nn.MLP([1, 2], "relu"), (3,), (0, 1, 0, 0, 0)),
    "BatchNorm tanh": _mlp("tanh", 2, 0, 2, 4, 2, norm=_BN()),
    "BatchNorm tanh, no gain": _mlp("tanh", 2, 0, 2, 2, 2, norm=_BN(False)),
    "BatchNorm relu": _mlp("relu", 2, 2, 2, 2, 2, norm=_BN()),
    "BatchNorm relu, no gain or shift": _mlp(
        "relu", 2, 0, 2, 0, 2, norm=_BN(False, False)
    ),
    "BatchNorm softplus": _mlp("softplus", 2, 0, 2, 2, 2, norm=_BN()),
    # A shift of all units comes from the bias, and from every input.
    "LayerNorm tanh": _mlp("tanh", 2, 0, 4, 4, 2, norm=_LN()),
    "LayerNorm tanh, no gain": _mlp("tanh", 2, 0, 4, 2, 2, norm=_LN(False, False)),
    "LayerNorm relu": _mlp("relu", 2, 2, 4, 2, 2, norm=_LN()),
    "BatchNorm after relu": _dense([_FOUR, "relu", _BN()], 1, 1, 0, 1, 1),
    "BatchNorm, then LayerNorm": _dense([_FOUR, _BN(), _LN(), "tanh"], 2, 0, 2, 3, 1),
    "LayerNorm of the inputs": _dense([_LN(), "relu", _FOUR, "tanh"], 0, 1, 0, 1, 1),
    "CNN max": _cnn(0, 3, 0, 0, 3),
    # A maximum does not commute with a change of sign.
    "CNN max tanh": _cnn(0, 0, 0, 1, 3, activation="tanh"),
    "CNN average tanh": _cnn(0, 0, 0, 3, 3, **_MEAN_TANH),
    "CNN BatchNorm relu": _cnn(3, 3, 3, 3, 3, norm=_BN()),
    "CNN LayerNorm tanh, no gain": _cnn(3, 0, 6, 3, 3, norm=_LN(False), **_MEAN_TANH),
    "norms behind Flatten": _conv(
        [_FLAT, _BN(), "relu", _FOUR, _LN(), "relu"], 2, 2, 3, 2, 2
    ),
    # The contribution of an input pixel differs between pixels: only the bias shifts
    # all of them.
    "LayerNorm over pixels": _conv([_FLAT, _LN(), "relu"], 1, 1, 1, 1, 1),
    "LayerNorm after a maximum": _conv(
        [nn.MaxPool(2), _LN(False), "relu", _FLAT], 1, 0, 1, 0, 1
    ),
    # Residual stream and inside of the block, in each of two stages; five convolutions
    # feed a normalization.
    "ResNet": _resnet(0, 4, 0, 0, 4),
    "ResNet tanh": _resnet(0, 0, 0, 4, 4, activation="tanh"),
    "ResNet BatchNorm": _resnet(5, 4, 5, 5, 4, norm=_BN()),
    "ResNet LayerNorm": _resnet(5, 4, 10, 5, 4, norm=_LN()),
    "ResNet BatchNorm tanh, no gain": _resnet(
        5, 0, 5, 4, 4, activation="tanh", norm=_BN(False)
    ),
    # Three normalizations read one stream: its three biases shift, the outputs with
    # gains rescale and flip.
    "pre-activation BatchNorm": _before(_BN(), "relu", 1, 3, 3, 1, 1),
    "pre-activation LayerNorm tanh, no gain": _before(
        _LN(False), "tanh", 1, 0, 4, 1, 1
    ),
    "block that ends with BatchNorm": _dense(
        [_FOUR, _ENDS_WITH_NORM, _BN(), "relu"], 2, 2, 3, 2, 1
    ),
    "residual of a dense layer": _dense(
        [_FOUR, "relu", _RES(_FOUR), "relu"], 0, 1, 0, 0, 1
    ),
    "residual of BatchNorm": _dense([_FOUR, _RES(_BN()), "tanh"], 0, 0, 0, 1, 1),
    "residual of the inputs": _dense([_RES(nn.Dense(3)), "relu"], 0, 0, 0, 0, 0),
    "residual with projection": _dense(
        [_FOUR, "relu", _RES(nn.MLP([5, 6]), nn.Dense(6)), "relu"], 0, 3, 0, 0, 3
    ),
}
# Of each way to connect layers one: the others run in `make test-all`.
FAST_NETS = {
    *("linear", "MLP relu", "MLP tanh", "norms behind Flatten"),
    *("pre-activation LayerNorm tanh, no gain", "residual of the inputs"),
}


# -- wrappers --------------------------------------------------------------------------


class WrapperRow(NamedTuple):
    """A kernel around another one, or around a model that was transformed.

    :param model: name of a model of the zoo.
    :param make: the kernel, from a model and its arguments.
    :param stats: extra statistic -> its dimensions beyond chain and draw.
    """

    model: str
    make: Callable[..., Any]
    stats: Mapping[str, tuple[str, ...]] = {}


_ORBIT, _UNIT = {"orbit_accept_prob": ("symmetry",)}, {"unit_accept_prob": ()}
_HIDDEN = ("net/Dense_0.kernel", "net/Dense_0.bias")
_OUTPUT = ("net/Dense_1.kernel", "net/Dense_1.bias")
_UNITS = [(_HIDDEN[0], 1), (_HIDDEN[1], 0), (_OUTPUT[0], 0)]


def _nuts(model: Callable) -> Any:
    return NUTS(model, step_size=0.1, adapt_step_size=False, max_tree_depth=3)


def _mclmc(model: Callable) -> Any:
    return infer.MCLMC(model, steps_per_draw=3)


def _mala(model: Callable) -> Any:
    return mala(model, 1e-3, steps_per_draw=3, warm_start=0.0)


def _blackjax(model: Callable) -> Any:
    blackjax = import_module("blackjax")
    return infer.BlackJAX(model, blackjax.nuts, _white, max_num_doublings=3)


def _white(
    rng_key: Any, log_density: Callable, position: Any, num_steps: int
) -> tuple[Any, dict[str, Any], int]:
    """A warm-up that finds in no steps what the few of these tests would not."""
    size = sum(np.size(value) for value in position.values())
    metric = np.ones(size, np.float32)
    settings = {"step_size": 0.1, "inverse_mass_matrix": metric}
    return position, settings, 0


def _orbit(kernel: Any) -> Any:
    return infer.OrbitMoves(
        kernel, [symmetry.SignFlip(_UNITS), symmetry.Permutation(_UNITS)]
    )


def _unit(kernel: Any) -> Any:
    return infer.UnitMoves(kernel, {_HIDDEN[0]: -1, _HIDDEN[1]: 0}, num_moves=5)


def _gibbs(model: Callable, inner: Callable = _nuts) -> Any:
    return Gibbs([(infer.PrecisionGibbs(model), ["sigma"]), (inner(model), None)])


def _collapsed(model: Callable, args: tuple) -> Callable:
    return infer.collapse(model, list(_OUTPUT), *args)


WRAPPERS: dict[str, WrapperRow] = {
    "OrbitMoves around NUTS": WrapperRow(
        "network", lambda m, _: _orbit(_nuts(m)), _ORBIT
    ),
    "OrbitMoves around MALA": WrapperRow(
        "network", lambda m, _: _orbit(_mala(m)), _ORBIT
    ),
    "OrbitMoves around BlackJAX": WrapperRow(
        "network", lambda m, _: _orbit(_blackjax(m)), _ORBIT
    ),
    "UnitMoves around MCLMC": WrapperRow(
        "network", lambda m, _: _unit(_mclmc(m)), _UNIT
    ),
    "UnitMoves around NUTS": WrapperRow("network", lambda m, _: _unit(_nuts(m)), _UNIT),
    "UnitMoves around OrbitMoves": WrapperRow(
        "network", lambda m, _: _unit(_orbit(_nuts(m))), _UNIT
    ),
    "UnitMoves around Gibbs": WrapperRow(
        "spread", lambda m, _: infer.UnitMoves(_gibbs(m), {"w": 0}, num_moves=5), _UNIT
    ),
    "PrecisionGibbs beside NUTS": WrapperRow("spread", lambda m, _: _gibbs(m)),
    "PrecisionGibbs beside UnitMoves": WrapperRow(
        "spread",
        lambda m, _: _gibbs(
            m, lambda m: infer.UnitMoves(_nuts(m), {"w": 0}, num_moves=5)
        ),
    ),
    "collapse under NUTS": WrapperRow(
        "network", lambda m, args: _nuts(_collapsed(m, args))
    ),
    "collapse under MALA": WrapperRow(
        "network", lambda m, args: _mala(_collapsed(m, args))
    ),
    "collapse under BlackJAX": WrapperRow(
        "network", lambda m, args: _blackjax(_collapsed(m, args))
    ),
    "collapse under MCLMC": WrapperRow(
        "network", lambda m, args: _mclmc(_collapsed(m, args))
    ),
    "collapse under OrbitMoves": WrapperRow(
        "network",
        lambda m, args: infer.OrbitMoves(
            _nuts(_collapsed(m, args)), [symmetry.Permutation(_UNITS[:2])]
        ),
        _ORBIT,
    ),
    "collapse under ParallelTempering": WrapperRow(
        "network",
        lambda m, args: infer.ParallelTempering(_nuts(_collapsed(m, args)), 2),
    ),
}
# Each wrapper once, and each kind of inner kernel: the others run in `make test-all`.
FAST_WRAPPERS = (
    "OrbitMoves around MALA",
    "UnitMoves around Gibbs",
    "collapse under MALA",
)


# -- guides ----------------------------------------------------------------------------


class GuideRow(NamedTuple):
    """A guide as a function of the model and keywords such as ``prefix``, and the parts
    of the contract it lacks.

    :param make: a class of guides, or a ``partial`` of one.
    :param lacks: part of the contract -> why; the parts are the fields of ``PARTS``.
    """

    make: Callable[..., Any]
    lacks: Mapping[str, str] = {}


PARTS = {
    "density": "log q equals the change of variables by autodiff",
    "quantiles of bases": "quantiles of non-centered sites are those of their draws",
    "list": "can be a part of an AutoGuideList",
}

_OF_LAPLACE = {
    "list": "its precision needs the observation of the model",
    "density": (
        "it reads the model in each call, which uses up the noise that the test "
        "gives; test_laplace has it"
    ),
}

GUIDES: dict[str, GuideRow] = {
    "AutoADF": GuideRow(
        guides.AutoADF,
        {
            "list": "learns all sites at once, and needs the observation of the model",
            ("quantiles of bases"): (
                "it gives those of the weights; a base is the weight over its scale, "
                "each at q"
            ),
        },
    ),
    "AutoLaplace": GuideRow(guides.AutoLaplace, _OF_LAPLACE),
    "AutoLaplace low rank": GuideRow(
        partial(guides.AutoLaplace, structure="low_rank", rank=3), _OF_LAPLACE
    ),
    "AutoMeanField": GuideRow(guides.AutoMeanField),
    "AutoMeanField given scales": GuideRow(
        partial(guides.AutoMeanField, condition_on_scales=True)
    ),
    "AutoBlocks given scales": GuideRow(
        partial(
            guides.AutoBlocks,
            blocks={
                ("*_scale", "*kernel"): guides.FullRank(),
                "*.bias": guides.FullRank(),
            },
            condition_on_scales=True,
        )
    ),
    "AutoStructured": GuideRow(guides.AutoStructured),
    "AutoStructured low rank": GuideRow(
        partial(guides.AutoStructured, family=guides.LowRank(2), include_scales=True)
    ),
    "AutoStructured, one block": GuideRow(partial(guides.AutoStructured, blocks=["*"])),
    "AutoCoupling": GuideRow(partial(guides.AutoCoupling, num_flows=2, hidden=(4,))),
    "AutoCoupling of scales": GuideRow(
        partial(
            guides.AutoCoupling,
            blocks="*_scale",
            mask="random",
            condition_on_scales=True,
        )
    ),
}
