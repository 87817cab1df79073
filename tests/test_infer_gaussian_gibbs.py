"""GaussianGibbs: exact draws, the marginal density, the slice sampler, invariance, and every way to run it."""

import pickle
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import lax, random
from numpyro import handlers
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS, Gibbs
from scipy import integrate, stats

from numpyro_bnn import infer, models, nn
from numpyro_bnn.infer.gaussian_gibbs import GaussianGibbs
from numpyro_bnn.infer.linear import Linear, Parts, log_marginal, sample
from numpyro_bnn.infer.linearity import read
from numpyro_bnn.infer.rotated import log_marginal_at, rotate
from numpyro_bnn.infer.slice import slice_draw, slice_sweep

# Kolmogorov-Smirnov tests fail once in 10,000 runs where the code is right.
FAILURE = 1e-4
RNG = np.random.default_rng(0)


def regression_model(x, y=None):
    """Both hyper-sites may be integrated against; the prior sds of the weights differ."""
    sigma = numpyro.sample("sigma", dist.Gamma(6.0, 6.0))
    tau = numpyro.sample("tau", dist.LogNormal(0.0, 0.5))
    scales = tau * jnp.linspace(0.5, 2.0, x.shape[1])
    w = numpyro.sample("w", dist.Normal(0.3, scales).to_event(1))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, sigma), obs=y)


def make_data(n, p):
    rng = np.random.default_rng(n)
    x = rng.normal(size=(n, p))
    return jnp.asarray(x, jnp.float32), jnp.asarray(x.sum(1) + rng.normal(size=n), jnp.float32)


SHAPES = [(12, 4), (4, 12)]  # more data than weights, and more weights than data


def linear_of(model, sites, collapsed, held, args):
    structure = read("test", model, sites, collapsed, set(held), args, {})
    return Linear(model, structure, held, args, {})


def posterior(x, y, sd_noise, mean, sd, weight=1.0):
    """Mean and covariance of weights with prior N(mean, sd^2), in float64."""
    x, y, mean = (np.asarray(a, np.float64) for a in (x, y, mean))
    root = np.broadcast_to(np.asarray(weight, np.float64), y.shape) / sd_noise**2
    precision = x.T @ (root[:, None] * x) + np.diag(
        np.broadcast_to(np.asarray(sd, np.float64) ** -2.0, mean.shape)
    )
    covariance = np.linalg.inv(precision)
    return mean + covariance @ (x.T @ (root * (y - x @ mean))), covariance


def assert_normal(draws, mean, covariance):
    """Draws (S, P) are from that normal distribution: every whitened coordinate, and their squared radius."""
    white = np.linalg.solve(np.linalg.cholesky(covariance), (np.asarray(draws, np.float64) - mean).T)
    tests = [stats.kstest(row, "norm").pvalue for row in white]
    tests.append(stats.kstest((white**2).sum(0), stats.chi2(len(mean)).cdf).pvalue)
    # The product of two whitened coordinates has mean 0 and variance 1: off-diagonal correlations.
    products = [white[i] @ white[j] / np.sqrt(white.shape[1]) for i in range(len(white)) for j in range(i)]
    tests += [2 * stats.norm.sf(abs(z)) for z in products]
    assert min(tests) > FAILURE / len(tests)


def draws_of(kernel, args, kwargs=None, held=None, number=4000):
    """Independent draws by one transition each of a kernel whose draws do not depend on where they start."""
    kwargs = {**(kwargs or {}), **({"_gibbs_sites": held} if held else {})}
    state = kernel.init(random.key(1), 0, None, model_args=args, model_kwargs=kwargs)
    keys = random.split(random.key(2), number)
    return jax.jit(jax.vmap(lambda key: kernel.sample(state._replace(rng_key=key), args, kwargs).z))(keys)


# ---------------------------------------------------------------------------------------------------- exact draws


@pytest.mark.parametrize("shape", SHAPES)
def test_draws_are_exact(shape):
    x, y = make_data(*shape)
    draws = draws_of(GaussianGibbs(regression_model, ["w"]), (x, y), held={"sigma": 0.7, "tau": 1.3})
    sd = 1.3 * np.linspace(0.5, 2.0, shape[1])
    assert_normal(draws["w"], *posterior(x, y, 0.7, np.full(shape[1], 0.3), sd))


