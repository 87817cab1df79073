"""Parts of the warm-up alone: step sizes and scales chosen from exact quantities, the optimizer and its rows."""

import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from jax.flatten_util import ravel_pytree
from numpyro.distributions import constraints
from numpyro.infer import MCMC
from scipy import linalg

from numpyro_bnn import infer, metrics, to_inference_data
from numpyro_bnn.infer.chain import AcceptanceTuner
from numpyro_bnn.infer.mclmc import DECOHERENCE, EnergyTuner
from numpyro_bnn.infer.preconditioning import NoisePreconditioner, SecondMoment, resolve
from numpyro_bnn.infer.tuning import (
    NOISE_BATCHES,
    Noise,
    Spread,
    Stages,
    autocorrelation_time,
    gradient_noise,
    largest_curvature,
    largest_share,
)
from numpyro_bnn.infer.warm_start import held_out_rows, learning_gradient
from numpyro_bnn.metrics import HealthWarning


class State(NamedTuple):
    """The fields of a chain's state that tuners read."""

    base_step_size: Any = None
    accept_prob: Any = None
    energy_variance: Any = None
    refused_steps: Any = 0.0
    tuning: Any = None
    engine: Any = None


class Engine(NamedTuple):
    position: Any = None
    adaptation: Any = None
    memory: Any = None


class Memory(NamedTuple):
    length: Any = None


# -- step sizes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("curvature", "noise"), [(3.0, 0.0), (1.0, 40.0)])
def test_chosen_step_sizes_of_sgld_have_the_bias_they_state(curvature, noise):
    """The stationary variance of its linear recursion, to first order in the tolerance."""
    kernel = infer.SGLD(lambda: None, bias_tolerance=0.01, temperature=2.0)
    eps = float(kernel.choose_step_size(jnp.array(curvature), Noise(noise, noise, 0.0), 1))
    variance = (2.0 * eps + eps**2 * noise / 4) / (1 - (1 - eps * curvature / 2) ** 2)
    assert variance * curvature / 2.0 - 1 == pytest.approx(0.01, rel=0.02)


@pytest.mark.parametrize("decay", [0.1, 0.6])
def test_chosen_step_sizes_of_sghmc_have_the_bias_they_state(decay):
    """The stationary covariance of BAOAB, from a discrete Lyapunov equation, where noise dominates.

    The tolerance is that of the momenta; their refresh, a = 1 - decay, leaves (1 + a)^2 / 4 of it to the positions.
    """
    curvature, noise, temperature = 1.0, 500.0, 2.0
    kernel = infer.SGHMC(lambda: None, momentum_decay=decay, bias_tolerance=0.01, temperature=temperature)
    h = float(kernel.choose_step_size(jnp.array(curvature), Noise(noise, noise, 0.0), 1)) ** 0.5
    drift = np.array([[1, h / 2], [0, 1]])
    refresh, kick = np.diag([1, 1 - decay]), np.array([[1, 0], [-h * curvature, 1]])
    source = (1 - (1 - decay) ** 2) * temperature * np.diag([0, 1.0])
    whole = drift @ refresh @ drift
    added = drift @ source @ drift.T + whole @ np.diag([0, h**2 * noise]) @ whole.T
    variance = linalg.solve_discrete_lyapunov(whole @ kick, added)[0, 0]
    assert variance * curvature / temperature - 1 == pytest.approx(0.01 * (1 - decay / 2) ** 2, rel=0.01)


def test_first_steps_of_mclmc_have_a_quarter_of_the_stable_length():
    """Leapfrog steps on a curvature lam are stable up to h = 2 / sqrt(lam), a distance of h sqrt(P)."""
    step = infer.MCLMC(lambda: None).choose_step_size(jnp.array(9.0), Noise(0.0, 0.0, 0.0), 16)
    assert float(step) == pytest.approx(2 / 3 / 4 * 4)


@pytest.mark.parametrize("largest", [50.0, 20.0])
def test_noise_turns_mclmc_within_the_tolerance(largest):
    """A refresh turns by 2 eps / L = 1/5 in squared angle, noise V = 20 by eps^2 V / (P T^2): no more, and in a
    direction of noise W with an excess (eps^2 W / P T^2 + 1/5) / (eps^2 V / P T^2 + 1/5) - 1 of the tolerance.
    """
    kernel = infer.MCLMC(lambda: None, bias_tolerance=0.02, temperature=2.0)
    noise = Noise(jnp.array(largest), jnp.array(20.0), 0.0)
    squared = float(kernel.choose_step_size(jnp.array(1e-9), noise, 16)) ** 2 / (16 * 2.0**2)
    if largest == 20:
        assert squared * 20 == pytest.approx(0.2, rel=1e-4)
        return
    assert (squared * largest + 0.2) / (squared * 20 + 0.2) - 1 == pytest.approx(0.02, rel=1e-3)


