"""Jacobians of a network's outputs, row by row: an outer product of inputs and gradients where a weight is one.

The program of the outputs is interpreted. A site that enters it once, in a product with activations, in a
convolution, or as a shift, is found there, and the Jacobian of a row b in the direction d is

    J[b, d] = S * sum_t a[b, t] g[b, d, t]^T,

with a the inputs, g the gradients with respect to the outputs of that equation, S the slope of the weight in the
site (its prior scale, if the model is non-centered) and t the positions at which a convolution uses its weight. All
other sites have a dense Jacobian by forward or reverse mode.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from numpyro_bnn.moments.interpret import Equation, Interpreter

ELEMENTWISE = frozenset({"add", "sub", "mul", "div", "neg", "copy", "convert_element_type", "name"})
SHAPING = frozenset({"reshape", "squeeze", "expand_dims", "broadcast_in_dim"})  # in the order of the elements


class Layout(NamedTuple):
    """How the elements of a site make a matrix: shape of the weight, its axes with inputs first, and (I, O)."""

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    size: tuple[int, int]


class Outer(NamedTuple):
    """The Jacobian with respect to a site that is a matrix (I, O): inputs times gradients.

    :param inputs: (B, T, I) a.
    :param grads: (B, D, T, O) g.
    :param slope: (I, O) S.
    :param known: (B,) 1 for rows with data, 0 for rows that are masked.
    """

    inputs: jax.Array
    grads: jax.Array
    slope: jax.Array
    layout: Layout
    known: jax.Array

    def dense(self) -> jax.Array:
        """(B, D, P) in the order of the site."""
        found = jnp.einsum("bti,bdto->bdio", self.inputs, self.grads) * self.slope
        return from_matrix(found, self.layout)

    def squares(self) -> jax.Array:
        """(P,) sums of squares over rows and directions."""
        if self.inputs.shape[1] > 1:
            return jnp.sum(self.dense() ** 2, axis=(0, 1))
        products = (self.inputs[:, 0] ** 2).T @ jnp.sum(self.grads[:, :, 0] ** 2, axis=1)
        found = self.slope**2 * products
        return from_matrix(found, self.layout)

    def times(self, vectors: jax.Array) -> jax.Array:
        """(B, D, K): the product with (P, K)."""
        matrix = to_matrix(vectors.T, self.layout) * self.slope
        return jnp.einsum("btko,bdto->bdk", jnp.einsum("bti,kio->btko", self.inputs, matrix), self.grads)

    def transposed_times(self, values: jax.Array) -> jax.Array:
        """(P, K): the product of the transpose with (B, D, K)."""
        back = jnp.einsum("bdto,bdk->btko", self.grads, values)
        found = jnp.einsum("bti,btko->kio", self.inputs, back) * self.slope
        return from_matrix(found, self.layout).T


class Dense(NamedTuple):
    """The Jacobian (B, D, P) with respect to any other site."""

    matrix: jax.Array

    def dense(self) -> jax.Array:
        """(B, D, P)."""
        return self.matrix

    def squares(self) -> jax.Array:
        """(P,) sums of squares over rows and directions."""
        return jnp.sum(self.matrix**2, axis=(0, 1))

    def times(self, vectors: jax.Array) -> jax.Array:
        """(B, D, K): the product with (P, K)."""
        return self.matrix @ vectors

    def transposed_times(self, values: jax.Array) -> jax.Array:
        """(P, K): the product of the transpose with (B, D, K)."""
        return jnp.einsum("bdp,bdk->pk", self.matrix, values)


Jacobians = dict[str, Outer | Dense]


def to_matrix(flat: jax.Array, layout: "Layout") -> jax.Array:
    """(..., P) in the order of a site as (..., I, O)."""
    lead = flat.shape[:-1]
    value = flat.reshape(lead + layout.shape)
    moved = value.transpose(*range(len(lead)), *(len(lead) + a for a in layout.axes))
    return moved.reshape(lead + layout.size)


def from_matrix(matrix: jax.Array, layout: "Layout") -> jax.Array:
    """The inverse: (..., I, O) as (..., P)."""
    lead = matrix.shape[:-2]
    value = matrix.reshape(lead + tuple(layout.shape[a] for a in layout.axes))
    back = np.argsort(layout.axes)
    return value.transpose(*range(len(lead)), *(len(lead) + int(a) for a in back)).reshape((*lead, -1))


@dataclass(frozen=True)
class _Weight:
    """An elementwise affine image of a site, with its derivative."""

    site: str
    value: jax.Array
    slope: jax.Array


class _Use(NamedTuple):
    """Where a weight enters: inputs (B, T, I), slope (I, O), and how gradients of the output make (B, T, O)."""

    inputs: jax.Array
    slope: jax.Array
    layout: Layout
    out: jax.ShapeDtypeStruct
    order: tuple[int, ...]  # axes of the output: rows, positions, then those of the weight

    def grads(self, cotangents: jax.Array) -> jax.Array:
        """(B, D, T, O) of gradients (D, *out)."""
        moved = cotangents.transpose(1 + self.order[0], 0, *(1 + axis for axis in self.order[1:]))
        return moved.reshape(*moved.shape[:2], -1, self.layout.size[1])


class _Walk:
    """One interpretation of a program of ``rows`` rows; ``shifts`` are added to the outputs where sites enter."""

    def __init__(self, rows: int, shifts: Mapping[str, jax.Array]) -> None:
        self.rows, self.shifts = rows, shifts
        self.uses: dict[str, list[_Use | None]] = {}

    def run(self, closed: Any, values: Mapping[str, jax.Array]) -> jax.Array:
        marked = [_Weight(name, value, jnp.ones_like(value)) for name, value in values.items()]
        walk = Interpreter({}, lambda value: isinstance(value, _Weight), "guides.AutoLaplace", self._enter)
        (found,) = walk.run(closed.jaxpr, closed.consts, marked)
        if isinstance(found, _Weight):
            self.uses.setdefault(found.site, []).append(None)
            return found.value
        return found

    def _enter(self, equation: Equation, *operands: Any) -> Any:
        hits = [i for i, operand in enumerate(operands) if isinstance(operand, _Weight)]
        plain = [operand.value if isinstance(operand, _Weight) else operand for operand in operands]
        out, use, weight = equation.bind(*plain), None, operands[hits[0]]
        if len(hits) == 1:
            image = _image(equation, hits[0], plain, weight)
            if image is not None:
                return image
            use = self._use(equation, hits[0], plain, weight)
        for i in hits:
            self.uses.setdefault(operands[i].site, []).append(use)
        return out + self.shifts[weight.site] if use is not None and weight.site in self.shifts else out

    def _use(self, equation: Equation, at: int, plain: list, weight: _Weight) -> _Use | None:
        name, out = equation.name, equation.outputs[0]
        if name == "dot_general":
            found = _product(equation, at, plain, self.rows)
        elif name == "conv_general_dilated" and at == 1:
            found = _convolution(equation, plain, self.rows)
        elif name in ("add", "sub", "broadcast_in_dim") and not (name == "sub" and at == 1):
            found = _shift(equation, weight.value, self.rows)
        else:
            return None
        if found is None:
            return None
        inputs, axes, order = found
        size = (inputs.shape[2], weight.value.size // inputs.shape[2])
        layout = Layout(weight.value.shape, axes, size)
        return _Use(inputs, to_matrix(weight.slope.ravel(), layout), layout, out, order)


def _image(equation: Equation, at: int, plain: list, weight: _Weight) -> _Weight | None:
    """The affine image of a weight that an equation computes, else ``None``."""
    affine = equation.name in ELEMENTWISE and not (equation.name == "div" and at == 1)
    if not (affine or equation.name in SHAPING) or equation.outputs[0].size != weight.value.size:
        return None

    def of(value: jax.Array) -> jax.Array:
        return equation.bind(*plain[:at], value, *plain[at + 1 :])

    return _Weight(weight.site, *jax.jvp(of, (weight.value,), (weight.slope,)))


def _row_axis(shape: tuple[int, ...], axes: tuple[int, ...], rows: int) -> int | None:
    return next((axis for axis in axes if shape[axis] == rows), None)


def _product(equation: Equation, at: int, plain: list, rows: int) -> tuple | None:
    contracted, batch = equation.params["dimension_numbers"]
    other = plain[1 - at]
    free = tuple(a for a in range(jnp.ndim(other)) if a not in contracted[1 - at])
    row = _row_axis(other.shape, free, rows)
    if batch[0] or row is None:
        return None
    rest = tuple(a for a in free if a != row)
    inputs = other.transpose(row, *rest, *contracted[1 - at])
    inputs = inputs.reshape(rows, prod(other.shape[a] for a in rest), -1)
    own = tuple(a for a in range(jnp.ndim(plain[at])) if a not in contracted[at])
    first, second = (0, len(free)) if at == 1 else (len(own), 0)  # where the output has free axes, and own ones
    order = (*(first + free.index(a) for a in (row, *rest)), *(second + i for i in range(len(own))))
    return inputs, (*contracted[at], *own), order


def _convolution(equation: Equation, plain: list, rows: int) -> tuple | None:
    numbers, params = equation.params["dimension_numbers"], equation.params
    image, kernel = plain
    if params["feature_group_count"] != 1 or params["batch_group_count"] != 1:
        return None
    if image.shape[numbers.lhs_spec[0]] != rows:
        return None
    patches = lax.conv_general_dilated_patches(
        image.transpose(numbers.lhs_spec),
        [kernel.shape[a] for a in numbers.rhs_spec[2:]],
        params["window_strides"],
        params["padding"],
        params["lhs_dilation"],
        params["rhs_dilation"],
    )
    inputs = jnp.moveaxis(patches.reshape(*patches.shape[:2], -1), 1, 2)
    out, into, *space = numbers.rhs_spec
    order = (numbers.out_spec[0], *numbers.out_spec[2:], numbers.out_spec[1])
    return inputs, (into, *space, out), order


def _shift(equation: Equation, value: jax.Array, rows: int) -> tuple | None:
    """A weight added to every row."""
    shape = equation.outputs[0].shape
    if equation.name == "broadcast_in_dim":
        places = equation.params["broadcast_dimensions"]
    else:
        places = tuple(range(len(shape) - value.ndim, len(shape)))
    own = tuple(p for p, length in zip(places, value.shape, strict=True) if length > 1)
    grown = [length for p, length in zip(places, value.shape, strict=True) if length > 1 and length != shape[p]]
    free = tuple(a for a in range(len(shape)) if a not in own)
    row = _row_axis(shape, free, rows)
    if row is None or grown:
        return None
    rest = tuple(a for a in free if a != row)
    inputs = jnp.ones((rows, prod(shape[a] for a in rest), 1), value.dtype)
    return inputs, tuple(range(value.ndim)), (row, *rest, *own)


def jacobians(
    outputs: Callable[[Mapping[str, jax.Array]], jax.Array],
    values: Mapping[str, jax.Array],
    roots: jax.Array,
    known: jax.Array,
    capture: bool = True,
) -> tuple[Jacobians, jax.Array]:
    """The Jacobian of ``roots @ outputs`` with respect to each site.

    :param outputs: from values by site to (B, E).
    :param roots: (B, D, E).
    :param known: (B,) 1 for rows with data, 0 for rows that are masked.
    :param capture: look for outer products, which needs rows that do not influence one another.
    :return: the Jacobians, and the largest share of the gradient of one row that comes from another (0, or rounding).
    """
    if not capture:
        return _dense(outputs, values, roots), jnp.zeros(())
    rows, directions, _ = roots.shape
    closed = jax.make_jaxpr(lambda given: outputs(given))(dict(values))
    names = sorted(values)  # the order of the inputs of the program
    values = {name: values[name] for name in names}
    walk = _Walk(rows, {})
    walk.run(closed, values)
    single = {name: uses[0] for name, uses in walk.uses.items() if len(uses) == 1 and uses[0] is not None}
    shifts = {name: jnp.zeros(use.out.shape, use.out.dtype) for name, use in single.items()}
    _, pull = jax.vjp(lambda given: _Walk(rows, given).run(closed, values), shifts)
    back = jax.vmap(lambda cotangent: pull(cotangent)[0])
    cotangents = jnp.moveaxis(roots, 1, 0)
    found: Jacobians = {}
    for name, grads in back(cotangents).items():
        use = single[name]
        found[name] = Outer(use.inputs, use.grads(grads), use.slope, use.layout, known)

    signs = jnp.where(jax.random.bernoulli(jax.random.key(7), shape=(rows,)), 1.0, -1.0)
    mixed = jnp.einsum("bde,d->be", roots, jax.random.normal(jax.random.key(8), (directions,)))
    pair = back(jnp.stack([mixed, mixed * signs[:, None]]))
    error = jnp.zeros(())
    for name, both in pair.items():
        one, signed = (single[name].grads(part[None]) for part in both)
        distance = jnp.max(jnp.abs(one * signs[:, None, None, None] - signed), initial=0.0)
        error = jnp.maximum(error, distance / (jnp.max(jnp.abs(one), initial=0.0) + jnp.finfo(one.dtype).tiny))
    others = {name: value for name, value in values.items() if name not in single}
    return found | _dense(lambda given: outputs({**values, **given}), others, roots), error


def _dense(outputs: Callable, values: Mapping[str, jax.Array], roots: jax.Array) -> Jacobians:
    """Jacobians with respect to sites that are no single product."""
    if not values:
        return {}

    def scaled(given: Mapping[str, jax.Array]) -> jax.Array:
        return jnp.einsum("bde,be->bd", roots, outputs(given))

    unknowns = sum(value.size for value in values.values())
    mode = jax.jacfwd if unknowns <= roots.shape[0] * roots.shape[1] else jax.jacrev
    matrices = mode(scaled)(dict(values))
    return {name: Dense(matrix.reshape(*roots.shape[:2], -1)) for name, matrix in matrices.items()}
