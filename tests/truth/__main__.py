"""Run every cell of the table and write it to the docs: `make truth` (half an hour on
two cores).

The figures go to `docs/tables/what_works.json`, the table to `docs/what_works.md`.
Arguments choose ways or problems by parts of their names: their cells run, and all
others keep their figures.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time

# a process has one core
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_parallel_codegen_split_count=1")

from truth.cells import OUTCOMES, cells, prepare, timed
from truth.page import write_page


def main() -> int:
    """Run the chosen cells; the exit status counts those not right or refused."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], prog="python -m truth"
    )
    parser.add_argument(
        "only",
        nargs="*",
        help="parts of names of ways or problems; by default all cells",
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    every = list(cells())
    chosen = [
        cell
        for cell in every
        if not options.only or any(part in cell.key for part in options.only)
    ]
    found = json.loads(OUTCOMES.read_text())["cells"] if OUTCOMES.exists() else {}
    started, wrong = time.perf_counter(), 0

    def save() -> dict[str, dict]:
        """Write the outcomes in the order of the table."""
        ordered = {cell.key: found[cell.key] for cell in every if cell.key in found}
        rows = ",\n".join(
            f" {json.dumps(key)}: {json.dumps(row)}" for key, row in ordered.items()
        )
        OUTCOMES.write_text(f'{{"cells": {{\n{rows}\n}}}}\n')
        return ordered

    with multiprocessing.get_context("spawn").Pool(
        options.workers, prepare, maxtasksperchild=60
    ) as pool:
        for done, (cell, row) in enumerate(pool.imap(timed, chosen, chunksize=1), 1):
            found[cell.key] = row
            wrong += row["outcome"] in ("wrong", "crash")
            shown = (
                f"{row['seconds']:5.1f} s  {cell.key}: {row['outcome']}, "
                f"{row['text'][:100]}"
            )
            print(f"{done:5d} of {len(chosen)}  {shown}", flush=True)
            if done % 20 == 0:  # an interrupted run keeps what it has
                save()
    write_page(save())
    print(
        f"{len(chosen)} cells in {(time.perf_counter() - started) / 60:.1f} minutes, "
        f"{wrong} wrong"
    )
    return min(wrong, 100)


if __name__ == "__main__":
    sys.exit(main())
