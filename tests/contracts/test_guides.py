"""One contract for every guide: what NumPyro and the export ask, and its density."""

import pickle
from functools import cache, partial
from math import prod
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
import pytest
from helpers import each, group, traced_sites
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.infer import (
    SVI,
    Predictive,
    RenyiELBO,
    Trace_ELBO,
    TraceGraph_ELBO,
    TraceMeanField_ELBO,
)
from numpyro.infer.autoguide import AutoGuideList, AutoNormal
from numpyro.infer.svi import SVIRunResult
from registry import GUIDES, PARTS, firsts
from zoo import BATCH, NET, ZOO, N

import numpyro_bnn as bnn
from numpyro_bnn import guides, models, priors

pytestmark = pytest.mark.core

DRAWS = (1000, 2)
PROBABILITIES = (0.05, 0.1, 0.3, 0.5, 0.9, 0.95)
ENTRY = ZOO["hierarchical"]
# A centered and a non-centered learned scale, noise to be learned, minibatches.
model = models.regression(
    NET,
    {"Dense_0.kernel": priors.Hierarchical(centered=True), "*": priors.Hierarchical()},
)


@cache
def sites():
    """The sites of the model that are not observed, by name."""
    trace = handlers.trace(handlers.seed(model, 0)).get_trace(*ENTRY.args)
    kinds = ("sample", "deterministic")
    return {
        name: site
        for name, site in trace.items()
        if site["type"] in kinds and not site.get("is_observed")
    }


@cache
def shapes():
    return {name: np.shape(site["value"]) for name, site in sites().items()}


def latent():
    return [name for name, site in sites().items() if site["type"] == "sample"]


@cache
def fitted(name):
    """A fitted guide, with draws and summaries from one program, for all tests."""
    guide, args = GUIDES[name].make(model), ENTRY.args
    svi = SVI(model, guide, optax.adam(1e-2), Trace_ELBO())
    legacy, given = jax.random.PRNGKey(0), {"batch_size": BATCH, "progress_bar": False}
    start, fit = (guides.fit(svi, legacy, n, *args, **given) for n in (1, 200))

    @jax.jit
    def summaries(params):
        keys, given = jax.random.split(jax.random.key(1)), {"sample_shape": DRAWS}
        statements = Predictive(guide, params=params, num_samples=prod(DRAWS))
        return {
            "draws": guide.sample_posterior(keys[0], params, *args, **given),
            "by_guide": statements(keys[1], *args),
            "median": guide.median(params),
            "quantiles": guide.quantiles(params, np.array(PROBABILITIES)),
        }

    def shaped(params):
        return {
            "single": guide.sample_posterior(jax.random.PRNGKey(2), params),
            "quantile": guide.quantiles(params, 0.3),
        }

    made = {**summaries(fit.params), **jax.eval_shape(shaped, fit.params)}
    made |= {"guide": guide, "start": start.params, "losses": fit.losses}
    return SimpleNamespace(params=fit.params, **made)


def each_guide(part=None, *, fast=None, variants=True):
    """The rows of the registry, without ``variants`` the first of each class; slow are
    variants, and, of costly tests, all but the row ``fast``.
    """
    assert {lack for row in GUIDES.values() for lack in row.lacks} <= {*PARTS}
    first = firsts(GUIDES) - {"AutoStructured"}  # it is `AutoBlocks`, with blocks
    names = [name for name, row in GUIDES.items() if part not in row.lacks]
    names = [name for name in names if variants or name in first]
    return each("name", names, fast=fast or first)


COSTLY = {"fast": ["AutoMeanField"], "variants": False}


@each_guide()
def test_svi_learns_all_parameters_from_minibatches(name):
    fit = fitted(name)
    assert np.all(np.isfinite(fit.losses))
    assert np.median(fit.losses[-50:]) < np.median(fit.losses[:50])
    changed = [
        param
        for param, value in fit.start.items()
        if not np.allclose(value, fit.params[param])
    ]
    assert changed == list(fit.start)


