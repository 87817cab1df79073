"""Step-size schedules: callables from the number of a step to eps."""

from numpyro_bnn.sgmcmc.schedules import constant, cyclical, polynomial

__all__ = ["constant", "cyclical", "polynomial"]
