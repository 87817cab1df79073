"""Sites whose prior sd is itself unknown: their loc and scale, read from the model at
values of the hyper-sites.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import jax.numpy as jnp
from jax import Array
from numpyro import handlers

from numpyro_bnn._distributions import affine_normal
from numpyro_bnn._types import Kwargs, Trees
from numpyro_bnn.program.posterior import Posterior

# Parents of each site whose prior N(loc, scale^2) has a scale that depends on other
# latent sites.
Scaled: TypeAlias = Mapping[str, frozenset[str]]
# Maps values of sites to prior loc and scale by site.
Program: TypeAlias = Callable[[Mapping[str, Any]], Mapping[str, tuple[Array, Array]]]


def _moments(
    sites: Mapping[str, dict], names: Iterable[str]
) -> dict[str, tuple[Array, Array]]:
    """Prior loc and scale of those sites that are normal."""
    moments = {}
    for name in names:
        pair = affine_normal(sites[name]["fn"], masked=True)
        if pair is not None:
            moments[name] = pair
    return moments


def scaled_sites(reading: Posterior, local: set[str]) -> Scaled:
    """Find the Gaussian sites whose prior sd depends on other latent sites, and those
    sites.

    :param local: sites inside subsampled plates; sites that depend on one of them are
        left out.
    """
    scaled = {}
    for name, parents in reading.scaled.items():
        if not parents & local:
            scaled[name] = parents
    return scaled


def prior_program(
    model: Callable,
    scaled: Scaled,
    examples: Trees,
    args: tuple,
    kwargs: Kwargs,
    plates: Trees | None = None,
) -> Program:
    """A function from values of hyper-sites to prior loc and scale of the sites they
    scale, without the likelihood.

    :param examples: values of latent sites, used if a value is not known yet.
    :param plates: indices of plates; without them every plate is full.
    """
    with handlers.block():
        reading = Posterior(model, args, kwargs, full=plates is None)
    parents = sorted(set().union(*scaled.values()))

    def program(values: Trees) -> Mapping[str, tuple[Array, Array]]:
        inputs = dict(plates or {})
        for name in parents:
            inputs[name] = jnp.asarray(values.get(name, examples[name]), float)
        return _moments(reading.at(inputs, only=scaled), scaled)

    return program
