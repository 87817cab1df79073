"""Priors: draws and densities held to the moments, tails and distributions that theory
gives.

Kolmogorov-Smirnov tests fail by chance with probability 1e-6 each; moments are held to
five standard errors (probability 6e-7 each). Both bounds are two-sided and the seeds
are fixed.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.special
import scipy.stats
from helpers import within_errors
from numpy.testing import assert_allclose as close
from numpyro import handlers
from numpyro.infer.util import log_density
from sklearn.gaussian_process.kernels import RBF, Matern

from numpyro_bnn import priors

pytestmark = pytest.mark.core

NUMBER = 20_000
RATE = 1e-6
KERNEL = ("Dense_0.kernel", (4, 3))
ONE = ("Dense_0.kernel", (1, 1))
WINDOW = ("Conv2d_0.kernel", (3, 3, 2, 3))
BIAS, GAIN = ("Dense_0.bias", (3,)), ("LayerNorm_0.scale", (3,))


# -- marginal distributions ------------------------------------------------------------


def scaled(scales, nodes=2000):
    """Cdf of s z, z ~ N(0, 1), for random s: the mean of Phi(w / s)."""

    def cdf(w):
        sds = scales.ppf((np.arange(nodes) + 0.5) / nodes)
        sizes = np.geomspace(1e-6, 1e6, 700)
        grid = np.concatenate([-sizes[::-1], [0], sizes])
        return np.interp(w, grid, scipy.special.ndtr(grid[:, None] / sds).mean(axis=1))

    return cdf


# Name -> prior, parameter with fan-in 4 (or a bias, or a gain), and the distribution of
# its weights.
CLOSED = {
    "Normal": (priors.Normal(2.0), KERNEL, scipy.stats.norm(scale=1).logpdf),
    "bias": (priors.Normal(bias_scale=0.3), BIAS, scipy.stats.norm(scale=0.3).logpdf),
    "gain": (priors.Normal(gain_scale=0.3), GAIN, scipy.stats.norm(1, 0.3).logpdf),
    "Laplace": (
        priors.Laplace(2.0),
        KERNEL,
        scipy.stats.laplace(scale=0.5**0.5).logpdf,
    ),
    "StudentT": (priors.StudentT(3.0, 2.0), KERNEL, scipy.stats.t(3).logpdf),
    "ScaleMixture": (
        priors.ScaleMixture(0.3, 1.0, 0.1),
        KERNEL,
        lambda w: np.log(
            0.3 * scipy.stats.norm.pdf(w) + 0.7 * scipy.stats.norm.pdf(w, scale=0.1)
        ),
    ),
}


@pytest.mark.parametrize("name", CLOSED)
def test_density_of_a_weight_is_the_closed_form(name):
    prior, (parameter, shape), log_density_of = CLOSED[name]
    w = np.linspace(-3.0, 3.0, 12)
    fn = prior(parameter, shape)
    close(fn.log_prob(w), log_density_of(w), rtol=1e-4, atol=1e-5)


# Those with hyper-sites: the marginal distribution of one weight, with which the given
# scales leave it.
DRAWN = {
    "Hierarchical": (
        lambda: priors.Hierarchical(),
        KERNEL,
        scaled(scipy.stats.halfnorm(scale=0.5)),
    ),
    "ARD": (
        lambda: priors.ARD(dist.Uniform(0.5, 1.5), centered=True),
        KERNEL,
        scaled(scipy.stats.uniform(0.25, 0.5)),
    ),
    "GammaPrecision": (
        lambda: priors.GammaPrecision(0.05, 0.5, fan_in_scaling=False, centered=True),
        KERNEL,
        scipy.stats.t(0.5, scale=0.05).cdf,
    ),
    "Horseshoe": (
        lambda: priors.Horseshoe(),
        KERNEL,
        scaled(scipy.stats.halfcauchy(scale=0.25)),
    ),
    "Horseshoe global": (
        lambda: priors.Horseshoe(0.3),
        KERNEL,
        scaled(scipy.stats.halfcauchy(scale=0.15)),
    ),
    "slab": (
        lambda: priors.RegularizedHorseshoe(slab_scale=3.0),
        KERNEL,
        scipy.stats.t(4, scale=1.5).cdf,
    ),
    "GPFilters": (
        lambda: priors.GPFilters(2.0, 1.7, "matern32"),
        WINDOW,
        scipy.stats.norm(scale=2 / 18**0.5).cdf,
    ),
}
HYPER = {  # given scales: with a large global one, the slab makes a weight Student t
    "Horseshoe": {"global": 0.5},
    "Horseshoe global": {"local": np.ones((4, 3), np.float32)},
    "slab": {"global": 1e12},
}


def model_of(prior, parameter):
    name, shape = parameter
    fn = prior(name, shape)
    numpyro.sample(name, fn.expand(shape[: len(shape) - fn.event_dim]).to_event())


@cache
def draws_of(name):
    """Independent prior draws of a parameter."""
    make, parameter, _ = DRAWN[name]
    given = {
        f"{parameter[0]}_{site}": value for site, value in HYPER.get(name, {}).items()
    }
    model = handlers.substitute(
        priors.noncenter(partial(model_of, make(), parameter)), given
    )

    def draw(key):
        return handlers.trace(handlers.seed(model, key)).get_trace()[parameter[0]][
            "value"
        ]

    return np.asarray(
        jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(0), NUMBER)), float
    )


@pytest.mark.parametrize("name", DRAWN)
def test_marginal_of_a_weight(name):
    draws = draws_of(name).reshape(NUMBER, -1)
    for column in (0, -1):  # weights of one draw share hyper-sites: one weight of each
        assert scipy.stats.kstest(draws[:, column], DRAWN[name][2]).pvalue > RATE


def test_group_student_is_the_integral_over_its_precision():
    """Density, length of a draw, and what `given_rest` leaves invariant."""
    df = 3.0
    fn = priors.GroupStudentT(df, 0.5, (2, 3))
    w = np.random.default_rng(0).normal(size=(4, 2, 3)).astype(np.float32)
    expected = scipy.stats.multivariate_t(np.zeros(6), 0.25 * np.eye(6), df=df).logpdf(
        w.reshape(4, 6)
    )
    close(fn.log_prob(w), expected, rtol=1e-5)

    @jax.jit
    def run(key):
        draws = fn.sample(key, (NUMBER,))
        keys = jax.random.split(jax.random.fold_in(key, 1), NUMBER)
        return draws, jax.vmap(
            lambda key, w: fn.given_rest(key, w, np.array([False, True, False]))
        )(keys, draws)

    draws, redrawn = (np.asarray(values) for values in run(jax.random.key(0)))
    np.testing.assert_array_equal(redrawn[:, :, [0, 2]], draws[:, :, [0, 2]])
    assert not np.any(redrawn[:, :, 1] == draws[:, :, 1])
    squares = [(values.astype(float) ** 2).sum(1) for values in (draws, redrawn)]
    for square in squares:
        assert (
            scipy.stats.kstest(
                square.sum(1) / (6 * 0.25), scipy.stats.f(6, df).cdf
            ).pvalue
            > RATE
        )
    share = squares[1][:, 1] / squares[1].sum(1)
    # directions are uniform
    assert scipy.stats.kstest(share, scipy.stats.beta(1, 2).cdf).pvalue > RATE


# -- horseshoe -------------------------------------------------------------------------


def test_horseshoe_density_is_the_closed_form(x64):
    """Our joint density integrated over lambda, given tau = 1."""
    model, name = partial(model_of, priors.Horseshoe(), ONE), ONE[0]
    # Trapezoid rule in log lambda: the integrand is analytic and decays, so the error
    # is far below 1e-8.
    log_lambda = np.linspace(-30.0, 30.0, 4001)

    @jax.jit
    @jax.vmap
    def marginal(w):
        def joint(u):
            sites = {
                f"{name}_global": 1.0,
                f"{name}_local": jnp.exp(u).reshape(1, 1),
                name: w.reshape(1, 1),
            }
            return log_density(model, (), {}, sites)[0] + u

        return jnp.trapezoid(jnp.exp(jax.vmap(joint)(log_lambda)), log_lambda)

    w = np.array([1e-8, 1e-6, 1e-4, 1e-2, 0.1, 1.0, 5.0, 20.0])
    exact = np.exp(w**2 / 2) * scipy.special.exp1(w**2 / 2) / np.sqrt(2 * np.pi**3)
    # The prior of tau itself is a constant at tau = 1: the half-Cauchy density 1 / pi.
    close(np.asarray(marginal(w)) * np.pi, exact, rtol=1e-8)


def test_regularized_horseshoe_between_its_limits():
    """sd = c tau lambda / hypot(c, tau lambda); gradients are finite."""
    model = priors.noncenter(partial(model_of, priors.RegularizedHorseshoe(), ONE))

    def sd(tau, local, slab):
        hyper = {
            "global": tau,
            "local": local.reshape(1, 1),
            "slab": slab,
            "base": np.ones((1, 1), np.float32),
        }
        values = {f"{ONE[0]}_{site}": value for site, value in hyper.items()}
        return handlers.trace(handlers.substitute(model, values)).get_trace()[ONE[0]][
            "value"
        ][0, 0]

    table = [(0.3, 2.0, 4.0), (1.0, 1.0, 1.0), (5.0, 3.0, 0.1), (2.0, 1.0, 4.0)]
    extremes = [(1e-6, 10.0), (1e6, 1e3), (1e-18, 1e-18), (1e18, 1e18), (1e-30, 1.0)]
    table += [(*pair, 4.0) for pair in (*extremes, (1e30, 1.0))]
    tau, local, slab = np.array(table, np.float32).T
    values, gradients = jax.jit(jax.vmap(jax.value_and_grad(sd, (0, 1, 2))))(
        tau, local, slab
    )
    root, plain = slab.astype(float) ** 0.5, tau.astype(float) * local
    close(values, root * plain / np.hypot(root, plain), rtol=1e-6)
    assert all(np.isfinite(gradient).all() for gradient in gradients)


# -- filters ---------------------------------------------------------------------------

COVARIANCES = {
    "rbf": RBF,
    "matern12": partial(Matern, nu=0.5),
    "matern32": partial(Matern, nu=1.5),
    "matern52": partial(Matern, nu=2.5),
}


def correlation_of(covariance, length, window):
    """That of scikit-learn, of the positions of a filter."""
    grid = np.array([(i, j) for i in range(window[0]) for j in range(window[1])], float)
    return COVARIANCES[covariance](length)(grid)


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_density_of_filters_is_normal_with_the_covariance_of_scikit_learn(
    covariance, x64
):
    """N(0, (a^2 / fan_in) (K + j I) / (1 + j)) for each of six pairs of channels, with
    a large jitter j.

    Amplitude and length scale are numbers, or given values of their sites.
    """
    w = np.random.default_rng(0).normal(size=(3, 4, 2, 3))
    matrix = 4 / 24 * (correlation_of(covariance, 1.7, (3, 4)) + 0.5 * np.eye(12)) / 1.5
    expected = (
        scipy.stats.multivariate_normal(cov=matrix).logpdf(w.reshape(12, 6).T).sum()
    )
    learned = (dist.HalfNormal(1.0), dist.LogNormal(0.0, 0.3))
    for scales in ((2.0, 1.7), learned):
        with handlers.substitute(
            data={"c.kernel_amplitude": 2.0, "c.kernel_length_scale": 1.7}
        ):
            fn = priors.GPFilters(*scales, covariance, jitter=0.5, centered=True)(
                "c.kernel", w.shape
            )
        close(fn.log_prob(w), expected, rtol=1e-10)


def test_draws_of_filters_have_that_covariance_over_channels():
    """Entries within five errors, sqrt((K_ii K_jj + K_ij^2) / n)."""
    draws = draws_of("GPFilters")
    samples = draws.transpose(1, 2, 0, 3, 4).reshape(9, -1)
    expected = 4.0 / 18 * correlation_of("matern32", 1.7, (3, 3))
    diagonal = np.diag(expected)
    error = np.sqrt((np.outer(diagonal, diagonal) + expected**2) / samples.shape[1])
    assert (np.abs(samples @ samples.T / samples.shape[1] - expected) < 5 * error).all()
    # channels do not correlate
    assert within_errors(draws[:, 1, 1, 0, 0] * draws[:, 1, 1, 1, 0], 0.0)


@pytest.mark.parametrize(("window", "length_scale"), [(5, 0.1), (11, 1e3)])
def test_filters_stay_finite_where_the_matrix_is_singular(window, length_scale):
    @jax.jit
    def run(key):
        fn = priors.GPFilters(1.0, length_scale)("c.kernel", (window, window, 1, 2))
        value = fn.sample(key)
        return value, fn.log_prob(value)

    assert all(np.isfinite(value).all() for value in run(jax.random.key(0)))
