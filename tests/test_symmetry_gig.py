"""Draws of log t for a generalized inverse Gaussian t, against quadrature and closed forms in float64."""

from decimal import Decimal, localcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from numpyro_bnn.symmetry import gig
from numpyro_bnn.symmetry.gig import log_gig

ORDERS = (-200.0, -37.5, -3.0, -0.5, 0.0, 0.5, 2.5, 18.0, 200.0)
ROOTS = (1e-6, 1e-3, 0.1, 1.0, 30.0, 1e4)
GRID = [(p, w) for p in ORDERS for w in ROOTS]
RATIO = 7.0  # a / b: a = 7 w, b = w / 7
DRAWS = 20_000
# Tests below fail a correct sampler with probability at most 1e-4 each, shared by its comparisons (Bonferroni).
FAILURE = 1e-4


def log_density(x, p, a, b):
    """Of x = log t, up to a constant; x (points,)."""
    return p * x - 0.5 * (a * np.exp(x) + b * np.exp(-x))


class Quadrature:
    """Distribution function of x by the trapezoid rule, which is spectrally accurate for so smooth a density."""

    def __init__(self, p, a, b):
        mode = np.log((p + np.hypot(p, np.sqrt(a * b))) / a) if p > 0 else -self._mode_of_inverse(p, a, b)
        left, right = (self._end(lambda y, s=s: log_density(mode + s * y, p, a, b)) for s in (-1, 1))
        self.x = np.linspace(mode - left, mode + right, 20_001)
        log_f = log_density(self.x, p, a, b)
        f = np.exp(log_f - log_f.max())
        step = self.x[1] - self.x[0]
        steps = 0.5 * (f[1:] + f[:-1]) * step
        self.log_total = np.log(steps.sum()) + log_f.max()
        self.cdf = np.concatenate([[0.0], np.cumsum(steps)]) / steps.sum()
        self.weight = f * step / steps.sum()

    @staticmethod
    def _mode_of_inverse(p, a, b):
        return np.log((-p + np.hypot(p, np.sqrt(a * b))) / b)

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
        return mean, self.weight @ (self.x - mean) ** 2, self.weight @ (self.x - mean) ** 4


@pytest.fixture(scope="module")
def distributions():
    return [Quadrature(p, RATIO * w, w / RATIO) for p, w in GRID]


@pytest.fixture(scope="module")
def sampler():
    return jax.jit(log_gig)


@pytest.fixture(scope="module", params=["float32", pytest.param("float64", marks=pytest.mark.slow)])
def draws(request, sampler):
    """(DRAWS, points of the grid)."""
    with jax.enable_x64(request.param == "float64"):
        p, w = (jnp.broadcast_to(jnp.asarray(v), (DRAWS, len(GRID))) for v in zip(*GRID, strict=True))
        x = sampler(jax.random.key(7), p, RATIO * w, w / RATIO)
        assert x.dtype == request.param
        return np.asarray(x, np.float64)


def test_quadrature_agrees_with_bessel_functions_and_scipy(distributions):
    for (p, w), distribution in zip(GRID, distributions, strict=True):
        # Integral of the density: 2 (b / a)^(p/2) K_p(sqrt(ab)), where SciPy's Bessel function does not overflow.
        bessel = np.log(special.kve(p, w)) - w
        if np.isfinite(bessel):
            assert distribution.log_total == pytest.approx(
                np.log(2.0) - p * np.log(RATIO) + bessel, rel=1e-8, abs=1e-8
            )
    distribution = Quadrature(2.5, RATIO * 1.0, 1.0 / RATIO)
    t = np.array([0.2, 0.7, 2.0])
    np.testing.assert_allclose(
        distribution(np.log(t)), stats.geninvgauss.cdf(t, 2.5, 1.0, scale=1.0 / RATIO), atol=1e-6
    )


