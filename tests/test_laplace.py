"""AutoLaplace against closed forms, against dense autodiff, and between its own structures."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.flatten_util import ravel_pytree
from jax.scipy.stats import multivariate_normal
from numpyro import handlers
from numpyro.infer import Predictive, log_likelihood
from numpyro.infer.util import potential_energy

import numpyro_bnn as bnn
from numpyro_bnn import guides, nn, priors
from numpyro_bnn.guides.laplace import fitting, structures, tuning

KEY = jax.random.key(0)
STRUCTURES = ["full", "kron", "diag", "low_rank"]


def one_fast(fast, names=("full", "kron", "diag", "low_rank")):
    """Parameters of which all but one are slow."""
    return [pytest.param(name, marks=[] if name == fast else [pytest.mark.slow]) for name in names]


RNG = np.random.default_rng(0)
X, Y, CLASSES = RNG.normal(size=(12, 3)), RNG.normal(size=12), RNG.integers(0, 3, size=12)


# In float64, so that tolerances are those of rounding; a short search for the mode serves where any point does.
pytestmark = [pytest.mark.usefixtures("x64"), pytest.mark.filterwarnings("ignore:.*posterior sds from the mode")]


def linear(x, y=None, batch_size=None, scale=2.0):
    w = numpyro.sample("w", dist.Normal(0.5, scale).expand([3]).to_event(1))
    with numpyro.plate("data", x.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, 0.7), obs=None if y is None else y[i])


def logistic(x, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([3]).to_event(1))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def poisson(x, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(x @ w)), obs=y)


def softmax(x, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3, 3]).to_event(2))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=x @ w), obs=y)


def network(x, y=None, batch_size=None, prior=None, likelihood="normal", net=None):
    net = bnn.random_network(
        "net", net or nn.MLP([4, 3 if likelihood != "normal" else 1], "tanh"), x.shape[1:], prior
    )
    with numpyro.plate("data", x.shape[0], subsample_size=batch_size) as i:
        f, obs = net(x[i]), None if y is None else y[i]
        if likelihood == "normal":
            numpyro.sample("y", dist.Normal(f[..., 0], 0.3), obs=obs)
        elif likelihood == "heteroscedastic":
            numpyro.sample("y", dist.Normal(f[..., 0], jnp.exp(f[..., 1])), obs=obs)
        elif likelihood == "categorical":
            numpyro.sample("y", dist.Categorical(logits=f), obs=obs)
        else:
            numpyro.sample("y", dist.Categorical(probs=jax.nn.softmax(f)), obs=obs)


def fitted(model, structure, *args, **settings):
    options = {name: settings.pop(name) for name in ("sites", "rank") if name in settings}
    guide = guides.AutoLaplace(model, structure, **options)
    return guide, guide.run(KEY, *args, progress_bar=False, **settings)


def covariance(guide, params):
    """(P, P) from the linear map of noise that the guide applies, and the sites in this order."""
    families = guide._families(params)
    if guide.structure == "full":
        return families[0].covariance_matrix
    if guide.structure == "low_rank":
        root = jax.vmap(families[0].times)(jnp.eye(len(families[0].loc))).T
        return root @ root.T
    parts = {}
    for (block, _), fn in zip(guide._blocks, families, strict=True):
        root = jax.vmap(fn.times)(jnp.eye(len(fn.loc))).T
        parts[next(iter(block.shapes))] = root @ root.T
    parts |= {n: jnp.diag(jnp.ravel(fn.scale) ** 2) for n, fn in guide._normals(params).items() if n in guide._chosen}
    return jax.scipy.linalg.block_diag(*(parts[name] for name in guide._chosen))


# ---------------------------------------------------------------------------------------- closed forms


def exact_linear(scale=2.0):
    """Mean, covariance and log evidence of ``linear``."""
    cov = jnp.linalg.inv(X.T @ X / 0.49 + jnp.eye(3) / scale**2)
    mean = cov @ (X.T @ Y / 0.49 + 0.5 / scale**2)
    marginal = 0.49 * jnp.eye(len(X)) + scale**2 * X @ X.T
    return mean, cov, multivariate_normal.logpdf(Y, 0.5 * X.sum(axis=1), marginal)


@pytest.mark.parametrize("structure", ["full", "kron", "low_rank"])
@pytest.mark.core
def test_linear_regression_is_exact(structure):
    """Posterior, evidence and predictive of the conjugate model; ``w`` is a layer of one output, so kron is exact."""
    guide, fit = fitted(linear, structure, X, Y)
    mean, cov, evidence = exact_linear()
    median = guide.median(fit.params)["w"]
    np.testing.assert_allclose(median, mean, rtol=1e-7)
    np.testing.assert_allclose(covariance(guide, fit.params), cov, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(fit.log_evidence, evidence, rtol=1e-9)
    new = jnp.asarray(np.random.default_rng(1).normal(size=(5, 3)))
    found = guide.predictive(fit.params, new, covariance=True)
    np.testing.assert_allclose(found.mean, new @ mean, rtol=1e-6)
    np.testing.assert_allclose(found.variance, jnp.diag(new @ cov @ new.T) + 0.49, rtol=1e-7)
    np.testing.assert_allclose(found.covariance[:, 0, :, 0], new @ cov @ new.T, rtol=1e-6, atol=1e-9)
    assert fit.converged
    score = guide.log_predictive_density(fit.params, new, jnp.arange(5.0))
    expected = dist.Normal(found.mean, jnp.sqrt(found.variance)).log_prob(jnp.arange(5.0))
    np.testing.assert_allclose(score, expected, rtol=1e-9)


@pytest.mark.parametrize(
    ("model", "y"),
    [(logistic, CLASSES % 2), (poisson, CLASSES), (softmax, CLASSES)],
    ids=["logistic", "poisson", "softmax"],
)
def test_canonical_links_give_the_hessian(model, y):
    """The Gauss-Newton matrix of a linear model with a canonical link is the Hessian of the potential."""
    guide, fit = fitted(model, "full", X, y)
    at = {"w": guide.median(fit.params)["w"]}
    flat, back = ravel_pytree(at)
    hessian = jax.hessian(lambda v: potential_energy(model, (X, y), {}, back(v)))(flat)
    np.testing.assert_allclose(covariance(guide, fit.params) @ hessian, jnp.eye(len(flat)), atol=1e-6)
    energy = potential_energy(model, (X, y), {}, at)
    laplace = -energy + len(flat) / 2 * jnp.log(2 * jnp.pi) - jnp.linalg.slogdet(hessian)[1] / 2
    np.testing.assert_allclose(fit.log_evidence, laplace, rtol=1e-9)


@pytest.mark.slow
def test_learned_noise_is_part_of_the_gaussian():
    """The Fisher information of log sigma is 2 N, that of its prior exact; weights and noise do not correlate."""

    def model(x, y=None):
        sigma = numpyro.sample("sigma", dist.LogNormal(0.0, 1.0))
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w, sigma), obs=y)

    for structure in STRUCTURES:
        guide, fit = fitted(model, structure, X, Y)
        draws = guide.sample_posterior(KEY, fit.params, sample_shape=(4000,))["sigma"]
        sd = (2 * len(X) + 1) ** -0.5  # the prior of log sigma is N(0, 1)
        np.testing.assert_allclose(jnp.std(jnp.log(draws)), sd, rtol=5 / (2 * 4000) ** 0.5)
        found = guide.predictive(fit.params, X)
        m = jnp.log(guide.median(fit.params)["sigma"])
        np.testing.assert_allclose(
            found.variance - found.output_variance["loc"], jnp.exp(2 * m + 2 * sd**2), rtol=1e-6
        )


# ------------------------------------------------------------------------------------- dense Jacobians


LIKELIHOODS = ["normal", "heteroscedastic", "categorical", "probs"]


def dense_precision(model, args, settings, at, names):
    """J^T H J by jacrev of all logits or moments, with the Fisher information written out, plus the prior."""
    flat, back = ravel_pytree({name: at[name] for name in names})
    likelihood = settings.get("likelihood", "normal")

    def outputs(flat):
        model_at = handlers.substitute(handlers.seed(model, 0), {**at, **back(flat)})
        fn = handlers.trace(model_at).get_trace(*args, **settings)["y"]["fn"]
        if likelihood in ("normal", "heteroscedastic"):
            return jnp.stack([fn.loc, jnp.log(fn.scale) + 0 * fn.loc], axis=1)
        return jnp.log(fn.probs)

    f, jac = outputs(flat), jax.jacrev(outputs)(flat)
    if likelihood in ("normal", "heteroscedastic"):
        fisher = jax.vmap(lambda row: jnp.diag(jnp.array([jnp.exp(-2 * row[1]), 2.0])))(f)
    else:
        fisher = jax.vmap(lambda row: jnp.diag(jnp.exp(row)) - jnp.outer(jnp.exp(row), jnp.exp(row)))(f)
    trace = handlers.trace(handlers.seed(handlers.substitute(model, at), 0)).get_trace(*args, **settings)
    variances, _ = ravel_pytree(
        {name: jnp.broadcast_to(trace[name]["fn"].variance, at[name].shape) for name in names}
    )
    return jnp.einsum("ndp,nde,neq->pq", jac, fisher, jac) + jnp.diag(1 / variances), back


def reordered(guide, params, names):
    """The covariance with sites in sorted order, as ``ravel_pytree`` has them."""
    sizes = {name: np.size(guide._init_locs[name]) for name in guide._chosen}
    starts = dict(zip(sizes, np.cumsum([0, *sizes.values()])[:-1], strict=True))
    order = np.concatenate([starts[name] + np.arange(sizes[name]) for name in names])
    return covariance(guide, params)[np.ix_(order, order)]


@pytest.mark.parametrize("likelihood", one_fast("categorical", LIKELIHOODS))
def test_network_against_dense_jacobians(likelihood):
    """Full is (J^T H J + prior)^-1; diagonal its diagonal precision; low rank of full rank is full."""
    y = CLASSES if likelihood in ("categorical", "probs") else Y
    settings = {"likelihood": likelihood}
    full, fit = fitted(network, "full", X, y, num_epochs=30, **settings)
    at = {name: full.median(fit.params)[name] for name in full._latent()}
    names = sorted(at)
    precision, _ = dense_precision(network, (X, y), settings, at, names)
    expected = jnp.linalg.inv(precision)
    np.testing.assert_allclose(reordered(full, fit.params, names), expected, rtol=1e-6, atol=1e-9)
    start = {"init_params": at, "num_epochs": 0, **settings}
    diag, of_diag = fitted(network, "diag", X, y, **start)
    np.testing.assert_allclose(jnp.diag(reordered(diag, of_diag.params, names)), 1 / jnp.diag(precision), rtol=1e-8)
    low, of_low = fitted(network, "low_rank", X, y, rank=1000, **start)
    np.testing.assert_allclose(reordered(low, of_low.params, names), expected, rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(of_low.log_evidence, fit.log_evidence, rtol=1e-8)
    none, of_none = fitted(network, "low_rank", X, y, rank=1, **start)
    variances = jnp.diag(reordered(none, of_none.params, names))
    assert jnp.all(variances >= 1 / jnp.diag(precision) - 1e-9)  # a subset of the correlations


# ------------------------------------------------------------------------------------------ Kronecker


def block(guide, params, name):
    start = sum(np.size(guide._init_locs[n]) for n in guide._chosen[: guide._chosen.index(name)])
    size = np.size(guide._init_locs[name])
    return covariance(guide, params)[start : start + size, start : start + size]


def kfac(inputs, grads, prior_precision):
    """(A x G / rows + prior)^-1 for inputs (B, T, I) and gradients (B, T, D, O) of a weight (I, O)."""
    rows = inputs.shape[0] * inputs.shape[1]
    left = np.einsum("bti,btj->ij", inputs, inputs)
    right = np.einsum("btdo,btdp->op", grads, grads) / rows
    return np.linalg.inv(np.kron(left, right) + prior_precision * np.eye(left.shape[0] * right.shape[0]))


def test_kron_is_the_product_of_its_factors():
    """Both layers of a network by the formula, with inputs and gradients written out."""
    guide, fit = fitted(network, "kron", X, Y, num_epochs=30)
    at = guide.median(fit.params)
    hidden = jnp.tanh(X @ at["net/Dense_0.kernel"] + at["net/Dense_0.bias"])
    last = jnp.ones((len(X), 1, 1, 1)) / 0.3
    first = (1 - hidden**2)[:, None, None] * at["net/Dense_1.kernel"][:, 0] / 0.3
    ones = jnp.ones((len(X), 1, 1))
    trace = handlers.trace(handlers.seed(network, 0)).get_trace(X)
    cases = {
        "net/Dense_0.kernel": (X[:, None], first),
        "net/Dense_0.bias": (ones, first),
        "net/Dense_1.kernel": (hidden[:, None], last),
        "net/Dense_1.bias": (ones, last),
    }
    for name, (inputs, grads) in cases.items():
        variance = float(np.ravel(trace[name]["fn"].variance)[0])
        found = block(guide, fit.params, name)
        np.testing.assert_allclose(found, kfac(inputs, grads, 1 / variance), rtol=1e-6, atol=1e-9)


def test_kron_of_one_row_is_exact():
    """With one row, inputs times gradients is the whole block of a layer."""

    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal(0.0, 1.5).expand([3, 2]).to_event(2))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Normal(jnp.tanh(x @ w), 0.5).to_event(1), obs=y)

    targets = jnp.array([[0.3, -0.2]])
    kron, fit = fitted(model, "kron", X[:1], targets)
    full, of_full = fitted(model, "full", X[:1], targets)
    # Two outputs with gradients of their own: G is a sum over outputs, which one input makes exact.
    np.testing.assert_allclose(covariance(kron, fit.params), covariance(full, of_full.params), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(fit.log_evidence, of_full.log_evidence, rtol=1e-9)


@pytest.mark.slow
def test_convolutions():
    """K-FAC of a convolution is that of all its patches; diagonal and full follow dense Jacobians."""
    images = jnp.asarray(np.random.default_rng(2).normal(size=(5, 4, 4, 2)))
    net = nn.Sequential([nn.Conv2d(3, 2), "tanh", nn.AvgPool(None), nn.Flatten(), nn.Dense(3)])
    settings = {"likelihood": "categorical", "net": net}
    y = CLASSES[:5]
    full, fit = fitted(network, "full", images, y, num_epochs=20, **settings)
    at = {name: full.median(fit.params)[name] for name in full._latent()}
    precision, _ = dense_precision(network, (images, y), settings, at, sorted(at))
    np.testing.assert_allclose(
        reordered(full, fit.params, sorted(at)), jnp.linalg.inv(precision), rtol=1e-6, atol=1e-9
    )
    start = {"init_params": at, "num_epochs": 0, **settings}
    diag, of_diag = fitted(network, "diag", images, y, **start)
    np.testing.assert_allclose(
        jnp.diag(reordered(diag, of_diag.params, sorted(at))), 1 / jnp.diag(precision), rtol=1e-8
    )
    kron, of_kron = fitted(network, "kron", images, y, **start)
    kernel, bias = at["net/Conv2d_0.kernel"], at["net/Conv2d_0.bias"]
    padded = jnp.pad(images, ((0, 0), (0, 1), (0, 1), (0, 0)))
    windows = jnp.stack([padded[:, a : a + 4, b : b + 4] for a in range(2) for b in range(2)], axis=3)
    inputs = windows.reshape(5, 16, 8)  # (height, width, channel) of the window
    before = inputs @ kernel.reshape(8, 3) + bias

    def log_probs(before):
        return jax.nn.log_softmax(jnp.tanh(before).mean(axis=1) @ at["net/Dense_0.kernel"] + at["net/Dense_0.bias"])

    p = jnp.exp(log_probs(before))
    root = jnp.sqrt(p)[:, :, None] * (jnp.eye(3) - p[:, None])
    grads = jnp.einsum("bde,betf->btdf", root, jax.vmap(jax.jacrev(lambda one: log_probs(one[None])[0]))(before))
    variance = float(
        np.ravel(handlers.trace(handlers.seed(network, 0)).get_trace(images, **settings)[
            "net/Conv2d_0.kernel"]["fn"].variance)[0]
    )  # fmt: skip
    found = block(kron, of_kron.params, "net/Conv2d_0.kernel")
    np.testing.assert_allclose(found, kfac(inputs, grads, 1 / variance), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("structure", ["kron", "low_rank"])
def test_families_are_normal_distributions(structure):
    """The density, draws and variances of the guide's own distributions, also when their bases are not orthogonal."""
    rng = np.random.default_rng(3)
    loc = jnp.asarray(rng.normal(size=6))
    if structure == "kron":
        layout = guides.laplace.jacobians.Layout((3, 2), (1, 0), (2, 3))
        left, right = (jnp.asarray(rng.normal(size=(n, n))) for n in (2, 3))
        fn = structures.KroneckerNormal(loc, left, right, jnp.asarray(rng.uniform(0.5, 2.0, size=(2, 3))), layout)
    else:
        basis, shrink = jnp.asarray(rng.normal(size=(6, 2))), jnp.array([0.3, 0.8])
        fn = structures.LowRankNormal(loc, jnp.asarray(rng.uniform(0.5, 2.0, size=6)), basis, shrink)
    root = jax.vmap(fn.times)(jnp.eye(6)).T
    value = jnp.asarray(rng.normal(size=(2, 6)))
    expected = dist.MultivariateNormal(loc, root @ root.T)
    np.testing.assert_allclose(fn.log_prob(value), expected.log_prob(value), rtol=1e-8)
    np.testing.assert_allclose(fn.variance, jnp.diag(root @ root.T), rtol=1e-10)
    draws = fn.sample(KEY, (20_000,))
    np.testing.assert_allclose(draws.mean(axis=0), loc, atol=float(5 * jnp.sqrt(fn.variance.max() / 20_000)))


