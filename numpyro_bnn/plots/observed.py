"""Predictions against what was observed."""

from typing import TYPE_CHECKING, Any

import numpy as np

from numpyro_bnn import metrics
from numpyro_bnn._checks import argument_error
from numpyro_bnn.plots import _read, _style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["predicted_vs_observed"]


@_style.styled
def predicted_vs_observed(
    idata: Any,
    level: float = 0.9,
    *,
    site: str | None = None,
    group: str | None = None,
    target: str | None = None,
    xlabel: str | None = None,
    ylabel: str | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """Predictive mean and central interval of every target, against its observed value.

    Intervals that miss the target are orange. Above are the RMSE with its standard error, and the share of targets
    inside next to the share, with its standard error, that calibrated intervals would have.

    :param idata: result of ``to_inference_data`` whose predictions have targets (else the data are drawn, and
        the label says so).
    :param level: probability inside the interval.
    :param site: observed site; by default the only one.
    :param group: ``"predictions"`` or ``"posterior_predictive"``; by default the first that has targets.
    :param target: name of the new targets in ``predictions_constant_data``; by default that of the site.
    :param xlabel: label with units; by default made of the name and units of the site.
    :param ylabel: the same.
    :param ax: axes to draw on; by default those of a new figure, one column wide.
    :return: the axes.
    :raises ValueError: if there are no targets, or the site is a class label.
    :raises ImportError: without Matplotlib.

    **Example**

    >>> from numpyro_bnn.plots import example_results
    >>> idata = example_results()  # for yours: to_inference_data(mcmc, predictions={"x": x_test, "y": y_test})
    >>> axes = predicted_vs_observed(idata)
    >>> axes.get_xlabel()
    'observed y'
    """
    call = "plots.predicted_vs_observed"
    (level,) = _read.shares(call, "level", [level])
    drawn = _read.predicted(call, idata, site, group, scored=True, target=target)
    if drawn.classes or drawn.y is None:
        what = "a class label" if drawn.classes else "without draws of it"
        raise argument_error(call, "site", f"{drawn.site!r}, {what}", "For classes draw `plots.calibration`.")
    observed = _read.targets(drawn)
    draws = drawn.y.reshape(-1, observed.size)
    mean = (drawn.y if drawn.function is None else drawn.function).reshape(-1, observed.size).mean(axis=0)
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2], axis=0, method="weibull")
    coverage, error = metrics.interval_coverage(draws, observed, level), metrics.rmse(mean, observed)

    (axis,) = _style.axes(call, ax, size=(_style.COLUMN, _style.COLUMN))
    faint = float(np.clip(12 / np.sqrt(observed.size), 0.12, 0.6))
    dots = float(np.clip(60 / np.sqrt(observed.size), 1.5, 8.0))
    for inside, color in ((True, _style.FUNCTION), (False, _style.MISSED)):
        these = coverage.inside == inside
        axis.vlines(observed[these], low[these], high[these], color=color, alpha=faint, linewidth=0.6)
        label = f"{'inside' if inside else 'outside'} its {100 * level:g} % interval"
        axis.scatter(observed[these], mean[these], s=dots, color=color, linewidths=0, zorder=3, label=label)
    ends = [min(observed.min(), low.min()), max(observed.max(), high.max())]
    axis.plot(ends, ends, color=_style.DATA, linewidth=0.6, zorder=2)
    axis.set_aspect("equal")
    name = _read.label(idata, drawn.group, drawn.site)
    where = " (training data)" if drawn.group == "posterior_predictive" else ""
    axis.set_xlabel(xlabel or f"observed {name}{where}")
    axis.set_ylabel(ylabel or f"predicted {name}")
    summary = (
        f"RMSE {error.value:.3g} ± {error.standard_error:.1g}\n{100 * coverage.coverage:.1f} % of targets inside "
        f"({100 * level:g} ± {100 * coverage.standard_error:.1f} if calibrated)"
    )
    above = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "borderaxespad": 0.2}
    axis.legend(title=summary, title_fontsize="medium", alignment="left", ncols=2, **above)
    return axis
