"""The kernel of 10,000 x 10,000 points of a deep ReLU network: seconds and peak memory.

Runs in a separate process; peak memory is that of the whole process, Python and JAX
included. Writes JSON; with ``--docs`` also the table of a page.

    python -m examples.benchmarks.infinite_kernel --output docs/infinite_kernel.json
    --docs docs/tables/infinite.md
"""

import argparse
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np

from examples.benchmarks.shared import environment, options_of, put_table, write_report
from examples.shared import at_least, markdown, writable_file


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Both kernels, compilation included, then again."""
    from numpyro_bnn import infinite, nn, priors

    net = nn.MLP([1] * args.depth + [1], "relu")
    prior = priors.Normal(2**0.5, bias_scale=0.1)
    x = (
        np.random.default_rng(args.seed)
        .normal(size=(args.points, args.inputs))
        .astype(np.float32)
    )
    rows = []
    for kernel in args.kernels:
        seconds, cpu = [], []
        for _ in range(2):
            start, busy = time.perf_counter(), time.process_time()
            found = getattr(infinite, kernel)(
                net, x, prior=prior, block_size=args.block_size
            )
            seconds.append(time.perf_counter() - start)
            cpu.append(time.process_time() - busy)
            total = float(np.mean(found[:: max(1, len(x) // 100)]))
            del found
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        rows.append(
            {
                "kernel": kernel,
                "seconds": seconds[0],
                "again": seconds[1],
                "cpu": cpu[1],
                "peak_gib": peak,
                "mean": total,
            }
        )
        print(table(rows[-1:]).split("\n")[-1], flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The results as a Markdown table."""
    heads = ["kernel", "seconds, with compilation", "seconds, again", "CPU seconds"]
    lines = []
    for row in rows:
        cells = [f"{row[name]:.1f}" for name in ("seconds", "again", "cpu")]
        lines.append([row["kernel"], *cells, f"{row['peak_gib']:.2f}"])
    return markdown([*heads, "peak memory of the process, GiB"], lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.benchmarks.infinite_kernel",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--points", type=int, default=10_000, help="number of inputs")
    parser.add_argument("--inputs", type=int, default=10, help="features of an input")
    parser.add_argument("--depth", type=int, default=3, help="hidden layers")
    parser.add_argument(
        "--kernels", nargs="+", default=["nngp", "ntk"], choices=["nngp", "ntk"]
    )
    parser.add_argument(
        "--block-size", type=int, default=500, help="rows computed at once"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the inputs")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("output/infinite_kernel.json"),
        help="JSON file",
    )
    parser.add_argument("--docs", type=Path, help="page whose table is to be replaced")
    args = parser.parse_args(argv)
    at_least(parser, args, ("points", "inputs", "depth", "block_size"))
    return args


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    writable_file(args.output)
    report: dict[str, Any] = {
        "rows": compare(args),
        "options": options_of(args),
        **environment([]),
    }
    write_report(args.output, report)
    put_table(args.docs, "infinite_kernel", table(report["rows"]), report)
    return report


if __name__ == "__main__":
    main()
