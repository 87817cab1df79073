"""Kernels for ``numpyro.infer.MCMC``: SG-MCMC, microcanonical, Metropolis, Gibbs,
symmetry moves, tempering.
"""

from numpyro_bnn.infer.base import SGMCMCKernel
from numpyro_bnn.infer.blackjax import BlackJAX, as_blackjax
from numpyro_bnn.infer.chain_methods import parallel_vectorized
from numpyro_bnn.infer.collapse import collapse
from numpyro_bnn.infer.diagnostics import temperature_band
from numpyro_bnn.infer.energy import implied_bias
from numpyro_bnn.infer.ensemble import ensemble
from numpyro_bnn.infer.mclmc import MCLMC
from numpyro_bnn.infer.metropolis import GHMC
from numpyro_bnn.infer.momentum import SGHMC, SGNHT
from numpyro_bnn.infer.orbit import OrbitMoves
from numpyro_bnn.infer.precision_gibbs import PrecisionGibbs
from numpyro_bnn.infer.sgld import PSGLD, SGLD, CyclicalSGLD
from numpyro_bnn.infer.tempering import ParallelTempering
from numpyro_bnn.infer.unit_moves import UnitMoves
from numpyro_bnn.infer.warm_start import WarmStart
from numpyro_bnn.sgmcmc import schedules

__all__ = [
    "SGLD",
    "PSGLD",
    "SGHMC",
    "SGNHT",
    "CyclicalSGLD",
    "GHMC",
    "MCLMC",
    "ensemble",
    "implied_bias",
    "OrbitMoves",
    "UnitMoves",
    "PrecisionGibbs",
    "collapse",
    "ParallelTempering",
    "WarmStart",
    "SGMCMCKernel",
    "BlackJAX",
    "as_blackjax",
    "parallel_vectorized",
    "schedules",
    "temperature_band",
]
