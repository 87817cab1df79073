"""Minibatch kernels with their default settings, beside a long chain, a deep ensemble
and mean field.

Synthetic regression with 8 inputs and noise 0.2, a network with 32 hidden units, a
hierarchical prior and minibatches of 256 rows. Each kernel runs four chains of as many
gradients each as `--gradients` says: warm start, noise and step-size search included.
The ensemble (ten members) and the guide get the gradients of all four chains together.
The reference is MCLMC on all the data; above `--full-rows` rows a longer chain of SGNHT
with half of the tolerated bias. RMSE is that of the posterior mean against the function
that made the data. Writes JSON after each run, and leaves out what the file already
has.

    python -m examples.benchmarks.minibatches --output output/minibatches.json
"""

import argparse
import json
import math
import platform
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.scipy import stats
from numpyro.infer import MCMC, SVI, TraceMeanField_ELBO

import numpyro_bnn as bnn
from examples.benchmarks.shared import environment, options_of, put_table, write_report
from examples.shared import at_least, markdown, writable_file
from numpyro_bnn import infer

KERNELS = ("SGLD", "PSGLD", "SGHMC", "SGNHT", "MCLMC")
REFERENCE = "long chain"
METHODS = (REFERENCE, *KERNELS, "deep ensemble", "AutoMeanField")
INPUTS, NOISE, TEST_ROWS = 8, 0.2, 500
WARMUP, DRAWS, WARM_START = (
    100,
    100,
    25,
)  # transitions; the last is the usual quarter of the first
# gradients that choose a step size: 128 for the noise, 24 products with the Hessian
PER_MEASUREMENT = 200
MEMBERS = 10
VARIED = (
    "methods",
    "rows",
    "gradients",
    "docs",
)  # options in which runs of one file may differ


# --------------------------------------------------------------------------------------
# problem


def truth(x: np.ndarray) -> np.ndarray:
    """The function behind the data."""
    product = 0.5 * x[:, 2] * x[:, 3] / (1 + 0.1 * x[:, 2] ** 2)
    return np.sin(x[:, 0] + x[:, 1]) + product + 0.5 * np.tanh(x[:, 4] - 2 * x[:, 5])


def make_data(seed: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, INPUTS)).astype(np.float32)
    return x, (truth(x) + NOISE * rng.normal(size=rows)).astype(np.float32)


def make_model(width: int) -> Any:
    return bnn.models.regression(
        bnn.nn.MLP([width, 1], "tanh"), bnn.priors.Hierarchical()
    )


def score(idata: Any, y: np.ndarray, target: np.ndarray) -> dict[str, float]:
    """What a table shows of the predictions at test rows."""
    function = idata["predictions"]["y_mean"].to_numpy()
    sigma = idata["posterior"]["sigma"].to_numpy()[..., None]
    found = {
        "sd": float(function.std((0, 1)).mean()),
        "rmse": float(np.sqrt(np.mean((function.mean((0, 1)) - target) ** 2))),
        "lppd": bnn.metrics.lppd(
            np.asarray(stats.norm.logpdf(y, function, sigma))
        ).value,
        "sigma": float(sigma.mean()),
    }
    if function.shape[0] > 1:
        found["rhat"] = float(np.median(bnn.metrics.function_space(function).rhat))
    return {name: float(value) for name, value in found.items()}


# --------------------------------------------------------------------------------------
# methods


def num_measurements() -> int:
    """How often a chain of the default warm-up chooses its step size, at most."""
    return 3 + int(math.log2(WARMUP - WARM_START))


