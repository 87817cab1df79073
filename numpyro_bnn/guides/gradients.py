"""The variance of a gradient estimator, for comparing ELBOs."""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpyro.infer import SVI
from numpyro.infer.elbo import ELBO
from numpyro.optim import SGD

from numpyro_bnn._checks import argument_error
from numpyro_bnn._plates import random_indices
from numpyro_bnn._programs import CACHE_SIZE, Signature, refuse_tracers, signature
from numpyro_bnn._table import text_table

__all__ = ["GradientVariance", "gradient_variance"]

CALL = "guides.gradient_variance"


class Estimate(NamedTuple):
    """A Monte Carlo estimate and its standard error."""

    value: float
    se: float


class GradientVariance(NamedTuple):
    """Mean and variance of the gradient of a loss over draws and minibatches; prints as a table.

    :param mean: the mean gradient by parameter.
    :param variance: the variance of each element, by parameter.
    :param by_parameter: the variance summed over the elements of a parameter, with its standard error.
    :param total: the variance summed over all parameters, with its standard error.
    :param num_draws: gradients it was measured with.
    """

    mean: dict[str, jax.Array]
    variance: dict[str, jax.Array]
    by_parameter: dict[str, Estimate]
    total: Estimate
    num_draws: int

    def __str__(self) -> str:
        rows = [
            [name, f"{found.value:.4g}", f"{found.se:.2g}", f"{_norm(self.mean.get(name, self.mean)):.4g}"]
            for name, found in [*self.by_parameter.items(), ("all", self.total)]
        ]
        return text_table(["parameter", "variance", "se", "norm of mean"], rows)


def gradient_variance(
    loss: ELBO,
    model: Callable,
    guide: Callable,
    params: Mapping[str, Any],
    *args: Any,
    rng_key: jax.Array,
    num_draws: int = 1000,
    **kwargs: Any,
) -> GradientVariance:
    r"""Measure the variance of the gradient that SVI follows, at given parameters.

    The gradient g of the loss is taken with respect to the unconstrained parameters, as optimizers see them;
    minibatches are drawn anew each time, so their noise is part of it. With :math:`T_s = |g_s - \bar g|^2`, the
    total variance is the mean of T_s and its standard error that of a mean. Memory does not grow with the draws.

    :param loss: the estimator, e.g. :class:`~numpyro.infer.elbo.Trace_ELBO`.
    :param model: a NumPyro model.
    :param guide: a NumPyro guide.
    :param params: where to measure: parameters of guide and model.
    :param args: arguments of the model.
    :param rng_key: key of the draws.
    :param num_draws: gradients to draw, at least 2.
    :param kwargs: keyword arguments of the model.
    :return: a :class:`GradientVariance`.
    :raises ValueError: for too few draws, or missing parameters.
    :raises TypeError: for a loss that is no ELBO.

    >>> import jax, numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import Trace_ELBO
    >>> def model():
    ...     numpyro.sample("z", dist.Normal(0.0, 1.0))
    >>> def guide():
    ...     numpyro.sample("z", dist.Normal(numpyro.param("mu", 1.0), 0.5))
    >>> found = gradient_variance(Trace_ELBO(), model, guide, {"mu": 1.0}, rng_key=jax.random.key(0))
    >>> error = found.total.value - 0.25            # d/dmu of z^2 / 2 is z = mu + 0.5 eps
    >>> abs(error) < 4 * found.total.se
    True
    """
    if not isinstance(loss, ELBO):
        raise argument_error(CALL, "loss", type(loss).__name__, "Pass e.g. `Trace_ELBO()`.", TypeError)
    if not isinstance(num_draws, int) or num_draws < 2:
        raise argument_error(CALL, "num_draws", num_draws, "Pass a whole number, 2 or more.")
    refuse_tracers(CALL, "Call it outside: it is compiled by itself.", args, kwargs, params, rng_key)
    fixed, arrays = signature(args, kwargs)
    svi, measure = _program(loss, model, guide, fixed)
    start_key, draws_key = jax.random.split(rng_key)
    state = svi.init(start_key, *args, init_params=dict(params), **kwargs)
    at = svi.optim.get_params(state.optim_state)
    missing = sorted(set(at) - set(params))
    if missing:
        instead = "Pass the parameters of guide and model, e.g. `svi.run(...).params`."
        raise argument_error(CALL, "params", f"no value for {', '.join(missing)}", instead)
    keys = jax.random.split(draws_key, num_draws)
    mean, variance, squares = jax.device_get(measure(at, state.mutable_state, arrays, keys))
    by_parameter = {name: _estimate(values) for name, values in squares.items()}
    return GradientVariance(mean, variance, by_parameter, _estimate(sum(squares.values())), num_draws)


@lru_cache(maxsize=CACHE_SIZE)
def _program(loss: ELBO, model: Callable, guide: Callable, fixed: Signature) -> tuple[SVI, Callable]:
    """An SVI, which knows the constraints of parameters, and the compiled measurement."""
    svi = SVI(model, guide, SGD(0.0), loss)

    @jax.jit
    def measure(at: Any, mutable: Any, arrays: list, keys: jax.Array) -> tuple:
        args, kwargs = fixed.call(arrays)

        def value(at: Any, key: jax.Array) -> jax.Array:
            given = {**svi.constrain_fn(at), **(mutable or {})}
            with random_indices():
                return loss.loss(key, given, model, guide, *args, **kwargs)

        return _moments(lambda key: jax.grad(value)(at, key), at, keys)

    return svi, measure


def _moments(gradient: Callable, at: Any, keys: jax.Array) -> tuple:
    """Mean, variance by element, and squared distance from the mean by draw and parameter."""
    zero, number = jax.tree.map(jnp.zeros_like, at), keys.shape[0]

    def add(mean: Any, step: tuple) -> tuple:
        count, key = step
        return jax.tree.map(lambda m, g: m + (g - m) / count, mean, gradient(key)), None

    counts = jnp.arange(1, number + 1)
    mean, _ = lax.scan(add, zero, (counts, keys))

    # The same gradients once more: sums of squares around the mean lose no digits.
    def square(total: Any, key: jax.Array) -> tuple:
        squares = jax.tree.map(lambda g, m: (g - m) ** 2, gradient(key), mean)
        total = jax.tree.map(lambda t, s: t + s / (number - 1), total, squares)
        return total, {name: jnp.sum(value) for name, value in squares.items()}

    return mean, *lax.scan(square, zero, keys)


def _estimate(squares: Any) -> Estimate:
    values = np.asarray(squares, dtype=np.float64)
    size = len(values)
    return Estimate(float(values.sum() / (size - 1)), float(values.std(ddof=1) / np.sqrt(size)))


def _norm(tree: Any) -> float:
    return float(np.sqrt(sum(np.sum(np.square(np.asarray(leaf, float))) for leaf in jax.tree.leaves(tree))))
