"""The table of rules, and how a rule is added."""

from collections.abc import Callable
from typing import Any

from numpyro_bnn.moments.expectation import moments_of
from numpyro_bnn.moments.gaussian import Gaussian
from numpyro_bnn.moments.interpret import Equation, Rule
from numpyro_bnn.moments.term import Term, Variable

__all__ = ["RULES", "register", "wrap"]

# Name of a primitive -> rule of terms and plain arrays, as the interpreter calls it.
RULES: dict[str, Rule] = {}


def register(
    *names: str, view: bool = False, reduces: bool = False, multiplies: bool = False
) -> Callable[[Rule], Rule]:
    """Give primitives a rule: ``rule(equation, *operands)`` from Gaussians and plain arrays to the output.

    At least one operand is a :class:`Gaussian`. The rule returns a ``Gaussian`` (or a plain array), a list of them
    where the primitive has several outputs. ``equation.params`` holds the parameters of the primitive,
    ``equation.bind(*arrays)`` applies it, ``raise equation.refuse(why, instead)`` refuses a case.

    :param names: names of primitives, as ``jax.make_jaxpr`` prints them.
    :param view: each element of the output is an element of one operand.
    :param reduces: elements of the operand are mixed within themselves, so that the output may not be combined
        with the operand again as if it were independent; such a combination is refused.
    :param multiplies: operands are multiplied as independent ones; elements of the same array are refused.

    >>> import jax, jax.numpy as jnp
    >>> @register("cumsum", reduces=True)
    ... def cumsum(equation, x):
    ...     return Gaussian(equation.bind(x.mean), equation.bind(x.var))
    >>> from numpyro_bnn.moments import propagate
    >>> propagate(jnp.cumsum)(Gaussian(jnp.ones(3), jnp.ones(3))).var.tolist()
    [1.0, 2.0, 3.0]
    """

    def decorate(rule: Rule) -> Rule:
        for name in names:
            RULES[name] = _from_moments(rule, view, reduces, multiplies)
        return rule

    return decorate


def _from_moments(rule: Rule, view: bool, reduces: bool, multiplies: bool) -> Rule:
    def apply(equation: Equation, *operands: Any) -> Any:
        terms = [operand for operand in operands if isinstance(operand, Term)]
        variables = [term.variable for term in terms]
        key = (equation.name, str(equation.params)) if view and len(operands) == 1 else None
        seen = variables[0].views if key and terms[0].equation is None else {}
        if key in seen:
            return seen[key]
        if multiplies and len(variables) == 2 and variables[0].parts & variables[1].parts:
            raise equation.refuse(
                "multiplies a random array with itself",
                "Moments treat the factors of a product of matrices as independent.",
            )
        result = rule(equation, *(moments_of(o) if isinstance(o, Term) else o for o in operands))
        parts = frozenset().union(*(variable.parts for variable in variables))
        reduced = frozenset().union(*(variable.reduced for variable in variables))
        known: dict[str, Any] = {}
        if view:
            known = {"parts": parts, "reduced": reduced, "path": (*variables[0].path, key) if key else ()}
        elif reduces:
            known = {"reduced": reduced | parts}
        if isinstance(result, list):
            wrapped: Any = [wrap(r, **_numbered(known, i)) for i, r in enumerate(result)]
        else:
            wrapped = wrap(result, **known)
        if key:
            seen[key] = wrapped
        return wrapped

    return apply


def _numbered(known: dict[str, Any], output: int) -> dict[str, Any]:
    """Outputs of one move hold different elements."""
    return {**known, "path": (*known["path"], output)} if known.get("path") else known


def wrap(value: Any, **known: Any) -> Any:
    """A Gaussian as a term of a new variable; other values as they are."""
    return Variable(value, **known).term() if isinstance(value, Gaussian) else value
