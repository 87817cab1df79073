"""Weights that are fixed, around given values, or learned: exact posteriors, every kernel and guide, symmetries."""

import copy
import pickle
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flax import linen, nnx
from numpyro import handlers
from numpyro.contrib.module import random_eqx_module, random_flax_module, random_nnx_module
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS, SVI, Gibbs, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from registry import GUIDES, KERNELS

import numpyro_bnn as bnn
from numpyro_bnn import _arviz, guides, infer, infinite, models, nn, priors, symmetry

pytestmark = pytest.mark.core

N, D, H, SIGMA = 40, 2, 4, 0.3
DATA = np.random.default_rng(0)
X = jnp.asarray(DATA.normal(size=(N, D)), jnp.float32)
Y = jnp.sin(2 * X[:, 0]) + SIGMA * jnp.asarray(DATA.normal(size=N), jnp.float32)
X_TEST = jnp.asarray(DATA.normal(size=(5, D)), jnp.float32)
NET = nn.MLP([H, 1], "tanh")
PARAMS = NET.init(jax.random.key(1), (D,))
PARAMS["Dense_0.bias"] = jnp.asarray(DATA.normal(size=H), jnp.float32)
BODY = {"Dense_0.*": priors.Fixed(PARAMS), "Dense_1.*": priors.Normal()}
LAST = {"net/Dense_1.kernel", "net/Dense_1.bias"}


def last_layer(prior=None):
    return models.regression(NET, prior or BODY, noise=SIGMA)


def features(x, params=PARAMS):
    return np.tanh(np.asarray(x) @ params["Dense_0.kernel"] + params["Dense_0.bias"])


def function(x, draws, params=PARAMS):
    """Outputs (..., N) of the body with draws of the last layer."""
    return draws["net/Dense_1.kernel"][..., 0] @ features(x, params).T + draws["net/Dense_1.bias"]


def closed_form(design, y, prior_variance, sd=SIGMA):
    """Mean and covariance of the weights of a Bayesian linear regression."""
    design, y = np.asarray(design, float), np.asarray(y, float)
    covariance = np.linalg.inv(design.T @ design / sd**2 + np.diag(1 / np.asarray(prior_variance)))
    return covariance @ design.T @ y / sd**2, covariance


DESIGN = np.column_stack([features(X), np.ones(N)])
EXACT = closed_form(DESIGN, Y, [1 / H] * H + [1.0])


def stacked(draws):
    """Weights and bias of the last layer, (S, H + 1)."""
    return np.column_stack([draws["net/Dense_1.kernel"][..., 0], draws["net/Dense_1.bias"]]).astype(float)


def run_mcmc(kernel, *args, warmup=4, draws=6, **kwargs):
    options = kwargs.pop("options", {})
    mcmc = MCMC(kernel, num_warmup=warmup, num_samples=draws, progress_bar=False, **options)
    mcmc.run(jax.random.key(0), *args, **kwargs)
    return mcmc


# -- the posterior of the last layer has a closed form -------------------------------------------------------


@pytest.mark.optimized
@pytest.mark.parametrize(
    ("make", "bias"),
    [
        pytest.param(NUTS, 0.0, id="NUTS"),
        pytest.param(partial(infer.GHMC, num_steps=5, steps_per_draw=2), 0.0, id="GHMC", marks=pytest.mark.slow),
        pytest.param(infer.MCLMC, 0.05, id="MCLMC"),
    ],
)
def test_kernels_draw_the_last_layer_from_its_exact_posterior(make, bias):
    """Means and variances within 5 standard errors; MCLMC may be off by its tolerance, 5 % of a variance."""
    draws = stacked(run_mcmc(make(last_layer()), X, Y, warmup=500, draws=2000).get_samples())
    mean, variance = EXACT[0], np.diag(EXACT[1])
    for values, expected, sd, allowed in [
        (draws, mean, np.sqrt(variance), bias * np.sqrt(variance)),
        ((draws - mean) ** 2, variance, np.sqrt(2) * variance, bias * variance),
    ]:
        error = 5 * sd / np.sqrt(effective_sample_size(values[None]))
        assert np.all(np.abs(values.mean(0) - expected) < error + allowed)


