"""Moment propagation of programs: calls, trees, transformations of JAX, errors, rules of the user."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from numpyro_bnn import nn
from numpyro_bnn.moments import Gaussian, Interpreter, propagate, register, register_elementwise
from numpyro_bnn.moments.registry import RULES

X = Gaussian(np.linspace(-1.5, 1.7, 6).reshape(2, 3), np.array([[0.3, 1.0, 0.01], [2.0, 0.5, 1e-9]]))


# ------------------------------------------------------------------------------------------------- programs


def test_outputs_keep_the_tree_and_plain_values_stay_plain():
    def fn(data, *, shift, name):
        assert name == "a"
        return {"random": data["x"] * 2 + shift, "plain": jnp.sin(shift), "both": (data["n"], shift, 3)}

    out = propagate(fn)({"x": Gaussian(jnp.ones(2), jnp.ones(2)), "n": 4}, shift=jnp.ones(2), name="a")
    assert out["random"].mean.tolist() == [3, 3]
    assert out["random"].var.tolist() == [4, 4]
    np.testing.assert_allclose(out["plain"], np.sin(1.0), rtol=1e-6)
    assert [int(np.sum(leaf)) for leaf in out["both"]] == [4, 2, 3]
    assert propagate(lambda x: x + 1)(1.0) == 2  # nothing is random


def test_only_needed_equations_are_evaluated():
    """A traced model contains much that the output does not need: the unsupported sort is not even looked at."""

    @jax.jit
    def fn(x):
        return jnp.sort(x), x + 1

    assert propagate(lambda x: fn(x)[1])(X).mean.shape == (2, 3)
    with pytest.raises(ValueError, match="`sort`"):
        propagate(fn)(X)


@jax.custom_vjp
def wave(x):
    return jnp.sin(x)


wave.defvjp(lambda x: (wave(x), x), lambda x, g: (g * jnp.cos(x),))


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda fn: jax.vmap(fn), lambda fn: jax.jit(jax.jit(fn))])
def test_calls_are_descended_into(wrap):
    def fn(x):
        return jax.nn.relu(wave(x) + x @ jnp.ones((3, 3)))

    found, expected = propagate(wrap(fn))(X), propagate(fn)(X)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_functions_of_one_variable_are_not_products_of_two(x64):
    """However the function is spread over lines and calls; the affine function of itself is exact as well."""
    gate = jax.jit(jax.nn.sigmoid)
    found = propagate(lambda x: x * gate(x) + x - x)(X)
    for moment, expected in zip(found, propagate(jax.nn.silu)(X), strict=True):
        np.testing.assert_allclose(moment, expected, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(propagate(lambda x: 3 * x - (x + x))(X).var, X.var, rtol=1e-12)


def test_custom_derivatives_are_used_inside_quadrature(x64):
    used = []

    @jax.custom_jvp
    def curve(x):
        return jnp.tanh(x)

    def own(primals, tangents):
        used.append(True)
        return curve(*primals), (1 - curve(*primals) ** 2) * tangents[0]

    curve.defjvp(own)
    slopes = [
        jax.grad(lambda m, fn=fn: propagate(fn)(Gaussian(m, X.var)).mean.sum())(X.mean) for fn in (curve, jnp.tanh)
    ]
    assert used
    np.testing.assert_allclose(*slopes, rtol=1e-10)


# ----------------------------------------------------------------------------------- transformations of JAX

NET = nn.MLP([4, 2], "tanh")
WEIGHTS = {
    name: Gaussian(np.asarray(value, float), np.full(value.shape, 0.2))
    for name, value in NET.init(jax.random.key(1), (3,)).items()
}


def as_type(tree, dtype):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), tree)


def test_float32_agrees_with_float64():
    with jax.enable_x64(True):
        double = propagate(NET.apply)(as_type(WEIGHTS, "float64"), jnp.asarray(X.mean))
        double = [np.asarray(moment) for moment in double]
    single = propagate(NET.apply)(as_type(WEIGHTS, "float32"), jnp.asarray(X.mean, "float32"))
    assert single.mean.dtype == single.var.dtype == "float32"
    np.testing.assert_allclose(single.mean, double[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(single.var, double[1], rtol=1e-5)


def test_jit_and_vmap_change_nothing(x64):
    weights, data = as_type(WEIGHTS, "float64"), as_type(X, "float64")
    expected = propagate(NET.apply)(weights, data)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), weights)
    for found in (
        jax.jit(propagate(NET.apply))(weights, data),
        propagate(jax.jit(NET.apply))(weights, data),
        jax.vmap(propagate(NET.apply), (None, 0))(weights, data),
        jax.tree.map(lambda leaf: leaf[0], jax.vmap(propagate(NET.apply), (0, None))(stacked, data)),
    ):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12)


def test_gradients_are_those_of_finite_differences(x64):
    weights, data = as_type(WEIGHTS, "float64"), as_type(X, "float64")

    def total(weights):
        out = propagate(NET.apply)(weights, data)
        return out.mean.sum() + jnp.log(out.var).sum()

    gradient = jax.jit(jax.grad(total))(weights)
    direction = jax.tree.map(lambda leaf: jnp.cos(jnp.arange(leaf.size)).reshape(leaf.shape), weights)
    step = 1e-5
    up, down = (total(jax.tree.map(lambda w, d, s=s: w + s * d, weights, direction)) for s in (step, -step))
    along = sum(jnp.vdot(g, d) for g, d in zip(*map(jax.tree.leaves, (gradient, direction)), strict=True))
    np.testing.assert_allclose(along, (up - down) / (2 * step), rtol=1e-7)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "fn",
    [
        jnp.tanh,
        jax.nn.relu,
        *(
            pytest.param(fn, marks=pytest.mark.slow)
            for fn in (jax.nn.elu, jax.nn.softplus, jnp.square, jnp.exp, jnp.sin)
        ),
    ],
)
def test_moments_and_gradients_hold_down_to_zero_variance(fn, dtype):
    """To first order in v: E f = f + f'' v / 2 and Var f = f'^2 v, also where sqrt(v) is below rounding."""

    @jax.jit
    def all_of(x):
        def moment(i):
            return lambda x: propagate(fn)(x)[i].sum()

        return propagate(fn)(x), jax.grad(moment(0))(x), jax.grad(moment(1))(x)

    with jax.enable_x64(dtype == "float64"):
        mean = jnp.asarray([0.7, -0.4], dtype)
        slope = jax.vmap(jax.grad(fn))(mean)
        bend = jax.vmap(jax.grad(jax.grad(fn)))(mean)
        for v in (0.0, 1e-30, 1e-12, 1e-5):
            x = Gaussian(mean, jnp.full(2, v, mean.dtype))
            found, of_mean, of_var = all_of(x)
            np.testing.assert_allclose(found.mean, fn(mean), rtol=1e-4)
            np.testing.assert_allclose(found.var, slope**2 * x.var, rtol=2e-4, atol=1e-36)
            np.testing.assert_allclose(of_mean.mean, slope, rtol=1e-3)
            np.testing.assert_allclose(of_mean.var, bend / 2, rtol=1e-3, atol=1e-3)
            np.testing.assert_allclose(of_var.var, slope**2, rtol=1e-3, atol=1e-7)


