"""Base class of layers: a frozen, hashable specification with two pure functions,
``shapes`` and ``forward``.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from operator import index
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from numpyro_bnn._checks import argument_error, is_list
from numpyro_bnn._options import Kind, RandomKey, check_fields, checked
from numpyro_bnn._types import Shape
from numpyro_bnn.nn.wiring import Feature, Wiring

Params = Mapping[str, Array]
Role = Literal["kernel", "bias", "scale"]


class BatchStatistics(NamedTuple):
    """Statistics used by a batch normalization: ``mean`` and ``sd`` of each feature,
    shape (H,).
    """

    mean: Array
    sd: Array


@dataclass(frozen=True)
class ForwardContext:
    """What a layer sees during one forward pass: its own parameters, its path, and
    batch statistics.

    ``context["kernel"]`` is the layer's own parameter of that name. ``given`` holds
    statistics to normalize with (prediction); if it is ``None`` every batch
    normalization uses those of its own batch and records them in ``seen``, the only
    thing that a forward pass writes to.
    """

    params: Params
    path: str = ""
    given: Mapping[str, BatchStatistics] | None = None
    seen: dict[str, BatchStatistics] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Array:
        full = join(self.path, name)
        if full not in self.params:
            present = f"Present: {', '.join(self.params) or 'none'}."
            raise argument_error("nn.apply", "params", f"no entry {full!r}", present)
        return self.params[full]

    def child(self, name: str) -> "ForwardContext":
        return ForwardContext(self.params, join(self.path, name), self.given, self.seen)


def join(path: str, name: str) -> str:
    """Dotted path of ``name`` inside ``path``."""
    return f"{path}.{name}" if path else name


class Layer(ABC):
    """Base class of every network specification, and of user-defined layers.

    A layer is a frozen dataclass: static, hashable, without arrays. It defines
    :meth:`shapes` and :meth:`forward`. Parameters are a flat dictionary keyed by dotted
    paths, e.g. ``"Dense_0.kernel"``, which name the NumPyro sites. Shapes follow Flax:
    dense kernels (in, out), convolutions (h, w, in, out). Leading axes of an input are
    batch axes.

    >>> import jax, jax.numpy as jnp
    >>> from numpyro_bnn import nn
    >>> net = nn.MLP([8, 1], activation="tanh")
    >>> net.param_shapes((3,))["Dense_0.kernel"]
    (3, 8)
    >>> params = net.init(jax.random.key(0), (3,))
    >>> net.apply(params, jnp.ones((5, 3))).shape
    (5, 1)
    """

    def __post_init__(self) -> None:
        check_fields(f"nn.{type(self).__name__}", self)

    @abstractmethod
    def shapes(
        self, input_shape: Shape, path: str = ""
    ) -> tuple[dict[str, Shape], Shape]:
        """Return ``({parameter: shape}, output_shape)`` for one input without batch
        axes.

        :param input_shape: shape of one data point, e.g. ``(D,)`` or ``(height, width,
            channels)``.
        :param path: place of the layer in the network, for error messages.
        :raises ValueError: if the layer cannot take that shape; the message names the
            layer and both shapes.
        """

    @abstractmethod
    def forward(self, context: ForwardContext, x: Array) -> Array:
        """Map a batch through the layer; parameters are ``context["kernel"]`` and so
        on.
        """

    def connect(
        self, wiring: Wiring, path: str, x: Feature, shape: Shape
    ) -> tuple[Feature, Shape]:
        """Declare which parameters write and read units; the symmetries of a network
        are derived from it.

        By default a layer is assumed to mix everything, and no symmetry passes through
        it.

        :param wiring: the record to add to.
        :param path: place of the layer in the network.
        :param x: features of its input.
        :param shape: shape of one input.
        :return: the output features, and the shape of one output.
        """
        out = self.output_shape(shape)
        return wiring.opaque(x, out[-1] if out else 1), out

    def children(self) -> Iterator[tuple[str, "Layer"]]:
        """Named sub-layers; none for a plain layer."""
        return iter(())

    def param_shapes(self, input_shape: Shape) -> dict[str, Shape]:
        """Return the shape of every parameter, keyed by its dotted path, in the order
        of the forward pass.
        """
        return self.shapes(_checked_shape(input_shape))[0]

    def output_shape(self, input_shape: Shape) -> Shape:
        """Return the shape of one output for one input of ``input_shape``."""
        return self.shapes(_checked_shape(input_shape))[1]

    def apply(
        self,
        params: Params,
        x: Array,
        statistics: Mapping[str, BatchStatistics] | None = None,
    ) -> Array:
        """Evaluate the network.

        :param params: flat dictionary ``{path: array}`` as listed by
            :meth:`param_shapes`.
        :param x: inputs of shape ``(..., *input_shape)``; integers (bytes of an image)
            become floats.
        :param statistics: batch statistics from :meth:`statistics`. Without them every
            :class:`~numpyro_bnn.nn.BatchNorm` normalizes with the batch it is given.
        :return: outputs of shape ``(..., *output_shape)``.
        """
        return self.forward(ForwardContext(params, given=statistics), _as_inputs(x))

    def statistics(self, params: Params, x: Array) -> dict[str, BatchStatistics]:
        """Return the batch statistics of every normalization for the data ``x``; a pure
        function of both.

        For prediction, evaluate this once per draw on the training inputs and pass it
        to :meth:`apply`.
        """
        context = ForwardContext(params)
        self.forward(context, _as_inputs(x))
        return context.seen

    @checked("nn.Layer.init")
    def init(self, rng_key: RandomKey, input_shape: Shape) -> dict[str, Array]:
        """Draw initial parameters for an optimizer: kernels N(0, 1/fan_in), biases 0,
        normalization gains 1.
        """
        shapes = self.param_shapes(input_shape)
        params = {}
        for name, key in zip(
            shapes, jax.random.split(rng_key, max(len(shapes), 1)), strict=False
        ):
            shape = shapes[name]
            kind = role(name, shapes[name])
            if kind == "kernel":
                params[name] = (
                    jax.random.normal(key, shape) / fan_in(name, shape) ** 0.5
                )
            else:
                params[name] = jnp.ones(shape) if kind == "scale" else jnp.zeros(shape)
        return params

    def wiring(self, input_shape: Shape) -> Wiring:
        """Return which parameters write and read the units of the network, as its
        layers declare them.
        """
        wiring = Wiring()
        self.param_shapes(input_shape)  # refuses a shape that the network cannot take
        x = wiring.begin(input_shape[-1] if input_shape else 1, bound=True)
        wiring[x].fixed = True
        wiring.output, _ = self.connect(wiring, "", x, tuple(input_shape))
        wiring[wiring.output].fixed = True
        return wiring


Net: TypeAlias = Annotated[
    Layer, Kind(Layer, "Pass a specification such as `nn.MLP([50, 1])`.")
]


def shape_error(layer: Layer, path: str, expected: str, got: Shape) -> Exception:
    """The error for an input that a layer cannot take: names the layer, its place, and
    both shapes.
    """
    call = f"nn.{type(layer).__name__}" + (f" at {path!r}" if path else "")
    return argument_error(call, "x", f"input shape {got}", f"It takes {expected}.")


def per_feature(values: Array, x: Array) -> Array:
    """Give ``values``, one per feature, the rank of ``x``, so that nothing relies on
    rank promotion.
    """
    return jnp.expand_dims(values, tuple(range(x.ndim - 1)))


def _as_inputs(x: ArrayLike) -> Array:
    x = jnp.asarray(x)
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(float)


def _checked_shape(input_shape: Shape) -> Shape:
    sizes: Any = input_shape if is_list(input_shape) else [None]
    try:
        shape = tuple(map(index, sizes))
    except TypeError:
        instead = "Pass the shape of one data point as a tuple, e.g. `x.shape[1:]`."
        raise argument_error(
            "nn.Layer.shapes", "input_shape", input_shape, instead, TypeError
        ) from None
    if any(n < 1 for n in shape):
        raise argument_error(
            "nn.Layer.shapes", "input_shape", shape, "Every size must be at least 1."
        )
    return shape


# A layer calls its parameters by their role; two of a kind go into sub-layers. Another
# role needs a start (`Layer.init`), a prior (`priors.Prior`), names of its axes
# (`results/layout.py`) and what it does to units (`symmetry/finding.py`).
def role(name: str, shape: Shape) -> Role:
    """Role of a parameter, read from its name and shape in the conventions of Flax, NNX
    and Equinox.

    ``kernel``: weights that multiply inputs (``...kernel`` and ``...embedding`` as in
    Flax and NNX, Equinox's ``...weight`` with at least two axes). ``scale``: the gain
    of a normalization (``...scale``, or a one-dimensional ``...weight``). Everything
    else is a ``bias``.

    >>> (
    ...     role("Dense_0.kernel", (3, 8)),
    ...     role("layers[0].weight", (8, 3)),
    ...     role("BatchNorm_0.scale", (8,)),
    ... )
    ('kernel', 'kernel', 'scale')
    """
    leaf = leaf_name(name)
    if leaf == "scale" or (leaf == "weight" and len(shape) < 2):
        return "scale"
    return "bias" if leaf.startswith("bias") or len(shape) < 2 else "kernel"


def input_axis(name: str, shape: Shape) -> int:
    """Axis of a kernel that runs over its inputs (units or channels): Flax (..., in,
    out), Equinox (out, in, ...).
    """
    if not inputs_first(name):
        return 1
    return 0 if _makes_heads(name, shape) else len(shape) - 2


def output_axis(name: str, shape: Shape) -> int:
    """Axis of a kernel that runs over its outputs (units or channels): the last one,
    for Equinox the first.
    """
    return len(shape) - 1 if inputs_first(name) else 0


def inputs_first(name: str) -> bool:
    """Whether a kernel is laid out (..., in, out) as in Flax; Equinox's ``weight`` is
    (out, in, ...).
    """
    return not leaf_name(name).startswith("weight")


def fan_in(name: str, shape: Shape) -> int:
    """Number of terms summed into one pre-activation: D for a dense kernel, h*w*in for
    a convolution.

    An embedding looks up one row, so its fan-in is 1. Flax's attention kernels
    ``query``, ``key`` and ``value`` are (in, heads, features). Of any other kernel the
    last axis is taken for the only one of outputs: inside NumPyro's functions for
    modules the priors ask the layer instead.

    >>> (
    ...     fan_in("Dense_0.kernel", (3, 8)),
    ...     fan_in("conv.weight", (16, 2, 5, 5)),
    ...     fan_in("query.kernel", (6, 4, 3)),
    ... )
    (3, 50, 6)
    """
    if len(shape) < 2 or leaf_name(name) == "embedding":
        return 1
    if _makes_heads(name, shape):
        return shape[0]
    return prod(shape[:-1]) if inputs_first(name) else prod(shape[1:])


def _makes_heads(name: str, shape: Shape) -> bool:
    """Whether a kernel (in, heads, features) of an attention layer makes queries, keys
    or values of its inputs.
    """
    path = name.replace("/", ".").split(".")
    return (
        len(shape) == 3
        and path[-1] == "kernel"
        and path[-2:-1] in (["query"], ["key"], ["value"])
    )


def leaf_name(name: str) -> str:
    """The last part of the name of a parameter."""
    return name.replace("/", ".").rsplit(".", 1)[-1]
