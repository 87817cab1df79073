"""Plant each fault of the lists in a copy of the package and run the tests that should notice it: `make faults`.

A fault is caught if one of its tests fails; a fault that none catches makes the command fail. Faults are chosen by
parts of their files' paths, and `--whole-files` runs all fast tests of a test file instead of the named ones.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

from planted import ROOT, Fault, read_faults

COPIED = ("numpyro_bnn", "tests", "examples", "docs", "pyproject.toml", "README.md", "CHANGELOG.md", "Makefile")
SECONDS = 600  # the most that the tests of one fault may take


def copy_of_the_project() -> Path:
    """A folder with the package and its tests, and the compiled programs of this checkout."""
    folder = Path(tempfile.mkdtemp(prefix="faults_"))
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    programs = ROOT / ".pytest_cache" / "jax"
    programs.mkdir(parents=True, exist_ok=True)
    (folder / ".pytest_cache").mkdir()
    (folder / ".pytest_cache" / "jax").symlink_to(programs)
    return folder


def outcome(folder: Path, fault: Fault, whole_files: bool) -> dict[str, Any]:
    """Plant the fault in this copy, run its tests, and put the line back."""
    path = folder / fault.file
    sound = path.read_text()
    tests = sorted({test.split("::")[0] for test in fault.tests}) if whole_files else list(fault.tests)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=line", "-p", "no:cacheprovider"]
    command += ["-m", "not slow"] if whole_files else []
    started = time.perf_counter()
    try:
        path.write_text(fault.planted_in(sound))
        run = subprocess.run(
            [*command, *tests],
            cwd=folder,
            env=dict(os.environ, PYTHONDONTWRITEBYTECODE="1"),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        status = {0: "not caught", 1: "caught"}.get(run.returncode, "tests did not run")
        lines = run.stdout.strip().splitlines() or [run.stderr[-200:]]
        last = next((line for line in lines if line.startswith(("FAILED ", "ERROR "))), lines[-1])
    except subprocess.TimeoutExpired:
        status, last = "caught", f"the tests did not end within {SECONDS} s"
    finally:
        path.write_text(sound)
    seconds = round(time.perf_counter() - started, 1)
    changed = {"file": fault.file, "sound": fault.sound, "fault": fault.fault}
    return {**changed, "status": status, "seconds": seconds, "noticed by": last}


def outcomes(faults: list[Fault], workers: int, whole_files: bool) -> Iterator[dict[str, Any]]:
    """The outcome of every fault; each worker has a copy of its own."""
    copies: Queue[Path] = Queue()
    for _ in range(workers):
        copies.put(copy_of_the_project())

    def one(fault: Fault) -> dict[str, Any]:
        folder = copies.get()
        try:
            return outcome(folder, fault, whole_files)
        finally:
            copies.put(folder)

    try:
        with ThreadPoolExecutor(workers) as pool:
            yield from pool.map(one, faults)
    finally:
        while not copies.empty():
            shutil.rmtree(copies.get())


def main() -> int:
    """Run the faults chosen on the command line; the exit status is the number of faults that were not caught."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], prog="python tests/faults")
    parser.add_argument("only", nargs="*", help="parts of paths, such as infer/tempering; by default every fault")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--whole-files", action="store_true", help="run all fast tests of the files")
    parser.add_argument("--output", type=Path, help="write the outcomes to this JSON file")
    options = parser.parse_args()
    faults = [f for f in read_faults() if not options.only or any(part in f.file for part in options.only)]
    print(f"{len(faults)} faults, {options.workers} at a time", flush=True)
    started, results = time.perf_counter(), []
    for result in outcomes(faults, options.workers, options.whole_files):
        results.append(result)
        shown = f"{result['status']:17s} {result['seconds']:6.1f} s  {result['file']}: {result['fault']}"
        print(f"{len(results):4d}  {shown}", flush=True)
        if result["status"] != "caught":
            print(f"      instead of: {result['sound']}\n      {result['noticed by']}", flush=True)
    missed = sum(result["status"] != "caught" for result in results)
    minutes = (time.perf_counter() - started) / 60
    print(f"{len(results) - missed} of {len(results)} faults caught in {minutes:.1f} minutes")
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps({"minutes": round(minutes, 1), "faults": results}, indent=1) + "\n")
    return min(missed, 100)


if __name__ == "__main__":
    sys.exit(main())
