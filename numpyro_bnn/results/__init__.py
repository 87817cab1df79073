"""Results for ArviZ: export of draws with predictions, log likelihood and data."""

from numpyro_bnn.results.export import to_inference_data
from numpyro_bnn.results.prediction import predict

__all__ = ["predict", "to_inference_data"]
