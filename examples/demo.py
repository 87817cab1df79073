"""How heavy is this penguin? From a raw table to intervals, in one call.

Biologists measured the penguins of three islands (`examples/data/penguins.csv`): a
table with text, dates and gaps. A Bayesian neural network learns from it as it is, and
predicts the body mass of penguins that were held out. Gradient boosting and a deep
ensemble stand beside it.

    make demo
    python -m examples.demo --help
"""

import argparse
import inspect
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_bnn as bnn
from examples.shared import at_least, early_stopped, markdown, writable_folder
from examples.tabular import interval_score

FILE = Path(__file__).parent / "data" / "penguins.csv"
TARGET = "Body Mass (g)"
# Names of studies and birds, notes, and columns with one value.
LEFT_OUT = (
    "studyName",
    "Sample Number",
    "Individual ID",
    "Comments",
    "Region",
    "Stage",
)
LEVELS = (0.05, 0.5, 0.95)  # both ends of a 90 % interval, and its median
LEAST_SD = 0.01  # of the ensemble's noise, in standard deviations of the target
BAYES = "Bayesian network"
SCORES = """\
Error: mean distance of prediction and weight. Intervals should hold nine times in ten,
and be narrow. The interval score judges both: width, plus 20 times the distance of
weights outside. Smaller is better. In brackets: above the Bayesian network, with a
standard error."""
NEXT = """\
WHAT TO TRY NEXT:

  your own table           docs/howto/tables.md
  your own model           docs/getting_started.md
  which method to choose   docs/choosing.md
  the best predictions     python -m examples.demo --effort 1"""


class Penguins(NamedTuple):
    """Rows to learn from, and rows that are held out."""

    table: Any
    mass: np.ndarray
    new_table: Any
    new_mass: np.ndarray


def load(seed: int, held_out: int) -> Penguins:
    import pandas as pd

    table = pd.read_csv(FILE).dropna(subset=[TARGET])
    order = np.random.default_rng(seed).permutation(len(table))
    mass = table.pop(TARGET).to_numpy(float)
    table = table.drop(columns=list(LEFT_OUT))
    new, old = order[:held_out], order[held_out:]
    return Penguins(table.iloc[old], mass[old], table.iloc[new], mass[new])


# -- three ways ------------------------------------------------------------------------


def network(penguins: Penguins, args: argparse.Namespace) -> tuple[np.ndarray, Any]:
    """The table as it is. Leave out `effort` for the best predictions."""
    from numpyro_bnn.estimators import Regressor

    forecaster = Regressor(effort=args.effort, random_state=args.seed)
    forecaster.fit(penguins.table, penguins.mass)
    return forecaster.predict_quantiles(penguins.new_table, LEVELS), forecaster


def as_numbers(penguins: Penguins) -> tuple[np.ndarray, np.ndarray]:
    """What the others need: text as switches, dates as days, gaps as the median."""
    import pandas as pd

    both = pd.concat([penguins.table, penguins.new_table])
    both["Date Egg"] = pd.to_datetime(both["Date Egg"]).map(pd.Timestamp.toordinal)
    numbers = pd.get_dummies(both, dummy_na=True).to_numpy(float)
    size = len(penguins.table)
    center, scale = np.nanmean(numbers[:size], 0), np.nanstd(numbers[:size], 0)
    numbers = np.where(np.isnan(numbers), np.nanmedian(numbers[:size], 0), numbers)
    numbers = (numbers - center) / np.where(scale > 0, scale, 1.0)
    return numbers[:size], numbers[size:]


