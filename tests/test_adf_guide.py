"""AutoADF as a NumPyro guide: SVI, chains, streaming, many runs at once, interruption, export, errors."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import tqdm
from numpyro.infer import MCMC, SVI, Trace_ELBO, TraceMeanField_ELBO

import numpyro_bnn as bnn
from numpyro_bnn import guides, infer, nn, priors
from numpyro_bnn.guides.adf.observation import split
from numpyro_bnn.guides.adf.problem import fusion_barrier


def model(x, y=None, batch_size=None):
    prior = {"Dense_0.kernel": priors.GammaPrecision(1.0, 6.0), "*": priors.Normal()}
    net = bnn.random_network("net", nn.MLP([5, 1], "relu"), x.shape[1:], prior)
    tau = numpyro.sample("tau", dist.Gamma(6.0, 1.0))
    with numpyro.plate("data", x.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(net(x[i])[..., 0], tau**-0.5), obs=None if y is None else y[i])


def make_rows(num_rows, seed=0):
    draws = np.random.default_rng(seed)
    x = draws.normal(size=(num_rows, 2))
    return jnp.asarray(x), jnp.asarray(np.abs(x[:, 0]) - 0.8 + 0.3 * draws.normal(size=num_rows))


@pytest.fixture(scope="module")
def rows():
    return make_rows(60)


@pytest.fixture(scope="module")
def fitted(rows):
    pbp = guides.AutoADF(model)
    return pbp, pbp.run(jax.random.key(0), *rows, num_epochs=12, progress_bar=False)


# --------------------------------------------------------------------------------------------- compilation


def test_a_first_run_compiles_few_programs(compiled):
    """What is known is computed on the host; the shapes are new to this process. It was one program per operation."""
    draws = np.random.default_rng(0)
    x = draws.normal(size=(11, 9)).astype("float32")
    pbp = guides.AutoADF(bnn.models.regression(nn.MLP([7, 1], "relu"), priors.Hierarchical()))
    pbp.run(jax.random.key(0), x, x[:, 0], num_epochs=1, progress_bar=False, max_refused=1.0)
    before = len(compiled)
    assert before <= 22
    jax.eval_shape(pbp._start_params)  # as an export does
    assert len(compiled) <= before + 3


# ---------------------------------------------------------------------------------------------- NumPyro


@pytest.mark.slow
def test_elbo_and_fine_tuning(fitted, rows):
    """From the ADF solution SVI improves the ELBO; the two forms of the ELBO agree."""
    pbp, fit = fitted
    svi = SVI(model, pbp, numpyro.optim.Adam(3e-3), Trace_ELBO(num_particles=20))
    state = svi.init(jax.random.key(0), *rows, init_params=fit.params)
    for name, value in svi.get_params(state).items():
        np.testing.assert_allclose(value, fit.params[name], rtol=1e-4)
    analytic, before = (
        jax.jit(lambda key, loss=loss: loss(num_particles=400).loss(key, fit.params, model, pbp, *rows))(key)
        for key, loss in ((jax.random.key(0), TraceMeanField_ELBO), (jax.random.key(1), Trace_ELBO))
    )
    # 400 particles of a loss with an sd near 25: 5 standard errors of the difference.
    assert float(analytic) == pytest.approx(float(before), abs=9)
    tuned = svi.run(jax.random.key(1), 300, *rows, init_params=fit.params, progress_bar=False)
    assert np.isfinite(tuned.losses).all()
    after = float(tuned.losses[-50:].mean())
    assert after < before
    mean, var = pbp.predictive_moments(tuned.params, rows[0])
    assert float(jnp.sqrt(jnp.mean((mean - rows[1]) ** 2))) < 0.6
    assert bool((var > 0).all())


@pytest.mark.slow
def test_guide_without_a_run_starts_at_the_prior(rows):
    """SVI alone: parameters start at the prior's moments."""
    pbp = guides.AutoADF(model)
    svi = SVI(model, pbp, numpyro.optim.Adam(1e-2), Trace_ELBO())
    params = svi.get_params(svi.init(jax.random.key(0), *rows, batch_size=20))
    # w ~ N(0, 1 / (2 tau)), tau ~ Gamma(3, 3): E[1 / tau] = 1.5.
    np.testing.assert_allclose(params["net/Dense_0.kernel_auto_scale"], 0.75**0.5, rtol=1e-5)
    np.testing.assert_allclose(params["tau_auto_concentration"], 6, rtol=1e-5)
    assert np.isfinite(svi.run(jax.random.key(0), 5, *rows, batch_size=20, progress_bar=False).losses).all()


