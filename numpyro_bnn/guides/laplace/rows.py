"""A model on all its rows or on some of them, and programs and sums over them."""

from collections.abc import Callable, Hashable, Mapping
from functools import cached_property
from math import ceil
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro import handlers

from numpyro_bnn._distributions import is_latent
from numpyro_bnn._types import Attributes, Kwargs, PyTree, Site, Trees
from numpyro_bnn.networks import record_statistics, use_statistics
from numpyro_bnn.program.plates import Plate, full_plates, sites_of_type
from numpyro_bnn.program.posterior import Posterior
from numpyro_bnn.program.sites import Sites

Call = tuple[tuple, Mapping[str, Any]]
Index = Array | None  # of rows; `None` stands for all


class Batch(NamedTuple):
    """Some rows of a model, or all.

    :param reading: the model on as many rows.
    :param indices: of these rows, by plate.
    """

    reading: Posterior
    indices: Mapping[str, Array] = {}

    def at(self, values: Trees, only: Any = None) -> Sites:
        """The trace of these rows at constrained values; their densities are not scaled
        up to all rows.
        """
        sites = self.reading.at({**values, **self.indices}, only=only)
        for name, site in sites_of_type(sites, "sample").items():
            for frame in self.reading.frames(name, self.indices):
                size = self.reading.sites[frame.name]["args"][0]
                if frame.size != size:
                    site["scale"] = site["scale"] * frame.size / size
        return sites

    def of(self, array: Array) -> Array:
        """The rows of an array that has all."""
        for index in self.indices.values():
            array = array[index]
        return array


class ModelRows:
    """A model at some arguments, on the rows of its minibatches or on all.

    :param full: whether its plates see all rows; by default those of a minibatch, if
        the model subsamples.
    """

    def __init__(self, model: Callable, call: Call, full: bool = False) -> None:
        self.model, self.call, self.full = model, call, full
        self.plates: dict[str, Plate] = {}
        #: Whether the model has batch normalizations.
        self.normalizes = False
        self._reading: Posterior | None = None
        self._programs: dict[Hashable, Callable] = {}
        if full:
            return
        with record_statistics() as recorded:
            self._reading = self._read()
        self.plates, self.normalizes = self._reading.plates, any(recorded.calls)

    def __getstate__(self) -> Attributes:
        return {**self.__dict__, "_reading": None, "_programs": {}}

    def _read(self) -> Posterior:
        with handlers.block():
            return Posterior(self.model, *self.call, full=self.full)

    def on(self, args: tuple, kwargs: Kwargs) -> "ModelRows":
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
        if self._reading is None:
            self._reading = self._read()
        return self._with_rows(self._reading, index)

    def read_again(self, index: Index = None) -> Posterior:
        """:meth:`reading`, in the context of the caller."""
        return self._with_rows(self._read(), index)

    def _with_rows(self, reading: Posterior, index: Index) -> Posterior:
        if index is None:
            return reading
        with handlers.block():
            return reading.with_sizes(dict.fromkeys(self.plates, len(index)))

    def batch(self, reading: Posterior, index: Index) -> Batch:
        """These rows of a reading."""
        return Batch(
            reading, {} if index is None else dict.fromkeys(self.plates, index)
        )

    def run(
        self, fn: Callable, index: Index, *values: PyTree, key: Hashable = None
    ) -> PyTree:
        """``fn(batch, *values)`` by a program that is kept by ``key``, or by ``fn``."""
        number = None if index is None else len(index)
        place = (key or fn, number)
        if place not in self._programs:

            def on_batch(reading: Posterior, index: Index, *values: PyTree) -> PyTree:
                return fn(self.batch(reading, index), *values)

            self._programs[place] = self.reading(index).prepare(
                on_batch, runs_rarely=False
            )
        return self._programs[place](index, *values)

    def run_once(self, fn: Callable, *values: PyTree) -> PyTree:
        """``fn(batch, *values)``, for what does not depend on the rows."""
        return self.run(fn, self.chunks[0], *values)

    def total(self, fn: Callable, *values: PyTree, key: Hashable = None) -> PyTree:
        """The sum of ``fn(batch, *values)`` over all rows."""
        total: PyTree = None
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


def _is_of_rows(site: Site) -> bool:
    if site["type"] == "sample":
        return site["is_observed"]
    return site["type"] in ("plate", "deterministic")
