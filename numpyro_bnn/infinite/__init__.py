"""Infinitely wide networks: the Gaussian processes and tangent kernels of `nn`
specifications under their priors.
"""

from numpyro_bnn.infinite.fit import PriorFit, prior_fit
from numpyro_bnn.infinite.kernels import empirical_ntk, nngp, ntk
from numpyro_bnn.infinite.regression import GPRegression, Prediction, gp_regression

__all__ = [
    "nngp",
    "ntk",
    "empirical_ntk",
    "gp_regression",
    "GPRegression",
    "Prediction",
    "prior_fit",
    "PriorFit",
]
