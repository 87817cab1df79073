"""Kernels of infinitely wide networks: closed forms, quadrature, networks of the prior, derivatives, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer import Predictive
from scipy import integrate, stats

from numpyro_bnn import nn, priors, random_network
from numpyro_bnn.infinite import nngp, ntk
from numpyro_bnn.infinite.activations import CLOSED_FORMS, dual
from numpyro_bnn.infinite.kernels import prior_variance

OUTPUTS = 32  # each an independent draw of the same process, given the hidden layers

# Width -> network and shape of its inputs: every kind of layer, and every way they may stand together.
NETWORKS = {
    **{name: lambda h, name=name: (nn.MLP([h, h, OUTPUTS], name), (3,)) for name in ("relu", "erf", "gelu", "tanh")},
    "steep": lambda h: (nn.Sequential([nn.Dense(h), nn.Activation("leaky_relu", 0.4), nn.Dense(OUTPUTS)]), (3,)),
    "without bias": lambda h: (nn.Sequential([nn.Dense(h, False), "relu", nn.Dense(OUTPUTS, False)]), (3,)),
    "norm of units": lambda h: (nn.MLP([h, h, OUTPUTS], "erf", nn.LayerNorm()), (3,)),
    "norm without gain": lambda h: (nn.MLP([h, h, OUTPUTS], "relu", nn.LayerNorm(False, False)), (3,)),
    "norm of activations": lambda h: (
        nn.Sequential([nn.Dense(h), "gelu", nn.LayerNorm(), nn.Dense(h), "relu", nn.Dense(OUTPUTS)]),
        (3,),
    ),
    "norm of inputs": lambda h: (
        nn.Sequential([nn.LayerNorm(False, False), nn.Dense(h), "relu", nn.Dense(OUTPUTS)]),
        (3,),
    ),
    "residual": lambda h: (
        nn.Sequential([nn.Dense(h), nn.Residual(nn.Sequential(["relu", nn.Dense(h)])), "erf", nn.Dense(OUTPUTS)]),
        (3,),
    ),
    "residual of activations": lambda h: (
        nn.Sequential(
            [
                nn.Dense(h),
                "relu",
                nn.Residual(nn.Sequential([nn.Dense(h), "relu"])),
                nn.LayerNorm(),
                nn.Dense(OUTPUTS),
            ]
        ),
        (3,),
    ),
    "residual with shortcut": lambda h: (
        nn.Sequential(
            [nn.Residual(nn.Sequential([nn.Dense(h), "erf", nn.Dense(h)]), nn.Dense(h)), "relu", nn.Dense(OUTPUTS)]
        ),
        (3,),
    ),
    "pooled inputs": lambda h: (
        nn.Sequential([nn.MaxPool((2, 1)), "tanh", nn.Flatten(), nn.Dense(h), "relu", nn.Dense(OUTPUTS)]),
        (4, 3, 2),
    ),
}
FAST = ("relu", "norm of units", "residual")
ROWS = [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in NETWORKS]
PRIOR = priors.Normal(1.3, bias_scale=0.4, gain_scale=0.3)


def data(shape, rows=4, seed=0):
    """Rows of which the last repeats the first."""
    x = np.random.default_rng(seed).normal(size=(rows - 1, *shape))
    return np.concatenate([x, x[:1]])


# ------------------------------------------------------------------------------------ the contract of a kernel


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ROWS)
def test_kernels_are_symmetric_and_positive(name):
    net, shape = NETWORKS[name](8)
    x = data(shape, 6)
    for kernel in (nngp(net, x, prior=PRIOR), ntk(net, x, prior=PRIOR)):
        kernel = np.asarray(kernel)
        assert kernel.dtype == np.float64
        np.testing.assert_array_equal(kernel, kernel.T)
        # Rounding, and for the tangent kernel of ReLU its square root: x and its repetition are not quite one point.
        assert np.linalg.eigvalsh(kernel)[0] > -1e-7 * kernel.trace()
    whole = nngp(net, x, prior=PRIOR)
    np.testing.assert_allclose(nngp(net, x, x[:2], prior=PRIOR), whole[:, :2], rtol=1e-12)
    np.testing.assert_allclose(prior_variance("example", net, x, PRIOR, None), np.diagonal(whole), rtol=1e-7)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ROWS)
def test_derivatives_hold_where_inputs_meet(name):
    """Along a smooth path of inputs, through a kernel whose rows include each input itself."""
    net, shape = NETWORKS[name](8)
    x, direction = data(shape, 3), data(shape, 3, seed=1)
    wanted = np.array([[0.3, -1.0, 0.5], [0.2, 0.7, 0.1], [-0.4, 0.6, 1.0]])

    def value(t):
        return jnp.sum(wanted * nngp(net, x + t * direction, prior=PRIOR))

    step = 1e-5
    difference = (value(step) - value(-step)) / (2 * step)
    np.testing.assert_allclose(jax.grad(value)(0.0), difference, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["relu", "erf", pytest.param("tanh", marks=pytest.mark.slow)])
def test_derivatives_of_the_tangent_kernel(name):
    """Where no two inputs meet; where they do, that of ReLU has a kink, and the derivative along a scale holds."""
    net, shape = NETWORKS[name](8)
    x, direction = data(shape, 4)[:3], data(shape, 3, seed=1)
    apart = jnp.array([[0.0, -1.0, 0.5], [0.2, 0.0, 0.1], [-0.4, 0.6, 0.0]])

    def value(t):
        return jnp.sum(apart * ntk(net, x + t * direction, prior=PRIOR))

    def scaled(t):
        return jnp.sum(ntk(net, (1 + t) * x, prior=PRIOR))

    step = 1e-5
    for fn in (value, scaled):
        np.testing.assert_allclose(jax.grad(fn)(0.0), (fn(step) - fn(-step)) / (2 * step), rtol=1e-5)


@pytest.mark.parametrize(
    "name", ["relu", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tanh", "norm of units"))]
)
def test_blocks_give_the_same(name):
    net, shape = NETWORKS[name](8)
    x, other = data(shape, 7).astype(np.float32), data(shape, 5, seed=2).astype(np.float32)
    for kernel in (nngp, ntk):
        for pair in ((x,), (x, other)):
            whole, blocks = kernel(net, *pair, prior=PRIOR), kernel(net, *pair, prior=PRIOR, block_size=3)
            assert isinstance(blocks, np.ndarray)
            assert blocks.dtype == np.float32
            np.testing.assert_allclose(blocks, whole, rtol=2e-3, atol=1e-5)  # ReLU's T near equal inputs: root of eps


# -------------------------------------------------------------------------------------- published closed forms


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("angle", [0.0, 0.3, np.pi / 2, 2.5, np.pi])
def test_arc_cosine_kernels(angle):
    """Cho & Saul (2009), equations (3) and (6), orders 0 and 1; theirs are twice the expectations of relu."""
    x = np.array([[2.0, 0.0], [3.0 * np.cos(angle), 3.0 * np.sin(angle)]])
    net = nn.Sequential([nn.Dense(8, use_bias=False), "relu", nn.Dense(1, use_bias=False)])
    found = nngp(net, x, prior=priors.Normal(2**0.5))[0, 1]  # s^2 / D = 1 in the first layer, s^2 = 2 in the second
    order1 = 2.0 * 3.0 / np.pi * (np.sin(angle) + (np.pi - angle) * np.cos(angle))
    np.testing.assert_allclose(found, order1, rtol=1e-12, atol=1e-14)
    order0 = 1 - angle / np.pi
    tangent = order1 + 2.0 * 3.0 * np.cos(angle) * order0
    # arccos near its ends knows an angle to the root of the rounding error only.
    np.testing.assert_allclose(ntk(net, x, prior=priors.Normal(2**0.5))[0, 1], tangent, rtol=1e-7, atol=1e-7)


@pytest.mark.usefixtures("x64")
def test_arcsine_kernel():
    """Williams (1997), equation (11): (2 / pi) arcsin(2 x'Sy / sqrt((1 + 2 x'Sx)(1 + 2 y'Sy))), here 4 times it."""
    x = data((3,), 5)
    net = nn.Sequential([nn.Dense(8), "erf", nn.Dense(1, use_bias=False)])
    s = 1.7 * x @ x.T / 3 + 0.25
    width = np.sqrt(1 + 2 * np.diagonal(s))
    expected = 4 * 2 / np.pi * np.arcsin(2 * s / np.outer(width, width))
    prior = {"Dense_0.kernel": dist.Normal(0.0, (1.7 / 3) ** 0.5), "Dense_0.bias": dist.Normal(0.0, 0.5)}
    prior["Dense_1.kernel"] = priors.Normal(2.0)
    np.testing.assert_allclose(nngp(net, x, prior=prior), expected, rtol=1e-12)


@pytest.mark.usefixtures("x64")
def test_deep_linear_network():
    """K_L = x.x'/D + L and T_L = (L + 1) x.x'/D + 1 + 2 + ... for unit variances."""
    x = data((3,), 5)
    gram, net = x @ x.T / 3, nn.MLP([8, 8, 8, 1], "identity")
    np.testing.assert_allclose(nngp(net, x), gram + 4, rtol=1e-12)
    np.testing.assert_allclose(ntk(net, x), 4 * gram + 10, rtol=1e-12)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("gain", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_gains_and_biases_of_a_norm_are_trained(gain, bias):
    """Units u = h / sd have K / sd sd' and T / sd sd'; times a gain N(1, v) plus a bias N(0, c), both parameters:
    K -> (1 + v) K + c and T -> (1 + v) T + v K + c."""
    x = data((3,), 4)
    net = nn.Sequential([nn.Dense(8), nn.LayerNorm(gain, bias), nn.Dense(1)])
    weight, c, v = 1.3**2, bias * 0.4**2, gain * 0.3**2
    first = weight * x @ x.T / 3 + 0.4**2
    sd = np.sqrt(np.diagonal(first))
    unit = first / np.outer(sd, sd)
    units, tangent = (1 + v) * unit + c, (1 + v) * unit + v * unit + c
    second = weight * units + 0.4**2
    np.testing.assert_allclose(nngp(net, x, prior=PRIOR), second, rtol=1e-10)
    np.testing.assert_allclose(ntk(net, x, prior=PRIOR), weight * tangent + second, rtol=1e-10)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_gelu_against_the_normal_distribution_function():
    """E x y Phi(x) Phi(y) under the density, by adaptive integration."""
    q1, q2, k = 1.3, 0.7, 0.5
    gelu = lambda x: x * stats.norm.cdf(x)  # noqa: E731
    joint = stats.multivariate_normal(np.zeros(2), [[q1, k], [k, q2]])
    expected, error = integrate.dblquad(lambda y, x: gelu(x) * gelu(y) * joint.pdf([x, y]), -9, 9, -7, 7, epsabs=1e-9)
    assert abs(float(dual(nn.Activation("gelu")).value(*map(jnp.asarray, (k, q1, q2)))) - expected) < 10 * error


POINTS = [(0.4, 1.3, 0.7), (-0.9, 1.0, 1.0), (2.9, 3.0, 3.0), (4.0, 4.0, 4.0), (0.0, 2.0, 0.0)]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", sorted(set(CLOSED_FORMS) - {"relu", "leaky_relu"}))
def test_quadrature_is_the_closed_form(name):
    points = tuple(map(jnp.asarray, np.transpose(POINTS)))
    closed, numeric = (dual(nn.Activation(name), closed=way) for way in (True, False))
    for part in ("value", "slope"):
        np.testing.assert_allclose(getattr(numeric, part)(*points), getattr(closed, part)(*points), atol=1e-9)
    np.testing.assert_allclose(numeric.mean(points[1]), closed.mean(points[1]), atol=1e-12)

    def slopes(forms):
        return np.stack(jax.grad(lambda args: forms.value(*args).sum())(points))

    known = np.stack(points) > 0
    np.testing.assert_allclose(slopes(numeric)[known], slopes(closed)[known], atol=1e-8)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("slope", [0.0, 0.2, 1.0])
def test_means_of_rectified_units(slope):
    """E max(x, 0) = sqrt(q / 2 pi), and E min(x, 0) is minus that."""
    q = jnp.array([0.0, 0.3, 1.0, 4.0])
    found = dual(nn.Activation("leaky_relu", slope)).mean(q)
    np.testing.assert_allclose(found, (1 - slope) * np.sqrt(q / (2 * np.pi)), rtol=1e-12)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["tanh", "silu", "softplus"])
def test_quadrature_against_adaptive_integration(name):
    q1, q2, k = 2.0, 1.0, 0.8
    joint = stats.multivariate_normal(np.zeros(2), [[q1, k], [k, q2]])
    grid = np.arange(-12, 12, 0.05)
    x, y = np.meshgrid(grid, grid, indexing="ij")
    fn = np.asarray(nn.ACTIVATIONS[name](jnp.asarray(grid)))
    expected = fn @ joint.pdf(np.stack([x, y], -1)) @ fn * 0.05**2  # exact to rounding: smooth and decaying
    found = dual(nn.Activation(name)).value(*map(jnp.asarray, (k, q1, q2)))
    np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", sorted(nn.ACTIVATIONS))
def test_slope_is_the_derivative_by_the_covariance(name):
    """Price's theorem ties the two expectations."""
    forms, point = dual(nn.Activation(name)), tuple(map(jnp.asarray, (0.4, 1.3, 0.7)))
    np.testing.assert_allclose(jax.grad(forms.value)(*point), forms.slope(*point), rtol=1e-9)


# ------------------------------------------------------------------------------- networks drawn from the prior


def covariance_of_draws(name, width, x, draws):
    """E f f' over networks that `random_network` draws, and its standard errors."""
    net, shape = NETWORKS[name](width)

    def model():
        return random_network("net", net, shape, PRIOR)(jnp.asarray(x, jnp.float32))

    f = np.asarray(
        Predictive(model_of(model), num_samples=draws, parallel=True)(jax.random.key(width))["f"], np.float64
    )
    products = np.einsum("snk,smk->snm", f, f) / OUTPUTS
    return products.mean(0), products.std(0) / draws**0.5


def model_of(function):
    def model():
        from numpyro import deterministic

        deterministic("f", function())

    return model


@pytest.mark.parametrize("name", ROWS)
def test_covariance_of_drawn_networks(name):
    """Twice the covariance at width 2 H less that at H has no error of order 1 / H; six standard errors."""
    x = data(NETWORKS[name](1)[1], 3)
    (one, error), (other, second) = (covariance_of_draws(name, width, x, 800) for width in (16, 32))
    kernel = np.asarray(nngp(NETWORKS[name](1)[0], x.astype(np.float32), prior=PRIOR))
    allowed = 6 * np.hypot(error, 2 * second)
    assert (np.abs(2 * other - one - kernel) < allowed).all()
    assert allowed.max() < 0.4 * kernel.max()  # so that it can fail


def layers_of_draws(depth, width, x, networks, key):
    """Last hidden layers (networks, N, H) of ReLU networks; weights of sd sqrt(2 / fan-in), biases of sd 0.5."""
    h = jnp.asarray(x, jnp.float32)[None]
    for _ in range(depth):
        key, w_key, b_key = jax.random.split(key, 3)
        w = jax.random.normal(w_key, (networks, h.shape[-1], width)) * (2 / h.shape[-1]) ** 0.5
        h = jax.nn.relu(h @ w + 0.5 * jax.random.normal(b_key, (networks, 1, width)))
    return h


def outputs_of_draws(depth, width, x, networks, key):
    """Covariances of the outputs given the hidden layers (networks, N, N), and four outputs (networks, N, 4)."""
    w_key, b_key, key = jax.random.split(key, 3)
    h = layers_of_draws(depth, width, x, networks, key)
    f = h @ jax.random.normal(w_key, (networks, width, 4)) * (2 / width) ** 0.5
    covariance = 2 * jnp.einsum("snh,smh->snm", h, h) / width + 0.25
    return covariance, f + 0.5 * jax.random.normal(b_key, (networks, 1, 4))


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "widths"), [(1, (4, 8, 16, 32)), (2, (16, 32, 64))])
def test_a_hundred_thousand_networks_approach_the_kernel_as_one_over_width(depth, widths):
    """Mean squared distance of their covariances from the kernel, and E f^4 - 3 K^2, which is 0 for a process."""
    x, networks = np.array([[1.0, 0.0], [0.6, 0.8]]), 100_000
    net, prior = nn.MLP([1] * depth + [1], "relu"), priors.Normal(2**0.5, bias_scale=0.5)
    kernel = np.asarray(nngp(net, x, prior=prior), np.float64)
    compiled = jax.jit(outputs_of_draws, static_argnums=(0, 1, 3))
    squared, excess, errors = [], [], []
    for width in widths:
        parts = [compiled(depth, width, x, 10_000, jax.random.key(100 * width + i)) for i in range(10)]
        covariance, f = (np.concatenate(part).astype(np.float64) for part in zip(*parts, strict=True))
        squared.append(np.mean((covariance - kernel) ** 2))
        fourth = np.mean(f**4 - 3 * np.diagonal(kernel)[:, None] ** 2, axis=(1, 2))
        excess.append(fourth.mean())
        errors.append(fourth.std() / networks**0.5)
        if depth == 1:  # without bias at any width: five standard errors
            assert (np.abs(covariance.mean(0) - kernel) < 5 * covariance.std(0) / networks**0.5).all()
    slope = np.polyfit(np.log(widths), np.log(squared), 1)[0]
    assert abs(slope + 1) < 0.15
    (slope, _), spread = np.polyfit(np.log(widths), np.log(excess), 1, w=np.array(excess) / errors, cov="unscaled")
    assert abs(slope + 1) < 0.15
    assert spread[0, 0] ** 0.5 < 0.05


