"""Estimators: a fit changes its state at once; threads do not disturb each other."""

import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from multiprocessing import get_context

import numpy as np
import numpyro.distributions as dist
import pandas as pd
import pytest
from numpyro.primitives import Messenger
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from zoo import CLASSES, X, Y

from numpyro_bnn.estimators import Classifier, Regressor
from numpyro_bnn.metrics import HealthWarning

# so little effort is not enough
pytestmark = pytest.mark.filterwarnings("ignore:.*worse than by a constant")
TINY = {"widths": (3,), "effort": 0.002, "num_samples": 4, "random_state": 0}
TABLE = pd.DataFrame(X, columns=["a", "b"])
OTHER_X = np.c_[X, Y]
# Of each estimator: targets of a fit, of a second one, of one of other sizes, and those
# that it refuses.
TARGETS = {
    Regressor: (Y, 2 - Y, np.stack([Y, -Y], 1), np.full(24, np.nan)),
    Classifier: (
        CLASSES,
        np.array(["a", "b", "c"])[CLASSES],
        np.where(CLASSES > 0, "cat", "dog"),
        np.full(24, "cat"),
    ),
}


class Interrupter:
    """A prior or a callback that interrupts at one of its calls."""

    def __init__(self, at=-1):
        self.calls, self.at = count(), at

    def __call__(self, *args):
        if (now := next(self.calls)) == self.at:
            raise KeyboardInterrupt
        self.last = now
        return (
            dist.Normal(0.0, 1.0).expand(args[1]).to_event()
            if isinstance(args[1], tuple)
            else None
        )


@pytest.mark.parametrize(
    "estimator", [Regressor, pytest.param(Classifier, marks=pytest.mark.slow)]
)
def test_a_fit_that_does_not_end_changes_nothing(estimator):
    """Interrupted where the model is read last, where progress is reported, refused, or
    stopped by a warning.
    """
    targets, others, sized, wrong = TARGETS[estimator]
    whole = {"prior": Interrupter(), "callback": Interrupter()}
    fitted = estimator("mean_field", **whole, **TINY).fit(TABLE, targets)
    reads, reports = whole["prior"].last, whole["callback"].last
    assert reports == 19
    answer = fitted.predict(TABLE)
    new = clone(fitted)
    for name, at, model in [
        ("prior", reads, fitted),
        ("callback", 9, fitted),
        ("callback", 9, new),
    ]:
        model.set_params(**{name: Interrupter(at)})
        before = {attribute: id(value) for attribute, value in vars(model).items()}
        with pytest.raises(KeyboardInterrupt):
            model.fit(X, others)
        assert {
            attribute: id(value) for attribute, value in vars(model).items()
        } == before
        model.set_params(**{name: Interrupter()})
    before, twice = (
        {attribute: id(value) for attribute, value in vars(fitted).items()},
        np.r_[:24, :24],
    )
    for y, error in ((wrong, ValueError), (sized, HealthWarning)):
        with pytest.raises(error):  # warnings are errors here: rows repeat others
            fitted.fit(OTHER_X[twice], y[twice])
        assert {
            attribute: id(value) for attribute, value in vars(fitted).items()
        } == before
    np.testing.assert_array_equal(fitted.predict(TABLE), answer)
    with pytest.raises(NotFittedError):
        new.predict(TABLE)


# -- threads ---------------------------------------------------------------------------


@pytest.fixture
def readers(monkeypatch):
    """The number of threads that are inside of NumPyro's handlers."""
    inside, entered = [], []
    enter, leave = Messenger.__enter__, Messenger.__exit__

    def note(self):
        now = threading.get_ident()
        if any(other != now for other in inside):
            entered.append(f"{type(self).__name__} in two threads")
        inside.append(now)
        return enter(self)

    def forget(self, *error):
        inside.remove(threading.get_ident())
        return leave(self, *error)

    monkeypatch.setattr(Messenger, "__enter__", note)
    monkeypatch.setattr(Messenger, "__exit__", forget)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield entered
    sys.setswitchinterval(interval)


@pytest.mark.parametrize(
    "method", ["mean_field", pytest.param("laplace", marks=pytest.mark.slow)]
)
def test_threads_fit_and_predict_as_one_after_the_other(method, readers):
    """Two fits, and first predictions of one that was loaded, in five threads."""

    def work(seed, stored=None):
        if stored is None:
            model = Regressor(
                method, **TINY | {"random_state": seed, "num_chains": 1}
            ).fit(X, Y)
            return np.concatenate(
                [*model.predict(X, return_std=True), *model.predict_interval(X)]
            )
        model = pickle.loads(stored)
        return np.concatenate([model.predict(X), model.log_predictive_density(X, Y)])

    fitted = Regressor(method, **TINY | {"num_chains": 1}).fit(X, Y)
    tasks = [(0,), (1,), *[(seed, pickle.dumps(fitted)) for seed in range(3)]]
    alone = [work(*task) for task in tasks[:3]]
    with ThreadPoolExecutor(5) as pool:
        together = list(pool.map(lambda task: work(*task), tasks))
    assert not readers
    for place, found in enumerate(together):
        np.testing.assert_array_equal(found, alone[min(place, 2)])


def answer_in_a_process(step, *given):
    try:
        return step(*given)
    except RuntimeError as error:
        return str(error)


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_process_is_refused():
    """It has none of JAX's threads, and would wait for them."""
    model = Regressor("adf", widths=(3,), effort=0.05, random_state=0).fit(X, Y)
    with get_context("fork").Pool(1) as pool:
        for step in (clone(model).fit, model.predict):
            given = (X, Y) if step.__name__ == "fit" else (X,)
            found = pool.apply_async(answer_in_a_process, (step, *given)).get(
                timeout=60
            )
            assert "forked after JAX had started" in found
            assert "loky" in found
