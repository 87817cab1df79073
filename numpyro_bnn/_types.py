"""Names of types that several rooms share."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from jax import Array
from numpy.typing import NDArray

# Arrays in containers that JAX goes through: a state, a minibatch, an argument.
PyTree: TypeAlias = Any
Arrays: TypeAlias = Mapping[str, Array]  # by name
HostArrays: TypeAlias = Mapping[str, np.ndarray]  # by name, of NumPy
Floats: TypeAlias = NDArray[np.float64]
Trees: TypeAlias = Mapping[str, PyTree]  # by name
Scalar: TypeAlias = Array | float
# What an equation of a program takes: an array, or what a rule says of one.
Operand: TypeAlias = Any
Kwargs: TypeAlias = Mapping[str, Any]  # keyword arguments of a model
# A site as NumPyro's handlers see it, and all of a trace by name.
Site: TypeAlias = dict[str, Any]
Sites: TypeAlias = Mapping[str, Site]
Attributes: TypeAlias = dict[str, Any]  # of a run or a result: numbers and text
# Or a DataTree of xarray: the version of ArviZ decides.
InferenceData: TypeAlias = Any
Optimizer: TypeAlias = Any  # of optax, which is imported when it is needed
Atom: TypeAlias = Any  # of a program: a variable of an equation, or a number
Shape: TypeAlias = tuple[int, ...]
