"""Predictions along an input, and against the observed values."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numpyro_bnn import metrics
from numpyro_bnn._checks import argument_error
from numpyro_bnn._options import Kind, Level, Number, checked
from numpyro_bnn._types import ArrayLike, Floats, InferenceData
from numpyro_bnn.plots import _read, _style
from numpyro_bnn.plots._style import Axes


@_style.styled
def predictive_band(
    idata: InferenceData,
    x: str | ArrayLike | None = None,
    levels: Sequence[float] = (0.5, 0.9),
    *,
    site: str | None = None,
    group: str | None = None,
    xlabel: str | None = None,
    ylabel: str | None = None,
    ax: Any = None,
) -> Any:
    """Mean and central intervals of the function and of observations along a
    one-dimensional input.

    Blue bands are the uncertainty about the function (epistemic: it shrinks with data);
    gray bands add the noise of an observation.

    :param idata: result of ``to_inference_data`` with the group ``predictions`` (else
        the data are drawn).
    :param x: name of the input, or (N,) values to draw against; by default the only
        input.
    :param levels: probabilities inside the bands.
    :param site: observed site; by default the only one.
    :param group: ``"predictions"`` or ``"posterior_predictive"``; by default the first
        of them that exists.
    :param xlabel: label with units; by default the name and the attribute ``units`` of
        the input.
    :param ylabel: the same for the site.
    :param ax: axes to draw on; by default those of a new figure, one column wide.
    :return: the axes.
    :raises ValueError: if there are no predictions, the site is a class label, the
        input is not one-dimensional or a level is not between 0 and 1.

    >>> from numpyro_bnn import infinite, nn, to_inference_data
    >>> x = np.linspace(-1, 1, 9)[:, None]
    >>> gp = infinite.gp_regression(nn.Dense(1), x, x[:, 0], noise_sd=0.1)
    >>> axes = predictive_band(
    ...     to_inference_data(gp, {"x": 2 * x}, num_samples=50), xlabel="distance [km]"
    ... )
    >>> axes.get_xlabel(), axes.get_ylabel()
    ('distance [km]', 'y')
    """
    call = "plots.predictive_band"
    Kind(Sequence, "Pass several, e.g. `(0.5, 0.9)`.").check(call, "levels", levels)
    for level in levels:
        Number(strict=True, below=1).check(call, "levels", level)
    drawn = _read.predicted(call, idata, site, group)
    if drawn.classes:
        instead = "Bands are for numbers; draw `plots.calibration`."
        raise argument_error(call, "site", f"{drawn.site!r}, a class label", instead)
    name, values = _read.input_values(call, idata, drawn, x)
    order = np.argsort(values, kind="stable")
    (axis,) = _style.axes(call, ax)
    if drawn.y is not None:
        _bands(
            axis,
            values[order],
            _flat(call, drawn.y)[:, order],
            levels,
            _style.OBSERVATION,
            drawn.site,
        )
    if drawn.function is not None:
        function = _flat(call, drawn.function)[:, order]
        _bands(axis, values[order], function, levels, _style.FUNCTION, "function")
        axis.plot(
            values[order],
            function.mean(axis=0),
            color=_style.FUNCTION,
            label="function mean",
        )
    points = _read.training_points(idata, drawn.site, name)
    if points is not None:
        size = float(np.clip(60 / np.sqrt(len(points[0])), 1.0, 8.0))
        axis.scatter(
            *points, s=size, color=_style.DATA, linewidths=0, zorder=3, label="data"
        )
    axis.set_xlabel(
        xlabel or ("x" if name is None else _read.label(idata, drawn.group, name))
    )
    axis.set_ylabel(ylabel or _read.label(idata, drawn.group, drawn.site))
    ends = values if points is None else np.concatenate([values, points[0]])
    axis.set_xlim(ends.min(), ends.max())
    axis.legend(**_style.above(ncols=3))
    return axis


@checked("plots.predicted_vs_observed")
@_style.styled
def predicted_vs_observed(
    idata: InferenceData,
    level: Level = 0.9,
    *,
    site: str | None = None,
    group: str | None = None,
    target: str | None = None,
    xlabel: str | None = None,
    ylabel: str | None = None,
    ax: Axes = None,
) -> Axes:
    """Predictive mean and central interval of every target, against its observed value.

    Intervals that miss the target are orange. The legend has the RMSE with its standard
    error, and the coverage of the intervals next to that of calibrated intervals, with
    its standard error.

    :param idata: result of ``to_inference_data`` whose predictions have targets (else
        the data are drawn, and the label says so).
    :param level: probability inside the interval.
    :param site: observed site; by default the only one.
    :param group: ``"predictions"`` or ``"posterior_predictive"``; by default the first
        that has targets.
    :param target: name of the new targets in ``predictions_constant_data``; by default
        that of the site.
    :param xlabel: label with units; by default from the name and units of the site.
    :param ylabel: the same.
    :param ax: axes to draw on; by default those of a new figure, one column wide.
    :return: the axes.
    :raises ValueError: if there are no targets, or the site is a class label.

    >>> from numpyro_bnn import infinite, nn, to_inference_data
    >>> x = np.linspace(-1, 1, 9)[:, None]
    >>> gp = infinite.gp_regression(nn.Dense(1), x, x[:, 0], noise_sd=0.1)
    >>> idata = to_inference_data(
    ...     gp, predictions={"x": 2 * x, "y": 2 * x[:, 0]}, num_samples=50
    ... )
    >>> predicted_vs_observed(idata).get_xlabel()
    'observed y'
    """
    call = "plots.predicted_vs_observed"
    drawn = _read.predicted(call, idata, site, group, scored=True, target=target)
    if drawn.classes or drawn.y is None:
        lack = "a class label" if drawn.classes else "without draws of it"
        got = f"{drawn.site!r}, {lack}"
        raise argument_error(call, "site", got, "For classes draw `plots.calibration`.")
    observed = drawn.targets()
    draws = drawn.y.reshape(-1, observed.size)
    function = drawn.y if drawn.function is None else drawn.function
    mean = function.reshape(-1, observed.size).mean(axis=0)
    low, high = _central(draws, level)
    coverage = metrics.interval_coverage(draws, observed, level)
    error = metrics.rmse(mean, observed)

    (axis,) = _style.axes(call, ax, size=(_style.COLUMN, _style.COLUMN))
    faint = float(np.clip(12 / np.sqrt(observed.size), 0.12, 0.6))
    dots = float(np.clip(60 / np.sqrt(observed.size), 1.5, 8.0))
    for inside, color in ((True, _style.FUNCTION), (False, _style.MISSED)):
        these = coverage.inside == inside
        axis.vlines(
            observed[these],
            low[these],
            high[these],
            color=color,
            alpha=faint,
            linewidth=0.6,
        )
        text = f"{'inside' if inside else 'outside'} its {100 * level:g} % interval"
        axis.scatter(
            observed[these],
            mean[these],
            s=dots,
            color=color,
            linewidths=0,
            zorder=3,
            label=text,
        )
    ends = [min(observed.min(), low.min()), max(observed.max(), high.max())]
    axis.plot(ends, ends, color=_style.DATA, linewidth=0.6, zorder=2)
    axis.set_aspect("equal")
    name = _read.label(idata, drawn.group, drawn.site)
    where = " (training data)" if drawn.group == "posterior_predictive" else ""
    axis.set_xlabel(xlabel or f"observed {name}{where}")
    axis.set_ylabel(ylabel or f"predicted {name}")
    summary = (
        f"RMSE {error.value:.3g} ± "
        f"{error.standard_error:.1g}\n{100 * coverage.coverage:.1f} % of targets "
        f"inside "
        f"({100 * level:g} ± {100 * coverage.standard_error:.1f} if calibrated)"
    )
    axis.legend(
        **_style.above(
            title=summary, title_fontsize="medium", alignment="left", ncols=2
        )
    )
    return axis


def _central(draws: Floats, level: float) -> tuple[NDArray, NDArray]:
    """Lower and upper bounds of the central interval over the first axis, with
    probability ``level`` inside.
    """
    low, high = np.quantile(
        draws, [(1 - level) / 2, (1 + level) / 2], axis=0, method="weibull"
    )
    return low, high


def _flat(call: str, draws: Floats) -> Floats:
    """Draws (C, S, N) or (C, S, N, 1), as (C S, N)."""
    if draws[0, 0].size != draws.shape[2]:
        instead = "Bands are for one output: draw each output separately."
        raise argument_error(
            call, "site", f"a site of shape {draws.shape[2:]}", instead
        )
    return draws.reshape(-1, draws.shape[2])


def _bands(
    axis: Axes,
    x: NDArray,
    draws: NDArray,
    levels: Sequence[float],
    color: str,
    name: str,
) -> None:
    """Nested central intervals, the widest first and palest."""
    rgb = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    for place, level in enumerate(sorted(levels, reverse=True), start=1):
        # Opaque tones: overlapping transparent bands would suggest levels that do not
        # exist.
        tone = 1 - (0.15 + 0.35 * place / len(levels)) * (1 - rgb)
        # by the least and the largest draw
        exact_level = min(level, (len(draws) - 1) / (len(draws) + 1))
        axis.fill_between(
            x,
            *_central(draws, level),
            color=tone,
            linewidth=0,
            label=f"{name}, {100 * exact_level:.3g} %",
        )
