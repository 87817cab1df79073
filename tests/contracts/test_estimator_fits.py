"""Estimators: fits of their own, all slow."""

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
from numpy.testing import assert_allclose, assert_array_equal, assert_array_less
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
    noise = random.normal(size=160) * np.where(x[:, 0] > 0, 20, 5)
    y = 500 + 100 * np.sin(x[:, 0]) + noise
    return x, y, np.array(["low", "middle", "high"])[np.digitize(y, [450, 550])]


# -- networks of users who give none ---------------------------------------------------


BOTH = {"heteroscedastic": True, "heavy_tails": True}
DEEP = [(3, 16), (16, 16), (16, 16), (16, 2)]


@pytest.mark.parametrize(
    ("method", "rows", "options", "kernels", "noise"),
    [
        ("ensemble", 150, {}, DEEP, {"excess_df"}),
        ("ensemble", 149, {}, [(3, 50), (50, 1)], {"excess_df", "sigma"}),
        ("mean_field", 160, BOTH, [(3, 50), (50, 2)], {"excess_df"}),
    ],
)
def test_usual_network_and_noise(method, rows, options, kernels, noise):
    x, y, _ = many_rows()
    options = {"num_chains": 2, "effort": 0.002, "num_samples": 4, **options}
    model = Regressor(method, random_state=0, **options).fit(x[:rows], y[:rows])
    size = len(pickle.dumps(model))  # before it is exported
    posterior = group(model.idata_, "posterior")
    names = [str(name) for name in posterior]
    # the draws once, without the weights that the model computes from their bases
    computed = [name for name in names if f"{name}_base" in names]
    assert computed or method != "ensemble"
    assert size < posterior.drop_vars(computed).nbytes + 15_000
    of_kernels = [name for name in names if name.endswith(".kernel")]
    assert [posterior[name].shape[2:] for name in of_kernels] == kernels
    assert {name for name in names if not name.startswith("net.")} == noise
    assert model.attrs_["method"] == method
    assert model.attrs_["effort"] == options["effort"]
    assert posterior.sizes["chain"] == (2 if method == "ensemble" else 1)


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("kind", ["noise", "little noise", "classes"])
def test_chains_take_as_many_gradients_as_the_rows_ask_for(kind):
    """A quarter where they say little of the function, all where they say much."""
    random = np.random.default_rng(0)
    x, noise = random.normal(size=(2, 120, 1))
    y = np.sin(2 * x[:, 0]) + (0.01 if kind == "little noise" else 1.0) * noise[:, 0]
    few = {"num_chains": 1, "num_samples": 4, "widths": (2,), "random_state": 0}
    if kind == "classes":
        model = Classifier(**few).fit(x, y > 0)
    else:
        model = Regressor(**few).fit(x, y)
    assert model.attrs_["effort"] == (1.0 if kind == "little noise" else 0.25)
    assert model.get_params()["effort"] is None


