"""Programs compiled once and used again, by equal computations and by no others; models
that are read, not run.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from helpers import each, group, mala
from jax import lax, random
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh, PartitionSpec
from numpy.testing import assert_allclose as close
from numpyro import handlers
from numpyro.infer import MCMC, SVI, Trace_ELBO
from zoo import NOISE, X, Y, line, network, spread

from numpyro_bnn import guides, infer, symmetry, to_inference_data
from numpyro_bnn.program.axes import counted
from numpyro_bnn.program.compiled import run
from numpyro_bnn.program.posterior import Posterior
from numpyro_bnn.program.sites import arrays_in

THREE = np.arange(3, dtype=np.float32)


def times(factor):
    return lambda given, args, kwargs: given * (factor * args[0]).sum()


# -- equal computations share a program, others do not ---------------------------------


def test_equal_computations_share_a_program(compiled):
    """Another function, other data of the shape, another value compile nothing."""
    run(times(2.0), jnp.float32(1.0), (THREE,), {})
    before = len(compiled)
    assert float(run(times(2.0), jnp.float32(3.0), (THREE + 1,), {})) == 36.0
    assert len(compiled) == before


CLOSED_OVER = {
    "number": lambda n: n,
    "NumPy array": lambda n: np.full(5000, n, np.float32),
    "JAX array": lambda n: jnp.full(5000, n, jnp.float32),
    "long arrays that print alike": lambda n: np.where(
        np.arange(5000) == 1000 + n, 5000, 0
    ),
}


@pytest.mark.parametrize("kind", CLOSED_OVER)
def test_what_a_function_closes_over_is_a_part_of_it(kind):
    """Also inside a program, and surroundings that change."""
    weights, surroundings = np.arange(5000, dtype=np.float32), {}

    def fn(given, args, kwargs):
        return given * surroundings["product"](args[0])

    for wrap in (lambda product: product, jax.jit):
        for number in (1, 2):
            factor = CLOSED_OVER[kind](number)
            surroundings["product"] = wrap(lambda x, factor=factor: (factor * x).mean())
            expected = 2 * (np.asarray(factor) * weights).mean(dtype=float)
            assert float(run(fn, 2.0, (weights,), {})) == pytest.approx(
                expected, rel=1e-5
            )


def test_host_functions_and_derivatives_of_an_author_are_never_shared():
    """Equal programs by their text, which shows neither."""
    for number in (1.0, 2.0):

        def on_host(given, args, kwargs, add=number):
            return jax.pure_callback(
                lambda x: np.float32(x + add),
                jax.ShapeDtypeStruct((), jnp.float32),
                given,
            )

        assert float(run(on_host, jnp.float32(1.0), (THREE,), {})) == 1.0 + number

        @jax.custom_jvp
        def f(x):
            return x

        f.defjvp(
            lambda primals, tangents, slope=number: (primals[0], slope * tangents[0])
        )
        found = jax.grad(
            lambda z, f=f: run(lambda given, args, kwargs: f(given), z, (), {})
        )(1.0)
        assert float(found) == number


# -- what is compiled for a kernel, a guide, an export ---------------------------------


def exact_log_likelihood(idata, x, y):
    w = group(idata, "posterior")["w"].to_numpy()
    return dist.Normal(w @ x.T, NOISE).log_prob(y)


def test_a_second_kernel_and_export_compile_only_the_loop_of_mcmc(compiled):
    """On other data of the same shape; each export has its own data and draws."""
    counts = []
    for seed in range(2):
        x, y, new = X + seed, Y - seed, X[:8] + seed
        mcmc = MCMC(
            infer.SGLD(line, step_size=1e-3),
            num_warmup=2,
            num_samples=2,
            progress_bar=False,
        )
        start = len(compiled)
        mcmc.run(random.key(seed), x, y)
        middle = len(compiled)
        found = to_inference_data(mcmc, predictions={"x": new, "y": new[:, 0]})
        counts.append((middle - start, len(compiled) - middle))
        np.testing.assert_array_equal(group(found, "observed_data")["y"], y)
        mean = group(found, "posterior")["w"].to_numpy() @ new.T
        close(group(found, "predictions")["y_mean"], mean, rtol=1e-5, atol=1e-6)
        expected = exact_log_likelihood(found, x, y)
        close(group(found, "log_likelihood")["y"], expected, rtol=1e-4)
    assert counts[1] == (1, 0) < counts[0]


def test_a_second_guide_and_export_compile_nothing(compiled):
    """Of other parameters and data of the same shape."""
    counts, params = [], []
    for seed in range(2):
        guide = guides.AutoMeanField(line)
        x, y = X[:17] + seed, Y[:17] - seed
        svi = SVI(line, guide, numpyro.optim.Adam(0.01), Trace_ELBO())
        start = len(compiled)
        result = guides.fit(svi, random.key(seed), 5, x, y, progress_bar=False)
        middle = len(compiled)
        found = to_inference_data(result, guide=guide, args=(x, y), num_samples=4)
        counts.append((middle - start, len(compiled) - middle))
        params.append(result.params)
        expected = exact_log_likelihood(found, x, y)
        close(group(found, "log_likelihood")["y"], expected, rtol=1e-4)
    assert counts[1] == (0, 0) < counts[0]
    assert 0 < counts[0][1] <= 10
    assert all(np.any(params[0][name] != params[1][name]) for name in params[0])


def fit_adf(seed, x, y):
    guides.AutoADF(line).run(random.key(seed), x, y, num_epochs=1, progress_bar=False)


def prepare_moves(seed, x, y):
    kernel = infer.OrbitMoves(
        mala(network, step_size=0.1), symmetry.find(network, x, y)
    )
    kernel.init(random.key(seed), 1, None, (x, y))


@pytest.mark.slow
@pytest.mark.parametrize(("call", "most"), [(fit_adf, 200), (prepare_moves, 20)])
def test_other_data_compile_nothing(call, most, compiled):
    counts = []
    for seed in range(2):
        before = len(compiled)
        call(seed, jnp.asarray(X[:17] + seed), jnp.asarray(Y[:17] - seed))
        counts.append(len(compiled) - before)
    assert counts[1] == 0 < counts[0] <= most


def constants_of(closed):
    """The arrays that a program and its inner programs hold themselves."""
    for const in closed.consts:
        if not isinstance(const, jax.Ref):
            yield const
    for equation in closed.jaxpr.eqns:
        for inner in jax.tree.leaves(
            equation.params, is_leaf=lambda part: isinstance(part, ClosedJaxpr)
        ):
            if isinstance(inner, ClosedJaxpr):
                yield from constants_of(inner)


KERNELS = {
    "SGLD": lambda: infer.SGLD(spread),
    "OrbitMoves": lambda: infer.OrbitMoves(
        mala(spread, step_size=1e-3), [symmetry.SignFlip([("w", 0)])], exact=False
    ),
}


@each("name", KERNELS, fast=["SGLD"])
def test_data_are_no_constants_of_the_program(name):
    """A copy of large data costs many times their memory."""
    rows = 300_000
    kernel, data = KERNELS[name](), (jnp.zeros((rows, 2)), jnp.zeros(rows))
    state = kernel.init(random.key(0), 1, None, data)
    program = jax.make_jaxpr(lambda state: kernel.sample(state, data, {}))(state)
    assert program.jaxpr.eqns
    assert max((np.size(part) for part in constants_of(program)), default=0) < rows


# -- models are read -------------------------------------------------------------------


def test_data_that_shape_a_model_are_a_part_of_it_and_others_are_inputs():
    """The sites follow from the data; each is known by its place."""

    def model(group, x, y):
        w = numpyro.sample(
            "w", dist.Normal(0.0, 1.0).expand([len(np.unique(group))]).to_event(1)
        )
        f = numpyro.deterministic("f", w[group] * x)
        numpyro.sample("y", dist.Normal(f, 1.0).to_event(1), obs=y)

    data = np.array([0, 1, 1]), THREE, 2 * THREE
    reading = Posterior(model, data[:2], {"y": data[2]})
    sources = reading.sources(
        lambda sites: {name: site["value"] for name, site in sites.items()}
    )
    assert sources == {"w": set(), "f": {"_[1]"}, "y": {"y"}}
    np.testing.assert_array_equal(
        reading.at({"w": jnp.array([1.0, 2.0])})["f"]["value"], [0.0, 2.0, 4.0]
    )
    assert reading.shapes()["w"].shape == (2,)
    first, second = reading.draw([0, 1])
    assert bool((first["w"] != second["w"]).all())
    expected = handlers.trace(handlers.seed(model, random.key(1))).get_trace(*data)[
        "w"
    ]["value"]
    close(second["w"], expected, rtol=1e-6)


def test_programs_spread_over_devices_are_read():
    """By way of their codes."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("rows",))
    rows, values = PartitionSpec("rows"), np.array([0.5, -1.0], np.float32)

    def model(codes):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        mean = jax.shard_map(
            lambda w, codes: w[codes],
            mesh=mesh,
            in_specs=(PartitionSpec(), rows),
            out_specs=rows,
        )(w, codes)
        numpyro.sample("y", dist.Normal(mean, 1.0).to_event(1), obs=jnp.ones(3))

    codes = jnp.array([0, 1, 1])
    reading = Posterior(model, (codes,))
    loc = reading.at({"w": values})["y"]["fn"].base_dist.loc
    np.testing.assert_array_equal(loc, values[codes])


