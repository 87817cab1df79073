"""A latent neural population model with an amortized guide, compared with the best Gaussian for each data point.

Counts of K neurons in N time bins are Poisson with log rates C z_n + d. A network maps the counts of a bin to the
mean and sd of q(z_n | y_n). It is trained on minibatches together with q(C, d), and then gives the posterior of new
bins without further training. For this likelihood the ELBO of a bin has a closed form and one maximum, so the
amortization gap, which is what the network loses compared with optimizing each bin separately, is known exactly.

    python -m examples.amortized --help
"""

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from examples.shared import at_least, writable_folder

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")


class Data(NamedTuple):
    """Counts (N, K), and the parameters that they were simulated from."""

    counts: Any
    latents: Any
    log_rates: Any


class Scores(NamedTuple):
    """One row of the table; ELBO and gaps in nats per bin."""

    network: str
    rows: str
    elbo: float
    gap: float
    gap_se: float
    worst_gap: float
    mean_error: float
    sd_ratio: float
    r_squared: float
    coverage: float
    seconds: float


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.amortized",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--neurons", type=int, default=40, help="K")
    parser.add_argument("--latents", type=int, default=2, help="dimensions of z_n")
    parser.add_argument("--train-rows", type=int, default=10_000, help="bins to learn from")
    parser.add_argument("--new-rows", type=int, default=1000, help="new bins to score, and as many training bins")
    parser.add_argument("--widths", type=int, nargs="+", default=[8, 64], help="hidden units, one network each")
    parser.add_argument("--num-steps", type=int, default=20_000, help="minibatch steps")
    parser.add_argument("--batch-size", type=int, default=100, help="bins of a minibatch")
    parser.add_argument("--point-steps", type=int, default=2000, help="optimizer steps for each bin")
    parser.add_argument("--num-draws", type=int, default=200, help="posterior draws for the coverage of log rates")
    parser.add_argument("--seed", type=int, default=0, help="seed of simulation and learning")
    parser.add_argument("--output", type=Path, default=Path("output"), help="folder of the figure")
    args = parser.parse_args(argv)
    at_least(parser, args, [name for name in vars(args) if name not in ("seed", "output")])
    return args


def simulate(args: argparse.Namespace) -> tuple[Data, Data]:
    """Latents that move smoothly in time; the model treats each bin separately. New bins lie among the others."""
    draws = np.random.default_rng(args.seed)
    size = args.train_rows + args.new_rows
    noise = draws.normal(size=(size + 400, args.latents))
    window = np.exp(-0.5 * (np.arange(-100, 101) / 25) ** 2)
    smooth = np.stack([np.convolve(column, window, "same") for column in noise.T], 1)[200:-200]
    latents = smooth / np.sqrt((window**2).sum())
    loadings = draws.normal(size=(args.latents, args.neurons)) * (0.6 / args.latents) ** 0.5
    log_rates = latents @ loadings + draws.normal(0.3, 0.5, args.neurons)
    data = Data(draws.poisson(np.exp(log_rates)).astype(np.float32), latents, log_rates)
    is_new = np.zeros(size, bool)
    is_new[draws.choice(size, args.new_rows, replace=False)] = True
    return Data(*(part[~is_new] for part in data)), Data(*(part[is_new] for part in data))


def population(counts: Any, num_latents: int, batch_size: int | None = None) -> None:
    """y_n ~ Poisson(exp(z_n C + d)), z_n ~ N(0, I)."""
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist

    num_rows, neurons = counts.shape
    loadings = numpyro.sample("loadings", dist.Normal(0.0, 1.0).expand([num_latents, neurons]).to_event(2))
    offset = numpyro.sample("offset", dist.Normal(0.0, 2.0).expand([neurons]).to_event(1))
    with numpyro.plate("bins", num_rows, subsample_size=batch_size) as n:
        z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([num_latents]).to_event(1))
        log_rate = z @ loadings + offset[None]
        numpyro.sample("counts", dist.Poisson(jnp.exp(log_rate)).to_event(1), obs=jnp.asarray(counts)[n])


def root_counts(counts: Any, *_: Any, **__: Any) -> Any:
    """Inputs of the network: their variance does not grow with the rate."""
    return np.sqrt(counts)


