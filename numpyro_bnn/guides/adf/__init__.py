"""Assumed density filtering (probabilistic backpropagation)."""

from numpyro_bnn.guides.adf.guide import AutoADF
from numpyro_bnn.guides.adf.problem import ADFState
from numpyro_bnn.guides.adf.run import ADFResult

__all__ = ["AutoADF", "ADFResult", "ADFState"]
