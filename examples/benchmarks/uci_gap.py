"""Splits of the UCI sets along one input, with published figures: the table of
`examples.benchmarks.uci`.

Gap: the middle third of the rows, sorted by an input, is the test set; tail: the sixths
at both ends. There is one split for each input that is not a category.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from examples.benchmarks.shared import mean_and_error, provenance
from examples.shared import markdown

__all__ = ["COLUMNS", "KINDS", "gap_tables"]

KINDS = ("gap", "tail")
# Inputs that are sorted by; the others of boston (river) and energy (height,
# orientation, distribution of glazing) are categories.
COLUMNS = {
    "boston": (0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12),
    "concrete": tuple(range(8)),
    "energy": (0, 1, 2, 3, 6),
    "yacht": tuple(range(6)),
}
# Test log likelihood and RMSE: means over these splits and standard errors, computed
# from the results by split that github.com/nnuncert/nnuncert keeps in results/uci (one
# hidden layer of 50 ReLU units; categories in one-hot code; tied rows may be in another
# order). PNN-E: an ensemble of networks that learn mean and variance. NLM-E: an
# ensemble of Bayesian last layers.
NAMES = ("PBP", "MC dropout", "PNN-E (deep ensemble)", "NLM-E (last layers)")
PUBLISHED = {
    ("gap", "boston"): (
        ((-2.827, 0.128), (3.581, 0.215)),
        ((-2.512, 0.032), (3.405, 0.134)),
        ((-2.694, 0.106), (3.461, 0.193)),
        ((-2.589, 0.070), (3.292, 0.155)),
    ),
    ("gap", "concrete"): (
        ((-3.527, 0.097), (7.106, 0.299)),
        ((-3.438, 0.026), (7.725, 0.282)),
        ((-3.358, 0.064), (6.994, 0.372)),
        ((-3.306, 0.047), (7.075, 0.359)),
    ),
    ("gap", "energy"): (
        ((-7.550, 2.869), (6.105, 1.491)),
        ((-7.911, 3.468), (4.869, 1.063)),
        ((-16.502, 7.641), (5.915, 1.639)),
        ((-10.879, 4.561), (6.634, 2.149)),
    ),
    ("gap", "yacht"): (
        ((-1.791, 0.017), (1.132, 0.090)),
        ((-2.567, 0.087), (2.363, 0.393)),
        ((-1.577, 0.057), (1.237, 0.097)),
        ((-1.889, 0.090), (1.272, 0.186)),
    ),
    ("tail", "boston"): (
        ((-5.035, 0.511), (7.684, 1.497)),
        ((-3.529, 0.417), (6.206, 0.345)),
        ((-4.325, 0.627), (5.531, 0.319)),
        ((-3.847, 0.369), (6.014, 0.418)),
    ),
    ("tail", "concrete"): (
        ((-3.973, 0.205), (8.622, 0.496)),
        ((-3.843, 0.099), (11.678, 1.705)),
        ((-3.693, 0.098), (10.586, 0.892)),
        ((-3.657, 0.144), (9.645, 0.833)),
    ),
    ("tail", "energy"): (
        ((-43.476, 37.855), (11.149, 4.937)),
        ((-13.621, 3.568), (12.788, 4.837)),
        ((-34.181, 17.288), (10.185, 4.148)),
        ((-15.867, 9.510), (10.333, 4.831)),
    ),
    ("tail", "yacht"): (
        ((-7.915, 5.864), (3.087, 1.048)),
        ((-2.734, 0.394), (3.431, 0.643)),
        ((-2.591, 0.383), (4.587, 1.413)),
        ((-2.780, 0.244), (3.803, 1.130)),
    ),
}


def gap_tables(lines: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Markdown tables by name, for the kinds of splits that are in the lines of the
    runner.

    A cell has the mean log likelihood, its standard error over the splits, and the mean
    RMSE; the best of a set by log likelihood is bold. Where a method was run on fewer
    splits, their number follows, and it is not compared.
    """
    kept = list(lines)
    made = {}
    for kind in KINDS:
        own = [line for line in kept if line.get("splits_of") == kind]
        if own:
            made[f"uci_{kind}"] = f"{_table(own, kind)}\n\n{provenance(own)}"
    return made


def _table(lines: list[dict[str, Any]], kind: str) -> str:
    sets = [name for name in COLUMNS if any(line["set"] == name for line in lines)]
    methods = dict.fromkeys((line["method"], line["head"]) for line in lines)
    columns = [_column(lines, kind, name, list(methods)) for name in sets]
    names = [", ".join(method) for method in methods] + [
        f"{name}, published" for name in NAMES
    ]
    heads = [
        f"{kind}: log likelihood, RMSE",
        *(f"{name} ({len(COLUMNS[name])} splits)" for name in sets),
    ]
    return markdown(heads, zip(names, *columns, strict=True))


def _column(
    lines: list[dict[str, Any]], kind: str, name: str, methods: list[tuple[str, str]]
) -> list[str]:
    cells: list[tuple[tuple[float, float], float, int] | None] = []
    for method in methods:
        kept = [
            line
            for line in lines
            if line["set"] == name and (line["method"], line["head"]) == method
        ]
        own = {line["split"]: line for line in kept}
        scores = {
            score: [line[score] for line in own.values()]
            for score in ("log_likelihood", "rmse")
        }
        found = mean_and_error(scores["log_likelihood"]) if own else None
        cells.append(
            (found, float(np.mean(scores["rmse"])), len(own)) if found else None
        )
    whole = len(COLUMNS[name])
    cells += [
        (likelihood, rmse[0], whole) for likelihood, rmse in PUBLISHED[kind, name]
    ]
    best = max(cell[0][0] for cell in cells if cell and cell[2] == whole)
    return [_cell(cell, best, whole) for cell in cells]


def _cell(
    cell: tuple[tuple[float, float], float, int] | None, best: float, whole: int
) -> str:
    if cell is None:
        return "-"
    (mean, error), rmse, count = cell
    text = f"{mean:.3f}" if count < whole or mean < best else f"**{mean:.3f}**"
    return f"{text} ± {error:.3f}, {rmse:.3f}" + (
        f" ({count})" if count < whole else ""
    )
