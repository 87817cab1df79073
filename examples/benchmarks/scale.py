"""Chains and rows over devices and processes: seconds beside one device, and what an
exchange costs.

Every case is a process of its own with virtual devices of the CPU. One such device
already uses all cores for large arrays, so chains are compared with a process on one
core as well. The exchange between processes is measured by two processes on this
machine. Writes JSON.

    python -m examples.benchmarks.scale --output output/scale.json --docs docs/scale.md
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from numpyro.infer import MCMC

import numpyro_bnn as bnn
from examples.benchmarks.shared import (
    environment,
    interleave,
    median_ratio,
    put_table,
    wall_clock,
    write_report,
)
from examples.shared import at_least, markdown, writable_file
from numpyro_bnn.runs.blocks import Chains, Recording
from numpyro_bnn.runs.spread import spread_of

CASES = ("chains", "one_core", "rows", "writing", "exchange")
FEATURES, UNITS = 20, 50
SIZES = (100, 10_000, 1_000_000)  # parameters


def data(number: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(number, FEATURES)).astype(np.float32)
    return x, np.sin(x[:, 0])


def stepper(
    shape: tuple[int, int] | None, chains: int, number: int, draws: int
) -> Callable:
    """Some transitions of all chains, which are waited for."""
    model = bnn.models.regression(bnn.nn.MLP([UNITS, 1], "tanh"))
    kernel = bnn.infer.MCLMC(
        model, 0.1, steps_per_draw=10, decoherence_length=5.0, warm_start=0.0
    )
    mcmc = MCMC(
        kernel,
        num_warmup=0,
        num_samples=1,
        num_chains=chains,
        chain_method="vectorized",
    )
    mesh = None if shape is None else jax.make_mesh(shape, ("chain", "data"))
    given = tuple(map(jnp.asarray, data(number)))
    run = Chains(
        mcmc,
        given,
        {},
        Recording(("sigma",), None, ()),
        spread_of("scale", mesh, mcmc, given),
        {number},
    )
    state = run.start(jax.random.key(0), None)

    def step() -> Any:
        return jax.block_until_ready(run.advance(state, draws, 0))

    step()
    return step


def shared_work(
    args: argparse.Namespace,
    chains: int,
    shape: tuple[int, int],
    number: int,
    draws: int,
) -> dict:
    """Seconds on two devices over those on one, in turns."""
    calls: dict[Any, tuple[Callable, int]] = {
        "one": (stepper(None, chains, number, draws), draws),
        "two": (stepper(shape, chains, number, draws), draws),
    }
    times = wall_clock(interleave(calls, args.rounds))
    medians = {name: statistics.median(values) / 1e6 for name, values in times.items()}
    return {"ratio": median_ratio(times, "two", "one"), "seconds_per_draw": medians}


def chains(args: argparse.Namespace) -> dict[int, Any]:
    """8 chains, which two devices share, by the number of rows."""
    return {
        number: shared_work(args, 8, (2, 1), number, repeats(args, number))
        for number in args.rows
    }


def one_core(args: argparse.Namespace) -> dict[int, float]:
    """Seconds per draw of the same on one core."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    found = {}
    for number in args.rows:
        draws = repeats(args, number)
        times = interleave(
            {"one": (stepper(None, 8, number, draws), draws)}, args.rounds
        )
        found[number] = statistics.median(wall_clock(times)["one"]) / 1e6
    return found


def repeats(args: argparse.Namespace, number: int) -> int:
    return max(1, args.draws * 1000 // number)


def rows(args: argparse.Namespace) -> dict[int, Any]:
    """2 chains, whose rows two devices share, by their number."""
    return {
        number: shared_work(args, 2, (1, 2), number, repeats(args, number))
        for number in args.rows
    }


def writing(args: argparse.Namespace) -> dict[str, float]:
    """Megabytes per second of draws that are written and made durable."""
    from numpyro_bnn.runs.draws import SITES, DrawLayout, StoredDraws
    from numpyro_bnn.runs.folder import FolderPath

    chains, draws, number = 8, 500, args.rounds
    block = (
        np.random.default_rng(0).normal(size=(chains, draws, 1000)).astype(np.float32)
    )
    like = {SITES: {"w": jax.ShapeDtypeStruct((1000,), np.float32)}}
    with tempfile.TemporaryDirectory() as path:
        written = StoredDraws(
            FolderPath.of("benchmarks.scale", "path", path), chains, like
        )
        layout = DrawLayout(chains, draws * number, draws)
        begun = time.perf_counter()
        for start in range(0, draws * number, draws):
            written.blocks = written.write(
                start, start + draws, {SITES: {"w": block}}, layout
            )
        seconds = time.perf_counter() - begun
    return {"megabytes_per_second": number * block.nbytes / 1e6 / seconds}


def exchange(args: argparse.Namespace) -> dict[str, Any]:
    """Microseconds to sum arrays over all devices, by their size; a hundred sums in one
    program.
    """
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("data",))
    found = {}
    for size in SIZES:
        parts = np.ones((mesh.size, size), np.float32)
        placed = jax.make_array_from_callback(
            parts.shape, NamedSharding(mesh, PartitionSpec("data")), parts.__getitem__
        )

        def summed(value: jax.Array) -> jax.Array:
            def add(_: int, value: jax.Array) -> jax.Array:
                return 0.5 * jax.lax.psum(value, "data")

            return jax.lax.fori_loop(0, 100, add, value)

        spec = PartitionSpec("data")
        program = jax.jit(
            jax.shard_map(
                summed, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
            )
        )
        times = []
        for _ in range(1 + args.rounds):
            begun = time.perf_counter()
            jax.block_until_ready(program(placed))
            times.append(1e6 * (time.perf_counter() - begun) / 100)
        found[size] = statistics.median(times[1:])
    return found


