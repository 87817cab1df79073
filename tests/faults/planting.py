"""Run tests with a changed file of the package, without touching the file.

A server imports what all tests need, then forks one process per fault: imports are paid
once. The changed source is given to Python's import system, in the process and in every
process that its tests start (`site/sitecustomize.py`).
"""

import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, NamedTuple

TESTS = Path(__file__).resolve().parent.parent
# "original file=changed file", also for processes that tests start
VARIABLE = "NUMPYRO_BNN_FAULT"
PRELOADED = (
    *(
        "arviz",
        "equinox",
        "flax.linen",
        "flax.nnx",
        "flowjax",
        "hypothesis",
        "jax",
        "matplotlib.pyplot",
        "numpyro",
    ),
    *(
        "numpyro.contrib.module",
        "numpyro.infer.autoguide",
        "optax",
        "pandas",
        "pytest",
        "scipy.stats",
        "sklearn",
    ),
    "zarr",
)
MARGIN_SECONDS = 120  # of a processor, beyond what the tests of a fault take without it
OUTCOMES = {0: "survived", 1: "caught"}


class Trial(NamedTuple):
    """A changed file, and the tests that are to notice.

    :param file: the original, absolute; ``source`` stands there instead.
    :param files: test files, absolute; their fast tests run, `first` before the others,
        until one fails.
    :param first: names of tests as pytest shows them.
    :param seconds: of a processor that these tests take without the fault.
    :param label: whatever the caller wants back.
    """

    file: Path
    source: str
    files: tuple[Path, ...]
    first: tuple[str, ...] = ()
    seconds: float = 60.0
    label: Any = None


class Outcome(NamedTuple):
    """What became of a trial, the seconds it took, and the last line."""

    trial: Trial
    status: str
    seconds: float
    line: str


def install(original: str, changed: str) -> None:
    """From now on, importing the original file runs the changed one."""
    sound = SourceFileLoader.get_code

    def get_code(loader: SourceFileLoader, fullname: str) -> Any:
        if loader.path == original:
            return compile(Path(changed).read_text(), original, "exec")
        return sound(loader, fullname)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


class FirstThenOthers(NamedTuple):
    """Plugin of pytest: fast tests only, the likeliest to notice first."""

    first: tuple[str, ...]

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        fast = [item for item in items if item.get_closest_marker("slow") is None]
        items[:] = sorted(fast, key=lambda item: item.nodeid not in self.first)


def run_child(trial: Trial, log: Path, changed: Path) -> None:
    """What the forked process does; it never returns."""
    code = 3
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        limit = int(trial.seconds * 3 + MARGIN_SECONDS)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
        changed.write_text(trial.source)
        folders = (Path(__file__).parent / "site", TESTS.parent, TESTS)
        os.environ |= {
            VARIABLE: f"{trial.file}={changed}",
            "PYTHONPATH": os.pathsep.join(map(str, folders)),
        }
        os.environ |= {
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        }
        install(str(trial.file), str(changed))
        import pytest

        options = [
            "-x",
            "-q",
            "--no-header",
            "--tb=line",
            "-p",
            "no:cacheprovider",
            f"--rootdir={TESTS.parent}",
        ]
        code = int(
            pytest.main(
                [*options, *map(str, trial.files)],
                plugins=[FirstThenOthers(trial.first)],
            )
        )
    except BaseException as error:  # the parent reads it in the log
        print(repr(error), flush=True)
    finally:
        sys.stdout.flush()
        os._exit(code)


def last_line(log: Path) -> str:
    """What pytest says of the failed test, or its last line."""
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    notable = [line for line in lines if line.startswith(("FAILED ", "ERROR ", "E  "))]
    return (notable or lines[-1:] or ["no output"])[0][:300]


def outcomes(trials: Iterable[Trial], workers: int) -> Iterator[Outcome]:
    """Run the trials, so many at a time, and give each outcome as it comes."""
    sys.path[:0] = [str(TESTS.parent), str(TESTS)]
    os.chdir(TESTS.parent)
    os.environ.setdefault("MPLBACKEND", "Agg")
    for name in PRELOADED:
        __import__(name)
    folder = Path(tempfile.mkdtemp(prefix="faults_"))
    waiting = list(enumerate(trials))[::-1]
    running = {}
    while waiting or running:
        while waiting and len(running) < workers:
            number, trial = waiting.pop()
            log, changed = folder / f"{number}.log", folder / f"{number}.py"
            child = os.fork()
            if child == 0:
                run_child(trial, log, changed)
            running[child] = (trial, log, time.monotonic())
        child, status, _ = os.wait4(-1, 0)
        trial, log, start = running.pop(child)
        code = os.waitstatus_to_exitcode(status)
        # A process that used up its seconds, or crashed, has noticed; so has a test
        # file that cannot be imported.
        word = OUTCOMES.get(code, "caught" if code < 0 or code == 2 else "no test ran")
        yield Outcome(trial, word, time.monotonic() - start, last_line(log))
