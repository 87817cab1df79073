"""How the layers of Flax and Equinox use a weight: the axes of its inputs and outputs,
and its fan-in.

NumPyro's ``random_flax_module``, ``random_nnx_module`` and ``random_eqx_module`` pass a
prior the name and the shape of a weight. These do not tell an embedding of Equinox from
a dense layer, nor several axes of outputs from the window of a convolution. The module
itself is an argument of the call that is running, and is read there.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.contrib import module as numpyro_modules

from numpyro_bnn._checks import argument_error
from numpyro_bnn._types import PyTree, Trees
from numpyro_bnn.nn.base import (
    Role,
    Shape,
    fan_in,
    input_axis,
    leaf_name,
    output_axis,
    role,
)

ForeignLayer: TypeAlias = Any  # of Flax or Equinox


class ParameterLayout(NamedTuple):
    """What a parameter is to its layer.

    :param role: kernel, bias, or scale for a gain.
    :param inputs: axes of a kernel that run over inputs (units or channels).
    :param outputs: axes of a kernel that run over outputs.
    :param fan_in: number of inputs that a unit sums over; on average where units
        differ.
    """

    role: Role
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    fan_in: float = 1.0


def layout(name: str, shape: Shape) -> ParameterLayout:
    """The layout of a parameter, by the layer that owns it if that can be seen, else by
    its name and shape.

    >>> layout("Dense_0.kernel", (3, 8))
    ParameterLayout(role='kernel', inputs=(0,), outputs=(1,), fan_in=3)

    :raises ValueError: for a weight of a layer that does not say how it is used.
    """
    layer = _owner(name)
    if leaf_name(name).partition("[")[0] in WEIGHTS:
        for kind in _kinds(layer):
            if kind in LAYERS:
                return LAYERS[kind](layer, name, shape)
    if role(name, shape) != "kernel":
        return ParameterLayout(role(name, shape))
    axes = (input_axis(name, shape),), (output_axis(name, shape),)
    return ParameterLayout("kernel", *axes, fan_in(name, shape))


# -- the layer that owns a parameter ---------------------------------------------------


def _owner(name: str) -> Any:
    """The layer of the parameter for which NumPyro asks a prior; ``None`` if somebody
    else asks.
    """
    frame = inspect.currentframe()
    while frame is not None:
        layers = CALLS.get(frame.f_code)
        if layers is not None:
            path = name.rpartition(".")[0]
            return layers(frame.f_locals).get(path)
        frame = frame.f_back
    return None


def _kinds(layer: ForeignLayer) -> Iterator[str]:
    """Names of the classes of a layer, such as ``flax.nnx.Linear``, its own first."""
    for kind in type(layer).__mro__:
        library = ".".join(kind.__module__.split(".")[:2])
        yield f"{library}.{kind.__name__}"


def _nnx_layers(call_locals: Trees) -> dict[str, ForeignLayer]:
    from flax import nnx

    layers = nnx.iter_modules(call_locals["nn_module"])
    return {".".join(map(str, path)): layer for path, layer in layers}


def _equinox_layers(call_locals: Trees) -> dict[str, Any]:
    layers: dict[str, Any] = {}

    def note(path: Any, node: Any) -> bool:
        layers[jax.tree_util.keystr(path)[1:]] = node
        return False

    jax.tree_util.tree_map_with_path(
        lambda *_: None, call_locals["nn_module"], is_leaf=note, is_leaf_takes_path=True
    )
    return layers


def _linen_layers(call_locals: Trees) -> dict[str, ForeignLayer]:
    """Layers of Linen exist only while the module runs: it is run abstractly, once for
    equal modules.
    """
    from flax import linen

    module = call_locals["nn_module"]
    args = call_locals["args"]
    input_shape = call_locals["input_shape"]
    key = repr(
        (module, input_shape, jax.tree.map(np.shape, (args, call_locals["kwargs"])))
    )
    if key in _LINEN:
        return _LINEN[key]
    layers: dict[str, ForeignLayer] = {}

    def note(call: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
        layers[".".join(context.module.path)] = context.module
        return call(*args, **kwargs)

    def run() -> PyTree:
        inputs = args if input_shape is None else (jnp.ones(input_shape),)
        keys = {
            kind: jax.random.key(0)
            for kind in ("params", *(call_locals["apply_rng"] or ()))
        }
        return module.init(keys, *inputs, **call_locals["kwargs"])

    with linen.intercept_methods(note):
        jax.eval_shape(run)
    if len(_LINEN) == MAX_LINEN_MODULES:
        _LINEN.clear()
    # Bound layers refer to their parameters: only what they were made of is kept.
    _LINEN[key] = {path: layer.clone(parent=None) for path, layer in layers.items()}
    return _LINEN[key]


_LINEN: dict[str, dict[str, Any]] = {}
MAX_LINEN_MODULES = 16  # modules whose layers are remembered
CALLS = {
    numpyro_modules.random_nnx_module.__code__: _nnx_layers,
    numpyro_modules.random_eqx_module.__code__: _equinox_layers,
    numpyro_modules.random_flax_module.__code__: _linen_layers,
}


# -- layers ----------------------------------------------------------------------------


def _kernel(
    shape: Shape,
    inputs: Sequence[int],
    outputs: Sequence[int],
    window: Sequence[int] = (),
) -> ParameterLayout:
    """A kernel of which units sum over inputs and over the window of a convolution;
    axes as for indexing.
    """
    summed = prod(shape[axis] for axis in (*inputs, *window))
    rank = len(shape)
    return ParameterLayout(
        "kernel",
        tuple(axis % rank for axis in inputs),
        tuple(axis % rank for axis in outputs),
        summed,
    )


def _dense(layer: ForeignLayer, name: str, shape: Shape) -> ParameterLayout:
    """Any axes before those of inputs and outputs belong to layers in parallel."""
    return _kernel(shape, (-2,), (-1,))


def _dense_outputs_first(
    layer: ForeignLayer, name: str, shape: Shape
) -> ParameterLayout:
    return _kernel(shape, (-1,), (-2,))


def _lookup(layer: ForeignLayer, name: str, shape: Shape) -> ParameterLayout:
    """An embedding looks up one row."""
    return _dense(layer, name, shape)._replace(fan_in=1)


def _general(layer: ForeignLayer, name: str, shape: Shape) -> ParameterLayout:
    """A dense layer with several axes of inputs and outputs."""
    features = layer.features if hasattr(layer, "features") else layer.out_features
    outputs = np.size(features)
    inputs = np.size(layer.axis)
    return _kernel(shape, range(-outputs - inputs, -outputs), range(-outputs, 0))


def _einsum(layer: ForeignLayer, name: str, shape: Shape) -> ParameterLayout:
    """Units sum over the letters of the kernel that the result lacks."""
    equation = layer.einsum_str
    operands, _, result = (equation or "").replace(" ", "").partition("->")
    letters = operands.partition(",")[2]
    if len(letters) != len(shape):
        instead = (
            "Pass the equation to the layer itself, or name a prior of it, e.g. "
            '`{"*.kernel": dist.Normal()}`.'
        )
        raise argument_error(
            "priors",
            "name",
            f"{name!r}, an `Einsum` of the equation {equation!r}",
            instead,
        )
    inputs = []
    outputs = []
    for axis, letter in enumerate(letters):
        if letter in result:
            outputs.append(axis)
        else:
            inputs.append(axis)
    return _kernel(shape, inputs, outputs)


def _convolution(layer: ForeignLayer, name: str, shape: Shape) -> ParameterLayout:
    rank = np.size(layer.kernel_size)
    dense = _kernel(shape, (-2,), (-1,), range(-2 - rank, -2))
    return dense._replace(fan_in=dense.fan_in / _per_axis(layer.input_dilation, rank))


def _transposed_convolution(
    layer: ForeignLayer, name: str, shape: Shape
) -> ParameterLayout:
    """The window meets an input only once per stride."""
    rank = np.size(layer.kernel_size)
    axes = ((-1,), (-2,)) if layer.transpose_kernel else ((-2,), (-1,))
    dense = _kernel(shape, *axes, range(-2 - rank, -2))
    return dense._replace(fan_in=dense.fan_in / _per_axis(layer.strides, rank))


def _per_axis(strides: Any, rank: int) -> int:
    """The product over axes of a number for each, or of one for all."""
    return int(np.prod(np.broadcast_to(1 if strides is None else strides, rank)))


def _equinox_convolution(
    layer: ForeignLayer, name: str, shape: Shape
) -> ParameterLayout:
    rank = layer.num_spatial_dims
    return _kernel(shape, (-1 - rank,), (-2 - rank,), range(-rank, 0))


def _equinox_transposed_convolution(
    layer: ForeignLayer, name: str, shape: Shape
) -> ParameterLayout:
    dense = _equinox_convolution(layer, name, shape)
    return dense._replace(fan_in=dense.fan_in / prod(layer.stride))


def _gain(layer: ForeignLayer, name: str, shape: Shape) -> ParameterLayout:
    return ParameterLayout("scale")


def _state(layer: ForeignLayer, name: str, shape: Shape) -> ParameterLayout:
    instead = (
        "Pass the module that `eqx.nn.make_with_state(Net)(...)` returns, whose state "
        "is apart."
    )
    raise argument_error("priors", "name", f"{name!r}, a state and no weight", instead)


# What a weight is called; all other parameters of these layers are told by their names.
WEIGHTS = ("kernel", "weight", "weight_ih", "weight_hh", "embedding", "g", "init")
LAYERS: dict[str, Callable[[ForeignLayer, str, Shape], ParameterLayout]] = {
    "flax.nnx.Linear": _dense,
    "flax.nnx.LinearGeneral": _general,
    "flax.nnx.Einsum": _einsum,
    "flax.nnx.Conv": _convolution,
    "flax.nnx.ConvTranspose": _transposed_convolution,
    "flax.nnx.Embed": _lookup,
    "flax.linen.Dense": _dense,
    "flax.linen.DenseGeneral": _general,
    "flax.linen.Einsum": _einsum,
    "flax.linen.ConvLocal": _dense,
    "flax.linen.Conv": _convolution,
    "flax.linen.ConvTranspose": _transposed_convolution,
    "flax.linen.Embed": _lookup,
    "equinox.nn.Linear": _dense_outputs_first,
    "equinox.nn.GRUCell": _dense_outputs_first,
    "equinox.nn.LSTMCell": _dense_outputs_first,
    "equinox.nn.Embedding": _lookup,
    "equinox.nn.ConvTranspose": _equinox_transposed_convolution,
    "equinox.nn.Conv": _equinox_convolution,
    "equinox.nn.LayerNorm": _gain,
    "equinox.nn.RMSNorm": _gain,
    "equinox.nn.GroupNorm": _gain,
    "equinox.nn.BatchNorm": _gain,
    "equinox.nn.WeightNorm": _gain,
    "equinox.nn.StateIndex": _state,
}
