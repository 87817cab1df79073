"""Flows: transforms against autodiff, starts, halves, fits of known targets, NeuTra,
flows of flowjax.
"""

import sys
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from helpers import each, refused
from jax import random
from numpy.testing import assert_allclose as close
from numpyro import handlers
from numpyro.infer import SVI, Predictive, Trace_ELBO
from numpyro.infer.reparam import NeuTraReparam
from numpyro.infer.util import log_density
from zoo import ZOO

from numpyro_bnn import guides

DIM = 5
SPREAD = ZOO["spread"]  # w (2,) and sigma > 0


def block_of(dim):
    return guides.Block(
        "b", {"a": (dim,)}, jnp.linspace(-1.0, 2.0, dim), jnp.linspace(0.1, 1.5, dim)
    )


def traced(family, dim=DIM):
    """Initial parameters of a family, and its distribution as a function of them."""
    with handlers.seed(rng_seed=3), handlers.trace() as trace:
        family.distribution(block_of(dim))
    params = {
        name: site["value"] for name, site in trace.items() if site["type"] == "param"
    }

    def distribution(params):
        with handlers.block(), handlers.substitute(data=params):
            return family.distribution(block_of(dim))

    return params, distribution


def away_from_start(params, seed=1, scale=0.3):
    keys = random.split(random.key(seed), len(params))
    return {
        n: v + scale * random.uniform(k, v.shape)
        for k, (n, v) in zip(keys, params.items(), strict=True)
    }


# -- transforms ------------------------------------------------------------------------

COUPLINGS = {
    "alternating": guides.Coupling(3, (6, 4), bound=1.5),
    "random halves": guides.Coupling(5, (4,), "random"),
}


@each("name", ["random halves", "alternating"], fast=1)
def test_a_coupling_flow_is_inverted_and_has_the_density_of_autodiff(name, x64):
    """Density of draws and other points against the Jacobian from N(0, I)."""
    params, distribution = traced(COUPLINGS[name])
    params = {n: jnp.asarray(v, float) for n, v in away_from_start(params).items()}

    @jax.jit
    def measured(params, z):
        q = distribution(params)
        flow = dist.transforms.ComposeTransform(q.transforms)
        y = flow(z)
        draws, passed = q.sample_with_intermediates(random.key(4), (40,))
        return {
            "points": (z, flow.inv(y)),
            "single": (flow(z[3]), y[3]),
            "log det": (
                flow.log_abs_det_jacobian(z, y),
                jnp.linalg.slogdet(jax.vmap(jax.jacfwd(flow))(z))[1],
            ),
            "density": (
                dist.Normal().log_prob(z).sum(-1) - flow.log_abs_det_jacobian(z, y),
                q.log_prob(y),
            ),
            "of draws": (q.log_prob(draws), q.log_prob(draws, passed)),
        }

    found = measured(params, 2.0 * random.normal(random.key(7), (40, DIM)))
    assert np.ptp(found["log det"][0]) > 0.1  # nothing is tested at the identity
    for what, (one, other) in found.items():
        close(one, other, rtol=1e-7, atol=1e-9, err_msg=what)


def test_a_layer_scales_by_at_most_its_bound():
    """Whatever its network gives: e^(b tanh(s / b)), which is near e^s for small s."""
    bound = 0.5
    params, distribution = traced(guides.Coupling(1, (4,), bound=bound))
    given = jnp.array([1000.0, -1000.0, 0.01, 0.0, 0.0, 0.0])
    q = distribution(
        params
        | {"b_flow0_bias1": given, "b_loc": jnp.zeros(DIM), "b_scale": jnp.ones(DIM)}
    )
    flow = dist.transforms.ComposeTransform(q.transforms)
    y = jax.jit(lambda z: flow(z))(jnp.array([0.3, -0.7, 1.0, 1.0, 1.0]))
    close(y, [0.3, -0.7, np.exp(bound), np.exp(-bound), np.exp(0.01)], rtol=1e-5)


def test_a_coupling_flow_starts_as_the_mean_field():
    params, distribution = traced(COUPLINGS["alternating"])
    block = block_of(DIM)
    expected = dist.Normal(block.loc, block.scale).to_event(1)
    x = block.loc + 3.0 * block.scale * random.normal(random.key(0), (20, DIM))
    density = jax.jit(lambda x: distribution(params).log_prob(x))(x)
    close(density, expected.log_prob(x), rtol=1e-4, atol=1e-4)


# -- guides ----------------------------------------------------------------------------


def started(guide, *args):
    """Parameters of a guide at its start."""
    trace = handlers.trace(handlers.seed(guide, 0)).get_trace(*args)
    return {
        name: site["value"] for name, site in trace.items() if site["type"] == "param"
    }


