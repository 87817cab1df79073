"""Weights that are fixed, around given values, or learned."""

import copy
import pickle
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats
from helpers import each, group, run_chains, traced_sites, within_errors
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, Gibbs
from numpyro.infer.util import log_density
from zoo import NET, NEW_X, NOISE, N, X, Y

from numpyro_bnn import (
    guides,
    infer,
    infinite,
    models,
    nn,
    priors,
    symmetry,
    to_inference_data,
)

pytestmark = pytest.mark.core

D, H = NET.param_shapes((2,))["Dense_0.kernel"]
_RANDOM = np.random.default_rng(0)
PARAMS = {
    name: _RANDOM.normal(size=shape).astype(np.float32)
    for name, shape in NET.param_shapes((D,)).items()
}
BODY = {"Dense_0.*": priors.Fixed, "*": priors.Normal}
LEARNED = {"Dense_0.*": priors.Learned, "*": priors.Normal}
LAST = {"net/Dense_1.kernel", "net/Dense_1.bias"}
KINDS = [priors.Fixed, priors.Learned]


def prior_of(kinds, params=PARAMS):
    return {
        name: kind() if kind is priors.Normal else kind(params)
        for name, kind in kinds.items()
    }


def model_of(kinds, params=PARAMS):
    return models.regression(NET, prior_of(kinds, params), noise=NOISE)


def features(x, params=PARAMS):
    return np.tanh(x @ params["Dense_0.kernel"] + params["Dense_0.bias"])


def learned_of(kernel, names=("Dense_0.kernel", "Dense_0.bias")):
    """Values of the learned parameters of a kernel that has run."""
    trace = handlers.trace(handlers.seed(kernel.model, 0)).get_trace(X, Y)
    assert {name for name, site in trace.items() if site["type"] == "param"} == {
        f"net/{name}" for name in names
    }
    return {name: np.asarray(trace[f"net/{name}"]["value"]) for name in names}


def linear_regression(design, y, prior_variance):
    """Mean and covariance of the weights."""
    covariance = np.linalg.inv(
        design.T @ design / NOISE**2 + np.diag(1 / np.asarray(prior_variance))
    )
    return covariance @ design.T @ y / NOISE**2, covariance


# -- what is sampled, and its posterior ------------------------------------------------


def test_last_layer_of_a_fixed_body_has_the_posterior_of_a_linear_regression():
    """Joint density over the closed-form posterior is the evidence everywhere."""
    model, prior_variance = model_of(BODY), [1 / H] * H + [1.0]
    sites = traced_sites(model, X, Y)
    assert {name for name in sites if name.startswith("net/")} == LAST
    design = np.column_stack([features(X), np.ones(N)]).astype(float)
    posterior = scipy.stats.multivariate_normal(
        *linear_regression(design, Y, prior_variance)
    )
    marginal = design @ np.diag(prior_variance) @ design.T + NOISE**2 * np.eye(N)
    evidence = scipy.stats.multivariate_normal(cov=marginal).logpdf(Y)
    draws = posterior.rvs(5, random_state=0)

    def joint(draw):
        values = {"net/Dense_1.kernel": draw[:H, None], "net/Dense_1.bias": draw[H:]}
        return log_density(model, (X, Y), {}, values)[0]

    found = jax.jit(jax.vmap(joint))(draws.astype(np.float32))
    np.testing.assert_allclose(found - posterior.logpdf(draws), evidence, rtol=1e-4)


def collapsed(model):
    return infer.MCLMC(
        infer.collapse(model, ["net/Dense_1.bias"], X, Y), steps_per_draw=3
    )


HELD = {f"net/{name}": value for name, value in PARAMS.items()}
WAYS = {  # way -> kernel, and what it does with the body
    "SGLD": (partial(infer.SGLD, steps_per_draw=3), LEARNED),
    "MCLMC of weights that SVI learned": (
        lambda m: infer.MCLMC(handlers.substitute(m, HELD)),
        LEARNED,
    ),
    "collapse": (collapsed, LEARNED),
    "NUTS": (partial(NUTS, max_tree_depth=2), BODY),
}


