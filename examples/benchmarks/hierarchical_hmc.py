"""Effective draws per gradient in hierarchical networks: NUTS compared with long
trajectories.

In the networks each group of weights has a precision; the data are boston and Neal's
regression `rdata`. The samplers are NUTS on all sites of the non-centered model, and
Gibbs draws of the precisions with NUTS or `GHMC` for the weights, with and without
persistent momentum. The table shows the effective draws of the function at the training
inputs per 100,000 gradients, after warm-up. Writes JSON.

    python -m examples.benchmarks.hierarchical_hmc --data FOLDER --output
    output/hierarchical_hmc.json
"""

import argparse
import os
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro import handlers
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer import NUTS, Gibbs, init_to_uniform
from numpyro.infer.mcmc import MCMCKernel

import numpyro_bnn as bnn
from examples import loaders
from examples.benchmarks.shared import (
    environment,
    options_of,
    put_table,
    sample_chain,
    write_report,
)
from examples.neal import load_data
from examples.shared import at_least, markdown, writable_file
from numpyro_bnn import infer, priors


def rdata(x: jax.Array, y: jax.Array | None = None, centered: bool = True) -> None:
    """Neal's 1 8 1 / ih=0.05:0.5 bh=0.05:0.5 ho=x0.05:0.5 bo=100, noise 0.05:0.5."""
    prior = {
        "Dense_0.*": priors.GammaPrecision(
            0.05, 0.5, fan_in_scaling=False, centered=centered
        ),
        "Dense_1.kernel": priors.GammaPrecision(0.05, 0.5, centered=centered),
        "Dense_1.bias": priors.Normal(bias_scale=100.0),
    }
    observe(x, y, 8, prior, dist.Gamma(0.25, 0.25 * 0.05**2))


def boston(x: jax.Array, y: jax.Array | None = None, centered: bool = True) -> None:
    """13 20 1, with lighter-tailed priors of the precisions."""
    observe(
        x,
        y,
        20,
        priors.GammaPrecision(0.5, 1.0, centered=centered),
        dist.Gamma(1.0, 0.1),
    )


def observe(
    x: jax.Array, y: jax.Array | None, width: int, prior: Any, noise: dist.Distribution
) -> None:
    f = bnn.random_network("net", bnn.nn.MLP([width, 1], "tanh"), x.shape[1:], prior)
    precision = numpyro.sample("precision", noise)
    mean = numpyro.deterministic("mean", f(x)[..., 0])
    numpyro.sample("y", dist.Normal(mean, precision**-0.5), obs=y)


MODELS = {"boston": boston, "rdata": rdata}
SMALL = 0.2
WAYS = {
    "nuts": "NUTS, not centered",
    "gibbs-nuts": "Gibbs, NUTS",
    "long": "Gibbs, long trajectories",
    "persistent": "Gibbs, trajectories of a quarter, persistent momentum",
}


