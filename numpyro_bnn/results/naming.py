"""Names of variables and dimensions in results."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# Names of the axes of a network parameter, by the last part of its name and its rank.
PARAMETER_AXES = {
    ("kernel", 2): ("in", "out"),
    ("kernel", 4): ("h", "w", "in", "out"),
    ("bias", 1): ("out",),
    ("scale", 1): ("out",),
}


def safe(name: str) -> str:
    """Variable name that netCDF and DataTree accept: the ``/`` of a site becomes a dot.

    >>> safe("net/Dense_0.kernel")
    'net.Dense_0.kernel'
    """
    return name.replace("/", ".")


def parameter_dims(name: str, shape: Sequence[int]) -> tuple[str, ...]:
    """Dimensions of a posterior variable without chain and draw.

    Kernels and biases get ``_in``, ``_out`` (and ``_h``, ``_w``) after their name, everything else ArviZ's
    ``<name>_dim_<i>``.

    >>> parameter_dims("net.Dense_0.kernel", (3, 8))
    ('net.Dense_0.kernel_in', 'net.Dense_0.kernel_out')
    >>> parameter_dims("tau", (2,))
    ('tau_dim_0',)
    """
    leaf = name.rsplit(".", 1)[-1].removesuffix("_base")
    axes = PARAMETER_AXES.get((leaf, len(shape))) if "." in name else None
    return tuple(f"{name}_{axis}" for axis in axes or [f"dim_{i}" for i in range(len(shape))])


def site_dims(site: Mapping[str, Any], name: str, shape: Sequence[int]) -> tuple[str, ...]:
    """Dimensions of a value of a site, without chain and draw: plates by their names, the other axes numbered.

    >>> from numpyro.primitives import CondIndepStackFrame
    >>> site_dims({"cond_indep_stack": [CondIndepStackFrame("data", -1, 5)]}, "y", (5, 2))
    ('data', 'y_dim_1')
    """
    # Batch axes come before event axes, the outermost plate (most negative dim) first.
    plates = sorted(site["cond_indep_stack"], key=lambda frame: frame.dim)
    dims = [f"{name}_dim_{i}" for i in range(len(shape))]
    offset = -plates[0].dim if plates else 0
    for frame in plates:
        axis = offset + frame.dim
        if axis < len(shape) and np.shape(shape) and shape[axis] == frame.size:
            dims[axis] = safe(frame.name)
    return tuple(dims)
