"""Microcanonical dynamics against a transcription of the equations, Jacobians, closed
forms and exact targets.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import each, squares_of
from numpy.testing import assert_allclose as close

from numpyro_bnn.infer import MCLMC, implied_bias
from numpyro_bnn.sgmcmc import Full, Microcanonical, build
from numpyro_bnn.sgmcmc.dynamics import Direction
from numpyro_bnn.sgmcmc.interfaces import Evaluation, StepContext, StepRandomness

BOTH = pytest.mark.parametrize("integrator", ["mclachlan", "leapfrog"])
P = 6
STIFF = np.linspace(0.5, 3.0, P)
Q, NOISE = np.random.default_rng(1).normal(size=(2, P))
U = np.random.default_rng(2).normal(size=P)
U = U / np.linalg.norm(U)


def potential(q):
    """Not Gaussian, coupled."""
    return (
        0.5 * jnp.vdot(q, STIFF * q) + 0.1 * jnp.sum(q**4) + 0.3 * jnp.sin(q[0] * q[1])
    )


def slope(q):
    """Minus the gradient, written out."""
    force = -STIFF * q - 0.4 * q**3
    force[:2] -= 0.3 * np.cos(q[0] * q[1]) * q[1::-1]
    return force


def value(q):
    return 0.5 * q @ (STIFF * q) + 0.1 * np.sum(q**4) + 0.3 * np.sin(q[0] * q[1])


def turned(u, force, time):
    """The exact flow of du = (I - uu') f dt / (P - 1), in its hyperbolic form, and the
    energy it takes up.
    """
    size = np.linalg.norm(force)
    e, delta = force / size, time * size / (len(u) - 1)
    stretch = np.cosh(delta) + (u @ e) * np.sinh(delta)
    return (u + (np.sinh(delta) + (u @ e) * (np.cosh(delta) - 1)) * e) / stretch, (
        len(u) - 1
    ) * np.log(stretch)


def transcribed(q, u, integrator, eps, root, temperature):
    outer = {"leapfrog": 0.5, "mclachlan": 0.1931833275037836}[integrator]
    turns = (
        [outer, outer] if integrator == "leapfrog" else [outer, 1 - 2 * outer, outer]
    )
    start, kinetic = value(q) / temperature, 0.0
    for number, share in enumerate(turns):
        if number:
            q = q + eps / (len(turns) - 1) * root * u
        u, change = turned(u, root * slope(q) / temperature, share * eps)
        kinetic += change
    return q, u, kinetic + value(q) / temperature - start


def one_step(
    dynamics,
    q,
    u,
    eps,
    *,
    target=potential,
    noise=0.0,
    uniform=1.0,
    root=1.0,
    temperature=1.0,
):
    """The step of the package from a position and a direction."""

    def evaluate(q, batch):
        return Evaluation(q, *jax.value_and_grad(target)(q), ())

    def product(_, v):
        return root * v

    q = jnp.asarray(q)
    numbers = (jnp.asarray(n, q.dtype) for n in (eps, temperature))
    context = StepContext(evaluate, product, product, (), *numbers, jnp.asarray(False))
    length = jnp.asarray(
        q.size**0.5 if dynamics.length is None else dynamics.length, q.dtype
    )
    memory = Direction(jnp.asarray(u, q.dtype), *jax.value_and_grad(target)(q), length)
    randomness = StepRandomness(
        jnp.broadcast_to(jnp.asarray(noise, q.dtype), (1, q.size)),
        (),
        jnp.asarray(uniform),
    )
    return dynamics.step(context, q, memory, randomness)


@BOTH
def test_a_step_is_the_published_one(integrator, x64):
    eps, length, root, temperature = 0.9, 2.5, np.linspace(0.7, 1.4, P), 0.6
    options = {"noise": NOISE, "root": root, "temperature": temperature}
    found = one_step(Microcanonical(length, integrator), Q, U, eps, **options)
    refreshed = U + np.sqrt((np.exp(2 * eps / length) - 1) / P) * NOISE
    q, u, error = transcribed(
        Q, refreshed / np.linalg.norm(refreshed), integrator, eps, root, temperature
    )
    close(found.position, q, rtol=1e-6)
    close(found.memory.direction, u, rtol=1e-6)
    close(found.energy_error, error, rtol=1e-6)
    assert np.abs(q - Q).max() > 0.1
    assert abs(error) > 1e-3


def test_the_kinetic_energy_is_the_jacobian(x64):
    """Minus the log determinant on (position, sphere), in tangent planes."""

    @jax.jit
    def step(q, u):
        found = one_step(Microcanonical(float("inf")), q, u / jnp.linalg.norm(u), 0.8)
        return found.position, found.memory.direction

    def plane(u):
        # (P, P - 1), orthogonal to u
        return np.linalg.svd(np.asarray(u)[None])[2][1:].T

    (qq, qu), (uq, uu) = jax.jit(jax.jacobian(step, (0, 1)))(Q, U)
    q, u = step(Q, U)
    first, last = plane(U), plane(u)
    _, logdet = np.linalg.slogdet(
        np.block([[qq, qu @ first], [last.T @ uq, last.T @ uu @ first]])
    )
    error = transcribed(Q, U, "mclachlan", 0.8, 1.0, 1.0)[2]
    close(-logdet, error - (value(np.asarray(q)) - value(Q)), rtol=1e-8)
    assert abs(logdet) > 0.1


def test_energy_errors_keep_their_digits():
    """Of 60 steps at potentials near 10^4, in float32 and float64."""
    size = 2000
    q = np.random.default_rng(3).normal(size=size) * 3

    def quartic(q):
        return 0.5 * jnp.vdot(q, q) + 0.01 * jnp.sum(q**4)

    @jax.jit
    def error(q, u):
        def body(carry, _):
            found = one_step(Microcanonical(float("inf")), *carry, 1.0, target=quartic)
            return (found.position, found.memory.direction), found.energy_error

        return jax.lax.scan(body, (q, u), None, 60)[1].sum()

    u = np.ones(size) / size**0.5
    single = float(error(q.astype(np.float32), u.astype(np.float32)))
    with jax.enable_x64(True):
        double = float(error(q, u))
    assert quartic(q.astype(np.float32)) > 1e4
    assert abs(double) > 0.05
    # 120 gradients with a relative error of 1e-7 each turn the direction by as much,
    # times P.
    close(single, double, atol=0.02)


def test_one_step_in_ten_is_shorter_where_steps_may_be_refused(x64):
    """... by 4, 16 or 64, which are equally likely; elsewhere none is."""
    dynamics = Microcanonical(float("inf"), max_energy_error=5.0)
    uniform = (np.arange(3000) + 0.5) / 3000

    @jax.jit
    @jax.vmap
    def moved(uniform):
        return one_step(
            dynamics, Q, U, 0.8, target=lambda q: 0.0 * q.sum(), uniform=uniform
        ).position

    lengths = np.linalg.norm(moved(uniform) - Q, axis=1) / 0.8
    found = {
        float(size): int(count)
        for size, count in zip(
            *np.unique(lengths.round(9), return_counts=True), strict=True
        )
    }
    assert found == {1.0: 3000 - 3 * 100, 0.25: 100, 0.0625: 100, 0.015625: 100}


# -- stationary distributions ----------------------------------------------------------


def test_the_implied_bias_is_that_of_leapfrog():
    """OBABO with the angle h: variance 1 / (1 - h^2 / 4)."""
    for h in np.linspace(0.01, 1.9, 50):
        step = np.array([[1 - h**2 / 2, h], [-h * (1 - h**2 / 4), 1 - h**2 / 2]])
        variance = 1 / (1 - h**2 / 4)
        change = (step.T @ step - np.eye(2)) @ np.diag([variance, 1.0])
        close(implied_bias(0.5 * np.trace(change @ change)), variance - 1, rtol=1e-6)
    first, last = MCLMC(lambda: None).energy_targets
    close(implied_bias(last), 0.05)  # bias_tolerance
    # or where steps have errors of a quarter of the largest that is taken
    assert first == 100 * last
    energies = np.geomspace(1e-12, 10, 40)
    bias = implied_bias(energies)
    assert implied_bias(0.0) == 0
    assert np.all(
        implied_bias((energies[1:] + energies[:-1]) / 2) > (bias[1:] + bias[:-1]) / 2
    )  # concave


def test_biases_are_within_what_the_energy_error_implies():
    """Gaussians of eight widths in 16384 dimensions."""
    size, h = 16_384, 1.2
    scale = jnp.asarray(np.tile(np.linspace(0.3, 1.7, 8), size // 8), jnp.float32)
    target = Full(lambda q: 0.5 * jnp.vdot(q * scale, q * scale))
    sampler = build(
        target, Microcanonical(2 * size**0.5, "mclachlan"), schedule=h * size**0.5
    )
    squares, state = squares_of(
        sampler, jax.random.normal(jax.random.key(2), scale.shape) / scale, 100, 150
    )
    by_width = (squares * np.asarray(scale, np.float64) ** 2 - 1).reshape(-1, 8)
    bias = np.abs(by_width.mean(0)).mean()
    error = (by_width.var(0).sum() / len(by_width)) ** 0.5 / 8
    assert error < 0.1 * bias
    implied = implied_bias(float(state.statistics.energy_variance))
    assert bias + 4 * error < implied < 4 * (bias - 4 * error)  # failure rates of 3e-5


# -- refused steps ---------------------------------------------------------------------


def rounded(q):
    return 0.5 * jnp.vdot(q, q)


@each("bad", [np.nan, 1e6], fast=1)
def test_a_refused_step_turns_back(bad):
    """Outside of a small ball all is impossible: the chain stays and turns back."""

    def walled(q):
        return rounded(q) + jnp.where(jnp.vdot(q, q) > 1e-6, bad, 0.0)

    def after(dynamics):
        sampler = build(Full(walled), dynamics, schedule=0.5)
        state = sampler.init(jnp.zeros(P) + 1e-5, jax.random.key(0))
        return state, jax.jit(sampler.step)(state)

    before, state = after(Microcanonical(float("inf"), max_energy_error=5.0))
    np.testing.assert_array_equal(state.position, before.position)
    close(state.memory.direction, -before.memory.direction, rtol=1e-5)
    assert (int(state.first_divergence), int(state.step)) == (-1, 1)
    assert (int(state.statistics.num_refused), int(state.statistics.num_steps)) == (
        1,
        1,
    )
    # only steps that were taken count
    assert float(state.statistics.energy_variance) == 0
    if np.isfinite(bad):  # without a limit only what is not finite is refused
        before, free = after(Microcanonical(float("inf")))
        assert int(free.statistics.num_refused) == 0
        assert np.abs(free.position - before.position).max() > 1e-2


def test_the_way_down_is_taken_in_warm_up_only():
    """Steps with huge errors that lower the potential."""
    sampler = build(
        Full(lambda q: 1e4 * rounded(q)),
        Microcanonical(2.0, max_energy_error=5.0),
        schedule=1.0,
    )
    start = jnp.full(P, 30.0)
    run = jax.jit(sampler.run, static_argnums=1)
    after, within = (
        run(sampler.init(start, jax.random.key(0), jnp.int32(n)), 40) for n in (0, 40)
    )
    assert int(after.statistics.num_refused) > 0
    assert int(within.statistics.num_refused) == 0
    assert (
        float(rounded(within.position))
        < float(rounded(after.position))
        < float(rounded(start))
    )


def test_warm_up_may_take_larger_errors_than_the_draws():
    dynamics = Microcanonical(2.0, max_energy_error=5.0, max_warm_up_error=float("inf"))
    sampler = build(Full(lambda q: 1e4 * rounded(q)), dynamics, schedule=1.0)
    for num_warmup in (0, 5):
        key, start = jax.random.key(0), jnp.full(P, 1e-3)
        state = sampler.init(start, key, jnp.int32(num_warmup))
        refused = jax.jit(sampler.run, static_argnums=1)(state, 5).statistics
        assert (int(refused.num_refused) > 0) == (num_warmup == 0)
