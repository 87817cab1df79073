"""A NumPyro model as a minibatch potential."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import random
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer.gibbs import GIBBS_SITES_KWARG
from numpyro.infer.util import initialize_model, transform_fn, unconstrain_fn

from numpyro_bnn._checks import argument_error
from numpyro_bnn._plates import full_plates
from numpyro_bnn.infer.inspection import check_indices, check_latent_sites, subsampled, trace_of
from numpyro_bnn.infer.plates import KEY, Plate, first_batch, on_batch, only_rows
from numpyro_bnn.sgmcmc.streams import Epochs, FullData, Keys, ProductStream, Stream, WithReplacement

__all__ = ["MINIBATCHES", "Target", "bind", "given_values", "stream_of"]

# Sources of minibatch indices by name: a new one is a row here.
MINIBATCHES = {"with_replacement": WithReplacement, "epochs": Epochs}


class Target(NamedTuple):
    """What a kernel needs of a model.

    :param plates: subsampled plates by name.
    :param stochastic: whether the model asks for random numbers of its own (``numpyro.prng_key``: dropout).
    :param num_data: data points: N of the largest subsampled plate, or of the largest plate.
    :param potential: ``potential(args, kwargs, batch) -> (z -> U~)``; with ``batch="full"`` U on all the data.
    :param postprocess: ``postprocess(args, kwargs) -> (z -> constrained values and deterministic sites)``.
    :param constrain: the same without deterministic sites, and without running the model where it can.
    :param rows: sizes of the plates that observations lie in and no latent site does.
    :param log_likelihood: ``log_likelihood(args, kwargs, rows) -> (z -> log density of the observations in rows)``.
    :param unconstrain: ``unconstrain(args, kwargs) -> (constrained values -> z)``.
    """

    plates: Mapping[str, Plate]
    stochastic: bool
    num_data: int
    potential: Callable
    postprocess: Callable
    constrain: Callable
    unconstrain: Callable
    rows: Mapping[str, int]
    log_likelihood: Callable


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
    :param rng_key: one key, or a batch of them for vectorized chains.
    :return: the target and initial unconstrained values.
    :raises ValueError: for latent sites inside a subsampled plate, discrete latent sites, a pre-seeded model, a
        plate whose indices are not used or reach beyond the data.
    """
    kwargs = dict(kwargs or {})
    # Parallel chains start inside a compiled program; what a kernel keeps must not belong to it.
    with jax.ensure_compile_time_eval():
        traced, stochastic = trace_of(model, 0, args, kwargs)
        fixed = {name: site["value"] for name, site in traced.items() if site["type"] in ("param", "mutable")}
        if fixed:  # parameters start at random values, which MCMC keeps
            model = handlers.substitute(model, data=fixed)
            traced, stochastic = trace_of(model, 0, args, kwargs)
    plates = subsampled(call, traced)
    check_latent_sites(call, traced, plates)
    if plates:
        check_indices(call, model, traced, plates, args, kwargs)
    batched = on_batch(model, plates)
    with jax.debug_key_reuse(False):  # NumPyro's search for initial values draws twice with one key
        info = initialize_model(
            rng_key,
            batched,
            init_strategy=init_strategy,
            dynamic_args=True,
            model_args=args,
            model_kwargs=kwargs,
        )
    hidden = _hidden(traced, plates)

    def potential(args: tuple, kwargs: Mapping[str, Any] | None, batch: Any) -> Callable:
        return info.potential_fn(*args, _batch=batch, **(kwargs or {}))

    def postprocess(args: tuple, kwargs: Mapping[str, Any] | None) -> Callable:
        # One fixed minibatch: constrained values do not depend on it, and what does is left out.
        batch = first_batch(plates) | ({KEY: random.key(0)} if stochastic else {})
        constrained = info.postprocess_fn(*args, _batch=batch, **(kwargs or {}))
        return lambda z: {name: value for name, value in constrained(z).items() if name not in hidden}

    supports = {name: traced[name]["fn"].support for name in info.param_info.z}

    def constrain(args: tuple, kwargs: Mapping[str, Any] | None) -> Callable:
        if any(_computed(support) for support in supports.values()):
            return postprocess(args, kwargs)
        return partial(transform_fn, {name: biject_to(support) for name, support in supports.items()})

    def unconstrain(args: tuple, kwargs: Mapping[str, Any] | None) -> Callable:
        return partial(unconstrain_fn, full_plates(model), args, kwargs or {})

    size, rows = _num_data(traced, plates), _rows(traced)
    seen = partial(_log_likelihood, model, constrain)
    target = Target(plates, stochastic, size, potential, postprocess, constrain, unconstrain, rows, seen)
    return target, info.param_info.z


