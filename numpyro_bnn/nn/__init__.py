"""Networks as static specifications and pure functions of a parameter dictionary and inputs."""

from numpyro_bnn.nn.activations import ACTIVATIONS, Activation
from numpyro_bnn.nn.architectures import CNN, MLP, ResNet
from numpyro_bnn.nn.base import BatchStatistics, ForwardContext, Layer, Shape
from numpyro_bnn.nn.containers import Residual, Sequential
from numpyro_bnn.nn.conv import AvgPool, Conv2d, Flatten, MaxPool
from numpyro_bnn.nn.dense import Dense
from numpyro_bnn.nn.fans import fan_in, input_axis, inputs_first, output_axis, role
from numpyro_bnn.nn.norm import BatchNorm, LayerNorm
from numpyro_bnn.nn.wiring import Feature, Segment, Wire, Wiring

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
    "Shape",
    "fan_in",
    "input_axis",
    "inputs_first",
    "output_axis",
    "role",
    "Wiring",
    "Feature",
    "Segment",
    "Wire",
]
