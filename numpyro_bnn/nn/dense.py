"""Fully connected layer."""

from dataclasses import dataclass

import jax

from numpyro_bnn.nn.base import ForwardContext, Layer, Shape, join, per_feature, positive, shape_error
from numpyro_bnn.nn.wiring import Feature, Wire, Wiring

__all__ = ["Dense"]


@dataclass(frozen=True)
class Dense(Layer):
    """Affine map of the last axis: y = x W + b.

    :param units: number of outputs H.
    :param use_bias: whether to add b.

    Parameters: ``kernel`` (D, H), ``bias`` (H,).

    >>> Dense(4).param_shapes((3,))
    {'kernel': (3, 4), 'bias': (4,)}
    """

    units: int
    use_bias: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "units", positive("nn.Dense", "units", self.units, "`Dense(50)`"))

    def shapes(self, input_shape: Shape, path: str = "") -> tuple[dict[str, Shape], Shape]:
        if len(input_shape) != 1:
            raise shape_error(
                self, path, "one axis of features, (D,); put `Flatten()` before it for images", input_shape
            )
        params: dict[str, Shape] = {"kernel": (input_shape[0], self.units)}
        if self.use_bias:
            params["bias"] = (self.units,)
        return params, (self.units,)

    def connect(self, wiring: Wiring, path: str, x: Feature, shape: Shape) -> tuple[Feature, Shape]:
        wiring.read(x, join(path, "kernel"), 0)
        biases = [Wire(join(path, "bias"), 0)] if self.use_bias else []
        return wiring.begin(self.units, Wire(join(path, "kernel"), 1), *biases), (self.units,)

    def forward(self, run: ForwardContext, x: jax.Array) -> jax.Array:
        kernel = run["kernel"]
        if x.ndim == 0 or x.shape[-1] != kernel.shape[0]:
            raise shape_error(self, run.path, f"(..., {kernel.shape[0]})", x.shape)
        y = x @ kernel
        return y + per_feature(run["bias"], y) if self.use_bias else y
