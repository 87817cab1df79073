"""Labels that record along which axis of a value the random numbers of each row lie, and how primitives move them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import prod
from typing import NamedTuple

import jax.numpy as jnp

from numpyro_bnn.guides.elbo.weight_uses import dot_axes
from numpyro_bnn.moments.elementwise import ELEMENTWISE
from numpyro_bnn.moments.interpret import Equation


class Label(NamedTuple):
    """One numbering of the random numbers of a site: a piece of an axis of the output where the site enters."""

    site: str
    axis: int
    piece: int


class Place(NamedTuple):
    """Element i along ``axis`` holds number ``i // inner % size`` of a label."""

    axis: int
    inner: int


# Used instead of a place: a sum of terms, each with one number of the label, but not the same number for all.
SUMMED = None


class Rows(dict[Label, Place | None]):
    """A value that depends on random numbers: the place of each label."""


Move = Callable[[Equation, int, Place], Place | None]  # of a place in an operand to the place in the output
Linear = Callable[[Sequence[int]], bool]


def rule_of(equation: Equation, counting: Mapping[int, int]) -> tuple[Move | None, Linear]:
    """Where a primitive moves labels (``None`` if unknown), and whether it is linear in the operands that hold them.

    ``counting`` has the columns of an index that count 0, 1, 2, ..., and the axis along which they count.
    """
    move, linear = RULES.get(equation.name, (None, "in none"))
    if equation.name == "gather":
        move = partial(_gathered, counting=counting)
    if equation.name == "convert_element_type" and jnp.issubdtype(equation.params["new_dtype"], jnp.floating):
        linear = "in all"
    return move, LINEAR[linear]


