"""Draws in the folder of a run as ArviZ groups, read from disk when they are used."""

import json
from os import PathLike
from pathlib import Path
from typing import Any

from numpyro_bnn import _arviz
from numpyro_bnn._checks import argument_error
from numpyro_bnn.results.exporter import SAMPLE_DIMS, parameter_dims
from numpyro_bnn.results.fit import sample_stats
from numpyro_bnn.results.replay import CALL
from numpyro_bnn.runs.draws import SITES, STATISTICS
from numpyro_bnn.runs.folder import last_notes


def from_folder(folder: str | PathLike, more: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Groups and attributes of the draws that are in a folder by now, also while another process adds some.

    :param more: whether the model is needed as well.
    :raises ValueError: for a folder that is not one of a run, or has no draws yet.
    """
    path = Path(folder)
    if more:
        instead = "A folder has no model: pass what `runs.start` returns, the same call with the same folder."
        raise argument_error(CALL, "result", f"{str(path)!r}, of which something is to be computed", instead)
    try:
        described = json.loads((path / "run.json").read_text())["description"]
    except (OSError, ValueError, KeyError) as cause:
        instead = "Pass the folder of `runs.start`, or what that call returned."
        raise argument_error(CALL, "result", f"{str(path)!r}, which is not the folder of a run", instead) from cause
    draws = last_notes(path).get("draws", 0)
    if not draws:
        instead = "Wait until its warm-up has ended."
        raise argument_error(CALL, "result", f"{str(path)!r}, a run without draws so far", instead)
    posterior, stats = (_arviz.zarr_group(path / "draws.zarr", name, draws) for name in (SITES, STATISTICS))
    for name, variable in posterior.data_vars.items():
        named = (*SAMPLE_DIMS, *parameter_dims(str(name), variable.shape[2:]))
        posterior = posterior.rename({a: b for a, b in zip(variable.dims, named, strict=True) if a != b})
    values = {str(name): variable.to_numpy() for name, variable in stats.data_vars.items()}
    found = {name: (SAMPLE_DIMS + parameter_dims(name, v.shape[2:]), v) for name, v in sample_stats(values).items()}
    attrs = {"algorithm": described["kernel"], "num_samples": draws, "folder": str(path)}
    numbers = {name: int(described[name]) for name in ("num_chains", "num_warmup", "thinning")}
    return {SITES: posterior, STATISTICS: _arviz.dataset(found)}, attrs | numbers
