"""Estimators: every answer is that of the mixture over exported draws, in the units of
the data; fits at fault.

Most tests look at one regressor and one classifier. Their mixtures are made here in
NumPy, from the export.
"""

import json
import math
import pickle
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from helpers import group
from numpyro import handlers
from scipy import stats
from scipy.special import entr, log_softmax, logsumexp, softmax
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import KFold
from zoo import CLASSES, X, Y

import numpyro_bnn as bnn
from numpyro_bnn.estimators import Classifier, Regressor, methods, mixtures

ROWS = X * np.array([2.0, 16.0]) + np.array([1.0, 20.0])
TARGETS = 500 + 128 * (Y + np.where(np.arange(24) % 8 == 0, 6.0, 0.0))  # three outliers
LABELS = np.array(["low", "middle", "high"])[CLASSES]

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*worse than by a constant"
)  # so little effort is not enough


SEEN: list[tuple[int, int]] = []  # progress of the first regressor


def note(done, total):
    SEEN.append((done, total))


@cache
def regressor():
    """Student's t noise that depends on the inputs."""
    options = {
        "widths": (3,),
        "effort": 0.1,
        "num_samples": 40,
        "random_state": 0,
        "callback": note,
    }
    model = Regressor(
        "mean_field", heteroscedastic=True, heavy_tails=True, **options
    ).fit(ROWS, TARGETS)
    return model.set_params(callback=None)


@cache
def classifier():
    return Classifier(
        "mean_field", widths=(3,), effort=0.1, num_samples=40, random_state=0
    ).fit(ROWS, LABELS)


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
    df = 2 + group(model.idata_, "posterior")["excess_df"].to_numpy()[0][
        :, None
    ].astype(float)
    loc, scale = (
        TARGETS.mean() + TARGETS.std() * f[..., 0],
        TARGETS.std() * np.logaddexp(0, f[..., 1]),
    )
    return stats.t(df, loc, scale)


def new_rows():
    return ROWS[:6] + np.array([0.5, -3.0])


def test_a_regressor_predicts_by_the_mixture_of_its_draws():
    model, rows = regressor(), new_rows()
    mixture = components(model, rows)
    mean, sd = model.predict(rows, return_std=True)
    found = model.uncertainty(rows)
    assert mean.dtype == sd.dtype == np.float64
    np.testing.assert_allclose(mean, mixture.mean().mean(0), rtol=1e-4)
    np.testing.assert_allclose(found.epistemic, mixture.mean().var(0), rtol=1e-3)
    np.testing.assert_allclose(found.aleatoric, mixture.var().mean(0), rtol=1e-3)
    np.testing.assert_allclose(sd**2, found.aleatoric + found.epistemic, rtol=1e-6)
    for level, ends in zip(
        (0.02, 0.98), model.predict_interval(rows, level=0.96), strict=True
    ):
        np.testing.assert_allclose(mixture.cdf(ends).mean(0), level, atol=2e-4)
    density = logsumexp(mixture.logpdf(TARGETS[:6]), axis=0) - np.log(40)
    np.testing.assert_allclose(
        model.log_predictive_density(rows, TARGETS[:6]), density, atol=1e-3
    )
    functions = model.sample(rows, 40, noise=False)  # each of the draws once
    np.testing.assert_allclose(
        np.sort(functions, axis=0), np.sort(mixture.mean(), axis=0), rtol=1e-3
    )
    draws = model.sample(rows, 40_000, random_state=0)
    np.testing.assert_array_equal(
        draws[:5], model.sample(rows, 40_000, random_state=0)[:5]
    )
    low, high = model.predict_interval(
        rows, level=0.5
    )  # shares in the middle half: five binomial standard errors
    np.testing.assert_allclose(
        ((low < draws) & (draws < high)).mean(0), 0.5, atol=5 * 0.5 / 40_000**0.5
    )
    assert list(model.most_uncertain(rows, 2)) == list(np.argsort(-found.epistemic)[:2])


