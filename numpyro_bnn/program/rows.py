"""Rows of data that stay on disk: a model indexes them like an array, and only the rows
of a minibatch are read.
"""

import hashlib
from collections.abc import Callable
from functools import cached_property
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_bnn._checks import argument_error
from numpyro_bnn._jaxprs.slices import part_of, reached
from numpyro_bnn._jaxprs.walk import needed_equations
from numpyro_bnn._options import Kind, checked
from numpyro_bnn._types import PyTree, Trees

CALL = "runs.Rows"
MEMORY_MAP = "Pass a memory map, e.g. `np.load(path, mmap_mode='r')`, or a Zarr array."
MAX_READ_BYTES = 1 << 28  # at once
# Why kernels that do not work by minibatches alone refuse rows on disk.
BY_BATCHES = (
    "Without `subsample_size` and `gradient='minibatch'`, with Metropolis or "
    "`held_out` all are needed"
)
HEAD_ROWS = 1000  # rows that stand for all of them where their values do not matter


def _has_rows(value: Any) -> bool:
    for name in ("shape", "dtype", "__getitem__"):
        if not hasattr(value, name):
            return False
    return len(value.shape) > 0


class Rows:
    """Data that stay on disk, for a model that indexes them by a plate with
    ``subsample_size``.

    Pass it in the place of an array: ``x[i]`` reads the rows of a minibatch, from a
    memory map or a Zarr array, and nothing else is ever in memory. It works with the
    kernels on minibatches (``gradient="minibatch"``), with
    :func:`~numpyro_bnn.guides.fit`, :func:`~numpyro_bnn.runs.start` and
    :func:`~numpyro_bnn.runs.fit`. The draws are those of the same data in memory.

    :param source: a NumPy array or memory map, a Zarr array, or anything with
        ``shape``, ``dtype`` and ``source[index]`` for an array of integers.
    :raises TypeError: for anything else; in a model, for any use but ``len(x)``,
        ``x.shape`` and ``x[i]``.

    >>> x = Rows(np.arange(6.0).reshape(3, 2))
    >>> len(x), x.shape, x[jnp.array([2, 0])].tolist()
    (3, (3, 2), [[4.0, 5.0], [0.0, 1.0]])
    """

    @checked(CALL)
    def __init__(self, source: Annotated[Any, Kind(_has_rows, MEMORY_MAP)]) -> None:
        if np.dtype(source.dtype).kind not in "biuf":
            got, instead = f"dtype {source.dtype}", "Pass an array of numbers."
            raise argument_error(CALL, "source", got, instead, TypeError)
        # Zarr reads rows one by one through `oindex`, and takes a list of rows for
        # coordinates elsewhere.
        self._read = source.oindex if hasattr(source, "oindex") else source
        self._source = source
        self.shape = tuple(source.shape)
        self.ndim = len(self.shape)
        self.dtype = jax.dtypes.canonicalize_dtype(source.dtype)

    def __len__(self) -> int:
        return int(self.shape[0])

    def __repr__(self) -> str:
        return f"Rows(shape={self.shape}, dtype={self.dtype})"

    def __getitem__(self, index: Array) -> Array:
        is_index = isinstance(index, Array | np.ndarray | int | np.integer)
        if not (is_index and jnp.issubdtype(jnp.result_type(index), jnp.integer)):
            instead = (
                "Index it by the plate's indices alone: `x[i]`, and then their "
                "columns: `x[i][:, 0]`."
            )
            got = index if isinstance(index, slice) else type(index).__name__
            raise argument_error(CALL, "index", got, instead, TypeError)
        index = jnp.asarray(index)
        shape = jax.ShapeDtypeStruct((*index.shape, *self.shape[1:]), self.dtype)
        return jax.pure_callback(self.fetch, shape, index, vmap_method="broadcast_all")

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        got, instead = f"{self!r} used as an array", "Index it by a plate: `x[i]`."
        raise argument_error(CALL, "source", got, instead, TypeError)

    def fetch(self, index: Any) -> np.ndarray:
        """Read rows, for an array of indices of any shape.

        :raises ValueError: for more of them than fit into memory, which only
            computations on all data ask for.
        """
        index = np.asarray(index)
        size = index.size * int(np.prod(self.shape[1:])) * self.dtype.itemsize
        if size > MAX_READ_BYTES:
            instead = (
                "Something evaluates the model on all rows: use minibatches, or pass "
                "an array."
            )
            raise argument_error(
                CALL, "index", f"{index.size} rows ({size >> 20} MiB) at once", instead
            )
        flat = index.reshape(-1)
        if flat.size and not -len(self) <= flat.min() <= flat.max() < len(self):
            instead = "Pass as many rows as the plate has indices."
            raise argument_error(
                CALL, "index", f"row {flat.max()} of {len(self)}", instead
            )
        return np.asarray(self.rows_at(index), self.dtype)

    def rows_at(self, index: np.ndarray) -> np.ndarray:
        """The rows at indices of any shape, as they are stored."""
        rows = np.asarray(self._read[index.reshape(-1)])
        return rows.reshape(*index.shape, *self.shape[1:])

    @cached_property
    def extremes(self) -> np.ndarray:
        """The smallest and the largest value, NaN if one is NaN; all rows are read
        once, some MiB at a time.
        """
        row_bytes = int(np.prod(self.shape[1:])) * self.dtype.itemsize
        rows = max(1, MAX_READ_BYTES // 8 // max(1, row_bytes))
        extremes = []
        for start in range(0, len(self), rows):
            block = self.fetch(np.arange(start, min(start + rows, len(self))))
            extremes += [block.min(), block.max()]
        return np.array([np.min(extremes), np.max(extremes)])

    def head(self) -> np.ndarray:
        """The first rows, in memory."""
        return self.fetch(np.arange(min(HEAD_ROWS, len(self))))

    def digest(self) -> bytes:
        """A hash of shape, dtype and a thousand rows: two sources of the same data have
        the same.
        """
        rows = self.fetch(np.linspace(0, len(self) - 1, HEAD_ROWS).astype(int))
        return hashlib.blake2b(
            f"{self.shape} {self.dtype}".encode() + rows.tobytes()
        ).digest()


class Ahead(NamedTuple):
    """A step that is split into what it reads, for many steps at once, and the rest.

    :param follow: from the key of a step to that of the next one.
    :param read: from the key of a step to the rows that it reads.
    :param finish: from a state, the key and these rows to what the step returns.
    """

    follow: Callable
    read: Callable[[PyTree], list[Array]]
    finish: Callable[[PyTree, Array, list[Array]], PyTree]


def read_ahead(step: Callable, state: PyTree, key: Array) -> Ahead | None:
    """Split ``step(state, key)``, whose first result is the next key; ``None`` if its
    key alone reads nothing.
    """
    closed, shapes = jax.make_jaxpr(step, return_shape=True)(state, key)
    jaxpr, tree = closed.jaxpr, jax.tree.structure(shapes)
    needed = [equation for equation, _ in needed_equations(jaxpr, jaxpr.outvars)]
    state_dependent = reached(needed, jaxpr.invars[:-1])
    row_variables = []
    for equation in needed:
        is_read = equation.primitive.name == "pure_callback"
        if is_read and state_dependent.isdisjoint(equation.outvars):
            row_variables += equation.outvars
    if not row_variables or jaxpr.outvars[0] in state_dependent:
        return None
    follow = part_of(closed, jaxpr.invars[-1:], jaxpr.outvars[:1])
    read = part_of(closed, jaxpr.invars[-1:], row_variables)
    after = part_of(closed, [*jaxpr.invars, *row_variables], jaxpr.outvars)

    def finish(state: PyTree, key: Array, rows: list[Array]) -> PyTree:
        return jax.tree.unflatten(tree, after(*jax.tree.leaves(state), key, *rows))

    return Ahead(lambda key: follow(key)[0], read, finish)


def rows_in(*trees: PyTree) -> list[Rows]:
    """All rows on disk among the arguments of a model."""
    return [leaf for leaf in jax.tree.leaves(trees) if isinstance(leaf, Rows)]


def refuse_rows(call: str, reason: str, *trees: PyTree) -> None:
    """Refuse rows on disk where a method needs all of them at once."""
    if disk_rows := rows_in(*trees):
        raise argument_error(
            call, "args", repr(disk_rows[0]), f"{reason}: pass an array."
        )


def with_head(values: Trees) -> Trees:
    """Arguments with their first rows in the place of those on disk."""
    return jax.tree.map(
        lambda leaf: leaf.head() if isinstance(leaf, Rows) else leaf, dict(values)
    )