@pytest.mark.parametrize("step_size", [1e-4, 0.04])
def test_frictions_are_per_unit_of_time(step_size):
    """A step of h = sqrt(eps) keeps the fraction exp(-friction h); the thermostat's mass is (20 h)^2."""
    for kind in (infer.SGHMC, infer.SGNHT, infer.GGMC):
        dynamics = kind(lambda: None, momentum_decay=0.3).dynamics(lambda z: z, step_size)
        assert np.exp(-dynamics.friction * step_size**0.5) == pytest.approx(0.7)
    thermostat = infer.SGNHT(lambda: None).dynamics(lambda z: z, step_size)
    assert thermostat.mass == pytest.approx(400 * step_size)


def test_step_sizes_are_adapted_to_an_acceptance():
    """Acceptance exp(-eps): a target of 0.574 is met at eps = 0.555, and later changes are ignored."""
    tuner, eps = AcceptanceTuner(0.574, 0, 300), jnp.array(5.0)
    for i in range(320):
        seen = jnp.exp(-eps) if i < 300 else jnp.array(0.0)
        eps = tuner.adapt(State(), State(base_step_size=eps, accept_prob=seen), None, i).base_step_size
        if i == 299:
            assert float(eps) == pytest.approx(-np.log(0.574), rel=1e-3)
            final = eps
    assert eps == final


def energy_tuner(**options):
    plain = {
        "stages": Stages.of(0, 100),
        "steps_per_draw": 3,
        "energy_targets": (1e-3, 1e-3),
        "max_energy_error": lambda size: 5.0,
        "steers_step_size": True,
        "sets_length": True,
        "sets_scales": False,
    }
    return EnergyTuner(**plain | options)


def test_steps_are_steered_to_the_energy_variance():
    """Energy errors 5 eps^6 without noise: the first transition suffices, as past errors are scaled with the step."""
    tuner, eps = energy_tuner(), jnp.array(0.4)
    exact = (1e-3 / 5) ** (1 / 6)
    tuning = tuner.start(jnp.zeros(2), eps)
    for i in range(4):
        seen = State(base_step_size=eps, energy_variance=5 * eps**6, tuning=tuning)
        state = tuner._steered(seen, i)
        eps, tuning = state.base_step_size, state.tuning
        assert float(eps) == pytest.approx(exact, rel=1e-3)


def steered(energy, refused=0.0, size=2, i=0, **options):
    """The factor of the step size and the mean after one transition."""
    tuner = energy_tuner(**options)
    tuning = tuner.start(jnp.zeros(size), jnp.array(1.0))
    seen = State(
        base_step_size=jnp.array(1.0), energy_variance=jnp.array(energy), tuning=tuning, refused_steps=refused
    )
    state = tuner._steered(seen, i)
    return float(state.base_step_size), float(state.tuning.excess)


def test_steps_grow_slowly_and_shrink_at_once():
    """A first transition without errors, as after a warm start; a burst; a transition that took no step."""
    assert steered(2e-8)[0] == pytest.approx(1.25)
    assert steered(1e3)[0] == pytest.approx(0.5)  # counted as 64 times the target, however large it is
    assert steered(0.0, refused=1.0)[0] == pytest.approx(0.5)
    assert steered(1e-3)[0] == pytest.approx(1.0, rel=1e-5)
    # One step of 64 refused is as bad as errors that meet the target.
    assert steered(0.0, refused=1 / 64)[0] == pytest.approx(1.0, rel=1e-5)


def test_the_first_target_is_limited_in_nats():
    """At 10,000 parameters a hundred times the target would be errors of 20 nats a step; the limit is a twelfth
    of the largest error, 48 nats / 12, so a variance of 16 / 10,000 is met at once."""
    targets = {"energy_targets": (0.04, 4e-4), "max_energy_error": lambda size: 48.0}
    assert steered(16 / 10_000, size=10_000, **targets)[0] == pytest.approx(1.0, rel=1e-4)
    assert steered(4e-4, size=10_000, i=90, **targets)[0] == pytest.approx(1.0, rel=1e-4)
    # The limit contains the targets that a user gives, and is never below 15 nats.
    plain, given = infer.MCLMC(lambda: None), infer.MCLMC(lambda: None, energy_variance=(0.5, 0.1))
    last = plain.energy_targets[1]
    assert plain.max_energy_error(10_000) == pytest.approx(24 * (10_000 * last) ** 0.5)
    assert plain.max_energy_error(10) == 15
    assert given.max_energy_error(1000) == pytest.approx(max(24 * 100**0.5, 12 * 500**0.5))