def test_full_rank_guide_is_the_exact_posterior():
    """At the closed-form parameters log p - log q is the evidence for every draw: the loss has no variance."""
    model = last_layer()
    guide = AutoMultivariateNormal(model)
    svi = SVI(model, guide, numpyro.optim.Adam(0.1), Trace_ELBO())
    names = list(handlers.trace(handlers.seed(model, 0)).get_trace(X, Y))
    assert [name for name in names if name.startswith("net/")] == ["net/Dense_1.kernel", "net/Dense_1.bias"]
    svi.init(jax.random.key(0), X, Y)
    params = {"auto_loc": jnp.asarray(EXACT[0]), "auto_scale_tril": jnp.asarray(np.linalg.cholesky(EXACT[1]))}
    losses = [Trace_ELBO().loss(jax.random.key(i), params, model, guide, X, Y) for i in range(8)]
    marginal = dist.MultivariateNormal(
        jnp.zeros(N), jnp.asarray(DESIGN @ np.diag([1 / H] * H + [1.0]) @ DESIGN.T + SIGMA**2 * np.eye(N))
    )
    np.testing.assert_allclose(losses, -marginal.log_prob(Y), rtol=1e-3)


def test_mean_field_guide_finds_its_closed_form_optimum():
    """The best factorized normal has the posterior's mean and the inverse diagonal of its precision."""
    model = last_layer()
    guide = guides.AutoMeanField(model)
    schedule = optax.cosine_decay_schedule(0.02, 2000)
    optimizer = numpyro.optim.optax_to_numpyro(optax.adam(schedule))
    svi = SVI(model, guide, optimizer, Trace_ELBO(num_particles=8))
    result = guides.fit(svi, jax.random.key(0), 2000, X, Y, progress_bar=False)
    draws = guide.sample_posterior(jax.random.key(1), result.params, X, Y, sample_shape=(4000,))
    found, sd = stacked(draws), 1 / np.sqrt(np.diag(np.linalg.inv(EXACT[1])))
    assert np.all(np.abs(found.mean(0) - EXACT[0]) < 0.1 * sd + 5 * sd / 4000**0.5)
    np.testing.assert_allclose(found.std(0), sd, rtol=0.1)


def test_adf_treats_fixed_weights_as_constants():
    """Rows that are unit vectors do not couple the weights: assumed density filtering is exact, in float64."""
    rows = jnp.tile(jnp.eye(3), (5, 1))
    y = jnp.asarray(DATA.normal(size=15), jnp.float32)
    net = nn.Sequential([nn.Dense(3, use_bias=False), "identity", nn.Dense(1, use_bias=False)])
    body = {"Dense_0.kernel": jnp.diag(jnp.array([0.5, -1.0, 2.0]))}
    model = models.regression(net, {"Dense_0.*": priors.Fixed(body), "*": priors.Normal()}, noise=SIGMA)
    guide = guides.AutoADF(model)
    start = {"net/Dense_1.kernel": np.zeros((3, 1))}
    result = guide.run(jax.random.key(0), rows, y, num_epochs=1, init_means=start, progress_bar=False)
    draws = guide.sample_posterior(jax.random.key(1), result.params, rows, y, sample_shape=(4000,))
    assert set(draws) == {"net/Dense_1.kernel"}
    mean, covariance = closed_form(rows @ body["Dense_0.kernel"], y, [1 / 3] * 3)
    found, sd = np.asarray(draws["net/Dense_1.kernel"])[..., 0], np.sqrt(np.diag(covariance))
    assert np.all(np.abs(found.mean(0) - mean) < 5 * sd / 4000**0.5)
    np.testing.assert_allclose(found.std(0), sd, rtol=5 / (2 * 4000) ** 0.5)


