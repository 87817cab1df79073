"""The contract of a kernel under ``MCMC``: one table, every row inherits every test."""

import pickle
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import lax
from numpyro import handlers
from numpyro.contrib.module import random_flax_module
from numpyro.infer import MCMC, Gibbs
from numpyro.infer.gibbs import CustomGibbs
from registry import KERNELS, rows

import numpyro_bnn
from numpyro_bnn import infer, models, nn, priors

pytestmark = pytest.mark.core

N, B = 40, 8
X = jnp.asarray(np.random.default_rng(0).normal(size=(N, 2)), jnp.float32)
Y = X @ jnp.array([1.0, -0.5]) + 0.5 * jnp.asarray(np.random.default_rng(1).normal(size=N), jnp.float32)
WARMUP, DRAWS = 4, 6


def model(x, y=None, batch_size=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    numpyro.deterministic("precision", sigma**-2)
    with numpyro.plate("data", x.shape[0], subsample_size=batch_size) as i:
        mean = numpyro.deterministic("mean", x[i] @ w)
        numpyro.sample("y", dist.Normal(mean, sigma), obs=None if y is None else y[i])


CALL = {"y": Y, "batch_size": B}


def scan(kernel, state, num, args=(X,), kwargs=CALL):
    """Run a kernel without ``MCMC``; returns the last state and the unconstrained draws."""

    def body(state, _):
        state = kernel.sample(state, args, kwargs)
        return state, state.z

    return jax.jit(lambda s: lax.scan(body, s, None, num))(state)


@cache
def by_hand(name):
    """The second of two chains, by a jitted scan under JAX's check for keys that are used twice."""
    kernel = KERNELS[name].make(model)
    with jax.debug_key_reuse(True):
        keys = jax.random.split(jax.random.key(3), 2)
        state = kernel.init(keys[1], WARMUP, None, model_args=(X,), model_kwargs=CALL)
        return scan(kernel, state, WARMUP + 2 * DRAWS)


def kernel_rows(test):
    """One fast row per class; variants of a class are slow."""
    seen, params = set(), []
    for param in rows(KERNELS, test):
        kind = param.values[0].make.func
        variant = [pytest.mark.slow] if kind in seen else []
        seen.add(kind)
        params.append(pytest.param(*param.values, id=param.id, marks=[*param.marks, *variant]))
    return params


def mcmc_of(kernel, method, num_chains=2, **options):
    options = {"num_warmup": WARMUP, "num_samples": DRAWS, "progress_bar": True, **options}
    return MCMC(kernel, num_chains=num_chains, chain_method=method, **options)


def assert_same_chain(draws, name, start=0, stop=DRAWS, step=1):
    """Compare draws of the second chain with those made by hand."""
    expected = by_hand(name)[1]
    chosen = slice(WARMUP + start + step - 1, WARMUP + stop, step)
    np.testing.assert_allclose(draws["w"], expected["w"][chosen], rtol=2e-3, atol=1e-4)
    np.testing.assert_allclose(draws["sigma"], np.exp(expected["sigma"][chosen]), rtol=2e-3)


def second(mcmc):
    return {name: value[1] for name, value in mcmc.get_samples(group_by_chain=True).items()}


@pytest.mark.parametrize("row", kernel_rows("test_vectorized_chains"))
def test_vectorized_chains(row, request):
    """A pickled kernel, legacy keys, `warmup` before `run`, thinning, extra fields, resuming, and the export."""
    name, kernel = request.node.callspec.id, row.make(model)
    mcmc = mcmc_of(pickle.loads(pickle.dumps(kernel)), "vectorized", thinning=2)
    fields = ("base_step_size", "z.sigma")
    mcmc.warmup(jax.random.PRNGKey(3), X, **CALL, extra_fields=fields)
    mcmc.run(mcmc.post_warmup_state.rng_key, X, **CALL, extra_fields=fields)
    # Not `mean`: it is about one minibatch.
    assert set(mcmc.get_samples()) == {"w", "sigma", "precision"}
    assert_same_chain(second(mcmc), name, step=2)
    extra = mcmc.get_extra_fields()
    np.testing.assert_allclose(extra["z.sigma"], np.log(mcmc.get_samples()["sigma"]), rtol=1e-4, atol=1e-5)
    assert extra["base_step_size"].shape == (DRAWS,)
    assert set(extra) == {*fields, *mcmc.sampler.default_fields} - {"z"}
    check_export(mcmc, row, type(kernel).__name__)

    # Resumed with its key a run is one longer run; with another key it is another one.
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(mcmc.last_state.rng_key, X, **CALL, extra_fields=fields)
    resumed = second(mcmc)["w"]
    assert_same_chain(second(mcmc), name, start=DRAWS, stop=2 * DRAWS, step=2)
    mcmc.run(jax.random.PRNGKey(4), X, **CALL, extra_fields=fields)
    assert np.abs(second(mcmc)["w"][-1] - resumed[-1]).max() > 1e-5


def check_export(mcmc, row, algorithm):
    idata = numpyro_bnn.to_inference_data(mcmc, log_likelihood=False, posterior_predictive=False)
    expected = {
        "diverging",
        "step_size",
        "configurational_temperature",
        "gradient_noise",
        "num_gradients",
        "refused_steps",
    }
    expected |= {"kinetic_temperature"} if row.momentum else set()
    expected |= {"acceptance_rate"} if row.exact else set()
    expected |= {"energy_variance", "decoherence_length"} if row.microcanonical else set()
    stats = set(idata["sample_stats"].data_vars) - {"base_step_size", "z.sigma"}
    assert stats == expected  # no `lp`: a minibatch potential is not the log density
    assert set(idata["posterior"].data_vars) == {"w", "sigma", "precision"}
    assert idata.attrs["algorithm"] == algorithm
    assert idata.attrs["biased"] == (not row.exact)
    assert idata.attrs["temperature"] == 1.0
    counts = idata["sample_stats"]["num_gradients"].to_numpy()
    assert (np.diff(counts, axis=1) > 0).all()
    assert counts[0, 0] > 3 * WARMUP


# JAX warns that NumPyro's donated buffers cannot be used under `vmap`.
@pytest.mark.filterwarnings("ignore:Some donated buffers")
@pytest.mark.parametrize(
    ("name", "method", "bar"),
    [
        pytest.param("SGHMC with control variates", "sequential", True, id="sequential", marks=pytest.mark.slow),
        pytest.param("MALA", "parallel", False, id="parallel"),
        pytest.param("GGMC", jax.vmap, False, id="vmap", marks=pytest.mark.slow),
        pytest.param("MCLMC", "parallel", True, id="parallel MCLMC", marks=pytest.mark.slow),
        pytest.param("SGLD", infer.parallel_vectorized, False, id="split over devices"),
    ],
)
def test_other_chain_methods(name, method, bar):
    """Typed keys, with and without progress bar; `test_states_keep_their_types` traces all rows under `vmap`."""
    mcmc = mcmc_of(KERNELS[name].make(model), method, progress_bar=bar)
    mcmc.run(jax.random.key(3), X, **CALL, extra_fields=["~z.precision"])
    assert set(mcmc.get_samples()) == {"w", "sigma"}
    assert_same_chain(second(mcmc), name)
    # What the kernel keeps must not belong to the first compiled program.
    if method in ("parallel", infer.parallel_vectorized):
        mcmc.post_warmup_state = mcmc.last_state
        mcmc.run(mcmc.last_state.rng_key, X, **CALL, extra_fields=["~z.precision"])
        assert_same_chain(second(mcmc), name, start=DRAWS, stop=2 * DRAWS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Some donated buffers")
def test_chains_shared_out_to_devices():
    """Two chains for each of two devices; the export knows no difference."""
    assert jax.local_device_count() == 2
    runs = {}
    for method in (jax.vmap, infer.parallel_vectorized):
        mcmc = mcmc_of(infer.SGLD(model, 1e-3), method, 4, progress_bar=False)
        mcmc.run(jax.random.key(3), X, **CALL)
        idata = numpyro_bnn.to_inference_data(mcmc, log_likelihood=False, posterior_predictive=False)
        assert idata.attrs["chain_method"] == method.__name__
        assert mcmc.get_samples()["w"].devices() == {jax.local_devices()[0]}
        runs[method.__name__] = idata["posterior"]["w"].to_numpy()
    assert runs["vmap"].shape == (4, DRAWS, 2)
    np.testing.assert_allclose(runs["parallel_vectorized"], runs["vmap"], rtol=2e-3, atol=1e-4)


@pytest.mark.slow
def test_data_as_arguments():
    """`jit_model_args`: one program for all data of a shape; nothing of the first data stays in it."""
    once = mcmc_of(KERNELS["MCLMC"].make(model), "vectorized", progress_bar=False, jit_model_args=True)
    for y in (Y, 2.0 - 3.0 * Y):
        each = mcmc_of(KERNELS["MCLMC"].make(model), "vectorized", progress_bar=False)
        for mcmc in (once, each):
            mcmc.run(jax.random.key(3), X, y)
        expected = each.get_samples()["w"]
        np.testing.assert_allclose(once.get_samples()["w"], expected, rtol=2e-3, atol=1e-4)
    assert len(once._cache) == 1


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
    assert len(traced) == (1 if num_chains == 6 else 2)


@pytest.mark.parametrize("row", kernel_rows("test_states_keep_their_types"))
def test_states_keep_their_types(row, x64):
    """Start and transition, traced as `jax.vmap` and parallel chains do."""
    kernel = row.make(model)
    call = {"y": jnp.asarray(Y, jnp.float64), "batch_size": B}
    args = (jnp.asarray(X, jnp.float64),)

    def chain(key):
        first = kernel.init(key, WARMUP, None, model_args=args, model_kwargs=call)
        return first, kernel.sample(first, args, call)

    first, then = jax.eval_shape(jax.vmap(chain), jax.random.split(jax.random.key(0), 2))
    assert jax.tree.map(lambda a: (a.shape, a.dtype), first) == jax.tree.map(lambda a: (a.shape, a.dtype), then)
    floats = [a.dtype for a in jax.tree.leaves(then) if jnp.issubdtype(a.dtype, jnp.floating)]
    assert set(floats) == {jnp.dtype("float64")}


# -- blocks of Gibbs, refresh, wrap_model -----------------------------------------------------------

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


@pytest.mark.filterwarnings("ignore:Some donated buffers")
@pytest.mark.parametrize(
    "kernel",
    [
        infer.MALA(normal_gamma, steps_per_draw=3),
        pytest.param(infer.GGMC(normal_gamma, num_steps=2, steps_per_draw=2), marks=pytest.mark.slow),
        pytest.param(infer.SGHMC(normal_gamma, 0.01, momentum_decay=0.3, steps_per_draw=15), marks=pytest.mark.slow),
    ],
    ids=lambda kernel: type(kernel).__name__,
)
def test_block_of_gibbs_has_the_right_posterior(kernel):
    """tau by the kernel given mu, mu exactly given tau; a cache that is not refreshed shifts its posterior."""
    gibbs = Gibbs([(kernel, ["tau"]), (CustomGibbs(draw_mean), ["mu"])])
    mcmc = MCMC(gibbs, num_warmup=60, num_samples=100, num_chains=100, chain_method=jax.vmap, progress_bar=False)
    mcmc.run(jax.random.key(0), SAMPLE)
    draws = mcmc.get_samples(group_by_chain=True)
    n = SAMPLE.size
    a = 3 + n / 2
    b = 2 + 0.5 * (np.sum((SAMPLE - SAMPLE.mean()) ** 2) + n * SAMPLE.mean() ** 2 / (n + 1))
    mean = SAMPLE.sum() / (n + 1)
    exact = {"tau": a / b, "tau^2": a * (a + 1) / b**2, "mu": mean, "mu^2": mean**2 + b / (a - 1) / (n + 1)}
    for name, value in exact.items():
        site, *power = name.split("^")
        by_chain = np.asarray(draws[site], np.float64) ** (len(power) + 1)
        by_chain = by_chain.mean(1)
        error = by_chain.std() / 10
        # 4 standard errors over 100 chains (failure rate 6e-5 each); SGHMC has a bias of order eps = 1 % at most.
        assert abs(by_chain.mean() - value) < 4 * error + 0.01 * value * (not kernel.exact), name
        assert error < 0.03 * value


def test_gibbs_starts_from_constrained_values():
    """`Gibbs` hands constrained values to `init`, whose unconstrained form may have another shape."""

    def probabilities(y):
        p = numpyro.sample("p", dist.Dirichlet(jnp.ones(3)))
        q = numpyro.sample("q", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(p @ jnp.arange(3.0) + q, 1.0), obs=y)

    def draw(rng_key, gibbs_sites, hmc_sites):
        return {"q": jax.random.normal(rng_key)}

    gibbs = Gibbs([(infer.MALA(probabilities, 0.1), ["p"]), (CustomGibbs(draw), ["q"])])
    given = {"p": jnp.array([0.2, 0.3, 0.5])}
    state = gibbs.init(jax.random.key(0), 0, given, (1.0,), {})
    assert state.z["p"].shape == (2,)
    np.testing.assert_allclose(gibbs.postprocess_fn((1.0,), {})(state.z)["p"], given["p"], rtol=1e-5)


@pytest.mark.parametrize("name", ["MALA", "GGMC", "SGHMC with control variates", "SGNHT", "MCLMC"])
def test_refresh_recomputes_what_is_cached(name):
    kernel = KERNELS[name].make(model)
    state = kernel.init(jax.random.key(0), 0, None, (X,), CALL)
    moved = {"w": jnp.array([0.3, -0.2]), "sigma": jnp.array(0.1)}
    other = {"y": Y + 1.0, "batch_size": B}
    fresh = jax.jit(lambda s: kernel.refresh(s, (X,), other))(state._replace(z=moved))

    def full(z):
        return kernel.target.potential((X,), other, "full")(z)

    value, slope = jax.value_and_grad(full)(moved)
    memory, estimator = fresh.engine.memory, fresh.engine.estimator
    np.testing.assert_array_equal(fresh.engine.position[1:], moved["w"])
    if name in ("MALA", "GGMC"):
        np.testing.assert_allclose(memory.potential, value, rtol=1e-5)
    if name == "MALA":
        np.testing.assert_allclose(memory.gradient, jnp.append(slope["sigma"], slope["w"]), rtol=1e-4)
    if name == "SGHMC with control variates":  # the center stays, the target at it is the new one
        np.testing.assert_array_equal(estimator.position, state.engine.position)
        np.testing.assert_allclose(estimator.potential, full(state.z), rtol=1e-5)
    for kept in ("momentum", "direction", "length"):
        if hasattr(memory, kept):
            np.testing.assert_array_equal(getattr(memory, kept), getattr(state.engine.memory, kept))
    if name in ("SGNHT", "MCLMC"):
        assert np.abs(memory.gradient - state.engine.memory.gradient).min() > 1.0
    # Once more changes nothing: refresh is about the target, not about chance.
    again = kernel.refresh(fresh, (X,), other)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), again.engine, fresh.engine)


