"""Jacobians of linear maps in which each output has few terms, read from their programs
as independent blocks.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_bnn._jaxprs.primitives import VIEWS, is_affine
from numpyro_bnn._jaxprs.walk import Equation, Interpreter
from numpyro_bnn._types import Operand, PyTree, Shape


class JacobianBlocks(NamedTuple):
    """The Jacobian of a linear map as G blocks, between which it is zero: those of
    several outputs of a network.

    :param matrix: (G, n, p) the blocks; one block is (N, P).
    :param rows: (G, n) or (N,) outputs of the map, and ``columns``: (G, p) or (P,)
        inputs, of which they are.
    """

    matrix: Array
    rows: np.ndarray
    columns: np.ndarray


class _Terms(NamedTuple):
    """An array each of whose elements is the sum of r terms ``factor * u[place]``: two
    arrays (*shape, r).
    """

    factor: Any
    place: np.ndarray


def jacobian_blocks(fn: Callable[[Array], Array], u: Array) -> JacobianBlocks:
    """The Jacobian of a linear function from (P,) to (N,), without derivatives where
    its program allows.

    A program that moves, scales and adds elements of u, and contracts them with other
    arrays, such as a dense layer, multiplies each by a number that it knows: the
    features. Where it does anything else, or where outputs share some but not all
    inputs, the Jacobian is one block, which takes min(N, P) directional derivatives or
    gradients.
    """
    closed = jax.make_jaxpr(jax.linearize(fn, u)[1])(u)
    start = _Terms(
        jnp.ones((u.size, 1), u.dtype), np.arange(u.size, dtype=np.int32)[:, None]
    )
    walk = Interpreter(
        {}, lambda value: isinstance(value, _Terms), "", partial(_terms, u.size)
    )
    with suppress(_NotUnderstood):
        (terms,) = walk.run(closed.jaxpr, closed.consts, [start])
        return _split(terms, u.size)
    jacobian = jacobian_of(fn, u)
    return JacobianBlocks(jacobian, *map(np.arange, jacobian.shape))


def jacobian_of(fn: Callable[[Array], Array], u: Array) -> Array:
    """(N, P) the Jacobian by derivatives in the fewer directions."""
    return (jax.jacfwd if u.size <= jax.eval_shape(fn, u).size else jax.jacrev)(fn)(u)


class _NotUnderstood(Exception):
    """Terms that are not read, are too many, or make no independent blocks."""


def _terms(max_terms: int, equation: Equation, *operands: Operand) -> _Terms:
    """The rule of every operation: the terms of its output."""
    name, params = equation.name, equation.params
    shape = equation.outputs[0].shape
    linear_operands = [
        i for i, operand in enumerate(operands) if isinstance(operand, _Terms)
    ]
    if len(linear_operands) == len(operands) > 1:
        return _joined(name, params, shape, operands)
    if len(linear_operands) > 1 or equation.several:
        raise _NotUnderstood
    (side,) = linear_operands
    terms = operands[side]
    moves = name in VIEWS and len(operands) == 1
    if moves or (is_affine(name, side) and name not in ("add", "sub")):
        numbers = list(operands)
        axes: list[int | None] = [None] * len(operands)
        numbers[side], axes[side] = terms.factor, -1
        factor = jax.vmap(equation.bind, axes, -1)(*numbers)
        if moves:
            return _Terms(factor, _moved(equation.bind, terms.place))
        return _Terms(factor, _wide(terms.place, shape))
    if name == "reduce_sum":
        summed = params["axes"]
    elif name == "dot_general":
        summed = params["dimension_numbers"][0][side]
    else:
        raise _NotUnderstood
    if prod(terms.place.shape[axis] for axis in (*summed, -1)) > max_terms:
        # some are of the same input
        raise _NotUnderstood
    if name == "dot_general":
        return _contracted(params["dimension_numbers"], shape, operands, side)
    order = [axis for axis in range(terms.place.ndim - 1) if axis not in summed]
    return _Terms(
        *(
            array.transpose(*order, *summed, array.ndim - 1).reshape(*shape, -1)
            for array in terms
        )
    )


def _joined(
    name: str, params: PyTree, shape: Shape, operands: Sequence[_Terms]
) -> _Terms:
    """The sum, difference or concatenation of arrays with terms."""
    if name in ("add", "add_any", "sub"):
        (a, i), (b, j) = operands
        factors = [a, -b if name == "sub" else b]
        factors = [
            jnp.broadcast_to(factor, (*shape, factor.shape[-1])) for factor in factors
        ]
        places = [_wide(i, shape), _wide(j, shape)]
        return _Terms(jnp.concatenate(factors, -1), np.concatenate(places, -1))
    if (
        name == "concatenate"
        and len({operand.place.shape[-1] for operand in operands}) == 1
    ):
        factor, index = zip(*operands, strict=True)
        return _Terms(
            jnp.concatenate(factor, params["dimension"]),
            np.concatenate(index, params["dimension"]),
        )
    raise _NotUnderstood


def _contracted(
    numbers: Any, shape: Shape, operands: Sequence[Operand], side: int
) -> _Terms:
    """The product of an array with terms and another array: each term of one times a
    number of the other.
    """

    def ordered(array: Any, side: int) -> Any:
        """(batch, free, contracted, terms) elements of one operand."""
        contracted, batch = numbers[0][side], numbers[1][side]
        free = sorted({*range(array.ndim - 1)}.difference(contracted, batch))
        groups = batch, free, contracted
        sizes = [prod(array.shape[axis] for axis in axes) for axes in groups]
        array = array.transpose(*batch, *free, *contracted, array.ndim - 1)
        return array.reshape(*sizes, array.shape[-1])

    factor, index = (ordered(array, side) for array in operands[side])
    multiplier = ordered(jnp.asarray(operands[1 - side])[..., None], 1 - side)
    factor = jnp.expand_dims(factor, 2 - side) * jnp.expand_dims(multiplier, 1 + side)
    index = np.broadcast_to(np.expand_dims(index, 2 - side), factor.shape)
    return _Terms(factor.reshape(*shape, -1), index.reshape(*shape, -1))


def _wide(index: np.ndarray, shape: Shape) -> np.ndarray:
    return np.broadcast_to(index, (*shape, index.shape[-1]))


def _moved(move: Callable, index: np.ndarray) -> np.ndarray:
    with jax.ensure_compile_time_eval():
        return np.asarray(jax.vmap(move, -1, -1)(jnp.asarray(index)))


def _split(terms: Any, size: int) -> JacobianBlocks:
    """Blocks of outputs with the same inputs, if each input is in one block."""
    if not isinstance(terms, _Terms):
        raise _NotUnderstood
    _, first, block, count = np.unique(
        terms.place.min(1), return_index=True, return_inverse=True, return_counts=True
    )
    columns = terms.place[first]
    exclusive = np.array_equal(np.sort(columns, axis=None), np.arange(size))
    same = np.array_equal(terms.place, columns[block])
    if not (exclusive and same) or np.ptp(count):
        raise _NotUnderstood
    if len(columns) == 1:
        return JacobianBlocks(terms.factor, np.arange(len(block)), columns[0])
    rows = np.argsort(block, kind="stable").reshape(len(columns), -1)
    if np.array_equal(rows.T.ravel(), np.arange(rows.size)):  # a gather would be slow
        return JacobianBlocks(
            terms.factor.reshape(*rows.T.shape, -1).swapaxes(0, 1), rows, columns
        )
    return JacobianBlocks(terms.factor[rows], rows, columns)
