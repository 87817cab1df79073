"""Estimators: a fit takes over all of its state at once."""

from itertools import count

import numpy as np
import numpyro.distributions as dist
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from zoo import CLASSES, X, Y

from numpyro_bnn.estimators import Classifier, Regressor
from numpyro_bnn.metrics import HealthWarning

pytestmark = pytest.mark.filterwarnings("ignore:.*worse than by a constant")  # so little effort is not enough
TINY = {"widths": (3,), "effort": 0.002, "num_samples": 4, "random_state": 0}
TABLE = pd.DataFrame(X, columns=["a", "b"])
OTHER_X = np.c_[X, Y]
# Of each estimator: targets of a fit, those of a second fit, and those that it refuses.
TARGETS = {
    Regressor: (Y, np.stack([Y, -Y], 1), np.full(24, np.nan)),
    Classifier: (CLASSES, np.where(CLASSES > 0, "cat", "dog"), np.full(24, "cat")),
}


class Interrupter:
    """A prior or a callback that interrupts at one of its calls."""

    def __init__(self, at=-1):
        self.calls, self.at = count(), at

    def __call__(self, *args):
        if (now := next(self.calls)) == self.at:
            raise KeyboardInterrupt
        self.last = now
        return dist.Normal(0.0, 1.0).expand(args[1]).to_event() if isinstance(args[1], tuple) else None


@pytest.mark.parametrize("estimator", [Regressor, Classifier])
def test_a_fit_that_does_not_end_changes_nothing(estimator):
    """Interrupted where the model is read first or last or progress is reported, refused, or stopped by a warning."""
    targets, others, wrong = TARGETS[estimator]
    names = ("prior", "callback")
    whole = {name: Interrupter() for name in names}
    estimator("mean_field", **whole, **TINY).fit(OTHER_X, others)
    fitted = estimator("mean_field", **{name: Interrupter() for name in names}, **TINY).fit(TABLE, targets)
    answer = fitted.predict(TABLE)
    reads, reports = whole["prior"].last, whole["callback"].last
    assert reports == 19
    for name, at in [("prior", 0), ("prior", reads // 2), ("prior", reads), ("callback", 9)]:
        for model in (fitted, clone(fitted)):
            model.set_params(**{name: Interrupter(at)})
            before = {attribute: id(value) for attribute, value in vars(model).items()}
            with pytest.raises(KeyboardInterrupt):
                model.fit(OTHER_X, others)
            assert {attribute: id(value) for attribute, value in vars(model).items()} == before
            model.set_params(**{name: Interrupter()})
    twice = np.r_[:24, :24]
    for y, error in ((wrong, ValueError), (others, HealthWarning)):
        with pytest.raises(error):  # warnings are errors here: rows repeat others
            fitted.fit(OTHER_X[twice], y[twice])
    np.testing.assert_array_equal(fitted.predict(TABLE), answer)
    with pytest.raises(NotFittedError):
        model.predict(TABLE)
