"""What the examples claim, held to their standard errors."""

import numpy as np
import pytest

from examples import active_learning, groups, lotka_volterra, nnx_module, unknown_digits


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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:to_inference_data. 1 of 8 checks failed.\n- standardized")  # pixels share a scale
def test_sampled_weights_separate_unknown_digits_best(tmp_path):
    """AUROC over five pairs of classes: above one network and the ensemble by three standard errors of the gain.

    Accuracy on known digits is within three standard errors of that of the ensemble, or above; NLL is not claimed.
    """
    found = unknown_digits.main(["--output", str(tmp_path)])
    for way in ("one network", "ensemble"):
        gain = np.subtract(found["MCLMC"]["auroc"], found[way]["auroc"])
        assert gain.mean() > 3 * gain.std(ddof=1) / len(gain) ** 0.5
    change = np.subtract(found["MCLMC"]["accuracy"], found["ensemble"]["accuracy"])
    assert change.mean() > -3 * change.std(ddof=1) / len(change) ** 0.5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:to_inference_data")  # 300 draws; Monte Carlo errors are part of the comparison
def test_effects_on_minibatches_are_those_of_nuts(tmp_path):
    """The model with network and effects predicts best; means within twice the Monte Carlo errors, sds within 5 %."""
    found = groups.main(["--output", str(tmp_path)])
    best = found["log_likelihood"]["network, groups"]
    # A standard error of the difference over 600 rows is below 0.05.
    assert best > max(value for name, value in found["log_likelihood"].items() if name != "network, groups") + 0.2
    rms, expected, ratio = found["agreement"]
    assert rms < 2 * expected
    assert ratio == pytest.approx(1, abs=0.05)
