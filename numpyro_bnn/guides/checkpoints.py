"""Checkpoints of a fit: the state of SVI and its losses as plain arrays, with a checksum, replaced at once."""

import hashlib
import json
import os
import uuid
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import SVI

from numpyro_bnn._checks import argument_error

CALL = "guides.fit"
CHECKPOINT_FORMAT = 3
DAMAGE = (OSError, KeyError, EOFError, ValueError, NotImplementedError, zlib.error, zipfile.BadZipFile)


def save_checkpoint(path: Path, svi: SVI, state: Any, losses: np.ndarray, prints: Mapping[str, str]) -> None:
    """Write state and losses as an npz file that is replaced atomically, so that it is always complete."""
    arrays: dict[str, Any] = {f"leaf_{i}": _raw(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}
    arrays["losses"] = losses
    content = {**described_state(svi, state, prints), "values": fingerprint(arrays)}
    described = np.frombuffer(json.dumps(content).encode(), np.uint8)
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")  # another process may write the same checkpoint
    try:
        with open(part, "wb") as file:
            np.savez(file, described=described, **arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as cause:
        got = f"{str(path)!r}, which cannot be written ({cause.strerror})"
        instead = "Free some space and call `fit` again: it goes on from the checkpoint before."
        raise argument_error(CALL, "checkpoint", got, instead, OSError) from cause
    finally:
        part.unlink(missing_ok=True)


def load_checkpoint(path: Path, svi: SVI, like: Any, prints: Mapping[str, str]) -> tuple[Any, np.ndarray]:
    """Read state and losses; ``like`` is a state of the same SVI, for its structure.

    :raises ValueError: for any other file, or for a checkpoint of another model, guide or optimizer, of other data,
        key or start.
    """
    damaged = "It is damaged, or was not written by `fit`: delete it, or pass another path."
    if not zipfile.is_zipfile(path):
        raise argument_error(CALL, "checkpoint", f"{str(path)!r}, which is not an npz file", damaged)
    try:
        with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        described = json.loads(bytes(arrays.pop("described")))
        if described.pop("values", None) != fingerprint(arrays) and described.get("format") == CHECKPOINT_FORMAT:
            raise ValueError("its values are not those that were written")
    except DAMAGE as cause:
        raise argument_error(CALL, "checkpoint", f"{str(path)!r} ({cause})", damaged) from cause
    expected = described_state(svi, like, prints)
    if described != expected:
        difference = difference_of(described, expected)
        instead = "Pass the path of a new file, or all that the run that wrote it was started with."
        raise argument_error(CALL, "checkpoint", f"{str(path)!r}, {difference}", instead)
    template, structure = jax.tree.flatten(like)
    leaves = [_restored(arrays[f"leaf_{i}"], leaf) for i, leaf in enumerate(template)]
    return jax.tree.unflatten(structure, leaves), arrays["losses"]


def fingerprint(tree: Any) -> str:
    """A hash of all arrays, numbers and texts of a tree; of other objects only their types enter."""
    digest = hashlib.sha256()
    for name, leaf in _named(tree):
        plain = isinstance(leaf, str | bytes | int | float | complex)
        array = _raw(leaf) if hasattr(leaf, "dtype") else np.asarray(str(leaf if plain else type(leaf)))
        digest.update(f"{name} {array.dtype} {array.shape};".encode() + array.tobytes())
    return digest.hexdigest()


def described_state(svi: SVI, state: Any, prints: Mapping[str, str]) -> dict[str, Any]:
    """Names, shapes and dtypes, and hashes of what a run was started with: file and call must agree in them."""
    params = svi.optim.get_params(state.optim_state)
    return {
        "format": CHECKPOINT_FORMAT,
        "prints": dict(prints),
        "parameters": {str(name): _kind(leaf) for name, leaf in _named(params)},
        "state": {name: _kind(leaf) for name, leaf in _named(state)},
    }


def _named(tree: Any) -> list[tuple[str, Any]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]


def _kind(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


def difference_of(found: dict[str, Any], expected: dict[str, Any]) -> str:
    """The first entry that differs, in words."""
    if found.get("format") != expected["format"]:
        return f"a file of format {found.get('format')} where {expected['format']} is read"
    for part in ("parameters", "state"):
        one, other = found[part], expected[part]
        for name in [*other, *one]:
            if one.get(name) != other.get(name):
                here, there = one.get(name, "no such entry"), other.get(name, "none")
                return f"in which {part.removesuffix('s')} {name} is {here}; this run has {there}"
    other_start = [name for name, value in expected["prints"].items() if found["prints"].get(name) != value]
    if other_start:
        return f"which was started with other {' and '.join(other_start)}"
    return "which differs in the order of its entries"


def _raw(leaf: Any) -> np.ndarray:
    """A leaf as an array that npz can hold: key data for keys, raw bits for bfloat16 and the like."""
    array = np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
    return array.view(f"u{array.dtype.itemsize}") if array.dtype.kind == "V" else array


def _restored(array: np.ndarray, leaf: Any) -> jax.Array:
    if _is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(leaf))
    # A copy: on the CPU, JAX might otherwise keep working in memory that NumPy owns.
    return jnp.array(array.view(leaf.dtype) if array.dtype != leaf.dtype else array)


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
