"""A NumPyro model as a minibatch potential: its plates, its potentials, and checks that refuse silent errors."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer.initialization import init_to_sample
from numpyro.infer.util import initialize_model, transform_fn, unconstrain_fn
from numpyro.primitives import Messenger

from numpyro_bnn._dependence import dependence, indexed_lengths
from numpyro_bnn._errors import argument_error
from numpyro_bnn._plates import full_plates
from numpyro_bnn.sgmcmc import Epochs, Keys, Nothing, Stream, Together, WithReplacement

__all__ = ["MINIBATCHES", "Plate", "Target", "bind", "stream_of"]

# Sources of minibatch indices by name: a new one is a row here.
MINIBATCHES = {"with_replacement": WithReplacement, "epochs": Epochs}

KEY = "prng_key"  # entry of a batch that seeds the model's own randomness


class Plate(NamedTuple):
    """A subsampled plate: N data points, B of them per minibatch."""

    size: int
    batch_size: int


class Target(NamedTuple):
    """What a kernel needs of a model.

    :param plates: subsampled plates by name.
    :param stochastic: whether the model asks for random numbers of its own (``numpyro.prng_key``: dropout).
    :param num_data: data points: N of the largest subsampled plate, or of the largest plate.
    :param potential: ``potential(args, kwargs, batch) -> (z -> U~)``; with ``batch="full"`` U on all the data.
    :param postprocess: ``postprocess(args, kwargs) -> (z -> constrained values and deterministic sites)``.
    :param constrain: the same without deterministic sites, and without running the model where it can.
    :param unconstrain: ``unconstrain(args, kwargs) -> (constrained values -> z)``.
    """

    plates: Mapping[str, Plate]
    stochastic: bool
    num_data: int
    potential: Callable
    postprocess: Callable
    constrain: Callable
    unconstrain: Callable


class _indices(Messenger):
    """Give subsampled plates their indices: O(B), where NumPyro's own draw costs O(N); and a model its keys.

    Keys are set as values: NumPyro's potential would put a constant in the place of what a ``seed`` handler offers.

    :param batch: indices by plate; ``None`` for random ones.
    :param plates: the plates that ``batch`` was made for.
    """

    def __init__(
        self, fn: Callable, batch: Mapping[str, jax.Array] | None, plates: Mapping[str, Plate] | None = None
    ) -> None:
        self.batch = batch
        self.plates = plates or {}
        self.key = None if batch is None else batch.get(KEY)
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "prng_key" and self.key is not None and msg["value"] is None:
            self.key, msg["value"] = random.split(self.key)
        if msg["type"] != "plate" or msg["value"] is not None:
            return
        if self.batch is None:
            msg["fn"] = _draw_indices
            return
        name, now, then = msg["name"], tuple(msg["args"]), self.plates.get(msg["name"])
        if then is None or now != tuple(then):
            raise argument_error(
                "MCMC.run",
                "model arguments",
                f"data with which plate {name!r} has size and subsample size {now}",
                f"The run was started with {then and tuple(then)}: start a new one for other sizes.",
            )
        msg["value"] = self.batch[name]


def _draw_indices(size: int, subsample_size: int, rng_key: Any = None) -> jax.Array:
    return random.randint(rng_key, (subsample_size,), 0, size)


class _asks_for_keys(Messenger):
    """Note whether a model asks for random numbers of its own."""

    asked = False

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "prng_key":
            self.asked = True


def _on_batch(model: Callable, plates: Mapping[str, Plate]) -> Callable:
    """The model with one more keyword, ``_batch``: indices by plate, ``None`` for random ones, or "full"."""

    def on_batch(*args: Any, _batch: Any = None, **kwargs: Any) -> Any:
        if isinstance(_batch, str):
            return full_plates(model)(*args, **kwargs)
        return _indices(model, _batch, plates)(*args, **kwargs)

    return on_batch


def bind(
    call: str,
    model: Callable,
    rng_key: jax.Array,
    init_strategy: Callable,
    args: tuple,
    kwargs: Mapping[str, Any] | None,
) -> tuple[Target, dict[str, jax.Array]]:
    """Inspect a model, refuse what would be silently wrong, and find initial values.

    :param call: name of the kernel, for error messages.
    :param rng_key: one key, or a batch of them for vectorised chains.
    :return: the target and initial unconstrained values.
    :raises ValueError: for latent sites inside a subsampled plate, discrete latent sites, a pre-seeded model, a
        plate whose indices are not used or reach beyond the data.
    """
    kwargs = dict(kwargs or {})
    # Parallel chains start inside a compiled program; what a kernel keeps must not belong to it.
    with jax.ensure_compile_time_eval():
        traced, stochastic = _trace(model, 0, args, kwargs)
        fixed = {name: site["value"] for name, site in traced.items() if site["type"] in ("param", "mutable")}
        if fixed:  # parameters start at random values, which MCMC keeps
            model = handlers.substitute(model, data=fixed)
            traced, stochastic = _trace(model, 0, args, kwargs)
    plates = _subsampled(call, traced)
    _check_latent_sites(call, traced, plates)
    if plates:
        _check_indices(call, model, traced, plates, args, kwargs)
    on_batch = _on_batch(model, plates)
    with jax.debug_key_reuse(False):  # NumPyro's search for initial values draws twice with one key
        info = initialize_model(
            rng_key,
            on_batch,
            init_strategy=init_strategy,
            dynamic_args=True,
            model_args=args,
            model_kwargs=kwargs,
        )
    hidden = {
        name
        for name, site in traced.items()
        if site["type"] == "deterministic" and any(f.name in plates for f in site["cond_indep_stack"])
    }

    def potential(args: tuple, kwargs: Mapping[str, Any] | None, batch: Any) -> Callable:
        return info.potential_fn(*args, _batch=batch, **(kwargs or {}))

    def postprocess(args: tuple, kwargs: Mapping[str, Any] | None) -> Callable:
        # One fixed minibatch: constrained values do not depend on it, and what does is left out.
        batch = _first_batch(plates) | ({KEY: random.key(0)} if stochastic else {})
        constrained = info.postprocess_fn(*args, _batch=batch, **(kwargs or {}))
        return lambda z: {name: value for name, value in constrained(z).items() if name not in hidden}

    supports = {name: traced[name]["fn"].support for name in info.param_info.z}

    def constrain(args: tuple, kwargs: Mapping[str, Any] | None) -> Callable:
        if any(_computed(support) for support in supports.values()):
            return postprocess(args, kwargs)
        return partial(transform_fn, {name: biject_to(support) for name, support in supports.items()})

    def unconstrain(args: tuple, kwargs: Mapping[str, Any] | None) -> Callable:
        return partial(unconstrain_fn, full_plates(model), args, kwargs or {})

    sizes = [p.size for p in plates.values()] or [
        s["args"][0] for s in traced.values() if s["type"] == "plate"
    ]
    target = Target(plates, stochastic, max(sizes, default=1), potential, postprocess, constrain, unconstrain)
    return target, info.param_info.z


def _first_batch(plates: Mapping[str, Plate]) -> dict[str, jax.Array]:
    return {name: jnp.arange(plate.batch_size) for name, plate in plates.items()}


def _computed(support: Any) -> bool:
    """Whether a support has bounds that the model computes."""
    return any(not isinstance(bound, int | float) for bound in jax.tree.leaves(support))


def stream_of(call: str, target: Target, minibatches: str) -> Stream:
    """Source of the minibatches of a model: indices of every subsampled plate, and a key where it needs one."""
    streams: dict[str, Any] = {
        name: MINIBATCHES[minibatches](plate.size, plate.batch_size) for name, plate in target.plates.items()
    }
    if target.stochastic:
        streams[KEY] = Keys()
    return Together(streams) if streams else Nothing()


# -- inspection ----------------------------------------------------------------------------------------


def _trace(model: Callable, seed: int, args: tuple, kwargs: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    spy = _asks_for_keys()
    with spy:
        started = handlers.substitute(
            handlers.seed(_indices(model, None), seed), substitute_fn=init_to_sample
        )
        traced = handlers.trace(started).get_trace(*args, **kwargs)
    return traced, spy.asked


def _subsampled(call: str, traced: Mapping[str, Any]) -> dict[str, Plate]:
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


def _check_latent_sites(call: str, traced: Mapping[str, Any], plates: Mapping[str, Plate]) -> None:
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


def _check_indices(
    call: str, model: Callable, traced: dict, plates: Mapping[str, Plate], args: tuple, kwargs: dict
) -> None:
    """The likelihood is scaled by N / B, so its minibatch must be a fresh part of N data points."""
    values = {name: site["value"] for name, site in traced.items() if site["type"] == "sample"}

    def likelihood(batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        fixed = handlers.substitute(
            _on_batch(model, plates), substitute_fn=lambda s: _latent_value(s, values)
        )
        sites = handlers.trace(handlers.seed(fixed, 0)).get_trace(*args, _batch=batch, **kwargs)
        observed = [s for s in sites.values() if s["type"] == "sample" and s["is_observed"]]
        return {"total": sum((jnp.sum(s["fn"].log_prob(s["value"])) for s in observed), jnp.zeros(()))}

    fresh = _first_batch(plates)
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
        traces = [_trace(model, seed, args, kwargs)[0] for seed in (1, 2)]
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