@pytest.mark.slow
def test_local_reparameterization_with_fixed_weights():
    """Both estimators of the ELBO have one mean; the fixed layer has no noise to move."""
    model = last_layer()
    guide = guides.AutoMeanField(model)
    losses = {}
    for elbo in (Trace_ELBO(), guides.TraceLocalReparam_ELBO()):
        svi = SVI(model, guide, numpyro.optim.Adam(0.01), elbo)
        params = svi.get_params(svi.init(jax.random.key(0), X, Y))
        keys = jax.random.split(jax.random.key(1), 2000)
        losses[elbo] = jax.vmap(lambda k, p=params, e=elbo: e.loss(k, p, model, guide, X, Y))(keys)
    one, other = losses.values()
    assert abs(one.mean() - other.mean()) < 5 * np.hypot(one.std(), other.std()) / 2000**0.5


# -- what is fixed stays fixed, in every kernel and guide ----------------------------------------------------


def orbit(model):
    with pytest.warns(UserWarning, match="found none"):
        assert symmetry.find(model, X, Y) == []
    return infer.OrbitMoves(
        infer.MCLMC(model, steps_per_draw=3), [symmetry.SignFlip(["net/Dense_1.bias"])], exact=False
    )


def collapsed(model):
    return infer.MCLMC(infer.collapse(model, ["net/Dense_1.bias"], X, Y), steps_per_draw=3)


FIRST = {row.make.func: row.make for row in reversed(KERNELS.values())}
WAYS = {
    **{kind.__name__: make for kind, make in FIRST.items()},
    "NUTS": partial(NUTS, max_tree_depth=3),
    "OrbitMoves": orbit,
    "collapse": collapsed,
    "ParallelTempering": lambda model: infer.ParallelTempering(infer.GHMC(model, num_steps=2, steps_per_draw=2), 2),
    "UnitMoves": lambda model: infer.UnitMoves(infer.GHMC(model, steps_per_draw=2), {"net/Dense_1.bias": 0}),
}
FULL = {"NUTS", "OrbitMoves", "collapse", "ParallelTempering", "UnitMoves"}
FAST = {"SGLD", "NUTS", "OrbitMoves"}


def assert_last_layer_only(idata):
    """The draws are of the last layer, and predict with the fixed body."""
    assert set(_arviz.group(idata, "posterior").data_vars) == {name.replace("/", ".") for name in LAST}
    assert set(_arviz.group(idata, "observed_data").data_vars) == {"y"}
    draws = {name: _arviz.group(idata, "posterior")[name.replace("/", ".")].to_numpy() for name in LAST}
    for group, x in (("predictions", X_TEST), ("posterior_predictive", X)):
        found = _arviz.group(idata, group)["y_mean"].to_numpy()
        np.testing.assert_allclose(found, function(x, draws), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", [pytest.param(w, marks=[] if w in FAST else [pytest.mark.slow]) for w in WAYS])
def test_kernels_hold_fixed_weights(way):
    options = {} if way in FULL else {"batch_size": 8}
    mcmc = run_mcmc(WAYS[way](last_layer()), X, Y, **options)
    assert set(mcmc.get_samples()) == LAST
    assert_last_layer_only(bnn.to_inference_data(mcmc, {"x": X_TEST}))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("AutoADF", "AutoMeanField") else [pytest.mark.slow])
        for name in GUIDES
        if "scales" not in name
    ],
)
def test_guides_hold_fixed_weights(name):
    model = last_layer()
    guide = GUIDES[name].make(model)
    if name == "AutoADF":
        result = guide.run(jax.random.key(0), X, Y, num_epochs=1, progress_bar=False)
    else:
        svi = SVI(model, guide, numpyro.optim.Adam(0.01), Trace_ELBO())
        result = guides.fit(svi, jax.random.key(0), 2, X, Y, batch_size=8, progress_bar=False)
    export = partial(bnn.to_inference_data, result, {"x": X_TEST}, guide=guide, num_samples=3)
    assert_last_layer_only(export(args=(X, Y)))


@pytest.mark.slow
def test_gibbs_blocks_hold_fixed_weights():
    prior = {"Dense_0.*": priors.Fixed(PARAMS), "Dense_1.*": priors.GammaPrecision(centered=True)}
    model = last_layer(prior)
    scales = ["net/Dense_1.kernel_precision", "net/Dense_1.bias_precision"]
    blocks = [(NUTS(model, max_tree_depth=2), sorted(LAST)), (infer.PrecisionGibbs(model), scales)]
    samples = run_mcmc(Gibbs(blocks), X, Y).get_samples()
    assert set(samples) == {*LAST, *scales}