def boosting(penguins: Penguins, args: argparse.Namespace) -> tuple[np.ndarray, None]:
    """One model for each quantile, with settings by cross-validation."""
    from sklearn.ensemble import HistGradientBoostingRegressor
    from sklearn.metrics import make_scorer, mean_pinball_loss
    from sklearn.model_selection import GridSearchCV, KFold
    from threadpoolctl import threadpool_limits

    x, x_new = as_numbers(penguins)
    folds = KFold(3, shuffle=True, random_state=args.seed)
    grid = {"max_leaf_nodes": [2, 4, 8], "learning_rate": [0.05, 0.1]}
    quantiles = []
    with threadpool_limits(1):  # so few rows are faster on one core
        for level in LEVELS:
            trees = HistGradientBoostingRegressor(
                loss="quantile",
                quantile=level,
                max_iter=120,
                early_stopping=False,
                random_state=args.seed,
            )
            loss = make_scorer(mean_pinball_loss, alpha=level, greater_is_better=False)
            search = GridSearchCV(trees, grid, cv=folds, scoring=loss)
            quantiles.append(search.fit(x, penguins.mass).predict(x_new))
    return np.sort(quantiles, axis=0), None  # curves of separate models may cross


def ensemble(penguins: Penguins, args: argparse.Namespace) -> tuple[np.ndarray, None]:
    """Five networks with an output for the noise, trained until rows that are set
    aside get worse.
    """
    import optax

    x, x_new = as_numbers(penguins)
    center, scale = penguins.mass.mean(), penguins.mass.std()
    x, y = jnp.asarray(x), jnp.asarray((penguins.mass - center) / scale)
    net, steps = bnn.nn.MLP([50, 2], "tanh"), max(4, round(10_000 * args.effort))

    def moments(params: Any, x: Any) -> tuple[Any, Any]:
        mean, log_sd = jnp.moveaxis(net.apply(params, x), -1, 0)
        return mean, LEAST_SD + jnp.exp(log_sd)

    def train(key: Any) -> Any:
        order = jax.random.permutation(key, len(y))
        aside, rows = order[: len(y) // 10], order[len(y) // 10 :]

        def loss(params: Any, chosen: Any) -> Any:
            return -dist.Normal(*moments(params, x[chosen])).log_prob(y[chosen]).mean()

        adam = optax.adamw(optax.cosine_decay_schedule(0.01, steps), weight_decay=1e-3)
        start = net.init(key, x.shape[1:])
        return early_stopped(
            lambda params: loss(params, rows),
            lambda params: loss(params, aside),
            start,
            adam,
            steps,
        )[0]

    members = jax.jit(jax.vmap(train))(jax.random.split(jax.random.key(args.seed), 5))
    means, sds = jax.vmap(moments, (0, None))(members, jnp.asarray(x_new))
    means, sds = np.asarray(means, float), np.asarray(sds, float)

    # The prediction is the mixture of the five; its quantiles are those of draws.
    generator = np.random.default_rng(args.seed)
    draws = center + scale * generator.normal(means, sds, (1000, *means.shape))
    return np.quantile(draws, LEVELS, axis=(0, 1)), None


WAYS: dict[str, Callable[[Penguins, argparse.Namespace], tuple[np.ndarray, Any]]] = {
    BAYES: network,
    "gradient boosting": boosting,
    "deep ensemble": ensemble,
}


# -- the model behind the network ------------------------------------------------------


def model(x, y=None):
    net = bnn.nn.MLP([16, 16, 16, 2], "relu")
    f = bnn.random_network("net", net, x.shape[1:], bnn.priors.Hierarchical())
    excess_df = numpyro.sample("excess_df", dist.Gamma(2.0, 0.1))
    with numpyro.plate("data", len(x)):
        mean, spread = jnp.moveaxis(f(x), -1, 0)
        noise = dist.StudentT(2 + excess_df, mean, 1e-6 + jax.nn.softplus(spread))
        numpyro.sample("y", noise, obs=y)


# -- what is printed and drawn ---------------------------------------------------------


def scores(
    quantiles: np.ndarray, best: np.ndarray, mass: np.ndarray, seconds: float
) -> dict[str, float]:
    """Of 90 % intervals and medians (3, N), beside those of another way, in grams."""
    low, median, high = quantiles
    score = interval_score(low, high, mass)
    worse = score - interval_score(best[0], best[2], mass)
    return {
        "error": float(np.mean(np.abs(median - mass))),
        "coverage": float(np.mean((low <= mass) & (mass <= high))),
        "width": float(np.mean(high - low)),
        "interval_score": float(np.mean(score)),
        "worse": float(np.mean(worse)),
        "standard_error": float(np.std(worse, ddof=1) / len(worse) ** 0.5),
        "seconds": seconds,
    }


def compare(
    penguins: Penguins, args: argparse.Namespace
) -> tuple[dict[str, dict[str, float]], np.ndarray, Any]:
    """Scores by way, and quantiles and forecaster of the Bayesian network."""
    report: dict[str, dict[str, float]] = {}
    best, forecaster = np.empty(0), None
    for name, way in WAYS.items():
        print(f"... {name}", flush=True)
        start = time.perf_counter()
        quantiles, fitted = way(penguins, args)
        if fitted is not None:
            best, forecaster = quantiles, fitted
        seconds = time.perf_counter() - start
        report[name] = scores(quantiles, best, penguins.new_mass, seconds)
    return report, best, forecaster


def table(report: dict[str, dict[str, float]]) -> str:
    heads = ("", "error", "intervals hold", "width", "interval score", "seconds")
    lines = []
    for name, row in report.items():
        score = f"{row['interval_score']:.0f}"
        if name != BAYES:
            score += f" ({row['worse']:+.0f} ± {row['standard_error']:.0f})"
        cells = (f"{row['error']:.0f}", f"{row['coverage']:.0%}", f"{row['width']:.0f}")
        lines.append((name, *cells, score, f"{row['seconds']:.0f}"))
    return markdown(heads, lines)


def show_table(penguins: Penguins) -> None:
    gaps = int(penguins.table.isna().sum().sum())
    print(
        f"THE TABLE, as it came: {len(penguins.table)} penguins to learn from, "
        f"{len(penguins.new_table)} held out.\nText, a date, {gaps} gaps. The first "
        f"two:\n\n{penguins.table.head(2).T.to_string(header=False)}\n\nFitting:"
    )


def show_predictions(
    penguins: Penguins, quantiles: np.ndarray, forecaster: Any
) -> None:
    above = 1 - forecaster.cdf(penguins.new_table[:3], np.full(3, 4500.0))
    print("\nTHREE HELD-OUT PENGUINS, with 90 % intervals:\n")
    for place in range(3):
        bird = penguins.new_table.iloc[place]
        species, (low, _, high) = bird["Species"].split()[0], quantiles[:, place]
        print(
            f"  {species}, flipper {bird['Flipper Length (mm)']:.0f} mm: between "
            f"{low:.0f} and {high:.0f} g, above 4500 g with probability "
            f"{above[place]:.2f}. It weighed {penguins.new_mass[place]:.0f} g."
        )


def show_importances(importances: dict[str, float]) -> None:
    print(
        "\nWHICH COLUMNS THE PREDICTIONS USE, as shares of their variance. Where "
        "columns\nsay the same, as species and flipper do, shares add up to less than "
        "100 %:\n"
    )
    for name, share in importances.items():
        bar = "#" * round(100 * share)
        print(f"  {name:20} {share:4.0%} {bar}".rstrip())


def show_health(health: Any) -> None:
    """What the health report says, and what follows from it."""
    print(f"\nCAN THE FIT BE TRUSTED? {len(health.findings)} checks were made.\n")
    for finding in health.warnings:
        print(f"  {finding.what}. {finding.advice}")
    if not health.warnings:
        print("  All passed.")
    elif all(finding.name in ("rhat", "ess") for finding in health.warnings):
        print(
            "  Here this does not matter: each chain explores near its own network, "
            "and the\n  held-out penguins above judge the average of all of them."
        )


def show_model() -> None:
    print(
        "\nTHE NUMPYRO MODEL BEHIND IT, for standardized columns. It is yours to "
        f"change:\n\n{inspect.getsource(model)}"
    )


def draw(
    report: dict[str, dict[str, float]],
    quantiles: np.ndarray,
    importances: dict[str, float],
    penguins: Penguins,
    path: Path,
) -> None:
    """Held-out penguins with their intervals, importances, and scores of all ways."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["font.size"] = 11
    figure, axes = plt.subplot_mosaic(
        [["birds", "columns"], ["birds", "ways"]],
        figsize=(8.4, 5.2),
        layout="constrained",
        width_ratios=[1.35, 1],
        height_ratios=[1.5, 1],
    )
    _draw_birds(axes["birds"], quantiles, penguins)
    names = list(importances)[:6][::-1]
    axes["columns"].barh(
        [name.split(" (")[0] for name in names],
        [100 * importances[name] for name in names],
        color="0.45",
    )
    axes["columns"].set_title("what the predictions use (%)", fontsize=11)
    for place, row in enumerate(report.values()):
        error = 2 * row["standard_error"]
        color = "black" if place == 0 else "0.45"
        axes["ways"].errorbar(
            row["worse"], -place, xerr=error, fmt="o", capsize=3, color=color
        )
    axes["ways"].axvline(0, color="0.7", linewidth=1, zorder=0)
    axes["ways"].set_yticks(-np.arange(len(report)), list(report))
    axes["ways"].set_ylim(0.5 - len(report), 0.5)
    axes["ways"].set_title("interval score: left is better", fontsize=11)
    axes["ways"].set_xlabel("grams above the first way\n(bars: two standard errors)")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_birds(axes: Any, quantiles: np.ndarray, penguins: Penguins) -> None:
    colors = {"Adelie": "#0072b2", "Chinstrap": "#cc79a7", "Gentoo": "#d55e00"}
    species = penguins.new_table["Species"].str.split().str[0].to_numpy()
    order = np.argsort(quantiles[1])
    shown = order[np.linspace(0, len(order) - 1, 40).astype(int)]
    place = np.arange(len(shown))
    for name, color in colors.items():
        chosen = species[shown] == name
        low, _, high = quantiles[:, shown[chosen]] / 1000
        axes.vlines(
            place[chosen], low, high, color=color, alpha=0.4, linewidth=4.5, label=name
        )
    axes.plot(place, penguins.new_mass[shown] / 1000, "k.", label="weighed")
    axes.set(xticks=[], xlabel="penguins that were held out", ylabel="body mass (kg)")
    axes.set_title("90 % intervals", fontsize=11)
    axes.legend(fontsize=10, loc="upper left")


# -- the command -----------------------------------------------------------------------


def main(argv: list[str] | None = None) -> dict[str, dict[str, float]]:
    args = parse(argv)
    folder = writable_folder(args.output)
    penguins = load(args.seed, args.held_out)
    show_table(penguins)
    report, quantiles, forecaster = compare(penguins, args)
    importances = forecaster.importances()
    print("\nWHAT BECAME OF THE COLUMNS (the first line is all the code):\n")
    print(forecaster)
    show_predictions(penguins, quantiles, forecaster)
    print(f"\nALL {len(penguins.new_mass)} HELD-OUT PENGUINS, in grams.\n{SCORES}\n")
    print(table(report))
    show_importances(importances)
    show_model()
    show_health(bnn.metrics.health(forecaster.idata_))
    draw(report, quantiles, importances, penguins, folder / "demo.png")
    print(f"\nThe picture is {folder / 'demo.png'}.\n\n{NEXT}")
    return report


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.demo",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--held-out", type=int, default=114, help="penguins held out, of 342"
    )
    parser.add_argument(
        "--effort",
        type=float,
        default=0.2,
        help="factor of the usual numbers of steps; 1 for the best predictions",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="chooses the held-out penguins, and starts the fits",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("output"), help="folder of the picture"
    )
    args = parser.parse_args(argv)
    at_least(parser, args, ("held_out",), 3)
    if args.held_out > 180 or not args.effort > 0:
        parser.error("--held-out must be at most 180, --effort above 0")
    return args


if __name__ == "__main__":
    main()
