"""AutoADF against the published equations, exact posteriors and integrals; `test_adf_guide.py` has it as a guide."""

import json
from itertools import pairwise, permutations
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from published_adf import Published
from scipy import integrate, stats
from scipy.special import expit

from numpyro_bnn import guides

ROOT = Path(__file__).resolve().parents[2]


def mostly_slow(rows, *fast):
    """Parameters of which all but the named ones are slow."""
    return [pytest.param(row, marks=() if row in fast else pytest.mark.slow, id=str(row)) for row in rows]


def learn(model, *args, means=None, num_epochs=1, seed=0, **options):
    """A guide and its result."""
    guide = guides.AutoADF(model)
    options |= {"num_epochs": num_epochs, "progress_bar": False}
    return guide, guide.run(jax.random.key(seed), *args, init_means=means, **options)


def linear_model(x, y=None, likelihood=lambda f: dist.Normal(f, 0.5)):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", likelihood(x @ w), obs=y)


# -- the published equations and figures ---------------------------------------------------------------


def published_model(x, y=None, sizes=()):
    """The network of the paper in plain NumPyro: nothing of ours."""
    precision = numpyro.sample("precision", dist.Gamma(6.0, 6.0))
    noise = numpyro.sample("noise", dist.Gamma(6.0, 6.0))
    h = x
    for layer, (inputs, outputs) in enumerate(pairwise(sizes)):
        w = numpyro.sample(f"w{layer}", dist.Normal(0.0, precision**-0.5).expand([outputs, inputs + 1]).to_event(2))
        h = jax.nn.relu(h) if layer else h
        h = jnp.concatenate([h, jnp.ones((x.shape[0], 1))], axis=1) @ w.T / (inputs + 1) ** 0.5
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(h[:, 0], noise**-0.5), obs=y)


