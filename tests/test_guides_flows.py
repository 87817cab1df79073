"""Flows: transforms against autodiff, identity at the start, size, fits of known targets, NeuTra, flowjax."""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro import handlers
from numpyro.distributions.transforms import AffineTransform, IndependentTransform

from numpyro_bnn import guides
from numpyro_bnn.guides.coupling import Blockwise
from numpyro_bnn.guides.flows import AffineCoupling, Conditioner, permutations

# -- transforms ---------------------------------------------------------------------------------------


def conditioner(key, inputs, outputs, scale=0.25):
    """A conditioner with two hidden layers and weights of N(0, scale^2) at its end: far from the identity."""
    sizes = [inputs, 6, 4, outputs]
    kernels, biases = [], []
    for i, (n, m) in enumerate(pairwise(sizes)):
        kernel_key, bias_key = random.split(random.fold_in(key, i))
        factor = scale if i == len(sizes) - 2 else 1.0
        kernels.append(factor * random.normal(kernel_key, (n, m)))
        biases.append(factor * random.normal(bias_key, (m,)))
    return Conditioner(tuple(kernels), tuple(biases))


def affine(key, split=2, dim=5, swap=False):
    kept, changed = (dim - split, split) if swap else (split, dim - split)
    return AffineCoupling(conditioner(key, kept, 2 * changed), split, swap, bound=1.5)


def whole(key, family, dim=5):
    """All layers of a family, with random parameters."""
    with handlers.seed(rng_seed=0), handlers.trace() as trace:
        family.transforms("f", dim)
    params = {
        name: site["value"] + 0.1 * random.normal(random.fold_in(key, i), site["value"].shape)
        for i, (name, site) in enumerate(trace.items())
        if site["type"] == "param"
    }
    with handlers.substitute(data=params):
        return dist.transforms.ComposeTransform(family.transforms("f", dim))


def side_by_side(key):
    place = IndependentTransform(AffineTransform(jnp.arange(3.0), jnp.array([0.5, 1.0, 2.0])), 1)
    return Blockwise([affine(key, 1, 2), place], [2, 3])


# Name: (transform at random parameters, D).
TRANSFORMS = {
    "affine": (affine, 5),
    "affine, leading half": (partial(affine, swap=True), 5),
    "affine of a pair": (partial(affine, split=1, dim=2), 2),
    "blockwise": (side_by_side, 5),
    "Coupling": (partial(whole, family=guides.Coupling(3, (4,))), 5),
    "Coupling, random halves": (partial(whole, family=guides.Coupling(5, (4,), "random")), 5),
}
each_transform = pytest.mark.parametrize("name", TRANSFORMS)


def make(name, seed=1):
    build, dim = TRANSFORMS[name]
    return build(random.key(seed)), dim


def points(dim, *batch):
    return 2.0 * random.normal(random.key(7), (*batch, dim))


@jax.jit
def measured(transform, x):
    """Forward, back and the log determinants (given, and by autodiff of both directions) at points (N, D)."""
    y = transform(x)
    there, back = (jax.vmap(jax.jacfwd(f))(at) for f, at in ((transform, x), (transform.inv, y)))
    log_det = transform.log_abs_det_jacobian(x, y)
    slogdets = [jnp.linalg.slogdet(jacobian)[1] for jacobian in (there, back)]
    return y, transform.inv(y), log_det, *slogdets, jnp.linalg.norm(back, axis=(-2, -1)).max()


@each_transform
@pytest.mark.usefixtures("x64")
def test_inverse_and_log_det(name):
    """Against the transform itself and its Jacobian by autodiff, in float64."""
    transform, dim = make(name)
    x = points(dim, 40)
    y, back, log_det, forward_det, backward_det, _ = measured(transform, x)
    assert y.dtype == log_det.dtype == jnp.float64
    assert jnp.abs(y - x).max() > 0.1  # nothing is tested at the identity
    assert jnp.abs(log_det).max() > 0.1
    np.testing.assert_allclose(back, x, rtol=0, atol=1e-9)
    np.testing.assert_allclose(log_det, forward_det, rtol=0, atol=1e-9)
    np.testing.assert_allclose(log_det, -backward_det, rtol=0, atol=1e-8)


