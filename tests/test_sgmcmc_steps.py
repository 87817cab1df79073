"""One step of each dynamics beside its equations, written again in NumPy: refreshes, kicks, drifts and the test.

The potential is not quadratic, the preconditioner is a Cholesky factor (so that L and L' differ), the temperature is
not 1, and a minibatch adds a linear potential. Everything is in float64, so a step agrees to rounding.
"""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

from numpyro_bnn.sgmcmc import BAOAB, GGMC, HMC, MALA, NoseHoover, Overdamped
from numpyro_bnn.sgmcmc.dynamics import LastStart, Momentum, Thermostat
from numpyro_bnn.sgmcmc.interfaces import Evaluation, StepContext, StepRandomness
from numpyro_bnn.sgmcmc.metropolis import Phase, Trajectory

EPS, TEMPERATURE, FRICTION = 0.09, 0.6, 1.7
H = EPS**0.5
L = np.linalg.cholesky(np.array([[2.0, 0.5, 0.1], [0.5, 1.0, 0.3], [0.1, 0.3, 0.7]]))
POSITION, R = np.array([0.4, -0.9, 1.2]), np.array([1.1, -0.3, 0.5])
NOISE = np.random.default_rng(0).normal(size=(6, 3))
SHIFT = np.array([[0.3, -0.2, 0.1], [-0.4, 0.6, 0.2], [0.1, 0.1, -0.5]])  # minibatches
ALWAYS, NEVER = 1e-300, 1.0  # uniform numbers: every proposal is accepted, or none that raises the energy


def potential(q, batch=0.0):
    return 0.5 * (q * q).sum() + 0.25 * (q**4).sum() + (batch * q).sum()


def slope(q, batch=0.0):
    return q + q**3 + batch


def one_step(dynamics, memory, noise, batch=0.0, uniform=ALWAYS, eps=EPS):
    """The step of the package; returns its result."""

    def evaluate(q, batch):
        return Evaluation(q, potential(q, batch), slope(q, batch), ())

    root = jnp.asarray(L)
    context = StepContext(
        evaluate,
        lambda _, v: root @ v,
        lambda _, v: root.T @ v,
        (),
        jnp.asarray(eps),
        jnp.asarray(TEMPERATURE),
        jnp.asarray(False),
    )
    randomness = StepRandomness(*map(jnp.asarray, (noise, batch, uniform)))
    return dynamics.step(context, jnp.asarray(POSITION), memory, randomness)


def refresh(r, time, noise):
    """Ornstein-Uhlenbeck over a time, at the temperature."""
    return math.exp(-time) * r + math.sqrt((1 - math.exp(-2 * time)) * TEMPERATURE) * noise


def kick(r, q, time, batch=0.0):
    return r - time * L.T @ slope(q, batch)


def energy_of(r):
    return 0.5 * r @ r