@pytest.mark.slow
def test_chains_start_from_it(fitted, rows):
    pbp, fit = fitted
    draws = pbp.sample_posterior(jax.random.key(0), fit.params, sample_shape=(2,))
    unconstrained = {
        name: jnp.log(value) if name.endswith(("precision", "tau")) else value
        for name, value in draws.items()
        if name != "net/Dense_0.kernel"  # deterministic: the sampled site is its base
    }
    sgld = MCMC(
        infer.SGLD(model, 1e-5, steps_per_draw=2), num_warmup=0, num_samples=2, num_chains=2,
        chain_method="vectorized", progress_bar=False,
    )  # fmt: skip
    sgld.run(jax.random.key(1), *rows, batch_size=20, init_params=unconstrained)
    first = sgld.get_samples(group_by_chain=True)["tau"][:, 0]
    np.testing.assert_allclose(first, draws["tau"], rtol=0.2)


@pytest.mark.slow
def test_draws_have_the_analytic_moments(fitted):
    """Predictive moments of 20,000 draws: 5 standard errors, plus the independence that moments assume (5 %)."""
    pbp, fit = fitted
    x = make_rows(8, seed=3)[0]
    draws = pbp.sample_posterior(jax.random.key(0), fit.params, sample_shape=(20_000,))
    kernels = [draws[f"net/Dense_{k}.{part}"] for k in range(2) for part in ("kernel", "bias")]

    def network(w0, b0, w1, b1):
        return (jax.nn.relu(x @ w0 + b0) @ w1 + b1)[:, 0]

    f = jax.vmap(network)(*kernels)
    mean, var = pbp.predictive_moments(fit.params, x, noise=False)
    error = np.sqrt(np.asarray(var) / 20_000)
    assert np.all(np.abs(f.mean(0) - mean) < 5 * error + 1e-4)
    np.testing.assert_allclose(f.var(0), var, rtol=0.10)
    noisy = pbp.predictive_moments(fit.params, x)
    tau = fit.state.hyperparameters["tau"]
    np.testing.assert_allclose(noisy[1] - var, float(tau.rate / (tau.concentration - 1)), rtol=1e-3)


def test_bases_of_noncentered_weights_give_the_weights_of_the_guide(fitted, rows):
    """Given a draw of the precision the base is normal: one sd from its mean the weight is one sd from its mean."""
    pbp, fit = fitted
    guide = numpyro.handlers.substitute(numpyro.handlers.seed(pbp, 0), fit.params)
    drawn = numpyro.handlers.trace(guide).get_trace(*rows)
    kernel = "net/Dense_0.kernel"
    base = drawn[f"{kernel}_base"]["fn"]
    scales = {name: site["value"] for name, site in drawn.items() if name.endswith("precision")}
    assert len(scales) == 1
    loc, scale = (fit.params[f"{kernel}_auto_{field}"] for field in ("loc", "scale"))
    for away in (0.0, 1.0, -2.0):
        values = {**scales, f"{kernel}_base": base.mean + away * jnp.sqrt(base.variance)}
        seeded = numpyro.handlers.seed(numpyro.handlers.substitute(model, values), 0)
        found = numpyro.handlers.trace(seeded).get_trace(*rows)[kernel]["value"]
        np.testing.assert_allclose(found, loc + away * scale, rtol=1e-5, atol=1e-6)


def test_guide_survives_pickling(fitted, rows):
    pbp, fit = fitted
    again = pickle.loads(pickle.dumps(pbp))
    np.testing.assert_allclose(
        again.predictive_moments(fit.params, rows[0])[0], pbp.predictive_moments(fit.params, rows[0])[0]
    )


@pytest.mark.parametrize("key", [jax.random.key(4), jax.random.PRNGKey(4)], ids=["typed", "legacy"])
def test_keys_of_both_kinds(fitted, rows, key):
    pbp = fitted[0]
    fit = pbp.run(key, *rows, num_epochs=1, progress_bar=False)
    assert pbp.sample_posterior(key, fit.params)["net/Dense_0.kernel"].shape == (2, 5)


