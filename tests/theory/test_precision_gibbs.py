"""PrecisionGibbs: every conditional against its exact distribution, and what it reads
from a model.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from helpers import refused
from jax import random
from numpyro import handlers
from numpyro.infer.gibbs import GIBBS_SITES_KWARG
from scipy import integrate, stats

from numpyro_bnn import infer, models, nn, priors

NUM_DRAWS = 4000
FAILURE = 1e-5  # of each Kolmogorov-Smirnov test, one of about thirty here
W = np.array([[0.3, -1.2, 0.7], [2.0, 0.1, -0.4]], np.float32)


def sweep(model, held, start=None):
    """One sweep from many states, given the same values of the other sites."""
    kernel, kwargs = infer.PrecisionGibbs(model), {GIBBS_SITES_KWARG: held}
    state = kernel.init(random.key(0), 0, None, (), kwargs)
    z = {
        name: jnp.full((NUM_DRAWS, *value.shape), 30.0)
        for name, value in state.z.items()
    }
    states = state._replace(
        z={**z, **(start or {})}, rng_key=random.split(random.key(1), NUM_DRAWS)
    )
    after = jax.jit(lambda s: kernel.sample(s, (), kwargs))(states)
    # The next sweep draws other numbers.
    assert np.all(random.key_data(after.rng_key) != random.key_data(states.rng_key))
    return {name: np.asarray(value, float) for name, value in after.z.items()}


def quantiles(density):
    """Distribution function on a grid of logs, and a permuted sample."""
    log_v = np.linspace(-8, 8, 20_001)
    cdf = integrate.cumulative_trapezoid(
        density(np.exp(log_v)) * np.exp(log_v), log_v, initial=0.0
    )
    cdf /= cdf[-1]
    sample = np.exp(np.interp((np.arange(NUM_DRAWS) + 0.5) / NUM_DRAWS, cdf, log_v))
    return lambda v: np.interp(np.log(v), log_v, cdf), np.random.default_rng(
        3
    ).permutation(sample)


# Prior, its density, and the power of a site that is the sd of its weights; some scales
# are integers.
HYPERPRIORS = {
    "inverse gamma": (
        lambda: dist.InverseGamma(3.0, 2.0),
        lambda v: v**-4.0 * np.exp(-2 / v),
        0.5,
    ),
    "chi2": (lambda: dist.Chi2(3.0), lambda v: v**0.5 * np.exp(-0.5 * v), 0.5),
    "half-normal": (
        lambda: dist.HalfNormal(2),
        lambda v: np.exp(-0.5 * (v / 2) ** 2),
        1.0,
    ),
    "half-Cauchy": (lambda: dist.HalfCauchy(1), lambda v: 1 / (1 + v**2), 1.0),
    "precision, inverse gamma": (
        lambda: dist.InverseGamma(3.0, 2.0),
        lambda v: v**-4.0 * np.exp(-2 / v),
        -0.5,
    ),
    "precision, exponential": (
        lambda: dist.Exponential(0.6),
        lambda v: np.exp(-0.6 * v),
        -0.5,
    ),
}
OF_SCALED_PRIOR = ("inverse gamma", "half-normal", "half-Cauchy")
# scales of two log priors, and of the log density of the weights
SCALED, OF_WEIGHTS = ((0.4, 2.0), 1.5)
SHAPES = {"rows": (2, 1), "columns": (1, 3), "elements": (2, 3)}
MASK, SEEN = np.array([True, False, True]), np.array([2.0, 100.0, -1.0])
AT, NOISY = np.linspace(-1, 1, 7), np.array([0.1, 0.4, -0.3, 1.2, 0.8, 0.2, 0.9])


def everything():
    """One precision, variance or scale of every kind, each with weights of its own."""
    for name, (prior, _, power) in HYPERPRIORS.items():
        v = numpyro.sample(name, prior())
        numpyro.sample(
            f"{name} weights",
            dist.Normal(0.0, 1.5 * v**power).expand([2, 3]).to_event(2),
        )
    for name in OF_SCALED_PRIOR:
        prior, _, power = HYPERPRIORS[name]
        with numpyro.plate(f"{name} columns", 2):
            with handlers.scale(scale=jnp.array(SCALED)):
                v = numpyro.sample(f"{name}, scaled", prior())
            with handlers.scale(scale=OF_WEIGHTS), numpyro.plate(f"{name} rows", 3):
                numpyro.sample(f"{name}, scaled weights", dist.Normal(0.0, v**power))
    for name, shape in SHAPES.items():
        v = numpyro.sample(
            name, dist.Gamma(1.0, 0.5).expand([int(np.prod(shape))]).to_event(1)
        )
        numpyro.sample(
            f"{name} weights",
            dist.Normal(0.0, v.reshape(shape) ** -0.5).expand([2, 3]).to_event(2),
        )
    numpyro.sample(
        "one weight",
        dist.Normal(0.0, numpyro.sample("of one weight", dist.HalfCauchy(1))),
    )
    of_two = numpyro.sample("of two sites", dist.Gamma(1.0, 0.5))
    numpyro.sample("a", dist.Normal(0.0, of_two**-0.5).expand([2]).to_event(1))
    with (
        handlers.scale(scale=0.25),
        handlers.mask(mask=jnp.asarray(MASK)),
        numpyro.plate("seen", 3),
    ):
        numpyro.sample("b", dist.Normal(1.0, 3 * of_two**-0.5), obs=jnp.asarray(SEEN))
    alpha = numpyro.sample("around a mean", dist.Gamma(1.5, 0.7))
    w = numpyro.sample(
        "w", dist.Normal(0.5, 2 / jnp.sqrt(alpha)).expand([2, 3]).to_event(2)
    )
    tau = numpyro.sample("noise", dist.Gamma(2.0, 0.3))
    numpyro.sample(
        "y", dist.Normal(w.sum() * jnp.asarray(AT), tau**-0.5), obs=jnp.asarray(NOISY)
    )


def of_hyperprior(name, number, squares, scale=1.0):
    """The exact conditional, given the number and the sum of squares of the weights."""
    _, density, power = HYPERPRIORS[name]
    return quantiles(
        lambda v: (
            density(v) ** scale
            * v ** (-number * power)
            * np.exp(-0.5 * squares * v ** (-2 * power))
        )
    )


def of_gamma(concentration, rate):
    return stats.gamma(concentration, scale=1 / rate).cdf


@cache
def conditionals():
    """Site -> exact distribution functions; starts of half-Cauchy scales."""
    exact, start = {}, {}
    for name in HYPERPRIORS:
        plain = of_hyperprior(name, 6, (W**2).sum() / 1.5**2)
        columns = [
            of_hyperprior(name, OF_WEIGHTS * 3, OF_WEIGHTS * (w**2).sum(), scale)
            for w, scale in zip(W, SCALED, strict=True)
        ]
        exact[name], exact[f"{name}, scaled"] = [plain[0]], [cdf for cdf, _ in columns]
        if name == "half-Cauchy":
            # whose update is a transition, not an independent draw
            start[name] = jnp.asarray(plain[1], jnp.float32)
            start[f"{name}, scaled"] = jnp.stack(
                [jnp.asarray(s, jnp.float32) for _, s in columns], 1
            )
    # Of a single weight the prior says as much as the data.
    cdf, sample = of_hyperprior("half-Cauchy", 1, 0.5**2)
    exact["of one weight"], start["of one weight"] = (
        [cdf],
        jnp.asarray(sample, jnp.float32),
    )
    for name, axis in (("rows", 1), ("columns", 0), ("elements", ())):
        squares = (W**2).sum(axis=axis).ravel()
        exact[name] = [
            of_gamma(1 + W.size / squares.size / 2, 0.5 + square / 2)
            for square in squares
        ]
    exact["of two sites"] = [
        of_gamma(1 + (2 + 0.25 * 2) / 2, 0.5 + (0.25 + 4 + 0.25 * (1 + 4) / 9) / 2)
    ]
    exact["around a mean"] = [of_gamma(1.5 + 3, 0.7 + ((W - 0.5) ** 2).sum() / 8)]
    exact["noise"] = [of_gamma(2 + 3.5, 0.3 + ((NOISY - W.sum() * AT) ** 2).sum() / 2)]
    return exact, start


@cache
def draws_of_everything():
    held = {
        "w": W,
        "a": np.array([0.5, -2.0], np.float32),
        "one weight": np.float32(0.5),
        **{f"{name} weights": W for name in SHAPES},
    }
    held |= {f"{name} weights": W for name in HYPERPRIORS}
    held |= {f"{name}, scaled weights": W.T for name in OF_SCALED_PRIOR}
    return sweep(
        everything,
        {name: jnp.asarray(value) for name, value in held.items()},
        conditionals()[1],
    )


SITES = [*HYPERPRIORS, *(f"{name}, scaled" for name in OF_SCALED_PRIOR)]


@pytest.mark.parametrize(
    "site", [*SITES, *SHAPES, "of one weight", "of two sites", "around a mean", "noise"]
)
def test_draws_have_their_exact_conditional(site):
    """In one sweep; half-Cauchy scales from draws of it, which stay such."""
    draws = draws_of_everything()[site].reshape(NUM_DRAWS, -1)
    exact = conditionals()[0][site]
    for values, cdf in zip(draws.T, exact, strict=True):
        assert stats.kstest(values, cdf).pvalue > FAILURE


def test_two_scales_of_one_site_take_turns():
    """From exact draws of both: product and ratio keep their distribution."""

    def model():
        a = numpyro.sample("a", dist.HalfNormal(1.0))
        b = numpyro.sample("b", dist.HalfNormal(2.0))
        sd = numpyro.deterministic("sd", a * b)
        numpyro.sample("w", dist.Normal(0.0, sd).expand([3]).to_event(1))

    held = {GIBBS_SITES_KWARG: {"w": jnp.asarray(W[0])}}
    values = {"a": jnp.array(2.0), "b": jnp.array(3.0)}
    draw = infer.PrecisionGibbs(model).postprocess_fn((), held)(values)
    assert draw == values | {"sd": 6.0}
    # By rejection from the prior: the density of w is largest where the product is its
    # root mean square.
    rng, w = np.random.default_rng(0), W[0].astype(float)
    a, b = np.abs(rng.normal(size=(2, 200_000))) * [[1.0], [2.0]]
    log_density = stats.norm.logpdf(w, 0.0, (a * b)[:, None]).sum(1)
    largest = stats.norm.logpdf(w, 0.0, np.sqrt((w**2).mean())).sum()
    kept = np.flatnonzero(np.log(rng.uniform(size=a.size)) < log_density - largest)
    assert len(kept) > 2 * NUM_DRAWS
    a, b = a[kept], b[kept]
    start = {
        name: jnp.asarray(v[:NUM_DRAWS], jnp.float32)
        for name, v in (("a", a), ("b", b))
    }
    after = sweep(model, {"w": jnp.asarray(W[0])}, start)
    for swept, exact in (
        (after["a"] * after["b"], a * b),
        (after["a"] / after["b"], a / b),
    ):
        assert stats.ks_2samp(swept, exact[NUM_DRAWS:]).pvalue > FAILURE


# -- reading a model -------------------------------------------------------------------


def test_sites_of_a_network_are_found():
    def conjugate(prior):
        model = models.regression(nn.MLP([2, 1]), prior)
        return infer.PrecisionGibbs(model).conjugate_sites(
            jnp.zeros((4, 3)), y=jnp.zeros(4)
        )

    precisions = [
        f"net/Dense_{i}.{part}_precision" for i in (0, 1) for part in ("kernel", "bias")
    ]
    assert conjugate(priors.GammaPrecision(centered=True)) == (*precisions, "sigma")
    assert conjugate(priors.GammaPrecision()) == ("sigma",)  # not centered
    scales = [
        f"net/Dense_{i}.kernel_{part}" for i in (0, 1) for part in ("global", "local")
    ]
    assert conjugate(priors.Horseshoe(unit="input", centered=True)) == (
        *scales,
        "sigma",
    )


def scaling(power, prior=lambda: dist.Gamma(1.0, 1.0)):
    def model():
        v = numpyro.sample("v", prior())
        numpyro.sample("w", dist.Normal(0.0, power(v)).expand([3]).to_event(1))

    return model


def below(fn):
    numpyro.sample("w", fn(numpyro.sample("v", dist.HalfCauchy(1.0))))


def weighted(handler):
    def model():
        v = numpyro.sample("v", dist.Gamma(1.0, 1.0))
        with handler(v):
            numpyro.sample("w", dist.Normal(0.0, v**-0.5).expand([3]).to_event(1))

    return model


def observed():
    v = numpyro.sample("v", dist.Gamma(1.0, 1.0))
    numpyro.sample("w", dist.Normal(0.0, v**-0.5).expand([3]).to_event(1))
    numpyro.sample("y", dist.Normal(0.0, 1.0), obs=2.0 * v)


# Not powers: some only far away, in a window, by a constant factor, or inside a
# function of their own.
PIECES = [
    lambda v: jnp.where(jnp.abs(v - 3.0) < 1e-3, 2.0, 1.0) * v**-0.5,
    lambda v: jnp.clip(v, 1e-12, 1e12) ** -0.5,
    lambda v: (v + 1e-6) ** -0.5,
    lambda v: v**-0.5 * jnp.exp(1e-9 * v),
    lambda v: jax.jit(lambda v: jax.nn.relu(v - 1e-20) ** -0.5)(v),
    lambda v: jax.lax.cond(v > 5.0, lambda: 3.0 * v**-0.5, lambda: v**-0.5),
]
POWERS = [
    lambda v: jnp.where(jnp.arange(3) > 1, v**-0.5, 2.0),
    lambda v: jnp.exp(-0.5 * jnp.log(v)),
    lambda v: 3.0 / jnp.sqrt(jnp.abs(v)) * jnp.clip(2.0, 0.0, 1.0),
    lambda v: jax.jit(jax.lax.rsqrt)(v),
]


@pytest.mark.parametrize("power", POWERS)
def test_powers_are_found_however_written(power):
    assert infer.PrecisionGibbs(scaling(power)).conjugate_sites() == ("v",)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            scaling(lambda v: v**-0.5, lambda: dist.LogNormal(0.0, 1.0)),
            "its prior is LogNormal",
        ),
        (scaling(lambda v: v), "a Gamma prior is not conjugate"),
        (lambda: below(lambda v: dist.Normal(v, 1.0)), "the mean of 'w' depends on it"),
        (lambda: below(lambda v: dist.StudentT(3.0, 0.0, v)), "'w' depends on it"),
        (observed, "the observed value of 'y' depends on it"),
        (
            weighted(lambda v: handlers.scale(scale=v)),
            "the scale of the log density of 'w' depends on it",
        ),
        (
            weighted(lambda v: handlers.mask(mask=v > 1.0)),
            "the mask of 'w' depends on it",
        ),
        *((scaling(piece), "not proportional to one power") for piece in PIECES),
        (
            lambda: numpyro.sample("v", dist.Gamma(1.0, 1.0)),
            "no normal site depends on it",
        ),
        (
            scaling(
                lambda v: v[0] * v[1] * jnp.ones(3),
                lambda: dist.HalfNormal(1.0).expand([2]).to_event(1),
            ),
            "one power",
        ),
    ],
)
def test_sites_that_are_not_conjugate_are_refused_with_the_reason(model, reason):
    assert "v" not in infer.PrecisionGibbs(model).conjugate_sites()
    with refused("sites", reason):
        infer.PrecisionGibbs(model).init(
            random.key(0), 0, None, (), {GIBBS_SITES_KWARG: {"w": jnp.zeros(3)}}
        )
