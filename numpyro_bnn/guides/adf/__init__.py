"""Assumed density filtering (probabilistic backpropagation)."""

from numpyro_bnn.guides.adf.guide import ADFResult, AutoADF

__all__ = ["AutoADF", "ADFResult"]
