"""Boosting that predicts a mean and a variance, for `examples.benchmarks.uci`: NGBoost
and CatBoost.

Each is run with its defaults, and tuned: a fifth of the training rows, drawn at random,
chooses the settings and the number of trees by log density, and the model is fitted
again to all training rows. For CatBoost there is also the mean density of several
models with these settings, each with a held-out fifth of its own for the number of
trees. Scores are in the units of the data.
"""

import argparse
import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

__all__ = ["catboost", "mixture_scores", "ngboost"]

HELD_OUT, MOST_TREES, PATIENCE = 0.2, 2000, 50
MEMBERS = 5  # models of an ensemble
Rows = tuple[np.ndarray, np.ndarray]


class Booster(NamedTuple):
    """A package.

    :param trees: number of trees by default.
    :param grid: settings to choose from.
    :param fit: ``fit(rows, trees, seed, setting, held_out)``, a model; with held-out
        rows it stops early.
    :param best: log density of held-out rows by the model that stopped on them, and its
        best number of trees.
    :param predict: mean and variance of new rows.
    """

    trees: int
    grid: Mapping[str, tuple]
    fit: Callable[..., Any]
    best: Callable[[Any, Rows], tuple[float, int]]
    predict: Callable[[Any, np.ndarray], tuple[np.ndarray, np.ndarray]]


