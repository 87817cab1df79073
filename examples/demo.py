"""How strong will this concrete be? Six ways to answer, each with its uncertainty.

A laboratory broke 1,030 concretes (`examples/data`). Three in ten are held out. One
NumPyro model, a small network that gives the mean and the noise, is fitted by
microcanonical chains and by a flow, and with one noise for all rows by probabilistic
backpropagation and a Laplace approximation. A deep ensemble and gradient boosting stand
beside it. All of them give a density, so they are compared by the log likelihood of
strengths that they have not seen.

    make demo
    python -m examples.demo --help
"""

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from examples.benchmarks.shared import one_device_per_core
from examples.shared import at_least, early_stopped, markdown, writable_folder

FILE = Path(__file__).parent / "data" / "concrete.csv"
LEAST_SD = 0.003  # of the noise, in standard deviations of the target: 0.05 MPa


class Rows(NamedTuple):
    """Standardized by the training rows, and what turns targets back into MPa."""

    x: np.ndarray
    y: np.ndarray
    x_new: np.ndarray
    y_new: np.ndarray
    scale: float
    center: float


class Prediction(NamedTuple):
    """Of the new rows, in the units of the data: means, log densities of the targets,
    ends of 90 % intervals.
    """

    mean: np.ndarray
    log_density: np.ndarray
    low: np.ndarray
    high: np.ndarray


def load(seed: int, held_out: int) -> Rows:
    table = np.loadtxt(FILE, delimiter=",", skiprows=1)
    order = np.random.default_rng(seed).permutation(len(table))
    (x, y), (x_new, y_new) = (
        (table[rows, :-1], table[rows, -1])
        for rows in (order[held_out:], order[:held_out])
    )
    mean, sd, center, scale = x.mean(0), x.std(0), y.mean(), y.std()
    parts = (
        (x - mean) / sd,
        (y - center) / scale,
        (x_new - mean) / sd,
        (y_new - center) / scale,
    )
    return Rows(
        *(part.astype(np.float32) for part in parts),
        scale=float(scale),
        center=float(center),
    )


def network(prior: Any, heteroscedastic: bool = True, width: int = 50) -> Callable:
    """A NumPyro model: a random network gives the mean and, if wanted, the noise."""
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist

    import numpyro_bnn as bnn

    net = bnn.nn.MLP([width, 1 + heteroscedastic], "tanh")

    def model(x, y=None):
        f = bnn.random_network("net", net, x.shape[1:], prior)
        if not heteroscedastic:
            noise = numpyro.sample("noise", dist.HalfNormal(1.0))
        with numpyro.plate("rows", len(x)) as i:
            out = f(x[i])
            sd = LEAST_SD + jnp.exp(out[..., 1]) if heteroscedastic else noise
            numpyro.sample(
                "y", dist.Normal(out[..., 0], sd), obs=None if y is None else y[i]
            )

    return model


# -- six ways --------------------------------------------------------------------------


def chains(rows: Rows, args: argparse.Namespace) -> tuple[Prediction, Any]:
    """Microcanonical chains around the members of a deep ensemble, with moves along the
    network's symmetries.
    """
    import jax

    import numpyro_bnn as bnn

    model = network(bnn.priors.Hierarchical())
    options = {
        "num_samples": args.steps(150),
        "symmetries": bnn.symmetry.find(model, rows.x, rows.y),
    }
    mcmc = bnn.infer.ensemble(
        model, max(100, args.steps(20_000)), progress_bar=False, **options
    )
    mcmc.run(jax.random.key(args.seed), rows.x, rows.y)
    idata = bnn.to_inference_data(mcmc, predictions={"x": rows.x_new, "y": rows.y_new})
    return from_draws(idata, rows), idata


