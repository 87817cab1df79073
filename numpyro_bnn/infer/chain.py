"""One chain: optimize, measure, sample, as pure functions of the state, given a policy
and the model's arguments.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

from numpyro_bnn import sgmcmc
from numpyro_bnn.infer.preconditioning import NoisePreconditioner
from numpyro_bnn.infer.target import Target
from numpyro_bnn.infer.tuning import (
    BENDING_STEPS,
    BENT,
    NOISE_BATCHES,
    POWER_STEPS,
    CoveredVariance,
    Noise,
    bending,
    gradient_noise,
    largest_curvature,
)
from numpyro_bnn.infer.warm_start import (
    Member,
    WarmStart,
    held_out_score,
    learning_gradient,
    optimize,
)
from numpyro_bnn.sgmcmc.streams import FullData

NOTHING = sgmcmc.Full(
    lambda position: jnp.zeros((), position.dtype)
)  # in place of gradients that are not needed


class SGMCMCState(NamedTuple):
    """State of the kernels of this package; ``step_size`` to ``diverging`` are
    statistics of the last draw.

    :param z: unconstrained values by site; NaN from a divergence on.
    :param step_size: eps of the last step: theta += (eps / 2) g~ + N(0, eps T).
    :param configurational_temperature: mean of theta' grad U / P over the steps of the
        draw; its expectation is T.
    :param kinetic_temperature: mean of m' M^-1 m / P likewise; ``None`` without
        momentum.
    :param gradient_noise: variance of a coordinate of the (preconditioned) gradient
        estimate, mean over coordinates.
    :param num_gradients: gradient estimates spent by the chain so far, with those of
        warm-up and of measurements; a product with the Hessian counts as two.
    :param accept_prob: mean acceptance probability; ``None`` where nothing is rejected.
    :param energy_variance: mean squared energy error of a step, per parameter;
        microcanonical kernels only.
    :param decoherence_length: L of these kernels.
    :param refused_steps: fraction of the steps that were not taken: their end was not
        finite, their gradients or (of microcanonical kernels) energy errors too large.
    :param diverging: whether the chain is marked, as it took none of 200 steps; ``i``:
        transitions so far.
    :param base_step_size: the chosen or adapted step size that the schedule multiplies.
    :param engine: state of the engine (position, momentum, preconditioner, step
        number).
    :param optimizer: state of the warm start; empty without one.
    :param tuning: quantities accumulated in warm-up; empty for most kernels.
    :param moment: gradients collected in warm-up for their preconditioner; empty
        without it.
    :param coverage: means over the draws since warm-up.
    :param origin: where sampling began, to which a chain that is lost in warm-up
        returns.
    :param rng_key: the key from which, with the step number, all random numbers of the
        chain are made.
    """

    z: Any
    step_size: jax.Array
    configurational_temperature: jax.Array
    kinetic_temperature: jax.Array | None
    gradient_noise: jax.Array
    num_gradients: jax.Array
    accept_prob: jax.Array | None
    energy_variance: jax.Array | None
    decoherence_length: jax.Array | None
    refused_steps: jax.Array
    diverging: jax.Array
    i: jax.Array
    base_step_size: jax.Array
    engine: sgmcmc.State
    optimizer: Any
    tuning: Any
    moment: Any
    coverage: CoveredVariance
    origin: "Origin"
    rng_key: jax.Array


# Largest share of the steps of a transition of warm-up that the dynamics may refuse
# without making them shorter, and the factor; the same for far too long steps.
MAX_UNDONE, SHORTER = 0.02, 0.7
MOSTLY_UNDONE, MUCH_SHORTER = 0.3, 0.25


class Origin(NamedTuple):
    """Where a chain began to sample: position (P,), step size; factor of chosen step
    sizes, 1/2 for each return and less where steps are refused; number of returns.
    """

    position: jax.Array
    step_size: jax.Array
    shrinkage: jax.Array
    restarts: jax.Array


class Tuner:
    """Adaptation in warm-up beyond a step size chosen from curvature and noise; this
    base class adapts nothing.
    """

    patience = (
        sgmcmc.engine.LOST
    )  # steps refused in a row after which a chain starts again in warm-up

    def start(self, position: jax.Array, step_size: jax.Array) -> Any:
        """The tuning state at the start of a chain."""
        return ()

    def adapt(
        self,
        before: SGMCMCState,
        after: SGMCMCState,
        sampler: sgmcmc.Sampler,
        i: jax.Array,
    ) -> SGMCMCState:
        """Adapt a chain after transition ``i``; ``before`` is its state before it, with
        caches renewed.
        """
        return after


@dataclass(frozen=True)
class AcceptanceTuner(Tuner):
    """Adapt log eps to a target acceptance by Robbins-Monro steps, anew from the middle
    of ``begin`` to ``end``.
    """

    accept_prob: float
    begin: int
    end: int

    def adapt(
        self,
        before: SGMCMCState,
        after: SGMCMCState,
        sampler: sgmcmc.Sampler,
        i: jax.Array,
    ) -> SGMCMCState:
        seen, middle = jnp.asarray(after.accept_prob), (self.begin + self.end) // 2
        age = jnp.where(i < middle, jnp.maximum(i - self.begin, 0), i - middle) + 1
        gain = 2.0 * age.astype(seen.dtype) ** -0.6
        adapted = after.base_step_size * jnp.exp(gain * (seen - self.accept_prob))
        return after._replace(
            base_step_size=jnp.where(i < self.end, adapted, after.base_step_size)
        )


@dataclass(frozen=True, eq=False)
class Policy:
    """Settings and functions of a run, fixed when the kernel is initialized and shared
    by its chains.

    :param target: the model bound to its arguments; ``warm_start``: how the chains
        optimize.
    :param num_warmup: transitions of the warm-up; ``warm_start_length``: number of
        these that optimize, in ``optimizer_steps`` each; ``engine_warmup``: engine
        steps in the rest.
    :param scales_from_gradients: whether the squared gradients of the warm start make
        the preconditioner.
    :param step_size: base step size at the start, which ``schedule`` multiplies.
    :param chooses_step_size: whether the step size is chosen in warm-up;
        ``steers_step_size``: whether the choice is a first guess that the tuner adapts.
    :param schedule: ``schedule(step)``: factor of the base step size at a step of the
        engine.
    :param choose_step_size: ``choose_step_size(curvature, noise, P)``.
    :param stable_step_size: ``stable_step_size(curvature, noise, P)``: the largest for
        traveling to the typical set.
    :param sampler: ``sampler(z, base_step_size, evaluate)`` puts the engine together.
    :param run: ``run(sampler, engine, i)``: takes the steps of transition ``i``;
        ``tuner``: what else is adapted.
    :param noise: how the preconditioner is learned from gradient noise; ``None`` for
        another one.
    :param steps_to_forget: ``steps_to_forget(step_size, P)``: how fast a chain forgets
        its position; 0 if unknown.
    """

    target: Target
    warm_start: WarmStart
    num_warmup: int
    warm_start_length: int
    optimizer_steps: int
    engine_warmup: int
    scales_from_gradients: bool
    step_size: float
    chooses_step_size: bool
    steers_step_size: bool
    schedule: Callable[[Any], Any]
    choose_step_size: Callable[[jax.Array, Noise, int], jax.Array]
    stable_step_size: Callable[[jax.Array, jax.Array, int], jax.Array]
    sampler: Callable[..., sgmcmc.Sampler]
    run: Callable[[sgmcmc.Sampler, sgmcmc.State, jax.Array], sgmcmc.State]
    tuner: Tuner
    noise: NoisePreconditioner | None = None
    steps_to_forget: Callable[..., Any] = lambda *now: 0.0


@dataclass(frozen=True, eq=False)
class Chain:
    """A policy bound to the arguments of the model; it exists only while a function is
    traced.
    """

    policy: Policy
    args: tuple
    kwargs: Mapping[str, Any] | None

    def start(self, z: Any, rng_key: jax.Array) -> SGMCMCState:
        """The state of a chain at unconstrained values ``z``."""
        policy, position = self.policy, ravel_pytree(z)[0]
        base = jnp.asarray(policy.step_size, position.dtype)
        sampler = self._sampler(z, base)
        # The first transition that samples refreshes the engine: here nothing is
        # evaluated.
        engine = replace(sampler, gradient=NOTHING).init(
            position, rng_key, policy.engine_warmup
        )
        engine = engine._replace(estimator=sampler.gradient.init(position))
        return SGMCMCState(
            z=z,
            step_size=jnp.asarray(base * policy.schedule(engine.step), position.dtype),
            **_statistics(engine),
            gradient_noise=jnp.zeros((), position.dtype),
            num_gradients=jnp.int32(0),
            i=jnp.int32(0),
            base_step_size=base,
            engine=engine,
            optimizer=policy.warm_start.start(position)
            if policy.warm_start_length
            else (),
            tuning=policy.tuner.start(position, base),
            moment=() if policy.noise is None else policy.noise.start(position),
            coverage=CoveredVariance.empty(engine.statistics),
            origin=Origin(position, base, jnp.ones_like(base), jnp.int32(0)),
            rng_key=rng_key,
        )

    def transition(self, state: SGMCMCState, i: jax.Array) -> SGMCMCState:
        """Make transition ``i``, a number that chains share under ``vmap``, so that
        ``cond`` stays a branch.
        """
        # `MCMC` gives a resumed run a new key. Numbers depend on key and step, so none
        # is used twice.
        state = state._replace(engine=state.engine._replace(seeds=_seeds(state)))
        warm = self.policy.warm_start_length
        if warm:
            state = lax.cond(
                i < warm, self._optimize, lambda s: self._sample(s, i), state
            )
        else:
            state = self._sample(state, i)
        noise = self.policy.noise
        if noise is not None:
            due = (i >= noise.begin) & (i < noise.end)
            state = lax.cond(
                due, lambda s: self._collect_gradients(s, noise, i), lambda s: s, state
            )
        position = jnp.where(state.diverging, jnp.nan, state.engine.position)
        return state._replace(z=ravel_pytree(state.z)[1](position), i=i + 1)

    def refresh(self, state: SGMCMCState) -> SGMCMCState:
        """Adopt ``state.z`` and the arguments: recompute cached potentials and
        gradients, keep the momentum.
        """
        engine = state.engine._replace(
            position=ravel_pytree(state.z)[0], seeds=_seeds(state)
        )
        sampler = self._sampler(state.z, state.base_step_size)
        spent = state.num_gradients + sampler.refresh_cost
        return state._replace(engine=sampler.refresh(engine), num_gradients=spent)

    def _sampler(self, z: Any, base: jax.Array) -> sgmcmc.Sampler:
        return self.policy.sampler(z, base, self._evaluate)

    @cached_property
    def _evaluate(self) -> Callable:
        return self.policy.target.evaluator(self.args, self.kwargs)

    @property
    def _traveling(self) -> int:
        """Transitions on the way to the typical set; with even gradient noise their
        steps are the longest.
        """
        length = self.policy.num_warmup - self.policy.warm_start_length
        return length // 2 if self.policy.noise is None else 3 * length // 4

    # -- sampling ----------------------------------------------------------------------

    def _sample(self, state: SGMCMCState, i: jax.Array) -> SGMCMCState:
        # Measured when sampling starts, then ever more rarely on the way to the typical
        # set, and once at the end.
        policy = self.policy
        warm, total = policy.warm_start_length, policy.num_warmup
        half = warm + self._traveling
        times = {warm, half, total} | {
            warm + 2**k for k in range(20) if warm + 2**k < half
        }
        # Chains return while a quarter of the warm-up is left to forget their origin;
        # later they are marked.
        every = max(
            1, sgmcmc.engine.LOST * max(total - warm, 1) // max(policy.engine_warmup, 1)
        )
        due = (i > warm) & (i < warm + 3 * (total - warm) // 4) & (i % every == 0)
        state = lax.cond(due, self._returned, lambda s: s, state)
        due = jnp.any(i == jnp.array(sorted(times)))
        state = lax.cond(due, lambda s: self._measure(s, i), lambda s: s, state)
        sampler = self._sampler(state.z, state.base_step_size)
        engine = policy.run(sampler, sgmcmc.engine.reset_statistics(state.engine), i)
        after = state._replace(
            step_size=jnp.asarray(
                sampler.schedule(engine.step - 1), state.step_size.dtype
            ),
            num_gradients=state.num_gradients + engine.statistics.num_gradients,
            engine=engine,
            coverage=state.coverage.add(engine.statistics, i >= policy.num_warmup),
            **_statistics(engine),
        )
        if policy.chooses_step_size and not policy.steers_step_size:
            after = self._shortened(after, i, i >= half)
        return policy.tuner.adapt(state, after, sampler, i)

    def _shortened(self, state: SGMCMCState, i: Any, lasting: Any) -> SGMCMCState:
        """Shorter steps in warm-up, after a transition in which the dynamics refused
        many; step sizes that are chosen later are shorter too if that is ``lasting``.

        Steps that end at a border of the support do not count: their number hardly
        falls with their length.
        """
        undone = state.engine.statistics.undone_share
        shorter = jnp.where(undone > MOSTLY_UNDONE, MUCH_SHORTER, SHORTER)
        often = (undone > MAX_UNDONE) & (i < self.policy.num_warmup)
        share = jnp.where(often, shorter, 1.0)
        origin = state.origin
        lasts = jnp.where(lasting, share, 1.0).astype(origin.shrinkage.dtype)
        origin = origin._replace(shrinkage=origin.shrinkage * lasts)
        return self._with_step_size(
            state._replace(origin=origin), state.base_step_size * share
        )

    def _with_step_size(self, state: SGMCMCState, chosen: jax.Array) -> SGMCMCState:
        """A chain that goes on in other steps; its thermostat's friction, which is per
        unit of time, stays that of a step.
        """
        memory = state.engine.memory
        if isinstance(memory, sgmcmc.dynamics.Thermostat):
            ratio = jnp.sqrt(state.base_step_size / chosen)
            memory = memory._replace(
                friction=(memory.friction * ratio).astype(memory.friction.dtype)
            )
        return state._replace(
            base_step_size=chosen.astype(state.base_step_size.dtype),
            engine=state.engine._replace(memory=memory),
        )

    def _returned(self, state: SGMCMCState) -> SGMCMCState:
        """Put a chain that takes no steps back to its origin, with half the step size
        if it was chosen.
        """
        policy, origin, engine = self.policy, state.origin, state.engine

        def again(state: SGMCMCState) -> SGMCMCState:
            shrinkage, position = (
                jnp.maximum(0.5 * origin.shrinkage, 2.0**-100),
                origin.position,
            )
            base = origin.step_size * (shrinkage if policy.chooses_step_size else 1.0)
            sampler, cost = self._sampler(state.z, base), 0
            if hasattr(engine.memory, "potential"):
                # others only miss their first half kick
                cost = sampler.refresh_cost
            else:
                sampler = replace(sampler, gradient=NOTHING)
            return state._replace(
                base_step_size=base,
                num_gradients=state.num_gradients + cost,
                engine=sampler.restart(engine, position),
                tuning=policy.tuner.start(position, base),
                moment=() if policy.noise is None else policy.noise.start(position),
                origin=origin._replace(
                    shrinkage=shrinkage, restarts=origin.restarts + 1
                ),
            )

        lost = (engine.refused_in_a_row >= policy.tuner.patience) | (
            engine.first_divergence >= 0
        )
        return lax.cond(lost, again, lambda s: s, state)

    def _collect_gradients(
        self, state: SGMCMCState, noise: NoisePreconditioner, i: jax.Array
    ) -> SGMCMCState:
        sampler = self._sampler(state.z, state.base_step_size)
        moment = noise.collect(state.moment, sampler, state.engine, i)
        spent = noise.count * sampler.gradient.evaluations
        return state._replace(moment=moment, num_gradients=state.num_gradients + spent)

    def _measure(self, state: SGMCMCState, i: jax.Array) -> SGMCMCState:
        """Measure the gradient noise at the position, choose the step size if none is
        given, and renew caches.

        On the way to the typical set gradients and their noise are so large that steps
        chosen for them would never get there: the first half of warm-up takes the
        largest stable step instead.
        """
        policy, sampler = self.policy, self._sampler(state.z, state.base_step_size)
        warm = policy.warm_start_length
        # Control variates are centered at the end of the warm start and stay there.
        learned = policy.noise
        if learned is not None:
            warming = i <= policy.num_warmup
            state = lax.cond(
                warming, lambda s: self._precondition(s, learned), lambda s: s, state
            )
        engine = sampler.refresh(state.engine, recenter=i <= warm)
        noise = gradient_noise(sampler, engine)
        batches = 0 if isinstance(sampler.gradient.stream, FullData) else NOISE_BATCHES
        spent = (
            state.num_gradients
            + sampler.refresh_cost
            + batches * sampler.gradient.evaluations
        )
        state = state._replace(
            engine=engine, gradient_noise=noise.mean, num_gradients=spent
        )
        if policy.chooses_step_size:
            needed = (
                i <= warm if policy.steers_step_size else True
            )  # later it is adapted, without the curvature
            state = lax.cond(
                needed, lambda s: self._choose(s, noise, i), lambda s: s, state
            )
        first = state.origin._replace(
            position=state.engine.position, step_size=state.base_step_size
        )
        return state._replace(
            origin=sgmcmc.interfaces.select(i <= warm, first, state.origin)
        )

    def _precondition(
        self, state: SGMCMCState, noise: NoisePreconditioner
    ) -> SGMCMCState:
        """Take the preconditioner learned from gradient noise, bounded if gradients
        bend along its steps.
        """
        sampler = self._sampler(state.z, state.base_step_size)
        engine = state.engine._replace(adaptation=noise.adapted(state.moment))
        share = bending(sampler, engine) / BENT
        bound = noise.bound(state.moment, engine.position) * jnp.where(
            share < 1, share, 1.0
        )  # NaN is the worst
        engine = state.engine._replace(adaptation=noise.adapted(state.moment, bound))
        spent = state.num_gradients + 3 * BENDING_STEPS * sampler.gradient.evaluations
        return state._replace(engine=engine, num_gradients=spent)

    def _choose(self, state: SGMCMCState, noise: Noise, i: jax.Array) -> SGMCMCState:
        """Choose the step size from curvature and noise."""
        policy, sampler, engine = (
            self.policy,
            self._sampler(state.z, state.base_step_size),
            state.engine,
        )
        curvature, size = largest_curvature(sampler, engine), engine.position.size
        plain = isinstance(
            sampler.gradient, sgmcmc.Minibatch
        )  # noise of others grows off their center
        average = (
            policy.noise.averaged(state.moment, noise)
            if policy.noise and plain
            else noise
        )
        chosen = policy.choose_step_size(curvature, average, size)
        if policy.num_warmup and not policy.steers_step_size:
            stable = jnp.maximum(
                chosen, policy.stable_step_size(curvature, noise.relative, size)
            )
            chosen = jnp.where(
                i < policy.warm_start_length + self._traveling, stable, chosen
            )
        chosen = (chosen * state.origin.shrinkage).astype(state.base_step_size.dtype)
        # At a border the curvature may have no value: the chain starts with what it
        # has, and may start again.
        chosen = jnp.where(jnp.isfinite(chosen), chosen, state.base_step_size)
        spent = state.num_gradients + 2 * POWER_STEPS * sampler.gradient.evaluations
        return self._with_step_size(state._replace(num_gradients=spent), chosen)

    # -- the warm start ----------------------------------------------------------------

    def _optimize(self, state: SGMCMCState) -> SGMCMCState:
        policy, sampler = self.policy, self._sampler(state.z, state.base_step_size)
        target, warm, unravel = (
            policy.target,
            policy.warm_start,
            ravel_pytree(state.z)[1],
        )
        if isinstance(sampler.gradient, sgmcmc.ControlVariates):
            # their center is far away
            plain = sgmcmc.Minibatch(
                sampler.gradient.potential_fn, sampler.gradient.stream
            )
            sampler = replace(sampler, gradient=plain)
        if warm.held_out:
            gradient = learning_gradient(
                target, warm.held_out, unravel, self.args, self.kwargs
            )
            sampler = replace(sampler, gradient=gradient)
        steps, old = policy.optimizer_steps, state.optimizer
        descent, squares = optimize(
            sampler,
            state.engine,
            warm.transformation,
            old.optimizer,
            state.i * steps,
            steps,
        )
        begin, engine = state.engine.position, state.engine
        if policy.scales_from_gradients:
            values = 1 / (1e-5 + jnp.sqrt(squares) / target.num_data)
            # Only the shape of G comes from the gradients; its scale is absorbed by the
            # step size.
            engine = engine._replace(adaptation=jnp.sqrt(values / jnp.mean(values)))
        # If no step ended where the density is known, the optimizer starts again.
        broken = (descent.shrinkage < 1) & jnp.all(descent.known == begin)
        position = descent.known
        memory = sgmcmc.interfaces.select(
            broken, warm.transformation.init(begin), descent.memory
        )
        engine = engine._replace(position=position)
        member = Member(memory, position, old.score)
        if warm.held_out:
            member = self._better(state, member)
            last = state.i == policy.warm_start_length - 1
            engine = engine._replace(
                position=jnp.where(last, member.position, engine.position)
            )
        return state._replace(
            engine=engine,
            optimizer=member,
            num_gradients=state.num_gradients
            + (steps + 1) * sampler.gradient.evaluations,
            origin=state.origin._replace(
                shrinkage=state.origin.shrinkage * jnp.where(broken, 0.5, 1.0),
                restarts=state.origin.restarts + jnp.where(broken, 1, 0),
            ),
        )

    def _better(self, state: SGMCMCState, new: Member) -> Member:
        """Return whichever position predicts the held-out rows better, the new one or
        the best so far.
        """
        policy, old = self.policy, state.optimizer
        held_out = held_out_score(
            policy.target, policy.warm_start.held_out, self.args, self.kwargs
        )
        rng_key = jax.random.fold_in(jax.random.clone(state.rng_key), 0)
        score = held_out(ravel_pytree(state.z)[1](new.position), rng_key)
        better = score > old.score
        position = jnp.where(better, new.position, old.position)
        return Member(
            new.optimizer,
            position,
            jnp.where(better, score, old.score).astype(old.score.dtype),
        )


def _statistics(engine: sgmcmc.State) -> dict[str, Any]:
    """Fields of the state that come from the engine."""
    same = (
        "configurational_temperature",
        "kinetic_temperature",
        "accept_prob",
        "energy_variance",
    )
    return {name: getattr(engine.statistics, name) for name in same} | {
        "decoherence_length": getattr(engine.memory, "length", None),
        "refused_steps": engine.statistics.refused_share,
        "diverging": engine.first_divergence >= 0,
    }


def _seeds(state: SGMCMCState) -> sgmcmc.engine.Seeds:
    # The key is the same at every transition, the step numbers never are.
    return sgmcmc.engine.fresh_seeds(jax.random.clone(state.rng_key))
