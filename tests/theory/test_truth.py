"""Exact answers under every wrapping: each way to a posterior crossed with models whose posteriors are known.

The table is `docs/what_works.md`; `make truth` measures all of it again.
"""

import pytest
from truth.cells import DIAGONAL, KNOWN_FAILURES, cells, key_of
from truth.check import check, parameters, recorded
from truth.problems import FAMILIES


@pytest.mark.parametrize("cell", parameters())
def test_answer_is_right_or_refused_as_the_page_says(cell):
    check(cell)


def test_the_table_explains_itself():
    """Every cell has an outcome, right or refused, or is a known failure."""
    assert set(recorded()) == {key_of(cell) for cell in cells()}
    unexplained = {key for key, row in recorded().items() if row["outcome"] not in ("right", "refused")}
    assert unexplained == {f"{way} | {problem}" for way, problem in KNOWN_FAILURES}


def test_the_diagonal_holds_every_way_and_family():
    """What the second stage of CI runs of the table."""
    chosen = {key_of(cell) for cell in cells() if (cell.way, cell.problem) in DIAGONAL}
    assert len(chosen) == len(DIAGONAL)
    assert {way for way, _ in DIAGONAL} == {cell.way for cell in cells()}
    assert all(any(problem.name == name for _, name in DIAGONAL) for problem in FAMILIES["supports"])
