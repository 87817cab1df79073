"""Draws of a Gaussian-process posterior in the groups of every other result."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from scipy.stats import norm

from numpyro_bnn import _arviz, _checks
from numpyro_bnn._checks import argument_error, unknown_name
from numpyro_bnn.infinite import GPRegression

__all__ = ["process_attrs", "process_groups"]

CALL = "to_inference_data"


def process_groups(
    gp: GPRegression,
    predictions: Mapping[str, Any] | None,
    rng_key: jax.Array,
    num_samples: int,
    log_likelihood: bool,
    posterior_predictive: bool,
    coords: Mapping[str, Any],
) -> dict[str, Any]:
    """Groups of a :class:`~numpyro_bnn.infinite.GPRegression`: independent draws of the function, one chain.

    ``posterior`` has the function ``f`` at the training inputs; the arguments are called ``x`` and ``y``.

    >>> import numpy as np
    >>> from numpyro_bnn import infinite, nn
    >>> x = np.linspace(-1, 1, 4)[:, None]
    >>> gp = infinite.gp_regression(nn.Dense(1), x, x[:, 0], noise_sd=0.1)
    >>> list(process_groups(gp, None, jax.random.key(0), 10, True, False, {}))
    ['posterior', 'log_likelihood', 'observed_data', 'constant_data']
    """
    new = _new_inputs(gp, predictions)
    train_key, new_key = jax.random.split(rng_key)
    at_data = _draws(gp, None, train_key, num_samples)
    groups = {"posterior": _sampled({"f": at_data["y_mean"]}, coords)}
    if log_likelihood:
        density = norm.logpdf(gp.y, at_data["y_mean"], gp.noise_sd)
        groups["log_likelihood"] = _sampled({"y": density}, coords)
    if posterior_predictive:
        groups["posterior_predictive"] = _sampled(at_data, coords)
    groups["observed_data"] = _constant({"y": gp.y}, coords)
    groups["constant_data"] = _constant({"x": gp.x}, coords)
    if new is not None:
        values = _draws(gp, new["x"], new_key, num_samples)
        if "y" in new:
            values["y_log_likelihood"] = norm.logpdf(new["y"], values["y_mean"], gp.noise_sd)
        groups["predictions"] = _sampled(values, coords)
        groups["predictions_constant_data"] = _constant(new, coords)
    return groups


def process_attrs(gp: GPRegression, num_samples: int) -> dict[str, Any]:
    """Algorithm and settings.

    >>> import numpy as np
    >>> from numpyro_bnn import infinite, nn
    >>> gp = infinite.gp_regression(nn.Dense(1), np.eye(2), np.ones(2), noise_sd=0.1)
    >>> process_attrs(gp, 10)["algorithm"]
    'GPRegression'
    """
    return {
        "algorithm": type(gp).__name__,
        "num_samples": num_samples,
        "network": str(gp.net),
        "prior": str(gp.prior),
        "noise_sd": gp.noise_sd,
        "log_marginal_likelihood": gp.log_marginal_likelihood,
        "jitter": gp.jitter,
    }


def _new_inputs(gp: GPRegression, predictions: Mapping[str, Any] | None) -> dict[str, np.ndarray] | None:
    if predictions is None:
        return None
    for name in predictions:
        if name not in ("x", "y"):
            raise unknown_name(CALL, "predictions", name, ["x", "y"])
    if "x" not in predictions:
        instead = 'Write `predictions={"x": x_test}`.'
        raise argument_error(CALL, "predictions", "no value for 'x'", instead)
    new = {name: np.asarray(value) for name, value in predictions.items()}
    for name, old in (("x", gp.x), ("y", gp.y)):
        if name in new:
            _checks.check_finite(CALL, f"predictions[{name!r}]", new[name])
            if new[name].shape[1:] != old.shape[1:] or new[name].ndim != old.ndim:
                instead = f"Pass (M, *{old.shape[1:]}), one row per new point."
                raise argument_error(CALL, f"predictions[{name!r}]", f"shape {new[name].shape}", instead)
    _checks.check_same_length(CALL, **new)
    return new


def _draws(gp: GPRegression, x: Any, rng_key: jax.Array, num_samples: int) -> dict[str, np.ndarray]:
    """The function, and observations of it, (1, S, M, ...)."""
    function_key, noise_key = jax.random.split(rng_key)
    f = gp.sample(function_key, x, (1, num_samples))
    noise = np.asarray(jax.random.normal(noise_key, f.shape), f.dtype)
    return {"y": f + gp.noise_sd * noise, "y_mean": f}


def _sampled(values: Mapping[str, np.ndarray], coords: Mapping[str, Any]) -> Any:
    return _arviz.dataset(
        {k: (("chain", "draw", *_axes(k, v.ndim - 2)), v) for k, v in values.items()}, coords
    )


def _constant(values: Mapping[str, np.ndarray], coords: Mapping[str, Any]) -> Any:
    return _arviz.dataset({k: (_axes(k, v.ndim), v) for k, v in values.items()}, coords)


def _axes(name: str, rank: int) -> tuple[str, ...]:
    return ("data", *(f"{name}_dim_{i}" for i in range(1, rank)))
