"""Arguments of models: tables, lists, lengths of rows, numbers that ``MCMC`` traces."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from helpers import each, group
from numpyro.infer import HMC, MCMC, SVI, BarkerMH, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from zoo import BATCH, N, X, Y, line

from numpyro_bnn import guides, infer, to_inference_data

pytestmark = pytest.mark.core


def sgld(model=line):
    return infer.SGLD(model, 1e-3, steps_per_draw=2)


def run(kernel, *args, jit=False, **kwargs):
    sizes = {"num_warmup": 2, "num_samples": 3, "jit_model_args": jit}
    mcmc = MCMC(kernel, progress_bar=False, **sizes)
    mcmc.run(jax.random.key(0), *args, **kwargs)
    return mcmc


def fit(x, y, batch_size=None, model=line):
    svi = SVI(model, AutoNormal(model), numpyro.optim.Adam(0.1), Trace_ELBO())
    return guides.fit(
        svi, jax.random.key(0), 3, x, y, batch_size=batch_size, progress_bar=False
    )


def adf(x, y, **options):
    return guides.AutoADF(line).run(
        jax.random.key(0), x, y, num_epochs=np.int64(1), progress_bar=False, **options
    )


@functools.cache
def on_arrays():
    return run(sgld(), jnp.asarray(X), jnp.asarray(Y), batch_size=np.int64(BATCH))


def predictions(x, y):
    mcmc = (
        on_arrays()
        if isinstance(x, jax.Array)
        else run(sgld(), x, y, batch_size=np.int64(BATCH))
    )
    return group(to_inference_data(mcmc, {"x": x}), "predictions")["y"].to_numpy()


CALLS = {
    "predictions": predictions,
    "fit": lambda x, y: fit(x, y, np.int64(BATCH)).params["w_auto_loc"],
    "adf": lambda x, y: adf(x, y).params["w_auto_loc"],
}


@each("name", CALLS, fast=["fit"])
def test_tables_and_lists_are_data(name):
    """Also where a model indexes them by traced indices; NumPy's integers count."""
    found = CALLS[name](pd.DataFrame(X), Y.tolist())
    expected = CALLS[name](jnp.asarray(X), jnp.asarray(Y))
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


# -- rows and their numbers ------------------------------------------------------------

ROWS = {
    "minibatches": lambda x, y: run(sgld(), x, y, batch_size=BATCH),
    "fit of minibatches": lambda x, y: fit(x, y, BATCH),
    "adf": adf,
    "export": lambda x, y: to_inference_data(
        run(BarkerMH(line), jnp.asarray(x), jnp.asarray(y))
    ),
}
FAST_ROWS = ("minibatches", "fit of minibatches", "adf")


@each("call", ROWS, fast=FAST_ROWS)
def test_targets_with_more_or_fewer_rows_than_inputs_are_refused(call):
    """Surplus rows were ignored; for missing ones JAX repeats the last."""
    for rows in (N - 5, N + 5):
        with pytest.raises(ValueError, match=rf"{rows} rows"):
            ROWS[call](X, np.ones(rows, np.float32))


@pytest.mark.slow
def test_plates_name_axes_and_arrays_that_no_plate_indexes_have_any_length():
    def model(x, centers, y=None):
        with numpyro.plate("groups", 3, dim=-1):
            w = numpyro.sample("w", dist.Normal(0, 1).expand([1]).expand([3]))
            v = numpyro.sample("v", dist.Normal(0, 1).expand([3, 2]).to_event(1))
        with numpyro.plate("data", len(x)) as i:
            distance = jnp.sum((x[i][:, None] - centers) ** 2, -1).sum(-1)
            numpyro.sample(
                "y",
                dist.Normal(x[i] @ v.sum(0) + w.sum() + distance, 1),
                obs=None if y is None else y[i],
            )

    idata = to_inference_data(
        run(sgld(model), X, X[:7], Y), coords={"groups": list("abc")}
    )
    posterior = group(idata, "posterior")
    assert posterior["w"].dims == ("chain", "draw", "groups")
    assert posterior["v"].dims == ("chain", "draw", "groups", "v_dim_1")
    assert posterior["w"].coords["groups"].to_numpy().tolist() == list("abc")


# -- numbers that MCMC traces, data that change ----------------------------------------


def test_a_batch_size_among_traced_arguments():
    """``MCMC(jit_model_args=True)`` traces all numbers; a plate must know its size."""
    traced = run(sgld(), X, Y, jit=True, batch_size=BATCH)
    np.testing.assert_allclose(
        traced.get_samples()["w"], on_arrays().get_samples()["w"], rtol=1e-4
    )
    with pytest.raises(
        ValueError, match=r"'batch_size'\]\": 10} after a run with .*6}"
    ):
        traced.run(jax.random.key(0), X, Y, batch_size=10)


def test_data_changed_after_the_run_are_refused():
    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)

    data = X.copy(), Y.copy()
    mcmc = run(HMC(model), *data)
    to_inference_data(mcmc)
    for array in data:
        array[3] += 9.0
        with pytest.raises(ValueError, match="changed in place"):
            to_inference_data(mcmc)
        array[3] = (X if array.ndim == 2 else Y)[3]
        to_inference_data(mcmc)
