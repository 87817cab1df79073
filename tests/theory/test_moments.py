"""Moments of networks: exact where theory says so, a stated gap elsewhere; tails,
derivatives, errors, own rules.
"""

from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from numpy.testing import assert_allclose as close
from scipy import stats
from scipy.integrate import quad

from numpyro_bnn import nn
from numpyro_bnn.moments import Gaussian, propagate, register, register_elementwise

X = np.linspace(-1.5, 1.7, 6).reshape(2, 3)
RANDOM_X = Gaussian(X, np.array([[0.3, 1.0, 0.01], [2.0, 0.5, 1e-9]]))


def weights(dtype=np.float64):
    """Gaussian weights of `nn.MLP([4, 3])` on three inputs; one bias is known."""
    rng = np.random.default_rng(1)
    shapes = nn.MLP([4, 3]).param_shapes((3,))
    found = {
        name: Gaussian(rng.normal(size=s), rng.uniform(0.01, 1.5, s))
        for name, s in shapes.items()
    }
    found["Dense_0.bias"].var[1] = 0.0
    return jax.tree.map(lambda leaf: leaf.astype(dtype), found)


# -- networks --------------------------------------------------------------------------


def unit_moments(fn, mean, var):
    """E f and Var f of normal inputs, by the trapezoid rule; 3e-7 at a kink."""
    z = np.linspace(-9, 9, 8001)
    weight = np.exp(-0.5 * z * z) / np.exp(-0.5 * z * z).sum()
    values = np.asarray(fn(mean + np.sqrt(var) * z[:, None, None]))
    first = np.tensordot(weight, values, 1)
    return first, np.tensordot(weight, (values - first) ** 2, 1)


@pytest.mark.core
@pytest.mark.parametrize("name", ["relu", "tanh"])
def test_two_layers_and_a_residual_block_are_exact(name, x64):
    """Given inputs, hidden units share no weights: they are independent."""
    random, net = weights(), nn.MLP([4, 3], name)
    w1, b1, w2, b2 = (
        random[key]
        for key in ("Dense_0.kernel", "Dense_0.bias", "Dense_1.kernel", "Dense_1.bias")
    )
    hidden, spread = unit_moments(
        nn.ACTIVATIONS[name], X @ w1.mean + b1.mean, X**2 @ w1.var + b1.var
    )
    mean = X + hidden @ w2.mean + b2.mean
    var = spread @ (w2.mean**2 + w2.var) + hidden**2 @ w2.var + b2.var
    found = jax.jit(propagate(lambda p: X + net.apply(p, X)))(random)
    close(found.mean, mean, rtol=1e-6, atol=1e-6)
    close(found.var, var, rtol=1e-6)


def blocks(name):
    block = nn.Residual(nn.Sequential([name, nn.Dense(8)]))
    return nn.Sequential([nn.Dense(8), block, block, nn.Dense(1)])


def convolutional(name, *after):
    return nn.Sequential([nn.Conv2d(3, 3), name, *after])


HEAD = (nn.Flatten(), nn.Dense(2))
DEEP = {
    "dense 10, 10, 1": lambda name: nn.MLP([10, 10, 1], name),
    "two residual blocks of 8": blocks,
    "convolution of a convolution": lambda name: convolutional(name, nn.Conv2d(2, 3)),
    "convolution, maximum pooling": lambda name: convolutional(
        name, nn.MaxPool(2), *HEAD
    ),
    "convolution, global average pooling": lambda name: convolutional(
        name, nn.AvgPool(None), *HEAD
    ),
}


@cache
def documented_gaps():
    """(network, sd) -> bounds of the errors, from the table of the page."""
    page = Path(__file__).parents[2] / "docs" / "moments.md"
    lines = [
        [cell.strip() for cell in line.strip("| ").split("|")]
        for line in page.read_text().splitlines()
    ]
    return {
        (cells[0], cells[1]): tuple(map(float, cells[2:]))
        for cells in lines
        if len(cells) == 5 and cells[0] in DEEP
    }


def test_every_deep_network_has_its_documented_gap():
    assert set(documented_gaps()) == {
        (name, sd) for name in DEEP for sd in ("0.2", "1")
    }


