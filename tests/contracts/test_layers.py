"""Every layer keeps its contract and has the values of Flax, XLA or a formula."""

import pickle
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from flax import linen
from numpy.testing import assert_allclose, assert_array_equal
from registry import IMAGE, LAYERS, LayerRow, firsts, rows

from numpyro_bnn import nn

pytestmark = pytest.mark.core

UNIT = np.finfo(np.float32).eps / 2  # roundoff of float32


def inputs_of(row, batch, dtype=np.float32):
    return (
        np.random.default_rng(1).normal(size=(*batch, *row.input_shape)).astype(dtype)
    )


def params_of(row, seed=0, dtype=np.float32):
    """Parameters in general position: biases and gains too are random."""
    random = np.random.default_rng(seed)
    return {
        name: (name.rpartition(".")[2] == "scale")
        + random.normal(size=shape).astype(dtype) / prod(shape[:-1]) ** 0.5
        for name, shape in row.layer.param_shapes(row.input_shape).items()
    }


def close(found, expected, factor=1.0):
    # 1e-5 is about 170 unit roundoffs: the depth times the number of terms of these
    # small networks.
    assert_allclose(found, expected, rtol=1e-5 * factor, atol=1e-5 * factor)


# -- the contract of every layer -------------------------------------------------------


# Activations differ by their formula only, which has a test below.
VARIANTS = {
    name: row
    for name, row in LAYERS.items()
    if not name.startswith("Activation") or name in firsts(LAYERS)
}


@pytest.mark.parametrize("row", rows(VARIANTS, fast=VARIANTS))
def test_specification_is_static_and_tells_all_shapes(row):
    again = pickle.loads(pickle.dumps(row.layer))
    assert again == row.layer
    assert len({again, row.layer, nn.Dense(99)}) == 2
    params = jax.eval_shape(lambda: row.layer.init(jax.random.key(0), row.input_shape))
    shapes = {name: value.shape for name, value in params.items()}
    assert shapes == row.layer.param_shapes(row.input_shape)
    names = {name.rpartition(".")[2] for name in params}
    assert names <= {"kernel", "bias", "scale"}, "prior and start follow from the role"
    for batch in [(4,), (2, 1, 5)]:
        outputs = jax.eval_shape(row.layer.apply, params, inputs_of(row, batch))
        assert outputs.shape == (*batch, *row.layer.output_shape(row.input_shape))


@pytest.mark.parametrize("row", rows(VARIANTS, fast=VARIANTS))
def test_wrong_input_shape_is_refused_where_it_is(row):
    wrong = row.wrong_shape
    if wrong is None:  # elementwise: every shape is right
        assert row.layer.output_shape((5, 4)) == (5, 4)
        return
    net = nn.Sequential([row.layer])
    path = next(net.children())[0]
    params = {f"{path}.{name}": value for name, value in params_of(row).items()}
    for call in (
        net.param_shapes,
        lambda shape: net.apply(params, np.ones(shape, np.float32)),
    ):
        with pytest.raises(ValueError, match=r"input shape .*It takes") as error:
            call(wrong)
        assert f"at '{path}" in str(error.value)


@pytest.mark.parametrize("row", [LAYERS[name] for name in sorted(firsts(LAYERS))])
def test_precision_is_that_of_the_run(row):
    """No silent promotion."""

    def everything(params, x):
        statistics = row.layer.statistics(params, x)
        loss = jax.grad(lambda values: jnp.sum(row.layer.apply(values, x, statistics)))
        return row.layer.apply(params, x), loss(params)

    def dtypes(*args):
        return {
            leaf.dtype for leaf in jax.tree.leaves(jax.eval_shape(everything, *args))
        }

    low = params_of(row), inputs_of(row, (2, 3))
    high = params_of(row, dtype=np.float64), inputs_of(row, (2, 3), np.float64)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        assert dtypes(*low) == {np.dtype("float32")}
    with jax.enable_x64(True):
        assert dtypes(*high) == {np.dtype("float64")}
        assert dtypes(*low) == {np.dtype("float32")}
        mixed = jax.eval_shape(row.layer.apply, high[0], low[1]).dtype
        assert mixed == (jnp.float64 if high[0] else jnp.float32)
        initial = jax.eval_shape(
            lambda key: row.layer.init(key, row.input_shape), jax.random.key(0)
        )
        assert all(value.dtype == jnp.float64 for value in initial.values())


