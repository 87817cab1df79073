"""Estimators: scikit-learn's contract, units of the data, predictive mixtures, chains at fault, reuse of programs."""

import ast
import json
import pickle
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from numpyro import handlers
from numpyro.infer.util import log_density
from scipy import stats
from scipy.special import logsumexp
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, KFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures
from sklearn.utils.estimator_checks import parametrize_with_checks

import numpyro_bnn as bnn
from numpyro_bnn.estimators import Classifier, Regressor, methods
from numpyro_bnn.estimators.network import copied_rows
from numpyro_bnn.estimators.predictive import Predictive
from numpyro_bnn.infer.warm_start import held_out_rows

ROOT = Path(__file__).resolve().parent.parent
TINY = {"widths": (4,), "effort": 0.002, "num_samples": 4, "random_state": 0}
LEARNED = TINY | {"effort": 0.1}  # enough for the scores that scikit-learn asks for
# Programs compiled by a further fold of the same size.
COMPILED = {"ensemble": 0, "mean_field": 1, "laplace": 0}
FAST = {"widths": (8,), "num_samples": 50, "random_state": 0}


@pytest.fixture(scope="module")
def data():
    """Rows whose noise has the standard deviation 5 on the left and 20 on the right; classes with text labels."""
    rng = np.random.default_rng(0)
    X = rng.uniform([-2, 10, 0], [2, 30, 1], (160, 3))
    y = 500 + 100 * np.sin(X[:, 0]) + rng.normal(size=160) * np.where(X[:, 0] > 0, 20, 5)
    return X, y, np.array(["low", "middle", "high"])[np.digitize(y, [450, 550])]


@pytest.fixture(scope="module")
def fitted(data):
    """A mean-field regressor, which is quick to fit."""
    return Regressor("mean_field", heteroscedastic=True, effort=0.1, **FAST).fit(*data[:2])


# -- the contract of scikit-learn --------------------------------------------------------------------------


def run_check(estimator, check):
    with warnings.catch_warnings():
        # scikit-learn itself reports checks that it skips without array API support.
        warnings.filterwarnings("ignore", category=UserWarning, module="sklearn")
        check(estimator)


@parametrize_with_checks([Regressor("mean_field", **LEARNED)])
def test_contract_of_a_regressor(estimator, check):
    run_check(estimator, check)


@pytest.mark.slow  # a minute and a half of one core, as for the regressor
@parametrize_with_checks([Classifier("mean_field", **LEARNED)])
def test_contract_of_a_classifier(estimator, check):
    run_check(estimator, check)


def test_unfitted_estimators_say_so():
    for estimator in (Regressor(), Classifier()):
        for call in (estimator.predict, estimator.sample, lambda x, e=estimator: e.log_predictive_density(x, [1.0])):
            with pytest.raises(NotFittedError):
                call(np.zeros((1, 2)))
        with pytest.raises(NotFittedError):
            _ = estimator.idata_


@pytest.mark.slow
@parametrize_with_checks([Regressor(effort=0.01, num_chains=2, num_samples=4), Classifier(effort=0.01, num_chains=2)])
def test_contract_with_the_default_method(estimator, check):
    run_check(estimator, check)


# -- units of the data -------------------------------------------------------------------------------------


def test_answers_in_the_units_of_the_data(data, fitted):
    X, y, _ = data
    mean, sd = fitted.predict(X, return_std=True)
    assert mean.dtype == sd.dtype == np.float64
    assert fitted.score(X, y) > 0.5
    draws = fitted.sample(X, 4000, random_state=0)
    # Monte Carlo errors of 4000 draws, correlated between rows: five standard errors for each row.
    np.testing.assert_array_less(np.abs(draws.mean(0) - mean), 5 * sd / 4000**0.5)
    np.testing.assert_allclose(draws.std(0), sd, rtol=0.15)
    assert np.array_equal(draws[:5], fitted.sample(X, 4000, random_state=0)[:5])


def test_other_units_give_the_same_answers(data, fitted):
    """Standardized data do not change if units do, so every answer is exactly equivariant."""
    X, y, _ = data
    scale = 2.0**10  # exact in floating point
    other = clone(fitted).fit(X * 4.0, y * scale)
    for one, two in zip(fitted.predict(X, True), other.predict(4.0 * X, True), strict=True):
        np.testing.assert_allclose(two, scale * one, rtol=1e-5)
    density = other.log_predictive_density(4.0 * X, scale * y)
    np.testing.assert_allclose(density, fitted.log_predictive_density(X, y) - np.log(scale), atol=1e-4)


