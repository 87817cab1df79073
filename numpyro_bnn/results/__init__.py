"""Results for ArviZ: export with predictions, model comparison, and files."""

from numpyro_bnn._arviz import load, save
from numpyro_bnn.results.comparison import LOO, LOOComparison, compare_loo, loo
from numpyro_bnn.results.export import to_inference_data

__all__ = ["to_inference_data", "loo", "compare_loo", "LOO", "LOOComparison", "save", "load"]
