"""A NumPyro model as a potential that kernels evaluate on minibatches."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import random
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer.gibbs import GIBBS_SITES_KWARG
from numpyro.infer.util import initialize_model, transform_fn, unconstrain_fn

from numpyro_bnn._checks import argument_error
from numpyro_bnn._plates import full_plates
from numpyro_bnn.infer.model_checks import (
    KEY,
    Plate,
    check_indices,
    check_latent_sites,
    first_batch,
    observed_log_density,
    on_batch,
    only_rows,
    subsampled,
    trace_of,
    weight_jacobians,
)
from numpyro_bnn.sgmcmc.streams import Epochs, FullData, Keys, ProductStream, Stream, WithReplacement

# Sources of minibatch indices by name; a new source is a new row.
MINIBATCHES = {"with_replacement": WithReplacement, "epochs": Epochs}


@dataclass(frozen=True, eq=False)
class Target:
    """What a kernel needs from a model; ``args`` and ``kwargs`` are always arguments of the model.

    :param model: the model, with fixed values of its parameters.
    :param plates: subsampled plates by name.
    :param stochastic: whether the model asks for random numbers of its own (``numpyro.prng_key``: dropout).
    :param num_data: number of data points: N of the largest subsampled plate, or of the largest plate.
    :param rows: sizes of the plates that contain observations and no latent site.
    :param supports: supports of the latent sites.
    :param of_one_minibatch: names of deterministic sites inside subsampled plates, or that depend on their indices.
    :param potential_fn: NumPyro's potential of the model with the keyword ``_batch``.
    :param postprocess_fn: NumPyro's postprocessing of that model.
    """

    model: Callable
    plates: Mapping[str, Plate]
    stochastic: bool
    num_data: int
    rows: Mapping[str, int]
    supports: Mapping[str, Any]
    of_one_minibatch: frozenset[str]
    potential_fn: Callable
    postprocess_fn: Callable

    @property
    def subsampled(self) -> bool:
        """Whether gradients are noisy."""
        return bool(self.plates or self.stochastic)

    def potential(self, args: tuple, kwargs: Mapping[str, Any] | None, batch: Any) -> Callable:
        """The function z -> U~ of a minibatch; with ``batch="full"`` U on all the data."""
        return self.potential_fn(*args, _batch=batch, **(kwargs or {}))

    def postprocess(self, args: tuple, kwargs: Mapping[str, Any] | None) -> Callable:
        """The function from z to constrained values and deterministic sites."""
        # Any minibatch will do: constrained values do not depend on it, and sites that depend on it are left out.
        batch = first_batch(self.plates) | ({KEY: random.key(0)} if self.stochastic else {})
        values = self.postprocess_fn(*args, _batch=batch, **(kwargs or {}))
        return lambda z: {name: v for name, v in values(z).items() if name not in self.of_one_minibatch}

    def constrain(self, args: tuple, kwargs: Mapping[str, Any] | None) -> Callable:
        """The function from z to constrained values; it runs the model only if supports are computed in it."""
        bounds = jax.tree.leaves(list(self.supports.values()))
        if any(not isinstance(bound, int | float) for bound in bounds):
            return self.postprocess(args, kwargs)
        return partial(transform_fn, {name: biject_to(support) for name, support in self.supports.items()})

    def log_likelihood(self, args: tuple, kwargs: Mapping[str, Any] | None, rows: Mapping) -> Callable:
        """The function from z, and a key of the model's own randomness, to the log density of some rows by plate."""

        def total(z: dict[str, jax.Array], rng_key: Any = 0) -> jax.Array:
            placed = handlers.substitute(only_rows(self.model, rows), self.constrain(args, kwargs)(z))
            sites = handlers.trace(handlers.seed(placed, rng_key)).get_trace(*args, **(kwargs or {}))
            return observed_log_density(sites)

        return total


def bind(
    call: str,
    model: Callable,
    rng_key: jax.Array,
    init_strategy: Callable,
    args: tuple,
    kwargs: Mapping[str, Any] | None,
    temperature: float = 1.0,
) -> tuple[Target, dict[str, jax.Array]]:
    """Read a model, refuse what would be silently wrong, and find initial unconstrained values.

    :param call: name of the kernel, for error messages.
    :param rng_key: one key, or a batch of them for vectorized chains.
    """
    kwargs = dict(kwargs or {})
    model = weight_jacobians(model, temperature)  # U(z) / T has the Jacobian once if U has it T times
    # Parallel chains start inside a compiled program, whose tracers the kernel must not keep.
    with jax.ensure_compile_time_eval():
        traced, stochastic = trace_of(model, 0, args, kwargs)
        fixed = {name: site["value"] for name, site in traced.items() if site["type"] in ("param", "mutable")}
        if fixed:  # parameters start at random values, which MCMC keeps
            model = handlers.substitute(model, data=fixed)
            traced, stochastic = trace_of(model, 0, args, kwargs)
    plates = subsampled(call, traced)
    check_latent_sites(call, traced, plates)
    of_one_minibatch: frozenset[str] = frozenset()
    if plates:
        of_one_minibatch = check_indices(call, model, traced, plates, args, kwargs, stochastic=stochastic)
    with jax.debug_key_reuse(False):  # NumPyro's search for initial values draws twice with one key
        info = initialize_model(
            rng_key,
            on_batch(model, plates),
            init_strategy=init_strategy,
            dynamic_args=True,
            model_args=args,
            model_kwargs=kwargs,
        )
    all_sizes = [site["args"][0] for site in traced.values() if site["type"] == "plate"]
    target = Target(
        model=model,
        plates=plates,
        stochastic=stochastic,
        num_data=max([plate.size for plate in plates.values()] or all_sizes, default=1),
        rows=_rows(traced),
        supports={name: traced[name]["fn"].support for name in info.param_info.z},
        of_one_minibatch=of_one_minibatch,
        potential_fn=info.potential_fn,
        postprocess_fn=info.postprocess_fn,
    )
    return target, info.param_info.z


def _rows(traced: Mapping[str, Any]) -> dict[str, int]:
    inside: dict[bool, set[str]] = {True: set(), False: set()}
    for site in traced.values():
        if site["type"] == "sample":
            inside[site["is_observed"]] |= {frame.name for frame in site["cond_indep_stack"]}
    return {name: traced[name]["args"][0] for name in sorted(inside[True] - inside[False])}


def given_values(
    call: str, target: Target, z: Any, given: Any, args: tuple, kwargs: Mapping[str, Any] | None
) -> dict[str, jax.Array]:
    """Take initial values that a user gives instead of ``z``; refuse other sites or shapes."""
    if GIBBS_SITES_KWARG in (kwargs or {}):  # `Gibbs` passes constrained values
        given = unconstrain_fn(full_plates(target.model), args, kwargs or {}, given)
    shapes, wanted = ({k: jnp.shape(v) for k, v in tree.items()} for tree in (given, z))
    if shapes != wanted:
        instead = f"Pass unconstrained values shaped {wanted}."
        raise argument_error(call, "init_params", f"shapes {shapes}", instead)
    return {name: jnp.asarray(given[name], z[name].dtype) for name in z}


def stream_of(target: Target, minibatches: str) -> Stream:
    """Source of the minibatches of a model: indices of every subsampled plate, and a key if the model needs one."""
    streams: dict[str, Any] = {
        name: MINIBATCHES[minibatches](plate.size, plate.batch_size) for name, plate in target.plates.items()
    }
    if target.stochastic:
        streams[KEY] = Keys()
    return ProductStream(streams) if streams else FullData()
