"""Kinds of targets: all answers of one distribution, which stays in its support."""

import warnings
from functools import cache

import jax
import numpy as np
import pytest
from helpers import each
from scipy.special import logsumexp

from numpyro_bnn.estimators import Regressor
from numpyro_bnn.metrics import HealthWarning

pytestmark = pytest.mark.filterwarnings("ignore:.*worse than by a constant")
TINY = {"widths": (3,), "effort": 0.02, "num_samples": 20, "random_state": 0}
BOUNDS = (10.0, 15.0)


@cache
def table(size=120, seed=0):
    """Rows, and targets of each kind whose distributions depend on the first column."""
    random = np.random.default_rng(seed)
    rows = random.uniform(-2, 2, (size, 2))
    f = np.sin(2 * rows[:, 0])
    amounts = np.exp(3 + f + 0.5 * random.normal(size=size))
    is_zero = random.random(size) < 1 / (1 + np.exp(0.6 + rows[:, 1]))
    rate = np.exp(1 + f)
    return rows, {
        "positive": np.exp(1 + f + 0.6 * random.normal(size=size)),
        "bounded": 10 + 5 / (1 + np.exp(-(f + 0.8 * random.normal(size=size)))),
        "counts": random.poisson(rate).astype(float),
        "over-dispersed": random.poisson(random.gamma(2, 2 * rate)).astype(float),
        "zeros": np.where(is_zero, 0.0, amounts),
        "ordered": np.digitize(2 * f + random.logistic(size=size), [-2, 0, 2]) + 1.0,
        "continuous": f + 0.3 * random.normal(size=size),
    }


@cache
def fitted(kind):
    rows, targets = table()
    options = {"bounds": BOUNDS, "heavy_tails": True} if kind == "bounded" else {}
    model = Regressor("mean_field", target=kind, **options, **TINY)
    return model.fit(rows, targets[kind])


def grid_of(kind, model, rows):
    """Values that hold nearly all of the probability, and what each stands for."""
    if kind == "ordered":
        return np.array([1.0, 2.0, 3.0, 4.0]), np.ones(4)
    far = model.predict_quantiles(rows, [1e-6, 1 - 1e-6])
    if kind == "counts":
        return np.arange(far.max() + 1), np.ones(int(far.max()) + 1)
    if kind == "bounded":
        logits = np.linspace(-25, 25, 6001)
        grid = 10 + 5 / (1 + np.exp(-logits))
        slopes = 5 * np.exp(-np.logaddexp(0, logits) - np.logaddexp(0, -logits))
        return grid, slopes * np.gradient(logits)
    logs = np.linspace(-12, np.log(far.max()) + 6, 6001)
    grid, steps = np.exp(logs), np.exp(logs) * np.gradient(logs)
    if kind == "zeros":
        return np.concatenate([[0.0], grid]), np.concatenate([[1.0], steps])
    return grid, steps


