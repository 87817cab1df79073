"""The contract of kernels under ``MCMC``: one run of each row of the registry."""

import copy
import pickle
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from helpers import each, group, walk
from numpyro.infer import MCMC
from numpyro.infer.gibbs import Gibbs
from registry import KERNELS, firsts
from zoo import BATCH, ZOO

import numpyro_bnn as bnn
from numpyro_bnn import infer

pytestmark = pytest.mark.core

MODEL, BATCHES = ZOO["spread"], {"batch_size": BATCH}
WARMUP, DRAWS = 4, 6
FIELDS = ("base_step_size", "z.sigma", "decoherence_length")


ONE_OF_A_CLASS = each("name", KERNELS, fast=firsts(KERNELS))


def mcmc_of(kernel, method="vectorized", **options):
    sizes = {"num_warmup": WARMUP, "num_samples": DRAWS, "num_chains": 2, "thinning": 2}
    options = {"chain_method": method, "progress_bar": False, **sizes, **options}
    return MCMC(kernel, **options)


@cache
def finished(name):
    """Two vectorized chains of a pickled kernel, with a legacy key, thinned."""
    mcmc = mcmc_of(pickle.loads(pickle.dumps(KERNELS[name].make(MODEL.model))))
    mcmc.run(jax.random.PRNGKey(3), *MODEL.args, **BATCHES, extra_fields=FIELDS)
    return mcmc


def second(mcmc):
    return {
        name: value[1] for name, value in mcmc.get_samples(group_by_chain=True).items()
    }


def assert_same(found, expected):
    for name in ("w", "sigma"):
        np.testing.assert_allclose(found[name], expected[name], rtol=2e-3, atol=1e-4)


