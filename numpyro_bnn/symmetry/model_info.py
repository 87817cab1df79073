"""What symmetry moves need from a model: its sites, draws from its prior, and the prior
as a program without data.
"""

from collections.abc import Iterable, Mapping
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
from numpyro_bnn.program.compiled import shared
from numpyro_bnn.program.reading import Reading, arrays_in
from numpyro_bnn.symmetry.base import Symmetry, UnitAxis
from numpyro_bnn.symmetry.groups import JointRescale, JointScale, Permutation


def log_likelihoods(reading: Reading, values: Mapping[str, Any]) -> list[jax.Array]:
    """Log density of every observed site at ``values`` of the latent ones, on all data,
    with its masks and scale.
    """
    observed = [name for name in reading.observed if name not in reading.held]
    logs = []
    for site in reading.at(values, only=observed).values():
        log = site["fn"].log_prob(site["value"])
        logs.append(log if site["scale"] is None else site["scale"] * log)
    return logs


def as_normal(fn: dist.Distribution) -> tuple[jax.Array, jax.Array] | None:
    """Mean and sd of a distribution of independent normals, in the shape of the site;
    ``None`` for others.
    """
    normal = affine_normal(fn)
    return None if normal is None else (normal[0], jnp.abs(normal[1]))


def log_density(fn: dist.Distribution, value: jax.Array) -> jax.Array:
    """Log density of a value; minus infinity outside the support and where its
    unconstrained value is not finite.
    """
    inside = fn.support(value)
    if not fn.is_discrete:
        transform = biject_to(fn.support)
        event = tuple(range(-transform.domain.event_dim, 0))
        inside &= jnp.all(jnp.isfinite(transform.inv(value)), axis=event)
    return jnp.where(inside, fn.log_prob(value), -jnp.inf)


def elementwise(fn: dist.Distribution, value: jax.Array) -> jax.Array | None:
    """Log density of every element of a site; ``None`` if the elements are not
    independent.
    """
    normal = as_normal(fn)
    if normal is not None:
        return dist.Normal(*normal).log_prob(value)
    base = unwrapped(fn)
    if base.event_dim:
        return None
    log_prob = log_density(base, value)
    return log_prob if prod(jnp.shape(log_prob)) == prod(jnp.shape(value)) else None


class PriorProgram:
    """Distributions of the latent sites given values of all of them, and the likelihood
    on request.

    The cost of the former does not depend on the data.
    """

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.held = reading.held
        #: Sites whose density is the prior: latent ones, and those that other blocks of
        # a ``Gibbs`` hold.
        self.sites = tuple(
            name for name in reading.sites if name in {*reading.latent, *self.held}
        )
        for name in reading.latent:
            if reading.sites[name]["scale"] is not None:
                got = f"latent site {name!r} with a scaled log density"
                instead = (
                    "Take the site out of `handlers.scale` or the subsampled plate: a "
                    "scaled prior is not the prior."
                )
                raise argument_error("symmetry", "model", got, instead)

    def distributions(self, values: Mapping[str, Any]) -> dict[str, dist.Distribution]:
        """The distribution of every latent site."""
        return {
            name: site["fn"]
            for name, site in self.reading.at(values, only=self.sites).items()
        }

    def likelihood(self, values: Mapping[str, Any]) -> jax.Array:
        """The log likelihood."""
        return sum(map(jnp.sum, log_likelihoods(self.reading, values)), jnp.zeros(()))

    def noncentered(self, values: Mapping[str, Any]) -> dict[str, jax.Array]:
        """For every site ``w_base`` the parameter ``w`` made from it."""
        sites = self.reading.sites.items()
        noncentered = [
            name
            for name, site in sites
            if site["type"] == "deterministic" and f"{name}_base" in values
        ]
        return {
            f"{name}_base": site["value"]
            for name, site in self.reading.at(values, only=noncentered).items()
        }

    def children(self, sites: set[str]) -> set[str]:
        """Sites whose distribution depends on any of ``sites``."""
        return {name for name, used in self._dependence.items() if used & sites}

    @cached_property
    def _dependence(self) -> dict[str, set]:
        return self.reading.depends(
            lambda sites: {name: arrays_in(sites[name]["fn"]) for name in self.sites}
        )

    def total(
        self, values: Mapping[str, jax.Array], sites: tuple[str, ...]
    ) -> jax.Array:
        """Sum of the log densities of ``sites``."""
        fns = self.distributions(values)
        values = {**self.held, **values}
        return sum(
            (jnp.sum(log_density(fns[name], values[name])) for name in sites),
            jnp.zeros(()),
        )

    def elements(self, values: Mapping[str, jax.Array]) -> dict[str, jax.Array | None]:
        """Log density of every element of every latent site; ``None`` if elements are
        not independent.
        """
        fns = self.distributions(values)
        return {name: elementwise(fns[name], value) for name, value in values.items()}


