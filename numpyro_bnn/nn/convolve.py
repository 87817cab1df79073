"""Convolution of images, as each kind of device does it best."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["convolve", "convolve_by_product"]


def convolve(x: jax.Array, kernel: jax.Array, strides: tuple[int, int], padding: Any) -> jax.Array:
    """Cross-correlate images with a kernel.

    On a CPU it is a matrix product: there XLA runs a convolution inside a loop, as in every sampler and in a
    compiled training loop, many times slower than outside of it.

    :param x: images (B, H, W, C).
    :param kernel: (h, w, C, K).
    :param strides: step of the window.
    :param padding: ``"SAME"``, ``"VALID"``, or pairs.
    :return: (B, H', W', K).

    >>> convolve(jnp.ones((1, 3, 3, 1)), jnp.ones((2, 2, 1, 5)), (1, 1), "VALID").shape
    (1, 2, 2, 5)
    """
    if jax.default_backend() == "cpu":
        return convolve_by_product(x, kernel, strides, padding)
    return lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def convolve_by_product(x: jax.Array, kernel: jax.Array, strides: tuple[int, int], padding: Any) -> jax.Array:
    """The same as one matrix product of the windows, each held in memory: h w times the images.

    >>> convolve_by_product(jnp.arange(4.0).reshape(1, 2, 2, 1), jnp.ones((2, 2, 1, 1)), (1, 1), "VALID").item()
    6.0
    """
    height, width, _, outputs = kernel.shape
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(x.shape[1:3], (height, width), strides, padding)
    if any(side for pair in padding for side in pair):
        x = jnp.pad(x, ((0, 0), *padding, (0, 0)))
    columns = jnp.concatenate(_shifted(x, 2, width, strides[1]), axis=-1)
    windows = jnp.concatenate(_shifted(columns, 1, height, strides[0]), axis=-1)
    return windows @ kernel.reshape(-1, outputs)


def _shifted(x: jax.Array, axis: int, window: int, step: int) -> list[jax.Array]:
    """What each place of a window sees while it slides along an axis."""
    count = (x.shape[axis] - window) // step + 1
    return [lax.slice_in_dim(x, i, i + step * (count - 1) + 1, step, axis) for i in range(window)]
