"""Jacobians read from programs: for each kind of model, the same as by derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.contrib.module import random_flax_module

from numpyro_bnn import models, nn, priors
from numpyro_bnn.infer import linear_blocks
from numpyro_bnn.infer.collapse import log_marginal
from numpyro_bnn.infer.linear_blocks import jacobian_blocks
from numpyro_bnn.infer.linear_structure import LinearModel, read
from numpyro_bnn.program.reading import Reading

N, D, H, K = 9, 2, 3, 2
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(N, D)), jnp.float32)
Y = jnp.asarray(RNG.normal(size=(N, K)), jnp.float32)
KERNEL, BIAS = "net/Dense_1.kernel", "net/Dense_1.bias"


class Head(nn.Dense):
    """A dense layer of a user, with another scale."""

    def apply(self, params, x, *args, **kwargs):
        return 0.5 * super().apply(params, x, *args, **kwargs) + 1.0


def network(outputs, prior=None, net=None, **options):
    model = models.regression(net or nn.MLP([H, outputs], "tanh"), prior or priors.Normal(1.0), **options)
    return lambda: model(X, Y if outputs > 1 else Y[:, 0])


def written(mean, sites, sd=0.5):
    """A model of hidden units h, a latent scale, and linear sites of some shapes."""

    def model():
        v = numpyro.sample("v", dist.Normal(0.0, 1.0).expand([D, H]).to_event(2))
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        drawn = [numpyro.sample(name, dist.Normal(0.1, scale).expand(shape)) for name, shape in sites.items()]
        f = mean(jnp.tanh(X @ v), scale, *drawn)
        numpyro.sample("y", dist.Normal(f, sd), obs=jnp.resize(Y, jnp.shape(f)))

    return model


def non_centered():
    v = numpyro.sample("v", dist.Normal(0.0, 1.0).expand([D, H]).to_event(2))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0).expand([H]).to_event(1))
    affine = dist.transforms.AffineTransform(0.2, -scale[:, None])
    w = numpyro.sample("w", dist.TransformedDistribution(dist.Normal(0.0, jnp.ones((H, K))), affine))
    with numpyro.plate("outputs", K), numpyro.plate("data", N):
        numpyro.sample("y", dist.Normal(jnp.tanh(X @ v) @ w, scale[0]), obs=Y)


def in_hierarchy():
    v = numpyro.sample("v", dist.Normal(0.0, 1.0).expand([D, H]).to_event(2))
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    w = numpyro.sample("w", dist.Normal(mu, 1.0).expand([H]))
    numpyro.sample("y", dist.Normal(jnp.tanh(X @ v) @ w, 0.3), obs=Y[:, 0])


def of_location():
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    w = numpyro.sample("w", dist.Normal(mu, 1.0).expand([D]))
    numpyro.sample("y", dist.Normal(X @ w, 0.3), obs=Y[:, 0])


def two_data(shared):
    def model():
        v = numpyro.sample("v", dist.Normal(0.0, 1.0).expand([D, H]).to_event(2))
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([H]))
        u = w if shared else numpyro.sample("u", dist.Normal(0.0, 2.0).expand([H]))
        numpyro.sample("y", dist.Normal(jnp.tanh(X @ v) @ w, 0.5), obs=Y[:, 0])
        numpyro.sample("z", dist.Normal(jnp.sin(X @ v) @ u, 0.7), obs=Y[:, 1])

    return model


def of_flax():
    linen = pytest.importorskip("flax.linen")
    net = random_flax_module("flax", linen.Sequential([linen.Dense(H), jnp.tanh, linen.Dense(1)]),
                             prior=dist.Normal(0.0, 1.0), input_shape=(1, D))  # fmt: skip
    numpyro.sample("y", dist.Normal(net(X)[:, 0], 0.5), obs=Y[:, 0])


def other_inputs(h, s, w):
    """One of the outputs that have the first input has another second one."""
    return jnp.stack([w[0] + w[1], w[0] + w[3], w[2] + w[3], w[2] - w[3]])


W, B = {"w": (H,)}, {"w": (H,), "b": ()}
WK = {"w": (H, K), "b": (K,)}
# Model, linear sites, and the number of blocks; 0 if it takes derivatives.
MODELS = {
    "one output": (network(1), [KERNEL, BIAS], 1),
    "outputs": (network(K), [KERNEL, BIAS], K),
    "kernel only": (network(K), [KERNEL], K),
    "bias only": (network(K), [BIAS], K),
    "fixed noise": (network(1, noise=0.3), [KERNEL, BIAS], 1),
    "non-centered prior": (network(K, priors.Hierarchical()), [f"{KERNEL}_base", BIAS], K),
    "centered prior": (network(K, priors.Hierarchical(centered=True)), [KERNEL, BIAS], K),
    "layer of a user": (network(K, net=nn.Sequential([nn.Dense(H), "tanh", Head(K)])), ["net/Head_0.kernel"], K),
    "flax": (of_flax, ["flax/layers_2.kernel", "flax/layers_2.bias"], 1),
    "affine prior, plates": (non_centered, ["w"], K),
    "bias first": (written(lambda h, s, b, w: b + h @ w, {"b": (), "w": (H,)}), ["w", "b"], 1),
    "scaled": (written(lambda h, s, w, b: 2.0 * (s * (h @ w) - b) / s + 3.0, B), ["w", "b"], 1),
    "negative": (written(lambda h, s, w, b: -(h @ w[::-1]) - b, B), ["w", "b"], 1),
    "minus of minus": (written(lambda h, s, w, b: s - (b - h @ w), B), ["w", "b"], 1),
    "scaled weights": (written(lambda h, s, w, b: h @ (w * s / jnp.arange(1.0, 1 + H)) + b, B), ["w", "b"], 1),
    "scaled outputs": (written(lambda h, s, w, b: (h @ w + b) * jnp.array([s, -2.0]), WK), ["w", "b"], K),
    "flat weights": (written(lambda h, s, w: h @ w.reshape(K, H).T, {"w": (K * H,)}), ["w"], K),
    "outputs first": (written(lambda h, s, w, b: jnp.einsum("nh,hk->kn", h, w) + b[:, None], WK), ["w", "b"], K),
    "weights left": (written(lambda h, s, w, b: w.T @ h.T + b[:, None], WK), ["w", "b"], K),
    "batched": (written(lambda h, s, w: jnp.einsum("gnh,gh->gn", jnp.stack([h, s * h]), w), {"w": (K, H)}), ["w"], K),
    "two contracted": (written(lambda h, s, w: jnp.einsum("nh,nk,hk->n", h, Y, w), {"w": (H, K)}), ["w"], 1),
    "appended": (written(lambda h, s, w, b: jnp.c_[h, jnp.ones(N)] @ jnp.append(w, b), B), ["w", "b"], 1),
    "summed": (written(lambda h, s, w: (h * w).sum(-1), W), ["w"], 1),
    "summed over rows first": (written(lambda h, s, w: (h[:, :, None] * w).sum(1).T, {"w": (H, K)}), ["w"], K),
    "slope": (written(lambda h, s, w, b: X[:, 0] * w + b, {"w": (), "b": ()}), ["w", "b"], 1),
    "jit": (written(lambda h, s, w: jax.jit(jnp.matmul)(h, w), W), ["w"], 1),
    "checkpoint": (written(lambda h, s, w: jax.checkpoint(lambda w: jnp.sin(h) @ w)(w), W), ["w"], 1),
    "data of each weight": (two_data(False), ["w", "u"], 2),
    "data of one weight": (two_data(True), ["w"], 1),
    "more weights than data": (written(lambda h, s, w: (h[:2] * w).sum(-1), {"w": (H,)}), ["w"], 1),
    # What has no independent blocks of equal size, or is not understood.
    "location": (in_hierarchy, ["mu", "w"], 0),
    "own location": (of_location, ["w"], 1),
    "used twice": (written(lambda h, s, w: h @ w + jnp.sin(h) @ w, W), ["w"], 0),
    "groups": (written(lambda h, s, w: w[jnp.arange(N) % H], W), ["w"], 0),
    "unused": (written(lambda h, s, w: h[:, :2] @ w[:2], W), ["w"], 0),
    "overlap": (written(lambda h, s, w: jnp.c_[h[:, :2] @ w[:2], h[:, :2] @ w[1:]], W), ["w"], 0),
    "unequal": (written(lambda h, s, w: jnp.append(h @ w[:2].repeat(2)[:H], h[:4, 0] * w[2]), W), ["w"], 0),
    "one of others": (written(other_inputs, {"w": (4,)}), ["w"], 0),
    "used many times": (written(lambda h, s, w: (h[..., None] * w[:, None] * jnp.ones(5)).sum((1, 2)), W), ["w"], 0),
    "cumulative": (written(lambda h, s, w: jnp.cumsum(h @ w), W), ["w"], 0),
    "measured": (written(lambda h, s, w: jnp.where(w > 0, 1.0, 1.0) * w * h[:, 0], {"w": ()}), ["w"], 1),
}  # fmt: skip


def linear_model(name):
    model, sites, blocks = MODELS[name]
    reading = Reading(model)
    structure = read("test", reading, tuple(sites))
    return reading, structure, blocks


def dense(blocks, shape):
    """The whole Jacobian."""
    found, several = np.zeros(shape), [np.atleast_2d(part) for part in (blocks.rows, blocks.columns)]
    matrices = blocks.matrix.reshape(len(several[0]), -1, several[1].shape[1])
    for matrix, rows, columns in zip(matrices, *several, strict=True):
        found[np.ix_(rows, columns)] = matrix
    return found


@pytest.mark.parametrize("name", MODELS)
def test_blocks_are_the_jacobian(name, monkeypatch):
    reading, structure, expected = linear_model(name)
    derivatives = []

    def counted(way):
        return lambda fn: derivatives.append(way) or way(fn)

    found = []

    def matrix_at(values):
        with monkeypatch.context() as patch:
            patch.setattr(linear_blocks.jax, "jacfwd", counted(jax.jacfwd))
            patch.setattr(linear_blocks.jax, "jacrev", counted(jax.jacrev))
            found.append(LinearModel(reading, structure, values).blocks())
        return found[0].matrix

    compiled = jax.jit(matrix_at)
    for seed in range(2):
        drawn = reading.at({}, seed)
        values = {n: drawn[n]["value"] for n in reading.latent if n not in structure.shapes}
        matrix = compiled(values)
        blocks = found[0]._replace(matrix=matrix)
        linear = LinearModel(reading, structure, values)
        exact = jax.jacobian(linear.mean)(linear.zeros())
        np.testing.assert_allclose(dense(blocks, exact.shape), exact, rtol=1e-5, atol=1e-6)
    assert (len(np.atleast_2d(found[0].rows)), len(derivatives)) == (expected or 1, expected == 0)


@pytest.mark.parametrize("name", [name for name, (_, _, blocks) in MODELS.items() if blocks > 1])
def test_densities_and_gradients_of_blocks_are_those_of_the_whole(name, monkeypatch):
    reading, structure, _ = linear_model(name)
    drawn = reading.at({}, 3)
    values = {n: drawn[n]["value"] for n in reading.latent if n not in structure.shapes}

    def density(values):
        linear = LinearModel(reading, structure, values)
        return log_marginal(linear.gaussian(), linear.blocks())

    found = jax.value_and_grad(density)(values)
    monkeypatch.setattr(linear_blocks, "_split", lambda terms, size: None)
    expected = jax.value_and_grad(density)(values)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), found, expected)


def test_half_precision_of_features_is_kept():
    """A cast in the program rounds the weights, not what is read from it."""

    def mean(w):
        return (X.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)

    found = jacobian_blocks(mean, jnp.zeros(D))
    np.testing.assert_allclose(found.matrix, jax.jacfwd(mean)(jnp.zeros(D)), rtol=1e-2)
    assert found.matrix.dtype == jnp.float32


@pytest.mark.parametrize("fn", [lambda u: 1 / u, lambda u: u * u, jnp.sin, jnp.cumsum, lambda u: u @ u[:, None]])
def test_what_is_not_linear_is_not_read(fn):
    """The reader of linear programs says so instead of a number."""
    u = jnp.arange(1.0, 4.0)
    start = linear_blocks._Terms(jnp.ones((3, 1)), np.arange(3)[:, None])
    assert linear_blocks._follow(jax.make_jaxpr(fn)(u), [start], 3) == [None]
