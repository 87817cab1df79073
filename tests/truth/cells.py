"""The table: which ways are crossed with which problems, how a cell ends, and the known failures."""

import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from truth import ways
from truth.problems import FAMILIES, PROBLEMS
from truth.quadrature import Problem
from truth.ways import Figure

ROOT = Path(__file__).resolve().parent.parent.parent
OUTCOMES = ROOT / "docs" / "tables" / "what_works.json"

# An error that refuses names the call and the argument, as those of the package do.
REFUSAL = re.compile(r"^[\w.]+(\(.*\))?: argument `\w+` got ")


class Outcome(NamedTuple):
    """How a cell ends.

    :param kind: "right", "refused", "wrong" or "crash".
    :param text: the figure, or the message.
    """

    kind: str
    text: str


class Cell(NamedTuple):
    """A way on a problem."""

    group: str
    way: str
    problem: str


# (way, problem): cause and size of what is wrong. A cell that is right again fails the suite.
_SCALED = "NumPyro adds the Jacobian as a factor inside the model, where `handlers.scale` multiplies it"
_JUMP = "the density has a jump, which gradients do not see; kernels that accept or reject are right"
KNOWN_FAILURES: dict[tuple[str, str], str] = {
    ("NUTS of NumPyro", "centered scale, scaled"): f"{_SCALED}: 0.5 sd",
    ("NUTS of NumPyro", "precision of a weight, scaled"): f"{_SCALED}: 0.6 sd",
    ("NUTS of NumPyro", "precision of the noise, scaled"): f"{_SCALED}: 0.4 sd",
    ("SGLD", "precision of the noise, in pieces"): f"{_JUMP}: 0.16 sd",
    ("MCLMC", "precision of the noise, in pieces"): f"{_JUMP}: 0.2 sd",
}

# Ways by group, and the families of problems that each is crossed with.
GROUPS: dict[str, dict[str, Callable[[Problem], Figure]]] = {
    "results": ways.RESULTS,
    "kernels": ways.KERNELS,
    "wrappers": ways.WRAPPERS,
    "guides": ways.GUIDES,
}
ALL_FAMILIES = tuple(FAMILIES)
NO_PLATES = tuple(family for family in FAMILIES if family != "plates")
FAMILIES_OF: dict[str, Sequence[str]] = {
    **dict.fromkeys(ways.RESULTS, tuple(family for family in FAMILIES if family != "random inside")),
    **dict.fromkeys(ways.KERNELS, ("supports",)),
    # Some kernels are also crossed with the rest: all of ours share one density, which is tested on every problem.
    "NUTS of NumPyro": ("supports", "learned scales"),
    "MALA": ("supports", "learned scales", "handlers", "random inside"),
    **dict.fromkeys(("SGLD", "MCLMC"), ("supports", "learned scales", "handlers", "random inside", "plates")),
    **{name: ("hidden units",) for name in ways.WRAPPERS if "Orbit" in name},
    "UnitMoves": ("hidden units", "supports"),
    "symmetry.quotient": ("hidden units",),
    "collapse": ("handlers", "learned scales"),
    **{name: ("learned scales",) for name in ways.WRAPPERS if "PrecisionGibbs" in name},
    **{
        name: ("supports", "learned scales", "handlers")
        for name in ways.WRAPPERS
        if name.startswith("ParallelTempering")
    },
    **dict.fromkeys(ways.GUIDES, ("supports", "learned scales")),
    **dict.fromkeys(
        ("AutoMeanField", "AutoCoupling", "AutoADF"), ("supports", "learned scales", "handlers", "likelihoods")
    ),
}
# What `make test` runs of the table: the density that all kernels share, one exact kernel, one refusal.
FAST: set[tuple[str, str]] = {
    ("density of our kernels", "half-line"),
    ("density of our kernels", "numpyro.subsample"),
    ("density of our kernels", "centered scale, scaled"),
    ("SGLD", "rows outside of their plate"),
    ("MALA", "ordered"),
}
# Every way and every support, and where the package was once wrong.
DIAGONAL: set[tuple[str, str]] = {
    *(
        ("density of our kernels", problem)
        for problem in ("half-line", "numpyro.subsample", "centered scale, scaled", "mask of a prior")
    ),
    ("to_inference_data", "mask of some of the rows"),
    ("NUTS of NumPyro", "positive"),
    ("SGLD", "rows outside of their plate"),
    ("SGLD", "interval"),
    ("PSGLD", "real"),
    ("SGHMC", "half-line"),
    ("SGNHT", "simplex"),
    ("CyclicalSGLD", "real"),
    ("MALA", "ordered"),
    ("GHMC", "positive"),
    ("GGMC", "interval"),
    ("MCLMC", "simplex"),
    ("ParallelTempering, likelihood", "positive"),
    ("ParallelTempering, joint", "interval"),
    ("PrecisionGibbs", "precision of a scale handler"),
    ("PrecisionGibbs in ParallelTempering, likelihood", "precision of a weight"),
    ("PrecisionGibbs in ParallelTempering, joint", "precision of the noise, scaled"),
    ("OrbitMoves", "ReLU, scale uniform"),
    ("OrbitMoves, exact=False", "2 tanh units, pinned"),
    ("OrbitMoves in ParallelTempering", "2 tanh units, exchangeable, rows masked"),
    ("UnitMoves", "2 tanh units, pinned"),
    ("symmetry.quotient", "one ReLU unit, uniform weights"),
    ("collapse", "precision of a weight"),
    ("AutoMeanField", "interval"),
    ("AutoStructured", "positive"),
    ("AutoBlocks, full rank", "ordered"),
    ("AutoCoupling", "simplex"),
    ("AutoADF", "Laplace"),
}


def cells(group: str | None = None) -> Iterator[Cell]:
    """All cells, or those of a group of ways."""
    for name, table in GROUPS.items():
        if group in (None, name):
            for way in table:
                for family in FAMILIES_OF[way]:
                    for problem in FAMILIES[family]:
                        if ways.applies(table[way], problem):
                            yield Cell(name, way, problem.name)


def key_of(cell: Cell) -> str:
    """The name of a cell in the file of outcomes."""
    return f"{cell.way} | {cell.problem}"


def outcome(cell: Cell) -> Outcome:
    """Run a cell."""
    try:
        figure = GROUPS[cell.group][cell.way](PROBLEMS[cell.problem])
    except (ValueError, TypeError) as error:
        message = str(error)
        return Outcome("refused" if REFUSAL.match(message) else "crash", message)
    except Exception as error:
        return Outcome("crash", f"{type(error).__name__}: {error}")
    return Outcome("right" if figure.error <= 1 else "wrong", figure.text)


def timed(cell: Cell) -> tuple[Cell, dict]:
    """Run a cell: its outcome and its seconds."""
    warnings.simplefilter("ignore")
    started = time.perf_counter()
    kind, text = outcome(cell)
    return cell, {"outcome": kind, "text": text, "seconds": round(time.perf_counter() - started, 1)}


def prepare() -> None:
    """Settings of a worker."""
    import jax

    jax.config.update("jax_compilation_cache_dir", str(ROOT / ".pytest_cache" / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_disable_most_optimizations", True)