# ------------------------------------------------------------------------------------------- many, streaming


def test_runs_at_once_are_the_runs_one_by_one(fitted, x64):
    """Data sets along ``in_axes`` and random starts: the same numbers as single runs with the same keys."""
    keys = jax.random.split(jax.random.key(5), 3)
    x = jnp.stack([make_rows(60, seed)[0] for seed in range(3)])
    y = jnp.stack([make_rows(60, seed)[1] for seed in range(3)])
    pbp = fitted[0]
    together = pbp.run(keys, x, y, in_axes=(0, 0), num_epochs=2, progress_bar=False)
    assert together.losses.shape == together.refused.shape == (3, 2)
    for k in range(3):
        single = pbp.run(keys[k], x[k], y[k], num_epochs=2, progress_bar=False)
        for name, value in single.params.items():
            assert value.dtype == jnp.float64
            np.testing.assert_allclose(together.params[name][k], value, rtol=1e-9, atol=1e-12)
    starts = pbp.run(keys, x[1], y[1], num_epochs=2, progress_bar=False)
    np.testing.assert_allclose(starts.params["tau_auto_rate"][1], together.params["tau_auto_rate"][1], rtol=1e-9)
    means = jax.vmap(lambda params: pbp.predictive_moments(params, x[0])[0])(together.params)
    assert means.shape == (3, 60)


@pytest.mark.parametrize(
    "transform",
    [
        pytest.param(jax.jit, id="jit"),
        pytest.param(lambda fn: lambda key: jax.vmap(fn)(key[None]), id="vmap", marks=pytest.mark.slow),
    ],
)
def test_run_can_be_traced(fitted, rows, transform, x64):
    """Inside the user's own transformation all epochs are one loop; the result is the same."""
    pbp = fitted[0]

    def learn(key):
        return pbp.run(key, *rows, num_epochs=2, progress_bar=False).losses

    expected = learn(jax.random.key(6))
    np.testing.assert_allclose(jnp.ravel(transform(learn)(jax.random.key(6))), expected, rtol=1e-5)


def test_streaming_is_one_pass(rows, x64):
    """Absorbing all rows in two pieces, in order, equals one epoch in that order without refinement of scales."""

    def fixed(x, y=None):
        net = bnn.random_network("net", nn.MLP([5, 1], "relu"), x.shape[1:], priors.Normal())
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Normal(net(x)[..., 0], 0.3), obs=y)

    pbp = guides.AutoADF(fixed)
    x, y = rows
    order = np.arange(60)[None]
    whole = pbp.run(jax.random.key(7), x, y, num_epochs=1, orders=order, progress_bar=False)
    svi = SVI(fixed, pbp, numpyro.optim.Adam(1e-3), Trace_ELBO())
    params = svi.get_params(svi.init(jax.random.key(0), x, y))
    start = {name: jnp.asarray(value) for name, value in params.items()}
    means = {name: start[f"{name}_auto_loc"] for name in whole.state.weights}
    whole = pbp.run(jax.random.key(7), x, y, num_epochs=1, orders=order, init_means=means, progress_bar=False)
    pieces = pbp.update(pbp.update(start, x[:25], y[:25]), x[25:], y[25:])
    for name, value in whole.params.items():
        np.testing.assert_allclose(pieces[name], value, rtol=1e-6, atol=1e-9)


def test_a_run_continues_from_its_state(fitted, rows, x64):
    pbp = fitted[0]
    orders = np.stack([np.random.default_rng(k).permutation(60) for k in range(3)])
    whole = pbp.run(jax.random.key(8), *rows, num_epochs=3, orders=orders, progress_bar=False)
    first = pbp.run(jax.random.key(8), *rows, num_epochs=2, orders=orders[:2], progress_bar=False)
    rest = pbp.run(
        jax.random.key(9), *rows, num_epochs=1, orders=orders[2:], init_state=first.state, progress_bar=False
    )
    for name, value in whole.params.items():
        np.testing.assert_allclose(rest.params[name], value, rtol=1e-10)