def flow(rows: Rows, args: argparse.Namespace) -> tuple[Prediction, Any]:
    """Bayes by Backprop, then a coupling flow over the scales and the output layer."""
    import jax
    import optax
    from numpyro.infer import SVI, init_to_value

    import numpyro_bnn as bnn

    model, steps = network(bnn.priors.Hierarchical()), args.steps(1500)

    def fit(guide: Any, rate: float) -> Any:
        optimizer = optax.adam(optax.cosine_decay_schedule(rate, steps))
        svi = SVI(model, guide, optimizer, bnn.guides.TraceLocalReparam_ELBO())
        return bnn.guides.fit(
            svi, jax.random.key(args.seed), steps, rows.x, rows.y, progress_bar=False
        )

    first = bnn.guides.AutoMeanField(model)
    start = {
        "init_loc_fn": init_to_value(values=first.median(fit(first, 0.01).params)),
        "init_scale": 0.02,
    }
    guide = bnn.guides.AutoCoupling(
        model, blocks=[("*_scale", "net/Dense_1*")], **start
    )
    fitted = fit(guide, 0.003)
    new = {"x": rows.x_new, "y": rows.y_new}
    idata = bnn.to_inference_data(
        fitted, guide=guide, args=(rows.x, rows.y), predictions=new, num_samples=500
    )
    return from_draws(idata, rows), None


def adf(rows: Rows, args: argparse.Namespace) -> tuple[Prediction, Any]:
    import jax

    import numpyro_bnn as bnn

    guide = bnn.guides.AutoADF(network(bnn.priors.Normal(), heteroscedastic=False))
    fit = guide.run(
        jax.random.key(args.seed),
        rows.x,
        rows.y,
        num_epochs=args.steps(40),
        progress_bar=False,
    )
    return from_moments(*guide.predictive_moments(fit.params, rows.x_new), rows), None


def laplace(rows: Rows, args: argparse.Namespace) -> tuple[Prediction, Any]:
    import jax

    import numpyro_bnn as bnn

    guide = bnn.guides.AutoLaplace(
        network(bnn.priors.Normal(), heteroscedastic=False), "kron"
    )
    options = {
        "num_epochs": args.steps(200),
        "num_rounds": 6,
        "tune_prior": True,
        "progress_bar": False,
    }
    with jax.enable_x64(True):
        x, y, x_new = (
            np.asarray(part, np.float64) for part in (rows.x, rows.y, rows.x_new)
        )
        fit = guide.run(jax.random.key(args.seed), x, y, **options)
        found = guide.predictive(fit.params, x_new)
        return from_moments(found.mean, found.variance, rows), None