def test_blocks_share_flows_and_the_rest_is_mean_field():
    def shapes(blocks):
        guide = guides.AutoCoupling(SPREAD.model, blocks, num_flows=1, hidden=(3,))
        return {
            name: value.shape for name, value in started(guide, *SPREAD.args).items()
        }

    network = {
        f"flow0_{part}": shape
        for part, shape in {"kernel0": (1, 3), "kernel1": (3, 2)}.items()
    }
    chosen = shapes("w")
    assert chosen == shapes(["w"])
    assert chosen.keys() >= {f"auto_w_{part}" for part in ("loc", *network)}
    assert {name: chosen[f"auto_w_{name}"] for name in network} == network
    assert chosen["sigma_auto_loc"] == chosen["sigma_auto_scale"] == ()
    assert (
        shapes(("w", "sigma"))["auto_w|sigma_loc"] == shapes(None)["auto_loc"] == (3,)
    )
    with refused("blocks", "needs two halves"):
        shapes("sigma")


def test_neutra_density_is_that_of_the_model():
    """What NUTS sees is the density at the mapped point times |det|."""
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
        behind = log_density(
            neutra.reparam(SPREAD.model), SPREAD.args, {}, {"auto_shared_latent": z}
        )[0]
        return behind, log_density(SPREAD.model, SPREAD.args, {}, sites(z))[
            0
        ] + log_det(z)

    z = random.normal(random.key(3), (guide.latent_dim,))
    close(*jax.jit(densities)(z), rtol=1e-5)
    close(neutra.transform_sample(jnp.stack([z, z]))["w"][1], sites(z)["w"], rtol=1e-5)


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


# -- flowjax ---------------------------------------------------------------------------


@cache
def flowjax_flow(dim=3, **options):
    from flowjax.distributions import StandardNormal
    from flowjax.flows import coupling_flow

    base = StandardNormal((dim,))
    return coupling_flow(
        random.key(0), base_dist=base, flow_layers=2, nn_width=4, **options
    )


@pytest.mark.slow
def test_a_flow_of_flowjax_serves_as_a_guide():
    """SVI, Predictive with a legacy key, posterior draws."""
    guide = guides.AutoBlocks(
        SPREAD.model, {"*": guides.Flowjax(flowjax_flow(invert=False))}
    )
    svi = SVI(SPREAD.model, guide, optax.adam(0.01), Trace_ELBO())
    start, result = (
        guides.fit(svi, random.key(0), n, *SPREAD.args, progress_bar=False)
        for n in (1, 60)
    )
    arrays = [name for name in result.params if name.startswith("auto_flow")]
    # two layers of a network, stacked over the layers of the flow
    assert len(arrays) == 4
    assert all((start.params[name] != result.params[name]).any() for name in arrays)
    # its scales have no bound
    assert jnp.median(result.losses[-20:]) < jnp.median(result.losses[:20])
    draws = Predictive(guide, params=result.params, num_samples=5)(
        random.PRNGKey(1), *SPREAD.args
    )
    assert len(np.unique(draws["w"], axis=0)) == 5
    posterior = guide.sample_posterior(
        random.key(1), result.params, sample_shape=(3, 2)
    )
    assert posterior["w"].shape == (3, 2, 2)
    assert (posterior["sigma"] > 0).all()


def test_flowjax_density_is_that_of_flowjax():
    from flowjax.distributions import Normal

    flow, block = Normal(jnp.arange(3.0), jnp.array([0.5, 1.0, 2.0])), block_of(3)
    with handlers.seed(rng_seed=0):
        placed = guides.Flowjax(flow).distribution(block)
        bare = guides.Flowjax(flow, standardized=False).distribution(block)
    z = random.normal(random.key(1), (6, 3))

    @jax.jit
    def densities(z):
        draws, passed = placed.sample_with_intermediates(random.key(2), (6,))
        of_flow, of_draws = flow.log_prob(z), placed.log_prob(draws)
        return [
            (bare.log_prob(z), of_flow),
            (
                placed.log_prob(block.loc + block.scale * z),
                of_flow - jnp.log(block.scale).sum(),
            ),
            (placed.log_prob(draws, passed), of_draws),
            (placed.sample(random.key(2), (6,)), draws),
        ]

    for found, expected in densities(z):
        close(found, expected, rtol=1e-4)


def test_what_is_not_trainable_is_no_parameter():
    from paramax import non_trainable

    assert set(traced(guides.Flowjax(non_trainable(flowjax_flow())), 3)[0]) == {
        "b_loc",
        "b_scale",
    }


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
