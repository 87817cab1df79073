"""Symmetries of networks: groups that act on weights without changing the likelihood."""

from numpyro_bnn.symmetry.additive import Shift
from numpyro_bnn.symmetry.base import Symmetry
from numpyro_bnn.symmetry.canonical import canonical
from numpyro_bnn.symmetry.checking import Invariance, check, invariance
from numpyro_bnn.symmetry.derive import from_network
from numpyro_bnn.symmetry.discrete import Permutation, SignFlip
from numpyro_bnn.symmetry.find import find
from numpyro_bnn.symmetry.invariants import invariants, orbit_coordinates
from numpyro_bnn.symmetry.parts import Part
from numpyro_bnn.symmetry.quotient import quotient
from numpyro_bnn.symmetry.scaling import JointRescale, JointScale, Rescale, Scale

__all__ = [
    "from_network",
    "find",
    "quotient",
    "check",
    "invariance",
    "Invariance",
    "canonical",
    "invariants",
    "orbit_coordinates",
    "Symmetry",
    "Part",
    "Scale",
    "Rescale",
    "JointScale",
    "JointRescale",
    "Shift",
    "SignFlip",
    "Permutation",
]
