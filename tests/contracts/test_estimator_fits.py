"""Estimators: fits of their own, all slow; `test_estimators.py` looks at the answers of
two fits.
"""

import ast
import json
import pickle
import warnings
from functools import cache

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from helpers import group
from scipy import stats
from zoo import CLASSES, X, Y

import numpyro_bnn as bnn
from numpyro_bnn.estimators import Classifier, Regressor

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*worse than by a constant"),
]
METHODS = ["ensemble", "nuts", "laplace", "mean_field", "adf"]
TINY = {"widths": (3,), "effort": 0.002, "num_samples": 4, "random_state": 0}
FAST = {"widths": (8,), "num_samples": 50, "random_state": 0}


@cache
def many_rows():
    """160 rows whose noise has the standard deviation 5 on the left and 20 on the
    right; classes with text labels.
    """
    random = np.random.default_rng(0)
    x = random.uniform([-2, 10, 0], [2, 30, 1], (160, 3))
    y = (
        500
        + 100 * np.sin(x[:, 0])
        + random.normal(size=160) * np.where(x[:, 0] > 0, 20, 5)
    )
    return x, y, np.array(["low", "middle", "high"])[np.digitize(y, [450, 550])]


# -- networks of users who give none ---------------------------------------------------


@pytest.mark.parametrize(
    ("method", "rows", "options", "kernels", "noise"),
    [
        ("ensemble", 150, {}, [(3, 16), (16, 16), (16, 16), (16, 2)], {"excess_df"}),
        ("ensemble", 149, {}, [(3, 50), (50, 1)], {"excess_df", "sigma"}),
        (
            "ensemble",
            "ratings",
            {"target": "continuous"},
            [(3, 16), (16, 16), (16, 16), (16, 1)],
            {"sigma"},
        ),
        ("mean_field", 160, {}, [(3, 50), (50, 1)], {"sigma"}),
        (
            "mean_field",
            160,
            {"heteroscedastic": True, "heavy_tails": True},
            [(3, 50), (50, 2)],
            {"excess_df"},
        ),
    ],
)
def test_usual_network_and_noise(method, rows, options, kernels, noise, compiled):
    """All is compiled before the first report, and so once for all chains."""
    x, y, _ = many_rows()
    seen = []
    x, y = (x, x[:, 0].round()) if rows == "ratings" else (x[:rows], y[:rows])
    options = {"num_chains": 2, "effort": 0.002, "num_samples": 4, **options}
    model = Regressor(
        method,
        callback=lambda *_: seen.append(len(compiled)),
        random_state=0,
        **options,
    ).fit(x, y)
    assert method != "ensemble" or len(set(seen)) == 1
    size = len(pickle.dumps(model.set_params(callback=None)))
    posterior = group(model.idata_, "posterior")
    names = [str(name) for name in posterior]
    # the draws once, without the weights that the model computes from their bases
    computed = [name for name in names if f"{name}_base" in names]
    assert computed or method != "ensemble"
    assert size < posterior.drop_vars(computed).nbytes + 15_000
    assert [
        posterior[name].shape[2:] for name in names if name.endswith(".kernel")
    ] == kernels
    assert {name for name in names if not name.startswith("net.")} == noise
    assert model.attrs_["method"] == method
    assert model.attrs_["effort"] == options["effort"]
    assert posterior.sizes["chain"] == (2 if method == "ensemble" else 1)


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("kind", ["noise", "little noise", "classes", "gaps", "adf"])
def test_chains_take_as_many_gradients_as_the_rows_ask_for(kind):
    """A quarter where they say little of the function, all where they say much."""
    random = np.random.default_rng(0)
    x, noise = random.normal(size=(2, 120, 1))
    y = np.sin(2 * x[:, 0]) + (0.01 if kind == "little noise" else 1.0) * noise[:, 0]
    few = {"num_chains": 1, "num_samples": 4, "widths": (2,), "random_state": 0}
    if kind == "classes":
        model = Classifier(**few).fit(x, y > 0)
    elif kind == "gaps":
        model = Regressor(**few).fit(
            x, np.column_stack([y, np.where(y > 0, y, np.nan)])
        )
    else:
        model = Regressor("adf" if kind == "adf" else "ensemble", **few).fit(x, y)
    expected = 1.0 if kind in ("little noise", "adf") else 0.25
    assert model.attrs_["effort"] == expected
    assert model.get_params()["effort"] is None


