"""Rows that a loader brings, batch by batch: a model indexes them like an array, and
every minibatch takes the next rows of the loader.

A plate draws random indices as usual. For rows of a loader they say nothing but *which
draw this is*: all columns give the same rows for the same indices, and new indices take
new rows. So kernels and guides need to know nothing of loaders, and every chain has
minibatches of its own.
"""

import hashlib
import json
import warnings
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from threading import RLock
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
from jax import Array

from numpyro_bnn._checks import argument_error, outside
from numpyro_bnn._options import Kind, Natural, PositiveInt, checked
from numpyro_bnn._types import PyTree, Trees
from numpyro_bnn.program.rows import HEAD_ROWS, Rows

CALL = "runs.batches"
# Minibatches that are remembered by their indices, at least: other columns, and other
# evaluations at the same minibatch, ask for them soon.
MIN_REMEMBERED = 64
ALL_ROWS = "Pass the rows of one epoch."


def _has_batches(value: object) -> bool:
    if isinstance(value, str) or hasattr(value, "dtype"):
        return False
    return callable(value) or hasattr(value, "__iter__")


@checked(CALL)
def batches(
    source: Annotated[
        Any,
        Kind(_has_batches, "Pass an iterable of batches, or a function that makes it."),
    ],
    num_rows: PositiveInt,
    *,
    prefetch: Natural = 2,
) -> Any:
    """Take the data of a model from a loader, batch by batch.

    The result has the structure of one batch, with :class:`~numpyro_bnn.runs.Rows` in
    the place of arrays: ``x, y = batches(...)``. Pass them in the place of arrays to
    kernels on minibatches, :func:`~numpyro_bnn.guides.fit`, ``AutoADF.run``,
    :func:`~numpyro_bnn.runs.start` or :func:`~numpyro_bnn.runs.fit`, for a model that
    indexes them by a plate with ``subsample_size``.

    Rows are taken in the order of the loader and cut to the minibatches of the plate.
    So the size of the loader's batches does not matter, nor a last one with fewer rows:
    every row has the same weight, and no row is left out. At its end the loader is
    started again. **It has to shuffle:** gradients are unbiased if every minibatch is a
    uniform sample of the rows. A warning says if an epoch begins as the one before.

    :param source: an iterable of batches, such as a loader of torch, tf.data or grain,
        or a function without arguments that makes one, such as a generator function. A
        batch is an array, a tuple or a dictionary of them, or a record batch of
        pyarrow; the first axis has the rows. If its iterators have ``get_state()``
        (JSON values or bytes) and ``set_state(state)``, as those of grain, runs in
        folders go on bit for bit.
    :param num_rows: N, the number of rows of one epoch, to which likelihoods are
        scaled.
    :param prefetch: number of batches that a thread loads ahead; 0 for no thread.
    :raises ValueError: for batches without rows, with more than ``num_rows``, or of
        another structure than the first; in a run, for an epoch of another number of
        rows than ``num_rows`` (a last batch with fewer rows may be dropped, but not the
        same rows each time). A loader without end is not counted.

    >>> import jax.numpy as jnp
    >>> def loader():
    ...     order = np.random.permutation(5)
    ...     for rows in np.split(order, [2, 4]):  # the last batch has one row
    ...         yield {"x": np.ones((len(rows), 3)), "y": 10.0 * rows}
    >>> data = batches(loader, 5)
    >>> len(data["x"]), data["x"].shape, data["y"][jnp.array([0, 1, 2])].shape
    (5, (5, 3), (3,))
    """
    feed = Feed(source, num_rows, prefetch)
    columns = [Column(feed, number) for number in range(len(feed.head))]
    return jax.tree.unflatten(feed.structure, columns)


