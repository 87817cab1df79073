"""Draws of a Gaussian-process posterior, in the same groups as all other results."""

import inspect
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax import Array

from numpyro_bnn import _arviz
from numpyro_bnn._checks import argument_error
from numpyro_bnn._types import Attributes, Trees
from numpyro_bnn.infinite import GPRegression
from numpyro_bnn.program.arguments import Arguments
from numpyro_bnn.results.arguments import for_prediction
from numpyro_bnn.results.fit import CALL
from numpyro_bnn.results.layout import SAMPLE_DIMS

SIGNATURE = inspect.signature(lambda x, y=None: None)


def process_groups(
    gp: GPRegression,
    predictions: Trees | None,
    rng_key: Array,
    num_samples: int,
    log_likelihood: bool,
    posterior_predictive: bool,
    coords: Trees,
    prediction_coords: Trees,
) -> dict[str, Any]:
    """Groups of a :class:`~numpyro_bnn.infinite.GPRegression`: independent draws of the
    function, one chain.

    ``posterior`` has the function ``f`` at the training inputs; the arguments are
    called ``x`` and ``y``.

    >>> import numpy as np
    >>> from numpyro_bnn import infinite, nn
    >>> x = np.linspace(-1, 1, 4)[:, None]
    >>> gp = infinite.gp_regression(nn.Dense(1), x, x[:, 0], noise_sd=0.1)
    >>> list(process_groups(gp, None, jax.random.key(0), 10, True, False, {}, {}))
    ['posterior', 'log_likelihood', 'observed_data', 'constant_data']
    """

    from scipy.stats import norm

    new = None if predictions is None else _new_inputs(gp, predictions)
    train_key, new_key = jax.random.split(rng_key)
    at_data = _draws(gp, None, train_key, num_samples)
    drawn = {"posterior": {"f": at_data["y_mean"]}}
    if log_likelihood:
        density = norm.logpdf(gp.y, at_data["y_mean"], gp.noise_sd)
        drawn["log_likelihood"] = {"y": density}
    if posterior_predictive:
        drawn["posterior_predictive"] = at_data
    groups = {name: _dataset(drawn[name], coords, SAMPLE_DIMS) for name in drawn}
    groups["observed_data"] = _dataset({"y": gp.y}, coords)
    groups["constant_data"] = _dataset({"x": gp.x}, coords)
    if new is not None:
        values = _draws(gp, new["x"], new_key, num_samples)
        if "y" in new:
            density = norm.logpdf(new["y"], values["y_mean"], gp.noise_sd)
            values["y_log_likelihood"] = density
        groups["predictions"] = _dataset(values, prediction_coords, SAMPLE_DIMS)
        groups["predictions_constant_data"] = _dataset(new, prediction_coords)
    return groups


def _dataset(
    values: Mapping[str, np.ndarray],
    coords: Trees,
    sample_dims: tuple[str, ...] = (),
) -> Any:
    variables = {}
    for name, value in values.items():
        more = range(1, value.ndim - len(sample_dims))
        dims = (*sample_dims, "data", *(f"{name}_dim_{i}" for i in more))
        variables[name] = dims, value
    return _arviz.dataset(variables, coords)


def process_attrs(gp: GPRegression, num_samples: int) -> Attributes:
    """Algorithm and settings."""
    return {
        "algorithm": type(gp).__name__,
        "num_samples": num_samples,
        "independent_draws": True,
        "network": str(gp.net),
        "prior": str(gp.prior),
        "noise_sd": gp.noise_sd,
        "log_marginal_likelihood": gp.log_marginal_likelihood,
        "jitter": gp.jitter,
    }


def _new_inputs(gp: GPRegression, predictions: Trees) -> dict[str, np.ndarray]:
    new = {name: np.asarray(value) for name, value in predictions.items()}
    for_prediction(Arguments({"x": gp.x, "y": gp.y}, SIGNATURE), new, {"y"})
    if "x" not in new:
        raise argument_error(
            CALL,
            "predictions",
            "no value for 'x'",
            'Write `predictions={"x": x_test}`.',
        )
    return new


def _draws(
    gp: GPRegression, x: Any, rng_key: Array, num_samples: int
) -> dict[str, np.ndarray]:
    """The function, and observations of it, (1, S, M, ...)."""
    function_key, noise_key = jax.random.split(rng_key)
    f = gp.sample(function_key, x, (1, num_samples))
    noise = np.asarray(jax.random.normal(noise_key, f.shape), f.dtype)
    return {"y": f + gp.noise_sd * noise, "y_mean": f}
