"""Runs that survive: in a folder, in blocks, resumed by the call that started them."""

from numpyro_bnn.runs.fitting import fit
from numpyro_bnn.runs.sampling import Run, start

__all__ = ["Run", "fit", "start"]