def test_distributions_of_users_are_read():
    """Also one that does not say which of its attributes are arrays."""

    class Laplace(dist.Distribution):
        support = dist.constraints.real

        def __init__(self, loc):
            self.loc = loc
            super().__init__(jnp.shape(loc))

        def sample(self, key, sample_shape=()):
            return self.loc + random.laplace(key, sample_shape)

    def model():
        s = numpyro.sample("s", dist.HalfNormal(1.0))
        numpyro.sample("w", Laplace(2 * s))

    reading = Posterior(model)
    assert reading.depends(
        lambda sites: {n: arrays_in(s["fn"]) for n, s in sites.items()}
    )["w"] == {"s"}
    assert float(reading.at({"s": 4.0})["w"]["fn"].loc) == 8.0


# A function of the rows' index and of arrays that are all of length 3; and which axes
# of each array count the rows, by the program (None: it does not say).
COUNTED = {
    "no index": (lambda i, x: x.sum(1), {"x": (True, False)}),
    "vmap": (lambda i, x: jax.vmap(jnp.sum)(x)[i], {"x": (True, False)}),
    "vmap of columns": (lambda i, x: jax.vmap(jnp.sum, 1)(x)[i], {"x": (False, True)}),
    "scan over rows": (
        lambda i, x, y: lax.scan(lambda h, r: (h, r[0] @ r[1]), 0.0, (x, y))[1][i],
        {"x": (True, None), "y": (True, None)},
    ),
    "scan over columns": (
        lambda i, x, v: lax.scan(lambda h, r: (h + r * v, None), jnp.zeros(3), x.T)[0][
            i
        ],
        {"x": (True, False), "v": (True,)},
    ),
    "states of a scan": (
        lambda i, x: lax.scan(lambda h, r: (h + r, h), jnp.zeros(3), x)[1].sum(0)[i],
        {"x": (False, True)},
    ),
    "branches": (
        lambda i, x, v: lax.cond(v.sum() > 0, lambda x: x.sum(1), lambda x: x[0], x)[i],
        {"x": (True, True), "v": (None,)},
    ),
    "embedding": (
        lambda i, table, code: table[code[i]].sum(1),
        {"table": (False, False), "code": (True,)},
    ),
    "embedding, mapped": (
        lambda i, table, code: jax.vmap(lambda k: table[k].sum())(code)[i],
        {"table": (False, None), "code": (True,)},
    ),
    "elements": (
        lambda i, x, code: x[i, code[i]],
        {"x": (True, False), "code": (True,)},
    ),
    "shuffled": (lambda i, x: x[jnp.array([2, 0, 1])][i, 0], {"x": (None, None)}),
    "sorted": (lambda i, x: jnp.sort(x, 1).cumsum(1)[i].sum(1), {"x": (True, False)}),
    "mean": (
        lambda i, x, v: x.sum(0)[i] - v.mean(),
        {"x": (False, True), "v": (None,)},
    ),
    "weights": (
        lambda i, x, w: jnp.tanh(x @ w)[i].sum(1),
        {"x": (True, False), "w": (False, False)},
    ),
    "unused": (lambda i, x, v: x[i].sum(1), {"x": (True, False), "v": (None,)}),
    "stacked": (
        lambda i, x: jnp.stack([x, 2 * x], 1)[i].sum((1, 2)),
        {"x": (True, False)},
    ),
    "tiled": (lambda i, x: jnp.tile(x, (1, 2))[i].sum(1), {"x": (True, False)}),
}


@pytest.mark.parametrize("name", COUNTED)
def test_axes_that_count_the_rows_are_followed_through_the_program(name):
    """Through loops, maps, branches and lookups; never by a length."""
    function, expected = COUNTED[name]

    def model(**arrays):
        with numpyro.plate("data", 3) as i:
            mean = function(i, **arrays)
            numpyro.sample("y", dist.Normal(mean, 1.0), obs=jnp.ones(3))

    arrays = {
        argument: jnp.arange(3) if argument == "code" else jnp.ones((3,) * len(axes))
        for argument, axes in expected.items()
    }
    found = counted(Posterior(model, (), arrays))
    for argument, axes in expected.items():
        for axis, answer in enumerate(axes):
            assert found.alike((argument, axis), "data") is answer, (argument, axis)


def test_an_array_that_only_scales_rows_counts_them():
    """It meets the rows in what no density needs."""

    def model(x, weight):
        with numpyro.plate("data", 3) as i, handlers.scale(scale=weight[i]):
            numpyro.sample("y", dist.Normal(x[i], 1.0), obs=jnp.ones(3))

    found = counted(Posterior(model, (), {"x": jnp.ones(3), "weight": jnp.ones(3)}))
    assert found.alike(("weight", 0), ("x", 0)) is True