def test_a_classifier_predicts_by_the_mixture_of_its_draws():
    model, rows = classifier(), new_rows()
    each, probs = softmax(outputs(model, rows), axis=2), model.predict_proba(rows)
    assert list(model.classes_) == ["high", "low", "middle"]
    np.testing.assert_allclose(probs, each.mean(0), rtol=1e-4)
    np.testing.assert_array_equal(model.predict(rows), model.classes_[probs.argmax(1)])
    found, total = model.uncertainty(rows), entr(probs).sum(1)
    np.testing.assert_allclose(
        found.aleatoric, entr(each).sum(2).mean(0), rtol=1e-3, atol=1e-5
    )
    np.testing.assert_allclose(found.epistemic, total - found.aleatoric, atol=1e-4)
    density = model.log_predictive_density(rows, ["low"] * 6)
    np.testing.assert_allclose(density, np.log(probs[:, 1]), rtol=1e-6)
    np.testing.assert_allclose(
        model.sample(rows, 40, noise=False).mean(0), probs, rtol=1e-4
    )
    frequencies = (model.sample(rows, 2000, random_state=0) == "low").mean(
        0
    )  # five standard errors
    np.testing.assert_allclose(frequencies, probs[:, 1], atol=5 * 0.5 / 2000**0.5)


@pytest.mark.core
def test_exports_have_the_units_of_the_data_and_survive_pickling():
    model = regressor()
    idata, mixture = model.idata_, components(model, ROWS)
    assert idata is model.idata_
    np.testing.assert_allclose(group(idata, "observed_data")["y"], TARGETS, rtol=1e-5)
    np.testing.assert_allclose(group(idata, "constant_data")["x"], ROWS, rtol=1e-5)
    np.testing.assert_allclose(
        group(idata, "posterior_predictive")["y_mean"][0], mixture.mean(), rtol=1e-4
    )
    np.testing.assert_allclose(
        group(idata, "log_likelihood")["y"][0], mixture.logpdf(TARGETS), atol=2e-3
    )
    assert idata.attrs["method"] == model.attrs_["method"] == "mean_field"
    assert set(group(classifier().idata_, "observed_data")["y"].to_numpy()) == {0, 1, 2}
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict(ROWS), model.predict(ROWS))
    for call in (bnn.metrics.health, partial(bnn.predict, lambda: None)):
        with pytest.raises(
            TypeError,
            match=r"(metrics\.health|predict): .* type Regressor.* Pass its `idata_`",
        ):
            call(model)


@pytest.mark.parametrize("make", [regressor, classifier])
def test_the_report_made_again_is_that_of_the_export(make, tmp_path):
    """The network sees standardized data, whatever the units are."""
    idata = make().idata_
    idata.to_netcdf(str(tmp_path / "fit.nc"))
    for held in (idata, str(tmp_path / "fit.nc")):
        assert (
            json.dumps([found._asdict() for found in bnn.metrics.health(held).findings])
            == idata.attrs["health"]
        )
    verdicts = {
        check["name"]: check["verdict"] for check in json.loads(idata.attrs["health"])
    }
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
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_rows_far_from_those_of_the_fit_warn():
    for predict in (
        regressor().predict,
        regressor().predict_interval,
        classifier().predict_proba,
    ):
        with pytest.warns(
            bnn.metrics.HealthWarning,
            match=r"24 of 24 rows lie more than 3 .* prior decides",
        ):
            predict(ROWS + 1000)
        predict(ROWS)  # quietly
        predict(
            np.concatenate([ROWS] * 5 + [[[0, 900]]])
        )  # a row in a hundred may be far away


@pytest.mark.filterwarnings("ignore:.*rows lie more than 3 standard deviations")
def test_intervals_reach_beyond_the_means_of_wide_draws():
    model, rows = regressor(), ROWS[:6] + np.repeat([-20, 1000], 3)[:, None]
    ends, mixture = model.predict_interval(rows, level=0.998), components(model, rows)
    for level, end in zip((0.001, 0.999), ends, strict=True):
        np.testing.assert_allclose(mixture.cdf(end).mean(0), level, atol=1e-4)


def test_quantiles_of_student_t_need_no_beta_functions():
    """Of every draw at every node of the table they took seconds."""
    mixture = jnp.zeros((5, 3)), jnp.ones((5, 3)), jnp.full((5, 3), 4.0)
    quantiles = mixtures.SUMMARIES["quantiles"]
    levels = jnp.array([0.05, 0.95])
    program = jax.make_jaxpr(quantiles)(mixture, jnp.full(5, 0.2), levels)
    assert "incomplete_beta" not in str(program)
    low, high = quantiles(mixture, jnp.full(5, 0.2), levels)
    end = stats.t(4, scale=0.5**0.5).ppf(0.95)
    np.testing.assert_allclose((-low, high), end, rtol=1e-4)


class WasRead(Exception):
    """The model of an estimator, in the place of its fit."""


