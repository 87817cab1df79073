"""What a layer is: a frozen, hashable specification with two pure functions, ``shapes`` and ``forward``."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_bnn._checks import argument_error

if TYPE_CHECKING:
    from numpyro_bnn.nn.wiring import Feature, Wiring

__all__ = [
    "Layer",
    "BatchStatistics",
    "Params",
    "ForwardContext",
    "Shape",
    "join",
    "per_feature",
    "positive",
    "shape_error",
]

Shape = tuple[int, ...]
Params = Mapping[str, jax.Array]


class BatchStatistics(NamedTuple):
    """Statistics a batch normalization divides by: ``mean`` and ``sd`` of each feature, shape (H,)."""

    mean: jax.Array
    sd: jax.Array


@dataclass(frozen=True)
class ForwardContext:
    """What a layer sees during one pass: its own parameters, its path, and batch statistics.

    ``given`` holds statistics to normalize with (prediction); where it is ``None`` every batch normalization
    uses its own batch and writes what it used into ``seen``. This is the only thing a pass writes to, and it
    lives no longer than the pass.
    """

    params: Params
    path: str = ""
    given: Mapping[str, BatchStatistics] | None = None
    seen: dict[str, BatchStatistics] = field(default_factory=dict)

    def __getitem__(self, name: str) -> jax.Array:
        full = join(self.path, name)
        try:
            return self.params[full]
        except KeyError:
            raise argument_error(
                "nn.apply", "params", f"no entry {full!r}", f"Present: {', '.join(self.params) or 'none'}."
            ) from None

    def child(self, name: str) -> "ForwardContext":
        return ForwardContext(self.params, join(self.path, name), self.given, self.seen)


def join(path: str, name: str) -> str:
    """Dotted path of ``name`` inside ``path``."""
    return f"{path}.{name}" if path else name


class Layer(ABC):
    """Base of every network specification.

    A layer is a frozen dataclass: static, hashable, without arrays. Parameters live in a flat dictionary
    whose keys are dotted paths, e.g. ``"Dense_0.kernel"`` — the names NumPyro sites get. Shapes follow Flax:
    dense kernels (in, out), convolutions (h, w, in, out). Leading axes of an input are batch axes.

    **Example:**

    >>> import jax, jax.numpy as jnp
    >>> from numpyro_bnn import nn
    >>> net = nn.MLP([8, 1], activation="tanh")
    >>> net.param_shapes((3,))["Dense_0.kernel"]
    (3, 8)
    >>> params = net.init(jax.random.key(0), (3,))
    >>> net.apply(params, jnp.ones((5, 3))).shape
    (5, 1)
    """

    # -- the two functions a layer defines -------------------------------------------------------------

    @abstractmethod
    def shapes(self, input_shape: Shape, path: str = "") -> tuple[dict[str, Shape], Shape]:
        """Return ``({parameter: shape}, output_shape)`` for one input without batch axes.

        :param input_shape: shape of one data point, e.g. ``(D,)`` or ``(height, width, channels)``.
        :param path: where the layer sits in the network; used in error messages.
        :raises ValueError: if the layer cannot take that shape; names the layer and both shapes.
        """

    @abstractmethod
    def forward(self, run: ForwardContext, x: jax.Array) -> jax.Array:
        """Map a batch through the layer; parameters are ``run["kernel"]`` and so on."""

    def connect(self, wiring: "Wiring", path: str, x: "Feature", shape: Shape) -> tuple["Feature", Shape]:
        """Tell which parameters write and read units; the symmetries of a network follow from it.

        A layer that does not say is taken to mix everything: no symmetry passes through it.

        :param wiring: the record to add to.
        :param path: where the layer sits in the network.
        :param x: its input features.
        :param shape: shape of one input.
        :return: the output features, and the shape of one output.
        """
        out = self.output_shape(shape)
        return wiring.opaque(x, out[-1] if out else 1), out

    # -- structure -------------------------------------------------------------------------------------

    def children(self) -> Iterator[tuple[str, "Layer"]]:
        """Named sub-layers; none for a plain layer."""
        return iter(())

    # -- what users call -------------------------------------------------------------------------------

    def param_shapes(self, input_shape: Shape) -> dict[str, Shape]:
        """Return the shape of every parameter, keyed by its dotted path, in the order of the forward pass."""
        return self.shapes(_checked_shape(input_shape))[0]

    def output_shape(self, input_shape: Shape) -> Shape:
        """Return the shape of one output for one input of ``input_shape``."""
        return self.shapes(_checked_shape(input_shape))[1]

    def apply(
        self, params: Params, x: jax.Array, statistics: Mapping[str, BatchStatistics] | None = None
    ) -> jax.Array:
        """Evaluate the network.

        :param params: flat dictionary ``{path: array}`` as :meth:`param_shapes` lists it.
        :param x: inputs of shape ``(..., *input_shape)``; integers (bytes of an image) become floats.
        :param statistics: batch statistics from :meth:`statistics`. Without them every
            :class:`~numpyro_bnn.nn.BatchNorm` normalizes with the batch it is given.
        :return: outputs of shape ``(..., *output_shape)``.
        """
        return self.forward(ForwardContext(params, given=statistics), _as_inputs(x))

    def statistics(self, params: Params, x: jax.Array) -> dict[str, BatchStatistics]:
        """Return the batch statistics of every normalization for the data ``x``; a pure function of both.

        For prediction evaluate this once per draw on the training inputs and pass it to :meth:`apply`.
        """
        run = ForwardContext(params)
        self.forward(run, _as_inputs(x))
        return run.seen

    def init(self, rng_key: jax.Array, input_shape: Shape) -> dict[str, jax.Array]:
        """Draw parameters for optimization: kernels N(0, 1/fan_in), biases 0, normalization scales 1."""
        from numpyro_bnn.nn.fans import fan_in, role

        shapes = self.param_shapes(input_shape)
        params = {}
        for name, key in zip(shapes, jax.random.split(rng_key, max(len(shapes), 1)), strict=False):
            shape, kind = shapes[name], role(name, shapes[name])
            if kind == "kernel":
                params[name] = jax.random.normal(key, shape) / fan_in(name, shape) ** 0.5
            else:
                params[name] = jnp.ones(shape) if kind == "scale" else jnp.zeros(shape)
        return params


def shape_error(layer: Layer, path: str, expected: str, got: Shape) -> Exception:
    """The error for an input a layer cannot take: names the layer, where it sits, and both shapes."""
    where = f" at {path!r}" if path else ""
    return argument_error(
        f"nn.{type(layer).__name__}{where}", "x", f"input shape {got}", f"It takes {expected}."
    )


def positive(call: str, argument: str, value: Any, example: str) -> int:
    """Return a positive integer as a plain ``int`` (NumPy integers too), or refuse it.

    :param example: what to write instead, in backquotes.
    """
    try:
        number = 0 if isinstance(value, bool) else index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise argument_error(call, argument, value, f"Write a positive integer, e.g. {example}.")
    return number


def per_feature(values: jax.Array, x: jax.Array) -> jax.Array:
    """Give ``values``, one per feature, the rank of ``x``, so that nothing relies on rank promotion."""
    return jnp.expand_dims(values, tuple(range(x.ndim - 1)))


def _as_inputs(x: Any) -> jax.Array:
    x = jnp.asarray(x)
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(float)


def _checked_shape(input_shape: Shape) -> Shape:
    try:
        shape = tuple(index(n) for n in input_shape)
    except TypeError:
        raise argument_error(
            "nn.Layer.shapes",
            "input_shape",
            input_shape,
            "Pass the shape of one data point as a tuple, e.g. `x.shape[1:]`.",
            TypeError,
        ) from None
    if any(n < 1 for n in shape):
        raise argument_error("nn.Layer.shapes", "input_shape", shape, "Every size must be at least 1.")
    return shape
