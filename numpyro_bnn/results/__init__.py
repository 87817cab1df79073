"""Results for ArviZ: export of draws with predictions, log likelihood and data, and saving to files."""

from numpyro_bnn._arviz import load, save
from numpyro_bnn.results.export import to_inference_data

__all__ = ["to_inference_data", "save", "load"]
