"""Estimators: every answer is that of the mixture over exported draws, in the units of
the data; fits at fault.

Most tests look at one regressor and one classifier. Their mixtures are made here in
NumPy, from the export.
"""

import json
import pickle
from functools import cache, partial

import numpy as np
import pandas as pd
import pytest
from helpers import group
from numpy.testing import assert_allclose, assert_array_equal
from numpyro import handlers
from scipy import stats
from scipy.special import entr, log_softmax, logsumexp, softmax
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import KFold
from zoo import CLASSES, X, Y

import numpyro_bnn as bnn
from numpyro_bnn.estimators import Classifier, Regressor, methods

ROWS = X * np.array([2.0, 16.0]) + np.array([1.0, 20.0])
TARGETS = 500 + 128 * (Y + np.where(np.arange(24) % 8 == 0, 6.0, 0.0))  # three outliers
LABELS = np.array(["low", "middle", "high"])[CLASSES]

# so little effort is not enough
pytestmark = pytest.mark.filterwarnings("ignore:.*worse than by a constant")


QUICK = {"widths": (3,), "effort": 0.1, "num_samples": 40, "random_state": 0}
SEEN: list[tuple[int, int]] = []  # progress of the first regressor


def note(done, total):
    SEEN.append((done, total))


@cache
def regressor():
    """Student's t noise that depends on the inputs."""
    noise = {"heteroscedastic": True, "heavy_tails": True}
    model = Regressor("mean_field", callback=note, **noise, **QUICK).fit(ROWS, TARGETS)
    return model.set_params(callback=None)


@cache
def classifier():
    return Classifier("mean_field", **QUICK).fit(ROWS, LABELS)


# -- the mixture, by hand --------------------------------------------------------------


def outputs(model, rows):
    """(S, N, K) of a network with one hidden layer of rectifiers, by the draws of the
    export.
    """
    posterior = group(model.idata_, "posterior")
    w, b, v, c = (
        posterior[f"net.Dense_{k}.{part}"].to_numpy()[0].astype(float)
        for k in (0, 1)
        for part in ("kernel", "bias")
    )
    standardized = (rows - ROWS.mean(0)) / ROWS.std(0)
    return np.maximum(standardized @ w + b[:, None], 0) @ v + c[:, None]


def components(model, rows):
    """The Student's t of each draw and row, in units of the targets."""
    f = outputs(model, rows)
    excess = group(model.idata_, "posterior")["excess_df"].to_numpy()[0].astype(float)
    loc = TARGETS.mean() + TARGETS.std() * f[..., 0]
    scale = TARGETS.std() * np.logaddexp(0, f[..., 1])
    return stats.t(2 + excess[:, None], loc, scale)


def new_rows():
    return ROWS[:6] + np.array([0.5, -3.0])


def test_a_regressor_predicts_by_the_mixture_of_its_draws():
    model, rows = regressor(), new_rows()
    mixture = components(model, rows)
    mean, sd = model.predict(rows, return_std=True)
    found = model.uncertainty(rows)
    assert mean.dtype == sd.dtype == np.float64
    assert_allclose(mean, mixture.mean().mean(0), rtol=1e-4)
    assert_allclose(found.epistemic, mixture.mean().var(0), rtol=1e-3)
    assert_allclose(found.aleatoric, mixture.var().mean(0), rtol=1e-3)
    assert_allclose(sd**2, found.aleatoric + found.epistemic, rtol=1e-6)
    ends = model.predict_interval(rows, level=0.96)
    for level, end in zip((0.02, 0.98), ends, strict=True):
        assert_allclose(mixture.cdf(end).mean(0), level, atol=2e-4)
    density = logsumexp(mixture.logpdf(TARGETS[:6]), axis=0) - np.log(40)
    assert_allclose(model.log_predictive_density(rows, TARGETS[:6]), density, atol=1e-3)
    # each of the draws once
    functions = np.sort(model.sample(rows, 40, noise=False), axis=0)
    assert_allclose(functions, np.sort(mixture.mean(), axis=0), rtol=1e-3)
    draws = model.sample(rows, 40_000, random_state=0)
    assert_array_equal(draws[:5], model.sample(rows, 40_000, random_state=0)[:5])
    # shares in the middle half: five binomial standard errors
    low, high = model.predict_interval(rows, level=0.5)
    inside = ((low < draws) & (draws < high)).mean(0)
    assert_allclose(inside, 0.5, atol=5 * 0.5 / 40_000**0.5)
    assert list(model.most_uncertain(rows, 2)) == list(np.argsort(-found.epistemic)[:2])


