"""AutoMNF: the bound and its gap, exactness where q(z | w) is known, marginals of the weights, cost."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax.scipy.special import logsumexp
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO
from scipy import stats

from numpyro_bnn import guides, nn, priors, random_network
from numpyro_bnn.guides.mnf import AutoMNF
from numpyro_bnn.guides.multiplier import mixture_quantiles

X = np.random.default_rng(0).normal(size=(20, 2))
Y = np.sin(2 * X[:, 0]) + 0.1 * np.random.default_rng(1).normal(size=20)
WIDE = guides.Coupling(num_flows=2, hidden=(4,))


def linear(x, y, units=2):
    """One kernel (2, units) and nothing else."""
    w = numpyro.sample("kernel", dist.Normal(0.0, 1.0).expand([2, units]).to_event(2))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal((x @ w).sum(-1), 0.5), obs=y)


def network(x, y=None, batch_size=None, prior=None):
    net = random_network("net", nn.MLP([4, 1], "tanh"), x.shape[1:], prior)
    with numpyro.plate("data", x.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(net(x[i])[..., 0], 0.3), obs=None if y is None else y[i])


def parameters(model, guide, *args, seed=0, spread=0.0):
    """Parameters of a guide at its start, all of them moved at random by ``spread``."""
    svi = SVI(model, guide, optax.adam(0.01), Trace_ELBO())
    params = svi.get_params(svi.init(jax.random.key(seed), *args))
    draws = np.random.default_rng(seed)
    moved = {}
    for name, value in params.items():
        noise = spread * draws.normal(size=value.shape)
        moved[name] = value * np.exp(noise) if name.endswith("_scale") else value + noise
    return {name: jnp.asarray(value, jnp.float32) for name, value in moved.items()}


def parameters_of(guide, key):
    """What the guide declares."""
    trace = handlers.trace(handlers.seed(guide, key)).get_trace(jnp.asarray(X), jnp.asarray(Y))
    return {name: site["value"] for name, site in trace.items() if site["type"] == "param"}


def trace_of(guide, params, *args, seed=0, values=None):
    placed = handlers.substitute(guide, data={**params, **(values or {})})
    return handlers.trace(handlers.seed(placed, seed)).get_trace(*args)


def log_guide(trace):
    """log q(w | z) + log q(z) - log r(z | w): what the ELBO takes as the density of the guide."""
    return sum(float(s["fn"].log_prob(s["value"]).sum()) for s in trace.values() if s["type"] == "sample")


def marginal(params, units):
    """q(w), where z is Gaussian: rows N(a m, diag(s^2) + c^2 m m^T)."""
    m, s, a, c = (
        np.asarray(params[name], float)
        for name in ("kernel_auto_loc", "kernel_auto_scale", "kernel_auto_z_loc", "kernel_auto_z_scale")
    )
    return [
        stats.multivariate_normal(a[i] * m[i], np.diag(s[i] ** 2) + c[i] ** 2 * np.outer(m[i], m[i]))
        for i in range(2)
    ]


# ------------------------------------------------------------------------------------------------- the bound


def test_gaussian_multipliers_have_the_exact_reverse():
    """With flows at the identity log q(w | z) + log q(z) - log r(z | w) is log q(w), whatever z is."""
    guide = AutoMNF(linear, multiplier_scale=0.5)
    params = parameters(linear, guide, X, Y, 3, spread=0.4)
    for name in params:
        if "flow" in name or name.endswith(("reverse_loc", "reverse_scale")):
            params[name] = jnp.full_like(params[name], float(name.endswith("_scale")))
    q = marginal(params, 3)
    for seed in range(5):
        trace = trace_of(guide, params, X, Y, 3, seed=seed)
        w = np.asarray(trace["kernel"]["value"], float)
        expected = sum(q[i].logpdf(w[i]) for i in range(2))
        np.testing.assert_allclose(log_guide(trace), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("reverse", ["conjugate", "outer"])
def test_the_elbo_is_a_bound_whatever_the_parameters(reverse):
    """With z integrated on a grid: r is a density, and what the guide counts exceeds log q(w) by a KL divergence.

    200 draws: the mean excess is positive up to 5 standard errors.
    """
    guide = AutoMNF(linear, flow=WIDE, reverse=reverse, multiplier_scale=0.5, init_scale=1.0)
    params = parameters(linear, guide, X, Y, seed=3, spread=0.2)
    line = jnp.linspace(-7.0, 9.0, 401)
    nodes = jnp.stack(jnp.meshgrid(line, line, indexing="ij"), -1).reshape(-1, 2)
    log_area = 2 * jnp.log(line[1] - line[0])

    def densities(z, w):
        """log q(w | z) q(z), and log r(z | w)."""
        trace = trace_of(guide, params, X, Y, values={"kernel_auto_z": z, "kernel": w})
        names = ("kernel_auto_z", "kernel", "kernel_auto_z_log_reverse")
        z, w, reverse = (trace[name]["fn"].log_prob(trace[name]["value"]).sum() for name in names)
        return z + w, -reverse

    def check(key):
        trace = trace_of(guide, params, X, Y, seed=key)
        z, w = trace["kernel_auto_z"]["value"], trace["kernel"]["value"]
        joint, reverse = jax.vmap(densities, in_axes=(0, None))(nodes, w)
        here = densities(z, w)
        return here[0] - here[1] - logsumexp(joint) - log_area, jnp.exp(logsumexp(reverse) + log_area)

    excess, mass = jax.lax.map(check, jax.random.split(jax.random.key(0), 200))
    np.testing.assert_allclose(mass, 1, atol=2e-3)
    error = np.std(excess) / 200**0.5
    assert np.mean(excess) > -5 * error
    assert np.mean(excess) > 0.01  # the case is no trivial one: r is not exact


@pytest.mark.parametrize("reverse", ["conjugate", "outer"])
def test_constant_multipliers_are_the_mean_field(reverse):
    """z = 1 up to 1e-6: the density of the guide is that of independent weights."""
    guide = AutoMNF(linear, reverse=reverse, multiplier_scale=1e-6)
    params = parameters(linear, guide, X, Y)
    trace = trace_of(guide, params, X, Y)
    plain = dist.Normal(params["kernel_auto_loc"], params["kernel_auto_scale"]).log_prob(
        trace["kernel"]["value"]
    )
    np.testing.assert_allclose(log_guide(trace), float(plain.sum()), atol=1e-3)


def test_numpyro_subtracts_the_density_of_the_guide():
    """Trace_ELBO: log p(y, w) - (log q(w | z) + log q(z) - log r(z | w)) of the same draw."""
    guide = AutoMNF(linear, flow=WIDE, multiplier_scale=0.5)
    params = parameters(linear, guide, X, Y, spread=0.3)
    key = jax.random.key(7)
    trace = trace_of(guide, params, X, Y, seed=jax.random.split(key)[1])
    joint = handlers.trace(handlers.substitute(linear, data={"kernel": trace["kernel"]["value"]})).get_trace(
        X, Y
    )
    loss = Trace_ELBO().loss(key, params, linear, guide, X, Y)
    np.testing.assert_allclose(-float(loss), log_guide(joint) - log_guide(trace), rtol=1e-5)


TARGET_M = np.array([[2.0, -1.0, 1.5], [-1.0, 2.0, 1.0]])
TARGET = [stats.multivariate_normal(m, 0.09 * np.eye(3) + 0.25 * np.outer(m, m)) for m in TARGET_M]


def correlated():
    """A posterior of two rows, each with a common factor; its evidence is 1."""
    w = numpyro.sample("kernel", dist.Normal(0.0, 1.0).expand([2, 3]).to_event(2))
    prior = dist.Normal(0.0, 1.0).log_prob(w).sum()
    rows = dist.MultivariateNormal(jnp.asarray(TARGET_M), jnp.stack([jnp.asarray(t.cov) for t in TARGET]))
    numpyro.factor("data", rows.log_prob(w).sum() - prior)


def test_common_factors_are_found():
    """Within 0.05 nats of the evidence 0, where mean field keeps 0.5 log of prod var / det, 3.6 nats."""
    mean_field = 0.5 * sum(
        -np.log(np.diag(np.linalg.inv(t.cov))).sum() - np.linalg.slogdet(t.cov)[1] for t in TARGET
    )
    found = {}
    for guide in (guides.AutoMeanField(correlated), AutoMNF(correlated, multiplier_scale=0.2)):
        svi = SVI(
            correlated,
            guide,
            optax.adam(optax.cosine_decay_schedule(0.03, 3000)),
            Trace_ELBO(num_particles=4),
        )
        params = svi.run(jax.random.key(0), 3000, progress_bar=False).params
        loss = jax.jit(
            lambda key, g=guide, p=params: Trace_ELBO(num_particles=4000).loss(key, p, correlated, g)
        )
        found[type(guide).__name__] = float(loss(jax.random.key(1)))
    assert found["AutoMeanField"] == pytest.approx(-mean_field, abs=0.15)
    assert found["AutoMNF"] < 0.05


# ------------------------------------------------------------------------------------------------- marginals


def test_mixture_quantiles():
    nodes, loc, sd = np.array([0.5, 1.0, 3.0]), np.array([1.0, -2.0, 0.0]), np.array([0.2, 1.0, 0.5])
    q = jnp.array([0.01, 0.4, 0.9])
    found = np.asarray(mixture_quantiles(*map(jnp.asarray, (nodes, loc, sd)), q))
    cdf = stats.norm.cdf((found[:, None] - nodes[:, None] * loc) / sd).mean(1)
    np.testing.assert_allclose(cdf, np.broadcast_to(np.asarray(q)[:, None], (3, 3)), atol=2e-5)


def test_draws_have_the_density_and_the_quantiles():
    """20,000 draws: moments of the closed form, 5 standard errors; quantiles, 5 and the 64 nodes of z (0.005)."""
    guide = AutoMNF(linear, multiplier_scale=0.5)
    params = parameters(linear, guide, X, Y, 3, spread=0.3)
    params = {n: jnp.zeros_like(v) if "flow" in n else v for n, v in params.items()}
    draws = np.asarray(
        guide.sample_posterior(jax.random.key(0), params, sample_shape=(20_000,))["kernel"], float
    )
    for i, q in enumerate(marginal(params, 3)):
        sd = np.sqrt(np.diag(q.cov))
        assert np.all(np.abs(draws[:, i].mean(0) - q.mean) < 5 * sd / 20_000**0.5)
        np.testing.assert_allclose(
            np.cov(draws[:, i].T) / np.outer(sd, sd), q.cov / np.outer(sd, sd), atol=0.05
        )
    quantiles = guide.quantiles(params, [0.05, 0.5])["kernel"]
    for p, quantile in zip((0.05, 0.5), quantiles, strict=True):
        share = np.mean(draws < np.asarray(quantile), axis=0)
        np.testing.assert_allclose(share, p, atol=5 * (p * (1 - p) / 20_000) ** 0.5 + 0.005)
    np.testing.assert_allclose(guide.median(params)["kernel"], quantiles[1], atol=1e-5)


def test_filters_of_a_convolution():
    """One z for each output channel, the last axis; a dense layer has one for each input."""

    def model(x):
        net = random_network("net", nn.Sequential([nn.Conv2d(3, 2), nn.Flatten(), nn.Dense(2)]), (4, 4, 2))
        numpyro.sample("y", dist.Normal(net(x), 1.0).to_event(2), obs=jnp.zeros((5, 2)))

    x = jnp.ones((5, 4, 4, 2))
    guide = AutoMNF(model)
    params = parameters(model, guide, x)
    assert params["net/Conv2d_0.kernel_auto_z_loc"].shape == (3,)
    assert params["net/Dense_0.kernel_auto_z_loc"].shape == (48,)
    quantiles = guide.quantiles(params, jnp.array([0.1, 0.9]))
    assert quantiles["net/Conv2d_0.kernel"].shape == (2, 2, 2, 2, 3)
    z = jnp.array([1.0, 2.0, 3.0])
    trace = trace_of(guide, params, x, values={"net/Conv2d_0.kernel_auto_z": z})
    np.testing.assert_allclose(
        trace["net/Conv2d_0.kernel"]["fn"].mean, params["net/Conv2d_0.kernel_auto_loc"] * z, rtol=1e-6
    )
    # Quantiles of a filter with z near 1 are those of its mean field.
    m, s = (params[f"net/Conv2d_0.kernel_auto_{field}"] for field in ("loc", "scale"))
    sd = np.sqrt(s**2 + (0.05 * m) ** 2)
    np.testing.assert_allclose(quantiles["net/Conv2d_0.kernel"][1], m + 1.2816 * sd, atol=0.02)


# -------------------------------------------------------------------------------------------------- contract


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ({}, {"net/Dense_0.kernel_base", "net/Dense_1.kernel_base"}),
        ({"kernels": "*Dense_1*"}, {"net/Dense_1.kernel_base"}),
        ({"blocks": {"*Dense_0.kernel_base": guides.Diagonal()}}, {"net/Dense_1.kernel_base"}),
    ],
)
def test_chosen_kernels(options, chosen):
    """Local scales have the shape of a kernel and a limited support: they are none."""
    guide = AutoMNF(lambda x, y: network(x, y, prior=priors.Horseshoe()), **options)
    found = jax.eval_shape(lambda key: parameters_of(guide, key), jax.random.key(0))
    assert {name.removesuffix("_auto_z_loc") for name in found if name.endswith("_z_loc")} == chosen
    assert "net/Dense_0.kernel_local_auto_loc" in found


def no_kernel(x, y):
    numpyro.sample("b", dist.Normal(0.0, 1.0).expand([2, 2]).to_event(2))


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda: AutoMNF(network, flow=3), "argument `flow` got 3"),
        (lambda: AutoMNF(network, reverse="conjugat"), "Did you mean 'conjugate'"),
        (lambda: AutoMNF(network, multiplier_scale=0.0), "argument `multiplier_scale` got 0.0"),
        (lambda: AutoMNF(network, "*bias"), r"Kernels outside plates and blocks: net/Dense_0.kernel, net"),
        (lambda: AutoMNF(no_kernel), r"latent sites \(b\) are no kernels"),
    ],
)
def test_errors(make, fault):
    with pytest.raises((ValueError, TypeError), match=fault), handlers.seed(rng_seed=0):
        make()(X, Y)


# ------------------------------------------------------------------------------------------------------ cost


def test_cost_is_that_of_mean_field():
    """784-800-800-10, 1.3 million weights, 100 rows: parameters, operations and traffic of a compiled step."""

    def model(x, y):
        net = random_network("net", nn.MLP([800, 800, 10]), (784,))
        with numpyro.plate("data", 60_000, subsample_size=100):
            numpyro.sample("y", dist.Categorical(logits=net(x)), obs=y)

    x, y = jnp.asarray(np.random.default_rng(0).normal(size=(100, 784))), jnp.zeros(100, int)
    sizes, costs = [], []
    for make in (guides.AutoMeanField, AutoMNF):
        svi = SVI(model, make(model), optax.adam(1e-3), Trace_ELBO())
        state = jax.eval_shape(lambda key, svi=svi: svi.init(key, x, y), jax.random.key(0))
        params = jax.eval_shape(svi.get_params, state)
        sizes.append(sum(np.prod(leaf.shape) for leaf in params.values()))
        step = jax.jit(lambda state, svi=svi: svi.update(state, x, y))
        costs.append(step.lower(state).compile().cost_analysis())
    assert sizes[1] < 1.25 * sizes[0]
    for quantity in ("flops", "bytes accessed"):
        assert costs[1][quantity] < 1.5 * costs[0][quantity]
