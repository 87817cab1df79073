"""Results of SVI: draws with their log density and weights; PSIS-LOO against exact values and against ArviZ."""

import warnings
from copy import deepcopy

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoLaplaceApproximation, AutoMultivariateNormal, AutoNormal
from numpyro.infer.svi import SVIRunResult
from numpyro.infer.util import potential_energy

import numpyro_bnn as bnn
from numpyro_bnn import _arviz
from numpyro_bnn.results.comparison import compare_loo, loo

pytestmark = pytest.mark.core

SIGMA, N, D = 0.5, 20, 2
X = jax.random.normal(jax.random.key(0), (N, D))
Y = X @ jnp.array([1.0, -1.0]) + SIGMA * jax.random.normal(jax.random.key(1), (N,))


def model(x, y=None, batch_size=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([D]).to_event(1))
    numpyro.deterministic("norm", jnp.sqrt(jnp.sum(w**2)))
    with numpyro.plate("data", len(x), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, SIGMA), obs=None if y is None else y[i])


def posterior(x, y):
    """Mean and covariance of the weights."""
    covariance = np.linalg.inv(np.eye(D) + x.T @ x / SIGMA**2)
    return covariance @ x.T @ y / SIGMA**2, covariance


def fit_of(width=1.0, guide=None):
    """A guide at the posterior, its standard deviations times ``width``, as a result of SVI."""
    mean, covariance = posterior(np.asarray(X, float), np.asarray(Y, float))
    params = {
        "auto_loc": jnp.asarray(mean),
        "auto_scale_tril": width * jnp.linalg.cholesky(jnp.asarray(covariance)),
    }
    return SVIRunResult(params, None, jnp.array([3.0, 2.0])), guide or AutoMultivariateNormal(model)


def export(result, guide, **options):
    options = {"kwargs": {"batch_size": 5}, "posterior_predictive": False, **options}
    return bnn.to_inference_data(result, guide=guide, args=(X, Y), **options)


@pytest.fixture(scope="module")
def wide():
    """Draws of a guide 1.5 times as wide as the posterior."""
    return export(*fit_of(1.5), num_samples=4000)


# ---------------------------------------------------------------------------------------------------- the export


def test_draws_have_their_log_density_and_weights(wide):
    held, stats = _arviz.group(wide, "posterior"), _arviz.group(wide, "sample_stats")
    assert stats["lp"].dims == stats["log_weight"].dims == ("chain", "draw")
    w = held["w"].to_numpy()[0]
    np.testing.assert_allclose(held["norm"].to_numpy()[0], np.linalg.norm(w, axis=1), rtol=1e-5)
    joint = scipy.stats.norm(0, 1).logpdf(w).sum(1) + scipy.stats.norm(w @ X.T, SIGMA).logpdf(Y).sum(1)
    np.testing.assert_allclose(stats["lp"].to_numpy()[0], joint, rtol=1e-4)
    mean, covariance = posterior(np.asarray(X), np.asarray(Y))
    log_q = scipy.stats.multivariate_normal(mean, 1.5**2 * covariance).logpdf(w)
    np.testing.assert_allclose(stats["log_weight"].to_numpy()[0], joint - log_q, atol=2e-3)


def test_attributes_judge_the_fit(wide):
    """4000 draws: bounds within four standard errors of their exact values."""
    about = _arviz.attrs(wide)
    evidence = scipy.stats.multivariate_normal(np.zeros(N), SIGMA**2 * np.eye(N) + X @ X.T).logpdf(
        np.asarray(Y)
    )
    # KL between Gaussians with covariances of ratio 1.5^2.
    divergence = 0.5 * D * (1.5**2 - 1 - np.log(1.5**2))
    assert abs(about["elbo"] - (evidence - divergence)) < 4 * about["elbo_se"]
    assert abs(about["iw_bound"] - evidence) < 4 * about["iw_se"] + 1e-3
    assert about["pareto_k"] < 0.5
    assert about["num_steps"] == 2
    assert about["final_loss"] == 2.0
    assert about["algorithm"] == "AutoMultivariateNormal"


def test_log_density_is_that_of_mcmc():
    """Of unconstrained values, as ``lp`` of MCMC is: minus NumPyro's potential energy."""

    def positive(x, y):
        sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
        shares = numpyro.sample("shares", dist.Dirichlet(jnp.ones(3)))
        numpyro.sample("y", dist.Normal(x[:, 0] * shares[0], sigma).to_event(1), obs=y)

    guide = AutoNormal(positive)
    svi = SVI(positive, guide, numpyro.optim.Adam(0.01), Trace_ELBO())
    result = svi.run(jax.random.key(0), 5, X, Y, progress_bar=False)
    idata = bnn.to_inference_data(result, guide=guide, args=(X, Y), num_samples=5, posterior_predictive=False)
    held = _arviz.group(idata, "posterior")
    for i, lp in enumerate(_arviz.group(idata, "sample_stats")["lp"].to_numpy()[0]):
        draw = {name: jnp.asarray(held[name].to_numpy()[0, i]) for name in ("sigma", "shares")}
        u = {
            "sigma": jnp.log(draw["sigma"]),
            "shares": dist.biject_to(dist.constraints.simplex).inv(draw["shares"]),
        }
        assert lp == pytest.approx(-float(potential_energy(positive, (X, Y), {}, u)), rel=1e-4)
    assert "last_rng_key" in _arviz.attrs(idata)


