"""Posteriors of the kernels against exact ones: conjugate regression, theory of the bias, SBC, long NUTS runs.

Linear-Gaussian problems are solved exactly, step by step, for every finite step size (`overdamped`, `underdamped`
below), so biased kernels are held to their bias and not to a tolerance. Bands of 4 standard errors over independent
chains fail with probability 6e-5 each; seeds are fixed.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import lax
from numpyro import handlers
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import potential_energy
from scipy import stats

from numpyro_bnn import infer, models, nn, sgmcmc
from numpyro_bnn.infer.target import bind

N, B, P, SIGMA = 60, 12, 3, 0.5
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, P)) * np.array([1.0, 0.7, 1.4])
Y = X @ np.array([1.0, -1.0, 0.5]) + SIGMA * RNG.normal(size=N)
ARGS = (jnp.asarray(X, jnp.float32), jnp.asarray(Y, jnp.float32))


def regression(x, y, batch_size=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([P]).to_event(1))
    with numpyro.plate("data", N, subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, SIGMA), obs=y[i])


# The posterior at T = 1 is N(MEAN, inv(HESSIAN)).
CURVATURES = X[:, :, None] * X[:, None, :] / SIGMA**2
HESSIAN = np.eye(P) + CURVATURES.sum(0)
MEAN = np.linalg.solve(HESSIAN, X.T @ Y / SIGMA**2)
SLOPES = -X * (Y - X @ MEAN)[:, None] / SIGMA**2


def run(kernel, num_chains, warmup, draws, args=ARGS, kwargs=None, start=None, edit=lambda state: state, seed=0):
    """Run chains side by side without ``MCMC``; returns z by site (draws, C, ...) and the last state."""
    kwargs = {"batch_size": B} if kwargs is None else kwargs
    keys = jax.random.split(jax.random.key(seed), num_chains)
    state = edit(kernel.init(keys, warmup, start, args, kwargs))

    def transition(state, _):
        state = kernel.sample(state, args, kwargs)
        return state, (state.z, state.engine.step)

    state, (z, step) = jax.jit(lambda s: lax.scan(transition, s, None, warmup + draws))(state)
    assert not np.any(state.diverging)
    return {k: np.asarray(v[warmup:], np.float64) for k, v in z.items()}, state, np.asarray(step[warmup:])


def at_mean(num_chains):
    return {"w": jnp.broadcast_to(jnp.asarray(MEAN, jnp.float32), (num_chains, P))}


# -- exact second moments of minibatch Langevin dynamics on a quadratic -----------------------------


def gradient_noise(position, batch_size=B):
    """Covariance of the minibatch gradient when the position has mean MEAN and this covariance."""
    mean = CURVATURES.mean(0)
    curvature = np.einsum("nij,jk,nlk->il", CURVATURES, position, CURVATURES) / N - mean @ position @ mean
    return N**2 / batch_size * (curvature + np.cov(SLOPES.T, bias=True))


def overdamped(schedule, temperature, steps, preconditioner=1.0):
    """Covariance of the position after each step of SGLD from MEAN, (steps, P, P)."""
    cov, path, g = np.zeros((P, P)), [], np.broadcast_to(preconditioner, P)
    for t in range(steps):
        eps = schedule(t)
        drift = np.eye(P) - eps / 2 * g[:, None] * HESSIAN
        kick = g[:, None] * gradient_noise(cov) * g
        cov = drift @ cov @ drift.T + eps**2 / 4 * kick + eps * temperature * np.diag(g)
        path.append(cov)
    return np.array(path)


def underdamped(eps, decay, temperature, steps):
    """Covariance of the position after many steps of SGHMC; the last gradient of a step is the next one's first."""
    h, eye, zero = eps**0.5, np.eye(P), np.zeros((P, P))
    a = 1 - decay
    noise = (1 - a**2) * temperature
    kick = np.block([[eye, zero, zero], [zero, eye, -h / 2 * eye]])
    cov = np.zeros((3 * P, 3 * P))  # of (position, momentum, gradient)
    cov[P : 2 * P, P : 2 * P] = temperature * eye
    cov[2 * P :, 2 * P :] = gradient_noise(zero)
    for _ in range(steps):
        half = np.block([[eye, h / 2 * eye], [zero, eye]])
        move = half @ np.kron(np.diag([1, a]), eye) @ half @ kick
        source = np.kron(np.outer([h / 2, 1], [h / 2, 1]), eye) * noise
        cov = move @ cov @ move.T + source
        full = np.block([[eye, zero], [zero, eye], [HESSIAN, zero]])
        new = full @ cov @ full.T
        new[2 * P :, 2 * P :] += gradient_noise(cov[:P, :P])
        end = np.block([[eye, zero, zero], [zero, eye, -h / 2 * eye], [zero, zero, eye]])
        cov = end @ new @ end.T
    return cov[:P, :P]


