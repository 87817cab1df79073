"""Estimators: frames as people have them, and what a predictive distribution says."""

import datetime
import pickle
import warnings
from functools import cache
from typing import NamedTuple

import jax
import numpy as np
import pytest
from helpers import group
from numpy.testing import assert_allclose, assert_array_equal
from scipy import stats
from zoo import X, Y

from numpyro_bnn.estimators import Classifier, Regressor
from numpyro_bnn.metrics import HealthWarning

pd = pytest.importorskip("pandas")
TINY = {"widths": (4,), "random_state": 0}
N = 240


def frame(size=N, seed=0):
    """Numbers, gaps, a heavy tail, a switch, text, categories, numbered names, dates of
    every kind, durations.
    """
    rng = np.random.default_rng(seed)
    gaps = np.where(np.arange(size) % 10 == 3, np.nan, rng.normal(size=size))
    days = pd.date_range("2020-01-01", periods=size, freq="5D")
    text = rng.choice(["red", "blue", "green"], size).astype(object)
    text[[0, 1]] = ["rare", None]
    return pd.DataFrame(
        {
            "number": rng.normal(size=size),
            "gaps": gaps,
            "tail": np.exp(3 * rng.normal(size=size)),
            "switch": rng.random(size) < 0.5,
            "text": text,
            "level": pd.Categorical(rng.choice(["a", "b"], size)),
            "zip": rng.integers(0, 3, size),
            "day": days,
            "written": days.strftime("%Y-%m-%d"),
            "python": [datetime.date(2020, 1, 1 + row % 28) for row in range(size)],
            "lasts": pd.to_timedelta(rng.integers(0, 9, size), unit="h"),
            "digits": [str(row % 7) for row in range(size)],
        }
    )


def targets(rows):
    noise = np.random.default_rng(1).normal(size=len(rows))
    red = (rows["text"] == "red").to_numpy(float)
    return np.nan_to_num(rows["number"]) + 3 * red + 0.5 * noise


@cache
def fitted():
    rows = frame()
    return Regressor("adf", categories=["zip"], **TINY).fit(rows, targets(rows))


def test_a_frame_is_described():
    words = str(fitted())
    for name, what in {
        "gaps": "24 missing: the median",
        "tail": "a heavy tail: asinh",
        "text": "5 levels, one of which is that it is missing; 2 rare ones are joined",
        "level": "2 levels",
        "zip": "3 levels",
        "day": "days since 2020-01-01, place in the year, place in the week",
        "written": "days since 2020-01-01, place in the year, place in the week",
        "python": "days since 2020-01-01, place in the week",
    }.items():
        assert f"{name}: {what}" in words
    for name in ("number", "switch", "lasts", "digits"):
        assert f"{name}:" not in words
    assert "rare ones" in fitted().attrs_["columns"]
    assert list(fitted().feature_names_in_) == list(frame().columns)


def test_the_numbers_of_a_frame_are_those_of_numpy():
    rows = frame()
    inputs = fitted().idata_["constant_data"]["x"].to_numpy()
    median = np.nanmedian(rows["gaps"])
    tail = rows["tail"].to_numpy()
    low, middle, high = np.quantile(tail, (0.25, 0.5, 0.75))
    expected = {
        0: rows["number"],
        1: rows["gaps"].fillna(median),
        2: rows["gaps"].isna(),
        3: np.arcsinh((tail - middle) / (high - low)),
        4: rows["switch"],
        # levels in the order of their names, those that are joined at the end
        5: rows["text"] == "blue",
        6: rows["text"] == "green",
        7: rows["text"] == "red",
        8: rows["text"].isin(["rare"]) | rows["text"].isna(),
        9: rows["level"] == "a",
        11: rows["zip"] == 0,
        14: 5 * np.arange(N),
        15: np.sin(2 * np.pi * 5 * np.arange(N) / 365.25),
        18: np.cos(2 * np.pi * 5 * np.arange(N) / 7),
        19: 5 * np.arange(N),
        24: np.arange(N) % 28,
        27: rows["lasts"].dt.total_seconds() / 86400,
        28: np.arange(N) % 7,
    }
    assert inputs.shape == (N, 29)
    for place, column in expected.items():
        column = np.asarray(column, float)
        assert_allclose(inputs[:, place], column, atol=1e-4, err_msg=str(place))


