"""Scores of class probabilities.

Each function takes predictive probabilities (N, K), or draws of them, (S, N, K) or (C, S, N, K), which it
averages first: the prediction of a Bayesian network is the mean of its probabilities.
"""

import numpy as np
from numpy.typing import ArrayLike

from numpyro_bnn.metrics._inputs import probs_and_labels
from numpyro_bnn.metrics.score import Score, mean_score

__all__ = ["accuracy", "brier", "log_score"]


def accuracy(probs: ArrayLike, labels: ArrayLike) -> Score:
    """Share of points whose most probable class is the label (of equal ones, the first).

    :param probs: (N, K), (S, N, K) or (C, S, N, K) probabilities.
    :param labels: (N,) integers 0..K-1.
    :return: the share, its standard error, and 1 or 0 for every point (N,).
    :raises ValueError: for other ranks, unequal lengths, rows that do not sum to 1, labels outside 0..K-1.

    **Example**

    >>> accuracy([[0.9, 0.1], [0.4, 0.6]], [0, 0]).value
    0.5
    """
    array, known = probs_and_labels("accuracy", probs, labels)
    return mean_score((array.argmax(axis=1) == known).astype(np.float64))


def brier(probs: ArrayLike, labels: ArrayLike) -> Score:
    r"""Brier score over all K classes, :math:`\frac1N \sum_n \sum_k (p_{nk} - 1[y_n = k])^2`, from 0 to 2.

    Smaller is better. For two classes it is twice the score that is computed from one of them.

    :param probs: (N, K), (S, N, K) or (C, S, N, K) probabilities.
    :param labels: (N,) integers 0..K-1.
    :return: the mean over points, its standard error, and the score of every point (N,).
    :raises ValueError: for other ranks, unequal lengths, rows that do not sum to 1, labels outside 0..K-1.

    Reference: Brier (1950), *Verification of forecasts expressed in terms of probability*.

    **Example**

    >>> round(brier([[0.8, 0.2]], [0]).value, 6)
    0.08
    """
    array, known = probs_and_labels("brier", probs, labels)
    return mean_score(((array - np.eye(array.shape[1])[known]) ** 2).sum(axis=1))


def log_score(probs: ArrayLike, labels: ArrayLike) -> Score:
    r"""Mean log probability of the label, :math:`\frac1N \sum_n \log p_{n y_n}`; larger is better.

    From draws it equals ``lppd`` of their log probabilities. Its negative is the cross-entropy.

    :param probs: (N, K), (S, N, K) or (C, S, N, K) probabilities.
    :param labels: (N,) integers 0..K-1.
    :return: the mean over points, its standard error, and the score of every point (N,); minus infinity
        where the label was given probability 0.
    :raises ValueError: for other ranks, unequal lengths, rows that do not sum to 1, labels outside 0..K-1.

    **Example**

    >>> round(log_score([[0.8, 0.2]], [0]).value, 4)
    -0.2231
    """
    array, known = probs_and_labels("log_score", probs, labels)
    with np.errstate(divide="ignore"):
        return mean_score(np.log(array[np.arange(known.size), known]))
