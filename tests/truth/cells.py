"""The table: which ways are crossed with which problems, how a cell ends, and the known
failures.
"""

import json
import re
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from truth import ways
from truth.problems import FAMILIES, PROBLEMS
from truth.quadrature import Problem
from truth.ways import Figure

ROOT = Path(__file__).resolve().parent.parent.parent
OUTCOMES = ROOT / "docs" / "tables" / "what_works.json"

# An error that refuses names the call and the argument, as those of the package do.
REFUSAL = re.compile(r"^[\w.]+(\(.*\))?: argument `\w+` got ")


class Cell(NamedTuple):
    """A way on a problem."""

    group: str
    way: str
    problem: str

    @property
    def key(self) -> str:
        """Its name in the file of outcomes."""
        return f"{self.way} | {self.problem}"


# Cause and size of what is wrong. A cell that is right again fails the suite.
_SCALED = (
    "NumPyro adds the Jacobian as a factor inside the model, where `handlers.scale` "
    "multiplies it"
)
_JUMP = (
    "the density has a jump, which gradients do not see; kernels that accept or reject "
    "are right"
)
KNOWN_FAILURES: dict[str, str] = {
    "NUTS of NumPyro | centered scale, scaled": f"{_SCALED}: 0.5 sd",
    "NUTS of NumPyro | precision of a weight, scaled": f"{_SCALED}: 0.6 sd",
    "NUTS of NumPyro | precision of the noise, scaled": f"{_SCALED}: 0.4 sd",
    "SGLD | precision of the noise, in pieces": f"{_JUMP}: 0.16 sd",
    "MCLMC | precision of the noise, in pieces": f"{_JUMP}: 0.2 sd",
}
# What `make test` runs of the table: the density that all kernels share, one exact
# kernel, one refusal.
FAST = {
    "density of our kernels | half-line",
    "SGLD | rows outside of their plate",
    "MALA | ordered",
}

# Ways by group, and the families of problems that each is crossed with.
GROUPS: dict[str, dict[str, Callable[[Problem], Figure]]] = {
    "results": ways.RESULTS,
    "kernels": ways.KERNELS,
    "wrappers": ways.WRAPPERS,
    "guides": ways.GUIDES,
}
_THREE = ("supports", "learned scales", "handlers")
FAMILIES_OF: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ways.RESULTS, tuple(family for family in FAMILIES if family != "random inside")
    ),
    **dict.fromkeys(ways.KERNELS, ("supports",)),
    # Some kernels are also crossed with the rest: all of ours share one density, which
    # is tested on every problem.
    "NUTS of NumPyro": ("supports", "learned scales"),
    "MALA": (*_THREE, "random inside"),
    **dict.fromkeys(("SGLD", "MCLMC"), (*_THREE, "random inside", "plates")),
    **{name: ("hidden units",) for name in ways.WRAPPERS if "Orbit" in name},
    "UnitMoves": ("hidden units", "supports"),
    "collapse": ("handlers", "learned scales"),
    **{name: ("learned scales",) for name in ways.WRAPPERS if "PrecisionGibbs" in name},
    **{name: _THREE for name in ways.WRAPPERS if name.startswith("ParallelTempering")},
    **dict.fromkeys(ways.GUIDES, ("supports", "learned scales")),
    **dict.fromkeys(
        ("AutoMeanField", "AutoCoupling", "AutoADF"), (*_THREE, "likelihoods")
    ),
}


def cells(group: str | None = None) -> Iterator[Cell]:
    """All cells, or those of a group of ways."""
    for name, table in GROUPS.items():
        if group in (None, name):
            for way, run in table.items():
                applies = ways.APPLIES.get(
                    getattr(run, "func", run), lambda problem: True
                )
                for family in FAMILIES_OF[way]:
                    yield from (
                        Cell(name, way, problem.name)
                        for problem in FAMILIES[family]
                        if applies(problem)
                    )


# Ways of which the tests run all problems of some families: they run code there that no
# other way of the table runs.
OWN_CODE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            *("density of our kernels", "to_inference_data", "AutoADF", "collapse"),
            *("PrecisionGibbs", "OrbitMoves", "UnitMoves"),
        ),
        tuple(FAMILIES),
    ),
    **dict.fromkeys(
        ("ParallelTempering, likelihood", "AutoMeanField"), ("supports", "handlers")
    ),
    "MALA": ("supports",),
}


def chosen() -> list[Cell]:
    """The cells that the tests run; ``make truth`` runs all.

    Kernels share one density and one way back to the model's sites, guides one
    evidence, and variants of a wrapper its symmetries, blocks or replicas. So a way
    with code of its own meets all problems, and any other way the last of each family
    that it takes, whatever it refuses, and what it is known to get wrong.
    """
    outcomes = {
        key: row["outcome"]
        for key, row in json.loads(OUTCOMES.read_text())["cells"].items()
    }
    family_of = {
        problem.name: family for family in FAMILIES for problem in FAMILIES[family]
    }
    every = [(cell, outcomes.get(cell.key) == "right") for cell in cells()]
    last = {(cell.way, family_of[cell.problem]): cell for cell, right in every if right}
    return [
        cell
        for cell, right in every
        if not right
        or family_of[cell.problem] in OWN_CODE.get(cell.way, ())
        or cell in last.values()
    ]


def outcome(cell: Cell) -> tuple[str, str]:
    """Run a cell: "right", "refused", "wrong" or "crash", and its figure or message."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a way warns of is tested in its own file
        try:
            figure = GROUPS[cell.group][cell.way](PROBLEMS[cell.problem])
        except (ValueError, TypeError) as error:
            return "refused" if REFUSAL.match(str(error)) else "crash", str(error)
        except Exception as error:
            return "crash", f"{type(error).__name__}: {error}"
    return "right" if figure.error <= 1 else "wrong", figure.text


def timed(cell: Cell) -> tuple[Cell, dict[str, Any]]:
    """Run a cell: its outcome and its seconds."""
    started = time.perf_counter()
    kind, text = outcome(cell)
    return cell, {
        "outcome": kind,
        "text": text,
        "seconds": round(time.perf_counter() - started, 1),
    }


def prepare() -> None:
    """Settings of a worker."""
    import jax

    jax.config.update("jax_compilation_cache_dir", str(ROOT / ".pytest_cache" / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_disable_most_optimizations", True)