def test_predictive_and_scope():
    model = last_layer()
    draws = run_mcmc(NUTS(model, max_tree_depth=2), X, Y).get_samples()
    found = Predictive(model, draws)(jax.random.key(2), X_TEST)
    assert set(found) == {"y"}
    one = {"a/" + name: value[-1] for name, value in draws.items()}
    scoped = handlers.substitute(handlers.scope(model, prefix="a"), one)
    loc = handlers.trace(handlers.seed(scoped, 0)).get_trace(X_TEST)["a/y"]["fn"].loc
    last = {name: value[-1] for name, value in draws.items()}
    np.testing.assert_allclose(loc, function(X_TEST, last), rtol=1e-4, atol=1e-5)


def test_centered_prior_has_pretrained_means():
    prior = priors.Centered(PARAMS, 0.2, bias_scale=0.3)
    trace = handlers.trace(handlers.seed(last_layer(prior), 0)).get_trace(X)
    for name, sd in {"Dense_0.kernel": 0.2 / D**0.5, "Dense_0.bias": 0.3, "Dense_1.kernel": 0.2 / H**0.5}.items():
        base = trace[f"net/{name}"]["fn"].base_dist
        np.testing.assert_array_equal(base.loc, PARAMS[name])
        np.testing.assert_allclose(base.scale, sd, rtol=1e-6)
    gains = priors.Centered({"scale": jnp.full(3, 2.0)}, gain_scale=0.1)("scale", (3,))
    assert (float(gains.loc[0]), float(gains.scale[0])) == (2.0, pytest.approx(0.1))


# -- symmetries, moments and kernels of wide networks --------------------------------------------------------


def found_symmetries(*fixed, kind=priors.Fixed):
    prior = {**{name: kind(PARAMS) for name in fixed}, "*": priors.Normal()}
    return {s.name.partition("(")[0] for s in symmetry.find(last_layer(prior), X, Y)}


@pytest.mark.filterwarnings("ignore:symmetry.find. found none")
@pytest.mark.parametrize("kind", [priors.Fixed, pytest.param(priors.Learned, marks=pytest.mark.slow)])
def test_units_with_fixed_weights_do_not_move(kind):
    assert found_symmetries() == found_symmetries("Dense_1.bias", kind=kind) == {"SignFlip", "Permutation"}
    for fixed in ("Dense_0.kernel", "Dense_0.bias", "Dense_1.kernel"):
        assert found_symmetries(fixed, kind=kind) == set()


def test_symmetries_that_fixed_values_allow():
    """Biases of zero are equal and odd: they may stay where they are. Learned ones will not stay zero."""
    zero = {"Dense_0.bias": jnp.zeros(H)}

    def found(kind):
        return {type(s) for s in symmetry.find(last_layer({"Dense_0.bias": kind(zero), "*": priors.Normal()}), X, Y)}

    assert found(priors.Fixed) == {symmetry.Permutation, symmetry.SignFlip}
    with pytest.warns(UserWarning, match="found none"):
        assert found(priors.Learned) == set()


def test_orbit_moves_refuse_symmetries_of_fixed_weights():
    kernel = infer.OrbitMoves(NUTS(last_layer()), symmetry.from_network(NET, (D,)))
    with pytest.raises(ValueError, match=r"got 'net/Dense_0\.kernel'.*Known: net/Dense_1\.bias, net/Dense_1\.kernel"):
        kernel.init(jax.random.key(0), 1, None, (X, Y))


