"""One contract for every guide: what NumPyro, Predictive and the export ask of it, and
a density that is right.
"""

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
from helpers import group, traced_sites
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
from zoo import BATCH, NET, ZOO, N, spread

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
    start, fit = (
        guides.fit(
            svi,
            jax.random.PRNGKey(0),
            steps,
            *args,
            batch_size=BATCH,
            progress_bar=False,
        )  # a legacy key
        for steps in (1, 200)
    )

    @jax.jit
    def summaries(params):
        return {
            "draws": guide.sample_posterior(
                jax.random.key(1), params, *args, sample_shape=DRAWS
            ),
            # By the statements of the guide.
            "by_guide": Predictive(guide, params=params, num_samples=prod(DRAWS))(
                jax.random.key(3), *args
            ),
            "median": guide.median(params),
            "quantiles": guide.quantiles(params, np.array(PROBABILITIES)),
        }

    def shaped(params):
        return {
            "single": guide.sample_posterior(jax.random.PRNGKey(2), params),
            "quantile": guide.quantiles(params, 0.3),
        }

    fixed = {
        "guide": guide,
        "start": start.params,
        "params": fit.params,
        "losses": fit.losses,
    }
    return SimpleNamespace(
        **fixed, **summaries(fit.params), **jax.eval_shape(shaped, fit.params)
    )


def each_guide(part=None, fast=None):
    """The rows of the registry: slow are variants of a class, and, of costly tests, all
    but the row ``fast``.
    """
    assert {part, *(lack for row in GUIDES.values() for lack in row.lacks)} <= {
        None,
        *PARTS,
    }
    first = firsts(GUIDES) - {"AutoStructured"}  # it is `AutoBlocks`, with blocks
    params = [
        pytest.param(
            name,
            marks=[] if name in first and fast in (None, name) else [pytest.mark.slow],
        )
        for name, row in GUIDES.items()
        if part not in row.lacks
    ]
    return pytest.mark.parametrize("name", params)


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


@each_guide(fast="AutoMeanField")
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


@each_guide(fast="none: each takes seconds")
def test_elbos_of_numpyro_agree(name):
    """The same bound with score terms, the same mean with closed-form divergences, and
    Renyi's, which is tighter.
    """
    fit = fitted(name)

    def loss(elbo, key):
        return elbo.loss(key, fit.params, model, fit.guide, *ENTRY.args)

    def estimates(key):
        elbos = (
            Trace_ELBO(),
            TraceMeanField_ELBO(),
            RenyiELBO(num_particles=2),
            TraceGraph_ELBO(),
        )
        return tuple(loss(elbo, key) for elbo in elbos)

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


@each_guide(fast="AutoMeanField")
def test_guides_can_be_stored(name):
    """Before the guide has seen a model, and after."""
    fit = fitted(name)
    unused = pickle.loads(pickle.dumps(GUIDES[name].make(model)))
    assert set(traced_sites(unused, *ENTRY.args)) >= {*fit.start, *latent()}
    restored = pickle.loads(pickle.dumps(fit.guide))
    for site, value in jax.jit(restored.median)(fit.params).items():
        np.testing.assert_allclose(value, fit.median[site], rtol=1e-5, atol=1e-7)


@each_guide("list", fast="none: each takes seconds")
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
    draws = guide.sample_posterior(
        jax.random.key(1), params, *ENTRY.args, sample_shape=(3,)
    )
    assert {site: value.shape for site, value in draws.items()} == {
        n: (3, *shapes()[n]) for n in latent()
    }
    assert set(guide.median(params)) == set(latent())


@pytest.mark.slow
def test_a_list_of_guides_is_fitted():
    """Its parts read their models in their first call, outside of any program."""
    full = guides.AutoBlocks(
        handlers.block(spread, hide=["sigma", "mean", "precision"]),
        {"w": guides.FullRank()},
    )
    guide = AutoGuideList(spread)
    guide.append(full)
    guide.append(AutoNormal(handlers.block(spread, expose=["sigma"]), prefix="other"))
    svi = SVI(spread, guide, optax.adam(1e-2), Trace_ELBO())
    args = ZOO["spread"].args
    result = guides.fit(
        svi, jax.random.key(0), 2, *args, batch_size=BATCH, progress_bar=False
    )
    assert np.all(np.isfinite(result.losses))
    np.testing.assert_allclose(
        guide.median(result.params)["w"], result.params["auto_w_loc"]
    )


@each_guide("density", fast="AutoMeanField")
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
    transforms = {
        site: dist.biject_to(sites()[site]["fn"].support) for site in latent()
    }
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
        return ravel_pytree(
            [transforms[site].inv(trace[site]["value"]) for site in latent()]
        )[0]

    trace_with(None)
    noise = jnp.asarray(
        np.random.default_rng(1).normal(size=sum(map(prod, noise_shapes)))
    )
    trace = trace_with(noise)
    jacobian = jax.jacfwd(unconstrained)(noise)
    at = unconstrained(noise)
    assert (
        jacobian.shape[1]
        >= jacobian.shape[0]
        == sum(prod(shapes()[site]) for site in latent())
    )
    if jacobian.shape[0] == jacobian.shape[1]:
        expected = dist.Normal().log_prob(noise).sum() - jnp.linalg.slogdet(jacobian)[1]
    else:
        mean = unconstrained(jnp.zeros_like(noise))
        expected = dist.MultivariateNormal(mean, jacobian @ jacobian.T).log_prob(at)
    for site in latent():
        value = trace[site]["value"]
        expected -= jnp.sum(
            transforms[site].log_abs_det_jacobian(transforms[site].inv(value), value)
        )
    found = sum(
        jnp.sum(site["fn"].log_prob(site["value"]))
        for site in trace.values()
        if site["type"] == "sample"
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6)