class Column(Rows):
    """One part of the batches of a loader."""

    def __init__(self, feed: "Feed", number: int) -> None:
        self.feed, self.number = feed, number
        head = feed.head[number]
        self.shape = (feed.num_rows, *head.shape[1:])
        self.ndim = head.ndim
        self.dtype = jax.dtypes.canonicalize_dtype(head.dtype)

    def __getitem__(self, index: Array) -> Array:
        if np.ndim(index) != 1:
            got = f"indices of shape {np.shape(index)}"
            instead = "Index rows of a loader by the plate's indices alone: `x[i]`."
            raise argument_error(CALL, "index", got, instead, TypeError)
        return super().__getitem__(index)

    def rows_at(self, index: np.ndarray) -> np.ndarray:
        return self.feed.rows_at(index, self.number)

    @cached_property
    def extremes(self) -> np.ndarray:
        return self.feed.extremes[self.number]

    def head(self) -> np.ndarray:
        return np.asarray(self.feed.head[self.number], self.dtype)

    def digest(self) -> bytes:
        # A loader without a position brings other rows each time.
        first = self.head().tobytes() if self.feed.has_position else b""
        text = f"{self.shape} {self.dtype} {self.number}"
        return hashlib.blake2b(text.encode() + first).digest()


class LoadedBatch(NamedTuple):
    """A batch as it was loaded.

    :param columns: its arrays; ``place``: where the loader stood before, or ``None``.
    """

    columns: list[np.ndarray]
    place: PyTree


class TakenRows(NamedTuple):
    """Rows that were handed out together; they begin ``offset`` rows after a place."""

    columns: list[np.ndarray]
    place: PyTree
    offset: int


