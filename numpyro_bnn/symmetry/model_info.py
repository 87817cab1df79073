"""What symmetry moves need from a model: its sites, draws from its prior, and the prior as a program without data."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import biject_to

from numpyro_bnn._checks import argument_error, unknown_name
from numpyro_bnn._distributions import affine_normal, unwrapped
from numpyro_bnn._jaxprs import dependence, pruned
from numpyro_bnn.program.compiled import run
from numpyro_bnn.program.plates import full_plates, full_trace, prior_trace
from numpyro_bnn.symmetry.base import Symmetry
from numpyro_bnn.symmetry.groups import JointRescale, JointScale, Permutation

# Keyword through which NumPyro's Gibbs passes the values of other blocks to a model.
CONDITIONED = "_gibbs_sites"


def prior_sites(traced: Mapping[str, dict], kwargs: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Sites whose density is the prior: latent ones, and those that other blocks of a ``Gibbs`` hold."""
    held = (kwargs or {}).get(CONDITIONED, {})
    return tuple(
        name
        for name, site in traced.items()
        if site["type"] == "sample" and (not site["is_observed"] or name in held)
    )


def log_likelihoods(
    model: Callable, values: Mapping[str, Any], args: tuple, kwargs: Mapping[str, Any] | None
) -> list[jax.Array]:
    """Log density of every observed site at ``values`` of the latent ones, on all data, with its masks and scale."""
    traced = full_trace(model, values, args, kwargs)
    latent = prior_sites(traced, kwargs)
    observed = [site for name, site in traced.items() if site["type"] == "sample" and name not in latent]
    logs = [(site["fn"].log_prob(site["value"]), site["scale"]) for site in observed]
    return [log if scale is None else scale * log for log, scale in logs]


def as_normal(fn: dist.Distribution) -> tuple[jax.Array, jax.Array] | None:
    """Mean and sd of a distribution of independent normals, in the shape of the site; ``None`` for others."""
    found = affine_normal(fn)
    return None if found is None else (found[0], jnp.abs(found[1]))


def log_density(fn: dist.Distribution, value: jax.Array) -> jax.Array:
    """Log density of a value; minus infinity outside the support and where its unconstrained value is not finite."""
    inside = fn.support(value)
    if not fn.is_discrete:
        transform = biject_to(fn.support)
        event = tuple(range(-transform.domain.event_dim, 0))
        inside &= jnp.all(jnp.isfinite(transform.inv(value)), axis=event)
    return jnp.where(inside, fn.log_prob(value), -jnp.inf)


def elementwise(fn: dist.Distribution, value: jax.Array) -> jax.Array | None:
    """Log density of every element of a site; ``None`` if the elements are not independent."""
    normal = as_normal(fn)
    if normal is not None:
        return dist.Normal(*normal).log_prob(value)
    base = unwrapped(fn)
    if base.event_dim:
        return None
    log_prob = log_density(base, value)
    return log_prob if prod(jnp.shape(log_prob)) == prod(jnp.shape(value)) else None


