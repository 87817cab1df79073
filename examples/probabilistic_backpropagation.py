"""Probabilistic backpropagation on all the data, compared with ridge regression and
with NUTS on a part of it.

California housing: measurements of districts, and the median value of a house. The
network has two hidden layers. The model is plain NumPyro, with the priors of
Hernandez-Lobato and Adams (2015). The data are read from --data or the folder
NUMPYRO_BNN_DATA. Without them the script uses the diabetes data of scikit-learn.

    python -m examples.probabilistic_backpropagation --help
"""

import argparse
import os
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from examples import loaders
from examples.shared import at_least, writable_folder


class Scores(NamedTuple):
    """One row of the table; errors and densities in the units of the data."""

    method: str
    rmse: float
    log_score: float
    coverage: float
    seconds: float


def model(x, y=None, widths=(50, 50)):
    """A ReLU network; each layer has a constant unit for the bias and divides by the
    root of its inputs.
    """
    precision = numpyro.sample("weight_precision", dist.Gamma(6.0, 6.0))
    noise = numpyro.sample("noise_precision", dist.Gamma(6.0, 6.0))
    h = x
    for layer, (inputs, outputs) in enumerate(pairwise((x.shape[1], *widths, 1))):
        prior = dist.Normal(0.0, precision**-0.5).expand([inputs + 1, outputs])
        w = numpyro.sample(f"layer{layer}", prior.to_event(2))
        h = jax.nn.relu(h) if layer else h
        h = (
            jnp.concatenate([h, jnp.ones((x.shape[0], 1))], axis=1)
            @ w
            / (inputs + 1) ** 0.5
        )
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(h[:, 0], noise**-0.5), obs=y)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.probabilistic_backpropagation",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--widths",
        type=int,
        nargs="+",
        default=[50, 50],
        help="units of the hidden layers",
    )
    parser.add_argument(
        "--num-epochs", type=int, default=40, help="passes over the data"
    )
    parser.add_argument(
        "--nuts-rows", type=int, default=500, help="training rows NUTS sees"
    )
    parser.add_argument(
        "--nuts-warmup", type=int, default=200, help="warm-up transitions of NUTS"
    )
    parser.add_argument("--nuts-samples", type=int, default=200, help="draws of NUTS")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of split, start, orders and NUTS"
    )
    parser.add_argument(
        "--data",
        type=Path,
        default=None,
        help="folder that holds california_housing.npz",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("output"), help="folder of the figure"
    )
    args = parser.parse_args(argv)
    at_least(
        parser,
        args,
        ("num_epochs", "nuts_rows", "nuts_warmup", "nuts_samples", "widths"),
    )
    return args


def load_data(args: argparse.Namespace) -> Any:
    """California housing if its file exists, otherwise a smaller set; standardized by
    the 90 % training rows.
    """
    folder = args.data or os.environ.get("NUMPYRO_BNN_DATA")
    if args.data or (folder and (Path(folder) / "california_housing.npz").is_file()):
        data = loaders.load_california(
            folder, test_fraction=0.1, seed=args.seed
        )  # a wrong --data is an error
    else:
        print(
            "no folder with california_housing.npz (--data, NUMPYRO_BNN_DATA): "
            "diabetes data instead"
        )
        data = loaders.load_sklearn("diabetes", test_fraction=0.1, seed=args.seed)
    return loaders.standardize(data)


def score(
    method: str, mean: Any, variance: Any, log_density: Any, data: Any, seconds: float
) -> Scores:
    """Scores of normal predictions, from standardized units."""
    scale = float(data.y_scaler.scale_factor)
    error = np.asarray(mean) - data.y_test
    return Scores(
        method=method,
        rmse=scale * float(np.sqrt(np.mean(error**2))),
        log_score=float(np.mean(log_density)) - float(np.log(scale)),
        coverage=float(np.mean(np.abs(error) <= 1.6448536 * np.sqrt(variance))),
        seconds=seconds,
    )


def learn(data: Any, args: argparse.Namespace) -> tuple[Any, Any, Scores]:
    """Probabilistic backpropagation; predictions in closed form."""
    from numpyro_bnn import guides

    pbp = guides.AutoADF(model)
    widths = tuple(args.widths)
    start = time.perf_counter()
    fit = pbp.run(
        jax.random.key(args.seed),
        data.x_train,
        data.y_train,
        widths=widths,
        num_epochs=args.num_epochs,
    )
    jax.block_until_ready(fit)
    seconds = time.perf_counter() - start
    mean, variance = pbp.predictive_moments(fit.params, data.x_test, widths=widths)
    log_density = pbp.log_predictive_density(
        fit.params, data.x_test, data.y_test, widths=widths
    )
    return pbp, fit, score("PBP, all rows", mean, variance, log_density, data, seconds)


