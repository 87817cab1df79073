"""Codes of categories that have no level: JAX answers with another level, or with NaN;
every room refuses them.
"""

from functools import cache
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flax import linen, nnx
from helpers import each, refused
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from zoo import BATCH, N, X, Y

import numpyro_bnn as bnn
from numpyro_bnn import guides, infer
from numpyro_bnn.program.posterior import Posterior
from numpyro_bnn.runs import Rows

LEVELS = 4
KNOWN = np.arange(N) % LEVELS
UNKNOWN = {
    "high": np.where(KNOWN == 3, 4, KNOWN),
    "missing": np.where(KNOWN == 3, -1, KNOWN),
}


def grouped(x, code, y=None, batch_size=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    effect = numpyro.sample(
        "effect", dist.Normal(0.0, 1.0).expand([LEVELS]).to_event(1)
    )
    with numpyro.plate("data", x.shape[0], subsample_size=batch_size) as i:
        f = x[i] @ w + effect[code[i]]
        numpyro.sample("y", dist.Normal(f, sigma), obs=None if y is None else y[i])


def nnx_embedding(table, code):
    module = nnx.Embed(*table.shape, rngs=nnx.Rngs(0))
    module.embedding = nnx.Param(table)
    return module(code)[:, 0]


ROWS = np.arange(N)
# What looks up a table (levels, 2) by codes (N,), given which are known.
UNSAFE = {
    "index": lambda table, code, known: table[code, 0],
    "of columns": lambda table, code, known: table.T[:, code][0],
    "counted from 1": lambda table, code, known: table[code + 1 - 1, 0],
    "take": lambda table, code, known: jnp.take(table, code, axis=0)[:, 0],
    "along an axis": lambda table, code, known: jnp.take_along_axis(
        jnp.ones((N, 1)) * table[:, 0], code[:, None], axis=1
    )[:, 0],
    "another table": lambda table, code, known: table[jnp.arange(LEVELS)[code], 1],
    "one of two columns": lambda table, code, known: table[
        jnp.stack([code, code[::-1]], 1)[:, 0], 0
    ],
    "jit": lambda table, code, known: jax.jit(lambda t, c: t[c, 0])(table, code),
    "vmap": lambda table, code, known: jax.vmap(lambda c: table[c, 0])(code),
    "scan": lambda table, code, known: jax.lax.scan(
        lambda h, c: (h, table[c, 0]), 0.0, code
    )[1],
    "cond": lambda table, code, known: jax.lax.cond(
        known[0], lambda: table[code, 0], lambda: jnp.zeros(N)
    ),
    "while": lambda table, code, known: jax.lax.while_loop(
        lambda state: state[0] < N,
        lambda state: (
            state[0] + 1,
            state[1].at[state[0]].set(table[code[state[0]], 0]),
        ),
        (0, jnp.zeros(N)),
    )[1],
    "shard_map": lambda table, code, known: jax.shard_map(
        lambda c: table[c, 0],
        mesh=jax.sharding.Mesh(jax.devices()[:1], "devices"),
        in_specs=jax.P("devices"),
        out_specs=jax.P("devices"),
    )(code),
    "equinox": lambda table, code, known: jax.vmap(eqx.nn.Embedding(weight=table))(
        code
    )[:, 0],
    "nnx": lambda table, code, known: nnx_embedding(table, code),
    "linen": lambda table, code, known: linen.Embed(LEVELS, 2).apply(
        {"params": {"embedding": table}}, code
    )[:, 0],
}
SAFE = {
    "clipped": lambda table, code, known: table[jnp.clip(code, 0, LEVELS - 1), 0],
    "taken clipped": lambda table, code, known: jnp.take(
        table, code, axis=0, mode="clip"
    )[:, 0],
    "filled": lambda table, code, known: table.at[code].get(
        mode="fill", fill_value=0.0
    )[:, 0],
    "replaced before": lambda table, code, known: table[jnp.where(known, code, 0), 0],
    "replaced after": lambda table, code, known: jnp.where(
        known, jnp.take(table, code, axis=0)[:, 0], 0.0
    ),
    "in a branch that is not taken": lambda table, code, known: jax.lax.cond(
        known.all(), lambda: table[code, 0], lambda: jnp.zeros(N)
    ),
    "in a loop without steps": lambda table, code, known: jax.lax.while_loop(
        lambda f: ~known.all() & (f[0] > 0), lambda f: table[code, 0], jnp.zeros(N)
    ),
    "one hot": lambda table, code, known: (jax.nn.one_hot(code, LEVELS) @ table)[:, 0],
    "from the end": lambda table, code, known: (
        table[jnp.minimum(code, 3) - 1, 0] + table[ROWS % 4 - 1, 0]
    ),
    "masked": lambda table, code, known: table[code, 0],
}


def lookup(name):
    def model(code, known, batch_size=None):
        table = numpyro.sample(
            "table", dist.Normal(0.0, 1.0).expand([LEVELS, 2]).to_event(2)
        )
        f = (UNSAFE | SAFE)[name](table, code, known)
        with numpyro.plate("data", N, subsample_size=batch_size) as i:
            y = dist.Normal(f[i], 1.0)
            numpyro.sample(
                "y", y.mask(known[i]) if name == "masked" else y, obs=jnp.asarray(Y)[i]
            )

    return model


@pytest.mark.parametrize("name", [*UNSAFE, *SAFE])
def test_codes_without_a_level(name):
    for code in (KNOWN, *UNKNOWN.values()):
        given = code, (code >= 0) & (code < LEVELS)
        # from the end, as `x[i - 1]`
        computed = name == "counted from 1" and code.min() < 0
        for options in ({}, {"batch_size": BATCH}):
            read = lambda: Posterior(lookup(name), given, options, full=not options)  # noqa: B023, E731
            if name in SAFE or code is KNOWN or computed:
                read()
                continue
            with refused(
                "code",
                (
                    f"codes from {code.min()} to {code.max()}, which look up {LEVELS} "
                    f"levels"
                ),
            ):
                read()


def test_codes_are_known_inside_of_a_traced_program():
    """Such as that in which the export draws from a guide with learned scales."""
    z = {"w": jnp.zeros(2), "sigma": 0.0, "effect": jnp.zeros(LEVELS)}

    def read(code):
        return jax.make_jaxpr(lambda z: Posterior(grouped, (X, code, Y)).potential(z))(
            z
        )

    assert read(KNOWN).out_avals[0].shape == ()
    with refused("code", f"codes from 0 to {LEVELS}"):
        read(UNKNOWN["high"])


def start(*args):
    options = {"gradient": "minibatch"} if len(args) > 3 else {}
    return infer.SGLD(grouped, **options).init(jax.random.key(0), 4, None, args, {})


def fit(code):
    svi = SVI(grouped, AutoNormal(grouped), optax.adam(1e-2), Trace_ELBO())
    return guides.fit(svi, jax.random.key(0), 2, X, code, Y)


@cache
def fitted():
    guide = AutoNormal(grouped)
    svi = SVI(grouped, guide, optax.adam(1e-2), Trace_ELBO())
    params = svi.get_params(svi.init(jax.random.key(0), X, KNOWN, Y))
    return guide, SimpleNamespace(params=params)


def export(**options):
    guide, result = fitted()
    return bnn.to_inference_data(
        result, guide=guide, args=(X, KNOWN, Y), num_samples=2, **options
    )


@cache
def exported():
    return export()


@cache
def laplace():
    guide = guides.AutoLaplace(grouped, structure="diag")
    return guide, guide.run(jax.random.key(0), X, KNOWN, Y, num_epochs=1).params


ROOMS = {
    "all rows": lambda code: start(X, code, Y),
    "minibatches": lambda code: start(X, code, Y, BATCH),
    "on disk": lambda code: start(Rows(X), Rows(code), Rows(Y), BATCH),
    "fit": fit,
    "AutoADF.run": lambda code: guides.AutoADF(grouped).run(
        jax.random.key(0), X, code, Y
    ),
    "AutoLaplace.predictive": lambda code: laplace()[0].predictive(
        laplace()[1], X, code
    ),
    "collapse": lambda code: infer.collapse(grouped, ["effect"], X, code, Y),
    "export": lambda code: export(predictions={"x": X, "code": code}),
    "predict": lambda code: bnn.predict(grouped, exported(), X, code),
}

LONGER = ("all rows", "AutoLaplace.predictive", "predict")


@pytest.mark.filterwarnings("ignore:guides.AutoLaplace.run")
@each("room", ROOMS, slow=LONGER)
def test_every_room_refuses_codes_without_a_level(room):
    for code in UNKNOWN.values():
        with refused("code", "Pass codes from 0 to 3"):
            ROOMS[room](code)
