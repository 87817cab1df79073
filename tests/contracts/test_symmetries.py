"""Every symmetry is a group; every network has the symmetries found, and no other."""

from collections import Counter
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from helpers import each, refused
from jax.flatten_util import ravel_pytree
from numpyro.contrib.module import random_flax_module
from orbits import around, assert_close, outputs_of, scattered
from registry import FAST_NETS, NET_KINDS, NETS, SYMMETRIES, rows
from zoo import X, Y

from numpyro_bnn import models, nn, priors, symmetry
from numpyro_bnn.symmetry import (
    JointRescale,
    JointScale,
    Permutation,
    Rescale,
    Scale,
    Shift,
    SignFlip,
)

# -- the groups ------------------------------------------------------------------------


def inverse(s, g):
    if isinstance(s, Permutation):
        return jnp.argsort(g)
    return g if isinstance(s, SignFlip) else -g


def composed(s, g, then):
    """First g, then the other."""
    if isinstance(s, Permutation):
        return g[then]
    return g * then if isinstance(s, SignFlip) else g + then


def values_of(row):
    keys = jax.random.split(jax.random.key(0), len(row.shapes))
    drawn = {
        site: jax.random.normal(k, shape)
        for k, (site, shape) in zip(keys, row.shapes.items(), strict=True)
    }
    return {
        site: jnp.exp(value) if site in row.positive else value
        for site, value in drawn.items()
    }


def log_det_by_autodiff(s, values, g, positive=()):
    """Of the map in the coordinates of the sampler."""
    free = {
        site: jnp.log(values[site]) if site in positive else values[site]
        for site in s.sites
    }
    flat, unravel = ravel_pytree(free)

    def move(flat):
        at = {
            site: jnp.exp(z) if site in positive else z
            for site, z in unravel(flat).items()
        }
        moved = s.act({**values, **at}, g)
        return ravel_pytree(
            {
                site: jnp.log(moved[site]) if site in positive else moved[site]
                for site in at
            }
        )[0]

    return jnp.linalg.slogdet(jax.jacfwd(move)(flat))[1]


def jacobian_errors(s, values, g, positive=()):
    """Of the log determinant, in the coordinates of the model and of a sampler."""
    stated, moved = jnp.sum(s.log_det(values, g)), {**values, **s.act(values, g)}
    volume = sum(
        (jnp.sum(jnp.log(values[site]) - jnp.log(moved[site])) for site in positive),
        jnp.zeros(()),
    )
    return jnp.array(
        [
            stated - log_det_by_autodiff(s, values, g),
            stated + volume - log_det_by_autodiff(s, values, g, positive),
        ]
    )