def test_the_text_is_learned_and_survives_a_pickle():
    rows = frame()
    assert fitted().score(rows, targets(rows)) > 0.9
    again = pickle.loads(pickle.dumps(fitted()))
    assert_array_equal(again.predict(rows), fitted().predict(rows))


def test_rare_levels_are_no_extreme_inputs():
    """Two rows in 240 have a level, one a switch: standardized they would be 11 and 15
    sds away. The network by hand, from the draws of the export.
    """
    flag = np.where(np.isin(np.arange(N), (7, 99)), "odd", "usual")
    rows = pd.DataFrame({"flag": flag, "switch": np.arange(N) == 9, "x": np.arange(N)})
    y = np.arange(N) % 5 + 0.0
    model = Regressor("adf", **TINY).fit(rows, y)
    mean, sd = model.predict(rows, return_std=True)
    assert np.all(np.abs(mean - 2) < 4 * sd)
    inputs = model.idata_["constant_data"]["x"].to_numpy()
    scales = np.array([0.5**0.5, 0.5**0.5, 0.5, np.arange(N).std()])
    inputs = (inputs - inputs.mean(0)) / scales
    posterior = group(model.idata_, "posterior")
    w, b, v, c = (
        posterior[f"net.Dense_{k}.{part}"].to_numpy()[0].astype(float)
        for k in (0, 1)
        for part in ("kernel", "bias")
    )
    outputs = np.maximum(inputs @ w + b[:, None], 0) @ v + c[:, None]
    assert_allclose(y.mean() + y.std() * outputs[..., 0].mean(0), mean, rtol=1e-4)


def test_other_frames_have_the_same_numbers():
    polars = pytest.importorskip("polars")
    rows = frame()[["number", "gaps", "switch", "text", "written"]]
    lists = {
        name: [None if value is None or value != value else value for value in column]
        for name, column in rows.items()
    }
    model = Regressor("adf", **TINY).fit(rows, targets(rows))
    for other in (polars.DataFrame(lists), pd.DataFrame(lists, dtype=object)):
        assert_allclose(model.predict(other), model.predict(rows), rtol=1e-6)


def test_new_levels_and_gaps_are_announced():
    rows = frame().iloc[:5].copy()
    rows.loc[2, "text"] = "violet"
    rows.loc[3, "number"] = np.nan
    with pytest.warns(HealthWarning) as caught:
        mean = fitted().predict(rows)
    words = str(caught[0].message)
    assert "'text' have a level that the fit has not seen, such as 'violet'" in words
    assert "1 missing values in column 'number', which had none in the fit" in words
    assert np.isfinite(mean).all()
    # A level that is new is one of those that were joined.
    rows = frame().iloc[:5]
    rare = rows.assign(text=["rare", *rows["text"][1:]])
    new = rows.assign(text=["violet", *rows["text"][1:]])
    with pytest.warns(HealthWarning):
        mean = fitted().predict(new)
    assert_array_equal(mean, fitted().predict(rare))


