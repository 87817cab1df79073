"""What symmetries need from a model: its prior and its likelihood as functions of the
latent sites, and themselves in terms of these sites.
"""

from functools import cached_property
from math import prod

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions import biject_to

from numpyro_bnn._checks import argument_error, unknown_name
from numpyro_bnn._distributions import affine_normal, unwrapped
from numpyro_bnn._types import Arrays, Trees
from numpyro_bnn.program.compiled import shared
from numpyro_bnn.program.posterior import Posterior
from numpyro_bnn.program.sites import arrays_in
from numpyro_bnn.symmetry.base import Symmetry, UnitAxis
from numpyro_bnn.symmetry.groups import JointRescale, JointScale, Permutation


def log_likelihoods(reading: Posterior, values: Trees) -> list[Array]:
    """Log density of every observed site at ``values`` of the latent ones, on all data,
    with its masks and scale.
    """
    observed = [name for name in reading.observed if name not in reading.held]
    logs = []
    for site in reading.at(values, only=observed).values():
        log = site["fn"].log_prob(site["value"])
        logs.append(log if site["scale"] is None else site["scale"] * log)
    return logs


def log_density(fn: dist.Distribution, value: Array) -> Array:
    """Log density of a value; minus infinity outside the support and where its
    unconstrained value is not finite.
    """
    inside = fn.support(value)
    if not fn.is_discrete:
        transform = biject_to(fn.support)
        event = tuple(range(-transform.domain.event_dim, 0))
        inside &= jnp.all(jnp.isfinite(transform.inv(value)), axis=event)
    return jnp.where(inside, fn.log_prob(value), -jnp.inf)


def elementwise(fn: dist.Distribution, value: Array) -> Array | None:
    """Log density of every element of a site; ``None`` if the elements are not
    independent.
    """
    moments = affine_normal(fn)
    if moments is not None:  # whatever events its parts have
        loc, scale = moments
        return log_density(dist.Normal(loc, jnp.abs(scale)), value)
    base = unwrapped(fn)
    if base.event_dim:
        return None
    log_prob = log_density(base, value)
    return log_prob if prod(jnp.shape(log_prob)) == prod(jnp.shape(value)) else None


class PriorProgram:
    """Distributions of the latent sites given values of all of them, whose cost does
    not depend on the data.

    :param reading: of the model, also on its data, of which only the likelihood needs
        values.
    :raises ValueError: for a latent site whose log density is scaled.
    """

    def __init__(self, reading: Posterior) -> None:
        self.reading = reading
        #: Sites whose density is the prior: latent ones, and those that other blocks of
        # a ``Gibbs`` hold.
        self.sites = [
            name for name in reading.sites if name in {*reading.latent, *reading.held}
        ]
        for name in reading.latent:
            if reading.sites[name]["scale"] is not None:
                got = f"latent site {name!r} with a scaled log density"
                instead = (
                    "Take the site out of `handlers.scale` or the subsampled plate: a "
                    "scaled prior is not the prior."
                )
                raise argument_error("symmetry", "model", got, instead)

    def distributions(self, values: Trees) -> dict[str, dist.Distribution]:
        """The distribution of every latent site."""
        sites = self.reading.at(values, only=self.sites)
        return {name: site["fn"] for name, site in sites.items()}

    def noncentered(self, values: Trees) -> dict[str, Array]:
        """For every site ``w_base`` the parameter ``w`` made from it."""
        names = []
        for name, site in self.reading.sites.items():
            if site["type"] == "deterministic" and f"{name}_base" in values:
                names.append(name)
        sites = self.reading.at(values, only=names)
        return {f"{name}_base": site["value"] for name, site in sites.items()}

    @cached_property
    def _parents(self) -> dict[str, set[str]]:
        return self.reading.depends(
            lambda sites: {name: arrays_in(sites[name]["fn"]) for name in self.sites}
        )

    def children(self, sites: set[str]) -> set[str]:
        """Sites whose distribution depends on any of ``sites``."""
        return {name for name, parents in self._parents.items() if parents & sites}

    def total(self, values: Arrays, sites: tuple[str, ...]) -> Array:
        """Sum of the log densities of ``sites``."""
        fns = self.distributions(values)
        values = {**self.reading.held, **values}
        total = jnp.zeros(())
        for name in sites:
            total = total + jnp.sum(log_density(fns[name], values[name]))
        return total

    def elements(self, values: Arrays) -> dict[str, Array | None]:
        """Log density of every element of every latent site; ``None`` if elements are
        not independent.
        """
        fns = self.distributions(values)
        return {name: elementwise(fns[name], value) for name, value in values.items()}


def in_latent(symmetry: Symmetry, prior: PriorProgram, values: Arrays) -> Symmetry:
    """Write a symmetry of parameters in terms of latent sites.

    A non-centered parameter ``w`` = s * ``w_base`` moves by its ``w_base``; under a
    joint scale the base stays. Under a permutation the hyperparameters of single units
    move with them.

    :param values: of the latent sites, drawn from the prior.
    :raises ValueError: for a site that the model does not have or does not sample.
    """
    call, sites = f"symmetry.{type(symmetry).__name__}", prior.reading.sites
    names = {}
    for site in symmetry.sites:
        if site in values:
            continue
        if site not in sites:
            raise unknown_name(call, "site", site, tuple(values))
        if f"{site}_base" not in values:
            got = f"{site!r}, which is {sites[site]['type']} and not sampled here"
            instead = f"Name latent sites: {', '.join(values)}."
            raise argument_error(call, "site", got, instead)
        names[site] = f"{site}_base"
    if isinstance(symmetry, JointScale | JointRescale):
        return symmetry.without(names)
    renamed = symmetry.rename(names)
    if isinstance(renamed, Permutation):
        return _with_hyper_sites(renamed, prior, values)
    return renamed


def _with_hyper_sites(
    symmetry: Permutation, prior: PriorProgram, values: Arrays
) -> Permutation:
    """Let the hyperparameters of single units move with the units.

    A site of per-unit hyperparameters is recognized by its effect: its first entry
    changes the prior of the first slice of a weight site and of no other slice.
    """
    axes = list(symmetry.unit_axes)
    units = symmetry.units(values)
    driven = shared(
        lambda values: prior.elements(values) | prior.noncentered(values),
        runs_rarely=True,
    )
    elements = driven(values)
    for hyper in sorted(values.keys() - set(symmetry.sites)):
        for number, length in enumerate(jnp.shape(values[hyper])):
            fitting = [
                axis for axis in symmetry.unit_axes if length == units * axis.repeats
            ]
            if not fitting:
                continue
            first = (slice(None),) * number + (0,)
            changed = np.array(values[hyper])
            changed[first] = 1.5 * changed[first]
            changed_elements = driven({**values, hyper: changed})
            for axis in fitting:
                if _first_slice_changed(elements, changed_elements, axis):
                    axes.append(axis._replace(site=hyper, axis=number))
    return Permutation(tuple(dict.fromkeys(axes)))


def _first_slice_changed(elements: Trees, changed: Trees, axis: UnitAxis) -> bool:
    if elements[axis.site] is None or axis.axis is None:
        return False
    different = np.asarray(elements[axis.site]) != np.asarray(changed[axis.site])
    first, *further_slices = np.moveaxis(different, axis.axis, 0)
    return bool(first.all() and not np.any(further_slices))
