"""Stationary distributions against the exact theory of each discretization.

The targets are products of P equal coordinates, so that one flat chain holds P
independent ones: the standard error of a moment is the spread over coordinates /
sqrt(P). Bands of 4 standard errors fail with probability 6e-5 each; seeds are fixed.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import squares_of
from scipy import optimize, special
from scipy.linalg import solve_discrete_lyapunov

from numpyro_bnn.sgmcmc import (
    BAOAB,
    HMC,
    Full,
    Minibatch,
    NoseHoover,
    Overdamped,
    RMSProp,
    build,
)
from numpyro_bnn.sgmcmc.streams import Keys

LAM = 1.3
slow = pytest.mark.slow


def gaussian(q):
    return 0.5 * LAM * jnp.vdot(q, q)


def quartic(q):
    return 0.25 * jnp.sum(q**4)


def noisy(potential, variance):
    """A gradient with independent noise of the given variance in each coordinate."""

    def potential_fn(q, key):
        return potential(q) + jnp.sqrt(variance) * jnp.vdot(
            q, jax.random.normal(key, q.shape)
        )

    return Minibatch(potential_fn, Keys())


def moments(sampler, size, burn, keep, thin=1, num_warmup=0):
    """Per-coordinate means of x^2, (size,), and the final state."""
    return squares_of(sampler, jnp.zeros(size), burn, keep, thin, num_warmup)


def assert_mean(values, expected):
    error = values.std() / len(values) ** 0.5
    assert abs(values.mean() - expected) < 4 * error, (values.mean(), expected, error)
    assert error < 0.02 * expected  # the band is narrow enough to see an error of 10 %


@pytest.mark.slow  # theory/test_kernel_posteriors.py: that of the kernel
def test_sgld_has_the_theoretical_variance():
    eps, variance, temperature = 0.5, 2.0, 0.5
    sampler = build(
        noisy(gaussian, variance), Overdamped(), schedule=eps, temperature=temperature
    )
    squares, _ = moments(sampler, 4096, 60, 150)
    eta = eps / 2
    assert_mean(
        squares,
        (2 * eta * temperature + eta**2 * variance) / (1 - (1 - eta * LAM) ** 2),
    )


def kernel_of(h, rate, variance, spread):
    """(A, noise covariance) of the linear map of (x, r, g); two kicks share g."""
    x, r, g = np.eye(3)
    kicked = r - h / 2 * g
    fresh = np.exp(-rate) * kicked
    x_new, x_noise = x + h / 2 * (kicked + fresh), h / 2 * spread
    g_new, g_noise = LAM * x_new, LAM * x_noise
    r_new, r_noise = fresh - h / 2 * g_new, spread - h / 2 * g_noise
    sources = [
        np.array([x_noise, r_noise, g_noise]),
        np.sqrt(variance) * np.array([0, -h / 2, 1]),
    ]
    return np.stack([x_new, r_new, g_new]), sum(np.outer(s, s) for s in sources)


def test_underdamped_has_the_theoretical_moments():
    eps, friction, variance, temperature = 0.64, 1.5, 3.0, 0.5
    h = eps**0.5
    spread = np.sqrt((1 - np.exp(-2 * friction * h)) * temperature)
    # the published closed forms
    quiet = solve_discrete_lyapunov(*kernel_of(h, friction * h, 0.0, spread))
    np.testing.assert_allclose(
        np.diag(quiet)[:2], [temperature / LAM, (1 - eps * LAM / 4) * temperature]
    )
    theory = solve_discrete_lyapunov(*kernel_of(h, friction * h, variance, spread))
    sampler = build(
        noisy(gaussian, variance),
        BAOAB(friction),
        schedule=eps,
        temperature=temperature,
    )
    squares, state = moments(sampler, 4096, 40, 120)
    assert_mean(squares, theory[0, 0])
    # Time average of the kinetic temperature over 4096 coordinates; correlated steps
    # counted as 120 / 8.
    error = theory[1, 1] * (2 / (4096 * 120 / 8)) ** 0.5
    assert abs(float(state.statistics.kinetic_temperature) - theory[1, 1]) < 4 * error


@slow
def test_nose_hoover_corrects_unknown_gradient_noise():
    """For P -> infinity xi is constant, and the chain is BAOAB with noise A and
    friction xi: a linear problem.
    """
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
    # the text-book value, up to order h^2
    np.testing.assert_allclose(xi, friction + h * variance / 2, rtol=h**2)
    sampler = build(noisy(gaussian, variance), NoseHoover(friction), schedule=eps)
    squares, state = moments(sampler, 8192, 150, 300)
    position, kicked, _ = theory(xi)
    assert_mean(squares, position)
    # A step ends half a thermostat step after its refresh; xi fluctuates by 1 /
    # sqrt(P), 4 of which are allowed.
    np.testing.assert_allclose(
        state.memory.friction, xi - h / 2 * (kicked - 1), atol=4 / 8192**0.5
    )
    # Without the thermostat the same noise heats the positions by about h V / (2 A), 60
    # %; with it by order h^2.
    assert abs(squares.mean() * LAM - 1) < h**2 / 2
    hot, _ = moments(
        build(noisy(gaussian, variance), BAOAB(friction), schedule=eps), 8192, 150, 100
    )
    assert hot.mean() * LAM > 1.5


MALA = HMC(1, jitter=0.0)
TESTED = {
    "MALA": (MALA, 0.8, 120),
    "HMC": (HMC(3, 0.1, jitter=0.3), 1.0, 80),
}


@pytest.mark.parametrize("name", TESTED)
def test_metropolis_tests_leave_no_bias(name):
    """Also where rejected trajectories must reverse their momentum: 4000 chains."""
    (dynamics, eps, num_steps), temperature = TESTED[name], 0.5
    sampler = build(Full(quartic), dynamics, schedule=eps, temperature=temperature)

    def chain(key):
        def body(state, _):
            state = sampler.step(state)
            return state, state.position[0] ** 2

        state = sampler.init(
            0.5 * jax.random.normal(key, (1,)), jax.random.fold_in(key, 1)
        )
        state, squares = jax.lax.scan(body, state, None, num_steps)
        return squares[num_steps // 2 :].mean(), state.statistics.accept_prob

    squares, accept = jax.jit(jax.vmap(chain))(
        jax.random.split(jax.random.key(2), 4000)
    )
    assert 0.3 < accept.mean() < 0.97  # some rejections, or nothing is tested
    assert_mean(
        np.asarray(squares, np.float64),
        2 * special.gamma(0.75) / special.gamma(0.25) * temperature**0.5,
    )


@slow
@pytest.mark.parametrize(
    ("running", "low", "high"), [(False, 0.65, 0.71), (True, 1.0, 1.5)]
)
def test_rmsprop_frozen_is_right_and_running_is_not(running, low, high):
    """Target exp(-x^4 / 4), E[x^2] = 0.676. The band of the frozen form is 5 %:
    step-size bias 2 %, 4 MCSE 2 %.
    """
    preconditioner = RMSProp(decay=0.9, damping=1e-1, running=running)
    sampler = build(Full(quartic), Overdamped(), preconditioner, schedule=0.02)
    squares, _ = moments(sampler, 2048, 1500, 400, thin=5, num_warmup=500)
    assert low < squares.mean() < high