def _hidden(traced: Mapping[str, Any], plates: Mapping[str, Plate]) -> set[str]:
    """Deterministic sites that are about one minibatch."""
    return {
        name
        for name, site in traced.items()
        if site["type"] == "deterministic" and any(f.name in plates for f in site["cond_indep_stack"])
    }


def _num_data(traced: Mapping[str, Any], plates: Mapping[str, Plate]) -> int:
    sizes = [p.size for p in plates.values()] or [
        s["args"][0] for s in traced.values() if s["type"] == "plate"
    ]
    return max(sizes, default=1)


def _log_likelihood(
    model: Callable, constrain: Callable, args: tuple, kwargs: Mapping[str, Any] | None, rows: Mapping
) -> Callable:
    def total(z: dict[str, jax.Array]) -> jax.Array:
        placed = handlers.substitute(only_rows(model, rows), constrain(args, kwargs)(z))
        sites = handlers.trace(handlers.seed(placed, 0)).get_trace(*args, **(kwargs or {})).values()
        seen = [site for site in sites if site["type"] == "sample" and site["is_observed"]]
        return sum((jnp.sum(site["fn"].log_prob(site["value"])) for site in seen), jnp.zeros(()))

    return total


def _rows(traced: Mapping[str, Any]) -> dict[str, int]:
    sample = [site for site in traced.values() if site["type"] == "sample"]
    inside: dict[bool, set[str]] = {True: set(), False: set()}
    for site in sample:
        inside[site["is_observed"]] |= {frame.name for frame in site["cond_indep_stack"]}
    return {name: traced[name]["args"][0] for name in sorted(inside[True] - inside[False])}


def _computed(support: Any) -> bool:
    """Whether a support has bounds that the model computes."""
    return any(not isinstance(bound, int | float) for bound in jax.tree.leaves(support))


def given_values(
    call: str, target: Target, z: Any, given: Any, args: tuple, kwargs: Mapping[str, Any] | None
) -> dict[str, jax.Array]:
    """Initial values that a user gives, checked.

    :param z: initial values found by :func:`bind`.
    :param given: values in their place.
    :raises ValueError: for other sites or shapes.
    """
    if GIBBS_SITES_KWARG in (kwargs or {}):  # `Gibbs` passes constrained values
        given = target.unconstrain(args, kwargs)(given)
    shapes, wanted = ({k: jnp.shape(v) for k, v in tree.items()} for tree in (given, z))
    if shapes != wanted:
        raise argument_error(
            call, "init_params", f"shapes {shapes}", f"Pass unconstrained values shaped {wanted}."
        )
    return {name: jnp.asarray(given[name], z[name].dtype) for name in z}


def stream_of(call: str, target: Target, minibatches: str) -> Stream:
    """Source of the minibatches of a model: indices of every subsampled plate, and a key where it needs one."""
    streams: dict[str, Any] = {
        name: MINIBATCHES[minibatches](plate.size, plate.batch_size) for name, plate in target.plates.items()
    }
    if target.stochastic:
        streams[KEY] = Keys()
    return ProductStream(streams) if streams else FullData()