def test_kernels_of_wide_networks_and_fixed_weights():
    for compute in (infinite.nngp, infinite.ntk, partial(infinite.prior_fit, y=Y)):
        with pytest.raises(ValueError, match=r"weights of 'Dense_0\.kernel' that are not random\. .*features"):
            compute(NET, X, prior=BODY)
    # As the error says: the kernel of the random rest on the features, here in closed form.
    rest = infinite.nngp(nn.Dense(1), features(X_TEST))
    np.testing.assert_allclose(rest, features(X_TEST) @ features(X_TEST).T / H + 1, rtol=1e-4)
    ntk = infinite.empirical_ntk(NET, PARAMS, X_TEST, prior=BODY)
    np.testing.assert_allclose(ntk, rest, rtol=1e-4)
    around = {"Dense_0.*": priors.Fixed(PARAMS), "*": priors.Centered(PARAMS)}
    np.testing.assert_allclose(infinite.empirical_ntk(NET, PARAMS, X_TEST, prior=around), ntk, rtol=1e-6)


# -- parameters of other libraries ---------------------------------------------------------------------------


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        h = jnp.tanh(linen.Dense(H)(x))
        return linen.Dense(1)(h)


LINEN = Linen().init(jax.random.key(2), X)
NNX = nnx.Sequential(nnx.Linear(D, H, rngs=nnx.Rngs(0)), jnp.tanh, nnx.Linear(H, 1, rngs=nnx.Rngs(1)))
EQUINOX = eqx.nn.MLP(D, 1, H, 1, activation=jnp.tanh, key=jax.random.key(3))
MODULES = {
    "flax": (partial(random_flax_module, "net", Linen(), input_shape=(1, D)), LINEN, "Dense_0.*", "net/Dense_1."),
    "flax params": (
        partial(random_flax_module, "net", Linen(), input_shape=(1, D)), LINEN["params"], "Dense_0.*", "net/Dense_1.",
    ),
    "nnx": (partial(random_nnx_module, "net", NNX), NNX, "layers.0.*", "net/layers.2."),
    "nnx state": (partial(random_nnx_module, "net", NNX), nnx.state(NNX), "layers.0.*", "net/layers.2."),
    "equinox": (
        lambda prior: jax.vmap(random_eqx_module("net", EQUINOX, prior)), EQUINOX, "layers[[]0]*", "net/layers[1]."
    ),
}  # fmt: skip


def module_model(make, prior):
    def model(x, y=None):
        f = make(prior=prior)(x)[..., 0]
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Normal(f, SIGMA), obs=y)

    return model


def body_of(library, x):
    if library.startswith("flax"):
        return np.tanh(x @ LINEN["params"]["Dense_0"]["kernel"] + LINEN["params"]["Dense_0"]["bias"])
    if library.startswith("nnx"):
        return np.tanh(NNX.layers[0](x))
    return np.tanh(x @ EQUINOX.layers[0].weight.T + EQUINOX.layers[0].bias)


@pytest.mark.parametrize(
    "library", [pytest.param(name, marks=[pytest.mark.slow] if " " in name else []) for name in MODULES]
)
def test_modules_of_other_libraries(library):
    make, params, pattern, last = MODULES[library]
    model = module_model(make, priors.BySite({pattern: priors.Fixed(params)}, default=priors.Normal()))
    mcmc = run_mcmc(NUTS(priors.noncenter(model), max_tree_depth=2), X, Y)
    draws = {name.removeprefix(last): np.asarray(value) for name, value in mcmc.get_samples().items()}
    kernel = draws["kernel"][..., 0] if "kernel" in draws else draws["weight"][:, 0]
    assert len(draws) == 2
    idata = bnn.to_inference_data(mcmc, {"x": X_TEST})
    expected = kernel @ body_of(library, X_TEST).T + draws["bias"]
    found = _arviz.group(idata, "predictions")["y_mean"][0]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernel", [NUTS, infer.MCLMC])
def test_modules_that_are_not_wrapped_are_refused(kernel):
    make, params, pattern, _ = MODULES["flax"]
    model = module_model(make, priors.BySite({pattern: priors.Fixed(params)}, default=priors.Normal()))
    with pytest.raises(ValueError, match=r"priors\.Fixed.*Wrap the model once, `NUTS\(priors\.noncenter\(model\)\)`"):
        run_mcmc(kernel(model), X, Y)


