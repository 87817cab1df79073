"""Moment propagation: one row per rule, each against an independent computation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from scipy import stats

from numpyro_bnn.moments import Gaussian, propagate
from numpyro_bnn.moments.closed_forms import maximum_of
from numpyro_bnn.moments.registry import RULES

X = Gaussian(np.linspace(-1.5, 1.7, 6).reshape(2, 3), np.array([[0.3, 1.0, 0.01], [2.0, 0.5, 1e-9]]))
IMAGE = Gaussian(
    np.random.default_rng(0).normal(size=(2, 6, 5, 2)), np.random.default_rng(1).uniform(0.1, 2, (2, 6, 5, 2))
)
KERNEL = Gaussian(
    np.random.default_rng(2).normal(size=(3, 2, 2, 3)), np.random.default_rng(3).uniform(0.1, 1, (3, 2, 2, 3))
)
W = Gaussian(np.random.default_rng(4).normal(size=(3, 4)), np.random.default_rng(5).uniform(0.1, 1, (3, 4)))
SHIPPED = frozenset(RULES)  # before any test, example or page adds a rule of its own
PLAIN = np.array([[0.3, -2.0, 1.0], [0.7, 0.0, -0.2]])
CONV = ("NHWC", "HWIO", "NHWC")


# ------------------------------------------------------------------------- elementwise: against integration

# Primitive -> functions of one variable that contain it.
ELEMENTWISE = {
    "abs": [jnp.abs, lambda x: jnp.abs(2 * x - 1)],
    "acos": [lambda x: jnp.arccos(jnp.tanh(x))],
    "acosh": [lambda x: lax.acosh(1.5 + jnp.square(x))],
    "add": [lambda x: x + PLAIN, lambda x: x + x, lambda x: x + jnp.tanh(x)],
    "add_any": [lambda x: jax.vjp(lambda y: (y, 2 * y), x)[1]((x, jnp.sin(x)))[0]],
    "and": [lambda x: jnp.where((x > -1) & (x < 1), x, 0.0)],
    "asin": [lambda x: lax.asin(jnp.tanh(x))],
    "asinh": [jnp.arcsinh],
    "atan": [jnp.arctan],
    "atan2": [lambda x: jnp.arctan2(x, 1 + jnp.abs(x))],
    "atanh": [lambda x: lax.atanh(0.9 * jnp.tanh(x))],
    "bessel_i0e": [lax.bessel_i0e],
    "bessel_i1e": [lax.bessel_i1e],
    "cbrt": [lambda x: jnp.cbrt(1 + x * x)],
    "clamp": [lambda x: lax.clamp(-0.5, x, 0.7), lambda x: lax.clamp(-0.5, x - 1, PLAIN + 2)],
    "convert_element_type": [lambda x: jnp.tanh(x) * (x > 0).astype(x.dtype)],
    "copy": [lambda x: jnp.array(x, copy=True)],
    "cos": [jnp.cos, lambda x: jnp.cos(3 * x + 1)],
    "cosh": [jnp.cosh],
    "digamma": [lambda x: lax.digamma(1 + jnp.exp(x))],
    "div": [lambda x: (x + 1) / (PLAIN + 3), lambda x: 1 / (1 + jnp.exp(-x)), jax.nn.soft_sign],
    "eq": [lambda x: jnp.where(jnp.abs(x) == x, x, 0.0)],
    "erf": [lax.erf],
    "erf_inv": [lambda x: lax.erf_inv(0.9 * jnp.tanh(x))],
    "erfc": [lax.erfc, lambda x: jax.nn.gelu(x, approximate=False)],
    "exp": [jnp.exp, lambda x: jnp.exp(1 - x), lambda x: x * jnp.exp(-x)],
    "exp2": [lambda x: lax.exp2(0.5 * x)],
    "expm1": [jnp.expm1, jax.nn.elu, jax.nn.selu, jax.nn.celu],
    "ge": [lambda x: jnp.where(x >= 0, x, 0.2 * x), lambda x: jnp.where(x >= 0, PLAIN * x, -x)],
    "gt": [lambda x: jnp.where(x > 0.3, 1.0, 2.0), lambda x: jnp.where(x + 1 > 0, x + 1, 0.0)],
    "integer_pow": [lambda x: x**2, lambda x: x**3, lambda x: (1 + x * x) ** -2],
    "is_finite": [lambda x: jnp.where(jnp.isfinite(x), jnp.tanh(x), 0.0)],
    "le": [lambda x: jnp.where(x <= 0, x, 3.0 * x)],
    "lgamma": [lambda x: lax.lgamma(1 + jnp.exp(x))],
    "log": [lambda x: jnp.log(1 + jnp.exp(x))],
    "log1p": [lambda x: jnp.log1p(x * x)],
    "logistic": [jax.nn.sigmoid, jax.nn.silu, lambda x: jax.nn.sigmoid(x - 2)],
    "lt": [lambda x: jnp.where(x < 0, -x, 0.0)],
    "max": [jax.nn.relu, lambda x: jnp.maximum(0.4, 2 * x), lambda x: 2 * jax.nn.relu(1 - x) - 1],
    "min": [lambda x: jnp.minimum(x, PLAIN), jax.nn.relu6, lambda x: jnp.clip(x, -0.5, 0.7)],
    "mul": [lambda x: x * PLAIN, lambda x: x * x, lambda x: x * jnp.tanh(x)],
    "ne": [jax.nn.softplus, lambda x: jnp.where(x != 0, jnp.sin(x), 1.0)],
    "neg": [lambda x: -x, lambda x: -jnp.tanh(-x)],
    "not": [lambda x: jnp.where(~(x > 0), x, 0.5 * x)],
    "or": [lambda x: jnp.where((x < -1) | (x > 1), x, 0.0)],
    "pow": [lambda x: (1 + x * x) ** 0.7],
    "reduce_precision": [lambda x: lax.reduce_precision(x, 11, 52)],
    "rsqrt": [lambda x: x * lax.rsqrt(1 + x * x)],
    "select_n": [jax.nn.leaky_relu, lambda x: jnp.where(PLAIN > 0, x, 2.0), jax.nn.hard_tanh],
    "sign": [jnp.sign],
    "sin": [jnp.sin, lambda x: jnp.sin(2 * x - 1)],
    "sinh": [jnp.sinh],
    "sqrt": [jax.nn.squareplus],
    "square": [jnp.square, lambda x: jnp.square(x - 1)],
    "stop_gradient": [lax.stop_gradient, lambda x: x * lax.stop_gradient(jax.nn.sigmoid(x))],
    "sub": [lambda x: PLAIN - x, lambda x: x - x, lambda x: jnp.tanh(x) - x],
    "tan": [lambda x: jnp.tan(jnp.tanh(x))],
    "tanh": [jnp.tanh, jax.nn.mish, jax.nn.gelu],
    "xor": [lambda x: jnp.where((x > -1) ^ (x > 1), x, 0.0)],
}


def integrate(fn, x):
    """Mean and variance by the trapezoid rule on 40,000 intervals over +-9 sd; independent of the package."""
    z = np.linspace(-9, 9, 40_001)
    weight = np.exp(-0.5 * z * z)
    weight /= weight.sum()
    values = np.asarray(jax.vmap(fn)(x.mean + np.sqrt(x.var) * z[:, None, None]))
    mean = np.tensordot(weight, values, 1)
    return mean, np.tensordot(weight, (values - mean) ** 2, 1)


def primitives(jaxpr):
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for held in equation.params.values():
            inner = getattr(held, "jaxpr", held)
            if hasattr(inner, "eqns"):
                yield from primitives(inner)


# The trapezoid rule is off by half a cell where a function jumps: 18 / 40,000 * phi(0), times the jump.
JUMPS = {"gt", "sign", "and", "or", "xor", "not", "convert_element_type"}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_rule_agrees_with_integration(name, x64):
    used = [set(primitives(jax.make_jaxpr(fn)(X.mean).jaxpr)) for fn in ELEMENTWISE[name]]
    assert any(name in names for names in used), "this row does not contain its primitive"
    for fn in ELEMENTWISE[name]:
        found = propagate(fn)(X)
        tolerance = 1e-3 if name in JUMPS else 1e-6
        for moment, expected in zip(found, integrate(fn, X), strict=True):
            scale = np.maximum(np.abs(expected), np.sqrt(X.var) if moment is found.mean else X.var)
            np.testing.assert_allclose(moment / scale, expected / scale, atol=tolerance)


@pytest.mark.parametrize("fn", [jnp.tanh, lax.erf, jax.nn.silu, jax.nn.elu, jax.nn.softplus])
@pytest.mark.parametrize(
    ("sd", "error"),
    [
        pytest.param(0.1, 1e-9, marks=pytest.mark.slow),
        (1.0, 1e-9),
        pytest.param(3.0, 1e-6, marks=pytest.mark.slow),
        pytest.param(10.0, 1e-3, marks=pytest.mark.slow),
    ],
)
def test_quadrature_error_by_sd(fn, sd, error, x64):
    """Figures of docs/moments.md: relative to the sd, or variance, of the function."""
    x = Gaussian(jnp.array([[0.0, 0.3, 1.0, -2.0]]) * sd, jnp.full((1, 4), sd**2))
    mean, var = integrate(fn, x)
    found = propagate(fn)(x)
    assert np.abs((found.mean - mean) / np.sqrt(var)).max() < error
    assert np.abs(found.var / var - 1).max() < error


@pytest.mark.parametrize("fn", [jnp.tanh, lax.erf, jax.nn.silu, jax.nn.elu, jax.nn.softplus])
def test_wide_arguments_are_integrated_near_the_breaks(fn, x64):
    """An sd of 100: 5e-4 and 3e-3 with panels of one width; the reference has 25 points per unit of x."""
    x = Gaussian(jnp.array([[0.0, 30.0, 100.0, -200.0]]), jnp.full((1, 4), 1e4))
    for moment, expected in zip(propagate(fn)(x), integrate(fn, x), strict=True):
        np.testing.assert_allclose(moment, expected, rtol=2e-5, atol=2e-6)


SATURATED = {
    "tanh": (jnp.tanh, lambda x: 2 * jax.nn.sigmoid(2 * x)),
    "sigmoid": (jax.nn.sigmoid, jax.nn.sigmoid),
    "erf": (lax.erf, lambda x: lax.erfc(-x)),
}


@pytest.mark.parametrize("name", SATURATED)
def test_saturated_units_have_moments(name, x64):
    """The break is 7 to 45 sd away; where it makes the variance, that was NaN. The reference is of f(x) - f(-inf)."""
    fn, above = SATURATED[name]
    sd = np.array([0.1, 1.0, 1.5, 2.0, 3.0])
    mean = -np.arange(7, 45, 0.25)[:, None] * sd
    found = jax.jit(propagate(fn))(Gaussian(mean, np.broadcast_to(sd**2, mean.shape)))
    z = np.linspace(-9, 60, 20_001)[:, None, None]
    weight = np.exp(-0.5 * z * z) * (z[1] - z[0]) / np.sqrt(2 * np.pi)
    values = np.asarray(above(mean + sd * z))
    lifted = (weight * values).sum(0)
    spread = np.sqrt((weight * (values - lifted) ** 2).sum(0))
    rounding = 32 * np.finfo(float).eps * np.abs(fn(mean))
    assert np.all(np.abs(found.mean - fn(-1e3) - lifted) <= 0.01 * spread + rounding)
    assert np.all(np.abs(np.sqrt(found.var) - spread) <= 0.01 * spread + rounding)


SMALL = {
    "steep": (lambda x: jnp.tanh(1000 * x), 1.6e-5),
    "kink": (lambda x: jnp.abs(jnp.tanh(x)), 1e-9),
    "kink of a rectifier": (lambda x: jnp.tanh(jax.nn.relu(x)), 1e-6),
    "step": (lambda x: jnp.where(jnp.tanh(x) > 0, 1.0, -1.0), 1e-6),
    "bent": (lambda x: jnp.cos(1000 * x) * jnp.exp(x), 1e-6),
}


@pytest.mark.parametrize("name", SMALL)
def test_small_variances_do_not_straighten_a_function(name):
    """In float32, where variances below 2.4e-5 are small: the steep one had the variance 16."""
    fn, var = SMALL[name]
    found = propagate(fn)(Gaussian(jnp.zeros((1, 1), "float32"), jnp.full((1, 1), var, "float32")))
    with jax.enable_x64(True):
        expected = integrate(fn, Gaussian(np.zeros((1, 1)), np.full((1, 1), var)))
    scale = np.sqrt(expected[1])
    np.testing.assert_allclose(found.mean / scale, expected[0] / scale, atol=2e-3)
    np.testing.assert_allclose(found.var, expected[1], rtol=2e-3)


def test_nine_steps_are_nine_breaks(x64):
    """Each step has its panel: the variance was 4.006."""

    def stairs(x):
        return sum(jnp.where(x > at, 1.0, 0.0) for at in np.linspace(-2, 2, 9))

    x = Gaussian(jnp.array(0.3), jnp.array(1.0))
    above = stats.norm.sf(np.linspace(-2, 2, 9), 0.3)  # P(i and j) = P(max)
    both = np.minimum.outer(above, above)
    found = propagate(stairs)(x)
    np.testing.assert_allclose(found.mean, above.sum(), rtol=1e-9)
    np.testing.assert_allclose(found.var, (both - np.outer(above, above)).sum(), rtol=1e-9)


NOT_INTEGRATED = {
    "pole": lambda x: 1 / x**2,
    "pole of an inverse root": lambda x: lax.rsqrt(x * x),
    "poles": lambda x: 1 / jnp.cos(x),
    "fast": lambda x: jnp.sin(100 * x * x),
    "fast and a smooth part": lambda x: jnp.sin(300 * x) + jnp.tanh(x),
    "infinite second moment": lambda x: jnp.exp(x * x / 3),
    "infinite mean": lambda x: jnp.exp(x * x),
    "undefined": lambda x: jnp.sqrt(jnp.tanh(x)),
    "a hundred steps": lambda x: jnp.sign(jnp.sin(30 * jnp.abs(x) + 1)),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", NOT_INTEGRATED)
def test_what_the_nodes_do_not_resolve_is_refused(name, dtype):
    """1 / x^2 had the mean 200.8, the oscillations half the variance. Compiled programs cannot raise: NaN."""
    fn = NOT_INTEGRATED[name]
    with jax.enable_x64(dtype == "float64"):
        x = Gaussian(jnp.array([0.3, 0.1], dtype), jnp.array([1.0, 2.0], dtype))
        with pytest.raises(ValueError, match=r"do not integrate to 1% \(2 of 2 elements\)"):
            propagate(fn)(x)
        compiled = jax.jit(propagate(fn))(x)
        assert bool(jnp.isnan(compiled.mean).all() and jnp.isnan(compiled.var).all())


# ------------------------------------------------------------------------- broadcasting: against integration


@jax.custom_jvp
def straight(x):
    return jnp.sign(x)


straight.defjvp(lambda primals, tangents: (straight(*primals), tangents[0]))
COLUMN = np.array([[0.5], [-2.0]])
# Shape of the random array, and a function whose result is larger.
BROADCAST = {
    "affine, then tanh": ((), lambda w: jnp.tanh(w * PLAIN)),
    "rectifier": ((), lambda w: jax.nn.relu(w * PLAIN) - w),
    "two uses": ((), lambda w: jnp.tanh(w) + w * np.linspace(1, 2, 5)),
    "as many elements as nodes": ((), lambda w: jnp.tanh(w) + w * np.linspace(1, 2, 64)),
    "one element": ((), lambda w: jnp.tanh(w) + w * np.ones(1)),
    "function with its own derivative": ((), lambda w: jax.nn.softplus(w) * PLAIN + w),
    "broadcasts inside": ((), lambda w: jnp.logaddexp(w, PLAIN) * w),
    "jitted": ((), lambda w: jax.nn.silu(w) * PLAIN + w),
    "choice": ((), lambda w: lax.select(w > 0, w * PLAIN, jnp.tanh(w) * PLAIN)),
    "row and column": ((1, 3), lambda w: jnp.tanh(w * COLUMN)),
    "row and column, own derivative": ((1, 3), lambda w: jax.nn.softplus(w) * COLUMN + w * COLUMN),
    "twice": ((1, 1), lambda w: jnp.tanh(jnp.tanh(w * PLAIN[:1]) + w * COLUMN) + w),
}


@pytest.mark.parametrize("name", BROADCAST)
def test_a_function_of_a_smaller_array_is_one_function(name, x64):
    """``tanh(w * x)`` crashed, ``tanh(w) + w * x`` with as many elements as nodes had the variance 1e-12."""
    shape, fn = BROADCAST[name]
    x = Gaussian(jnp.full(shape, 0.5), jnp.full(shape, 1.3))
    z = np.linspace(-9, 9, 8001)
    weight = np.exp(-0.5 * z * z) / np.exp(-0.5 * z * z).sum()
    values = np.asarray(jax.vmap(fn)(x.mean + np.sqrt(1.3) * z.reshape(-1, *(1,) * len(shape))))
    mean = np.tensordot(weight, values, 1)
    for found in (propagate(fn)(x), jax.jit(propagate(fn))(x)):
        assert found.mean.shape == found.var.shape == mean.shape
        np.testing.assert_allclose(found.mean, mean, atol=2e-6)
        np.testing.assert_allclose(found.var, np.tensordot(weight, (values - mean) ** 2, 1), atol=2e-6)


def test_independent_arrays_of_different_shapes(x64):
    """a * tanh(b * x): a product of independent numbers, each with its quadrature."""
    a, b = Gaussian(jnp.array(0.5), jnp.array(1.0)), Gaussian(jnp.array(-0.3), jnp.array(0.5))
    found = propagate(lambda a, b: a * jnp.tanh(b * PLAIN))(a, b)
    mean, var = propagate(lambda b: jnp.tanh(b * PLAIN))(b)
    np.testing.assert_allclose(found.mean, 0.5 * mean, rtol=1e-12)
    np.testing.assert_allclose(found.var, 1.0 * (mean**2 + var) + 0.25 * var, rtol=1e-12)


@pytest.mark.parametrize(("shape", "factor"), [((), PLAIN), ((1, 3), COLUMN)])
def test_derivatives_of_an_author_survive_broadcasting(shape, factor, x64):
    """Straight-through signs: the slope is that of the signs alone times the factor, and not 0."""
    var = jnp.ones(shape)

    def slope(factor):
        return jax.grad(lambda m: propagate(lambda w: straight(w) * factor)(Gaussian(m, var)).mean.sum())(var)

    alone = slope(1.0).sum() / var.size
    assert 0.9 < float(alone) < 1.1
    expected = np.broadcast_to(factor, np.broadcast_shapes(shape, factor.shape)).sum() * alone
    np.testing.assert_allclose(slope(factor).sum(), expected, rtol=1e-6)


@pytest.mark.slow
def test_more_nodes_are_more_exact(x64):
    x = Gaussian(jnp.array([[0.4]]), jnp.array([[400.0]]))
    var = integrate(jnp.tanh, x)[1]
    errors = [abs(float(propagate(jnp.tanh, num_nodes=n)(x).var[0, 0] / var[0, 0] - 1)) for n in (24, 64, 128)]
    assert errors[0] > 10 * errors[1] > 100 * errors[2]
    with pytest.raises(ValueError, match="8 nodes beside each break do not integrate to 1%"):
        propagate(jnp.tanh, num_nodes=8)(x)


# --------------------------------------------------------------- linear in each operand: against its Jacobian


def bilinear(fn, *gaussians):
    """Exact moments of a function that is linear in each independent array: sums of squared derivatives times v."""
    means = [jnp.asarray(g.mean) for g in gaussians]
    var = 0
    for i, g in enumerate(gaussians):
        jacobian = jax.jacobian(fn, i)(*means)
        var += np.tensordot(np.square(jacobian), g.var, g.var.ndim)
    if len(gaussians) == 2:
        mixed = jax.jacobian(jax.jacobian(fn, 0), 1)(*means)
        inner = np.tensordot(np.square(mixed), gaussians[1].var, gaussians[1].var.ndim)
        var += np.tensordot(inner, gaussians[0].var, gaussians[0].var.ndim)
    return fn(*means), var


def conv(x, kernel):
    return lax.conv_general_dilated(x, kernel, (2, 1), "SAME", dimension_numbers=CONV)


def window_sum(x):
    return lax.reduce_window(x, 0.0, lax.add, (1, 2, 3, 1), (1, 2, 1, 1), "SAME")


# Primitive -> (function, random arguments) that contain it.
LINEAR = {
    "dot_general": [
        (lambda x: PLAIN @ x, [W]),
        (lambda x: x @ W.mean, [X]),
        (lambda x, w: x @ w, [X, W]),
        (lambda x, w: jnp.einsum("nd,dh->hn", x, w), [X, W]),
    ],
    "conv_general_dilated": [(lambda k: conv(IMAGE.mean, k), [KERNEL]), (lambda x: conv(x, KERNEL.mean), [IMAGE])],
    "reduce_sum": [(lambda x: x.sum(1), [X]), (lambda x: x.mean(0), [X])],
    "cumsum": [(lambda x: lax.cumsum(x, 1), [X])],
    "reduce_window_sum": [(window_sum, [IMAGE])],
    "broadcast_in_dim": [(lambda x: x[:, None] + jnp.zeros((2, 4, 3)), [X])],
    "concatenate": [(lambda x, w: jnp.concatenate([x, PLAIN, w.T], 0), [X, W])],
    "dynamic_slice": [(lambda x: lax.dynamic_slice(x, (jnp.int32(0), jnp.int32(1)), (2, 2)), [X])],
    "dynamic_update_slice": [
        (lambda x: lax.dynamic_update_slice(x, jnp.ones((1, 1)), (1, 1)), [X]),
        (lambda x: lax.dynamic_update_slice(jnp.ones((4, 4)), x, (1, 1)), [X]),
    ],
    "gather": [(lambda x: x[:, jnp.array([2, 0, 2])], [X]), (lambda x: jnp.take(x, 1, axis=0), [X])],
    "optimization_barrier": [(lambda x: lax.optimization_barrier((x, x))[1], [X])],
    "pad": [(lambda x: jnp.pad(x, 1, constant_values=3.0), [X])],
    "reshape": [(lambda x: x.reshape(3, 2), [X])],
    "rev": [(lambda x: lax.rev(x, (1,)), [X])],
    "scatter": [(lambda x: x.at[0, 1].set(2.0), [X]), (lambda x: jnp.ones((3, 3)).at[:2].set(x), [X])],
    "scatter-add": [(lambda x: x.at[1].add(2.0), [X]), (lambda x, w: x.at[0, 2].add(w[0, 0]), [X, W])],
    "slice": [(lambda x: x[:, ::2], [X])],
    "split": [(lambda x: jnp.split(x, 3, 1)[1], [X])],
    "squeeze": [(lambda x: jnp.squeeze(x[:1], 0), [X])],
    "stack": [(lambda x, w: jnp.stack([x, w.T[:2]]), [X, W])],
    "tile": [(lambda x: jnp.tile(x, (2, 1)), [X])],
    "transpose": [(lambda x: x.T, [X])],
    # elementwise primitives with two independent operands
    "add": [(lambda x, w: x + w[:2, :3], [X, W])],
    "add_any": [(lambda x, w: jax.vjp(lambda y: (y, 2 * y), PLAIN)[1]((x, w[:2, :3]))[0], [X, W])],
    "sub": [(lambda x, w: x - w[:2, :3], [X, W])],
    "mul": [(lambda x, w: x * w[:2, :3], [X, W]), (lambda x: x[:, :1] * 2 - x[:, 1:2], [X])],
    "select_n": [(lambda x, w: jnp.where(PLAIN > 0, x, w[:2, :3]), [X, W])],
    "custom_jvp_call": [(lambda x: doubled(x) + 1, [X])],
}


@jax.custom_jvp
def doubled(x):
    return x + x


doubled.defjvp(lambda primals, tangents: (doubled(*primals), 2 * tangents[0]))


@pytest.mark.parametrize("name", LINEAR)
def test_linear_rule_agrees_with_the_jacobian(name, x64):
    for fn, gaussians in LINEAR[name]:
        assert name in set(primitives(jax.make_jaxpr(fn)(*(g.mean for g in gaussians)).jaxpr))
        for moment, expected in zip(propagate(fn)(*gaussians), bilinear(fn, *gaussians), strict=True):
            np.testing.assert_allclose(moment, expected, rtol=1e-12, atol=1e-14)


def test_convolution_of_random_images_with_random_kernels(x64):
    """The Hessian of a convolution is large; it is bilinear, so that a matrix product over patches is the same."""
    patches = lax.conv_general_dilated_patches(IMAGE.mean, (3, 2), (2, 1), "SAME", dimension_numbers=CONV)
    spread = lax.conv_general_dilated_patches(IMAGE.var, (3, 2), (2, 1), "SAME", dimension_numbers=CONV)
    # patches hold (channel, h, w), channel slowest
    flat = Gaussian(*(np.moveaxis(k, 2, 0).reshape(12, 3) for k in KERNEL))
    mean = patches @ flat.mean
    var = spread @ (flat.mean**2 + flat.var) + np.square(patches) @ flat.var
    found = propagate(conv)(IMAGE, KERNEL)
    np.testing.assert_allclose(found.mean, mean, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(found.var, var, rtol=1e-12)


# ------------------------------------------------------------------------------- maxima: against simulation


def pool(window, padding="SAME"):
    return lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, *window, 1), (1, 2, 2, 1), padding)


MAXIMA = {
    "max": [lambda x: jnp.maximum(x[:, 0], x[:, 1])],
    "min": [lambda x: jnp.minimum(x[:, 0], x[:, 1])],
    "reduce_max": [lambda x: x[:, :2].max(1), lambda x: x.max((0, 2))],
    "reduce_min": [lambda x: x[:, :2].min(1), lambda x: x.min((1, 2))],
    "reduce_window_max": [pool((2, 1), "VALID"), pool((2, 2)), pool((3, 3))],
}


@pytest.fixture(scope="module")
def images():
    noise = np.random.default_rng(6).normal(size=(40_000, *IMAGE.mean.shape))
    return IMAGE.mean + np.sqrt(IMAGE.var) * noise


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n == "reduce_min" else ()) for n in MAXIMA]
)
def test_maximum_rule_agrees_with_simulation(name, images, x64):
    for fn in MAXIMA[name]:
        assert name in set(primitives(jax.make_jaxpr(fn)(IMAGE.mean).jaxpr))
        sample = np.asarray(jax.jit(jax.vmap(fn))(images))
        found = propagate(fn)(IMAGE)
        # 4.5 standard errors: failure rate 7e-6 per figure, about 250 figures.
        centered = np.square(sample - sample.mean(0))
        error = 4.5 / len(sample) ** 0.5
        assert (np.abs(found.mean - sample.mean(0)) <= error * sample.std(0)).all()
        assert (np.abs(found.var - sample.var(0)) <= error * centered.std(0)).all()


@pytest.mark.parametrize("count", [2, 3])
def test_smallest_of_several_agrees_with_integration(count, x64):
    """P(min > t) is a product; on a grid whose trapezoidal rule is exact to rounding."""
    mean, var = np.array([0.3, -0.8, 1.1])[:count], np.array([0.5, 2.0, 1.3])[:count]
    t = np.linspace(-20, 20, 40_001)
    above = stats.norm.sf(t[:, None], mean, np.sqrt(var))
    hazards = stats.norm.pdf(t[:, None], mean, np.sqrt(var)) / np.maximum(above, 1e-300)
    density = above.prod(1) * hazards.sum(1) * (t[1] - t[0])
    first = (t * density).sum()
    found = propagate(lambda x: x.min(0))(Gaussian(mean, var))
    np.testing.assert_allclose(np.array(found), [first, ((t - first) ** 2 * density).sum()], rtol=1e-6)


def test_every_rule_has_a_row():
    rows = ELEMENTWISE.keys() | LINEAR.keys() | MAXIMA.keys()
    assert rows == SHIPPED


def test_pooling_with_dilated_windows_and_uneven_padding_takes_the_right_elements(x64):
    """With variance 0 the maximum is the maximum."""
    known = Gaussian(IMAGE.mean, np.zeros_like(IMAGE.var))

    def fn(x):
        config = ((0, 0), (2, 0), (0, 1), (0, 0))
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 3, 1), (1, 2, 1, 1), config, None, (1, 2, 1, 1))

    found = propagate(fn)(known)
    np.testing.assert_allclose(found.mean, fn(IMAGE.mean), rtol=1e-12)
    np.testing.assert_allclose(found.var, 0, atol=1e-20)


@pytest.mark.slow
def test_pooling_of_many_equal_elements_is_exact(x64):
    """Global pooling of a 7 by 7 image of standard normals: the density of the largest is 49 phi Phi^48."""
    t = np.linspace(-9, 9, 1_000_001)
    density = 49 * stats.norm.pdf(t) * stats.norm.cdf(t) ** 48 * (t[1] - t[0])
    mean = (t * density).sum()
    found = maximum_of(jnp.zeros(49), jnp.ones(49))
    np.testing.assert_allclose(np.array(found), [mean, ((t - mean) ** 2 * density).sum()], rtol=1e-7)
