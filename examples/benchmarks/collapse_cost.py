"""Cost of a gradient with the output layer integrated out, compared with the same model
where it is sampled.

Measures, in alternating pairs, the time of a density with its gradient, by the wall
clock and of the processor, and the floating-point operations that XLA counts for both:
of all branches, of which one is run, and without those of LAPACK. Writes JSON.

    python -m examples.benchmarks.collapse_cost --output output/collapse_cost.json
"""

import argparse
import statistics
from collections.abc import Callable
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import random
from numpyro.infer.util import initialize_model

from examples.benchmarks.shared import (
    environment,
    interleave,
    median_ratio,
    options_of,
    repeated,
    wall_clock,
    write_report,
)
from examples.shared import at_least, writable_file
from numpyro_bnn import infer, models, nn, priors

SITES = ["net/Dense_1.kernel", "net/Dense_1.bias"]


def prepare(model: Callable, *data: jax.Array) -> tuple[dict, Callable]:
    """A starting point, and the compiled potential with its gradient."""
    info = initialize_model(random.key(0), model, model_args=data)
    z = info.param_info.z
    return z, jax.jit(jax.value_and_grad(info.potential_fn)).lower(z).compile()


def compare(
    n: int, inputs: int, hidden: int, outputs: int, repeats: int, calls: int
) -> dict:
    """Medians of alternating repeats, and XLA's counts, for one data set
    and network.
    """
    x = random.normal(random.key(1), (n, inputs))
    y = jnp.sin(x[:, :outputs]) + 0.1 * random.normal(random.key(2), (n, outputs))
    y = y[:, 0] if outputs == 1 else y
    model = models.regression(nn.MLP([hidden, outputs], "tanh"), priors.Normal(1.0))
    prepared = {
        "plain": prepare(model, x, y),
        "collapsed": prepare(infer.collapse(model, SITES, x, y), x, y),
    }
    contenders = {
        name: (repeated(gradient, z, calls), calls)
        for name, (z, gradient) in prepared.items()
    }
    both = interleave(contenders, repeats)
    times = {
        "wall": wall_clock(both),
        "processor": {name: [b for _, b in pairs] for name, pairs in both.items()},
    }
    counts = {
        name: gradient.cost_analysis()["flops"]
        for name, (_, gradient) in prepared.items()
    }
    return {
        "n": n,
        "inputs": inputs,
        "hidden": hidden,
        "outputs": outputs,
        "us": {name: statistics.median(found) for name, found in times["wall"].items()},
        "ratio": median_ratio(times["wall"], "collapsed", "plain"),
        "processor_ratio": median_ratio(times["processor"], "collapsed", "plain"),
        "flops": counts,
        "flops_ratio": counts["collapsed"] / counts["plain"],
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("output/collapse_cost.json"),
        help="JSON file",
    )
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1000], help="numbers of data points"
    )
    parser.add_argument(
        "--hidden",
        type=int,
        nargs="+",
        default=[20, 50],
        help="numbers of hidden units",
    )
    parser.add_argument(
        "--outputs",
        type=int,
        nargs="+",
        default=[1, 3],
        help="numbers of outputs, at most 8",
    )
    parser.add_argument(
        "--repeats", type=int, default=31, help="alternating repeats; the median counts"
    )
    parser.add_argument("--calls", type=int, default=100, help="gradients per repeat")
    args = parser.parse_args(argv)
    at_least(parser, args, ("repeats", "calls"))
    return args


def main(argv: list[str] | None = None) -> list[dict]:
    args = parse(argv)
    writable_file(args.output)
    sizes = product(args.rows, args.hidden, args.outputs)
    rows = [
        compare(n, 8, hidden, outputs, args.repeats, args.calls)
        for n, hidden, outputs in sizes
    ]
    for row in rows:
        print(
            f"N={row['n']:6d} D={row['inputs']} H={row['hidden']} K={row['outputs']}  "
            f"plain {row['us']['plain']:.0f} us  collapsed "
            f"{row['us']['collapsed']:.0f} us  ratio {row['ratio']:.2f}  processor "
            f"{row['processor_ratio']:.2f}  flops {row['flops_ratio']:.2f}"
        )
    write_report(
        args.output, {"rows": rows, **environment([]), "options": options_of(args)}
    )
    return rows


if __name__ == "__main__":
    main()
