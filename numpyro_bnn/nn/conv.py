"""Two-dimensional convolution and pooling on images shaped (height, width,
channels).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_bnn._checks import argument_error, is_list, unknown_name
from numpyro_bnn._options import Choice, Count, PositiveInt, Switch
from numpyro_bnn.nn.base import (
    ForwardContext,
    Layer,
    Shape,
    join,
    per_feature,
    shape_error,
)
from numpyro_bnn.nn.wiring import Feature, Wire, Wiring

Pair = tuple[int, int]
Dual = tuple[Array, Array]  # values and their tangents
Padding = str | tuple[Pair, Pair]
IMAGE = "an image (height, width, channels)"


def _pair(call: str, argument: str, value: int | Pair) -> Pair:
    pair: tuple = tuple(value) if is_list(value) else (value, value)  # type: ignore
    if len(pair) != 2:
        raise argument_error(
            call,
            argument,
            value,
            "Pass a positive integer or a pair of them, e.g. `(3, 3)`.",
        )
    height, width = (Count().check(call, argument, n) for n in pair)
    return height, width


def _padding(call: str, value: str | int) -> Padding:
    if not isinstance(value, str):
        zeros = Count(0).check(call, "padding", value)
        return ((zeros, zeros), (zeros, zeros))
    if value not in ("SAME", "VALID"):
        raise unknown_name(call, "padding", value, ["SAME", "VALID", "an integer"])
    return value


def _window_shape(
    layer: Layer,
    path: str,
    spatial: Shape,
    window: Pair,
    strides: Pair,
    padding: Padding,
) -> Pair:
    """Spatial size after a window slides over an image."""
    if padding == "SAME":
        return tuple(-(-n // s) for n, s in zip(spatial, strides, strict=True))  # type: ignore[return-value]
    pads = padding if isinstance(padding, tuple) else ((0, 0), (0, 0))
    counts = []
    for n, pad, k, step in zip(spatial, pads, window, strides, strict=True):
        size = n + sum(pad)
        if size < k:
            raise shape_error(
                layer, path, f"images of at least {window[0]} x {window[1]}", spatial
            )
        counts.append((size - k) // step + 1)
    return tuple(counts)  # type: ignore[return-value]


def _as_images(layer: Layer, context: ForwardContext, x: Array) -> Array:
    if x.ndim < 3:
        raise shape_error(
            layer, context.path, IMAGE + " behind any batch axes", x.shape
        )
    layer.shapes(x.shape[-3:], context.path)  # refuses images smaller than the window
    return x.reshape((-1, *x.shape[-3:]))


@dataclass(frozen=True)
class Conv2d(Layer):
    """Two-dimensional convolution (cross-correlation), NHWC.

    :param channels: number of output channels.
    :param window: filter size, an integer or (height, width).
    :param strides: step of the filter, an integer or a pair.
    :param padding: ``"SAME"``, ``"VALID"`` or a number of zeros on every side.
    :param use_bias: whether to add one bias per channel.

    Parameters: ``kernel`` (h, w, in, out), ``bias`` (out,).

    >>> Conv2d(16, 5, padding="VALID").output_shape((28, 28, 1))
    (24, 24, 16)
    """

    channels: PositiveInt
    window: int | Pair = 3
    strides: int | Pair = 1
    padding: str | int = "SAME"
    use_bias: Switch = True

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "window", _pair("nn.Conv2d", "window", self.window))
        object.__setattr__(self, "strides", _pair("nn.Conv2d", "strides", self.strides))
        _padding("nn.Conv2d", self.padding)

    def shapes(
        self, input_shape: Shape, path: str = ""
    ) -> tuple[dict[str, Shape], Shape]:
        if len(input_shape) != 3:
            raise shape_error(self, path, IMAGE, input_shape)
        padding = _padding("nn.Conv2d", self.padding)
        spatial = _window_shape(
            self,
            path,
            input_shape[:2],
            self.window,  # type: ignore[arg-type]
            self.strides,  # type: ignore[arg-type]
            padding,
        )
        params: dict[str, Shape] = {
            "kernel": (*self.window, input_shape[2], self.channels)  # type: ignore[misc]
        }
        if self.use_bias:
            params["bias"] = (self.channels,)
        return params, (*spatial, self.channels)

    def connect(
        self, wiring: Wiring, path: str, x: Feature, shape: Shape
    ) -> tuple[Feature, Shape]:
        wiring.read(x, join(path, "kernel"), 2)
        biases = [Wire(join(path, "bias"), 0)] if self.use_bias else []
        out = wiring.begin(self.channels, Wire(join(path, "kernel"), 3), *biases)
        return out, self.output_shape(shape)

    def forward(self, context: ForwardContext, x: Array) -> Array:
        kernel = context["kernel"]
        images = _as_images(self, context, x)
        if images.shape[-1] != kernel.shape[2]:
            raise shape_error(
                self, context.path, f"(..., height, width, {kernel.shape[2]})", x.shape
            )
        # Unlike `@`, a convolution does not accept float32 images with float64 kernels.
        dtype = jnp.result_type(images, kernel)
        padding = _padding("nn.Conv2d", self.padding)
        y = convolve(images.astype(dtype), kernel.astype(dtype), self.strides, padding)  # type: ignore[arg-type]
        y = y + per_feature(context["bias"], y) if self.use_bias else y
        return y.reshape(x.shape[:-3] + y.shape[1:])


@dataclass(frozen=True)
class _Pool(Layer):
    """Base class of the pooling layers; ``window=None`` pools over the whole image."""

    linear: ClassVar[bool]
    window: int | Pair | None = 2
    strides: int | Pair | None = None
    padding: Annotated[str, Choice(("SAME", "VALID"))] = "VALID"

    def __post_init__(self) -> None:
        super().__post_init__()
        call = f"nn.{type(self).__name__}"
        for name in ("window", "strides"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, _pair(call, name, value))

    def _geometry(self, spatial: Shape) -> tuple[Pair, Pair]:
        window: Pair = spatial if self.window is None else self.window  # type: ignore[assignment]
        return window, self.strides or window  # type: ignore[return-value]

    def shapes(
        self, input_shape: Shape, path: str = ""
    ) -> tuple[dict[str, Shape], Shape]:
        if len(input_shape) != 3:
            raise shape_error(self, path, IMAGE, input_shape)
        spatial = _window_shape(
            self, path, input_shape[:2], *self._geometry(input_shape[:2]), self.padding
        )
        return {}, (*spatial, input_shape[2])

    def connect(
        self, wiring: Wiring, path: str, x: Feature, shape: Shape
    ) -> tuple[Feature, Shape]:
        # A maximum commutes with a positive factor or a common shift, not with a sign;
        # a mean with all three.
        wiring[x].odd &= self.linear
        wiring[x].pointwise &= self.linear
        return x, self.output_shape(shape)

    def _reduce(self, x: Array, start: float, operation: Callable) -> Array:
        window, strides = self._geometry(x.shape[1:3])
        return lax.reduce_window(
            x, start, operation, (1, *window, 1), (1, *strides, 1), self.padding
        )


@dataclass(frozen=True)
class MaxPool(_Pool):
    """Maximum over windows of an image; ``window=None`` takes the whole image.

    The gradient goes to the maximum, or to the first of equal ones.

    :param window: an integer, a pair, or ``None``.
    :param strides: step of the window; by default the window itself.
    :param padding: ``"VALID"`` or ``"SAME"``.

    >>> MaxPool(2).output_shape((24, 24, 16))
    (12, 12, 16)
    """

    linear: ClassVar[bool] = False

    def forward(self, context: ForwardContext, x: Array) -> Array:
        images = _as_images(self, context, x)
        window, strides = self._geometry(images.shape[1:3])
        if window == strides and self.padding == "VALID":
            y = _largest(_tiles(images, window))
        else:
            y = self._reduce(images, -float("inf"), lax.max)
        return y.reshape(x.shape[:-3] + y.shape[1:])


def _tiles(x: Array, window: Pair) -> Array:
    """Windows as axes, (N, H, h, W, w, C): the gradient of their maximum is
    elementwise, which halves a step.
    """
    batch, height, width, channels = x.shape
    rows, columns = height // window[0], width // window[1]
    cropped = x[:, : rows * window[0], : columns * window[1]]
    return cropped.reshape(batch, rows, window[0], columns, window[1], channels)


@jax.custom_jvp
def _largest(tiles: Array) -> Array:
    """Maximum over windows; JAX's own gradient is NaN if XLA rounds the maximum
    differently in another loop.
    """
    return tiles.max(axis=(2, 4))


@_largest.defjvp
def _largest_jvp(primals: tuple[Array], tangents: tuple[Array]) -> Dual:
    def larger(a: Dual, b: Dual) -> Dual:
        return lax.max(a[0], b[0]), jnp.where(a[0] >= b[0], a[1], b[1])

    (x,), (dx,) = primals, tangents
    for axis in (4, 2):
        x, dx = reduce(
            larger,
            zip(jnp.unstack(x, axis=axis), jnp.unstack(dx, axis=axis), strict=True),
        )
    return x, dx


@dataclass(frozen=True)
class AvgPool(_Pool):
    """Mean over windows of an image (padding is not counted); ``window=None`` takes the
    whole image.

    :param window: an integer, a pair, or ``None``.
    :param strides: step of the window; by default the window itself.
    :param padding: ``"VALID"`` or ``"SAME"``.

    >>> AvgPool(None).output_shape((7, 7, 64))
    (1, 1, 64)
    """

    linear: ClassVar[bool] = True

    def forward(self, context: ForwardContext, x: Array) -> Array:
        images = _as_images(self, context, x)
        total = self._reduce(images, 0.0, lax.add)
        # One count per window, the same for every image and channel.
        count = self._reduce(
            jnp.ones((1, *images.shape[1:3], 1), images.dtype), 0.0, lax.add
        )
        return (total / count).reshape(x.shape[:-3] + total.shape[1:])


def convolve(
    x: Array, kernel: Array, strides: tuple[int, int], padding: Padding
) -> Array:
    """Cross-correlate images (B, H, W, C) with a kernel (h, w, C, K): (B, H', W', K).

    On CPUs as a matrix product: XLA runs a convolution inside a compiled loop many
    times slower than outside.
    """
    if jax.default_backend() == "cpu":
        return convolve_by_product(x, kernel, strides, padding)
    return lax.conv_general_dilated(
        x, kernel, strides, padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def convolve_by_product(
    x: Array, kernel: Array, strides: tuple[int, int], padding: Any
) -> Array:
    """The same as one matrix product of the windows of the images with the kernel."""
    height, width, _, outputs = kernel.shape
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(x.shape[1:3], (height, width), strides, padding)
    if any(map(any, padding)):
        x = jnp.pad(x, ((0, 0), *padding, (0, 0)))
    columns = jnp.concatenate(_shifted(x, 2, width, strides[1]), axis=-1)
    return jnp.concatenate(
        _shifted(columns, 1, height, strides[0]), axis=-1
    ) @ kernel.reshape(-1, outputs)


def _shifted(x: Array, axis: int, window: int, step: int) -> list[Array]:
    """The values at each place of a window as the window slides along an axis."""
    count = (x.shape[axis] - window) // step + 1
    return [
        lax.slice_in_dim(x, i, i + step * (count - 1) + 1, step, axis)
        for i in range(window)
    ]
