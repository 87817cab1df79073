"""What an activation makes of the covariance of normal pre-activations: closed forms, else quadrature."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from numpyro_bnn.infinite.quadrature import derivative, expectation, product_expectation, root
from numpyro_bnn.nn import ACTIVATIONS, Activation

__all__ = ["CLOSED_FORMS", "Dual", "dual"]

Kernel = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class Dual(NamedTuple):
    """Expectations over (x, y) normal with mean 0, covariance k and variances q1, q2.

    :param value: (k, q1, q2) -> E f(x) f(y).
    :param slope: (k, q1, q2) -> E f'(x) f'(y), the derivative of ``value`` by k.
    :param mean: q -> E f(x).
    """

    value: Kernel
    slope: Kernel
    mean: Callable[[jax.Array], jax.Array]


def dual(layer: Activation, closed: bool = True) -> Dual:
    """The expectations of an activation.

    :param layer: e.g. ``nn.Activation("relu")``.
    :param closed: use the closed form where there is one; otherwise quadrature in two dimensions.

    References: Williams (1997), equation (11), for erf; Cho & Saul (2009), equations (1)-(6), for relu; Price (1958).

    >>> relu = dual(Activation("relu"))
    >>> one = jnp.array(1.0)
    >>> float(relu.value(one, one, one)), float(relu.slope(one, one, one))
    (0.5, 0.5)
    """
    if closed and layer.name in CLOSED_FORMS:
        return CLOSED_FORMS[layer.name](layer)
    fn = ACTIVATIONS[layer.name]
    if layer.name == "leaky_relu":
        fn = _leaky(layer.negative_slope)
    return Dual(
        lambda k, q1, q2: product_expectation(fn, fn, k, q1, q2),
        lambda k, q1, q2: product_expectation(derivative(fn), derivative(fn), k, q1, q2),
        lambda q: expectation(fn, q),
    )


def _leaky(slope: float) -> Callable[[jax.Array], jax.Array]:
    return lambda x: ACTIVATIONS["leaky_relu"](x, slope)


# -- functions of a correlation that stay differentiable at its ends -------------------------------------


@jax.custom_jvp
def _arcsine(c: jax.Array) -> jax.Array:
    return jnp.arcsin(c)


@_arcsine.defjvp
def _(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    (c,), (dc,) = primals, tangents
    inside = jnp.abs(c) < 1
    # The slope is infinite at the ends, where c itself stands still: 0 is the limit of the product along a scale.
    slope = jnp.where(inside, 1 / jnp.sqrt(jnp.where(inside, 1 - c**2, 1)), 0)
    return _arcsine(c), slope * dc


@jax.custom_jvp
def _rectified(c: jax.Array) -> jax.Array:
    """sqrt(1 - c^2) + c arcsin(c), with derivative arcsin(c)."""
    return jnp.sqrt(1 - c**2) + c * jnp.arcsin(c)


@_rectified.defjvp
def _(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    (c,), (dc,) = primals, tangents
    return _rectified(c), _arcsine(c) * dc


def _correlation(k: jax.Array, scale: jax.Array) -> jax.Array:
    """k / scale within [-1, 1]; a rounding error away from an end it is put there, which mends equal inputs."""
    c = k / jnp.where(scale > 0, scale, 1)
    near = jnp.abs(c) > 1 - 8 * jnp.finfo(c.dtype).eps
    return c + jax.lax.stop_gradient(jnp.where(near, jnp.sign(c) - c, 0))


# -- closed forms ----------------------------------------------------------------------------------------


def _piecewise_linear(slope: float) -> Dual:
    """f(x) = x for x > 0, slope x otherwise: (1 + slope) / 2 x + (1 - slope) / 2 |x|."""
    even, odd = ((1 - slope) / 2) ** 2, ((1 + slope) / 2) ** 2

    def value(k: jax.Array, q1: jax.Array, q2: jax.Array) -> jax.Array:
        scale = root(q1) * root(q2)
        return odd * k + even * (2 / jnp.pi) * scale * _rectified(_correlation(k, scale))

    def slopes(k: jax.Array, q1: jax.Array, q2: jax.Array) -> jax.Array:
        return odd + even * (2 / jnp.pi) * _arcsine(_correlation(k, root(q1) * root(q2)))

    return Dual(value, slopes, lambda q: (1 - slope) / 2 * root(2 / jnp.pi * q))


def _identity() -> Dual:
    return Dual(lambda k, q1, q2: k, lambda k, q1, q2: jnp.ones_like(k), jnp.zeros_like)


def _erf() -> Dual:
    def value(k: jax.Array, q1: jax.Array, q2: jax.Array) -> jax.Array:
        scale = jnp.sqrt(1 + 2 * q1) * jnp.sqrt(1 + 2 * q2)
        return (2 / jnp.pi) * _arcsine(jnp.clip(2 * k / scale, -1, 1))

    def slope(k: jax.Array, q1: jax.Array, q2: jax.Array) -> jax.Array:
        # (1 + 2 q1)(1 + 2 q2) - 4 k^2 without the cancellation at large variances
        return (4 / jnp.pi) / jnp.sqrt(1 + 2 * (q1 + q2) + 4 * _determinant(k, q1, q2))

    return Dual(value, slope, jnp.zeros_like)


def _gelu() -> Dual:
    def value(k: jax.Array, q1: jax.Array, q2: jax.Array) -> jax.Array:
        a, b = 1 + q1, 1 + q2
        det = _determinant(k, q1, q2)
        bell = 1 / (2 * jnp.pi * jnp.sqrt(1 + q1 + q2 + det))
        both = 0.25 + _arcsine(k / (jnp.sqrt(a) * jnp.sqrt(b))) / (2 * jnp.pi)
        return k * both + bell * (det + k**2 * (1 / a + 1 / b))

    def slope(k: jax.Array, q1: jax.Array, q2: jax.Array) -> jax.Array:
        return jax.jvp(lambda k: value(k, q1, q2), (k,), (jnp.ones_like(k),))[1]

    return Dual(value, slope, lambda q: q / jnp.sqrt(2 * jnp.pi * (1 + q)))


def _determinant(k: jax.Array, q1: jax.Array, q2: jax.Array) -> jax.Array:
    """q1 q2 - k^2, which rounding must not make negative; its derivatives are left as they are."""
    det = q1 * q2 - k**2
    return det + jax.lax.stop_gradient(jnp.maximum(det, 0) - det)


# Activation -> its expectations in closed form; the others are integrated numerically.
CLOSED_FORMS: dict[str, Callable[[Activation], Dual]] = {
    "identity": lambda layer: _identity(),
    "relu": lambda layer: _piecewise_linear(0.0),
    "leaky_relu": lambda layer: _piecewise_linear(layer.negative_slope),
    "erf": lambda layer: _erf(),
    "gelu": lambda layer: _gelu(),
}
