"""Draws along the orbits: exact where the conditional is known, Metropolis-Hastings elsewhere."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import lax, random

from numpyro_bnn.symmetry.base import Symmetry
from numpyro_bnn.symmetry.gig import log_gig
from numpyro_bnn.symmetry.parts import Values
from numpyro_bnn.symmetry.plan import Method, Plan
from numpyro_bnn.symmetry.prior import Prior, as_normal
from numpyro_bnn.symmetry.ratio import independent_draw, log_ratio
from numpyro_bnn.symmetry.scaling import Multiplicative

__all__ = ["EXACT", "move"]

STEPS = 5  # of a random walk with one unit
EXACT: frozenset[Method] = frozenset({"gig", "normal", "prior", "scale prior", "order"})


def move(
    plan: Plan, rng_key: jax.Array, values: Mapping[str, jax.Array], prior: Prior, width: jax.Array
) -> tuple[Values, jax.Array]:
    """One move along the orbits of a symmetry, for all its units.

    :param plan: what to do.
    :param values: constrained values of all latent sites.
    :param prior: the prior of the model for its arguments.
    :param width: standard deviation of the random walk on the group.
    :return: new values of the touched sites, and the mean acceptance probability.
    """
    if plan.method in EXACT:
        g = _exact(plan, rng_key, values, prior)
        return plan.symmetry.act(values, g), jnp.ones(())
    if plan.method in ("shuffle", "hyperprior"):
        return _independent(plan, rng_key, values, prior)
    if plan.method == "walk" and plan.units == 1:
        return _walk_on(plan, rng_key, values, prior, width)
    step = _flip if plan.method == "flip" else _walk
    if plan.by_unit or plan.units == 1:
        every = jnp.ones((plan.units,), bool)
        return step(plan, rng_key, values, prior, width, every)
    return _one_by_one(step, plan, rng_key, values, prior, width)


# -- exact conditionals -----------------------------------------------------------------------------


def _exact(plan: Plan, rng_key: jax.Array, values: Mapping, prior: Prior) -> jax.Array:
    symmetry = plan.symmetry
    if plan.method in ("order", "scale prior"):
        return independent_draw(plan, rng_key, values, prior)[0]
    fns = prior.distributions(values)
    if plan.method == "prior":
        part = symmetry.parts[0]
        value = values[part.site]
        drawn = jnp.broadcast_to(fns[part.site].sample(rng_key), value.shape)
        return part.over_units(drawn - value)
    if plan.method == "normal":
        return _normal_shift(symmetry, rng_key, values, fns)
    squares = {1.0: jnp.zeros(plan.units), -1.0: jnp.zeros(plan.units)}
    assert isinstance(symmetry, Multiplicative)
    for part, power in symmetry.powers:
        value = values[part.site]
        normal = as_normal(fns[part.site])
        assert normal is not None
        squares[power] = squares[power] + part.over_units((value / normal[1]) ** 2)
    g = 0.5 * log_gig(rng_key, symmetry.dimension(values) / 2, squares[1.0], squares[-1.0])
    return jnp.where(jnp.isfinite(g), g, 0.0)  # a unit of zeros has no scale to draw


def _normal_shift(symmetry: Symmetry, rng_key: jax.Array, values: Mapping, fns: Mapping) -> jax.Array:
    precision = weighted = jnp.zeros(symmetry.units(values))
    for part in symmetry.parts:
        value = values[part.site]
        loc, scale = as_normal(fns[part.site])  # type: ignore[misc]
        precision = precision + part.over_units(scale**-2.0)
        weighted = weighted + part.over_units((value - loc) / scale**2)
    noise = random.normal(rng_key, jnp.shape(precision), jnp.result_type(weighted))
    return -weighted / precision + noise / jnp.sqrt(precision)


# -- Metropolis-Hastings on the group -----------------------------------------------------------------


def _walk(
    plan: Plan, rng_key: jax.Array, values: Mapping, prior: Prior, width: jax.Array, moving: jax.Array
) -> tuple[Values, jax.Array]:
    normal_key, uniform_key = random.split(rng_key)
    size = moving.shape if plan.by_unit else (1,)
    noise = random.normal(normal_key, moving.shape), jnp.log(random.uniform(uniform_key, size))
    return _step(plan, noise, values, prior, width, moving)


def _step(
    plan: Plan, noise: tuple, values: Mapping, prior: Prior, width: jax.Array, moving: jax.Array
) -> tuple[Values, jax.Array]:
    g = jnp.where(moving, width * noise[0], 0)
    ratio = log_ratio(plan, values, plan.symmetry.act(values, g), g, prior)
    accepted = noise[1] < ratio
    return plan.symmetry.act(values, jnp.where(accepted, g, 0.0)), jnp.mean(_probability(ratio))


def _walk_on(
    plan: Plan, rng_key: jax.Array, values: Mapping, prior: Prior, width: jax.Array
) -> tuple[Values, jax.Array]:
    """Several steps: one number at a time costs little, and hyper-parameters gain from long moves."""
    normal_key, uniform_key = random.split(rng_key)
    noise = random.normal(normal_key, (STEPS, 1)), jnp.log(random.uniform(uniform_key, (STEPS, 1)))
    every = jnp.ones((1,), bool)

    def body(moved: Values, noise: tuple) -> tuple[Values, jax.Array]:
        return _step(plan, noise, {**values, **moved}, prior, width, every)

    start = {site: values[site] for site in dict.fromkeys(plan.symmetry.sites)}
    moved, accept_prob = lax.scan(body, start, noise)
    return moved, jnp.mean(accept_prob)


def _flip(
    plan: Plan, rng_key: jax.Array, values: Mapping, prior: Prior, width: jax.Array, moving: jax.Array
) -> tuple[Values, jax.Array]:
    g = jnp.where(moving, -1.0, 1.0)
    probability = jax.nn.sigmoid(log_ratio(plan, values, plan.symmetry.act(values, g), g, prior))
    flipped = random.bernoulli(rng_key, probability)
    return plan.symmetry.act(values, jnp.where(flipped, g, 1.0)), jnp.mean(probability)


def _independent(plan: Plan, rng_key: jax.Array, values: Mapping, prior: Prior) -> tuple[Values, jax.Array]:
    """Propose without regard to the place on the orbit."""
    propose_key, accept_key = random.split(rng_key)
    g, proposal = independent_draw(plan, propose_key, values, prior)
    ratio = log_ratio(plan._replace(by_unit=False), values, plan.symmetry.act(values, g), g, prior) - proposal
    accepted = jnp.log(random.uniform(accept_key, ratio.shape)) < ratio
    identity = jnp.arange(plan.units) if plan.method == "shuffle" else 0.0
    return plan.symmetry.act(values, jnp.where(accepted, g, identity)), jnp.mean(_probability(ratio))


def _one_by_one(
    step: Callable, plan: Plan, rng_key: jax.Array, values: Mapping, prior: Prior, width: jax.Array
) -> tuple[Values, jax.Array]:
    """Units that share a factor of the density, one after the other."""

    def body(moved: Values, unit: jax.Array) -> tuple[Values, jax.Array]:
        only = jnp.arange(plan.units) == unit
        return step(plan, random.fold_in(rng_key, unit), {**values, **moved}, prior, width, only)

    start = {site: values[site] for site in dict.fromkeys(plan.symmetry.sites)}
    moved, accept_prob = lax.scan(body, start, jnp.arange(plan.units))
    return moved, jnp.mean(accept_prob)


def _probability(log_ratio: jax.Array) -> jax.Array:
    return jnp.exp(jnp.minimum(log_ratio, 0))
