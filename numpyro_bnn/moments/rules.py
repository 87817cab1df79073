"""Rules of operations that are not elementwise: products, sums, maxima, and those that
only move elements.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_bnn._jaxprs.walk import Equation
from numpyro_bnn._types import Operand
from numpyro_bnn.moments.closed_forms import maximum, maximum_of
from numpyro_bnn.moments.elementwise import check_independence
from numpyro_bnn.moments.expectation import NODES
from numpyro_bnn.moments.registry import RULES, register
from numpyro_bnn.moments.terms import Gaussian, both_moments, terms_among


@register("dot_general", "conv_general_dilated", multiplies=True)
def _product(equation: Equation, x: Operand, y: Operand) -> Gaussian:
    """Bilinear: mean = m_x m_y; var = v_x (m_y^2 + v_y) + m_x^2 v_y, each product
    summed as the primitive does.
    """
    if not isinstance(y, Gaussian):
        return Gaussian(equation.bind(x.mean, y), equation.bind(x.var, jnp.square(y)))
    if not isinstance(x, Gaussian):
        return Gaussian(equation.bind(x, y.mean), equation.bind(jnp.square(x), y.var))
    var = equation.bind(x.var, jnp.square(y.mean) + y.var) + equation.bind(
        jnp.square(x.mean), y.var
    )
    return Gaussian(equation.bind(x.mean, y.mean), var)


@register("reduce_sum", "cumsum", "reduce_window_sum", reduces=True)
def _sum(equation: Equation, x: Gaussian) -> Gaussian:
    return Gaussian(equation.bind(x.mean), equation.bind(x.var))


def _largest(mean: Array, var: Array, present: Any = True) -> Gaussian:
    """The largest along the leading axis of the elements that are present."""
    if len(mean) == 2 and np.all(present):
        return maximum(Gaussian(mean[0], var[0]), Gaussian(mean[1], var[1]))
    return maximum_of(mean, var, present, NODES.get())


@register("reduce_max", reduces=True)
def _reduce_max(equation: Equation, x: Gaussian) -> Gaussian:
    axes = equation.params["axes"]

    def reduced_first(moment: Operand) -> Operand:
        """The reduced axes as one, in front."""
        front = jnp.moveaxis(moment, axes, range(len(axes)))
        return front.reshape(-1, *front.shape[len(axes) :])

    return _largest(*map(reduced_first, x))


@register("reduce_min", reduces=True)
def _reduce_min(equation: Equation, x: Gaussian) -> Gaussian:
    result = _reduce_max(equation, Gaussian(-x.mean, x.var))
    return Gaussian(-result.mean, result.var)


@register("reduce_window_max", reduces=True)
def _reduce_window_max(equation: Equation, x: Gaussian) -> Gaussian:
    """The maximum over each window; a position in the padding never wins."""
    p, shape = equation.params, equation.outputs[0].shape
    if any(d != 1 for d in p["base_dilation"]):
        raise equation.refuse(
            "dilates its input", "Pool without dilation of the input."
        )
    rank, places, inside = len(shape), [], np.array(True)
    for axis, (low, _) in enumerate(p["padding"]):
        starts = p["window_strides"][axis] * np.arange(shape[axis]) - low
        offsets = p["window_dilation"][axis] * np.arange(p["window_dimensions"][axis])
        place, size = offsets[:, None] + starts, x.mean.shape[axis]
        # The axes of the window come first, then those of the output.
        new_axes = [k for k in range(2 * rank) if k not in (axis, rank + axis)]
        inside = inside & np.expand_dims((place >= 0) & (place < size), new_axes)
        places.append(np.clip(place, 0, size - 1))
    by_offset = int(np.prod(p["window_dimensions"])), *shape

    def windows(moment: Operand) -> Operand:
        # one axis after the other: indices of all at once would be as many as elements
        for axis in reversed(range(rank)):
            moment = jnp.take(moment, places[axis], axis=axis)
        order = [*range(0, 2 * rank, 2), *range(1, 2 * rank, 2)]
        return moment.transpose(order).reshape(by_offset)

    return _largest(windows(x.mean), windows(x.var), inside.reshape(by_offset))


# Which operands are indices, and must be plain.
_INDICES = {
    "gather": slice(1, None),
    "dynamic_slice": slice(1, None),
    "dynamic_update_slice": slice(2, None),
    "scatter": slice(1, 2),
    "scatter-add": slice(1, 2),
}
_MOVES = (
    *("broadcast_in_dim", "concatenate", "optimization_barrier", "pad", "reshape"),
    *("rev", "slice", "split", "squeeze", "stack", "tile", "transpose"),
)


@register(*_INDICES, *_MOVES, view=True)
def _move(equation: Equation, *operands: Operand) -> Operand:
    """Means and variances move alike; plain data have variance 0."""
    places = range(len(operands))[_INDICES.get(equation.name, slice(0))]
    data = [value for k, value in enumerate(operands) if k not in places]
    if any(isinstance(operands[k], Gaussian) for k in places):
        raise equation.refuse(
            "looks up with random indices", "Index with plain integers."
        )

    def move(equation: Equation, arrays: list[Operand]) -> Operand:
        inputs = list(arrays)
        for k in places:
            inputs.insert(k, operands[k])
        return equation.bind(*inputs)

    of_variances = equation
    if equation.params.get("fill_value") is not None:
        # what an unknown index looks up is a known number
        params = {**equation.params, "fill_value": 0.0}
        jaxpr_equation = equation.jaxpr_equation.replace(params=params)
        of_variances = replace(equation, jaxpr_equation=jaxpr_equation)
    return both_moments(partial(move, equation), data, partial(move, of_variances))


_move_and_add = RULES["scatter-add"]


def _scatter_add(equation: Equation, *operands: Operand) -> Operand:
    """Which elements meet is not tracked: both arrays must be of different ones."""
    terms = terms_among(operands)
    variables = [term.variable for term in terms]
    if len(variables) == 2 and variables[0].parts & variables[1].parts:
        raise equation.refuse(
            "combines two functions of the same random elements",
            "Add arrays of different elements, or index without `.at[...].add`.",
        )
    check_independence(equation, set(variables))
    return _move_and_add(equation, *operands)


RULES["scatter-add"] = _scatter_add