@pytest.mark.parametrize("row", rows(VARIANTS))
def test_batch_axes_draws_and_statistics_agree_and_gradients_are_finite(row):
    """With the statistics of the batch, a point's value depends on nothing else in the
    batch.

    Gradients also where all inputs are 0, and where all parameters are.
    """
    layer, x = row.layer, inputs_of(row, (2, 4))
    draws = jax.tree.map(
        lambda *values: np.stack(values), params_of(row), params_of(row, seed=1)
    )

    def gradients(params, x):
        return jax.grad(lambda *point: jnp.sum(jnp.sin(layer.apply(*point))), (0, 1))(
            params, x
        )

    @jax.jit
    def run(draws, x):
        params = jax.tree.map(lambda values: values[0], draws)
        flat = x.reshape((8, *row.input_shape))
        statistics = layer.statistics(params, flat)
        points = jax.tree.map(
            lambda values: jnp.stack([values, values, 0 * values]), params
        )
        return {
            "batch axes": layer.apply(params, x).reshape(
                (8, *layer.output_shape(row.input_shape))
            ),
            "flat": layer.apply(params, flat),
            "many draws": jax.vmap(
                layer.apply, (0 if params else None, None), axis_size=2
            )(draws, flat)[0],
            "given statistics": layer.apply(params, flat, statistics),
            "alone": layer.apply(params, flat[:1], statistics),
            "gradients": jax.vmap(gradients)(points, jnp.stack([flat, 0 * flat, flat])),
        }

    found = jax.tree.map(np.asarray, run(draws, x))
    close(found["batch axes"], found["flat"])
    close(found["many draws"], found["flat"])
    # another order of the same operations
    close(found["given statistics"], found["flat"], factor=10)
    close(found["alone"], found["flat"][:1], factor=10)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found["gradients"]))


# -- values of other libraries ---------------------------------------------------------


def flax(module):
    return lambda params, x: module.apply(
        {"params": params}, x, mutable=["batch_stats"]
    )[0]


def xla(*geometry):
    layout = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    return lambda params, x: jax.lax.conv_general_dilated(
        x, params["kernel"], *geometry, **layout
    )


def pooled(kind, *geometry, **options):
    return lambda params, x: kind(x, *geometry, **options)


EXACT_NORM = {"epsilon": 0.0, "use_fast_variance": False}
BODY = nn.Sequential([nn.Dense(4), "tanh"])
CONV = partial(nn.Conv2d, 4, (3, 2), use_bias=False)
MAX = linen.max_pool
MEAN = linen.avg_pool
REFERENCES = {
    "Dense": (nn.Dense(4), (3,), flax(linen.Dense(4))),
    "Conv2d": (nn.Conv2d(4, (3, 2), 2), IMAGE, flax(linen.Conv(4, (3, 2), (2, 2)))),
    "Conv2d SAME": (CONV((1, 1)), (8, 7, 5), xla((1, 1), "SAME")),
    "Conv2d VALID": (CONV((2, 3), "VALID"), (8, 7, 5), xla((2, 3), "VALID")),
    "Conv2d padded": (CONV((2, 3), 2), (8, 7, 5), xla((2, 3), ((2, 2), (2, 2)))),
    "MaxPool": (nn.MaxPool((3, 2)), IMAGE, pooled(MAX, (3, 2), (3, 2))),
    "MaxPool global": (nn.MaxPool(None), IMAGE, pooled(MAX, IMAGE[:2], IMAGE[:2])),
    "MaxPool SAME": (
        nn.MaxPool((2, 3), (1, 2), "SAME"),
        IMAGE,
        pooled(MAX, (2, 3), (1, 2), "SAME"),
    ),
    "AvgPool": (nn.AvgPool((3, 2)), IMAGE, pooled(MEAN, (3, 2), (3, 2))),
    "AvgPool SAME": (
        nn.AvgPool((2, 3), (1, 2), "SAME"),
        IMAGE,
        pooled(MEAN, (2, 3), (1, 2), "SAME", count_include_pad=False),
    ),
    "BatchNorm": (
        nn.BatchNorm(),
        IMAGE,
        flax(linen.BatchNorm(use_running_average=False, **EXACT_NORM)),
    ),
    "LayerNorm": (nn.LayerNorm(), (5,), flax(linen.LayerNorm(**EXACT_NORM))),
    "Residual": (
        nn.Residual(nn.Dense(3)),
        (3,),
        lambda p, x: x + x @ p["body.kernel"] + p["body.bias"],
    ),
    "Residual with shortcut": (
        nn.Residual(BODY, nn.Dense(4, use_bias=False)),
        (3,),
        lambda p, x: (
            jnp.tanh(x @ p["body.Dense_0.kernel"] + p["body.Dense_0.bias"])
            + x @ p["shortcut.kernel"]
        ),
    ),
}