# -------------------------------------------------------------------------------------------- the rows


@pytest.mark.parametrize("structure", one_fast("kron"))
def test_minibatches_and_order_of_rows_do_not_matter(structure):
    guide, fit = fitted(network, structure, X, Y, num_epochs=20)
    at = {name: guide.median(fit.params)[name] for name in guide._latent()}
    start = {"init_params": at, "num_epochs": 0}
    order = np.random.default_rng(4).permutation(len(X))
    for args, options in (((X, Y), {"batch_size": 5}), ((X[order], Y[order]), {})):
        other, of_other = fitted(network, structure, *args, **start, **options)
        np.testing.assert_allclose(
            covariance(other, of_other.params), covariance(guide, fit.params), rtol=1e-6, atol=1e-9
        )
        np.testing.assert_allclose(of_other.log_evidence, fit.log_evidence, rtol=1e-9)


@pytest.mark.parametrize("structure", one_fast("kron"))
def test_masked_rows_do_not_count(structure):
    """Rows that pad the data to a size: neither their inputs nor their number may matter."""

    def masked(x, y=None, known=True):
        net = bnn.random_network("net", nn.MLP([4, 1], "tanh"), x.shape[1:], priors.Normal())
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Normal(net(x)[..., 0], 0.3).mask(known), obs=y)

    guide, fit = fitted(masked, structure, X, Y, num_epochs=20)
    start = {"init_params": {name: guide.median(fit.params)[name] for name in guide._latent()}, "num_epochs": 0}
    padded = np.concatenate([X, 3 * X[:4]]), np.concatenate([Y, Y[:4]]), np.arange(16) < 12
    other, of_other = fitted(masked, structure, *padded, **start)
    np.testing.assert_allclose(
        covariance(other, of_other.params), covariance(guide, fit.params), rtol=1e-6, atol=1e-9
    )
    np.testing.assert_allclose(of_other.log_evidence, fit.log_evidence, rtol=1e-9)