EPS, STEPS, CHAINS = 4e-4, 50, 500
DIAGONAL = np.array([1.0, 2.0, 0.5])
POLYNOMIAL = infer.schedules.polynomial(6e-3, 20.0, 0.7)
CYCLE = {"cycle_length": 120, "draws_per_cycle": 2, "explore": 0.5}
FIXED = {"steps_per_draw": STEPS, "warm_start": 0.0}

# name: kernel(temperature), exact covariances (draws, P, P) of the draws for (temperature, steps (draws,)), share of
# the variance that the theory leaves open.
LINEAR = {
    "SGLD": (
        lambda t: infer.SGLD(regression, EPS, temperature=t, **FIXED),
        lambda t, steps: overdamped(lambda s: EPS, t, steps[-1])[steps - 1],
    ),
    "SGLD with decreasing steps": (
        lambda t: infer.SGLD(regression, POLYNOMIAL, temperature=t, **FIXED),
        lambda t, steps: overdamped(POLYNOMIAL, t, steps[-1])[steps - 1],
    ),
    "CyclicalSGLD": (
        lambda t: infer.CyclicalSGLD(regression, 2 * EPS, temperature=t, **CYCLE),
        lambda t, steps: overdamped(sgmcmc.schedules.cyclical(2 * EPS, 120, 1), t, steps[-1])[steps - 1],
    ),
    "PSGLD": (
        lambda t: infer.PSGLD(regression, EPS, temperature=t, preconditioner=DIAGONAL, **FIXED),
        lambda t, steps: overdamped(lambda s: EPS, t, steps[-1], DIAGONAL)[steps - 1],
    ),
    "SGHMC": (
        lambda t: infer.SGHMC(regression, 1e-4, momentum_decay=0.3, temperature=t, **FIXED),
        lambda t, steps: underdamped(1e-4, 0.3, t, steps[-1])[None],
    ),
    "MALA": (
        lambda t: infer.MALA(regression, 5e-3, temperature=t, steps_per_draw=15, warm_start=0.0),
        lambda t, steps: t * np.linalg.inv(HESSIAN)[None],
    ),
    "GGMC": (
        lambda t: infer.GGMC(regression, 2e-4, num_steps=3, temperature=t, steps_per_draw=20, warm_start=0.0),
        lambda t, steps: t * np.linalg.inv(HESSIAN)[None],
    ),
}


def assert_moments(draws, covariances, bias=0.0):
    """Mean and mean squares of all draws, standardized by the exact ones, chain by chain."""
    sd = np.sqrt(np.diagonal(covariances, axis1=1, axis2=2))[:, None]
    standard = (draws - MEAN) / sd
    for power, expected in ((1, 0.0), (2, 1.0)):
        by_chain = (standard**power).mean((0, 2))
        error = by_chain.std() / len(by_chain) ** 0.5
        assert abs(by_chain.mean() - expected) < 4 * error + bias, (power, by_chain.mean(), error)
        assert error < 0.025
        print(f"power {power}: {by_chain.mean():.4f} (expected {expected}, standard error {error:.4f})")
    return by_chain.mean()


VARIANTS = ("SGLD with decreasing steps",)
# A biased and an exact kernel, with momentum and without, tempered and not; the others are slow.
FAST = {("SGLD", 1.0), ("SGHMC", 0.5), ("MALA", 0.5)}


