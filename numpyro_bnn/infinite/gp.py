"""Exact regression with the Gaussian process of an infinitely wide network."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular
from scipy.stats import norm

from numpyro_bnn import _checks
from numpyro_bnn._checks import argument_error
from numpyro_bnn.infinite.cholesky import factorize, log_density, whitened_density
from numpyro_bnn.infinite.kernel import nngp, prior_variance
from numpyro_bnn.nn import Layer

__all__ = ["GPRegression", "Prediction", "gp_regression", "log_marginal_likelihood"]


class Prediction(NamedTuple):
    """Normal distribution of the function at M inputs; add noise_sd^2 to the variance for an observation.

    :param mean: (M,), or (M, K) for K outputs.
    :param covariance: (M, M), shared by the outputs; or its diagonal, (M,).
    """

    mean: np.ndarray
    covariance: np.ndarray


@dataclass(frozen=True, eq=False)
class GPRegression:
    """Posterior of the Gaussian process given data; made by :func:`gp_regression`, in float64.

    :ivar net: the network.
    :ivar prior: its prior.
    :ivar scales: values of the prior's hyper-sites.
    :ivar x: inputs of the data.
    :ivar y: targets, (N,) or (N, K).
    :ivar noise_sd: sd of the observations around the function.
    :ivar log_marginal_likelihood: log p(y | x), summed over the outputs.
    :ivar jitter: what had to be added to the diagonal of K + noise_sd^2 I; 0 if nothing.

    >>> import numpy as np
    >>> from numpyro_bnn import nn
    >>> x = np.linspace(-1, 1, 9)[:, None]
    >>> gp = gp_regression(nn.MLP([64, 1], "erf"), x, np.sin(3 * x[:, 0]), noise_sd=0.1)
    >>> gp.predict(x[:2]).covariance.shape, gp.predict(x[:2], diagonal=True).covariance.shape
    ((2, 2), (2,))
    """

    net: Layer
    prior: Any
    scales: Mapping[str, Any] | None
    x: np.ndarray
    y: np.ndarray
    noise_sd: float
    log_marginal_likelihood: float
    jitter: float
    _lower: np.ndarray
    _whitened: np.ndarray

    def predict(self, x: Any = None, diagonal: bool = False) -> Prediction:
        """Mean and covariance of the function at other inputs.

        :param x: ``(M, *input_shape)``; by default those of the data.
        :param diagonal: variances only.
        :return: a :class:`Prediction`, in float64.
        :raises ValueError: for NaN and shapes unlike those of the data.
        """
        call = "GPRegression.predict"
        if x is not None:
            _checks.check_finite(call, "x", x)
            if np.shape(x)[1:] != self.x.shape[1:]:
                instead = f"Pass (M, *{self.x.shape[1:]}), like the data."
                raise argument_error(call, "x", f"shape {np.shape(x)}", instead)
        new = self.x if x is None else np.asarray(x, np.float64)
        with jax.enable_x64(True):
            cross = jnp.asarray(self._kernel(self.x, None if x is None else new))
            half = solve_triangular(self._lower, cross, lower=True)
            mean = half.T @ self._whitened
            if diagonal:
                own = prior_variance(self.net, new, prior=self.prior, scales=self.scales)
                covariance = jnp.maximum(own - jnp.sum(half**2, axis=0), 0)
            else:
                covariance = jnp.asarray(self._kernel(new, None)) - half.T @ half
            return Prediction(np.asarray(mean), np.asarray(covariance))

    def log_density(self, x: Any, y: Any) -> np.ndarray:
        """Log density of single new observations, noise included.

        :param x: ``(M, *input_shape)``.
        :param y: (M,), or (M, K).
        :return: (M,), summed over outputs.
        """
        mean, variance = self.predict(x, diagonal=True)
        sd = np.sqrt(variance.reshape((-1,) + (1,) * (mean.ndim - 1)) + self.noise_sd**2)
        values = norm.logpdf(np.asarray(y), mean, sd)
        return values.reshape(len(mean), -1).sum(axis=1)

    def sample(self, rng_key: jax.Array, x: Any = None, sample_shape: tuple[int, ...] = ()) -> np.ndarray:
        """Draws of the function, without noise.

        :param rng_key: key of the draws.
        :param x: inputs ``(M, *input_shape)``; by default those of the data.
        :return: ``(*sample_shape, M)``, or ``(*sample_shape, M, K)``.
        """
        mean, covariance = self.predict(x)
        with jax.enable_x64(True):
            lower = np.asarray(factorize(jnp.asarray(covariance)).lower)
            noise = np.asarray(jax.random.normal(rng_key, (*sample_shape, *mean.shape)))
        return mean + np.einsum("mn,...nk->...mk", lower, noise) if mean.ndim > 1 else mean + noise @ lower.T

    def _kernel(self, x1: Any, x2: Any) -> Any:
        return nngp(self.net, x1, x2, prior=self.prior, scales=self.scales)


def gp_regression(
    net: Layer,
    x: Any,
    y: Any,
    *,
    noise_sd: float,
    prior: Any = None,
    scales: Mapping[str, Any] | None = None,
) -> GPRegression:
    r"""Posterior of an infinitely wide Bayesian network with normal noise, exactly.

    .. math::
        y &= f(x) + \sigma N(0, 1), \quad f \sim GP(0, K), \quad A = K + \sigma^2 I, \\
        E[f_* \mid y] &= K_* A^{-1} y, \quad \mathrm{Cov}[f_* \mid y] = K_{**} - K_* A^{-1} K_*', \\
        \log p(y) &= -\tfrac12 y' A^{-1} y - \tfrac12 \log |A| - \tfrac N2 \log 2\pi

    with K of :func:`nngp` and sigma the ``noise_sd``. Computed in float64; time grows with N^3, memory with N^2.

    :param net: as for :func:`nngp`.
    :param x: inputs ``(N, *input_shape)``.
    :param y: targets (N,), or (N, K): K outputs, independent given the kernel. Their prior mean is 0: center them.
    :param noise_sd: sd of the noise, in units of y.
    :param prior: as for :func:`nngp`; :func:`prior_fit` finds one.
    :param scales: values of the prior's hyper-sites.
    :return: a :class:`GPRegression`, which :func:`~numpyro_bnn.to_inference_data` takes.
    :raises ValueError: as :func:`nngp` does; for targets that do not fit, or a noise that is not positive.

    Reference: Rasmussen & Williams (2006), algorithm 2.1.

    >>> import numpy as np
    >>> from numpyro_bnn import nn
    >>> x = np.array([[0.0], [1.0]])
    >>> gp = gp_regression(nn.Dense(1), x, np.array([0.0, 1.0]), noise_sd=1e-3)
    >>> gp.predict(np.array([[0.5]])).mean.round(3).tolist(), gp.jitter
    ([0.5], 0.0)
    """
    call = "infinite.gp_regression"
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    check_data(call, x, y)
    if not np.ndim(noise_sd) == 0 or not 0 < float(noise_sd) < np.inf:
        raise argument_error(call, "noise_sd", noise_sd, "Pass a positive number, e.g. `noise_sd=0.1`.")
    with jax.enable_x64(True):
        covariance = with_noise(jnp.asarray(nngp(net, x, prior=prior, scales=scales)), noise_sd)
        factor = factorize(covariance)
        if bool(jnp.isnan(factor.lower).any()):
            came = f"a kernel that no jitter makes positive definite, with {noise_sd}"
            raise argument_error(call, "noise_sd", came, "Pass a larger one, or leave out repeated inputs.")
        whitened = solve_triangular(factor.lower, y, lower=True)
        value = whitened_density(factor.lower, whitened)
        lower, half = np.asarray(factor.lower), np.asarray(whitened)
    return GPRegression(
        net, prior, scales, x, y, float(noise_sd), float(value), float(factor.jitter), lower, half
    )


def log_marginal_likelihood(
    net: Layer,
    x: Any,
    y: Any,
    *,
    noise_sd: Any,
    prior: Any = None,
    scales: Mapping[str, Any] | None = None,
) -> jax.Array:
    """Log p(y | x) of :func:`gp_regression` as a JAX function, differentiable in hyper-parameters.

    In the precision of the session: set ``jax_enable_x64`` for more than a few hundred points.

    :param noise_sd: may be traced, and so may ``scales`` and the scales of distributions in ``prior``, e.g.
        ``prior={"*.bias": dist.Normal(0.0, b), "*": dist.Normal(0.0, s)}``.
    :return: a scalar.

    >>> import jax, jax.numpy as jnp
    >>> from numpyro_bnn import nn, priors
    >>> x, y = jnp.array([[0.0], [1.0]]), jnp.array([0.5, 1.0])
    >>> def evidence(scale):
    ...     settings = {"prior": priors.Hierarchical(), "scales": {"kernel_scale": scale}}
    ...     return log_marginal_likelihood(nn.Dense(1), x, y, noise_sd=0.5, **settings)
    >>> round(float(jax.grad(evidence)(1.0)), 4)
    -0.5184
    """
    call = "infinite.log_marginal_likelihood"
    check_data(call, x, y)
    kernel = jnp.asarray(nngp(net, x, prior=prior, scales=scales))
    return log_density(with_noise(kernel, noise_sd), jnp.asarray(y, kernel.dtype))[0]


def with_noise(kernel: jax.Array, noise_sd: Any) -> jax.Array:
    """Covariance of observations, from that of the function."""
    return kernel + noise_sd**2 * jnp.eye(len(kernel), dtype=kernel.dtype)


def check_data(call: str, x: Any, y: Any) -> None:
    """Refuse NaN, targets of another rank, and lengths that differ."""
    for argument, value in (("x", x), ("y", y)):
        _checks.check_finite(call, argument, value)
    if np.ndim(y) not in (1, 2):
        raise argument_error(call, "y", f"shape {np.shape(y)}", "Pass targets of shape (N,) or (N, K).")
    _checks.check_same_length(call, x=x, y=y)
