"""Expectations over independent Gaussians: logarithms of normalizers, with the
gradients that moment matching needs, and moments.
"""

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.scipy.special import logsumexp

from numpyro_bnn._types import PyTree, Shape
from numpyro_bnn.guides.adf.moment_matching import NORMAL_CONSTANT, normal_log_density
from numpyro_bnn.guides.adf.reading import Values
from numpyro_bnn.moments import Gaussian

# Grids as wide as a prior: points, and reach in prior sd, for the first Gaussian and
# for others.
FIRST, OTHERS = (65, 8.0), (25, 7.2)
# Grid around a mode: nested grids to find it, points on each side, reach in prior sd,
# and the smallest t.
ZOOMS, SIDE, REACH, START = 7, 49, 12.0, -2.3
# Largest distance of a mode, in prior sd: data that are further away contradict the
# model.
FARTHEST = 50.0
# Smallest variance, relative to the square of the mean.
SMALLEST = 1e-20
# Largest difference of log Z by a grid and by half of it, on the grid as wide as the
# prior, and around the mode.
WIDE, ALLOWED = 1e-6, 0.05


def log_expectation(
    fn: Callable[[Values], Any], gaussians: Mapping[str, Gaussian]
) -> Array:
    """log E[exp(fn(x))] over independent Gaussians by name.

    Elements of ``fn`` that share an element of a Gaussian are summed, and integrated
    over it together: the result has the shape of the smallest Gaussian. The first
    Gaussian is integrated on a grid as wide as the prior if that and half of it agree,
    otherwise on a grid around the mode, the others always on a grid as wide as the
    prior.

    Gradients are those of the Gaussian densities at fixed points, so that a kink or
    step does no harm. They are NaN where a grid and half of it disagree, or where the
    mode is far outside of the prior: the update is then refused.
    """
    if not gaussians:
        return fn({})
    name, first = next(iter(gaussians.items()))
    others = {n: g for n, g in gaussians.items() if n != name}
    points = {n: _points(g, *_grid(*OTHERS, g)) for n, g in others.items()}
    # The smallest Gaussian is the outermost integral.
    order = sorted(gaussians, key=lambda n: gaussians[n].mean.size)

    def integral(nodes: Values, names: list[str], values: Values) -> Array:
        if not names:
            log_value = fn(values)
            # Truncated distributions have log densities of NaN and inf far outside.
            return jnp.where(log_value < jnp.inf, log_value, -jnp.inf)
        outer, *inner = names

        def at(x: Array) -> Array:
            return sum_to(integral(nodes, inner, {**values, outer: x}), x.shape)

        x, log_weights = nodes[outer]
        return logsumexp(jax.vmap(at)(x) + log_weights, axis=0)

    def both(z: Array, spacing: Array) -> Array:
        x, log_weights = _points(first, z, spacing)
        every_other = np.where(np.arange(len(z)) % 2, -np.inf, np.log(2.0))
        rules = jnp.stack([log_weights, log_weights + _column(every_other, first)])
        return jax.vmap(lambda rule: integral({**points, name: (x, rule)}, order, {}))(
            rules
        )

    def log_integrand(z: Array) -> Array:
        x, log_weights = _points(first, z, 0.0)
        means = {n: g.mean for n, g in others.items()}

        def at(x: Array) -> Array:
            return sum_to(integral({}, [], {**means, name: x}), x.shape)

        return jax.vmap(at)(x) + log_weights

    wide = both(*_grid(*FIRST, first))
    enough = (jnp.abs(wide[0] - wide[1]) < WIDE).all()

    def narrow() -> Array:
        z, spacing = _around_the_mode(log_integrand, first)
        by_all, by_half = both(z, spacing)
        num_far = sum_to(
            (jnp.abs(z[SIDE - 1] + z[SIDE]) > 2 * FARTHEST).astype(z.dtype),
            by_half.shape,
        )
        return jnp.stack([by_all, jnp.where(num_far > 0, jnp.inf, by_half)])

    log_mean, half = lax.cond(enough, lambda: wide, narrow)
    return _trusted(log_mean, jnp.abs(log_mean - half) < ALLOWED)


def _column(values: np.ndarray, like: Gaussian) -> Array:
    """The same values for every element: (Q, ...)."""
    return jnp.broadcast_to(
        values.reshape(-1, *(1,) * like.mean.ndim), (len(values), *like.mean.shape)
    )


