"""Where a Gaussian weight enters a program, and how the outputs there are drawn row by
row.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, random
from jax.extend.core import ClosedJaxpr

from numpyro_bnn._jaxprs.primitives import dot_axes
from numpyro_bnn._jaxprs.walk import Equation, Interpreter, SiteImage
from numpyro_bnn._types import Operand, Shape
from numpyro_bnn.guides.blocks import cut


class Piece(NamedTuple):
    """A part of an axis (an axis may be the product of several): its size, and whether
    rows differ along it.
    """

    size: int
    varies: bool

    @property
    def draws(self) -> int:
        """How many separate numbers are drawn along it."""
        return self.size if self.varies else 1


Axes = list[list[Piece]]


@dataclass
class Use:
    """The one place where a weight enters a program."""

    kind: str  # name of the primitive, or "broadcast"
    shape: Shape  # of the weight there
    out_shape: Shape
    rows: dict[int, list[Piece]]  # output axes that index rows, with their pieces
    outputs: tuple[int, ...]  # output axes that index weights
    where: str  # the line of the program
    other_shape: Shape = ()  # of the operand that multiplies the weight
    # output axis of rows -> axis of that operand
    links: Mapping[int, int] = field(default_factory=dict)
    inputs: tuple[
        int, ...
    ] = ()  # axes of that operand which index inputs of the weight
    # the equations of the program where it enters
    entries: list = field(default_factory=list)

    @property
    def local(self) -> bool:
        """Whether outputs may be drawn instead of weights: no two of them share a draw
        of a weight.
        """
        if self.kind == "broadcast":
            return True
        if self.kind == "conv_general_dilated":
            return False
        return all(piece.draws == piece.size for piece in chain(*self.rows.values()))


def enters_as(equation: Equation, operand: int) -> Use | None:
    """The use of a weight that is an operand of a product or is indexed; ``None`` for
    any other equation.
    """
    shapes = [var.aval.shape for var in equation.jaxpr_equation.invars]
    numbers: Any = equation.params.get("dimension_numbers")
    out, name = equation.outputs[0].shape, equation.name
    links: dict[int, int]
    inputs: tuple[int, ...] = ()
    if name == "dot_general":
        links, inputs = dot_axes(equation.jaxpr_equation, 1 - operand)
    elif (
        name == "conv_general_dilated"
        and operand == 1
        and equation.params["batch_group_count"] == 1
    ):
        links = {numbers.out_spec[0]: numbers.lhs_spec[0]}
        inputs = (numbers.lhs_spec[1],)
    elif name == "gather" and operand == 0 and not numbers.operand_batching_dims:
        links = dict.fromkeys(axes_except(out, numbers.offset_dims), 0)
    else:
        return None
    outputs = axes_except(out, links)
    if name == "conv_general_dilated":
        # positions share weights, so they index neither rows nor weights
        outputs = (numbers.out_spec[1],)
    return Use(
        name,
        shapes[operand],
        out,
        whole_axes(out, links),
        outputs,
        equation.where(),
        shapes[1 - operand],
        links,
        inputs,
    )


def axes_except(shape: Shape, axes: Container[int]) -> tuple[int, ...]:
    """The other axes of a shape."""
    return tuple(axis for axis in range(len(shape)) if axis not in axes)


def whole_axes(shape: Shape, axes: Iterable[int]) -> dict[int, list[Piece]]:
    """Axes of a shape, in one piece each."""
    return {axis: [Piece(shape[axis], True)] for axis in axes}


def grown_axes(equation: Equation) -> tuple[int, ...]:
    """Axes of the output of ``broadcast_in_dim`` along which it repeats its operand."""
    old_shape = equation.jaxpr_equation.invars[0].aval.shape
    shape = equation.outputs[0].shape
    grown = []
    copied = dict(zip(equation.params["broadcast_dimensions"], old_shape, strict=True))
    for axis, length in enumerate(shape):
        if length > 1 and copied.get(axis) != length:
            grown.append(axis)
    return tuple(grown)


def is_vector(shape: Shape) -> bool:
    """Whether at most one axis is longer than 1: a matrix drawn for each row would cost
    a matrix per row.
    """
    return sum(length > 1 for length in shape) <= 1


@dataclass(frozen=True)
class WeightNoise:
    """Random numbers of one use."""

    # N(0, 1): one per weight, or one per output where outputs are drawn
    normal: Array
    # -1 or 1 per row and input, to multiply the other operand
    signs_in: Array | None = None
    # -1 or 1 per row and output; none where outputs are drawn
    signs_out: Array | None = None


def draw_noise(
    rng_key: Array, uses: Mapping[str, Use], local: bool
) -> dict[str, WeightNoise]:
    """Random numbers of all uses; with ``local``, for outputs instead of weights if the
    expectation allows it.
    """
    normal_axes, sign_axes = {}, {}
    for site, use in uses.items():
        if local and use.local:
            normal_axes[site] = _axes(use.out_shape, use.rows, use.outputs)
            continue
        normal_axes[site] = [[Piece(n, True)] for n in use.shape]
        sign_axes[site, "out"] = _axes(use.out_shape, use.rows, use.outputs)
        if prod(use.other_shape[a] for a in use.inputs) > 1:
            rows = {axis: use.rows[row] for row, axis in use.links.items()}
            sign_axes[site, "in"] = _axes(use.other_shape, rows, use.inputs)
    normal_key, sign_key = random.split(rng_key)
    normals = _normals(normal_key, normal_axes)
    signs = _signs(sign_key, sign_axes)
    noise = {}
    for site, normal in normals.items():
        signs_in, signs_out = signs.get((site, "in")), signs.get((site, "out"))
        noise[site] = WeightNoise(normal, signs_in, signs_out)
    return noise


def _axes(
    shape: Shape,
    rows: Mapping[int, list[Piece]],
    weight_axes: tuple[int, ...],
) -> Axes:
    """Pieces of the axes: those of rows, whole axes, and none for the others
    (positions).
    """
    return [
        rows.get(axis, [Piece(n, axis in weight_axes)]) for axis, n in enumerate(shape)
    ]


def _compact(axes: Axes) -> tuple[int, ...]:
    return tuple(piece.draws for piece in chain(*axes))


def _spread(values: Array, axes: Axes) -> Array:
    """Put pieces of axes together; an axis without rows keeps length 1 and is
    broadcast.
    """
    shape, lengths = [], []
    for pieces in axes:
        sizes = [1] * len(pieces)
        if any(piece.varies for piece in pieces):
            sizes = [piece.size for piece in pieces]
        shape += sizes
        lengths.append(prod(sizes))
    return jnp.broadcast_to(values, shape).reshape(lengths)


def _normals(rng_key: Array, site_axes: Mapping[Any, Axes]) -> dict[Any, Array]:
    shapes = {name: _compact(axes) for name, axes in site_axes.items()}
    normals = cut(random.normal(rng_key, (_total(shapes),)), shapes)
    return {name: _spread(normals[name], axes) for name, axes in site_axes.items()}


def _total(shapes: Mapping[Any, Shape]) -> int:
    return sum(map(prod, shapes.values()))


def _signs(rng_key: Array, site_axes: Mapping[Any, Axes]) -> dict[Any, Array]:
    """Random signs, each a bit of a random integer; its 32 bits go to 32 rows, so that
    rows are contiguous.
    """
    shapes = {name: _word_shape(_compact(axes)) for name, axes in site_axes.items()}
    words = cut(random.bits(rng_key, (_total(shapes),), jnp.uint32), shapes)
    signs = {}
    for name, axes in site_axes.items():
        signs[name] = _spread(_unpack(words[name], _compact(axes)), axes)
    return signs


def _word_shape(shape: Shape) -> tuple[int, int]:
    rows = next((n for n in shape if n > 1), 1)
    if rows < 32:
        return 1, -(-prod(shape) // 32)
    return -(-rows // 32), prod(shape) // rows


def _unpack(words: Array, shape: Shape) -> Array:
    bits = (words[:, None, :] >> jnp.arange(32, dtype=jnp.uint32)[:, None]) & 1
    signs = 1 - 2 * bits.astype(jnp.int32)
    return signs.reshape(-1)[: prod(shape)].reshape(shape).astype(float)


def run(
    program: ClosedJaxpr,
    values: Sequence[Operand],
    uses: Mapping[str, Use],
    noise: Mapping[str, WeightNoise],
    call: str,
) -> list[Operand]:
    """Outputs of a program some of whose inputs are random, with the noise of their
    uses; the image of a weight N(mean, sd^2) is its mean, with the slope sd.
    """

    def visit(equation: Equation, *operands: Operand) -> Operand:
        """The rule of every primitive: a weight is drawn where it enters, and until
        then keeps its moments.
        """
        inputs = list(operands)
        for i, weight in enumerate(operands):
            if isinstance(weight, SiteImage):
                use = uses[weight.site]
                if equation.jaxpr_equation not in use.entries:
                    return weight.after(equation, inputs, i)
                if use.kind != "broadcast":
                    return _drawn_outputs(equation, inputs, i, noise[weight.site])
                inputs[i] = _drawn_weight(weight, noise[weight.site])
        return equation.bind(*inputs)

    walk = Interpreter({}, lambda value: isinstance(value, SiteImage), call, visit)
    return walk.run(program.jaxpr, program.consts, values)


def _drawn_weight(weight: SiteImage, noise: WeightNoise) -> Array:
    """A broadcast weight, drawn for each row."""
    normal = noise.normal
    if noise.signs_out is not None:
        normal = normal * noise.signs_out
    return weight.value + weight.slope * normal.astype(weight.value.dtype)


def _drawn_outputs(
    equation: Equation, operands: list[Any], i: int, noise: WeightNoise
) -> Array:
    """The output of a product with data, or of a lookup, drawn for each row."""
    weight, data = operands[i], operands[1 - i]

    def product(x: Array, w: Array) -> Array:
        return equation.bind(*((w, x) if i == 0 else (x, w)))

    if noise.signs_out is not None:
        change = weight.slope * noise.normal.astype(weight.slope.dtype)
        shape = _positions(equation, i, noise.signs_out)
        if shape is not None:
            return _product_by_row(
                equation, data.reshape(shape), weight.value, change, noise
            )
        mean = product(data, weight.value)
        if noise.signs_in is not None:
            data = data * noise.signs_in.astype(data.dtype)
        perturbed = product(data, change)
        return mean + perturbed * noise.signs_out.astype(perturbed.dtype)
    if equation.name == "gather":
        sd = product(data, weight.slope)
    else:
        sd = _sqrt(product(jnp.square(data), jnp.square(weight.slope)))
    return product(data, weight.value) + sd * noise.normal.astype(sd.dtype)


def _positions(
    equation: Equation, operand: int, signs_out: Array
) -> tuple[int, int, int] | None:
    """Data of a dense layer at several positions as (rows, positions, inputs), if
    weights are fewer than outputs.
    """
    if equation.name != "dot_general" or operand != 1:
        return None
    x, w = (var.aval.shape for var in equation.jaxpr_equation.invars)
    contracted, batch = equation.params["dimension_numbers"]
    if len(w) != 2 or any(batch) or [*contracted[0], *contracted[1]] != [len(x) - 1, 0]:
        return None
    signs = signs_out.shape[:-1]
    rows = next((axis for axis, n in enumerate(signs) if n != x[axis]), len(signs))
    positions = prod(x[rows:-1])
    if positions < x[-1] or prod(signs[rows:]) != 1:
        return None
    return prod(x[:rows]), positions, x[-1]


def _product_by_row(
    equation: Equation, x: Array, mean: Array, change: Operand, noise: WeightNoise
) -> Array:
    """Every row with its own weights, mean + r change t: one product forward and
    backward instead of two.
    """
    signs = noise.signs_out.reshape(len(x), 1, -1)  # type: ignore[union-attr]
    if noise.signs_in is not None:
        signs = signs * noise.signs_in.reshape(len(x), -1, 1)
    out = jnp.matmul(
        x,
        mean + signs.astype(mean.dtype) * change,
        precision=equation.params["precision"],
    )
    return out.reshape(equation.outputs[0].shape).astype(equation.outputs[0].dtype)


def _sqrt(var: Array) -> Array:
    """Square root with derivative 0 at 0: if all inputs are 0 the output
    has no noise.
    """
    positive = var > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, var, 1)), 0)
