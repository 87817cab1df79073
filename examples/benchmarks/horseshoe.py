"""Horseshoe regression with more inputs than data: Gibbs sampling with
`PrecisionGibbs`, compared with NUTS.

200 inputs, 5 of them relevant, 100 rows. The Gibbs sampler draws the global scale and
the noise with the coefficients integrated out, then the coefficients (together one
`CustomGibbs` block), then the local scales (`PrecisionGibbs`), all in the centered
model; NUTS samples the non-centered one. Both run in one process. The report shows
which inputs they find, the posterior of the global scale, and effective draws per
second of sampling, without compilation and warm-up. Writes JSON.

    python -m examples.benchmarks.horseshoe --output output/horseshoe.json
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import lax, random
from numpyro.diagnostics import effective_sample_size, gelman_rubin
from numpyro.infer import NUTS, CustomGibbs, Gibbs
from numpyro.infer.mcmc import MCMCKernel

from examples.benchmarks.shared import (
    environment,
    options_of,
    sample_chain,
    write_report,
)
from examples.shared import at_least, writable_file
from numpyro_bnn.infer import PrecisionGibbs

RELEVANT = (3.0, -2.5, 2.0, -2.0, 1.5)
LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
GLOBAL = ("tau", "sigma")
# Steps of the random walk on the logarithms of the global scales, and their standard
# deviations.
WALK_STEPS, WALK_SD = 50, (0.5, 0.2)


def make_data(rows: int, inputs: int, seed: int) -> tuple[jax.Array, jax.Array]:
    """x ~ N(0, 1), noise of sd 1, the first inputs relevant."""
    key_x, key_noise = random.split(random.key(seed))
    x = random.normal(key_x, (rows, inputs))
    relevant = jnp.array(RELEVANT)
    return x, x[:, : relevant.size] @ relevant + random.normal(key_noise, (rows,))


def model(x: jax.Array, y: jax.Array | None = None, centered: bool = True) -> None:
    inputs = x.shape[1]
    sigma = numpyro.sample("sigma", dist.HalfCauchy(1.0))
    tau = numpyro.sample("tau", dist.HalfCauchy(1.0))
    local = numpyro.sample("lambda", dist.HalfCauchy(1.0).expand([inputs]).to_event(1))
    if centered:
        beta = numpyro.sample("beta", dist.Normal(0.0, tau * local).to_event(1))
    else:
        unit = numpyro.sample(
            "unit", dist.Normal(0.0, 1.0).expand([inputs]).to_event(1)
        )
        beta = numpyro.deterministic("beta", tau * local * unit)
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)


def draw_weights_and_scales(
    x: jax.Array,
    y: jax.Array,
    *,
    rng_key: jax.Array,
    gibbs_sites: dict[str, jax.Array],
    hmc_sites: dict[str, jax.Array],
) -> dict[str, jax.Array]:
    """Update the global scale and the noise with the coefficients integrated out; draw
    the coefficients given both.

    With the singular values of the scaled inputs, the marginal density of y costs O(N)
    for every pair of scales, so many steps of random-walk Metropolis on their
    logarithms cost less than the decomposition.
    """
    key_walk, key_prior, key_noise = random.split(rng_key, 3)
    left, singular, right = jnp.linalg.svd(x * hmc_sites["lambda"], full_matrices=False)
    reached = left.T @ y
    missed = y - left @ reached  # zero unless there are more rows than inputs
    degrees = y.size - singular.size

    def log_density(logs: jax.Array) -> jax.Array:
        tau, sigma = jnp.exp(logs)
        sd = jnp.sqrt((tau * singular) ** 2 + sigma**2)
        prior = jnp.sum(dist.HalfCauchy(1.0).log_prob(jnp.exp(logs)) + logs)
        rest = -degrees * logs[1] - 0.5 * jnp.sum((missed / sigma) ** 2)
        return prior + rest + jnp.sum(dist.Normal(0.0, sd).log_prob(reached))

    def step(state: tuple, moves: tuple) -> tuple:
        (at, log_p), (jump, level) = state, moves
        log_q = log_density(at + jump)
        return jax.tree.map(
            partial(jnp.where, level < log_q - log_p), (at + jump, log_q), (at, log_p)
        ), None

    key_jump, key_level = random.split(key_walk)
    jumps = jnp.array(WALK_SD) * random.normal(key_jump, (WALK_STEPS, len(GLOBAL)))
    levels = -random.exponential(key_level, (WALK_STEPS,))
    start = jnp.log(jnp.stack([gibbs_sites[name] for name in GLOBAL]))
    (logs, _), _ = lax.scan(step, (start, log_density(start)), (jumps, levels))
    tau, sigma = jnp.exp(logs)
    # A draw of the prior, shifted to where it meets the data (Bhattacharya, Chakraborty
    # & Mallick 2016, algorithm 1).
    unit, noise = (
        random.normal(key_prior, (x.shape[1],)),
        random.normal(key_noise, singular.shape),
    )
    gain = tau * singular / ((tau * singular) ** 2 + sigma**2)
    unit += right.T @ (
        gain * (reached - sigma * noise - tau * singular * (right @ unit))
    )
    return {"tau": tau, "sigma": sigma, "beta": tau * hmc_sites["lambda"] * unit}


def composite(data: tuple[jax.Array, jax.Array]) -> Gibbs:
    block = CustomGibbs(partial(draw_weights_and_scales, *data))
    return Gibbs([(block, ["beta", *GLOBAL]), (PrecisionGibbs(model), ["lambda"])])


def keep(state: Any, draw: dict[str, jax.Array]) -> tuple:
    counts = (
        jnp.asarray(getattr(state, "diverging", False)),
        jnp.asarray(getattr(state, "num_steps", 0)),
    )
    return {name: draw[name] for name in (*GLOBAL, "beta")}, counts


def sample(
    kernel: Callable[[], MCMCKernel],
    call: tuple,
    num_samples: int,
    args: argparse.Namespace,
) -> tuple:
    """Draws (C, S, ...) of all chains, one after the other, and sums of their costs."""
    keys = random.split(random.key(args.seed + 1), args.num_chains)
    chains = [
        sample_chain(kernel(), call, key, (args.num_warmup, num_samples), keep)
        for key in keys
    ]
    first = chains[0][0][0]
    draws = {
        name: np.stack([np.asarray(kept[0][name]) for kept, _ in chains])
        for name in first
    }
    cost = {
        phase: sum(seconds[phase] for _, seconds in chains) for phase in chains[0][1]
    }
    for position, name in enumerate(("divergences", "gradients")):
        cost[name] = sum(int(kept[1][position].sum()) for kept, _ in chains)
    return draws, cost


def summary(draws: dict[str, np.ndarray], cost: dict[str, float]) -> dict[str, Any]:
    """The part of the report about one sampler."""
    log_tau = np.log(draws["tau"].astype(np.float64))
    size = np.abs(draws["beta"].mean((0, 1)))
    ess = {name: float(effective_sample_size(np.log(draws[name]))) for name in GLOBAL}
    weights = effective_sample_size(draws["beta"])
    ess |= {
        "beta, median": float(np.median(weights)),
        "beta, least": float(np.min(weights)),
    }
    return {
        "top inputs": np.argsort(-size)[: len(RELEVANT) + 1].tolist(),
        "their |mean|": np.sort(size)[::-1][: len(RELEVANT) + 1].tolist(),
        "log tau": {
            "mean": float(log_tau.mean()),
            "sd": float(log_tau.std()),
            "mcse": float(log_tau.std() / ess["tau"] ** 0.5),
            "quantiles": dict(
                zip(
                    map(str, LEVELS), np.quantile(log_tau, LEVELS).tolist(), strict=True
                )
            ),
            "r_hat": float(gelman_rubin(log_tau)) if len(log_tau) > 1 else None,
        },
        "draws": int(log_tau.size),
        "cost": cost,
        "ess": ess,
        "ess per second": {
            name: value / cost["sampling"] for name, value in ess.items()
        },
    }


def compare(gibbs: dict[str, Any], nuts: dict[str, Any]) -> dict[str, Any]:
    """Exactness of the ranking, agreement on the global scale, and speed."""
    one, other = gibbs["log tau"], nuts["log tau"]
    per_second = gibbs["ess per second"], nuts["ess per second"]
    expected = set(range(len(RELEVANT)))
    tops = (set(part["top inputs"][: len(RELEVANT)]) for part in (gibbs, nuts))
    return {
        "ranking exact": dict(
            zip(("gibbs", "nuts"), [top == expected for top in tops], strict=True)
        ),
        "difference of mean log tau in mcse": (one["mean"] - other["mean"])
        / np.hypot(one["mcse"], other["mcse"]),
        "ess per second, gibbs / nuts": {
            name: per_second[0][name] / per_second[1][name] for name in per_second[0]
        },
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.benchmarks.horseshoe",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--output", type=Path, default=Path("output/horseshoe.json"), help="JSON file"
    )
    parser.add_argument("--rows", type=int, default=100, help="data points")
    parser.add_argument(
        "--inputs", type=int, default=200, help="inputs, of which 5 are relevant"
    )
    parser.add_argument(
        "--num-chains",
        type=int,
        default=4,
        help="chains of each sampler, one after the other",
    )
    parser.add_argument(
        "--num-warmup", type=int, default=1000, help="warm-up transitions of each chain"
    )
    parser.add_argument(
        "--sweeps",
        type=int,
        default=5000,
        help="draws of each chain of the Gibbs sampler",
    )
    parser.add_argument(
        "--nuts-draws", type=int, default=1500, help="draws of each chain of NUTS"
    )
    parser.add_argument(
        "--target-accept-prob",
        type=float,
        default=0.98,
        help="of NUTS, which diverges at smaller values",
    )
    parser.add_argument("--max-tree-depth", type=int, default=10, help="of NUTS")
    parser.add_argument("--seed", type=int, default=0, help="of data and chains")
    args = parser.parse_args(argv)
    at_least(parser, args, ["num_chains", "num_warmup", "rows", "max_tree_depth"])
    at_least(parser, args, ["sweeps", "nuts_draws"], 4)
    at_least(parser, args, ["inputs"], len(RELEVANT) + 1)
    at_least(parser, args, ["seed"], 0)
    if not 0 < args.target_accept_prob < 1:
        parser.error("--target-accept-prob must lie between 0 and 1")
    return args


def print_report(report: dict[str, Any]) -> None:
    for name in ("gibbs", "nuts"):
        part = report[name]
        tau, cost = part["log tau"], part["cost"]
        print(
            f"\n{name}: {part['draws']} draws in {cost['sampling']:.1f} s, "
            f"{cost['divergences']} divergences"
        )
        print(
            f"  largest |mean|: {part['top inputs']}, "
            f"{[round(size, 2) for size in part['their |mean|']]}"
        )
        print(
            f"  log tau: {tau['mean']:.3f} (mcse {tau['mcse']:.3f}), sd "
            f"{tau['sd']:.3f}, r_hat {tau['r_hat']}"
        )
        print(
            "  quantiles:",
            {level: round(value, 3) for level, value in tau["quantiles"].items()},
        )
        print(
            "  ESS/s:",
            {what: round(value, 1) for what, value in part["ess per second"].items()},
        )
    for what, found in report["comparison"].items():
        print(f"{what}: {found}")


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    writable_file(args.output)
    data = make_data(args.rows, args.inputs, args.seed)
    nuts = partial(
        NUTS,
        model,
        target_accept_prob=args.target_accept_prob,
        max_tree_depth=args.max_tree_depth,
    )
    found = {
        "gibbs": summary(
            *sample(partial(composite, data), (data, {}), args.sweeps, args)
        ),
        "nuts": summary(
            *sample(nuts, (data, {"centered": False}), args.nuts_draws, args)
        ),
    }
    report = {
        **found,
        "comparison": compare(**found),
        **environment([]),
        "options": options_of(args),
    }
    print_report(report)
    write_report(args.output, report)
    return report


if __name__ == "__main__":
    main()