def test_a_search_that_overflows_ends_at_its_lowest_point():
    """The density is NaN beyond 2, where the first steps go."""

    def model(y=None):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        loc = jnp.where(w > 2.0, jnp.nan, 50.0 * w)
        numpyro.sample("y", dist.Normal(loc, 30.0), obs=y)

    guide, fit = fitted(model, "diag", jnp.asarray(140.0))
    assert np.all(np.isfinite(fit.losses))
    w = guide.median(fit.params)["w"]
    lowest = -dist.Normal(0.0, 1.0).log_prob(w) - dist.Normal(50.0 * w, 30.0).log_prob(140.0)
    np.testing.assert_allclose(lowest, np.min(fit.losses), rtol=1e-6)


def little_noise(x, y=None):
    """A posterior in a narrow curved valley, whose mode is hard to find."""
    net = bnn.random_network("net", nn.MLP([6, 1], "tanh"), x.shape[1:], priors.Normal())
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(net(x)[..., 0], 0.01), obs=y)


SMOOTH = np.sin(2 * X[:, 0]) + X[:, 1]


def test_a_dense_precision_finds_the_mode():
    """Twenty steps of L-BFGS are far from it; the damped steps of Newton that follow are not."""
    full, fit = fitted(little_noise, "full", X, SMOOTH, num_epochs=20)
    assert fit.converged
    potential = jax.grad(lambda v: potential_energy(little_noise, (X, SMOOTH), {}, v))
    mode = full.median(fit.params)
    gradient = ravel_pytree({name: potential(mode)[name] for name in full._latent()})[0]
    newton = jnp.sqrt(gradient @ covariance(full, fit.params) @ gradient)
    assert newton < 0.1  # posterior sds along the gradient
    with pytest.warns(UserWarning, match="posterior sds from the mode"):
        _, short = fitted(little_noise, "kron", X, SMOOTH, num_epochs=20)
    assert fit.losses[-1] < short.losses[-1] - 10


