"""Scores and diagnostics of predictions: NumPy arrays in, named tuples out.

Draws are shaped (S, N) or by chain (C, S, N); every score is computed in float64 and comes with its value at
every data point and a standard error over data points.
"""

from numpyro_bnn.metrics.classification import accuracy, brier, log_score
from numpyro_bnn.metrics.convergence import FunctionSpace, function_space
from numpyro_bnn.metrics.entropy import Uncertainty, uncertainty
from numpyro_bnn.metrics.logits import relative_logit_variance
from numpyro_bnn.metrics.ood import Auroc, auroc
from numpyro_bnn.metrics.regression import Coverage, crps, interval_coverage, lppd, pit, rmse
from numpyro_bnn.metrics.reliability import Reliability, ece
from numpyro_bnn.metrics.score import Score

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
    "Coverage",
    "Reliability",
    "Auroc",
    "Uncertainty",
    "FunctionSpace",
]
