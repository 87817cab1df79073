"""Stationary distributions against the exact theory of each discretization.

The targets are products of P equal coordinates, so that one flat chain holds P independent ones: the standard error
of a moment is the spread over coordinates / sqrt(P). Bands of 4 standard errors fail with probability 6e-5 each;
seeds are fixed.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, optimize, special
from scipy.linalg import solve_discrete_lyapunov

from numpyro_bnn.sgmcmc import (
    BAOAB,
    GGMC,
    HMC,
    MALA,
    Dense,
    Diagonal,
    Full,
    Minibatch,
    NoseHoover,
    Overdamped,
    RMSProp,
    build,
)
from numpyro_bnn.sgmcmc.engine import reset_statistics
from numpyro_bnn.sgmcmc.streams import Keys

LAM = 1.3
slow = pytest.mark.slow
QUARTIC = 2 * special.gamma(0.75) / special.gamma(0.25)  # E[x^2] under exp(-x^4 / 4), 0.676


def gaussian(q):
    return 0.5 * LAM * jnp.vdot(q, q)


def quartic(q):
    return 0.25 * jnp.sum(q**4)


def convex(q):
    """Not Gaussian, with second derivatives in [1, 3]."""
    return 0.5 * jnp.vdot(q, q) + 2 * jnp.sum(jnp.log(jnp.cosh(q)))


def second_moment(density):
    return integrate.quad(lambda x: x**2 * density(x), -9, 9)[0] / integrate.quad(density, -9, 9)[0]


def noisy(potential, variance):
    """Return an estimator whose gradient has independent noise of the given variance in each coordinate."""

    def potential_fn(q, key):
        return potential(q) + jnp.sqrt(variance) * jnp.vdot(q, jax.random.normal(key, q.shape))

    return Minibatch(potential_fn, Keys())


def moments(sampler, size, burn, keep, thin=1, seed=1, num_warmup=0):
    """Return per-coordinate means of x^2, (size,), and the final state."""

    @jax.jit
    def run(state):
        def body(carry, _):
            state, total = carry
            state = sampler.run(state, thin)
            return (state, total + state.position**2), None

        state = reset_statistics(sampler.run(state, burn))
        return jax.lax.scan(body, (state, jnp.zeros(size)), None, keep)[0]

    state, total = run(sampler.init(jnp.zeros(size), jax.random.key(seed), num_warmup))
    assert int(state.first_divergence) == -1
    return np.asarray(total, np.float64) / keep, state


def assert_mean(values, expected, sigmas=4.0):
    error = values.std() / len(values) ** 0.5
    assert abs(values.mean() - expected) < sigmas * error, (values.mean(), expected, error)
    assert error < 0.02 * expected  # the band is narrow enough to see an error of 10 %


@pytest.mark.parametrize("temperature", [0.5, pytest.param(1.0, marks=slow)])
def test_sgld_has_the_theoretical_variance(temperature):
    eps, variance = 0.5, 2.0
    sampler = build(noisy(gaussian, variance), Overdamped(), schedule=eps, temperature=temperature)
    squares, _ = moments(sampler, 4096, 60, 150)
    eta = eps / 2
    assert_mean(squares, (2 * eta * temperature + eta**2 * variance) / (1 - (1 - eta * LAM) ** 2))


def kernel_of(h, rate, variance, spread):
    """Return (A, noise covariance) of the linear map of (x, r, g), g the gradient shared by two kicks."""
    x, r, g = np.eye(3)
    kicked = r - h / 2 * g
    fresh, gain = np.exp(-rate) * kicked, spread
    x_new, x_noise = x + h / 2 * (kicked + fresh), h / 2 * gain
    r_new, r_noise = fresh, gain
    g_new, g_noise = LAM * x_new, LAM * x_noise
    r_new, r_noise = r_new - h / 2 * g_new, r_noise - h / 2 * g_noise
    sources = [np.array([x_noise, r_noise, g_noise]), np.sqrt(variance) * np.array([0, -h / 2, 1])]
    return np.stack([x_new, r_new, g_new]), sum(np.outer(s, s) for s in sources)


@pytest.mark.parametrize(
    ("dynamics", "variance", "temperature"),
    [
        (BAOAB(1.5), 3.0, 0.5),
        *(
            pytest.param(*row, marks=slow)
            for row in ((BAOAB(1.5), 0.0, 1.0), (BAOAB(1.5), 0.0, 0.5), (BAOAB(1.5), 3.0, 1.0))
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, float) else type(value).__name__,
)
def test_underdamped_has_the_theoretical_moments(dynamics, variance, temperature):
    eps = 0.64
    h = eps**0.5
    spread = np.sqrt((1 - np.exp(-2 * 1.5 * h)) * temperature)
    theory = solve_discrete_lyapunov(*kernel_of(h, 1.5 * h, variance, spread))
    if variance == 0:  # the published closed forms
        closed = [temperature / LAM, (1 - eps * LAM / 4) * temperature]
        np.testing.assert_allclose([theory[0, 0], theory[1, 1]], closed)
    gradient = noisy(gaussian, variance) if variance else Full(gaussian)
    squares, state = moments(build(gradient, dynamics, schedule=eps, temperature=temperature), 4096, 40, 120)
    assert_mean(squares, theory[0, 0])
    # Time average of the kinetic temperature over 4096 coordinates; correlated steps counted as 120 / 8.
    error = theory[1, 1] * (2 / (4096 * 120 / 8)) ** 0.5
    assert abs(float(state.statistics.kinetic_temperature) - theory[1, 1]) < 4 * error


@slow
def test_nose_hoover_corrects_unknown_gradient_noise():
    """For P -> infinity xi is constant, and the chain is BAOAB with noise A and friction xi: a linear problem."""
    eps, friction, variance = 0.09, 1.0, 4.0
    h = eps**0.5

    def theory(xi):
        spread = np.sqrt(friction * (1 - np.exp(-2 * xi * h)) / xi)
        cov = solve_discrete_lyapunov(*kernel_of(h, xi * h, variance, spread))
        kick = np.array([0, 1, -h / 2])
        kicked = kick @ cov @ kick
        fresh = np.exp(-2 * xi * h) * kicked + spread**2
        return cov[0, 0], kicked, (kicked + fresh) / 2 - 1

    xi = optimize.brentq(lambda value: theory(value)[2], 0.5, 5)
    # The text-book value, up to order h^2.
    np.testing.assert_allclose(xi, friction + h * variance / 2, rtol=h**2)
    sampler = build(noisy(gaussian, variance), NoseHoover(friction), schedule=eps)
    squares, state = moments(sampler, 8192, 150, 300)
    position, kicked, _ = theory(xi)
    assert_mean(squares, position)
    # A step ends half a thermostat step after its refresh; xi fluctuates by 1 / sqrt(P), 4 of which are allowed.
    np.testing.assert_allclose(state.memory.friction, xi - h / 2 * (kicked - 1), atol=4 / 8192**0.5)
    # Without the thermostat the same noise heats the positions by about h V / (2 A), 60 %; with it by order h^2.
    assert abs(squares.mean() * LAM - 1) < h**2 / 2
    hot, _ = moments(build(noisy(gaussian, variance), BAOAB(friction), schedule=eps), 8192, 150, 100)
    assert hot.mean() * LAM > 1.5


def without_flip(kind):
    """The mistake of public implementations: a rejected trajectory keeps its momentum."""

    class WithoutFlip(kind):
        def step(self, context, position, memory, draw):
            move = super().step(context, position, memory, draw)
            rejected = jnp.all(move.position == position)
            momentum = jnp.where(rejected, -move.memory.momentum, move.memory.momentum)
            return move._replace(memory=move.memory._replace(momentum=momentum))

    return WithoutFlip


def chains(sampler, count, steps, seed=2):
    """Return each chain's time average of x^2 after half of the steps, (count,)."""

    def one(key):
        def body(state, _):
            state = sampler.step(state)
            return state, (state.position[0] ** 2, state.statistics.accept_prob)

        state = sampler.init(0.5 * jax.random.normal(key, (1,)), jax.random.fold_in(key, 1))
        state, (squares, _) = jax.lax.scan(body, state, None, steps)
        return squares[steps // 2 :].mean(), state.statistics.accept_prob

    squares, accept = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(seed), count))
    assert 0.3 < accept.mean() < 0.97  # some rejections, or nothing is tested
    return np.asarray(squares, np.float64)


