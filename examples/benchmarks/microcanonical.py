"""Mixing of the predicted function: NUTS, centered and non-centered, compared with
MCLMC.

ReLU networks with one learned scale per layer on UCI sets. Every method gets the same
number of gradients per chain, half of them for warm-up; then each one is resumed until
it has used as many seconds as the slowest. Effective sample sizes are those of the
predicted function at the test rows (bulk), per gradient and per second of sampling. The
script also compares the cost of a step with that of its bare gradients, and of
vectorized chains with that of one chain, on one device and on one device per core.
Writes JSON.

    python -m examples.benchmarks.microcanonical --data FOLDER --output
    output/microcanonical.json

If chains stay at different functions, the effective size of all chains together shows
only that. The sum of those of the single chains shows how fast each one moves around
its own function.
"""

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree
from numpyro.infer import MCMC, NUTS, init_to_uniform
from numpyro.infer.util import initialize_model

from examples import loaders
from examples.benchmarks.shared import (
    environment,
    interleave,
    median_ratio,
    one_device_per_core,
    options_of,
    put_table,
    wall_clock,
    write_report,
)
from examples.ensembles import made_data
from examples.shared import at_least, markdown, writable_file
from numpyro_bnn import infer, metrics, models, nn, priors, sgmcmc, to_inference_data

NETS = {"1x20": [20, 1], "2x16": [16, 16, 1]}
SETS = ("boston", "energy", "concrete")
METHODS = ("NUTS centered", "NUTS non-centered", "MCLMC")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.benchmarks.microcanonical",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--sets", nargs="+", choices=SETS, default=list(SETS), help="data sets"
    )
    parser.add_argument(
        "--nets", nargs="+", choices=NETS, default=list(NETS), help="networks"
    )
    parser.add_argument(
        "--methods",
        nargs="*",
        choices=METHODS,
        default=list(METHODS),
        help="samplers; none: step costs",
    )
    parser.add_argument(
        "--gradients", type=int, default=250_000, help="per chain, half of them warm-up"
    )
    parser.add_argument("--draws", type=int, default=500, help="kept per chain, about")
    parser.add_argument("--num-chains", type=int, default=2, help="one after the other")
    parser.add_argument("--max-tree-depth", type=int, default=8, help="of NUTS")
    parser.add_argument(
        "--rounds", type=int, default=15, help="interleaved repeats of the step costs"
    )
    parser.add_argument("--steps", type=int, default=1000, help="gradients per repeat")
    parser.add_argument("--seed", type=int, default=0, help="seed of the samplers")
    parser.add_argument(
        "--data", type=Path, default=None, help="folder of the UCI sets"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("output/microcanonical.json"),
        help="JSON file",
    )
    parser.add_argument("--docs", type=Path, help="page whose tables show the figures")
    args = parser.parse_args(argv)
    at_least(parser, args, ("num_chains", "rounds"))
    at_least(parser, args, ("max_tree_depth",), 2)
    at_least(parser, args, ("steps",), 2)
    at_least(parser, args, ("draws",), 4)
    at_least(parser, args, ("gradients",), 200)
    return args


def load(name: str, folder: Path | None) -> Any:
    folder = folder or os.environ.get("NUMPYRO_BNN_DATA")
    if not folder:
        return loaders.standardize(made_data("energy"))
    return loaders.standardize(loaders.load_uci(name, 0, folder))


def model_of(net: str, centered: bool = False) -> Callable:
    return models.regression(
        nn.MLP(NETS[net], "relu"), priors.Hierarchical(centered=centered)
    )


# --------------------------------------------------------------------------------------
# one method


