"""Seconds before the first draw, and how much of them JAX's cache on disk and NumPyro's
`jit_model_args` save.

Each row is a separate process, which samples two data sets of the same shape, a few
draws each. The second run reuses what the first one compiled, if it is the same
program. An 8-50-1 network with an output for the noise. With a cache, one process has
run before, on other data. Writes JSON.

    python -m examples.benchmarks.compilation --output output/compilation.json
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpyro.infer import MCMC, NUTS

from examples.benchmarks.shared import environment, options_of, put_table, write_report
from examples.shared import at_least, markdown, writable_file

FEATURES = 8
KERNELS = ("NUTS", "MCLMC")
# Environment variables of JAX: keep every program, however small.
CACHE = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


def seconds_of_runs(
    kernel_name: str,
    data_as_arguments: bool,
    seeds: list[int],
    args: argparse.Namespace,
) -> list[float]:
    """Seconds of runs in this process, each with its own data."""
    import numpyro_bnn as bnn

    net = bnn.nn.MLP([args.width, 2], "relu")
    model = bnn.models.regression(net, bnn.priors.Hierarchical(), heteroscedastic=True)
    found = []
    for seed in seeds:
        draws = np.random.default_rng(seed)
        x = draws.normal(size=(args.rows, FEATURES)).astype(np.float32)
        y = np.sin(x[:, 0])
        kernel = bnn.infer.MCLMC(model, steps_per_draw=2)
        if kernel_name == "NUTS":
            kernel = NUTS(model, max_tree_depth=2)
        start = time.perf_counter()
        mcmc = MCMC(
            kernel,
            num_warmup=4,
            num_samples=4,
            num_chains=args.num_chains,
            chain_method="vectorized",
            jit_model_args=data_as_arguments,
            progress_bar=False,
        )
        mcmc.run(jax.random.key(seed), x, y)
        jax.block_until_ready(mcmc.get_samples())
        found.append(time.perf_counter() - start)
    return found


def measure(
    kernel_name: str, data_as_arguments: bool, cached: bool, args: argparse.Namespace
) -> dict[str, Any]:
    """The same in a separate process; with a cache, in a second one."""
    job = {
        "kernel_name": kernel_name,
        "data_as_arguments": data_as_arguments,
        "options": options_of(args),
    }
    words = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "examples.benchmarks.compilation",
        "--job",
    ]
    with tempfile.TemporaryDirectory() as folder:
        variables = os.environ | (
            {"JAX_COMPILATION_CACHE_DIR": folder, **CACHE} if cached else {}
        )
        for seeds in ([0, 1], [2, 3])[: 1 + cached]:
            call = [*words, json.dumps(job | {"seeds": seeds})]
            done = subprocess.run(
                call, env=variables, check=True, stdout=subprocess.PIPE, text=True
            )
    first, second = json.loads(done.stdout.splitlines()[-1])
    return {
        "kernel": kernel_name,
        "data_as_arguments": data_as_arguments,
        "cached": cached,
        "first": first,
        "second": second,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Seconds as a Markdown table."""
    heads = (
        "kernel",
        "cache",
        "`jit_model_args`",
        "seconds of a run",
        "other data of the same shape",
    )

    def yes(value: bool) -> str:
        return "yes" if value else "no"

    return markdown(
        heads,
        [
            (
                row["kernel"],
                yes(row["cached"]),
                yes(row["data_as_arguments"]),
                f"{row['first']:.1f}",
                f"{row['second']:.1f}",
            )
            for row in rows
        ],
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.benchmarks.compilation",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--kernels", nargs="+", choices=KERNELS, default=list(KERNELS), help="samplers"
    )
    parser.add_argument("--rows", type=int, default=500, help="data points")
    parser.add_argument("--width", type=int, default=50, help="hidden units")
    parser.add_argument("--num-chains", type=int, default=4, help="chains, vectorized")
    parser.add_argument(
        "--job", help=argparse.SUPPRESS
    )  # the work of a separate process
    parser.add_argument(
        "--output", type=Path, default=Path("output/compilation.json"), help="JSON file"
    )
    parser.add_argument("--docs", type=Path, help="page whose table is to be replaced")
    args = parser.parse_args(argv)
    at_least(parser, args, ("rows", "width", "num_chains"))
    return args


def main(argv: list[str] | None = None) -> dict[str, Any] | None:
    args = parse(argv)
    if args.job is not None:
        job = json.loads(args.job)
        job["args"] = argparse.Namespace(**job.pop("options"))
        print(json.dumps(seconds_of_runs(**job)))
        return None
    writable_file(args.output)
    rows: list[dict[str, Any]] = []
    report = {"rows": rows, **environment([]), "options": options_of(args)}
    for kernel_name, cached, data_as_arguments in product(
        args.kernels, (False, True), (False, True)
    ):
        rows.append(measure(kernel_name, data_as_arguments, cached, args))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
        write_report(args.output, report)
    put_table(args.docs, "compilation", table(rows), report)
    return report


if __name__ == "__main__":
    main()
