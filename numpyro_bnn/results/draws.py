"""The draws of one inference result, and functions evaluated at all of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np
import tqdm
from jax import random

from numpyro_bnn.program import compiled
from numpyro_bnn.program.arguments import Arguments

# Draws of which this many times more would fit into the memory of a chunk are few.
FEW_DRAWS_FACTOR = 4
# Seconds after which a progress bar appears.
SECONDS_WITHOUT_BAR = 3

Draws = Mapping[str, Any]


@dataclass(frozen=True)
class Fit:
    """One inference result.

    :param model: the NumPyro model.
    :param arguments: arguments of the run.
    :param posterior: constrained draws (C, S, ...) by site.
    :param sample_stats: statistics (C, S, ...) by ArviZ's names.
    :param attrs: algorithm and settings.
    :param params: values of the model's parameters by site, where they are known.
    :param stat_coords: statistic -> name and labels of its last axis.
    """

    model: Callable
    arguments: Arguments
    posterior: Mapping[str, np.ndarray]
    sample_stats: Mapping[str, np.ndarray] = field(default_factory=dict)
    attrs: Mapping[str, Any] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    stat_coords: Mapping[str, tuple[str, Sequence[str]]] = field(default_factory=dict)


def zero_draws(source: Any, fn: Callable, draws: Draws, rng_key: jax.Array) -> Any:
    """Zeros shaped as one chain and draw of the results of :func:`map_draws`; nothing
    is computed.
    """
    first = {name: value[0, 0] for name, value in draws.items()}
    shapes = jax.eval_shape(partial(fn, source), first, rng_key)
    return jax.tree.map(lambda like: np.zeros((1, 1, *like.shape), like.dtype), shapes)


def map_draws(
    source: Any,
    fn: Callable,
    draws: Draws,
    rng_key: jax.Array,
    draws_per_chunk: int | None = None,
    progress_bar: bool = False,
) -> Any:
    """Apply ``fn(source, draw, key)`` to every draw and collect the results in host
    memory.

    The function is compiled once for a chunk of draws; memory holds the results and one
    chunk. Each draw has its own key, so results do not depend on the chunk size, by
    default as many as keep working memory near 128 MiB.

    :param source: a reading, or anything with its method ``prepare``.
    :param draws: arrays (C, S, ...); so are the results, in the tree that the function
        returns.
    """
    chains, length = next(iter(draws.values())).shape[:2]
    total = chains * length
    flat = {
        name: np.asarray(value).reshape((total, *value.shape[2:]))
        for name, value in draws.items()
    }
    first = {name: value[0] for name, value in flat.items()}
    fitting = compiled.draws_per_chunk(partial(fn, source), first, rng_key)
    size = min(total, draws_per_chunk or fitting)

    def at_draws(source: Any, draws: Draws, index: Any, rng_key: jax.Array) -> Any:
        keys = random.split(rng_key, total)[index]
        return jax.vmap(partial(fn, source))(draws, keys)

    # Few draws take less time than a program that is optimized for many.
    program = source.prepare(at_draws, once=FEW_DRAWS_FACTOR * total <= fitting)
    results: Any = None
    for start in tqdm.trange(
        0,
        total,
        size,
        desc="predictions",
        delay=SECONDS_WITHOUT_BAR,
        disable=not progress_bar,
    ):
        # The last chunk is padded with the last draw: one shape, one compilation.
        index = np.minimum(np.arange(start, start + size), total - 1)
        inputs = {name: value[index] for name, value in flat.items()}
        chunk = jax.device_get(program(inputs, index, rng_key))
        if results is None:
            results = jax.tree.map(
                lambda value: np.empty((total, *value.shape[1:]), value.dtype), chunk
            )
        count = min(size, total - start)
        for result, value in zip(*map(jax.tree.leaves, (results, chunk)), strict=True):
            result[start : start + count] = value[:count]
    return jax.tree.map(
        lambda value: value.reshape(chains, length, *value.shape[1:]), results
    )
