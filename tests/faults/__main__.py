"""Plant faults in the package, one at a time, and see whether a fast test notices:
`make faults`.

    make faults ROOM=infer SEED=0 COUNT=50     drawn by a seed from all places of a room
    make faults HAND=1                         those that people chose (chosen.py)

A fault that lives is a test that is missing, or it is harmless: then chosen.py says
why. Which tests run which lines of a room is measured once, and again with MAP=1. The
survivors are listed at the end, one a line, for a note.
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
from planting import Outcome, Trial, outcomes

BUDGET_SECONDS = 150.0  # what the test files that are tried for one fault take at most


def trial_of(fault: Fault, coverage: CoverageMap) -> Trial:
    """The tests that run the changed line first, then others of their files."""
    tests = coverage.lines.get(str(fault.file.relative_to(ROOT)), {}).get(
        str(fault.line), []
    )
    files: dict[str, float] = {}
    for name, _ in Counter(test.split("::")[0] for test in tests).most_common():
        seconds = coverage.file_seconds.get(name, 0.0)
        if not files or sum(files.values()) + seconds < BUDGET_SECONDS:
            files[name] = seconds
    first = tuple(test for test in tests if test.split("::")[0] in files)
    return Trial(
        fault.file,
        fault.source,
        tuple(ROOT / name for name in files),
        first,
        sum(files.values()),
        fault,
    )


def described(outcome: Outcome) -> dict[str, str | float]:
    """An outcome as files and notes have it: where, what, which test noticed."""
    fault = outcome.trial.label
    place = (
        f"{fault.file.relative_to(ROOT)}:{fault.function.split('.')[-1]}:{fault.line}"
    )
    text = fault.file.read_text().splitlines()[fault.line - 1].strip()
    names = {
        name: getattr(fault, name)
        for name in ("function", "kind", "number", "line", "before", "after")
    }
    told = {
        "status": outcome.status,
        "seconds": outcome.seconds,
        "noticed": outcome.line,
    }
    return {"place": place, "text": text, **names, **told}


def main() -> int:
    """Run the faults chosen; the exit status is the number that lived unexplained."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        prog="python tests/faults",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--room",
        nargs="*",
        default=[],
        help="folders or files of the package, such as infer",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument(
        "--hand", action="store_true", help="the faults that people chose"
    )
    parser.add_argument(
        "--map", action="store_true", help="measure again which tests run which lines"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--output", type=Path, help="write the outcomes to this JSON file"
    )
    options = parser.parse_args()
    faults = [
        fault
        for fault in all_faults(options.room)
        if (fault.key in IMPORTANT or not options.hand)
    ]
    if not options.hand:
        faults = drawn(
            [fault for fault in faults if fault.key not in HARMLESS],
            options.count,
            options.seed,
        )
    maps = {
        room: stored(room, options.workers, options.map)
        for room in sorted({fault.room for fault in faults})
    }
    trials = [trial_of(fault, maps[fault.room]) for fault in faults]
    started = time.perf_counter()
    untested = [
        Outcome(trial, "no test runs it", 0.0, "")
        for trial in trials
        if not trial.files
    ]
    rows = [described(outcome) for outcome in untested]
    for outcome in outcomes(
        [trial for trial in trials if trial.files], options.workers
    ):
        rows.append(row := described(outcome))
        done = (
            f"{len(rows):4d}/{len(trials)} {outcome.status:11s} {outcome.seconds:6.1f} "
            f"s"
        )
        print(f"{done}  {row['place']}, {row['kind']}: {row['text'][:80]}", flush=True)
    lived = [row for row in rows if row["status"] != "caught"]
    minutes = (time.perf_counter() - started) / 60
    print(
        f"{len(rows) - len(lived)} of {len(rows)} caught in {minutes:.1f} minutes; "
        f"survivors:"
    )
    for row in lived:
        change = " -> ".join(
            " ".join(row[name].split())[:80] for name in ("before", "after")
        )
        print(
            f"- `{row['place']}`, {row['kind']} {row['number']}, {row['status']}: "
            f"`{row['text']}` ({change})"
        )
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(rows, indent=1) + "\n")
    return min(len(lived), 100)


if __name__ == "__main__":
    sys.exit(main())