class PriorProgram:
    """Distributions of the latent sites given values of all of them, and the likelihood on request.

    The program holds only the equations that the prior needs, so its cost does not depend on the data. ``values`` are
    example constrained values of the latent sites.

    >>> import numpyro
    >>> def model():
    ...     s = numpyro.sample("s", dist.HalfNormal(1.0))
    ...     numpyro.sample("w", dist.Normal(0.0, s))
    >>> prior = PriorProgram(model, {"s": jnp.ones(()), "w": jnp.ones(())})
    >>> prior.children({"s"})
    {'w'}

    :ivar distributions: values -> distribution of every latent site.
    :ivar likelihood: values -> log likelihood.
    :ivar noncentered: values -> for every site ``w_base`` the parameter ``w`` made from it.
    """

    def __init__(
        self,
        model: Callable,
        values: Mapping[str, Any],
        args: tuple = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.held = dict((kwargs or {}).get(CONDITIONED, {}))

        def distributions(values: Mapping[str, Any]) -> dict[str, Any]:
            traced = full_trace(model, values, args, kwargs)
            return {name: _checked(traced[name]) for name in prior_sites(traced, kwargs)}

        def likelihood(values: Mapping[str, Any]) -> jax.Array:
            return sum(map(jnp.sum, log_likelihoods(model, values, args, kwargs)), jnp.zeros(()))

        def noncentered(values: Mapping[str, Any]) -> dict[str, jax.Array]:
            made = {n: s for n, s in full_trace(model, values, args, kwargs).items() if f"{n}_base" in values}
            return {f"{n}_base": s["value"] for n, s in made.items() if s["type"] == "deterministic"}

        self.noncentered = noncentered
        self._values = dict(values)
        self._distributions = distributions
        self.distributions = pruned(distributions, self._values)
        self.likelihood = likelihood

    def children(self, sites: set[str]) -> set[str]:
        """Sites whose distribution depends on any of ``sites``."""
        return {name for name, used in self._dependence.items() if used & sites}

    @cached_property
    def _dependence(self) -> dict[str, set]:
        return dependence(self._distributions, self._values)

    def total(self, values: Mapping[str, jax.Array], sites: tuple[str, ...]) -> jax.Array:
        """Sum of the log densities of ``sites``."""
        fns, values = self.distributions(values), {**self.held, **values}
        return sum((jnp.sum(log_density(fns[name], values[name])) for name in sites), jnp.zeros(()))

    def elements(self, values: Mapping[str, jax.Array]) -> dict[str, jax.Array | None]:
        """Log density of every element of every latent site; ``None`` if elements are not independent."""
        fns = self.distributions(values)
        return {name: elementwise(fns[name], value) for name, value in values.items()}


def _checked(site: Mapping[str, Any]) -> dist.Distribution:
    if site.get("scale") is not None and not site["is_observed"]:
        got = f"latent site {site['name']!r} with a scaled log density"
        instead = "Take the site out of `handlers.scale` or the subsampled plate: a scaled prior is not the prior."
        raise argument_error("symmetry", "model", got, instead)
    return site["fn"]


class Site(NamedTuple):
    """What is known about a site without its value."""

    kind: str
    observed: bool
    infer: Mapping[str, Any]
    family: Any


class ModelInfo(NamedTuple):
    """What is read from a model before moves along its symmetries are planned.

    :param sites: all its sites.
    :param draws: values of its latent sites, drawn from the prior, one entry per seed.
    :param prior: its prior.
    """

    sites: Mapping[str, Site]
    draws: list[dict[str, jax.Array]]
    prior: PriorProgram


def model_info(
    model: Callable, args: tuple, kwargs: Mapping[str, Any] | None, seeds: Sequence[int] = (0, 1)
) -> ModelInfo:
    """Read a model on all its data."""
    sites: dict[str, Site] = {}

    def draw(seed: jax.Array, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, jax.Array]:
        traced, held = prior_trace(full_plates(model), seed, args, kwargs), kwargs.get(CONDITIONED, {})
        for name, site in traced.items():
            family = type(unwrapped(site["fn"])) if site["type"] == "sample" else type(None)
            sites[name] = Site(site["type"], site.get("is_observed", False), site.get("infer") or {}, family)
        names = [name for name in prior_sites(traced, kwargs) if name not in held]
        return {name: jnp.asarray(traced[name]["value"]) for name in names}

    draws = [run(draw, np.uint32(seed), args, kwargs or {}, once=True) for seed in seeds]
    return ModelInfo(sites, draws, PriorProgram(model, draws[0], args, kwargs))


def in_latent(symmetry: Symmetry, info: ModelInfo) -> Symmetry:
    """Write a symmetry of parameters in terms of latent sites.

    A non-centered parameter ``w`` = s * ``w_base`` moves by its ``w_base``; under a joint scale the base stays.
    Under a permutation the hyperparameters of single units move with them.

    :raises ValueError: for a site that the model does not have or does not sample.
    """
    call, latent = f"symmetry.{type(symmetry).__name__}", tuple(info.draws[0])
    names = {}
    for site in symmetry.sites:
        if site in latent:
            continue
        if site not in info.sites:
            raise unknown_name(call, "site", site, latent)
        if f"{site}_base" not in latent:
            got = f"{site!r}, which is {info.sites[site].kind} and not sampled here"
            raise argument_error(call, "site", got, f"Name latent sites: {', '.join(latent)}.")
        names[site] = f"{site}_base"
    if isinstance(symmetry, JointScale | JointRescale):
        return symmetry.without(names)
    renamed = symmetry.rename(names)
    return _with_hyper_sites(renamed, info) if isinstance(renamed, Permutation) else renamed


def _with_hyper_sites(symmetry: Permutation, info: ModelInfo) -> Permutation:
    """Let the hyperparameters of single units move with the units.

    A site of per-unit hyperparameters is recognized by its effect: its first entry changes the prior of the first
    slice of a weight site and of no other slice.
    """
    values, axes = info.draws[0], list(symmetry.unit_axes)
    units = symmetry.units(values)
    driven = pruned(lambda values: info.prior.elements(values) | info.prior.noncentered(values), values)
    before = run(driven, values, (), {}, once=True)
    for hyper in sorted(set(values) - set(symmetry.sites)):
        for number, length in enumerate(jnp.shape(values[hyper])):
            fitting = [axis for axis in symmetry.unit_axes if length == units * axis.repeats]
            if not fitting:
                continue
            changed = np.moveaxis(np.array(values[hyper]), number, 0)
            changed[0] = 1.5 * changed[0]
            after = run(driven, {**values, hyper: np.moveaxis(changed, 0, number)}, (), {}, once=True)
            axes += [
                axis._replace(site=hyper, axis=number)
                for axis in fitting
                if _first_slice_changed(before[axis.site], after[axis.site], axis.axis)
            ]
    return Permutation(tuple(dict.fromkeys(axes)))


def _first_slice_changed(before: Any, after: Any, axis: int | None) -> bool:
    if before is None or after is None or axis is None:
        return False
    different = np.moveaxis(np.asarray(before) != np.asarray(after), axis, 0)
    return bool(different[0].all() and not different[1:].any())
