"""The borders of kernels to NumPyro: ``Gibbs``, ``refresh``, data, keys of models."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from helpers import each, group, mala, walk
from numpyro import handlers
from numpyro.infer import MCMC, Gibbs
from numpyro.infer.gibbs import CustomGibbs
from numpyro.infer.util import potential_energy
from registry import KERNELS
from zoo import BATCH, ZOO

import numpyro_bnn as bnn
from numpyro_bnn import infer

pytestmark = pytest.mark.core

SPREAD, BATCHES = ZOO["spread"], {"batch_size": BATCH}


# -- blocks of Gibbs, refresh, wrap_model ----------------------------------------------

SAMPLE = np.random.default_rng(2).normal(1.0, 0.7, 12).astype(np.float32)


def normal_gamma(y):
    """tau ~ Gamma(3, 2), mu ~ N(0, 1 / tau), y ~ N(mu, 1 / tau): conjugate."""
    tau = numpyro.sample("tau", dist.Gamma(3.0, 2.0))
    mu = numpyro.sample("mu", dist.Normal(0.0, tau**-0.5))
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, tau**-0.5), obs=y)


def draw_mean(rng_key, gibbs_sites, hmc_sites):
    sd = ((SAMPLE.size + 1) * hmc_sites["tau"]) ** -0.5
    return {"mu": SAMPLE.sum() / (SAMPLE.size + 1) + sd * jax.random.normal(rng_key)}


# `test_refresh_goes_on_from_the_values_and_data_it_is_given` is the fast one
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Some donated buffers")
def test_block_of_gibbs_has_the_right_posterior():
    """tau by the kernel given mu, mu exactly given tau."""
    kernel = mala(normal_gamma, steps_per_draw=3)
    gibbs = Gibbs([(kernel, ["tau"]), (CustomGibbs(draw_mean), ["mu"])])
    sizes = {"num_warmup": 60, "num_samples": 100, "num_chains": 100}
    mcmc = MCMC(gibbs, chain_method=jax.vmap, progress_bar=False, **sizes)
    mcmc.run(jax.random.key(0), SAMPLE)
    draws = mcmc.get_samples(group_by_chain=True)
    n = SAMPLE.size
    a = 3 + n / 2
    b = 2 + 0.5 * (
        np.sum((SAMPLE - SAMPLE.mean()) ** 2) + n * SAMPLE.mean() ** 2 / (n + 1)
    )
    mean = SAMPLE.sum() / (n + 1)
    exact = {
        "tau": a / b,
        "tau^2": a * (a + 1) / b**2,
        "mu": mean,
        "mu^2": mean**2 + b / (a - 1) / (n + 1),
    }
    for name, value in exact.items():
        site, *power = name.split("^")
        by_chain = (np.asarray(draws[site], np.float64) ** (len(power) + 1)).mean(1)
        error = by_chain.std() / 10
        # 4 standard errors over 100 chains (failure rate 6e-5 each)
        assert abs(by_chain.mean() - value) < 4 * error, name
        assert error < 0.03 * value


@each(("name", "cost"), [("MALA", 1), ("SGHMC with control variates", 3)], fast=1)
def test_refresh_goes_on_from_the_values_and_data_it_is_given(name, cost):
    """Caches are those of the new place: the next draws are there."""
    kernel = KERNELS[name].make(SPREAD.model)
    x, y = SPREAD.args

    @jax.jit
    def moved(state, y):
        z = {"w": jnp.array([90.0, -90.0]), "sigma": state.z["sigma"]}
        return kernel.refresh(state._replace(z=z), (x, y), BATCHES)

    step = jax.jit(lambda state: kernel.sample(state, (x, y), BATCHES))
    state = step(kernel.init(jax.random.key(0), 0, None, (x, y), BATCHES))
    there = moved(state, y)
    assert int(there.num_gradients - state.num_gradients) == cost
    np.testing.assert_allclose(step(there).z["w"], [90, -90], atol=30)
    # Once more changes nothing: refresh is about the target, not about chance. Other
    # data are another target.
    again, other = moved(there, y), moved(there, y + 1.0)
    jax.tree.map(np.testing.assert_array_equal, again.engine, there.engine)
    differ = jax.tree.map(lambda a, b: bool(np.any(a != b)), other.engine, there.engine)
    assert any(jax.tree.leaves(differ))
    if name == "MALA":
        exact = potential_energy(SPREAD.model, (x, y + 1.0), {}, there.z)
        np.testing.assert_allclose(other.engine.memory.potential, exact, rtol=1e-5)


def test_wrap_model_leaves_the_kernel_alone():
    kernel = KERNELS["SGHMC"].make(SPREAD.model)
    before = kernel.init(jax.random.key(0), 0, None, SPREAD.args, BATCHES)
    scoped = kernel.wrap_model(lambda fn: handlers.scope(fn, prefix="a"))
    with pytest.raises(ValueError, match="Call `init` first"):
        scoped.postprocess_fn(SPREAD.args, BATCHES)
    assert set(scoped.init(jax.random.key(0), 0, None, SPREAD.args, BATCHES).z) == {
        "a/w",
        "a/sigma",
    }
    assert kernel.model is SPREAD.model
    assert set(kernel.postprocess_fn(SPREAD.args, BATCHES)(before.z)) == {
        "w",
        "sigma",
        "precision",
    }


# -- data ------------------------------------------------------------------------------


# -- keys of models --------------------------------------------------------------------


def test_models_get_fresh_keys_at_every_step_and_for_every_layer():
    """Without other noise (T = 0) each step moves by eps / 2 times the model's own
    random gradient; failure rates 6e-5 each.
    """

    def noisy():
        for name in ("v", "w"):
            site = numpyro.sample(
                name, dist.ImproperUniform(dist.constraints.real, (), ())
            )
            numpyro.factor(f"f_{name}", site * jax.random.normal(numpyro.prng_key()))

    kernel = infer.SGLD(noisy, 2.0, temperature=0.0, steps_per_draw=1, warm_start=0.0)
    _, draws = walk(kernel, 1000, start={"v": jnp.zeros(()), "w": jnp.zeros(())})
    v, w = (np.diff(draws[name]) for name in ("v", "w"))
    for steps in (v, w):
        assert len(np.unique(steps.round(5))) > 950
        assert abs(steps.mean()) < 4 / 1000**0.5
        assert abs(steps.var() - 1) < 4 * (2 / 1000) ** 0.5
    # two layers of dropout have two masks
    assert abs(np.corrcoef(v, w)[0, 1]) < 4 / 1000**0.5


def test_a_run_is_exported_after_it_was_pickled():
    kernel = infer.SGLD(ZOO["line"].model, 1e-2, steps_per_draw=2)
    mcmc = MCMC(kernel, num_warmup=2, num_samples=3, progress_bar=False)
    mcmc.run(jax.random.key(0), *ZOO["line"].args)
    exports = [
        bnn.to_inference_data(run, log_likelihood=False, posterior_predictive=False)
        for run in (mcmc, pickle.loads(pickle.dumps(mcmc)))
    ]
    draws = [group(idata, "posterior")["w"].to_numpy() for idata in exports]
    np.testing.assert_array_equal(*draws)


def test_a_chain_that_stands_on_other_data_is_announced():
    """Also before it is marked; near data are no news."""
    x, y = map(jnp.asarray, ZOO["line"].args)
    kernel = infer.SGLD(ZOO["line"].model, steps_per_draw=5, warm_start=0.0)
    mcmc = MCMC(kernel, num_warmup=20, num_samples=45, progress_bar=False)
    mcmc.warmup(jax.random.key(0), x, y)
    mcmc.run(jax.random.key(1), x, y + 0.1)
    assert np.isfinite(mcmc.get_samples()["w"]).all()

    for num_samples, is_marked in ((10, False), (45, True)):
        mcmc.num_samples = num_samples

        def far():
            mcmc.run(jax.random.key(1), x, y + 1e8)
            jax.effects_barrier()

        with pytest.warns(UserWarning, match="on other data than") as seen:
            far()
        assert len(seen) == 1
        assert np.isnan(mcmc.get_samples()["w"][-1]).all() == is_marked


def test_data_with_gaps_are_the_same_data(monkeypatch):
    """A copy of them, of which NaN says that nothing was observed."""

    def model(y):
        w = numpyro.sample("w", dist.Normal())
        seen = ~jnp.isnan(y)
        with numpyro.plate("data", 3), numpyro.handlers.mask(mask=seen):
            numpyro.sample("y", dist.Normal(w, 1.0), obs=jnp.where(seen, y, 0.0))

    y = jnp.array([0.1, jnp.nan, 0.3])
    kernel = infer.SGLD(model, 1e-2, warm_start=0.0)
    mcmc = MCMC(kernel, num_warmup=2, num_samples=30, progress_bar=False)
    mcmc.warmup(jax.random.key(0), y)
    announced = []
    monkeypatch.setattr(jax.debug, "callback", lambda *args: announced.append(args))
    mcmc.run(jax.random.key(1), jnp.array(y))
    assert not announced
    mcmc.run(jax.random.key(1), y.at[0].set(jnp.nan))
    assert announced
