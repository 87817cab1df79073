"""Expectations of products of two functions of correlated normals, by quadrature."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

__all__ = ["NODES", "derivative", "expectation", "nodes", "product_expectation", "root"]

# The trapezoidal rule on [-REACH, REACH] converges faster than Gauss-Hermite for functions with poles, such as tanh.
NODES, REACH = 96, 7.5

Function = Callable[[jax.Array], jax.Array]


def nodes(number: int = NODES) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights for an expectation under N(0, 1).

    >>> x, w = nodes(32)
    >>> round(float(w @ x**4), 6)
    3.0
    """
    x = np.linspace(-REACH, REACH, number)
    w = np.exp(-0.5 * x**2)
    return x, w / w.sum()


def expectation(fn: Function, variance: jax.Array) -> jax.Array:
    """E f(x), x ~ N(0, variance), elementwise.

    >>> round(float(expectation(jnp.square, jnp.array(2.0))), 5)
    2.0
    """
    x, w = (jnp.asarray(part, variance.dtype) for part in nodes())
    return fn(root(variance)[..., None] * jnp.expand_dims(x, tuple(range(variance.ndim)))) @ w


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def product_expectation(f: Function, g: Function, k: jax.Array, q1: jax.Array, q2: jax.Array) -> jax.Array:
    """E f(x) g(y), where x, y are normal with mean 0, variances q1, q2 and covariance k; elementwise.

    Its derivatives are expectations of the same kind (Price's theorem): dE/dk = E f'(x) g'(y) and
    dE/dq1 = E f''(x) g(y) / 2, so that they hold at |correlation| = 1 too, where those of the rule do not exist.

    :param f: elementwise function, differentiable.
    :param g: likewise.
    :param k: covariances.
    :param q1: variances of x, of the shape of ``k``.
    :param q2: variances of y.

    Reference: Price (1958), *A useful theorem for nonlinear devices having Gaussian inputs*.

    >>> q = jnp.array(1.0)
    >>> round(float(product_expectation(jnp.square, jnp.square, 0.5 * q, q, q)), 5)     # 1 + 2 k^2
    1.5
    """
    a, b = root(q1), root(q2)
    c = jnp.clip(k / jnp.where(a * b > 0, a * b, 1), -1, 1)
    along, across = b * c, b * jnp.sqrt(1 - c**2)
    x, w = (jnp.asarray(part, k.dtype) for part in nodes())

    last = jnp.expand_dims(x, tuple(range(k.ndim)))

    def row(total: jax.Array, node: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        value, weight = node
        inner = jnp.sum(g((along * value)[..., None] + across[..., None] * last) * w, axis=-1)
        return total + weight * f(a * value) * inner, None

    return lax.scan(row, jnp.zeros_like(k), (x, w))[0]


@product_expectation.defjvp
def _price(f: Function, g: Function, primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
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


def root(variance: jax.Array) -> jax.Array:
    """Square root whose derivative at 0 is 0."""
    positive = variance > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, variance, 1)), 0)