def changed(**columns):
    return frame().iloc[:3].assign(**columns)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: fitted().predict(changed(number=["1", "b", "3"])), "'b' in column"),
        (lambda: fitted().predict(changed(number=[1, np.inf, 3])), "column 'number'"),
        (
            lambda: fitted().predict(changed(day=["2020-01-01", "soon", None])),
            "'soon' in column 'day', which holds dates",
        ),
        (lambda: fitted().predict(frame()[["number", "gaps"]]), "feature names"),
        (
            lambda: Regressor("adf", **TINY).fit(
                pd.DataFrame({"a": [[1], [2]]}), [0.0, 1.0]
            ),
            "values of type list in column 'a'",
        ),
        (
            lambda: Regressor("adf", categories=["zap"]).fit(frame(), np.ones(N)),
            "'zap', which is no column of X",
        ),
        (lambda: Regressor("adf", dates="day").fit(frame(), np.ones(N)), "argument"),
        (lambda: Regressor("adf", categories=["a"]).fit(X, Y), "an array, whose"),
        (
            lambda: Regressor("adf", categories=["day"], dates=["day"]).fit(
                frame(), np.ones(N)
            ),
            "'day', which is in `categories` too",
        ),
        (lambda: fitted().predict(changed(number=frame()["day"][:3])), "dates in"),
        (
            lambda: Regressor("adf").fit(frame().assign(number=1j), np.ones(N)),
            "complex numbers in column 'number'",
        ),
    ],
)
def test_columns_at_fault_are_named(call, words):
    with pytest.raises((TypeError, ValueError), match=words):
        call()


def test_an_array_after_a_frame_has_its_columns():
    rows = pd.DataFrame(X, columns=["a", "b"])
    model = Regressor("adf", **TINY).fit(rows, Y)
    plain = Regressor("adf", **TINY).fit(X, Y)
    with pytest.warns(UserWarning, match="feature names"):
        by_place = model.predict(X)
    assert_array_equal(by_place, model.predict(rows))
    assert_array_equal(by_place, plain.predict(X))


def test_a_clock_that_stands_still_says_nothing_of_the_day():
    """Rounding is no place in the day; hours are those on the wall, summer or not."""
    days = pd.date_range("2021-01-01", periods=60, freq="D", tz="Europe/Berlin")
    y = np.arange(60) % 7 + 0.0
    rows = pd.DataFrame({"day": days, "x": np.arange(60.0) % 5})
    model = Regressor("adf", **TINY).fit(rows, y)
    assert "place in the day" not in str(model)
    later = rows.assign(day=days + pd.Timedelta(days=150, minutes=1)).iloc[:4]
    with pytest.warns(HealthWarning, match="outside"):
        assert np.all(np.abs(model.predict(later)) < 1000)


def test_columns_without_a_value():
    empty = {"date": pd.Series(pd.NaT, range(20)), "text": [None] * 20}
    rows = pd.DataFrame({**empty, "x": range(20)})
    model = Regressor("adf", **TINY).fit(rows, np.arange(20.0))
    assert "date: 20 missing" in str(model)
    new = rows.assign(text="a", date=pd.Timestamp("2020-01-01"))
    with pytest.warns(
        HealthWarning
    ):  # a level, and so inputs that the fit has not seen
        assert np.isfinite(model.predict(new)).all()


