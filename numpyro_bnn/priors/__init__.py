"""Priors of networks: callables (name, shape) -> Distribution for ours, Flax, NNX and Equinox networks."""

from numpyro_bnn._group_student import GroupStudentT
from numpyro_bnn.priors.base import NonCentered, Prior, noncenter
from numpyro_bnn.priors.by_site import BySite, as_prior
from numpyro_bnn.priors.filters import COVARIANCES, GPFilters, filter_covariance
from numpyro_bnn.priors.gamma_precision import GammaPrecision
from numpyro_bnn.priors.hierarchical import ARD, Hierarchical
from numpyro_bnn.priors.horseshoe import Horseshoe, RegularizedHorseshoe
from numpyro_bnn.priors.independent import Laplace, Normal, StudentT
from numpyro_bnn.priors.mixture import ScaleMixture

__all__ = [
    "Normal",
    "Laplace",
    "StudentT",
    "ScaleMixture",
    "Hierarchical",
    "ARD",
    "GammaPrecision",
    "GroupStudentT",
    "Horseshoe",
    "RegularizedHorseshoe",
    "GPFilters",
    "BySite",
    "noncenter",
    "Prior",
    "NonCentered",
    "COVARIANCES",
    "filter_covariance",
    "as_prior",
]
