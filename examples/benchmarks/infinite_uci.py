"""Infinitely wide networks on the UCI regression sets, compared with published figures
of finite ones.

The standard splits, with one hidden layer unless the options say otherwise. The scales
of the prior and the noise come from the marginal likelihood of each training set
(``infinite.prior_fit``). Writes JSON; with ``--docs`` also the tables of a page.

    python -m examples.benchmarks.infinite_uci --data FOLDER --output
    docs/infinite_uci.json --docs docs/tables/infinite.md
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from examples import loaders
from examples.benchmarks.shared import (
    PBP,
    environment,
    mean_and_error,
    options_of,
    put_table,
    write_report,
)
from examples.shared import at_least, markdown, writable_file

SETS = ("boston", "concrete", "energy", "yacht")
# Test RMSE / log likelihood on these splits, 50 hidden units, as published.
PUBLISHED = {
    "PBP": {name: (PBP[name][0][0], PBP[name][1][0]) for name in SETS},
    "MC dropout": {
        "boston": (2.904, -2.402),
        "concrete": (4.826, -2.937),
        "energy": (0.539, -1.212),
        "yacht": (0.666, -1.250),
    },
    "deep ensembles": {
        "boston": (3.28, -2.41),
        "concrete": (6.03, -3.06),
        "energy": (2.09, -1.38),
        "yacht": (1.58, -1.18),
    },
    "DVI": {
        "boston": (None, -2.41),
        "concrete": (None, -3.06),
        "energy": (None, -1.01),
        "yacht": (None, -0.47),
    },
}
# Column -> activation, and whether every input has its own scale.
VARIANTS = {"relu": ("relu", False), "erf": ("erf", False), "erf-ard": ("erf", True)}


def learn_set(name: str, variant: str, args: argparse.Namespace) -> dict[str, Any]:
    """Fit and score every split of one set, in the units of the data."""
    from numpyro_bnn import infinite, nn

    activation, ard = VARIANTS[variant]
    net = nn.MLP([50] * args.depth + [1], activation)
    start = time.perf_counter()
    by_split: dict[str, list[float]] = {
        "rmse": [],
        "log_likelihood": [],
        "noise_sd": [],
        "jitter": [],
    }
    for split in range(args.splits):
        data = loaders.standardize(loaders.load_uci(name, split, args.data))
        found = infinite.prior_fit(
            net, data.x_train, data.y_train, ard=ard, max_steps=args.max_steps
        )
        gp = infinite.gp_regression(
            net, data.x_train, data.y_train, noise_sd=found.noise_sd, prior=found.prior
        )
        scale = float(data.y_scaler.scale_factor)
        error = gp.predict(data.x_test, diagonal=True).mean - data.y_test
        by_split["rmse"].append(scale * float(np.sqrt(np.mean(error**2))))
        density = float(gp.log_density(data.x_test, data.y_test).mean())
        by_split["log_likelihood"].append(density - float(np.log(scale)))
        by_split["noise_sd"].append(scale * found.noise_sd)
        by_split["jitter"].append(gp.jitter)
    return {
        "set": name,
        "variant": variant,
        "splits": args.splits,
        "rmse": mean_and_error(by_split["rmse"]),
        "log_likelihood": mean_and_error(by_split["log_likelihood"]),
        "largest_jitter": max(by_split["jitter"]),
        "seconds": time.perf_counter() - start,
        "by_split": by_split,
    }


def nuts_of(path: Path | None) -> dict[str, dict[str, tuple[float, float]]]:
    """Scores of NUTS with 50 units, by set, from the JSON of ``variational_uci``."""
    if path is None:
        return {}
    rows = json.loads(path.read_text())["rows"]
    return {
        row["set"]: {
            name: mean_and_error(row["NUTS"][name])
            for name in ("rmse", "log_likelihood")
        }
        for row in rows
    }


def table(rows: list[dict[str, Any]], nuts: dict[str, Any]) -> str:
    """Log likelihood and RMSE of every method as two Markdown tables."""
    names = ("rmse", "log_likelihood")
    return "\n\n".join(
        _table(rows, nuts, name, which) for which, name in enumerate(names)
    )


def _table(
    rows: list[dict[str, Any]], nuts: dict[str, Any], name: str, which: int
) -> str:
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    titles = [
        f"NNGP, {variant.replace('-', ', ').replace('ard', 'ARD')}"
        for variant in variants
    ]
    published = [
        method
        for method, by_set in PUBLISHED.items()
        if by_set["boston"][which] is not None
    ]
    score = f"test {name.replace('_', ' ').replace('rmse', 'RMSE')}"
    lines = []
    for dataset in dict.fromkeys(row["set"] for row in rows):
        found = {row["variant"]: row[name] for row in rows if row["set"] == dataset}
        found["NUTS"] = nuts.get(dataset, {}).get(name)
        measured = (found.get(column) for column in (*variants, "NUTS"))
        cells = [
            "" if pair is None else f"{pair[0]:.3f} ± {pair[1]:.3f}"
            for pair in measured
        ]
        cells += [f"{PUBLISHED[method][dataset][which]:.3f}" for method in published]
        lines.append([dataset, *cells])
    return markdown([score, *titles, "NUTS, 50 units", *published], lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.benchmarks.infinite_uci",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--data", type=Path, help="folder of the data; otherwise NUMPYRO_BNN_DATA"
    )
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument(
        "--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS)
    )
    parser.add_argument("--splits", type=int, default=20, help="splits of each set")
    parser.add_argument("--depth", type=int, default=1, help="hidden layers")
    parser.add_argument(
        "--max-steps", type=int, default=100, help="steps of the search for the scales"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("output/infinite_uci.json"),
        help="JSON file",
    )
    parser.add_argument(
        "--nuts", type=Path, help="JSON of variational_uci, for the column of NUTS"
    )
    parser.add_argument("--docs", type=Path, help="page whose table is to be replaced")
    args = parser.parse_args(argv)
    at_least(parser, args, ("splits", "depth", "max_steps"))
    return args


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    writable_file(args.output)
    nuts_of(args.nuts)  # before the work starts
    report: dict[str, Any] = {
        "rows": [],
        "options": options_of(args),
        **environment([]),
    }
    for name in args.sets:
        for variant in args.variants:
            row = learn_set(name, variant, args)
            report["rows"].append(row)
            print(
                name,
                variant,
                row["rmse"],
                row["log_likelihood"],
                f"{row['seconds']:.0f} s",
                flush=True,
            )
            write_report(args.output, report)
    put_table(
        args.docs, "infinite_uci", table(report["rows"], nuts_of(args.nuts)), report
    )
    return report


if __name__ == "__main__":
    main()
