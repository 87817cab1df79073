"""The engine: limits with known answers, purity, reproducibility, divergence, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_bnn.sgmcmc import (
    BAOAB,
    GGMC,
    HMC,
    MALA,
    ControlVariates,
    Dense,
    Diagonal,
    Epochs,
    Full,
    Microcanonical,
    Minibatch,
    NoseHoover,
    Overdamped,
    RMSProp,
    WithReplacement,
    build,
)
from numpyro_bnn.sgmcmc.engine import LOST, fresh_seeds, reset_statistics
from numpyro_bnn.sgmcmc.preconditioners import Blocks
from numpyro_bnn.sgmcmc.streams import Keys, ProductStream

N = 40
DATA = jnp.asarray(np.random.default_rng(0).normal(1.0, 1.0, (N, 3)), jnp.float32)
TARGET = jnp.array([1.0, 2.0, 3.0])


def minibatch_potential(q, index):
    return 0.5 * q @ q + (N / index.shape[0]) * 0.5 * jnp.sum((DATA[index] - q[None]) ** 2)


def full_potential(q):
    return minibatch_potential(q, jnp.arange(N))


def stretched(q):
    return 0.5 * jnp.vdot(q, TARGET * q) + 0.1 * jnp.sum(q**4)


PLAIN = Minibatch(minibatch_potential, WithReplacement(N, 4))
VARIATES = ControlVariates(minibatch_potential, full_potential, WithReplacement(N, 4))
SCALES = Diagonal(jnp.array([1.0, 2.0, 0.5]))
# One row per kind of sampler; every test below that takes `sampler` runs on each.
SAMPLERS = {
    "SGLD": build(PLAIN, Overdamped(), schedule=0.01),
    "pSGLD": build(PLAIN, Overdamped(), RMSProp(num_data=N, damping=0.1), schedule=0.01),
    "BAOAB": build(PLAIN, BAOAB(1.0), SCALES, schedule=0.01),
    "BAOAB on epochs": build(Minibatch(minibatch_potential, Epochs(N, 3)), BAOAB(1.0), schedule=0.01),
    "thermostat": build(VARIATES, NoseHoover(1.0), schedule=0.01),
    "MALA": build(Full(full_potential), MALA(), schedule=0.05),
    "HMC": build(Full(full_potential), HMC(4, momentum_decay=0.5), SCALES, schedule=0.05),
    "GGMC": build(PLAIN, GGMC(full_potential, 3, friction=1.0), schedule=0.01),
    "MCLMC": build(Full(full_potential), Microcanonical(1.0), SCALES, schedule=0.05),
    "MCLMC on minibatches": build(PLAIN, Microcanonical(1.0, "leapfrog", fresh=True), schedule=0.05),
    "GGMC1": build(VARIATES, GGMC(full_potential, 1, friction=1.0), schedule=0.01),
}
# Where it is not one.
GRADIENTS_PER_STEP = {"thermostat": 2, "HMC": 5, "GGMC": 6, "GGMC1": 4, "MCLMC": 2, "MCLMC on minibatches": 2}
EXACT = ("MALA", "HMC", "GGMC", "GGMC1")
LINE = build(Full(full_potential), Microcanonical(), schedule=0.1)
VARIANTS = {"BAOAB on epochs", "pSGLD", "MCLMC on minibatches", "GGMC1"}


def rows(fast):
    """The names of the samplers, of which some are always run."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name not in fast)) for name in SAMPLERS]


@pytest.fixture(params=rows(SAMPLERS.keys() - VARIANTS))
def name(request):
    """Every test of a sampler runs under JAX's hostile modes."""
    with jax.numpy_rank_promotion("raise"), jax.debug_key_reuse(True), jax.numpy_dtype_promotion("strict"):
        yield request.param


@pytest.fixture
def sampler(name):
    return SAMPLERS[name]


@jax.jit(static_argnums=0)
def begin(sampler, position, key):
    return sampler.init(position, key, num_warmup=5)


def start(sampler, key=0, position=None):
    position = jnp.array([0.5, -0.5, 1.0]) if position is None else position
    return begin(sampler, position, jax.random.key(key))