class Feed:
    """The rows of a loader, in its order, cut into the minibatches that are asked for.

    :param source: an iterable of batches, or a function that makes one.
    :param num_rows: rows of an epoch; ``prefetch``: batches that are loaded ahead.
    """

    def __init__(self, source: PyTree, num_rows: int, prefetch: int) -> None:
        self.source, self.num_rows, self.prefetch = source, num_rows, prefetch
        self._lock = RLock()
        self._thread: ThreadPoolExecutor | None = None
        reader = _SourceReader(source, num_rows)
        self._first_place = reader.place()
        self._begin(reader)
        wanted = min(HEAD_ROWS, num_rows)
        while sum(len(piece.columns[0]) for piece in self._stock) < wanted:
            self._stock.append(self._load())
        parts = zip(*(piece.columns for piece in self._stock), strict=True)
        #: The first rows of each column.
        self.head = [np.concatenate(part)[:wanted] for part in parts]

    def __reduce__(self) -> tuple:
        return Feed, (self.source, self.num_rows, self.prefetch)

    def __deepcopy__(self, _: object) -> "Feed":
        return self

    def _begin(self, reader: "_SourceReader") -> None:
        self._reader, self._offset = reader, 0
        self._stock: deque[LoadedBatch] = deque()
        self._ahead: deque[Future[LoadedBatch]] = deque()
        self._thread = ThreadPoolExecutor(1) if self.prefetch else None
        #: Minibatches by their indices, in the order in which they were made.
        self._known: OrderedDict[str, TakenRows] = OrderedDict()
        self._remembered = MIN_REMEMBERED

    def _begin_at(self, place: PyTree) -> None:
        if self._thread is not None:  # which may hold the same iterator
            self._thread.shutdown(cancel_futures=True)
        reader = _SourceReader(self.source, self.num_rows, self.structure)
        if place is not None:
            reader.go_to(place)
        self._begin(reader)

    @property
    def structure(self) -> PyTree:
        """The tree of a batch."""
        return self._reader.structure

    @property
    def has_position(self) -> bool:
        """Whether the loader can say where it is, and go there."""
        return self._reader.has_position

    # -- rows --------------------------------------------------------------------------

    def rows_at(self, index: np.ndarray, number: int) -> np.ndarray:
        """Of a column, the rows of minibatches with the indices (..., B)."""
        draws = index.reshape(-1, index.shape[-1])
        # Reordered indices are the same minibatch with its rows reordered.
        order = np.argsort(draws, axis=1, kind="stable")
        ranks = np.argsort(order, axis=1)
        in_order = np.take_along_axis(draws, order, axis=1)
        # Several devices may ask for their minibatches at the same time.
        apart = 2 * len(draws) * jax.local_device_count()
        with self._lock:
            self._remembered = max(self._remembered, apart)
            minibatches = [self._minibatch(indices) for indices in in_order]
        columns = [minibatch.columns[number] for minibatch in minibatches]
        rows = np.stack(columns)[np.arange(len(draws))[:, None], ranks]
        return rows.reshape(*index.shape, *rows.shape[2:])

    def _minibatch(self, indices: np.ndarray) -> TakenRows:
        numbers = indices.astype(np.int64).tobytes()  # of any dtype
        name = hashlib.blake2b(numbers, digest_size=16).hexdigest()
        if name not in self._known:
            self._remember(name, len(indices))
        return self._known[name]

    def _remember(self, name: str, count: int) -> None:
        self._known[name] = self.take(count)
        while len(self._known) > self._remembered:
            self._known.popitem(last=False)

    def take(self, count: int) -> TakenRows:
        """The next rows."""
        with self._lock:
            if not self._stock:
                self._stock.append(self._load())
            place, offset = self._stock[0].place, self._offset
            pieces: list[list[np.ndarray]] = []
            while count or not pieces:
                if not self._stock:
                    self._stock.append(self._load())
                columns = self._stock[0].columns
                stop = min(self._offset + count, len(columns[0]))
                pieces.append([column[self._offset : stop] for column in columns])
                count -= stop - self._offset
                self._offset = stop
                if stop == len(columns[0]):
                    self._stock.popleft()
                    self._offset = 0
        if len(pieces) == 1:
            return TakenRows(pieces[0], place, offset)
        by_column = zip(*pieces, strict=True)
        return TakenRows([np.concatenate(p) for p in by_column], place, offset)

    def _load(self) -> LoadedBatch:
        if self._thread is None:
            return self._reader.load()
        while len(self._ahead) <= self.prefetch:
            self._ahead.append(self._thread.submit(self._reader.load))
        try:
            return self._ahead.popleft().result()
        except BaseException:
            for future in self._ahead:  # they go on behind the error
                future.cancel()
            self._ahead.clear()
            raise

    @cached_property
    def extremes(self) -> list[np.ndarray]:
        """Of each column, the smallest and the largest value, NaN if one is NaN; found
        by a pass of its own over one epoch.
        """
        if self._reader.single_pass:
            got = "an iterator that runs once, for a model that checks all values"
            raise argument_error(CALL, "source", got, "Pass a function that makes it.")

        def pass_over() -> tuple[_SourceReader, list]:
            reader = _SourceReader(self.source, self.num_rows, self.structure)
            num_seen, by_batch = 0, []
            while num_seen < self.num_rows:
                columns = reader.load().columns
                by_batch.append([[column.min(), column.max()] for column in columns])
                num_seen += len(columns[0])
            return reader, by_batch

        with self._lock:
            # The thread must not load meanwhile, from what may be the same iterator.
            thread = self._thread
            done = pass_over() if thread is None else thread.submit(pass_over).result()
            reader, by_batch = done
            if reader.iterator is self._reader.iterator:  # which has ended by this pass
                self._begin_at(self._first_place)
        by_column = zip(*by_batch, strict=True)
        return [np.array([np.min(pairs), np.max(pairs)]) for pairs in by_column]

    # -- positions ---------------------------------------------------------------------

    def rewind(self) -> None:
        """Begin again, as a new loader; one without a position goes on."""
        with self._lock:
            if self.has_position:
                self._begin_at(self._first_place)

    def position(self) -> dict[str, PyTree] | None:
        """Where it is, as JSON; ``None`` if the loader cannot say that."""
        if not self.has_position:
            return None
        with self._lock:
            known = [[n, len(m.columns[0])] for n, m in self._known.items()]
            first: Any = next(iter(self._known.values()), None)
            if first is None:
                first = self.take(0)
            return {
                "place": first.place,
                "offset": first.offset,
                "known": known,
                "remembered": self._remembered,
            }

    def restore(self, position: Trees) -> None:
        """Go to a position; minibatches that were remembered there are loaded again."""
        with self._lock:
            self._begin_at(position["place"])
            self._remembered = position["remembered"]
            self.take(position["offset"])
            for name, count in position["known"]:
                self._remember(name, count)


