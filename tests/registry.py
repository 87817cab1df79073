"""Registries of the contract tests: one table per kind. A new layer or prior is one row and inherits every test."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpyro.distributions as dist
import pytest

from numpyro_bnn import infer, nn, priors


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

PRIORS: dict[str, PriorRow] = {
    "Normal": PriorRow(priors.Normal(2.0)),
    "Normal without scaling": PriorRow(priors.Normal(0.5, fan_in_scaling=False)),
    "Laplace": PriorRow(priors.Laplace(1.5)),
    "StudentT": PriorRow(priors.StudentT(4.0, 0.7)),
    "ScaleMixture": PriorRow(priors.ScaleMixture(0.3, 1.0, 0.1)),
    "Hierarchical": PriorRow(priors.Hierarchical(), {"scale": ()}),
    "Hierarchical centred": PriorRow(priors.Hierarchical(dist.Gamma(3.0, 2.0), centered=True), {"scale": ()}),
    "ARD": PriorRow(priors.ARD(), {"scale": (4,)}),
    "ARD centred": PriorRow(priors.ARD(dist.Uniform(0.5, 1.5), centered=True), {"scale": (4,)}),
    "GammaPrecision": PriorRow(priors.GammaPrecision(0.5, 3.0), {"precision": ()}),
    "GammaPrecision centred": PriorRow(priors.GammaPrecision(0.5, 3.0, centered=True), {"precision": ()}),
    "Horseshoe": PriorRow(priors.Horseshoe(0.5), {"global": (), "local": (4, 3)}),
    "Horseshoe of inputs": PriorRow(priors.Horseshoe(unit="input"), {"global": (), "local": (4,)}),
    "Horseshoe of outputs, centred": PriorRow(
        priors.Horseshoe(unit="output", centered=True), {"global": (), "local": (3,)}
    ),
    "RegularizedHorseshoe": PriorRow(
        priors.RegularizedHorseshoe(), {"global": (), "local": (4, 3), "slab": ()}
    ),
    "GPFilters": PriorRow(
        priors.GPFilters(dist.HalfNormal(1.0), dist.LogNormal(0.0, 0.3), other=priors.Normal(2.0))
    ),
    "GPFilters centred": PriorRow(priors.GPFilters(1.0, 2.0, "matern32", centered=True)),
    "BySite": PriorRow(
        priors.BySite({"*kernel": priors.Hierarchical()}, default=priors.Normal()), {"scale": ()}
    ),
}

# (test, row): cause. A row that no longer fails, or that names no test or no row, fails the suite.
KNOWN_FAILURES: dict[tuple[str, str], str] = {
    ("test_prior_takes_equinox_convolutions", "GPFilters"): (
        "refuses kernels (out, in, h, w): its grid is the first two axes of a Flax kernel"
    ),
    ("test_prior_takes_equinox_convolutions", "GPFilters centred"): (
        "refuses kernels (out, in, h, w): its grid is the first two axes of a Flax kernel"
    ),
}


def rows(table: Mapping[str, Any], test: str) -> list[Any]:
    """Parameters of a contract test; what is known to fail must fail."""
    params = []
    for name, row in table.items():
        cause = KNOWN_FAILURES.get((test, name))
        marks = [pytest.mark.xfail(reason=cause, strict=True)] if cause else []
        params.append(pytest.param(row, id=name, marks=marks))
    return params


# -- SG-MCMC kernels --------------------------------------------------------------------------------


class KernelRow(NamedTuple):
    """A kernel as a function of its model, and what its states hold beside the common fields."""

    make: Callable[..., infer.SGMCMCKernel]
    momentum: bool = False
    exact: bool = False


# Few steps per draw, all stages of the warm-up, every option at least once.
_SHORT: dict[str, Any] = {"steps_per_draw": 3, "warm_start": 0.5}

KERNELS: dict[str, KernelRow] = {
    "SGLD": KernelRow(partial(infer.SGLD, **_SHORT)),
    "SGLD with SVRG": KernelRow(
        partial(infer.SGLD, step_size=1e-3, gradient="svrg", minibatches="epochs", steps_per_draw=3)
    ),
    "PSGLD": KernelRow(partial(infer.PSGLD, step_size=1e-3, **_SHORT)),
    "PSGLD of the warm start": KernelRow(
        partial(
            infer.PSGLD, step_size=infer.schedules.polynomial(1e-3), preconditioner="warm_start", **_SHORT
        )
    ),
    "SGHMC": KernelRow(partial(infer.SGHMC, step_size=1e-3, **_SHORT), momentum=True),
    "SGHMC with control variates": KernelRow(
        partial(infer.SGHMC, splitting="OBABO", gradient="control_variates", **_SHORT), momentum=True
    ),
    "SGNHT": KernelRow(partial(infer.SGNHT, minibatches="epochs", **_SHORT), momentum=True),
    "CyclicalSGLD": KernelRow(
        partial(infer.CyclicalSGLD, step_size=1e-3, cycle_length=12, draws_per_cycle=2)
    ),
    "MALA": KernelRow(partial(infer.MALA, **_SHORT), exact=True),
    "GGMC": KernelRow(partial(infer.GGMC, num_steps=2, **_SHORT), momentum=True, exact=True),
}
