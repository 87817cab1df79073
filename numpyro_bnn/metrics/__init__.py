"""Scores and diagnostics of predictions: NumPy arrays in, named tuples out.

Draws are shaped (S, N) or by chain (C, S, N); every score is computed in float64 and
comes with its value at every data point and a standard error over data points.
"""

from numpyro_bnn.metrics._inputs import HealthWarning, Score
from numpyro_bnn.metrics.classification import (
    accuracy,
    auroc,
    brier,
    ece,
    log_score,
    relative_logit_variance,
    uncertainty,
)
from numpyro_bnn.metrics.draws import (
    crps,
    function_space,
    interval_coverage,
    lppd,
    pit,
    rmse,
)
from numpyro_bnn.metrics.health import health

__all__ = [
    "lppd",
    "rmse",
    "crps",
    "interval_coverage",
    "pit",
    "accuracy",
    "brier",
    "log_score",
    "ece",
    "auroc",
    "uncertainty",
    "relative_logit_variance",
    "function_space",
    "Score",
    "health",
    "HealthWarning",
]