def hierarchy(x, y=None, mask=True, power=1.0):
    """Locations with a location; several data sites, some masked and some scaled; signs in affine transforms."""
    mu = numpyro.sample("mu", dist.Normal(1.0, 2.0))
    a = numpyro.sample(
        "a",
        dist.TransformedDistribution(
            dist.Normal(0.0, jnp.ones(3)), dist.transforms.AffineTransform(mu, -0.5)
        ),
    )
    slope = numpyro.sample("slope", dist.Normal(mu - a[0], 1.5))
    mean = a[jnp.arange(x.shape[0]) % 3] + slope * x
    with numpyro.plate("data", x.shape[0]), handlers.mask(mask=mask), handlers.scale(scale=power):
        numpyro.sample("y", dist.Normal(mean, 0.6), obs=None if y is None else y[0])
    numpyro.sample("z", dist.Normal(2.0 * a - mu, 0.9).to_event(1), obs=None if y is None else y[1])


def test_draws_of_hierarchies_with_masks_and_scales_are_exact():
    """Against the joint normal distribution written as one precision matrix; masked data are NaN."""
    x = jnp.asarray(RNG.normal(size=7), jnp.float32)
    mask = np.array([True, True, False, True, True, False, True])
    y = jnp.where(jnp.asarray(mask), jnp.sin(x), jnp.nan), jnp.array([0.5, -1.0, 2.0])
    kernel = GaussianGibbs(hierarchy, ["slope", "a", "mu"])
    draws = draws_of(kernel, (x, y), {"mask": jnp.asarray(mask), "power": 0.4})
    # Unknowns mu, a_0, a_1, a_2, slope: every factor is row @ unknowns ~ N(value, sd^2)^power.
    index = np.arange(7) % 3
    rows = [([1, 0, 0, 0, 0], 1.0, 2.0, 1.0)]
    rows += [(np.eye(5)[1 + k] - np.eye(5)[0], 0.0, 0.5, 1.0) for k in range(3)]
    rows += [([-1, 1, 0, 0, 1], 0.0, 1.5, 1.0)]
    seen = np.flatnonzero(mask)
    rows += [(np.eye(5)[1 + index[i]] + x[i] * np.eye(5)[4], float(y[0][i]), 0.6, 0.4) for i in seen]
    rows += [(2 * np.eye(5)[1 + k] - np.eye(5)[0], float(y[1][k]), 0.9, 1.0) for k in range(3)]
    matrix, value, sd, power = (np.array(part, np.float64) for part in zip(*rows, strict=True))
    precision = matrix.T @ (matrix * (power / sd**2)[:, None])
    covariance = np.linalg.inv(precision)
    mean = covariance @ matrix.T @ (power / sd**2 * value)
    together = np.column_stack([draws["mu"], draws["a"], draws["slope"]])
    assert_normal(together, mean, covariance)


def spread_scales(shape, orders):
    """A model in single precision whose prior scales span that many orders of magnitude."""
    p, (x, y), ones = shape[1], make_data(*shape), jnp.ones(shape[0])
    sd = jnp.asarray(10.0 ** np.linspace(-orders / 2, orders / 2, p), jnp.float32)
    return x, Parts(sd, jnp.ones(p), y, 0 * y, 0.5 * ones, ones, jnp.zeros(()))


@pytest.mark.parametrize(("shape", "orders"), [(SHAPES[0], 12), (SHAPES[1], 8)])
def test_draws_under_prior_scales_of_many_orders_of_magnitude(shape, orders):
    """Squares of such a condition number do not fit into single precision."""
    x, parts = spread_scales(shape, orders)
    draws = jax.vmap(lambda key: sample(key, parts, x))(random.split(random.key(0), 4000))
    mean, covariance = posterior(x, parts.value, 0.5, np.zeros(shape[1]), parts.prior_sd)
    # Each weight by itself; together they would be compared through the inverse of a singular matrix.
    scaled = (np.asarray(draws) - mean) / np.sqrt(np.diag(covariance))
    assert min(stats.kstest(column, "norm").pvalue for column in scaled.T) > FAILURE / shape[1]