def _grid(points: int, reach: float, like: Gaussian) -> tuple[Array, Array]:
    """Points of the trapezoidal rule for a standard normal, and the logarithm of their
    distance.
    """
    z, step = np.linspace(-reach, reach, points, retstep=True)
    return _column(z, like), np.log(step)


def _points(gaussian: Gaussian, z: Array, spacing: Any) -> tuple[Array, Array]:
    """Fixed points, ``z`` sd from the mean, and their log weights, which carry the
    gradients.

    :param spacing: logarithm of the distance of points.
    """
    mean = gaussian.mean
    var = jnp.maximum(gaussian.var, SMALLEST * jnp.maximum(1.0, mean * mean))
    fixed, sd = lax.stop_gradient((mean, jnp.sqrt(var)))
    density = normal_log_density(sd * z + (fixed - mean), var) + NORMAL_CONSTANT
    return fixed + sd * z, density + jnp.log(sd) + spacing


def _around_the_mode(
    log_integrand: Callable[[Array], Array], like: Gaussian
) -> tuple[Array, Array]:
    """Points and the logarithms of their distances, which grow with the distance from
    the mode on both sides.

    The mode is searched on nested grids. With a = width exp(t - exp(-t)), for
    equidistant t, a kink at the mode does no harm, and integrands of any width between
    that of the last grid and that of the prior are resolved.
    """

    def zoom(_: object, grid: tuple[Array, ...]) -> tuple[Array, ...]:
        z, _, width = grid
        values = lax.stop_gradient(log_integrand(z))
        best = jnp.argmax(values, axis=0)[None]

        def beside_best(array: Array, step: int) -> Array:
            place = jnp.clip(best + step, 0, len(z) - 1)
            return jnp.take_along_axis(array, place, axis=0)[0]

        low, high = beside_best(z, -1), beside_best(z, 1)
        ends = jnp.minimum(beside_best(values, -1), beside_best(values, 1))
        width = jnp.where(beside_best(values, 0) - ends > 1, high - low, width)
        finer = low + (high - low) * _column(np.linspace(0.0, 1.0, 17), like)
        return finer, beside_best(z, 0), width

    z = _column(np.sinh(np.linspace(-7.0, 7.0, 41)), like)
    first = zoom(0, (z, z[0], jnp.full_like(z[0], REACH)))
    _, mode, width = lax.fori_loop(1, ZOOMS, zoom, first)
    step = (jnp.log(REACH / width) - START) / (SIDE - 1)
    t = START + step * _column(np.arange(SIDE), like)
    away = width * jnp.exp(t - jnp.exp(-t))
    spacing = jnp.log(away * (1 + jnp.exp(-t)) * step)
    points = jnp.concatenate([mode - away[::-1], mode + away])
    return points, jnp.concatenate([spacing[::-1], spacing])


def sum_to(value: Array, shape: Shape) -> Array:
    """Sum over the elements for which ``shape`` was broadcast."""
    if value.size == np.prod(shape):
        return value.reshape(shape)
    if np.prod(shape) == 1:
        return value.sum().reshape(shape)
    like = jax.ShapeDtypeStruct(shape, value.dtype)
    spread = partial(jnp.broadcast_to, shape=value.shape)
    return jax.linear_transpose(spread, like)(value)[0]


@jax.custom_jvp
def _trusted(value: Array, good: Array) -> Array:
    """The value; its gradient is NaN where it is not good."""
    return value


@_trusted.defjvp
def _trusted_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    value, good = primals
    return value, jnp.where(good, 1.0, jnp.nan) * tangents[0]


def expectations(
    fn: Callable[[Values], PyTree], gaussians: Mapping[str, Gaussian]
) -> PyTree:
    """E[fn(x)] for every leaf of ``fn``, element by element."""
    z = np.linspace(-8.0, 8.0, 257 if len(gaussians) == 1 else 33)
    grid = np.array(list(itertools.product(z, repeat=len(gaussians))))
    weights = np.exp(-0.5 * (grid**2).sum(axis=-1))

    def at(node: Array) -> PyTree:
        values = {}
        for z, (name, (mean, var)) in zip(node, gaussians.items(), strict=True):
            values[name] = mean + jnp.sqrt(jnp.maximum(var, SMALLEST)) * z
        return fn(values)

    by_node = jax.vmap(at)(jnp.asarray(grid))
    weights /= weights.sum()
    return jax.tree.map(lambda leaf: jnp.tensordot(weights, leaf, 1), by_node)
