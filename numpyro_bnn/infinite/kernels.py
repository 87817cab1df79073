"""Kernels of infinitely wide networks, of their prior and their training, and of one
network of finite width.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike

from numpyro_bnn._checks import argument_error, check_finite
from numpyro_bnn._options import PositiveInt, Switch, checked
from numpyro_bnn.infinite.prior_moments import (
    PriorMoments,
    Scales,
    prior_moments,
    weight_fan_in,
)
from numpyro_bnn.infinite.rules import Context, Inputs, Units, contains, propagate
from numpyro_bnn.nn import BatchNorm, Layer
from numpyro_bnn.nn.base import Net, Params
from numpyro_bnn.priors.base import PriorLike

# Number of pairs of data points beyond which a kernel is computed in blocks, and the
# rows of a block.
LARGEST = 2**24
BLOCK_SIZE = 512
# Numbers in the Jacobian of one block of data points: 128 MiB in float32.
JACOBIAN = 2**25
BlockSize: TypeAlias = PositiveInt | None


@checked("infinite.nngp")
def nngp(
    net: Net,
    x1: ArrayLike,
    x2: ArrayLike | None = None,
    *,
    prior: PriorLike | None = None,
    scales: Scales = None,
    block_size: BlockSize = None,
) -> Array | np.ndarray:
    r"""Prior covariance of the outputs of a network as its hidden layers get infinitely
    wide (the NNGP kernel).

    Each output is a Gaussian process, independent of the others, with E f(x) = 0 and E
    f(x) f(x') = K(x, x'). After a dense layer with w ~ N(0, s^2 / fan_in), b ~ N(0,
    sigma^2)

    .. math:: K'(x, x') = s^2 E[f f'] + \sigma^2, \qquad s^2 E[f f'] = s^2 x \cdot x' /
              D \text{ for the first layer,}

    and after an activation phi :math:`E[f f'] = E[\phi(u) \phi(u')]`, (u, u') normal
    with the covariances K: in closed form for identity, relu, leaky_relu, erf and gelu,
    by quadrature in two dimensions for the others. The widths of the specification do
    not matter if the prior scales by fan-in.

    :param net: a specification of ``Dense``, activations, ``LayerNorm``, ``Residual``
        and ``Sequential`` whose output has one axis and comes from weights; before the
        first weights any layers without parameters.
    :param x1: inputs ``(N1, *input_shape)``.
    :param x2: inputs ``(N2, *input_shape)``; by default ``x1``, at half the work.
    :param prior: as in :func:`~numpyro_bnn.random_network`; ``priors.Normal()`` by
        default. Weights of the inputs, biases and gains must be normal; other weights
        need only a variance.
    :param scales: values of the prior's hyper-sites, e.g. ``{"Dense_0.kernel_scale":
        0.7}``: a hierarchical prior is a mixture of Gaussian processes.
    :param block_size: rows and columns computed at once. By default everything, up to
        2^24 pairs of data points, as one differentiable JAX array; with a size, or
        beyond, a NumPy array filled block by block.
    :return: (N1, N2).
    :raises ValueError: for a layer or prior without a Gaussian limit, NaN, or shapes
        that do not fit.
    :raises TypeError: for any other kind of net or prior.

    References: Neal (1996), chapter 2; Lee et al. (2018), equations (4)-(5).

    >>> import jax.numpy as jnp
    >>> from numpyro_bnn import nn, priors
    >>> net = nn.MLP([512, 1], "relu")
    >>> nngp(net, jnp.eye(2), prior=priors.Normal(2.0, bias_scale=0.5)).round(
    ...     3
    ... ).tolist()
    [[4.75, 1.941...], [1.941..., 4.75]]
    """
    return _checked_kernel(
        "infinite.nngp", net, x1, x2, prior, scales, block_size, tangent=False
    )


@checked("infinite.ntk")
def ntk(
    net: Net,
    x1: ArrayLike,
    x2: ArrayLike | None = None,
    *,
    prior: PriorLike | None = None,
    scales: Scales = None,
    block_size: BlockSize = None,
) -> Array | np.ndarray:
    r"""Neural tangent kernel: how gradient descent moves the outputs of an infinitely
    wide network.

    The parameters are v with w = mean + sd v, sd that of the prior: v ~ N(0, 1) (the
    NTK parametrization; in w itself the kernel would grow with the width). With T the
    sum over all v of df/dv df'/dv, a dense layer turns the kernel T of its inputs into

    .. math:: T'(x, x') = K'(x, x') + s^2 T(x, x'),

    an activation phi, with derivative :math:`\dot\phi`, turns it into :math:`T(x, x')\,
    E[\dot\phi(u) \dot\phi(u')]`,

    and gradient descent on v is gradient descent on w with every step multiplied by the
    prior variance.

    Arguments, errors and blocks are those of :func:`nngp`.

    :return: (N1, N2), the same for every output; between different outputs it is 0.

    Reference: Jacot, Gabriel & Hongler (2018), theorem 1.

    >>> import jax.numpy as jnp
    >>> from numpyro_bnn import nn
    >>> ntk(
    ...     nn.MLP([512, 1], "identity"), jnp.eye(2)
    ... ).tolist()  # K' = x.x'/2 + 2, T_in = x.x'/2 + 1
    [[4.0, 3.0], [3.0, 4.0]]
    """
    return _checked_kernel(
        "infinite.ntk", net, x1, x2, prior, scales, block_size, tangent=True
    )


def prior_variance(
    call: str, net: Layer, x: Any, prior: PriorLike | None, scales: Scales
) -> Array:
    """The diagonal of :func:`nngp`: the prior variance of the outputs at every input,
    (N,).
    """
    x = _inputs(call, "x", x)
    moments = _prior_moments(call, net, x, prior, scales)
    dtype = jnp.result_type(x, float)
    sites = jax.tree.map(lambda value: jnp.asarray(value, dtype), moments.sites)

    def variance(row: Array) -> Array:
        pair = row[None], row[None]
        return _block(net, moments.normal, False, sites, *pair)[0, 0]

    return jax.vmap(variance)(jnp.asarray(x, dtype))


def _checked_kernel(
    call: str,
    net: Layer,
    x1: Any,
    x2: Any,
    prior: PriorLike | None,
    scales: Scales,
    block_size: BlockSize,
    tangent: bool,
) -> Any:
    x1 = _inputs(call, "x1", x1)
    x2 = None if x2 is None else _inputs(call, "x2", x2)
    if x2 is not None and x1.shape[1:] != x2.shape[1:]:
        raise argument_error(
            call, "x2", f"shape {x2.shape}", f"Pass (N2, *{x1.shape[1:]}), like x1."
        )
    moments = _prior_moments(call, net, x1, prior, scales)
    num_pairs = len(x1) * len(x1 if x2 is None else x2)
    traced = isinstance(x1, jax.core.Tracer) or isinstance(x2, jax.core.Tracer)
    if block_size is None and num_pairs > LARGEST and not traced:
        block_size = BLOCK_SIZE
    return kernel(net, moments.sites, moments.normal, x1, x2, tangent, block_size)


def kernel(
    net: Layer,
    sites: Mapping,
    normal: frozenset[str],
    x1: Any,
    x2: Any = None,
    tangent: bool = False,
    block_size: BlockSize = None,
) -> Array | np.ndarray:
    """The prior covariance, or the ``tangent`` kernel, for given moments of the
    parameters.
    """
    dtype = jnp.result_type(x1, float) if x2 is None else jnp.result_type(x1, x2, float)
    sites = jax.tree.map(lambda value: jnp.asarray(value, dtype), dict(sites))
    block = partial(_block, net, normal, tangent, sites)
    if block_size is not None:
        x2 = None if x2 is None else np.asarray(x2, dtype)
        x1 = np.asarray(x1, dtype)
        return _in_blocks(lambda rows: partial(block, rows), x1, x2, block_size)
    x1 = jnp.asarray(x1, dtype)
    if x2 is not None:
        return block(x1, jnp.asarray(x2, dtype))
    # Exactly symmetric; inside ``_block`` the compiler would compute it twice.
    kernel = block(x1, x1)
    return (kernel + kernel.T) / 2


def _prior_moments(
    call: str, net: Layer, x: Array, prior: PriorLike | None, scales: Scales
) -> PriorMoments:
    """Moments of a prior, for a network whose outputs have one axis."""
    moments = prior_moments(call, net, x.shape[1:], prior, scales)
    if len(out := net.output_shape(x.shape[1:])) != 1:
        instead = (
            "Put `nn.Flatten()` and a dense layer after it: kernels are those of "
            "outputs with one axis."
        )
        raise argument_error(call, "net", f"outputs of shape {out}", instead)
    return moments


@partial(jax.jit, static_argnums=(0, 1, 2))
def _block(
    net: Layer,
    normal: frozenset[str],
    tangent: bool,
    sites: Mapping,
    x1: Array,
    x2: Array,
) -> Any:
    out = propagate(net, Context(sites, normal, ntk=tangent), Inputs(x1, x2))
    if not isinstance(out, Units) or not out.gaussian:
        came = f"outputs of {type(net).__name__} that are not normal"
        instead = (
            "End it with `nn.Dense`: only sums over many weights become a Gaussian "
            "process."
        )
        raise argument_error("infinite", "net", came, instead)
    return out.k.ntk if tangent else out.k.nngp


def _in_blocks(
    of_rows: Callable[[np.ndarray], Callable],
    x1: np.ndarray,
    x2: np.ndarray | None,
    size: int,
) -> np.ndarray:
    """Fill a NumPy array (N1, N2, ...) with blocks of one shape, compiled once;
    mirrored where x2 is ``None``, and so x1.

    :param of_rows: from some rows of x1 to a function of rows of x2.
    """
    columns, symmetric = x1 if x2 is None else x2, x2 is None

    def part(x: np.ndarray, start: int) -> np.ndarray:
        # the last block is padded
        places = np.arange(start, start + min(size, len(x)))
        return x[np.minimum(places, len(x) - 1)]

    filled = np.empty((len(x1), len(columns)))
    for i in range(0, len(x1), size):
        of_columns = of_rows(part(x1, i))
        for j in range(i if symmetric else 0, len(columns), size):
            block = np.asarray(of_columns(part(columns, j)))
            block = block[: len(x1) - i, : len(columns) - j]
            if (i, j) == (0, 0):
                shape = *filled.shape, *block.shape[2:]
                filled = np.empty(shape, block.dtype)
            if symmetric:
                image = block.transpose(1, 0, *range(2, block.ndim)[::-1])
                block = (block + image) / 2 if i == j else block
                filled[j : j + size, i : i + size] = image
            filled[i : i + size, j : j + size] = block
    return filled


def _inputs(call: str, argument: str, value: Any) -> Any:
    check_finite(call, argument, value)
    if np.ndim(value) < 2:
        instead = "Pass one row per data point, (N, D), e.g. `x[:, None]`."
        raise argument_error(call, argument, f"shape {np.shape(value)}", instead)
    return value if hasattr(value, "dtype") else np.asarray(value)


@checked("infinite.empirical_ntk")
def empirical_ntk(
    net: Net,
    params: Params,
    x1: ArrayLike,
    x2: ArrayLike | None = None,
    *,
    prior: PriorLike | None = None,
    scales: Scales = None,
    full: Switch = False,
    block_size: BlockSize = None,
) -> Array | np.ndarray:
    r"""How gradient descent moves the outputs of one network: its neural tangent
    kernel.

    .. math:: T_{kl}(x, x') = \sum_w \mathrm{Var}(w)\, \frac{\partial f_k(x)}{\partial
              w}
              \frac{\partial f_l(x')}{\partial w},

    with the variances of the prior, that is the sum over standardized parameters v = (w
    - mean) / sd. For parameters drawn from the prior it tends to :func:`ntk` as the
    width grows. Jacobians are computed for one block of data points at a time and
    contracted; two of them, (B, K, P) with P parameters, are in memory.

    :param net: a specification without :class:`~numpyro_bnn.nn.BatchNorm`.
    :param params: its parameters, as ``net.init`` or a draw of the prior gives them.
    :param x1: inputs ``(N1, *input_shape)``.
    :param x2: inputs ``(N2, *input_shape)``; by default ``x1``.
    :param prior: as in :func:`nngp`; any prior with a finite variance.
    :param scales: values of its hyper-sites.
    :param full: all pairs of outputs, (N1, N2, K, K), rather than the mean over the
        outputs of T_kk.
    :param block_size: data points in a block; by default as many as keep a Jacobian
        near 2^25 numbers.
    :return: NumPy array (N1, N2), or (N1, N2, K, K).
    :raises ValueError: for parameters that do not fit, NaN, or a network with batch
        statistics.

    >>> import jax, jax.numpy as jnp
    >>> from numpyro_bnn import nn
    >>> net = nn.Dense(1)
    >>> empirical_ntk(
    ...     net, net.init(jax.random.key(0), (2,)), jnp.eye(2)
    ... ).tolist()  # x.x'/2 + 1
    [[1.5, 1.0], [1.0, 1.5]]
    """
    call = "infinite.empirical_ntk"
    for argument, value in (("x1", x1), ("x2", x2)):
        if value is not None:
            check_finite(call, argument, value)
    if not isinstance(params, Mapping):
        instead = "Pass one array for each parameter, as `net.init` or a draw has them."
        raise argument_error(call, "params", params, instead, TypeError)
    for name, value in params.items():
        check_finite(call, f"params[{name!r}]", value)
    shape = np.shape(x1)[1:]
    moments = prior_moments(call, net, shape, prior, scales)
    if contains(net, BatchNorm):
        instead = "Batch statistics have no kernel of two data points: use `LayerNorm`."
        raise argument_error(call, "net", "a network with `BatchNorm`", instead)
    expected = net.param_shapes(shape)
    got = {name: np.shape(value) for name, value in params.items()}
    if got != expected:
        raise argument_error(
            call, "params", got, f"Pass one array for each parameter: {expected}."
        )
    variances = {}
    for name, got_shape in got.items():
        variance = moments.sites[name].variance / weight_fan_in(name, got_shape)
        variances[name] = jnp.broadcast_to(variance, got_shape)
    flat_variances, _ = ravel_pytree(variances)
    outputs = int(np.prod(net.output_shape(shape)))
    size = block_size or max(1, JACOBIAN // (outputs * flat_variances.size))

    def of_rows(rows: np.ndarray) -> Callable:
        scaled = _jacobian(net, params, rows) * flat_variances

        def of_columns(columns: np.ndarray) -> Array:
            jacobian = _jacobian(net, params, columns)
            if full:
                formula, count = "akp,blp->abkl", 1
            else:
                formula, count = "akp,bkp->ab", outputs
            return jnp.einsum(formula, scaled, jacobian, precision="highest") / count

        return of_columns

    return _in_blocks(
        of_rows, np.asarray(x1), None if x2 is None else np.asarray(x2), size
    )


@partial(jax.jit, static_argnums=0)
def _jacobian(net: Layer, params: Params, x: Array) -> Array:
    """Derivatives of every output by all parameters, (B, K, P)."""
    flat, unravel = ravel_pytree(dict(params))

    def outputs(flat: Array, row: Array) -> Array:
        return net.apply(unravel(flat), row).reshape(-1)

    return jax.vmap(jax.jacrev(outputs), (None, 0))(flat, x)
