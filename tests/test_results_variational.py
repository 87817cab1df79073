"""Results of SVI: draws with their log density and weights; ArviZ's LOO against exact values."""

import warnings

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
    params = {"auto_loc": jnp.asarray(mean), "auto_scale_tril": width * jnp.linalg.cholesky(jnp.asarray(covariance))}
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
    evidence = scipy.stats.multivariate_normal(np.zeros(N), SIGMA**2 * np.eye(N) + X @ X.T).logpdf(np.asarray(Y))
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
        sigma = numpyro.sample("sigma", dist.HalfNormal(1.0).expand([2]))
        shares = numpyro.sample("shares", dist.Dirichlet(jnp.ones(3)))
        numpyro.sample("y", dist.Normal(x[:, 0] * shares[0], sigma.sum()).to_event(1), obs=y)

    guide = AutoNormal(positive)
    svi = SVI(positive, guide, numpyro.optim.Adam(0.01), Trace_ELBO())
    result = svi.run(jax.random.key(0), 5, X, Y, progress_bar=False)
    idata = bnn.to_inference_data(result, guide=guide, args=(X, Y), num_samples=5, posterior_predictive=False)
    held = _arviz.group(idata, "posterior")
    stats = _arviz.group(idata, "sample_stats")
    for i, lp in enumerate(stats["lp"].to_numpy()[0]):
        draw = {name: jnp.asarray(held[name].to_numpy()[0, i]) for name in ("sigma", "shares")}
        u = {"sigma": jnp.log(draw["sigma"]), "shares": dist.biject_to(dist.constraints.simplex).inv(draw["shares"])}
        assert lp == pytest.approx(-float(potential_energy(positive, (X, Y), {}, u)), rel=1e-4)
        # In the weight, the Jacobians of model and guide cancel.
        scales = {n: dist.Normal(result.params[f"{n}_auto_loc"], result.params[f"{n}_auto_scale"]) for n in u}
        log_q = sum(float(scales[n].log_prob(u[n]).sum()) for n in u)
        assert stats["log_weight"].to_numpy()[0, i] == pytest.approx(lp - log_q, abs=2e-3)
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


@pytest.fixture(scope="module")
def chains():
    mcmc = MCMC(
        NUTS(model), num_warmup=200, num_samples=300, num_chains=2, progress_bar=False, chain_method="vectorized"
    )
    mcmc.run(jax.random.key(3), X, Y)
    return bnn.to_inference_data(mcmc, posterior_predictive=False)


@pytest.fixture(scope="module")
def null():
    """Draws of a guide at a model that ignores its inputs.

    Its mean of 1e-3 w_0 changes a density by less than 1e-2, so that draws differ: ArviZ refuses equal ones.
    """

    def constant(x, y=None, batch_size=None):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([D]).to_event(1))
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(1e-3 * w[0] * jnp.ones(len(x)), 1.0), obs=y)

    fitted, guide = fit_of(guide=AutoMultivariateNormal(constant))
    params = {"auto_loc": jnp.zeros(D), "auto_scale_tril": jnp.eye(D)}
    return export(fitted._replace(params=params), guide, num_samples=100)


def test_arviz_computes_loo_of_mcmc(chains):
    """600 draws, a relative error of at most about 0.5 / sqrt(600) = 0.02 in exp(elpd_n): seven of them."""
    found = az.loo(chains, pointwise=True)
    pointwise = found.loo_i if hasattr(found, "loo_i") else found.elpd_i
    elpd = found.elpd_loo if hasattr(found, "elpd_loo") else found.elpd
    assert np.max(found.pareto_k) < 0.7
    np.testing.assert_allclose(np.asarray(pointwise), exact_loo(), atol=0.15)
    assert float(elpd) == pytest.approx(exact_loo().sum(), abs=0.5)


def test_arviz_compares_models_by_our_results(chains, wide, null):
    """A chain, and guides whose draws ArviZ takes for draws of the posterior."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ArviZ 0.23 warns of deprecations in pandas
        models = {"null": null, "guide": wide, "chains": chains}
        table = az.compare(models, **({"round_to": "none"} if int(az.__version__.split(".")[0]) else {}))
    assert next(iter(table.index)) == "chains"
    assert list(table.index)[-1] == "null"
    difference = table["elpd_diff"].abs()
    assert float(difference.iloc[0]) == 0
    exact = exact_loo() - scipy.stats.norm(0, 1).logpdf(np.asarray(Y))
    assert float(difference["null"]) == pytest.approx(exact.sum(), abs=0.5)


def test_model_handlers_do_not_hide_the_guide(key):
    """A guide of a substituted model is exported like any other."""
    fixed = handlers.substitute(model, data={})
    svi = SVI(fixed, AutoNormal(fixed), numpyro.optim.Adam(0.01), Trace_ELBO())
    result = svi.run(key, 3, X, Y, progress_bar=False)
    idata = bnn.to_inference_data(result, guide=svi.guide, args=(X, Y), num_samples=5)
    assert "posterior_predictive" in _arviz.group_names(idata)
