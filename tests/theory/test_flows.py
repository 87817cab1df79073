"""Flows: transforms against autodiff, starts, halves, fits of known targets, NeuTra, flows of flowjax."""

import sys
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from helpers import refused
from jax import random
from numpyro import handlers
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO
from numpyro.infer.reparam import NeuTraReparam
from numpyro.infer.util import log_density
from zoo import ZOO

from numpyro_bnn import guides

DIM = 5
SPREAD = ZOO["spread"]  # w (2,) and sigma > 0


def block_of(dim):
    return guides.Block("b", {"a": (dim,)}, jnp.linspace(-1.0, 2.0, dim), jnp.linspace(0.1, 1.5, dim))


def traced(family, dim=DIM):
    """Initial parameters of a family, and its distribution as a function of them."""
    with handlers.seed(rng_seed=3), handlers.trace() as trace:
        family.distribution(block_of(dim))
    params = {name: site["value"] for name, site in trace.items() if site["type"] == "param"}

    def distribution(params):
        with handlers.block(), handlers.substitute(data=params):
            return family.distribution(block_of(dim))

    return params, distribution


def away_from_start(params, seed=1, scale=0.3):
    keys = random.split(random.key(seed), len(params))
    return {n: v + scale * random.uniform(k, v.shape) for k, (n, v) in zip(keys, params.items(), strict=True)}


# -- transforms ------------------------------------------------------------------------------------------

COUPLINGS = {
    "alternating": guides.Coupling(3, (6, 4), bound=1.5),
    "random halves": guides.Coupling(5, (4,), "random"),
}


@pytest.mark.parametrize(
    ("name", "dim", "precise"),
    [("alternating", 2, True), ("random halves", 5, True), ("alternating", 5, False)],
    ids=["of a pair", "random halves", "single precision"],
)
def test_a_coupling_flow_is_inverted_and_has_the_density_of_autodiff(name, dim, precise):
    """Density of draws and of other points against the Jacobian of the map from N(0, I); batches and single points,
    with intermediates and without, agree, and parameters can be vectorized."""
    with jax.enable_x64(precise):
        params, distribution = traced(COUPLINGS[name], dim)
        params = {n: jnp.asarray(v, float) for n, v in away_from_start(params).items()}
        other = away_from_start(params, seed=2)

        @jax.jit
        def measured(params, other, z):
            q = distribution(params)
            flow = dist.transforms.ComposeTransform(q.transforms)
            y = flow(z)
            there, back = (jax.vmap(jax.jacfwd(f))(at) for f, at in ((flow, z), (flow.inv, y)))
            draws, passed = q.sample_with_intermediates(random.key(4), (40,))
            stacked = jax.tree.map(lambda *parts: jnp.stack(parts), params, other)
            return {
                "points": (z, y, flow.inv(y), flow(z[3]), jnp.linalg.norm(back, axis=(-2, -1)).max()),
                "log det": (flow.log_abs_det_jacobian(z, y), *(jnp.linalg.slogdet(j)[1] for j in (there, back))),
                "densities": (dist.Normal().log_prob(z).sum(-1), q.log_prob(y)),
                "of draws": (q.log_prob(draws), q.log_prob(draws, passed)),
                "vectorized": (
                    jax.vmap(lambda p: distribution(p).log_prob(y))(stacked),
                    distribution(other).log_prob(y),
                ),
            }

        found = jax.device_get(measured(params, other, 2.0 * random.normal(random.key(7), (40, dim))))
    z, y, back, single, steepest = found["points"]
    log_det, forward, backward = found["log det"]
    assert y.dtype == log_det.dtype == (jnp.float64 if precise else jnp.float32)
    assert np.ptp(log_det) > 0.1  # nothing is tested at the identity
    # Some tens of operations on numbers of the size of y, each wrong by at most half an eps, which the slope of the
    # inverse carries back; in a density it is multiplied by up to ten standard deviations for each number.
    close = 50 * float(jnp.finfo(y.dtype).eps) * np.abs(y).max() * max(1.0, float(steepest))
    assert close < 0.02
    np.testing.assert_allclose(back, z, rtol=0, atol=close)
    np.testing.assert_allclose(single, y[3], rtol=0, atol=close)
    np.testing.assert_allclose(log_det, forward, rtol=0, atol=close)
    np.testing.assert_allclose(log_det, -backward, rtol=0, atol=10 * dim * close)
    of_base, density = found["densities"]
    np.testing.assert_allclose(density, of_base - forward, rtol=0, atol=10 * dim * close)
    np.testing.assert_allclose(*found["of draws"], rtol=0, atol=10 * dim * close)
    both, of_other = found["vectorized"]
    np.testing.assert_allclose(both, np.stack([density, of_other]), rtol=0, atol=10 * dim * close)
    assert np.abs(density - of_other).max() > 0.1