@pytest.mark.parametrize("shape", SHAPES)
def test_marginal_density_under_prior_scales_of_many_orders_of_magnitude(shape):
    x, parts = spread_scales(shape, 12)
    # By the singular values of the scaled map: the covariance of the data is singular even in double precision.
    left, singular, _ = np.linalg.svd(np.asarray(x, np.float64) * np.asarray(parts.prior_sd, np.float64))
    variance = 0.25 + np.append(singular**2, np.zeros(shape[0] - len(singular)))
    exact = stats.norm.logpdf(left.T @ np.asarray(parts.value, np.float64), 0.0, np.sqrt(variance)).sum()
    assert float(log_marginal(parts, x)) == pytest.approx(exact, rel=1e-4)
    smaller = parts._replace(prior_sd=parts.prior_sd / 3.0, sd=parts.sd * 2.0)
    assert float(log_marginal_at(rotate(smaller, x), jnp.log(3.0), -jnp.log(2.0))) == pytest.approx(
        exact, rel=1e-4
    )


# ----------------------------------------------------------------------------------------------- marginal density


@pytest.mark.parametrize("shape", SHAPES)
def test_marginal_density_is_that_of_scipy(shape):
    x, y = make_data(*shape)
    linear = linear_of(regression_model, ("w",), ("sigma", "tau"), {}, (x, y))
    assert linear.structure.fixed
    assert linear.structure.common == (("tau",), ("sigma",))
    start = {"sigma": jnp.array(0.4), "tau": jnp.array(2.0)}
    rotated = rotate(linear.parts(start), linear.jacobian(start))
    for sigma, tau in ((0.7, 1.3), (0.2, 3.0), (2.0, 0.1)):
        hypers = {"sigma": jnp.array(sigma), "tau": jnp.array(tau)}
        found = log_marginal(linear.parts(hypers), linear.jacobian(hypers))
        scaled = np.asarray(x, float) * tau * np.linspace(0.5, 2.0, shape[1])
        covariance = scaled @ scaled.T + sigma**2 * np.eye(shape[0])
        exact = stats.multivariate_normal(0.3 * np.asarray(x, float).sum(1), covariance).logpdf(np.asarray(y))
        quicker = log_marginal_at(rotated, jnp.log(tau / 2.0), jnp.log(sigma / 0.4))
        assert float(quicker) == pytest.approx(exact, rel=2e-5)
        exact += stats.gamma(6.0, scale=1 / 6.0).logpdf(sigma) + stats.lognorm(0.5).logpdf(tau)
        assert float(found) == pytest.approx(exact, rel=2e-5)


def test_marginal_density_of_powers_of_densities():
    """Tempered data and a tempered prior, against quadrature over the one weight."""
    value, power = np.array([0.4, -1.0, 2.0]), np.array([0.3, 1.0, 0.0])
    slope, sd, sd_prior, power_prior = np.array([1.0, -2.0, 0.5]), np.array([0.5, 1.0, 2.0]), 1.7, 0.25

    def density(u):
        log = power @ stats.norm.logpdf(value, slope * u + 0.1, sd)
        return np.exp(log + power_prior * stats.norm.logpdf(u, 0.0, sd_prior))

    exact = np.log(integrate.quad(density, -np.inf, np.inf)[0])
    arrays = ([sd_prior], [power_prior], value, np.full(3, 0.1), sd, power, 0.0)
    parts = Parts(*(jnp.asarray(part, jnp.float32) for part in arrays))
    slope = jnp.asarray(slope, jnp.float32)[:, None]
    assert float(log_marginal(parts, slope)) == pytest.approx(exact, rel=1e-5)
    other = rotate(parts._replace(prior_sd=parts.prior_sd / 3.0, sd=parts.sd * 2.0), slope)
    assert float(log_marginal_at(other, jnp.log(3.0), -jnp.log(2.0))) == pytest.approx(exact, rel=1e-5)


def shared(scale_of_prior, scale_of_noise, center=lambda tau: 0.0):
    """A regression with scales as given functions of the collapsed sites."""

    def model(x, y):
        tau = numpyro.sample("tau", dist.HalfNormal(1.0))
        sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
        w = numpyro.sample("w", dist.Normal(center(tau), scale_of_prior(tau, sigma)).to_event(1))
        numpyro.sample("y", dist.Normal(x @ w, scale_of_noise(tau, sigma)), obs=y)

    return model


LOCAL = jnp.array([0.5, 2.0])