@pytest.mark.parametrize(
    ("estimator", "family"),
    [(Classifier, dist.HalfCauchy), (Regressor, dist.HalfNormal)],
)
def test_scales_of_a_classifier_have_the_wider_prior(estimator, family):
    y = CLASSES if estimator is Classifier else Y
    usual, given = (
        estimator("mean_field", prior=prior, **TINY).fit(X, y).predict(X)
        for prior in (None, bnn.priors.Hierarchical(family(1.0)))
    )
    np.testing.assert_array_equal(usual, given)


@pytest.mark.filterwarnings("ignore:.*chains left out")  # one of so short ones
def test_columns_that_say_nothing_cost_little():
    """Three of 200 columns matter, which scales of their own show."""
    random = np.random.default_rng(0)
    x = random.normal(size=(700, 200))
    y = 2 * x[:, 0] + 1.5 * np.sin(2 * x[:, 1]) + 0.7 * x[:, 2] ** 2
    y += 0.5 * random.normal(size=700)
    usual, shared = (
        Regressor(prior=prior, num_chains=4, effort=0.1, random_state=0).fit(
            x[:200], y[:200]
        )
        for prior in (None, bnn.priors.Hierarchical())
    )
    gain = np.subtract(
        *(model.log_predictive_density(x[200:], y[200:]) for model in (usual, shared))
    )
    assert gain.mean() > 0.05 + 3 * gain.std() / 500**0.5
    # so short chains find the second one or not
    assert next(iter(usual.importances())) == "x0"


# -- fits at fault ---------------------------------------------------------------------


def test_a_fit_worse_than_a_constant_warns():
    """Probabilistic backpropagation with wide weights on sixteen rows: means are many
    sds of the targets off.
    """
    random = np.random.default_rng(1)
    x = random.uniform(-1, 1, (16, 8))
    y = x[:, 0] ** 2 + 0.1 * random.normal(size=16)
    prior = bnn.priors.Normal(10.0)
    with pytest.warns(
        bnn.metrics.HealthWarning, match="nats a row worse than by a constant"
    ):
        Regressor("adf", widths=(50,), prior=prior, random_state=0).fit(x, y)


def test_copies_of_rows_are_named():
    """Rows that stand twice count twice; rows of few kinds, whose targets differ by
    chance, are no copies.
    """
    random = np.random.default_rng(0)
    kinds = random.integers(0, 2, (400, 3)) * random.choice([-1.0, 1.0], (400, 3))
    kinds = np.where(
        kinds == 0, kinds, 1.0
    )  # eight kinds of rows, with zeros of both signs
    for targets in (kinds[:, 0] + 2 * kinds[:, 1], kinds[:, :2]):
        with pytest.warns(
            bnn.metrics.HealthWarning, match=r"fit: 392 of 400 rows repeat another"
        ):
            Regressor("adf", **TINY).fit(kinds, targets)
    x, y, labels = many_rows()
    copied = np.r_[:100, :20]
    with pytest.warns(
        bnn.metrics.HealthWarning, match=r"fit: 20 of 120 rows repeat another"
    ):
        Classifier("mean_field", **TINY).fit(x[copied], labels[copied])
    quiet = [
        (x[np.r_[:100, :11]], y[np.r_[:100, :11]]),  # 11 of 111, less than a tenth
        (kinds, random.normal(size=400)),
        (kinds, np.stack([kinds[:, 0], random.normal(size=400)], 1)),
        (kinds, random.integers(0, 5, 400)),
        (kinds, random.random(400) < 0.02),
    ]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*rows repeat another")
        for rows, targets in quiet:
            Regressor("adf", **TINY).fit(rows, targets)


