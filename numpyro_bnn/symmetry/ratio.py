"""The density along an orbit: what every move and every decision about moves is made from."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from numpyro_bnn.symmetry.parts import Values
from numpyro_bnn.symmetry.prior import Prior, elementwise
from numpyro_bnn.symmetry.scaling import JointScale

if TYPE_CHECKING:
    from numpyro_bnn.symmetry.plan import Plan

__all__ = ["independent_draw", "log_ratio"]


def log_ratio(
    plan: "Plan", values: Mapping[str, jax.Array], moved: Values, g: jax.Array, prior: Prior
) -> jax.Array:
    """log p(g theta) - log p(theta) + log|det|: by unit (U,) or in total (1,)."""
    difference = _log_density(plan, {**values, **moved}, prior) - _log_density(plan, values, prior)
    jacobian = plan.symmetry.log_det(values, g)
    return difference + (jacobian if plan.by_unit else jnp.sum(jacobian)[None])


def _log_density(plan: "Plan", values: Mapping[str, jax.Array], prior: Prior) -> jax.Array:
    """Log density that a move changes."""
    if plan.by_unit:
        fns = prior.distributions(values)
        logs = [(part, elementwise(fns[part.site], values[part.site])) for part in plan.symmetry.parts]
        return sum((part.over_units(log) for part, log in logs if log is not None), jnp.zeros(plan.units))
    total = prior.total(values, plan.affected)
    return (total if plan.exact else total + prior.likelihood(values))[None]


def independent_draw(
    plan: "Plan", rng_key: jax.Array, values: Mapping[str, jax.Array], prior: Prior
) -> tuple[jax.Array, jax.Array]:
    """A group element independent of the place on the orbit, and the log ratio of its density there and here.

    A uniform order of units; or what takes a hyper-parameter s to a draw from its prior, whose density with respect
    to the Haar measure is p(s) s.
    """
    symmetry = plan.symmetry
    if not isinstance(symmetry, JointScale):
        return symmetry.random(rng_key, plan.units), jnp.zeros(())
    site = symmetry.scale[0].site
    hyperprior, now = prior.distributions(values)[site], values[site]
    then = jnp.reshape(hyperprior.sample(rng_key), jnp.shape(now))
    g = (jnp.log(then / now) / symmetry.power).reshape(1)
    return g, jnp.sum(hyperprior.log_prob(then) + jnp.log(then) - hyperprior.log_prob(now) - jnp.log(now))