@pytest.mark.slow
def test_learned_weights_of_a_flax_module():
    make, params, pattern, last = MODULES["flax"]
    model = priors.noncenter(module_model(make, priors.BySite({pattern: priors.Learned(params)}, priors.Normal())))
    svi = SVI(model, AutoNormal(model), numpyro.optim.Adam(0.05), Trace_ELBO())
    found = guides.fit(svi, jax.random.key(0), 20, X, Y, progress_bar=False).params
    assert np.abs(found["net/Dense_0.kernel"] - LINEN["params"]["Dense_0"]["kernel"]).min() > 0.01
    kernel = infer.MCLMC(model, steps_per_draw=3)
    assert all(name.startswith(last) for name in run_mcmc(kernel, X, Y, warmup=8).get_samples())
    assert set(kernel.learn(8, (X, Y), None)) == {"net/Dense_0.kernel", "net/Dense_0.bias"}


# -- learned weights -----------------------------------------------------------------------------------------

LEARNED = {"Dense_0.*": priors.Learned(PARAMS), "*": priors.Normal()}


def learned_of(kernel):
    """Values of the learned parameters of a kernel that has run, without the prefix of the network."""
    traced = handlers.trace(handlers.seed(kernel.model, 0)).get_trace(X, Y)
    return {name.removeprefix("net/"): s["value"] for name, s in traced.items() if s["type"] == "param"}


