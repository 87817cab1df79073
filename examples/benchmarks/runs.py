"""Runs in folders and rows on disk: cost of writing, the loop beside ``MCMC.run``,
memory, reading of minibatches.

Every case is a process of its own. Times of a pair are measured in turns, and from the
difference of a long and a short run, so that compiling does not count. Writes JSON.

    python -m examples.benchmarks.runs --output output/runs.json python -m
    examples.benchmarks.runs --rows 10000000 --output output/runs_many_rows.json
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, SVI, TraceMeanField_ELBO

import numpyro_bnn as bnn
from examples.benchmarks.shared import environment, write_report
from examples.shared import at_least, writable_file
from numpyro_bnn.runs import draws, folder

CASES = (
    "writing",
    "loop",
    "memory",
    "psgld_memory",
    "psgld_disk",
    "mean_field_memory",
    "mean_field_disk",
)
FEATURES, BATCH, STEPS = 20, 256, 200


def model(x: Any, y: Any = None, batch_size: int | None = None) -> None:
    net = bnn.random_network(
        "net", bnn.nn.MLP([50, 1], "tanh"), x.shape[1:], bnn.priors.Normal()
    )
    with numpyro.plate("data", len(x), subsample_size=batch_size) as i:
        numpyro.sample(
            "y", dist.Normal(net(x[i])[..., 0], 0.3), obs=None if y is None else y[i]
        )


def small() -> tuple[jax.Array, jax.Array]:
    x = jax.random.normal(jax.random.key(0), (100, FEATURES))
    return x, jnp.sin(x[:, 0])


def chains(num_samples: int, steps: int) -> MCMC:
    kernel = bnn.infer.MCLMC(
        model, 0.5, steps_per_draw=steps, decoherence_length=5.0, warm_start=0.0
    )
    options: dict[str, Any] = {
        "num_chains": 4,
        "chain_method": "vectorized",
        "progress_bar": False,
    }
    return MCMC(kernel, num_warmup=2, num_samples=num_samples, **options)


def elapsed(call: Any) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def writing(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a run in blocks of a second over those of one that writes nothing;
    long runs less short ones.
    """
    x, y = small()
    silent = [
        (draws.StoredDraws, "write", lambda *_: ""),
        (folder.Folder, "commit", lambda *_: None),
    ]
    with tempfile.TemporaryDirectory() as path:

        def run(number: int, seed: int, written: bool) -> None:
            with ExitStack() as stack:
                for owner, name, nothing in [] if written else silent:
                    stack.enter_context(mock.patch.object(owner, name, nothing))
                options: dict[str, Any] = {"block_seconds": 1.0, "progress_bar": False}
                target = f"{path}/{number}_{seed}_{written}"
                bnn.runs.start(
                    target, chains(number, 50), jax.random.key(seed), x, y, **options
                )

        ratios = []
        for seed in range(args.rounds):
            times = []
            for written in (True, False):
                short, long = (
                    elapsed(partial(run, number, seed, written))
                    for number in (10, 20 * args.draws)
                )
                times.append(long - short)
            ratios.append(times[0] / times[1])
    return {"ratios": ratios, "median_ratio": float(np.median(ratios))}


