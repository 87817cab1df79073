"""Exact answers under every wrapping: each way to a posterior crossed with models whose
posteriors are known.

The table is `docs/what_works.md`; `make truth` measures all of it again, the tests one
row for each path through the code (`truth.cells.chosen`).
"""

import json
from functools import cache

import pytest
from truth.cells import FAST, KNOWN_FAILURES, OUTCOMES, cells, chosen, outcome


@cache
def recorded():
    """The outcomes that the docs show."""
    return json.loads(OUTCOMES.read_text())["cells"]


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(c, id=c.key, marks=[] if c.key in FAST else pytest.mark.slow)
        for c in chosen()
    ],
)
def test_answer_is_right_or_refused_as_the_page_says(cell):
    kind, text = outcome(cell)
    if cell.key in KNOWN_FAILURES:
        assert kind == "wrong", f"no longer wrong: {text}"
    else:
        assert cell.key in recorded(), f"run `make truth ONLY='{cell.key}'`"
        assert kind == recorded()[cell.key]["outcome"], text
        assert kind in ("right", "refused"), text


def test_the_table_explains_itself():
    """Every cell has an outcome, right or refused, or is a known failure."""
    keys = {cell.key for cell in cells()}
    missing = sorted(keys - set(recorded()))
    assert not missing, f"run `make truth ONLY=...` for {missing[:3]} ..."
    assert set(recorded()) == keys
    assert {cell.key for cell in chosen()} >= FAST | KNOWN_FAILURES.keys()
    unexplained = {
        key
        for key, row in recorded().items()
        if row["outcome"] not in ("right", "refused")
    }
    assert unexplained == KNOWN_FAILURES.keys()