def test_without_log_likelihood_nothing_is_weighed():
    idata = export(*fit_of(), num_samples=10, log_likelihood=False)
    assert _arviz.group_names(idata)[0] == "posterior"
    assert "sample_stats" not in _arviz.group_names(idata)
    assert "elbo" not in _arviz.attrs(idata)


def test_guides_without_a_density_are_exported_without_weights(key):
    """AutoLaplaceApproximation is fitted as a point, and sampled as a Gaussian."""
    for guide in (AutoDelta(model), AutoLaplaceApproximation(model)):
        svi = SVI(model, guide, numpyro.optim.Adam(0.1), Trace_ELBO())
        result = svi.run(key, 200, X, Y, progress_bar=False)
        idata = export(result, guide, num_samples=50)
        assert "sample_stats" not in _arviz.group_names(idata)
        spread = _arviz.group(idata, "posterior")["w"].to_numpy().std(axis=1)
        assert (spread > 1e-3).all() == isinstance(guide, AutoLaplaceApproximation)


def test_parameters_of_the_model_are_those_learned(key):
    """Their values belong to the likelihood; the starting values would be wrong."""

    def learned(x, y=None):
        sigma = numpyro.param("sigma", 5.0, constraint=dist.constraints.positive)
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([D]).to_event(1))
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(x @ w, sigma), obs=y)

    mean, _ = posterior(np.asarray(X, float), np.asarray(Y, float))
    params = {"w_auto_loc": jnp.asarray(mean), "w_auto_scale": jnp.full(D, 0.1), "sigma": jnp.array(SIGMA)}
    idata = export(SVIRunResult(params, None, []), AutoNormal(learned), kwargs={}, num_samples=20)
    w = _arviz.group(idata, "posterior")["w"].to_numpy()[0]
    expected = scipy.stats.norm(w @ X.T, SIGMA).logpdf(Y)
    found = _arviz.group(idata, "log_likelihood")["y"].to_numpy()[0]
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_results_of_adf_are_weighed_too(key):
    pbp = bnn.guides.AutoADF(model)
    result = pbp.run(key, X, Y, num_epochs=2, progress_bar=False)
    idata = export(result, pbp, kwargs={}, num_samples=200)
    assert np.isfinite(_arviz.attrs(idata)["elbo"])


# ----------------------------------------------------------------------------------------------------------- LOO


def exact_loo():
    """log p(y_n | y_-n) of conjugate regression."""
    x, y = np.asarray(X, float), np.asarray(Y, float)
    values = []
    for n in range(N):
        rest = np.arange(N) != n
        mean, covariance = posterior(x[rest], y[rest])
        sd = np.sqrt(SIGMA**2 + x[n] @ covariance @ x[n])
        values.append(scipy.stats.norm(x[n] @ mean, sd).logpdf(y[n]))
    return np.array(values)


def test_loo_of_a_guide_is_about_the_posterior(wide):
    """Weighted draws of a wide guide give the exact values; draws taken for the posterior's do not.

    4000 draws, effectively 2000, have a relative error of at most about 0.5 / sqrt(2000) = 0.011 in exp(elpd_n):
    five of them.
    """
    exact = exact_loo()
    found = loo(wide)
    assert found.num_bad == 0
    np.testing.assert_allclose(found.pointwise, exact, atol=0.055)
    assert found.elpd == pytest.approx(exact.sum(), abs=0.2)
    assert found.se == pytest.approx(np.sqrt(N) * exact.std(), rel=0.1)
    x, y = np.asarray(X, float), np.asarray(Y, float)
    mean, covariance = posterior(x, y)
    inside = scipy.stats.norm(x @ mean, np.sqrt(SIGMA**2 + np.sum(x @ covariance * x, axis=1))).logpdf(y)
    assert found.p_loo == pytest.approx(inside.sum() - exact.sum(), abs=0.1)
    assert abs(loo(wide, weighted=False).elpd - exact.sum()) > 2 * abs(found.elpd - exact.sum())


@pytest.fixture(scope="module")
def chains():
    mcmc = MCMC(
        NUTS(model),
        num_warmup=200,
        num_samples=300,
        num_chains=2,
        progress_bar=False,
        chain_method="vectorized",
    )
    mcmc.run(jax.random.key(3), X, Y)
    return bnn.to_inference_data(mcmc, posterior_predictive=False)


