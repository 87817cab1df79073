"""Arguments of models: NumPy, pandas and lists as data, integers as parameters, lengths of rows, traced numbers."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

from numpyro_bnn import _arviz, guides, infer, metrics, models, nn, random_network, symmetry, to_inference_data
from numpyro_bnn.program.arguments import Arguments, as_arrays

pytestmark = pytest.mark.core

N = 20
X = np.random.default_rng(0).normal(size=(N, 2)).astype(np.float32)
Y = np.sin(X[:, 0])
NET = nn.MLP([3, 1], "tanh")


def own(x, y=None, batch_size=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("data", x.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=None if y is None else y[i])


def sgld(model=own):
    return infer.SGLD(model, 1e-3, steps_per_draw=2)


def draws(kernel, *args, chains=1, jit=False, **kwargs):
    mcmc = MCMC(
        kernel,
        num_warmup=2,
        num_samples=3,
        num_chains=chains,
        chain_method="vectorized",
        progress_bar=False,
        jit_model_args=jit,
    )
    mcmc.run(jax.random.key(0), *args, **kwargs)
    return mcmc


def fit(*args, model=own, **kwargs):
    svi = SVI(model, AutoNormal(model), numpyro.optim.Adam(0.1), Trace_ELBO())
    return guides.fit(svi, jax.random.key(0), 3, *args, progress_bar=False, **kwargs)


CALLS = {
    "kernel": lambda x, y: draws(sgld(), x, y, batch_size=np.int64(5)).get_samples()["w"],
    "wrapper": lambda x, y: draws(
        infer.OrbitMoves(sgld(), symmetry.Permutation([("w", 0)]), exact=False), x, y
    ).get_samples()["w"],
    "fit": lambda x, y: fit(x, y, batch_size=np.int64(5)).params["w_auto_loc"],
    "adf": lambda x, y: (
        guides.AutoADF(own)
        .run(jax.random.key(0), x, y, num_epochs=np.int64(1), progress_bar=False)
        .params["w_auto_loc"]
    ),
    "export": lambda x, y: _arviz.group(to_inference_data(draws(sgld(), x, y), {"x": x}), "predictions")[
        "y"
    ].to_numpy(),
    "find": lambda x, y: jnp.zeros(len(symmetry.find(models.regression(NET), x, y))),
}


@pytest.mark.parametrize("call", CALLS)
def test_tables_lists_and_numpy_arrays_are_data(call):
    """Also where a model indexes them by traced indices, and with integers as parameters of its distributions."""
    expected = np.asarray(CALLS[call](jnp.asarray(X), jnp.asarray(Y)))
    assert np.isfinite(expected).all()
    for x, y in [(X, Y), (pd.DataFrame(X), pd.Series(Y)), (X.tolist(), Y.tolist())]:
        np.testing.assert_allclose(CALLS[call](x, y), expected, rtol=1e-5, atol=1e-6)


def test_integer_indices_of_numpy_are_found():
    """NumPy's int64 met int32 inside a program compiled for float64."""

    def model(x, group, y=None):
        effect = numpyro.sample("effect", dist.Normal(0, 1).expand([4]).to_event(1))
        net = random_network("net", NET, (2,))
        with numpyro.plate("data", len(group)):
            numpyro.sample("y", dist.Normal(net(x)[..., 0] + effect[group], 1), obs=y)

    group = np.arange(N) % 4
    found = [s.name for s in symmetry.find(model, X, group, Y)]
    assert "Permutation(net/Dense_0.kernel)" in found
    assert found == [s.name for s in symmetry.find(model, jnp.asarray(X), jnp.asarray(group), jnp.asarray(Y))]


def test_settings_stay_what_they_are():
    given = ((3, 4), "tanh", None, ["a", "b"], [np.zeros(2), np.ones(3)], [[1, 2], [3]]), {"n": 2, "flag": True}
    args, kwargs = as_arrays(*given)
    assert args[:4] == given[0][:4]
    assert kwargs == given[1]
    assert args[5] == given[0][5]
    assert isinstance(args[4][1], jax.Array)
    assert jax.jit(lambda: isinstance(as_arrays((np.ones(2),), {})[0][0], jax.core.Tracer) * jnp.ones(()))() == 0


# ---------------------------------------------------------------------------------------- rows and their numbers

ROWS = {
    "kernel": lambda x, y: draws(sgld(), x, y),
    "minibatches": lambda x, y: draws(sgld(), x, y, batch_size=5),
    "fit": fit,
    "fit of minibatches": lambda x, y: fit(x, y, batch_size=5),
    "adf": lambda x, y: guides.AutoADF(own).run(jax.random.key(0), x, y, num_epochs=1, progress_bar=False),
    "export": lambda x, y: to_inference_data(draws(NUTS(own), jnp.asarray(x), jnp.asarray(y))),
}


@pytest.mark.parametrize("call", ROWS)
@pytest.mark.parametrize("rows", [N - 5, N + 5])
def test_targets_with_more_or_fewer_rows_than_inputs_are_refused(call, rows):
    """Surplus rows were ignored; for missing ones JAX repeats the last."""
    with pytest.raises(ValueError, match=rf"{rows} rows"):
        ROWS[call](X, np.ones(rows, np.float32))


def test_arrays_that_no_plate_indexes_may_have_other_lengths():
    def model(x, centers, y=None):
        with numpyro.plate("data", len(x)) as i:
            distance = jnp.sum((x[i][:, None] - centers) ** 2, -1)
            numpyro.sample("y", dist.Normal(distance @ jnp.ones(len(centers)), 1.0), obs=None if y is None else y[i])

    def sampled(x, centers, y=None):
        numpyro.sample("w", dist.Normal(0, 1))
        model(x, centers, y)

    draws(sgld(sampled), X, X[:7], Y)


