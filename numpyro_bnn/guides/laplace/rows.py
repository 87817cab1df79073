"""A model read once for each number of its rows, and programs and sums over them."""

from collections.abc import Callable, Mapping
from functools import cached_property
from math import ceil
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro import handlers
from numpyro.primitives import Messenger

from numpyro_bnn._distributions import is_latent
from numpyro_bnn.networks import record_statistics, use_statistics
from numpyro_bnn.program.plates import Plate, full_plates
from numpyro_bnn.program.posterior import Posterior
from numpyro_bnn.program.sites import Sites

Call = tuple[tuple, Mapping[str, Any]]
Index = Array | None  # of rows; `None` stands for all


class unscaled_rows(Messenger):
    """Run subsampled plates on ``number`` rows, by default on as many as the model
    takes, whose densities are not scaled up to all rows.
    """

    def __init__(self, fn: Callable, number: int | None = None) -> None:
        self.number = number
        self.sizes: dict[str, int] = {}
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "plate":
            size, batch_size = msg["args"]
            self.sizes[msg["name"]] = size
            if self.number is not None and batch_size not in (None, size):
                msg["args"] = (size, self.number)
        elif msg["type"] == "sample" and msg["scale"] is not None:
            for frame in msg["cond_indep_stack"]:
                size = self.sizes.get(frame.name, frame.size)
                if frame.size != size:
                    msg["scale"] = msg["scale"] * frame.size / size


class Batch(NamedTuple):
    """Some rows of a model, or all."""

    reading: Posterior
    indices: Mapping[str, Array] = {}

    def at(self, values: Mapping[str, Any], only: Any = None) -> Sites:
        """The trace of these rows at constrained values."""
        return self.reading.at({**values, **self.indices}, only=only)

    def of(self, array: Array) -> Array:
        """The rows of an array that has all."""
        for index in self.indices.values():
            array = array[index]
        return array


class ModelRows:
    """A model at some arguments.

    :param full: whether its plates see all rows; by default those of a minibatch, if
        the model subsamples.
    """

    def __init__(self, model: Callable, call: Call, full: bool = False) -> None:
        self.model, self.call = model, call
        self.plates: dict[str, Plate] = {}
        #: Whether the model has batch normalizations.
        self.normalizes = False
        self._readings: dict[int | None, Posterior] = {}
        self._programs: dict[Any, Callable] = {}
        if full:
            return
        with handlers.block(), record_statistics() as recorded:
            reading = Posterior(unscaled_rows(model), *call, full=False)
        self.plates, self.normalizes = reading.plates, any(recorded.calls)
        self._readings[self.plate.batch_size if self.plate else None] = reading

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_readings": {}, "_programs": {}}

    def on(self, args: tuple, kwargs: Mapping[str, Any]) -> "ModelRows":
        """All rows of other arguments; batch normalizations are those of the rows
        here.
        """
        model: Callable = self.model
        call: Call = args, kwargs
        if self.normalizes:
            model, call = _normalized_by_first(model), ((self.call, call), {})
        return ModelRows(model, call, full=True)

    @property
    def plate(self) -> Plate | None:
        """The subsampled plate."""
        return next(iter(self.plates.values()), None)

    @cached_property
    def chunks(self) -> list[Index]:
        """Indices of all rows, in parts of about the batch size and at least two."""
        if self.plate is None:
            return [None]
        size, batch_size = self.plate
        number = max(1, min(ceil(size / batch_size), size // 2))
        return list(map(jnp.asarray, np.array_split(np.arange(size), number)))

    def reading(self, index: Index = None) -> Posterior:
        """The model on as many rows as there are indices."""
        number = None if index is None else len(index)
        if number not in self._readings:
            self._readings[number] = self.read(index)
        return self._readings[number]

    def read(self, index: Index) -> Posterior:
        """:meth:`reading`, in the context of the caller."""
        number = None if index is None else len(index)
        model = self.model if number is None else unscaled_rows(self.model, number)
        with handlers.block():
            return Posterior(model, *self.call, full=number is None)

    def batch(self, reading: Posterior, index: Index) -> Batch:
        """These rows of a reading."""
        return Batch(
            reading, {} if index is None else dict.fromkeys(self.plates, index)
        )

    def run(self, fn: Callable, index: Index, *values: Any, key: Any = None) -> Any:
        """``fn(batch, *values)`` by a program that is kept by ``key``, or by ``fn``."""
        number = None if index is None else len(index)
        key = (key or fn, number)
        if key not in self._programs:

            def on_batch(reading: Posterior, index: Index, *values: Any) -> Any:
                return fn(self.batch(reading, index), *values)

            self._programs[key] = self.reading(index).prepare(on_batch, once=False)
        return self._programs[key](index, *values)

    def run_once(self, fn: Callable, *values: Any) -> Any:
        """``fn(batch, *values)``, for what does not depend on the rows."""
        return self.run(fn, self.chunks[0], *values)

    def total(self, fn: Callable, *values: Any, key: Any = None) -> Any:
        """The sum of ``fn(batch, *values)`` over all rows."""
        total: Any = None
        for index in self.chunks:
            term = self.run(fn, index, *values, key=key)
            total = term if total is None else jax.tree.map(jnp.add, total, term)
        return total


def _normalized_by_first(model: Callable) -> Callable:
    """A model of the arguments of two calls: the second, whose networks normalize with
    the batch statistics of the first.
    """

    def of_both(first: Call, second: Call) -> None:
        # Latent sites are those of the first call, all others those of the second.
        with (
            record_statistics() as recorded,
            handlers.block(hide_fn=_is_of_rows),
            handlers.trace() as trace,
        ):
            full_plates(model)(*first[0], **first[1])
        values = {}
        for name, site in trace.items():
            if is_latent(site):
                values[name] = site["value"]
        with (
            use_statistics(recorded.calls),
            handlers.block(hide=list(values)),
            handlers.substitute(data=values),
        ):
            model(*second[0], **second[1])

    return of_both


def _is_of_rows(site: dict[str, Any]) -> bool:
    if site["type"] == "sample":
        return site["is_observed"]
    return site["type"] in ("plate", "deterministic")
