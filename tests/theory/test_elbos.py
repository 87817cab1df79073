"""ELBOs with one draw per row: the expectation of NumPyro's, exact divergences, which
rows share a draw, refusals.
"""

from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from helpers import each, refused
from jax import lax, random
from jax.flatten_util import ravel_pytree
from numpy.testing import assert_allclose as close
from numpyro import handlers
from numpyro.contrib.module import random_flax_module
from numpyro.infer import Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from scipy import stats
from zoo import ZOO

from numpyro_bnn import nn, priors, random_network
from numpyro_bnn.guides import TraceFlipout_ELBO, TraceLocalReparam_ELBO

LOCAL, FLIPOUT = "local reparameterization", "flipout"
COUNT = 2000  # draws of an estimator
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(12, 3)).astype(np.float32)
Y = np.sin(X[:, 0])
LABELS = (X[:, 1] > 0).astype(np.int32)
IMAGES = RANDOM.normal(size=(6, 6, 6, 1)).astype(np.float32)


def weight(name, *shape, scale=1.0):
    return numpyro.sample(
        name, dist.Normal(0.0, scale).expand(shape).to_event(len(shape))
    )


def observe(mean, y):
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def mean_field(model, *args):
    """Independent normals, positive where the model is, at places of our own."""
    guide, draws = AutoNormal(model, prefix=""), np.random.default_rng(2)
    trace = handlers.trace(handlers.seed(guide, 0)).get_trace(*args)
    params = {n: s["value"] for n, s in trace.items() if s["type"] == "param"}
    for name, value in params.items():
        at_loc = name.endswith("loc")
        new = 0.4 * draws.normal(size=value.shape) if at_loc else 0.2
        params[name] = jnp.full(value.shape, new)
    return guide, params


def draws_of(elbo, model, guide, params, args=(), count=COUNT, seed=0):
    """``count`` draws of the gradient and, last, of the loss, (count, P + 1)."""

    @jax.jit
    @jax.vmap
    def draw(key):
        loss, gradient = jax.value_and_grad(
            lambda p: elbo.loss(key, p, model, guide, *args)
        )(params)
        return jnp.append(ravel_pytree(gradient)[0], loss)

    return np.asarray(draw(random.split(random.key(seed), count)), np.float64)


def same_mean(ours, theirs, rate=1e-4):
    """Equal means of all columns, at this rate; of those without variance exactly."""
    error = np.sqrt(ours.var(0) / len(ours) + theirs.var(0) / len(theirs))
    fixed, difference = error < 1e-6, ours.mean(0) - theirs.mean(0)
    close(difference[fixed], 0.0, atol=1e-4 * (1 + np.abs(theirs).max()))
    z = difference[~fixed] / error[~fixed]
    return np.abs(z).max() < stats.norm.isf(rate / 2 / z.size)


# -- expectations ----------------------------------------------------------------------


def centered(x, y):
    tau = numpyro.sample("tau", dist.LogNormal(-1.0, 0.3))
    w, b = weight("w", 3, 4, scale=tau), weight("b", 4)
    v = numpyro.sample(
        "v",
        dist.Normal(numpyro.sample("mu", dist.Normal(0.0, 1.0)), tau)
        .expand([4])
        .to_event(1),
    )
    observe(jnp.tanh(x @ w + b) @ v + numpyro.sample("a", dist.Normal(0.0, 1.0)), y)


def images(x, y):
    """A module of Flax, then a convolution, which may be a product of patches."""
    linen = pytest.importorskip("flax.linen")
    pool = partial(linen.max_pool, window_shape=(2, 2), strides=(2, 2))
    module = linen.Sequential(
        [linen.Conv(3, (3, 3)), linen.relu, pool, linen.LayerNorm()]
    )
    h = random_flax_module("flax", module, priors.Normal(), input_shape=(1, 6, 6, 1))(x)
    layers = [nn.Conv2d(2, 2), nn.Activation("tanh"), nn.Flatten(), nn.Dense(2)]
    net = random_network("net", nn.Sequential(layers), h.shape[1:], priors.Normal())
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Categorical(logits=net(h)), obs=y)


