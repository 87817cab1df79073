"""Flows: transforms against autodiff, identity at the start, size, fits of known targets, NeuTra, flowjax."""

import math
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
from numpyro_bnn.guides.flows import AffineCoupling, Conditioner, RationalQuadraticCoupling
from numpyro_bnn.guides.flows.blockwise import Blockwise
from numpyro_bnn.guides.flows.masks import halves
from numpyro_bnn.guides.flows.spline import MIN_SLOPE, num_parameters, spline, spline_inverse

BINS = 5

# -- transforms ---------------------------------------------------------------------------------------


def conditioner(key, inputs, outputs, scale=0.25):
    """A conditioner with two hidden layers and weights of N(0, scale^2) at its end: far from the identity."""
    sizes = [inputs, 6, 4, outputs] if inputs else [0, outputs]
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


def rational(key, split=2, dim=5, swap=False):
    kept, changed = (dim - split, split) if swap else (split, dim - split)
    outputs = conditioner(key, kept, num_parameters(BINS) * changed, scale=0.15)
    return RationalQuadraticCoupling(outputs, split, swap, bound=1.5, interval=3.0)


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
    "spline": (rational, 5),
    "spline, leading half": (partial(rational, swap=True), 5),
    "spline of one number": (partial(rational, split=0, dim=1), 1),
    "blockwise": (side_by_side, 5),
    "Coupling": (partial(whole, family=guides.Coupling(3, (4,))), 5),
    "Coupling, random halves": (partial(whole, family=guides.Coupling(5, (4,), "random")), 5),
    "SplineCoupling": (partial(whole, family=guides.SplineCoupling(3, (4,), num_bins=BINS)), 5),
    "SplineCoupling, random halves": (
        partial(whole, family=guides.SplineCoupling(2, (4,), "random", num_bins=BINS)),
        5,
    ),
}
each_transform = pytest.mark.parametrize("name", TRANSFORMS)


def make(name, seed=1):
    build, dim = TRANSFORMS[name]
    return build(random.key(seed)), dim


def points(dim, *batch):
    """Inside and outside of the intervals of the splines."""
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
    assert not layer.eq(rational(key))
    assert side_by_side(key).eq(side_by_side(key))
    assert not side_by_side(key).eq(side_by_side(other_key))
    assert not side_by_side(key).eq(layer)