@pytest.mark.parametrize(
    ("estimator", "count", "shape"),
    [
        (Regressor, 19, (20,)),  # and the category, of 22 inputs
        (Regressor, 18, ()),
        (Classifier, 19, ()),
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
    """Targets whose residuals are three times as wide: the factor is that of a grid,
    and every answer follows.
    """
    plain, model = regressor(), pickle.loads(pickle.dumps(regressor()))
    mean, sd = plain.predict(ROWS, return_std=True)
    wide = mean + 3 * (TARGETS - mean)
    factor, mixture = model.calibrate(ROWS, wide).calibration_, components(plain, ROWS)
    grid = np.exp(np.linspace(0, 2, 101))
    densities = [
        logsumexp(mixture.logpdf(mean + (wide - mean) / c), axis=0) - np.log(40 * c)
        for c in grid
    ]
    scores = [
        density.sum() - 2 * np.log(c) ** 2
        for c, density in zip(grid, densities, strict=True)
    ]
    np.testing.assert_allclose(factor, grid[np.argmax(scores)], rtol=0.03)
    assert 1.5 < factor < 5
    found = model.log_predictive_density(ROWS, wide)
    expected = logsumexp(
        mixture.logpdf(mean + (wide - mean) / factor), axis=0
    ) - np.log(40 * factor)
    np.testing.assert_allclose(found, expected, atol=2e-3)
    np.testing.assert_allclose(
        model.predict(ROWS, True), (mean, factor * sd), rtol=1e-6
    )
    np.testing.assert_allclose(
        model.uncertainty(ROWS),
        factor**2 * np.array(plain.uncertainty(ROWS)),
        rtol=1e-6,
    )
    for ends, before in zip(
        model.predict_interval(ROWS), plain.predict_interval(ROWS), strict=True
    ):
        np.testing.assert_allclose(ends - mean, factor * (before - mean), rtol=1e-5)
    draws = (each.sample(ROWS, 10, random_state=0) - mean for each in (model, plain))
    np.testing.assert_allclose(next(draws), factor * next(draws), rtol=1e-4, atol=1e-3)


def test_temperature_of_classes():
    """That of a grid; the most probable class stays, and rows that are all right do not
    ask for the temperature 0.
    """
    model = pickle.loads(pickle.dumps(classifier()))
    log_probs, own = (
        np.log(model.predict_proba(ROWS)),
        np.searchsorted(model.classes_, LABELS),
    )
    right = model.predict(ROWS)
    temperature = model.calibrate(ROWS, LABELS).calibration_
    grid = np.exp(np.linspace(-2, 2, 401))
    scores = np.array(
        [log_softmax(log_probs / t, axis=1)[np.arange(24), own].sum() for t in grid]
    )
    best = grid[np.argmax(scores - 2 * np.log(grid) ** 2)]
    np.testing.assert_allclose(np.log(temperature), np.log(best), atol=0.011)
    np.testing.assert_array_equal(model.predict(ROWS), right)
    found = model.log_predictive_density(ROWS, LABELS).sum()
    np.testing.assert_allclose(found, np.interp(temperature, grid, scores), rtol=1e-4)
    with pytest.raises(ValueError, match="a temperature of"):
        model.sample(ROWS)
    assert (
        0.2
        < pickle.loads(pickle.dumps(model)).calibrate(ROWS, right).calibration_
        < temperature
    )


def test_conformal_intervals_reach_to_the_rank_that_theory_asks_for():
    """Of ten exchangeable rows and a new one, the new score is below the ninth of ten
    with probability 9 / 11.
    """
    model, rows = regressor(), new_rows()
    mean, sd = model.predict(ROWS[:10], return_std=True)
    score = np.sort(np.abs(TARGETS[:10] - mean) / sd)[8]  # ceil(11 * 0.75) = 9
    low, high = model.conformal_interval(rows, ROWS[:10], TARGETS[:10], level=0.75)
    mean, sd = model.predict(rows, return_std=True)
    np.testing.assert_allclose(
        (low, high), (mean - score * sd, mean + score * sd), rtol=1e-6
    )
    low, high = model.predict_interval(ROWS[:10], level=0.75)
    outside = np.maximum(low - TARGETS[:10], TARGETS[:10] - high)
    score = np.sort(outside / model.predict(ROWS[:10], True)[1])[8]
    ends = model.conformal_interval(
        rows, ROWS[:10], TARGETS[:10], level=0.75, around="quantiles"
    )
    low, high = model.predict_interval(rows, level=0.75)
    expected = low - score * sd, high + score * sd
    np.testing.assert_allclose(ends, expected, rtol=1e-6)
    with pytest.raises(ValueError, match="at least 19 rows"):
        model.conformal_interval(rows, ROWS[:18], TARGETS[:18], level=0.95)


def coverage_of_two_kinds(covered, rng):
    """Exact coverage of a new row by nine held-out ones, all ten drawn from two kinds
    of rows that repeat.

    :param covered: whether new rows of both kinds are covered, by the kinds of the
        held-out rows.
    """
    kinds = [
        rng.permutation(np.arange(9) < of_second).astype(int) for of_second in range(10)
    ]
    return sum(math.comb(9, k) * np.mean(covered(kinds[k])) for k in range(10)) / 2**9


def test_conformal_answers_keep_ties():
    """Rows that repeat have one score, in whatever chunk and unit: only a larger score
    than all nine is outside.

    That has the probability 2^-10. Without ties coverage is at most 0.9 + 1 / 10; here
    rounding alone decides.
    """
    rng, many = np.random.default_rng(0), np.arange(70) % 2
    for place, pair in enumerate(ROWS[rng.permutation(24).reshape(12, 2)[:4]]):
        targets = np.exp(rng.normal(6, 0.3, 2))

        def interval_covers(kinds, pair=pair, targets=targets, around="mean"):
            low, high = regressor().conformal_interval(
                pair[many], pair[kinds], targets[kinds], around=around
            )
            return (low <= targets[many]) & (targets[many] <= high)

        def set_covers(kinds, pair=pair):
            sets = classifier().conformal_set(
                pair[many], pair[kinds], np.array(["low", "high"])[kinds]
            )
            return sets[np.arange(70), np.array([1, 0])[many]]

        assert coverage_of_two_kinds(interval_covers, rng) == 1 - 2**-10
        if place == 0:
            around_quantiles = partial(interval_covers, around="quantiles")
            assert coverage_of_two_kinds(around_quantiles, rng) == 1 - 2**-10
        assert coverage_of_two_kinds(set_covers, rng) == 1 - 2**-10


def test_conformal_sets_reach_to_the_rank_that_theory_asks_for():
    model, rows = classifier(), new_rows()
    own = model.predict_proba(ROWS[:10])[
        np.arange(10), np.searchsorted(model.classes_, LABELS[:10])
    ]
    found = model.conformal_set(rows, ROWS[:10], LABELS[:10], level=0.75)
    np.testing.assert_array_equal(
        found, model.predict_proba(rows) >= np.sort(own)[1] * (1 - 1e-9)
    )
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
    with pytest.warns(
        bnn.metrics.HealthWarning, match=r"fit: 100% of its own rows .* below 0.001"
    ):
        model.fit(x, y + np.array([0.0, 1e6]))
    # The density of both targets is as high as that of one exact target.
    model.fit(x, y + 0.005 * y.std(0) * random.normal(size=(40, 2)))  # quietly
    least_known = np.argsort(-np.sum(model.uncertainty(x).epistemic / y.var(0), axis=1))
    assert list(model.most_uncertain(x, 3)) == list(least_known[:3])


# -- further fits with the same programs -----------------------------------------------


@pytest.mark.slow
def test_folds_share_programs_and_units_do_not_matter(compiled):
    """Folds are padded to one size, and standardized data do not change if units do:
    answers are equivariant.
    """
    model = regressor()
    model.predict(ROWS)
    compiled.clear()
    for train, test in list(KFold(4).split(ROWS))[:2]:
        clone(model).fit(ROWS[train], TARGETS[train]).predict(ROWS[test])
    assert len(compiled) <= 2  # at most one for each fold
    other = clone(model).fit(ROWS * 4.0, TARGETS * 2.0**10)
    for one, two in zip(
        model.predict(ROWS, True), other.predict(4.0 * ROWS, True), strict=True
    ):
        np.testing.assert_allclose(two, 2.0**10 * one, rtol=1e-4)
    density = other.log_predictive_density(4.0 * ROWS, 2.0**10 * TARGETS)
    np.testing.assert_allclose(
        density,
        model.log_predictive_density(ROWS, TARGETS) - np.log(2.0**10),
        atol=1e-3,
    )


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
    with pytest.raises(
        ValueError, match=r"argument `heavy_tails` got True.*ensemble, nuts, mean_field"
    ):
        Regressor("laplace", heavy_tails=True).fit(ROWS, TARGETS)
    for name in ("heavy_tails", "heteroscedastic"):
        with pytest.raises(
            ValueError, match=rf"argument `{name}` got True.*repeated values"
        ):
            Regressor(**{name: True}).fit(ROWS, np.clip(np.round(Y), -1, 1))