def by_hand(x, y):
    """Likelihood in a factor, effects, a transposed weight, a loop over one point."""
    w, effect = weight("w", 2, 3), weight("effect", 4)
    logits = (
        jax.vmap(lambda row: w @ row)(x) * 1.5 + effect[jnp.arange(len(x)) % 4][:, None]
    )
    numpyro.factor(
        "likelihood",
        2.0 * jax.nn.log_softmax(logits)[jnp.arange(len(x)), y].mean() * len(x),
    )


# Model, its data, sites that are drawn once, sites that always get flipout; the others
# are drawn as the ELBO says.
MODELS = {
    "centered": (centered, (X, Y), {"tau", "mu"}, set()),
    "images": (
        images,
        (IMAGES, LABELS[:6]),
        set(),
        {"flax/layers_0.kernel", "net/Conv2d_0.kernel"},
    ),
    "by hand": (by_hand, (X, LABELS), set(), set()),
}


@each("name", MODELS, fast=["centered"])
def test_loss_and_gradient_have_the_expectation_of_numpyros_elbo(name):
    """Loss and every gradient component; failure rate 1e-4 per estimator and model."""
    model, data, plain, flipout = MODELS[name]
    args = tuple(map(jnp.asarray, data))
    guide, params = mean_field(model, *args)
    expected = draws_of(Trace_ELBO(), model, guide, params, args)
    for elbo, rowwise in (
        (TraceLocalReparam_ELBO(), LOCAL),
        (TraceFlipout_ELBO(), FLIPOUT),
    ):
        report = elbo.report(model, guide, params, *args)
        for site, method in report.items():
            assert method.split(":")[0] == (
                "plain" if site in plain else FLIPOUT if site in flipout else rowwise
            )
        assert same_mean(draws_of(elbo, model, guide, params, args, seed=1), expected)


def test_a_mean_of_integers_has_real_noise():
    """A guide N(0, 0.5^2) whose location is the number 0. Failure rate 1e-4."""

    def model(x, y):
        observe(x[:, :2].sum(1) + jnp.sum(weight("b", 2) * jnp.ones((len(y), 2)), 1), y)

    def guide(x, y):
        scale = numpyro.param("scale", jnp.full(2, 0.5))
        numpyro.sample("b", dist.Normal(0, scale).to_event(1))

    args, params = tuple(map(jnp.asarray, (X, Y))), {"scale": jnp.full(2, 0.5)}
    expected = draws_of(Trace_ELBO(), model, guide, params, args)
    for elbo in (TraceLocalReparam_ELBO(), TraceFlipout_ELBO()):
        assert same_mean(draws_of(elbo, model, guide, params, args, seed=1), expected)


def test_report_gives_the_reason_for_every_plain_site():
    def model(x, y):
        hyper = numpyro.sample("hyper", dist.Normal(0.0, 1.0))
        w = numpyro.sample("w", dist.Normal(hyper, 1.0).expand([3, 3]).to_event(2))
        v = weight("v", 3, 3)
        nonlinear = weight("nonlinear", 3, 3)
        matrix = weight("matrix", 3, 3)
        left, right = weight("left", 3, 2), weight("right", 2, 3)
        weight("unused", 2)
        h = (
            x @ w @ v
            + x @ v
            + x @ jnp.tanh(nonlinear)
            + (x[:, :, None] * matrix).sum(1)
            + x @ (left @ right)
        )
        observe(h.sum(1) + jnp.ones(3) @ weight("single", 3), y)

    args = tuple(map(jnp.asarray, (X, Y)))
    guide, params = mean_field(model, *args)
    report = TraceLocalReparam_ELBO().report(model, guide, params, *args)
    starts = {
        "hyper": "plain: the prior of 'w' depends on it",
        "w": LOCAL,
        "v": "plain: it is used twice, at ",
        "nonlinear": "plain: it enters `tanh` at ",
        "matrix": "plain: it enters `mul` at ",
        "left": "plain: it meets the random 'right' at ",
        "right": "plain: its rows mix in ",
        "unused": "plain: no likelihood depends on it",
        "single": "plain: it meets a single row at ",
    }
    assert list(report) == list(starts)
    for name, start in starts.items():
        assert report[name].startswith(start), report[name]
    assert Path(__file__).name in report["v"]