def test_density_integrates_to_one_and_has_the_reported_moments(data, fitted):
    """The change of variables of the standardization, and the total variance: by quadrature over y."""
    X = data[0][:3]
    mean, sd = fitted.predict(X, return_std=True)
    for row in range(3):
        grid = np.linspace(mean[row] - 12 * sd[row], mean[row] + 12 * sd[row], 2001)
        density = np.exp(fitted.log_predictive_density(np.tile(X[row], (2001, 1)), grid))
        first = np.trapezoid(density * grid, grid)
        second = np.trapezoid(density * (grid - mean[row]) ** 2, grid)
        np.testing.assert_allclose(np.trapezoid(density, grid), 1.0, rtol=1e-3)
        np.testing.assert_allclose([first, second**0.5], [mean[row], sd[row]], rtol=1e-3)


def mixture(means, scales, df):
    """A predictive distribution whose components are given, at two equal rows; without ``df`` they are normal."""

    def model(x, y=None):
        loc = numpyro.sample("loc", dist.Normal(0.0, 1.0))
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        fn = dist.Normal(loc, scale)
        if df is not None:
            fn = dist.StudentT(numpyro.sample("df", dist.Gamma(2.0, 0.1)), loc, scale)
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", fn.expand([x.shape[0]]), obs=y)

    draws = {"loc": means, "scale": scales} | ({} if df is None else {"df": df})
    return Predictive(model, {name: value[None] for name, value in draws.items()})


@pytest.mark.parametrize("df", [None, np.array([2.05, 4.0, 100.0])])
def test_few_draws_have_the_exact_mixture(df):
    """Three components far apart: neither the variance nor the quantiles are those of one Gaussian."""
    means, scales = np.array([-10.0, 0.0, 30.0]), np.array([0.5, 2.0, 1.0])
    exact = stats.norm(means, scales) if df is None else stats.t(df, means, scales)
    found = mixture(means, scales, df)
    rows = np.zeros((2, 1))
    mean, noise, spread = found("moments", rows)
    np.testing.assert_allclose(mean, means.mean(), rtol=1e-5)
    np.testing.assert_allclose(noise, exact.var().mean(), rtol=1e-4)
    np.testing.assert_allclose(spread, means.var(), rtol=1e-5)
    levels = np.array([0.001, 0.05, 0.5, 0.95])
    for level, value in zip(levels, found("quantiles", rows, options=(levels,)), strict=True):
        np.testing.assert_allclose(exact.cdf(value[:, None]).mean(1), level, atol=3e-5)
    at = np.array([-9.0, 60.0])
    expected = logsumexp(exact.logpdf(at[:, None]), axis=1) - np.log(3)
    np.testing.assert_allclose(found("log_density", rows, at)[0], expected, rtol=1e-4)