@pytest.mark.parametrize("dim", [2, 5, 8])
@pytest.mark.parametrize("mask", ["alternating", "random"])
def test_halves_are_complementary(dim, mask):
    """Follow the coordinates of the block through permutations and layers."""
    layers = halves("test", dim, 6, mask)
    passed = np.arange(dim)
    for half in layers:
        passed = passed if half.then is None else passed[half.then]
    order = np.argsort(passed)  # at the entrance, of what leaves in the order of the block
    changed = []
    for half in layers:
        changed.append(frozenset(order[: half.split] if half.swap else order[half.split :]))
        assert half.sizes(dim) == (dim - len(changed[-1]), len(changed[-1]))
        order = order if half.then is None else order[half.then]
    np.testing.assert_array_equal(order, np.arange(dim))
    for first, second in zip(changed[::2], changed[1::2], strict=True):
        assert first | second == set(range(dim))
        assert not first & second
    if mask == "alternating":
        assert changed[0] == set(range(dim // 2, dim))
        assert len(set(changed)) == 2
    elif dim > 2:
        assert len(set(changed)) > 2
        again, other = (halves("test", dim, 6, mask, seed)[-1].then for seed in (0, 1))
        np.testing.assert_array_equal(again, layers[-1].then)  # a fixed seed
        assert (other != again).any()


# -- splines ------------------------------------------------------------------------------------------


def knots_and_slopes(raw, bound):
    """Of one spline with parameters (3K - 1, 1), by their definition."""
    shares = [np.asarray(1e-3 + (1 - BINS * 1e-3) * jax.nn.softmax(raw[i : i + BINS, 0])) for i in (0, BINS)]
    x, y = (np.concatenate([[-bound], -bound + 2 * bound * np.cumsum(share)]) for share in shares)
    offset = math.log(math.expm1(1 - MIN_SLOPE))
    return x, y, MIN_SLOPE + np.log1p(np.exp(np.asarray(raw[2 * BINS :, 0]) + offset))


@pytest.mark.usefixtures("x64")
def test_spline_passes_its_knots_with_its_slopes():
    """Knots and slopes by their definition; smooth across knots; the identity outside."""
    bound, raw = 3.0, random.normal(random.key(2), (3 * BINS - 1, 1))
    x, y, slopes = knots_and_slopes(raw, bound)
    for side in (-1e-9, 0.0, 1e-9):
        at, log_slope = spline(x[1:-1, None] + side, raw, bound)
        np.testing.assert_allclose(at[:, 0], y[1:-1], atol=1e-7)
        np.testing.assert_allclose(jnp.exp(log_slope[:, 0]), slopes, rtol=1e-6)
    ends, log_slope = spline(jnp.array([[-bound - 1e-9], [bound - 1e-9]]), raw, bound)
    np.testing.assert_allclose(ends[:, 0], [-bound, bound], atol=1e-7)
    np.testing.assert_allclose(log_slope, 0.0, atol=1e-6)
    outside = jnp.array([[-7.0], [3.5], [1e8]])
    np.testing.assert_array_equal(spline(outside, raw, bound)[0], outside)
    np.testing.assert_array_equal(spline_inverse(outside, raw, bound), outside)
    grid = jnp.linspace(-4, 4, 801)[:, None]
    values, log_slope = spline(grid, raw, bound)
    assert (jnp.diff(values[:, 0]) > 0).all()
    slope = jax.vmap(jax.grad(lambda v: spline(v[None], raw, bound)[0][0]))(grid[:, 0])
    np.testing.assert_allclose(jnp.exp(log_slope[:, 0]), slope, rtol=1e-9)


def test_extreme_splines_stay_finite():
    """Bins of the smallest size, points on knots and gradients there, in float32."""
    raw = 30.0 * random.normal(random.key(2), (3 * BINS - 1, 4))
    x = jnp.concatenate([jnp.linspace(-3.0, 3.0, 61), jnp.array([-3.0001, 1e30])])[:, None] * jnp.ones(4)

    def total(x, raw):
        y, log_slope = spline(x, raw, 3.0)
        return (y + log_slope).sum() + spline_inverse(x, raw, 3.0).sum()

    for value in (total(x, raw), *jax.grad(total, (0, 1))(x, raw)):
        assert jnp.isfinite(value).all()


@pytest.mark.usefixtures("x64")
def test_spline_is_that_of_flowjax():
    """An independent implementation, given the knots and slopes."""
    import equinox
    from flowjax.bijections import RationalQuadraticSpline
    from paramax import unwrap

    bound, raw = 3.0, random.normal(random.key(2), (3 * BINS - 1, 1))
    x, y, slopes = knots_and_slopes(raw, bound)
    reference = equinox.tree_at(
        lambda b: (b.x_pos, b.y_pos, b.derivatives),
        unwrap(RationalQuadraticSpline(knots=BINS, interval=bound)),
        (jnp.array(x), jnp.array(y), jnp.concatenate([jnp.ones(1), slopes, jnp.ones(1)])),
    )
    grid = jnp.linspace(-3.5, 3.5, 200)
    expected, log_slopes = jax.vmap(reference.transform_and_log_det)(grid)
    at, log_slope = spline(grid[:, None], raw, bound)
    np.testing.assert_allclose(at[:, 0], expected, atol=1e-12)
    np.testing.assert_allclose(log_slope[:, 0], log_slopes, atol=1e-10)


# -- families -----------------------------------------------------------------------------------------

FAMILIES = {
    "coupling": guides.Coupling(),
    "coupling, random halves": guides.Coupling(5, (3, 4), "random"),
    "spline": guides.SplineCoupling(),
    "spline, random halves": guides.SplineCoupling(2, mask="random", num_bins=3),
}


def block_of(dim):
    return guides.Block("b", {"a": (dim,)}, jnp.linspace(-1.0, 2.0, dim), jnp.linspace(0.1, 1.5, dim))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dim", [1, 2, 7])
def test_starts_as_the_mean_field(name, dim):
    family, block = FAMILIES[name], block_of(dim)
    if dim == 1 and isinstance(family, guides.Coupling):
        return  # refused: test_wrong_options
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
        ({"hidden": (0,)}, "positive widths"),
        ({"mask": "alternate"}, "Did you mean 'alternating'"),
        ({"bound": 0.0}, "bound"),
    ):
        with pytest.raises(ValueError, match=message):
            guides.Coupling(**wrong)
    for wrong in ({"num_bins": 1}, {"interval": 0.0}):
        with pytest.raises(ValueError, match="SplineCoupling: argument"):
            guides.SplineCoupling(**wrong)
    assert guides.Coupling(hidden=8) == guides.Coupling(hidden=(8,))
    with handlers.seed(rng_seed=0), pytest.raises(ValueError, match="SplineCoupling"):
        guides.Coupling().distribution(block_of(1))
