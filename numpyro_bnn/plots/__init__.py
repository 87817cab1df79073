"""Figures of results: every function takes what ``to_inference_data`` gives and returns Matplotlib axes.

Needs Matplotlib: ``pip install "numpyro_bnn[plots]"``. No global setting of Matplotlib is changed.
"""

from numpyro_bnn.plots.band import predictive_band
from numpyro_bnn.plots.calibrated import calibration
from numpyro_bnn.plots.example import example_results
from numpyro_bnn.plots.observed import predicted_vs_observed
from numpyro_bnn.plots.trace import function_trace

__all__ = ["predictive_band", "predicted_vs_observed", "calibration", "function_trace", "example_results"]