def assert_one_distribution(kind, model, factor=1.0):
    """Density, distribution function, quantiles, moments and score of two rows are
    those of one distribution, by sums over a grid.
    """
    rows = table()[0][:2] + 0.1
    grid, steps = grid_of(kind, model, rows)
    shape = (len(grid), 2)
    repeated, at = np.tile(rows, (len(grid), 1)), np.repeat(grid, 2)
    mass = np.exp(model.log_predictive_density(repeated, at)).reshape(shape)
    mass *= steps[:, None]
    below = model.cdf(repeated, at).reshape(shape)
    np.testing.assert_allclose(mass.sum(0), 1, atol=1e-3)
    is_discrete = kind in ("counts", "ordered")
    # of a density the sum up to a node has half of the node's own mass
    own = 0 if is_discrete else np.where(grid > 0, 0.5, 0.0)[:, None]
    np.testing.assert_allclose(np.cumsum(mass, 0) - own * mass, below, atol=2e-3)
    mean, sd = model.predict(rows, return_std=True)
    np.testing.assert_allclose(grid @ mass, mean, rtol=5e-3)
    square = np.sum((grid[:, None] - mean) ** 2 * mass, 0)
    np.testing.assert_allclose(np.sqrt(square), sd, rtol=2e-2)
    parts = model.uncertainty(rows)
    np.testing.assert_allclose(parts.aleatoric + parts.epistemic, sd**2, rtol=1e-4)
    levels = np.array([0.05, 0.4, 0.9])
    quantiles = model.predict_quantiles(rows, levels)
    for level, values in zip(levels, quantiles, strict=True):
        reached = model.cdf(rows, values)
        assert np.all(reached > level - 1e-4)
        if is_discrete:
            assert np.all(model.cdf(rows, values - 1) < level + 1e-4)
        else:
            assert np.all((reached < level + 1e-4) | (values == 0))
    y = quantiles[1] + (0.25 if kind in ("ordered", "counts") else 0.0)
    over = (grid[:, None] >= y).astype(float)
    if is_discrete:
        knots = np.unique(np.concatenate([grid, y]))
        tiled, knots_at = np.tile(rows, (len(knots), 1)), np.repeat(knots, 2)
        steps_below = model.cdf(tiled, knots_at).reshape(len(knots), 2)
        squares = (steps_below - (knots[:, None] >= y)) ** 2
        score = np.diff(knots) @ squares[:-1]
    else:
        gaps = np.where(grid > 0, steps, 0.0)
        score = gaps @ (below - over) ** 2
    np.testing.assert_allclose(model.crps(rows, y), score, rtol=2e-2)
    draws = model.sample(rows, 4000, random_state=0)
    # five standard errors of a share
    shares = (draws[:, None] <= quantiles).mean(0)
    reached = np.array([model.cdf(rows, values) for values in quantiles])
    np.testing.assert_allclose(shares, reached, atol=5 * 0.5 / 4000**0.5)
    known = model.predict_dist(rows)
    drawn = np.asarray(known.sample(jax.random.key(0), (4000,)))
    shares = (drawn[:, None] <= quantiles).mean(0)
    np.testing.assert_allclose(shares, reached, atol=5 * 0.5 / 4000**0.5)
    np.testing.assert_allclose(known.cdf(quantiles), reached, atol=2e-3)
    np.testing.assert_allclose(
        known.log_prob(quantiles),
        [model.log_predictive_density(rows, values) for values in quantiles],
        atol=5e-3,
    )


@each("kind", ["zeros", "counts", "ordered", "bounded"], fast=1)
def test_all_answers_are_those_of_one_distribution(kind):
    assert_one_distribution(kind, fitted(kind))


@pytest.mark.slow
def test_a_calibrated_distribution_is_one_too():
    (rows, targets), kind = table(), "positive"
    model = Regressor("adf", target=kind, **TINY).fit(rows, targets[kind])
    middle = np.median(targets[kind])
    model.calibrate(rows, middle + 0.3 * (targets[kind] - middle))
    assert model.calibration_ < 0.8
    assert_one_distribution(kind, model)
    means = model.sample(rows, 20, noise=False)
    np.testing.assert_allclose(means.mean(0), model.predict(rows), rtol=1e-3)


OUTSIDE = {"zeros": [-1.0, -0.1], "counts": [-1.0, 0.5], "bounded": [9.0, 16.0]}


@each(("kind", "outside"), OUTSIDE.items(), fast=[("zeros", OUTSIDE["zeros"])])
def test_nothing_leaves_the_support(kind, outside):
    model, (rows, targets) = fitted(kind), table()
    y = targets[kind]
    low, high = model.predict_interval(rows, level=0.999)
    draws = model.sample(rows, 20, random_state=0)
    held_out = rows[:60], y[:60]
    ends = model.conformal_interval(rows[60:], *held_out, level=0.95)
    for values in (low, high, draws, *ends):
        assert np.all(np.isneginf(model.log_predictive_density(rows[:2], outside)))
        assert np.all(values >= (BOUNDS[0] if kind == "bounded" else 0))
        assert kind != "bounded" or np.all(values <= BOUNDS[1])
        assert kind not in ("counts", "ordered") or np.all(values == np.round(values))
    below, above = model.cdf(rows[:2], outside), model.crps(rows[:2], outside)
    assert np.all((below >= 0) & (below <= 1))
    assert np.all(above > 0)
    np.testing.assert_array_equal(model.cdf(rows[:2], outside[:1] * 2), 0.0)
    # beyond the support the score grows as the distance does
    far = model.crps(rows[[0, 0]], [outside[0] - 1, outside[0]])
    np.testing.assert_allclose(far[0] - far[1], 1.0, rtol=1e-3)
    mean, mirrored = model.predict(rows), model.sample(rows, 20, noise=False)
    np.testing.assert_allclose(mirrored.mean(0), mean, rtol=1e-3)
    with pytest.raises(ValueError, match=r"argument `around`"):
        model.conformal_interval(rows, *held_out, around="mean")


