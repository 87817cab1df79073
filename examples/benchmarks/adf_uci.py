"""Probabilistic backpropagation on the UCI regression sets, compared with the reference
implementation.

The standard splits, one hidden layer of 50 ReLU units, 40 epochs; all splits of a set
are learned at once. The model is plain NumPyro in the published parametrization. Writes
JSON; with ``--docs`` also the table of a page.

    python -m examples.benchmarks.adf_uci --data FOLDER --output docs/adf_uci.json
    --docs docs/tables/adf.md
"""

import argparse
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples import loaders
from examples.benchmarks.shared import (
    PBP,
    environment,
    options_of,
    put_table,
    write_report,
)
from examples.probabilistic_backpropagation import model
from examples.shared import at_least, markdown, writable_file


def load_splits(
    name: str, num_splits: int, folder: Path | None
) -> dict[str, np.ndarray]:
    """Standardized training and test rows of the splits, stacked, and the scale of each
    split's targets.
    """
    splits = [
        loaders.standardize(loaders.load_uci(name, s, folder))
        for s in range(num_splits)
    ]
    parts = {
        part: np.stack([getattr(d, part) for d in splits])
        for part in ("x_train", "y_train", "x_test", "y_test")
    }
    return parts | {"scale": np.array([d.y_scaler.scale_factor for d in splits])}


def learn_set(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Learn all splits of one set at once and score them in the units of the data."""
    from numpyro_bnn import guides

    num_splits = min(args.splits, 5) if name == "protein" else args.splits
    width = 2 * args.width if name == "protein" else args.width
    data = load_splits(name, num_splits, args.data)
    pbp = guides.AutoADF(model)
    keys = jax.random.split(jax.random.key(args.seed), num_splits)
    start = time.perf_counter()
    fit = pbp.run(
        keys,
        data["x_train"],
        data["y_train"],
        widths=(width,),
        in_axes=(0, 0),
        num_epochs=args.epochs,
        progress_bar=args.progress_bar,
    )
    jax.block_until_ready(fit)
    seconds = time.perf_counter() - start
    scores = jax.vmap(lambda params, x, y: score(pbp, params, x, y, width))(
        fit.params, data["x_test"], data["y_test"]
    )
    rmse, log_likelihood = (
        np.asarray(scores[0]) * data["scale"],
        np.asarray(scores[1]) - np.log(data["scale"]),
    )
    return {
        "set": name,
        "splits": num_splits,
        "rows": int(data["y_train"].shape[1]),
        "rmse": mean_and_error(rmse),
        "log_likelihood": mean_and_error(log_likelihood),
        "reference_rmse": PBP[name][0],
        "reference_log_likelihood": PBP[name][1],
        "refused": float(np.max(fit.refused)),
        "seconds": seconds,
        "by_split": {"rmse": rmse.tolist(), "log_likelihood": log_likelihood.tolist()},
    }


def score(pbp: Any, params: Any, x: Any, y: Any, width: int) -> tuple[Any, Any]:
    """RMSE and mean log density of one split, in standardized units."""
    mean, variance = pbp.predictive_moments(params, x, widths=(width,))
    log_density = (
        -0.5 * jnp.log(2 * jnp.pi * variance) - 0.5 * (y - mean) ** 2 / variance
    )
    return jnp.sqrt(jnp.mean((mean - y) ** 2)), log_density.mean()


def mean_and_error(values: np.ndarray) -> tuple[float, float]:
    """Mean over the splits and its standard error."""
    return float(values.mean()), float(values.std() / np.sqrt(len(values)))


def table(rows: list[dict[str, Any]]) -> str:
    """The results as a Markdown table."""
    heads = (
        "set",
        "splits",
        "test RMSE",
        "reference",
        "test log likelihood",
        "reference",
        "seconds",
    )
    lines = []
    for row in rows:
        digits = 4 if row["rmse"][0] < 0.5 else 3
        cells = [f"{m:.{d}f} ± {e:.{d}f}" for m, e, d in _columns(row, digits)]
        lines.append((row["set"], row["splits"], *cells, f"{row['seconds']:.0f}"))
    return markdown(heads, lines)


def _columns(row: dict[str, Any], digits: int) -> list[tuple[float, float, int]]:
    names = ("rmse", "reference_rmse", "log_likelihood", "reference_log_likelihood")
    return [(*row[name], digits if "rmse" in name else 3) for name in names]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.benchmarks.adf_uci",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--data", type=Path, help="folder of the data; otherwise NUMPYRO_BNN_DATA"
    )
    parser.add_argument(
        "--sets",
        nargs="+",
        default=[n for n in PBP if n != "protein"],
        choices=list(PBP),
    )
    parser.add_argument(
        "--splits", type=int, default=20, help="splits of each set (protein has 5)"
    )
    parser.add_argument("--epochs", type=int, default=40, help="passes over the data")
    parser.add_argument(
        "--width", type=int, default=50, help="hidden units (twice as many for protein)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the starts and orders"
    )
    parser.add_argument("--progress-bar", action="store_true", help="show epochs")
    parser.add_argument(
        "--output", type=Path, default=Path("output/adf_uci.json"), help="JSON file"
    )
    parser.add_argument("--docs", type=Path, help="page whose table is to be replaced")
    args = parser.parse_args(argv)
    at_least(parser, args, ("splits", "epochs", "width"))
    return args


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    writable_file(args.output)
    report: dict[str, Any] = {
        "rows": [],
        "options": options_of(args),
        **environment([]),
    }
    for name in args.sets:
        report["rows"].append(learn_set(name, args))
        print(table(report["rows"][-1:]).split("\n")[-1], flush=True)
        write_report(args.output, report)
    put_table(args.docs, "adf_uci", table(report["rows"]), report)
    return report


if __name__ == "__main__":
    main()
