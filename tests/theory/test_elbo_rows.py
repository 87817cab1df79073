"""Rows with weights of their own: where ELBOs with one draw per row find them, and what each row sees."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import lax, random

from numpyro_bnn.guides import TraceFlipout_ELBO, TraceLocalReparam_ELBO

LOCAL, FLIPOUT = "local reparameterization", "flipout"
BOTH = {"local": TraceLocalReparam_ELBO, "flipout": TraceFlipout_ELBO}


def seen(elbo, terms, shapes, *args):
    """What the likelihood sees of weights N(0, 1): the report, and a function that draws values h by name.

    ``terms(name, weight, *args)`` gives h and terms of the likelihood. A parameter at zero adds itself times h, which
    keeps rows apart; the gradient of the bound with respect to it is h.
    """

    def prior(shape):
        return dist.Normal(jnp.zeros(shape), 1.0).to_event(len(shape))

    def model(*args):
        for name, shape in shapes.items():
            h, likelihood = terms(name, numpyro.sample(name, prior(shape)), *args)
            numpyro.factor(f"terms {name}", likelihood)
            numpyro.factor(f"seen {name}", numpyro.param(f"tilt {name}", jnp.zeros(h.shape)) * h)

    def guide(*args):
        for name, shape in shapes.items():
            numpyro.sample(name, prior(shape))

    sizes = {name: jax.eval_shape(partial(terms, name), jnp.zeros(shape), *args)[0] for name, shape in shapes.items()}
    tilts = {f"tilt {name}": jnp.zeros(h.shape) for name, h in sizes.items()}

    def draw(count):
        keys = random.split(random.key(0), count)
        losses = jax.vmap(lambda key: jax.grad(lambda at: -elbo.loss(key, at, model, guide, *args))(tilts))
        found = jax.jit(losses)(keys)
        return {name: np.asarray(found[f"tilt {name}"]) for name in shapes}

    return elbo.report(model, guide, tilts, *args), draw


B, K = 4, 6
APART, PAIRS, SHARED = (0, 1, 2, 3), (0, 0, 1, 1), (0, 0, 0, 0)  # rows with the same number share a draw

# Function of h = x @ w, (4, 6), whose outputs are terms, and the rows that may have draws of their own.
FUNCTIONS = {
    "elementwise": (lambda h: jnp.exp(-jnp.abs(jnp.sin(h))) / (1 + h**2), APART),
    "softmax of features": (lambda h: jax.nn.log_softmax(h), APART),
    "softmax of rows": (lambda h: jax.nn.log_softmax(h, axis=0), SHARED),
    "sum of terms": (lambda h: -2.0 * jnp.sum(h**2), APART),
    "mean of terms": (lambda h: jnp.mean(jnp.tanh(h)) / 3, APART),
    "square of a mean": (lambda h: jnp.mean(h, 0) ** 2, SHARED),
    "centered rows, linear": (lambda h: (h - h.mean(0)) @ jnp.ones((K, K)), APART),
    "centered rows, squared": (lambda h: (h - h.mean(0)) ** 2, SHARED),
    "product with a mean": (lambda h: h * h.mean(0), SHARED),
    "Gram matrix of rows": (lambda h: jnp.exp(h @ h.T), SHARED),
    "Gram matrix of features": (lambda h: jnp.exp(h.T @ h), SHARED),
    "outer product within rows": (lambda h: jnp.tanh(jnp.einsum("bi,bj->bij", h, h)), APART),
    "plain product": (lambda h: jnp.tanh(h) @ jnp.ones((K, K)), APART),
    "mixing product": (lambda h: jnp.tanh(jnp.ones((2, B)) @ h), SHARED),
    "mixing product, linear": (lambda h: jnp.ones((2, B)) @ h, APART),
    "transposed and back": (lambda h: jnp.sin(jnp.tanh(h).T.reshape(2, 3, B)).transpose(2, 0, 1) ** 2, APART),
    "rows split and merged": (lambda h: jnp.sin(jnp.tanh(h.reshape(2, 2, K)).reshape(B, K)), APART),
    "rows mixed in pairs": (lambda h: jnp.cumsum(h.reshape(2, 2, K), 1) ** 2, PAIRS),
    "rows and features merged": (lambda h: jnp.sin(h.reshape(-1)).reshape(B, K), APART),
    "maximum of features": (lambda h: h.max(1), APART),
    "maximum of rows": (lambda h: h.max(0), SHARED),
    "shifted rows": (lambda h: h[1:] * h[:-1], SHARED),
    "slice of features": (lambda h: jnp.exp(h[:, 1:3]) + jnp.flip(h, 1)[:, :2], APART),
    "flipped rows": (lambda h: h * h[::-1], SHARED),
    "sorted features": (lambda h: jnp.sort(h, 1) ** 2, APART),
    "sorted rows": (lambda h: jnp.sort(h, 0) ** 2, SHARED),
    "lookup in every row": (lambda h: jnp.exp(h[jnp.arange(B), jnp.array([0, 2, 1, 1])]), APART),
    "lookup of a row": (lambda h: h[jnp.array([0, 0, 1, 2])] * h, SHARED),
    "take along axis": (lambda h: jnp.take_along_axis(jax.nn.log_softmax(h), jnp.ones((B, 1), int), 1), APART),
    "concatenated features": (lambda h: jnp.concatenate([h, jnp.tanh(h)], 1) ** 2, APART),
    "concatenated rows": (lambda h: jnp.cumsum(jnp.concatenate([h**2, jnp.sin(h)], 0), 0), APART),
    "concatenated rows, squared": (lambda h: jnp.concatenate([h, 2 * h], 0) ** 2, SHARED),  # more than needed
    "where": (lambda h: jnp.where(h > 0, h, jnp.expm1(h)) ** 2, APART),
    "where decided by the mean": (lambda h: jnp.where(h.mean(0) > 0, h, h**2), SHARED),
    "loop": (lambda h: lax.fori_loop(0, 3, lambda _, h: jnp.sin(h), h), SHARED),
    "linear algebra": (lambda h: jnp.linalg.inv(h[:, :4] + 9 * jnp.eye(4)), SHARED),
    "dot over vmap": (lambda h: jax.vmap(lambda row: jnp.vdot(row, jnp.sin(row)))(h), APART),
    "pooling within rows": (lambda h: lax.reduce_window(h, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID") ** 2, APART),
    "pooling over rows": (lambda h: lax.reduce_window(h, -jnp.inf, lax.max, (2, 1), (2, 1), "VALID"), SHARED),
    "convolution over rows": (lambda h: jnp.tanh(jnp.convolve(h[:, 0], jnp.ones(2))), SHARED),
}


@cache
def rows_of_functions():
    """How each function's weight is drawn, and the product of equal inputs with it as each row sees it, (4, 6)."""

    def terms(name, w, x):
        h = x @ w
        return h, FUNCTIONS[name][0](h)

    report, draw = seen(TraceLocalReparam_ELBO(), terms, dict.fromkeys(FUNCTIONS, (3, K)), jnp.ones((B, 3)))
    return report, {name: h[0] for name, h in draw(1).items()}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_share_a_draw_where_they_mix(name):
    report, h = (found[name] for found in rows_of_functions())
    rows = FUNCTIONS[name][1]
    assert report.startswith({APART: LOCAL, PAIRS: FLIPOUT, SHARED: "plain: its rows mix in"}[rows])
    same = np.isclose(h[:, None], h[None], rtol=1e-5).all(-1)
    np.testing.assert_array_equal(same, np.equal.outer(rows, rows))


