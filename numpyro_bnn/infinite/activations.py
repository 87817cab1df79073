"""How an activation changes the covariance of normal pre-activations: closed forms,
otherwise quadrature.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from numpyro_bnn.nn import ACTIVATIONS, Activation

# On [-REACH, REACH] the trapezoidal rule converges faster than Gauss-Hermite for
# functions with poles, e.g. tanh.
NODES, REACH = 96, 7.5

Function = Callable[[Array], Array]
Kernel = Callable[[Array, Array, Array], Array]


class Dual(NamedTuple):
    """Expectations over (x, y), normal with mean 0, covariance k and
    variances q1, q2.
    """

    value: Kernel  # (k, q1, q2) -> E f(x) f(y)
    # (k, q1, q2) -> E f'(x) f'(y), the derivative of ``value`` with respect to k
    slope: Kernel
    mean: Function  # q -> E f(x)


def dual(layer: Activation) -> Dual:
    """The expectations of an activation: in closed form if known, otherwise by 2-d
    quadrature.

    References: Williams (1997), equation (11), for erf; Cho & Saul (2009), equations
    (1)-(6), for relu; Price (1958).
    """
    if layer.name in CLOSED_FORMS:
        return CLOSED_FORMS[layer.name](layer)
    fn = ACTIVATIONS[layer.name]
    slope = derivative(fn)
    return Dual(
        partial(product_expectation, fn, fn),
        partial(product_expectation, slope, slope),
        partial(expectation, fn),
    )


def nodes(dtype: DTypeLike, number: int = NODES) -> tuple[Array, Array]:
    """Nodes and weights for an expectation under N(0, 1)."""
    x = np.linspace(-REACH, REACH, number)
    w = np.exp(-0.5 * x**2)
    return jnp.asarray(x, dtype), jnp.asarray(w / w.sum(), dtype)


def expectation(fn: Function, variance: Array) -> Array:
    """E f(x), x ~ N(0, variance), elementwise."""
    x, w = nodes(variance.dtype)
    x = jnp.expand_dims(x, tuple(range(variance.ndim)))
    return fn(root(variance)[..., None] * x) @ w


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def product_expectation(
    f: Function, g: Function, k: Array, q1: Array, q2: Array
) -> Array:
    """E f(x) g(y), where x, y are normal with mean 0, variances q1, q2 and covariance
    k; elementwise.

    Its derivatives are expectations of the same kind (Price's theorem): dE/dk = E f'(x)
    g'(y) and dE/dq1 = E f''(x) g(y) / 2. They also hold at |correlation| = 1, where the
    quadrature rule has no derivative.

    Reference: Price (1958), *A useful theorem for nonlinear devices having Gaussian
    inputs*.
    """
    a, b = root(q1), root(q2)
    c = jnp.clip(k / jnp.where(a * b > 0, a * b, 1), -1, 1)
    along, across = b * c, b * jnp.sqrt(1 - c**2)
    x, w = nodes(k.dtype)
    inner_nodes = jnp.expand_dims(x, tuple(range(k.ndim)))

    def row(total: Array, node: tuple[Array, Array]) -> tuple[Array, None]:
        value, weight = node
        inner = jnp.sum(
            g((along * value)[..., None] + across[..., None] * inner_nodes) * w, axis=-1
        )
        return total + weight * f(a * value) * inner, None

    return lax.scan(row, jnp.zeros_like(k), (x, w))[0]


@product_expectation.defjvp
def _price(
    f: Function, g: Function, primals: tuple, tangents: tuple
) -> tuple[Array, Array]:
    k, q1, q2 = primals
    dk, dq1, dq2 = tangents
    f1, g1 = derivative(f), derivative(g)
    slope = product_expectation(f1, g1, k, q1, q2) * dk
    slope += 0.5 * product_expectation(derivative(f1), g, k, q1, q2) * dq1
    slope += 0.5 * product_expectation(f, derivative(g1), k, q1, q2) * dq2
    return product_expectation(f, g, k, q1, q2), slope


def derivative(fn: Function) -> Function:
    """Elementwise derivative."""
    return lambda x: jax.jvp(fn, (x,), (jnp.ones_like(x),))[1]


def root(variance: Array) -> Array:
    """Square root whose derivative at 0 is 0."""
    positive = variance > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, variance, 1)), 0)


@jax.custom_jvp
def _arcsine(c: Array) -> Array:
    return jnp.arcsin(c)


@_arcsine.defjvp
def _(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    (c,), (dc,) = primals, tangents
    inside = jnp.abs(c) < 1
    # The slope is infinite at the ends, where c itself is constant: the limit of the
    # product along a scale is 0.
    slope = jnp.where(inside, 1 / jnp.sqrt(jnp.where(inside, 1 - c**2, 1)), 0)
    return _arcsine(c), slope * dc


@jax.custom_jvp
def _rectified(c: Array) -> Array:
    """sqrt(1 - c^2) + c arcsin(c), with derivative arcsin(c)."""
    return jnp.sqrt(1 - c**2) + c * jnp.arcsin(c)


@_rectified.defjvp
def _(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    (c,), (dc,) = primals, tangents
    return _rectified(c), _arcsine(c) * dc


def _correlation(k: Array, scale: Array) -> Array:
    """k / scale within [-1, 1], set to an end within rounding error of it, as equal
    inputs require.
    """
    c = k / jnp.where(scale > 0, scale, 1)
    return c + lax.stop_gradient(
        jnp.where(jnp.abs(c) > 1 - 8 * jnp.finfo(c.dtype).eps, jnp.sign(c) - c, 0)
    )


def _piecewise_linear(slope: float) -> Dual:
    """f(x) = x for x > 0, slope x otherwise: (1 + slope) / 2 x + (1 -
    slope) / 2 |x|.
    """
    even, odd = ((1 - slope) / 2) ** 2, ((1 + slope) / 2) ** 2

    def value(k: Array, q1: Array, q2: Array) -> Array:
        scale = root(q1) * root(q2)
        return odd * k + even * (2 / jnp.pi) * scale * _rectified(
            _correlation(k, scale)
        )

    def slopes(k: Array, q1: Array, q2: Array) -> Array:
        return odd + even * (2 / jnp.pi) * _arcsine(
            _correlation(k, root(q1) * root(q2))
        )

    return Dual(value, slopes, lambda q: (1 - slope) / 2 * root(2 / jnp.pi * q))


def _erf() -> Dual:
    def value(k: Array, q1: Array, q2: Array) -> Array:
        scale = jnp.sqrt(1 + 2 * q1) * jnp.sqrt(1 + 2 * q2)
        return (2 / jnp.pi) * _arcsine(jnp.clip(2 * k / scale, -1, 1))

    def slope(k: Array, q1: Array, q2: Array) -> Array:
        # (1 + 2 q1)(1 + 2 q2) - 4 k^2 without the cancellation at large variances
        return (4 / jnp.pi) / jnp.sqrt(1 + 2 * (q1 + q2) + 4 * _determinant(k, q1, q2))

    return Dual(value, slope, jnp.zeros_like)


def _gelu() -> Dual:
    def value(k: Array, q1: Array, q2: Array) -> Array:
        a, b = 1 + q1, 1 + q2
        det = _determinant(k, q1, q2)
        bell = 1 / (2 * jnp.pi * jnp.sqrt(1 + q1 + q2 + det))
        both_positive = 0.25 + _arcsine(k / (jnp.sqrt(a) * jnp.sqrt(b))) / (2 * jnp.pi)
        return k * both_positive + bell * (det + k**2 * (1 / a + 1 / b))

    def slope(k: Array, q1: Array, q2: Array) -> Array:
        return jax.jvp(lambda k: value(k, q1, q2), (k,), (jnp.ones_like(k),))[1]

    return Dual(value, slope, lambda q: q / jnp.sqrt(2 * jnp.pi * (1 + q)))


def _determinant(k: Array, q1: Array, q2: Array) -> Array:
    """q1 q2 - k^2, which rounding must not make negative; its derivatives are
    unchanged.
    """
    det = q1 * q2 - k**2
    return det + lax.stop_gradient(jnp.maximum(det, 0) - det)


# Activation -> its expectations in closed form; all others are integrated numerically.
CLOSED_FORMS: dict[str, Callable[[Activation], Dual]] = {
    "identity": lambda layer: _piecewise_linear(1.0),
    "relu": lambda layer: _piecewise_linear(0.0),
    "leaky_relu": lambda layer: _piecewise_linear(layer.negative_slope),
    "erf": lambda layer: _erf(),
    "gelu": lambda layer: _gelu(),
}
