"""Marginal likelihood of a linear model at many values of a scale common to all priors and of one of all noise."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from numpyro_bnn.infer.linear import Parts, log_norms, whitened

__all__ = ["Rotated", "log_marginal_at", "rotate"]


class Rotated(NamedTuple):
    """A linear model :class:`~numpyro_bnn.infer.linear.Parts` in coordinates in which its covariance is graded.

    :param gram: (M, M) product of the rotated map with itself, M = min(N, P), large rows first.
    :param residual: (M,) the rotated residuals.
    :param left: the squares of residuals that the map does not reach.
    :param weight: sum of the weights of the data.
    :param freedom: sum over the weights of the model of 1 - the power of their prior.
    :param constant: what does not change with the scales.
    """

    gram: jax.Array
    residual: jax.Array
    left: jax.Array
    weight: jax.Array
    freedom: jax.Array
    constant: jax.Array


def rotate(parts: Parts, jacobian: jax.Array) -> Rotated:
    """Rotate the data so that most of the map lies in their first coordinates.

    The Cholesky decomposition of a matrix with such rows keeps the small ones exact beside the large ones; that of
    the covariance as it comes would lose them in single precision.

    :param parts: of the model.
    :param jacobian: (N, P) the linear map.

    >>> ones = jnp.ones(2)
    >>> parts = Parts(ones, ones, ones, 0 * ones, ones, ones, jnp.zeros(()))
    >>> rotate(parts, jnp.array([[0.0, 3.0], [1.0, 0.0]])).gram.tolist()
    [[9.0, 0.0], [0.0, 1.0]]
    """
    matrix, residual = whitened(parts, jacobian)
    order = jnp.argsort(-jnp.sum(matrix**2, 0))
    rotation, rows = jnp.linalg.qr(matrix[:, order])
    reached = rotation.T @ residual
    missed = residual - rotation @ reached
    noise, prior = log_norms(parts)
    return Rotated(
        rows @ rows.T,
        reached,
        jnp.sum(missed**2),
        jnp.sum(parts.weight),
        jnp.sum(1 - parts.prior_weight),
        noise + prior,
    )


def log_marginal_at(model: Rotated, log_prior: jax.Array, log_noise: jax.Array) -> jax.Array:
    r"""Log density of the data, sites integrated out, where scales are multiplied: :math:`O(\min(N, P)^3 / 3)`.

    :param model: what :func:`rotate` gives.
    :param log_prior: log of the factor of all prior sds.
    :param log_noise: log of the factor of all sds of the noise.

    >>> ones = jnp.ones(1)
    >>> model = rotate(Parts(ones, ones, ones, 0 * ones, ones, ones, jnp.zeros(())), jnp.ones((1, 1)))
    >>> from scipy import stats
    >>> bool(jnp.allclose(log_marginal_at(model, jnp.log(2.0), jnp.log(3.0)), stats.norm.logpdf(1, 0, 13**0.5)))
    True
    """
    eye = jnp.eye(model.gram.shape[0], dtype=model.gram.dtype)
    triangle = jnp.linalg.cholesky(eye + jnp.exp(2 * (log_prior - log_noise)) * model.gram)
    log_det = 2 * jnp.sum(jnp.log(jnp.diagonal(triangle)))
    squares = jnp.sum(solve_triangular(triangle, model.residual, lower=True) ** 2) + model.left
    scaled = model.freedom * log_prior - model.weight * log_noise
    return model.constant + scaled - 0.5 * (log_det + jnp.exp(-2 * log_noise) * squares)
