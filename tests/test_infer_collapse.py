"""Linear sites integrated out of a model: densities, draws of them, and what a user does with the result."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, Gibbs, Predictive
from numpyro.infer.util import log_density

import numpyro_bnn as bnn
from numpyro_bnn import infer, models, nn, priors

RATE = 1e-5  # failure rate of a test that draws
RNG = np.random.default_rng(0)
X = RNG.normal(size=(7, 3)).astype(np.float32)
Y = RNG.normal(size=7).astype(np.float32)
W = {"tau": 0.7, "sigma": 0.4, "c": 1.3}


def regression(x, y=None):
    tau = numpyro.sample("tau", dist.HalfCauchy(1.0))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    c = numpyro.sample("c", dist.Normal(0.0, 1.0))
    w = numpyro.sample("w", dist.Normal(0.5 * c, tau).expand([3]).to_event(1))
    b = numpyro.sample("b", dist.Normal(0.0, 2.0))
    mean = numpyro.deterministic("mean", jnp.tanh(c * x) @ w + b + c)
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(mean, sigma), obs=y)


def moments(tau, sigma, c):
    """Prior mean and covariance of (w, b), and of y, in float64."""
    design = np.column_stack([np.tanh(c * X.astype(float)), np.ones(7)])
    mean, cov = np.array([0.5 * c] * 3 + [0.0]), np.diag([tau**2] * 3 + [4.0])
    return design, mean, cov, design @ mean + c, design @ cov @ design.T + sigma**2 * np.eye(7)


@pytest.fixture(scope="module")
def collapsed():
    return infer.collapse(regression, ["w", "b"], X, Y)


def test_density_is_that_of_the_marginal(collapsed):
    _, _, _, mean, cov = moments(**W)
    value, traced = log_density(collapsed, (X, Y), {}, W)
    expected = scipy.stats.multivariate_normal(mean, cov).logpdf(Y)
    prior = dist.HalfCauchy(1.0).log_prob(0.7) + dist.HalfNormal(1.0).log_prob(0.4)
    expected += float(prior + dist.Normal(0.0, 1.0).log_prob(1.3))
    np.testing.assert_allclose(value, expected, rtol=2e-6)
    latent = [n for n, s in traced.items() if s["type"] == "sample" and not s["is_observed"]]
    assert latent == ["tau", "sigma", "c"]


def test_gradient_is_that_of_the_marginal(collapsed):
    gradient = jax.grad(lambda at: log_density(collapsed, (X, Y), {}, at)[0])(W)

    def value(at):
        _, _, _, mean, cov = moments(**at)
        prior = scipy.stats.halfcauchy().logpdf(at["tau"]) + scipy.stats.halfnorm().logpdf(at["sigma"])
        normal = scipy.stats.multivariate_normal(mean, cov).logpdf(Y)
        return normal + prior + scipy.stats.norm().logpdf(at["c"])

    for name in W:
        up, down = (value({**W, name: W[name] + step}) for step in (1e-5, -1e-5))
        np.testing.assert_allclose(gradient[name], (up - down) / 2e-5, rtol=2e-4)


def test_sites_are_drawn_from_their_conditional(collapsed):
    """Whitened by the exact conditional, draws at distinct values of the others are independent N(0, 1)."""
    number = 4000
    c = 1.3 + 1e-4 * jnp.arange(number) / number  # other bits, other random numbers

    def draw(c):
        with handlers.trace() as traced, handlers.substitute(data={**W, "c": c}), handlers.seed(rng_seed=0):
            collapsed(X, Y)
        return jnp.append(traced["w"]["value"], traced["b"]["value"]), traced["mean"]["value"]

    drawn, means = jax.jit(jax.vmap(draw))(c)
    design, mean, cov, at, marginal = moments(**W)
    gain = cov @ design.T @ np.linalg.inv(marginal)
    root = np.linalg.cholesky(cov - gain @ design @ cov)
    white = np.linalg.solve(root, (np.asarray(drawn, float) - mean - gain @ (Y - at)).T)
    for coordinate in white:
        assert scipy.stats.kstest(coordinate, "norm").pvalue > RATE
    assert scipy.stats.kstest((white**2).sum(0), scipy.stats.chi2(4).cdf).pvalue > RATE
    # Deterministic sites are those of the drawn ones.
    np.testing.assert_allclose(means, drawn @ design.T + 1.3, rtol=1e-3, atol=1e-3)


def test_network_runs_in_gibbs_and_exports():
    """The output layer of a network integrated out, its precisions drawn by Gibbs, all groups in the results."""
    net, prior = nn.MLP([3, 1], "tanh"), priors.GammaPrecision(1.0, 3.0, centered=True)
    model = models.regression(net, prior)
    names = ["net/Dense_1.kernel", "net/Dense_1.bias"]
    hidden = infer.collapse(model, names, X, Y)
    first = ["net/Dense_0.kernel_precision", "net/Dense_0.bias_precision"]
    kernel = Gibbs([(infer.PrecisionGibbs(hidden), first), (NUTS(hidden), None)])
    mcmc = MCMC(kernel, num_warmup=10, num_samples=8, progress_bar=False)
    mcmc.run(jax.random.key(0), X, Y)
    assert mcmc.get_samples()[names[0]].shape == (8, 3, 1)
    idata = bnn.to_inference_data(mcmc, predictions={"x": X[:2]})
    assert idata["log_likelihood"]["y"].shape == (1, 8, 7)
    assert idata["predictions"]["y"].shape == (1, 8, 2)
    again = Predictive(model, mcmc.get_samples(), return_sites=["y"])(jax.random.key(1), X)
    assert again["y"].shape == (8, 7)
    density = dist.Normal(idata["posterior_predictive"]["y"].values, 1.0).log_prob(Y)
    assert np.isfinite(density).all()


def hierarchy(y=None):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    top = numpyro.sample("top", dist.Normal(0.0, 1.0))
    group = numpyro.sample("group", dist.Normal(top, scale))
    numpyro.sample("y", dist.Normal(group, 1.0), obs=y)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: infer.collapse(regression, "w", X, Y), TypeError, "infer.collapse: argument `sites` got w"),
        (lambda: infer.collapse(regression, ["v"], X, Y), ValueError, "infer.collapse: .*'v'"),
        (lambda: infer.collapse(regression, ["tau"], X, Y), ValueError, "HalfCauchy prior"),
        (lambda: infer.collapse(regression, ["c"], X, Y), ValueError, "mean of .* is not linear"),
        (lambda: infer.collapse(hierarchy, ["top"], 1.0), ValueError, "latent site 'group'.*name 'group' as well"),
        (lambda: infer.collapse(regression, ["w"], X), ValueError, "'y'"),
    ],
)  # fmt: skip
def test_refusals_teach(make, error, message):
    with pytest.raises(error, match=message):
        make()
