"""Rules of operations. Elementwise ones: functions of one variable become terms, two
variables are combined as independent. Others: products, sums, maxima, and those that
only move elements.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_bnn._jaxprs.primitives import ELEMENTWISE
from numpyro_bnn._jaxprs.walk import Equation
from numpyro_bnn._options import Kind
from numpyro_bnn._types import Operand, Scalar
from numpyro_bnn.moments.closed_forms import maximum, maximum_of
from numpyro_bnn.moments.expectation import NODES, known_moments
from numpyro_bnn.moments.registry import RULES, register, wrap
from numpyro_bnn.moments.terms import Gaussian, Term, both_moments, terms_among

# Undefined or with a pole somewhere on the real line: no moments for a Gaussian
# argument.
_PARTIAL = {
    *("acos", "acosh", "asin", "atanh", "tan", "digamma", "lgamma", "erf_inv"),
    *("log", "log1p", "sqrt", "rsqrt"),
}


def register_elementwise(*names: str) -> None:
    """Declare primitives elementwise: functions of one variable composed of them are
    integrated by quadrature.

    :param names: names of primitives, as ``jax.make_jaxpr`` prints them.

    >>> register_elementwise("tanh")
    """
    for name in names:
        Kind(str, 'Pass names of primitives, e.g. `"tanh"`.').check(
            "moments.register_elementwise", "names", name
        )
    RULES.update(dict.fromkeys(names, elementwise))


def elementwise(equation: Equation, *operands: Operand) -> Term:
    """Extend the term if all random operands share their variable; otherwise treat
    operands as independent.
    """
    variables = {term.variable for term in terms_among(operands)}
    if len(variables) == 1:
        _check_domain(equation, operands)
        return Term(variables.pop(), equation, operands, _affine(equation, operands))
    check_independence(equation, variables)
    pair = _INDEPENDENT.get(equation.name)
    if pair is None or (equation.name == "select_n" and isinstance(operands[0], Term)):
        raise equation.refuse(
            "joins two different random quantities",
            "Sums, differences, products, maxima and minima of them have a rule.",
        )
    return wrap(pair(equation, *map(known_moments, operands)))


def _affine(
    equation: Equation, operands: tuple[Operand, ...]
) -> tuple[Term, Scalar, Scalar] | None:
    """(base, slope, shift) of the result if the primitive keeps an affine function
    affine.
    """
    bases = {term.base for term in terms_among(operands)}
    rule = _AFFINE.get(equation.name)
    if (
        len(bases) > 1
        or rule is None
        or not jnp.issubdtype(equation.outputs[0].dtype, jnp.floating)
    ):
        return None
    forms = [(o.slope, o.shift) if isinstance(o, Term) else (None, o) for o in operands]
    result = rule(*forms)
    return None if result is None else (bases.pop(), *result)


Form = tuple[Any, Any]  # (slope, shift); a plain operand has the slope None


def _add(x: Form, y: Form) -> Form:
    slopes = [slope for slope in (x[0], y[0]) if slope is not None]
    return sum(slopes[1:], slopes[0]), x[1] + y[1]


def _sub(x: Form, y: Form) -> Form:
    return _add(x, (None if y[0] is None else -y[0], -y[1]))


def _mul(x: Form, y: Form) -> Form | None:
    if x[0] is not None and y[0] is not None:
        return None
    factor, (slope, shift) = (x[1], y) if x[0] is None else (y[1], x)
    return slope * factor, shift * factor


def _div(x: Form, y: Form) -> Form | None:
    return None if y[0] is not None else (x[0] / y[1], x[1] / y[1])


def _select(predicate: Form, *cases: Form) -> Form | None:
    if predicate[0] is not None or predicate[1].dtype != bool or len(cases) != 2:
        return None
    (no, no_shift), (yes, yes_shift) = cases
    slope = jnp.where(
        predicate[1], 0.0 if yes is None else yes, 0.0 if no is None else no
    )
    return slope, jnp.where(predicate[1], yes_shift, no_shift)


_AFFINE: dict[str, Callable] = {
    **dict.fromkeys(("copy", "convert_element_type", "reduce_precision"), lambda x: x),
    "neg": lambda x: (-x[0], -x[1]),
    "add": _add,
    "add_any": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "select_n": _select,
}


def _check_domain(equation: Equation, operands: tuple[Operand, ...]) -> None:
    """log(x) and 1/x have no moments if x is Gaussian; log(1 + exp(x)) and 1 / (1 +
    exp(x)) do.
    """
    argument = operands[0]
    if equation.name == "div":
        argument = operands[1]
    elif (
        equation.name not in _PARTIAL | {"pow", "integer_pow"}
        or equation.params.get("y", -1) >= 0
    ):
        return
    if isinstance(argument, Term) and argument.is_normal:
        raise equation.refuse(
            (
                "has no moments for a Gaussian argument, since it is undefined on a "
                "part of the real line"
            ),
            (
                "Apply it to known numbers; normalization layers have no closed-form "
                "moments."
            ),
        )


def check_independence(equation: Equation, variables: set[Any]) -> None:
    """Refuse to combine variables that are known to depend on one another."""
    for first in variables:
        for second in variables - {first}:
            if first.parts & second.reduced:
                raise equation.refuse(
                    (
                        "combines a random array with a reduction of itself (a sum or "
                        "maximum of its elements)"
                    ),
                    (
                        "Moments track no covariance between the two; normalize with "
                        "known numbers instead."
                    ),
                )
            if first.path == second.path:
                raise equation.refuse(
                    (
                        "combines two functions of the same random elements, reshaped "
                        "or sliced alike"
                    ),
                    "Combine them before reshaping or slicing.",
                )


def _add_independent(equation: Equation, x: Gaussian, y: Gaussian) -> Gaussian:
    return Gaussian(equation.bind(x.mean, y.mean), x.var + y.var)


def _mul_independent(equation: Equation, x: Gaussian, y: Gaussian) -> Gaussian:
    return Gaussian(
        x.mean * y.mean,
        x.var * (jnp.square(y.mean) + y.var) + jnp.square(x.mean) * y.var,
    )


def _min_independent(equation: Equation, x: Gaussian, y: Gaussian) -> Gaussian:
    result = maximum(Gaussian(-x.mean, x.var), Gaussian(-y.mean, y.var))
    return Gaussian(-result.mean, result.var)


def _select_independent(
    equation: Equation, predicate: Operand, *cases: Operand
) -> Gaussian:
    """Select between independent values; plain cases have variance 0."""
    return both_moments(lambda arrays: equation.bind(predicate, *arrays), cases)


_INDEPENDENT: dict[str, Callable[..., Gaussian]] = {
    **dict.fromkeys(("add", "add_any", "sub"), _add_independent),
    "mul": _mul_independent,
    "max": lambda equation, x, y: maximum(x, y),
    "min": _min_independent,
    "select_n": _select_independent,
}


def custom_derivative(equation: Equation, *operands: Operand) -> list[Operand]:
    """Descend, but let quadrature evaluate the function itself, with the derivative
    that its author defined.
    """
    outputs = equation.descend(*operands)
    terms = terms_among(operands)
    variables = {term.variable for term in terms}
    if len(outputs) != 1 or len(variables) != 1 or not isinstance(outputs[0], Term):
        return outputs
    (output,) = outputs
    if (
        output.base is not output
        or output.variable not in variables
        or output.equation is None
    ):
        return outputs
    if any(term.shape != output.shape for term in terms):
        # it broadcasts inside, and cannot be evaluated at a value for each element
        return outputs
    return [output.evaluated(equation, *operands)]


register_elementwise(*ELEMENTWISE)
RULES["custom_jvp_call"] = custom_derivative


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
