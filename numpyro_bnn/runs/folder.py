"""The folder of a run: one writer, a description of what was started, and states of
which the last two are kept.

A state file is the commit of everything that was written before it: it is complete or
absent, and it has the digests of all blocks of draws. Nothing is written before there
is a state to write, so a refused call changes nothing.
"""

import hashlib
import json
import os
import re
import uuid
import warnings
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import multihost_utils

from numpyro_bnn._checks import argument_error, has_rows_elsewhere, outside
from numpyro_bnn._keys import key_numbers
from numpyro_bnn._options import Kind
from numpyro_bnn._types import Attributes, PyTree
from numpyro_bnn.program.rows import Rows

FORMAT = 2  # 1, of version 0.2.0, had no digests
STATES_KEPT = 2  # states
# entries of a description whose numbers may differ by rounding
DENSITY = "log density of "
DAMAGE = Exception  # a damaged file may fail anywhere in the library that reads it
RESTORE = "Restore the folder from a copy, or delete it and start again."
STATE = re.compile(r"state-(\d{8,})\.npz")
# written by a process that was killed
UNFINISHED = re.compile(r"(run\.json|state-\d{8,}\.npz)\.[0-9a-f]{32}\.part")


class Saved(NamedTuple):
    """A state: its number, a tree of arrays, notes (numbers and texts by name), and
    arrays of any shape by name.
    """

    number: int
    tree: PyTree
    notes: Attributes
    arrays: dict[str, np.ndarray]


@dataclass(frozen=True)
class FolderPath:
    """The folder of a run as an argument of a public function.

    :param call: the function.
    :param argument: the argument.
    :param path: absolute, so that it stays the same folder if the process goes to
        another one.
    """

    call: str
    argument: str
    path: Path

    @classmethod
    def of(cls, call: str, argument: str, path: Any) -> "FolderPath":
        """The folder that a user names, in which ``~`` is the home folder."""
        Kind(str | os.PathLike, "Pass the name of a folder.").check(
            call, argument, path
        )
        name = os.fspath(path)
        if not isinstance(name, str) or not name or "\0" in name:
            raise argument_error(
                call, argument, repr(name), "Pass the name of a folder."
            )
        try:
            return cls(call, argument, Path(name).expanduser().absolute())
        except RuntimeError as cause:
            got = f"{name!r}, of a user without a home folder"
            raise argument_error(
                call, argument, got, "Pass the whole name of the folder."
            ) from cause

    def error(
        self, got: str, instead: str, kind: type[Exception] = ValueError
    ) -> Exception:
        """The error about this folder."""
        return argument_error(
            self.call, self.argument, f"{str(self.path)!r}, {got}", instead, kind
        )

    def unwritable(self, cause: OSError) -> Exception:
        """The error for a folder that cannot be written, or whose disk is full."""
        instead = (
            "Free space or change the folder's rights; the same call then goes on from "
            "the last finished block."
        )
        return self.error(
            f"which cannot be written ({cause.strerror or cause})", instead, OSError
        )

    def record(self) -> Attributes:
        """What ``run.json`` says, which is checked.

        :raises ValueError: if it is damaged, or of another version;
            ``FileNotFoundError`` if there is none.
        """
        try:
            record = json.loads((self.path / "run.json").read_bytes())
            version, expected = record["format"], record.pop("digest", None)
        except OSError as cause:
            if isinstance(cause, FileNotFoundError):
                raise
            raise self.error(
                f"whose run.json cannot be read ({cause.strerror})",
                "Change its rights.",
            ) from cause
        except DAMAGE as cause:
            raise self.error("whose run.json is damaged", RESTORE) from cause
        if version == 1:
            got = (
                "the run of an older version, which wrote no digests by which damage "
                "is seen"
            )
            instead = (
                "Pass the name of a new folder. `xarray.open_zarr(folder + "
                "'/draws.zarr', group='posterior')`"
            )
            raise self.error(got, f"{instead} reads the old draws, unchecked.")
        if expected != digest(json.dumps(record)):
            raise self.error("whose run.json is damaged", RESTORE)
        if version != FORMAT:
            raise self.error(
                f"of format {version} where {FORMAT} is read",
                "Pass the name of a new folder.",
            )
        return dict(record)

    def numbers(self) -> list[int]:
        """Numbers of the states, in order."""
        matches = map(STATE.fullmatch, os.listdir(self.path))
        return sorted(int(match[1]) for match in matches if match)

    def state_file(self, number: int) -> Path:
        """The file of a state."""
        return self.path / f"state-{number:08d}.npz"

    def latest(
        self,
        run: str,
        like: PyTree = None,
        valid: Callable[[Saved], bool] = lambda saved: True,
    ) -> Saved | None:
        """The last state that is whole; ``None`` before the first. It warns of those
        that it leaves out.

        :param run: digest of the record to which a state must belong.
        :param like: a tree of the same structure, or ``None`` to read no tree.
        :param valid: whether what was written before a state is whole as well.
        :raises ValueError: if there are states, and none is whole.
        """
        while numbers := self.numbers():
            damaged: list[int] = []
            for number in reversed(numbers):
                saved = self._read(number, run, like)
                if saved is not None and valid(saved):
                    for skipped in damaged:
                        text = (
                            f"block {skipped} in {str(self.path)!r} is damaged: the "
                            f"run goes on from the one before."
                        )
                        warnings.warn(f"{self.call}: {text}", stacklevel=outside())
                    return saved
                damaged.append(number)
            if numbers == self.numbers():
                # else another process has written states and removed these
                raise self.error("whose last blocks are all damaged or lost", RESTORE)
        if (self.path / "draws.zarr").exists():
            raise self.error("which has draws, but no state file", RESTORE)
        return None

    def _read(self, number: int, run: str, like: PyTree) -> Saved | None:
        try:
            arrays = _arrays_in(self.state_file(number))
            described = json.loads(bytes(arrays.pop("described")))
            if (
                described["values"] != digest(arrays)
                or described["run"] != run
                or described["number"] != number
            ):
                return None
            template, structure = jax.tree.flatten(like)
            leaves = [
                restored(arrays[f"leaf_{i}"], leaf) for i, leaf in enumerate(template)
            ]
        except DAMAGE:
            return None
        more = {}
        for name, value in arrays.items():
            if name.startswith("array_"):
                more[name.removeprefix("array_")] = value
        tree = jax.tree.unflatten(structure, leaves)
        return Saved(number, tree, described["notes"], more)