def test_scales_of_a_classifier_have_the_wider_prior():
    usual, given = (
        Classifier("mean_field", prior=prior, **TINY).fit(X, CLASSES).predict_proba(X)
        for prior in (None, bnn.priors.Hierarchical(dist.HalfCauchy(1.0)))
    )
    assert_array_equal(usual, given)


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
    """Rows that stand twice count twice."""
    random = np.random.default_rng(0)
    kinds = random.integers(0, 2, (400, 3)) * random.choice([-1.0, 1.0], (400, 3))
    # eight kinds of rows, with zeros of both signs
    kinds = np.where(kinds == 0, kinds, 1.0)
    warning = bnn.metrics.HealthWarning
    with pytest.warns(warning, match=r"fit: 392 of 400 rows repeat another"):
        Regressor("adf", **TINY).fit(kinds, kinds[:, :2])
    x, y, labels = many_rows()
    copied = np.r_[:100, :20]
    with pytest.warns(warning, match=r"fit: 20 of 120 rows repeat another"):
        Classifier("mean_field", **TINY).fit(x[copied], labels[copied])
    quiet = [
        (x[np.r_[:100, :11]], y[np.r_[:100, :11]]),  # 11 of 111, less than a tenth
        (kinds, random.normal(size=400)),
        (kinds, random.integers(0, 5, 400)),
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
    checks = {row["name"]: row for row in json.loads(model.idata_.attrs["health"])}
    assert checks["diverged"]["verdict"] == "ok"  # chains at fault are not there
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


@pytest.mark.parametrize(("method", "rows"), [("adf", 5), ("laplace", 6)])
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
            model = Regressor(method, widths=(5,), effort=0.1, random_state=seed)
            model.fit(x[:rows], y[:rows])
            low, high = model.predict_interval(x[rows:])
        said = " ".join(str(warning.message) for warning in seen)
        caught.append("rows hardly show the scale" in said)
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


@pytest.mark.filterwarnings("ignore:.*posterior sds from the mode")
@pytest.mark.parametrize(("targets", "heteroscedastic"), [(1, True), (2, False)])
def test_laplace_in_closed_form_is_the_mixture_of_its_draws(targets, heteroscedastic):
    """Mean, variance, quantiles and density need no draws, and are those of draws of
    the linearized network.
    """
    x, y, _ = many_rows()
    y = y if targets == 1 else np.stack([y, 7 - 3 * y], 1)
    options = {"widths": (4,), "num_samples": 20_000, "random_state": 0}
    model = Regressor("laplace", heteroscedastic=heteroscedastic, **options).fit(x, y)
    rows, count = x[:6], 20_000
    mean, sd = model.predict(rows, return_std=True)
    functions, draws = (
        model.sample(rows, count, noise=noise, random_state=0)
        for noise in (False, True)
    )
    # Five standard errors of Monte Carlo means, variances and shares.
    away = np.abs(functions.mean(0) - mean)
    assert_array_less(away, 5 * functions.std(0) / count**0.5)
    away = (draws - mean) ** 2
    assert_array_less(np.abs(away.mean(0) - sd**2), 5 * away.std(0) / count**0.5)
    for level in (0.02, 0.5, 0.9):
        low, high = model.predict_interval(rows, level=level)
        inside = ((low < draws) & (draws < high)).mean(0)
        assert_allclose(inside, level, atol=5 * 0.5 / count**0.5)
        below = (draws < low).mean(0)
        assert_allclose(below, (1 - level) / 2, atol=5 * 0.5 / count**0.5)


@pytest.mark.core
def test_laplace_is_exact_for_a_linear_model():
    """Without hidden layers, given the noise."""
    rows, y = X * np.array([2.0, 16.0]) + np.array([1.0, 20.0]), 500 + 128 * Y
    prior = bnn.priors.Normal(2.0)
    model = Regressor("laplace", widths=(), prior=prior, random_state=0).fit(rows, y)
    design = np.c_[(rows - rows.mean(0)) / rows.std(0), np.ones(24)]
    precision = ast.literal_eval(model.attrs_["prior_precision"])
    # The prior of the kernel is N(0, 2^2 / fan-in), that of the bias N(0, 2^2).
    of_kernel, of_bias = (precision[f"net/Dense_0.{n}"] for n in ("kernel", "bias"))
    prior = [2 * of_kernel / 4] * 2 + [of_bias / 4]
    mean, found = model.predict(rows), model.uncertainty(rows)
    # The log of the noise has a variance of 1 / (2 N), nearly.
    noise = np.sqrt(found.aleatoric[0] * np.exp(-1 / 24)) / y.std()
    cov = np.linalg.inv(design.T @ design / noise**2 + np.diag(prior))
    exact = design @ cov @ design.T @ ((y - y.mean()) / y.std()) / noise**2
    assert_allclose((mean - y.mean()) / y.std(), exact, atol=1e-3)
    variance = np.einsum("ni,ij,nj->n", design, cov, design)
    assert_allclose(found.epistemic / y.std() ** 2, variance, rtol=0.01)


def test_a_linear_network_has_no_symmetries():
    x, y, _ = many_rows()
    options = {"num_chains": 1, "effort": 0.1, "random_state": 0}
    model = Regressor("nuts", widths=(), **options).fit(x, y)
    assert model.attrs_["algorithm"] == "NUTS"
    design = np.c_[x, np.ones(160)]
    line = design @ np.linalg.lstsq(design, y, rcond=None)[0]
    assert np.abs(model.predict(x) - line).max() < 0.2 * np.std(y - line)
