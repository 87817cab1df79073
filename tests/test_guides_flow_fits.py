"""Guides made of flows: fits of known targets, NeuTra, chosen blocks, flowjax."""

import sys
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import lax, random
from numpyro import handlers
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO, init_to_value
from numpyro.infer.reparam import NeuTraReparam
from numpyro.infer.util import log_density, potential_energy

from numpyro_bnn import guides

# -- targets ------------------------------------------------------------------------------------------


def correlated(rho=0.9):
    numpyro.sample("z", dist.MultivariateNormal(jnp.zeros(2), jnp.array([[1.0, rho], [rho, 1.0]])))


def banana():
    """Normalized as it stands."""
    x = numpyro.sample("x", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(x**2, 0.5))


def log_moons(z):
    """Two crescents that face each other, on a ring of radius 2 (Rezende & Mohamed 2015, potential 1)."""
    ring = ((jnp.linalg.norm(z, axis=-1) - 2.0) / 0.4) ** 2
    left, right = (((z[..., 0] - m) / 0.6) ** 2 for m in (-2.0, 2.0))
    return -0.5 * ring + jnp.logaddexp(-0.5 * left, -0.5 * right)


@cache
def log_normalizer():
    """By the trapezoidal rule, which is exact to rounding for a smooth function that vanishes at the border."""
    grid = np.linspace(-6.0, 6.0, 601)
    z = jnp.asarray(np.stack(np.meshgrid(grid, grid), axis=-1))
    return float(np.log(np.exp(np.asarray(log_moons(z), np.float64)).sum() * (grid[1] - grid[0]) ** 2))


def moons():
    z = numpyro.sample("z", dist.ImproperUniform(dist.constraints.real_vector, (), (2,)))
    numpyro.factor("density", log_moons(z) - log_normalizer())


def fit(model, guide, num_steps, rate, num_particles):
    """Adam with gradients of bounded norm; the rate is constant, then falls to zero.

    The log density is multiplied by a factor that rises from 0.05 to 1 over two thirds of the steps: a guide that
    meets separated modes at full height finds only some of them.
    """
    steady = int(0.6 * num_steps)
    falling = optax.cosine_decay_schedule(rate, num_steps - steady)
    schedule = optax.join_schedules([optax.constant_schedule(rate), falling], [steady])
    optimizer = optax.chain(optax.clip_by_global_norm(10.0), optax.adam(schedule))

    def annealed(factor):
        with handlers.scale(scale=factor):
            model()

    def started_guide(factor):
        return guide()

    svi = SVI(annealed, started_guide, optimizer, Trace_ELBO(num_particles, vectorize_particles=True))
    state = svi.init(random.key(0), 1.0)
    factors = jnp.minimum(1.0, jnp.linspace(0.05, 1.5, num_steps))
    state = jax.jit(lambda s: lax.scan(lambda s, factor: svi.update(s, factor), s, factors)[0])(state)
    return svi.get_params(state)


def divergence(model, guide, params, num_draws=20_000):
    """KL(q || p) of a normalized model, and its Monte Carlo standard error."""

    def log_ratio(key):
        guide_trace = handlers.trace(handlers.seed(handlers.substitute(guide, params), key)).get_trace()
        values = {name: site["value"] for name, site in guide_trace.items() if site["type"] == "sample"}
        model_trace = handlers.trace(handlers.substitute(handlers.seed(model, key), values)).get_trace()
        log_q = sum(
            site["fn"].log_prob(site["value"], site["intermediates"])
            if site["intermediates"]
            else site["fn"].log_prob(site["value"])
            for site in guide_trace.values()
            if site["type"] == "sample"
        )
        log_p = sum(s["fn"].log_prob(s["value"]) for s in model_trace.values() if s["type"] == "sample")
        return log_q - log_p

    ratios = np.asarray(jax.jit(jax.vmap(log_ratio))(random.split(random.key(1), num_draws)), np.float64)
    return ratios.mean(), ratios.std() / num_draws**0.5


