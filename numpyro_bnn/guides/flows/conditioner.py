"""The network that reads one half of a vector and gives the parameters that transform the other."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpyro
from jax import random

__all__ = ["Conditioner", "declare"]


class Conditioner(NamedTuple):
    """A multilayer perceptron with smooth activations; a pytree, so it lives inside a transform.

    ``kernels[i]`` has shape (H_i, H_{i+1}), ``biases[i]`` (H_{i+1},).
    """

    kernels: tuple[jax.Array, ...]
    biases: tuple[jax.Array, ...]

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map (..., inputs) to (..., outputs)."""
        for kernel, bias in zip(self.kernels[:-1], self.biases[:-1], strict=True):
            # Smooth, for the gradients of NUTS in the flow's space; grows linearly, as tails need.
            x = jax.nn.silu(x @ kernel + bias)
        return x @ self.kernels[-1] + self.biases[-1]


def declare(name: str, inputs: int, outputs: int, hidden: Sequence[int]) -> Conditioner:
    """Declare the parameters ``<name>_kernel<i>`` and ``<name>_bias<i>`` of a conditioner.

    With h hidden units there are h (inputs + 1) + outputs (h + 1) of them: linear in both. The last layer starts at
    zero, so that the transform starts where its parameters are zero.

    :param inputs: size of the half that is read; 0 makes the outputs constants.
    :param hidden: widths of the hidden layers.
    """
    sizes = [inputs, *(hidden if inputs else ()), outputs]
    kernels, biases = [], []
    for i, (fan_in, fan_out) in enumerate(pairwise(sizes)):
        last = i == len(sizes) - 2
        kernel = jnp.zeros((fan_in, fan_out)) if last else _kernel(fan_in, fan_out)
        bias = jnp.zeros(fan_out) if last else _bias(fan_out)
        kernels.append(numpyro.param(f"{name}_kernel{i}", kernel))
        biases.append(numpyro.param(f"{name}_bias{i}", bias))
    return Conditioner(tuple(kernels), tuple(biases))


def _kernel(fan_in: int, fan_out: int) -> Callable:
    return lambda key: random.normal(key, (fan_in, fan_out)) * fan_in**-0.5


def _bias(fan_out: int) -> Callable:
    # Units that turn at different places can bend the map where it needs to.
    return lambda key: random.normal(key, (fan_out,))
