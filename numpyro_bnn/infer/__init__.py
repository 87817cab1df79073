"""Stochastic-gradient MCMC kernels for ``numpyro.infer.MCMC``, on the subsampled plates of a model."""

from numpyro_bnn.infer import schedules
from numpyro_bnn.infer.base import SGMCMCKernel
from numpyro_bnn.infer.cyclical import CyclicalSGLD
from numpyro_bnn.infer.exact import GGMC, MALA
from numpyro_bnn.infer.momentum import SGHMC, SGNHT
from numpyro_bnn.infer.orbit import OrbitMoves, OrbitState
from numpyro_bnn.infer.sgld import PSGLD, SGLD
from numpyro_bnn.infer.state import SGMCMCState
from numpyro_bnn.infer.temperature import temperature_band

__all__ = [
    "SGLD",
    "PSGLD",
    "SGHMC",
    "SGNHT",
    "CyclicalSGLD",
    "GGMC",
    "MALA",
    "OrbitMoves",
    "OrbitState",
    "SGMCMCKernel",
    "SGMCMCState",
    "schedules",
    "temperature_band",
]