# -------------------------------------------------------------------------------- numbers that MCMC would trace


@pytest.mark.parametrize("chains", [1, 2])
def test_a_batch_size_among_traced_arguments(chains):
    """``MCMC(jit_model_args=True)`` passes all numbers as traced arrays; a plate must know its size."""
    traced = draws(sgld(), X, Y, chains=chains, jit=True, batch_size=5)
    expected = draws(sgld(), X, Y, chains=chains, batch_size=5).get_samples()["w"]
    np.testing.assert_allclose(traced.get_samples()["w"], expected, rtol=1e-4)
    with pytest.raises(ValueError, match=r"'batch_size'\]\": 10} after a run with .*5}"):
        traced.run(jax.random.key(0), X, Y, batch_size=10)


def test_wrappers_know_the_batch_size_too():
    model = models.regression(NET)
    kernel = infer.OrbitMoves(sgld(model), symmetry.from_network(NET, (2,)))
    assert np.isfinite(draws(kernel, X, Y, 5, jit=True).get_samples()["net/Dense_0.kernel"]).all()


MEMORY = """
import resource, sys, jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, warnings
from numpyro.infer import MCMC, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
import numpyro_bnn as bnn
def model(x, y, batch_size):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([50]).to_event(1))
    with numpyro.plate("data", x.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, 0.5), obs=y[i])
n = int(sys.argv[2])
x, y, key = jnp.full((n, 50), 0.1), jnp.ones(n), jax.random.key(0)
if sys.argv[1] == "fit":
    svi = SVI(model, AutoNormal(model), numpyro.optim.Adam(0.01), Trace_ELBO())
    bnn.guides.fit(svi, key, 5, x, y, batch_size=100, progress_bar=False)
else:
    kernel = bnn.infer.SGLD(model, 1e-6, steps_per_draw=2)
    jit = sys.argv[1] == "traced"
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        mcmc = MCMC(kernel, num_warmup=2, num_samples=2, progress_bar=False, jit_model_args=jit)
        mcmc.run(key, x, y, batch_size=100)
    assert any("constants" in str(w.message) for w in found) == (not jit and n > 1000), found
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10)
"""


def peak(how, rows):
    command = [sys.executable, "-c", MEMORY, how, str(rows)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "most"), [("fit", 1.4), ("traced", 2.2)])
def test_data_are_arguments_of_programs(how, most):
    """Peak memory beyond that of a small run, in units of the data. ``MCMC`` itself copies traced arguments once."""
    rows, mebibytes = 1_200_000, 1_200_000 * 51 * 4 / 2**20
    assert (peak(how, rows) - peak(how, 1000)) / mebibytes < most


# ---------------------------------------------------------------------------------------------- after the run


@pytest.mark.parametrize("kernel", [sgld, NUTS], ids=["sgld", "nuts"])
@pytest.mark.parametrize("which", ["x", "y"])
def test_data_changed_after_the_run_are_refused(kernel, which):
    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)

    data = {"x": X.copy(), "y": Y.copy()}
    mcmc = draws(kernel(model), data["x"], data["y"])
    to_inference_data(mcmc)
    data[which][3] += 9.0
    with pytest.raises(ValueError, match="changed in place"):
        to_inference_data(mcmc)


def test_plates_name_the_axes_of_latent_sites():
    def model(x, y=None):
        with numpyro.plate("groups", 3, dim=-1):
            w = numpyro.sample("w", dist.Normal(0, 1).expand([1]).expand([3]))
            v = numpyro.sample("v", dist.Normal(0, 1).expand([3, 2]).to_event(1))
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(x @ v.sum(0) + w.sum(), 1), obs=y)

    held = _arviz.group(to_inference_data(draws(sgld(model), X, Y), coords={"groups": list("abc")}), "posterior")
    assert held["w"].dims == ("chain", "draw", "groups")
    assert held["v"].dims == ("chain", "draw", "groups", "v_dim_1")
    assert held["w"].coords["groups"].to_numpy().tolist() == list("abc")


def test_many_training_rows_are_predicted_only_when_asked(monkeypatch):
    monkeypatch.setattr("numpyro_bnn.results.exporter.MOST_ROWS", N - 1)
    done = draws(sgld(), X, Y)
    with pytest.warns(UserWarning, match=f"of {N} training rows.*posterior_predictive=True"):
        assert "posterior_predictive" not in _arviz.group_names(to_inference_data(done))
    assert "posterior_predictive" in _arviz.group_names(to_inference_data(done, posterior_predictive=True))
    monkeypatch.setattr("numpyro_bnn.results.exporter.MOST_ROWS", N)
    assert "posterior_predictive" in _arviz.group_names(to_inference_data(done))


def test_a_score_prints_in_a_line():
    score = metrics.Score(1.23456789, 0.0123, np.zeros(1000))
    assert repr(score) == str(score) == "Score(value=1.2346, standard_error=0.012, N=1000)"


def test_a_call_is_made_again_with_other_leaves():
    """Of a model with every kind of parameter; a keyword argument may have the name of none of them."""

    def full(x, *more, scale=1.0, **others):
        pass

    given = Arguments.of((1, 2, 3), {"scale": 4, "shift": {"a": 5}}, full)
    assert given.values == {"x": 1, "more": (2, 3), "scale": 4, "shift": {"a": 5}}
    assert given.call({"more[1]": 6, "shift['a']": 7}) == ((1, 2, 6), {"scale": 4, "shift": {"a": 7}})
    unnamed = Arguments.of((1, 2), {"x": 3})
    assert unnamed.call({"_[1]": 4}) == ((1, 4), {"x": 3})
