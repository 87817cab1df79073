"""Standard networks, as functions that return a :class:`~numpyro_bnn.nn.Sequential`."""

from collections.abc import Sequence

from numpyro_bnn._checks import argument_error, is_list
from numpyro_bnn._options import Count, PositiveInt, checked
from numpyro_bnn.nn.base import Layer
from numpyro_bnn.nn.conv import AvgPool, Conv2d, MaxPool
from numpyro_bnn.nn.layers import Dense, Flatten, Residual, Sequential


def _widths(call: str, argument: str, value: Sequence[int]) -> tuple[int, ...]:
    if not is_list(value) or not value:
        raise argument_error(
            call,
            argument,
            value,
            "Pass a list of positive integers, e.g. `[50, 50, 1]`.",
        )
    return tuple(Count().check(call, argument, n) for n in value)


def _norms(norm: Layer | None) -> list[Layer | str]:
    return [] if norm is None else [norm]


def MLP(
    widths: Sequence[int], activation: Layer | str = "relu", norm: Layer | None = None
) -> Sequential:
    """Multi-layer perceptron: Dense, [norm], activation, ..., Dense.

    :param widths: units of every layer, the last one being the output, e.g. ``[50, 50,
        1]``.
    :param activation: name or layer, after every dense layer except the last.
    :param norm: a normalization between dense layer and activation, e.g.
        ``BatchNorm()``.

    >>> MLP([50, 50, 1], activation="tanh").output_shape((13,))
    (1,)
    """
    *hidden, out = _widths("nn.MLP", "widths", widths)
    layers: list[Layer | str] = []
    for units in hidden:
        layers += [Dense(units), *_norms(norm), activation]
    return Sequential([*layers, Dense(out)])


def CNN(
    channels: Sequence[int],
    widths: Sequence[int],
    window: int | tuple[int, int] = 5,
    pool: Layer | None = None,
    padding: str | int = "SAME",
    activation: Layer | str = "relu",
    norm: Layer | None = None,
) -> Sequential:
    """Convolutional classifier: (Conv2d, [norm], activation, pool) per entry of
    ``channels``, Flatten, MLP.

    :param channels: output channels of each convolution.
    :param widths: dense units, the last one being the output.
    :param window: filter size.
    :param pool: pooling layer; by default ``MaxPool(2)``.
    :param padding: padding of the convolutions.
    :param activation: name or layer.
    :param norm: normalization before each activation.

    >>> CNN([64], [10]).output_shape((28, 28, 1))
    (10,)
    """
    layers: list[Layer | str] = []
    pool = MaxPool(2) if pool is None else pool
    for out in _widths("nn.CNN", "channels", channels):
        layers += [
            Conv2d(out, window, padding=padding),
            *_norms(norm),
            activation,
            pool,
        ]
    return Sequential(
        [
            *layers,
            Flatten(),
            *MLP(_widths("nn.CNN", "widths", widths), activation, norm).layers,
        ]
    )


@checked("nn.ResNet")
def ResNet(
    channels: Sequence[int],
    outputs: PositiveInt,
    blocks: PositiveInt = 1,
    activation: Layer | str = "relu",
    norm: Layer | None = None,
) -> Sequential:
    """Residual convolutional network in stages; each stage after the first halves the
    image size.

    A block is activation(x + Conv, [norm], activation, Conv, [norm]); if the shape
    changes, the shortcut is a 1 x 1 convolution. A global average pool and a dense
    layer follow.

    :param channels: channels of each stage, e.g. ``[16, 32, 64]``.
    :param outputs: number of outputs K.
    :param blocks: blocks per stage.
    :param activation: name or layer.
    :param norm: normalization after each convolution, e.g. ``BatchNorm()``.

    Reference: He et al. (2016), section 4.2.

    >>> ResNet([16, 32, 64], outputs=10).output_shape((32, 32, 3))
    (10,)
    """
    stages = _widths("nn.ResNet", "channels", channels)
    layers: list[Layer | str] = [Conv2d(stages[0], 3), *_norms(norm), activation]
    previous = stages[0]
    for stage, out in enumerate(stages):
        for block in range(blocks):
            strides = 2 if stage > 0 and block == 0 else 1
            body = [
                Conv2d(out, 3, strides),
                *_norms(norm),
                activation,
                Conv2d(out, 3),
                *_norms(norm),
            ]
            shortcut = (
                None if out == previous and strides == 1 else Conv2d(out, 1, strides)
            )
            layers += [Residual(Sequential(body), shortcut), activation]
            previous = out
    return Sequential([*layers, AvgPool(None), Flatten(), Dense(outputs)])