def test_lengths_follow_the_autocorrelation_time():
    """An autoregression with time (1 + rho) / (1 - rho) = 4, in transitions of three steps."""
    tuner, rng = energy_tuner(), np.random.default_rng(0)
    draws = np.zeros((1000, 200))
    for t in range(1, 1000):
        draws[t] = 0.6 * draws[t - 1] + rng.normal(size=200)
    tuning = tuner.start(jnp.zeros(200), 1.0)._replace(record=jnp.asarray(draws[100:], jnp.float32))
    state = State(tuning=tuning, base_step_size=jnp.array(0.5), engine=Engine(memory=Memory(jnp.array(7.0))))
    found = tuner._relaxed(state).engine.memory.length
    np.testing.assert_allclose(found, DECOHERENCE * 4 * 3 * 0.5 * tuner.stages.stride, rtol=0.07)
    # Independent draws leave it as it is.
    noise = tuning._replace(record=random.normal(random.key(0), (900, 200)))
    assert tuner._relaxed(state._replace(tuning=noise)).engine.memory.length == 7.0


@pytest.mark.parametrize("size", [7, 12])
def test_the_autocorrelation_time_of_a_few_draws(size):
    """Lag by lag: pairs of autocorrelations are summed until one is negative; the mean over coordinates."""
    draws = np.cumsum(np.random.default_rng(0).normal(size=(size, 5)), axis=0)
    times = []
    for column in (draws - draws.mean(0)).T:
        lags = np.array([column[: size - lag] @ column[lag:] for lag in range(size)]) / (column @ column)
        pairs = lags[: size // 2 * 2].reshape(-1, 2).sum(1)
        first = np.flatnonzero(pairs <= 0)
        times.append(2 * pairs[: first[0] if len(first) else None].sum() - 1)
    found = autocorrelation_time(jnp.asarray(draws, jnp.float32))
    np.testing.assert_allclose(found, np.maximum(times, 1 / size).mean(), rtol=1e-4)


def test_new_scales_make_the_spread_even_and_set_the_length():
    """Variances of whitened positions become equal; the length is their root sum of squares on the new scales."""
    tuner, variances, old = (energy_tuner(sets_scales=True), np.array([0.01, 1.0, 25.0]), np.array([2.0, 3.0, 1.0]))
    spread = Spread(jnp.zeros(3), jnp.asarray(variances * 1e6, jnp.float32), jnp.array(1e6))
    tuning = tuner.start(jnp.zeros(3), 1.0)._replace(spread=spread)
    engine = Engine(adaptation=jnp.asarray(old), memory=Memory(jnp.array(1.0)))
    state = tuner._rescaled(State(tuning=tuning, engine=engine, base_step_size=jnp.array(0.1)))
    evened = variances / (np.asarray(state.engine.adaptation) / old) ** 2
    np.testing.assert_allclose(evened, evened[0], rtol=1e-3)
    np.testing.assert_allclose(state.engine.memory.length, evened.sum() ** 0.5, rtol=1e-3)
    assert state.tuning.spread.total == 0


def test_running_variances_are_those_of_all_positions():
    """Shrunk towards their geometric mean with the weight of five."""
    draws = np.random.default_rng(0).normal(3.0, [1.0, 5.0, 0.2], (20, 3))
    spread = Spread(jnp.zeros(3), jnp.zeros(3), jnp.zeros(()))
    for draw in draws:
        spread = spread.add(jnp.asarray(draw))
    exact = draws.var(0, ddof=1)
    center = np.exp(np.log(exact).mean())
    np.testing.assert_allclose(spread.variance(), (20 * exact + 5 * center) / 25, rtol=1e-4)


@pytest.mark.parametrize("kind", [infer.SGLD, infer.SGHMC, infer.SGNHT])
def test_steps_in_which_a_position_is_forgotten(kind):
    """The slowest eigenvalue of the recursion of means on a small curvature; the thermostat's friction balances noise
    of variance 1: it is larger by h^2 / 2 per step.
    """
    kernel, eps, curvature = kind(lambda: None), 1e-2, 1e-4
    slowest = 1 - eps * curvature / 2
    if kind is not infer.SGLD:
        h, decay = eps**0.5, 0.9 * (np.exp(-eps / 2) if kind is infer.SGNHT else 1.0)
        drift, kick = np.array([[1, h / 2], [0, 1]]), np.array([[1, 0], [-h * curvature, 1]])
        slowest = np.abs(np.linalg.eigvals(drift @ np.diag([1, decay]) @ drift @ kick)).max()
    # 1 - a against -log a, in the friction: half of the decay.
    assert kernel.steps_to_forget(eps, 1) / curvature == pytest.approx(-1 / np.log(slowest), rel=0.06)


def test_mclmc_forgets_its_position_like_a_persistent_random_walk():
    """Directions that turn by a squared angle of 1/5 + eps^2 / P per step: diffusion 2 eps^2 / P / angle, over 2."""
    angle = 0.2 + 3.0**2 / 50
    assert infer.MCLMC(lambda: None).steps_to_forget(3.0, 50) == pytest.approx(1 / (2 * 3.0**2 / 50 / angle))


# -- curvature and noise ----------------------------------------------------------------------------

N, B = 120, 4
RNG = np.random.default_rng(0)


def built(kernel, args, step_size=1e-3, key=0):
    """The engine of a kernel at its start, and its sampler."""
    state = kernel.init(random.key(key), 0, None, args, {})
    return kernel.sampler(kernel.target, state.z, jnp.array(step_size), kernel.target.evaluator(args, {})), state


def linear(slopes, curvatures, batch_size):
    """Rows with gradients slopes[i] and a common diagonal curvature."""
    w = numpyro.sample("w", dist.ImproperUniform(constraints.real_vector, (), slopes.shape[1:]))
    numpyro.factor("curvature", -0.5 * jnp.sum(curvatures * w**2))
    with numpyro.plate("data", slopes.shape[0], subsample_size=batch_size) as i:
        numpyro.factor("slope", slopes[i] @ w)


def test_curvature_is_measured_behind_the_preconditioner():
    """The largest eigenvalue of L' H L, for a Hessian whose largest one is elsewhere."""
    hessian = np.array([[4.0, 1.0, 0.0], [1.0, 3.0, 0.5], [0.0, 0.5, 30.0]])
    metric = np.array([[9.0, 2.0, 0.0], [2.0, 5.0, 0.1], [0.0, 0.1, 0.05]])

    def model():
        w = numpyro.sample("w", dist.ImproperUniform(constraints.real_vector, (), (3,)))
        numpyro.factor("f", -0.5 * w @ jnp.asarray(hessian, jnp.float32) @ w)

    sampler, state = built(infer.SGLD(model, 1e-3, preconditioner=metric, warm_start=0.0), ())
    root = np.linalg.cholesky(metric)
    exact = np.linalg.eigvalsh(root.T @ hessian @ root)[-1]
    assert float(largest_curvature(sampler, state.engine)) == pytest.approx(exact, rel=1e-3)


def test_noise_is_measured_behind_the_preconditioner():
    """Within 5 standard errors of the exact covariance: failure rate 6e-7 each."""
    size = 200
    slopes = RNG.normal(3.0, 1.0, (N, size)) * np.linspace(0.5, 2.0, size)
    metric = np.linspace(20.0, 3.0, size)
    kernel = infer.SGLD(linear, 1e-3, preconditioner=metric, warm_start=0.0)
    args = (jnp.asarray(slopes, jnp.float32), jnp.zeros(size), B)
    sampler, state = built(kernel, args)
    noise = gradient_noise(sampler, state.engine)
    white = slopes * np.sqrt(metric)
    covariance = N**2 / B * np.cov(white.T, bias=True)
    total, mean = np.trace(covariance), N * white.mean(0)
    error = np.sqrt(2 / (NOISE_BATCHES - 1) * np.sum(covariance**2)) / total
    assert error < 0.05
    assert float(noise.mean) == pytest.approx(total / size, rel=5 * error)
    # The squared length of the mean of the estimates is too large by the noise of that mean.
    expected = total / (mean @ mean + total / NOISE_BATCHES)
    assert float(noise.relative) == pytest.approx(expected, rel=5 * error + 0.1)


def test_noise_along_its_largest_direction():
    """A variance from half as many differences as minibatches: within 5 relative standard errors sqrt(2 / 64)."""
    slopes = np.outer(RNG.normal(size=N), [1.0, 2.0])
    sampler, state = built(
        infer.SGLD(linear, 1e-3, warm_start=0.0), (jnp.asarray(slopes, jnp.float32), jnp.zeros(2), B)
    )
    exact = N**2 / B * 5 * slopes[:, 0].var()
    found = float(gradient_noise(sampler, state.engine).largest)
    assert found == pytest.approx(exact, rel=5 * (4 / NOISE_BATCHES) ** 0.5)


def test_preconditioners_by_site_are_in_the_order_of_the_flat_position():
    z = {"b": jnp.zeros(2), "a": jnp.zeros(3), "c": jnp.zeros(())}
    by_site = {"b": jnp.array([4.0, 9.0]), "a": 25.0}
    found = resolve("test", by_site, z, 10)
    flat, _ = ravel_pytree({"a": 5.0 * jnp.ones(3), "b": jnp.array([2.0, 3.0]), "c": jnp.ones(())})
    np.testing.assert_allclose(found.root(found.init(flat), jnp.ones(6)), flat)
    assert resolve("test", "rmsprop", z, 10).num_data == 10


@pytest.mark.parametrize("spike", [1.0, 300.0])
def test_noise_in_many_directions_is_not_overestimated(spike):
    """400 directions from 128 gradients: at most 400^(1/6) = 2.7 times too large, the sample's own is 7.6 times.

    A spike alone is a variance from 64 differences: within 5 relative standard errors sqrt(2 / 64) of it.
    """
    sds = np.ones(400)
    sds[7] = spike**0.5
    found = []
    for seed in range(8):
        gradients = jnp.asarray(np.random.default_rng(seed).normal(3.0, sds, (128, 400)), jnp.float32)
        total = float(np.sum(sds**2))
        found.append(total * float(largest_share(gradients, jnp.array(total))))
    if spike == 1:
        assert np.median(found) < 3.5
        assert min(found) > 0.5
    else:
        assert np.mean(found) == pytest.approx(spike, rel=5 * (2 / 64 / 8) ** 0.5)


def test_steps_of_the_thermostat_keep_each_direction_within_the_tolerance():
    """Its friction balances the mean noise V; a direction of noise W has T (2 A h + h^2 W) / (2 A h + h^2 V)."""
    kernel = infer.SGNHT(lambda: None, momentum_decay=0.2, bias_tolerance=0.02)
    noise = Noise(jnp.array(50.0), jnp.array(20.0), 0.0)
    eps, decay = float(kernel.choose_step_size(jnp.array(1e-3), noise, 10)), -2 * np.log(0.8)
    assert (decay + eps * 50) / (decay + eps * 20) - 1 == pytest.approx(0.02, rel=1e-3)


@pytest.mark.parametrize("dense", [True, False])
def test_gradients_make_the_preconditioner(dense):
    """L is lower triangular, L L' the inverse of the second moment, up to the weight of its diagonal."""
    root = np.array([[100.0, 0.0, 0.0], [3.0, 2.0, 0.0], [0.5, -0.03, 0.05]])
    moment = root @ root.T
    if not dense:
        moment = np.diag(moment)
    scales = NoisePreconditioner(dense, 0, 10, 5)
    found = np.asarray(scales.adapted(SecondMoment(jnp.asarray(moment, jnp.float32), jnp.array(1e4))))
    if not dense:
        np.testing.assert_allclose(found, moment**-0.5, rtol=1e-5)
        noise = Noise(jnp.array(150.0), jnp.array(4.0), jnp.array(16.0))
        assert scales.averaged(SecondMoment(jnp.ones(3), jnp.array(1e4)), noise) == noise
        return
    np.testing.assert_allclose(found, np.tril(found))
    np.testing.assert_allclose(found.T @ moment @ found, np.eye(3), atol=0.05)
    # Averaged over positions the noise is 1 in all directions, and 1 / (1 - P / n) on gradients that are not among n.
    here = Noise(jnp.array(150.0), jnp.array(4.0), jnp.array(16.0))
    averages = [scales.averaged(SecondMoment(jnp.eye(3), jnp.array(n)), here)[:2] for n in (5.0, 12.0)]
    np.testing.assert_allclose(averages, [(150, 1), (4 / 3, 1)], rtol=1e-5)
    # Nothing collected: the identity. One gradient: half of it is the diagonal.
    blank = scales.start(jnp.zeros(3))
    np.testing.assert_allclose(scales.adapted(blank), np.eye(3))
    one = np.array([1.0, 2.0, 3.0])
    found = np.asarray(scales.adapted(SecondMoment(jnp.outer(one, one), jnp.array(1.0))))
    exact = np.linalg.inv(np.outer(one, one) * (0.73 + 0.27 * np.eye(3)))
    np.testing.assert_allclose(found @ found.T, exact, rtol=1e-3)


class OneGradient:
    """Of a sampler: its only gradient, its stream, and the fields of the state that are read."""

    seeds = stream = gradient = property(lambda self: self)
    probe = estimator = position = None

    def __init__(self, value):
        self.value = jnp.asarray(value, jnp.float32)

    def draw(self, seeds, number):
        return None

    def __call__(self, state, position, batch):
        return None, self.value


def test_large_gradients_of_the_start_are_forgotten():
    """The second transition has all the weight: what is left of 1e9 in a float32 would exceed the new moment."""
    scales = NoisePreconditioner(True, 0, 10, 1)
    first, second = np.array([3e4, 2e4, 1.0]), np.array([10.0, 0.1, 0.01])
    moment = SecondMoment(jnp.asarray(np.outer(first, first), jnp.float32), jnp.array(1.0))
    sampler = OneGradient(second)
    moment = scales.collect(moment, sampler, sampler, jnp.array(1))
    np.testing.assert_allclose(moment.mean, np.outer(second, second), rtol=1e-5)
    assert np.isfinite(scales.adapted(moment)).all()


def many_weights(y, batch_size):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([1001]).to_event(1))
    with numpyro.plate("data", y.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(w[i], 1.0), obs=y[i])


