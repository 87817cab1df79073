"""Predictions of infinitely wide networks: exact Bayesian regression, and ensembles
trained by gradient descent.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.scipy.linalg import solve_triangular
from jax.typing import ArrayLike

from numpyro_bnn._checks import (
    argument_error,
    as_floats,
    check_finite,
    check_same_length,
)
from numpyro_bnn._options import Positive, RandomKey, Switch, checked
from numpyro_bnn._types import Shape
from numpyro_bnn.infinite.kernels import nngp, prior_variance
from numpyro_bnn.infinite.prior_moments import Scales
from numpyro_bnn.nn import Layer
from numpyro_bnn.nn.base import Net
from numpyro_bnn.priors.base import PriorLike

# Jitter added to the diagonal, relative to its mean: none, then from a few rounding
# errors upwards by factors of ten.
STEPS = 8


class Prediction(NamedTuple):
    """Normal distribution of the function at M inputs; add noise_sd^2 to the variance
    for an observation.

    :param mean: (M,), or (M, K) for K outputs.
    :param covariance: (M, M), shared by the outputs; or its diagonal, (M,).
    """

    mean: np.ndarray
    covariance: np.ndarray


@dataclass(frozen=True, eq=False)
class GPRegression:
    """Posterior of the Gaussian process given data; returned by :func:`gp_regression`,
    in float64.

    :ivar net: the network.
    :ivar prior: its prior.
    :ivar scales: values of the prior's hyper-sites.
    :ivar x: inputs of the data.
    :ivar y: targets, (N,) or (N, K).
    :ivar noise_sd: sd of the observations around the function.
    :ivar log_marginal_likelihood: log p(y | x), summed over the outputs.
    :ivar jitter: amount added to the diagonal of K + noise_sd^2 I; 0 if none was
        needed.

    >>> import numpy as np
    >>> from numpyro_bnn import nn
    >>> x = np.linspace(-1, 1, 9)[:, None]
    >>> gp = gp_regression(nn.MLP([64, 1], "erf"), x, np.sin(3 * x[:, 0]), noise_sd=0.1)
    >>> (
    ...     gp.predict(x[:2]).covariance.shape,
    ...     gp.predict(x[:2], diagonal=True).covariance.shape,
    ... )
    ((2, 2), (2,))
    """

    net: Layer
    prior: PriorLike
    scales: Scales
    x: np.ndarray
    y: np.ndarray
    noise_sd: float
    log_marginal_likelihood: float
    jitter: float
    _lower: np.ndarray
    _whitened: np.ndarray

    @checked("GPRegression.predict")
    def predict(
        self, x: ArrayLike | None = None, diagonal: Switch = False
    ) -> Prediction:
        """Posterior mean and covariance of the function.

        :param x: ``(M, *input_shape)``; by default the inputs of the data.
        :param diagonal: variances only.
        :return: a :class:`Prediction`, in float64.
        :raises ValueError: for NaN and shapes unlike those of the data.
        """
        call = "GPRegression.predict"
        if x is not None:
            check_finite(call, "x", x)
            if np.shape(x)[1:] != self.x.shape[1:]:
                instead = f"Pass (M, *{self.x.shape[1:]}), like the data."
                raise argument_error(call, "x", f"shape {np.shape(x)}", instead)
        new = self.x if x is None else np.asarray(x, np.float64)
        with jax.enable_x64(True):
            cross = jnp.asarray(self._kernel(self.x, None if x is None else new))
            half = solve_triangular(self._lower, cross, lower=True)
            mean = half.T @ self._whitened
            if diagonal:
                prior_variances = prior_variance(
                    call, self.net, new, self.prior, self.scales
                )
                covariance = jnp.maximum(prior_variances - jnp.sum(half**2, axis=0), 0)
            else:
                covariance = jnp.asarray(self._kernel(new, None)) - half.T @ half
            return Prediction(np.asarray(mean), np.asarray(covariance))

    def log_density(self, x: ArrayLike, y: ArrayLike) -> np.ndarray:
        """Log predictive density of each new observation, noise included.

        :param x: ``(M, *input_shape)``.
        :param y: (M,), or (M, K), like the observations of the regression.
        :return: (M,), summed over outputs.
        :raises ValueError: for ``y`` of another shape than the predictions.
        """
        from scipy.stats import norm

        check_finite("GPRegression.log_density", "y", y)
        mean, variance = self.predict(x, diagonal=True)
        if np.shape(y) != mean.shape:
            instead = (
                f"Pass {mean.shape}: one row per row of `x`, with the outputs of the "
                f"data."
            )
            raise argument_error(
                "GPRegression.log_density", "y", f"shape {np.shape(y)}", instead
            )
        sd = np.sqrt(
            variance.reshape((-1,) + (1,) * (mean.ndim - 1)) + self.noise_sd**2
        )
        return norm.logpdf(np.asarray(y), mean, sd).reshape(len(mean), -1).sum(axis=1)

    @checked("GPRegression.sample")
    def sample(
        self,
        rng_key: RandomKey,
        x: ArrayLike | None = None,
        sample_shape: Shape = (),
    ) -> np.ndarray:
        """Posterior draws of the function, without noise.

        :param rng_key: key of the draws.
        :param x: inputs ``(M, *input_shape)``; by default the inputs of the data.
        :return: ``(*sample_shape, M)``, or ``(*sample_shape, M, K)``.
        """
        mean, covariance = self.predict(x)
        with jax.enable_x64(True):
            lower = np.asarray(factorize(jnp.asarray(covariance)).lower)
            noise = np.asarray(jax.random.normal(rng_key, (*sample_shape, *mean.shape)))
        return (
            mean + np.einsum("mn,...nk->...mk", lower, noise)
            if mean.ndim > 1
            else mean + noise @ lower.T
        )

    def _kernel(self, x1: Any, x2: Any) -> Any:
        return nngp(self.net, x1, x2, prior=self.prior, scales=self.scales)


@checked("infinite.gp_regression")
def gp_regression(
    net: Net,
    x: ArrayLike,
    y: ArrayLike,
    *,
    noise_sd: Positive,
    prior: PriorLike | None = None,
    scales: Scales = None,
) -> GPRegression:
    r"""Exact posterior of an infinitely wide Bayesian network with normal noise:
    Gaussian process regression.

    .. math::
        y &= f(x) + \sigma N(0, 1), \quad f \sim GP(0, K), \quad A = K + \sigma^2 I, \\
        E[f_* \mid y] &= K_* A^{-1} y, \quad
        \mathrm{Cov}[f_* \mid y] = K_{**} - K_* A^{-1} K_*', \\
        \log p(y) &= -\tfrac12 y' A^{-1} y - \tfrac12 \log |A| - \tfrac N2 \log 2\pi

    with K from :func:`nngp` and sigma the ``noise_sd``. Computed in float64; time grows
    as N^3, memory as N^2.

    :param net: as for :func:`nngp`.
    :param x: inputs ``(N, *input_shape)``.
    :param y: targets (N,), or (N, K): K outputs, independent given the kernel. Center
        them: their prior mean is 0.
    :param noise_sd: sd of the noise, in units of y.
    :param prior: as for :func:`nngp`; :func:`prior_fit` finds one.
    :param scales: values of the prior's hyper-sites.
    :return: a :class:`GPRegression`, which :func:`~numpyro_bnn.to_inference_data`
        accepts.
    :raises ValueError: as :func:`nngp` does; for targets that do not fit, or a noise
        that is not positive.

    Reference: Rasmussen & Williams (2006), algorithm 2.1.

    >>> import numpy as np
    >>> from numpyro_bnn import nn
    >>> x = np.array([[0.0], [1.0]])
    >>> gp = gp_regression(nn.Dense(1), x, np.array([0.0, 1.0]), noise_sd=1e-3)
    >>> gp.predict(np.array([[0.5]])).mean.round(3).tolist(), gp.jitter
    ([0.5], 0.0)
    """
    call = "infinite.gp_regression"
    x, y = as_floats(call, "x", x), as_floats(call, "y", y)
    check_data(call, x, y)
    with jax.enable_x64(True):
        factor = factorize(
            with_noise(jnp.asarray(nngp(net, x, prior=prior, scales=scales)), noise_sd)
        )
        if bool(jnp.isnan(factor.lower).any()):
            came = f"a kernel that no jitter makes positive definite, with {noise_sd}"
            raise argument_error(
                call, "noise_sd", came, "Pass a larger one, or remove repeated inputs."
            )
        whitened = solve_triangular(factor.lower, y, lower=True)
        return GPRegression(
            net,
            prior,
            scales,
            x,
            y,
            noise_sd=float(noise_sd),
            log_marginal_likelihood=float(factor.log_density(whitened)),
            jitter=float(factor.jitter),
            _lower=np.asarray(factor.lower),
            _whitened=np.asarray(whitened),
        )


def check_data(call: str, x: ArrayLike, y: ArrayLike) -> None:
    """Refuse NaN, targets of another rank, and lengths that differ."""
    for argument, value in (("x", x), ("y", y)):
        check_finite(call, argument, value)
    if np.ndim(y) not in (1, 2):
        raise argument_error(
            call, "y", f"shape {np.shape(y)}", "Pass targets of shape (N,) or (N, K)."
        )
    check_same_length(call, x=x, y=y)


class CholeskyFactor(NamedTuple):
    """L L' = A + jitter I; L is NaN if even the largest jitter was not enough."""

    lower: Array
    jitter: Array

    def log_density(self, whitened: Array) -> Array:
        """Log density of y ~ N(0, L L') from L^-1 y, summed over the outputs."""
        log_norm = jnp.sum(jnp.log(jnp.diagonal(self.lower)))
        log_norm += 0.5 * len(self.lower) * jnp.log(2 * jnp.pi)
        return -0.5 * jnp.sum(whitened**2) - whitened[0].size * log_norm


def factorize(matrix: Array) -> CholeskyFactor:
    """Cholesky factor of a covariance, with the least jitter of 0, e, 10 e, ... that
    works (e: N rounding errors).
    """
    unit = len(matrix) * jnp.finfo(matrix.dtype).eps * jnp.mean(jnp.diagonal(matrix))
    identity = jnp.eye(len(matrix), dtype=matrix.dtype)

    def attempt(step: Array) -> tuple[Array, CholeskyFactor]:
        jitter = jnp.where(step > 0, unit * 10.0 ** (step - 1), 0)
        lower = jnp.linalg.cholesky(matrix + jitter * identity)
        return step, CholeskyFactor(lower, jitter)

    def failed(state: tuple[Array, CholeskyFactor]) -> Array:
        step, factor = state
        return jnp.any(jnp.isnan(factor.lower)) & (step < STEPS)

    first = attempt(jnp.zeros((), matrix.dtype))
    return lax.while_loop(failed, lambda state: attempt(state[0] + 1), first)[1]


def with_noise(kernel: Any, noise_sd: ArrayLike) -> Array:
    """Covariance of observations, from that of the function."""
    return kernel + noise_sd**2 * jnp.eye(len(kernel), dtype=kernel.dtype)
