"""Find sites that enter a model linearly under normal noise, and refuse those that do
not.
"""

from collections.abc import Iterable
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_bnn._checks import argument_error, unknown_name
from numpyro_bnn._distributions import (
    affine_normal,
    is_affine_normal,
    unwrapped,
    weights,
)
from numpyro_bnn._jaxprs.slices import dependence
from numpyro_bnn._types import Arrays, Shape, Site
from numpyro_bnn.infer.linear_blocks import JacobianBlocks, jacobian_blocks, jacobian_of
from numpyro_bnn.program.plates import sites_of_type
from numpyro_bnn.program.posterior import Posterior
from numpyro_bnn.program.sites import Sites, arrays_in

# Deviations from linearity that are attributed to rounding, relative to the sum of the
# absolute terms; and the sizes of the innovations at which they are measured.
TOLERANCE, SIZES = 1e-3, (1.0, 30.0, 1000.0)
# Parts of a density that may not depend on a linear site.
MEANINGS = {
    "sd": "the scale",
    "scale of the log density": "the scale or mask of the log density",
    "mask": "the scale or mask of the log density",
    "observed value": "the observed value",
}


class LinearStructure(NamedTuple):
    """Shapes of the linear sites, in the order of the model, and the data whose means
    depend on them.
    """

    shapes: dict[str, Shape]
    data: tuple[str, ...]


class LinearGaussian(NamedTuple):
    r"""A linear Gaussian model :math:`y \sim N(f + A u, s^2)^\beta`, :math:`u \sim N(0,
    d^2)^\gamma`, without A.

    :param prior_sd: (P,) d; ``prior_weight``: (P,) the power of the prior, 1 unless it
        is scaled.
    :param value: (N,) y; ``mean``: (N,) f, with all u = 0.
    :param sd: (N,) s; ``weight``: (N,) the power of each datum: scales of the log
        density, 0 where masked.
    """

    prior_sd: Array
    prior_weight: Array
    value: Array
    mean: Array
    sd: Array
    weight: Array


class LinearModel:
    """A model as a function of the *innovations* u of its linear sites: the sites less
    their prior means.

    Prior means may themselves be linear in other linear sites, as in a hierarchy of
    locations; innovations remain independent.

    :param values: of all other latent sites.
    """

    def __init__(
        self, reading: Posterior, structure: LinearStructure, values: Arrays
    ) -> None:
        self._reading, self._values, self.structure = reading, dict(values), structure

    def trace(self, u: Array, only: Iterable[str] | None = None) -> Sites:
        """The trace of the model at (P,) innovations."""
        values, start = dict(self._values), 0
        for name, shape in self.structure.shapes.items():
            loc, _ = loc_and_sd(self._reading.at(values, only=[name])[name])
            end = start + prod(shape)
            values[name] = loc + u[start:end].reshape(shape).astype(loc.dtype)
            start = end
        return self._reading.at(values, only=only)

    def mean(self, u: Array) -> Array:
        """(N,) means of the data."""
        sites = self.trace(u, self.structure.data).values()
        return jnp.concatenate([jnp.ravel(loc_and_sd(site)[0]) for site in sites])

    def blocks(self) -> JacobianBlocks:
        """The linear map A."""
        return jacobian_blocks(self.mean, self.zeros())

    def gaussian(self) -> LinearGaussian:
        """Everything except the linear map."""
        shapes, data = self.structure
        traced = self.trace(self.zeros(), (*shapes, *data))
        _, _, prior_sd, prior_weight = _flat_normals(traced, shapes)
        return LinearGaussian(prior_sd, prior_weight, *_flat_normals(traced, data))

    def zeros(self) -> Array:
        """(P,) innovations at the prior means."""
        return jnp.zeros(sum(map(prod, self.structure.shapes.values())))


def read(call: str, reading: Posterior, sites: tuple[str, ...]) -> LinearStructure:
    """Find where the linear sites enter a model; errors, raised in the name of
    ``call``, name the site at fault.
    """
    traced = reading.sites
    for name in sites:
        if name not in reading.latent:
            raise unknown_name(call, "sites", name, reading.latent)
        if not is_affine_normal(traced[name]["fn"]):
            prior = type(unwrapped(traced[name]["fn"])).__name__
            got = f"{name!r}, a site with a {prior} prior"
            raise argument_error(call, "sites", got, "Name sites with normal priors.")
    zeros, shapes = reading.zeros(), {}
    for name in reading.latent:
        if name in sites:
            shapes[name] = zeros.pop(name).shape
    structure = LinearStructure(shapes, _data(call, reading, sites))
    _check_linear(call, reading, LinearModel(reading, structure, zeros))
    for name in structure.data:
        if not traced[name]["is_observed"]:
            got = f"{sites}, on which the latent site {name!r} depends"
            instead = f"Only data may depend on them: name {name!r} as well."
            raise argument_error(call, "sites", got, instead)
    return structure