def test_hierarchical_prior_given_its_scales():
    """Conditional on the scales the kernel is that of a normal prior with these sds."""
    x, net = data((3,)), nn.MLP([8, 1], "relu")
    scales = {"Dense_0.kernel_scale": 0.7, "Dense_1.kernel_scale": 1.9}
    expected = nngp(net, x, prior={"Dense_0.*": priors.Normal(0.7), "Dense_1.*": priors.Normal(1.9)})
    np.testing.assert_allclose(nngp(net, x, prior=priors.Hierarchical(), scales=scales), expected, rtol=1e-6)
    with handlers.seed(rng_seed=1), handlers.trace() as trace:  # inside a model it adds no site
        nngp(net, x, prior=priors.Hierarchical(), scales=scales)
    assert not trace


@pytest.mark.usefixtures("x64")
def test_scales_by_input():
    """ARD on the inputs: as if every input were multiplied by its scale."""
    x, net, s = data((3,)), nn.MLP([8, 1], "erf"), np.array([0.1, 1.0, 3.0])
    prior = priors.BySite({"Dense_0.kernel": priors.ARD()}, default=priors.Normal())
    found = nngp(net, x, prior=prior, scales={"Dense_0.kernel_scale": jnp.asarray(s)})
    np.testing.assert_allclose(found, nngp(net, x * s), rtol=1e-12)