@pytest.mark.parametrize("kind", [infer.SGLD, infer.SGHMC, infer.SGNHT, infer.MCLMC], ids=lambda k: k.__name__)
def test_a_thousand_parameters_get_a_diagonal(kind):
    """Of one shape from the start of the warm-up, when it is one, to its end."""
    mcmc = MCMC(kind(many_weights, steps_per_draw=2), num_warmup=4, num_samples=1, progress_bar=False)
    mcmc.run(random.key(0), jnp.zeros(1001), 7)
    assert mcmc.last_state.engine.adaptation.shape == (1001,)
    assert len(np.unique(mcmc.last_state.engine.adaptation)) > 500


def uneven_noise():
    """Slopes of correlated rows whose noise differs by 10^8 between directions, and curvatures of the same shape."""
    slopes = RNG.normal(size=(N, 4)) @ np.array(
        [[1e3, 2e2, 0, 0], [0, 10.0, 1.0, 0], [0, 0, 1.0, 0.05], [0, 0, 0, 0.1]]
    )
    slopes = slopes - slopes.mean(0)
    return slopes, N * slopes.T @ slopes / N


def quadratic(slopes, curvature, batch_size):
    w = numpyro.sample("w", dist.ImproperUniform(constraints.real_vector, (), slopes.shape[1:]))
    numpyro.factor("curvature", -0.5 * w @ curvature @ w)
    with numpyro.plate("data", slopes.shape[0], subsample_size=batch_size) as i:
        numpyro.factor("slope", slopes[i] @ w)


