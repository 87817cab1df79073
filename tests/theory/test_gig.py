"""Draws of generalized inverse Gaussian variances, of every order: distribution,
digits, extremes, broken numbers.

A variance t with prior Gamma(p + n/2, a/2), and a normal weight sqrt(b/n) of that
variance that counts n times, has the conditional density t^(p - 1) exp(-(a t + b / t) /
2).
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro import handlers
from numpyro.infer.gibbs import GIBBS_SITES_KWARG
from scipy import stats

from numpyro_bnn import infer

ORDERS = (-200.0, -37.5, -3.0, -0.5, 0.0, 0.5, 2.5, 18.0, 200.0)
ROOTS = (1e-6, 1e-3, 0.1, 1.0, 30.0, 1e4)
GRID = [(p, w) for p in ORDERS for w in ROOTS]
RATIO = 7.0  # a / b: a = 7 w, b = w / 7
DRAWS = 5_000
# Tests fail a correct sampler with probability at most 1e-4 each, shared by its
# comparisons (Bonferroni).
FAILURE = 1e-4


def log_draws(p, a, b, prior=dist.Gamma):
    """(S, points) log t, each from one sweep of PrecisionGibbs; points are repeated up
    to those of the grid.

    :param prior: a Gamma or, for a = 0 and p < 0, an inverse Gamma distribution.
    """
    p, a, b = (np.resize(np.asarray(v, float), len(GRID)) for v in (p, a, b))
    if prior is dist.Gamma:
        count = np.maximum(1.0, 1.0 - 2 * p)
        concentration, rate, weights = p + count / 2, a / 2, np.sqrt(b / count)
    else:
        count = np.full_like(p, 0.01)
        concentration, rate, weights = -p - count / 2, b / 2, np.zeros_like(p)

    def model(concentration, rate, count):
        with numpyro.plate("points", len(GRID)):
            t = numpyro.sample("t", prior(concentration, rate, validate_args=False))
            with handlers.scale(scale=count):
                numpyro.sample("w", dist.Normal(0.0, jnp.sqrt(t)))

    args = tuple(map(jnp.asarray, (concentration, rate, count)))
    held = {GIBBS_SITES_KWARG: {"w": jnp.asarray(weights)}}
    kernel = infer.PrecisionGibbs(model)
    state = kernel.init(random.key(0), 0, None, args, held)
    z = {"t": jnp.ones((DRAWS, len(GRID)), state.z["t"].dtype)}
    keys = random.split(random.key(7), DRAWS)
    # one program for all calls
    after = jax.jit(kernel.sample)(state._replace(z=z, rng_key=keys), args, held)
    return np.asarray(jnp.log(after.z["t"]), float)


class Quadrature:
    """Distribution function of x = log t by the trapezoid rule."""

    def __init__(self, p, a, b):
        root = np.hypot(p, np.sqrt(a * b))
        mode = np.log((p + root) / a) if p > 0 else -np.log((root - p) / b)
        left, right = (
            self._end(lambda y, s=s: self.log_density(mode + s * y, p, a, b))
            for s in (-1, 1)
        )
        self.x = np.linspace(mode - left, mode + right, 20_001)
        log_f = self.log_density(self.x, p, a, b)
        f, step = np.exp(log_f - log_f.max()), self.x[1] - self.x[0]
        steps = 0.5 * (f[1:] + f[:-1]) * step
        self.cdf = np.concatenate([[0.0], np.cumsum(steps)]) / steps.sum()
        self.weight = f * step / steps.sum()

    @staticmethod
    def log_density(x, p, a, b):
        return p * x - 0.5 * (a * np.exp(x) + b * np.exp(-x))

    @staticmethod
    def _end(log_f):
        """Distance from the mode where the density has fallen by exp(-50)."""
        y = 1e-6
        while log_f(y) > log_f(0.0) - 50.0:
            y *= 1.5
        return y

    def __call__(self, x):
        return np.interp(x, self.x, self.cdf)

    def moments(self):
        mean = self.weight @ self.x
        return (
            mean,
            self.weight @ (self.x - mean) ** 2,
            self.weight @ (self.x - mean) ** 4,
        )


def test_draws_have_the_distribution_and_the_moments():
    """Kolmogorov-Smirnov; mean and variance of log t within normal quantiles."""
    p, w = np.array(GRID).T
    x = log_draws(p, RATIO * w, w / RATIO)
    bound = stats.norm.isf(FAILURE / (4 * len(GRID)))
    p_values = []
    for column, order, width in zip(x.T, p, w, strict=True):
        exact = Quadrature(order, RATIO * width, width / RATIO)
        p_values.append(stats.kstest(column, exact).pvalue)
        mean, variance, fourth = exact.moments()
        assert abs(column.mean() - mean) < bound * np.sqrt(variance / DRAWS)
        assert abs(np.mean((column - mean) ** 2) - variance) < bound * np.sqrt(
            (fourth - variance**2) / DRAWS
        )
    assert min(p_values) > FAILURE / len(GRID), GRID[int(np.argmin(p_values))]
    # and all of them together
    assert stats.kstest(p_values, "uniform").pvalue > FAILURE


@pytest.mark.slow
def test_gamma_and_inverse_gamma_limits():
    """b = 0 or a = 0, whose draws from one key are reciprocal."""
    p = np.array([0.5, 1.0, 7.5, 300.0])
    x = log_draws(p, 3.0, 0.0)
    for order, column in zip(p, x.T, strict=False):
        # log of a gamma variable, whose smallest values are no float.
        assert stats.kstest(
            column, stats.loggamma(order, loc=-np.log(1.5)).cdf
        ).pvalue > FAILURE / len(p)
    inverse = log_draws(-p, 0.0, 3.0, prior=dist.InverseGamma)
    np.testing.assert_allclose(inverse, -x, rtol=1e-6, atol=2e-6)


def test_extreme_parameters_stay_finite_and_a_broken_number_stays_alone():
    """Draws end for all: those that are no distribution are NaN, and no others."""
    nan = [
        (1.5, np.nan, 3.0),
        (1.5, 2.0, np.nan),
        (np.nan, 2.0, 3.0),
        (1.5, -2.0, 3.0),
        (1.5, 2.0, np.inf),
    ]
    nan = np.array(
        [*nan, (1.5, 0.0, 3.0), (-1.5, 2.0, 0.0), (0.0, 2.0, 0.0), (0.0, 0.0, 0.0)]
    )
    sizes = [1e-30, 1.0, 1e30]
    extreme = [
        v.ravel() for v in np.meshgrid([-1e6, -40.0, 0.0, 0.5, 1e6], sizes, sizes)
    ]
    x = log_draws(
        *(
            np.append(values, broken)
            for values, broken in zip(extreme, nan.T, strict=True)
        )
    )
    np.testing.assert_array_equal(
        np.isnan(x), np.broadcast_to(np.arange(54) >= 54 - len(nan), x.shape)
    )
