"""Predictive mixtures, one component for each draw: their moments, quantiles, densities
and scores.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from jax.scipy.special import betainc, entr, gammainc, logsumexp, ndtr
from numpyro.distributions import constraints
from numpyro.distributions.util import validate_sample

from numpyro_bnn._distributions import NoiseStudentT, unwrapped
from numpyro_bnn._types import PyTree

HALVINGS = 40  # of the bracket of a quantile
# Of the table of a Student's t: largest asinh of a value, and number of nodes.
MAX_ASINH, NUM_NODES = 20.0, 2049
# Of the integral of a CRPS: predictive standard deviations beyond the mean, and nodes.
MAX_DISTANCE_SD, NUM_CRPS_NODES = 100.0, 256
MAX_LOG = 45.0  # logs beyond which an exponential or logistic function has no mass
MAX_NORMAL_SD = 12.0  # beyond which a normal has no mass in float32
MIN_SQUARE = 1e-9  # of a probability whose square is summed over counts
MAX_SUMMED_COUNTS = 2000  # probabilities of single counts that are added up
LOG_UNIT = 40.0  # of numbers that are as small as a probability of zero may be
MAX_BETA_COUNT = 3000.0  # above, the beta function of a count has no digits in float32
# Of the moments of a logit: largest asinh of a standardized value, and nodes.
MAX_MOMENT_ASINH, NUM_MOMENT_NODES = 8.0, 161


class Hurdle(dist.Distribution):
    r"""Exact zeros, and a log-normal part: for amounts that are often nothing.

    .. math:: P(y = 0) = \mathrm{logit}^{-1}(a), \qquad \log y \mid y > 0 \sim
              N(m, s^2)

    Its ``log_prob`` is the log probability of a zero, and the log density of a positive
    value.

    :param zero_logit: a.
    :param loc: m.
    :param scale: s.

    >>> fn = Hurdle(jnp.zeros(2), jnp.array([0.0, 1.0]), 0.5)
    >>> fn.log_prob(jnp.zeros(2)).round(3).tolist(), fn.cdf(jnp.ones(2)).tolist()[0]
    ([-0.6930000185966492, -0.6930000185966492], 0.75)
    """

    arg_constraints: ClassVar = {
        "zero_logit": constraints.real,
        "loc": constraints.real,
        "scale": constraints.positive,
    }
    support = constraints.nonnegative
    pytree_data_fields = ("zero_logit", "loc", "scale")

    def __init__(
        self, zero_logit: Any, loc: Any, scale: Any, *, validate_args: Any = None
    ) -> None:
        parameters = jnp.broadcast_arrays(zero_logit, loc, scale)
        self.zero_logit, self.loc, self.scale = parameters
        super().__init__(self.loc.shape, (), validate_args=validate_args)

    @property
    def _positive(self) -> dist.Distribution:
        return dist.LogNormal(self.loc, self.scale)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        uniform, normal = jax.random.split(key)
        shape = self.shape(sample_shape)
        is_zero = jax.random.uniform(uniform, shape) < jax.nn.sigmoid(self.zero_logit)
        return jnp.where(is_zero, 0.0, self._positive.sample(normal, sample_shape))

    @validate_sample
    def log_prob(self, value: Array) -> Array:
        is_zero = value == 0
        amount = jnp.where(value > 0, value, 1.0)  # finite gradients at zero
        density = self._positive.log_prob(amount) - jax.nn.softplus(self.zero_logit)
        at_zero = -jax.nn.softplus(-self.zero_logit)
        return jnp.where(is_zero, at_zero, jnp.where(value > 0, density, -jnp.inf))

    def cdf(self, value: Array) -> Array:
        zero = jax.nn.sigmoid(self.zero_logit)
        below = ndtr((jnp.log(jnp.maximum(value, 0.0)) - self.loc) / self.scale)
        return jnp.where(value < 0, 0.0, zero + (1 - zero) * below)

    @property
    def mean(self) -> Array:
        return jax.nn.sigmoid(-self.zero_logit) * self._positive.mean

    @property
    def variance(self) -> Array:
        square = jax.nn.sigmoid(-self.zero_logit) * jnp.exp(
            2 * self.loc + 2 * self.scale**2
        )
        return square - self.mean**2


# -- components: means, standard deviations and, of a Student's t, degrees of freedom,
# (M, R) or (M, R, K); of classes, probabilities (M, R, K); of counts, means and
# concentrations; of a hurdle, the chance of a zero, and loc and scale of the log
# -----------------------------------------------------------------------------


def component_of(fn: Any) -> tuple:
    """The arrays that a component of the mixture consists of."""
    if hasattr(fn, "logits"):
        return (fn.probs,)
    kind = unwrapped(fn)
    if isinstance(kind, Hurdle):
        return jax.nn.sigmoid(kind.zero_logit), kind.loc, kind.scale
    if isinstance(kind, dist.GammaPoisson):
        return fn.mean, jnp.broadcast_to(kind.concentration, fn.mean.shape)
    component = (fn.mean, jnp.sqrt(fn.variance))
    if isinstance(kind, dist.StudentT):
        return *component, jnp.broadcast_to(kind.df, fn.mean.shape)
    return component


def _moments(mixture: tuple, weights: Array) -> tuple:
    """Mean of an observation, mean variance of the noise, and variance of the function,
    which add up.
    """
    means, sds = mixture[:2]
    return _total((means, sds**2), weights)


def _quantiles(mixture: tuple, weights: Array, levels: Array) -> tuple:
    """Quantiles of the mixture at each level, by bisection between bounds of those of
    its components (Cantelli).
    """
    (means, sds), cdf = mixture[:2], _cdf(mixture)

    def below(value: Array) -> Array:
        return jnp.tensordot(weights, cdf((value - means) / sds), 1)

    def at(level: Array) -> Array:
        odds = jnp.sqrt(level / (1 - level))
        bracket = (means - sds / odds).min(0), (means + odds * sds).max(0)
        return _bisected(below, level, bracket)

    return tuple(jax.lax.map(at, levels))


def _bisected(below: Callable, level: Array, bracket: tuple) -> Array:
    """Where an increasing function has a level, between bounds."""

    def halve(_: Any, bracket: tuple) -> tuple:
        return _half(below, level, bracket, sum(bracket) / 2)

    return sum(jax.lax.fori_loop(0, HALVINGS, halve, bracket)) / 2


def _half(below: Callable, level: Array, bracket: tuple, middle: Array) -> tuple:
    """The part of a bracket, on one side of its middle, in which the level is."""
    is_below = below(middle) < level
    return (
        jnp.where(is_below, middle, bracket[0]),
        jnp.where(is_below, bracket[1], middle),
    )


def _cdf(mixture: tuple) -> Callable:
    """Distribution functions of the standardized components, at values (M, R) or (M, R,
    K).

    That of a Student's t, whose degrees of freedom are the same for all rows of a draw,
    is read from a table: linear in asinh(z), so its error is below 2e-5.
    """
    if len(mixture) == 2:
        return ndtr
    df = mixture[2].reshape((len(mixture[2]), -1))[:, :1]
    table = _student_t_table(df)
    draw = jnp.arange(len(df)).reshape((-1, *[1] * (mixture[2].ndim - 1)))

    def cdf(z: Array) -> Array:
        place = jnp.arcsinh(z / jnp.sqrt(1 - 2 / mixture[2])) / MAX_ASINH
        place = (jnp.clip(place, -1, 1) + 1) * (NUM_NODES - 1) / 2
        below = jnp.clip(place.astype(int), 0, NUM_NODES - 2)
        low, high = table[draw, below], table[draw, below + 1]
        return low + (place - below) * (high - low)

    return cdf


def _student_t_table(df: Array) -> Array:
    """Distribution functions (M, NUM_NODES) at values whose asinh is equally spaced, by
    Simpson's rule: a hundredth of the work of an incomplete beta function.
    """
    asinh = jnp.linspace(-MAX_ASINH, 0, NUM_NODES)
    density = jnp.exp(NoiseStudentT(df).log_prob(jnp.sinh(asinh))) * jnp.cosh(asinh)
    ends = density[:, :-2:2] + density[:, 2::2]
    masses = (asinh[2] - asinh[0]) / 6 * (ends + 4 * density[:, 1::2])
    below = jnp.pad(jnp.cumsum(masses, 1), ((0, 0), (1, 0)))
    return jnp.concatenate([below, 1 - below[:, -2::-1]], 1)


def _log_density(mixture: tuple, weights: Array, y: Array) -> tuple:
    """Log density of the mixture at y; all outputs of a row together that are not
    missing (NaN).
    """
    means, sds = mixture[:2]
    tails = [NoiseStudentT(df, means, sds * jnp.sqrt(1 - 2 / df)) for df in mixture[2:]]
    each = (*tails, dist.Normal(means, sds))[0].log_prob(y)
    each = jnp.where(jnp.isnan(y), 0.0, each).sum(-1) if each.ndim == 3 else each
    return (logsumexp(each, axis=0, b=weights[:, None]),)


def _distribution(mixture: tuple, weights: Array, y: Array) -> tuple:
    """Distribution function of the mixture at y, of each output alone."""
    means, sds = mixture[:2]
    return (jnp.tensordot(weights, _cdf(mixture)((y - means) / sds), 1),)


def _crps(mixture: tuple, weights: Array, y: Array) -> tuple:
    """Continuous ranked probability score of the mixture at y, of each output alone:
    see :func:`_integral`.
    """
    mean, noise, spread = _moments(mixture, weights)
    sd = jnp.sqrt(noise + spread)
    reach = jnp.maximum(MAX_DISTANCE_SD, jnp.abs(y - mean) / sd)
    tails = _tails(mixture, weights)
    return (_integral(tails, jnp.zeros_like, y, mean, sd, reach),)


def _tails(mixture: tuple, weights: Array) -> Callable:
    """Probabilities of at most and of more than a value, of each output alone."""
    means, sds = mixture[:2]
    cdf = _cdf(mixture)

    def tails(value: Array) -> tuple[Array, Array]:
        unit = (value - means) / sds
        below = jnp.tensordot(weights, cdf(unit), 1)
        return below, jnp.tensordot(weights, cdf(-unit), 1)

    return tails


def _entropies(mixture: tuple, weights: Array) -> tuple:
    """Entropy of the mean probabilities, and mean entropy of the draws."""
    mean = jnp.tensordot(weights, mixture[0], 1)
    return entr(mean).sum(-1), jnp.tensordot(weights, entr(mixture[0]).sum(-1), 1)


# -- targets on another scale: the components of z, and y = g(z) ---------------------


def _stretched(mixture: tuple, weights: Array, factor: Array) -> tuple:
    """Components with this many times their distance from the mean of the mixture."""
    return _around(jnp.tensordot(weights, mixture[0], 1), mixture, factor)


def _around(mean: Array, mixture: tuple, factor: Array) -> tuple:
    means, sds = mixture[:2]
    return mean + factor * (means - mean), factor * sds, *mixture[2:]


def _total(components: tuple, weights: Array) -> tuple:
    """:func:`_moments` from the means and variances of the components."""
    means, variances = components
    mean = jnp.tensordot(weights, means, 1)
    spread = jnp.tensordot(weights, (means - mean) ** 2, 1)
    return mean, jnp.tensordot(weights, variances, 1), spread


def _log_normal_moments(loc: Array, sd: Array) -> tuple[Array, Array]:
    mean = jnp.exp(loc + sd**2 / 2)
    return mean, mean**2 * jnp.expm1(sd**2)


def _of_exp(mixture: tuple, _: Any, scale: Any) -> tuple:
    """Mean and variance of exp(scale z) of each component."""
    return _log_normal_moments(scale * mixture[0], scale * mixture[1])


def _of_logistic(mixture: tuple, center: Array, scale: Array) -> tuple:
    """Mean and variance of 1 / (1 + exp(-center - scale z)) of each component.

    By the trapezoidal rule in asinh of the standardized value, whose error vanishes
    exponentially for such functions.
    """
    means, sds = mixture[:2]
    places = np.linspace(-MAX_MOMENT_ASINH, MAX_MOMENT_ASINH, NUM_MOMENT_NODES)
    units = jnp.asarray(np.sinh(places))
    steps = jnp.asarray(np.cosh(places) * (places[1] - places[0]))

    def add(totals: tuple, node: tuple[Array, Array]) -> tuple:
        unit, step = node
        if len(mixture) == 2:
            density = jnp.exp(dist.Normal(0.0, 1.0).log_prob(unit))
        else:
            shrink = jnp.sqrt(1 - 2 / mixture[2])
            density = jnp.exp(NoiseStudentT(mixture[2], 0.0, shrink).log_prob(unit))
        value = jax.nn.sigmoid(center + scale * (means + sds * unit))
        mass, mean, square = totals
        share = step * density
        return (mass + share, mean + share * value, square + share * value**2), None

    zero = jnp.zeros(jnp.broadcast_shapes(means.shape, jnp.shape(center)))
    (mass, mean, square), _ = jax.lax.scan(add, (zero, zero, zero), (units, steps))
    # tails of few degrees of freedom reach beyond the nodes
    mean, square = mean / mass, square / mass
    return mean, jnp.maximum(square - mean**2, 0.0)


def _moments_of(components: Callable) -> Callable:
    """Moments from the means and variances of the components."""

    def moments(mixture: tuple, weights: Array, *options: Array) -> tuple:
        return _total(components(mixture, *options), weights)

    return moments


def _stretched_moments(of: Callable) -> Callable:
    """Moments of y, in its own units, of a component of z."""

    def moments(
        mixture: tuple,
        weights: Array,
        factor: Array,
        center: Array,
        scale: Array,
    ) -> tuple:
        mixture = _stretched(mixture, weights, factor)
        return _total(of(mixture, center, scale), weights)

    return moments


def _each(components: Callable) -> Callable:
    """Mean and variance of y for each component."""
    return lambda mixture, _, *options: components(mixture, *options)


def _components_of(of: Callable) -> Callable:
    """Mean and variance of y for each component of z, whose mean over all draws, which
    may not be in the mixture, is ``middle``.
    """

    def components(
        mixture: tuple,
        _: Array,
        middle: Array,
        factor: Array,
        center: Array,
        scale: Array,
    ) -> tuple:
        return of(_around(middle, mixture, factor), center, scale)

    return components


def _log_slope_of_exp(z: Array, _: Array, scale: Array) -> Array:
    return jnp.log(scale) + scale * z


def _log_slope_of_logistic(z: Array, center: Array, scale: Array) -> Array:
    logit = center + scale * z
    return jnp.log(scale) - jax.nn.softplus(logit) - jax.nn.softplus(-logit)


def _crps_of(log_slope: Callable) -> Callable:
    """The score of y = g(z), from log g': see :func:`_integral`."""

    def crps(
        mixture: tuple,
        weights: Array,
        z: Array,
        factor: Array,
        center: Array,
        scale: Array,
    ) -> tuple:
        mixture = _stretched(mixture, weights, factor)
        mean, noise, spread = _moments(mixture, weights)

        def log_weight(value: Array) -> Array:
            return log_slope(value, center, scale)

        sd = jnp.sqrt(noise + spread)
        reach = _reach_of_logs(scale * sd)
        tails = _tails(mixture, weights)
        return (_integral(tails, log_weight, z, mean, sd, reach),)

    return crps


