"""Warm-up of the microcanonical kernel, the bias it reports, and warm-started ensembles."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import lax
from numpyro.infer import MCMC, NUTS
from scipy import stats
from sklearn import datasets

import numpyro_bnn as bnn
from numpyro_bnn import infer, models, nn
from numpyro_bnn.infer.tuning import Stages, autocorrelation_time
from numpyro_bnn.infer.warm_start import NUM_KEYS, held_out_rows, held_out_score

SCALES = np.exp(np.linspace(-1.5, 1.5, 40)).astype(np.float32)
CORRELATION = 0.7


def gaussian():
    """Pairs of correlated coordinates of 40 scales: a diagonal preconditioner cannot make it round."""
    mean = numpyro.sample("x", dist.Normal(0.0, SCALES).to_event(1))
    root = (1 - CORRELATION**2) ** 0.5
    numpyro.sample("y", dist.Normal(CORRELATION * mean, root * SCALES).to_event(1))


def run(kernel, num_warmup, num_samples, *args, chains=4, seed=0, **kwargs):
    mcmc = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(seed), *args, **kwargs)
    return mcmc


def mean_squares(mcmc):
    draws = mcmc.get_samples(group_by_chain=True)
    both = np.concatenate([np.asarray(draws[name], np.float64) / SCALES for name in ("x", "y")], -1)
    return (both**2).mean((1, 2))  # by chain


@pytest.mark.parametrize("integrator", ["mclachlan", pytest.param("leapfrog", marks=pytest.mark.slow)])
def test_warm_up_meets_its_target_and_tells_the_bias(integrator):
    mcmc = run(infer.MCLMC(gaussian, integrator=integrator, steps_per_draw=20), 400, 1000)
    state, kernel = mcmc.last_state, mcmc.sampler
    fields = mcmc.get_extra_fields(group_by_chain=True)
    first, target = kernel.energy_targets
    assert first == 100 * target  # or where steps have errors of a quarter of the largest that is taken
    np.testing.assert_allclose(infer.implied_bias(target), 0.05)
    # Energy errors of 1500 correlated steps of warm-up: relative standard error about (2 / 400)^(1/2).
    energy = np.asarray(fields["energy_variance"]).mean(1)
    np.testing.assert_allclose(energy, target, rtol=0.35)
    about = kernel.describe(state)
    np.testing.assert_allclose(about["implied_bias"], infer.implied_bias(energy.max()), rtol=1e-3)
    assert about["biased"]
    # The mean over directions of the bias is within what is said, and visible.
    squares = mean_squares(mcmc)
    print(f"{integrator}: variances off by {squares.mean() - 1:.4f}, implied {about['implied_bias']:.4f}")
    error = 2 * squares.std() / len(squares) ** 0.5  # of four chains: a t distribution
    assert abs(squares.mean() - 1) < about["implied_bias"] + 3 * error
    # The length is that of a spread of one in 80 whitened directions; scales are those of the prior.
    np.testing.assert_allclose(state.decoherence_length, 80**0.5, rtol=0.35)
    learned = np.asarray(state.engine.adaptation)[:, :40]
    ratio = np.log(learned / SCALES)
    assert np.abs(ratio - ratio.mean(1, keepdims=True)).max() < 0.35
    idata = bnn.to_inference_data(mcmc)
    assert idata["sample_stats"]["energy_variance"].shape == (4, 1000)
    assert idata["sample_stats"]["decoherence_length"].shape == (4, 1000)
    assert "implied_bias_bound" in idata.attrs


@pytest.mark.slow
def test_the_bias_falls_with_the_target():
    """A hundredth of the energy variance: a bias smaller by 100^(1/3) = 4.6, within what chance makes of it."""

    def normal():
        numpyro.sample("x", dist.Normal(0.0, 1.0).expand([4000]).to_event(1))

    def bias(target):
        kernel = infer.MCLMC(
            normal, integrator="leapfrog", energy_variance=target, preconditioner="identity", steps_per_draw=10
        )
        mcmc = run(kernel, 120, 150, chains=2)
        energy = float(np.mean(mcmc.last_state.tuning.energy))
        squares = np.asarray(mcmc.get_samples()["x"], np.float64) ** 2
        return squares.mean() - 1, energy, squares.mean(0).std() / 4000**0.5

    large, above, error = bias(1e-2)
    small, below, other = bias(1e-4)
    spread = np.hypot(error / large, other / small) / np.log(above / below)
    order = np.log(large / small) / np.log(above / below)
    print(f"energy variances {above:.2g}, {below:.2g}: biases {large:.4f}, {small:.4f}; order {order:.3f}")
    assert spread < 0.05
    assert abs(order - 1 / 3) < 4 * spread + 0.02


def test_fixed_values_stay():
    kernel = infer.MCLMC(gaussian, 0.3, decoherence_length=4.0, preconditioner="identity", steps_per_draw=5)
    state = run(kernel, 60, 5, chains=2).last_state
    np.testing.assert_allclose(state.step_size, 0.3)
    np.testing.assert_allclose(state.decoherence_length, 4.0)
    with pytest.raises(ValueError, match="have no noise"):
        run(infer.MCLMC(gaussian, preconditioner="gradient_noise"), 8, 1)


def test_a_divergence_in_warm_up_is_undone():
    """A wall behind which there is no gradient, and a first step that leaps over it."""

    def walled():
        numpyro.sample("x", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        x = numpyro.sample("w", dist.Normal(0.0, 1.0))
        numpyro.factor("wall", jnp.where(jnp.abs(x) < 3, jnp.sqrt(9 - x**2), jnp.nan))

    kernel = infer.MCLMC(walled, energy_variance=1e-3, steps_per_draw=10, warm_start=0.0, preconditioner="identity")
    start = {"x": jnp.zeros((4, 3)), "w": jnp.zeros(4)}
    state = kernel.init(jax.random.split(jax.random.key(0), 4), 60, start, (), {})

    def transition(state, _):
        before = jnp.where(state.i == 1, 50.0, state.base_step_size)  # far too large
        state = kernel.sample(state._replace(base_step_size=before), (), {})
        return state, (state.base_step_size, state.z["w"], state.engine.step[0])

    state, (sizes, w, steps) = jax.jit(lambda s: lax.scan(transition, s, None, 60))(state)
    assert np.isfinite(w).all()
    assert (np.asarray(state.engine.first_divergence) == -1).all()
    assert (sizes[1] < 50).all()
    assert (sizes[-1] < 3).all()
    np.testing.assert_array_equal(np.diff(steps), 10)  # no random number is used twice


# -- refused steps ----------------------------------------------------------------------------------


KNOWN = 2 * np.random.default_rng(0).normal(size=500).astype(np.float32)


def funnel():
    """A learned scale of 500 weights that the data know well: its direction has rare, very large energy errors."""
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([500]).to_event(1))
    numpyro.sample("y", dist.Normal(scale * z, 0.2).to_event(1), obs=KNOWN)


def test_tiny_errors_at_the_mode_do_not_lengthen_the_steps_at_once():
    """The first transitions have errors of 1e-11; they tripled the step size, and errors of 100 nats followed. No
    step that is kept has an error above the limit."""
    kernel = infer.MCLMC(funnel, warm_start=0.0, steps_per_draw=30)
    mcmc = MCMC(kernel, num_warmup=60, num_samples=40, num_chains=4, chain_method="vectorized", progress_bar=False)
    start = {"scale": jnp.full(4, np.log(2.0)), "z": jnp.tile(KNOWN / 2, (4, 1))}
    mcmc.warmup(
        jax.random.key(0), init_params=start, extra_fields=("energy_variance", "step_size"), collect_warmup=True
    )
    sizes = np.asarray(mcmc.get_extra_fields(group_by_chain=True)["step_size"])
    assert (sizes[:, 1:] / sizes[:, :-1]).max() < 1.2501
    mcmc.run(jax.random.key(1), extra_fields=("energy_variance",))
    limit = kernel.max_energy_error(501)
    assert np.asarray(mcmc.get_extra_fields()["energy_variance"]).max() <= limit**2 / 501
    about = bnn.to_inference_data(mcmc).attrs
    assert about["implied_bias"] < 0.1
    assert about["frozen"] == "[False, False, False, False]"
    assert about["max_energy_error"] == pytest.approx(limit)
    assert max(json.loads(about["refused_steps"])) < 0.02


def test_a_cliff_that_no_gradient_shows_is_not_passed():
    """Most steps see gradients only: they are undone together. The density up to the edge is the truncated one."""

    def cliff():
        x = numpyro.sample("x", dist.Normal(0.0, 1.0).expand([20]).to_event(1))
        numpyro.factor("cliff", jnp.where(x[0] > 1.0, -1e4, 0.0))

    kernel = infer.MCLMC(cliff, 0.4, warm_start=0.0, steps_per_draw=40, preconditioner="identity")
    start = {"x": jnp.zeros((16, 20))}
    mcmc = MCMC(kernel, num_warmup=10, num_samples=400, num_chains=16, chain_method="vectorized", progress_bar=False)
    mcmc.run(jax.random.key(0), init_params=start, extra_fields=("refused_steps",))
    x = np.asarray(mcmc.get_samples(group_by_chain=True)["x"], np.float64)[..., 0]
    assert x.max() <= 1
    refused = np.asarray(mcmc.get_extra_fields(group_by_chain=True)["refused_steps"])
    assert set(np.unique(np.round(40 * refused))) >= {0, 30}  # blocks of thirty, and single steps
    exact = stats.truncnorm(-np.inf, 1.0).mean()
    means = x.mean(1)
    error = means.std(ddof=1) / 4
    print(f"mean {means.mean():.4f}, exact {exact:.4f}, standard error {error:.4f}")
    assert abs(means.mean() - exact) < 5 * error  # t with 15 degrees of freedom: failure rate 2e-4
    assert error < 0.05


def test_steps_that_are_not_finite_are_not_taken():
    """After warm-up too: a region without density is a wall, not the end of the chain."""

    def walled():
        x = numpyro.sample("x", dist.Normal(0.0, 1.0).expand([10]).to_event(1))
        numpyro.factor("wall", jnp.where(x[0] < 1, 0.0, jnp.nan) * x[0])

    kernel = infer.MCLMC(walled, 0.5, warm_start=0.0, steps_per_draw=20)
    start = {"x": jnp.zeros((2, 10))}
    mcmc = MCMC(kernel, num_warmup=10, num_samples=100, num_chains=2, chain_method="vectorized", progress_bar=False)
    mcmc.run(jax.random.key(0), init_params=start, extra_fields=("refused_steps", "diverging"))
    x = np.asarray(mcmc.get_samples()["x"])
    assert np.isfinite(x).all()
    assert x[:, 0].max() < 1
    assert not np.asarray(mcmc.get_extra_fields()["diverging"]).any()
    assert (np.asarray(mcmc.get_extra_fields(group_by_chain=True)["refused_steps"]).max(1) > 0).all()


@pytest.mark.parametrize("step_size", [1e10, 1e-9])
def test_a_chain_that_takes_no_step_is_marked(step_size):
    """Steps so long that all are refused, or so short that they are lost in rounding."""
    kernel = infer.MCLMC(gaussian, step_size, steps_per_draw=10)
    mcmc = run(kernel, 40, 20, chains=2)
    assert np.isnan(mcmc.get_samples()["x"]).all()
    with pytest.warns(UserWarning, match=r"diverged \(chain 0 at step"):
        about = bnn.to_inference_data(mcmc).attrs
    assert about["frozen"] == "[True, True]"
    assert about["refused_steps"] == "[1.0, 1.0]"
    assert np.isnan(about["implied_bias"])


def test_a_chain_that_is_lost_in_warm_up_is_marked():
    """A start with a finite density but no gradient: no step size helps, and halving it for ever is no chain."""

    def kinked():
        x = numpyro.sample("x", dist.Normal(0.0, 1.0).expand([4]).to_event(1))
        numpyro.factor("kink", -jnp.sqrt(jnp.abs(x[0] - 2.0)))

    kernel = infer.MCLMC(kinked, warm_start=0.0, steps_per_draw=10)
    start = {"x": jnp.stack([jnp.array([2.0, 1.0, 1.0, 1.0]), jnp.ones(4)])}
    mcmc = MCMC(kernel, num_warmup=60, num_samples=20, num_chains=2, chain_method="vectorized", progress_bar=False)
    mcmc.run(jax.random.key(0), init_params=start)
    with pytest.warns(UserWarning, match="chain 0 at step"):
        about = bnn.to_inference_data(mcmc).attrs
    assert json.loads(about["refused_steps"])[0] == 1
    assert about["frozen"].startswith("[True, ")


def test_many_refused_steps_are_reported():
    kernel = infer.MCLMC(gaussian, 4.0, warm_start=0.5, steps_per_draw=20, preconditioner="identity")
    mcmc = run(kernel, 20, 20, chains=2)
    with pytest.warns(UserWarning, match=r"refused_steps: chain \d refused \d+% of its steps"):
        about = bnn.to_inference_data(mcmc).attrs
    assert 0.1 < min(json.loads(about["refused_steps"])) < 1
    assert about["frozen"] == "[False, False]"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:[\\s\\S]*- refused_steps:UserWarning")  # 22 % in a chain of the second
@pytest.mark.parametrize(("prior", "least"), [("Hierarchical", -60), ("Normal", -200)])
def test_default_settings_sample_an_image_classifier(prior, least):
    """Digits 0 to 7, from members that know all of them: chains stay good, and no scale of a kernel collapses."""
    digits = datasets.load_digits()
    kept = digits.target < 8
    x = digits.images[kept, :, :, None].astype(np.float32)
    x, y = (x - x.mean()) / x.std(), digits.target[kept]
    model = models.classification(nn.CNN([8], [32, 8], window=3), 8, getattr(bnn.priors, prior)())
    warm = infer.WarmStart(0.25, num_steps=2500)
    kernel = infer.MCLMC(model, warm_start=warm, steps_per_draw=50)
    mcmc = run(kernel, 80, 40, x, y, chains=2)
    idata = bnn.to_inference_data(mcmc, predictions={"x": x})
    about, draws = idata.attrs, mcmc.get_samples(group_by_chain=True)
    score = kernel.target.log_likelihood((x, y), {}, {"data": jnp.arange(len(y))})
    state = mcmc.last_state
    fit = np.asarray(jax.vmap(score)(state.z))
    guess = idata["posterior_predictive" if "posterior_predictive" in idata else "predictions"]["y"].to_numpy()
    share = np.array([[(draw == y).mean() for draw in chain] for chain in guess])
    votes = np.array([[np.bincount(chain[:, n], minlength=8).argmax() for n in range(len(y))] for chain in guess])
    accuracy = (votes == y).mean(1)
    print(
        f"{prior}: accuracy by chain {accuracy}, of single draws {share.mean(1)}, log likelihood {fit}, "
        f"{ {name: about[name] for name in ('mean_energy_variance', 'implied_bias', 'refused_steps')} }"
    )
    assert accuracy.min() > 0.985
    assert fit.min() > least
    assert about["frozen"] == "[False, False]"
    assert about["implied_bias"] < 0.15
    scales = [np.asarray(value) for name, value in draws.items() if name.endswith("_scale")]
    assert all(value.min() > 0.1 for value in scales)
    assert bool(scales) == (prior == "Hierarchical")


def test_the_autocorrelation_time_is_that_of_an_autoregression():
    """(1 + rho) / (1 - rho)."""
    rho, rng = 0.6, np.random.default_rng(0)
    noise = rng.normal(size=(1000, 200))
    draws = np.zeros_like(noise)
    for t in range(1, 1000):
        draws[t] = rho * draws[t - 1] + noise[t]
    still = np.concatenate([draws[100:], np.ones((900, 3))], 1)  # coordinates that never move are left out
    np.testing.assert_allclose(autocorrelation_time(jnp.asarray(still, jnp.float32)), 4.0, rtol=0.07)


def test_stages_and_records_of_short_and_long_warm_ups():
    assert Stages.of(0, 0).records == 0
    assert Stages.of(2, 4) == (2, 2, 3, 3, 4, 4)
    long = Stages.of(0, 10_000)
    assert (long.stride, long.records) == (12, 250)


# -- minibatches ------------------------------------------------------------------------------------

N, B, P = 400, 40, 12
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(N, P)) * np.geomspace(0.4, 2.5, P), jnp.float32)
Y = jnp.asarray(np.asarray(X) @ RNG.normal(size=P) + 0.5 * RNG.normal(size=N), jnp.float32)


def regression(x, y, batch_size=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([P]).to_event(1))
    with numpyro.plate("data", N, subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, 0.5), obs=y[i])


INPUTS = np.asarray(X, np.float64)
HESSIAN = np.eye(P) + INPUTS.T @ INPUTS / 0.25
MEAN = np.linalg.solve(HESSIAN, INPUTS.T @ np.asarray(Y, np.float64) / 0.25)


@pytest.mark.slow
def test_minibatches_are_marked_biased_and_their_noise_is_evened_out():
    """The bias is measured: near 5 % of the variances here, of which the energy error tells nothing."""
    kernel = infer.MCLMC(
        regression, preconditioner="gradient_noise", integrator="leapfrog", energy_variance=1e-4, steps_per_draw=25
    )
    mcmc = run(kernel, 120, 100, X, Y, batch_size=B, chains=8)
    about = kernel.describe(mcmc.last_state)
    assert about["biased"]
    assert about["implied_bias"] < 0.05
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["w"], np.float64)
    squares = (((draws - MEAN) @ np.linalg.cholesky(HESSIAN)) ** 2).mean((1, 2))
    print(f"excess variance on minibatches of {B} of {N}: {squares.mean() - 1:.3f}")
    assert -0.1 < squares.mean() - 1 < 0.25  # standard error 0.02
    # G is the inverse of E[g g']: behind it, noise and curvature are 1 in each direction. Rows x have the noise
    # N^2 / B times the covariance of x (y - x w) / 0.25. Eigenvalues of an inverse sample covariance from n gradients
    # lie within 1 / (1 -+ (P / n)^(1/2))^2; four standard errors (2 / n)^(1/2) for these edges.
    root = np.asarray(mcmc.last_state.engine.adaptation, np.float64)
    rows = INPUTS * (np.asarray(Y, np.float64) - INPUTS @ MEAN)[:, None] / 0.25
    white = root.transpose(0, 2, 1) @ (N**2 / B * np.cov(rows.T, bias=True) + HESSIAN) @ root
    sizes, worth = np.linalg.eigvalsh(white), np.asarray(mcmc.last_state.moment.worth).min()
    print(f"noise behind the preconditioner: {sizes.min():.2f} to {sizes.max():.2f}, from {worth:.0f} gradients")
    slack = np.exp(4 * np.sqrt(2 / worth))
    assert sizes.min() > (1 + np.sqrt(P / worth)) ** -2 / slack
    assert sizes.max() < (1 - np.sqrt(P / worth)) ** -2 * slack
    counts = np.asarray(mcmc.last_state.num_gradients)
    collected = mcmc.sampler.policy.noise
    # Adam, two gradients per leapfrog step, those that are collected, and those of nine measurements: noise, refresh
    # (of a leapfrog step's cache) and curvature.
    measured = (counts - (30 * 25 + 190 * 25 * 2 + (120 - 15) * collected.count)) / (128 + 1 + 48)
    assert set(measured) == {9}


# -- warm-started ensembles -------------------------------------------------------------------------

GRID = np.linspace(-2, 2, 60)[:, None].astype(np.float32)
WAVE = (np.sin(2 * GRID[:, 0]) + 0.2 * np.random.default_rng(1).normal(size=60)).astype(np.float32)
NETWORK = models.regression(nn.MLP([8, 1], "tanh"), noise=0.2)


@pytest.mark.parametrize("method", ["vectorized", pytest.param("sequential", marks=pytest.mark.slow)])
def test_members_are_the_ends_of_the_warm_start(method):
    warm = infer.WarmStart(0.5, num_steps=300, optimizer=optax.adam(0.03), spread=1.5)
    kernel = infer.MCLMC(NETWORK, steps_per_draw=5, warm_start=warm)
    mcmc = MCMC(kernel, num_warmup=20, num_samples=10, num_chains=3, chain_method=method, progress_bar=False)
    mcmc.run(jax.random.key(0), GRID, WAVE)
    idata = bnn.to_inference_data(mcmc, predictions={"x": GRID, "y": WAVE}, members=True)
    functions = idata["predictions"]["y_mean"].to_numpy()
    assert functions.shape == (3, 1, 60)
    errors = np.sqrt(((functions[:, 0] - WAVE) ** 2).mean(1))
    assert errors.max() < 0.4  # starts are off by about 1.5
    assert np.abs(functions[0] - functions[1]).max() > 1e-2
    assert "sample_stats" not in dict(idata.items()) or not dict(idata["sample_stats"].data_vars)
    assert idata.attrs["num_samples"] == 1
    # The ensemble is where the chains were after ten transitions of thirty steps of the optimizer each.
    keys = jax.random.split(jax.random.key(0), 3)
    state = kernel.init(keys, 20, None, (GRID, WAVE), {})
    sample = jax.jit(lambda s: kernel.sample(s, (GRID, WAVE), {}))
    for _ in range(10):
        state = sample(state)
    assert (np.asarray(state.num_gradients) == 300).all()
    found = np.asarray(kernel.members(state, (GRID, WAVE), {})["net/Dense_0.kernel"])
    expected = idata["posterior"]["net.Dense_0.kernel"].to_numpy()[:, 0]
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_held_out_rows_stop_the_descent():
    """A network that learns 20 noisy rows by heart: the position of the best transition is kept, not the last."""
    x = GRID[::3]
    y = (0.5 * x[:, 0] + 0.5 * np.random.default_rng(2).normal(size=20)).astype(np.float32)
    flat = models.regression(nn.MLP([50, 1], "tanh"), bnn.priors.Normal(10.0), noise=0.1)

    warm = infer.WarmStart(0.9, num_steps=1800, held_out=0.25, optimizer=optax.adam(0.03))
    kernel = infer.MCLMC(flat, warm_start=warm, steps_per_draw=1)
    state = kernel.init(jax.random.split(jax.random.key(0), 8), 40, None, (x, y), {})

    def transition(state, _):
        state = kernel.sample(state, (x, y), {})
        return state, state.optimizer.score

    state, scores = jax.jit(lambda s: lax.scan(transition, s, None, 36))(state)
    scores = np.asarray(scores)
    assert np.all(np.diff(scores, axis=0) >= 0)  # the best so far
    assert np.isfinite(scores).all()
    _, held = held_out_rows(20, 0.25)
    score = jax.vmap(kernel.target.log_likelihood((x, y), {}, {"data": held}))(state.z)
    np.testing.assert_allclose(score, scores[-1], rtol=1e-3)  # the chain goes on from there
    assert (scores[-1] > scores[-18]).mean() < 1  # some chain was best early


@pytest.mark.slow
def test_one_huge_gradient_at_the_start_is_forgotten():
    """A wall of slope 1e12 at the start: the scale of Adam alone would remember it for 10,000s of steps."""

    def beside_a_wall():
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        numpyro.factor("wall", -1e12 * jnp.maximum(w[0] - 1.98, 0.0))

    def end_of(warm):
        kernel = infer.SGLD(beside_a_wall, 1e-6, warm_start=warm, steps_per_draw=1)
        start = {"w": jnp.array([2.0, 1.0])}
        state = kernel.init(jax.random.key(0), 20, start, (), {})
        sample = jax.jit(lambda s: kernel.sample(s, (), {}))
        for _ in range(10):
            state = sample(state)
        return np.ravel(kernel.members(state, (), {})["w"])

    np.testing.assert_allclose(end_of(infer.WarmStart(0.5, num_steps=1000)), 0.0, atol=0.02)
    plain = end_of(infer.WarmStart(0.5, num_steps=1000, optimizer=optax.adam(0.01)))
    assert plain[0] > 1.8


@pytest.mark.slow
def test_held_out_rows_on_minibatches():
    warm = infer.WarmStart(0.5, num_steps=400, held_out=0.1, optimizer=optax.adam(0.1))
    mcmc = run(infer.SGLD(regression, 1e-5, warm_start=warm, steps_per_draw=10), 20, 2, X, Y, batch_size=B)
    members = np.asarray(mcmc.sampler.members(mcmc.last_state, (X, Y), {"batch_size": B})["w"])
    assert np.abs(members - MEAN).max() < 0.6


def dropped_out(x, y, batch_size=None):
    """Weights are doubled or dropped: of y = x.sum(1) the best ones are 1/2."""
    w = numpyro.sample("w", dist.Normal(0.0, 10.0).expand([6]).to_event(1))
    kept = jax.random.bernoulli(numpyro.prng_key(), 0.5, (6,))
    with numpyro.plate("data", x.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(x[i] @ (2.0 * kept * w), 1.0), obs=y[i])


@pytest.mark.parametrize("batch_size", [None, pytest.param(30, marks=pytest.mark.slow)])
def test_held_out_rows_of_a_model_with_dropout(batch_size):
    """A fresh mask at every step: with one mask, the weights that it drops would stay near 0."""
    x = np.random.default_rng(0).normal(size=(60, 6)).astype(np.float32)
    warm = infer.WarmStart(0.9, num_steps=3000, held_out=0.2, optimizer=optax.adam(0.01))
    kernel = infer.SGLD(dropped_out, 1e-4, warm_start=warm, steps_per_draw=1)
    args = (jnp.asarray(x), jnp.asarray(x.sum(1)), batch_size)
    state = kernel.init(jax.random.split(jax.random.key(0), 3), 10, None, args, {})
    sample = jax.jit(lambda s: kernel.sample(s, args, {}))
    for _ in range(9):
        state = sample(state)
    members = np.asarray(kernel.members(state, args, {})["w"])
    assert np.abs(members - 0.5).max() < 0.25
    assert (members.std(0) > 1e-4).all()  # chains see other masks

    # The score is a mean over masks, within 5 standard errors of that over all 64: failure rate 6e-7 each.
    score = jax.jit(held_out_score(kernel.target, 0.2, args, {}))
    _, held = held_out_rows(60, 0.2)
    w = jnp.linspace(0.2, 0.7, 6)
    masks = 2.0 * ((np.arange(64)[:, None] >> np.arange(6)) & 1)
    fits = x[held] @ (masks * np.asarray(w)).T
    exact = -0.5 * ((x[held].sum(1)[:, None] - fits) ** 2 + np.log(2 * np.pi)).sum(0)
    found = np.array([score({"w": w}, jax.random.key(seed)) for seed in range(5)])
    assert len(np.unique(found)) == 5
    assert (np.abs(found - exact.mean()) < 5 * exact.std() / NUM_KEYS**0.5).all()


def test_a_model_that_needs_all_rows_cannot_hold_some_out():
    def whole(x, y):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([P]).to_event(1))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)

    def bare(x, y):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([P]).to_event(1))
        numpyro.sample("y", dist.Normal(x @ w, 0.5).to_event(1), obs=y)

    for model in (whole, bare):
        kernel = infer.MCLMC(model, warm_start=infer.WarmStart(held_out=0.1))
        with pytest.raises(ValueError, match="held_out of a model"):
            kernel.init(jax.random.key(0), 4, None, (X, Y), {})


def test_members_need_a_warm_start():
    none = infer.MCLMC(NETWORK, warm_start=0.0)
    state = none.init(jax.random.key(0), 4, None, (GRID, WAVE), {})
    with pytest.raises(ValueError, match="without warm start"):
        none.members(state, (GRID, WAVE), {})
    mcmc = MCMC(NUTS(gaussian, max_tree_depth=1), num_warmup=2, num_samples=2, progress_bar=False)
    mcmc.run(jax.random.key(0))
    with pytest.raises(ValueError, match="kernel without warm start"):
        bnn.to_inference_data(mcmc, members=True)


@pytest.mark.parametrize(
    "options", [{"share": 1.0}, {"held_out": 1.5}, {"spread": 0.0}, {"num_steps": 0}, {"share": -0.1}]
)
def test_bad_warm_starts_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        infer.WarmStart(**options)
