"""What a chain is, and what a phase of its warm-up may do to it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_bnn import sgmcmc
from numpyro_bnn._types import Attributes, Kwargs, PyTree, Scalar
from numpyro_bnn.infer.model_arguments import DataVersion
from numpyro_bnn.sgmcmc.interfaces import select

# Stands for gradients that are not needed, or are evaluated later.
NOTHING = sgmcmc.Full(lambda position: jnp.full((), jnp.inf, position.dtype))


# Factor of chosen step sizes below which a chain is marked at the end of its warm-up.
MIN_SHRINKAGE = 1e-4


class SGMCMCState(NamedTuple):
    """State of the kernels of this package.

    :param z: unconstrained values by site; NaN from a divergence on.
    :param step_size: eps of the last step: theta += (eps / 2) g~ + N(0, eps T).
    :param base_step_size: the chosen or adapted step size that the schedule multiplies.
    :param shrinkage: factor of step sizes that are chosen: 1/2 for each restart, and
        less where steps were refused.
    :param restarts: how often the chain or its optimizer began again.
    :param gradient_noise: variance of a coordinate of the (preconditioned) gradient
        estimate, mean over coordinates.
    :param num_gradients: gradient estimates spent by the chain so far, with those of
        warm-up and of measurements; a product with the Hessian counts as two.
    :param i: transitions so far.
    :param engine: state of the engine (position, momentum, preconditioner, step
        number), with the statistics of the last draw.
    :param phases: states of the phases that have one, by the names of their classes.
    :param data: how often they had changed in place; no array.
    :param rng_key: the key from which, with the step number, all random numbers of the
        chain are made.

    The other fields that a run may collect are statistics of the last draw.
    """

    z: PyTree
    step_size: Array
    base_step_size: Array
    shrinkage: Array
    restarts: Array
    gradient_noise: Array
    num_gradients: Array
    i: Array
    engine: sgmcmc.State
    phases: dict[str, PyTree]
    data: DataVersion
    rng_key: Array

    @property
    def configurational_temperature(self) -> Array:
        """Mean of theta' grad U / P over the steps; its expectation is T."""
        return self.engine.statistics.configurational_temperature

    @property
    def kinetic_temperature(self) -> Array | None:
        """Mean of m' M^-1 m / P likewise; ``None`` without momentum."""
        return self.engine.statistics.kinetic_temperature

    @property
    def accept_prob(self) -> Array | None:
        """Mean acceptance probability; ``None`` where nothing is rejected."""
        return self.engine.statistics.accept_prob

    @property
    def energy_variance(self) -> Array | None:
        """Mean squared energy error of a step, per parameter; microcanonical kernels
        only.
        """
        return self.engine.statistics.energy_variance

    @property
    def decoherence_length(self) -> Array | None:
        """L of these kernels; ``None`` for others."""
        return getattr(self.engine.memory, "length", None)

    @property
    def refused_steps(self) -> Array:
        """Fraction of the steps that were not taken: their end was not finite, their
        gradients or (of microcanonical kernels) energy errors too large.
        """
        return self.engine.statistics.refused_share

    @property
    def diverging(self) -> Array:
        """Whether the chain is marked, as it took none of 200 steps."""
        return self.engine.first_divergence >= 0

    def with_phase(self, phase: "Phase", value: PyTree) -> "SGMCMCState":
        """The same with another state of a phase."""
        return self._replace(phases={**self.phases, phase.name: value})

    def spend(self, gradients: Scalar) -> "SGMCMCState":
        """The same after more gradients."""
        return self._replace(num_gradients=self.num_gradients + gradients)


class Transition(NamedTuple):
    """What a phase gets to know of the transition that it is a part of.

    :param i: its number, which chains share under ``vmap``, so that ``cond`` stays a
        branch.
    :param sampler: ``sampler(state)``: the engine with the parts of the kernel; it
        costs nothing at run time.
    :param args: positional arguments of the model, ``kwargs``: the others.
    """

    i: Array
    sampler: Callable[[SGMCMCState], sgmcmc.Sampler]
    args: tuple
    kwargs: Kwargs


