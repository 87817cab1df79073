"""One contract for every guide: what NumPyro, Predictive and the export ask of it, and a density that is right."""

import pickle
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.infer import SVI, Predictive, RenyiELBO, Trace_ELBO, TraceGraph_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoGuideList, AutoNormal
from numpyro.infer.svi import SVIRunResult
from registry import GUIDES, PARTS

import numpyro_bnn as bnn
from numpyro_bnn import nn, priors

N, BATCH = 20, 5
X = jnp.asarray(np.random.default_rng(0).normal(size=(N, 2)))
Y = jnp.sin(X[:, 0]) + 0.1 * X[:, 1]
PRIOR = {"Dense_0.kernel": priors.Hierarchical(centered=True), "*": priors.Hierarchical()}


def model(x, y=None, batch_size=None):
    """A network with a centered and a non-centered learned scale, noise to be learned, minibatches."""
    net = bnn.random_network("net", nn.MLP([3, 1], "tanh"), x.shape[1:], PRIOR)
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("data", x.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(net(x[i])[..., 0], sigma), obs=None if y is None else y[i])


TRACE = handlers.trace(handlers.seed(model, 0)).get_trace(X, Y)
SHAPES = {
    name: np.shape(site["value"])
    for name, site in TRACE.items()
    if site["type"] == "deterministic" or (site["type"] == "sample" and not site["is_observed"])
}
LATENT = [name for name in SHAPES if TRACE[name]["type"] == "sample"]


class Fitted(NamedTuple):
    """A guide after some steps; what is expensive to compute is shared by the tests."""

    name: str
    guide: Any
    svi: SVI
    start: dict[str, jax.Array]
    params: dict[str, jax.Array]
    losses: jax.Array
    draws: dict[str, jax.Array]
    median: dict[str, jax.Array]


DRAWS = (1000, 2)


@pytest.fixture(scope="module")
def fitted(request):
    guide = GUIDES[request.param].make(model)
    svi = SVI(model, guide, optax.adam(1e-2), Trace_ELBO())
    first = svi.init(jax.random.key(0), X, Y, batch_size=BATCH)

    def run(state):
        return jax.lax.scan(lambda s, _: svi.update(s, X, Y, batch_size=BATCH), state, length=200)

    state, losses = jax.jit(run)(first)
    params = svi.get_params(state)
    draws = guide.sample_posterior(jax.random.key(1), params, X, Y, sample_shape=DRAWS)
    return Fitted(request.param, guide, svi, svi.get_params(first), params, losses, draws, guide.median(params))


def guides_that_have(part=None, fast=None):
    """The rows of the registry: slow ones are variants of a class, and, of costly tests, all but the row ``fast``."""
    rows = [
        pytest.param(name, marks=[pytest.mark.slow] if row.slow or fast not in (None, name) else [])
        for name, row in GUIDES.items()
        if part not in row.lacks
    ]
    return pytest.mark.parametrize("fitted", rows, indirect=True, scope="module")


def with_quantiles(fitted):
    lacks = "quantiles of bases" in GUIDES[fitted.name].lacks
    return [name for name in LATENT if not (lacks and name.endswith("_base"))]


def test_every_lack_is_of_a_known_part_and_has_a_reason():
    for name, row in GUIDES.items():
        assert set(row.lacks) <= set(PARTS), name
        assert all(row.lacks.values()), name


# --------------------------------------------------------------------------------------------- SVI, ELBOs


@guides_that_have()
def test_svi_learns_from_minibatches(fitted):
    assert np.all(np.isfinite(fitted.losses))
    assert np.median(fitted.losses[-50:]) < np.median(fitted.losses[:50])
    changed = [name for name, value in fitted.start.items() if not np.allclose(value, fitted.params[name])]
    assert changed == list(fitted.start)


@guides_that_have(fast="AutoMeanField")
def test_elbos_agree(fitted):
    """The same bound with score terms, the same mean with closed-form divergences, and Renyi's, which is tighter."""

    def loss(elbo, key):
        return elbo.loss(key, fitted.params, model, fitted.guide, X, Y)

    def estimates(key):
        return (loss(Trace_ELBO(), key), loss(TraceMeanField_ELBO(), key), loss(RenyiELBO(num_particles=2), key))

    one = jax.random.key(2)
    np.testing.assert_allclose(loss(TraceGraph_ELBO(), one), loss(Trace_ELBO(), one), rtol=1e-4)
    keys = jax.random.split(one, 1000)
    plain, closed_form, renyi = jax.jit(jax.vmap(estimates))(keys)
    # 5 standard errors, a failure rate below 1e-6; the difference vanishes where nothing has a closed form.
    difference = plain - closed_form
    assert abs(np.mean(difference)) < 5 * np.std(difference) / len(plain) ** 0.5 + 1e-4
    error = ((np.var(plain) + np.var(renyi)) / len(plain)) ** 0.5
    assert np.mean(renyi) < np.mean(plain) + 5 * error