def loop(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds per draw of ``runs.start`` over those of ``MCMC.run``, from long runs
    less short ones.
    """
    x, y = small()
    ratios = []
    with tempfile.TemporaryDirectory() as path:

        def kept(number: int, seed: int) -> None:
            options = {"progress_bar": False}
            bnn.runs.start(
                f"{path}/{number}_{seed}",
                chains(number, 20),
                jax.random.key(seed),
                x,
                y,
                **options,
            )

        def plain(number: int, seed: int) -> None:
            mcmc = chains(number, 20)
            mcmc.run(jax.random.key(seed), x, y)
            jax.block_until_ready(mcmc.get_samples())

        for seed in range(args.rounds):
            times = []
            for way in (kept, plain):
                short, long = (
                    elapsed(partial(way, number, seed))
                    for number in (5, 5 + 12 * args.draws)
                )
                times.append(long - short)
            ratios.append(times[0] / times[1])
    return {"ratios": ratios, "median_ratio": float(np.median(ratios))}


def memory(args: argparse.Namespace) -> dict[str, float]:
    """Peak memory (MiB) after a short and after a long run of the same chains."""
    x, y = small()
    found = {}
    with tempfile.TemporaryDirectory() as path:
        for number in (50, 50 + 100 * args.draws):
            bnn.runs.start(
                path + "/a",
                chains(number, 1),
                jax.random.key(0),
                x,
                y,
                progress_bar=False,
                block_seconds=1.0,
            )
            found[f"{number}_draws"] = peak()
    return found


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def data_on_disk(number: int, path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Memory maps of N rows, written once."""
    names = [path / f"{name}_{number}.npy" for name in "xy"]
    if not all(name.exists() for name in names):
        path.mkdir(parents=True, exist_ok=True)
        x = np.lib.format.open_memmap(names[0], "w+", np.float32, (number, FEATURES))
        y = np.lib.format.open_memmap(names[1], "w+", np.float32, (number,))
        random = np.random.default_rng(0)
        for start in range(0, number, 100_000):
            rows = random.normal(size=(min(100_000, number - start), FEATURES))
            x[start : start + len(rows)], y[start : start + len(rows)] = (
                rows,
                np.sin(rows[:, 0]),
            )
    return tuple(np.load(name, mmap_mode="r") for name in names)  # type: ignore[return-value]


def many_rows(args: argparse.Namespace, way: str, on_disk: bool) -> dict[str, float]:
    """Microseconds per step, a number that shows what was computed, and peak memory
    (MiB).
    """
    x, y = data_on_disk(args.rows, args.data)
    given = (
        (bnn.runs.Rows(x), bnn.runs.Rows(y))
        if on_disk
        else (jnp.asarray(x), jnp.asarray(y))
    )
    options = {"batch_size": BATCH}
    count = args.draws * STEPS
    if way == "psgld":
        kernel = bnn.infer.PSGLD(model, 1e-9, steps_per_draw=STEPS, warm_start=0.0)
        mcmc = MCMC(kernel, num_warmup=5, num_samples=args.draws, progress_bar=False)

        def run() -> Any:
            mcmc.run(jax.random.key(0), *given, **options)
            mcmc.post_warmup_state = mcmc.last_state
            return jnp.sum(mcmc.get_samples()["net/Dense_0.kernel"][-1])

    else:
        svi = SVI(
            model,
            bnn.guides.AutoMeanField(model),
            numpyro.optim.Adam(0.001),
            TraceMeanField_ELBO(),
        )

        def run() -> Any:
            fitted = bnn.guides.fit(
                svi, jax.random.key(0), count, *given, progress_bar=False, **options
            )
            return jnp.sum(fitted.params["net/Dense_0.kernel_auto_loc"])

    first = float(run())
    run()  # `MCMC` compiles once more for a state to start from
    seconds = min(
        elapsed(lambda: jax.block_until_ready(run())) for _ in range(args.rounds)
    )
    return {
        "microseconds_per_step": 1e6 * seconds / count,
        "sum": first,
        "peak_mib": peak(),
    }


def case(name: str, args: argparse.Namespace) -> dict[str, Any]:
    if name in ("writing", "loop", "memory"):
        return {"writing": writing, "loop": loop, "memory": memory}[name](args)
    way, place = name.rsplit("_", 1)
    return many_rows(args, way, place == "disk")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", type=int, default=1_000_000, help="rows of the large data"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="repetitions of a measurement"
    )
    parser.add_argument("--draws", type=int, default=40, help="length of the runs")
    parser.add_argument(
        "--data", type=Path, default=Path(tempfile.gettempdir()) / "numpyro_bnn_rows"
    )
    parser.add_argument("--case", choices=CASES, help="one case, printed as JSON")
    parser.add_argument("--output", type=Path, default=Path("output/runs.json"))
    args = parser.parse_args(argv)
    at_least(parser, args, ("rows", "rounds", "draws"), 1)
    return args


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    if args.case:
        found = case(args.case, args)
        print(json.dumps(found))
        return found
    output = writable_file(args.output)
    given = [
        "--rows",
        str(args.rows),
        "--rounds",
        str(args.rounds),
        "--draws",
        str(args.draws),
        "--data",
        str(args.data),
    ]
    report: dict[str, Any] = {
        "environment": environment(["zarr"]),
        "rows": args.rows,
        "batch_size": BATCH,
    }
    for name in CASES:
        command = [
            sys.executable,
            "-m",
            "examples.benchmarks.runs",
            "--case",
            name,
            *given,
        ]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        report[name] = json.loads(done.stdout.splitlines()[-1])
        print(name, report[name], flush=True)
    for way in ("psgld", "mean_field"):
        disk, memory_ = (report[f"{way}_{place}"] for place in ("disk", "memory"))
        report[f"{way}_ratio"] = (
            disk["microseconds_per_step"] / memory_["microseconds_per_step"]
        )
        report[f"{way}_same"] = disk["sum"] == memory_["sum"]
    write_report(output, report)
    return report


if __name__ == "__main__":
    main()