def reshaped(
    place: Place, size: int, before: tuple[int, ...], after: tuple[int, ...]
) -> tuple[Place | None, int | None]:
    """Place after a reshape; or, if two axes share what was one label, the size of its inner part."""
    stride = place.inner * prod(before[place.axis + 1 :])
    for axis, length in enumerate(after):
        below = prod(after[axis + 1 :])
        if length == 1 or stride * size <= below or stride >= below * length:
            continue  # this axis holds no part of the label
        if stride % below == 0 and (below * length) % (stride * size) == 0:
            return Place(axis, stride // below), None
        divides = stride < below < stride * size and below % stride == 0 and size % (below // stride) == 0
        return SUMMED, below // stride if divides else None
    return SUMMED, None


def _to(axis: Callable[[Equation, Place], int]) -> Move:
    return lambda equation, operand, place: place._replace(axis=axis(equation, place))


def _reduce(equation: Equation, operand: int, place: Place) -> Place | None:
    axes = equation.params["axes"]
    if place.axis in axes:
        return SUMMED
    return place._replace(axis=place.axis - sum(axis < place.axis for axis in axes))


def _unless(touched: Callable[[Equation], Iterable[int]]) -> Move:
    """Places stay, except along the axes that the operation acts on."""

    return lambda equation, operand, place: SUMMED if place.axis in set(touched(equation)) else place


def _unless_along(name: str) -> Move:
    return _unless(lambda equation: [equation.params[name]])


def _dot(equation: Equation, operand: int, place: Place) -> Place | None:
    contracted, batch = equation.params["dimension_numbers"]
    if place.axis in batch[operand]:
        return place._replace(axis=tuple(batch[operand]).index(place.axis))
    if place.axis in contracted[operand]:
        return SUMMED
    links, _ = dot_axes(equation, operand)
    return place._replace(axis=next(out for out, axis in links.items() if axis == place.axis))


def _convolution(equation: Equation, operand: int, place: Place) -> Place | None:
    spec = equation.params["dimension_numbers"]
    if operand == 0 and place.axis == spec.lhs_spec[0] and equation.params["batch_group_count"] == 1:
        return place._replace(axis=spec.out_spec[0])
    return SUMMED


def _window(equation: Equation, operand: int, place: Place) -> Place | None:
    p, axis = equation.params, place.axis
    dilations = (p.get("base_dilation"), p.get("window_dilation"))
    alone = p["window_dimensions"][axis] == 1 and p["window_strides"][axis] == 1
    alone = alone and tuple(p["padding"][axis]) == (0, 0)
    return place if alone and all(d is None or d[axis] == 1 for d in dilations) else SUMMED


def _gathered(equation: Equation, operand: int, place: Place, counting: Mapping[int, int]) -> Place | None:
    numbers, axis = equation.params["dimension_numbers"], place.axis
    shape, index_shape = (var.aval.shape for var in equation.jaxpr_equation.invars)
    if operand == 1:
        return SUMMED
    # Axes of the output that come from those of the index, in order.
    looked_up = [a for a in range(len(equation.outputs[0].shape)) if a not in numbers.offset_dims]
    if axis in numbers.operand_batching_dims:
        index = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(axis)]
        return place._replace(axis=looked_up[index])
    if axis in numbers.start_index_map:
        index = counting.get(numbers.start_index_map.index(axis), -1)
        whole = index >= 0 and index_shape[index] == shape[axis]
        return place._replace(axis=looked_up[index]) if whole and axis in numbers.collapsed_slice_dims else SUMMED
    dropped = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    kept = [a for a in range(len(shape)) if a not in dropped]
    whole = axis in kept and equation.params["slice_sizes"][axis] == shape[axis]
    return place._replace(axis=numbers.offset_dims[kept.index(axis)]) if whole else SUMMED


def _sliced(equation: Equation) -> Iterable[int]:
    before, after = equation.jaxpr_equation.invars[0].aval.shape, equation.outputs[0].shape
    strides = equation.params.get("strides") or [1] * len(before)
    return [a for a in range(len(before)) if before[a] != after[a] or strides[a] != 1]


# Whether an operation is linear in the operands (given by position) that depend on one site.
LINEAR: dict[str, Linear] = {
    "in all": lambda holders: True,
    "in none": lambda holders: False,
    "in each": lambda holders: len(holders) == 1,
    "in first": lambda holders: list(holders) == [0],
    "in cases": lambda holders: 0 not in holders,
}
STAY = _to(lambda equation, place: place.axis)
RULES: dict[str, tuple[Move, str]] = dict.fromkeys(ELEMENTWISE, (STAY, "in none"))
RULES |= {
    "transpose": (_to(lambda eqn, place: tuple(eqn.params["permutation"]).index(place.axis)), "in all"),
    "broadcast_in_dim": (_to(lambda eqn, place: eqn.params["broadcast_dimensions"][place.axis]), "in all"),
    "reduce_sum": (_reduce, "in all"),
    "cumsum": (_unless_along("axis"), "in all"),
    "dot_general": (_dot, "in each"),
    "conv_general_dilated": (_convolution, "in each"),
    "reduce_window_sum": (_window, "in all"),
    "reduce_window_max": (_window, "in none"),
    "reduce_window_min": (_window, "in none"),
    "gather": (partial(_gathered, counting={}), "in first"),
    "slice": (_unless(_sliced), "in all"),
    "dynamic_slice": (_unless(_sliced), "in first"),
    "split": (_unless_along("axis"), "in all"),
    "pad": (_unless(lambda eqn: [a for a, pad in enumerate(eqn.params["padding_config"]) if any(pad)]), "in all"),
    "concatenate": (_unless_along("dimension"), "in all"),
    "rev": (_unless(lambda equation: equation.params["dimensions"]), "in all"),
    "sort": (_unless_along("dimension"), "in none"),
    "div": (STAY, "in first"),
    "select_n": (STAY, "in cases"),
    "mul": (STAY, "in each"),
}
_LINEAR = "add sub neg add_any copy stop_gradient reduce_precision real imag"
RULES |= dict.fromkeys(_LINEAR.split(), (STAY, "in all"))
_REDUCTIONS = "reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin"
RULES |= dict.fromkeys(_REDUCTIONS.split(), (_reduce, "in none"))
RULES |= dict.fromkeys(("cummax", "cummin", "cumprod", "cumlogsumexp"), (_unless_along("axis"), "in none"))
_OTHERS = """
    ceil floor round polygamma zeta igamma igammac regularized_incomplete_beta rem nextafter bitcast_convert_type
    population_count shift_left shift_right_arithmetic shift_right_logical
"""
RULES |= dict.fromkeys(_OTHERS.split(), (STAY, "in none"))
