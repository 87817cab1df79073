"""Arguments of a model at the border: data as JAX arrays, plain values as they are, and
whether data have changed.
"""

import hashlib
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_bnn._checks import argument_error, shown
from numpyro_bnn._types import Kwargs, PyTree, Trees
from numpyro_bnn.program.rows import Rows

Call = tuple[tuple, dict[str, Any]]  # positional and keyword arguments


class _Array:
    """Stands for an array."""


_ANY = inspect.signature(lambda *_, **__: None)


class Arguments:
    """The arguments of one call, whose leaves can be exchanged; a key of programs,
    equal if all leaves are.

    :param values: arguments by name, those of ``**kwargs`` by their own names.
    :param signature: that of the model, by default one that takes anything.

    >>> given = Arguments.of(({"a": jnp.ones(2)}, 3), {}, lambda x, n: None)
    >>> fixed, arrays = given.split()
    >>> (
    ...     list(arrays),
    ...     fixed
    ...     == Arguments.of(({"a": jnp.zeros(2)}, 3), {}, lambda x, n: None).split()[0],
    ... )
    (["x['a']"], True)
    >>> fixed.call({"x['a']": "exchanged"})
    (({'a': 'exchanged'}, 3), {})
    """

    def __init__(self, values: Trees, signature: inspect.Signature = _ANY) -> None:
        self.values = dict(values)
        self.signature = signature
        flat, self._tree = jax.tree_util.tree_flatten_with_path(self.values)
        #: Leaves by place, such as ``x`` or ``inputs['x']``.
        self.leaves = {
            str(path[0].key) + jax.tree_util.keystr(path[1:]): leaf
            for path, leaf in flat
        }

    @classmethod
    def of(
        cls, args: tuple, kwargs: Kwargs, model: Callable | None = None
    ) -> "Arguments":
        """Those of a call; if its model is known, by the names of its parameters."""
        signature = _ANY if model is None else _own_signature(model, kwargs)
        values = signature.bind(*args, **kwargs).arguments
        for name, parameter in signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                values |= values.pop(name, {})
        return cls(values, signature)

    def with_values(self, values: Trees) -> "Arguments":
        """The same call with other values of some arguments."""
        return Arguments({**self.values, **values}, self.signature)

    def split(self) -> tuple["Arguments", dict[str, Any]]:
        """The same with a placeholder for each array, and the arrays by place."""
        arrays = {}
        for place, leaf in self.leaves.items():
            if isinstance(leaf, Array | np.ndarray):
                check_numeric("model", place, leaf)
                arrays[place] = leaf
        values = self._exchanged(dict.fromkeys(arrays, _Array))
        return Arguments(values, self.signature), arrays

    def call(self, leaves: Trees | None = None) -> Call:
        """Positional and keyword arguments as a model takes them, with other ``leaves``
        at some places.
        """
        values = self._exchanged({**self._on_device, **(leaves or {})})
        bound = self.signature.bind_partial()
        for name in self.signature.parameters.keys() & values.keys():
            bound.arguments[name] = values.pop(name)
        return bound.args, bound.kwargs | values

    @property
    def optional(self) -> Trees:
        """The arguments that may be left out, and their defaults."""
        defaults = {}
        for name, parameter in self.signature.parameters.items():
            if parameter.default is not parameter.empty:
                defaults[name] = parameter.default
        return defaults

    @property
    def arrays(self) -> Trees:
        """The arguments that are arrays with at least one axis."""
        arrays = {}
        for name, value in self.values.items():
            if hasattr(value, "dtype") and np.ndim(value):
                arrays[name] = value
        return arrays

    @cached_property
    def _on_device(self) -> Trees:
        return as_arrays((), self.leaves, "model")[1]

    def _exchanged(self, leaves: Trees) -> dict[str, PyTree]:
        return jax.tree.unflatten(
            self._tree, [leaves.get(place, leaf) for place, leaf in self.leaves.items()]
        )

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Arguments) and self._key == other._key

    @cached_property
    def _key(self) -> Hashable:
        # 1, 1.0 and True are equal but different arguments; a leaf without a hash is
        # identified by its id.
        leaves = []
        for leaf in self.leaves.values():
            leaves.append((type(leaf), leaf if _hashable(leaf) else id(leaf)))
        return self._tree, tuple(leaves)


def _own_signature(model: Callable, kwargs: Kwargs) -> inspect.Signature:
    """The signature of a model without what a ``functools.partial`` has set already."""
    signature, inner = inspect.signature(model), inspect.unwrap(model)
    parameters = dict(signature.parameters)
    if isinstance(inner, partial):
        for name in inner.keywords.keys() - kwargs.keys():
            parameters.pop(name, None)
    return signature.replace(parameters=list(parameters.values()))


def _hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def check_numeric(call: str, argument: str, array: object) -> None:
    """Refuse arrays of text, dates and Python objects, which no model can
    compute with.
    """
    if isinstance(array, np.ndarray) and array.dtype.kind in "OSUmM":
        got = f"an array of dtype {array.dtype}"
        instead = (
            "Pass an array of numbers, e.g. `x.astype(float)`, or codes of categories."
        )
        raise argument_error(call, argument, got, instead, TypeError)