def test_every_layer_has_a_reference():
    """Those without are only shapes, compositions, or have `FORMULAS`."""
    known = {type(layer) for layer, _, _ in REFERENCES.values()}
    known |= {nn.Flatten, nn.Sequential, nn.Activation}
    missing = {type(row.layer).__name__ for row in LAYERS.values()} - {
        kind.__name__ for kind in known
    }
    assert not missing, f"add {missing} to REFERENCES"


@pytest.mark.parametrize(
    ("layer", "shape", "reference"), REFERENCES.values(), ids=REFERENCES
)
def test_values_and_gradients_are_those_of_flax_and_xla(layer, shape, reference, x64):
    """With the same parameters, to rounding in float64; a maximum of equal values has
    its gradient at the first.
    """
    row = LayerRow(layer, shape)
    params = params_of(row, dtype=np.float64)
    x = np.round(2 * inputs_of(row, (9,), np.float64))  # many ties

    def values(way, *point):
        return way(*point), jax.grad(lambda *at: jnp.sum(jnp.sin(way(*at))), (0, 1))(
            *point
        )

    found, expected = jax.jit(
        lambda *point: [values(way, *point) for way in (layer.apply, reference)]
    )(params, x)
    jax.tree.map(
        lambda *pair: assert_allclose(*pair, rtol=1e-9, atol=1e-11), found, expected
    )


def test_a_maximum_does_not_lose_nan():
    x = np.ones((2, 6, 6, 1), np.float32)
    x[0, 0, 0, 0] = np.nan
    assert np.isnan(nn.MaxPool(2).apply({}, x)).sum() == 1