def test_float64_inside_and_settings_untouched(fitted, rows):
    """With x64 off parameters are float32, the state float64, and the run that of a session with x64 on."""
    pbp = fitted[0]
    fit = pbp.run(jax.random.key(0), *rows, num_epochs=2, progress_bar=False)
    assert not jax.config.jax_enable_x64
    assert {value.dtype for value in fit.params.values()} == {jnp.dtype("float32")}
    assert {leaf.dtype for leaf in jax.tree.leaves(fit.state)} == {jnp.dtype("float64")}
    with jax.enable_x64(True):
        wide = guides.AutoADF(model).run(jax.random.key(0), *rows, num_epochs=2, progress_bar=False)
    for one, two in zip(jax.tree.leaves(fit.state), jax.tree.leaves(wide.state), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-7)


def test_a_compiled_float32_program_is_refused(fitted, rows):
    """JAX would cut float64 to float32 there; vmap alone runs in float64."""
    pbp, fit = fitted
    with pytest.raises(ValueError, match="compiled float32 program"):
        jax.jit(lambda x: pbp.predictive_moments(fit.params, x))(rows[0])
    mapped = jax.vmap(lambda x: pbp.predictive_moments(fit.params, x)[0])(rows[0][None])
    np.testing.assert_allclose(mapped[0], pbp.predictive_moments(fit.params, rows[0])[0], rtol=1e-6)


# ------------------------------------------------------------------------------------------ while it runs


def test_progress_bar_counts_epochs(fitted, rows, monkeypatch):
    shown = []

    class Bar(tqdm.std.tqdm):
        def set_postfix_str(self, text="", refresh=True):
            shown.append(text)

    monkeypatch.setattr(tqdm, "trange", lambda n, **options: Bar(range(n), **options))
    fitted[0].run(jax.random.key(0), *rows, num_epochs=3)
    assert len(shown) == 3
    assert all(text.startswith("log evidence") for text in shown)


def interrupted_after(epochs, monkeypatch):
    class Bar(tqdm.std.tqdm):
        def __iter__(self):
            for k in range(100):
                if k == epochs:
                    raise KeyboardInterrupt
                yield k

    monkeypatch.setattr(tqdm, "trange", lambda n, **options: Bar(range(n), **options))