def sampler(method: str, net: str, args: argparse.Namespace) -> tuple[Any, int, int]:
    """Kernel, warm-up transitions and draws that spend about the gradients of the
    options.
    """
    half = args.gradients // 2
    if method.startswith("NUTS"):
        each = 2**args.max_tree_depth - 1  # these posteriors fill their trees
        kernel = NUTS(
            model_of(net, method == "NUTS centered"), max_tree_depth=args.max_tree_depth
        )
        return kernel, max(half // each, 4), max(half // each, 4)
    each = max(half // (2 * args.draws), 1)  # two gradients a step
    return infer.MCLMC(model_of(net), steps_per_draw=each), args.draws, args.draws


def gradients_of(mcmc: MCMC) -> int:
    """Gradients of the draws kept last, all chains together."""
    if isinstance(mcmc.sampler, NUTS):
        return int(np.sum(mcmc.get_extra_fields()["num_steps"]))
    counts = np.asarray(mcmc.get_extra_fields(group_by_chain=True)["num_gradients"])
    return int(
        np.sum(counts[:, -1] - counts[:, 0])
        * counts.shape[1]
        / max(counts.shape[1] - 1, 1)
    )


def functions_of(mcmc: MCMC, data: Any) -> np.ndarray:
    """Draws of the function at the test rows, (C, S, N)."""
    idata = to_inference_data(
        mcmc,
        predictions={"x": data.x_test},
        log_likelihood=False,
        posterior_predictive=False,
    )
    return idata["predictions"]["y_mean"].to_numpy()


def sample(
    method: str, net: str, data: Any, args: argparse.Namespace
) -> dict[str, Any]:
    """Equal gradients: the results, and a function that continues for some time."""
    kernel, warmup, draws = sampler(method, net, args)
    fields = ("num_steps",) if isinstance(kernel, NUTS) else ("num_gradients",)
    options = {
        "num_warmup": warmup,
        "num_samples": draws,
        "num_chains": args.num_chains,
    }
    mcmc = MCMC(kernel, chain_method="sequential", **options)
    call = (data.x_train, data.y_train)
    start = time.perf_counter()
    mcmc.warmup(jax.random.key(args.seed), *call, extra_fields=fields)
    warm_seconds = time.perf_counter() - start
    parts, seconds, gradients = [], 0.0, 0

    def go_on() -> None:
        nonlocal seconds, gradients
        start = time.perf_counter()
        mcmc.run(mcmc.post_warmup_state.rng_key, *call, extra_fields=fields)
        jax.block_until_ready(mcmc.last_state)
        seconds += time.perf_counter() - start
        gradients += gradients_of(mcmc)
        parts.append(functions_of(mcmc, data))
        mcmc.post_warmup_state = mcmc.last_state

    go_on()
    about = kernel.describe(mcmc.last_state) if hasattr(kernel, "describe") else {}

    def found() -> dict[str, Any]:
        function = np.concatenate(parts, axis=1)
        mixing = metrics.function_space(function)
        within = sum(metrics.function_space(chain[None]).ess_bulk for chain in function)
        return {
            "median_ess": float(np.median(mixing.ess_bulk)),
            "median_ess_within": float(np.median(within)),
            "min_ess_within": float(within.min()),
            "min_ess": float(mixing.ess_bulk.min()),
            "median_rhat": float(np.median(mixing.rhat)),
            "draws": int(function.shape[1]),
            "gradients": gradients,
            "seconds": seconds,
            "median_ess_per_second": float(np.median(mixing.ess_bulk)) / seconds,
            "median_ess_within_per_second": float(np.median(within)) / seconds,
            "median_ess_per_1000_gradients": 1000
            * float(np.median(mixing.ess_bulk))
            / gradients,
            "mean": function.mean((0, 1)).tolist(),
            "sd": function.std((0, 1)).tolist(),
        }

    return {
        "warmup_seconds": warm_seconds,
        "about": about,
        "go_on": go_on,
        "found": found,
    }


def compare(name: str, net: str, args: argparse.Namespace) -> dict[str, Any]:
    """All methods on one set and network, at equal gradients and then at
    equal seconds.
    """
    data = load(name, args.data)
    runs, report = {}, {}
    for method in args.methods:
        print(f"{name}, {net}, {method}", flush=True)
        runs[method] = sample(method, net, data, args)
        equal = runs[method]["found"]()
        report[method] = {
            "warmup_seconds": runs[method]["warmup_seconds"],
            "about": runs[method]["about"],
            "equal_gradients": equal,
        }
    most = max(rows["equal_gradients"]["seconds"] for rows in report.values())
    for method, run in runs.items():
        while (spent := run["found"]()["seconds"]) < most:
            run["go_on"]()
            if run["found"]()["seconds"] <= spent:
                break
        report[method]["equal_seconds"] = run["found"]()
    return report


# --------------------------------------------------------------------------------------
# step costs


def step_costs(net: str, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Time per gradient of a bare loop, of the engine with either integrator, and of
    eight vectorized chains.
    """
    data = load(name, args.data)
    call = (
        jnp.asarray(data.x_train, jnp.float32),
        jnp.asarray(data.y_train, jnp.float32),
    )
    info = initialize_model(
        jax.random.key(0),
        model_of(net),
        init_strategy=init_to_uniform,
        model_args=call,
        dynamic_args=True,
    )
    position, unravel = ravel_pytree(info.param_info.z)
    fn = info.potential_fn(*call)

    def potential(q: jax.Array) -> jax.Array:
        return fn(unravel(q))

    def bare(q: jax.Array) -> jax.Array:
        return lax.fori_loop(
            0, args.steps, lambda _, q: q - 1e-6 * jax.grad(potential)(q), q
        )

    calls: dict[str, tuple[Callable, int]] = {}
    flops = {}
    loop = jax.jit(bare).lower(position).compile()
    calls["bare gradient"] = partial(loop, position), args.steps
    single = jax.jit(jax.grad(potential)).lower(position).compile()
    flops["gradient"] = _flops(single)
    parts = {}
    for integrator in ("mclachlan", "leapfrog"):
        dynamics = sgmcmc.Microcanonical(10.0, integrator)
        whitening = sgmcmc.Diagonal(jnp.ones_like(position))
        part = sgmcmc.build(sgmcmc.Full(potential), dynamics, whitening, schedule=0.05)
        state = part.init(position, jax.random.key(1))
        number = max(args.steps // dynamics.evaluations, 1)
        run = jax.jit(part.run, static_argnums=1).lower(state, number).compile()
        calls[integrator] = partial(run, state), number * dynamics.evaluations
        flops[f"step, {integrator}"] = _flops(jax.jit(part.step).lower(state).compile())
        parts[integrator] = part, number
    part, number = parts["mclachlan"]
    states = jax.vmap(part.init, (None, 0))(
        position, jax.random.split(jax.random.key(2), 8)
    )
    several = partial(part.run, num_steps=number)
    many = jax.jit(jax.vmap(several)).lower(states).compile()
    spread = infer.parallel_vectorized(several)
    for name, call in {
        "eight chains": many,
        "eight chains, all devices": spread,
    }.items():
        jax.block_until_ready(call(states))
        calls[name] = partial(call, states), 8 * number * part.dynamics.evaluations
    times = wall_clock(interleave(calls, args.rounds))
    ratios = {
        f"{name} / bare gradient": median_ratio(times, name, "bare gradient")
        for name in ("mclachlan", "leapfrog")
    }
    for name in ("eight chains", "eight chains, all devices"):
        ratios[f"{name} / one, per gradient and chain"] = median_ratio(
            times, name, "mclachlan"
        )
    micro = {name: float(np.median(values)) for name, values in times.items()}
    return {
        "microseconds_per_gradient": micro,
        "ratios": ratios,
        "flops": flops,
        "parameters": position.size,
    }


def _flops(compiled: Any) -> float | None:
    analysis = compiled.cost_analysis()
    analysis = analysis[0] if isinstance(analysis, list) else analysis
    return (analysis or {}).get("flops")


def tables(report: dict[str, Any]) -> dict[str, str]:
    """Markdown tables by name: mixing of each sampler, and the cost of a step."""
    heads = [
        "posterior",
        "sampler",
        "ESS, median",
        "least",
        "within chains, median",
        "least",
        "median R-hat",
    ]
    heads += ["ESS/s", "within/s", "at equal seconds: ESS/s", "within/s"]
    mixing = []
    for case, methods in report["cases"].items():
        for method, found in methods.items():
            g, s = found["equal_gradients"], found["equal_seconds"]
            sizes = ("median_ess", "min_ess", "median_ess_within", "min_ess_within")
            rates = ("median_ess_per_second", "median_ess_within_per_second")
            cells = [f"{g[name]:.0f}" for name in sizes] + [f"{g['median_rhat']:.2f}"]
            cells += [f"{part[name]:.2f}" for part in (g, s) for name in rates]
            mixing.append([case, method, *cells])
    cost = [
        (case, name, f"{ratio:.2f}")
        for case, costs in report["step_costs"].items()
        for name, ratio in costs["ratios"].items()
    ]
    return {
        "microcanonical": markdown(heads, mixing),
        "microcanonical_cost": markdown(
            ("network", "ratio of times per gradient", ""), cost
        ),
    }


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    writable_file(args.output)
    one_device_per_core()
    report: dict[str, Any] = {
        "step_costs": {},
        "cases": {},
        **environment([]),
        "options": options_of(args),
    }
    report["devices"] = jax.local_device_count()

    def save(part: str, name: str, found: Any) -> None:
        report[part][name] = found
        write_report(args.output, report)

    for net in args.nets:
        save(
            "step_costs", f"{args.sets[0]}, {net}", step_costs(net, args.sets[0], args)
        )
    for name, net in product(args.sets if args.methods else [], args.nets):
        save("cases", f"{name}, {net}", compare(name, net, args))
    for name, text in tables(report).items():
        print(f"\n{text}")
        if args.methods or name == "microcanonical_cost":
            put_table(args.docs, name, text, report)
    return report


if __name__ == "__main__":
    main()