class WarmUp(NamedTuple):
    """The transitions of a warm-up.

    :param begin: number of transitions that optimize, before the others.
    :param middle: transition at which the chain should have arrived at the typical set.
    :param end: number of transitions; ``steps``: steps of those that sample.
    """

    begin: int
    middle: int
    end: int
    steps: int

    @property
    def settled(self) -> int:
        """The transition at which step sizes are chosen for the last time. Those after
        it show whether they fit elsewhere, and only make them shorter.
        """
        return self.end - (self.end - self.middle) // 2

    def measures(self, i: Array) -> Array:
        """Whether a transition begins with a measurement: when sampling starts, then
        ever more rarely on the way to the typical set, there, and once more.
        """
        times = {self.begin, self.middle, self.settled}
        for power in range(20):
            if (time := self.begin + 2**power) < self.middle:
                times.add(time)
        return jnp.any(i == jnp.array(sorted(times)))

    def rescues(self, i: Array) -> Array:
        """Whether a transition begins with a look for chains that take no steps; the
        same for all chains: otherwise both branches would be evaluated.
        """
        every = sgmcmc.engine.LOST * (self.end - self.begin) // max(1, self.steps)
        return (i > self.begin) & (i < self.end) & (i % max(1, every) == 0)


class Phase:
    """A part of the warm-up of a kernel. What it needs to remember of a chain stands in
    its own state.
    """

    #: Whether it adapts a step size that was chosen once.
    steers = False

    @property
    def name(self) -> str:
        """Where its state is in ``SGMCMCState.phases``."""
        return type(self).__name__

    def start(self, engine: sgmcmc.State, step_size: Array) -> PyTree:
        """Its state at the start of a chain; ``None`` if it has none."""
        return None

    def of(self, state: SGMCMCState) -> Any:
        """Its state."""
        return state.phases[self.name]

    def before(self, state: SGMCMCState, now: Transition) -> SGMCMCState:
        """Called before the steps of a transition that samples."""
        return state

    def after(self, state: SGMCMCState, now: Transition) -> SGMCMCState:
        """Called after the steps of a transition that samples."""
        return state

    def end(self, state: SGMCMCState, now: Transition) -> SGMCMCState:
        """Called at the end of every transition, also of those that optimize."""
        return state

    def describe(self, state: SGMCMCState) -> Attributes:
        """Attributes of a run that it knows."""
        return {}


def when(
    due: Array,
    change: Callable[[SGMCMCState, Transition], SGMCMCState],
    state: SGMCMCState,
    now: Transition,
) -> SGMCMCState:
    """``change(state, now)`` where it is due."""
    return lax.cond(due, lambda s: change(s, now), lambda s: s, state)


def listed(by_chain: PyTree) -> str:
    """One value per chain, as text for the attributes of a run."""
    return str(np.ravel(jax.device_get(by_chain)).tolist())


class Origin(NamedTuple):
    """Where a chain began to sample: position (P,) and step size; or where it was when
    it should have arrived at the typical set, ``has_arrived``, with the preconditioner
    that it had and the states of the phases that learn it.
    """

    position: Array
    step_size: Array
    adaptation: PyTree
    learned: dict[str, PyTree]
    has_arrived: Array