def test_a_column_of_rare_levels_only_is_not_used():
    """Such as names, or dates in another form: new ones are no news."""
    days = [f"{day}.1.2020" for day in range(1, 21)]
    rows = pd.DataFrame({"day": days, "x": range(20)})
    model = Regressor("adf", **TINY).fit(rows, np.arange(20.0))
    assert "day: 20 levels, all of them rare: not used (dates need" in str(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.predict(rows.assign(day="new"))
    with pytest.raises(
        ValueError, match=r"(?s)got a table of 1 columns.*missing.*- day"
    ):
        model.predict(rows[["x"]])


# -- many levels -----------------------------------------------------------------------


class ManyShops(NamedTuple):
    """A line, an effect of each of many shops, and noise; new rows of these shops."""

    rows: object
    y: np.ndarray
    new: object
    new_y: np.ndarray
    exact: np.ndarray  # log densities of the new rows, the variances being known
    without: np.ndarray  # those of a model that does not know the shops


@cache
def many_shops(spread, shops=150, rows_per_shop=4, sd=0.5):
    rng = np.random.default_rng(0)
    effects = spread * rng.normal(size=shops)
    parts = []
    for shop in (np.repeat(np.arange(shops), rows_per_shop), np.arange(2 * shops) // 2):
        x = rng.uniform(-2, 2, len(shop))
        y = 0.8 * x + effects[shop] + sd * rng.normal(size=len(shop))
        parts.append((np.c_[np.ones(len(x)), x], shop, y))
    (line, shop, y), (new_line, new_shop, new_y) = parts

    def log_density(spread, noise):
        # the line has the prior N(0, 10^2 I)
        def covariance(rows, codes, others, other_codes):
            same = codes[:, None] == other_codes
            return 100 * rows @ others.T + spread**2 * same

        known = covariance(line, shop, line, shop) + noise**2 * np.eye(len(y))
        cross = covariance(new_line, new_shop, line, shop)
        gain = np.linalg.solve(known, cross.T).T
        variance = 100 * (new_line**2).sum(1) + spread**2 + noise**2
        variance -= (gain * cross).sum(1)
        return stats.norm.logpdf(new_y, gain @ y, variance**0.5)

    frames = [
        pd.DataFrame({"shop": [f"shop {code}" for code in codes], "x": rows[:, 1]})
        for rows, codes, _ in parts
    ]
    total = (spread**2 + sd**2) ** 0.5
    return ManyShops(
        frames[0], y, frames[1], new_y, log_density(spread, sd), log_density(0, total)
    )


@cache
def fit_of_shops():
    table = many_shops(1.0)
    return Regressor("adf", widths=(4,), random_state=0).fit(table.rows, table.y)


def test_many_rare_levels_have_effects_of_their_own():
    table, model = many_shops(1.0), fit_of_shops()
    words = "shop: 150 levels, each with an effect of its own"
    assert words in repr(model)
    assert words.partition(": ")[2] in model.attrs_["columns"]
    again = pickle.loads(pickle.dumps(model))
    density = again.log_predictive_density(table.new, table.new_y)
    # Gaussians of independent weights are too narrow, by less than the shops gain
    assert np.mean(table.exact - density) < 0.15
    assert np.mean(density - table.without) > 0.3
    shares = model.importances()
    assert set(shares) == {"shop", "x"}
    assert 0.3 < shares["shop"] < 0.8
    posterior = group(model.idata_, "posterior")
    codes = model.idata_["constant_data"]["x"].to_numpy()[:, -1].astype(int)
    assert sorted(set(codes)) == list(range(150))
    effect = posterior["shop_effect"].to_numpy().mean((0, 1))[codes, 0]
    by_shop = table.rows.assign(left=table.y - 0.8 * table.rows["x"])
    means = by_shop.groupby("shop")["left"].transform("mean")
    assert np.corrcoef(effect, means)[0, 1] > 0.95


def test_a_new_level_is_a_draw_from_the_effects():
    table, model = many_shops(1.0), fit_of_shops()
    rows = table.new[:4]
    known = model.predict(rows, return_std=True)[1]
    with pytest.warns(HealthWarning, match="4 rows of column 'shop' have a level that"):
        sd = model.predict(rows.assign(shop="new"), return_std=True)[1]
    spread = group(model.idata_, "posterior")["shop_spread"].to_numpy()
    spread = table.y.std() * np.sqrt(np.mean(spread**2))
    # of 1000 draws, five standard errors of a variance; known effects vary little
    error = 5 * spread**2 * (2 / 1000) ** 0.5
    assert np.all(sd**2 - known**2 < spread**2 + error)
    assert np.all(sd**2 - known**2 > 0.85 * spread**2 - error)
    assert_allclose(spread, 1.0, rtol=0.35)
    same = table.new.iloc[[0, 0, 0]].assign(shop=["first", "second", "first"])
    draws = model.sample(same, 1000, noise=False)
    assert_allclose(draws[:, 0], draws[:, 2], atol=1e-5)
    assert np.std(draws[:, 0] - draws[:, 1]) > 1.2 * spread
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # codes are no distances
        model.predict(table.new)


def test_draws_of_new_levels_have_the_moments_of_a_linearized_network():
    """Whose evidence chooses the precision of the effects, too."""
    table = many_shops(1.0, 80, 2)
    model = Regressor("laplace", widths=(), effort=0.02, random_state=0)
    rows = table.new[:3].assign(shop="new")
    with pytest.warns(HealthWarning):
        sd = model.fit(table.rows, table.y).predict(rows, return_std=True)[1]
    draws = model.sample(rows, 1000)
    assert_allclose(draws.std(0), sd, rtol=5 / (2 * 1000) ** 0.5)


@pytest.mark.slow
@pytest.mark.optimized
def test_effects_of_levels_reach_the_random_intercept_model():
    """The exact model knows both variances and that the function is a line."""
    table = many_shops(1.0, 300)
    model = Regressor(effort=0.2, random_state=0).fit(table.rows, table.y)
    lost = table.exact - model.log_predictive_density(table.new, table.new_y)
    error = lost.std() / len(lost) ** 0.5
    # about ten unknowns cost half a nat each, spread over 1200 rows
    assert lost.mean() < 10 * 0.5 / 1200 + 3 * error
    gained = np.mean(table.exact - table.without)
    assert lost.mean() < 0.05 + 0.1 * gained


@pytest.mark.slow
@pytest.mark.parametrize("method", ["nuts", "mean_field"])
def test_every_method_has_effects_of_levels(method):
    table = many_shops(1.0, 120)
    model = Regressor(method, widths=(4,), random_state=0, effort=0.3)
    model.fit(table.rows, table.y)
    density = model.log_predictive_density(table.new, table.new_y)
    assert np.mean(table.exact - density) < 0.15


def test_names_that_are_numbers():
    model = Regressor("adf", **TINY).fit(pd.DataFrame(X), Y)
    assert set(model.importances()) == {"0", "1"}
    with pytest.raises(ValueError, match="without the column 0"):
        model.predict(pd.DataFrame(X, columns=[5, 6]))


# -- quantiles, distribution functions, scores, distributions --------------------------


@cache
def regressor(kind):
    """With the given noise; several targets share a network."""
    options = {"effort": 0.05, "num_samples": 200, **TINY}
    y = 10 + 5 * (np.c_[Y, -Y] if kind == "two targets" else Y)
    if kind == "laplace":
        return Regressor("laplace", **TINY).fit(X, y), y
    tails = kind == "tails"
    return Regressor("mean_field", heavy_tails=tails, **options).fit(X, y), y


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("tails", "laplace")]
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*worse than by a constant",  # so little effort is not enough
    "ignore:.*diverged",
)


