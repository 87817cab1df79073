"""Scores, calibration and uncertainty of class probabilities, and how well a score
separates two groups.

Scores take predictive probabilities (N, K), or draws of them, (S, N, K) or (C, S, N,
K), which they average first: the prediction of a Bayesian network is the mean of its
probabilities.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from numpyro_bnn._checks import argument_error, as_floats, check_finite
from numpyro_bnn._options import PositiveInt, checked
from numpyro_bnn._types import ArrayLike, Floats
from numpyro_bnn.metrics import _inputs
from numpyro_bnn.metrics._inputs import (
    Score,
    mean_score,
    probs_and_labels,
    standard_error,
    vector,
)


class Reliability(NamedTuple):
    """Reliability curve of the most probable class, in M bins of its probability.

    :param ece: expected calibration error.
    :param max_gap: largest gap of a bin.
    :param edges: (M + 1,) edges of the bins, which include their upper edge.
    :param counts: (M,) number of points in each bin.
    :param confidence: (M,) mean probability in each bin (NaN in an empty one).
    :param accuracy: (M,) fraction of correct predictions in each bin (NaN in an empty
        one).
    """

    ece: float
    max_gap: float
    edges: Floats
    counts: NDArray[np.int64]
    confidence: Floats
    accuracy: Floats


class Uncertainty(NamedTuple):
    """Uncertainty of N class predictions, in nats.

    :param total: (N,) entropy of the predictive distribution.
    :param aleatoric: (N,) mean entropy of the draws: noise that more data do not
        remove.
    :param mutual_information: (N,) their difference, the mutual information of label
        and weights: disagreement between draws.
    """

    total: Floats
    aleatoric: Floats
    mutual_information: Floats


class Auroc(NamedTuple):
    """Area under the receiver operating characteristic.

    :param value: the area; 0.5 is chance, 1 perfect separation.
    :param standard_error: its standard error over both groups (NaN if one of them is a
        single point).
    """

    value: float
    standard_error: float


def accuracy(probs: ArrayLike, labels: ArrayLike) -> Score:
    """Accuracy: fraction of points whose most probable class (the first, if tied) is
    the label.

    :param probs: (N, K), (S, N, K) or (C, S, N, K) probabilities.
    :param labels: (N,) integers 0..K-1.
    :return: the fraction, its standard error, and 1 or 0 for every point (N,).
    :raises ValueError: for other ranks, unequal lengths, rows that do not sum to 1,
        labels outside 0..K-1.

    >>> accuracy([[0.9, 0.1], [0.4, 0.6]], [0, 0]).value
    0.5
    """
    array, targets = probs_and_labels("accuracy", probs, labels)
    return mean_score((array.argmax(axis=1) == targets).astype(np.float64))


def brier(probs: ArrayLike, labels: ArrayLike) -> Score:
    r"""Brier score over all K classes, :math:`\frac1N \sum_n \sum_k (p_{nk} - 1[y_n =
    k])^2`, from 0 to 2.

    Smaller is better. For two classes it is twice the score computed from one of them.

    :param probs: (N, K), (S, N, K) or (C, S, N, K) probabilities.
    :param labels: (N,) integers 0..K-1.
    :return: the mean over points, its standard error, and the score of every point
        (N,).
    :raises ValueError: for other ranks, unequal lengths, rows that do not sum to 1,
        labels outside 0..K-1.

    Reference: Brier (1950), *Verification of forecasts expressed in terms of
    probability*.

    >>> round(brier([[0.8, 0.2]], [0]).value, 6)
    0.08
    """
    array, targets = probs_and_labels("brier", probs, labels)
    return mean_score(((array - np.eye(array.shape[1])[targets]) ** 2).sum(axis=1))


def log_score(probs: ArrayLike, labels: ArrayLike) -> Score:
    r"""Mean log probability of the label, :math:`\frac1N \sum_n \log p_{n y_n}`; larger
    is better.

    From draws it equals ``lppd`` of their log probabilities. Its negative is the
    cross-entropy.

    :param probs: (N, K), (S, N, K) or (C, S, N, K) probabilities.
    :param labels: (N,) integers 0..K-1.
    :return: the mean over points, its standard error, and the score of every point
        (N,); minus infinity if a label was given probability 0.
    :raises ValueError: for other ranks, unequal lengths, rows that do not sum to 1,
        labels outside 0..K-1.

    >>> round(log_score([[0.8, 0.2]], [0]).value, 4)
    -0.2231
    """
    array, targets = probs_and_labels("log_score", probs, labels)
    with np.errstate(divide="ignore"):
        return mean_score(np.log(array[np.arange(targets.size), targets]))


@checked("ece")
def ece(probs: ArrayLike, labels: ArrayLike, bins: PositiveInt = 15) -> Reliability:
    r"""Can probabilities of classes be believed? Expected calibration error and
    reliability curve of the most probable class.

    .. math:: \sum_{m=1}^{M} \frac{n_m}{N} \left| \mathrm{acc}_m - \mathrm{conf}_m
              \right|

    Bins of equal width. Even for a perfectly calibrated model it is positive, near
    :math:`\sum_m \sqrt{2 n_m\, \mathrm{acc}_m (1 - \mathrm{acc}_m) / \pi} / N`: compare
    models on equal N and M.

    :param probs: (N, K), (S, N, K) or (C, S, N, K) probabilities; draws are averaged.
    :param labels: (N,) integers 0..K-1.
    :param bins: number M of bins.
    :return: a :class:`~numpyro_bnn.metrics.classification.Reliability`.
    :raises ValueError: for other ranks, unequal lengths, rows that do not sum to 1,
        labels outside 0..K-1, or fewer than one bin.

    Reference: Guo, Pleiss, Sun and Weinberger (2017), *On calibration of modern neural
    networks*, equation (3).

    >>> round(ece([[0.9, 0.1]] * 10, [0] * 7 + [1] * 3).ece, 6)
    0.2
    """
    array, targets = probs_and_labels("ece", probs, labels)
    top = array.max(axis=1)
    right = (array.argmax(axis=1) == targets).astype(np.float64)
    edges = np.linspace(0.0, 1.0, bins + 1)
    # Rounding can lift a probability just above 1, hence the clip.
    place = np.clip(np.searchsorted(edges, top, side="left") - 1, 0, bins - 1)
    count = np.bincount(place, minlength=bins)
    size = np.where(count > 0, count, np.nan)
    confidence = np.bincount(place, weights=top, minlength=bins) / size
    share = np.bincount(place, weights=right, minlength=bins) / size
    gaps = np.where(count > 0, np.abs(share - confidence), 0.0)
    return Reliability(
        float(gaps @ count / targets.size),
        float(gaps.max()),
        edges,
        count,
        confidence,
        share,
    )


def uncertainty(probs: ArrayLike) -> Uncertainty:
    r"""Split the predictive entropy into noise (aleatoric) and disagreement between
    draws (epistemic).

    .. math:: H\Big[\frac1S \sum_s p_s\Big] = \frac1S \sum_s H[p_s] + I(y; \theta)

    :param probs: (S, N, K) or (C, S, N, K) draws of class probabilities.
    :return: an :class:`~numpyro_bnn.metrics.classification.Uncertainty`, whose arrays
        are also scores for :func:`auroc`.
    :raises ValueError: for other ranks, NaN, or rows that do not sum to 1.

    Reference: Houlsby, Huszar, Ghahramani and Lengyel (2011), *Bayesian active learning
    for classification and preference learning*, equation (2).

    >>> draws = [[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.5, 0.5]]]
    >>> uncertainty(draws).mutual_information.round(4).tolist()
    [0.6931, 0.0]
    """
    array = _inputs.probabilities(
        "uncertainty", probs, {3: "(S, N, K)", 4: "(C, S, N, K)"}
    )
    draws = array.reshape(-1, *array.shape[-2:])
    total, aleatoric = _entropy(draws.mean(axis=0)), _entropy(draws).mean(axis=0)
    # Not negative by Jensen's inequality; rounding can make it so.
    return Uncertainty(total, aleatoric, np.maximum(total - aleatoric, 0.0))


def relative_logit_variance(logits: ArrayLike) -> Floats:
    r"""How much draws of the weights disagree before the softmax: the variance of the
    logits relative to the square of their mean.

    .. math:: \frac{\frac1S \sum_s |c_s - \bar c|^2}{|\bar c|^2}, \qquad
        c_{sk} = l_{sk} - \frac1K \sum_j l_{sj}, \quad \bar c = \frac1S \sum_s c_s

    A softmax saturates: if all draws are confident of a class, entropies and mutual
    information are near 0 however much the draws differ. Logits do not saturate, and
    this ratio does not change with their scale or with a shift common to all classes.

    :param logits: (S, N, K) or (C, S, N, K) draws of logits.
    :return: (N,) ratios; a score for :func:`auroc`. Infinite if the mean logits are all
        equal and draws differ.
    :raises ValueError: for other ranks, a single draw or class, NaN or infinity.

    >>> draws = [[[2.0, 0.0], [1.0, 0.0]], [[2.0, 0.0], [3.0, 0.0]]]
    >>> relative_logit_variance(draws).tolist()
    [0.0, 0.25]
    """
    call = "relative_logit_variance"
    array = as_floats(call, "logits", logits)
    if array.ndim not in (3, 4):
        raise argument_error(
            call,
            "logits",
            f"shape {array.shape}",
            "Pass logits shaped (S, N, K) or (C, S, N, K).",
        )
    draws = array.reshape(-1, *array.shape[-2:])
    if min(draws.shape[0], draws.shape[2]) < 2 or draws.shape[1] == 0:
        instead = "Pass at least two draws, a row and two classes."
        raise argument_error(call, "logits", f"shape {array.shape}", instead)
    check_finite(call, "logits", array)
    centered = draws - draws.mean(axis=-1, keepdims=True)
    variance = centered.var(axis=0).sum(axis=-1)
    square = (centered.mean(axis=0) ** 2).sum(axis=-1)
    with np.errstate(divide="ignore"):
        return np.divide(
            variance, square, out=np.zeros_like(variance), where=variance > 0
        )


def auroc(scores_in: ArrayLike, scores_out: ArrayLike) -> Auroc:
    r"""Area under the ROC curve: probability that a point of the second group has the
    larger score.

    .. math:: P(s_\mathrm{out} > s_\mathrm{in}) + \tfrac12 P(s_\mathrm{out} =
              s_\mathrm{in})

    For a binary classifier pass the scores of the negative and of the positive points:
    ``auroc(scores[y == 0], scores[y == 1])``.

    :param scores_in: (N,) scores of in-distribution points, e.g. the mutual information
        of :func:`uncertainty`.
    :param scores_out: (M,) scores of out-of-distribution points, expected to be larger.
    :return: an :class:`~numpyro_bnn.metrics.classification.Auroc`.
    :raises ValueError: for other ranks, empty data, NaN or infinity.

    Reference: DeLong, DeLong and Clarke-Pearson (1988), *Comparing the areas under two
    or more correlated receiver operating characteristic curves*.

    >>> auroc([0.1, 0.3], [0.3, 0.9]).value
    0.875
    """
    inside = vector("auroc", "scores_in", scores_in)
    outside = vector("auroc", "scores_out", scores_out)
    above, below = _share_below(inside, outside), 1.0 - _share_below(outside, inside)
    return Auroc(
        float(above.mean()),
        float(np.hypot(standard_error(above), standard_error(below))),
    )


def _entropy(probs: Floats) -> Floats:
    return -(probs * np.log(np.where(probs > 0, probs, 1.0))).sum(axis=-1)


def _share_below(group: Floats, points: Floats) -> Floats:
    """Fraction of ``group`` below each point, counting ties as half."""
    ordered = np.sort(group)
    twice = np.searchsorted(ordered, points, side="left") + np.searchsorted(
        ordered, points, side="right"
    )
    return twice / (2.0 * group.size)
