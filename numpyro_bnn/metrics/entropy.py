"""How uncertain a class prediction is, and how much of that the data could still remove."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from numpyro_bnn.metrics._inputs import probabilities

__all__ = ["Uncertainty", "uncertainty"]


class Uncertainty(NamedTuple):
    """Uncertainty of N class predictions, in nats.

    :param total: (N,) entropy of the predictive distribution.
    :param aleatoric: (N,) mean entropy of the draws: noise that more data does not remove.
    :param mutual_information: (N,) their difference, between label and weights: what the draws disagree on.
    """

    total: NDArray[np.float64]
    aleatoric: NDArray[np.float64]
    mutual_information: NDArray[np.float64]


def uncertainty(probs: ArrayLike) -> Uncertainty:
    r"""Split the predictive entropy into noise and disagreement between draws.

    .. math:: H\Big[\frac1S \sum_s p_s\Big] = \frac1S \sum_s H[p_s] + I(y; \theta)

    :param probs: (S, N, K) or (C, S, N, K) draws of class probabilities.
    :return: three arrays (N,); each also serves as a score for :func:`auroc`.
    :raises ValueError: for other ranks, NaN, or rows that do not sum to 1.

    Reference: Houlsby, Huszar, Ghahramani and Lengyel (2011), *Bayesian active learning for classification and
    preference learning*, equation (2).

    **Example**

    >>> draws = [[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.5, 0.5]]]
    >>> uncertainty(draws).mutual_information.round(4).tolist()
    [0.6931, 0.0]
    """
    array = probabilities("uncertainty", probs, {3: "(S, N, K)", 4: "(C, S, N, K)"})
    draws = array.reshape(-1, *array.shape[-2:])
    total, aleatoric = _entropy(draws.mean(axis=0)), _entropy(draws).mean(axis=0)
    # Not negative by Jensen's inequality; rounding can make it so.
    return Uncertainty(total, aleatoric, np.maximum(total - aleatoric, 0.0))


def _entropy(probs: NDArray[np.float64]) -> NDArray[np.float64]:
    return -(probs * np.log(np.where(probs > 0, probs, 1.0))).sum(axis=-1)
