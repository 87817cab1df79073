"""What is read of a model before moves along its symmetries are decided on."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.infer.initialization import init_to_sample

from numpyro_bnn._checks import argument_error, unknown_name
from numpyro_bnn._dependence import pruned
from numpyro_bnn._distributions import unwrapped
from numpyro_bnn._plates import full_plates
from numpyro_bnn.symmetry.base import Symmetry
from numpyro_bnn.symmetry.discrete import Permutation
from numpyro_bnn.symmetry.prior import CONDITIONED, Prior, elementwise, prior_sites
from numpyro_bnn.symmetry.scaling import JointRescale, JointScale

__all__ = ["Site", "Survey", "elements", "in_latent", "survey"]


class Site(NamedTuple):
    """What is known of a site without its value."""

    kind: str
    observed: bool
    infer: Mapping[str, Any]
    family: Any


class Survey(NamedTuple):
    """What is read of a model before anything is decided.

    :param sites: all its sites.
    :param draws: values of its latent sites, drawn from the prior, one entry per seed.
    :param prior: its prior.
    """

    sites: Mapping[str, Site]
    draws: list[dict[str, jax.Array]]
    prior: Prior


def survey(
    model: Callable, args: tuple, kwargs: Mapping[str, Any] | None, seeds: Sequence[int] = (0, 1)
) -> Survey:
    """Read a model on all its data."""
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
    draws = [program(jnp.uint32(seed)) for seed in seeds]
    return Survey(sites, draws, Prior(model, draws[0], args, kwargs))


def in_latent(symmetry: Symmetry, found: Survey) -> Symmetry:
    """Write a symmetry of parameters in terms of latent sites.

    A non-centered parameter ``w`` = s * ``w_base`` moves by its ``w_base``; under a joint scale the base stays. Under
    a permutation the hyper-parameters of single units move with them.

    :raises ValueError: for a site that the model does not have, or does not sample.
    """
    sites, latent = found.sites, tuple(found.draws[0])
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
    renamed = symmetry.rename(names)
    return _with_hyper_sites(renamed, found) if isinstance(renamed, Permutation) else renamed


def elements(prior: Prior, values: Mapping[str, jax.Array]) -> dict[str, jax.Array | None]:
    """Log density of every element of every latent site; ``None`` where elements are not independent."""
    fns = prior.distributions(values)
    return {name: elementwise(fns[name], value) for name, value in values.items()}


def _with_hyper_sites(symmetry: Permutation, found: Survey) -> Permutation:
    """Let the hyper-parameters of single units move with the units.

    A site of per-unit hyper-parameters is found by what it drives: its first entry changes the prior of the first
    slice of a weight site and of no other.
    """
    values, parts = found.draws[0], list(symmetry.parts)
    units = symmetry.units(values)
    driven = jax.jit(lambda values: elements(found.prior, values) | found.prior.noncentered(values))
    before = driven(values)
    for hyper in sorted(set(values) - set(symmetry.sites)):
        for axis, length in enumerate(jnp.shape(values[hyper])):
            fitting = [part for part in symmetry.parts if length == units * part.repeats]
            if not fitting:
                continue
            first = (slice(None),) * axis + (0,)
            after = driven({**values, hyper: values[hyper].at[first].multiply(1.5)})
            parts += [
                part._replace(site=hyper, axis=axis)
                for part in fitting
                if _first_slice_changed(before[part.site], after[part.site], part.axis)
            ]
    return Permutation(tuple(dict.fromkeys(parts)))


def _first_slice_changed(before: Any, after: Any, axis: int | None) -> bool:
    if before is None or after is None or axis is None:
        return False
    different = np.moveaxis(np.asarray(before != after), axis, 0)
    return bool(different[0].all() and not different[1:].any())
