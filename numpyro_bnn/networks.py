"""Networks whose parameters are NumPyro sample sites."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro import handlers
from numpyro.primitives import _PYRO_STACK, Messenger

from numpyro_bnn._checks import argument_error
from numpyro_bnn._options import Kind, NetworkName, checked
from numpyro_bnn._types import Arrays
from numpyro_bnn.nn import BatchStatistics, Layer
from numpyro_bnn.nn.base import Shape
from numpyro_bnn.priors import Normal, noncenter
from numpyro_bnn.priors.base import PriorLike, as_prior

__all__ = ["RandomNetwork", "random_network"]

Statistics = Mapping[str, BatchStatistics]
SPECIFICATION = (
    "Pass a specification such as `nn.MLP([50, 1])`; for Flax, NNX and Equinox modules "
    "use NumPyro's `random_flax_module`, `random_nnx_module`, `random_eqx_module` with "
    "the same priors."
)


class RandomNetwork:
    """A network whose parameters are values of sample sites, made by
    :func:`random_network`.

    :ivar name: prefix of its sites.
    :ivar net: the specification.
    :ivar params: flat dictionary of parameter values.
    """

    def __init__(self, name: str, net: Layer, params: Arrays) -> None:
        self.name = name
        self.net = net
        self.params = params

    def __call__(self, x: Array, statistics: Statistics | None = None) -> Array:
        """Evaluate the network on a batch.

        :param x: inputs of shape ``(..., *input_shape)``.
        :param statistics: batch statistics to normalize with instead of those of ``x``;
            see :meth:`statistics`.
        """
        if statistics is None:
            statistics = _requested_statistics(self, x)
        return self.net.apply(self.params, x, statistics)

    def statistics(self, x: Array) -> dict[str, BatchStatistics]:
        """Statistics of every batch normalization on the inputs ``x``, to be passed to
        a later call.
        """
        return self.net.statistics(self.params, x)


@checked("random_network")
def random_network(
    name: NetworkName,
    net: Annotated[Layer, Kind(Layer, SPECIFICATION)],
    input_shape: Shape,
    prior: PriorLike | None = None,
) -> RandomNetwork:
    """Sample every parameter of a network from its prior, and return the network as a
    callable.

    The sites are ``<name>/<layer>.kernel``, ``<name>/<layer>.bias`` and so on, and the
    hyper-sites of the prior. Non-centered priors add ``<site>_base`` ~ N(0, 1) and make
    the parameter a deterministic site.

    :param name: prefix of the sites.
    :param net: the specification, e.g. ``nn.MLP([50, 1], activation="tanh")``.
    :param input_shape: shape of one data point, e.g. ``x.shape[1:]``.
    :param prior: a callable ``(name, shape) -> Distribution`` such as
        :class:`~numpyro_bnn.priors.Hierarchical`, a distribution for all parameters, or
        a dictionary of these by name pattern; ``priors.Normal()`` by default.
    :return: a callable on batches ``(..., *input_shape)``.
    :raises ValueError: inside a plate, for an input shape the network cannot take, for
        a parameter without prior.
    :raises TypeError: for any other kind of net or prior.

    >>> import jax, numpyro, numpyro.distributions as dist
    >>> from numpyro_bnn import nn, priors, random_network
    >>> def model(x, y=None):
    ...     net = random_network(
    ...         "net", nn.MLP([8, 1], "tanh"), x.shape[1:], priors.Hierarchical()
    ...     )
    ...     with numpyro.plate("data", x.shape[0]):
    ...         numpyro.sample("y", dist.Normal(net(x)[..., 0], 0.1), obs=y)
    >>> x = jax.numpy.ones((5, 3))
    >>> trace = numpyro.handlers.trace(numpyro.handlers.seed(model, 0)).get_trace(x)
    >>> trace["net/Dense_0.kernel"]["value"].shape, trace["y"]["value"].shape
    ((3, 8), (5,))
    """
    shapes = net.param_shapes(input_shape)
    prior = as_prior(Normal() if prior is None else prior)
    if hasattr(prior, "check"):
        prior.check(shapes)
    plates = [frame.name for frame in _PYRO_STACK if isinstance(frame, numpyro.plate)]
    if plates:
        instead = (
            "Call it before the plate: inside, each data point would get its own "
            "weights."
        )
        raise argument_error(
            "random_network", "name", f"{name!r} inside plate {plates[-1]!r}", instead
        )
    if not _PYRO_STACK:
        instead = (
            "Call it in a model that a kernel, a guide or `handlers.seed(model, 0)` "
            "runs."
        )
        raise argument_error(
            "random_network", "name", f"{name!r} outside of a model", instead
        )
    params = {}
    with handlers.scope(prefix=name, divider="/"), noncenter():
        for site, shape in shapes.items():
            fn = _over_parameter(prior(site, shape), site, shape)
            params[site] = numpyro.sample(
                site, fn, infer={"network": (name, net, tuple(input_shape))}
            )
    return RandomNetwork(name, net, params)


def _over_parameter(
    fn: dist.Distribution, site: str, shape: Shape
) -> dist.Distribution:
    """Expand the distribution that a prior returned to the whole parameter; refuse one
    that does not fit.
    """
    if not isinstance(fn, dist.Distribution):
        instead = (
            "A prior is a callable `(name, shape) -> "
            "numpyro.distributions.Distribution`."
        )
        raise argument_error(
            "random_network",
            "prior",
            f"{fn!r} for parameter {site!r}",
            instead,
            TypeError,
        )
    batch_shape = shape[: max(len(shape) - fn.event_dim, 0)]
    try:
        fits = (
            np.broadcast_shapes(fn.shape(), shape)
            == batch_shape + fn.event_shape
            == shape
        )
    except ValueError:
        fits = False
    if not fits:
        got = f"a {type(fn).__name__} of shape {fn.shape()} for parameter {site!r}"
        instead = (
            f"The parameter has shape {shape}: give it a distribution of that shape, "
            f"or a scalar one."
        )
        raise argument_error("random_network", "prior", got, instead)
    return fn.expand(batch_shape).to_event()


class record_statistics(Messenger):
    """Context that records the batch statistics of every call of a
    :class:`RandomNetwork` in ``.calls``.

    >>> import jax.numpy as jnp
    >>> from numpyro_bnn import nn
    >>> net = RandomNetwork("net", nn.BatchNorm(use_scale=False, use_bias=False), {})
    >>> with record_statistics() as training:
    ...     _ = net(jnp.array([[1.0], [3.0]]))
    >>> with use_statistics(training.calls):
    ...     net(jnp.array([[2.0], [3.0]])).tolist()
    [[0.0], [1.0]]
    """

    calls: Sequence[Statistics] = ()

    def __enter__(self) -> "record_statistics":
        self.calls = []
        super().__enter__()
        return self

    def visit(self, network: RandomNetwork, x: Array) -> Statistics:
        """Record the statistics of a call, and return them."""
        self.calls = [*self.calls, network.statistics(x)]
        return self.calls[-1]


class placeholder_statistics(record_statistics):
    """Context that normalizes with ones: to read what a model is on rows that are too
    few to normalize with.
    """

    def visit(self, network: RandomNetwork, x: Array) -> Statistics:
        """Record statistics of the right shapes, and return them."""
        shapes = jax.eval_shape(network.statistics, jnp.stack([x, x]))
        self.calls = [
            *self.calls,
            jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), shapes),
        ]
        return self.calls[-1]


class use_statistics(Messenger):
    """Context in which the calls of a :class:`RandomNetwork` normalize with recorded
    statistics, in order.

    :param calls: ``record_statistics().calls`` of a run of the same model.
    """

    def __init__(self, calls: Sequence[Statistics], fn: Callable | None = None) -> None:
        self.calls = calls
        super().__init__(fn)

    def __enter__(self) -> "use_statistics":
        self._position = 0  # a model may be traced more than once
        super().__enter__()
        return self

    def visit(self, network: RandomNetwork, x: Array) -> Statistics:
        """Return the statistics recorded for this call."""
        if self._position == len(self.calls):
            got = (
                f"{len(self.calls)} recorded calls of random networks, and one more "
                f"call"
            )
            instead = (
                "The model must call its networks equally often on training data and "
                "for prediction."
            )
            raise argument_error("use_statistics", "calls", got, instead)
        self._position += 1
        return self.calls[self._position - 1]


def _requested_statistics(network: RandomNetwork, x: Array) -> Statistics | None:
    """Statistics from the innermost of these contexts, which no ``block`` or ``scope``
    hides.
    """
    for frame in reversed(_PYRO_STACK):
        if isinstance(frame, record_statistics | use_statistics):
            return frame.visit(network, x)
    return None