class _SourceReader:
    """Batches of a source, epoch after epoch, checked."""

    def __init__(self, source: PyTree, num_rows: int, structure: PyTree = None) -> None:
        self.source, self.num_rows, self.structure = source, num_rows, structure
        #: Whether it cannot be started again.
        self.single_pass = hasattr(source, "__next__")
        self._shapes: list[tuple] = []
        self._epoch = 0
        #: Sums of columns over the first epochs, of numbers read as integers: the same
        #: in any order.
        self._sums: list[Any] = [0] * 4
        self._open()

    def _open(self) -> None:
        source = self.source
        self.iterator: Iterator = iter(
            source if hasattr(source, "__iter__") else source()
        )
        self._whole = True
        #: Numbers of rows of the batches of this epoch.
        self._counts: list[int] = []

    def _has_one_iterator(self) -> bool:
        again = hasattr(self.source, "__iter__") and not self.single_pass
        return again and iter(self.source) is self.iterator

    @property
    def has_position(self) -> bool:
        return hasattr(self.iterator, "get_state") and hasattr(
            self.iterator, "set_state"
        )

    def place(self) -> PyTree:
        """Where the next batch begins, as JSON; ``None`` if nobody knows."""
        if not self.has_position:
            return None
        state: PyTree = self.iterator.get_state()  # type: ignore[attr-defined]
        if isinstance(state, bytes):
            return [self._epoch, "bytes", state.hex()]
        try:
            return [self._epoch, "json", json.loads(json.dumps(state))]
        except TypeError as cause:
            got = f"an iterator whose `get_state` gives a {type(state).__name__}"
            instead = "Return bytes, or numbers, texts, lists and dictionaries of them."
            raise argument_error(CALL, "source", got, instead, TypeError) from cause

    def go_to(self, place: PyTree) -> None:
        """Continue where :meth:`load` was when it gave this place."""
        self._epoch, kind, state = place
        # What came before in this epoch is not counted.
        self._whole = place == self.place()
        if kind == "bytes":
            state = bytes.fromhex(state)
        self.iterator.set_state(state)  # type: ignore[attr-defined]

    def load(self) -> LoadedBatch:
        """The next batch that has rows."""
        while True:
            place = self.place()
            try:
                batch = next(self.iterator)
            except StopIteration:
                self._end()
                continue
            except BaseException:
                # A generator has ended by its error: the next call starts it again.
                self._whole = False
                self._open()
                self._whole = False
                raise
            columns = self._columns(batch)
            count = len(columns[0])
            if count > self.num_rows:
                got = f"{self.num_rows} for a source with a batch of {count} rows"
                raise argument_error(CALL, "num_rows", got, ALL_ROWS)
            if count:
                self._warn_of_order(columns)
                self._counts.append(count)
                if self._epoch < len(self._sums):
                    bits = (column.view(f"u{column.itemsize}") for column in columns)
                    sums = [part.sum(0, np.uint64).ravel() for part in bits]
                    self._sums[self._epoch] += np.concatenate(sums)
                return LoadedBatch(columns, place)

    def _end(self) -> None:
        """Check the number of rows of an epoch, and begin the next one."""
        seen = sum(self._counts)
        if not seen and self._whole:
            got = "a source without rows" if not self._epoch else "one that has ended"
            instead = "Pass an iterable that starts again, or a function that makes it."
            raise argument_error(CALL, "source", got, instead)
        missing = self.num_rows - seen
        # Loaders drop a last batch that has fewer rows than all others: if they
        # shuffle, other rows each time, whose sums may be equal once by chance.
        equal = len(self._counts) > 1 and len(set(self._counts)) == 1
        dropped = equal and 0 < missing < self._counts[0]
        seen_again = [np.array_equal(self._sums[0], sums) for sums in self._sums]
        again = self._epoch == len(seen_again) - 1 and all(seen_again)
        if self._whole and missing and (again or not dropped):
            got = f"{self.num_rows} for a source with {seen} rows"
            instead = ALL_ROWS
            if self._has_one_iterator():
                instead = (
                    "It has one iterator for all passes (`persistent_workers=True` of "
                    "torch). If another pass took rows of it, pass a function that "
                    "makes the loader; else the rows of one epoch."
                )
            raise argument_error(CALL, "num_rows", got, instead)
        self._epoch += 1
        self._open()

    def _columns(self, batch: PyTree) -> list[np.ndarray]:
        leaves, structure = jax.tree.flatten(_as_tree(batch))
        columns = [np.asarray(leaf).copy() for leaf in leaves]  # memory may be reused
        shapes = [(column.shape[1:], column.dtype) for column in columns]
        if self.structure is None:
            self.structure = structure
        if not self._shapes:
            self._shapes = shapes
        lengths = {column.shape[:1] for column in columns}
        numeric = all(column.dtype.kind in "biuf" for column in columns)
        if len(lengths) != 1 or () in lengths or not numeric:
            got = f"a batch {jax.tree.map(np.shape, _as_tree(batch))}"
            instead = "Give arrays of numbers with one row for each data point."
            raise argument_error(CALL, "source", got, instead)
        if structure != self.structure or shapes != self._shapes:
            got = f"batches of several kinds: {self._shapes} and {shapes}"
            instead = "Only the number of rows may differ."
            raise argument_error(CALL, "source", got, instead)
        return columns

    def _warn_of_order(self, columns: list[np.ndarray]) -> None:
        if self._counts or not self._whole:
            return
        first = hashlib.blake2b(b"".join(c.tobytes() for c in columns)).digest()
        if self._epoch == 0:
            self._first = first
        elif self._epoch == 1 and first == getattr(self, "_first", None):
            text = (
                "the source brings its rows in the same order in every epoch. Let it "
                "shuffle: minibatches are uniform samples only then."
            )
            warnings.warn(f"{CALL}: {text}", stacklevel=outside())


