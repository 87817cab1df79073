"""Exact draws from the generalized inverse Gaussian distribution, on the log scale."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

# Candidates per draw and round: all lanes wait for the slowest, and with 4 candidates a
# second round is rare.
CANDIDATES = 4
E, COSH_1 = 2.718281828459045, 1.543080634815244


class _Shape(NamedTuple):
    """The density exp(-f(x)) around its mode, f(x) = low (cosh x - 1) + order (exp(x) -
    1 - x).
    """

    low: Array
    order: Array

    def minus_log_density(self, x: Array) -> Array:
        """f(x)."""
        # exp(x) - 1 - x loses all digits near 0, where a narrow density lies: use its
        # series there.
        series = jnp.ones_like(x)
        for k in range(10, 2, -1):
            series = 1.0 + series * x / k
        remainder = jnp.where(jnp.abs(x) < 0.1, 0.5 * x * x * series, jnp.expm1(x) - x)
        # not 0 times infinity
        cosh = jnp.where(self.low > 0.0, self.low * 2.0 * jnp.sinh(0.5 * x) ** 2, 0.0)
        return cosh + self.order * remainder

    def slope(self, x: Array) -> Array:
        """|f'(x)|."""
        sinh = jnp.where(self.low > 0.0, self.low * jnp.sinh(x), 0.0)
        return jnp.abs(sinh + self.order * jnp.expm1(x))


class _Envelope(NamedTuple):
    """1 on [-left, right], exponential tangents of exp(-f) beyond, which decay over the
    given lengths.
    """

    left: Array
    right: Array
    left_tail: Array
    right_tail: Array

    @property
    def area(self) -> Array:
        return self.left + self.right + self.left_tail + self.right_tail


def _envelope(shape: _Shape) -> _Envelope:
    """Tangents where f is about 1; the exact points of contact only affect the number
    of rejections.
    """
    low, order = shape
    at_right = (COSH_1 - 1.0) * low + (E - 2.0) * order
    at_left = (COSH_1 - 1.0) * low + order / E
    narrow = jnp.sqrt(2.0 / (low + order))
    wide = jnp.log(4.0 / (low + 2.0 * order))
    t = jnp.where(at_right > 2.0, narrow, jnp.where(at_right < 0.5, wide, 1.0))
    narrow = jnp.sqrt(4.0 / (COSH_1 * low + order))
    wide = jnp.minimum(
        1.0 / order, jnp.log((1.0 + low + jnp.sqrt(1.0 + 2.0 * low)) / low)
    )
    s = jnp.where(at_left > 2.0, narrow, jnp.where(at_left < 0.5, wide, 1.0))
    right_tail, left_tail = 1.0 / shape.slope(t), 1.0 / shape.slope(-s)
    left = s - shape.minus_log_density(-s) * left_tail
    right = t - shape.minus_log_density(t) * right_tail
    return _Envelope(left, right, left_tail, right_tail)


def _candidates(
    rng_key: Array, shape: _Shape, envelope: _Envelope
) -> tuple[Array, Array]:
    """Draws from the envelope and whether they are accepted: (CANDIDATES, ...)."""
    left, right, left_tail, right_tail = envelope
    u, w = jax.random.uniform(rng_key, (2, CANDIDATES, *left.shape), left.dtype)
    # The pieces side by side, the left tail mirrored: u selects a piece and a place in
    # it.
    u = u * envelope.area - (left + right)
    on_left = u >= right_tail
    length = jnp.where(on_left, left_tail, right_tail)
    within = jnp.where(on_left, u - right_tail, u) / length
    excess = -jnp.log(jnp.clip(within, jnp.finfo(left.dtype).tiny, 1.0))
    tail = jnp.where(on_left, -left - length * excess, right + length * excess)
    in_tail = u >= 0.0
    x = jnp.where(in_tail, tail, u + right)
    height = jnp.where(in_tail, excess, 0.0) - jnp.log1p(-w)
    return x, height >= shape.minus_log_density(x)


def log_gig(rng_key: Array, p: ArrayLike, a: ArrayLike, b: ArrayLike) -> Array:
    r"""Exact draws of x = log t, where t is generalized inverse Gaussian.

    .. math:: p(t) \propto t^{p-1} \exp(-(a t + b / t) / 2)

    The density of x is log-concave. Around its mode, A = p + h and B = h - p with
    :math:`h = \sqrt{p^2 + ab}`,

    .. math:: -\log p(x) = \tfrac12 A (e^x - 1 - x) + \tfrac12 B (e^{-x} - 1 + x) +
              \text{const},

    which is drawn by rejection from a uniform middle piece with two exponential tails.
    All lanes are drawn together; a lane accepts about 0.7 to 0.9 of its candidates for
    all parameters, nothing overflows on the log scale, and p may have any sign. b = 0
    with p > 0 gives a gamma, a = 0 with p < 0 an inverse gamma distribution. The result
    has the common shape of the parameters; NaN if the density cannot be normalized.

    Reference: Devroye (2014), "Random variate generation for the generalized inverse
    Gaussian distribution", Statistics and Computing 24, section 4.
    """
    dtype = jnp.result_type(p, a, b, float)
    p, a, b = jnp.broadcast_arrays(*(jnp.asarray(value, dtype) for value in (p, a, b)))
    order = jnp.abs(p)
    root = jnp.sqrt(a) * jnp.sqrt(b)
    high = jnp.hypot(order, root) + order
    shape = _Shape(root * (root / high), order)
    envelope = _envelope(shape)
    # Lanes whose density cannot be normalized would never accept.
    proper = ((a > 0.0) | (p < 0.0)) & ((b > 0.0) | (p > 0.0)) & jnp.isfinite(a + b)
    proper &= (envelope.area > 0.0) & jnp.isfinite(envelope.area)

    def draw(state: tuple) -> tuple:
        key, x, done = state
        key, now = jax.random.split(key)
        candidates, accepted = _candidates(now, shape, envelope)
        for candidate, accept in zip(candidates, accepted, strict=True):
            x = jnp.where(~done & accept, candidate, x)
            done |= accept
        return key, x, done

    _, x, _ = lax.while_loop(
        lambda state: ~jnp.all(state[2]), draw, (rng_key, jnp.zeros_like(p), ~proper)
    )
    # If p < 0, 1 / t is generalized inverse Gaussian of order -p with a and b
    # exchanged.
    mode = jnp.where(p < 0.0, jnp.log(b) - jnp.log(high), jnp.log(high) - jnp.log(a))
    return jnp.where(proper, mode + jnp.where(p < 0.0, -x, x), jnp.nan)
