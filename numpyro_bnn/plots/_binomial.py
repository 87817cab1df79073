"""How often what is predicted comes true, and how far chance alone lets that stray."""

from typing import TYPE_CHECKING, Any

import numpy as np

from numpyro_bnn import metrics
from numpyro_bnn.plots import _style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["SPREAD", "binomial_band", "reliability_curve"]

SPREAD = "95 % if calibrated"


def binomial_band(count: int, share: float, level: float = 0.95) -> tuple[float, float]:
    """Central interval of the share of ``count`` independent points that are in, each with chance ``share``."""
    k = np.arange(1, count + 1)
    log_odds = np.log(share) - np.log1p(-share)
    log_mass = np.concatenate([[0.0], np.cumsum(np.log((count - k + 1) / k) + log_odds)])
    mass = np.exp(log_mass - log_mass.max())
    cumulative = np.cumsum(mass / mass.sum())
    low, high = np.searchsorted(cumulative, [(1 - level) / 2, (1 + level) / 2])
    return float(low / count), float(high / count)


def reliability_curve(axis: "Axes", table: metrics.Reliability) -> None:
    """Share of right labels by confidence, over the band of a calibrated model."""
    filled = table.counts > 0
    confidence, accuracy, counts = table.confidence[filled], table.accuracy[filled], table.counts[filled]
    # A confidence of exactly 1 (or 0) leaves no room for chance.
    bands = [binomial_band(n, np.clip(p, 1e-12, 1 - 1e-12)) for n, p in zip(counts, confidence, strict=True)]
    low, high = np.transpose(bands)
    axis.vlines(confidence, low, high, color="0.8", linewidth=4, label=SPREAD)
    axis.plot([0, 1], [0, 1], color=_style.DATA, linewidth=0.6)
    axis.plot(
        confidence, accuracy, color=_style.FUNCTION, marker="o", markersize=3, label="most probable class"
    )
    axis.set(xlabel="confidence", ylabel="share of right labels", xlim=(0, 1), ylim=(0, 1.02))
    above: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "borderaxespad": 0.2}
    title = f"ECE {100 * table.ece:.1f} %"
    axis.legend(title=title, title_fontsize="medium", alignment="left", ncols=2, **above)
