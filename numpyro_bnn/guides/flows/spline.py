"""Monotone rational-quadratic splines with linear tails, elementwise and as a coupling layer."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_bnn.guides.flows.conditioner import Conditioner
from numpyro_bnn.guides.flows.coupling import CouplingTransform, scale_and_shift

__all__ = ["RationalQuadraticCoupling", "num_parameters", "spline", "spline_inverse"]

MIN_BIN = 1e-3  # smallest share of the interval that one bin takes
MIN_SLOPE = 1e-3


class Bin(NamedTuple):
    """The bin that an element falls in: left corner, width, height, and slopes at its two ends."""

    x: jax.Array
    y: jax.Array
    width: jax.Array
    height: jax.Array
    left_slope: jax.Array
    right_slope: jax.Array


def num_parameters(num_bins: int) -> int:
    """Scale, shift, K widths, K heights and K - 1 inner slopes per element."""
    return 3 * num_bins + 1


def spline(x: jax.Array, raw: jax.Array, bound: float) -> tuple[jax.Array, jax.Array]:
    r"""Map (..., D) elementwise; the interval [-b, b] onto itself by K bins, and the identity outside.

    In a bin with corners (x_k, y_k) and (x_{k+1}, y_{k+1}), slopes d_k and d_{k+1}, secant s and
    :math:`\xi = (x - x_k)/(x_{k+1} - x_k)`,

    .. math:: y = y_k + \frac{(y_{k+1} - y_k)[s \xi^2 + d_k \xi (1 - \xi)]}
                              {s + (d_k + d_{k+1} - 2 s) \xi (1 - \xi)}.

    :param x: (..., D).
    :param raw: unconstrained parameters (..., 3K - 1, D); zeros give the identity.
    :param bound: b.
    :return: y and log dy/dx, both (..., D).

    Reference: Durkan, Bekasov, Murray & Papamakarios (2019), *Neural spline flows*, equations 4-8.
    """
    inside = jnp.abs(x) < bound
    clipped = jnp.clip(x, -bound, bound)
    b = _find_bin(clipped, raw, bound, by_height=False)
    xi = (clipped - b.x) / b.width
    secant = b.height / b.width
    both = xi * (1.0 - xi)
    denominator = secant + (b.left_slope + b.right_slope - 2.0 * secant) * both
    y = b.y + b.height * (secant * xi**2 + b.left_slope * both) / denominator
    numerator = b.right_slope * xi**2 + 2.0 * secant * both + b.left_slope * (1.0 - xi) ** 2
    log_slope = 2.0 * jnp.log(secant) + jnp.log(numerator) - 2.0 * jnp.log(denominator)
    return jnp.where(inside, y, x), jnp.where(inside, log_slope, 0.0)


def spline_inverse(y: jax.Array, raw: jax.Array, bound: float) -> jax.Array:
    """Inverse of :func:`spline` in its first argument: the root of a quadratic, in the form without cancellation."""
    inside = jnp.abs(y) < bound
    clipped = jnp.clip(y, -bound, bound)
    b = _find_bin(clipped, raw, bound, by_height=True)
    secant = b.height / b.width
    rise = clipped - b.y
    bend = rise * (b.left_slope + b.right_slope - 2.0 * secant)
    quadratic = b.height * (secant - b.left_slope) + bend
    linear = b.height * b.left_slope - bend
    constant = -secant * rise
    # Positive in exact arithmetic; rounding may take it below at the edge of a bin.
    discriminant = jnp.maximum(linear**2 - 4.0 * quadratic * constant, 0.0)
    xi = 2.0 * constant / (-linear - jnp.sqrt(discriminant))
    return jnp.where(inside, b.x + b.width * xi, y)


def _find_bin(value: jax.Array, raw: jax.Array, bound: float, by_height: bool) -> Bin:
    """Comparisons and sums over the K bins instead of a search and gathers, which compile to slow loops."""
    num_bins = (raw.shape[-2] + 1) // 3
    widths = _sizes(raw[..., :num_bins, :], bound)
    heights = _sizes(raw[..., num_bins : 2 * num_bins, :], bound)
    # softplus(c) = 1 - MIN_SLOPE makes zeros the slope 1.
    offset = float(np.log(np.expm1(1.0 - MIN_SLOPE)))
    inner = MIN_SLOPE + jax.nn.softplus(raw[..., 2 * num_bins :, :] + offset)
    ends = jnp.ones((*inner.shape[:-2], 1, inner.shape[-1]), inner.dtype)
    slopes = jnp.concatenate([ends, inner, ends], axis=-2)
    upper = jax.lax.stop_gradient(jnp.cumsum(heights if by_height else widths, axis=-2))[..., :-1, :] - bound
    beyond = value[..., None, :] >= upper  # inner knots left of the value
    none = jnp.zeros((*beyond.shape[:-2], 1, beyond.shape[-1]), bool)
    passed = jnp.concatenate([beyond, none], axis=-2)  # bins that lie left of the value
    reached = jnp.concatenate([~none, beyond], axis=-2)
    here = reached & ~passed

    def pick(values: jax.Array, where: jax.Array = here) -> jax.Array:
        return jnp.where(where, values, 0.0).sum(-2)

    return Bin(
        pick(widths, passed) - bound,
        pick(heights, passed) - bound,
        pick(widths),
        pick(heights),
        pick(slopes[..., :-1, :]),
        pick(slopes[..., 1:, :]),
    )


def _sizes(raw: jax.Array, bound: float) -> jax.Array:
    """Positive sizes of K bins that fill an interval of length 2b."""
    shares = MIN_BIN + (1.0 - MIN_BIN * raw.shape[-2]) * jax.nn.softmax(raw, axis=-2)
    return 2.0 * bound * shares


class RationalQuadraticCoupling(CouplingTransform):
    r"""Coupling layer with splines, the identity where its conditioner gives zero.

    .. math:: y_A = x_A, \qquad y_B = e^{b \tanh(s(x_A)/b)} \odot R(x_B; c(x_A)) + t(x_A),

    with :func:`spline` for R. The scale and shift after the spline move what R bends to where the interval is not;
    they leave the tails linear, so that tails keep their class.

    :param conditioner: maps (..., D_A) to (..., (3K + 1) D_B): s, t, then the parameters of the splines.
    :param split: size of the leading part; see :class:`CouplingTransform`.
    :param swap: change the leading part instead of the rest.
    :param bound: b of the scales.
    :param interval: the splines bend [-interval, interval].

    >>> conditioner = Conditioner((jnp.zeros((1, 13)),), (jnp.zeros(13),))
    >>> layer = RationalQuadraticCoupling(conditioner, split=1)
    >>> layer(jnp.array([0.5, 2.0])).tolist()
    [0.5, 2.0]
    """

    _static = (*CouplingTransform._static, "bound", "interval")

    def __init__(
        self,
        conditioner: Conditioner,
        split: int,
        swap: bool = False,
        bound: float = 2.0,
        interval: float = 5.0,
    ) -> None:
        super().__init__(conditioner, split, swap)
        self.bound = bound
        self.interval = interval

    def forward(self, x: jax.Array, outputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        log_scale, shift, raw = self._parameters(x, outputs)
        y, log_slope = spline(x, raw, self.interval)
        return y * jnp.exp(log_scale) + shift, log_slope + log_scale

    def backward(self, y: jax.Array, outputs: jax.Array) -> jax.Array:
        log_scale, shift, raw = self._parameters(y, outputs)
        return spline_inverse((y - shift) * jnp.exp(-log_scale), raw, self.interval)

    def _parameters(self, x: jax.Array, outputs: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        size = x.shape[-1]
        raw = outputs[..., 2 * size :]
        return *scale_and_shift(outputs[..., : 2 * size], self.bound), raw.reshape(*raw.shape[:-1], -1, size)