@pytest.mark.parametrize(
    ("model", "common"),
    [
        (shared(lambda t, s: t * LOCAL, lambda t, s: s), (("tau",), ("sigma",))),
        (shared(lambda t, s: t * s * LOCAL, lambda t, s: 2 * s), (("tau", "sigma"), ("sigma",))),
        (shared(lambda t, s: LOCAL, lambda t, s: t * s), ((), ("tau", "sigma"))),
        (shared(lambda t, s: t + LOCAL, lambda t, s: s), None),
        (shared(lambda t, s: t**2 * LOCAL, lambda t, s: s), None),
        (shared(lambda t, s: jnp.minimum(t * LOCAL, 1e6), lambda t, s: s), None),
        (shared(lambda t, s: jnp.stack([t, s]), lambda t, s: s), None),
        (shared(lambda t, s: t * LOCAL, lambda t, s: s, center=lambda t: t), None),
    ],
)  # fmt: skip
def test_common_scales_are_proven_not_measured(model, common):
    """A clip that no value of the test reaches is not taken for a proportion."""
    structure = read("test", model, ("w",), ("tau", "sigma"), set(), make_data(4, 2), {})
    assert structure.common == common


# -------------------------------------------------------------------------------------------------- slice sampler

BIMODAL = dist.MixtureSameFamily(
    dist.Categorical(jnp.array([0.3, 0.7])), dist.Normal(jnp.array([-1.5, 1.5]), 0.6)
)


def two_modes(x):
    return 0.3 * stats.norm.cdf(x, -1.5, 0.6) + 0.7 * stats.norm.cdf(x, 1.5, 0.6)


TARGETS = {
    "normal": (lambda x: -0.5 * x**2, stats.norm.cdf, 1.0),
    "normal, narrow steps": (lambda x: -0.5 * x**2, stats.norm.cdf, 0.1),
    "normal, wide steps": (lambda x: -0.5 * x**2, stats.norm.cdf, 50.0),
    "exponential": (lambda x: jnp.where(x > 0, -x, jnp.nan), stats.expon.cdf, 1.0),
    "log of a gamma": (lambda x: 2.5 * x - jnp.exp(x), lambda x: stats.gamma.cdf(np.exp(x), 2.5), 1.0),
    "two modes": (BIMODAL.log_prob, two_modes, 1.0),
}


@pytest.mark.parametrize("name", TARGETS)
def test_slice_sampler_is_exact(name):
    """Independent chains, all from one point, after as many transitions as forget it."""
    log_density, cdf, width = TARGETS[name]
    start = jnp.array(0.5)

    def chain(key):
        def step(state, key):
            return slice_draw(key, log_density, *state, width), None

        return lax.scan(step, (start, log_density(start)), random.split(key, 200 if width < 1 else 40))[0]

    x, log_p = jax.jit(jax.vmap(chain))(random.split(random.key(0), 3000))
    assert stats.kstest(np.asarray(x), cdf).pvalue > FAILURE
    assert np.allclose(log_p, log_density(x), atol=1e-5)


def test_slice_sweep_of_correlated_coordinates():
    precision = jnp.array([[1.0, 0.8], [0.8, 1.0]])

    def chain(key):
        def step(x, key):
            return slice_sweep(key, lambda x: -0.5 * x @ precision @ x, x)[0], None

        return lax.scan(step, jnp.ones(2), random.split(key, 40))[0]

    draws = jax.jit(jax.vmap(chain))(random.split(random.key(1), 3000))
    assert_normal(draws, np.zeros(2), np.linalg.inv(np.asarray(precision, np.float64)))


def test_slice_sampler_leaves_a_point_without_density():
    """And stays where there is none anywhere, instead of searching for ever."""
    nowhere, log_p = slice_draw(random.key(0), lambda x: jnp.full_like(x, jnp.nan), jnp.zeros(()), jnp.nan)
    assert float(nowhere) == 0.0
    assert float(log_p) == -np.inf
    x, log_p = slice_draw(random.key(0), lambda x: -(x**2), jnp.zeros(()), jnp.array(-jnp.inf))
    assert float(log_p) == pytest.approx(-(float(x) ** 2))


# ----------------------------------------------------------------------------------------------------- invariance


def noncentered(x, y=None):
    """The linear map itself, the mean without weights and the prior of another scale depend on collapsed sites."""
    sigma = numpyro.sample("sigma", dist.Uniform(0.2, 1.5))
    tau = numpyro.sample("tau", dist.LogNormal(0.0, 0.5))
    other = numpyro.sample("other", dist.LogNormal(jnp.log(tau), 0.3))
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    numpyro.sample("y", dist.Normal(tau * (x @ w) + 0.5 * other, sigma).to_event(1), obs=y)


