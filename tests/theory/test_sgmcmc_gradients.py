"""Gradient estimators, minibatches, random numbers, preconditioners and schedules, each
against its own law.

Random numbers are recorded by a dynamics that only keeps what the engine gives it:
whatever makes them, they must be independent and of the right law. Failure rates: 1e-4
for each chi-squared test, 7e-6 for each 4.5 standard errors.
"""

import itertools
import math
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import each, refused
from numpy.testing import assert_allclose as close
from numpy.testing import assert_array_equal as equal
from scipy import stats

from numpyro_bnn import sgmcmc
from numpyro_bnn.sgmcmc import Dense, Diagonal, Epochs, RMSProp, WithReplacement, build
from numpyro_bnn.sgmcmc.interfaces import Dynamics, Evaluation, StepResult
from numpyro_bnn.sgmcmc.preconditioners import Blocks, Identity
from numpyro_bnn.sgmcmc.schedules import constant, cyclical, polynomial
from numpyro_bnn.sgmcmc.streams import Keys, ProductStream

# -- random numbers and minibatches ----------------------------------------------------


class Recorded(NamedTuple):
    start: jax.Array
    noise: jax.Array
    batch: jax.Array
    uniform: jax.Array


class Recorder(Dynamics):
    """Stays where it is, and keeps the random numbers of each step."""

    rows = 2

    def init(self, context, position, draw):
        return Recorded(
            draw.noise[0], jnp.zeros((2, len(position))), draw.batch, draw.uniform
        )

    def step(self, context, position, memory, draw):
        nothing = Evaluation(
            position, jnp.zeros(()), jnp.zeros_like(position), context.adaptation
        )
        return StepResult(position, Recorded(memory.start, *draw), nothing)


def recorded(stream, num_steps, size=1, seeds=(0,)):
    """Start, noise, minibatches and uniform numbers of each chain, a row a step."""
    sampler = build(
        sgmcmc.Minibatch(lambda q, batch: jnp.zeros(()), stream),
        Recorder(),
        schedule=1.0,
    )

    def body(state, _):
        state = sampler.step(state)
        return state, state.memory

    run = jax.jit(
        lambda key: jax.lax.scan(
            body, sampler.init(jnp.zeros(size), key), None, num_steps
        )[1]
    )
    found = [run(jax.random.key(seed)) for seed in seeds]
    return found if len(seeds) > 1 else found[0]


def uniform(counts):
    return stats.chisquare(np.asarray(counts).ravel()).pvalue > 1e-4


def test_noise_is_normal_and_independent_of_all_other_randomness():
    """Also in the tails: rows, coordinates, steps, start, minibatches, uniforms."""
    drawn, again, other = recorded(
        WithReplacement(1000, 2), 1000, size=500, seeds=(0, 0, 1)
    )
    equal(again.noise, drawn.noise)
    noise = np.asarray(drawn.noise, np.float64)
    n = noise.size
    for power, mean, sd in (
        (1, 0, 1),
        (2, 1, 2**0.5),
        (3, 0, 15**0.5),
        (4, 3, 96**0.5),
    ):
        assert abs((noise**power).mean() - mean) < 4.5 * sd / n**0.5, power
    for sigmas in (3, 4):
        share = 2 * stats.norm.sf(sigmas)
        assert (
            abs((np.abs(noise) > sigmas).mean() - share) < 4.5 * (share / n) ** 0.5
        ), sigmas
    assert stats.kstest(noise.ravel()[:400_000], "norm").pvalue > 1e-4
    assert len(np.unique(drawn.noise)) > 0.95 * n
    u = np.asarray(drawn.uniform, float)
    assert ((u > 0) & (u <= 1)).all()
    assert stats.kstest(u, "uniform").pvalue > 1e-4
    rows = {
        "rows": (noise[:, 0], noise[:, 1]),
        "coordinates": (noise[:, :, 1:], noise[:, :, :-1]),
        "halves": (noise[:, :, :250], noise[:, :, 250:]),
        "steps": (noise[1:], noise[:-1]),
        "chains": (noise, other.noise),
        "start": (noise[0, 0], drawn.start[0]),
        "uniform": (noise[:, 0, 0], u),
        "minibatches": (noise[:, 0, 0], drawn.batch[:, 0]),
        "uniform and minibatches": (u, drawn.batch[:, 1]),
    }
    for name, pair in rows.items():
        for power in (1, 2):  # squares would show a common radius
            one, two = (np.asarray(part, float).ravel() ** power for part in pair)
            assert abs(np.corrcoef(one, two)[0, 1]) < 4.5 / len(one) ** 0.5, (
                name,
                power,
            )


