"""Rows that would count many times, as shapes were broadcast, are refused."""

from contextlib import ExitStack, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import pytest
from helpers import refused
from numpyro.infer import NUTS
from numpyro.infer.autoguide import AutoNormal
from zoo import BATCH, N, X, Y

import numpyro_bnn as bnn
from numpyro_bnn import infer, symmetry
from numpyro_bnn.program.posterior import Posterior
from use.readers import READERS

pytestmark = pytest.mark.core

COLUMN = Y[:, None]


def doubled(x, y=None, batch_size=None):
    """Outputs (N, 1) and targets (N, 1) in a plate of N rows are N x N terms."""
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2, 1]).to_event(2))
    with numpyro.plate("data", x.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, 0.5), obs=y if y is None else y[i])


def export():
    """Of a guide of NumPyro alone, which fits whatever shapes there are."""
    ones = jnp.ones((2, 1))
    result = SimpleNamespace(params={"w_auto_loc": ones, "w_auto_scale": ones})
    of = {"guide": AutoNormal(doubled), "args": (X, COLUMN), "num_samples": 2}
    bnn.to_inference_data(result, **of)


def move():
    moved = infer.OrbitMoves(NUTS(doubled), [symmetry.SignFlip(["w"])], exact=False)
    moved.init(jax.random.key(0), 4, None, (X, COLUMN), {})


ROOMS = {name: partial(read, doubled, X, COLUMN) for name, read in READERS.items()}
ROOMS |= {"minibatches": partial(READERS["SGLD"], doubled, X, COLUMN, BATCH)}
ROOMS |= {"OrbitMoves": move, "export": export}


@pytest.mark.filterwarnings("ignore:Missing a plate")
@pytest.mark.parametrize("room", ROOMS)
def test_rows_that_would_count_many_times_are_refused_in_every_room(room):
    with refused("obs", "the site 'y' with a distribution of shape (") as caught:
        ROOMS[room]()
    size = BATCH if room == "minibatches" else N
    assert f"({size}, 1)" in str(caught.value), caught.value
    for remedy in (f"count {size} times", "`net(x)[..., 0]`", "`.to_event(1)`"):
        assert remedy in str(caught.value)


# -- which shapes are refused ----------------------------------------------------------


class Shapes(NamedTuple):
    """An observed site; ``plates``: dims to sizes, ``own``: shape of the location."""

    plates: dict[int, int]
    own: tuple[int, ...]
    data: tuple[int, ...]
    mask: tuple[int, ...] = ()
    event: int = 0


def model_of(case):
    fn = dist.Normal(jnp.zeros(case.own), 1.0).to_event(case.event)
    fn = fn.mask(jnp.ones(case.mask, bool)) if case.mask else fn

    def model(y):
        numpyro.sample("w", dist.Normal(0.0, 1.0))
        with ExitStack() as stack:
            for dim, size in case.plates.items():
                stack.enter_context(numpyro.plate(f"plate{dim}", size, dim=dim))
            numpyro.sample("y", fn, obs=y)

    return model


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
