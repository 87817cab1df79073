"""Stochastic-gradient kernels on all the data, compared with NUTS on a part of it: one
network, table and figure.

California housing: measurements of districts, and the median value of a house. SGLD,
preconditioned SGLD and SGHMC see small minibatches of all training rows, NUTS every row
of a subset in each gradient. Step sizes are chosen in warm-up. The data are read from
--data or the folder NUMPYRO_BNN_DATA. Without them the script uses the diabetes data of
scikit-learn.

    python -m examples.minibatch --help
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpyro

from examples import loaders
from examples.shared import at_least, writable_folder

KERNELS = ("SGLD", "PSGLD", "SGHMC")
STATISTICS = (
    "step_size",
    "configurational_temperature",
    "gradient_noise",
    "num_gradients",
    "diverging",
)

# The default bias_tolerance, 0.05, holds the noisiest direction to 5 % of excess
# variance. Gradients from 256 of 16512 rows are so noisy that this takes steps of 1e-8,
# which do not leave the neighborhood of the warm start in the time given here (median
# R-hat of the function 2 to 3). The data determine that direction best, and it hardly
# affects predictions, so its variance may be too large here. The temperatures, which
# are means over all directions, show the cost.
BIAS_TOLERANCE = 10.0


class Scores(NamedTuple):
    """One row of the table; errors and densities in the units of the data."""

    method: str
    rmse: float
    rmse_se: float
    log_score: float
    log_score_se: float
    coverage: float
    rhat: float
    median_rhat: float
    ess: float
    temperature: float | None
    gradients: int
    passes: float
    seconds: float


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.minibatch",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--width", type=int, default=50, help="hidden units")
    parser.add_argument(
        "--batch-size", type=int, default=256, help="rows of a minibatch"
    )
    parser.add_argument(
        "--num-warmup",
        type=int,
        default=300,
        help="warm-up draws per chain, minibatch kernels",
    )
    parser.add_argument(
        "--num-samples", type=int, default=250, help="draws per chain, every kernel"
    )
    parser.add_argument(
        "--steps-per-draw", type=int, default=200, help="steps between two draws"
    )
    parser.add_argument(
        "--nuts-rows", type=int, default=1000, help="training rows NUTS sees"
    )
    parser.add_argument(
        "--nuts-warmup",
        type=int,
        default=300,
        help="warm-up transitions per chain, NUTS",
    )
    parser.add_argument(
        "--num-chains", type=int, default=4, help="chains, run side by side"
    )
    parser.add_argument(
        "--test-rows",
        type=int,
        default=2000,
        help="test rows that are predicted and scored",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of samplers, split and subset"
    )
    parser.add_argument(
        "--data",
        type=Path,
        default=None,
        help="folder that holds california_housing.npz",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("output"),
        help="folder of the netCDF files and the figure",
    )
    args = parser.parse_args(argv)
    numbers = [
        name
        for name, value in vars(args).items()
        if isinstance(value, int) and name != "seed"
    ]
    at_least(parser, args, numbers)
    return args


def load_data(args: argparse.Namespace) -> Any:
    """California housing if its file exists, otherwise a smaller set; standardized by
    the training rows.
    """
    folder = args.data or os.environ.get("NUMPYRO_BNN_DATA")
    if args.data or (folder and (Path(folder) / "california_housing.npz").is_file()):
        data = loaders.load_california(
            folder, seed=args.seed
        )  # a wrong --data is an error
    else:
        print(
            "no folder with california_housing.npz (--data, NUMPYRO_BNN_DATA): "
            "diabetes data instead"
        )
        data = loaders.load_sklearn("diabetes", seed=args.seed)
    return loaders.standardize(data)


def network_model(args: argparse.Namespace) -> Any:
    import numpyro_bnn as bnn

    return bnn.models.regression(
        bnn.nn.MLP([args.width, 1], "tanh"), bnn.priors.Hierarchical()
    )


def export(mcmc: Any, data: Any, args: argparse.Namespace, seconds: float) -> Any:
    """Results for ArviZ, with predictions at test rows only: draws at all training rows
    would take gigabytes.
    """
    import numpyro_bnn as bnn

    new = {"x": data.x_test[: args.test_rows], "y": data.y_test[: args.test_rows]}
    attrs = {"dataset": data.name, "seed": args.seed, "sampling_seconds": seconds}
    return bnn.to_inference_data(
        mcmc,
        predictions=new,
        log_likelihood=False,
        posterior_predictive=False,
        attrs=attrs,
    )


def fit_minibatch(name: str, data: Any, args: argparse.Namespace) -> tuple[Any, Scores]:
    """Run a stochastic-gradient kernel on minibatches of all rows; its step size is
    chosen in warm-up.
    """
    import jax
    import optax
    from numpyro.infer import MCMC

    from numpyro_bnn import infer

    warm_start_steps = args.num_warmup * args.steps_per_draw // 2
    kernel = getattr(infer, name)(
        network_model(args),
        steps_per_draw=args.steps_per_draw,
        warm_start=0.5,
        optimizer=optax.adam(optax.cosine_decay_schedule(0.02, warm_start_steps)),
        bias_tolerance=BIAS_TOLERANCE,
    )
    mcmc = MCMC(
        kernel,
        num_warmup=args.num_warmup,
        num_samples=args.num_samples,
        num_chains=args.num_chains,
    )
    fields = (*STATISTICS, "kinetic_temperature") if name == "SGHMC" else STATISTICS
    batch_size = min(args.batch_size, len(data.y_train) - 1)
    start = time.perf_counter()
    mcmc.run(
        jax.random.key(args.seed),
        data.x_train,
        data.y_train,
        batch_size,
        extra_fields=fields,
    )
    jax.block_until_ready(mcmc.last_state)
    seconds = time.perf_counter() - start
    if np.any(mcmc.last_state.diverging):
        sys.exit(
            f"{name}: a chain diverged. Try a larger --batch-size or --num-warmup."
        )
    gradients = int(np.sum(mcmc.last_state.num_gradients))
    idata = export(mcmc, data, args, seconds)
    passes = gradients * batch_size / len(data.y_train)
    return idata, score(name, idata, data, gradients, passes, seconds)


def fit_nuts(data: Any, args: argparse.Namespace) -> tuple[Any, Scores]:
    """Run NUTS, with every row in each gradient, on a random subset of the training
    rows.
    """
    import jax
    from numpyro.infer import MCMC, NUTS

    rows = min(args.nuts_rows, len(data.y_train))
    chosen = np.random.default_rng(args.seed).choice(
        len(data.y_train), rows, replace=False
    )
    x, y = data.x_train[chosen], data.y_train[chosen]
    kernel = NUTS(network_model(args), target_accept_prob=0.9, max_tree_depth=7)
    mcmc = MCMC(
        kernel,
        num_warmup=args.nuts_warmup,
        num_samples=args.num_samples,
        num_chains=args.num_chains,
    )
    start = time.perf_counter()
    mcmc.warmup(
        jax.random.key(args.seed),
        x,
        y,
        extra_fields=("num_steps",),
        collect_warmup=True,
    )
    gradients = int(np.sum(mcmc.get_extra_fields()["num_steps"]))
    mcmc.run(
        jax.random.key(args.seed + 1), x, y, extra_fields=("num_steps", "diverging")
    )
    jax.block_until_ready(mcmc.last_state)
    seconds = time.perf_counter() - start
    gradients += int(np.sum(mcmc.get_extra_fields()["num_steps"]))
    idata = export(mcmc, data, args, seconds)
    passes = gradients * rows / len(data.y_train)
    return idata, score(f"NUTS, {rows} rows", idata, data, gradients, passes, seconds)


def score(
    method: str, idata: Any, data: Any, gradients: int, passes: float, seconds: float
) -> Scores:
    from numpyro_bnn import metrics

    test, stats = idata["predictions"], idata["sample_stats"]
    observed = data.y_test[: test["y"].sizes["data"]]
    scale = float(data.y_scaler.scale_factor)
    error = metrics.rmse(test["y_mean"].mean(("chain", "draw")), observed)
    density = metrics.lppd(test["y_log_likelihood"])
    mixing = metrics.function_space(test["y_mean"])
    temperature = stats.get(
        "kinetic_temperature", stats.get("configurational_temperature")
    )
    return Scores(
        method=method,
        rmse=scale * error.value,
        rmse_se=scale * error.standard_error,
        log_score=density.value - np.log(scale),
        log_score_se=density.standard_error,
        coverage=metrics.interval_coverage(test["y"], observed, level=0.9).coverage,
        rhat=mixing.max_rhat,
        median_rhat=float(np.median(mixing.rhat)),
        ess=mixing.min_ess,
        temperature=None if temperature is None else float(temperature.mean()),
        gradients=gradients,
        passes=passes,
        seconds=seconds,
    )


def print_table(rows: list[Scores], num_test: int) -> None:
    print(
        f"\n{num_test} test rows. R-hat (worst, median) and ESS (worst) of the "
        f"predicted function;"
    )
    print("temp.: kinetic or else configurational temperature, 1 without heating;")
    print("passes: gradients x rows per gradient / training rows, over all chains")
    print(
        f"{'':18}{'RMSE':>8}{'log score':>11}{'90 % cov.':>11}"
        f"{'R-hat':>8}{'median':>8}{'ESS':>6}"
        f"{'temp.':>7}{'gradients':>11}{'passes':>8}{'seconds':>9}"
    )
    for row in rows:
        temperature = "-" if row.temperature is None else f"{row.temperature:.2f}"
        print(
            f"{row.method:18}{row.rmse:8.4g}{row.log_score:11.3f}{row.coverage:11.3f}{row.rhat:8.2f}"
            f"{row.median_rhat:8.2f}{row.ess:6.0f}{temperature:>7}{row.gradients:11d}{row.passes:8.0f}"
            f"{row.seconds:9.1f}"
        )


def draw_figure(fits: dict[str, Any], rows: list[Scores], folder: Path) -> Path:
    """Scores with standard errors at the top; temperatures and mixing of the predicted
    function below.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    settings = {
        "font.size": 8,
        "legend.fontsize": 7,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with plt.rc_context(settings):
        figure, axes = plt.subplots(2, 2, figsize=(7.0, 4.4), layout="constrained")
        draw_scores(axes[0, 0], rows, "rmse", "test RMSE")
        draw_scores(axes[0, 1], rows, "log_score", "test log score")
        draw_temperatures(axes[1, 0], fits)
        draw_mixing(axes[1, 1], fits)
        for axis, letter in zip(axes.flat, "abcd", strict=True):
            axis.set_title(letter, loc="left", fontweight="bold", fontsize=9)
        path = folder / "minibatch.png"
        figure.savefig(path, dpi=200)
    plt.close(figure)
    return path


def draw_scores(axis: Any, rows: list[Scores], name: str, label: str) -> None:
    for place, row in enumerate(reversed(rows)):
        value, error = getattr(row, name), getattr(row, f"{name}_se")
        axis.errorbar(
            value,
            place,
            xerr=error,
            fmt="o",
            color=color(row.method),
            capsize=2,
            markersize=5,
        )
    axis.set_yticks(range(len(rows)), [row.method for row in reversed(rows)])
    axis.set_ylim(-0.5, len(rows) - 0.5)
    axis.grid(axis="x", color="#DDDDDD", linewidth=0.5)
    axis.set_xlabel(f"{label} ± standard error")


def draw_temperatures(axis: Any, fits: dict[str, Any]) -> None:
    """Means over chains and the draws so far."""
    for name in KERNELS:
        for field, style in (
            ("configurational_temperature", "-"),
            ("kinetic_temperature", ":"),
        ):
            stats = fits[name]["sample_stats"]
            if field in stats:
                values = np.asarray(stats[field]).mean(0)
                draws = np.arange(1, len(values) + 1)
                running = np.cumsum(values) / draws
                label = f"{name}, {field.split('_')[0]}"
                width = 3.0 if name == "SGLD" else 1.2  # seen behind the others
                axis.plot(
                    draws,
                    running,
                    style,
                    color=color(name),
                    label=label,
                    linewidth=width,
                )
    axis.axhline(1.0, color="black", linewidth=0.6, zorder=0)
    axis.set_xlabel("draws")
    axis.set_ylabel("temperature, mean so far")
    axis.set_ylim(0.5, 2.0)
    axis.legend(frameon=False)


def draw_mixing(axis: Any, fits: dict[str, Any]) -> None:
    """Distribution over the test rows of R-hat of the predicted function."""
    from numpyro_bnn import metrics

    for method, idata in fits.items():
        rhat = np.sort(
            metrics.function_space(idata["predictions"]["y_mean"]).rhat.ravel()
        )
        axis.step(
            rhat,
            np.arange(1, len(rhat) + 1) / len(rhat),
            color=color(method),
            label=method,
            linewidth=1.2,
        )
    axis.axvline(1.01, color="black", linewidth=0.6, zorder=0)
    axis.set_xlabel("R-hat of the predicted function")
    axis.set_ylabel("share of test rows below")
    axis.legend(frameon=False, loc="lower right")


def color(method: str) -> str:
    return {"SGLD": "#0072B2", "PSGLD": "#D55E00", "SGHMC": "#009E73"}.get(
        method, "#000000"
    )


def main(argv: list[str] | None = None) -> list[Scores]:
    args = parse(argv)
    folder = writable_folder(args.output)
    numpyro.set_host_device_count(
        args.num_chains
    )  # before JAX starts: one device per chain

    data = load_data(args)
    print(f"{data}\n{args.num_chains} chains")
    fits, rows, saved = {}, [], []
    for name in (*KERNELS, "NUTS"):
        print(f"\n{name}", flush=True)
        idata, row = (
            fit_nuts(data, args) if name == "NUTS" else fit_minibatch(name, data, args)
        )
        fits[row.method] = idata
        rows.append(row)
        saved.append(folder / f"minibatch_{name.lower()}.nc")
        idata.to_netcdf(str(saved[-1]))
    print_table(rows, min(args.test_rows, len(data.y_test)))
    if max(row.rhat for row in rows) > 1.1:
        print(
            "R-hat above 1.1: chains stay near the modes they found; together they are "
            "an ensemble of modes."
        )
    saved.append(draw_figure(fits, rows, folder))
    print("written: " + ", ".join(map(str, saved)))
    return rows


if __name__ == "__main__":
    main()
