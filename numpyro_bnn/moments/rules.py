"""Rules of operations that are not elementwise: products, sums, maxima, and those that
only move elements.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from numpyro_bnn.moments.closed_forms import maximum, maximum_of
from numpyro_bnn.moments.expectation import NODES
from numpyro_bnn.moments.interpret import Equation
from numpyro_bnn.moments.registry import register
from numpyro_bnn.moments.terms import Gaussian, both_moments


@register("dot_general", "conv_general_dilated", multiplies=True)
def _product(equation: Equation, x: Any, y: Any) -> Gaussian:
    """Bilinear: mean = m_x m_y; var = v_x (m_y^2 + v_y) + m_x^2 v_y, each product
    summed as the primitive does.
    """
    if not isinstance(y, Gaussian):
        return Gaussian(equation.bind(x.mean, y), equation.bind(x.var, jnp.square(y)))
    if not isinstance(x, Gaussian):
        return Gaussian(equation.bind(x, y.mean), equation.bind(jnp.square(x), y.var))
    var = equation.bind(x.var, jnp.square(y.mean) + y.var) + equation.bind(
        jnp.square(x.mean), y.var
    )
    return Gaussian(equation.bind(x.mean, y.mean), var)


@register("reduce_sum", "cumsum", "reduce_window_sum", reduces=True)
def _sum(equation: Equation, x: Gaussian) -> Gaussian:
    return Gaussian(equation.bind(x.mean), equation.bind(x.var))


@register("reduce_max", reduces=True)
def _reduce_max(equation: Equation, x: Gaussian) -> Gaussian:
    axes = equation.params["axes"]

    def reduced_first(moment: Any) -> Any:
        """The reduced axes as one, in front."""
        front = jnp.moveaxis(moment, axes, range(len(axes)))
        return front.reshape(-1, *front.shape[len(axes) :])

    mean, var = map(reduced_first, x)
    if len(mean) == 2:
        return maximum(Gaussian(mean[0], var[0]), Gaussian(mean[1], var[1]))
    return maximum_of(mean, var, num_nodes=NODES.get())


@register("reduce_min", reduces=True)
def _reduce_min(equation: Equation, x: Gaussian) -> Gaussian:
    result = _reduce_max(equation, Gaussian(-x.mean, x.var))
    return Gaussian(-result.mean, result.var)


@register("reduce_window_max", reduces=True)
def _reduce_window_max(equation: Equation, x: Gaussian) -> Gaussian:
    """The maximum over each window; a position in the padding never wins."""
    p = equation.params
    if any(d != 1 for d in p["base_dilation"]):
        raise equation.refuse(
            "dilates its input", "Pool without dilation of the input."
        )
    windows = zip(p["window_dimensions"], p["window_dilation"], strict=True)
    offsets = itertools.product(*(range(0, n * d, d) for n, d in windows))
    shape = equation.outputs[0].shape
    elements, masks = [], []
    for offset in offsets:
        element, mask = _strided(x, offset, p["padding"], p["window_strides"], shape)
        elements.append(element)
        masks.append(mask)
    present = np.stack(masks)
    if len(elements) == 2 and present.all():
        return maximum(*elements)
    stacked = jax.tree.map(lambda *moments: jnp.stack(moments), *elements)
    return maximum_of(stacked.mean, stacked.var, present, NODES.get())


def _strided(
    x: Gaussian,
    offset: tuple[int, ...],
    padding: Any,
    strides: tuple[int, ...],
    shape: tuple[int, ...],
) -> tuple[Gaussian, np.ndarray]:
    """The element at one offset of every window, and whether it lies inside the array
    rather than in the padding.
    """
    inside, config, steps = [], [], []
    for size, n, stride, start, (low, _) in zip(
        jnp.shape(x.mean), shape, strides, offset, padding, strict=True
    ):
        place = np.arange(n) * stride + start - low
        inside.append((place >= 0) & (place < size))
        config.append((low - start, stride * (n - 1) + 1 + start - low - size, 0))
        steps.append(slice(None, None, stride))
    mask = np.logical_and.reduce(np.meshgrid(*inside, indexing="ij"))

    def at_offset(moment: Any) -> Any:
        return lax.pad(moment, jnp.zeros((), moment.dtype), config)[tuple(steps)]

    return jax.tree.map(at_offset, x), mask


# Name -> number of leading operands that are data (None: all); the others are indices,
# which must be plain.
_MOVES: dict[str, int | None] = {
    **dict.fromkeys(
        ("broadcast_in_dim", "dynamic_slice", "gather", "reshape", "rev"), 1
    ),
    **dict.fromkeys(("slice", "split", "squeeze", "tile", "transpose"), 1),
    **dict.fromkeys(("concatenate", "optimization_barrier", "pad", "stack"), None),
    "dynamic_update_slice": 2,
}


@register(*_MOVES, view=True)
def _move(equation: Equation, *operands: Any) -> Any:
    """Means and variances move alike; plain data have variance 0."""
    count = _MOVES[equation.name]
    data = operands[:count]
    indices = _plain_indices(equation, operands[len(data) :])
    return both_moments(lambda arrays: equation.bind(*arrays, *indices), data)


@register("scatter", "scatter-add", view=True)
def _scatter(equation: Equation, operand: Any, indices: Any, updates: Any) -> Any:
    (indices,) = _plain_indices(equation, (indices,))
    return both_moments(
        lambda arrays: equation.bind(arrays[0], indices, arrays[1]), (operand, updates)
    )


def _plain_indices(equation: Equation, indices: tuple[Any, ...]) -> tuple[Any, ...]:
    """Refuse random indices."""
    if any(isinstance(index, Gaussian) for index in indices):
        raise equation.refuse(
            "looks up with random indices", "Index with plain integers."
        )
    return indices