def test_indices_with_replacement_are_uniform_and_independent():
    indices = np.asarray(recorded(WithReplacement(37, 5), 20_000).batch)
    assert uniform(np.bincount(indices.ravel(), minlength=37))
    assert uniform(np.bincount(indices[:, 0] * 37 + indices[:, 1], minlength=37**2))
    assert uniform(np.bincount(indices[1:, 0] * 37 + indices[:-1, 0], minlength=37**2))
    assert indices.max() == 36


@each(("num_data", "batch_size"), [(10, 4), (1009, 64)], fast=1)
def test_epochs_cover_the_data_exactly(num_data, batch_size):
    covered = min(math.lcm(num_data, batch_size), 4 * num_data)
    blocks = np.asarray(
        recorded(Epochs(num_data, batch_size), 3 * covered // batch_size).batch
    )
    assert blocks.shape[1] == batch_size
    epochs = blocks.ravel()[: blocks.size // num_data * num_data].reshape(-1, num_data)
    equal(np.sort(epochs, axis=1), np.tile(np.arange(num_data), (len(epochs), 1)))
    assert len(np.unique(epochs, axis=0)) == len(epochs)


def test_orders_places_and_neighbors_of_epochs_are_uniform():
    orders = np.asarray(recorded(Epochs(4, 4), 12_000).batch)
    assert uniform(
        [
            np.all(orders == order, axis=1).sum()
            for order in itertools.permutations(range(4))
        ]
    )
    epochs = np.asarray(recorded(Epochs(50, 25), 20_000).batch).reshape(10_000, 50)
    for place in (0, 1, 25):
        assert uniform(np.bincount(epochs[:, place], minlength=50))
    for other in (1, 25):  # the distance of two images is uniform on 1..49 modulo 50
        assert uniform(
            np.bincount((epochs[:, other] - epochs[:, 0]) % 50, minlength=50)[1:]
        )
    # successive epochs
    assert uniform(np.bincount((epochs[1:, 0] - epochs[:-1, 0]) % 50, minlength=50))


def test_several_plates_draw_independently_and_keys_serve_jax():
    stream = ProductStream(
        {"a": WithReplacement(1000, 50), "b": WithReplacement(1000, 50), "key": Keys()}
    )
    batch = recorded(stream, 1000).batch
    assert (
        abs(np.corrcoef(np.ravel(batch["a"]), np.ravel(batch["b"]))[0, 1])
        < 4.5 / 50_000**0.5
    )
    draws = jax.vmap(jax.random.normal)(batch["key"])
    assert len(np.unique(draws)) == 1000
    assert abs(float(draws.mean())) < 4.5 / 1000**0.5


@pytest.mark.parametrize(
    "dynamics",
    [sgmcmc.BAOAB(1.0), sgmcmc.Microcanonical(fresh=True)],
    ids=["BAOAB", "MCLMC"],
)
def test_keys_of_a_random_potential_are_never_reused(dynamics):
    """Each minibatch has its key, shared only on purpose."""
    for kind in (
        sgmcmc.Minibatch,
        lambda f, s: sgmcmc.ControlVariates(f, lambda q: q @ q, s),
    ):
        sampler = build(
            kind(lambda q, key: q @ jax.random.normal(key, (3,)), Keys()),
            dynamics,
            schedule=0.01,
        )
        with jax.debug_key_reuse(True):
            jax.eval_shape(
                lambda key, s=sampler: s.run(s.init(jnp.ones(3), key), 2),
                jax.random.key(0),
            )


# -- estimators ------------------------------------------------------------------------

N, B, D = 24, 6, 3
X = np.random.default_rng(0).normal(size=(N, D)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 2, N).astype(np.float32)


def of_rows(q, index):
    """Bayesian logistic regression with a N(0, 1) prior."""
    logits = jnp.asarray(X)[index] @ q
    return 0.5 * q @ q + N / index.shape[0] * jnp.sum(
        jnp.logaddexp(0.0, logits) - jnp.asarray(Y)[index] * logits
    )


def of_all(q):
    return of_rows(q, jnp.arange(N))


@cache
def mode():
    newton = jax.jit(
        lambda q: q - jnp.linalg.solve(jax.hessian(of_all)(q), jax.grad(of_all)(q))
    )
    position = jnp.zeros(D)
    for _ in range(20):
        position = newton(position)
    return position


def estimates(estimator, position, batches):
    """Potentials and gradients on each of several minibatches."""
    return jax.jit(jax.vmap(partial(estimator, estimator.init(mode()), position)))(
        batches
    )


def variates(stream=None):
    return sgmcmc.ControlVariates(of_rows, of_all, stream or WithReplacement(N, B))


@pytest.mark.parametrize(
    "estimator",
    [lambda: sgmcmc.Minibatch(of_rows, Epochs(N, B)), variates],
    ids=["plain", "variates"],
)
def test_mean_over_an_epoch_is_the_full_gradient(estimator):
    """Were the prior part scaled, or the likelihood not, averages would differ."""
    q = jnp.array([0.3, -1.0, 2.0])
    values, gradients = estimates(
        estimator(), q, np.random.default_rng(2).permutation(N).reshape(-1, B)
    )
    value, gradient = jax.value_and_grad(of_all)(q)
    close(values.mean(), value, rtol=1e-5)
    close(gradients.mean(0), gradient, rtol=2e-5, atol=1e-5)
    assert gradients.std(0).max() > 1e-3


def test_variance_of_control_variates_falls_towards_the_center():
    """Ten times nearer is about a hundred times quieter."""
    batches = np.random.default_rng(3).integers(0, N, (64, B))
    here, near, far = (
        estimates(variates(), mode() + s, batches)[1].var(0).sum()
        for s in (0.0, 0.01, 0.1)
    )
    plain = (
        estimates(
            sgmcmc.Minibatch(of_rows, WithReplacement(N, B)), mode() + 0.1, batches
        )[1]
        .var(0)
        .sum()
    )
    assert here < 1e-8
    assert 50 < far / near < 200
    assert far < 0.05 * plain


# -- preconditioners and schedules -----------------------------------------------------

ROOT = np.random.default_rng(4).normal(size=(5, 5))
COVARIANCE = ROOT @ ROOT.T + 0.1 * np.eye(5)
# two gradients
SEEN = np.array([[4.0, 30.0, -7.0, 1.0, 2.0], [1.0, 3.0, 500.0, -2.0, 0.5]])
RMS = np.diag(1 / (0.1 + np.sqrt((SEEN**2).mean(0)) / N))
BLOCK = np.array([[2.0, 1.0], [1.0, 3.0]])
PRECONDITIONERS = {
    "identity": (Identity(), np.eye(5)),
    "scalar": (Diagonal(2.5), 2.5 * np.eye(5)),
    "diagonal": (Diagonal(np.arange(1.0, 6.0)), np.diag(np.arange(1.0, 6.0))),
    "dense": (Dense(COVARIANCE), COVARIANCE),
    "learned": (RMSProp(decay=0.5, damping=0.1, num_data=N), RMS),
    "blocks": (
        Blocks(
            [
                (2, Dense(BLOCK)),
                (1, Identity()),
                (2, RMSProp(decay=0.5, damping=0.1, num_data=N)),
            ]
        ),
        np.block(
            [
                [BLOCK, np.zeros((2, 3))],
                [np.zeros((3, 2)), np.diag([1.0, RMS[3, 3], RMS[4, 4]])],
            ]
        ),
    ),
}


@pytest.mark.parametrize("name", PRECONDITIONERS)
def test_root_transpose_and_whitening_are_those_of_the_matrix(name, x64):
    """L L' = G after gradients of several sizes, and whitening is the inverse of L."""
    preconditioner, matrix = PRECONDITIONERS[name]
    state = preconditioner.init(jnp.zeros(5))
    for gradient in SEEN:
        state = preconditioner.update(state, jnp.asarray(gradient), jnp.bool_(True))
    root = np.stack([preconditioner.root(state, column) for column in jnp.eye(5)], 1)
    v = jnp.arange(1.0, 6.0)
    close(root @ root.T, matrix, rtol=1e-12, atol=1e-12)
    close(preconditioner.transpose(state, v), root.T @ v, rtol=1e-12)
    close(preconditioner.whiten(state, root @ v), v, rtol=1e-10)
    assert preconditioner.adapts == (name in ("learned", "blocks"))


def test_rmsprop_learns_in_warm_up_only():
    def after(preconditioner, warming, state=None):
        state = preconditioner.init(jnp.ones(2)) if state is None else state
        for gradient in ([4.0, 8.0], [0.0, 4.0]):
            state = preconditioner.update(
                state, jnp.array(gradient), jnp.asarray(warming)
            )
        return state

    def diagonal(preconditioner, state):
        return preconditioner.root(state, jnp.ones(2)) ** 2

    frozen, running = (
        RMSProp(decay=0.5, damping=0.1, num_data=2, running=r) for r in (False, True)
    )
    learned = after(frozen, True)
    close(diagonal(frozen, learned), 1 / (0.1 + np.sqrt([2.0, 10.0])), rtol=1e-6)
    equal(diagonal(frozen, after(frozen, False, learned)), diagonal(frozen, learned))
    close(
        diagonal(running, after(running, False)), diagonal(frozen, learned), rtol=1e-6
    )
    assert (frozen.biased, running.biased) == (False, True)


@pytest.mark.parametrize(
    ("argument", "make"),
    [
        ("values", lambda: Diagonal(np.ones(4)).init(jnp.zeros(5))),
        ("matrix", lambda: Dense([[1.0, 2.0], [2.0, 1.0]])),
        ("matrix", lambda: Dense(np.eye(2)).init(jnp.zeros(5))),
        ("parts", lambda: Blocks([(2, Identity())]).init(jnp.zeros(5))),
        (
            "center",
            lambda: sgmcmc.ControlVariates(
                of_rows, of_all, Epochs(N, B), jnp.zeros(2)
            ).init(jnp.zeros(D)),
        ),
        ("batch_size", lambda: Epochs(10, 11)),
        ("batch_size", lambda: Epochs(2**30 + 1, 32)),  # epochs too long to count
    ],
)
def test_parts_that_do_not_fit_are_refused(argument, make):
    with refused(argument):
        make()


def test_schedules_follow_their_formulas():
    t = np.arange(50)
    close(polynomial(0.3, 2.0, 0.7)(jnp.arange(50)), 0.3 * (2.0 + t) ** -0.7, rtol=1e-5)
    assert constant(0.2)(5) == 0.2
    # Zhang et al. (2020), equation 1, with K = 50 steps in M = 4 cycles
    phase = t % 13 / 13
    schedule = cyclical(0.5, 50, 4, explore=0.8)
    close(
        schedule(jnp.arange(50)),
        0.25 * (np.cos(np.pi * phase) + 1),
        rtol=1e-5,
        atol=1e-7,
    )
    equal(schedule.collects(jnp.arange(50)), phase >= 0.8)
    equal(schedule.temperature(jnp.arange(50)), (phase >= 0.8).astype(float))
    for explore in (0.0, 0.1, 0.3, 0.7, 0.9):
        # Phases such as 0.7 = 7 / 10 are not representable; the count must not depend
        # on rounding.
        collected = cyclical(1.0, 100, 10, explore).collects(jnp.arange(100))
        assert int(collected.sum()) == 10 * round(10 * (1 - explore))


def test_any_schedule_drives_the_step():
    """At temperature 0 on U = q'q / 2 each step multiplies by 1 - eps_t / 2."""
    schedule = optax.exponential_decay(0.1, 5, 0.5)
    sampler = build(
        sgmcmc.Full(lambda q: 0.5 * q @ q),
        sgmcmc.Overdamped(),
        schedule=schedule,
        temperature=0.0,
    )
    state = jax.jit(sampler.run, static_argnums=1)(
        sampler.init(jnp.ones(2), jax.random.key(0)), 30
    )
    close(state.position, np.prod(1 - 0.05 * 0.5 ** (np.arange(30) / 5)), rtol=1e-5)


@pytest.mark.parametrize("bound", [1, 7, 10**6, 2**31 - 1])
def test_random_rows_are_the_leading_bits_of_an_exact_product(bound):
    """Of 64 random bits and the number of rows; half of the largest need the carry."""
    high, low = np.random.default_rng(0).integers(2**32, size=(2, 500), dtype=np.uint32)
    exact = [
        (int(upper) << 32 | int(lower)) * bound >> 64
        for upper, lower in zip(high, low, strict=True)
    ]
    assert (
        sgmcmc.streams.integers(jnp.asarray(high), jnp.asarray(low), bound).tolist()
        == exact
    )
