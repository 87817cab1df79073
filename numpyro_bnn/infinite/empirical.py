"""The tangent kernel of one network of finite width."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_bnn import _checks
from numpyro_bnn._checks import argument_error
from numpyro_bnn.infinite.moments import prior_moments
from numpyro_bnn.nn import BatchNorm, Layer, fan_in, role
from numpyro_bnn.nn.base import Params

__all__ = ["empirical_ntk"]

# Numbers in the Jacobian of one block of data points: 128 MiB in float32.
JACOBIAN = 2**25


def empirical_ntk(
    net: Layer,
    params: Params,
    x1: Any,
    x2: Any = None,
    *,
    prior: Any = None,
    scales: Mapping[str, Any] | None = None,
    full: bool = False,
    block_size: int | None = None,
) -> Any:
    r"""Neural tangent kernel of a network with given parameters.

    .. math:: T_{kl}(x, x') = \sum_w \mathrm{Var}(w)\, \frac{\partial f_k(x)}{\partial w}
              \frac{\partial f_l(x')}{\partial w},

    with the variances of the prior, that is the sum over standardized parameters v = (w - mean) / sd. For parameters
    drawn from the prior :func:`ntk` is its limit as the width grows. Jacobians are made for a block of data points at
    a time and contracted; two blocks of them, (B, K, P) with P parameters, are in memory.

    :param net: a specification without :class:`~numpyro_bnn.nn.BatchNorm`.
    :param params: its parameters, as ``net.init`` or a draw of the prior gives them.
    :param x1: inputs ``(N1, *input_shape)``.
    :param x2: inputs ``(N2, *input_shape)``; by default ``x1``.
    :param prior: as in :func:`nngp`; any with a variance.
    :param scales: values of its hyper-sites.
    :param full: all pairs of outputs, (N1, N2, K, K), rather than the mean over the outputs of T_kk.
    :param block_size: data points in a block; by default as many as keep a Jacobian near 2^25 numbers.
    :return: NumPy array (N1, N2), or (N1, N2, K, K).
    :raises ValueError: for parameters that do not fit, NaN, a network with batch statistics.

    >>> import jax, jax.numpy as jnp
    >>> from numpyro_bnn import nn
    >>> net = nn.Dense(1)
    >>> empirical_ntk(net, net.init(jax.random.key(0), (2,)), jnp.eye(2)).tolist()     # x.x'/2 + 1
    [[1.5, 1.0], [1.0, 1.5]]
    """
    call = "infinite.empirical_ntk"
    for argument, value in (("x1", x1), ("x2", x2)):
        if value is not None:
            _checks.check_finite(call, argument, value)
    shape = np.shape(x1)[1:]
    found = prior_moments(call, net, shape, prior, scales)
    _check(call, net, params, shape)
    weights = {
        name: jnp.asarray(found.sites[name].variance) / _fan_in(name, np.shape(value))
        for name, value in params.items()
    }
    outputs = int(np.prod(net.output_shape(shape)))
    size = block_size or max(1, JACOBIAN // (outputs * sum(np.size(p) for p in params.values())))
    first = np.asarray(x1)
    second = first if x2 is None else np.asarray(x2)
    result = np.empty((len(first), len(second), *((outputs, outputs) if full else ())), _dtype(params, first))
    for i in range(0, len(first), size):
        rows = _jacobian(net, params, first[i : i + size])
        scaled = {name: rows[name] * weights[name] for name in rows}
        for j in range(i if x2 is None else 0, len(second), size):
            block = np.asarray(_contracted(scaled, _jacobian(net, params, second[j : j + size]), full))
            result[i : i + size, j : j + size] = block
            if x2 is None and i != j:
                result[j : j + size, i : i + size] = (
                    block.swapaxes(0, 1).swapaxes(-1, -2) if full else block.T
                )
    return result


@partial(jax.jit, static_argnums=0)
def _jacobian(net: Layer, params: Params, x: jax.Array) -> dict[str, jax.Array]:
    """Derivatives of every output, (B, K, *shape) for each parameter."""

    def outputs(params: Params, row: jax.Array) -> jax.Array:
        return net.apply(params, row).reshape(-1)

    return jax.vmap(lambda row: jax.jacrev(outputs)(dict(params), row))(x)


@partial(jax.jit, static_argnums=2)
def _contracted(one: dict[str, jax.Array], other: dict[str, jax.Array], full: bool) -> jax.Array:
    """Sum over parameters, and the mean over outputs unless all pairs of them are wanted."""
    total: Any = 0.0
    for name, left in one.items():
        shape = (*left.shape[:2], -1)
        formula = "akp,blp->abkl" if full else "akp,bkp->ab"
        parts = left.reshape(shape), other[name].reshape((other[name].shape[0], *shape[1:]))
        total += jnp.einsum(formula, *parts, precision="highest")
    return total if full else total / next(iter(one.values())).shape[1]


def _fan_in(name: str, shape: tuple[int, ...]) -> int:
    return fan_in(name, shape) if role(name, shape) == "kernel" else 1


def _dtype(params: Params, x: np.ndarray) -> Any:
    return jnp.result_type(*params.values(), float)


def _check(call: str, net: Layer, params: Params, shape: tuple[int, ...]) -> None:
    if _has_batch_norm(net):
        instead = "Batch statistics have no kernel of two data points: use `LayerNorm`."
        raise argument_error(call, "net", "a network with `BatchNorm`", instead)
    expected = net.param_shapes(shape)
    got = {name: np.shape(value) for name, value in params.items()}
    if got != expected:
        instead = f"Pass one array for each parameter: {expected}."
        raise argument_error(call, "params", got, instead)


def _has_batch_norm(net: Layer) -> bool:
    return isinstance(net, BatchNorm) or any(_has_batch_norm(part) for _, part in net.children())