def ensemble(rows: Rows, args: argparse.Namespace) -> tuple[Prediction, Any]:
    """Five networks with an output for the noise, trained by Adam with weight decay
    until held-out rows get worse.
    """
    import jax
    import jax.numpy as jnp
    import optax
    from scipy import stats

    import numpyro_bnn as bnn

    net, steps = bnn.nn.MLP([50, 2], "tanh"), args.steps(4000)
    optimizer = optax.adamw(optax.cosine_decay_schedule(0.01, steps), weight_decay=1e-3)

    x, y = jnp.asarray(rows.x), jnp.asarray(rows.y)

    def loss(params, x, y):
        mean, log_sd = jnp.moveaxis(net.apply(params, x), -1, 0)
        sd = LEAST_SD + jnp.exp(log_sd)
        return jnp.mean(jnp.log(sd) + 0.5 * jnp.square((y - mean) / sd))

    @jax.jit
    def train(key):
        order = jax.random.permutation(key, len(y))
        kept, held = order[len(order) // 10 :], order[: len(order) // 10]
        params = net.init(key, rows.x.shape[1:])
        parts = (
            (lambda params: loss(params, x[kept], y[kept])),
            (lambda params: loss(params, x[held], y[held])),
        )
        return early_stopped(*parts, params, optimizer, steps)[0]

    members = jax.vmap(train)(jax.random.split(jax.random.key(args.seed), 5))
    out = jax.vmap(net.apply, (0, None))(members, rows.x_new)
    means, sds = (
        np.asarray(out[..., 0], float),
        LEAST_SD + np.exp(np.asarray(out[..., 1], float)),
    )
    mean, variance = means.mean(0), (sds**2).mean(0) + means.var(0)
    density = np.log(stats.norm.pdf(rows.y_new, means, sds).mean(0)) - np.log(
        rows.scale
    )
    return from_moments(mean, variance, rows)._replace(log_density=density), None


def boosting(rows: Rows, args: argparse.Namespace) -> tuple[Prediction, Any]:
    """Settings by cross-validation; normal noise with the error of the
    left-out folds.
    """
    from sklearn.ensemble import HistGradientBoostingRegressor
    from sklearn.model_selection import GridSearchCV, KFold, cross_val_predict
    from threadpoolctl import threadpool_limits

    folds = KFold(5, shuffle=True, random_state=args.seed)
    grid = {
        "learning_rate": [0.05, 0.15],
        "max_leaf_nodes": [6, 15],
        "min_samples_leaf": [2, 6],
    }
    base = HistGradientBoostingRegressor(
        max_iter=args.steps(250), early_stopping=False, random_state=args.seed
    )
    with threadpool_limits(1):  # so few rows are faster on one core
        found = GridSearchCV(
            base, grid, cv=folds, scoring="neg_mean_squared_error"
        ).fit(rows.x, rows.y)
        errors = (
            cross_val_predict(found.best_estimator_, rows.x, rows.y, cv=folds) - rows.y
        )
    mean = found.predict(rows.x_new)
    return from_moments(mean, np.full(len(mean), np.mean(errors**2)), rows), None


METHODS: dict[str, Callable[[Rows, argparse.Namespace], tuple[Prediction, Any]]] = {
    "microcanonical chains": chains,
    "coupling flow": flow,
    "probabilistic backpropagation": adf,
    "Laplace approximation": laplace,
    "deep ensemble": ensemble,
    "gradient boosting": boosting,
}


# -- what they predict -----------------------------------------------------------------


def from_draws(idata: Any, rows: Rows) -> Prediction:
    from numpyro_bnn import metrics

    test = idata["predictions"]
    density = metrics.lppd(test["y_log_likelihood"]).pointwise - np.log(rows.scale)
    low, high = np.quantile(
        test["y"].to_numpy().astype(np.float64), [0.05, 0.95], axis=(0, 1)
    )
    mean = test["y_mean"].to_numpy().astype(np.float64).mean((0, 1))
    return Prediction(
        in_units(mean, rows), density, in_units(low, rows), in_units(high, rows)
    )


def from_moments(mean: Any, variance: Any, rows: Rows) -> Prediction:
    from scipy import stats

    mean, sd = np.asarray(mean, np.float64), np.sqrt(np.asarray(variance, np.float64))
    density = stats.norm.logpdf(rows.y_new, mean, sd) - np.log(rows.scale)
    return Prediction(
        in_units(mean, rows),
        density,
        in_units(mean - 1.645 * sd, rows),
        in_units(mean + 1.645 * sd, rows),
    )


def in_units(values: np.ndarray, rows: Rows) -> np.ndarray:
    return values * rows.scale + rows.center


def scores(
    found: Prediction, best: Prediction, rows: Rows, seconds: float
) -> dict[str, float]:
    y = in_units(rows.y_new.astype(np.float64), rows)
    behind = best.log_density - found.log_density
    return {
        "log_likelihood": float(found.log_density.mean()),
        "behind": float(behind.mean()),
        "standard_error": float(behind.std(ddof=1) / len(behind) ** 0.5),
        "rmse": float(np.sqrt(np.mean((found.mean - y) ** 2))),
        "coverage": float(np.mean((found.low <= y) & (y <= found.high))),
        "seconds": seconds,
    }


def table(report: dict[str, dict[str, float]]) -> str:
    heads = [
        "",
        "log likelihood",
        "behind the chains",
        "RMSE",
        "90 % intervals hold",
        "seconds",
    ]
    lines = []
    for name, row in report.items():
        behind = (
            ""
            if row["behind"] == 0
            else f"{row['behind']:.2f} ± {row['standard_error']:.2f}"
        )
        cells = [
            f"{row['log_likelihood']:.2f}",
            behind,
            f"{row['rmse']:.2f}",
            f"{row['coverage']:.0%}",
        ]
        lines.append([name, *cells, f"{row['seconds']:.0f}"])
    return markdown(heads, lines)


def health(idata: Any) -> str:
    """What the health report of the chains finds, in one line each."""
    from numpyro_bnn import metrics

    found = metrics.health(idata).warnings
    lines = [f"- {finding.what}" for finding in found] or ["- nothing to report"]
    if any("R-hat of the function" in finding.what for finding in found):
        lines.append(
            "  Each chain stays near its own network, so their average is an ensemble, "
            "not the exact posterior."
        )
    return "\n".join(["\nHealth of the chains:", *lines])


def draw(
    report: dict[str, dict[str, float]],
    found: dict[str, Prediction],
    rows: Rows,
    path: Path,
) -> None:
    """Some held-out concretes with the intervals of the chains; all methods by their
    log likelihood.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 4.2), layout="constrained", width_ratios=[1.5, 1]
    )
    best, y = (
        found["microcanonical chains"],
        in_units(rows.y_new.astype(np.float64), rows),
    )
    shown = np.argsort(best.mean)[:: max(1, len(y) // 50)]
    place = np.arange(len(shown))
    inside = (best.low <= y) & (y <= best.high)
    left.vlines(
        place,
        best.low[shown],
        best.high[shown],
        color="C3",
        alpha=0.35,
        linewidth=5,
        label="90 % interval",
    )
    left.plot(place, best.mean[shown], "_", color="C3", label="prediction")
    for ok, color, label in (
        (True, "black", "measured"),
        (False, "C0", "measured, outside"),
    ):
        chosen = inside[shown] == ok
        left.plot(place[chosen], y[shown][chosen], ".", color=color, label=label)
    left.set(
        xticks=[],
        xlabel="concretes that were held out, by predicted strength",
        ylabel="strength (MPa)",
    )
    left.set_title(f"{len(shown)} of them, as the chains predict them", fontsize=10)
    left.legend(fontsize=8, loc="upper left")
    for number, row in enumerate(report.values()):
        color = "C3" if number == 0 else "0.35"
        right.errorbar(
            -row["behind"],
            -number,
            xerr=2 * row["standard_error"],
            fmt="o",
            color=color,
            capsize=3,
        )
    right.axvline(0, color="C3", linewidth=0.8, alpha=0.5)
    right.set_yticks([-number for number in range(len(report))], report)
    right.set_xlabel(
        "log likelihood of a held-out strength, less that\nof the chains (bars: two "
        "standard errors)"
    )
    right.set_title(f"all {len(y)}: six methods, right is better", fontsize=10)
    right.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


# -- the command -----------------------------------------------------------------------


def compare(
    args: argparse.Namespace, rows: Rows
) -> tuple[dict[str, dict[str, float]], dict[str, Prediction], Any]:
    """Scores and predictions by method, and the result of the chains for ArviZ."""
    found: dict[str, Prediction] = {}
    report, idata, start = {}, None, time.perf_counter()
    for number, (name, method) in enumerate(METHODS.items(), 1):
        progress(f"{number} of {len(METHODS)}: {name}", start)
        before = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the health report follows the table
            found[name], kept = method(rows, args)
        idata = idata or kept
        report[name] = scores(
            found[name], next(iter(found.values())), rows, time.perf_counter() - before
        )
    progress("done", start)
    return report, found, idata


def progress(note: str, start: float) -> None:
    """One line, written over itself in a terminal."""
    over, end = ("\r", "") if sys.stderr.isatty() else ("", "\n")
    print(
        f"{over}{time.perf_counter() - start:4.0f} s  {note:40}",
        end=end,
        file=sys.stderr,
        flush=True,
    )


def main(argv: list[str] | None = None) -> dict[str, dict[str, float]]:
    args = parse(argv)
    folder = writable_folder(args.output)
    one_device_per_core()
    rows = load(args.seed, args.held_out)
    report, found, idata = compare(args, rows)
    print(f"\n{len(rows.y_new)} concretes that no method has seen; RMSE in MPa\n")
    print(table(report))
    print(health(idata))
    idata.to_netcdf(folder / "demo.nc")
    draw(report, found, rows, folder / "demo.png")
    print(
        f"\nThe picture is {folder / 'demo.png'}, the chains for ArviZ are "
        f"{folder / 'demo.nc'}.\n"
        "Next: your own table in three lines (docs/estimators.md), your own model "
        "(docs/getting_started.md),\n"
        "or which method to take (docs/choosing.md)."
    )
    return report


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.demo",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--held-out", type=int, default=309, help="rows that are held out, of 1030"
    )
    parser.add_argument(
        "--effort", type=float, default=1.0, help="factor of all numbers of steps"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="chooses the held-out rows, and starts the methods",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("output"),
        help="folder of the picture and the chains",
    )
    args = parser.parse_args(argv)
    at_least(parser, args, ("held_out",), 2)
    if args.held_out > 700 or not args.effort > 0:
        parser.error("--held-out must be at most 700, --effort above 0")
    args.steps = lambda usual: max(4, round(args.effort * usual))
    return args


if __name__ == "__main__":
    main()
