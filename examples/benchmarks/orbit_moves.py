"""Cost of moves along symmetries, relative to the transitions of the kernels that they
accompany.

A 13-50-1 network on 10,000 rows, non-centered, ReLU and batch-norm tanh. The script
times one sweep of the moves, for all symmetries and for each alone, with and without
the refresh of the inner kernel; a NUTS transition; and an SGLD step with minibatches.
They take turns in one process, so that load on the machine affects all of them; the
report gives medians and minima. Writes JSON.

    python -m examples.benchmarks.orbit_moves --output output/orbit_moves.json
"""

import argparse
import copy
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax import lax, random
from numpyro.infer import NUTS

from examples.benchmarks.sgld_step import settings
from examples.benchmarks.shared import interleave, put_table, write_report
from examples.shared import at_least, markdown, writable_file
from numpyro_bnn import infer, models, nn, priors, symmetry
from numpyro_bnn.infer.orbit import OrbitState

NETS = {"ReLU": lambda width: nn.MLP([width, 1], "relu")}
NETS["batch norm"] = lambda width: nn.MLP([width, 1], "tanh", norm=nn.BatchNorm())
FEATURES, STEP_SIZE = 13, 1e-6
# Upper limits of the cost of a sweep: 5 % of a transition (of NUTS, or of SGLD with its
# steps per draw), and half of a single SGLD step.
TRANSITION_LIMIT, STEP_LIMIT = 0.05, 0.5

Calls = dict[str, tuple[Callable, int]]


def make_data(rows: int) -> tuple[jax.Array, jax.Array]:
    x = random.normal(random.key(0), (rows, FEATURES))
    return x, jax.numpy.sin(x[:, 0])


def loop(step: Callable, state: Any, times: int) -> Callable:
    """A compiled loop of ``step(state, key) -> state``, ready to be timed."""
    program = jax.jit(
        lambda state, keys: lax.scan(lambda s, k: (step(s, k), None), state, keys)[0]
    )
    keys = random.split(random.key(1), times)
    return partial(program.lower(state, keys).compile(), state, keys)


def subset(
    kernel: infer.OrbitMoves, state: OrbitState, chosen: list[int]
) -> tuple[infer.OrbitMoves, OrbitState]:
    """The same kernel and state with some of the symmetries."""
    kernel = copy.copy(kernel)
    kernel._plans = tuple(kernel._plans[i] for i in chosen)
    index = jax.numpy.array(chosen)
    few = {
        name: getattr(state, name)[index]
        for name in ("orbit_accept_prob", "orbit_width")
    }
    return kernel, state._replace(**few)


def sweeps(
    kernel: infer.OrbitMoves, state: OrbitState, call: tuple, times: int
) -> Calls:
    """Moves without refresh: of all symmetries, of the continuous ones, and of each."""
    numbers = range(len(kernel._symmetries))
    continuous = [i for i in numbers if kernel._symmetries[i].continuous]
    choices = {"sweep": list(numbers), "sweep, continuous": continuous}
    choices |= {
        f"{kernel._symmetries[i].name}: {kernel._plans[i].method}": [i] for i in numbers
    }
    calls = {}
    for name, chosen in choices.items():
        some, start = subset(kernel, state, chosen)
        step = partial(some._transition, model_args=call, model_kwargs={})
        calls[name] = loop(step, start, times), times
    return calls


def refreshed(kernel: infer.OrbitMoves, call: tuple) -> Callable:
    def step(state: OrbitState, key: jax.Array) -> OrbitState:
        return kernel.refresh(kernel._transition(state, key, call, {}), call, {})

    return step


def with_inner(
    kernel: infer.OrbitMoves, state: OrbitState, inner: Any, call: tuple
) -> tuple[infer.OrbitMoves, OrbitState]:
    """The same moves around another kernel of the same model, for which their analysis
    is also valid.
    """
    kernel = copy.copy(kernel)
    kernel._kernel = inner
    return kernel, state._replace(
        base=inner.init(random.key(2), 0, None, model_args=call, model_kwargs={})
    )


def nuts_calls(
    kernel: infer.OrbitMoves, state: OrbitState, data: tuple, args: argparse.Namespace
) -> tuple[Calls, float]:
    """Transitions, and all kinds of sweeps; leapfrog steps of a transition."""
    transition = loop(
        lambda base, _: kernel.kernel.sample(base, data, {}),
        state.base,
        args.transitions,
    )
    calls = sweeps(kernel, state, data, args.sweeps)
    calls["NUTS transition"] = transition, args.transitions
    calls["sweep + refresh, NUTS"] = (
        loop(refreshed(kernel, data), state, args.refreshes),
        args.refreshes,
    )
    return calls, float(transition().num_steps)


def sgld_calls(
    kernel: infer.OrbitMoves, state: OrbitState, data: tuple, args: argparse.Namespace
) -> Calls:
    calls = {}
    for batch in args.batches:
        call = (*data, batch)
        inner = infer.SGLD(
            kernel.model, STEP_SIZE, steps_per_draw=args.steps_per_draw, warm_start=0.0
        )
        outer, start = with_inner(kernel, state, inner, call)
        draw = loop(
            lambda base, _, inner=inner, call=call: inner.sample(base, call, {}),
            start.base,
            args.draws,
        )
        calls[f"SGLD step, B={batch}"] = draw, args.draws * args.steps_per_draw
        calls[f"sweep + refresh, SGLD B={batch}"] = (
            loop(refreshed(outer, call), start, args.sweeps),
            args.sweeps,
        )
    return calls