def test_loo_of_mcmc_is_that_of_arviz(chains):
    # Values that are equal in float32 and lie at the threshold of the tail are left out by ArviZ, spread by us.
    chains = deepcopy(chains)
    values = chains["log_likelihood"]["y"]
    noise = np.random.default_rng(0).uniform(-1e-6, 1e-6, values.shape)
    chains["log_likelihood"]["y"] = values.astype(float) + noise
    found = loo(chains)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ArviZ warns of k-hat above its threshold
        theirs = az.loo(chains, pointwise=True)
    elpd, se, pointwise = (
        (theirs.elpd_loo, theirs.se, theirs.loo_i)
        if hasattr(theirs, "elpd_loo")
        else (theirs.elpd, theirs.se, theirs.elpd_i)
    )
    assert found.elpd == pytest.approx(float(elpd), abs=1e-5)
    assert found.se == pytest.approx(float(se), rel=0.03)  # ArviZ 1.x divides by N - 1
    np.testing.assert_allclose(found.pointwise, np.asarray(pointwise), atol=1e-5)
    np.testing.assert_allclose(found.pareto_k, np.asarray(theirs.pareto_k), atol=1e-3)
    np.testing.assert_allclose(found.pointwise, exact_loo(), atol=0.15)


def test_comparison_pairs_data_points(wide, chains):
    def constant(x, y=None, batch_size=None):
        numpyro.sample("w", dist.Normal(0.0, 1.0).expand([D]).to_event(1))
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(jnp.zeros(len(x)), 1.0), obs=y)

    null, guide = fit_of(guide=AutoMultivariateNormal(constant))
    params = {"auto_loc": jnp.zeros(D), "auto_scale_tril": jnp.eye(D)}
    poor = export(null._replace(params=params), guide, num_samples=100)
    table = compare_loo({"null": poor, "guide": wide, "chains": loo(chains)})
    assert {row.name for row in table.rows[:2]} == {"guide", "chains"}
    assert table.rows[0].name == table.best
    assert table.rows[0].difference == table.rows[0].difference_se == 0
    row = table.rows[2]
    pairs = loo(poor).pointwise - table.rows[0].loo.pointwise
    assert row.difference == pytest.approx(pairs.sum())
    assert row.difference_se == pytest.approx(np.sqrt(N) * pairs.std())
    # The other two are estimates of one quantity.
    assert abs(table.rows[1].difference) < 0.3
    lines = str(table).splitlines()
    assert lines[0].split() == ["model", "elpd", "se", "difference", "se", "p_loo", "bad", "k"]
    assert lines[3].split()[0] == "null"
    assert lines[3].endswith("0 of 20")


def test_errors_of_loo(wide):
    with pytest.raises(ValueError, match=r"argument `models` got \{\}"):
        compare_loo({})
    without = export(*fit_of(), num_samples=10, log_likelihood=False)
    with pytest.raises(ValueError, match=r"results\.loo: argument `idata` got results without"):
        loo(without)
    with pytest.raises(
        ValueError, match=r"results.compare_loo: argument `models\['a'\]` got results without"
    ):
        compare_loo({"a": without})
    with pytest.raises(ValueError, match="argument `var_name` got 'z'"):
        loo(wide, "z")
    with pytest.raises(ValueError, match="different numbers of data points"):
        compare_loo({"a": wide, "b": loo(wide)._replace(pointwise=np.zeros(3))})
    two = _arviz.inference_data(
        {"log_likelihood": _arviz.dataset({n: (("chain", "draw", "d"), np.zeros((1, 30, 2))) for n in "ab"})}
    )
    with pytest.raises(ValueError, match=r"Name one of the observed sites a, b\."):
        loo(two)
    assert loo(two, "a").elpd == pytest.approx(0.0, abs=1e-12)
    broken = _arviz.inference_data(
        {"log_likelihood": _arviz.dataset({"a": (("chain", "draw", "d"), np.full((1, 30, 2), np.nan))})}
    )
    with pytest.raises(ValueError, match="with 60 not finite"):
        loo(broken)
    with pytest.raises(TypeError, match="Pass the result of `to_inference_data`"):
        loo(3)


def test_model_handlers_do_not_hide_the_guide(key):
    """A guide of a substituted model is exported like any other."""
    fixed = handlers.substitute(model, data={})
    svi = SVI(fixed, AutoNormal(fixed), numpyro.optim.Adam(0.01), Trace_ELBO())
    result = svi.run(key, 3, X, Y, progress_bar=False)
    idata = bnn.to_inference_data(result, guide=svi.guide, args=(X, Y), num_samples=5)
    assert "posterior_predictive" in _arviz.group_names(idata)
