"""Calibration: do events predicted with probability 80 % happen 80 % of the time?"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from numpyro_bnn import metrics
from numpyro_bnn._checks import argument_error
from numpyro_bnn._options import Natural, PositiveInt, checked
from numpyro_bnn._types import Floats, InferenceData
from numpyro_bnn.metrics.classification import Reliability
from numpyro_bnn.plots import _read, _style
from numpyro_bnn.plots._style import Axes

SPREAD = "95 % if calibrated"


@checked("plots.calibration")
@_style.styled
def calibration(
    idata: InferenceData,
    *,
    site: str | None = None,
    group: str | None = None,
    target: str | None = None,
    bins: PositiveInt = 10,
    seed: Natural = 0,
    ax: Axes = None,
) -> "NDArray[Any]":
    """Check the calibration of predictions in two views; gray bands contain 95 % of
    what a calibrated model gives.

    For numbers: the histogram of probability integral transforms (a hump means
    predictions that are too wide, a valley too narrow) and the coverage of central
    intervals of every level. For classes: the histogram of confidence, and the accuracy
    at each confidence.

    :param idata: result of ``to_inference_data`` whose predictions have targets (else
        the data are used).
    :param site: observed site; by default the only one.
    :param group: ``"predictions"`` or ``"posterior_predictive"``; by default the first
        that has targets.
    :param target: name of the new targets in ``predictions_constant_data``; by default
        that of the site.
    :param bins: bins of the histogram.
    :param seed: seed of the randomized transform.
    :param ax: two axes to draw on; by default those of a new figure.
    :return: the two axes.
    :raises ValueError: if there are no targets, or no draws of the site.

    >>> from numpyro_bnn import infinite, nn, to_inference_data
    >>> x = np.linspace(-1, 1, 9)[:, None]
    >>> gp = infinite.gp_regression(nn.Dense(1), x, x[:, 0], noise_sd=0.1)
    >>> idata = to_inference_data(
    ...     gp, predictions={"x": 2 * x, "y": 2 * x[:, 0]}, num_samples=50
    ... )
    >>> [axes.get_xlabel() for axes in calibration(idata)]
    ['probability integral transform', 'level of central interval']
    """
    call = "plots.calibration"
    drawn = _read.predicted(call, idata, site, group, scored=True, target=target)
    if drawn.y is None and not drawn.classes:
        raise argument_error(
            call,
            "site",
            repr(drawn.site),
            "Draws of observations are needed, not of the mean.",
        )
    observed = drawn.targets()
    axes = _style.axes(call, ax, (1, 2), (2 * _style.COLUMN, 2.6))
    if drawn.classes:
        table = metrics.ece(
            drawn.class_probabilities(call), observed.astype(np.int64), bins
        )
        _confidence_panel(axes[0], table)
        _reliability_curve(axes[1], table)
    else:
        draws = np.asarray(drawn.y).reshape(-1, observed.size)
        _pit_panel(axes[0], metrics.pit(draws, observed, seed), bins)
        _coverage_panel(axes[1], draws, observed)
    return axes


@checked("plots.reliability_diagram")
@_style.styled
def reliability_diagram(
    idata: InferenceData,
    *,
    site: str | None = None,
    group: str | None = None,
    target: str | None = None,
    bins: PositiveInt = 15,
    ax: Axes = None,
) -> Axes:
    """Reliability diagram: accuracy of the most probable class by its probability, and
    the fraction of points there.

    Gray bars contain 95 % of the fractions that as many points of a calibrated model
    would have (binomial); the histogram is the fraction of points in each bin. For
    numerical predictions draw :func:`calibration`.

    :param idata: result of ``to_inference_data`` of a classifier whose predictions have
        labels (else the data are used); a site of labels 0 and 1 with a mean, such as a
        Bernoulli, is a classifier of two classes.
    :param site: observed site; by default the only one.
    :param group: ``"predictions"`` or ``"posterior_predictive"``; by default the first
        that has labels.
    :param target: name of the new labels in ``predictions_constant_data``; by default
        that of the site.
    :param bins: bins of the confidence, of equal width.
    :param ax: axes to draw on; by default those of a new figure, one column wide.
    :return: the axes.
    :raises ValueError: if there are no labels or no probabilities, or fewer than one
        bin.

    Reference: Guo, Pleiss, Sun and Weinberger (2017), *On calibration of modern neural
    networks*, section 2.

    >>> import xarray as xr  # instead of to_inference_data(mcmc, predictions=...)
    >>> probs = np.random.default_rng(0).dirichlet(np.ones(3), (1, 1, 200))
    >>> drawn = xr.Dataset({"y_probs": (("chain", "draw", "data", "class"), probs)})
    >>> labels = xr.Dataset({"y": ("data", probs[0, 0].argmax(axis=1))})
    >>> groups = {
    ...     "predictions": drawn,
    ...     "observed_data": labels,
    ...     "predictions_constant_data": labels,
    ... }
    >>> idata = xr.DataTree.from_dict(groups)
    >>> reliability_diagram(idata).get_ylabel()
    'share of right labels'
    """
    call = "plots.reliability_diagram"
    drawn = _read.predicted(call, idata, site, group, scored=True, target=target)
    probs = drawn.class_probabilities(call)
    labels = drawn.targets().astype(np.int64)
    table = metrics.ece(probs, labels, bins)
    (axis,) = _style.axes(call, ax, size=(_style.COLUMN, 2.8))
    share = table.counts / labels.size
    axis.stairs(
        share,
        table.edges,
        fill=True,
        color=_style.PALE,
        label=f"share of {labels.size} points",
    )
    _reliability_curve(axis, table)
    # The largest of K probabilities is at least 1 / K.
    axis.set_xlim(np.floor(10 / probs.shape[-1]) / 10, 1)
    return axis


def _binomial_band(count: Any, share: Any) -> Floats:
    """Central 95 % interval of the fraction of successes among ``count`` trials with
    probability ``share``.
    """
    # A probability of exactly 0 or 1 has no interval.
    from scipy.stats import binom

    return (
        np.array(binom.interval(0.95, count, np.clip(share, 1e-12, 1 - 1e-12))) / count
    )


def _pit_panel(axis: Axes, values: Floats, bins: int) -> None:
    counts, edges = np.histogram(values, bins=bins, range=(0.0, 1.0))
    if bins > 1:
        band = bins * _binomial_band(values.size, 1 / bins)
        axis.axhspan(*band, color="0.85", linewidth=0, zorder=0, label=SPREAD)
    axis.stairs(
        counts * bins / values.size, edges, fill=True, color=_style.FUNCTION, alpha=0.45
    )
    axis.stairs(
        counts * bins / values.size, edges, color=_style.FUNCTION, linewidth=0.8
    )
    axis.axhline(1.0, color=_style.DATA, linewidth=0.6)
    axis.set(xlabel="probability integral transform", ylabel="density", xlim=(0, 1))
    axis.set_ylim(0, 1.3 * max(axis.get_ylim()[1] / 1.05, 1.0))
    axis.legend(loc="upper left", borderaxespad=0.2)


def _coverage_panel(axis: Axes, draws: Floats, observed: Floats) -> None:
    levels = np.linspace(0.05, 0.95, 19)
    # those that so few draws reach
    levels = levels[levels <= (len(draws) - 1) / (len(draws) + 1) + 1e-9]
    shares = [
        metrics.interval_coverage(draws, observed, level).coverage for level in levels
    ]
    axis.fill_between(
        levels,
        *_binomial_band(observed.size, levels),
        color="0.85",
        linewidth=0,
        label=SPREAD,
    )
    axis.plot([0, 1], [0, 1], color=_style.DATA, linewidth=0.6)
    axis.plot(
        levels,
        shares,
        color=_style.FUNCTION,
        marker="o",
        markersize=2.5,
        label="targets inside",
    )
    axis.set(
        xlabel="level of central interval",
        ylabel="share of targets inside",
        xlim=(0, 1),
        ylim=(0, 1),
    )
    axis.legend(loc="upper left", borderaxespad=0.2)


def _confidence_panel(axis: Axes, table: Reliability) -> None:
    share = table.counts / table.counts.sum()
    width, color = np.diff(table.edges), _style.FUNCTION
    axis.bar(
        table.edges[:-1],
        share,
        width,
        align="edge",
        color=color,
        alpha=0.45,
        linewidth=0,
    )
    axis.stairs(share, table.edges, color=color, linewidth=0.8)
    axis.set(xlabel="confidence", ylabel="share of points", xlim=(0, 1))


def _reliability_curve(axis: Axes, table: Reliability) -> None:
    """Accuracy by confidence, over the band of a calibrated model."""
    filled = table.counts > 0
    confidence = table.confidence[filled]
    counts = table.counts[filled]
    axis.vlines(
        confidence,
        *_binomial_band(counts, confidence),
        color="0.8",
        linewidth=4,
        label=SPREAD,
    )
    axis.plot([0, 1], [0, 1], color=_style.DATA, linewidth=0.6)
    marks = {"color": _style.FUNCTION, "marker": "o", "markersize": 3}
    axis.plot(confidence, table.accuracy[filled], label="most probable class", **marks)
    axis.set(
        xlabel="confidence", ylabel="share of right labels", xlim=(0, 1), ylim=(0, 1.02)
    )
    title = f"ECE {100 * table.ece:.1f} %"
    axis.legend(
        **_style.above(title=title, title_fontsize="medium", alignment="left", ncols=2)
    )
