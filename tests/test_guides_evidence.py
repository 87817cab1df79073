"""Judging fits: bounds against exact evidences, honest errors, k-hat.

Conjugate linear regression has a Gaussian posterior with precision P, for which everything is known: log p(D), the
optimum of mean field (the posterior mean, variances 1 / P_ii) and its distance from the posterior,
KL(q || p) = (sum log P_ii - log det P) / 2.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
import scipy.stats
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import (
    AutoDelta,
    AutoGuideList,
    AutoMultivariateNormal,
    AutoNormal,
)

from numpyro_bnn._arviz import pareto_smoothed
from numpyro_bnn.guides import evidence, summarize

SIGMA, N, D = 0.5, 30, 3
X = jax.random.normal(jax.random.key(0), (N, D)) + 1.0
Y = X @ jnp.array([1.0, -1.0, 0.5]) + SIGMA * jax.random.normal(jax.random.key(1), (N,))
X64, Y64 = np.asarray(X, np.float64), np.asarray(Y, np.float64)
PRECISION = np.eye(D) + X64.T @ X64 / SIGMA**2
MEAN = np.linalg.solve(PRECISION, X64.T @ Y64 / SIGMA**2)
LOG_Z = scipy.stats.multivariate_normal(np.zeros(N), SIGMA**2 * np.eye(N) + X64 @ X64.T).logpdf(Y64)
KL = 0.5 * (np.log(np.diag(PRECISION)).sum() - np.linalg.slogdet(PRECISION)[1])


def log_weights(guide, params, *args, **kwargs):
    return evidence(guide, params, *args, **kwargs).log_weights


def model(x, y, batch_size=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([D]).to_event(1))
    with numpyro.plate("data", len(x), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, SIGMA), obs=y[i])


def mean_field(width=1.0):
    """Parameters of the best AutoNormal, its standard deviations times ``width``."""
    return {"w_auto_loc": jnp.asarray(MEAN), "w_auto_scale": jnp.asarray(width / np.sqrt(np.diag(PRECISION)))}


def full_rank():
    tril = np.linalg.cholesky(np.linalg.inv(PRECISION))
    return {"auto_loc": jnp.asarray(MEAN), "auto_scale_tril": jnp.asarray(tril)}


@pytest.fixture(scope="module")
def guide():
    """One mean field for all tests that may share its compiled program."""
    return AutoNormal(model)


@pytest.fixture(scope="module")
def many(guide):
    """Log weights of mean fields, as narrow as best and twice as wide, enough for repetitions: 400 times 200."""
    key = jax.random.key(2)
    return {
        width: log_weights(guide, mean_field(width), X, Y, rng_key=key, num_samples=80_000) for width in (1.0, 2.0)
    }


# ------------------------------------------------------------------------------------------------- the bounds


def test_the_exact_posterior_has_the_evidence_as_bound(key):
    """All weights are p(D), up to the rounding of log densities near 100 in float32."""
    found = evidence(AutoMultivariateNormal(model), full_rank(), X, Y, rng_key=key)
    assert found.elbo == pytest.approx(LOG_Z, abs=1e-3)
    assert found.iw_bound == pytest.approx(LOG_Z, abs=1e-3)
    assert max(found.elbo_se, found.iw_se) < 1e-4
    assert found.pareto_k < 0.5
    assert found.ess == pytest.approx(1000, rel=1e-4)
    assert found.num_observations == N
    assert found.verdict == "good"


def test_masked_values_are_not_counted_as_observations(key):
    def masked(x, y, rows):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", 6), numpyro.handlers.mask(mask=rows):
            numpyro.sample("y", dist.Normal(w, 1.0), obs=y)
        pairs = dist.Normal(w, 1.0).expand([6, 2]).mask(jnp.array([True, False])).to_event(1)
        numpyro.sample("v", pairs.mask(x > 0), obs=jnp.stack([y, y], -1))
        numpyro.sample("off", dist.Normal(w, 1.0).mask(False), obs=jnp.zeros(3))

    guide = AutoNormal(masked)
    params = {"w_auto_loc": jnp.zeros(()), "w_auto_scale": jnp.ones(())}
    x, rows = jnp.arange(6.0) - 1, jnp.arange(6) < 4
    found = evidence(guide, params, x, jnp.zeros(6), rows, rng_key=key, num_samples=5)
    assert found.num_observations == 4 + 4


def test_mean_field_has_the_elbo_of_theory(many):
    """Mean of 80,000: within four standard errors, a chance of 6e-5; the importance bound closes the gap."""
    found = summarize(many[1.0])
    assert KL > 0.5  # or there would be nothing to close
    assert abs(found.elbo - (LOG_Z - KL)) < 4 * found.elbo_se
    wide = summarize(many[2.0])
    assert abs(wide.iw_bound - wide.iw_bias - LOG_Z) < 4 * wide.iw_se
    assert wide.elbo < LOG_Z - 0.5


def test_standard_errors_are_honest(many):
    """Over 400 repetitions with 200 draws of a guide twice as wide: errors, coverage and bias are those reported."""
    # The fourth moment of the weights is finite, so that the variance of their variance is.
    assert np.linalg.eigvalsh(4 * PRECISION - 3 * np.diag(np.diag(PRECISION)) / 4)[0] > 0
    found = [summarize(part) for part in many[2.0].reshape(400, 200)]
    elbo, elbo_se, bound, bound_se, bias = (
        np.array([getattr(one, name) for one in found])
        for name in ("elbo", "elbo_se", "iw_bound", "iw_se", "iw_bias")
    )
    exact = many[2.0].mean()  # known 20 times better than from 200 draws
    # A standard deviation of 400 values has a relative error near 1 / sqrt(800) = 3.5 %, coverage of 95 % one of
    # 1.1 %: four of them.
    assert elbo.std() / elbo_se.mean() == pytest.approx(1.0, abs=0.14)
    assert bound.std() / bound_se.mean() == pytest.approx(1.0, abs=0.14)
    assert np.mean(np.abs(elbo - exact) < 1.96 * elbo_se) > 0.95 - 4 * 0.011
    assert np.mean(np.abs(bound - bias - LOG_Z) < 1.96 * bound_se) > 0.95 - 4 * 0.011
    # The bias is a mean of 400, known to its standard error.
    assert abs(bound.mean() - LOG_Z - bias.mean()) < 4 * bound.std() / 20
    assert bias.mean() < 0


def test_no_good_verdict_where_the_variance_is_infinite(many):
    """2 P - diag(P) is not positive definite: weights of the best mean field have no variance, the bound no error."""
    assert np.linalg.eigvalsh(2 * PRECISION - np.diag(np.diag(PRECISION)))[0] < 0
    assert summarize(many[1.0]).verdict != "good"


@pytest.mark.parametrize(("width", "least", "most"), [(2.0, -np.inf, 0.5), (0.1, 0.7, np.inf)])
def test_k_hat_separates_a_wide_guide_from_a_narrow_one(guide, key, width, least, most):
    """A guide wider than the posterior in all directions has bounded weights; for one narrower by 0.1 in standard
    deviation the tail index is 1 - 0.1^2 along each axis (estimates from 4000 draws: 0.9 to 1.2)."""
    found = evidence(guide, mean_field(width), X, Y, rng_key=key, num_samples=4000)
    assert least < found.pareto_k < most
    assert found.verdict == ("unreliable" if width < 1 else "good")


@pytest.mark.parametrize("k", [0.2, 0.5, 0.9])
def test_k_hat_of_known_tails(k):
    """w = exp(k E) with E exponential has a Pareto tail of index k: 20 estimates from 4000 draws, of which each has a
    standard deviation near 0.08; the prior of the estimator (k = 0.5 with 10 of about 190 observations) shifts it by
    less than 0.03."""
    draws = k * np.random.default_rng(0).exponential(size=(20, 4000))
    found = pareto_smoothed(draws)[1]
    assert found.mean() == pytest.approx(k, abs=0.03 + 4 * 0.08 / np.sqrt(20))


def test_edge_cases_of_k_hat():
    normal = np.random.default_rng(1).normal(size=400)
    zero = np.where(np.arange(400) < 100, -np.inf, normal)
    weights, k = pareto_smoothed(np.stack([np.zeros(400), zero]))
    assert k[0] == -np.inf
    assert np.isfinite(k[1])
    assert np.exp(weights).sum(axis=1) == pytest.approx([1.0, 1.0])
    assert np.isneginf(weights[1, :100]).all()
    assert np.isnan(pareto_smoothed(normal[:24])[1])
    assert np.isnan(pareto_smoothed(np.r_[np.nan, normal])[1])


# -------------------------------------------------------------------------------------- what it is computed on


def test_minibatches_make_no_difference(guide, key):
    full = log_weights(guide, mean_field(), X, Y, rng_key=key, num_samples=20)
    batched = log_weights(guide, mean_field(), X, Y, rng_key=key, num_samples=20, batch_size=7)
    np.testing.assert_allclose(full, batched, rtol=1e-6)


def test_arrays_of_numpy_serve_as_well(guide, key):
    ours, theirs = (
        log_weights(guide, mean_field(), x, y, rng_key=key, num_samples=20)
        for x, y in ((X, Y), (np.asarray(X), np.asarray(Y)))
    )
    np.testing.assert_array_equal(ours, theirs)


def test_chunks_make_no_difference(guide, key):
    whole, parts = (
        log_weights(guide, mean_field(), X, Y, rng_key=key, num_samples=20, draws_per_chunk=size) for size in (20, 6)
    )
    np.testing.assert_allclose(whole, parts, rtol=1e-6)


def test_both_kinds_of_keys_and_no_second_compilation(compiled):
    guide = AutoNormal(model)
    typed = log_weights(guide, mean_field(), X, Y, rng_key=jax.random.key(5), num_samples=20)
    legacy = log_weights(guide, mean_field(), X, Y, rng_key=jax.random.PRNGKey(5), num_samples=20)
    np.testing.assert_array_equal(typed, legacy)
    other, params, rng_key = 2 * Y, mean_field(2.0), jax.random.key(6)
    before = len(compiled)
    for again in (guide, AutoNormal(model)):
        log_weights(again, params, X, other, rng_key=rng_key, num_samples=20)
    assert len(compiled) == before


def test_a_guide_with_auxiliary_variables_keeps_its_bound(key):
    """q(z) is the posterior, made of two normals; with the exact reverse r(u | z) the bound is tight."""
    y, half = 1.0, 0.5**0.5  # posterior N(1/2, 1/2)

    def small(y):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(z, 1.0), obs=y)

    def auxiliary(y):
        u = numpyro.sample("u", dist.Normal(0.0, half * half), infer={"is_auxiliary": True})
        z = numpyro.sample("z", dist.Normal(0.5 + u, half * half))
        # r(u | z), the exact conditional: with it the bound is tight.
        r = dist.Normal((z - 0.5) / 2, half * half / 2**0.5)
        numpyro.factor("reverse", -r.log_prob(u))

    found = evidence(auxiliary, {}, y, rng_key=key, model=small)
    assert found.elbo == pytest.approx(scipy.stats.norm(0, 2**0.5).logpdf(y), abs=1e-5)
    assert found.elbo_se < 1e-6


def test_parameters_of_the_model_are_used(key):
    def learned(x, y):
        numpyro.param("offset", 0.0)
        handlers.substitute(model, data={})(x, y)
        numpyro.factor("shift", numpyro.param("offset", 0.0))

    params = {**mean_field(), "offset": 3.0}
    found = log_weights(AutoNormal(learned), params, X, Y, rng_key=key, num_samples=5)
    plain = log_weights(AutoNormal(model), mean_field(), X, Y, rng_key=key, num_samples=5)
    np.testing.assert_allclose(found - plain, 3.0, atol=1e-4)


@pytest.mark.slow
def test_guides_trained_by_svi(key):
    """Guides of other kinds, a positive site, a list of guides: ELBO as from NumPyro's own estimator."""

    def positive(x, y):
        sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([D]).to_event(1))
        numpyro.sample("y", dist.Normal(x @ w, sigma).to_event(1), obs=y)

    def of_list(model):
        guides = AutoGuideList(model)
        guides.append(AutoNormal(handlers.block(model, hide=["w"]), prefix="a"))
        guides.append(AutoMultivariateNormal(handlers.block(model, hide=["sigma"]), prefix="b"))
        return guides

    for make in (AutoMultivariateNormal, of_list):
        guide = make(positive)
        svi = SVI(positive, guide, optax.adam(0.02), Trace_ELBO(num_particles=4000))
        state = svi.init(key, X, Y)
        params = svi.get_params(state)
        found = evidence(guide, params, X, Y, rng_key=key, num_samples=4000)
        error = np.hypot(found.elbo_se, found.elbo_se)
        assert abs(found.elbo + float(svi.evaluate(state, X, Y))) < 4 * error


