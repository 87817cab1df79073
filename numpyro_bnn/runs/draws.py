"""Draws on disk: one Zarr group for the values of sites, one for statistics, in chunks by chain and block."""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from numpyro_bnn._checks import argument_error
from numpyro_bnn.runs.folder import Folder, digest, import_extra

SITES, STATISTICS = "posterior", "sample_stats"

# Arrays, or their shapes and dtypes, by group and name.
Groups = Mapping[str, Mapping[str, Any]]


class Layout(NamedTuple):
    """How draws are laid out: C chains, S draws in each, and how many of them are a block."""

    num_chains: int
    num_draws: int
    draws_per_block: int


class Draws:
    """The draws of a run, as arrays (C, S, ...) of which the first ones are written.

    Variables are called as in ArviZ: ``net.Dense_0.kernel`` for the site ``net/Dense_0.kernel``.

    :param shapes: shapes and dtypes of one draw of one chain.
    """

    def __init__(self, folder: Folder, shapes: Groups) -> None:
        self._folder, self._path, self._shapes = folder, folder.path / "draws.zarr", shapes
        self._arrays: dict[tuple[str, str], Any] = {}
        self._check_names()

    def _check_names(self) -> None:
        for values in self._shapes.values():
            known = {"chain": "an axis of the draws", "draw": "an axis of the draws"}
            for name in values:
                if (other := known.setdefault(stored(name), name)) != name:
                    got = f"a model with {name!r}, which is stored as {stored(name)!r} like {other!r}"
                    instead = "Rename the site in the model, or leave it out by `sites=`."
                    raise argument_error(self._folder.call, "mcmc", got, instead)

    def prepare(self, layout: Layout) -> int:
        """Make the arrays, or lengthen those that are there; return the draws per block, those of the first call."""
        zarr = import_extra(self._folder.call, "zarr")
        try:
            root = zarr.open_group(self._path, mode="a")
            groups = {group: root.require_group(group) for group in self._shapes}
            names = [(group, stored(name)) for group, name, _ in _flat(self._shapes)]
            old = [groups[group][name].chunks[1] for group, name in names if name in groups[group]]
            layout = layout._replace(draws_per_block=old[0] if old else layout.draws_per_block)
            for group, name, like in _flat(self._shapes):
                self._arrays[group, name] = _array(groups[group], stored(name), like, layout)
        except OSError as cause:
            raise self._folder.unwritable(cause) from cause
        return layout.draws_per_block

    def write(self, start: int, block: Groups) -> str:
        """Write the draws of all chains from ``start`` on, make them durable, and return their digest."""
        try:
            for group, name, values in _flat(block):
                array = self._arrays[group, name]
                array[:, start : start + values.shape[1]] = values
                for chain in range(len(values)):
                    _sync(self._path / group / stored(name) / _chunk(chain, start // array.chunks[1], values.ndim))
        except OSError as cause:
            raise self._folder.unwritable(cause) from cause
        return digest(dict(block))

    def holds(self, start: int, stop: int, expected: str) -> bool:
        """Whether the draws from ``start`` to ``stop`` are those with this digest."""
        try:
            found = self.read(start, stop)
        except (OSError, ValueError, KeyError):
            return False
        return digest(found) == expected

    def read(self, start: int, stop: int, only: str | None = None) -> dict[str, dict[str, np.ndarray]]:
        """The draws of all chains from ``start`` to ``stop``, by default of all groups."""
        found: dict[str, dict[str, np.ndarray]] = {group: {} for group in self._shapes if only in (None, group)}
        for (group, name), array in self._arrays.items():
            if group in found:
                found[group][name] = np.asarray(array[:, start:stop])
        return found


def _array(group: Any, name: str, like: Any, layout: Layout) -> Any:
    """The array of a group with this name, made if it is not there, and long enough."""
    shape = (layout.num_chains, layout.num_draws, *like.shape)
    if name not in group:
        return group.create_array(
            name,
            shape=shape,
            chunks=(1, layout.draws_per_block, *(max(1, size) for size in like.shape)),
            dtype=like.dtype,
            fill_value=np.nan if np.dtype(like.dtype).kind == "f" else 0,
            compressors=None,  # the digits of draws are random
            dimension_names=("chain", "draw", *(f"{name}_dim_{i}" for i in range(len(like.shape)))),
        )
    if group[name].shape[1] < layout.num_draws:
        group[name].resize(shape)
    return group[name]


def stored(name: str) -> str:
    """The name of the array of a site."""
    return name.replace("/", ".")


def _flat(groups: Groups) -> Iterator[tuple[str, str, Any]]:
    return ((group, name, value) for group, values in groups.items() for name, value in values.items())


def _chunk(chain: int, block: int, rank: int) -> str:
    return "/".join(["c", str(chain), str(block), *["0"] * (rank - 2)])


def _sync(path: Any) -> None:
    with suppress(FileNotFoundError), open(path, "rb") as file:  # a chunk of nothing but fill values is not written
        os.fsync(file.fileno())