@pytest.mark.parametrize("kind", [infer.SGLD, infer.SGHMC, infer.SGNHT, infer.MCLMC], ids=lambda k: k.__name__)
def test_chains_move_in_all_directions_of_uneven_noise_within_the_tolerated_bias(kind):
    """Chosen steps: variances 1 to 1.05 along each exact principal axis, within 4 standard errors over 300 chains.

    The identity in the place of the default moves along the noisiest axis only.
    """
    slopes, curvature = uneven_noise()
    args = (jnp.asarray(slopes, jnp.float32), jnp.asarray(curvature, jnp.float32), B)

    def squares(**options):
        kernel = kind(quadratic, steps_per_draw=60, warm_start=0.0, **options)
        keys = random.split(random.key(2), 300)
        state = kernel.init(keys, 40, {"w": jnp.zeros((300, 4))}, args, {})

        def transition(state, _):
            state = kernel.sample(state, args, {})
            return state, state.z["w"]

        _, draws = jax.jit(lambda s: jax.lax.scan(transition, s, None, 120))(state)
        white = np.asarray(draws[80:], np.float64) @ np.linalg.cholesky(curvature)
        return (white**2).mean(0)

    by_chain = squares()
    error = by_chain.std(0) / 300**0.5
    assert (error < 0.06).all()
    assert (by_chain.mean(0) > 1 - 4 * error).all()
    assert (by_chain.mean(0) < 1.05 + 4 * error).all()
    assert np.sort(squares(preconditioner="identity").mean(0))[:2].max() < 0.1