@jax.jit(static_argnums=(0, 2))
def run(sampler, state, num_steps):
    return sampler.run(state, num_steps)


@jax.jit(static_argnums=0)
def step(sampler, state):
    return sampler.step(state)


def normals(sampler, state, step):
    return jax.jit(sampler._draw)(state.seeds, jnp.int32(step), state.position).noise


def assert_same(a, b, rtol=2e-5):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-5)


def test_run_equals_single_steps_and_resumes(name, sampler):
    """80 steps take two blocks of noise; stepping, splitting and resuming must not change the chain."""
    state = single = start(sampler)
    for _ in range(160):
        single = step(sampler, single)
    resumed = run(sampler, run(sampler, state, 80), 80)
    assert_same(resumed, single, rtol=1e-3)
    assert int(resumed.step) == 160
    assert int(resumed.first_divergence) == -1
    statistics = resumed.statistics
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(statistics))
    assert (statistics.accept_prob is not None) == (name in EXACT)
    assert int(statistics.num_gradients) == 160 * GRADIENTS_PER_STEP.get(name, 1)


@pytest.mark.parametrize(
    ("name", "num_steps"),
    [
        ("SGLD", 131),
        pytest.param("SGLD", 150, marks=pytest.mark.slow),
        pytest.param("GGMC", 131, marks=pytest.mark.slow),
    ],
)
def test_blocks_of_a_run_are_those_of_its_steps(name, num_steps):
    """Three blocks, the last of which is shorter if 3 does not divide the number of steps."""
    sampler = SAMPLERS[name]
    state = start(sampler)
    single = jax.jit(lambda s: jax.lax.scan(lambda s, _: (sampler.step(s), None), s, None, num_steps)[0])
    assert_same(run(sampler, state, num_steps), single(state), rtol=1e-3)


@pytest.mark.parametrize("name", rows({"SGLD", "GGMC", "MCLMC"}), indirect=True)
def test_vmapped_chains_equal_single_ones(sampler):
    position = jnp.array([0.5, -0.5, 1.0])

    def keys():
        return jax.random.split(jax.random.key(5), 3)

    batched = jax.jit(jax.vmap(lambda key: sampler.run(begin(sampler, position, key), 80)))(keys())
    for number in range(3):
        one = run(sampler, begin(sampler, position, keys()[number]), 80)
        assert_same(jax.tree.map(lambda leaf, i=number: leaf[i], batched), one, rtol=1e-3)
    assert len(np.unique(np.asarray(batched.position)[:, 0])) == 3


def test_legacy_and_typed_keys_agree():
    assert_same(fresh_seeds(jax.random.PRNGKey(0)), fresh_seeds(jax.random.key(0)))
    legacy = begin(SAMPLERS["BAOAB"], jnp.array([0.5, -0.5, 1.0]), jax.random.PRNGKey(0))
    assert_same(legacy, start(SAMPLERS["BAOAB"]))


def test_new_seeds_give_new_randomness(sampler):
    state = start(sampler)
    other = state._replace(seeds=fresh_seeds(jax.random.key(9)))
    a, b = run(sampler, state, 80), run(sampler, other, 80)
    assert np.abs(np.asarray(a.position - b.position)).min() > 0


@pytest.mark.parametrize(
    "dynamics",
    [
        pytest.param(Overdamped(), marks=pytest.mark.slow),
        pytest.param(BAOAB(1.0), marks=pytest.mark.slow),
        GGMC(full_potential, 2, 1.0),
    ],
    ids=lambda d: type(d).__name__,
)
def test_keys_of_the_potential_are_never_reused(dynamics):
    """A potential with randomness of its own gets a fresh key per minibatch, shared only on purpose."""

    def potential(q, batch):
        return minibatch_potential(q, batch["data"]) + 0.1 * q @ jax.random.normal(batch["key"], (3,))

    stream = ProductStream({"data": WithReplacement(N, 4), "key": Keys()})
    for gradient in (Minibatch(potential, stream), ControlVariates(potential, full_potential, stream)):
        sampler = build(gradient, dynamics, schedule=0.01)
        with jax.debug_key_reuse(True):
            state = run(sampler, start(sampler), 2)
        assert np.isfinite(np.asarray(state.position)).all()


