"""Linear sites integrated out of a model: densities, draws of them, and what a user does with the result."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.integrate
import scipy.stats
from jax import random
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, Gibbs, Predictive
from numpyro.infer.util import log_density

import numpyro_bnn as bnn
from numpyro_bnn import infer, models, nn, priors, symmetry
from numpyro_bnn.infer.collapse import log_marginal, sample
from numpyro_bnn.infer.linear_blocks import Blocks
from numpyro_bnn.infer.linear_structure import LinearGaussian, LinearModel, read
from numpyro_bnn.program.reading import Reading

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


SHAPES = [(12, 4), (4, 12)]  # more data than weights, and more weights than data


def whole(x):
    """A linear map as one block."""
    return Blocks(x, *map(np.arange, x.shape))


def make_data(n, p):
    rng = np.random.default_rng(n)
    x = rng.normal(size=(n, p))
    return jnp.asarray(x, jnp.float32), jnp.asarray(x.sum(1) + rng.normal(size=n), jnp.float32)


def posterior(x, y, sd_noise, mean, sd, weight=1.0):
    """Mean and covariance of weights with prior N(mean, sd^2), in float64."""
    x, y, mean = (np.asarray(a, np.float64) for a in (x, y, mean))
    root = np.broadcast_to(np.asarray(weight, np.float64), y.shape) / sd_noise**2
    precision = x.T @ (root[:, None] * x) + np.diag(np.broadcast_to(np.asarray(sd, np.float64) ** -2.0, mean.shape))
    covariance = np.linalg.inv(precision)
    return mean + covariance @ (x.T @ (root * (y - x @ mean))), covariance


def assert_normal(draws, mean, covariance):
    """Draws (S, P) are from that normal distribution: every whitened coordinate, and their squared radius."""
    white = np.linalg.solve(np.linalg.cholesky(covariance), (np.asarray(draws, np.float64) - mean).T)
    tests = [scipy.stats.kstest(row, "norm").pvalue for row in white]
    tests.append(scipy.stats.kstest((white**2).sum(0), scipy.stats.chi2(len(mean)).cdf).pvalue)
    # The product of two whitened coordinates has mean 0 and variance 1: off-diagonal correlations.
    products = [white[i] @ white[j] / np.sqrt(white.shape[1]) for i in range(len(white)) for j in range(i)]
    tests += [2 * scipy.stats.norm.sf(abs(z)) for z in products]
    assert min(tests) > RATE / len(tests)


def draws_of(kernel, args, kwargs=None, held=None, number=4000):
    """Independent draws by one transition each of a kernel whose draws do not depend on where they start."""
    kwargs = {**(kwargs or {}), **({"_gibbs_sites": held} if held else {})}
    state = kernel.init(random.key(1), 0, None, model_args=args, model_kwargs=kwargs)
    keys = random.split(random.key(2), number)
    return jax.jit(jax.vmap(lambda key: kernel.sample(state._replace(rng_key=key), args, kwargs).z))(keys)


@pytest.mark.parametrize("shape", SHAPES)
def test_draws_and_marginal_density_are_exact(shape):
    (x, y), (n, p) = make_data(*shape), shape
    sd = 1.3 * np.linspace(0.5, 2.0, p)
    ones = jnp.ones(n)
    gaussian = LinearGaussian(jnp.asarray(sd, jnp.float32), jnp.ones(p), y, 0.3 * x.sum(1), 0.7 * ones, ones)
    draws = jax.vmap(lambda key: sample(key, gaussian, whole(x)))(random.split(random.key(0), 4000))
    assert_normal(0.3 + draws, *posterior(x, y, 0.7, np.full(p, 0.3), sd))
    scaled = np.asarray(x, float) * sd
    covariance = scaled @ scaled.T + 0.49 * np.eye(n)
    exact = scipy.stats.multivariate_normal(gaussian.mean, covariance).logpdf(np.asarray(y))
    assert float(log_marginal(gaussian, whole(x))) == pytest.approx(exact, rel=2e-5)


def locations(x, y=None, mask=True, power=1.0):
    """Locations with a location; several data sites, some masked and some scaled; signs in affine transforms."""
    mu = numpyro.sample("mu", dist.Normal(1.0, 2.0))
    a = numpyro.sample(
        "a", dist.TransformedDistribution(dist.Normal(0.0, jnp.ones(3)), dist.transforms.AffineTransform(mu, -0.5))
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
    kwargs = {"mask": jnp.asarray(mask), "power": 0.4}
    reading = Reading(locations, (x, y), kwargs)
    structure = read("test", reading, ("slope", "a", "mu"))
    linear = LinearModel(reading, structure, {})

    def draw(key):
        traced = linear.trace(sample(key, linear.gaussian(), linear.blocks()))
        return {name: traced[name]["value"] for name in structure.shapes}

    draws = jax.jit(jax.vmap(draw))(random.split(random.key(2), 4000))
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
    return x, LinearGaussian(sd, jnp.ones(p), y, 0 * y, 0.5 * ones, ones)


@pytest.mark.parametrize(("shape", "orders"), [(SHAPES[0], 12), (SHAPES[1], 8)])
def test_draws_under_prior_scales_of_many_orders_of_magnitude(shape, orders):
    """Squares of such a condition number do not fit into single precision."""
    x, gaussian = spread_scales(shape, orders)
    draws = jax.vmap(lambda key: sample(key, gaussian, whole(x)))(random.split(random.key(0), 4000))
    mean, covariance = posterior(x, gaussian.value, 0.5, np.zeros(shape[1]), gaussian.prior_sd)
    # Each weight by itself; together they would be compared through the inverse of a singular matrix.
    scaled = (np.asarray(draws) - mean) / np.sqrt(np.diag(covariance))
    assert min(scipy.stats.kstest(column, "norm").pvalue for column in scaled.T) > RATE / shape[1]


@pytest.mark.parametrize("shape", SHAPES)
def test_marginal_density_under_prior_scales_of_many_orders_of_magnitude(shape):
    x, gaussian = spread_scales(shape, 12)
    # By the singular values of the scaled map: the covariance of the data is singular even in double precision.
    left, singular, _ = np.linalg.svd(np.asarray(x, np.float64) * np.asarray(gaussian.prior_sd, np.float64))
    variance = 0.25 + np.append(singular**2, np.zeros(shape[0] - len(singular)))
    exact = scipy.stats.norm.logpdf(left.T @ np.asarray(gaussian.value, np.float64), 0.0, np.sqrt(variance)).sum()
    assert float(log_marginal(gaussian, whole(x))) == pytest.approx(exact, rel=1e-4)


def test_marginal_density_of_powers_of_densities():
    """Tempered data and a tempered prior, against quadrature over the one weight."""
    value, power = np.array([0.4, -1.0, 2.0]), np.array([0.3, 1.0, 0.0])
    slope, sd, sd_prior, power_prior = np.array([1.0, -2.0, 0.5]), np.array([0.5, 1.0, 2.0]), 1.7, 0.25

    def density(u):
        log = power @ scipy.stats.norm.logpdf(value, slope * u + 0.1, sd)
        return np.exp(log + power_prior * scipy.stats.norm.logpdf(u, 0.0, sd_prior))

    exact = np.log(scipy.integrate.quad(density, -np.inf, np.inf)[0])
    arrays = ([sd_prior], [power_prior], value, np.full(3, 0.1), sd, power)
    gaussian = LinearGaussian(*(jnp.asarray(part, jnp.float32) for part in arrays))
    slope = jnp.asarray(slope, jnp.float32)[:, None]
    assert float(log_marginal(gaussian, whole(slope))) == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_draws_of_powers_of_densities(shape):
    """A power of a normal density is one of a smaller precision."""
    (x, y), (n, p) = make_data(*shape), shape
    weight, gamma = np.linspace(0.0, 1.5, n), np.linspace(0.3, 2.0, p)
    arrays = (np.full(p, 1.2), gamma, y, np.zeros(n), np.full(n, 0.7), weight)
    gaussian = LinearGaussian(*(jnp.asarray(part, jnp.float32) for part in arrays))
    draws = jax.vmap(lambda key: sample(key, gaussian, whole(x)))(random.split(random.key(0), 4000))
    assert_normal(draws, *posterior(x, y, 0.7, np.zeros(p), 1.2 / np.sqrt(gamma), weight))


@pytest.mark.slow
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


LAST = ["net/Dense_1.kernel", "net/Dense_1.bias"]
TARGETS = jnp.stack([jnp.asarray(Y), jnp.sin(jnp.asarray(X[:, 0]))], 1)


def two_outputs(prior=None, **options):
    """A network of two outputs, with its output layer integrated out, and values of all other sites."""
    model = models.regression(nn.MLP([3, 2], "tanh"), prior or priors.Normal(1.0, fan_in_scaling=False), **options)
    hidden = infer.collapse(model, LAST, X, TARGETS)
    traced = handlers.trace(handlers.seed(hidden, 1)).get_trace(X, TARGETS)
    values = {n: s["value"] for n, s in traced.items() if s["type"] == "sample" and not s["is_observed"]}
    return model, hidden, values


@pytest.mark.parametrize("options", [{}, {"noise": 0.3}], ids=["learned noise", "fixed noise"])
def test_several_outputs_have_the_marginal_density_and_draws_of_all(options):
    model, hidden, values = two_outputs(**options)
    layer = {name.rpartition(".")[2]: np.asarray(values[f"net/Dense_0.{name}"], float) for name in ("kernel", "bias")}
    h = np.column_stack([np.tanh(X @ layer["kernel"] + layer["bias"]), np.ones(7)])
    sigma = float(values.get("sigma", 0.3))
    covariance = h @ h.T + sigma**2 * np.eye(7)
    expected = sum(scipy.stats.multivariate_normal(np.zeros(7), covariance).logpdf(y) for y in np.asarray(TARGETS).T)
    trace = handlers.trace(handlers.substitute(hidden, values)).get_trace(X, TARGETS)
    np.testing.assert_allclose(trace["_collapsed_log_likelihood"]["fn"].log_factor, expected, rtol=1e-5)

    reading = Reading(model, (jnp.asarray(X), TARGETS))
    linear = LinearModel(reading, read("test", reading, tuple(LAST)), values)
    blocks = linear.blocks()
    assert blocks.matrix.shape == (2, 7, 4)
    draws = jax.jit(jax.vmap(lambda key: sample(key, linear.gaussian(), blocks)))(random.split(random.key(0), 4000))
    both = np.kron(h, np.eye(2))  # rows by datum, then output; columns by unit, then output
    assert_normal(draws, *posterior(both, np.ravel(TARGETS), sigma, np.zeros(8), 1.0))


KERNELS = {
    "NUTS": lambda hidden: NUTS(hidden, max_tree_depth=3),
    "MCLMC": lambda hidden: infer.MCLMC(hidden, steps_per_draw=3),
    "warm start": lambda hidden: infer.MCLMC(hidden, steps_per_draw=3, warm_start=infer.WarmStart(0.5, num_steps=40)),
    "orbit moves": lambda hidden: infer.OrbitMoves(
        NUTS(hidden, max_tree_depth=3), [symmetry.Permutation([("net/Dense_0.kernel", 1), ("net/Dense_0.bias", 0)])]
    ),
    "tempering": lambda hidden: infer.ParallelTempering(NUTS(hidden, max_tree_depth=3), 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sequential", "vectorized"])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_and_exports_of_several_outputs(name, method):
    """Draws of the output layer belong to those of the layer below, also of ensemble members; nothing is lost."""
    _, hidden, _ = two_outputs(priors.Hierarchical(centered=True))
    kernel = KERNELS[name](hidden)
    mcmc = MCMC(kernel, num_warmup=20, num_samples=6, num_chains=2, chain_method=method, progress_bar=False)
    mcmc.run(jax.random.key(0), X, TARGETS)
    found = mcmc.get_samples(group_by_chain=True)
    assert found[LAST[0]].shape == (2, 6, 3, 2)
    assert all(np.isfinite(value).all() for value in found.values())
    idata = bnn.to_inference_data(
        mcmc, predictions={"x": X[:2]}, **({"members": True} if name == "warm start" else {})
    )
    first, bias, kernel, last = (
        idata["posterior"][f"net.{name}"].to_numpy()
        for name in ("Dense_0.kernel", "Dense_0.bias", "Dense_1.kernel", "Dense_1.bias")
    )
    mean = np.tanh(X[:2] @ first + bias[..., None, :]) @ kernel + last[..., None, :]
    np.testing.assert_allclose(idata["predictions"]["y_mean"], mean, rtol=1e-4, atol=1e-5)


def heads(x, y, shared=False):
    """The mean and the log sd have weights of their own, or are two columns of one site."""
    v = numpyro.sample("v", dist.Normal(0.0, 1.0).expand([3, 4]).to_event(2))
    w = numpyro.sample("w", dist.Normal(0.0, 0.8).expand([4, 1 + shared]).to_event(2))
    u = w[:, 1] if shared else numpyro.sample("u", dist.Normal(0.0, 0.5).expand([4]).to_event(1))
    h = jnp.tanh(x @ v)
    numpyro.sample("y", dist.Normal(h @ w[:, 0], jnp.exp(h @ u)).to_event(1), obs=y)


def test_weights_of_the_mean_of_heteroscedastic_data():
    """They are normal given all else, which stays in the sampler; one site with both heads is refused."""
    hidden = infer.collapse(heads, ["w"], X, Y)
    values = {"v": RNG.normal(size=(3, 4)), "u": RNG.normal(size=4)}
    h = np.tanh(X.astype(float) @ values["v"])
    covariance = 0.64 * h @ h.T + np.diag(np.exp(2 * h @ values["u"]))
    expected = scipy.stats.multivariate_normal(np.zeros(7), covariance).logpdf(Y)
    expected += scipy.stats.norm.logpdf(values["v"]).sum() + scipy.stats.norm.logpdf(values["u"], 0, 0.5).sum()
    at = {name: jnp.asarray(value, jnp.float32) for name, value in values.items()}
    np.testing.assert_allclose(log_density(hidden, (X, Y), {}, at)[0], expected, rtol=1e-5)
    model = models.regression(nn.MLP([3, 2], "tanh"), priors.Normal(1.0), heteroscedastic=True)
    for refused, sites in ((lambda x, y: heads(x, y, True), ["w"]), (heads, ["w", "u"]), (model, LAST)):
        with pytest.raises(ValueError, match=r"the scale of 'y' depends.*give the mean weights of its own"):
            infer.collapse(refused, sites, X, Y)


def hierarchy(y=None):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    top = numpyro.sample("top", dist.Normal(0.0, 1.0))
    group = numpyro.sample("group", dist.Normal(top, scale))
    numpyro.sample("y", dist.Normal(group, 1.0), obs=y)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
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

    def unused(y=1.0):
        numpyro.sample("w", normal)
        numpyro.sample("y", normal, obs=y)

    return locals()


@pytest.mark.parametrize(
    ("name", "sites", "message"),
    [
        ("laplace", ["w"], "a site with a Laplace prior"),
        ("discrete", ["w"], "a site with a BernoulliProbs prior"),
        ("curved", ["w"], "is not linear"),
        ("bent", ["w"], "is not linear"),
        ("noisy", ["w"], "the scale of 'y' depends"),
        ("poisson", ["w"], r"'y' \(Poisson\) depends"),
        ("penalized", ["w"], r"'penalty' \(Unit\) depends"),
        ("masked", ["w"], "scale or mask of the log density of 'y' depends"),
        ("scaling", ["w", "v"], "the scale of 'v' depends"),
        ("unused", ["w"], "is the data passed"),
    ],
)
def test_models_that_do_not_fit_are_refused(name, sites, message):
    with pytest.raises(ValueError, match=message) as raised:
        infer.collapse(other_models()[name], sites)
    assert str(raised.value).startswith("infer.collapse: argument `")


@pytest.mark.parametrize("sites", ["w", [], ["w", "w"], [1], None])
def test_wrong_names_are_refused(sites):
    with pytest.raises(TypeError, match=r"infer\.collapse: argument `sites`"):
        infer.collapse(regression, sites, X, Y)


def test_linearity_that_is_measured_needs_data():
    """A linear map is known from the program, whatever the data; one that has to be measured is not."""

    def names(x, model):
        structure = read("test", Reading(model, (x, x[:, 0])), ("w",))
        return jnp.zeros(structure.shapes["w"])

    def bent(x, y):
        regression(x, y)
        w = numpyro.sample("v", dist.Normal(0.0, 1.0))
        numpyro.sample("z", dist.Normal(jax.nn.relu(x[0, 0]) + w, 1.0), obs=0.0)

    def measured(x, y):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(jnp.where(w > 0, 1.0, 1.0) * w * x[:, 0], 1.0), obs=y)

    x = jnp.asarray(X)
    assert jax.jit(lambda x: names(x, regression))(x).shape == (3,)
    assert jax.jit(lambda x: names(x, bent))(x).shape == (3,)
    assert names(x, measured).shape == ()
    with pytest.raises(ValueError, match="traced by a transformation"):
        jax.jit(lambda x: names(x, measured))(x)
