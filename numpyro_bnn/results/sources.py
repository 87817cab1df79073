"""Groups of results that are not draws of a model in memory: a Gaussian process, and
the folder of a run, whose draws are checked once and read when they are used.
"""

import inspect
import json
from collections.abc import Mapping
from os import PathLike
from typing import Any

import jax
import numpy as np
from jax import Array

from numpyro_bnn import _arviz
from numpyro_bnn._checks import argument_error
from numpyro_bnn._types import Attributes, Sites, Trees
from numpyro_bnn.infinite import GPRegression
from numpyro_bnn.program.arguments import Arguments
from numpyro_bnn.results.arguments import for_prediction
from numpyro_bnn.results.fit import CALL, sample_stats
from numpyro_bnn.results.layout import SAMPLE_DIMS, parameter_dims
from numpyro_bnn.runs.draws import SITES, STATISTICS, StoredDraws, blocks_in
from numpyro_bnn.runs.folder import DAMAGE, RESTORE, FolderPath, digest

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


def from_folder(
    folder: str | PathLike, more: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Groups and attributes of the draws that are in a folder by now, also while
    another process adds some.

    :param more: whether the model is needed as well.
    :raises ValueError: for a folder that is not one of a run, or has no draws yet.
    """
    place = FolderPath.of(CALL, "result", folder)
    path = place.path
    if more:
        instead = (
            "A folder has no model: pass what `runs.start` returns, the same call with "
            "the same folder."
        )
        raise place.error("of which something is to be computed", instead)
    if not path.is_dir() or not (path / "run.json").exists():
        instead = "Pass the folder of `runs.start`, or what that call returned."
        raise place.error("which is not the folder of a run", instead)
    record = place.record()
    if "variables" not in record:
        raise place.error(
            "the folder of a fit, which has no draws",
            "Pass what `runs.fit` returned, and `guide=`.",
        )
    saved = place.latest(digest(json.dumps(record)))
    num_draws = saved.notes["draws"] if saved else 0
    if not saved or not num_draws:
        raise place.error(
            "a run without draws so far", "Wait until its warm-up has ended."
        )
    described = record["description"]
    draws = StoredDraws(
        place, int(described["num_chains"]), _likes(record["variables"])
    )
    draws.blocks = blocks_in(saved.arrays)
    draws.check()
    try:
        posterior = _named(
            _arviz.zarr_group(path / "draws.zarr", SITES, num_draws),
            record["variables"][SITES],
        )
    except DAMAGE as cause:
        raise place.error("whose draws.zarr is damaged", RESTORE) from cause
    # As the export of a run has it, functions of the data are no parameters.
    posterior = posterior.drop_vars(record["functions"], errors="ignore")
    stats = sample_stats(draws.read(STATISTICS))
    stat_variables = {
        name: (SAMPLE_DIMS + parameter_dims(name, v.shape[2:]), v)
        for name, v in stats.items()
    }
    attrs = {
        "algorithm": described["kernel"],
        "num_samples": num_draws,
        "folder": str(path),
    }
    for name in ("num_chains", "num_warmup", "thinning"):
        attrs[name] = int(described[name])
    return {
        SITES: posterior,
        STATISTICS: _arviz.dataset(stat_variables),
    }, attrs


def _named(posterior: Any, variables: Trees) -> Any:
    """The draws with the names of axes that exports have; a ``ValueError`` if they do
    not have those of a run.
    """
    for name in variables:
        dims = posterior[name].dims
        if dims != (*SAMPLE_DIMS, *(f"{name}_dim_{i}" for i in range(len(dims) - 2))):
            raise ValueError("other axes")
        exported_dims = (*SAMPLE_DIMS, *parameter_dims(name, posterior[name].shape[2:]))
        posterior = posterior.rename(
            {a: b for a, b in zip(dims, exported_dims, strict=True) if a != b}
        )
    return posterior[list(variables)]


def _likes(
    variables: Sites,
) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
    """Shapes and dtypes of one draw, as the record of a run has them."""
    likes: dict[str, dict[str, jax.ShapeDtypeStruct]] = {}
    for group, values in variables.items():
        likes[group] = {}
        for name, (dtype, shape) in values.items():
            likes[group][name] = jax.ShapeDtypeStruct(tuple(shape), np.dtype(dtype))
    return likes
