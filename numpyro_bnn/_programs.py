"""Programs compiled once per call of a model: its arrays are inputs, all other arguments are constants."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr

from numpyro_bnn._checks import argument_error

# Number of programs kept for later calls: few, since each keeps its guide and the guide's data alive.
CACHE_SIZE = 8

# Working memory of one chunk of draws; large enough to amortize its launch, small compared with any result.
CHUNK_BYTES = 128 * 2**20

_ARRAY = object()


class Signature:
    """The fixed part of a call, as a cache key: the structure of its arguments (``tree``) and the leaves, with a
    placeholder for each array.
    """

    def __init__(self, tree: Any, leaves: tuple) -> None:
        self.tree = tree
        self.leaves = leaves
        # 1, 1.0 and True are equal but different arguments; a leaf without a hash is identified by its id.
        self._key = (tree, tuple((type(leaf), leaf if _hashable(leaf) else id(leaf)) for leaf in leaves))

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Signature) and self._key == other._key

    def call(self, arrays: list) -> tuple[tuple, dict[str, Any]]:
        """Positional and keyword arguments, with these arrays."""
        given = iter(arrays)
        leaves = [next(given) if leaf is _ARRAY else leaf for leaf in self.leaves]
        return jax.tree.unflatten(self.tree, leaves)


def signature(args: tuple, kwargs: Mapping[str, Any]) -> tuple[Signature, list]:
    """Split the arguments of a call into the fixed part and the arrays.

    >>> fixed, arrays = signature((np.zeros(3),), {"batch_size": 2})
    >>> fixed.call(arrays)[1], len(arrays)
    ({'batch_size': 2}, 1)
    """
    leaves, tree = jax.tree.flatten((args, dict(kwargs)))
    fixed = tuple(_ARRAY if isinstance(leaf, jax.Array | np.ndarray) else leaf for leaf in leaves)
    return Signature(tree, fixed), [leaf for leaf in leaves if isinstance(leaf, jax.Array | np.ndarray)]


def refuse_tracers(call: str, instead: str, *trees: Any) -> None:
    """Refuse values that JAX is tracing: the call runs on the host."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(trees)):
        raise argument_error(call, "args", "values traced by `jit`, `vmap` or `grad`", instead, TypeError)


def draws_per_chunk(fn: Callable, *example: Any) -> int:
    """Number of draws whose intermediate values fit into the memory of a chunk, even if none are freed.

    >>> draws_per_chunk(lambda x: x + 1.0, np.zeros(2**20, np.float32))
    32
    """
    needed = _bytes(jax.make_jaxpr(fn)(*example))
    return max(1, CHUNK_BYTES // max(1, needed))


def map_keys(fn: Callable, keys: jax.Array, chunk: int | None = None) -> Any:
    """Apply a function to every key, (S,) typed or (S, 2) legacy, on the device, ``chunk`` draws at a time.

    By default a chunk has as many draws as fit into 128 MiB.
    """
    size = draws_per_chunk(fn, keys[0]) if chunk is None else chunk
    return lax.map(fn, keys, batch_size=min(size, keys.shape[0]))


def _bytes(program: ClosedJaxpr) -> int:
    return sum(var.aval.size * var.aval.dtype.itemsize for eqn in program.jaxpr.eqns for var in eqn.outvars)


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
