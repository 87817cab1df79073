"""How a Gaussian weight enters a program: which axes of what comes out number rows, and which number weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from numpyro_bnn.moments.interpret import Equation

__all__ = ["AFFINE", "ELEMENTWISE", "SHAPING", "Piece", "Use", "enters_as", "grown_axes", "is_vector"]

AFFINE = frozenset({"add", "sub", "mul", "div"})
ELEMENTWISE = frozenset({"neg", "copy", "convert_element_type"})
SHAPING = frozenset({"reshape", "transpose", "squeeze", "expand_dims"})
KINDS = {"dot_general": "dot", "conv_general_dilated": "convolution", "gather": "lookup"}


class Piece(NamedTuple):
    """A part of an axis (an axis may be the product of several): its size, and whether rows differ along it."""

    size: int
    fresh: bool


@dataclass
class Use:
    """The one place where a weight enters a program.

    :param kind: ``"dot"``, ``"convolution"``, ``"lookup"`` or ``"broadcast"``.
    :param shape: shape of the weight there.
    :param out_shape: shape of what comes out.
    :param rows: output axes that number rows, with their pieces.
    :param outputs: output axes that number weights.
    :param where: the line.
    :param other_shape: shape of what multiplies the weight.
    :param links: for each output axis of ``rows`` the axis of that which it comes from.
    :param inputs: axes of that which number inputs of the weight.
    """

    kind: str
    shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    rows: dict[int, list[Piece]]
    outputs: tuple[int, ...]
    where: str
    other_shape: tuple[int, ...] = ()
    links: Mapping[int, int] = field(default_factory=dict)
    inputs: tuple[int, ...] = ()

    @property
    def key(self) -> tuple:
        """Two broadcasts with the same key take the same random numbers; other uses never do."""
        return self.kind, self.shape, self.out_shape, tuple(self.rows)

    @property
    def local(self) -> bool:
        """Whether outputs may be drawn instead of weights: no two of them use the same draw of a weight."""
        alone = all(piece.fresh or piece.size == 1 for pieces in self.rows.values() for piece in pieces)
        return self.kind == "broadcast" or (self.kind != "convolution" and alone)

    @property
    def rowwise(self) -> bool:
        """Whether any two rows have random numbers of their own."""
        return any(piece.fresh and piece.size > 1 for pieces in self.rows.values() for piece in pieces)


def enters_as(equation: Equation, operand: int) -> Use | None:
    """The use of a weight that is an operand of a product or is indexed; ``None`` of any other equation."""
    shapes = [var.aval.shape for var in equation.jaxpr_equation.invars]
    numbers: Any = equation.params.get("dimension_numbers")
    out = equation.outputs[0].shape
    if equation.name == "dot_general":
        links, inputs = _dot_axes(equation, 1 - operand)
    elif (
        equation.name == "conv_general_dilated" and operand == 1 and equation.params["batch_group_count"] == 1
    ):
        links, inputs = {numbers.out_spec[0]: numbers.lhs_spec[0]}, (numbers.lhs_spec[1],)
    elif equation.name == "gather" and operand == 0 and not numbers.operand_batching_dims:
        links, inputs = {axis: 0 for axis in range(len(out)) if axis not in numbers.offset_dims}, ()
    else:
        return None
    outputs = tuple(axis for axis in range(len(out)) if axis not in links)
    if equation.name == "conv_general_dilated":
        outputs = (numbers.out_spec[1],)  # positions share weights: they number neither
    return Use(
        KINDS[equation.name],
        shapes[operand],
        out,
        {axis: [Piece(out[axis], True)] for axis in links},
        outputs,
        equation.where(),
        shapes[1 - operand],
        links,
        inputs,
    )


def _dot_axes(equation: Equation, other: int) -> tuple[dict[int, int], tuple[int, ...]]:
    """Output axes that come from the free axes of an operand, and its other axes."""
    contracted, batch = equation.params["dimension_numbers"]
    ranks = [len(var.aval.shape) for var in equation.jaxpr_equation.invars]
    inputs = (*batch[other], *contracted[other])
    free = [axis for axis in range(ranks[other]) if axis not in inputs]
    first = len(batch[0]) if other == 0 else ranks[0] - len(contracted[0])
    return {first + n: axis for n, axis in enumerate(free)}, inputs


def grown_axes(equation: Equation) -> tuple[int, ...]:
    """Axes of the output of ``broadcast_in_dim`` along which it repeats its operand."""
    before, after = equation.jaxpr_equation.invars[0].aval.shape, equation.outputs[0].shape
    kept = {
        axis
        for length, axis in zip(before, equation.params["broadcast_dimensions"], strict=True)
        if length == after[axis]
    }
    return tuple(a for a in range(len(after)) if a not in kept and after[a] > 1)


def is_vector(shape: tuple[int, ...]) -> bool:
    """Whether at most one axis is longer than 1: a matrix that differs by row would be a matrix for every row."""
    return sum(length > 1 for length in shape) <= 1
