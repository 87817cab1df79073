"""The contract of kernels around kernels, and of transformed models under kernels."""

import pickle
from functools import cache

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from helpers import each, group
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.infer import MCMC, Gibbs
from numpyro.infer.util import potential_energy
from orbits import Still
from registry import FAST_WRAPPERS, WRAPPERS
from scipy import stats
from zoo import NET, NOISE, ZOO, X, Y

import numpyro_bnn as bnn
from numpyro_bnn import infer

pytestmark = [
    pytest.mark.core,
    pytest.mark.filterwarnings("ignore:Some donated buffers"),
]

WARMUP, DRAWS = 4, 6
HIDDEN = "net/Dense_0.kernel"


def of_row(name):
    """A new kernel, un-pickled unless its model was made in a function."""
    entry = ZOO[WRAPPERS[name].model]
    kernel = WRAPPERS[name].make(entry.model, entry.args)
    return kernel if name.startswith("collapse") else pickle.loads(pickle.dumps(kernel))


def of_mean(y):
    w = numpyro.sample("w", dist.Normal(0.0, 10.0).expand([2]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal())
    numpyro.deterministic("mean", y.mean())
    numpyro.sample("y", dist.Normal(w[0], scale).expand([3]).to_event(1), obs=y)


SGLD_OF_MEAN = infer.SGLD(of_mean, 1e-3, steps_per_draw=1, warm_start=0.0)
GHMC_OF_MEAN = infer.GHMC(of_mean, 1e-3, num_steps=1, warm_start=0.0)
OUTER = {
    "UnitMoves": lambda: infer.UnitMoves(SGLD_OF_MEAN, {"w": 0}, num_moves=1),
    "ParallelTempering": lambda: infer.ParallelTempering(SGLD_OF_MEAN, 2),
    "PrecisionGibbs": lambda: Gibbs(
        [(infer.PrecisionGibbs(of_mean), ["scale"]), (GHMC_OF_MEAN, None)]
    ),
}


@each("name", OUTER, fast=["UnitMoves"])
def test_a_new_run_reads_data_that_changed_in_place(name):
    """Also in deterministic sites, which a program computes that ``MCMC`` keeps."""
    y = np.zeros(3, np.float32)
    mcmc = MCMC(OUTER[name](), num_warmup=0, num_samples=2, progress_bar=False)
    for value in (0.0, 5.0):
        y[:] = value
        mcmc.run(jax.random.key(0), y)
        np.testing.assert_array_equal(mcmc.get_samples()["mean"], value)


def test_the_inner_kernel_starts_with_a_key_that_nothing_else_uses():
    """Neither the caller, nor the wrapper, whose own draws would be those of the inner
    kernel.
    """
    key = jax.random.key(0)
    kernel = infer.UnitMoves(Still(of_mean), {"w": 0})
    values = {"w": np.zeros(2), "scale": np.zeros(())}
    state = kernel.init(key, 0, values, (np.zeros(3),), {})
    keys = [jax.random.key_data(k) for k in (key, state.rng_key, state.base.rng_key)]
    assert len({tuple(words.tolist()) for words in keys}) == 3


def stepping(name, seed):
    """A function that makes one transition, and the first state."""
    kernel, args = of_row(name), ZOO[WRAPPERS[name].model].args
    state = kernel.init(jax.random.key(seed), WARMUP, None, args, {})
    return kernel, jax.jit(lambda state: kernel.sample(state, args, {})), state


@cache
def walked(name):
    """A kernel, and its states after each transition."""
    kernel, step, state = stepping(name, 3)
    states = []
    for _ in range(WARMUP + DRAWS):
        state = step(state)
        states.append(state)
    return kernel, states


@each("name", WRAPPERS, fast=FAST_WRAPPERS)
def test_all_sites_of_the_model_are_drawn(name):
    """Those that were integrated out, too: finite and different in all draws."""
    row, (kernel, states) = WRAPPERS[name], walked(name)
    entry = ZOO[row.model]
    z = jax.tree.map(
        lambda *leaves: np.stack(leaves), *(state.z for state in states[WARMUP:])
    )
    draws = jax.jit(jax.vmap(kernel.postprocess_fn(entry.args, {})))(z)
    assert {site: draws[site].shape for site in entry.shapes} == {
        s: (DRAWS, *shape) for s, shape in entry.shapes.items()
    }
    assert set(draws) - {"mean", "precision"} == set(entry.shapes)
    for site in entry.shapes:
        assert np.isfinite(draws[site]).all()
        assert (
            len(np.unique(np.asarray(draws[site]).reshape(DRAWS, -1)[:, 0]))
            > DRAWS // 2
        )
    for stat in row.stats:
        accepted = np.stack([getattr(state, stat) for state in states[WARMUP:]])
        assert ((accepted > 0) & (accepted <= 1 + 1e-6)).all()


# One of each wrapper; the inner kernels have a contract of their own.
SOME = (
    *("OrbitMoves around MALA", "UnitMoves around Gibbs", "UnitMoves around MCLMC"),
    *("PrecisionGibbs beside NUTS", "collapse under ParallelTempering"),
)


@each("name", SOME, fast=2)
def test_another_kernel_continues_bit_for_bit_from_a_state(name):
    """As a run does that was stopped."""
    _, states = walked(name)
    _, step, _ = stepping(name, 4)
    for middle in (1, WARMUP + 2):
        state = states[middle]
        for _ in range(3):
            state = step(state)
        for site, value in states[middle + 3].z.items():
            np.testing.assert_array_equal(state.z[site], value)


# `BlackJAX` computes them when its next transition begins: borders/test_blackjax.py.
OF_MODELS = [
    name
    for name in WRAPPERS
    if not name.startswith("collapse") and not {"MCLMC", "BlackJAX"} & {*name.split()}
]


@each("name", OF_MODELS, fast=FAST_WRAPPERS)
def test_the_inner_kernel_knows_energy_and_gradient_after_the_moves(name):
    """By NumPyro's own evaluation of the model, given what other blocks hold."""
    entry, state, held = ZOO[WRAPPERS[name].model], walked(name)[1][-1], {}
    while "base" in state._fields:
        state = state.base
    if "block_states" in state._fields:
        held, state = {"sigma": state.block_states[0].z["sigma"]}, state.block_states[1]
    state = getattr(state, "base", state)  # moves in a block
    model = handlers.condition(entry.model, held)
    energy, slope = jax.jit(
        jax.value_and_grad(lambda z: potential_energy(model, entry.args, {}, z))
    )(state.z)
    if "z_grad" in state._fields:
        cached, gradient = state.potential_energy, state.z_grad
    else:
        cached, gradient = state.engine.memory.potential, state.engine.memory.gradient
    np.testing.assert_allclose(cached, energy, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        ravel_pytree(gradient)[0], ravel_pytree(slope)[0], rtol=1e-3, atol=1e-3
    )


# -- under `MCMC` ----------------------------------------------------------------------


def mcmc_of(name, method=None):
    """NumPyro's Gibbs takes the key of one chain."""
    method = method or ("sequential" if "Gibbs" in name else "vectorized")
    options = {"num_warmup": WARMUP, "num_samples": DRAWS, "progress_bar": False}
    return MCMC(of_row(name), num_chains=2, chain_method=method, **options)


def draws_of(mcmc):
    return {
        site: np.asarray(value)
        for site, value in mcmc.get_samples(group_by_chain=True).items()
    }


@cache
def finished(name):
    mcmc = mcmc_of(name)
    mcmc.run(jax.random.key(3), *ZOO[WRAPPERS[name].model].args)
    return mcmc


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SOME, "collapse under NUTS"])
def test_export_has_statistics_and_predictions_of_these_draws(name):
    row, mcmc = WRAPPERS[name], finished(name)
    idata = bnn.to_inference_data(mcmc, predictions={"x": X[:5]})
    for stat, dims in row.stats.items():
        values = group(idata, "sample_stats")[stat]
        assert values.dims == ("chain", "draw", *dims)
        np.testing.assert_array_equal(
            values, mcmc.get_extra_fields(group_by_chain=True)[stat]
        )
    if name.startswith("OrbitMoves"):
        flip, order = f"SignFlip({HIDDEN})", f"Permutation({HIDDEN})"
        labels = group(idata, "sample_stats")["symmetry"].to_numpy()
        assert list(labels) == [flip, order]
        assert idata.attrs["orbit_moves"] == f"{flip}: flip; {order}: order"
    if row.stats:
        assert idata.attrs["inner_kernel"] == type(mcmc.sampler.kernel).__name__
    assert group(idata, "predictions")["y"].shape == (2, DRAWS, 5)
    if row.model == "network":
        names = ZOO["network"].shapes
        params = {s.removeprefix("net/"): draws_of(mcmc)[s] for s in names}
        mean = jax.vmap(jax.vmap(lambda p: NET.apply(p, X)[..., 0]))(params)
        expected = stats.norm(mean, NOISE).logpdf(Y)
        densities = group(idata, "log_likelihood")["y"]
        np.testing.assert_allclose(densities, expected, rtol=1e-3, atol=1e-3)
