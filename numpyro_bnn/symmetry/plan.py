"""How to move along the orbits of a symmetry in a given model: decided once, from a trace."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_bnn.symmetry.additive import Shift
from numpyro_bnn.symmetry.base import Symmetry
from numpyro_bnn.symmetry.discrete import Permutation, SignFlip
from numpyro_bnn.symmetry.prior import Prior, as_normal
from numpyro_bnn.symmetry.ratio import independent_draw, log_ratio
from numpyro_bnn.symmetry.scaling import JointScale, Rescale, Scale
from numpyro_bnn.symmetry.survey import Survey, elements, in_latent, survey

__all__ = ["Method", "Plan", "plan", "plan_in"]

# What an independent proposal becomes where nothing has to be corrected.
ALWAYS_ACCEPTED: dict[str, "Method"] = {"hyperprior": "scale prior", "shuffle": "order"}
Method = Literal["gig", "normal", "prior", "scale prior", "order", "hyperprior", "shuffle", "flip", "walk"]


class Plan(NamedTuple):
    """A symmetry on the latent sites of a model.

    :param symmetry: with the names of the latent sites.
    :param method: exact draws: ``"gig"`` (chi and generalized inverse Gaussian), ``"normal"``, ``"prior"``,
        ``"scale prior"`` (the hyperprior, for weights that are a scale family), ``"order"`` (a uniform order, for
        exchangeable priors), ``"flip"`` (signs); independent proposals that are corrected: ``"hyperprior"``,
        ``"shuffle"``; ``"walk"``: Metropolis-Hastings on the group.
    :param by_unit: whether the prior splits into factors by unit, so that units move independently.
    :param affected: sites whose log density may change.
    :param units: number of units U.
    :param exact: whether the likelihood is left out of the ratio.
    """

    symmetry: Symmetry
    method: Method
    by_unit: bool
    affected: tuple[str, ...]
    units: int
    exact: bool = True


def plan(
    model: Callable,
    symmetries: Sequence[Symmetry],
    args: tuple = (),
    kwargs: Mapping[str, Any] | None = None,
    exact: bool = True,
) -> tuple[Plan, ...]:
    """Choose for every symmetry how its orbits are moved along in this model.

    :param model: a NumPyro model.
    :param symmetries: their sites are parameters of the model, centered or not.
    :param args: positional arguments of the model.
    :param kwargs: its keyword arguments.
    :param exact: leave the likelihood out; otherwise it enters every ratio.
    :raises ValueError: for unknown sites, parts with different numbers of units.

    >>> import numpyro, numpyro.distributions as dist
    >>> def model():
    ...     numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3, 2]).to_event(2))
    >>> plan(model, [Scale([("w", 1)])])[0].method
    'gig'
    """
    return plan_in(survey(model, args, kwargs), symmetries, exact)


def plan_in(found: Survey, symmetries: Sequence[Symmetry], exact: bool = True) -> tuple[Plan, ...]:
    """The same for a model that has been read."""
    return tuple(_plan_of(in_latent(symmetry, found), found, exact) for symmetry in symmetries)


def _plan_of(symmetry: Symmetry, found: Survey, exact: bool) -> Plan:
    draws, prior = found.draws, found.prior
    units = symmetry.units(draws[0])
    touched = set(symmetry.sites)
    affected = touched | prior.children(touched)
    distinct = len(touched) == len(symmetry.parts)
    logs = jax.eval_shape(lambda values: elements(prior, values), draws[0])
    by_unit = exact and affected == touched and distinct and all(logs[site] is not None for site in touched)
    free = by_unit and not prior.children(touched)  # the distributions of the moving sites stand still
    method = _method(symmetry, prior, draws, free)
    chosen = Plan(symmetry, method, by_unit, tuple(sorted(affected)), units, exact)
    if exact and method in ALWAYS_ACCEPTED and _always_accepted(chosen, prior, draws):
        return chosen._replace(method=ALWAYS_ACCEPTED[method])
    return chosen


def _always_accepted(plan: Plan, prior: Prior, draws: list[dict]) -> bool:
    """Whether the ratio of an independent proposal is 1, up to rounding, at draws from the prior."""

    @jax.jit
    def log_correction(rng_key: jax.Array, values: dict) -> jax.Array:
        g, proposal = independent_draw(plan, rng_key, values, prior)
        moved = plan.symmetry.act(values, g)
        size = 1 + sum(jnp.abs(prior.total(point, plan.affected)) for point in (values, {**values, **moved}))
        return (log_ratio(plan._replace(by_unit=False), values, moved, g, prior)[0] - proposal) / size

    keys = [jax.random.key(i) for i in range(len(draws))]
    return all(abs(log_correction(key, values)) < 1e-5 for key, values in zip(keys, draws, strict=True))


def _method(symmetry: Symmetry, prior: Prior, draws: list[dict], free: bool) -> Method:
    if isinstance(symmetry, SignFlip):
        return "flip"
    if isinstance(symmetry, Permutation):
        return "shuffle"
    if isinstance(symmetry, JointScale):
        hyper = symmetry.scale[0].site
        scalar = jnp.size(draws[0][hyper]) == 1
        return "hyperprior" if scalar and hyper not in prior.children(set(symmetry.sites)) else "walk"
    if not free:
        return "walk"
    if isinstance(symmetry, Shift) and len(symmetry.parts) == 1:
        part = symmetry.parts[0]
        if part.per_unit(jnp.shape(draws[0][part.site])) == 1:
            return "prior"
    locations = [_locations(symmetry, prior, values) for values in draws]
    if any(location is None for by_site in locations for location in by_site.values()):
        return "walk"
    if isinstance(symmetry, Shift):
        return "normal"
    centered = all(
        np.all(np.asarray(location) == 0) for by_site in locations for location in by_site.values()
    )
    return "gig" if centered and isinstance(symmetry, Scale | Rescale) else "walk"


def _locations(symmetry: Symmetry, prior: Prior, values: dict) -> dict[str, jax.Array | None]:
    """Means of normal sites; ``None`` for other families."""

    def locations(values: dict) -> dict[str, jax.Array | None]:
        fns = prior.distributions(values)
        normals = {site: as_normal(fns[site]) for site in symmetry.sites}
        return {site: None if normal is None else normal[0] for site, normal in normals.items()}

    return jax.jit(locations)(values)
