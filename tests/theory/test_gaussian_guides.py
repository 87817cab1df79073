"""Gaussian guides: families and targets, sites that follow their scales, starts, closed forms, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from helpers import refused
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO, init_to_value
from numpyro.infer.autoguide import AutoNormal
from scipy.linalg import block_diag

from numpyro_bnn import guides, nn, priors, random_network


def fit(model, guide, *args):
    """Parameters after Adam with a rate that falls to zero."""
    optimizer = optax.adam(optax.cosine_decay_schedule(0.05, 3000))
    svi = SVI(model, guide, optimizer, Trace_ELBO(num_particles=20))
    return guides.fit(svi, jax.random.key(0), 3000, *args, progress_bar=False).params


def divergence(guide, params, *args):
    """KL(q || p) of a model without data, minus its ELBO, and the standard error."""
    found = guides.evidence(guide, params, *args, rng_key=jax.random.key(99), num_samples=4000)
    return -found.elbo, found.elbo_se


def first_params(guide, *args):
    """Parameters before any step."""
    trace = handlers.trace(handlers.seed(guide, 0)).get_trace(*args)
    return {name: site["value"] for name, site in trace.items() if site["type"] == "param"}


# -- targets that a family contains ------------------------------------------------------------------------


def gaussian_over(shapes, covariance):
    """Sites whose joint distribution is a Gaussian with this covariance."""
    root = np.linalg.cholesky(covariance)

    def model():
        flat = [numpyro.sample(n, dist.Normal().expand(s).to_event(len(s)).mask(False)) for n, s in shapes.items()]
        z = jnp.concatenate([jnp.ravel(value) for value in flat])
        numpyro.factor("target", dist.MultivariateNormal(jnp.arange(len(z)) / 4, scale_tril=root).log_prob(z))

    return model


def covariance_of(seed, size):
    factor = np.tril(np.random.default_rng(seed).normal(size=(size, size))) / 2 + np.eye(size)
    return factor @ factor.T


FACTOR = np.random.default_rng(2).normal(size=(5, 1))
TARGETS = {
    "full rank": (
        lambda model: guides.AutoStructured(model, blocks=["*"]),
        {"a": (2,), "b": ()},
        covariance_of(0, 3),
    ),
    "per layer": (
        guides.AutoStructured,
        {"net/Dense_0.kernel": (2, 2), "net/Dense_0.bias": (2,), "net/Dense_1.kernel": (2, 1)},
        block_diag(covariance_of(3, 6), covariance_of(4, 2)),
    ),
    "low rank": (
        lambda model: guides.AutoBlocks(model, {"*": guides.LowRank(1)}),
        {"a": (2, 2), "b": (1,)},
        np.diag([1.0, 0.3, 0.5, 2.0, 1.0]) + FACTOR @ FACTOR.T,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_a_family_reaches_a_target_it_contains(name):
    make, shapes, covariance = TARGETS[name]
    model = gaussian_over(shapes, covariance)
    guide = make(model)
    params = fit(model, guide)
    kl, error = divergence(guide, params)
    assert kl + 3 * error < 0.01
    # Where q = p, log q - log p is one number: the density is right everywhere, not on the average only.
    assert error * 4000**0.5 < 0.2


# -- guides that follow their scales -----------------------------------------------------------------------


def funnel():
    """Neal's funnel with three levels: all of it is Gaussian given the scale, and the scale is log-normal."""
    tau = numpyro.sample("tau", dist.LogNormal(0.0, 1.0))
    mu = numpyro.sample("mu", dist.Normal(1.0, tau))
    numpyro.sample("w", dist.Normal(mu, 2 * tau).expand([4]).to_event(1))


@pytest.mark.slow
@pytest.mark.parametrize("family", [None, guides.FullRank()], ids=["mean field", "full rank"])
def test_conditioning_on_scales_makes_the_funnel_exact(family):
    blocks = {"*": family} if family else {}
    plain, given = (guides.AutoBlocks(funnel, blocks, condition_on_scales=c) for c in (False, True))
    kl, error = divergence(given, fit(funnel, given))
    assert kl + 3 * error < 0.01
    kl, error = divergence(plain, fit(funnel, plain))
    assert kl - 3 * error > 0.5


