"""The border to scikit-learn: its own checks, and a package without it."""

import importlib
import sys
import warnings

import numpy as np
import pytest
from sklearn.utils.estimator_checks import check_estimator, estimator_checks_generator

from numpyro_bnn.estimators import Classifier, Regressor

# enough for the scores it asks for
LEARNED = {"widths": (4,), "effort": 0.1, "num_samples": 4, "random_state": 0}
ESTIMATORS = {
    "regressor": lambda: Regressor("mean_field", **LEARNED),
    "classifier": lambda: Classifier("mean_field", **LEARNED),
    "default regressor": lambda: Regressor(effort=0.01, num_chains=2, num_samples=4),
}
# A row of weight 2 is two rows to Monte Carlo error, not to the last digit; exactly
# for Laplace: `test_a_weight_is_so_many_equal_rows`.
EXPECTED = {"check_sample_weight_equivalence_on_dense_data": "Monte Carlo error"}
# Checks that need no fit.
QUICK = {
    "check_estimator_cloneable",
    "check_estimator_repr",
    "check_estimator_tags_renamed",
    "check_get_params_invariance",
    "check_mixin_order",
    "check_no_attributes_set_in_init",
    "check_parameters_default_constructible",
    "check_set_params",
    "check_valid_tag_types",
}


@pytest.mark.parametrize("name", ["regressor", "classifier"])
def test_settings_are_those_of_an_estimator(name):
    done = set()
    for estimator, check in estimator_checks_generator(ESTIMATORS[name]()):
        check_name = getattr(check, "func", check).__name__
        if check_name in QUICK:
            check(estimator)
            done.add(check_name)
    assert len(done) >= 7  # versions of scikit-learn differ


class OnlyAnArray:
    """What becomes an array, and is none to NumPy's functions."""

    def __init__(self, values):
        self.values = np.asarray(values)

    def __array__(self, dtype=None, copy=None):
        return np.array(self.values, dtype)

    def __array_function__(self, function, *_):
        raise TypeError(function.__name__)


def test_data_and_weights_need_only_become_arrays():
    x = np.linspace(-1, 1, 20)
    rows, weights = OnlyAnArray(x[:, None]), OnlyAnArray(1.0 + (x > 0))
    quick = {"widths": (2,), "effort": 0.002, "num_samples": 4, "random_state": 0}
    model = Regressor("mean_field", **quick)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such a fit is bad
        model.fit(rows, OnlyAnArray(x), sample_weight=weights)
    assert model.predict(rows).shape == (20,)


@pytest.mark.slow
@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_contract_of_scikit_learn(name):
    with warnings.catch_warnings():
        # scikit-learn itself reports checks that it skips without array API support.
        warnings.filterwarnings("ignore", category=UserWarning, module="sklearn")
        check_estimator(ESTIMATORS[name](), expected_failed_checks=EXPECTED)


def test_without_scikit_learn_the_room_says_what_to_install(monkeypatch):
    for name in [
        name for name in sys.modules if name.startswith("numpyro_bnn.estimators")
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match=r"pip install .numpyro_bnn\[estimators\]"):
        importlib.import_module("numpyro_bnn.estimators")