def test_agrees_with_the_published_equations():
    """Step for step on two hidden layers: means, variances, both Gammas and the evidence; so each tests the other."""
    sizes, num_epochs, random = (3, 7, 5, 1), 2, np.random.default_rng(1)
    x = random.normal(size=(60, 3))
    y = np.sin(x[:, 0]) + 0.3 * x[:, 1] ** 2
    orders = np.stack([random.permutation(60) for _ in range(num_epochs)])
    starts = [random.normal(size=(o, i + 1)) / (i + 1) ** 0.5 for i, o in pairwise(sizes)]
    reference = Published(starts)
    evidence = [reference.epoch(x, y, order) for order in orders]
    means = {f"w{layer}": mean for layer, mean in enumerate(starts)}
    _, fit = learn(published_model, x, y, sizes=sizes, num_epochs=num_epochs, means=means, orders=orders)
    for layer in range(len(means)):
        weight = fit.state.weights[f"w{layer}"]
        assert weight.mean.dtype == np.float64  # also in a session of float32
        np.testing.assert_allclose(weight.mean, reference.m[layer], rtol=1e-8, atol=1e-8)
        np.testing.assert_allclose(weight.var, reference.v[layer], rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(fit.state.hyperparameters["noise"], (reference.a, reference.b), rtol=1e-8)
    np.testing.assert_allclose(fit.state.hyperparameters["precision"], (reference.a_w, reference.b_w), rtol=1e-8)
    np.testing.assert_allclose(-fit.losses, evidence, rtol=1e-5)
    assert fit.refused.max() == 0


# Sets on which we miss the reference by more than its standard error, and why.
APART = {"naval": "two constant columns are 0 here; as 1 or -1 (rounding error over rounding error) they give 3.770"}


def test_stored_figures_meet_the_reference():
    """The table of the page is that of the file, and no set is worse than the reference by a standard error."""
    from examples.benchmarks import adf_speed, adf_uci, shared

    rows = json.loads((ROOT / "docs" / "adf_uci.json").read_text())["rows"]
    assert {row["set"] for row in rows} >= set(shared.PBP) - {"protein"}
    page = (ROOT / "docs" / "adf.md").read_text()
    assert adf_uci.table(rows) in page
    assert adf_speed.table(json.loads((ROOT / "docs" / "adf_speed.json").read_text())) in page
    worse = set()
    for row in rows:
        (error, margin), (score, score_margin) = row["reference_rmse"], row["reference_log_likelihood"]
        if row["rmse"][0] > error + margin or row["log_likelihood"][0] < score - score_margin:
            worse.add(row["set"])
        assert row["refused"] < 0.01
    assert worse == set(APART)


@pytest.mark.slow
@pytest.mark.data
def test_boston_today_is_boston_as_stored(data_folder, tmp_path):
    """Four splits, 40 epochs, other starts: over starts the mean RMSE of four splits has an sd of 2.3 %, measured.

    12.5 % is five times it.
    """
    from examples.benchmarks import adf_uci

    options = ["--sets", "boston", "--splits", "4", "--seed", "1", "--data", str(data_folder)]
    report = adf_uci.main([*options, "--output", str(tmp_path / "uci.json")])
    stored = json.loads((ROOT / "docs" / "adf_uci.json").read_text())["rows"]
    (boston,) = (row for row in stored if row["set"] == "boston")
    assert report["rows"][0]["rmse"][0] == pytest.approx(np.mean(boston["by_split"]["rmse"][:4]), rel=0.125)


# -- one row: exact posteriors -------------------------------------------------------------------------


def test_one_weight_and_one_pass_are_exact_bayes():
    """For y ~ N(x w, s^2) with one weight the Gaussian update is Bayes' rule, point by point."""
    x, y = np.random.default_rng(0).normal(size=(2, 40))
    _, fit = learn(linear_model, x[:, None], y, means={"w": [0.0]})
    precision = 1.0 + (x**2).sum() / 0.25
    np.testing.assert_allclose(fit.state.weights["w"].var, 1 / precision, rtol=1e-10)
    np.testing.assert_allclose(fit.state.weights["w"].mean, (x * y).sum() / 0.25 / precision, rtol=1e-10)
    joint = stats.multivariate_normal(np.zeros(40), 0.25 * np.eye(40) + np.outer(x, x))
    assert -float(fit.losses[0]) == pytest.approx(joint.logpdf(y), rel=1e-5)


# Likelihood of the predictor f, its density at the target by SciPy, and the target.
LIKELIHOODS = {
    "Bernoulli probs": (lambda f: dist.Bernoulli(probs=jax.nn.sigmoid(f)), expit, 1),
    "Poisson softplus": (
        lambda f: dist.Poisson(jax.nn.softplus(2 * f + 0.1)),
        lambda f: stats.poisson.pmf(3, np.logaddexp(0, 2 * f + 0.1)),
        3,
    ),
    "StudentT": (lambda f: dist.StudentT(4.0, f, 0.7), lambda f: stats.t.pdf(1.3, 4, f, 0.7), 1.3),
    "Normal, location and scale from f": (
        lambda f: dist.Normal(f, 1 + jax.nn.softplus(f)),
        lambda f: stats.norm.pdf(1.3, f, 1 + np.logaddexp(0, f)),
        1.3,
    ),
    "Normal, f and its negative": (
        lambda f: dist.Normal(f, jnp.exp(0.5 - 0.5 * f)),
        lambda f: stats.norm.pdf(1.3, f, np.exp(0.5 - 0.5 * f)),
        1.3,
    ),
    "two outputs from f": (
        lambda f: dist.Normal(jnp.stack([f, 2 * f], -1), 1.0).to_event(1),
        lambda f: stats.norm.pdf(1.3, f) * stats.norm.pdf(-0.4, 2 * f),
        (1.3, -0.4),
    ),
    "three classes from f": (
        lambda f: dist.Categorical(logits=jnp.stack([-f, f, 0.5 * f], -1)),
        lambda f: np.exp(f) / (np.exp(-f) + np.exp(f) + np.exp(0.5 * f)),
        1,
    ),
    "classes by probabilities": (
        lambda f: dist.Categorical(probs=jax.nn.softmax(jnp.stack([-f, f], -1))),
        lambda f: expit(2 * f),
        1,
    ),
    "Beta": (
        lambda f: dist.Beta(1 + jnp.exp(f), 1 + jnp.exp(-f)),
        lambda f: stats.beta.pdf(0.3, 1 + np.exp(f), 1 + np.exp(-f)),
        0.3,
    ),
    "Normal scale": (lambda f: dist.Normal(0.2, jnp.exp(f)), lambda f: stats.norm.pdf(1.3, 0.2, np.exp(f)), 1.3),
}


@pytest.mark.parametrize("name", mostly_slow(LIKELIHOODS))
def test_other_likelihoods_match_the_tilted_moments(name):
    """One point, one weight: the posterior moments of ADF are those of prior x likelihood, integrated by SciPy.

    With 64 Gauss-Hermite points and v_f = 1 the hardest of these, Normal(0.2, exp(f)), is off by 3e-4.
    """
    likelihood, density, y = LIKELIHOODS[name]
    _, fit = learn(linear_model, np.ones((1, 1)), np.array([y]), likelihood=likelihood, means={"w": [0.0]})

    def integral(power):
        return integrate.quad(lambda f: f**power * density(f) * stats.norm.pdf(f), -12, 12, epsabs=1e-12)[0]

    z, first, second = (integral(power) for power in range(3))
    np.testing.assert_allclose(fit.state.weights["w"].mean, first / z, atol=5e-4)
    np.testing.assert_allclose(fit.state.weights["w"].var, second / z - (first / z) ** 2, atol=5e-4)
    assert -float(fit.losses[0]) == pytest.approx(np.log(z), abs=5e-4)


def test_outputs_that_share_a_noise_scale_are_integrated_together():
    """One row of two outputs: the posterior of the scale is one-dimensional."""
    y = np.array([[1.0, -2.0]])

    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        sigma = numpyro.sample("sigma", dist.LogNormal(0.0, 0.5))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Normal(x[:, None] * w, sigma).to_event(1), obs=y)

    _, fit = learn(model, np.ones(1), y, means={"w": np.zeros(2)})
    u = np.linspace(-6, 6, 20_001)
    density = stats.norm.pdf(u, 0, 0.5) * stats.norm.pdf(y.T, 0, np.sqrt(1 + np.exp(2 * u))).prod(0)
    total = np.trapezoid(density, u)
    mean = np.trapezoid(density * u, u) / total
    found = fit.state.hyperparameters["sigma"]
    np.testing.assert_allclose(found.mean, mean, rtol=1e-6)
    np.testing.assert_allclose(found.var, np.trapezoid(density * (u - mean) ** 2, u) / total, rtol=1e-6)
    assert -float(fit.losses[0]) == pytest.approx(np.log(total), rel=1e-6)


