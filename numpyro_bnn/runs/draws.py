"""Draws on disk: one Zarr group for the values of sites, one for statistics, in chunks
by chain and block.

Blocks are read as they were written, or not at all: each has a digest, which the states
keep.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from numpyro_bnn._checks import argument_error
from numpyro_bnn._types import HostArrays, PyTree, Shape, Sites
from numpyro_bnn.program.sites import safe
from numpyro_bnn.runs.folder import DAMAGE, RESTORE, FolderPath, digest, import_extra

SITES, STATISTICS = "posterior", "sample_stats"
MAX_DRAWS_PER_BLOCK = 4096
DIGEST_BYTES = 32

# Arrays, or their shapes and dtypes, by group and name.
Groups = Mapping[str, Mapping[str, Any]]


class DrawLayout(NamedTuple):
    """How draws are laid out: C chains, S draws in each, and how many of them are a
    block.
    """

    num_chains: int
    num_draws: int
    draws_per_block: int


class WrittenBlock(NamedTuple):
    """Draws that were written at once, from where the block before ends, and their
    digest.
    """

    stop: int
    digest: bytes


def table(blocks: tuple[WrittenBlock, ...]) -> HostArrays:
    """Blocks as arrays, which a state holds."""
    digests = np.frombuffer(b"".join(block.digest for block in blocks), np.uint8)
    return {
        "stops": np.array([block.stop for block in blocks], np.int64),
        "digests": digests,
    }


def blocks_in(arrays: HostArrays) -> tuple[WrittenBlock, ...]:
    """The blocks of a :func:`table`."""
    digests = arrays["digests"].reshape(-1, DIGEST_BYTES)
    return tuple(
        WrittenBlock(int(stop), bytes(digest))
        for stop, digest in zip(arrays["stops"], digests, strict=True)
    )


class StoredDraws:
    """The draws of a run, as arrays (C, S, ...) of which the first ones are written.

    Variables are called as in ArviZ: ``net.Dense_0.kernel`` for the site
    ``net/Dense_0.kernel``.

    :param place: the folder.
    :param num_chains: C.
    :param likes: dtype and shape of one draw of one chain, by group and name on disk.
    """

    def __init__(self, place: FolderPath, num_chains: int, likes: Groups) -> None:
        self._place, self._path = place, place.path / "draws.zarr"
        self._num_chains, self._likes = num_chains, likes
        #: The blocks that are finished.
        self.blocks: tuple[WrittenBlock, ...] = ()

    @property
    def _bounds(self) -> list[tuple[int, int, bytes]]:
        """Where blocks start and stop, and their digests."""
        bounds = []
        start = 0
        for block in self.blocks:
            bounds.append((start, *block))
            start = block.stop
        return bounds

    # -- writing -----------------------------------------------------------------------

    def draws_per_block(self, proposed: int) -> int:
        """How many draws are a block, since the first one was written."""
        if not self.blocks:
            return proposed
        for _, _, array in _flat(self._arrays("r")):
            return int(array.chunks[1])
        return proposed

    def write(
        self, start: int, stop: int, block: Groups, layout: DrawLayout
    ) -> tuple[WrittenBlock, ...]:
        """Write the draws of all chains from ``start`` to ``stop``, and make them
        durable.

        :param block: values by group and name on disk.
        :return: the blocks that are finished with this one, which take effect once they
            are set and in a state.
        """
        try:
            arrays = self._prepared(layout)
            for group, name, values in _flat(block):
                array = arrays[group][name]
                index, begins = divmod(start, array.chunks[1])
                files = [
                    self._path / group / name / _chunk(c, index, values.ndim)
                    for c in range(len(values))
                ]
                if not begins:
                    # Zarr would read a part of a file that a killed process has left
                    for file in files:
                        file.unlink(missing_ok=True)
                array[:, start:stop] = values
                for file in files:
                    _sync(file)
        except OSError as cause:
            raise self._place.unwritable(cause) from cause
        earlier = [written for written in self.blocks if written.stop <= start]
        return *earlier, WrittenBlock(stop, _digest(block))

    def _prepared(self, layout: DrawLayout) -> Sites:
        """The arrays, made if no block is finished, or lengthened."""
        if self.blocks:
            arrays = self._arrays("r+")
        else:
            zarr = import_extra(self._place.call, "zarr")
            root = zarr.open_group(self._path, mode="w")
            arrays = {group: {} for group in self._likes}
            for group in arrays:
                root.create_group(group)
            for group, name, like in _flat(self._likes):
                arrays[group][name] = _new_array(root[group], name, like, layout)
        for _, _, array in _flat(arrays):
            if array.shape[1] < layout.num_draws:
                array.resize((array.shape[0], layout.num_draws, *array.shape[2:]))
        return arrays

    # -- reading -----------------------------------------------------------------------

    def check(self, blocks: slice = slice(None)) -> None:
        """Read some blocks one by one, and refuse one that is not as it was written."""
        for start, stop, expected in self._bounds[blocks]:
            self._block(start, stop, expected)

    def read(self, group: str) -> HostArrays:
        """The draws of a group (C, S, ...) by name; an error if a block is not as it
        was written.
        """
        size = self._num_chains, self.blocks[-1].stop if self.blocks else 0
        draws = {
            n: np.empty((*size, *like.shape), like.dtype)
            for n, like in self._likes[group].items()
        }
        for start, stop, expected in self._bounds:
            for name, values in self._block(start, stop, expected)[group].items():
                draws[name][:, start:stop] = values
        return draws

    def _block(
        self, start: int, stop: int, expected: bytes
    ) -> dict[str, dict[str, np.ndarray]]:
        cause = None
        try:
            arrays = self._arrays("r")
            block: dict[str, dict[str, np.ndarray]] = {group: {} for group in arrays}
            for group, name, array in _flat(arrays):
                block[group][name] = np.asarray(array[:, start:stop])
            if _digest(block) == expected:
                return block
        except DAMAGE as error:
            cause = error
        got = f"whose draws {start} to {stop - 1} are damaged or lost"
        instead = RESTORE
        if stop == self.blocks[-1].stop:
            instead = f"`runs.start` makes the last block again. {RESTORE}"
        raise self._place.error(got, instead) from cause

    def _arrays(self, mode: str) -> Sites:
        """The arrays by group and name; a ``ValueError`` if reading them could take
        more memory than the draws do.
        """
        root = import_extra(self._place.call, "zarr").open_group(self._path, mode=mode)
        arrays: Sites = {group: {} for group in self._likes}
        for group, name, like in _flat(self._likes):
            array = arrays[group][name] = root[group][name]
            draws_per_block = array.chunks[1]
            as_written = (
                array.shape[0] == self._num_chains
                and array.shape[2:] == tuple(like.shape)
                and array.dtype == like.dtype
                and array.chunks == _chunk_shape(like, draws_per_block)
                and draws_per_block <= MAX_DRAWS_PER_BLOCK
                and len(array.metadata.codecs) == 1
            )
            if not as_written:
                raise ValueError("an array of another layout")
        return arrays


def _new_array(group: Any, name: str, like: PyTree, layout: DrawLayout) -> Any:
    return group.create_array(
        name,
        shape=(layout.num_chains, layout.num_draws, *like.shape),
        chunks=_chunk_shape(like, layout.draws_per_block),
        dtype=like.dtype,
        fill_value=np.nan if np.dtype(like.dtype).kind == "f" else 0,
        compressors=None,  # the digits of draws are random
        dimension_names=(
            "chain",
            "draw",
            *(f"{name}_dim_{i}" for i in range(len(like.shape))),
        ),
    )


def check_names(call: str, groups: Groups) -> None:
    """Refuse sites that would be stored under one name."""
    for values in groups.values():
        owners = {"chain": "an axis of the draws", "draw": "an axis of the draws"}
        for name in values:
            if safe(name) == "zarr.json" or safe(name).startswith("__"):
                got = f"a model with a site {name!r}, which names no file"
                raise argument_error(
                    call,
                    "mcmc",
                    got,
                    "Rename the site in the model, or leave it out by `sites=`.",
                )
            owner = owners.setdefault(safe(name), name)
            if owner != name:
                got = (
                    f"a model with {name!r}, which is stored as {safe(name)!r} like "
                    f"{owner!r}"
                )
                instead = "Rename the site in the model, or leave it out by `sites=`."
                raise argument_error(call, "mcmc", got, instead)


def _digest(block: Groups) -> bytes:
    return bytes.fromhex(digest(dict(block)))


def _flat(groups: Groups) -> Iterator[tuple[str, str, Any]]:
    for group, values in groups.items():
        for name, value in values.items():
            yield group, name, value


def _chunk_shape(like: PyTree, draws_per_block: int) -> Shape:
    return (1, draws_per_block, *(max(1, size) for size in like.shape))


def _chunk(chain: int, block: int, rank: int) -> str:
    return "/".join(["c", str(chain), str(block), *["0"] * (rank - 2)])


def _sync(path: Any) -> None:
    with (
        suppress(FileNotFoundError),
        open(path, "rb") as file,
    ):
        # a chunk of nothing but fill values is not written
        os.fsync(file.fileno())