CHAINS, SWEEPS = 800, 25


@pytest.mark.parametrize(
    ("model", "collapsed", "shape"),
    [
        (regression_model, ["tau", "sigma"], (6, 2)),
        (regression_model, ["sigma", "tau"], (3, 5)),
        (noncentered, ["tau", "sigma", "other"], (5, 2)),
    ],
    ids=["more data", "more weights", "non-centered"],
)
def test_collapsed_updates_leave_the_posterior_invariant(model, collapsed, shape):
    """Geweke's joint test: transitions alternate with new data, from prior draws; the prior stays.

    The last states of independent chains, against independent prior draws; two-sample Kolmogorov-Smirnov.
    """
    x, y = make_data(*shape)
    kernel = GaussianGibbs(model, ["w"], collapsed=collapsed)
    state = kernel.init(random.key(0), 0, None, model_args=(x, y), model_kwargs={})

    def sites_of(key, values=None):
        seeded = handlers.seed(handlers.substitute(model, data=values or {}), key)
        return {
            k: s["value"] for k, s in handlers.trace(seeded).get_trace(x).items() if s["type"] == "sample"
        }

    def chain(key):
        start, run, data = random.split(key, 3)
        first = sites_of(start)

        def sweep(carry, key):
            state, y = carry
            state = kernel.sample(state, (x, y), {})
            return (state, sites_of(key, state.z)["y"]), None

        begin = state._replace(z={name: first[name] for name in state.z}, rng_key=run)
        (end, y), _ = lax.scan(sweep, (begin, first["y"]), random.split(data, SWEEPS))
        return {**end.z, "y": y}

    after = jax.jit(jax.vmap(chain))(random.split(random.key(1), CHAINS))
    prior = jax.vmap(sites_of)(random.split(random.key(2), 20_000))

    def summaries(sites):
        w, y = sites["w"], sites["y"]
        found = {name: sites[name] for name in collapsed}
        return found | {"w": w[:, 0], "size": (w**2).sum(1), "y": y[:, 0], "fit": (y * (x @ w.T).T).sum(1)}

    after, prior = summaries(after), summaries(prior)
    tests = {name: stats.ks_2samp(np.asarray(after[name]), np.asarray(prior[name])).pvalue for name in after}
    assert min(tests.values()) > FAILURE / len(tests), tests


# --------------------------------------------------------------------------------------------- ways to run it

X = jnp.linspace(-2.0, 2.0, 10)[:, None]
Y = jnp.tanh(2.0 * X[:, 0]) + 0.1 * jnp.cos(7.0 * X[:, 0])
NETWORK = models.regression(nn.MLP([3, 1], "tanh"))
OUTPUT_LAYER = ["net/Dense_1.kernel", "net/Dense_1.bias"]


def network_kernel():
    last = GaussianGibbs(NETWORK, OUTPUT_LAYER, collapsed=["sigma"])
    return Gibbs([(last, [*OUTPUT_LAYER, "sigma"]), (NUTS(NETWORK, max_tree_depth=4), None)])


def test_output_layer_of_a_network():
    """Functions and noise against NUTS on all sites; under vmap, from a pickle, with four chains."""
    kernel = pickle.loads(pickle.dumps(network_kernel()))
    settings = {"num_samples": 600, "num_chains": 4, "progress_bar": False}
    ours = MCMC(kernel, num_warmup=200, chain_method=jax.vmap, **settings)
    ours.run(random.PRNGKey(0), X, Y)
    nuts = MCMC(NUTS(NETWORK, max_tree_depth=6), num_warmup=300, chain_method="vectorized", **settings)
    nuts.run(random.key(1), X, Y)

    def functions(mcmc):
        z = mcmc.get_samples(group_by_chain=True)
        hidden = jnp.tanh(X @ z["net/Dense_0.kernel"] + z["net/Dense_0.bias"][:, :, None])
        f = (hidden @ z["net/Dense_1.kernel"])[..., 0] + z["net/Dense_1.bias"]
        return np.concatenate([f[..., ::3], jnp.log(z["sigma"])[..., None]], -1)

    one, other = functions(ours), functions(nuts)
    level = stats.norm.isf(FAILURE / 2 / (2 * one.shape[-1]))
    for power in (1, 2):
        first, second = ((part - one.mean((0, 1))) ** power for part in (one, other))
        variance = sum(part.var((0, 1)) / effective_sample_size(part) for part in (first, second))
        assert np.all(np.abs(first.mean((0, 1)) - second.mean((0, 1))) < level * np.sqrt(variance))