# -- many rows: filtering by fine grids ----------------------------------------------------------------


def filtered(x, y, log_likelihood):
    """Assumed density filtering of a linear model with standard normal weights; every integral on 20,001 points.

    Some rows move their predictor by more than 12 sd.
    """
    mean, var, evidence = np.zeros(x.shape[1]), np.ones(x.shape[1]), 0.0
    for row, target in zip(x, y, strict=True):
        loc, sd = row @ mean, np.sqrt(row**2 @ var)
        z = np.linspace(-100, 100, 20_001)
        for _ in range(3):
            log_p = log_likelihood(loc + sd * z, target) - 0.5 * z * z
            kept = z[log_p > log_p.max() - 60]
            step = z[1] - z[0]
            p = np.exp(log_p - log_p.max())
            moments = [(p * z**k).sum() / p.sum() for k in (1, 2)]
            log_z = np.log(p.sum() * step / np.sqrt(2 * np.pi)) + log_p.max()
            z = np.linspace(kept[0] - step, kept[-1] + step, 20_001)
        d_mean, d_var = moments[0] / sd, 0.5 * (moments[1] - 1) / sd**2
        mean = mean + var * row * d_mean
        var = var - var**2 * row**2 * (d_mean**2 - 2 * d_var)
        evidence += log_z
    return mean, np.sqrt(var), evidence


