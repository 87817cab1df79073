"""Modules of Flax Linen, Flax NNX and Equinox under our priors and kernels."""

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
from numpyro.contrib.module import (
    random_eqx_module,
    random_flax_module,
    random_nnx_module,
)
from zoo import X, Y

from numpyro_bnn import infer, priors, symmetry, to_inference_data
from numpyro_bnn.estimators import Regressor, methods

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


# library -> names of the dense kernel, the kernel, bias of the convolution, and the
# gain
NAMES = {
    "linen": ("Dense_0.kernel", "Conv_0.kernel", "Conv_0.bias", "LayerNorm_0.scale"),
    "nnx": ("linear.kernel", "conv.kernel", "conv.bias", "norm.scale"),
    "equinox": ("linear.weight", "conv.weight", "conv.bias", "norm.weight"),
}


@cache
def module(library):
    """How to make it random, its parameters in all forms, and its function."""
    if library == "linen":
        variables = Linen().init(jax.random.key(0), IMAGES)
        make = partial(random_flax_module, "net", Linen(), input_shape=(1, 6, 5, 2))
        return make, [variables, variables["params"]], Linen().apply(variables, IMAGES)
    if library == "nnx":
        net = Nnx(nnx.Rngs(0))
        return (
            partial(random_nnx_module, "net", net),
            [net, nnx.state(net)],
            net(IMAGES),
        )
    net = Equinox(jax.random.key(0))
    return (
        lambda prior: jax.vmap(random_eqx_module("net", net, prior)),
        [net],
        jax.vmap(net)(IMAGES),
    )


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


ATTENTION = {"query.kernel": 6, "key.kernel": 6, "value.kernel": 6, "out.kernel": 12}
HEADS = {"num_heads": 4, "qkv_features": 12, "out_features": 5}
NNX_HEADS = {"decode": False, "normalize_qk": True}
SUM = "nta,hab->nthb"  # sums over a
IMAGE, LINE, SEQUENCE = (1, 6, 6, 4), (1, 3), (1, 5, 3)
LAYER = (-2, -1)  # axes
NORM = {"scale": "gain", "bias": "bias"}


def of_nnx(kind, *args, **options):
    return lambda: kind(*args, **options, rngs=nnx.Rngs(0))


def of_equinox(kind, *args, **options):
    return lambda: kind(*args, **options, key=jax.random.key(0))


def in_parallel(of_key, split):
    return lambda: split(of_key)(jax.random.split(jax.random.key(0), 6))