def _reach_of_logs(sd: Array) -> Array:
    """Beyond so many standard deviations an exponential has no mass either."""
    return jnp.maximum(MAX_DISTANCE_SD, 2 * MAX_LOG / sd)


def _integral(
    tails: Callable,
    log_slope: Callable,
    z: Array,
    mean: Array,
    sd: Array,
    reach: Array,
) -> Array:
    """The integral of F^2 below z, and of (1 - F)^2 above it, times the slope g'.

    Gauss-Legendre on both sides of z, in asinh of the distance from the mean in
    standard deviations: to a ``reach`` beyond which neither F nor g has anything. Where
    components are a hundred times narrower than the mixture, errors reach a percent.
    """
    limit = jnp.arcsinh(reach)
    middle = jnp.clip(jnp.arcsinh((z - mean) / sd), -limit, limit)
    places, node_weights = np.polynomial.legendre.leggauss(NUM_CRPS_NODES)

    def add(total: Array, node: tuple[Array, Array]) -> tuple:
        place, weight = node
        for side, (low, high) in enumerate([(-limit, middle), (middle, limit)]):
            at = low + (high - low) * place
            value = mean + sd * jnp.sinh(at)
            step = jnp.log(sd) + jnp.log(jnp.cosh(at)) + log_slope(value)
            tail = jnp.exp(2 * jnp.log(tails(value)[side]) + step)
            total = total + weight * (high - low) * tail
        return total, None

    nodes = jnp.asarray((places + 1) / 2), jnp.asarray(node_weights / 2)
    return jax.lax.scan(add, jnp.zeros_like(mean), nodes)[0]


