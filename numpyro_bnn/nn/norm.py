"""Normalization layers, exactly invariant to the scale of their inputs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jax import Array, lax

from numpyro_bnn._checks import argument_error
from numpyro_bnn._options import Switch
from numpyro_bnn.nn.base import (
    BatchStatistics,
    ForwardContext,
    Layer,
    Shape,
    join,
    per_feature,
    shape_error,
)
from numpyro_bnn.nn.wiring import Feature, Reach, Wiring


def _unit(x: Array, axes: tuple[int, ...]) -> Array:
    """Power of two near the size of ``x``: dividing by it is exact, keeps squares in
    range, needs no gradient.
    """
    largest = lax.stop_gradient(jnp.max(jnp.abs(x), axis=axes, keepdims=True))
    _, exponent = jnp.frexp(largest)
    return jnp.where(largest > 0, jnp.ldexp(jnp.ones_like(largest), exponent - 1), 1)


def _divide(centered: Array, sd: Array) -> Array:
    """Centered values over their sd; 0, with gradient 0, if the sd is 0."""
    return jnp.where(sd > 0, centered / jnp.where(sd > 0, sd, 1), 0)


def standardize(x: Array, axes: tuple[int, ...]) -> tuple[Array, BatchStatistics]:
    """Return (x - mean) / sd along ``axes`` and the statistics used.

    There is no additive epsilon, so ``standardize(c * x)`` equals ``standardize(x)`` to
    rounding for any c > 0. A feature that is constant up to rounding has sd 0 and gives
    0, with gradient 0.
    """
    unit = _unit(x, axes)
    u = x / unit
    mean = jnp.mean(u, axis=axes, keepdims=True)
    centered = u - mean
    var = jnp.mean(centered**2, axis=axes, keepdims=True)
    # The threshold is relative to the feature's own size: both sides scale with c^2, so
    # the invariance holds.
    rounding = 8 * jnp.finfo(u.dtype).eps
    constant = var <= rounding**2 * jnp.mean(u**2, axis=axes, keepdims=True)
    sd = jnp.where(constant, 0, jnp.sqrt(jnp.where(constant, 1, var)))
    statistics = BatchStatistics(
        jnp.squeeze(mean * unit, axes), jnp.squeeze(sd * unit, axes)
    )
    return _divide(centered, sd), statistics


def _same_features(layer: Layer, path: str, values: Array, x: Array) -> None:
    """Refuse what broadcasting would accept: one feature for many values, or many
    features for one value.
    """
    if x.shape[-1:] != values.shape:
        raise shape_error(
            layer, path, f"(..., {', '.join(map(str, values.shape))})", x.shape
        )


@dataclass(frozen=True)
class _Norm(Layer):
    """Base class: the learned gain and shift of the last axis."""

    reach: ClassVar[Reach]
    use_scale: Switch = True
    use_bias: Switch = True

    def shapes(
        self, input_shape: Shape, path: str = ""
    ) -> tuple[dict[str, Shape], Shape]:
        if len(input_shape) < 1:
            raise shape_error(self, path, "at least one axis of features", input_shape)
        params: dict[str, Shape] = {}
        if self.use_scale:
            params["scale"] = (input_shape[-1],)
        if self.use_bias:
            params["bias"] = (input_shape[-1],)
        return params, input_shape

    def connect(
        self, wiring: Wiring, path: str, x: Feature, shape: Shape
    ) -> tuple[Feature, Shape]:
        gain = join(path, "scale") if self.use_scale else None
        shift = join(path, "bias") if self.use_bias else None
        return wiring.normalize(x, self.reach, gain, shift), shape

    def _affine(self, context: ForwardContext, y: Array) -> Array:
        for name, on in (("scale", self.use_scale), ("bias", self.use_bias)):
            if on:
                values = context[name]
                _same_features(self, context.path, values, y)
                values = per_feature(values, y)
                y = y * values if name == "scale" else y + values
        return y


@dataclass(frozen=True)
class BatchNorm(_Norm):
    """Normalize every feature (or channel) with mean and variance over the batch (and
    the image).

    y = scale * (x - mean) / sd + bias, without an additive epsilon: the layer is
    exactly invariant to the scale of its inputs, and constant features give ``bias``.

    There is no running average. While sampling, the statistics are those of the batch
    that the layer is given. For prediction they are recomputed from the training data
    for each draw (``net.statistics``; :func:`~numpyro_bnn.to_inference_data` does it),
    so a prediction depends only on the draw and the training set, never on the other
    test points.

    :param use_scale: whether to learn a gain per feature.
    :param use_bias: whether to learn a shift per feature.

    :raises ValueError: if there is only one value per feature to normalize with.

    Reference: Ioffe & Szegedy (2015), algorithm 1, with epsilon = 0.

    >>> import jax.numpy as jnp
    >>> net = BatchNorm(use_scale=False, use_bias=False)
    >>> net.apply({}, jnp.array([[1.0], [3.0]])).tolist()
    [[-1.0], [1.0]]
    >>> train = net.statistics({}, jnp.array([[1.0], [3.0]]))
    >>> net.apply({}, jnp.array([[2.0], [2.0]]), statistics=train).tolist()
    [[0.0], [0.0]]
    """

    reach: ClassVar[Reach] = "unit"

    def forward(self, context: ForwardContext, x: Array) -> Array:
        if x.ndim == 0:
            raise shape_error(
                self, context.path, "at least one axis of features", x.shape
            )
        if context.given is not None:
            return self._affine(
                context, self._normalize_with(context.given, context.path, x)
            )
        if x.size == x.shape[-1]:
            call = (
                f"nn.BatchNorm at {context.path!r}" if context.path else "nn.BatchNorm"
            )
            instead = (
                "Pass a batch of at least two rows, or "
                "`statistics=net.statistics(params, x_train)`."
            )
            raise argument_error(
                call, "x", f"one value per feature, shape {x.shape}", instead
            )
        y, context.seen[context.path] = standardize(x, tuple(range(x.ndim - 1)))
        return self._affine(context, y)

    def _normalize_with(
        self, statistics: Mapping[str, BatchStatistics], path: str, x: Array
    ) -> Array:
        if path not in statistics:
            instead = "Compute them by `net.statistics(params, x_train)`."
            raise argument_error(
                "nn.apply", "statistics", f"no entry {path!r}", instead
            )
        mean, sd = statistics[path]
        _same_features(self, path, mean, x)
        return _divide(x - per_feature(mean, x), per_feature(sd, x))


@dataclass(frozen=True)
class LayerNorm(_Norm):
    """Normalize the features of each data point with their own mean and variance.

    y = scale * (x - mean) / sd + bias over the last axis, without an additive epsilon.

    :param use_scale: whether to learn a gain per feature.
    :param use_bias: whether to learn a shift per feature.

    Reference: Ba, Kiros & Hinton (2016), equations 3-4.

    >>> import jax.numpy as jnp
    >>> LayerNorm(use_scale=False, use_bias=False).apply(
    ...     {}, jnp.array([1.0, 3.0])
    ... ).tolist()
    [-1.0, 1.0]
    """

    reach: ClassVar[Reach] = "layer"

    def forward(self, context: ForwardContext, x: Array) -> Array:
        if x.ndim == 0:
            raise shape_error(
                self, context.path, "at least one axis of features", x.shape
            )
        return self._affine(context, standardize(x, (x.ndim - 1,))[0])
