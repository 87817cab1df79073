"""Plant faults in the package, one at a time, and see whether a fast test notices: `make faults`.

    make faults ROOM=infer SEED=0 COUNT=50     faults drawn by a seed from all places of a room (all rooms by default)
    make faults HAND=1                         those that people chose (tests/faults/chosen.py)

A fault that lives is a test that is missing, or it is harmless: then chosen.py says why. Which tests run which lines
of a room is measured once, and again with MAP=1.
"""

import argparse
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

from chosen import HARMLESS, IMPORTANT
from coverage_map import CoverageMap, stored
from mutations import ROOT, Fault, all_faults, drawn
from planting import Trial, outcomes, report

BUDGET_SECONDS = 150.0  # what the test files that are tried for one fault take at most


def trial_of(fault: Fault, coverage: CoverageMap) -> Trial:
    """The tests that run the changed line first, then the other fast tests of their files."""
    tests = coverage.tests_of(fault.file, fault.line)
    files: dict[str, float] = {}
    counts = Counter(test.split("::")[0] for test in tests)
    for name, _ in counts.most_common():
        seconds = coverage.file_seconds.get(name, 0.0)
        if not files or sum(files.values()) + seconds < BUDGET_SECONDS:
            files[name] = seconds
    paths = tuple(ROOT / name for name in files)
    first = tuple(test for test in tests if test.split("::")[0] in files)
    return Trial(fault.file, fault.source, paths, first, sum(files.values()), fault)


def described(fault: Fault) -> str:
    """A fault in a line."""
    place = f"{fault.function}:{fault.line} {fault.kind} {fault.number}"
    return f"{place}: {' '.join(fault.before.split())[:70]} -> {' '.join(fault.after.split())[:70]}"


def main() -> int:
    """Run the faults chosen on the command line; the exit status is the number that lived unexplained."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], prog="python tests/faults")
    parser.add_argument("--room", nargs="*", default=[], help="folders or files of the package, such as infer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--hand", action="store_true", help="the faults that people chose")
    parser.add_argument("--map", action="store_true", help="measure again which tests run which lines")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path, help="write the outcomes to this JSON file")
    options = parser.parse_args()
    faults = all_faults(options.room)
    if options.hand:
        faults = [fault for fault in faults if fault.key in IMPORTANT]
    else:
        faults = drawn([fault for fault in faults if fault.key not in HARMLESS], options.count, options.seed)
    maps = {room: stored(room, options.workers, options.map) for room in sorted({fault.room for fault in faults})}
    trials = [trial_of(fault, maps[fault.room]) for fault in faults]
    untested = [trial for trial in trials if not trial.files]
    for trial in untested:
        print(f"no test runs {described(trial.label)}")
    started, tested = time.perf_counter(), [trial for trial in trials if trial.files]
    results = report(outcomes(tested, options.workers), len(tested), lambda trial: described(trial.label))
    lived = [outcome for outcome in results if outcome.status != "caught"]
    print(f"{len(tested) - len(lived)} of {len(trials)} caught in {(time.perf_counter() - started) / 60:.1f} minutes")
    if options.output:
        rows = [(outcome.trial.label, outcome.status, outcome.seconds, outcome.line) for outcome in results]
        rows += [(trial.label, "no test runs it", 0.0, "") for trial in untested]
        names = ("function", "kind", "number", "line", "before", "after")
        listed = [
            {**{name: getattr(fault, name) for name in names}, "status": status, "seconds": seconds, "noticed": line}
            for fault, status, seconds, line in rows
        ]
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(listed, indent=1) + "\n")
    return min(len(lived) + len(untested), 100)


if __name__ == "__main__":
    sys.exit(main())
