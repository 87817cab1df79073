"""What a model does with its minibatches: read from a trace, and refused where it would be silently wrong."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from numpyro import handlers
from numpyro.infer.initialization import init_to_sample
from numpyro.primitives import Messenger

from numpyro_bnn._checks import argument_error
from numpyro_bnn._dependence import dependence, indexed_lengths
from numpyro_bnn.infer.plates import Plate, first_batch, give_indices, on_batch

__all__ = ["check_indices", "check_latent_sites", "subsampled", "trace_of"]


class _asks_for_keys(Messenger):
    """Note whether a model asks for random numbers of its own."""

    asked = False

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "prng_key":
            self.asked = True


def trace_of(model: Callable, seed: int, args: tuple, kwargs: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Trace a model from its prior; also tell whether it asks for random numbers of its own."""
    spy = _asks_for_keys()
    with spy:
        started = handlers.substitute(
            handlers.seed(give_indices(model, None), seed), substitute_fn=init_to_sample
        )
        traced = handlers.trace(started).get_trace(*args, **kwargs)
    return traced, spy.asked


def subsampled(call: str, traced: Mapping[str, Any]) -> dict[str, Plate]:
    """The plates of a trace that see a part of their indices.

    :raises ValueError: for a part larger than the whole.
    """
    sites = {name: site["args"] for name, site in traced.items() if site["type"] == "plate"}
    plates = {name: Plate(*args) for name, args in sites.items() if args[1] not in (None, args[0])}
    for name, plate in plates.items():
        if plate.batch_size > plate.size:
            raise argument_error(
                call,
                "model",
                f"plate {name!r} with subsample_size {plate.batch_size}",
                f"Take at most its size, {plate.size}.",
            )
    return plates


def check_latent_sites(call: str, traced: Mapping[str, Any], plates: Mapping[str, Plate]) -> None:
    """Refuse discrete latent sites, and latent sites inside a subsampled plate."""
    for name, site in traced.items():
        if site["type"] != "sample" or site["is_observed"]:
            continue
        if site["fn"].support.is_discrete:
            raise argument_error(
                call, "model", f"the discrete latent site {name!r}", "Sum it out: a gradient cannot move it."
            )
        inside = [frame.name for frame in site["cond_indep_stack"] if frame.name in plates]
        if inside:
            raise argument_error(
                call,
                "model",
                f"the latent site {name!r} inside the subsampled plate {inside[0]!r}",
                "Each minibatch would give its values to other data points. Sample it outside the plate at full size"
                " and index it, or run without `subsample_size`.",
            )


def check_indices(
    call: str, model: Callable, traced: dict, plates: Mapping[str, Plate], args: tuple, kwargs: dict
) -> None:
    """The likelihood is scaled by N / B, so its minibatch must be a fresh part of N data points."""
    values = {name: site["value"] for name, site in traced.items() if site["type"] == "sample"}

    def likelihood(batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        fixed = handlers.substitute(on_batch(model, plates), substitute_fn=lambda s: _latent_value(s, values))
        sites = handlers.trace(handlers.seed(fixed, 0)).get_trace(*args, _batch=batch, **kwargs)
        observed = [s for s in sites.values() if s["type"] == "sample" and s["is_observed"]]
        return {"total": sum((jnp.sum(s["fn"].log_prob(s["value"])) for s in observed), jnp.zeros(()))}

    fresh = first_batch(plates)
    used = dependence(likelihood, fresh)["total"]
    for name, plate in plates.items():
        if name not in used:
            raise argument_error(
                call,
                "model",
                f"plate {name!r}, whose indices the likelihood does not use",
                f"Its data would be scaled by {plate.size}/{plate.batch_size} as if they were a fresh minibatch each"
                f" step. Pass all {plate.size} rows and index them: `with plate(...) as i: ... obs=y[i]`.",
            )
        reached = indexed_lengths(partial(_replaced, likelihood, fresh, name), fresh[name])
        if reached and min(reached) < plate.size:
            raise argument_error(
                call,
                "model",
                f"plate {name!r} of size {plate.size} that indexes an array with {min(reached)} rows",
                "JAX would repeat the last row without a word. Make the plate as large as the data: `x.shape[0]`.",
            )
    _check_seeds(call, model, plates, args, kwargs)


def _replaced(likelihood: Callable, batch: Mapping[str, jax.Array], name: str, indices: jax.Array) -> Any:
    return likelihood({**batch, name: indices})


def _latent_value(site: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
    return values.get(site["name"]) if site["type"] == "sample" and not site["is_observed"] else None


def _check_seeds(call: str, model: Callable, plates: Mapping[str, Plate], args: tuple, kwargs: dict) -> None:
    """Under two seeds of ours a plate must get two keys, unless the model brings its own."""
    with jax.ensure_compile_time_eval():
        traces = [trace_of(model, seed, args, kwargs)[0] for seed in (1, 2)]
        keys = [
            {name: random.key_data(traced[name]["kwargs"]["rng_key"]) for name in plates} for traced in traces
        ]
    for name in plates:
        if np.array_equal(keys[0][name], keys[1][name]):
            raise argument_error(
                call,
                "model",
                "a model that is already seeded",
                "Its minibatch and random numbers would be the same at every step. Pass it without `handlers.seed`.",
            )
