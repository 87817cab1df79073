"""Modules of Flax Linen, Flax NNX and Equinox under our priors and kernels, fixed, centered, learned or random."""

from functools import cache, partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from flax import linen, nnx
from helpers import group, run_chains, traced_sites
from numpyro import handlers
from numpyro.contrib.module import random_eqx_module, random_flax_module, random_nnx_module
from numpyro.infer import NUTS
from numpyro.infer.util import log_density

from numpyro_bnn import infer, priors, to_inference_data

pytestmark = pytest.mark.core

IMAGES = np.random.default_rng(0).normal(size=(6, 6, 5, 2)).astype(np.float32)
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


NAMES = {  # library -> names of the dense kernel, the kernel, bias of the convolution, and the gain
    "linen": ("Dense_0.kernel", "Conv_0.kernel", "Conv_0.bias", "LayerNorm_0.scale"),
    "nnx": ("linear.kernel", "conv.kernel", "conv.bias", "norm.scale"),
    "equinox": ("linear.weight", "conv.weight", "conv.bias", "norm.weight"),
}


@cache
def module(library):
    """How to make it random, its parameters in all forms that priors take, and its function of the images."""
    if library == "linen":
        variables = Linen().init(jax.random.key(0), IMAGES)
        make = partial(random_flax_module, "net", Linen(), input_shape=(1, 6, 5, 2))
        return make, [variables, variables["params"]], Linen().apply(variables, IMAGES)
    if library == "nnx":
        net = Nnx(nnx.Rngs(0))
        return partial(random_nnx_module, "net", net), [net, nnx.state(net)], net(IMAGES)
    net = Equinox(jax.random.key(0))
    return lambda prior: jax.vmap(random_eqx_module("net", net, prior)), [net], jax.vmap(net)(IMAGES)


def classifier(library, prior):
    make = module(library)[0]

    def run(x, y=None):
        logits = make(prior=prior)(x)
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Categorical(logits=logits), obs=y)

    return run


def base_of(fn):
    while isinstance(fn, dist.Independent | dist.ExpandedDistribution):
        fn = fn.base_dist
    return fn


@pytest.mark.parametrize("library", NAMES)
def test_modules_tell_fan_in_and_roles(library):
    """One fan-in per layout: 3 * 3 * 2 for the convolution, 120 for the dense layer; gains are around 1."""
    sites = traced_sites(priors.noncenter(classifier(library, priors.Normal(bias_scale=0.3))), IMAGES, LABELS)
    sampled = {name: base_of(s["fn"]) for name, s in sites.items() if s["type"] == "sample" and name != "y"}
    expected = [(0.0, 120**-0.5), (0.0, 18**-0.5), (0.0, 0.3), (1.0, 0.5)]
    assert [(sampled[f"net/{name}"].loc, sampled[f"net/{name}"].scale) for name in NAMES[library]] == expected
    assert len(sampled) == 6


@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_attention_kernels_keep_the_variance_of_their_inputs(library):
    """Queries, keys and values have 6 inputs, outputs those of 4 heads of 3 features."""
    sizes = {"num_heads": 4, "qkv_features": 12, "out_features": 5}

    def run():
        if library == "linen":
            layer = linen.MultiHeadDotProductAttention(**sizes)
            random_flax_module("net", layer, priors.Normal(), input_shape=(2, 7, 6))
        else:
            layer = nnx.MultiHeadAttention(in_features=6, decode=False, rngs=nnx.Rngs(0), **sizes)
            random_nnx_module("net", layer, priors.Normal())

    sites = traced_sites(run)
    for name, inputs in {"query": 6, "key": 6, "value": 6, "out": 12}.items():
        assert base_of(sites[f"net/{name}.kernel"]["fn"]).scale == inputs**-0.5, name


LEARNED_SCALES = {  # library -> prior, and the shapes of its hyper-sites of the convolution
    "linen": (lambda: priors.Hierarchical(), {"scale": ()}),
    "nnx": (lambda: priors.Horseshoe(unit="output"), {"global": (), "local": (4,)}),
    "equinox": (lambda: priors.ARD(), {"scale": (2,)}),
}