def test_scales_by_hidden_unit_count_by_their_mean_square():
    x, net, s = data((3,)), nn.MLP([4, 1], "erf"), np.array([0.1, 1.0, 3.0, 2.0])
    prior = {"Dense_1.kernel": dist.Normal(0.0, s[:, None] / 2), "*": priors.Normal()}
    same = {"Dense_1.kernel": priors.Normal(np.mean(s**2) ** 0.5), "*": priors.Normal()}
    np.testing.assert_allclose(nngp(net, x, prior=prior), nngp(net, x, prior=same), rtol=1e-6)


def test_only_the_variance_of_hidden_weights_matters():
    x, net = data((3,)), nn.MLP([8, 8, 1], "relu")
    prior = {"Dense_1.kernel": priors.Laplace(1.3), "Dense_2.kernel": priors.ScaleMixture(0.5, 1.2, 0.3), "*": PRIOR}
    mixture = 8 * (0.5 * 1.2**2 + 0.5 * 0.3**2)  # without fan-in scaling: the width of the specification counts
    same = {"Dense_2.kernel": priors.Normal(mixture**0.5), "*": PRIOR}
    np.testing.assert_allclose(nngp(net, x, prior=prior), nngp(net, x, prior=same), rtol=1e-5)


# ---------------------------------------------------------------------------------------------------- errors

