"""Tables with intervals: a Bayesian network beside gradient boosting, on UCI sets.

``Regressor()`` gives a mean, a density and intervals by one fit. Boosting takes three:
the mean by squared error, both ends of the interval by quantile losses. Its settings
are chosen by cross-validation on the training rows, and so is the sd of the normal
noise that gives it a density. The third way widens the quantiles until they hold enough
of a quarter of the training rows, which they have not seen (conformalized quantile
regression).

Smaller interval scores are better: the width, plus a penalty for the distance by which
a target is missed. Their mean is smallest for the true quantiles.

    python -m examples.tabular --data FOLDER
"""

import argparse
import json
import os
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from examples import loaders
from examples.shared import at_least, markdown, writable_folder

SETS = ("boston", "concrete", "energy", "yacht")
LEVEL = 0.9
NETWORK, BOOSTING, CONFORMAL = "network", "boosting", "boosting, conformal"
GRID = {
    "learning_rate": [0.05, 0.15],
    "max_leaf_nodes": [4, 12],
    "min_samples_leaf": [3, 10],
}
FIELDS = ("rmse", "log_likelihood", "interval_score", "coverage", "width", "seconds")


class Prediction(NamedTuple):
    """Of the test rows: mean, log density of the targets (None without a density), ends
    of the intervals.
    """

    mean: np.ndarray
    log_density: np.ndarray | None
    low: np.ndarray
    high: np.ndarray


def network(data: Any, args: argparse.Namespace) -> dict[str, Prediction]:
    from numpyro_bnn.estimators import Regressor

    model = Regressor(effort=args.effort, random_state=args.seed).fit(
        data.x_train, data.y_train
    )
    density = model.log_predictive_density(data.x_test, data.y_test)
    return {
        NETWORK: Prediction(
            model.predict(data.x_test),
            density,
            *model.predict_interval(data.x_test, LEVEL),
        )
    }


