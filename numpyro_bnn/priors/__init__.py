"""Priors of networks: callables (name, shape) -> Distribution for our own, Flax, NNX
and Equinox networks.
"""

from numpyro_bnn._distributions import GroupStudentT
from numpyro_bnn.priors.base import BySite, Prior, noncenter
from numpyro_bnn.priors.filters import GPFilters
from numpyro_bnn.priors.independent import Laplace, Normal, ScaleMixture, StudentT
from numpyro_bnn.priors.learned import (
    ARD,
    GammaPrecision,
    Hierarchical,
    Horseshoe,
    RegularizedHorseshoe,
)
from numpyro_bnn.priors.pretrained import Centered, Fixed, Learned

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
    "Fixed",
    "Centered",
    "Learned",
    "BySite",
    "noncenter",
    "Prior",
]
