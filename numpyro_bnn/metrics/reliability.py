"""Is a class predicted with 80 % right 80 % of the time?"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from numpyro_bnn._checks import argument_error
from numpyro_bnn.metrics._inputs import probs_and_labels

__all__ = ["Reliability", "ece"]


class Reliability(NamedTuple):
    """Reliability curve of the most probable class, in M bins of its probability.

    :param ece: expected calibration error.
    :param max_gap: largest gap of a bin.
    :param edges: (M + 1,) edges of the bins, which hold their upper edge.
    :param counts: (M,) points in each bin.
    :param confidence: (M,) mean probability in each bin (NaN in an empty one).
    :param accuracy: (M,) share of right labels in each bin (NaN in an empty one).
    """

    ece: float
    max_gap: float
    edges: NDArray[np.float64]
    counts: NDArray[np.int64]
    confidence: NDArray[np.float64]
    accuracy: NDArray[np.float64]


def ece(probs: ArrayLike, labels: ArrayLike, bins: int = 15) -> Reliability:
    r"""Expected calibration error of the most probable class.

    .. math:: \sum_{m=1}^{M} \frac{n_m}{N} \left| \mathrm{acc}_m - \mathrm{conf}_m \right|

    Bins of equal width. Of a perfectly calibrated model it is positive, near
    :math:`\sum_m \sqrt{2 n_m\, \mathrm{acc}_m (1 - \mathrm{acc}_m) / \pi} / N`: compare models on equal N and M.

    :param probs: (N, K), (S, N, K) or (C, S, N, K) probabilities; draws are averaged.
    :param labels: (N,) integers 0..K-1.
    :param bins: number M of bins.
    :raises ValueError: for other ranks, unequal lengths, rows that do not sum to 1, labels outside 0..K-1,
        or fewer than one bin.

    Reference: Guo, Pleiss, Sun and Weinberger (2017), *On calibration of modern neural networks*, equation (3).

    **Example**

    >>> round(ece([[0.9, 0.1]] * 10, [0] * 7 + [1] * 3).ece, 6)
    0.2
    """
    array, known = probs_and_labels("ece", probs, labels)
    if not isinstance(bins, (int, np.integer)) or bins < 1:
        raise argument_error("ece", "bins", bins, "Pass a whole number of bins, e.g. 15.")
    top = array.max(axis=1)
    right = (array.argmax(axis=1) == known).astype(np.float64)
    edges = np.linspace(0.0, 1.0, bins + 1)
    # Rounding can lift a probability just above 1, hence the clip.
    place = np.clip(np.searchsorted(edges, top, side="left") - 1, 0, bins - 1)
    count = np.bincount(place, minlength=bins)
    size = np.where(count > 0, count, np.nan)
    confidence = np.bincount(place, weights=top, minlength=bins) / size
    accuracy = np.bincount(place, weights=right, minlength=bins) / size
    gaps = np.where(count > 0, np.abs(accuracy - confidence), 0.0)
    return Reliability(
        float(gaps @ count / known.size), float(gaps.max()), edges, count, confidence, accuracy
    )