def test_rows_with_draws_of_their_own_do_not_mix(x64):
    """Expectations are right if the sum of terms is a sum over such rows: its mixed second derivatives are 0."""
    h = jnp.asarray(np.random.default_rng(1).normal(size=(B, K)))
    kept = {name: fn for name, (fn, rows) in FUNCTIONS.items() if rows != SHARED}
    second = jax.jit(lambda h: {name: jax.hessian(lambda h, fn=fn: jnp.sum(fn(h)))(h) for name, fn in kept.items()})
    for name, found in second(h).items():
        rows = np.array(FUNCTIONS[name][1])
        mixed = np.asarray(found).transpose(0, 2, 1, 3)[rows[:, None] != rows[None]]
        assert np.abs(mixed).max() < 1e-12, name


@pytest.mark.parametrize("elbo", BOTH)
def test_positions_of_a_row_see_the_same_weights(elbo):
    """Weights N(0, 1) of 3 inputs: a sum over 4 equal positions has the variance 4^2 3, one over e_1, e_2, e_3 has 3.

    The variance of 4 times 2000 draws has a relative standard error of 1.6 %: five of them, a failure rate of 6e-7.
    """
    inputs = {"equal": jnp.ones((2, 4, 3)), "different": jnp.stack([jnp.eye(3)] * 2)}

    def terms(name, w):
        h = (inputs[name] @ w).sum(1)
        return h, -jnp.sum(h**2)

    _, draw = seen(BOTH[elbo](), terms, dict.fromkeys(inputs, (3, 2)))
    h = draw(2000)
    assert h["equal"].var() == pytest.approx(48, rel=0.08)
    assert h["different"].var() == pytest.approx(3, rel=0.08)


# Number of inputs of x = (1, 0), and a function of x and the weight that gives two outputs.
FLIPOUT_USES = {
    "dense": (2, lambda x, w: x @ w),
    "by position": (2, lambda x, w: (jnp.stack([x, x, x], 1) @ w).sum(1) / 3),
    "broadcast": (1, lambda x, w: 0.0 * x + w[0]),
}


def test_flipout_signs_of_all_rows_and_outputs_are_independent():
    """70 equal rows of two outputs h_bj = t_bj r_b e_j: h_b0 and h_c0, and the products h_b0 h_b1 and h_c0 h_c1, have
    independent signs. 4000 draws, 5.7 standard errors: one of at most 9900 correlations exceeds them in 1e-4."""
    rows, count = 70, 4000
    uses = {name: (inputs, 2) for name, (inputs, _) in FLIPOUT_USES.items()}

    def terms(name, w, x):
        h = FLIPOUT_USES[name][1](x, w)
        return h, h[:, 0] * h[:, 1]

    report, draw = seen(TraceFlipout_ELBO(), terms, uses, jnp.tile(jnp.array([1.0, 0.0]), (rows, 1)))
    assert report == dict.fromkeys(uses, FLIPOUT)
    for name, h in draw(count).items():
        signs = np.sign(h).astype(float)
        np.testing.assert_allclose(np.abs(h), np.abs(h[:, :1]).repeat(rows, 1), rtol=1e-5)  # one perturbation
        for flat in (signs.reshape(count, -1), signs.prod(-1)):
            assert np.abs(flat.mean(0)).max() < 5.7 / count**0.5, name
            assert np.abs(flat.T @ flat / count - np.eye(flat.shape[1])).max() < 5.7 / count**0.5, name
