"""Does the network know what it does not know? Scores of known and of foreign points."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from numpyro_bnn import metrics
from numpyro_bnn._checks import argument_error, unknown_name
from numpyro_bnn.plots import _read, _style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["ood_histograms"]

Score = Callable[[NDArray[np.float64]], ArrayLike]


def _spread(function: NDArray[np.float64]) -> NDArray[np.float64]:
    """Root of the variance over chains and draws, summed over outputs."""
    variance = function.reshape(-1, *function.shape[2:]).var(axis=0)
    return np.sqrt(variance.reshape(len(variance), -1).sum(axis=1))


# Name -> label of the axis, whether of class probabilities, and the score (N,) of draws (C, S, N, ...).
SCORES: dict[str, tuple[str, bool, Score]] = {
    "mutual_information": (
        "mutual information of label and weights [nats]",
        True,
        lambda probs: metrics.uncertainty(probs).mutual_information,
    ),
    "entropy": ("entropy of the prediction [nats]", True, lambda probs: metrics.uncertainty(probs).total),
    "max_prob": (
        "1 - largest class probability",
        True,
        lambda probs: 1 - probs.mean(axis=(0, 1)).max(axis=-1),
    ),
    "function_sd": ("sd of the function over draws", False, _spread),
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
    ax: "Axes | None" = None,
) -> "Axes":
    """Histograms of a score of known and of foreign points, with the chance that a foreign one has the larger score.

    That chance, the AUROC, stands in the legend with its standard error: 0.5 says that the score tells nothing.

    :param inside: result of ``to_inference_data`` with predictions at known points, or scores (N,) of them.
    :param outside: the same for foreign points, or several by name, e.g. ``{"MNIST": idata_mnist}``.
    :param score: of class probabilities ``"mutual_information"`` (their default), ``"entropy"`` ``"max_prob"``, one
        minus the largest; of any function ``"function_sd"`` (the default of numbers); or a function from draws
        (C, S, N, ...) of probabilities, or of the mean, to scores (N,).
    :param site: observed site; by default the only one.
    :param group: ``"predictions"`` or ``"posterior_predictive"``; by default the first of them there is.
    :param name: of the known points in the legend.
    :param bins: bins from the smallest to the largest score of all points.
    :param log: whether the scores stand on a logarithmic axis, with bins of equal width there; a score of 0 then
        stands in the first bin.
    :param xlabel: label of the scores.
    :param ax: axes to draw on; by default those of a new figure, one column wide.
    :return: the axes.
    :raises ValueError: for an unknown score, one that does not fit the site, or scores that are not (N,) numbers.
    :raises ImportError: without Matplotlib.

    **Example**

    >>> from numpyro_bnn.plots import example_classes
    >>> known, foreign = example_classes(), example_classes(spread=1.5)
    >>> axes = ood_histograms(known, {"foreign": foreign})
    >>> [text.get_text() for text in axes.get_legend().get_texts()]
    ['known', 'foreign, AUROC 0.90 ± 0.01']
    """
    call = "plots.ood_histograms"
    _read.count(call, "bins", bins)
    others = (
        {"foreign": outside} if _read.is_results(outside) or not isinstance(outside, Mapping) else outside
    )
    if not others:
        raise argument_error(call, "outside", outside, 'Pass at least one, e.g. `{"MNIST": idata_mnist}`.')
    title, known = _scores(call, "inside", inside, score, site, group)
    foreign = {
        label: _scores(call, f"outside[{label!r}]", given, score, site, group)[1]
        for label, given in others.items()
    }
    edges, clip = _bins(call, [known, *foreign.values()], bins, log)
    (axis,) = _style.axes(call, ax)
    for place, (label, values) in enumerate({name: known, **foreign}.items()):
        share = np.histogram(clip(values), edges)[0] / len(values)
        axis.stairs(
            share,
            edges,
            fill=place == 0,
            color=_style.OBSERVATION if place == 0 else _style.chain_color(place - 1),
            alpha=0.5 if place == 0 else 1.0,
            linewidth=1.2,
            label=label if place == 0 else f"{label}, {_auroc(known, values)}",
        )
    # Half a bin of room: an outline at the end would be cut.
    room = np.array([-0.5, 0.5]) / bins
    ends = np.log(edges[[0, -1]]) if log else edges[[0, -1]]
    ends = ends + np.ptp(ends) * room
    axis.set(xlabel=xlabel or title, ylabel="share of points", xlim=np.exp(ends) if log else ends)
    if log:
        _style.log_ticks(axis.xaxis)
    axis.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), borderaxespad=0.2)
    return axis


def _scores(
    call: str, argument: str, given: Any, score: str | Score | None, site: str | None, group: str | None
) -> tuple[str, NDArray[np.float64]]:
    """Label of the axis and scores (N,): those given, or of the predictions."""
    if not _read.is_results(given):
        title, values = "score", np.asarray(given, dtype=np.float64)
    else:
        drawn = _read.predicted(call, given, site, group)
        if callable(score):
            if drawn.function is None:
                raise argument_error(call, "site", repr(drawn.site), "The draws of its mean are needed.")
            title, values = getattr(score, "__name__", "score"), np.asarray(score(drawn.function), np.float64)
        else:
            title, values = _known_score(call, drawn, score)
    if values.ndim != 1 or not values.size or np.isnan(values).any():
        got = f"scores of shape {values.shape}{', with NaN' if np.isnan(values).any() else ''}"
        instead = "Pass results with predictions, or one number for each point."
        raise argument_error(call, argument, got, instead)
    return title, values


def _known_score(call: str, drawn: _read.Drawn, score: str | None) -> tuple[str, NDArray[np.float64]]:
    named = score or ("mutual_information" if drawn.classes else "function_sd")
    if named not in SCORES:
        raise unknown_name(call, "score", named, SCORES)
    title, of_classes, function = SCORES[named]
    if of_classes:
        return title, np.asarray(function(_read.class_probabilities(call, drawn)))
    if drawn.function is None:
        raise argument_error(call, "site", repr(drawn.site), "The draws of its mean are needed.")
    return title, np.asarray(function(drawn.function))


def _bins(
    call: str, groups: list[NDArray[np.float64]], bins: int, log: bool
) -> tuple[NDArray[np.float64], Callable[[NDArray[np.float64]], NDArray[np.float64]]]:
    """Edges that all groups share, and what takes a score that has no place on the axis to its end."""
    values = np.concatenate(groups)
    usable = values[np.isfinite(values) & ((values > 0) | (not log))]
    if not usable.size:
        raise argument_error(call, "log", log, "No score is positive: draw them with `log=False`.")
    low, high = float(usable.min()), float(usable.max())
    if low == high:
        low, high = (low / 2, 2 * high) if log else (low - 0.5, high + 0.5)
    edges = np.geomspace(low, high, bins + 1) if log else np.linspace(low, high, bins + 1)
    # The outermost edges come out of a logarithm: they might miss the extreme scores by rounding.
    edges[0], edges[-1] = low, high
    return edges, lambda scores: np.clip(scores, low, high)


def _auroc(known: NDArray[np.float64], foreign: NDArray[np.float64]) -> str:
    largest = np.finfo(np.float64).max
    found = metrics.auroc(*(np.clip(scores, -largest, largest) for scores in (known, foreign)))
    if not found.standard_error > 0:  # one point, or perfect separation
        return f"AUROC {found.value:.3f}"
    error = f"{found.standard_error:.1g}"
    digits = int(np.clip(np.ceil(-np.log10(float(error)) - 1e-9), 2, 6))
    return f"AUROC {found.value:.{digits}f} ± {error}"