def steps_of(gradients: int, size: int, per_step: int) -> int:
    """Steps per draw with which a chain spends a number of gradients, the search of its
    step size included.
    """
    collected = min(infer.preconditioning.PER_DIRECTION * size, gradients // 5)
    rest = gradients - num_measurements() * PER_MEASUREMENT - collected
    return max(1, rest // (WARM_START + (WARMUP + DRAWS - WARM_START) * per_step))


def num_parameters(model: Any, x: np.ndarray, y: np.ndarray) -> int:
    state = infer.SGLD(model, 1e-6).init(jax.random.key(0), 0, None, (x[:2], y[:2]), {})
    return int(state.engine.position.size)


def sampled(
    kernel: Any,
    data: tuple,
    args: argparse.Namespace,
    batch: int | None,
    test: dict,
    **lengths: int,
) -> Any:
    """Four chains, their export, and the gradients of each."""
    number = {"num_warmup": WARMUP, "num_samples": DRAWS, **lengths}
    mcmc = MCMC(
        kernel,
        num_chains=args.num_chains,
        chain_method="vectorized",
        progress_bar=False,
        **number,
    )
    mcmc.run(jax.random.key(args.seed), *data, batch)
    options = {"log_likelihood": False, "posterior_predictive": False}
    idata = bnn.to_inference_data(mcmc, predictions=test, **options)
    return idata, int(np.max(mcmc.last_state.num_gradients))


def reference(
    data: tuple, args: argparse.Namespace, test: dict
) -> tuple[Any, int, str]:
    """A long chain, on all the data if these are few enough."""
    model, rows = make_model(args.width), len(data[0])
    if rows <= args.full_rows:
        steps = max(
            1, args.reference_gradients // (2 * 1500)
        )  # 500 draws after twice as many transitions
        kernel = infer.MCLMC(model, steps_per_draw=steps)
        idata, spent = sampled(
            kernel, data, args, None, test, num_warmup=1000, num_samples=500
        )
        return idata, spent, "MCLMC on all the data"
    kernel = infer.SGNHT(
        model, steps_per_draw=max(1, args.long_gradients // 1000), bias_tolerance=0.025
    )
    idata, spent = sampled(
        kernel, data, args, args.batch_size, test, num_warmup=500, num_samples=500
    )
    return idata, spent, "SGNHT with bias_tolerance=0.025"


def ensemble(
    data: tuple, gradients: int, args: argparse.Namespace, test: dict
) -> tuple[Any, int]:
    """Members that Adam trains on minibatches with a falling learning rate."""
    steps = max(10, args.num_chains * gradients // MEMBERS)
    optimizer = optax.adam(optax.cosine_decay_schedule(0.01, steps))
    warm = infer.WarmStart(0.9, num_steps=steps, optimizer=optimizer)
    kernel = infer.SGLD(
        make_model(args.width), 1e-12, steps_per_draw=1, warm_start=warm
    )
    options = {
        "num_chains": MEMBERS,
        "chain_method": "vectorized",
        "progress_bar": False,
    }
    mcmc = MCMC(kernel, num_warmup=10, num_samples=1, **options)
    mcmc.run(jax.random.key(args.seed), *data, args.batch_size)
    options = {"members": True, "log_likelihood": False, "posterior_predictive": False}
    return bnn.to_inference_data(mcmc, predictions=test, **options), MEMBERS * steps


def mean_field(
    data: tuple, gradients: int, args: argparse.Namespace, test: dict
) -> tuple[Any, int]:
    model, steps = make_model(args.width), max(10, args.num_chains * gradients)
    guide = bnn.guides.AutoMeanField(model)
    optimizer = optax.adam(optax.cosine_decay_schedule(0.01, steps))
    svi = SVI(model, guide, optimizer, TraceMeanField_ELBO())
    arguments = (*data, args.batch_size)
    result = bnn.guides.fit(
        svi, jax.random.key(args.seed), steps, *arguments, progress_bar=False
    )
    options = {
        "log_likelihood": False,
        "posterior_predictive": False,
        "num_samples": 400,
    }
    return bnn.to_inference_data(
        result, guide=guide, args=arguments, predictions=test, **options
    ), steps


def measure(
    method: str, rows: int, gradients: int, args: argparse.Namespace
) -> dict[str, Any]:
    """One row of the table; ``spent`` counts the gradients of a chain, or of all
    members or steps of the guide.
    """
    data, (x, y) = make_data(args.seed, rows), make_data(args.seed + 1, TEST_ROWS)
    test, about, started = {"x": x, "y": y}, "", time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if method == REFERENCE:
            idata, spent, about = reference(data, args, test)
        elif method in KERNELS:
            model, per_step = make_model(args.width), 2 if method == "MCLMC" else 1
            steps = steps_of(gradients, num_parameters(model, *data), per_step)
            kernel = getattr(infer, method)(model, steps_per_draw=steps)
            idata, spent = sampled(kernel, data, args, args.batch_size, test)
        else:
            fit = ensemble if method == "deep ensemble" else mean_field
            idata, spent = fit(data, gradients, args, test)
    covered = idata.attrs.get("variance_covered")
    return {
        "method": method,
        "rows": rows,
        "gradients": gradients,
        "spent": spent,
        "about": about,
        **score(idata, y, truth(x)),
        "variance_covered": None if covered is None else json.loads(covered),
        "step_size": idata.attrs.get("base_step_size"),
        "warnings": sorted(
            {str(w.message) for w in caught if issubclass(w.category, UserWarning)}
        ),
        "seconds": time.process_time() - started,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows of a file in the order of methods."""
    heads = (
        "rows",
        "gradients",
        "method",
        "sd of the function",
        "its R-hat",
        "RMSE",
        "lppd",
        "variance covered",
    )
    order = sorted(
        rows,
        key=lambda row: (row["rows"], row["gradients"], METHODS.index(row["method"])),
    )
    cells = []
    for row in order:
        covered = row["variance_covered"]
        share = "" if covered is None else f"{min(covered):.2f} to {max(covered):.2f}"
        rhat = (
            f"{row['rhat']:.2f}"
            if "rhat" in row and row["method"] != "deep ensemble"
            else ""
        )
        number = (
            f"{row['spent']:,}"
            if row["method"] == REFERENCE
            else f"{row['gradients']:,}"
        )
        name = f"{row['method']}: {row['about']}" if row["about"] else row["method"]
        figures = (
            f"{row['sd']:.4f}",
            rhat,
            f"{row['rmse']:.4f}",
            f"{row['lppd']:.3f}",
            share,
        )
        cells.append((f"{row['rows']:,}", number, name, *figures))
    return markdown(heads, cells)


# --------------------------------------------------------------------------------------
# script


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.benchmarks.minibatches",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=METHODS,
        default=list(METHODS),
        help="kernels and others",
    )
    parser.add_argument(
        "--rows", nargs="+", type=int, default=[20_000, 1_000_000], help="data points"
    )
    parser.add_argument(
        "--gradients",
        nargs="+",
        type=int,
        default=[20_000, 200_000],
        help="gradients per chain",
    )
    parser.add_argument(
        "--reference-gradients",
        type=int,
        default=300_000,
        help="of all the data, per chain",
    )
    parser.add_argument(
        "--long-gradients",
        type=int,
        default=1_000_000,
        help="of minibatches, per reference chain",
    )
    parser.add_argument(
        "--full-rows",
        type=int,
        default=50_000,
        help="most rows of a reference on all the data",
    )
    parser.add_argument(
        "--batch-size", type=int, default=256, help="rows of a minibatch"
    )
    parser.add_argument("--width", type=int, default=32, help="hidden units")
    parser.add_argument(
        "--num-chains", type=int, default=4, help="chains, run side by side"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of data and chains")
    parser.add_argument(
        "--output", type=Path, default=Path("output/minibatches.json"), help="JSON file"
    )
    parser.add_argument("--docs", type=Path, help="page whose table is to be replaced")
    args = parser.parse_args(argv)
    numbers = (
        "rows",
        "gradients",
        "reference_gradients",
        "long_gradients",
        "full_rows",
        "batch_size",
        "width",
    )
    at_least(parser, args, (*numbers, "num_chains"))
    return args


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    writable_file(args.output)
    text = args.output.read_text()
    options = {
        name: value for name, value in options_of(args).items() if name not in VARIED
    }
    old = json.loads(text) if text.strip() else {"rows": [], "options": options}
    if old["options"] != options:
        sys.exit(
            f"--output: {args.output} was measured with other options: "
            f"{old['options']}. Choose another file."
        )
    rows: list[dict[str, Any]] = old["rows"]
    report: dict[str, Any] = {"rows": rows, **environment([]), "options": options}
    report["machine"]["python"] = platform.python_version()
    write_report(args.output, report)
    done = {(row["method"], row["rows"], row["gradients"]) for row in rows}
    for gradients in args.gradients:
        for number in args.rows:
            for method in args.methods:
                # One reference for each number of rows.
                case = (method, number, 0 if method == REFERENCE else gradients)
                if case not in done:
                    done.add(case)
                    rows.append(measure(*case, args))
                    print(table(rows[-1:]).splitlines()[-1], flush=True)
                    write_report(args.output, report)
    put_table(args.docs, "minibatches", table(rows), report)
    return report


if __name__ == "__main__":
    main()
