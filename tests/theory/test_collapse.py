"""Linear sites integrated out: exact densities and draws of every linear map, in single precision too; refusals."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.integrate
import scipy.stats
from helpers import refused
from numpyro import handlers
from numpyro.contrib.module import random_flax_module
from numpyro.infer.util import log_density

from numpyro_bnn import infer, models, nn, priors

RATE = 1e-5  # failure rate of a test that draws
_RNG = np.random.default_rng(0)
X = _RNG.normal(size=(7, 3)).astype(np.float32)
Y = _RNG.normal(size=7).astype(np.float32)


def drawn_at(collapsed, args, values, clock, number=4000):
    """Deterministic sites of many draws at the same values but for those of one site, which nothing depends on much.

    The random numbers of the linear sites come from the bits of the others: other bits, other random numbers.
    """

    def draw(at):
        model = handlers.seed(handlers.substitute(collapsed, data={**values, clock: at}), 0)
        return {
            n: s["value"] for n, s in handlers.trace(model).get_trace(*args).items() if s["type"] == "deterministic"
        }

    ticks = jnp.float32(values[clock]) * (
        1 + 2.0**-22 * jnp.arange(-number // 2, number // 2)
    )  # all of them distinct
    return {name: np.asarray(value, float) for name, value in jax.jit(jax.vmap(draw))(ticks).items()}


def assert_normal(draws, mean, covariance):
    """Draws (S, P) are from that normal distribution: every whitened coordinate, their radius, their products."""
    white = np.linalg.solve(np.linalg.cholesky(covariance), (draws - mean).T)
    tests = [scipy.stats.kstest(row, "norm").pvalue for row in white]
    tests.append(scipy.stats.kstest((white**2).sum(0), scipy.stats.chi2(len(mean)).cdf).pvalue)
    products = [white[i] @ white[j] / np.sqrt(white.shape[1]) for i in range(len(white)) for j in range(i)]
    tests += [2 * scipy.stats.norm.sf(abs(z)) for z in products]
    assert min(tests) > RATE / len(tests)


# -- every linear map ---------------------------------------------------------------------------------------

N, D, H, K = 9, 2, 3, 2
INPUTS = _RNG.normal(size=(N, D)).astype(np.float32)
TARGETS = _RNG.normal(size=(N, K)).astype(np.float32)
KERNEL, BIAS = "net/Dense_1.kernel", "net/Dense_1.bias"


def network(outputs, prior=None, net=None, **options):
    model = models.regression(net or nn.MLP([H, outputs], "tanh"), prior or priors.Normal(1.0), **options)
    return lambda: model(INPUTS, TARGETS if outputs > 1 else TARGETS[:, 0])


def hidden_units():
    v = numpyro.sample("v", dist.Normal(0.0, 1.0).expand([D, H]).to_event(2))
    return INPUTS @ v


def written(mean, sites, sd=0.5):
    """A model of hidden units h, a latent scale, and linear sites of some shapes."""

    def model():
        h, scale = jnp.tanh(hidden_units()), numpyro.sample("scale", dist.HalfNormal(1.0))
        linear = [numpyro.sample(name, dist.Normal(0.1, scale).expand(shape)) for name, shape in sites.items()]
        f = mean(h, scale, *linear)
        numpyro.sample("y", dist.Normal(f, sd), obs=jnp.resize(TARGETS, jnp.shape(f)))

    return model


def non_centered():
    h, scale = jnp.tanh(hidden_units()), numpyro.sample("scale", dist.HalfNormal(1.0).expand([H]).to_event(1))
    affine = dist.transforms.AffineTransform(0.2, -scale[:, None])
    w = numpyro.sample("w", dist.TransformedDistribution(dist.Normal(0.0, jnp.ones((H, K))), affine))
    with numpyro.plate("outputs", K), numpyro.plate("data", N):
        numpyro.sample("y", dist.Normal(h @ w, scale[0]), obs=TARGETS)


def of_flax():
    from flax import linen

    module = linen.Sequential([linen.Dense(H), jnp.tanh, linen.Dense(1)])
    net = random_flax_module("flax", module, prior=dist.Normal(0.0, 1.0), input_shape=(1, D))
    numpyro.sample("y", dist.Normal(net(INPUTS)[:, 0], 0.5), obs=TARGETS[:, 0])


def heads(shared):
    """The mean and the log sd have weights of their own, or are two columns of one site."""

    def model():
        h, w = (
            jnp.tanh(hidden_units()),
            numpyro.sample("w", dist.Normal(0.0, 0.8).expand([H, 1 + shared]).to_event(2)),
        )
        u = w[:, 1] if shared else numpyro.sample("u", dist.Normal(0.0, 0.5).expand([H]).to_event(1))
        numpyro.sample("y", dist.Normal(h @ w[:, 0], jnp.exp(h @ u)).to_event(1), obs=TARGETS[:, 0])

    return model


def other_inputs(h, s, w):
    """Of two outputs that have one of the first inputs, each has another second one."""
    second = jnp.concatenate([w[2:], w[2:][::-1]])
    return jnp.broadcast_to(w[:2, None], (2, 2)).reshape(4) + second


W, B = {"w": (H,)}, {"w": (H,), "b": ()}
WK = {"w": (H, K), "b": (K,)}
# Model and linear sites.
MAPS = {
    "one output": (network(1), [KERNEL, BIAS]),
    "outputs": (network(K), [KERNEL, BIAS]),
    "non-centered prior": (network(K, priors.Hierarchical()), [f"{KERNEL}_base", BIAS]),
    "centered prior": (network(K, priors.Hierarchical(centered=True)), [KERNEL, BIAS]),
    "flax": (of_flax, ["flax/layers_2.kernel", "flax/layers_2.bias"]),
    "affine prior, plates": (non_centered, ["w"]),
    "noise of its own": (heads(False), ["w"]),
    "scaled": (written(lambda h, s, w, b: 2.0 * (s * (h @ w) - b) / s + 3.0, B), ["w", "b"]),
    "negative": (written(lambda h, s, w, b: -(h @ w[::-1]) - b, B), ["w", "b"]),
    "minus of minus": (written(lambda h, s, w, b: s - (b - h @ w), B), ["w", "b"]),
    "scaled weights": (written(lambda h, s, w, b: h @ (w * s / jnp.arange(1.0, 1 + H)) + b, B), ["w", "b"]),
    "flat weights": (written(lambda h, s, w: h @ w.reshape(K, H).T, {"w": (K * H,)}), ["w"]),
    "outputs first": (written(lambda h, s, w, b: jnp.einsum("nh,hk->kn", h, w) + b[:, None], WK), ["w", "b"]),
    "weights left": (written(lambda h, s, w, b: w.T @ h.T + b[:, None], WK), ["w", "b"]),
    "batched": (written(lambda h, s, w: jnp.einsum("gnh,gh->gn", jnp.stack([h, s * h]), w), {"w": (K, H)}), ["w"]),
    "appended": (written(lambda h, s, w, b: jnp.c_[h, jnp.ones(N)] @ jnp.append(w, b), B), ["w", "b"]),
    "summed": (written(lambda h, s, w: (h * w).sum(-1), W), ["w"]),
    "slope": (written(lambda h, s, w, b: INPUTS[:, 0] * w + b, {"w": (), "b": ()}), ["w", "b"]),
    "jit": (written(lambda h, s, w: jax.jit(jnp.matmul)(h, w), W), ["w"]),
    # What has no independent blocks of equal size, or is not understood.
    "used twice": (written(lambda h, s, w: h @ w + jnp.sin(h) @ w, W), ["w"]),
    "groups": (written(lambda h, s, w: w[jnp.arange(N) % H], W), ["w"]),
    "unused": (written(lambda h, s, w: h[:, :2] @ w[:2], W), ["w"]),
    "overlap": (written(lambda h, s, w: jnp.c_[h[:, :2] @ w[:2], h[:, :2] @ w[1:]], W), ["w"]),
    "unequal": (written(lambda h, s, w: jnp.append(h @ w[:2].repeat(2)[:H], h[:4, 0] * w[2]), W), ["w"]),
    "one of others": (written(other_inputs, {"w": (4,)}), ["w"]),
    "cumulative": (written(lambda h, s, w: jnp.cumsum(h @ w), W), ["w"]),
    "half precision": (
        written(lambda h, s, w: (h.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32), W),
        ["w"],
    ),
    "measured": (written(lambda h, s, w: jnp.where(w > 0, 1.0, 1.0) * w * h[:, 0], {"w": ()}), ["w"]),
}  # fmt: skip
FAST_MAPS = {
    "outputs",
    "centered prior",
    "minus of minus",
    "flat weights",
    "weights left",
    "overlap",
    "one of others",
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FAST_MAPS else pytest.mark.slow) for n in MAPS])
def test_marginal_density_of_every_linear_map(name):
    """Value and gradient against the covariance of the data, from a Jacobian by derivatives of the means."""
    model, sites = MAPS[name]
    traced = handlers.trace(handlers.seed(model, 3)).get_trace()
    latent = {n: s["value"] for n, s in traced.items() if s["type"] == "sample" and not s["is_observed"]}
    data = [n for n, s in traced.items() if s["type"] == "sample" and s["is_observed"]]
    others = {n: value for n, value in latent.items() if n not in sites}

    def normal(fn):
        """Mean and sd of a normal site, in the shape of its values."""
        while not isinstance(fn, dist.Normal):
            if isinstance(fn, dist.TransformedDistribution):
                loc, sd = normal(fn.base_dist)
                (affine,) = fn.transforms
                return affine.loc + affine.scale * loc, jnp.abs(affine.scale) * sd
            fn = fn.base_dist
        return fn.loc, fn.scale

    def flat(sites, at, part):
        """Means or sds of sites."""
        trace = handlers.trace(handlers.seed(handlers.substitute(model, data=at), 0)).get_trace()
        found = [jnp.broadcast_to(normal(trace[n]["fn"])[part], jnp.shape(trace[n]["value"])) for n in sites]
        return jnp.concatenate([jnp.ravel(value) for value in found])

    def exact(others):
        """Of the joint normal distribution of sites less their means, which may depend on one another, and data."""

        def means(u):
            at, start = dict(others), 0
            for n in (n for n in latent if n in sites):
                size, shape = latent[n].size, latent[n].shape
                at[n] = (flat([n], at, 0) + u[start : start + size]).reshape(shape)
                start += size
            return flat(data, at, 0)

        ordered = [n for n in latent if n in sites]
        sd, noise = flat(ordered, {**latent, **others}, 1), flat(data, {**latent, **others}, 1)
        zero = jnp.zeros(len(sd))
        root = jax.jacfwd(means)(zero) * sd
        residual = jnp.concatenate([jnp.ravel(traced[n]["value"]) for n in data]) - means(zero)
        covariance = root @ root.T + jnp.diag(noise**2)
        log_prior = log_density(handlers.block(handlers.substitute(model, data={n: latent[n] for n in sites}),
                                               hide=[*sites, *data]), (), {}, others)[0]  # fmt: skip
        normalized = dist.MultivariateNormal(jnp.zeros(len(residual)), covariance).log_prob(residual)
        return normalized + log_prior

    density = partial(log_density, infer.collapse(model, sites), (), {})
    found, expected = jax.jit(lambda at: density(at)[0]), jax.jit(exact)
    for factor in (1.0, 1.4):  # of the other sites
        at = {n: factor * value for n, value in others.items()}
        np.testing.assert_allclose(
            found(at), expected(at), rtol=1e-2 if name == "half precision" else 2e-5, atol=1e-4
        )


def test_draws_of_several_outputs():
    """Of a network of two outputs: each output has the normal conditional of its own weights."""
    model = models.regression(nn.MLP([H, K], "tanh"), priors.Normal(1.0, fan_in_scaling=False))
    hidden = infer.collapse(model, [KERNEL, BIAS], INPUTS, TARGETS)
    kernel, bias = (_RNG.normal(size=shape).astype(np.float32) for shape in ((D, H), (H,)))
    values = {"net/Dense_0.kernel": kernel, "net/Dense_0.bias": bias, "sigma": jnp.float32(0.4)}
    drawn = drawn_at(hidden, (INPUTS, TARGETS), values, "sigma")
    h = np.column_stack([np.tanh(INPUTS @ kernel + bias), np.ones(N)]).astype(float)
    covariance = np.linalg.inv(h.T @ h / 0.4**2 + np.eye(H + 1))
    mean = covariance @ h.T @ TARGETS / 0.4**2
    both = np.concatenate([drawn[KERNEL], drawn[BIAS][:, None]], 1)  # (S, H + 1, K)
    assert_normal(np.moveaxis(both, 2, 1).reshape(len(both), -1), mean.T.ravel(), np.kron(np.eye(K), covariance))


def test_draws_know_the_signs_of_their_map():
    """Which the density does not show: it is that of the squares of the columns of the map."""
    model, sites = MAPS["minus of minus"]
    v, scale = _RNG.normal(size=(D, H)).astype(np.float32), 0.8
    drawn = drawn_at(infer.collapse(model, sites), (), {"v": v, "scale": scale}, "scale")
    design = np.column_stack([np.tanh(INPUTS @ v), -np.ones(N)]).astype(float)
    covariance = np.linalg.inv(design.T @ design / 0.5**2 + np.eye(H + 1) / scale**2)
    mean = covariance @ (design.T @ (np.resize(TARGETS, N) - scale) / 0.5**2 + 0.1 / scale**2)
    assert_normal(np.column_stack([drawn["w"], drawn["b"]]), mean, covariance)


# -- more data than weights, and more weights than data; powers of densities; scales far apart ---------------------

SHAPES = [(12, 4), (4, 12)]


def powers(x, y, loc, sd, noise, weight, gamma):
    """A linear model with powers of the densities of data and prior."""
    numpyro.sample("clock", dist.Normal(0.0, 1.0))
    with numpyro.plate("weights", x.shape[1]), handlers.scale(scale=gamma):
        w = numpyro.sample("w", dist.Normal(loc, sd))
    with numpyro.plate("data", x.shape[0]), handlers.scale(scale=weight):
        numpyro.sample("y", dist.Normal(x @ w, noise), obs=y)


@cache
def collapsed_powers(shape):
    """Density and draws as functions of the arguments, each one program."""
    example = [np.ones(size, np.float32) for size in (shape, shape[0], *[shape[1]] * 2, *[shape[0]] * 2, shape[1])]
    model = infer.collapse(powers, ["w"], *example)

    def draw(clock, args):
        placed = handlers.seed(handlers.substitute(model, data={"clock": clock}), 0)
        return handlers.trace(placed).get_trace(*args)["w"]["value"]

    draws = jax.jit(jax.vmap(draw, (0, None)))
    clock = np.linspace(0.5, 1.5, 4000, dtype=np.float32)
    density = jax.jit(lambda *args: log_density(model, args, {}, {"clock": 0.0})[0] + 0.5 * jnp.log(2 * jnp.pi))
    return density, lambda args: np.asarray(draws(clock, args), float)


def arguments(shape, sd, weight=1.0, gamma=1.0, loc=0.3):
    n, p = shape
    rng = np.random.default_rng(n)
    x = rng.normal(size=shape)
    parts = [x, x.sum(1) + rng.normal(size=n)]
    parts += [np.full(p, loc), sd, np.full(n, 0.7), np.broadcast_to(weight, n), np.broadcast_to(gamma, p)]
    return [np.asarray(part, np.float32) for part in parts]


def evidence(matrix, residual):
    """log N(r; 0, I + R R') without its constant, by singular values in float64."""
    left, singular, _ = np.linalg.svd(np.asarray(matrix, float), full_matrices=False)
    along = left.T @ np.asarray(residual, float)
    return -0.5 * (np.log1p(singular**2).sum() + (residual**2).sum() - (along**2 / (1 + singular**-2.0)).sum())


def exact_powers(x, y, loc, sd, noise, weight, gamma):
    """Log of the integral over w, posterior mean and covariance, in float64."""
    x, y, loc, sd, noise, weight, gamma = (np.asarray(part, float) for part in (x, y, loc, sd, noise, weight, gamma))
    root, width = np.sqrt(weight) / noise, sd / np.sqrt(gamma)
    log = evidence(root[:, None] * x * width, root * (y - x @ loc)) - weight @ np.log(noise * np.sqrt(2 * np.pi))
    log += np.sum((1 - gamma) * np.log(sd * np.sqrt(2 * np.pi)) - 0.5 * np.log(gamma))
    scaled = root[:, None] * x * width
    covariance = width[:, None] * np.linalg.inv(np.eye(len(sd)) + scaled.T @ scaled) * width
    return log, loc + covariance @ (x.T @ (root**2 * (y - x @ loc))), covariance


def test_the_exact_integral_agrees_with_quadrature():
    args = arguments((3, 1), np.array([1.7]), weight=[0.3, 1.0, 0.0], gamma=[0.25])
    x, y, loc, sd, noise, weight, gamma = (np.asarray(part, float) for part in args)

    def density(w):
        log = weight @ scipy.stats.norm.logpdf(y, x[:, 0] * w, noise)
        return np.exp(log + gamma[0] * scipy.stats.norm.logpdf(w, loc[0], sd[0]))

    assert exact_powers(*args)[0] == pytest.approx(np.log(scipy.integrate.quad(density, -np.inf, np.inf)[0]))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["plain", "powers"])
