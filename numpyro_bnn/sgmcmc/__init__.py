"""Stochastic-gradient MCMC on flat vectors: pure ``init``, ``step`` and ``run``, built from interchangeable parts."""

from numpyro_bnn.sgmcmc.engine import Sampler, Seeds, State, Statistics, build, fresh_seeds, reset_statistics
from numpyro_bnn.sgmcmc.gradients import SVRG, ControlVariates, Full, Minibatch
from numpyro_bnn.sgmcmc.hamiltonian import HMC
from numpyro_bnn.sgmcmc.interfaces import (
    Dynamics,
    Evaluation,
    Gradient,
    Preconditioner,
    StepContext,
    StepRandomness,
    StepResult,
)
from numpyro_bnn.sgmcmc.metropolis import GGMC, MALA
from numpyro_bnn.sgmcmc.microcanonical import Direction, Microcanonical, MicrocanonicalMetropolis
from numpyro_bnn.sgmcmc.minibatches import (
    Epochs,
    FullData,
    Keys,
    ProductStream,
    Rows,
    Stream,
    WithReplacement,
)
from numpyro_bnn.sgmcmc.overdamped import Overdamped
from numpyro_bnn.sgmcmc.preconditioners import (
    Blocks,
    Curvature,
    Dense,
    Diagonal,
    Identity,
    RMSProp,
    from_squared_gradients,
)
from numpyro_bnn.sgmcmc.schedules import Constant, Cyclical, Polynomial, constant, cyclical, polynomial
from numpyro_bnn.sgmcmc.thermostat import NoseHoover
from numpyro_bnn.sgmcmc.underdamped import BAOAB, OBABO

__all__ = [
    "build",
    "Sampler",
    "State",
    "Statistics",
    "Seeds",
    "fresh_seeds",
    "reset_statistics",
    "Gradient",
    "Full",
    "Minibatch",
    "ControlVariates",
    "SVRG",
    "Stream",
    "FullData",
    "WithReplacement",
    "Epochs",
    "Keys",
    "Rows",
    "ProductStream",
    "Dynamics",
    "Overdamped",
    "BAOAB",
    "OBABO",
    "NoseHoover",
    "MALA",
    "HMC",
    "GGMC",
    "Microcanonical",
    "MicrocanonicalMetropolis",
    "Direction",
    "Preconditioner",
    "Identity",
    "Diagonal",
    "Dense",
    "Blocks",
    "RMSProp",
    "Curvature",
    "from_squared_gradients",
    "Constant",
    "Polynomial",
    "Cyclical",
    "constant",
    "polynomial",
    "cyclical",
    "StepRandomness",
    "StepContext",
    "Evaluation",
    "StepResult",
]
