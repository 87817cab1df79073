"""Judging fits: bounds against exact evidences, honest errors, k-hat.

Linear regression with known noise has a Gaussian posterior with precision P, for which
everything is known: log p(D), the optimum of mean field (the posterior mean, variances
1 / P_ii) and its distance from the posterior, KL(q || p) = (sum log P_ii - log det P) /
2.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats
from helpers import refused
from numpyro.infer.autoguide import AutoDelta, AutoMultivariateNormal, AutoNormal
from zoo import NOISE, N, X, Y, line

from numpyro_bnn.guides import evidence, summarize
from numpyro_bnn.program.importance import weighted_draw

X = X + np.float32(1.8)  # inputs with a mean: their weights are correlated
PRECISION = np.eye(2) + X.T.astype(float) @ X / NOISE**2
MEAN = np.linalg.solve(PRECISION, X.T.astype(float) @ Y / NOISE**2)
LOG_Z = scipy.stats.multivariate_normal(
    np.zeros(N), NOISE**2 * np.eye(N) + X.astype(float) @ X.T
).logpdf(Y)
KL = 0.5 * (np.log(np.diag(PRECISION)).sum() - np.linalg.slogdet(PRECISION)[1])


def mean_field(width=1.0):
    """Parameters of the best AutoNormal, its standard deviations times ``width``."""
    return {
        "w_auto_loc": jnp.asarray(MEAN),
        "w_auto_scale": jnp.asarray(width / np.sqrt(np.diag(PRECISION))),
    }


def judged(
    width=1.0, guide=None, params=None, y=Y, rng_key=None, model=None, **options
):
    rng_key = jax.random.key(0) if rng_key is None else rng_key
    guide = AutoNormal(line) if guide is None else guide
    return evidence(
        guide,
        params or mean_field(width),
        X,
        y,
        rng_key=rng_key,
        model=model,
        **options,
    )


# -- the bounds ------------------------------------------------------------------------


def test_the_exact_posterior_has_the_evidence_as_bound():
    """All weights are p(D), up to the rounding of log densities near 100 in float32."""
    tril = jnp.asarray(np.linalg.cholesky(np.linalg.inv(PRECISION)))
    found = judged(
        guide=AutoMultivariateNormal(line),
        params={"auto_loc": jnp.asarray(MEAN), "auto_scale_tril": tril},
    )
    assert found.elbo == pytest.approx(LOG_Z, abs=1e-3)
    assert found.iw_bound == pytest.approx(LOG_Z, abs=1e-3)
    assert max(found.elbo_se, found.iw_se) < 1e-4
    assert found.pareto_k < 0.5
    assert found.ess == pytest.approx(1000, rel=1e-4)
    assert found.num_observations == N
    assert found.verdict == "good"


def test_mean_field_has_the_elbo_of_theory():
    """Mean of 80,000: within four standard errors, a chance of 6e-5; the importance
    bound closes the gap.

    2 P - diag(P) is not positive definite: weights of the best mean field have no
    variance, the bound no error.
    """
    found, wide = (
        judged(width, rng_key=jax.random.key(2), num_samples=80_000)
        for width in (1.0, 2.0)
    )
    assert KL > 0.4  # or there would be nothing to close
    assert abs(found.elbo - (LOG_Z - KL)) < 4 * found.elbo_se
    assert abs(wide.iw_bound - wide.iw_bias - LOG_Z) < 4 * wide.iw_se
    assert np.linalg.eigvalsh(2 * PRECISION - np.diag(np.diag(PRECISION)))[0] < 0
    assert found.verdict != "good"


def test_a_narrow_guide_is_reported():
    """For one narrower by 0.1 in sd the tail index is 1 - 0.1^2 along each axis."""
    found = judged(0.1, num_samples=4000)
    assert found.pareto_k > 0.7
    report = str(found)
    shown = (
        r"Evidence from 4000 draws of the guide, 24 observations\n  ELBO +-?\d+\.\d\d "
        r"± \d+\.\d\d\n"
    )
    assert re.search(shown, report)
    assert "unreliable: the guide misses part of the posterior" in report


def test_summary_of_known_weights():
    """(sum w)^2 / sum w^2, and the relative standard error of the mean weight."""
    weights = np.array([1.0, 2.0, 5.0])
    found = summarize(np.log(weights) - 700.0)
    assert found.ess == pytest.approx(64 / 30)
    assert found.iw_se == pytest.approx(weights.std(ddof=1) / 3**0.5 / weights.mean())
    assert found.iw_bound == pytest.approx(np.log(8 / 3) - 700.0)
    # E log(mean) by the delta method
    assert found.iw_bias == pytest.approx(-(found.iw_se**2) / 2)
    assert found.elbo_se == pytest.approx(np.log(weights).std(ddof=1) / 3**0.5)


def test_impossible_draws_leave_the_importance_bound():
    found = summarize(np.r_[-np.inf, np.zeros(99)])
    assert found.elbo == -np.inf
    assert found.iw_bound == pytest.approx(np.log(0.99))
    assert found.ess == pytest.approx(99)
    nothing = summarize([-np.inf, -np.inf])
    assert (nothing.iw_bound, nothing.verdict) == (-np.inf, "unreliable")


# -- k-hat -----------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0.2, 0.9])
def test_k_hat_of_known_tails(k):
    """w = exp(k E) with E exponential has a Pareto tail of index k: 20 estimates from
    4000 draws, of which each has a standard deviation near 0.08; the prior of the
    estimator (k = 0.5 with 10 of about 190 observations) shifts it by less than 0.03.
    """
    draws = k * np.random.default_rng(0).exponential(size=(20, 4000))
    found = np.mean([summarize(part).pareto_k for part in draws])
    assert found == pytest.approx(k, abs=0.03 + 4 * 0.08 / np.sqrt(20))


def test_k_hat_of_equal_impossible_and_few_weights():
    normal = np.random.default_rng(1).normal(size=400)
    assert summarize(np.zeros(400)).pareto_k == -np.inf
    assert np.isfinite(
        summarize(np.where(np.arange(400) < 100, -np.inf, normal)).pareto_k
    )
    assert np.isnan(summarize(normal[:24]).pareto_k)
    with refused("log_weights", "NaN"):
        summarize(np.r_[np.nan, normal])


# -- what it is computed on ------------------------------------------------------------


def test_other_values_compile_nothing(compiled):
    judged(num_samples=20)
    params, key, y = mean_field(2.0), jax.random.key(6), 2 * Y
    before = len(compiled)
    judged(params=params, rng_key=key, y=y, num_samples=20)  # by another AutoNormal
    assert len(compiled) == before


@pytest.mark.slow
def test_masked_values_are_not_counted_as_observations(key):
    def masked(x, y, rows):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", 6), numpyro.handlers.mask(mask=rows):
            numpyro.sample("y", dist.Normal(w, 1.0), obs=y)
        pairs = (
            dist.Normal(w, 1.0)
            .expand([6, 2])
            .mask(jnp.array([True, False]))
            .to_event(1)
        )
        numpyro.sample("v", pairs.mask(x > 0), obs=jnp.stack([y, y], -1))
        numpyro.sample("off", dist.Normal(w, 1.0).mask(False), obs=jnp.zeros(3))

    params = {"w_auto_loc": jnp.zeros(()), "w_auto_scale": jnp.ones(())}
    x, rows = jnp.arange(6.0) - 1, jnp.arange(6) < 4
    found = evidence(
        AutoNormal(masked), params, x, jnp.zeros(6), rows, rng_key=key, num_samples=5
    )
    assert found.num_observations == 4 + 4


def test_a_guide_with_auxiliary_variables_keeps_its_bound(key):
    """q(z) = N(1/2, 1/2) of two normals, with the exact reverse r(u | z)."""

    def model(y):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(z, 1.0), obs=y)

    def auxiliary(y):
        u = numpyro.sample("u", dist.Normal(0.0, 0.5), infer={"is_auxiliary": True})
        z = numpyro.sample("z", dist.Normal(0.5 + u, 0.5))
        numpyro.factor("reverse", -dist.Normal((z - 0.5) / 2, 8**-0.5).log_prob(u))

    found = evidence(auxiliary, {}, 1.0, rng_key=key, model=model)
    assert found.elbo == pytest.approx(
        scipy.stats.norm(0, 2**0.5).logpdf(1.0), abs=1e-5
    )
    assert found.elbo_se < 1e-6


def test_parameters_of_the_model_are_used():
    def learned(x, y):
        line(x, y)
        numpyro.factor("shift", numpyro.param("offset", 0.0))

    shifted = judged(
        guide=AutoNormal(learned), params={**mean_field(), "offset": 3.0}, num_samples=5
    )
    np.testing.assert_allclose(
        shifted.log_weights - judged(num_samples=5).log_weights, 3.0, atol=1e-4
    )


# -- refusals --------------------------------------------------------------------------


def unguided(x, y):
    line(x, y)
    numpyro.sample("extra", dist.Normal(0.0, 1.0))


NANS = {"w_auto_loc": np.full(2, np.nan), "w_auto_scale": np.ones(2)}
# What is wrong: argument, part of the message, call.
REFUSED = {
    "point masses": (
        "guide",
        "sites are Delta",
        lambda: judged(guide=AutoDelta(line), params={"w_auto_loc": MEAN}),
    ),
    "no parameters": (
        "params",
        "no value for w_auto_loc, w_auto_scale",
        lambda: judged(params={"v": 1.0}),
    ),
    "parameters of a fit": ("params", "3", lambda: judged(params=3)),
    "no model": ("model", "None", lambda: judged(guide=lambda x, y: None)),
    "latent site": (
        "guide",
        "without the latent sites ['extra']",
        lambda: judged(model=unguided),
    ),
    "NaN": (
        "log_weights",
        "1000 NaN or infinite log weights of 1000",
        lambda: judged(params=NANS),
    ),
    "jit": ("args", "traced by `jit`", lambda: jax.jit(lambda y: judged(y=y).elbo)(Y)),
}


def test_a_guide_and_noise_inside_its_model_are_drawn_independently():
    def model():
        numpyro.deterministic("noise", jax.random.normal(numpyro.prng_key(), (3,)))
        numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))

    def guide():
        numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))

    sites = weighted_draw(model, guide, {}, (), {}, jax.random.key(0)).model
    assert (np.abs(sites["w"]["value"] - sites["noise"]["value"]) > 1e-4).all()


@pytest.mark.parametrize("what", REFUSED)
def test_evidence_refuses(what):
    argument, fragment, call = REFUSED[what]
    with refused(argument, fragment):
        call()
