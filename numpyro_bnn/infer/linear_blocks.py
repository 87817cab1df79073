"""Jacobians of linear maps in which each output has few terms, read from their programs
as independent blocks.
"""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from numpyro_bnn._jaxprs import called

# Linear operations that change each element by itself, and those that only move
# elements.
ELEMENTWISE = {
    *("convert_element_type", "copy", "div", "mul", "name", "neg", "reduce_precision")
}
MOVES = {"broadcast_in_dim", "reshape", "rev", "slice", "squeeze", "transpose"}


class JacobianBlocks(NamedTuple):
    """The Jacobian of a linear map as G blocks, between which it is zero: those of
    several outputs of a network.

    :param matrix: (G, n, p) the blocks; one block is (N, P).
    :param rows: (G, n) or (N,) outputs of the map, and ``columns``: (G, p) or (P,)
        inputs, of which they are.
    """

    matrix: jax.Array
    rows: np.ndarray
    columns: np.ndarray


class _Terms(NamedTuple):
    """An array each of whose elements is the sum of r terms ``factor * u[place]``: two
    arrays (*shape, r).
    """

    factor: Any
    place: np.ndarray


def jacobian_blocks(
    fn: Callable[[jax.Array], jax.Array], u: jax.Array
) -> JacobianBlocks:
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
    (terms,) = _follow(closed, [start], u.size)
    if isinstance(terms, _Terms) and (blocks := _split(terms, u.size)):
        return blocks
    jacobian = jacobian_of(fn, u)
    return JacobianBlocks(jacobian, *map(np.arange, jacobian.shape))


def jacobian_of(fn: Callable[[jax.Array], jax.Array], u: jax.Array) -> jax.Array:
    """(N, P) the Jacobian by derivatives in the fewer directions."""
    return (jax.jacfwd if u.size <= jax.eval_shape(fn, u).size else jax.jacrev)(fn)(u)


def _follow(closed: Any, inputs: list[Any], max_terms: int) -> list[Any]:
    """Outputs of a linear program: terms, values that do not depend on u, ``None`` for
    what is not understood.
    """
    jaxpr, consts = getattr(closed, "jaxpr", closed), getattr(closed, "consts", ())
    values: dict[Any, Any] = dict(
        zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *inputs), strict=True)
    )

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        operands = list(map(read, equation.invars))
        primitive = equation.primitive
        unknown = any(operand is None for operand in operands)
        if not unknown and called(equation):
            results = _follow(
                equation.params.get("jaxpr", equation.params.get("call_jaxpr")),
                operands,
                max_terms,
            )
        elif unknown or any(isinstance(operand, _Terms) for operand in operands):
            results = [
                None if unknown else _terms(equation, operands, max_terms)
            ] * len(equation.outvars)
        else:
            results = primitive.bind(
                *operands, **primitive.get_bind_params(equation.params)
            )
            results = results if primitive.multiple_results else [results]
        values.update(zip(equation.outvars, results, strict=True))
    return list(map(read, jaxpr.outvars))


def _terms(equation: Any, operands: list[Any], max_terms: int) -> _Terms | None:
    """The output of one operation, on some operands with terms; ``None`` for other
    operations or too many terms.
    """
    name, params = equation.primitive.name, equation.params
    shape = equation.outvars[0].aval.shape
    linear_operands = [
        i for i, operand in enumerate(operands) if isinstance(operand, _Terms)
    ]
    if len(linear_operands) == len(operands) > 1:
        return _joined(name, params, shape, operands)
    if len(linear_operands) > 1:
        return None
    (side,) = linear_operands
    terms = operands[side]
    if name in MOVES or (name in ELEMENTWISE and (name != "div" or side == 0)):
        bind = partial(equation.primitive.bind, **params)
        numbers = list(operands)
        axes: list[int | None] = [None] * len(operands)
        numbers[side], axes[side] = terms.factor, -1
        factor = jax.vmap(bind, axes, -1)(*numbers)
        if name in MOVES:
            return _Terms(factor, _moved(bind, terms.place))
        return _Terms(factor, _wide(terms.place, shape))
    if name not in ("dot_general", "reduce_sum"):
        return None
    if name == "reduce_sum":
        summed = params["axes"]
    else:
        summed = params["dimension_numbers"][0][side]
    if prod(terms.place.shape[axis] for axis in (*summed, -1)) > max_terms:
        # some are of the same input
        return None
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
    name: str, params: Any, shape: tuple[int, ...], operands: list[_Terms]
) -> _Terms | None:
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
    return None


def _contracted(
    numbers: Any, shape: tuple[int, ...], operands: list[Any], side: int
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


def _wide(index: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return np.broadcast_to(index, (*shape, index.shape[-1]))


def _moved(move: Callable, index: np.ndarray) -> np.ndarray:
    with jax.ensure_compile_time_eval():
        return np.asarray(jax.vmap(move, -1, -1)(jnp.asarray(index)))


def _split(terms: _Terms, size: int) -> JacobianBlocks | None:
    """Blocks of outputs with the same inputs; ``None`` if inputs are in several blocks,
    or in none.
    """
    _, first, block, count = np.unique(
        terms.place.min(1), return_index=True, return_inverse=True, return_counts=True
    )
    columns = terms.place[first]
    exclusive = np.array_equal(np.sort(columns, axis=None), np.arange(size))
    same = np.array_equal(terms.place, columns[block])
    if not (exclusive and same) or np.ptp(count):
        return None
    if len(columns) == 1:
        return JacobianBlocks(terms.factor, np.arange(len(block)), columns[0])
    rows = np.argsort(block, kind="stable").reshape(len(columns), -1)
    if np.array_equal(rows.T.ravel(), np.arange(rows.size)):  # a gather would be slow
        return JacobianBlocks(
            terms.factor.reshape(*rows.T.shape, -1).swapaxes(0, 1), rows, columns
        )
    return JacobianBlocks(terms.factor[rows], rows, columns)
