"""Every rule of `moments.propagate` beside an independent computation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import each
from jax import lax
from scipy import special, stats

from numpyro_bnn.moments import Gaussian, propagate
from numpyro_bnn.moments.registry import RULES

pytestmark = pytest.mark.core
SHIPPED = frozenset(RULES)  # before any test or page adds a rule of its own
X = Gaussian(
    np.linspace(-1.5, 1.7, 6).reshape(2, 3),
    np.array([[0.3, 1.0, 0.01], [2.0, 0.5, 1e-9]]),
)
PLAIN = np.array([[0.3, -2.0, 1.0], [0.7, 0.0, -0.2]])


def random(seed, *shape):
    rng = np.random.default_rng(seed)
    return Gaussian(rng.normal(size=shape), rng.uniform(0.1, 2, shape))


IMAGE, KERNEL, W = random(0, 2, 4, 3, 2), random(1, 3, 2, 2, 3), random(2, 3, 4)


def primitives(jaxpr):
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from primitives(inner)


# -- elementwise: against integration --------------------------------------------------

# Primitive -> functions of one variable: those with a closed form, a break or an
# algebra of their own.
ELEMENTWISE = {
    "abs": [jnp.abs, lambda x: jnp.abs(2 * x - 1)],
    "add": [lambda x: x + PLAIN, lambda x: x + x, lambda x: x + jnp.tanh(x)],
    "clamp": [
        lambda x: lax.clamp(-0.5, x, 0.7),
        lambda x: lax.clamp(-0.5, x - 1, PLAIN + 2),
    ],
    "convert_element_type": [lambda x: jnp.tanh(x) * (x > 0).astype(x.dtype)],
    "cos": [jnp.cos, lambda x: jnp.cos(3 * x + 1)],
    "div": [lambda x: (x + 1) / (PLAIN + 3), lambda x: 1 / (1 + jnp.exp(-x))],
    "exp": [jnp.exp, lambda x: jnp.exp(1 - x), lambda x: x * jnp.exp(-x)],
    "ge": [
        lambda x: jnp.where(x >= 0, x, 0.2 * x),
        lambda x: jnp.where(x >= 0, x, -2.0 * x),
    ],
    "gt": [
        lambda x: jnp.where(x > 0.3, 1.0, 2.0),
        lambda x: jnp.where(x + 1 > 0, x + 1, 0.0),
    ],
    "integer_pow": [lambda x: x**2, lambda x: x**3, lambda x: (1 + x * x) ** -2],
    "le": [
        lambda x: jnp.where(x <= 0, x, 3.0 * x),
        lambda x: jnp.where(x <= 0, 0.5 * x, x),
    ],
    "logistic": [jax.nn.sigmoid, jax.nn.silu, lambda x: jax.nn.sigmoid(x - 2)],
    "lt": [lambda x: jnp.where(x < 0, -x, 0.0)],
    "max": [
        jax.nn.relu,
        lambda x: jnp.maximum(0.4, 2 * x),
        lambda x: 2 * jax.nn.relu(1 - x) - 1,
    ],
    "min": [lambda x: jnp.minimum(x, PLAIN), jax.nn.relu6],
    "mul": [lambda x: x * PLAIN, lambda x: x * x, lambda x: x * jnp.tanh(x)],
    "neg": [lambda x: -x, lambda x: -jnp.tanh(-x)],
    "select_n": [jax.nn.leaky_relu, lambda x: jnp.where(PLAIN > 0, x, 2.0)],
    "sin": [jnp.sin, lambda x: jnp.sin(2 * x - 1)],
    "square": [jnp.square, lambda x: jnp.square(x - 1)],
    "stop_gradient": [
        lax.stop_gradient,
        lambda x: x * lax.stop_gradient(jax.nn.sigmoid(x)),
    ],
    "sub": [lambda x: PLAIN - x, lambda x: x - x, lambda x: jnp.tanh(x) - x],
    "tanh": [jnp.tanh],
}
# The others share the quadrature of functions that are smooth between their breaks.
SMOOTH = [
    lambda x: jnp.arccos(jnp.tanh(x)),
    lambda x: lax.acosh(1.5 + jnp.square(x)),
    lambda x: lax.asin(jnp.tanh(x)),
    jnp.arcsinh,
    jnp.arctan,
    lambda x: jnp.arctan2(x, 1 + jnp.abs(x)),
    lambda x: lax.atanh(0.9 * jnp.tanh(x)),
    lax.bessel_i0e,
    lax.bessel_i1e,
    lambda x: jnp.cbrt(1 + x * x),
    lambda x: jnp.array(x, copy=True),
    jnp.cosh,
    lambda x: lax.digamma(1 + jnp.exp(x)),
    lambda x: jnp.where(jnp.abs(x) == x, x, 0.0),
    lax.erf,
    lax.erfc,
    lambda x: lax.erf_inv(0.9 * jnp.tanh(x)),
    lambda x: jax.nn.gelu(x, approximate=False),
    jnp.expm1,
    jax.nn.elu,
    lambda x: lax.exp2(0.5 * x),
    jax.nn.selu,
    lambda x: jnp.where(jnp.isfinite(x), jnp.tanh(x), 0.0),
    jax.nn.celu,
    lambda x: lax.lgamma(1 + jnp.exp(x)),
    lambda x: jnp.log(1 + jnp.exp(x)),
    lambda x: jnp.log1p(x * x),
    jnp.sinh,
    jax.nn.softplus,
    lambda x: jnp.where(x != 0, jnp.sin(x), 1.0),
    lambda x: jnp.where(~(x > 0), x, 0.5 * x),
    lambda x: (1 + x * x) ** 0.7,
    lambda x: lax.reduce_precision(x, 11, 52),
    lambda x: x * lax.rsqrt(1 + x * x),
    jax.nn.squareplus,
    lambda x: jnp.tan(jnp.tanh(x)),
    jax.nn.soft_sign,
    jax.nn.hard_tanh,
    jax.nn.mish,
    jax.nn.gelu,
    lambda x: jnp.clip(x, -0.5, 0.7),
    lambda x: jax.vjp(lambda y: (y, 2 * y), x)[1]((x, jnp.sin(x)))[0],
]
JUMPS = [
    jnp.sign,
    lambda x: jnp.where((x > -1) & (x < 1), x, 0.0),
    lambda x: jnp.where((x < -1) | (x > 1), x, 0.0),
    lambda x: jnp.where((x > -1) ^ (x > 1), x, 0.0),
]


def integrate(fn, x):
    """Mean and variance by the trapezoid rule on 40,000 intervals over +-9 sd."""
    z = np.linspace(-9, 9, 40_001)
    weight = np.exp(-0.5 * z * z)
    weight /= weight.sum()
    values = np.asarray(jax.vmap(fn)(x.mean + np.sqrt(x.var) * z[:, None, None]))
    mean = np.tensordot(weight, values, 1)
    return mean, np.tensordot(weight, (values - mean) ** 2, 1)


def agrees_with_integration(fn, tolerance=1e-6):
    found, (mean, var) = propagate(fn)(X), integrate(fn, X)
    for moment, expected, floor in (
        (found.mean, mean, np.sqrt(X.var)),
        (found.var, var, X.var),
    ):
        scale = np.maximum(np.abs(expected), floor)
        np.testing.assert_allclose(moment / scale, expected / scale, atol=tolerance)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_rule_agrees_with_integration(name, x64):
    for fn in ELEMENTWISE[name]:
        # The trapezoid rule is off by half a cell where a function jumps: 18 / 40,000 *
        # phi(0), times the jump.
        agrees_with_integration(
            fn, 1e-3 if name in ("gt", "convert_element_type") else 1e-6
        )


@pytest.mark.slow
def test_functions_without_a_closed_form_agree_with_integration(x64):
    for fn in SMOOTH:
        agrees_with_integration(fn, 1e-6)
    for fn in JUMPS:
        agrees_with_integration(fn, 1e-3)


@pytest.mark.parametrize(
    "fn", [jnp.tanh, lax.erf, jax.nn.silu, jax.nn.elu, jax.nn.softplus]
)
def test_quadrature_is_as_exact_as_documented(fn, x64):
    """Figures of docs/moments.md by sd, relative to the sd, or variance, of the
    function.

    At an sd of 100 panels of one width would be off by 5e-4 and 3e-3; the reference has
    25 points per unit of x.
    """
    for sd, error in (
        (0.1, 1e-9),
        (1.0, 1e-9),
        (3.0, 1e-6),
        (10.0, 1e-3),
        (100.0, 2e-5),
    ):
        x = Gaussian(
            np.array([[0.0, 0.3, 1.0], [-2.0, 0.5, -1.0]]) * sd, np.full((2, 3), sd**2)
        )
        mean, var = integrate(fn, x)
        found = propagate(fn)(x)
        assert np.abs((found.mean - mean) / np.sqrt(var)).max() < error, sd
        assert np.abs(found.var / var - 1).max() < error, sd


# Function -> the function less its limit at minus infinity, with all its digits.
SATURATED = {
    "sigmoid": (jax.nn.sigmoid, special.expit),
    "erf": (lax.erf, lambda x: special.erfc(-x)),
}


@pytest.mark.parametrize("name", SATURATED)
def test_saturated_units_have_moments(name, x64):
    """The break is 7 to 45 sd away; where it makes the variance, that was NaN."""
    fn, above = SATURATED[name]
    sd = np.array([0.1, 1.0, 1.5, 2.0, 3.0])
    mean = -np.arange(7, 45, 0.5)[:, None] * sd
    found = jax.jit(propagate(fn))(Gaussian(mean, np.broadcast_to(sd**2, mean.shape)))
    z = np.linspace(-9, 60, 10_001)[:, None, None]
    weight = np.exp(-0.5 * z * z) * (z[1] - z[0]) / np.sqrt(2 * np.pi)
    values = above(mean + sd * z)
    lifted = (weight * values).sum(0)
    spread = np.sqrt((weight * (values - lifted) ** 2).sum(0))
    rounding = 32 * np.finfo(float).eps * np.abs(fn(mean))
    assert np.all(np.abs(found.mean - fn(-1e3) - lifted) <= 0.01 * spread + rounding)
    assert np.all(np.abs(np.sqrt(found.var) - spread) <= 0.01 * spread + rounding)


SMALL = {
    "steep": (lambda x: jnp.tanh(1000 * x), 1.6e-5),
    "kink": (lambda x: jnp.abs(jnp.tanh(x)), 1e-9),
    "bent": (lambda x: jnp.cos(1000 * x) * jnp.exp(x), 1e-6),
}


@pytest.mark.parametrize("name", SMALL)
def test_small_variances_do_not_straighten_a_function(name):
    """In float32, where variances below 2.4e-5 are small."""
    fn, var = SMALL[name]
    found = jax.jit(propagate(fn))(
        Gaussian(jnp.zeros((2, 3), "float32"), jnp.full((2, 3), var, "float32"))
    )
    with jax.enable_x64(True):
        expected = integrate(fn, Gaussian(np.zeros((2, 3)), np.full((2, 3), var)))
    scale = np.sqrt(expected[1])
    np.testing.assert_allclose(found.mean / scale, expected[0] / scale, atol=2e-3)
    np.testing.assert_allclose(found.var, expected[1], rtol=2e-3)


NOT_INTEGRATED = {
    "pole": lambda x: 1 / x**2,
    "poles": lambda x: 1 / jnp.cos(x),
    "fast": lambda x: jnp.sin(100 * x * x),
    "infinite mean": lambda x: jnp.exp(x * x),
    "infinite variance": lambda x: jnp.exp(0.3 * x * jnp.maximum(x, 0.0)),
    "undefined": lambda x: jnp.sqrt(jnp.tanh(x)),
    "a hundred steps": lambda x: jnp.sign(jnp.sin(30 * jnp.abs(x) + 1)),
}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@each("name", NOT_INTEGRATED, fast={"pole", "fast", "infinite variance"})
def test_what_the_nodes_do_not_resolve_is_refused(name, dtype):
    """1 / x^2 had the mean 200.8, the oscillations half the variance."""
    fn = NOT_INTEGRATED[name]
    with jax.enable_x64(dtype == "float64"):
        x = Gaussian(
            jnp.array([[0.3, 0.1, 0.2]] * 2, dtype),
            jnp.array([[1.0, 2.0, 1.5]] * 2, dtype),
        )
        with pytest.raises(
            ValueError, match=r"do not integrate to 1% \(6 of 6 elements\)"
        ):
            propagate(fn)(x)
        if name in ("pole", "fast") or dtype == "float32":
            compiled = jax.jit(propagate(fn))(x)
            assert bool(
                jnp.isnan(compiled.mean).all() and jnp.isnan(compiled.var).all()
            )


# -- broadcasting: against integration -------------------------------------------------

COLUMN = np.array([[0.5], [-2.0]])
# Shape of the random array, and a function whose result is larger.
BROADCAST = {
    "affine, then tanh": ((), lambda w: jnp.tanh(w * PLAIN)),
    "as many elements as nodes": (
        (),
        lambda w: jnp.tanh(w) + w * np.linspace(1, 2, 64),
    ),
    "function with its own derivative": ((), lambda w: jax.nn.softplus(w) * PLAIN + w),
    "choice": ((), lambda w: lax.select(w > 0, w * PLAIN, jnp.tanh(w) * PLAIN)),
    "row and column": (
        (1, 3),
        lambda w: jax.nn.softplus(w) * COLUMN + jnp.tanh(w * COLUMN),
    ),
    "twice": ((1, 1), lambda w: jnp.tanh(jnp.tanh(w * PLAIN[:1]) + w * COLUMN) + w),
}


@each("name", BROADCAST, fast={"affine, then tanh", "choice", "twice"})
def test_a_function_of_a_smaller_array_is_one_function(name, x64):
    """``tanh(w * x)`` crashed, ``tanh(w) + w * x`` with as many elements as nodes had
    the variance 1e-12.
    """
    shape, fn = BROADCAST[name]
    z = np.linspace(-9, 9, 8001)
    weight = np.exp(-0.5 * z * z) / np.exp(-0.5 * z * z).sum()
    values = np.asarray(
        jax.jit(jax.vmap(fn))(
            0.5 + np.sqrt(1.3) * z.reshape(-1, *(1,) * len(shape)) + np.zeros(shape)
        )
    )
    mean = np.tensordot(weight, values, 1)
    found = jax.jit(propagate(fn))(Gaussian(np.full(shape, 0.5), np.full(shape, 1.3)))
    assert found.mean.shape == found.var.shape == mean.shape
    np.testing.assert_allclose(found.mean, mean, atol=2e-6)
    np.testing.assert_allclose(
        found.var, np.tensordot(weight, (values - mean) ** 2, 1), atol=2e-6
    )


# -- linear in each operand: against differences, which are exact ----------------------


def conv(x, kernel):
    return lax.conv_general_dilated(
        x, kernel, (2, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def window_sum(x):
    return lax.reduce_window(x, 0.0, lax.add, (1, 2, 3, 1), (1, 2, 1, 1), "SAME")


@jax.custom_jvp
def doubled(x):
    return x + x


doubled.defjvp(lambda primals, tangents: (doubled(*primals), 2 * tangents[0]))

RANDOM = {"x": X, "w": W, "image": IMAGE, "kernel": KERNEL}
# Names of random arrays -> functions that take them.
LINEAR = {
    "x": [
        lambda x: x @ W.mean,
        lambda x: x.sum(1),
        lambda x: lax.cumsum(x, 1),
        lambda x: x[:, None] + jnp.zeros((2, 4, 3)),
        lambda x: lax.dynamic_slice(x, (jnp.int32(0), jnp.int32(1)), (2, 2)),
        lambda x: lax.dynamic_update_slice(x, jnp.ones((1, 1)), (1, 1)),
        lambda x: lax.dynamic_update_slice(jnp.ones((4, 4)), x, (1, 1)),
        lambda x: x[:, jnp.array([2, 0, 2])],
        lambda x: jnp.take(x, 1, axis=0),
        lambda x: jnp.take(x, jnp.array([0, 7]), mode="fill", fill_value=7.0),
        lambda x: lax.optimization_barrier((x, x))[1],
        lambda x: jnp.pad(x, 1, constant_values=3.0),
        lambda x: x.reshape(3, 2),
        lambda x: lax.rev(x, (1,)),
        lambda x: x.at[0, 1].set(2.0),
        lambda x: jnp.ones((3, 3)).at[:2].set(x),
        lambda x: x.at[1].add(2.0),
        lambda x: x[:, ::2],
        lambda x: jnp.split(x, 3, 1)[1],
        lambda x: jnp.squeeze(x[:1], 0),
        lambda x: jnp.tile(x, (2, 1)),
        lambda x: x.T,
        lambda x: x[:, :1] * 2 - x[:, 1:2],
        lambda x: doubled(x) + 1,
    ],
    "x, w": [
        lambda x, w: x @ w,
        lambda x, w: jnp.einsum("nd,dh->hn", x, w),
        lambda x, w: jnp.concatenate([x, PLAIN, w.T], 0),
        lambda x, w: x.at[0, 2].add(w[0, 0]),
        lambda x, w: jnp.stack([x, w.T[:2]]),
        lambda x, w: x + w[:2, :3],
        lambda x, w: jax.vjp(lambda y: (y, 2 * y), PLAIN)[1]((x, w[:2, :3]))[0],
        lambda x, w: x - w[:2, :3],
        lambda x, w: x * w[:2, :3],
        lambda x, w: jnp.where(PLAIN > 0, x, w[:2, :3]),
    ],
    "image": [lambda x: conv(x, KERNEL.mean), window_sum],
    "kernel": [lambda k: conv(IMAGE.mean, k)],
    "image, kernel": [conv],
}


def differences(fn, gaussians):
    """Exact moments of a function that is linear in each independent array."""
    means = [np.asarray(g.mean) for g in gaussians]

    def at(*moves):
        moved = [mean.copy() for mean in means]
        for argument, element in moves:
            moved[argument].flat[element] += 1
        return np.asarray(fn(*moved))

    center = at()
    single = {
        (a, i): at((a, i)) - center
        for a, mean in enumerate(means)
        for i in range(mean.size)
    }
    var = sum(change**2 * gaussians[a].var.flat[i] for (a, i), change in single.items())
    for i in range(means[0].size if len(means) == 2 else 0):
        for j in range(means[1].size):
            mixed = at((0, i), (1, j)) - single[0, i] - single[1, j] - center
            var += mixed**2 * gaussians[0].var.flat[i] * gaussians[1].var.flat[j]
    return center, var


@pytest.mark.parametrize(
    ("names", "fn"), [(names, fn) for names, fns in LINEAR.items() for fn in fns]
)
def test_linear_rules_agree_with_exact_differences(names, fn, x64):
    gaussians = [RANDOM[name] for name in names.split(", ")]
    found, expected = propagate(fn)(*gaussians), differences(jax.jit(fn), gaussians)
    for moment, value in zip(found, expected, strict=True):
        np.testing.assert_allclose(moment, value, rtol=1e-12, atol=1e-13)


# -- maxima: against the product of cdfs -----------------------------------------------


def pool(window, padding="SAME", strides=(2, 2), dilation=(1, 1)):
    shape = {
        "window_dimensions": (1, *window, 1),
        "window_strides": (1, *strides, 1),
        "padding": padding,
    }
    return lambda x: lax.reduce_window(
        x, -jnp.inf, lax.max, **shape, window_dilation=(1, *dilation, 1)
    )


UNEVEN = ((0, 0), (2, 0), (0, 1), (0, 0))
MAXIMA = {
    "max": [lambda x: jnp.maximum(x[:, 0], x[:, 1])],
    "min": [lambda x: jnp.minimum(x[:, 0], x[:, 1])],
    "reduce_max": [lambda x: x[:, :2].max(1), lambda x: x.max((0, 2))],
    "reduce_min": [lambda x: x[:, :2].min(1), lambda x: x.min((1, 2))],
    "reduce_window_max": [
        pool((2, 1), "VALID"),
        pool((3, 3)),
        pool((2, 3), UNEVEN, strides=(2, 1), dilation=(1, 2)),
    ],
}


def largest(fn, sign):
    """Moments of each output."""
    far = np.full(IMAGE.mean.shape, -sign * np.inf)
    members = []
    for element in range(far.size):
        probe = far.copy()
        probe.flat[element] = 0.0
        members.append(np.isfinite(np.asarray(fn(probe))))
    t = np.linspace(-15, 15, 6001)
    cdfs = stats.norm.cdf(
        t[:, None], sign * IMAGE.mean.ravel(), np.sqrt(IMAGE.var.ravel())
    )
    moments = np.empty((2, *members[0].shape))
    for output in np.ndindex(members[0].shape):
        cdf = cdfs[:, [member[output] for member in members]].prod(1)
        above = (1 - cdf).sum() * (t[1] - t[0]) - (t[1] - t[0]) / 2  # E(y + 15)
        square = (2 * (t + 15) * (1 - cdf)).sum() * (t[1] - t[0])  # E(y + 15)^2
        moments[(0, *output)], moments[(1, *output)] = (
            sign * (above - 15),
            square - above**2,
        )
    return moments


@pytest.mark.parametrize("name", MAXIMA)
def test_maximum_rule_agrees_with_the_product_of_cdfs(name, x64):
    """Independent elements: what is integrated on a fine grid is exact to rounding but
    for its square spacing.
    """
    for fn in MAXIMA[name]:
        mean, var = largest(jax.jit(fn), -1 if "min" in name else 1)
        found = jax.jit(propagate(fn))(IMAGE)
        np.testing.assert_allclose(found.mean, mean, atol=2e-5)
        np.testing.assert_allclose(found.var, var, rtol=1e-4)


def test_every_rule_is_in_a_function_of_these_tables(x64):
    linear = [
        (fn, [RANDOM[name].mean for name in names.split(", ")])
        for names, fns in LINEAR.items()
        for fn in fns
    ]
    elementwise = [
        (fn, [X.mean]) for fns in (*ELEMENTWISE.values(), SMOOTH, JUMPS) for fn in fns
    ]
    maxima = [(fn, [IMAGE.mean]) for fns in MAXIMA.values() for fn in fns]
    found = set()
    for fn, arrays in linear + elementwise + maxima:
        found |= set(primitives(jax.make_jaxpr(fn)(*arrays).jaxpr))
    assert not SHIPPED - found
