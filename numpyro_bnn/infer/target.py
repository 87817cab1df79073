"""A NumPyro model as a potential that kernels evaluate on minibatches."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer.gibbs import GIBBS_SITES_KWARG
from numpyro.infer.util import (
    constrain_fn,
    potential_energy,
    transform_fn,
    unconstrain_fn,
)

from numpyro_bnn._checks import argument_error, check_finite
from numpyro_bnn._options import Kind
from numpyro_bnn.infer.model_checks import (
    KEY,
    check_indices,
    constant_keys,
    first_batch,
    frames_of,
    lifted,
    on_batch,
    only_rows,
    weight_jacobians,
    within_support,
)
from numpyro_bnn.program.compiled import is_traced, run
from numpyro_bnn.program.plates import PARAMETERS, full_plates, sites_of_type
from numpyro_bnn.program.reading import Plate, Reading, initial_values
from numpyro_bnn.program.row_lengths import check_row_lengths, check_state
from numpyro_bnn.sgmcmc.streams import (
    Epochs,
    FullData,
    Keys,
    ProductStream,
    Stream,
    WithReplacement,
)

# Sources of minibatch indices by name; a new source is a new row.
MINIBATCHES = {"with_replacement": WithReplacement, "epochs": Epochs}


@dataclass(frozen=True, eq=False)
class Target:
    """What a kernel needs from a model; ``args`` and ``kwargs`` are always arguments of
    the model.

    :param model: the model, with fixed values of its parameters; ``plates``: subsampled
        plates by name.
    :param stochastic: whether the model asks for random numbers of its own
        (``numpyro.prng_key``: dropout).
    :param num_data: number of data points: N of the largest subsampled plate, or of the
        largest plate.
    :param rows: sizes of the plates of observations that are subsampled, or contain no
        latent site.
    :param transforms: from the real line to the latent sites; ``None`` if the model
        computes their supports.
    :param of_one_minibatch: names of deterministic sites inside subsampled plates, or
        that depend on their indices.
    :param computes_values: whether the model has deterministic sites.
    """

    model: Callable
    plates: Mapping[str, Plate]
    stochastic: bool
    num_data: int
    rows: Mapping[str, int]
    transforms: Mapping[str, Any] | None
    of_one_minibatch: frozenset[str]
    computes_values: bool

    @property
    def subsampled(self) -> bool:
        """Whether gradients are noisy."""
        return bool(self.plates or self.stochastic)

    def potential(
        self, args: tuple, kwargs: Mapping[str, Any] | None, batch: Any
    ) -> Callable:
        """The function z -> U~ of a minibatch; with ``batch="full"``
        U on all the data.
        """
        return partial(
            potential_energy, self._on_batch, args, {**(kwargs or {}), "_batch": batch}
        )

    def evaluator(self, args: tuple, kwargs: Mapping[str, Any] | None) -> Callable:
        """:meth:`potential` as ``evaluate(z, batch)``, which reads the model on all the
        data only once.
        """
        full = jax.jit(self.potential(args, kwargs, "full"))

        def evaluate(z: Any, batch: Any) -> jax.Array:
            if isinstance(batch, str):
                return full(z)
            return self.potential(args, kwargs, batch)(z)

        return evaluate

    def some_batch(self) -> dict[str, jax.Array]:
        """The first rows of every plate, and a key if the model needs one."""
        batch = first_batch(self.plates)
        if self.stochastic:
            batch[KEY] = random.key(0)
        return batch

    @property
    def _on_batch(self) -> Callable:
        return constant_keys(on_batch(self.model, self.plates))

    def postprocess(self, args: tuple, kwargs: Mapping[str, Any] | None) -> Callable:
        """The function from z to constrained values and deterministic sites."""
        if self.transforms is not None and not self.computes_values:
            return partial(transform_fn, self.transforms)
        # Any minibatch will do: constrained values do not depend on it, and sites that
        # depend on it are left out.
        batch = self.some_batch()

        def values(
            z: dict[str, jax.Array], args: tuple, kwargs: Mapping[str, Any]
        ) -> dict[str, jax.Array]:
            call = args, {**kwargs, "_batch": batch}
            constrained = constrain_fn(
                self._on_batch, *call, z, return_deterministic=True
            )
            for name in self.of_one_minibatch:
                constrained.pop(name, None)
            return constrained

        return lambda z: run(values, z, args, kwargs or {})

    def constrain(self, args: tuple, kwargs: Mapping[str, Any] | None) -> Callable:
        """The function from z to constrained values; it runs the model only if supports
        are computed in it.
        """
        if self.transforms is None:
            return self.postprocess(args, kwargs)
        return partial(transform_fn, self.transforms)

    def log_likelihood(
        self, args: tuple, kwargs: Mapping[str, Any] | None, rows: Mapping
    ) -> Callable:
        """The function from z, and a key of the model's own randomness, to the log
        density of some rows by plate.
        """

        def total(z: dict[str, jax.Array], rng_key: Any = 0) -> jax.Array:
            placed = handlers.substitute(
                only_rows(self.model, rows), self.constrain(args, kwargs)(z)
            )
            seeded = handlers.seed(placed, rng_key)
            trace = handlers.trace(seeded).get_trace(*args, **(kwargs or {}))
            log_density = jnp.zeros(())
            for site in sites_of_type(trace, "sample").values():
                if site["is_observed"]:
                    log_density += jnp.sum(site["fn"].log_prob(site["value"]))
            return log_density

        return total


def bind(
    call: str,
    model: Callable,
    rng_key: jax.Array,
    init_strategy: Callable,
    args: tuple,
    kwargs: Mapping[str, Any] | None,
    temperature: float = 1.0,
    learn: Callable[[], dict[str, Any]] = dict,
) -> tuple[Target, dict[str, jax.Array]]:
    """Read a model, refuse what would be silently wrong, and find initial unconstrained
    values.

    :param call: name of the kernel, for error messages.
    :param rng_key: one key, or a batch of them for vectorized chains.
    :param learn: gives the values of the parameters of ``priors.Learned``.
    """
    kwargs = dict(kwargs or {})
    # U(z) / T has the Jacobian once if U has it T times
    model = weight_jacobians(model, temperature)
    model, reading = _read(call, model, args, kwargs, learn)
    sites, plates = reading.sites, reading.plates
    for name in reading.latent:
        if sites[name]["fn"].support.is_discrete:
            got = f"the discrete latent site {name!r}"
            instead = "Sum over its values: a gradient cannot move it."
            raise argument_error(call, "model", got, instead)
    with _explained(call, model, args, kwargs):
        of_one_minibatch = check_indices(call, reading) if plates else frozenset()
    check_row_lengths(call, model, args, kwargs)
    try:
        bounded = on_batch(within_support(model), plates)
        z, _ = initial_values(rng_key, bounded, init_strategy, args, kwargs)
    except (RuntimeError, UserWarning):  # NumPyro warns before it gives up
        for place, leaf in jax.tree_util.tree_leaves_with_path((args, kwargs)):
            if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating):
                check_finite(call, f"args{jax.tree_util.keystr(place)}", leaf)
        raise
    except (AssertionError, KeyError) as error:
        changed = sites.keys() ^ Reading(model, args, kwargs, full=False).sites.keys()
        if not changed:
            raise
        names = ", ".join(map(repr, sorted(changed)))
        got = f"a model whose sites change from call to call: {names}"
        instead = "Give every site the same name in each call."
        raise argument_error(call, "model", got, instead) from error
    supports = {name: sites[name]["fn"].support for name in z}
    transforms = None
    if all(isinstance(bound, int | float) for bound in jax.tree.leaves(supports)):
        transforms = {name: biject_to(support) for name, support in supports.items()}
    counted = plates or sites_of_type(sites, "plate")
    target = Target(
        model=within_support(model),
        plates=plates,
        stochastic=reading.stochastic,
        num_data=max((sites[name]["args"][0] for name in counted), default=1),
        rows=_rows(sites, plates),
        transforms=transforms,
        of_one_minibatch=of_one_minibatch,
        computes_values=bool(sites_of_type(sites, "deterministic")),
    )
    return target, z


def _read(
    call: str,
    model: Callable,
    args: tuple,
    kwargs: Mapping[str, Any],
    learn: Callable[[], dict[str, Any]],
) -> tuple[Callable, Reading]:
    """The model with values of its parameters, its latent sites outside of subsampled
    plates; and what it is on a minibatch.
    """
    read = partial(Reading, args=args, kwargs=kwargs, full=False)
    with _explained(call, model, args, kwargs):
        reading = read(model)
    check_state(call, "model", reading)
    if reading.learned and (learned := learn()):
        model = handlers.substitute(model, data=learned)
        reading = read(model)
    if start_values := held_parameters(call, reading):
        model = handlers.substitute(model, data=start_values)
        reading = read(model)
    if any(frames_of(reading.sites[name], reading.plates) for name in reading.latent):
        model = lifted(model, reading.plates)
        reading = read(model)
    return model, reading


@contextmanager
def _explained(
    call: str, model: Callable, args: tuple, kwargs: Mapping[str, Any]
) -> Iterator[None]:
    """Explain errors of a model on a minibatch that it does not raise on all rows."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if "argument `" in str(error):  # ours
            raise
        Reading(model, args, kwargs)
        got = f"a model that fails on a minibatch ({error})"
        instead = "Index every array that has one row per data point: `x[i]`."
        raise argument_error(call, "model", got, instead) from error


def with_parameters(model: Callable, values: Mapping[str, Any]) -> Callable:
    """A model, and the one with its data if it hides them (``collapse``), with fixed
    values of its parameters.
    """
    if not values:
        return model
    parametrized = handlers.substitute(model, data=values)
    if predictive_model := getattr(model, "predictive_model", None):
        parametrized.predictive_model = handlers.substitute(
            predictive_model, data=values
        )
    return parametrized


def held_parameters(call: str, reading: Reading) -> dict[str, Any]:
    """The values at which parameters start, and which MCMC keeps; refuse those that
    start at random.
    """
    if not sites_of_type(reading.sites, *PARAMETERS):
        return {}
    start, redrawn = reading.draw([0, 1], PARAMETERS)
    for name in sites_of_type(reading.sites, "param"):
        values = map(jax.tree.leaves, (start[name], redrawn[name]))
        for value, other_value in zip(*values, strict=True):
            if isinstance(value, jax.core.Tracer) or np.array_equal(value, other_value):
                continue
            got = f"the parameter {name!r}, which starts at random values"
            instead = (
                "MCMC would keep them: learn them (`priors.Learned`, SVI), or give "
                "values (`priors.Fixed`)."
            )
            raise argument_error(call, "model", got, instead)
    return start


def _rows(traced: Mapping[str, Any], plates: Mapping[str, Plate]) -> dict[str, int]:
    inside: dict[bool, set[str]] = {True: set(), False: set()}
    for site in sites_of_type(traced, "sample").values():
        for frame in site["cond_indep_stack"]:
            inside[site["is_observed"]].add(frame.name)
    return {
        name: traced[name]["args"][0]
        for name in sorted(inside[True] - inside[False].difference(plates))
    }


def given_values(
    call: str,
    target: Target,
    z: Any,
    user_values: Any,
    args: tuple,
    kwargs: Mapping[str, Any] | None,
) -> dict[str, jax.Array]:
    """Take initial values that a user gives instead of ``z``; refuse other sites or
    shapes.
    """
    if GIBBS_SITES_KWARG in (kwargs or {}):  # `Gibbs` passes constrained values
        user_values = unconstrain_fn(
            full_plates(target.model), args, kwargs or {}, user_values
        )
    Kind(Mapping, "Pass a dictionary of unconstrained values by site.").check(
        call, "init_params", user_values
    )
    shapes = {name: jnp.shape(value) for name, value in user_values.items()}
    expected = {name: jnp.shape(value) for name, value in z.items()}
    if shapes != expected:
        instead = f"Pass unconstrained values shaped {expected}."
        raise argument_error(call, "init_params", f"shapes {shapes}", instead)
    for name, value in user_values.items():
        check_finite(call, f"init_params[{name!r}]", value)
    return {name: jnp.asarray(user_values[name], z[name].dtype) for name in z}


def check_start(
    call: str,
    argument: str,
    target: Target,
    z: Any,
    single: bool,
    args: tuple,
    kwargs: Mapping[str, Any] | None,
) -> None:
    """Refuse to start where the density, of the first minibatch if there are any, is 0
    or has no value.
    """
    if is_traced(z):
        return

    def potentials(z: Any, args: tuple, kwargs: Mapping[str, Any]) -> jax.Array:
        potential = target.potential(args, kwargs, target.some_batch() or "full")
        return potential(z)[None] if single else jax.vmap(potential)(z)

    energies = np.asarray(run(potentials, z, args, kwargs or {}, once=True))
    for chain in np.flatnonzero(~np.isfinite(energies)):
        got = f"a start of chain {chain} where the log density is {-energies[chain]}"
        instead = "Start where it is finite, within the bounds of the likelihood."
        raise argument_error(call, argument, got, instead)


def stream_of(target: Target, minibatches: str) -> Stream:
    """Source of the minibatches of a model: indices of every subsampled plate, and a
    key if the model needs one.
    """
    streams: dict[str, Any] = {
        name: MINIBATCHES[minibatches](plate.size, plate.batch_size)
        for name, plate in target.plates.items()
    }
    if target.stochastic:
        streams[KEY] = Keys()
    return ProductStream(streams) if streams else FullData()
