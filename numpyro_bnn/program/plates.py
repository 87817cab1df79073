"""Plates of a model: all rows, or minibatches at O(B) cost; traces on all data; observations redrawn."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from numpyro import handlers
from numpyro.primitives import _PYRO_STACK, Messenger

from numpyro_bnn._checks import argument_error

__all__ = [
    "PARAMETERS",
    "draw_indices",
    "full_plates",
    "full_trace",
    "isolated",
    "random_indices",
    "unobserved",
]

# Kinds of sites that are no random variables: MCMC keeps their values as they start.
PARAMETERS = ("param", "mutable")


class full_plates(Messenger):
    """Run every subsampled plate on all its indices, in order, with scale 1.

    Predictions, log likelihoods and exported data belong to the whole data set, not to one random minibatch.
    """

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "plate":
            size = msg["args"][0]
            msg["args"] = (size, size)
            msg["value"] = jnp.arange(size)


def draw_indices(size: int, subsample_size: int, rng_key: Any = None) -> jax.Array:
    """B distinct random indices below N, each with probability B/N, at a cost of O(B).

    Stratified: a randomly rotated circle of indices is cut into B arcs, and each arc gives one index. Sums over them
    are unbiased, and never vary more than with replacement. ``size`` is N, ``subsample_size`` B.

    >>> indices = draw_indices(10, 4, random.key(0))
    >>> len(set(indices.tolist()))
    4
    """
    # Integers throughout: in float32 a product of N and a fraction misses indices above 2^24.
    short, longer = divmod(size, subsample_size)
    run = np.arange(subsample_size)
    first = short * run + np.minimum(run, longer)
    lengths = np.append(short + (run < longer), size)
    offset = random.randint(rng_key, (subsample_size + 1,), 0, lengths)
    index = first + offset[:-1] + (offset[-1] - size)
    return jnp.where(index < 0, index + size, index)


class random_indices(Messenger):
    """Draw the indices of subsampled plates with :func:`draw_indices`; NumPyro's own draw costs O(N)."""

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "plate" and msg["value"] is None:
            size, subsample_size = msg["args"]
            counted = isinstance(subsample_size, int | np.integer) and not isinstance(subsample_size, bool)
            if subsample_size is not None and not (counted and 1 <= subsample_size <= size):
                came = f"{subsample_size!r} for plate {msg['name']!r} of size {size}"
                raise argument_error("numpyro.plate", "subsample_size", came, f"Pass a number from 1 to {size}.")
            msg["fn"] = draw_indices


def full_trace(
    model: Callable,
    values: Mapping[str, Any] | Callable[[dict[str, Any]], Any],
    args: tuple,
    kwargs: Mapping[str, Any] | None,
    rng_key: Any = 0,
) -> dict[str, dict[str, Any]]:
    """Trace of a model on all its data.

    :param values: values of sites by name, or a function from a site to its value or ``None``; other sites are drawn.
    :param rng_key: a key or seed for the sites that are drawn.
    """
    at = values if callable(values) else lambda site: values.get(site["name"])
    placed = handlers.substitute(full_plates(model), substitute_fn=at)
    return handlers.trace(handlers.seed(placed, rng_key)).get_trace(*args, **(kwargs or {}))


@contextmanager
def isolated() -> Iterator[None]:
    """Run models hidden from outer handlers, so that networks record no statistics either."""
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

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample" and msg["is_observed"] and msg["name"] in self.names:
            msg["is_observed"] = False
            msg["value"] = None