@pytest.mark.parametrize(
    ("name", "temperature"),
    [
        pytest.param(name, t, marks=[] if (name, t) in FAST else [pytest.mark.slow])
        for name in LINEAR
        for t in (1.0, 0.5)
        if t < 1 or name not in VARIANTS
    ],
)
def test_conjugate_regression_with_minibatches(name, temperature):
    make, theory = LINEAR[name]
    kernel = make(temperature)
    draws, state, steps = run(kernel, CHAINS, 6, 8, start=at_mean(CHAINS))
    covariances = theory(temperature, steps[:, 0])
    assert_moments(draws["w"], covariances)
    bias = np.trace(HESSIAN @ covariances[-1]) / P / temperature - 1
    if kernel.exact:
        assert 0.3 < state.accept_prob.mean() < 0.97
    elif "decreasing" not in name:
        assert bias > 0.05  # or the test would not see that the bias is as it should be


def test_the_bias_falls_with_decreasing_steps():
    """By the same exact theory: the bias of the variance after n steps of a polynomial schedule."""
    path = overdamped(POLYNOMIAL, 1.0, 4000)
    bias = [np.trace(HESSIAN @ path[n - 1]) / P - 1 for n in (100, 700, 4000)]
    assert bias[0] > 2 * bias[1] > 4 * bias[2] > 0


@pytest.mark.slow
def test_thermostat_removes_most_of_the_heat_of_minibatches():
    """SGNHT is not linear; its excess variance must be far below that of SGHMC with the same steps and friction."""
    kernel = infer.SGNHT(regression, 1e-4, momentum_decay=0.1, **FIXED)
    draws, state, _ = run(kernel, CHAINS, 14, 8, start=at_mean(CHAINS))
    excess = np.trace(HESSIAN @ underdamped(1e-4, 0.1, 1.0, 1000)) / P - 1
    assert excess > 0.25
    # Left: discretization, and noise that differs between directions.
    ratio = assert_moments(draws["w"], np.linalg.inv(HESSIAN)[None], bias=0.05)
    print(f"excess variance: SGHMC {excess:.3f}, SGNHT {ratio - 1:.3f}")
    # At the end of a step momenta are off by about eps (V - lam) / 4, of either sign, 5 %; standard error 2 %.
    assert abs(float(state.kinetic_temperature.mean()) - 1) < 0.13


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel",
    [
        infer.SGLD(regression, steps_per_draw=150),
        infer.PSGLD(regression, steps_per_draw=150),
        infer.SGHMC(regression, steps_per_draw=400),
    ],
    ids=lambda kernel: type(kernel).__name__,
)
def test_chosen_step_sizes_keep_the_bias_they_state(kernel):
    """`step_size=None`: no variance is off by more than `bias_tolerance` = 5 %, and steps are not timid."""
    draws, _, _ = run(kernel, 400, 16, 10)
    standard = (draws["w"] - MEAN) / np.sqrt(np.diag(np.linalg.inv(HESSIAN)))
    squares = (standard**2).mean(0)
    error = squares.std(0) / 20
    assert np.all(np.abs(squares.mean(0) - 1) < 0.05 + 4 * error), squares.mean(0)
    assert np.all(error < 0.045)
    print(f"{type(kernel).__name__}: bias of the variances {squares.mean(0) - 1}")
    # The noise is measured on 16 minibatches: its largest direction comes out too large, and steps too small.
    assert np.abs(squares.mean() - 1) > 0.01


@pytest.mark.slow
def test_mala_is_adapted_to_its_acceptance():
    kernel = infer.MALA(regression, steps_per_draw=10)
    draws, state, _ = run(kernel, 300, 60, 20)
    assert_moments(draws["w"], np.linalg.inv(HESSIAN)[None])
    assert abs(state.accept_prob.mean() - kernel.target_accept_prob) < 0.05


