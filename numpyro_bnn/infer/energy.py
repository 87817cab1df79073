"""The warm-up of microcanonical kernels, whose energy errors tell how long steps may
be.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_bnn._options import Number
from numpyro_bnn._types import Attributes, Scalar
from numpyro_bnn.infer.phases import Phase, SGMCMCState, Transition, listed, when
from numpyro_bnn.sgmcmc import State
from numpyro_bnn.sgmcmc.interfaces import select

TRANSITIONS = 256  # maximum number from which the autocorrelation time is estimated
# largest energy error that adaptation counts, in standard deviations of the target
COUNTED = 8.0
STANDARD_ERRORS = 2.0  # of the mean, added to it for the last choice of the step size
GROWTH = 1.25  # largest factor by which a transition of warm-up lengthens the steps
# maximum number of coordinates from which the autocorrelation time is estimated
RECORDED = 256
LEAST = 10  # minimum number of transitions for a variance
# decoherence length as a fraction of the distance traveled per effective draw
DECOHERENCE = 0.4
NOISY_LENGTH = 10.0  # decoherence length in steps, where gradient noise limits these


def implied_bias(energy_variance: Scalar) -> Scalar:
    r"""How biased a run of :class:`MCLMC` is: relative error of a posterior variance,
    estimated from the energy errors of its steps.

    Leapfrog steps give a Gaussian direction the relative variance 1 + b, and their
    energy errors the variance

    .. math:: v = \frac{4 b^3}{(1 + b)^2}

    whatever the step size, if momenta are drawn exactly; the inverse of this is
    returned. It is concave, so at the mean of v over directions, the energy variance
    per parameter, it bounds the mean of b. The largest b is at most that at P v, where
    one direction has all of the error. Microcanonical steps, with either integrator,
    have smaller errors on Gaussians at the same v, negative ones in wide directions.
    For other targets this is the order of magnitude.

    :param energy_variance: v >= 0.

    >>> round(float(implied_bias(4.5e-4)), 3)
    0.05
    """
    for value in np.ravel(np.asarray(energy_variance, object)):
        Number().check("infer.implied_bias", "energy_variance", value)
    given = np.asarray(energy_variance, np.float64)
    first = np.cbrt(given / 4)
    bias = (
        first * (1 + first) + given / 4
    )  # above the root, so Newton's method descends to it
    for _ in range(50):
        slope = np.where(bias > 0, 12 * bias**2 - 2 * given * (1 + bias), 1.0)
        bias = bias - (4 * bias**3 - given * (1 + bias) ** 2) / slope
    return bias[()]


class Stages(NamedTuple):
    """Transitions at which the warm-up of a microcanonical kernel enters a new stage.

    The step size is adapted from ``begin`` to ``end``. Variances are taken over [early,
    middle) and [middle, late); preconditioner and length are set at the end of each.
    Draws in [late, last) give the autocorrelation time, which sets the final length.

    >>> Stages.of(100, 200)
    Stages(begin=100, early=115, middle=135, late=160, last=190, end=200)
    """

    begin: int
    early: int
    middle: int
    late: int
    last: int
    end: int

    @classmethod
    def of(cls, begin: int, end: int) -> "Stages":
        """The stages of a warm-up that adapts from transition ``begin`` to ``end``."""
        shares = (0.0, 0.15, 0.35, 0.6, 0.9, 1.0)
        return cls(*(begin + round(share * (end - begin)) for share in shares))

    def rescales(self, i: Array) -> Array:
        """Whether preconditioner and length are set after a transition."""
        return jnp.any(i == jnp.array([self.middle - 1, self.late - 1]))

    @property
    def stride(self) -> int:
        """Transitions between two records."""
        return max(1, -(-(self.last - self.late) // TRANSITIONS))

    @property
    def records(self) -> int:
        """Number of records."""
        return -(-(self.last - self.late) // self.stride)


class Spread(NamedTuple):
    """Running mean and sum of squared deviations (P,) of whitened positions, and their
    number.
    """

    mean: Array
    squares: Array
    total: Array

    @classmethod
    def empty(cls, position: Array) -> "Spread":
        """No positions."""
        zeros = jnp.zeros_like(position)
        return cls(zeros, zeros, jnp.zeros((), position.dtype))

    def add(self, position: Array) -> "Spread":
        """Add one position."""
        total = self.total + 1
        off = position - self.mean
        mean = self.mean + off / total
        return Spread(mean, self.squares + off * (position - mean), total)

    def variance(self) -> Array:
        """Variances (P,), shrunk towards their geometric mean with the weight of five
        draws.
        """
        variances = self.squares / jnp.maximum(self.total - 1, 1)
        tiny = jnp.finfo(variances.dtype).tiny
        center = jnp.exp(jnp.mean(jnp.log(jnp.maximum(variances, tiny))))
        return jnp.maximum(
            (self.total * variances + 5 * center) / (self.total + 5), tiny
        )


def autocorrelation_time(record: Array) -> Array:
    """Mean over coordinates of the integrated autocorrelation time, in units of rows.

    :param record: (M, K) draws in their order.

    Reference: Geyer (1992), section 3.3: pairs of autocorrelations are summed until one
    is negative.

    >>> draws = jax.random.normal(jax.random.key(0), (200, 50))
    >>> bool(0.9 < autocorrelation_time(draws) < 1.2)
    True
    """
    size = record.shape[0]
    centered = record - jnp.mean(record, axis=0)
    spectrum = jnp.fft.rfft(centered, n=2 * size, axis=0)
    covariance = jnp.fft.irfft(spectrum * jnp.conj(spectrum), n=2 * size, axis=0)[
        : size // 2 * 2
    ]
    variance = covariance[0]
    correlation = covariance / jnp.where(variance > 0, variance, 1.0)
    pairs = correlation.reshape(-1, 2, record.shape[1]).sum(1)
    kept = jnp.cumprod(jnp.where(pairs > 0, 1.0, 0.0).astype(record.dtype), axis=0)
    time = jnp.maximum(2.0 * jnp.sum(pairs * kept, axis=0) - 1.0, 1.0 / size)
    moving = variance > 0
    return jnp.sum(jnp.where(moving, time, 0.0)) / jnp.maximum(jnp.sum(moving), 1)


# -- phases ----------------------------------------------------------------------------


class EnergyMean(NamedTuple):
    """Running mean of the energy variance of a step and its largest value, scaled to
    the current step size, and the number of transitions in them.
    """

    mean: Array
    largest: Array
    age: Array

    def scaled(self, factor: Array) -> "EnergyMean":
        """In steps longer by a factor: the variance grows like its sixth power."""
        power = factor**6
        return self._replace(mean=self.mean * power, largest=self.largest * power)


@dataclass(frozen=True)
class AdaptEnergy(Phase):
    """Adapt the step size so that a running mean of the energy variance meets a target
    that falls in warm-up.

    Errors have heavy tails, so on the way each is limited to eight standard deviations
    of the target, where those of refused steps count as well: a mean at the target
    leaves at most one step in 64 refused.

    The last choice is for all the draws. These meet the rare stiff places of a network
    with learned scales, whose errors make up nearly all of the mean. So in the last
    stage all errors of steps that are taken count in full, and at its end two standard
    errors of the mean are added: where few transitions make up a mean of n, one is the
    largest of them over n. For errors without heavy tails that is next to nothing.

    :param first: target of the energy variance at the start, ``last``: at the end.
    :param most: energy variance of the largest errors that are taken after warm-up.
    """

    stages: Stages
    first: float
    last: float
    most: float

    steers = True

    def start(self, engine: State, step_size: Array) -> EnergyMean:
        zero = jnp.zeros((), engine.position.dtype)
        return EnergyMean(zero, zero, zero)

    def after(self, state: SGMCMCState, now: Transition) -> SGMCMCState:
        warming = now.i < self.stages.end
        return when(warming, self._adapted, state, now)

    def _adapted(self, state: SGMCMCState, now: Transition) -> SGMCMCState:
        stages, i, refused = self.stages, now.i, state.refused_steps
        energy = jnp.asarray(state.energy_variance)
        share = jnp.clip(
            (i - stages.begin) / max(stages.late - stages.begin, 1), 0.0, 1.0
        )
        target = (self.first * (self.last / self.first) ** share).astype(energy.dtype)
        is_last = i >= stages.late
        limit = COUNTED**2 * target
        counted = jnp.where(is_last, jnp.maximum(limit, self.most), limit)
        clipped = (1 - refused) * jnp.minimum(energy, counted) + refused * limit
        energies = self._added(self.of(state), clipped, is_last)
        error = jnp.where(i == stages.end - 1, energies.largest / energies.age, 0.0)
        expected = energies.mean + STANDARD_ERRORS * error
        factor = jnp.clip(
            (target / jnp.maximum(expected, jnp.finfo(expected.dtype).tiny)) ** (1 / 6),
            0.3,
            GROWTH,
        )
        factor = jnp.where(refused > 0.5, jnp.minimum(factor, 0.5), factor)
        # Of a chain that is marked, the step size shows where it was lost.
        factor = jnp.where(state.diverging, 1.0, factor)
        energies = energies.scaled(factor)
        # With another preconditioner or length the mean begins again.
        zeros = jax.tree.map(jnp.zeros_like, energies)
        energies = select(stages.rescales(i), zeros, energies)
        step_size = (state.base_step_size * factor).astype(state.base_step_size.dtype)
        state = state._replace(base_step_size=step_size)
        return state.with_phase(self, energies)

    def _added(self, energies: EnergyMean, seen: Array, is_last: Array) -> EnergyMean:
        """With one transition more; those long ago are forgotten until the last
        choice.
        """
        age = energies.age + 1
        recent = jnp.where(is_last, 0.0, 0.1).astype(seen.dtype)
        weight = jnp.maximum(1 / age, recent)
        mean = energies.mean + weight * (seen - energies.mean)
        return EnergyMean(mean, jnp.maximum(energies.largest, seen), age)


class Record(NamedTuple):
    """Running variances of whitened positions, and positions (M, K) for the
    autocorrelation time.
    """

    spread: Spread
    positions: Array


@dataclass(frozen=True)
class LearnScales(Phase):
    """Set preconditioner and decoherence length from the draws of warm-up.

    :param sets_scales: whether their variances set the preconditioner.
    :param sets_length: whether they set the decoherence length.
    """

    stages: Stages
    steps_per_draw: int
    sets_scales: bool
    sets_length: bool

    def start(self, engine: State, step_size: Array) -> Record:
        start = engine.position
        rows, columns = max(self.stages.records, 1), min(start.size, RECORDED)
        return Record(Spread.empty(start), jnp.zeros((rows, columns), start.dtype))

    def after(self, state: SGMCMCState, now: Transition) -> SGMCMCState:
        warming = now.i < self.stages.end
        return when(warming, self._adapted, state, now)

    def _adapted(self, state: SGMCMCState, now: Transition) -> SGMCMCState:
        stages = self.stages
        state = self._recorded(state, now)
        due = stages.rescales(now.i)
        state = when(due, self._rescaled, state, now)
        if not self.sets_length or stages.records < 2 * LEAST:
            return state
        due = now.i == stages.last - 1
        return when(due, self._relaxed, state, now)

    def _recorded(self, state: SGMCMCState, now: Transition) -> SGMCMCState:
        """Add the position to variances and record."""
        stages, (spread, positions), i = self.stages, self.of(state), now.i
        engine = state.engine
        white = now.sampler(state).preconditioner.whiten(
            engine.adaptation, engine.position
        )
        spread = select(i >= stages.early, spread.add(white), spread)
        row = jnp.clip((i - stages.late) // stages.stride, 0, positions.shape[0] - 1)
        chosen = jnp.linspace(0, white.size - 1, positions.shape[1]).astype(jnp.int32)
        due = (i >= stages.late) & (i < stages.last)
        positions = jnp.where(due, positions.at[row].set(white[chosen]), positions)
        return state.with_phase(self, Record(spread, positions))

    def _rescaled(self, state: SGMCMCState, now: Transition) -> SGMCMCState:
        """Set the preconditioner to the variances seen, and the length to their root
        sum of squares.
        """
        record, engine = self.of(state), state.engine
        enough = record.spread.total >= LEAST
        variance, adaptation = record.spread.variance(), engine.adaptation
        if self.sets_scales:
            # Only the shape: its scale is absorbed by the step size.
            shape = jnp.exp(0.5 * (jnp.log(variance) - jnp.mean(jnp.log(variance))))
            adaptation = jnp.where(enough, adaptation * shape, adaptation)
            variance = variance / shape**2
        memory = engine.memory
        if self.sets_length:
            length = jnp.where(enough, jnp.sqrt(jnp.sum(variance)), memory.length)
            memory = memory._replace(length=jnp.maximum(length, state.base_step_size))
        state = state._replace(
            engine=engine._replace(adaptation=adaptation, memory=memory)
        )
        return state.with_phase(
            self, record._replace(spread=Spread.empty(engine.position))
        )

    def _relaxed(self, state: SGMCMCState, now: Transition) -> SGMCMCState:
        """Set the length to a fraction of the distance traveled per effective draw, if
        draws are correlated.
        """
        time = autocorrelation_time(self.of(state).positions) * self.stages.stride
        relaxed = DECOHERENCE * time * self.steps_per_draw * state.base_step_size
        # Nearly independent draws do not show how much closer together they could be.
        length = state.engine.memory.length
        return _with_length(
            state, jnp.where(time > 2, relaxed, length).astype(length.dtype)
        )


class FixRefreshes(Phase):
    """A decoherence length of ten steps, where gradient noise limits these."""

    def after(self, state: SGMCMCState, now: Transition) -> SGMCMCState:
        return _with_length(state, NOISY_LENGTH * state.base_step_size)


def _with_length(state: SGMCMCState, length: Array) -> SGMCMCState:
    memory = state.engine.memory._replace(length=length)
    return state._replace(engine=state.engine._replace(memory=memory))


class TakenEnergy(NamedTuple):
    """Mean energy variance of the steps taken since warm-up, and the fraction of the
    steps that were taken, summed over draws.
    """

    energy: Array
    taken: Array


@dataclass(frozen=True)
class MeasureEnergy(Phase):
    """The energy variance of the draws that are kept; chains whose steps are lost in
    the rounding of their position are marked.
    """

    num_warmup: int

    def start(self, engine: State, step_size: Array) -> TakenEnergy:
        zero = jnp.zeros((), engine.position.dtype)
        return TakenEnergy(zero, zero)

    def after(self, state: SGMCMCState, now: Transition) -> SGMCMCState:
        mean = self.of(state)
        weight = jnp.where(now.i < self.num_warmup, 0.0, 1 - state.refused_steps)
        taken = mean.taken + weight
        change = state.energy_variance - mean.energy
        energy = mean.energy + weight / jnp.maximum(taken, 1e-6) * change
        state = state.with_phase(self, TakenEnergy(energy, taken))
        engine = state.engine
        white = now.sampler(state).preconditioner.whiten(
            engine.adaptation, engine.position
        )
        typical = jnp.exp(jnp.mean(jnp.log(jnp.abs(white)))) * white.size**0.5
        frozen = state.base_step_size < jnp.finfo(white.dtype).eps * typical
        since = engine.step - jnp.maximum(engine.refused_in_a_row, 1)
        first = jnp.where(
            frozen & (engine.first_divergence < 0), since, engine.first_divergence
        )
        return state._replace(engine=engine._replace(first_divergence=first))

    def describe(self, state: SGMCMCState) -> Attributes:
        """The bias of variances that the energy errors of the draws imply.

        For the worst chain: its mean over directions, and a bound, as if one direction
        had all the error.
        """
        energy, taken = jax.device_get(self.of(state))
        drawn = np.asarray(state.i) > self.num_warmup
        energies = np.where(drawn & (taken == 0), np.nan, energy)
        known = energies[np.isfinite(energies)]  # none if no step was taken
        bias = bound = math.nan
        if known.size:
            bias = float(implied_bias(known.max()))
            bound = float(implied_bias(state.engine.position.shape[-1] * known.max()))
        return {
            "decoherence_length": listed(state.engine.memory.length),
            "mean_energy_variance": listed(energies),
            "frozen": listed(state.diverging),
            "implied_bias": bias,
            "implied_bias_bound": bound,
        }
