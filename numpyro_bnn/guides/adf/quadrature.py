"""Gauss-Hermite quadrature over independent Gaussians, in logarithms."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp

from numpyro_bnn.moments import Gaussian

__all__ = ["expectations", "log_expectation", "safe_sqrt"]

# Points per dimension: of one, and of two.
POINTS = {1: 64, 2: 24}


def safe_sqrt(var: jax.Array) -> jax.Array:
    """Square root whose gradient at 0 is 0 instead of infinite."""
    positive = var > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, var, 1.0)), 0.0)


def _nodes(dimensions: int) -> tuple[np.ndarray, np.ndarray]:
    """Points (Q, dimensions) and log weights (Q,) for the standard normal."""
    if dimensions == 0:
        return np.zeros((1, 0)), np.zeros(1)
    x, w = np.polynomial.hermite_e.hermegauss(POINTS[dimensions])
    grid = np.array(list(itertools.product(x, repeat=dimensions))).reshape(-1, dimensions)
    weights = np.array([np.prod(part) for part in itertools.product(w, repeat=dimensions)])
    return grid, np.log(weights / weights.sum())


def _at_nodes(fn: Callable, gaussians: Mapping[str, Gaussian]) -> tuple[Any, np.ndarray]:
    grid, log_weights = _nodes(len(gaussians))
    names = list(gaussians)

    def at(point: jax.Array) -> Any:
        return fn(
            {n: gaussians[n].mean + safe_sqrt(gaussians[n].var) * point[k] for k, n in enumerate(names)}
        )

    return jax.vmap(at)(jnp.asarray(grid)), log_weights


def log_expectation(fn: Callable[[Mapping[str, Any]], Any], gaussians: Mapping[str, Gaussian]) -> jax.Array:
    """log E[exp(fn(x))], element by element, over independent Gaussians by name (at most two).

    >>> x = {"x": Gaussian(jnp.array(0.5), jnp.array(2.0))}
    >>> round(float(log_expectation(lambda value: value["x"], x)), 5)         # m + v / 2
    1.5
    """
    values, log_weights = _at_nodes(fn, gaussians)
    return logsumexp(values + log_weights.reshape((-1,) + (1,) * (values.ndim - 1)), axis=0)


def expectations(fn: Callable[[Mapping[str, Any]], Any], gaussians: Mapping[str, Gaussian]) -> Any:
    """E[fn(x)] for every leaf of ``fn``, element by element.

    >>> x = {"x": Gaussian(jnp.array(0.5), jnp.array(2.0))}
    >>> round(float(expectations(lambda value: value["x"] ** 2, x)), 5)
    2.25
    """
    values, log_weights = _at_nodes(fn, gaussians)
    return jax.tree.map(lambda leaf: jnp.tensordot(jnp.exp(log_weights), leaf, 1), values)