def learn(width: int, train: Data, args: argparse.Namespace) -> tuple[Any, Any, float]:
    """Guide with one hidden layer, its parameters, seconds."""
    import jax
    import optax
    from numpyro.infer import SVI, TraceMeanField_ELBO

    from numpyro_bnn import guides, nn

    network = nn.Sequential([nn.Dense(width), "tanh"])
    guide = guides.AutoAmortized(population, root_counts, network)
    schedule = optax.cosine_decay_schedule(5e-3, args.num_steps)
    svi = SVI(population, guide, optax.adam(schedule), TraceMeanField_ELBO())
    start = time.perf_counter()
    batch_size = min(args.batch_size, args.train_rows)
    fit = svi.run(
        jax.random.key(args.seed), args.num_steps, train.counts, args.latents, batch_size, progress_bar=False
    )
    jax.block_until_ready(fit.params)
    return guide, fit.params, time.perf_counter() - start


def point_elbo(mean: Any, sd: Any, counts: Any, loadings: Any, offset: Any) -> Any:
    """ELBO of each bin for q = N(mean, sd^2) at fixed loadings: E exp(c z) = exp(c mean + c^2 sd^2 / 2)."""
    import jax.numpy as jnp
    from jax.scipy.special import gammaln

    log_rate = mean @ loadings + offset[None]
    expected_rate = jnp.exp(log_rate + 0.5 * sd**2 @ loadings**2)
    kl = 0.5 * (mean**2 + sd**2 - 1) - jnp.log(sd)
    return (counts * log_rate - expected_rate - gammaln(counts + 1)).sum(-1) - kl.sum(-1)


def best_of_each(counts: Any, loadings: Any, offset: Any, num_steps: int) -> tuple[Any, Any]:
    """The best mean and sd of every bin, optimized separately; the objective is concave in both."""
    import jax
    import jax.numpy as jnp
    import optax

    optimizer = optax.adam(optax.cosine_decay_schedule(0.05, num_steps))
    start = jnp.zeros((2, counts.shape[0], loadings.shape[0]))  # means and log sds: the prior

    def loss(found: Any) -> Any:
        return -point_elbo(found[0], jnp.exp(found[1]), counts, loadings, offset).sum()

    def step(carry: tuple, _: Any) -> tuple:
        found, state = carry
        updates, state = optimizer.update(jax.grad(loss)(found), state)
        return (optax.apply_updates(found, updates), state), None

    run = jax.jit(lambda found: jax.lax.scan(step, (found, optimizer.init(found)), None, num_steps)[0][0])
    found = run(start)
    return found[0], jnp.exp(found[1])


def compare(name: str, rows: str, data: Data, fit: tuple[Any, Any, float], args: argparse.Namespace) -> tuple:
    """The amortized q of each bin compared with the best one, at the posterior median of C and d."""
    import jax
    import jax.numpy as jnp

    guide, params, seconds = fit
    low, middle, high = guide.quantiles(params, [0.16, 0.5, 0.84], data.counts, args.latents)["z"]
    medians = guide.median(params, data.counts, args.latents)
    loadings, offset = medians["loadings"], medians["offset"]
    mean, sd = middle, (high - low) / (2 * 0.994458)
    best_mean, best_sd = best_of_each(data.counts, loadings, offset, args.point_steps)
    elbo = partial(point_elbo, counts=data.counts, loadings=loadings, offset=offset)
    reached = np.asarray(elbo(mean, sd))
    gap = np.asarray(elbo(best_mean, best_sd)) - reached
    draws = guide.sample_posterior(
        jax.random.key(args.seed + 1), params, data.counts, args.latents, sample_shape=(args.num_draws,)
    )
    log_rates = jnp.einsum("snl,slk->snk", draws["z"], draws["loadings"]) + draws["offset"][:, None]
    bounds = np.quantile(np.asarray(log_rates), [0.05, 0.95], axis=0)
    aligned = align(np.asarray(mean), data.latents)
    scores = Scores(
        network=name,
        rows=rows,
        elbo=float(reached.mean()),
        gap=float(gap.mean()),
        gap_se=float(gap.std() / len(gap) ** 0.5),
        worst_gap=float(gap.max()),
        mean_error=float(jnp.sqrt(jnp.mean(((mean - best_mean) / best_sd) ** 2))),
        sd_ratio=float(jnp.exp(jnp.mean(jnp.log(sd / best_sd)))),
        r_squared=float(
            1 - ((aligned - data.latents) ** 2).sum() / ((data.latents - data.latents.mean(0)) ** 2).sum()
        ),
        coverage=float(np.mean((data.log_rates > bounds[0]) & (data.log_rates < bounds[1]))),
        seconds=seconds,
    )
    points = {
        "gap": gap,
        "mean": mean,
        "sd": sd,
        "best_mean": best_mean,
        "best_sd": best_sd,
        "aligned": aligned,
    }
    return scores, {key: np.asarray(value) for key, value in points.items()}


