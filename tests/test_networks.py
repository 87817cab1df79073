"""Networks as sample sites: under every handler, in NumPyro's own module functions, and in the wide limit."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats
from flax import linen, nnx
from numpyro import handlers
from numpyro.contrib.module import random_eqx_module, random_flax_module, random_nnx_module
from numpyro.infer import HMC, MCMC, NUTS, Predictive
from numpyro.infer.util import log_density

from numpyro_bnn import nn, priors, random_network
from numpyro_bnn.networks import RandomNetwork, record_statistics, use_statistics

N, D = 12, 3
DATA = np.random.default_rng(0)
X = DATA.normal(size=(N, D)).astype(np.float32)
Y = DATA.normal(size=N).astype(np.float32)
NET = nn.MLP([4, 1], "tanh")


def model(x, y=None, prior=None, net=NET):
    network = random_network("net", net, x.shape[1:], prior)
    numpyro.deterministic("f", network(x)[..., 0])
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(network(x)[..., 0], 0.1), obs=y)


def trace_of(fn, *args, seed=0, **kwargs):
    return handlers.trace(handlers.seed(fn, seed)).get_trace(*args, **kwargs)


def latent(trace):
    return {n: s["value"] for n, s in trace.items() if s["type"] == "sample" and not s["is_observed"]}


# -- sites ----------------------------------------------------------------------------------------------


def test_sites_lie_outside_every_plate():
    trace = trace_of(model, X, Y, priors.Hierarchical())
    sites = {name: site for name, site in trace.items() if name.startswith("net/")}
    assert list(sites) == [
        *["net/Dense_0.kernel_scale", "net/Dense_0.kernel_base", "net/Dense_0.kernel", "net/Dense_0.bias"],
        *["net/Dense_1.kernel_scale", "net/Dense_1.kernel_base", "net/Dense_1.kernel", "net/Dense_1.bias"],
    ]
    for site in sites.values():
        assert not site.get("cond_indep_stack")
        if site["type"] == "sample":
            assert site["fn"].batch_shape == ()
    assert [frame.name for frame in trace["y"]["cond_indep_stack"]] == ["data"]


def by_hand(x, y):
    """The same model without this package."""
    w0 = numpyro.sample("w0", dist.Normal(0.0, 3**-0.5).expand((3, 4)).to_event(2))
    b0 = numpyro.sample("b0", dist.Normal(0.0, 1.0).expand((4,)).to_event(1))
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    z1 = numpyro.sample("z1", dist.Normal(0.0, 1.0).expand((4, 1)).to_event(2))
    b1 = numpyro.sample("b1", dist.Normal(0.0, 1.0).expand((1,)).to_event(1))
    f = jnp.tanh(x @ w0 + b0) @ (s / 2 * z1) + b1
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(f[:, 0], 0.1), obs=y)


NAMES = {
    "net/Dense_0.kernel": "w0",
    "net/Dense_0.bias": "b0",
    "net/Dense_1.kernel_scale": "s",
    "net/Dense_1.kernel_base": "z1",
    "net/Dense_1.bias": "b1",
}


def test_log_density_is_that_of_the_model_written_by_hand(x64):
    prior = priors.BySite({"Dense_1.kernel": priors.Hierarchical()}, default=priors.Normal())
    values = latent(trace_of(model, X, Y, prior))
    assert set(values) == set(NAMES)

    @jax.jit
    def both(values):
        renamed = {NAMES[name]: value for name, value in values.items()}
        ours = jax.value_and_grad(lambda v: log_density(model, (X, Y, prior), {}, v)[0])(values)
        return ours, jax.value_and_grad(lambda v: log_density(by_hand, (X, Y), {}, v)[0])(renamed)

    (ours, our_gradient), (hand, gradient) = both(values)
    np.testing.assert_allclose(ours, hand, rtol=1e-12)
    for name, other in NAMES.items():
        np.testing.assert_allclose(our_gradient[name], gradient[other], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("prior", "check"),
    [
        (None, lambda fn: fn.scale == 3**-0.5),
        (dist.Normal(0.0, 2.0), lambda fn: fn.scale == 2.0),
        (lambda name, shape: dist.Laplace(0.0, 3.0), lambda fn: fn.scale == 3.0),
        ({"Dense_0.kernel": dist.Cauchy(0.0, 4.0), "*": priors.Normal()}, lambda fn: fn.scale == 4.0),
        ({"Dense_0.kernel": dist.Normal(jnp.zeros((3, 1)), 5.0), "*": dist.Normal()}, lambda fn: fn.scale[0] == 5),
    ],
    ids=["default", "distribution", "function", "dictionary", "part of the shape"],
)
def test_kinds_of_prior(prior, check):
    fn = trace_of(model, X, Y, prior)["net/Dense_0.kernel"]["fn"]
    assert fn.event_shape == (3, 4)
    while isinstance(fn, dist.Independent | dist.ExpandedDistribution):
        fn = fn.base_dist
    assert bool(jnp.all(check(fn)))


def test_distribution_with_the_parameters_own_event_shape():
    prior = {"Dense_0.bias": dist.MultivariateNormal(jnp.zeros(4), jnp.eye(4)), "*": priors.Normal()}
    assert trace_of(model, X, Y, prior)["net/Dense_0.bias"]["value"].shape == (4,)


# -- under handlers and transformations -----------------------------------------------------------------


def test_scope_seed_trace_substitute_and_condition():
    prior = priors.Hierarchical()
    scoped = trace_of(handlers.scope(model, prefix="a", divider="."), X, Y, prior)
    assert {f"a.{name}" for name in trace_of(model, X, Y, prior)} == set(scoped)

    ones = {name: jnp.ones_like(value) for name, value in latent(trace_of(model, X, Y, prior)).items()}
    for handler in (handlers.substitute, handlers.condition):
        trace = trace_of(handler(model, ones), X, None, prior)
        expected = 0.5 * jnp.tanh(X.sum(1, keepdims=True) / 3**0.5 + 1) @ jnp.ones((1, 1)) * 4 + 1
        np.testing.assert_allclose(trace["f"]["value"], expected[:, 0], rtol=1e-5)
        assert trace["net/Dense_0.kernel_base"]["is_observed"] == (handler is handlers.condition)
    blocked = trace_of(handlers.block(model, expose=["y"]), X, Y, prior)
    assert list(blocked) == ["y"]


def test_jit_and_vmap_give_the_same_draws():
    def draw(key):
        return trace_of(model, X, None, priors.Horseshoe(), seed=key)["f"]["value"]

    keys = jax.random.split(jax.random.key(0), 3)
    many = jax.jit(jax.vmap(draw))(keys)
    np.testing.assert_allclose(many[1], jax.jit(draw)(keys[1]), rtol=1e-4, atol=1e-5)
    assert len(np.unique(many[:, 0])) == 3


@pytest.mark.parametrize("key", [jax.random.key, jax.random.PRNGKey], ids=["typed", "legacy"])
def test_predictive(key):
    prior = priors.Hierarchical()
    drawn = Predictive(model, num_samples=5)(key(0), X, None, prior)
    assert drawn["net/Dense_0.kernel"].shape == (5, 3, 4)
    assert drawn["y"].shape == (5, N)
    # Given those draws, base and deterministic sites together, the function is the same again.
    posterior = {name: value for name, value in drawn.items() if name not in ("f", "y")}
    again = Predictive(model, posterior, return_sites=["f"])(key(1), X[:4], None, prior)
    np.testing.assert_allclose(again["f"], drawn["f"][:, :4], rtol=1e-5, atol=1e-5)


def test_float64(x64):
    trace = trace_of(model, X.astype(np.float64), Y.astype(np.float64), priors.RegularizedHorseshoe())
    assert {site["value"].dtype for site in trace.values() if site["type"] != "plate"} == {jnp.dtype("float64")}


def test_two_networks_in_one_model():
    def two(x):
        mean, sd = (random_network(name, NET, x.shape[1:]) for name in ("mean", "sd"))
        return mean(x), sd(x)

    trace = trace_of(two, X)
    assert {name.split("/")[0] for name in trace} == {"mean", "sd"}
    assert not np.allclose(trace["mean/Dense_0.kernel"]["value"], trace["sd/Dense_0.kernel"]["value"])


# -- batch statistics -----------------------------------------------------------------------------------

NORMED = nn.MLP([4, 4, 1], "tanh", norm=nn.BatchNorm())
X_NEW = DATA.normal(size=(5, D)).astype(np.float32) + 1


def predict(x):
    network = random_network("net", NORMED, x.shape[1:], priors.Normal())
    return network(x) + network(2 * x)  # two calls


def test_recorded_statistics_are_used_in_order():
    @jax.jit
    def run(key):
        seeded = handlers.seed(predict, key)
        with record_statistics() as training:
            on_data = seeded(X)
        network = handlers.seed(random_network, key)("net", NORMED, (D,), priors.Normal())
        given = network.statistics(X), network.statistics(2 * X)
        expected = network(X_NEW, given[0]) + network(2 * X_NEW, given[1])
        with use_statistics(training.calls):
            found = seeded(X_NEW)
        with use_statistics(training.calls):
            alone = seeded(X_NEW[:1])
        return found, expected, alone, on_data, seeded(X)

    found, expected, alone, on_data, plain = run(jax.random.key(0))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(alone, found[:1], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(on_data, plain, rtol=1e-5, atol=1e-5)


def test_statistics_pass_blocks_and_scopes_and_repeated_runs():
    inside = handlers.block(handlers.scope(handlers.seed(predict, 0), prefix="a"))
    with record_statistics() as training:
        inside(X)
    assert len(training.calls) == 2
    replay = use_statistics(training.calls)
    for _ in range(2):  # as when a model is traced once for shapes and once for values
        with replay:
            first = inside(X_NEW)
    assert first.shape == (5, 1)
    with training:
        inside(X_NEW)
    assert len(training.calls) == 2


def test_one_call_too_many():
    network = RandomNetwork("net", nn.BatchNorm(False, False), {})
    with use_statistics([]), pytest.raises(ValueError, match=r"0 recorded calls .* equally often"):
        network(X)


# -- NumPyro's own modules ------------------------------------------------------------------------------

IMAGES = DATA.normal(size=(6, 6, 5, 2)).astype(np.float32)
LABELS = np.arange(6) % 3


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.tanh(linen.Conv(4, (3, 3))(x))
        return linen.Dense(3)(linen.LayerNorm()(x.reshape((x.shape[0], -1))))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(2, 4, (3, 3), rngs=rngs)
        self.norm = nnx.LayerNorm(120, rngs=rngs)
        self.linear = nnx.Linear(120, 3, rngs=rngs)

    def __call__(self, x):
        return self.linear(self.norm(jnp.tanh(self.conv(x)).reshape((x.shape[0], -1))))


class Equinox(eqx.Module):
    conv: eqx.nn.Conv2d
    norm: eqx.nn.LayerNorm
    linear: eqx.nn.Linear

    def __init__(self, key):
        self.conv = eqx.nn.Conv2d(2, 4, 3, padding=1, key=key)
        self.norm = eqx.nn.LayerNorm(120)
        self.linear = eqx.nn.Linear(120, 3, key=key)

    def __call__(self, x):
        x = jnp.tanh(self.conv(jnp.moveaxis(x, -1, 0)))
        return self.linear(self.norm(x.reshape(-1)))


NNX_MODULE = Nnx(nnx.Rngs(0))
EQUINOX_MODULE = Equinox(jax.random.key(0))
MODULES = {
    "flax": (
        lambda prior: random_flax_module("net", Linen(), prior, input_shape=(1, 6, 5, 2)),
        {"kernel": "Dense_0.kernel", "conv": "Conv_0.kernel", "bias": "Conv_0.bias", "gain": "LayerNorm_0.scale"},
    ),
    "nnx": (
        lambda prior: random_nnx_module("net", NNX_MODULE, prior),
        {"kernel": "linear.kernel", "conv": "conv.kernel", "bias": "conv.bias", "gain": "norm.scale"},
    ),
    "equinox": (
        lambda prior: jax.vmap(random_eqx_module("net", EQUINOX_MODULE, prior)),
        {"kernel": "linear.weight", "conv": "conv.weight", "bias": "conv.bias", "gain": "norm.weight"},
    ),
}


def classifier(make, prior):
    @priors.noncenter
    def run(x, y=None):
        logits = make(prior)(x)
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Categorical(logits=logits), obs=y)

    return run


@pytest.mark.parametrize(("make", "names"), MODULES.values(), ids=MODULES)
def test_modules_read_fan_in_and_roles(make, names):
    """One fan-in per layout: 3 * 3 * 2 for the convolution, 120 for the dense layer; gains are around 1."""
    found = {}

    def run():
        for name, site in trace_of(classifier(make, priors.Normal(bias_scale=0.3)), IMAGES, LABELS).items():
            fn = site["fn"]
            while isinstance(fn, dist.Independent | dist.ExpandedDistribution):
                fn = fn.base_dist
            if name.startswith("net/") and site["type"] == "sample":
                found[name] = (fn.loc, fn.scale)

    jax.eval_shape(run)
    assert found[f"net/{names['kernel']}"] == (0.0, 120**-0.5)
    assert found[f"net/{names['conv']}"] == (0.0, 18**-0.5)
    assert found[f"net/{names['bias']}"] == (0.0, 0.3)
    assert found[f"net/{names['gain']}"] == (1.0, 0.5)
    assert len(found) == 6


@pytest.mark.parametrize("make", ["flax", "nnx"])
def test_attention_kernels_keep_the_variance_of_their_inputs(make):
    """Inputs of mean square 1 and weights N(0, 1 / fan_in) give queries, keys, values and outputs of variance 1.

    Over 24,000 independent values or 10,000 of the output, five standard errors are 5 sqrt(2 / n) or less than 0.071.
    """
    sizes = {"num_heads": 4, "qkv_features": 12, "out_features": 5}
    if make == "flax":
        layer = linen.MultiHeadDotProductAttention(**sizes)
        run = lambda: random_flax_module("net", layer, priors.Normal(), input_shape=(2, 7, 6))  # noqa: E731
    else:
        layer = nnx.MultiHeadAttention(in_features=6, decode=False, rngs=nnx.Rngs(0), **sizes)
        run = lambda: random_nnx_module("net", layer, priors.Normal())  # noqa: E731
    sites = trace_of(run)
    for name, inputs in {"query": (6,), "key": (6,), "value": (6,), "out": (4, 3)}.items():
        fn = sites[f"net/{name}.kernel"]["fn"]
        kernels = fn.sample(jax.random.key(1), (2000,))
        x = np.random.default_rng(0).choice([-1.0, 1.0], size=inputs)
        outputs = np.tensordot(kernels, x, (tuple(range(1, 1 + x.ndim)), tuple(range(x.ndim))))
        assert abs(np.mean(outputs**2) - 1) < 5 * (2 / outputs.size) ** 0.5, name


MODULE_PRIORS = {
    "Hierarchical": (priors.Hierarchical(), {"scale": ()}),
    "ARD": (priors.ARD(), {"scale": (2,)}),
    "GammaPrecision": (priors.GammaPrecision(), {"precision": ()}),
    "Horseshoe": (priors.Horseshoe(unit="output"), {"global": (), "local": (4,)}),
}


# Every prior and every kind of module once; the other pairs are slow.
PAIRS = {("flax", "Hierarchical"), ("nnx", "GammaPrecision"), ("equinox", "ARD"), ("equinox", "Horseshoe")}
MODULES_WITH_PRIORS = [
    pytest.param(*module, *prior, id=f"{one}-{other}", marks=[] if (one, other) in PAIRS else pytest.mark.slow)
    for one, module in MODULES.items()
    for other, prior in MODULE_PRIORS.items()
]


@pytest.mark.parametrize(("make", "names", "prior", "hyper"), MODULES_WITH_PRIORS)
def test_modules_with_hyper_sites(make, names, prior, hyper):
    """Sites as documented, named once, non-centered; and a finite log density and gradient."""
    run = classifier(make, prior)
    sites = {}

    def record():
        trace = trace_of(run, IMAGES, LABELS)
        sites.update({n: (s["type"], s["value"].shape) for n, s in trace.items() if n.startswith("net/")})

    jax.eval_shape(record)
    conv = f"net/{names['conv']}"
    for suffix, shape in hyper.items():
        assert sites[f"{conv}_{suffix}"] == ("sample", shape)
    assert sites[conv][0] == "deterministic"
    assert sites[f"{conv}_base"] == ("sample", sites[conv][1])

    values = {name: np.full(shape, 0.5, np.float32) for name, (kind, shape) in sites.items() if kind == "sample"}
    gradient = jax.jit(jax.value_and_grad(lambda v: log_density(run, (IMAGES, LABELS), {}, v)[0]))
    density, slopes = gradient(values)
    assert np.isfinite(density)
    assert set(slopes) == set(values)
    assert all(np.isfinite(slope).all() and np.any(slope != 0) for slope in slopes.values())


@pytest.mark.slow
@pytest.mark.parametrize("make", [pytest.param(row[0], id=name) for name, row in MODULES.items()])
def test_hmc_runs_on_modules(make):
    gp = priors.BySite(
        {"*conv*.kernel": priors.GPFilters(), "Conv*.kernel": priors.GPFilters()}, priors.Hierarchical()
    )
    kernel = HMC(classifier(make, gp), num_steps=2, trajectory_length=None)  # compiles faster than NUTS
    mcmc = MCMC(kernel, num_warmup=5, num_samples=5, progress_bar=False)
    mcmc.run(jax.random.key(0), IMAGES, LABELS)
    samples = mcmc.get_samples()
    assert all(np.isfinite(value).all() for value in samples.values())
    assert any(len(np.unique(v.reshape(5, -1)[:, 0])) > 1 for n, v in samples.items() if n.endswith("_base"))


def test_nuts_runs_on_ours():
    mcmc = MCMC(NUTS(model, max_tree_depth=4), num_warmup=20, num_samples=5, progress_bar=False)
    mcmc.run(jax.random.key(0), X, Y, priors.Hierarchical())
    samples = mcmc.get_samples()
    assert samples["net/Dense_0.kernel"].shape == (5, 3, 4)
    product = samples["net/Dense_0.kernel_base"] * samples["net/Dense_0.kernel_scale"][:, None, None] / 3**0.5
    np.testing.assert_allclose(samples["net/Dense_0.kernel"], product, rtol=1e-5)


# -- the wide limit -------------------------------------------------------------------------------------

INPUTS = np.array([[1.0, 0.0, 0.0], [0.6, 0.8, 0.0], [-1.0, 0.5, 2.0], [0.1, -0.2, 0.05]])
SD, BIAS = 1.5, 0.5


def relu_moment(s):
    """E[relu(g) relu(g')] for g ~ N(0, s): the arc-cosine kernel of degree 1 (Cho & Saul 2009, equation 6)."""
    sd = np.sqrt(np.diag(s))
    angle = np.arccos(np.clip(s / np.outer(sd, sd), -1, 1))
    return np.outer(sd, sd) * (np.sin(angle) + (np.pi - angle) * np.cos(angle)) / (2 * np.pi)


def erf_moment(s):
    """E[erf(g) erf(g')]: the arcsine kernel (Williams 1997, equation 11)."""
    size = np.sqrt(1 + 2 * np.diag(s))
    return 2 / np.pi * np.arcsin(2 * s / np.outer(size, size))


MOMENTS = {"relu": relu_moment, "erf": erf_moment}


def limit_kernel(activation, depth):
    """K <- bias^2 + sd^2 E[phi phi'], from K = bias^2 + sd^2 x x' / D."""
    kernel = BIAS**2 + SD**2 * INPUTS @ INPUTS.T / D
    for _ in range(depth):
        kernel = BIAS**2 + SD**2 * MOMENTS[activation](kernel)
    return kernel


def prior_functions(net, number):
    """Draws of the network at INPUTS from ``random_network``, (number, 4, K)."""

    def one(key):
        network = handlers.seed(random_network, key)("net", net, (D,), priors.Normal(SD, bias_scale=BIAS))
        return network(jnp.asarray(INPUTS, jnp.float32))

    keys = jax.random.split(jax.random.key(0), number)
    return np.asarray(jax.jit(lambda keys: jax.lax.map(one, keys))(keys), float)


@pytest.mark.slow
@pytest.mark.parametrize("activation", MOMENTS)
def test_wide_covariance_is_the_kernel_of_the_limit(activation):
    """One hidden layer of 2048: every entry within five standard errors at every number of draws.

    The outputs are nearly Gaussian, so an entry over S draws has standard error sqrt((K_ii K_jj + K_ij^2) / S),
    which halves from one number to the next; the kernel has one hidden layer, so its mean is exact at any width.
    """
    kernel = limit_kernel(activation, 1)
    f = prior_functions(nn.MLP([2048, 1], activation), 8192)[..., 0]
    variance = np.outer(np.diag(kernel), np.diag(kernel)) + kernel**2
    for number in (512, 2048, 8192):
        z = (f[:number].T @ f[:number] / number - kernel) / np.sqrt(variance / number)
        assert (np.abs(z) < 5).all(), number
        assert 0.1 < np.sqrt((z[np.triu_indices(4)] ** 2).mean()) < 3  # and the error is not overstated
    assert (np.abs(f.mean(0)) < 5 * np.sqrt(np.diag(kernel) / 8192)).all()


@pytest.mark.slow
def test_excess_kurtosis_falls_like_one_over_the_width():
    """Given the hidden layer f is normal with variance V; for ReLU E f^4 = 3 (E V)^2 (1 + Var V / (E V)^2).

    Var V = sd^4 (5/4) s^2 / H and E V = bias^2 + sd^2 s / 2, with s the variance of a hidden pre-activation.
    """
    s = BIAS**2 + SD**2 * (INPUTS[2] @ INPUTS[2]) / D
    mean = BIAS**2 + SD**2 * s / 2
    for width in (4, 32, 256):
        f = prior_functions(nn.MLP([width, 1], "relu"), 16384)[:, 2, 0]
        expected = 3 * (mean**2 + SD**4 * 1.25 * s**2 / width)
        error = (f**4).std() / len(f) ** 0.5
        assert abs((f**4).mean() - expected) < 5 * error, width
        if width == 4:  # so narrow, the Gaussian value is refused by the same test
            assert abs((f**4).mean() - 3 * mean**2) > 5 * error


@pytest.mark.slow
@pytest.mark.parametrize("activation", MOMENTS)
def test_width_sweep_of_a_deep_network(activation):
    """Two hidden layers: the covariance over K = 256 outputs of each network nears the limit as the width grows.

    Networks are independent, so the mean over S of them has a t-distributed error from their spread; that spread
    falls with the width until the finite number of outputs, sqrt(2 / K), is left.
    """
    outputs, number = 256, 24
    kernel = limit_kernel(activation, 2)
    spread = []
    for width in (16, 128, 2048):
        f = prior_functions(nn.MLP([width, width, outputs], activation), number)
        # Outputs share the last hidden layer but not their biases and weights: each is a draw given that layer.
        single = np.einsum("sik,sjk->sij", f, f) / outputs
        error = single.std(axis=0, ddof=1) / number**0.5
        spread.append((error / np.sqrt(np.outer(np.diag(kernel), np.diag(kernel)))).mean())
        if width == 2048:
            z = (single.mean(0) - kernel) / error
            assert (np.abs(z) < scipy.stats.t.isf(1e-6 / 2, number - 1)).all()
    assert spread[0] > 2 * spread[1] > 2 * spread[2]
    assert spread[2] < 2 * (2 / outputs / number) ** 0.5


# -- errors that teach ----------------------------------------------------------------------------------


def in_plate():
    with numpyro.plate("data", 3):
        random_network("net", NET, (D,))


MISTAKES = {
    "plate": (in_plate, ValueError, "argument `name` got 'net' inside plate 'data'. Call it before the plate"),
    "net": (lambda: random_network("net", Linen(), (D,)), TypeError, "use NumPyro's `random_flax_module`"),
    "name": (lambda: random_network(NET, NET, (D,)), TypeError, 'Pass a string, e.g. `"net"`'),
    "input_shape": (lambda: random_network("net", NET, D), TypeError, "`input_shape` got 3. Pass the shape"),
    "image": (
        lambda: random_network("net", NET, (6, 6, 1)),
        ValueError,
        "nn.Dense at 'Dense_0': argument `x` got input shape (6, 6, 1). It takes one axis of features",
    ),
    "prior name": (
        lambda: random_network("net", NET, (D,), "Horshoe"),
        TypeError,
        "random_network: argument `prior` got 'Horshoe'. Did you mean 'Horseshoe'",
    ),
    "prior class": (
        lambda: random_network("net", NET, (D,), priors.ARD),
        TypeError,
        "Pass an object, `priors.ARD()`",
    ),
    "pattern": (
        lambda: random_network("net", NET, (D,), {"Dense0.kernel": priors.ARD(), "*": priors.Normal()}),
        ValueError,
        "priors.BySite: argument `patterns` got 'Dense0.kernel'. Did you mean 'Dense_0.kernel'",
    ),
    "missing": (
        lambda: random_network("net", NET, (D,), {"*.kernel": priors.ARD()}),
        ValueError,
        "no pattern for parameter 'Dense_0.bias' (patterns: *.kernel)",
    ),
    "not a distribution": (
        lambda: random_network("net", NET, (D,), lambda name, shape: 1.0),
        TypeError,
        "got 1.0 for parameter 'Dense_0.kernel'. A prior is a callable",
    ),
    "shape": (
        lambda: random_network("net", NET, (D,), dist.Normal(jnp.zeros(5), 1.0)),
        ValueError,
        "a Normal of shape (5,) for parameter 'Dense_0.kernel'. The parameter has shape (3, 4)",
    ),
    "event shape": (
        lambda: random_network("net", NET, (D,), dist.MultivariateNormal(jnp.zeros(1), jnp.eye(1))),
        ValueError,
        "a MultivariateNormal of shape (1,)",
    ),
    "x": (
        lambda: random_network("net", NET, (D,))(X[:, :2]),
        ValueError,
        "nn.Dense at 'Dense_0': argument `x` got input shape (12, 2). It takes (..., 3)",
    ),
}


@pytest.mark.parametrize(("call", "kind", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(call, kind, message):
    with pytest.raises(kind) as error, handlers.seed(rng_seed=0):
        call()
    assert message in str(error.value)
