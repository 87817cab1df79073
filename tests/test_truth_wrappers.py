"""Exact answers under every wrapping: wrappers."""

import pytest
from truth.check import check, parameters


@pytest.mark.parametrize("cell", parameters("wrappers"))
def test_cell(cell):
    check(cell)