def broken_above(limit):
    """A prior with a site of its own, which is NaN in the chains that pass a limit."""

    def prior(name, shape):
        if name == "Dense_0.kernel":
            z = numpyro.sample("z", dist.Normal(0.0, 1.0))
            numpyro.deterministic("broken", jnp.where(z > limit, jnp.nan, z))
        return dist.Normal(0.0, 1.0).expand(shape).to_event()

    return prior


def test_chains_at_fault_are_left_out():
    """They must not reach the predictions, are named, and the others keep their numbers
    in the export.
    """
    options = TINY | {"effort": 0.01, "num_chains": 8}
    with pytest.warns(
        UserWarning, match=r"chains left out of all predictions \(diverged: \[\d"
    ):
        model = Regressor(prior=broken_above(1.0), **options).fit(X, Y)
    kept = sorted(set(range(8)) - set(ast.literal_eval(model.attrs_["diverged"])))
    posterior = group(model.idata_, "posterior")
    assert 0 < len(kept) < 8
    assert posterior["chain"].to_numpy().tolist() == kept
    assert bool(np.isfinite(posterior["net.broken"]).all())
    assert np.isfinite(model.predict(X)).all()
    verdicts = {
        check["name"]: check["verdict"]
        for check in json.loads(model.idata_.attrs["health"])
    }
    assert verdicts["diverged"] == "ok"  # the chains at fault are not there
    with pytest.raises(ValueError, match="every chain diverged or froze"):
        Regressor(prior=broken_above(-9.0), **options).fit(X, Y)


@pytest.mark.filterwarnings(
    "ignore:.*rows lie more than 3 standard deviations", "ignore:.*rows hardly show"
)
@pytest.mark.parametrize("method", METHODS)
def test_degenerate_data_have_finite_answers(method):
    """Two rows, more inputs than rows, constant columns, constant targets."""
    x = np.random.default_rng(0).normal(size=(5, 9))
    x[:, 3] = 1e6
    for rows, y in [
        (x, np.arange(5.0)),
        (x[:2], np.array([1.0, 2.0])),
        (x, np.full(5, 3e5)),
    ]:
        model = Regressor(method, **TINY | {"num_chains": 2, "effort": 0.02})
        if method == "laplace":
            # with four precisions and the noise to choose it could have no noise
            with pytest.raises(
                ValueError,
                match=rf"got {len(y)} rows, .* 4 prior precisions .* at least 6 rows",
            ):
                model.fit(rows, y)
            continue
        model.fit(rows, y)
        mean, sd = model.predict(x, return_std=True)
        assert np.isfinite(mean).all()
        assert np.all(sd > 0)


@pytest.mark.parametrize(
    ("method", "rows"), [("adf", 2), ("adf", 5), ("laplace", 6), ("laplace", 10)]
)
def test_intervals_of_few_rows_hold_what_they_say_or_warn(method, rows):
    """Coverage on twelve tables of noise, five standard errors below which is at fault.

    It is that of an interval with the mean and sd of n rows for those of the targets:
    the share of Student's t with n - 1 degrees of freedom within 1.645 ((n - 1) / (n +
    1))^(1/2), 0.83 of 10 rows and 0.75 of 5.
    """
    covered, caught = [], []
    for seed in range(12):
        random = np.random.default_rng(seed)
        x, y = random.normal(size=(rows + 200, 2)), random.normal(size=rows + 200)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            low, high = (
                Regressor(method, widths=(5,), effort=0.1, random_state=seed)
                .fit(x[:rows], y[:rows])
                .predict_interval(x[rows:])
            )
        caught.append(
            any(
                "rows hardly show the scale" in str(warning.message) for warning in seen
            )
        )
        covered.append(np.mean((low < y[rows:]) & (y[rows:] < high)))
    known = stats.t(rows - 1).cdf(1.645 * np.sqrt((rows - 1) / (rows + 1))) * 2 - 1
    honest = np.mean(covered) > known - 5 * np.std(covered) / 12**0.5
    assert set(caught) == {rows < (10 if method == "laplace" else 5)}
    assert honest or all(caught)


