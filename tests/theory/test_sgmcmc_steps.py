"""Steps of each dynamics beside its equations, written again in NumPy; and the engine
that makes many of them.

In the first part the potential is not quadratic, the preconditioner is a Cholesky
factor (so that L and L' differ), the temperature is not 1, and a minibatch adds a
linear potential. All is in float64: a step agrees to rounding.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import each
from numpy.testing import assert_allclose as close
from numpy.testing import assert_array_equal as equal
from scipy.stats import norm

from numpyro_bnn import sgmcmc
from numpyro_bnn.sgmcmc import BAOAB, HMC, Microcanonical, NoseHoover, Overdamped, build
from numpyro_bnn.sgmcmc.dynamics import Momentum, Slope, Thermostat
from numpyro_bnn.sgmcmc.engine import LOST, fresh_seeds, reset_statistics
from numpyro_bnn.sgmcmc.gradients import separate
from numpyro_bnn.sgmcmc.interfaces import (
    Dynamics,
    Evaluation,
    StepContext,
    StepRandomness,
)
from numpyro_bnn.sgmcmc.metropolis import PhasePoint

EPS, TEMPERATURE, FRICTION = 0.09, 0.6, 1.7
H = EPS**0.5
L = np.linalg.cholesky(np.array([[2.0, 0.5, 0.1], [0.5, 1.0, 0.3], [0.1, 0.3, 0.7]]))
POSITION, R = np.array([0.4, -0.9, 1.2]), np.array([1.1, -0.3, 0.5])
NOISE = np.random.default_rng(0).normal(size=(3, 3))
SHIFT = np.array([0.3, -0.2, 0.1])  # a minibatch
FAR = 200 * SHIFT  # a minibatch of rows that fit very badly
MALA = HMC(1, jitter=0.0)
# uniform numbers: every proposal is accepted, or none that raises the energy
ALWAYS, NEVER = (1e-300, 1.0)


def potential(q, batch=0.0):
    return 0.5 * (q * q).sum() + 0.25 * (q**4).sum() + (batch * q).sum()


def slope(q, batch=0.0):
    return q + q**3 + batch


def context(eps=EPS, temperature=TEMPERATURE):
    root = jnp.asarray(L)
    numbers = (jnp.asarray(eps), jnp.asarray(temperature), jnp.asarray(False))
    evaluate = lambda q, batch: Evaluation(q, potential(q, batch), slope(q, batch), ())  # noqa: E731
    return StepContext(
        evaluate, lambda _, v: root @ v, lambda _, v: root.T @ v, (), *numbers
    )


def one_step(dynamics, memory, noise, batch=0.0, uniform=ALWAYS, **options):
    randomness = StepRandomness(*map(jnp.asarray, (noise, batch, uniform)))
    return dynamics.step(context(**options), jnp.asarray(POSITION), memory, randomness)


def refresh(r, time, noise, temperature=TEMPERATURE):
    """Ornstein-Uhlenbeck over a time, at the temperature."""
    return (
        math.exp(-time) * r + math.sqrt((1 - math.exp(-2 * time)) * temperature) * noise
    )


def kick(r, q, time, batch=0.0):
    return r - time * L.T @ slope(q, batch)


def same(found, expected):
    close(found, expected, rtol=1e-12)


@pytest.mark.parametrize(
    "temperature", [TEMPERATURE, 0.0], ids=["warm", "gradient descent"]
)
def test_a_step_of_sgld_follows_its_equation(temperature, x64):
    last = Slope(jnp.asarray(L.T @ slope(POSITION)))
    found = one_step(Overdamped(), last, NOISE[:1], SHIFT, temperature=temperature)
    q = POSITION + L @ (
        -EPS / 2 * L.T @ slope(POSITION) + math.sqrt(EPS * temperature) * NOISE[0]
    )
    same(found.position, q)
    same(found.memory.slope, L.T @ slope(q, SHIFT))


@pytest.mark.parametrize(
    ("friction", "temperature"),
    [
        (FRICTION, TEMPERATURE),
        (0.0, TEMPERATURE),
        (math.inf, TEMPERATURE),
        (FRICTION, 0.0),
    ],
    ids=["Langevin", "leapfrog", "fresh momenta", "damped descent"],
)
def test_a_step_of_sghmc_follows_its_equations(friction, temperature, x64):
    memory = Momentum(jnp.asarray(R), jnp.asarray(L.T @ slope(POSITION)))
    found = one_step(BAOAB(friction), memory, NOISE[:1], SHIFT, temperature=temperature)
    kicked = kick(R, POSITION, H / 2)
    q = POSITION + H / 2 * L @ kicked
    fresh = refresh(kicked, friction * H, NOISE[0], temperature)
    q = q + H / 2 * L @ fresh
    same(found.position, q)
    same(found.memory.momentum, kick(fresh, q, H / 2, SHIFT))
    same(found.memory.slope, L.T @ slope(q, SHIFT))


def test_momenta_start_at_the_temperature(x64):
    """... and so at rest at zero."""
    randomness = StepRandomness(
        jnp.asarray(NOISE[:1]), jnp.asarray(0.0), jnp.asarray(1.0)
    )
    for dynamics in (BAOAB(1.0), NoseHoover(1.0), HMC(2)):
        for temperature in (TEMPERATURE, 0.0):
            memory = dynamics.init(
                context(temperature=temperature), jnp.asarray(POSITION), randomness
            )
            same(dynamics.momentum(memory), math.sqrt(temperature) * NOISE[0])


@pytest.mark.parametrize("xi", [0.8, -0.5, 0.0])
def test_a_step_of_sgnht_follows_its_equations(xi, x64):
    """Also at xi = 0 after half a step, where the refresh has a limit, 2 A h."""
    kicked = kick(R, POSITION, H / 2)
    warm = H / 2 / 1.4 * (kicked @ kicked / 3 - TEMPERATURE)
    start = xi if xi else -warm
    memory = Thermostat(*map(jnp.asarray, (R, L.T @ slope(POSITION), start)))
    found = one_step(NoseHoover(FRICTION, mass=1.4), memory, NOISE[:1], SHIFT)
    half = start + warm
    spread = FRICTION * (-np.expm1(-2 * half * H) / half if xi else 2 * H)
    fresh = math.exp(-half * H) * kicked + math.sqrt(spread * TEMPERATURE) * NOISE[0]
    q = POSITION + H / 2 * L @ (kicked + fresh)
    same(found.position, q)
    same(found.memory.momentum, kick(fresh, q, H / 2, SHIFT))
    xi = half + H / 2 / 1.4 * (fresh @ fresh / 3 - TEMPERATURE)
    close(found.memory.friction, xi, rtol=1e-12, atol=1e-15)


GUARDED = {
    "Overdamped": (Overdamped, lambda r, force: Slope(force)),
    "BAOAB": (partial(BAOAB, FRICTION), Momentum),
    "NoseHoover": (
        partial(NoseHoover, FRICTION),
        lambda r, force: Thermostat(r, force, jnp.asarray(0.5)),
    ),
}


@pytest.mark.parametrize("name", GUARDED)
def test_a_step_to_a_gigantic_gradient_turns_back(name, x64):
    """A step ends at kicks eps |L' g|^2 of a size that is found without a limit: with
    one a little above it is taken, with one a little below the momentum is reversed.
    In warm-up it is taken if the gradient gets smaller.
    """
    make, memory_of = GUARDED[name]
    step = partial(one_step, noise=NOISE[:1], batch=FAR, eps=1e-4, temperature=1e-6)
    for share, turns_back in ((2.0, False), (0.5, True)):
        begin = share * L.T @ slope(POSITION, FAR)
        memory = memory_of(jnp.asarray(1e-3 * R), jnp.asarray(begin))
        free = step(make(), memory)
        end = free.memory.slope
        assert (end @ end < begin @ begin) == (share > 1)
        limit = (1e-4 * float(end @ end) / 1e-6 - 20) / 3  # (max_kick P + 20) T, P = 3
        taken = step(make(max_kick=1.001 * limit), memory)
        same(taken.position, free.position)
        assert not taken.refused
        found = step(make(max_kick=0.999 * limit), memory)
        assert bool(found.refused) == turns_back
        same(found.position, POSITION if turns_back else free.position)
        if turns_back and name != "Overdamped":
            same(found.memory.momentum, -1e-3 * R)


def test_one_hot_step_leaves_no_friction_behind(x64):
    """|r|^2 / P counts as (10 + 20 / P) T at most; it was 1e8 here."""
    hot = jnp.full(3, 1e4)
    memory = Thermostat(hot, jnp.zeros(3), jnp.asarray(0.0))
    found = one_step(NoseHoover(FRICTION, mass=1.4), memory, NOISE[:1], SHIFT)
    most = H / 1.4 * (10 + 20 / 3 - 1) * TEMPERATURE
    same(found.memory.friction, most)


def probability(start, end):
    """Of accepting, from the total energies at both ends; above 0 and below 1."""
    value = math.exp(-(end - start) / TEMPERATURE)
    assert 0.01 < value < 0.99
    return value


@pytest.mark.parametrize("uniform", [ALWAYS, NEVER])
def test_a_proposal_of_mala_has_its_acceptance_probability(uniform, x64):
    h = 0.3**0.5
    memory = PhasePoint(*map(jnp.asarray, (R, potential(POSITION), slope(POSITION))))
    found = one_step(MALA, memory, NOISE[2:3], uniform=uniform, eps=0.3)
    start = math.sqrt(TEMPERATURE) * NOISE[2]
    kicked = kick(start, POSITION, h / 2)
    q = POSITION + h * L @ kicked
    end = kick(kicked, q, h / 2)
    same(
        found.accept_prob,
        probability(
            potential(POSITION) + start @ start / 2, potential(q) + end @ end / 2
        ),
    )
    same(found.position, q if uniform == ALWAYS else POSITION)
    same(found.memory.potential, potential(np.asarray(found.position)))


@pytest.mark.parametrize("uniform", [ALWAYS, NEVER])
def test_a_rejected_trajectory_of_hmc_goes_back_to_its_start(uniform, x64):
    """A rejected trajectory goes back to its start with the momentum reversed."""
    found = one_step(
        HMC(3, 0.3, jitter=0.2),
        PhasePoint(*map(jnp.asarray, (R, potential(POSITION), slope(POSITION)))),
        NOISE[:2],
        uniform=uniform,
        eps=0.5,
    )
    h = 0.5**0.5 * (1 + 0.2 * (2 * norm.cdf(NOISE[1, 0]) - 1))
    start = 0.7 * R + math.sqrt((1 - 0.7**2) * TEMPERATURE) * NOISE[0]
    q, r = POSITION, start
    for _ in range(3):
        r = kick(r, q, h / 2)
        q = q + h * L @ r
        r = kick(r, q, h / 2)
    same(
        found.accept_prob,
        probability(potential(POSITION) + start @ start / 2, potential(q) + r @ r / 2),
    )
    same(found.position, q if uniform == ALWAYS else POSITION)
    same(found.memory.momentum, r if uniform == ALWAYS else -start)


# -- the engine ------------------------------------------------------------------------

N = 40
DATA = np.random.default_rng(0).normal(1.0, 1.0, (N, 3)).astype(np.float32)
START = np.array([0.5, -0.5, 1.0], np.float32)


def of_rows(q, index):
    return 0.5 * q @ q + (N / index.shape[0]) * 0.5 * jnp.sum(
        (jnp.asarray(DATA)[index] - q[None]) ** 2
    )


def of_all(q):
    return of_rows(q, jnp.arange(N))


PLAIN = sgmcmc.Minibatch(of_rows, sgmcmc.WithReplacement(N, 4))
EPOCHS = sgmcmc.Minibatch(of_rows, sgmcmc.Epochs(N, 3))
VARIATES = sgmcmc.ControlVariates(of_rows, of_all, sgmcmc.WithReplacement(N, 4))
ALL = sgmcmc.Full(of_all)
SCALES = sgmcmc.Diagonal(np.array([1.0, 2.0, 0.5], np.float32))
# One row per kind of sampler, and the gradients of each step.
SAMPLERS = {
    "pSGLD": (
        build(
            PLAIN, Overdamped(), sgmcmc.RMSProp(num_data=N, damping=0.1), schedule=0.01
        ),
        1,
    ),
    "BAOAB on epochs": (build(EPOCHS, BAOAB(1.0), SCALES, schedule=0.01), 1),
    "thermostat": (build(VARIATES, NoseHoover(1.0), schedule=0.01), 2),
    "MALA": (build(ALL, MALA, schedule=0.05), 1),
    "HMC": (build(ALL, HMC(4, momentum_decay=0.5), SCALES, schedule=0.05), 4),
    "MCLMC": (build(ALL, Microcanonical(1.0), SCALES, schedule=0.05), 2),
    "MCLMC on minibatches": (
        build(PLAIN, Microcanonical(1.0, "leapfrog", fresh=True), schedule=0.05),
        2,
    ),
}
EXACT = ("MALA", "HMC")


def test_every_dynamics_has_a_sampler():
    """... and so all that is tested of the engine below."""
    parts = {}
    for module in (sgmcmc.dynamics, sgmcmc.metropolis):
        for name, part in vars(module).items():
            is_class = isinstance(part, type) and issubclass(part, Dynamics)
            if is_class and part is not Dynamics and name[0] != "_":
                parts[name] = part
    tested = {type(sampler.dynamics).__name__ for sampler, _ in SAMPLERS.values()}
    assert parts.keys() - tested == set(), "add samplers with these to SAMPLERS"


@jax.jit(static_argnums=0)
def begin(sampler, position, key):
    return sampler.init(position, key, num_warmup=5)


@jax.jit(static_argnums=(0, 2))
def run(sampler, state, num_steps):
    return sampler.run(state, num_steps)


@jax.jit(static_argnums=0)
def steps(sampler, state, number):
    """Single steps, as many as wanted by one program."""
    return jax.lax.fori_loop(0, number, lambda _, state: sampler.step(state), state)


def assert_same(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        close(a, b, rtol=1e-3, atol=1e-5)


SOME = ["BAOAB on epochs", "thermostat", "HMC", "MCLMC on minibatches"]


@each("name", SOME, fast=1)
def test_a_run_is_its_single_steps_and_goes_on_where_it_stopped(name):
    """131 steps take three blocks of random numbers, the last shorter."""
    sampler, num_gradients = SAMPLERS[name]
    with (
        jax.numpy_rank_promotion("raise"),
        jax.debug_key_reuse(True),
        jax.numpy_dtype_promotion("strict"),
    ):
        start = begin(sampler, START, jax.random.key(0))
        whole = run(sampler, start, 131)
        single = steps(sampler, start, 131)
    assert_same(whole, single)
    assert_same(run(sampler, whole, 131), steps(sampler, start, 262))
    assert (int(whole.step), int(whole.first_divergence)) == (131, -1)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(whole.statistics))
    assert (whole.statistics.accept_prob is not None) == (name in EXACT)
    assert int(whole.statistics.num_gradients) == 131 * num_gradients
    assert int(reset_statistics(whole).statistics.num_gradients) == 0
    other = run(sampler, start._replace(seeds=fresh_seeds(jax.random.key(9))), 131)
    assert np.abs(np.asarray(whole.position - other.position)).min() > 0
    assert_same(begin(sampler, START, jax.random.PRNGKey(0)), start)  # a legacy key


@pytest.mark.parametrize("name", SAMPLERS)
def test_float64_stays_float64(name, x64):
    sampler, _ = SAMPLERS[name]
    shapes = jax.eval_shape(
        lambda q, key: sampler.init(q, key, num_warmup=5),
        jnp.zeros(3),
        jax.random.key(0),
    )
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(shapes)]
    assert dtypes == [
        leaf.dtype for leaf in jax.tree.leaves(jax.eval_shape(sampler.step, shapes))
    ]
    assert shapes.position.dtype == jnp.float64
    assert jnp.float32 not in dtypes


@each("name", ["BAOAB on epochs", "MALA", "thermostat", "MCLMC"], fast=2)
def test_refresh_renews_what_is_cached_of_the_target(name):
    """After a move from outside: caches as at a fresh start, momenta kept."""
    sampler, _ = SAMPLERS[name]
    state = steps(sampler, begin(sampler, START, jax.random.key(0)), 1)
    moved = state._replace(position=state.position + 1.0)
    fresh = jax.jit(sampler.refresh)(moved)
    old, new = (
        dict(zip(s.memory._fields, s.memory, strict=True)) if s.memory else {}
        for s in (moved, fresh)
    )
    for kept in old.keys() - {"potential", "gradient", "slope"}:
        equal(new[kept], old[kept])
    if "potential" in new:
        close(new["potential"], of_all(moved.position), rtol=1e-5)
    if "gradient" in new and sampler.gradient is ALL:
        close(new["gradient"], jax.grad(of_all)(moved.position), rtol=1e-5)
    elif "gradient" in new:
        assert np.abs(np.asarray(new["gradient"] - old["gradient"])).min() > 1
    equal(fresh.position, moved.position)


KEPT = ("step", "memory", "statistics")  # by a restart, or new by another minibatch


def test_a_restart_forgets_marks_and_learns_the_preconditioner_again():
    sampler, _ = SAMPLERS["pSGLD"]
    start = begin(sampler, START, jax.random.key(0))
    marks = {"refused_in_a_row": jnp.int32(7), "first_divergence": jnp.int32(2)}
    lost = steps(sampler, start, 3)._replace(**marks)
    unlearned = sampler.unlearned(lost, START)
    again = jax.jit(sampler.restart)(lost, START, unlearned)
    assert_same(
        again._replace(**dict.fromkeys(KEPT)), start._replace(**dict.fromkeys(KEPT))
    )
    assert int(again.step) == 3  # no random numbers come twice


def test_statistics_are_means_of_what_happened():
    sampler, _ = SAMPLERS["BAOAB on epochs"]
    state = begin(sampler, START, jax.random.key(0))
    kinetic, virial = [], []
    for _ in range(6):
        state = steps(sampler, state, 1)
        kinetic.append(float(state.memory.momentum @ state.memory.momentum) / 3)
        white = sampler.preconditioner.whiten(state.adaptation, state.position)
        virial.append(float(white @ state.memory.slope) / 3)
    close(state.statistics.kinetic_temperature, np.mean(kinetic), rtol=1e-5)
    close(state.statistics.configurational_temperature, np.mean(virial), rtol=1e-5)


def test_random_lengths_do_not_follow_the_momentum():
    """Else steps to the right would be longer, and the mean of a normal is .3 off:
    fails by chance once in 3 million.
    """
    quadratic = sgmcmc.Full(lambda q: 0.5 * q @ q)
    sampler = build(quadratic, HMC(2, jitter=0.9), schedule=1.0)
    keys = jax.random.split(jax.random.key(0), 2000)

    def end(key):
        return sampler.run(sampler.init(jnp.zeros(1), key), 50).position[0]

    ends = jax.jit(jax.vmap(end))(keys)
    assert abs(ends.mean()) < 5 / 2000**0.5


# -- steps that are not finite ---------------------------------------------------------


def stretched(q):
    return 0.5 * jnp.vdot(q, jnp.array([1.0, 2.0, 3.0]) * q) + 0.1 * jnp.sum(q**4)


@pytest.mark.parametrize(
    "dynamics", [Overdamped(), BAOAB(1.0)], ids=["overdamped", "BAOAB"]
)
def test_a_chain_that_keeps_failing_is_marked_and_the_step_is_named(dynamics):
    sampler = build(
        sgmcmc.Full(stretched),
        dynamics,
        schedule=lambda t: jnp.where(t < 10, 0.01, 1e3),
    )
    state = steps(sampler, sampler.init(jnp.asarray(START), jax.random.key(0)), 10)
    assert (int(state.refused_in_a_row), int(state.statistics.num_refused)) == (0, 0)
    failing = steps(sampler, state, LOST)
    count = int(failing.refused_in_a_row)
    assert 0 < count < LOST
    assert int(failing.first_divergence) == -1
    after = steps(sampler, failing, 30)
    assert int(after.first_divergence) == 10 + LOST - count
    assert np.isfinite(np.asarray(after.position)).all()
    assert (int(after.step), int(after.statistics.num_steps)) == (40 + LOST, 40 + LOST)
    assert int(after.statistics.num_refused) == count + 30
    # In warm-up it goes on trying, and the first of the steps that failed is named when
    # warm-up is over.
    longer = steps(sampler, state._replace(num_warmup=jnp.int32(40 + LOST)), LOST + 30)
    assert (int(longer.first_divergence), int(longer.refused_in_a_row)) == (
        -1,
        count + 30,
    )
    assert int(steps(sampler, longer, 1).first_divergence) == 10 + LOST - count


def test_a_gradient_that_is_not_finite_is_seen():
    target = sgmcmc.Full(lambda q: jnp.sum(jnp.sqrt(q)))
    sampler = build(target, BAOAB(1.0), schedule=0.01)
    before = sampler.init(jnp.array([1.0, -1.0]), jax.random.key(0))
    state = steps(sampler, before, 1)
    assert int(state.refused_in_a_row) == int(state.statistics.num_refused) == 1
    np.testing.assert_array_equal(state.position, [1.0, -1.0])
    equal(state.memory.momentum, -before.memory.momentum)


@pytest.mark.parametrize(
    ("dynamics", "behind"),
    [(Overdamped(), np.nan), (BAOAB(1.0), np.inf), (NoseHoover(1.0), np.nan)],
    ids=["overdamped", "BAOAB", "SGNHT"],
)
def test_a_potential_that_is_not_finite_is_seen(dynamics, behind):
    """Behind 0 the potential has no value, and its gradient does."""
    pulls = sgmcmc.Full(
        lambda q: (
            jnp.sum(q) + jnp.where(jnp.all(q > 0), 0.0, jax.lax.stop_gradient(behind))
        )
    )
    sampler = build(pulls, dynamics, schedule=0.5)
    state = steps(sampler, sampler.init(jnp.ones(2), jax.random.key(0)), 300)
    assert (np.asarray(state.position) > 0).all()
    assert 0 < int(state.statistics.num_refused) < 300


def test_a_momentum_that_is_not_finite_is_seen():
    """A wide preconditioner makes it of a finite gradient."""
    steep = sgmcmc.Full(lambda q: 1e30 * jnp.sum(jnp.where(q > 1, q, 0.0)))
    sampler = build(
        steep, BAOAB(1.0), sgmcmc.Diagonal(1e20), schedule=0.01, temperature=1e-26
    )
    before = sampler.init(jnp.array([1.0]), jax.random.key(0))
    before = before._replace(memory=before.memory._replace(momentum=jnp.array([1e-12])))
    after = steps(sampler, before, 1)
    assert int(after.statistics.num_refused) == 1
    close(after.memory.momentum, [-1e-12])


# -- the part of a minibatch potential that is hoisted out of the steps ----------------


def in_a_loop(q, i):
    return jax.lax.fori_loop(
        0,
        3,
        lambda k, total: (
            total + jnp.sum(jnp.sin(q) * jnp.asarray(DATA)[jnp.asarray(i)[k]])
        ),
        0.0,
    )


def on_host(q, i):
    """A call into Python, which need not know how to run for many steps at once."""
    rows = jax.pure_callback(
        lambda i: DATA[np.asarray(i)], jax.ShapeDtypeStruct((4, 3), jnp.float32), i
    )
    return jnp.sum((rows - q) ** 2)


@pytest.mark.core
@pytest.mark.parametrize(
    "potential",
    [
        lambda q, i: jax.jit(of_rows)(q, i) + jnp.sum(q),
        lambda q, i: jnp.sum(q**2),
        in_a_loop,
        on_host,
    ],
)
def test_what_is_prepared_and_what_is_left_make_the_whole(potential):
    index = np.array([4, 39, 0, 4])
    prepare, finish = separate(potential, jnp.zeros(3), jnp.zeros(4, int))
    prepared = jax.tree.map(
        lambda leaf: leaf[1], jax.jit(jax.vmap(prepare))(np.stack([0 * index, index]))
    )
    found, expected = (
        jax.jit(jax.value_and_grad(f))(START)
        for f in (lambda q: finish(q, prepared), lambda q: potential(q, index))
    )
    assert_same(found, expected)


def inner_loops(jaxpr):
    """Bodies of the loops that hold no other loop."""
    found = []
    for equation in jaxpr.eqns:
        bodies = [
            v.jaxpr
            for v in jax.tree.leaves(list(equation.params.values()))
            if hasattr(v, "jaxpr")
        ]
        deeper = [loop for body in bodies for loop in inner_loops(body)]
        found += deeper or (
            bodies if equation.primitive.name in ("while", "scan") else []
        )
    return found


@pytest.mark.core
def test_work_of_a_step_does_not_depend_on_the_size_of_the_data():
    """The block around the loop picks the rows."""
    x = np.zeros((100_000, 3), np.float32)
    gradient = sgmcmc.Minibatch(
        lambda q, i: jnp.sum((jnp.asarray(x)[i] - q) ** 2),
        sgmcmc.WithReplacement(len(x), 8),
    )
    sampler = build(gradient, Overdamped(), schedule=0.01)
    state = jax.eval_shape(sampler.init, jnp.zeros(3), jax.random.key(0))
    jaxpr = jax.make_jaxpr(lambda state: sampler.run(state, 1000))(state).jaxpr
    loops = inner_loops(jaxpr)
    assert loops
    assert "100000" in str(jaxpr)
    assert not any("100000" in str(loop) for loop in loops)