@pytest.mark.parametrize("targets", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_heavy_tails(data, targets):
    """Outliers: the noise of the others stays small, and draws, intervals and densities are of one distribution."""
    X, y = data[0], data[0][:, 0] + np.random.default_rng(0).normal(0, 0.1, 160)
    y[::16] += 20.0
    y = y if targets == 1 else np.stack([y, 3 - y], 1)
    robust, normal = (
        Regressor("mean_field", heavy_tails=tails, effort=0.1, **FAST).fit(X, y) for tails in (True, False)
    )
    good = np.arange(160) % 16 > 0
    low, high = robust.predict_interval(X, level=0.5)
    wide = np.diff(normal.predict_interval(X, level=0.5), axis=0)
    assert np.median(high - low) < 0.5 * np.median(wide)
    densities = [model.log_predictive_density(X, y)[good].mean() for model in (robust, normal)]
    assert densities[0] > densities[1] + 0.5
    draws = robust.sample(X, 2000, random_state=0)
    inside = ((low < draws) & (draws < high)).mean(0)
    np.testing.assert_allclose(inside, 0.5, atol=5 * 0.5 / 2000**0.5)  # five standard errors of independent draws


def test_heavy_tails_of_methods_without_them_are_refused(data):
    with pytest.raises(ValueError, match=r"argument `heavy_tails` got True.*ensemble, nuts, mean_field"):
        Regressor("laplace", heavy_tails=True).fit(*data[:2])
    with pytest.raises(TypeError, match="argument `heavy_tails` got 'yes'"):
        Regressor(heavy_tails="yes").fit(*data[:2])


def test_ratings_have_normal_noise_of_one_scale(data):
    """Others could put all their density on the few values. `test_usual_network_and_noise` has the default."""
    X, y = data[0], np.clip(np.round(data[0][:, 0] + np.random.default_rng(1).normal(0, 0.8, 160)), -2, 2)
    for name in ("heavy_tails", "heteroscedastic"):
        with pytest.raises(ValueError, match=rf"argument `{name}` got True.*repeated values"):
            Regressor(**{name: True}, **FAST).fit(X, y)


@pytest.mark.parametrize(
    ("method", "rows", "options", "kernels", "noise"),
    [
        ("ensemble", 150, {}, [(3, 16), (16, 16), (16, 16), (16, 2)], {"excess_df"}),
        ("ensemble", 149, {}, [(3, 50), (50, 1)], {"excess_df", "sigma"}),
        ("ensemble", 320, {"heteroscedastic": False, "widths": (4,)}, [(3, 4), (4, 1)], {"excess_df", "sigma"}),
        ("ensemble", "320 ratings", {}, [(3, 50), (50, 1)], {"sigma"}),
        ("mean_field", 320, {}, [(3, 50), (50, 1)], {"sigma"}),
        ("mean_field", 320, {"heteroscedastic": True, "heavy_tails": True}, [(3, 50), (50, 2)], {"excess_df"}),
    ],
)
def test_usual_network_and_noise(data, monkeypatch, method, rows, options, kernels, noise):
    found = {}

    def stop(task):
        found.update(handlers.trace(handlers.seed(task.model, 0)).get_trace(*task.data))
        raise InterruptedError

    monkeypatch.setitem(methods.METHODS, method, stop)
    X = np.concatenate([data[0], data[0] + 0.5])
    X, y = (X, X[:, 0].round()) if rows == "320 ratings" else (X[:rows], X[:rows, 0])
    with pytest.raises(InterruptedError):
        Regressor(method, **options).fit(X, y)
    assert [site["value"].shape for name, site in found.items() if name.endswith(".kernel")] == kernels
    drawn = {name for name, site in found.items() if site["type"] == "sample"}
    assert {name for name in drawn if not name.startswith("net/")} == {*noise, "y"}


@pytest.mark.parametrize(("estimator", "family"), [(Classifier, "HalfCauchy"), (Regressor, "HalfNormal")])
def test_scales_of_a_classifier_have_the_wider_prior(data, estimator, family):
    X, y = data[0], (data[0][:, 0] > 0).astype(int)
    model = estimator("mean_field", effort=0.01, **FAST).fit(X, y)._predictive.model
    site = handlers.trace(handlers.seed(model, 0)).get_trace(jnp.asarray(X))["net/Dense_0.kernel_scale"]
    assert type(site["fn"]).__name__ == family
    assert float(site["fn"].scale) == 1.0


def test_rows_in_chunks_give_the_same(data, fitted, monkeypatch):
    X = np.tile(data[0], (3, 1))
    whole = fitted.predict(X, return_std=True)
    monkeypatch.setattr("numpyro_bnn.estimators.predictive.MOST_ROWS", 32)
    again = pickle.loads(pickle.dumps(fitted)).predict(X, return_std=True)
    np.testing.assert_allclose(np.array(again), np.array(whole), rtol=1e-5)


def test_noise_that_depends_on_the_inputs(data, fitted):
    X, y, _ = data
    _, sd = fitted.predict(X, return_std=True)
    assert sd[X[:, 0] > 0.5].mean() > 1.5 * sd[X[:, 0] < -0.5].mean()
    low, high = fitted.predict_interval(X, level=0.8)
    # Binomial: 128 of 160 rows are expected, with the standard deviation 5.
    assert abs(np.sum((low < y) & (y < high)) - 128) < 25


# -- what is asked after a fit -----------------------------------------------------------------------------


def test_uncertainty_is_split_in_two(data, fitted):
    X = data[0]
    found = fitted.uncertainty(X)
    np.testing.assert_allclose(found.aleatoric + found.epistemic, fitted.predict(X, True)[1] ** 2, rtol=1e-6)
    draws = fitted.sample(X, 50, noise=False)  # each of the 50 draws once
    np.testing.assert_allclose(found.epistemic, draws.var(0), rtol=1e-3)
    assert found.aleatoric[X[:, 0] > 0.5].mean() > 2 * found.aleatoric[X[:, 0] < -0.5].mean()
    # Rows ten sds away are those of which the network knows least.
    far = np.concatenate([X[:20], X[:3] + 10 * X.std(0)])
    assert set(fitted.most_uncertain(far, 3)) == {20, 21, 22}


def test_uncertainty_of_classes(data):
    X, _, labels = data
    model = Classifier("mean_field", effort=0.1, **FAST).fit(X, labels)
    found = model.uncertainty(X)
    draws = model.sample(X, 50, noise=False)
    np.testing.assert_allclose(found.aleatoric, stats.entropy(draws, axis=2).mean(0), rtol=1e-3, atol=1e-5)
    total = stats.entropy(model.predict_proba(X), axis=1)
    np.testing.assert_allclose(found.epistemic, total - found.aleatoric, atol=1e-4)
    assert found.epistemic.min() >= 0


def test_calibration_scales_the_prediction(data, fitted):
    """Targets whose residuals are three times as wide: the factor is that of a grid, and every answer follows."""
    X, y, _ = data
    model, mean = pickle.loads(pickle.dumps(fitted)), fitted.predict(X)
    wide = mean + 3 * (y - mean)
    found = model.calibrate(X, wide).calibration_
    density = model._density_by_factor(X, wide)
    grid = np.exp(np.linspace(0, 2, 101))
    scores = [density(factor).sum() - 2 * np.log(factor) ** 2 for factor in grid]
    np.testing.assert_allclose(found, grid[np.argmax(scores)], rtol=0.03)
    assert 2 < found < 5
    np.testing.assert_allclose(model.predict(X), mean)
    np.testing.assert_allclose(model.predict(X, True)[1], found * fitted.predict(X, True)[1], rtol=1e-6)
    np.testing.assert_allclose(model.uncertainty(X).epistemic, found**2 * fitted.uncertainty(X).epistemic, rtol=1e-6)
    low, high = model.predict_interval(X)
    draws = model.sample(X, 4000, random_state=0)
    # Shares of 4000 draws in intervals of .9: five binomial standard errors.
    assert np.abs(np.mean((low < draws) & (draws < high), 0) - 0.9).max() < 5 * (0.09 / 4000) ** 0.5
    at = mean[:1] + np.linspace(-1, 1, 2001) * 12 * model.predict(X[:1], True)[1]
    area = np.trapezoid(np.exp(model.log_predictive_density(np.repeat(X[:1], 2001, 0), at)), at)
    np.testing.assert_allclose(area, 1.0, rtol=1e-3)
    assert clone(model).fit(X, y).calibration_ == 1.0


def test_temperature_of_classes(data):
    X, _, labels = data
    model = Classifier("mean_field", effort=0.1, **FAST).fit(X[:100], labels[:100])
    before, log_probs = model.predict_proba(X), np.log(model.predict_proba(X[100:]))
    temperature = model.calibrate(X[100:], labels[100:]).calibration_
    own = np.arange(60), np.searchsorted(model.classes_, labels[100:])
    grid = np.exp(np.linspace(-2, 2, 401))
    scores = [(log_probs / t - logsumexp(log_probs / t, 1, keepdims=True))[own].sum() for t in grid]
    best = grid[np.argmax(scores - 2 * np.log(grid) ** 2)]
    np.testing.assert_allclose(np.log(temperature), np.log(best), atol=0.01)
    np.testing.assert_array_equal(model.predict_proba(X).argmax(1), before.argmax(1))
    found = model.log_predictive_density(X[100:], labels[100:]).sum()
    np.testing.assert_allclose(found, np.interp(temperature, grid, scores), rtol=1e-4)
    # Rows that are all right ask for the temperature 0.
    right = model.predict(X[100:])
    assert 0.2 < pickle.loads(pickle.dumps(model)).calibrate(X[100:], right).calibration_ < temperature
    with pytest.raises(ValueError, match="a temperature of"):
        model.sample(X)


def test_conformal_intervals_hold_what_they_promise(fitted, data):
    """Whatever the noise: 800 times 19 held-out rows and one new row, exchangeable given the fit."""
    rng = np.random.default_rng(1)
    X = np.tile(data[0], (100, 1))
    y = fitted.predict(X) + 300 * rng.standard_t(2, len(X))  # far from the noise of the fit, heavy-tailed
    inside = []
    for rows in rng.permutation(len(X)).reshape(-1, 20):
        held_out, new = rows[:19], rows[19:]
        low, high = fitted.conformal_interval(X[new], X[held_out], y[held_out], level=0.8)
        inside.append((low < y[new]) & (y[new] < high))
    # Exactly .8 by theory, as .8 * 20 is a whole number: five standard errors.
    assert abs(np.mean(inside) - 0.8) < 5 * (0.16 / len(inside)) ** 0.5
    np.testing.assert_allclose(low + high, 2 * fitted.predict(X[new]), rtol=1e-6)
    with pytest.raises(ValueError, match="at least 19 rows"):
        fitted.conformal_interval(X[:1], X[:18], y[:18], level=0.95)


@pytest.mark.filterwarnings("ignore:.*rows lie more than 3 standard deviations")
def test_conformal_sets_hold_what_they_promise(data):
    """Whatever the labels: 800 times 19 held-out rows and one new row, exchangeable given the fit."""
    X, _, labels = data
    model = Classifier("mean_field", effort=0.1, **FAST).fit(X, labels)
    rng = np.random.default_rng(2)
    X = np.tile(X, (100, 1)) + rng.normal(0, 0.5, (len(X) * 100, 3))
    y = rng.permutation(np.tile(labels, 100))  # the fit is of no use for them
    inside = []
    for rows in rng.permutation(len(X)).reshape(-1, 20):
        held_out, new = rows[:19], rows[19:]
        sets = model.conformal_set(X[new], X[held_out], y[held_out], level=0.8)
        inside.append(sets[0, model.classes_ == y[new]])
    # Exactly .8 by theory, as .8 * 20 is a whole number and no probabilities are equal: five standard errors.
    assert abs(np.mean(inside) - 0.8) < 5 * (0.16 / len(inside)) ** 0.5
    wider = model.conformal_set(X[:50], X[held_out], y[held_out], level=0.95)
    assert np.all(wider >= model.conformal_set(X[:50], X[held_out], y[held_out], level=0.5))
    np.testing.assert_array_equal(wider.sum(1) > 0, wider[np.arange(50), model.predict_proba(X[:50]).argmax(1)])
    with pytest.raises(ValueError, match="at least 19 rows"):
        model.conformal_set(X[:1], X[:18], y[:18], level=0.95)
    with pytest.raises(ValueError, match="which the fit has not seen"):
        model.conformal_set(X[:1], X[:18], ["none"] * 18)


# -- Laplace: the linearized network in closed form ------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "heteroscedastic"),
    [(1, False), pytest.param(1, True, marks=pytest.mark.slow), pytest.param(2, False, marks=pytest.mark.slow)],
)
def test_laplace_in_closed_form_is_the_mixture_of_its_draws(data, targets, heteroscedastic):
    """Mean, variance, quantiles and density need no draws, and are those of draws of the linearized network."""
    X, y = data[0], data[1] if targets == 1 else np.stack([data[1], 7 - 3 * data[1]], 1)
    options = {"widths": (4,), "num_samples": 20_000, "random_state": 0}
    model = Regressor("laplace", heteroscedastic=heteroscedastic, **options).fit(X, y)
    rows = X[:6]
    (means, sds), _ = model._components(rows, 20_000, 0)
    means, sds = model._in_units(means), model._in_units(sds, shift=False)
    mean, sd = model.predict(rows, return_std=True)
    variance = sds**2 + (means - means.mean(0)) ** 2
    # Five standard errors of Monte Carlo means.
    np.testing.assert_array_less(np.abs(means.mean(0) - mean), 5 * means.std(0) / 20_000**0.5)
    np.testing.assert_array_less(np.abs(variance.mean(0) - sd**2), 5 * variance.std(0) / 20_000**0.5)
    for level, ends in zip((0.05, 0.95), model.predict_interval(rows, level=0.9), strict=True):
        below = stats.norm.cdf((ends - means) / sds)
        np.testing.assert_array_less(np.abs(below.mean(0) - level), 5 * below.std(0) / 20_000**0.5)
    each = stats.norm.pdf(y[:6], means, sds)
    each = each.prod(-1) if targets == 2 else each
    found = np.exp(model.log_predictive_density(rows, y[:6]))
    np.testing.assert_array_less(np.abs(each.mean(0) - found), 5 * each.std(0) / 20_000**0.5)


