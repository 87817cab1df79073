"""The step loop of every sampler: gradient x dynamics x preconditioner x schedule x
temperature.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from numpyro_bnn._checks import argument_error
from numpyro_bnn._options import (
    Count,
    Kind,
    NonNegative,
    Number,
    Positive,
    PositiveInt,
    checked,
)
from numpyro_bnn._types import PyTree, Scalar
from numpyro_bnn.sgmcmc import streams
from numpyro_bnn.sgmcmc.interfaces import (
    Array,
    Dynamics,
    Evaluation,
    Gradient,
    Preconditioner,
    StepContext,
    StepRandomness,
    StepResult,
    select,
    squared_norm,
)
from numpyro_bnn.sgmcmc.preconditioners import Identity
from numpyro_bnn.sgmcmc.schedules import Schedule, as_schedule

# Number of values drawn ahead in one block: enough to amortize the cost of a draw, few
# enough to stay in cache.
_BLOCK_NORMALS, _BLOCK_STEPS = 2**15, 64
# Maximum memory for the data rows of a block.
_BLOCK_BYTES = 2**21
LOST = 200  # steps refused in a row after which a chain is marked as diverged


class Purpose(IntEnum):
    """What random numbers are for; each has a seed of its own."""

    NOISE = 0
    BATCH = 1
    UNIFORM = 2
    START = 3
    START_BATCH = 4
    PROBE = 5


class Statistics(NamedTuple):
    """Means over the steps since the last reset.

    :param num_steps: number of steps.
    :param kinetic_temperature: mean of r'r / P, r the whitened momentum after a step;
        None without momentum.
    :param configurational_temperature: mean of theta' grad U / P; its expectation is T
        at stationarity.
    :param accept_prob: mean acceptance probability; None without a Metropolis test.
    :param num_gradients: gradients of the minibatch potential evaluated so far.
    :param energy_variance: mean of the squared energy error of a step that was taken,
        divided by P; None if not reported.
    :param num_refused: number of steps that were not taken. They do not enter the
        means.
    :param num_undone: of these, steps to a finite end, which the dynamics refused.
    :param position: mean position (P,), and ``gradient``: mean gradient (P,), where the
        temperature is taken.
    """

    num_steps: Array
    kinetic_temperature: Array | None
    configurational_temperature: Array
    accept_prob: Array | None
    num_gradients: Array
    energy_variance: Array | None
    num_refused: Array
    num_undone: Array
    position: Array
    gradient: Array

    @property
    def refused_share(self) -> Array:
        """Fraction of the steps that were not taken."""
        return self._share(self.num_refused)

    @property
    def undone_share(self) -> Array:
        """Fraction of the steps that the dynamics refused, though their end was
        finite.
        """
        return self._share(self.num_undone)

    def _share(self, number: Array) -> Array:
        share = number / jnp.maximum(self.num_steps, 1)
        return share.astype(self.position.dtype)


class State(NamedTuple):
    """State of one chain of a :class:`Sampler`.

    :param position: (P,); ``step``: steps made so far, also the argument of the
        schedules.
    :param num_warmup: steps with a number below this one are warm-up: the
        preconditioner adapts.
    :param seeds: (6, 2), one for each :class:`Purpose`; step t has its own counters, so
        a chain can resume at any step.
    :param memory: state of the dynamics; ``estimator``: state of the gradient
        estimator.
    :param adaptation: state of the preconditioner.
    :param statistics: means over the steps: temperatures, acceptance, number of
        gradients, energy variance.
    :param refused_in_a_row: number of steps, up to the last one, that were not taken.
    :param first_divergence: first of 200 steps in a row that were not taken, the last
        of them after warm-up; or -1.
    """

    position: Array
    step: Array
    num_warmup: Array
    seeds: Array
    memory: PyTree
    estimator: PyTree
    adaptation: PyTree
    statistics: Statistics
    refused_in_a_row: Array
    first_divergence: Array


def fresh_seeds(rng_key: Array) -> Array:
    """Derive the seeds of a chain from one key; ``state._replace(seeds=...)`` gives new
    randomness.
    """
    return streams.seeds(rng_key, len(Purpose))


def reset_statistics(state: State) -> State:
    """Return the state with its means reset to zero, e.g. after warm-up."""
    return state._replace(statistics=jax.tree.map(jnp.zeros_like, state.statistics))


@dataclass(frozen=True, eq=False)
class Sampler:
    """A sampler assembled by :func:`build`; its methods are pure and can be jitted,
    vmapped and scanned.

    >>> import jax, jax.numpy as jnp
    >>> from numpyro_bnn.sgmcmc import BAOAB, Full
    >>> sampler = build(Full(lambda q: 0.5 * q @ q), BAOAB(friction=1.0), schedule=0.1)
    >>> chains = jax.vmap(sampler.init, (None, 0))(
    ...     jnp.zeros(3), jax.random.split(jax.random.key(0), 4)
    ... )
    >>> jax.vmap(sampler.step)(chains).position.shape
    (4, 3)
    """

    gradient: Gradient
    dynamics: Dynamics
    preconditioner: Preconditioner
    schedule: Schedule
    temperature: Schedule

    def init(self, position: Array, rng_key: Array, num_warmup: int = 0) -> State:
        """Start a chain.

        :param position: floating vector (P,).
        :param rng_key: one PRNG key, typed or legacy.
        :param num_warmup: number of steps in which the preconditioner adapts.
        :raises ValueError: for a position of another rank, or an adapting
            preconditioner without warm-up.
        :raises TypeError: for a position that is not floating, or a wrong key.
        """
        position = self._check_start(position, num_warmup)
        seeds = fresh_seeds(rng_key)
        estimator, adaptation = (
            self.gradient.init(position),
            self.preconditioner.init(position),
        )
        zero, step = jnp.zeros((), position.dtype), jnp.int32(0)
        memory = self._start_memory(position, step, seeds, estimator, adaptation)
        statistics = Statistics(
            num_steps=jnp.int32(0),
            kinetic_temperature=None
            if self.dynamics.momentum(memory) is None
            else zero,
            configurational_temperature=zero,
            accept_prob=zero if self.dynamics.exact else None,
            num_gradients=jnp.int32(0),
            energy_variance=zero if self.dynamics.reports_energy else None,
            num_refused=jnp.int32(0),
            num_undone=jnp.int32(0),
            position=jnp.zeros_like(position),
            gradient=jnp.zeros_like(position),
        )
        warmup, marks = (
            jnp.asarray(num_warmup, jnp.int32),
            (jnp.int32(0), jnp.int32(-1)),
        )
        return State(
            position,
            step,
            warmup,
            seeds,
            memory,
            estimator,
            adaptation,
            statistics,
            *marks,
        )

    def refresh(self, state: State, recenter: bool | Array = False) -> State:
        """Recompute what the state caches of the target, after its position or the
        target has changed.

        :param recenter: move the center of control variates to the position instead of
            keeping it.
        :return: the state with fresh gradients and potentials; momenta and thermostat
            are unchanged.
        """
        old_center = (
            state.position if state.estimator == () else state.estimator.position
        )
        estimator = self.gradient.init(jnp.where(recenter, state.position, old_center))
        fresh = self._start_memory(
            state.position, state.step, state.seeds, estimator, state.adaptation
        )
        memory = state.memory
        for name in self.dynamics.cached_fields:
            memory = memory._replace(**{name: getattr(fresh, name)})
        return state._replace(estimator=estimator, memory=memory)

    @property
    def refresh_cost(self) -> int:
        """How many gradients :meth:`refresh` costs: those that the dynamics caches, and
        one at a center.
        """
        cached = bool(self.dynamics.cached_fields)
        return cached * self.gradient.evaluations + hasattr(self.gradient, "center")

    def unlearned(self, state: State, position: Array) -> PyTree:
        """The state of the preconditioner of a chain, from its start if it adapts."""
        learns = self.preconditioner.adapts
        return self.preconditioner.init(position) if learns else state.adaptation

    def restart(self, state: State, position: Array, adaptation: PyTree) -> State:
        """Start a chain again at a position, with new momenta and this state of its
        preconditioner.
        """
        memory = self._start_memory(
            position, state.step, state.seeds, state.estimator, adaptation
        )
        marks = {"refused_in_a_row": jnp.int32(0), "first_divergence": jnp.int32(-1)}
        return state._replace(
            position=position, adaptation=adaptation, memory=memory, **marks
        )

    def step(self, state: State) -> State:
        """Make one step; ``run(state, n)`` equals n of them."""
        return self._advance(state, self._draw(state.seeds, state.step, state.position))

    @checked("sgmcmc.Sampler.run")
    def run(self, state: State, num_steps: PositiveInt) -> State:
        """Make ``num_steps`` steps in one compiled loop, with random numbers drawn
        ahead in blocks.

        :param num_steps: a Python integer, at least 1.
        """
        prepare, sampler, row_bytes = self._separated(state)
        normals = self.dynamics.rows * state.position.shape[0]
        most = min(
            _BLOCK_STEPS, _BLOCK_NORMALS // normals, _BLOCK_BYTES // max(1, row_bytes)
        )
        num_blocks = -(-num_steps // max(1, most))
        size = -(-num_steps // num_blocks)

        def run_block(block, state):
            steps = state.step + lax.iota(jnp.int32, size)
            draw = partial(
                jax.vmap(self._draw, (None, 0, None)),
                state.seeds,
                steps,
                state.position,
            )
            # The condition is always true; without it the compiler would hash each
            # index again for every use.
            blank = partial(jax.tree.map, jnp.zeros_like, jax.eval_shape(draw))
            draws = lax.cond(state.step >= 0, draw, blank)
            draws = draws._replace(batch=prepare(draws.batch))
            # The last block may be shorter; if it is not, a constant bound compiles to
            # a cheaper loop.
            bound = (
                size
                if num_blocks * size == num_steps
                else jnp.minimum(size, num_steps - block * size)
            )

            def advance(i, state):
                return sampler._advance(state, jax.tree.map(lambda x: x[i], draws))

            return lax.fori_loop(0, bound, advance, state)

        return lax.fori_loop(0, num_blocks, run_block, state)

    def _separated(
        self, state: State
    ) -> tuple[Callable[[PyTree], PyTree], "Sampler", int]:
        """Return a function that prepares the minibatches of a block, the sampler for
        these, and bytes per step.
        """
        batch = jax.eval_shape(
            self.gradient.stream.draw, state.seeds[Purpose.BATCH], state.step
        )
        if not jax.tree.leaves(batch):
            return (lambda batches: batches), self, 0
        prepare, gradient = self.gradient.separate(state.position, batch)
        prepared = jax.tree.leaves(jax.eval_shape(prepare, batch))
        row_bytes = sum(x.size * x.dtype.itemsize for x in prepared)
        return jax.vmap(prepare), replace(self, gradient=gradient), row_bytes

    def _check_start(self, position: Array, num_warmup: Scalar) -> Array:
        call, position = "sgmcmc.Sampler.init", jnp.asarray(position)
        if position.ndim != 1 or position.shape[0] == 0:
            instead = "Pass one flat vector (P,): see `ravel_pytree`."
            raise argument_error(call, "position", f"shape {position.shape}", instead)
        if not jnp.issubdtype(position.dtype, jnp.floating):
            raise argument_error(
                call,
                "position",
                f"dtype {position.dtype}",
                "Pass floating numbers.",
                TypeError,
            )
        if isinstance(num_warmup, int):
            Count(0).check(call, "num_warmup", num_warmup)
            if num_warmup == 0 and self.preconditioner.adapts:
                instead = (
                    "The preconditioner learns during warm-up: pass `num_warmup` of at "
                    "least 1."
                )
                raise argument_error(call, "num_warmup", num_warmup, instead)
        return position

    def _start_memory(
        self,
        position: Array,
        step: Array,
        seeds: Array,
        estimator: PyTree,
        learned: PyTree,
    ) -> PyTree:
        """Return the initial memory of the dynamics at a position: momenta drawn,
        gradients evaluated.
        """
        size, dtype = position.shape[0], position.dtype
        noise = streams.normal(seeds[Purpose.START], step, size, dtype)[None]
        batch = self.gradient.stream.draw(seeds[Purpose.START_BATCH], step)
        draw = StepRandomness(noise, batch, jnp.ones((), dtype))
        context = self._context(estimator, learned, step, jnp.asarray(False), dtype)
        memory = self.dynamics.init(context, position, draw)
        # A minibatch can show a border that the ones before did not: without a
        # gradient, the chain can still leave.
        for name in self.dynamics.cached_fields:
            value = getattr(memory, name)
            if value.ndim:
                known = jnp.all(jnp.isfinite(value))
                memory = memory._replace(**{name: jnp.where(known, value, 0.0)})
        return memory

    def _draw(self, seeds: Array, step: Array, position: Array) -> StepRandomness:
        """Make all random numbers of one step."""
        rows, size = self.dynamics.rows, position.shape[0]
        flat = streams.normal(seeds[Purpose.NOISE], step, rows * size, position.dtype)
        batch = self.gradient.stream.draw(seeds[Purpose.BATCH], step)
        uniform = streams.uniform(seeds[Purpose.UNIFORM], step, position.dtype)
        return StepRandomness(flat.reshape(rows, size), batch, uniform)

    def _context(
        self,
        estimator: PyTree,
        adaptation: PyTree,
        step: Array,
        warming: Any,
        dtype: DTypeLike,
    ) -> StepContext:
        def evaluate(position, batch):
            potential, gradient = self.gradient(estimator, position, batch)
            learned = self.preconditioner.update(adaptation, gradient, warming)
            return Evaluation(position, potential, gradient, learned)

        eps, temperature = (
            jnp.asarray(schedule(step), dtype)
            for schedule in (self.schedule, self.temperature)
        )
        root, transpose = self.preconditioner.root, self.preconditioner.transpose
        return StepContext(
            evaluate, root, transpose, adaptation, eps, temperature, warming
        )

    def _advance(self, state: State, draw: StepRandomness) -> State:
        """Make one step with given random numbers; it is taken if all of its end is
        finite.
        """
        step, dtype = state.step, state.position.dtype
        context = self._context(
            state.estimator, state.adaptation, step, step < state.num_warmup, dtype
        )
        move = self.dynamics.step(context, state.position, state.memory, draw)
        virial = jnp.vdot(move.evaluation.position, move.evaluation.gradient)
        momentum = self.dynamics.momentum(move.memory)
        # The sum is finite only if all terms are: cheaper than testing each. Where a
        # density ends, its potential is often NaN and the gradient finite.
        total = squared_norm(move.position) + virial + move.evaluation.potential
        total += 0.0 if momentum is None else squared_norm(momentum)
        finite = jnp.isfinite(total) & (
            state.first_divergence < 0
        )  # a chain that is marked stays where it is
        undone = jnp.asarray(False) if move.refused is None else finite & move.refused
        refused = ~finite | undone
        new = {
            "position": move.position,
            "memory": move.memory,
            "adaptation": move.evaluation.adaptation,
        }
        back = self.dynamics.turned_back(state.memory, context.temperature)
        old = {
            "position": state.position,
            "memory": back,
            "adaptation": state.adaptation,
        }
        statistics = self._count(
            state.statistics, move._replace(refused=refused), undone, virial
        )
        in_a_row = jnp.where(refused, state.refused_in_a_row + 1, 0)
        lost = (
            (in_a_row >= LOST)
            & (step >= state.num_warmup)
            & (state.first_divergence < 0)
        )
        first_divergence = jnp.where(lost, step + 1 - in_a_row, state.first_divergence)
        state = state._replace(
            step=step + 1, refused_in_a_row=in_a_row, first_divergence=first_divergence
        )
        return state._replace(statistics=statistics, **select(finite, new, old))

    def _count(
        self, statistics: Statistics, move: StepResult, undone: Array, virial: Array
    ) -> Statistics:
        steps, size = statistics.num_steps + 1, move.position.shape[0]
        num_refused = statistics.num_refused + jnp.where(
            jnp.asarray(move.refused), 1, 0
        )
        weight = 1.0 / jnp.maximum(steps - num_refused, 1).astype(virial.dtype)

        def mean(old: Array, value: Array) -> Array:
            return jnp.where(
                jnp.asarray(move.refused), old, old + weight * (value - old)
            )

        momentum, energy = (
            self.dynamics.momentum(move.memory),
            statistics.energy_variance,
        )
        kinetic = None if momentum is None else squared_norm(momentum) / size
        seen = (
            kinetic,
            virial / size,
            move.accept_prob,
            move.evaluation.position,
            move.evaluation.gradient,
        )
        old = (*statistics[1:4], statistics.position, statistics.gradient)
        kinetic, virial, accept, *means = jax.tree.map(mean, old, seen)
        if move.energy_error is not None and energy is not None:
            energy = mean(energy, jnp.square(move.energy_error) / size)
        spent = (
            statistics.num_gradients
            + self.dynamics.evaluations * self.gradient.evaluations
        )
        num_undone = statistics.num_undone + jnp.where(undone, 1, 0)
        refusals = num_refused, num_undone
        return Statistics(
            steps, kinetic, virial, accept, spent, energy, *refusals, *means
        )


@checked("sgmcmc.build")
def build(
    gradient: Annotated[Gradient, Kind(Gradient, "Pass an instance of `Gradient`.")],
    dynamics: Annotated[Dynamics, Kind(Dynamics, "Pass an instance of `Dynamics`.")],
    preconditioner: Annotated[
        Preconditioner,
        Kind(Preconditioner, "Pass an instance, e.g. `sgmcmc.RMSProp()`."),
    ]
    | None = None,
    *,
    schedule: Positive | Schedule,
    temperature: NonNegative | Schedule = 1.0,
) -> Sampler:
    """Assemble an MCMC sampler from its parts.

    :param gradient: a gradient estimator of the potential U, the full negative log
        density.
    :param dynamics: how the position moves, e.g. :class:`Overdamped` for SGLD.
    :param preconditioner: G; default the identity.
    :param schedule: step size eps > 0, or a callable step -> eps. eps means theta +=
        (eps / 2) g~ + N(0, eps T) in every dynamics; those with momentum take time
        steps h = sqrt(eps).
    :param temperature: T >= 0, or a callable step -> T; the target is exp(-U / T).
    :raises ValueError: for a step size or temperature out of range, or parts that do
        not fit together.

    >>> import jax, jax.numpy as jnp
    >>> from numpyro_bnn.sgmcmc import Full, Overdamped
    >>> sampler = build(Full(lambda q: 0.5 * q @ q), Overdamped(), schedule=0.1)
    >>> state = jax.jit(sampler.run, static_argnums=1)(
    ...     sampler.init(jnp.zeros(3), jax.random.key(0)), 100
    ... )
    >>> state.position.shape, int(state.step), int(state.first_divergence)
    ((3,), 100, -1)
    """
    call = "sgmcmc.build"
    preconditioner = Identity() if preconditioner is None else preconditioner
    dynamics.check(gradient)
    if dynamics.exact and not callable(temperature):
        Number(strict=True).check(call, "temperature", temperature)
    if dynamics.exact and preconditioner.biased:
        instead = f"{type(dynamics).__name__} is exact only with a frozen one."
        raise argument_error(call, "preconditioner", preconditioner, instead)
    return Sampler(
        gradient,
        dynamics,
        preconditioner,
        as_schedule(schedule),
        as_schedule(temperature),
    )
