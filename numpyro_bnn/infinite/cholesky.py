"""Cholesky factors that say what they added."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import cho_solve, solve_triangular

__all__ = ["Factor", "factorize", "log_density", "whitened_density"]

# Added to the diagonal, relative to its mean: nothing, then steps of ten from a few rounding errors upwards.
STEPS = 8


class Factor(NamedTuple):
    """L L' = A + jitter I.

    :param lower: L, (N, N); NaN where even the largest jitter was not enough.
    :param jitter: what was added to the diagonal, 0 where A itself could be factorized.
    """

    lower: jax.Array
    jitter: jax.Array


def factorize(matrix: jax.Array) -> Factor:
    """Cholesky factor of a covariance, with the smallest jitter of 0, e, 10 e, ... that makes it possible.

    e is N times the rounding error of the mean of the diagonal.

    :param matrix: symmetric, (N, N).

    >>> singular = factorize(jnp.ones((2, 2)))
    >>> bool(singular.jitter > 0), float(factorize(jnp.eye(2)).jitter)
    (True, 0.0)
    """
    unit = len(matrix) * jnp.finfo(matrix.dtype).eps * jnp.mean(jnp.diagonal(lax.stop_gradient(matrix)))

    def attempt(step: jax.Array) -> tuple[jax.Array, Factor]:
        jitter = jnp.where(step > 0, unit * 10.0 ** (step - 1), 0)
        raised = matrix + jitter * jnp.eye(len(matrix), dtype=matrix.dtype)
        return step, Factor(jnp.linalg.cholesky(raised), jitter)

    def failed(state: tuple[jax.Array, Factor]) -> jax.Array:
        step, factor = state
        return jnp.any(jnp.isnan(factor.lower)) & (step < STEPS)

    return lax.while_loop(failed, lambda state: attempt(state[0] + 1), attempt(jnp.zeros((), matrix.dtype)))[
        1
    ]


@jax.custom_jvp
def log_density(matrix: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log density of y ~ N(0, A), summed over the outputs, and the jitter that A needed.

    With a = A^-1 y its derivative is dA -> a' dA a / 2 - tr(A^-1 dA) / 2: one factor and one inverse, where the
    derivative of the factor would take several.

    :param matrix: A, (N, N).
    :param y: (N,), or (N, K).

    >>> round(float(log_density(jnp.eye(1), jnp.zeros(1))[0]), 4)
    -0.9189
    """
    factor = factorize(matrix)
    return whitened_density(factor.lower, solve_triangular(factor.lower, y, lower=True)), factor.jitter


def whitened_density(lower: jax.Array, whitened: jax.Array) -> jax.Array:
    """Log density of y ~ N(0, L L'), summed over the outputs.

    :param lower: L, (N, N).
    :param whitened: L^-1 y, (N,) or (N, K).

    >>> round(float(whitened_density(2 * jnp.eye(1), jnp.zeros(1))), 4)
    -1.6121
    """
    log_norm = jnp.sum(jnp.log(jnp.diagonal(lower))) + 0.5 * len(lower) * jnp.log(2 * jnp.pi)
    return -0.5 * jnp.sum(whitened**2) - whitened[0].size * log_norm


@log_density.defjvp
def _log_density_jvp(primals: tuple, tangents: tuple) -> tuple[Any, Any]:
    (matrix, y), (d_matrix, d_y) = primals, tangents
    factor = factorize(matrix)
    whitened = solve_triangular(factor.lower, y, lower=True)
    solved = solve_triangular(factor.lower, whitened, lower=True, trans=1)
    columns = solved.reshape((len(y), -1))
    inverse = cho_solve((factor.lower, True), jnp.eye(len(y), dtype=matrix.dtype))
    slope = 0.5 * (columns @ columns.T - columns.shape[1] * inverse)
    change = jnp.sum(slope * d_matrix) - jnp.sum(solved * d_y)
    return (whitened_density(factor.lower, whitened), factor.jitter), (change, jnp.zeros_like(factor.jitter))
