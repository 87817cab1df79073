"""Dense layers and activations, and layers composed of layers."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Annotated

import jax
import jax.numpy as jnp
import jax.scipy.special
from jax import Array

from numpyro_bnn._checks import argument_error, is_list
from numpyro_bnn._options import Choice, Kind, Number, PositiveInt, Switch
from numpyro_bnn.nn.base import (
    ForwardContext,
    Layer,
    Shape,
    join,
    per_feature,
    shape_error,
)
from numpyro_bnn.nn.wiring import Feature, Wire, Wiring

# The only table of activations: a new one is a new row. GELU is the exact one, x
# Phi(x).
ACTIVATIONS: dict[str, Callable[..., Array]] = {
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
class Dense(Layer):
    """Fully connected layer, an affine map of the last axis: y = x W + b.

    :param units: number of outputs H.
    :param use_bias: whether to add b.

    Parameters: ``kernel`` (D, H), ``bias`` (H,).

    >>> Dense(4).param_shapes((3,))
    {'kernel': (3, 4), 'bias': (4,)}
    """

    units: PositiveInt
    use_bias: Switch = True

    def shapes(
        self, input_shape: Shape, path: str = ""
    ) -> tuple[dict[str, Shape], Shape]:
        if len(input_shape) != 1:
            expected = (
                "one axis of features, (D,); put `Flatten()` before it for images"
            )
            raise shape_error(self, path, expected, input_shape)
        params: dict[str, Shape] = {"kernel": (input_shape[0], self.units)}
        if self.use_bias:
            params["bias"] = (self.units,)
        return params, (self.units,)

    def connect(
        self, wiring: Wiring, path: str, x: Feature, shape: Shape
    ) -> tuple[Feature, Shape]:
        wiring.read(x, join(path, "kernel"), 0)
        biases = [Wire(join(path, "bias"), 0)] if self.use_bias else []
        out = wiring.begin(self.units, Wire(join(path, "kernel"), 1), *biases)
        return out, (self.units,)

    def forward(self, context: ForwardContext, x: Array) -> Array:
        kernel = context["kernel"]
        if x.ndim == 0 or x.shape[-1] != kernel.shape[0]:
            raise shape_error(self, context.path, f"(..., {kernel.shape[0]})", x.shape)
        y = x @ kernel
        return y + per_feature(context["bias"], y) if self.use_bias else y


@dataclass(frozen=True)
class Activation(Layer):
    """An elementwise nonlinearity between layers, by its name in ``ACTIVATIONS``.

    :param name: one of ``identity, relu, leaky_relu, tanh, erf, gelu, silu, softplus``.
    :param negative_slope: slope of ``leaky_relu`` below 0; ignored by the others.

    >>> import jax.numpy as jnp
    >>> Activation("relu").apply({}, jnp.array([-1.0, 2.0])).tolist()
    [0.0, 2.0]
    """

    name: Annotated[str, Choice(ACTIVATIONS)]
    negative_slope: Annotated[float, Number(-inf)] = 0.01

    def shapes(
        self, input_shape: Shape, path: str = ""
    ) -> tuple[dict[str, Shape], Shape]:
        return {}, input_shape

    def connect(
        self, wiring: Wiring, path: str, x: Feature, shape: Shape
    ) -> tuple[Feature, Shape]:
        if self.name != "identity":
            wiring.activate(
                x, homogeneous=self.name in HOMOGENEOUS, odd=self.name in ODD
            )
        return x, shape

    def forward(self, context: ForwardContext, x: Array) -> Array:
        return ACTIVATIONS[self.name](
            x, *([self.negative_slope] if self.name == "leaky_relu" else [])
        )


@dataclass(frozen=True)
class Flatten(Layer):
    """Join the axes of an image, or of any data point of known rank, into one axis of
    features.

    :param rank: number of axes of one data point that are joined.

    >>> Flatten().output_shape((12, 12, 16))
    (2304,)
    """

    rank: PositiveInt = 3

    def shapes(
        self, input_shape: Shape, path: str = ""
    ) -> tuple[dict[str, Shape], Shape]:
        if len(input_shape) != self.rank:
            raise shape_error(
                self, path, f"inputs of {self.rank} axes (argument `rank`)", input_shape
            )
        return {}, (prod(input_shape),)

    def connect(
        self, wiring: Wiring, path: str, x: Feature, shape: Shape
    ) -> tuple[Feature, Shape]:
        return x._replace(repeats=x.repeats * prod(shape[:-1])), (prod(shape),)

    def forward(self, context: ForwardContext, x: Array) -> Array:
        if x.ndim < self.rank:
            raise shape_error(
                self,
                context.path,
                f"at least {self.rank} axes (argument `rank`)",
                x.shape,
            )
        return x.reshape((*x.shape[: x.ndim - self.rank], -1))


def _as_layer(call: str, argument: str, value: Layer | str) -> Layer:
    if isinstance(value, str):
        return Activation(value)
    instead = (
        "Pass layers such as `nn.Dense(8)`, or activations by name, e.g. `'tanh'`."
    )
    return Kind(Layer, instead).check(call, argument, value)


@dataclass(frozen=True)
class Sequential(Layer):
    """Layers applied one after another.

    :param layers: layers, or names of activations.

    Sub-layers are named by type and count, e.g. ``Dense_0``, ``Dense_1``,
    ``BatchNorm_0``.

    >>> from numpyro_bnn.nn import Dense
    >>> net = Sequential([Dense(8), "tanh", Dense(1)])
    >>> list(net.param_shapes((3,)))
    ['Dense_0.kernel', 'Dense_0.bias', 'Dense_1.kernel', 'Dense_1.bias']
    """

    layers: Sequence[Layer | str]

    def __post_init__(self) -> None:
        if not is_list(self.layers) or not self.layers:
            instead = "Pass a list, e.g. `Sequential([Dense(8), 'tanh'])`."
            raise argument_error("nn.Sequential", "layers", self.layers, instead)
        layers = tuple(
            _as_layer("nn.Sequential", "layers", layer) for layer in self.layers
        )
        object.__setattr__(self, "layers", layers)

    def children(self) -> Iterator[tuple[str, Layer]]:
        counts: Counter[str] = Counter()
        for layer in self.layers:
            assert isinstance(layer, Layer)
            kind = type(layer).__name__
            yield f"{kind}_{counts[kind]}", layer
            counts[kind] += 1

    def shapes(
        self, input_shape: Shape, path: str = ""
    ) -> tuple[dict[str, Shape], Shape]:
        params: dict[str, Shape] = {}
        for name, layer in self.children():
            layer_shapes, input_shape = layer.shapes(input_shape, join(path, name))
            params |= {join(name, key): shape for key, shape in layer_shapes.items()}
        return params, input_shape

    def connect(
        self, wiring: Wiring, path: str, x: Feature, shape: Shape
    ) -> tuple[Feature, Shape]:
        for name, layer in self.children():
            x, shape = layer.connect(wiring, join(path, name), x, shape)
        return x, shape

    def forward(self, context: ForwardContext, x: Array) -> Array:
        for name, layer in self.children():
            x = layer.forward(context.child(name), x)
        return x


@dataclass(frozen=True)
class Residual(Layer):
    """Residual block: y = x + body(x), or shortcut(x) + body(x).

    :param body: the layer whose output is added.
    :param shortcut: a projection, if the body changes the shape, e.g. ``Conv2d(32, 1,
        strides=2)``.

    Sub-layers are named ``body`` and ``shortcut``. Reference: He et al. (2016),
    equations 1-2.

    >>> from numpyro_bnn.nn import Dense
    >>> list(Residual(Dense(3)).param_shapes((3,)))
    ['body.kernel', 'body.bias']
    """

    body: Layer
    shortcut: Layer | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "body", _as_layer("nn.Residual", "body", self.body))
        if self.shortcut is not None:
            object.__setattr__(
                self, "shortcut", _as_layer("nn.Residual", "shortcut", self.shortcut)
            )

    def children(self) -> Iterator[tuple[str, Layer]]:
        yield "body", self.body
        if self.shortcut is not None:
            yield "shortcut", self.shortcut

    def shapes(
        self, input_shape: Shape, path: str = ""
    ) -> tuple[dict[str, Shape], Shape]:
        params: dict[str, Shape] = {}
        outputs = {"shortcut": input_shape}
        for name, layer in self.children():
            layer_shapes, outputs[name] = layer.shapes(input_shape, join(path, name))
            params |= {join(name, key): shape for key, shape in layer_shapes.items()}
        self._check_sum(path, input_shape, outputs["body"], outputs["shortcut"])
        return params, outputs["body"]

    def connect(
        self, wiring: Wiring, path: str, x: Feature, shape: Shape
    ) -> tuple[Feature, Shape]:
        y, out = self.body.connect(wiring, join(path, "body"), x, shape)
        if self.shortcut is not None:
            x, _ = self.shortcut.connect(wiring, join(path, "shortcut"), x, shape)
        return wiring.add(x, y), out

    def forward(self, context: ForwardContext, x: Array) -> Array:
        skip = x
        if self.shortcut is not None:
            skip = self.shortcut.forward(context.child("shortcut"), x)
        y = self.body.forward(context.child("body"), x)
        self._check_sum(context.path, x.shape, y.shape, skip.shape)
        return skip + y

    def _check_sum(
        self, path: str, input_shape: Shape, body: Shape, shortcut: Shape
    ) -> None:
        if body != shortcut:
            got = (
                f"here body gives {body} and shortcut {shortcut} (argument `shortcut` "
                f"takes a projection)"
            )
            raise shape_error(
                self, path, f"a body and a shortcut of one shape; {got}", input_shape
            )
