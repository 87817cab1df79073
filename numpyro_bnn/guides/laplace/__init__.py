"""Laplace approximations of networks: a Gaussian at the mode, with the Gauss-Newton
matrix as its precision.
"""

from numpyro_bnn.guides.laplace.guide import AutoLaplace, LaplaceResult

__all__ = ["AutoLaplace", "LaplaceResult"]