@pytest.mark.parametrize("likelihood", ["heteroscedastic", "categorical"])
def test_second_derivatives_along_a_step(likelihood):
    """J^T F f'' against dense Hessians of the outputs and the Hessian of the log density in them."""
    net = nn.MLP([4, {"heteroscedastic": 2, "categorical": 3}[likelihood]], "tanh")
    y = CLASSES if likelihood == "categorical" else Y
    options = {"prior": priors.Normal(), "likelihood": likelihood, "net": net}
    guide, _ = fitted(network, "full", X, y, num_epochs=3, **options)
    problem = guide._problem
    start, back = ravel_pytree({name: guide._init_locs[name] for name in problem.sites})
    flat, step = jax.random.normal(KEY, start.shape), jax.random.normal(jax.random.key(1), start.shape)

    def outputs(flat):
        return net.apply({name.removeprefix("net/"): value for name, value in back(flat).items()}, X)

    def information(f):
        if likelihood == "categorical":
            return -jax.hessian(lambda f: dist.Categorical(logits=f).log_prob(0))(f)
        return jnp.diag(jnp.array([jnp.exp(-2 * f[1]), 2.0]))

    f, jacobian = outputs(flat), jax.jacfwd(outputs)(flat)
    second = jnp.einsum("nepq,p,q->ne", jax.hessian(outputs)(flat), step, step)
    expected = jnp.einsum("nep,nef,nf->p", jacobian, jax.vmap(information)(f), second)
    found = ravel_pytree(problem.bend(back(flat), back(step), None, ((X, y), options)))[0]
    np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-8)