# --------------------------------------------------------------------------------------------- report and errors


def test_report(guide, key):
    report = str(evidence(guide, mean_field(), X, Y, rng_key=key))
    assert re.search(
        r"Evidence from 1000 draws of the guide, 30 observations\n  ELBO +-?\d+\.\d\d ± 0\.\d\d\n", report
    )
    assert re.search(r"PSIS k-hat +-?0\.\d\d  (good|usable): ", report)
    bad = str(evidence(guide, mean_field(0.1), X, Y, rng_key=key))
    assert "unreliable: the guide misses part of the posterior" in bad


def test_effective_draws_of_unequal_weights():
    """(sum w)^2 / sum w^2, and the standard error of the mean weight over the mean weight."""
    weights = np.array([1.0, 2.0, 5.0])
    found = summarize(np.log(weights) - 700.0)
    assert found.ess == pytest.approx(64 / 30)
    assert found.iw_se == pytest.approx(weights.std(ddof=1) / 3**0.5 / weights.mean())
    assert found.iw_bound == pytest.approx(np.log(8 / 3) - 700.0)
    assert found.iw_bias == pytest.approx(-(found.iw_se**2) / 2)  # E log(mean) by the delta method
    assert found.elbo_se == pytest.approx(np.log(weights).std(ddof=1) / 3**0.5)


