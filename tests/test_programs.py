"""Programs that are compiled once and used again: by equal computations, and by no others."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from jax.extend.core import ClosedJaxpr
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer import MCMC, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.primitives import Messenger

from numpyro_bnn import guides, infer, models, nn, priors, symmetry, to_inference_data
from numpyro_bnn.program.compiled import run, shared
from numpyro_bnn.program.reading import Reading, arrays_in

X = np.arange(3, dtype=np.float32)


def times(factor):
    return lambda given, args, kwargs: given * (factor * args[0]).sum()


def test_equal_computations_share_a_program(compiled):
    """Another function, other data of the same shape, another value: nothing is compiled."""
    one = jnp.float32(1.0)
    run(times(2.0), one, (X,), {})
    before = len(compiled)
    found = run(times(2.0), jnp.float32(3.0), (X + 1,), {})
    assert len(compiled) == before
    assert float(found) == 36.0


def test_programs_that_run_once_are_kept_for_themselves(compiled):
    """A kernel must not be slow because the same computation was compiled quickly before, also inside another one."""
    fn, counts = times(5.0), []
    for once in (True, False, True):
        before = len(compiled)
        assert float(run(fn, jnp.float32(2.0), (X,), {}, once)) == 30.0
        counts.append(len(compiled) - before)
    assert counts == [1, 1, 0]
    assert float(jax.jit(lambda x: run(fn, x, (X,), {}, once=True))(2.0)) == 30.0


@pytest.mark.parametrize("factor", [3.0, np.float32(3.0), 3 * np.ones(3, np.float32), 3 * jnp.ones(3)], ids=str)
def test_what_a_function_closes_over_is_a_part_of_it(factor):
    """Numbers and arrays, also inside a program of its own."""
    for wrap in (lambda fn: fn, jax.jit):
        for scale in (1, 2, 3):
            closed = scale * factor
            product = wrap(lambda x, closed=closed: (closed * x).sum())
            found = run(lambda given, args, kwargs, p=product: given * p(args[0]), 1.0, (X,), {})
            assert float(found) == 9.0 * scale


def test_long_arrays_that_print_alike_are_told_apart():
    long = np.zeros(5000, np.float32)
    for place in (2000, 3000):
        weights = long.copy()
        weights[place] = 1.0
        for wrap in (lambda fn: fn, jax.jit):
            product = wrap(lambda x, w=weights: w * x)
            found = run(lambda given, args, kwargs, p=product: p(args[0]), 0.0, (np.ones(5000, np.float32),), {})
            assert int(found.argmax()) == place


def test_surroundings_that_change_are_seen():
    factor = {"is": 2.0}

    def fn(given, args, kwargs):
        return given * factor["is"]

    assert float(run(fn, 1.0, (X,), {})) == 2.0
    factor["is"] = 5.0
    assert float(run(fn, 1.0, (X,), {})) == 5.0


def test_host_functions_are_never_shared():
    for add in (1.0, 2.0):

        def fn(given, args, kwargs, add=add):
            return jax.pure_callback(lambda x: np.float32(x + add), jax.ShapeDtypeStruct((), jnp.float32), given)

        assert float(run(fn, jnp.float32(1.0), (X,), {})) == 1.0 + add


@pytest.mark.parametrize("slope", [2.0, 3.0])
def test_derivatives_of_an_author_are_never_shared(slope):
    """Equal values, another derivative, which the text of a program does not show."""

    @jax.custom_jvp
    def f(x):
        return x

    f.defjvp(lambda primals, tangents: (primals[0], slope * tangents[0]))
    found = jax.grad(lambda z: run(lambda given, args, kwargs: f(given), z, (), {}))(1.0)
    assert float(found) == slope


@pytest.mark.parametrize("labels", [np.array([0, 1, 1]), np.array([0, 1, 2])], ids=str)
def test_models_that_compute_shapes_from_data(labels):
    """The number of groups follows from values, which a program of the data as inputs does not have."""

    def model(group, y):
        effect = numpyro.sample("effect", dist.Normal(0.0, 1.0).expand([len(np.unique(group))]).to_event(1))
        with numpyro.plate("data", len(y)):
            numpyro.sample("y", dist.Normal(effect[group], 1.0), obs=y)

    for make in (infer.SGLD, infer.MCLMC, infer.MALA):
        mcmc = MCMC(make(model, step_size=0.5), num_warmup=0, num_samples=2, progress_bar=False)
        mcmc.run(random.key(0), labels, X)
        assert mcmc.get_samples()["effect"].shape == (2, len(np.unique(labels)))
    exported = to_inference_data(mcmc)
    assert exported["posterior_predictive"]["y"].shape == (1, 2, 3)
    np.testing.assert_array_equal(exported["observed_data"]["y"], X)


def test_a_second_kernel_compiles_only_the_loop_of_mcmc(compiled):
    """A new kernel and new data of the same shape: the loop of the new ``MCMC``, and no program of ours."""

    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        s = numpyro.sample("s", dist.HalfNormal(1.0))
        numpyro.deterministic("f", w * x)
        with numpyro.plate("data", len(y)):
            numpyro.sample("y", dist.Normal(w * x, s), obs=y)

    counts = []
    for seed in range(2):
        before = len(compiled)
        mcmc = MCMC(infer.SGLD(model, step_size=1e-3), num_warmup=2, num_samples=2, progress_bar=False)
        mcmc.run(random.key(seed), X + seed, X)
        counts.append(len(compiled) - before)
    assert counts[1] == 1 < counts[0]


@pytest.mark.parametrize("name", ["SGLD", "MCLMC", "OrbitMoves", "ParallelTempering"])
def test_data_are_no_constants_of_the_program(name):
    """Of 4,000 rows none stands in what ``MCMC`` compiles; a copy of large data costs many times their memory."""
    x = np.linspace(-1.0, 1.0, 4000, dtype=np.float32)[:, None]
    model = models.regression(nn.MLP([2, 1]), priors.Hierarchical())
    make = getattr(infer, name)
    if name == "OrbitMoves":
        kernel = make(infer.MALA(model, step_size=1e-3), symmetry.find(model, x, x[:, 0]))
    elif name == "ParallelTempering":
        kernel = make(infer.MALA(model, step_size=1e-3), 2)
    else:
        kernel = make(model)
    mcmc = MCMC(kernel, num_warmup=2, num_samples=2, progress_bar=False)
    mcmc.run(random.key(0), x, x[:, 0])
    program = jax.make_jaxpr(lambda state: kernel.sample(state, (x, x[:, 0]), {}))(mcmc.last_state)
    sizes = [np.size(part) for part in constants_of(program)]
    assert max(sizes, default=0) < len(x)


def constants_of(closed):
    """The arrays that a program and its inner programs hold themselves; references are inputs."""
    for const in closed.consts:
        if not isinstance(const, jax.Ref):
            yield const
    for equation in closed.jaxpr.eqns:
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda part: isinstance(part, ClosedJaxpr)):
            if isinstance(inner, ClosedJaxpr):
                yield from constants_of(inner)


def test_changed_data_are_read_again():
    """A second run of one ``MCMC`` on other data, and on the same table with other values, does not see the first."""
    x = np.array(X)
    mcmc = MCMC(infer.MALA(linear, step_size=0.5), num_warmup=20, num_samples=200, progress_bar=False)
    means = []
    for slope in (3.0, -3.0):
        y = slope * x
        mcmc.run(random.key(0), x, y)
        means.append(float(mcmc.get_samples()["w"].mean()))
    x *= -1.0
    mcmc.run(random.key(0), x, y)
    means.append(float(mcmc.get_samples()["w"].mean()))
    precision = 1.0 + np.sum(X**2)
    expected = np.array([3.0, -3.0, 3.0]) * np.sum(X**2) / precision
    np.testing.assert_allclose(means, expected, atol=5.0 / np.sqrt(20.0 * precision))  # at least 20 effective draws


def test_one_model_in_two_ways_to_map_chains():
    """``chain_method="parallel"`` traces chains in a mesh of devices; its programs are no use to other methods."""
    runs = []
    for method in ("parallel", infer.parallel_vectorized, "vectorized"):
        kernel, options = infer.SGLD(linear, 1e-3), {"num_chains": 2, "chain_method": method, "progress_bar": False}
        mcmc = MCMC(kernel, num_warmup=2, num_samples=3, **options)
        mcmc.run(random.key(0), X, 2 * X)
        runs.append(mcmc.get_samples()["w"])
    for found in runs[1:]:
        np.testing.assert_allclose(found, runs[0], rtol=1e-5)


def linear(x, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(w * x, 1.0), obs=y)


def test_a_second_export_compiles_nothing(compiled):
    """Of another run on other data of the same shape; each has its own data and draws."""
    for seed in range(2):
        mcmc = MCMC(infer.MALA(linear, step_size=0.1), num_warmup=0, num_samples=3, progress_bar=False)
        mcmc.run(random.key(seed), X + seed, 2 * X + seed)
        before = len(compiled)
        found = to_inference_data(mcmc, predictions={"x": X[:2] - seed, "y": X[:2]})
        assert (len(compiled) > before) == (seed == 0)
        w = np.asarray(found["posterior"]["w"])[..., None]
        np.testing.assert_array_equal(found["observed_data"]["y"], 2 * X + seed)
        np.testing.assert_allclose(found["predictions"]["y_mean"], w * (X[:2] - seed), rtol=1e-6)
        expected = dist.Normal(w * (X + seed), 1.0).log_prob(2 * X + seed)
        np.testing.assert_allclose(found["log_likelihood"]["y"], expected, rtol=1e-5)


def test_a_second_export_of_a_guide_compiles_nothing(compiled):
    """A new guide, other parameters, other data of the same shape."""
    counts = []
    for seed in range(2):
        guide = AutoNormal(linear)
        result = SVI(linear, guide, numpyro.optim.Adam(0.1), Trace_ELBO()).run(
            random.key(seed), 3, X + seed, 2 * X + seed, progress_bar=False
        )
        before = len(compiled)
        found = to_inference_data(result, guide=guide, args=(X + seed, 2 * X + seed), num_samples=4)
        counts.append(len(compiled) - before)
        w = np.asarray(found["posterior"]["w"])[..., None]
        expected = dist.Normal(w * (X + seed), 1.0).log_prob(2 * X + seed)
        np.testing.assert_allclose(found["log_likelihood"]["y"], expected, rtol=1e-5)
    assert counts[1] == 0 < counts[0]


@pytest.mark.parametrize("way", ["kernel", "guide"])
def test_a_first_export_compiles_few_programs(way, compiled):
    """No operation by itself; the shapes are new to this process. They were 24 and 13."""
    rows = {"kernel": 21, "guide": 23}[way]
    x = random.normal(random.key(0), (rows, 2))
    if way == "kernel":
        result = MCMC(infer.MALA(line, step_size=0.1), num_warmup=0, num_samples=5, progress_bar=False)
        result.run(random.key(0), x, x[:, 0])
        options = {}
    else:
        guide = guides.AutoMeanField(line)
        svi = SVI(line, guide, numpyro.optim.Adam(0.01), Trace_ELBO())
        result = guides.fit(svi, random.key(0), 5, x, x[:, 0], progress_bar=False)
        options = {"guide": guide, "args": (x, x[:, 0]), "num_samples": 5}
    before = len(compiled)
    to_inference_data(result, **options)
    assert len(compiled) - before <= 10


def test_symmetries_of_other_data_compile_nothing(compiled):
    """Finding them, and preparing moves along them, uses the programs of the data before."""
    net = nn.MLP([5, 1], "relu")
    model = models.regression(net, priors.Hierarchical())
    x = np.linspace(-1, 1, 9, dtype=np.float32)[:, None]
    counts = []
    for seed in range(2):
        before = len(compiled)
        kernel = infer.OrbitMoves(infer.MALA(model, step_size=0.1), symmetry.find(model, x + seed, x[:, 0]))
        kernel.init(random.key(seed), 1, None, (x + seed, x[:, 0]))
        counts.append(len(compiled) - before)
    assert counts[1] == 0 < counts[0] <= 20


def test_a_shared_function_is_traced_once_for_its_shapes(compiled):
    """Also while it is differentiated, and again in float64."""
    traced = []

    def square(x):
        traced.append(x)
        return x * x

    call = shared(square)
    assert [float(call(jnp.float32(x))) for x in (2, 3)] == [4.0, 9.0]
    assert len(traced) == 1
    before = len(compiled)
    assert float(shared(lambda x: x * x)(jnp.float32(5.0))) == 25.0
    assert len(compiled) == before
    assert float(jax.grad(call)(3.0)) == 6.0
    with jax.enable_x64(True):
        assert call(1.0).dtype == jnp.float64


def line(x, y):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)


def fit_mean_field(key, *data):
    svi = SVI(line, guides.AutoMeanField(line), numpyro.optim.Adam(0.01), Trace_ELBO())
    return guides.fit(svi, key, 5, *data, progress_bar=False).params


def fit_adf(key, *data):
    return guides.AutoADF(line).run(key, *data, num_epochs=1, progress_bar=False).params


@pytest.mark.parametrize("fit", [fit_mean_field, fit_adf])
def test_another_guide_on_other_data_compiles_nothing(fit, compiled):
    x = random.normal(random.key(0), (6, 2))
    keys, values = random.split(random.key(1)), np.arange(6, dtype=np.float32)
    first = fit(keys[0], np.asarray(x), values)
    before = len(compiled)
    second = fit(keys[1], np.asarray(x), -values)
    assert len(compiled) == before
    assert all(np.any(first[name] != second[name]) for name in first)


class Note(Messenger):
    """Note whether any latent site has a number instead of a placeholder."""

    eager = False

    def postprocess_message(self, msg):
        latent = msg["type"] == "sample" and not msg["is_observed"]
        self.eager |= latent and not isinstance(msg["value"], jax.core.Tracer)


def precisions(x, y=None, batch_size=None):
    tau = numpyro.sample("tau", dist.Gamma(2.0, 1.0))
    w = numpyro.sample("w", dist.Normal(0.0, tau**-0.5).expand([1, 4]).to_event(2))
    v = numpyro.sample("v", dist.Normal(0.0, 1.0).expand([4]).to_event(1))
    with numpyro.plate("data", x.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(jnp.tanh(x[i, None] @ w) @ v, 1.0), obs=None if y is None else y[i])


UNITS = [symmetry.Permutation([("w", 1), ("v", 0)])]
MALA = partial(infer.MALA, step_size=0.1)
# What reads a model, and how often it may call it.
READERS = {
    "find": (lambda model: symmetry.find(model, X, X), 2),
    "check": (lambda model: symmetry.check(model, UNITS, (X, X)), 1),
    "quotient": (lambda model: symmetry.quotient(model, UNITS, X, X), 2),
    "collapse": (lambda model: infer.collapse(model, ["v"], X, X), 1),
    "conjugate_sites": (lambda model: infer.PrecisionGibbs(model).conjugate_sites(X, X), 1),
    "PrecisionGibbs": (lambda model: infer.PrecisionGibbs(handlers.condition(model, {"w": W, "v": W[0]})), 1),
    "MALA": (MALA, 3),
    "OrbitMoves": (lambda model: infer.OrbitMoves(MALA(model), UNITS), 5),
    "UnitMoves": (lambda model: infer.UnitMoves(MALA(model), {"w": 1}), 4),
    "minibatches": (lambda model: infer.SGLD(partial(model, batch_size=2), step_size=1e-3), 3),
}
W = jnp.ones((1, 4))


@pytest.mark.filterwarnings("ignore:symmetry.find")
@pytest.mark.parametrize("name", READERS)
def test_models_are_read_without_running_them(name):
    """No model is run operation by operation, each of which would be compiled; nor is it called again and again."""
    calls = []

    def model(*args, **kwargs):
        note = Note()
        with note:
            precisions(*args, **kwargs)
        calls.append(note.eager)

    read, most = READERS[name]
    found = read(model)
    if hasattr(found, "init"):
        found.init(random.key(0), 1, None, (jnp.asarray(X), jnp.asarray(X)))
    assert 1 <= len(calls) <= most
    assert not any(calls)


def test_values_reach_the_inside_of_loops():
    def model(y):
        s = numpyro.sample("s", dist.HalfNormal(1.0))

        def step(before, y):
            z = numpyro.sample("z", dist.Normal(before, s))
            numpyro.sample("y", dist.Normal(z, 1.0), obs=y)
            return z, z

        numpyro.deterministic("last", scan(step, 0.0, y)[0])

    reading = Reading(model, (X,))
    assert reading.latent == ("s", "z")
    assert float(reading.at({"z": jnp.array([5.0, 6.0, 7.0])})["last"]["value"]) == 7.0
    depends = reading.depends(lambda sites: {"last": sites["last"]["value"], "y": sites["y"]["fn"]})
    assert all("z" in used for used in depends.values())  # a loop mixes what it is given


def test_data_that_shape_a_model_are_a_part_of_it_and_others_are_inputs():
    """The sites follow from the data that are inputs; each is known by its place among the arguments."""

    def model(group, x, y):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([len(np.unique(group))]).to_event(1))
        f = numpyro.deterministic("f", w[group] * x)
        numpyro.sample("y", dist.Normal(f, 1.0).to_event(1), obs=y)

    reading = Reading(model, (np.array([0, 1, 1]), X), {"y": 2 * X})
    sources = reading.sources(lambda sites: {name: site["value"] for name, site in sites.items()})
    assert sources == {"w": set(), "f": {"_[1]"}, "y": {"y"}}
    np.testing.assert_array_equal(reading.at({"w": jnp.array([1.0, 2.0])})["f"]["value"], [0.0, 2.0, 4.0])


def test_a_fixed_site_is_read_without_a_warning():
    """``handlers.substitute`` gives it a value, which another may replace."""
    reading = Reading(handlers.substitute(linear, {"w": 3.0}), (X, X))
    assert float(reading.at()["y"]["fn"].loc[1]) == 3.0
    assert float(reading.at({"w": 5.0})["y"]["fn"].loc[1]) == 5.0


def test_distributions_of_users_are_read():
    """Also one that does not say which of its attributes are arrays."""

    class Laplace(dist.Distribution):
        support = dist.constraints.real

        def __init__(self, loc):
            self.loc = loc
            super().__init__(jnp.shape(loc))

        def sample(self, key, sample_shape=()):
            return self.loc + random.laplace(key, sample_shape)

        def log_prob(self, value):
            return -jnp.abs(value - self.loc)

    def model():
        s = numpyro.sample("s", dist.HalfNormal(1.0))
        w = numpyro.sample("w", Laplace(2 * s))
        numpyro.sample("y", dist.Normal(w, 1.0), obs=3.0)

    reading = Reading(model)
    assert reading.depends(lambda sites: {n: arrays_in(s["fn"]) for n, s in sites.items()})["w"] == {"s"}
    assert float(reading.at({"s": 4.0})["w"]["fn"].loc) == 8.0
    assert float(reading.at({"y": 7.0})["y"]["value"]) == 7.0


def test_a_reading_that_needs_values_has_them():
    """Shapes that follow from data, and random numbers of a key that is passed."""

    def model(group):
        numpyro.sample("w", dist.Normal(0.0, 1.0).expand([len(np.unique(group))]).to_event(1))

    reading = Reading(model, (np.array([0, 1, 1]),))
    assert reading.shapes()["w"].shape == (2,)
    first, second = reading.draw([0, 1])
    assert bool((first["w"] != second["w"]).all())
    expected = handlers.trace(handlers.seed(model, random.key(1))).get_trace(np.array([0, 1, 1]))["w"]["value"]
    np.testing.assert_allclose(second["w"], expected, rtol=1e-6)
