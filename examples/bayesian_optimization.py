"""Bayesian optimization: where to evaluate an expensive function next, by a network and
by a Gaussian process.

Branin's function of two inputs and Hartmann's of six are minimized. After a few random
points each model is fitted to all evaluations, and the next one is where the expected
improvement is largest among many candidates: points of a Sobol sequence, and small
steps from the best point so far. The network is an estimator, with a Laplace
approximation by default, the Gaussian process is scikit-learn's, and random search is
the third.

    python -m examples.bayesian_optimization --help
"""

import argparse
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import norm, qmc

from examples.shared import at_least, markdown, writable_folder


class Function(NamedTuple):
    """A function on the unit cube, to be minimized."""

    value: Callable[[np.ndarray], np.ndarray]  # from (N, D) to (N,)
    inputs: int
    least: float


def branin(u: np.ndarray) -> np.ndarray:
    x, y = 15 * u[:, 0] - 5, 15 * u[:, 1]
    return (
        (y - 5.1 / (4 * np.pi**2) * x**2 + 5 / np.pi * x - 6) ** 2
        + 10 * (1 - 1 / (8 * np.pi)) * np.cos(x)
        + 10
    )


ALPHA = np.array([1.0, 1.2, 3.0, 3.2])
A = np.array(
    [
        [10, 3, 17, 3.5, 1.7, 8],
        [0.05, 10, 17, 0.1, 8, 14],
        [3, 3.5, 1.7, 10, 17, 8],
        [17, 8, 0.05, 10, 0.1, 14],
    ]
)
P = 1e-4 * np.array(
    [
        [1312, 1696, 5569, 124, 8283, 5886],
        [2329, 4135, 8307, 3736, 1004, 9991],
        [2348, 1451, 3522, 2883, 3047, 6650],
        [4047, 8828, 8732, 5743, 1091, 381],
    ]
)


def hartmann(u: np.ndarray) -> np.ndarray:
    return -np.exp(-np.sum(A * (u[:, None] - P) ** 2, axis=-1)) @ ALPHA


FUNCTIONS = {
    "branin": Function(branin, 2, 0.397887),
    "hartmann": Function(hartmann, 6, -3.32237),
}


# --------------------------------------------------------------------------------------
# models