def test_impossible_draws(key):
    """A weight of zero makes the ELBO minus infinity and leaves the importance bound as it is."""
    found = summarize(np.r_[-np.inf, np.zeros(99)])
    assert found.elbo == -np.inf
    assert found.iw_bound == pytest.approx(np.log(0.99))
    assert found.ess == pytest.approx(99)
    nothing = summarize([-np.inf, -np.inf])
    assert nothing.iw_bound == -np.inf
    assert nothing.verdict == "unreliable"


def unguided(x, y):
    model(x, y)
    numpyro.sample("extra", dist.Normal(0.0, 1.0))


FAULTS = {
    "point masses": (
        lambda: (AutoDelta(model), {"w_auto_loc": MEAN}),
        {},
        ValueError,
        "all of whose sites are Delta",
    ),
    "no parameters": (
        lambda: (AutoNormal(model), {}),
        {},
        ValueError,
        "no value for w_auto_loc, w_auto_scale",
    ),
    "parameters of a fit": (lambda: (AutoNormal(model), 3), {}, TypeError, "argument `params` got 3"),
    "no model": (lambda: (lambda x, y: None, {}), {}, TypeError, "argument `model` got None"),
    "latent site": (
        lambda: (AutoNormal(model), mean_field()),
        {"model": unguided},
        ValueError,
        r"without the latent sites \['extra'\]",
    ),
    "draws": (
        lambda: (AutoNormal(model), mean_field()),
        {"num_samples": 1},
        ValueError,
        "`num_samples` got 1",
    ),
    "chunk": (
        lambda: (AutoNormal(model), mean_field()),
        {"draws_per_chunk": 0},
        ValueError,
        "`draws_per_chunk` got 0",
    ),
    "NaN": (
        lambda: (AutoNormal(model), {**mean_field(), "w_auto_loc": jnp.full(D, jnp.nan)}),
        {},
        ValueError,
        "1000 NaN or infinite log weights of 1000",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_errors(key, fault):
    make, options, error, message = FAULTS[fault]
    with pytest.raises(error, match=f"guides.evidence: .*{message}"):
        evidence(*make(), X, Y, rng_key=key, **options)


def test_inside_jit_is_refused(guide, key):
    with pytest.raises(TypeError, match="values traced by `jit`"):
        jax.jit(lambda y: evidence(guide, mean_field(), X, y, rng_key=key).elbo)(Y)
