"""Codes of categories that have no level are refused by every room."""

from functools import cache
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from flax import linen, nnx
from helpers import each, refused
from numpyro.infer.autoguide import AutoNormal
from zoo import BATCH, N, X, Y

import numpyro_bnn as bnn
from numpyro_bnn.program.posterior import Posterior
from numpyro_bnn.runs import Rows
from use.readers import READERS

LEVELS = 4
SITES = {"w": (2,), "sigma": (), "effect": (LEVELS,)}
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
    "counted from 1": lambda table, code, known: table[code + 1 - 1, 0],
    "take": lambda table, code, known: jnp.take(table, code, axis=0)[:, 0],
    "along an axis": lambda table, code, known: jnp.take_along_axis(
        jnp.ones((N, 1)) * table[:, 0], code[:, None], axis=1
    )[:, 0],
    "jit": lambda table, code, known: jax.jit(lambda t, c: t[c, 0])(table, code),
    "vmap": lambda table, code, known: jax.vmap(lambda c: table[c, 0])(code),
    "scan": lambda table, code, known: jax.lax.scan(
        lambda h, c: (h, table[c, 0]), 0.0, code
    )[1],
    "cond": lambda table, code, known: jax.lax.cond(
        known[0], lambda: table[code, 0], lambda: jnp.zeros(N)
    ),
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
            message = f"codes from {code.min()} to {code.max()}, which look up {LEVELS}"
            with refused("code", message):
                read()


@cache
def exported():
    params = {f"{name}_auto_loc": jnp.ones(shape) for name, shape in SITES.items()}
    params |= {f"{name}_auto_scale": jnp.ones(shape) for name, shape in SITES.items()}
    return AutoNormal(grouped), SimpleNamespace(params=params)


def export(**options):
    guide, result = exported()
    of = {"guide": guide, "args": (X, KNOWN, Y), "num_samples": 2}
    return bnn.to_inference_data(result, **of, **options)


def read_by(name, code, *more):
    return READERS[name](grouped, X, code, Y, *more)


ROOMS = {
    "minibatches": lambda code: read_by("SGLD", code, BATCH),
    "on disk": lambda code: READERS["SGLD"](grouped, Rows(X), Rows(code), Rows(Y)),
    "fit": lambda code: read_by("fit", code),
    "AutoADF": lambda code: read_by("AutoADF", code),
    "collapse": lambda code: read_by("collapse", code),
    "export": lambda code: export(predictions={"x": X, "code": code}),
    "predict": lambda code: bnn.predict(grouped, export(), X, code),
}


@each("room", ROOMS, slow=["predict"])
def test_every_room_refuses_codes_without_a_level(room):
    for code in UNKNOWN.values():
        with refused("code", "Pass codes from 0 to 3"):
            ROOMS[room](code)
