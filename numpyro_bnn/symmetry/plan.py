"""How to move along the orbits of a symmetry in a given model: decided once, from a trace."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.infer.initialization import init_to_sample

from numpyro_bnn._dependence import pruned
from numpyro_bnn._errors import argument_error, unknown_name
from numpyro_bnn._plates import full_plates
from numpyro_bnn.symmetry.additive import Shift
from numpyro_bnn.symmetry.base import Symmetry
from numpyro_bnn.symmetry.discrete import Permutation, SignFlip
from numpyro_bnn.symmetry.prior import CONDITIONED, Prior, as_normal, elementwise, prior_sites, unwrapped
from numpyro_bnn.symmetry.ratio import hyperprior_draw, log_ratio
from numpyro_bnn.symmetry.scaling import JointRescale, JointScale, Rescale, Scale

__all__ = ["Method", "Plan", "plan", "prior_draws", "resolve"]

CALL = "symmetry.plan"
# What an independent proposal becomes where nothing has to be corrected.
ALWAYS_ACCEPTED: dict[str, "Method"] = {"hyperprior": "scale prior", "shuffle": "order"}
Method = Literal["gig", "normal", "prior", "scale prior", "order", "hyperprior", "shuffle", "flip", "walk"]


class Plan(NamedTuple):
    """A symmetry on the latent sites of a model.

    :param symmetry: with the names of the latent sites.
    :param method: exact draws: ``"gig"`` (chi and generalised inverse Gaussian), ``"normal"``, ``"prior"``,
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


class Site(NamedTuple):
    """What is known of a site without its value."""

    kind: str
    observed: bool
    infer: Mapping[str, Any]
    family: Any


def prior_draws(
    model: Callable, args: tuple, kwargs: Mapping[str, Any] | None, seeds: Sequence[int]
) -> tuple[dict[str, Site], list[dict[str, jax.Array]]]:
    """The sites of a model on all its data, and draws of its latent sites from the prior."""
    held = (kwargs or {}).get(CONDITIONED, {})
    sites: dict[str, Site] = {}

    def draw(seed: jax.Array) -> dict[str, jax.Array]:
        start = handlers.substitute(handlers.seed(full_plates(model), seed), substitute_fn=init_to_sample)
        traced = handlers.trace(start).get_trace(*args, **(kwargs or {}))
        for name, site in traced.items():
            family = type(unwrapped(site["fn"])) if site["type"] == "sample" else type(None)
            sites[name] = Site(site["type"], site.get("is_observed", False), site.get("infer") or {}, family)
        names = [name for name in prior_sites(traced, kwargs) if name not in held]
        return {name: jnp.asarray(traced[name]["value"]) for name in names}

    # One compiled program without the likelihood, instead of every operation by itself.
    program = jax.jit(pruned(draw, jnp.uint32(0)))
    return sites, [program(jnp.uint32(seed)) for seed in seeds]


def resolve(symmetry: Symmetry, sites: Mapping[str, Site], latent: Sequence[str]) -> Symmetry:
    """Write a symmetry of parameters in terms of latent sites.

    A non-centred parameter ``w`` = s * ``w_base`` moves by its ``w_base``; under a joint scale the base stays.

    :raises ValueError: for a site that the model does not have, or does not sample.
    """
    names = {}
    for site in symmetry.sites:
        if site in latent:
            continue
        base = f"{site}_base"
        if base not in latent or site not in sites:
            if site in sites:
                raise argument_error(
                    f"symmetry.{type(symmetry).__name__}",
                    "site",
                    f"{site!r}, which is {sites[site].kind} and not sampled here",
                    f"Name latent sites: {', '.join(latent)}.",
                )
            raise unknown_name(f"symmetry.{type(symmetry).__name__}", "site", site, latent)
        names[site] = base
    if isinstance(symmetry, JointScale | JointRescale):
        return symmetry.without(names)
    return symmetry.rename(names)


