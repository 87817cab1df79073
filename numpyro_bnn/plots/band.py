"""Predictions along a one-dimensional input."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from numpyro_bnn._checks import argument_error
from numpyro_bnn.plots import _read, _style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["predictive_band"]


@_style.styled
def predictive_band(
    idata: Any,
    x: str | ArrayLike | None = None,
    levels: Sequence[float] = (0.5, 0.9),
    *,
    site: str | None = None,
    group: str | None = None,
    xlabel: str | None = None,
    ylabel: str | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """Mean and central intervals of the function and of observations along a one-dimensional input.

    Blue bands are the uncertainty about the function (epistemic, it shrinks with data); gray ones add the
    noise of an observation.

    :param idata: result of ``to_inference_data`` with the group ``predictions`` (else the data are drawn).
    :param x: name of the input, or (N,) values to draw against; by default the only input.
    :param levels: probabilities inside the bands.
    :param site: observed site; by default the only one.
    :param group: ``"predictions"`` or ``"posterior_predictive"``; by default the first of them there is.
    :param xlabel: label with units; by default the name and the attribute ``units`` of the input.
    :param ylabel: the same for the site.
    :param ax: axes to draw on; by default those of a new figure, one column wide.
    :return: the axes.
    :raises ValueError: if the predictions are not there, the site is a class label, the input is not
        one-dimensional or a level is not between 0 and 1.
    :raises ImportError: without Matplotlib.

    **Example**

    >>> from numpyro_bnn.plots import example_results
    >>> idata = example_results()  # for yours: to_inference_data(mcmc, predictions={"x": x_test, "y": y_test})
    >>> axes = predictive_band(idata, xlabel="distance [km]")
    >>> axes.get_xlabel(), axes.get_ylabel()
    ('distance [km]', 'y')
    """
    call = "plots.predictive_band"
    shares = sorted(_read.shares(call, "levels", levels), reverse=True)
    drawn = _read.predicted(call, idata, site, group)
    if drawn.classes:
        raise argument_error(
            call, "site", f"{drawn.site!r}, a class label", "Bands are for numbers; draw `plots.calibration`."
        )
    name, values = _read.input_values(call, idata, drawn, x)
    order = np.argsort(values, kind="stable")
    (axis,) = _style.axes(call, ax)
    if drawn.y is not None:
        _fill(axis, values[order], _flat(call, drawn.y)[:, order], shares, _style.OBSERVATION, drawn.site)
    if drawn.function is not None:
        function = _flat(call, drawn.function)[:, order]
        _fill(axis, values[order], function, shares, _style.FUNCTION, "function")
        axis.plot(values[order], function.mean(axis=0), color=_style.FUNCTION, label="function mean")
    points = _read.training_points(idata, drawn.site, name)
    if points is not None:
        size = float(np.clip(60 / np.sqrt(len(points[0])), 1.0, 8.0))
        axis.scatter(*points, s=size, color=_style.DATA, linewidths=0, zorder=3, label="data")
    axis.set_xlabel(xlabel or ("x" if name is None else _read.label(idata, drawn.group, name)))
    axis.set_ylabel(ylabel or _read.label(idata, drawn.group, drawn.site))
    ends = values if points is None else np.concatenate([values, points[0]])
    axis.set_xlim(ends.min(), ends.max())
    axis.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=3, borderaxespad=0.2)
    return axis


def _flat(call: str, draws: NDArray[np.float64]) -> NDArray[np.float64]:
    """Draws (C, S, N) or (C, S, N, 1), as (C S, N)."""
    if draws[0, 0].size != draws.shape[2]:
        raise argument_error(
            call,
            "site",
            f"a site of shape {draws.shape[2:]}",
            "Bands are for one output: draw each by itself.",
        )
    return draws.reshape(-1, draws.shape[2])


def _fill(
    axis: "Axes", x: NDArray, draws: NDArray[np.float64], shares: Sequence[float], color: str, name: str
) -> None:
    """Nested central intervals, the widest first and palest."""
    for place, share in enumerate(shares, start=1):
        low, high = np.quantile(draws, [(1 - share) / 2, (1 + share) / 2], axis=0, method="weibull")
        # Opaque tones: overlapping transparent ones would show levels that do not exist.
        strength = 0.15 + 0.35 * place / len(shares)
        tone = 1 - strength * (1 - np.asarray(_rgb(color)))
        axis.fill_between(x, low, high, color=tone, linewidth=0, label=f"{name}, {100 * share:g} %")


def _rgb(color: str) -> tuple[float, ...]:
    return tuple(int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