# Of each way to find the layout of a weight a layer: how to make it (of Linen with the
# shape of its input), and the fan-in of its weights: the number of inputs that a unit
# sums over, by hand. Gains are "gain": N(1, .5^2).
NNX_LAYERS = {
    "Linear": (of_nnx(nnx.Linear, 3, 5), {"kernel": 3, "bias": "bias"}),
    "LinearGeneral": (
        of_nnx(nnx.LinearGeneral, (2, 3), (4, 5), axis=LAYER, batch_axis={0: 7}),
        {"kernel": 6},
    ),
    "Einsum": (of_nnx(nnx.Einsum, SUM, (8, 2, 4), (8, 4)), {"kernel": 2}),
    "Conv": (of_nnx(nnx.Conv, 4, 8, (3, 3), feature_group_count=2), {"kernel": 18}),
    "ConvTranspose": (
        of_nnx(nnx.ConvTranspose, 4, 8, (3, 3), transpose_kernel=True),
        {"kernel": 36},
    ),
    "ConvTranspose, strides": (
        of_nnx(nnx.ConvTranspose, 4, 8, (2, 2), (2, 2)),
        {"kernel": 4},
    ),
    "Embed": (of_nnx(nnx.Embed, 10, 4), {"embedding": 1}),
    "RNN": (
        lambda: nnx.RNN(nnx.LSTMCell(3, 4, rngs=nnx.Rngs(0))),
        {"cell.hi.kernel": 4, "cell.ii.kernel": 3},
    ),
    "MultiHeadAttention": (
        of_nnx(nnx.MultiHeadAttention, in_features=6, **HEADS, **NNX_HEADS),
        {**ATTENTION, "query_ln.scale": "gain"},
    ),
    "LoRALinear": (
        of_nnx(nnx.LoRALinear, 3, 5, lora_rank=2),
        {"kernel": 3, "lora.lora_b": 2},
    ),
    "BatchNorm": (of_nnx(nnx.BatchNorm, 4), NORM),
    "PReLU": (nnx.PReLU, {"negative_slope": "bias"}),
    "in parallel": (
        in_parallel(lambda key: nnx.Linear(3, 5, rngs=nnx.Rngs(key)), nnx.vmap),
        {"kernel": 3},
    ),
}
LINEN_LAYERS = {
    "Dense": (linen.Dense(5), LINE, {"kernel": 3, "bias": "bias"}),
    "DenseGeneral": (
        linen.DenseGeneral((4, 5), axis=LAYER, batch_dims=(0,)),
        (7, 2, 3),
        {"kernel": 6},
    ),
    "Einsum": (linen.Einsum((8, 2, 4), SUM), (1, 3, 2), {"kernel": 2}),
    "Conv": (linen.Conv(8, (3, 3), feature_group_count=2), IMAGE, {"kernel": 18}),
    "ConvLocal": (linen.ConvLocal(8, (3, 3)), IMAGE, {"kernel": 36}),
    "ConvTranspose": (
        linen.ConvTranspose(8, (3, 3), transpose_kernel=True),
        IMAGE,
        {"kernel": 36},
    ),
    "Embed": (linen.Embed(10, 4), np.zeros(2, int), {"embedding": 1}),
    "GRUCell": (
        linen.RNN(linen.GRUCell(4)),
        SEQUENCE,
        {"cell.in.kernel": 3, "cell.hn.kernel": 4},
    ),
    "MultiHeadAttention": (linen.MultiHeadAttention(**HEADS), (1, 7, 6), ATTENTION),
    "LayerNorm": (linen.LayerNorm(), (1, 3, 4), NORM),
    "WeightNorm": (
        linen.WeightNorm(linen.Dense(5)),
        LINE,
        {"layer_instance.kernel": 3, "layer_instance/kernel/scale": "gain"},
    ),
    "in parallel": (
        linen.vmap(linen.Dense, {"params": 0}, split_rngs={"params": True})(5),
        (6, 2, 3),
        {"kernel": 3},
    ),
}
EQUINOX_LAYERS = {
    "Linear, scalar": (of_equinox(eqx.nn.Linear, "scalar", 5), {"weight": 1}),
    "Embedding": (of_equinox(eqx.nn.Embedding, 100, 16), {"weight": 1}),
    "Conv1d": (of_equinox(eqx.nn.Conv1d, 4, 8, 3), {"weight": 12}),
    "Conv2d": (
        of_equinox(eqx.nn.Conv2d, 4, 8, 3, groups=2),
        {"weight": 18, "bias": "bias"},
    ),
    "ConvTranspose1d": (
        of_equinox(eqx.nn.ConvTranspose1d, 4, 8, 3, groups=2),
        {"weight": 6},
    ),
    "ConvTranspose2d": (
        of_equinox(eqx.nn.ConvTranspose2d, 4, 8, 2, stride=2),
        {"weight": 4},
    ),
    "GRUCell": (
        of_equinox(eqx.nn.GRUCell, 3, 4),
        {"weight_ih": 3, "weight_hh": 4, "bias": "bias", "bias_n": "bias"},
    ),
    "LSTMCell": (of_equinox(eqx.nn.LSTMCell, 3, 4), {"weight_ih": 3, "weight_hh": 4}),
    "MultiheadAttention": (
        of_equinox(eqx.nn.MultiheadAttention, 4, 12, key_size=6),
        {"query_proj.weight": 12, "key_proj.weight": 6},
    ),
    "MLP": (
        of_equinox(eqx.nn.MLP, 3, 1, 8, 1),
        {"layers[0].weight": 3, "layers[1].weight": 8},
    ),
    "LayerNorm": (lambda: eqx.nn.LayerNorm((3, 4)), {"weight": "gain", "bias": "bias"}),
    "RMSNorm": (lambda: eqx.nn.RMSNorm((3, 4)), {"weight": "gain"}),
    "GroupNorm": (lambda: eqx.nn.GroupNorm(2, 4), {"weight": "gain"}),
    "BatchNorm": (
        lambda: eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, "batch", mode="batch")[0],
        {"weight": "gain"},
    ),
    "WeightNorm": (
        lambda: eqx.nn.WeightNorm(eqx.nn.Linear(3, 5, key=jax.random.key(0))),
        {"layer.weight": 3, "g": "gain"},
    ),
    "PReLU": (lambda: eqx.nn.PReLU(0.25), {"negative_slope": "bias"}),
    "in parallel": (
        in_parallel(lambda key: eqx.nn.Embedding(9, 5, key=key), eqx.filter_vmap),
        {"weight": 1},
    ),
}
LAYERS_OF = {"nnx": NNX_LAYERS, "linen": LINEN_LAYERS, "equinox": EQUINOX_LAYERS}
ROWS = [(library, row) for library, rows in LAYERS_OF.items() for row in rows]