@pytest.mark.parametrize("kind", ["two targets", *SLOW])
def test_the_distribution_function_inverts_the_quantiles(kind):
    model, _ = regressor(kind)
    model.calibration_ = 1.6
    levels = np.array([0.02, 0.3, 0.5, 0.9])
    quantiles = model.predict_quantiles(X, levels)
    for level, values in zip(levels, quantiles, strict=True):
        # of Student's t, a table with errors below 2e-5
        assert_allclose(model.cdf(X, values), level, atol=3e-5)
    low, high = model.predict_interval(X, 0.6)
    ends = model.predict_quantiles(X, [0.2, 0.8])
    assert_allclose(ends, [low, high], rtol=1e-6)


@pytest.mark.parametrize("kind", ["two targets", *SLOW[1:]])
def test_crps_is_that_of_the_mixture(kind):
    """Of Gaussian components it has a closed form (Grimit et al. 2006)."""
    model, y = regressor(kind)
    model.calibration_ = 1.6
    # far away too
    far = np.where(np.arange(len(y)) % 6 == 0, 40.0, 0.0)
    y = y + far.reshape(-1, *[1] * (y.ndim - 1))
    mixture = model.predict_dist(X)
    component = mixture.component_distribution
    base = getattr(component, "base_dist", component)
    # draws last
    loc, sd = (np.asarray(v, float) for v in (base.loc, base.scale))
    if y.ndim == 2:
        loc, sd = np.swapaxes(loc, 1, 2), np.swapaxes(sd, 1, 2)

    def mean_distance(m, s):
        """E |m + s z|."""
        return m * (2 * stats.norm.cdf(m / s) - 1) + 2 * s * stats.norm.pdf(m / s)

    first = mean_distance(y[..., None] - loc, sd).mean(-1)
    between = np.sqrt(sd[..., None] ** 2 + sd[..., None, :] ** 2)
    pairs = mean_distance(loc[..., None] - loc[..., None, :], between)
    expected = first - pairs.mean((-1, -2)) / 2
    # a Laplace approximation has infinitely many components: 1,000 draws of them
    tolerance = 0.05 if kind == "laplace" else 2e-3
    assert_allclose(model.crps(X, y), expected, rtol=tolerance, atol=2e-3)


