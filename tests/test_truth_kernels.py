"""Exact answers under every wrapping: kernels."""

import pytest
from truth.check import check, parameters


@pytest.mark.parametrize("cell", parameters("kernels"))
def test_cell(cell):
    check(cell)