class Folder:
    """The folder of a run, held by one process at a time.

    It is made, and what was started is described, with the first state; before that it
    is a lock, or nothing.

    :param place: where it is.
    :param description: what is started, by name: texts, or lists of parts, each with a
        label and a text.
    :param more: what the record of a new run says besides, as JSON.
    :raises OSError: if it cannot be written; ``ValueError`` if another process holds
        it, or if it holds other files or another run (the error names what differs).
    """

    def __init__(self, place: FolderPath, description: Attributes) -> None:
        self.place, self.path = place, place.path
        self.description = dict(description)
        #: What a new run's record says besides the description, as JSON.
        self.more: Attributes = {}
        filelock = import_extra(place.call, "filelock")
        self._made = [
            folder for folder in (self.path, *self.path.parents) if not folder.exists()
        ]
        try:
            self._refuse_others()
            self.path.mkdir(parents=True, exist_ok=True)
            #: Ends with its process, however that ends.
            self._lock = filelock.FileLock(self.path / "lock", timeout=0)
            self._lock.acquire()
        except filelock.Timeout as cause:
            raise place.error(
                "which another process is writing",
                "Wait for it, or pass another folder.",
            ) from cause
        except OSError as cause:
            raise place.unwritable(cause) from cause
        try:
            self._compare()
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> "Folder":
        return self

    def __exit__(self, *_: object) -> None:
        if not (self.path / "run.json").exists():
            # nothing was written: leave nothing behind
            with suppress(OSError):
                (self.path / "lock").unlink(missing_ok=True)
        self._lock.release()
        with suppress(OSError):  # not empty
            for folder in self._made:
                folder.rmdir()

    def _refuse_others(self) -> None:
        """Refuse a folder that was not made by a run, before anything
        in it is touched.
        """
        names = set(os.listdir(self.path)) if self.path.exists() else set()
        if "run.json" in names:
            return
        if "draws.zarr" in names or any(STATE.fullmatch(name) for name in names):
            raise self.place.error("which has lost its run.json", RESTORE)
        foreign = sorted(
            name for name in names if name != "lock" and not UNFINISHED.fullmatch(name)
        )
        if foreign:
            got = f"which holds other files, such as {foreign[0]!r}"
            raise self.place.error(got, "Pass the name of a new folder.")

    def _compare(self) -> None:
        """Refuse a folder that holds another run, and name what differs."""
        try:
            record = self.place.record()
        except FileNotFoundError:
            return
        differences = _differences(record["description"], self.description)
        if differences:
            instead = "Pass a new folder, or all that this run was started with."
            raise self.place.error(
                f"the run of something else: {'; '.join(differences)}", instead
            )
        for entry in self.path.iterdir():
            if UNFINISHED.fullmatch(entry.name):
                entry.unlink(missing_ok=True)

    # -- states ------------------------------------------------------------------------

    @property
    def run(self) -> str:
        """The digest of what was started, by which states know their run."""
        return digest(json.dumps(self.place.record()))

    def latest(
        self, like: PyTree, valid: Callable[[Saved], bool] = lambda saved: True
    ) -> Saved | None:
        """The last state that is whole: :meth:`FolderPath.latest`."""
        try:
            return self.place.latest(self.run, like, valid)
        except FileNotFoundError:
            return None

    def commit(
        self,
        number: int,
        tree: PyTree,
        notes: Attributes,
        more: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Write a state and more arrays, then remove the states that are no longer
        needed.
        """
        if not (self.path / "run.json").exists():
            record = {"format": FORMAT, "description": self.description, **self.more}
            content = json.dumps(
                {**record, "digest": digest(json.dumps(record))}, indent=1
            )
            self._replace(
                self.path / "run.json", lambda file: file.write(content.encode())
            )
        arrays = {}
        for i, leaf in enumerate(jax.tree.leaves(tree)):
            arrays[f"leaf_{i}"] = raw(leaf)
        for name, value in (more or {}).items():
            arrays[f"array_{name}"] = np.asarray(value)
        described = {
            "notes": dict(notes),
            "values": digest(arrays),
            "run": self.run,
            "number": number,
        }
        arrays["described"] = np.frombuffer(json.dumps(described).encode(), np.uint8)
        self._replace(
            self.place.state_file(number),
            lambda file: np.savez(file, allow_pickle=False, **arrays),
        )
        for expired in self.place.numbers()[:-STATES_KEPT]:
            self.place.state_file(expired).unlink(missing_ok=True)

    def _replace(self, path: Path, write: Callable[[Any], Any]) -> None:
        """Write a file that is replaced at once: under its name there is the old one or
        the whole new one.
        """
        unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
        try:
            with open(unfinished, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, path)
            sync(path.parent)
        except OSError as cause:
            raise self.place.unwritable(cause) from cause
        finally:
            unfinished.unlink(missing_ok=True)


def _arrays_in(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a state file, which take no more memory than the file itself."""
    with open(path, "rb") as stream:
        with zipfile.ZipFile(stream) as archive:
            size = sum(member.file_size for member in archive.infolist())
        if size > os.fstat(stream.fileno()).st_size:  # states are not compressed
            raise ValueError("a file that unpacks to more than it is")
        stream.seek(0)
        with np.load(stream, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}


def import_extra(call: str, name: str) -> PyTree:
    """A package of the extra ``runs``."""
    try:
        return import_module(name)
    except ImportError as cause:
        instead = "Install it with `pip install numpyro_bnn[runs]`."
        raise argument_error(
            call, "folder", f"no package {name} to write it with", instead, ImportError
        ) from cause


def sync(folder: Path) -> None:
    """Make the names of the files in a folder durable, where the system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _differences(recorded: Attributes, expected: Attributes) -> list[str]:
    """The entries that differ, in words; at most three."""
    differing = []
    for name in {**expected, **recorded}:
        was, now = recorded.get(name, "absent"), expected.get(name, "absent")
        difference = _difference(name, was, now)
        if difference:
            differing.append(difference)
    if len(differing) > 3:
        differing[3:] = [f"and {len(differing) - 3} more"]
    return differing


def _difference(name: str, was: PyTree, now: PyTree) -> str:
    """How an entry differs, or ``""``; of parts, only the texts count, so that
    variables may be renamed.
    """
    if isinstance(was, list) and isinstance(now, list):
        for (_, was_text), (label, now_text) in zip(was, now, strict=False):
            if was_text != now_text:
                return f"{name}{label} was {was_text}, is {now_text}"
        if len(was) == len(now):
            return ""
        return f"{name} had {len(was)} parts, has {len(now)}"
    if was == now or (name.startswith(DENSITY) and _close(was, now)):
        return ""
    if isinstance(was, list):
        was = f"{was[0][1]}, ..."
    if isinstance(now, list):
        now = f"{now[0][1]}, ..."
    return f"{name} was {was}, is {now}"


def _close(was: str, now: str) -> bool:
    """Whether log densities, each with the sum of the sizes of its terms, are the same
    but for rounding.
    """
    try:
        first = np.array(was.split(), float).reshape(-1, 2)
        second = np.array(now.split(), float).reshape(-1, 2)
    except ValueError:  # absent
        return False
    if first.shape != second.shape:
        return False
    close = np.abs(first - second) <= 1e-4 * np.maximum(first[:, 1:], second[:, 1:])
    return bool(
        np.all(close | (first == second) | (np.isnan(first) & np.isnan(second)))
    )


# -- trees of arrays -------------------------------------------------------------------


def digest(tree: PyTree) -> str:
    """A hash of all arrays, numbers and texts of a tree; of other objects only their
    types enter.
    """
    hasher = hashlib.sha256()
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    for path, leaf in leaves:
        plain = isinstance(leaf, str | bytes | int | float | complex)
        if isinstance(leaf, Rows):
            array = np.frombuffer(leaf.digest(), np.uint8)
        elif has_rows_elsewhere(leaf):
            array = _digests_of_parts(leaf)
        elif hasattr(leaf, "dtype"):
            array = raw(leaf)
        else:
            array = np.asarray(str(leaf if plain else type(leaf)))
        hasher.update(
            f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape};".encode()
        )
        hasher.update(np.ascontiguousarray(array).data.cast("B") if array.size else b"")
    return hasher.hexdigest()


def _digests_of_parts(array: Array) -> np.ndarray:
    """Of an array over several processes, a hash of the part of each."""
    text = f"{array.dtype} {array.shape}".encode()
    hasher = hashlib.sha256(text)
    for shard in array.addressable_shards:
        hasher.update(np.ascontiguousarray(shard.data).data.cast("B"))
    own = np.frombuffer(hasher.digest(), np.uint8)
    return np.asarray(multihost_utils.process_allgather(own))


def raw(leaf: PyTree) -> np.ndarray:
    """A leaf as an array that npz can hold: key data for keys, raw bits for bfloat16
    and the like.
    """
    array = np.asarray(key_numbers(leaf))
    return array.view(f"u{array.dtype.itemsize}") if array.dtype.kind == "V" else array


def restored(array: np.ndarray, leaf: PyTree) -> Array:
    """The leaf that :func:`raw` was given, of the kind, shape and dtype of ``leaf``;
    else a ``ValueError``.
    """
    if array.shape != raw(leaf).shape or array.dtype != raw(leaf).dtype:
        raise ValueError("a leaf of another shape or dtype")
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return with_keys(jnp.asarray(array), leaf)
    # A copy: on the CPU, JAX might otherwise keep working in memory that NumPy owns.
    return jnp.array(array.view(leaf.dtype) if array.dtype != leaf.dtype else array)


def with_keys(numbers: Any, leaf: Array) -> PyTree:
    """The leaf that :func:`~numpyro_bnn._keys.key_numbers` was given."""
    if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return numbers
    return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(leaf))
