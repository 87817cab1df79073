"""Results for ArviZ: draws exported with predictions, log likelihood and data, and files of them."""

from numpyro_bnn._arviz import load, save
from numpyro_bnn.results.export import to_inference_data

__all__ = ["to_inference_data", "save", "load"]
