"""Hidden units of networks written by hand or in Flax are found from the model itself."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from flax import linen
from numpyro.contrib.module import random_flax_module

from numpyro_bnn import symmetry

X = np.random.default_rng(0).normal(size=(9, 2)).astype(np.float32)
Y = np.sin(X[:, 0])


def by_hand(activation, widths=(4, 4)):
    def model(x, y=None):
        h, inputs = x, x.shape[1]
        for layer, width in enumerate((*widths, 1)):
            w = numpyro.sample(f"w{layer}", dist.Normal(0, 1).expand([inputs, width]).to_event(2))
            b = numpyro.sample(f"b{layer}", dist.Normal(0, 1).expand([width]).to_event(1))
            h, inputs = h @ w + b, width
            h = activation(h) if layer < len(widths) else h
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(h[..., 0], 0.5), obs=y)

    return model


def axes(found, kind):
    return {frozenset((axis.site, axis.axis) for axis in s.unit_axes) for s in found if isinstance(s, kind)}


UNITS = {frozenset({("w0", 1), ("b0", 0), ("w1", 0)}), frozenset({("w1", 1), ("b1", 0), ("w2", 0)})}


@pytest.mark.parametrize("widths", [(4, 4), (4, 3)], ids=["equal", "different"])
def test_hidden_units_of_a_model_written_by_hand(widths):
    found = symmetry.find(by_hand(jnp.tanh, widths), X, Y)
    assert axes(found, symmetry.Permutation) == UNITS
    assert axes(found, symmetry.SignFlip) == UNITS


def test_units_that_are_not_odd_have_no_signs():
    found = symmetry.find(by_hand(lambda h: jnp.maximum(h, 0.1), (4,)), X, Y)
    assert axes(found, symmetry.Permutation) == {frozenset({("w0", 1), ("b0", 0), ("w1", 0)})}
    assert not axes(found, symmetry.SignFlip)


@pytest.mark.filterwarnings("ignore:symmetry.find")
def test_units_with_features_of_their_own_are_told_apart():
    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2, 4]).to_event(2))
        v = numpyro.sample("v", dist.Normal(0, 1).expand([4]).to_event(1))
        numpyro.sample("y", dist.Normal(jnp.tanh(x @ w * jnp.arange(1.0, 5.0)) @ v, 0.5).to_event(1), obs=y)

    assert not axes(symmetry.find(model, X, Y), symmetry.Permutation)


@pytest.mark.filterwarnings("ignore:symmetry.find")
def test_sites_without_an_effect_on_the_data_are_no_units():
    def model(x, y=None):
        s = numpyro.sample("s", dist.HalfNormal(1).expand([2]).to_event(1))
        t = numpyro.sample("t", dist.HalfNormal(1).expand([2]).to_event(1))
        w = numpyro.sample("w", dist.Normal(0, s * t).to_event(1))
        numpyro.sample("y", dist.Normal(x @ w, 0.5).to_event(1), obs=y)

    assert not symmetry.find(model, X, Y)


def test_hidden_units_of_a_flax_module():
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            hidden = linen.Dense(4)(x)
            return linen.Dense(1)(jnp.tanh(hidden))

    def model(x, y=None):
        net = random_flax_module("net", Net(), dist.Normal(0.0, 1.0), input_shape=(1, 2))
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(net(x)[..., 0], 0.5), obs=y)

    units = {frozenset({("net/Dense_0.kernel", 1), ("net/Dense_0.bias", 0), ("net/Dense_1.kernel", 0)})}
    found = symmetry.find(model, X, Y)
    assert axes(found, symmetry.Permutation) == axes(found, symmetry.SignFlip) == units