def moved(mask, num_flows, seed=0):
    """Which of the numbers of a block are not one of the numbers that enter a flow."""
    params, distribution = traced(guides.Coupling(num_flows, (4,), mask, seed=seed))
    params = away_from_start(params) | {"b_loc": jnp.zeros(DIM), "b_scale": jnp.ones(DIM)}
    z = random.normal(random.key(7), (DIM,))
    y = dist.transforms.ComposeTransform(distribution(params).transforms)(z)
    return tuple(np.flatnonzero(np.abs(y[:, None] - z).min(1) > 1e-4).tolist())


def test_layers_change_the_halves_in_turn():
    """Of five numbers one layer changes the last three, or a random half that the seed fixes; two change all."""
    assert moved("alternating", 1) == (2, 3, 4)
    assert moved("alternating", 2) == moved("random", 2) == (0, 1, 2, 3, 4)
    halves = [moved("random", 1, seed) for seed in (0, 1, 2, 3, 0)]
    assert {len(half) for half in halves} == {3}
    assert len(set(halves)) > 2
    assert halves[0] == halves[-1]


@pytest.mark.parametrize("bound", [0.5, 3.0])
def test_a_layer_scales_by_at_most_its_bound(bound):
    """Whatever its network gives: e^(b tanh(s / b)), which is near e^s for small s."""
    params, distribution = traced(guides.Coupling(1, (4,), bound=bound))
    given = jnp.array([1000.0, -1000.0, 0.01, 0.0, 0.0, 0.0])
    q = distribution(params | {"b_flow0_bias1": given, "b_loc": jnp.zeros(DIM), "b_scale": jnp.ones(DIM)})
    y = dist.transforms.ComposeTransform(q.transforms)(jnp.array([0.3, -0.7, 1.0, 1.0, 1.0]))
    np.testing.assert_allclose(y, [0.3, -0.7, np.exp(bound), np.exp(-bound), np.exp(0.01)], rtol=1e-5)


@pytest.mark.parametrize("name", COUPLINGS)
def test_a_coupling_flow_starts_as_the_mean_field(name):
    params, distribution = traced(COUPLINGS[name])
    q, block = distribution(params), block_of(DIM)
    assert q.event_shape == (DIM,)
    expected = dist.Normal(block.loc, block.scale).to_event(1)
    x = block.loc + 3.0 * block.scale * random.normal(random.key(0), (20, DIM))
    np.testing.assert_allclose(q.log_prob(x), expected.log_prob(x), rtol=1e-4, atol=1e-4)
    draws, passed = q.sample_with_intermediates(random.key(1), (20,))
    np.testing.assert_allclose(q.log_prob(draws, passed), expected.log_prob(draws), rtol=1e-4, atol=1e-4)