# ------------------------------------------------------------------------------------ draws and summaries


@guides_that_have()
def test_draws_have_the_shapes_of_the_sites(fitted):
    assert {name: v.shape for name, v in fitted.draws.items()} == {n: (*DRAWS, *s) for n, s in SHAPES.items()}
    one = fitted.guide.sample_posterior(jax.random.PRNGKey(2), fitted.params)  # a legacy key
    assert {name: value.shape for name, value in one.items()} == SHAPES
    for name in LATENT:
        assert np.all(TRACE[name]["fn"].support(fitted.draws[name])), name


@guides_that_have()
def test_deterministic_sites_follow_from_the_latent_ones(fitted):
    given = {name: fitted.draws[name][0, 1] for name in LATENT}
    trace = handlers.trace(handlers.seed(handlers.substitute(model, given), 0)).get_trace(X, Y)
    for name in set(SHAPES) - set(LATENT):
        np.testing.assert_allclose(fitted.draws[name][0, 1], trace[name]["value"], rtol=1e-5)


@guides_that_have()
def test_guide_draws_and_quantiles_are_of_one_distribution(fitted):
    """The share of draws below a quantile, by the statements of the guide and by ``sample_posterior``."""
    q, num = np.array([0.1, 0.5, 0.9]), 2000
    quantiles = fitted.guide.quantiles(fitted.params, q)
    assert {name: quantiles[name].shape for name in LATENT} == {name: (3, *SHAPES[name]) for name in LATENT}
    by_guide = Predictive(fitted.guide, params=fitted.params, num_samples=num)(jax.random.PRNGKey(3), X, Y)
    # Counts are binomial, and a quantile may itself come from 4096 draws: 6 standard errors, a failure rate of 2e-9
    # for each of the 60 shares of a guide.
    bound = 6 * np.sqrt(q * (1 - q) * (1 / num + 1 / 4096))
    for name in with_quantiles(fitted):
        for draws in (by_guide[name], fitted.draws[name].reshape((num, *SHAPES[name]))):
            share = np.mean(np.asarray(draws)[None] < quantiles[name][:, None], axis=1).reshape(3, -1)
            assert np.all(np.abs(share - q[:, None]) < bound[:, None]), name