def sample(pbp: Any, fit: Any, data: Any, args: argparse.Namespace) -> Scores:
    """NUTS on a random subset of the training rows, started at the median
    of the guide.
    """
    from jax.scipy.special import logsumexp
    from numpyro.infer import MCMC, NUTS, Predictive, init_to_value, log_likelihood

    widths = tuple(args.widths)
    rows = min(args.nuts_rows, len(data.y_train))
    chosen = np.random.default_rng(args.seed).choice(
        len(data.y_train), rows, replace=False
    )
    kernel = NUTS(
        model,
        init_strategy=init_to_value(values=pbp.median(fit.params)),
        max_tree_depth=7,
    )
    mcmc = MCMC(kernel, num_warmup=args.nuts_warmup, num_samples=args.nuts_samples)
    x, y, x_test, y_test = map(
        jnp.asarray,
        (data.x_train[chosen], data.y_train[chosen], data.x_test, data.y_test),
    )
    start = time.perf_counter()
    mcmc.run(jax.random.key(args.seed), x, y, widths=widths)
    jax.block_until_ready(mcmc.last_state)
    seconds = time.perf_counter() - start
    draws = mcmc.get_samples()
    predicted = Predictive(model, draws)(
        jax.random.key(args.seed + 1), x_test, widths=widths
    )["y"]
    density = log_likelihood(model, draws, x_test, y_test, widths=widths)["y"]
    pooled = logsumexp(density, axis=0) - np.log(args.nuts_samples)
    return score(
        f"NUTS, {rows} rows", predicted.mean(0), predicted.var(0), pooled, data, seconds
    )


def ridge(data: Any) -> Scores:
    """Ridge regression with penalty and noise that maximize the evidence."""
    from sklearn.linear_model import BayesianRidge

    start = time.perf_counter()
    mean, sd = (
        BayesianRidge()
        .fit(data.x_train, data.y_train)
        .predict(data.x_test, return_std=True)
    )
    seconds = time.perf_counter() - start
    log_density = (
        -0.5 * ((data.y_test - mean) / sd) ** 2 - np.log(sd) - 0.5 * np.log(2 * np.pi)
    )
    return score("ridge regression", mean, sd**2, log_density, data, seconds)


def print_table(rows: list[Scores], num_test: int) -> None:
    print(f"\n{num_test} test rows")
    print(f"{'':20}{'RMSE':>8}{'log score':>11}{'90 % cov.':>11}{'seconds':>9}")
    for row in rows:
        print(
            f"{row.method:20}{row.rmse:8.4g}{row.log_score:11.3f}{row.coverage:11.3f}{row.seconds:9.1f}"
        )


def draw_figure(
    pbp: Any, fit: Any, data: Any, args: argparse.Namespace, folder: Path
) -> Path:
    """Error against predicted sd for groups of test rows with similar sd; log evidence
    by epoch.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    mean, variance = pbp.predictive_moments(
        fit.params, data.x_test, widths=tuple(args.widths)
    )
    scale = float(data.y_scaler.scale_factor)
    sd, error = (
        scale * np.sqrt(np.asarray(variance)),
        scale * (np.asarray(mean) - data.y_test),
    )
    groups = np.array_split(np.argsort(sd), min(20, len(sd) // 4))
    spread = np.array([np.sqrt(np.mean(error[group] ** 2)) for group in groups])
    # The sd of a root mean square of n normal errors is about 1 / sqrt(2 n) of it.
    bars = spread / np.sqrt([2 * len(group) for group in groups])
    center = np.array([sd[group].mean() for group in groups])
    settings = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}
    with plt.rc_context(settings):
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(7.0, 2.8), layout="constrained"
        )
        left.errorbar(
            center, spread, yerr=bars, fmt="o", color="#0072B2", markersize=4, capsize=2
        )
        ends = [min(center.min(), spread.min()), max(center.max(), spread.max())]
        left.plot(
            ends, ends, color="black", linewidth=0.6, label="error = predicted sd"
        )
        left.set_xlabel("predicted sd")
        left.set_ylabel("root mean squared error")
        left.legend(frameon=False)
        epochs = np.arange(1, len(fit.losses) + 1)
        right.plot(
            epochs,
            -np.asarray(fit.losses) / len(data.y_train),
            "-",
            color="#0072B2",
            linewidth=1.2,
        )
        right.set_xlabel("epoch")
        right.set_ylabel("log evidence per data point")
        for axis, letter in zip((left, right), "ab", strict=True):
            axis.set_title(letter, loc="left", fontweight="bold", fontsize=9)
        path = folder / "probabilistic_backpropagation.png"
        figure.savefig(path, dpi=200)
    plt.close(figure)
    return path


def main(argv: list[str] | None = None) -> list[Scores]:
    args = parse(argv)
    folder = writable_folder(args.output)
    data = load_data(args)
    print(data)
    pbp, fit, learned = learn(data, args)
    rows = [learned, sample(pbp, fit, data, args), ridge(data)]
    print_table(rows, len(data.y_test))
    noise = fit.params["noise_precision_auto_rate"] / (
        fit.params["noise_precision_auto_concentration"] - 1
    )
    print(
        f"noise variance {float(noise) * data.y_scaler.scale_factor**2:.4g} in the "
        f"units of the data"
    )
    print(f"written: {draw_figure(pbp, fit, data, args, folder)}")
    return rows


if __name__ == "__main__":
    main()