@pytest.mark.slow
def test_the_bias_falls_at_the_theoretical_order():
    """Full gradients; bias of the variance of SGLD over three step sizes, by chains of one run; order 1 in eps."""
    kernel = infer.SGLD(regression, 1e-3, steps_per_draw=40, warm_start=0.0)
    sizes = np.repeat(np.array([1.0, 0.5, 0.25]) * 2e-3, 3000)

    def edit(state):
        return state._replace(base_step_size=jnp.asarray(sizes, jnp.float32))

    draws, _, _ = run(kernel, sizes.size, 5, 15, kwargs={}, start=at_mean(sizes.size), edit=edit)
    root = np.linalg.cholesky(HESSIAN)
    squares = (((draws["w"] - MEAN) @ root) ** 2).mean((0, 2)).reshape(3, -1)
    bias, error = squares.mean(1) - 1, squares.std(1) / 3000**0.5
    slope = np.polyfit(np.log([1.0, 0.5, 0.25]), np.log(bias), 1, w=bias / error)[0]
    print(f"eps 2e-3, 1e-3, 5e-4: bias {bias}, standard errors {error}, slope {slope:.3f}")
    spread = np.hypot(error[0] / bias[0], error[2] / bias[2]) / np.log(4)
    assert spread < 0.1
    # The closed form 1 / (1 - eps lam / 4) has slopes up to 1.15 between these sizes.
    assert abs(slope - 1) < 4 * spread + 0.15, (bias, slope, spread)


# -- minibatch potentials ---------------------------------------------------------------------------


def one_plate(x, y, size):
    w = numpyro.sample("w", dist.Normal(0.0, 0.1).expand([P]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(0.3))
    with numpyro.plate("data", N, subsample_size=size) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, sigma), obs=y[i])


def scoped(x, y, size):
    with handlers.scope(prefix="a"):
        one_plate(x, y, size)


def by_statement(x, y, size):
    w = numpyro.sample("w", dist.Normal(0.0, 0.1).expand([P]).to_event(1))
    with numpyro.plate("data", N, subsample_size=size):
        rows, values = numpyro.subsample(x, event_dim=1), numpyro.subsample(y, event_dim=0)
        numpyro.factor("f", dist.Normal(rows @ w, 1.0).log_prob(values))


def nested(x, y, size):
    w = numpyro.sample("w", dist.Normal(0.0, 0.1))
    with (
        numpyro.plate("rows", N, subsample_size=size, dim=-2) as i,
        numpyro.plate("columns", P, subsample_size=1, dim=-1) as j,
    ):
        numpyro.sample("x", dist.StudentT(3.0, w, 1.0), obs=x[i[:, None], j])


def parallel(x, y, size):
    w = numpyro.sample("w", dist.Normal(0.0, 0.1))
    with numpyro.plate("first", N, subsample_size=size) as i:
        numpyro.sample("y", dist.StudentT(3.0, w, 1.0), obs=y[i])
    with numpyro.plate("second", N // 2, subsample_size=size) as j:
        numpyro.sample("v", dist.StudentT(3.0, w, 2.0), obs=x[j, 0])


def blocks(plates):
    """All minibatches of one epoch, of every pair of plates."""
    batches = [{}]
    for name, plate in plates.items():
        parts = np.split(np.random.default_rng(1).permutation(plate.size), plate.size // plate.batch_size)
        batches = [{**batch, name: jnp.asarray(part)} for batch in batches for part in parts]
    return batches


@pytest.mark.parametrize("model", [one_plate, scoped, by_statement, nested, parallel])
def test_minibatch_gradients_average_to_the_full_gradient(model, x64):
    """With a prior as strong as the likelihood: were it scaled too, the average would be far off."""
    args = (jnp.asarray(X), jnp.asarray(Y), 10)
    target, z = bind("test", model, jax.random.key(0), infer.SGLD(model)._init_strategy, args, {})
    z = jax.tree.map(lambda leaf: leaf + 0.3, z)
    values, slopes = zip(
        *[jax.value_and_grad(target.potential(args, {}, batch))(z) for batch in blocks(target.plates)], strict=True
    )
    assert len(values) == {"nested": 18, "parallel": 18}.get(model.__name__, 6)
    expected, slope = jax.value_and_grad(target.potential(args, {}, "full"))(z)
    np.testing.assert_allclose(np.mean(values), expected, rtol=1e-12)
    mean = jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *slopes)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10), mean, slope)
    if model is one_plate:  # the full potential is the model's own, on full data
        own = potential_energy(model, (*args[:2], None), {}, z)
        np.testing.assert_allclose(expected, own, rtol=1e-12)


