"""What the examples claim, held to their standard errors."""

import numpy as np
import pytest

from examples import lotka_volterra


@pytest.mark.slow
def test_physical_parameters_stay_calibrated_where_the_physics_is_wrong(tmp_path):
    """Of 12 independent calibrated intervals of 90 % fewer than 8 hold the truth with probability .004."""
    found = lotka_volterra.main(["--data-sets", "3", "--output", str(tmp_path)])
    covered = {kind: sum(counts.values()) for kind, counts in found["covered"].items()}
    assert covered["with a network"] >= 8
    assert covered["physical"] <= 4
    errors = {kind: np.abs(values) for kind, values in found["errors"].items()}
    assert errors["with a network"].max() < errors["physical"].min()  # relative errors of the posterior means