@pytest.mark.parametrize("library", NAMES)
def test_modules_with_learned_scales(library):
    """Sites as documented, named once, non-centered; and a finite log density and gradient."""
    make, hyper = LEARNED_SCALES[library]
    model, kernel = priors.noncenter(classifier(library, make())), f"net/{NAMES[library][1]}"
    traced = {name: s for name, s in traced_sites(model, IMAGES, LABELS).items() if name.startswith("net/")}
    sites = {name: (site["type"], site["value"].shape) for name, site in traced.items()}
    assert {suffix: sites[f"{kernel}_{suffix}"] for suffix in hyper} == {n: ("sample", s) for n, s in hyper.items()}
    assert sites[kernel][0] == "deterministic"
    assert sites[f"{kernel}_base"] == ("sample", sites[kernel][1])
    values = {name: np.full(shape, 0.5, np.float32) for name, (kind, shape) in sites.items() if kind == "sample"}
    density, slopes = jax.jit(jax.value_and_grad(lambda at: log_density(model, (IMAGES, LABELS), {}, at)[0]))(values)
    assert np.isfinite(density)
    assert all(np.isfinite(slope).all() and np.any(slope != 0) for slope in slopes.values())


@pytest.mark.parametrize("kind", [priors.Fixed, priors.Learned, priors.Centered])
@pytest.mark.parametrize("library", NAMES)
def test_modules_at_given_parameters(library, kind):
    """The function is that of the module; fixed weights are no sites, learned ones are parameters."""
    _, forms, expected = module(library)
    for params in forms:
        options = {"scale": 1e-7, "bias_scale": 1e-7, "gain_scale": 1e-7} if kind is priors.Centered else {}
        model = priors.noncenter(classifier(library, kind(params, **options)))
        found = jax.jit(
            lambda model=model: handlers.trace(handlers.seed(model, 0)).get_trace(IMAGES)["y"]["fn"].logits
        )()
        np.testing.assert_allclose(found, expected, atol=1e-4)
        sites = traced_sites(model, IMAGES, LABELS)
        kinds = [site["type"] for name, site in sites.items() if name.startswith("net/")]
        assert kinds == {priors.Fixed: [], priors.Learned: ["param"] * 6, priors.Centered: ["sample"] * 6}[kind]


@pytest.mark.parametrize("kernel", [NUTS, infer.MCLMC])
def test_modules_that_are_not_wrapped_are_refused(kernel):
    model = classifier("linen", priors.BySite({"Conv_0.*": priors.Fixed(module("linen")[1][0])}, priors.Normal()))
    with pytest.raises(ValueError, match=r"priors\.Fixed.*Wrap the model once, `NUTS\(priors\.noncenter\(model\)\)`"):
        run_chains(kernel(model), IMAGES, LABELS)


@pytest.mark.slow
@pytest.mark.parametrize("library", NAMES)
def test_kernels_sample_what_is_random_and_learn_what_is_learned(library):
    """Predictions are those of the module with the drawn, the learned and the fixed weights."""
    (dense, conv, bias, gain), given = NAMES[library], module(library)[1][0]
    smooth = priors.Hierarchical() if library == "equinox" else priors.GPFilters()
    patterns = {conv: smooth, bias: priors.Learned(given), gain: priors.Fixed(given)}
    model = priors.noncenter(classifier(library, priors.BySite(patterns, default=priors.Normal())))
    kernel = infer.MCLMC(model, steps_per_draw=3)
    mcmc = run_chains(kernel, IMAGES, LABELS, num_warmup=8)
    draw = {name: value[0] for name, value in mcmc.get_samples().items()}
    assert {f"net/{dense}", f"net/{conv}_base"} <= set(draw)
    assert not {f"net/{bias}", f"net/{gain}"} & set(draw)
    ways = (model, kernel.model)
    start, learned = (handlers.trace(handlers.seed(way, 0)).get_trace(IMAGES)[f"net/{bias}"]["value"] for way in ways)
    assert np.all(learned != start)
    idata = to_inference_data(mcmc, {"x": IMAGES[:2]}, log_likelihood=False, posterior_predictive=False)
    held = handlers.substitute(kernel.model, draw)
    expected = handlers.trace(handlers.seed(held, 0)).get_trace(IMAGES[:2])["y"]["fn"].probs
    np.testing.assert_allclose(group(idata, "predictions")["y_probs"].to_numpy()[0, 0], expected, rtol=1e-4)