def test_densities_and_draws_are_exact(shape, kind):
    n, p = shape
    options = {"weight": np.linspace(0.0, 1.5, n), "gamma": np.linspace(0.3, 2.0, p)} if kind == "powers" else {}
    args = arguments(shape, 1.3 * np.linspace(0.5, 2.0, p), **options)
    density, draws = collapsed_powers(shape)
    log, mean, covariance = exact_powers(*args)
    assert float(density(*args)) == pytest.approx(log, rel=2e-5)
    assert_normal(draws(args), mean, covariance)


@pytest.mark.parametrize(("shape", "orders"), [(SHAPES[0], 12), (SHAPES[1], 8)])
def test_prior_scales_of_many_orders_of_magnitude(shape, orders):
    """Squares of such a condition number do not fit into single precision."""
    args = arguments(shape, 10.0 ** np.linspace(-orders / 2, orders / 2, shape[1]), loc=0.0)
    density, draws = collapsed_powers(shape)
    log, mean, covariance = exact_powers(*args)
    assert float(density(*args)) == pytest.approx(log, rel=1e-4)
    # Each weight by itself; together they would be compared through the inverse of a singular matrix.
    scaled = (draws(args) - mean) / np.sqrt(np.diag(covariance))
    assert min(scipy.stats.kstest(column, "norm").pvalue for column in scaled.T) > RATE / shape[1]