@pytest.mark.parametrize(
    ("method", "make_key"),
    [("sequential", random.key), ("parallel", random.PRNGKey), ("vectorized", random.PRNGKey)],
)
def test_a_kernel_of_its_own(method, make_key):
    def model(x, y=None):
        regression_model(x, y)
        numpyro.deterministic("twice", 2.0 * jnp.ones(()))

    kernel = GaussianGibbs(model, ["w"], collapsed=["tau", "sigma"])
    settings = {"num_warmup": 2, "num_samples": 4, "num_chains": 2, "thinning": 2, "progress_bar": False}
    mcmc = MCMC(kernel, chain_method=method, **settings)
    mcmc.run(make_key(0), *make_data(4, 2))
    draws = mcmc.get_samples(group_by_chain=True)
    assert {name: value.shape for name, value in draws.items()} == {
        "w": (2, 2, 2), "tau": (2, 2), "sigma": (2, 2), "twice": (2, 2),
    }  # fmt: skip
    assert len(np.unique(draws["tau"])) == 4
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(make_key(1), *make_data(4, 2))


def test_start_from_given_values_and_pickled_kernel():
    data = make_data(4, 2)
    kernel = GaussianGibbs(regression_model, ["w"], collapsed=["tau"])
    held = {"_gibbs_sites": {"sigma": jnp.array(0.5)}}
    start = {"w": jnp.array([1.0, 2.0]), "tau": jnp.array(3.0)}
    state = kernel.init(random.key(0), 0, start, model_args=data, model_kwargs=held)
    assert state.z["tau"] == 3.0
    assert kernel.refresh(state, data, held) is state
    again = pickle.loads(pickle.dumps(kernel))
    one, other = (k.sample(state, data, held).z for k in (kernel, again))
    assert all(np.array_equal(one[name], other[name]) for name in one)
    assert kernel.default_fields == ("z",)


def test_double_precision(x64):
    x, y = (jnp.asarray(part, jnp.float64) for part in make_data(12, 4))
    kernel = GaussianGibbs(regression_model, ["w"], collapsed=["tau", "sigma"])
    mcmc = MCMC(kernel, num_warmup=1, num_samples=2, progress_bar=False)
    mcmc.run(random.key(0), x, y)
    assert all(draws.dtype == jnp.float64 for draws in mcmc.get_samples().values())


# --------------------------------------------------------------------------------------------------------- errors


def other_models():
    normal = dist.Normal(0.0, 1.0)

    def laplace(y=1.0):
        numpyro.sample("y", dist.Normal(numpyro.sample("w", dist.Laplace(0.0, 1.0)), 1.0), obs=y)

    def discrete(y=1.0):
        numpyro.sample("y", dist.Normal(numpyro.sample("w", dist.Bernoulli(0.5)), 1.0), obs=y)

    def curved(y=1.0):
        numpyro.sample("y", dist.Normal(jnp.tanh(numpyro.sample("w", normal)), 1.0), obs=y)

    def bent(y=1.0):
        numpyro.sample("y", dist.Normal(jax.nn.relu(numpyro.sample("w", normal)), 1.0), obs=y)

    def noisy(y=1.0):
        numpyro.sample("y", dist.Normal(0.0, jnp.exp(numpyro.sample("w", normal))), obs=y)

    def poisson(y=1):
        numpyro.sample("y", dist.Poisson(jnp.exp(numpyro.sample("w", normal))), obs=y)

    def penalized(y=1.0):
        w = numpyro.sample("w", normal)
        numpyro.sample("y", dist.Normal(w, 1.0), obs=y)
        numpyro.factor("penalty", -jnp.abs(w))

    def masked(y=1.0):
        w = numpyro.sample("w", normal)
        numpyro.sample("y", dist.Normal(w, 1.0).mask(w > 0), obs=y)

    def scaling(y=1.0):
        w = numpyro.sample("w", normal)
        v = numpyro.sample("v", dist.Normal(0.0, jnp.exp(w)))
        numpyro.sample("y", dist.Normal(v, 1.0), obs=y)

    def scale_below(y=1.0):
        w = numpyro.sample("w", normal)
        s = numpyro.sample("s", dist.LogNormal(w, 1.0))
        numpyro.sample("y", dist.Normal(w, s), obs=y)

    def unused(y=1.0):
        numpyro.sample("w", normal)
        numpyro.sample("y", normal, obs=y)

    def real(y=1.0):
        s = numpyro.sample("s", normal)
        numpyro.sample("y", dist.Normal(s + numpyro.sample("w", normal), 1.0), obs=y)

    def vector(y=1.0):
        s = numpyro.sample("s", dist.HalfNormal(jnp.ones(2)))
        numpyro.sample("y", dist.Normal(numpyro.sample("w", normal), s[0]), obs=y)

    return locals()