@guides_that_have()
def test_median_and_quantiles(fitted):
    assert {name: value.shape for name, value in fitted.median.items()} == SHAPES
    quantiles = fitted.guide.quantiles(fitted.params, [0.05, 0.3, 0.5, 0.95])
    single = fitted.guide.quantiles(fitted.params, 0.3)
    for name in with_quantiles(fitted):
        assert np.all(np.diff(quantiles[name], axis=0) > 0), name
        np.testing.assert_allclose(quantiles[name][2], fitted.median[name], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(quantiles[name][1], single[name][0], rtol=1e-5)


@guides_that_have(fast="AutoMeanField")
@pytest.mark.core
def test_predictive(fitted):
    direct = Predictive(model, guide=fitted.guide, params=fitted.params, num_samples=7)(jax.random.key(5), X)
    assert direct["y"].shape == (7, N)
    latent = {name: fitted.draws[name][:7, 0] for name in LATENT}
    assert Predictive(model, latent)(jax.random.PRNGKey(7), X[:4])["y"].shape == (7, 4)


@guides_that_have(fast="AutoMeanField")
@pytest.mark.core
def test_export(fitted):
    result = SVIRunResult(fitted.params, None, fitted.losses)
    settings = {"num_samples": 6, "posterior_predictive": False}
    idata = bnn.to_inference_data(result, guide=fitted.guide, args=(X, Y), **settings)
    assert idata["posterior"]["net.Dense_0.kernel"].shape == (1, 6, 2, 3)
    assert idata["log_likelihood"]["y"].shape == (1, 6, N)


# ------------------------------------------------------------------------------------- keys, storage, lists


@guides_that_have(fast="AutoMeanField")
def test_legacy_keys(fitted):
    params = fitted.svi.get_params(fitted.svi.init(jax.random.PRNGKey(0), X, Y, batch_size=BATCH))
    assert {n: v.shape for n, v in params.items()} == {n: v.shape for n, v in fitted.start.items()}


@guides_that_have(fast="AutoMeanField")
def test_storage(fitted):
    """Before the guide has seen a model, and after."""
    unused = pickle.loads(pickle.dumps(GUIDES[fitted.name].make(model)))
    assert set(handlers.trace(handlers.seed(unused, 0)).get_trace(X, Y)) >= {*fitted.start, *LATENT}
    restored = pickle.loads(pickle.dumps(fitted.guide))
    for name, value in restored.median(fitted.params).items():
        np.testing.assert_allclose(value, fitted.median[name], rtol=1e-5, atol=1e-7)


@guides_that_have("list", fast="AutoMeanField")
def test_part_of_a_list(fitted):
    """One site by another guide, all others by this one."""
    seeded = handlers.seed(model, 0)
    other = "net/Dense_1.bias"
    computed = [name for name in SHAPES if name not in LATENT]
    guide = AutoGuideList(model)
    guide.append(GUIDES[fitted.name].make(handlers.block(seeded, hide=[other, *computed]), prefix="most"))
    guide.append(AutoNormal(handlers.block(seeded, expose=[other]), prefix="other"))
    svi = SVI(model, guide, optax.adam(1e-2), Trace_ELBO())
    state = svi.init(jax.random.key(0), X, Y, batch_size=BATCH)
    state, loss = svi.update(state, X, Y, batch_size=BATCH)
    assert np.isfinite(loss)
    draws = guide.sample_posterior(jax.random.key(1), svi.get_params(state), X, Y, sample_shape=(3,))
    assert {name: value.shape for name, value in draws.items()} == {n: (3, *SHAPES[n]) for n in LATENT}
    assert set(guide.median(svi.get_params(state))) == set(LATENT)


# ------------------------------------------------------------------------------------------------- density


@guides_that_have("density", fast="AutoCoupling")
def test_density_is_the_change_of_variables(fitted, monkeypatch, x64):
    """The guide is run on noise that is given: the Jacobian of noise -> sites then gives the density.

    With more noise than sites, as in a low-rank Gaussian, sites are affine in the noise (before their transforms),
    and the density is that of a Gaussian with covariance J J^T.
    """
    params = jax.tree.map(lambda value: jnp.asarray(value, float), fitted.params)
    guide = handlers.substitute(handlers.seed(fitted.guide, 0), params)
    transforms = {name: dist.biject_to(TRACE[name]["fn"].support) for name in LATENT}
    noise_shapes, normal = [], jax.random.normal

    def trace_with(noise):
        rest = [noise]

        def given(key, shape=(), dtype=float):
            if isinstance(key, jax.core.Tracer):  # the guide reads the model, in a program of its own
                return normal(key, shape, dtype)
            if noise is None:
                noise_shapes.append(shape)
                return jnp.zeros(shape)
            size = prod(shape)
            head, rest[0] = rest[0][:size], rest[0][size:]
            return head.reshape(shape)

        with monkeypatch.context() as patch:
            patch.setattr(jax.random, "normal", given)
            return handlers.trace(guide).get_trace(X, Y)

    def unconstrained(noise):
        trace = trace_with(noise)
        return ravel_pytree([transforms[name].inv(trace[name]["value"]) for name in LATENT])[0]

    trace_with(None)
    noise = jnp.asarray(np.random.default_rng(1).normal(size=sum(map(prod, noise_shapes))))
    trace, jacobian, at = trace_with(noise), jax.jacfwd(unconstrained)(noise), unconstrained(noise)
    assert jacobian.shape[1] >= jacobian.shape[0] == sum(prod(SHAPES[name]) for name in LATENT)
    if jacobian.shape[0] == jacobian.shape[1]:
        expected = dist.Normal().log_prob(noise).sum() - jnp.linalg.slogdet(jacobian)[1]
    else:
        mean = unconstrained(jnp.zeros_like(noise))
        expected = dist.MultivariateNormal(mean, jacobian @ jacobian.T).log_prob(at)
    for name in LATENT:
        value = trace[name]["value"]
        expected -= jnp.sum(transforms[name].log_abs_det_jacobian(transforms[name].inv(value), value))
    found = sum(jnp.sum(site["fn"].log_prob(site["value"])) for site in trace.values() if site["type"] == "sample")
    np.testing.assert_allclose(found, expected, rtol=1e-6)
