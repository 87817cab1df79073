"""Guides: posterior approximations that NumPyro's SVI, Predictive and summaries take."""

from numpyro_bnn.guides.adf import ADFResult, ADFState, AutoADF

__all__ = ["AutoADF", "ADFResult", "ADFState"]
