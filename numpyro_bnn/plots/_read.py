"""Read from ArviZ 0.x or 1.x results what the figures need."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from numpyro_bnn import _arviz
from numpyro_bnn._checks import argument_error, as_floats
from numpyro_bnn._options import Choice
from numpyro_bnn._types import Floats, InferenceData, PyTree
from numpyro_bnn.metrics._inputs import sound_chains

# Groups of draws, each with the group that holds its inputs.
INPUTS = {
    "predictions": "predictions_constant_data",
    "posterior_predictive": "constant_data",
}


class Drawn(NamedTuple):
    """Draws of one site in one group; ``function`` is its mean, or class probabilities
    (``classes``).

    ``observed`` are the values against which to score it, if there are any.
    """

    site: str
    group: str
    y: Floats | None
    function: Floats | None
    classes: bool
    observed: Any

    def targets(self) -> Floats:
        """The observed values as one axis; call ``predicted`` with ``scored`` first."""
        return np.asarray(self.observed, dtype=np.float64).ravel()

    def class_probabilities(self, call: str) -> Floats:
        """Draws (C, S, N, K) of class probabilities; the mean of a label 0 or 1 is the
        probability of 1.
        """
        mean = self.function
        if self.classes and mean is not None:
            return mean
        binary = self.y is None or bool(np.isin(self.y, (0.0, 1.0)).all())
        if (
            mean is None
            or mean.ndim != 3
            or not binary
            or mean.min() < 0
            or mean.max() > 1
        ):
            got = f"{self.site!r}, which is not a class label"
            raise argument_error(
                call, "site", got, "Class probabilities are needed: pass a classifier."
            )
        return np.stack([1 - mean, mean], axis=-1)


def predicted(
    call: str,
    idata: InferenceData,
    site: str | None,
    group: str | None,
    scored: bool = False,
    target: str | None = None,
) -> Drawn:
    """Draws of the site, from ``predictions`` if present (and, if ``scored``, with
    targets), else of the data.
    """
    name = _site_name(call, idata, site)
    targets = {}
    for drawn_group in INPUTS:
        if drawn_group in _arviz.group_names(idata):
            observed = _observed(call, idata, drawn_group, name, target)
            if observed is not None or not scored:
                targets[drawn_group] = observed
    if group is not None:
        Choice(targets).check(call, "group", group)
    if not targets:
        without = f"predictions{' and their targets' if scored else ''}"
        got = f"the groups {_arviz.group_names(idata)}, without {without}"
        instead = (
            f"Pass them to `to_inference_data`, e.g. `predictions={{'x': x_test, "
            f"{name!r}: y_test}}`."
        )
        raise argument_error(call, "idata", got, instead)
    drawn_group = group or next(iter(targets))
    data = _arviz.group(idata, drawn_group)
    classes = f"{name}_probs" in data
    function = f"{name}_probs" if classes else f"{name}_mean"
    draws: dict[str, PyTree] = {
        key: data[key].transpose("chain", "draw", ...)
        for key in (name, function)
        if key in data
    }
    sound = sound_chains(call, "idata", *draws.values()) if draws else None
    for key, value in draws.items():
        draws[key] = np.asarray(value, dtype=np.float64)[sound]
    y, mean = draws.get(name), draws.get(function)
    return Drawn(name, drawn_group, y, mean, classes, targets[drawn_group])


def input_values(
    call: str, idata: InferenceData, drawn: Drawn, x: Any
) -> tuple[str | None, NDArray]:
    """Name (None for values given by the user) and values (N,) of the one-dimensional
    input.
    """
    draws = drawn.function if drawn.y is None else drawn.y
    size = 0 if draws is None else draws.shape[2]
    if x is not None and not isinstance(x, str):
        values = as_floats(call, "x", x)
        if values.shape != (size,):
            raise argument_error(
                call,
                "x",
                f"shape {values.shape}",
                f"Pass one value for each of {size} points.",
            )
        return None, values
    data = _dataset(idata, INPUTS[drawn.group])
    inputs = [
        name
        for name in _names(data)
        if name != drawn.site and data[name].shape[:1] == (size,)
    ]
    if x is not None:
        Choice(inputs).check(call, "x", x)
    elif len(inputs) != 1:
        raise argument_error(
            call,
            "x",
            f"nothing, and there are {len(inputs)} inputs",
            f"Name one of {inputs}.",
        )
    name = inputs[0] if x is None else x
    values = np.asarray(data[name], dtype=np.float64)
    if values.size != size:
        instead = f"Pass {size} values to draw against, e.g. x[:, 0]."
        raise argument_error(call, "x", f"{name!r} of shape {values.shape}", instead)
    return name, values.ravel()


def training_points(
    idata: InferenceData, site: str, name: str | None
) -> tuple[NDArray, NDArray] | None:
    """Training inputs and targets, if both are present and one-dimensional."""
    inputs = _dataset(idata, "constant_data")
    observed = _dataset(idata, "observed_data")
    if (
        name not in inputs
        or site not in observed
        or inputs[name].size != observed[site].size
    ):
        return None
    return np.asarray(inputs[name]).ravel(), np.asarray(observed[site]).ravel()


def label(idata: InferenceData, group: str, name: str) -> str:
    """Axis label: the variable's ``long_name`` and ``units`` attributes
    if it has them.
    """
    for holder in (group, INPUTS[group], "observed_data"):
        data = _dataset(idata, holder)
        about = data[name].attrs if name in data else {}
        if about.keys() & {"long_name", "units"}:
            text = about.get("long_name", name)
            return f"{text} [{about['units']}]" if "units" in about else text
    return name


def _site_name(call: str, idata: InferenceData, site: str | None) -> str:
    """The site to draw: the one given, or the only observed one."""
    sites = _names(_dataset(idata, "observed_data"))
    if not sites:
        for group in INPUTS:
            for name in _names(_dataset(idata, group)):
                if name not in sites and not name.endswith(("_mean", "_probs")):
                    sites.append(name)
    if site is not None:
        return Choice(sites).check(call, "site", site)
    if len(sites) != 1:
        raise argument_error(
            call,
            "site",
            f"nothing, and there are {len(sites)} sites",
            f"Name one of {sites}.",
        )
    return sites[0]


def _observed(
    call: str, idata: InferenceData, group: str, site: str, target: str | None
) -> Any:
    """Observed values for a group of draws, or None."""
    if group == "posterior_predictive":
        return _dataset(idata, "observed_data").get(site)
    data = _dataset(idata, INPUTS[group])
    if target is None:
        return data.get(site)
    return data[Choice(_names(data)).check(call, "target", target)]


def _dataset(idata: InferenceData, group: str) -> Any:
    """The dataset of a group; empty if there is no such group."""
    return _arviz.group(idata, group) if group in _arviz.group_names(idata) else {}


def _names(data: Iterable[Any]) -> list[str]:
    return [str(name) for name in getattr(data, "data_vars", data)]