@each("way", WAYS, fast=["SGLD"])
def test_every_chain_samples_one_model_with_the_fixed_or_learned_body(way):
    """The draws are of the last layer."""
    make, kinds = WAYS[way]
    kernel, params = make(model_of(kinds)), PARAMS
    method = "parallel" if way == "SGLD" else "sequential"
    sizes = {"num_warmup": 20, "num_samples": 6, "num_chains": 2}
    mcmc = MCMC(kernel, chain_method=method, progress_bar=False, **sizes)
    mcmc.run(jax.random.key(0), X, Y)
    if kinds is LEARNED:
        params = learned_of(kernel)
        for name, value in params.items():
            assert np.any(value != PARAMS[name]) == ("SVI" not in way)
    assert set(mcmc.get_samples()) == LAST
    idata = to_inference_data(
        mcmc, {"x": NEW_X}, posterior_predictive=False, log_likelihood=False
    )
    exported = {name.replace("/", "."): name for name in LAST}
    assert set(group(idata, "posterior").data_vars) == {*exported}
    assert set(group(idata, "observed_data").data_vars) == {"y"}
    draws = group(idata, "posterior")
    kernel = draws["net.Dense_1.kernel"].to_numpy()[..., 0]
    bias = draws["net.Dense_1.bias"].to_numpy()
    expected = kernel @ features(NEW_X, params).T + bias
    found = group(idata, "predictions")["y_mean"].to_numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.optimized
def test_a_kernel_learns_the_joint_mode():
    """Weights without a prior, a bias with one, both linear."""
    kinds = {
        "Dense_0.*": priors.Fixed,
        "Dense_1.kernel": priors.Learned,
        "*": priors.Normal,
    }
    kernel = infer.GHMC(
        model_of(kinds),
        steps_per_draw=4,
        warm_start=infer.WarmStart(0.5, num_steps=4000),
    )
    mcmc = run_chains(kernel, X, Y, num_warmup=200, num_samples=1000, num_chains=1)
    found = learned_of(kernel, ["Dense_1.kernel"])["Dense_1.kernel"][:, 0]
    mode, _ = linear_regression(
        np.column_stack([features(X), np.ones(N)]).astype(float), Y, [1e12] * H + [1.0]
    )
    np.testing.assert_allclose(found, mode[:H], atol=2e-3)
    # Given them, the bias has a normal posterior; every tenth draw is independent.
    mean, variance = linear_regression(np.ones((N, 1)), Y - features(X) @ found, [1.0])
    bias = np.asarray(mcmc.get_samples()["net/Dense_1.bias"], float)[::10]
    assert within_errors(bias, mean)
    assert within_errors((bias - mean) ** 2, variance[0])


# -- symmetries and kernels of wide networks -------------------------------------------


@pytest.mark.filterwarnings("ignore:symmetry.find. found none")
def test_units_with_fixed_weights_do_not_move():
    """Unless the values allow it: biases of zero are equal and odd."""

    def found(kinds, params=PARAMS):
        return {
            type(s)
            for s in symmetry.find(
                model_of({**kinds, "*": priors.Normal}, params), X, Y
            )
        }

    both, learned = {symmetry.SignFlip, symmetry.Permutation}, priors.Learned
    zero = {"Dense_0.bias": np.zeros(H, np.float32)}
    assert found({"Dense_1.bias": priors.Fixed}) == both
    for name, kind in (("Dense_0.bias", priors.Fixed), ("Dense_1.kernel", learned)):
        assert found({name: kind}) == set()
    assert found({"Dense_0.bias": priors.Fixed}, zero) == both
    assert found({"Dense_0.bias": priors.Learned}, zero) == set()


