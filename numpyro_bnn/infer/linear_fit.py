"""Evidence and posterior of linear models in units of noise and prior: r ~ N(R w, I)
with w ~ N(0, I).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jax.scipy.linalg import solve_triangular


class LinearFit(NamedTuple):
    """The posterior N(w, S S') of models with p weights and n data, C = I + R'R;
    leading axes are independent models.

    :param root: (..., p, p) S, upper triangular with S S' = C^-1.
    :param weights: (..., p, 1) w, the posterior mean.
    :param error: (..., n, 1) r - R w.
    :param gain: (..., n, p) R C^-1.
    """

    root: Array
    weights: Array
    error: Array
    gain: Array


@jax.custom_jvp
def log_evidence(matrix: Array, residual: Array) -> Array:
    """log N(r; 0, I + R R') without its constant, of (..., n, p) R and (..., n, 1) r,
    by the smaller of n and p.
    """
    return _evidence(matrix, residual)[0]


@log_evidence.defjvp
def _slope(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    """In closed form: nothing is differentiated through a decomposition."""
    value, fit = _evidence(*primals)
    by_matrix = fit.error @ fit.weights.mT - fit.gain
    return value, jnp.sum(by_matrix * tangents[0], (-2, -1)) - jnp.sum(
        fit.error * tangents[1], (-2, -1)
    )


def _evidence(matrix: Array, residual: Array) -> tuple[Array, LinearFit]:
    if matrix.shape[-1] <= matrix.shape[-2]:
        fit = linear_fit(matrix, residual)
    else:  # (I + R R')^-1 R = R (I + R'R)^-1
        root, _, _, gain = linear_fit(matrix.mT, jnp.zeros_like(matrix[..., :1, :].mT))
        error = root @ (root.mT @ residual)
        fit = LinearFit(root, matrix.mT @ error, error, gain.mT)
    log_root = jnp.sum(jnp.log(jnp.abs(jnp.diagonal(fit.root, axis1=-2, axis2=-1))), -1)
    squares = jnp.sum(fit.error**2, (-2, -1)) + jnp.sum(fit.weights**2, (-2, -1))
    return log_root - 0.5 * squares, fit


@jax.custom_jvp
def linear_fit(matrix: Array, residual: Array) -> LinearFit:
    """The posterior of (..., n, p) R and (..., n, 1) r.

    By a Cholesky decomposition of C where that loses at most half of the digits, as in
    most networks; else by a QR decomposition of R stacked on the identity, of 2.5 times
    the cost: prior scales in one model can differ by many orders of magnitude, or
    features be nearly collinear, and single precision copes with the condition number
    of R, but not with its square. Derivatives of all orders are in closed form.
    """
    return LinearFit(*_fit(matrix, residual))


@linear_fit.defjvp
def _change(primals: tuple, tangents: tuple) -> tuple[LinearFit, LinearFit]:
    (matrix, residual), (d_matrix, d_residual) = primals, tangents
    fit = linear_fit(matrix, residual)
    root, weights, error, gain = fit
    orthonormal, d_orthonormal = matrix @ root, d_matrix @ root
    half = orthonormal.mT @ d_orthonormal
    change = half + half.mT  # S' dC S
    d_root = -root @ (
        jnp.triu(change) - 0.5 * change * jnp.eye(change.shape[-1], dtype=change.dtype)
    )
    d_error = d_residual - d_matrix @ weights
    d_weights = root @ (d_orthonormal.mT @ error) + gain.mT @ d_error
    d_gain = (d_orthonormal - orthonormal @ change) @ root.mT
    return fit, LinearFit(d_root, d_weights, d_error - matrix @ d_weights, d_gain)


@custom_vmap
def _fit(matrix: Array, residual: Array) -> tuple[Array, ...]:
    if matrix.ndim == 2:
        return _each(matrix, residual)
    # outputs of one layer, with equal scales of prior and noise
    same = jnp.all(matrix == matrix[..., :1, :, :])
    return lax.cond(same, _shared, _each, matrix, residual)


@_fit.def_vmap
def _together(size: int, batched: list[bool], *inputs: Array) -> tuple[Any, Any]:
    """Under ``vmap`` one branch for all models, not both branches for each."""
    arrays = []
    for array, is_batched in zip(inputs, batched, strict=True):
        if not is_batched:
            array = jnp.broadcast_to(array, (size, *array.shape))
        arrays.append(array)
    return _fit(*arrays), (True,) * 4


def _shared(matrix: Array, residual: Array) -> tuple[Array, ...]:
    """Several columns r for one R."""
    root, weights, error, gain = _each(matrix[..., 0, :, :], residual[..., 0].mT)

    def repeated(array: Array) -> Array:
        shape = (*matrix.shape[:-2], *array.shape[-2:])
        return jnp.broadcast_to(array[..., None, :, :], shape)

    weights, error = weights.mT[..., None], error.mT[..., None]
    return repeated(root), weights, error, repeated(gain)


def _each(matrix: Array, residual: Array) -> tuple[Array, ...]:
    eye = jnp.eye(matrix.shape[-1], dtype=matrix.dtype)
    gram = matrix.mT @ matrix + eye
    root = _inverse(jnp.linalg.cholesky(gram, symmetrize_input=False).mT)
    # The sum of the inverse eigenvalues of C in units of its diagonal; not a number if
    # C has lost its smallest ones.
    lost = jnp.sum(
        jnp.diagonal(gram, axis1=-2, axis2=-1)[..., None] * root**2, (-2, -1)
    )
    sound = jnp.all(lost < jnp.finfo(gram.dtype).eps ** -0.5)
    return lax.cond(sound, _by_cholesky, _by_qr, matrix, residual, root)


def _by_cholesky(matrix: Array, residual: Array, root: Array) -> tuple[Array, ...]:
    covariance = root @ root.mT
    weights = covariance @ (matrix.mT @ residual)
    error = residual - matrix @ weights
    step = covariance @ (matrix.mT @ error - weights)  # zero but for rounding
    return root, weights + step, error - matrix @ step, matrix @ covariance


def _by_qr(matrix: Array, residual: Array, _: Array) -> tuple[Array, ...]:
    orthonormal, triangle = _decompose(matrix)
    root, projected = _inverse(triangle), orthonormal.mT @ residual
    weights, error = root @ projected, residual - orthonormal @ projected
    # a second pass of Gram and Schmidt
    step = orthonormal.mT @ error - root.mT @ weights
    gain = orthonormal @ root.mT
    return root, weights + root @ step, error - orthonormal @ step, gain


def _inverse(triangle: Array) -> Array:
    eye = jnp.broadcast_to(
        jnp.eye(triangle.shape[-1], dtype=triangle.dtype), triangle.shape
    )
    return solve_triangular(triangle, eye)


def _decompose(matrix: Array) -> tuple[Array, Array]:
    """(..., n, p) Q and (..., p, p) T with R = Q T and T'T = I + R'R."""
    *batch, n, p = matrix.shape
    eye = jnp.broadcast_to(jnp.eye(p, dtype=matrix.dtype), (*batch, p, p))
    factor, triangle = jnp.linalg.qr(jnp.concatenate([matrix, eye], -2))
    return factor[..., :n, :], triangle
