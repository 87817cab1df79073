"""Terms: elementwise functions of one random array, held back until something else needs their moments.

``x * sigmoid(x)`` is a function of one variable, not a product of two independent ones. So an elementwise equation
whose random operands are all functions of one and the same :class:`Variable` gives a :class:`Term`, a node of a small
expression graph; only what is not elementwise, or joins two variables, asks for its moments.
"""

from copy import copy
from typing import Any

import jax.numpy as jnp

from numpyro_bnn.moments.gaussian import Gaussian
from numpyro_bnn.moments.interpret import Equation

__all__ = ["Term", "Variable"]


class Variable:
    """A random array with known moments.

    ``parts`` are the variables it holds elements of, unmixed (itself, what it is a slice or a function of),
    ``reduced`` those that it is a reduction of, and ``path`` says by which moves it was made from which variable.
    Only these relations between variables are known; all other dependence is neglected.
    """

    def __init__(
        self,
        gaussian: Gaussian,
        parts: frozenset = frozenset(),
        reduced: frozenset = frozenset(),
        path: tuple[Any, ...] = (),
    ) -> None:
        self.gaussian = gaussian
        self.parts = parts | {self}
        self.reduced = reduced
        self.path = path or (self,)
        self.views: dict[Any, Any] = {}

    def term(self) -> "Term":
        """The variable as an expression."""
        return Term(self, None, ())


class Term:
    """A node: ``equation`` applied to ``operands`` (terms of the same variable, and plain arrays).

    As far as it is known, the node is slope * base + shift with another node as ``base``: moments of affine
    functions are exact, whatever the base is.
    """

    def __init__(
        self,
        variable: Variable,
        equation: Equation | None,
        operands: tuple[Any, ...],
        affine: "tuple[Term, Any, Any] | None" = None,
    ) -> None:
        self.variable = variable
        self.equation = equation
        self.operands = operands
        self.base: Term
        self.slope: Any
        self.shift: Any
        self.base, self.slope, self.shift = affine or (self, 1.0, 0.0)
        mean = variable.gaussian.mean
        self.shape, self.dtype = jnp.shape(mean), mean.dtype
        self.evaluated_as = (equation, operands)
        if equation is not None:
            self.shape, self.dtype = equation.outputs[0].shape, equation.outputs[0].dtype
        self.moments: Gaussian | None = variable.gaussian if equation is None else None

    def evaluated(self, equation: Equation, *operands: Any) -> "Term":
        """The same term, evaluated by the call that it came out of: that keeps custom derivatives."""
        same = copy(self)
        same.evaluated_as = (equation, operands)
        same.base = same if self.base is self else self.base
        return same

    @property
    def is_normal(self) -> bool:
        """Whether the term is an affine function of its variable, so that it is Gaussian if that is."""
        return self.base.equation is None

    def evaluate(self, x: Any) -> Any:
        """Value of the expression where its variable has the value ``x``."""
        known: dict[int, Any] = {}

        def value(node: Any) -> Any:
            if not isinstance(node, Term):
                return node
            equation, operands = node.evaluated_as
            if equation is None:
                return x
            if id(node) not in known:
                result = equation.bind(*map(value, operands))
                known[id(node)] = result[0] if isinstance(result, list | tuple) else result
            return known[id(node)]

        return value(self)