DENSE = nn.MLP([8, 1], "relu")


@pytest.mark.parametrize(
    ("net", "options", "message"),
    [
        (DENSE, {"prior": priors.Hierarchical()}, r"scales=\{'Dense_0.kernel_scale': 1.0\}"),
        (DENSE, {"prior": priors.Normal(), "scales": {"a": 1.0}}, "no hyper-sites"),
        (DENSE, {"prior": priors.Hierarchical(), "scales": {"b": 1.0}}, "Dense_0.kernel_scale"),
        (DENSE, {"prior": priors.Laplace()}, "'Dense_0.kernel' that are not normal"),
        (DENSE, {"prior": {"*.bias": priors.ScaleMixture(), "*": priors.Normal()}}, "'Dense_0.bias'"),
        (DENSE, {"prior": priors.StudentT(df=2.0)}, "infinite variance"),
        (DENSE, {"prior": dist.Normal(1.0, 1.0)}, "mean other than 0"),
        (DENSE, {"block_size": 0}, "block_size"),
        (DENSE, {"prior": {"Dense_0.bias": dist.Normal(0, np.arange(1.0, 9.0)), "*": PRIOR}}, "alike"),
        (DENSE, {"prior": {"Dense_0.kernel": dist.Normal(0, np.arange(1.0, 9.0)), "*": PRIOR}}, "alike"),
        (nn.MLP([8, 1], "relu", nn.BatchNorm()), {}, "BatchNorm_0'.*LayerNorm"),
        (nn.Sequential([nn.Dense(8), "relu"]), {}, "End it with `nn.Dense`"),
        (nn.Sequential([nn.Dense(8), "relu", "tanh", nn.Dense(1)]), {}, "needs normal inputs.*without activation"),
        (nn.Sequential([nn.LayerNorm(), nn.Dense(1)]), {}, "use_scale=False"),
        (nn.Sequential([nn.Residual(nn.Dense(3)), nn.Dense(1)]), {}, "before the block"),
        (nn.Sequential([nn.Dense(8), nn.Residual(nn.Activation("relu")), nn.Dense(1)]), {}, "needs weights"),
        (nn.Sequential(["relu"]), {}, "End it with"),
    ],
)
def test_errors_teach(net, options, message):
    with pytest.raises(ValueError, match=message):
        nngp(net, data((3,)), **options)


@pytest.mark.parametrize(
    ("net", "message"),
    [(nn.CNN([4], [1]), "Conv2d_0.*Layers with a limit: Dense"), (nn.MaxPool(2), "outputs of shape")],
)
def test_errors_teach_on_images(net, message):
    with pytest.raises(ValueError, match=message):
        nngp(net, data((4, 4, 1)))


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (("relu", data((3,))), TypeError, "specification"),
        ((DENSE, np.full((2, 3), np.nan)), ValueError, "NaN"),
        ((DENSE, np.zeros(3)), ValueError, r"x\[:, None\]"),
        ((DENSE, data((3,)), data((2,))), ValueError, "x2"),
    ],
)
def test_wrong_arguments(arguments, kind, message):
    with pytest.raises(kind, match=message):
        ntk(*arguments)


def test_dependent_weights_are_refused():
    prior = {"Dense_1.kernel": dist.MultivariateNormal(np.zeros((8, 1)), np.eye(1)), "*": PRIOR}
    with pytest.raises(ValueError, match="independent weights"):
        nngp(DENSE, data((3,)), prior=prior)