# Gaps grow with the spread: all networks at the large one, of each kind one at the
# small one.
GAPS = [(name, "1") for name in DEEP]
GAPS += [("two residual blocks of 8", "0.2"), ("convolution, maximum pooling", "0.2")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sd"), GAPS)
def test_gap_of_deep_networks_is_as_documented(name, sd):
    """No theory bounds it: 100,000 draws, rounded outwards."""
    bound, low, high = documented_gaps()[name, sd]
    size = (1, 3) if "conv" not in name else (1, 4, 4, 1)
    x = (
        jnp.array([[0.5, -1.0, 2.0]])
        if len(size) == 2
        else jnp.sin(jnp.arange(16.0)).reshape(size)
    )
    for activation in ("relu", "tanh"):
        net = DEEP[name](activation)
        params = net.init(jax.random.key(0), size[1:])
        fan_in = {
            key: max(np.prod(value.shape[:-1]), 1) for key, value in params.items()
        }
        random = {
            key: Gaussian(value, jnp.full(value.shape, float(sd) ** 2 / fan_in[key]))
            for key, value in params.items()
        }

        @jax.jit
        def draw(key, net=net, random=random):
            keys = dict(zip(random, jax.random.split(key, len(random)), strict=True))
            drawn = {
                n: g.mean + jnp.sqrt(g.var) * jax.random.normal(keys[n], g.mean.shape)
                for n, g in random.items()
            }
            return net.apply(drawn, x)

        draws = np.concatenate(
            [
                jax.vmap(draw)(jax.random.split(key, 20_000))
                for key in jax.random.split(jax.random.key(7), 5)
            ]
        )
        found = propagate(lambda p, net=net: net.apply(p, x))(random)
        gap = np.asarray(found.var) / draws.var(0) - 1
        assert (np.abs(found.mean - draws.mean(0)) / draws.std(0)).max() < bound, (
            activation
        )
        assert low < gap.min() <= gap.max() < high, activation


# -- hard tails ------------------------------------------------------------------------

# Both sides of the thresholds, the far tails, and the middle; alpha = mean / sd.
ALPHAS = np.concatenate(
    [[-40, -37, -30.5, -20, -10, 10, 20, 40], np.linspace(-8, 8, 65) + 0.013]
)
# means and variances
AT_ENDS = ([-2.0, 3.0, -1e4, 1e4, 1.0], [0.0, 0.0, 1e-30, 1e-30, 1e30])


def exact_rectifier(alpha, sd):
    """Mean and variance of max(x, 0), x ~ N(alpha sd, sd^2), and their derivatives by
    (mean, variance).

    Integrals of positive functions, in which nothing cancels, and the derivatives by
    Price's theorem.
    """
    t = abs(alpha)
    first, second = (
        stats.norm.pdf(t)
        * quad(
            lambda u, p=p: u**p * np.exp(-u * t - u * u / 2),
            0,
            np.inf,
            epsabs=0,
            epsrel=1e-13,
        )[0]
        for p in (1, 2)
    )
    if alpha < 0:
        mean, var = first, second - first**2
    else:  # max(x, 0) = x + max(-x, 0)
        mean, var = alpha + first, 1 - 2 * alpha * first - first**2 - second
    cdf, pdf = stats.norm.cdf(alpha), stats.norm.pdf(alpha)
    return [
        sd * mean,
        sd**2 * var,
        cdf,
        pdf / 2 / sd,
        2 * sd * mean * stats.norm.sf(alpha),
        cdf - mean * pdf,
    ]


def moments_and_gradients(fn, mean, var):
    """(6, N): mean and variance, and the derivatives of both by both."""

    @jax.jit
    def of(mean, var):
        moments = propagate(fn)(Gaussian(mean, var))
        slopes = [
            jax.grad(lambda m, v, i=i: propagate(fn)(Gaussian(m, v))[i].sum(), (0, 1))(
                mean, var
            )
            for i in (0, 1)
        ]
        return jnp.stack([*moments, *slopes[0], *slopes[1]])

    return np.asarray(of(mean, var), float)


@pytest.mark.parametrize(
    "fn", [jax.nn.gelu, jax.nn.silu, jax.nn.softplus, jax.nn.sigmoid]
)
def test_saturated_units_have_moments(fn):
    """A tail with few digits left is 0, not NaN; by the trapezoidal rule."""
    mean, var = (
        part.ravel()
        for part in np.meshgrid(
            np.r_[-np.geomspace(1e3, 1e-2, 21), np.geomspace(1e-2, 1e3, 21)],
            np.geomspace(1e-4, 1e5, 19),
        )
    )
    found = jax.jit(propagate(fn))(
        Gaussian(jnp.asarray(mean, jnp.float32), jnp.asarray(var, jnp.float32))
    )
    z = np.linspace(-9.0, 9.0, 4001)[:, None]
    weights = stats.norm.pdf(z) / stats.norm.pdf(z).sum()
    sd = np.sqrt(var)
    with jax.enable_x64(True):
        values = np.asarray(fn(jnp.asarray(mean + sd * z)))
    expected = (weights * values).sum(axis=0)
    width = np.sqrt((weights * (values - expected) ** 2).sum(axis=0))
    # x (1 + tanh) of float32 loses all digits of its factor in the tail
    rounding = 1e-5 * np.abs(values).max(axis=0) + 2e-7 * np.abs(mean)
    allowed = 0.01 * width + 1e-5 * sd + rounding
    assert (np.abs(np.asarray(found.mean) - expected) <= allowed).all()
    assert (np.abs(np.sqrt(np.asarray(found.var)) - width) <= allowed).all()


@pytest.mark.parametrize(("dtype", "relative"), [("float32", 2e-5), ("float64", 2e-12)])
def test_rectifier_is_accurate_in_both_tails_and_at_both_ends(dtype, relative):
    """To rounding times the cancellation of the thresholds."""
    sd = np.where(np.arange(len(ALPHAS)) % 4, 1.0, 4.0)
    with jax.enable_x64(dtype == "float64"):
        mean, var = (
            jnp.asarray(np.concatenate(part), dtype)
            for part in zip((ALPHAS * sd, sd**2), AT_ENDS, strict=True)
        )
        found = moments_and_gradients(jax.nn.relu, mean, var)
        rounded = np.asarray(mean, float)[: len(sd)] / sd
    assert np.isfinite(found).all()
    assert (found[:2] >= 0).all()
    expected = np.array(
        [exact_rectifier(*pair) for pair in zip(rounded, sd, strict=True)]
    ).T
    tiny = np.finfo(dtype).tiny / np.finfo(dtype).eps
    # representable with all their digits
    tails, known = (found[:, : len(sd)], expected[:2] > tiny)
    close(tails[:2][known], expected[:2][known], rtol=relative)
    assert (tails[:2][~known] <= 16 * tiny).all()
    # Derivatives are of size 1 at most, times the sd; in the upper tail those of the
    # variance by m are 0 to rounding.
    close(tails[2:], expected[2:], rtol=relative, atol=120 * np.finfo(dtype).eps)
    close(
        found[:2, len(sd) : -1],
        [[0, 3, 0, 1e4], [0, 0, 0, 1e-30]],
        rtol=1e-6,
        atol=1e-36,
    )
    close(found[[2, 5], len(sd) : -1], [[0, 1, 0, 1]] * 2, atol=1e-6)


def test_larger_of_two_known_numbers_is_exact(x64):
    other = Gaussian(np.array([3.0, 2.0]), np.zeros(2))

    def larger(mean):
        return jax.jit(propagate(jnp.maximum))(Gaussian(mean, np.zeros(2)), other)

    found = larger(np.array([1.0, 2.0]))
    close(np.array(found), [[3, 2], [0, 0]])
    close(jax.grad(lambda m: larger(m).mean.sum())(np.array([1.0, 2.0])), [0, 0.5])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_moments_and_gradients_hold_down_to_zero_variance(dtype):
    """E f = f + f'' v / 2 and Var f = f'^2 v."""
    points, variances = np.array([0.7, -0.4]), np.array([0.0, 1e-30, 1e-12, 1e-5])
    with jax.enable_x64(dtype == "float64"):
        mean = jnp.asarray(np.repeat(points, 4), dtype)
        var = jnp.asarray(np.tile(variances, 2), dtype)
        found = moments_and_gradients(jnp.tanh, mean, var)
        value, slope, bend = (
            np.asarray(jax.vmap(f)(mean), float)
            for f in (jnp.tanh, jax.grad(jnp.tanh), jax.grad(jax.grad(jnp.tanh)))
        )
    close(found[0], value, rtol=1e-4)
    close(found[1], slope**2 * np.asarray(var), rtol=2e-4, atol=1e-36)
    close(found[2], slope, rtol=1e-3)
    close(found[3], bend / 2, rtol=1e-3, atol=1e-3)
    close(found[5], slope**2, rtol=1e-3, atol=1e-7)


# -- transformations of JAX ------------------------------------------------------------


@pytest.mark.core
def test_jit_vmap_and_precision_change_nothing_and_gradients_are_right(x64):
    random, apply = weights(), nn.MLP([4, 3], "tanh").apply
    expected = propagate(apply)(random, RANDOM_X)
    direction = jax.tree.map(
        lambda leaf: np.cos(np.arange(leaf.size)).reshape(leaf.shape), random
    )

    def total(step, random):
        moved = jax.tree.map(lambda w, d: w * (1 + step * d), random, direction)
        out = propagate(apply)(moved, RANDOM_X)
        return out.mean.sum() + jnp.log(out.var).sum()

    @jax.jit
    def everything(random, x):
        stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), random)
        by_row = jax.vmap(propagate(apply), (None, 0))(random, x)
        by_weight = jax.tree.map(
            lambda leaf: leaf[0], jax.vmap(propagate(apply), (0, None))(stacked, x)
        )
        return (
            propagate(apply)(random, x),
            by_row,
            by_weight,
            jax.grad(total)(0.0, random),
        )

    *moments, slope = everything(random, RANDOM_X)
    for found in moments:
        close(np.array(found), np.array(expected), rtol=1e-12)
    up, down = (total(step, random) for step in (1e-5, -1e-5))
    close(slope, (up - down) / 2e-5, rtol=1e-7)
    with jax.enable_x64(False):
        single = jax.jit(propagate(apply))(
            weights(np.float32), jax.tree.map(np.float32, RANDOM_X)
        )
    assert single.mean.dtype == single.var.dtype == "float32"
    close(single.mean, expected.mean, rtol=1e-5, atol=1e-6)
    close(single.var, expected.var, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.optimized
def test_large_arrays_have_the_moments_of_small_ones(x64):
    """Beyond 2^24 evaluations nodes are summed one after another."""
    x = Gaussian(*(np.tile(part.reshape(6), 36_000) for part in RANDOM_X))

    @jax.jit
    def of(x):
        found, back = jax.vjp(propagate(jax.nn.elu), x)
        return found, back(Gaussian(jnp.zeros_like(x.mean), jnp.ones_like(x.mean)))[0]

    large, small = of(x), of(Gaussian(*(part[:6] for part in x)))
    for found, expected in zip(
        jax.tree.leaves(large), jax.tree.leaves(small), strict=True
    ):
        close(found[-6:], expected, rtol=1e-8, atol=1e-10)


@jax.custom_vjp
def wave(x):
    return jnp.sin(x)


wave.defvjp(lambda x: (wave(x), x), lambda x, g: (g * jnp.cos(x),))


@pytest.mark.core
@pytest.mark.parametrize(
    "wrap", [jax.checkpoint, jax.vmap, lambda fn: jax.jit(jax.jit(fn))]
)
def test_calls_are_descended_into(wrap):
    def fn(x):
        return jax.nn.relu(wave(x) + x @ np.ones((3, 3)))

    for found, expected in zip(
        propagate(wrap(fn))(RANDOM_X), propagate(fn)(RANDOM_X), strict=True
    ):
        close(found, expected, rtol=1e-6)


def test_functions_of_one_variable_are_not_products_of_two(x64):
    """However the function is spread over lines and calls."""
    gate = jax.jit(jax.nn.sigmoid)
    found = propagate(lambda x: x * gate(x) + x - x)(RANDOM_X)
    for moment, expected in zip(found, propagate(jax.nn.silu)(RANDOM_X), strict=True):
        close(moment, expected, rtol=1e-6, atol=1e-9)
    close(propagate(lambda x: 3 * x - (x + x))(RANDOM_X).var, RANDOM_X.var, rtol=1e-12)


def test_outputs_keep_the_tree_and_plain_values_stay_plain():
    def fn(data, *, shift, name):
        assert name == "a"
        return {
            "random": data["x"] * 2 + shift,
            "plain": jnp.sin(shift),
            "both": (data["n"], shift, 3),
        }

    out = propagate(fn)(
        {"x": Gaussian(jnp.ones(2), jnp.ones(2)), "n": 4}, shift=jnp.ones(2), name="a"
    )
    assert out["random"].mean.tolist() == [3, 3]
    assert out["random"].var.tolist() == [4, 4]
    close(out["plain"], np.sin(1.0), rtol=1e-6)
    assert [int(np.sum(leaf)) for leaf in out["both"]] == [4, 2, 3]
    assert propagate(lambda x: x + 1)(1.0) == 2  # nothing is random


# -- errors ----------------------------------------------------------------------------


def centered(x):
    return x - x.mean(1, keepdims=True)


REFUSED = [
    (jnp.sort, "`sort` at "),
    (lambda x: jnp.argmax(x), "`argmax` at "),
    (lambda x: lax.scan(lambda c, v: (c + v, v), jnp.zeros(3), x)[0], "`scan` at "),
    (lambda x: x > 0, "`gt` at .* turns random numbers into bool"),
    (
        lambda x: x.astype(int),
        "`convert_element_type` at .* turns random numbers into int",
    ),
    (lambda x: 1 / x, "`div` at .* has no moments"),
    (lambda x: (2 * x + 1) ** -1, "`integer_pow` at .* has no moments"),
    (lambda x: jnp.log(x), "`log` at .* has no moments"),
    (lambda x: x[0] / x[1], "`div` at .* joins two"),
    (lambda x: jnp.where(x[0] > 0, x[1], 0.0), "`select_n` at .* joins two"),
    (lambda x: x @ x.T, "`dot_general` at .* with itself"),
    (lambda x: x[:, :2] * jnp.tanh(x)[:, :2], "`mul` at .* reshaped or sliced alike"),
    (
        lambda x: x.at[jnp.array([0, 1])].add(jnp.tanh(x)[:2]),
        "`scatter-add` at .* same random elements",
    ),
    (lambda x: x.at[0].add(x.sum()), "`scatter-add` at .* reduction"),
    (centered, "`sub` at .* reduction of itself"),
    (lambda x: jnp.arange(3)[x[0].astype(int)], "`.*` at "),
    (lambda x: nn.BatchNorm(False, False).apply({}, x), "norm.py"),
    (lambda x: nn.LayerNorm(False, False).apply({}, x), "norm.py"),
]


@pytest.mark.core
@pytest.mark.parametrize(("fn", "message"), REFUSED)
def test_what_would_be_wrong_is_refused(fn, message):
    with pytest.raises(ValueError, match=message):
        propagate(lambda x: fn(x))(RANDOM_X)


@jax.jit
def user_layer(x):
    y = x + 1
    return jnp.sort(y)


def test_error_names_the_line_of_the_user():
    """Also inside of a jitted function, and not that of an earlier use."""
    user_layer(jnp.ones((2, 3)))  # JAX keeps the traceback of this use
    lines = {
        centered: centered.__code__.co_firstlineno + 1,
        user_layer: user_layer.__wrapped__.__code__.co_firstlineno + 3,
    }
    for fn, line in lines.items():
        with pytest.raises(ValueError, match=f"test_moments.py:{line} ") as error:
            propagate(lambda x, fn=fn: 2 * fn(x))(RANDOM_X)
        assert str(error.value).startswith("moments.propagate: argument `fn` got `")
    # A traced model contains much that the output does not need: there the unsupported
    # sort is not even looked at.
    assert propagate(lambda x: jax.jit(lambda x: (jnp.sort(x), x + 1))(x)[1])(
        RANDOM_X
    ).mean.shape == (2, 3)


# -- rules of the user -----------------------------------------------------------------


def test_user_adds_rules():
    @register("cumprod")
    def cumprod(equation, x):
        assert equation.params["axis"] == 0
        mean = equation.bind(x.mean)
        return Gaussian(mean, equation.bind(x.mean**2 + x.var) - mean**2)

    register_elementwise("floor")
    x = Gaussian(jnp.array([2.0, 3.0]), jnp.array([1.0, 0.5]))
    assert propagate(lax.cumprod)(x).var.tolist() == [1.0, 5 * 9.5 - 36]
    assert propagate(lambda x: jnp.floor(x) * 0 + x)(x).mean.shape == (2,)
