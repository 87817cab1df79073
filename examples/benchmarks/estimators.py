"""The estimators with their defaults on UCI regression sets, each split in a fresh
process.

Every job is one process that knows nothing yet: its seconds are those that a user waits
for the first prediction, from the start of `fit` to the end of `predict`, compilation
included; the import of the package is listed apart. Log likelihood and RMSE are
compared with those of `examples.benchmarks.uci` on the same splits.

    python -m examples.benchmarks.estimators --data FOLDER --splits 3 --output
    docs/estimators.json \
        --docs docs/tables/estimators.md

With `--rows` it fits random rows instead, as many as asked for, by both networks that
`Regressor` takes by default: three layers with both kinds of noise, and one layer with
one scale. `--splits` is then the number of such subsets, and the other rows, at most
300, are the test set.
"""

import argparse
import json
import subprocess
import sys
import time
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
from examples.benchmarks.uci_table import BOOSTING, NOT_COUNTED
from examples.shared import at_least, markdown, writable_file

SETS = ("boston", "concrete", "energy", "yacht", "wine", "kin8nm")
FIELDS = ("rmse", "log_likelihood")
NETWORKS = ("deep", "shallow")  # the defaults with many and with few rows


def learn_split(
    name: str,
    split: int,
    args: argparse.Namespace,
    rows: int = 0,
    network: str = "default",
) -> dict[str, Any]:
    """Fit and score one split in a process of its own."""
    job = [name, str(split), str(rows), network]
    command = [sys.executable, "-m", "examples.benchmarks.estimators", "--job", *job]
    command += ["--method", args.method, "--effort", str(args.effort)]
    command += ["--data", str(args.data)] if args.data else []
    folder = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def load(
    name: str, split: int, rows: int, folder: Path | None
) -> tuple[np.ndarray, ...]:
    """Inputs and targets of training and test rows: of a standard split, or so many
    random rows and others.
    """
    data = loaders.load_uci(name, split, folder)
    if not rows:
        return data.x_train, data.y_train, data.x_test, data.y_test
    x, y = (
        np.concatenate([data.x_train, data.x_test]),
        np.concatenate([data.y_train, data.y_test]),
    )
    order = np.random.default_rng(split).permutation(len(x))
    train, test = order[:rows], order[rows:][:300]
    return x[train], y[train], x[test], y[test]


def job(
    name: str, split: int, rows: int, network: str, args: argparse.Namespace
) -> dict[str, Any]:
    """What such a process does."""
    import warnings

    started = time.perf_counter()
    from numpyro_bnn.estimators import Regressor, methods

    imported = time.perf_counter() - started
    x, y, x_test, y_test = load(name, split, rows, args.data)
    options = {}
    if network in NETWORKS:
        usual = methods.Regression.usual(
            "ensemble", methods.MIN_ROWS_OF_NOISE - (network == "shallow")
        )
        options = usual._asdict()
    wall, processor = time.perf_counter(), time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        model = Regressor(
            args.method, effort=args.effort, random_state=0, **options
        ).fit(x, y)
    mean = model.predict(x_test)
    seconds = {
        "seconds": time.perf_counter() - wall,
        "processor_seconds": time.process_time() - processor,
    }
    low, high = model.predict_interval(x_test, level=0.9)
    return {
        "set": name,
        "split": split,
        "rmse": float(((mean - y_test) ** 2).mean() ** 0.5),
        "log_likelihood": float(model.log_predictive_density(x_test, y_test).mean()),
        "coverage": float(((low < y_test) & (y_test < high)).mean()),
        "import_seconds": imported,
        **seconds,
        "warnings": [str(warning.message) for warning in caught],
    }


def best_of(path: Path) -> dict[str, tuple[str, dict[int, dict[str, float]]]]:
    """By set, the method of `examples.benchmarks.uci` with the best log likelihood, and
    its scores by split.

    It is chosen among our methods with the most splits, so boosting is left out. On
    wine those are not counted that reproduce test rows, as these are among the training
    rows.
    """
    found: dict[str, dict[str, dict[int, dict[str, float]]]] = {}
    for line in map(json.loads, path.read_text().splitlines()):
        left_out = line["run"] in BOOSTING or "splits_of" in line
        if not left_out and (line["set"], line["method"]) not in NOT_COUNTED:
            method = f"{line['method']}, {line['head']}"
            found.setdefault(line["set"], {}).setdefault(method, {})[line["split"]] = (
                line
            )
    best = {}
    for name, by_method in found.items():
        most = max(map(len, by_method.values()))
        full = {
            method: splits
            for method, splits in by_method.items()
            if len(splits) == most
        }
        method = max(
            full, key=lambda m: sum(line["log_likelihood"] for line in full[m].values())
        )
        best[name] = method, full[method]
    return best