@pytest.mark.parametrize("name", rows({"pSGLD", "thermostat", "GGMC", "MCLMC"}))
def test_float64(sampler, x64):
    state = start(sampler, position=jnp.array([0.5, -0.5, 1.0], jnp.float64))
    after = jax.eval_shape(sampler.step, state)
    assert after.position.dtype == jnp.float64
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(state)]
    assert dtypes == [leaf.dtype for leaf in jax.tree.leaves(after)]
    assert jnp.float32 not in dtypes


@pytest.mark.parametrize("preconditioner", [None, Diagonal(jnp.array([1.0, 2.0, 0.5]))])
def test_zero_temperature_is_gradient_descent(preconditioner):
    eps, G = 0.1, jnp.ones(3) if preconditioner is None else preconditioner.values
    sampler = build(Full(stretched), Overdamped(), preconditioner, schedule=eps, temperature=0.0)
    q = jnp.array([0.5, -0.5, 1.0])
    state = run(sampler, start(sampler), 20)
    for _ in range(20):
        q = q - eps / 2 * G * jax.grad(stretched)(q)
    np.testing.assert_allclose(state.position, q, rtol=1e-5)


def test_zero_temperature_starts_at_rest_and_descends():
    sampler = build(Full(stretched), BAOAB(0.0), schedule=0.1, temperature=0.0)
    state = start(sampler)
    np.testing.assert_array_equal(sampler.dynamics.momentum(state.memory), 0.0)
    after = step(sampler, state)
    # From rest, one leapfrog step is gradient descent with rate eps / 2.
    np.testing.assert_allclose(after.position, state.position - 0.05 * jax.grad(stretched)(state.position), rtol=1e-5)