@dataclass(frozen=True, eq=False)
class Rescue(Phase):
    """Put a chain that takes no steps back to where it began, with half the step size
    if that was chosen.

    Chains return while a quarter of the warm-up is left to forget their origin, and
    learn anew. From its middle on, those that take steps return to where they first did
    so, with what they had learned by then. At its end chains are marked whose chosen
    step size is far below what the curvature allows.

    :param chooses_step_size: whether the step size was chosen.
    :param learning: the phases that learn the preconditioner.
    :param adapting: the other phases that begin again with the chain.
    :param patience: steps refused in a row after which a chain begins again.
    """

    warm_up: WarmUp
    chooses_step_size: bool
    learning: tuple[Phase, ...]
    adapting: tuple[Phase, ...]
    patience: int

    def start(self, engine: sgmcmc.State, step_size: Array) -> Origin:
        learned = {p.name: p.start(engine, step_size) for p in self.learning}
        never = jnp.asarray(False)
        return Origin(engine.position, step_size, engine.adaptation, learned, never)

    def before(self, state: SGMCMCState, now: Transition) -> SGMCMCState:
        # the step size is known only after the other phases have chosen it
        origin = self.of(state)._replace(position=state.engine.position)
        starts = now.i <= self.warm_up.begin
        state = state.with_phase(self, select(starts, origin, self.of(state)))
        return when(self.warm_up.rescues(now.i), self._looked_at, state, now)

    def after(self, state: SGMCMCState, now: Transition) -> SGMCMCState:
        begin, middle, end, _ = self.warm_up
        origin = self.of(state)
        first = jnp.where(now.i <= begin, self._chosen(state), origin.step_size)
        state = state.with_phase(self, origin._replace(step_size=first))
        state = when((now.i >= middle) & (now.i < end), self._seen, state, now)
        if not self.chooses_step_size or any(p.steers for p in self.adapting):
            return state  # shorter steps than the curvature allows are as they should
        engine = state.engine
        lost = (now.i == end - 1) & (state.shrinkage < MIN_SHRINKAGE)
        lost &= engine.first_divergence < 0
        first = jnp.where(lost, engine.step, engine.first_divergence)
        return state._replace(engine=engine._replace(first_divergence=first))

    def _chosen(self, state: SGMCMCState) -> Array:
        """The step size as it was given, or chosen for a chain without faults."""
        shrinkage = state.shrinkage if self.chooses_step_size else 1.0
        return state.base_step_size / shrinkage

    def _seen(self, state: SGMCMCState, now: Transition) -> SGMCMCState:
        """Whether a chain has arrived, and what it has learned."""
        origin, engine = self.of(state), state.engine
        learned = {phase.name: phase.of(state) for phase in self.learning}
        chosen, arrived = self._chosen(state), jnp.asarray(True)
        here = Origin(engine.position, chosen, engine.adaptation, learned, arrived)
        arrives = ~origin.has_arrived & (engine.refused_in_a_row == 0)
        return state.with_phase(self, select(arrives, here, origin))

    def _looked_at(self, state: SGMCMCState, now: Transition) -> SGMCMCState:
        begin, _, end, _ = self.warm_up
        engine, latest = state.engine, begin + 3 * (end - begin) // 4
        lost = engine.refused_in_a_row >= self.patience
        lost |= engine.first_divergence >= 0
        lost &= self.of(state).has_arrived | (now.i < latest)
        return when(lost, self._again, state, now)

    def _again(self, state: SGMCMCState, now: Transition) -> SGMCMCState:
        # without what refused steps have added: they were of the place that it leaves
        origin = self.of(state)
        shrinkage = jnp.maximum(0.5 ** (state.restarts + 1), 2.0**-100)
        shrinkage = shrinkage.astype(state.shrinkage.dtype)
        base = origin.step_size * (shrinkage if self.chooses_step_size else 1.0)
        state = state._replace(base_step_size=base)
        # `RenewCaches` evaluates a potential; dynamics without one only miss their
        # first half kick
        sampler = replace(now.sampler(state), gradient=NOTHING)
        engine, arrived = state.engine, origin.has_arrived
        unlearned = sampler.unlearned(engine, origin.position)
        # after its arrival too little time is left to learn a preconditioner again
        adaptation = select(arrived, origin.adaptation, unlearned)
        engine = sampler.restart(engine, origin.position, adaptation)
        for phase in (*self.learning, *self.adapting):
            if phase.name in state.phases:
                start = phase.start(engine, base)
                learned = origin.learned.get(phase.name, start)
                state = state.with_phase(phase, select(arrived, learned, start))
        return state._replace(
            engine=engine,
            shrinkage=shrinkage,
            restarts=state.restarts + 1,
        )


@dataclass(frozen=True)
class AdaptAcceptance(Phase):
    """Adapt log eps to a target acceptance by Robbins-Monro steps, anew from the middle
    of the warm-up.
    """

    warm_up: WarmUp
    accept_prob: float

    steers = True

    def after(self, state: SGMCMCState, now: Transition) -> SGMCMCState:
        begin, _, end, _ = self.warm_up
        middle = (begin + end) // 2
        age = jnp.where(now.i < middle, jnp.maximum(now.i - begin, 0), now.i - middle)
        accept_prob = jnp.asarray(state.accept_prob)
        gain = 2.0 * (age + 1).astype(accept_prob.dtype) ** -0.6
        adapted = state.base_step_size * jnp.exp(
            gain * (accept_prob - self.accept_prob)
        )
        return state._replace(
            base_step_size=jnp.where(now.i < end, adapted, state.base_step_size)
        )