# Target: guide, options of the fit, largest divergence. A wide start covers both moons: from a narrow one every
# guide that minimizes KL(q || p) finds only one. Each fit was tried with several seeds, all below the bound:
# rounding, which differs between processors, changes a fit as much as its seed.
WIDE = {"init_scale": 2.0, "init_loc_fn": init_to_value(values={"z": jnp.array([0.0, 0.5])})}
FITS = {
    "coupling, correlated Gaussian": (correlated, guides.AutoCoupling, {"num_flows": 2}, (1000, 1e-2, 16), 0.01),
    "full rank, correlated Gaussian": (
        correlated,
        lambda model: guides.AutoBlocks(model, {"*": guides.FullRank()}),
        {},
        (1000, 1e-2, 16),
        0.01,
    ),
    "coupling, banana": (banana, guides.AutoCoupling, {"init_scale": 1.0}, (1500, 1e-2, 32), 0.05),
    "coupling, two moons": (moons, guides.AutoCoupling, {"num_flows": 16, **WIDE}, (4000, 5e-3, 256), 0.05),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FITS)
def test_divergence_from_known_targets(name):
    """KL(q || p) with its standard error below the bound; 4 errors are a failure rate of 3e-5."""
    model, make_guide, options, settings, bound = FITS[name]
    guide = make_guide(model, **options)
    params = fit(model, guide, *settings)
    found, error = divergence(model, guide, params)
    assert error < 0.15 * bound
    assert -4 * error < found < bound - 4 * error


# -- guides -------------------------------------------------------------------------------------------


def regression(x, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w + b, sigma), obs=y)


X = jnp.linspace(-1.0, 1.0, 12).reshape(6, 2)
Y = X[:, 0] + 0.3


def started(guide, *args):
    """Parameters of a guide at its start."""
    svi = SVI(guide.model, guide, optax.adam(0.01), Trace_ELBO())
    return svi.get_params(svi.init(random.key(0), *args))


def test_blocks_share_flows_and_the_rest_is_mean_field():
    guide = guides.AutoCoupling(regression, [("w", "b")], num_flows=1, hidden=(3,))
    names = set(started(guide, X, Y))
    assert {"auto_w|b_loc", "auto_w|b_flow0_kernel0", "sigma_auto_loc", "sigma_auto_scale"} <= names
    tuple_names = set(started(guides.AutoCoupling(regression, ("w", "b"), num_flows=1, hidden=(3,)), X, Y))
    assert tuple_names == names
    two = started(guides.AutoCoupling(regression, ["w", ("b", "sigma")], num_flows=1), X, Y)
    assert two["auto_w_loc"].shape == two["auto_b|sigma_loc"].shape == (2,)
    everything = started(guides.AutoCoupling(regression), X, Y)
    assert everything["auto_loc"].shape == (4,)


def test_a_block_of_one_number():
    with pytest.raises(ValueError, match="needs two halves"):
        started(guides.AutoCoupling(regression, "sigma"), X, Y)


def test_neutra_refuses_what_depends_on_data():
    guide = guides.AutoCoupling(regression, "w", condition_on_scales=True)
    with pytest.raises(ValueError, match="Use it in `SVI` first"):
        guide.get_transform({})
    params = started(guide, X, Y)
    guide._scaled = {"w": None}  # as in a model whose weights have a learned scale
    with pytest.raises(ValueError, match="get_transform"):
        NeuTraReparam(guide, params)


