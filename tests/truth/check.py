"""Cells as tests: each must end as the table of the docs says."""

import json
import warnings
from functools import cache
from typing import Any

import pytest

from truth.cells import DIAGONAL, KNOWN_FAILURES, OUTCOMES, Cell, cells, key_of, outcome


@cache
def recorded() -> dict[str, Any]:
    """The outcomes that the docs show."""
    return json.loads(OUTCOMES.read_text())["cells"]


def parameters(group: str) -> list[Any]:
    """The cells of a group, as parameters; those off the diagonal run in `make test-all`."""
    return [
        pytest.param(cell, id=key_of(cell), marks=[] if (cell.way, cell.problem) in DIAGONAL else [pytest.mark.slow])
        for cell in cells(group)
    ]


def check(cell: Cell) -> None:
    """Run a cell: right and refused as recorded, and a known failure still wrong."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a way warns of is tested in its own file
        kind, text = outcome(cell)
    if (cell.way, cell.problem) in KNOWN_FAILURES:
        assert kind == "wrong", f"no longer wrong: {text}"
    else:
        assert kind == recorded()[key_of(cell)]["outcome"], text
        assert kind in ("right", "refused"), text
