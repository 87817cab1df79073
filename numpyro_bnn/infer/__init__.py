"""Kernels for ``numpyro.infer.MCMC``: stochastic gradients, microcanonical, exact blocks, symmetries, tempering."""

from numpyro_bnn.infer.base import SGMCMCKernel
from numpyro_bnn.infer.block import BlockState
from numpyro_bnn.infer.collapse import collapse
from numpyro_bnn.infer.cyclical import CyclicalSGLD
from numpyro_bnn.infer.devices import parallel_vectorized
from numpyro_bnn.infer.exact import GGMC, MALA
from numpyro_bnn.infer.gaussian_gibbs import GaussianGibbs
from numpyro_bnn.infer.hamiltonian import GHMC
from numpyro_bnn.infer.mclmc import MCLMC, implied_bias
from numpyro_bnn.infer.momentum import SGHMC, SGNHT
from numpyro_bnn.infer.orbit import OrbitMoves, OrbitState
from numpyro_bnn.infer.precision_gibbs import PrecisionGibbs, conjugate_sites
from numpyro_bnn.infer.sgld import PSGLD, SGLD
from numpyro_bnn.infer.state import SGMCMCState
from numpyro_bnn.infer.temperature import temperature_band
from numpyro_bnn.infer.tempering import ParallelTempering, TemperingState
from numpyro_bnn.infer.unit_moves import UnitMoves, UnitState
from numpyro_bnn.infer.warm_start import WarmStart
from numpyro_bnn.sgmcmc import schedules

__all__ = [
    "SGLD",
    "PSGLD",
    "SGHMC",
    "SGNHT",
    "CyclicalSGLD",
    "GGMC",
    "MALA",
    "GHMC",
    "MCLMC",
    "implied_bias",
    "OrbitMoves",
    "OrbitState",
    "UnitMoves",
    "UnitState",
    "PrecisionGibbs",
    "GaussianGibbs",
    "collapse",
    "BlockState",
    "conjugate_sites",
    "ParallelTempering",
    "TemperingState",
    "WarmStart",
    "SGMCMCKernel",
    "SGMCMCState",
    "parallel_vectorized",
    "schedules",
    "temperature_band",
]
