"""Warn of versions of jaxlib in which effects of groups are slow on CUDA."""

import re
import warnings
from typing import Any

import jax
import jaxlib
from jax import Array

from numpyro_bnn._checks import outside
from numpyro_bnn._jaxprs.walk import Equation, Follower
from numpyro_bnn._types import Arrays
from numpyro_bnn.program.plates import log_densities
from numpyro_bnn.program.posterior import Posterior

# Their scatter-add of many numbers into few is up to 2,000 times slower (jax#38806).
SLOW = (0, 10, 2), (0, 11, 0)
CROWDED = 4  # rows for each value from which on that is felt


def warn_of_slow_gathers(call: str, reading: Posterior) -> None:
    """Warn where gradients of few latent values, which many rows look up, are slow."""
    version = tuple(map(int, re.findall(r"\d+", jaxlib.__version__)[:3]))
    affected = SLOW[0] <= version <= SLOW[1]
    if affected and jax.default_backend() == "gpu" and _looks_up_few(reading):
        text = (
            f"jaxlib {jaxlib.__version__} on CUDA takes hundreds of times longer for "
            "gradients of effects that many rows share, such as `effect[group]`. "
            "Install jaxlib 0.11.1 or later."
        )
        warnings.warn(f"{call}: {text}", stacklevel=outside())


def _looks_up_few(reading: Posterior) -> bool:
    """Whether densities index a latent site with many more indices than it has rows."""
    crowded = False

    def densities(values: Arrays) -> list[Array]:
        return log_densities(reading.at(values))

    def visit(equation: Equation, *latent: bool) -> bool:
        nonlocal crowded
        if equation.name == "gather" and latent[0]:
            values, indices = (v.aval for v in equation.jaxpr_equation.invars[:2])
            numbers: Any = equation.params["dimension_numbers"]
            axes = numbers.start_index_map
            length = min((values.shape[axis] for axis in axes), default=1)
            count = indices.size // max(1, len(axes))
            # with batches each row looks up a value of its own, as a class does
            batched = numbers.operand_batching_dims
            crowded |= not batched and count >= CROWDED * length
        return any(latent)

    jaxpr = jax.make_jaxpr(densities)(reading.shapes()).jaxpr
    walk = Follower(visit, False, {"scan": Equation.descend})
    walk.follow(jaxpr, [True] * len(jaxpr.invars))
    return crowded