def test_zero_friction_is_leapfrog():
    """... which conserves energy to order h^2 and comes back when the momentum is reversed."""
    h = 0.05
    sampler = build(Full(stretched), BAOAB(0.0), schedule=h**2)
    state = start(sampler)
    q, p = state.position, state.memory.momentum
    energy = stretched(q) + 0.5 * p @ p
    for _ in range(40):
        p = p - h / 2 * jax.grad(stretched)(q)
        q = q + h * p
        p = p - h / 2 * jax.grad(stretched)(q)
    end = run(sampler, state, 40)
    np.testing.assert_allclose(end.position, q, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(end.memory.momentum, p, rtol=1e-4, atol=1e-5)
    p = end.memory.momentum
    assert abs(float(stretched(end.position) + 0.5 * p @ p - energy)) < h**2
    back = run(sampler, end._replace(memory=end.memory._replace(momentum=-p)), 40)
    np.testing.assert_allclose(back.position, state.position, atol=1e-4)


def test_infinite_friction_of_baoab_averages_neighboring_noises():
    """theta += (eps / 2) g + sqrt(eps T) (z_n + z_(n+1)) / 2 from the second step on."""
    eps = 0.1
    sampler = build(Full(stretched), BAOAB(float("inf")), schedule=eps)
    state = step(sampler, start(sampler))
    noises = [normals(sampler, state, step)[0] for step in (0, 1)]
    drift = -eps / 2 * jax.grad(stretched)(state.position)
    expected = state.position + drift + jnp.sqrt(eps) * (noises[0] + noises[1]) / 2
    np.testing.assert_allclose(step(sampler, state).position, expected, rtol=1e-5)


def test_streams_of_randomness_are_uncorrelated():
    """Start momentum, both noise rows, accept tests and minibatches: every pair, 4.5 standard errors."""
    n = 20_000
    sampler = build(Full(lambda q: 0.5 * q @ q), GGMC(lambda q: 0.5 * q @ q, 1, 1.0), schedule=0.1)
    state = sampler.init(jnp.zeros(n), jax.random.key(0))
    first, second = (normals(sampler, state, step) for step in (0, 1))
    streams = [state.memory.momentum, first[0], first[1], second[0], second[1]]
    batches = build(Minibatch(minibatch_potential, WithReplacement(N, 1)), Overdamped(), schedule=0.1)
    seeds = batches.init(jnp.zeros(1), jax.random.key(0)).seeds
    draws = jax.jit(jax.vmap(batches._draw, (None, 0, None)))(seeds, jnp.arange(n), jnp.zeros(1))
    streams += [draws.noise[:, 0, 0], draws.batch[:, 0], draws.uniform]
    correlation = np.corrcoef(np.asarray(streams, np.float64)) - np.eye(len(streams))
    assert np.abs(correlation).max() < 4.5 / n**0.5


def test_refresh_renews_what_is_cached_of_the_target(sampler):
    """After a move from outside: gradients and potentials as at a fresh start, momenta kept."""
    state = step(sampler, start(sampler))
    moved = state._replace(position=state.position + 1.0)
    fresh = jax.jit(sampler.refresh)(moved)
    memory, old = fresh.memory, state.memory
    np.testing.assert_array_equal(fresh.position, moved.position)
    if sampler.dynamics.momentum(old) is not None:
        np.testing.assert_array_equal(memory.momentum, old.momentum)
    if isinstance(sampler.dynamics, Microcanonical):
        np.testing.assert_array_equal(memory.direction, old.direction)
    if isinstance(sampler.dynamics, MALA | GGMC):
        np.testing.assert_allclose(memory.potential, full_potential(moved.position), rtol=1e-5)
    if isinstance(sampler.dynamics, MALA):
        np.testing.assert_allclose(memory.gradient, jax.grad(full_potential)(moved.position), rtol=1e-5)
    if isinstance(sampler.dynamics, BAOAB | NoseHoover):
        assert np.abs(np.asarray(memory.gradient - old.gradient)).min() > 1
    assert np.isfinite(np.asarray(step(sampler, fresh).position)).all()


def test_statistics_are_means_of_what_happened():
    sampler = SAMPLERS["BAOAB"]
    state = start(sampler)
    kinetic, virial = [], []
    for _ in range(6):
        state = step(sampler, state)
        kinetic.append(float(state.memory.momentum @ state.memory.momentum) / 3)
        virial.append(float(state.position @ state.memory.gradient) / 3)
    statistics = state.statistics
    np.testing.assert_allclose(statistics.kinetic_temperature, np.mean(kinetic), rtol=1e-5)
    np.testing.assert_allclose(statistics.configurational_temperature, np.mean(virial), rtol=1e-5)
    assert (int(statistics.num_steps), int(statistics.num_gradients)) == (6, 6)
    assert statistics.accept_prob is None
    assert int(reset_statistics(state).statistics.num_gradients) == 0


@pytest.mark.parametrize("dynamics", [Overdamped(), BAOAB(1.0)], ids=["SGLD", "BAOAB"])
def test_a_chain_that_keeps_failing_is_marked_and_the_step_is_named(dynamics):
    sampler = build(Full(stretched), dynamics, schedule=lambda t: jnp.where(t < 10, 0.01, 1e3))
    state = run(sampler, start(sampler), 10)
    assert (int(state.refused_in_a_row), int(state.statistics.num_refused)) == (0, 0)
    failing = run(sampler, state, LOST)
    count = int(failing.refused_in_a_row)
    assert 0 < count < LOST
    assert int(failing.first_divergence) == -1
    after = run(sampler, failing, 30)
    assert int(after.first_divergence) == 10 + LOST - count
    assert np.isfinite(np.asarray(after.position)).all()
    assert (int(after.step), int(after.statistics.num_steps)) == (40 + LOST, 40 + LOST)
    assert int(after.statistics.num_refused) == count + 30
    # In warm-up it goes on trying, and the first of the steps that failed is named when warm-up is over.
    longer = run(sampler, state._replace(num_warmup=jnp.int32(40 + LOST)), LOST + 30)
    assert (int(longer.first_divergence), int(longer.refused_in_a_row)) == (-1, count + 30)
    assert int(run(sampler, longer, 1).first_divergence) == 10 + LOST - count


@pytest.mark.parametrize(
    "dynamics",
    [Overdamped(), BAOAB(1.0), pytest.param(NoseHoover(1.0), marks=pytest.mark.slow), MALA(), Microcanonical(1.0)],
    ids=lambda d: type(d).__name__,
)
def test_a_gradient_that_is_not_finite_is_seen(dynamics):
    sampler = build(Full(lambda q: jnp.sum(jnp.sqrt(q))), dynamics, schedule=0.01)
    before = start(sampler, position=jnp.array([1.0, -1.0]))
    state = step(sampler, before)
    assert (int(state.refused_in_a_row), int(state.statistics.num_refused), int(state.step)) == (1, 1, 1)
    np.testing.assert_array_equal(state.known_position, [1.0, -1.0])
    if dynamics.momentum(state.memory) is not None:
        np.testing.assert_array_equal(state.memory.momentum, -before.memory.momentum)


def test_a_chain_that_takes_steps_in_between_is_not_marked():
    """Half a Gaussian, with steps as long as it is wide."""
    half = Full(lambda q: 0.5 * jnp.vdot(q, q) + jnp.where(q[0] > 0, 0.0, jnp.nan) * q[0])
    sampler = build(half, BAOAB(2.0), schedule=1.0)
    state = run(sampler, sampler.init(jnp.ones(1), jax.random.key(0)), 1500)
    assert int(state.statistics.num_refused) > LOST
    assert (int(state.first_divergence), int(state.statistics.num_steps)) == (-1, 1500)


def test_a_momentum_that_is_not_finite_is_seen():
    """A wide preconditioner makes an infinite momentum of a finite gradient: no later step would be finite."""
    steep = Full(lambda q: 1e30 * jnp.sum(jnp.where(q > 1, q, 0.0)))
    sampler = build(steep, BAOAB(1.0), Diagonal(1e20), schedule=0.01, temperature=1e-26)
    before = sampler.init(jnp.array([1.0]), jax.random.key(0))
    before = before._replace(memory=before.memory._replace(momentum=jnp.array([1e-12])))
    after = step(sampler, before)
    assert int(after.statistics.num_refused) == 1
    np.testing.assert_allclose(after.memory.momentum, [-1e-12])


def test_metropolis_rejects_what_is_not_finite():
    """A wall at 0: proposals behind it have no potential and are refused, not reported as divergence."""
    sampler = build(Full(lambda q: jnp.sum(q - jnp.log(q))), MALA(), schedule=1.5)
    state = run(sampler, sampler.init(jnp.ones(1), jax.random.key(0)), 300)
    assert int(state.first_divergence) == -1
    assert float(state.position[0]) > 0
    assert float(state.statistics.accept_prob) < 0.99


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: build(PLAIN, Overdamped(), schedule=0.0), "schedule"),
        (lambda: build(PLAIN, Overdamped(), schedule=float("nan")), "schedule"),
        (lambda: build(PLAIN, Overdamped(), schedule=0.1, temperature=-1.0), "temperature"),
        (lambda: build(Full(full_potential), MALA(), schedule=0.1, temperature=0.0), "temperature"),
        (lambda: build(PLAIN, MALA(), schedule=0.1), "gradient"),
        (lambda: build(SAMPLERS["BAOAB on epochs"].gradient, GGMC(full_potential, 2, 1.0), schedule=0.1), "Epochs"),
        (lambda: build(PLAIN, HMC(2), schedule=0.1), "gradient"),
        (lambda: HMC(0), "num_steps"),
        (lambda: HMC(2, momentum_decay=1.5), "momentum_decay"),
        (lambda: HMC(2, jitter=1.0), "jitter"),
        (lambda: build(Full(full_potential), MALA(), RMSProp(running=True), schedule=0.1), "frozen"),
        (lambda: BAOAB(-1.0), "friction"),
        (lambda: Microcanonical(length=0.0), "length"),
        (lambda: Microcanonical(integrator="verlet"), "integrator"),
        (lambda: LINE.init(jnp.ones(1), jax.random.key(0)), "two"),
        (lambda: NoseHoover(float("inf")), "friction"),
        (lambda: GGMC(full_potential, 0, 1.0), "num_steps"),
        (lambda: SAMPLERS["SGLD"].init(jnp.zeros((2, 2)), jax.random.key(0)), "position"),
        (lambda: SAMPLERS["pSGLD"].init(jnp.zeros(3), jax.random.key(0)), "num_warmup"),
        (lambda: SAMPLERS["SGLD"].run(start(SAMPLERS["SGLD"]), 0), "num_steps"),
    ],
)
def test_bad_arguments_are_refused(make, argument):
    with pytest.raises(ValueError, match=argument):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: build(PLAIN, Overdamped(), schedule="fast"),
        lambda: SAMPLERS["SGLD"].init(jnp.arange(3), jax.random.key(0)),
        lambda: SAMPLERS["SGLD"].init(jnp.zeros(3), 0),
    ],
)
def test_wrong_types_are_refused(make):
    with pytest.raises(TypeError):
        make()


