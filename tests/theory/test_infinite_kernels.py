"""Kernels of infinitely wide networks: closed forms, integration, networks of the
prior, derivatives, errors.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from helpers import each
from numpy.testing import assert_allclose as close
from numpyro import handlers

from numpyro_bnn import nn, priors
from numpyro_bnn.infinite import empirical_ntk, nngp, ntk

slow = pytest.mark.slow
OUTPUTS = 32  # each an independent draw of the same process, given the hidden layers


def chain(*layers):
    return nn.Sequential([*layers, nn.Dense(OUTPUTS)])


def residual(*layers, **options):
    return nn.Residual(nn.Sequential([*layers]), **options)


# Network of a width: every kind of layer, and every way they may stand together.
NETWORKS = {
    "branches": lambda h: chain(
        nn.Dense(h),
        "relu",
        residual(nn.Dense(h), "softplus"),
        nn.LayerNorm(),
        nn.Dense(h),
        "tanh",
    ),
    "norm of activations": lambda h: chain(
        nn.Dense(h), "gelu", nn.LayerNorm(), nn.Dense(h), "relu"
    ),
    "shortcut": lambda h: chain(
        nn.Residual(nn.MLP([h, h], "erf"), nn.Dense(h)), "relu"
    ),
    "pooled inputs": lambda h: chain(
        nn.MaxPool((2, 1)), "tanh", nn.Flatten(), nn.Dense(h), "relu"
    ),
}
EACH = each("name", NETWORKS, fast=["branches"])
PRIOR = priors.Normal(1.3, bias_scale=0.4, gain_scale=0.3)


def data(name="", rows=4, seed=0):
    """Rows of which the last repeats the first."""
    x = np.random.default_rng(seed).normal(
        size=(rows - 1, *((4, 3, 2) if name == "pooled inputs" else (3,)))
    )
    return np.concatenate([x, x[:1]])


@EACH
def test_kernels_are_symmetric_positive_and_the_same_in_blocks(name, x64):
    net, x = NETWORKS[name](8), data(name, 7)
    for kernel in (nngp, ntk):
        block, across = (
            np.asarray(kernel(net, x[:4], *other, prior=PRIOR))
            for other in ((), (x[3:],))
        )
        np.testing.assert_array_equal(block, block.T)
        whole = kernel(net, x, prior=PRIOR, block_size=4)
        assert isinstance(whole, np.ndarray)
        assert whole.dtype == np.float64
        close(whole[:4, :4], block, rtol=1e-12)
        # Near equal inputs the tangent kernel of ReLU has the root of rounding errors.
        close(whole[:4, 3:], across, rtol=1e-6)
        close(kernel(net, x, x[3:], prior=PRIOR, block_size=4), whole[:, 3:], rtol=1e-6)
        assert np.linalg.eigvalsh(whole)[0] > -1e-7 * whole.trace()


@EACH
def test_derivatives_hold_where_inputs_meet(name, x64):
    """Along a smooth path of inputs, with each input itself among the rows."""
    net, (x, direction) = NETWORKS[name](8), (data(name, 4, seed=s) for s in (0, 1))
    wanted = np.random.default_rng(2).normal(size=(4, 4))
    value = jax.jit(
        lambda t: jnp.sum(wanted * nngp(net, x + t * direction, prior=PRIOR))
    )
    difference = (value(1e-5) - value(-1e-5)) / 2e-5
    close(jax.jit(jax.grad(value))(0.0), difference, rtol=1e-5, atol=1e-6)


# -- published closed forms, and integration -------------------------------------------


def test_arc_cosine_kernels(x64):
    """Cho & Saul (2009), (3) and (6), orders 0 and 1: twice those of relu."""
    angles = np.array([0.0, 0.3, np.pi / 2, 2.5, np.pi])
    x = np.array([[2.0, 0.0], *(3.0 * np.stack([np.cos(angles), np.sin(angles)], 1))])
    net = nn.Sequential(
        [nn.Dense(8, use_bias=False), "relu", nn.Dense(1, use_bias=False)]
    )
    # s^2 / D = 1 in the first layer, s^2 = 2 in the second
    prior = priors.Normal(2**0.5)
    order1 = 2.0 * 3.0 / np.pi * (np.sin(angles) + (np.pi - angles) * np.cos(angles))
    close(nngp(net, x, prior=prior)[0, 1:], order1, rtol=1e-12, atol=1e-14)
    tangent = order1 + 2.0 * 3.0 * np.cos(angles) * (1 - angles / np.pi)
    # arccos near its ends knows an angle to the root of the rounding error only.
    close(ntk(net, x, prior=prior)[0, 1:], tangent, rtol=1e-7, atol=1e-7)


def test_arcsine_kernel(x64):
    """Williams (1997), equation (11): (2 / pi) arcsin(2 x'Sy / sqrt((1 + 2 x'Sx)(1 + 2
    y'Sy))), here 4 times it.
    """
    x = data(rows=5)
    net = nn.Sequential([nn.Dense(8), "erf", nn.Dense(1, use_bias=False)])
    s = 1.7 * x @ x.T / 3 + 0.25
    width = np.sqrt(1 + 2 * np.diagonal(s))
    expected = 4 * 2 / np.pi * np.arcsin(2 * s / np.outer(width, width))
    prior = {
        "Dense_0.kernel": dist.Normal(0.0, (1.7 / 3) ** 0.5),
        "Dense_0.bias": dist.Normal(0.0, 0.5),
    }
    prior["Dense_1.kernel"] = priors.Normal(2.0)
    close(nngp(net, x, prior=prior), expected, rtol=1e-12)


def test_linear_networks_with_a_shortcut(x64):
    """K -> K + 1, T -> T + K + 1 a layer; a shortcut adds both once more."""
    x = data()
    layers = [nn.Flatten(2), nn.Dense(8), nn.Flatten(1), residual(nn.Dense(8))]
    net = nn.Sequential([*layers, nn.Dense(1)])
    gram, images = x @ x.T / 3, x[..., None]
    close(nngp(net, images), 2 * gram + 4, rtol=1e-12)
    close(ntk(net, images), 5 * gram + 8, rtol=1e-12)


def test_gains_and_biases_of_a_norm_are_trained(x64):
    """Units u = h / sd have K / sd sd' and T / sd sd'; times a gain N(1, v) plus a bias
    N(0, c), both parameters: K -> (1 + v) K + c and T -> (1 + v) T + v K + c.
    """
    x, net = data(), nn.Sequential([nn.Dense(8), nn.LayerNorm(), nn.Dense(1)])
    weight, c, v = 1.3**2, 0.4**2, 0.3**2
    first = weight * x @ x.T / 3 + 0.4**2
    sd = np.sqrt(np.diagonal(first))
    unit = first / np.outer(sd, sd)
    second = weight * ((1 + v) * unit + c) + 0.4**2
    close(nngp(net, x, prior=PRIOR), second, rtol=1e-10)
    close(
        ntk(net, x, prior=PRIOR), weight * ((1 + 2 * v) * unit + c) + second, rtol=1e-10
    )


# -0.9: far from the diagonal; 2.9 near it.
PAIRS = np.array(
    [(0.4, 1.3, 0.7), (-0.9, 1.0, 1.1), (2.9, 3.0, 3.0), (0.8, 2.0, 1.0)]
)  # covariance, variances


# The others are closed forms above.
INTEGRATED = [
    name for name in nn.ACTIVATIONS if name not in ("relu", "erf", "identity")
]


@each("name", INTEGRATED, fast=("leaky_relu", "gelu"))
def test_activations_agree_with_integration(name, x64):
    """E f(u) f(v), E f'(u) f'(v) and E f(u), on a fine grid."""
    layer = nn.Activation(name, 0.2) if name == "leaky_relu" else name
    fn = (
        (lambda u: jax.nn.leaky_relu(u, 0.2))
        if name == "leaky_relu"
        else nn.ACTIVATIONS[name]
    )
    first, last = nn.Dense(8, use_bias=False), nn.Dense(1, use_bias=False)
    # rows 2 i and 2 i + 1 are a pair
    x = np.concatenate([np.linalg.cholesky([[a, k], [k, b]]) for k, a, b in PAIRS])
    at = (np.arange(0, len(x), 2), np.arange(1, len(x), 2))
    # the first kernel is x.x', the last weights have variance 2
    options = {"prior": priors.Normal(2**0.5)}
    plain, norm = (
        nn.Sequential([first, layer, *more, last])
        for more in ((), (nn.LayerNorm(False, False),))
    )
    kernel, tangent = (np.asarray(f(plain, x, **options)) for f in (nngp, ntk))
    z = np.arange(-9, 9, 0.02) + 0.01  # kinks are between the nodes
    u, v = np.meshgrid(z, z, indexing="ij")
    weight = np.exp(-0.5 * (u**2 + v**2)) / np.exp(-0.5 * (u**2 + v**2)).sum()
    slope = jax.jit(jax.vmap(jax.vmap(jax.grad(fn))))
    tolerance = (
        {"rtol": 1e-4, "atol": 1e-4}
        if "relu" in name
        else {"rtol": 1e-9, "atol": 1e-12}
    )
    for (k, a, b), i, j in zip(PAIRS, *at, strict=True):
        one, other = np.sqrt(a) * u, k / np.sqrt(a) * u + np.sqrt(b - k**2 / a) * v
        product = (weight * fn(one) * fn(other)).sum()
        close(kernel[i, j] / 2, product, **tolerance)
        slopes = (weight * slope(one) * slope(other)).sum()
        # of a function that jumps
        loose = {"rtol": 5e-3, "atol": 5e-3} if "relu" in name else tolerance
        close((tangent - kernel)[i, j] / (2 * k), slopes, **loose)
        # with E f and E f^2 of both
        means = [(weight * fn(units)).sum() for units in (one, other)]
        squares = [(weight * fn(units) ** 2).sum() for units in (one, other)]
        sds = np.sqrt(np.array(squares) - np.square(means))
        expected = (product - means[0] * means[1]) / (sds[0] * sds[1])
        close(nngp(norm, x, **options)[i, j] / 2, expected, **tolerance)


# -- networks drawn from the prior -----------------------------------------------------


@slow
@pytest.mark.parametrize("name", NETWORKS)
def test_drawn_networks_have_these_kernels_in_the_limit(name, x64):
    """Covariances E f f' and tangent kernels of 150 networks of widths 32 and 128: 4/3
    and -1/3 have no error of order 1 / width; six standard errors.
    """
    x, found = data(name, 3), []
    for width in (32, 128):
        net = NETWORKS[name](width)
        shapes = net.param_shapes(x.shape[1:])
        keys = dict(
            zip(
                shapes,
                jax.random.split(jax.random.key(width), len(shapes)),
                strict=True,
            )
        )
        draws = {
            n: np.asarray(PRIOR(n, s).expand(s).sample(keys[n], (150,)))
            for n, s in shapes.items()
        }
        f = jax.jit(
            jax.vmap(lambda params, net=net: net.apply(params, jnp.asarray(x)))
        )(draws)
        tangents = [
            empirical_ntk(net, {n: v[i] for n, v in draws.items()}, x, prior=PRIOR)
            for i in range(150)
        ]
        both = np.stack([np.einsum("snk,smk->snm", f, f) / OUTPUTS, tangents], 1)
        found.append((both.mean(0), both.std(0) / 150**0.5))
    (one, error), (other, second) = found
    kernels = np.stack(
        [kernel(NETWORKS[name](1), x, prior=PRIOR) for kernel in (nngp, ntk)]
    )
    allowed = 6 * np.hypot(error, 4 * second) / 3
    assert (np.abs((4 * other - one) / 3 - kernels) < allowed).all()
    # so that it can fail
    assert (allowed.max((1, 2)) < 0.4 * kernels.max((1, 2))).all()


# -- priors ----------------------------------------------------------------------------

SMALL = nn.MLP([8, 1], "erf")
SCALES = np.array([0.1, 1.0, 3.0])
UNITS = np.linspace(0.1, 3.0, 8)
EQUAL = {
    "given scales": lambda: (
        {
            "prior": priors.Hierarchical(),
            "scales": {"Dense_0.kernel_scale": 0.7, "Dense_1.kernel_scale": 1.9},
        },
        {"prior": {"Dense_0.*": priors.Normal(0.7), "Dense_1.*": priors.Normal(1.9)}},
    ),
    # Of hidden weights only the mean square matters; without fan-in scaling the width
    # of the specification counts.
    "weights that are not normal": lambda: (
        {"prior": {"Dense_1.kernel": priors.ScaleMixture(0.5, 1.2, 0.3), "*": PRIOR}},
        {
            "prior": {
                "Dense_1.kernel": priors.Normal(
                    (8 * (0.5 * 1.2**2 + 0.5 * 0.3**2)) ** 0.5
                ),
                "*": PRIOR,
            }
        },
    ),
}


@pytest.mark.parametrize("name", EQUAL)
def test_priors_of_the_same_variances_have_the_same_kernel(name, x64):
    found, expected = (nngp(SMALL, data(), **options) for options in EQUAL[name]())
    close(found, expected, rtol=1e-6)


def test_scales_by_input_multiply_the_inputs(x64):
    """... and inside a model the kernel adds no site."""
    prior = priors.BySite({"Dense_0.kernel": priors.ARD()}, default=priors.Normal())
    with handlers.seed(rng_seed=1), handlers.trace() as trace:
        found = nngp(
            SMALL, data(), prior=prior, scales={"Dense_0.kernel_scale": SCALES}
        )
    close(found, nngp(SMALL, data() * SCALES), rtol=1e-12)
    assert not trace


# -- errors ----------------------------------------------------------------------------

NORMS = nn.MLP([8, 1], "relu", nn.BatchNorm())
TWICE = nn.Sequential([nn.Dense(8), "relu", "tanh", nn.Dense(1)])
UNWEIGHTED = nn.Sequential(
    [nn.Dense(8), nn.Residual(nn.Activation("relu")), nn.Dense(1)]
)
REFUSED = [
    (
        SMALL,
        {"prior": priors.Hierarchical()},
        r"scales=\{'Dense_0.kernel_scale': 1.0\}",
    ),
    (SMALL, {"prior": priors.Normal(), "scales": {"a": 1.0}}, "no hyper-sites"),
    (SMALL, {"prior": priors.Laplace()}, "'Dense_0.kernel' that are not normal"),
    (SMALL, {"prior": priors.StudentT(df=2.0)}, "infinite variance"),
    (SMALL, {"x1": np.full((2, 3), np.nan)}, "NaN"),
    (SMALL, {"x2": np.zeros((2, 2))}, "x2"),
    (NORMS, {}, "BatchNorm_0'.*LayerNorm"),
    (nn.Sequential([nn.Dense(8), "relu"]), {}, "End it with `nn.Dense`"),
    (TWICE, {}, "needs normal inputs.*without activation"),
    (nn.Sequential([nn.LayerNorm(), nn.Dense(1)]), {}, "use_scale=False"),
    (nn.Sequential([nn.Residual(nn.Dense(3)), nn.Dense(1)]), {}, "before the block"),
    (UNWEIGHTED, {}, "needs weights"),
    (nn.CNN([4], [1]), {"x1": np.zeros((2, 4, 4, 1))}, "Layers with a limit: Dense"),
    (nn.MaxPool(2), {"x1": np.zeros((2, 4, 4, 1))}, "outputs of shape"),
]
# Made in the test: they put arrays on a device.
MADE = [
    (lambda: dist.Normal(1.0, 1.0), "mean other than 0"),
    (lambda: {"Dense_0.kernel": dist.Normal(0, UNITS), "*": PRIOR}, "alike"),
]


@pytest.mark.parametrize(("net", "options", "message"), REFUSED)
def test_networks_without_a_kernel_are_refused_with_the_way_out(net, options, message):
    with pytest.raises(ValueError, match=message):
        nngp(net, **{"x1": data(), **options})


@pytest.mark.parametrize(("make", "message"), MADE)
def test_priors_without_a_kernel_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        nngp(SMALL, data(), prior=make())