# -- zeros and amounts -----------------------------------------------------------------


def _hurdle_components(mixture: tuple) -> tuple:
    zero, loc, scale = mixture
    mean, variance = _log_normal_moments(loc, scale)
    return (1 - zero) * mean, (1 - zero) * (variance + zero * mean**2)


def _hurdle_tails(mixture: tuple, weights: Array, log_y: Array) -> tuple:
    """Probabilities of at most and of more than a positive amount."""
    zero, loc, scale = mixture
    unit = (log_y - loc) / scale
    below = jnp.tensordot(weights, zero + (1 - zero) * ndtr(unit), 1)
    return below, jnp.tensordot(weights, (1 - zero) * ndtr(-unit), 1)


def _hurdle_cdf(mixture: tuple, weights: Array, y: Array) -> tuple:
    below = _hurdle_tails(mixture, weights, jnp.log(jnp.maximum(y, 0.0)))[0]
    return (jnp.where(y < 0, 0.0, below),)


def _hurdle_log_density(mixture: tuple, weights: Array, y: Array) -> tuple:
    zero, loc, scale = mixture
    log_odds = jnp.log(zero) - jnp.log1p(-zero)
    each = Hurdle(log_odds, loc, scale).log_prob(y)
    return (logsumexp(each, axis=0, b=weights[:, None]),)