# -- parts by themselves ------------------------------------------------------------------------------

PRECONDITIONERS = {
    "Diagonal": Diagonal(jnp.array([1.0, 2.0, 0.5])),
    "Dense": Dense(jnp.array([[2.0, 0.5, 0.1], [0.5, 1.0, 0.3], [0.1, 0.3, 4.0]])),
    "RMSProp": RMSProp(decay=0.5, damping=0.1, num_data=N),
    "Blocks": Blocks([(1, RMSProp(damping=0.1)), (2, Dense(jnp.array([[2.0, 0.5], [0.5, 1.0]])))]),
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("preconditioner", PRECONDITIONERS.values(), ids=PRECONDITIONERS)
def test_whitening_is_the_inverse_of_the_root(preconditioner):
    """root(whiten(v)) = whiten(root(v)) = v, and root and transpose give G, after gradients of other sizes."""
    state, v = preconditioner.init(jnp.zeros(3)), jnp.array([1.0, -2.0, 3.0])
    for gradient in (jnp.array([4.0, 30.0, -7.0]), jnp.array([1.0, 3.0, 500.0])):
        state = preconditioner.update(state, gradient, jnp.bool_(True))
    np.testing.assert_allclose(preconditioner.root(state, preconditioner.whiten(state, v)), v, rtol=1e-12)
    np.testing.assert_allclose(preconditioner.whiten(state, preconditioner.root(state, v)), v, rtol=1e-12)
    root = jax.vmap(lambda column: preconditioner.root(state, column), out_axes=1)(jnp.eye(3))
    np.testing.assert_allclose(preconditioner.transpose(state, v), root.T @ v, rtol=1e-12)
    if isinstance(preconditioner, RMSProp):
        mean_square = (np.array([4.0, 30.0, -7.0]) ** 2 + np.array([1.0, 3.0, 500.0]) ** 2) / 2 / N**2
        np.testing.assert_allclose(root @ root.T, np.diag(1 / (0.1 + np.sqrt(mean_square))), rtol=1e-12)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("size", [2, 8192])
def test_thermostat_compares_the_temperature_of_all_coordinates(size):
    """Without forces and noise: half of dxi = h (r'r / P - T) / Q, r <- exp(-xi h) r, and the other half."""
    eps, mass, temperature = 0.04, 2.0, 0.7
    flat = Full(lambda q: jnp.zeros(()))
    sampler = build(flat, NoseHoover(0.0, mass=mass), schedule=eps, temperature=temperature)
    state = sampler.init(jnp.zeros(size), jax.random.key(0))
    r, half = np.asarray(state.memory.momentum), 0.5 * eps**0.5
    xi = half / mass * (r @ r / size - temperature)
    after = np.exp(-2 * half * xi) * r
    xi += half / mass * (after @ after / size - temperature)
    moved = sampler.run(state, 1).memory
    np.testing.assert_allclose(moved.momentum, after, rtol=1e-12)
    np.testing.assert_allclose(moved.friction, xi, rtol=1e-9)