@each_guide()
def test_draws_are_in_the_support_and_deterministic_sites_follow(name):
    fit = fitted(name)
    assert {site: v.shape for site, v in fit.draws.items()} == {
        n: (*DRAWS, *shape) for n, shape in shapes().items()
    }
    assert {site: value.shape for site, value in fit.single.items()} == shapes()
    given = {site: fit.draws[site][0, 1] for site in latent()}
    computed = shapes().keys() - given.keys()

    @jax.jit
    def checked(draws, given):
        inside = {n: sites()[n]["fn"].support(draws[n]).all() for n in latent()}
        placed = handlers.seed(handlers.substitute(model, given), 0)
        trace = handlers.trace(placed).get_trace(*ENTRY.args)
        return inside, {site: trace[site]["value"] for site in computed}

    inside, expected = checked(fit.draws, given)
    assert all(inside.values()), inside
    for site, value in expected.items():
        np.testing.assert_allclose(fit.draws[site][0, 1], value, rtol=1e-5)


@each_guide()
def test_guide_draws_quantiles_and_median_are_of_one_distribution(name):
    """The share of draws below a quantile, by the statements of the guide and by
    ``sample_posterior``.

    Counts are binomial, and a quantile may itself come from 4096 draws: 6 standard
    errors, a failure rate of 2e-9 for each of the 180 shares of a guide.
    """
    fit, q, num = fitted(name), np.array(PROBABILITIES), prod(DRAWS)
    quantiles = fit.quantiles
    assert {site: quantiles[site].shape for site in latent()} == {
        n: (6, *shapes()[n]) for n in latent()
    }
    assert {site: value.shape for site, value in fit.median.items()} == shapes()
    bound = 6 * np.sqrt(q * (1 - q) * (1 / num + 1 / 4096))
    of_bases = "quantiles of bases" not in GUIDES[name].lacks
    for site in (site for site in latent() if of_bases or not site.endswith("_base")):
        assert np.all(np.diff(quantiles[site], axis=0) > 0), site
        np.testing.assert_allclose(
            quantiles[site][3], fit.median[site], rtol=1e-4, atol=1e-6
        )
        assert fit.quantile[site].shape == (1, *shapes()[site])
        for draws in (
            fit.by_guide[site],
            fit.draws[site].reshape((num, *shapes()[site])),
        ):
            share = np.mean(
                np.asarray(draws)[None] < quantiles[site][:, None], axis=1
            ).reshape(6, -1)
            assert np.all(np.abs(share - q[:, None]) < bound[:, None]), site


