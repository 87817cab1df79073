"""What the figures read from results, whichever ArviZ holds them."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from numpyro_bnn import _arviz
from numpyro_bnn._checks import argument_error, unknown_name

__all__ = [
    "Drawn",
    "chains_first",
    "class_probabilities",
    "count",
    "input_values",
    "is_results",
    "label",
    "one_output",
    "point_name",
    "posterior",
    "predicted",
    "shares",
    "site_name",
    "spread",
    "targets",
    "training_points",
]

# Each group of draws with the group that holds its inputs.
INPUTS = {"predictions": "predictions_constant_data", "posterior_predictive": "constant_data"}


class Drawn(NamedTuple):
    """Draws of one site in one group; ``function`` is its mean, or class probabilities (``classes``).

    ``observed`` are the values to score it by, if there are any.
    """

    site: str
    group: str
    y: NDArray[np.float64] | None
    function: NDArray[np.float64] | None
    classes: bool
    observed: Any


def site_name(call: str, idata: Any, site: str | None) -> str:
    """The site to draw: the one given, or the only one observed."""
    names = _arviz.group_names(idata)
    if "observed_data" in names:
        known = _names(_arviz.group(idata, "observed_data"))
    else:
        drawn = [name for group in INPUTS if group in names for name in _names(_arviz.group(idata, group))]
        known = list(dict.fromkeys(name for name in drawn if not name.endswith(("_mean", "_probs"))))
    if site is not None and site not in known:
        raise unknown_name(call, "site", site, known)
    if site is None and len(known) != 1:
        raise argument_error(
            call, "site", f"nothing, and there are {len(known)} sites", f"Name one of {known}."
        )
    return known[0] if site is None else site


def predicted(
    call: str,
    idata: Any,
    site: str | None,
    group: str | None = None,
    scored: bool = False,
    target: str | None = None,
) -> Drawn:
    """Draws of the site, from ``predictions`` if there (and, if ``scored``, with targets), else of the data."""
    name = site_name(call, idata, site)
    held = {
        key: _target(call, idata, key, name, target) for key in INPUTS if key in _arviz.group_names(idata)
    }
    usable = [key for key, observed in held.items() if observed is not None or not scored]
    if group is not None and group not in usable:
        raise unknown_name(call, "group", group, usable)
    if not usable:
        raise argument_error(
            call,
            "idata",
            f"the groups {_arviz.group_names(idata)}, without predictions{' and their targets' if scored else ''}",
            f"Pass them to `to_inference_data`, e.g. `predictions={{'x': x_test, {name!r}: y_test}}`.",
        )
    chosen = group or usable[0]
    data = _arviz.group(idata, chosen)
    classes = f"{name}_probs" in data
    function = f"{name}_probs" if classes else f"{name}_mean"
    return Drawn(name, chosen, _draws(data, name), _draws(data, function), classes, held[chosen])


def targets(drawn: Drawn) -> NDArray[np.float64]:
    """The observed values of what was drawn, as one axis; call ``predicted`` with ``scored`` first."""
    return np.asarray(drawn.observed, dtype=np.float64).ravel()


def input_values(
    call: str, idata: Any, drawn: Drawn, x: str | ArrayLike | None
) -> tuple[str | None, NDArray]:
    """Name (None for values given by the user) and values (N,) of the one-dimensional input."""
    size = _size(drawn)
    if x is not None and not isinstance(x, str):
        values = np.asarray(x, dtype=np.float64)
        if values.shape != (size,):
            raise argument_error(
                call, "x", f"shape {values.shape}", f"Pass one value for each of {size} points."
            )
        return None, values
    group = INPUTS[drawn.group]
    data = _arviz.group(idata, group) if group in _arviz.group_names(idata) else {}
    known = [name for name in _names(data) if name != drawn.site and data[name].shape[:1] == (size,)]
    if x is not None and x not in known:
        raise unknown_name(call, "x", x, known)
    if x is None and len(known) != 1:
        raise argument_error(
            call, "x", f"nothing, and there are {len(known)} inputs", f"Name one of {known}."
        )
    name = known[0] if x is None else x
    values = np.asarray(data[name], dtype=np.float64)
    if values.size != size:
        raise argument_error(
            call,
            "x",
            f"{name!r} of shape {values.shape}",
            f"Pass {size} values to draw against, e.g. x[:, 0].",
        )
    return name, values.ravel()


def training_points(idata: Any, site: str, name: str | None) -> tuple[NDArray, NDArray] | None:
    """Training inputs and targets, if both are there and one-dimensional."""
    if name is None or not {"constant_data", "observed_data"} <= set(_arviz.group_names(idata)):
        return None
    inputs, observed = _arviz.group(idata, "constant_data"), _arviz.group(idata, "observed_data")
    if name not in inputs or site not in observed or inputs[name].size != observed[site].size:
        return None
    return np.asarray(inputs[name]).ravel(), np.asarray(observed[site]).ravel()


def count(call: str, argument: str, got: Any) -> None:
    """Check a number of bins or lines."""
    if not isinstance(got, (int, np.integer)) or got < 1:
        raise argument_error(call, argument, got, "Pass a whole number, at least 1.")


def shares(call: str, argument: str, levels: Iterable[float]) -> list[float]:
    """Check probabilities inside intervals."""
    found = [float(level) for level in levels]
    if not found or not all(0 < level < 1 for level in found):
        raise argument_error(call, argument, f"{found}", "Pass probabilities between 0 and 1, e.g. 0.9.")
    return found


def one_output(call: str, function: NDArray[np.float64], output: int) -> NDArray[np.float64]:
    """The function (C, S, N) of one class or output."""
    if function.ndim == 3:
        return function
    flat = function.reshape(*function.shape[:3], -1)
    if not -flat.shape[3] <= output < flat.shape[3]:
        raise argument_error(
            call, "output", output, f"The function has {flat.shape[3]}: pass 0..{flat.shape[3] - 1}."
        )
    return flat[..., output]


def class_probabilities(call: str, drawn: Drawn) -> NDArray[np.float64]:
    """Draws (C, S, N, K) of class probabilities; of a label 0 or 1 its mean is the probability of 1."""
    if drawn.classes and drawn.function is not None:
        return drawn.function
    mean = drawn.function
    drawn_labels = drawn.y is None or bool(np.isin(drawn.y, (0.0, 1.0)).all())
    if mean is None or mean.ndim != 3 or not drawn_labels or mean.min() < 0 or mean.max() > 1:
        raise argument_error(
            call,
            "site",
            f"{drawn.site!r}, no class label",
            "Class probabilities are needed: pass a classifier.",
        )
    return np.stack([1 - mean, mean], axis=-1)


def is_results(given: Any) -> bool:
    """Whether it is what ``to_inference_data`` gives, in either ArviZ, rather than a dictionary or an array."""
    try:
        _arviz.group_names(given)
    except TypeError:
        return False
    return True


def posterior(call: str, idata: Any) -> Any:
    """The group of draws of parameters."""
    names = _arviz.group_names(idata)
    if "posterior" not in names:
        raise argument_error(
            call, "idata", f"the groups {names}, without posterior", "Pass what `to_inference_data` gives."
        )
    return _arviz.group(idata, "posterior")


def chains_first(data: Any, name: str) -> NDArray[np.float64]:
    """Draws (C, S, ...) of one variable."""
    return np.asarray(data[name].transpose("chain", "draw", ...), dtype=np.float64)


def spread(call: str, points: int | Sequence[int], size: int) -> list[int]:
    """Indices of the points to draw."""
    if isinstance(points, (int, np.integer)):
        if points < 1:
            raise argument_error(call, "points", points, "Pass at least 1, or indices.")
        return sorted({int(i) for i in np.linspace(0, size - 1, min(int(points), size)).round()})
    chosen = [int(i) for i in points]
    if not chosen or not all(0 <= i < size for i in chosen):
        raise argument_error(call, "points", chosen, f"Pass indices between 0 and {size - 1}.")
    return chosen


def point_name(idata: Any, drawn: Drawn, point: int) -> str:
    """The value of a one-dimensional input where there is just one, else the index of the point."""
    try:
        name, values = input_values("", idata, drawn, None)
    except ValueError:
        return f"point {point}"
    return f"{name} = {values[point]:.3g}"


def label(idata: Any, group: str, name: str) -> str:
    """Text of an axis: the variable's ``long_name`` and ``units`` attributes where it has them."""
    for held in (group, INPUTS[group], "observed_data"):
        if held in _arviz.group_names(idata) and name in _arviz.group(idata, held):
            about = _arviz.group(idata, held)[name].attrs
            if about.keys() & {"long_name", "units"}:
                text = about.get("long_name", name)
                return f"{text} [{about['units']}]" if "units" in about else text
    return name


def _names(data: Iterable[Any]) -> list[str]:
    return [str(name) for name in getattr(data, "data_vars", data)]


def _size(drawn: Drawn) -> int:
    held = drawn.function if drawn.y is None else drawn.y
    return 0 if held is None else held.shape[2]


def _draws(data: Any, name: str) -> NDArray[np.float64] | None:
    """Draws (C, S, N, ...), or None where there is no such variable."""
    if name not in data:
        return None
    return chains_first(data, name)


def _target(call: str, idata: Any, group: str, site: str, target: str | None) -> Any:
    """Observed values for a group of draws, or None."""
    held = "observed_data" if group == "posterior_predictive" else INPUTS[group]
    data = _arviz.group(idata, held) if held in _arviz.group_names(idata) else {}
    if group == "posterior_predictive" or target is None:
        return data.get(site)
    if target not in data:
        raise unknown_name(call, "target", target, _names(data))
    return data[target]