def test_interruption_keeps_finished_epochs(fitted, rows, monkeypatch, x64):
    pbp = fitted[0]
    orders = np.stack([np.random.default_rng(k).permutation(60) for k in range(9)])
    two = pbp.run(jax.random.key(8), *rows, num_epochs=2, orders=orders[:2], progress_bar=False)
    interrupted_after(2, monkeypatch)
    with pytest.warns(UserWarning, match="2 of 9 epochs"):
        fit = pbp.run(jax.random.key(8), *rows, num_epochs=9, orders=orders, progress_bar=False)
    assert fit.losses.shape == (2,)
    for name, value in two.params.items():
        np.testing.assert_allclose(fit.params[name], value, rtol=1e-12)
    interrupted_after(0, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        pbp.run(jax.random.key(8), *rows, num_epochs=9, progress_bar=False)


def test_refused_updates_are_reported():
    """A likelihood that oscillates too fast for the quadrature: those updates are refused, one row in two."""

    class Wave(dist.Normal):
        def log_prob(self, value):
            return jnp.sin(1300 * self.loc) * value

    def awkward(y):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        with numpyro.plate("data", y.shape[0]):
            numpyro.sample("y", Wave(jnp.tanh(w.sum()), 0.01), obs=y)

    y = jnp.where(jnp.arange(40) % 2 == 0, 4.0, 0.0)
    with pytest.warns(UserWarning, match="of the updates of weights in epoch 1, more than 1%"):
        fit = guides.AutoADF(awkward).run(jax.random.key(0), y, num_epochs=2, max_refused=0.01, progress_bar=False)
    assert fit.refused[0] > 0.01
    assert all(bool((weight.var > 0).all()) for weight in fit.state.weights.values())


# ----------------------------------------------------------------------------------------------- pieces


def test_rewriting_changes_no_number():
    """The gradient of a network's output, with and without the division by one, bit by bit."""
    draws = np.random.default_rng(0)
    x, w, v = (jnp.asarray(draws.normal(size=shape)) for shape in ((1, 4), (4, 6), (6, 1)))
    gradient = jax.grad(lambda w: (jnp.tanh(x @ w) @ v).sum())
    np.testing.assert_array_equal(fusion_barrier(gradient, jnp.ones(()))(w), gradient(w))
    divisions = str(jax.make_jaxpr(lambda w, one: fusion_barrier(gradient, one)(w))(w, 1.0)).count(" div ")
    assert divisions == 2


@pytest.mark.parametrize(
    ("program", "shape"),
    [
        (lambda w, x: jnp.exp(x @ w), (1,)),
        (lambda w, x: jax.nn.softplus((x @ w)[..., 0] * 2 + 1), ()),
        (lambda w, x: 1 / (1 + jnp.exp(-(x @ w))), (1,)),
        (lambda w, x: jax.jit(lambda f: jnp.exp(f) + 1)(x @ w), (1,)),
    ],
)
def test_cut_in_front_of_elementwise_functions(program, shape):
    """Head and tail put together are the program, and the head is linear in the weights."""
    x, w = jnp.array([0.3, -0.7]), jnp.array([[1.0], [2.0]])
    cut = split(lambda w, x: {"rate": program(w, x)}, w, x, keep=())
    head = cut.head(w, x)
    np.testing.assert_allclose(cut.tail(head, x)["rate"], program(w, x), rtol=1e-6)
    assert cut.nonlinear == {"rate"}
    slope = cut.head(2 * w, x)["rate"] - head["rate"]
    np.testing.assert_allclose(cut.head(3 * w, x)["rate"] - head["rate"], 2 * slope, rtol=1e-5)


# ------------------------------------------------------------------------------------------------ export


def test_results_become_arviz(fitted, rows):
    pbp, fit = fitted
    x, y = rows
    idata = bnn.to_inference_data(
        fit, {"x": x[:5], "y": y[:5]}, guide=pbp, args=(x, y), num_samples=30, attrs={"note": "short"}
    )
    assert dict(idata["posterior"]["net.Dense_0.kernel"].sizes) == {
        "chain": 1, "draw": 30, "net.Dense_0.kernel_in": 2, "net.Dense_0.kernel_out": 5,
    }  # fmt: skip
    assert dict(idata["predictions"]["y_mean"].sizes) == {"chain": 1, "draw": 30, "data": 5}
    assert dict(idata["log_likelihood"]["y"].sizes) == {"chain": 1, "draw": 30, "data": 60}
    assert idata.attrs["algorithm"] == "AutoADF"
    assert idata.attrs["num_steps"] == 12
    mean, var = pbp.predictive_moments(fit.params, x[:5])
    # 30 draws: the mean is off by sd / sqrt(30); 5 of these.
    found = np.asarray(idata["predictions"]["y"]).mean((0, 1))
    assert np.all(np.abs(found - mean) < 5 * np.sqrt(var / 30))


@pytest.mark.slow
def test_results_of_svi_become_arviz(rows):
    guide = numpyro.infer.autoguide.AutoNormal(model)
    svi = SVI(model, guide, numpyro.optim.Adam(1e-2), Trace_ELBO())
    result = svi.run(jax.random.key(0), 20, *rows, progress_bar=False)
    idata = bnn.to_inference_data(result, guide=guide, args=rows, num_samples=10)
    assert idata.attrs["algorithm"] == "AutoNormal"
    assert dict(idata["posterior"]["tau"].sizes) == {"chain": 1, "draw": 10}
    with pytest.raises(ValueError, match="`guide=` and `args=`"):
        bnn.to_inference_data(result)
    with pytest.raises(TypeError, match="Pass the guide of the result"):
        bnn.to_inference_data(result, guide=model, args=rows)
    with pytest.raises(ValueError, match="num_samples"):
        bnn.to_inference_data(result, guide=guide, args=rows, num_samples=0)


# ------------------------------------------------------------------------------------------------ errors


def one_weight(likelihood, prior=None):
    def built(x, y=None):
        w = numpyro.sample("w", prior() if prior else dist.Normal(0.0, 1.0))
        with numpyro.plate("data", x.shape[0]):
            likelihood(w, x, y)

    return built


def sample_y(fn, y):
    return numpyro.sample("y", fn, obs=y)


def wide_hyper():
    a, b = numpyro.sample("a", dist.HalfNormal(1.0)), numpyro.sample("b", dist.HalfNormal(1.0))
    return dist.Normal(0.0, a * b)


def shifted():
    return dist.Normal(numpyro.sample("center", dist.HalfNormal(1.0)), 1.0)


def nested():
    outer = numpyro.sample("outer", dist.HalfNormal(1.0))
    return dist.Normal(0.0, numpyro.sample("inner", dist.HalfNormal(outer)))


def vague():
    return dist.Normal(0.0, numpyro.sample("tau", dist.Gamma(0.5, 1.0)) ** -0.5)


def exponential():
    return dist.Normal(0.0, jnp.exp(numpyro.sample("scale", dist.HalfNormal(1.0))))


def noise_and_scale(x, y=None):
    tau = numpyro.sample("tau", dist.Gamma(6.0, 6.0))
    w = numpyro.sample("w", dist.Normal(0.0, tau**-0.5))
    numpyro.sample("y", dist.Normal(w * x, tau**-0.5), obs=y)


def no_weights(x, y=None):
    numpyro.sample("y", dist.Normal(x, numpyro.sample("sigma", dist.HalfNormal(1.0))), obs=y)


def local_latent(x, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", x.shape[0]):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(w * x + z, 1.0), obs=y)


def two_observations(x, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(w * x, 1.0), obs=y)
    numpyro.sample("again", dist.Normal(w * x, 1.0), obs=y)


def factor(w, x, y):
    numpyro.factor("y", -((y - w * x) ** 2))


def with_param(w, x, y):
    sample_y(dist.Normal(w * x, numpyro.param("sigma", 1.0)), y)


def discrete(w, x, y):
    sample_y(dist.Normal(w * x + numpyro.sample("k", dist.Bernoulli(0.5)), 1.0), y)


def softmax(x, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    sample_y(dist.Categorical(probs=jax.nn.softmax(x[:, None] * w)), jnp.zeros_like(x) * y)


def dependent_classes(x, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    f, g = x * w[0], x * w[1]
    sample_y(dist.Categorical(logits=jnp.stack([f, g, f + g], -1)), jnp.zeros_like(x) * y)


def scaled_by_hand(x, y=None):
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    sample_y(dist.Normal(jnp.stack([x, x**2], -1) @ (tau * w), 1.0), y)


def horseshoe(x, y=None):
    local = numpyro.sample("local", dist.HalfCauchy(1.0).expand([2]).to_event(1))
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    sample_y(dist.Normal(jnp.stack([x, x**2], -1) @ (local * w), 1.0), y)


def moved():
    return dist.Normal(numpyro.sample("center", dist.Normal(0.0, 1.0)), 1.0)


def log_scaled():
    return dist.Normal(0.0, jnp.exp(numpyro.sample("log_scale", dist.Normal(0.0, 1.0))))


def heavy_tailed():
    return dist.StudentT(2.0, 0.0, 1.0)


def moved_targets(w, x, y):
    sample_y(dist.Normal(w * x, 1.0), y - w)


def joint(w, x, y):
    sample_y(dist.MultivariateNormal((w * x)[:, None] * jnp.ones(2), jnp.eye(2)), jnp.zeros((x.shape[0], 2)))


def imputed(w, x, y):
    numpyro.sample("y", dist.Normal(w * x, 1.0), obs=y, obs_mask=x > 0)


def masked_prior():
    return dist.Normal(0.0, 1.0).mask(False)


def scaled_prior(x, y=None):
    with numpyro.handlers.scale(scale=3.0):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(w * x, 1.0), obs=y)


def outside_data(w, x, y):
    sample_y(dist.Normal(w * x, 1.0), jnp.arange(4.0))


def outside_mask(x, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(w * x, 1.0).mask(jnp.arange(4) < 2), obs=y)


def simple(w, x, y):
    sample_y(dist.Normal(w * x, 1.0), y)


REFUSED = {
    "two hyper-sites": (one_weight(simple, wide_hyper), "site 'w', scaled by 'a' and 'b'"),
    "random mean": (one_weight(simple, shifted), "site 'w', whose prior mean depends on 'center'"),
    "hyper-hyper-site": (one_weight(simple, nested), "site 'inner', whose prior depends on 'outer'"),
    "vague precision": (one_weight(simple, vague), "site 'tau', a Gamma with concentration 0.5"),
    "exponential scale": (one_weight(simple, exponential), "not a constant times a power of 'scale'"),
    "noise that scales": (noise_and_scale, "site 'tau', which scales 'w' and also enters the likelihood"),
    "no weights": (no_weights, "no weights"),
    "local latent": (local_latent, "site 'z', inside the plate 'data'"),
    "two observations": (two_observations, "2 observed sites \\('y', 'again'\\)"),
    "factor": (one_weight(factor), "site 'y', a `factor` statement"),
    "param": (one_weight(with_param), "site 'sigma', a `param` site"),
    "discrete": (one_weight(discrete), "site 'k', which is discrete"),
    "scaled by hand": (scaled_by_hand, "site 'tau', a HalfNormal from which the pred"),
    "horseshoe by hand": (horseshoe, "site 'local', a HalfCauchy from which the pred"),
    "random center": (one_weight(simple, moved), "site 'w', whose prior depends on 'center'"),
    "log scale": (one_weight(simple, log_scaled), "site 'w', whose prior depends on 'log_scale'"),
    "infinite variance": (one_weight(simple, heavy_tailed), "site 'w', whose prior has no finite variance"),
    "random targets": (one_weight(moved_targets), "site 'y', whose values, or mask, depend on 'w'"),
    "dependent classes": (dependent_classes, "3 linear predictors for one row are functions of each other"),
    "softmax": (softmax, "not an elementwise function of a linear predictor"),
    "imputed": (one_weight(imputed), "site 'y_unobserved' of `obs_mask`"),
    "masked prior": (one_weight(simple, masked_prior), "site 'w', whose prior is masked or scaled"),
    "scaled prior": (scaled_prior, "site 'w', whose prior is masked or scaled"),
    "targets that are no argument": (one_weight(outside_data), r"of shape \(4,\) for one row of the data"),
    "mask that is no argument": (outside_mask, r"of shape \(4,\) for one row of the data"),
    "joint": (one_weight(joint), "site 'y', a MultivariateNormal"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_handled(name):
    refused, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        guides.AutoADF(refused).run(jax.random.key(0), jnp.ones(4), jnp.ones(4), num_epochs=1, progress_bar=False)


def test_wrong_options(rows):
    pbp = guides.AutoADF(model)
    key, (x, y) = jax.random.key(0), rows
    for options, message in (
        ({"num_epochs": 0}, "num_epochs"),
        ({"max_refused": 2.0}, "max_refused"),
        ({"in_axes": (0, 0)}, "one key per data set"),
        ({"orders": np.zeros((1, 60), int), "num_epochs": 1}, "permutations"),
    ):
        with pytest.raises(ValueError, match=message):
            pbp.run(key, x, y, progress_bar=False, **options)
    with pytest.raises(ValueError, match="NaN or infinite"):
        pbp.run(key, x, y.at[3].set(jnp.nan), progress_bar=False)
    with pytest.raises(ValueError, match="0 observed sites"):
        pbp.run(key, x, progress_bar=False)
    with pytest.raises(ValueError, match="an axis or None"):
        pbp.run(jax.random.split(key, 2), x, y, in_axes=(0,), progress_bar=False)
    with pytest.raises(TypeError, match="Pass a NumPyro model"):
        guides.AutoADF("model")
    with pytest.raises(ValueError, match="Call `run` of this guide first"):
        guides.AutoADF(model).predictive_moments({}, x)


def test_new_data_must_look_like_the_old(fitted, rows):
    pbp, fit = fitted
    x, y = rows
    with pytest.raises(ValueError, match=r"Pass \(N, 2\), rows as in the run"):
        pbp.predictive_moments(fit.params, x[:, :1])
    with pytest.raises(ValueError, match="mismatched lengths"):
        pbp.update(fit.params, x[:3], y[:2])
    with pytest.raises(ValueError, match="NaN or infinite"):
        pbp.log_predictive_density(fit.params, x.at[0, 0].set(jnp.inf), y)


def test_rows_must_be_independent(rows):
    """Inputs centered inside the model."""

    def centered(x, y=None):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Normal((x - x.mean(0)) @ w, 1.0), obs=y)

    with pytest.raises(ValueError, match="rows influence each other"):
        guides.AutoADF(centered).run(jax.random.key(0), *rows, num_epochs=1, progress_bar=False)
