"""Settings of the whole process that last while any of its threads needs them: threads
of matrix products, and a folder of the user where JAX keeps compiled programs.
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from threading import Lock
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
from threadpoolctl import threadpool_limits


class ProcessContext:
    """A context of the process: the first thread enters it, and the last one leaves.

    :param make: makes the context.
    """

    def __init__(self, make: Callable[[], AbstractContextManager]) -> None:
        self._make, self._lock, self._users = make, Lock(), 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if not self._users:
                self._context = self._make()
                self._context.__enter__()
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._context.__exit__(None, None, None)


# Several would take ten times the processor's time for matrices of a thousand rows.
one_blas_thread = ProcessContext(partial(threadpool_limits, 1, "blas"))


MAX_BYTES = 2**28  # of the folder; the programs written first go first


@contextmanager
def _stored() -> Iterator[None]:
    """Let JAX keep what is compiled inside, by all threads, unless it has a folder
    already or is told to keep nothing.
    """
    config: Any = jax.config
    configured = (
        config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache
    )
    folder = None if configured else _user_folder()
    if folder is None or not _ready(folder):
        yield
        return
    settings = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    previous = {name: getattr(config, name) for name in settings}
    _configure(settings)
    try:
        yield
    finally:
        _configure(previous)


stored_programs = ProcessContext(_stored)


def _configure(settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # or it would stay in the folder that it had


def _user_folder() -> Path | None:
    """The folder of this package where the operating system keeps what may be
    deleted; ``None`` for a user without a home.
    """
    try:
        home = Path.home()
    except RuntimeError:
        return None
    if sys.platform == "win32":
        usual = Path(os.environ.get("LOCALAPPDATA", home / "AppData" / "Local"))
    elif sys.platform == "darwin":
        usual = home / "Library" / "Caches"
    else:  # a relative path is not valid there
        usual = home / ".cache"
        if os.path.isabs(named := os.environ.get("XDG_CACHE_HOME", "")):
            usual = Path(named)
    return usual / "numpyro_bnn" / "programs"


@cache
def _ready(folder: Path) -> bool:
    """Whether programs can be kept in a folder, which is made and freed of old ones.

    Programs run as they are found: nobody else may write there.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if sys.platform != "win32":
            about = folder.stat()
            if about.st_mode & 0o022 or about.st_uid != os.getuid():
                return False
        _make_room(folder)
        return os.access(folder, os.W_OK) and shutil.disk_usage(folder).free > MAX_BYTES
    except OSError:
        return False


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
