"""A physical model with a neural term: predators and prey whose functional response is
not known.

Pelts of hares and lynxes, 1900 to 1920, in thousands. Lotka and Volterra's equations
say that lynxes catch in proportion to u v. Here a network with weights of its own
learns by which factor f they depart from it,

    du/dt = alpha u - beta u v f(u, v),
    dv/dt = -gamma v + delta u v f(u, v),
    f = exp(network(log u, log v)),

so that alpha remains the growth of hares without lynxes, and gamma the death rate of
lynxes without hares. Both models are fitted to the pelts with the last years held out,
and to simulated data in which lynxes are satiated: their catch is u v / (1 + h u). A
model that is wrong about the catch is wrong about alpha and gamma, and sure of it.

    python -m examples.lotka_volterra --help
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, init_to_median

import numpyro_bnn as bnn
from examples.shared import at_least, markdown, writable_folder

# Counts of pelts by the Hudson's Bay Company (E. P. Odum, Fundamentals of Ecology,
# 1953), thousands per year.
HARES = (
    30,
    47.2,
    70.2,
    77.4,
    36.3,
    20.6,
    18.1,
    21.4,
    22,
    25.4,
    27.1,
    40.3,
    57,
    76.6,
    52.3,
    19.5,
    11.2,
    7.6,
    14.6,
)
HARES += (16.2, 24.7)
LYNXES = (
    4,
    6.1,
    9.8,
    35.2,
    59.4,
    41.7,
    19,
    13,
    8.3,
    9.1,
    7.4,
    8,
    12.3,
    19.5,
    45.7,
    51.1,
    29.7,
    15.8,
    9.7,
    10.1,
    8.6,
)
NAMES = ("alpha", "beta", "gamma", "delta")
TRUTH = (
    0.55,
    0.028,
    0.84,
    0.026,
)  # of the simulated data; near the posterior means for the pelts
SATIATION, NOISE = 0.01, 0.1  # h, and the noise of the simulated data
# of Runge and Kutta's method of order 4, per year: the error of a log count is below
# .001
SUBSTEPS = 4
SCALE = 0.5  # of the network's output: f is within a factor of three of 1
KINDS = {"physical": False, "with a network": True}


class Fit(NamedTuple):
    """What one model says of one data set."""

    kind: str
    intervals: dict[
        str, tuple[float, float, float]
    ]  # mean and 90 % interval of a parameter
    log_score: float  # of the years held out, per count
    rhat: float  # the largest of the parameters
    band: np.ndarray  # (2, years, 2) 90 % interval of a count


def solve(rates: Callable, state: jax.Array, years: int) -> jax.Array:
    """Log counts at the beginning of each year, (years, 2)."""
    h = 1.0 / SUBSTEPS

    def step(z: jax.Array, _: None) -> tuple[jax.Array, None]:
        a = rates(z)
        b = rates(z + h / 2 * a)
        c = rates(z + h / 2 * b)
        return z + h / 6 * (a + 2 * b + 2 * c + rates(z + h * c)), None

    def year(z: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        after, _ = jax.lax.scan(step, z, length=SUBSTEPS, unroll=True)
        return after, after

    _, later = jax.lax.scan(year, state, length=years - 1)
    return jnp.concatenate([state[None], later])


def rates_of(
    alpha: Any, beta: Any, gamma: Any, delta: Any, factor: Callable
) -> Callable:
    """Rates of change of the log counts; a wild proposal must not overflow."""

    def rates(z: jax.Array) -> jax.Array:
        hares, lynxes = jnp.exp(jnp.clip(z, -5.0, 8.0))
        f = factor(z)
        return jnp.stack([alpha - beta * lynxes * f, -gamma + delta * hares * f])

    return rates


def model(years: int, counts: np.ndarray | None = None, neural: bool = True) -> None:
    """Counts of the first years are observed; with ``years`` beyond them it also
    forecasts.
    """
    rate = dist.LogNormal(np.log([0.5, 0.03, 0.8, 0.03]), 0.5).to_event(1)
    theta = numpyro.sample("theta", rate)
    sigma = numpyro.sample("sigma", dist.LogNormal(-1.5, 0.7).expand([2]).to_event(1))
    start = numpyro.sample("start", dist.Normal(np.log([30.0, 5.0]), 0.5).to_event(1))

    def factor(z: jax.Array) -> jax.Array | float:
        return 1.0

    if neural:
        net = bnn.random_network(
            "net", bnn.nn.MLP([8, 1], "tanh"), (2,), bnn.priors.Normal()
        )

        def factor(z: jax.Array) -> jax.Array:
            return jnp.exp(SCALE * net(z[None] - jnp.log(20.0))[0, 0])

    path = numpyro.deterministic("path", solve(rates_of(*theta, factor), start, years))
    seen = path if counts is None else path[: len(counts)]
    numpyro.sample("counts", dist.LogNormal(seen, sigma).to_event(2), obs=counts)


def simulated(seed: int, years: int) -> np.ndarray:
    """Counts (years, 2) where lynxes are satiated."""
    rates = rates_of(*TRUTH, lambda z: 1 / (1 + SATIATION * jnp.exp(z[0])))
    path = solve(rates, jnp.log(jnp.array([30.0, 5.0])), years)
    return np.exp(path + NOISE * jax.random.normal(jax.random.key(seed), path.shape))


def sampler(kind: str, years: int, args: argparse.Namespace) -> MCMC:
    """One model; it is compiled once for all data sets of one length."""
    kernel = NUTS(
        partial(model, years, neural=KINDS[kind]),
        init_strategy=init_to_median(),
        max_tree_depth=args.max_tree_depth,
        dense_mass=[("theta", "sigma", "start")],
    )
    numbers = {
        "num_warmup": args.num_warmup,
        "num_samples": args.num_samples,
        "num_chains": args.num_chains,
    }
    return MCMC(
        kernel,
        progress_bar=False,
        chain_method="sequential",
        jit_model_args=True,
        **numbers,
    )


def fit(mcmc: MCMC, kind: str, counts: np.ndarray, held_out: int, seed: int) -> Fit:
    """Sample one model, and score its forecast of the last years."""
    mcmc.run(jax.random.key(seed), counts[: len(counts) - held_out])
    draws = mcmc.get_samples()
    theta, by_chain = draws["theta"], mcmc.get_samples(group_by_chain=True)["theta"]
    low, high = np.quantile(theta, [0.05, 0.95], axis=0)
    held = {
        n: (float(theta[:, i].mean()), float(low[i]), float(high[i]))
        for i, n in enumerate(NAMES)
    }
    log_score = float("nan")
    if held_out:
        future = dist.LogNormal(
            draws["path"][:, -held_out:], draws["sigma"][:, None]
        ).log_prob(counts[-held_out:])
        log_score = float(
            bnn.metrics.lppd(np.asarray(future).reshape(len(theta), -1)).value
        )
    noise = draws["sigma"][:, None] * jax.random.normal(
        jax.random.key(seed), draws["path"].shape
    )
    band = np.exp(np.quantile(draws["path"] + noise, [0.05, 0.95], axis=0))
    rhat = float(numpyro.diagnostics.split_gelman_rubin(np.asarray(by_chain)).max())
    return Fit(kind, held, log_score, rhat, band)


def draw_figure(path: Path, fits: list[Fit], counts: np.ndarray, held_out: int) -> None:
    """The pelts with both forecasts."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    years = 1900 + np.arange(len(counts))
    figure, axes = plt.subplots(
        1, 2, figsize=(9, 3.6), layout="constrained", sharex=True
    )
    for i, (ax, animal) in enumerate(zip(axes, ("hares", "lynxes"), strict=True)):
        for f, color in zip(fits, ("C1", "C0"), strict=True):
            ax.fill_between(
                years,
                *f.band[:, :, i],
                color=color,
                alpha=0.3,
                lw=0,
                label=f"{f.kind}, 90 %",
            )
        ax.plot(years, counts[:, i], "k.", label="pelts")
        ax.axvline(years[-1] - held_out + 0.5, color="0.5", ls=":", lw=1)
        ax.set(xlabel="year", ylabel=f"pelts of {animal} (thousands)", yscale="log")
        ax.set_xticks(years[::5])
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter("")
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3
    )
    figure.savefig(path, dpi=200)
    plt.close(figure)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.lotka_volterra",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--held-out",
        type=int,
        default=4,
        help="last years of the pelts that are forecast",
    )
    parser.add_argument("--data-sets", type=int, default=10, help="simulated data sets")
    parser.add_argument(
        "--num-warmup", type=int, default=300, help="warm-up transitions per chain"
    )
    parser.add_argument("--num-samples", type=int, default=300, help="draws per chain")
    parser.add_argument("--num-chains", type=int, default=2, help="chains")
    parser.add_argument(
        "--max-tree-depth", type=int, default=7, help="NUTS takes at most 2^depth steps"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the chains and the simulated data"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("output"),
        help="folder of the figures as JSON and the plot",
    )
    args = parser.parse_args(argv)
    at_least(
        parser,
        args,
        (
            "held_out",
            "data_sets",
            "num_warmup",
            "num_samples",
            "num_chains",
            "max_tree_depth",
        ),
    )
    if args.held_out > 15:
        parser.error("--held-out must leave at least 6 of the 21 years")
    return args


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    folder = writable_folder(args.output)
    pelts = np.stack([HARES, LYNXES], axis=1).astype(np.float32)
    samplers = {kind: sampler(kind, len(pelts), args) for kind in KINDS}
    fits = [
        fit(samplers[kind], kind, pelts, args.held_out, args.seed) for kind in KINDS
    ]
    cells = []
    for f in fits:
        intervals = [
            "{:.3f} ({:.3f} to {:.3f})".format(*f.intervals[name]) for name in NAMES
        ]
        cells.append([f.kind, *intervals, f"{f.log_score:.2f}", f"{f.rhat:.2f}"])
    print(
        f"Pelts, the last {args.held_out} years held out: mean and 90 % interval; log "
        f"score of a count to come"
    )
    print(markdown(("model", *NAMES, "log score", "R-hat"), cells))

    covered: dict[str, dict[str, int]] = {
        kind: dict.fromkeys(NAMES, 0) for kind in KINDS
    }
    bias: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    for k in range(args.data_sets):
        counts = simulated(args.seed + k, len(pelts))
        for kind in KINDS:
            found = fit(samplers[kind], kind, counts, 0, args.seed).intervals
            bias[kind].append(
                [found[n][0] / true - 1 for n, true in zip(NAMES, TRUTH, strict=True)]
            )
            for name, true in zip(NAMES, TRUTH, strict=True):
                covered[kind][name] += found[name][1] < true < found[name][2]
    means = {kind: np.mean(errors, axis=0) for kind, errors in bias.items()}
    cells = [
        [
            kind,
            *(
                f"{covered[kind][n]} ({means[kind][i]:+.0%})"
                for i, n in enumerate(NAMES)
            ),
        ]
        for kind in KINDS
    ]
    print(
        f"\nSimulated, lynxes satiated: 90 % intervals that hold the truth, of "
        f"{args.data_sets} (mean error)"
    )
    print(markdown(("model", *NAMES), cells))
    report = {
        "pelts": {
            f.kind: {"intervals": f.intervals, "log_score": f.log_score, "rhat": f.rhat}
            for f in fits
        },
        "covered": covered,
        "errors": {kind: mean.tolist() for kind, mean in means.items()},
    }
    (folder / "lotka_volterra.json").write_text(json.dumps(report, indent=1) + "\n")
    draw_figure(folder / "lotka_volterra.png", fits, pelts, args.held_out)
    return report


if __name__ == "__main__":
    main()