# -- limits, stages ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [infer.SGLD, infer.SGHMC])
def test_zero_temperature_finds_the_mode(kernel):
    sampler = kernel(regression, 2e-3, temperature=0.0, steps_per_draw=400, warm_start=0.0)
    draws, _, _ = run(sampler, 2, 0, 2, kwargs={}, start={"w": jnp.full((2, P), 30.0)})
    np.testing.assert_allclose(draws["w"][-1], [MEAN, MEAN], atol=1e-4)


def test_warm_start_descends_from_afar():
    """Adam moves by up to its learning rate a step. SGLD with this step size would keep exp(-900 eps lam / 2) = 90 %
    of the distance."""
    import optax

    options = {"steps_per_draw": 100, "optimizer": optax.adam(optax.cosine_decay_schedule(0.5, 600))}
    kernel = infer.SGLD(regression, 1e-6, warm_start=0.75, **options)
    far = {"w": jnp.full((20, P), 30.0)}
    _, state, _ = run(kernel, 20, 8, 1, start=far)
    kernel_sd = np.sqrt(np.diag(np.linalg.inv(HESSIAN)))
    assert np.abs((np.asarray(state.z["w"]) - MEAN) / kernel_sd).mean() < 2
    assert (state.num_gradients == 100 * 9 + 3 * 128).all()  # the noise is measured three times
    np.testing.assert_array_equal(state.engine.step, 100 * 3)  # the schedule counts from the end of the warm start


def test_cyclical_keeps_draws_of_the_sampling_phase_only():
    """With a warm-up that ends in the middle of a cycle."""
    warmup = 2
    length, kept, explore = 21, 3, 0.4
    kernel = infer.CyclicalSGLD(regression, EPS, cycle_length=length, draws_per_cycle=kept, explore=explore)
    _, state, steps = run(kernel, 2, warmup, 9 - warmup)
    schedule = sgmcmc.schedules.cyclical(EPS, 3 * length, 3, explore)
    np.testing.assert_array_equal(steps[:, 0], [13, 17, 21, 34, 38, 42, 55, 59, 63][warmup:])
    assert all(schedule.collects(step - 1) for step in steps.ravel())
    assert (state.num_gradients == 63 + 3 * 128).all()  # those of exploration were spent too, and those of the noise
    assert (state.engine.num_warmup == 17).all()
    np.testing.assert_allclose(state.step_size, schedule(62), rtol=1e-5)


@pytest.mark.slow
def test_fixed_preconditioner_pays_on_an_ill_conditioned_target():
    """Condition number 10^4. ESS per step of the slowest coordinate, from the variance of means of stationary chains.

    Theory: (1 - rho) / (1 + rho), rho = 1 - eps lam / 2: 2.5e-5 for SGLD and 1/3 with G. Within 2000 steps SGLD's
    cannot come out below 1/2000, so that the measured ratio is a lower bound.
    """
    variances, steps, num_chains = np.array([1.0, 1e-4]), 2000, 200
    start = np.sqrt(variances) * np.random.default_rng(3).normal(size=(num_chains, 2))

    def gaussian():
        numpyro.sample("w", dist.Normal(0.0, np.sqrt(variances)).to_event(1))

    def slowest(kernel):
        begin = {"w": jnp.asarray(start, jnp.float32)}
        draws, _, _ = run(kernel, num_chains, 0, steps, (), {}, start=begin)
        return (variances / (steps * draws["w"].mean(0).var(0))).min()

    options = {"steps_per_draw": 1, "warm_start": 0.0}
    plain = slowest(infer.SGLD(gaussian, 1e-4, **options))  # eps lam / 2 = 1/2 in the stiff direction
    fixed = slowest(infer.PSGLD(gaussian, 1.0, preconditioner={"w": variances}, **options))
    print(f"ESS per step: SGLD {plain:.2g}, PSGLD {fixed:.2g}, ratio {fixed / plain:.0f}")
    assert fixed > 50 * plain


