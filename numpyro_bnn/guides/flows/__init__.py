"""Flows: coupling layers as NumPyro transforms, and families of blocks made of them."""

from numpyro_bnn.guides.flows.conditioner import Conditioner
from numpyro_bnn.guides.flows.coupling import AffineCoupling
from numpyro_bnn.guides.flows.families import Coupling, SplineCoupling
from numpyro_bnn.guides.flows.flowjax import Flowjax
from numpyro_bnn.guides.flows.spline import RationalQuadraticCoupling

__all__ = [
    "AffineCoupling",
    "Conditioner",
    "Coupling",
    "Flowjax",
    "RationalQuadraticCoupling",
    "SplineCoupling",
]
