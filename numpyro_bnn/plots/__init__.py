"""Figures of results: functions that take what ``to_inference_data``, or an estimator,
returns and draw on Matplotlib axes.

Needs Matplotlib: ``pip install "numpyro_bnn[plots]"``. No global setting of Matplotlib
is changed.
"""

from numpyro_bnn.plots.calibration import calibration, reliability_diagram
from numpyro_bnn.plots.importances import importances
from numpyro_bnn.plots.predictive import predicted_vs_observed, predictive_band

__all__ = [
    "predictive_band",
    "predicted_vs_observed",
    "calibration",
    "reliability_diagram",
    "importances",
]