@pytest.mark.parametrize("row", rows(SYMMETRIES))
def test_symmetry_is_a_group_with_its_jacobian(row, x64):
    s = row.symmetry
    units = row.symmetry.units(
        {site: np.zeros(shape) for site, shape in row.shapes.items()}
    )

    @jax.jit
    def parts(values):
        g, h = (s.random(jax.random.key(seed), units) for seed in (1, 2))
        moved = {**values, **s.act(values, g)}
        pairs = [
            (s.act(values, s.identity(units)), values),
            (s.act(moved, inverse(s, g)), values),
            (s.act(moved, h), s.act(values, composed(s, g, h))),
        ]
        somewhere = [
            s.act(values, s.random(jax.random.key(seed), units)) for seed in range(4)
        ]
        return (
            g,
            moved,
            pairs,
            somewhere,
            jacobian_errors(s, values, g, row.positive),
            s.log_det(values, g),
        )

    values = values_of(row)
    g, moved, pairs, somewhere, errors, log_det = parts(values)
    assert g.shape == log_det.shape == (units,)
    assert {site: value.shape for site, value in moved.items()} == dict(row.shapes)
    for here, there in pairs:
        assert set(here) == set(s.sites)
        for site, value in here.items():
            np.testing.assert_allclose(value, there[site], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(errors, 0.0, atol=1e-10)
    # Random elements are far from the identity; a finite group has an element that
    # moves.
    changes = [
        max(float(jnp.max(jnp.abs(at[site] - values[site]))) for site in at)
        for at in somewhere
    ]
    assert max(changes) > 0.1
    assert min(changes) > (1e-3 if s.continuous else -1.0)


def test_random_elements_reach_the_whole_group():
    keys = jax.random.split(jax.random.key(0), 64)
    flips = jax.vmap(lambda key: SignFlip([("w", 0)]).random(key, 3))(keys)
    # A missing pattern of 8 has probability below 8 (7 / 8)^64 = 2e-3 for random seeds;
    # these are fixed.
    assert {tuple(np.asarray(f)) for f in flips} == {
        (a, b, c) for a in (-1, 1) for b in (-1, 1) for c in (-1, 1)
    }
    orders = jax.vmap(lambda key: Permutation([("w", 0)]).random(key, 3))(keys)
    assert len({tuple(np.asarray(order)) for order in orders}) == 6


@pytest.mark.parametrize(
    ("s", "fragment"),
    [
        (lambda: Scale([("w", 2)]), "axis 2 of site 'w' of shape (3, 4). Count the"),
        (lambda: Scale([("b", -2)]), "axis -2 of site 'b' of shape (4,)"),
        (lambda: Scale([("w", 0, 2)]), "of shape (3, 4). Repeats must divide"),
        (lambda: Rescale([("w", 0)], [("v", 0)]), "{'w': 3, 'v': 4}. All sites must"),
        (lambda: SignFlip([("w", 1), "b"]), "units by site {'w': 4, 'b': 1}"),
    ],
)
def test_units_that_disagree_are_refused(s, fragment):
    with refused("unit_axes", fragment):
        s().units({"w": np.zeros((3, 4)), "b": np.zeros(4), "v": np.zeros((4, 2))})


# -- symmetries of networks ------------------------------------------------------------

DRAWS = 4


def derived(net, input_shape, logits=False):
    """Symmetries in terms of the names of the parameters."""
    found = symmetry.from_network(net, input_shape, "net", logits)
    return [
        s.rename({site: site.removeprefix("net/") for site in s.sites}) for s in found
    ]


def drawn(net, input_shape):
    return around(net.param_shapes(input_shape), 0.1, DRAWS)


@pytest.mark.parametrize("row", rows(NETS, fast=NETS))
def test_networks_have_as_many_symmetries_as_are_known(row):
    found = Counter(type(s).__name__ for s in derived(row.net, row.input_shape))
    assert found == {
        kind: count for kind, count in zip(NET_KINDS, row.counts, strict=True) if count
    }


# Beside those of `make test`: each normalization, pool and way to connect layers once.
SLOW_NETS = (
    *("BatchNorm tanh", "BatchNorm relu, no gain or shift", "LayerNorm tanh"),
    *("CNN average tanh", "CNN LayerNorm tanh, no gain", "LayerNorm over pixels"),
    *("LayerNorm after a maximum", "ResNet BatchNorm", "ResNet LayerNorm"),
    *("block that ends with BatchNorm", "residual of BatchNorm"),
    "residual with projection",
)
CONNECTED = {name: NETS[name] for name in (*sorted(FAST_NETS), *SLOW_NETS)}


@pytest.mark.parametrize("row", rows(CONNECTED, fast=FAST_NETS))
def test_symmetries_keep_the_function_and_canonical_draws(row, x64):
    """Canonical draws and invariants depend on nothing but the orbit."""
    symmetries = derived(row.net, row.input_shape)
    draws = drawn(row.net, row.input_shape)
    here = symmetry.canonical(draws, symmetries)
    if not symmetries:
        assert_close(here, draws, 0.0)
        return
    elsewhere = scattered(draws, symmetries)
    for site in {site for s in symmetries for site in s.sites}:
        assert np.abs(elsewhere[site] - draws[site]).max() > 1e-3
    outputs = outputs_of(row.net, row.input_shape)
    expected = outputs(draws)
    for point in (elsewhere, here):
        np.testing.assert_allclose(outputs(point), expected, rtol=1e-8, atol=1e-8)
    assert_close(symmetry.canonical(elsewhere, symmetries), here, 1e-7)
    assert_close(symmetry.canonical(here, symmetries), here, 1e-7)
    swapped = symmetry.canonical(
        {name: v[::-1] for name, v in elsewhere.items()}, symmetries
    )
    assert_close({name: v[::-1] for name, v in swapped.items()}, here, 1e-7)
    summaries = symmetry.invariants(draws, symmetries)
    assert len(summaries) == sum(
        isinstance(s, Scale | Rescale | Permutation) for s in symmetries
    )
    for summary in summaries.values():
        assert summary.shape[:2] == (2, DRAWS)
        assert (summary > 0.0).all()
        assert np.ptp(summary, axis=(0, 1)).min() > 1e-3
    assert_close(symmetry.invariants(elsewhere, symmetries), summaries, 1e-7)


CONV = nn.Conv2d(3, 3)


@pytest.mark.parametrize(
    ("net", "input_shape", "shifts"),
    [
        (nn.MLP([4, 3]), (3,), 2),
        # The outputs of the block are the stream itself, which the block reads.
        (nn.Sequential([nn.Dense(3), nn.Residual(nn.MLP([4, 3]))]), (3,), 0),
        # Means of pixels keep what an input adds, a maximum and separate pixels do not.
        (nn.Sequential([CONV, nn.AvgPool(None), nn.Flatten()]), (6, 5, 2), 2),
        (nn.Sequential([CONV, nn.MaxPool(None), nn.Flatten()]), (6, 5, 2), 1),
        # The gain of a normalization is no shift, its shift is one; the bias before it
        # goes by unit.
        (nn.Sequential([nn.Dense(3), nn.BatchNorm()]), (3,), 2),
    ],
)
def test_logits_shift(net, input_shape, shifts, x64):
    found = derived(net, input_shape, logits=True)
    assert sum(isinstance(s, Shift) for s in found) == shifts
    assert not any(
        isinstance(s, Shift) and s not in found for s in derived(net, input_shape)
    )
    if shifts > 1:
        draws = drawn(net, input_shape)
        outputs = outputs_of(net, input_shape, jax.nn.log_softmax)
        np.testing.assert_allclose(
            outputs(scattered(draws, found)), outputs(draws), rtol=1e-8, atol=1e-8
        )


@dataclass(frozen=True)
class Mixing(nn.Layer):
    """A layer of the user that does not tell its wiring."""

    def shapes(self, input_shape, path=""):
        return {"mix": (input_shape[-1],)}, input_shape

    def forward(self, run, x):
        return jnp.cumsum(x, -1) + run["mix"]


@dataclass(frozen=True)
class Gain(nn.Layer):
    """A layer of the user that does: a gain by feature, without a bias."""

    def shapes(self, input_shape, path=""):
        return {"gain": (input_shape[-1],)}, input_shape

    def connect(self, wiring, path, x, shape):
        wiring.read(x, f"{path}.gain", 0)
        return wiring.begin(shape[-1], nn.wiring.Wire(f"{path}.gain", 0)), shape

    def forward(self, run, x):
        return x * run["gain"]


def test_layers_of_a_user_have_the_symmetries_that_their_wiring_tells(x64):
    blocked = nn.Sequential(
        [nn.Dense(4), "tanh", Mixing(), "tanh", nn.Dense(4), "tanh", nn.Dense(2)]
    )
    behind = derived(blocked, (3,))
    assert {site for s in behind for site in s.sites} == {
        "Dense_1.kernel",
        "Dense_1.bias",
        "Dense_2.kernel",
    }
    assert Counter(type(s).__name__ for s in behind) == {
        "SignFlip": 1,
        "Permutation": 1,
    }
    open_ = nn.Sequential([nn.Dense(4), "relu", Gain(), "relu", nn.Dense(2)])
    rescales = [s for s in derived(open_, (3,)) if isinstance(s, Rescale)]
    assert [s.sites[-1] for s in rescales] == ["Gain_0.gain", "Dense_1.kernel"]
    for net, found in ((blocked, behind), (open_, rescales)):
        draws, outputs = drawn(net, (3,)), outputs_of(net, (3,))
        np.testing.assert_allclose(
            outputs(scattered(draws, found)), outputs(draws), rtol=1e-8, atol=1e-8
        )
    with pytest.raises(ValueError, match=r"nn\.Dense at 'Dense_0'"):
        symmetry.from_network(nn.MLP([4, 1]), (3, 3, 2))


# -- symmetries of models --------------------------------------------------------------


def by_hand(activation, widths):
    def model(x, y=None):
        h, inputs = x, x.shape[1]
        for layer, width in enumerate((*widths, 1)):
            w = numpyro.sample(
                f"w{layer}", dist.Normal(0, 1).expand([inputs, width]).to_event(2)
            )
            b = numpyro.sample(
                f"b{layer}", dist.Normal(0, 1).expand([width]).to_event(1)
            )
            h, inputs = h @ w + b, width
            h = activation(h) if layer < len(widths) else h
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(h[..., 0], 0.5), obs=y)

    return model


