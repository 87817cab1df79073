"""Stochastic-gradient MCMC on flat vectors: pure ``init``, ``step`` and ``run``, built
from interchangeable parts.
"""

from numpyro_bnn.sgmcmc import schedules
from numpyro_bnn.sgmcmc.dynamics import BAOAB, Microcanonical, NoseHoover, Overdamped
from numpyro_bnn.sgmcmc.engine import Sampler, State, build
from numpyro_bnn.sgmcmc.gradients import ControlVariates, Full, Minibatch
from numpyro_bnn.sgmcmc.metropolis import HMC
from numpyro_bnn.sgmcmc.preconditioners import Dense, Diagonal, RMSProp
from numpyro_bnn.sgmcmc.streams import Epochs, WithReplacement

__all__ = [
    "build",
    "Sampler",
    "State",
    "Full",
    "Minibatch",
    "ControlVariates",
    "WithReplacement",
    "Epochs",
    "Overdamped",
    "BAOAB",
    "NoseHoover",
    "Microcanonical",
    "HMC",
    "Diagonal",
    "Dense",
    "RMSProp",
    "schedules",
]
