"""Exact answers under every wrapping: results."""

import pytest
from truth.cells import DIAGONAL, KNOWN_FAILURES, cells, key_of
from truth.check import check, parameters, recorded
from truth.problems import FAMILIES


@pytest.mark.parametrize("cell", parameters("results"))
def test_cell(cell):
    check(cell)


def test_the_table_explains_itself():
    """Every cell has an outcome, right or refused, or is a known failure."""
    assert set(recorded()) == {key_of(cell) for cell in cells()}
    unexplained = {key for key, row in recorded().items() if row["outcome"] not in ("right", "refused")}
    assert unexplained == {f"{way} | {problem}" for way, problem in KNOWN_FAILURES}


def test_the_diagonal_holds_every_way_and_family():
    """What `make test` runs of the table."""
    chosen = {key_of(cell) for cell in cells() if (cell.way, cell.problem) in DIAGONAL}
    assert len(chosen) == len(DIAGONAL)
    assert {way for way, _ in DIAGONAL} == {cell.way for cell in cells()}
    assert all(any(problem.name == p for _, p in DIAGONAL) for problem in FAMILIES["supports"])
