"""Step sizes: what is measured of the gradients, and the step size chosen from it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_bnn import sgmcmc
from numpyro_bnn._types import PyTree, Scalar
from numpyro_bnn.infer.phases import Phase, SGMCMCState, Transition, WarmUp, when
from numpyro_bnn.sgmcmc import Sampler, State
from numpyro_bnn.sgmcmc.engine import Purpose
from numpyro_bnn.sgmcmc.interfaces import Gradient, select
from numpyro_bnn.sgmcmc.streams import FullData, normal

POWER_STEPS = 24
NOISE_BATCHES = 128
MOST_RELATIVE = 16.0
MOST_BYTES = 2**24  # of rows that are picked at once
BENDING_STEPS = 8
# About the largest that is chosen where curvature plus noise is 1.
LONGEST_STEP = 0.1
# Largest share of the steps of a transition of warm-up that the dynamics may refuse
# without making them shorter, and the factor; the same for far too long steps.
MAX_UNDONE, SHORTER = 0.02, 0.7
MOSTLY_UNDONE, MUCH_SHORTER = 0.3, 0.25


def largest_curvature(
    sampler: Sampler, state: State, steps: Scalar = POWER_STEPS, quotients: bool = False
) -> tuple[Array, PyTree]:
    """Largest |eigenvalue| of the preconditioned Hessian L' H L at the position of a
    chain; with ``quotients`` also potential and gradient there.

    Power iteration with a fresh minibatch per step; the Rayleigh quotients of the
    second half are averaged.

    :param quotients: take difference quotients of gradients, not products with the
        Hessian. They are compiled in less time, and notice kinks.
    """

    seed, position = state.seeds[Purpose.PROBE], state.position
    near = jnp.finfo(position.dtype).eps ** (1 / 3)
    distance = near * jnp.maximum(jnp.sqrt(jnp.mean(position**2)), near)

    def iterate(number: Array, carry: tuple) -> tuple:
        direction, total, here = carry
        counter = state.step * POWER_STEPS + number
        batch = sampler.gradient.stream.draw(seed, counter)
        evaluate = partial(sampler.gradient, state.estimator, batch=batch)
        along = sampler.preconditioner.root(state.adaptation, direction)
        if quotients:
            length = distance / jnp.linalg.norm(along)
            # a loop, so that the gradient is compiled once
            ends = jnp.stack([position, position + length * along])
            potentials, gradients = lax.map(evaluate, ends)
            here = potentials[0], gradients[0]
            change = (gradients[1] - gradients[0]) / length
        else:
            change = jax.jvp(lambda x: evaluate(x)[1], (position,), (along,))[1]
        product = sampler.preconditioner.transpose(state.adaptation, change)
        quotient = jnp.abs(jnp.vdot(direction, product))
        norm = jnp.linalg.norm(product)
        unit = jnp.where(norm > 0, product / jnp.where(norm > 0, norm, 1), direction)
        total += jnp.where(number >= POWER_STEPS // 2, quotient, 0)
        return unit, total, here

    # Irrational steps, so that the start is not orthogonal to an eigenvector of a
    # structured problem.
    start = jnp.sin(1.0 + 1.7 * jnp.arange(position.size, dtype=position.dtype))
    zero = jnp.zeros((), position.dtype)
    begin = start / jnp.linalg.norm(start), zero, (zero, jnp.zeros_like(position))
    _, total, here = lax.fori_loop(0, steps, iterate, begin)
    return total / (POWER_STEPS - POWER_STEPS // 2), here


class Noise(NamedTuple):
    """Size of the noise of the preconditioned gradient estimate.

    :param largest: variance along its noisiest direction, of which it is an upper bound
        in expectation.
    :param mean: variance, mean over coordinates.
    :param relative: variance, summed over coordinates, divided by the squared length of
        the gradient itself; at most 16, as gradients that are all noise do not tell
        more.
    """

    largest: Array
    mean: Array
    relative: Array

    def limit(self, tolerance: float, share: float) -> Array:
        """Factor s for dynamics that correct for s V, V the mean, beside a refresh of
        size 1: at most ``share``.

        A direction of noise V + D has a variance too large by s D / (1 + s V), at most
        the tolerance.
        """
        uneven = jnp.maximum(self.largest - (1 + tolerance) * self.mean, 1e-30)
        return jnp.minimum(tolerance / uneven, share / jnp.maximum(self.mean, 1e-30))


def minibatches_of(
    sampler: Sampler, state: State, counters: Array
) -> tuple[Any, Gradient]:
    """K minibatches, whose rows are picked at once unless they are many, and the
    gradient that takes one of them.
    """
    estimator = sampler.gradient
    draw = partial(estimator.stream.draw, state.seeds[Purpose.PROBE])
    example = jax.eval_shape(draw, counters[0])
    prepare, finish = estimator.separate(state.position, example)
    rows = jax.tree.leaves(jax.eval_shape(prepare, example))
    if (
        len(counters) * sum(leaf.size * leaf.dtype.itemsize for leaf in rows)
        > MOST_BYTES
    ):
        prepare, finish = (lambda batch: batch), estimator
    return jax.vmap(lambda counter: prepare(draw(counter)))(counters), finish


def gradients_on(sampler: Sampler, state: State, counters: Array) -> Array:
    """Gradients (K, P) at a position on K minibatches."""
    batches, gradient = minibatches_of(sampler, state, counters)
    return lax.map(
        lambda batch: gradient(state.estimator, state.position, batch)[1], batches
    )


def gradient_noise(sampler: Sampler, state: State) -> Noise:
    """Measure the noise of the gradient at the position of a chain; gradients of all
    the data have none.
    """

    if isinstance(sampler.gradient.stream, FullData):
        zero = jnp.zeros((), state.position.dtype)
        return Noise(zero, zero, zero)
    # Different counters from those of the power iteration.
    counters = 2**30 + state.step * NOISE_BATCHES + lax.iota(jnp.int32, NOISE_BATCHES)
    gradients = gradients_on(sampler, state, counters)
    gradients = jax.vmap(sampler.preconditioner.transpose, (None, 0))(
        state.adaptation, gradients
    )
    mean = jnp.mean(gradients, axis=0)
    total = jnp.sum(jnp.square(gradients - mean)) / (NOISE_BATCHES - 1)
    relative = total / jnp.maximum(jnp.vdot(mean, mean), total / MOST_RELATIVE)
    return Noise(
        total * largest_share(gradients, total),
        total / mean.size,
        jnp.where(total > 0, relative, 0.0),
    )


def largest_share(gradients: Array, total: Array) -> Array:
    r"""Largest eigenvalue of the covariance C of independent vectors (K, P), as a share
    of its trace ``total``.

    The eigenvalues of the sample covariance of few vectors are far too large, about P /
    K times if all are equal. The traces of powers of C have unbiased estimates: with K
    / 2 scaled differences z of mean zero and A = z z',

    .. math:: \mathrm{tr}\,C^p = E[\mathrm{tr}(U^{p - 1} A)] / \binom{K / 2}{p}

    where U is the part of A above its diagonal. The sixth root of tr C^6 is at least
    the largest eigenvalue, and at most P^(1/6) times it.

    Reference: Kong & Valiant (2017), algorithm 1.

    >>> vectors = jax.random.normal(jax.random.key(0), (64, 1000))
    >>> float(largest_share(vectors, jnp.array(1000.0))) < 0.01
    True
    """
    tiny = jnp.finfo(gradients.dtype).tiny
    scale = jnp.sqrt(
        0.5 / jnp.maximum(total, tiny)
    )  # powers of C itself would overflow
    differences = scale * (gradients[::2] - gradients[1::2])
    number = differences.shape[0]
    gram = differences @ differences.T
    above = jnp.triu(gram, 1)
    second = jnp.vdot(above, gram) / math.comb(number, 2)
    square = above @ above
    sixth = jnp.vdot(square @ square @ above, gram) / math.comb(number, 6)
    return jnp.maximum(jnp.maximum(sixth, 0.0) ** (1 / 6), second)


def bending(sampler: Sampler, state: State) -> Array:
    r"""How much gradients bend along a step: the mean square of their change of second
    order, whitened.

    Of steps d = sqrt(eps) L z, z ~ N(0, I), from the position of a chain, with one
    minibatch at both ends:

    .. math:: \frac1P \left| L' \left(\tfrac12 (g(\theta + d) + g(\theta - d)) -
              g(\theta)\right) \right|^2

    It is 0 for a quadratic potential, however different its curvatures are.
    """
    root, transpose = sampler.preconditioner.root, sampler.preconditioner.transpose
    size, dtype = state.position.shape[0], state.position.dtype
    counters = 2**29 + state.step * BENDING_STEPS + lax.iota(jnp.int32, BENDING_STEPS)
    batches, gradient = minibatches_of(sampler, state, counters)

    def one(counter_and_batch: tuple[PyTree, PyTree]) -> Array:
        counter, batch = counter_and_batch
        noise = normal(state.seeds[Purpose.PROBE], counter, size, dtype)
        step = LONGEST_STEP**0.5 * root(state.adaptation, noise)
        ahead, behind, here = (
            gradient(state.estimator, state.position + sign * step, batch)[1]
            for sign in (1, -1, 0)
        )
        change = transpose(state.adaptation, 0.5 * (ahead + behind) - here)
        return jnp.mean(jnp.square(change))

    return jnp.mean(lax.map(one, (counters, batches)))


# -- phases ----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class RenewCaches(Phase):
    """Evaluate what a chain caches of the target, before measurements and where it was
    put back.
    """

    warm_up: WarmUp

    def before(self, state: SGMCMCState, now: Transition) -> SGMCMCState:
        due = self.warm_up.measures(now.i)
        if hasattr(state.engine.memory, "potential"):
            due |= self.warm_up.rescues(now.i)
        return when(due, self._renewed, state, now)

    def _renewed(self, state: SGMCMCState, now: Transition) -> SGMCMCState:
        sampler, memory = now.sampler(state), state.engine.memory
        # Control variates are centered at the end of the warm start and stay there.
        engine = sampler.refresh(state.engine, recenter=now.i <= self.warm_up.begin)
        renewed = state._replace(engine=engine).spend(sampler.refresh_cost)
        if not hasattr(memory, "potential"):
            return renewed
        due = self.warm_up.measures(now.i) | ~jnp.isfinite(memory.potential)
        return select(due, renewed, state)


@dataclass(frozen=True, eq=False)
class MeasureNoise(Phase):
    """Measure the gradient noise of a chain, now and then."""

    warm_up: WarmUp

    def before(self, state: SGMCMCState, now: Transition) -> SGMCMCState:
        due = self.warm_up.measures(now.i)
        return when(due, self._measured, state, now)

    def _measured(self, state: SGMCMCState, now: Transition) -> SGMCMCState:
        sampler = now.sampler(state)
        noise = gradient_noise(sampler, state.engine)
        batches = 0 if isinstance(sampler.gradient.stream, FullData) else NOISE_BATCHES
        state = state._replace(gradient_noise=noise.mean)
        state = state.spend(batches * sampler.gradient.evaluations)
        return self._used(state, now, noise)

    def _used(self, state: SGMCMCState, now: Transition, noise: Noise) -> SGMCMCState:
        return state


@dataclass(frozen=True, eq=False)
class ChooseStepSize(MeasureNoise):
    """Choose the step size from the curvature and the gradient noise where the chain
    is, and make it shorter where steps are refused.

    On the way to the typical set gradients and their noise are so large that steps
    chosen for them would never get there: until it should have arrived, a chain takes
    the largest stable steps.

    :param choose: ``choose(curvature, noise, P)``.
    :param stable: ``stable(curvature, relative noise, P)``: the largest for traveling.
    :param averaged: ``averaged(state, noise)``: the noise averaged over recent
        positions.
    :param first_guess: whether the choice is one, which another phase adapts.
    """

    choose: Callable[[Array, Noise, int], Array]
    stable: Callable[[Array, Array, int], Array]
    averaged: Callable[[SGMCMCState, Noise], Noise]
    first_guess: bool

    def _used(self, state: SGMCMCState, now: Transition, noise: Noise) -> SGMCMCState:
        if not self.first_guess:
            return self._chosen(state, now, noise)
        due = now.i <= self.warm_up.begin
        return when(due, partial(self._chosen, noise=noise), state, now)

    def _chosen(
        self,
        state: SGMCMCState,
        now: Transition,
        noise: Noise,
        curvature: Array | None = None,
    ) -> SGMCMCState:
        sampler, size = now.sampler(state), state.engine.position.size
        if curvature is None:
            curvature = largest_curvature(sampler, state.engine)[0]
            state = state.spend(2 * POWER_STEPS * sampler.gradient.evaluations)
        # The noise of other estimators grows off their center.
        plain = isinstance(sampler.gradient, sgmcmc.Minibatch)
        average = self.averaged(state, noise) if plain else noise
        step_size = self.choose(curvature, average, size)
        if self.warm_up.end and not self.first_guess:
            longest = jnp.maximum(
                step_size, self.stable(curvature, noise.relative, size)
            )
            step_size = jnp.where(now.i < self.warm_up.middle, longest, step_size)
        step_size = (step_size * state.shrinkage).astype(state.base_step_size.dtype)
        # At a border the curvature may have no value: the chain starts with what it
        # has, and may start again.
        step_size = jnp.where(jnp.isfinite(step_size), step_size, state.base_step_size)
        return _with_step_size(state, sampler, step_size)

    def after(self, state: SGMCMCState, now: Transition) -> SGMCMCState:
        """Shorten the steps after a transition of warm-up in which the dynamics refused
        many; late in warm-up, also those that are chosen later.

        Steps that end at a border of the support do not count: their number hardly
        falls with their length.
        """
        if self.first_guess:
            return state
        undone = state.engine.statistics.undone_share
        shorter = jnp.where(undone > MOSTLY_UNDONE, MUCH_SHORTER, SHORTER)
        often = (undone > MAX_UNDONE) & (now.i < self.warm_up.end)
        share = jnp.where(often, shorter, 1.0)
        lasting = jnp.where(now.i >= self.warm_up.middle, share, 1.0)
        shrinkage = state.shrinkage * lasting.astype(state.shrinkage.dtype)
        return _with_step_size(
            state._replace(shrinkage=shrinkage),
            now.sampler(state),
            state.base_step_size * share,
        )


@dataclass(frozen=True, eq=False)
class GuessStepSize(ChooseStepSize):
    """A first guess of the step size, by the program that renews the potential and
    gradient of all the data that a chain caches.
    """

    def before(self, state: SGMCMCState, now: Transition) -> SGMCMCState:
        due = self.warm_up.measures(now.i) | self.warm_up.rescues(now.i)
        return when(due, self._renewed, state, now)

    def _renewed(self, state: SGMCMCState, now: Transition) -> SGMCMCState:
        begins, engine = now.i <= self.warm_up.begin, state.engine
        steps = jnp.where(begins, POWER_STEPS, 1)
        curvature, (potential, gradient) = largest_curvature(
            now.sampler(state), engine, steps, quotients=True
        )
        # as at the start of a chain: without a gradient it can still leave a border
        gradient = jnp.where(jnp.all(jnp.isfinite(gradient)), gradient, 0.0)
        old = engine.memory
        new = old._replace(potential=potential, gradient=gradient)
        due = self.warm_up.measures(now.i) | ~jnp.isfinite(old.potential)
        state = state._replace(engine=engine._replace(memory=select(due, new, old)))
        state = state.spend(jnp.where(due, 2 * steps, 0))
        noise = Noise(*jnp.zeros(3, potential.dtype))
        return select(begins, self._chosen(state, now, noise, curvature), state)


def _with_step_size(state: SGMCMCState, sampler: Sampler, chosen: Array) -> SGMCMCState:
    """A chain that goes on in other steps."""
    ratio = jnp.sqrt(state.base_step_size / chosen)
    memory = sampler.dynamics.in_other_steps(state.engine.memory, ratio)
    return state._replace(
        base_step_size=chosen.astype(state.base_step_size.dtype),
        engine=state.engine._replace(memory=memory),
    )
