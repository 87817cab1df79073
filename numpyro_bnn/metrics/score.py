"""The result that every pointwise score returns."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Score", "mean_score", "standard_error"]


class Score(NamedTuple):
    """A score over N data points.

    :param value: the score.
    :param standard_error: standard error of ``value`` over data points (NaN for one point).
    :param pointwise: (N,) the score of every data point.
    """

    value: float
    standard_error: float
    pointwise: NDArray[np.float64]


def mean_score(pointwise: NDArray[np.float64]) -> Score:
    """The mean of a pointwise score."""
    return Score(float(pointwise.mean()), standard_error(pointwise), pointwise)


def standard_error(values: NDArray[np.float64]) -> float:
    """Standard error of the mean of independent values; NaN for one value or infinite ones."""
    if values.size < 2 or not np.isfinite(values).all():
        return float("nan")
    return float(values.std(ddof=1) / np.sqrt(values.size))
