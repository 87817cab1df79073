"""What each primitive of JAX is, and where it moves the axes of its operands: one
table, in which a primitive that is not understood is opaque.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp

from numpyro_bnn._types import Atom, Operand

Equation: TypeAlias = Any  # of a jaxpr


class Place(NamedTuple):
    """Element i along ``axis`` holds number ``i // inner % size`` of what is
    numbered.
    """

    axis: int
    inner: int


# Used instead of a place: a sum of terms, each with one number, but not the same number
# for all.
SUMMED = None

# From a place in an operand to the place in the output.
Move = Callable[[Equation, int, Place], Place | None]
# Whether an operation is linear in the operands, given by position, that depend on one
# thing.
Linear = Callable[[Sequence[int]], bool]


class Primitive(NamedTuple):
    """What a primitive is.

    :param kind: ``"elementwise"``; ``"special"``, elementwise too, but of no use to
        quadrature (infinitely many steps, or no real function of one number);
        ``"view"``, whose elements are those of its operands; ``"lookup"``, a view by
        computed indices; ``"reduction"``; ``"along"`` an axis, whose length it keeps;
        ``"contraction"``; ``"window"``; ``"opaque"``.
    :param move: where axes go; ``None`` if that is not known.
    """

    kind: str
    move: Move | None
    linear: Linear


def primitive_of(equation: Equation) -> Primitive:
    """The row of an equation's primitive."""
    name = equation.primitive.name
    row = TABLE.get(name, OPAQUE)
    if name == "convert_element_type" and not jnp.issubdtype(
        equation.params["new_dtype"], jnp.floating
    ):
        return row._replace(linear=_in_none)
    return row


def names_of(*kinds: str) -> frozenset[str]:
    """The primitives of some kinds."""
    return frozenset(name for name, row in TABLE.items() if row.kind in kinds)


def is_affine(name: str, operand: int) -> bool:
    """Whether a primitive is elementwise and affine in one of its operands."""
    return name in AFFINE and (name, operand) != ("div", 1)


def place_after(
    equation: Equation, operand: int, place: Place | None, size: int
) -> Place | None:
    """Where what has ``size`` numbers lies in the output of an operation."""
    if place is SUMMED:
        return SUMMED
    if equation.primitive.name in RESHAPES:
        return reshaped(equation, place, size)[0]
    move = primitive_of(equation).move
    return SUMMED if move is None else move(equation, operand, place)


