"""Local reparameterization and flipout: the expectation of one draw for all rows, less variance, rows that mix."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import lax, random
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.contrib.module import random_flax_module
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoMultivariateNormal, AutoNormal
from scipy import stats

import numpyro_bnn as bnn
from numpyro_bnn import nn, priors
from numpyro_bnn.guides import AutoMeanField, TraceFlipout_ELBO, TraceLocalReparam_ELBO
from numpyro_bnn.guides.elbo import row_independence
from numpyro_bnn.guides.elbo.row_independence import find_uses
from numpyro_bnn.guides.elbo.weight_uses import Piece, _signs

LOCAL, FLIPOUT = "local reparameterization", "flipout"
ROWS = 12
COUNT = 2000  # draws of an estimator
_draws = np.random.default_rng(0)
X = _draws.normal(size=(ROWS, 3)).astype(np.float32)
Y = np.sin(X[:, 0])
LABELS = (X[:, 1] > 0).astype(np.int32)
IMAGES = _draws.normal(size=(6, 6, 6, 1)).astype(np.float32)


def weight(name, *shape, scale=1.0):
    return numpyro.sample(name, dist.Normal(0.0, scale).expand(shape).to_event(len(shape)))


def observe(mean, y, size=None):
    with numpyro.plate("data", size or len(y), subsample_size=len(y)):
        numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)


# ----------------------------------------------------------------------------------------------- models


def centered(x, y):
    tau = numpyro.sample("tau", dist.LogNormal(-1.0, 0.3))
    w = weight("w", 3, 4, scale=tau)
    b = weight("b", 4)
    v = numpyro.sample("v", dist.Normal(numpyro.sample("mu", dist.Normal(0.0, 1.0)), tau).expand([4]).to_event(1))
    observe(jnp.tanh(x @ w + b) @ v + numpyro.sample("a", dist.Normal(0.0, 1.0)), y)


def noncentered(x, y):
    net = bnn.random_network("net", nn.MLP([4, 1], "tanh"), x.shape[1:], priors.Hierarchical())
    observe(net(x)[..., 0], y)


def images(x, y):
    """A convolution of JAX, and one of ours, which may be a product with patches."""
    dims = ("NHWC", "HWIO", "NHWC")
    h = lax.conv_general_dilated(x, weight("kernel", 3, 3, 1, 3), (1, 1), "SAME", dimension_numbers=dims)
    h = jax.nn.relu(h + weight("bias", 3))
    h = lax.reduce_window(h, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    h = lax.conv_general_dilated(h, weight("deep", 2, 2, 3, 2), (1, 1), "SAME", dimension_numbers=dims)
    layers = [nn.Conv2d(2, 2), nn.Activation("tanh"), nn.Flatten(), nn.Dense(2)]
    net = bnn.random_network("net", nn.Sequential(layers), h.shape[1:], priors.Normal())
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Categorical(logits=net(h)), obs=y)


def subsampled(x, y):
    """A plate of the data, a local latent variable for every row."""
    w, v = weight("w", 3, 4), weight("v", 4)
    with numpyro.plate("data", len(x), subsample_size=5) as i:
        u = numpyro.sample("u", dist.Normal(0.0, 0.5))
        numpyro.sample("y", dist.Normal(jnp.tanh(x[i] @ w) @ v + u, 1.0), obs=y[i])


def used_twice(x, y):
    w, v = weight("w", 3, 3), weight("v", 3)
    observe(jnp.tanh(jnp.tanh(x @ w) @ w) @ v, y)


def normalized(x, y):
    net = bnn.random_network(
        "net", nn.Sequential([nn.Dense(3), nn.BatchNorm(), nn.Activation("tanh"), nn.Dense(1)]), (3,), priors.Normal()
    )
    observe(net(x)[..., 0], y)


def attention(x, y):
    """Three sequences of four tokens, which attend to one another."""
    w, v = weight("w", 3, 4), weight("v", 4)
    h = jnp.tanh(x.reshape(-1, 3) @ w).reshape(3, 4, 4)
    h = jax.nn.softmax(h @ h.transpose(0, 2, 1)) @ h
    numpyro.sample("y", dist.Normal(h @ v, 1.0).to_event(1), obs=y.reshape(3, 4))


def by_hand(x, y):
    """Likelihood in a factor, group effects, a transposed weight, a loop over one data point."""
    w, effect = weight("w", 2, 3), weight("effect", 4)
    logits = jax.vmap(lambda row: w @ row)(x) * 1.5 + effect[jnp.arange(len(x)) % 4][:, None]
    numpyro.factor("likelihood", 2.0 * jax.nn.log_softmax(logits)[jnp.arange(len(x)), y].mean() * len(x))


def recurrent(x, y):
    u, w, v = weight("u", 1, 4), weight("w", 4, 4), weight("v", 4)
    start = jnp.zeros((len(x), 4))
    h, _ = lax.scan(lambda h, x: (jnp.tanh(x[:, None] @ u + h @ w), None), start, x.T)
    observe(h @ v, y)


def expected(model, kernel):
    """What is done to the sites of a model, where ``kernel`` is done to a kernel."""
    return {
        centered: {"tau": "plain", "w": kernel, "b": kernel, "mu": "plain", "v": kernel, "a": kernel},
        noncentered: {
            f"net/Dense_{k}.{part}": "plain" if part == "kernel_scale" else kernel
            for k in range(2)
            for part in ("kernel_scale", "kernel_base", "bias")
        },
        images: {
            "kernel": FLIPOUT,
            "bias": kernel,
            "deep": FLIPOUT,
            "net/Conv2d_0.kernel": FLIPOUT,
            "net/Conv2d_0.bias": kernel,
            "net/Dense_0.kernel": kernel,
            "net/Dense_0.bias": kernel,
        },
        subsampled: {"w": kernel, "v": kernel, "u": "plain"},
        used_twice: {"w": "plain", "v": kernel},
        normalized: {
            "net/Dense_0.kernel": "plain",
            "net/Dense_0.bias": "plain",
            "net/BatchNorm_0.scale": kernel,
            "net/BatchNorm_0.bias": kernel,
            "net/Dense_1.kernel": kernel,
            "net/Dense_1.bias": kernel,
        },
        attention: {"w": FLIPOUT, "v": kernel},
        by_hand: {"w": kernel, "effect": kernel},
        recurrent: {"u": "plain", "w": "plain", "v": kernel},
    }[model]


DATA = {images: (IMAGES, LABELS[:6]), by_hand: (X, LABELS)}
MODELS = [centered, noncentered, images, subsampled, used_twice, normalized, attention, by_hand, recurrent]


def data_of(model):
    return tuple(map(jnp.asarray, DATA.get(model, (X, Y))))


def mean_field(model, *args, scale=0.2):
    """Independent normals, positive where the model is, and parameters away from the prior."""
    trace, draws, params = {}, np.random.default_rng(2), {}
    jax.eval_shape(lambda: trace.update(handlers.trace(handlers.seed(model, 0)).get_trace(*args)))
    sites = {n: s for n, s in trace.items() if s["type"] == "sample" and not s["is_observed"]}
    for name, site in sites.items():
        params[f"{name}_loc"] = jnp.asarray(0.4 * draws.normal(size=site["value"].shape))
        params[f"{name}_scale"] = jnp.full(site["value"].shape, scale)

    def guide(*args):
        for name, site in sites.items():
            fn = dist.Normal(numpyro.param(f"{name}_loc"), numpyro.param(f"{name}_scale"))
            fn = fn.to_event(site["fn"].event_dim)
            positive = site["fn"].support is dist.constraints.positive
            numpyro.sample(name, dist.TransformedDistribution(fn, dist.transforms.ExpTransform()) if positive else fn)

    return guide, params


def fit(model, *args, scale=0.2, guide=AutoNormal, **kwargs):
    """A guide of NumPyro and its parameters."""
    guide = guide(model, **({"init_scale": scale} if guide is AutoNormal else {}))
    svi = SVI(model, guide, numpyro.optim.Adam(1e-3), Trace_ELBO())
    return guide, svi.get_params(svi.init(random.key(0), *args, **kwargs))


def draws_of(elbo, model, guide, params, args, count, seed=0):
    """``count`` draws of the loss and of its gradient, (count, 1 + P)."""

    @jax.jit
    @jax.vmap
    def draw(key):
        loss, gradient = jax.value_and_grad(lambda p: elbo.loss(key, p, model, guide, *args))(params)
        return jnp.append(ravel_pytree(gradient)[0], loss)

    return np.asarray(draw(random.split(random.key(seed), count)), np.float64)


def z_scores(a, b):
    """Differences of means in standard errors; columns without variance have to agree."""
    error = np.sqrt(a.var(0) / len(a) + b.var(0) / len(b))
    fixed = error < 1e-6
    np.testing.assert_allclose(a.mean(0)[fixed], b.mean(0)[fixed], rtol=1e-4, atol=1e-4)
    return (a.mean(0) - b.mean(0))[~fixed] / error[~fixed]


def bound(z, rate=1e-4):
    """Largest |z| of as many comparisons with this failure rate for all."""
    return stats.norm.isf(rate / 2 / z.size)


@pytest.mark.parametrize(
    "model", [pytest.param(m, id=m.__name__, marks=[] if m is centered else pytest.mark.slow) for m in MODELS]
)
def test_same_expectation(model):
    """Loss and every gradient component; failure rate 1e-4 per estimator and model."""
    args = data_of(model)
    guide, params = (fit if model is subsampled else mean_field)(model, *args)
    plain = draws_of(Trace_ELBO(), model, guide, params, args, COUNT)
    for elbo, kernel in ((TraceLocalReparam_ELBO(), LOCAL), (TraceFlipout_ELBO(), FLIPOUT)):
        methods = elbo.report(model, guide, params, *args)
        assert {name: how.split(":")[0] for name, how in methods.items()} == expected(model, kernel)
        z = z_scores(draws_of(elbo, model, guide, params, args, COUNT, seed=1), plain)
        assert np.abs(z).max() < bound(z)


# ------------------------------------------------------------------------------------------ rows that mix

B, K = 4, 6
WHOLE, PAIRS, PART, NONE = {0: (B,)}, {0: (2, 2)}, {0: (2,)}, {}
ONES = jnp.ones((K, K))

# Function of h = x @ w, (4, 6), whose outputs are terms -> along what rows may have draws of their own.
FUNCTIONS = {
    "elementwise": (lambda h: jnp.exp(-jnp.abs(jnp.sin(h))) / (1 + h**2), WHOLE),
    "softmax of features": (lambda h: jax.nn.log_softmax(h), WHOLE),
    "softmax of rows": (lambda h: jax.nn.log_softmax(h, axis=0), NONE),
    "sum of terms": (lambda h: -2.0 * jnp.sum(h**2), WHOLE),
    "mean of terms": (lambda h: jnp.mean(jnp.tanh(h)) / 3, WHOLE),
    "square of a mean": (lambda h: jnp.mean(h, 0) ** 2, NONE),
    "centered rows, linear": (lambda h: (h - h.mean(0)) @ ONES, WHOLE),
    "centered rows, squared": (lambda h: (h - h.mean(0)) ** 2, NONE),
    "product with a mean": (lambda h: h * h.mean(0), NONE),
    "Gram matrix of rows": (lambda h: jnp.exp(h @ h.T), NONE),
    "Gram matrix of features": (lambda h: jnp.exp(h.T @ h), NONE),
    "outer product within rows": (lambda h: jnp.tanh(jnp.einsum("bi,bj->bij", h, h)), WHOLE),
    "plain product": (lambda h: jnp.tanh(h) @ ONES, WHOLE),
    "mixing product": (lambda h: jnp.tanh(jnp.ones((2, B)) @ h), NONE),
    "mixing product, linear": (lambda h: jnp.ones((2, B)) @ h, WHOLE),
    "transposed and back": (lambda h: jnp.sin(jnp.tanh(h).T.reshape(2, 3, B)).transpose(2, 0, 1) ** 2, WHOLE),
    "rows split and merged": (lambda h: jnp.sin(jnp.tanh(h.reshape(2, 2, K)).reshape(B, K)), PAIRS),
    "rows mixed in pairs": (lambda h: jnp.cumsum(h.reshape(2, 2, K), 1) ** 2, PART),
    "rows and features merged": (lambda h: jnp.sin(h.reshape(-1)).reshape(B, K), WHOLE),
    "maximum of features": (lambda h: h.max(1), WHOLE),
    "maximum of rows": (lambda h: h.max(0), NONE),
    "shifted rows": (lambda h: h[1:] * h[:-1], NONE),
    "slice of features": (lambda h: jnp.exp(h[:, 1:3]) + jnp.flip(h, 1)[:, :2], WHOLE),
    "flipped rows": (lambda h: h * h[::-1], NONE),
    "sorted features": (lambda h: jnp.sort(h, 1) ** 2, WHOLE),
    "sorted rows": (lambda h: jnp.sort(h, 0) ** 2, NONE),
    "lookup in every row": (lambda h: jnp.exp(h[jnp.arange(B), jnp.array([0, 2, 1, 1])]), WHOLE),
    "lookup of a row": (lambda h: h[jnp.array([0, 0, 1, 2])] * h, NONE),
    "take along axis": (lambda h: jnp.take_along_axis(jax.nn.log_softmax(h), jnp.ones((B, 1), int), 1), WHOLE),
    "concatenated features": (lambda h: jnp.concatenate([h, jnp.tanh(h)], 1) ** 2, WHOLE),
    "concatenated rows": (lambda h: jnp.cumsum(jnp.concatenate([h**2, jnp.sin(h)], 0), 0), WHOLE),
    "concatenated rows, squared": (lambda h: jnp.concatenate([h, 2 * h], 0) ** 2, NONE),  # more than needed
    "where": (lambda h: jnp.where(h > 0, h, jnp.expm1(h)) ** 2, WHOLE),
    "where decided by the mean": (lambda h: jnp.where(h.mean(0) > 0, h, h**2), NONE),
    "loop": (lambda h: lax.fori_loop(0, 3, lambda _, h: jnp.sin(h), h), NONE),
    "linear algebra": (lambda h: jnp.linalg.inv(h[:, :4] + 9 * jnp.eye(4)), NONE),
    "dot over vmap": (lambda h: jax.vmap(lambda row: jnp.vdot(row, jnp.sin(row)))(h), WHOLE),
    "pooling within rows": (lambda h: lax.reduce_window(h, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID") ** 2, WHOLE),
    "pooling over rows": (lambda h: lax.reduce_window(h, -jnp.inf, lax.max, (2, 1), (2, 1), "VALID"), NONE),
    "convolution over rows": (lambda h: jnp.tanh(jnp.convolve(h[:, 0], jnp.ones(2))), NONE),
}


def rows_kept(fn):
    """Pieces of the row axis along which rows may have draws of their own, by output axis."""
    x = jnp.ones((B, 3))
    closed = jax.make_jaxpr(lambda w: fn(x @ w))(jnp.ones((3, K)))
    found = find_uses(closed, [True], {"w": 3 * K}, ["w"], "example")
    pieces = found.uses["w"].rows if found.uses else {}
    return {axis: tuple(p.size for p in parts if p.fresh) for axis, parts in pieces.items()}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_that_mix_are_found(name):
    fn, kept = FUNCTIONS[name]
    assert rows_kept(fn) == kept


@pytest.mark.parametrize("name", [name for name, (_, kept) in FUNCTIONS.items() if kept])
def test_rows_that_are_kept_apart_do_not_mix(name):
    """Expectations are right if the sum of terms is a sum over rows: its mixed second derivatives are 0."""
    fn, kept = FUNCTIONS[name]
    with jax.enable_x64(True):
        h = jnp.asarray(np.random.default_rng(1).normal(size=(B, K)))
        second = np.asarray(jax.jit(jax.hessian(lambda h: jnp.sum(fn(h))))(h))
    row = np.arange(B) // (B // np.prod(kept[0]))  # rows that share a draw
    apart = row[:, None] != row[None, :]
    assert np.abs(second.transpose(0, 2, 1, 3)[apart]).max() < 1e-12


# ---------------------------------------------------------------------------------------------------- KL


def gaussian_kl(loc, scale, prior_loc, prior_scale):
    ratio = (scale / prior_scale) ** 2
    return 0.5 * np.sum(ratio + ((loc - prior_loc) / prior_scale) ** 2 - 1 - np.log(ratio))


def test_divergences_are_exact():
    """Without a likelihood the loss is KL(q || p): known, and without variance, with expanded sites and scales."""

    def model():
        numpyro.sample("event", dist.Normal(0.5, 2.0).expand([3, 2]).to_event(2))
        numpyro.sample("batch", dist.Normal(jnp.zeros(2), jnp.array([1.0, 3.0])))
        with numpyro.plate("plate", 10, subsample_size=5):
            numpyro.sample("local", dist.Normal(1.0, 2.0))
        numpyro.factor("likelihood", 0.0)

    def guide():
        numpyro.sample("event", dist.Normal(jnp.ones((3, 2)), 0.3).to_event(2))
        numpyro.sample("batch", dist.Normal(jnp.ones(2), 0.5))
        with numpyro.plate("plate", 10, subsample_size=5):
            numpyro.sample("local", dist.Normal(0.0, 0.1))

    exact = gaussian_kl(np.ones(6), 0.3, 0.5, 2.0) + gaussian_kl(np.ones(2), 0.5, 0.0, np.array([1.0, 3.0]))
    exact += gaussian_kl(np.zeros(10), 0.1, 1.0, 2.0)
    with pytest.warns(UserWarning, match="no likelihood depends on it"):
        losses = draws_of(TraceFlipout_ELBO(), model, guide, {"unused": 0.0}, (), 5)[:, -1]
    np.testing.assert_allclose(losses, exact, rtol=1e-5)


@pytest.mark.slow
def test_divergences_without_formula_are_drawn():
    """Scaled priors, masks, other families: E[log p - log q] from the draw; failure rate 1e-4."""

    def model():
        with handlers.scale(scale=0.5):
            numpyro.sample("scaled", dist.Normal(0.0, 1.0))
        numpyro.sample("masked", dist.Normal(0.0, 1.0).expand([2]).mask(jnp.array([True, False])).to_event(1))
        numpyro.sample("heavy", dist.StudentT(4.0, 0.0, 1.0))
        numpyro.sample("gamma", dist.Gamma(2.0, 2.0))
        numpyro.factor("likelihood", 0.0)

    def guide():
        numpyro.sample("scaled", dist.Normal(0.3, 0.5))
        numpyro.sample("masked", dist.Normal(0.3 * jnp.ones(2), 0.5).to_event(1))
        numpyro.sample("heavy", dist.Normal(0.3, 0.5))
        numpyro.sample("gamma", dist.Gamma(3.0, 2.0))

    with pytest.warns(UserWarning, match="its guide is a Gamma"):
        ours = draws_of(TraceLocalReparam_ELBO(), model, guide, {"unused": 0.0}, (), COUNT)
    z = z_scores(ours, draws_of(Trace_ELBO(), model, guide, {"unused": 0.0}, (), COUNT, seed=1))
    assert np.abs(z).max() < bound(z)


def structured_guide(x, y):
    """The scale is drawn given the weights: their divergence is no function of the scale alone."""
    loc = numpyro.param("loc", jnp.zeros((3, 4)))
    w = numpyro.sample("w", dist.Normal(loc, 0.3).to_event(2))
    tau = numpyro.sample("tau", dist.LogNormal(-1.0 + jnp.mean(w**2), 0.2))
    numpyro.sample("v", dist.Normal(numpyro.param("v_loc", jnp.ones(4)) * tau, 0.3 * tau).to_event(1))


def hierarchical(x, y):
    tau = numpyro.sample("tau", dist.LogNormal(-1.0, 0.3))
    observe(jnp.tanh(x @ weight("w", 3, 4, scale=tau)) @ weight("v", 4, scale=tau), y)


def test_guide_with_dependent_sites():
    """q(tau | w) keeps `w` plain and its divergence drawn; q(v | tau) is exact given tau. Failure rate 1e-4."""
    args, params = data_of(hierarchical), {"loc": 0.1 * jnp.ones((3, 4)), "v_loc": jnp.ones(4)}
    elbo = TraceLocalReparam_ELBO()
    assert elbo.report(hierarchical, structured_guide, params, *args) == {
        "w": "plain: the guide of 'tau' depends on it",
        "tau": "plain: its guide is a LogNormal, not independent normals",
        "v": LOCAL,
    }
    ours = draws_of(elbo, hierarchical, structured_guide, params, args, COUNT)
    z = z_scores(ours, draws_of(Trace_ELBO(), hierarchical, structured_guide, params, args, COUNT, seed=1))
    assert np.abs(z).max() < bound(z)


def test_divergence_from_a_prior_that_is_drawn_from_the_site():
    """q(w) = N(0, 1), log tau | w ~ N(w / 2, 0.1^2), prior w | tau ~ N(0, tau^2): the divergence by formula given tau
    would be exp(0.52) / 2 in the place of E w^2 / (2 tau^2) = exp(0.52). Failure rate 6e-5."""

    def model():
        tau = numpyro.sample("tau", dist.LogNormal(0.0, 1.0))
        numpyro.sample("w", dist.Normal(0.0, tau))

    def guide():
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        numpyro.sample("tau", dist.LogNormal(0.5 * w, 0.1))

    with pytest.warns(UserWarning, match="every site is drawn once"):
        losses = draws_of(TraceLocalReparam_ELBO(), model, guide, {"unused": 0.0}, (), COUNT)[:, -1]
    of_tau = 0.5 * (0.1**2 + 0.25 - 1) - np.log(0.1)
    exact = of_tau - 0.5 + np.exp(0.52)
    assert abs(losses.mean() - exact) < 4 * losses.std() / COUNT**0.5


def test_factors_of_the_guide():
    """A factor of the guide may depend on weights: it sees their plain draw. Failure rate 1e-4."""

    def guide(x, y):
        w = numpyro.sample("w", dist.Normal(numpyro.param("loc", jnp.zeros((3, 4))), 0.3).to_event(2))
        z = numpyro.sample("z", dist.Normal(0.0, 1.0), infer={"is_auxiliary": True})
        numpyro.factor("r", -jnp.sum((w - z) ** 2))

    def model(x, y):
        observe(jnp.tanh(x @ weight("w", 3, 4)).sum(-1), y)

    args, params, elbo = data_of(model), {"loc": 0.1 * jnp.ones((3, 4))}, TraceFlipout_ELBO()
    assert elbo.report(model, guide, params, *args) == {"w": FLIPOUT}
    ours = draws_of(elbo, model, guide, params, args, COUNT)
    z = z_scores(ours, draws_of(Trace_ELBO(), model, guide, params, args, COUNT, seed=1))
    assert np.abs(z).max() < bound(z)


# ---------------------------------------------------------------------------------------------- variance


FLIPOUT_USES = {
    "dense": (2, lambda x, w: x @ w),
    "by position": (2, lambda x, w: (jnp.stack([x, x, x], 1) @ w).sum(1) / 3),
    "broadcast": (1, lambda x, w: 0.0 * x + w[0]),
}


@pytest.mark.parametrize("use", FLIPOUT_USES)
def test_outputs_of_a_row_have_signs_of_their_own(use):
    """The loss sum_b f_b0 f_b1 with weights w_0, w_1 ~ N(0, 1) of one input to two outputs, N = 400 equal rows.

    Signs by row and output: sum_b t_b0 t_b1 w_0 w_1, variance N. Signs by row alone: N w_0 w_1, variance N^2.
    Prior and guide agree, so that nothing else is random. The variance of 300 draws has a relative standard error of
    sqrt(26 / 300) = 0.3: it is below 5 N, and N^2 = 400 N would not be.
    """
    inputs, enter = FLIPOUT_USES[use]

    def model(x):
        f = enter(x, weight("w", inputs, 2))
        with numpyro.plate("data", len(x)):
            numpyro.factor("product", f[:, 0] * f[:, 1])

    def guide(x):
        numpyro.sample("w", dist.Normal(numpyro.param("loc", jnp.zeros((inputs, 2))), 1.0).to_event(2))

    args, params = (jnp.tile(jnp.array([1.0, 0.0]), (400, 1)),), {"loc": jnp.zeros((inputs, 2))}
    assert TraceFlipout_ELBO().report(model, guide, params, *args) == {"w": FLIPOUT}
    losses = draws_of(TraceFlipout_ELBO(), model, guide, params, args, 300)[:, -1]
    assert 0.1 * 400 < losses.var() < 5 * 400


@pytest.mark.parametrize("rows", [8, 70])
def test_signs_of_all_rows_and_outputs_are_uncorrelated(rows):
    """Means and correlations over 4000 keys; one in 1e-8 exceeds 5.7 standard errors, of at most 9900."""
    axes = {"w": [[Piece(rows, True)], [Piece(2, True)]]}
    signs = jax.vmap(lambda key: _signs(key, axes)["w"])(random.split(random.key(0), 4000))
    flat = np.asarray(signs, np.float64).reshape(4000, -1)
    assert set(np.unique(flat)) == {-1.0, 1.0}
    assert np.abs(flat.mean(0)).max() < 5.7 / 4000**0.5
    assert np.abs(flat.T @ flat / 4000 - np.eye(2 * rows)).max() < 5.7 / 4000**0.5


@pytest.mark.slow
def test_gradient_variance_is_at_most_half():
    """Two-layer network, B = 128 of 1000 rows: summed variance of the gradient, 500 draws.

    The ratios are near 0.1, with a relative standard error near 0.1: the limit cannot be met by chance.
    """
    x = np.random.default_rng(0).normal(size=(128, 5)).astype(np.float32)
    args = jnp.asarray(x), jnp.asarray(np.sin(x[:, 0]))

    def model(x, y):
        net = bnn.random_network("net", nn.MLP([20, 20, 1], "relu"), x.shape[1:], priors.Normal())
        observe(net(x)[..., 0], y, size=1000)

    guide, params = mean_field(model, *args, scale=0.1)
    variance = {
        elbo: draws_of(elbo(), model, guide, params, args, 500)[:, :-1].var(0).sum()
        for elbo in (Trace_ELBO, TraceLocalReparam_ELBO, TraceFlipout_ELBO)
    }
    assert variance[TraceLocalReparam_ELBO] < 0.5 * variance[Trace_ELBO]
    assert variance[TraceFlipout_ELBO] < 0.5 * variance[Trace_ELBO]


@pytest.mark.parametrize(("mu", "s"), [(1.0, 1.0), (0.5, 2.0)])
def test_square_of_a_normal(mu, s):
    """d/dmu of E[z^2], z ~ N(mu, s^2): score function 14 mu^2 + 15 s^2 + mu^4 / s^2, reparameterized 4 s^2.

    A million draws. The variance of a variance needs the fourth moment, taken from the draws; 5 standard errors.
    """
    z = mu + s * np.random.default_rng(0).normal(size=1_000_000)

    def model():
        numpyro.factor("square", numpyro.sample("z", dist.Normal(0.0, 1.0).mask(False)) ** 2)

    def guide():
        numpyro.sample("z", dist.Normal(numpyro.param("mu", mu), s).mask(False))

    key = random.split(random.key(0), 100_000)
    elbo = Trace_ELBO()
    gradient = jax.jit(jax.vmap(jax.grad(lambda p, k: -elbo.loss(k, p, model, guide)), (None, 0)))
    reparameterized = np.asarray(gradient({"mu": jnp.asarray(mu)}, key)["mu"], np.float64)
    for draws, exact in (
        (z**2 * (z - mu) / s**2, 14 * mu**2 + 15 * s**2 + mu**4 / s**2),
        (reparameterized, 4 * s**2),
    ):
        squares = (draws - draws.mean()) ** 2
        assert abs(squares.mean() - exact) < 5 * squares.std() / len(draws) ** 0.5


def pooled():
    """Two rows of four positions each; the likelihood is of a sum over positions."""
    numpyro.factor("sum", -jnp.sum((jnp.ones((2, 4, 3)) @ weight("w", 3, 2)).sum(1) ** 2))


def unit_guide():
    numpyro.sample("w", dist.Normal(jnp.zeros((3, 2)), 1.0).to_event(2))


@pytest.mark.parametrize("elbo", [TraceLocalReparam_ELBO(), TraceFlipout_ELBO()], ids=["local", "flipout"])
def test_positions_of_a_row_share_their_weights(elbo):
    """The variance of a sum over 4 positions is 4^2 * 3, not 4 * 3: E of 4 squares; failure rate 6e-5."""
    losses = draws_of(elbo, pooled, unit_guide, {"unused": 0.0}, (), COUNT)[:, -1]
    assert abs(losses.mean() - 4 * 16 * 3) < 4 * losses.std() / COUNT**0.5


@pytest.mark.parametrize("elbo", [TraceLocalReparam_ELBO(), TraceFlipout_ELBO()], ids=["local", "flipout"])
def test_positions_with_other_inputs_see_other_weights(elbo):
    """The sum over positions e_1, e_2, e_3 is w_1 + w_2 + w_3, of variance 3: E of 4 squares; failure rate 6e-5."""

    def model():
        numpyro.factor("sum", -jnp.sum((jnp.stack([jnp.eye(3)] * 2) @ weight("w", 3, 2)).sum(1) ** 2))

    losses = draws_of(elbo, model, unit_guide, {"unused": 0.0}, (), COUNT)[:, -1]
    assert abs(losses.mean() - 4 * 3) < 4 * losses.std() / COUNT**0.5


def test_unnoticed_mixing_would_be_wrong(monkeypatch):
    """The same without the analysis: positions with weights of their own have the wrong expectation."""
    monkeypatch.setattr(row_independence._Search, "_mix", lambda self, label, equation: None)
    elbo = TraceLocalReparam_ELBO()
    assert elbo.report(pooled, unit_guide, {}) == {"w": LOCAL}
    losses = draws_of(elbo, pooled, unit_guide, {"unused": 0.0}, (), COUNT)[:, -1]
    assert abs(losses.mean() - 4 * 4 * 3) < 4 * losses.std() / COUNT**0.5


def test_rows_without_input_have_finite_gradients():
    """A dead input: the output has no variance, and the square root no derivative."""

    def model(x, y):
        w = weight("w", 3, 2)
        observe(jnp.tanh(x @ w).sum(-1), y)

    args = jnp.zeros((4, 3)), jnp.ones(4)
    guide, params = mean_field(model, *args)
    draws = draws_of(TraceLocalReparam_ELBO(), model, guide, params, args, 3)
    assert np.isfinite(draws).all()


# ------------------------------------------------------------------------------------------------ the host


@pytest.mark.parametrize("elbo", [pytest.param(TraceLocalReparam_ELBO, marks=pytest.mark.slow), TraceFlipout_ELBO])
def test_particles(elbo):
    """The mean of particles, vectorized or in a loop, is the mean of losses at their keys."""
    args = data_of(hierarchical)
    guide, params = mean_field(hierarchical, *args)
    keys = random.split(random.key(3), 4)

    def loss_at(key, elbo):
        return elbo.loss(key, params, hierarchical, guide, *args)

    single = jax.jit(jax.vmap(lambda key: loss_at(key, elbo())))(keys).mean()
    for vectorized in (True, False, lambda fn, keys: jax.vmap(fn)(keys)):
        many = elbo(num_particles=4, vectorize_particles=vectorized)
        found = jax.jit(lambda key, many=many: loss_at(key, many))(random.key(3))
        np.testing.assert_allclose(found, single, rtol=1e-5)


@pytest.mark.parametrize(
    "make_key", [random.key, pytest.param(random.PRNGKey, marks=pytest.mark.slow)], ids=["typed", "legacy"]
)
def test_svi(make_key):
    """It trains, under our mean field; evaluation repeats."""
    args = data_of(noncentered)
    guide = AutoMeanField(noncentered)
    svi = SVI(noncentered, guide, numpyro.optim.Adam(0.02), TraceFlipout_ELBO(num_particles=2))
    result = svi.run(make_key(0), 150, *args, progress_bar=False)
    assert np.isfinite(result.losses).all()
    assert result.losses[-20:].mean() < result.losses[:20].mean()
    state, evaluate = jax.jit(svi.update)(result.state, *args)[0], jax.jit(svi.evaluate)
    assert evaluate(state, *args) == evaluate(state, *args)


@pytest.mark.slow
def test_flax_module():
    """A module of another library, with and without non-centered priors."""
    flax = pytest.importorskip("flax.linen")

    class Net(flax.Module):
        @flax.compact
        def __call__(self, x):
            x = flax.avg_pool(flax.relu(flax.Conv(3, (3, 3))(x)), (2, 2), (2, 2))
            return flax.Dense(1)(flax.LayerNorm()(x.reshape(len(x), -1)))

    def model(x, y):
        net = random_flax_module("net", Net(), priors.Hierarchical(), input_shape=(1, 6, 6, 1))
        observe(net(x)[:, 0], y)

    args = jnp.asarray(IMAGES), jnp.asarray(Y[:6])
    for form, ending in ((model, ""), (priors.noncenter(model), "_base")):
        guide, params = fit(form, *args) if form is model else mean_field(form, *args)
        methods = TraceLocalReparam_ELBO().report(form, guide, params, *args)
        assert methods[f"net/Conv_0.kernel{ending}"] == FLIPOUT
        assert methods[f"net/Dense_0.kernel{ending}"] == LOCAL
        assert {methods[f"net/{name}"] for name in ("Conv_0.bias", "LayerNorm_0.scale", "Dense_0.bias")} == {LOCAL}
        assert np.isfinite(
            jax.jit(lambda p, g=guide, f=form: TraceFlipout_ELBO().loss(random.key(0), p, f, g, *args))(params)
        )


def test_reasons():
    """Every way of being plain, in words."""

    def model(x, y):
        hyper = numpyro.sample("hyper", dist.Normal(0.0, 1.0))
        w = numpyro.sample("w", dist.Normal(hyper, 1.0).expand([3, 3]).to_event(2))
        v = weight("v", 3, 3)
        nonlinear = weight("nonlinear", 3, 3)
        matrix = weight("matrix", 3, 3)
        left, right = weight("left", 3, 2), weight("right", 2, 3)
        weight("unused", 2)
        one = weight("one", 3)
        h = x @ w @ v + x @ v + x @ jnp.tanh(nonlinear) + (x[:, :, None] * matrix).sum(1) + x @ (left @ right)
        observe(h.sum(1) + jnp.ones(3) @ one, y)

    args = data_of(model)
    guide, params = mean_field(model, *args)
    methods = TraceLocalReparam_ELBO().report(model, guide, params, *args)
    starts = {
        "hyper": "plain: the prior of 'w' depends on it",
        "w": LOCAL,
        "v": "plain: it is used twice, at ",
        "nonlinear": "plain: it enters `tanh` at ",
        "matrix": "plain: it enters `mul` at ",
        "left": "plain: it meets the random 'right' at ",
        "right": "plain: its rows mix in ",
        "unused": "plain: no likelihood depends on it",
        "one": "plain: it meets a single row at ",
    }
    assert list(methods) == list(starts)
    for name, start in starts.items():
        assert methods[name].startswith(start), methods[name]
    assert "test_guides_elbo.py" in methods["v"]


@pytest.mark.parametrize("guide", [AutoDelta, pytest.param(AutoMultivariateNormal, marks=pytest.mark.slow)])
def test_nothing_to_be_improved_is_said_once(guide):
    args, elbo = data_of(hierarchical), TraceFlipout_ELBO()
    guide, params = fit(hierarchical, *args, guide=guide)
    with pytest.warns(UserWarning, match=r"drawn once for all rows.*'w' plain: its guide is a Delta"):
        loss = elbo.loss(random.key(0), params, hierarchical, guide, *args)
    again = elbo.loss(random.key(0), params, hierarchical, guide, *args)  # a warning would be an error
    assert loss == again
    assert np.isfinite(loss)


def test_mutable_state_is_refused():
    def model():
        numpyro.primitives.mutable("count", jnp.zeros(()))
        numpyro.factor("l", weight("w", 2).sum())

    def guide():
        numpyro.sample("w", dist.Normal(jnp.zeros(2), 1.0).to_event(1))

    with pytest.raises(ValueError, match=r"TraceFlipout_ELBO.*mutable site 'count'"):
        TraceFlipout_ELBO().loss(random.key(0), {}, model, guide)


def test_latent_site_without_guide_is_refused():
    def model():
        numpyro.sample("z", dist.Bernoulli(0.5), infer={"enumerate": "parallel"})
        numpyro.factor("l", weight("w", 2).sum())

    def guide():
        numpyro.sample("w", dist.Normal(jnp.zeros(2), 1.0).to_event(1))

    with pytest.raises(ValueError, match=r"latent site 'z'"):
        TraceFlipout_ELBO().loss(random.key(0), {}, model, guide)


def test_cost_of_a_step():
    """Arithmetic the compiler counts, gradient of a small convolutional network: at most 2.2 times deterministic."""
    net = nn.Sequential([nn.Conv2d(16, 5), nn.Activation("relu"), nn.MaxPool(2), nn.Flatten(), nn.Dense(10)])
    x, y = jnp.ones((64, 12, 12, 1)), jnp.zeros(64, int)

    def model(x, y):
        network = bnn.random_network("net", net, x.shape[1:], priors.Normal())
        with numpyro.plate("data", 1000, subsample_size=len(x)):
            numpyro.sample("y", dist.Categorical(logits=network(x)), obs=y)

    guide, params = mean_field(model, x, y)
    weights = {name: jnp.zeros(shape) for name, shape in net.param_shapes(x.shape[1:]).items()}

    def deterministic(weights):
        return -jnp.sum(jax.nn.log_softmax(net.apply(weights, x))[jnp.arange(64), y])

    def operations(fn, argument):
        return jax.jit(jax.value_and_grad(fn)).lower(argument).compile().cost_analysis()["flops"]

    base = operations(deterministic, weights)
    for elbo in (TraceFlipout_ELBO(), TraceLocalReparam_ELBO()):
        flops = operations(lambda p, e=elbo: e.loss(random.key(0), p, model, guide, x, y), params)
        assert flops < 2.2 * base
