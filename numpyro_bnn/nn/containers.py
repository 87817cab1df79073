"""Layers made of layers."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax

from numpyro_bnn._checks import argument_error
from numpyro_bnn.nn.activations import Activation
from numpyro_bnn.nn.base import ForwardContext, Layer, Shape, join, shape_error
from numpyro_bnn.nn.wiring import Feature, Wiring

__all__ = ["Residual", "Sequential"]


def _as_layer(call: str, argument: str, value: Layer | str) -> Layer:
    if isinstance(value, str):
        return Activation(value)
    if not isinstance(value, Layer):
        raise argument_error(
            call,
            argument,
            value,
            "Pass layers such as `nn.Dense(8)`, or activations by name, e.g. `'tanh'`.",
            TypeError,
        )
    return value


@dataclass(frozen=True)
class Sequential(Layer):
    """Layers one after the other.

    :param layers: layers, or names of activations.

    Sub-layers are named by type and count, e.g. ``Dense_0``, ``Dense_1``, ``BatchNorm_0``.

    >>> from numpyro_bnn.nn import Dense
    >>> net = Sequential([Dense(8), "tanh", Dense(1)])
    >>> list(net.param_shapes((3,)))
    ['Dense_0.kernel', 'Dense_0.bias', 'Dense_1.kernel', 'Dense_1.bias']
    """

    layers: Sequence[Layer | str]

    def __post_init__(self) -> None:
        if not isinstance(self.layers, Sequence) or isinstance(self.layers, str) or not self.layers:
            raise argument_error(
                "nn.Sequential", "layers", self.layers, "Pass a list, e.g. `Sequential([Dense(8), 'tanh'])`."
            )
        layers = tuple(_as_layer("nn.Sequential", "layers", layer) for layer in self.layers)
        object.__setattr__(self, "layers", layers)

    def children(self) -> Iterator[tuple[str, Layer]]:
        seen: Counter[str] = Counter()
        for layer in self.layers:
            assert isinstance(layer, Layer)
            kind = type(layer).__name__
            yield f"{kind}_{seen[kind]}", layer
            seen[kind] += 1

    def shapes(self, input_shape: Shape, path: str = "") -> tuple[dict[str, Shape], Shape]:
        params: dict[str, Shape] = {}
        for name, layer in self.children():
            own, input_shape = layer.shapes(input_shape, join(path, name))
            params |= {join(name, key): shape for key, shape in own.items()}
        return params, input_shape

    def connect(self, wiring: Wiring, path: str, x: Feature, shape: Shape) -> tuple[Feature, Shape]:
        for name, layer in self.children():
            x, shape = layer.connect(wiring, join(path, name), x, shape)
        return x, shape

    def forward(self, run: ForwardContext, x: jax.Array) -> jax.Array:
        for name, layer in self.children():
            x = layer.forward(run.child(name), x)
        return x


@dataclass(frozen=True)
class Residual(Layer):
    """Residual block: y = x + body(x), or shortcut(x) + body(x).

    :param body: the layer whose output is added.
    :param shortcut: a projection for where body changes the shape, e.g. ``Conv2d(32, 1, strides=2)``.

    Sub-layers are named ``body`` and ``shortcut``. Reference: He et al. (2016), equations 1-2.

    >>> from numpyro_bnn.nn import Dense
    >>> list(Residual(Dense(3)).param_shapes((3,)))
    ['body.kernel', 'body.bias']
    """

    body: Layer
    shortcut: Layer | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "body", _as_layer("nn.Residual", "body", self.body))
        if self.shortcut is not None:
            object.__setattr__(self, "shortcut", _as_layer("nn.Residual", "shortcut", self.shortcut))

    def children(self) -> Iterator[tuple[str, Layer]]:
        yield "body", self.body
        if self.shortcut is not None:
            yield "shortcut", self.shortcut

    def shapes(self, input_shape: Shape, path: str = "") -> tuple[dict[str, Shape], Shape]:
        params: dict[str, Shape] = {}
        outputs = {"shortcut": input_shape}
        for name, layer in self.children():
            own, outputs[name] = layer.shapes(input_shape, join(path, name))
            params |= {join(name, key): shape for key, shape in own.items()}
        self._check_sum(path, input_shape, outputs["body"], outputs["shortcut"])
        return params, outputs["body"]

    def connect(self, wiring: Wiring, path: str, x: Feature, shape: Shape) -> tuple[Feature, Shape]:
        y, out = self.body.connect(wiring, join(path, "body"), x, shape)
        if self.shortcut is not None:
            x, _ = self.shortcut.connect(wiring, join(path, "shortcut"), x, shape)
        return wiring.add(x, y), out

    def forward(self, run: ForwardContext, x: jax.Array) -> jax.Array:
        skip = x if self.shortcut is None else self.shortcut.forward(run.child("shortcut"), x)
        y = self.body.forward(run.child("body"), x)
        self._check_sum(run.path, x.shape, y.shape, skip.shape)
        return skip + y

    def _check_sum(self, path: str, input_shape: Shape, body: Shape, shortcut: Shape) -> None:
        if body != shortcut:
            raise shape_error(
                self,
                path,
                f"a body and a shortcut of one shape; here body gives {body} and shortcut {shortcut}"
                " (argument `shortcut` takes a projection)",
                input_shape,
            )
