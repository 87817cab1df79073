"""Layers and networks: the contract of every layer, references, and exact scale invariance of normalization."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from flax import linen
from registry import LAYER_VARIANTS, LAYERS, LayerRow, rows

from numpyro_bnn import nn
from numpyro_bnn.nn.conv import convolve_by_product

pytestmark = pytest.mark.core

U = np.finfo(np.float32).eps / 2  # unit roundoff of float32


def data(row, batch, dtype=np.float32):
    return np.random.default_rng(1).normal(size=(*batch, *row.input_shape)).astype(dtype)


def params_of(row, seed=0, dtype=np.float32):
    """Parameters in general position: biases and gains too are random."""
    random = np.random.default_rng(seed)
    shapes = row.layer.param_shapes(row.input_shape)
    return {
        name: (nn.base.role(name, s) == "scale")
        + random.normal(size=s).astype(dtype) / nn.base.fan_in(name, s) ** 0.5
        for name, s in shapes.items()
    }


def close(a, b, factor=1.0):
    # 1e-5 is about 170 unit roundoffs: the depth times the number of terms of these small networks.
    np.testing.assert_allclose(a, b, rtol=1e-5 * factor, atol=1e-5 * factor)


# -- the contract of every layer ------------------------------------------------------------------------


@pytest.mark.parametrize("row", rows(LAYERS, "test_shapes_agree_with_apply", LAYER_VARIANTS))
def test_shapes_agree_with_apply(row):
    params = jax.eval_shape(lambda key: row.layer.init(key, row.input_shape), jax.random.key(0))
    assert {name: p.shape for name, p in params.items()} == row.layer.param_shapes(row.input_shape)
    for batch in [(4,), (2, 3), (2, 1, 5)]:
        y = jax.eval_shape(row.layer.apply, params, data(row, batch))
        assert y.shape == (*batch, *row.layer.output_shape(row.input_shape))


@pytest.mark.parametrize("row", rows(LAYERS, "test_batch_axes_and_vmap", LAYER_VARIANTS))
def test_batch_axes_and_vmap(row):
    draws, x = [params_of(row, seed) for seed in range(2)], data(row, (2, 3))
    stacked = jax.tree.map(lambda *p: np.stack(p), *draws)

    @jax.jit
    def ways(params, x):
        flat = row.layer.apply(draws[0], x.reshape((6, *row.input_shape)))
        many = jax.vmap(row.layer.apply, (0 if params else None, None), axis_size=2)(params, x)
        return flat, many, [row.layer.apply(draw, x) for draw in draws]

    flat, many, single = ways(stacked, x)
    close(flat.reshape(single[0].shape), single[0])
    close(many, np.stack(single))


@pytest.mark.parametrize("row", rows(LAYERS, "test_specification_is_static", LAYER_VARIANTS))
def test_specification_is_static(row):
    copy = pickle.loads(pickle.dumps(row.layer))
    assert copy == row.layer
    assert hash(copy) == hash(row.layer)
    assert len({copy, row.layer, nn.Dense(99)}) == 2


@pytest.mark.parametrize("row", rows(LAYERS, "test_dtypes", LAYER_VARIANTS))
def test_dtypes(row):
    params, x = params_of(row, dtype=np.float64), data(row, (4,), np.float64)
    low = jax.jit(row.layer.apply)(params, x)
    assert low.dtype == jnp.float32
    with jax.enable_x64(True):
        high = jax.jit(row.layer.apply)(params, x)
        assert high.dtype == jnp.float64
        close(low, high)
        # float32 stays float32 with x64 on, and float32 data with float64 draws gives float64.
        params32 = {name: p.astype(np.float32) for name, p in params.items()}
        x32 = x.astype(np.float32)
        assert jax.eval_shape(row.layer.apply, params32, x32).dtype == jnp.float32
        mixed = jax.eval_shape(row.layer.apply, params, x32).dtype
        assert mixed == (jnp.float64 if params else jnp.float32)
        own = jax.eval_shape(lambda key: row.layer.init(key, row.input_shape), jax.random.key(0))
        assert all(p.dtype == jnp.float64 for p in own.values())


@pytest.mark.parametrize("row", rows(LAYERS, "test_no_silent_promotion", LAYER_VARIANTS))
def test_no_silent_promotion(row):
    def everything(params, x):
        statistics = row.layer.statistics(params, x)
        loss = jax.value_and_grad(lambda p: jnp.sum(row.layer.apply(p, x, statistics)))
        return row.layer.apply(params, x), loss(params)

    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        jax.eval_shape(everything, params_of(row), data(row, (2, 3)))


@pytest.mark.parametrize("row", rows(LAYERS, "test_wrong_input_shape", LAYER_VARIANTS))
def test_wrong_input_shape(row):
    wrong = row.wrong_shape
    if wrong is None:  # elementwise: every shape is right
        assert row.layer.output_shape((5, 4)) == (5, 4)
        return
    net = nn.Sequential([row.layer])
    path = next(net.children())[0]
    params = {f"{path}.{name}": p for name, p in params_of(row).items()}
    for call in (net.param_shapes, lambda shape: net.apply(params, np.ones(shape, np.float32))):
        with pytest.raises(ValueError, match=r"input shape .*It takes") as error:
            call(wrong)
        assert f"at '{path}" in str(error.value)


@pytest.mark.parametrize("row", rows(LAYERS, "test_gradients_are_finite", LAYER_VARIANTS))
def test_gradients_are_finite(row):
    gradient = jax.jit(jax.grad(lambda p, x: jnp.sum(jnp.sin(row.layer.apply(p, x))), (0, 1)))
    params, x = params_of(row), data(row, (4,))
    zero = jax.tree.map(np.zeros_like, params)
    for p, inputs in [(params, x), (params, 0 * x), (zero, x)]:
        assert all(bool(np.isfinite(g).all()) for g in jax.tree.leaves(gradient(p, inputs)))


@pytest.mark.parametrize("row", rows(LAYERS, "test_statistics_reproduce_the_batch", LAYER_VARIANTS))
def test_statistics_reproduce_the_batch(row):
    @jax.jit
    def predict(params, x):
        statistics = row.layer.statistics(params, x)
        alone = row.layer.apply(params, x[:1], statistics)
        return row.layer.apply(params, x), row.layer.apply(params, x, statistics), alone

    own, given, alone = predict(params_of(row), data(row, (8,)))
    close(given, own, factor=10)  # another order of the same operations
    close(alone, own[:1], factor=10)  # a point's value depends on nothing else in the batch


def test_integer_images_become_floats():
    net = nn.CNN([2], [3], window=3)
    params = net.init(jax.random.key(0), (6, 6, 1))
    images = np.arange(72, dtype=np.uint8).reshape(2, 6, 6, 1)
    np.testing.assert_array_equal(net.apply(params, images), net.apply(params, images.astype(np.float32)))


# -- agreement with references --------------------------------------------------------------------------

FLAX = {
    "Dense": (nn.Dense(4), linen.Dense(4), (3,)),
    "Conv SAME": (nn.Conv2d(4, 3), linen.Conv(4, (3, 3)), (7, 6, 2)),
    "Conv SAME strides": (nn.Conv2d(4, 3, 2), linen.Conv(4, (3, 3), (2, 2)), (7, 6, 2)),
    "Conv VALID": (nn.Conv2d(4, (3, 2), (2, 1), "VALID"), linen.Conv(4, (3, 2), (2, 1), padding="VALID"), (7, 6, 2)),
    "Conv padded": (nn.Conv2d(4, 5, 2, padding=1), linen.Conv(4, (5, 5), (2, 2), padding=1), (7, 6, 2)),
    "BatchNorm": (
        nn.BatchNorm(),
        linen.BatchNorm(use_running_average=False, epsilon=0.0, use_fast_variance=False),
        (5,),
    ),
    "BatchNorm of images": (
        nn.BatchNorm(),
        linen.BatchNorm(use_running_average=False, epsilon=0.0, use_fast_variance=False),
        (7, 6, 2),
    ),
    "LayerNorm": (nn.LayerNorm(), linen.LayerNorm(epsilon=0.0, use_fast_variance=False), (5,)),
}


@pytest.mark.parametrize(("ours", "flax", "shape"), FLAX.values(), ids=FLAX)
def test_same_parameters_same_values_as_flax(ours, flax, shape, key):
    x = 2 + jax.random.normal(key, (9, *shape))
    params = {n: jax.random.normal(key, s) for n, s in ours.param_shapes(shape).items()}
    expected, _ = flax.apply({"params": params}, x, mutable=["batch_stats"])
    close(ours.apply(params, x), expected)


@pytest.mark.parametrize("padding", ["VALID", "SAME"])
@pytest.mark.parametrize(("window", "strides"), [(2, None), (3, 2), ((2, 3), (1, 2))])
def test_same_pooling_as_flax(window, strides, padding, key):
    x = jax.random.normal(key, (5, 7, 6, 2))
    pair = (window, window) if isinstance(window, int) else window
    step = pair if strides is None else (strides, strides) if isinstance(strides, int) else strides
    np.testing.assert_array_equal(
        nn.MaxPool(window, strides, padding).apply({}, x), linen.max_pool(x, pair, step, padding)
    )
    expected = linen.avg_pool(x, pair, step, padding, count_include_pad=False)
    close(nn.AvgPool(window, strides, padding).apply({}, x), expected)


@pytest.mark.parametrize("window", [2, (3, 2), None])
def test_gradient_of_pooling_goes_to_one_maximum(window):
    """That of a general window, which scatters to the first of equal values; and NaN is not lost."""
    x = np.round(np.random.default_rng(0).normal(size=(4, 7, 6, 2)), 0).astype(np.float32)  # many ties
    pool = nn.MaxPool(window)
    size = (7, 6) if window is None else np.broadcast_to(window, 2)

    def scattered(x):
        return jax.lax.reduce_window(x, -np.inf, jax.lax.max, (1, *size, 1), (1, *size, 1), "VALID")

    found, expected = (
        jax.grad(lambda x, f=f: jnp.sum(jnp.exp(f(x))))(x) for f in (lambda x: pool.apply({}, x), scattered)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert np.isnan(pool.apply({}, np.full((1, 7, 6, 1), np.nan))).all()
    x[0, 0, 0, 0] = np.nan
    assert np.isnan(pool.apply({}, x)).sum() == 1


def test_mean_of_ones_is_one_with_padding():
    ones = jnp.ones((1, 7, 7, 1))
    np.testing.assert_array_equal(nn.AvgPool(3, 2, "SAME").apply({}, ones), jnp.ones((1, 4, 4, 1)))


ACTIVATION_REFERENCES = {
    "identity": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "leaky_relu": lambda x: np.where(x > 0, x, 0.01 * x),
    "tanh": np.tanh,
    "erf": scipy.special.erf,
    "gelu": lambda x: x * scipy.stats.norm.cdf(x),
    "silu": lambda x: x * scipy.special.expit(x),
    "softplus": lambda x: np.logaddexp(x, 0),
}


@pytest.mark.parametrize("name", nn.ACTIVATIONS)
def test_activations(name, x64):
    x = np.linspace(-20, 20, 401)
    np.testing.assert_allclose(
        nn.Activation(name).apply({}, x), ACTIVATION_REFERENCES[name](x), rtol=1e-12, atol=1e-14
    )


def test_leaky_slope():
    assert nn.Activation("leaky_relu", 0.2).apply({}, jnp.array(-1.0)) == pytest.approx(-0.2)


# -- normalization --------------------------------------------------------------------------------------

FED = {
    "BatchNorm": nn.Sequential([nn.Dense(5), nn.BatchNorm(use_bias=False)]),
    "LayerNorm": nn.Sequential([nn.Dense(5), nn.LayerNorm()]),
}


def fed(net, scale=1.0):
    params = params_of(LayerRow(net, (13,)), seed=3)
    return {name: p * np.float32(scale) if name.startswith("Dense") else p for name, p in params.items()}


@pytest.fixture
def rows_of_data():
    return np.random.default_rng(4).normal(size=(40, 13)).astype(np.float32)


@pytest.mark.parametrize("net", FED.values(), ids=FED)
def test_scaling_by_powers_of_two_changes_no_bit(net, rows_of_data):
    apply = jax.jit(net.apply)
    expected = apply(fed(net), rows_of_data)
    for k in (-83, -40, -1, 1, 3, 40, 83):
        np.testing.assert_array_equal(apply(fed(net, 2.0**k), rows_of_data), expected)


@pytest.mark.parametrize("net", FED.values(), ids=FED)
def test_scaling_by_any_constant(net, rows_of_data):
    apply = jax.jit(net.apply)
    params = fed(net)
    expected = apply(params, rows_of_data)
    # Rounding of the 14 terms of a pre-activation and of c w: each at most u times the sum of their sizes.
    size = np.abs(rows_of_data) @ np.abs(params["Dense_0.kernel"]) + np.abs(params["Dense_0.bias"])
    h = rows_of_data @ params["Dense_0.kernel"] + params["Dense_0.bias"]
    spread = h.std(axis=0 if net is FED["BatchNorm"] else 1, keepdims=True)
    gain = np.abs(params["LayerNorm_0.scale" if "LayerNorm_0.scale" in params else "BatchNorm_0.scale"])
    # Numerator, mean and sd each carry that error: four times it leaves one to spare.
    bound = 4 * 16 * U * (size / spread).max() * (gain + np.abs(expected))
    for c in (1e-25, 3e-12, 0.7, 123.0, 7e11, 1e25):
        assert (np.abs(apply(fed(net, c), rows_of_data) - expected) <= bound).all(), c


@pytest.mark.parametrize("net", FED.values(), ids=FED)
@pytest.mark.parametrize("high", [False, True], ids=["float32", "float64"])
def test_gradient_is_orthogonal_to_the_weights(net, high, rows_of_data):
    """Euler: L(c w) = L(w) for all c > 0, so <w, dL/dw> = 0 and dL/dw is homogeneous of degree -1."""
    with jax.enable_x64(high):
        dtype = np.float64 if high else np.float32
        unit = np.finfo(dtype).eps
        x = rows_of_data.astype(dtype)
        gradient = jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(net.apply(p, x)))))

        def of_weights(c):
            params = {name: p.astype(dtype) for name, p in fed(net).items()}
            params |= {name: p * dtype(c) for name, p in params.items() if name.startswith("Dense")}
            flat = [[v[n] for n in sorted(v) if n.startswith("Dense")] for v in (params, gradient(params))]
            return (np.concatenate([np.ravel(a).astype(float) for a in arrays]) for arrays in flat)

        _, reference = of_weights(1.0)
        for c in (1e-25, 1e-3, 1.0, 1e25):
            w, g = of_weights(c)
            assert np.isfinite(g).all()
            # 40 rows x 13 inputs are summed: rounding adds up to at most that many units.
            bound = 40 * 13 * unit * np.linalg.norm(g)
            assert abs(w @ g) <= bound * np.linalg.norm(w), c
            np.testing.assert_allclose(g * c, reference, rtol=0, atol=bound * c)


@pytest.mark.parametrize("number", [7, 1000, 100_001])
def test_constant_feature(number):
    """A constant feature gives exactly the shift, and gradient 0, however the sum of its mean is rounded."""
    constants = np.array([0.0, 1 / 3, -123.4567, 1e-30, 1e30], np.float32)
    net, params = nn.BatchNorm(), {"scale": np.full(6, 2.0, np.float32), "bias": np.full(6, 0.25, np.float32)}
    x = np.column_stack([np.tile(constants, (number, 1)), np.arange(number, dtype=np.float32) / number])

    @jax.jit
    def run(x, new):
        y, pull = jax.vjp(lambda x: net.apply(params, x), x)
        statistics = net.statistics(params, x)
        return y, pull(jnp.cos(y))[0], statistics[""].sd, net.apply(params, new, statistics)

    # A later point away from the constant cannot be divided by 0.
    y, gradient, sd, new = run(x, np.full((1, 6), 5.0, np.float32))
    np.testing.assert_array_equal(y[:, :5], 0.25)
    np.testing.assert_array_equal(gradient[:, :5], 0.0)
    np.testing.assert_array_equal(sd[:5], 0.0)
    np.testing.assert_array_equal(new[:, :5], 0.25)
    assert bool(np.isfinite(gradient).all())
    assert sd[5] > 0.2


def test_nearly_constant_feature_is_still_normalized():
    x = 1 + 1e-4 * jax.random.normal(jax.random.key(0), (1000, 1))
    exact = np.asarray(x, np.float64)
    exact = (exact - exact.mean()) / exact.std()
    # The mean near 1 is known to a few units of rounding; divided by the sd of 1e-4 that is their 1e4-fold.
    np.testing.assert_allclose(nn.BatchNorm(False, False).apply({}, x), exact, atol=4 * 2 * U * 1e4)


def test_statistics_are_the_moments(rows_of_data):
    net = nn.MLP([5, 4, 1], norm=nn.BatchNorm())
    params, x = params_of(LayerRow(net, (13,))), np.asarray(rows_of_data)
    statistics = jax.jit(jax.vmap(net.statistics, (0, None)))  # one set per posterior draw
    draws = jax.tree.map(lambda p: np.stack([p, 2 * p]), params)
    first, again = statistics(draws, x), statistics(draws, x)
    assert list(first) == ["BatchNorm_0", "BatchNorm_1"]
    assert first["BatchNorm_1"].sd.shape == (2, 4)
    for draw, factor in ((0, 1), (1, 2)):
        h = factor * (x @ params["Dense_0.kernel"] + params["Dense_0.bias"])
        close(first["BatchNorm_0"].mean[draw], h.mean(0))
        close(first["BatchNorm_0"].sd[draw], h.std(0))
    jax.tree.map(np.testing.assert_array_equal, first, again)  # a pure function: nothing was kept


# -- structure ------------------------------------------------------------------------------------------


def test_residual_is_a_sum(key):
    body, shortcut = nn.Sequential([nn.Dense(4), "tanh"]), nn.Dense(4, use_bias=False)
    block = nn.Residual(body, shortcut)
    params = block.init(key, (3,))
    assert list(params) == ["body.Dense_0.kernel", "body.Dense_0.bias", "shortcut.kernel"]
    x = jax.random.normal(key, (5, 3))
    inside = jnp.tanh(x @ params["body.Dense_0.kernel"])
    close(block.apply(params, x), inside + x @ params["shortcut.kernel"])
    plain = nn.Residual(nn.Dense(3))
    own = plain.init(key, (3,))
    close(plain.apply(own, x), x + x @ own["body.kernel"])


def test_architectures():
    def kinds(net):
        return [name for name, _ in net.children()]

    assert kinds(nn.MLP([5, 4, 1], "tanh", nn.LayerNorm())) == [
        *["Dense_0", "LayerNorm_0", "Activation_0", "Dense_1", "LayerNorm_1", "Activation_1", "Dense_2"]
    ]
    assert kinds(nn.CNN([8, 16], [10])) == [
        *["Conv2d_0", "Activation_0", "MaxPool_0", "Conv2d_1", "Activation_1", "MaxPool_1"],
        *["Flatten_0", "Dense_0"],
    ]
    assert nn.CNN([8, 16], [10]).param_shapes((28, 28, 1))["Dense_0.kernel"] == (7 * 7 * 16, 10)
    assert nn.CNN([8], [3], pool=nn.AvgPool(None)).param_shapes((9, 9, 1))["Dense_0.kernel"] == (8, 3)


def test_resnet_counts_the_parameters_of_resnet_20():
    """He et al. (2016), section 4.2: 20 layers, n = 3, has 0.27 million parameters."""
    net = nn.ResNet([16, 32, 64], outputs=10, blocks=3, norm=nn.BatchNorm())
    shapes = net.param_shapes((32, 32, 3))
    convolutions = [n for n in shapes if n.endswith("kernel") and "shortcut" not in n]
    assert len(convolutions) == 20
    assert round(sum(int(np.prod(s)) for s in shapes.values()) / 1e6, 2) == 0.27
    assert shapes["Residual_3.shortcut.kernel"] == (1, 1, 16, 32)
    assert shapes["Residual_3.body.BatchNorm_1.scale"] == (32,)
    assert "Residual_4.shortcut.kernel" not in shapes


def test_initial_kernels_have_the_variance_of_their_fan_in():
    """7200 numbers: 5 standard errors of an sd are 4.2 %; biases are 0, gains 1."""
    net = nn.Sequential([nn.Conv2d(200, 3), nn.LayerNorm()])
    params = net.init(jax.random.key(0), (5, 5, 4))
    np.testing.assert_allclose(np.std(params["Conv2d_0.kernel"]), 1 / 36**0.5, rtol=0.042)
    np.testing.assert_array_equal(params["Conv2d_0.bias"], 0.0)
    np.testing.assert_array_equal(params["LayerNorm_0.scale"], 1.0)


def test_names_tell_role_and_fan_in():
    table = {
        ("Dense_0.kernel", (3, 8)): ("kernel", 3),
        ("Conv2d_0.kernel", (5, 5, 2, 16)): ("kernel", 50),
        ("Embed_0.embedding", (1000, 16)): ("kernel", 1),
        ("layers[0].weight", (8, 3)): ("kernel", 3),
        ("conv.weight", (16, 2, 5, 5)): ("kernel", 50),
        ("cell.weight_ih", (24, 3)): ("kernel", 3),
        ("Conv_0.kernel", (5, 2, 16)): ("kernel", 10),
        ("net/attention.query.kernel", (6, 4, 3)): ("kernel", 6),
        ("attention/value.kernel", (6, 4, 3)): ("kernel", 6),
        ("key.kernel", (6, 12)): ("kernel", 6),
        ("attention.out.kernel", (4, 3, 5)): ("kernel", 12),
        ("attention.query.bias", (4, 3)): ("bias", 1),
        ("norm.weight", (8,)): ("scale", 1),
        ("LayerNorm_0.scale", (8,)): ("scale", 1),
        ("conv.bias", (16, 1, 1)): ("bias", 1),
        ("net/Dense_0.bias", (8,)): ("bias", 1),
    }
    for (name, shape), expected in table.items():
        assert (nn.base.role(name, shape), nn.base.fan_in(name, shape) if expected[0] == "kernel" else 1) == (
            expected
        ), name
    assert nn.base.input_axis("attention.query.kernel", (6, 4, 3)) == 0
    assert (nn.base.input_axis("conv.weight", (16, 2, 5, 5)), nn.base.output_axis("conv.weight", (16, 2, 5, 5))) == (
        1,
        0,
    )
    assert (nn.base.input_axis("c.kernel", (5, 5, 2, 16)), nn.base.output_axis("c.kernel", (5, 5, 2, 16))) == (2, 3)


# -- errors that teach ----------------------------------------------------------------------------------

X = np.ones((4, 3), np.float32)
MISTAKES = {
    "units": (lambda: nn.Dense(0), ValueError, "nn.Dense: argument `units` got 0. Pass an integer"),
    "units float": (lambda: nn.Dense(2.0), ValueError, "`units` got 2.0"),
    "units bool": (lambda: nn.Dense(True), ValueError, "`units` got True"),
    "channels": (lambda: nn.Conv2d(-1), ValueError, "nn.Conv2d: argument `channels`"),
    "window": (lambda: nn.Conv2d(3, (3, 3, 3)), ValueError, "nn.Conv2d: argument `window`"),
    "window text": (lambda: nn.MaxPool("2"), ValueError, "nn.MaxPool: argument `window`"),
    "strides": (lambda: nn.AvgPool(2, 0), ValueError, "nn.AvgPool: argument `strides`"),
    "padding": (lambda: nn.Conv2d(3, 3, padding="same"), ValueError, "Known: SAME, VALID, an integer"),
    "padding negative": (lambda: nn.Conv2d(3, 3, padding=-1), ValueError, "`padding`"),
    "pool padding": (lambda: nn.MaxPool(2, padding="FULL"), ValueError, "Known: SAME, VALID"),
    "activation": (lambda: nn.Activation("tahn"), ValueError, "Did you mean 'tanh'"),
    "activation type": (lambda: nn.Activation(["tanh"]), ValueError, "nn.Activation: argument `name`"),
    "slope": (lambda: nn.Activation("leaky_relu", float("nan")), ValueError, "`negative_slope` got nan"),
    "layers": (lambda: nn.Sequential([]), ValueError, "nn.Sequential: argument `layers`"),
    "layers number": (lambda: nn.Sequential(5), ValueError, "nn.Sequential: argument `layers`"),
    "layer class": (lambda: nn.Sequential([nn.Dense]), TypeError, "Pass layers such as"),
    "body": (lambda: nn.Residual(None), TypeError, "nn.Residual: argument `body`"),
    "widths": (lambda: nn.MLP(5), ValueError, "nn.MLP: argument `widths` got 5. Pass a list"),
    "widths empty": (lambda: nn.MLP([]), ValueError, "nn.MLP: argument `widths`"),
    "widths float": (lambda: nn.MLP([5.5, 1]), ValueError, "nn.MLP: argument `widths` got 5.5"),
    "CNN": (lambda: nn.CNN([8], []), ValueError, "nn.CNN: argument `widths`"),
    "outputs": (lambda: nn.ResNet([8], 0), ValueError, "nn.ResNet: argument `outputs`"),
    "blocks": (lambda: nn.ResNet([8], 2, blocks=0), ValueError, "nn.ResNet: argument `blocks`"),
    "input_shape": (lambda: nn.Dense(2).param_shapes(3), TypeError, "`input_shape` got 3. Pass the shape"),
    "input_shape text": (lambda: nn.Dense(2).param_shapes("ab"), TypeError, "`input_shape`"),
    "input_shape size": (lambda: nn.Dense(2).param_shapes((0,)), ValueError, "Every size must be at least 1"),
    "params": (lambda: nn.Dense(2).apply({"w": X}, X), ValueError, "no entry 'kernel'. Present: w"),
    "features": (
        lambda: nn.MLP([4, 1]).apply(nn.MLP([4, 1]).init(jax.random.key(0), (5,)), X),
        ValueError,
        "nn.Dense at 'Dense_0': argument `x` got input shape (4, 3). It takes (..., 5).",
    ),
    "one feature": (
        lambda: nn.LayerNorm(use_bias=False).apply({"scale": np.ones(3)}, X[:, :1]),
        ValueError,
        "It takes (..., 3)",
    ),
    "one row": (
        lambda: nn.MLP([4, 1], norm=nn.BatchNorm()).apply(
            nn.MLP([4, 1], norm=nn.BatchNorm()).init(jax.random.key(0), (3,)), X[:1]
        ),
        ValueError,
        "nn.BatchNorm at 'BatchNorm_0': argument `x` got one value per feature, shape (1, 4)",
    ),
    "statistics": (
        lambda: nn.BatchNorm(False, False).apply({}, X, {"other": None}),
        ValueError,
        "Compute them by `net.statistics(params, x_train)`",
    ),
    "statistics of others": (
        lambda: nn.BatchNorm(False, False).apply({}, X[:, :1], nn.BatchNorm(False, False).statistics({}, X)),
        ValueError,
        "It takes (..., 3)",
    ),
    "sum": (
        lambda: nn.Residual(nn.Dense(1)).apply({"body.kernel": X[:3, :1], "body.bias": X[0, :1]}, X),
        ValueError,
        "nn.Residual: argument `x` got input shape (4, 3)",
    ),
}


@pytest.mark.parametrize(("call", "kind", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(call, kind, message):
    with pytest.raises(kind) as error:
        call()
    assert message in str(error.value)


def test_numpy_integers_are_integers():
    assert nn.MLP([np.int64(5), 1]) == nn.MLP([5, 1])
    assert hash(nn.Conv2d(np.int32(3), np.int64(3))) == hash(nn.Conv2d(3, 3))


@pytest.mark.parametrize("channels", [pytest.param(1, marks=pytest.mark.slow), 9])
@pytest.mark.parametrize("padding", ["SAME", "VALID", ((2, 2), (1, 0))])
@pytest.mark.parametrize("strides", [(1, 1), (2, 3)])
def test_convolution_by_product(channels, padding, strides):
    """Values and gradients of XLA's convolution, which other devices than CPUs use, to rounding in float64."""
    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(0), 3)
        x = jax.random.normal(keys[0], (2, 8, 7, channels))
        kernel = jax.random.normal(keys[1], (3, 2, channels, 4))

        def reference(x, kernel):
            return jax.lax.conv_general_dilated(
                x, kernel, strides, padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
            )

        expected, pull = jax.vjp(reference, x, kernel)
        found, pull_found = jax.vjp(lambda x, k: convolve_by_product(x, k, strides, padding), x, kernel)
        np.testing.assert_allclose(found, expected, atol=1e-12)
        cotangent = jax.random.normal(keys[2], expected.shape)
        for ours, theirs in zip(pull_found(cotangent), pull(cotangent), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-12)