def test_a_classifier_predicts_by_the_mixture_of_its_draws():
    model, rows = classifier(), new_rows()
    each, probs = softmax(outputs(model, rows), axis=2), model.predict_proba(rows)
    assert list(model.classes_) == ["high", "low", "middle"]
    assert_allclose(probs, each.mean(0), rtol=1e-4)
    assert_array_equal(model.predict(rows), model.classes_[probs.argmax(1)])
    found, total = model.uncertainty(rows), entr(probs).sum(1)
    assert_allclose(found.aleatoric, entr(each).sum(2).mean(0), rtol=1e-3, atol=1e-5)
    assert_allclose(found.epistemic, total - found.aleatoric, atol=1e-4)
    density = model.log_predictive_density(rows, ["low"] * 6)
    assert_allclose(density, np.log(probs[:, 1]), rtol=1e-6)
    assert_allclose(model.sample(rows, 40, noise=False).mean(0), probs, rtol=1e-4)
    shares = (model.sample(rows, 2000, random_state=0) == "low").mean(0)
    assert_allclose(shares, probs[:, 1], atol=5 * 0.5 / 2000**0.5)  # standard errors


@pytest.mark.core
def test_exports_have_the_units_of_the_data_and_survive_pickling():
    model = regressor()
    idata, mixture = model.idata_, components(model, ROWS)
    assert idata is model.idata_
    assert_allclose(group(idata, "observed_data")["y"], TARGETS, rtol=1e-5)
    assert_allclose(group(idata, "constant_data")["x"], ROWS, rtol=1e-5)
    means = group(idata, "posterior_predictive")["y_mean"][0]
    assert_allclose(means, mixture.mean(), rtol=1e-4)
    densities = group(idata, "log_likelihood")["y"][0]
    assert_allclose(densities, mixture.logpdf(TARGETS), atol=2e-3)
    assert idata.attrs["method"] == model.attrs_["method"] == "mean_field"
    assert set(group(classifier().idata_, "observed_data")["y"].to_numpy()) == {0, 1, 2}
    again = pickle.loads(pickle.dumps(model))
    assert_array_equal(again.predict(ROWS), model.predict(ROWS))
    for call in (bnn.metrics.health, partial(bnn.predict, lambda: None)):
        message = r"(metrics\.health|predict): .* type Regressor.* Pass its `idata_`"
        with pytest.raises(TypeError, match=message):
            call(model)


@pytest.mark.parametrize("make", [regressor, classifier])
def test_the_report_made_again_is_that_of_the_export(make, tmp_path):
    """The network sees standardized data, whatever the units are."""
    idata = make().idata_
    idata.to_netcdf(str(tmp_path / "fit.nc"))
    for held in (idata, str(tmp_path / "fit.nc")):
        findings = [row._asdict() for row in bnn.metrics.health(held).findings]
        assert json.dumps(findings) == idata.attrs["health"]
    verdicts = {row["name"]: row["verdict"] for row in findings}
    assert {verdicts[name] for name in ("standardized", "constant_inputs")} == {"ok"}


def test_progress_is_reported():
    regressor()
    assert sorted(SEEN) == SEEN
    assert SEEN[-1][0] == SEEN[-1][1]
    assert len(SEEN) > 5