@each_transform
def test_single_precision(name):
    """In float32 an error of y is carried back by the slope of the inverse."""
    transform, dim = make(name)
    x = points(dim, 40)
    y, back, log_det, forward_det, _, steepest = measured(transform, x)
    assert y.dtype == log_det.dtype == jnp.float32
    # Some tens of operations on numbers of the size of y, each wrong by at most half an eps.
    tolerance = 50 * float(jnp.finfo(jnp.float32).eps) * float(jnp.abs(y).max()) * max(1.0, float(steepest))
    assert tolerance < 0.02
    np.testing.assert_allclose(back, x, rtol=0, atol=tolerance)
    np.testing.assert_allclose(log_det, forward_det, rtol=0, atol=tolerance)


@jax.jit
def used(transform, other, x, key):
    """What NumPyro does with a transform."""
    y, intermediates = transform.call_with_intermediates(x)
    q = dist.TransformedDistribution(dist.Normal(jnp.zeros(x.shape[-1]), 1.0).to_event(1), transform)
    draws, passed = q.sample_with_intermediates(key, (50,))
    stacked = jax.tree.map(lambda *parts: jnp.stack(parts), transform, other)
    return {
        "forward": y,
        "single": transform(x[1, 1]),
        "both": jax.vmap(lambda t: t(x))(stacked),
        "other": other(x),
        "log_det": transform.log_abs_det_jacobian(x, y),
        "passed on": transform.log_abs_det_jacobian(x, y, intermediates),
        "density": q.log_prob(draws),
        "density passed on": q.log_prob(draws, passed),
    }


@each_transform
def test_transform_contract(name):
    """Batches, intermediates, jit, vmap over parameters, pytree and equality, as NumPyro asks."""
    transform, dim = make(name)
    other = make(name, seed=2)[0]
    x = points(dim, 3, 2)
    assert transform.forward_shape(x.shape) == transform.inverse_shape(x.shape) == (3, 2, dim)
    assert transform.domain.event_dim == transform.codomain.event_dim == 1
    found = used(transform, other, x, random.key(3))
    assert found["forward"].shape == (3, 2, dim)
    assert found["log_det"].shape == (3, 2)
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    close(found["single"], found["forward"][1, 1])
    close(found["both"], jnp.stack([found["forward"], found["other"]]))
    close(found["passed on"], found["log_det"])
    # These differ by what rounding does to an inverse, see test_single_precision.
    np.testing.assert_allclose(found["density passed on"], found["density"], rtol=0, atol=0.02)
    leaves, treedef = jax.tree.flatten(transform)
    assert treedef == jax.tree.structure(other)
    assert jax.tree.unflatten(treedef, leaves) == transform
    assert other != transform


def test_coupling_transforms_are_different_from_each_other():
    """Equality looks at kind, static options and values."""
    key, other_key = random.split(random.key(1))
    layer = affine(key)
    assert layer.eq(affine(key))
    assert not layer.eq(affine(other_key))
    assert layer != affine(key)  # NumPyro's == does not look into distinct arrays
    assert not layer.eq(affine(key, swap=True))
    assert not layer.eq(AffineCoupling(layer.conditioner, layer.split, layer.swap, bound=2.0))
    assert side_by_side(key).eq(side_by_side(key))
    assert not side_by_side(key).eq(side_by_side(other_key))
    assert not side_by_side(key).eq(layer)


def test_layers_change_the_halves_in_turn():
    """Of five numbers the first layer leaves the first two as they are, the second the last three."""
    first, second = whole(random.key(1), guides.Coupling(2, (4,))).parts
    x = points(5)
    for layer, left, moved in ((first, slice(0, 2), slice(2, 5)), (second, slice(2, 5), slice(0, 2))):
        y = layer(x)
        np.testing.assert_array_equal(y[left], x[left])
        assert np.abs(y[moved] - x[moved]).min() > 1e-3