def density_parts(sites: Sites) -> dict[tuple[str, str], Any]:
    """By kind and sample site, whatever may enter its log density, besides the value of
    a latent one.
    """
    parts: dict[tuple[str, str], Any] = {}
    for name, site in sites_of_type(sites, "sample").items():
        parts["scale of the log density", name] = site["scale"]
        if site["is_observed"]:
            parts["observed value", name] = site["value"]
        if is_affine_normal(site["fn"], masked=True):
            parts["mean", name], parts["sd", name] = loc_and_sd(site)
            parts["mask", name] = weights({"fn": site["fn"], "scale": None})
        else:
            parts["distribution", name] = arrays_in(site["fn"])
    return parts


def _data(call: str, reading: Posterior, sites: tuple[str, ...]) -> tuple[str, ...]:
    """Other sites whose density depends on the linear ones."""
    refused = partial(argument_error, call, "sites")
    dependences = reading.depends(density_parts, sites)
    depending = {name for (_, name), linear in dependences.items() if linear}
    below = tuple(sorted(depending.difference(sites)))
    for name in (*sites, *below):
        fn = reading.sites[name]["fn"]
        if not is_affine_normal(fn, masked=True):
            kind = type(unwrapped(fn, masked=True)).__name__
            raise refused(
                f"{sites}, on which {name!r} ({kind}) depends",
                "Only normal sites may depend on them: sample these sites with "
                "another kernel, e.g. `NUTS(model)`.",
            )
        for kind, meaning in MEANINGS.items():
            if dependences.get((kind, name)):
                raise refused(
                    f"{sites}, on which {meaning} of {name!r} depends",
                    "Only means may depend on them: give the mean weights of its "
                    "own, or leave these to the sampler.",
                )
    if not below:
        raise refused(
            sites,
            "No observed normal site depends on them: is the data passed to the model?",
        )
    return below


def _check_linear(call: str, reading: Posterior, linear: LinearModel) -> None:
    """Refuse means that are not linear."""

    def slope(inputs: Arrays) -> dict[str, Array]:
        u = inputs["u"]
        return {"map": jax.jvp(linear.mean, (u,), (jnp.ones_like(u),))[1]}

    # If the program of the derivative does not use the point, the mean is linear.
    if not dependence(slope, {"u": linear.zeros()})["map"]:
        return
    # Otherwise compare means with their linearization at random values.
    for error, tolerated in reading.run(partial(_errors, linear.structure)):
        if isinstance(error, jax.core.Tracer):
            got = "arrays that are traced by a transformation"
            instead = "Linearity is measured: call it once outside of `jit` or `vmap`."
            raise argument_error(call, "model_args", got, instead)
        if not np.all(np.abs(error) <= tolerated):
            came = (
                f"{tuple(linear.structure.shapes)}, in which the mean of "
                f"{linear.structure.data} is not linear"
                f" (off by {np.max(np.abs(error)):.2g} at random values)"
            )
            instead = (
                "Name sites that enter linearly, such as the weights of an output "
                "layer."
            )
            raise argument_error(call, "sites", came, instead)


def _errors(
    structure: LinearStructure, reading: Posterior
) -> list[tuple[Array, Array]]:
    """Differences of means from their linearization, at innovations of several sizes,
    and those due to rounding.
    """
    drawn = reading.at(only=reading.latent)
    values = {
        name: site["value"]
        for name, site in drawn.items()
        if name not in structure.shapes
    }
    linear, errors = LinearModel(reading, structure, values), []
    jacobian = jacobian_of(linear.mean, linear.zeros())
    start = linear.mean(linear.zeros())
    for i, size in enumerate(SIZES):
        u = size * random.normal(random.key(i), linear.zeros().shape)
        tolerated = TOLERANCE * (jnp.abs(start) + jnp.abs(jacobian) @ jnp.abs(u))
        errors.append((linear.mean(u) - (start + jacobian @ u), tolerated))
    return errors


def loc_and_sd(site: Site) -> tuple[Array, Array]:
    """Mean and sd of a normal site; the sd may be negative."""
    parameters = affine_normal(site["fn"], masked=True)
    assert parameters is not None  # callers have checked
    return parameters


def _flat_normals(sites: Sites, names: Iterable[str]) -> list[Array]:
    """:func:`flat_normal` of several sites, one after the other."""
    fields = zip(*(flat_normal(sites[name]) for name in names), strict=True)
    return list(map(jnp.concatenate, fields))


def flat_normal(site: Site) -> tuple[Array, ...]:
    """Value, mean, sd and weight of every element of a normal site, flat."""
    loc, scale = loc_and_sd(site)
    value = jnp.broadcast_to(site["value"], loc.shape)
    dtype = jnp.result_type(float)
    return tuple(
        jnp.ravel(array).astype(dtype)
        for array in (value, loc, jnp.abs(scale), weights(site))
    )
