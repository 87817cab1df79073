"""Published figures on the UCI regression sets, and tables that compare ours
with them.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from examples.benchmarks.shared import PBP, mean_and_error, provenance
from examples.shared import markdown

__all__ = ["BOOSTING", "LARGE", "PUBLISHED", "paired", "picture", "tables"]

# Test RMSE and log likelihood with standard errors, standard splits, 50 hidden units
# (protein: 100). Probabilistic backpropagation: the C code of its authors; dropout run
# to convergence; deterministic variational inference with a heteroscedastic head (log
# likelihood alone); deep ensembles, whose paper does not say what its errors are: by
# their size they are standard deviations over splits.
_OTHERS = {
    "boston": (
        (2.904, 0.181),
        (-2.402, 0.043),
        (-2.41, 0.02),
        (3.28, 1.00),
        (-2.41, 0.25),
    ),
    "concrete": (
        (4.826, 0.165),
        (-2.937, 0.025),
        (-3.06, 0.01),
        (6.03, 0.58),
        (-3.06, 0.18),
    ),
    "energy": (
        (0.539, 0.014),
        (-1.212, 0.005),
        (-1.01, 0.06),
        (2.09, 0.29),
        (-1.38, 0.22),
    ),
    "kin8nm": (
        (0.079, 0.001),
        (1.136, 0.007),
        (1.13, 0.00),
        (0.09, 0.00),
        (1.20, 0.02),
    ),
    "naval": ((0.001, 0.000), (4.450, 0.002), (6.29, 0.04), (0.00, 0.00), (5.63, 0.05)),
    "power": (
        (4.014, 0.038),
        (-2.808, 0.009),
        (-2.80, 0.00),
        (4.11, 0.17),
        (-2.79, 0.04),
    ),
    "protein": (
        (4.274, 0.023),
        (-2.871, 0.002),
        (-2.85, 0.01),
        (4.71, 0.06),
        (-2.83, 0.02),
    ),
    "wine": (
        (0.622, 0.008),
        (-0.928, 0.013),
        (-0.90, 0.01),
        (0.64, 0.04),
        (-0.94, 0.12),
    ),
    "yacht": (
        (0.666, 0.050),
        (-1.250, 0.016),
        (-0.47, 0.03),
        (1.58, 0.48),
        (-1.18, 0.21),
    ),
}
COLUMNS = ("PBP", "MC dropout", "DVI", "deep ensembles")
DIGITS = {"DVI": 2, "deep ensembles": 2}  # as published, where they are fewer than ours
# Sets whose gradients cost five to a hundred times those of the others; they have
# tables of their own.
LARGE = ("kin8nm", "naval", "power", "protein")
# Runs of other packages: they stand beside ours, and are never the best of ours.
BOOSTING = ("ngboost", "catboost")
# Ours in the paired tables, beside the last of them and boosting.
OURS = ("recipe", "recipe 16x16x16", "recipe mixed", "MCLMC")
TITLES = {"log_likelihood": "log likelihood", "rmse": "RMSE"}
# On wine a third of the test rows also occur in the training rows, and these methods
# reproduce them.
NOT_COUNTED = {("wine", "NNGP"), ("wine", "recipe mixed")}
PUBLISHED: dict[str, dict[str, dict[str, Any]]] = {
    name: {
        "PBP": {"rmse": PBP[name][0], "log_likelihood": PBP[name][1]},
        "MC dropout": {"rmse": row[0], "log_likelihood": row[1]},
        "DVI": {"rmse": None, "log_likelihood": row[2]},
        "deep ensembles": {"rmse": row[3], "log_likelihood": row[4]},
    }
    for name, row in _OTHERS.items()
}


def tables(lines: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Markdown tables by name, from the lines of the runner; means over splits and
    their standard errors.

    The best mean of a set is bold. Where a method was run on fewer splits than others,
    their number follows its mean, which is not compared.
    """
    found = list(lines)
    kept = _comparable(found)
    small = [name for name in PUBLISHED if name not in LARGE]
    return {
        "uci_summary": _summary(kept),
        "uci_cost": _cost(found),
        "uci_log_likelihood": _table(kept, "log_likelihood", small),
        "uci_log_likelihood_large": _table(kept, "log_likelihood", LARGE),
        "uci_rmse": _table(kept, "rmse", small),
        "uci_rmse_large": _table(kept, "rmse", LARGE),
        **_paired_tables(kept),
    }


