"""Gradient estimators, preconditioners and schedules of the SG-MCMC engine."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from numpyro_bnn.infer.tuning import gradient_noise
from numpyro_bnn.sgmcmc import (
    ControlVariates,
    Dense,
    Diagonal,
    Epochs,
    Full,
    Minibatch,
    Overdamped,
    RMSProp,
    WithReplacement,
    build,
    streams,
)
from numpyro_bnn.sgmcmc.preconditioners import Blocks, Identity
from numpyro_bnn.sgmcmc.schedules import constant, cyclical, polynomial

N, B, D = 24, 6, 3
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(N, D)), jnp.float32)
Y = jnp.asarray(RNG.integers(0, 2, N), jnp.float32)


def full_potential(q):
    """Bayesian logistic regression with a N(0, 1) prior."""
    return minibatch_potential(q, jnp.arange(N))


def minibatch_potential(q, index):
    logits = X[index] @ q
    likelihood = jnp.sum(jnp.logaddexp(0.0, logits) - Y[index] * logits)
    return 0.5 * q @ q + (N / index.shape[0]) * likelihood


@cache
def mode():
    def newton(_, q):
        return q - jnp.linalg.solve(jax.hessian(full_potential)(q), jax.grad(full_potential)(q))

    return jax.jit(lambda q: jax.lax.fori_loop(0, 20, newton, q))(jnp.zeros(D))


ESTIMATORS = {
    "minibatch": lambda stream: Minibatch(minibatch_potential, stream),
    "control variates": lambda stream: ControlVariates(minibatch_potential, full_potential, stream, mode()),
}


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("batch_size", [5, pytest.param(6, marks=pytest.mark.slow)])
def test_average_over_an_epoch_is_the_full_gradient(name, batch_size):
    """The prior part is unscaled: were it scaled, or the likelihood not, the averages would differ."""
    stream = Epochs(N, batch_size)
    estimator = ESTIMATORS[name](stream)
    state = estimator.init(jnp.ones(D))
    q = jnp.array([0.3, -1.0, 2.0])
    words = streams.seeds(jax.random.key(0), 1)[0]
    blocks = jax.vmap(stream.draw, (None, 0))(words, jnp.arange(np.lcm(N, batch_size) // batch_size))
    values, gradients = jax.vmap(lambda block: estimator(state, q, block))(blocks)
    value, gradient = jax.value_and_grad(full_potential)(q)
    np.testing.assert_allclose(values.mean(), value, rtol=1e-5)
    np.testing.assert_allclose(gradients.mean(0), gradient, rtol=2e-5, atol=1e-5)
    assert gradients.std(0).max() > 1e-3


def test_variance_falls_towards_the_center():
    sampler = build(ESTIMATORS["control variates"](WithReplacement(N, B)), Overdamped(), schedule=0.1)
    plain = build(ESTIMATORS["minibatch"](WithReplacement(N, B)), Overdamped(), schedule=0.1)
    center = mode()

    def total(kind, shift):
        state = kind.init(center, jax.random.key(1))._replace(position=center + shift)
        return float(gradient_noise(kind, state).mean)

    assert total(sampler, 0.0) < 1e-8
    # Second order: ten times nearer is about a hundred times quieter (the same minibatches at each distance).
    assert 50 < total(sampler, 0.1) / total(sampler, 0.01) < 200
    assert total(sampler, 0.1) < 0.05 * total(plain, 0.1)


def test_bad_centers_are_refused():
    estimator = ControlVariates(minibatch_potential, full_potential, WithReplacement(N, B), jnp.zeros(2))
    with pytest.raises(ValueError, match="center"):
        estimator.init(jnp.zeros(D))


def random_covariance(size):
    root = RNG.normal(size=(size, size))
    return root @ root.T + 0.1 * np.eye(size)


PRECONDITIONERS = {
    "identity": (Identity(), np.eye(5)),
    "scalar": (Diagonal(2.5), 2.5 * np.eye(5)),
    "diagonal": (Diagonal(np.arange(1.0, 6.0)), np.diag(np.arange(1.0, 6.0))),
    "dense": (lambda G: (Dense(G), G))(random_covariance(5)),
    "blocks": (
        Blocks([(2, Dense([[2.0, 1.0], [1.0, 3.0]])), (1, Identity()), (2, Diagonal(4.0))]),
        np.block([[np.array([[2.0, 1.0], [1.0, 3.0]]), np.zeros((2, 3))], [np.zeros((3, 2)), np.diag([1.0, 4, 4])]]),
    ),
}


@pytest.mark.parametrize("name", PRECONDITIONERS)
def test_root_and_transpose_multiply_to_the_matrix(name):
    preconditioner, matrix = PRECONDITIONERS[name]
    state = preconditioner.init(jnp.zeros(5))
    root = jax.vmap(preconditioner.root, (None, 0), 1)(state, jnp.eye(5))
    transpose = jax.vmap(preconditioner.transpose, (None, 0), 1)(state, jnp.eye(5))
    np.testing.assert_allclose(root.T, transpose, atol=1e-6)
    np.testing.assert_allclose(root @ transpose, matrix, rtol=2e-5, atol=1e-5)
    assert not preconditioner.adapts


def test_rmsprop_learns_in_warm_up_only():
    G = RMSProp(decay=0.5, damping=0.1, num_data=2)
    state = G.update(G.init(jnp.ones(2)), jnp.array([4.0, 8.0]), jnp.asarray(True))
    np.testing.assert_allclose(state.mean_square, [4.0, 16.0])  # the first squared mean gradient
    state = G.update(state, jnp.array([0.0, 4.0]), jnp.asarray(True))
    np.testing.assert_allclose(state.mean_square, [2.0, 10.0])
    frozen = G.update(state, jnp.array([jnp.inf, 4.0]), jnp.asarray(False))
    np.testing.assert_array_equal(frozen.mean_square, state.mean_square)
    np.testing.assert_allclose(G.root(state, jnp.ones(2)) ** 2, 1 / (0.1 + np.sqrt([2.0, 10.0])), rtol=1e-6)
    running = RMSProp(decay=0.5, damping=0.1, num_data=2, running=True)
    moved = running.update(state, jnp.array([0.0, 4.0]), jnp.asarray(False))
    np.testing.assert_allclose(moved.mean_square, [1.0, 7.0])


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: Diagonal(-1.0), "values"),
        (lambda: Diagonal(np.ones((2, 2))), "values"),
        (lambda: Diagonal(np.ones(4)).init(jnp.zeros(5)), "values"),
        (lambda: Dense(np.ones(3)), "matrix"),
        (lambda: Dense([[1.0, 2.0], [0.0, 1.0]]), "matrix"),
        (lambda: Dense([[1.0, 2.0], [2.0, 1.0]]), "eigenvalue"),
        (lambda: Dense(np.eye(2)).init(jnp.zeros(5)), "matrix"),
        (lambda: Blocks([(2, Identity())]).init(jnp.zeros(5)), "parts"),
        (lambda: RMSProp(decay=1.0), "decay"),
        (lambda: RMSProp(damping=0.0), "damping"),
        (lambda: RMSProp(num_data=0), "num_data"),
        (lambda: polynomial(1.0, 1.0, 0.5), "gamma"),
        (lambda: polynomial(1.0, 1.0, 1.1), "gamma"),
        (lambda: polynomial(-1.0), "`a`"),
        (lambda: cyclical(1.0, 10, 11), "num_cycles"),
        (lambda: cyclical(1.0, 10, 2, explore=1.0), "explore"),
        (lambda: cyclical(0.0, 10, 2), "initial"),
    ],
)
def test_bad_arguments_are_refused(make, argument):
    with pytest.raises(ValueError, match=argument):
        make()


def test_schedules_follow_their_formulas():
    t = np.arange(50)
    np.testing.assert_allclose(polynomial(0.3, 2.0, 0.7)(jnp.arange(50)), 0.3 * (2.0 + t) ** -0.7, rtol=1e-5)
    assert constant(0.2)(5) == 0.2
    # Zhang et al. (2020), equation 1, with K = 50 steps in M = 4 cycles, k = t + 1.
    k, length = t + 1, np.ceil(50 / 4)
    expected = 0.5 / 2 * (np.cos(np.pi * np.mod(k - 1, length) / length) + 1)
    schedule = cyclical(0.5, 50, 4, explore=0.8)
    np.testing.assert_allclose(schedule(jnp.arange(50)), expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(schedule.collects(jnp.arange(50)), np.mod(k - 1, length) / length >= 0.8)
    np.testing.assert_array_equal(schedule.temperature(jnp.arange(50)), schedule.collects(t).astype(float))


@pytest.mark.parametrize("explore", [0.0, 0.1, 0.3, 0.7, 0.9])
def test_cycles_collect_from_their_exact_phase(explore):
    """Phases such as 0.7 = 7 / 10 are not representable; the count of collected steps must not depend on rounding."""
    schedule = cyclical(1.0, 100, 10, explore)
    assert int(schedule.collects(jnp.arange(100)).sum()) == 10 * round(10 * (1 - explore))


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(polynomial(0.1), marks=pytest.mark.slow),
        pytest.param(cyclical(0.1, 30, 3), marks=pytest.mark.slow),
        optax.exponential_decay(0.1, 5, 0.5),
        pytest.param(lambda t: 0.1 / (1 + t), marks=pytest.mark.slow),
    ],
)
def test_any_schedule_drives_the_step(schedule):
    """At temperature 0 on U = q'q / 2 each step multiplies by 1 - eps_t / 2."""
    sampler = build(Full(lambda q: 0.5 * q @ q), Overdamped(), schedule=schedule, temperature=0.0)
    state = jax.jit(sampler.run, static_argnums=1)(sampler.init(jnp.ones(2), jax.random.key(0)), 30)
    factors = [1 - float(schedule(jnp.int32(t))) / 2 for t in range(30)]
    np.testing.assert_allclose(state.position, np.prod(factors), rtol=1e-5)
