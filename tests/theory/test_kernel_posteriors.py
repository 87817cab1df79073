"""Posteriors of the kernels against exact ones: conjugate regression, theory of the bias, temperatures.

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
from helpers import walk
from numpyro import handlers
from numpyro.diagnostics import effective_sample_size
from scipy import stats
from zoo import BATCH, NOISE, ZOO, N, X, Y

from numpyro_bnn import infer, sgmcmc

LINE, BATCHES, P = ZOO["line"], {"batch_size": BATCH}, 2

# The posterior at T = 1 is N(MEAN, inv(HESSIAN)).
INPUTS, TARGETS = X.astype(float), Y.astype(float)
CURVATURES = INPUTS[:, :, None] * INPUTS[:, None, :] / NOISE**2
HESSIAN = np.eye(P) + CURVATURES.sum(0)
MEAN = np.linalg.solve(HESSIAN, INPUTS.T @ TARGETS / NOISE**2)
SLOPES = -INPUTS * (TARGETS - INPUTS @ MEAN)[:, None] / NOISE**2


def at_mean(num_chains):
    return {"w": jnp.broadcast_to(jnp.asarray(MEAN, jnp.float32), (num_chains, P))}


def run(kernel, num_chains, warmup, draws, start=None):
    """Draws of w (draws, C, P), the last state, and the engine's step after each draw."""
    options = {"start": start, "warmup": warmup, "chains": num_chains}
    options["keep"] = lambda state: (state.z["w"], state.engine.step)
    state, (w, step) = walk(kernel, warmup + draws, LINE.args, BATCHES, **options)
    assert not np.any(state.diverging)
    return np.asarray(w[warmup:], float), state, step[warmup:]


# -- exact second moments of minibatch Langevin dynamics on a quadratic -----------------------------


def gradient_noise(position):
    """Covariance of the minibatch gradient when the position has mean MEAN and this covariance."""
    mean = CURVATURES.mean(0)
    curvature = np.einsum("nij,jk,nlk->il", CURVATURES, position, CURVATURES) / N - mean @ position @ mean
    return N**2 / BATCH * (curvature + np.cov(SLOPES.T, bias=True))


def overdamped(schedule, temperature, steps, preconditioner=1.0):
    """Covariance of the position after each step of SGLD from MEAN, (steps, P, P)."""
    cov, path, g = np.zeros((P, P)), [], np.broadcast_to(preconditioner, P)
    for t in range(steps):
        eps = float(schedule(t))
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
    half = np.block([[eye, h / 2 * eye], [zero, eye]])
    move = half @ np.kron(np.diag([1, a]), eye) @ half @ kick
    source = np.kron(np.outer([h / 2, 1], [h / 2, 1]), eye) * noise
    full = np.block([[eye, zero], [zero, eye], [HESSIAN, zero]])
    end = np.block([[eye, zero, zero], [zero, eye, -h / 2 * eye], [zero, zero, eye]])
    for _ in range(steps):
        cov = move @ cov @ move.T + source
        new = full @ cov @ full.T
        new[2 * P :, 2 * P :] += gradient_noise(cov[:P, :P])
        cov = end @ new @ end.T
    return cov[:P, :P]


EPS, CHAINS = 1e-3, 500
DIAGONAL = np.array([2.0, 0.5])
FIXED = {"steps_per_draw": 50, "warm_start": 0.0}


def decreasing():
    return infer.schedules.polynomial(6e-3, 20.0, 0.7)


# name: kernel(temperature), exact covariances (draws, P, P) of the draws for (temperature, steps (draws,)).
LINEAR = {
    "SGLD": (
        lambda t: infer.SGLD(LINE.model, EPS, temperature=t, **FIXED),
        lambda t, steps: overdamped(lambda s: EPS, t, steps[-1])[steps - 1],
    ),
    "SGLD with decreasing steps": (
        lambda t: infer.SGLD(LINE.model, decreasing(), temperature=t, **FIXED),
        lambda t, steps: overdamped(decreasing(), t, steps[-1])[steps - 1],
    ),
    "CyclicalSGLD": (
        lambda t: infer.CyclicalSGLD(
            LINE.model, 3 * EPS, temperature=t, cycle_length=120, draws_per_cycle=2, explore=0.5
        ),
        lambda t, steps: overdamped(sgmcmc.schedules.cyclical(3 * EPS, 120, 1), t, steps[-1])[steps - 1],
    ),
    "PSGLD": (
        lambda t: infer.PSGLD(LINE.model, EPS, temperature=t, preconditioner=DIAGONAL, **FIXED),
        lambda t, steps: overdamped(lambda s: EPS, t, steps[-1], DIAGONAL)[steps - 1],
    ),
    "SGHMC": (
        lambda t: infer.SGHMC(LINE.model, 3e-4, momentum_decay=0.3, temperature=t, **FIXED),
        lambda t, steps: underdamped(3e-4, 0.3, t, steps[-1])[None],
    ),
    "MALA": (
        lambda t: infer.MALA(LINE.model, 1e-2, temperature=t, steps_per_draw=15, warm_start=0.0),
        lambda t, steps: t * np.linalg.inv(HESSIAN)[None],
    ),
    "GHMC": (
        lambda t: infer.GHMC(
            LINE.model, 1.2e-2, num_steps=4, momentum_decay=0.5, temperature=t, steps_per_draw=8, warm_start=0.0
        ),
        lambda t, steps: t * np.linalg.inv(HESSIAN)[None],
    ),
    "GGMC": (
        lambda t: infer.GGMC(LINE.model, 2e-4, num_steps=3, temperature=t, steps_per_draw=20, warm_start=0.0),
        lambda t, steps: t * np.linalg.inv(HESSIAN)[None],
    ),
}
# A biased and an exact kernel, tempered and not; the others are slow.
FAST = {("SGLD", 1.0), ("MALA", 0.5)}