@pytest.mark.parametrize("kind", ["two targets", SLOW[0]])
def test_the_distribution_of_a_row_is_that_of_the_estimator(kind):
    model, y = regressor(kind)
    model.calibration_ = 1.3
    mixture = model.predict_dist(X)
    assert mixture.batch_shape == (len(X),)
    mean, sd = model.predict(X, return_std=True)
    assert_allclose(mixture.mean, mean, rtol=1e-4)
    assert_allclose(np.sqrt(mixture.variance), sd, rtol=1e-3)
    assert_allclose(mixture.log_prob(y), model.log_predictive_density(X, y), atol=1e-3)
    assert mixture.sample(jax.random.key(0), (2,)).shape == (2, *y.shape)


@pytest.mark.parametrize("levels", [0.5, [0.0, 0.5], ["a"], [np.nan]])
def test_levels_that_are_no_probabilities_are_refused(levels):
    with pytest.raises((TypeError, ValueError), match="argument `levels`"):
        regressor("two targets")[0].predict_quantiles(X, levels)


# -- columns, and estimators inside others ---------------------------------------------


def test_importances_are_those_of_the_function():
    """y = 3 [red] + number: variances 9 p (1 - p) and 1; nothing else matters."""
    shares = fitted().importances()
    rows = frame()
    red = np.mean(rows["text"] == "red")
    parts = np.array([9 * red * (1 - red), np.var(rows["number"])])
    assert list(shares)[:2] == ["text", "number"]
    assert_allclose([shares["text"], shares["number"]], parts / parts.sum(), atol=0.12)
    assert sum(shares[name] for name in list(shares)[2:]) < 0.1
    assert set(regressor("two targets")[0].importances()) == {"x0", "x1"}


def test_answers_inside_a_pipeline_and_a_search():
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import MinMaxScaler

    from numpyro_bnn.estimators import inside

    y = np.asarray(Y, float)
    scaler = MinMaxScaler().fit(X)
    alone = Regressor("adf", **TINY).fit(scaler.transform(X), y)
    pipeline = make_pipeline(MinMaxScaler(), Regressor("adf", **TINY)).fit(X, y)
    whole = np.arange(len(X))
    search = GridSearchCV(pipeline, {"regressor__widths": [(4,)]}, cv=[(whole, whole)])
    search.fit(X, y)
    for model in (pipeline, search):
        answers = inside(model)
        for name in ("predict_interval", "predict_quantiles", "uncertainty"):
            expected = getattr(alone, name)(scaler.transform(X))
            assert_allclose(getattr(answers, name)(X), expected, rtol=1e-6)
        ends = answers.conformal_interval(X=X[:3], X_held_out=X, y_held_out=y)
        scaled, held_out = scaler.transform(X[:3]), scaler.transform(X)
        expected = alone.conformal_interval(scaled, held_out, y)
        assert_allclose(ends, expected, rtol=1e-6)
    calibrated = answers.calibrate(X, y)
    assert_array_equal(calibrated.predict(X), answers.predict(X))
    assert answers.attrs_["method"] == "adf"
    assert not hasattr(answers, "fit")
    with pytest.raises(ValueError, match="Pass a fitted `Pipeline`"):
        inside(MinMaxScaler())


