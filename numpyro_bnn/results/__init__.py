"""Results for ArviZ: export of draws with predictions, log likelihood and data."""

from numpyro_bnn.results.export import to_inference_data

__all__ = ["to_inference_data"]
