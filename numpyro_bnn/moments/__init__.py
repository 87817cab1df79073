"""Means and variances carried through any JAX program, without sampling."""

from numpyro_bnn.moments import closed_forms, linear, structural  # noqa: F401  (they fill the tables)
from numpyro_bnn.moments.closed_forms import leaky_relu
from numpyro_bnn.moments.elementwise import register_elementwise
from numpyro_bnn.moments.gaussian import Gaussian
from numpyro_bnn.moments.interpret import Equation, Interpreter
from numpyro_bnn.moments.maximum import maximum, maximum_of
from numpyro_bnn.moments.propagate import propagate
from numpyro_bnn.moments.rectifier import rectified
from numpyro_bnn.moments.registry import register

__all__ = [
    "Gaussian",
    "propagate",
    "register",
    "register_elementwise",
    "Equation",
    "Interpreter",
    "rectified",
    "maximum",
    "maximum_of",
    "leaky_relu",
]
