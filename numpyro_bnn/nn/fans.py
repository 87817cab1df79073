"""What a parameter is for, read from its name: role and fan-in in the conventions of Flax and Equinox."""

from math import prod
from typing import Literal

from numpyro_bnn.nn.base import Shape

__all__ = ["Role", "fan_in", "input_axis", "inputs_first", "output_axis", "role"]

Role = Literal["kernel", "bias", "scale"]


def role(name: str, shape: Shape) -> Role:
    """Tell a parameter's role from its name and shape.

    ``kernel``: weights that multiply inputs — Flax/NNX/ours ``...kernel`` and ``...embedding``, Equinox
    ``...weight`` with at least two axes. ``scale``: the gain of a normalization (``...scale``, or a
    one-dimensional ``...weight``). Everything else is a ``bias``.

    >>> role("Dense_0.kernel", (3, 8)), role("layers[0].weight", (8, 3)), role("BatchNorm_0.scale", (8,))
    ('kernel', 'kernel', 'scale')
    """
    leaf = _leaf(name)
    if leaf == "scale" or (leaf == "weight" and len(shape) < 2):
        return "scale"
    if leaf == "bias" or len(shape) < 2:
        return "bias"
    return "kernel"


def input_axis(name: str, shape: Shape) -> int:
    """Axis of a kernel that runs over its inputs (units or channels).

    Flax layout (in, out) / (h, w, in, out): the last but one. Equinox ``weight`` (out, in, ...): axis 1.

    >>> input_axis("Dense_0.kernel", (3, 8)), input_axis("layers[0].weight", (8, 3))
    (0, 1)
    """
    return len(shape) - 2 if inputs_first(name) else 1


def output_axis(name: str, shape: Shape) -> int:
    """Axis of a kernel that runs over its outputs (units or channels): the last one, in Equinox the first.

    >>> output_axis("Dense_0.kernel", (3, 8)), output_axis("layers[0].weight", (8, 3))
    (1, 0)
    """
    return len(shape) - 1 if inputs_first(name) else 0


def inputs_first(name: str) -> bool:
    """Whether a kernel is laid out (..., in, out) as in Flax; Equinox's ``weight`` is (out, in, ...).

    >>> inputs_first("Conv2d_0.kernel"), inputs_first("layers[0].weight"), inputs_first("cell.weight_ih")
    (True, False, False)
    """
    return not _leaf(name).startswith("weight")


def fan_in(name: str, shape: Shape) -> int:
    """Number of terms summed into one pre-activation: D for a dense kernel, h*w*in for a convolution.

    An embedding looks up one row, so its fan-in is 1.

    >>> fan_in("Dense_0.kernel", (3, 8)), fan_in("Conv2d_0.kernel", (5, 5, 2, 16))
    (3, 50)
    >>> fan_in("convolution.weight", (16, 2, 5, 5))
    50
    """
    if len(shape) < 2 or _leaf(name) == "embedding":
        return 1
    return prod(shape[:-1]) if inputs_first(name) else prod(shape[1:])


def _leaf(name: str) -> str:
    return name.replace("/", ".").rsplit(".", 1)[-1]
