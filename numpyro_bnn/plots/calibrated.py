"""Is what is predicted with 80 % true 80 % of the time?"""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from numpyro_bnn import metrics
from numpyro_bnn._checks import argument_error
from numpyro_bnn.plots import _read, _style
from numpyro_bnn.plots._binomial import SPREAD, binomial_band, reliability_curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["calibration"]


@_style.styled
def calibration(
    idata: Any,
    *,
    site: str | None = None,
    group: str | None = None,
    target: str | None = None,
    bins: int = 10,
    seed: int = 0,
    ax: Any = None,
) -> "NDArray[Any]":
    """Two views of calibration; gray bands hold 95 % of what a calibrated model gives for as many points.

    For numbers: the histogram of probability integral transforms (a hump is too wide a prediction, a valley
    too narrow a one) and the share of targets in central intervals of every level. For classes: how often
    each confidence occurs, and how often it is right.

    :param idata: result of ``to_inference_data`` whose predictions have targets (else the data are used).
    :param site: observed site; by default the only one.
    :param group: ``"predictions"`` or ``"posterior_predictive"``; by default the first that has targets.
    :param target: name of the new targets in ``predictions_constant_data``; by default that of the site.
    :param bins: bins of the histogram.
    :param seed: seed of the randomized transform.
    :param ax: two axes to draw on; by default those of a new figure.
    :return: the two axes.
    :raises ValueError: if there are no targets, or no draws of the site.
    :raises ImportError: without Matplotlib.

    **Example**

    >>> from numpyro_bnn.plots import example_results
    >>> idata = example_results()  # for yours: to_inference_data(mcmc, predictions={"x": x_test, "y": y_test})
    >>> [axes.get_xlabel() for axes in calibration(idata)]
    ['probability integral transform', 'level of central interval']
    """
    call = "plots.calibration"
    drawn = _read.predicted(call, idata, site, group, scored=True, target=target)
    _read.count(call, "bins", bins)
    observed = _read.targets(drawn)
    if drawn.classes:
        if drawn.function is None:
            raise argument_error(call, "site", repr(drawn.site), "Its class probabilities are needed.")
        axes = _style.axes(call, ax, (1, 2), (2 * _style.COLUMN, 2.6))
        _class_panels(axes, metrics.ece(drawn.function, observed.astype(np.int64), bins))
        return axes
    if drawn.y is None:
        raise argument_error(
            call, "site", repr(drawn.site), "Draws of observations are needed, not of the mean."
        )
    draws = drawn.y.reshape(-1, observed.size)
    axes = _style.axes(call, ax, (1, 2), (2 * _style.COLUMN, 2.6))
    _pit_panel(axes[0], metrics.pit(draws, observed, seed), bins)
    _interval_panel(axes[1], draws, observed)
    return axes


def _pit_panel(axis: "Axes", values: NDArray[np.float64], bins: int) -> None:
    counts, edges = np.histogram(values, bins=bins, range=(0.0, 1.0))
    if bins > 1:
        low, high = binomial_band(values.size, 1 / bins)
        axis.axhspan(low * bins, high * bins, color="0.85", linewidth=0, zorder=0, label=SPREAD)
    axis.stairs(counts * bins / values.size, edges, fill=True, color=_style.FUNCTION, alpha=0.45)
    axis.stairs(counts * bins / values.size, edges, color=_style.FUNCTION, linewidth=0.8)
    axis.axhline(1.0, color=_style.DATA, linewidth=0.6)
    axis.set(xlabel="probability integral transform", ylabel="density", xlim=(0, 1))
    axis.set_ylim(0, 1.3 * max(axis.get_ylim()[1] / 1.05, 1.0))
    axis.legend(loc="upper left", borderaxespad=0.2)


def _interval_panel(axis: "Axes", draws: NDArray[np.float64], observed: NDArray[np.float64]) -> None:
    levels = np.linspace(0.05, 0.95, 19)
    found = [metrics.interval_coverage(draws, observed, level).coverage for level in levels]
    low, high = np.transpose([binomial_band(observed.size, level) for level in levels])
    axis.fill_between(levels, low, high, color="0.85", linewidth=0, label=SPREAD)
    axis.plot([0, 1], [0, 1], color=_style.DATA, linewidth=0.6)
    axis.plot(levels, found, color=_style.FUNCTION, marker="o", markersize=2.5, label="targets inside")
    axis.set(xlabel="level of central interval", ylabel="share of targets inside", xlim=(0, 1), ylim=(0, 1))
    axis.legend(loc="upper left", borderaxespad=0.2)


def _class_panels(axes: "NDArray[Any]", table: metrics.Reliability) -> None:
    width = np.diff(table.edges)
    share = table.counts / table.counts.sum()
    axes[0].bar(table.edges[:-1], share, width, align="edge", color=_style.FUNCTION, alpha=0.45, linewidth=0)
    axes[0].stairs(share, table.edges, color=_style.FUNCTION, linewidth=0.8)
    axes[0].set(xlabel="confidence", ylabel="share of points", xlim=(0, 1))
    reliability_curve(axes[1], table)
