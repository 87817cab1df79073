"""Do samplers agree on the predicted function? Means and standard deviations of long
runs, chains as replicates.

Every method runs the same number of chains from random starts, with as many gradients
each. For a test input, the means (or the logarithms of the standard deviations) of its
C chains are C independent values whose spread contains all Monte Carlo error, even if
the chains have not mixed. Two methods are compared by Welch's t of these values. Where
both have the same distribution, the root mean square of t is near 1 (sqrt(df / (df -
2)), and inputs are not independent). Writes JSON, and a table into a page.

    python -m examples.benchmarks.function_agreement --data FOLDER --docs
    docs/tables/microcanonical.md
"""

import argparse
from itertools import product
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpyro.infer import MCMC
from scipy import stats

from examples.benchmarks.microcanonical import (
    METHODS,
    NETS,
    SETS,
    functions_of,
    load,
    sampler,
)
from examples.benchmarks.shared import (
    environment,
    one_device_per_core,
    options_of,
    put_table,
    write_report,
)
from examples.shared import at_least, markdown, writable_file
from numpyro_bnn import infer, metrics

REFERENCE = "NUTS non-centered"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.benchmarks.function_agreement",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    others = [name for name in METHODS if name != REFERENCE]
    parser.add_argument(
        "--sets", nargs="+", choices=SETS, default=list(SETS), help="data sets"
    )
    parser.add_argument(
        "--nets", nargs="+", choices=NETS, default=["1x20"], help="networks"
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=others,
        default=others[1:],
        help="compared with NUTS",
    )
    parser.add_argument(
        "--gradients", type=int, default=500_000, help="per chain, half of them warm-up"
    )
    parser.add_argument("--draws", type=int, default=500, help="kept per chain, about")
    parser.add_argument(
        "--num-chains", type=int, default=8, help="independent replicates"
    )
    parser.add_argument("--max-tree-depth", type=int, default=8, help="of NUTS")
    parser.add_argument("--seed", type=int, default=0, help="seed of the samplers")
    parser.add_argument(
        "--data", type=Path, default=None, help="folder of the UCI sets"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("output/function_agreement.json"),
        help="JSON file",
    )
    parser.add_argument("--docs", type=Path, help="page whose table shows the figures")
    args = parser.parse_args(argv)
    at_least(parser, args, ("num_chains",), 3)
    at_least(parser, args, ("draws",), 4)
    at_least(parser, args, ("gradients",), 200)
    at_least(parser, args, ("max_tree_depth",), 2)
    return args


def draws_of(
    method: str, net: str, data: Any, args: argparse.Namespace
) -> tuple[np.ndarray, dict[str, Any]]:
    """Draws (C, S, N) of the function at the test rows, and the kernel's own
    statistics.
    """
    kernel, warmup, draws = sampler(method, net, args)
    key = jax.random.fold_in(jax.random.key(args.seed), METHODS.index(method))
    mcmc = MCMC(
        kernel,
        num_warmup=warmup,
        num_samples=draws,
        num_chains=args.num_chains,
        chain_method=infer.parallel_vectorized,
        progress_bar=False,
    )
    mcmc.run(key, data.x_train, data.y_train)
    about = kernel.describe(mcmc.last_state) if hasattr(kernel, "describe") else {}
    return functions_of(mcmc, data), about


def welch(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Welch's t and its degrees of freedom, for values (C, N) of two methods."""
    parts = [values.var(0, ddof=1) / len(values) for values in (a, b)]
    total = parts[0] + parts[1]
    freedom = total**2 / sum(
        p**2 / (len(v) - 1) for p, v in zip(parts, (a, b), strict=True)
    )
    return (a.mean(0) - b.mean(0)) / np.sqrt(total), freedom


def compare(draws: np.ndarray, reference: np.ndarray) -> dict[str, float]:
    """Agreement of two samples (C, S, N) of the function."""
    found = {}
    for name, summary in {
        "mean": np.mean,
        "log sd": lambda f, axis: np.log(np.std(f, axis)),
    }.items():
        t, freedom = welch(summary(draws, axis=1), summary(reference, axis=1))
        found[f"rms t, {name}"] = float(np.sqrt(np.mean(t**2)))
        found[f"share beyond 95 %, {name}"] = float(
            np.mean(2 * stats.t.sf(np.abs(t), freedom) < 0.05)
        )
    sd = reference.std((0, 1))
    gap = np.abs(draws.mean((0, 1)) - reference.mean((0, 1)))
    found["expected rms t"] = float(
        np.sqrt(np.median(freedom) / max(np.median(freedom) - 2, 1))
    )
    found["distance of means in sds"] = float(np.median(gap / sd))
    found["ratio of sds"] = float(np.median(draws.std((0, 1)) / sd))
    return found


def mixing(draws: np.ndarray) -> dict[str, float]:
    found = metrics.function_space(draws)
    return {
        "median R-hat": float(np.median(found.rhat)),
        "largest R-hat": float(found.rhat.max()),
        "median ESS": float(np.median(found.ess_bulk)),
        "least ESS": float(found.ess_bulk.min()),
    }


def table(rows: list[dict[str, Any]]) -> str:
    heads = [
        "posterior",
        "sampler",
        "RMS t of means",
        "of log sds",
        "expected",
        "distance of means (sd)",
    ]
    heads += ["ratio of sds", "median R-hat (NUTS)", "median ESS (NUTS)"]
    lines = []
    for row in rows:
        both = [
            (
                f"{row['mixing'][name]:.{digits}f} "
                f"({row['mixing of NUTS'][name]:.{digits}f})"
            )
            for name, digits in (("median R-hat", 2), ("median ESS", 0))
        ]
        figures = (
            "rms t, mean",
            "rms t, log sd",
            "expected rms t",
            "distance of means in sds",
            "ratio of sds",
        )
        cells = [f"{row['agreement'][name]:.2f}" for name in figures]
        lines.append([f"{row['set']}, {row['net']}", row["method"], *cells, *both])
    return markdown(heads, lines)


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    args = parse(argv)
    writable_file(args.output)
    one_device_per_core()
    rows: list[dict[str, Any]] = []
    report = {"rows": rows, **environment([]), "options": options_of(args)}
    for name, net in product(args.sets, args.nets):
        data = load(name, args.data)
        reference, _ = draws_of(REFERENCE, net, data, args)
        for method in args.methods:
            draws, about = draws_of(method, net, data, args)
            row = {
                "set": name,
                "net": net,
                "method": method,
                "agreement": compare(draws, reference),
            }
            row |= {
                "mixing": mixing(draws),
                "mixing of NUTS": mixing(reference),
                "about": about,
            }
            rows.append(row)
            print(table(rows[-1:]).splitlines()[-1], flush=True)
            write_report(args.output, report)
    put_table(args.docs, "function_agreement", table(rows), report)
    return rows


if __name__ == "__main__":
    main()
