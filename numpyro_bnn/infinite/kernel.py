"""Kernels of infinitely wide networks: that of their prior, and the neural tangent kernel."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_bnn import _checks
from numpyro_bnn._checks import argument_error
from numpyro_bnn.infinite.images import needs_pixels
from numpyro_bnn.infinite.moments import Moments, PriorMoments, prior_moments
from numpyro_bnn.infinite.rules import Context, propagate
from numpyro_bnn.infinite.state import Covariance, Inputs, Units
from numpyro_bnn.nn import Layer

__all__ = ["Kernels", "both_kernels", "kernels", "nngp", "ntk", "prior_variance"]

# Pairs of data points (times pairs of pixels) beyond which a kernel is worked out in blocks.
LARGEST = 2**24
BLOCK = 2**18


class Kernels(NamedTuple):
    """Both kernels of one network; ``ntk`` is ``None`` where it was not asked for."""

    nngp: Any
    ntk: Any


def nngp(
    net: Layer,
    x1: Any,
    x2: Any = None,
    *,
    prior: Any = None,
    scales: Mapping[str, Any] | None = None,
    block_size: int | None = None,
) -> Any:
    r"""Covariance of the outputs of a network under its prior, as its hidden layers get infinitely wide.

    Each output is a Gaussian process, independent of the others, with E f(x) = 0 and E f(x) f(x') = K(x, x').
    Behind a dense layer with w ~ N(0, s^2 / fan_in), b ~ N(0, sigma^2)

    .. math:: K'(x, x') = s^2 E[f f'] + \sigma^2, \qquad s^2 E[f f'] = s^2 x \cdot x' / D \text{ for the first layer,}

    and behind an activation phi :math:`E[f f'] = E[\phi(u) \phi(u')]`, (u, u') normal with the covariances K: in
    closed form for identity, relu, leaky_relu, erf and gelu, by quadrature in two dimensions for the others.
    The widths of the specification do not matter where the prior scales by fan-in.

    :param net: a specification whose output has one axis and comes from weights; see ``RULES`` for its layers.
    :param x1: inputs ``(N1, *input_shape)``.
    :param x2: inputs ``(N2, *input_shape)``; by default ``x1``, and then half the work is done.
    :param prior: as in :func:`~numpyro_bnn.random_network`; ``priors.Normal()`` by default. Weights behind the
        inputs, biases and gains must be normal, other weights need a variance only.
    :param scales: values of the prior's hyper-sites, e.g. ``{"Dense_0.kernel_scale": 0.7}``: a hierarchical prior
        is a mixture of Gaussian processes.
    :param block_size: rows and columns worked out at once. By default everything, up to 2^24 pairs of data points
        and pixels, as one differentiable JAX array; with a size, and beyond, a NumPy array filled block by block.
    :return: (N1, N2).
    :raises ValueError: for a layer or prior without Gaussian limit, NaN, or shapes that do not fit.
    :raises TypeError: for a net or prior of another kind.

    References: Neal (1996), chapter 2; Lee et al. (2018), equations (4)-(5); Novak et al. (2019), section 3, for
    convolutions.

    >>> import jax.numpy as jnp
    >>> from numpyro_bnn import nn, priors
    >>> net = nn.MLP([512, 1], "relu")
    >>> nngp(net, jnp.eye(2), prior=priors.Normal(2.0, bias_scale=0.5)).round(3).tolist()
    [[4.75, 1.941...], [1.941..., 4.75]]
    """
    return both_kernels(
        "infinite.nngp", net, x1, x2, prior=prior, scales=scales, block_size=block_size, want=False
    ).nngp


def ntk(
    net: Layer,
    x1: Any,
    x2: Any = None,
    *,
    prior: Any = None,
    scales: Mapping[str, Any] | None = None,
    block_size: int | None = None,
) -> Any:
    r"""Neural tangent kernel of a network, as its hidden layers get infinitely wide.

    The parameters are v with w = mean + sd v, sd that of the prior: v ~ N(0, 1) (the NTK parametrization; in w itself
    the kernel would grow with the width). With T the sum over all v of df/dv df'/dv, a dense
    layer makes of the kernel T of its inputs

    .. math:: T'(x, x') = K'(x, x') + s^2 T(x, x'),

    an activation phi, with derivative :math:`\dot\phi`, makes of it :math:`T(x, x')\, E[\dot\phi(u) \dot\phi(u')]`,

    and gradient descent on v is gradient descent on w with every step multiplied by the prior variance.

    Arguments, errors and blocks are those of :func:`nngp`.

    :return: (N1, N2), the same for every output; between different outputs it is 0.

    Reference: Jacot, Gabriel & Hongler (2018), theorem 1.

    >>> import jax.numpy as jnp
    >>> from numpyro_bnn import nn
    >>> ntk(nn.MLP([512, 1], "identity"), jnp.eye(2)).tolist()       # K' = x.x'/2 + 2, T_in = x.x'/2 + 1
    [[4.0, 3.0], [3.0, 4.0]]
    """
    return both_kernels(
        "infinite.ntk", net, x1, x2, prior=prior, scales=scales, block_size=block_size, want=True
    ).ntk


def prior_variance(
    net: Layer, x: Any, *, prior: Any = None, scales: Mapping[str, Any] | None = None
) -> jax.Array:
    """The diagonal of :func:`nngp`: the prior variance of the outputs at every input, (N,).

    Arguments and errors are those of :func:`nngp`.

    >>> from numpyro_bnn import nn
    >>> prior_variance(nn.MLP([64, 1], "identity"), jnp.eye(2)).tolist()
    [2.5, 2.5]
    """
    call = "infinite.prior_variance"
    x = _inputs(call, "x", x)
    found = _moments(call, net, x, prior, scales)
    dtype = jnp.result_type(x, float)
    sites = jax.tree.map(lambda value: jnp.asarray(value, dtype), found.sites)
    return _own(net, found.normal, sites, jnp.asarray(x, dtype))


def both_kernels(
    call: str,
    net: Layer,
    x1: Any,
    x2: Any = None,
    *,
    prior: Any = None,
    scales: Mapping[str, Any] | None = None,
    block_size: int | None = None,
    want: bool = True,
) -> Kernels:
    """Check a call, and work out the kernels.

    :param call: the public name the user wrote, for errors.
    :param want: the tangent kernel too.

    >>> from numpyro_bnn import nn
    >>> both_kernels("example", nn.Dense(1), jnp.eye(2)).ntk.tolist()
    [[1.5, 1.0], [1.0, 1.5]]
    """
    x1 = _inputs(call, "x1", x1)
    x2 = None if x2 is None else _inputs(call, "x2", x2)
    if x2 is not None and x1.shape[1:] != x2.shape[1:]:
        raise argument_error(call, "x2", f"shape {x2.shape}", f"Pass (N2, *{x1.shape[1:]}), like x1.")
    found = _moments(call, net, x1, prior, scales)
    return kernels(net, found.sites, found.normal, x1, x2, want, _size(call, net, x1, x2, block_size))


def _moments(call: str, net: Layer, x: Any, prior: Any, scales: Any) -> PriorMoments:
    """Those of a prior, for a network whose outputs have one axis."""
    found = prior_moments(call, net, x.shape[1:], prior, scales)
    if len(out := net.output_shape(x.shape[1:])) != 1:
        instead = (
            "Put `nn.Flatten()` and a dense layer behind it: kernels are those of outputs with one axis."
        )
        raise argument_error(call, "net", f"outputs of shape {out}", instead)
    return found


def kernels(
    net: Layer,
    sites: Mapping[str, Moments],
    normal: frozenset[str],
    x1: Any,
    x2: Any,
    ntk: bool,
    block_size: int | None = None,
) -> Kernels:
    """Kernels for given moments of the parameters; differentiable in them and in the inputs.

    :param sites: mean, and variance times fan-in, of every parameter.
    :param normal: names of those that are independent and normal.
    :param block_size: rows worked out at once; ``None`` for all, as JAX arrays.

    >>> from numpyro_bnn import nn
    >>> sites = {"kernel": Moments(0.0, 1.0), "bias": Moments(0.0, 1.0)}
    >>> kernels(nn.Dense(1), sites, frozenset(sites), jnp.eye(2), None, False).nngp
    Array([[1.5, 1. ],
           [1. , 1.5]], dtype=float32)
    """
    dtype = jnp.result_type(x1, float) if x2 is None else jnp.result_type(x1, x2, float)
    sites = jax.tree.map(lambda value: jnp.asarray(value, dtype), dict(sites))
    settings = (net, normal, needs_pixels(net), ntk)
    if block_size is not None:
        return _in_blocks(settings, sites, np.asarray(x1, dtype), x2, block_size)
    x1 = jnp.asarray(x1, dtype)
    found = _block(*settings, sites, x1, x1 if x2 is None else jnp.asarray(x2, dtype))
    return Kernels(*map(_mirrored, found)) if x2 is None else found


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _block(
    net: Layer,
    normal: frozenset[str],
    pixels: bool,
    ntk: bool,
    sites: Mapping[str, Moments],
    x1: jax.Array,
    x2: jax.Array,
) -> Kernels:
    out = _propagated(net, Context(sites, normal, pixels, ntk), Inputs(x1, x2))
    return Kernels(out.nngp, out.ntk)


def _mirrored(k: Any) -> Any:
    """Exactly symmetric: to rounding it is already. Apart from what made it, which would be fused in, twice."""
    return None if k is None else (k + k.T) / 2


@partial(jax.jit, static_argnums=(0, 1))
def _own(net: Layer, normal: frozenset[str], sites: Mapping[str, Moments], x: jax.Array) -> jax.Array:
    context = Context(sites, normal, needs_pixels(net), ntk=False)
    return _propagated(net, context, Inputs(x, x[:1])).own1


def _propagated(net: Layer, context: Context, inputs: Inputs) -> Covariance:
    """Covariances of the outputs, which must be a Gaussian process."""
    out = propagate(net, context, inputs)
    if not isinstance(out, Units) or not out.gaussian:
        instead = "End it with `nn.Dense`: only sums over many weights become a Gaussian process."
        raise argument_error(
            "infinite", "net", f"outputs of {type(net).__name__} that are not normal", instead
        )
    return out.k


def _in_blocks(settings: tuple, sites: Any, x1: np.ndarray, x2: Any, size: int) -> Kernels:
    """Blocks of one shape, compiled once, written where they belong; mirrored where x2 is x1."""
    symmetric = x2 is None
    x2 = x1 if x2 is None else np.asarray(x2, x1.dtype)
    wanted = (True, settings[3])
    filled = [np.empty((len(x1), len(x2)), x1.dtype) if want else None for want in wanted]

    def part(x: np.ndarray, start: int) -> np.ndarray:
        return x[np.minimum(np.arange(start, start + size), len(x) - 1)]  # the last one is filled up

    for i in range(0, len(x1), size):
        rows = part(x1, i)
        for j in range(i if symmetric else 0, len(x2), size):
            found = _block(*settings, sites, rows, part(x2, j))
            for out, block in zip(filled, found, strict=True):
                if out is not None:
                    values = np.asarray(block)[: len(x1) - i, : len(x2) - j]
                    values = _mirrored(values) if symmetric and i == j else values
                    out[i : i + size, j : j + size] = values
                    if symmetric and i != j:
                        out[j : j + size, i : i + size] = values.T
    return Kernels(*filled)


def _inputs(call: str, argument: str, value: Any) -> Any:
    _checks.check_finite(call, argument, value)
    if np.ndim(value) < 2:
        instead = "Pass one row per data point, (N, D), e.g. `x[:, None]`."
        raise argument_error(call, argument, f"shape {np.shape(value)}", instead)
    return value if hasattr(value, "dtype") else np.asarray(value)


def _size(call: str, net: Layer, x1: Any, x2: Any, given: int | None) -> int | None:
    """Rows of a block; ``None`` for everything at once."""
    if given is not None:
        if not isinstance(given, int) or isinstance(given, bool) or given < 1:
            raise argument_error(call, "block_size", given, "Pass a positive integer, e.g. `1000`.")
        return given
    pairs = int(np.prod(x1.shape[1:3])) if len(x1.shape) == 4 else 1
    pairs = pairs**2 if needs_pixels(net) else pairs
    if isinstance(x1, jax.core.Tracer) or isinstance(x2, jax.core.Tracer):
        return None
    if x1.shape[0] * (x1 if x2 is None else x2).shape[0] * pairs <= LARGEST:
        return None
    return max(1, int((BLOCK / pairs) ** 0.5))