# The row that is run always: not Gaussian, at a temperature.
TARGETS = pytest.mark.parametrize(
    ("target", "temperature"),
    [
        ("quartic", 0.5),
        pytest.param("quartic", 1.0, marks=slow),
        pytest.param("gaussian", 1.0, marks=slow),
        pytest.param("gaussian", 0.5, marks=slow),
    ],
)


@TARGETS
def test_mala_is_unbiased(target, temperature):
    potential = {"gaussian": gaussian, "quartic": quartic}[target]
    expected = {"gaussian": temperature / LAM, "quartic": QUARTIC * temperature**0.5}[target]
    sampler = build(Full(potential), MALA(), schedule=0.8, temperature=temperature)
    assert_mean(chains(sampler, 4000, 120), expected)


@pytest.mark.parametrize("momentum_decay", [0.3, pytest.param(1.0, marks=slow)])
@TARGETS
def test_hmc_is_unbiased(target, temperature, momentum_decay):
    potential = {"gaussian": gaussian, "quartic": quartic}[target]
    expected = {"gaussian": temperature / LAM, "quartic": QUARTIC * temperature**0.5}[target]
    sampler = build(Full(potential), HMC(3, momentum_decay, jitter=0.3), schedule=0.8, temperature=temperature)
    assert_mean(chains(sampler, 4000, 60), expected)