@pytest.mark.parametrize("bound", [0.5, 3.0])
def test_a_layer_scales_by_at_most_its_bound(bound):
    """Whatever its network gives: e^(b tanh(s / b)), which is near e^s for small s."""
    raw = jnp.array([1000.0, -1000.0, 0.01])
    network = Conditioner((jnp.zeros((2, 6)),), (jnp.concatenate([raw, jnp.zeros(3)]),))
    y = AffineCoupling(network, 2, bound=bound)(jnp.array([0.3, -0.7, 1.0, 1.0, 1.0]))
    np.testing.assert_allclose(y, [0.3, -0.7, np.exp(bound), np.exp(-bound), np.exp(0.01)], rtol=1e-5)


@pytest.mark.parametrize("dim", [2, 5, 8])
@pytest.mark.parametrize("mask", ["alternating", "random"])
def test_halves_are_complementary(dim, mask):
    """Follow the coordinates of the block through permutations and layers."""
    then = permutations(dim, 6, mask)
    passed = np.arange(dim)
    for permutation in then:
        passed = passed if permutation is None else passed[permutation]
    order = np.argsort(passed)  # at the entrance, of what leaves in the order of the block
    changed = []
    for i, permutation in enumerate(then):
        changed.append(frozenset(order[: dim // 2] if i % 2 else order[dim // 2 :]))
        order = order if permutation is None else order[permutation]
    np.testing.assert_array_equal(order, np.arange(dim))
    for first, second in zip(changed[::2], changed[1::2], strict=True):
        assert first | second == set(range(dim))
        assert not first & second
    if mask == "alternating":
        assert changed[0] == set(range(dim // 2, dim))
        assert len(set(changed)) == 2
    elif dim > 2:
        assert len(set(changed)) > 2
        again, other = (permutations(dim, 6, mask, seed)[-1] for seed in (0, 1))
        np.testing.assert_array_equal(again, then[-1])  # a fixed seed
        assert (other != again).any()


# -- families -----------------------------------------------------------------------------------------

FAMILIES = {"coupling": guides.Coupling(), "coupling, random halves": guides.Coupling(5, (3, 4), "random")}


def block_of(dim):
    return guides.Block("b", {"a": (dim,)}, jnp.linspace(-1.0, 2.0, dim), jnp.linspace(0.1, 1.5, dim))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dim", [2, 7])
def test_starts_as_the_mean_field(name, dim):
    family, block = FAMILIES[name], block_of(dim)
    with handlers.seed(rng_seed=3):
        q = family.distribution(block)
    assert q.event_shape == (dim,)
    x = block.loc + 3.0 * block.scale * random.normal(random.key(0), (20, dim))
    expected = dist.Normal(block.loc, block.scale).to_event(1).log_prob(x)
    np.testing.assert_allclose(q.log_prob(x), expected, rtol=1e-4, atol=1e-4)
    draws, passed = q.sample_with_intermediates(random.key(1), (20,))
    expected = dist.Normal(block.loc, block.scale).to_event(1).log_prob(draws)
    np.testing.assert_allclose(q.log_prob(draws, passed), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_number_of_parameters_is_linear(name):
    """Counted at D, 2D, 4D, for even D: doubling D doubles what depends on D."""

    def count(dim):
        with handlers.seed(rng_seed=0), handlers.trace() as trace:
            FAMILIES[name].distribution(block_of(dim))
        return sum(np.size(site["value"]) for site in trace.values() if site["type"] == "param")

    small, middle, large = (count(dim) for dim in (10, 20, 40))
    assert large - middle == 2 * (middle - small)
    if name == "coupling":  # 4 layers: kernels (5, 32) and (32, 10) with biases; loc and scale
        assert small == 4 * (5 * 32 + 32 + 32 * 10 + 10) + 2 * 10


def test_wrong_options_are_refused():
    for wrong, message in (
        ({"num_flows": 0}, "num_flows"),
        ({"hidden": (0,)}, "hidden"),
        ({"hidden": (2.5,)}, "hidden"),
        ({"mask": "alternate"}, "Did you mean 'alternating'"),
        ({"bound": 0.0}, "bound"),
    ):
        with pytest.raises(ValueError, match=message):
            guides.Coupling(**wrong)
    assert guides.Coupling(hidden=8) == guides.Coupling(hidden=(8,))
    with handlers.seed(rng_seed=0), pytest.raises(ValueError, match="needs two halves"):
        guides.Coupling().distribution(block_of(1))
