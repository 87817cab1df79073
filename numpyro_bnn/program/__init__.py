"""What is a model? One reading of a model and its arguments, its plates, its density,
and compiled calls of it.
"""

from numpyro_bnn.program.posterior import Posterior

__all__ = ["Posterior"]
