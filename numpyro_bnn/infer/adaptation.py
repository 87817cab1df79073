"""How the microcanonical kernels find step size, decoherence length and preconditioner in warm-up."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

__all__ = ["Averaging", "Spread", "Stages", "Tuning", "autocorrelation_time", "smallest_change", "start"]

# Most coordinates and transitions from which the effective sample size is estimated.
RECORDED, TRANSITIONS = 256, 256
LEAST = 10  # fewer transitions tell no variance


class Stages(NamedTuple):
    """Transitions at which the warm-up of a microcanonical kernel changes what it does, W after its warm start.

    From ``begin`` on the step size is steered alone; variances are taken over [early, middle) and [middle, late),
    and preconditioner and length set at the end of each; draws in [late, last) tell the autocorrelation time, from
    which the length is set a last time.

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

    @property
    def stride(self) -> int:
        """Transitions between two records."""
        return max(1, -(-(self.last - self.late) // TRANSITIONS))

    @property
    def records(self) -> int:
        """Number of records."""
        return -(-(self.last - self.late) // self.stride)


class Spread(NamedTuple):
    """Running mean and sum of squared deviations (P,) of whitened positions, and their number."""

    mean: jax.Array
    squares: jax.Array
    total: jax.Array

    def add(self, position: jax.Array) -> "Spread":
        """Take one position more into account."""
        total = self.total + 1
        off = position - self.mean
        mean = self.mean + off / total
        return Spread(mean, self.squares + off * (position - mean), total)

    def variance(self) -> jax.Array:
        """Variances (P,), drawn towards their geometric mean as if that had been seen five times."""
        found = self.squares / jnp.maximum(self.total - 1, 1)
        tiny = jnp.finfo(found.dtype).tiny
        center = jnp.exp(jnp.mean(jnp.log(jnp.maximum(found, tiny))))
        return jnp.maximum((self.total * found + 5 * center) / (self.total + 5), tiny)


class Averaging(NamedTuple):
    """Dual averaging of the logarithm of a step size.

    :param value: for the next transition.
    :param average: for the time after warm-up.
    :param drift: mean of target minus acceptance.
    :param updates: of updates.
    :param center: to which values are drawn.

    Reference: Hoffman & Gelman (2014), section 3.2, with its constants.
    """

    value: jax.Array
    average: jax.Array
    drift: jax.Array
    updates: jax.Array
    center: jax.Array

    @classmethod
    def at(cls, step_size: jax.Array) -> "Averaging":
        """Start anew."""
        value = jnp.log(step_size)
        zero = jnp.zeros_like(value)
        return cls(value, value, zero, zero, value + jnp.log(2.0).astype(value.dtype))

    def update(self, excess: jax.Array) -> "Averaging":
        """Learn from target minus acceptance of a transition."""
        updates = self.updates + 1
        drift = self.drift + (excess - self.drift) / (updates + 10)
        value = self.center - jnp.sqrt(updates) / 0.05 * drift
        weight = updates**-0.75
        return Averaging(value, weight * value + (1 - weight) * self.average, drift, updates, self.center)


class Tuning(NamedTuple):
    """What a microcanonical kernel remembers.

    :param excess: running mean of the energy variance of a step, scaled to the present step size.
    :param age: transitions that are in it.
    :param averaging: dual averaging, where there is a Metropolis test.
    :param spread: of whitened positions.
    :param record: positions (M, K), for the autocorrelation time.
    :param energy: mean energy variance of the draws since warm-up.
    :param draws: their number.
    """

    excess: jax.Array
    age: jax.Array
    averaging: Averaging
    spread: Spread
    record: jax.Array
    energy: jax.Array
    draws: jax.Array


def start(position: jax.Array, step_size: jax.Array, stages: Stages) -> Tuning:
    """The memory of a kernel at its start.

    >>> start(jnp.zeros(300), jnp.ones(()), Stages.of(0, 100)).record.shape
    (30, 256)
    """
    zeros, zero = jnp.zeros_like(position), jnp.zeros((), position.dtype)
    record = jnp.zeros((max(stages.records, 1), min(position.size, RECORDED)), position.dtype)
    return Tuning(zero, zero, Averaging.at(step_size), Spread(zeros, zeros, zero), record, zero, zero)


def chosen_coordinates(position: jax.Array, number: int) -> jax.Array:
    """``number`` coordinates of a position, evenly spread."""
    return position[jnp.linspace(0, position.size - 1, number).astype(jnp.int32)]


def autocorrelation_time(record: jax.Array) -> jax.Array:
    """Mean over coordinates of the integrated autocorrelation time, in units of rows.

    :param record: (M, K) draws in their order.

    Reference: Geyer (1992), section 3.3: pairs of autocorrelations are summed until one is negative.

    >>> draws = jax.random.normal(jax.random.key(0), (200, 50))
    >>> bool(0.9 < autocorrelation_time(draws) < 1.2)
    True
    """
    size = record.shape[0]
    centered = record - jnp.mean(record, axis=0)
    spectrum = jnp.fft.rfft(centered, n=2 * size, axis=0)
    covariance = jnp.fft.irfft(spectrum * jnp.conj(spectrum), n=2 * size, axis=0)[: size // 2 * 2]
    variance = covariance[0]
    correlation = covariance / jnp.where(variance > 0, variance, 1.0)
    pairs = correlation.reshape(-1, 2, record.shape[1]).sum(1)
    kept = jnp.cumprod(jnp.where(pairs > 0, 1.0, 0.0).astype(record.dtype), axis=0)
    time = jnp.maximum(2.0 * jnp.sum(pairs * kept, axis=0) - 1.0, 1.0 / size)
    moving = variance > 0
    return jnp.sum(jnp.where(moving, time, 0.0)) / jnp.maximum(jnp.sum(moving), 1)


def smallest_change(excess: jax.Array, target: jax.Array) -> jax.Array:
    """Factor of the step size that brings a mean energy variance to its target: it grows like the sixth power.

    >>> float(smallest_change(jnp.float32(64.0), jnp.float32(1.0)))
    0.5
    """
    tiny = jnp.finfo(excess.dtype).tiny
    return jnp.clip((target / jnp.maximum(excess, tiny)) ** (1 / 6), 0.3, 3.0)