@TARGETS
def test_ggmc_is_unbiased_with_minibatch_noise(target, temperature):
    potential = {"gaussian": gaussian, "quartic": quartic}[target]
    expected = {"gaussian": temperature / LAM, "quartic": QUARTIC * temperature**0.5}[target]
    sampler = build(noisy(potential, 1.0), GGMC(potential, 3, friction=0.5), schedule=0.5, temperature=temperature)
    assert_mean(chains(sampler, 4000, 80), expected)


@slow
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (GGMC(gaussian, 3, friction=0.05), without_flip(GGMC)(gaussian, 3, friction=0.05)),
        (HMC(3, momentum_decay=0.1), without_flip(HMC)(3, momentum_decay=0.1)),
    ],
    ids=["GGMC", "HMC"],
)
def test_the_test_sees_a_missing_momentum_flip(right, wrong):
    def squares(dynamics):
        return chains(build(Full(gaussian), dynamics, schedule=1.0), 4000, 80)

    assert_mean(squares(right), 1 / LAM)
    wrong = squares(wrong)
    assert wrong.mean() - 1 / LAM > 8 * wrong.std() / 4000**0.5


@pytest.mark.parametrize("dynamics", [pytest.param(Overdamped(), marks=slow), BAOAB(1.0)], ids=["SGLD", "BAOAB"])
def test_dense_preconditioner_keeps_the_target(dynamics):
    """With G equal to the covariance every direction behaves like a unit Gaussian."""
    covariance = np.array([[1.0, 0.9], [0.9, 1.0]]) * np.outer([1, 30], [1, 30])
    precision = jnp.asarray(np.linalg.inv(covariance), jnp.float32)
    sampler = build(Full(lambda q: 0.5 * q @ precision @ q), dynamics, Dense(covariance), schedule=0.4)

    def one(key):
        def body(state, _):
            state = sampler.run(state, 4)
            return state, jnp.outer(state.position, state.position)

        return jax.lax.scan(body, sampler.run(sampler.init(jnp.zeros(2), key), 60), None, 40)[1].mean(0)

    outer = np.asarray(jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(5), 1500)), np.float64)
    eta = 0.2
    factor = 2 * eta / (1 - (1 - eta) ** 2) if isinstance(dynamics, Overdamped) else 1.0
    for i, j in ((0, 0), (0, 1), (1, 1)):
        assert_mean(outer[:, i, j], covariance[i, j] * factor)


