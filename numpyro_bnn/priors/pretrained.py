"""Priors from the parameters of a network that exists already: held fixed, as the prior
mean, or learned further.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array

from numpyro_bnn._checks import argument_error, is_floating, unknown_name
from numpyro_bnn._options import Positive
from numpyro_bnn._types import PyTree
from numpyro_bnn.nn.base import Shape
from numpyro_bnn.priors.base import Constant, Prior

ACCEPTED = (
    "Pass parameters: a dictionary as of `net.init`, variables of Linen, or an NNX or "
    "Equinox module."
)


def flat_params(call: str, argument: str, params: PyTree) -> dict[str, PyTree]:
    """Parameters by name, as our layers and NumPyro's ``random_*_module`` name them.

    >>> flat_params(
    ...     "priors.Fixed", "params", {"params": {"Dense_0": {"bias": np.zeros(2)}}}
    ... )
    {'Dense_0.bias': array([0., 0.])}
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(params, nnx.Module | nnx.State):
        params = nnx.to_pure_dict(
            nnx.state(params, nnx.Param)
            if isinstance(params, nnx.Module)
            else nnx.filter_state(params, nnx.Param)
        )
    if isinstance(params, Mapping) and isinstance(params.get("params"), Mapping):
        params = params["params"]  # Linen's variables
    leaves = jax.tree_util.tree_leaves_with_path(params)
    flat = {}
    for path, leaf in leaves:
        if isinstance(params, Mapping):
            flat[".".join(str(entry.key) for entry in path)] = leaf
        elif path and is_floating(leaf):
            # Equinox: places in the tree, e.g. "layers[0].weight"
            flat[jax.tree_util.keystr(path)[1:]] = leaf
    if not flat:
        raise argument_error(call, argument, params, ACCEPTED, TypeError)
    for name, value in flat.items():
        if not is_floating(value):
            raise argument_error(
                call, f"{argument}[{name!r}]", value, ACCEPTED, TypeError
            )
        if not isinstance(value, jax.core.Tracer) and not np.all(np.isfinite(value)):
            instead = "Pass finite values, of a training run that did not diverge."
            raise argument_error(
                call, f"{argument}[{name!r}]", "NaN or infinite values", instead
            )
    return flat


class _Given:
    """Parameters by name, ``flat``, with names and shapes that are checked."""

    argument: ClassVar[str] = "params"
    flat: ClassVar[Mapping[str, Any]]

    def __post_init__(self) -> None:
        flat = flat_params(
            f"priors.{type(self).__name__}", self.argument, getattr(self, self.argument)
        )
        object.__setattr__(self, "flat", flat)

    def value(self, name: str, shape: Shape) -> Array:
        """The parameter of this name and shape."""
        call = f"priors.{type(self).__name__}"
        if name not in self.flat:
            raise unknown_name(call, self.argument, name, self.flat)
        parameter = self.flat[name]
        if np.shape(parameter) != tuple(shape):
            came = f"shape {np.shape(parameter)} for {name!r}"
            instead = (
                f"The network has shape {tuple(shape)} there: pass the parameters of a "
                f"network of this size."
            )
            raise argument_error(call, self.argument, came, instead)
        return jnp.asarray(parameter, jnp.result_type(float))


@dataclass(frozen=True, eq=False)
class Fixed(_Given):
    """Weights held at given values, such as a pretrained body: constants of the model,
    and no sites.

    They are in no posterior, no guide and no symmetry, and keep their values in
    predictions. With NumPyro's ``random_flax_module`` and its like, wrap the model by
    :func:`noncenter`.

    :param params: parameters by name: of ``nn`` (``net.init``), Linen's variables, an
        NNX or Equinox module. Only those are used whose names the pattern matches.
    :raises ValueError: for values that are not finite, and for a name or shape of the
        network that ``params`` lacks.
    :raises TypeError: for anything else than parameters.

    >>> from numpyro import handlers
    >>> from numpyro_bnn import nn, priors, random_network
    >>> net = nn.MLP([4, 1], "tanh")
    >>> prior = {
    ...     "Dense_0.*": priors.Fixed(net.init(jax.random.key(0), (2,))),
    ...     "*": priors.Normal(),
    ... }
    >>> with handlers.seed(rng_seed=0), handlers.trace() as trace:
    ...     f = random_network("net", net, (2,), prior)
    >>> list(trace)
    ['net/Dense_1.kernel', 'net/Dense_1.bias']
    """

    params: PyTree

    def __call__(self, name: str, shape: Shape) -> dist.Distribution:
        return Constant(self.value(name, shape), event_dim=len(shape))


@dataclass(frozen=True, eq=False)
class Centered(_Given, Prior):
    """Normal weights around given values, such as pretrained ones: w ~ N(w0, scale^2 /
    fan_in).

    Biases are N(b0, bias_scale^2), gains of normalizations N(g0, gain_scale^2).

    :param params: the means w0, b0, g0 by name, as for :class:`Fixed`.
    :param scale: standard deviation of a weight times sqrt(fan_in), as in
        :class:`Normal`.
    :raises ValueError: as :class:`Fixed` does, and for a scale that is not positive.
    :raises TypeError: for anything else than parameters.

    >>> prior = Centered({"kernel": np.ones((4, 1))}, 0.1)("kernel", (4, 1))
    >>> prior.loc[0].tolist(), prior.scale.item()
    ([1.0], 0.05)
    """

    params: PyTree
    scale: Positive = 1.0

    def __post_init__(self) -> None:
        Prior.__post_init__(self)
        super().__post_init__()

    def kernel(self, name: str, shape: Shape) -> dist.Distribution:
        return dist.Normal(
            self.value(name, shape), self.scale * self.fan_in_factor(name, shape)
        )

    def bias(self, name: str, shape: Shape) -> dist.Distribution:
        return dist.Normal(self.value(name, shape), self.bias_scale)

    def gain(self, name: str, shape: Shape) -> dist.Distribution:
        return dist.Normal(self.value(name, shape), self.gain_scale)


@dataclass(frozen=True, eq=False)
class Learned(_Given):
    """Weights that are optimized and not random: a ``numpyro.param`` of the parameter's
    name.

    SVI optimizes them with the guide. The kernels of :mod:`numpyro_bnn.infer` optimize
    them together with the random sites before the chains start, with as many steps as
    the warm start of a chain, and hold them there: all chains sample one model,
    ``kernel.model``. NumPyro's kernels, and a kernel without warm start, hold them at
    ``init``: learn them first by SVI, and pass ``handlers.substitute(model,
    result.params)``. They have no prior, so a large body may overfit; :class:`Centered`
    keeps it near its start.

    :param init: values to start from, by name, as for :class:`Fixed`.
    :raises ValueError: as :class:`Fixed` does.
    :raises TypeError: for anything else than parameters.

    >>> from numpyro import handlers
    >>> with handlers.trace() as trace:
    ...     fn = Learned({"Dense_0.bias": np.ones(3)})("Dense_0.bias", (3,))
    >>> trace["Dense_0.bias"]["type"], trace["Dense_0.bias"]["value"].tolist()
    ('param', [1.0, 1.0, 1.0])
    """

    argument: ClassVar[str] = "init"
    init: PyTree

    def __call__(self, name: str, shape: Shape) -> dist.Distribution:
        value = numpyro.param(name, self.value(name, shape), learned=True)
        return Constant(value, event_dim=len(shape))