@pytest.mark.parametrize(("low", "order"), [(2.0, 0.0), (0.0, 3.0), (1.5, 0.7)])
def test_the_density_keeps_its_digits(x64, low, order):
    """f and |f'| in decimal arithmetic with 60 digits, also near 0, where exp(x) - 1 - x cancels."""
    sizes = np.concatenate([np.logspace(-8, 1.6, 60), [0.0999, 0.1, 0.1001, 0.9999, 1.0]])
    points = np.concatenate([-sizes, sizes])
    values, slopes = [], []
    with localcontext(prec=60):
        for x in map(Decimal, points):
            up, down = x.exp(), (-x).exp()
            values.append(Decimal(low) * ((up + down) / 2 - 1) + Decimal(order) * (up - 1 - x))
            slopes.append(abs(Decimal(low) * (up - down) / 2 + Decimal(order) * (up - 1)))
    found = gig._Shape(jnp.asarray(low), jnp.asarray(order)).minus_log_density(jnp.asarray(points))
    for computed, exact in zip(found, (values, slopes), strict=True):  # exact up to rounding
        np.testing.assert_allclose(computed, np.array(exact, float), rtol=1e-13)


def test_draws_have_the_distribution(draws, distributions):
    """Kolmogorov-Smirnov over the grid."""
    p_values = np.array(
        [stats.kstest(x, distribution).pvalue for x, distribution in zip(draws.T, distributions, strict=True)]
    )
    assert p_values.min() > FAILURE / len(GRID), GRID[int(p_values.argmin())]
    # And all of them together: under the distribution they are uniform.
    assert stats.kstest(p_values, "uniform").pvalue > FAILURE


def test_draws_have_the_moments(draws, distributions):
    """Mean and variance of log t within the two-sided normal quantile of FAILURE over all comparisons."""
    bound = stats.norm.isf(FAILURE / (4 * len(GRID)))
    for x, distribution in zip(draws.T, distributions, strict=True):
        mean, variance, fourth = distribution.moments()
        assert abs(x.mean() - mean) < bound * np.sqrt(variance / DRAWS)
        assert abs(np.mean((x - mean) ** 2) - variance) < bound * np.sqrt((fourth - variance**2) / DRAWS)


def test_a_wrong_order_would_be_seen(draws, distributions):
    """The comparison has power: an order off by a tenth is refused at every point where it matters."""
    wrong = [Quadrature(p + 0.1 * (1.0 + abs(p)), RATIO * w, w / RATIO) for p, w in GRID]
    seen = [
        stats.kstest(x, distribution).pvalue < FAILURE / len(GRID)
        for x, distribution in zip(draws.T, wrong, strict=True)
    ]
    # Where sqrt(ab) is large the distribution is nearly that of any small order.
    assert all(s for s, (_, w) in zip(seen, GRID, strict=True) if w < 1.0)


@pytest.mark.parametrize("p", [0.01, 0.5, 1.0, 7.5, 300.0])
def test_gamma_limits(sampler, p):
    """b = 0: t is gamma with shape p and rate a / 2; a = 0 and -p: its inverse. The chi radius is p = d / 2."""
    a, key = jnp.full(DRAWS, 3.0), jax.random.key(3)
    x = np.asarray(sampler(key, p, a, 0.0), np.float64)
    # log of a gamma variable, whose smallest values are no float.
    distribution = stats.loggamma(p, loc=-np.log(1.5))
    assert stats.kstest(x, distribution.cdf).pvalue > FAILURE / 5
    np.testing.assert_array_equal(np.asarray(sampler(key, -p, 0.0, a)), -x.astype(np.float32))


def test_inverse_gaussian_limit(sampler):
    """p = -1/2 is the inverse Gaussian distribution: mean sqrt(b / a), shape b."""
    a, b = 2.0, 3.0
    t = np.exp(np.asarray(sampler(jax.random.key(1), -0.5, jnp.full(DRAWS, a), b), np.float64))
    distribution = stats.invgauss(np.sqrt(b / a) / b, scale=b)
    assert stats.kstest(t, distribution.cdf).pvalue > FAILURE