@slow
def test_fixed_preconditioner_pays_on_an_ill_conditioned_target():
    """Condition number 10^4: effective sample size per step, from the variance of means of stationary chains."""
    variances = np.repeat([1.0, 1e-4], 256).astype(np.float32)
    precision = jnp.asarray(1 / variances)
    gradient = Full(lambda q: 0.5 * jnp.vdot(q, precision * q))
    steps = 2000

    def slowest_ess_per_step(preconditioner, eps):
        sampler = build(gradient, Overdamped(), preconditioner, schedule=eps)
        start = sampler.init(jnp.sqrt(variances) * jax.random.normal(jax.random.key(6), (512,)), jax.random.key(7))

        def body(carry, _):
            state = sampler.step(carry[0])
            return (state, carry[1] + state.position), None

        total = jax.jit(lambda s: jax.lax.scan(body, (s, jnp.zeros(512)), None, steps)[0][1])(start)
        means = np.asarray(total).reshape(2, 256) / steps
        return min(variances[::256] / (steps * means.var(axis=1)))

    plain = slowest_ess_per_step(None, 1e-4)  # eta * lam = 1/2 in the stiff direction
    preconditioned = slowest_ess_per_step(Diagonal(variances), 1.0)
    assert preconditioned > 50 * plain, (preconditioned, plain)


@slow
@pytest.mark.parametrize(("running", "low", "high"), [(False, 0.65, 0.71), (True, 1.0, 1.5)])
def test_rmsprop_frozen_is_right_and_running_is_not(running, low, high):
    """Target exp(-x^4 / 4), E[x^2] = 0.676. The band of the frozen form is 5 %: step-size bias 2 %, 4 MCSE 2 %."""
    preconditioner = RMSProp(decay=0.9, damping=1e-1, running=running)
    sampler = build(Full(quartic), Overdamped(), preconditioner, schedule=0.02)
    squares, _ = moments(sampler, 2048, 1500, 400, thin=5, num_warmup=500)
    assert low < squares.mean() < high
    assert preconditioner.biased == running


@slow
def test_frozen_rmsprop_is_exact_under_mala():
    def one(key):
        sampler = build(Full(quartic), MALA(), RMSProp(decay=0.9, damping=0.3), schedule=0.8)
        state = sampler.run(sampler.init(jnp.ones(1), key, num_warmup=50), 100)
        return jax.lax.scan(lambda s, _: (sampler.step(s), s.position[0] ** 2), state, None, 100)[1].mean()

    squares = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(8), 4000))
    assert_mean(np.asarray(squares, np.float64), QUARTIC)


@slow
def test_bias_of_sgld_is_of_first_order():
    step_sizes, biases, errors = (0.1, 0.2, 0.4), [], []
    for eps in step_sizes:
        sampler = build(Full(gaussian), Overdamped(), schedule=eps)
        squares, _ = moments(sampler, 16_384, int(8 / eps), 120, thin=max(1, int(0.5 / eps)))
        biases.append(squares.mean() - 1 / LAM)
        errors.append(squares.std() / len(squares) ** 0.5)
    slopes = np.diff(np.log(biases)) / np.diff(np.log(step_sizes))
    relative = np.array(errors) / biases
    spread = np.hypot(relative[1:], relative[:-1]) / np.diff(np.log(step_sizes))
    # 4 standard errors, plus the next order: 0.11 from the Gaussian closed form.
    assert np.all(np.abs(slopes - 1) < 4 * spread + 0.15), (slopes, spread)
    assert np.all(spread < 0.25), spread


@slow
def test_baoab_has_hardly_any_bias_on_a_convex_target():
    """At h = 0.6, where a splitting of ordinary second order is off by several percent."""
    exact = second_moment(lambda x: np.exp(-(x**2) / 2) / np.cosh(x) ** 2)
    squares, _ = moments(build(Full(convex), BAOAB(1.0), schedule=0.36), 16_384, 13, 120)
    error = squares.std() / len(squares) ** 0.5
    assert abs(squares.mean() - exact) < 4 * error
    assert error < 0.003 * exact