def assert_moments(draws, covariances):
    """Mean and mean squares of all draws, standardized by the exact ones, chain by chain."""
    sd = np.sqrt(np.diagonal(covariances, axis1=1, axis2=2))[:, None]
    standard = (draws - MEAN) / sd
    for power, expected in ((1, 0.0), (2, 1.0)):
        by_chain = (standard**power).mean((0, 2))
        error = by_chain.std() / len(by_chain) ** 0.5
        assert abs(by_chain.mean() - expected) < 4 * error, (power, by_chain.mean(), error)
        assert error < 0.04


@pytest.mark.parametrize(
    ("name", "temperature"),
    [
        pytest.param(name, t, marks=[] if (name, t) in FAST else [pytest.mark.slow])
        for name in LINEAR
        for t in (1.0, 0.5)
        if t < 1 or "decreasing" not in name
    ],
)
def test_conjugate_regression_with_minibatches(name, temperature):
    make, theory = LINEAR[name]
    kernel = make(temperature)
    draws, state, steps = run(kernel, CHAINS, 6, 8, start=at_mean(CHAINS))
    covariances = theory(temperature, steps[:, 0])
    assert_moments(draws, covariances)
    bias = np.trace(HESSIAN @ covariances[-1]) / P / temperature - 1
    if kernel.exact:
        assert 0.3 < state.accept_prob.mean() < 0.97
    elif "decreasing" not in name:
        assert bias > 0.05  # or the test would not see that the bias is as it should be


# -- minibatch potentials ---------------------------------------------------------------------------


def scoped(x, y, size):
    with handlers.scope(prefix="a"):
        w = numpyro.sample("w", dist.Normal(0.0, 0.1).expand([P]).to_event(1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(0.3))
        with numpyro.plate("data", N, subsample_size=size) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w, sigma), obs=y[i])


