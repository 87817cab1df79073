"""AutoLaplace against exact posteriors: precision, draws of every structure,
predictions.

In float64, so that tolerances are those of rounding. `test_random_models.py` has its
precision by dense Jacobians.
"""

import pickle
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from helpers import group, refused
from jax.flatten_util import ravel_pytree
from numpy.testing import assert_allclose as close
from numpyro import handlers
from numpyro.infer import Predictive
from numpyro.infer.util import log_density
from scipy import stats
from scipy.special import expit
from zoo import CLASSES, NEW_X, NOISE, ZOO, N, X

import numpyro_bnn as bnn
from numpyro_bnn import guides, nn, priors

pytestmark = [
    pytest.mark.usefixtures("x64"),
    pytest.mark.filterwarnings("ignore:.*posterior sds from the mode"),
]


STRUCTURES = ("full", "kron", "diag", "low_rank")


def data_of(name):
    return [
        jnp.asarray(part, float if part.dtype.kind == "f" else None)
        for part in ZOO[name].data
    ]


def run(model, structure, args, mode=None, rank=50, **settings):
    """A guide and its result, at a given point if there is one."""
    guide = guides.AutoLaplace(model, structure, rank=rank)
    settings |= {"num_epochs": 0, "init_params": mode} if mode else {}
    return guide, guide.run(jax.random.key(0), *args, progress_bar=False, **settings)


@cache
def searched(name):
    return run(ZOO[name].model, "full", data_of(name))


@cache
def placed(name, structure="full", rank=50):
    """Guide and result at a point of our choice, and that point."""
    random = np.random.default_rng(5)
    point = {
        site: 0.5 * random.normal(size=shape)
        for site, shape in ZOO[name].shapes.items()
    }
    return *run(ZOO[name].model, structure, data_of(name), point, rank), point


def covariance(guide, params, *args, **kwargs):
    """(P, P) by the curvature of the density of the guide; names in order."""

    def trace_at(values):
        guide_at = handlers.substitute(guide, data={**params, **values})
        return handlers.trace(handlers.seed(guide_at, 0)).get_trace(*args, **kwargs)

    def is_drawn(site):
        return site["type"] == "sample" and not isinstance(site["fn"], dist.Delta)

    start = {
        name: site["value"] for name, site in trace_at({}).items() if is_drawn(site)
    }
    flat, back = ravel_pytree(start)

    def density(flat):
        trace = trace_at(back(flat))
        return sum(
            jnp.sum(trace[name]["fn"].log_prob(value))
            for name, value in back(flat).items()
        )

    def weights(flat):
        sites = trace_at(back(flat)).items()
        drawn = {
            n: s["value"]
            for n, s in sites
            if s["type"] == "sample" and not s["infer"].get("is_auxiliary")
        }
        return ravel_pytree(drawn)[0]

    precision, image = jax.jit(
        lambda flat: (-jax.hessian(density)(flat), jax.jacfwd(weights)(flat))
    )(flat)
    return np.asarray(image) @ np.linalg.inv(precision) @ np.asarray(image).T


# -- closed forms ----------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize(
    ("name", "structure"),
    [("line", "full"), ("masked", "kron"), ("masked", "low_rank")],
)
def test_linear_regression_is_exact(name, structure):
    """Posterior, evidence, predictions; kron too, whose layer has one output, and a
    rank that is not too low.
    """
    entry = ZOO[name]
    mean, sd = entry.exact.mean["w"], entry.exact.sd["w"]
    guide, fit = (
        searched(name)
        if name == "line"
        else run(entry.model, structure, data_of(name), {"w": mean})
    )
    close(
        guide.median(fit.params)["w"], mean, rtol=1e-5
    )  # the exact answer is of float32 data
    close(guide.quantiles(fit.params, [0.975])["w"][0], mean + 1.959964 * sd, rtol=1e-5)
    close(fit.log_evidence, entry.exact.log_evidence, rtol=1e-6)
    assert fit.converged
    known = data_of("masked")[1] if name == "masked" else np.ones(N, bool)
    design = data_of("line")[0][known]
    exact = np.linalg.inv(design.T @ design / NOISE**2 + np.eye(2))
    new = np.asarray(NEW_X, float)
    found = guide.predictive(fit.params, new, *entry.new[1:], covariance=True)
    close(found.mean, new @ mean, rtol=1e-5)
    close(found.covariance[:, 0, :, 0], new @ exact @ new.T, rtol=1e-6, atol=1e-9)
    close(found.variance, np.diag(new @ exact @ new.T) + NOISE**2, rtol=1e-6)
    score = guide.log_predictive_density(
        fit.params, new, *entry.new[1:], np.arange(5.0)
    )
    close(score, stats.norm.logpdf(np.arange(5.0), found.mean, found.variance**0.5))