def _as_tree(batch: PyTree) -> PyTree:
    """A batch, of which a record batch or a table of pyarrow becomes a dictionary."""
    if not (hasattr(batch, "column_names") and hasattr(batch, "column")):
        return batch
    return {name: _of_arrow(batch.column(name)) for name in batch.column_names}


def _of_arrow(column: Any) -> np.ndarray:
    if hasattr(column, "combine_chunks"):  # of a table
        column = column.combine_chunks()
    width = getattr(column.type, "list_size", None)
    if width is None:
        return column.to_numpy(zero_copy_only=False)
    return column.flatten().to_numpy(zero_copy_only=False).reshape(len(column), width)


def feeds_in(*trees: PyTree) -> list[Feed]:
    """The loaders among the arguments of a model."""
    feeds: list[Feed] = []
    for leaf in jax.tree.leaves(trees):
        if isinstance(leaf, Column) and leaf.feed not in feeds:
            feeds.append(leaf.feed)
    return feeds


def positions(feeds: Iterable[Feed]) -> Sequence[PyTree]:
    """Where loaders are, as JSON."""
    return [feed.position() for feed in feeds]


def restore(feeds: Iterable[Feed], saved: Iterable[PyTree]) -> None:
    """Take loaders to :func:`positions`; those without one stay where they are."""
    for feed, position in zip(feeds, saved, strict=True):
        if position is not None:
            feed.restore(position)


def is_fetch(callback: object) -> bool:
    """Whether the callback of a program reads rows of a loader."""
    function = getattr(callback, "callback_func", callback)
    return isinstance(getattr(function, "__self__", None), Column)


def refuse_feeds(
    call: str,
    argument: str,
    reason: str,
    *trees: PyTree,
    instead: str = "Pass arrays, or `runs.Rows`.",
) -> None:
    """Refuse rows of a loader where a method cannot take them."""
    if feeds_in(*trees):
        got = f"rows of a loader (`{CALL}`): {reason}"
        raise argument_error(call, argument, got, instead)
