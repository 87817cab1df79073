"""The names that the reader of models had before it could evaluate densities."""

from numpyro_bnn.program.plates import Plate
from numpyro_bnn.program.posterior import Posterior, initial_values
from numpyro_bnn.program.sites import CONDITIONED, Site, Sites, arrays_in

__all__ = [
    "CONDITIONED",
    "Plate",
    "Reading",
    "Site",
    "Sites",
    "arrays_in",
    "initial_values",
]

Reading = Posterior