def random_layer(library, row, prior):
    """A model of nothing but the weights of a layer."""

    def run():
        made, *data = LAYERS_OF[library][row][:-1]
        if library == "nnx":
            random_nnx_module("net", made(), prior)
        elif library == "equinox":
            random_eqx_module("net", made(), prior)
        elif isinstance(data[0], tuple):
            random_flax_module("net", made, prior, input_shape=data[0])
        else:
            random_flax_module("net", made, prior, *data)

    return run


@pytest.mark.parametrize(("library", "row"), ROWS)
def test_fan_in_is_the_number_of_inputs_a_unit_sums_over(library, row):
    sites = traced_sites(random_layer(library, row, priors.Normal(bias_scale=0.3)))
    for name, fan_in in LAYERS_OF[library][row][-1].items():
        fn = base_of(sites[f"net/{name}"]["fn"])
        expected = {"gain": (1.0, 0.5), "bias": (0.0, 0.3)}.get(fan_in) or (
            0.0,
            fan_in**-0.5,
        )
        assert (fn.loc, fn.scale) == pytest.approx(expected), name


UNITS = {  # of ARD, layer: shape of the scales as they multiply the kernel
    ("nnx", "LinearGeneral"): (1, 2, 3, 1, 1),
    ("linen", "Einsum"): (1, 2, 1),
    ("nnx", "ConvTranspose"): (1, 1, 1, 4),
    ("equinox", "Embedding"): (100, 1),
}


@pytest.mark.parametrize(("library", "row"), UNITS)
def test_weights_of_an_input_share_a_scale(library, row):
    shape = UNITS[library, row]
    name, fan_in = next(iter(LAYERS_OF[library][row][-1].items()))
    scales = np.arange(1, np.prod(shape) + 1, dtype=np.float32)
    layer = random_layer(library, row, priors.ARD(centered=True))
    given = handlers.substitute(layer, {f"net/{name}_scale": scales})
    sd = base_of(
        handlers.trace(handlers.seed(given, 0)).get_trace()[f"net/{name}"]["fn"]
    ).scale
    np.testing.assert_allclose(sd, scales.reshape(shape) * fan_in**-0.5, rtol=1e-6)


def test_weights_of_an_output_share_a_scale():
    prior = priors.Horseshoe(unit="output")
    sites = traced_sites(random_layer("nnx", "Conv", prior))
    assert sites["net/kernel_local"]["value"].shape == (8,)


EINSUM = linen.Einsum((8, 2, 4)), priors.Normal(), np.ones((1, 3, 2))
UNKNOWN = {
    "equation of the call": (
        lambda: random_flax_module("net", *EINSUM, einsum_str=SUM),
        r"'kernel', an `Einsum` of the equation None.*Pass the equation to the layer",
    ),
    "state": (
        lambda: random_eqx_module(
            "net", eqx.nn.BatchNorm(4, "batch", mode="batch"), priors.Normal()
        ),
        r"'batch_state_index.init\[0\]', a state and no weight.*make_with_state",
    ),
}