# -- methods ---------------------------------------------------------------------------


@pytest.mark.optimized
@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns(method):
    x, y, labels = many_rows()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "estimators.*left out")
        model = Regressor(method, effort=0.25, **FAST).fit(x, y)
        of_classes = Classifier(method, effort=0.25, **FAST).fit(x, labels)
    assert model.score(x, y) > 0.7
    assert of_classes.score(x, labels) > 0.7
    low, high = model.predict_interval(x)
    assert 0.8 < np.mean((low < y) & (y < high)) <= 1.0


def test_heavy_tails_survive_outliers():
    x, random = many_rows()[0], np.random.default_rng(0)
    good = np.arange(160) % 16 > 0
    y = x[:, 0] + random.normal(0, 0.1, 160) + np.where(good, 0.0, 20.0)
    robust, normal = (
        Regressor("mean_field", heavy_tails=tails, effort=0.1, **FAST).fit(x, y)
        for tails in (True, False)
    )
    narrow, wide = (
        np.diff(model.predict_interval(x, level=0.5), axis=0)
        for model in (robust, normal)
    )
    assert np.median(narrow) < 0.5 * np.median(wide)
    densities = [
        model.log_predictive_density(x, y)[good].mean() for model in (robust, normal)
    ]
    assert densities[0] > densities[1] + 0.5


def test_noise_of_several_targets_that_depends_on_the_inputs():
    x, y, _ = many_rows()
    both = np.stack([y, -3 * y + 7], axis=1)
    model = Regressor("mean_field", heteroscedastic=True, effort=0.1, **FAST).fit(
        x, both
    )
    mean, sd = model.predict(x, return_std=True)
    assert mean.shape == sd.shape == both.shape
    assert model.score(x, both) > 0.5
    assert np.all(sd[x[:, 0] > 0.5].mean(0) > 1.5 * sd[x[:, 0] < -0.5].mean(0))
    low, high = model.predict_interval(x, level=0.8)
    # Binomial: 128 of 160 rows are expected, with the standard deviation 5.
    assert np.all(np.abs(np.sum((low < both) & (both < high), axis=0) - 128) < 25)
    assert model.sample(x, 7).shape == (7, *both.shape)
    np.testing.assert_allclose(
        group(model.idata_, "observed_data")["y"], both, rtol=1e-5
    )
    far = np.concatenate(
        [x[:20], x[:3] + 10 * x.std(0)]
    )  # of these the network knows least
    assert set(model.most_uncertain(far, 3)) == {20, 21, 22}


@pytest.mark.filterwarnings(
    "ignore:.*posterior sds from the mode"
)  # it holds at every point
@pytest.mark.parametrize(
    ("targets", "heteroscedastic"), [(1, False), (1, True), (2, False)]
)
def test_laplace_in_closed_form_is_the_mixture_of_its_draws(targets, heteroscedastic):
    """Mean, variance, quantiles and density need no draws, and are those of draws of
    the linearized network.
    """
    x, y = (
        many_rows()[0],
        many_rows()[1]
        if targets == 1
        else np.stack([many_rows()[1], 7 - 3 * many_rows()[1]], 1),
    )
    options = {"widths": (4,), "num_samples": 20_000, "random_state": 0}
    model = Regressor("laplace", heteroscedastic=heteroscedastic, **options).fit(x, y)
    rows, count = x[:6], 20_000
    mean, sd = model.predict(rows, return_std=True)
    functions, draws = (
        model.sample(rows, count, noise=noise, random_state=0)
        for noise in (False, True)
    )
    # Five standard errors of Monte Carlo means, variances and shares.
    np.testing.assert_array_less(
        np.abs(functions.mean(0) - mean), 5 * functions.std(0) / count**0.5
    )
    away = (draws - mean) ** 2
    np.testing.assert_array_less(
        np.abs(away.mean(0) - sd**2), 5 * away.std(0) / count**0.5
    )
    for level in (0.02, 0.5, 0.9):
        low, high = model.predict_interval(rows, level=level)
        inside = ((low < draws) & (draws < high)).mean(0)
        np.testing.assert_allclose(inside, level, atol=5 * 0.5 / count**0.5)
        np.testing.assert_allclose(
            (draws < low).mean(0), (1 - level) / 2, atol=5 * 0.5 / count**0.5
        )
    if heteroscedastic:
        assert_skew(model, x[:30], count)
    elif targets == 1:  # the density has the quantiles
        low, high = model.predict_interval(rows[:1], level=0.9)
        grid = np.linspace(low[0], high[0], 1001)
        density = np.exp(
            model.log_predictive_density(np.repeat(rows[:1], 1001, 0), grid)
        )
        np.testing.assert_allclose(np.trapezoid(density, grid), 0.9, rtol=1e-4)


