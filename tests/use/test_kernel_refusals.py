"""Models and data that the kernels refuse, and those they must not."""

import re
import warnings

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from helpers import each, mala, refused
from numpyro import handlers
from zoo import BATCH, ZOO, N

import numpyro_bnn as bnn
from numpyro_bnn import infer, sgmcmc

pytestmark = pytest.mark.core

B = BATCH
LINE = ZOO["line"]


def started(model, *args, kernel=infer.SGLD, **kwargs):
    """The first state of a kernel: every refusal comes before the first step."""
    kernel = kernel(model, 1e-4) if isinstance(kernel, type) else kernel
    return kernel.init(jax.random.key(0), 0, None, args, kwargs)


def observed(name, mean, value):
    return numpyro.sample(name, dist.Normal(mean, 1.0), obs=value)


def inside(body, size=B, rows=N):
    """A model with one weight, and ``body(w, x, y, i)`` in a subsampled plate."""

    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", rows, subsample_size=size) as i:
            body(w, x, y, i)

    return model


def then(body, outside=False):
    """A site on rows of the minibatch, and another one as ``body`` says: in the plate,
    entered twice, or outside.
    """

    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        plate = numpyro.plate("data", N, subsample_size=B)
        with plate as i:
            observed("y", w * x[i, 0], y[i])
        if outside:
            body(w, x, y, i)
            return
        with plate as i:
            body(w, x, y, i)

    return model


def under(handler):
    """A second site whose rows are right, under a handler that ``handler(x)`` makes of
    the first rows.
    """

    def body(w, x, y, i):
        with handler(x):
            observed("v", w, y[i])

    return then(body)


# -- models that would be silently wrong -----------------------------------------------


def discrete(x, y):
    k = numpyro.sample("k", dist.Bernoulli(0.5))
    with numpyro.plate("data", N):
        observed("y", k.astype(float), y)


def second_plate(w, x, y, i):
    with numpyro.plate("others", 2 * N, subsample_size=B):
        observed("v", w, y[:B])


def short_columns(x, y):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    columns = numpyro.plate("columns", 5, subsample_size=2, dim=-1)
    with numpyro.plate("rows", N, subsample_size=B, dim=-2) as i, columns as j:
        observed("y", w, x[i[:, None], j])


def latent_outside(x, y):
    plate = numpyro.plate("data", N, subsample_size=B)
    with plate as i:
        rows = y[i]
    w = numpyro.sample("w", dist.Normal(rows.mean(), 1.0))
    with plate:
        observed("y", w, rows)


def outside_the_columns(x, y):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    with numpyro.plate("columns", 2, subsample_size=1, dim=-1) as j:
        observed("v", w, x[0, j])
    with numpyro.plate("rows", N, subsample_size=B, dim=-2) as i:
        observed("y", w, x[i[:, None], j])


def log_density(w, y):
    return dist.Normal(w, 1.0).log_prob(y)


WRONG = {
    "discrete": (discrete, "discrete latent site 'k'"),
    "unused indices": (
        inside(lambda w, x, y, i: observed("y", w, y[:B])),
        "plate 'data', whose indices the likelihood does not use",
    ),
    "second plate": (then(second_plate, outside=True), "plate 'others', whose indices"),
    "no observation": (
        inside(lambda w, x, y, i: numpyro.deterministic("f", w * y[i])),
        "plate 'data', whose indices",
    ),
    "short": (
        inside(
            lambda w, x, y, i: observed("y", w, jnp.take(y, i, mode="clip")), rows=2 * N
        ),
        f"plate 'data' of size {2 * N} that indexes an array with {N} rows",
    ),
    "short columns": (
        short_columns,
        "plate 'columns' of size 5 that indexes an array with 2 rows",
    ),
    "outside": (
        then(lambda w, x, y, i: observed("v", w * x[i, 0], y[i]), outside=True),
        "'v' outside of plate 'data', whose indices",
    ),
    "factor": (
        then(
            lambda w, x, y, i: numpyro.factor("f", log_density(w, y[i]).sum()),
            outside=True,
        ),
        "'f' outside of plate 'data', whose indices",
    ),
    "latent": (latent_outside, "'w' outside of plate 'data', whose indices"),
    "columns": (outside_the_columns, "'y' outside of plate 'columns', whose indices"),
    "single row": (
        inside(lambda w, x, y, i: observed("y", w * x[i, 0], y), size=1),
        "'y' in plate 'data', whose value is not one row",
    ),
} | {
    name: (model, "'v' in plate 'data'")
    for name, model in {
        "shared by all rows": then(lambda w, x, y, i: observed("v", w, y.mean())),
        "first rows": then(lambda w, x, y, i: observed("v", w * x[i, 0], y[:B])),
        "predictor of first rows": then(
            lambda w, x, y, i: observed("v", w * x[:B, 0], y[i])
        ),
        "mask of first rows": under(lambda x: handlers.mask(mask=(x[:, 0] > 0)[:B])),
        "scale of first rows": under(lambda x: handlers.scale(scale=x[:B, 0] ** 2)),
        "sum as factor": then(
            lambda w, x, y, i: numpyro.factor("v", log_density(w, y[i]).sum())
        ),
        "factor of first rows": then(
            lambda w, x, y, i: numpyro.factor("v", log_density(w, y[:B]))
        ),
    }.items()
}


