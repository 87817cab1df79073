"""Runs that survive, in folders, resumed by the call that started them; rows of data
that stay on disk, or come from a loader.
"""

from numpyro_bnn.program.batches import batches
from numpyro_bnn.program.rows import Rows
from numpyro_bnn.runs.fitting import fit
from numpyro_bnn.runs.sampling import Run, start

__all__ = ["Rows", "Run", "batches", "fit", "start"]
