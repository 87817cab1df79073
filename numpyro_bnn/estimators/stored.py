"""Compiled programs on disk, so that another process does not compile them again."""

import hashlib
import os
import pickle
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from threading import Lock
from typing import Any

import jax
import jaxlib
from jax.experimental import serialize_executable

from numpyro_bnn.program.compiled import KEEP

MAX_BYTES = 2**28  # of the folder; the programs used longest ago go first
DIGEST_BYTES = hashlib.sha256().digest_size


def user_folder() -> Path:
    """The folder of this package where the operating system keeps what may be
    deleted.
    """
    home = Path.home()
    if sys.platform == "win32":
        usual = Path(os.environ.get("LOCALAPPDATA", home / "AppData" / "Local"))
    elif sys.platform == "darwin":
        usual = home / "Library" / "Caches"
    else:
        usual = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    return usual / "numpyro_bnn" / "programs"


@contextmanager
def stored_programs() -> Iterator[None]:
    """Keep the programs that are read inside in the user's folder, unless JAX keeps
    them on disk itself, or there are several devices.
    """
    config: Any = jax.config
    keep = None
    if not config.jax_compilation_cache_dir and jax.device_count() == 1:
        with suppress(RuntimeError):  # a user without a home
            folder = user_folder()
            keep = partial(_Stored, folder)
    token = KEEP.set(keep)
    try:
        yield
    finally:
        KEEP.reset(token)


@cache
def _processor() -> str:
    """What the processor can do."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor()


def _machine() -> tuple:
    """What else the code of a program depends on."""
    config: Any = jax.config
    settings = (
        config.jax_default_matmul_precision,
        config.jax_threefry_partitionable,
        config.jax_enable_x64,
    )
    variables = []
    for name in sorted(os.environ):
        if name.startswith(("JAX_", "XLA_")):
            variables.append((name, os.environ[name]))
    client = jax.devices()[0].client
    versions = jax.__version__, jaxlib.__version__, client.platform_version
    kind = platform.machine(), jax.devices()[0].device_kind
    return versions, kind, _processor(), settings, variables


class _Stored:
    """A program that is loaded, or compiled and written, when it is first called."""

    def __init__(self, folder: Path, program: Any, key: Any, avals: Any) -> None:
        name = hashlib.sha256(repr((key, _machine())).encode()).hexdigest()
        self._path = folder / name
        self._program = program
        self._avals = avals
        self._lock = Lock()
        self._ready: Callable | None = None

    def __call__(self, *leaves: Any) -> Any:
        if self._ready is None:
            with self._lock:
                if self._ready is None:
                    self._ready = _loaded(self._path) or self._compiled()
        return self._ready(*leaves)

    def _compiled(self) -> Callable:
        shapes = []
        for aval in self._avals:
            shapes.append(
                jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
            )
        compiled = self._program.lower(*shapes).compile()
        # Whether it can be stored is not for us to say, nor whether there is a folder:
        # if not, the next process compiles again.
        with suppress(Exception):
            content = pickle.dumps(serialize_executable.serialize(compiled))
            _write(self._path, hashlib.sha256(content).digest() + content)
        return compiled


def _loaded(path: Path) -> Callable | None:
    """The program of a file; ``None`` if there is none, or it is damaged."""
    try:
        written = path.read_bytes()
        digest, content = written[:DIGEST_BYTES], written[DIGEST_BYTES:]
        if hashlib.sha256(content).digest() != digest:
            return None
        program = serialize_executable.deserialize_and_load(*pickle.loads(content))
        os.utime(path)
    except Exception:  # whatever it is, the program can be compiled
        return None
    return program


def _write(path: Path, content: bytes) -> None:
    """Other processes see all of the file or none of it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft)
        raise
    _make_room(path.parent)


def _make_room(folder: Path) -> None:
    files = []
    for file in folder.iterdir():
        with suppress(OSError):  # another process has deleted it
            about = file.stat()
            files.append((about.st_mtime, about.st_size, file))
    total = sum(size for _, size, _ in files)
    for _, size, file in sorted(files):
        if total <= MAX_BYTES:
            break
        with suppress(OSError):
            file.unlink()
        total -= size
