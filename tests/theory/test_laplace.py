"""AutoLaplace against exact posteriors and dense autodiff: precision of every structure, predictions, refusals.

In float64, so that tolerances are those of rounding. `test_laplace_search.py` has the search for mode and priors.
"""

import pickle
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from helpers import group, refused
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.infer.util import log_density
from scipy import stats
from scipy.special import expit
from zoo import CLASSES, NEW_X, NOISE, ZOO, N, X

import numpyro_bnn as bnn
from numpyro_bnn import guides, nn, priors

pytestmark = [pytest.mark.usefixtures("x64"), pytest.mark.filterwarnings("ignore:.*posterior sds from the mode")]


STRUCTURES = ("full", "kron", "diag", "low_rank")


def one_fast(fast, names=STRUCTURES):
    """Parameters of which all but one are slow."""
    return [pytest.param(name, marks=[] if name == fast else pytest.mark.slow) for name in names]


def classes(x, y=None, net=None, write="logits"):
    """Three classes by a network."""
    f = bnn.random_network("net", net or nn.MLP([3, 3], "tanh"), x.shape[1:], priors.Normal())(x)
    with numpyro.plate("data", x.shape[0]):
        fn = dist.Categorical(logits=f) if write == "logits" else dist.Categorical(probs=jax.nn.softmax(f))
        numpyro.sample("y", fn, obs=y)


MODELS = {name: entry.model for name, entry in ZOO.items()} | {
    "classes": classes,
    "classes by probabilities": partial(classes, write="probabilities"),
}


def data_of(name):
    arrays = ZOO[name].data if name in ZOO else (X, CLASSES)
    return [jnp.asarray(part, float if part.dtype.kind == "f" else None) for part in arrays]


def run(model, structure, args, mode=None, rank=50, **settings):
    """A guide and its result, at a given point if there is one: without a search little is compiled."""
    guide = guides.AutoLaplace(model, structure, rank=rank)
    settings |= {"num_epochs": 0, "init_params": mode} if mode else {}
    return guide, guide.run(jax.random.key(0), *args, progress_bar=False, **settings)


@cache
def searched(name, structure="full"):
    return run(MODELS[name], structure, data_of(name))


@cache
def placed(name, structure="full", rank=50):
    """Guide and result at a point of our choice, and that point: what holds at the mode holds at every point."""
    random = np.random.default_rng(5)
    shapes = ZOO[name].shapes if name in ZOO else nn.MLP([3, 3]).param_shapes((2,))
    point = {
        site if name in ZOO else f"net/{site}": 0.5 * random.normal(size=shape) for site, shape in shapes.items()
    }
    point |= {"sigma": np.array(0.6)} if "sigma" in point else {}
    return *run(MODELS[name], structure, data_of(name), point, rank), point


def covariance(guide, params, *args, **kwargs):
    """(P, P) of the weights in the order of their names, by the curvature of the density of the guide."""

    def trace_at(values):
        guide_at = handlers.substitute(guide, data={**params, **values})
        return handlers.trace(handlers.seed(guide_at, 0)).get_trace(*args, **kwargs)

    def is_drawn(site):
        return site["type"] == "sample" and not isinstance(site["fn"], dist.Delta)

    start = {name: site["value"] for name, site in trace_at({}).items() if is_drawn(site)}
    flat, back = ravel_pytree(start)

    def density(flat):
        trace = trace_at(back(flat))
        return sum(jnp.sum(trace[name]["fn"].log_prob(value)) for name, value in back(flat).items())

    def weights(flat):
        sites = trace_at(back(flat)).items()
        drawn = {n: s["value"] for n, s in sites if s["type"] == "sample" and not s["infer"].get("is_auxiliary")}
        return ravel_pytree(drawn)[0]

    precision, image = jax.jit(lambda flat: (-jax.hessian(density)(flat), jax.jacfwd(weights)(flat)))(flat)
    return np.asarray(image) @ np.linalg.inv(precision) @ np.asarray(image).T


