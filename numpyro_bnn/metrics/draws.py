"""Scores of predictive draws for real-valued targets (``lppd`` for any likelihood), and
convergence of draws.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from numpyro_bnn import _arviz
from numpyro_bnn._checks import (
    argument_error,
    as_floats,
    check_finite,
    check_same_length,
)
from numpyro_bnn._options import Count, Level, checked
from numpyro_bnn._types import ArrayLike, Floats
from numpyro_bnn.metrics import _inputs
from numpyro_bnn.metrics._inputs import (
    Score,
    draws_and_targets,
    mean_score,
    stacked,
    standard_error,
    vector,
)


class Coverage(NamedTuple):
    """Coverage of central intervals.

    :param coverage: fraction of the N targets inside.
    :param standard_error: binomial standard error that calibrated intervals would have,
        :math:`\\sqrt{q(1-q)/N}` at level :math:`q`.
    :param mean_width: mean width of the intervals, in units of y.
    :param level: the requested level.
    :param inside: (N,) whether each target is inside.
    """

    coverage: float
    standard_error: float
    mean_width: float
    level: float
    inside: NDArray[np.bool_]

    def __repr__(self) -> str:
        return (
            f"Coverage(coverage={self.coverage:.5g}, "
            f"standard_error={self.standard_error:.2g}, "
            f"mean_width={self.mean_width:.5g}, level={self.level}, "
            f"N={len(self.inside)})"
        )


class FunctionSpace(NamedTuple):
    """Convergence of predictions, one value per input (and output).

    :param rhat: (N, ...) rank-normalized split R-hat.
    :param ess_bulk: (N, ...) bulk effective sample size.
    :param ess_tail: (N, ...) tail effective sample size.
    """

    rhat: Floats
    ess_bulk: Floats
    ess_tail: Floats

    @property
    def max_rhat(self) -> float:
        """Largest R-hat over inputs, ignoring undefined ones (NaN if all are
        undefined).
        """
        return max(
            self.rhat[np.isfinite(self.rhat) | np.isposinf(self.rhat)].flat,
            default=float("nan"),
        )

    @property
    def min_ess(self) -> float:
        """Smallest effective sample size over inputs, bulk or tail (NaN if all are
        undefined).
        """
        sizes = np.concatenate([self.ess_bulk.ravel(), self.ess_tail.ravel()])
        return min(sizes[~np.isnan(sizes)].flat, default=float("nan"))


def rmse(predictions: ArrayLike, y: ArrayLike) -> Score:
    r"""Root mean squared error of point predictions, :math:`\sqrt{\frac1N \sum_n (\hat
    y_n - y_n)^2}`.

    :param predictions: (N,) e.g. the predictive mean.
    :param y: (N,) targets.
    :return: the error in units of y, its standard error (delta method), and the
        absolute errors (N,).
    :raises ValueError: for other ranks, unequal lengths, NaN or infinity.

    >>> rmse([0.0, 0.0], [3.0, -3.0]).value
    3.0
    """
    mean, target = vector("rmse", "predictions", predictions), vector("rmse", "y", y)
    check_same_length("rmse", predictions=mean, y=target)
    errors = np.abs(mean - target)
    value = float(np.sqrt(np.mean(errors**2)))
    return Score(
        value, standard_error(errors**2) / (2 * value) if value > 0 else 0.0, errors
    )


def lppd(log_likelihood: ArrayLike) -> Score:
    r"""Log score of predictions: the log density of targets under the exact mixture
    over draws (log pointwise predictive density).

    .. math:: \frac1N \sum_n \log \frac1S \sum_s p(y_n \mid \theta_s)

    The mean over points; multiply by N for the sum that model comparison uses. On
    training data it is too optimistic: score test data, or use ``arviz.loo``.

    :param log_likelihood: (S, N) or (C, S, N) log densities; minus infinity is allowed.
    :return: the mean over points, its standard error, and the value at every point
        (N,).
    :raises ValueError: for other ranks, empty data, NaN or plus infinity.

    Reference: Gelman, Hwang and Vehtari (2014), *Understanding predictive information
    criteria*, equation (5).

    >>> import numpy as np
    >>> round(float(np.exp(lppd(np.log([[0.2], [0.4]])).value)), 6)
    0.3
    """
    array = stacked("lppd", "log_likelihood", log_likelihood)
    bad = np.isnan(array) | np.isposinf(array)
    if bad.any():
        first = tuple(int(i) for i in np.argwhere(bad)[0])
        got = (
            f"{int(bad.sum())} NaN or plus infinite values (the first at draw and "
            f"point {first})"
        )
        instead = "A diverged chain gives such values: look at its draws first."
        raise argument_error("lppd", "log_likelihood", got, instead)
    top = array.max(axis=0)
    shift = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        return mean_score(shift + np.log(np.mean(np.exp(array - shift), axis=0)))


def crps(draws: ArrayLike, y: ArrayLike) -> Score:
    r"""Continuous ranked probability score of predictive draws, unbiased for any number
    of draws.

    .. math:: \frac1S \sum_s |x_s - y| - \frac{1}{2 S (S - 1)} \sum_{s, t} |x_s - x_t|

    The double sum is computed from sorted draws in :math:`O(S \log S)`. Smaller is
    better. Unbiased for independent draws; with autocorrelated ones the second term is
    too small.

    :param draws: (S, N) or (C, S, N) draws of y, at least two.
    :param y: (N,) targets.
    :return: the mean over points in units of y, its standard error, and the score of
        every point (N,), which may be negative.
    :raises ValueError: for other ranks, unequal lengths, one draw, NaN or infinity.

    Reference: Ferro (2014), *Fair scores for ensemble forecasts*;
    Gneiting and Raftery (2007), *Strictly proper scoring rules*, equation (21).

    >>> crps([[0.0], [2.0]], [1.0]).value
    0.0
    """
    array, target = draws_and_targets("crps", draws, y)
    size = array.shape[0]
    if size < 2:
        raise argument_error(
            "crps",
            "draws",
            "one draw",
            "Pass at least two; for one, use the absolute error.",
        )
    # Centered at the target, so that a large offset costs no digits.
    errors = np.sort(array - target, axis=0)
    half_spread = (
        (2.0 * np.arange(1, size + 1) - size - 1) @ errors / (size * (size - 1))
    )
    return mean_score(np.abs(errors).mean(axis=0) - half_spread)


@checked("interval_coverage")
def interval_coverage(draws: ArrayLike, y: ArrayLike, level: Level = 0.9) -> Coverage:
    """Coverage of central predictive intervals: how often they contain the target, and
    how wide they are.

    The bounds are order statistics at rank (S + 1) p, interpolated. If the S draws are
    exchangeable with y they contain y with probability ``level``, at most (S - 1) / (S
    + 1); the more common rank (S - 1) p + 1 gives intervals that are too narrow. An
    ensemble of few members needs several draws of y from each.

    :param draws: (S, N) or (C, S, N) draws of y (of the observation, not of its mean).
    :param y: (N,) targets.
    :param level: probability inside, between 0 and 1.
    :return: a :class:`~numpyro_bnn.metrics.draws.Coverage`.
    :raises ValueError: for a level that so few draws do not reach, other ranks, unequal
        lengths, NaN, infinity.

    Reference: Hyndman and Fan (1996), *Sample quantiles in statistical packages*,
    definition 6.

    >>> import numpy as np
    >>> draws = np.random.default_rng(0).normal(size=(999, 3))
    >>> interval_coverage(draws, [0.0, 1.0, 5.0]).inside.tolist()
    [True, True, False]
    """
    array, target = draws_and_targets("interval_coverage", draws, y)
    reach = (len(array) - 1) / (len(array) + 1)
    if reach < level - 1e-9:
        got = (
            f"{len(array)} draws of y, which hold a new one with probability "
            f"{reach:.2f} at most"
        )
        raise argument_error(
            "interval_coverage",
            "draws",
            got,
            "Pass more: if networks are few, several of each.",
        )
    tail = (1 - level) / 2
    low, high = np.quantile(array, [tail, 1 - tail], axis=0, method="weibull")
    inside = (low <= target) & (target <= high)
    error = float(np.sqrt(level * (1 - level) / target.size))
    return Coverage(
        float(inside.mean()), error, float(np.mean(high - low)), float(level), inside
    )


def pit(draws: ArrayLike, y: ArrayLike, rng: np.random.Generator | int) -> Floats:
    r"""Check calibration: the randomized probability integral transform (PIT) of every
    target is uniform if predictions are calibrated.

    .. math:: (\#\{x_s < y\} + (1 + \#\{x_s = y\})\, u) / (S + 1), \quad u \sim U(0, 1)

    Exactly uniform for every number of draws, and for discrete or tied values.

    :param draws: (S, N) or (C, S, N) independent draws of y.
    :param y: (N,) targets.
    :param rng: a generator, or the seed of one.
    :return: (N,) values in (0, 1).
    :raises ValueError: for other ranks, unequal lengths, NaN or infinity.

    Reference: Czado, Gneiting and Held (2009), *Predictive model assessment for count
    data*.

    >>> import numpy as np
    >>> value = pit([[1.0], [2.0], [4.0]], [3.0], rng=0)
    >>> bool(0.5 <= value[0] <= 0.75)
    True
    """
    array, target = draws_and_targets("pit", draws, y)
    if not isinstance(rng, np.random.Generator):
        rng = Count(0).check("pit", "rng", rng)
    below, ties = (array < target).sum(axis=0), (array == target).sum(axis=0)
    uniform = np.random.default_rng(rng).random(target.size)
    return (below + (1 + ties) * uniform) / (array.shape[0] + 1)


def function_space(draws: ArrayLike) -> FunctionSpace:
    """R-hat and effective sample sizes of predictions: convergence of the function,
    whatever the weights do.

    Weights that differ by a symmetry of the network, such as two exchanged hidden
    units, give the same function. Chains in different copies of a mode therefore look
    unmixed in weight space, and mixed here.

    :param draws: (C, S, N, ...) draws of predictions, chains first, e.g.
        ``idata.predictions["y_mean"].values``.
    :return: a :class:`~numpyro_bnn.metrics.draws.FunctionSpace`; NaN if a prediction
        never changes. With one chain, R-hat compares its halves.
    :raises ValueError: for fewer than three axes, NaN or infinity (a diverged chain).

    Reference: Vehtari et al. (2021), *Rank-normalization, folding, and localization*;
    for functions Izmailov et al. (2021), *What are Bayesian neural network posteriors
    really like?*

    >>> import numpy as np
    >>> draws = np.random.default_rng(0).normal(size=(4, 250, 3))
    >>> draws[0, :, 2] += 3.0
    >>> result = function_space(draws)
    >>> (result.rhat < 1.05).tolist(), bool(result.max_rhat > 1.1)
    ([True, True, False], True)
    """
    array = as_floats("function_space", "draws", draws)
    if array.ndim < 3:
        instead = "Pass predictions shaped (C, S, N, ...), chains first."
        raise argument_error("function_space", "draws", f"shape {array.shape}", instead)
    array = array[_inputs.sound_chains("function_space", "draws", draws)]
    check_finite("function_space", "draws", array)
    return FunctionSpace(
        _arviz.rhat(array), _arviz.ess(array, "bulk"), _arviz.ess(array, "tail")
    )
