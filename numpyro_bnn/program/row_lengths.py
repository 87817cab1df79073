"""Refuse what no run would report: rows that a plate does not fit, state that
changes, densities that vary; warn of versions of jaxlib with slow gathers.
"""

import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax import Array

from numpyro_bnn._checks import argument_error, outside
from numpyro_bnn._jaxprs.slices import indexed_lengths
from numpyro_bnn._jaxprs.walk import Equation, Follower, scan_starts
from numpyro_bnn._keys import key_numbers
from numpyro_bnn._types import Arrays, Kwargs
from numpyro_bnn.program.batches import feeds_in, is_fetch, refuse_feeds
from numpyro_bnn.program.plates import log_densities, sites_of_type
from numpyro_bnn.program.posterior import Posterior

# Minibatches of a loader are remembered by their indices: where fewer sets of them are
# possible, the same minibatches would come again and again.
MIN_INDEX_SETS = 10**5
# Operations that leave all indices as they are, in their order.
_KEEPING = frozenset(
    {"convert_element_type", "reshape", "squeeze", "expand_dims", "broadcast_in_dim"}
)


def check_row_lengths(
    call: str, model: Callable, args: tuple, kwargs: Kwargs | None
) -> None:
    """Refuse an argument that a plate indexes and that has more or fewer rows than the
    plate.

    JAX would repeat the last row, or never read the surplus. A model is read if lengths
    of its arguments differ.

    >>> import numpyro, numpyro.distributions as dist
    >>> def model(x, y):
    ...     with numpyro.plate("data", len(x)) as i:
    ...         numpyro.sample("y", dist.Normal(x[i], 1.0), obs=y[i])
    >>> check_row_lengths("guides.fit", model, (jnp.ones(3), jnp.ones(4)), None)
    Traceback (most recent call last):
    ValueError: guides.fit: argument `args` got an array of 4 rows that plate 'data' ...
    """
    if len(_lengths(args, kwargs)) > 1:
        check_rows(call, Posterior(model, args, kwargs), args, kwargs)


def _lengths(args: tuple, kwargs: Kwargs | None) -> set[int]:
    """Lengths of the first axes of arrays."""
    lengths = set()
    for leaf in jax.tree.leaves((args, kwargs)):
        if hasattr(leaf, "dtype") and np.ndim(leaf):
            lengths.add(np.shape(leaf)[0])
    return lengths


def check_rows(
    call: str, reading: Posterior, args: tuple, kwargs: Kwargs | None
) -> None:
    """:func:`check_row_lengths` of a model that has been read."""
    lengths = _lengths(args, kwargs)
    if len(lengths) < 2:
        return
    for name, site in sites_of_type(reading.sites, "plate").items():
        size = site["args"][0]
        indexed = indexed_lengths(*_densities(reading, name))
        unlike = sorted(indexed & lengths - {size})
        if unlike:
            got = (
                f"an array of {unlike[0]} rows that plate {name!r} of size {size} "
                f"indexes"
            )
            instead = "Pass one row per data point in each array."
            raise argument_error(call, "args", got, instead)


def _densities(
    reading: Posterior, plate: str
) -> tuple[Callable[[Array], list[Array]], Array]:
    """The densities as a function of the indices of a plate, and such indices."""

    def densities(indices: Array) -> list[Array]:
        return log_densities(reading.at({plate: indices}))

    return densities, jnp.arange(reading.sites[plate]["value"].shape[0])


def _other_use(reading: Posterior, plate: str) -> str:
    """What else the densities do with the indices of a plate than read rows of a loader
    by all of them; empty if nothing.
    """
    densities, indices = _densities(reading, plate)
    others: list[str] = []

    def visit(equation: Equation, *operands: bool) -> bool:
        (out, *_), params = equation.outputs, equation.params
        if equation.name == "pure_callback" and is_fetch(params["callback"]):
            asked = equation.jaxpr_equation.invars[0].aval.shape
            if asked != indices.shape:
                others.append("a part of them reads rows")
            return False
        # Narrower integers would be other numbers.
        as_wide = jnp.issubdtype(out.dtype, jnp.integer) and out.dtype.itemsize >= 4
        if equation.name in _KEEPING and as_wide and out.size == indices.size:
            return True
        if equation.name == "gather":  # after what JAX computes for `x[i]`
            others.insert(0, "they also select rows of an array")
        others.append(f"`{equation.name}` uses them")
        return True

    def scan(equation: Equation, *operands: bool) -> Any:
        if not any(operands[scan_starts(equation.jaxpr_equation)[0] :]):
            outputs = equation.descend(*operands)
            if not any(outputs):
                return outputs
        return [visit(equation, *operands)] * len(equation.outputs)

    walk = Follower(visit, False, {"scan": scan})
    jaxpr = jax.make_jaxpr(densities)(indices).jaxpr
    if any(walk.follow(jaxpr, [True])):
        others.append("they are a log density")
    return others[0] if others else ""