def dense(model, args, mode, **kwargs):
    """Jacobian (N, D, P) and Fisher information (N, D, D) of the outputs, and the precision with the prior."""
    flat, back = ravel_pytree(mode)

    def outputs(flat):
        model_at = handlers.substitute(handlers.seed(model, 0), back(flat))
        fn = handlers.trace(model_at).get_trace(*args, **kwargs)["y"]["fn"]
        if isinstance(fn, dist.Normal):
            return jnp.stack([fn.loc, jnp.log(fn.scale) + 0 * fn.loc], axis=1)
        return jnp.log(fn.probs)

    f, jacobian = jax.jit(lambda flat: (outputs(flat), jax.jacrev(outputs)(flat)))(flat)
    trace = handlers.trace(handlers.seed(handlers.substitute(model, mode), 0)).get_trace(*args, **kwargs)
    if isinstance(trace["y"]["fn"], dist.Normal):
        fisher = np.stack([np.diag([np.exp(-2 * row[1]), 2.0]) for row in np.asarray(f)])
    else:
        fisher = np.stack([np.diag(np.exp(row)) - np.exp(np.add.outer(row, row)) for row in np.asarray(f)])
    variances = {n: jnp.broadcast_to(trace[n]["fn"].variance, value.shape) for n, value in mode.items()}
    precision = np.einsum("ndp,nde,neq->pq", jacobian, fisher, jacobian) + np.diag(1 / ravel_pytree(variances)[0])
    return np.asarray(jacobian), fisher, precision


# -- closed forms --------------------------------------------------------------------------------------


FAST_LINES = {("line", "full"), ("masked", "kron")}