def test_a_mean_that_few_draws_decide_is_announced_and_never_infinite():
    """Near the data the mean is near the median; far away a draw of the network is far
    above all others.
    """
    model, said = fitted("zeros"), []
    for distance in (1, 3, 10, 100, 1000):
        far = np.array([[2.0, 2.0], [-2.0, 2.0], [2.0, -2.0]]) * distance
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                mean, sd = model.predict(far, return_std=True)
            except ValueError as error:
                said.append("refused" if "overflow" in str(error) else repr(error))
                continue
        few = any("use medians there" in str(w.message) for w in caught)
        said.append("announced" if few else "")
        assert np.isfinite(mean).all()
        # all draws agree, or it is said
        assert few or (sd < 10 * mean).all()
    assert said[0] == "", said
    assert set(said) - {""} <= {"announced", "refused"}, said
    assert said[-1] != "", said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("positive", "positive"),
        ("bounded", "bounded"),
        ("over-dispersed", "counts"),
        ("zeros", "zeros"),
        ("ordered", "ordered"),
    ],
)
def test_the_kind_is_chosen_and_announced(name, kind):
    rows, targets = table(1000 if name == "ordered" else 300)
    bounds = BOUNDS if name == "bounded" else None
    model = Regressor("mean_field", bounds=bounds, **TINY).fit(rows, targets[name])
    assert model.attrs_["target"] == kind
    assert f"\n  target: {kind}" in repr(model)


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("name", ["zeros", "over-dispersed", "ordered"])
def test_intervals_hold_what_they_say_and_scores_beat_those_of_normal_noise(name):
    """The share of 2,000 new targets whose distribution function is between .05 and
    .95, at random between both sides of a jump, where it is uniform. Three standard
    errors are 4 points: .7 of the share, and 1.2 of a scale that 400 rows know to 3.5
    %. And log scores: of "continuous" those of intervals around targets that have
    probability.
    """
    kind = "counts" if name == "over-dispersed" else name
    (rows, targets), (new, new_targets) = table(400), table(2000, seed=1)
    y, new_y = targets[name], new_targets[name]
    options = {"effort": 0.2, "num_chains": 4, "random_state": 0}
    model = Regressor(target=kind, **options).fit(rows, y)
    reached = model.cdf(new, new_y)
    jumps = (new_y == 0) | (kind in ("counts", "ordered"))
    before = np.where(jumps, model.cdf(new, new_y - 1e-6), reached)
    uniform = np.random.default_rng(0).uniform(before, reached)
    assert abs(np.mean(np.abs(uniform - 0.5) < 0.45) - 0.9) < 0.04
    low, high = model.predict_interval(new)
    assert np.mean((low <= new_y) & (new_y <= high)) > 0.87
    plain = Regressor(target="continuous", **options).fit(rows, y)
    expected = plain.log_predictive_density(new, new_y)
    mass = plain.cdf(new, new_y + 0.5) - plain.cdf(new, new_y - 0.5)
    expected = np.where(jumps, np.log(np.maximum(mass, 1e-8)), expected)
    assert model.log_predictive_density(new, new_y).mean() > expected.mean()


def quick(target="auto", **options):
    options = {"widths": (), "effort": 0.02, "num_samples": 5, **options}
    return Regressor("mean_field", target=target, random_state=0, **options)