def boosting(data: Any, args: argparse.Namespace) -> dict[str, Prediction]:
    from scipy import stats
    from sklearn.base import clone
    from sklearn.ensemble import HistGradientBoostingRegressor
    from sklearn.model_selection import GridSearchCV, KFold, cross_val_predict

    x, y = data.x_train, data.y_train
    folds = KFold(5, shuffle=True, random_state=args.seed)
    base = HistGradientBoostingRegressor(
        max_iter=args.trees, early_stopping=False, random_state=args.seed
    )
    search = GridSearchCV(base, GRID, cv=folds, scoring="neg_mean_squared_error").fit(
        x, y
    )
    mean = search.predict(data.x_test)
    sd = np.sqrt(
        np.mean((cross_val_predict(search.best_estimator_, x, y, cv=folds) - y) ** 2)
    )
    density = stats.norm.logpdf(data.y_test, mean, sd)

    order = np.random.default_rng(args.seed).permutation(len(y))
    held, rest = order[: len(y) // 4], order[len(y) // 4 :]

    def ends(rows: np.ndarray) -> list[Any]:
        """Models of both ends, with the settings of the mean."""
        levels = (1 - LEVEL) / 2, (1 + LEVEL) / 2
        made = [
            clone(search.best_estimator_).set_params(loss="quantile", quantile=level)
            for level in levels
        ]
        return [model.fit(x[rows], y[rows]) for model in made]

    low, high = (found.predict(data.x_test) for found in ends(order))
    models = ends(rest)
    missed = np.maximum(
        models[0].predict(x[held]) - y[held], y[held] - models[1].predict(x[held])
    )
    rank = int(np.ceil(LEVEL * (len(held) + 1)))
    margin = np.sort(missed)[min(rank, len(held)) - 1]
    wider = (
        models[0].predict(data.x_test) - margin,
        models[1].predict(data.x_test) + margin,
    )
    return {
        BOOSTING: Prediction(mean, density, low, high),
        CONFORMAL: Prediction(mean, None, *wider),
    }


def interval_score(
    low: np.ndarray, high: np.ndarray, y: np.ndarray, level: float = LEVEL
) -> np.ndarray:
    """Width and missed distances of each row (Gneiting and Raftery 2007,
    equation 43).
    """
    missed = np.maximum(low - y, 0) + np.maximum(y - high, 0)
    return high - low + 2 / (1 - level) * missed


def scores(found: Prediction, data: Any, seconds: float) -> dict[str, float | None]:
    y = data.y_test
    return {
        "rmse": float(np.sqrt(np.mean((found.mean - y) ** 2))),
        "log_likelihood": None
        if found.log_density is None
        else float(found.log_density.mean()),
        "interval_score": float(interval_score(found.low, found.high, y).mean()),
        "coverage": float(np.mean((found.low <= y) & (y <= found.high))),
        "width": float(np.mean(found.high - found.low)),
        "seconds": seconds,
    }


def load_data(name: str, split: int, args: argparse.Namespace) -> Any:
    return (
        loaders.load_uci(name, split, args.data)
        if has_folder(args)
        else loaders.load_sklearn(name, 0.1, split)
    )


def has_folder(args: argparse.Namespace) -> bool:
    return bool(args.data or os.environ.get("NUMPYRO_BNN_DATA"))


def compare(
    args: argparse.Namespace,
) -> dict[str, dict[str, list[dict[str, float | None]]]]:
    """Scores by set, method and split."""
    names = args.sets
    if not has_folder(args):
        print("no data folder (--data, NUMPYRO_BNN_DATA): the diabetes data instead")
        names = ["diabetes"]
    report: dict[str, Any] = {}
    for name in names:
        for split in range(args.splits):
            data = load_data(name, split, args)
            for way in (network, boosting):
                start = time.perf_counter()
                with warnings.catch_warnings(record=True) as seen:
                    warnings.simplefilter("always")
                    found = way(data, args)
                for method, prediction in found.items():
                    line = scores(prediction, data, time.perf_counter() - start)
                    report.setdefault(name, {}).setdefault(method, []).append(line)
                print(
                    *(f"{name}, split {split}: {warning.message}" for warning in seen),
                    sep="\n",
                    end="",
                )
            print(f"{name}, split {split}: done", flush=True)
    return report


def table(report: dict[str, dict[str, list[dict[str, float | None]]]]) -> str:
    """Means over splits; gains of the network over each way, with standard errors of
    the paired differences.
    """
    heads = [
        "set",
        "",
        "RMSE",
        "log likelihood",
        "interval score",
        "coverage",
        "gain in log likelihood",
        "in score",
    ]
    lines = []
    for name, methods in report.items():
        for method, rows in methods.items():
            cells = [name, method]
            for field, digits in (
                ("rmse", 2),
                ("log_likelihood", 2),
                ("interval_score", 2),
                ("coverage", 2),
            ):
                values = [row[field] for row in rows]
                cells.append("-" if None in values else f"{np.mean(values):.{digits}f}")
            for field, sign in (("log_likelihood", 1), ("interval_score", -1)):
                values = [row[field] for row in rows]
                if method == NETWORK or None in values:
                    cells.append("")
                    continue
                gain = sign * (
                    np.array([row[field] for row in methods[NETWORK]])
                    - np.array(values)
                )
                error = (
                    gain.std(ddof=1) / len(gain) ** 0.5
                    if len(gain) > 1
                    else float("nan")
                )
                cells.append(f"{gain.mean():+.2f} ± {error:.2f}")
            lines.append(cells)
    return markdown(heads, lines)


def draw(report: dict[str, Any], path: Path) -> None:
    """Gains of the network over both ways of boosting, by set and split."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(7, 3.2), layout="constrained")
    for number, methods in enumerate(report.values()):
        own = np.array([row["interval_score"] for row in methods[NETWORK]])
        for shift, (method, color) in enumerate(
            ((BOOSTING, "0.35"), (CONFORMAL, "C0"))
        ):
            other = np.array([row["interval_score"] for row in methods[method]])
            label = f"than {method}" if number == 0 else None
            ax.plot(
                100 * (1 - own / other),
                np.full(len(own), -number - 0.2 * shift),
                "o",
                color=color,
                label=label,
            )
    ax.axvline(0, color="C3", linewidth=0.8)
    ax.set_yticks([-number - 0.1 for number in range(len(report))], report)
    ax.set_xlabel(
        "intervals of the network are better by so many percent of their score (one "
        "dot per split)"
    )
    ax.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    folder = writable_folder(args.output)
    report = compare(args)
    print("\n" + table(report))
    print(
        "\nInterval score: width of the 90 % interval, and 20 times the distance by "
        "which a target is missed."
    )
    (folder / "tabular.json").write_text(json.dumps(report, indent=1))
    draw(report, folder / "tabular.png")
    print(f"saved {folder / 'tabular.json'}, {folder / 'tabular.png'}")
    return report


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.tabular",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--data", type=Path, help="folder of the data; otherwise NUMPYRO_BNN_DATA"
    )
    parser.add_argument(
        "--sets", nargs="+", choices=SETS, default=list(SETS), help="data sets"
    )
    parser.add_argument(
        "--splits", type=int, default=5, help="the first so many standard splits"
    )
    parser.add_argument(
        "--effort",
        type=float,
        default=1.0,
        help="factor of all numbers of steps of the network",
    )
    parser.add_argument("--trees", type=int, default=200, help="trees of each boosting")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the network, of folds and of trees"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("output"),
        help="folder of the scores and the figure",
    )
    args = parser.parse_args(argv)
    at_least(parser, args, ("splits", "trees"))
    if not args.effort > 0:
        parser.error("--effort must be above 0")
    return args


if __name__ == "__main__":
    main()
