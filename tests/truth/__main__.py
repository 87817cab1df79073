"""Run every cell of the table and write it to the docs: `make truth` (half an hour on two cores).

The figures go to `docs/tables/what_works.json`, the table to `docs/what_works.md`. Arguments choose ways or problems
by parts of their names: their cells run, and all others keep their figures.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time

FLAGS = "--xla_cpu_parallel_codegen_split_count=1"  # a process has one core
os.environ.setdefault("XLA_FLAGS", FLAGS)

from truth.cells import OUTCOMES, Cell, cells, key_of, prepare, timed  # noqa: E402
from truth.page import write_page  # noqa: E402


def save(every: list[Cell], found: dict[str, dict]) -> dict[str, dict]:
    """Write the outcomes in the order of the table."""
    ordered = {key_of(cell): found[key_of(cell)] for cell in every if key_of(cell) in found}
    rows = ",\n".join(f" {json.dumps(key)}: {json.dumps(row)}" for key, row in ordered.items())
    OUTCOMES.write_text(f'{{"cells": {{\n{rows}\n}}}}\n')
    return ordered


def main() -> int:
    """Run the chosen cells; the exit status is the number of those that are neither right nor refused."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], prog="python -m truth")
    parser.add_argument("only", nargs="*", help="parts of names of ways or problems; by default all cells")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    every = list(cells())
    chosen = [c for c in every if not options.only or any(o in c.way or o in c.problem for o in options.only)]
    known = json.loads(OUTCOMES.read_text())["cells"] if OUTCOMES.exists() else {}
    found = {key_of(cell): known[key_of(cell)] for cell in every if key_of(cell) in known}
    started, wrong = time.perf_counter(), 0
    with multiprocessing.get_context("spawn").Pool(options.workers, prepare, maxtasksperchild=60) as pool:
        for done, (cell, row) in enumerate(pool.imap(timed, chosen, chunksize=1), 1):
            found[key_of(cell)] = row
            wrong += row["outcome"] in ("wrong", "crash")
            shown = f"{cell.way} | {cell.problem}: {row['outcome']}, {row['text'][:100]}"
            print(f"{done:5d} of {len(chosen)}  {row['seconds']:5.1f} s  {shown}", flush=True)
            if done % 20 == 0:  # an interrupted run keeps what it has
                save(every, found)
    minutes = (time.perf_counter() - started) / 60
    write_page(save(every, found))
    print(f"{len(chosen)} cells in {minutes:.1f} minutes, {wrong} wrong")
    return min(wrong, 100)


if __name__ == "__main__":
    sys.exit(main())
