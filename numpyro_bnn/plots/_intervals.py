"""Central intervals with a dot at the middle, side by side."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["offsets", "upright"]


def offsets(count: int, width: float = 0.6) -> NDArray[np.float64]:
    """Places of ``count`` intervals beside one another around 0, over at most ``width``."""
    step = min(width / count, 0.2)
    return np.asarray(step * (np.arange(count) - 0.5 * (count - 1)), dtype=np.float64)


def upright(
    axis: "Axes",
    places: NDArray[np.float64],
    draws: NDArray[np.float64],
    level: float,
    color: str,
    label: str,
    *,
    lying: bool = False,
    dot: float = 2.8,
) -> None:
    """Median and central interval of each column of ``draws`` (S, M) at its place; ``lying`` ones run along x.

    ``dot`` is the size of the dot in points.
    """
    low, middle, high = np.quantile(draws, [(1 - level) / 2, 0.5, (1 + level) / 2], axis=0, method="weibull")
    (axis.hlines if lying else axis.vlines)(places, low, high, color=color, linewidth=0.32 * dot)
    at = (middle, places) if lying else (places, middle)
    axis.plot(*at, linestyle="", marker="o", markersize=dot, color=color, label=label)
