"""Guides: posterior approximations for NumPyro's SVI, Predictive and posterior
summaries.
"""

from numpyro_bnn.guides.adf import ADFResult, AutoADF
from numpyro_bnn.guides.auto_blocks import AutoBlocks
from numpyro_bnn.guides.blocks import Block, FullRank, LowRank
from numpyro_bnn.guides.coupling import AutoCoupling, Coupling
from numpyro_bnn.guides.elbo import TraceFlipout_ELBO, TraceLocalReparam_ELBO
from numpyro_bnn.guides.evidence import Evidence, evidence, summarize
from numpyro_bnn.guides.fitting import fit
from numpyro_bnn.guides.flowjax import Flowjax
from numpyro_bnn.guides.gaussian import AutoMeanField, AutoStructured
from numpyro_bnn.guides.initialization import init_to_fan_in
from numpyro_bnn.guides.laplace import AutoLaplace, LaplaceResult

__all__ = [
    "AutoADF",
    "ADFResult",
    "AutoLaplace",
    "LaplaceResult",
    "AutoBlocks",
    "AutoMeanField",
    "AutoStructured",
    "AutoCoupling",
    "Block",
    "FullRank",
    "LowRank",
    "Coupling",
    "Flowjax",
    "init_to_fan_in",
    "TraceLocalReparam_ELBO",
    "TraceFlipout_ELBO",
    "fit",
    "evidence",
    "Evidence",
    "summarize",
]