def _hurdle_quantiles(mixture: tuple, weights: Array, levels: Array) -> tuple:
    zero, loc, scale = mixture
    zeros = jnp.tensordot(weights, zero, 1)
    lowest = (loc - MAX_NORMAL_SD * scale).min(0)
    highest = (loc + MAX_NORMAL_SD * scale).max(0)

    def below(log_amount: Array) -> Array:
        return _hurdle_tails(mixture, weights, log_amount)[0]

    def at(level: Array) -> Array:
        log_amount = _bisected(below, level, (lowest, highest))
        return jnp.where(level <= zeros, 0.0, jnp.exp(log_amount))

    return tuple(jax.lax.map(at, levels))


def _hurdle_crps(mixture: tuple, weights: Array, y: Array) -> tuple:
    _, loc, scale = mixture
    mean, noise, spread = _total((loc, scale**2), weights)
    sd = jnp.sqrt(noise + spread)
    score = _integral(
        partial(_hurdle_tails, mixture, weights),
        lambda log_y: log_y,
        jnp.log(jnp.maximum(y, 0.0)),
        mean,
        sd,
        _reach_of_logs(sd),
    )
    return (score,)


# -- counts ----------------------------------------------------------------------------


def _count_components(mixture: tuple) -> tuple:
    mean, concentration = mixture
    return mean, mean + mean**2 / concentration