@pytest.mark.slow
def test_local_sites_follow_their_scale_in_minibatches():
    """Sites in a subsampled plate: parameters of full size, and the exact posterior, so that the loss is unbiased."""

    def model(batch_size):
        tau = numpyro.sample("tau", dist.LogNormal(0.0, 0.5))
        with numpyro.plate("data", 6, subsample_size=batch_size):
            z = numpyro.sample("z", dist.Normal(0.0, tau))
            numpyro.deterministic("double", 2 * z)

    guide = guides.AutoMeanField(model, condition_on_scales=True)
    params = fit(model, guide, 2)
    assert params["z_auto_loc"].shape == (6,)
    whole = guides.AutoMeanField(model, condition_on_scales=True)
    kl, error = divergence(whole, params, 6)
    assert kl + 3 * error < 0.02
    draws = guide.sample_posterior(jax.random.key(0), params, sample_shape=(5,))
    assert draws["double"].shape == (5, 6)
    np.testing.assert_allclose(draws["double"], 2 * draws["z"], rtol=1e-6)


def test_the_evidence_of_minibatches_is_that_of_all_rows():
    """With a site per row that follows its scale: the draws, on all rows, have the same weights."""

    def model(y, batch_size=None):
        tau = numpyro.sample("tau", dist.LogNormal(0.0, 0.5))
        with numpyro.plate("data", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(numpyro.sample("z", dist.Normal(0.0, tau)), 0.5), obs=y[i])

    weights, y = [], jnp.linspace(-1.0, 1.0, 6)
    for batch_size in (2, None):
        guide = guides.AutoMeanField(model, condition_on_scales=True)
        svi = SVI(model, guide, optax.adam(0.01), Trace_ELBO())
        params = svi.get_params(svi.init(jax.random.key(0), y, batch_size=batch_size))
        params |= {"z_auto_loc": y, "z_auto_scale": 0.5 + 0.1 * y}
        options = {"rng_key": jax.random.key(1), "num_samples": 3, "batch_size": batch_size}
        weights.append(guides.evidence(guide, params, y, **options).log_weights)
    np.testing.assert_allclose(*weights, rtol=1e-5)


def scaled_about_a_mean():
    """Weights whose prior mean and scale are both unknown."""
    mean = numpyro.sample("mean", dist.Normal(0.3, 1.0))
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    numpyro.sample("w", dist.Normal(mean, scale).expand([3]).to_event(1))


# Blocks, prefix of the parameters of `w`, and what its standard deviations are.
CONDITIONED = {"mean field": ({}, "w_auto", "scale"), "block": ({"w": guides.FullRank()}, "auto_w", "scale_tril")}


@pytest.mark.parametrize("form", CONDITIONED)
def test_conditioned_weights_follow_their_scale_and_mean(form):
    """w = mean + scale u with u ~ N(loc, sd^2) has the density log N((w - mean) / scale; loc, sd^2) - 3 log scale.
    With u nearly constant, w = mean + scale loc in every draw. A start w = 1, 2, 3 with mean 0.5 and scale 2 is
    u = (w - 0.5) / 2; the sd of w, 0.1, is 0.05 of u."""
    blocks, prefix, of_scale = CONDITIONED[form]
    start = init_to_value(values={"w": jnp.array([1.0, 2.0, 3.0]), "mean": jnp.array(0.5), "scale": jnp.array(2.0)})
    guide = guides.AutoBlocks(scaled_about_a_mean, blocks, condition_on_scales=True, init_loc_fn=start)
    params = first_params(guide)
    np.testing.assert_allclose(params[f"{prefix}_loc"], [0.25, 0.75, 1.25], rtol=1e-5)
    first = params[f"{prefix}_{of_scale}"]
    np.testing.assert_allclose(np.diagonal(first) if first.ndim == 2 else first, 0.05, rtol=1e-5)

    def at(sd):
        chosen = jnp.diag(sd) if first.ndim == 2 else sd
        return params | {f"{prefix}_loc": loc, f"{prefix}_{of_scale}": chosen}

    loc, sd = jnp.array([0.4, -1.0, 2.0]), jnp.array([0.5, 0.2, 1.5])
    trace = handlers.trace(handlers.seed(handlers.substitute(guide, at(sd)), 3)).get_trace()
    mean, scale = (trace.pop(name)["value"] for name in ("mean", "scale"))
    u = (trace["w"]["value"] - mean) / scale
    found = sum(site["fn"].log_prob(site["value"]) for site in trace.values() if site["type"] == "sample")
    expected = dist.Normal(loc, sd).log_prob(u).sum() - 3 * jnp.log(scale)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    draws = guide.sample_posterior(jax.random.key(1), at(jnp.full(3, 1e-6)), sample_shape=(20,))
    assert np.std(draws["mean"]) > 0.01
    expected = draws["mean"][:, None] + draws["scale"][:, None] * loc
    np.testing.assert_allclose(draws["w"], expected, rtol=1e-4, atol=1e-4)