def ngboost(
    data: Any, head: str, args: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """The normal distribution. Defaults: 500 trees of depth 3, each from all rows, at
    the rate 0.01.
    """
    package = _imported("ngboost")
    from sklearn.tree import DecisionTreeRegressor

    def fit(
        rows: Rows,
        trees: int,
        seed: int,
        setting: Mapping[str, Any],
        held_out: Rows | None = None,
    ) -> Any:
        options = dict(setting)
        base = DecisionTreeRegressor(
            criterion="friedman_mse",
            max_depth=options.pop("depth", 3),
            random_state=seed,
        )
        stop = (
            {
                "X_val": held_out[0],
                "Y_val": held_out[1],
                "early_stopping_rounds": PATIENCE,
            }
            if held_out
            else {}
        )
        model = package.NGBRegressor(
            Base=base, n_estimators=trees, random_state=seed, verbose=False, **options
        )
        return model.fit(*rows, **stop)

    def best(model: Any, held_out: Rows) -> tuple[float, int]:
        trees = int(model.best_val_loss_itr) + 1
        return float(
            model.pred_dist(held_out[0], max_iter=trees).logpdf(held_out[1]).mean()
        ), trees

    def predict(model: Any, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = model.pred_dist(x)
        return found.loc, found.var

    grid = {"depth": (3, 5), "minibatch_frac": (0.5, 1.0), "learning_rate": (0.05,)}
    made = _compare(Booster(500, grid, fit, best, predict), data, args)
    return dict(zip(("NGBoost", "NGBoost, tuned"), made, strict=True))


def catboost(
    data: Any, head: str, args: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """The loss that learns mean and variance, on one thread. Defaults: 1000 trees of
    depth 6.
    """
    package = _imported("catboost")
    fixed = {
        "loss_function": "RMSEWithUncertainty",
        "thread_count": 1,
        "verbose": False,
        "allow_writing_files": False,
    }

    def fit(
        rows: Rows,
        trees: int,
        seed: int,
        setting: Mapping[str, Any],
        held_out: Rows | None = None,
    ) -> Any:
        model = package.CatBoostRegressor(
            iterations=trees, random_seed=seed, **fixed, **setting
        )
        return model.fit(
            *rows,
            **(
                {"eval_set": held_out, "early_stopping_rounds": PATIENCE}
                if held_out
                else {}
            ),
        )

    def best(model: Any, held_out: Rows) -> tuple[float, int]:
        return -model.get_best_score()["validation"][
            "RMSEWithUncertainty"
        ], model.get_best_iteration() + 1

    def predict(model: Any, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        mean, variance = model.predict(x).T
        return mean, variance

    grid = {"depth": (3, 6), "learning_rate": (0.03, 0.1), "l2_leaf_reg": (3, 10)}
    made = _compare(Booster(1000, grid, fit, best, predict), data, args, MEMBERS)
    names = ("CatBoost", "CatBoost, tuned", f"CatBoost, tuned, {MEMBERS} models")
    return dict(zip(names, made, strict=True))


def _imported(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        message = (
            f"examples.benchmarks.uci: {package} is missing. Run `pip install "
            f"{package}`."
        )
        raise ImportError(message) from error


def _compare(
    booster: Booster, data: Any, args: argparse.Namespace, members: int = 1
) -> list[dict[str, float]]:
    """Scores and seconds with the defaults, tuned, and, with more than one member, of
    an ensemble.
    """
    rows, start = (data.x_train, data.y_train), time.perf_counter()

    def scored(
        predictions: Sequence[tuple[np.ndarray, np.ndarray]],
    ) -> dict[str, float]:
        mean, variance = (np.stack(part) for part in zip(*predictions, strict=True))
        return mixture_scores(mean, variance, data) | {
            "seconds": time.perf_counter() - start
        }

    def predicted(
        trees: int, seed: int, setting: Mapping[str, Any]
    ) -> tuple[np.ndarray, np.ndarray]:
        return booster.predict(booster.fit(rows, trees, seed, setting), data.x_test)

    found = [
        scored([predicted(max(2, round(args.effort * booster.trees)), args.seed, {})])
    ]
    start = time.perf_counter()
    most = max(2, round(args.effort * MOST_TREES))
    setting, trees = tuned(booster, rows, most, args.seed)
    several = [predicted(trees, args.seed, setting)]
    found.append(scored(several))
    if members > 1:
        only = booster._replace(
            grid={name: (value,) for name, value in setting.items()}
        )
        for seed in range(args.seed + 1, args.seed + members):
            several.append(predicted(tuned(only, rows, most, seed)[1], seed, setting))
        found.append(scored(several))
    return found


def tuned(
    booster: Booster, rows: Rows, most: int, seed: int
) -> tuple[dict[str, Any], int]:
    """The setting of the grid with the largest log density of held-out rows, and its
    best number of trees.

    :param most: number of trees at which a fit ends at the latest.
    """
    order = np.random.default_rng(seed).permutation(len(rows[0]))
    cut = max(1, round(HELD_OUT * len(order)))
    held_out, rest = (
        (rows[0][part], rows[1][part]) for part in (order[:cut], order[cut:])
    )
    found = []
    for values in product(*booster.grid.values()):
        setting = dict(zip(booster.grid, values, strict=True))
        found.append(
            (
                *booster.best(
                    booster.fit(rest, most, seed, setting, held_out), held_out
                ),
                setting,
            )
        )
    _, trees, setting = max(found, key=lambda trial: trial[0])
    return setting, trees


def mixture_scores(mean: Any, variance: Any, data: Any) -> dict[str, float]:
    """Scores of the mean of M normal densities, from their means and variances (M, N)
    in standardized units.
    """
    from scipy import special, stats

    mean, sd = np.asarray(mean, np.float64), np.sqrt(np.asarray(variance, np.float64))
    scale, y = float(data.y_scaler.scale_factor), np.asarray(data.y_test)
    log_density = special.logsumexp(stats.norm.logpdf(y, mean, sd), axis=0) - np.log(
        len(mean)
    )
    below = stats.norm.cdf(y, mean, sd).mean(axis=0)
    return {
        "rmse": scale * float(np.sqrt(np.mean((mean.mean(axis=0) - y) ** 2))),
        "log_likelihood": float(log_density.mean() - np.log(scale)),
        "coverage": float(np.mean((below > 0.05) & (below < 0.95))),
    }
