"""The classifier on three tables that scikit-learn ships, beside logistic regression,
boosting and one network.

Every method gets the same random stratified splits, whose number is the seed. Logistic
regression chooses its penalty by cross-validation. Boosting is run with scikit-learn's
defaults, and tuned: a fifth of the training rows chooses the settings and the number of
trees by log loss, and the model is fitted again to all training rows. One network is
stopped by a fifth of the rows and gets its temperature from them. Log loss is in nats.

Splits that are in the file are not computed again.

    python -m examples.benchmarks.classification --output docs/classification.json
    --docs docs/tables/estimators.md
"""

import argparse
import json
import time
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from examples import loaders
from examples.benchmarks.shared import (
    environment,
    mean_and_error,
    options_of,
    put_table,
    write_report,
)
from examples.shared import at_least, early_stopped, markdown, writable_file

# The effort of the classifier on each set: a split then takes about half a minute of a
# processor.
EFFORTS = {"breast_cancer": 0.25, "wine": 0.5, "digits": 0.05}
OURS = "Classifier"
HELD_OUT = 0.2
GRID = {"learning_rate": (0.03, 0.1), "max_leaf_nodes": (4, 15)}
# Score -> digits, and whether larger is better.
SCORES = {"log_loss": (3, False), "accuracy": (3, True), "ece": (3, False)}
TITLES = {"log_loss": "log loss", "accuracy": "accuracy", "ece": "ECE"}


def split_of(name: str, split: int, fraction: float) -> Any:
    """Training and test rows with the same shares of the classes."""
    from sklearn.model_selection import train_test_split

    parts = loaders.load_sklearn(name)
    x, y = (
        np.concatenate(pair)
        for pair in ((parts.x_train, parts.x_test), (parts.y_train, parts.y_test))
    )
    x_train, x_test, y_train, y_test = train_test_split(
        x, y, test_size=fraction, stratify=y, random_state=split
    )
    return loaders.Dataset(x_train, y_train, x_test, y_test, name, parts.feature_names)


def held_out_fifth(data: Any, seed: int) -> tuple[tuple, tuple]:
    """Training rows to fit, and rows that decide: inputs and labels."""
    from sklearn.model_selection import train_test_split

    x, y = data.x_train, data.y_train
    x, x_held_out, y, y_held_out = train_test_split(
        x, y, test_size=HELD_OUT, stratify=y, random_state=seed
    )
    return (x, y), (x_held_out, y_held_out)


# --------------------------------------------------------------------------------------
# methods


def classifier(data: Any, seed: int, args: argparse.Namespace) -> np.ndarray:
    """Ours, with its defaults but for the effort."""
    from numpyro_bnn.estimators import Classifier

    model = Classifier(effort=args.effort * EFFORTS[data.name], random_state=seed)
    return model.fit(data.x_train, data.y_train).predict_proba(data.x_test)


def logistic(data: Any, seed: int, args: argparse.Namespace) -> np.ndarray:
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV, StratifiedKFold
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    folds = StratifiedKFold(5, shuffle=True, random_state=seed)
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=5000))
    grid = {"logisticregression__C": np.logspace(-3, 3, 13)}
    search = GridSearchCV(model, grid, cv=folds, scoring="neg_log_loss").fit(
        data.x_train, data.y_train
    )
    return search.predict_proba(data.x_test)


def boosting(data: Any, seed: int, args: argparse.Namespace) -> np.ndarray:
    from sklearn.ensemble import HistGradientBoostingClassifier

    trees = max(1, round(100 * args.effort))
    model = HistGradientBoostingClassifier(max_iter=trees, random_state=seed)
    return model.fit(data.x_train, data.y_train).predict_proba(data.x_test)


def boosting_tuned(data: Any, seed: int, args: argparse.Namespace) -> np.ndarray:
    from sklearn.ensemble import HistGradientBoostingClassifier

    rows, held_out = held_out_fifth(data, seed)
    most, found = max(1, round(400 * args.effort)), []
    for values in product(*GRID.values()):
        setting = dict(zip(GRID, values, strict=True))
        options = {"early_stopping": False, "random_state": seed, **setting}
        model = HistGradientBoostingClassifier(max_iter=most, **options).fit(*rows)
        losses = [
            log_loss(probs, held_out[1])
            for probs in model.staged_predict_proba(held_out[0])
        ]
        found.append((min(losses), int(np.argmin(losses)) + 1, options))
    _, trees, options = min(found, key=lambda trial: trial[0])
    model = HistGradientBoostingClassifier(max_iter=trees, **options)
    return model.fit(data.x_train, data.y_train).predict_proba(data.x_test)