@pytest.mark.parametrize("name", WRONG)
def test_models_that_would_be_silently_wrong_are_refused(name):
    model, message = WRONG[name]
    with refused("model", message) as caught:
        started(model, *LINE.args)
    assert str(caught.value).startswith("infer.SGLD: ")


@pytest.mark.parametrize("indexed", ["x", "y"])
def test_arrays_that_are_not_indexed_are_named_where_shapes_clash(indexed):
    def body(w, x, y, i):
        x, y = (x[i], y) if indexed == "x" else (x, y[i])
        observed("y", w * x[:, 0], y)

    with refused("model", "minibatch") as caught:
        started(inside(body), *LINE.args)
    assert re.search(r"Index every array.*`x\[i\]`", str(caught.value))


def test_errors_of_a_model_stay_its_own():
    with pytest.raises(TypeError, match="dot_general"):
        started(
            inside(lambda w, x, y, i: observed("y", x[i] @ jnp.ones(3), y[i])),
            *LINE.args,
        )


def test_pre_seeded_models_are_refused():
    """Also inside the compiled programs in which parallel chains start."""
    kernel = infer.SGLD(handlers.seed(LINE.model, 7), 1e-4)
    keys = jax.random.split(jax.random.key(0), 1)
    with refused("model", "already seeded"):
        jax.vmap(lambda key: kernel.init(key, 0, None, LINE.args, {"batch_size": B}).z)(
            keys
        )


def test_batch_sizes_above_the_data_are_refused():
    with pytest.raises(
        ValueError, match=rf"subsample_size` got {N + 1} for plate 'data' of size {N}"
    ):
        started(LINE.model, *LINE.args, batch_size=N + 1)
    with pytest.raises(ValueError, match="batch_size"):
        started(bnn.models.regression(bnn.nn.MLP([1])), *LINE.args, batch_size=N + 1)


def test_changed_sizes_are_refused_on_resume():
    kernel, (x, y) = infer.SGLD(LINE.model, 1e-4), LINE.args
    state = kernel.init(jax.random.key(0), 0, None, (x, y), {"batch_size": B})
    sizes = rf"plate 'data' has size and subsample size \({N - 4}, {B}\).*\({N}, {B}\)"
    with pytest.raises(ValueError, match=sizes):
        kernel.sample(state, (x[4:], y[4:]), {"batch_size": B})


@pytest.mark.parametrize(
    "make",
    [
        lambda model: mala(model, 0.1),
        lambda model: infer.SGLD(model, 0.1, gradient="control_variates"),
    ],
    ids=["MALA", "control variates"],
)
def test_random_potentials_are_refused_where_one_value_is_needed(make):
    entry = ZOO["random inside"]
    with refused("model", "random numbers of its own"):
        started(entry.model, *entry.args, kernel=make(entry.model))


