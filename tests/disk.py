"""For tests of runs in folders: what a process leaves that is killed, whether two
results have the same bits.
"""

import functools
import os
import shutil
import stat
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

TESTS = Path(__file__).parent


def same(found, expected):
    """Whether two trees have the same bits."""

    def bits(leaf):
        leaf = jnp.asarray(leaf)
        array = np.asarray(
            jax.random.key_data(leaf)
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            else leaf
        )
        return array.dtype, array.shape, array.tobytes()

    leaves = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return all(bits(leaf) == bits(other) for leaf, other in leaves)


def draws_of(run):
    """Draws and statistics of a run or an ``MCMC``, (C, S, ...) by name."""
    fields = {
        f"field {name}": value for name, value in run.get_extra_fields(True).items()
    }
    return {**run.get_samples(True), **fields}


def at_syncs(patch, action):
    """Call ``action(number, is_folder)`` for every file and folder that is made
    durable, as soon as it is.

    What is in the folder of a run at such a moment is what a process leaves that is
    killed then.
    """
    original, numbers = os.fsync, iter(range(1_000_000))

    def fsync(descriptor):
        original(descriptor)
        action(next(numbers), stat.S_ISDIR(os.fstat(descriptor).st_mode))

    patch.setattr(os, "fsync", fsync)


def states(path):
    """The files with states, the last one at the end."""
    return sorted(path.glob("state-*.npz"))


def blocks(path):
    """The number of blocks that are finished."""
    return max((int(file.stem.split("-")[1]) for file in states(path)), default=0)


class Recorded(NamedTuple):
    """The folder of a run that was left alone, its result, and earlier copies."""

    path: Path
    result: Any
    cuts: list[Path]

    def copy(self, path):
        return shutil.copytree(self.path, path)


def recorder(make_folder, run, every):
    """A function from names to what was seen of ``run(path, name)``, made once; every
    so many syncs it is copied.
    """

    @functools.cache
    def record(name):
        root, cuts = make_folder(), []

        def keep(number, is_folder):
            if number % every == 1:
                cuts.append(shutil.copytree(root / "run", root / f"cut{number}"))

        with pytest.MonkeyPatch.context() as patch:
            at_syncs(patch, keep)
            return Recorded(root / "run", run(root / "run", name), cuts)

    return record


def python(code, devices=2, **environment):
    """Command and environment of another process that imports tests."""
    known = os.environ.get("PYTHONPATH")  # where planted faults are
    folders = [
        *([known] if known else []),
        *map(str, (TESTS / "borders", TESTS, TESTS.parent)),
    ]
    shared = {
        "PYTHONPATH": os.pathsep.join(folders),
        "XLA_FLAGS": (
            f"{os.environ['XLA_FLAGS']} "
            f"--xla_force_host_platform_device_count={devices}"
        ),
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    return {
        "args": [sys.executable, "-P", "-c", code],
        "env": {**os.environ, **shared, **environment},
    }


def contents(path):
    """The bytes of all files of a run but its lock, by name."""
    files = sorted(
        file for file in path.rglob("*") if file.is_file() and file.name != "lock"
    )
    return {str(file.relative_to(path)): file.read_bytes() for file in files}