@each_guide(**COSTLY)
def test_predictive_and_export_take_the_guide(name):
    fit = fitted(name)
    direct = Predictive(model, guide=fit.guide, params=fit.params, num_samples=7)(
        jax.random.key(5), *ENTRY.new
    )
    assert direct["y"].shape == (7, len(ENTRY.new[0]))
    options = {"num_samples": 6, "posterior_predictive": False}
    result = SVIRunResult(fit.params, None, fit.losses)
    idata = bnn.to_inference_data(result, guide=fit.guide, args=ENTRY.args, **options)
    assert group(idata, "posterior")["net.Dense_1.kernel"].shape == (1, 6, 3, 1)
    assert group(idata, "log_likelihood")["y"].shape == (1, 6, N)
    assert np.isfinite(idata.attrs["elbo"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["AutoBlocks given scales", "AutoCoupling"])
def test_elbos_of_numpyro_agree(name):
    """The same bound with score terms, the same mean with closed-form divergences, and
    Renyi's, which is tighter.
    """
    fit = fitted(name)

    def loss(elbo, key):
        return elbo.loss(key, fit.params, model, fit.guide, *ENTRY.args)

    def estimates(key):
        elbos = Trace_ELBO(), TraceMeanField_ELBO(), RenyiELBO(num_particles=2)
        return tuple(loss(elbo, key) for elbo in (*elbos, TraceGraph_ELBO()))

    plain, closed_form, renyi, with_scores = jax.jit(jax.vmap(estimates))(
        jax.random.split(jax.random.key(2), 1000)
    )
    np.testing.assert_allclose(with_scores, plain, rtol=1e-4)
    # 5 standard errors, a failure rate below 1e-6; the difference vanishes where
    # nothing has a closed form.
    difference = plain - closed_form
    assert abs(np.mean(difference)) < 5 * np.std(difference) / len(plain) ** 0.5 + 1e-4
    error = ((np.var(plain) + np.var(renyi)) / len(plain)) ** 0.5
    assert np.mean(renyi) < np.mean(plain) + 5 * error


@each_guide(**COSTLY)
def test_guides_can_be_stored(name):
    """Before the guide has seen a model, and after."""
    fit = fitted(name)
    unused = pickle.loads(pickle.dumps(GUIDES[name].make(model)))
    assert set(traced_sites(unused, *ENTRY.args)) >= {*fit.start, *latent()}
    restored = pickle.loads(pickle.dumps(fit.guide))
    for site, value in jax.jit(restored.median)(fit.params).items():
        np.testing.assert_allclose(value, fit.median[site], rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@each_guide("list", variants=False)
def test_guides_can_be_parts_of_a_list(name):
    """One site by another guide, all others by this one."""
    seeded, other = handlers.seed(model, 0), "net/Dense_1.bias"
    computed = [site for site in shapes() if site not in latent()]
    guide = AutoGuideList(model)
    guide.append(
        GUIDES[name].make(
            handlers.block(seeded, hide=[other, *computed]), prefix="most"
        )
    )
    guide.append(AutoNormal(handlers.block(seeded, expose=[other]), prefix="other"))
    svi = SVI(model, guide, optax.adam(1e-2), Trace_ELBO())
    state = svi.init(jax.random.key(0), *ENTRY.args, batch_size=BATCH)
    state, loss = jax.jit(partial(svi.update, batch_size=BATCH))(state, *ENTRY.args)
    assert np.isfinite(loss)
    params = svi.get_params(state)
    key, given = jax.random.key(1), {"sample_shape": (3,)}
    draws = guide.sample_posterior(key, params, *ENTRY.args, **given)
    expected = {name: (3, *shapes()[name]) for name in latent()}
    assert {site: value.shape for site, value in draws.items()} == expected
    assert set(guide.median(params)) == set(latent())


@each_guide("density", fast=["AutoMeanField"])
def test_density_is_the_change_of_variables(name, monkeypatch, x64):
    """The guide is run on noise that is given: the Jacobian of noise -> sites then
    gives the density.

    With more noise than sites, as in a low-rank Gaussian, sites are affine in the noise
    (before their transforms), and the density is that of a Gaussian with covariance J
    J^T.
    """
    fit = fitted(name)
    params = jax.tree.map(lambda value: jnp.asarray(value, float), fit.params)
    guide = handlers.substitute(handlers.seed(fit.guide, 0), params)
    supports = {site: sites()[site]["fn"].support for site in latent()}
    transforms = {site: dist.biject_to(on) for site, on in supports.items()}
    noise_shapes, normal = [], jax.random.normal

    def trace_with(noise):
        rest = [noise]

        def given(key, shape=(), dtype=float):
            if isinstance(key, jax.core.Tracer):
                # the guide reads the model, in a program of its own
                return normal(key, shape, dtype)
            if noise is None:
                noise_shapes.append(shape)
                return jnp.zeros(shape)
            head, rest[0] = rest[0][: prod(shape)], rest[0][prod(shape) :]
            return head.reshape(shape)

        with monkeypatch.context() as patch:
            patch.setattr(jax.random, "normal", given)
            return handlers.trace(guide).get_trace(*ENTRY.args)

    def unconstrained(noise):
        trace = trace_with(noise)
        inverses = (transforms[n].inv(trace[n]["value"]) for n in latent())
        return ravel_pytree([*inverses])[0]

    trace_with(None)
    size = sum(map(prod, noise_shapes))
    noise = jnp.asarray(np.random.default_rng(1).normal(size=size))
    trace, at = trace_with(noise), unconstrained(noise)
    jacobian = jax.jacfwd(unconstrained)(noise)
    assert size >= len(at) == sum(prod(shapes()[site]) for site in latent())
    if size == len(at):
        expected = dist.Normal().log_prob(noise).sum() - jnp.linalg.slogdet(jacobian)[1]
    else:
        mean = unconstrained(jnp.zeros_like(noise))
        expected = dist.MultivariateNormal(mean, jacobian @ jacobian.T).log_prob(at)
    for site in latent():
        value, transform = trace[site]["value"], transforms[site]
        log_slope = transform.log_abs_det_jacobian(transform.inv(value), value)
        expected -= jnp.sum(log_slope)
    drawn = (site for site in trace.values() if site["type"] == "sample")
    found = sum(jnp.sum(site["fn"].log_prob(site["value"])) for site in drawn)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