@pytest.mark.core
@pytest.mark.parametrize(
    ("name", "structure"),
    [
        pytest.param(name, structure, marks=[] if (name, structure) in FAST_LINES else pytest.mark.slow)
        for name in ("line", "masked")
        for structure in ("full", "kron", "low_rank")
    ],
)
def test_linear_regression_is_exact(name, structure):
    """Posterior, evidence and predictions; ``w`` is a layer of one output, so that kron is exact too.

    Rows that are masked do not count, in neither factor.
    """
    entry = ZOO[name]
    mean, sd = entry.exact.mean["w"], entry.exact.sd["w"]
    if name == "line" and structure == "full":
        guide, fit = searched(name)
    else:
        guide, fit = run(entry.model, structure, data_of(name), {"w": mean})
    np.testing.assert_allclose(guide.median(fit.params)["w"], mean, rtol=1e-5)  # the exact answer is of float32 data
    np.testing.assert_allclose(guide.quantiles(fit.params, [0.975])["w"][0], mean + 1.959964 * sd, rtol=1e-5)
    np.testing.assert_allclose(fit.log_evidence, entry.exact.log_evidence, rtol=1e-6)
    assert fit.converged
    known = data_of("masked")[1] if name == "masked" else np.ones(N, bool)
    design = data_of("line")[0][known]
    exact = np.linalg.inv(design.T @ design / NOISE**2 + np.eye(2))
    new = np.asarray(NEW_X, float)
    found = guide.predictive(fit.params, new, *entry.new[1:], covariance=True)
    np.testing.assert_allclose(found.mean, new @ mean, rtol=1e-5)
    np.testing.assert_allclose(found.covariance[:, 0, :, 0], new @ exact @ new.T, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(found.variance, np.diag(new @ exact @ new.T) + NOISE**2, rtol=1e-6)
    score = guide.log_predictive_density(fit.params, new, *entry.new[1:], np.arange(5.0))
    np.testing.assert_allclose(score, stats.norm.logpdf(np.arange(5.0), found.mean, found.variance**0.5))


def information(name, point):
    """Minus the Hessian of log p(y, w) of a linear model with a canonical link, by hand, (2 K, 2 K)."""
    x, w = np.asarray(X, float), point["w"]
    f = (x @ w).reshape(N, -1)
    if name == "softmax":
        p = np.asarray(jax.nn.softmax(f))
        of_outputs = np.eye(3) * p[:, None] - p[:, None] * p[:, :, None]
    else:
        of_outputs = (np.exp(f) if name == "counts" else expit(f) * expit(-f))[..., None]
    return np.einsum("ni,nde,nj->idje", x, of_outputs, x).reshape(w.size, w.size) + np.eye(w.size)


@pytest.mark.parametrize("name", ["logistic", "counts", "softmax"])
def test_canonical_links_give_the_hessian(name):
    """The Gauss-Newton matrix of a linear model with a canonical link is the Hessian of the log density."""
    guide, fit, point = placed(name)
    new, hessian = np.asarray(NEW_X, float), information(name, point)
    cov = np.linalg.inv(hessian).reshape(2, hessian.shape[0] // 2, 2, -1)
    found = guide.predictive(fit.params, new, covariance=True).covariance
    np.testing.assert_allclose(found, np.einsum("ni,idje,mj->ndme", new, cov, new), rtol=1e-8, atol=1e-12)
    joint = log_density(MODELS[name], data_of(name), {}, point)[0]
    laplace = joint + len(hessian) / 2 * np.log(2 * np.pi) - np.linalg.slogdet(hessian)[1] / 2
    np.testing.assert_allclose(fit.log_evidence, laplace, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("structure", STRUCTURES)
def test_learned_noise_is_part_of_the_gaussian(structure):
    """The information of log sigma is 2 N, that of its half-normal prior 2 sigma^2; weights do not correlate with it.

    The mean of sigma^2 under the Gaussian of log sigma shows its variance.
    """
    guide, fit, point = placed("spread", structure)
    found, sigma = guide.predictive(fit.params, np.asarray(NEW_X, float)), point["sigma"]
    noise = found.variance - found.output_variance["loc"]
    np.testing.assert_allclose(noise, sigma**2 * np.exp(2 / (2 * N + 2 * sigma**2)), rtol=1e-8)


# -- structures of the precision -----------------------------------------------------------------------

NETWORKS = one_fast("noisy network", ("network", "noisy network", "classes", "classes by probabilities"))


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(
    "structure", [pytest.param(s, marks=[] if s in ("full", "kron") else pytest.mark.slow) for s in STRUCTURES]
)
def test_the_precision_of_a_network_is_that_of_its_dense_jacobian(name, structure):
    """J^T F J plus the prior: all of it, its diagonal, by products of inputs and gradients, or by all directions."""
    guide, fit, point = placed(name, structure, 1000)
    jacobian, fisher, precision = of_placed(name)
    expected = np.linalg.inv(precision)
    if structure == "diag":
        expected = np.diag(1 / np.diag(precision))
    elif structure == "kron":
        expected = by_factors(point, jacobian, fisher, precision)
    joint = log_density(MODELS[name], data_of(name), {}, point)[0]
    evidence = joint + len(expected) / 2 * np.log(2 * np.pi) + np.linalg.slogdet(expected)[1] / 2
    np.testing.assert_allclose(fit.log_evidence, evidence, rtol=1e-8)
    # 48 outputs of the network that is linear in its 17 weights; one of two outputs may be fixed.
    found = guide.predictive(fit.params, data_of(name)[0], covariance=True).covariance
    if name == "classes":  # log probabilities have the same Fisher information, but are not the logits
        return
    jacobian = jacobian[:, : found.shape[1]]
    np.testing.assert_allclose(
        found, np.einsum("ndp,pq,meq->ndme", jacobian, expected, jacobian), rtol=1e-6, atol=1e-9
    )
    if structure != "full":  # without the covariances between rows it takes other ways
        rows = guide.predictive(fit.params, data_of(name)[0]).covariance
        np.testing.assert_allclose(rows, found[np.arange(N), :, np.arange(N)], rtol=1e-6, atol=1e-9)


@cache
def of_placed(name):
    return dense(MODELS[name], data_of(name), placed(name)[-1])


def by_factors(point, jacobian, fisher, precision):
    """K-FAC of the dense layers: the gradient of a kernel is an input times that of its bias; biases are apart."""
    sizes = {site: np.size(value) for site, value in point.items()}  # in the order of `ravel_pytree`, by name
    starts = dict(zip(sorted(sizes), np.cumsum([0, *[sizes[site] for site in sorted(sizes)]]), strict=False))
    places = {site: starts[site] + np.arange(sizes[site]) for site in sizes}
    inside = data_of("line")[0]
    inputs = {"net/Dense_0": inside}
    inputs["net/Dense_1"] = np.tanh(inside @ point["net/Dense_0.kernel"] + point["net/Dense_0.bias"])
    found = np.zeros_like(precision)
    for layer, x in inputs.items():
        kernel, bias = places[f"{layer}.kernel"], places[f"{layer}.bias"]
        of_bias = jacobian[:, :, bias]
        squares = np.einsum("ndo,nde,nep->op", of_bias, fisher, of_bias)
        # The prior is what the diagonal has besides the squares of the Jacobian.
        own = jacobian[:, :, kernel[0]]
        prior = precision[kernel[0], kernel[0]] - np.einsum("nd,nde,ne->", own, fisher, own)
        product = np.kron(x.T @ x, squares / len(x)) + prior * np.eye(kernel.size)
        found[np.ix_(kernel, kernel)] = np.linalg.inv(product)
        found[np.ix_(bias, bias)] = np.linalg.inv(precision[np.ix_(bias, bias)])
    return found


@pytest.mark.slow
def test_one_direction_has_a_subset_of_the_correlations():
    guide, fit, _ = placed("noisy network", "low_rank", 1)
    precision = of_placed("noisy network")[-1]
    variances = np.diag(covariance(guide, fit.params, *data_of("noisy network")))
    assert np.all(variances >= 1 / np.diag(precision) - 1e-9)
    assert np.all(variances <= np.diag(np.linalg.inv(precision)) + 1e-9)


@pytest.mark.slow
def test_convolutions():
    """K-FAC of a convolution is that of all its patches; diagonal and full follow dense Jacobians."""
    args = np.random.default_rng(2).normal(size=(5, 4, 4, 2)), CLASSES[:5]
    net = nn.Sequential([nn.Conv2d(3, 2), "tanh", nn.AvgPool(None), nn.Flatten(), nn.Dense(3)])
    model, random = partial(classes, net=net), np.random.default_rng(5)
    point = {f"net/{name}": random.normal(size=shape) for name, shape in net.param_shapes((4, 4, 2)).items()}
    found = {}
    for structure in ("full", "diag", "kron"):
        guide, fit = run(model, structure, args, point)
        found[structure] = covariance(guide, fit.params, *args)
    jacobian, fisher, precision = dense(model, args, point)
    np.testing.assert_allclose(found["full"], np.linalg.inv(precision), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(np.diag(found["diag"]), 1 / np.diag(precision), rtol=1e-8)
    padded = np.pad(args[0], ((0, 0), (0, 1), (0, 1), (0, 0)))
    windows = np.stack([padded[:, a : a + 4, b : b + 4] for a in range(2) for b in range(2)], axis=3)
    inputs = windows.reshape(5, 16, 8)  # (height, width, channel) of the window
    kernel, bias = point["net/Conv2d_0.kernel"], point["net/Conv2d_0.bias"]

    def log_probs(before):
        out = jnp.tanh(before).mean(axis=0) @ point["net/Dense_0.kernel"] + point["net/Dense_0.bias"]
        return jax.nn.log_softmax(out)

    grads = jax.vmap(jax.jacrev(log_probs))(inputs @ kernel.reshape(8, 3) + bias)
    left = np.einsum("nti,ntj->ij", inputs, inputs)
    right = np.einsum("ndto,nde,netp->op", grads, fisher, grads) / (5 * 16)
    place = np.arange(3, 3 + kernel.size)  # behind the bias
    own = jacobian[:, :, place[0]]
    prior = precision[place[0], place[0]] - np.einsum("nd,nde,ne->", own, fisher, own)
    expected = np.linalg.inv(np.kron(left, right) + prior * np.eye(kernel.size))
    np.testing.assert_allclose(found["kron"][np.ix_(place, place)], expected, rtol=1e-6, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("structure", STRUCTURES)
def test_draws_and_quantiles_have_the_density_of_the_guide(structure):
    """Also when gradient steps have moved its parameters; five standard errors of 20,000 draws."""
    guide, fit, point = placed("noisy network", structure, 1000)
    random = np.random.default_rng(3)
    params = {name: value * random.uniform(0.7, 1.0, value.shape) for name, value in fit.params.items()}
    exact = covariance(guide, params, *data_of("noisy network"))
    median, upper = guide.median(params), guide.quantiles(params, [0.975])
    draws = guide.sample_posterior(jax.random.key(1), params, sample_shape=(20_000,))
    flat = np.concatenate([np.reshape(draws[name], (20_000, -1)) for name in sorted(point)], axis=1)
    scale = np.sqrt(np.outer(np.diag(exact), np.diag(exact)) + exact**2)
    np.testing.assert_array_less(np.abs(np.cov(flat.T) - exact), 5 * scale / 20_000**0.5)
    mean = ravel_pytree({name: median[name] for name in point})[0]
    np.testing.assert_array_less(np.abs(flat.mean(0) - mean), 5 * np.sqrt(np.diag(exact) / 20_000))
    found = ravel_pytree({name: upper[name][0] for name in point})[0]
    np.testing.assert_allclose(found, mean + 1.959964 * np.sqrt(np.diag(exact)), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("structure", STRUCTURES)
def test_minibatches_have_the_precision_of_all_rows(structure):
    _, fit, point = placed("noisy network", structure, 1000)
    name = "noisy network"
    _, of_batches = run(MODELS[name], structure, data_of(name), point, 1000, batch_size=5)
    for field in ("log_evidence", "effective_parameters", "grad_norm", "distance"):
        np.testing.assert_allclose(getattr(of_batches, field), getattr(fit, field), rtol=1e-8)


@pytest.mark.slow
def test_rows_that_influence_one_another():
    """Batch normalization: refused where rows are taken one by one, exact where they are not."""
    net = nn.Sequential([nn.Dense(3), nn.BatchNorm(), "tanh", nn.Dense(3)])
    model, random = partial(classes, net=net), np.random.default_rng(5)
    point = {f"net/{name}": random.normal(size=shape) for name, shape in net.param_shapes((2,)).items()}
    with pytest.raises(ValueError, match="batch normalization"):
        run(model, "kron", data_of("classes"), point)
    guide, fit = run(model, "full", data_of("classes"), point)
    precision = dense(model, data_of("classes"), point)[-1]
    found = covariance(guide, fit.params, *data_of("classes"))
    np.testing.assert_allclose(found, np.linalg.inv(precision), rtol=1e-5, atol=1e-8)


# -- sites and scales ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("structure", STRUCTURES)
def test_centered_and_noncentered_scales_are_one_posterior(structure):
    """Of a weight whose scale is learned the coordinate is u = w / s in both forms."""
    random, args, found = np.random.default_rng(5), data_of("network"), []
    point = {name: 0.5 * random.normal(size=shape) for name, shape in ZOO["hierarchical"].shapes.items()}
    point |= {name: np.exp(value) for name, value in point.items() if name.endswith(("scale", "sigma"))}
    for centered in (False, True):
        model = bnn.models.regression(nn.MLP([3, 1], "tanh"), priors.Hierarchical(centered=centered))
        guide, fit = run(model, structure, args, point, 1000)
        found.append((fit.log_evidence, guide.predictive(fit.params, args[0]).variance))
        trace = handlers.trace(handlers.seed(handlers.substitute(model, point), 0)).get_trace(*args)
        point = {name.removesuffix("_base"): trace[name.removesuffix("_base")]["value"] for name in point}
    for one, two in zip(*found, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-8)


# -- predictions ---------------------------------------------------------------------------------------


def averaged(function, mean, sd):
    """The mean of a function of a normal variable, (N,)."""
    nodes = np.linspace(-10, 10, 4001)[:, None]
    weights = np.exp(-(nodes[:, 0] ** 2) / 2)
    return weights @ function(mean + sd * nodes) / weights.sum()


def linear_predictor(name, new):
    guide, fit, point = placed(name)
    cov = np.linalg.inv(information(name, point))
    return guide, fit, new @ point["w"], np.sqrt(np.diag(new @ cov @ new.T))


def test_predictions_of_classes():
    """By the probit approximation and by draws, against the integral over the logit."""
    new = 3 * np.asarray(NEW_X, float)
    guide, fit, mean, sd = linear_predictor("logistic", new)
    exact = averaged(jax.nn.sigmoid, mean, sd)
    probit = guide.predictive(fit.params, new)
    np.testing.assert_allclose(probit.mean, jax.nn.sigmoid(mean / np.sqrt(1 + np.pi / 8 * sd**2)), rtol=1e-8)
    np.testing.assert_allclose(probit.mean, exact, atol=0.02)  # the error of the approximation itself
    drawn = guide.predictive(fit.params, new, link="sample", rng_key=jax.random.key(1), num_samples=20_000)
    np.testing.assert_allclose(drawn.mean, exact, atol=5 * 0.5 / 20_000**0.5)
    score = guide.log_predictive_density(fit.params, new, np.ones(5, int))
    np.testing.assert_allclose(score, np.log(exact), rtol=1e-4)


def test_rows_without_a_number_are_refused():
    guide, fit, _ = placed("counts")
    for wrong in (np.nan, np.inf):
        new = np.array([[0.0, 1.0], [wrong, 1.0]])
        with refused("args", r"1 NaN or infinite values"):
            guide.predictive(fit.params, new)
        with refused("args", r"1 NaN or infinite values"):
            guide.log_predictive_density(fit.params, new, np.ones(2, int))


def test_predictions_of_counts():
    """Mean and variance of a count whose log rate is normal, against their integrals."""
    new = np.asarray(NEW_X, float)
    guide, fit, mean, sd = linear_predictor("counts", new)
    first, second = averaged(np.exp, mean, sd), averaged(lambda f: np.exp(f) + np.exp(2 * f), mean, sd)
    found = guide.predictive(fit.params, new)
    np.testing.assert_allclose(found.mean, first, rtol=1e-6)
    np.testing.assert_allclose(found.variance, second - first**2, rtol=1e-6)
    assert np.all(found.variance > 1.001 * found.mean)  # the rate is uncertain enough for the test to see it


def test_densities_follow_the_covariance_of_location_and_scale():
    """Location and log scale of one weight, against sums over a grid of both; two targets against their normal."""

    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w, 0.5 * jnp.exp(w[0] + 0.5 * w[1])), obs=y)

    def targets(x, y=None):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with numpyro.plate("data", x.shape[0]):
            mean = jnp.stack([x @ w, 2.0 * x[:, 0] * w[0]], axis=1)
            numpyro.sample("y", dist.Normal(mean, NOISE).to_event(1), obs=y)

    x, point = np.array([[1.0, 0.0]]), {"w": np.array([0.2, -0.1])}
    guide, fit = run(model, "full", (x, np.zeros(1)), point)
    found = guide.predictive(fit.params, x)
    mean, cov = [float(part[0]) for part in found.outputs.values()], np.asarray(found.covariance[0])
    assert cov[0, 1] / np.sqrt(cov[0, 0] * cov[1, 1]) > 0.5
    axes = [center + np.linspace(-9, 9, 1201) * sd for center, sd in zip(mean, np.sqrt(np.diag(cov)), strict=True)]
    loc, log_scale = np.meshgrid(*axes, indexing="ij")
    weight = stats.multivariate_normal(mean, cov).pdf(np.stack([loc, log_scale], axis=-1))
    for y in (mean[0] - 3.0, mean[0] + 3.0):
        exact = np.log(np.sum(weight * stats.norm.pdf(y, loc, np.exp(log_scale))) / weight.sum())
        np.testing.assert_allclose(guide.log_predictive_density(fit.params, x, np.array([y])), exact, rtol=1e-4)
    guide, fit = run(targets, "full", (x, np.zeros((1, 2))), point)
    found = guide.predictive(fit.params, x)
    exact = stats.multivariate_normal(found.mean[0], found.covariance[0] + NOISE**2 * np.eye(2)).logpdf([1.0, -1.0])
    found = guide.log_predictive_density(fit.params, x, np.array([[1.0, -1.0]]))
    np.testing.assert_allclose(found, exact, rtol=1e-8)


@pytest.mark.core
def test_results_reach_arviz_and_the_evidence_and_survive_pickling():
    """The guide is the posterior of the line: every draw has the same weight, which is the evidence."""
    guide, fit = searched("line")
    args = data_of("line")
    idata = bnn.to_inference_data(fit, guide=guide, args=args, num_samples=5, posterior_predictive=False)
    assert group(idata, "posterior")["w"].shape == (1, 5, 2)
    found = guides.evidence(guide, fit.params, *args, rng_key=jax.random.key(0), num_samples=50)
    np.testing.assert_allclose(found.log_weights, fit.log_evidence, rtol=1e-7)
    restored = pickle.loads(pickle.dumps(guide))
    expected = guide.predictive(fit.params, args[0]).mean
    np.testing.assert_array_equal(restored.predictive(fit.params, args[0]).mean, expected)
    options = {"linearized": False, "rng_key": jax.random.key(0), "num_samples": 10}  # by draws of the weights
    assert guide.predictive(fit.params, args[0], **options).mean.shape == (N,)
    again = restored.run(jax.random.key(0), args[0], 2 * args[1], progress_bar=False)  # a run of its own data
    np.testing.assert_allclose(restored.median(again.params)["w"], 2 * guide.median(fit.params)["w"], rtol=1e-6)
