"""Epochs: one compiled program each, so that progress is seen and an interruption loses at most one."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from jax import lax

from numpyro_bnn.guides.adf.problem import ADFState, Pass, Problem

__all__ = ["ADFResult", "Program", "Records", "build", "is_batch_of_keys", "run_epochs", "starting_means"]


class Records(NamedTuple):
    """What each epoch reported, (E,) or, for R runs at once, (R, E).

    :param log_z: sum over the data of log Z, the log density of each point just before it is learned. The first
        epoch's is an estimate of the log evidence, log p(y); later epochs have seen the data.
    :param refused: share of the updates of single weights that were refused.
    """

    log_z: jax.Array
    refused: jax.Array


class ADFResult(NamedTuple):
    """Result of :meth:`AutoADF.run`; its fields begin like those of NumPyro's ``SVIRunResult``.

    :param params: parameters of the guide by name, as every method of it takes them.
    :param state: the same in float64, with the approximate prior factors: where a later ``run`` can go on.
    :param losses: minus the log evidence of each epoch, (E,) or (R, E).
    :param refused: share of refused updates in each epoch, (E,) or (R, E).
    """

    params: dict[str, jax.Array]
    state: ADFState
    losses: jax.Array
    refused: jax.Array


def is_batch_of_keys(rng_key: jax.Array) -> bool:
    """Whether these are several PRNG keys, typed or legacy."""
    typed = jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key)
    return jnp.ndim(rng_key) == (1 if typed else 2)


class Program(NamedTuple):
    """Compiled parts of a run, for one run or for several at once."""

    start: Callable[[jax.Array, Any], ADFState]
    epoch: Callable[..., tuple[ADFState, Pass]]
    whole: Callable[..., tuple[ADFState, Pass]]


def build(problem: Problem, batched: bool, row_axes: Any, array_axes: Any, num_rows: int) -> Program:
    """Compile-ready functions of keys, rows and arrays."""

    def start(rng_key: jax.Array, means: Any) -> ADFState:
        return problem.start({**problem.random_means(rng_key), **means})

    def epoch(state: ADFState, rows: Any, arrays: Any, rng_key: jax.Array, order: Any, one: Any) -> Any:
        order = jax.random.permutation(rng_key, num_rows) if order is None else order
        return problem.epoch(state, rows, arrays, order, one)

    if batched:
        start = jax.vmap(start, in_axes=(0, 0))
        epoch = jax.vmap(epoch, in_axes=(0, row_axes, array_axes, 0, 0, None))

    def whole(state: ADFState, rows: Any, arrays: Any, keys: jax.Array, orders: Any, one: Any) -> Any:
        return lax.scan(lambda s, by_epoch: epoch(s, rows, arrays, *by_epoch, one), state, (keys, orders))

    return Program(jax.jit(start), jax.jit(epoch), jax.jit(whole))


def run_epochs(
    program: Program,
    state: ADFState,
    data: tuple[Any, Any],
    keys: jax.Array,
    orders: Any,
    progress_bar: bool,
    max_refused: float,
) -> tuple[ADFState, Records]:
    """Run epoch after epoch.

    :param data: rows and other arrays.
    :param keys: one key, or R keys, per epoch.
    :param orders: order of the rows per epoch, or ``None``.
    :param max_refused: share of refused updates above which to warn, as soon as it is seen.
    """
    num_epochs = keys.shape[0]
    passes: list[Pass] = []
    warned = False
    with tqdm.trange(num_epochs, disable=not progress_bar) as bar:
        try:
            for k in bar:
                order = None if orders is None else orders[k]
                after, record = program.epoch(state, *data, keys[k], order, 1.0)
                passes.append(jax.device_get(record))
                state = after
                warned = warned or _warn(passes[-1], k, max_refused)
                bar.set_postfix_str(f"log evidence {np.mean(passes[-1].log_z):.4g}", refresh=False)
        except KeyboardInterrupt:
            if not passes:
                raise
            warnings.warn(
                f"Interrupted: the result is that of {len(passes)} of {num_epochs} epochs.", stacklevel=3
            )
    return state, Records(*(jnp.stack([jnp.asarray(p[i]) for p in passes], axis=-1) for i in range(2)))


def _warn(record: Pass, epoch: int, max_refused: float) -> bool:
    share = float(np.max(record.refused))
    if not np.all(np.isfinite(record.log_z)):
        warnings.warn(
            f"AutoADF: log Z is not finite in epoch {epoch + 1}; check the scales of the data.", stacklevel=4
        )
        return True
    if share > max_refused:
        warnings.warn(
            f"AutoADF refused {share:.1%} of the updates of weights in epoch {epoch + 1}, more than"
            f" {max_refused:.0%}: the approximation is unreliable. Standardize the data, or"
            " choose a likelihood that fits them better.",
            stacklevel=4,
        )
        return True
    return False


def starting_means(means: Mapping[str, Any] | None) -> dict[str, Any]:
    """Given means in float64."""
    return {name: jnp.asarray(value, jnp.float64) for name, value in (means or {}).items()}
