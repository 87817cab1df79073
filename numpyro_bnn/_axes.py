"""Where the axes of values go in a program: each primitive moves labels of axes, or
mixes what they number.

A label numbers the elements of an axis, for example the rows of the data. Its place in
a later value says which of its numbers each element depends on; it is ``SUMMED`` where
one element depends on several.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
from jax.extend.core import Literal

from numpyro_bnn._jaxprs import ELEMENTWISE, called

Equation: TypeAlias = Any  # of a jaxpr
RESHAPES = frozenset({"reshape", "squeeze", "expand_dims"})


class Axis(NamedTuple):
    """The label of a whole axis of an input, or of a value inside a program."""

    source: str
    axis: int
    size: int


class Place(NamedTuple):
    """Element i along ``axis`` holds number ``i // inner % size`` of a label."""

    axis: int
    inner: int


# Used instead of a place: a sum of terms, each with one number of the label, but not
# the same number for all.
SUMMED = None


class LabelPlaces(dict[Any, Place | None]):
    """A value that depends on numbered elements: the place of each label."""


def follow_axes(
    jaxpr: Any,
    inputs: Sequence[Any],
    enter: Callable[[Equation, Sequence[Any]], Any] | None = None,
) -> list[Any]:
    """The places of labels in the outputs of a program, from those in its inputs;
    nothing is computed.

    :param inputs: :class:`LabelPlaces` for each input, or marks that only ``enter``
        understands.
    :param enter: from an equation one of whose operands has such a mark, and its
        operands, to its output.
    :return: for each output; a label with the value ``SUMMED`` arrives, but not element
        by element.

    >>> import jax
    >>> program = jax.make_jaxpr(lambda x, w: (x @ w, x.sum(0)))(
    ...     jnp.ones((3, 2)), jnp.ones((2, 2))
    ... ).jaxpr
    >>> rows = Axis("x", 0, 3)
    >>> [
    ...     places[rows]
    ...     for places in follow_axes(
    ...         program, [LabelPlaces({rows: Place(0, 1)}), LabelPlaces()]
    ...     )
    ... ]
    [Place(axis=0, inner=1), None]
    """
    rows_of: dict[Any, Any] = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(variables: Sequence[Any]) -> list[Any]:
        return [
            LabelPlaces()
            if isinstance(var, Literal)
            else rows_of.get(var, LabelPlaces())
            for var in variables
        ]

    for equation in jaxpr.eqns:
        operands = read(equation.invars)
        if not any(operands):
            continue
        name = equation.primitive.name
        inner = called(equation)
        all_rows = all(isinstance(operand, LabelPlaces) for operand in operands)
        if inner is not None:
            outputs = follow_axes(inner, operands, enter)
        elif name in ("scan", "cond"):
            if not all_rows and enter is not None:
                enter(equation, operands)
            rows = [
                operand if isinstance(operand, LabelPlaces) else LabelPlaces()
                for operand in operands
            ]
            outputs = (_scanned if name == "scan" else _chosen)(equation, rows, enter)
        elif all_rows:
            outputs = [moved(equation, operands)] * len(equation.outvars)
        else:
            assert enter is not None
            outputs = [enter(equation, operands)] * len(equation.outvars)
        rows_of.update(zip(equation.outvars, outputs, strict=True))
    return read(jaxpr.outvars)


def moved(equation: Equation, operands: Sequence[LabelPlaces]) -> LabelPlaces:
    """Where the labels of all operands lie in the output of a primitive."""
    move, _ = rule_of(equation, {})
    places = LabelPlaces()
    for operand, rows in enumerate(operands):
        for label, place in rows.items():
            if place is not SUMMED and equation.primitive.name in RESHAPES:
                shapes = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
                place = reshaped(place, label.size, *shapes)[0]
            elif place is not SUMMED:
                place = SUMMED if move is None else move(equation, operand, place)
            _merge(places, {label: place})
    return places


def _merge(places: LabelPlaces, rows: Mapping[Any, Place | None]) -> None:
    """Add labels to those of a value; one that lies at two places is mixed."""
    for label, place in rows.items():
        places[label] = place if places.get(label, place) == place else SUMMED