def measured(
    case: str, args: argparse.Namespace, devices: int, processes: int = 1
) -> dict[str, Any]:
    """A case in processes of its own."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    flags = f"--xla_force_host_platform_device_count={devices}"
    options = [
        "--rounds",
        str(args.rounds),
        "--draws",
        str(args.draws),
        "--rows",
        *map(str, args.rows),
    ]
    command = [
        sys.executable,
        "-m",
        "examples.benchmarks.scale",
        "--case",
        case,
        *options,
    ]
    joined = [
        ["--join", str(port), str(processes), str(i)] if processes > 1 else []
        for i in range(processes)
    ]
    env = os.environ | {"XLA_FLAGS": flags}
    begun = [
        subprocess.Popen([*command, *more], env=env, stdout=subprocess.PIPE, text=True)
        for more in joined
    ]
    outputs = [process.communicate()[0] for process in begun]
    if any(process.returncode for process in begun):
        raise RuntimeError(f"scale: case {case} failed; its process says why.")
    return json.loads(outputs[0].splitlines()[-1])


def table(report: dict[str, Any]) -> str:
    lines = []
    for name, kept in (
        ("8 chains", report["chains"]),
        ("2 chains, rows shared", report["rows"]),
    ):
        for number, found in kept.items():
            one, two = (1e3 * found["seconds_per_draw"][way] for way in ("one", "two"))
            core = 1e3 * report["one_core"][number] if name == "8 chains" else None
            alone = ("", "") if core is None else (f"{core:.3g}", f"{two / core:.2f}")
            lines.append(
                (
                    f"{name}, {int(number):,} rows",
                    f"{one:.3g}",
                    f"{two:.3g}",
                    f"{found['ratio']:.2f}",
                    *alone,
                )
            )
    return markdown(
        (
            "ms per draw (10 steps)",
            "one device",
            "two",
            "ratio",
            "one core",
            "two devices to it",
        ),
        lines,
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=9, help="repetitions of a measurement"
    )
    parser.add_argument(
        "--draws", type=int, default=100, help="draws in one, of chains on 1,000 rows"
    )
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[200, 1000, 20_000, 200_000]
    )
    parser.add_argument("--case", choices=CASES, help="one case, printed as JSON")
    parser.add_argument(
        "--join",
        type=int,
        nargs=3,
        metavar=("PORT", "PROCESSES", "NUMBER"),
        help=argparse.SUPPRESS,
    )
    parser.add_argument("--output", type=Path, default=Path("output/scale.json"))
    parser.add_argument("--docs", type=Path, help="page whose table is replaced")
    args = parser.parse_args(argv)
    at_least(parser, args, ("rounds", "draws"), 1)
    return args


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    if args.case:
        if args.join:
            port, processes, number = args.join
            jax.distributed.initialize(f"127.0.0.1:{port}", processes, number)
        found = {
            "chains": chains,
            "one_core": one_core,
            "rows": rows,
            "writing": writing,
            "exchange": exchange,
        }[args.case](args)
        print(json.dumps(found))
        return found
    output = writable_file(args.output)
    report: dict[str, Any] = {
        **environment(["zarr"]),
        "options": {"rounds": args.rounds, "draws": args.draws},
    }
    for name, case, devices, processes in (
        ("chains", "chains", 2, 1),
        ("one_core", "one_core", 1, 1),
        ("rows", "rows", 2, 1),
        ("writing", "writing", 1, 1),
        ("exchange_devices", "exchange", 2, 1),
        ("exchange_processes", "exchange", 1, 2),
    ):
        report[name] = measured(case, args, devices, processes)
        print(name, report[name], flush=True)
        write_report(output, report)
    put_table(args.docs, "scale", table(report), report)
    return report


if __name__ == "__main__":
    main()
