"""Follow labels through one equation of a program, without running it."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from types import MappingProxyType

import jax.numpy as jnp

from numpyro_bnn.guides.estimators.moves import RULES, gathered
from numpyro_bnn.guides.estimators.rows import SUMMED, Label, Place, Rows
from numpyro_bnn.moments.interpret import Equation

__all__ = ["flow"]

RESHAPES = frozenset({"reshape", "squeeze", "expand_dims"})


def _reshape(
    place: Place, size: int, before: tuple[int, ...], after: tuple[int, ...]
) -> tuple[Place | None, int | None]:
    """Place after a reshape; or, where two axes share what was one label, the size of its inner part."""
    stride = place.inner * prod(before[place.axis + 1 :])
    for axis, length in enumerate(after):
        below = prod(after[axis + 1 :])
        if length == 1 or stride * size <= below or stride >= below * length:
            continue  # this axis has no part of the label
        if stride % below == 0 and (below * length) % (stride * size) == 0:
            return Place(axis, stride // below), None
        divides = stride < below < stride * size and below % stride == 0 and size % (below // stride) == 0
        return SUMMED, below // stride if divides else None
    return SUMMED, None


def flow(
    equation: Equation,
    operands: Sequence[Rows | None],
    size: Callable[[Label], int],
    mixed: Callable[[Label, Equation], None],
    divided: Callable[[Label, int], None],
    counting: Mapping[int, int] = MappingProxyType({}),
) -> Rows | None:
    """Where the labels lie in the outputs of an equation.

    A label is given up (``mixed``) where one element comes to depend nonlinearly on several of its numbers: the
    expectation would then not be that of one draw. Sums of terms with one number each are kept as ``SUMMED``.

    :param operands: ``None`` for an operand without random numbers.
    :param size: length of a label.
    :param mixed: told the labels that are given up.
    :param divided: told the labels that a reshape divides, with the size of the inner part.
    :param counting: for a lookup the columns of the index that count 0, 1, 2, ..., with the axis they count along.
    """
    if equation.name in RESHAPES:
        return _reshaped(equation, operands[0] or Rows(), size, divided)
    move, linear = RULES.get(equation.name, (None, lambda holders: False))
    if equation.name == "gather":
        move = partial(gathered, counting=counting)
    if equation.name == "convert_element_type" and jnp.issubdtype(equation.params["new_dtype"], jnp.floating):
        linear = RULES["copy"][1]
    found = Rows()
    for label in {label: None for rows in operands for label in rows or ()}:
        holders = [i for i, rows in enumerate(operands) if rows and label.site in rows.sites]
        places = {
            place if place is SUMMED or move is None else move(equation, i, place)
            for i, rows in enumerate(operands)
            if rows and label in rows
            for place in [rows[label]]
        }
        if move is not None and len(places) == 1 and (linear(holders) or SUMMED not in places):
            (found[label],) = places
        elif move is not None and linear(holders):
            found[label] = SUMMED
        else:
            mixed(label, equation)
    return found or None


def _reshaped(
    equation: Equation, rows: Rows, size: Callable[[Label], int], divided: Callable[[Label, int], None]
) -> Rows | None:
    before, after = equation.jaxpr_equation.invars[0].aval.shape, equation.outputs[0].shape
    found = Rows()
    for label, place in rows.items():
        if place is SUMMED:
            found[label] = SUMMED
            continue
        moved, inner = _reshape(place, size(label), before, after)
        if inner is None:
            found[label] = moved
        else:
            divided(label, inner)  # the analysis starts again with both parts
    return found or None
