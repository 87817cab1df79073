"""Where rows come from: the cost of a step, and the memory of processes that each have
a part of the rows.

*Steps*: processor time of a step of minibatch SGHMC of four chains, in turns, with the
rows in arrays, in a memory map (`runs.Rows`), and from loaders (`runs.batches`): a
generator of NumPy batches, and those of grain and torch where they are installed.
*Memory*: peak resident memory of a process that has all rows in memory, and of each of
two processes with a half, beside that of a process with a thousand rows, which is the
interpreter, the libraries and the program. Every case is a process of its own. Writes
JSON, and goes on where it was interrupted.

    python -m examples.benchmarks.sources --output output/sources.json --docs
    docs/scale.md
"""

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from numpyro.infer import MCMC

import numpyro_bnn as bnn
from examples.benchmarks.shared import (
    continued_report,
    interleave,
    put_table,
    write_report,
)
from examples.shared import at_least, markdown

FEATURES, UNITS, BATCH, LOADED = 20, 50, 100, 512
STEP_ROWS = 100_000
SOURCES = ("arrays", "Rows", "batches", "grain", "torch")
PARTS = ("all rows", "two halves")


def columns(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """The data of some rows, made in parts, so that no more memory is needed."""
    x = np.empty((stop - start, FEATURES), np.float32)
    for first in range(0, len(x), 10_000):
        rng = np.random.default_rng(start + first)
        x[first : first + 10_000] = rng.normal(size=x[first : first + 10_000].shape)
    return x, np.sin(x[:, 0])


def kernel_of(steps: int) -> bnn.infer.SGHMC:
    model = bnn.models.regression(bnn.nn.MLP([UNITS, 1], "tanh"))
    return bnn.infer.SGHMC(model, 1e-4, steps_per_draw=steps, warm_start=0.0)


# -- steps -----------------------------------------------------------------------------


def loader_of(name: str, x: np.ndarray, y: np.ndarray) -> Any:
    """Shuffled batches of 512 rows."""
    if name == "grain":
        import grain

        rows = grain.MapDataset.source(range(len(x))).seed(0).shuffle().repeat()
        pairs = rows.map(lambda row: (x[row], y[row]))
        return pairs.batch(LOADED).to_iter_dataset()
    if name == "torch":
        import torch

        data = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
        return torch.utils.data.DataLoader(data, batch_size=LOADED, shuffle=True)
    rng = np.random.default_rng(0)

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        order = rng.permutation(len(x))
        for start in range(0, len(x), LOADED):
            rows = order[start : start + LOADED]
            yield x[rows], y[rows]

    return batches


def source_of(name: str, folder: str) -> Any:
    x, y = columns(0, STEP_ROWS)
    if name == "arrays":
        return jnp.asarray(x), jnp.asarray(y)
    if name == "Rows":
        for column, values in (("x", x), ("y", y)):
            np.save(f"{folder}/{column}.npy", values)
        maps = (np.load(f"{folder}/{column}.npy", mmap_mode="r") for column in "xy")
        return tuple(map(bnn.runs.Rows, maps))
    return bnn.runs.batches(loader_of(name, x, y), STEP_ROWS)


def stepper(data: Any, steps: int) -> Callable:
    """A draw of four chains, which go on with each call, in one program."""
    init, step = bnn.infer.as_blackjax(kernel_of(steps), *data, batch_size=BATCH)
    states = [init(None, jax.random.split(jax.random.key(0), 4))]
    advance = jax.jit(lambda state: step(state.rng_key, state)[0])

    def call() -> Any:
        states[0] = advance(states[0])
        return states[0].z

    call()
    return call


def measure_steps(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        calls = {}
        for name in args.sources:
            if name in ("grain", "torch") and find_spec(name) is None:
                print(f"{name} is not installed")
                continue
            calls[name] = stepper(source_of(name, folder), args.steps), args.steps
        times = interleave(calls, args.rounds)
    for name, pairs in times.items():
        wall, processor = map(median_of, zip(*pairs, strict=True))
        rows.append({"source": name, "wall": wall, "processor": processor})
    return rows


# -- memory ----------------------------------------------------------------------------


def resident() -> float:
    """Megabytes of memory that this process had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def use_rows(number: int, processes: int, index: int) -> dict[str, float]:
    """Some draws of a run whose process has its part of the rows."""
    mesh = jax.make_mesh((1, processes), ("chain", "data"))
    split = NamedSharding(mesh, PartitionSpec("data"))
    count = number // processes
    own = columns(count * index, count * (index + 1))
    data = [jax.make_array_from_process_local_data(split, part) for part in own]
    del own
    key, options = jax.random.key(0), {"progress_bar": False, "batch_size": BATCH}
    with tempfile.TemporaryDirectory() as folder:
        settings = {"num_chains": 2, "chain_method": "vectorized"}
        mcmc = MCMC(kernel_of(20), num_warmup=0, num_samples=1, **settings)
        path = f"{folder}/run"
        run = bnn.runs.start(path, mcmc, key, *data, mesh=mesh, **options)
    assert run.complete
    return {"peak": resident()}


def memory_of(number: int, processes: int) -> float:
    """The largest peak of processes that share the rows."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
        # where threads keep freed memory, peaks differ from run to run
        "MALLOC_ARENA_MAX": "2",
    }
    command = [sys.executable, "-m", "examples.benchmarks.sources", "--join"]
    begun = []
    for index in range(processes):
        numbers = map(str, (port, processes, index, number))
        begun.append(
            subprocess.Popen(
                [*command, *numbers], env=environment, stdout=subprocess.PIPE, text=True
            )
        )
    outputs = [process.communicate()[0] for process in begun]
    if any(process.returncode for process in begun):
        raise RuntimeError(f"sources: {number} rows failed; the process says why.")
    return max(json.loads(text.splitlines()[-1])["peak"] for text in outputs)


def measure_memory(number: int) -> dict[str, Any]:
    """Of all rows in one process, and of a half in each of two."""
    peaks = {part: memory_of(number, k) for k, part in enumerate(PARTS, 1)}
    megabytes = 4 * (FEATURES + 1) * number / 2**20
    return {"rows": number, "data": megabytes, "peaks": peaks}


def tables(report: dict[str, Any]) -> dict[str, str]:
    """Memory by the number of rows, and the cost of steps by their source."""
    memory = [row for row in report["rows"] if "peaks" in row]
    numbers = sorted({row["rows"] for row in memory})
    heads = ["rows", "MB of data", "runs", "peak MB of one process"]
    heads += ["of each of two", "ratio", "ratio of what is above few rows"]
    lines = []
    few: list[float] = []
    for number in numbers:
        same = [row for row in memory if row["rows"] == number]
        peaks = [median_of(row["peaks"][part] for row in same) for part in PARTS]
        few = few or peaks
        cells = [f"{number:,}", f"{same[0]['data']:.0f}", f"{len(same)}"]
        cells += [f"{peaks[0]:.0f}", f"{peaks[1]:.0f}", f"{peaks[1] / peaks[0]:.2f}"]
        above = [peak - base for peak, base in zip(peaks, few, strict=True)]
        lines.append([*cells, f"{above[1] / above[0]:.2f}" if above[0] else ""])
    costs = []
    for row in report["rows"]:
        if "source" in row:
            cells = [row["source"], f"{row['processor']:.0f}", f"{row['wall']:.0f}"]
            costs.append(cells)
    costs_head = ("rows from", "processor us per step of four chains", "wall clock")
    made = {"sources_memory": markdown(heads, lines)}
    if costs:
        made["sources_steps"] = markdown(costs_head, costs)
    return made


def median_of(values: Iterable[float]) -> float:
    return statistics.median(values)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.benchmarks.sources",
        description=__doc__.split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--sources", nargs="*", choices=SOURCES, default=list(SOURCES))
    parser.add_argument("--steps", type=int, default=2000, help="in one measurement")
    parser.add_argument("--rounds", type=int, default=7, help="of steps")
    sizes = [1000, 2_000_000, 8_000_000, 16_000_000]
    parser.add_argument("--rows", type=int, nargs="*", default=sizes, help="of memory")
    parser.add_argument("--runs", type=int, default=3, help="of each number of rows")
    parser.add_argument("--join", type=int, nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=Path("output/sources.json"))
    parser.add_argument("--docs", type=Path, help="page whose table shows the figures")
    args = parser.parse_args(argv)
    at_least(parser, args, ("steps", "rounds", "runs"), 1)
    return args


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    if args.join:
        port, processes, index, number = args.join
        if processes > 1:
            jax.distributed.initialize(f"127.0.0.1:{port}", processes, index)
        peak = use_rows(number, processes, index)
        print(json.dumps(peak))
        return peak
    report = continued_report(args, ("sources", "rows", "runs"))
    rows = report["rows"]
    for number in args.rows:
        while sum(row.get("rows") == number for row in rows) < args.runs:
            rows.append(measure_memory(number))
            print(rows[-1], flush=True)
            write_report(args.output, report)
    if {row.get("source") for row in rows}.isdisjoint(args.sources):
        rows += measure_steps(args)
        print(rows[-len(args.sources) :], flush=True)
        write_report(args.output, report)
    for name, text in tables(report).items():
        put_table(args.docs, name, text, report)
    return report


if __name__ == "__main__":
    main()
