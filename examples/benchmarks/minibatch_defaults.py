"""Do the minibatch kernels hold with the default network and prior, and with others?

Synthetic data with 8 inputs and f = sin(x0) + x1 x2 / 2, four likelihoods, a network
with 32 hidden units, minibatches of 256 rows: four chains of 100 + 100 draws, 100 steps
each, all options left out. RMSE is that of the mean of each chain's function (of the
means of counts, of the probabilities of classes) against the true one at 1,000 new
rows; a constant has the RMSE of the last column. Writes JSON after each run, and leaves
out what the file already has.

    python -m examples.benchmarks.minibatch_defaults --rows 5000 --kernels SGNHT
"""

import argparse
import itertools
import json
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC

import numpyro_bnn as bnn
from examples.benchmarks.gauntlet import network_model
from examples.benchmarks.shared import continued_report, put_table, write_report
from examples.shared import at_least, markdown

INPUTS, NEW_ROWS = 8, 1000
KERNELS = ("SGNHT", "SGHMC", "SGLD", "MCLMC")
LIKELIHOOD_NAMES = ("normal", "heteroscedastic", "poisson", "categorical")
PRIOR_NAMES = ("Hierarchical", "Normal", "Laplace", "ARD")
ACTIVATIONS = ("relu", "silu", "tanh")
# what makes a run another one, and options in which runs of one file may differ
CASE = ("likelihood", "rows", "activation", "prior", "kernel")
VARIED = ("likelihoods", "rows", "activations", "priors", "kernels", "docs")


class Data(NamedTuple):
    """Rows to learn from, new rows, and the true function at these."""

    x: np.ndarray
    y: np.ndarray
    x_new: np.ndarray
    truth_new: np.ndarray
    constant: float


def make_data(likelihood: str, rows: int) -> Data:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows + NEW_ROWS, INPUTS)).astype(np.float32)
    f = np.sin(x[:, 0]) + 0.5 * x[:, 1] * x[:, 2]
    noise = rng.normal(size=len(f))
    if likelihood == "normal":
        truth, y = f, f + 0.1 * noise
    elif likelihood == "heteroscedastic":
        truth, y = f, f + 0.1 * np.exp(0.5 * x[:, 3]) * noise
    elif likelihood == "poisson":
        truth = np.exp(1 + 0.7 * f)
        y = rng.poisson(truth)
    else:
        logits = np.stack([2 * f, x[:, 3], x[:, 4], 0 * f], axis=-1)
        truth = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
        y = np.argmax(logits + rng.gumbel(size=logits.shape), axis=-1)
    constant = truth[rows:] - truth[:rows].mean(axis=0)
    return Data(
        x=x[:rows],
        y=y[:rows].astype(np.float32 if y.dtype.kind == "f" else np.int32),
        x_new=x[rows:],
        truth_new=truth[rows:],
        constant=float(np.sqrt(np.mean(constant**2))),
    )


def measure(case: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    data = make_data(case["likelihood"], case["rows"])
    model = network_model(
        case["likelihood"], [args.width], case["activation"], case["prior"]
    )
    mcmc = MCMC(
        getattr(bnn.infer, case["kernel"])(model),
        num_warmup=args.draws,
        num_samples=args.draws,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    key, arrays = jax.random.key(args.seed), (jnp.asarray(data.x), jnp.asarray(data.y))
    mcmc.run(key, *arrays, batch_size=min(args.batch_size, case["rows"] // 2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        idata = bnn.to_inference_data(
            mcmc,
            posterior_predictive=True,
            predictions={"x": data.x_new},
            progress_bar=False,
        )
    group = idata["predictions"]
    name = "y_mean" if "y_mean" in group else "y_probs"
    error = group[name].to_numpy().mean(axis=1) - data.truth_new
    by_chain = np.sqrt(np.mean(error.reshape(4, -1) ** 2, axis=1))
    report = json.loads(idata.attrs["health"])
    return {
        **case,
        "rmse": by_chain.tolist(),
        "constant": data.constant,
        "warnings": [row["name"] for row in report if row["verdict"] == "warning"],
        "marked": list(bnn.metrics.health(idata).marked),
        "restarts": idata.attrs["restarts"],
        "refused_steps": idata.attrs["refused_steps"],
        "others": [str(warning.message)[:200] for warning in caught],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """A row for each problem, a column for each kernel: the RMSE of its worst chain,
    with a star if chains were marked.
    """
    kernels = [name for name in KERNELS if any(row["kernel"] == name for row in rows)]
    cells: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in rows:
        problem = tuple(row[name] for name in CASE[:-1])
        cell = f"{max(row['rmse']):.3f}" + "*" * bool(row["marked"])
        cells.setdefault(problem, {"constant": f"{row['constant']:.2f}"})
        cells[problem][row["kernel"]] = cell
    lines = []
    for (likelihood, size, *names), values in sorted(cells.items()):
        shown = [values.get(name, "") for name in (*kernels, "constant")]
        lines.append((likelihood, f"{size:,}", *names, *shown))
    heads = ("likelihood", "rows", "activation", "prior", *kernels, "constant")
    return markdown(heads, lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.benchmarks.minibatch_defaults",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, values in (
        ("likelihoods", LIKELIHOOD_NAMES),
        ("activations", ACTIVATIONS),
        ("priors", PRIOR_NAMES),
        ("kernels", KERNELS[:3]),
    ):
        known = KERNELS if name == "kernels" else values
        parser.add_argument(f"--{name}", nargs="+", choices=known, default=values)
    parser.add_argument("--rows", nargs="+", type=int, default=[5000, 20_000])
    parser.add_argument("--width", type=int, default=32, help="hidden units")
    parser.add_argument("--batch-size", type=int, default=256, help="of a minibatch")
    parser.add_argument("--draws", type=int, default=100, help="of warm-up, and kept")
    parser.add_argument("--seed", type=int, default=1, help="of the chains")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("output/minibatch_defaults.json"),
        help="JSON file",
    )
    parser.add_argument("--docs", type=Path, help="page whose table is to be replaced")
    args = parser.parse_args(argv)
    at_least(parser, args, ("rows",), 4)
    at_least(parser, args, ("width", "batch_size", "draws"))
    at_least(parser, args, ("seed",), 0)
    return args


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    report = continued_report(args, VARIED)
    rows = report["rows"]
    done = {tuple(row[name] for name in CASE) for row in rows}
    lists = (args.likelihoods, args.rows, args.activations, args.priors, args.kernels)
    for values in itertools.product(*lists):
        if values in done:
            continue
        rows.append(measure(dict(zip(CASE, values, strict=True)), args))
        write_report(args.output, report)
        print(*values, [round(value, 4) for value in rows[-1]["rmse"]], flush=True)
        jax.clear_caches()  # the next case has programs of its own
    print(table(rows), flush=True)
    put_table(args.docs, "minibatch_defaults", table(rows), report)
    return report


if __name__ == "__main__":
    main()