def as_arrays(args: tuple, kwargs: Kwargs | None, call: str = "MCMC.run") -> Call:
    """Arguments with NumPy arrays, pandas tables and lists of numbers as JAX arrays;
    others stay as they are.

    A NumPy array cannot be indexed by the traced indices of a minibatch, nor a table by
    positions. Tuples are settings of a model, such as widths, and stay tuples.

    >>> (x, batch_size), _ = as_arrays(([0.5, 1.5], 2), None)
    >>> isinstance(x, jax.Array), batch_size
    (True, 2)

    :param call: name of the caller, for the error.
    :raises TypeError: for an array of text, dates or Python objects.
    """

    def converted(path: tuple, leaf: PyTree) -> PyTree:
        array = _values(leaf)
        check_numeric(call, place_of(path), array)
        if array is None or array.dtype.kind not in "biufc":
            return leaf
        return jnp.asarray(array)

    with jax.ensure_compile_time_eval():
        # a value that is known stays known, also where a program is traced
        return jax.tree_util.tree_map_with_path(
            converted, (args, dict(kwargs or {})), is_leaf=is_table
        )


def place_of(path: tuple) -> str:
    """Where a leaf of (args, kwargs) is: ``args[0]`` or ``x``."""
    if path[0].idx == 0:
        return f"args{jax.tree_util.keystr(path[1:])}"
    return f"{path[1].key}{jax.tree_util.keystr(path[2:])}"


def as_numpy(args: tuple, kwargs: Kwargs | None) -> Call:
    """:func:`as_arrays` for the export: tables and lists become NumPy arrays, and
    arrays keep their precision.
    """

    def converted(leaf: PyTree) -> PyTree:
        array = _values(leaf)
        return leaf if array is None else array

    return jax.tree.map(converted, (args, dict(kwargs or {})), is_leaf=is_table)


@contextmanager
def naming_arguments(
    model: Callable, args: tuple, kwargs: Kwargs | None
) -> Iterator[None]:
    """Add to an error of the user's model with what the model was called."""
    try:
        yield
    except Exception as error:
        ours = ": argument `" in "".join([str(error), *getattr(error, "__notes__", ())])
        if not ours:
            error.add_note(f"The model failed: {_described(model, args, kwargs or {})}")
        raise


def _described(model: Callable, args: tuple, kwargs: Kwargs) -> str:
    values = {f"args[{index}]": value for index, value in enumerate(args)}
    values.update(kwargs)
    with suppress(TypeError, ValueError):
        signature = inspect.signature(model)
        bound = signature.bind_partial(*args, **kwargs).arguments
        for name in list(bound):
            kind = signature.parameters[name].kind
            if kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
                del bound[name]
        values = bound or values
    return "; ".join(
        f"argument `{name}` got {shown(value)}"
        for name, value in values.items()
        if not name.startswith("_")
    )


def plain_values(args: tuple, kwargs: Kwargs | None) -> dict[str, int | bool]:
    """The integers and truth values of a call by their place: sizes and switches, on
    which programs depend.

    >>> plain_values(([1.0],), {"batch_size": 5})
    {"[1]['batch_size']": 5}
    """
    return {
        place: leaf for place, leaf in _leaves(args, kwargs) if isinstance(leaf, int)
    }


def with_plain_values(
    args: tuple, kwargs: Kwargs | None, initial: Mapping[str, int | bool]
) -> tuple[tuple, dict[str, Any], bool]:
    """The same call with the integers that ``MCMC(jit_model_args=True)`` has traced as
    they were at the start.

    :return: positional and keyword arguments, and whether any was traced.
    """
    places = []

    def restored(path: tuple, leaf: PyTree) -> PyTree:
        place = jax.tree_util.keystr(path)
        if not isinstance(leaf, jax.core.Tracer) or place not in initial:
            return leaf
        places.append(place)
        return initial[place]

    restored_call = jax.tree_util.tree_map_with_path(
        restored, (args, dict(kwargs or {}))
    )
    return *restored_call, bool(places)


def fingerprints(args: tuple, kwargs: Kwargs | None) -> dict[str, bytes]:
    """Hashes of the arguments whose values may change in place, by their place.

    >>> x = np.zeros(3)
    >>> before = fingerprints((x,), {})
    >>> x[1] = 1.0
    >>> fingerprints((x,), {}) == before
    False
    """
    digests = {}
    for place, leaf in _leaves(args, kwargs):
        if isinstance(leaf, Rows):
            digests[place] = leaf.digest()
        array = _values(leaf)
        if array is not None and array.dtype != object:
            digests[place] = hashlib.blake2b(
                np.ascontiguousarray(array).data if array.size else b""
            ).digest()
    return digests


def _leaves(args: tuple, kwargs: Kwargs | None) -> Iterator[tuple[str, Any]]:
    flat, _ = jax.tree_util.tree_flatten_with_path(
        (args, dict(kwargs or {})), is_leaf=is_table
    )
    return ((jax.tree_util.keystr(path), leaf) for path, leaf in flat)


def _values(leaf: PyTree) -> np.ndarray | None:
    """The values of a NumPy array or a table; ``None`` for everything else, also for
    rows of several lengths.
    """
    if not (isinstance(leaf, np.ndarray) or is_table(leaf)):
        return None
    try:
        return np.asarray(leaf)
    except ValueError:
        return None


def is_table(value: object) -> bool:
    """Whether a value is a pandas (or polars, xarray) object, or a nested list of
    numbers.
    """
    if not isinstance(value, list):
        return hasattr(value, "to_numpy")
    while isinstance(value, list) and value:
        value = value[0]
    return isinstance(value, int | float | np.number | np.bool)
