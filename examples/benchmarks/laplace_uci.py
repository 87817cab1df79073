"""Laplace approximation on the UCI regression sets, with prior precisions and noise by
the evidence.

The standard splits, one hidden layer of 50 tanh units, normal priors with one tuned
scale per weight matrix and bias. Of several starts per split the one with the largest
evidence is kept, without a look at the test rows. Writes JSON, where sets of earlier
calls are kept; with ``--docs`` also the table of a page. The targets of naval have
hardly any noise, so that the search for the mode is long, and nothing is left for the
prior to decide:

    python -m examples.benchmarks.laplace_uci --data FOLDER --output
    docs/laplace_uci.json --docs docs/tables/guides.md python -m
    examples.benchmarks.laplace_uci --sets naval --widths 16 16 16 --rounds 1 --steps
    1000 [...]
"""

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from examples import loaders
from examples.benchmarks.shared import (
    PBP,
    environment,
    mean_and_error,
    options_of,
    provenance,
    write_report,
)
from examples.shared import at_least, between_marks, markdown, writable_file

SETS = ("boston", "concrete", "energy", "yacht")


def model(x, y=None, widths=(50,)):
    """Layers of tanh units; one noise scale, whose log has a flat prior over seven
    orders of magnitude.
    """
    import numpyro_bnn as bnn

    net = bnn.random_network(
        "net", bnn.nn.MLP([*widths, 1], "tanh"), x.shape[1:], bnn.priors.Normal()
    )
    sigma = numpyro.sample("sigma", dist.LogNormal(-1.0, 4.0))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(net(x)[..., 0], sigma), obs=y)


def learn_split(name: str, split: int, args: argparse.Namespace) -> dict[str, float]:
    """Fit one split from several starts, and score it in the units of the data."""
    from numpyro_bnn import guides

    data = loaders.standardize(loaders.load_uci(name, split, args.data))
    x, y, x_test, y_test = (
        jnp.asarray(part, float)
        for part in (data.x_train, data.y_train, data.x_test, data.y_test)
    )
    guide, widths = guides.AutoLaplace(model, args.structure), tuple(args.widths)
    start, fits = time.perf_counter(), []
    for key in jax.random.split(jax.random.key(args.seed + split), args.starts):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            options = {
                "tune_prior": True,
                "num_rounds": args.rounds,
                "num_epochs": args.steps,
                "widths": widths,
            }
            fits.append(guide.run(key, x, y, progress_bar=False, **options))
    fit = max(fits, key=lambda fit: fit.log_evidence)
    found = guide.predictive(fit.params, x_test, widths=widths)
    density = guide.log_predictive_density(fit.params, x_test, y_test, widths=widths)
    scale, error = float(data.y_scaler.scale_factor), np.asarray(found.mean - y_test)
    return {
        "rmse": scale * float(np.sqrt(np.mean(error**2))),
        "log_likelihood": float(density.mean()) - np.log(scale),
        "coverage": float(np.mean(np.abs(error) < 1.645 * np.sqrt(found.variance))),
        "log_evidence": fit.log_evidence,
        "effective_parameters": fit.effective_parameters,
        "distance": fit.distance,
        "seconds": time.perf_counter() - start,
    }


def learn_set(name: str, args: argparse.Namespace) -> dict[str, Any]:
    splits = [learn_split(name, split, args) for split in range(args.splits)]
    by_split = {key: [split[key] for split in splits] for key in splits[0]}
    return {
        "set": name,
        "splits": args.splits,
        "options": options_of(args),
        **environment([]),
        "network": "x".join(map(str, args.widths)),
        "rmse": mean_and_error(np.array(by_split["rmse"])),
        "log_likelihood": mean_and_error(np.array(by_split["log_likelihood"])),
        "seconds": float(np.median(by_split["seconds"])),
        "by_split": by_split,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The results as a Markdown table."""
    heads = (
        "set",
        "network",
        "splits",
        "test RMSE",
        "test log likelihood",
        "PBP, 20 splits",
        "coverage of 90 %",
        "seconds a split",
    )
    lines = []
    for row in rows:
        cells = [
            f"{m:.3f} ± {e:.3f}"
            for m, e in (row["rmse"], row["log_likelihood"], PBP[row["set"]][1])
        ]
        if row["rmse"][0] < 1e-3:
            cells[0] = f"{row['rmse'][0]:.1e} ± {row['rmse'][1]:.1e}"
        coverage = f"{np.mean(row['by_split']['coverage']):.2f}"
        lines.append(
            (
                row["set"],
                row["network"],
                row["splits"],
                *cells,
                coverage,
                f"{row['seconds']:.0f}",
            )
        )
    return markdown(heads, lines)


def tables(report: dict[str, Any]) -> dict[str, str]:
    """The table by its name on the page; below it machines, versions and options, which
    each row keeps.
    """
    return {"laplace_uci": f"{table(report['rows'])}\n\n{provenance(report['rows'])}"}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.benchmarks.laplace_uci",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--data", type=Path, help="folder of the data; otherwise NUMPYRO_BNN_DATA"
    )
    parser.add_argument(
        "--sets", nargs="+", default=list(SETS), choices=[*SETS, "naval"]
    )
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument(
        "--structure", default="full", choices=["full", "kron", "diag", "low_rank"]
    )
    parser.add_argument(
        "--starts",
        type=int,
        default=1,
        help="starts per split, of which the evidence chooses",
    )
    parser.add_argument("--rounds", type=int, default=100, help="most rounds of tuning")
    parser.add_argument(
        "--steps", type=int, default=20, help="most steps of L-BFGS a round"
    )
    parser.add_argument(
        "--widths", type=int, nargs="+", default=[50], help="units of each hidden layer"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--output", type=Path, default=Path("output/laplace_uci.json"), help="JSON file"
    )
    parser.add_argument("--docs", type=Path, help="page whose table is to be replaced")
    args = parser.parse_args(argv)
    at_least(parser, args, ("splits", "starts", "rounds", "steps"))
    if min(args.widths) < 1:
        parser.error("--widths must be at least 1")
    return args


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    earlier = (
        json.loads(args.output.read_text())["rows"] if args.output.is_file() else []
    )
    writable_file(args.output)
    report: dict[str, Any] = {
        "rows": [row for row in earlier if row["set"] not in args.sets]
    }
    for name in args.sets:
        with jax.enable_x64(True):
            # on yacht the precision is too ill-conditioned for float32
            row = learn_set(name, args)
        report["rows"] = sorted([*report["rows"], row], key=lambda row: row["set"])
        print(table([row]).split("\n")[-1], flush=True)
        write_report(args.output, report)
    if args.docs is not None:
        between_marks(args.docs, tables(report)["laplace_uci"], "laplace_uci")
    return report


if __name__ == "__main__":
    main()
