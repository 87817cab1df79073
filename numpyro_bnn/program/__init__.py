"""What is a model? One reading of a model and its arguments, its plates, and compiled
calls of it.
"""

from numpyro_bnn.program.reading import Reading

__all__ = ["Reading"]