def _count_below(mixture: tuple, weights: Array, count: Array) -> Array:
    """Probability of at most a whole number."""
    mean, concentration = mixture
    place = jnp.maximum(count, 0.0)
    near = jnp.minimum(place, MAX_BETA_COUNT) + 1
    exact = betainc(concentration, near, concentration / (concentration + mean))
    is_large = place > MAX_BETA_COUNT

    def smooth(exact: Array) -> Array:
        # a gamma of the same mean and variance, with a correction for continuity
        shape = 1 / (1 / mean + 1 / concentration)
        return jnp.where(is_large, gammainc(shape, shape * (place + 0.5) / mean), exact)

    each = jax.lax.cond(jnp.any(is_large), smooth, lambda exact: exact, exact)
    return jnp.where(count < 0, 0.0, jnp.tensordot(weights, each, 1))


def _count_cdf(mixture: tuple, weights: Array, y: Array) -> tuple:
    return (_count_below(mixture, weights, jnp.floor(y)),)


def _count_log_density(mixture: tuple, weights: Array, y: Array) -> tuple:
    mean, concentration = mixture
    whole = jnp.maximum(jnp.round(y), 0.0)
    each = dist.NegativeBinomial2(mean, concentration).log_prob(whole)
    log_density = logsumexp(each, axis=0, b=weights[:, None])
    return (jnp.where(whole == y, log_density, -jnp.inf),)