def assert_skew(model, rows, count):
    """Function and noise vary together: the third moment of an observation is three
    times their covariance.
    """
    mean, sd = model.predict(rows, return_std=True)
    units = np.linspace(-9, 9, 901)
    at = (mean + sd * units[:, None]).ravel()
    density = sd * np.exp(
        model.log_predictive_density(np.tile(rows, (901, 1)), at)
    ).reshape(901, -1)
    third = np.trapezoid(density * units[:, None] ** 3, units, axis=0)
    functions, draws = (
        model.sample(rows, count, noise=noise, random_state=0)
        for noise in (False, True)
    )
    each = 3 * (functions - mean) * (draws - functions) ** 2 / sd**3
    error = each.std(0) / count**0.5
    assert np.abs((each.mean(0) - third) / error).max() < 5
    assert np.abs(third / error).max() > 5  # enough for the test to see it


@pytest.mark.core
def test_laplace_is_exact_for_a_linear_model():
    """Without hidden layers, given the noise: linear regression with the prior
    precisions of the evidence.

    24 rows are padded to 32, which changes nothing.
    """
    rows, y = X * np.array([2.0, 16.0]) + np.array([1.0, 20.0]), 500 + 128 * Y
    model = Regressor(
        "laplace", widths=(), prior=bnn.priors.Normal(2.0), random_state=0
    ).fit(rows, y)
    design = np.c_[(rows - rows.mean(0)) / rows.std(0), np.ones(24)]
    precision = ast.literal_eval(model.attrs_["prior_precision"])
    # The prior of the kernel is N(0, 2^2 / fan-in), that of the bias N(0, 2^2).
    prior = [2 * precision["net/Dense_0.kernel"] / 4] * 2 + [
        precision["net/Dense_0.bias"] / 4
    ]
    mean, found = model.predict(rows), model.uncertainty(rows)
    # The log of the noise has a variance of 1 / (2 N), nearly.
    noise = np.sqrt(found.aleatoric[0] * np.exp(-1 / 24)) / y.std()
    cov = np.linalg.inv(design.T @ design / noise**2 + np.diag(prior))
    exact = design @ cov @ design.T @ ((y - y.mean()) / y.std()) / noise**2
    np.testing.assert_allclose((mean - y.mean()) / y.std(), exact, atol=1e-3)
    np.testing.assert_allclose(
        found.epistemic / y.std() ** 2,
        np.einsum("ni,ij,nj->n", design, cov, design),
        rtol=0.01,
    )


def test_a_linear_network_has_no_symmetries():
    x, y, _ = many_rows()
    model = Regressor("nuts", widths=(), num_chains=1, effort=0.1, random_state=0).fit(
        x, y
    )
    assert model.attrs_["algorithm"] == "NUTS"
    design = np.c_[x, np.ones(160)]
    line = design @ np.linalg.lstsq(design, y, rcond=None)[0]
    assert np.abs(model.predict(x) - line).max() < 0.2 * np.std(y - line)
