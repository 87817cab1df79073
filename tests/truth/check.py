"""Cells as tests: each must end as the table of the docs says."""

import json
import warnings
from functools import cache
from typing import Any

import pytest

from truth.cells import FAST, KNOWN_FAILURES, OUTCOMES, Cell, cells, key_of, outcome


@cache
def recorded() -> dict[str, Any]:
    """The outcomes that the docs show."""
    return json.loads(OUTCOMES.read_text())["cells"]


def parameters() -> list[Any]:
    """All cells as parameters; a few of them are fast."""
    params = []
    for cell in cells():
        marks = [] if (cell.way, cell.problem) in FAST else [pytest.mark.slow]
        params.append(pytest.param(cell, id=key_of(cell), marks=marks))
    return params


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
