"""Files from which a fit continues: the state of SVI and its losses, as plain arrays."""

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpyro.infer import SVI

from numpyro_bnn._checks import argument_error

CALL = "guides.fit"
FORMAT = 1
DAMAGE = (OSError, KeyError, EOFError, zipfile.BadZipFile, UnicodeDecodeError, json.JSONDecodeError)


def check_path(path: str | Path) -> Path:
    """Refuse a path that cannot be a file, before any work."""
    target = Path(path)
    if target.is_dir() or not target.resolve().parent.is_dir():
        instead = "Pass the name of a file (not a folder) in a folder that exists."
        raise argument_error(CALL, "checkpoint", repr(str(target)), instead)
    return target


def save(path: Path, svi: SVI, state: Any, losses: np.ndarray) -> None:
    """Write state and losses as an npz file, which is replaced in one step, so that it is always complete."""
    arrays: dict[str, Any] = {f"leaf_{i}": _raw(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}
    described = np.frombuffer(json.dumps(_described(svi, state)).encode(), np.uint8)
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as file:
            np.savez(file, described=described, losses=losses, **arrays)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def load(path: Path, svi: SVI, like: Any) -> tuple[Any, np.ndarray]:
    """Read state and losses; ``like`` is a state of the same SVI, for its structure.

    :raises ValueError: for any other file, or a checkpoint of another model, guide or optimizer than ``svi``'s.
    """
    damaged = "It is damaged, or was not written by `fit`: delete it, or pass another path."
    if not zipfile.is_zipfile(path):
        raise argument_error(CALL, "checkpoint", f"{str(path)!r}, which is not an npz file", damaged)
    try:
        with np.load(path, allow_pickle=False) as file:
            described = json.loads(bytes(file["described"]))
            expected = _described(svi, like)
            if described != expected:
                difference = _difference(described, expected)
                instead = "Pass the path of a new file, or the model, guide and optimizer that wrote it."
                raise argument_error(CALL, "checkpoint", f"{str(path)!r}, {difference}", instead)
            template, structure = jax.tree.flatten(like)
            leaves = [_restored(file[f"leaf_{i}"], leaf) for i, leaf in enumerate(template)]
            return jax.tree.unflatten(structure, leaves), file["losses"]
    except DAMAGE as cause:
        raise argument_error(CALL, "checkpoint", f"{str(path)!r} ({cause})", damaged) from cause


def _described(svi: SVI, state: Any) -> dict[str, Any]:
    """Names, shapes and dtypes, by which a file is matched with an SVI."""
    params = svi.optim.get_params(state.optim_state)
    return {
        "format": FORMAT,
        "parameters": {str(name): _kind(leaf) for name, leaf in _named(params)},
        "state": {name: _kind(leaf) for name, leaf in _named(state)},
    }


def _named(tree: Any) -> list[tuple[str, Any]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]


def _kind(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


def _difference(found: dict[str, Any], expected: dict[str, Any]) -> str:
    """The first entry that differs, in words."""
    if found.get("format") != expected["format"]:
        return f"a file of format {found.get('format')} where {expected['format']} is read"
    for part in ("parameters", "state"):
        one, other = found[part], expected[part]
        for name in [*other, *one]:
            if one.get(name) != other.get(name):
                here, there = one.get(name, "no such entry"), other.get(name, "none")
                return f"in which {part.removesuffix('s')} {name} is {here}; this run has {there}"
    return "which differs in the order of its entries"


def _raw(leaf: Any) -> np.ndarray:
    """A leaf as an array that npz can hold: keys by their data, bfloat16 and its like by their bits."""
    array = np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
    return array.view(f"u{array.dtype.itemsize}") if array.dtype.kind == "V" else array


def _restored(array: np.ndarray, leaf: Any) -> jax.Array:
    if _is_key(leaf):
        return jax.random.wrap_key_data(jax.numpy.asarray(array), impl=jax.random.key_impl(leaf))
    # A copy: on the CPU, JAX may otherwise go on working in memory that NumPy owns.
    return jax.numpy.array(array.view(leaf.dtype) if array.dtype != leaf.dtype else array)


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