# -- divergences -----------------------------------------------------------------------


def test_divergences_are_exact():
    """Without a likelihood the loss is KL(q || p), and has no variance."""

    def model():
        numpyro.sample("event", dist.Normal(0.5, 2.0).expand([3, 2]).to_event(2))
        numpyro.sample("batch", dist.Normal(jnp.zeros(2), jnp.array([1.0, 3.0])))
        with numpyro.plate("plate", 10, subsample_size=5):
            numpyro.sample("local", dist.Normal(1.0, 2.0))
        with handlers.scale(scale=0.5):
            numpyro.sample("scaled", dist.Normal(0.0, 1.0))
        numpyro.factor("likelihood", 0.0)

    def guide():
        numpyro.sample("event", dist.Normal(jnp.ones((3, 2)), 0.3).to_event(2))
        numpyro.sample("batch", dist.Normal(jnp.ones(2), 0.5))
        with numpyro.plate("plate", 10, subsample_size=5):
            numpyro.sample("local", dist.Normal(0.0, 0.1))
        with handlers.scale(scale=0.5):
            numpyro.sample("scaled", dist.Normal(2.0, 0.5))

    def gaussian_kl(loc, scale, prior_loc, prior_scale):
        ratio = (scale / prior_scale) ** 2
        return 0.5 * np.sum(
            ratio + ((loc - prior_loc) / prior_scale) ** 2 - 1 - np.log(ratio)
        )

    exact = gaussian_kl(np.ones(6), 0.3, 0.5, 2.0) + gaussian_kl(
        np.ones(2), 0.5, 0.0, np.array([1.0, 3.0])
    )
    exact += gaussian_kl(np.zeros(10), 0.1, 1.0, 2.0) + 0.5 * gaussian_kl(
        2.0, 0.5, 0.0, 1.0
    )
    with pytest.warns(UserWarning, match="no likelihood depends on it"):
        losses = draws_of(TraceFlipout_ELBO(), model, guide, {"unused": 0.0}, count=5)[
            :, -1
        ]
    close(losses, exact, rtol=1e-5)


def test_divergence_from_a_prior_that_is_drawn_from_the_site():
    """q(w) = N(0, 1), log tau | w ~ N(w / 2, 0.1^2), prior w | tau ~ N(0, tau^2): the
    divergence by formula given tau would be exp(0.52) / 2 in the place of E w^2 / (2
    tau^2) = exp(0.52). Failure rate 6e-5.
    """

    def model():
        tau = numpyro.sample("tau", dist.LogNormal(0.0, 1.0))
        numpyro.sample("w", dist.Normal(0.0, tau))

    def guide():
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        numpyro.sample("tau", dist.LogNormal(0.5 * w, 0.1))

    assert TraceLocalReparam_ELBO().report(model, guide, {}) == {
        "w": "plain: the guide of 'tau' depends on it",
        "tau": "plain: its guide is a LogNormal, not independent normals",
    }
    with pytest.warns(UserWarning, match="every site is drawn once"):
        losses = draws_of(TraceLocalReparam_ELBO(), model, guide, {"unused": 0.0})[
            :, -1
        ]
    of_tau = 0.5 * (0.1**2 + 0.25 - 1) - np.log(0.1)
    exact = of_tau - 0.5 + np.exp(0.52)
    assert abs(losses.mean() - exact) < 4 * losses.std() / COUNT**0.5


# -- NumPyro's interface ---------------------------------------------------------------


