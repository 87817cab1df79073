"""Initial values of a model: NumPyro's search for them, as one compiled program."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from numpyro.infer.util import initialize_model

from numpyro_bnn.program.compiled import evaluate

__all__ = ["initial_values"]


def initial_values(
    rng_key: jax.Array,
    model: Callable,
    init_strategy: Callable,
    args: tuple,
    kwargs: Mapping[str, Any],
    with_trace: bool = False,
) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """Search for values at which density and gradient are finite.

    :return: unconstrained values, and if asked for, the trace of the model that the search began with.
    """

    def search(rng_key: jax.Array, args: tuple, kwargs: Mapping[str, Any]) -> tuple[dict, Any, dict]:
        options = {"init_strategy": init_strategy, "model_args": args, "model_kwargs": kwargs}
        found, _, _, trace = initialize_model(rng_key, model, **options)
        valid = jnp.all(jnp.isfinite(ravel_pytree((found.potential_energy, found.z_grad))[0]))
        return found.z, valid, trace if with_trace else {}

    with jax.debug_key_reuse(False):  # NumPyro draws twice with one key
        z, valid, trace = evaluate(search, rng_key, args, kwargs, once=True)
        if not isinstance(valid, jax.core.Tracer) and not valid:
            z, _, trace = search(rng_key, args, kwargs)  # raises, and warns of values outside of supports
    return z, trace
