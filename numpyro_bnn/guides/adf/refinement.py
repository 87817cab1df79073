"""Refinement of the prior: the approximate factor N(w; loc, (scale h^power)^2) of every weight, once per epoch."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from numpyro_bnn.guides.adf.others import Other
from numpyro_bnn.guides.adf.sites import Weight
from numpyro_bnn.guides.adf.updates import Gamma, gamma_update, gaussian_update, normal_log_density
from numpyro_bnn.moments import Gaussian

__all__ = ["Factor", "refine_gamma", "refine_normal"]

# A cavity wider than this many prior variances says nothing: the factor is left as it is.
WIDEST = 1e6
# Grids on which the posterior of a scale is found: each narrower than the last.
GRIDS, POINTS, WIDTHS = 3, 64, 8.0


class Factor(NamedTuple):
    """Approximate prior factor of weights, by natural parameters: exp(-precision w^2 / 2 + shift w).

    ``concentration`` and ``rate`` are its share in the Gamma of the precision that scales the weights.
    """

    precision: jax.Array
    shift: jax.Array
    concentration: jax.Array
    rate: jax.Array


class _Flat(NamedTuple):
    """All weights of one hyper-site, one after the other."""

    weights: Gaussian
    factor: Factor
    loc: jax.Array
    scale: jax.Array
    element: jax.Array


def _flatten(names: Sequence[str], sites: Mapping[str, Weight], weights: Any, factors: Any) -> _Flat:
    def join(parts: Sequence[Any]) -> jax.Array:
        return jnp.concatenate([jnp.ravel(part) for part in parts])

    return _Flat(
        jax.tree.map(lambda *p: join(p), *(weights[n] for n in names)),
        jax.tree.map(lambda *p: join(p), *(factors[n] for n in names)),
        join([sites[n].loc for n in names]),
        join([sites[n].scale for n in names]),
        join([sites[n].element for n in names]),
    )


def _unflatten(flat: Any, names: Sequence[str], sites: Mapping[str, Weight]) -> dict[str, Any]:
    ends = np.cumsum([sites[name].loc.size for name in names])
    found = {}
    for name, end in zip(names, ends, strict=True):
        weight = sites[name]
        part = slice(int(end) - weight.loc.size, int(end))
        found[name] = jax.tree.map(lambda leaf, p=part, w=weight: leaf[p].reshape(w.loc.shape), flat)
    return found


def refine_gamma(
    names: Sequence[str], sites: Mapping[str, Weight], weights: Any, factors: Any, state: Gamma
) -> tuple[dict[str, Gaussian], dict[str, Factor], Gamma]:
    """Weight after weight, as published: all share the Gamma of their precision.

    Reference: Hernandez-Lobato & Adams (2015), section 3.2 and supplement.
    """
    flat = _flatten(names, sites, weights, factors)
    shape = state.concentration.shape
    carry = Gamma(*(jnp.ravel(part) for part in state))

    def body(gamma: Gamma, one: _Flat) -> tuple[Gamma, tuple[Gaussian, Factor]]:
        current = Gamma(*(part[one.element] for part in gamma))
        new, factor, updated = _refine_one(one, current)
        gamma = Gamma(*(whole.at[one.element].set(part) for whole, part in zip(gamma, updated, strict=True)))
        return gamma, (new, factor)

    carry, (new, factor) = lax.scan(body, carry, flat)
    return (
        _unflatten(new, names, sites),
        _unflatten(factor, names, sites),
        Gamma(*(part.reshape(shape) for part in carry)),
    )


def _refine_one(one: _Flat, gamma: Gamma) -> tuple[Gaussian, Factor, Gamma]:
    weight, factor = one.weights, one.factor
    precision = 1 / weight.var - factor.precision
    mean = (weight.mean / weight.var - factor.shift) / precision
    cavity = Gaussian(mean, 1 / precision)
    rest = Gamma(gamma.concentration - factor.concentration, gamma.rate - factor.rate)
    unit = one.scale * one.scale

    def log_z(cavity: Gaussian, order: int) -> jax.Array:
        return normal_log_density(cavity.mean - one.loc, cavity.var + unit * rest.variance(order))

    new, refused = gaussian_update(cavity, jax.grad(log_z)(cavity, 0))
    updated = gamma_update(rest, jnp.stack([log_z(cavity, order) for order in range(3)]))
    good = (
        (cavity.var > 0)
        & (rest.rate > 0)
        & (rest.concentration > 1)
        & (cavity.var < WIDEST * unit)
        & ~refused
    )
    good &= jnp.isfinite(mean)
    share = Factor(
        1 / new.var - precision,
        new.mean / new.var - mean * precision,
        updated.concentration - rest.concentration,
        updated.rate - rest.rate,
    )

    def keep(old: Any, new: Any) -> Any:
        return jax.tree.map(lambda a, b: jnp.where(good, b, a), old, new)

    return keep(weight, new), keep(factor, share), keep(gamma, updated)


def refine_normal(
    names: Sequence[str], sites: Mapping[str, Weight], weights: Any, factors: Any, other: Other
) -> tuple[dict[str, Gaussian], dict[str, Factor], Gaussian]:
    r"""All weights of a scale at once, for a scale with any prior.

    Given the cavities N(m_i, v_i) the posterior of u, the scale in unconstrained space, is one-dimensional,

    .. math:: q(u) \propto p(u) \prod_i N(m_i;\, loc_i,\, v_i + s_i(u)^2),

    and is summed on a grid; the weights get the moments of their posterior averaged over it.
    """
    flat = _flatten(names, sites, weights, factors)
    power = {sites[name].power for name in names}
    powers = (
        jnp.concatenate([jnp.full(sites[n].loc.size, sites[n].power) for n in names])
        if len(power) > 1
        else power.pop()
    )
    precision = 1 / flat.weights.var - flat.factor.precision
    good = precision * flat.scale**2 * WIDEST > 1
    precision = jnp.where(good, precision, 1.0)
    mean = (flat.weights.mean / flat.weights.var - flat.factor.shift) / precision
    start = Gaussian(*map(jnp.asarray, other.prior))
    count = max(1, int(np.prod(start.mean.shape)))

    def prior_var(u: jax.Array) -> jax.Array:
        """(G, count) -> (G, P)."""
        value = other.transform(u)[:, flat.element]
        return (flat.scale * value**powers) ** 2

    def log_posterior(u: jax.Array) -> jax.Array:
        terms = normal_log_density(mean - flat.loc, 1 / precision + prior_var(u))
        sums = jax.ops.segment_sum(jnp.where(good, terms, 0.0).T, flat.element, count).T
        shaped = u.reshape((-1, *start.mean.shape))
        return sums + other.log_prior(shaped).reshape(u.shape)

    center, half = start.mean.reshape(-1), WIDTHS * jnp.sqrt(start.var.reshape(-1))
    for _ in range(GRIDS):
        u = center + half * jnp.linspace(-1.0, 1.0, POINTS)[:, None]
        share = jax.nn.softmax(log_posterior(u), axis=0)
        center = (share * u).sum(axis=0)
        var = (share * (u - center) ** 2).sum(axis=0)
        spacing = 2 * half / (POINTS - 1)
        half = WIDTHS * jnp.maximum(jnp.sqrt(var), spacing / 2)
    given = prior_var(u)
    tilted_var = 1 / (precision + 1 / given)
    tilted_mean = tilted_var * (precision * mean + flat.loc / given)
    at = share[:, flat.element]
    new_mean = (at * tilted_mean).sum(axis=0)
    new_var = (at * (tilted_var + (tilted_mean - new_mean) ** 2)).sum(axis=0)
    new = Gaussian(jnp.where(good, new_mean, flat.weights.mean), jnp.where(good, new_var, flat.weights.var))
    updated = Factor(
        1 / new.var - precision,
        new.mean / new.var - mean * precision,
        flat.factor.concentration,
        flat.factor.rate,
    )
    factor = jax.tree.map(lambda a, b: jnp.where(good, b, a), flat.factor, updated)
    state = Gaussian(center.reshape(start.mean.shape), var.reshape(start.mean.shape))
    return _unflatten(new, names, sites), _unflatten(factor, names, sites), state