def table(rows: list[dict[str, Any]]) -> str:
    """Means over the splits with standard errors, and the mean difference from the best
    method, split by split.
    """
    heads = [
        "set",
        "splits",
        "log likelihood",
        "best method",
        "its",
        "difference",
        "RMSE",
        "its",
        "90 % intervals",
    ]
    lines = []
    for name in dict.fromkeys(row["set"] for row in rows):
        own = [row for row in rows if row["set"] == name]
        other = [row["best"] for row in own]
        cells = {}
        for field in FIELDS:
            pair = [
                mean_and_error([row[field] for row in rows]) for rows in (own, other)
            ]
            cells[field] = [f"{mean:.3f} ± {error:.3f}" for mean, error in pair]
        gains = [
            a["log_likelihood"] - b["log_likelihood"]
            for a, b in zip(own, other, strict=True)
        ]
        mean, error = mean_and_error(gains)
        mine, theirs = cells["log_likelihood"]
        covered = mean_and_error([row["coverage"] for row in own])[0]
        seconds = [
            sorted(row[f] for row in own)[len(own) // 2]
            for f in ("seconds", "processor_seconds")
        ]
        lines.append(
            [
                name,
                len(own),
                mine,
                other[0]["method"],
                theirs,
                f"{mean:+.3f} ± {error:.3f}",
                *cells["rmse"],
            ]
        )
        lines[-1] += [f"{covered:.2f}", *(f"{value:.0f}" for value in seconds)]
    return markdown([*heads, "seconds to first prediction", "of a processor"], lines)


def table_of_rows(found: list[dict[str, Any]]) -> str:
    """Log likelihood of the deep network minus that of the shallow one, RMSE of both,
    by set and number of rows.
    """
    heads = [
        "set",
        "rows",
        "subsets",
        "log likelihood, deep",
        "shallow",
        "difference",
        "RMSE, deep",
        "shallow",
    ]
    lines = []
    for name, rows in dict.fromkeys((row["set"], row["rows"]) for row in found):
        own = [row for row in found if (row["set"], row["rows"]) == (name, rows)]
        pairs = [
            [row for row in own if row["network"] == network] for network in NETWORKS
        ]
        means = {
            field: [float(np.mean([row[field] for row in pair])) for pair in pairs]
            for field in FIELDS
        }
        deep, shallow = means["log_likelihood"]
        lines.append(
            [
                name,
                rows,
                len(pairs[0]),
                f"{deep:.3f}",
                f"{shallow:.3f}",
                f"{deep - shallow:+.3f}",
            ]
        )
        lines[-1] += [f"{value:.3f}" for value in means["rmse"]]
    return markdown(heads, lines)


def tables(report: dict[str, Any]) -> dict[str, str]:
    """The table of a run, by its name on the page."""
    if report["options"].get("rows"):
        return {"estimators_rows": table_of_rows(report["rows"])}
    return {"estimators": table(report["rows"])}


def compare_rows(args: argparse.Namespace, report: dict[str, Any]) -> None:
    """Both networks on the same random rows."""
    for split in range(args.splits):
        for name, rows, network in product(args.sets, args.rows, NETWORKS):
            found = learn_split(name, split, args, rows, network)
            report["rows"].append({**found, "rows": rows, "network": network})
            print(report["rows"][-1], flush=True)
            write_report(args.output, report)


def compare_splits(
    args: argparse.Namespace, report: dict[str, Any], best: dict[str, tuple]
) -> None:
    """The defaults on standard splits, beside the best method of each set."""
    for split in range(args.splits):
        for name in args.sets:
            method, by_split = best[name]
            if split not in by_split:
                continue
            there = {
                "method": method,
                **{field: by_split[split][field] for field in FIELDS},
            }
            report["rows"].append({**learn_split(name, split, args), "best": there})
            print(report["rows"][-1], flush=True)
            write_report(args.output, report)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.benchmarks.estimators",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--data", type=Path, help="folder of the data; otherwise NUMPYRO_BNN_DATA"
    )
    parser.add_argument("--sets", nargs="+", default=list(SETS[:4]), choices=SETS)
    parser.add_argument(
        "--splits", type=int, default=5, help="the first so many splits of each set"
    )
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        default=[],
        help="fit so many random rows, by both networks",
    )
    parser.add_argument("--method", default="ensemble", help="method of the estimator")
    parser.add_argument(
        "--effort", type=float, default=1.0, help="factor of all numbers of steps"
    )
    parser.add_argument(
        "--best",
        type=Path,
        default=Path("docs/uci.jsonl"),
        help="results to compare with",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("output/estimators.json"), help="JSON file"
    )
    parser.add_argument("--docs", type=Path, help="page whose table is to be replaced")
    parser.add_argument(
        "--job",
        nargs=4,
        metavar=("SET", "SPLIT", "ROWS", "NETWORK"),
        help=argparse.SUPPRESS,
    )
    args = parser.parse_args(argv)
    at_least(parser, args, ("splits",))
    if args.rows:
        at_least(parser, args, ("rows",), 2)
    if not args.effort > 0:
        parser.error("--effort must be above 0")
    return args


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    if args.job:
        name, split, rows, network = args.job
        found = job(name, int(split), int(rows), network, args)
        print(json.dumps(found))
        return found
    writable_file(args.output)
    best = {} if args.rows else best_of(args.best)  # before the work starts
    left_out = ("job", "best") if args.rows else ("job", "best", "rows")
    options = {
        name: value for name, value in options_of(args).items() if name not in left_out
    }
    report: dict[str, Any] = {
        "rows": [],
        "options": options,
        **environment(["scikit-learn"]),
    }
    if args.rows:
        compare_rows(args, report)
    else:
        compare_splits(args, report, best)
    for name, text in tables(report).items():
        put_table(args.docs, name, text, report)
    return report


if __name__ == "__main__":
    main()
