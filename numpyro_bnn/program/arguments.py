"""Arguments of a model at the border: data as JAX arrays, plain values as they are, and whether data have changed."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_bnn._checks import argument_error

Call = tuple[tuple, dict[str, Any]]  # positional and keyword arguments


def as_arrays(args: tuple, kwargs: Mapping[str, Any] | None, call: str = "MCMC.run") -> Call:
    """Arguments with NumPy arrays, pandas tables and lists of numbers as JAX arrays; others stay as they are.

    A NumPy array cannot be indexed by the traced indices of a minibatch, nor a table by positions. Tuples are
    settings of a model, such as widths, and stay tuples.

    >>> (x, batch_size), _ = as_arrays(([0.5, 1.5], 2), None)
    >>> isinstance(x, jax.Array), batch_size
    (True, 2)

    :param call: name of the caller, for the error.
    :raises TypeError: for an array of Python objects.
    """

    def converted(path: Any, leaf: Any) -> Any:
        array = _values(leaf)
        if array is not None and array.dtype.kind == "O":
            got = f"an array of dtype object at {jax.tree_util.keystr(path)}"
            raise argument_error(call, "args", got, "Pass an array of numbers, e.g. `x.astype(float)`.", TypeError)
        return leaf if array is None or array.dtype.kind not in "biufc" else jnp.asarray(array)

    with jax.ensure_compile_time_eval():  # a value that is known stays known, also where a program is traced
        given = args, dict(kwargs or {})
        return jax.tree_util.tree_map_with_path(converted, given, is_leaf=_is_table)


def as_numpy(args: tuple, kwargs: Mapping[str, Any] | None) -> Call:
    """:func:`as_arrays` for the export: tables and lists become NumPy arrays, and arrays keep their precision."""
    given = args, dict(kwargs or {})
    return jax.tree.map(lambda leaf: leaf if _values(leaf) is None else _values(leaf), given, is_leaf=_is_table)


def plain_values(args: tuple, kwargs: Mapping[str, Any] | None) -> dict[str, int | bool]:
    """The integers and truth values of a call by their place: sizes and switches, on which programs depend.

    >>> plain_values(([1.0],), {"batch_size": 5})
    {"[1]['batch_size']": 5}
    """
    return {place: leaf for place, leaf in _leaves(args, kwargs) if isinstance(leaf, int)}


def with_plain_values(
    args: tuple, kwargs: Mapping[str, Any] | None, known: Mapping[str, int | bool]
) -> tuple[tuple, dict[str, Any], bool]:
    """The same call with the integers that ``MCMC(jit_model_args=True)`` has traced as they were at the start.

    :return: positional and keyword arguments, and whether any was traced.
    """
    places = []

    def restored(path: Any, leaf: Any) -> Any:
        place = jax.tree_util.keystr(path)
        if not isinstance(leaf, jax.core.Tracer) or place not in known:
            return leaf
        places.append(place)
        return known[place]

    found = jax.tree_util.tree_map_with_path(restored, (args, dict(kwargs or {})))
    return *found, bool(places)


def fingerprints(args: tuple, kwargs: Mapping[str, Any] | None) -> dict[str, bytes]:
    """Hashes of the arguments whose values may change in place, by their place.

    >>> x = np.zeros(3)
    >>> before = fingerprints((x,), {})
    >>> x[1] = 1.0
    >>> fingerprints((x,), {}) == before
    False
    """
    found = {}
    for place, leaf in _leaves(args, kwargs):
        array = _values(leaf)
        if array is not None and array.dtype != object:
            found[place] = hashlib.blake2b(np.ascontiguousarray(array).data if array.size else b"").digest()
    return found


def _leaves(args: tuple, kwargs: Mapping[str, Any] | None) -> Iterator[tuple[str, Any]]:
    flat, _ = jax.tree_util.tree_flatten_with_path((args, dict(kwargs or {})), is_leaf=_is_table)
    return ((jax.tree_util.keystr(path), leaf) for path, leaf in flat)


def _values(leaf: Any) -> np.ndarray | None:
    """The values of a NumPy array or a table; ``None`` for everything else, also for rows of several lengths."""
    try:
        return np.asarray(leaf) if isinstance(leaf, np.ndarray) or _is_table(leaf) else None
    except ValueError:
        return None


def _is_table(value: Any) -> bool:
    """Whether a value is a pandas (or polars, xarray) object, or a nested list of numbers."""
    if not isinstance(value, list):
        return hasattr(value, "to_numpy")
    first: Any = value
    while isinstance(first, list) and first:
        first = first[0]
    return isinstance(first, int | float | np.number | np.bool)