def _fold_counts(
    mixture: tuple, weights: Array, carry: PyTree, add: Callable, is_open: Callable
) -> PyTree:
    """Fold ``add(carry, k, P(at most k))`` over k = 0, 1, ... while ``is_open(carry)``,
    but not over very many.

    The probabilities follow from one another. One that is too small for a float is kept
    as p exp(-40 n), and is added once n is zero.
    """
    mean, concentration = mixture
    factor = mean / (mean + concentration)
    log_zero = -concentration * jnp.log1p(mean / concentration)
    units = jnp.maximum(jnp.ceil(-log_zero / LOG_UNIT) - 1, 0.0)

    def is_unfinished(state: tuple) -> Array:
        count, *_, carry = state
        return (count < MAX_SUMMED_COUNTS) & is_open(carry)

    def step(state: tuple) -> tuple:
        count, probability, units, below, carry = state
        single = jnp.where(units == 0, probability, 0.0)
        below = below + jnp.tensordot(weights, single, 1)
        carry = add(carry, count, below)
        probability *= factor * (count + concentration) / (count + 1)
        is_due = (units > 0) & (probability > 1.0)
        probability = jnp.where(is_due, probability * math.exp(-LOG_UNIT), probability)
        return count + 1, probability, units - is_due, below, carry

    first = jnp.exp(log_zero + units * LOG_UNIT)
    zero = jnp.zeros((), mean.dtype)
    state = zero, first, units, jnp.zeros_like(mean[0]), carry
    return jax.lax.while_loop(is_unfinished, step, state)[-1]


def _count_quantiles(mixture: tuple, weights: Array, levels: Array) -> tuple:
    """The smallest whole numbers with at least these probabilities below."""

    def add(quantiles: Array, count: Array, below: Array) -> Array:
        is_new = jnp.isinf(quantiles) & (below >= levels[:, None])
        return jnp.where(is_new, count, quantiles)

    def is_open(quantiles: Array) -> Array:
        return jnp.isinf(quantiles).any()

    open_quantiles = jnp.full((len(levels), mixture[0].shape[1]), jnp.inf)
    quantiles = _fold_counts(mixture, weights, open_quantiles, add, is_open)

    def with_large() -> Array:
        large = _large_quantiles(mixture, weights, levels)
        return jnp.where(jnp.isinf(quantiles), large, quantiles)

    return tuple(jax.lax.cond(is_open(quantiles), with_large, lambda: quantiles))


def _large_quantiles(mixture: tuple, weights: Array, levels: Array) -> Array:
    """:func:`_count_quantiles` by halving, also of large counts."""
    mean, variance = _count_components(mixture)
    below = partial(_count_below, mixture, weights)

    def is_open(low: Array, high: Array) -> Array:
        middle = jnp.floor((low + high) / 2)
        # neighbors of float32 may be whole numbers that differ by more than one
        return (middle > low) & (middle < high)

    def at(level: Array) -> Array:
        def halve(bracket: tuple) -> tuple:
            return _half(below, level, bracket, jnp.floor(sum(bracket) / 2))

        # Cantelli's bound of each component, and so of the mixture
        reach = mean + jnp.sqrt(variance * level / (1 - level))
        high = jnp.ceil(reach.max(0)) + 1
        bracket = jax.lax.while_loop(
            lambda bracket: jnp.any(is_open(*bracket)),
            halve,
            (jnp.full_like(high, -1.0), high),
        )
        return bracket[1]

    return jax.lax.map(at, levels)