FORMULAS = {
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
def test_activations_are_their_formulas(name, x64):
    x = np.linspace(-20, 20, 401)
    values = nn.Activation(name).apply({}, x)
    assert_allclose(values, FORMULAS[name](x), rtol=1e-12, atol=1e-14)
    if name == "leaky_relu":
        assert nn.Activation(name, 0.2).apply({}, jnp.array(-1.0)) == pytest.approx(
            -0.2
        )


def test_integer_images_become_floats():
    row = LAYERS["Conv2d SAME"]
    bytes_of_images = np.arange(168, dtype=np.uint8).reshape(2, 7, 6, 2)
    apply, params = jax.jit(row.layer.apply), params_of(row)
    floats = apply(params, bytes_of_images.astype(np.float32))
    close(apply(params, bytes_of_images), floats)


# -- normalization ---------------------------------------------------------------------


@pytest.mark.parametrize("number", [7, 100_001])
def test_constant_feature_is_its_shift(number):
    """Exactly, with gradient 0, however the sum of its mean is rounded; a nearly
    constant one is normalized.
    """
    constants = np.array([0.0, 1 / 3, -123.4567, 1e-30, 1e30], np.float32)
    last = 1 + 1e-4 * np.random.default_rng(0).normal(size=number).astype(np.float32)
    x = np.column_stack([np.tile(constants, (number, 1)), last])
    net, six = nn.BatchNorm(), np.ones(6, np.float32)
    params = {"scale": 2 * six, "bias": six / 4}

    @jax.jit
    def run(x, new):
        outputs, pull = jax.vjp(lambda x: net.apply(params, x), x)
        statistics = net.statistics(params, x)
        return outputs, pull(jnp.cos(outputs))[0], net.apply(params, new, statistics)

    # A later point away from the constant cannot be divided by 0.
    outputs, gradient, new = run(x, 5 * six[None])
    assert_array_equal(outputs[:, :5], 0.25)
    assert_array_equal(gradient[:, :5], 0.0)
    assert_array_equal(new[:, :5], 0.25)
    assert np.isfinite(gradient).all()
    exact = (last.astype(float) - last.mean(dtype=float)) / last.std(dtype=float)
    # The mean near 1 is known to a few units of rounding; divided by the sd of 1e-4
    # that is their 1e4-fold.
    assert_allclose((outputs[:, 5] - 0.25) / 2, exact, atol=4 * 2 * UNIT * 1e4)


# -- structure -------------------------------------------------------------------------


def test_architectures_are_the_layers_they_say():
    def kinds(net):
        return [name for name, _ in net.children()]

    expected = (
        "Dense_0 LayerNorm_0 Activation_0 Dense_1 LayerNorm_1 Activation_1 Dense_2"
    )
    assert kinds(nn.MLP([5, 4, 1], "tanh", nn.LayerNorm())) == expected.split()
    expected = (
        "Conv2d_0 Activation_0 MaxPool_0 Conv2d_1 Activation_1 MaxPool_1 Flatten_0 "
        "Dense_0"
    )
    assert kinds(nn.CNN([8, 16], [10])) == expected.split()
    shapes = nn.CNN([8, 16], [10]).param_shapes((28, 28, 1))
    assert shapes["Dense_0.kernel"] == (7 * 7 * 16, 10)
    shapes = nn.CNN([8], [3], pool=nn.AvgPool(None)).param_shapes((9, 9, 1))
    assert shapes["Dense_0.kernel"] == (8, 3)


def test_initial_kernels_have_the_variance_of_their_fan_in(key):
    """7200 numbers: 5 standard errors of an sd are 4.2 %; biases are 0, gains 1."""
    params = nn.Sequential([nn.Conv2d(200, 3), nn.LayerNorm()]).init(key, (5, 5, 4))
    assert_allclose(np.std(params["Conv2d_0.kernel"]), 1 / 36**0.5, rtol=0.042)
    assert_array_equal(params["Conv2d_0.bias"], 0.0)
    assert_array_equal(params["LayerNorm_0.scale"], 1.0)


# -- errors that teach -----------------------------------------------------------------

TABLE = np.ones((4, 3), np.float32)
PLAIN = nn.BatchNorm(False, False)


def applied(net, trained_on, x):
    return net.apply(net.init(jax.random.key(0), (trained_on,)), x)


REFUSED = [
    (lambda: nn.Dense(2).apply({"w": TABLE}, TABLE), "no entry 'kernel'. Present: w"),
    (
        lambda: applied(nn.MLP([4, 1]), 5, TABLE),
        (
            "nn.Dense at 'Dense_0': argument `x` got input shape (4, 3). It takes "
            "(..., 5)."
        ),
    ),
    (lambda: applied(nn.LayerNorm(), 3, TABLE[:, :1]), "It takes (..., 3)"),
    (
        lambda: applied(nn.MLP([4, 1], norm=nn.BatchNorm()), 3, TABLE[:1]),
        (
            "nn.BatchNorm at 'BatchNorm_0': argument `x` got one value per feature, "
            "shape (1, 4)"
        ),
    ),
    (lambda: PLAIN.apply({}, TABLE, {"other": 1}), "Compute them by"),
    (lambda: PLAIN.apply({}, TABLE[:, :1], PLAIN.statistics({}, TABLE)), "It takes"),
    (
        lambda: nn.Residual(nn.Dense(1)).apply(
            {"body.kernel": TABLE[:3, :1], "body.bias": TABLE[0, :1]}, TABLE
        ),
        "nn.Residual: argument `x` got input shape (4, 3)",
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_layers_that_do_not_fit_are_refused(call, message):
    with pytest.raises((ValueError, TypeError)) as error:
        jax.eval_shape(call)
    assert message in str(error.value)