# Likelihood, its logarithm for the reference, scale of the inputs, and error allowed in posterior sd: the panels are
# cut at the mode, and not at a narrow transition far from it (the wide Bernoulli).
NARROW = {
    "Laplace": (lambda f: dist.Laplace(f, 0.5), lambda f, y: stats.laplace.logpdf(y, f, 0.5), 1, 0.01),
    "narrow Laplace": (lambda f: dist.Laplace(f, 0.05), lambda f, y: stats.laplace.logpdf(y, f, 0.05), 1, 0.01),
    "narrow Student": (lambda f: dist.StudentT(3.0, f, 0.1), lambda f, y: stats.t.logpdf(y, 3, f, 0.1), 1, 0.01),
    "Poisson": (lambda f: dist.Poisson(jnp.exp(f + 3)), lambda f, y: stats.poisson.logpmf(y, np.exp(f + 3)), 1, 0.01),
    "Binomial": (lambda f: dist.Binomial(100, logits=f), lambda f, y: stats.binom.logpmf(y, 100, expit(f)), 1, 0.01),
    "wide Bernoulli": (lambda f: dist.Bernoulli(logits=f), lambda f, y: y * f - np.logaddexp(0, f), 100, 0.07),
}


@pytest.mark.parametrize("features", [1, 3])
@pytest.mark.parametrize("name", mostly_slow(NARROW))
def test_narrow_likelihoods_match_exact_filtering(name, features):
    """60 rows; with 64 fixed nodes the log evidence was wrong by 1.1 to 20, and 2 to 90 % of the updates refused."""
    likelihood, log_likelihood, scale, tolerance = NARROW[name]
    random = np.random.default_rng(0)
    x = random.normal(size=(60, features)) * scale
    f = x @ np.array([0.8, -1.9, 0.5])[:features]
    y = {
        "Poisson": random.poisson(np.exp(np.minimum(f + 3, 6))),
        "Binomial": random.binomial(100, expit(f)),
        "wide Bernoulli": f > 0,
    }.get(name, f + random.laplace(size=60) * (0.5 if name == "Laplace" else 0.05))
    options = {"likelihood": likelihood, "orders": np.arange(60)[None], "means": {"w": np.zeros(features)}}
    _, fit = learn(linear_model, x, y.astype(float), **options)
    mean, sd, evidence = filtered(x, y, log_likelihood)
    assert fit.refused.max() == 0
    np.testing.assert_allclose((fit.state.weights["w"].mean - mean) / sd, 0, atol=tolerance)
    np.testing.assert_allclose(np.sqrt(fit.state.weights["w"].var), sd, rtol=tolerance)
    assert -float(fit.losses[0]) == pytest.approx(evidence, abs=0.02)


@pytest.mark.filterwarnings("ignore:AutoADF refused")
def test_data_that_contradict_the_model_are_refused():
    """y ~ Laplace(w, 0.01), 40 and 60 prior sd from the mean: beyond 50 of them the weight stays as it was."""

    def model(x, y=None):
        linear_model(x, y, lambda f: dist.Laplace(f, 0.01))

    guide, near = learn(model, np.ones((1, 1)), np.array([40.0]), means={"w": [0.0]})
    far = guide.run(
        jax.random.key(0),
        np.ones((1, 1)),
        np.array([60.0]),
        init_means={"w": [0.0]},
        num_epochs=1,
        progress_bar=False,
    )
    mean, sd, _ = filtered(np.ones((1, 1)), [40.0], lambda f, y: stats.laplace.logpdf(f, y, 0.01))
    assert (near.refused[0], far.refused[0]) == (0.0, 1.0)
    np.testing.assert_allclose((near.state.weights["w"].mean - mean) / sd, 0, atol=0.01)
    np.testing.assert_allclose(np.sqrt(near.state.weights["w"].var), sd, rtol=0.01)
    np.testing.assert_allclose(far.state.weights["w"], [[0.0], [1.0]], atol=1e-12)


