"""What the examples claim, held to their standard errors."""

import numpy as np
import pytest

from examples import active_learning, lotka_volterra, nnx_module


@pytest.mark.slow
def test_physical_parameters_stay_calibrated_where_the_physics_is_wrong(tmp_path):
    """Of 12 independent calibrated intervals of 90 % fewer than 8 hold the truth with probability .004."""
    found = lotka_volterra.main(["--data-sets", "3", "--output", str(tmp_path)])
    covered = {kind: sum(counts.values()) for kind, counts in found["covered"].items()}
    assert covered["with a network"] >= 8
    assert covered["physical"] <= 4
    errors = {kind: np.abs(values) for kind, values in found["errors"].items()}
    assert errors["with a network"].max() < errors["physical"].min()  # relative errors of the posterior means


@pytest.mark.slow
def test_a_module_predicts_better_if_it_is_sampled(tmp_path):
    """Log likelihood over ten splits: above the trained module by two standard errors of the paired difference."""
    found = nnx_module.main(["--output", str(tmp_path)])
    gain = np.subtract(found["Bayesian"]["log_likelihood"], found["trained by optax"]["log_likelihood"])
    assert gain.mean() > 2 * gain.std(ddof=1) / len(gain) ** 0.5


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.filterwarnings("ignore:.*posterior sds from the mode")
def test_rows_of_which_the_network_knows_least_teach_more(tmp_path):
    """Ten seeds: a smaller error after all rounds than with random rows, and programs that serve all of them."""
    found = active_learning.main(["--output", str(tmp_path)])
    assert np.mean(found["uncertain"], 0)[-1] < np.mean(found["random"], 0)[-1]
    assert sum(found["programs"][2:]) == 0