class ModelInfo(NamedTuple):
    """What is read from a model before moves along its symmetries are planned.

    :param reading: of the model on all its data.
    :param draws: values of its latent sites, drawn from the prior, one entry per seed.
    :param prior: its prior.
    """

    reading: Reading
    draws: list[dict[str, jax.Array]]
    prior: PriorProgram


def model_info(reading: Reading, seeds: Iterable[int] = (0, 1)) -> ModelInfo:
    """Draw from the prior of a model."""
    return ModelInfo(reading, reading.draw(seeds), PriorProgram(reading))


def in_latent(symmetry: Symmetry, info: ModelInfo) -> Symmetry:
    """Write a symmetry of parameters in terms of latent sites.

    A non-centered parameter ``w`` = s * ``w_base`` moves by its ``w_base``; under a
    joint scale the base stays. Under a permutation the hyperparameters of single units
    move with them.

    :raises ValueError: for a site that the model does not have or does not sample.
    """
    call = f"symmetry.{type(symmetry).__name__}"
    latent = tuple(info.draws[0])
    names = {}
    for site in symmetry.sites:
        if site in latent:
            continue
        if site not in info.reading.sites:
            raise unknown_name(call, "site", site, latent)
        if f"{site}_base" not in latent:
            got = (
                f"{site!r}, which is {info.reading.sites[site]['type']} and not "
                f"sampled here"
            )
            raise argument_error(
                call, "site", got, f"Name latent sites: {', '.join(latent)}."
            )
        names[site] = f"{site}_base"
    if isinstance(symmetry, JointScale | JointRescale):
        return symmetry.without(names)
    renamed = symmetry.rename(names)
    if isinstance(renamed, Permutation):
        return _with_hyper_sites(renamed, info)
    return renamed


def _with_hyper_sites(symmetry: Permutation, info: ModelInfo) -> Permutation:
    """Let the hyperparameters of single units move with the units.

    A site of per-unit hyperparameters is recognized by its effect: its first entry
    changes the prior of the first slice of a weight site and of no other slice.
    """
    values = info.draws[0]
    axes = list(symmetry.unit_axes)
    units = symmetry.units(values)
    driven = shared(
        lambda values: info.prior.elements(values) | info.prior.noncentered(values),
        once=True,
    )
    elements = driven(values)
    for hyper in sorted(set(values) - set(symmetry.sites)):
        for number, length in enumerate(jnp.shape(values[hyper])):
            fitting = [
                axis for axis in symmetry.unit_axes if length == units * axis.repeats
            ]
            if not fitting:
                continue
            changed = np.moveaxis(np.array(values[hyper]), number, 0)
            changed[0] = 1.5 * changed[0]
            changed_elements = driven(
                {**values, hyper: np.moveaxis(changed, 0, number)}
            )
            for axis in fitting:
                if _first_slice_changed(elements, changed_elements, axis):
                    axes.append(axis._replace(site=hyper, axis=number))
    return Permutation(tuple(dict.fromkeys(axes)))


def _first_slice_changed(
    elements: Mapping[str, Any],
    changed_elements: Mapping[str, Any],
    unit_axis: UnitAxis,
) -> bool:
    original = elements[unit_axis.site]
    changed = changed_elements[unit_axis.site]
    if original is None or changed is None or unit_axis.axis is None:
        return False
    different = np.moveaxis(
        np.asarray(original) != np.asarray(changed), unit_axis.axis, 0
    )
    return bool(different[0].all() and not different[1:].any())