# -- simulation-based calibration -------------------------------------------------------------------


def location_scale(y, batch_size=None):
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    sigma = numpyro.sample("sigma", dist.LogNormal(0.0, 0.25))
    with numpyro.plate("data", 20, subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(mu, sigma), obs=y[i])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "batch_size"),
    [
        (infer.MALA(location_scale, 0.02, steps_per_draw=40, warm_start=0.0), None),
        (infer.GHMC(location_scale, 0.05, num_steps=4, momentum_decay=0.5, steps_per_draw=8, warm_start=0.0), None),
        (infer.GGMC(location_scale, 4e-3, num_steps=3, steps_per_draw=30, warm_start=0.0), 10),
    ],
    ids=["MALA", "GHMC", "GGMC"],
)
def test_simulation_based_calibration(kernel, batch_size):
    """Ranks of prior draws among 15 posterior draws, 1000 data sets; chi-squared tests at 1e-4 each (two sites)."""
    replications, draws = 1000, 15
    rng = np.random.default_rng(4)
    true = {"mu": rng.normal(size=replications), "sigma": np.exp(0.25 * rng.normal(size=replications))}
    data = true["mu"][:, None] + true["sigma"][:, None] * rng.normal(size=(replications, 20))

    def posterior(key, y, z):
        # Started at the truth, which is a draw of the posterior: what is tested is that the kernel keeps it one.
        call = ((y,), {"batch_size": batch_size})
        state = kernel.init(key, 0, z, *call)

        def transition(state, _):
            state = kernel.sample(state, *call)
            return state, (state.z, state.accept_prob)

        return lax.scan(transition, state, None, 15 + draws)[1]

    keys = jax.random.split(jax.random.key(0), replications)
    log_sigma = jnp.asarray(np.log(true["sigma"]), jnp.float32)
    z, accept = jax.jit(jax.vmap(posterior))(
        keys, jnp.asarray(data, jnp.float32), {"mu": jnp.asarray(true["mu"], jnp.float32), "sigma": log_sigma}
    )
    assert 0.4 < accept.mean() < 0.95
    values = {"mu": np.asarray(z["mu"]), "sigma": np.exp(np.asarray(z["sigma"]))}
    for name, samples in values.items():
        ranks = (samples[:, -draws:] < true[name][:, None]).sum(1)
        counts = np.bincount(ranks, minlength=draws + 1)
        assert stats.chisquare(counts).pvalue > 1e-4, (name, counts)
        print(f"{type(kernel).__name__} {name}: p = {stats.chisquare(counts).pvalue:.3f}")
        # A test that could not fail would pass a posterior that is 25 % too narrow as well.
        center = samples[:, -draws:].mean(1, keepdims=True)
        narrow = ((center + 0.75 * (samples[:, -draws:] - center)) < true[name][:, None]).sum(1)
        assert stats.chisquare(np.bincount(narrow, minlength=draws + 1)).pvalue < 1e-4


