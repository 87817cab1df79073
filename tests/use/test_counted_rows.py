"""Observed sites whose values would count many times, because shapes were broadcast:
refused by every room.
"""

from contextlib import ExitStack, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from helpers import each, refused, results
from numpyro import handlers
from numpyro.infer import NUTS, SVI, Gibbs, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from zoo import BATCH, NET, NEW_X, N, X, Y

import numpyro_bnn as bnn
from numpyro_bnn import guides, infer, priors, symmetry
from numpyro_bnn.program.posterior import Posterior

pytestmark = pytest.mark.core

COLUMN = Y[:, None]
OUTPUT = ["net/Dense_1.kernel", "net/Dense_1.bias"]
SHAPES = {f"net/{name}": shape for name, shape in NET.param_shapes((2,)).items()} | {
    "sigma": ()
}
UNITS = [("net/Dense_0.kernel", 1), ("net/Dense_0.bias", 0), (OUTPUT[0], 0)]


def doubled(x, y=None, batch_size=None):
    """Outputs (N, 1) and targets (N, 1) in a plate of N rows are N x N terms."""
    net = bnn.random_network("net", NET, (2,), priors.Normal())
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("data", x.shape[0], subsample_size=batch_size) as i:
        numpyro.sample(
            "y", dist.Normal(net(x[i]), sigma), obs=None if y is None else y[i]
        )


def start(kernel, *args, **kwargs):
    return kernel.init(jax.random.key(0), 4, None, args, kwargs)


def set_up(guide, **kwargs):
    SVI(doubled, guide, optax.adam(1e-2), Trace_ELBO()).init(
        jax.random.key(0), X, COLUMN, **kwargs
    )


def near_one(x, y=None):
    """A guide without parameters."""
    for name, shape in SHAPES.items():
        numpyro.sample(name, dist.Normal(jnp.ones(shape), 0.1).to_event(len(shape)))


def loss(elbo):
    elbo.loss(
        jax.random.key(0), {}, doubled, near_one, jnp.asarray(X), jnp.asarray(COLUMN)
    )


def exported():
    """The export of a guide of NumPyro alone, which fits whatever shapes there are."""
    params = {
        f"{name}_auto_{part}": jnp.ones(shape)
        for name, shape in SHAPES.items()
        for part in ("loc", "scale")
    }
    options = {"guide": AutoNormal(doubled), "args": (X, COLUMN), "num_samples": 2}
    return bnn.to_inference_data(SimpleNamespace(params=params), **options)


def predicted():
    """From one draw of every site, as an export would have it."""
    shapes = {name.replace("/", "."): (1, 1, *shape) for name, shape in SHAPES.items()}
    axes = {
        n: ["chain", "draw", *(f"{n}_{i}" for i in range(len(s) - 2))]
        for n, s in shapes.items()
    }
    posterior = {n: (axes[n], np.ones(s)) for n, s in shapes.items()}
    data = {"y": (["data", "y_dim_1"], COLUMN)}
    idata = results(
        {
            "posterior": posterior,
            "observed_data": data,
            "constant_data": {"x": (["data", "x_dim"], X)},
        }
    )
    return bnn.predict(doubled, idata, NEW_X)


ROOMS = {
    # One kernel and one guide are as good as all: they read models by the same code.
    "SGLD": partial(start, infer.SGLD(doubled), X, COLUMN),
    "minibatches, SGLD": partial(start, infer.SGLD(doubled), X, COLUMN, BATCH),
    "AutoMeanField": lambda: set_up(guides.AutoMeanField(doubled)),
    "OrbitMoves": lambda: start(
        infer.OrbitMoves(NUTS(doubled), [symmetry.SignFlip(UNITS)]), X, COLUMN
    ),
    "UnitMoves": lambda: start(
        infer.UnitMoves(NUTS(doubled), {UNITS[0][0]: -1, UNITS[1][0]: 0}), X, COLUMN
    ),
    "ParallelTempering": lambda: start(
        infer.ParallelTempering(NUTS(doubled), 2), X, COLUMN
    ),
    "PrecisionGibbs": lambda: start(
        Gibbs([(infer.PrecisionGibbs(doubled), ["sigma"]), (NUTS(doubled), None)]),
        X,
        COLUMN,
    ),
    "ensemble": lambda: infer.ensemble(doubled, 1000, progress_bar=False).run(
        jax.random.key(0), X, COLUMN
    ),
    "AutoADF.run": lambda: guides.AutoADF(doubled).run(jax.random.key(0), X, COLUMN),
    "AutoLaplace.run": lambda: guides.AutoLaplace(doubled).run(
        jax.random.key(0), X, COLUMN
    ),
    "fit": lambda: guides.fit(
        SVI(doubled, near_one, optax.adam(1e-2), Trace_ELBO()),
        jax.random.key(0),
        2,
        X,
        COLUMN,
    ),
    "minibatches, a guide": lambda: set_up(
        guides.AutoMeanField(doubled), batch_size=BATCH
    ),
    "TraceLocalReparam_ELBO": partial(loss, guides.TraceLocalReparam_ELBO()),
    "TraceFlipout_ELBO": partial(loss, guides.TraceFlipout_ELBO()),
    "evidence": lambda: guides.evidence(
        near_one, {}, X, COLUMN, model=doubled, rng_key=jax.random.key(0)
    ),
    "collapse": lambda: infer.collapse(doubled, OUTPUT, X, COLUMN),
    "find": lambda: symmetry.find(doubled, X, COLUMN),
    "check": lambda: symmetry.check(doubled, [symmetry.SignFlip(UNITS)], (X, COLUMN)),
    "export": exported,
    "predict": predicted,
}


