"""Propagation of means and variances through any JAX program, without sampling."""

from numpyro_bnn._jaxprs.walk import Equation, Interpreter
from numpyro_bnn.moments import closed_forms, rules  # noqa: F401  (they fill the tables of rules)
from numpyro_bnn.moments.registry import propagate, register
from numpyro_bnn.moments.rules import register_elementwise
from numpyro_bnn.moments.terms import Gaussian

__all__ = [
    "Gaussian",
    "propagate",
    "register",
    "register_elementwise",
    "Equation",
    "Interpreter",
]
