"""Rules of layers on images: convolution, mean pooling and flattening."""

from collections.abc import Callable
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from numpyro_bnn._checks import argument_error
from numpyro_bnn.infinite.rules import Context, average, on_inputs, rule, weighted
from numpyro_bnn.infinite.state import Covariance, Given, Inputs, State, Units, variance
from numpyro_bnn.nn import AvgPool, Conv2d, Flatten, Layer

__all__ = ["average_pool", "convolution", "flatten", "needs_pixels", "windows"]

Pads = tuple[tuple[int, int], ...]


def windows(k: jax.Array, window: tuple, strides: tuple, padding: str | int | Pads) -> jax.Array:
    """Sums over windows that slide over an image; over a pair of images, both at once, by the same steps.

    :param k: (N, h, w), or (N, h, w, h, w), whose two images are shifted together.

    >>> windows(jnp.ones((1, 3, 3)), (2, 2), (1, 1), "VALID")[0].tolist()
    [[4.0, 4.0], [4.0, 4.0]]
    """
    images = (k.ndim - 1) // 2
    pads = _pads(k.shape[1:3], window, strides, padding) * images
    k = jnp.pad(k, ((0, 0), *pads))
    size = [(n - w) // s + 1 for n, w, s in zip(k.shape[1:3], window, strides, strict=True)]

    def shifted(i: int, j: int) -> jax.Array:
        start = (0, *((i, j) * images))
        steps = (1, *(tuple(strides) * images))
        last = [a + (n - 1) * s + 1 for a, n, s in zip((i, j), size, strides, strict=True)]
        return lax.slice(k, start, (k.shape[0], *(last * images)), steps)

    return sum((shifted(i, j) for i in range(window[0]) for j in range(window[1])), start=jnp.zeros(()))


def _pads(spatial: tuple, window: tuple, strides: tuple, padding: str | int | Pads) -> Pads:
    if isinstance(padding, str):
        return tuple(lax.padtype_to_pads(spatial, window, strides, padding))
    return ((padding, padding),) * 2 if isinstance(padding, int) else padding


@rule(Conv2d)
def convolution(layer: Conv2d, context: Context, state: State) -> Units:
    """K(p, p') = s^2 times the mean over the window of K_in(p + d, p' + d), plus b^2."""
    k = _of_inputs(context, state) if isinstance(state, Inputs) else state.k
    window: Any = layer.window
    strides: Any = layer.strides

    def slide(block: jax.Array) -> jax.Array:
        return windows(block, window, strides, layer.padding) / prod(window)

    return weighted(k.map(slide, slide), context.common("kernel"), context.bias(layer.use_bias))


def _of_inputs(context: Context, state: Inputs) -> Covariance:
    """Products of the pixels of the images, averaged over their channels."""
    context.need_normal("kernel", "The number of inputs is finite")
    if jnp.ndim(context.weight()):
        came = f"variances of {context.full('kernel')!r} that differ by channel of the images"
        raise argument_error("infinite", "prior", came, "Filters of images need one variance.")
    x1, x2 = state
    channels = x1.shape[-1]
    pairs, own = "nhwc,mhwc->nmhw", "nhwc,nhwc->nhw"
    if context.pixels:
        pairs, own = "nhwc,mijc->nmhwij", "nhwc,nijc->nhwij"
    nngp = jnp.einsum(pairs, x1, x2, precision="highest") / channels
    own1, own2 = (jnp.einsum(own, x, x, precision="highest") / channels for x in (x1, x2))
    ntk = jnp.zeros_like(nngp) if context.ntk else None
    return Covariance(nngp, ntk, own1, own2, x1[..., 0], x2[..., 0])


@rule(AvgPool)
def average_pool(layer: AvgPool, context: Context, state: State) -> State:
    """Means over the windows of both images, each on its own."""
    if isinstance(state, Inputs):
        return on_inputs(layer, context, state)

    def pool(block: jax.Array) -> jax.Array:
        return _pooled(layer, _pooled(layer, block, 1), 3) if block.ndim == 5 else _pooled(layer, block, 1)

    return _mapped(state, pool)


def _mapped(state: Units, fn: Callable[[jax.Array], jax.Array]) -> Units:
    """A linear operation on pixels, also given what the units share."""
    given = state.given and Given(state.given.weights, jax.vmap(lambda k: k.map(fn, fn))(state.given.k))
    return Units(state.k.map(fn, fn) if given is None else average(given), state.gaussian, given)


def _pooled(layer: AvgPool, block: jax.Array, axis: int) -> jax.Array:
    """Means over windows along two axes."""
    spatial = block.shape[axis : axis + 2]
    window, strides = layer._geometry(spatial)
    moved = jnp.moveaxis(block, (axis, axis + 1), (-2, -1)).reshape((-1, *spatial))
    counts = windows(jnp.ones((1, *spatial), block.dtype), window, strides, layer.padding)
    means = windows(moved, window, strides, layer.padding) / counts
    rest = [n for i, n in enumerate(block.shape) if i not in (axis, axis + 1)]
    return jnp.moveaxis(means.reshape((*rest, *means.shape[1:])), (-2, -1), (axis, axis + 1))


@rule(Flatten)
def flatten(layer: Flatten, context: Context, state: State) -> State:
    """Units of all pixels become one axis: covariances are averaged over pixels."""
    if isinstance(state, Inputs):
        return on_inputs(layer, context, state)
    if state.k.mean1.ndim == 1:
        return state
    one_pixel = prod(state.k.mean1.shape[1:]) == 1

    def joined(block: jax.Array) -> jax.Array:
        return variance(block).mean(axis=(1, 2))

    return _mapped(state, joined) if one_pixel else Units(state.k.map(joined, joined), gaussian=False)


def needs_pixels(net: Layer) -> bool:
    """Whether covariances of different pixels matter: a mean over pixels mixes them.

    >>> needs_pixels(AvgPool(2)), needs_pixels(Flatten())
    (True, False)
    """
    return isinstance(net, AvgPool) or any(needs_pixels(part) for _, part in net.children())
