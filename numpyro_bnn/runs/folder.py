"""The folder of a run: one writer, a description of what was started, and states of which the last two are kept.

A state file is the commit of everything that was written before it: it is complete or absent, and it says with which
digest the block before it was written.
"""

import hashlib
import io
import json
import os
import uuid
import warnings
import zipfile
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_bnn._checks import argument_error, outside
from numpyro_bnn._keys import key_numbers
from numpyro_bnn._options import Kind
from numpyro_bnn.program.rows import Rows

FORMAT = 1
KEPT = 2  # states
DENSITY = "log density"  # entry of a description whose numbers may differ by rounding
DAMAGE = (OSError, KeyError, EOFError, ValueError, NotImplementedError, zlib.error, zipfile.BadZipFile)


class Saved(NamedTuple):
    """A state: its number, a tree of arrays, notes (numbers and texts by name), and arrays of any shape by name."""

    number: int
    tree: Any
    notes: dict[str, Any]
    arrays: dict[str, np.ndarray]


class Folder:
    """The folder of a run, held by one process at a time.

    :param call: the public function that opens it, for errors.
    :param path: of the folder, which is made if it does not exist.
    :raises OSError: if it cannot be written; ``ValueError`` if another process holds it, or if it holds other files.
    """

    def __init__(self, call: str, path: str | os.PathLike) -> None:
        Kind(str | os.PathLike, "Pass the name of a folder.").check(call, "folder", path)
        self.call, self.path = call, Path(path)
        filelock = import_extra(call, "filelock")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            #: Ends with its process, however that ends.
            self._lock = filelock.FileLock(self.path / "lock", timeout=0)
            self._lock.acquire()
        except filelock.Timeout as cause:
            raise self.error("which another process is writing", "Wait for it, or pass another folder.") from cause
        except OSError as cause:
            raise self.unwritable(cause) from cause
        for part in self.path.glob("*.part"):  # of a process that was killed while it wrote
            part.unlink(missing_ok=True)

    def __enter__(self) -> "Folder":
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def error(self, got: str, instead: str, kind: type[Exception] = ValueError) -> Exception:
        """The error about this folder."""
        return argument_error(self.call, "folder", f"{str(self.path)!r}, {got}", instead, kind)

    def unwritable(self, cause: OSError) -> Exception:
        """The error for a folder that cannot be written, or whose disk is full."""
        instead = "Free space or change the folder's rights; the same call then goes on from the last finished block."
        return self.error(f"which cannot be written ({cause.strerror or cause})", instead, OSError)

    def claim(self, description: Mapping[str, str]) -> None:
        """Describe a new run, or refuse a folder that holds another one, and name what differs."""
        file = self.path / "run.json"
        if not file.exists():
            strange = [entry.name for entry in self.path.iterdir() if entry.name != "lock"]
            if strange:
                got = f"which holds other files, such as {strange[0]!r}"
                raise self.error(got, "Pass the name of a new folder.")
            content = json.dumps({"format": FORMAT, "description": dict(description)}, indent=1)
            self._replace(file, lambda target: target.write(content.encode()))
            return
        try:
            found = json.loads(file.read_text())
            known, version = found["description"], found["format"]
        except (*DAMAGE, json.JSONDecodeError, TypeError) as cause:
            raise self.error("whose run.json is damaged", "Delete the folder, or pass another one.") from cause
        if version != FORMAT:
            raise self.error(f"of format {version} where {FORMAT} is read", "Pass the name of a new folder.")
        if differences := _differences(known, description):
            instead = "Pass a new folder, or all that this run was started with."
            raise self.error(f"the run of something else: {'; '.join(differences)}", instead)

    # -- states ------------------------------------------------------------------------------------------

    def commit(
        self, number: int, tree: Any, notes: Mapping[str, Any], more: Mapping[str, np.ndarray] | None = None
    ) -> None:
        """Write a state and more arrays, then remove the states that are no longer needed."""
        arrays = {f"leaf_{i}": raw(leaf) for i, leaf in enumerate(jax.tree.leaves(tree))}
        arrays |= {f"array_{name}": np.asarray(value) for name, value in (more or {}).items()}
        content = json.dumps({"notes": dict(notes), "values": digest(arrays)})
        described = np.frombuffer(content.encode(), np.uint8)
        arrays["described"] = described
        self._replace(self._state(number), lambda file: np.savez(file, allow_pickle=False, **arrays))
        for old in self.numbers()[:-KEPT]:
            self._state(old).unlink(missing_ok=True)

    def latest(self, like: Any, valid: Callable[[Saved], bool] = lambda saved: True) -> Saved | None:
        """The last state that is whole; one that is not is left out with a warning.

        :param like: a tree of the same structure.
        :param valid: whether what was written before a state is whole as well.
        :raises ValueError: if there are states, and none is whole.
        """
        numbers = self.numbers()
        for number in reversed(numbers):
            saved = self._read(number, like)
            if saved is not None and valid(saved):
                return saved
            text = (
                f"{self.call}: block {number} in {str(self.path)!r} is damaged: the run goes on from the one before."
            )
            warnings.warn(text, stacklevel=outside())
        if numbers:
            instead = "Delete the folder and start again, or restore it from a copy."
            raise self.error("whose last blocks are all damaged", instead)
        return None

    def numbers(self) -> list[int]:
        """Numbers of the states, in order."""
        return state_numbers(self.path)

    def _state(self, number: int) -> Path:
        return self.path / f"state-{number:08d}.npz"

    def _read(self, number: int, like: Any) -> Saved | None:
        try:
            with open(self._state(number), "rb") as stream, np.load(stream, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            described = json.loads(bytes(arrays.pop("described")))
            if described["values"] != digest(arrays):
                return None
            template, structure = jax.tree.flatten(like)
            leaves = [restored(arrays[f"leaf_{i}"], leaf) for i, leaf in enumerate(template)]
        except DAMAGE:
            return None
        more = {name.removeprefix("array_"): v for name, v in arrays.items() if name.startswith("array_")}
        return Saved(number, jax.tree.unflatten(structure, leaves), described["notes"], more)

    def _replace(self, path: Path, write: Callable[[Any], Any]) -> None:
        """Write a file that is replaced at once: under its name there is the old one or the whole new one."""
        part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
        try:
            with open(part, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
            sync(path.parent)
        except OSError as cause:
            raise self.unwritable(cause) from cause
        finally:
            part.unlink(missing_ok=True)


def state_numbers(path: Path) -> list[int]:
    """Numbers of the states in a folder, in order."""
    return sorted(int(file.stem.split("-")[1]) for file in path.glob("state-*.npz"))


def last_notes(path: Path) -> dict[str, Any]:
    """The notes of the last state in a folder, which another process may be writing; none before the first."""
    for number in reversed(state_numbers(path)):
        with suppress(*DAMAGE):
            content = io.BytesIO((path / f"state-{number:08d}.npz").read_bytes())
            with np.load(content, allow_pickle=False) as file:
                return dict(json.loads(bytes(file["described"]))["notes"])
    return {}


def import_extra(call: str, name: str) -> Any:
    """A package of the extra ``runs``."""
    try:
        return import_module(name)
    except ImportError as cause:
        instead = "Install it with `pip install numpyro_bnn[runs]`."
        raise argument_error(call, "folder", f"no package {name} to write it with", instead, ImportError) from cause


def sync(folder: Path) -> None:
    """Make the names of the files in a folder durable, where the system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _differences(found: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    """The entries that differ, in words; at most three."""
    off = [name for name in {**expected, **found} if not _equal(name, found.get(name), expected.get(name))]
    listed = [f"{name} was {found.get(name, 'absent')}, is {expected.get(name, 'absent')}" for name in off[:3]]
    return listed + ([f"and {len(off) - 3} more"] if len(off) > 3 else [])


def _equal(name: str, one: str | None, other: str | None) -> bool:
    if name != DENSITY or one is None or other is None:
        return one == other
    first, second = (np.array(text.split(), float) for text in (one, other))
    return first.shape == second.shape and np.allclose(first, second, rtol=1e-4, equal_nan=True)


# -- trees of arrays ----------------------------------------------------------------------------------------------


def digest(tree: Any) -> str:
    """A hash of all arrays, numbers and texts of a tree; of other objects only their types enter."""
    found = hashlib.sha256()
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    for path, leaf in leaves:
        plain = isinstance(leaf, str | bytes | int | float | complex)
        leaf = np.frombuffer(leaf.digest(), np.uint8) if isinstance(leaf, Rows) else leaf
        array = raw(leaf) if hasattr(leaf, "dtype") else np.asarray(str(leaf if plain else type(leaf)))
        found.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape};".encode())
        found.update(np.ascontiguousarray(array).data.cast("B") if array.size else b"")
    return found.hexdigest()


def raw(leaf: Any) -> np.ndarray:
    """A leaf as an array that npz can hold: key data for keys, raw bits for bfloat16 and the like."""
    array = np.asarray(key_numbers(leaf))
    return array.view(f"u{array.dtype.itemsize}") if array.dtype.kind == "V" else array


def restored(array: np.ndarray, leaf: Any) -> jax.Array:
    """The leaf that :func:`raw` was given, of the kind, shape and dtype of ``leaf``; else a ``ValueError``."""
    if array.shape != raw(leaf).shape or array.dtype != raw(leaf).dtype:
        raise ValueError("a leaf of another shape or dtype")
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return with_keys(jnp.asarray(array), leaf)
    # A copy: on the CPU, JAX might otherwise keep working in memory that NumPy owns.
    return jnp.array(array.view(leaf.dtype) if array.dtype != leaf.dtype else array)


def with_keys(numbers: Any, leaf: jax.Array) -> Any:
    """The leaf that :func:`~numpyro_bnn._keys.key_numbers` was given."""
    typed = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(leaf)) if typed else numbers