def test_large_arrays_are_integrated_node_by_node(monkeypatch, x64):
    from numpyro_bnn.moments import expectation

    expected = propagate(jax.nn.elu)(X)
    slopes = jax.grad(lambda x: propagate(jax.nn.elu)(x).var.sum())(as_type(X, "float64"))
    monkeypatch.setattr(expectation, "_AT_ONCE", 10)
    found = propagate(jax.nn.elu)(X)
    again = jax.grad(lambda x: propagate(jax.nn.elu)(x).var.sum())(as_type(X, "float64"))
    for one, other in zip((*found, *again), (*expected, *slopes), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-8, atol=1e-10)


# --------------------------------------------------------------------------------------------------- errors


def centered(x):
    return x - x.mean(1, keepdims=True)


REFUSED = {
    "sort": (jnp.sort, "`sort` at "),
    "argmax": (lambda x: jnp.argmax(x), "`argmax` at "),
    "scan": (lambda x: lax.scan(lambda c, v: (c + v, v), jnp.zeros(3), x)[0], "`scan` at "),
    "comparison": (lambda x: x > 0, "`gt` at .* turns random numbers into bool"),
    "integers": (lambda x: x.astype(int), "`convert_element_type` at .* turns random numbers into int"),
    "reciprocal": (lambda x: 1 / x, "`div` at .* has no moments"),
    "power -1": (lambda x: (2 * x + 1) ** -1, "`integer_pow` at .* has no moments"),
    "logarithm": (lambda x: jnp.log(x), "`log` at .* has no moments"),
    "quotient": (lambda x: x[0] / x[1], "`div` at .* joins two"),
    "random choice": (lambda x: jnp.where(x[0] > 0, x[1], 0.0), "`select_n` at .* joins two"),
    "square of a matrix": (lambda x: x @ x.T, "`dot_general` at .* with itself"),
    "reshaped or sliced alike": (lambda x: x[:, :2] * jnp.tanh(x)[:, :2], "`mul` at .* reshaped or sliced alike"),
    "mean": (centered, "`sub` at .* reduction of itself"),
    "softmax": (jax.nn.softmax, "`sub` at .* reduction of itself"),
    "random index": (lambda x: jnp.arange(3)[x[0].astype(int)], "`.*` at "),
    "BatchNorm": (lambda x: nn.BatchNorm(False, False).apply({}, x), "norm.py"),
    "LayerNorm": (lambda x: nn.LayerNorm(False, False).apply({}, x), "norm.py"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_wrong_is_refused(name):
    fn, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        propagate(lambda x: fn(x))(X)


@jax.jit
def user_layer(x):
    y = x + 1
    return jnp.sort(y)


@pytest.mark.parametrize("fn", [centered, lambda x: nn.LayerNorm(False, False).apply({}, x)])
def test_error_names_the_line_of_the_user(fn):
    line = fn.__code__.co_firstlineno + (fn is centered)
    with pytest.raises(ValueError, match=f"test_moments.py:{line} ") as error:
        propagate(fn)(X)
    assert str(error.value).startswith("moments.propagate: argument `fn` got `")


def test_error_names_the_line_inside_a_jitted_function_and_not_that_of_an_earlier_use():
    line = user_layer.__wrapped__.__code__.co_firstlineno + 3
    user_layer(jnp.ones((2, 3)))  # JAX keeps the traceback of this use
    for fn in (user_layer, lambda x: 2 * user_layer(x)):
        with pytest.raises(ValueError, match=f"`sort` at .*test_moments.py:{line} "):
            propagate(fn)(X)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: propagate(3), TypeError, "argument `fn`"),
        (lambda: propagate(jnp.sin, num_nodes=1), ValueError, "argument `num_nodes`"),
        (lambda: propagate(jnp.sin)(Gaussian(jnp.ones(2), jnp.ones(3))), ValueError, "argument `var`"),
        (lambda: propagate(jnp.sin)(Gaussian(jnp.arange(2), jnp.arange(2))), TypeError, "argument `mean`"),
    ],
)
def test_wrong_arguments_are_refused(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


# ------------------------------------------------------------------------------------------- own rules, reuse


def test_user_adds_rules(monkeypatch):
    for name in ("cumprod", "floor"):
        monkeypatch.setitem(RULES, name, None)  # taken out again at the end

    @register("cumprod")
    def cumprod(equation, x):
        assert equation.params["axis"] == 0
        mean = equation.bind(x.mean)
        return Gaussian(mean, equation.bind(x.mean**2 + x.var) - mean**2)

    register_elementwise("floor")
    x = Gaussian(jnp.array([2.0, 3.0]), jnp.array([1.0, 0.5]))
    assert propagate(lax.cumprod)(x).var.tolist() == [1.0, 5 * 9.5 - 36]
    assert propagate(lambda x: jnp.floor(x) * 0 + x)(x).mean.shape == (2,)


def test_interpreter_serves_other_rules():
    """Local reparameterization: where a Gaussian weight meets a product, the output is sampled."""
    seen = []

    def sampled(equation, x, w):
        seen.append(equation.name)
        return equation.bind(x, w.mean) + jnp.sqrt(equation.bind(x * x, w.var))

    def refuse(equation, *operands):
        raise equation.refuse("is not a product", "Use the weight in a product first.")

    walk = Interpreter({"dot_general": sampled}, lambda v: isinstance(v, Gaussian), "guides.example", refuse)
    weight = Gaussian(jnp.ones((3, 1)), jnp.ones((3, 1)))

    def run(fn):
        jaxpr = jax.make_jaxpr(fn)(weight.mean)
        return walk.run(jaxpr.jaxpr, jaxpr.consts, [weight])[0]

    x = jnp.array([[2.0, 0.0, 0.0]])
    assert run(jax.jit(lambda w: jnp.tanh(x @ w))).tolist() == [[float(jnp.tanh(4.0))]]
    assert seen == ["dot_general"]
    with pytest.raises(ValueError, match=r"guides.example: .* `mul` at .* is not a product"):
        run(lambda w: x @ (2 * w))