# -- starts ----------------------------------------------------------------------------------------------


def test_wide_layers_start_with_unit_preactivations():
    """With n = 400 inputs of variance 1: sum w_i^2 is 1, where NumPyro's own start gives n 4 / 3."""
    x = jax.random.normal(jax.random.key(0), (100, 400))

    def wide(x):
        w = [numpyro.sample(f"w{i}", dist.Normal(0.0, 1.0).expand([400, 400])) for i in range(2)]
        numpyro.deterministic("shift", numpyro.sample("b", dist.Normal(0.5, 1.0).expand([400])))
        first = numpyro.deterministic("first", x @ w[0])
        numpyro.deterministic("second", jnp.tanh(first) @ w[1])

    guide = guides.AutoMeanField(wide)
    found = guide.median(first_params(guide, x))
    # The mean of 40,000 squares with correlated inputs and weights: relative sd about (2/400)^1/2 / 400^1/2 twice.
    assert np.var(found["first"]) == pytest.approx(1.0, rel=0.05)
    tanh = float(np.mean(np.tanh(np.random.default_rng(0).normal(size=10**6)) ** 2))
    assert np.var(found["second"]) == pytest.approx(tanh, rel=0.05)
    np.testing.assert_allclose(found["shift"], 0.5)


@pytest.mark.parametrize("centered", [True, False])
def test_hierarchical_kernels_start_at_fan_in_scale(centered):
    """The kernel itself, also when the model samples it as scale times unit normal: sd 0.1, uncertain by 0.01."""

    def model():
        prior = priors.Hierarchical(dist.LogNormal(3.0, 0.1), centered=centered, fan_in_scaling=False)
        random_network("net", nn.Dense(50), (100,), prior)

    guide = guides.AutoMeanField(model, init_scale={"*_scale": 1e-4} if not centered else 0.1)
    params = first_params(guide)
    assert np.std(guide.median(params)["net/kernel"]) == pytest.approx(0.1, rel=0.05)  # 5 sd of 5000
    draws = guide.sample_posterior(jax.random.key(1), params, sample_shape=(200,))["net/kernel"]
    assert np.mean(np.std(draws, axis=0)) == pytest.approx(0.01, rel=0.15 if not centered else 0.01)


def test_spread_of_a_base_is_that_of_its_weight():
    """A weight 3 z of 100 inputs, z of sd 2: z is uncertain by a tenth of 0.1 / 3, which gives the weight the sd 0.1
    of its fan-in; never by more than a tenth of 1."""
    z = 2.0 * jax.random.normal(jax.random.key(0), (100, 50))

    def model():
        for name, factor in (("large", 3.0), ("small", 0.01)):
            base = numpyro.sample(f"{name}_base", dist.Normal(0.0, 1.0).expand(z.shape).to_event(2))
            numpyro.deterministic(name, factor * base)

    guide = guides.AutoMeanField(model, init_loc_fn=init_to_value(values={"large_base": z, "small_base": z}))
    params = first_params(guide)
    np.testing.assert_allclose(params["large_base_auto_scale"], 0.1 * 0.1 / 3, rtol=1e-5)
    np.testing.assert_allclose(params["small_base_auto_scale"], 0.1, rtol=1e-5)


