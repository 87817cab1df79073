"""Random arrays, and the elementwise functions of one random array that are not
evaluated yet.

``x * sigmoid(x)`` is a function of one variable, not a product of two independent ones.
Therefore an elementwise equation whose random operands are all functions of the same
:class:`Variable` gives a :class:`Term`, a node of an expression graph. Its moments are
computed when an operation needs them that is not elementwise or joins two variables.
"""

from collections.abc import Callable, Hashable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_bnn._checks import argument_error
from numpyro_bnn._jaxprs.walk import CALLS, Equation
from numpyro_bnn._types import Operand, Scalar


class Gaussian(NamedTuple):
    """Mean and variance of every element of an array; the elements are treated as
    independent.

    :param mean: any shape, floating point.
    :param var: the same shape, at least 0; 0 means a known number.
    """

    mean: Array
    var: Array


def as_gaussian(value: Gaussian) -> Gaussian:
    """The same moments as JAX arrays of one dtype; refuses a mean and a variance that
    do not match.
    """
    mean, var = jnp.asarray(value.mean), jnp.asarray(value.var)
    if mean.shape != var.shape:
        instead = f"Pass one variance per element of the mean, {mean.shape}."
        raise argument_error("moments.Gaussian", "var", f"shape {var.shape}", instead)
    for name, array in (("mean", mean), ("var", var)):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            instead = "Pass floating-point numbers."
            raise argument_error(
                "moments.Gaussian", name, f"dtype {array.dtype}", instead, TypeError
            )
    if not isinstance(var, jax.core.Tracer) and np.any(np.asarray(var) < 0):
        raise argument_error(
            "moments.Gaussian",
            "var",
            f"smallest {var.min()}",
            "Pass variances of at least 0.",
        )
    dtype = jnp.result_type(mean, var)
    return Gaussian(mean.astype(dtype), var.astype(dtype))


@dataclass(eq=False)
class Variable:
    """A random array with known moments.

    ``parts`` are the variables whose elements it holds unmixed (itself, and those it is
    a slice or a function of), ``reduced`` the variables it is a reduction of, ``path``
    the variable it was made from and the moves in between, ``views`` the results of
    such moves. Only these relations are tracked; all other dependence is neglected.
    """

    gaussian: Gaussian
    parts: frozenset = frozenset()
    reduced: frozenset = frozenset()
    path: tuple[Hashable, ...] = ()
    views: dict[Hashable, Operand] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.parts |= {self}
        self.path = self.path or (self,)


def terms_among(operands: Sequence[Operand]) -> list["Term"]:
    """The random operands."""
    return [operand for operand in operands if isinstance(operand, Term)]


def both_moments(
    move: Callable[[list], Operand],
    operands: Sequence[Operand],
    move_var: Callable[[list], Operand] | None = None,
) -> Operand:
    """Apply a map of arrays to the means, and the same or another one to the variances;
    plain operands have variance 0.
    """
    means, variances = [], []
    for operand in operands:
        if not isinstance(operand, Gaussian):
            operand = Gaussian(operand, jnp.zeros_like(operand))
        means.append(operand.mean)
        variances.append(operand.var)
    mean, var = move(means), (move_var or move)(variances)
    if isinstance(mean, list | tuple):
        return list(map(Gaussian, mean, var))
    return Gaussian(mean, var)


class Term:
    """A node: ``equation`` applied to ``operands`` (terms of the same variable, and
    plain arrays).

    If an affine form is known, the node is slope * base + shift with another node as
    ``base``: moments of affine functions are exact, whatever the base is.
    """

    def __init__(
        self,
        variable: Variable,
        equation: Equation | None,
        operands: tuple[Operand, ...],
        affine: "tuple[Term, Operand, Scalar] | None" = None,
    ) -> None:
        self.variable = variable
        self.equation = equation
        self.operands = operands
        self.base: Term
        self.slope: Operand
        self.shift: Scalar
        self.base, self.slope, self.shift = affine or (self, 1.0, 0.0)
        self.evaluated_as = (equation, operands)
        self.moments: Gaussian | None = None
        if equation is None:
            mean = variable.gaussian.mean
            self.shape, self.dtype = jnp.shape(mean), mean.dtype
            self.moments = variable.gaussian
        else:
            output = equation.outputs[0]
            self.shape, self.dtype = output.shape, output.dtype

    def evaluated(self, equation: Equation, *operands: Operand) -> "Term":
        """The same term, evaluated by the call that produced it, which keeps custom
        derivatives.
        """
        same = copy(self)
        same.evaluated_as = (equation, operands)
        same.base = same if self.base is self else self.base
        return same

    @property
    def is_normal(self) -> bool:
        """Whether the term is an affine function of its variable, and so Gaussian if
        the variable is.
        """
        return self.base.equation is None

    def evaluate(self, x: Operand) -> Operand:
        """Value of the expression if its variable has the value ``x``, of the
        variable's shape or the term's.
        """
        results: dict[int, Operand] = {}

        def value(node: Operand) -> Operand:
            if not isinstance(node, Term):
                return node
            equation, operands = node.evaluated_as
            if equation is None:
                return x
            if id(node) not in results:
                result = _bind_larger(equation, list(map(value, operands)))
                results[id(node)] = (
                    result[0] if isinstance(result, list | tuple) else result
                )
            return results[id(node)]

        return value(self)


def _bind_larger(equation: Equation, values: list[Operand]) -> Any:
    """Apply an elementwise equation to values of the shapes it was traced for, or of
    what these broadcast to.
    """
    traced = [var.aval.shape for var in equation.jaxpr_equation.invars]
    larger = [np.shape(v) != shape for v, shape in zip(values, traced, strict=True)]
    if not any(larger):
        return equation.bind(*values)
    shape = np.broadcast_shapes(*map(np.shape, values))
    if equation.name not in CALLS:
        return equation.bind(*(jnp.broadcast_to(v, shape) for v in values))
    small = equation.outputs[0].shape
    aligned = (1,) * (len(shape) - len(small)) + small
    new_axes = [axis for axis, size in enumerate(shape) if aligned[axis] != size]

    def call(*operands: Operand) -> Operand:
        resized = [jnp.reshape(v, s) for v, s in zip(operands, traced, strict=True)]
        return equation.bind(*resized)[0].reshape(np.delete(shape, new_axes))

    # The program inside a call has its shapes: it is mapped over all further axes.
    for axis in new_axes:
        axes = [axis if is_larger else None for is_larger in larger]
        call = jax.vmap(call, axes, axis)
    operands = []
    for value, is_larger in zip(values, larger, strict=True):
        operands.append(jnp.broadcast_to(value, shape) if is_larger else value)
    return call(*operands)
