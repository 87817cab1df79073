"""Names of the toolbox for programs that other rooms still import from here."""

from collections.abc import Iterable
from typing import Any

from jax.extend.core import Literal

from numpyro_bnn._programs.primitives import ELEMENTWISE
from numpyro_bnn._programs.slices import (
    dependence,
    indexed_lengths,
    named_inputs,
    needed_part,
    reached,
)
from numpyro_bnn._programs.walk import needed_equations, variables_of

__all__ = [
    "ELEMENTWISE",
    "dependence",
    "evaluate_equations",
    "indexed_lengths",
    "named_inputs",
    "needed_equations",
    "needed_part",
    "reached",
    "variables_of",
]


def evaluate_equations(
    equations: Iterable[Any], values: dict[Any, Any], outputs: Iterable[Any]
) -> list[Any]:
    """The values of ``outputs``, from those of the inputs and constants
    in ``values``.
    """

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in equations:
        primitive = equation.primitive
        result = primitive.bind(
            *map(read, equation.invars), **primitive.get_bind_params(equation.params)
        )
        values.update(
            zip(
                equation.outvars,
                result if primitive.multiple_results else [result],
                strict=True,
            )
        )
    return [read(atom) for atom in outputs]