def test_tangent_kernel_of_fixed_weights_is_that_of_the_rest():
    """In closed form, on the features; weights around given values are random."""
    hidden = features(NEW_X)
    found = infinite.empirical_ntk(NET, PARAMS, NEW_X, prior=prior_of(BODY))
    np.testing.assert_allclose(found, hidden @ hidden.T / H + 1, rtol=1e-4)
    around = prior_of({"Dense_0.*": priors.Fixed, "*": priors.Centered})
    np.testing.assert_allclose(
        infinite.empirical_ntk(NET, PARAMS, NEW_X, prior=around), found, rtol=1e-6
    )
    with pytest.raises(
        ValueError,
        match=r"weights of 'Dense_0\.kernel' that are not random\. .*features",
    ):
        infinite.nngp(NET, X, prior=prior_of(BODY))


# -- errors that teach -----------------------------------------------------------------


def random_start(x, y=None):
    w = numpyro.param("w", lambda key: jax.random.normal(key, (D,)))
    b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w + b[0], NOISE), obs=y)


def in_gibbs(model):
    return Gibbs([(infer.GHMC(model), [name]) for name in sorted(LAST)])


INSIDE = r"learned parameter 'net/Dense_0\.kernel' inside another kernel.*SVI"
RANDOM = r"parameter 'w', which starts at random values.*priors\.Learned"
FLIP = [symmetry.SignFlip(["b"])]
REFUSED = [
    (
        lambda: run_chains(
            infer.OrbitMoves(NUTS(model_of(BODY)), symmetry.from_network(NET, (D,))),
            X,
            Y,
        ),
        r"got 'net/Dense_0\.kernel'.*Known: net/Dense_1\.bias, net/Dense_1\.kernel",
    ),
    (lambda: infer.collapse(model_of(BODY), sorted(LAST), X, Y), r"collapse.*all"),
    (
        lambda: run_chains(
            infer.ParallelTempering(infer.GHMC(model_of(LEARNED)), 2), X, Y
        ),
        INSIDE,
    ),
    (lambda: run_chains(in_gibbs(model_of(LEARNED)), X, Y, num_chains=1), INSIDE),
    (lambda: run_chains(infer.SGLD(random_start), X, Y), RANDOM),
    (
        lambda: run_chains(
            infer.OrbitMoves(NUTS(random_start), FLIP, exact=False), X, Y
        ),
        RANDOM,
    ),
    (
        lambda: guides.AutoADF(model_of(LEARNED)).run(
            jax.random.key(0), X, Y, num_epochs=1, progress_bar=False
        ),
        r"'net/Dense_0\.kernel', a `param` site",
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_cannot_be_fixed_or_learned_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_shapes_of_given_values_are_checked(kind):
    call, rest = f"priors.{kind.__name__}", {"*": priors.Normal}
    wide = {
        name: np.ones(shape, np.float32)
        for name, shape in nn.MLP([H + 1, 1]).param_shapes((D,)).items()
    }
    for kinds, params, message in [
        (
            {"Dense_0.*": kind, **rest},
            {"Dense_0.kernels": wide["Dense_0.kernel"]},
            r"Did you mean 'Dense_0\.kernels'\?",
        ),
        ({"Dense_0.*": kind, **rest}, wide, r"shape \(2, 4\) for"),
    ]:
        with pytest.raises(ValueError, match=rf"{call}.*{message}"):
            traced_sites(model_of(kinds, params), X, Y)
    with pytest.raises(ValueError, match=r"'Dense_7\.\*'"):
        traced_sites(model_of({"Dense_7.*": kind, **rest}), X, Y)


@pytest.mark.parametrize("kind", KINDS)
def test_given_values_survive_copies_in_the_precision_of_the_run(kind, x64):
    prior = kind(PARAMS)
    for other in (prior, copy.deepcopy(prior), pickle.loads(pickle.dumps(prior))):
        with handlers.seed(rng_seed=0):
            mean = other("Dense_0.kernel", (D, H)).mean
        np.testing.assert_array_equal(mean, PARAMS["Dense_0.kernel"])
        assert mean.dtype == jnp.float64