def test_long_chains_cover_the_variance_of_the_posterior():
    """The covariance of position and gradient is P T at stationarity, with noise and a temperature."""
    slopes, curvature = uneven_noise()
    args = (jnp.asarray(slopes, jnp.float32), jnp.asarray(curvature, jnp.float32), B)
    kernel = infer.SGLD(quadratic, temperature=0.5, steps_per_draw=8000, warm_start=0.0)
    mcmc = MCMC(kernel, num_warmup=20, num_samples=40, progress_bar=False)
    mcmc.run(random.key(0), *args)
    found = eval(kernel.describe(mcmc.last_state)["variance_covered"])
    assert found[0] == pytest.approx(1.0, abs=0.15)


# -- the warm start ---------------------------------------------------------------------------------


def one_of_many_rows(num_rows, batch_size):
    """The potential falls in direction i by N / B for each row i of a minibatch."""
    w = numpyro.sample("w", dist.ImproperUniform(constraints.real_vector, (), (num_rows,)))
    with numpyro.plate("data", num_rows, subsample_size=batch_size) as i:
        numpyro.factor("f", w[i])


def test_every_optimizer_step_has_a_minibatch_of_its_own():
    """Gradient descent counts how often it sees each row."""
    warm = infer.WarmStart(0.5, num_steps=60, optimizer=optax.sgd(1 / 30))
    kernel = infer.SGLD(one_of_many_rows, 1e-3, steps_per_draw=1, warm_start=warm)
    args = (30, 1)
    state = kernel.init(random.key(0), 4, {"w": jnp.zeros(30)}, args, {})
    first = kernel.sample(state, args, {})
    counts = [np.asarray(s.z["w"]) for s in (first, kernel.sample(first, args, {}))]
    for number, count in zip((30, 60), counts, strict=True):
        np.testing.assert_allclose(count, count.round(), atol=1e-3)
        assert count.sum() == pytest.approx(number, rel=1e-4)
    later = counts[1] - counts[0]
    # The share of the most frequent of 30 rows in 30 draws is above a third with probability 1e-7.
    assert counts[0].max() < 10
    assert np.abs(later - counts[0]).max() > 0.5


