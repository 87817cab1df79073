"""Replaying a model for every posterior draw, in chunks, so that memory does not grow with the draws."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_bnn import _programs
from numpyro_bnn._distributions import unwrapped
from numpyro_bnn._plates import full_trace, unobserved
from numpyro_bnn.networks import record_statistics, use_statistics

__all__ = ["Draws", "map_draws", "observation_mean", "site_trace", "training_statistics"]

Draws = Mapping[str, Any]


def site_trace(
    model: Callable, draw: Draws, rng_key: jax.Array, args: tuple, kwargs: Mapping[str, Any], predict: bool
) -> dict[str, dict[str, Any]]:
    """Trace of ``model`` with its latent sites at ``draw`` and its plates full.

    :param predict: draw the observed sites instead of using their data.
    """

    def latent(site: dict[str, Any]) -> Any:
        # A deterministic site is computed anew: the draw holds its value for the training data.
        return draw.get(site["name"]) if site["type"] == "sample" else None

    inner = unobserved(model) if predict else model
    # A draw of a chain that diverged is NaN: parameters that are no numbers are no reason to lose the other chains.
    with numpyro.validation_enabled(False):
        return full_trace(inner, latent, args, kwargs, rng_key)


def training_statistics(
    model: Callable, draw: Draws, rng_key: jax.Array, call: tuple[tuple, dict]
) -> use_statistics:
    """Batch statistics of every network of the model on its training data, as a context for a prediction."""
    with record_statistics() as training:
        site_trace(model, draw, rng_key, *call, predict=False)
    return use_statistics(training.calls)


class Summary(NamedTuple):
    """Expected observation of a site: ``suffix`` is "mean", or "probs" for class probabilities."""

    suffix: str
    value: jax.Array


def observation_mean(fn: dist.Distribution) -> Summary | None:
    """The function behind an observation: its mean, or its class probabilities (last axis).

    :return: ``None`` for a distribution without a mean.
    """
    base = unwrapped(fn, masked=True)
    if isinstance(base, dist.CategoricalProbs | dist.CategoricalLogits):
        classes = jnp.arange(base.probs.shape[-1]).reshape(
            (-1,) + (1,) * len(fn.batch_shape + fn.event_shape)
        )
        return Summary("probs", jnp.moveaxis(jnp.exp(base.log_prob(classes)), 0, -1))
    try:
        mean = fn.mean
    except NotImplementedError:
        return None
    return Summary("mean", jnp.broadcast_to(mean, fn.batch_shape + fn.event_shape))


def map_draws(
    fn: Callable[[Draws, jax.Array], dict[str, jax.Array]],
    draws: Draws,
    rng_key: jax.Array,
    draws_per_chunk: int | None = None,
) -> dict[str, np.ndarray]:
    """Apply ``fn(draw, key)`` to every draw and collect the results in host memory.

    The function is compiled once for a chunk of draws; besides its results, memory is that of one chunk. Each
    draw has a key of its own, so results do not depend on the chunk.

    :param fn: a pure function of one draw and a key.
    :param draws: arrays (C, S, ...).
    :param rng_key: key from which that of each draw is made.
    :param draws_per_chunk: by default as many as keep working memory near 128 MiB.
    :return: arrays (C, S, ...).
    """
    chains, length = next(iter(draws.values())).shape[:2]
    total = chains * length
    flat = {name: np.asarray(value).reshape((total, *value.shape[2:])) for name, value in draws.items()}
    keys = jax.random.split(rng_key, total)
    size = draws_per_chunk or _programs.draws_per_chunk(fn, {k: v[0] for k, v in flat.items()}, keys[0])
    size = min(total, size)
    compiled = jax.jit(jax.vmap(fn))
    results: dict[str, np.ndarray] = {}
    for start in range(0, total, size):
        # The last chunk is filled up with the last draw: one shape, one compilation.
        index = np.minimum(np.arange(start, start + size), total - 1)
        chunk = jax.device_get(compiled({name: value[index] for name, value in flat.items()}, keys[index]))
        kept = min(size, total - start)
        for name, value in chunk.items():
            if name not in results:
                results[name] = np.empty((total, *value.shape[1:]), value.dtype)
            results[name][start : start + kept] = value[:kept]
    return {name: value.reshape((chains, length, *value.shape[1:])) for name, value in results.items()}