def plan(
    model: Callable,
    symmetries: Sequence[Symmetry],
    args: tuple = (),
    kwargs: Mapping[str, Any] | None = None,
    exact: bool = True,
) -> tuple[Plan, ...]:
    """Choose for every symmetry how its orbits are moved along in this model.

    :param model: a NumPyro model.
    :param symmetries: their sites are parameters of the model; see :func:`resolve` for non-centred ones.
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
    sites, draws = prior_draws(model, args, kwargs, (0, 1))
    latent = tuple(draws[0])
    prior = Prior(model, draws[0], args, kwargs)
    plans = []
    for symmetry in symmetries:
        resolved = resolve(symmetry, sites, latent)
        if isinstance(resolved, Permutation):
            resolved = with_hyper_sites(resolved, prior, draws)
        plans.append(_plan_of(resolved, prior, draws, exact))
    return tuple(plans)


def _plan_of(symmetry: Symmetry, prior: Prior, draws: list[dict], exact: bool) -> Plan:
    units = symmetry.units(draws[0])
    touched = set(symmetry.sites)
    affected = touched | prior.children(touched)
    distinct = len(touched) == len(symmetry.parts)
    elements = jax.eval_shape(lambda values: _elements(prior, values), draws[0])
    by_unit = (
        exact and affected == touched and distinct and all(elements[site] is not None for site in touched)
    )
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
        if plan.method == "shuffle":
            g, proposal = plan.symmetry.random(rng_key, plan.units), jnp.zeros(())
        else:
            g, proposal = hyperprior_draw(plan, rng_key, values, prior)
        moved = plan.symmetry.act(values, g)
        size = 1 + sum(jnp.abs(prior.total(point, plan.affected)) for point in (values, {**values, **moved}))
        return (log_ratio(plan._replace(by_unit=False), values, moved, g, prior)[0] - proposal) / size

    keys = [jax.random.key(i) for i in range(len(draws))]
    return all(abs(log_correction(key, values)) < 1e-5 for key, values in zip(keys, draws, strict=True))


def _elements(prior: Prior, values: dict) -> dict[str, jax.Array | None]:
    fns = prior.distributions(values)
    return {name: elementwise(fns[name], value) for name, value in values.items()}


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
    centred = all(np.all(np.asarray(location) == 0) for by_site in locations for location in by_site.values())
    return "gig" if centred and isinstance(symmetry, Scale | Rescale) else "walk"


def _locations(symmetry: Symmetry, prior: Prior, values: dict) -> dict[str, jax.Array | None]:
    """Means of normal sites; ``None`` for other families."""

    def locations(values: dict) -> dict[str, jax.Array | None]:
        fns = prior.distributions(values)
        normals = {site: as_normal(fns[site], jnp.shape(values[site])) for site in symmetry.sites}
        return {site: None if normal is None else normal[0] for site, normal in normals.items()}

    return jax.jit(locations)(values)


def with_hyper_sites(symmetry: Permutation, prior: Prior, draws: list[dict]) -> Permutation:
    """Let the hyper-parameters of single units move with the units.

    A site of per-unit hyper-parameters is found by what it drives: its first entry changes the prior of the first
    slice of a weight site and of no other.
    """
    values, parts = draws[0], list(symmetry.parts)
    units = symmetry.units(values)
    driven = jax.jit(lambda values: _driven(prior, values))
    before = driven(values)
    for hyper in sorted(set(values) - set(symmetry.sites)):
        for axis, length in enumerate(jnp.shape(values[hyper])):
            first = (slice(None),) * axis + (0,)
            after = driven({**values, hyper: values[hyper].at[first].multiply(1.5)})
            for part in symmetry.parts:
                fits = length == units * part.repeats
                if fits and _first_slice_changed(before[part.site], after[part.site], part.axis):
                    parts.append(part._replace(site=hyper, axis=axis))
    return Permutation(tuple(dict.fromkeys(parts)))


def _driven(prior: Prior, values: dict) -> dict[str, Any]:
    """What hyper-parameters change, by site: the elements' log density, or the parameter made from the site."""
    return _elements(prior, values) | prior.noncentred(values)


def _first_slice_changed(before: Any, after: Any, axis: int | None) -> bool:
    if before is None or after is None or axis is None:
        return False
    different = np.moveaxis(np.asarray(before != after), axis, 0)
    return bool(different[0].all() and not different[1:].any())
