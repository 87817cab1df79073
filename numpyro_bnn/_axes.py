"""Names of the toolbox for programs that other rooms still import from here."""

from numpyro_bnn._programs.axes import Axis, LabelPlaces, follow_axes, moved
from numpyro_bnn._programs.primitives import Place, dot_axes

__all__ = ["Axis", "LabelPlaces", "Place", "dot_axes", "follow_axes", "moved"]