def test_what_the_panels_do_not_resolve_is_refused_and_reported():
    """A likelihood that oscillates 200 times per unit of the predictor; rows without information are absorbed."""

    class Wave(dist.Normal):
        def log_prob(self, value):
            return 3 * jnp.sin(1300 * self.loc) * value

    y = np.array([1.0, 0.0])
    with pytest.warns(UserWarning, match="of the updates of weights in epoch 1, more than"):
        _, fit = learn(linear_model, np.ones((2, 1)), y, likelihood=lambda f: Wave(jnp.tanh(f), 1.0))
    assert float(fit.refused[0]) == 0.5
    assert np.isfinite(fit.losses).all()


# -- classes -------------------------------------------------------------------------------------------


def predicts_classes(classes):
    """A guide whose parameters are means and sds of independent logits."""

    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([classes]).to_event(1))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Categorical(logits=x * w), obs=y)

    return learn(model, np.ones((1, 1)), np.array([0]))[0]


def test_two_classes_are_exact(x64):
    """The difference of two independent normal logits is normal: one integral over it, by SciPy."""
    guide, mean = predicts_classes(2), np.array([0.3, -0.8])
    for var in ((0.5, 2.0), (3.0, 0.1), (1.0, 0.0)):
        params = {"w_auto_loc": mean, "w_auto_scale": np.sqrt(var)}
        for chosen in (0, 1):
            away = stats.norm(1.1 * (1 - 2 * chosen), np.sum(var) ** 0.5)
            expected = integrate.quad(lambda d, away=away: expit(d) * away.pdf(d), -20, 20, epsabs=1e-13)[0]
            score = guide.log_predictive_density(params, np.ones((1, 1)), np.array([chosen]))
            np.testing.assert_allclose(score[0], np.log(expected), rtol=1e-6)


@pytest.mark.parametrize("classes", mostly_slow([3, 4]))
def test_variance_of_class_probabilities(classes):
    """Logits of small variances: the linearization is off by their order, 0.02. By quadrature over all logits."""
    random = np.random.default_rng(classes)
    mean, var = random.normal(size=classes), random.uniform(0.005, 0.02, classes)
    node, weight = np.polynomial.hermite_e.hermegauss(12)
    grids = np.stack(np.meshgrid(*[node] * classes, indexing="ij"), -1) * np.sqrt(var) + mean
    share = np.prod(np.stack(np.meshgrid(*[weight / weight.sum()] * classes, indexing="ij"), -1), -1)
    probs = np.exp(grids) / np.exp(grids).sum(-1, keepdims=True)
    first, second = ((share[..., None] * probs**k).sum(tuple(range(classes))) for k in (1, 2))
    params = {"w_auto_loc": mean, "w_auto_scale": var**0.5}
    guide = predicts_classes(classes)
    found = guide.predictive_moments(params, np.ones((1, 1)), noise=False)
    np.testing.assert_allclose(found[0][0], first, rtol=0.02)
    np.testing.assert_allclose(found[1][0], second - first**2, rtol=0.02)
    np.testing.assert_allclose(found[0].sum(), 1, atol=1e-6)
    noisy = guide.predictive_moments(params, np.ones((1, 1)))
    np.testing.assert_allclose(noisy[1], noisy[0] * (1 - noisy[0]), atol=1e-6)


# -- predictions ---------------------------------------------------------------------------------------


def log_normal(m, v):
    mean = np.exp(m + v / 2)
    return mean, mean + mean**2 * np.expm1(v), mean**2 * np.expm1(v)


# Likelihood; E y, Var y and Var E[y | f] by the mean and variance of the predictor f.
PREDICTED = {
    "Normal": (lambda f: dist.Normal(f, 0.5), lambda m, v: (m, v + 0.25, v)),
    # log sigma ~ N(-0.5, 0.3^2): E sigma^2 = exp(-1 + 2 * 0.3^2)
    "Normal, random noise": (dist.Normal, lambda m, v: (m, v + np.exp(-0.82), v)),
    "Poisson": (lambda f: dist.Poisson(jnp.exp(f)), log_normal),
}


