"""Exact posteriors by quadrature in NumPy, over at most three coordinates: the truth
that every way is held to.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

Values = Mapping[str, np.ndarray]


class Axis(NamedTuple):
    """Nodes of one coordinate and the logs of their weights."""

    nodes: np.ndarray
    log_weights: np.ndarray


def joined(first: Axis, second: Axis) -> Axis:
    """The nodes of two intervals side by side: where they meet, the integrand may have
    a kink or a step.
    """
    return Axis(*map(np.concatenate, zip(first, second, strict=True)))


@cache
def unit_line(size: int) -> tuple[np.ndarray, np.ndarray]:
    return np.polynomial.legendre.leggauss(size)


def line(low: float, high: float, size: int = 160) -> Axis:
    """Gauss-Legendre quadrature on an interval, which must hold all of the mass."""
    nodes, weights = unit_line(size)
    return Axis(
        (high + low) / 2 + (high - low) / 2 * nodes, np.log(weights * (high - low) / 2)
    )


def positive(low: float, high: float, size: int = 160) -> Axis:
    """The same in the logarithm of a positive coordinate."""
    nodes, log_weights = line(np.log(low), np.log(high), size)
    return Axis(np.exp(nodes), log_weights + nodes)


def normal(x: Any, mean: Any, sd: Any) -> Any:
    """Log density of a normal distribution."""
    return -0.5 * ((x - mean) / sd) ** 2 - np.log(sd) - 0.5 * np.log(2 * np.pi)


@dataclass(eq=False)
class Problem:
    """A NumPyro model with its data, and its log joint density in NumPy.

    :param axes: the coordinates (at most three).
    :param log_joint: (G,) of coordinates (G,): log density of data and coordinates. It
        is written by hand and shares no code with NumPyro.
    :param sites: values of the latent sites, (G, *event), of coordinates (G,); by
        default the coordinates.
    :param rows: (G, ...) log likelihood of each row, if exports are compared; they sum
        to the likelihood.
    :param completed: adds other latent sites to draws, given a random generator.
    :param batch: for models that take ``batch_size``: rows of a minibatch; ways that
        need all rows leave it out.
    :param log_volume: log of the volume element of the sites by that of the
        coordinates, (G,).
    """

    name: str
    model: Callable
    data: tuple
    axes: Mapping[str, Axis]
    log_joint: Callable[[Values], np.ndarray]
    sites: Callable[[Values], Values] = dict
    rows: Callable[[Values], np.ndarray] | None = None
    completed: Callable[[dict, np.random.Generator], dict] | None = None
    batch: int | None = None
    log_volume: Callable[[Values], Any] = lambda coordinates: 0.0

    @property
    def args(self) -> tuple:
        """The arguments of the model; arrays on the device, made when asked for."""
        return tuple(map(jnp.asarray, self.data))

    @cached_property
    def coordinates(self) -> dict[str, np.ndarray]:
        """All nodes of the tensor product, (G,) by coordinate."""
        meshes = np.meshgrid(
            *(axis.nodes for axis in self.axes.values()), indexing="ij"
        )
        return dict(zip(self.axes, (mesh.ravel() for mesh in meshes), strict=True))

    @cached_property
    def log_mass(self) -> np.ndarray:
        """Log of the joint density times the weight of each node, (G,)."""
        weights = np.meshgrid(
            *(axis.log_weights for axis in self.axes.values()), indexing="ij"
        )
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            return self.log_joint(self.coordinates) + sum(
                weight.ravel() for weight in weights
            )

    @cached_property
    def log_evidence(self) -> float:
        """Log of the integral of the joint density."""
        return float(np.logaddexp.reduce(self.log_mass))

    @cached_property
    def probabilities(self) -> np.ndarray:
        """Posterior probability of each node, (G,)."""
        return np.exp(self.log_mass - self.log_evidence)

    @cached_property
    def nodes(self) -> dict[str, np.ndarray]:
        """Values of the latent sites at the nodes, (G, *event)."""
        return {
            name: np.asarray(value)
            for name, value in self.sites(self.coordinates).items()
        }

    @cached_property
    def site_names(self) -> set[str]:
        """Names of the sites that are integrated."""
        return set(
            self.sites({name: axis.nodes[:1] for name, axis in self.axes.items()})
        )

    def draws(self, size: int) -> dict[str, np.ndarray]:
        """Values of the sites at nodes drawn from the posterior, (size, *event)."""
        rng = np.random.default_rng(0)
        chosen = rng.choice(len(self.probabilities), size, p=self.probabilities)
        values = {name: value[chosen] for name, value in self.nodes.items()}
        return self.completed(values, rng) if self.completed else values


def features(sites: Values) -> np.ndarray:
    """What is compared: all elements of all sites and their products, (draws, F)."""
    elements = np.concatenate(
        [np.reshape(sites[k], (len(sites[k]), -1)) for k in sorted(sites)], axis=1
    )
    first, second = np.triu_indices(elements.shape[1])
    return np.concatenate(
        [elements, elements[:, first] * elements[:, second]], axis=1
    ).astype(np.float64)