def one_network(data: Any, seed: int, args: argparse.Namespace) -> np.ndarray:
    """50 ReLU units, Adam stopped by held-out rows, and the temperature that they
    choose.
    """
    import jax
    import jax.numpy as jnp
    import optax
    from scipy.optimize import minimize_scalar
    from scipy.special import softmax

    from numpyro_bnn import nn
    from numpyro_bnn.datasets import Scaler

    rows, held_out = held_out_fifth(data, seed)
    scaler = Scaler.fit(rows[0])
    net, steps = (
        nn.MLP([50, int(data.y_train.max()) + 1], "relu"),
        max(1, round(2000 * args.effort)),
    )

    def mean_loss(part: tuple) -> Any:
        x, y = jnp.asarray(scaler.transform(part[0]), float), jnp.asarray(part[1])

        def of_params(params: Any) -> Any:
            return optax.softmax_cross_entropy_with_integer_labels(
                net.apply(params, x), y
            ).mean()

        return of_params

    start = net.init(jax.random.key(seed), data.x_train.shape[1:])
    optimizer = optax.adam(0.003)
    learn = jax.jit(
        lambda start: early_stopped(
            mean_loss(rows), mean_loss(held_out), start, optimizer, steps
        )[0]
    )
    params = learn(start)

    def logits(x: np.ndarray) -> np.ndarray:
        return np.asarray(
            net.apply(params, jnp.asarray(scaler.transform(x), float)), np.float64
        )

    known = logits(held_out[0])
    best = minimize_scalar(
        lambda log: log_loss(softmax(known / np.exp(log), axis=1), held_out[1]),
        bounds=(-3.0, 3.0),
        method="bounded",
    )
    return softmax(logits(data.x_test) / np.exp(best.x), axis=1)


METHODS = {
    OURS: classifier,
    "logistic regression": logistic,
    "boosting": boosting,
    "boosting, tuned": boosting_tuned,
    "one network, temperature": one_network,
}


# --------------------------------------------------------------------------------------
# scores


def log_loss(probs: np.ndarray, labels: np.ndarray) -> float:
    return float(
        -np.log(np.maximum(probs[np.arange(len(labels)), labels], 1e-15)).mean()
    )


def scores(probs: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    from numpyro_bnn import metrics

    probs = np.asarray(probs, np.float64)
    probs = probs / probs.sum(axis=1, keepdims=True)
    return {
        "log_loss": log_loss(probs, labels),
        "accuracy": metrics.accuracy(probs, labels).value,
        "ece": metrics.ece(probs, labels).ece,
    }


def compare(name: str, split: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A line for each method; warnings are part of it."""
    data, lines = split_of(name, split, args.test_fraction), []
    for method in args.methods:
        start = time.perf_counter()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            probs = METHODS[method](data, split, args)
        line = {
            "set": name,
            "split": split,
            "method": method,
            **scores(probs, data.y_test),
        }
        effort = {"effort": args.effort * EFFORTS[name]} if method == OURS else {}
        seen = sorted({str(warning.message) for warning in caught})
        lines.append(
            line | effort | {"seconds": time.perf_counter() - start, "warnings": seen}
        )
    return lines


def table(rows: list[dict[str, Any]]) -> str:
    """Means over splits, and for each other method how much better ours is, split by
    split, with standard errors.
    """
    lines = []
    for name in dict.fromkeys(row["set"] for row in rows):
        by_method: dict[str, dict[int, dict[str, Any]]] = {}
        for row in rows:
            if row["set"] == name:
                by_method.setdefault(row["method"], {})[row["split"]] = row
        ours = by_method.get(OURS, {})
        for method, own in by_method.items():
            efforts = {row["effort"] for row in own.values() if "effort" in row}
            title = method + "".join(
                f", effort {effort:g}" for effort in sorted(efforts)
            )
            cells = [
                f"{np.mean([row[score] for row in own.values()]):.{d}f}"
                for score, (d, _) in SCORES.items()
            ]
            gains = []
            for score, (digits, larger) in SCORES.items():
                common = [split for split in own if split in ours and method != OURS]
                values = [
                    (1 if larger else -1) * (ours[split][score] - own[split][score])
                    for split in common
                ]
                mean, error = mean_and_error(values) if values else (0.0, 0.0)
                gains.append(
                    f"{mean:+.{digits}f} ± {error:.{digits}f}" if values else ""
                )
            seconds = np.median([row["seconds"] for row in own.values()])
            lines.append([name, len(own), title, *cells, *gains, f"{seconds:.0f}"])
    heads = [
        "set",
        "splits",
        "",
        *TITLES.values(),
        *(f"gain in {title}" for title in TITLES.values()),
    ]
    return markdown([*heads, "seconds, median"], lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.benchmarks.classification",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--sets",
        nargs="+",
        choices=list(EFFORTS),
        default=list(EFFORTS),
        help="data sets",
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=list(METHODS),
        default=list(METHODS),
        help="what to compare",
    )
    parser.add_argument(
        "--splits", type=int, default=10, help="number of random splits"
    )
    parser.add_argument(
        "--test-fraction", type=float, default=0.2, help="share of the rows for testing"
    )
    parser.add_argument(
        "--effort",
        type=float,
        default=1.0,
        help="factor of all numbers of steps and trees",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("output/classification.json"),
        help="JSON file",
    )
    parser.add_argument("--docs", type=Path, help="page whose table is to be replaced")
    args = parser.parse_args(argv)
    at_least(parser, args, ("splits",))
    if not args.effort > 0:
        parser.error("--effort must be above 0")
    if not 0 < args.test_fraction < 1:
        parser.error("--test-fraction must be between 0 and 1")
    return args


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    text = writable_file(args.output).read_text()
    rows = json.loads(text)["rows"] if text else []
    done = {(row["set"], row["split"]) for row in rows}
    report: dict[str, Any] = {
        "rows": rows,
        "options": options_of(args),
        **environment(["scikit-learn"]),
    }
    for split in range(args.splits):
        for name in args.sets:
            if (name, split) not in done:
                rows += compare(name, split, args)
                write_report(args.output, report)
                print(f"{name}, split {split}: done", flush=True)
    text = table(report["rows"])
    print(text)
    put_table(args.docs, "classification", text, report)
    return report


if __name__ == "__main__":
    main()