def network(
    x: np.ndarray, y: np.ndarray, new: np.ndarray, args: argparse.Namespace
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and sd of the function at new points."""
    from numpyro_bnn.estimators import Regressor

    options = {
        "widths": (args.width,),
        "effort": args.effort,
        "random_state": args.seed,
    }
    model = Regressor(args.method, **options).fit(x, y)
    return model.predict(new), np.sqrt(model.uncertainty(new).epistemic)


def gaussian_process(
    x: np.ndarray, y: np.ndarray, new: np.ndarray, args: argparse.Namespace
) -> tuple:
    """The same, with a Matern kernel of one length scale per input, by the marginal
    likelihood.
    """
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

    kernel = ConstantKernel() * Matern(
        np.full(x.shape[1], 0.5), (0.05, 20), nu=2.5
    ) + WhiteKernel(1e-4, (1e-8, 0.1))
    model = GaussianProcessRegressor(
        kernel, normalize_y=True, n_restarts_optimizer=2, random_state=args.seed
    )
    return model.fit(x, y).predict(new, return_std=True)


MODELS: dict[str, Any] = {
    "network": network,
    "Gaussian process": gaussian_process,
    "random": None,
}


def minimized(
    function: Function, model: Any, seed: int, args: argparse.Namespace
) -> np.ndarray:
    """The least value so far above the minimum, after each evaluation."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(size=(args.start, function.inputs))
    for _ in range(args.evaluations - args.start):
        y = function.value(x)
        if model is None:
            x = np.concatenate([x, rng.uniform(size=(1, function.inputs))])
            continue
        best = x[np.argmin(y)]
        spread = qmc.Sobol(function.inputs, seed=rng).random(args.candidates // 2)
        near = np.clip(
            best + 0.05 * rng.normal(size=(args.candidates // 2, function.inputs)), 0, 1
        )
        new = np.concatenate([spread, near])
        mean, sd = model(x, y, new, args)
        z = (y.min() - mean) / np.maximum(sd, 1e-12)
        x = np.concatenate([x, new[[np.argmax(sd * (z * norm.cdf(z) + norm.pdf(z)))]]])
    return np.minimum.accumulate(function.value(x)) - function.least


# --------------------------------------------------------------------------------------
# script


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.bayesian_optimization",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--functions", nargs="+", choices=FUNCTIONS, default=list(FUNCTIONS)
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=5,
        help="repetitions, with other points at the start",
    )
    parser.add_argument(
        "--start", type=int, default=8, help="random points at the start"
    )
    parser.add_argument(
        "--evaluations",
        type=int,
        default=40,
        help="of the function, those at the start included",
    )
    parser.add_argument(
        "--candidates",
        type=int,
        default=1024,
        help="points at which the improvement is computed",
    )
    parser.add_argument("--method", default="laplace", help="of the estimator")
    parser.add_argument("--width", type=int, default=20, help="hidden units")
    parser.add_argument("--effort", type=float, default=0.3, help="of the estimator")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--output", type=Path, default=Path("output"), help="folder of JSON and figure"
    )
    args = parser.parse_args(argv)
    at_least(parser, args, ("seeds", "candidates"), 2)
    at_least(parser, args, ("start",), 6)
    at_least(parser, args, ("evaluations",), args.start)
    at_least(parser, args, ("width",))
    return args


def draw_figure(path: Path, found: dict[str, dict[str, np.ndarray]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1,
        len(found),
        figsize=(4.5 * len(found), 3.6),
        layout="constrained",
        squeeze=False,
    )
    for ax, (name, by_model) in zip(axes[0], found.items(), strict=True):
        for way, regrets in by_model.items():
            number = 1 + np.arange(regrets.shape[1])
            ax.fill_between(
                number, *np.quantile(regrets, [0.25, 0.75], axis=0), alpha=0.25, lw=0
            )
            ax.plot(number, np.median(regrets, axis=0), label=way)
        ax.set(
            xlabel="evaluations",
            ylabel="least value above the minimum",
            yscale="log",
            title=name,
        )
    axes[0, 0].legend()
    figure.savefig(path, dpi=200)
    plt.close(figure)


def main(argv: list[str] | None = None) -> dict[str, dict[str, list[list[float]]]]:
    args = parse(argv)
    folder = writable_folder(args.output)
    found: dict[str, dict[str, np.ndarray]] = {}
    rows = []
    with warnings.catch_warnings():
        # Of both models: few evaluations do not tell length scales, or the mode, well.
        warnings.filterwarnings(
            "ignore",
            ".*close to the specified|.*posterior sds from the mode|.*lbfgs failed",
        )
        for name in args.functions:
            found[name] = {}
            for way, model in MODELS.items():
                seeds = range(args.seed, args.seed + args.seeds)
                found[name][way] = np.array(
                    [minimized(FUNCTIONS[name], model, seed, args) for seed in seeds]
                )
                at = [found[name][way][:, i] for i in (args.evaluations // 2 - 1, -1)]
                cells = [
                    f"{np.median(r):.3g} ({r.min():.2g} to {r.max():.2g})" for r in at
                ]
                rows.append((name, way, *cells))
    heads = (
        "function",
        "model",
        f"after {args.evaluations // 2} evaluations",
        f"after {args.evaluations}",
    )
    print(
        f"Least value above the minimum, median (least to most) of {args.seeds} seeds"
    )
    print(markdown(heads, rows))
    report = {
        name: {way: r.tolist() for way, r in by_model.items()}
        for name, by_model in found.items()
    }
    (folder / "bayesian_optimization.json").write_text(
        json.dumps(report, indent=1) + "\n"
    )
    draw_figure(folder / "bayesian_optimization.png", found)
    return report


if __name__ == "__main__":
    main()
