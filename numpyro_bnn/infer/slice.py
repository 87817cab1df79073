"""Slice sampling in one dimension."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, random

__all__ = ["slice_draw", "slice_sweep"]

# Intervals that may be added in stepping out, and proposals that may be rejected before the point stays. The first
# bound keeps the draw exact (the budget is split at random between both sides); the second is never reached by a
# density that can be evaluated: after k rejections the interval is about 0.7^k of what it was.
MAX_STEPS, MAX_SHRINKS = 16, 100


def slice_draw(
    rng_key: jax.Array, log_density: Callable, x: jax.Array, log_p: jax.Array, width: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    r"""One transition of the univariate slice sampler, with stepping out and shrinkage.

    A level :math:`\log u + \log p(x)` is drawn, an interval around x is extended in steps of ``width`` until both of
    its ends lie below the level, and points are drawn from it, shrinking it towards x, until one lies above. Leaves
    the density invariant; all loops are bounded, and it may be mapped by ``jax.vmap``.

    :param rng_key: a key.
    :param log_density: log density, known up to a constant, of a scalar; NaN counts as 0 density.
    :param x: the current point.
    :param log_p: its log density.
    :param width: a guess of the width of the density.
    :return: the new point and its log density.

    Reference: Neal (2003), figures 3 and 5.

    >>> normal = lambda x: -0.5 * x**2
    >>> x, log_p = slice_draw(random.key(0), normal, jnp.array(0.5), jnp.array(-0.125))
    >>> bool(log_p == normal(x))
    True
    """
    key_level, key_place, key_budget, key_shrink = random.split(rng_key, 4)
    log_p = jnp.where(jnp.isnan(log_p), -jnp.inf, log_p)
    level = log_p - random.exponential(key_level, (), jnp.result_type(log_p))
    left = x - width * random.uniform(key_place, (), jnp.result_type(x))
    steps = random.randint(key_budget, (), 0, MAX_STEPS)
    ends, budgets = jnp.stack([left, left + width]), jnp.stack([steps, MAX_STEPS - 1 - steps])
    strides = jnp.array([-width, width], ends.dtype)
    # One program for both sides.
    left, right = lax.map(lambda side: _step_out(log_density, level, *side), (ends, strides, budgets))
    return _shrink(key_shrink, log_density, level, x, log_p, left, right)


def _step_out(
    log_density: Callable, level: jax.Array, end: jax.Array, stride: jax.Array, budget: jax.Array
) -> jax.Array:
    def inside(state: tuple) -> jax.Array:
        end, left = state
        return (left > 0) & (log_density(end) > level)

    return lax.while_loop(inside, lambda state: (state[0] + stride, state[1] - 1), (end, budget))[0]


def _shrink(
    rng_key: jax.Array,
    log_density: Callable,
    level: jax.Array,
    x: jax.Array,
    log_p: jax.Array,
    left: jax.Array,
    right: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    def propose(state: tuple) -> tuple:
        i, left, right, _, _, _ = state
        y = random.uniform(random.fold_in(rng_key, i), (), x.dtype, left, right)
        log_q = log_density(y)
        # What comes out of a density may have another dtype or weak type than what went in.
        log_q = jnp.asarray(log_q, log_p.dtype)
        return i + 1, jnp.where(y < x, y, left), jnp.where(y < x, right, y), y, log_q, log_q > level

    start = (jnp.array(0), left, right, x, log_p, jnp.array(False))
    *_, y, log_q, accepted = lax.while_loop(lambda s: ~s[-1] & (s[0] < MAX_SHRINKS), propose, start)
    return jnp.where(accepted, y, x), jnp.where(accepted, log_q, log_p)


def slice_sweep(
    rng_key: jax.Array, log_density: Callable, x: jax.Array, log_p: Any = None, width: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Update the coordinates of a point one after the other with :func:`slice_draw`.

    :param rng_key: a key.
    :param log_density: log density of a vector.
    :param x: (P,) the current point.
    :param log_p: its log density, where it is known already.
    :param width: of every coordinate.
    :return: the new point and its log density.

    >>> x, _ = slice_sweep(random.key(0), lambda x: -0.5 * jnp.sum(x**2), jnp.zeros(3))
    >>> x.shape
    (3,)
    """

    def update(state: tuple, step: tuple) -> tuple:
        (x, log_p), (i, key) = state, step
        coordinate, log_p = slice_draw(key, lambda y: log_density(x.at[i].set(y)), x[i], log_p, width)
        return (x.at[i].set(coordinate), log_p), None

    # A floating array whose type the loops keep.
    start = jnp.asarray(log_density(x) if log_p is None else log_p, x.dtype)
    (x, log_p), _ = lax.scan(update, (x, start), (jnp.arange(x.size), random.split(rng_key, x.size)))
    return x, log_p
