"""Linear sites integrated out: densities and draws of every linear map, derivatives,
single precision, refusals.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats
from helpers import each, refused
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.contrib.module import random_flax_module
from numpyro.infer.util import log_density

from numpyro_bnn import infer, models, nn, priors

RATE = 1e-5  # failure rate of a test that draws
_RNG = np.random.default_rng(0)
X = _RNG.normal(size=(7, 3)).astype(np.float32)
Y = _RNG.normal(size=7).astype(np.float32)


def drawn_at(collapsed, values, number=4000):
    """Draws of linear sites at nearly equal values of others: other random numbers."""

    def draw(tick):
        at = {name: value * tick for name, value in values.items()}
        sites = handlers.trace(
            handlers.seed(handlers.substitute(collapsed, data=at), 0)
        ).get_trace()
        return {
            name: site["value"]
            for name, site in sites.items()
            if site["type"] == "deterministic"
        }

    ticks = 1 + jnp.float32(2.0**-22) * jnp.arange(-number // 2, number // 2)
    return {
        name: np.asarray(value, float)
        for name, value in jax.jit(jax.vmap(draw))(ticks).items()
    }


def assert_normal(draws, mean, covariance):
    """Draws (S, P) are of that normal: coordinates, radius and products, whitened."""
    white = np.linalg.solve(np.linalg.cholesky(covariance), (draws - mean).T)
    tests = [scipy.stats.kstest(row, "norm").pvalue for row in white]
    tests.append(
        scipy.stats.kstest((white**2).sum(0), scipy.stats.chi2(len(mean)).cdf).pvalue
    )
    products = [
        white[i] @ white[j] / np.sqrt(white.shape[1])
        for i in range(len(white))
        for j in range(i)
    ]
    tests += [2 * scipy.stats.norm.sf(abs(z)) for z in products]
    assert min(tests) > RATE / len(tests)


# -- every linear map ------------------------------------------------------------------

N, D, H, K = 9, 2, 3, 2
INPUTS = _RNG.normal(size=(N, D)).astype(np.float32)
TARGETS = _RNG.normal(size=(N, K)).astype(np.float32)
KERNEL, BIAS = "net/Dense_1.kernel", "net/Dense_1.bias"


def network(prior):
    model = models.regression(nn.MLP([H, K], "tanh"), prior)
    return lambda: model(INPUTS, TARGETS)


def hidden_units():
    v = numpyro.sample("v", dist.Normal(0.0, 1.0).expand([D, H]).to_event(2))
    return INPUTS @ v


def written(mean, sites, sd=0.5):
    """A model of hidden units h, a latent scale, and linear sites of some shapes."""

    def model():
        h = jnp.tanh(hidden_units())
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        linear = [
            numpyro.sample(name, dist.Normal(0.1, scale).expand(shape))
            for name, shape in sites.items()
        ]
        f = mean(h, scale, *linear)
        numpyro.sample("y", dist.Normal(f, sd), obs=jnp.resize(TARGETS, jnp.shape(f)))

    return model


def non_centered():
    h = jnp.tanh(hidden_units())
    scale = numpyro.sample("scale", dist.HalfNormal(1.0).expand([H]).to_event(1))
    affine = dist.transforms.AffineTransform(0.2, -scale[:, None])
    w = numpyro.sample(
        "w", dist.TransformedDistribution(dist.Normal(0.0, jnp.ones((H, K))), affine)
    )
    with numpyro.plate("outputs", K), numpyro.plate("data", N):
        numpyro.sample("y", dist.Normal(h @ w, scale[0]), obs=TARGETS)


def of_integers():
    """A prior whose mean and sd are integers."""
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
    numpyro.sample("y", dist.Normal(INPUTS @ w, scale), obs=TARGETS[:, 0])


def of_flax():
    from flax import linen

    module = linen.Sequential([linen.Dense(H), jnp.tanh, linen.Dense(1)])
    net = random_flax_module(
        "flax", module, prior=dist.Normal(0.0, 1.0), input_shape=(1, D)
    )
    numpyro.sample("y", dist.Normal(net(INPUTS)[:, 0], 0.5), obs=TARGETS[:, 0])


def heads(shared):
    """Mean and log sd have weights of their own, or are columns of one site."""

    def model():
        h = jnp.tanh(hidden_units())
        w = numpyro.sample(
            "w", dist.Normal(0.0, 0.8).expand([H, 1 + shared]).to_event(2)
        )
        u = (
            w[:, 1]
            if shared
            else numpyro.sample("u", dist.Normal(0.0, 0.5).expand([H]).to_event(1))
        )
        numpyro.sample(
            "y", dist.Normal(h @ w[:, 0], jnp.exp(h @ u)).to_event(1), obs=TARGETS[:, 0]
        )

    return model


def hierarchy(hidden):
    """Locations of locations; data sites masked and scaled; signs of transforms."""
    x, mask = INPUTS[:, 0], np.arange(N) % 4 > 0
    y = np.where(mask, np.sin(x), hidden).astype(np.float32)

    def model():
        numpyro.sample("clock", dist.Normal(0.0, 1.0))
        mu = numpyro.sample("mu", dist.Normal(1.0, 2.0))
        affine = dist.transforms.AffineTransform(mu, -0.5)
        a = numpyro.sample(
            "a", dist.TransformedDistribution(dist.Normal(0.0, jnp.ones(3)), affine)
        )
        slope = numpyro.sample("slope", dist.Normal(mu - a[0], 1.5))
        numpyro.deterministic("first and slope", a[0] + 2 * slope)
        with (
            numpyro.plate("data", N),
            handlers.mask(mask=mask),
            handlers.scale(scale=0.4),
        ):
            numpyro.sample(
                "y", dist.Normal(a[jnp.arange(N) % 3] + slope * x, 0.6), obs=y
            )
        numpyro.sample(
            "z",
            dist.Normal(2.0 * a - mu, 0.9).to_event(1),
            obs=jnp.array([0.5, -1.0, 2.0]),
        )

    return model


def other_inputs(h, s, w):
    """Of two outputs that have one of the first inputs, each has another second one."""
    second = jnp.concatenate([w[2:], w[2:][::-1]])
    return jnp.broadcast_to(w[:2, None], (2, 2)).reshape(4) + second


W, B = {"w": (H,)}, {"w": (H,), "b": ()}
WK = {"w": (H, K), "b": (K,)}
# Model, linear sites, and the same model without NaN.
MAPS = {
    "outputs": (network(priors.Normal(1.0)), [KERNEL, BIAS]),
    "non-centered prior": (network(priors.Hierarchical()), [f"{KERNEL}_base", BIAS]),
    "centered prior": (network(priors.Hierarchical(centered=True)), [KERNEL, BIAS]),
    "hierarchy": (hierarchy(np.nan), ["slope", "a", "mu"], hierarchy(0.0)),
    "flax": (of_flax, ["flax/layers_2.kernel", "flax/layers_2.bias"]),
    "affine prior, plates": (non_centered, ["w"]),
    "noise of its own": (heads(False), ["w"]),
    "scaled": (
        written(lambda h, s, w, b: 2.0 * (s * (h @ w) - b) / s + 3.0, B),
        ["w", "b"],
    ),
    "minus of minus": (written(lambda h, s, w, b: s - (b - h @ w), B), ["w", "b"]),
    "flat weights": (
        written(lambda h, s, w: h @ w.reshape(K, H).T, {"w": (K * H,)}),
        ["w"],
    ),
    "outputs first": (
        written(lambda h, s, w, b: jnp.einsum("nh,hk->kn", h, w) + b[:, None], WK),
        ["w", "b"],
    ),
    "batched": (
        written(
            lambda h, s, w: jnp.einsum("gnh,gh->gn", jnp.stack([h, s * h]), w),
            {"w": (K, H)},
        ),
        ["w"],
    ),
    "appended": (
        written(lambda h, s, w, b: jnp.c_[h, jnp.ones(N)] @ jnp.append(w, b), B),
        ["w", "b"],
    ),
    "summed": (written(lambda h, s, w: (h * w).sum(-1), W), ["w"]),
    "jit": (written(lambda h, s, w: jax.jit(jnp.matmul)(h, w), W), ["w"]),
    "tiled": (written(lambda h, s, w: h[:, 0] * jnp.tile(w, N // H), W), ["w"]),
    "integers": (of_integers, ["w"]),
    # What has no independent blocks of equal size, or is not understood.
    "used twice": (written(lambda h, s, w: h @ w + jnp.sin(h) @ w, W), ["w"]),
    "groups": (written(lambda h, s, w: w[jnp.arange(N) % H], W), ["w"]),
    "unused": (written(lambda h, s, w: h[:, :2] @ w[:2], W), ["w"]),
    "overlap": (
        written(lambda h, s, w: jnp.c_[h[:, :2] @ w[:2], h[:, :2] @ w[1:]], W),
        ["w"],
    ),
    "unequal": (
        written(
            lambda h, s, w: jnp.append(h @ w[:2].repeat(2)[:H], h[:4, 0] * w[2]), W
        ),
        ["w"],
    ),
    "one of others": (written(other_inputs, {"w": (4,)}), ["w"]),
    "cumulative": (written(lambda h, s, w: jnp.cumsum(h @ w), W), ["w"]),
    "measured": (
        written(lambda h, s, w: jnp.where(w > 0, 1.0, 1.0) * w * h[:, 0], {"w": ()}),
        ["w"],
    ),
}
FAST_MAPS = {"outputs", "hierarchy", "integers"}


@each("name", MAPS, fast=FAST_MAPS)
def test_every_linear_map_is_integrated_and_drawn(name):
    """The log joint is quadratic in linear sites: two derivatives give all."""
    model, sites, *plain = MAPS[name]
    traced = handlers.trace(handlers.seed(model, 3)).get_trace()
    latent = {
        n: s["value"]
        for n, s in traced.items()
        if s["type"] == "sample" and not s["is_observed"]
    }
    others = {n: value for n, value in latent.items() if n not in sites}
    inside, back = ravel_pytree({n: latent[n] for n in sites})

    @jax.jit
    def exact(others):
        def joint(inside):
            return log_density(
                plain[0] if plain else model, (), {}, {**others, **back(inside)}
            )[0]

        slope, precision = jax.grad(joint)(inside), -jax.hessian(joint)(inside)
        step = jnp.linalg.solve(precision, slope)
        log_det = jnp.linalg.slogdet(precision / (2 * jnp.pi))[1]
        return (
            joint(inside) + 0.5 * (slope @ step - log_det),
            inside + step,
            jnp.linalg.inv(precision),
        )

    collapsed = infer.collapse(model, sites)
    density = jax.jit(lambda at: log_density(collapsed, (), {}, at)[0])
    for factor in (1.0, 1.4):  # of the other sites
        at = {n: factor * value for n, value in others.items()}
        integral, mean, covariance = exact(at)
        np.testing.assert_allclose(density(at), integral, rtol=2e-5, atol=1e-4)
    drawn = drawn_at(collapsed, at)
    assert_normal(
        np.column_stack([drawn[n].reshape(4000, -1) for n in sorted(sites)]),
        mean,
        covariance,
    )
    if name == "hierarchy":
        np.testing.assert_allclose(
            drawn["first and slope"], drawn["a"][:, 0] + 2 * drawn["slope"], atol=1e-5
        )


@pytest.mark.parametrize(("n", "p", "orders"), [(12, 4, 12), (4, 12, 8)])
def test_prior_scales_of_many_orders_of_magnitude(n, p, orders):
    """Their squares do not fit into float32; exact by singular values."""
    rng = np.random.default_rng(n)
    sd = (10.0 ** np.linspace(-orders / 2, orders / 2, p)).astype(np.float32)
    x, y = (rng.normal(size=size).astype(np.float32) for size in ((n, p), n))

    def model():
        numpyro.sample("clock", dist.Normal(0.0, 1.0))
        w = numpyro.sample("w", dist.Normal(0.0, sd).to_event(1))
        numpyro.sample("y", dist.Normal(x @ w, 0.7).to_event(1), obs=y)

    collapsed = infer.collapse(model, ["w"])
    root, residual = x.astype(float) * sd / 0.7, y.astype(float) / 0.7
    left, singular, _ = np.linalg.svd(root, full_matrices=False)
    distance = (
        residual @ residual - ((left.T @ residual) ** 2 / (1 + singular**-2.0)).sum()
    )
    log = (
        -0.5 * (np.log1p(singular**2).sum() + distance)
        - n * np.log(0.7)
        - (n + 1) * np.log(2 * np.pi) / 2
    )
    found = jax.jit(lambda clock: log_density(collapsed, (), {}, {"clock": clock})[0])(
        0.0
    )
    assert float(found) == pytest.approx(log, rel=1e-4)
    covariance = sd[:, None] * np.linalg.inv(np.eye(p) + root.T @ root) * sd
    mean = covariance @ (x.T @ (y / 0.7**2))
    # Each weight by itself; together they would be compared through the inverse of a
    # singular matrix.
    scaled = (drawn_at(collapsed, {"clock": 1.0})["w"] - mean) / np.sqrt(
        np.diag(covariance)
    )
    assert (
        min(scipy.stats.kstest(column, "norm").pvalue for column in scaled.T) > RATE / p
    )


# -- derivatives, digits and several outputs of the integral ---------------------------


def fits(matrix, residual):
    """r ~ N(R w, 1), w ~ N(0, 1); a site without an effect stays in the sampler."""
    numpyro.sample("other", dist.Normal(0.0, 1.0))
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([matrix.shape[1]]).to_event(1))
    numpyro.sample("y", dist.Normal(matrix @ w, 1.0).to_event(1), obs=residual)


@pytest.mark.parametrize("shape", [(12, 4), (4, 12)])
def test_samplers_get_the_right_second_derivatives_of_a_collapsed_density(shape, x64):
    """Those of the density of the data by their covariance."""
    rng = np.random.default_rng(0)
    point = [jnp.asarray(rng.normal(size=size)) for size in (shape, shape[0])]
    collapsed = infer.collapse(fits, ["w"], *point)

    def found(*point):
        return log_density(collapsed, point, {}, {"other": 0.0})[0]

    def textbook(matrix, residual):
        covariance = jnp.eye(len(residual)) + matrix @ matrix.T
        squares = residual @ jnp.linalg.solve(covariance, residual)
        return -0.5 * (jnp.linalg.slogdet(covariance)[1] + squares)

    both = (jax.jit(jax.hessian(fn, (0, 1)))(*point) for fn in (found, textbook))
    for parts in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(*parts, rtol=1e-8, atol=1e-10)


# -- refusals --------------------------------------------------------------------------


def regression(x, y=None):
    tau = numpyro.sample("tau", dist.HalfCauchy(1.0))
    c = numpyro.sample("c", dist.Normal(0.0, 1.0))
    w = numpyro.sample("w", dist.Normal(0.5 * c, tau).expand([3]).to_event(1))
    numpyro.sample("y", dist.Normal(jnp.tanh(c * x) @ w, 0.4).to_event(1), obs=y)


def renamed():
    group = numpyro.sample("group", dist.Normal(numpyro.sample("w", unit()), 1.0))
    numpyro.sample("y", dist.Normal(group, 1.0), obs=1.0)


def of_one(below, prior=lambda: dist.Normal(0.0, 1.0), obs=1.0):
    """A model of one site w, and of data whose distribution is made from it."""
    return lambda: numpyro.sample("y", below(numpyro.sample("w", prior())), obs=obs)


def unit():
    return dist.Normal(0.0, 1.0)


def penalized():
    w = numpyro.sample("w", unit())
    numpyro.sample("y", dist.Normal(w, 1.0), obs=1.0)
    numpyro.factor("penalty", -jnp.abs(w))


def spreading():
    v = numpyro.sample("v", dist.Normal(0.0, jnp.exp(numpyro.sample("w", unit()))))
    numpyro.sample("y", dist.Normal(v, 1.0), obs=1.0)


REFUSED = [
    (
        of_one(lambda w: dist.Normal(w, 1.0), lambda: dist.Laplace(0.0, 1.0)),
        ["w"],
        "a Laplace prior",
    ),
    (of_one(lambda w: dist.Normal(w, 1.0)), ["w"], "Leave at least one"),
    (of_one(lambda w: dist.Normal(jax.nn.relu(w), 1.0)), ["w"], "is not linear"),
    (of_one(lambda w: dist.Normal(0.0, jnp.exp(w))), ["w"], "the scale of 'y' depends"),
    (of_one(lambda w: dist.Poisson(jnp.exp(w)), obs=1), ["w"], "'y' (Poisson) depends"),
    (
        of_one(lambda w: dist.Normal(w, 1.0).mask(w > 0)),
        ["w"],
        "scale or mask of the log density of 'y' depends",
    ),
    (of_one(lambda w: unit()), ["w"], "is the data passed"),
    (renamed, ["w"], "name 'group' as well"),
    (penalized, ["w"], "'penalty' (Unit) depends"),
    (spreading, ["w", "v"], "the scale of 'v' depends"),
    (heads(True), ["w"], "give the mean weights of its own"),
    (lambda: regression(X, Y), ["b"], "'b'"),
    (lambda: regression(X), ["w"], "'y'"),
    (lambda: regression(X, Y), ["w", "w"], "sequence of distinct site names"),
]


@pytest.mark.parametrize(("model", "sites", "fragment"), REFUSED)
def test_models_that_do_not_fit_are_refused(model, sites, fragment):
    with refused("sites", fragment):
        infer.collapse(model, sites)


def test_linearity_that_is_measured_needs_data():
    """A linear map is known from the program; one that is measured is not."""

    def measured(x, y):
        c, w = (numpyro.sample(name, dist.Normal(0.0, 1.0)) for name in "cw")
        numpyro.sample(
            "y",
            dist.Normal(jnp.where(w > 0, 1.0, 1.0) * w * x[:, 0] + c, 1.0).to_event(1),
            obs=y,
        )

    at = {"tau": 0.7, "c": 1.3}
    jax.jit(
        lambda x: log_density(infer.collapse(regression, ["w"], x, Y), (x, Y), {}, at)[
            0
        ]
    )(X)
    with refused("model_args", "traced by a transformation"):
        jax.jit(
            lambda x: log_density(
                infer.collapse(measured, ["w"], x, Y), (x, Y), {}, at
            )[0]
        )(X)


def test_a_collapsed_model_takes_from_outside_what_is_there_now():
    """As in a notebook, where data are read again."""
    outside = {"y": Y}

    def model(x):
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(a * w * x, 1.0), obs=outside["y"])

    x = X[:, 0]
    collapsed = infer.collapse(model, ["w"], x)
    exact = scipy.stats.multivariate_normal(cov=np.outer(x, x) + np.eye(len(Y)))
    for y in (Y, Y[::-1]):
        outside["y"] = y
        density = log_density(collapsed, (x,), {}, {"a": 1.0})[0]
        expected = exact.logpdf(y) + scipy.stats.norm.logpdf(1.0)
        assert np.isclose(density, expected, rtol=1e-5)
