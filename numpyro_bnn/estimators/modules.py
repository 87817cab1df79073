"""A network of the user in an estimator: a specification, or a module of Flax, NNX or
Equinox.
"""

from collections.abc import Callable
from typing import Any

import jax

from numpyro_bnn._checks import argument_error
from numpyro_bnn.networks import random_network
from numpyro_bnn.nn import Layer
from numpyro_bnn.nn.base import Shape
from numpyro_bnn.priors import noncenter

INSTEAD = (
    "Pass a function of the number of outputs that returns a specification such as "
    "`nn.MLP([50, outputs])`, or a module of Flax, NNX or Equinox."
)


def library(net: Any) -> str:
    """The library of a module, or nothing."""
    for kind in type(net).__mro__:
        for library in ("flax.linen", "flax.nnx", "equinox"):
            if kind.__module__.startswith(library) and kind.__name__ == "Module":
                return library
    return ""


def own_network(call: str, network: Callable[[int], Any], outputs: int) -> Any:
    """What a user's function returns for so many outputs; refuse all but networks."""
    net = network(outputs)
    if not isinstance(net, Layer) and not library(net):
        got = f"a function that returns {type(net).__name__}"
        raise argument_error(call, "network", got, INSTEAD, TypeError)
    return net


def random_function(net: Any, input_shape: Shape, prior: Any) -> Callable:
    """Sample all parameters of a network or module from their prior, and return it as a
    function of a batch (N, *input_shape).
    """
    if isinstance(net, Layer):
        return random_network("net", net, input_shape, prior)
    from numpyro.contrib import module

    name = library(net)
    with noncenter():
        if name == "flax.linen":
            shape = (1, *input_shape)
            return module.random_flax_module("net", net, prior, input_shape=shape)
        if name == "flax.nnx":
            return module.random_nnx_module("net", net, prior)
        return jax.vmap(module.random_eqx_module("net", net, prior))
