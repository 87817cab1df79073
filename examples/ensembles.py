"""A deep ensemble, microcanonical chains around its members, and NUTS: one table and
one figure per data set.

Every chain of MCLMC first runs Adam from its own random start, with held-out rows to
prevent overfitting. The end points are a deep ensemble. From there the chain samples.
NUTS samples the same model from its own start. The table shows test error, log score,
coverage, and R-hat and effective sample size of the predicted function, within the
chains and between them.

Energy and concrete are read from --data or the folder NUMPYRO_BNN_DATA. Without them
the script simulates small sets instead.

    python -m examples.ensembles --data FOLDER --output output
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from examples import loaders
from examples.shared import at_least, observations_of_members, writable_folder

SETS = ("energy", "concrete")
COLORS = {"deep ensemble": "#D55E00", "MCLMC": "#0072B2", "NUTS": "#000000"}


class Scores(NamedTuple):
    """One row of a table; errors and densities in the units of the data."""

    dataset: str
    method: str
    rmse: float
    log_score: float
    log_score_se: float
    coverage: float
    within_rhat: float
    between_rhat: float
    median_ess: float
    min_ess: float
    gradients: int
    seconds: float


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.ensembles",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--sets", nargs="+", choices=SETS, default=list(SETS), help="data sets"
    )
    parser.add_argument(
        "--split", type=int, default=0, help="number of the standard split"
    )
    parser.add_argument(
        "--widths", type=int, nargs="+", default=[16, 16], help="hidden units per layer"
    )
    parser.add_argument(
        "--members", type=int, default=8, help="members and chains, vectorized"
    )
    parser.add_argument(
        "--optimizer-steps", type=int, default=4000, help="steps of Adam per member"
    )
    parser.add_argument(
        "--num-warmup", type=int, default=400, help="warm-up draws per chain, MCLMC"
    )
    parser.add_argument("--num-samples", type=int, default=500, help="draws per chain")
    parser.add_argument(
        "--steps-per-draw",
        type=int,
        default=50,
        help="steps between two draws of MCLMC",
    )
    parser.add_argument(
        "--nuts-warmup",
        type=int,
        default=400,
        help="warm-up transitions per chain, NUTS",
    )
    parser.add_argument("--max-tree-depth", type=int, default=8, help="of NUTS")
    parser.add_argument("--seed", type=int, default=0, help="seed of the samplers")
    parser.add_argument(
        "--data", type=Path, default=None, help="folder of the UCI sets"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("output"),
        help="folder of netCDF files and figures",
    )
    args = parser.parse_args(argv)
    at_least(
        parser,
        args,
        (
            "widths",
            "optimizer_steps",
            "steps_per_draw",
            "nuts_warmup",
            "max_tree_depth",
        ),
    )
    at_least(parser, args, ("members", "num_warmup"), 2)
    at_least(parser, args, ("num_samples",), 4)  # R-hat and ESS need as many
    at_least(parser, args, ("split",), 0)
    return args


# --------------------------------------------------------------------------------------
# data


def load_data(name: str, args: argparse.Namespace) -> Any:
    """A UCI set if its files exist, otherwise a similar simulated set; standardized by
    the training rows.
    """
    folder = args.data or os.environ.get("NUMPYRO_BNN_DATA")
    if folder:
        data = loaders.load_uci(name, args.split, folder)
    else:
        print(
            f"no data folder (--data, NUMPYRO_BNN_DATA): 120 rows made in the place of "
            f"{name}"
        )
        data = made_data(name)
    return loaders.standardize(data)


def made_data(name: str) -> Any:
    """A few simulated rows: a smooth response for energy, a noisier one with
    interactions for concrete.
    """
    rng = np.random.default_rng(SETS.index(name))
    x = rng.uniform(-1, 1, size=(160, 4))
    y = np.sin(3 * x[:, 0]) + x[:, 1] ** 2 + (name == "concrete") * x[:, 1] * x[:, 2]
    y = 10 + 5 * (y + {"energy": 0.05, "concrete": 0.3}[name] * rng.normal(size=160))
    columns = tuple(f"x{i}" for i in range(4))
    return loaders.Dataset(
        x[:120], y[:120], x[120:], y[120:], f"{name} (made)", columns
    )


# --------------------------------------------------------------------------------------
# sampling


def network_model(args: argparse.Namespace) -> Any:
    import numpyro_bnn as bnn

    return bnn.models.regression(
        bnn.nn.MLP([*args.widths, 1], "relu"), bnn.priors.Hierarchical()
    )


def run(
    kernel: Any, data: Any, args: argparse.Namespace, num_warmup: int, fields: tuple
) -> tuple[Any, float]:
    import jax
    from numpyro.infer import MCMC

    mcmc = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=args.num_samples,
        num_chains=args.members,
        chain_method="vectorized",
    )
    start = time.perf_counter()
    mcmc.run(jax.random.key(args.seed), data.x_train, data.y_train, extra_fields=fields)
    jax.block_until_ready(mcmc.last_state)
    return mcmc, time.perf_counter() - start


def export(mcmc: Any, data: Any, **options: Any) -> Any:
    import numpyro_bnn as bnn

    new = {"x": data.x_test, "y": data.y_test}
    return bnn.to_inference_data(
        mcmc,
        predictions=new,
        log_likelihood=False,
        posterior_predictive=False,
        **options,
    )


def fit_all(data: Any, args: argparse.Namespace) -> tuple[dict[str, Any], list[Scores]]:
    """The ensemble and the chains around it come from one run."""
    import optax
    from numpyro.infer import NUTS

    from numpyro_bnn import infer

    schedule = optax.cosine_decay_schedule(0.02, args.optimizer_steps)
    warm = infer.WarmStart(
        0.3,
        num_steps=args.optimizer_steps,
        optimizer=optax.adam(schedule),
        held_out=0.1,
        spread=1.5,
    )
    kernel = infer.MCLMC(
        network_model(args), steps_per_draw=args.steps_per_draw, warm_start=warm
    )
    mcmc, seconds = run(kernel, data, args, args.num_warmup, ("energy_variance",))
    fits = {
        "deep ensemble": export(mcmc, data, members=True),
        "MCLMC": export(mcmc, data),
    }
    about = fits["MCLMC"].attrs
    print(
        f"MCLMC: energy errors imply a bias of variances of "
        f"{about['implied_bias']:.3f}, averaged over"
        f" directions, and of at most {about['implied_bias_bound']:.2f} in a single one"
    )
    optimized = args.members * args.optimizer_steps
    spent = int(np.sum(mcmc.last_state.num_gradients))
    share = optimized / spent
    seen = observations_of_members(mcmc, {"x": data.x_test})
    rows = [
        score(
            "deep ensemble",
            fits["deep ensemble"],
            data,
            optimized,
            share * seconds,
            seen,
        ),
        score("MCLMC", fits["MCLMC"], data, spent, seconds),
    ]
    nuts = NUTS(network_model(args), max_tree_depth=args.max_tree_depth)
    mcmc, seconds = run(nuts, data, args, args.nuts_warmup, ("num_steps",))
    fits["NUTS"] = export(mcmc, data)
    # The gradients of its warm-up are not recorded: its transitions are assumed to be
    # as long as those of the draws.
    steps = np.asarray(mcmc.get_extra_fields()["num_steps"])
    gradients = int(steps.sum() * (1 + args.nuts_warmup / args.num_samples))
    rows.append(score("NUTS", fits["NUTS"], data, gradients, seconds))
    return fits, rows


def score(
    method: str, idata: Any, data: Any, gradients: int, seconds: float, y: Any = None
) -> Scores:
    """Scores at the test rows; ``y`` are draws of observations (S, N), if not those of
    the result.
    """
    from numpyro_bnn import metrics

    test, scale = idata["predictions"], float(data.y_scaler.scale_factor)
    error = metrics.rmse(test["y_mean"].mean(("chain", "draw")), data.y_test)
    density = metrics.lppd(test["y_log_likelihood"])
    function = test["y_mean"].to_numpy()
    nan = float("nan")
    within, between, median, least = nan, nan, nan, nan
    if function.shape[1] >= 4:  # members are single draws
        mixing = metrics.function_space(function)
        chains = [metrics.function_space(chain[None]).rhat for chain in function]
        within, between = float(np.median(chains)), float(np.median(mixing.rhat))
        median, least = float(np.median(mixing.ess_bulk)), float(mixing.ess_bulk.min())
    return Scores(
        dataset=data.name,
        method=method,
        rmse=scale * error.value,
        log_score=density.value - float(np.log(scale)),
        log_score_se=density.standard_error,
        coverage=metrics.interval_coverage(
            test["y"] if y is None else y, data.y_test, level=0.9
        ).coverage,
        within_rhat=within,
        between_rhat=between,
        median_ess=median,
        min_ess=least,
        gradients=gradients,
        seconds=seconds,
    )


# --------------------------------------------------------------------------------------
# output


def print_table(rows: list[Scores]) -> None:
    print(
        "\nR-hat and ESS of the predicted function, medians over test rows (ESS: also "
        "the smallest);"
    )
    print(
        "R-hat within a chain compares its halves; the ensemble is one draw per member"
    )
    print(
        f"{'':30}{'RMSE':>8}{'log score':>11}{'90 % cov.':>11}"
        f"{'R-hat in':>10}{'between':>9}{'ESS':>8}{'least':>7}"
        f"{'ESS/s':>8}{'gradients':>11}{'seconds':>9}"
    )
    for row in rows:
        print(
            f"{row.dataset + ', ' + row.method:30}{row.rmse:8.4g}"
            f"{row.log_score:11.3f}{row.coverage:11.3f}"
            f"{row.within_rhat:10.2f}{row.between_rhat:9.2f}{row.median_ess:8.0f}{row.min_ess:7.0f}"
            f"{row.median_ess / row.seconds:8.2f}{row.gradients:11d}{row.seconds:9.1f}"
        )


def draw_figure(fits: dict[str, Any], data: Any, folder: Path) -> Path:
    """Predictions of every member at some test rows: a dot, and an interval over its
    draws.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = np.argsort(data.y_test)[:: max(1, len(data.y_test) // 12)][:12]
    path = folder / f"ensembles_{data.name.split()[0]}.png"
    settings = {
        "font.size": 8,
        "legend.fontsize": 7,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with plt.rc_context(settings):
        figure, axis = plt.subplots(figsize=(7.0, 3.2), layout="constrained")
        for place, (method, idata) in enumerate(fits.items()):
            function = idata["predictions"]["y_mean"].to_numpy()[..., shown]
            at = (
                np.arange(len(shown))
                + 0.28 * (place - 1)
                + np.linspace(-0.1, 0.1, len(function))[:, None]
            )
            low, high = np.quantile(function, (0.05, 0.95), axis=1)
            axis.vlines(
                at.ravel(),
                low.ravel(),
                high.ravel(),
                color=COLORS[method],
                linewidth=0.7,
            )
            axis.plot(
                at.ravel(),
                function.mean(1).ravel(),
                ".",
                color=COLORS[method],
                markersize=3,
                label=method,
            )
        axis.plot(
            np.arange(len(shown)),
            data.y_test[shown],
            "_",
            color="#888888",
            markersize=22,
            zorder=0,
        )
        axis.set(
            xlabel="test rows, in the order of their targets (gray)",
            ylabel="predicted function, by member",
        )
        axis.set_xticks([])
        axis.legend(frameon=False)
        figure.savefig(path, dpi=200)
    plt.close(figure)
    return path


def main(argv: list[str] | None = None) -> list[Scores]:
    args = parse(argv)
    folder = writable_folder(args.output)

    rows, saved = [], []
    for name in args.sets:
        data = load_data(name, args)
        print(f"\n{data}", flush=True)
        fits, found = fit_all(data, args)
        rows += found
        saved.append(draw_figure(fits, data, folder))
        for method, idata in fits.items():
            saved.append(
                folder / f"ensembles_{name}_{method.lower().replace(' ', '_')}.nc"
            )
            idata.to_netcdf(str(saved[-1]))
    print_table(rows)
    print("written: " + ", ".join(map(str, saved)))
    return rows


if __name__ == "__main__":
    main()
