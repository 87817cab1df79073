"""Infinitely wide networks trained by gradient descent: a Gaussian process at every time."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_bnn import _checks
from numpyro_bnn._checks import argument_error
from numpyro_bnn.infinite.gp import Prediction
from numpyro_bnn.infinite.kernel import both_kernels
from numpyro_bnn.nn import Layer

__all__ = ["ntk_ensemble"]


def ntk_ensemble(
    net: Layer,
    x: Any,
    y: Any,
    x_new: Any,
    *,
    time: float = float("inf"),
    prior: Any = None,
    scales: Mapping[str, Any] | None = None,
) -> Prediction:
    r"""Distribution of infinitely wide networks, drawn from the prior and trained for some time.

    Gradient flow dv/dt = -d/dv sum_n (f(x_n) - y_n)^2 / 2 on the standardized parameters of :func:`ntk`. With K the
    NNGP kernel and T the tangent kernel,

    .. math::
        E[f_*] &= G y, \qquad G = T_* T^{-1} (I - e^{-T t}), \\
        \mathrm{Cov}[f_*] &= K_{**} + G K G' - (G K_*' + K_* G').

    This is what an ensemble of such networks gives, not a Bayesian posterior. After full-batch steps with learning
    rate r on the standardized parameters t is r times their number, where r is small against 2 / the largest
    eigenvalue of T.

    :param net: as for :func:`nngp`.
    :param x: training inputs ``(N, *input_shape)``.
    :param y: targets (N,), or (N, K).
    :param x_new: inputs ``(M, *input_shape)``.
    :param time: t; infinity for networks trained to the end.
    :param prior: what the parameters are drawn from, as for :func:`nngp`.
    :param scales: values of the prior's hyper-sites.
    :return: a :class:`Prediction`, in float64. At infinite time directions that T does not reach within rounding
        (repeated inputs) stay as they were drawn.
    :raises ValueError: as :func:`nngp` does; for targets that do not fit, or a negative time.

    Reference: Lee et al. (2019), *Wide neural networks of any depth evolve as linear models*, equations (13)-(15).

    >>> import numpy as np
    >>> from numpyro_bnn import nn
    >>> x = np.array([[0.0], [1.0]])
    >>> trained = ntk_ensemble(nn.MLP([64, 1], "relu"), x, np.array([1.0, 2.0]), x)
    >>> trained.mean.round(6).tolist(), bool(abs(trained.covariance).max() < 1e-9)
    ([1.0, 2.0], True)
    """
    call = "infinite.ntk_ensemble"
    _checks.check_finite(call, "y", y)
    if np.ndim(y) not in (1, 2):
        raise argument_error(call, "y", f"shape {np.shape(y)}", "Pass targets of shape (N,) or (N, K).")
    _checks.check_same_length(call, x=x, y=y)
    if not np.ndim(time) == 0 or not float(time) >= 0:
        raise argument_error(call, "time", time, "Pass 0 or more, `float('inf')` for the end of training.")
    x, y, x_new = (np.asarray(value, np.float64) for value in (x, y, x_new))
    with jax.enable_x64(True):
        train, cross, new = (
            both_kernels(call, net, *pair, prior=prior, scales=scales)
            for pair in ((x, None), (x_new, x), (x_new, None))
        )
        gain = jnp.asarray(cross.ntk) @ _learned(jnp.asarray(train.ntk), float(time))
        half = gain @ train.nngp
        mixed = gain @ jnp.asarray(cross.nngp).T
        covariance = new.nngp + half @ gain.T - mixed - mixed.T
        return Prediction(np.asarray(gain @ y), np.asarray((covariance + covariance.T) / 2))


def _learned(kernel: jax.Array, time: float) -> jax.Array:
    """T^-1 (I - exp(-T t)), in the eigenvectors of T."""
    values, vectors = jnp.linalg.eigh(kernel)
    reached = values > len(values) * jnp.finfo(values.dtype).eps * values[-1]
    safe = jnp.where(reached, values, 1)
    # Eigenvalues that are 0 learn at rate t times 0: for the rest of an infinite time, not at all.
    rates = jnp.where(reached, -jnp.expm1(-safe * time) / safe, 0 if np.isinf(time) else time)
    return (vectors * rates) @ vectors.T