def test_a_step_of_newton_is_of_second_order():
    """At a distance d from a root of exp(w) - y a straight step leaves d^2 / 2, the bent one less than d^3."""

    def model(y=None):
        numpyro.sample("y", dist.Normal(jnp.exp(numpyro.sample("w", dist.Normal(0.0, 1.0))), 1e-4), obs=y)

    d, call = 0.1, ((jnp.asarray(2.0),), {})
    guide, _ = fitted(model, "full", *call[0])
    problem, v = guide._problem, {"w": jnp.log(2.0) - d}
    found = fitting.measured(guide, problem, call, v, {})
    moved, *_ = fitting.newton(guide, problem, call, v, found, ({}, {}), 1)
    assert 0 < abs(moved["w"] - jnp.log(2.0)) < d**3


@jax.custom_vjp
def reverse_only(x):
    return jnp.tanh(x)


reverse_only.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (g * (1 - jnp.tanh(x) ** 2),))


@jax.custom_jvp
def slope_without_slope(x):
    return 1 - jnp.tanh(x) ** 2


slope_without_slope.defjvp(lambda x, t: (slope_without_slope(*x), t[0] * jnp.nan))


@jax.custom_jvp
def no_second_derivative(x):
    return jnp.tanh(x)


no_second_derivative.defjvp(lambda x, t: (jnp.tanh(*x), t[0] * slope_without_slope(*x)))


@pytest.mark.parametrize("unit", [reverse_only, no_second_derivative])
def test_steps_of_newton_are_straight_without_second_derivatives(unit):
    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3, 4]).to_event(2))
        v = numpyro.sample("v", dist.Normal(0.0, 1.0).expand([4]).to_event(1))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Normal(unit(x @ w) @ v, 0.1), obs=y)

    _, fit = fitted(model, "full", X, SMOOTH, num_epochs=20)
    assert fit.converged


def test_a_step_of_newton_counts_the_prior():
    """One damped step of a linear model whose prior is stronger than its data ends at the mode."""
    (mean, _, _), call = exact_linear(0.1), ((X, Y), {"scale": 0.1})
    guide, _ = fitted(linear, "full", X, Y, scale=0.1)
    v = {"w": mean + 0.1}
    found = fitting.measured(guide, guide._problem, call, v, {})
    moved, *_ = fitting.newton(guide, guide._problem, call, v, found, ({}, {}), 1)
    np.testing.assert_allclose(moved["w"], mean, atol=2e-4)  # the damping is 0.001


def test_a_fit_without_noise_ends_while_digits_last():
    """The noise of an exact fit tends to 0; the last point with enough digits for the precision is kept."""
    inputs = np.random.default_rng(0).normal(size=(200, 3))
    exact = bnn.models.regression(nn.MLP([20, 1], "tanh"), priors.Normal())
    with pytest.warns(UserWarning, match="posterior sds from the mode"):
        guide, fit = fitted(exact, "full", inputs, np.sin(2 * inputs[:, 0]) + inputs[:, 1], num_epochs=100)
    assert guide.median(fit.params)["sigma"] < 1e-4
    assert np.isfinite(fit.log_evidence)
    assert np.all(np.linalg.eigvalsh(covariance(guide, fit.params)) > 0)


def test_tuning_keeps_the_largest_evidence(monkeypatch):
    """Rounds whose precisions are far too small are tried, and not taken."""
    monkeypatch.setattr(tuning, "_fixed_point", lambda guide, problem, *_: dict.fromkeys(problem.fixed, 1e-6))
    _, plain = fitted(linear, "full", X, Y)
    _, tuned = fitted(linear, "full", X, Y, tune_prior=True, num_rounds=3)
    assert tuned.prior_precision == {"w": 1.0}
    np.testing.assert_allclose(tuned.log_evidence, plain.log_evidence, rtol=1e-9)


