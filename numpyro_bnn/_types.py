"""Names of types that several rooms share."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NewType, TypeAlias

import numpy as np
from jax import Array
from numpy.typing import NDArray

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
else:  # by its name: `help` would show a union of 400 characters
    ArrayLike = NewType("ArrayLike", object)
    ArrayLike.__module__ = "numpy.typing"

Shape: TypeAlias = tuple[int, ...]
Scalar: TypeAlias = Array | float
Floats: TypeAlias = NDArray[np.float64]

# Arrays in containers that JAX goes through: a state, a minibatch, an argument.
PyTree: TypeAlias = Any
# By name:
Arrays: TypeAlias = Mapping[str, Array]
HostArrays: TypeAlias = Mapping[str, np.ndarray]
Trees: TypeAlias = Mapping[str, PyTree]

# Of a model: keyword arguments, a site as NumPyro's handlers see it, and a trace.
Kwargs: TypeAlias = Mapping[str, Any]
Site: TypeAlias = dict[str, Any]
Sites: TypeAlias = Mapping[str, Site]

# Of a program: what an equation takes, an array or what a rule says of one; and where
# it takes it from, a variable or a number.
Operand: TypeAlias = Any
Atom: TypeAlias = Any

Attributes: TypeAlias = dict[str, Any]  # of a run or a result: numbers and text
# Or a DataTree of xarray: the version of ArviZ decides.
InferenceData: TypeAlias = Any
Optimizer: TypeAlias = Any  # of optax, which is imported when it is needed