@pytest.mark.parametrize("name", mostly_slow(PREDICTED, "Normal, random noise", "Poisson"))
def test_predictive_moments_are_exact(name):
    """By hand, for parameters of our choice: with the noise of an observation and without it."""
    likelihood, moments = PREDICTED[name]

    def model(x, y=None):
        noise = [numpyro.sample("sigma", dist.HalfNormal(1.0))] if likelihood is dist.Normal else []
        linear_model(x, y, lambda f: likelihood(f, *noise))

    x = np.array([[1.0, -0.5], [0.3, 2.0]])
    guide, _ = learn(model, x, np.ones(2))
    loc, scale = np.array([0.4, -0.2]), np.array([0.3, 0.1])
    params = {"w_auto_loc": loc, "w_auto_scale": scale, "sigma_auto_loc": -0.5, "sigma_auto_scale": 0.3}
    mean, noisy, quiet = moments(x @ loc, x**2 @ scale**2)
    for noise, var in ((True, noisy), (False, quiet)):
        found = guide.predictive_moments(params, x, noise=noise)
        np.testing.assert_allclose(found[0], mean, rtol=1e-5)
        np.testing.assert_allclose(found[1], var, rtol=1e-5)


# -- random starts and orders --------------------------------------------------------------------------


@pytest.mark.slow
def test_random_starts_are_as_wide_as_the_prior_by_fan_in():
    """Masked rows teach nothing: the means stay where they started, N(loc, prior variance / fan-in)."""

    def model(x, mask, y=None):
        w = numpyro.sample("w", dist.Normal(3.0, 2.0).expand([50, 40]).to_event(2))
        tau = numpyro.sample("tau", dist.Gamma(3.0, 8.0))  # E 1 / tau = 4
        v = numpyro.sample("v", dist.Normal(-1.0, tau**-0.5).expand([2000]).to_event(1))
        numpyro.sample("y", dist.Normal(x * (w.sum() + v.sum()), 1.0).mask(mask), obs=y)

    keys, data = jax.random.split(jax.random.key(0), 2), (np.ones(1), np.array([False]), np.ones(1))
    fit = guides.AutoADF(model).run(keys, *data, num_epochs=1, progress_bar=False)
    for site, loc, sd in (("w", 3.0, 2 / 50**0.5), ("v", -1.0, 2 / 2000**0.5)):
        one, two = fit.params[f"{site}_auto_loc"]
        for means in (one, two):  # 2000 numbers: 4.5 standard errors of their mean and of their sd
            assert float(means.mean()) == pytest.approx(loc, abs=4.5 * sd / 2000**0.5)
            assert float(means.std()) == pytest.approx(sd, rel=4.5 / 4000**0.5)
        assert np.abs(np.corrcoef(np.ravel(one), np.ravel(two))[0, 1]) < 4.5 / 2000**0.5


@pytest.mark.slow
def test_rows_are_visited_in_a_random_order():
    """The result is that of one of the six orders of three rows, and 12 keys meet at least three of them.

    Three weights are taken as independent, so that each order has its own result.
    """
    x, y = np.random.default_rng(0).normal(size=(3, 3)), np.array([0.1, -0.4, 0.8])
    guide, count = guides.AutoADF(linear_model), 12
    orders = np.resize(list(permutations(range(3))), (count, 1, 3))
    keys = jax.random.split(jax.random.key(0), count)
    options = {"num_epochs": 1, "init_means": {"w": np.zeros((count, 3))}, "progress_bar": False}
    given, found = (
        guide.run(keys, x, y, orders=order, **options).state.weights["w"].mean for order in (orders, None)
    )
    same = [[np.allclose(one, other, rtol=1e-9, atol=1e-12) for other in given[:6]] for one in found]
    assert np.sum(same, axis=1).tolist() == [1] * count
    assert np.any(same, axis=0).sum() >= 3
