"""Time of an SVI step with `AutoCoupling`, compared with flowjax's coupling flow on the
same model.

Both flows have the same standard normal base, number of layers, hidden width and
activation of the conditioners, have the same loc and scale, and see the same minibatch
through a one-hidden-layer tanh network. Both directions (`invert`) of flowjax's flow
are timed, and the faster one counts. Steps are interleaved in one run, so that load on
the machine affects all alike; ratios are medians of the ratios within a round. Writes
JSON.

    python -m examples.benchmarks.coupling_step --output output/coupling_step.json
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax
from jax import lax, random
from numpyro.infer import SVI, Trace_ELBO

from examples.benchmarks.shared import (
    environment,
    interleave,
    median_ratio,
    options_of,
    put_table,
    wall_clock,
    write_report,
)
from examples.shared import at_least, markdown, writable_file
from numpyro_bnn import guides

FEATURES = 8
OURS = "AutoCoupling"


def model(x: jax.Array, y: jax.Array, width: int) -> None:
    """An 8-H-1 tanh network."""
    shapes = {
        "kernel0": (FEATURES, width),
        "bias0": (width,),
        "kernel1": (width, 1),
        "bias1": (1,),
    }
    prior = dist.Normal(0.0, 1.0)
    w = {
        name: numpyro.sample(name, prior.expand(s).to_event(len(s)))
        for name, s in shapes.items()
    }
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("data", x.shape[0]):
        hidden = jnp.tanh(x @ w["kernel0"] * FEATURES**-0.5 + w["bias0"])
        f = hidden @ w["kernel1"] * width**-0.5 + w["bias1"]
        numpyro.sample("y", dist.Normal(f[:, 0], sigma), obs=y)


def num_latent(width: int) -> int:
    """D, the number of unconstrained parameters of the model."""
    return (FEATURES + 2) * width + 2


# --------------------------------------------------------------------------------------
# contenders


def make_guides(width: int, num_flows: int, hidden: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        OURS: guides.AutoCoupling(model, num_flows=num_flows, hidden=(hidden,))
    }
    try:
        from flowjax.distributions import StandardNormal
        from flowjax.flows import coupling_flow
    except ImportError:
        print('flowjax: left out, not installed; pip install "numpyro_bnn[benchmarks]"')
        return found
    for invert in (True, False):
        flow = coupling_flow(
            random.key(0),
            base_dist=StandardNormal((num_latent(width),)),
            flow_layers=num_flows,
            nn_width=hidden,
            nn_activation=jax.nn.silu,
            invert=invert,
        )
        found[f"flowjax, invert={invert}"] = guides.AutoBlocks(
            model, {"*": guides.Flowjax(flow)}
        )
    return found


def make_loop(
    guide: Any, args: tuple, num_particles: int, num_steps: int
) -> tuple[Callable, int]:
    """A compiled loop of SVI steps, ready to run, and the number of parameters it
    learns.
    """
    loss = Trace_ELBO(num_particles=num_particles, vectorize_particles=True)
    svi = SVI(model, guide, optax.adam(1e-3), loss)
    state = svi.init(random.key(1), *args)

    def loop(state: Any) -> Any:
        return lax.scan(
            lambda state, _: svi.update(state, *args), state, None, length=num_steps
        )

    parameters = sum(jnp.size(leaf) for leaf in jax.tree.leaves(svi.get_params(state)))
    return partial(jax.jit(loop).lower(state).compile(), state), parameters


# --------------------------------------------------------------------------------------
# measures


def compare_steps(
    args: argparse.Namespace, width: int, num_particles: int
) -> dict[str, Any]:
    """All flows on one model; microseconds per step, and our time over that of the
    faster flowjax flow.
    """
    x = random.normal(random.key(2), (args.rows, FEATURES))
    data = (x, jnp.sin(x[:, 0]), width)
    loops, counts = {}, {}
    for name, guide in make_guides(width, args.num_flows, args.hidden).items():
        loops[name], counts[name] = make_loop(guide, data, num_particles, args.steps)
    times = wall_clock(
        interleave(
            {name: (loop, args.steps) for name, loop in loops.items()}, args.rounds
        )
    )
    row = {
        "width": width,
        "latent": num_latent(width),
        "particles": num_particles,
        "parameters": counts,
        "microseconds": {
            name: statistics.median(values) for name, values in times.items()
        },
    }
    return row | {"ratio": ratio_to_fastest(times)}


def ratio_to_fastest(times: dict[str, list[float]]) -> float | None:
    """Median over rounds of our time over that of the contender with the least median;
    None without one.
    """
    others = {
        name: statistics.median(values)
        for name, values in times.items()
        if name != OURS
    }
    if not others:
        return None
    fastest = min(others, key=others.__getitem__)
    return median_ratio(times, OURS, fastest)


# --------------------------------------------------------------------------------------
# script


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.benchmarks.coupling_step",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("output/coupling_step.json"),
        help="JSON file",
    )
    parser.add_argument(
        "--rounds", type=int, default=15, help="interleaved repeats; the median counts"
    )
    parser.add_argument("--steps", type=int, default=300, help="steps per repeat")
    parser.add_argument(
        "--widths", type=int, nargs="+", default=[10, 50, 500], help="of the network"
    )
    parser.add_argument(
        "--particles", type=int, nargs="+", default=[1, 16], help="draws per step"
    )
    parser.add_argument("--num-flows", type=int, default=4, help="layers of the flows")
    parser.add_argument(
        "--hidden", type=int, default=32, help="width of the conditioners"
    )
    parser.add_argument(
        "--rows", type=int, default=32, help="data points of the minibatch"
    )
    parser.add_argument("--docs", type=Path, help="page whose table is to be replaced")
    args = parser.parse_args(argv)
    at_least(
        parser,
        args,
        ("rounds", "steps", "num_flows", "hidden", "rows", "widths", "particles"),
    )
    return args


def print_row(row: dict[str, Any]) -> None:
    ratio = (
        "" if row["ratio"] is None else f"  {OURS} / faster flowjax {row['ratio']:.2f}"
    )
    print(f"\n{row['latent']} latent numbers, {row['particles']} draws per step{ratio}")
    for name, value in row["microseconds"].items():
        print(f"  {name:24}{value:10.1f} us{row['parameters'][name]:12,d} parameters")


def table(report: dict[str, Any]) -> str:
    """Times of both packages as a Markdown table; for flowjax, of its
    faster direction.
    """
    heads = (
        "latent numbers",
        "draws per step",
        f"{OURS}, microseconds",
        "flowjax, microseconds",
        "ratio",
    )
    rows = []
    for row in report["rows"]:
        others = [value for name, value in row["microseconds"].items() if name != OURS]
        theirs = (f"{min(others):.0f}", f"{row['ratio']:.2f}") if others else ("-", "-")
        rows.append(
            (
                row["latent"],
                row["particles"],
                f"{row['microseconds'][OURS]:.0f}",
                *theirs,
            )
        )
    return markdown(heads, rows)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    writable_file(args.output)
    rows = []
    for width in args.widths:
        for num_particles in args.particles:
            rows.append(compare_steps(args, width, num_particles))
            print_row(rows[-1])
    report = {
        "rows": rows,
        **environment(["flowjax", "equinox"]),
        "options": options_of(args),
    }
    write_report(args.output, report)
    put_table(args.docs, "coupling_step", table(report), report)
    return report


if __name__ == "__main__":
    main()