def test_first_scales_by_site():
    def model():
        numpyro.sample("w", dist.Normal(0.0, 1.0).expand([4, 2]).to_event(2))
        numpyro.sample("v", dist.Normal(0.0, 0.01).expand([4, 2]).to_event(2))
        numpyro.sample("s", dist.HalfNormal(1.0))

    def scales(init_scale, **options):
        params = first_params(guides.AutoMeanField(model, init_scale=init_scale, **options))
        return {name: params[f"{name}_auto_scale"] for name in ("w", "v", "s")}, params

    for name, value in {"w": 0.2 * 0.5, "v": 0.2 * 0.01, "s": 0.2}.items():
        np.testing.assert_allclose(scales(0.2)[0][name], value, rtol=1e-5)
    chosen = jnp.linspace(0.1, 0.8, 8).reshape(4, 2)
    start = init_to_value(values={"s": 2.0, "w": chosen, "v": chosen})
    found, params = scales({"w": chosen, "[s]": 0.3}, init_loc_fn=start)
    np.testing.assert_allclose(found["w"], chosen, rtol=1e-5)
    np.testing.assert_allclose(found["s"], 0.3, rtol=1e-5)
    np.testing.assert_allclose(found["v"], 0.1 * 0.01, rtol=1e-5)
    np.testing.assert_allclose(params["s_auto_loc"], np.log(2.0), rtol=1e-5)
    np.testing.assert_allclose(params["w_auto_loc"], chosen, rtol=1e-5)


# -- closed forms ----------------------------------------------------------------------------------------


def test_quantiles_of_a_block_are_those_of_its_marginals():
    def model():
        numpyro.sample("z", dist.Normal(0.0, 1.0).expand([2]).to_event(1))

    guide = guides.AutoBlocks(model, {"z": guides.FullRank()})
    params = first_params(guide) | {"auto_z_scale_tril": jnp.array([[0.5, 0.0], [1.2, 0.9]])}
    sd = np.array([0.5, np.hypot(1.2, 0.9)])
    found = guide.quantiles(params, [0.1, 0.8])["z"]
    expected = params["auto_z_loc"] + dist.Normal(0.0, 1.0).icdf(jnp.array([[0.1], [0.8]])) * sd
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_low_rank_covariance_is_the_published_form():
    """diag(s) (I + F F') diag(s)."""
    scale, factor = jnp.array([0.5, 2.0, 1.5]), jnp.array([[1.0, 0.2], [-0.3, 0.4], [0.0, 2.0]])
    block = guides.Block("b", {"a": (3,)}, jnp.zeros(3), jnp.ones(3))
    given = {"b_scale": scale, "b_cov_factor": factor}
    fn = handlers.seed(handlers.substitute(guides.LowRank(2).distribution, given), 0)(block)
    expected = jnp.diag(scale) @ (jnp.eye(3) + factor @ factor.T) @ jnp.diag(scale)
    np.testing.assert_allclose(fn.covariance_matrix, expected, rtol=1e-5)


@pytest.mark.core
def test_mean_field_is_numpyros_auto_normal_with_another_start():
    """The same parameters by the same names, densities and draws, in plates with local sites too; a divergence from
    normal priors that TraceMeanField_ELBO has in closed form."""

    def model(y, batch_size=None):
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with numpyro.plate("data", len(y), subsample_size=batch_size) as i:
            z = numpyro.sample("z", dist.LogNormal(mu[0], 1.0))
            numpyro.sample("y", dist.Normal(z, 1.0), obs=y[i])

    y = jnp.ones(6)
    ours, theirs = guides.AutoMeanField(model), AutoNormal(model)
    params = first_params(ours, y, 2)
    assert {n: v.shape for n, v in params.items()} == {n: v.shape for n, v in first_params(theirs, y, 2).items()}
    assert params["z_auto_loc"].shape == (6,)
    traces = [
        handlers.trace(handlers.seed(handlers.substitute(guide, params), 1)).get_trace(y, 2)
        for guide in (ours, theirs)
    ]
    assert list(traces[0]) == list(traces[1])
    for name, site in traces[1].items():
        np.testing.assert_allclose(traces[0][name]["value"], site["value"], rtol=1e-6)
        if site["type"] == "sample":
            expected = site["fn"].log_prob(site["value"])
            np.testing.assert_allclose(traces[0][name]["fn"].log_prob(site["value"]), expected, rtol=1e-6)
            assert traces[0][name]["scale"] == site["scale"]

    def prior():
        numpyro.sample("w", dist.Normal(1.0, 2.0).expand([3, 2]).to_event(2))

    guide = guides.AutoMeanField(prior)
    params = first_params(guide)
    q = dist.Normal(params["w_auto_loc"], params["w_auto_scale"])
    found = TraceMeanField_ELBO().loss(jax.random.key(0), params, prior, guide)
    np.testing.assert_allclose(found, dist.kl_divergence(q, dist.Normal(1.0, 2.0)).sum(), rtol=1e-5)