def test_many_rows_are_predicted_like_few():
    model, rows = regressor(), np.tile(ROWS, (50, 1))[:1100]  # more than one chunk
    mean, sd = (np.resize(part, 1100) for part in model.predict(ROWS, return_std=True))
    for found, expected in zip(
        model.predict(rows, return_std=True), (mean, sd), strict=True
    ):
        assert_allclose(found, expected, rtol=1e-5)


def test_rows_far_from_those_of_the_fit_warn():
    message = r"24 of 24 rows lie more than 3 .* prior decides"
    for predict in (regressor().predict_interval, classifier().predict_proba):
        with pytest.warns(bnn.metrics.HealthWarning, match=message):
            predict(ROWS + 1000)
        predict(ROWS)  # quietly
        # a row in a hundred may be far away
        predict(np.concatenate([ROWS] * 5 + [[[0, 900]]]))


@pytest.mark.filterwarnings("ignore:.*rows lie more than 3 standard deviations")
def test_intervals_reach_beyond_the_means_of_wide_draws():
    model, rows = regressor(), ROWS[:6] + np.repeat([-20, 1000], 3)[:, None]
    ends, mixture = model.predict_interval(rows, level=0.998), components(model, rows)
    for level, end in zip((0.001, 0.999), ends, strict=True):
        assert_allclose(mixture.cdf(end).mean(0), level, atol=1e-4)


class WasRead(Exception):
    """The model of an estimator, in the place of its fit."""


@pytest.mark.parametrize(
    ("estimator", "count", "shape"),
    [
        (Regressor, 19, (20,)),  # and the category, of 22 inputs
        (Regressor, 18, ()),
        (partial(Regressor, network=lambda outputs: bnn.nn.MLP([3, outputs])), 19, ()),
    ],
)
def test_many_columns_have_scales_of_their_own(estimator, count, shape, monkeypatch):
    def read(task):
        model = handlers.seed(task.model, 0)
        raise WasRead(handlers.trace(model).get_trace(*task.data))

    monkeypatch.setitem(methods.METHODS, "ensemble", read)
    numbers = np.random.default_rng(0).normal(size=(len(LABELS), count))
    frame = pd.DataFrame(numbers).add_prefix("c").assign(kind=LABELS)
    with pytest.raises(WasRead) as found:
        estimator().fit(frame, CLASSES * 1.0)
    sites = found.value.args[0]
    assert sites["net/Dense_0.kernel_scale"]["value"].shape == shape
    assert sites["net/Dense_1.kernel_scale"]["value"].shape == ()


# -- calibration and conformal sets ----------------------------------------------------


def test_calibration_scales_the_prediction():
    """Targets whose residuals are three times as wide."""
    plain, model = regressor(), pickle.loads(pickle.dumps(regressor()))
    mean, sd = plain.predict(ROWS, return_std=True)
    wide = mean + 3 * (TARGETS - mean)
    factor, mixture = model.calibrate(ROWS, wide).calibration_, components(plain, ROWS)
    grid = np.exp(np.linspace(0, 2, 101))

    def density(c):
        scaled = mixture.logpdf(mean + (wide - mean) / c)
        return logsumexp(scaled, axis=0) - np.log(40 * c)

    scores = [density(c).sum() - 2 * np.log(c) ** 2 for c in grid]
    assert_allclose(factor, grid[np.argmax(scores)], rtol=0.03)
    assert 1.5 < factor < 5
    found = model.log_predictive_density(ROWS, wide)
    assert_allclose(found, density(factor), atol=2e-3)
    assert_allclose(model.predict(ROWS, True), (mean, factor * sd), rtol=1e-6)
    parts = factor**2 * np.array(plain.uncertainty(ROWS))
    assert_allclose(model.uncertainty(ROWS), parts, rtol=1e-6)
    ends, before = (np.array(m.predict_interval(ROWS)) - mean for m in (model, plain))
    assert_allclose(ends, factor * before, rtol=1e-5)
    draws = (each.sample(ROWS, 10, random_state=0) - mean for each in (model, plain))
    assert_allclose(next(draws), factor * next(draws), rtol=1e-4, atol=1e-3)