@pytest.mark.parametrize(("make", "message"), UNKNOWN.values(), ids=UNKNOWN)
def test_weights_of_unknown_use_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        traced_sites(make)


# -- sequences -------------------------------------------------------------------------

SEQUENCES = np.random.default_rng(1).normal(size=(6, 5, 2)).astype(np.float32)


class Readout(nnx.Module):
    """A dense layer of the last step of a recurrent layer."""

    def __init__(self):
        self.layer = nnx.RNN(nnx.GRUCell(2, 4, rngs=nnx.Rngs(0)))
        self.out = nnx.Linear(4, 1, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.out(self.layer(x)[:, -1])[..., 0]


def sequences(module):
    """A model of the readout of a layer."""

    @priors.noncenter
    def model(x, y=None):
        net = random_nnx_module("net", module, priors.Normal())
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(net(x), 0.5), obs=y)

    return model


def test_a_recurrent_module_is_sampled_and_predicts():
    """The counter of keys of a recurrent module of NNX changes without effect."""
    model = sequences(Readout())
    kernel = infer.SGLD(model, 1e-4, steps_per_draw=1, warm_start=0.0)
    sizes = {"num_warmup": 0, "num_samples": 1, "num_chains": 1}
    mcmc = run_chains(kernel, SEQUENCES, SEQUENCES[:, :, 0].sum(1), **sizes)
    draw = {name: value[0] for name, value in mcmc.get_samples().items()}
    assert draw["net/layer.cell.dense_h.kernel"].shape == (4, 12)
    assert_predicts(mcmc, model, SEQUENCES[:2], "loc", "y_mean")


def assert_predicts(mcmc, model, x, parameter, name):
    """Predictions are the module's with the first draw."""
    options = {"log_likelihood": False, "posterior_predictive": False}
    idata = to_inference_data(mcmc, {"x": x}, **options)
    draw = {name: value[0] for name, value in mcmc.get_samples().items()}
    at_draw = handlers.seed(handlers.substitute(model, draw), 0)
    fn = handlers.trace(at_draw).get_trace(x)["y"]["fn"]
    prediction = group(idata, "predictions")[name].to_numpy()[0, 0]
    expected = getattr(fn, parameter)
    np.testing.assert_allclose(prediction, expected, rtol=1e-4, atol=1e-5)


def test_a_counter_that_something_uses_is_refused():
    """Dropout after a recurrent layer: its keys come from the counter."""

    class Dropped(Readout):
        def __init__(self):
            super().__init__()
            self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.out(self.drop(self.layer(x)[:, -1]))[..., 0]

    with pytest.raises(
        ValueError, match=r"state .*'drop'.*'count'.*which the model changes.*dropout"
    ):
        run_chains(infer.SGLD(sequences(Dropped())), SEQUENCES, SEQUENCES[:, 0, 0])


def test_symmetries_of_a_module_of_one_precision_are_refused():
    """Flax starts the state of a recurrent cell in float32 unless told."""
    message = (
        r"symmetry\.find: argument `model` got a model that does not run in float64"
    )
    with pytest.raises(ValueError, match=message):
        symmetry.find(sequences(Readout()), SEQUENCES, SEQUENCES[:, 0, 0])


# -- priors and kernels ----------------------------------------------------------------

GIVEN = {"linen": priors.Learned, "nnx": priors.Fixed, "equinox": priors.Centered}


@pytest.mark.parametrize(("library", "kind"), GIVEN.items())
def test_modules_at_given_parameters(library, kind):
    """The function is that of the module."""
    _, forms, expected = module(library)
    scales = ("scale", "bias_scale", "gain_scale") if kind is priors.Centered else ()
    kinds = {priors.Fixed: [], priors.Learned: ["param"] * 6}
    for params in forms:
        prior = kind(params, **dict.fromkeys(scales, 1e-7))
        model = priors.noncenter(classifier(library, prior))
        seeded = handlers.trace(handlers.seed(model, 0))
        logits = jax.jit(lambda t=seeded: t.get_trace(IMAGES)["y"]["fn"].logits)()
        np.testing.assert_allclose(logits, expected, atol=1e-4)
        sites = traced_sites(model, IMAGES, LABELS)
        of_net = [site["type"] for name, site in sites.items() if "net/" in name]
        assert of_net == kinds.get(kind, ["sample"] * 6)