def test_a_second_run_is_that_of_its_own_data():
    guide, _ = fitted(linear, "full", jnp.asarray(X), jnp.asarray(Y))
    again = guide.run(KEY, jnp.asarray(X[:8]), jnp.asarray(Y[:8]), progress_bar=False)
    _, fresh = fitted(linear, "full", jnp.asarray(X[:8]), jnp.asarray(Y[:8]))
    for name, value in fresh.params.items():
        np.testing.assert_allclose(again.params[name], value, rtol=1e-9)


@pytest.mark.slow
def test_minibatches_find_the_mode():
    guide, fit = fitted(linear, "full", X, Y, batch_size=6, num_epochs=3000, patience=3000)
    np.testing.assert_allclose(guide.median(fit.params)["w"], exact_linear()[0], atol=0.02)
    assert fit.converged


def test_a_start_far_from_the_mode_is_marked():
    with pytest.warns(UserWarning, match="posterior sds from the mode"):
        _, fit = fitted(linear, "diag", X, Y, init_params={"w": jnp.full(3, 9.0)}, num_epochs=0)
    assert not fit.converged
    gradient = X.T @ (X @ jnp.full(3, 9.0) - Y) / 0.49 + (9.0 - 0.5) / 4
    np.testing.assert_allclose(fit.grad_norm, jnp.linalg.norm(gradient), rtol=1e-9)


@pytest.mark.slow
def test_rows_that_influence_one_another():
    net = nn.Sequential([nn.Dense(4), nn.BatchNorm(), "tanh", nn.Dense(1)])
    with pytest.raises(ValueError, match="batch normalization"):
        fitted(network, "kron", X, Y, net=net, num_epochs=5)
    guide, fit = fitted(network, "full", X, Y, net=net, num_epochs=20)
    at = {name: guide.median(fit.params)[name] for name in guide._latent()}
    precision, _ = dense_precision(network, (X, Y), {"net": net}, at, sorted(at))
    np.testing.assert_allclose(
        reordered(guide, fit.params, sorted(at)), jnp.linalg.inv(precision), rtol=1e-5, atol=1e-8
    )


# -------------------------------------------------------------------------------------------- evidence


@pytest.mark.parametrize("structure", one_fast("kron"))
def test_gradient_of_the_evidence(structure):
    """By autodiff and by differences, and zero at the fixed point."""
    guide, fit = fitted(network, structure, X, Y, num_epochs=50)
    problem, call = guide._problem, ((X, Y), {})
    v = guide._coordinates(fit.params)
    found = fitting.measured(guide, problem, call, v, {})
    names = list(problem.fixed)

    @jax.jit
    def evidence(logs):
        precision = {name: jnp.exp(logs[i]) for i, name in enumerate(names)}
        return tuning.log_evidence(guide, problem, found, v, precision, call)

    logs, step = jnp.asarray(np.random.default_rng(5).normal(size=len(names))), 1e-4
    grad = jax.grad(evidence)(logs)
    differences = [
        (evidence(logs + step * unit) - evidence(logs - step * unit)) / (2 * step) for unit in jnp.eye(len(names))
    ]
    np.testing.assert_allclose(grad, jnp.stack(differences), rtol=1e-5, atol=1e-6)
    groups = [[name] for name in names]
    best = tuning._fixed_point(guide, problem, found, v, dict.fromkeys(names, 1.0), groups, call)
    at_best = jax.grad(evidence)(jnp.log(jnp.array([best[name] for name in names])))
    np.testing.assert_allclose(at_best, 0.0, atol=2e-3)


def test_tuned_prior_maximizes_the_evidence():
    """Of the conjugate model: no other prior sd has more."""
    _, fit = fitted(linear, "full", X, Y, tune_prior=True, num_rounds=50)
    sds = 2.0 * fit.prior_precision["w"] ** -0.5 * np.exp(np.linspace(-0.2, 0.2, 41))
    evidences = [float(exact_linear(sd)[2]) for sd in sds]
    assert abs(int(np.argmax(evidences)) - 20) <= 1  # a grid of 1 percent
    np.testing.assert_allclose(fit.log_evidence, max(evidences), atol=1e-3)


@pytest.mark.slow
def test_tuned_noise_maximizes_the_evidence():
    """Of a linear model with noise to be learned: no other noise sd (times its prior) has more."""

    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal(0.5, 2.0).expand([3]).to_event(1))
        sigma = numpyro.sample("sigma", dist.LogNormal(0.0, 1.0))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w, sigma), obs=y)

    guide, fit = fitted(model, "full", X, Y, tune_prior=True, num_rounds=100)
    scale, sigma = 2.0 * fit.prior_precision["w"] ** -0.5, guide.median(fit.params)["sigma"]
    grid = sigma * np.exp(np.linspace(-0.2, 0.2, 41))

    def joint(sigma):
        marginal = sigma**2 * np.eye(len(X)) + scale**2 * X @ X.T
        return multivariate_normal.logpdf(Y, 0.5 * X.sum(axis=1), marginal) - jnp.log(sigma) ** 2 / 2

    assert abs(int(np.argmax([joint(s) for s in grid])) - 20) <= 1  # a grid of 1 percent
    other, plain = fitted(model, "full", X, Y)
    assert other.median(plain.params)["sigma"] < 0.95 * sigma  # the joint mode is too small
    assert fit.converged


# ------------------------------------------------------------------------------ sites, scales, prediction


