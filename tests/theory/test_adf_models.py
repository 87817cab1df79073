"""AutoADF on priors, scales, noise and masks of many kinds, against posteriors integrated on grids of our own."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import SVI, Trace_ELBO
from scipy import stats

from numpyro_bnn import guides


def mostly_slow(rows, *fast):
    """Parameters of which all but the named ones are slow."""
    return [pytest.param(row, marks=() if row in fast else pytest.mark.slow, id=str(row)) for row in rows]


def learn(model, *args, means=None, num_epochs=1, orders=None):
    """A guide and its result."""
    guide, options = guides.AutoADF(model), {"num_epochs": num_epochs, "orders": orders, "progress_bar": False}
    return guide, guide.run(jax.random.key(0), *args, init_means=means, **options)


def moments(at, log_density):
    """Mean and variance of a density on a grid."""
    density = np.exp(log_density - log_density.max())
    mean = (density * at).sum() / density.sum()
    return mean, (density * (at - mean) ** 2).sum() / density.sum()


# -- priors of the predictor ---------------------------------------------------------------------------

INTERCEPTS = {
    "StudentT": (lambda: dist.StudentT(4.0, 0.0, 3.0), lambda b: stats.t.logpdf(b, 4, 0, 3)),
    "Laplace": (lambda: dist.Laplace(0.0, 30.0), lambda b: stats.laplace.logpdf(b, 0, 30)),
    "mixture": (
        lambda: dist.MixtureSameFamily(dist.Categorical(jnp.full(2, 0.5)), dist.Normal(0.0, jnp.array([2.0, 6.0]))),
        lambda b: np.log(stats.norm.pdf(b, 0, 2) + stats.norm.pdf(b, 0, 6)),
    ),
}


@pytest.mark.parametrize("name", mostly_slow(INTERCEPTS))
def test_an_intercept_with_any_prior_is_learned(name):
    """40 points around 5: the posterior of the intercept is one-dimensional.

    A normal of the same moments stands for the prior. Where the slopes of the two log densities differ by d, the mean
    is off by d posterior variances: by at most 0.04 standard deviations here, and the variance by less than 2 %.
    """
    prior, log_prior = INTERCEPTS[name]
    y, b = 5 + np.random.default_rng(0).normal(size=40), np.linspace(0, 10, 4001)

    def model(y):
        numpyro.sample("y", dist.Normal(numpyro.sample("b", prior()), 1.0), obs=y)

    _, fit = learn(model, y, means={"b": 0.0})
    mean, var = moments(b, log_prior(b) + stats.norm.logpdf(y[:, None], b).sum(0))
    assert float(fit.state.weights["b"].mean) == pytest.approx(mean, abs=0.04 * var**0.5)
    assert float(fit.state.weights["b"].var) == pytest.approx(var, rel=0.02)


BOUNDED = {
    "HalfNormal intercept": (lambda: dist.HalfNormal(4.0), lambda w, b: w + b),
    "Uniform intercept": (lambda: dist.Uniform(0.0, 10.0), lambda w, b: w + b),
    "amplitude": (lambda: dist.HalfNormal(4.0), lambda w, b: w * b),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BOUNDED)
def test_a_bounded_site_in_the_predictor_is_learned(name):
    """y ~ N(form(x w, b), 1): the predictions against a grid over both unknowns.

    One pass over 60 points. w and b are taken as independent, which moves the means by half an sd and makes the sd of
    a product (w b) up to 1.7 times as large. Unlearned, b stays at 2.1 or 5, and the means are off by more.
    """
    prior, form = BOUNDED[name]
    random = np.random.default_rng(0)
    x = random.normal(size=60)
    y = form(0.5 * x, 3.0) + random.normal(size=60)

    def model(x, y=None):
        w, b = numpyro.sample("w", dist.Normal(0.0, 1.0)), numpyro.sample("b", prior())
        numpyro.sample("y", dist.Normal(form(w * x, b), 1.0), obs=y)

    guide, fit = learn(model, x, y, means={"w": 0.0})
    w, b = np.meshgrid(np.linspace(-3, 3, 301), np.linspace(0.001, 9.999, 500), indexing="ij")
    f = form(w[..., None] * x, b[..., None])
    log_density = stats.norm.logpdf(y, f).sum(-1) + stats.norm.logpdf(w) + np.asarray(prior().log_prob(b))
    posterior = np.exp(log_density - log_density.max())
    posterior /= posterior.sum()
    mean = np.einsum("ij,ijn->n", posterior, f)
    sd = np.sqrt(np.einsum("ij,ijn->n", posterior, (f - mean) ** 2))
    found, var = guide.predictive_moments(fit.params, x, noise=False)
    assert np.max(np.abs(found - mean) / sd) < 0.6
    assert np.all((0.7 * sd < np.sqrt(var)) & (np.sqrt(var) < 1.7 * sd))


# -- scales and noise ----------------------------------------------------------------------------------

SCALES = {
    "HalfNormal": (lambda: dist.HalfNormal(2.0), lambda s: stats.halfnorm.logpdf(s, scale=2)),
    "InverseGamma": (lambda: dist.InverseGamma(3.0, 2.0), lambda s: stats.invgamma.logpdf(s, 3, scale=2)),
    "Gamma": (lambda: dist.Gamma(5.0, 5.0), lambda s: stats.gamma.logpdf(s, 5, scale=0.2)),
}


@pytest.mark.parametrize("name", mostly_slow(SCALES, "Gamma"))
def test_learned_scale_matches_the_exact_posterior(name):
    """80 weights seen almost exactly: the posterior of their scale is one-dimensional.

    The scale enters as itself here, so that even a Gamma is refined by quadrature.
    """
    prior, log_prior = SCALES[name]
    y, u = 0.7 * np.random.default_rng(0).normal(size=80), np.linspace(-3, 3, 4001)

    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal(0.0, numpyro.sample("scale", prior())).expand([80]).to_event(1))
        numpyro.sample("y", dist.Normal(w[x], 0.01), obs=y)

    _, fit = learn(model, np.arange(80), y, num_epochs=3)
    mean, var = moments(u, log_prior(np.exp(u)) + u + stats.norm.logpdf(y[:, None], 0, np.exp(u)).sum(0))
    found = fit.state.hyperparameters["scale"]
    # 1.5e-2 of a posterior sd of 0.08 is the effect of three passes over data of sd 0.01 on the cavities.
    assert float(found.mean) == pytest.approx(mean, abs=2e-3)
    assert float(found.var) == pytest.approx(var, rel=0.02)


def test_weights_of_a_learned_scale_have_their_exact_moments():
    """Four weights, each seen once with sd 1: after one epoch the cavities are exact, and so are the moments.

    Averages over the posterior of the scale; a fifth of the last variance is that of the means.
    """
    loc, away = np.array([0.7, -2.0, 0.0, 1.0]), np.array([0.5, -1.0, 2.0, 5.0])

    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal(loc, numpyro.sample("scale", dist.HalfNormal(2.0))).to_event(1))
        numpyro.sample("y", dist.Normal(w[x], 1.0), obs=y)

    _, fit = learn(model, np.arange(4), loc + away, means={"w": loc})
    scale = np.linspace(1e-3, 15, 8001)
    density = stats.norm.pdf(scale, 0, 2) * stats.norm.pdf(away[:, None], 0, np.sqrt(1 + scale**2)).prod(0)
    density /= density.sum()
    var = 1 / (1 + 1 / scale**2)
    mean = loc[:, None] + var * away[:, None]
    first, second = (density * mean).sum(1), (density * (var + mean**2)).sum(1)
    np.testing.assert_allclose(fit.state.weights["w"].mean, first, rtol=1e-3)
    np.testing.assert_allclose(fit.state.weights["w"].var, second - first**2, rtol=1e-3)


def test_noise_with_any_prior_is_near_its_posterior():
    """One pass over 400 points with known mean: log sigma has posterior mean log s + O(1/N) and variance 1 / 2N."""

    def model(x, y=None):
        sigma, w = numpyro.sample("sigma", dist.HalfCauchy(1.0)), numpyro.sample("w", dist.Normal(0.0, 1e-3))
        numpyro.sample("y", dist.Normal(w * x, sigma), obs=y)

    y = 0.4 * np.random.default_rng(0).normal(size=400)
    found = learn(model, np.ones(400), y)[1].state.hyperparameters["sigma"]
    # ADF orders the points at random: a spread of a third of the posterior sd (0.035) is usual for it.
    assert float(found.mean) == pytest.approx(np.log(np.sqrt((y**2).mean())), abs=0.035)
    assert float(found.var) == pytest.approx(1 / 800, rel=0.3)


@pytest.mark.slow
def test_sites_in_their_own_plates():
    """Weights and scales in plates, written by hand; ARD over the features of a linear model."""

    def model(x, y=None):
        with numpyro.plate("features", x.shape[1]):
            w = numpyro.sample("w", dist.Normal(0.0, numpyro.sample("tau", dist.Gamma(4.0, 4.0)) ** -0.5))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w, 0.1), obs=y)

    x = np.random.default_rng(0).normal(size=(200, 3))
    y = x @ np.array([3.0, 0.0, 0.01])
    guide, fit = learn(model, x, y, num_epochs=3)
    tau = fit.state.hyperparameters["tau"]
    # Given w the mean of tau is (4 + 1/2) / (4 + w^2 / 2): 0.53 and 1.125. The published update of a Gamma takes the
    # Student t that it implies for w as normal, which costs 3 % at w = 0 and 30 % at w = 3.
    np.testing.assert_allclose((tau.concentration / tau.rate)[1:], 1.125, rtol=0.05)
    assert 0.3 < float(tau.concentration[0] / tau.rate[0]) < 0.53
    svi = SVI(model, guide, numpyro.optim.Adam(1e-3), Trace_ELBO())
    state = svi.init(jax.random.key(0), x, y, init_params=fit.params)
    assert np.isfinite(svi.evaluate(state, x, y))


# -- masks ---------------------------------------------------------------------------------------------


def by_handler(fn, mask, y):
    with numpyro.plate("data", len(y)), numpyro.handlers.mask(mask=mask):
        numpyro.sample("y", fn, obs=y)


def around_the_plate(fn, mask, y):
    with numpyro.handlers.mask(mask=mask), numpyro.plate("data", len(y)):
        numpyro.sample("y", fn.mask(True), obs=y)


def of_the_distribution(fn, mask, y):
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", fn.mask(mask), obs=y)


def of_a_minibatch(fn, mask, y):
    with numpyro.plate("data", len(y), subsample_size=2) as i, numpyro.handlers.mask(mask=mask[i]):
        numpyro.sample("y", fn, obs=y[i])


def without_a_plate(fn, mask, y):
    numpyro.sample("y", fn.expand(y.shape).mask(mask), obs=y)


def learn_mean(y, mask, observe, likelihood=lambda w: dist.Normal(w, 1.0), orders=None):
    def model(y, mask):
        observe(likelihood(numpyro.sample("w", dist.Normal(0.0, 1.0))), mask, y)

    return learn(model, y, np.array(mask), means={"w": 0.0}, orders=orders)


MASKED = (by_handler, around_the_plate, of_the_distribution, of_a_minibatch, without_a_plate)


@pytest.mark.parametrize(
    "observe",
    [pytest.param(fn, marks=[] if fn is of_the_distribution else pytest.mark.slow, id=fn.__name__) for fn in MASKED],
)
def test_masked_rows_are_left_out(observe):
    """A conjugate mean: y = (1, 1, 50, 50) with the last two masked is N(2/3, 1/3); all masked is the prior."""
    y, two = np.array([1.0, 1.0, 50.0, 50.0]), stats.multivariate_normal([0, 0], np.eye(2) + 1).logpdf([1.0, 1.0])
    for mask, mean, var, evidence in (([True, True, False, False], 2 / 3, 1 / 3, two), ([False] * 4, 0.0, 1.0, 0.0)):
        guide, fit = learn_mean(y, mask, observe)
        np.testing.assert_allclose(fit.state.weights["w"], [mean, var], rtol=1e-12)
        assert -float(fit.losses[0]) == pytest.approx(evidence, rel=1e-5)
        score = guide.log_predictive_density(fit.params, y, np.array(mask))
        assert np.all((np.asarray(score) == 0) == ~np.array(mask))


# Likelihood, a value that is seen and one that is masked.
MASKED_LIKELIHOODS = {
    "Gamma noise": (lambda w: dist.Normal(w, numpyro.sample("tau", dist.Gamma(6.0, 6.0)) ** -0.5), 1.0, 50.0),
    "Student t": (lambda w: dist.StudentT(4.0, w, numpyro.sample("s", dist.LogNormal(0.0, 0.25))), 1.0, 50.0),
    "Poisson, invalid where masked": (lambda w: dist.Poisson(jnp.exp(w)), 2, -7),
    "Bernoulli": (lambda w: dist.Bernoulli(logits=w), 1, 0),
    "Categorical, invalid where masked": (lambda w: dist.Categorical(logits=w * jnp.array([0.0, 1.0])), 1, 9),
}


@pytest.mark.parametrize("name", mostly_slow(MASKED_LIKELIHOODS, "Gamma noise"))
def test_masked_rows_do_not_count_under_any_likelihood(name):
    """Fitting with masked rows is fitting without them, whatever their values."""
    likelihood, seen, hidden = MASKED_LIKELIHOODS[name]
    mask = np.array([False, True, False, True])
    found = [
        learn_mean(y, known, by_handler, likelihood, np.arange(len(y))[None])[1]
        for y, known in ((np.where(mask, seen, hidden), mask), (np.full(2, seen), [True] * 2))
    ]
    for with_masked, without in zip(*(jax.tree.leaves(fit.state) for fit in found), strict=True):
        np.testing.assert_allclose(with_masked, without, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found[0].losses, found[1].losses, rtol=1e-6)


@pytest.mark.parametrize("event", [pytest.param(False, id="outputs"), pytest.param(True, id="rows")])
@pytest.mark.slow
def test_masked_outputs_of_one_row(event):
    """Two outputs per row with their own weights: a mask inside ``to_event`` hides outputs, outside whole rows."""
    y = np.array([[1.0, 50.0], [2.0, 3.0]])
    mask = np.array([True, False]) if event else np.array([[True, False], [True, True]])

    def model(x, y, mask):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        fn = dist.Normal(x[:, None] * w, 1.0)
        numpyro.sample("y", fn.to_event(1).mask(mask) if event else fn.mask(mask).to_event(1), obs=y)

    _, fit = learn(model, np.ones(2), y, mask, means={"w": np.zeros(2)})
    expected = ((0.5, 25.0), (1 / 2, 1 / 2)) if event else ((1.0, 1.5), (1 / 3, 1 / 2))
    np.testing.assert_allclose(fit.state.weights["w"], expected, rtol=1e-12)