def test_wrap_model_leaves_the_kernel_alone():
    kernel = KERNELS["SGHMC"].make(model)
    before = kernel.init(jax.random.key(0), 0, None, (X,), CALL)
    scoped = kernel.wrap_model(lambda fn: handlers.scope(fn, prefix="a"))
    with pytest.raises(ValueError, match="Call `init` first"):
        _ = scoped.target
    assert set(scoped.init(jax.random.key(0), 0, None, (X,), CALL).z) == {"a/w", "a/sigma"}
    assert kernel.model is model
    assert set(kernel.postprocess_fn((X,), CALL)(before.z)) == {"w", "sigma", "precision"}


# -- models of every kind ---------------------------------------------------------------------------


@pytest.mark.slow
def test_random_networks_are_exported_over_all_data():
    """A non-centered prior makes the weights deterministic sites; the export covers the full data in order."""
    bnn = models.regression(nn.MLP([3, 1], "tanh"), priors.Hierarchical())
    mcmc = mcmc_of(infer.SGHMC(bnn, 1e-4, steps_per_draw=3), "sequential", num_chains=1)
    mcmc.run(jax.random.key(0), X, Y, batch_size=B)
    idata = numpyro_bnn.to_inference_data(mcmc, predictions={"x": X[:5], "y": Y[:5]})
    assert idata["posterior"]["net.Dense_0.kernel"].shape == (1, DRAWS, 2, 3)
    assert idata["log_likelihood"]["y"].shape == (1, DRAWS, N)
    np.testing.assert_array_equal(idata["observed_data"]["y"], Y)
    assert idata["predictions"]["y_mean"].shape == (1, DRAWS, 5)
    draw = {name: jnp.asarray(value[-1]) for name, value in mcmc.get_samples().items()}
    trace = handlers.trace(handlers.seed(handlers.substitute(bnn, draw), 0)).get_trace(X, Y)
    expected = trace["y"]["fn"].log_prob(Y)
    np.testing.assert_allclose(idata["log_likelihood"]["y"][0, -1], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_flax_modules():
    """`net$params` starts at random values; it is no randomness of the potential, and parallel chains share it."""
    flax = pytest.importorskip("flax.linen")

    def bnn(x, y, batch_size=None):
        net = random_flax_module("net", flax.Dense(1), dist.Normal(0.0, 1.0), input_shape=(2,))
        with numpyro.plate("data", x.shape[0], subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(net(x[i])[..., 0], 0.5), obs=y[i])

    kernel = infer.GGMC(bnn, 1e-3, steps_per_draw=5)  # refuses random potentials
    mcmc = mcmc_of(kernel, "parallel", num_warmup=20, num_samples=20)
    mcmc.run(jax.random.key(0), X, Y, batch_size=B)
    assert not kernel.target.stochastic
    weights = mcmc.get_samples()["net/kernel"].mean(0)[:, 0]
    least_squares = np.linalg.lstsq(np.asarray(X), np.asarray(Y), rcond=None)[0]
    np.testing.assert_allclose(weights, least_squares, atol=0.3)  # posterior sd 0.08, 40 correlated draws


def test_models_get_fresh_keys_at_every_step():
    """Without other noise (T = 0) each step moves by eps / 2 times the model's own random gradient."""

    def noisy():
        w = numpyro.sample("w", dist.ImproperUniform(dist.constraints.real, (), ()))
        numpyro.factor("f", w * jax.random.normal(numpyro.prng_key()))

    kernel = infer.SGLD(noisy, 2.0, temperature=0.0, steps_per_draw=1, warm_start=0.0)
    state = kernel.init(jax.random.key(0), 0, {"w": jnp.zeros(())}, (), {})
    assert kernel.target.stochastic
    steps = np.diff(scan(kernel, state, 1000, (), {})[1]["w"])
    assert len(np.unique(steps.round(5))) > 950
    assert abs(steps.mean()) < 4 / 1000**0.5  # failure rate 6e-5 each
    assert abs(steps.var() - 1) < 4 * (2 / 1000) ** 0.5


def test_keys_of_one_evaluation_differ():
    """Two layers of dropout have two masks: steps along their sites are uncorrelated, failure rate 6e-5."""

    def noisy():
        for name in ("v", "w"):
            site = numpyro.sample(name, dist.ImproperUniform(dist.constraints.real, (), ()))
            numpyro.factor(f"f_{name}", site * jax.random.normal(numpyro.prng_key()))

    kernel = infer.SGLD(noisy, 2.0, temperature=0.0, steps_per_draw=1, warm_start=0.0)
    state = kernel.init(jax.random.key(0), 0, {"v": jnp.zeros(()), "w": jnp.zeros(())}, (), {})
    draws = scan(kernel, state, 1000, (), {})[1]
    assert abs(np.corrcoef(np.diff(draws["v"]), np.diff(draws["w"]))[0, 1]) < 4 / 1000**0.5
