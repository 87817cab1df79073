"""The random numbers of all uses: one call for the normals, one for the signs."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import random

from numpyro_bnn.guides.estimators.uses import Piece, Use

__all__ = ["Noise", "draw"]

Axes = list[list[Piece]]


@dataclass(frozen=True)
class Noise:
    """Random numbers of one use.

    :param normal: N(0, 1): one per weight, or one per output where these are drawn (``signs_out`` is ``None``).
    :param signs_in: -1 or 1 per row and input, ready to multiply the other operand; ``None`` where not needed.
    :param signs_out: -1 or 1 per row and output.
    """

    normal: jax.Array
    signs_in: jax.Array | None = None
    signs_out: jax.Array | None = None


def draw(rng_key: jax.Array, uses: Mapping[str, Use], local: bool) -> dict[str, Noise]:
    """Random numbers for every use.

    :param local: sample outputs instead of weights where that has the right expectation.

    >>> use = Use("dot", (3, 2), (5, 2), {0: [Piece(5, True)]}, (1,), "", (5, 3), {0: 0}, (1,))
    >>> found = draw(random.key(0), {"w": use}, local=False)["w"]
    >>> found.normal.shape, found.signs_in.shape, found.signs_out.shape
    ((3, 2), (5, 3), (5, 2))
    >>> draw(random.key(0), {"w": use}, local=True)["w"].normal.shape
    (5, 2)
    """
    as_local = {site: local and use.local for site, use in uses.items()}
    normal_axes, sign_axes = {}, {}
    for site, use in uses.items():
        normal_axes[site] = _out(use) if as_local[site] else [[Piece(n, True)] for n in use.shape]
        if not as_local[site]:
            sign_axes[site, "out"] = _out(use)
            if prod(use.other_shape[a] for a in use.inputs) > 1:
                sign_axes[site, "in"] = _in(use)
    normal_key, sign_key = random.split(rng_key)
    normals = _normals(normal_key, normal_axes)
    signs = _signs(sign_key, sign_axes)
    return {site: Noise(normals[site], signs.get((site, "in")), signs.get((site, "out"))) for site in uses}


def _out(use: Use) -> Axes:
    """Pieces of the axes of the output: rows, outputs whole, positions none."""
    return [use.rows.get(axis, [Piece(n, axis in use.outputs)]) for axis, n in enumerate(use.out_shape)]


def _in(use: Use) -> Axes:
    """Pieces of the axes of the other operand: rows as in the output, inputs whole, positions none."""
    out = {axis: use.rows[row] for row, axis in use.links.items()}
    return [out.get(axis, [Piece(n, axis in use.inputs)]) for axis, n in enumerate(use.other_shape)]


def _compact(axes: Axes) -> tuple[int, ...]:
    return tuple(piece.size if piece.fresh else 1 for pieces in axes for piece in pieces)


def _spread(values: jax.Array, axes: Axes) -> jax.Array:
    """Put pieces of axes together; an axis without rows keeps length 1, to be broadcast."""
    if all(len(pieces) == 1 for pieces in axes):
        return values
    kept = [any(piece.fresh for piece in pieces) for pieces in axes]
    full = [piece.size if keep else 1 for pieces, keep in zip(axes, kept, strict=True) for piece in pieces]
    shape = [
        prod(piece.size for piece in pieces) if keep else 1 for pieces, keep in zip(axes, kept, strict=True)
    ]
    return jnp.broadcast_to(values, full).reshape(shape)


def _normals(rng_key: jax.Array, wanted: Mapping[Any, Axes]) -> dict[Any, jax.Array]:
    shapes = {name: _compact(axes) for name, axes in wanted.items()}
    flat = random.normal(rng_key, (sum(map(prod, shapes.values())),))
    return {
        name: _spread(part.reshape(shapes[name]), axes)
        for (name, axes), part in zip(wanted.items(), _cut(flat, shapes.values()), strict=True)
    }


def _cut(flat: jax.Array, shapes: Iterable[tuple[int, ...]]) -> Iterator[jax.Array]:
    start = 0
    for shape in shapes:
        yield flat[start : start + prod(shape)]
        start += prod(shape)


def _signs(rng_key: jax.Array, wanted: Mapping[Any, Axes]) -> dict[Any, jax.Array]:
    """Each bit of a random integer is a sign; the 32 of one integer go to 32 rows, so that rows are contiguous."""
    shapes = {name: _compact(axes) for name, axes in wanted.items()}
    words = {name: _word_shape(shape) for name, shape in shapes.items()}
    flat = random.bits(rng_key, (sum(map(prod, words.values())),), jnp.uint32)
    return {
        name: _spread(_unpack(part.reshape(words[name]), shapes[name]), axes)
        for (name, axes), part in zip(wanted.items(), _cut(flat, words.values()), strict=True)
    }


def _word_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    rows = next((n for n in shape if n > 1), 1)
    return (-(-rows // 32), prod(shape) // rows) if rows >= 32 else (1, -(-prod(shape) // 32))


def _unpack(words: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    bits = (words[:, None, :] >> jnp.arange(32, dtype=jnp.uint32)[:, None]) & 1
    return (1 - 2 * bits.astype(jnp.int32)).reshape(-1)[: prod(shape)].reshape(shape).astype(float)