def unit_steps():
    """An optimizer that moves up by 1 each step, whatever the gradient."""
    return optax.GradientTransformation(lambda p: (), lambda g, s, p=None: (jnp.ones_like(g), s))


def all_threes(num_rows):
    w = numpyro.sample("w", dist.Normal(0.0, 100.0))
    with numpyro.plate("data", num_rows) as i:
        numpyro.sample("y", dist.Normal(w, 1.0), obs=3.0 * jnp.ones(num_rows)[i])


def test_sampling_starts_where_held_out_rows_were_predicted_best():
    warm = infer.WarmStart(0.6, num_steps=6, optimizer=unit_steps(), held_out=0.25)
    kernel = infer.SGLD(all_threes, 1e-9, steps_per_draw=1, warm_start=warm)
    state = kernel.init(random.key(0), 10, {"w": jnp.zeros(())}, (8,), {})
    seen = []
    for _ in range(6):
        state = kernel.sample(state, (8,), {})
        seen.append(float(state.z["w"]))
    np.testing.assert_allclose(seen, [1, 2, 3, 4, 5, 3])
    assert float(state.optimizer.score) == pytest.approx(-np.log(2 * np.pi), rel=1e-5)  # of two rows


def test_starts_are_spread():
    def start(spread):
        kernel = infer.SGLD(all_threes, warm_start=infer.WarmStart(spread=spread))
        return kernel.init(random.key(0), 4, None, (8,), {}).z["w"]

    np.testing.assert_allclose(start(3.0), 3.0 * start(1.0), rtol=1e-6)


@pytest.mark.parametrize("size", [1.0, 1e-5])
def test_scales_come_from_the_squared_gradients_of_the_warm_start(size):
    """An optimizer that stays: G is one over 1e-5 and the root mean square of the gradients per row, of mean 1."""
    slopes = RNG.normal(size=(N, 3)) * np.array([1.0, 3.0, 0.2]) * size
    warm = infer.WarmStart(0.5, num_steps=4000, optimizer=optax.sgd(0.0))
    kernel = infer.PSGLD(linear, 1e-6, preconditioner="warm_start", warm_start=warm, steps_per_draw=1)
    args = (jnp.asarray(slopes, jnp.float32), jnp.zeros(3), 1)
    state = kernel.init(random.key(0), 2, {"w": jnp.zeros(3)}, args, {})
    found = np.asarray(jax.jit(lambda s: kernel.sample(s, args, {}))(state).engine.adaptation) ** 2
    exact = 1 / (1e-5 + (slopes**2).mean(0) ** 0.5)
    # Mean squares of 4000 rows have relative standard errors of about sqrt(2 / 4000).
    np.testing.assert_allclose(found, exact / exact.mean(), rtol=5 * (2 / 4000) ** 0.5)


def grouped(y, batch_size=None):
    """Two groups of rows; the plate of groups holds a latent site as well."""
    with numpyro.plate("groups", 2, dim=-2):
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", y.shape[1], subsample_size=batch_size, dim=-1) as i:
            numpyro.sample("y", dist.Normal(a, 1.0), obs=y[:, i])