def _chosen(
    equation: Equation, operands: Sequence[LabelPlaces], enter: Any
) -> list[LabelPlaces]:
    """The outputs of ``cond``; a predicate is a scalar, so that labels in it are those
    of all elements.
    """
    results = [
        LabelPlaces(dict.fromkeys(operands[0], SUMMED)) for _ in equation.outvars
    ]
    for branch in equation.params["branches"]:
        for result, rows in zip(
            results, follow_axes(branch.jaxpr, operands[1:], enter), strict=True
        ):
            _merge(result, rows)
    return results


def _scanned(
    equation: Equation, operands: Sequence[LabelPlaces], enter: Any
) -> list[LabelPlaces]:
    """The outputs of ``scan``: carried labels are followed until they no
    longer change.
    """
    constants = equation.params["num_consts"]
    carried = equation.params["num_carry"]

    def shifted(rows: LabelPlaces, by: int) -> LabelPlaces:
        """By the axis that is scanned, whose own labels are mixed."""
        moved_rows = LabelPlaces(rows)
        for label, place in rows.items():
            if place is not SUMMED:
                axis = place.axis + by
                moved_rows[label] = SUMMED if axis < 0 else place._replace(axis=axis)
        return moved_rows

    start = list(map(LabelPlaces, operands[constants : constants + carried]))
    slices = [shifted(rows, -1) for rows in operands[constants + carried :]]
    while True:
        inputs = [*operands[:constants], *map(LabelPlaces, start), *slices]
        outputs = follow_axes(equation.params["jaxpr"].jaxpr, inputs, enter)
        previous = list(map(LabelPlaces, start))
        for carry, rows in zip(start, outputs[:carried], strict=True):
            _merge(carry, rows)
        if start == previous:
            return [*start, *(shifted(rows, 1) for rows in outputs[carried:])]


Move = Callable[
    [Equation, int, Place], Place | None
]  # of a place in an operand to the place in the output
Linear = Callable[[Sequence[int]], bool]


def rule_of(
    equation: Equation, counting: Mapping[int, int]
) -> tuple[Move | None, Linear]:
    """Where a primitive moves labels (``None`` if unknown), and whether it is linear in
    the operands that hold them.

    ``counting`` has the columns of an index that count 0, 1, 2, ..., and the axis along
    which they count.
    """
    name = equation.primitive.name
    move, linear = RULES.get(name, (None, "in none"))
    if name == "gather":
        move = partial(_gathered, counting=counting)
    if name == "convert_element_type" and jnp.issubdtype(
        equation.params["new_dtype"], jnp.floating
    ):
        linear = "in all"
    return move, LINEAR[linear]


