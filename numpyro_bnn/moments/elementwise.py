"""Elementwise primitives: functions of one variable become terms, two variables are
combined as independent.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from numpyro_bnn._jaxprs.primitives import ELEMENTWISE
from numpyro_bnn._jaxprs.walk import Equation
from numpyro_bnn._options import Kind
from numpyro_bnn._types import Operand, Scalar
from numpyro_bnn.moments.closed_forms import maximum
from numpyro_bnn.moments.expectation import known_moments
from numpyro_bnn.moments.registry import RULES, wrap
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
