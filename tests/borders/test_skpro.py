"""The border to skpro: its own checks, and the distributions of a regressor."""

import importlib
import pickle
import sys

import numpy as np
import pandas as pd
import pytest

from numpyro_bnn.estimators import Regressor, as_skpro

TINY = {"widths": (3,), "num_samples": 20, "random_state": 0}
SETTINGS = {
    "continuous": {"method": "adf"},
    "counts": {"method": "mean_field", "target": "counts", "effort": 0.02},
    "zeros": {"method": "mean_field", "target": "zeros", "effort": 0.02},
}
KINDS = [
    pytest.param(kind, marks=[] if kind == "continuous" else pytest.mark.slow)
    for kind in SETTINGS
]


def test_without_skpro_the_adapter_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "numpyro_bnn.estimators.skpro", raising=False)
    for name in [name for name in sys.modules if name.split(".")[0] == "skpro"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "skpro", None)
    with pytest.raises(ImportError, match=r"pip install .numpyro_bnn\[skpro\]"):
        as_skpro()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # skpro's, of its approximations
def test_the_contract_of_skpro():
    pytest.importorskip("skpro")
    checks = importlib.import_module("skpro.utils").check_estimator(
        type(as_skpro()), verbose=False
    )
    assert len(checks) > 50
    assert {name: why for name, why in checks.items() if why != "PASSED"} == {}


def raw(kind, size=40):
    """Rows with text and gaps, and targets of a kind under the names of the rows."""
    random = np.random.default_rng(0)
    names = [f"row {place}" for place in range(size)]
    X = pd.DataFrame({"amount": random.normal(size=size)}, index=names)
    X[0] = random.choice(["a", "b"], size)
    y = {
        "continuous": X["amount"] + 0.3 * random.normal(size=size),
        "counts": random.poisson(np.exp(1 + X["amount"])).astype(float),
        "zeros": np.exp(X["amount"]) * (random.random(size) < 0.6),
    }[kind]
    X.iloc[3, 0] = np.nan
    return X, pd.DataFrame({"target": y}, index=names)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:.*worse than by a constant")
def test_a_prediction_is_that_of_the_regressor(kind):
    pytest.importorskip("skpro")
    crps = importlib.import_module("skpro.metrics").CRPS()
    X, y = raw(kind)
    model = as_skpro(Regressor(**SETTINGS[kind], **TINY)).fit(X, y)
    model = pickle.loads(pickle.dumps(model))
    new, y = X[:6], y[:6]
    plain, rows = model.regressor_, new.set_axis(["amount", "0"], axis=1)
    found = model.predict_proba(new)
    assert found.index.equals(new.index)
    density = plain.log_predictive_density(rows, y["target"])
    has_mass = (y["target"] == 0) | (kind == "counts")
    has_mass &= kind != "continuous"
    np.testing.assert_allclose(
        found.log_pdf(y)["target"], np.where(has_mass, -np.inf, density), rtol=1e-6
    )
    np.testing.assert_allclose(
        found.pmf(y)["target"], np.where(has_mass, np.exp(density), 0.0), rtol=1e-6
    )
    mean, sd = plain.predict(rows, return_std=True)
    np.testing.assert_allclose(found.mean()["target"], mean)
    np.testing.assert_allclose(model.predict_var(new)["target"], sd**2)
    np.testing.assert_allclose(found.cdf(y)["target"], plain.cdf(rows, y["target"]))
    quantiles = plain.predict_quantiles(rows, [0.1, 0.9])
    for interval in (
        model.predict_interval(new, 0.8),
        model.predict_quantiles(new, [0.1, 0.9]),
        found.quantile([0.1, 0.9]),
    ):
        np.testing.assert_allclose(interval, quantiles.T)
    score = plain.crps(rows, y["target"]).mean()
    np.testing.assert_allclose(crps(y, found), score, rtol=1e-6)
    # parts, in another order
    places = [4, 1]
    part = found.iloc[places].clone()
    np.testing.assert_array_equal(part.mean(), found.mean().iloc[places])
    np.testing.assert_array_equal(found.cdf(y.iloc[places]), part.cdf(y.iloc[places]))
    single = found.iat[4, 0]
    assert single.cdf(1.0) == found.cdf(1.0).iloc[4, 0]
    levels = np.array([[0.1], [0.9], [0.1], [0.5], [0.9], [0.5]])
    assert found.ppf(levels).iloc[1, 0] == quantiles[1, 1]


def test_draws_and_energies_are_those_of_the_distribution():
    pytest.importorskip("skpro")
    X, y = raw("continuous")
    settings = {**TINY, "num_samples": 400}
    found = as_skpro(Regressor("adf", **settings)).fit(X, y).predict_proba(X[:2])
    np.random.seed(0)  # noqa: NPY002, skpro's samples have no other seed
    draws = found.sample(4000)
    assert list(draws.index[:3]) == [(0, "row 0"), (0, "row 1"), (1, "row 0")]
    values = draws["target"].to_numpy().reshape(-1, 2)
    # five standard errors of a share, and of the mean distance of pairs
    shares = (values < found.ppf(0.3)["target"].to_numpy()).mean(0)
    np.testing.assert_allclose(shares, 0.3, atol=5 * 0.5 / 4000**0.5)
    distance = np.abs(values[::2] - values[1::2])
    error = 5 * distance.std(0) / 2000**0.5
    assert np.all(np.abs(distance.mean(0) - found.energy()["energy"]) < error)
    assert np.isscalar(found.iat[0, 0].sample())
    assert found.iat[0, 0].sample(3).shape == (3, 1)


@pytest.mark.parametrize(
    ("regressor", "columns", "words"),
    [(object(), 1, "Pass a `Regressor`"), (None, 2, "Pass one column of targets")],
)
def test_what_the_adapter_cannot_take_is_refused(regressor, columns, words):
    pytest.importorskip("skpro")
    X, y = raw("continuous")
    y = pd.concat([y] * columns, axis=1, keys=range(columns))
    with pytest.raises((TypeError, ValueError), match=words):
        as_skpro(regressor).fit(X, y)
