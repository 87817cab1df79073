"""Networks as static specifications and pure functions of a parameter dictionary and
inputs.
"""

from numpyro_bnn.nn.architectures import CNN, MLP, ResNet
from numpyro_bnn.nn.base import BatchStatistics, ForwardContext, Layer
from numpyro_bnn.nn.conv import AvgPool, Conv2d, MaxPool
from numpyro_bnn.nn.layers import (
    ACTIVATIONS,
    Activation,
    Dense,
    Flatten,
    Residual,
    Sequential,
)
from numpyro_bnn.nn.norm import BatchNorm, LayerNorm

__all__ = [
    "Layer",
    "Dense",
    "Conv2d",
    "MaxPool",
    "AvgPool",
    "Flatten",
    "Activation",
    "ACTIVATIONS",
    "BatchNorm",
    "LayerNorm",
    "Residual",
    "Sequential",
    "MLP",
    "CNN",
    "ResNet",
    "BatchStatistics",
    "ForwardContext",
]