@pytest.mark.slow
def test_last_layer():
    """The Gaussian of some sites is that of the model with all others conditioned at the mode."""
    sites = "net/Dense_1.*"
    guide, fit = fitted(network, "full", X, Y, sites=sites, num_epochs=60)
    median = guide.median(fit.params)
    body = {name: median[name] for name in ("net/Dense_0.kernel", "net/Dense_0.bias")}
    held = handlers.condition(network, body)
    other, of_other = fitted(held, "full", X, Y, num_epochs=60)
    np.testing.assert_allclose(
        fit.params["auto_scale_tril"], of_other.params["auto_scale_tril"], rtol=1e-5, atol=1e-8
    )
    draws = guide.sample_posterior(KEY, fit.params, sample_shape=(3,))
    for name, value in body.items():
        np.testing.assert_array_equal(draws[name], jnp.broadcast_to(value, (3, *value.shape)))
    found, expected = guide.predictive(fit.params, X), other.predictive(of_other.params, X)
    np.testing.assert_allclose(found.variance, expected.variance, rtol=1e-5)
    prior = sum(jnp.sum(log) for log in _prior_densities(body))
    np.testing.assert_allclose(fit.log_evidence, of_other.log_evidence - prior, rtol=1e-5)


def _prior_densities(body):
    trace = handlers.trace(handlers.seed(network, 0)).get_trace(X)
    return [trace[name]["fn"].log_prob(value) for name, value in body.items()]


@pytest.mark.parametrize("structure", one_fast("diag"))
def test_learned_scales(structure):
    """Centered and non-centered scales have the same mode and the same Gaussian."""
    results = []
    for centered in (False, True):
        prior = priors.Hierarchical(dist.LogNormal(0.0, 0.3), centered=centered)
        guide, fit = fitted(network, structure, X, Y, prior=prior, num_epochs=400)
        results.append((fit.log_evidence, guide.predictive(fit.params, X, prior=prior)))
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-6)
    np.testing.assert_allclose(results[0][1].variance, results[1][1].variance, rtol=1e-5)


def test_predictions_of_classes():
    """Probit and draws of the logits against the integral; the mean of draws within 5 standard errors."""
    guide, fit = fitted(logistic, "full", X, CLASSES % 2)
    new = 3 * X[:4]
    cov = covariance(guide, fit.params)
    mean, variance = new @ guide.median(fit.params)["w"], jnp.diag(new @ cov @ new.T)
    nodes = np.linspace(-8, 8, 4001)[:, None]
    weights = np.exp(-(nodes[:, 0] ** 2) / 2)
    exact = jax.nn.sigmoid(mean + jnp.sqrt(variance) * nodes).T @ (weights / weights.sum())
    probit = guide.predictive(fit.params, new)
    np.testing.assert_allclose(probit.mean, jax.nn.sigmoid(mean / jnp.sqrt(1 + jnp.pi / 8 * variance)), rtol=1e-8)
    np.testing.assert_allclose(probit.mean, exact, atol=0.02)  # the error of the approximation itself
    drawn = guide.predictive(fit.params, new, link="sample", rng_key=KEY, num_samples=20_000)
    np.testing.assert_allclose(drawn.mean, exact, atol=5 * 0.5 / 20_000**0.5)
    score = guide.log_predictive_density(fit.params, new, jnp.ones(4, int))
    np.testing.assert_allclose(score, jnp.log(exact), rtol=1e-4)


def test_predictions_of_counts():
    """Mean and variance of a count whose log rate is normal, against their integrals."""
    guide, fit = fitted(poisson, "full", X, CLASSES)
    new = X[:4]
    cov = covariance(guide, fit.params)
    mean, sd = new @ guide.median(fit.params)["w"], jnp.sqrt(jnp.diag(new @ cov @ new.T))
    nodes = np.linspace(-10, 10, 4001)[:, None]
    weights = np.exp(-(nodes[:, 0] ** 2) / 2)
    weights /= weights.sum()
    rates = jnp.exp(mean + sd * nodes)
    expected = weights @ rates
    found = guide.predictive(fit.params, new)
    np.testing.assert_allclose(found.mean, expected, rtol=1e-6)
    np.testing.assert_allclose(found.variance, weights @ (rates + rates**2) - expected**2, rtol=1e-6)
    assert np.all(found.variance > 1.05 * found.mean)  # the rate is uncertain enough for the test to see it


