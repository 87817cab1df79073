"""How well a score separates two groups of points, e.g. known from foreign inputs."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from numpyro_bnn.metrics._inputs import vector
from numpyro_bnn.metrics.score import standard_error

__all__ = ["Auroc", "auroc"]


class Auroc(NamedTuple):
    """Area under the receiver operating characteristic.

    :param value: the area; 0.5 is chance, 1 perfect separation.
    :param standard_error: its standard error over both groups (NaN if one of them is a single point).
    """

    value: float
    standard_error: float


def auroc(scores_in: ArrayLike, scores_out: ArrayLike) -> Auroc:
    r"""Probability that a point of the second group has the larger score.

    .. math:: P(s_\mathrm{out} > s_\mathrm{in}) + \tfrac12 P(s_\mathrm{out} = s_\mathrm{in})

    For a binary classifier pass the scores of the negative and of the positive points:
    ``auroc(scores[y == 0], scores[y == 1])``.

    :param scores_in: (N,) scores of known points, e.g. the mutual information of :func:`uncertainty`.
    :param scores_out: (M,) scores of foreign points, expected to be larger.
    :raises ValueError: for other ranks, empty data, NaN or infinity.

    Reference: DeLong, DeLong and Clarke-Pearson (1988), *Comparing the areas under two or more correlated
    receiver operating characteristic curves*.

    **Example**

    >>> auroc([0.1, 0.3], [0.3, 0.9]).value
    0.875
    """
    known = vector("auroc", "scores_in", scores_in)
    foreign = vector("auroc", "scores_out", scores_out)
    above = _share_below(known, foreign)
    below = 1.0 - _share_below(foreign, known)
    return Auroc(float(above.mean()), float(np.hypot(standard_error(above), standard_error(below))))


def _share_below(group: NDArray[np.float64], points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Share of ``group`` below each point, those equal to it counted half."""
    ordered = np.sort(group)
    twice = np.searchsorted(ordered, points, side="left") + np.searchsorted(ordered, points, side="right")
    return twice / (2.0 * group.size)
