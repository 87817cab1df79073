"""What the kernels refuse, and what they say when a chain diverges."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.contrib.module import random_nnx_module
from numpyro.infer import MCMC, NUTS

import numpyro_bnn
from numpyro_bnn import infer, sgmcmc

pytestmark = pytest.mark.core

N, B = 60, 10
X = jnp.asarray(np.random.default_rng(0).normal(size=(N, 2)), jnp.float32)
Y = X @ jnp.array([1.0, -0.5]) + 0.3 * jnp.asarray(np.random.default_rng(1).normal(size=N), jnp.float32)


def regression(x, y, batch_size=None, size=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("data", size or x.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, 0.3), obs=y[i])


def start(model, *args, kernel=infer.SGLD, num_warmup=0, **kwargs):
    """Initialize a kernel: every refusal comes before the first step."""
    kernel = kernel(model, 1e-4) if isinstance(kernel, type) else kernel
    return kernel.init(jax.random.key(0), num_warmup, None, args, kwargs)


# -- models that would be silently wrong ------------------------------------------------------------


def discrete(x, y):
    k = numpyro.sample("k", dist.Bernoulli(0.5))
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.Normal(k.astype(float), 1.0), obs=y)


def discrete_in_plate(x, y):
    with numpyro.plate("data", N, subsample_size=B) as i:
        k = numpyro.sample("k", dist.Bernoulli(0.5), infer={"enumerate": "parallel"})
        numpyro.sample("y", dist.Normal(k.astype(float), 1.0), obs=y[i])


def unused_indices(x, y):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", N, subsample_size=B):
        numpyro.sample("y", dist.Normal(w, 1.0), obs=y[:B])


def one_of_two_unused(x, y):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", N, subsample_size=B) as i:
        numpyro.sample("y", dist.Normal(w, 1.0), obs=y[i])
    with numpyro.plate("others", 2 * N, subsample_size=B):
        numpyro.sample("v", dist.Normal(w, 1.0), obs=y[:B])


def no_observation(x, y):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", N, subsample_size=B) as i:
        numpyro.deterministic("f", w * y[i])


def short_by_take(x, y):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", 2 * N, subsample_size=B) as i:
        numpyro.sample("y", dist.Normal(w, 1.0), obs=jnp.take(y, i, mode="clip"))


def short_columns(x, y):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    with (
        numpyro.plate("rows", N, subsample_size=B, dim=-2) as i,
        numpyro.plate("columns", 5, subsample_size=2, dim=-1) as j,
    ):
        numpyro.sample("y", dist.Normal(w, 1.0), obs=x[i[:, None], j])


def observed_outside(x, y):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", N, subsample_size=B) as i:
        mean, values = numpyro.deterministic("mean", w * x[i, 0]), numpyro.subsample(y, event_dim=0)
    numpyro.sample("y", dist.Normal(mean, 1.0), obs=values)


def factor_outside(x, y):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", N, subsample_size=B) as i:
        numpyro.sample("y", dist.Normal(w, 1.0), obs=y[i])
    numpyro.factor("f", dist.Normal(w * x[i, 0], 1.0).log_prob(y[i]).sum())


def latent_outside(x, y):
    plate = numpyro.plate("data", N, subsample_size=B)
    with plate as i:
        rows = y[i]
    w = numpyro.sample("w", dist.Normal(rows.mean(), 1.0))
    with plate:
        numpyro.sample("y", dist.Normal(w, 1.0), obs=rows)


def outside_the_columns(x, y):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    with numpyro.plate("columns", 2, subsample_size=1, dim=-1) as j:
        numpyro.sample("v", dist.Normal(w, 1.0), obs=x[0, j])
    with numpyro.plate("rows", N, subsample_size=B, dim=-2) as i:
        numpyro.sample("y", dist.Normal(w, 1.0), obs=x[i[:, None], j])


def second_site(observe):
    """One observed site on rows of the minibatch; a second one as ``observe(w, x, y, i)`` says."""

    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        plate = numpyro.plate("data", N, subsample_size=B)
        with plate as i:
            numpyro.sample("y", dist.Normal(w * x[i, 0], 1.0), obs=y[i])
        with plate as i:  # entered twice
            observe(w, x, y, i)

    return model


def single_row(x, y):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", N, subsample_size=1) as i:
        numpyro.sample("y", dist.Normal(w * x[i, 0], 1.0), obs=y)


def masked_first_rows(w, x, y, i):
    with handlers.mask(mask=(x[:, 0] > 0)[:B]):
        numpyro.sample("v", dist.Normal(w, 1.0), obs=y[i])


def scaled_first_rows(w, x, y, i):
    with handlers.scale(scale=x[:B, 0] ** 2):
        numpyro.sample("v", dist.Normal(w, 1.0), obs=y[i])


WRONG_SECOND_SITES = {
    "shared by all rows": lambda w, x, y, i: numpyro.sample("v", dist.Normal(w, 1.0), obs=y.mean()),
    "first rows": lambda w, x, y, i: numpyro.sample("v", dist.Normal(w * x[i, 0], 1.0), obs=y[:B]),
    "mean of rows": lambda w, x, y, i: numpyro.sample("v", dist.Normal(w, 1.0), obs=y[i].mean()),
    "predictor of first rows": lambda w, x, y, i: numpyro.sample("v", dist.Normal(w * x[:B, 0], 1.0), obs=y[i]),
    "mask of first rows": masked_first_rows,
    "scale of first rows": scaled_first_rows,
    "sum as factor": lambda w, x, y, i: numpyro.factor("v", dist.Normal(w, 1.0).log_prob(y[i]).sum()),
    "factor of first rows": lambda w, x, y, i: numpyro.factor("v", dist.Normal(w, 1.0).log_prob(y[:B])),
}


@pytest.mark.parametrize("kernel", [infer.SGLD, infer.MCLMC])
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (observed_outside, r"'y'.*outside of plate 'data', whose indices"),
        (factor_outside, r"'f'.*outside of plate 'data', whose indices"),
        (latent_outside, r"'w'.*outside of plate 'data', whose indices"),
        (outside_the_columns, r"'y'.*outside of plate 'columns', whose indices"),
        (single_row, r"'y' in plate 'data'.*not one row"),
        *((second_site(observe), "'v' in plate 'data'") for observe in WRONG_SECOND_SITES.values()),
    ],
    ids=["outside", "factor", "latent", "columns", "single row", *WRONG_SECOND_SITES],
)
def test_every_site_must_take_its_rows_from_the_plate_where_it_stands(model, message, kernel):
    with pytest.raises(ValueError, match=rf"infer\.{kernel.__name__}: argument `model` got .*{message}"):
        start(model, X, Y, kernel=kernel)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (discrete, r"discrete latent site 'k'"),
        (discrete_in_plate, r"discrete latent site 'k'"),
        (unused_indices, r"plate 'data', whose indices the likelihood does not use.*60/10"),
        (one_of_two_unused, r"plate 'others', whose indices"),
        (no_observation, r"plate 'data', whose indices"),
        (short_by_take, r"plate 'data' of size 120 that indexes an array with 60 rows"),
        (short_columns, r"plate 'columns' of size 5 that indexes an array with 2 rows"),
    ],
)
def test_models_that_would_be_silently_wrong_are_refused(model, message):
    with pytest.raises(ValueError, match=rf"infer\.SGLD: argument `model` got .*{message}"):
        start(model, X, Y)


def scalar_noise(fn, y=lambda y: y, size=None):
    """A model whose observations (B,) may have another shape than their distribution."""

    def model(x, targets):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", N, subsample_size=size) as i:
            numpyro.sample("y", fn(w * x[i, :1]), obs=y(targets[i]))

    return model


@pytest.mark.parametrize(("kernel", "size"), [(infer.MCLMC, None), (infer.SGLD, B)])
@pytest.mark.parametrize(
    ("fn", "y", "own", "data"),
    [
        (lambda f: dist.Normal(f, 1.0), lambda y: y, "({n}, 1)", "({n},)"),
        (lambda f: dist.Normal(f, 1.0).to_event(1), lambda y: y, "({n}, 1)", "({n},)"),
        (lambda f: dist.Normal(f, 1.0).mask(True), lambda y: y, "({n}, 1)", "({n},)"),
        (lambda f: dist.Normal(f[:, 0], 1.0), lambda y: y[:, None], "({n},)", "({n}, 1)"),
    ],
)
@pytest.mark.filterwarnings("ignore:Missing a plate")
def test_observations_that_would_count_once_for_each_other_row_are_refused(fn, y, own, data, kernel, size):
    shapes = re.escape(f"'y' with a distribution of shape {own} and data of shape {data}".format(n=size or N))
    with pytest.raises(ValueError, match=rf"infer\.{kernel.__name__}: argument `model` got the site {shapes}"):
        start(scalar_noise(fn, y, size), X, Y, kernel=kernel)


def network_of(layer):
    """A model with a network of NNX that has a layer in the middle."""
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first, self.last = nnx.Linear(2, 3, rngs=rngs), nnx.Linear(3, 1, rngs=rngs)
            self.layer = layer(nnx, rngs)

        def __call__(self, x):
            return self.last(self.layer(jnp.tanh(self.first(x))))

    net = Net(nnx.Rngs(0))

    def model(x, y, size=None):
        f = random_nnx_module("net", net, numpyro_bnn.priors.Normal())
        with numpyro.plate("data", N, subsample_size=size) as i:
            numpyro.sample("y", dist.Normal(f(x[i])[..., 0], 1.0), obs=y[i])

    return model


LAYERS = {
    "['layer']['mean']": lambda nnx, rngs, hold=False: nnx.BatchNorm(3, use_running_average=hold, rngs=rngs),
    "['layer']['rngs']['count']": lambda nnx, rngs, hold=False: nnx.Dropout(0.1, deterministic=hold, rngs=rngs),
}


@pytest.mark.parametrize(("kernel", "size"), [(infer.MCLMC, None), (infer.SGLD, B)])
@pytest.mark.parametrize("name", LAYERS)
def test_modules_that_change_their_state_are_refused(name, kernel, size):
    """MCMC would hold the state as it starts. One that stays as it is does no harm."""
    pytest.importorskip("flax.nnx")
    named = re.escape(f"net$state['state']{name}")
    with pytest.raises(
        ValueError, match=rf"infer\.{kernel.__name__}: argument `model` got .*{named}.*the model changes"
    ):
        start(network_of(LAYERS[name]), X, Y, size, kernel=kernel)
    start(network_of(partial(LAYERS[name], hold=True)), X, Y, size, kernel=kernel)


def test_wrappers_refuse_the_same_around_kernels_of_numpyro():
    def model(x, y, counts):
        if counts:
            state = numpyro.primitives.mutable("count", {"calls": jnp.zeros(())})
            state["calls"] = state["calls"] + 1
        net = numpyro_bnn.random_network("net", numpyro_bnn.nn.MLP([3, 1], "tanh"), (2,), numpyro_bnn.priors.Normal())
        with numpyro.plate("data", N) as i:
            numpyro.sample("y", dist.Normal(net(x[i])[..., 0] if counts else net(x[i]), 1.0), obs=y[i])

    kernel = infer.OrbitMoves(NUTS(model), numpyro_bnn.symmetry.find(model, X, Y, True))
    for counts, message in ((True, r"count\['calls'\]"), (False, r"\(60, 1\) and data of shape \(60,\)")):
        with pytest.raises(ValueError, match=rf"infer\.OrbitMoves: argument `kernel` got .*{message}"):
            start(model, X, Y, counts, kernel=kernel)


@pytest.mark.parametrize("indexed", ["x", "y"])
def test_arrays_that_are_not_indexed_are_named_where_shapes_clash(indexed):
    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", N, subsample_size=B) as i:
            x, y = (x[i], y) if indexed == "x" else (x, y[i])
            numpyro.sample("y", dist.Normal(w * x[:, 0], 1.0), obs=y)

    with pytest.raises(
        ValueError, match=r"infer\.SGLD: argument `model` got .*minibatch.*Index every array.*`x\[i\]`"
    ):
        start(model, X, Y)


def test_errors_of_a_model_stay_its_own():
    def model(x, y):
        with numpyro.plate("data", N, subsample_size=B) as i:
            numpyro.sample("y", dist.Normal(x[i] @ jnp.ones(3), 1.0), obs=y[i])

    with pytest.raises(TypeError, match="dot_general"):
        start(model, X, Y)


def test_data_smaller_than_the_plate_is_refused():
    with pytest.raises(ValueError, match="size 600 that indexes an array with 60 rows"):
        start(regression, X, Y, batch_size=B, size=600)


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap], ids=["jit", "vmap"])
def test_pre_seeded_models_are_refused(transform):
    """Also inside the compiled programs in which parallel chains start."""
    seeded = handlers.seed(regression, 7)
    with pytest.raises(ValueError, match="already seeded"):
        start(seeded, X, Y, batch_size=B)
    kernel = infer.SGLD(seeded, 1e-4)
    with pytest.raises(ValueError, match="already seeded"):
        transform(lambda key: kernel.init(key, 0, None, (X, Y, B), {}).z)(jax.random.split(jax.random.key(0), 1))


def test_batch_sizes_above_the_data_are_refused():
    with pytest.raises(ValueError, match=r"subsample_size` got 61 for plate 'data' of size 60"):
        start(regression, X, Y, batch_size=N + 1)
    model = numpyro_bnn.models.regression(numpyro_bnn.nn.MLP([1]))
    with pytest.raises(ValueError, match="batch_size"):
        start(model, X, Y, batch_size=N + 1)


def test_changed_sizes_are_refused_on_resume():
    kernel = infer.SGLD(regression, 1e-4)
    state = kernel.init(jax.random.key(0), 0, None, (X, Y, B), {})
    with pytest.raises(ValueError, match=r"plate 'data' has size and subsample size \(40, 10\).*\(60, 10\)"):
        kernel.sample(state, (X[:40], Y[:40], B), {})


def dropout(x, y):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    keep = jax.random.bernoulli(numpyro.prng_key(), 0.5)
    with numpyro.plate("data", N, subsample_size=B) as i:
        numpyro.sample("y", dist.Normal(w * keep, 1.0), obs=y[i])


@pytest.mark.parametrize(
    "kernel",
    [infer.MALA(dropout, 0.1), infer.GGMC(dropout, 0.1), infer.SGLD(dropout, 0.1, gradient="control_variates")],
    ids=lambda kernel: type(kernel).__name__,
)
def test_random_potentials_are_refused_where_one_value_is_needed(kernel):
    with pytest.raises(ValueError, match="random numbers of its own"):
        start(dropout, X, Y, kernel=kernel)


# -- what must not be refused -----------------------------------------------------------------------


def groups(x, y):
    """The group of a data point is data; an effect by group is shorter than the data, and right."""
    group = jnp.arange(N) % 3
    effect = numpyro.sample("effect", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with numpyro.plate("data", N, subsample_size=B) as i:
        numpyro.sample("y", dist.Normal(effect[group[i]], 1.0), obs=y[i])


def table(x, y):
    """Two nested plates that index one array by different axes, the longer one first or last."""
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    with (
        numpyro.plate("columns", 2, subsample_size=1, dim=-1) as j,
        numpyro.plate("rows", N, subsample_size=B, dim=-2) as i,
    ):
        numpyro.sample("y", dist.Normal(w, 1.0), obs=x[i[:, None], j])


def seeded_full_batch(x, y):
    return handlers.seed(regression, 3)(x, y)


def normalized(x, y):
    """Batch normalization: every row depends on the whole minibatch, whatever its order."""
    return numpyro_bnn.models.regression(numpyro_bnn.nn.MLP([4, 1], norm=numpyro_bnn.nn.BatchNorm()))(
        x, y, batch_size=B
    )


def columns_share_rows(x, y):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    with numpyro.plate("columns", 2, dim=-2), numpyro.plate("rows", N, subsample_size=B, dim=-1) as i:
        numpyro.sample("y", dist.Normal(w, 1.0), obs=y[i])


def together(x, y, i, w):
    return w * x[i, 0], jnp.square(w)


def compiled(x, y):
    """One compiled function gives the mean of the rows and a penalty that does not depend on them."""
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", N, subsample_size=B) as i:
        mean, penalty = jax.jit(together)(x, y, i, w)
        numpyro.sample("y", dist.Normal(mean, 1.0), obs=y[i])
    numpyro.factor("penalty", -penalty)


RIGHT_SECOND_SITES = {
    "zeros": lambda w, x, y, i: numpyro.sample("v", dist.Poisson(jnp.exp(w * x[i, 0])), obs=0),
    "factor": lambda w, x, y, i: numpyro.factor("v", dist.Normal(w, 1.0).log_prob(y[i])),
    "event": lambda w, x, y, i: numpyro.sample("v", dist.Normal(w, 1.0).expand([2]).to_event(1), obs=x[i]),
    "switched off": lambda w, x, y, i: numpyro.sample("v", dist.Normal(w, 1.0).mask(False), obs=y[i]),
    "subsample": lambda w, x, y, i: numpyro.sample(
        "v", dist.Normal(w * numpyro.subsample(x, event_dim=1)[:, 0], 1.0), obs=y[i]
    ),
}


def several_means(x, y):
    """Two plates: the same observations under several means."""
    with numpyro.plate("means", 3, dim=-2):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", N, subsample_size=B, dim=-1) as i:
            numpyro.sample("y", dist.Normal(w, 1.0), obs=y[i])


RIGHT = [several_means, groups, table, seeded_full_batch, normalized, columns_share_rows, compiled]


@pytest.mark.parametrize("model", [*RIGHT, *map(second_site, RIGHT_SECOND_SITES.values())])
def test_right_models_are_accepted(model):
    state = start(model, X, Y)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.z))


def test_deterministic_sites_of_one_minibatch_are_left_out_of_the_draws():
    """Also where they stand outside of the plate whose rows they show."""

    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", N, subsample_size=B) as i:
            numpyro.sample("y", dist.Normal(w, 1.0), obs=y[i])
        numpyro.deterministic("residual", y[i] - w)
        numpyro.deterministic("square", w**2)

    kernel = infer.SGLD(model, 1e-4)
    state = kernel.init(jax.random.key(0), 0, None, (X, Y), {})
    assert set(kernel.postprocess_fn((X, Y), {})(state.z)) == {"w", "square"}


# -- arguments --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: infer.SGLD("model"), "model"),
        (lambda: infer.SGLD(regression, 0.0), "step_size"),
        (lambda: infer.SGLD(regression, float("nan")), "step_size"),
        (lambda: infer.SGLD(regression, "fast"), "step_size"),
        (lambda: infer.SGLD(regression, temperature=-1.0), "temperature"),
        (lambda: infer.SGLD(regression, temperature=float("inf")), "temperature"),
        (lambda: infer.MALA(regression, temperature=0.0), "temperature"),
        (lambda: infer.GGMC(regression, temperature=0), "temperature"),
        (lambda: infer.SGLD(regression, bias_tolerance=0.0), "bias_tolerance"),
        (lambda: infer.SGLD(regression, steps_per_draw=0), "steps_per_draw"),
        (lambda: infer.SGLD(regression, steps_per_draw=2.5), "steps_per_draw"),
        (lambda: infer.SGLD(regression, warm_start=1.0), "warm_start"),
        (lambda: infer.SGLD(regression, warm_start=-0.1), "warm_start"),
        (lambda: infer.SGLD(regression, gradient="mini_batch"), "gradient.*Did you mean 'minibatch'"),
        (lambda: infer.SGLD(regression, minibatches="epoch"), "minibatches.*Did you mean 'epochs'"),
        (lambda: infer.SGLD(regression, preconditioner="rms"), "preconditioner.*Did you mean 'rmsprop'"),
        (lambda: infer.SGLD(regression, preconditioner="warm_start", warm_start=0), "preconditioner"),
        (lambda: infer.SGHMC(regression, momentum_decay=1.5), "momentum_decay"),
        (lambda: infer.SGHMC(regression, momentum_decay="all"), "momentum_decay"),
        (lambda: infer.SGNHT(regression, momentum_decay=1), "momentum_decay"),
        (lambda: infer.GGMC(regression, momentum_decay=-0.1), "momentum_decay"),
        (lambda: infer.GGMC(regression, num_steps=0), "num_steps"),
        (lambda: infer.GGMC(regression, minibatches="epochs"), "minibatches"),
        (lambda: infer.MALA(regression, gradient="control_variates"), "gradient"),
        (lambda: infer.GHMC(regression, gradient="control_variates"), "gradient"),
        (lambda: infer.GHMC(regression, num_steps=0), "num_steps"),
        (lambda: infer.GHMC(regression, momentum_decay=1.5), "momentum_decay"),
        (lambda: infer.GHMC(regression, jitter=1), "jitter"),
        (lambda: infer.MALA(regression, preconditioner="prior"), "preconditioner"),
        (lambda: infer.SGLD(regression, preconditioner="variance"), "preconditioner"),
        (lambda: infer.MCLMC(regression, temperature=0.0), "temperature"),
        (lambda: infer.MCLMC(regression, decoherence_length=0.0), "decoherence_length"),
        (lambda: infer.MCLMC(regression, integrator="verlet"), "integrator"),
        (lambda: infer.MCLMC(regression, energy_variance=-1.0), "energy_variance"),
        (lambda: infer.MCLMC(regression, energy_variance=(0.1, 0.01, 0.001)), "energy_variance"),
        (lambda: infer.MCLMC(regression, preconditioner="noise"), "preconditioner"),
        (lambda: infer.CyclicalSGLD(regression, None), "step_size"),
        (lambda: infer.CyclicalSGLD(regression, infer.schedules.polynomial(0.1)), "step_size"),
        (lambda: infer.CyclicalSGLD(regression, 0.1, cycle_length=10, draws_per_cycle=8), "draws_per_cycle"),
        (lambda: infer.CyclicalSGLD(regression, 0.1, draws_per_cycle=0), "draws_per_cycle"),
        (lambda: infer.CyclicalSGLD(regression, 0.1, cycle_length=10.5), "cycle_length"),
        (lambda: infer.CyclicalSGLD(regression, 0.1, explore=1.0), "explore"),
        (lambda: infer.CyclicalSGLD(regression, 0.1, steps_per_draw=5), "steps_per_draw"),
        (lambda: infer.CyclicalSGLD(regression, 0.1, warm_start=0.5), "warm_start"),
    ],
)
def test_bad_arguments_are_refused(make, argument):
    with pytest.raises((ValueError, TypeError), match=f"infer.*{argument}|sgmcmc.*{argument}"):
        make()


@pytest.mark.parametrize(
    ("preconditioner", "message"),
    [
        ({"v": 1.0}, "Did you mean|Known: w"),
        (np.ones(3), r"shape \(3,\).*\(2,\)"),
        (np.ones((2, 3)), r"shape \(2, 3\)"),
        (-1.0, "positive"),
        (np.array([[1.0, 2.0], [2.0, 1.0]]), "positive definite"),
        ({"w": np.ones(3)}, r"shape \(3,\)"),
    ],
)
def test_bad_preconditioners_are_refused(preconditioner, message):
    with pytest.raises(ValueError, match=message):
        start(regression, X, Y, B, kernel=infer.SGLD(regression, 0.1, preconditioner=preconditioner))


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (infer.PSGLD(regression, 0.1), "num_warmup"),
        (infer.MALA(regression, 0.1, preconditioner=sgmcmc.RMSProp(running=True)), "frozen"),
    ],
)
def test_bad_combinations_are_refused_at_the_start(kernel, message):
    with pytest.raises(ValueError, match=message):
        start(regression, X, Y, B, kernel=kernel)


@pytest.mark.parametrize("init_params", [{"v": jnp.zeros(2)}, {"w": jnp.zeros(3)}, {}])
def test_bad_initial_values_are_refused(init_params):
    kernel = infer.SGLD(regression, 0.1)
    with pytest.raises(ValueError, match=r"init_params.*w"):
        kernel.init(jax.random.key(0), 0, init_params, (X, Y, B), {})


def test_a_kernel_must_be_initialized():
    with pytest.raises(ValueError, match="Call `init` first"):
        infer.SGLD(regression, 0.1).postprocess_fn((X, Y), {})


# -- divergence -------------------------------------------------------------------------------------


def quadratic():
    """Full-batch SGLD on a unit Gaussian multiplies the position by 1 - eps / 2: without noise all is known."""
    numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))


def test_divergence_is_reported_with_chain_and_step():
    eps = 2.0 * (1 + 1e6)  # each step multiplies by -1e6
    kernel = infer.SGLD(quadratic, eps, temperature=0.0, steps_per_draw=100, warm_start=0.0)
    mcmc = MCMC(kernel, num_warmup=0, num_samples=4, num_chains=3, chain_method="vectorized", progress_bar=False)
    # |w|^2 leaves float32 (3.4e38) when |w| > 1.8e19: from 1 at the fourth step, from 1e9 at the second.
    begin = {"w": jnp.stack([jnp.array([1.0, 1.0]), jnp.array([1e9, 0.0]), jnp.zeros(2)])}
    mcmc.run(jax.random.key(0), init_params=begin)
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["w"])
    diverged = np.asarray(mcmc.get_extra_fields(group_by_chain=True)["diverging"])
    np.testing.assert_array_equal(mcmc.last_state.engine.first_divergence, [3, 1, -1])
    # After 200 steps that are not taken.
    np.testing.assert_array_equal(diverged, [[False, False, True, True], [False, False, True, True], [False] * 4])
    refused = np.asarray(mcmc.get_extra_fields(group_by_chain=True)["refused_steps"])
    np.testing.assert_allclose(refused, [[0.97, 1, 1, 1], [0.99, 1, 1, 1], [0] * 4])
    np.testing.assert_array_equal(np.isnan(draws).all(-1), diverged)
    np.testing.assert_array_equal(draws[2], 0.0)
    expected = r"SGLD diverged \(chain 0 at step 3, chain 1 at step 1\).*NaN.*smaller `step_size`"
    with pytest.warns(UserWarning, match=expected) as caught:
        idata = numpyro_bnn.to_inference_data(mcmc)
    assert caught[0].filename == __file__  # it points at the user's line
    assert idata.attrs["first_divergence"] == "[3, 1, -1]"
    np.testing.assert_array_equal(idata["sample_stats"]["diverging"], diverged)
    single = jax.tree.map(lambda leaf: leaf[0], mcmc.last_state)
    assert kernel.get_diagnostics_str(single) == "100 steps of size 2.00e+06, DIVERGED at step 3"


def test_a_run_whose_first_chain_diverged_is_exported_with_predictions():
    """The other chains are not lost, although NumPyro refuses a normal distribution whose mean is NaN."""
    x = jnp.arange(4.0)

    def regression(x, y=None):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Normal(w * x, 1.0), obs=y)

    kernel = infer.SGLD(regression, 1e7, temperature=0.0, steps_per_draw=300, warm_start=0.0)
    mcmc = MCMC(kernel, num_warmup=0, num_samples=2, num_chains=2, chain_method="vectorized", progress_bar=False)
    mcmc.run(jax.random.key(0), x, x * 0, init_params={"w": jnp.array([1.0, 0.0])})
    with pytest.warns(UserWarning, match="diverged"):
        idata = numpyro_bnn.to_inference_data(mcmc, predictions={"x": x[:3]})
    mean = idata["predictions"]["y_mean"].to_numpy()
    assert np.isnan(mean[0]).all()
    np.testing.assert_array_equal(mean[1], 0.0)
    np.testing.assert_array_equal(idata["posterior"]["marked"], [True, False])


def test_a_diverging_warm_start_is_undone_and_reported():
    """Sampling begins where the optimizer did."""
    kernel = infer.SGLD(quadratic, 0.1, steps_per_draw=5, temperature=0.0, warm_start=0.5, optimizer=_explode())
    mcmc = MCMC(kernel, num_warmup=4, num_samples=2, progress_bar=False)
    mcmc.run(jax.random.key(0), init_params={"w": jnp.ones(2)})
    np.testing.assert_allclose(mcmc.get_samples()["w"][0], 0.95**15, rtol=1e-5)
    idata = numpyro_bnn.to_inference_data(mcmc)
    assert idata.attrs["restarts"] == "[2.0]"
    report = {finding.name: finding for finding in numpyro_bnn.metrics.health(idata).findings}
    assert (report["restarts"].verdict, report["restarts"].value) == ("note", 2)


def _explode():
    import optax

    return optax.sgd(1e30)


def test_quiet_runs_do_not_warn():
    mcmc = MCMC(infer.SGLD(quadratic, 0.1, steps_per_draw=2), num_warmup=4, num_samples=2, progress_bar=False)
    mcmc.run(jax.random.key(0))
    attrs = numpyro_bnn.to_inference_data(mcmc).attrs
    assert attrs["first_divergence"] == "[-1]"
    assert attrs["biased"] == 1