@pytest.mark.parametrize("batch_size", [None, 1])
def test_rows_that_are_not_held_out_weigh_as_much_as_all(batch_size):
    """With all of them, the exact gradient; with one per minibatch, the exact gradients of each, and no others."""
    y = jnp.asarray(RNG.normal(size=(2, 10)), jnp.float32)
    kernel = infer.SGLD(grouped, 1e-3, warm_start=0.0)
    state = kernel.init(random.key(0), 0, None, (y, batch_size), {})
    unravel = ravel_pytree(state.z)[1]
    gradient = learning_gradient(kernel.target, 0.3, unravel, (y, batch_size), {})
    learned = np.asarray(held_out_rows(10, 0.3)[0])
    at = jnp.array([0.3, -0.8])
    by_row = np.asarray(at)[:, None] + 10 * (np.asarray(at)[:, None] - np.asarray(y)[:, learned])
    if batch_size is None:
        np.testing.assert_allclose(gradient((), at, {})[1], by_row.mean(1), rtol=1e-5)
        return
    batches = jax.vmap(gradient.stream.draw, (None, 0))(state.engine.seeds.batch, jnp.arange(60))
    found = jax.vmap(lambda batch: gradient((), at, batch)[1])(batches)
    distance = np.abs(np.asarray(found)[:, None] - by_row.T).max(-1)
    assert distance.min(1).max() < 1e-4
    assert set(distance.argmin(1)) == set(range(7))


# ------------------------------------------------------------------------------------ chains that move, or say so

ROWS, COLUMNS = 2000, np.array([0.1, 1.0, 10.0])


def linear_model(x, y, batch_size=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with numpyro.plate("data", len(x), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, 1.0), obs=y[i])


def linear_run(kernel, batch_size, num_samples=200):
    """Two chains, and the exact posterior sds: inputs of three sizes make gradient noise of 1 : 100 : 10,000."""
    x = random.normal(random.key(0), (ROWS, 3)) * COLUMNS
    y = x @ jnp.array([1.0, -1.0, 0.5]) + random.normal(random.key(1), (ROWS,))
    mcmc = MCMC(kernel, num_warmup=200, num_samples=num_samples, num_chains=2, chain_method="vectorized")
    mcmc.run(random.key(2), x, y, batch_size)
    return mcmc, np.sqrt(np.diag(np.linalg.inv(np.eye(3) + np.asarray(x, np.float64).T @ np.asarray(x))))


@pytest.mark.parametrize("name", ["SGLD", "PSGLD", "SGHMC", "SGNHT", "MCLMC"])
def test_minibatch_kernels_cover_the_posterior_by_default(name):
    """Sds within a fifth of the exact ones in all directions: 400 draws, bias 0.05 of a variance.

    Without the preconditioner the first direction, a hundredth of the curvature of the second, hardly moves: its
    sd over the draws is below a tenth of the exact one.
    """
    mcmc, exact = linear_run(getattr(infer, name)(linear_model, steps_per_draw=50), 20)
    ratio = np.asarray(mcmc.get_samples()["w"]).std(axis=0) / exact
    assert np.all(np.abs(ratio - 1) < 0.2), ratio
    about = mcmc.sampler.describe(mcmc.last_state)
    assert about["frozen_chains"] == "[]"


@pytest.mark.parametrize(
    ("name", "step_size", "batch_size"), [("SGLD", 1e-12, 20), ("MALA", 1e10, None)], ids=["SGLD", "MALA"]
)
def test_chains_that_hardly_moved_are_reported(name, step_size, batch_size):
    kernel = getattr(infer, name)(linear_model, step_size=step_size, steps_per_draw=50)
    mcmc, _ = linear_run(kernel, batch_size, num_samples=20)
    assert mcmc.sampler.describe(mcmc.last_state)["frozen_chains"] == "[0, 1]"
    with pytest.warns(HealthWarning, match=r"(moved: chains \[0, 1\] accept below 1 %|frozen: chain \d holds)"):
        to_inference_data(mcmc)


def test_too_few_steps_for_the_gradient_noise_are_reported():
    """One row in 100: a position is forgotten in 101 * 2 / 0.2 steps; five times that are 5000, not 1000."""

    def found(batch_size):
        mcmc, _ = linear_run(infer.SGLD(linear_model, steps_per_draw=50), batch_size, num_samples=20)
        about = mcmc.sampler.describe(mcmc.last_state)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HealthWarning)
            report = metrics.health(to_inference_data(mcmc))
        return about, {finding.name: finding for finding in report.findings}

    about, checks = found(20)
    assert about["steps_kept"] == 1000
    assert about["steps_needed"] == pytest.approx(5000, rel=0.2)
    assert checks["steps"].verdict == "warning"
    assert "5e+03" in checks["steps"].what
    # Gradients of all the data have none.
    about, checks = found(None)
    assert about["steps_needed"] == 0
    assert "steps" not in checks
