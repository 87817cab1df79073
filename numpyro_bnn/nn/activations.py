"""Elementwise activations."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import jax.scipy.special

from numpyro_bnn._checks import argument_error, unknown_name
from numpyro_bnn.nn.base import ForwardContext, Layer, Shape
from numpyro_bnn.nn.wiring import Feature, Wiring

__all__ = ["ACTIVATIONS", "Activation"]

# The one table of activations: a new one is a row here. GELU is the exact one, x Phi(x).
ACTIVATIONS: dict[str, Callable[..., jax.Array]] = {
    "identity": lambda x: x,
    "relu": jax.nn.relu,
    "leaky_relu": jax.nn.leaky_relu,
    "tanh": jnp.tanh,
    "erf": jax.scipy.special.erf,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "silu": jax.nn.silu,
    "softplus": jax.nn.softplus,
}
# f(c x) = c f(x) for c > 0, and f(-x) = -f(x).
HOMOGENEOUS = {"identity", "relu", "leaky_relu"}
ODD = {"identity", "tanh", "erf"}


@dataclass(frozen=True)
class Activation(Layer):
    """Elementwise nonlinearity.

    :param name: one of ``identity, relu, leaky_relu, tanh, erf, gelu, silu, softplus``.
    :param negative_slope: slope of ``leaky_relu`` below 0; the others do not use it.

    >>> import jax.numpy as jnp
    >>> Activation("relu").apply({}, jnp.array([-1.0, 2.0])).tolist()
    [0.0, 2.0]
    """

    name: str
    negative_slope: float = 0.01

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or self.name not in ACTIVATIONS:
            raise unknown_name("nn.Activation", "name", self.name, ACTIVATIONS)
        slope = self.negative_slope
        if not isinstance(slope, int | float) or not -float("inf") < slope < float("inf"):
            raise argument_error("nn.Activation", "negative_slope", slope, "Pass a number, e.g. `0.01`.")

    def shapes(self, input_shape: Shape, path: str = "") -> tuple[dict[str, Shape], Shape]:
        return {}, input_shape

    def connect(self, wiring: Wiring, path: str, x: Feature, shape: Shape) -> tuple[Feature, Shape]:
        if self.name != "identity":
            wiring.activate(x, homogeneous=self.name in HOMOGENEOUS, odd=self.name in ODD)
        return x, shape

    def forward(self, run: ForwardContext, x: jax.Array) -> jax.Array:
        if self.name == "leaky_relu":
            return ACTIVATIONS[self.name](x, self.negative_slope)
        return ACTIVATIONS[self.name](x)
