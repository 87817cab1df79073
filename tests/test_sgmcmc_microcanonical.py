"""Microcanonical dynamics against a transcription of the equations, Jacobians, closed forms and exact targets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from numpyro_bnn.infer import MCLMC, implied_bias
from numpyro_bnn.sgmcmc import Diagonal, Full, Microcanonical, Minibatch, build
from numpyro_bnn.sgmcmc.dynamics import INTEGRATORS
from numpyro_bnn.sgmcmc.engine import reset_statistics
from numpyro_bnn.sgmcmc.streams import Keys

BOTH = pytest.mark.parametrize("integrator", ["mclachlan", pytest.param("leapfrog", marks=pytest.mark.slow)])
P = 6
STIFF = np.linspace(0.5, 3.0, P)


def potential(q):
    """Not Gaussian, coupled."""
    return 0.5 * jnp.vdot(q, jnp.asarray(STIFF, q.dtype) * q) + 0.1 * jnp.sum(q**4) + 0.3 * jnp.sin(q[0] * q[1])


def slope(q):
    """Minus the gradient, written out."""
    force = -STIFF * q - 0.4 * q**3
    wave = 0.3 * np.cos(q[0] * q[1])
    force[:2] -= wave * q[1::-1]
    return force


def value(q):
    return 0.5 * q @ (STIFF * q) + 0.1 * np.sum(q**4) + 0.3 * np.sin(q[0] * q[1])


def turned(u, force, time):
    """The exact flow of du = (I - uu') f dt / (P - 1), in its hyperbolic form, and the energy it takes up."""
    size = np.linalg.norm(force)
    e, delta = force / size, time * size / (len(u) - 1)
    stretch = np.cosh(delta) + (u @ e) * np.sinh(delta)
    return (u + (np.sinh(delta) + (u @ e) * (np.cosh(delta) - 1)) * e) / stretch, (len(u) - 1) * np.log(stretch)


def transcribed(q, u, integrator, eps, root, temperature):
    outer = {"leapfrog": 0.5, "mclachlan": 0.1931833275037836}[integrator]
    turns = [outer, outer] if integrator == "leapfrog" else [outer, 1 - 2 * outer, outer]
    start, kinetic = value(q) / temperature, 0.0
    for number, share in enumerate(turns):
        if number:
            q = q + eps / (len(turns) - 1) * root * u
        u, change = turned(u, root * slope(q) / temperature, share * eps)
        kinetic += change
    return q, u, kinetic + value(q) / temperature - start


def start_of(dynamics, eps, seed=0, temperature=1.0, root=None, target=potential):
    preconditioner = None if root is None else Diagonal(root**2)
    sampler = build(Full(target), dynamics, preconditioner, schedule=eps, temperature=temperature)
    q = jnp.asarray(np.random.default_rng(seed).normal(size=P))
    return sampler, sampler.init(q, jax.random.key(seed))


@pytest.mark.parametrize(
    ("integrator", "temperature"),
    [
        ("mclachlan", 0.6),
        pytest.param("mclachlan", 1.0, marks=pytest.mark.slow),
        pytest.param("leapfrog", 1.0, marks=pytest.mark.slow),
        pytest.param("leapfrog", 0.6, marks=pytest.mark.slow),
    ],
)
def test_a_step_is_the_published_one(integrator, temperature, x64):
    eps, length, root = 0.9, 2.5, np.linspace(0.7, 1.4, P)
    sampler, state = start_of(Microcanonical(length, integrator), eps, 1, temperature, root)
    noise = np.asarray(sampler._draw(state.seeds, state.step, state.position).noise[0])
    nu = np.sqrt((np.exp(2 * eps / length) - 1) / P)
    u = np.asarray(state.memory.direction) + nu * noise
    q, u, error = transcribed(np.array(state.position), u / np.linalg.norm(u), integrator, eps, root, temperature)
    after = jax.jit(sampler.step)(state)
    np.testing.assert_allclose(after.position, q, rtol=1e-6)
    np.testing.assert_allclose(after.memory.direction, u, rtol=1e-6)
    np.testing.assert_allclose(after.statistics.energy_variance, error**2 / P, rtol=1e-6)
    assert np.abs(q - np.asarray(state.position)).max() > 0.1
    assert abs(error) > 1e-3


@BOTH
def test_the_motion_is_reversible(integrator, x64):
    sampler, state = start_of(Microcanonical(float("inf"), integrator), 0.7)
    end = jax.jit(sampler.run, static_argnums=1)(state, 50)
    assert np.abs(np.asarray(end.position - state.position)).max() > 0.5
    np.testing.assert_allclose(np.linalg.norm(end.memory.direction), 1.0, rtol=1e-12)
    flipped = end._replace(memory=end.memory._replace(direction=-end.memory.direction))
    back = jax.jit(sampler.run, static_argnums=1)(flipped, 50)
    np.testing.assert_allclose(back.position, state.position, atol=1e-8)
    np.testing.assert_allclose(-back.memory.direction, state.memory.direction, atol=1e-8)


@BOTH
def test_the_kinetic_energy_is_the_jacobian(integrator, x64):
    """Minus the log determinant of a step on (position, sphere), by automatic differentiation in tangent planes."""
    sampler, state = start_of(Microcanonical(float("inf"), integrator), 0.8, 2)

    def step(q, u):
        memory = state.memory._replace(
            direction=u / jnp.linalg.norm(u), potential=potential(q), gradient=jax.grad(potential)(q)
        )
        after = sampler.step(state._replace(position=q, memory=memory))
        return after.position, after.memory.direction

    def plane(u):
        return np.linalg.svd(np.asarray(u)[None])[2][1:].T  # (P, P - 1), orthogonal to u

    q, u = state.position, state.memory.direction
    (qq, qu), (uq, uu) = jax.jacobian(step, (0, 1))(q, u)
    q1, u1 = step(q, u)
    first, last = plane(u), plane(u1)
    jacobian = np.block([[qq, qu @ first], [last.T @ uq, last.T @ uu @ first]])
    _, logdet = np.linalg.slogdet(jacobian)
    error = transcribed(np.array(q), np.array(u), integrator, 0.8, 1.0, 1.0)[2]
    np.testing.assert_allclose(-logdet, error - (value(np.array(q1)) - value(np.array(q))), rtol=1e-8)
    assert abs(logdet) > 0.1


def test_energy_errors_keep_their_digits():
    """P = 2000, potentials near 10^4: a trajectory of 60 steps in float32 beside the same in float64."""
    size, steps = 2000, 60
    q = np.random.default_rng(3).normal(size=size) * 3

    def quartic(q):
        return 0.5 * jnp.vdot(q, q) + 0.01 * jnp.sum(q**4)

    def error(dtype):
        sampler = build(Full(quartic), Microcanonical(float("inf")), schedule=1.0)
        direction = jnp.asarray(np.ones(size) / size**0.5, dtype)

        def body(state, _):
            context = sampler._context((), (), state.step, jnp.asarray(False), dtype)
            draw = sampler._draw(state.seeds, state.step, state.position)
            move = sampler.dynamics.step(context, state.position, state.memory, draw)
            return state._replace(position=move.position, memory=move.memory), move.energy_error

        @jax.jit
        def trajectory(q):
            state = sampler.init(q, jax.random.key(0))
            start = state._replace(memory=state.memory._replace(direction=direction))
            return jax.lax.scan(body, start, None, steps)[1].sum(), state.memory.potential

        return [float(x) for x in trajectory(jnp.asarray(q, dtype))]

    single, level = error(jnp.float32)
    with jax.enable_x64(True):
        double = error(jnp.float64)[0]
    assert level > 1e4
    assert abs(double) > 0.05
    # 120 gradients with a relative error of 1e-7 each turn the direction by as much, times P.
    np.testing.assert_allclose(single, double, atol=0.02)


# -- stationary distributions -----------------------------------------------------------------------


def test_the_implied_bias_is_that_of_leapfrog():
    """Underdamped Langevin (OBABO) with the angle h: variance 1 / (1 - h^2 / 4), energy errors from its matrix."""
    for h in np.linspace(0.01, 1.9, 50):
        step = np.array([[1 - h**2 / 2, h], [-h * (1 - h**2 / 4), 1 - h**2 / 2]])
        variance = 1 / (1 - h**2 / 4)
        change = (step.T @ step - np.eye(2)) @ np.diag([variance, 1.0])
        np.testing.assert_allclose(implied_bias(0.5 * np.trace(change @ change)), variance - 1, rtol=1e-6)
    energies = np.geomspace(1e-12, 10, 40)
    assert implied_bias(0.0) == 0
    assert np.all(
        implied_bias((energies[1:] + energies[:-1]) / 2)
        > (implied_bias(energies)[1:] + implied_bias(energies)[:-1]) / 2
    )


def mean_field(integrator, h, decay, widths):
    """Biases of the variances of Gaussian directions of these curvatures^(1/2), P -> infinity.

    Norms are sums over many coordinates then, without fluctuations: each step is linear in (x, v), v = sqrt(P) u, and
    what is followed are the second moments of these.
    """
    turns, drifts = INTEGRATORS[integrator]
    w2 = widths**2
    xx, xv, vv = 1 / w2, 0 * w2, np.ones_like(w2)

    def turn(xx, xv, vv, time):
        size = np.sqrt(np.mean(w2**2 * xx))
        along, delta = -np.mean(w2 * xv) / size, time * size
        stretch = np.cosh(delta) + along * np.sinh(delta)
        pull = (np.sinh(delta) + along * (np.cosh(delta) - 1)) * w2 / size / stretch
        return xv / stretch - pull * xx, vv / stretch**2 - 2 * pull * xv / stretch + pull**2 * xx

    for _ in range(3000):
        xv, vv = turn(xx, xv, vv, turns[0] * h)
        for share, drift in zip(turns[1:], drifts, strict=True):
            xx, xv = xx + 2 * drift * h * xv + (drift * h) ** 2 * vv, xv + drift * h * vv
            xv, vv = turn(xx, xv, vv, share * h)
        xv, vv = decay * xv, decay**2 * vv + 1 - decay**2
    return xx * w2 - 1


def moments(sampler, scale, burn, keep, thin, seed=1):
    """Per-coordinate means of x^2 and the mean energy variance; one flat chain of independent coordinates."""

    @jax.jit
    def run(state):
        def body(carry, _):
            state, total = carry
            state = sampler.run(state, thin)
            return (state, total + state.position**2), None

        state = reset_statistics(sampler.run(state, burn))
        return jax.lax.scan(body, (state, jnp.zeros_like(scale)), None, keep)[0]

    begin = jax.random.normal(jax.random.key(seed + 1), scale.shape) / scale
    state, total = run(sampler.init(begin, jax.random.key(seed)))
    assert int(state.first_divergence) == -1
    return np.asarray(total, np.float64) / keep, float(state.statistics.energy_variance)


@pytest.mark.parametrize(
    ("integrator", "spread", "angles"),
    [
        pytest.param("leapfrog", 1, (0.4, 0.6, 1.0), marks=pytest.mark.slow),
        pytest.param("mclachlan", 1, (1.4, 2.0), marks=pytest.mark.slow),
        pytest.param("leapfrog", 8, (0.5,), marks=pytest.mark.slow),
        ("mclachlan", 8, (1.2,)),
    ],
)
def test_biases_are_those_of_theory_and_within_what_is_implied(integrator, spread, angles):
    """Gaussians in 16384 dimensions, of one or of eight widths. The bias falls like the third root of the energy
    variance, of which it is a function that is known before."""
    size = 16_384
    widths = np.linspace(0.3, 1.7, spread) if spread > 1 else np.ones(1)
    scale = jnp.asarray(np.tile(widths, size // spread), jnp.float32)
    biases, energies = [], []
    for h in angles:
        sampler = build(
            Full(lambda q: 0.5 * jnp.vdot(q * scale, q * scale)),
            Microcanonical(2 * size**0.5, integrator),
            schedule=h * size**0.5,
        )
        squares, energy = moments(sampler, scale, 100, 150, max(1, round(1.5 / h)))
        by_width = (squares * np.asarray(scale, np.float64) ** 2).reshape(-1, spread)
        bias, error = by_width.mean(0) - 1, by_width.std(0) / len(by_width) ** 0.5
        theory = mean_field(integrator, h, np.exp(-h / 2), widths)
        print(f"{integrator}, h = {h}: bias {bias}, theory {theory}, energy variance {energy:.3g}")
        # 4 standard errors: failure rate 6e-5 each; fluctuations of norms are of order 1 / P.
        assert np.all(np.abs(bias - theory) < 4 * error + 10 / size)
        assert error.max() < 0.5 * np.abs(theory).max()
        assert np.abs(theory).mean() < implied_bias(energy) < 4 * np.abs(theory).mean()
        biases.append(np.abs(bias).mean())
        energies.append(energy)
    if len(angles) == 3:
        # Standard errors of the logarithms: of the bias 0.03, of the energy variance (few hundred steps) 0.1.
        order = np.log(biases[2] / biases[0]) / np.log(energies[2] / energies[0])
        assert abs(order - 1 / 3) < 4 * (0.03 + 0.1 / 3) / np.log(energies[2] / energies[0]) + 0.02, order


@pytest.mark.slow
@pytest.mark.parametrize("fresh", [False, True])
def test_gradient_noise_of_one_size_blurs_only(fresh):
    """Noise that would heat leapfrog steps with a friction as weak by h^2 V / (1 - a^2), of 1.6 times the variance,
    turns the direction of a microcanonical one, whose speed cannot change."""
    size, h, variance = 4096, 0.4, 2.0

    def noisy(q, key):
        return 0.5 * jnp.vdot(q, q) + variance**0.5 * jnp.vdot(q, jax.random.normal(key, q.shape))

    dynamics = Microcanonical(4 * size**0.5, "leapfrog", fresh=fresh)
    squares, _ = moments(
        build(Minibatch(noisy, Keys()), dynamics, schedule=h * size**0.5), jnp.ones(size), 200, 200, 4
    )
    decay = np.exp(-h / 4)
    heat = h**2 * variance / (1 - decay**2)
    print(f"fresh={fresh}: E[x^2] {squares.mean():.3f}; underdamped Langevin would be off by about {heat:.2f}")
    assert heat > 1
    assert abs(squares.mean() - 1) < 0.25


@pytest.mark.slow
def test_noise_of_unequal_sizes_is_evened_out_by_a_preconditioner():
    """Half of the directions with 40 times the noise variance: they take speed from the others, until the noise has
    one size in whitened directions."""
    size, h = 2048, 0.3
    noise = jnp.where(jnp.arange(size) % 2 == 0, 4.0, 0.1)

    def noisy(q, key):
        return 0.5 * jnp.vdot(q, q) + jnp.vdot(q, jnp.sqrt(noise) * jax.random.normal(key, q.shape))

    def bias(preconditioner):
        dynamics = Microcanonical(2 * size**0.5, "leapfrog", fresh=True)
        sampler = build(Minibatch(noisy, Keys()), dynamics, preconditioner, schedule=h * size**0.5)
        squares, _ = moments(sampler, jnp.ones(size), 300, 200, 4)
        return squares.reshape(-1, 2).mean(0) - 1

    even = 1 / noise
    plain, evened = bias(None), bias(Diagonal(even / jnp.exp(jnp.mean(jnp.log(even)))))
    print(f"biases of noisy and quiet directions: plain {plain}, preconditioned {evened}")
    # Standard error of each about (2 / (1024 * 50))^(1/2) = 0.006.
    assert np.abs(plain).max() > 0.1
    assert np.abs(evened).max() < 0.5 * np.abs(plain).max()


# -- refused steps ----------------------------------------------------------------------------------


def rounded(q):
    return 0.5 * jnp.vdot(q, q)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, 1e6])
def test_a_refused_step_turns_back(bad):
    """Everything beyond a small ball is impossible: the chain stays, its direction is the refreshed one, reversed."""

    def walled(q):
        return rounded(q) + jnp.where(jnp.vdot(q, q) > 1e-6, bad, 0.0)

    sampler = build(Full(walled), Microcanonical(2.0, max_energy_error=5.0), schedule=0.5)
    state = sampler.init(jnp.zeros(P) + 1e-5, jax.random.key(0))
    after = jax.jit(sampler.step)(state)
    np.testing.assert_array_equal(after.position, state.position)
    noise = sampler._draw(state.seeds, state.step, state.position).noise[0]
    refreshed = np.asarray(state.memory.direction + np.sqrt((np.exp(0.5) - 1) / P) * noise)
    np.testing.assert_allclose(after.memory.direction, -refreshed / np.linalg.norm(refreshed), rtol=1e-5)
    assert (int(after.first_divergence), int(after.step)) == (-1, 1)
    assert (int(after.statistics.num_refused), int(after.statistics.num_steps)) == (1, 1)
    assert float(after.statistics.energy_variance) == 0  # only steps that were taken count
    # Without a limit only what is not finite is refused.
    free = jax.jit(build(Full(walled), Microcanonical(2.0), schedule=0.5).step)(state)
    assert int(free.statistics.num_refused) == (not np.isfinite(bad))
    assert (np.abs(free.position - state.position).max() > 1e-2) == np.isfinite(bad)


def test_the_way_down_is_taken_in_warm_up_only():
    """Far from the mode energy errors are huge: in warm-up, steps that lower the potential are taken all the same."""
    sampler = build(Full(lambda q: 1e4 * rounded(q)), Microcanonical(2.0, max_energy_error=5.0), schedule=1.0)
    start = jnp.full(P, 30.0)
    after, within = (
        jax.jit(sampler.run, static_argnums=1)(sampler.init(start, jax.random.key(0), n), 40) for n in (0, 40)
    )
    assert int(after.statistics.num_refused) > 0
    assert int(within.statistics.num_refused) == 0
    assert float(rounded(within.position)) < float(rounded(after.position)) < float(rounded(start))


def test_gradients_alone_show_the_energy_error_of_gaussians():
    """The trapezoidal rule is exact: with and without potentials the same steps are refused, to the same places."""
    scale = jnp.linspace(0.5, 2.0, 40)
    ends = []
    for energy in (True, False):
        dynamics = Microcanonical(5.0, energy=energy, max_energy_error=0.1)
        sampler = build(Full(lambda q: rounded(scale * q)), dynamics, schedule=4.0)
        state = sampler.init(jax.random.normal(jax.random.key(1), (40,)) / scale, jax.random.key(0))
        ends.append(jax.jit(sampler.run, static_argnums=1)(state, 50))
    counts = [int(end.statistics.num_refused) for end in ends]
    assert counts[0] == counts[1]
    assert 3 < counts[0] < 40
    np.testing.assert_allclose(ends[1].position, ends[0].position, rtol=1e-2, atol=1e-3)
    np.testing.assert_allclose(ends[1].memory.potential, ends[0].memory.potential, rtol=1e-3)


def test_a_chain_moves_where_only_short_steps_are_taken():
    """Full steps are all refused; the shorter ones among them take the chain to the typical set and about it."""
    size, sd = 10, 0.02
    sampler = build(Full(lambda q: rounded(q / sd)), Microcanonical(0.2, max_energy_error=5.0), schedule=1.0)

    @jax.jit
    @jax.vmap
    def run(key):
        def body(state, _):
            state = sampler.run(state, 20)
            return state, jnp.vdot(state.position, state.position) / (size * sd**2)

        return jax.lax.scan(body, sampler.init(jnp.full(size, 2 * sd), key), None, 1000)

    state, squares = run(jax.random.split(jax.random.key(0), 50))
    refused = np.asarray(state.statistics.num_refused / state.statistics.num_steps)
    found = np.asarray(squares, np.float64)[:, 200:].mean(1)
    error = found.std() / 50**0.5
    print(f"refused {refused.mean():.3f}; mean square {found.mean():.4f} +- {error:.4f}")
    assert refused.min() > 0.9
    assert refused.max() < 0.98
    # It starts at 4. Steps of 1/16 are as long as the Gaussian is wide, sd sqrt(P): their bias is about a tenth.
    assert abs(found.mean() - 1) < 4 * error + 0.15


@BOTH
def test_on_gaussians_the_limit_of_the_kernel_refuses_nothing(integrator):
    """At about the energy variance of the default, the chain is the same to the last bit."""
    size = 2000
    limit = MCLMC(lambda: None).max_energy_error(size)
    widths = jnp.tile(jnp.linspace(0.3, 1.7, 8), size // 8)
    ends = []
    for bound in (limit, float("inf")):
        dynamics = Microcanonical(2 * size**0.5, integrator, max_energy_error=bound)
        h = 0.9 if integrator == "mclachlan" else 0.35
        sampler = build(Full(lambda q: rounded(widths * q)), dynamics, schedule=h * size**0.5)
        begin = jax.random.normal(jax.random.key(2), (size,)) / widths
        ends.append(jax.jit(sampler.run, static_argnums=1)(sampler.init(begin, jax.random.key(0)), 2000))
    spread = (size * float(ends[0].statistics.energy_variance)) ** 0.5
    print(f"{integrator}: standard deviation {spread:.2f} of energy errors, limit {limit:.2f}")
    assert spread > 0.5
    assert int(ends[0].statistics.num_refused) == 0
    np.testing.assert_array_equal(ends[0].position, ends[1].position)


def test_refusals_leave_the_density_as_it_is():
    """A cliff that no gradient shows, at 0.8 of a Gaussian: the distribution is the truncated one, up to the edge.

    A new direction in place of a reversed one would double the mass within a step of it.
    """
    size, edge, step, chains = 8, 0.8, 0.5, 400

    def cliff(q):
        return rounded(q) + jnp.where(q[0] > edge, 40.0, 0.0)

    dynamics = Microcanonical(4.0, max_energy_error=5.0)
    sampler = build(Full(cliff), dynamics, schedule=step)

    @jax.jit
    @jax.vmap
    def run(key):
        def body(state, _):
            state = sampler.run(state, 4)
            return state, state.position[0]

        state = sampler.run(sampler.init(jnp.zeros(size), key), 200)
        return jax.lax.scan(body, state, None, 400)

    state, x = run(jax.random.split(jax.random.key(0), chains))
    x = np.asarray(x, np.float64)
    assert x.max() <= edge
    share = float(np.mean(state.statistics.num_refused / state.statistics.num_steps))
    grid = np.linspace(edge - 0.18, edge, 4)
    found = np.stack([(x > g).mean(1) for g in grid[:-1]])
    exact = (stats.norm.cdf(edge) - stats.norm.cdf(grid[:-1])) / stats.norm.cdf(edge)
    error = found.std(1) / chains**0.5
    print(f"refused {share:.3f}; mass near the edge {found.mean(1)}, exact {exact}, standard errors {error}")
    assert share > 0.02
    # Four standard errors and two percent for steps that are not short: failure rate 6e-5 each.
    assert np.all(np.abs(found.mean(1) - exact) < 4 * error + 0.02 * exact)
    assert np.all(error < 0.05 * exact)