def test_number_of_parameters_is_linear():
    """4 layers: kernels (D / 2, 32) and (32, D) with biases; loc and scale."""
    for dim in (10, 20, 40):
        params, _ = traced(guides.Coupling(), dim)
        assert sum(map(np.size, params.values())) == 4 * (dim // 2 * 32 + 32 + 32 * dim + dim) + 2 * dim


# -- fits of known targets -------------------------------------------------------------------------------


def correlated():
    numpyro.sample("z", dist.MultivariateNormal(jnp.zeros(2), jnp.array([[1.0, 0.9], [0.9, 1.0]])))


def banana():
    x = numpyro.sample("x", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(x**2, 0.5))


@cache
def fit(model):
    """A guide and its parameters after Adam, with a rate that falls to zero."""
    guide = guides.AutoCoupling(model, num_flows=4, init_scale=1.0)
    optimizer = optax.chain(optax.clip_by_global_norm(10.0), optax.adam(optax.cosine_decay_schedule(1e-2, 1500)))
    svi = SVI(model, guide, optimizer, Trace_ELBO(32, vectorize_particles=True))
    return guide, guides.fit(svi, random.key(0), 1500, progress_bar=False).params


@pytest.mark.slow
@pytest.mark.parametrize(("model", "bound"), [(correlated, 0.01), (banana, 0.05)])
def test_divergence_from_known_targets(model, bound):
    """KL(q || p), minus the ELBO of a normalized model, with its standard error below the bound; 4 errors are a
    failure rate of 3e-5. Rounding, which differs between processors, changes a fit as much as its seed."""
    found = guides.evidence(*fit(model), rng_key=random.key(1), num_samples=20_000)
    assert found.elbo_se < 0.15 * bound
    assert -4 * found.elbo_se < -found.elbo < bound - 4 * found.elbo_se


@pytest.mark.slow
def test_nuts_behind_the_flow_has_the_moments_of_the_banana():
    """NeuTra: right moments, and shorter trajectories than without."""
    neutra, steps = NeuTraReparam(*fit(banana)), {}
    for name, model in (("plain", banana), ("behind", neutra.reparam(banana))):
        mcmc = MCMC(NUTS(model), num_warmup=300, num_samples=1500, progress_bar=False)
        mcmc.run(random.key(1), extra_fields=("num_steps",))
        steps[name] = float(mcmc.get_extra_fields()["num_steps"].mean())
    assert steps["behind"] < steps["plain"]
    draws = neutra.transform_sample(mcmc.get_samples()["auto_shared_latent"])
    # E x = 0, E x^2 = 1, E y = 1, E y^2 = 3.25; with 4.5 Monte Carlo errors the failure rate is 3e-5.
    for power, name, expected in ((1, "x", 0.0), (2, "x", 1.0), (1, "y", 1.0), (2, "y", 3.25)):
        value = np.asarray(draws[name], np.float64) ** power
        size = effective_sample_size(value[None])
        assert size > 300
        assert abs(value.mean() - expected) < 4.5 * value.std() / size**0.5


# -- guides ----------------------------------------------------------------------------------------------


def started(guide, *args):
    """Parameters of a guide at its start."""
    trace = handlers.trace(handlers.seed(guide, 0)).get_trace(*args)
    return {name: site["value"] for name, site in trace.items() if site["type"] == "param"}


def test_blocks_share_flows_and_the_rest_is_mean_field():
    def shapes(blocks):
        guide = guides.AutoCoupling(SPREAD.model, blocks, num_flows=1, hidden=(3,))
        return {name: value.shape for name, value in started(guide, *SPREAD.args).items()}

    network = {f"flow0_{part}": shape for part, shape in {"kernel0": (1, 3), "kernel1": (3, 2)}.items()}
    chosen = shapes("w")
    assert chosen == shapes(["w"])
    assert chosen.keys() >= {f"auto_w_{part}" for part in ("loc", *network)}
    assert {name: chosen[f"auto_w_{name}"] for name in network} == network
    assert chosen["sigma_auto_loc"] == chosen["sigma_auto_scale"] == ()
    assert shapes(("w", "sigma"))["auto_w|sigma_loc"] == shapes(None)["auto_loc"] == (3,)
    with refused("blocks", "needs two halves"):
        shapes("sigma")


def test_neutra_density_is_that_of_the_model():
    """What NUTS sees behind the flow is the model's density at the mapped point times |det|; the density of the guide
    is N(0, I) carried along. One block with a flow, the rest by mean field."""
    guide = guides.AutoCoupling(SPREAD.model, "w", num_flows=2, hidden=(3,))
    params = away_from_start(started(guide, *SPREAD.args))
    neutra = NeuTraReparam(guide, params)

    def sites(z):
        found = neutra.transform_sample(z)
        return {name: found[name] for name in ("w", "sigma")}

    def log_det(z):
        jacobian = jax.jacfwd(lambda z: jnp.append(sites(z)["w"], sites(z)["sigma"]))(z)
        return jnp.linalg.slogdet(jacobian)[1]

    def densities(z):
        behind = log_density(neutra.reparam(SPREAD.model), SPREAD.args, {}, {"auto_shared_latent": z})[0]
        return behind, log_density(SPREAD.model, SPREAD.args, {}, sites(z))[0] + log_det(z)

    z = random.normal(random.key(3), (guide.latent_dim,))
    np.testing.assert_allclose(*jax.jit(densities)(z), rtol=1e-5)
    np.testing.assert_allclose(neutra.transform_sample(jnp.stack([z, z]))["w"][1], sites(z)["w"], rtol=1e-5)

    drawn = handlers.seed(handlers.substitute(guide, params), 5)
    log_q, trace = log_density(drawn, SPREAD.args, {}, {})
    vector = jnp.append(trace["w"]["value"], jnp.log(trace["sigma"]["value"]))

    def carried(vector):
        back = guide.get_transform(params).inv(vector)
        return sites(back)["sigma"], guide.get_base_dist().log_prob(back) - log_det(back)

    sigma, expected = jax.jit(carried)(vector)
    np.testing.assert_allclose(sigma, trace["sigma"]["value"], rtol=1e-4)
    np.testing.assert_allclose(log_q, expected, rtol=1e-3)


def test_neutra_refuses_maps_that_depend_on_data():
    def model():
        tau = numpyro.sample("tau", dist.LogNormal(0.0, 1.0))
        numpyro.sample("w", dist.Normal(0.0, tau).expand([2]).to_event(1))

    guide = guides.AutoCoupling(model, "w", condition_on_scales=True)
    with refused("params", "Use it in `SVI` first"):
        guide.get_transform({})
    params = started(guide)
    with refused("condition_on_scales", "make the guide without it"):
        NeuTraReparam(guide, params)


# -- flowjax ---------------------------------------------------------------------------------------------


@cache
def flowjax_flow(dim=3, **options):
    from flowjax.distributions import StandardNormal
    from flowjax.flows import coupling_flow

    base = StandardNormal((dim,))
    return coupling_flow(random.key(0), base_dist=base, flow_layers=2, nn_width=4, **options)


@pytest.mark.slow
def test_a_flow_of_flowjax_serves_as_a_guide():
    """SVI, Predictive with a legacy key, posterior draws."""
    guide = guides.AutoBlocks(SPREAD.model, {"*": guides.Flowjax(flowjax_flow(invert=False))})
    svi = SVI(SPREAD.model, guide, optax.adam(0.01), Trace_ELBO())
    start, result = (guides.fit(svi, random.key(0), n, *SPREAD.args, progress_bar=False) for n in (1, 60))
    arrays = [name for name in result.params if name.startswith("auto_flow")]
    assert len(arrays) == 4  # two layers of a network, stacked over the layers of the flow
    assert all((start.params[name] != result.params[name]).any() for name in arrays)
    assert jnp.median(result.losses[-20:]) < jnp.median(result.losses[:20])  # its scales have no bound
    draws = Predictive(guide, params=result.params, num_samples=5)(random.PRNGKey(1), *SPREAD.args)
    assert len(np.unique(draws["w"], axis=0)) == 5
    posterior = guide.sample_posterior(random.key(1), result.params, sample_shape=(3, 2))
    assert posterior["w"].shape == (3, 2, 2)
    assert (posterior["sigma"] > 0).all()
    assert guide.median(result.params)["w"].shape == (2,)


@pytest.mark.parametrize("invert", [True, False])
def test_flowjax_density_is_that_of_flowjax(invert):
    flow, block = flowjax_flow(invert=invert), block_of(3)
    with handlers.seed(rng_seed=0):
        placed = guides.Flowjax(flow).distribution(block)
        bare = guides.Flowjax(flow, standardized=False).distribution(block)
    z = random.normal(random.key(1), (6, 3))
    np.testing.assert_allclose(bare.log_prob(z), flow.log_prob(z), rtol=1e-5)
    expected = flow.log_prob(z) - jnp.log(block.scale).sum()
    np.testing.assert_allclose(placed.log_prob(block.loc + block.scale * z), expected, rtol=1e-4)
    draws, passed = placed.sample_with_intermediates(random.key(2), (6,))
    np.testing.assert_allclose(placed.log_prob(draws, passed), placed.log_prob(draws), rtol=1e-4)
    np.testing.assert_array_equal(placed.sample(random.key(2), (6,)), draws)


def test_what_is_not_trainable_is_no_parameter():
    from paramax import non_trainable

    assert set(traced(guides.Flowjax(non_trainable(flowjax_flow())), 3)[0]) == {"b_loc", "b_scale"}


def test_unfit_flows_are_refused(monkeypatch):
    with refused("flow", "Pass a flowjax distribution"):
        guides.Flowjax("coupling")
    with refused("flow", "unconditional"):
        guides.Flowjax(flowjax_flow(cond_dim=2))
    with refused("flow", "have 4 numbers: build the flow with shape (4,)"):
        traced(guides.Flowjax(flowjax_flow()), 4)
    flow = flowjax_flow()
    monkeypatch.setitem(sys.modules, "flowjax.distributions", None)
    with refused("flow", "pip install flowjax", ImportError):
        guides.Flowjax(flow)