# -- a Bayesian neural network ----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.optimized
def test_predictions_of_a_network_agree_with_long_nuts_runs():
    """1 x 10 tanh network, N = 200. SGLD on control variates, SGHMC and GGMC on all the data: gradient noise
    would need steps ten times as small for the same bias."""
    rng = np.random.default_rng(5)
    x = np.sort(rng.uniform(-2, 2, 200))[:, None].astype(np.float32)
    y = (np.sin(2 * x[:, 0]) + 0.3 * rng.normal(size=200)).astype(np.float32)
    grid = jnp.linspace(-2.2, 2.2, 23)[:, None]
    net = nn.MLP([10, 1], "tanh")
    model = models.regression(net, noise=0.3)

    @jax.jit
    def functions(sites):
        flat = jax.tree.map(lambda v: v.reshape(-1, *v.shape[2:]), sites)
        params = {name.removeprefix("net/"): value for name, value in flat.items()}
        return jax.vmap(lambda p: net.apply(p, grid)[:, 0])(params)

    def moments(f, num_chains):
        by_chain = np.asarray(f).reshape(num_chains, -1, grid.shape[0])
        return by_chain.mean((0, 1)), by_chain.std((0, 1)), by_chain.mean(1).std(0) / num_chains**0.5

    nuts = MCMC(
        NUTS(model, max_tree_depth=7),
        num_warmup=300,
        num_samples=600,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    nuts.run(jax.random.key(0), x, y)
    mean, sd, error = moments(functions(nuts.get_samples(group_by_chain=True)), 4)
    predictive = np.sqrt(sd**2 + 0.3**2)
    options = {"steps_per_draw": 400, "warm_start": 0.5}
    kernels = {
        "SGLD": (infer.SGLD(model, 1e-4, gradient="control_variates", **options), {"batch_size": 50}),
        "SGHMC": (infer.SGHMC(model, 1e-4, **options), {}),
        "GGMC": (infer.GGMC(model, 2e-4, steps_per_draw=20), {}),
    }
    for name, (kernel, kwargs) in kernels.items():
        draws, _, _ = run(kernel, 12, 16, 60, (jnp.asarray(x), jnp.asarray(y)), kwargs)
        f = functions({k: jnp.asarray(np.swapaxes(v, 0, 1), jnp.float32) for k, v in draws.items()})
        found, spread, mcse = moments(f, 12)
        ratio = np.sqrt(spread**2 + 0.3**2) / predictive
        print(
            f"{name}: mean off by at most {np.max(np.abs(found - mean) / predictive):.3f} predictive sd,"
            f" predictive sd ratio {ratio.min():.3f} to {ratio.max():.3f}, sd of f {(spread / sd).mean():.3f}"
        )
        assert np.all(np.abs(found - mean) < 0.05 * predictive + 4 * np.hypot(error, mcse))
        assert np.all(np.abs(ratio - 1) < 0.05)


# ------------------------------------------------------------------------------------ local latent variables


@pytest.mark.slow
@pytest.mark.parametrize("kind", [infer.SGLD, infer.SGHMC, infer.SGNHT, infer.MCLMC])
def test_effects_of_groups_outside_the_subsampled_plate(kind):
    """Forty local variables with five rows each, declared at full size and indexed: the exact Gaussian posterior.

    The tolerated bias of 0.05 makes variances too large, sds by at most .025; the rest are Monte Carlo errors: a
    chain forgets in about a pass over the data, so 8 chains of 300 draws have some 500 effective draws of an effect.
    """
    rng, groups, rows = np.random.default_rng(3), 40, 200
    x, group = rng.normal(size=rows), np.arange(rows) % 40
    y = 0.7 * x + rng.normal(size=groups)[group] + SIGMA * rng.normal(size=rows)

    def model(x, group, y, batch_size=None):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        with numpyro.plate("groups", groups):
            effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", rows, subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(w * x[i] + effect[group[i]], SIGMA), obs=y[i])

    design = np.c_[x, np.eye(groups)[group]]
    covariance = np.linalg.inv(np.eye(groups + 1) + design.T @ design / SIGMA**2)
    mean, sd = covariance @ design.T @ y / SIGMA**2, np.sqrt(np.diag(covariance))
    args = tuple(jnp.asarray(part) for part in (x, group, y))
    z, _, _ = run(kind(model, steps_per_draw=50), 8, 150, 300, args, {"batch_size": 20})
    draws = np.concatenate([z["w"][..., None], z["effect"]], -1)
    errors = (draws.mean((0, 1)) - mean) / sd
    ratios = draws.std((0, 1)) / sd
    assert np.abs(errors).max() < 0.35
    assert np.sqrt(np.mean(errors**2)) < 0.15
    assert 0.97 < ratios[1:].mean() < 1.06
    assert 0.93 < ratios[0] < 1.1