def test_quantiles_behind_falling_and_mixing_transforms():
    """Sites below a bound, and points of a simplex: quantiles agree with draws."""

    def model():
        numpyro.sample("below", dist.TruncatedNormal(0.0, 1.0, high=2.0))
        numpyro.sample("shares", dist.Dirichlet(jnp.array([1.0, 2.0, 3.0])))

    guide = guides.AutoMeanField(model, init_scale={"*": 1.0})
    params, q = first_params(guide), np.array([0.1, 0.5, 0.7, 0.9])
    found = guide.quantiles(params, q)
    draws = guide.sample_posterior(jax.random.key(5), params, sample_shape=(4000,))
    assert found["below"].shape == (4,)
    assert found["shares"].shape == (4, 3)
    for name, value in draws.items():
        share = np.mean(value[:, None] < found[name], axis=0).reshape(4, -1)
        bound = 5 * (q * (1 - q) * (1 / 4000 + 1 / 4096)) ** 0.5  # 16 shares, at 6e-7
        assert np.all(np.abs(share - q[:, None]) < bound[:, None])
    assert float(guide.median(params)["shares"].sum()) == pytest.approx(1.0, abs=1e-6)


# -- refusals --------------------------------------------------------------------------------------------


def several():
    numpyro.sample("a", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    with numpyro.plate("data", 4, subsample_size=2):
        z = numpyro.sample("z", dist.Normal(0.0, s))
        numpyro.sample("y", dist.Normal(z, 1.0), obs=jnp.ones(jnp.shape(z)))


def imputed():
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(a, 1.0), obs=jnp.ones(2), obs_mask=jnp.array([True, False]))


def huge():
    numpyro.sample("w", dist.Normal(0.0, 1.0).expand([12000, 1]).to_event(2))


FULL, Blocks, MeanField = guides.FullRank(), guides.AutoBlocks, guides.AutoMeanField
# What is wrong: argument, part of the message, guide.
ERRORS = {
    "pattern": ("blocks", "'b*'. Known: a, s, z", lambda: Blocks(several, {"b*": FULL})),
    "overlap": ("blocks", "site 'a' in", lambda: Blocks(several, [("a", FULL), (("s", "a"), FULL)])),
    "local site": ("blocks", "'z' inside the subsampled plate 'data'", lambda: Blocks(several, {"*": FULL})),
    "family": ("blocks", "dictionary from patterns to families", lambda: Blocks(several, {"a": "full"})),
    "size": ("block", "LowRank", lambda: guides.AutoStructured(huge)),
    "no site": ("init_scale", "Known: a, s, z", lambda: MeanField(several, init_scale={"sigma": 0.1})),
    "array": ("init_scale", "unconstrained shape (2,)", lambda: MeanField(several, init_scale={"a": np.ones(3)})),
    "imputed": ("model", "'y_unobserved' of `obs_mask`", lambda: MeanField(imputed)),
}


@pytest.mark.parametrize("name", ERRORS)
def test_guides_refuse_what_does_not_fit_the_model(name):
    argument, fragment, make = ERRORS[name]
    with refused(argument, fragment):
        handlers.seed(make(), 0)()
    with refused("params", "it reads the model"):
        MeanField(several).median({})  # before it has read one
