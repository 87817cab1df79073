"""Infinitely wide networks: the Gaussian processes and tangent kernels of `nn` specifications under their priors."""

from numpyro_bnn.infinite.empirical import empirical_ntk
from numpyro_bnn.infinite.ensemble import ntk_ensemble
from numpyro_bnn.infinite.fit import PriorFit, prior_fit
from numpyro_bnn.infinite.gp import GPRegression, Prediction, gp_regression, log_marginal_likelihood
from numpyro_bnn.infinite.kernel import nngp, ntk, prior_variance

__all__ = [
    "nngp",
    "ntk",
    "prior_variance",
    "empirical_ntk",
    "gp_regression",
    "GPRegression",
    "Prediction",
    "log_marginal_likelihood",
    "ntk_ensemble",
    "prior_fit",
    "PriorFit",
]
