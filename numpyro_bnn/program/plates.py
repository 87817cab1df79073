"""Plates of a model: all rows, or minibatches at O(B) cost; traces on all data; data
that fit their plates.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro.distributions import (
    Distribution,
    ExpandedDistribution,
    Independent,
    MaskedDistribution,
)
from numpyro.primitives import _PYRO_STACK, Messenger

from numpyro_bnn._checks import argument_error
from numpyro_bnn._distributions import is_factor, unwrapped
from numpyro_bnn._types import Shape, Site, Sites

__all__ = [
    "PARAMETERS",
    "Plate",
    "check_observations",
    "draw_indices",
    "full_plates",
    "isolated",
    "random_indices",
    "sites_of_type",
    "subsampled_plates",
    "unobserved",
]

# Kinds of sites that are no random variables: MCMC keeps their values as they start.
PARAMETERS = ("param", "mutable")


class Plate(NamedTuple):
    """A subsampled plate: N data points, B of them per minibatch."""

    size: int
    batch_size: int


class full_plates(Messenger):
    """Run every subsampled plate on all its indices, in order, with scale 1.

    Predictions, log likelihoods and exported data belong to the whole data set, not to
    one random minibatch.

    :param sizes: plates that have only so many of their indices, weighted as if these
        were all.
    """

    def __init__(
        self, fn: Callable | None = None, sizes: Mapping[str, int] | None = None
    ) -> None:
        self.sizes = sizes or {}
        super().__init__(fn)

    def process_message(self, msg: Site) -> None:
        if msg["type"] == "plate":
            size = msg["args"][0]
            num_indices = self.sizes.get(msg["name"], size)
            msg["args"] = (size, num_indices)
            msg["value"] = jnp.arange(num_indices)


def draw_indices(size: int, subsample_size: int, rng_key: Array) -> Array:
    """B distinct random indices below N, each with probability B/N, at a cost of O(B).

    Stratified: a randomly rotated circle of indices is cut into B arcs, and each arc
    gives one index. Sums over them are unbiased, and never vary more than with
    replacement. ``size`` is N, ``subsample_size`` B.

    >>> indices = draw_indices(10, 4, random.key(0))
    >>> len(set(indices.tolist()))
    4
    """
    # Integers throughout: in float32 a product of N and a fraction misses indices above
    # 2^24.
    short, longer = divmod(size, subsample_size)
    run = np.arange(subsample_size)
    first = short * run + np.minimum(run, longer)
    lengths = np.append(short + (run < longer), size)
    offset = random.randint(rng_key, (subsample_size + 1,), 0, lengths)
    index = first + offset[:-1] + (offset[-1] - size)
    return jnp.where(index < 0, index + size, index)


class random_indices(Messenger):
    """Draw the indices of subsampled plates with :func:`draw_indices`; NumPyro's own
    draw costs O(N).
    """

    def process_message(self, msg: Site) -> None:
        if msg["type"] == "plate" and msg["value"] is None:
            size, subsample_size = msg["args"]
            counted = isinstance(subsample_size, int | np.integer) and not isinstance(
                subsample_size, bool
            )
            if subsample_size is not None and not (
                counted and 1 <= subsample_size <= size
            ):
                got = f"{subsample_size!r} for plate {msg['name']!r} of size {size}"
                instead = f"Pass a number from 1 to {size}."
                raise argument_error("numpyro.plate", "subsample_size", got, instead)
            msg["fn"] = draw_indices


def sites_of_type(trace: Sites, *types: str) -> Sites:
    """The sites of some types, such as ``"sample"``, in the order of the model."""
    return {name: site for name, site in trace.items() if site["type"] in types}


def log_densities(trace: Sites) -> list[Array]:
    """Log densities of all sampled sites, each of its batch shape."""
    samples = sites_of_type(trace, "sample").values()
    return [site["fn"].log_prob(site["value"]) for site in samples]


def subsampled_plates(trace: Sites) -> dict[str, Plate]:
    """The plates that see a subset of their indices."""
    plates = {}
    for name, site in sites_of_type(trace, "plate").items():
        size, batch_size = site["args"]
        if batch_size not in (None, size):
            plates[name] = Plate(size, batch_size)
    return plates


@contextmanager
def isolated() -> Iterator[None]:
    """Run models hidden from outer handlers, so that networks record no statistics
    either.
    """
    outside = _PYRO_STACK[:]
    del _PYRO_STACK[:]
    try:
        yield
    finally:
        _PYRO_STACK[:] = outside


class unobserved(Messenger):
    """Redraw observed sites of these names from their distributions."""

    def __init__(self, fn: Callable | None, names: Collection[str]) -> None:
        self.names = names
        super().__init__(fn)

    def process_message(self, msg: Site) -> None:
        if msg["type"] == "sample" and msg["is_observed"] and msg["name"] in self.names:
            msg["is_observed"] = False
            msg["value"] = None


class _Shapes(NamedTuple):
    """Shapes of an observed site, (R,) each, aligned from the right.

    :param written: of the distribution as the user wrote it, before plates and masks.
    :param data: of the data. A factor has none, and a number is the same everywhere:
        then ``written``.
    :param scale: of the scales of ``handlers.scale``.
    :param total: of the log densities, with an axis for each axis of an event.
    :param plates: whether an axis belongs to a plate.
    :param event: whether it belongs to an event.
    """

    written: np.ndarray
    data: np.ndarray
    scale: np.ndarray
    total: np.ndarray
    plates: np.ndarray
    event: np.ndarray


def _as_written(fn: Distribution, in_plates: bool) -> Distribution:
    """The distribution without masks and, where plates or masks may have expanded it,
    without ``expand``.
    """
    while not in_plates and isinstance(fn, Independent | MaskedDistribution):
        if isinstance(fn, MaskedDistribution) and np.ndim(fn._mask):
            break
        fn = fn.base_dist
    return (
        fn
        if isinstance(fn, ExpandedDistribution) and not in_plates
        else unwrapped(fn, masked=True)
    )


def _shapes_of(site: Site) -> _Shapes:
    fn, frames = site["fn"], site["cond_indep_stack"]
    written = _as_written(fn, bool(frames))
    own_shape, all_shape, event_dim = written.shape(), fn.shape(), fn.event_dim
    data = np.shape(site["value"])
    if is_factor(fn):  # its value is empty
        own_shape, all_shape, event_dim = written.batch_shape, fn.batch_shape, 0
        data = own_shape
    scale = np.shape(site["scale"])
    scale = (*scale, *(1,) * event_dim) if scale else ()
    shapes = own_shape, data or own_shape, scale, all_shape
    rank = max(map(len, shapes))

    def aligned(shape: Shape) -> np.ndarray:
        return np.array((1,) * (rank - len(shape)) + tuple(shape), int)

    own_axes, data_axes, scale_axes, all_axes = map(aligned, shapes)
    total = np.maximum.reduce([own_axes, data_axes, scale_axes, all_axes])
    plates = np.zeros(rank, bool)
    for frame in frames:
        plates[frame.dim - event_dim] = True
    event = np.arange(rank) >= rank - event_dim
    own_axes[event] = all_axes[event]
    return _Shapes(own_axes, data_axes, scale_axes, total, plates, event)


def _do_not_fit(site: Site) -> bool:
    """Whether data cannot be broadcast to the batch shape of their distribution."""
    fn, shape = site["fn"], np.shape(site["value"])
    rows = shape[: max(len(shape) - fn.event_dim, 0)]
    if is_factor(fn):
        return False
    # as far as both have axes, from the right
    for length, size in zip(reversed(rows), reversed(fn.batch_shape), strict=False):
        if length != size and 1 not in (length, size):
            return True
    return False


def _counts_often(shapes: _Shapes) -> bool:
    """Whether broadcasting repeats values of the data beyond what plates declare."""
    repeated = (shapes.data == 1) & (shapes.total > 1)
    varied = shapes.data > 1
    if (repeated & shapes.event).any():
        return True
    if shapes.plates.any():
        outside = ~shapes.plates & ~shapes.event
        # In a plate of N rows, (N, 1) becomes (N, N): repeated along the plate, and the
        # rows beside it.
        rows_beside = varied & (outside | (shapes.event & (shapes.written == 1)))
        along_plate = repeated & shapes.plates
        return bool(
            (repeated & outside).any() or (along_plate.any() and rows_beside.any())
        )
    # by a mask or a scale of another shape
    if (repeated & (shapes.written == 1)).any():
        return True
    return bool(repeated.any() and (varied & (shapes.written == 1)).any())


def check_observations(sites: Sites) -> None:
    """Refuse observed sites of which each value would count many times, because shapes
    were broadcast.

    The common one: outputs (N, 1) of a network, in a plate of N rows, are N
    distributions for each row. Values may be repeated along plates, which declare it,
    and a single number anywhere. Axes to the left of the plates, or between them, are
    free as long as the data have them too. Without a plate nothing is declared; then
    (N, 1) beside (N,) is refused.
    """
    # data that do not fit minibatches are refused where these are checked
    subsampled = subsampled_plates(sites)
    for name, site in sites_of_type(sites, "sample").items():
        if not site["is_observed"]:
            continue
        if np.iscomplexobj(site["value"]):
            got = f"complex numbers for the site {name!r}"
            raise argument_error("numpyro.sample", "obs", got, "Pass real numbers.")
        if not subsampled and _do_not_fit(site):
            got = f"data of shape {np.shape(site['value'])} for the site {name!r}"
            instead = (
                f"Pass data of the shape of its distribution, {site['fn'].shape()}."
            )
            raise argument_error("numpyro.sample", "obs", got, instead)
        shapes = _shapes_of(site)
        if not _counts_often(shapes):
            continue
        fn, frames = site["fn"], site["cond_indep_stack"]
        written = _as_written(fn, bool(frames))
        stack = ", ".join(f"{f.name!r} of {f.size} at dim {f.dim}" for f in frames)
        where = f" (plates: {stack})" if frames else ""
        total = tuple(map(int, shapes.total))
        times = int(np.prod(shapes.total[(shapes.data == 1) & (shapes.total > 1)]))
        each = f"Each value would count {times} times, as {total}: give"
        if is_factor(fn):
            got = f"the site {name!r} of shape {written.batch_shape}{where}"
            instead = f"{each} it the shape of its plates, e.g. by `[..., 0]`."
            raise argument_error("numpyro.factor", "log_factor", got, instead)
        data = np.shape(site["value"])
        got = f"the site {name!r} with a distribution of shape {written.shape()}"
        got += f" and data of shape {data}{where}"
        instead = f"{each} both the shape of the plates, e.g. by `net(x)[..., 0]` and"
        instead += (
            " `y[..., 0]`; or make other axes an event by `.to_event(1)`, or plates"
        )
        raise argument_error("numpyro.sample", "obs", got, f"{instead} of their own.")