def _count_distances() -> np.ndarray:
    """Whole distances from a count: all small ones, then growing by a seventh."""
    distances = list(range(17))
    while distances[-1] < 10**7:
        distances.append(distances[-1] * 8 // 7 + 1)
    return np.array(distances)


def _count_crps(mixture: tuple, weights: Array, y: Array) -> tuple:
    """The sum of F^2 below y and of (1 - F)^2 above, until both vanish."""
    whole = jnp.floor(y)
    part = y - whole

    def add(carry: tuple, count: Array, below: Array) -> tuple:
        left, right = below**2, (1 - below) ** 2
        here = part * left + (1 - part) * right
        square = jnp.where(count > whole, right, jnp.where(count < whole, left, here))
        return carry[0] + square, jnp.where(count < whole, 1.0, right)

    def is_open(carry: tuple) -> Array:
        return carry[1].max() > MIN_SQUARE

    start = jnp.maximum(-y, 0.0), jnp.ones_like(y)  # (1 - F)^2 is 1 below zero
    score, remainder = _fold_counts(mixture, weights, start, add, is_open)

    def with_large() -> Array:
        large = _large_crps(mixture, weights, whole, part)
        return jnp.where(remainder > MIN_SQUARE, large, score)

    return (jax.lax.cond(is_open((score, remainder)), with_large, lambda: score),)


def _large_crps(mixture: tuple, weights: Array, whole: Array, part: Array) -> Array:
    """:func:`_count_crps` over few counts: far from y linear between them."""
    distances = jnp.asarray(_count_distances(), whole.dtype)

    def squares(low: Array, high: Array) -> tuple[Array, Array]:
        above = 1 - _count_below(mixture, weights, high)
        return _count_below(mixture, weights, low) ** 2, above**2

    def is_open(state: tuple) -> Array:
        index, _, (_, tails) = state
        largest = jnp.maximum(tails[0].max(), tails[1].max())
        return (index < len(distances)) & (largest > MIN_SQUARE)

    def add(state: tuple) -> tuple:
        index, total, (last_places, last_tails) = state
        distance = distances[index]
        # nothing is below zero
        places = jnp.minimum(distance, whole + 1), distance + 0 * whole
        tails = squares(whole - places[0], whole + places[1])
        for side in (0, 1):
            gap = places[side] - last_places[side]
            # the sum over the numbers up to this one of the line between both
            step = (gap - 1) / 2 * last_tails[side] + (gap + 1) / 2 * tails[side]
            total = total + jnp.where(gap > 0, step, 0.0)
        return index + 1, total, (places, tails)

    tails = squares(whole, whole)
    total = part * tails[0] + (1 - part) * tails[1]
    start = 1, total, ((0 * whole, 0 * whole), tails)
    return jax.lax.while_loop(is_open, add, start)[1]


# -- ordered levels --------------------------------------------------------------------


def _level_components(mixture: tuple, values: Array) -> tuple:
    mean = mixture[0] @ values
    return mean, (mixture[0] * (values - mean[..., None]) ** 2).sum(-1)


# Name -> the axis of the rows in its results, and the function of the components.
SUMMARIES: dict[str, tuple[int, Callable]] = {
    "moments": (0, _moments),
    "quantiles": (0, _quantiles),
    "log_density": (0, _log_density),
    "cdf": (0, _distribution),
    "crps": (0, _crps),
    "components": (1, lambda mixture, _: mixture),
    "probabilities": (
        0,
        lambda mixture, weights: (jnp.tensordot(weights, mixture[0], 1),),
    ),
    "entropies": (0, _entropies),
    "positive_moments": (0, _stretched_moments(_of_exp)),
    "positive_components": (1, _components_of(_of_exp)),
    "positive_crps": (0, _crps_of(_log_slope_of_exp)),
    "bounded_moments": (0, _stretched_moments(_of_logistic)),
    "bounded_components": (1, _components_of(_of_logistic)),
    "bounded_crps": (0, _crps_of(_log_slope_of_logistic)),
    "zeros_moments": (0, _moments_of(_hurdle_components)),
    "zeros_components": (1, _each(_hurdle_components)),
    "zeros_quantiles": (0, _hurdle_quantiles),
    "zeros_log_density": (0, _hurdle_log_density),
    "zeros_cdf": (0, _hurdle_cdf),
    "zeros_crps": (0, _hurdle_crps),
    "counts_moments": (0, _moments_of(_count_components)),
    "counts_components": (1, _each(_count_components)),
    "counts_quantiles": (0, _count_quantiles),
    "counts_log_density": (0, _count_log_density),
    "counts_cdf": (0, _count_cdf),
    "counts_crps": (0, _count_crps),
    "ordered_moments": (0, _moments_of(_level_components)),
    "ordered_components": (1, _each(_level_components)),
}
