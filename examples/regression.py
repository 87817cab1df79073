"""A Bayesian neural network on real data: sampled with NUTS, compared with ridge regression, and plotted.

The diabetes data set that ships with scikit-learn: 442 patients, 10 measurements, disease progression after a
year. The network has one hidden layer and one learned scale per layer. Run it with ``make demo``, or

    python -m examples.regression --help
"""

import argparse
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpyro

from examples import loaders
from examples.shared import at_least, writable_folder


class Scores(NamedTuple):
    """One row of the table; errors and densities in the units of the data."""

    method: str
    rmse: float
    log_score: float
    coverage: float
    rhat: float | None
    ess: float | None
    seconds: float


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.regression",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--width", type=int, default=20, help="hidden units")
    parser.add_argument("--activation", default="tanh", help="activation of the hidden units")
    parser.add_argument("--num-warmup", type=int, default=800, help="warm-up transitions per chain")
    parser.add_argument("--num-samples", type=int, default=1000, help="draws per chain")
    parser.add_argument("--num-chains", type=int, default=4, help="chains, run side by side")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampler and of the train/test split")
    parser.add_argument("--output", type=Path, default=Path("output"), help="folder of the netCDF file and the plots")
    args = parser.parse_args(argv)
    at_least(parser, args, ("width", "num_warmup", "num_samples", "num_chains"))
    return args


def fit_network(data, args: argparse.Namespace):
    """Sample the posterior of the network; returns ArviZ results and seconds."""
    import jax
    from numpyro.infer import MCMC, NUTS

    import numpyro_bnn as bnn

    net = bnn.nn.MLP([args.width, 1], activation=args.activation)
    model = bnn.models.regression(net, prior=bnn.priors.Hierarchical())
    mcmc = MCMC(
        NUTS(model, target_accept_prob=0.9, max_tree_depth=8),
        num_warmup=args.num_warmup,
        num_samples=args.num_samples,
        num_chains=args.num_chains,
    )
    start = time.perf_counter()
    mcmc.run(jax.random.key(args.seed), data.x_train, data.y_train, extra_fields=("potential_energy", "diverging"))
    jax.block_until_ready(mcmc.last_state)
    seconds = time.perf_counter() - start
    attrs = {"dataset": data.name, "seed": args.seed, "network": str(net), "sampling_seconds": seconds}
    new = {"x": data.x_test, "y": data.y_test}
    return bnn.to_inference_data(mcmc, predictions=new, attrs=attrs), seconds


def score_network(idata, data, seconds: float) -> Scores:
    from numpyro_bnn import metrics

    test = idata["predictions"]
    scale = data.y_scaler.scale_factor
    mixing = metrics.function_space(test["y_mean"])
    return Scores(
        method="Bayesian network, NUTS",
        rmse=scale * metrics.rmse(test["y_mean"].mean(("chain", "draw")), data.y_test).value,
        log_score=metrics.lppd(test["y_log_likelihood"]).value - np.log(scale),
        coverage=metrics.interval_coverage(test["y"], data.y_test, level=0.9).coverage,
        rhat=mixing.max_rhat,
        ess=mixing.min_ess,
        seconds=seconds,
    )


def score_ridge(data) -> Scores:
    """Ridge regression with penalty and noise that maximize the evidence, so that it has a predictive sd as well."""
    from sklearn.linear_model import BayesianRidge

    start = time.perf_counter()
    mean, sd = BayesianRidge().fit(data.x_train, data.y_train).predict(data.x_test, return_std=True)
    seconds = time.perf_counter() - start
    scale = data.y_scaler.scale_factor
    z = (data.y_test - mean) / sd
    return Scores(
        method="ridge regression",
        rmse=scale * float(np.sqrt(np.mean((data.y_test - mean) ** 2))),
        log_score=float(np.mean(-0.5 * z**2 - np.log(sd * scale) - 0.5 * np.log(2 * np.pi))),
        coverage=float(np.mean(np.abs(z) <= 1.6448536)),
        rhat=None,
        ess=None,
        seconds=seconds,
    )


def print_table(rows: list[Scores], num_test: int) -> None:
    print(f"\n{num_test} test patients; R-hat and ESS of the predicted function, the worst of them")
    print(f"{'':24}{'RMSE':>8}{'log score':>11}{'90 % cov.':>11}{'R-hat':>8}{'ESS':>8}{'seconds':>9}")
    for row in rows:
        rhat = "-" if row.rhat is None else f"{row.rhat:.3f}"
        ess = "-" if row.ess is None else f"{row.ess:.0f}"
        print(
            f"{row.method:24}{row.rmse:8.2f}{row.log_score:11.3f}{row.coverage:11.2f}"
            f"{rhat:>8}{ess:>8}{row.seconds:9.2f}"
        )


def draw_plots(idata, folder: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from numpyro_bnn import plots

    figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
    plots.predicted_vs_observed(idata, ax=axes[0])
    plots.calibration(idata, ax=axes[1:])
    path = folder / "regression.png"
    figure.savefig(path, dpi=200)
    plt.close(figure)
    return path


def main(argv: list[str] | None = None) -> list[Scores]:
    args = parse(argv)
    folder = writable_folder(args.output)
    numpyro.set_host_device_count(args.num_chains)  # before JAX starts: one device per chain
    from numpyro_bnn import datasets

    data = datasets.standardize(loaders.load_sklearn("diabetes", seed=args.seed))
    print(f"{data}\n{args.num_chains} chains of {args.num_warmup} + {args.num_samples} transitions")
    idata, seconds = fit_network(data, args)
    rows = [score_network(idata, data, seconds), score_ridge(data)]
    print_table(rows, len(data.y_test))
    divergences = int(idata["sample_stats"]["diverging"].sum())
    total = args.num_chains * args.num_samples
    print(f"{divergences} divergent transitions of {total}")
    saved = [folder / "regression.nc", draw_plots(idata, folder)]
    idata.to_netcdf(str(saved[0]))
    print("written: " + ", ".join(map(str, saved)))
    return rows


if __name__ == "__main__":
    main()
