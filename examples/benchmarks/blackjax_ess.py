"""Effective draws per gradient: two samplers of BlackJAX compared with NUTS of NumPyro
and with `MCLMC`.

The posteriors are a Gaussian whose widest direction is 30 times its narrowest, in a
random basis, and a regression network, of which the function at the training inputs
counts. The table shows the smallest and the median effective number of draws per 1,000
gradients after warm-up, and the gradients of the warm-up. Writes JSON.

    python -m examples.benchmarks.blackjax_ess --output output/blackjax_ess.json
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer import MCMC, NUTS
from numpyro.infer.mcmc import MCMCKernel

import numpyro_bnn as bnn
from examples.benchmarks.shared import environment, options_of, write_report
from examples.shared import at_least, writable_file
from numpyro_bnn import infer

SIZE, CONDITION = 30, 30.0


def gaussian() -> None:
    """A Gaussian with correlations."""
    basis = np.linalg.qr(np.random.default_rng(0).normal(size=(SIZE, SIZE)))[0]
    scales = np.geomspace(1.0, CONDITION, SIZE)
    factor = jnp.asarray(basis * scales)
    covariance = factor @ factor.T
    numpyro.sample("f", dist.MultivariateNormal(jnp.zeros(SIZE), covariance))


def network() -> None:
    """A network for 40 rows."""
    x = jnp.linspace(-2, 2, 40)[:, None]
    y = jnp.sin(2 * x[:, 0]) + 0.2 * random.normal(random.key(0), (40,))
    net = bnn.random_network(
        "net", bnn.nn.MLP([8, 1], "tanh"), x.shape[1:], bnn.priors.Hierarchical()
    )
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    f = numpyro.deterministic("f", net(x)[..., 0])
    numpyro.sample("y", dist.Normal(f, sigma).to_event(1), obs=y)


MODELS = {"gaussian": gaussian, "network": network}


def kernel_of(way: str, model: Callable) -> MCMCKernel:
    import blackjax

    if way == "NUTS":
        return NUTS(model)
    if way == "MCLMC":
        return infer.MCLMC(model, steps_per_draw=10)
    if way == "NUTS, low rank":
        adaptation = blackjax.window_adaptation_low_rank
        return infer.BlackJAX(model, blackjax.nuts, adaptation)
    adaptation = blackjax.adjusted_mclmc_find_L_and_step_size
    algorithm = blackjax.adjusted_mclmc_dynamic
    return infer.BlackJAX(model, algorithm, adaptation, steps_per_draw=5)


WAYS = ("NUTS", "NUTS, low rank", "MAMS", "MCLMC")


def measure(name: str, way: str, args: argparse.Namespace) -> dict[str, Any]:
    """One way on one posterior."""
    mcmc = MCMC(
        kernel_of(way, MODELS[name]),
        num_warmup=args.num_warmup,
        num_samples=args.num_samples,
        num_chains=args.num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    field = "num_steps" if way == "NUTS" else "num_gradients"
    mcmc.warmup(random.key(args.seed), collect_warmup=True, extra_fields=(field,))
    before = _gradients(mcmc, way)
    mcmc.run(random.key(args.seed + 1), extra_fields=(field,))
    spent = _gradients(mcmc, way) - (0 if way == "NUTS" else before)
    f = np.asarray(mcmc.get_samples(group_by_chain=True)["f"])
    per_thousand = 1000 * effective_sample_size(f) / spent
    return {
        "posterior": name,
        "way": way,
        "smallest": float(np.min(per_thousand)),
        "median": float(np.median(per_thousand)),
        "r_hat": float(np.max(split_gelman_rubin(f))),
        "sd": float(np.mean(f.std((0, 1)))),
        "gradients": int(spent),
        "warm-up gradients": int(before),
    }


def _gradients(mcmc: MCMC, way: str) -> int:
    """Gradients of all chains: NUTS gives those of each draw, others their sum so
    far.
    """
    if way == "NUTS":
        return int(np.sum(mcmc.get_extra_fields()["num_steps"]))
    return int(np.sum(jax.device_get(mcmc.last_state.num_gradients)))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.benchmarks.blackjax_ess",
        description=__doc__.split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--posteriors", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--num-chains", type=int, default=4, help="vectorized")
    parser.add_argument("--num-warmup", type=int, default=1000, help="transitions")
    parser.add_argument("--num-samples", type=int, default=1000, help="of each chain")
    parser.add_argument("--seed", type=int, default=0, help="seed of the chains")
    default = Path("output/blackjax_ess.json")
    parser.add_argument("--output", type=Path, default=default, help="JSON file")
    args = parser.parse_args(argv)
    at_least(parser, args, ("num_chains",), 2)
    at_least(parser, args, ("num_warmup", "num_samples"), 4)
    return args


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measure all ways on all posteriors."""
    args = parse(argv)
    output = writable_file(args.output)
    report = {"rows": [], **environment(["blackjax"]), "options": options_of(args)}
    for name in args.posteriors:
        for way in args.ways:
            report["rows"].append(measure(name, way, args))
            print(report["rows"][-1])
            write_report(output, report)
    return report


if __name__ == "__main__":
    main()