# -- weights ---------------------------------------------------------------------------

TIMES = np.array([1, 2, 0, 3] * 6)


@pytest.mark.slow  # searches for the evidence are long
def test_a_weight_is_so_many_equal_rows():
    """The evidence, mode and Gaussian of a Laplace approximation, which has no Monte
    Carlo error.
    """
    y = np.asarray(Y, float)
    y = np.c_[y, y**2]
    options = {"widths": (3,), "random_state": 0}
    weighted = Regressor("laplace", **options).fit(X, y, sample_weight=TIMES)
    rows = (np.repeat(part, TIMES, axis=0) for part in (X, y))
    with pytest.warns(HealthWarning, match="repeat another"):
        repeated = Regressor("laplace", **options).fit(*rows)
    unweighted = Regressor("laplace", **options).fit(X, y)
    for level in (0.5, 0.95):
        ends = np.stack(weighted.predict_interval(X, level))
        expected = np.stack(repeated.predict_interval(X, level))
        other = np.stack(unweighted.predict_interval(X, level))
        error = np.abs(ends - expected).max()
        assert error < 0.02 * np.abs(other - expected).max() + 1e-4
    evidence = [model.attrs_["log_evidence"] for model in (weighted, repeated)]
    assert_allclose(*evidence, rtol=1e-4)


@pytest.mark.slow
def test_class_weights_are_weights_of_rows():
    labels = np.where(np.arange(24) % 4 == 0, "rare", "usual")
    options = {"widths": (3,), "random_state": 0}
    rare = Classifier("laplace", class_weight={"rare": 3.0}, **options).fit(X, labels)
    weight = np.where(labels == "rare", 3.0, 1.0)
    rows = Classifier("laplace", **options).fit(X, labels, sample_weight=weight)
    balanced = Classifier("laplace", class_weight="balanced", **options).fit(X, labels)
    plain = Classifier("laplace", **options).fit(X, labels)
    assert_array_equal(rare.predict_proba(X), rows.predict_proba(X))
    means = [model.predict_proba(X)[:, 0].mean() for model in (plain, rare, balanced)]
    assert_allclose(means, [0.25, 0.5, 0.5], atol=0.06)


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (np.ones(23), "one for each row"),
        (np.ones((24, 1)), r"shape \(24, 1\), for targets of shape \(24,\)"),
        (-np.ones(24), "24 negative"),
        (np.r_[1, np.zeros(23)], "1 positive"),
        (np.full(24, np.nan), "sample_weight"),
        (["a"] * 24, "sample_weight"),
    ],
)
def test_weights_that_are_none_are_refused(weight, words):
    with pytest.raises((TypeError, ValueError), match=words):
        Regressor("laplace", **TINY).fit(X, Y, sample_weight=weight)


def test_a_balanced_fit_is_judged_by_its_weights():
    labels = np.where(np.arange(24) % 12 == 0, "rare", "usual")
    options = {"widths": (3,), "effort": 0.1, "num_samples": 20, "random_state": 0}
    noise = np.random.default_rng(0).normal(size=(24, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error", HealthWarning)
        Classifier("mean_field", class_weight="balanced", **options).fit(noise, labels)


def test_a_method_without_weights_says_so():
    with pytest.raises(ValueError, match=r'"adf" counts every row once'):
        Regressor("adf", **TINY).fit(X, Y, sample_weight=TIMES)
