"""Time of one update of probabilistic backpropagation: AutoADF compared with a plain
scan, interleaved.

The 20 splits of boston at once (one hidden layer of 50 units), and California housing
(two layers of 50). The plain scan is a straightforward program for this one network:
moments by hand, automatic differentiation, float64 and float32. Ratios are medians of
the ratios within a round. Writes JSON.

    python -m examples.benchmarks.adf_speed --data FOLDER --output docs/adf_speed.json
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from examples import loaders
from examples.benchmarks.shared import (
    environment,
    interleave,
    median_ratio,
    options_of,
    put_table,
    wall_clock,
    write_report,
)
from examples.probabilistic_backpropagation import model
from examples.shared import at_least, markdown, writable_file

# The C code of the authors on one core of a similar machine: microseconds per update
# and split.
C_REFERENCE = {"boston": "9-12", "california": "175"}


def load_data(
    args: argparse.Namespace,
) -> dict[str, tuple[np.ndarray, np.ndarray, tuple[int, ...]]]:
    """Inputs (R, N, D), targets (R, N) and hidden layers; random numbers of the same
    shapes without the files.
    """
    folder = args.data or os.environ.get("NUMPYRO_BNN_DATA")
    draws = np.random.default_rng(0)
    if folder:
        splits = [
            loaders.standardize(loaders.load_uci("boston", k, folder))
            for k in range(args.splits)
        ]
        boston = (
            np.stack([d.x_train for d in splits]),
            np.stack([d.y_train for d in splits]),
        )
        housing = loaders.standardize(
            loaders.load_california(folder, test_fraction=0.1)
        )
        california = housing.x_train[None], housing.y_train[None]
    else:
        print(
            "no data folder (--data, NUMPYRO_BNN_DATA): random numbers of the same "
            "shapes"
        )
        boston = (
            draws.normal(size=(args.splits, 455, 13)),
            draws.normal(size=(args.splits, 455)),
        )
        california = draws.normal(size=(1, 18576, 8)), draws.normal(size=(1, 18576))
    rows, layers = args.rows, (args.width,)
    return {
        "boston": (*(part[:, :rows] for part in boston), layers),
        "california": (*(part[:, :rows] for part in california), 2 * layers),
    }


# --------------------------------------------------------------------------------------
# a plain scan


def plain_log_z(weights: Any, gamma: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """log Z of one data point for a ReLU network, and its mean and variance."""
    mean, var = x, jnp.zeros_like(x)
    for layer, (m, v) in enumerate(weights):
        if layer:
            sd = jnp.sqrt(var)
            alpha = mean / sd
            cdf, pdf = jax.scipy.stats.norm.cdf(alpha), jax.scipy.stats.norm.pdf(alpha)
            first = mean * cdf + sd * pdf
            mean, var = (
                first,
                jnp.maximum((mean**2 + var) * cdf + mean * sd * pdf - first**2, 1e-30),
            )
        mean, var = jnp.append(mean, 1.0), jnp.append(var, 0.0)
        n = mean.size
        mean, var = mean @ m / n**0.5, (var @ m**2 + (mean**2 + var) @ v) / n
    total = var[0] + gamma[1] / (gamma[0] - 1)
    return -0.5 * (jnp.log(total) + (y - mean[0]) ** 2 / total), (mean[0], var[0])


def plain_step(carry: Any, row: Any) -> tuple[Any, Any]:
    """One update, as published."""
    weights, (a, b) = carry
    x, y = row
    (log_z, (mean, var)), gradients = jax.value_and_grad(plain_log_z, has_aux=True)(
        weights, (a, b), x, y
    )
    new = []
    for (m, v), (dm, dv) in zip(weights, gradients, strict=True):
        changed = v - v**2 * (dm**2 - 2 * dv)
        good = (changed > 0) & jnp.isfinite(changed)
        new.append((jnp.where(good, m + v * dm, m), jnp.where(good, changed, v)))
    totals = [var + b / (a + k) for k in (-1, 0, 1)]
    z = [-0.5 * (jnp.log(total) + (y - mean) ** 2 / total) for total in totals]
    shape = 1 / (jnp.exp(z[2] - 2 * z[1] + z[0]) * (a + 1) / a - 1)
    rate = 1 / (jnp.exp(z[2] - z[1]) * (a + 1) / b - jnp.exp(z[1] - z[0]) * a / b)
    return (new, (shape, rate)), log_z


def plain(
    x: np.ndarray, y: np.ndarray, layers: tuple[int, ...]
) -> tuple[Callable, float]:
    """A pass over the data, compiled, and the seconds that took."""
    draws = np.random.default_rng(0)
    shapes = [(i + 1, o) for i, o in pairwise((x.shape[2], *layers, 1))]
    runs = len(x)
    weights = [
        (
            jnp.asarray(draws.normal(size=(runs, *s)) / s[0] ** 0.5),
            jnp.full((runs, *s), 1.2),
        )
        for s in shapes
    ]
    start = weights, (jnp.full(runs, 6.0), jnp.full(runs, 6.0))
    data = jnp.asarray(x), jnp.asarray(y)
    begin = time.perf_counter()
    learn = (
        jax.jit(jax.vmap(lambda start, data: lax.scan(plain_step, start, data)))
        .lower(start, data)
        .compile()
    )
    return lambda: learn(start, data), time.perf_counter() - begin


def ours(
    x: np.ndarray, y: np.ndarray, layers: tuple[int, ...]
) -> tuple[Callable, float]:
    """A run of one epoch after the first, which read and compiled the model; and the
    seconds of that one.
    """
    from numpyro_bnn import guides

    pbp = guides.AutoADF(model)
    keys = jax.random.split(jax.random.key(0), len(x))

    def run() -> Any:
        return pbp.run(
            keys,
            x,
            y,
            in_axes=(0, 0),
            widths=layers,
            num_epochs=EPOCHS,
            progress_bar=False,
        )

    begin = time.perf_counter()
    jax.block_until_ready(run().params)
    first = time.perf_counter() - begin
    begin = time.perf_counter()
    jax.block_until_ready(run().params)
    return lambda: run().params, first - (time.perf_counter() - begin)


# --------------------------------------------------------------------------------------
# measures

EPOCHS = 4


def compare(
    x: np.ndarray, y: np.ndarray, layers: tuple[int, ...], rounds: int
) -> dict[str, Any]:
    """Microseconds per update and run of each contender, and seconds to compile."""
    contenders: dict[str, tuple[Callable, int]] = {}
    compiled = {}
    call, compiled["AutoADF"] = ours(x, y, layers)
    contenders["AutoADF"] = call, EPOCHS
    for wide in (True, False):
        name = f"plain scan, float{64 if wide else 32}"
        with jax.enable_x64(wide):
            call, compiled[name] = plain(x, y, layers)
        contenders[name] = call, 1
    steps = {
        name: (call, epochs * y.size) for name, (call, epochs) in contenders.items()
    }
    times = wall_clock(interleave(steps, rounds))
    pairs = {name: f"AutoADF / {name}" for name in contenders if name != "AutoADF"}
    return {
        "microseconds": {name: statistics.median(ts) for name, ts in times.items()},
        "least_microseconds": {name: min(ts) for name, ts in times.items()},
        "ratio": {
            label: median_ratio(times, "AutoADF", name) for name, label in pairs.items()
        },
        "compile_seconds": compiled,
        "runs": len(x),
        "rows": y.shape[1],
        "hidden_layers": list(layers),
    }


def table(report: dict[str, Any]) -> str:
    """The results as a Markdown table."""
    heads = (
        "data",
        "runs at once",
        "hidden layers",
        "AutoADF",
        "plain scan",
        "AutoADF / plain",
        "C code, one core",
    )
    rows = []
    for name in ("boston", "california"):
        found = report[name]
        times = [
            found["microseconds"][who] for who in ("AutoADF", "plain scan, float64")
        ]
        ratio = found["ratio"]["AutoADF / plain scan, float64"]
        layers = ", ".join(map(str, found["hidden_layers"]))
        shown = (*(f"{value:.1f}" for value in times), f"{ratio:.2f}")
        rows.append((name, found["runs"], layers, *shown, found["c_reference"]))
    return markdown(heads, rows)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.benchmarks.adf_speed",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--data", type=Path, help="folder of the data; otherwise NUMPYRO_BNN_DATA"
    )
    parser.add_argument(
        "--rounds", type=int, default=15, help="interleaved repeats; the median counts"
    )
    parser.add_argument(
        "--splits", type=int, default=20, help="splits of boston at once"
    )
    parser.add_argument(
        "--rows",
        type=int,
        default=5000,
        help="rows of California housing used (455 of boston)",
    )
    parser.add_argument("--width", type=int, default=50, help="units of a hidden layer")
    parser.add_argument(
        "--output", type=Path, default=Path("output/adf_speed.json"), help="JSON file"
    )
    parser.add_argument("--docs", type=Path, help="page whose table is to be replaced")
    args = parser.parse_args(argv)
    at_least(parser, args, ("rounds", "splits", "rows", "width"))
    return args


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    writable_file(args.output)
    report: dict[str, Any] = {}
    for name, (x, y, layers) in load_data(args).items():
        report[name] = compare(x, y, layers, args.rounds) | {
            "c_reference": C_REFERENCE[name]
        }
        print(f"\n{name}: {len(x)} runs of {y.shape[1]} rows, hidden layers {layers}")
        for who, value in report[name]["microseconds"].items():
            least, seconds = (
                report[name]["least_microseconds"][who],
                report[name]["compile_seconds"][who],
            )
            print(
                f"  {who:22}{value:8.2f} us per update (least {least:.2f}); "
                f"{seconds:.1f} s to compile"
            )
        for label, value in report[name]["ratio"].items():
            print(f"  {label:36}{value:8.2f}")
    report |= {**environment([]), "options": options_of(args)}
    report["machine"]["load"] = os.getloadavg()[0]
    write_report(args.output, report)
    put_table(args.docs, "adf_speed", table(report), report)
    return report


if __name__ == "__main__":
    main()
