"""What every primitive does to the axes of its operands, and in what it is linear."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from numpyro_bnn.guides.estimators.rows import SUMMED, Place
from numpyro_bnn.moments.interpret import Equation

__all__ = ["RULES", "gathered"]

# ------------------------------------------------------------------------------- where a label goes
# A move takes the equation, the position of the operand and the place in it to the place in the output.

Move = Callable[[Equation, int, Place], Place | None]


def _shape(equation: Equation, operand: int) -> tuple[int, ...]:
    return equation.jaxpr_equation.invars[operand].aval.shape


def _stay(equation: Equation, operand: int, place: Place) -> Place:
    return place


def _transpose(equation: Equation, operand: int, place: Place) -> Place:
    return place._replace(axis=tuple(equation.params["permutation"]).index(place.axis))


def _broadcast(equation: Equation, operand: int, place: Place) -> Place:
    return place._replace(axis=equation.params["broadcast_dimensions"][place.axis])


def _reduce(equation: Equation, operand: int, place: Place) -> Place | None:
    axes = equation.params["axes"]
    if place.axis in axes:
        return SUMMED
    return place._replace(axis=place.axis - sum(axis < place.axis for axis in axes))


def _unless(touched: Callable[[Equation], Iterable[int]]) -> Move:
    """Places stay, except along the axes that the operation works on."""

    def move(equation: Equation, operand: int, place: Place) -> Place | None:
        return SUMMED if place.axis in set(touched(equation)) else place

    return move


def _dot(equation: Equation, operand: int, place: Place) -> Place | None:
    contracted, batch = equation.params["dimension_numbers"]
    if place.axis in batch[operand]:
        return place._replace(axis=tuple(batch[operand]).index(place.axis))
    if place.axis in contracted[operand]:
        return SUMMED
    free = [
        a for a in range(len(_shape(equation, operand))) if a not in (*contracted[operand], *batch[operand])
    ]
    before = len(batch[0])
    if operand == 1:
        before += len(_shape(equation, 0)) - len(contracted[0]) - len(batch[0])
    return place._replace(axis=before + free.index(place.axis))


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


def gathered(
    equation: Equation, operand: int, place: Place, counting: Mapping[int, int] = MappingProxyType({})
) -> Place | None:
    numbers, axis, shape = equation.params["dimension_numbers"], place.axis, _shape(equation, 0)
    if operand == 1:
        return SUMMED
    # Axes of the output that come from those of the index, in order.
    looked_up = [a for a in range(len(equation.outputs[0].shape)) if a not in numbers.offset_dims]
    if axis in numbers.operand_batching_dims:
        index = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(axis)]
        return place._replace(axis=looked_up[index])
    if axis in numbers.start_index_map:
        index = counting.get(numbers.start_index_map.index(axis), -1)
        exact = (
            index >= 0 and _shape(equation, 1)[index] == shape[axis] and axis in numbers.collapsed_slice_dims
        )
        return place._replace(axis=looked_up[index]) if exact else SUMMED
    kept = [
        a
        for a in range(len(shape))
        if a not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    ]
    whole = axis in kept and equation.params["slice_sizes"][axis] == shape[axis]
    return place._replace(axis=numbers.offset_dims[kept.index(axis)]) if whole else SUMMED


def _sliced(equation: Equation) -> Iterable[int]:
    before, after = _shape(equation, 0), equation.outputs[0].shape
    strides = equation.params.get("strides") or [1] * len(before)
    return [a for a in range(len(before)) if before[a] != after[a] or strides[a] != 1]


def _padded(equation: Equation) -> Iterable[int]:
    return [a for a, config in enumerate(equation.params["padding_config"]) if tuple(config) != (0, 0, 0)]


def _one(name: str) -> Callable[[Equation], Iterable[int]]:
    return lambda equation: [equation.params[name]]


# --------------------------------------------------------------------------------- linear in what
# Whether an operation is linear in the operands (their positions) that depend on one site.

Linear = Callable[[Sequence[int]], bool]


def _always(holders: Sequence[int]) -> bool:
    return True


def _never(holders: Sequence[int]) -> bool:
    return False


def _one_factor(holders: Sequence[int]) -> bool:
    return len(holders) == 1


def _first(holders: Sequence[int]) -> bool:
    return list(holders) == [0]


def _cases(holders: Sequence[int]) -> bool:
    return 0 not in holders


RULES: dict[str, tuple[Move, Linear]] = {
    "transpose": (_transpose, _always),
    "broadcast_in_dim": (_broadcast, _always),
    "reduce_sum": (_reduce, _always),
    "cumsum": (_unless(_one("axis")), _always),
    "dot_general": (_dot, _one_factor),
    "conv_general_dilated": (_convolution, _one_factor),
    "reduce_window_sum": (_window, _always),
    "reduce_window_max": (_window, _never),
    "reduce_window_min": (_window, _never),
    "gather": (gathered, _first),
    "slice": (_unless(_sliced), _always),
    "dynamic_slice": (_unless(_sliced), _first),
    "split": (_unless(_one("axis")), _always),
    "pad": (_unless(_padded), _always),
    "concatenate": (_unless(_one("dimension")), _always),
    "rev": (_unless(lambda equation: equation.params["dimensions"]), _always),
    "sort": (_unless(_one("dimension")), _never),
    "div": (_stay, _first),
    "select_n": (_stay, _cases),
    "mul": (_stay, _one_factor),
}
RULES |= dict.fromkeys(
    ("add", "sub", "neg", "add_any", "copy", "stop_gradient", "reduce_precision", "real", "imag"),
    (_stay, _always),
)
RULES |= dict.fromkeys(
    ("reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor", "argmax", "argmin"),
    (_reduce, _never),
)
RULES |= dict.fromkeys(("cummax", "cummin", "cumprod", "cumlogsumexp"), (_unless(_one("axis")), _never))
_ELEMENTWISE = """
    abs ceil floor round sign square sqrt rsqrt cbrt exp exp2 expm1 log log1p logistic
    sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh
    erf erfc erf_inv lgamma digamma polygamma zeta igamma igammac regularized_incomplete_beta bessel_i0e bessel_i1e
    max min clamp rem pow integer_pow nextafter convert_element_type bitcast_convert_type population_count
    eq ne lt le gt ge is_finite and or xor not shift_left shift_right_arithmetic shift_right_logical
"""
RULES |= dict.fromkeys(_ELEMENTWISE.split(), (_stay, _never))