def test_temperature_of_classes():
    """That of a grid; the most probable class stays, and rows that are all right do not
    ask for the temperature 0.
    """
    model = pickle.loads(pickle.dumps(classifier()))
    log_probs = np.log(model.predict_proba(ROWS))
    own = np.arange(24), np.searchsorted(model.classes_, LABELS)
    right = model.predict(ROWS)
    temperature = model.calibrate(ROWS, LABELS).calibration_
    grid = np.exp(np.linspace(-2, 2, 401))
    scores = np.array([log_softmax(log_probs / t, 1)[own].sum() for t in grid])
    best = grid[np.argmax(scores - 2 * np.log(grid) ** 2)]
    assert_allclose(np.log(temperature), np.log(best), atol=0.011)
    assert_array_equal(model.predict(ROWS), right)
    found = model.log_predictive_density(ROWS, LABELS).sum()
    assert_allclose(found, np.interp(temperature, grid, scores), rtol=1e-4)
    with pytest.raises(ValueError, match="a temperature of"):
        model.sample(ROWS)
    again = pickle.loads(pickle.dumps(model)).calibrate(ROWS, right)
    assert 0.2 < again.calibration_ < temperature


def test_conformal_intervals_reach_to_the_rank_that_theory_asks_for():
    """Of ten exchangeable rows and a new one, the new score is below the ninth of ten
    with probability 9 / 11.
    """
    model, rows = regressor(), new_rows()
    mean, sd = model.predict(ROWS[:10], return_std=True)
    score = np.sort(np.abs(TARGETS[:10] - mean) / sd)[8]  # ceil(11 * 0.75) = 9
    low, high = model.conformal_interval(rows, ROWS[:10], TARGETS[:10], level=0.75)
    mean, sd = model.predict(rows, return_std=True)
    assert_allclose((low, high), (mean - score * sd, mean + score * sd), rtol=1e-6)
    low, high = model.predict_interval(ROWS[:10], level=0.75)
    outside = np.maximum(low - TARGETS[:10], TARGETS[:10] - high)
    score = np.sort(outside / model.predict(ROWS[:10], True)[1])[8]
    options = {"level": 0.75, "around": "quantiles"}
    ends = model.conformal_interval(rows, ROWS[:10], TARGETS[:10], **options)
    low, high = model.predict_interval(rows, level=0.75)
    expected = low - score * sd, high + score * sd
    assert_allclose(ends, expected, rtol=1e-6)
    with pytest.raises(ValueError, match="at least 19 rows"):
        model.conformal_interval(rows, ROWS[:18], TARGETS[:18], level=0.95)


def test_conformal_answers_keep_ties():
    """Rows that repeat have one score, in whatever chunk and unit: of nine held-out
    rows the largest score is inside, where rounding alone would decide.
    """
    rng, many = np.random.default_rng(0), np.arange(70) % 2
    for place, pair in enumerate(ROWS[rng.permutation(24).reshape(12, 2)[:4]]):
        targets = np.exp(rng.normal(6, 0.3, 2))

        def interval_covers(kinds, pair=pair, targets=targets, around="mean"):
            held_out = pair[kinds], targets[kinds]
            answer = regressor().conformal_interval
            low, high = answer(pair[many], *held_out, around=around)
            return (low <= targets[many]) & (targets[many] <= high)

        def set_covers(kinds, pair=pair):
            held_out = pair[kinds], np.array(["low", "high"])[kinds]
            sets = classifier().conformal_set(pair[many], *held_out)
            return sets[np.arange(70), np.array([1, 0])[many]]

        for of_second in (1, 4, 8):
            kinds = rng.permutation(np.arange(9) < of_second).astype(int)
            assert interval_covers(kinds).all()
            assert set_covers(kinds).all()
        if place == 0:
            assert interval_covers(kinds, around="quantiles").all()


