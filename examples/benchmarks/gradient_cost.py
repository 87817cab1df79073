"""Cost of a `random_network` model, compared with the same model written by hand in
NumPyro.

Measures, interleaved in one run, the time of a gradient of the potential energy, the
time of a leapfrog trajectory, and the floating-point operations and bytes that XLA
counts for the compiled gradient. Writes JSON.

    python -m examples.benchmarks.gradient_cost --output output/gradient_cost.json
"""

import argparse
import statistics
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro.infer.util import initialize_model

import numpyro_bnn as bnn
from examples.benchmarks.shared import (
    environment,
    interleave,
    median_ratio,
    options_of,
    put_table,
    repeated,
    wall_clock,
    write_report,
)
from examples.shared import at_least, markdown, writable_file


def hand_written(x, y, widths):
    """The one-scale-per-layer tanh network as a NumPyro user writes it without this
    package.
    """
    h = x
    sizes = [x.shape[1], *widths]
    for layer, (n_in, n_out) in enumerate(pairwise(sizes)):
        scale = numpyro.sample(f"scale{layer}", dist.HalfNormal(1.0))
        w = numpyro.sample(
            f"w{layer}", dist.Normal(0.0, 1.0).expand([n_in, n_out]).to_event(2)
        )
        b = numpyro.sample(
            f"b{layer}", dist.Normal(0.0, 1.0).expand([n_out]).to_event(1)
        )
        h = h @ (w * scale * n_in**-0.5) + b
        h = jnp.tanh(h) if layer < len(widths) - 1 else h
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(h[..., 0], sigma), obs=y)


def ours(x, y, widths):
    net = bnn.random_network(
        "net", bnn.nn.MLP(widths, "tanh"), x.shape[1:], bnn.priors.Hierarchical()
    )
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(net(x)[..., 0], sigma), obs=y)


def prepare(model: Callable, x, y, widths, steps: int):
    """Compiled gradient and leapfrog trajectory of a model, with a starting point."""
    info = initialize_model(random.key(0), model, model_args=(x, y, widths))
    z, potential = info.param_info.z, info.potential_fn
    gradient = jax.jit(jax.value_and_grad(potential)).lower(z).compile()

    def leapfrog(state, _):
        position, momentum, force = state
        momentum = jax.tree.map(lambda p, g: p - 0.5e-4 * g, momentum, force)
        position = jax.tree.map(lambda q, p: q + 1e-4 * p, position, momentum)
        force = jax.grad(potential)(position)
        return (
            position,
            jax.tree.map(lambda p, g: p - 0.5e-4 * g, momentum, force),
            force,
        ), None

    def trajectory(position):
        start = (
            position,
            jax.tree.map(jnp.zeros_like, position),
            jax.grad(potential)(position),
        )
        return jax.lax.scan(leapfrog, start, None, length=steps)[0]

    return z, gradient, jax.jit(trajectory).lower(z).compile()


def compare(
    n: int, widths: tuple[int, ...], repeats: int, calls: int, steps: int
) -> dict:
    """Both models on one data set; medians of interleaved repeats, and XLA's counts."""
    x = random.normal(random.key(1), (n, 13))
    y = jnp.sin(x[:, 0])
    prepared = {
        model.__name__: prepare(model, x, y, widths, steps)
        for model in (hand_written, ours)
    }
    trajectories = max(1, calls // steps)
    contenders = {}
    for name, (z, gradient, trajectory) in prepared.items():
        contenders[name, "gradient"] = repeated(gradient, z, calls), calls
        contenders[name, "leapfrog"] = (
            repeated(trajectory, z, trajectories),
            trajectories * steps,
        )
    times = wall_clock(interleave(contenders, repeats))
    row: dict = {"n": n, "widths": list(widths)}
    for what in ("gradient", "leapfrog"):
        row[f"{what}_us"] = {
            name: statistics.median(times[name, what]) for name in prepared
        }
        row[f"{what}_ratio"] = median_ratio(
            times, ("ours", what), ("hand_written", what)
        )
    for quantity in ("flops", "bytes accessed"):
        counts = {
            name: gradient.cost_analysis()[quantity]
            for name, (_, gradient, _) in prepared.items()
        }
        row[f"{quantity.split()[0]}_ratio"] = counts["ours"] / counts["hand_written"]
    return row


def table(report: dict[str, Any]) -> str:
    """Ratios of our model to the hand-written one, as a Markdown table."""
    heads = (
        "rows",
        "layers",
        "gradient",
        "leapfrog trajectory",
        "floating-point operations",
        "bytes",
    )
    names = ("gradient", "leapfrog", "flops", "bytes")
    rows = [
        (
            row["n"],
            ", ".join(map(str, row["widths"])),
            *(f"{row[f'{name}_ratio']:.2f}" for name in names),
        )
        for row in report["rows"]
    ]
    return markdown(heads, rows)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("output/gradient_cost.json"),
        help="JSON file",
    )
    parser.add_argument(
        "--repeats", type=int, default=31, help="interleaved repeats; the median counts"
    )
    parser.add_argument("--calls", type=int, default=200, help="gradients per repeat")
    parser.add_argument(
        "--steps", type=int, default=50, help="leapfrog steps per trajectory"
    )
    parser.add_argument("--docs", type=Path, help="page whose table is to be replaced")
    args = parser.parse_args(argv)
    at_least(parser, args, ("repeats", "calls", "steps"))
    return args


def main(argv: list[str] | None = None) -> list[dict]:
    args = parse(argv)
    writable_file(args.output)
    sizes = [(455, (50, 1)), (455, (50, 50, 1)), (5000, (50, 50, 1))]
    rows = [
        compare(n, widths, args.repeats, args.calls, args.steps) for n, widths in sizes
    ]
    for row in rows:
        print(
            f"N={row['n']:5d} widths={row['widths']}  gradient "
            f"{row['gradient_ratio']:.3f}  leapfrog {row['leapfrog_ratio']:.3f}  flops "
            f"{row['flops_ratio']:.3f}  bytes {row['bytes_ratio']:.3f}"
        )
    report = {"rows": rows, **environment([]), "options": options_of(args)}
    write_report(args.output, report)
    put_table(args.docs, "gradient_cost", table(report), report)
    return rows


if __name__ == "__main__":
    main()
