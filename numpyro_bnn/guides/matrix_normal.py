"""The matrix normal distribution of a flattened matrix."""

from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.linalg import solve_triangular
from numpyro.distributions import constraints

__all__ = ["FlatMatrixNormal"]


class FlatMatrixNormal(dist.Distribution):
    r"""vec(M + A E B^T) with E of independent unit normals: a Gaussian over R C numbers, row by row.

    :param loc: (R C,), the entries of M.
    :param row: A, lower triangular (R, R), or its diagonal (R,).
    :param column: B, lower triangular (C, C), or its diagonal (C,).

    >>> fn = FlatMatrixNormal(jnp.zeros(6), jnp.eye(3), jnp.array([1.0, 2.0]))
    >>> fn.variance.tolist()
    [1.0, 4.0, 1.0, 4.0, 1.0, 4.0]
    """

    # The factors are triangular or diagonal; NumPyro has no constraint for "either", and none is checked.
    arg_constraints = {"loc": constraints.real_vector}  # noqa: RUF012
    support = constraints.real_vector
    reparametrized_params = ["loc", "row", "column"]  # noqa: RUF012
    pytree_data_fields = ("row", "column")

    def __init__(
        self, loc: jax.Array, row: jax.Array, column: jax.Array, *, validate_args: Any = None
    ) -> None:
        self.loc, self.row, self.column = loc, row, column
        super().__init__(
            batch_shape=jnp.shape(loc)[:-1], event_shape=jnp.shape(loc)[-1:], validate_args=validate_args
        )

    @property
    def _matrix(self) -> tuple[int, int]:
        return self.row.shape[0], self.column.shape[0]

    def sample(self, key: jax.Array, sample_shape: tuple[int, ...] = ()) -> jax.Array:
        """M + A E B^T, flattened."""
        noise = jax.random.normal(key, (*sample_shape, *self.batch_shape, *self._matrix), self.loc.dtype)
        noise = self.row[:, None] * noise if self.row.ndim == 1 else self.row @ noise
        noise = noise * self.column if self.column.ndim == 1 else noise @ self.column.T
        return self.loc + noise.reshape((*noise.shape[:-2], -1))

    def log_prob(self, value: jax.Array, intermediates: Any = None) -> jax.Array:
        """log N(value; loc, (A A^T) x (B B^T))."""
        rows, columns = self._matrix
        noise = (value - self.loc).reshape((*jnp.shape(value)[:-1], rows, columns))
        noise = _solve(self.row, noise)
        noise = jnp.swapaxes(_solve(self.column, jnp.swapaxes(noise, -1, -2)), -1, -2)
        log_det = columns * _log_det(self.row) + rows * _log_det(self.column)
        quadratic = jnp.sum(noise**2, axis=(-1, -2)) + rows * columns * jnp.log(2 * jnp.pi)
        return -0.5 * quadratic - log_det

    @property
    def mean(self) -> jax.Array:
        return self.loc

    @property
    def variance(self) -> jax.Array:
        return jnp.outer(_squares(self.row), _squares(self.column)).reshape(-1)


def _solve(factor: jax.Array, value: jax.Array) -> jax.Array:
    """The inverse of a factor times matrices (..., n, m)."""
    if factor.ndim == 1:
        return value / factor[:, None]
    flat = jnp.moveaxis(value, -2, 0).reshape((factor.shape[0], -1))
    shape = (factor.shape[0], *value.shape[:-2], value.shape[-1])
    return jnp.moveaxis(solve_triangular(factor, flat, lower=True).reshape(shape), 0, -2)


def _log_det(factor: jax.Array) -> jax.Array:
    return jnp.log(factor if factor.ndim == 1 else jnp.diagonal(factor)).sum()


def _squares(factor: jax.Array) -> jax.Array:
    """The diagonal of factor times its transpose."""
    return factor**2 if factor.ndim == 1 else (factor**2).sum(1)
