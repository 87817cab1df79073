"""A NumPyro model as a potential that kernels evaluate on minibatches."""

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro import handlers
from numpyro.infer.gibbs import GIBBS_SITES_KWARG

from numpyro_bnn._checks import argument_error, check_finite, check_finite_arguments
from numpyro_bnn._options import Kind
from numpyro_bnn._types import Arrays, Attributes, Kwargs, PyTree, Sites, Trees
from numpyro_bnn.infer.model_arguments import ModelKernel, Start
from numpyro_bnn.infer.model_checks import KEY, RowSubset, check_indices, first_batch
from numpyro_bnn.program.batches import feeds_in
from numpyro_bnn.program.compiled import is_traced, run
from numpyro_bnn.program.plates import PARAMETERS, Plate, sites_of_type
from numpyro_bnn.program.posterior import Posterior
from numpyro_bnn.program.row_lengths import (
    check_feeds,
    check_rows,
    check_state,
    warn_of_slow_gathers,
)
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

    :param model: the model, with fixed values of its parameters; ``posterior``: what
        was read from it on a minibatch; ``plates``: subsampled plates by name.
    :param temperature: factor of the Jacobians, which counter the temperature of the
        sampler: U(z) / T has them once if U has them T times.
    :param stochastic: whether the model asks for random numbers of its own
        (``numpyro.prng_key``: dropout).
    :param num_data: number of data points: N of the largest subsampled plate, or of the
        largest plate.
    :param rows: sizes of the plates of observations that are subsampled, or contain no
        latent site.
    :param of_one_minibatch: names of deterministic sites inside subsampled plates, or
        that depend on their indices.
    """

    model: Callable
    posterior: Posterior
    temperature: float
    plates: Mapping[str, Plate]
    stochastic: bool
    num_data: int
    rows: Mapping[str, int]
    of_one_minibatch: frozenset[str]

    @property
    def subsampled(self) -> bool:
        """Whether gradients are noisy."""
        return bool(self.plates or self.stochastic)

    def on(self, args: tuple, kwargs: Kwargs | None) -> Posterior:
        """The model on some arguments; refuse other sizes of its plates."""
        if self.model is self.posterior.model:
            posterior = self.posterior.with_arguments(args, kwargs)
        else:
            posterior = Posterior(self.model, args, kwargs, full=False)
        for name, plate in posterior.plates.items():
            if (started := self.plates.get(name)) != plate:
                got = (
                    f"data for which plate {name!r} has size and subsample size "
                    f"{tuple(plate)}"
                )
                instead = (
                    f"The run was started with {started and tuple(started)}: start a "
                    "new one for other sizes."
                )
                raise argument_error("MCMC.run", "model arguments", got, instead)
        return posterior

    def potential(
        self,
        args: tuple,
        kwargs: Kwargs | None,
        batch: PyTree,
        standardized: bool = False,
    ) -> Callable:
        """The function z -> U~ of a minibatch; with ``batch="full"`` U on all the data.

        :param standardized: as for :meth:`Posterior.potential`.
        """
        posterior, rng_key = self.on(args, kwargs), random.key(0)
        rows: Mapping[str, Any] = {}
        if isinstance(batch, RowSubset):
            rows, rng_key = batch.indices, batch.batch.get(KEY, rng_key)
        elif not isinstance(batch, str):
            rows = {name: batch[name] for name in self.plates}
            rng_key = batch[KEY] if self.stochastic else rng_key
        return lambda z: posterior.potential(
            z, rows, rng_key, self.temperature, standardized
        )

    def evaluator(self, args: tuple, kwargs: Kwargs | None) -> Callable:
        """:meth:`potential` as ``evaluate(z, batch)``, which reads the model on all the
        data only once.
        """
        full = jax.jit(self.potential(args, kwargs, "full"))

        def evaluate(z: PyTree, batch: PyTree) -> Array:
            if isinstance(batch, str):
                return full(z)
            return self.potential(args, kwargs, batch)(z)

        return evaluate

    def some_batch(self) -> dict[str, Array]:
        """The first rows of every plate, and a key if the model needs one."""
        batch = first_batch(self.plates)
        if self.stochastic:
            batch[KEY] = random.key(0)
        return batch

    def postprocess(self, args: tuple, kwargs: Kwargs | None) -> Callable:
        """The function from z to constrained values and deterministic sites."""
        posterior = self.on(args, kwargs)
        computed = sites_of_type(posterior.sites, "deterministic")
        if not computed:
            return posterior.constrain
        of_all = [name for name in computed if name not in self.of_one_minibatch]

        def values(posterior: Posterior, z: Arrays) -> dict:
            constrained = posterior.constrain(z)
            # Any minibatch will do: sites that depend on it are left out.
            rows = first_batch(self.plates)
            sites = posterior.at_rows(constrained, rows, only=of_all)
            for name, site in sites.items():
                constrained[name] = site["value"]
            return {n: constrained[n] for n in posterior.sites if n in constrained}

        return posterior.prepare(values, runs_rarely=False)

    def constrain(self, args: tuple, kwargs: Kwargs | None) -> Callable:
        """The function from z to constrained values; ``Gibbs`` gives only those of a
        block.
        """
        return partial(self.on(args, kwargs).constrain, some=True)

    def log_likelihood(
        self, args: tuple, kwargs: Kwargs | None, rows: Mapping
    ) -> Callable:
        """The function from z, and a key of the model's own randomness, to the log
        density of some rows by plate.
        """
        posterior = self.on(args, kwargs)

        def total(z: Arrays, rng_key: Array | int = 0) -> Array:
            log_densities = posterior.log_likelihood(z, rows, rng_key)
            return sum(map(jnp.sum, log_densities.values()), jnp.zeros(()))

        return total


def bind(
    call: str,
    model: Callable,
    start: Start,
    init_strategy: Callable,
    temperature: float = 1.0,
    learn: Callable[[Posterior], Posterior] | None = None,
    search: bool = True,
) -> tuple[Target, dict[str, Array]]:
    """Read a model, refuse what would be silently wrong, and find initial unconstrained
    values.

    :param call: name of the kernel, for error messages.
    :param learn: learns the parameters of ``priors.Learned``.
    :param search: as for :meth:`Posterior.initial`.
    """
    args, kwargs, posterior = start.args, start.kwargs, start.posterior
    if posterior is None:
        posterior = on_minibatch(call, model, args, kwargs)
    reading = _with_parameters(call, posterior, args, kwargs, learn)
    model = reading.model
    sites, plates = reading.sites, reading.plates
    for name in reading.latent:
        if sites[name]["fn"].support.is_discrete:
            got = f"the discrete latent site {name!r}"
            instead = "Sum over its values: a gradient cannot move it."
            raise argument_error(call, "model", got, instead)
    with _explained(call, model, args, kwargs):
        of_one_minibatch = check_indices(call, reading) if plates else frozenset()
    check_rows(call, reading, args, kwargs)
    if feeds_in(args, kwargs):
        check_feeds(call, reading, args, kwargs)
    warn_of_slow_gathers(call, reading)
    changed = sites.keys() ^ Posterior(model, args, kwargs, full=False).sites.keys()
    if changed:
        names = ", ".join(map(repr, sorted(changed)))
        got = f"a model whose sites change from call to call: {names}"
        instead = "Give every site the same name in each call."
        raise argument_error(call, "model", got, instead)
    try:
        z = reading.initial(start.rng_key, init_strategy, search)
    except (RuntimeError, UserWarning):  # NumPyro warns before it gives up
        check_finite_arguments(call, args, kwargs)
        raise
    counted = plates or sites_of_type(sites, "plate")
    target = Target(
        model=model,
        posterior=reading.without_data(),
        temperature=temperature,
        plates=plates,
        stochastic=reading.stochastic,
        num_data=max((sites[name]["args"][0] for name in counted), default=1),
        rows=_rows(sites, plates),
        of_one_minibatch=of_one_minibatch,
    )
    return target, z


def _with_parameters(
    call: str,
    posterior: Posterior,
    args: tuple,
    kwargs: Kwargs,
    learn: Callable[[Posterior], Posterior] | None,
) -> Posterior:
    """What the model with values of its parameters is on a minibatch."""
    reading = posterior.with_arguments(args, kwargs)
    check_state(call, "model", reading)
    if reading.learned and learn is not None:
        reading = learn(reading)
    if start_values := held_parameters(call, reading):
        model = handlers.substitute(reading.model, data=start_values)
        reading = Posterior(model, args, kwargs, full=False)
    return reading


def on_minibatch(call: str, model: Callable, args: tuple, kwargs: Kwargs) -> Posterior:
    """What a model is on a minibatch, if it has any; errors in the name of ``call``."""
    with _explained(call, model, args, kwargs):
        return Posterior(model, args, kwargs, full=False)


@contextmanager
def _explained(
    call: str, model: Callable, args: tuple, kwargs: Kwargs
) -> Iterator[None]:
    """Explain errors of a model on a minibatch that it does not raise on all rows."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if "argument `" in str(error):  # ours
            raise
        Posterior(model, args, kwargs)
        got = f"a model that fails on a minibatch ({error})"
        instead = "Index every array that has one row per data point: `x[i]`."
        raise argument_error(call, "model", got, instead) from error


def with_parameters(model: Callable, values: Arrays) -> Callable:
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


def held_parameters(call: str, reading: Posterior) -> Trees:
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


def _rows(traced: Sites, plates: Mapping[str, Plate]) -> dict[str, int]:
    inside: dict[bool, set[str]] = {True: set(), False: set()}
    for site in sites_of_type(traced, "sample").values():
        for frame in site["cond_indep_stack"]:
            inside[site["is_observed"]].add(frame.name)
    return {
        name: traced[name]["args"][0]
        for name in sorted(inside[True] - inside[False].difference(plates))
    }


def given_values(
    call: str, target: Target, z: PyTree, start: Start
) -> dict[str, Array]:
    """Take initial values that a user gives instead of ``z``; refuse other sites or
    shapes, and values without a density.
    """
    user_values = start.init_params
    if GIBBS_SITES_KWARG in start.kwargs:  # `Gibbs` passes constrained values
        user_values = target.on(start.args, start.kwargs).unconstrain(user_values)
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
    z = {name: jnp.asarray(user_values[name], z[name].dtype) for name in z}
    check_start(call, "init_params", target, z, start)
    return z


def check_start(
    call: str,
    argument: str,
    target: Target,
    z: PyTree,
    start: Start,
) -> None:
    """Refuse to start where the density, of the first minibatch if there are any, is 0
    or has no value.
    """
    if is_traced(z):
        return

    def potentials(z: PyTree, args: tuple, kwargs: Kwargs) -> Array:
        potential = target.potential(args, kwargs, target.some_batch() or "full")
        return potential(z)[None] if start.single else jax.vmap(potential)(z)

    values = run(potentials, z, start.args, start.kwargs, runs_rarely=True)
    energies = np.asarray(values)
    for chain in np.flatnonzero(~np.isfinite(energies)):
        got = f"a start of chain {chain} where the log density is {-energies[chain]}"
        instead = "Start where it is finite, within the bounds of the likelihood."
        raise argument_error(call, argument, got, instead)


def stream_of(target: Target, minibatches: str) -> Stream:
    """Source of the minibatches of a model: indices of every subsampled plate, and a
    key if the model needs one.
    """
    streams: dict[str, PyTree] = {
        name: MINIBATCHES[minibatches](plate.size, plate.batch_size)
        for name, plate in target.plates.items()
    }
    if target.stochastic:
        streams[KEY] = Keys()
    return ProductStream(streams) if streams else FullData()


class RunsTarget(Protocol):
    """What the chains of a run do, on a target."""

    @property
    def target(self) -> Target: ...


P = TypeVar("P", bound=RunsTarget)


class TargetKernel(ModelKernel, Generic[P]):
    """A kernel of one target: its ``begin`` sets the plan of the run."""

    _plan: P | None = None

    @abstractmethod
    def _reset(self, model: Callable) -> None:
        """Discard what was built for a model and its arguments."""

    @property
    def plan(self) -> P:
        """What the chains of this run do."""
        if self._plan is None:
            came = "a kernel that is not initialized"
            raise argument_error(self._call, "state", came, "Call `init` first.")
        return self._plan

    @property
    def target(self) -> Target:
        """The posterior of this run: the model with its data."""
        return self.plan.target

    def postprocess_fn(
        self, model_args: tuple, model_kwargs: Kwargs | None
    ) -> Callable:
        arguments = self._arguments.restored(model_args, model_kwargs)
        return self.target.postprocess(*arguments)

    def get_constrain_fn(
        self, model_args: tuple, model_kwargs: Kwargs | None
    ) -> Callable:
        arguments = self._arguments.restored(model_args, model_kwargs)
        return self.target.constrain(*arguments)

    def wrap_model(self, wrapper: Callable) -> Self:
        kernel = copy.copy(self)
        kernel._reset(wrapper(self._model))
        return kernel

    def __getstate__(self) -> Attributes:
        return {**super().__getstate__(), "_plan": None}
