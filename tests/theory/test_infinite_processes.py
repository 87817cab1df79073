"""Regression with infinitely wide networks: exactness, trained ensembles, scales from
the data, results for ArviZ.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import group, group_names
from numpy.testing import assert_allclose as close
from scipy import stats

from numpyro_bnn import nn, priors, to_inference_data
from numpyro_bnn.infinite import empirical_ntk, gp_regression, nngp, prior_fit

NET = nn.MLP([8, 8, 1], "erf")
PRIOR = priors.Normal(1.5, bias_scale=0.5)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(25, 2))
Y = np.sin(2 * X[:, 0]) + 0.1 * RNG.normal(size=25)
NEW = X[20:]


@cache
def process():
    """The regression on the first 20 rows."""
    return gp_regression(NET, X[:20], Y[:20], noise_sd=0.3, prior=PRIOR)


# -- exact regression ------------------------------------------------------------------


def test_regression_is_conditioning():
    """Against the joint normal of all targets, conditioned by linear algebra."""
    gp = process()
    with jax.enable_x64(True):
        k = np.asarray(nngp(NET, X, prior=PRIOR))
    a = k[:20, :20] + 0.09 * np.eye(20)
    mean, covariance = gp.predict(NEW)
    close(mean, k[20:, :20] @ np.linalg.solve(a, Y[:20]), rtol=1e-9)
    expected = k[20:, 20:] - k[20:, :20] @ np.linalg.solve(a, k[:20, 20:])
    close(covariance, expected, rtol=1e-8, atol=1e-12)
    close(gp.predict(NEW, diagonal=True).covariance, np.diagonal(expected), rtol=1e-8)
    joint = stats.multivariate_normal(np.zeros(20), a)
    close(gp.log_marginal_likelihood, joint.logpdf(Y[:20]), rtol=1e-10)
    density = stats.norm(mean, np.sqrt(np.diagonal(expected) + 0.09)).logpdf(Y[20:])
    close(gp.log_density(NEW, Y[20:]), density, rtol=1e-8)
    assert gp.jitter == 0


def test_outputs_share_the_kernel_and_their_draws_have_its_moments():
    """The second is -2 times the first; six standard errors of 4000 draws."""
    one = process()
    both = gp_regression(NET, X[:20], Y[:20, None] * [1, -2], noise_sd=0.3, prior=PRIOR)
    mean, covariance = both.predict(NEW)
    close(mean, one.predict(NEW).mean[:, None] * [1, -2], rtol=1e-9)
    other = gp_regression(NET, X[:20], -2 * Y[:20], noise_sd=0.3, prior=PRIOR)
    total = one.log_marginal_likelihood + other.log_marginal_likelihood
    close(both.log_marginal_likelihood, total, rtol=1e-10)
    draws = both.sample(jax.random.key(1), NEW, (4000,))
    variance = np.diagonal(covariance)
    error = np.sqrt((np.outer(variance, variance) + covariance**2) / 4000)
    for drawn, center in zip(draws.T, mean.T, strict=True):
        assert (np.abs(drawn.mean(1) - center) < 6 * np.sqrt(variance / 4000)).all()
        assert (np.abs(np.cov(drawn) - covariance) < 6 * error).all()


def test_jitter_is_no_more_than_is_needed_and_is_reported():
    """Two copies of every input, hardly noise: the kernel is singular to rounding."""
    double = gp_regression(NET, np.repeat(X, 2, 0), np.repeat(Y, 2), noise_sd=1e-12)
    assert 0 < double.jitter < 1e-10
    # For K = diag(1, 0), the noise being lost to rounding, N rounding errors of the
    # mean of the diagonal are enough.
    exact = gp_regression(
        nn.Dense(1, use_bias=False),
        np.array([[1.0], [0.0]]),
        np.zeros(2),
        noise_sd=1e-170,
    )
    close(exact.jitter, np.finfo(float).eps, rtol=1e-12)


@pytest.mark.parametrize(
    ("message", "call"),
    [
        (
            "NaN or infinite",
            lambda: gp_regression(NET, X, np.full(25, np.inf), noise_sd=0.1),
        ),
        (
            r"\(N, K\)",
            lambda: gp_regression(NET, X, np.zeros((25, 1, 1)), noise_sd=0.1),
        ),
        ("like the data", lambda: process().predict(np.zeros((2, 3)))),
        # NumPy would broadcast these, to densities of every pair or of one number at
        # all inputs.
        (
            r"log_density: argument `y` got shape .*Pass \(5,\)",
            lambda: process().log_density(NEW, np.ones((5, 1))),
        ),
        (
            "'z'",
            lambda: to_inference_data(process(), predictions={"z": np.zeros((2, 2))}),
        ),
        ("'x'", lambda: to_inference_data(process(), predictions={"y": np.zeros(2)})),
        (
            "one row per new point",
            lambda: to_inference_data(process(), predictions={"x": np.zeros((2, 3))}),
        ),
        ("LayerNorm", lambda: prior_fit(nn.MLP([4, 1], "relu", nn.BatchNorm()), X, Y)),
        (
            "begins with",
            lambda: prior_fit(
                nn.Sequential([nn.LayerNorm(False, False), NET]), X, Y, ard=True
            ),
        ),
    ],
)
def test_what_does_not_fit_is_refused(message, call):
    with pytest.raises(ValueError, match=message):
        call()


# -- the tangent kernel of finite width ------------------------------------------------


def test_empirical_kernel_is_the_product_of_jacobians():
    x = jnp.asarray(X[:5], jnp.float32)
    net = nn.Sequential([nn.Dense(4), nn.LayerNorm(), "tanh", nn.Dense(3)])
    shapes = net.param_shapes((2,))
    params = {
        name: value + 0.1 for name, value in net.init(jax.random.key(0), (2,)).items()
    }
    sds = {name: PRIOR(name, shape).scale for name, shape in shapes.items()}
    jacobians = jax.jit(jax.jacobian(lambda p: net.apply(p, x)))(params)
    flat = {
        name: np.asarray(jacobians[name]).reshape(5, 3, -1) * np.asarray(sds[name])
        for name in params
    }
    full = sum(np.einsum("akp,blp->abkl", part, part) for part in flat.values())
    found = empirical_ntk(net, params, x, prior=PRIOR, full=True, block_size=3)
    close(found, full, rtol=1e-4, atol=1e-5)
    mean = np.einsum("abkk->ab", full) / 3
    close(
        empirical_ntk(net, params, x, x[:2], prior=PRIOR),
        mean[:, :2],
        rtol=1e-4,
        atol=1e-5,
    )
    with pytest.raises(ValueError, match="one array for each"):
        empirical_ntk(net, params | {"Dense_0.kernel": np.zeros((2, 3))}, x)


# -- scales from the data --------------------------------------------------------------


def test_scales_are_found():
    """The evidence is at least that of the truth; no direction improves it."""
    rng, net = np.random.default_rng(1), nn.MLP([8, 1], "erf")
    x = rng.normal(size=(60, 2))
    truth = {
        "Dense_0.*": priors.Normal(2.0, bias_scale=0.5),
        "Dense_1.*": priors.Normal(3.0, bias_scale=0.2),
    }
    with jax.enable_x64(True):
        k = np.asarray(nngp(net, x, prior=truth))
    # two outputs
    y = np.linalg.cholesky(k + 0.04 * np.eye(60)) @ rng.normal(size=(60, 2))
    found = prior_fit(net, x, y, log_sd=float("inf"))
    true = gp_regression(net, x, y, noise_sd=0.2, prior=truth).log_marginal_likelihood
    assert found.converged
    # five parameters: chi^2 / 2, 1e-4
    assert found.start < true < found.log_marginal_likelihood < true + 12

    def evidence(noise=1.0, **factors):
        prior = {site: priors.Normal(1.0) for site in ("Dense_0.*", "Dense_1.*")}
        for layer in prior:
            weight, bias = (
                found.scales[f"{layer[:-1]}{part}"] for part in ("kernel", "bias")
            )
            factor = factors.get(layer[:-2], 1.0)
            prior[layer] = priors.Normal(
                factor * float(weight), bias_scale=factor * float(bias)
            )
        return gp_regression(
            net, x, y, noise_sd=noise * found.noise_sd, prior=prior
        ).log_marginal_likelihood

    close(evidence(), found.log_marginal_likelihood, atol=1e-6)
    assert abs(found.noise_sd - 0.2) < 6 * 0.2 / 240**0.5
    for name in ("noise", "Dense_0", "Dense_1"):
        assert (
            max(evidence(**{name: factor}) for factor in (0.98, 1.02))
            < found.log_marginal_likelihood
        ), name


def test_a_strong_prior_holds_the_scales_and_leaves_the_noise():
    """Scales stay within 0.01; the noise, begun at 3, is the best."""
    found = prior_fit(NET, X[:20], Y[:20], prior=PRIOR, noise_sd=3.0, log_sd=1e-3)
    for name in ("Dense_0.kernel", "Dense_1.kernel"):
        assert abs(np.log(found.scales[name] / PRIOR.scale)) < 0.01
    for factor in (0.98, 1.02):
        moved = gp_regression(
            NET, X[:20], Y[:20], noise_sd=factor * found.noise_sd, prior=found.prior
        )
        assert moved.log_marginal_likelihood < found.log_marginal_likelihood


# -- results ---------------------------------------------------------------------------


@pytest.mark.core
def test_results_hold_the_draws_of_the_process():
    """Six standard errors of 800 draws; the log density is the closed form."""
    gp = process()
    idata = to_inference_data(gp, predictions={"x": NEW, "y": Y[20:]}, num_samples=800)
    names = {
        "posterior",
        "posterior_predictive",
        "predictions",
        "log_likelihood",
        "observed_data",
        "constant_data",
    }
    assert names | {"predictions_constant_data"} == group_names(idata)
    mean, covariance = gp.predict(NEW)
    predicted = group(idata, "predictions")
    drawn = predicted["y_mean"].to_numpy()[0]
    assert (
        np.abs(drawn.mean(0) - mean) < 6 * np.sqrt(np.diagonal(covariance) / 800)
    ).all()
    assert (
        np.abs(
            predicted["y"].to_numpy()[0].var(0) / (np.diagonal(covariance) + 0.09) - 1
        )
        < 6 / 400**0.5
    ).all()
    at_data = group(idata, "posterior")["f"].to_numpy()[0]
    for found, f, y in (
        (predicted["y_log_likelihood"], drawn, Y[20:]),
        (group(idata, "log_likelihood")["y"], at_data, Y[:20]),
    ):
        close(found.to_numpy()[0], stats.norm(f, 0.3).logpdf(y), rtol=1e-6)
    assert idata.attrs["algorithm"] == "GPRegression"
    assert idata.attrs["log_marginal_likelihood"] == gp.log_marginal_likelihood


def test_functions_at_new_rows_and_noise_are_drawn_independently():
    """Predicted at the data: f in both groups, and the noise of both, four pairs of 300
    x 20 independent numbers.

    Numbers of one draw are divided by their Cholesky factor; failure rate 6e-7 for each
    pair.
    """
    idata = to_inference_data(process(), predictions={"x": X[:20]}, num_samples=300)
    mean, covariance = process().predict()
    lower = np.linalg.cholesky(covariance + 1e-9 * np.eye(20))
    streams = []
    for name in ("posterior_predictive", "predictions"):
        f, y = (group(idata, name)[site].to_numpy()[0] for site in ("y_mean", "y"))
        streams += [np.linalg.solve(lower, (f - mean).T).T.ravel(), (y - f).ravel()]
    assert np.abs(np.corrcoef(streams) - np.eye(4)).max() < 5 / 6000**0.5