@pytest.mark.core
def test_particles_are_averaged():
    """The mean of particles, vectorized or looped, is that of losses at their keys."""
    entry = ZOO["line"]
    guide, params = mean_field(entry.model, *entry.args)
    keys = random.split(random.key(3), 4)

    def loss_at(key, **options):
        return TraceFlipout_ELBO(**options).loss(
            key, params, entry.model, guide, *entry.args
        )

    single = jax.jit(jax.vmap(loss_at))(keys).mean()
    for vectorized in (True, False, lambda fn, keys: jax.vmap(fn)(keys)):
        found = jax.jit(
            lambda key, v=vectorized: loss_at(
                key, num_particles=4, vectorize_particles=v
            )
        )(random.key(3))
        close(found, single, rtol=1e-5)


def test_rows_without_input_have_finite_gradients():
    """A dead input: the output has no variance, and the square root no derivative."""
    entry = ZOO["line"]
    args = tuple(map(jnp.zeros_like, entry.args))
    guide, params = mean_field(entry.model, *args)
    assert np.isfinite(
        draws_of(TraceLocalReparam_ELBO(), entry.model, guide, params, args, 3)
    ).all()


def test_nothing_to_be_improved_is_said_once():
    entry, elbo = ZOO["line"], TraceFlipout_ELBO()

    def guide(*args):
        numpyro.sample("w", dist.Delta(jnp.ones(2), event_dim=1))

    def loss():
        return elbo.loss(random.key(0), {}, entry.model, guide, *entry.args)

    with pytest.warns(
        UserWarning, match=r"drawn once for all rows.*'w' plain: its guide is a Delta"
    ):
        jax.eval_shape(loss)
    assert np.isfinite(jax.jit(loss)())  # a second warning would be an error


UNFIT = {
    "a mutable site 'count'": lambda: numpyro.primitives.mutable(
        "count", jnp.zeros(())
    ),
    "the latent site 'z'": lambda: numpyro.sample(
        "z", dist.Bernoulli(0.5), infer={"enumerate": "parallel"}
    ),
}


@pytest.mark.parametrize("what", UNFIT)
def test_models_with_state_or_unguided_sites_are_refused(what):
    def model():
        UNFIT[what]()
        numpyro.factor("l", weight("w", 2).sum())

    with refused("model", what):
        TraceFlipout_ELBO().loss(random.key(0), {}, model, lambda: weight("w", 2))


# -- which rows share a draw -----------------------------------------------------------

BOTH = {"local": TraceLocalReparam_ELBO, "flipout": TraceFlipout_ELBO}


def seen(elbo, terms, shapes, *args):
    """What the likelihood sees of weights N(0, 1): the report, and a function that
    draws values h by name.

    ``terms(name, weight, *args)`` gives h and terms of the likelihood. A parameter at
    zero adds itself times h, which keeps rows apart; the gradient of the bound with
    respect to it is h.
    """

    def prior(shape):
        return dist.Normal(jnp.zeros(shape), 1.0).to_event(len(shape))

    def model(*args):
        for name, shape in shapes.items():
            h, likelihood = terms(name, numpyro.sample(name, prior(shape)), *args)
            numpyro.factor(f"terms {name}", likelihood)
            numpyro.factor(
                f"seen {name}", numpyro.param(f"tilt {name}", jnp.zeros(h.shape)) * h
            )

    def guide(*args):
        for name, shape in shapes.items():
            numpyro.sample(name, prior(shape))

    sizes = {
        name: jax.eval_shape(partial(terms, name), jnp.zeros(shape), *args)[0]
        for name, shape in shapes.items()
    }
    tilts = {f"tilt {name}": jnp.zeros(h.shape) for name, h in sizes.items()}

    def draw(count):
        keys = random.split(random.key(0), count)
        losses = jax.vmap(
            lambda key: jax.grad(lambda at: -elbo.loss(key, at, model, guide, *args))(
                tilts
            )
        )
        found = jax.jit(losses)(keys)
        return {name: np.asarray(found[f"tilt {name}"]) for name in shapes}

    return elbo.report(model, guide, tilts, *args), draw