def align(found: np.ndarray, true: np.ndarray) -> np.ndarray:
    """Latents are identified up to an invertible linear map; this finds the least-squares one."""
    design = np.column_stack([found, np.ones(len(found))])
    return design @ np.linalg.lstsq(design, true, rcond=None)[0]


def print_table(rows: list[Scores]) -> None:
    print("\nELBO and gap to the best q of each bin: nats per bin. mean: RMS difference of means in posterior sds;")
    print("sd: geometric mean of the ratio of sds; R2: true latents, up to a linear map; cov.: log rates in 90 %")
    print(
        f"{'hidden units':14}{'bins':6}{'ELBO':>10}{'gap':>9}{'± se':>9}{'worst':>9}{'mean':>8}{'sd':>8}{'R2':>8}"
        f"{'cov.':>8}{'seconds':>9}"
    )
    for row in rows:
        print(
            f"{row.network:14}{row.rows:6}{row.elbo:10.3f}{row.gap:9.4f}{row.gap_se:9.4f}{row.worst_gap:9.3f}"
            f"{row.mean_error:8.3f}{row.sd_ratio:8.3f}{row.r_squared:8.3f}{row.coverage:8.3f}{row.seconds:9.1f}"
        )


def draw_figure(points: dict[str, dict[str, np.ndarray]], new: Data, folder: Path) -> Path:
    """New bins: true and inferred latents; means and sds compared with the best ones; gaps of every network."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    settings = {"font.size": 8, "legend.fontsize": 7, "axes.spines.top": False, "axes.spines.right": False}
    with plt.rc_context(settings):
        figure, axes = plt.subplots(2, 2, figsize=(7.0, 4.6), layout="constrained")
        best = points[list(points)[-1]]
        bins = np.arange(min(len(new.latents), 300))
        axes[0, 0].plot(bins, new.latents[bins, 0], color="black", linewidth=1.0, label="true")
        axes[0, 0].plot(bins, best["aligned"][bins, 0], ".", color=COLORS[0], markersize=2.5, label="inferred")
        axes[0, 0].set(xlabel="new bin", ylabel="latent 1")
        axes[0, 0].legend(frameon=False)
        for axis, part, label in ((axes[0, 1], "mean", "mean"), (axes[1, 0], "sd", "sd")):
            draw_pairs(axis, best[f"best_{part}"].ravel(), best[part].ravel(), label)
        for color, (name, found) in zip(COLORS, points.items(), strict=False):
            gaps = np.sort(np.maximum(found["gap"], 1e-6))
            share = np.arange(1, len(gaps) + 1) / len(gaps)
            axes[1, 1].step(gaps, share, color=color, label=f"{name} hidden units", linewidth=1.2)
        axes[1, 1].set(xscale="log", xlabel="gap to the best q of a new bin (nats)", ylabel="share of bins below")
        axes[1, 1].legend(frameon=False)
        for axis, letter in zip(axes.flat, "abcd", strict=True):
            axis.set_title(letter, loc="left", fontweight="bold", fontsize=9)
        path = folder / "amortized.png"
        figure.savefig(path, dpi=200)
    plt.close(figure)
    return path


def draw_pairs(axis: Any, best: np.ndarray, found: np.ndarray, label: str) -> None:
    ends = [min(best.min(), found.min()), max(best.max(), found.max())]
    axis.plot(ends, ends, color="black", linewidth=0.6, zorder=0)
    axis.plot(best, found, ".", color=COLORS[0], markersize=2, alpha=0.4, markeredgewidth=0)
    axis.set(xlabel=f"{label}, each bin optimized", ylabel=f"{label}, network")


def main(argv: list[str] | None = None) -> list[Scores]:
    args = parse(argv)
    folder = writable_folder(args.output)
    train, new = simulate(args)
    seen = Data(*(part[: args.new_rows] for part in train))
    print(
        f"{args.train_rows} bins of {args.neurons} neurons, {train.counts.mean():.2f} spikes each on average;"
        f" {len(new.counts)} new bins"
    )
    rows, points = [], {}
    for width in args.widths:
        fit = learn(width, train, args)
        for label, data in (("seen", seen), ("new", new)):
            scores, found = compare(str(width), label, data, fit, args)
            rows.append(scores)
        points[str(width)] = found
    print_table(rows)
    print(f"written: {draw_figure(points, new, folder)}")
    return rows


if __name__ == "__main__":
    main()
