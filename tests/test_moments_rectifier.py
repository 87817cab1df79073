"""Closed forms with hard tails: the rectifier, the leaky rectifier, the larger of two; values and derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from scipy.integrate import quad

from numpyro_bnn.moments import Gaussian
from numpyro_bnn.moments.closed_forms import leaky_relu, maximum, maximum_of, rectified

# Both sides of the two thresholds, the far tails, and the middle.
ALPHAS = np.concatenate([[-40, -30.5, -20, -10, 10, 20, 40], np.linspace(-8, 8, 65) + 0.013])


def tail_moments(t):
    """E r and E r^2 of r = max(x, 0), x ~ N(-t, 1), t >= 0: integrals of positive functions, nothing cancels."""
    first, second = (
        quad(lambda u, p=power: u**p * np.exp(-u * t - u * u / 2), 0, np.inf, epsabs=0, epsrel=1e-13)[0]
        for power in (1, 2)
    )
    return stats.norm.pdf(t) * first, stats.norm.pdf(t) * second


def exact(alpha):
    """Mean and variance of max(x, 0), x ~ N(alpha, 1), and their derivatives by (alpha, v)."""
    first, second = tail_moments(abs(alpha))
    if alpha < 0:
        mean, var = first, second - first**2
    else:  # max(x, 0) = x + max(-x, 0)
        mean, var = alpha + first, 1 - 2 * alpha * first - first**2 - second
    cdf, pdf = stats.norm.cdf(alpha), stats.norm.pdf(alpha)
    # d E f / dm = E f', d E f / dv = E f'' / 2 (Price), with f = r and r^2
    return np.array([mean, var, cdf, pdf / 2, 2 * mean * stats.norm.sf(alpha), cdf - mean * pdf])


def moments_and_gradients(fn, dtype):
    alphas = jnp.asarray(ALPHAS, dtype)
    ones = jnp.ones_like(alphas)
    values = fn(alphas, ones)
    slopes = [jax.vmap(jax.grad(lambda m, v, i=i: fn(m, v)[i], (0, 1)))(alphas, ones) for i in (0, 1)]
    return np.array([*values, *slopes[0], *slopes[1]], float).T


@pytest.mark.parametrize(("dtype", "relative"), [("float32", 2e-5), ("float64", 2e-12)])
def test_rectifier_is_accurate_in_both_tails(dtype, relative):
    """Relative to rounding times the cancellation that the thresholds allow (measured 7e-6 and 7e-13)."""
    with jax.enable_x64(dtype == "float64"):
        found = moments_and_gradients(rectified, dtype)
        rounded = np.asarray(jnp.asarray(ALPHAS, dtype), float)
    reference = np.array([exact(alpha) for alpha in rounded])
    assert np.isfinite(found).all()
    tiny = np.finfo(dtype).tiny
    positive = reference[:, :2] > tiny / np.finfo(dtype).eps  # representable with all its digits
    np.testing.assert_allclose(found[:, :2][positive], reference[:, :2][positive], rtol=relative)
    assert (found[:, :2][~positive] <= tiny / np.finfo(dtype).eps).all()
    assert (found[:, :2] >= 0).all()
    # Derivatives are of size 1 at most; in the upper tail those of the variance by m are 0 to rounding.
    np.testing.assert_allclose(found[:, 2:], reference[:, 2:], rtol=relative, atol=30 * np.finfo(dtype).eps)


def test_rectifier_tails_are_not_lost_early(x64):
    """Where the numbers are small, but far from the smallest, digits are there: alpha = -37, E about 1e-301."""
    mean, var = rectified(jnp.array(-37.0), jnp.array(1.0))
    first, second = tail_moments(37.0)
    np.testing.assert_allclose([float(mean), float(var)], [first, second], rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("below", [0.0, 0.01])
def test_closed_forms_at_zero_variance_and_huge_ratios(below, dtype):
    with jax.enable_x64(dtype == "float64"):
        mean = jnp.asarray([-2.0, 3.0, -1e4, 1e4, 1.0], dtype)
        var = jnp.asarray([0.0, 0.0, 1e-30, 1e-30, 1e30], dtype)

        def fn(mean, var):
            return leaky_relu(Gaussian(mean, var), below, 1.0) if below else rectified(mean, var)

        found = fn(mean, var)
        gradients = [jax.grad(lambda m, v, i=i: fn(m, v)[i].sum(), (0, 1))(mean, var) for i in (0, 1)]
    mean, var, found = np.asarray(mean), np.asarray(var), np.asarray(found)
    assert np.isfinite(np.array([*found, *gradients[0], *gradients[1]])).all()
    slope = np.where(mean[:4] > 0, 1, below)
    np.testing.assert_allclose(found[0][:4], slope * mean[:4], rtol=1e-6)
    np.testing.assert_allclose(found[1][:4], slope**2 * var[:4], rtol=1e-6, atol=1e-36)
    np.testing.assert_allclose(gradients[0][0][:4], slope, rtol=1e-6)
    np.testing.assert_allclose(gradients[1][1][:4], slope**2, rtol=1e-6)


def test_rectifier_derivatives_are_those_of_finite_differences(x64):
    mean, var = jnp.array([-3.0, -0.5, 0.0, 2.0]), jnp.array([0.3, 2.0, 1.0, 5.0])
    for i in (0, 1):
        for argument in (0, 1):
            step = jnp.zeros(2).at[argument].set(1e-5)
            up, down = (rectified(mean + s * step[0], var + s * step[1])[i] for s in (1, -1))
            slope = jax.grad(lambda m, v, i=i: rectified(m, v)[i].sum(), argument)(mean, var)
            np.testing.assert_allclose(slope, (up - down) / 2e-5, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("slopes", [(-1.0, 1.0), (0.01, 1.0), (1.0, 0.2), (0.0, 1.0), (2.0, 2.0)])
def test_leaky_relu_agrees_with_integration(slopes, x64):
    below, above = slopes
    for m, v in ((0.0, 1.0), (-1.3, 0.5), (2.0, 3.0)):
        normal = stats.norm(m, v**0.5)

        def expected(fn, normal=normal):
            parts = ((-np.inf, 0, below), (0, np.inf, above))
            return sum(quad(lambda x, s=s: fn(s * x) * normal.pdf(x), a, b, epsabs=1e-13)[0] for a, b, s in parts)

        mean = expected(lambda y: y)
        var = expected(lambda y, mean=mean: (y - mean) ** 2)
        found = leaky_relu(Gaussian(jnp.array(m), jnp.array(v)), below, above)
        np.testing.assert_allclose(np.array(found), [mean, var], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "case", [(0.0, 1.0, 0.0, 1.0), (1.0, 0.3, -0.5, 2.0), (-3.0, 0.01, 2.0, 4.0), (50.0, 1.0, -50.0, 1.0)]
)
def test_maximum_of_two_agrees_with_integration(case, x64):
    m1, v1, m2, v2 = case
    one, two = stats.norm(m1, v1**0.5), stats.norm(m2, v2**0.5)

    def density(x):
        return one.pdf(x) * two.cdf(x) + one.cdf(x) * two.pdf(x)

    grid = np.linspace(-80, 80, 1_600_001)  # the trapezoid rule is exact to rounding for these smooth densities
    weight = density(grid) * (grid[1] - grid[0])
    mean = (grid * weight).sum()
    found = maximum(Gaussian(jnp.array(m1), jnp.array(v1)), Gaussian(jnp.array(m2), jnp.array(v2)))
    np.testing.assert_allclose(np.array(found), [mean, ((grid - mean) ** 2 * weight).sum()], rtol=1e-9)


def test_maximum_of_two_constants_and_of_equal_ones():
    zero = Gaussian(jnp.array([1.0, 2.0]), jnp.zeros(2))
    one = Gaussian(jnp.array([3.0, 2.0]), jnp.zeros(2))
    found = maximum(zero, one)
    np.testing.assert_allclose(found.mean, [3, 2])
    np.testing.assert_allclose(found.var, 0)
    slopes = jax.grad(lambda m: maximum(Gaussian(m, jnp.zeros(2)), one).mean.sum())(zero.mean)
    np.testing.assert_allclose(slopes, [0, 0.5])


@pytest.mark.slow
def test_largest_of_many_agrees_with_integration(x64):
    """Different scales, a known number, one left out; and the derivatives by finite differences."""
    mean = jnp.array([0.0, 1.0, -3.0, 0.5, 100.0])
    var = jnp.array([1.0, 0.01, 9.0, 0.0, 1.0])
    present = jnp.array([True, True, True, True, False])
    grid = np.linspace(0.5, 40, 2_000_001)  # the largest is at least 0.5
    cdf = np.prod([stats.norm.cdf(grid, m, v**0.5) for m, v in ((0, 1), (1, 0.01**1), (-3, 9))], axis=0)
    step = grid[1] - grid[0]
    above = 1 - cdf
    expected = 0.5 + above[:-1].sum() * step - step * above[0] / 2
    square = 2 * ((grid - 0.5) * above).sum() * step
    found = maximum_of(mean, var, present)
    np.testing.assert_allclose(found.mean, expected, rtol=2e-4)
    np.testing.assert_allclose(found.var, square - (expected - 0.5) ** 2, rtol=2e-3)
    np.testing.assert_allclose(maximum_of(mean, var, present, 200).mean, expected, rtol=1e-6)

    @jax.jit
    def total(m, v):
        moments = maximum_of(m, v, present, 300)  # the scales differ by 30
        return moments.mean + moments.var

    slopes = jax.grad(total, (0, 1))(mean, var)
    for argument in (0, 1):
        for i in (0, 1, 2):
            step = jnp.zeros(5).at[i].set(1e-6)
            up, down = (total(*(a + s * step * (k == argument) for k, a in enumerate((mean, var)))) for s in (1, -1))
            np.testing.assert_allclose(slopes[argument][i], (up - down) / 2e-6, rtol=1e-3, atol=1e-4)
    assert np.isfinite(np.array(slopes)).all()