@pytest.mark.parametrize(
    "blocks", [pytest.param(None, marks=pytest.mark.slow), ("w", "sigma")], ids=["all sites", "chosen"]
)
def test_neutra_density_is_that_of_the_model(blocks):
    """What NUTS sees behind the flow is the model's density at the mapped point times |det|."""
    guide = guides.AutoCoupling(regression, blocks, num_flows=2, hidden=(3,))
    start = started(guide, X, Y)
    keys = dict(zip(start, random.split(random.key(2), len(start)), strict=True))
    params = {name: v + 0.2 * jnp.abs(random.normal(keys[name], v.shape)) for name, v in start.items()}
    neutra = NeuTraReparam(guide, params)
    z = random.normal(random.key(3), (guide.latent_dim,))
    behind, _ = log_density(neutra.reparam(regression), (X, Y), {}, {"auto_shared_latent": z})

    theta = neutra.transform(z)
    values = guide._unpack_latent(theta)
    log_det = jnp.linalg.slogdet(jax.jacfwd(neutra.transform)(z))[1]
    expected = -potential_energy(regression, (X, Y), {}, values) + log_det
    np.testing.assert_allclose(behind, expected, rtol=1e-4)
    sites = neutra.transform_sample(jnp.stack([z, z]))
    np.testing.assert_allclose(sites["sigma"], jnp.exp(values["sigma"]) * jnp.ones(2), rtol=1e-5)
    # The guide's own density is N(0, I) carried along.
    base = guide.get_base_dist()
    traced = handlers.trace(handlers.substitute(handlers.seed(guide, random.key(5)), params)).get_trace(X, Y)
    latent = {n: s["value"] for n, s in traced.items() if s["type"] == "sample" and n in guide._init_locs}
    log_q, _ = log_density(handlers.seed(guide, random.key(5)), (X, Y), {}, {**params, **as_drawn(traced)})
    back = guide.get_transform(params).inv(guide_vector(guide, latent))
    carried = base.log_prob(back) - jnp.linalg.slogdet(jax.jacfwd(neutra.transform)(back))[1]
    np.testing.assert_allclose(log_q, carried - jnp.log(latent["sigma"]), rtol=1e-3, atol=1e-3)


def as_drawn(trace):
    return {name: site["value"] for name, site in trace.items() if site["type"] == "sample"}


def guide_vector(guide, values):
    """The unconstrained vector of values by site, in the order of the guide."""
    names = list(guide._unpack_latent(jnp.zeros(guide.latent_dim)))
    return jnp.concatenate([jnp.ravel(guide._transforms[n].inv(values[n])) for n in names])


@pytest.mark.slow
def test_nuts_behind_the_flow():
    """NeuTra on the banana: right moments, and shorter trajectories than without."""
    guide = guides.AutoCoupling(banana, init_scale=1.0)
    neutra = NeuTraReparam(guide, fit(banana, guide, 1500, 1e-2, 32))
    steps = {}
    for name, model in (("behind", neutra.reparam(banana)), ("plain", banana)):
        mcmc = MCMC(NUTS(model), num_warmup=300, num_samples=1500, progress_bar=False)
        mcmc.run(random.key(1), extra_fields=("num_steps",))
        steps[name] = float(mcmc.get_extra_fields()["num_steps"].mean())
        if name == "behind":
            draws = neutra.transform_sample(mcmc.get_samples()["auto_shared_latent"])
    assert steps["behind"] < steps["plain"]
    # E x = 0, E x^2 = 1, E y = 1, E y^2 = 3.25; with 4.5 Monte Carlo errors the failure rate is 3e-5.
    for power, name, expected in ((1, "x", 0.0), (2, "x", 1.0), (1, "y", 1.0), (2, "y", 3.25)):
        value = np.asarray(draws[name], np.float64) ** power
        size = effective_sample_size(value[None])
        assert size > 300
        assert abs(value.mean() - expected) < 4.5 * value.std() / size**0.5


# -- flowjax ------------------------------------------------------------------------------------------


def block_of(dim):
    return guides.Block("b", {"a": (dim,)}, jnp.linspace(-1.0, 2.0, dim), jnp.linspace(0.1, 1.5, dim))


@cache
def flowjax_flow(dim=4, **options):
    from flowjax.distributions import StandardNormal
    from flowjax.flows import coupling_flow

    base = StandardNormal((dim,))
    return coupling_flow(random.key(0), base_dist=base, flow_layers=2, nn_width=4, **options)