@pytest.mark.core
def test_laplace_is_exact_for_a_linear_model(data):
    """Without hidden layers, given the noise: linear regression with the prior precisions of the evidence."""
    X, y, _ = data
    model = Regressor("laplace", widths=(), prior=bnn.priors.Normal(2.0), random_state=0).fit(X, y)
    rows, targets = model._data
    design = np.c_[rows, np.ones(len(X))]
    precision = ast.literal_eval(model.attrs_["prior_precision"])
    trace = handlers.trace(handlers.seed(model._predictive.guide.model, 0)).get_trace(jnp.asarray(rows))
    kernel, bias = (
        precision[name] / np.ravel(trace[name]["fn"].variance)[0]
        for name in ("net/Dense_0.kernel", "net/Dense_0.bias")
    )
    median = model._predictive.guide.median(model._predictive.params)
    noise = float(median["sigma"]) + methods.NOISE_FLOORS["laplace"]
    cov = np.linalg.inv(design.T @ design / noise**2 + np.diag([kernel] * 3 + [bias]))
    mean, of_noise, spread = model._summary("moments", X)
    np.testing.assert_allclose(mean, design @ cov @ design.T @ targets / noise**2, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(spread, np.einsum("ni,ij,nj->n", design, cov, design), rtol=1e-4)
    # The log of the noise has a variance of 1 / (2 N), nearly.
    np.testing.assert_allclose(of_noise, noise**2 * np.exp(1 / len(X)), rtol=1e-2)


# -- data as they come -------------------------------------------------------------------------------------


def test_several_targets(data):
    X, y, _ = data
    both = np.stack([y, -3 * y + 7], axis=1)
    model = Regressor("mean_field", effort=0.1, **FAST).fit(X, both)
    mean, sd = model.predict(X, return_std=True)
    assert mean.shape == sd.shape == both.shape
    assert model.score(X, both) > 0.5
    low, high = model.predict_interval(X)
    assert low.shape == both.shape
    assert np.all(low < high)
    assert model.sample(X, 7).shape == (7, *both.shape)
    density = model.log_predictive_density(X, both)
    assert density.shape == (160,)
    # In other units of the second target, its log Jacobian only.
    assert model.idata_["observed_data"]["y"].shape == both.shape
    np.testing.assert_allclose(model.idata_["observed_data"]["y"], both, rtol=1e-5)


@pytest.mark.core
def test_classes_with_text_labels(data):
    X, _, labels = data
    model = Classifier("mean_field", effort=0.1, **FAST).fit(X, labels)
    assert list(model.classes_) == ["high", "low", "middle"]
    probs = model.predict_proba(X)
    np.testing.assert_allclose(probs.sum(1), 1.0, rtol=1e-12)
    assert model.score(X, labels) > 0.6
    places = np.searchsorted(model.classes_, labels)
    density = model.log_predictive_density(X, labels)
    np.testing.assert_allclose(density, np.log(probs[np.arange(160), places]), rtol=1e-12)
    draws = model.sample(X, 2000, random_state=0)
    # Frequencies of 2000 draws: five standard errors.
    np.testing.assert_allclose((draws == "low").mean(0), probs[:, 1], atol=5 * 0.5 / 2000**0.5)
    assert model.sample(X, 3, noise=False).shape == (3, 160, 3)
    assert set(model.idata_["observed_data"]["y"].to_numpy()) == {0, 1, 2}


@pytest.mark.filterwarnings("ignore:.*worse than by a constant")  # so little effort is not enough
def test_tables_of_pandas(data):
    X, y, _ = data
    table = pd.DataFrame(X, columns=["a", "b", "c"])
    model = Regressor("mean_field", **TINY).fit(table, pd.Series(y))
    assert list(model.feature_names_in_) == ["a", "b", "c"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.predict(table)
    with pytest.raises(ValueError, match="feature names"):
        model.predict(table.rename(columns={"a": "z"}))


@pytest.mark.filterwarnings("ignore:.*worse than by a constant")  # so little effort is not enough
@pytest.mark.filterwarnings("ignore:.*rows lie more than 3 standard deviations")
@pytest.mark.parametrize(
    "method", [name if name == "adf" else pytest.param(name, marks=pytest.mark.slow) for name in methods.METHODS]
)
def test_degenerate_data(method):
    """Two rows, more inputs than rows, constant columns, constant targets: finite answers."""
    X = np.random.default_rng(0).normal(size=(5, 9))
    X[:, 3] = 1e6
    for rows, y in [(X, np.arange(5.0)), (X[:2], np.array([1.0, 2.0])), (X, np.full(5, 3e5))]:
        model = Regressor(method, **TINY | {"num_chains": 2, "effort": 0.02}).fit(rows, y)
        mean, sd = model.predict(X, return_std=True)
        assert np.isfinite(mean).all()
        assert np.all(sd > 0)


# -- methods -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("method", methods.METHODS)
def test_every_method_learns(method, data):
    X, y, labels = data
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "estimators.*left out")
        model = Regressor(method, effort=0.25, **FAST).fit(X, y)
        classifier = Classifier(method, effort=0.25, **FAST).fit(X, labels)
    assert model.score(X, y) > 0.7
    assert classifier.score(X, labels) > 0.7
    low, high = model.predict_interval(X)
    assert 0.8 < np.mean((low < y) & (y < high)) <= 1.0


@pytest.mark.filterwarnings("ignore:.*worse than by a constant")  # so little effort is not enough
def test_progress_is_reported(data):
    X, y, _ = data
    seen = []
    Regressor("mean_field", callback=lambda done, total: seen.append((done, total)), **TINY).fit(X, y)
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]
    assert len(seen) > 5