def locations(x, y=None, mask=True, power=1.0):
    """Locations with a location; several data sites, some masked and some scaled; signs in affine transforms."""
    numpyro.sample("clock", dist.Normal(0.0, 1.0))
    mu = numpyro.sample("mu", dist.Normal(1.0, 2.0))
    affine = dist.transforms.AffineTransform(mu, -0.5)
    a = numpyro.sample("a", dist.TransformedDistribution(dist.Normal(0.0, jnp.ones(3)), affine))
    slope = numpyro.sample("slope", dist.Normal(mu - a[0], 1.5))
    numpyro.deterministic("first and slope", a[0] + 2 * slope)
    mean = a[jnp.arange(x.shape[0]) % 3] + slope * x
    with numpyro.plate("data", x.shape[0]), handlers.mask(mask=mask), handlers.scale(scale=power):
        numpyro.sample("y", dist.Normal(mean, 0.6), obs=None if y is None else y[0])
    numpyro.sample("z", dist.Normal(2.0 * a - mu, 0.9).to_event(1), obs=None if y is None else y[1])


def test_draws_of_hierarchies_with_masks_and_scales_are_exact():
    """Against the joint normal distribution written as one precision matrix; masked data are NaN."""
    x, mask = X[:, 0], np.array([True, True, False, True, True, False, True])
    y = np.where(mask, np.sin(x), np.nan).astype(np.float32), np.array([0.5, -1.0, 2.0], np.float32)
    model = infer.collapse(locations, ["slope", "a", "mu"], x, y, mask=mask, power=0.4)
    drawn = drawn_at(partial(model, mask=mask, power=0.4), (x, y), {"clock": 1.0}, "clock")
    # Unknowns mu, a_0, a_1, a_2, slope: every factor is row @ unknowns ~ N(value, sd^2)^power.
    eye, index = np.eye(5), np.arange(7) % 3
    rows = [(eye[0], 1.0, 2.0, 1.0)]
    rows += [(eye[1 + k] - eye[0], 0.0, 0.5, 1.0) for k in range(3)]
    rows += [([-1, 1, 0, 0, 1], 0.0, 1.5, 1.0)]
    rows += [(eye[1 + index[i]] + x[i] * eye[4], float(y[0][i]), 0.6, 0.4) for i in np.flatnonzero(mask)]
    rows += [(2 * eye[1 + k] - eye[0], float(y[1][k]), 0.9, 1.0) for k in range(3)]
    matrix, value, sd, power = (np.array(part, float) for part in zip(*rows, strict=True))
    covariance = np.linalg.inv(matrix.T @ (matrix * (power / sd**2)[:, None]))
    mean = covariance @ matrix.T @ (power / sd**2 * value)
    np.testing.assert_allclose(drawn["first and slope"], drawn["a"][:, 0] + 2 * drawn["slope"], atol=1e-5)
    assert_normal(np.column_stack([drawn["mu"], drawn["a"], drawn["slope"]]), mean, covariance)