@pytest.mark.parametrize(
    "make_key", [random.key, pytest.param(random.PRNGKey, marks=pytest.mark.slow)], ids=["typed", "legacy"]
)
def test_flowjax_flow_as_a_guide(make_key):
    """SVI, Predictive with the guide and with the model, posterior draws; typed and legacy keys."""
    guide = guides.AutoBlocks(regression, {"*": guides.Flowjax(flowjax_flow(invert=False))})
    svi = SVI(regression, guide, optax.adam(0.01), Trace_ELBO())
    result = svi.run(make_key(0), 60, X, Y, progress_bar=False)
    arrays = [name for name in result.params if name.startswith("auto_flow")]
    assert len(arrays) == 4  # two layers of a network, stacked over the layers of the flow
    assert all(isinstance(value, jax.Array) for value in result.params.values())
    start = svi.get_params(svi.init(make_key(0), X, Y))
    assert all((start[name] != result.params[name]).any() for name in arrays)
    assert jnp.median(result.losses[-20:]) < jnp.median(result.losses[:20])  # its scales have no bound
    draws = Predictive(guide, params=result.params, num_samples=5)(make_key(1), X)
    assert draws["w"].shape == (5, 2)
    assert not jnp.array_equal(draws["w"][0], draws["w"][1])
    for parallel in (False, True):
        predictive = Predictive(regression, guide=guide, params=result.params, num_samples=5, parallel=parallel)
        assert predictive(make_key(1), X)["y"].shape == (5, 6)
    posterior = guide.sample_posterior(make_key(1), result.params, sample_shape=(3, 2))
    assert posterior["w"].shape == (3, 2, 2)
    assert (posterior["sigma"] > 0).all()
    assert guide.median(result.params)["w"].shape == (2,)


@pytest.mark.parametrize("invert", [True, False])
def test_flowjax_density_is_that_of_flowjax(invert):
    flow = flowjax_flow(invert=invert)
    block = block_of(4)
    with handlers.seed(rng_seed=0):
        placed = guides.Flowjax(flow).distribution(block)
        bare = guides.Flowjax(flow, standardized=False).distribution(block)
    z = random.normal(random.key(1), (6, 4))
    np.testing.assert_allclose(bare.log_prob(z), flow.log_prob(z), rtol=1e-5)
    x = block.loc + block.scale * z
    expected = flow.log_prob(z) - jnp.log(block.scale).sum()
    np.testing.assert_allclose(placed.log_prob(x), expected, rtol=1e-4)
    draws, passed = placed.sample_with_intermediates(random.key(2), (6,))
    np.testing.assert_allclose(placed.log_prob(draws, passed), placed.log_prob(draws), rtol=1e-4)
    np.testing.assert_array_equal(placed.sample(random.key(2), (6,)), draws)


def test_flowjax_keeps_what_is_not_trainable():
    from paramax import non_trainable

    with handlers.seed(rng_seed=0), handlers.trace() as trace:
        guides.Flowjax(non_trainable(flowjax_flow())).distribution(block_of(4))
    assert {name for name, site in trace.items() if site["type"] == "param"} == {"b_loc", "b_scale"}


def test_flowjax_refusals(monkeypatch):
    with pytest.raises(TypeError, match="Pass a flowjax distribution"):
        guides.Flowjax("coupling")
    with pytest.raises(ValueError, match="unconditional"):
        guides.Flowjax(flowjax_flow(cond_dim=2))
    guide = guides.AutoBlocks(regression, {"*": guides.Flowjax(flowjax_flow(3))})
    with pytest.raises(ValueError, match=r"have 4 numbers: build the flow with shape \(4,\)"):
        started(guide, X, Y)
    flow = flowjax_flow()
    monkeypatch.setitem(sys.modules, "flowjax.distributions", None)
    with pytest.raises(ImportError, match="pip install flowjax"):
        guides.Flowjax(flow)