def test_modules_that_are_not_wrapped_are_refused():
    fixed = priors.Fixed(module("linen")[1][0])
    model = classifier("linen", priors.BySite({"Conv_0.*": fixed}, priors.Normal()))
    message = (
        r"priors\.Fixed.*Wrap the model once, `NUTS\(priors\.noncenter\(model\)\)`"
    )
    with pytest.raises(ValueError, match=message):
        run_chains(infer.MCLMC(model), IMAGES, LABELS)


@pytest.mark.slow
@pytest.mark.parametrize("library", ["linen", "equinox"])
def test_kernels_sample_what_is_random_and_learn_what_is_learned(library):
    """Predictions are the module's with the drawn, learned and fixed weights."""
    (dense, conv, bias, gain), given = NAMES[library], module(library)[1][0]
    smooth = priors.Hierarchical() if library == "equinox" else priors.GPFilters()
    patterns = {conv: smooth, bias: priors.Learned(given), gain: priors.Fixed(given)}
    model = priors.noncenter(
        classifier(library, priors.BySite(patterns, default=priors.Normal()))
    )
    kernel = infer.MCLMC(model, steps_per_draw=3)
    mcmc = run_chains(kernel, IMAGES, LABELS, num_warmup=8)
    draws = mcmc.get_samples()
    assert {f"net/{dense}", f"net/{conv}_base"} <= set(draws)
    assert not {f"net/{bias}", f"net/{gain}"} & set(draws)
    start, learned = (
        handlers.trace(handlers.seed(way, 0)).get_trace(IMAGES)[f"net/{bias}"]["value"]
        for way in (model, kernel.model)
    )
    assert np.all(learned != start)
    assert_predicts(mcmc, kernel.model, IMAGES[:2], "probs", "y_probs")


class Table(linen.Module):
    outputs: int

    @linen.compact
    def __call__(self, x):
        return linen.Dense(self.outputs)(jnp.tanh(linen.Dense(3)(x)))


TABLES = {
    "linen": Table,
    "nnx": lambda outputs: nnx.Linear(2, outputs, rngs=nnx.Rngs(0)),
    "equinox": lambda outputs: eqx.nn.MLP(2, outputs, 3, 1, key=jax.random.key(0)),
}


@pytest.mark.parametrize("library", TABLES)
def test_the_model_of_an_estimator_has_the_weights_of_a_module(library, monkeypatch):
    """Of one output; what is no module is refused."""
    sites = {}

    def read(task):
        sites.update(traced_sites(task.model, *task.data))
        raise KeyboardInterrupt  # before the fit

    monkeypatch.setitem(methods.METHODS, "mean_field", read)
    with pytest.raises(KeyboardInterrupt):
        Regressor("mean_field", network=TABLES[library]).fit(X, Y)
    shapes = {np.shape(s["value"]) for name, s in sites.items() if "net/" in name}
    assert shapes & {(3, 1), (2, 1), (1, 3)}
    for wrong, error in ((lambda outputs: "net", "returns str"), (3, "network")):
        with pytest.raises(TypeError, match=error):
            Regressor("mean_field", network=wrong).fit(X, Y)
    with pytest.raises(ValueError, match="argument `widths`"):
        Regressor(network=TABLES[library], widths=(3,)).fit(X, Y)


@pytest.mark.slow
def test_an_estimator_takes_a_module():
    """Its predictions are the module's."""
    options = {"effort": 0.02, "num_samples": 5, "random_state": 0}
    model = Regressor("mean_field", network=Table, **options).fit(X, Y)
    mean = model.sample(X, 5, noise=False).mean(0)
    np.testing.assert_allclose(mean, model.predict(X), rtol=1e-4)
    assert np.std(mean) > 0