def test_slow_gathers_of_jaxlib_on_cuda_are_announced(monkeypatch):
    """Six rows look up each of four effects; a line has none; later ones are fast."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for version, entry, warns in [
        ("0.10.2", "groups", True),
        ("0.11.0", "groups", True),
        ("0.11.0", "line", False),
        ("0.11.1", "groups", False),
    ]:
        monkeypatch.setattr(jaxlib, "__version__", version)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            model = ZOO[entry].model
            started(model, *ZOO[entry].args, kernel=infer.SGLD(model, 0.1))
        texts = [str(entry.message) for entry in seen]
        assert any("Install jaxlib 0.11.1" in text for text in texts) == warns, version


# -- what must not be refused ----------------------------------------------------------


def groups(w, x, y, i):
    """The group of a point is data; effects by group are shorter, and right."""
    observed("y", (w * jnp.arange(3.0))[(jnp.arange(N) % 3)[i]], y[i])


def table(x, y):
    """Two nested plates that index one array by different axes, the longer one last."""
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    rows = numpyro.plate("rows", N, subsample_size=B, dim=-2)
    with numpyro.plate("columns", 2, subsample_size=1, dim=-1) as j, rows as i:
        observed("y", w, x[i[:, None], j])


def normalized(x, y):
    """Batch normalization: every row depends on the whole minibatch."""
    bnn.models.regression(bnn.nn.MLP([4, 1], norm=bnn.nn.BatchNorm()))(
        x, y, batch_size=B
    )


def compiled_parts(x, y):
    """One compiled function gives the mean of rows and a penalty without them."""
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", N, subsample_size=B) as i:
        mean, penalty = jax.jit(lambda x, i, w: (w * x[i, 0], jnp.square(w)))(x, i, w)
        observed("y", mean, y[i])
    numpyro.factor("penalty", -penalty)


RIGHT = {
    "groups": inside(groups),
    "table": table,
    "normalized": normalized,
    "compiled parts": compiled_parts,
    "subsample": then(
        lambda w, x, y, i: observed(
            "v", w * numpyro.subsample(x, event_dim=1)[:, 0], y[i]
        )
    ),
}


@each("name", RIGHT, slow=("normalized", "compiled parts"))
def test_right_models_are_accepted(name):
    state = started(RIGHT[name], *LINE.args)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.z))


def test_deterministic_sites_of_one_minibatch_are_left_out_of_the_draws():
    """Also where they stand outside of the plate whose rows they show."""

    def body(w, x, y, i):
        numpyro.deterministic("residual", y[i] - w)
        numpyro.deterministic("square", w**2)

    model = then(body, outside=True)
    kernel = infer.SGLD(model, 1e-4)
    state = kernel.init(jax.random.key(0), 0, None, LINE.args, {})
    assert set(kernel.postprocess_fn(LINE.args, {})(state.z)) == {"w", "square"}


# -- options that do not fit the model; those that do not fit together are in `test_bad_


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: {"v": 1.0}, "w"),
        (lambda: np.ones(3), "shape (3,)"),
        (lambda: -1.0, "positive"),
        (lambda: np.array([[1.0, 2.0], [2.0, 1.0]]), "eigenvalue"),
    ],
    ids=["site", "length", "negative", "indefinite"],
)
def test_preconditioners_that_do_not_fit_the_model_are_refused(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        started(
            LINE.model,
            *LINE.args,
            kernel=infer.SGLD(LINE.model, 0.1, preconditioner=make()),
        )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: infer.PSGLD(model, 0.1), "num_warmup"),
        (
            lambda model: mala(model, 0.1, preconditioner=sgmcmc.RMSProp(running=True)),
            "frozen",
        ),
        (
            lambda model: infer.MCLMC(model, preconditioner="gradient_noise"),
            "have no noise",
        ),
    ],
)
def test_preconditioners_that_a_run_cannot_learn_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        started(LINE.model, *LINE.args, kernel=make(LINE.model))


def test_rows_of_a_model_that_needs_all_of_them_cannot_be_held_out():
    def whole(x, y):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with numpyro.plate("data", N):
            observed("y", x @ w, y)

    def bare(x, y):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(x @ w, 0.5).to_event(1), obs=y)

    for model in (whole, bare):
        with refused("warm_start", "held_out of a model"):
            kernel = infer.MCLMC(model, warm_start=infer.WarmStart(held_out=0.1))
            kernel.init(jax.random.key(0), 4, None, LINE.args, {})


def test_members_need_a_warm_start():
    kernel = infer.MCLMC(LINE.model, warm_start=0.0)
    state = kernel.init(jax.random.key(0), 4, None, LINE.args, {})
    with pytest.raises(ValueError, match="without warm start"):
        kernel.members(state, LINE.args, {})


def test_missing_numbers_are_named_where_chains_start():
    def model(y):
        observed("y", numpyro.sample("w", dist.Normal(0.0, 1.0)), y)

    kernel = infer.SGHMC(model, warm_start=infer.WarmStart(spread=2.0))
    with refused("args[0][0]", "1 NaN"):
        started(model, np.array([1.0, np.nan]), kernel=kernel)