def test_chains_at_fault_are_left_out(data):
    """One chain that froze and one that diverged must not reach the predictions, and are named."""
    rng = np.random.default_rng(0)
    sites = {"w": rng.normal(size=(4, 5, 3)), "s": rng.normal(size=(4, 5))}
    sites["w"][1, 3:] = np.nan
    sites["w"][2], sites["s"][2] = 7.0, 7.0
    with pytest.warns(UserWarning, match=r"diverged: \[1\], frozen_chains: \[2\]"):
        kept = methods._sound("estimators.Regressor", sites, {"frozen_chains": "[]"})
    np.testing.assert_array_equal(kept.sites["w"], sites["w"][[0, 3]])
    assert kept.attrs["diverged"] == "[1]"
    assert kept.attrs["frozen_chains"] == "[2]"
    with pytest.raises(ValueError, match="every chain diverged or froze"):
        methods._sound("estimators.Regressor", {"w": np.full((2, 3, 1), np.nan)}, {})


def test_a_fit_worse_than_a_constant_warns():
    """Probabilistic backpropagation with learned scales on sixteen rows: means are many sds of the targets off."""
    rng = np.random.default_rng(1)
    X = rng.uniform(-1, 1, (16, 8))
    y = X[:, 0] ** 2 + 0.1 * rng.normal(size=16)
    with pytest.warns(bnn.metrics.HealthWarning, match="nats a row worse than by a constant"):
        Regressor("adf", widths=(20,), prior=bnn.priors.Hierarchical(), random_state=0).fit(X, y)
    model = Classifier("mean_field", **TINY).fit(X, X[:, 0] > 0)
    with pytest.warns(bnn.metrics.HealthWarning, match="Classifier.fit: .* 0.5 nats"):
        model._warn_if_worse(np.array([-1.0, -1.0]), np.array([-0.5, -0.5]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model._warn_if_worse(np.array([-0.55]), np.array([-0.5]))


def test_copies_of_rows_are_named(data):
    """Rows that stand twice count twice; rows of few kinds, whose targets differ by chance, are no copies."""
    X, y, labels = data
    rows = np.r_[:100, :20]
    for model, targets in [(Regressor("adf", **TINY), y), (Classifier("mean_field", **TINY), labels)]:
        with pytest.warns(bnn.metrics.HealthWarning, match=r"fit: 20 of 120 rows repeat another"):
            model.fit(X[rows], targets[rows])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Regressor("adf", **TINY).fit(X[np.r_[:100, :11]], y[np.r_[:100, :11]])  # 11 of 111, less than a tenth


@pytest.mark.parametrize(
    ("targets", "copies"),
    [
        (lambda x, rng: rng.normal(size=400), 0),
        (lambda x, rng: rng.integers(0, 5, 400), 0),
        (lambda x, rng: rng.random(400) < 0.02, 0),
        (lambda x, rng: np.stack([x[:, 0], rng.normal(size=400)], 1), 0),
        (lambda x, rng: x[:, 0] + 2 * x[:, 1], 392),
        (lambda x, rng: x[:, :2], 392),
    ],
)
def test_copies_agree_more_than_by_chance(targets, copies):
    """Eight kinds of rows, with zeros of both signs."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2, (400, 3)) * rng.choice([-1.0, 1.0], (400, 3))
    x = np.where(x == 0, x, 1.0)
    assert copied_rows(x, targets(x, rng)) == copies


def test_exact_targets_are_named():
    """Densities have no bound where targets can be reproduced; noise of a hundredth of their sd is learned."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40, 2))
    y = X @ np.array([1.0, 2.0])
    model = Regressor("adf", widths=(), random_state=0)
    with pytest.warns(bnn.metrics.HealthWarning, match=r"fit: 100% of its own rows .* below 0.001"):
        model.fit(X, np.stack([y, 1e6 - y], 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(X, y + 0.01 * y.std() * rng.normal(size=40))


def test_a_linear_network_has_no_symmetries(data):
    X, y, _ = data
    model = Regressor("nuts", widths=(), num_chains=1, effort=0.1, random_state=0).fit(X, y)
    assert model.attrs_["algorithm"] == "NUTS"
    line = np.linalg.lstsq(np.c_[X, np.ones(len(X))], y, rcond=None)[0]
    residual = model.predict(X) - np.c_[X, np.ones(len(X))] @ line
    assert np.abs(residual).max() < 0.2 * np.std(y - np.c_[X, np.ones(len(X))] @ line)


def test_padding_changes_nothing(data):
    """The model ignores the rows that are added: same log density, whatever they contain."""
    X, y, _ = data
    model = partial(
        methods.network_model,
        net=bnn.nn.MLP([3, 2]),
        prior=bnn.priors.Normal(),
        likelihood=partial(methods.noise_likelihood, 1, True, False),
    )
    rows, targets, known = methods.padded(X[:101], y[:101])
    assert rows.shape[0] == 112
    assert int(known.sum()) == 101
    np.testing.assert_allclose(rows[known], X[:101], rtol=1e-6)
    draw = handlers.trace(handlers.seed(model, 0)).get_trace(rows)
    latent = {name: site["value"] for name, site in draw.items() if name.startswith("net/")}
    plain = log_density(model, (rows[known], targets[known]), {}, latent)[0]
    for others in (0.0, 1e3):
        moved = jnp.where(known[:, None], rows, others)
        np.testing.assert_allclose(log_density(model, (moved, targets, known), {}, latent)[0], plain, rtol=1e-5)
    held = held_out_rows(112, methods.HELD_OUT)[1]
    assert bool(jnp.all(known[held]))


# -- work that is not done again ---------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*worse than by a constant")  # so little effort is not enough
@pytest.mark.filterwarnings("ignore:.*posterior sds from the mode")
@pytest.mark.parametrize("method", [pytest.param("ensemble", marks=pytest.mark.slow), "mean_field", "laplace"])
def test_folds_share_programs(method, data, compiled):
    """Four folds of 154 rows have 115 or 116 training rows: padded to one size, they compile once."""
    X, y = data[0][:154], data[1][:154]
    counts = []
    model = Regressor(method, **TINY | {"num_chains": 2})
    for train, test in KFold(4).split(X):
        before = len(compiled)
        clone(model).fit(X[train], y[train]).predict(X[test])
        counts.append(len(compiled) - before)
    assert counts[0] > 5
    assert max(counts[2:]) <= COMPILED[method]  # the second fold has the rows of its prediction


@pytest.mark.slow
def test_searches_pipelines_and_clones(data):
    X, y, _ = data
    model = Regressor("mean_field", effort=0.1, **FAST)
    scores = cross_val_score(make_pipeline(PolynomialFeatures(2), model), X, y, cv=3)
    assert scores.min() > 0.3
    search = GridSearchCV(model, {"widths": [(3,), (8,)], "activation": ["tanh"]}, cv=2).fit(X, y)
    assert search.best_params_["activation"] == "tanh"
    assert search.best_estimator_.predict(X[:2]).shape == (2,)


@pytest.mark.core
def test_pickle_and_export(data, fitted):
    X, y, _ = data
    idata = fitted.idata_
    assert idata is fitted.idata_
    again = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(again.predict(X), fitted.predict(X))
    np.testing.assert_allclose(idata["observed_data"]["y"], y, rtol=1e-6)
    np.testing.assert_allclose(idata["constant_data"]["x"], X, rtol=1e-6)
    mean = idata["posterior_predictive"]["y_mean"].mean(("chain", "draw"))
    np.testing.assert_allclose(mean, fitted.predict(X), rtol=1e-4)
    density = logsumexp(idata["log_likelihood"]["y"].to_numpy()[0], axis=0) - np.log(50)
    np.testing.assert_allclose(density, fitted.log_predictive_density(X, y), atol=1e-3)
    assert idata.attrs["method"] == "mean_field"


@pytest.mark.parametrize("targets", [1, 2, "classes"])
def test_the_report_made_again_is_that_of_the_export(data, targets, tmp_path):
    """The network sees standardized data, whatever the units are; each target counts alike; one input is constant."""
    X, y, labels = data
    X = np.column_stack([X, np.full(len(X), 7.0)])
    kind = Classifier if targets == "classes" else Regressor
    many = {1: y, 2: np.column_stack([y, -1e-3 * y**2]), "classes": labels}[targets]
    idata = kind("mean_field", effort=0.1, **{**FAST, "num_samples": 100}).fit(X, many).idata_
    idata.to_netcdf(str(tmp_path / "fit.nc"))
    for held in (idata, str(tmp_path / "fit.nc")):
        assert json.dumps([found._asdict() for found in bnn.metrics.health(held).findings]) == idata.attrs["health"]
    verdicts = {check["name"]: check["verdict"] for check in json.loads(idata.attrs["health"])}
    assert {verdicts[name] for name in ("standardized", "constant_inputs", "fit")} == {"ok"}


def test_an_estimator_is_no_result(fitted):
    for call in (bnn.metrics.health, partial(bnn.predict, lambda: None)):
        with pytest.raises(TypeError, match=r"(metrics\.health|predict): .* type Regressor.* Pass its `idata_`"):
            call(fitted)


def test_rows_far_from_those_of_the_fit_warn(data, fitted):
    X, _, labels = data
    classifier = Classifier("adf", **FAST).fit(X, labels)
    for predict in (fitted.predict, fitted.predict_interval, classifier.predict, classifier.predict_proba):
        with pytest.warns(bnn.metrics.HealthWarning, match=r"160 of 160 rows lie more than 3 .* prior decides"):
            predict(X + 100)
        with pytest.warns(bnn.metrics.HealthWarning, match=r"1 of 50 rows"):
            predict(np.concatenate([X[:49], [[0, 90, 0]]]))
        predict(X)  # quietly
        predict(np.concatenate([X, [[0, 90, 0]]]))  # a row in a hundred may be far away


def test_exported_chains_keep_their_numbers(fitted):
    model = pickle.loads(pickle.dumps(fitted))
    draws = model._predictive.draws
    model._predictive.draws = {name: np.concatenate([value, value]) for name, value in draws.items()}
    model.attrs_ |= {"num_chains": 3, "frozen_chains": "[1]", "first_divergence": "[-1, 7, -1]"}
    model._idata = None
    assert model.idata_["posterior"]["chain"].to_numpy().tolist() == [0, 2]
    verdicts = {check["name"]: check["verdict"] for check in json.loads(model.idata_.attrs["health"])}
    assert verdicts["diverged"] == "ok"  # chain 1 is not there


def test_import_without_scikit_learn():
    """The package does not need it; the room says what to install."""
    code = (
        "import sys; sys.modules['sklearn'] = None\n"
        "import numpyro_bnn\n"
        "try:\n    numpyro_bnn.estimators\n"
        "except ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert 'pip install "numpyro_bnn[estimators]"' in done.stdout, done.stderr
