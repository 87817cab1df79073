"""Where a Gaussian weight enters a program, and how the outputs there are drawn row by
row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import random

from numpyro_bnn._axes import dot_axes
from numpyro_bnn.guides.blocks import cut
from numpyro_bnn.moments.interpret import Equation, Interpreter

AFFINE = frozenset({"add", "sub", "mul", "div"})
ELEMENTWISE = frozenset({"neg", "copy", "convert_element_type"})
SHAPING = frozenset({"reshape", "transpose", "squeeze", "expand_dims"})


class Piece(NamedTuple):
    """A part of an axis (an axis may be the product of several): its size, and whether
    rows differ along it.
    """

    size: int
    varies: bool


Axes = list[list[Piece]]


@dataclass
class Use:
    """The one place where a weight enters a program."""

    kind: str  # name of the primitive, or "broadcast"
    shape: tuple[int, ...]  # of the weight there
    out_shape: tuple[int, ...]
    rows: dict[int, list[Piece]]  # output axes that index rows, with their pieces
    outputs: tuple[int, ...]  # output axes that index weights
    where: str  # the line of the program
    other_shape: tuple[int, ...] = ()  # of the operand that multiplies the weight
    links: Mapping[int, int] = field(
        default_factory=dict
    )  # output axis of rows -> axis of that operand
    inputs: tuple[
        int, ...
    ] = ()  # axes of that operand which index inputs of the weight
    entries: list[Any] = field(
        default_factory=list
    )  # the equations of the program where it enters

    @property
    def local(self) -> bool:
        """Whether outputs may be drawn instead of weights: no two of them share a draw
        of a weight.
        """
        separate = all(
            piece.varies or piece.size == 1
            for pieces in self.rows.values()
            for piece in pieces
        )
        return self.kind == "broadcast" or (
            self.kind != "conv_general_dilated" and separate
        )


def enters_as(equation: Equation, operand: int) -> Use | None:
    """The use of a weight that is an operand of a product or is indexed; ``None`` for
    any other equation.
    """
    shapes = [var.aval.shape for var in equation.jaxpr_equation.invars]
    numbers: Any = equation.params.get("dimension_numbers")
    out, name = equation.outputs[0].shape, equation.name
    if name == "dot_general":
        links, inputs = dot_axes(equation.jaxpr_equation, 1 - operand)
    elif (
        name == "conv_general_dilated"
        and operand == 1
        and equation.params["batch_group_count"] == 1
    ):
        links, inputs = (
            {numbers.out_spec[0]: numbers.lhs_spec[0]},
            (numbers.lhs_spec[1],),
        )
    elif name == "gather" and operand == 0 and not numbers.operand_batching_dims:
        links, inputs = (
            {axis: 0 for axis in range(len(out)) if axis not in numbers.offset_dims},
            (),
        )
    else:
        return None
    outputs = tuple(axis for axis in range(len(out)) if axis not in links)
    if name == "conv_general_dilated":
        outputs = (
            numbers.out_spec[1],
        )  # positions share weights, so they index neither rows nor weights
    rows = {axis: [Piece(out[axis], True)] for axis in links}
    weight_shape, data_shape = shapes[operand], shapes[1 - operand]
    return Use(
        name,
        weight_shape,
        out,
        rows,
        outputs,
        equation.where(),
        data_shape,
        links,
        inputs,
    )


def grown_axes(equation: Equation) -> tuple[int, ...]:
    """Axes of the output of ``broadcast_in_dim`` along which it repeats its operand."""
    old_shape, new_shape = (
        equation.jaxpr_equation.invars[0].aval.shape,
        equation.outputs[0].shape,
    )
    axes = zip(old_shape, equation.params["broadcast_dimensions"], strict=True)
    copied = {axis for length, axis in axes if length == new_shape[axis]}
    return tuple(
        a for a in range(len(new_shape)) if a not in copied and new_shape[a] > 1
    )


def is_vector(shape: tuple[int, ...]) -> bool:
    """Whether at most one axis is longer than 1: a matrix drawn for each row would cost
    a matrix per row.
    """
    return sum(length > 1 for length in shape) <= 1


@dataclass(frozen=True)
class WeightNoise:
    """Random numbers of one use."""

    normal: (
        jax.Array
    )  # N(0, 1): one per weight, or one per output where outputs are drawn
    signs_in: jax.Array | None = (
        None  # -1 or 1 per row and input, to multiply the other operand
    )
    signs_out: jax.Array | None = (
        None  # -1 or 1 per row and output; none where outputs are drawn
    )


def draw_noise(
    rng_key: jax.Array, uses: Mapping[str, Use], local: bool
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
    return {
        site: WeightNoise(
            normals[site], signs.get((site, "in")), signs.get((site, "out"))
        )
        for site in uses
    }


def _axes(
    shape: tuple[int, ...],
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
    return tuple(
        piece.size if piece.varies else 1 for pieces in axes for piece in pieces
    )


def _spread(values: jax.Array, axes: Axes) -> jax.Array:
    """Put pieces of axes together; an axis without rows keeps length 1 and is
    broadcast.
    """
    if all(len(pieces) == 1 for pieces in axes):
        return values
    varied = [any(piece.varies for piece in pieces) for pieces in axes]
    sizes = [
        [p.size if varies else 1 for p in pieces]
        for pieces, varies in zip(axes, varied, strict=True)
    ]
    values = jnp.broadcast_to(values, [size for lengths in sizes for size in lengths])
    return values.reshape([prod(lengths) for lengths in sizes])


def _normals(rng_key: jax.Array, site_axes: Mapping[Any, Axes]) -> dict[Any, jax.Array]:
    shapes = {name: _compact(axes) for name, axes in site_axes.items()}
    flat = random.normal(rng_key, (sum(map(prod, shapes.values())),))
    return {
        name: _spread(values, site_axes[name])
        for name, values in cut(flat, shapes).items()
    }


def _signs(rng_key: jax.Array, site_axes: Mapping[Any, Axes]) -> dict[Any, jax.Array]:
    """Random signs, each a bit of a random integer; its 32 bits go to 32 rows, so that
    rows are contiguous.
    """
    shapes = {name: _compact(axes) for name, axes in site_axes.items()}
    words = {name: _word_shape(shape) for name, shape in shapes.items()}
    bits = cut(
        random.bits(rng_key, (sum(map(prod, words.values())),), jnp.uint32), words
    )
    return {
        name: _spread(_unpack(packed, shapes[name]), site_axes[name])
        for name, packed in bits.items()
    }


def _word_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    rows = next((n for n in shape if n > 1), 1)
    return (
        (-(-rows // 32), prod(shape) // rows)
        if rows >= 32
        else (1, -(-prod(shape) // 32))
    )


def _unpack(words: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    bits = (words[:, None, :] >> jnp.arange(32, dtype=jnp.uint32)[:, None]) & 1
    return (
        (1 - 2 * bits.astype(jnp.int32))
        .reshape(-1)[: prod(shape)]
        .reshape(shape)
        .astype(float)
    )


class RandomWeight(NamedTuple):
    """Independent N(mean, sd^2), or their affine images; ``sd`` may be negative."""

    site: str
    mean: jax.Array
    sd: jax.Array


def run(
    program: Any,
    values: Sequence[Any],
    needed: Sequence[bool],
    uses: Mapping[str, Use],
    noise: Mapping,
    call: str,
) -> list[Any]:
    """Outputs of a program some of whose inputs are :class:`RandomWeight`, with the
    noise of their uses.
    """
    walk = Interpreter(
        {},
        lambda value: isinstance(value, RandomWeight),
        call,
        _Sampler(uses, noise).visit,
    )
    return walk.run(program.jaxpr, program.consts, values, needed)


@dataclass(frozen=True)
class _Sampler:
    uses: Mapping[str, Use]
    noise: Mapping[str, WeightNoise]

    def visit(self, equation: Equation, *operands: Any) -> Any:
        """The rule of every primitive: a weight is drawn where it enters, and until
        then keeps its moments.
        """
        values = list(operands)
        for i, weight in enumerate(operands):
            if isinstance(weight, RandomWeight):
                use = self.uses[weight.site]
                if not any(equation.jaxpr_equation is entry for entry in use.entries):
                    return _affine_image(equation, values, i)
                if use.kind != "broadcast":
                    return self._enter(equation, values, i)
                values[i] = self._value(weight)
        return equation.bind(*values)

    def _value(self, weight: RandomWeight) -> jax.Array:
        """A broadcast weight, drawn for each row."""
        noise = self.noise[weight.site]
        normal = (
            noise.normal if noise.signs_out is None else noise.normal * noise.signs_out
        )
        return weight.mean + weight.sd * normal.astype(weight.mean.dtype)

    def _enter(self, equation: Equation, operands: list[Any], i: int) -> jax.Array:
        """The output of a product with data, or of a lookup, drawn for each row."""
        weight, data = operands[i], operands[1 - i]
        noise = self.noise[weight.site]

        def product(x: jax.Array, w: jax.Array) -> jax.Array:
            return equation.bind(*((w, x) if i == 0 else (x, w)))

        if noise.signs_out is not None:
            change = weight.sd * noise.normal.astype(weight.sd.dtype)
            shape = _positions(equation, i, noise.signs_out)
            if shape is not None:
                return _product_by_row(
                    equation, data.reshape(shape), weight.mean, change, noise
                )
            signed = (
                data
                if noise.signs_in is None
                else data * noise.signs_in.astype(data.dtype)
            )
            perturbed = product(signed, change)
            return product(data, weight.mean) + perturbed * noise.signs_out.astype(
                perturbed.dtype
            )
        if equation.name == "gather":
            sd = product(data, weight.sd)
        else:
            sd = _sqrt(product(jnp.square(data), jnp.square(weight.sd)))
        return product(data, weight.mean) + sd * noise.normal.astype(sd.dtype)


def _affine_image(equation: Equation, operands: list[Any], i: int) -> RandomWeight:
    weight, name = operands[i], equation.name

    def image(moment: jax.Array) -> jax.Array:
        return equation.bind(*operands[:i], moment, *operands[i + 1 :])

    sd = weight.sd if name in ("add", "sub", "neg") else image(weight.sd)
    return RandomWeight(
        weight.site,
        image(weight.mean),
        -sd if (name, i) in (("sub", 1), ("neg", 0)) else sd,
    )


def _positions(
    equation: Equation, operand: int, signs_out: jax.Array
) -> tuple[int, int, int] | None:
    """Data of a dense layer at several positions as (rows, positions, inputs), if
    weights are fewer than outputs.
    """
    if equation.name != "dot_general" or operand != 1:
        return None
    x, w = (var.aval.shape for var in equation.jaxpr_equation.invars)
    contracted, batch = (
        tuple(map(tuple, axes)) for axes in equation.params["dimension_numbers"]
    )
    if len(w) != 2 or contracted != ((len(x) - 1,), (0,)) or batch != ((), ()):
        return None
    signs = signs_out.shape[:-1]
    rows = next((axis for axis, n in enumerate(signs) if n != x[axis]), len(signs))
    positions = prod(x[rows:-1])
    return (
        (prod(x[:rows]), positions, x[-1])
        if set(signs[rows:]) <= {1} and x[-1] <= positions
        else None
    )


def _product_by_row(
    equation: Equation, x: jax.Array, mean: jax.Array, change: Any, noise: WeightNoise
) -> jax.Array:
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


def _sqrt(var: jax.Array) -> jax.Array:
    """Square root with derivative 0 at 0: if all inputs are 0 the output
    has no noise.
    """
    positive = var > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, var, 1)), 0)