@pytest.mark.filterwarnings("ignore:.*rows repeat another")
@each("name", ["steep", "percentages", "rare level", "exact"], fast=1)
def test_in_doubt_targets_are_continuous(name):
    """Whole numbers far from zero; a steep mean with additive noise, which a forest
    takes for noise that grows with the mean; a level that new rows may not have; and
    two values without noise.
    """
    rows, targets = table(300)
    f, normal = np.sin(2 * rows[:, 0]), targets["continuous"]
    y = {
        "percentages": np.clip(np.round(60 + 15 * normal), 0, 100),
        "steep": 5 + np.exp(1.5 * rows[:, 1]) + normal,
        "rare level": np.where(np.arange(300) == 7, 8.0, np.round(2 * f) - 3),
        "exact": np.sign(rows[:, 0]),
    }[name]
    X = np.sign(rows) if name == "exact" else rows
    assert quick().fit(X, y).attrs_["target"] == "continuous"


@pytest.mark.slow
def test_the_choice_has_no_units():
    rows, targets = table(300)
    model = quick().fit(1e39 * rows, 1e12 * targets["zeros"])
    assert model.attrs_["target"] == "zeros"


def test_bounds_are_kept_however_few_rows_there_are():
    rows, targets = table(40)
    model = quick(bounds=BOUNDS).fit(rows, targets["bounded"])
    assert model.attrs_["target"] == "bounded"
    with pytest.raises(ValueError, match="1 targets that are not between"):
        model.fit(rows, np.where(np.arange(40) == 3, 15.0, targets["bounded"]))
    # those of the fit, whatever a further one is to have
    low, _ = model.set_params(bounds=None).conformal_interval(
        rows, rows, targets["bounded"]
    )
    assert np.all(low >= BOUNDS[0])


def test_amounts_that_repeat_have_no_noise_that_may_vanish():
    rows, targets = table(40)
    y = np.where(targets["zeros"] > 0, 9.99, 0.0)
    with pytest.raises(ValueError, match="argument `heteroscedastic`"):
        quick("zeros", heteroscedastic=True).fit(rows, y)


def test_held_out_rows_may_all_be_zero():
    rows, _ = table()
    ends = fitted("zeros").conformal_interval(rows, rows[:40], np.zeros(40))
    assert all(np.all(np.isfinite(values)) for values in ends)


def test_counts_may_be_large():
    """Quantiles, probabilities and scores are those of draws and of sums."""
    rows, targets = table(40)
    y = np.round(10 * targets["positive"])
    model = quick("counts").fit(rows, y)
    draws = model.sample(rows[:3], 4000, random_state=0)
    levels = np.array([0.1, 0.5, 0.9])
    quantiles = model.predict_quantiles(rows[:3], levels)
    shares = (draws[:, None] <= quantiles).mean(0)
    reached = np.array([model.cdf(rows[:3], values) for values in quantiles])
    np.testing.assert_allclose(shares, reached, atol=5 * 0.5 / 4000**0.5)
    # all probabilities of one row, summed
    counts = np.arange(2000.0)
    below = model.cdf(np.repeat(rows[:1], 2000, axis=0), counts)
    np.testing.assert_array_equal(quantiles[:, 0], (below < levels[:, None]).sum(1))
    for value in (-2.5, 3.0, 8.25, 5e3):
        share = np.clip(value - counts, 0, 1)  # of [count, count + 1] that is below
        score = (share * below**2 + (1 - share) * (1 - below) ** 2).sum()
        score += max(-value, 0) + max(value - 2000, 0)
        # also beside one that is far away
        scores = model.crps(rows[:2], [value, 1e4])
        assert scores[0] == pytest.approx(score, rel=1e-4)


@pytest.mark.slow
def test_whole_numbers_that_float32_has_no_neighbors_for():
    rows, targets = table(40)
    model = quick("counts").fit(rows, np.round(1e6 * targets["positive"]))
    levels = np.array([0.1, 0.5, 0.9])
    for level, ends in zip(levels, model.predict_quantiles(rows, levels), strict=True):
        np.testing.assert_allclose(model.cdf(rows, ends), level, atol=2e-3)


@pytest.mark.filterwarnings("ignore::numpyro_bnn.metrics.HealthWarning")
def test_a_row_is_announced_once_for_all_targets():
    rows, targets = table(40)
    y = np.column_stack([targets["positive"], targets["positive"][::-1]])
    model, said = quick("positive", num_samples=20).fit(rows, y), []
    for row in 30 * rows[:8]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.predict(row[None])
        said += [str(w.message) for w in caught if "mean of" in str(w.message)]
    assert len(said) > 2
    assert all("mean of 1 of 1 rows" in text for text in said), said


