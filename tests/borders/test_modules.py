"""Modules of Flax Linen, Flax NNX and Equinox under our priors and kernels, fixed,
centered, learned or random.
"""

from functools import cache, partial
from itertools import product

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from flax import linen, nnx
from helpers import each, group, run_chains, traced_sites
from numpyro import handlers
from numpyro.contrib.module import (
    random_eqx_module,
    random_flax_module,
    random_nnx_module,
)
from numpyro.infer import NUTS
from numpyro.infer.util import log_density
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


class Spectral(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.SpectralNorm(linen.Dense(5))(x, update_stats=False)


CELLS = {"cell.hi.kernel": 4, "cell.ii.kernel": 3}
OPTIMIZED = {"dense_i.kernel": 3, "dense_h.kernel": 4}
ATTENTION = {"query.kernel": 6, "key.kernel": 6, "value.kernel": 6, "out.kernel": 12}
HEADS = {"num_heads": 4, "qkv_features": 12, "out_features": 5}
SUM = "nta,hab->nthb"  # sums over a
IMAGE, LINE, SEQUENCE = (1, 6, 6, 4), (1, 3), (1, 5, 3)
LAYER = (-2, -1)  # axes


def cell(kind=nnx.GRUCell):
    return kind(3, 4, rngs=nnx.Rngs(0))


def of_nnx(kind, *args, **options):
    return lambda: kind(*args, **options, rngs=nnx.Rngs(0))


def of_equinox(kind, *args, **options):
    return lambda: kind(*args, **options, key=jax.random.key(0))


def linear(key):
    return eqx.nn.Linear(3, 5, key=key)


def with_state(kind, *args, **options):
    return lambda: eqx.nn.make_with_state(kind)(*args, **options)[0]


def shared():
    key = jax.random.key(0)
    pair = eqx.nn.Embedding(9, 4, key=key), eqx.nn.Linear(4, 9, key=key)
    return eqx.nn.Shared(
        pair, where=lambda pair: pair[1].weight, get=lambda pair: pair[0].weight
    )


def in_parallel(of_key, split):
    return lambda: split(of_key)(jax.random.split(jax.random.key(0), 6))


# Class of a layer -> how to make it (of Linen with the shape of its input), and the
# fan-in of its weights: the number of inputs that a unit sums over, by hand. Gains are
# "gain": N(1, .5^2).
NNX_LAYERS = {
    "Linear": (of_nnx(nnx.Linear, 3, 5), {"kernel": 3, "bias": "bias"}),
    "LinearGeneral": (
        of_nnx(nnx.LinearGeneral, (2, 3), (4, 5), axis=LAYER),
        {"kernel": 6},
    ),
    "LinearGeneral, outputs": (of_nnx(nnx.LinearGeneral, 3, (4, 5)), {"kernel": 3}),
    "LinearGeneral, batch": (
        of_nnx(nnx.LinearGeneral, 3, (4, 5), batch_axis={0: 7}),
        {"kernel": 3},
    ),
    "Einsum": (
        of_nnx(nnx.Einsum, SUM, (8, 2, 4), (8, 4)),
        {"kernel": 2, "bias": "bias"},
    ),
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
    "LSTMCell": (lambda: nnx.RNN(cell(nnx.LSTMCell)), CELLS),
    "OptimizedLSTMCell": (lambda: cell(nnx.OptimizedLSTMCell), OPTIMIZED),
    "GRUCell": (cell, OPTIMIZED),
    "SimpleCell": (lambda: cell(nnx.SimpleCell), OPTIMIZED),
    "RNN": (lambda: nnx.RNN(cell()), {"cell.dense_i.kernel": 3}),
    "Bidirectional": (
        lambda: nnx.Bidirectional(nnx.RNN(cell()), nnx.RNN(cell())),
        {"forward_rnn.cell.dense_h.kernel": 4},
    ),
    "MultiHeadAttention": (
        of_nnx(
            nnx.MultiHeadAttention,
            in_features=6,
            decode=False,
            normalize_qk=True,
            **HEADS,
        ),
        {**ATTENTION, "query_ln.scale": "gain"},
    ),
    "LoRA": (of_nnx(nnx.LoRA, 3, 2, 5), {"lora_a": 3, "lora_b": 2}),
    "LoRALinear": (
        of_nnx(nnx.LoRALinear, 3, 5, lora_rank=2),
        {"kernel": 3, "lora.lora_b": 2},
    ),
    "BatchNorm": (of_nnx(nnx.BatchNorm, 4), {"scale": "gain", "bias": "bias"}),
    "LayerNorm": (of_nnx(nnx.LayerNorm, 4), {"scale": "gain"}),
    "GroupNorm": (of_nnx(nnx.GroupNorm, 4, num_groups=2), {"scale": "gain"}),
    "InstanceNorm": (of_nnx(nnx.InstanceNorm, 4), {"scale": "gain"}),
    "RMSNorm": (of_nnx(nnx.RMSNorm, 4), {"scale": "gain"}),
    "SpectralNorm": (
        lambda: nnx.SpectralNorm(nnx.Linear(3, 5, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0)),
        {"layer_instance.kernel": 3},
    ),
    "WeightNorm": (
        lambda: nnx.WeightNorm(nnx.Linear(3, 5, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0)),
        {"layer_instance.kernel": 3},
    ),
    "PReLU": (nnx.PReLU, {"negative_slope": "bias"}),
    "Sequential": (
        lambda: nnx.Sequential(nnx.LinearGeneral(5, (2, 3), rngs=nnx.Rngs(0))),
        {"layers.0.kernel": 5},
    ),
    "in parallel": (
        in_parallel(lambda key: nnx.Linear(3, 5, rngs=nnx.Rngs(key)), nnx.vmap),
        {"kernel": 3},
    ),
}
LINEN_LAYERS = {
    "Dense": (linen.Dense(5), LINE, {"kernel": 3, "bias": "bias"}),
    "DenseGeneral": (linen.DenseGeneral((4, 5), axis=LAYER), (1, 2, 3), {"kernel": 6}),
    "DenseGeneral, outputs": (linen.DenseGeneral((4, 5)), LINE, {"kernel": 3}),
    "DenseGeneral, batch": (
        linen.DenseGeneral(4, batch_dims=(0,)),
        (7, 2, 3),
        {"kernel": 3},
    ),
    "Einsum": (linen.Einsum((8, 2, 4), SUM), (1, 3, 2), {"kernel": 2}),
    "Conv": (linen.Conv(8, (3, 3), feature_group_count=2), IMAGE, {"kernel": 18}),
    "ConvLocal": (linen.ConvLocal(8, (3, 3)), IMAGE, {"kernel": 36}),
    "ConvTranspose": (
        linen.ConvTranspose(8, (3, 3), transpose_kernel=True),
        IMAGE,
        {"kernel": 36},
    ),
    "ConvTranspose, strides": (
        linen.ConvTranspose(8, (2, 2), (2, 2)),
        IMAGE,
        {"kernel": 4},
    ),
    "Embed": (linen.Embed(10, 4), np.zeros(2, int), {"embedding": 1}),
    "LSTMCell": (linen.RNN(linen.LSTMCell(4)), SEQUENCE, CELLS),
    "OptimizedLSTMCell": (linen.RNN(linen.OptimizedLSTMCell(4)), SEQUENCE, CELLS),
    "GRUCell": (
        linen.RNN(linen.GRUCell(4)),
        SEQUENCE,
        {"cell.in.kernel": 3, "cell.hn.kernel": 4},
    ),
    "MGUCell": (
        linen.RNN(linen.MGUCell(4)),
        SEQUENCE,
        {"cell.in.kernel": 3, "cell.hn.kernel": 4},
    ),
    "SimpleCell": (
        linen.RNN(linen.SimpleCell(4)),
        SEQUENCE,
        {"cell.i.kernel": 3, "cell.h.kernel": 4},
    ),
    "ConvLSTMCell": (
        linen.RNN(linen.ConvLSTMCell(4, (3, 3))),
        (1, 5, *IMAGE[1:]),
        {"cell.ih.kernel": 36, "cell.hh.kernel": 36},
    ),
    "RNN": (linen.RNN(linen.LSTMCell(4)), SEQUENCE, CELLS),
    "Bidirectional": (
        linen.Bidirectional(linen.RNN(linen.LSTMCell(4)), linen.RNN(linen.LSTMCell(4))),
        SEQUENCE,
        {f"forward_rnn.{name}": fan_in for name, fan_in in CELLS.items()},
    ),
    "MultiHeadDotProductAttention": (
        linen.MultiHeadDotProductAttention(**HEADS),
        (1, 7, 6),
        ATTENTION,
    ),
    "MultiHeadAttention": (linen.MultiHeadAttention(**HEADS), (1, 7, 6), ATTENTION),
    "BatchNorm": (linen.BatchNorm(use_running_average=True), LINE, {"scale": "gain"}),
    "LayerNorm": (
        linen.LayerNorm(reduction_axes=LAYER, feature_axes=LAYER),
        (1, 3, 4),
        {"scale": "gain", "bias": "bias"},
    ),
    "GroupNorm": (linen.GroupNorm(3), LINE, {"scale": "gain"}),
    "InstanceNorm": (linen.InstanceNorm(), SEQUENCE, {"scale": "gain"}),
    "RMSNorm": (linen.RMSNorm(), LINE, {"scale": "gain"}),
    "SpectralNorm": (Spectral(), LINE, {"Dense_0.kernel": 3}),
    "WeightNorm": (
        linen.WeightNorm(linen.Dense(5)),
        LINE,
        {"layer_instance.kernel": 3, "layer_instance/kernel/scale": "gain"},
    ),
    "PReLU": (linen.PReLU(), LINE, {"negative_slope": "bias"}),
    "Sequential": (
        linen.Sequential([linen.DenseGeneral((4, 5))]),
        LINE,
        {"layers_0.kernel": 3},
    ),
    "in parallel": (
        linen.vmap(linen.Dense, {"params": 0}, split_rngs={"params": True})(5),
        (6, 2, 3),
        {"kernel": 3},
    ),
}
EQUINOX_LAYERS = {
    "Linear": (of_equinox(eqx.nn.Linear, 3, 5), {"weight": 3, "bias": "bias"}),
    "Linear, scalar": (of_equinox(eqx.nn.Linear, "scalar", 5), {"weight": 1}),
    "Embedding": (of_equinox(eqx.nn.Embedding, 100, 16), {"weight": 1}),
    "Conv": (of_equinox(eqx.nn.Conv, 1, 4, 8, 3), {"weight": 12}),
    "Conv1d": (of_equinox(eqx.nn.Conv1d, 4, 8, 3), {"weight": 12}),
    "Conv2d": (
        of_equinox(eqx.nn.Conv2d, 4, 8, 3, groups=2),
        {"weight": 18, "bias": "bias"},
    ),
    "Conv3d": (of_equinox(eqx.nn.Conv3d, 4, 8, 2), {"weight": 32}),
    "ConvTranspose": (of_equinox(eqx.nn.ConvTranspose, 1, 4, 8, 3), {"weight": 12}),
    "ConvTranspose1d": (
        of_equinox(eqx.nn.ConvTranspose1d, 4, 8, 3, groups=2),
        {"weight": 6},
    ),
    "ConvTranspose2d": (
        of_equinox(eqx.nn.ConvTranspose2d, 4, 8, 2, stride=2),
        {"weight": 4},
    ),
    "ConvTranspose3d": (
        of_equinox(eqx.nn.ConvTranspose3d, 4, 8, 2, stride=2),
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
    "RMSNorm": (lambda: eqx.nn.RMSNorm((3, 4)), {"weight": "gain", "bias": "bias"}),
    "GroupNorm": (lambda: eqx.nn.GroupNorm(2, 4), {"weight": "gain"}),
    "BatchNorm": (
        with_state(eqx.nn.BatchNorm, 4, "batch", mode="batch"),
        {"weight": "gain", "bias": "bias"},
    ),
    "SpectralNorm": (
        lambda: with_state(
            eqx.nn.SpectralNorm,
            linear(jax.random.key(0)),
            "weight",
            key=jax.random.key(0),
        )(),
        {"layer.weight": 3},
    ),
    "WeightNorm": (
        lambda: eqx.nn.WeightNorm(linear(jax.random.key(0))),
        {"layer.weight": 3, "g": "gain"},
    ),
    "PReLU": (lambda: eqx.nn.PReLU(0.25), {"negative_slope": "bias"}),
    "Sequential": (
        lambda: eqx.nn.Sequential([linear(jax.random.key(0))]),
        {"layers[0].weight": 3},
    ),
    "Shared": (shared, {"pytree[0].weight": 1}),
    "in parallel": (
        in_parallel(lambda key: eqx.nn.Embedding(9, 5, key=key), eqx.filter_vmap),
        {"weight": 1},
    ),
}
# Public classes that own no parameters, or are no layers.
WITHOUT = {
    "nnx": {
        "Module",
        "Dropout",
        "RNNCellBase",
        "Scan",
        "Vmap",
        "Pmap",
        "List",
        "Dict",
        "RoPE",
    },
    "linen": {
        *("Module", "ModuleBase", "Dropout", "RNNCellBase"),
        *(
            "Fp8DirectDotGeneralOp",
            "Fp8DotGeneral",
            "Fp8DotGeneralOp",
            "Fp8Einsum",
            "NANOOFp8DotGeneralOp",
        ),
        "SelfAttention",  # deprecated: the other name of attention
    },
    "equinox": {
        *(
            "Dropout",
            "Identity",
            "Lambda",
            "Pool",
            "RotaryPositionalEmbedding",
            "State",
            "StateIndex",
        ),
        *("StatefulLayer",),
        *(
            f"{kind}Pool{rank}d"
            for kind in ("Avg", "Max", "AdaptiveAvg", "AdaptiveMax")
            for rank in (1, 2, 3)
        ),
        "AdaptivePool",
    },
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


@pytest.mark.parametrize("library", LAYERS_OF)
def test_all_layers_of_the_library_are_in_the_table(library):
    rooms = {
        "nnx": (nnx, nnx.Module),
        "linen": (linen, linen.Module),
        "equinox": (eqx.nn, eqx.Module),
    }
    public, base = rooms[library]
    classes = {
        name
        for name, value in vars(public).items()
        if isinstance(value, type) and issubclass(value, base)
    }
    assert classes - LAYERS_OF[library].keys() - WITHOUT[library] == set()


UNITS = {  # of ARD, layer: shape of the scales as they multiply the kernel
    ("nnx", "LinearGeneral"): (2, 3, 1, 1),
    ("linen", "Einsum"): (1, 2, 1),
    ("nnx", "ConvTranspose"): (1, 1, 1, 4),
    ("equinox", "Embedding"): (100, 1),
}


@each(("library", "row"), UNITS, fast=2)
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


UNKNOWN = {
    "equation of the call": (
        lambda: random_flax_module(
            "net",
            linen.Einsum((8, 2, 4)),
            priors.Normal(),
            np.ones((1, 3, 2)),
            einsum_str=SUM,
        ),
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

OF_NNX = ("LSTMCell", "OptimizedLSTMCell", "GRUCell", "SimpleCell")
SEQUENCES = np.random.default_rng(1).normal(size=(6, 5, 2)).astype(np.float32)


class Readout(nnx.Module):
    """A dense layer of the last step of a recurrent or attention layer."""

    def __init__(self, layer):
        self.layer, self.out = layer, nnx.Linear(4, 1, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.out(self.layer(x)[:, -1])[..., 0]


class LinenReadout(linen.Module):
    layer: linen.Module

    @linen.compact
    def __call__(self, x):
        return linen.Dense(1)(self.layer(x)[:, -1])[..., 0]


class EquinoxReadout(eqx.Module):
    layer: eqx.Module
    out: eqx.nn.Linear

    def __call__(self, x):
        last, _ = jax.lax.scan(
            lambda state, row: (self.layer(row, state), None), jnp.zeros(4), x
        )
        return self.out(last)[0]


def nnx_cell():
    return nnx.GRUCell(2, 4, rngs=nnx.Rngs(0))


SEQUENCE_LAYERS = {
    "nnx": {
        "GRUCell": lambda: nnx.RNN(nnx_cell()),
        "MultiHeadAttention": of_nnx(nnx.MultiHeadAttention, 2, 2, 4, 4, decode=False),
    },
    "linen": {"LSTMCell": lambda: linen.RNN(linen.LSTMCell(4))},
    "equinox": {"GRUCell": of_equinox(eqx.nn.GRUCell, 2, 4)},
}


def sequences(library, layer):
    """A model of the readout of a layer."""
    if library == "nnx":
        made = layer if isinstance(layer, Readout) else Readout(layer)
        make = partial(random_nnx_module, "net", made, priors.Normal())
    elif library == "linen":
        make = partial(
            random_flax_module,
            "net",
            LinenReadout(layer),
            priors.Normal(),
            input_shape=(1, 5, 2),
        )
    else:
        made = EquinoxReadout(layer, eqx.nn.Linear(4, 1, key=jax.random.key(1)))
        make = lambda: jax.vmap(random_eqx_module("net", made, priors.Normal()))  # noqa: E731

    @priors.noncenter
    def model(x, y=None):
        net = make()
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(net(x), 0.5), obs=y)

    return model


def test_a_recurrent_module_starts_a_chain():
    """The counter of keys of a recurrent module of NNX changes without effect."""
    kernel = infer.SGLD(sequences("nnx", nnx.RNN(nnx_cell())), 1e-4, warm_start=0.0)
    data = SEQUENCES, SEQUENCES[:, 0, 0]
    state = jax.eval_shape(lambda: kernel.init(jax.random.key(0), 0, None, data, {}))
    assert state.z["net/layer.cell.dense_h.kernel"].shape == (4, 12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "row"),
    [(of, row) for of, rows in SEQUENCE_LAYERS.items() for row in rows],
)
def test_modules_of_sequences_are_sampled_and_predict(library, row):
    model = sequences(library, SEQUENCE_LAYERS[library][row]())
    kernel = infer.SGLD(model, 1e-4, steps_per_draw=1, warm_start=0.0)
    mcmc = run_chains(
        kernel,
        SEQUENCES,
        SEQUENCES[:, :, 0].sum(1),
        num_warmup=0,
        num_samples=1,
        num_chains=1,
    )
    idata = to_inference_data(
        mcmc, {"x": SEQUENCES[:2]}, log_likelihood=False, posterior_predictive=False
    )
    draw = {name: value[0] for name, value in mcmc.get_samples().items()}
    held = handlers.substitute(model, draw)
    expected = (
        handlers.trace(handlers.seed(held, 0)).get_trace(SEQUENCES)["y"]["fn"].loc
    )
    mean = group(idata, "predictions")["y_mean"].to_numpy()[0, 0]
    np.testing.assert_allclose(mean, expected[:2], rtol=1e-4, atol=1e-5)


def test_a_counter_that_something_uses_is_refused():
    """Dropout after a recurrent layer: its keys come from the counter."""

    class Dropped(Readout):
        def __init__(self):
            super().__init__(nnx.RNN(nnx_cell()))
            self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.out(self.drop(self.layer(x)[:, -1]))[..., 0]

    with pytest.raises(
        ValueError, match=r"state .*'drop'.*'count'.*which the model changes.*dropout"
    ):
        run_chains(
            infer.SGLD(sequences("nnx", Dropped())), SEQUENCES, SEQUENCES[:, 0, 0]
        )


def test_symmetries_of_a_module_of_one_precision_are_refused():
    """Flax starts the state of a recurrent cell in float32 unless told."""
    message = (
        r"symmetry\.find: argument `model` got a model that does not run in float64"
    )
    with pytest.raises(ValueError, match=message):
        symmetry.find(
            sequences("nnx", nnx.RNN(nnx_cell())), SEQUENCES, SEQUENCES[:, 0, 0]
        )


# -- priors and kernels ----------------------------------------------------------------

# library -> prior, and the shapes of its hyper-sites of the convolution
LEARNED_SCALES = {
    "linen": (lambda: priors.Hierarchical(), {"scale": ()}),
    "nnx": (lambda: priors.Horseshoe(unit="output"), {"global": (), "local": (4,)}),
    "equinox": (lambda: priors.ARD(), {"scale": (2,)}),
}


@each("library", NAMES, fast=["nnx"])
def test_modules_with_learned_scales(library):
    """Sites as documented, named once, non-centered; finite density and gradient."""
    make, hyper = LEARNED_SCALES[library]
    model = priors.noncenter(classifier(library, make()))
    kernel = f"net/{NAMES[library][1]}"
    traced = {
        name: s
        for name, s in traced_sites(model, IMAGES, LABELS).items()
        if name.startswith("net/")
    }
    sites = {name: (site["type"], site["value"].shape) for name, site in traced.items()}
    assert {suffix: sites[f"{kernel}_{suffix}"] for suffix in hyper} == {
        n: ("sample", s) for n, s in hyper.items()
    }
    assert sites[kernel][0] == "deterministic"
    assert sites[f"{kernel}_base"] == ("sample", sites[kernel][1])
    values = {
        name: np.full(shape, 0.5, np.float32)
        for name, (kind, shape) in sites.items()
        if kind == "sample"
    }
    density, slopes = jax.jit(
        jax.value_and_grad(lambda at: log_density(model, (IMAGES, LABELS), {}, at)[0])
    )(values)
    assert np.isfinite(density)
    assert all(
        np.isfinite(slope).all() and np.any(slope != 0) for slope in slopes.values()
    )


# the others are slow
GIVEN = {
    "linen": priors.Learned,
    "nnx": priors.Fixed,
    "equinox": priors.Centered,
}


@each(("library", "kind"), product(NAMES, GIVEN.values()), fast=[*GIVEN.items()])
def test_modules_at_given_parameters(library, kind):
    """The function is that of the module; fixed weights are no sites, learned ones are
    parameters.
    """
    _, forms, expected = module(library)
    for params in forms:
        options = (
            {"scale": 1e-7, "bias_scale": 1e-7, "gain_scale": 1e-7}
            if kind is priors.Centered
            else {}
        )
        model = priors.noncenter(classifier(library, kind(params, **options)))
        seeded = handlers.trace(handlers.seed(model, 0))
        found = jax.jit(
            lambda seeded=seeded: seeded.get_trace(IMAGES)["y"]["fn"].logits
        )()
        np.testing.assert_allclose(found, expected, atol=1e-4)
        sites = traced_sites(model, IMAGES, LABELS)
        kinds = [
            site["type"] for name, site in sites.items() if name.startswith("net/")
        ]
        assert (
            kinds
            == {
                priors.Fixed: [],
                priors.Learned: ["param"] * 6,
                priors.Centered: ["sample"] * 6,
            }[kind]
        )


@each("kernel", [infer.MCLMC, NUTS], fast=1)
def test_modules_that_are_not_wrapped_are_refused(kernel):
    model = classifier(
        "linen",
        priors.BySite(
            {"Conv_0.*": priors.Fixed(module("linen")[1][0])}, priors.Normal()
        ),
    )
    with pytest.raises(
        ValueError,
        match=(
            r"priors\.Fixed.*Wrap the model once, `NUTS\(priors\.noncenter\(model\)\)`"
        ),
    ):
        run_chains(kernel(model), IMAGES, LABELS)


@pytest.mark.slow
@pytest.mark.parametrize("library", NAMES)
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
    draw = {name: value[0] for name, value in mcmc.get_samples().items()}
    assert {f"net/{dense}", f"net/{conv}_base"} <= set(draw)
    assert not {f"net/{bias}", f"net/{gain}"} & set(draw)
    ways = (model, kernel.model)
    start, learned = (
        handlers.trace(handlers.seed(way, 0)).get_trace(IMAGES)[f"net/{bias}"]["value"]
        for way in ways
    )
    assert np.all(learned != start)
    idata = to_inference_data(
        mcmc, {"x": IMAGES[:2]}, log_likelihood=False, posterior_predictive=False
    )
    held = handlers.substitute(kernel.model, draw)
    expected = (
        handlers.trace(handlers.seed(held, 0)).get_trace(IMAGES[:2])["y"]["fn"].probs
    )
    np.testing.assert_allclose(
        group(idata, "predictions")["y_probs"].to_numpy()[0, 0], expected, rtol=1e-4
    )


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
@pytest.mark.parametrize("library", TABLES)
def test_an_estimator_takes_a_module(library):
    """The posterior has the module's parameters; predictions are the module's."""
    options = {"effort": 0.02, "num_samples": 5, "random_state": 0}
    model = Regressor("mean_field", network=TABLES[library], **options).fit(X, Y)
    posterior = group(model.idata_, "posterior")
    names = [str(name) for name in posterior if str(name).startswith("net.")]
    # the last layer has one output, the mean
    assert any(posterior[name].shape[2:] in [(3, 1), (2, 1), (1, 3)] for name in names)
    mean = model.sample(X, 5, noise=False).mean(0)
    np.testing.assert_allclose(mean, model.predict(X), rtol=1e-4)
    assert np.std(mean) > 0
