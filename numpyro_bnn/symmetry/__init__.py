"""Symmetries of networks: groups that act on weights without changing the
likelihood.
"""

from numpyro_bnn.symmetry.base import Symmetry
from numpyro_bnn.symmetry.canonical import canonical
from numpyro_bnn.symmetry.draws import invariants, orbit_coordinates
from numpyro_bnn.symmetry.finding import check, find, from_network
from numpyro_bnn.symmetry.groups import (
    JointRescale,
    JointScale,
    Permutation,
    Rescale,
    Scale,
    Shift,
    SignFlip,
)

__all__ = [
    "from_network",
    "find",
    "check",
    "canonical",
    "invariants",
    "orbit_coordinates",
    "Symmetry",
    "Scale",
    "Rescale",
    "JointScale",
    "JointRescale",
    "Shift",
    "SignFlip",
    "Permutation",
]