# -- refusals ------------------------------------------------------------------------------------------------


def regression(x, y=None):
    tau = numpyro.sample("tau", dist.HalfCauchy(1.0))
    c = numpyro.sample("c", dist.Normal(0.0, 1.0))
    w = numpyro.sample("w", dist.Normal(0.5 * c, tau).expand([3]).to_event(1))
    numpyro.sample("y", dist.Normal(jnp.tanh(c * x) @ w, 0.4).to_event(1), obs=y)


def hierarchy():
    group = numpyro.sample(
        "group", dist.Normal(numpyro.sample("w", unit()), numpyro.sample("s", dist.HalfNormal(1.0)))
    )
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
    (of_one(lambda w: dist.Normal(w, 1.0), lambda: dist.Laplace(0.0, 1.0)), ["w"], "a Laplace prior"),
    (of_one(lambda w: dist.Normal(w, 1.0), lambda: dist.Bernoulli(0.5)), ["w"], "a BernoulliProbs prior"),
    (of_one(lambda w: dist.Normal(w, 1.0)), ["w"], "Leave at least one"),
    (of_one(lambda w: dist.Normal(jnp.tanh(w), 1.0)), ["w"], "is not linear"),
    (of_one(lambda w: dist.Normal(jax.nn.relu(w), 1.0)), ["w"], "is not linear"),
    (of_one(lambda w: dist.Normal(1 / w, 1.0)), ["w"], "is not linear"),
    (of_one(lambda w: dist.Normal(0.0, jnp.exp(w))), ["w"], "the scale of 'y' depends"),
    (of_one(lambda w: dist.Poisson(jnp.exp(w)), obs=1), ["w"], "'y' (Poisson) depends"),
    (of_one(lambda w: dist.Normal(w, 1.0).mask(w > 0)), ["w"], "scale or mask of the log density of 'y' depends"),
    (of_one(lambda w: unit()), ["w"], "is the data passed"),
    (hierarchy, ["w"], "name 'group' as well"),
    (penalized, ["w"], "'penalty' (Unit) depends"),
    (spreading, ["w", "v"], "the scale of 'v' depends"),
    (heads(True), ["w"], "give the mean weights of its own"),
    (heads(False), ["w", "u"], "the scale of 'y' depends"),
    (lambda: regression(X, Y), ["b"], "'b'"),
    (lambda: regression(X, Y), ["tau"], "HalfCauchy prior"),
    (lambda: regression(X), ["w"], "'y'"),
    *((lambda: regression(X, Y), names, "sequence of distinct site names") for names in ("w", [], ["w", "w"], [1])),
]  # fmt: skip


@pytest.mark.parametrize(("model", "sites", "fragment"), REFUSED)
def test_models_that_do_not_fit_are_refused(model, sites, fragment):
    with refused("sites", fragment):
        infer.collapse(model, sites)


def test_linearity_that_is_measured_needs_data():
    """A linear map is known from the program, whatever the data; one that has to be measured is not."""

    def measured(x, y):
        c, w = (numpyro.sample(name, dist.Normal(0.0, 1.0)) for name in "cw")
        numpyro.sample("y", dist.Normal(jnp.where(w > 0, 1.0, 1.0) * w * x[:, 0] + c, 1.0).to_event(1), obs=y)

    at = {"tau": 0.7, "c": 1.3}
    jax.jit(lambda x: log_density(infer.collapse(regression, ["w"], x, Y), (x, Y), {}, at)[0])(X)
    with refused("model_args", "traced by a transformation"):
        jax.jit(lambda x: log_density(infer.collapse(measured, ["w"], x, Y), (x, Y), {}, at)[0])(X)