@pytest.mark.slow
def test_svi_learns_and_mcmc_holds():
    model = last_layer(LEARNED)
    svi = SVI(model, guides.AutoMeanField(model), numpyro.optim.Adam(0.05), Trace_ELBO())
    result = guides.fit(svi, jax.random.key(0), 100, X, Y, progress_bar=False)
    params = {name: result.params[f"net/{name}"] for name in ("Dense_0.kernel", "Dense_0.bias")}
    assert result.losses[-10:].mean() < result.losses[:10].mean()
    assert all(np.abs(params[name] - PARAMS[name]).min() > 0.01 for name in params)
    held = handlers.substitute(model, result.params)
    for kernel in (NUTS(held, max_tree_depth=2), infer.MCLMC(held, steps_per_draw=3)):
        mcmc = run_mcmc(kernel, X, Y, warmup=8)
        draws = {name: np.asarray(value) for name, value in mcmc.get_samples().items()}
        assert set(draws) == LAST
        idata = bnn.to_inference_data(mcmc, {"x": X_TEST})
        expected = function(X_TEST, draws, params)
        np.testing.assert_allclose(_arviz.group(idata, "predictions")["y_mean"][0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.optimized
def test_a_kernel_learns_the_joint_mode():
    """Weights without a prior, a bias with one, both linear: the mode is the solution of a least-squares problem."""
    prior = {"Dense_0.*": priors.Fixed(PARAMS), "Dense_1.kernel": priors.Learned(PARAMS), "*": priors.Normal()}
    kernel = infer.GHMC(last_layer(prior), steps_per_draw=4, warm_start=infer.WarmStart(0.5, num_steps=4000))
    mcmc = run_mcmc(kernel, X, Y, warmup=200, draws=1000)
    found = learned_of(kernel)["Dense_1.kernel"][:, 0]
    mode, _ = closed_form(DESIGN, Y, [1e12] * H + [1.0])
    np.testing.assert_allclose(found, mode[:H], atol=2e-3)
    # Given them, the bias has a normal posterior.
    mean, variance = closed_form(np.ones((N, 1)), Y - features(X) @ found, [1.0])
    bias = np.asarray(mcmc.get_samples()["net/Dense_1.bias"], float)
    error = 5 * np.sqrt(variance[0, 0] / effective_sample_size(bias[None]))
    assert np.all(np.abs(bias.mean(0) - mean) < error)


@pytest.mark.parametrize(
    "way", ["SGLD", *(pytest.param(name, marks=pytest.mark.slow) for name in ("MCLMC", "OrbitMoves", "collapse"))]
)
def test_every_chain_samples_one_learned_model(way):
    """Predictions belong to the learned values, also where the model runs again inside."""
    model = last_layer(LEARNED)
    if way == "OrbitMoves":
        flip = [symmetry.SignFlip(["net/Dense_1.bias"])]
        kernel = infer.OrbitMoves(infer.SGLD(model, steps_per_draw=3), flip, exact=False)
    elif way == "collapse":
        kernel = collapsed(model)
    else:
        kernel = FIRST[getattr(infer, way)](model)
    method = "parallel" if way == "SGLD" else "sequential"
    mcmc = run_mcmc(kernel, X, Y, warmup=20, options={"num_chains": 2, "chain_method": method})
    params = learned_of(kernel)
    assert all(np.abs(params[name] - PARAMS[name]).max() > 1e-3 for name in ("Dense_0.kernel", "Dense_0.bias"))
    idata = bnn.to_inference_data(mcmc, {"x": X_TEST})
    draws = {name: _arviz.group(idata, "posterior")[name.replace("/", ".")].to_numpy() for name in LAST}
    assert set(mcmc.get_samples()) == LAST
    found = _arviz.group(idata, "predictions")["y_mean"].to_numpy()
    np.testing.assert_allclose(found, function(X_TEST, draws, params), rtol=1e-4, atol=1e-5)
    again = copy.deepcopy(kernel)
    run_mcmc(again, X[::-1], Y[::-1] + 1, warmup=20)
    assert any(np.any(learned_of(again)[name] != params[name]) for name in params)


def test_collapsed_sites_have_the_posterior_given_the_learned_values():
    """The factor of the integrated sites is computed with the values that the kernel holds, not with the start."""
    model = last_layer({"Dense_0.bias": priors.Normal(), **LEARNED})
    values = {"net/Dense_0.kernel": PARAMS["Dense_0.kernel"] + 0.5}
    hidden = infer.collapse(model, sorted(LAST), X, Y)
    held = handlers.substitute(hidden, values)
    bias = {"net/Dense_0.bias": PARAMS["Dense_0.bias"]}
    trace = handlers.trace(handlers.seed(handlers.substitute(held, bias), 0)).get_trace(X, Y)
    (factor,) = (s["fn"].log_factor for s in trace.values() if s["type"] == "sample" and s["is_observed"])
    h = features(X, {**PARAMS, "Dense_0.kernel": values["net/Dense_0.kernel"]})
    covariance = h @ h.T / H + 1 + SIGMA**2 * np.eye(N)
    expected = dist.MultivariateNormal(jnp.zeros(N), jnp.asarray(covariance)).log_prob(Y)
    np.testing.assert_allclose(factor, expected, rtol=1e-4)


@pytest.mark.slow
def test_learned_values_of_a_quotient():
    """Deterministic sites are computed by a second run inside a quotient: it too has the values that are held."""
    net = nn.Sequential([nn.Dense(H), nn.BatchNorm(False, False), "tanh", nn.Dense(1)])
    params = {name: 0.5 * value for name, value in net.init(jax.random.key(5), (D,)).items()}

    def model(x, y):
        prior = {"Dense_1.*": priors.Learned(params), "*": priors.Normal()}
        f = numpyro.deterministic("f", bnn.random_network("net", net, (D,), prior)(x)[..., 0])
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Normal(f, SIGMA), obs=y)

    free = symmetry.quotient(model, symmetry.find(model, X, Y), X, Y)
    learned = {name: params[name] + 1.0 for name in ("Dense_1.kernel", "Dense_1.bias")}
    held = handlers.substitute(free, {f"net/{name}": value for name, value in learned.items()})
    trace = handlers.trace(handlers.seed(held, 0)).get_trace(X, Y)
    draw = {name: trace[f"net/{name}"]["value"] for name in ("Dense_0.kernel", "Dense_0.bias")}
    np.testing.assert_allclose(trace["f"]["value"], net.apply({**draw, **learned}, X)[:, 0], rtol=1e-4, atol=1e-5)


def test_nothing_is_left_to_sample():
    with pytest.raises(ValueError, match=r"collapse.*all sites that are sampled.*Leave at least one"):
        infer.collapse(last_layer(), sorted(LAST), X, Y)


def test_without_warm_start_learned_weights_stay_at_their_start():
    for kernel in (infer.MCLMC(last_layer(LEARNED), steps_per_draw=3, warm_start=0.0), NUTS(last_layer(LEARNED))):
        run_mcmc(kernel, X, Y, warmup=8)
        for name, value in learned_of(kernel).items():
            np.testing.assert_array_equal(value, PARAMS[name])


@pytest.mark.parametrize(
    "make",
    [
        lambda m: infer.ParallelTempering(infer.GHMC(m, num_steps=2, steps_per_draw=2), 2),
        lambda m: Gibbs([(infer.GHMC(m), ["net/Dense_1.kernel"]), (infer.GHMC(m), ["net/Dense_1.bias"])]),
    ],
    ids=["tempering", "Gibbs"],
)
def test_parts_of_a_kernel_cannot_learn(make):
    with pytest.raises(ValueError, match=r"learned parameter 'net/Dense_0\.kernel' inside another kernel.*SVI"):
        run_mcmc(make(last_layer(LEARNED)), X, Y, warmup=20)


def random_start(x, y=None):
    w = numpyro.param("w", lambda key: jax.random.normal(key, (D,)))
    b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w + b[0], SIGMA), obs=y)