def reshaped(
    place: Place, size: int, shape: tuple[int, ...], new_shape: tuple[int, ...]
) -> tuple[Place | None, int | None]:
    """Place after a reshape; or, if two axes share what was one label, the size of its
    inner part.
    """
    stride = place.inner * prod(shape[place.axis + 1 :])
    for axis, length in enumerate(new_shape):
        below = prod(new_shape[axis + 1 :])
        if length == 1 or stride * size <= below or stride >= below * length:
            continue  # this axis holds no part of the label
        if stride % below == 0 and (below * length) % (stride * size) == 0:
            return Place(axis, stride // below), None
        divides = (
            stride < below < stride * size
            and below % stride == 0
            and size % (below // stride) == 0
        )
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

    return lambda equation, operand, place: (
        SUMMED if place.axis in set(touched(equation)) else place
    )


def _unless_along(name: str) -> Move:
    return _unless(lambda equation: [equation.params[name]])


def dot_axes(
    equation: Equation, operand: int
) -> tuple[dict[int, int], tuple[int, ...]]:
    """Output axes that come from the free axes of an operand, and its other axes."""
    contracted, batch = equation.params["dimension_numbers"]
    inputs = (*batch[operand], *contracted[operand])
    free = _other_axes(equation.invars[operand], inputs)
    rank = equation.invars[0].aval.ndim
    first = len(batch[0]) if operand == 0 else rank - len(contracted[0])
    return dict(enumerate(free, first)), inputs


def _other_axes(var: Any, axes: Sequence[int]) -> list[int]:
    return [axis for axis in range(var.aval.ndim) if axis not in axes]


def _dot(equation: Equation, operand: int, place: Place) -> Place | None:
    contracted, batch = equation.params["dimension_numbers"]
    if place.axis in batch[operand]:
        return place._replace(axis=tuple(batch[operand]).index(place.axis))
    if place.axis in contracted[operand]:
        return SUMMED
    links, _ = dot_axes(equation, operand)
    return place._replace(
        axis=next(out for out, axis in links.items() if axis == place.axis)
    )


def _convolution(equation: Equation, operand: int, place: Place) -> Place | None:
    spec = equation.params["dimension_numbers"]
    if (
        operand == 0
        and place.axis == spec.lhs_spec[0]
        and equation.params["batch_group_count"] == 1
    ):
        return place._replace(axis=spec.out_spec[0])
    return SUMMED


def _window(equation: Equation, operand: int, place: Place) -> Place | None:
    p = equation.params
    axis = place.axis
    dilations = (p.get("base_dilation"), p.get("window_dilation"))
    untouched = p["window_dimensions"][axis] == 1 and p["window_strides"][axis] == 1
    untouched = untouched and tuple(p["padding"][axis]) == (0, 0)
    if untouched and all(d is None or d[axis] == 1 for d in dilations):
        return place
    return SUMMED


def _gathered(
    equation: Equation, operand: int, place: Place, counting: Mapping[int, int]
) -> Place | None:
    numbers = equation.params["dimension_numbers"]
    axis = place.axis
    shape = equation.invars[0].aval.shape
    index_shape = equation.invars[1].aval.shape
    # Axes of the output that come from those of the index, in order.
    looked_up = _other_axes(equation.outvars[0], numbers.offset_dims)
    if operand == 1:  # each element of the output is looked up by one row of the index
        return place._replace(axis=looked_up[axis]) if axis < len(looked_up) else SUMMED
    if axis in numbers.operand_batching_dims:
        index = numbers.start_indices_batching_dims[
            numbers.operand_batching_dims.index(axis)
        ]
        return place._replace(axis=looked_up[index])
    if axis in numbers.start_index_map:
        index = counting.get(numbers.start_index_map.index(axis), -1)
        complete = index >= 0 and index_shape[index] == shape[axis]
        if complete and axis in numbers.collapsed_slice_dims:
            return place._replace(axis=looked_up[index])
        return SUMMED
    dropped = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    slice_axes = _other_axes(equation.invars[0], dropped)
    if axis in slice_axes and equation.params["slice_sizes"][axis] == shape[axis]:
        return place._replace(axis=numbers.offset_dims[slice_axes.index(axis)])
    return SUMMED


def _sliced(equation: Equation) -> Iterable[int]:
    shape = equation.invars[0].aval.shape
    sliced_shape = equation.outvars[0].aval.shape
    strides = equation.params.get("strides") or [1] * len(shape)
    return [
        a for a in range(len(shape)) if shape[a] != sliced_shape[a] or strides[a] != 1
    ]


# Whether an operation is linear in the operands (given by position) that depend on one
# site.
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
    "transpose": (
        _to(lambda eqn, place: tuple(eqn.params["permutation"]).index(place.axis)),
        "in all",
    ),
    "broadcast_in_dim": (
        _to(lambda eqn, place: eqn.params["broadcast_dimensions"][place.axis]),
        "in all",
    ),
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
    "pad": (
        _unless(
            lambda eqn: [
                a for a, pad in enumerate(eqn.params["padding_config"]) if any(pad)
            ]
        ),
        "in all",
    ),
    "concatenate": (_unless_along("dimension"), "in all"),
    "rev": (_unless(lambda equation: equation.params["dimensions"]), "in all"),
    "sort": (_unless_along("dimension"), "in none"),
    "div": (STAY, "in first"),
    "select_n": (STAY, "in cases"),
    "mul": (STAY, "in each"),
}
_LINEAR = "add sub neg add_any copy name stop_gradient reduce_precision real imag"
RULES |= dict.fromkeys(_LINEAR.split(), (STAY, "in all"))
_REDUCTIONS = (
    "reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin"
)
RULES |= dict.fromkeys(_REDUCTIONS.split(), (_reduce, "in none"))
RULES |= dict.fromkeys(
    ("cummax", "cummin", "cumprod", "cumlogsumexp"), (_unless_along("axis"), "in none")
)
_OTHERS = """
    ceil floor round polygamma zeta igamma igammac regularized_incomplete_beta
    rem nextafter bitcast_convert_type population_count shift_left
    shift_right_arithmetic shift_right_logical
"""
RULES |= dict.fromkeys(_OTHERS.split(), (STAY, "in none"))
