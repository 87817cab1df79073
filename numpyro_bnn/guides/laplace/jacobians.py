"""Jacobians of a network's outputs, row by row: an outer product of inputs and
gradients where a weight is one.

The program of the outputs is interpreted. A site that enters it once, in a product with
activations, in a convolution, or as a shift, is found there, and the Jacobian of a row
b in the direction d is

    J[b, d] = S * sum_t a[b, t] g[b, d, t]^T,

with a the inputs, g the gradients with respect to the outputs of that equation, S the
slope of the weight in the site (its prior scale, if the model is non-centered) and t
the positions at which a convolution uses its weight. All other sites have a dense
Jacobian by forward or reverse mode. The rows of a product are the axis that becomes,
element by element, the rows of the outputs; another axis may well have the same length.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from numpyro_bnn._jaxprs.axes import Axis, LabelPlaces, follow_axes, moved
from numpyro_bnn._jaxprs.primitives import SHAPING, Place, dot_axes, is_affine
from numpyro_bnn._jaxprs.walk import Equation, Interpreter, SiteImage
from numpyro_bnn._types import Operand, Shape
from numpyro_bnn.guides.auto_blocks import Values


class MatrixLayout(NamedTuple):
    """How the elements of a site make a matrix: shape of the weight, its axes with
    inputs first, and (I, O).
    """

    shape: Shape
    axes: tuple[int, ...]
    size: tuple[int, int]


class OuterJacobian(NamedTuple):
    """The Jacobian with respect to a site that is a matrix (I, O): inputs times
    gradients.

    :param inputs: (B, T, I) a.
    :param grads: (B, D, T, O) g.
    :param slope: (I, O) S.
    :param has_data: (B,) 1 for rows with data, 0 for rows that are masked.
    """

    inputs: Array
    grads: Array
    slope: Array
    layout: MatrixLayout
    has_data: Array

    def at(self, index: np.ndarray | slice) -> "OuterJacobian":
        """Of some rows."""
        inputs, grads, has_data = self.inputs, self.grads, self.has_data
        return self._replace(
            inputs=inputs[index], grads=grads[index], has_data=has_data[index]
        )

    def dense(self) -> Array:
        """(B, D, P) in the order of the site."""
        matrices = jnp.einsum("bti,bdto->bdio", self.inputs, self.grads) * self.slope
        return from_matrix(matrices, self.layout)

    def squares(self) -> Array:
        """(P,) sums of squares over rows and directions."""
        if self.inputs.shape[1] > 1:
            return jnp.sum(self.dense() ** 2, axis=(0, 1))
        grads = jnp.sum(self.grads[:, :, 0] ** 2, axis=1)
        products = (self.inputs[:, 0] ** 2).T @ grads
        return from_matrix(self.slope**2 * products, self.layout)

    def times(self, vectors: Array) -> Array:
        """(B, D, K): the product with (P, K)."""
        matrix = to_matrix(vectors.T, self.layout) * self.slope
        outputs = jnp.einsum("bti,kio->btko", self.inputs, matrix)
        return jnp.einsum("btko,bdto->bdk", outputs, self.grads)

    def transposed_times(self, values: Array) -> Array:
        """(P, K): the product of the transpose with (B, D, K)."""
        back = jnp.einsum("bdto,bdk->btko", self.grads, values)
        matrix = jnp.einsum("bti,btko->kio", self.inputs, back) * self.slope
        return from_matrix(matrix, self.layout).T


class DenseJacobian(NamedTuple):
    """The Jacobian (B, D, P) with respect to any other site."""

    matrix: Array

    def at(self, index: np.ndarray | slice) -> "DenseJacobian":
        """Of some rows."""
        return DenseJacobian(self.matrix[index])

    def dense(self) -> Array:
        """(B, D, P)."""
        return self.matrix

    def squares(self) -> Array:
        """(P,) sums of squares over rows and directions."""
        return jnp.sum(self.matrix**2, axis=(0, 1))

    def times(self, vectors: Array) -> Array:
        """(B, D, K): the product with (P, K)."""
        return self.matrix @ vectors

    def transposed_times(self, values: Array) -> Array:
        """(P, K): the product of the transpose with (B, D, K)."""
        return jnp.einsum("bdp,bdk->pk", self.matrix, values)


Jacobians = dict[str, OuterJacobian | DenseJacobian]


def to_matrix(flat: Array, layout: "MatrixLayout") -> Array:
    """(..., P) in the order of a site as (..., I, O)."""
    lead = flat.shape[:-1]
    value = flat.reshape(lead + layout.shape)
    ordered = value.transpose(*range(len(lead)), *(len(lead) + a for a in layout.axes))
    return ordered.reshape(lead + layout.size)


def from_matrix(matrix: Array, layout: "MatrixLayout") -> Array:
    """The inverse: (..., I, O) as (..., P)."""
    lead = matrix.shape[:-2]
    value = matrix.reshape(lead + tuple(layout.shape[a] for a in layout.axes))
    order = np.argsort(layout.axes) + len(lead)
    return value.transpose(*range(len(lead)), *order.tolist()).reshape((*lead, -1))


@dataclass(frozen=True)
class _Mark:
    """Stands for an elementwise affine image of a site."""

    site: str


class _Use(NamedTuple):
    """Where a weight enters: inputs (B, T, I), slope (I, O), and how gradients of the
    output make (B, T, O).
    """

    inputs: Array
    slope: Array
    layout: MatrixLayout
    out: jax.ShapeDtypeStruct
    # axes of the output: rows (if there are several), positions, then those of the
    # weight
    order: tuple[int, ...]

    def grads(self, cotangents: Array) -> Array:
        """(B, D, T, O) of gradients (D, *out)."""
        ordered = cotangents.transpose(*(1 + axis for axis in self.order), 0)
        by_row = ordered.reshape(
            self.inputs.shape[0], -1, self.layout.size[1], cotangents.shape[0]
        )
        return by_row.transpose(0, 3, 1, 2)


class _Entry(NamedTuple):
    """The one equation that a site enters, and the axis of its output that becomes the
    rows; ``None`` for one row.
    """

    equation: JaxprEqn
    row: int | None


def find_entries(jaxpr: Any, names: Sequence[str]) -> dict[str, _Entry]:
    """Where sites enter a program whose output is (B, E), of those that enter once and
    row by row.
    """
    entries: dict[str, list[Any]] = {name: [] for name in names}

    def enter(equation: Any, operands: Sequence[Operand]) -> Any:
        marked, rows = [], []
        for i, operand in enumerate(operands):
            is_marked = isinstance(operand, _Mark)
            rows.append(LabelPlaces() if is_marked else operand)
            if is_marked:
                marked.append(i)
        image = len(marked) == 1 and is_image(equation, marked[0])
        if image and not any(rows):
            return operands[marked[0]]
        # An image that depends on other sites, or two sites at once: no product with a
        # constant.
        single = len(marked) == 1 and not image
        output_rows = moved(equation, rows)
        for i in marked:
            entries[operands[i].site] += [equation] if single else [None, None]
        if single:
            for axis, size in enumerate(equation.outvars[0].aval.shape):
                label = Axis(operands[marked[0]].site, axis, size)
                output_rows[label] = Place(axis, 1)
        return output_rows

    (outputs,) = follow_axes(jaxpr, list(map(_Mark, names)), enter)
    number = jaxpr.outvars[0].aval.shape[0]
    axes: dict[str, int | None] = {}
    if number == 1:
        axes = dict.fromkeys(names)
    elif isinstance(outputs, LabelPlaces):
        for label, place in outputs.items():
            if place == Place(0, 1) and label.size == number:
                axes[label.source] = label.axis
    single_entries = {}
    for name, axis in axes.items():
        if len(entries[name]) == 1:
            single_entries[name] = _Entry(entries[name][0], axis)
    return single_entries


def _walk(
    closed: ClosedJaxpr, entries: Mapping[str, _Entry], values: Values, shifts: Values
) -> tuple[Array, dict[str, _Use]]:
    """The output of a program, with ``shifts`` added to the outputs of the equations
    that sites enter, and how they enter these.
    """
    uses: dict[str, _Use] = {}

    def enter(equation: Equation, *operands: Operand) -> Operand:
        marked = [i for i, value in enumerate(operands) if _is_image_of_site(value)]
        plain, weight = list(map(_value, operands)), operands[marked[0]]
        if len(marked) == 1 and is_image(equation.jaxpr_equation, marked[0]):
            return weight.after(equation, plain, marked[0])
        output, entry = equation.bind(*plain), entries.get(weight.site)
        if entry is None or entry.equation is not equation.jaxpr_equation:
            return output
        use = _use(equation, marked[0], plain, weight, entry.row)
        if use is not None:
            uses[weight.site] = use
        return output + shifts.get(weight.site, 0.0)

    sites = []
    for name, value in values.items():
        sites.append(SiteImage(name, value, jnp.ones_like(value)))
    interpreter = Interpreter({}, _is_image_of_site, "guides.AutoLaplace", enter)
    (output,) = interpreter.run(closed.jaxpr, closed.consts, sites)
    return _value(output), uses


def _is_image_of_site(value: Operand) -> bool:
    return isinstance(value, SiteImage)


def _use(
    equation: Equation, operand: int, plain: list, weight: SiteImage, row: int | None
) -> _Use | None:
    name = equation.name
    product: _MatrixProduct | None = None
    if name == "dot_general":
        product = _product(equation, operand, plain, row)
    elif name == "conv_general_dilated" and operand == 1:
        product = _convolution(equation, plain, row)
    elif name in ("add", "broadcast_in_dim") or (name, operand) == ("sub", 0):
        product = _shift(equation, weight.value, row)
    if product is None:
        return None
    inputs, axes, order = product
    size = (inputs.shape[2], weight.value.size // inputs.shape[2])
    layout = MatrixLayout(weight.value.shape, axes, size)
    slope = to_matrix(weight.slope.ravel(), layout)
    return _Use(inputs, slope, layout, equation.outputs[0], order)


def _value(operand: Operand) -> Operand:
    return operand.value if isinstance(operand, SiteImage) else operand


class _MatrixProduct(NamedTuple):
    """A product of inputs (B, T, I) and a weight, whose axes are given with those of
    inputs first, and the axes of the output: rows, positions, those of the weight.
    """

    inputs: Array
    weight_axes: tuple[int, ...]
    output_axes: tuple[int, ...]


def is_image(equation: Any, operand: int) -> bool:
    """Whether an equation computes an elementwise affine image of an operand."""
    name = equation.primitive.name
    if not (is_affine(name, operand) or name in SHAPING):
        return False
    return equation.outvars[0].aval.size == equation.invars[operand].aval.size


def _rows_first(row: int | None, axes: Sequence[int]) -> tuple[int, ...]:
    """Axes with those of rows in front; without, all are positions of one row."""
    return tuple(sorted(axes, key=lambda axis: axis != row))


def _axes_except(shape: Sequence[int], axes: Container[int]) -> tuple[int, ...]:
    return tuple(axis for axis in range(len(shape)) if axis not in axes)


def _product(
    equation: Equation, operand: int, plain: list, row: int | None
) -> _MatrixProduct | None:
    contracted, batch = equation.params["dimension_numbers"]
    # free axes of the inputs, by axis of the output
    links, _ = dot_axes(equation.jaxpr_equation, 1 - operand)
    if batch[0] or (row is not None and row not in links):
        return None
    front, data = _rows_first(row, tuple(links)), plain[1 - operand]
    free = [links[axis] for axis in front]
    inputs = data.transpose(*free, *contracted[1 - operand])
    positions = inputs.shape[: len(free)]
    rows = 1 if row is None else positions[0]
    inputs = inputs.reshape(rows, prod(positions) // rows, -1)
    outputs = _axes_except(jnp.shape(plain[operand]), contracted[operand])
    return _MatrixProduct(
        inputs,
        (*contracted[operand], *outputs),
        (*front, *_axes_except(equation.outputs[0].shape, links)),
    )


def _convolution(
    equation: Equation, plain: list, row: int | None
) -> _MatrixProduct | None:
    numbers, params = equation.params["dimension_numbers"], equation.params
    image, kernel = plain
    if params["feature_group_count"] != 1 or params["batch_group_count"] != 1:
        return None
    if row not in (None, numbers.out_spec[0]):
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
    inputs = inputs.reshape(1 if row is None else len(inputs), -1, inputs.shape[2])
    out, into, *space = numbers.rhs_spec
    order = (numbers.out_spec[0], *numbers.out_spec[2:], numbers.out_spec[1])
    return _MatrixProduct(inputs, (into, *space, out), order)


def _shift(equation: Equation, value: Array, row: int | None) -> _MatrixProduct | None:
    """A weight added to every row."""
    shape = equation.outputs[0].shape
    if equation.name == "broadcast_in_dim":
        places = equation.params["broadcast_dimensions"]
    else:
        places = range(len(shape) - value.ndim, len(shape))
    weight_axes = []
    for place, length in zip(places, value.shape, strict=True):
        if length > 1:
            weight_axes.append(place)
            if length != shape[place]:
                return None
    free = _axes_except(shape, weight_axes)
    if row is not None and row not in free:
        return None
    front = _rows_first(row, free)
    rows = 1 if row is None else shape[row]
    positions = prod(shape[axis] for axis in free) // rows
    inputs = jnp.ones((rows, positions, 1), value.dtype)
    return _MatrixProduct(inputs, tuple(range(value.ndim)), (*front, *weight_axes))


def jacobians(
    outputs: Callable[[Values], Array],
    values: Values,
    roots: Array,
    has_data: Array,
) -> Jacobians:
    """The Jacobian of ``roots @ outputs`` with respect to each site.

    :param outputs: from values by site to (B, E).
    :param roots: (B, D, E).
    :param has_data: (B,) 1 for rows with data, 0 for rows that are masked.
    """
    closed = jax.make_jaxpr(lambda point: outputs(point))(dict(values))
    names = sorted(values)  # the order of the inputs of the program
    values = {name: values[name] for name in names}
    entries = find_entries(closed.jaxpr, names)
    _, uses = _walk(closed, entries, values, {})
    shifts = {}
    for name, use in uses.items():
        shifts[name] = jnp.zeros(use.out.shape, use.out.dtype)
    _, pull = jax.vjp(lambda s: _walk(closed, entries, values, s)[0], shifts)
    (gradients,) = jax.vmap(pull)(jnp.moveaxis(roots, 1, 0))
    by_site: Jacobians = {}
    dense_sites = dict(values)
    for name, use in uses.items():
        grads = use.grads(gradients[name])
        by_site[name] = OuterJacobian(
            use.inputs, grads, use.slope, use.layout, has_data
        )
        del dense_sites[name]
    return by_site | _dense(
        lambda point: outputs({**values, **point}), dense_sites, roots
    )


def _dense(outputs: Callable, values: Values, roots: Array) -> Jacobians:
    """Jacobians with respect to sites that are no single product."""
    if not values:
        return {}

    def scaled(point: Values) -> Array:
        return jnp.einsum("bde,be->bd", roots, outputs(point))

    unknowns = sum(value.size for value in values.values())
    mode = jax.jacfwd if unknowns <= roots.shape[0] * roots.shape[1] else jax.jacrev
    matrices = mode(scaled)(dict(values))
    return {
        name: DenseJacobian(matrix.reshape(*roots.shape[:2], -1))
        for name, matrix in matrices.items()
    }
