"""Measurements: curvature, gradient noise, acceptance, spread, autocorrelation; how far
a chain moved.
"""

import math
from statistics import NormalDist
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from numpyro_bnn._options import Level, NonNegative, Number, PositiveInt, checked
from numpyro_bnn.sgmcmc import Sampler, State
from numpyro_bnn.sgmcmc.engine import Statistics
from numpyro_bnn.sgmcmc.interfaces import Gradient
from numpyro_bnn.sgmcmc.streams import FullData, normal

POWER_STEPS = 24
NOISE_BATCHES = 128
MOST_RELATIVE = 16.0
MOST_BYTES = 2**24  # of rows that are picked at once
BENDING_STEPS, LONGEST_STEP = (
    8,
    0.1,
)  # the second is about the largest that is chosen where curvature plus noise is 1
BENT = 0.003  # bending at which the bound is whole; ReLU networks have 2e-2, tanh 1e-4


# -- step sizes from curvature and noise -----------------------------------------------


def largest_curvature(sampler: Sampler, state: State) -> jax.Array:
    """Largest |eigenvalue| of the preconditioned Hessian L' H L at the position of a
    chain.

    Power iteration with a fresh minibatch per step; the Rayleigh quotients of the
    second half are averaged.
    """

    def iterate(
        number: jax.Array, carry: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        direction, total = carry
        batch = sampler.gradient.stream.draw(
            state.seeds.probe, state.step * POWER_STEPS + number
        )

        def gradient(position: jax.Array) -> jax.Array:
            return sampler.gradient(state.estimator, position, batch)[1]

        along = sampler.preconditioner.root(state.adaptation, direction)
        product = sampler.preconditioner.transpose(
            state.adaptation, jax.jvp(gradient, (state.position,), (along,))[1]
        )
        quotient = jnp.abs(jnp.vdot(direction, product))
        norm = jnp.linalg.norm(product)
        unit = jnp.where(norm > 0, product / jnp.where(norm > 0, norm, 1), direction)
        return unit, total + jnp.where(number >= POWER_STEPS // 2, quotient, 0)

    size = state.position.shape[0]
    # Irrational steps, so that the start is not orthogonal to an eigenvector of a
    # structured problem.
    start = jnp.sin(1.0 + 1.7 * jnp.arange(size, dtype=state.position.dtype))
    start = start / jnp.linalg.norm(start)
    total = lax.fori_loop(
        0, POWER_STEPS, iterate, (start, jnp.zeros((), state.position.dtype))
    )[1]
    return total / (POWER_STEPS - POWER_STEPS // 2)


class Noise(NamedTuple):
    """Size of the noise of the preconditioned gradient estimate.

    :param largest: variance along its noisiest direction, of which it is an upper bound
        in expectation.
    :param mean: variance, mean over coordinates.
    :param relative: variance, summed over coordinates, divided by the squared length of
        the gradient itself; at most 16, as gradients that are all noise do not tell
        more.
    """

    largest: jax.Array
    mean: jax.Array
    relative: jax.Array

    def limit(self, tolerance: float, share: float) -> jax.Array:
        """Factor s for dynamics that correct for s V, V the mean, beside a refresh of
        size 1: at most ``share``.

        A direction of noise V + D has a variance too large by s D / (1 + s V), at most
        the tolerance.
        """
        uneven = jnp.maximum(self.largest - (1 + tolerance) * self.mean, 1e-30)
        return jnp.minimum(tolerance / uneven, share / jnp.maximum(self.mean, 1e-30))


def minibatches_of(
    sampler: Sampler, state: State, counters: jax.Array
) -> tuple[Any, Gradient]:
    """K minibatches, whose rows are picked at once unless they are many, and the
    gradient that takes one of them.
    """
    estimator, draw = sampler.gradient, sampler.gradient.stream.draw
    example = jax.eval_shape(draw, state.seeds.probe, counters[0])
    prepare, finish = estimator.separate(state.position, example)
    rows = jax.tree.leaves(jax.eval_shape(prepare, example))
    if (
        len(counters) * sum(leaf.size * leaf.dtype.itemsize for leaf in rows)
        > MOST_BYTES
    ):
        prepare, finish = (lambda batch: batch), estimator
    return jax.vmap(lambda counter: prepare(draw(state.seeds.probe, counter)))(
        counters
    ), finish


def gradients_on(sampler: Sampler, state: State, counters: jax.Array) -> jax.Array:
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


def largest_share(gradients: jax.Array, total: jax.Array) -> jax.Array:
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


def bending(sampler: Sampler, state: State) -> jax.Array:
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

    def one(counter_and_batch: tuple[jax.Array, Any]) -> jax.Array:
        counter, batch = counter_and_batch
        step = LONGEST_STEP**0.5 * root(
            state.adaptation, normal(state.seeds.probe, counter, size, dtype)
        )
        ahead, behind, here = (
            gradient(state.estimator, state.position + sign * step, batch)[1]
            for sign in (1, -1, 0)
        )
        change = transpose(state.adaptation, 0.5 * (ahead + behind) - here)
        return jnp.mean(jnp.square(change))

    return jnp.mean(lax.map(one, (counters, batches)))


@checked("infer.temperature_band")
def temperature_band(
    num_parameters: PositiveInt, temperature: NonNegative = 1.0, level: Level = 0.95
) -> tuple[float, float]:
    r"""Central interval of the temperature statistics of one draw, as a check that a
    chain is at equilibrium.

    The central quantiles of T chi^2_P / P, by the Wilson-Hilferty approximation. At
    stationarity the kinetic temperature m' M^-1 m / P of one state has exactly this
    distribution; the configurational temperature has it on a centered Gaussian target
    with exact gradients. Statistics of a draw are means over its steps, so a kinetic
    value outside indicates a problem: gradient noise heats the chain, or it has not
    converged. The mean may be off even if all values lie inside.

    :param num_parameters: P; ``temperature``: T of the target.
    :param level: probability of the band.
    :return: lower and upper bound.
    :raises ValueError: for fewer than one parameter, or a level outside (0, 1).

    Reference: Wenzel et al. (2020), appendix on temperature diagnostics; Wilson &
    Hilferty (1931).

    >>> [round(bound, 2) for bound in temperature_band(50)]
    [0.65, 1.43]
    """
    z, spread = NormalDist().inv_cdf(0.5 + level / 2), 2 / (9 * num_parameters)
    low, high = (
        temperature * (1 - spread + sign * z * spread**0.5) ** 3 for sign in (-1, 1)
    )
    return max(low, 0.0), high


# -- how far a chain moved -------------------------------------------------------------

# A chain of at least so many steps is frozen below these shares of the posterior
# variance, or of acceptance.
ENOUGH_STEPS, LEAST_COVERED, LEAST_ACCEPTED = 1000, 0.02, 0.01
# least number of times that a chain should forget its position, in warm-up and after it
FORGOTTEN = 5


def listed(by_chain: Any) -> str:
    """One value per chain, as text for the attributes of a run."""
    return str(np.ravel(jax.device_get(by_chain)).tolist())


class CoveredVariance(NamedTuple):
    """Means over the draws that are kept, for the share of the posterior variance that
    they cover.

    :param draws: number of them.
    :param virial: theta' grad U / P, ``position``: theta (P,), ``gradient``: grad U
        (P,), means over their steps.
    :param accept_prob: acceptance probability; ``None`` where nothing is rejected.
    :param refused_steps: fraction of the steps that were not taken.
    """

    draws: jax.Array
    virial: jax.Array
    position: jax.Array
    gradient: jax.Array
    accept_prob: jax.Array | None
    refused_steps: jax.Array

    @classmethod
    def empty(cls, blank: Statistics) -> "CoveredVariance":
        """No draws; ``blank`` are the statistics at the start of a chain."""
        temperature, position, gradient = (
            blank.configurational_temperature,
            blank.position,
            blank.gradient,
        )
        return cls(
            jnp.int32(0),
            temperature,
            position,
            gradient,
            blank.accept_prob,
            blank.refused_share,
        )

    def add(self, seen: Statistics, kept: jax.Array) -> "CoveredVariance":
        """Add the means of a draw, if it is kept."""
        draws = self.draws + jnp.where(kept, 1, 0)
        weight = jnp.where(kept, 1 / jnp.maximum(draws, 1), 0).astype(self.virial.dtype)
        means = (
            seen.configurational_temperature,
            seen.position,
            seen.gradient,
            seen.accept_prob,
            seen.refused_share,
        )
        return CoveredVariance(
            draws, *jax.tree.map(lambda a, b: a + weight * (b - a), self[1:], means)
        )

    def known(self, temperature: float) -> bool:
        """Whether the share of the variance is known."""
        return temperature > 0 and bool(np.min(self.draws))

    def share(self, temperature: float) -> jax.Array:
        """Covariance of theta and grad U, summed over coordinates, divided by P T."""
        size = self.position.shape[-1]
        return (
            self.virial - jnp.sum(self.position * self.gradient, -1) / size
        ) / temperature

    def frozen(self, temperature: float, steps_per_draw: int) -> np.ndarray:
        """Chains (C,) that hardly moved in enough steps: they cover, or accept, almost
        nothing.
        """
        seen = jax.device_get(self)
        still = np.zeros(np.size(seen.draws), bool)
        if seen.known(temperature):
            still |= np.abs(np.ravel(seen.share(temperature))) < LEAST_COVERED
        if seen.accept_prob is not None:
            still |= np.ravel(seen.accept_prob) < LEAST_ACCEPTED
        return still & (np.ravel(seen.draws) * steps_per_draw >= ENOUGH_STEPS)


# -- microcanonical kernels ------------------------------------------------------------

TRANSITIONS = 256  # maximum number from which the autocorrelation time is estimated


def implied_bias(energy_variance: Any) -> Any:
    r"""Relative error of a posterior variance, estimated from the energy errors of
    integrator steps.

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

    mean: jax.Array
    squares: jax.Array
    total: jax.Array

    def add(self, position: jax.Array) -> "Spread":
        """Add one position."""
        total = self.total + 1
        off = position - self.mean
        mean = self.mean + off / total
        return Spread(mean, self.squares + off * (position - mean), total)

    def variance(self) -> jax.Array:
        """Variances (P,), shrunk towards their geometric mean with the weight of five
        draws.
        """
        found = self.squares / jnp.maximum(self.total - 1, 1)
        tiny = jnp.finfo(found.dtype).tiny
        center = jnp.exp(jnp.mean(jnp.log(jnp.maximum(found, tiny))))
        return jnp.maximum((self.total * found + 5 * center) / (self.total + 5), tiny)


def autocorrelation_time(record: jax.Array) -> jax.Array:
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