def test_conformal_sets_reach_to_the_rank_that_theory_asks_for():
    model, rows = classifier(), new_rows()
    own = np.arange(10), np.searchsorted(model.classes_, LABELS[:10])
    own = model.predict_proba(ROWS[:10])[own]
    found = model.conformal_set(rows, ROWS[:10], LABELS[:10], level=0.75)
    assert_array_equal(found, model.predict_proba(rows) >= np.sort(own)[1] * (1 - 1e-9))
    with pytest.raises(ValueError, match="at least 19 rows"):
        model.conformal_set(rows, ROWS[:18], LABELS[:18], level=0.95)
    with pytest.raises(ValueError, match="which the fit has not seen"):
        model.conformal_set(rows, ROWS[:18], ["none"] * 18)


# -- several targets -------------------------------------------------------------------


def test_exact_targets_are_named():
    """Densities have no bound where targets can be reproduced; noise of a two hundredth
    of their sd is learned.
    """
    random = np.random.default_rng(0)
    x = random.normal(size=(40, 2))
    y = x @ np.array([[1.0, -1.0], [2.0, 3.0]])
    model = Regressor("adf", widths=(), random_state=0)
    message = r"fit: 100% of its own rows .* below 0.001"
    with pytest.warns(bnn.metrics.HealthWarning, match=message):
        model.fit(x, y + np.array([0.0, 1e6]))
    # The density of both targets is as high as that of one exact target.
    model.fit(x, y + 0.005 * y.std(0) * random.normal(size=(40, 2)))  # quietly
    least_known = np.argsort(-np.sum(model.uncertainty(x).epistemic / y.var(0), axis=1))
    assert list(model.most_uncertain(x, 3)) == list(least_known[:3])


# -- further fits with the same programs -----------------------------------------------


@pytest.mark.slow
def test_folds_share_programs_and_units_do_not_matter(compiled):
    """Folds are padded to one size; answers are equivariant."""
    model = regressor()
    model.predict(ROWS)
    compiled.clear()
    for train, test in list(KFold(4).split(ROWS))[:2]:
        clone(model).fit(ROWS[train], TARGETS[train]).predict(ROWS[test])
    assert len(compiled) <= 2  # at most one for each fold
    rows, targets, unit = 4.0 * ROWS, 2.0**10 * TARGETS, 2.0**10
    other = clone(model).fit(rows, targets)
    scaled = unit * np.array(model.predict(ROWS, True))
    assert_allclose(other.predict(rows, True), scaled, rtol=1e-4)
    density = model.log_predictive_density(ROWS, TARGETS) - np.log(unit)
    assert_allclose(other.log_predictive_density(rows, targets), density, atol=1e-3)


# -- refusals --------------------------------------------------------------------------


def test_unfitted_estimators_say_so():
    for call in (
        lambda estimator: estimator.predict(ROWS),
        lambda estimator: estimator.sample(ROWS),
        lambda estimator: estimator.log_predictive_density(ROWS, TARGETS),
        lambda estimator: estimator.idata_,
    ):
        for estimator in (Regressor(), Classifier()):
            with pytest.raises(NotFittedError):
                call(estimator)


def test_noise_that_a_method_or_targets_cannot_have_is_refused():
    """Ratings could put all their density on the few values."""
    message = r"argument `heavy_tails` got True.*ensemble, nuts, mean_field"
    with pytest.raises(ValueError, match=message):
        Regressor("laplace", heavy_tails=True).fit(ROWS, TARGETS)
    for name in ("heavy_tails", "heteroscedastic"):
        message = rf"argument `{name}` got True.*repeated values"
        with pytest.raises(ValueError, match=message):
            Regressor(**{name: True}).fit(ROWS, np.clip(np.round(Y), -1, 1))
