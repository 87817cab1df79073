"""Confidence against accuracy of a classifier."""

from typing import TYPE_CHECKING, Any

import numpy as np

from numpyro_bnn import metrics
from numpyro_bnn.plots import _read, _style
from numpyro_bnn.plots._binomial import reliability_curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["reliability_diagram"]


@_style.styled
def reliability_diagram(
    idata: Any,
    *,
    site: str | None = None,
    group: str | None = None,
    target: str | None = None,
    bins: int = 15,
    ax: "Axes | None" = None,
) -> "Axes":
    """How often the most probable class is right, by its probability, and how many points have that probability.

    Gray bars hold 95 % of the shares that as many points of a calibrated model would have (binomial); the
    histogram is the share of points in each bin. For predicted numbers draw :func:`calibration`.

    :param idata: result of ``to_inference_data`` of a classifier whose predictions have labels (else the data are
        used); a site of labels 0 and 1 with a mean, as a Bernoulli has it, is a classifier of two classes.
    :param site: observed site; by default the only one.
    :param group: ``"predictions"`` or ``"posterior_predictive"``; by default the first that has labels.
    :param target: name of the new labels in ``predictions_constant_data``; by default that of the site.
    :param bins: bins of the confidence, of equal width.
    :param ax: axes to draw on; by default those of a new figure, one column wide.
    :return: the axes.
    :raises ValueError: if there are no labels or no probabilities, or fewer than one bin.
    :raises ImportError: without Matplotlib.

    Reference: Guo, Pleiss, Sun and Weinberger (2017), *On calibration of modern neural networks*, section 2.

    **Example**

    >>> from numpyro_bnn.plots import example_classes
    >>> idata = example_classes()  # for yours: to_inference_data(mcmc, predictions={"x": x_test, "y": y_test})
    >>> reliability_diagram(idata).get_ylabel()
    'share of right labels'
    """
    call = "plots.reliability_diagram"
    _read.count(call, "bins", bins)
    drawn = _read.predicted(call, idata, site, group, scored=True, target=target)
    probs = _read.class_probabilities(call, drawn)
    labels = _read.targets(drawn).astype(np.int64)
    table = metrics.ece(probs, labels, bins)
    (axis,) = _style.axes(call, ax, size=(_style.COLUMN, 2.8))
    share = table.counts / labels.size
    axis.stairs(share, table.edges, fill=True, color=_style.PALE, label=f"share of {labels.size} points")
    reliability_curve(axis, table)
    # The classes share all of the probability: nothing lies below 1 / K.
    axis.set_xlim(np.floor(10 / probs.shape[-1]) / 10, 1)
    return axis