@pytest.mark.slow
def test_a_column_of_targets_is_one():
    rows, targets = table(40)
    y = targets["zeros"][:, None]
    model = quick("zeros").fit(rows, y)
    known = model.predict_dist(rows)
    assert known.event_shape == (1,)
    density = model.log_predictive_density(rows, y)
    np.testing.assert_allclose(known.log_prob(y), density, atol=5e-3)


def test_rows_without_a_target_are_left_out():
    rows, targets = table(40)
    missing = np.arange(40) % 8 == 3
    y = np.where(missing, np.nan, targets["continuous"])
    weight = 2.0 + np.arange(40) % 2
    with pytest.warns(HealthWarning, match="5 of 40 targets are missing"):
        found = quick("continuous").fit(rows, y, weight)
    known = ~missing
    expected = quick("continuous").fit(rows[known], y[known], weight[known])
    np.testing.assert_array_equal(found.predict(rows), expected.predict(rows))
    plain = quick("continuous").fit(rows[known], y[known])
    assert not np.any(found.predict(rows) == plain.predict(rows))


# -- several targets of which some are missing -----------------------------------------


def with_gaps(y):
    """Every second value of the last column is missing."""
    gaps = np.array(y, float)
    gaps[1::2, -1] = np.nan
    return gaps


def test_the_density_of_several_targets_is_that_of_those_that_are_known():
    rows, targets = table(40)
    logs = with_gaps(np.c_[targets["continuous"], 5 + 2 * targets["continuous"]]) / 3
    y, options = np.exp(logs), {**TINY, "target": "positive"}
    model = Regressor("mean_field", **options).fit(rows, y)
    known = model.predict_dist(rows).component_distribution.base_dist
    each = np.asarray(known.log_prob(np.nan_to_num(y, nan=1.0)[:, None]), float)
    each = np.where(np.isnan(y)[:, None], 0.0, each).sum(-1)
    density = model.log_predictive_density(rows, y)
    mixture = logsumexp(each, axis=1) - np.log(each.shape[1])
    np.testing.assert_allclose(density, mixture, atol=1e-3)
    # a column without any value, and a row
    first = np.where(np.isnan(y[1]), np.nan, y)
    found = model.log_predictive_density(rows, first)
    np.testing.assert_array_equal(found[1::2], density[1::2])
    with pytest.raises(ValueError, match="NaN"):
        model.log_predictive_density(rows[:2], first[:2] * [[1.0], [np.nan]])
    exported = model.idata_
    np.testing.assert_allclose(exported["observed_data"]["y"], logs, rtol=1e-5)
    by_draw = exported["log_likelihood"]["y"].to_numpy().reshape(each.T.shape)
    np.testing.assert_allclose(by_draw, each.T, atol=1e-3)
    # a row whose targets are all missing says nothing
    more = np.concatenate([y, [[np.nan, np.nan]]])
    with pytest.warns(HealthWarning, match="1 of 41 targets are missing"):
        again = Regressor("mean_field", **options).fit(np.r_[rows, rows[:1]], more)
    np.testing.assert_array_equal(again.predict(rows), model.predict(rows))
    model.calibrate(rows, y)
    assert np.isfinite(model.log_predictive_density(rows, y)).all()
    with pytest.raises(ValueError, match="argument `y` got 20 values"):
        model.crps(rows, y)


@pytest.mark.parametrize(
    ("method", "gaps", "words"),
    [
        ("adf", {3: 1}, 'which "adf" cannot have. Drop their rows'),
        ("mean_field", dict.fromkeys(range(1, 40), 1), "two targets in column 1"),
    ],
)
def test_gaps_that_cannot_be_fitted_are_refused(method, gaps, words):
    rows, targets = table(40)
    y = np.c_[targets["continuous"], targets["continuous"]]
    y[list(gaps), list(gaps.values())] = np.nan
    with pytest.raises(ValueError, match=words):
        Regressor(method, **TINY).fit(rows, y)