def times_of(
    found: dict[str, list[tuple[float, float]]],
) -> dict[str, dict[str, float]]:
    """Microseconds: median and smallest, wall-clock and processor."""
    report = {}
    for name, rounds in found.items():
        wall, processor = zip(*rounds, strict=True)
        report[name] = {
            "wall_median": statistics.median(wall),
            "wall_min": min(wall),
            "processor_median": statistics.median(processor),
            "processor_min": min(processor),
        }
    return report


def ratios_of(
    found: dict[str, list[tuple[float, float]]], steps_per_draw: int
) -> dict[str, dict[str, float]]:
    """A sweep relative to each kernel: medians of the ratios within a round, ratios of
    the minima (wall-clock).
    """
    report = {}

    def compared(sweep: str, kernel: str, times: int, unit: str, limit: float) -> None:
        pairs = [
            (a[0], times * b[0])
            for a, b in zip(found[sweep], found[kernel], strict=True)
        ]
        report[f"{sweep} / {unit}"] = {
            "median": statistics.median(a / b for a, b in pairs),
            "min": min(a for a, _ in pairs) / min(b for _, b in pairs),
            "limit": limit,
        }

    for kernel in [name for name in found if name.startswith(("NUTS", "SGLD"))]:
        batch = kernel.partition(", ")[2]
        own = f"sweep + refresh, {kernel.split()[0]} {batch}".rstrip()
        for sweep in ("sweep", "sweep, continuous", own):
            compared(
                sweep, kernel, 1, kernel, STEP_LIMIT if batch else TRANSITION_LIMIT
            )
        if batch:  # one sweep is made per draw
            draw = f"draw of {steps_per_draw} SGLD steps, {batch}"
            compared(own, kernel, steps_per_draw, draw, TRANSITION_LIMIT)
    return report


def compare(name: str, args: argparse.Namespace) -> dict[str, Any]:
    data = make_data(args.rows)
    model = models.regression(NETS[name](args.width), priors.Hierarchical())
    # With so small a step every tree has full depth.
    nuts = NUTS(
        model,
        step_size=STEP_SIZE,
        adapt_step_size=False,
        max_tree_depth=args.tree_depth,
    )
    kernel = infer.OrbitMoves(nuts, symmetry.find(model, *data))
    state = kernel.init(random.key(2), 0, None, model_args=data, model_kwargs={})
    calls, leapfrogs = nuts_calls(kernel, state, data, args)
    calls |= sgld_calls(kernel, state, data, args)
    interleave(calls, 1)
    measured = interleave(calls, args.rounds)
    return {
        "microseconds": times_of(measured),
        "ratios": ratios_of(measured, args.steps_per_draw),
        "leapfrog_steps": leapfrogs,
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.benchmarks.orbit_moves",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--output", type=Path, default=Path("output/orbit_moves.json"), help="JSON file"
    )
    parser.add_argument(
        "--nets", nargs="+", choices=NETS, default=list(NETS), help="networks"
    )
    parser.add_argument("--rounds", type=int, default=15, help="interleaved repeats")
    parser.add_argument("--rows", type=int, default=10_000, help="data points")
    parser.add_argument("--width", type=int, default=50, help="hidden units")
    parser.add_argument("--sweeps", type=int, default=1000, help="sweeps per repeat")
    parser.add_argument(
        "--refreshes",
        type=int,
        default=20,
        help="sweeps with refresh of NUTS per repeat",
    )
    parser.add_argument(
        "--transitions", type=int, default=2, help="NUTS transitions per repeat"
    )
    parser.add_argument(
        "--tree-depth",
        type=int,
        default=5,
        help="of NUTS; real trees tend to be deeper",
    )
    parser.add_argument("--draws", type=int, default=5, help="SGLD draws per repeat")
    parser.add_argument(
        "--steps-per-draw", type=int, default=100, help="SGLD steps per draw"
    )
    parser.add_argument(
        "--batches",
        type=int,
        nargs="+",
        default=[128, 512],
        help="minibatch sizes of SGLD",
    )
    parser.add_argument("--docs", type=Path, help="page whose table is to be replaced")
    args = parser.parse_args(argv)
    at_least(
        parser,
        args,
        [name for name, value in vars(args).items() if isinstance(value, int)],
    )
    if min(args.batches) < 2 or max(args.batches) > args.rows:
        parser.error(f"--batches must be at least 2 and at most --rows, {args.rows}")
    return args


def print_report(report: dict[str, Any]) -> None:
    for name, part in report["nets"].items():
        print(
            f"\n{name}: microseconds, wall clock (median, smallest); trees of "
            f"{part['leapfrog_steps']:.0f}"
        )
        for what, found in part["microseconds"].items():
            print(f"  {what:48}{found['wall_median']:12.1f}{found['wall_min']:12.1f}")
        print("ratios (median, of the smallest; limit)")
        for what, ratio in part["ratios"].items():
            print(
                f"  "
                f"{what:64}{ratio['median']:9.4f}{ratio['min']:9.4f}{ratio['limit']:7.2f}"
            )


def table(report: dict[str, Any]) -> str:
    """The extra cost of a draw with moves, as a Markdown table."""
    rows = []
    for net, part in report["nets"].items():
        for what, ratio in part["ratios"].items():
            sweep, _, kernel = what.partition(" / ")
            if sweep != "sweep, continuous":
                rows.append(
                    (net, sweep.partition(", ")[0], kernel, f"{ratio['median']:.4f}")
                )
    return markdown(("network", "what", "beside", "ratio"), rows)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    writable_file(args.output)
    report = {
        "nets": {name: compare(name, args) for name in args.nets},
        **settings(args),
    }
    report["network"] = {
        "features": FEATURES,
        "width": args.width,
        "step_size": STEP_SIZE,
    }
    print_report(report)
    write_report(args.output, report)
    put_table(args.docs, "orbit_moves", table(report), report)
    return report


if __name__ == "__main__":
    main()
