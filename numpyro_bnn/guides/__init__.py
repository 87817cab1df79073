"""Guides: posterior approximations that NumPyro's SVI, Predictive and summaries take."""

from numpyro_bnn.guides.adf import ADFResult, AutoADF
from numpyro_bnn.guides.amortized import AutoAmortized
from numpyro_bnn.guides.base import AutoBlocks
from numpyro_bnn.guides.blocks import Block, Family
from numpyro_bnn.guides.comparison import EvidenceComparison, compare
from numpyro_bnn.guides.coupling import AutoCoupling, AutoSplineCoupling
from numpyro_bnn.guides.elbo import TraceFlipout_ELBO, TraceLocalReparam_ELBO
from numpyro_bnn.guides.evidence import Evidence, evidence, log_weights, summarize
from numpyro_bnn.guides.families import Diagonal, FullRank, LowRank, MatrixNormal
from numpyro_bnn.guides.fitting import fit
from numpyro_bnn.guides.flows import Coupling, Flowjax, SplineCoupling
from numpyro_bnn.guides.gradients import GradientVariance, gradient_variance
from numpyro_bnn.guides.mean_field import AutoMeanField
from numpyro_bnn.guides.mnf import AutoMNF
from numpyro_bnn.guides.objectives import TraceInclusiveKL_ELBO
from numpyro_bnn.guides.starting import init_to_fan_in
from numpyro_bnn.guides.structured import AutoMatrixNormal, AutoStructured

__all__ = [
    "AutoADF",
    "ADFResult",
    "AutoBlocks",
    "AutoMeanField",
    "AutoStructured",
    "AutoMatrixNormal",
    "AutoCoupling",
    "AutoSplineCoupling",
    "AutoMNF",
    "AutoAmortized",
    "Family",
    "Block",
    "Diagonal",
    "FullRank",
    "LowRank",
    "MatrixNormal",
    "Coupling",
    "SplineCoupling",
    "Flowjax",
    "init_to_fan_in",
    "TraceLocalReparam_ELBO",
    "TraceFlipout_ELBO",
    "TraceInclusiveKL_ELBO",
    "fit",
    "evidence",
    "Evidence",
    "log_weights",
    "summarize",
    "compare",
    "EvidenceComparison",
    "gradient_variance",
    "GradientVariance",
]