@ONE_OF_A_CLASS
def test_draws_are_those_of_the_model(name):
    """Finite, constrained, thinned; without the deterministic site of a minibatch."""
    mcmc = finished(name)
    draws = mcmc.get_samples(group_by_chain=True)
    extra = mcmc.get_extra_fields(group_by_chain=True)
    shapes = {name: value.shape for name, value in draws.items()}
    assert shapes == {
        "w": (2, DRAWS // 2, 2),
        "sigma": (2, DRAWS // 2),
        "precision": (2, DRAWS // 2),
    }
    assert all(np.isfinite(value).all() for value in draws.values())
    # chains differ, and move unless all proposals are refused
    assert len(np.unique(draws["sigma"])) > 2
    np.testing.assert_allclose(draws["precision"], draws["sigma"] ** -2.0, rtol=1e-4)
    np.testing.assert_allclose(
        extra["z.sigma"], np.log(draws["sigma"]), rtol=1e-4, atol=1e-5
    )
    assert set(extra) == {*FIELDS, *mcmc.sampler.default_fields} - {"z"}
    # a field of other kernels is empty
    is_empty = extra["decoherence_length"] is None
    assert is_empty != KERNELS[name].microcanonical
    sizes, counts = extra["base_step_size"], np.asarray(extra["num_gradients"])
    # after warm-up step sizes stay
    np.testing.assert_array_equal(sizes, sizes[:, :1].repeat(DRAWS // 2, 1))
    # two transitions of three steps and more
    assert (np.diff(counts, axis=1) >= 2 * 3).all()
    assert counts[0, 0] > 3 * WARMUP
    text = mcmc.sampler.get_diagnostics_str(mcmc.last_state)
    assert (
        text.split(" steps of size ")[1] == f"{np.mean(mcmc.last_state.step_size):.2e}"
    )


@ONE_OF_A_CLASS
def test_export_has_the_statistics_of_the_kernel(name):
    row, mcmc = KERNELS[name], finished(name)
    options = {"log_likelihood": False, "posterior_predictive": False}
    idata = bnn.to_inference_data(mcmc, **options)
    names = "diverging step_size configurational_temperature gradient_noise "
    names += "num_gradients refused_steps"
    names += " kinetic_temperature" * row.momentum + " acceptance_rate" * row.exact
    names += " energy_variance decoherence_length" * row.microcanonical
    expected = set(names.split())
    stats = group(idata, "sample_stats")
    # no `lp`: a minibatch potential is not the log density
    assert set(stats.data_vars) - {*FIELDS[:2]} == expected
    assert set(group(idata, "posterior").data_vars) == {"w", "sigma", "precision"}
    assert idata.attrs["algorithm"] == type(mcmc.sampler).__name__
    assert idata.attrs["biased"] == (not row.exact)
    assert idata.attrs["temperature"] == 1.0
    assert all(np.isfinite(stats[name]).all() for name in expected)
    assert not stats["diverging"].any()
    assert idata.attrs["first_divergence"] == "[-1, -1]"


# Of each kind of state, of gradient and of warm-up one.
KINDS = (
    *("MALA", "SGNHT", "SGHMC with control variates", "PSGLD of the warm start"),
    "MCLMC with noise preconditioning",
)


@each("name", (*KINDS, "CyclicalSGLD"), fast=1)
def test_resumed_runs_are_one_longer_run(name):
    """Of a kernel alone, by a program that JAX checks for keys that are used twice."""
    mcmc, kernel = copy.copy(finished(name)), KERNELS[name].make(MODEL.model)
    with jax.debug_key_reuse(True):
        key = jax.random.split(jax.random.key(3), 2)[1]
        _, draws = walk(
            kernel, WARMUP + 2 * DRAWS, MODEL.args, BATCHES, warmup=WARMUP, key=key
        )
    whole = {
        "w": draws["w"][WARMUP + 1 :: 2],
        "sigma": np.exp(draws["sigma"][WARMUP + 1 :: 2]),
    }
    half = DRAWS // 2
    assert_same(second(mcmc), {site: value[:half] for site, value in whole.items()})
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(mcmc.last_state.rng_key, *MODEL.args, **BATCHES, extra_fields=FIELDS)
    assert_same(second(mcmc), {site: value[half:] for site, value in whole.items()})


@pytest.mark.slow
def test_warmup_may_come_before_run():
    mcmc = mcmc_of(KERNELS["SGLD"].make(MODEL.model))
    mcmc.warmup(jax.random.PRNGKey(3), *MODEL.args, **BATCHES)
    mcmc.run(mcmc.post_warmup_state.rng_key, *MODEL.args, **BATCHES)
    assert_same(second(mcmc), second(finished("SGLD")))


def test_a_block_of_gibbs_constrains_its_own_sites():
    """`Gibbs` leaves the sites of other blocks out."""

    def model():
        scale = numpyro.sample("scale", dist.HalfNormal())
        numpyro.sample("w", dist.Normal(0.0, scale))

    kernel = infer.GHMC(model, step_size=0.1, num_steps=1, warm_start=0.0)
    gibbs = Gibbs([(kernel, ["scale"]), (copy.copy(kernel), None)])
    mcmc = MCMC(gibbs, num_warmup=2, num_samples=3, progress_bar=False)
    mcmc.run(jax.random.key(0))
    assert (mcmc.get_samples()["scale"] > 0).all()


# JAX warns that NumPyro's donated buffers cannot be used under `vmap`.
@pytest.mark.filterwarnings("ignore:Some donated buffers")
@each(
    ("name", "method", "bar"),
    [
        ("MALA", "parallel", False),
        ("SGHMC with control variates", "sequential", True),
        ("MCLMC", "parallel", True),
        ("SGLD", infer.parallel_vectorized, False),
    ],
    fast=1,
)
def test_other_chain_methods_give_the_same_chains(name, method, bar):
    """Typed keys, with and without progress bar; resumed inside a program."""
    mcmc = mcmc_of(KERNELS[name].make(MODEL.model), method, progress_bar=bar)
    mcmc.run(jax.random.key(3), *MODEL.args, **BATCHES, extra_fields=["~z.precision"])
    assert set(mcmc.get_samples()) == {"w", "sigma"}
    assert_same(second(mcmc), second(finished(name)))
    if method is infer.parallel_vectorized:
        assert mcmc.get_samples()["w"].devices() == {jax.local_devices()[0]}
    if name == "MCLMC":
        # what the kernel keeps must not belong to the first compiled program
        once = copy.copy(finished(name))
        for resumed, options in (
            (mcmc, {"extra_fields": ["~z.precision"]}),
            (once, {"extra_fields": FIELDS}),
        ):
            resumed.post_warmup_state = resumed.last_state
            resumed.run(resumed.last_state.rng_key, *MODEL.args, **BATCHES, **options)
        assert_same(second(mcmc), second(once))


@pytest.mark.parametrize("num_chains", [6, 3])
def test_shared_out_programs_are_compiled_once(num_chains):
    """Three chains are no even share of two devices: all of them are on one."""
    traced = []

    def double(tree):
        traced.append(1)
        return {"x": 2.0 * tree["x"]}

    mapped = infer.parallel_vectorized(double)
    for shift in (0.0, 1.0):
        x = jnp.arange(1.0 * num_chains)[:, None] + shift
        np.testing.assert_array_equal(mapped({"x": x})["x"], 2.0 * x)
    assert len(traced) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_states_keep_their_types(name, x64):
    """Start and transition, traced as `jax.vmap` and parallel chains do."""
    kernel = KERNELS[name].make(MODEL.model)
    args = tuple(jnp.asarray(value, jnp.float64) for value in MODEL.data)

    def chain(key):
        first = kernel.init(key, WARMUP, None, args, BATCHES)
        return first, kernel.sample(first, args, BATCHES)

    first, then = jax.eval_shape(
        jax.vmap(chain), jax.random.split(jax.random.key(0), 2)
    )
    assert jax.tree.map(lambda a: (a.shape, a.dtype), first) == jax.tree.map(
        lambda a: (a.shape, a.dtype), then
    )
    floats = [
        leaf.dtype
        for leaf in jax.tree.leaves(then)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    assert set(floats) == {jnp.dtype("float64")}
