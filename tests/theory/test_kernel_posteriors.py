"""Posteriors of the kernels against exact ones: conjugate regression, theory of the
bias, temperatures.

Linear-Gaussian problems are solved exactly, step by step, for every finite step size
(`overdamped`, `underdamped` below), so biased kernels are held to their bias and not to
a tolerance. Bands of 4 standard errors over independent chains fail with probability
6e-5 each; seeds are fixed.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from helpers import each, mala, refused, walk
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoGuide
from scipy import stats
from zoo import BATCH, NOISE, ZOO, N, X, Y

from numpyro_bnn import guides, infer, sgmcmc

LINE, P = ZOO["line"], 2

# The posterior at T = 1 is N(MEAN, inv(HESSIAN)).
INPUTS, TARGETS = X.astype(float), Y.astype(float)
CURVATURES = INPUTS[:, :, None] * INPUTS[:, None, :] / NOISE**2
HESSIAN = np.eye(P) + CURVATURES.sum(0)
T = 0.5  # not 1: a temperature that is forgotten somewhere shows
MEAN = np.linalg.solve(HESSIAN, INPUTS.T @ TARGETS / NOISE**2)
SLOPES = -INPUTS * (TARGETS - INPUTS @ MEAN)[:, None] / NOISE**2


# -- exact second moments of minibatch Langevin dynamics on a quadratic ----------------


def gradient_noise(position):
    """Covariance of the minibatch gradient for a position of this covariance."""
    mean = CURVATURES.mean(0)
    curvature = (
        np.einsum("nij,jk,nlk->il", CURVATURES, position, CURVATURES) / N
        - mean @ position @ mean
    )
    return N**2 / BATCH * (curvature + np.cov(SLOPES.T, bias=True))


def overdamped(schedule, steps, preconditioner=1.0):
    """Covariance of the position after each step of SGLD from MEAN, (steps, P, P)."""
    cov, path, g = np.zeros((P, P)), [], np.broadcast_to(preconditioner, P)
    for t in range(steps):
        eps = float(schedule(t))
        drift = np.eye(P) - eps / 2 * g[:, None] * HESSIAN
        kick = g[:, None] * gradient_noise(cov) * g
        cov = drift @ cov @ drift.T + eps**2 / 4 * kick + eps * T * np.diag(g)
        path.append(cov)
    return np.array(path)


def underdamped(eps, decay, steps):
    """Covariance after many steps of SGHMC, which share gradients."""
    h, eye, zero = eps**0.5, np.eye(P), np.zeros((P, P))
    a = 1 - decay
    noise = (1 - a**2) * T
    kick = np.block([[eye, zero, zero], [zero, eye, -h / 2 * eye]])
    cov = np.zeros((3 * P, 3 * P))  # of (position, momentum, gradient)
    cov[P : 2 * P, P : 2 * P] = T * eye
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


def exact(steps):
    return T * np.linalg.inv(HESSIAN)[None]


EPS, CHAINS = 1e-3, 500
DIAGONAL = np.array([2.0, 0.5])
SHORT = {"warm_start": 0.0}
LONG = {"warm_start": 0.0, "steps_per_draw": 50}
# Kernel, its options, and exact covariances (draws, P, P) of the draws after (draws,)
# steps.
LINEAR = {
    "SGLD": (
        infer.SGLD,
        {"step_size": EPS, **LONG},
        lambda steps: overdamped(lambda s: EPS, steps[-1])[steps - 1],
    ),
    "CyclicalSGLD": (
        infer.CyclicalSGLD,
        {
            "step_size": 3 * EPS,
            "cycle_length": 120,
            "draws_per_cycle": 2,
            "explore": 0.5,
        },
        lambda steps: overdamped(sgmcmc.schedules.cyclical(3 * EPS, 120, 1), steps[-1])[
            steps - 1
        ],
    ),
    "PSGLD": (
        infer.PSGLD,
        {"step_size": EPS, "preconditioner": DIAGONAL, **LONG},
        lambda steps: overdamped(lambda s: EPS, steps[-1], DIAGONAL)[steps - 1],
    ),
    "SGHMC": (
        infer.SGHMC,
        {"step_size": 3e-4, "momentum_decay": 0.3, **LONG},
        lambda steps: underdamped(3e-4, 0.3, steps[-1])[None],
    ),
    "GHMC": (
        infer.GHMC,
        {
            "step_size": 1.2e-2,
            "num_steps": 4,
            "momentum_decay": 0.5,
            "steps_per_draw": 8,
            **SHORT,
        },
        exact,
    ),
}
FAST = ("SGLD",)  # an exact kernel is next, at another temperature


@each("name", LINEAR, fast=FAST)
def test_conjugate_regression_with_minibatches(name):
    """Mean and mean squares of all draws over the exact ones, chain by chain."""
    kind, options, theory = LINEAR[name]
    kernel, warmup = kind(LINE.model, temperature=T, **options), 6
    start = {"w": jnp.broadcast_to(jnp.asarray(MEAN, jnp.float32), (CHAINS, P))}
    state, (w, step) = walk(
        kernel,
        warmup + 8,
        LINE.args,
        {"batch_size": BATCH},
        start=start,
        warmup=warmup,
        chains=CHAINS,
        keep=lambda state: (state.z["w"], state.engine.step),
    )
    assert not np.any(state.diverging)
    covariances = theory(step[warmup:, 0])
    sd = np.sqrt(np.diagonal(covariances, axis1=1, axis2=2))[:, None]
    standard = (np.asarray(w[warmup:], float) - MEAN) / sd
    for power, expected in ((1, 0.0), (2, 1.0)):
        by_chain = (standard**power).mean((0, 2))
        error = by_chain.std() / CHAINS**0.5
        assert abs(by_chain.mean() - expected) < 4 * error, (
            power,
            by_chain.mean(),
            error,
        )
        assert error < 0.04
    bias = np.trace(HESSIAN @ covariances[-1]) / P / T - 1
    if kernel.exact:
        assert 0.3 < state.accept_prob.mean() < 0.97
    else:
        assert bias > 0.05  # or the test would not see that the bias is as it should be


# -- temperature -----------------------------------------------------------------------


@pytest.mark.parametrize(("size", "level"), [(3, 0.95), (500, 0.5)])
def test_temperature_band_is_the_one_of_chi_squared(size, level):
    exact = 0.5 * stats.chi2.ppf([0.5 - level / 2, 0.5 + level / 2], size) / size
    # Wilson and Hilferty's cube root is good to about 0.02 / P on this scale.
    np.testing.assert_allclose(
        infer.temperature_band(size, 0.5, level), exact, atol=0.05 / size
    )


@pytest.mark.optimized
def test_a_positive_site_at_another_temperature():
    """Mean and variance of its log by quadrature; the acceptance of MALA."""
    observed, temperature = np.array([1.5, -2.5]), 0.4

    def model():
        s = numpyro.sample("s", dist.Gamma(0.5, 1.0))
        with numpyro.plate("data", 2):
            numpyro.sample("y", dist.Normal(0.0, s), obs=jnp.asarray(observed))

    z = np.linspace(-12, 8, 50_001)
    s = np.exp(z)
    log_joint = stats.gamma(0.5).logpdf(s) + stats.norm(0.0, s[:, None]).logpdf(
        observed
    ).sum(1)
    weight = np.exp((log_joint - log_joint.max()) / temperature + z)
    weight /= weight.sum()
    mean = (weight * z).sum()
    sd = (weight * (z - mean) ** 2).sum() ** 0.5

    kernel = mala(model, temperature=temperature, steps_per_draw=10)
    keep = {"keep": lambda state: (state.z["s"], state.accept_prob)}
    _, (log_s, accepted) = walk(kernel, 1100, warmup=300, chains=5, **keep)
    found = (np.asarray(log_s[300:].T, float) - mean) / sd
    for quantity, exact in ((found, 0.0), (found**2, 1.0)):
        error = (quantity.var() / effective_sample_size(quantity)) ** 0.5
        assert abs(quantity.mean() - exact) < 5 * error
    assert abs(accepted[300:].mean() - kernel.target_accept_prob) < 0.05


# -- likelihoods that are random themselves --------------------------------------------

PARTICLE_SD = 1.5


def by_particles(y, batch_size=None):
    """Noise of variance 1 + PARTICLE_SD^2, a part of which is one draw."""
    w = numpyro.sample("w", dist.Normal())
    with numpyro.plate("data", len(y), subsample_size=batch_size) as i:
        particle = PARTICLE_SD * jax.random.normal(numpyro.prng_key(), y[i].shape)
        numpyro.sample("y", dist.Normal(w + particle, 1.0), obs=y[i])


@pytest.mark.slow
def test_unbiased_likelihoods_have_the_bias_of_their_logarithm():
    """By Jensen's inequality: the posterior of noise of variance 1."""
    y = jnp.asarray(Y[:12] + 2.0)
    mean = float(y.sum() / (1 + len(y)))
    exact = float(y.sum() / (1 + PARTICLE_SD**2 + len(y)))
    options = {"steps_per_draw": 20, "warm_start": 0.0, "preconditioner": "identity"}
    kernel = infer.SGLD(by_particles, 5e-3, **options)
    given = {"batch_size": 4}
    chains = walk(kernel, 420, (y,), given, chains=8)[1]["w"][20:].mean(0)
    error = chains.std(ddof=1) / len(chains) ** 0.5
    assert abs(chains.mean() - mean) < 4 * error < abs(mean - exact) / 2
    guide = guides.AutoMeanField(by_particles)
    optimizer = optax.adam(optax.cosine_decay_schedule(0.01, 3000))
    svi, ends = SVI(by_particles, guide, optimizer, Trace_ELBO()), []
    for seed in range(6):
        key, given = jax.random.key(seed), {"progress_bar": False, **given}
        params = guides.fit(svi, key, 3000, y, **given).params
        ends.append(float(guide.median(params)["w"]))
    error = np.std(ends, ddof=1) / len(ends) ** 0.5
    assert abs(np.mean(ends) - mean) < 5 * error < abs(mean - exact) / 2


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (infer.GHMC, "model"),
        (infer.MCLMC, "model"),
        (partial(infer.SGLD, gradient="control_variates"), "model"),
        (lambda model: infer.UnitMoves(NUTS(model), {"w": 0}), "kernel"),
        (lambda model: infer.UnitMoves(infer.SGLD(model), {"w": 0}), "kernel"),
        (lambda model: infer.ParallelTempering(NUTS(model)), "kernel"),
        (guides.AutoLaplace, "model"),
        (guides.AutoADF, "model"),
    ],
)
def test_exact_methods_refuse_random_likelihoods(make, argument):
    method, args = make(by_particles), (jnp.asarray(Y[:12]),)
    with refused(argument, "random numbers of its own"):
        if isinstance(method, AutoGuide):
            method.run(jax.random.key(0), *args, progress_bar=False)
        else:
            method.init(jax.random.key(0), 1, None, args, {})
