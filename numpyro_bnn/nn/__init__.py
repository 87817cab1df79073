"""Networks as static specifications and pure functions of a parameter dictionary and inputs."""

from numpyro_bnn.nn.architectures import CNN, MLP, ResNet
from numpyro_bnn.nn.base import BatchStatistics, ForwardContext, Layer
from numpyro_bnn.nn.base import Shape as Shape  # this and the next line: for other subpackages, not public
from numpyro_bnn.nn.base import fan_in as fan_in
from numpyro_bnn.nn.base import input_axis as input_axis
from numpyro_bnn.nn.base import inputs_first as inputs_first
from numpyro_bnn.nn.base import output_axis as output_axis
from numpyro_bnn.nn.base import role as role
from numpyro_bnn.nn.conv import AvgPool, Conv2d, MaxPool
from numpyro_bnn.nn.layers import ACTIVATIONS, Activation, Dense, Flatten, Residual, Sequential
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
