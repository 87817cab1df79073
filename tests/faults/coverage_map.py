"""Which tests run which lines: measured once for a room with the fast tests about it,
and kept until asked again.

`.ci/changed_tests.py` says which tests are about a room; wrong arguments are about all
of them.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from mutations import PACKAGE, ROOT

STORED = ROOT / ".pytest_cache" / "faults"
ABOUT_ALL = ("use/test_options.py", "use/test_bad_arguments.py")
TESTS_PER_FILE = (
    12  # of the tests of one file that run a line, so many of the quickest are kept
)


class CoverageMap(NamedTuple):
    """File of the package -> line -> tests that run it, the quickest first; and seconds
    of the fast tests by file.
    """

    lines: dict[str, dict[str, list[str]]]
    file_seconds: dict[str, float]


def seconds_of_tests(junit: Path) -> Counter[str]:
    """Seconds by test, named as pytest names it, from a report in JUnit's form."""
    seconds = Counter[str]()
    for case in ElementTree.parse(junit).iter("testcase"):
        file = case.get("classname", "").replace(".", "/")
        seconds[f"{file}.py::{case.get('name', '')}"] += float(case.get("time", 0))
    return seconds


def files_about(room: str) -> list[str]:
    """Test files of a room, those of its parts included."""
    spec = importlib.util.spec_from_file_location(
        "changed_tests", ROOT / ".ci" / "changed_tests.py"
    )
    changed_tests = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(changed_tests)
    patterns = [
        p
        for name, about in changed_tests.TESTS.items()
        if name.split("/")[0] == room
        for p in about
    ]
    files = {
        file
        for pattern in (*patterns, *ABOUT_ALL)
        for file in (ROOT / "tests").glob(pattern)
    }
    return sorted(str(file.relative_to(ROOT)) for file in files)


def quickest(tests: set[str], seconds: Counter[str]) -> list[str]:
    """The quickest of the tests of each file."""
    counts, chosen = Counter[str](), []
    for test in sorted(tests, key=lambda name: (seconds[name], name)):
        counts[test.split("::")[0]] += 1
        if counts[test.split("::")[0]] <= TESTS_PER_FILE:
            chosen.append(test)
    return chosen


def measure(room: str, workers: int) -> CoverageMap:
    """Run the fast tests of a room under coverage, once."""
    from coverage import CoverageData

    with tempfile.TemporaryDirectory() as folder:
        data_file, junit, settings = (
            Path(folder) / name for name in ("coverage", "junit.xml", "settings")
        )
        settings.write_text(f"[run]\ndata_file = {data_file}\nsource = {PACKAGE}\n")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            "not slow",
            "-n",
            str(workers),
            "--dist",
            "loadfile",
        ]
        command += [
            f"--cov={PACKAGE}",
            f"--cov-config={settings}",
            "--cov-context=test",
            "--cov-report=",
        ]
        command += [f"--junitxml={junit}", *files_about(room)]
        subprocess.run(
            command,
            cwd=ROOT,
            env=dict(os.environ, COVERAGE_FILE=str(data_file)),
            check=False,
        )
        seconds, data, lines = seconds_of_tests(junit), CoverageData(str(data_file)), {}
        data.read()
        for name in data.measured_files():
            lines[str(Path(name).relative_to(ROOT))] = {
                str(line): quickest(
                    {context.split("|")[0] for context in contexts if context}, seconds
                )
                for line, contexts in data.contexts_by_lineno(name).items()
            }
    file_seconds = Counter[str]()
    for test, duration in seconds.items():
        file_seconds[test.split("::")[0]] += duration
    return CoverageMap(lines, dict(file_seconds))


def stored(room: str, workers: int, again: bool) -> CoverageMap:
    """The map of a room as last measured; measured now if none, or if ``again``."""
    path = STORED / f"{room}.json"
    if again or not path.exists():
        STORED.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(measure(room, workers)._asdict()))
    return CoverageMap(**json.loads(path.read_text()))