def parallel(x, y, size):
    w = numpyro.sample("w", dist.Normal(0.0, 0.1))
    with numpyro.plate("first", N, subsample_size=size) as i:
        numpyro.sample("y", dist.StudentT(3.0, w, 1.0), obs=y[i])
    with numpyro.plate("second", N // 2, subsample_size=None if size is None else size // 2) as j:
        numpyro.sample("v", dist.StudentT(3.0, w, 2.0), obs=x[j, 0])


@pytest.mark.slow
@pytest.mark.parametrize("model", [scoped, parallel])
def test_minibatch_gradients_average_to_the_full_gradient(model, x64):
    """An epoch of tiny steps moves as far as as many steps on all the data, with a prior as strong as the likelihood:
    were it scaled too, the average would be far off."""
    args = jnp.asarray(X, float), jnp.asarray(Y, float)

    def moved(size):
        options = {"temperature": 0.0, "steps_per_draw": N // BATCH, "warm_start": 0.0, "minibatches": "epochs"}
        kernel = infer.SGLD(model, 1e-9, **options)
        before = kernel.init(jax.random.key(0), 0, None, (*args, size), {}).z
        after = walk(kernel, 1, (*args, size))[0].z
        return {name: 1e9 * (after[name] - before[name]) for name in before}

    found, expected = moved(BATCH), moved(None)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5)


# -- limits, stages ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", [infer.SGLD, infer.SGHMC])
def test_zero_temperature_finds_the_mode_of_the_constrained_density(kind):
    """Of Gamma(3, 2) that is 1, and not 3 / 2, the mode of its logarithm."""

    def model(x, y):
        LINE.model(x, y)
        numpyro.sample("s", dist.Gamma(3.0, 2.0))

    sampler = kind(model, 5e-3, temperature=0.0, steps_per_draw=3000, warm_start=0.0)
    start = {"w": jnp.full(P, 30.0), "s": jnp.array(1.0)}
    state, _ = walk(sampler, 2, LINE.args, start=start)
    np.testing.assert_allclose(state.z["w"], MEAN, atol=1e-4)
    np.testing.assert_allclose(state.z["s"], 0.0, atol=1e-2)


@pytest.mark.slow
def test_cyclical_keeps_draws_of_the_sampling_phase_only():
    """With a warm-up that ends in the middle of a cycle."""
    warmup, length, kept, explore = 2, 21, 3, 0.4
    kernel = infer.CyclicalSGLD(LINE.model, EPS, cycle_length=length, draws_per_cycle=kept, explore=explore)
    _, state, steps = run(kernel, 2, warmup, 9 - warmup)
    schedule = sgmcmc.schedules.cyclical(EPS, 3 * length, 3, explore)
    np.testing.assert_array_equal(steps[:, 0], [13, 17, 21, 34, 38, 42, 55, 59, 63][warmup:])
    assert all(schedule.collects(step - 1) for step in steps.ravel())
    assert (state.num_gradients == 63 + 3 * 128).all()  # those of exploration were spent too, and those of the noise
    assert (state.engine.num_warmup == 17).all()
    np.testing.assert_allclose(state.step_size, schedule(62), rtol=1e-5)


# -- temperature ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, 20, 500, 10_000])
@pytest.mark.parametrize("level", [0.5, 0.95])
def test_temperature_band_is_the_one_of_chi_squared(size, level):
    exact = 0.5 * stats.chi2.ppf([0.5 - level / 2, 0.5 + level / 2], size) / size
    # Wilson and Hilferty's cube root is good to about 0.02 / P on this scale.
    np.testing.assert_allclose(infer.temperature_band(size, 0.5, level), exact, atol=0.05 / size)


ON, WEIGHTS = np.array([True, False, True]), np.array([0.2, 1.0, 3.0])


def handled(by_hand):
    """Positive and bounded sites under handlers, or with the densities that these leave written out."""

    def draw(name, fn, weight, handler):
        if not by_hand:
            with handler:
                return numpyro.sample(name, fn)
        value = numpyro.sample(name, dist.ImproperUniform(fn.support, fn.batch_shape, fn.event_shape))
        numpyro.factor(f"{name}_density", jnp.where(weight > 0, weight * fn.log_prob(value), 0.0).sum())
        return value

    def model():
        gamma, bounded = dist.Gamma(0.5, 1.0), dist.Uniform(-1.0, 2.0)
        s = draw("scaled", gamma, jnp.array(0.3), handlers.scale(scale=0.3))
        draw("masked", gamma, jnp.array(0.0), handlers.mask(mask=False))
        with handlers.mask(mask=jnp.array(True)):
            draw("both", gamma, jnp.array(3.0), handlers.scale(scale=3.0))
        with numpyro.plate("groups", 3):
            u = draw("elements", bounded, jnp.asarray(1.0 * ON), handlers.mask(mask=jnp.asarray(ON)))
            v = draw("weights", bounded, jnp.asarray(WEIGHTS), handlers.scale(scale=jnp.asarray(WEIGHTS)))
        numpyro.factor("likelihood", dist.Normal((u * v).sum(), s).log_prob(1.5))

    return handlers.scope(model, prefix="net")


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_handlers_scale_and_mask_densities_but_no_jacobian(temperature):
    """As densities of constrained values do not depend on how their sites are transformed: chains move alike."""
    shapes = {"scaled": (), "masked": (), "both": (), "elements": (3,), "weights": (3,)}
    start = {f"net/{name}": jnp.full(shape, 0.5) for name, shape in shapes.items()}

    def moved(model):
        kernel = infer.SGLD(model, 0.05, temperature=temperature, steps_per_draw=1, warm_start=0.0)
        return walk(kernel, 3, start=start)[1]

    found, expected = moved(handled(False)), moved(handled(True))
    assert found.keys() == start.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.optimized
@pytest.mark.parametrize("temperature", [0.4, pytest.param(3.0, marks=pytest.mark.slow)])
def test_a_positive_site_at_another_temperature(temperature):
    """Mean and variance of its log, by quadrature, within 5 MCSE: failure rate 6e-7 each; the acceptance of MALA."""
    observed = np.array([1.5, -2.5])

    def model():
        s = numpyro.sample("s", dist.Gamma(0.5, 1.0))
        with numpyro.plate("data", 2):
            numpyro.sample("y", dist.Normal(0.0, s), obs=jnp.asarray(observed))

    z = np.linspace(-12, 8, 50_001)
    s = np.exp(z)
    log_joint = stats.gamma(0.5).logpdf(s) + stats.norm(0.0, s[:, None]).logpdf(observed).sum(1)
    weight = np.exp((log_joint - log_joint.max()) / temperature + z)
    weight /= weight.sum()
    mean = (weight * z).sum()
    sd = (weight * (z - mean) ** 2).sum() ** 0.5

    kernel = infer.MALA(model, temperature=temperature, steps_per_draw=10)
    keep = {"keep": lambda state: (state.z["s"], state.accept_prob)}
    _, (log_s, accepted) = walk(kernel, 1100, warmup=300, chains=5, **keep)
    found = (np.asarray(log_s[300:].T, float) - mean) / sd
    for quantity, exact in ((found, 0.0), (found**2, 1.0)):
        error = (quantity.var() / effective_sample_size(quantity)) ** 0.5
        assert abs(quantity.mean() - exact) < 5 * error
    assert abs(accepted[300:].mean() - kernel.target_accept_prob) < 0.05