def reshaped(
    equation: Equation, place: Place, size: int
) -> tuple[Place | None, int | None]:
    """Place after a reshape; or, if two axes share what was one, the size of the inner
    part.
    """
    shape, new_shape = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    stride = place.inner * prod(shape[place.axis + 1 :])
    for axis, length in enumerate(new_shape):
        below = prod(new_shape[axis + 1 :])
        if length == 1 or stride * size <= below or stride >= below * length:
            continue  # this axis holds no part of it
        if stride % below == 0 and (below * length) % (stride * size) == 0:
            return Place(axis, stride // below), None
        divides = (
            stride < below < stride * size
            and below % stride == 0
            and size % (below // stride) == 0
        )
        return SUMMED, below // stride if divides else None
    return SUMMED, None


def stacked_columns(equation: Equation, operands: Sequence[Operand]) -> list[Operand]:
    """The operand that holds each column of the output, as ``x[i, j]`` stacks i and j
    along the last axis; empty for any other operation.
    """
    last_axis = equation.outvars[0].aval.ndim - 1
    if (
        equation.primitive.name != "concatenate"
        or equation.params["dimension"] != last_axis
    ):
        return []
    columns: list[Operand] = []
    for variable, operand in zip(equation.invars, operands, strict=True):
        columns += [operand] * variable.aval.shape[-1]
    return columns


# -- where axes go ---------------------------------------------------------------------


def _to(axis: Callable[[Equation, Place], int]) -> Move:
    return lambda equation, operand, place: place._replace(axis=axis(equation, place))


def _behind_new(equation: Equation, place: Place) -> int:
    return place.axis + (place.axis >= equation.params["axis"])


def _unless(touched: Callable[[Equation], Iterable[int]]) -> Move:
    """Places stay, except along the axes that the operation acts on."""

    return lambda equation, operand, place: (
        SUMMED if place.axis in set(touched(equation)) else place
    )


def _unless_along(name: str) -> Move:
    return _unless(lambda equation: [equation.params[name]])


def _reduce(equation: Equation, operand: int, place: Place) -> Place | None:
    axes = equation.params["axes"]
    if place.axis in axes:
        return SUMMED
    return place._replace(axis=place.axis - sum(axis < place.axis for axis in axes))


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


def _other_axes(var: Atom, axes: Sequence[int]) -> list[int]:
    return [axis for axis in range(var.aval.ndim) if axis not in axes]


def _dot(equation: Equation, operand: int, place: Place) -> Place | None:
    contracted, batch = equation.params["dimension_numbers"]
    if place.axis in batch[operand]:
        return place._replace(axis=tuple(batch[operand]).index(place.axis))
    if place.axis in contracted[operand]:
        return SUMMED
    links, _ = dot_axes(equation, operand)
    outputs = {axis: output for output, axis in links.items()}
    return place._replace(axis=outputs[place.axis])


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
    p, axis = equation.params, place.axis
    dilations = (p.get("base_dilation"), p.get("window_dilation"))
    untouched = p["window_dimensions"][axis] == 1 and p["window_strides"][axis] == 1
    untouched = untouched and tuple(p["padding"][axis]) == (0, 0)
    if untouched and all(d is None or d[axis] == 1 for d in dilations):
        return place
    return SUMMED


def gathered(
    equation: Equation, operand: int, place: Place, counting: Mapping[int, int]
) -> Place | None:
    """Where a lookup moves a place; ``counting`` has the columns of its index that
    count 0, 1, 2, ..., and the axis along which they count.
    """
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


def _padded(equation: Equation) -> Iterable[int]:
    return [a for a, pad in enumerate(equation.params["padding_config"]) if any(pad)]


# -- the table -------------------------------------------------------------------------


def _in_all(operands: Sequence[int]) -> bool:
    return True


def _in_none(operands: Sequence[int]) -> bool:
    return False


def _in_each(operands: Sequence[int]) -> bool:
    return len(operands) == 1


def _in_first(operands: Sequence[int]) -> bool:
    return list(operands) == [0]


def _in_cases(operands: Sequence[int]) -> bool:
    return 0 not in operands


def _rows(
    names: str, kind: str, move: Move | None, linear: Linear = _in_none
) -> dict[str, Primitive]:
    return dict.fromkeys(names.split(), Primitive(kind, move, linear))


OPAQUE = Primitive("opaque", None, _in_none)
_STAY = _to(lambda equation, place: place.axis)
TABLE: dict[str, Primitive] = {
    **_rows(
        "add add_any sub neg copy convert_element_type reduce_precision stop_gradient",
        "elementwise",
        _STAY,
        _in_all,
    ),
    **_rows("mul", "elementwise", _STAY, _in_each),
    **_rows("div", "elementwise", _STAY, _in_first),
    **_rows("select_n", "elementwise", _STAY, _in_cases),
    **_rows(
        """
        abs sign max min clamp integer_pow pow square sqrt rsqrt cbrt
        and or not xor eq ne ge gt le lt is_finite
        exp exp2 expm1 log log1p logistic lgamma digamma erf erfc erf_inv
        sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh
        bessel_i0e bessel_i1e
        """,
        "elementwise",
        _STAY,
    ),
    **_rows("name real imag", "special", _STAY, _in_all),
    **_rows(
        """
        ceil floor round polygamma zeta igamma igammac regularized_incomplete_beta
        rem nextafter bitcast_convert_type population_count shift_left
        shift_right_arithmetic shift_right_logical
        """,
        "special",
        _STAY,
    ),
    # `place_after` moves what is reshaped, by the size of what is numbered.
    **_rows("reshape squeeze expand_dims", "view", None),
    **_rows("stack", "view", _to(_behind_new), _in_all),
    **_rows("tile", "view", _STAY, _in_all),  # repeats all that is numbered
    **_rows(
        "transpose",
        "view",
        _to(lambda equation, place: equation.params["permutation"].index(place.axis)),
        _in_all,
    ),
    **_rows(
        "broadcast_in_dim",
        "view",
        _to(
            lambda equation, place: equation.params["broadcast_dimensions"][place.axis]
        ),
        _in_all,
    ),
    **_rows("slice", "view", _unless(_sliced), _in_all),
    **_rows("split", "view", _unless_along("axis"), _in_all),
    **_rows("concatenate", "view", _unless_along("dimension"), _in_all),
    **_rows(
        "rev", "view", _unless(lambda equation: equation.params["dimensions"]), _in_all
    ),
    **_rows(
        "gather",
        "lookup",
        lambda equation, operand, place: gathered(equation, operand, place, {}),
        _in_first,
    ),
    **_rows("dynamic_slice", "lookup", _unless(_sliced), _in_first),
    **_rows("pad", "window", _unless(_padded), _in_all),
    **_rows("reduce_window_sum", "window", _window, _in_all),
    **_rows("reduce_window_max reduce_window_min", "window", _window),
    **_rows("reduce_sum", "reduction", _reduce, _in_all),
    **_rows(
        """
        reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor
        argmax argmin
        """,
        "reduction",
        _reduce,
    ),
    **_rows("cumsum", "along", _unless_along("axis"), _in_all),
    **_rows("cummax cummin cumprod cumlogsumexp", "along", _unless_along("axis")),
    **_rows("sort", "along", _unless_along("dimension")),
    **_rows("dot_general", "contraction", _dot, _in_each),
    **_rows("conv_general_dilated", "contraction", _convolution, _in_each),
}

ELEMENTWISE = names_of("elementwise")
VIEWS = names_of("view")
RESHAPES = frozenset({"reshape", "squeeze", "expand_dims"})
# Views whose elements stay in their order; some repeat them.
SHAPING = RESHAPES | {"broadcast_in_dim"}
AFFINE = frozenset(
    {
        *("add", "sub", "mul", "div", "neg"),
        *("copy", "convert_element_type", "name"),
    }
)
# Operations after which an index is still an index.
ADDRESSING = frozenset(
    {
        *("add", "sub", "copy", "reshape", "select_n", "squeeze"),
        *("broadcast_in_dim", "concatenate", "convert_element_type"),
    }
)
# Operations besides comparisons, which return booleans, that cut numbers into pieces.
PIECEWISE = frozenset(
    {
        *("ceil", "clamp", "cond", "floor", "max", "min", "reduce_max", "reduce_min"),
        *("rem", "round", "sign", "sort", "while"),
    }
)
