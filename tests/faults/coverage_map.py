"""Which tests run which lines: measured once for a room with the fast tests about it, and kept until asked again.

`.ci/changed_tests.py` says which tests are about a room; wrong arguments are about all of them.
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
from typing import Any, NamedTuple

from mutations import PACKAGE, ROOT

STORED = ROOT / ".pytest_cache" / "faults"
ABOUT_ALL = ("use/test_options.py", "use/test_bad_arguments.py")
TESTS_PER_FILE = 12  # of the tests of one file that run a line, so many of the quickest are kept


class CoverageMap(NamedTuple):
    """Tests by line, and what their files take.

    :param lines: file of the package -> line -> tests that run it, the quickest first.
    :param file_seconds: test file -> seconds of its fast tests.
    """

    lines: dict[str, dict[str, list[str]]]
    file_seconds: dict[str, float]

    def tests_of(self, file: Path, line: int) -> list[str]:
        """Tests that run a line of the package."""
        return self.lines.get(str(file.relative_to(ROOT)), {}).get(str(line), [])


def seconds_of_tests(junit: Path) -> dict[str, float]:
    """Seconds by test, named as pytest names it, from a report in JUnit's form."""
    seconds: Counter[str] = Counter()
    for case in ElementTree.parse(junit).iter("testcase"):
        parts = case.get("classname", "").split(".")
        seconds["/".join(parts) + ".py::" + case.get("name", "")] += float(case.get("time", 0))
    return dict(seconds)


def files_about(room: str) -> list[str]:
    """Test files of a room, those of its parts included."""
    spec = importlib.util.spec_from_file_location("changed_tests", ROOT / ".ci" / "changed_tests.py")
    changed_tests = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(changed_tests)
    names = [name for name in changed_tests.TESTS if name.split("/")[0] == room]
    patterns = [pattern for name in names for pattern in changed_tests.TESTS[name]]
    files = {file for pattern in (*patterns, *ABOUT_ALL) for file in (ROOT / "tests").glob(pattern)}
    return sorted(str(file.relative_to(ROOT)) for file in files)


def measure(room: str, workers: int) -> CoverageMap:
    """Run the fast tests of a room under coverage, once."""
    from coverage import CoverageData

    with tempfile.TemporaryDirectory() as folder:
        data_file, junit = Path(folder) / "coverage", Path(folder) / "junit.xml"
        settings = Path(folder) / "settings"
        settings.write_text(f"[run]\ndata_file = {data_file}\nsource = {PACKAGE}\n")
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-n", str(workers), "--dist", "loadfile"]
        command += [f"--cov={PACKAGE}", f"--cov-config={settings}", "--cov-context=test", "--cov-report="]
        command += [f"--junitxml={junit}", *files_about(room)]
        subprocess.run(command, cwd=ROOT, env=dict(os.environ, COVERAGE_FILE=str(data_file)), check=False)
        seconds = seconds_of_tests(junit)
        data = CoverageData(str(data_file))
        data.read()
        lines: dict[str, dict[str, list[str]]] = {}
        for name in data.measured_files():
            by_line = {}
            for line, contexts in data.contexts_by_lineno(name).items():
                by_line[str(line)] = _quickest({context.split("|")[0] for context in contexts if context}, seconds)
            lines[str(Path(name).relative_to(ROOT))] = by_line
    file_seconds: Counter[str] = Counter()
    for test, duration in seconds.items():
        file_seconds[test.split("::")[0]] += duration
    return CoverageMap(lines, dict(file_seconds))


def _quickest(tests: set[str], seconds: dict[str, float]) -> list[str]:
    """The quickest of the tests of each file."""
    chosen, counts = [], Counter[str]()
    for test in sorted(tests, key=lambda name: (seconds.get(name, 0.0), name)):
        file = test.split("::")[0]
        counts[file] += 1
        if counts[file] <= TESTS_PER_FILE:
            chosen.append(test)
    return chosen


def stored(room: str, workers: int, again: bool) -> CoverageMap:
    """The map of a room as last measured; measured now if there is none, or if ``again``."""
    path = STORED / f"{room}.json"
    if again or not path.exists():
        STORED.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(measure(room, workers)._asdict()))
    values: dict[str, Any] = json.loads(path.read_text())
    return CoverageMap(**values)