B, K = 4, 6
# rows with the same number share a draw
APART, PAIRS, SHARED = ((0, 1, 2, 3), (0, 0, 1, 1), (0, 0, 0, 0))

# Function of h = x @ w, (4, 6), whose outputs are terms, and the rows that may have
# draws of their own.
FUNCTIONS = {
    "elementwise": (lambda h: jnp.exp(-jnp.abs(jnp.sin(h))) / (1 + h**2), APART),
    "softmax of features": (lambda h: jax.nn.log_softmax(h), APART),
    "softmax of rows": (lambda h: jax.nn.log_softmax(h, axis=0), SHARED),
    "mean of terms": (lambda h: jnp.mean(jnp.tanh(h)) / 3, APART),
    "square of a mean": (lambda h: jnp.mean(h, 0) ** 2, SHARED),
    "centered rows, linear": (lambda h: (h - h.mean(0)) @ jnp.ones((K, K)), APART),
    "centered rows, squared": (lambda h: (h - h.mean(0)) ** 2, SHARED),
    "Gram matrix of features": (lambda h: jnp.exp(h.T @ h), SHARED),
    "outer product within rows": (
        lambda h: jnp.tanh(jnp.einsum("bi,bj->bij", h, h)),
        APART,
    ),
    "mixing product": (lambda h: jnp.tanh(jnp.ones((2, B)) @ h), SHARED),
    "transposed and back": (
        lambda h: jnp.sin(jnp.tanh(h).T.reshape(2, 3, B)).transpose(2, 0, 1) ** 2,
        APART,
    ),
    "rows split and merged": (
        lambda h: jnp.sin(jnp.tanh(h.reshape(2, 2, K)).reshape(B, K)),
        APART,
    ),
    "rows mixed in pairs": (lambda h: jnp.cumsum(h.reshape(2, 2, K), 1) ** 2, PAIRS),
    "rows and features merged": (lambda h: jnp.sin(h.reshape(-1)).reshape(B, K), APART),
    "maximum of features": (lambda h: h.max(1), APART),
    "maximum of rows": (lambda h: h.max(0), SHARED),
    "shifted rows": (lambda h: h[1:] * h[:-1], SHARED),
    "slice of features": (lambda h: jnp.exp(h[:, 1:3]) + jnp.flip(h, 1)[:, :2], APART),
    "flipped rows": (lambda h: h * h[::-1], SHARED),
    "sorted features": (lambda h: jnp.sort(h, 1) ** 2, APART),
    "sorted rows": (lambda h: jnp.sort(h, 0) ** 2, SHARED),
    "lookup in every row": (
        lambda h: jnp.exp(h[jnp.arange(B), jnp.array([0, 2, 1, 1])]),
        APART,
    ),
    "lookup of a row": (lambda h: h[jnp.array([0, 0, 1, 2])] * h, SHARED),
    "take along axis": (
        lambda h: jnp.take_along_axis(jax.nn.log_softmax(h), jnp.ones((B, 1), int), 1),
        APART,
    ),
    "concatenated rows": (
        lambda h: jnp.cumsum(jnp.concatenate([h**2, jnp.sin(h)], 0), 0),
        APART,
    ),
    "concatenated rows, squared": (
        lambda h: jnp.concatenate([h, 2 * h], 0) ** 2,
        SHARED,
    ),  # more than needed
    "where": (lambda h: jnp.where(h > 0, h, jnp.expm1(h)) ** 2, APART),
    "where decided by the mean": (lambda h: jnp.where(h.mean(0) > 0, h, h**2), SHARED),
    "loop": (lambda h: lax.fori_loop(0, 3, lambda _, h: jnp.sin(h), h), SHARED),
    "linear algebra": (lambda h: jnp.linalg.inv(h[:, :4] + 9 * jnp.eye(4)), SHARED),
    "pooling within rows": (
        lambda h: lax.reduce_window(h, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID") ** 2,
        APART,
    ),
    "pooling over rows": (
        lambda h: lax.reduce_window(h, -jnp.inf, lax.max, (2, 1), (2, 1), "VALID"),
        SHARED,
    ),
    "convolution over rows": (
        lambda h: jnp.tanh(jnp.convolve(h[:, 0], jnp.ones(2))),
        SHARED,
    ),
}


@cache
def rows_of_functions():
    """How each weight is drawn, and its product with equal inputs, (4, 6)."""

    def terms(name, w, x):
        h = x @ w
        return h, FUNCTIONS[name][0](h)

    report, draw = seen(
        TraceLocalReparam_ELBO(),
        terms,
        dict.fromkeys(FUNCTIONS, (3, K)),
        jnp.ones((B, 3)),
    )
    return report, {name: h[0] for name, h in draw(1).items()}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_share_a_draw_where_they_mix(name):
    report, h = (found[name] for found in rows_of_functions())
    rows = FUNCTIONS[name][1]
    assert report.startswith(
        {APART: LOCAL, PAIRS: FLIPOUT, SHARED: "plain: its rows mix in"}[rows]
    )
    same = np.isclose(h[:, None], h[None], rtol=1e-5).all(-1)
    np.testing.assert_array_equal(same, np.equal.outer(rows, rows))


@pytest.mark.parametrize("elbo", BOTH)
def test_positions_of_a_row_see_the_same_weights(elbo):
    """Weights N(0, 1) of 3 inputs: a sum over 4 equal positions has the variance 4^2 3,
    one over e_1, e_2, e_3 has 3.

    The variance of 4 times 2000 draws has a relative standard error of 1.6 %: five of
    them, a failure rate of 6e-7.
    """
    inputs = {"equal": jnp.ones((2, 4, 3)), "different": jnp.stack([jnp.eye(3)] * 2)}

    def terms(name, w):
        h = (inputs[name] @ w).sum(1)
        return h, -jnp.sum(h**2)

    _, draw = seen(BOTH[elbo](), terms, dict.fromkeys(inputs, (3, 2)))
    h = draw(2000)
    assert h["equal"].var() == pytest.approx(48, rel=0.08)
    assert h["different"].var() == pytest.approx(3, rel=0.08)


# Number of inputs of x = (1, 0), and a function of x and the weight that gives two
# outputs.
FLIPOUT_USES = {
    "dense": (2, lambda x, w: x @ w),
    "by position": (2, lambda x, w: (jnp.stack([x, x, x], 1) @ w).sum(1) / 3),
    "broadcast": (1, lambda x, w: 0.0 * x + w[0]),
}


def test_flipout_signs_of_all_rows_and_outputs_are_independent():
    """70 equal rows of two outputs h_bj = t_bj r_b e_j: h_b0 and h_c0, and the products
    h_b0 h_b1 and h_c0 h_c1, have independent signs. 4000 draws, 5.7 standard errors:
    one of at most 9900 correlations exceeds them in 1e-4.
    """
    rows, count = 70, 4000
    uses = {name: (inputs, 2) for name, (inputs, _) in FLIPOUT_USES.items()}

    def terms(name, w, x):
        h = FLIPOUT_USES[name][1](x, w)
        return h, h[:, 0] * h[:, 1]

    report, draw = seen(
        TraceFlipout_ELBO(), terms, uses, jnp.tile(jnp.array([1.0, 0.0]), (rows, 1))
    )
    assert report == dict.fromkeys(uses, FLIPOUT)
    for name, h in draw(count).items():
        signs = np.sign(h).astype(float)
        close(
            np.abs(h), np.abs(h[:, :1]).repeat(rows, 1), rtol=1e-5
        )  # one perturbation
        for flat in (signs.reshape(count, -1), signs.prod(-1)):
            assert np.abs(flat.mean(0)).max() < 5.7 / count**0.5, name
            assert (
                np.abs(flat.T @ flat / count - np.eye(flat.shape[1])).max()
                < 5.7 / count**0.5
            ), name
