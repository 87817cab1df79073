"""Draws in the folder of a run as ArviZ groups: checked once, and read from disk when
they are used.
"""

import json
from os import PathLike
from typing import Any

import jax
import numpy as np

from numpyro_bnn import _arviz
from numpyro_bnn._types import Sites, Trees
from numpyro_bnn.results.fit import CALL, sample_stats
from numpyro_bnn.results.layout import SAMPLE_DIMS, parameter_dims
from numpyro_bnn.runs.draws import SITES, STATISTICS, StoredDraws, blocks_in
from numpyro_bnn.runs.folder import DAMAGE, RESTORE, FolderPath, digest


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