def information(name, point):
    """Minus the Hessian of log p(y, w) with a canonical link, (2 K, 2 K)."""
    x, w = np.asarray(X, float), point["w"]
    f = (x @ w).reshape(N, -1)
    if name == "softmax":
        p = np.asarray(jax.nn.softmax(f))
        of_outputs = np.eye(3) * p[:, None] - p[:, None] * p[:, :, None]
    else:
        of_outputs = (np.exp(f) if name == "counts" else expit(f) * expit(-f))[
            ..., None
        ]
    return np.einsum("ni,nde,nj->idje", x, of_outputs, x).reshape(
        w.size, w.size
    ) + np.eye(w.size)


def test_canonical_links_give_the_hessian():
    """The Gauss-Newton matrix of a linear model is the Hessian."""
    guide, fit, point = placed("softmax")
    new, hessian = np.asarray(NEW_X, float), information("softmax", point)
    cov = np.linalg.inv(hessian).reshape(2, hessian.shape[0] // 2, 2, -1)
    found = guide.predictive(fit.params, new, covariance=True).covariance
    close(found, np.einsum("ni,idje,mj->ndme", new, cov, new), rtol=1e-8, atol=1e-12)
    joint = log_density(ZOO["softmax"].model, data_of("softmax"), {}, point)[0]
    laplace = (
        joint + len(hessian) / 2 * np.log(2 * np.pi) - np.linalg.slogdet(hessian)[1] / 2
    )
    close(fit.log_evidence, laplace, rtol=1e-9)


# -- structures of the precision -------------------------------------------------------


@pytest.mark.slow
def test_factors_of_a_convolution_are_those_of_all_its_patches():
    x, y = np.random.default_rng(2).normal(size=(5, 4, 4, 2)), CLASSES[:5]
    net = nn.Sequential(
        [nn.Conv2d(3, 2), "tanh", nn.AvgPool(None), nn.Flatten(), nn.Dense(3)]
    )

    def model(x, y=None):
        f = bnn.random_network("net", net, x.shape[1:], priors.Normal())(x)
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Categorical(logits=f), obs=y)

    random = np.random.default_rng(5)
    point = {
        f"net/{name}": random.normal(size=shape)
        for name, shape in net.param_shapes((4, 4, 2)).items()
    }
    kernel, bias = point["net/Conv2d_0.kernel"], point["net/Conv2d_0.bias"]

    def log_probs(before):
        out = (
            jnp.tanh(before).mean(axis=0) @ point["net/Dense_0.kernel"]
            + point["net/Dense_0.bias"]
        )
        return jax.nn.log_softmax(out)

    padded = np.pad(x, ((0, 0), (0, 1), (0, 1), (0, 0)))
    windows = np.stack(
        [padded[:, a : a + 4, b : b + 4] for a in range(2) for b in range(2)], axis=3
    )
    inputs = windows.reshape(5, 16, 8)  # (height, width, channel) of the window
    before = inputs @ kernel.reshape(8, 3) + bias
    p, grads = (
        np.exp(jax.vmap(log_probs)(before)),
        jax.vmap(jax.jacrev(log_probs))(before),
    )
    fisher = np.eye(3) * p[:, None] - p[:, None] * p[:, :, None]
    left = np.einsum("nti,ntj->ij", inputs, inputs)
    right = np.einsum("ndto,nde,netp->op", grads, fisher, grads) / (5 * 16)
    expected = np.linalg.inv(
        np.kron(left, right) + 8 * np.eye(kernel.size)
    )  # the prior variance is 1 / fan-in
    guide, fit = run(model, "kron", (x, y), point)
    place = np.arange(3, 3 + kernel.size)  # behind the bias
    found = covariance(guide, fit.params, x, y)[np.ix_(place, place)]
    close(found, expected, rtol=1e-6, atol=1e-9)