@pytest.mark.parametrize(
    "make",
    [infer.SGLD, lambda m: infer.OrbitMoves(NUTS(m), [symmetry.SignFlip(["b"])], exact=False)],
    ids=["SGLD", "wrapper"],
)
def test_parameters_at_random_values_are_refused(make):
    with pytest.raises(ValueError, match=r"parameter 'w', which starts at random values.*priors\.Learned"):
        run_mcmc(make(random_start), X, Y)
    run_mcmc(make(handlers.substitute(random_start, {"w": jnp.ones(D)})), X, Y)


def test_adf_refuses_learned_weights():
    with pytest.raises(ValueError, match=r"'net/Dense_0\.kernel', a `param` site"):
        guides.AutoADF(last_layer(LEARNED)).run(jax.random.key(0), X, Y, num_epochs=1, progress_bar=False)


# -- names, shapes, copies -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [priors.Fixed, priors.Centered, priors.Learned])
def test_names_and_shapes_are_checked(kind):
    call = f"priors.{kind.__name__}"
    misspelled = {"Dense_0.kernels": PARAMS["Dense_0.kernel"], "Dense_0.bias": PARAMS["Dense_0.bias"]}
    with pytest.raises(ValueError, match=rf"{call}.*'Dense_0\.kernel'\. Did you mean 'Dense_0\.kernels'\?"):
        handlers.seed(last_layer({"Dense_0.*": kind(misspelled), "*": priors.Normal()}), 0)(X, Y)
    wide = nn.MLP([H + 1, 1]).init(jax.random.key(0), (D,))
    with pytest.raises(ValueError, match=rf"{call}.*shape \(2, 5\) for 'Dense_0\.kernel'.*has shape \(2, 4\)"):
        handlers.seed(last_layer({"Dense_0.*": kind(wide), "*": priors.Normal()}), 0)(X, Y)
    with pytest.raises(ValueError, match=r"'Dense_7\.\*'"):
        handlers.seed(last_layer({"Dense_7.*": kind(PARAMS), "*": priors.Normal()}), 0)(X, Y)
    with pytest.raises(ValueError, match=r"no pattern for parameter 'Dense_1\.kernel'"):
        handlers.seed(last_layer({"Dense_0.*": kind(PARAMS)}), 0)(X, Y)


@pytest.mark.parametrize("kind", [priors.Fixed, priors.Centered, priors.Learned])
def test_objects_can_be_copied_and_pickled(kind):
    prior = kind(PARAMS)
    for other in (copy.deepcopy(prior), pickle.loads(pickle.dumps(prior))):
        with handlers.seed(rng_seed=0):
            one, two = (p("Dense_0.kernel", (D, H)).mean for p in (prior, other))
        np.testing.assert_array_equal(one, two)


def test_values_have_the_precision_of_the_run(x64):
    prior = priors.Fixed({"kernel": np.ones((D, 1), np.float32)})
    assert prior("kernel", (D, 1)).v.dtype == jnp.float64
