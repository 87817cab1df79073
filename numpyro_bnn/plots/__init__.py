"""Figures of results: functions that take what ``to_inference_data`` gives and return Matplotlib axes.

Needs Matplotlib: ``pip install "numpyro_bnn[plots]"``. No global setting of Matplotlib is changed.
"""

from numpyro_bnn.plots.band import predictive_band
from numpyro_bnn.plots.calibrated import calibration
from numpyro_bnn.plots.corner import canonical_corner
from numpyro_bnn.plots.example import example_classes, example_results
from numpyro_bnn.plots.foreign import ood_histograms
from numpyro_bnn.plots.functions import posterior_functions
from numpyro_bnn.plots.members import member_intervals
from numpyro_bnn.plots.observed import predicted_vs_observed
from numpyro_bnn.plots.orbits import orbit_traces
from numpyro_bnn.plots.reliability import reliability_diagram
from numpyro_bnn.plots.sampler import sampler_traces
from numpyro_bnn.plots.scales import relevance
from numpyro_bnn.plots.trace import function_trace

__all__ = [
    "predictive_band",
    "posterior_functions",
    "predicted_vs_observed",
    "calibration",
    "reliability_diagram",
    "ood_histograms",
    "relevance",
    "function_trace",
    "member_intervals",
    "sampler_traces",
    "orbit_traces",
    "canonical_corner",
    "example_results",
    "example_classes",
]