def check_feeds(
    call: str, reading: Posterior, args: tuple, kwargs: Kwargs | None
) -> None:
    """Refuse rows of a loader in models to which the indices of their plate are more
    than a draw of a minibatch.

    :param reading: of the model on a minibatch.
    """
    feeds = feeds_in(args, kwargs)
    if len(feeds) > 1:  # which shuffle apart
        reason = "two loaders bring different rows for the same indices"
        instead = "Take all columns from one `runs.batches`."
        refuse_feeds(call, "args", reason, args, kwargs, instead=instead)
    reason = ""
    if not reading.plates:
        reason = "no plate has a `subsample_size`, and a gradient would need all of it"
    for name, plate in reading.plates.items():
        if plate.size != feeds[0].num_rows:
            reason = (
                f"plate {name!r} has size {plate.size}, the loader "
                f"{feeds[0].num_rows} rows"
            )
            instead = "Give the plate the rows of the loader: `len(x)`."
            refuse_feeds(call, "args", reason, args, kwargs, instead=instead)
        if math.comb(plate.size, plate.batch_size) < MIN_INDEX_SETS:
            reason = (
                f"few minibatches of {plate.batch_size} of {plate.size} rows differ, "
                f"for plate {name!r}"
            )
            instead = "Pass arrays: so few rows fit in memory."
            refuse_feeds(call, "args", reason, args, kwargs, instead=instead)
        if other := _other_use(reading, name):
            reason = (
                f"the indices of plate {name!r} may only read rows, all at once and "
                f"unchanged (`x[i]`), but {other}"
            )
    if reading.local:
        reason = f"{reading.local[0]!r} has a value for each row, which has no number"
    if reason:
        refuse_feeds(call, "args", reason, args, kwargs)


def refuse_random(call: str, argument: str, is_random: bool) -> None:
    """Refuse a model that computes with random numbers of its own, where the density
    has to have one value.
    """
    if is_random:
        got = (
            "a model that draws random numbers of its own (`numpyro.prng_key`, as "
            "dropout does)"
        )
        instead = (
            "Its potential on all data varies: use SGLD, SGHMC or SGNHT with "
            "`gradient='minibatch'`."
        )
        raise argument_error(call, argument, got, instead)


def check_state(call: str, argument: str, reading: Posterior) -> None:
    """Refuse ``numpyro.mutable`` state that the model changes, as batch normalization
    does: it would be held.

    A state that nothing uses may change, such as the counter of keys for the start of a
    recurrent module.
    """
    mutable = sites_of_type(reading.sites, "mutable")
    if not mutable:
        return

    def states(reading: Posterior) -> dict[str, tuple]:
        sites = reading.at(only=mutable).items()
        return {name: (site["args"], (site["value"],)) for name, site in sites}

    changed = []
    for name, (start, end) in reading.run(states).items():
        pairs = zip(
            jax.tree.leaves(start),
            jax.tree_util.tree_leaves_with_path(end),
            strict=True,
        )
        for value_at_start, (path, value_at_end) in pairs:
            if isinstance(value_at_end, jax.core.Tracer):
                continue
            numbers = map(key_numbers, (value_at_start, value_at_end))
            if not np.array_equal(*numbers):
                changed.append(name + jax.tree_util.keystr(path[1:]))
    idle = reading.idle_states() if changed else set()
    for place in changed:
        if place not in idle:
            instead = (
                "It would be held: leave out batch normalization and dropout, or make "
                "their state constant (`use_running_average=True`, "
                "`deterministic=True`). `LayerNorm` has none."
            )
            got = f"the state {place!r}, which the model changes"
            raise argument_error(call, argument, got, instead)


# Their scatter-add of many numbers into few is up to 2,000 times slower (jax#38806).
SLOW = (0, 10, 2), (0, 11, 0)
CROWDED = 4  # rows for each value from which on that is felt


def warn_of_slow_gathers(call: str, reading: Posterior) -> None:
    """Warn where gradients of few latent values, which many rows look up, are slow."""
    version = tuple(map(int, re.findall(r"\d+", jaxlib.__version__)[:3]))
    affected = SLOW[0] <= version <= SLOW[1]
    if affected and jax.default_backend() == "gpu" and _looks_up_few(reading):
        text = (
            f"jaxlib {jaxlib.__version__} on CUDA takes hundreds of times longer for "
            "gradients of effects that many rows share, such as `effect[group]`. "
            "Install jaxlib 0.11.1 or later."
        )
        warnings.warn(f"{call}: {text}", stacklevel=outside())


def _looks_up_few(reading: Posterior) -> bool:
    """Whether densities index a latent site with many more indices than it has rows."""
    crowded = False

    def densities(values: Arrays) -> list[Array]:
        return log_densities(reading.at(values))

    def visit(equation: Equation, *latent: bool) -> bool:
        nonlocal crowded
        if equation.name == "gather" and latent[0]:
            values, indices = (v.aval for v in equation.jaxpr_equation.invars[:2])
            numbers: Any = equation.params["dimension_numbers"]
            axes = numbers.start_index_map
            length = min((values.shape[axis] for axis in axes), default=1)
            count = indices.size // max(1, len(axes))
            # with batches each row looks up a value of its own, as a class does
            batched = numbers.operand_batching_dims
            crowded |= not batched and count >= CROWDED * length
        return any(latent)

    jaxpr = jax.make_jaxpr(densities)(reading.shapes()).jaxpr
    walk = Follower(visit, False, {"scan": Equation.descend})
    walk.follow(jaxpr, [True] * len(jaxpr.invars))
    return crowded
