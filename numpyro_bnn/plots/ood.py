"""Out-of-distribution detection: scores of in-distribution and of out-of-distribution points."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from numpyro_bnn import metrics
from numpyro_bnn._checks import argument_error, check_choice, check_count
from numpyro_bnn.plots import _read, _style

Score = Callable[[NDArray[np.float64]], ArrayLike]


def _mutual_information(probs: NDArray[np.float64]) -> ArrayLike:
    return metrics.uncertainty(probs).mutual_information


def _function_sd(function: NDArray[np.float64]) -> NDArray[np.float64]:
    """Root of the variance over chains and draws, summed over outputs."""
    variance = function.reshape(-1, *function.shape[2:]).var(axis=0)
    return np.sqrt(variance.reshape(len(variance), -1).sum(axis=1))


# Name -> axis label, whether it takes class probabilities, and the score (N,) of draws (C, S, N, ...).
SCORES: dict[str, tuple[str, bool, Score]] = {
    "mutual_information": ("mutual information of label and weights [nats]", True, _mutual_information),
    "entropy": ("entropy of the prediction [nats]", True, lambda probs: metrics.uncertainty(probs).total),
    "max_prob": ("1 - largest class probability", True, lambda probs: 1 - probs.mean((0, 1)).max(-1)),
    "function_sd": ("sd of the function over draws", False, _function_sd),
}


@_style.styled
def ood_histograms(
    inside: Any,
    outside: Any,
    score: str | Score | None = None,
    *,
    site: str | None = None,
    group: str | None = None,
    name: str = "known",
    bins: int = 40,
    log: bool = False,
    xlabel: str | None = None,
    ax: Any = None,
) -> Any:
    """Histograms of an uncertainty score of in- and out-of-distribution points, with the AUROC of detection.

    The AUROC, in the legend with its standard error, is the probability that an out-of-distribution point has the
    larger score: at 0.5 the score does not separate the groups.

    :param inside: result of ``to_inference_data`` with predictions at in-distribution points, or their scores (N,).
    :param outside: the same for out-of-distribution points, or several by name, e.g. ``{"MNIST": idata_mnist}``.
    :param score: for class probabilities ``"mutual_information"`` (the default), ``"entropy"`` or ``"max_prob"``,
        one minus the largest; for any function ``"function_sd"`` (the default for numbers); or a function from draws
        (C, S, N, ...) of probabilities, or of the mean, to scores (N,).
    :param site: observed site; by default the only one.
    :param group: ``"predictions"`` or ``"posterior_predictive"``; by default the first of them that exists.
    :param name: name of the in-distribution points in the legend.
    :param bins: bins from the smallest to the largest score of all points.
    :param log: whether the axis is logarithmic, with bins of equal width on it; scores of 0 are counted in the first
        bin.
    :param xlabel: label of the scores.
    :param ax: axes to draw on; by default those of a new figure, one column wide.
    :return: the axes.
    :raises ValueError: for an unknown score, one that does not fit the site, or scores that are not (N,) numbers.

    >>> axes = ood_histograms([0.1, 0.2, 0.3, 0.4], {"MNIST": [0.35, 0.5, 0.6]})
    >>> [text.get_text() for text in axes.get_legend().get_texts()]
    ['known', 'MNIST, AUROC 0.92 ± 0.1']
    """
    call = "plots.ood_histograms"
    bins = check_count(call, "bins", bins)
    several = isinstance(outside, Mapping) and not _read.is_results(outside)
    if several and not outside:
        raise argument_error(call, "outside", outside, 'Pass at least one, e.g. `{"MNIST": idata_mnist}`.')
    title, known = _scores(call, "inside", inside, score, site, group)
    others = {
        label: _scores(call, f"outside[{label!r}]", given, score, site, group)[1]
        for label, given in (outside if several else {"OOD": outside}).items()
    }
    edges = _edges(call, [known, *others.values()], bins, log)
    (axis,) = _style.axes(call, ax)
    for place, (label, values) in enumerate({name: known, **others}.items()):
        # Scores that have no place on the axis (infinity, 0 on a logarithmic one) are counted at its ends.
        share = np.histogram(np.clip(values, edges[0], edges[-1]), edges)[0] / len(values)
        look = {"fill": True, "color": _style.OBSERVATION, "alpha": 0.5, "label": label}
        if place:
            color = _style.chain_color(place - 1)
            look = {"color": color, "linewidth": 1.2, "label": f"{label}, {_auroc(known, values)}"}
        axis.stairs(share, edges, **look)
    # Half a bin of margin, so that an outline at the end is not cut off.
    ends = np.log(edges[[0, -1]]) if log else edges[[0, -1]]
    ends = ends + np.ptp(ends) * np.array([-0.5, 0.5]) / bins
    axis.set(xlabel=xlabel or title, ylabel="share of points", xlim=np.exp(ends) if log else ends)
    if log:
        _style.log_ticks(axis.xaxis)
    axis.legend(**_style.above())
    return axis


def _scores(
    call: str, argument: str, given: Any, score: str | Score | None, site: str | None, group: str | None
) -> tuple[str, NDArray[np.float64]]:
    """Label of the axis and scores (N,): those given, or of the predictions."""
    if _read.is_results(given):
        title, found = _score_of(call, _read.predicted(call, given, site, group), score)
    else:
        title, found = "score", given
    values = np.asarray(found, dtype=np.float64)
    if values.ndim != 1 or not values.size or np.isnan(values).any():
        got = f"scores of shape {values.shape}{', with NaN' if np.isnan(values).any() else ''}"
        raise argument_error(call, argument, got, "Pass results with predictions, or one number for each point.")
    return title, values


def _score_of(call: str, drawn: _read.Drawn, score: str | Score | None) -> tuple[str, ArrayLike]:
    if callable(score):
        return getattr(score, "__name__", "score"), score(drawn.mean_draws(call))
    named = score or ("mutual_information" if drawn.classes else "function_sd")
    check_choice(call, "score", named, SCORES)
    title, of_classes, function = SCORES[named]
    return title, function(drawn.class_probabilities(call) if of_classes else drawn.mean_draws(call))


def _edges(call: str, groups: list[NDArray[np.float64]], bins: int, log: bool) -> NDArray[np.float64]:
    """Edges of bins for all groups."""
    values = np.concatenate(groups)
    usable = values[np.isfinite(values) & ((values > 0) | (not log))]
    if not usable.size:
        raise argument_error(call, "log", log, "No score is positive: draw them with `log=False`.")
    low, high = float(usable.min()), float(usable.max())
    if low == high:
        low, high = (low / 2, 2 * high) if log else (low - 0.5, high + 0.5)
    edges = np.geomspace(low, high, bins + 1) if log else np.linspace(low, high, bins + 1)
    edges[0], edges[-1] = low, high  # computed from logarithms, they might miss these by rounding
    return edges


def _auroc(known: NDArray[np.float64], other: NDArray[np.float64]) -> str:
    largest = np.finfo(np.float64).max
    found = metrics.auroc(*(np.clip(scores, -largest, largest) for scores in (known, other)))
    if not found.standard_error > 0:  # one point, or perfect separation
        return f"AUROC {found.value:.3f}"
    error = f"{found.standard_error:.1g}"
    digits = int(np.clip(np.ceil(-np.log10(float(error)) - 1e-9), 2, 6))
    return f"AUROC {found.value:.{digits}f} ± {error}"
