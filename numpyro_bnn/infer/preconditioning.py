"""Turn the ``preconditioner=`` that a user passes into a part of the engine."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_bnn._checks import argument_error, unknown_name
from numpyro_bnn.sgmcmc import Dense, Diagonal, RMSProp
from numpyro_bnn.sgmcmc.interfaces import Preconditioner
from numpyro_bnn.sgmcmc.preconditioners import Blocks, Identity

NAMES = ("identity", "rmsprop", "warm_start")
# Diagonals that start at ones and are set later, by the warm start or by kernels that know these names.
LEARNED = ("warm_start", "variance", "gradient_noise")


def is_named(spec: Any, name: str) -> bool:
    """Whether a preconditioner is the one of this name; it may also be an array."""
    return isinstance(spec, str) and spec == name


def resolve(call: str, spec: Any, z: Mapping[str, jax.Array], num_data: int) -> Preconditioner:
    """Make the preconditioner of a flat position.

    :param spec: ``None``, a name, a number, an array (P,) or (P, P), a dictionary of numbers and arrays by site
        (unconstrained shape: scalar, diagonal of its size, or dense matrix; sites left out get 1), or a
        :class:`~numpyro_bnn.sgmcmc.interfaces.Preconditioner`.
    :param z: unconstrained values by site; the flat position holds them in the order of their names.
    :param num_data: N, for RMSProp.
    :raises ValueError: for an unknown name or site, or a shape that does not fit.
    """
    if spec is None or is_named(spec, "identity"):
        return Identity()
    if isinstance(spec, Preconditioner):
        return spec
    sizes = {site: int(np.size(z[site])) for site in sorted(z)}
    if isinstance(spec, str):
        if spec == "rmsprop":
            return RMSProp(num_data=num_data)
        if spec in LEARNED:
            return Diagonal(jnp.ones(sum(sizes.values())))
        raise unknown_name(call, "preconditioner", spec, NAMES)
    if isinstance(spec, Mapping):
        for site in spec:
            if site not in z:
                raise unknown_name(call, "preconditioner", site, z)
        return Blocks(tuple((size, _fixed(call, spec.get(site, 1.0), size)) for site, size in sizes.items()))
    return _fixed(call, spec, sum(sizes.values()))


def _fixed(call: str, value: Any, size: int) -> Preconditioner:
    shape = np.shape(value)
    if shape == (size, size):
        return Dense(value)
    if shape in ((), (size,)):
        return Diagonal(value)
    instead = f"Pass a number, a diagonal ({size},) or a matrix ({size}, {size})."
    raise argument_error(call, "preconditioner", f"shape {shape}", instead)