@pytest.mark.parametrize(
    ("name", "sites", "collapsed", "message"),
    [
        ("laplace", ["w"], [], "a site with a Laplace prior"),
        ("discrete", ["w"], [], "a site with a BernoulliProbs prior"),
        ("curved", ["w"], [], "is not linear"),
        ("bent", ["w"], [], "is not linear"),
        ("noisy", ["w"], [], "the scale of 'y' depends"),
        ("poisson", ["w"], [], r"'y' \(Poisson\) depends"),
        ("penalized", ["w"], [], r"'penalty' \(Unit\) depends"),
        ("masked", ["w"], [], "scale or mask of the log density of 'y' depends"),
        ("scaling", ["w", "v"], [], "the scale of 'v' depends"),
        ("scale_below", ["w"], ["s"], r"'s' \(.*\) depends"),
        ("unused", ["w"], [], "is the data passed"),
        ("real", ["w"], ["s"], r"'s' of shape \(\) with support Real"),
        ("vector", ["w"], ["s"], r"'s' of shape \(2,\)"),
        ("vector", ["w"], [], "no 's', which nothing draws"),
        ("vector", ["v"], ["s"], "Known: s, w"),
        ("vector", ["w"], ["x"], "Known: s, w"),
    ],
)
def test_models_that_do_not_fit_are_refused(name, sites, collapsed, message):
    kernel = GaussianGibbs(other_models()[name], sites, collapsed=collapsed)
    with pytest.raises(ValueError, match=message) as raised:
        kernel.init(random.key(0), 0, None, model_args=(), model_kwargs={})
    assert str(raised.value).startswith("infer.GaussianGibbs: argument `")


@pytest.mark.parametrize("sites", ["w", [], ["w", "w"], [1], None])
def test_names_that_are_none_are_refused(sites):
    with pytest.raises(TypeError, match=r"infer\.GaussianGibbs: argument `sites`"):
        GaussianGibbs(regression_model, sites)


def test_a_site_on_both_sides_is_refused():
    with pytest.raises(ValueError, match="either drawn given the scales or one of them"):
        GaussianGibbs(regression_model, ["w"], collapsed=["w"])


def test_a_site_of_another_block_is_refused():
    kernel = GaussianGibbs(regression_model, ["w"], collapsed=["tau"])
    held = {"_gibbs_sites": {"sigma": 0.5, "tau": 1.0}}
    with pytest.raises(ValueError, match="Another block of `Gibbs` draws it"):
        kernel.init(random.key(0), 0, None, model_args=make_data(4, 2), model_kwargs=held)


def test_linearity_that_is_measured_needs_data():
    """A linear map is known from the program, whatever the data; one that has to be measured is not."""

    def init(x, model):
        kernel = GaussianGibbs(model, ["w"], collapsed=["sigma", "tau"])
        return kernel.init(random.key(0), 0, None, model_args=(x, x[:, 0]), model_kwargs={}).z["w"]

    def bent(x, y):
        regression_model(jax.nn.relu(x), y)
        numpyro.sample("z", dist.Normal(jax.nn.relu(x[0, 0]), 1.0), obs=0.0)

    x, _ = make_data(4, 2)
    assert jax.jit(partial(init, model=regression_model))(x).shape == (2,)
    assert jax.jit(partial(init, model=bent))(x).shape == (2,)


def test_exported():
    assert infer.GaussianGibbs is GaussianGibbs