@pytest.mark.filterwarnings("ignore:Missing a plate")
@pytest.mark.parametrize("room", ROOMS)
def test_rows_that_would_count_many_times_are_refused_in_every_room(room):
    with refused("obs", "the site 'y' with a distribution of shape (") as caught:
        ROOMS[room]()
    size = len(NEW_X) if room == "predict" else N
    size = BATCH if "minibatches" in room else size
    assert f"({size}, 1)" in str(caught.value), caught.value
    for remedy in (f"count {size} times", "`net(x)[..., 0]`", "`.to_event(1)`"):
        assert remedy in str(caught.value)


# -- which shapes are refused: by counting, in NumPy -----------------------------------


class Shapes(NamedTuple):
    """An observed site; ``plates``: dims to sizes, ``own``: shape of the location."""

    plates: dict[int, int]
    own: tuple[int, ...]
    data: tuple[int, ...]
    mask: tuple[int, ...] = ()
    scale: tuple[int, ...] = ()
    event: int = 0


def model_of(case):
    fn = dist.Normal(jnp.zeros(case.own), 1.0).to_event(case.event)
    fn = fn.mask(jnp.ones(case.mask, bool)) if case.mask else fn

    def model(y):
        numpyro.sample("w", dist.Normal(0.0, 1.0))
        with ExitStack() as stack:
            for dim, size in case.plates.items():
                stack.enter_context(numpyro.plate(f"plate{dim}", size, dim=dim))
            stack.enter_context(handlers.scale(scale=jnp.ones(case.scale)))
            numpyro.sample("y", fn, obs=y)

    return model


def counts_often(case):
    """Whether values are in more terms than the plates of their repetitions say."""
    rank = max(
        map(
            len,
            (
                case.own,
                case.data,
                case.mask,
                case.scale,
                *((1,) * -dim for dim in case.plates),
            ),
        )
    )
    plates = [case.plates.get(axis - rank, 1) for axis in range(rank)]
    total = np.broadcast_shapes(case.own, case.data, case.mask, case.scale, plates)
    places = np.broadcast_to(np.arange(np.prod(case.data)).reshape(case.data), total)
    data = (1,) * (rank - len(case.data)) + case.data
    declared = [size for size, values in zip(plates, data, strict=True) if values == 1]
    beside = any(
        values > 1 and axis - rank not in case.plates
        for axis, values in enumerate(data)
    )
    return np.bincount(places.ravel()).max() > (1 if beside else np.prod(declared))


def random_case(random):
    """Plates at some dims, and shapes that broadcast against them."""
    # lengths may coincide
    sizes = random.choice([2, 3, 4], 4) if random.random() < 0.7 else np.full(4, 3)
    dims = random.choice([-1, -2, -3], random.integers(1, 4), replace=False)

    def shape(most=4):
        rank = random.integers(0, most)
        return tuple(int(s) if random.random() < 0.6 else 1 for s in sizes[4 - rank :])

    plates = {int(dim): int(sizes[dim]) for dim in dims}
    return Shapes(
        plates,
        shape(),
        shape() or (1,),
        *((shape(), shape()) if random.random() < 0.3 else ()),
    )


@each("seed", [0, *range(1, 10)], fast=1)
def test_values_that_count_more_often_than_their_plates_say_are_refused(seed):
    """Random shapes: right counts are accepted, others refused; NumPy counts."""
    random, wrong = np.random.default_rng(seed), 0
    for _ in range(30):
        case = random_case(random)
        wrong += counts_often(case)
        with refused("obs") if counts_often(case) else nullcontext():
            Posterior(model_of(case), (jnp.zeros(case.data),))
    assert 5 < wrong < 25


RIGHT = {
    "no plate, table": Shapes({}, (N, 1), (N, 3)),
    "no plate, sum of rows and columns": Shapes({}, (N, 3), (N, 3), mask=(N, 1)),
    "times to the left of the rows": Shapes({-1: N}, (5, N), (5, N)),
    "outputs beside declared rows": Shapes({-2: N}, (N, 3), (N, 3)),
    "crossed": Shapes({-2: N, -1: 3}, (N, 1), (N, 3), mask=(N, 1)),
    "event": Shapes({-1: N}, (N, 1), (N, 1), event=1),
    "a number": Shapes({-1: N}, (N,), ()),
}
WRONG = {
    "column, no plate": Shapes({}, (N, 1), (N,)),
    "masked, no plate": Shapes({}, (N, 1), (N, 1), mask=(N,)),
    "column": Shapes({-1: N}, (N, 1), (N, 1)),
    "a number for each output": Shapes({-1: N}, (N, 1), ()),
    "rows at another dim": Shapes({-2: N}, (N,), (N,)),
    "outputs are an event, the target is not": Shapes({-1: N}, (N, 1), (N,), event=1),
    "one target for an event": Shapes({-1: N}, (N, 3), (N, 1), event=1),
}


@pytest.mark.parametrize("name", [*RIGHT, *WRONG])
@pytest.mark.filterwarnings("ignore:Missing a plate")
def test_common_shapes_count_as_their_users_mean(name):
    case = {**RIGHT, **WRONG}[name]
    with refused("obs") if name in WRONG else nullcontext():
        Posterior(model_of(case), (jnp.zeros(case.data),))


def test_factors_count_as_data_do():
    def model(shape):
        with numpyro.plate("data", N):
            numpyro.factor("y", jnp.zeros(shape))

    for shape in ((N,), (), (5, N)):
        Posterior(model, (shape,))
    with refused("log_factor", f"the site 'y' of shape ({N}, 1)"):
        Posterior(model, ((N, 1),))