def kernel_of(way: str, model: Callable, args: argparse.Namespace) -> MCMCKernel:
    nuts = partial(NUTS, model, max_tree_depth=args.max_tree_depth)
    if way == "nuts":
        return nuts(init_strategy=partial(init_to_uniform, radius=SMALL))
    hmc = partial(infer.GHMC, model, num_steps=args.num_steps, warm_start=0.0)
    weights = {
        "gibbs-nuts": nuts,
        "long": hmc,
        "persistent": partial(
            hmc,
            num_steps=max(1, args.num_steps // 4),
            steps_per_draw=4,
            momentum_decay=args.momentum_decay,
        ),
    }[way]()
    return Gibbs([(infer.PrecisionGibbs(model), _precisions), (weights, None)])


def start_of(
    way: str, model: Callable, key: jax.Array, x: jax.Array
) -> dict[str, jax.Array] | None:
    """Small weights for a block of a Gibbs sampler, which otherwise starts at draws
    from the prior.

    With those, the first noise precision is so low, and the weights are so free, that
    units saturate for good.
    """
    if way == "nuts":
        return None  # its `init_strategy` sets the start
    sites = handlers.trace(handlers.seed(model, key)).get_trace(x)
    weights = {
        n: s["value"]
        for n, s in sites.items()
        if n.startswith("net/") and s["type"] == "sample"
    }
    weights = {
        name: value for name, value in weights.items() if not name.endswith("precision")
    }
    keys = random.split(key, len(weights))
    return {
        name: random.uniform(key, value.shape, minval=-SMALL, maxval=SMALL)
        for key, (name, value) in zip(keys, weights.items(), strict=True)
    }


def _precisions(trace: dict[str, Any]) -> list[str]:
    return [name for name in trace if name.endswith("precision")]


def keep(
    state: Any, draw: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The function, the noise, and gradients, of this transition (NUTS) or so far (our
    kernels).
    """
    inner = state.block_states[1] if hasattr(state, "block_states") else state
    gradients = (
        inner.num_gradients if hasattr(inner, "num_gradients") else inner.num_steps
    )
    return draw["mean"], jnp.log(draw["precision"]), gradients


def load(name: str, args: argparse.Namespace) -> tuple[jax.Array, jax.Array]:
    """Training rows, in float32: precisions may span ten orders of magnitude, the data
    do not.
    """
    if name == "rdata":
        data = load_data("rdata", args)
    elif args.data is None and not os.environ.get("NUMPYRO_BNN_DATA"):
        print("no data folder: the diabetes set of scikit-learn instead of boston")
        data = loaders.standardize(loaders.load_sklearn("diabetes"))
    else:
        data = loaders.standardize(loaders.load_uci(name, 0, args.data))
    return jnp.asarray(data.x_train, jnp.float32), jnp.asarray(
        data.y_train, jnp.float32
    )


def measure(name: str, way: str, args: argparse.Namespace) -> dict[str, Any]:
    model, (x, y) = MODELS[name], load(name, args)
    keys = random.split(random.key(args.seed), args.num_chains)
    lengths = args.num_warmup, args.num_samples
    call = ((x, y), {"centered": way != "nuts"})
    chains = [
        sample_chain(
            kernel_of(way, model, args),
            call,
            key,
            lengths,
            keep,
            start_of(way, model, key, x),
        )
        for key in keys
    ]
    mean, noise = (
        np.stack([np.asarray(kept[i], np.float64) for kept, _ in chains])
        for i in (0, 1)
    )
    gradients = sum(_spent(np.asarray(kept[2]), way) for kept, _ in chains)
    ess = effective_sample_size(mean)
    seconds = sum(cost["sampling"] for _, cost in chains)
    return {
        "set": name,
        "way": way,
        "gradients": gradients,
        "seconds": seconds,
        "function": {"median": float(np.median(ess)), "least": float(np.min(ess))},
        "noise": float(effective_sample_size(noise)),
        "largest r_hat": float(np.max(split_gelman_rubin(mean))),
        "mean log precision by chain": noise.mean(1).tolist(),
    }


def _spent(counts: np.ndarray, way: str) -> int:
    """Gradients of the kept transitions, from counts of each (NUTS) or totals (our
    kernels, without the first).
    """
    if "nuts" in way:
        return int(counts.sum())
    return int((counts[-1] - counts[0]) * len(counts) / (len(counts) - 1))


def table(rows: list[dict[str, Any]]) -> str:
    heads = [
        "set",
        "ESS per 100,000 gradients",
        "function, median",
        "least",
        "noise",
        "largest R-hat",
    ]
    lines = []
    for row in rows:
        per = 1e5 / row["gradients"]
        ess = (row["function"]["median"], row["function"]["least"], row["noise"])
        cells = [
            row["set"],
            WAYS[row["way"]],
            *(f"{per * value:.1f}" for value in ess),
            f"{row['largest r_hat']:.2f}",
        ]
        lines.append([*cells, f"{1e6 * row['seconds'] / row['gradients']:.1f}"])
    return markdown([*heads, "us per gradient"], lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.benchmarks.hierarchical_hmc",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--data",
        type=Path,
        default=None,
        help="folder of the data; otherwise NUMPYRO_BNN_DATA",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("output/hierarchical_hmc.json"),
        help="JSON file",
    )
    parser.add_argument("--docs", type=Path, help="page whose table shows the figures")
    parser.add_argument(
        "--sets", nargs="+", choices=MODELS, default=list(MODELS), help="data sets"
    )
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=list(WAYS), help="what to compare"
    )
    parser.add_argument(
        "--num-chains",
        type=int,
        default=4,
        help="chains of each way, one after the other",
    )
    parser.add_argument(
        "--num-warmup", type=int, default=1000, help="warm-up transitions of each chain"
    )
    parser.add_argument(
        "--num-samples",
        type=int,
        default=2000,
        help="transitions of each chain after that",
    )
    parser.add_argument(
        "--num-steps", type=int, default=64, help="leapfrogs per transition"
    )
    parser.add_argument(
        "--momentum-decay",
        type=float,
        default=0.15,
        help="share of the momentum replaced per trajectory",
    )
    parser.add_argument("--max-tree-depth", type=int, default=8, help="of NUTS")
    parser.add_argument(
        "--seed", type=int, default=0, help="of chains, and of simulated data"
    )
    args = parser.parse_args(argv)
    at_least(parser, args, ["num_chains", "num_steps", "max_tree_depth"])
    at_least(parser, args, ["num_warmup", "num_samples"], 4)
    return args


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    writable_file(args.output)
    rows = []
    for name, way in product(args.sets, args.ways):
        rows.append(measure(name, way, args))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
        report = {"rows": rows, **environment([]), "options": options_of(args)}
        write_report(args.output, report)
    put_table(args.docs, "hierarchical_hmc", table(rows), report)
    return report


if __name__ == "__main__":
    main()