def test_draws_from_parameters_vary_also_around_given_weights():
    """The parameters do not have the weights themselves, which would fix them."""
    entry = ZOO["line"]
    guide, fit = run(entry.model, "full", data_of("line"), dict(entry.exact.mean))
    assert not fit.params.keys() & entry.exact.mean.keys()
    sampler = Predictive(guide, params=fit.params, num_samples=2000)
    draws = sampler(jax.random.key(0), *data_of("line"))
    for name, sd in entry.exact.sd.items():
        close(draws[name].std(0), sd, rtol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("structure", STRUCTURES)
def test_draws_and_quantiles_have_the_density_of_the_guide(structure):
    """Also of moved parameters; five standard errors of 20,000 draws."""
    guide, fit, point = placed("noisy network", structure, 1000)
    random = np.random.default_rng(3)
    params = {
        name: value * random.uniform(0.7, 1.0, value.shape)
        for name, value in fit.params.items()
    }
    exact = covariance(guide, params, *data_of("noisy network"))
    median, upper = guide.median(params), guide.quantiles(params, [0.975])
    draws = guide.sample_posterior(jax.random.key(1), params, sample_shape=(20_000,))
    flat = np.concatenate(
        [np.reshape(draws[name], (20_000, -1)) for name in sorted(point)], axis=1
    )
    scale = np.sqrt(np.outer(np.diag(exact), np.diag(exact)) + exact**2)
    np.testing.assert_array_less(
        np.abs(np.cov(flat.T) - exact), 5 * scale / 20_000**0.5
    )
    mean = ravel_pytree({name: median[name] for name in point})[0]
    np.testing.assert_array_less(
        np.abs(flat.mean(0) - mean), 5 * np.sqrt(np.diag(exact) / 20_000)
    )
    found = ravel_pytree({name: upper[name][0] for name in point})[0]
    close(found, mean + 1.959964 * np.sqrt(np.diag(exact)), rtol=1e-5)


# -- sites and scales ------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("structure", ["full", "kron"])
def test_centered_and_noncentered_scales_are_one_posterior(structure):
    """Of a weight whose scale is learned the coordinate is u = w / s in both forms."""
    random, args, found = np.random.default_rng(5), data_of("network"), []
    point = {
        name: 0.5 * random.normal(size=shape)
        for name, shape in ZOO["hierarchical"].shapes.items()
    }
    point |= {
        name: np.exp(value)
        for name, value in point.items()
        if name.endswith(("scale", "sigma"))
    }
    for centered in (False, True):
        model = bnn.models.regression(
            nn.MLP([3, 1], "tanh"), priors.Hierarchical(centered=centered)
        )
        guide, fit = run(model, structure, args, point, 1000)
        found.append((fit.log_evidence, guide.predictive(fit.params, args[0]).variance))
        trace = handlers.trace(
            handlers.seed(handlers.substitute(model, point), 0)
        ).get_trace(*args)
        point = {
            name.removesuffix("_base"): trace[name.removesuffix("_base")]["value"]
            for name in point
        }
    for one, two in zip(*found, strict=True):
        close(one, two, rtol=1e-8)


# -- predictions -----------------------------------------------------------------------


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
    close(probit.mean, jax.nn.sigmoid(mean / np.sqrt(1 + np.pi / 8 * sd**2)), rtol=1e-8)
    close(probit.mean, exact, atol=0.02)  # the error of the approximation itself
    drawn = guide.predictive(
        fit.params, new, link="sample", rng_key=jax.random.key(1), num_samples=20_000
    )
    close(drawn.mean, exact, atol=5 * 0.5 / 20_000**0.5)
    score = guide.log_predictive_density(fit.params, new, np.ones(5, int))
    close(score, np.log(exact), rtol=1e-4)


def test_predictions_of_counts():
    """Of a normal log rate, against integrals."""
    new = np.asarray(NEW_X, float)
    guide, fit, mean, sd = linear_predictor("counts", new)
    first, second = (
        averaged(np.exp, mean, sd),
        averaged(lambda f: np.exp(f) + np.exp(2 * f), mean, sd),
    )
    found = guide.predictive(fit.params, new)
    close(found.mean, first, rtol=1e-6)
    close(found.variance, second - first**2, rtol=1e-6)
    assert np.all(
        found.variance > 1.001 * found.mean
    )  # the rate is uncertain enough for the test to see it
    for call in (
        guide.predictive,
        lambda *args: guide.log_predictive_density(*args, np.ones(5, int)),
    ):
        with refused("args", "1 NaN or infinite values"):
            call(fit.params, np.where(np.arange(10).reshape(5, 2) == 2, np.inf, new))


@pytest.mark.slow
def test_densities_follow_the_covariance_of_location_and_scale():
    """Location and log scale of one weight, against sums over a grid of both."""

    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample(
                "y", dist.Normal(x @ w, 0.5 * jnp.exp(w[0] + 0.5 * w[1])), obs=y
            )

    x, point = np.array([[1.0, 0.0]]), {"w": np.array([0.2, -0.1])}
    guide, fit = run(model, "full", (x, np.zeros(1)), point)
    found = guide.predictive(fit.params, x)
    mean, cov = (
        [float(part[0]) for part in found.outputs.values()],
        np.asarray(found.covariance[0]),
    )
    assert cov[0, 1] / np.sqrt(cov[0, 0] * cov[1, 1]) > 0.5
    axes = [
        center + np.linspace(-9, 9, 1201) * sd
        for center, sd in zip(mean, np.sqrt(np.diag(cov)), strict=True)
    ]
    loc, log_scale = np.meshgrid(*axes, indexing="ij")
    weight = stats.multivariate_normal(mean, cov).pdf(
        np.stack([loc, log_scale], axis=-1)
    )
    for y in (mean[0] - 3.0, mean[0] + 3.0):
        exact = np.log(
            np.sum(weight * stats.norm.pdf(y, loc, np.exp(log_scale))) / weight.sum()
        )
        close(
            guide.log_predictive_density(fit.params, x, np.array([y])), exact, rtol=1e-4
        )


@pytest.mark.core
def test_results_reach_arviz_and_the_evidence_and_survive_pickling():
    """The guide is the posterior: each draw weighs the evidence."""
    guide, fit = searched("line")
    args = data_of("line")
    idata = bnn.to_inference_data(
        fit, guide=guide, args=args, num_samples=5, posterior_predictive=False
    )
    assert group(idata, "posterior")["w"].shape == (1, 5, 2)
    found = guides.evidence(
        guide, fit.params, *args, rng_key=jax.random.key(0), num_samples=50
    )
    close(found.log_weights, fit.log_evidence, rtol=1e-7)
    restored = pickle.loads(pickle.dumps(guide))
    expected = guide.predictive(fit.params, args[0]).mean
    np.testing.assert_array_equal(
        restored.predictive(fit.params, args[0]).mean, expected
    )
    options = {
        "linearized": False,
        "rng_key": jax.random.key(0),
        "num_samples": 10,
    }  # by draws of the weights
    assert guide.predictive(fit.params, args[0], **options).mean.shape == (N,)
    again = restored.run(
        jax.random.key(0), args[0], 2 * args[1], progress_bar=False
    )  # a run of its own data
    close(
        restored.median(again.params)["w"], 2 * guide.median(fit.params)["w"], rtol=1e-6
    )
