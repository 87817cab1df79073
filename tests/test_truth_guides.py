"""Exact answers under every wrapping: guides."""

import pytest
from truth.check import check, parameters


@pytest.mark.parametrize("cell", parameters("guides"))
def test_cell(cell):
    check(cell)