def test_exchange_and_scaling_are_exact(sampler):
    """1 / t has the distribution (-p, b, a), and c t the distribution (p, a / c, b c)."""
    key, a, b = jax.random.key(2), jnp.full(1000, 2.0), jnp.full(1000, 5.0)
    x = sampler(key, 3.5, a, b)
    np.testing.assert_array_equal(x, -sampler(key, -3.5, b, a))
    np.testing.assert_allclose(sampler(key, 3.5, a / 4.0, 4.0 * b), x + np.log(4.0), atol=1e-5)


def test_extreme_parameters_stay_finite(sampler):
    sizes = jnp.array([2e-38, 1e-30, 1e-12, 1.0, 1e12, 1e30, 1e38])
    p, a, b = jnp.meshgrid(jnp.array([-1e6, -40.0, -0.5, 0.0, 0.5, 40.0, 1e6]), sizes, sizes)
    x = jax.vmap(sampler, (0, None, None, None))(jax.random.split(jax.random.key(0), 20), p, a, b)
    assert np.isfinite(x).all()
    # The mode is between the scales 1 / a, b, |p| / a and b / |p|, and the density falls like exp(-|x| / 2) or faster
    # beyond it; for p = 0 it is flat between 1 / a and b.
    big = np.maximum(np.abs(np.log(a)), np.abs(np.log(b))) + np.log(2e6) + 200.0
    assert (np.abs(x) < big).all()


def test_every_lane_ends_and_only_improper_lanes_are_nan(sampler):
    nan, inf = jnp.nan, jnp.inf
    lanes = [
        (1.5, 2.0, 3.0, True),
        (nan, 2.0, 3.0, False),
        (1.5, nan, 3.0, False),
        (1.5, 2.0, nan, False),
        (1.5, 0.0, 3.0, False),  # t -> infinity
        (-1.5, 2.0, 0.0, False),  # t -> 0
        (0.0, 2.0, 0.0, False),
        (0.0, 0.0, 2.0, False),
        (1.5, -2.0, 3.0, False),
        (1.5, 2.0, -3.0, False),
        (1.5, inf, 3.0, False),
        (inf, 2.0, 3.0, False),
        (0.0, 0.0, 0.0, False),
        (-1.5, 0.0, 2.0, True),
    ]
    p, a, b, proper = (jnp.array(column) for column in zip(*lanes, strict=True))
    x = sampler(jax.random.key(0), p, a, b)
    np.testing.assert_array_equal(np.isfinite(x), proper)
    np.testing.assert_array_equal(np.isnan(x), ~proper)


def test_broadcasts_and_runs_under_vmap(sampler):
    p, a, b = jnp.array([[0.5], [-2.0]]), jnp.array([1.0, 2.0, 3.0]), 1.0
    assert sampler(jax.random.key(0), p, a, b).shape == (2, 3)
    assert sampler(jax.random.key(0), 1, 2, 3).shape == ()
    keys = jax.random.split(jax.random.key(1), 4)
    x = jax.vmap(lambda key, scale: log_gig(key, p, scale * a, b))(keys, jnp.arange(1.0, 5.0))
    alone = [sampler(key, p, scale * a, b) for key, scale in zip(keys, (1.0, 2.0, 3.0, 4.0), strict=True)]
    np.testing.assert_allclose(x, jnp.stack(alone), rtol=1e-5)


def test_few_candidates_are_rejected(x64):
    """At least 70 % are accepted at every point of the grid, so that a second round is rare."""
    p, w = (jnp.array(v) for v in zip(*GRID, strict=True))
    root = w
    order = jnp.abs(p)
    shape = gig._Shape(root * (root / (jnp.hypot(order, root) + order)), order)
    keys = jax.random.split(jax.random.key(0), 5000)
    accepted = jax.vmap(lambda key: gig._candidates(key, shape, gig._envelope(shape))[1])(keys)
    rates = np.asarray(accepted).reshape(-1, len(GRID)).mean(0)
    # 20,000 candidates each: a standard error of 0.003 and four of them below the bound.
    assert rates.min() > 0.7 - 4 * 0.0033
