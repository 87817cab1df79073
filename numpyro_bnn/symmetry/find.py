"""All symmetries of a model with random networks, hyper-parameters included."""

from collections.abc import Callable
from typing import Any

import numpyro.distributions as dist

from numpyro_bnn.symmetry.base import Symmetry
from numpyro_bnn.symmetry.checking import TOLERANCE, invariance
from numpyro_bnn.symmetry.derive import from_network
from numpyro_bnn.symmetry.scaling import JointRescale, JointScale, Rescale, Scale
from numpyro_bnn.symmetry.survey import survey

__all__ = ["find"]

# How the hyper-sites of the priors drive a weight: w ~ s^power.
HYPER_SITES = {"scale": 1.0, "global": 1.0, "precision": -2.0}


def find(model: Callable, *args: Any, **kwargs: Any) -> list[Symmetry]:
    """Derive the symmetries of a model from its random networks and their priors.

    What :func:`of` gives for every :func:`~numpyro_bnn.random_network` of the model, a shift of the class logits
    where the observation is categorical, and :class:`JointScale` and :class:`JointRescale` for the learned scales
    of the kernels involved. Each is measured on the model (:func:`invariance`) and left out if it does not hold.

    :param model: a NumPyro model.
    :param args: its positional arguments, with the data.
    :param kwargs: its keyword arguments.

    >>> import jax.numpy as jnp
    >>> from numpyro_bnn import models, nn, priors
    >>> model = models.regression(nn.MLP([4, 1], "tanh", norm=nn.BatchNorm()), priors.Hierarchical())
    >>> [s.name for s in find(model, jnp.arange(12.0).reshape(6, 2) ** 2, jnp.ones(6))][:3]
    ['Scale(net/Dense_0.kernel)', 'Shift(net/Dense_0.bias)', 'SignFlip(net/Dense_0.kernel)']
    """
    sites, draws, _ = survey(model, args, kwargs)
    latent = set(draws[0])
    networks = {site.infer["network"]: None for site in sites.values() if "network" in site.infer}
    logits = any(site.observed and issubclass(site.family, dist.CategoricalLogits) for site in sites.values())
    found: list[Symmetry] = []
    for name, net, input_shape in networks:
        found += from_network(net, input_shape, name, logits)
    joint = [candidate for symmetry in found for candidate in _with_scales(symmetry, latent)]
    measured = invariance(model, list(dict.fromkeys(found + joint)), args, kwargs)
    return [entry.symmetry for entry in measured if entry.error <= TOLERANCE]


def _with_scales(symmetry: Symmetry, latent: set[str]) -> list[Symmetry]:
    """The same group for a whole layer, with the hyper-sites that drive its kernels."""
    if isinstance(symmetry, Scale):
        weights = tuple(part.site for part in symmetry.weights)
        return [
            JointScale(weights, hyper, power) for site in weights for hyper, power in _driving(site, latent)
        ]
    if isinstance(symmetry, Rescale):
        incoming, outgoing = (
            tuple(part.site for part in side) for side in (symmetry.incoming, symmetry.outgoing)
        )
        scales = [entry for site in incoming for entry in _driving(site, latent)]
        scales += [(hyper, -power) for site in outgoing for hyper, power in _driving(site, latent)]
        return [JointRescale(incoming, outgoing, scales)] if scales else []
    return []


def _driving(site: str, latent: set[str]) -> list[tuple[str, float]]:
    return [
        (f"{site}_{suffix}", power) for suffix, power in HYPER_SITES.items() if f"{site}_{suffix}" in latent
    ]