def same(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.fixture(autouse=True)
def _double(x64):
    """Every test is in float64."""


def test_overdamped():
    elsewhere = LastStart(jnp.zeros(3), jnp.ones(3), jnp.asarray(False))
    found = one_step(Overdamped(), elsewhere, NOISE[:1], SHIFT[0])
    move = -EPS / 2 * L.T @ slope(POSITION, SHIFT[0]) + math.sqrt(EPS * TEMPERATURE) * NOISE[0]
    same(found.position, POSITION + L @ move)
    same(found.memory.position, POSITION)
    same(found.memory.gradient, slope(POSITION, SHIFT[0]))
    assert not found.memory.refused
    assert not found.refused


def test_overdamped_starts_again_where_the_gradient_was_finite():
    """The step to where it is not was the proposal of a move that is refused, one step late."""
    last = LastStart(jnp.asarray(R), jnp.asarray(POSITION), jnp.asarray(False))
    found = one_step(Overdamped(), last, NOISE[:1], np.array([0.0, np.nan, 0.0]))
    move = -EPS / 2 * L.T @ POSITION + math.sqrt(EPS * TEMPERATURE) * NOISE[0]
    same(found.position, R + L @ move)
    same(found.memory.position, R)
    same(found.memory.gradient, POSITION)
    same(found.evaluation.position, R)
    assert found.memory.refused
    assert found.refused


def test_baoab():
    found = one_step(BAOAB(FRICTION), Momentum(jnp.asarray(R), jnp.asarray(slope(POSITION))), NOISE[:1], SHIFT[0])
    kicked = kick(R, POSITION, H / 2)
    q = POSITION + H / 2 * L @ kicked
    fresh = refresh(kicked, FRICTION * H, NOISE[0])
    q = q + H / 2 * L @ fresh
    same(found.position, q)
    same(found.memory.momentum, kick(fresh, q, H / 2, SHIFT[0]))
    same(found.memory.gradient, slope(q, SHIFT[0]))


@pytest.mark.parametrize("xi", [0.8, -0.5, 0.0])
def test_thermostat(xi):
    """Also at xi = 0 after its first half step, where the spread of the refresh is a limit, 2 A h."""
    kicked = kick(R, POSITION, H / 2)
    warm = H / 2 / 1.4 * (kicked @ kicked / 3 - TEMPERATURE)
    start = xi if xi else -warm
    memory = Thermostat(*map(jnp.asarray, (R, slope(POSITION), start)))
    found = one_step(NoseHoover(FRICTION, mass=1.4), memory, NOISE[:1], SHIFT[0])
    half = start + warm
    spread = FRICTION * (-np.expm1(-2 * half * H) / half if xi else 2 * H)
    fresh = math.exp(-half * H) * kicked + math.sqrt(spread * TEMPERATURE) * NOISE[0]
    q = POSITION + H / 2 * L @ (kicked + fresh)
    same(found.position, q)
    same(found.memory.momentum, kick(fresh, q, H / 2, SHIFT[0]))
    np.testing.assert_allclose(
        found.memory.friction, half + H / 2 / 1.4 * (fresh @ fresh / 3 - TEMPERATURE), rtol=1e-12, atol=1e-15
    )


def probability(start, end):
    """Of accepting, from the total energies at both ends; above 0 and below 1."""
    value = math.exp(-(end - start) / TEMPERATURE)
    assert 0.01 < value < 0.99
    return value


@pytest.mark.parametrize("uniform", [ALWAYS, NEVER])
def test_mala(uniform):
    eps = 0.3
    memory = Evaluation(*map(jnp.asarray, (POSITION, potential(POSITION), slope(POSITION))), ())
    found = one_step(MALA(), memory, NOISE[2:3], uniform=uniform, eps=eps)
    start = math.sqrt(TEMPERATURE) * NOISE[2]
    kicked = kick(start, POSITION, eps**0.5 / 2)
    q = POSITION + eps**0.5 * L @ kicked
    end = kick(kicked, q, eps**0.5 / 2)
    expected = probability(potential(POSITION) + energy_of(start), potential(q) + energy_of(end))
    same(found.accept_prob, expected)
    same(found.position, q if uniform == ALWAYS else POSITION)
    same(found.memory.potential, potential(np.asarray(found.position)))


@pytest.mark.parametrize("uniform", [ALWAYS, NEVER])
def test_hmc(uniform):
    """A rejected trajectory goes back to its start with the momentum reversed."""
    eps = 0.5
    found = one_step(HMC(3, 0.3, jitter=0.2), Phase(jnp.asarray(R)), NOISE[:2], uniform=uniform, eps=eps)
    h = eps**0.5 * (1 + 0.2 * (2 * norm.cdf(NOISE[1, 0]) - 1))
    start = 0.7 * R + math.sqrt((1 - 0.7**2) * TEMPERATURE) * NOISE[0]
    q, r = POSITION, start
    for _ in range(3):
        r = kick(r, q, h / 2)
        q = q + h * L @ r
        r = kick(r, q, h / 2)
    expected = probability(potential(POSITION) + energy_of(start), potential(q) + energy_of(r))
    same(found.accept_prob, expected)
    same(found.position, q if uniform == ALWAYS else POSITION)
    same(found.memory.momentum, r if uniform == ALWAYS else -start)


@pytest.mark.parametrize("uniform", [ALWAYS, NEVER])
def test_ggmc(uniform):
    """Each of three steps has its minibatch; a rejected trajectory returns to (theta, -r) of its very start."""
    memory = Trajectory(jnp.asarray(R), jnp.asarray(potential(POSITION)))
    found = one_step(GGMC(potential, 3, FRICTION), memory, NOISE, SHIFT, uniform)
    q, r, work = POSITION, R, 0.0
    for step in range(3):
        fresh = refresh(r, FRICTION * H / 2, NOISE[2 * step])
        r = kick(fresh, q, H / 2, SHIFT[step])
        q = q + H * L @ r
        r = kick(r, q, H / 2, SHIFT[step])
        work += energy_of(r) - energy_of(fresh)
        r = refresh(r, FRICTION * H / 2, NOISE[2 * step + 1])
    same(found.accept_prob, probability(potential(POSITION), potential(q) + work))
    same(found.position, q if uniform == ALWAYS else POSITION)
    same(found.memory.momentum, r if uniform == ALWAYS else -R)
    same(found.memory.potential, potential(np.asarray(found.position)))
