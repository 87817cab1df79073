"""Between the state of learning, the parameters of the guide, and values of the model's sites."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.special import gammainc

from numpyro_bnn.guides.adf.others import Other
from numpyro_bnn.guides.adf.problem import ADFState
from numpyro_bnn.guides.adf.sites import Weight
from numpyro_bnn.guides.adf.updates import Gamma
from numpyro_bnn.moments import Gaussian

__all__ = [
    "from_params",
    "gamma_quantile",
    "map_samples",
    "other_distribution",
    "prior_scale",
    "quantile",
    "to_params",
]

FIELDS = {"gamma": ("concentration", "rate"), "normal": ("loc", "scale")}


def to_params(state: ADFState, prefix: str) -> dict[str, jax.Array]:
    """Parameters ``<site>_<prefix>_loc`` and ``_scale``, for Gamma sites ``_concentration`` and ``_rate``."""
    params: dict[str, jax.Array] = {}
    for name, value in {**state.others, **state.weights}.items():
        gamma = isinstance(value, Gamma)
        fields = FIELDS["gamma" if gamma else "normal"]
        parts = value if gamma else (value.mean, jnp.sqrt(value.var))
        params |= {f"{name}_{prefix}_{field}": part for field, part in zip(fields, parts, strict=True)}
    return params


def from_params(
    params: Mapping[str, Any], weights: Mapping[str, Weight], others: Mapping[str, Other], prefix: str
) -> ADFState:
    """The state, without approximate prior factors, from parameters."""

    def read(name: str, kind: str) -> Any:
        first, second = (jnp.asarray(params[f"{name}_{prefix}_{field}"], float) for field in FIELDS[kind])
        return Gamma(first, second) if kind == "gamma" else Gaussian(first, second * second)

    return ADFState(
        {name: read(name, "normal") for name in weights},
        {name: read(name, o.kind) for name, o in others.items()},
        {},
    )


def other_distribution(other: Other, state: Any) -> dist.Distribution:
    """Posterior of a site that is no weight."""
    if isinstance(state, Gamma):
        return dist.Gamma(state.concentration, state.rate)
    return dist.TransformedDistribution(dist.Normal(state.mean, jnp.sqrt(state.var)), other.transform)


def prior_scale(weight: Weight, values: Mapping[str, Any]) -> jax.Array:
    """Prior sd of a weight at a value of its hyper-site."""
    scale = jnp.asarray(weight.scale, float)
    if weight.hyper is None:
        return scale
    return scale * jnp.ravel(values[weight.hyper])[weight.element] ** weight.power


def gamma_quantile(gamma: Gamma, probability: jax.Array) -> jax.Array:
    """Inverse cdf of a Gamma distribution, by bisection of log x.

    >>> round(float(gamma_quantile(Gamma(jnp.array(1.0), jnp.array(2.0)), 1 - jnp.exp(-1.0))), 4)
    0.5
    """
    a = gamma.concentration
    low, high = jnp.log(a) - 20.0 - 20.0 / a, jnp.log(a) + 5.0 + jnp.log1p(20.0 / a)
    low, high = jnp.broadcast_arrays(low, high + 0.0 * probability)
    low = low + jnp.zeros_like(high)

    def halve(_: int, ends: tuple) -> tuple:
        low, high = ends
        middle = 0.5 * (low + high)
        below = gammainc(a, jnp.exp(middle)) < probability
        return jnp.where(below, middle, low), jnp.where(below, high, middle)

    low, high = jax.lax.fori_loop(0, 80, halve, (low, high))
    return jnp.exp(0.5 * (low + high)) / gamma.rate


def quantile(other: Other, state: Any, probability: jax.Array) -> jax.Array:
    """Quantile of a site that is no weight; ``probability`` broadcasts against it."""
    if isinstance(state, Gamma):
        return gamma_quantile(state, probability)
    z = jax.scipy.special.ndtri(probability)
    return other.transform(state.mean + z * jnp.sqrt(state.var))


def map_samples(fn: Callable, samples: Mapping[str, Any], sample_shape: tuple[int, ...]) -> dict[str, Any]:
    """Apply ``fn`` to every sample of a dictionary, one at a time."""
    if not sample_shape:
        return fn(samples)
    ndim = len(sample_shape)
    flat = {name: value.reshape((-1, *value.shape[ndim:])) for name, value in samples.items()}
    return jax.tree.map(lambda leaf: leaf.reshape(sample_shape + leaf.shape[1:]), jax.lax.map(fn, flat))