def _paired_tables(lines: list[dict[str, Any]]) -> dict[str, str]:
    """Ours minus the others, if there are others."""
    boosting = dict.fromkeys(line["method"] for line in lines if _is_boosting(line))
    others = [OURS[-1], *boosting]
    made = {
        "uci_paired_log_likelihood": paired(lines, OURS, others, "log_likelihood"),
        "uci_paired_rmse": paired(lines, OURS, others, "rmse"),
    }
    return {name: table for name, table in made.items() if table}


def _is_boosting(line: dict[str, Any]) -> bool:
    return line.get("run") in BOOSTING


def _comparable(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out the splits of boosting that the method of ours with the most splits of
    a set has not been run on.
    """
    splits: dict[str, dict[tuple[str, str], set[int]]] = {}
    for line in lines:
        if not _is_boosting(line):
            by_method = splits.setdefault(line["set"], {})
            by_method.setdefault((line["method"], line["head"]), set()).add(
                line["split"]
            )
    most = {
        name: max(by_method.values(), key=len) for name, by_method in splits.items()
    }
    return [
        line
        for line in lines
        if not _is_boosting(line) or line["split"] in most.get(line["set"], ())
    ]


def _by_method(
    lines: Iterable[dict[str, Any]], score: str
) -> dict[tuple[str, str], dict[int, float]]:
    """Scores by split of each method and head."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for line in lines:
        found.setdefault((line["method"], line["head"]), {})[line["split"]] = line[
            score
        ]
    return found


def paired(
    lines: Iterable[dict[str, Any]],
    ours: Sequence[str],
    others: Sequence[str],
    score: str,
) -> str:
    """For each set and method of ours, its score minus that of each other method, split
    by split.

    A cell is the mean difference over common splits, its standard error, and the number
    of these splits.

    :param score: ``"log_likelihood"`` or ``"rmse"``.
    :return: a table, or nothing if there is nothing to compare.
    """
    rows, kept = [], list(lines)
    columns = [
        key for other in others for key in _by_method(kept, score) if key[0] == other
    ]
    for name in PUBLISHED:
        found = _by_method([line for line in kept if line["set"] == name], score)
        for key in [key for method in ours for key in found if key[0] == method]:
            cells = [
                "-"
                if key == other
                else _difference(found[key], found.get(other, {}), score)
                for other in columns
            ]
            rows += [[name, ", ".join(key), *cells]] if set(cells) != {"-"} else []
    heads = [", ".join(key) if key[0] in ours else key[0] for key in columns]
    return (
        markdown([TITLES[score], "by", *(f"minus {head}" for head in heads)], rows)
        if rows
        else ""
    )


def _difference(
    ours: dict[int, float], theirs: dict[int, float], score: str = "log_likelihood"
) -> str:
    common = ours.keys() & theirs.keys()
    if not common:
        return "-"
    mean, error, count = _summary_of(
        [ours[split] - theirs[split] for split in sorted(common)]
    )
    digits = 4 if score == "rmse" and theirs[min(common)] < 0.15 else 3
    return (
        f"{mean:+.{digits}f}"
        + ("" if np.isnan(error) else f" ± {error:.{digits}f}")
        + f" ({count})"
    )


class Best(NamedTuple):
    """Of a set: our best method, its mean log likelihood with standard error, and the
    published ones.
    """

    method: str
    splits: int
    ours: tuple[float, float]
    published: dict[str, tuple[float, float]]  # means and standard errors
    by_split: dict[int, float]


def best_of(lines: Iterable[dict[str, Any]]) -> dict[str, Best]:
    """By set, our method with the largest mean log likelihood among those with the most
    splits.
    """
    found = {}
    kept = list(lines)
    for name in PUBLISHED:
        own = [
            line
            for line in kept
            if line["set"] == name and (name, line["method"]) not in NOT_COUNTED
        ]
        by_method = _by_method(
            (line for line in own if not _is_boosting(line)), "log_likelihood"
        )
        if not by_method:
            continue
        most = max(map(len, by_method.values()))
        method, at = _largest(
            {key: at for key, at in by_method.items() if len(at) == most}
        )
        run = _summary_of(list(at.values()))
        theirs = {
            column: PUBLISHED[name][column]["log_likelihood"] for column in COLUMNS
        }
        mean, sd = theirs["deep ensembles"]
        theirs["deep ensembles"] = mean, sd / (5 if name == "protein" else 20) ** 0.5
        found[name] = Best(", ".join(method), most, run[:2], theirs, at)
    return found


def _largest(
    by_method: dict[tuple[str, str], dict[int, float]],
) -> tuple[tuple[str, str], dict[int, float]]:
    """The method with the largest mean."""
    return max(
        by_method.items(), key=lambda pair: float(np.mean(list(pair[1].values())))
    )


def _beside(lines: list[dict[str, Any]], name: str, best: Best) -> list[str]:
    """The best of boosting by its mean on the splits of our best method, and what ours
    gains over it.
    """
    own = [
        line
        for line in lines
        if line["set"] == name and _is_boosting(line) and line["split"] in best.by_split
    ]
    found = _by_method(own, "log_likelihood")
    if not found:
        return ["-", "-"]
    most = max(map(len, found.values()))
    (method, _), at = _largest(
        {key: at for key, at in found.items() if len(at) == most}
    )
    return [
        f"{np.mean(list(at.values())):.3f}, {method}",
        _difference(best.by_split, at),
    ]


def _summary(lines: list[dict[str, Any]]) -> str:
    """For each set, ours, the best published one, the difference with its standard
    error, and boosting if there.
    """
    rows = []
    boosting = any(map(_is_boosting, lines))
    for name, best in best_of(lines).items():
        theirs = max(best.published, key=lambda column: best.published[column][0])
        mean, error = best.published[theirs]
        difference = best.ours[0] - mean
        known = not np.isnan(best.ours[1])
        gain = f"{difference:+.2f}" + (
            f" ± {np.hypot(best.ours[1], error):.2f}" if known else ""
        )
        ours = f"{best.ours[0]:.3f}" + (f" ± {best.ours[1]:.3f}" if known else "")
        rows.append(
            [
                name,
                ours,
                f"{best.method} ({best.splits})",
                f"{mean:.2f} ± {error:.2f}, {theirs}",
                gain,
            ]
        )
        rows[-1] += _beside(lines, name, best) if boosting else []
    heads = ["test log likelihood", "ours", "by (splits run)", "best published", "gain"]
    heads += (
        ["best boosting on these splits", "gain, split by split"] if boosting else []
    )
    return markdown(heads, rows)


def picture(lines: Iterable[dict[str, Any]], path: Path) -> None:
    """One panel for each set: ours and the published mean log likelihoods, with
    standard errors.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = best_of(lines)
    figure, axes = plt.subplots(3, 3, figsize=(9, 6.6), layout="constrained")
    labels = ["this package", *COLUMNS[::-1]]
    for ax, (name, best) in zip(axes.flat, found.items(), strict=True):
        values = [best.ours, *(best.published[column] for column in COLUMNS[::-1])]
        for place, (mean, error) in enumerate(values):
            color = "C3" if place == 0 else "0.4"
            ax.errorbar(
                mean,
                -place,
                xerr=0 if np.isnan(error) else 2 * error,
                fmt="o",
                color=color,
                capsize=3,
            )
        ax.axvline(values[0][0], color="C3", linewidth=0.8, alpha=0.4)
        ax.set_title(name, fontsize=10)
        ax.set_ylim(-len(labels) + 0.5, 0.5)
        ax.set_yticks(
            [-place for place in range(len(labels))], labels if ax in axes[:, 0] else []
        )
        ax.locator_params(axis="x", nbins=4)
        ax.grid(axis="x", alpha=0.3)
    figure.supxlabel(
        "test log likelihood, larger is better (bars: two standard errors)", fontsize=10
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _summary_of(values: list[float]) -> tuple[float, float, int]:
    """Mean, standard error, and number; a single value has no error (NaN)."""
    mean, error = mean_and_error(values)
    return mean, error if len(values) > 1 else float("nan"), len(values)


def _cost(lines: list[dict[str, Any]]) -> str:
    """Coverage and seconds of each method, and the machine, versions, seeds and efforts
    of the figures.
    """
    rows, boosting = [], any(map(_is_boosting, lines))
    for method, head in dict.fromkeys((line["method"], line["head"]) for line in lines):
        own = [
            line for line in lines if (line["method"], line["head"]) == (method, head)
        ]
        covered = [
            line["coverage"] for line in own if "coverage" in line
        ]  # earlier members had too few draws
        seconds = np.median(
            [line["seconds"] for line in own]
        )  # some runs wait for others
        rows.append(
            [
                f"{method}, {head}",
                len(own),
                f"{np.mean(covered):.3f}" if covered else "-",
                f"{seconds:.0f}",
            ]
        )

    def one(name: str) -> str:
        return ", ".join(sorted({str(line[name]) for line in lines}))

    table = markdown(
        ("method", "splits", "coverage of 90 % intervals", "seconds per split, median"),
        rows,
    )
    shared = "Methods of one run share its seconds" + (
        ", but not those of boosting" if boosting else ""
    )
    return (
        f"{table}\n\n{provenance(lines)} Seed {one('seed')}, effort {one('effort')}. "
        f"{shared}."
    )


def _table(lines: list[dict[str, Any]], score: str, sets: Sequence[str]) -> str:
    values: dict[tuple[str, str], dict[int, float]] = {}
    for line in lines:
        at = values.setdefault((line["set"], f"{line['method']}, {line['head']}"), {})
        at[line["split"]] = line[score]
    methods = list(dict.fromkeys(method for _, method in values))
    sets = [name for name in sets if any(name == key[0] for key in values)]
    title = f"test {TITLES[score]}"
    columns = [
        _column(
            name,
            [list(values.get((name, method), {}).values()) for method in methods],
            score,
        )
        for name in sets
    ]
    names = [
        *methods,
        *(
            f"{name}, published" + ", ± sd" * (name == "deep ensembles")
            for name in COLUMNS
        ),
    ]
    rows = [row for row in zip(names, *columns, strict=True) if set(row[1:]) != {"-"}]
    return markdown([title, *sets], rows)


def _column(name: str, ours: list[list[float]], score: str) -> list[str]:
    """One set: means over splits of our methods, followed by the published ones."""
    cells: list[tuple[float, float, int] | None] = [
        _summary_of(found) if found else None for found in ours
    ]
    most = max((cell[2] for cell in cells if cell), default=0)
    pairs = [PUBLISHED[name][column][score] for column in COLUMNS]
    cells += [None if pair is None else (*pair, most) for pair in pairs]
    sign = 1 if score == "log_likelihood" else -1
    # An RMSE that was published as 0.00 cannot be compared.
    best = max(
        sign * cell[0] for cell in cells if cell and cell[2] == most and cell[0] != 0
    )
    digits = [None] * len(ours) + [DIGITS.get(column) for column in COLUMNS]
    return [
        _cell(cell, sign, best, most, own)
        for cell, own in zip(cells, digits, strict=True)
    ]


def _cell(
    cell: tuple[float, float, int] | None,
    sign: int,
    best: float,
    most: int,
    digits: int | None,
) -> str:
    if cell is None:
        return "-"
    mean, error, count = cell
    digits = digits or (4 if abs(mean) < 0.15 else 3)
    text = f"{mean:.{digits}f}"
    text = f"**{text}**" if sign * mean == best and count == most else text
    text += "" if np.isnan(error) else f" ± {error:.{digits}f}"
    return text if count == most else f"{text} ({count})"