@pytest.mark.slow
def test_linearized_predictions_of_a_network():
    """Mean at the mode, covariance J Sigma J^T of every structure, and draws of the network itself beside them."""
    for structure in STRUCTURES:
        guide, fit = fitted(network, structure, X, CLASSES, likelihood="categorical", num_epochs=50)
        at = {name: guide.median(fit.params)[name] for name in guide._latent()}
        flat, back = ravel_pytree(at)

        def logits(flat, back=back):
            seeded = handlers.seed(handlers.substitute(network, back(flat)), 0)
            return handlers.trace(seeded).get_trace(X, likelihood="categorical")["y"]["fn"].logits

        jac, cov = jax.jacrev(logits)(flat), reordered(guide, fit.params, sorted(at))
        found = guide.predictive(fit.params, X, likelihood="categorical", covariance=True)
        expected = jnp.einsum("ndp,pq,meq->ndme", jac, cov, jac)
        np.testing.assert_allclose(found.covariance, expected, rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(found.outputs["logits"], logits(flat), rtol=1e-8)
        rows = guide.predictive(fit.params, X, likelihood="categorical").covariance
        np.testing.assert_allclose(rows, expected[jnp.arange(12), :, jnp.arange(12)], rtol=1e-6, atol=1e-9)
        assert found.mean.shape == (12, 3)


def test_prediction_needs_the_model_of_the_run():
    guide, fit = fitted(network, "diag", X, Y, prior=priors.Hierarchical(), num_epochs=5)
    with pytest.raises(ValueError, match=r"without the site .net/Dense_0\.kernel_scale. of the run"):
        guide.predictive(fit.params, X)


def test_numpyro_and_export():
    guide, fit = fitted(network, "kron", X, Y, num_epochs=50)
    draws = Predictive(network, guide=guide, params=fit.params, num_samples=4)(KEY, jnp.asarray(X))
    assert draws["y"].shape == (4, 12)
    idata = bnn.to_inference_data(fit, guide=guide, args=(X, Y), num_samples=5, posterior_predictive=False)
    assert idata["posterior"]["net.Dense_0.kernel"].shape == (1, 5, 3, 4)
    posterior = guide.sample_posterior(KEY, fit.params, sample_shape=(3,))
    assert log_likelihood(network, posterior, jnp.asarray(X), jnp.asarray(Y))["y"].shape == (3, 12)
    linear_guide, of_linear = fitted(linear, "kron", X, Y)
    found = guides.evidence(linear_guide, of_linear.params, X, Y, rng_key=KEY, num_samples=50)
    np.testing.assert_allclose(found.log_weights, of_linear.log_evidence, rtol=1e-7)  # the guide is the posterior
    restored = pickle.loads(pickle.dumps(guide))
    np.testing.assert_array_equal(restored.predictive(fit.params, X).mean, guide.predictive(fit.params, X).mean)
    sampled = guide.predictive(fit.params, X, linearized=False, rng_key=KEY, num_samples=10)
    assert sampled.mean.shape == sampled.variance.shape == (12,)


# ---------------------------------------------------------------------------------------------- errors


def with_noise(likelihood, weights=None, factor=False):
    def model(x, y=None):
        w = numpyro.sample("w", weights or dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        if factor:
            numpyro.factor("extra", -jnp.sum(w**4))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", likelihood(x @ w), obs=y)

    return model


def discrete(x, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    on = numpyro.sample("on", dist.Bernoulli(0.5))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(on * (x @ w), 1.0), obs=y)


def local(x, y=None, batch_size=4):
    with numpyro.plate("data", x.shape[0], subsample_size=batch_size) as i:
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(z, 1.0), obs=y[i])


def heavy(x, y=None):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    w = numpyro.sample("w", dist.StudentT(3.0, 0.0, scale).expand([3]).to_event(1))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)


def with_param(x, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    shift = numpyro.param("shift", jnp.array(5.0))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w + shift, 1.0), obs=y)


def noisy(x, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    kept = jax.random.bernoulli(numpyro.prng_key(), 0.5, x.shape)
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal((kept * x) @ w, 1.0), obs=y)


NORMAL = dist.Normal
REFUSED = {
    "likelihood": (with_noise(lambda f: dist.Cauchy(f, 1.0)), {}, "'y' with a Cauchy likelihood.*AutoLaplaceApprox"),
    "factor": (with_noise(lambda f: NORMAL(f, 1.0), factor=True), {}, "'extra' with a factor"),
    "discrete": (discrete, {}, "the discrete latent site 'on'"),
    "local": (local, {}, "the local site 'z' in plate 'data'"),
    "Laplace prior": (
        with_noise(lambda f: NORMAL(f, 1.0), dist.Laplace().expand([3]).to_event(1)),
        {},
        "'w' with a Laplace prior, which has no second derivative",
    ),
    "scale of another family": (heavy, {}, "'w', whose StudentT prior depends on {'scale'}"),
    "other prior in kron": (
        with_noise(lambda f: NORMAL(f, 1.0), dist.StudentT(3.0).expand([3]).to_event(1)),
        {"structure": "kron"},
        "'w', whose prior is not Normal with one scale",
    ),
    "parameter": (with_param, {}, "a model with the parameter 'shift', and no value for it"),
    "random numbers": (noisy, {}, "random numbers of its own"),
    "too large": (
        with_noise(lambda f: NORMAL(f, 1.0), dist.Normal().expand([10_001]).to_event(1)),
        {"x": jnp.ones((12, 10_001))},
        "'full' for 10001 unknowns.*Use .kron., .low_rank. or .diag., or `sites=`",
    ),
    "nothing to tune": (
        with_noise(lambda f: NORMAL(f, 1.0), dist.StudentT(3.0).expand([3]).to_event(1)),
        {"tune_prior": True},
        "without a site that has a Normal prior of fixed scale",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_it_cannot_take_are_refused(name):
    model, options, message = REFUSED[name]
    options = dict(options)
    x, structure = options.pop("x", X), options.pop("structure", "full")
    with pytest.raises(ValueError, match=message):
        guides.AutoLaplace(model, structure).run(KEY, jnp.asarray(x), jnp.asarray(Y), progress_bar=False, **options)


def test_parameters_of_the_model_stay_as_given():
    guide, fit = fitted(with_param, "full", jnp.asarray(X), jnp.asarray(Y), init_params={"shift": jnp.asarray(1.0)})
    x, y = jnp.asarray(X), jnp.asarray(Y) - 1.0
    exact = jnp.linalg.solve(x.T @ x + jnp.eye(3), x.T @ y)
    np.testing.assert_allclose(guide.median(fit.params)["w"], exact, rtol=1e-6)
    assert fit.params["shift"] == 1.0