def flax_module(x, y=None):
    from flax import linen

    net = linen.Sequential([linen.Dense(4), jnp.tanh, linen.Dense(1)])
    net = random_flax_module("net", net, dist.Normal(0.0, 1.0), input_shape=(1, 2))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(net(x)[..., 0], 0.5), obs=y)


def told_apart(x, y=None):
    """Each unit has a feature of its own."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2, 4]).to_event(2))
    v = numpyro.sample("v", dist.Normal(0, 1).expand([4]).to_event(1))
    numpyro.sample(
        "y",
        dist.Normal(jnp.tanh(x @ w * jnp.arange(1.0, 5.0)) @ v, 0.5).to_event(1),
        obs=y,
    )


def without_effect(x, y=None):
    """The scales have an effect on the prior only."""
    s = numpyro.sample("s", dist.HalfNormal(1).expand([2]).to_event(1))
    t = numpyro.sample("t", dist.HalfNormal(1).expand([2]).to_event(1))
    w = numpyro.sample("w", dist.Normal(0, s * t).to_event(1))
    numpyro.sample("y", dist.Normal(x @ w, 0.5).to_event(1), obs=y)


UNITS = frozenset({("w0", 1), ("b0", 0), ("w1", 0)})
SECOND = frozenset({("w1", 1), ("b1", 0), ("w2", 0)})
OF_FLAX = frozenset(
    {("net/layers_0.kernel", 1), ("net/layers_0.bias", 0), ("net/layers_2.kernel", 0)}
)
# Model, groups of units that can change places, and those that can change signs.
WRITTEN = {
    "layers of two sizes": (
        by_hand(jnp.tanh, (4, 3)),
        {UNITS, SECOND},
        {UNITS, SECOND},
    ),
    "not odd": (by_hand(lambda h: jnp.maximum(h, 0.1), (4,)), {UNITS}, set()),
    "Flax": (flax_module, {OF_FLAX}, {OF_FLAX}),
    "told apart": (told_apart, set(), None),
    "without an effect": (without_effect, set(), set()),
}


@pytest.mark.filterwarnings("ignore:symmetry.find")
@each("name", WRITTEN, slow=["not odd"])
def test_hidden_units_of_models_written_by_hand_are_found(name):
    model, orders, signs = WRITTEN[name]
    found = symmetry.find(model, X, Y)

    def axes(kind):
        return {
            frozenset((axis.site, axis.axis) for axis in s.unit_axes)
            for s in found
            if isinstance(s, kind)
        }

    assert axes(Permutation) == orders
    assert signs is None or axes(SignFlip) == signs


def test_find_says_what_it_looked_for_if_it_finds_nothing():
    def linear(x, y):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)

    message = (
        r"symmetry\.find: found none as it has no `random_network`\. Declare your own"
    )
    with pytest.warns(UserWarning, match=message):
        assert symmetry.find(linear, jnp.asarray(X), jnp.asarray(Y)) == []


FIRST, LAST = "net/Dense_0.kernel", "net/Dense_1.kernel"
RESCALED = {
    JointRescale(
        [FIRST, "net/Dense_0.bias"],
        [LAST],
        [(f"{FIRST}_scale", 1.0), (f"{LAST}_scale", -1.0)],
    )
}
LEARNED = {
    "precisions before a normalization": (
        nn.MLP([3, 1], "tanh", norm=nn.LayerNorm(False, False)),
        lambda: priors.GammaPrecision(3.0, 2.0, centered=True),
        {
            JointScale([FIRST, "net/Dense_0.bias"], f"{FIRST}_precision", -2.0),
            JointScale([FIRST, "net/Dense_0.bias"], "net/Dense_0.bias_precision", -2.0),
        },
    ),
    "non-centered": (nn.MLP([3, 1], "relu"), priors.Hierarchical, RESCALED),
}


@pytest.mark.parametrize("name", LEARNED)
def test_learned_scales_are_found(name):
    """With the powers of scales and precisions, also of those behind the units."""
    net, prior, expected = LEARNED[name]
    model, args = models.regression(net, prior()), (jnp.asarray(X), jnp.asarray(Y))
    found = symmetry.find(model, *args)
    assert {s for s in found if isinstance(s, JointScale | JointRescale)} == expected


def sums(y=0.3):
    w, v, u = (
        numpyro.sample(name, dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        for name in "wvu"
    )
    numpyro.sample("y", dist.Normal(w[0] + v[0] + jnp.sum(u) ** 2, 1.0), obs=y)


@pytest.mark.parametrize("place", [10, 2])
def test_false_symmetries_are_refused_wherever_they_stand(place):
    """Random elements of such a group are all the identity at 10."""
    with pytest.raises(ValueError, match="under which the log likelihood changes"):
        symmetry.check(sums, [SignFlip(["u"])] * place + [SignFlip(["w"])])


def test_a_model_without_observations_is_refused():
    """Nothing would be measured: the shift is no symmetry."""
    with refused("args", "got no observations"):
        symmetry.check(lambda: sums(None), [Shift("w")])
