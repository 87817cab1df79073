"""Groups with effects of their own, and a curve that nobody knows: a network inside a
hierarchical model.

Sixty groups (schools, hospitals, plots) with few or many rows each. The response is a
curve of two inputs, the same for all groups, plus an effect of the group, plus noise.
Three models are compared on new rows of the same groups: a network alone, a linear
model with effects of groups, and a network with effects of groups. The last one is also
sampled on minibatches of rows, and its effects are compared with those of NUTS.

    python -m examples.groups
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

import numpyro_bnn as bnn
from examples.shared import at_least, markdown, writable_folder

NOISE, SPREAD = 0.3, 0.7  # of an observation, and of the effects
NUTS_NAME, MINIBATCH = "NUTS", "SGNHT on minibatches"


class Rows(NamedTuple):
    x: jax.Array
    group: jax.Array
    y: jax.Array


def curve(x: np.ndarray) -> np.ndarray:
    return np.sin(2 * x[:, 0]) + 0.5 * x[:, 0] * x[:, 1]


def simulate(args: argparse.Namespace) -> tuple[Rows, Rows, np.ndarray]:
    """Training rows, ten new rows of each group, and the true effects."""
    rng = np.random.default_rng(args.seed)
    effects = SPREAD * rng.normal(size=args.groups)

    def rows(sizes: np.ndarray) -> Rows:
        group = np.repeat(np.arange(args.groups), sizes)
        x = (
            rng.normal(size=(len(group), 2)) + 0.5 * effects[group, None]
        )  # inputs differ between groups as well
        y = curve(x) + effects[group] + NOISE * rng.normal(size=len(group))
        return Rows(
            jnp.asarray(x, jnp.float32), jnp.asarray(group), jnp.asarray(y, jnp.float32)
        )

    return (
        rows(rng.integers(3, 41, args.groups)),
        rows(np.full(args.groups, 10)),
        effects,
    )


def model(x, group, y=None, groups=0, network=True, batch_size=None):
    # `groups=0`: no effects
    net = bnn.nn.MLP([10, 1], "tanh") if network else bnn.nn.Dense(1)
    f = bnn.random_network("net", net, x.shape[1:], bnn.priors.Hierarchical())
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    effect = jnp.zeros(1)
    if groups:
        tau = numpyro.sample("tau", dist.HalfNormal(1.0))
        with numpyro.plate("groups", groups):
            effect = tau * numpyro.sample("base", dist.Normal(0.0, 1.0))
        numpyro.deterministic("effect", effect)
    with numpyro.plate("rows", len(x), subsample_size=batch_size) as i:
        own = effect[group[i]] if groups else 0.0
        numpyro.sample(
            "y",
            dist.Normal(f(x[i])[..., 0] + own, sigma),
            obs=None if y is None else y[i],
        )


def sampled(kernel: Any, train: Rows, args: argparse.Namespace, **options: Any) -> MCMC:
    numbers = {
        "num_warmup": args.num_warmup,
        "num_samples": args.num_samples,
        "num_chains": args.num_chains,
    }
    mcmc = MCMC(kernel, chain_method="vectorized", progress_bar=False, **numbers)
    mcmc.run(jax.random.key(args.seed), *train, **options)
    return mcmc


def by_nuts(train: Rows, args: argparse.Namespace, **options: Any) -> MCMC:
    return sampled(NUTS(model, max_tree_depth=7), train, args, **options)


def by_minibatches(train: Rows, args: argparse.Namespace) -> MCMC:
    kernel = bnn.infer.SGNHT(
        model, steps_per_draw=args.steps_per_draw, bias_tolerance=0.02
    )
    options = {"groups": args.groups, "batch_size": min(args.batch_size, len(train.y))}
    return sampled(kernel, train, args, **options)


def score(mcmc: MCMC, new: Rows, **options: Any) -> float:
    """Mean log density of new rows."""
    predictions = {"x": new.x, "group": new.group, "y": new.y, **options}
    found = bnn.to_inference_data(
        mcmc, predictions=predictions, log_likelihood=False, posterior_predictive=False
    )
    return bnn.metrics.lppd(found["predictions"]["y_log_likelihood"]).value


def agreement(first: np.ndarray, second: np.ndarray) -> tuple[float, float, float]:
    """Root mean square difference of means in sds of the first, what Monte Carlo errors
    make of it, ratio of sds.
    """
    means, sds = (
        [d.mean((0, 1)) for d in (first, second)],
        [d.std((0, 1)) for d in (first, second)],
    )
    errors = [
        np.asarray(az.mcse(az.convert_to_dataset(d))["x"]) for d in (first, second)
    ]
    rms = np.sqrt(np.mean(((means[1] - means[0]) / sds[0]) ** 2))
    expected = np.sqrt(np.mean((errors[0] ** 2 + errors[1] ** 2) / sds[0] ** 2))
    return float(rms), float(expected), float(np.mean(sds[1] / sds[0]))


# -- the command -----------------------------------------------------------------------

MODELS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "network, no groups": lambda args: {"groups": 0},
    "linear, groups": lambda args: {"groups": args.groups, "network": False},
    "network, groups": lambda args: {"groups": args.groups},
}


def draw(effects: np.ndarray, draws: dict[str, np.ndarray], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(8.5, 3.4), layout="constrained")
    order = np.argsort(effects)
    for shift, (name, color) in enumerate(((NUTS_NAME, "0.35"), (MINIBATCH, "C3"))):
        mean, sd = draws[name].mean((0, 1))[order], draws[name].std((0, 1))[order]
        place = np.arange(len(order)) + 0.35 * shift
        ax.errorbar(
            place,
            mean,
            yerr=1.645 * sd,
            fmt=".",
            color=color,
            label=f"{name}: mean, 90 %",
        )
    ax.plot(np.arange(len(order)) + 0.17, effects[order], "k_", label="true effect")
    ax.set(xlabel="groups, by their effect", ylabel="effect", xticks=[])
    ax.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    folder = writable_folder(args.output)
    train, new, effects = simulate(args)
    report: dict[str, Any] = {"log_likelihood": {}}
    for name, options in MODELS.items():
        nuts = by_nuts(train, args, **options(args))
        report["log_likelihood"][name] = score(nuts, new, **options(args))
    draws = {NUTS_NAME: nuts, MINIBATCH: by_minibatches(train, args)}
    draws = {
        name: np.asarray(mcmc.get_samples(group_by_chain=True)["effect"])
        for name, mcmc in draws.items()
    }
    centered = {
        name: d - d.mean(-1, keepdims=True) for name, d in draws.items()
    }  # the level is also in the network
    report["agreement"] = agreement(centered[NUTS_NAME], centered[MINIBATCH])

    print(f"{len(train.y)} rows of {args.groups} groups, {len(new.y)} new ones\n")
    lines = [[name, f"{value:.3f}"] for name, value in report["log_likelihood"].items()]
    print(markdown(["model", "log likelihood of a new row"], lines))
    rms, expected, ratio = report["agreement"]
    print(
        f"\nEffects on minibatches beside NUTS: means differ by {rms:.2f} sds (Monte "
        f"Carlo errors alone: "
        f"{expected:.2f}), sds are {ratio:.2f} times as large."
    )
    draw(effects - effects.mean(), centered, folder / "groups.png")
    return report


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.groups",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--groups", type=int, default=60, help="number of groups")
    parser.add_argument(
        "--batch-size", type=int, default=200, help="rows of a minibatch"
    )
    parser.add_argument(
        "--steps-per-draw", type=int, default=50, help="steps of a draw on minibatches"
    )
    parser.add_argument(
        "--num-warmup", type=int, default=300, help="warm-up transitions per chain"
    )
    parser.add_argument("--num-samples", type=int, default=300, help="draws per chain")
    parser.add_argument("--num-chains", type=int, default=4, help="chains")
    parser.add_argument("--seed", type=int, default=0, help="of data and chains")
    parser.add_argument(
        "--output", type=Path, default=Path("output"), help="folder of the figure"
    )
    args = parser.parse_args(argv)
    at_least(parser, args, ("groups",), 3)
    at_least(parser, args, ("batch_size", "steps_per_draw", "num_warmup", "num_chains"))
    at_least(parser, args, ("num_samples",), 4)
    return args


if __name__ == "__main__":
    main()
