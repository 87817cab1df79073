"""What a fit has to beat: rows predicted from all others by a constant and by least
squares, and their log scores.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpyro.distributions as dist
from scipy.special import gammaln, logsumexp

from numpyro_bnn._arviz import pareto_smoothed
from numpyro_bnn._checks import outside
from numpyro_bnn._types import ArrayLike, Floats
from numpyro_bnn.metrics._inputs import HealthWarning

# A linear model is fitted to at least so many rows for each of its coefficients.
ROWS_PER_COEFFICIENT = 3
MIN_ROWS = 20  # below, two standard errors of a score mean little
MIN_ROWS_OF_FORMULAS = 50  # which say what a fit would be without a row
MAX_ROWS = 2000  # that are read
# Of an element of an observation, beyond two standard errors. Half of what a score of
# predictions must fall behind to matter.
MAX_NATS_BEHIND = 0.1
MIN_RELATIVE_SCALE = 1e-3  # of the targets that a density resolves
MIN_SHARE = 0.1  # of a class, against equal ones, where least squares gives less
MAX_SHARE_AT_BORDER = 0.1  # of numbers that have a density
# Importance weights of a row with a larger shape of their tail say little; so many rows
# of a fit may have them.
MAX_PARETO_K, MAX_SHARE_UNKNOWN = 0.7, 0.5


class LeastSquares(NamedTuple):
    """Least squares with an intercept, on n rows.

    :param basis: (n, R) orthonormal columns.
    :param left: (n, 1) one minus the leverage of each row.
    """

    basis: Floats
    left: Floats

    @property
    def freedom(self) -> int:
        """Rows that are left of n - 1 after the coefficients."""
        return len(self.basis) - 1 - self.basis.shape[1]

    def residuals(self, targets: Floats) -> Floats:
        """(n, K) of each row, predicted from all others: those of the fit to all rows,
        divided by one minus the leverage.
        """
        return (targets - self.basis @ (self.basis.T @ targets)) / self.left


def least_squares(x: Floats) -> LeastSquares | None:
    """Least squares on inputs (n, D); ``None`` for fewer than three rows for each
    coefficient, and for as many columns that vary as rows.
    """
    x = x[:, (x != x[:1]).any(axis=0)]
    if x.shape[1] >= len(x):
        return None
    sd = x.std(axis=0)
    scaled = (x - x.mean(axis=0)) / np.where(sd > 0, sd, 1.0)
    design = np.column_stack([np.ones(len(x)), scaled])
    basis, singular, _ = np.linalg.svd(design, full_matrices=False)
    basis = basis[:, singular > 1e-6 * singular[0]]
    if basis.shape[1] * ROWS_PER_COEFFICIENT > len(x):
        return None
    leverage = (basis**2).sum(axis=1, keepdims=True)
    return LeastSquares(basis, np.maximum(1 - leverage, 1e-6))


def _of_numbers(line: LeastSquares, y: Floats) -> Floats | None:
    """Student's t around the line: the predictive density without prior knowledge.

    ``None`` for a constant, and where numbers pile up at a border: those that are
    censored, or zeros of a likelihood of two parts, have probabilities.
    """
    spread = y.std()
    borders = (y == y.min()).mean(), (y == y.max()).mean()
    if max(borders) > MAX_SHARE_AT_BORDER:
        return None
    residual, left = line.residuals(y[:, None])[:, 0], line.left[:, 0]
    squares = np.sum((residual * left) ** 2) - residual**2 * left
    scale = np.sqrt(np.maximum(squares, 0.0) / line.freedom / left)
    scale = np.maximum(scale, MIN_RELATIVE_SCALE * spread)
    half = line.freedom / 2
    tails = np.log1p((residual / scale) ** 2 / line.freedom)
    norm = gammaln(half + 0.5) - gammaln(half) - 0.5 * np.log(2 * half * np.pi)
    return norm - np.log(scale) - (half + 0.5) * tails


def _of_classes(line: LeastSquares, y: Floats) -> Floats:
    """Shares by least squares on indicators, bounded from below."""
    labels = np.union1d(y, [0, 1])  # which exist, seen or not
    indicators = (y[:, None] == labels).astype(np.float64)
    shares = indicators - line.residuals(indicators)
    shares = np.maximum(shares, MIN_SHARE / len(labels))
    of_label = np.sum(indicators * shares, axis=1)
    return np.log(of_label / shares.sum(axis=1))


def _of_counts(line: LeastSquares, y: Floats) -> Floats:
    """Poisson with a rate that is log-linear, and has the mean of the other counts."""
    logs = np.log(y + 0.5)[:, None]
    rate = np.exp(logs - line.residuals(logs))[:, 0]
    rate *= (y.sum() - y) / (rate.sum() - rate)
    rate = np.maximum(rate, 0.5 / len(y))
    return y * np.log(rate) - rate - gammaln(y + 1)


#: Log scores by the kind of the targets.
KINDS: Mapping[str, Callable[[LeastSquares, Floats], Floats | None]] = {
    "numbers": _of_numbers,
    "classes": _of_classes,
    "counts": _of_counts,
}


class Behind(NamedTuple):
    """How far a fit is behind a simple model.

    :param nats: of a row, on average; not a number if a score of the fit is not.
    :param model: what predicts better.
    """

    nats: float
    model: str


def behind(
    scores: Floats, inputs: Sequence[ArrayLike], targets: ArrayLike, kind: str
) -> Behind | None:
    """Whether rows that were left out are predicted clearly worse by a fit than by a
    constant or a linear model; the better one, or ``None``.

    :param scores: (n,) log score of each row under the fit without it.
    :param inputs: arrays (n, ...), maybe none.
    :param targets: (n, ...).
    :param kind: of the targets, in :data:`KINDS`.

    >>> rng = np.random.default_rng(0)
    >>> x = rng.normal(size=(200, 1))
    >>> y = 2 * x + rng.normal(size=(200, 1))
    >>> better = behind(-2 * np.square(y[:, 0]), [x], y, "numbers")
    >>> better.model, behind(-1 - np.square(y - 2 * x)[:, 0] / 2, [x], y, "numbers")
    ('a linear model', None)
    """
    if len(scores) < MIN_ROWS:
        return None
    if not np.isfinite(scores).all():
        return Behind(float("nan"), "any other model")
    y, *tables = (
        np.asarray(array, np.float64).reshape(len(scores), -1)
        for array in (targets, *inputs)
    )
    x = np.column_stack([y[:, :0], *tables])
    largest, worst = MAX_NATS_BEHIND * y.shape[1], None
    for name, columns in (("a constant", x[:, :0]), ("a linear model", x)):
        line = least_squares(columns)
        if line is None:
            continue
        by_column = [KINDS[kind](line, column) for column in y.T]
        simple = [column for column in by_column if column is not None]
        if len(simple) < len(by_column):
            continue
        more = np.sum(simple, axis=0) - scores
        error = 2 * more.std(ddof=1) / len(more) ** 0.5
        if more.mean() > max(largest, error):
            largest, worst = more.mean(), Behind(float(more.mean()), name)
    return worst


def scores_without(log_densities: Floats) -> Floats:
    """Log scores (n,) of rows under the posterior without each of them, by importance
    sampling; where draws do not tell, those with them, which are larger.

    :param log_densities: (S, n) of the rows under each draw.

    Reference: Vehtari, Gelman & Gabry (2017), equation 10.

    >>> densities = np.random.default_rng(0).normal(size=(1000, 3))
    >>> bool((abs(scores_without(densities) + 0.5) < 0.1).all())
    True
    """
    log_weights, k = pareto_smoothed(-log_densities.T)
    if not (k > MAX_PARETO_K).mean() <= MAX_SHARE_UNKNOWN:
        log_weights = np.full_like(log_weights, -np.log(len(log_densities)))
    return np.asarray(logsumexp(log_weights + log_densities.T, axis=1))


def unless_interrupted(call: str, check: Callable, *values: Any) -> None:
    """Check a fit, which an interruption of the check does not lose."""
    try:
        check(*values)
    except KeyboardInterrupt:
        message = f"{call}: interrupted before the fit was compared with simple models."
        warnings.warn(message, stacklevel=outside())


def warn_if_behind(
    call: str,
    scores: ArrayLike,
    inputs: Sequence[ArrayLike],
    targets: ArrayLike,
    fn: dist.Distribution,
    instead: str,
) -> bool:
    """Warn if a constant or a linear model predicts rows that were left out better, and
    return whether it does.

    :param scores: (n,) log scores of the fit, without each row or with more.
    :param inputs: arrays (n, ...) of which numbers are used; maybe none.
    :param targets: (n, ...).
    :param fn: a distribution of the targets.
    :param instead: what to do about it.
    """
    tables = [array for array in inputs if np.asarray(array).dtype.kind in "fiub"]
    kind = "numbers"
    if fn.support.is_discrete:
        kind = "classes" if fn.has_enumerate_support else "counts"
    better = behind(np.asarray(scores, np.float64), tables, targets, kind)
    if better is not None:
        message = (
            f"{call}: {better.model}, which predicts each row from the others, is "
            f"better by {better.nats:.2g} nats a row: do not rely on this fit. "
            f"{instead}"
        )
        warnings.warn(message, HealthWarning, stacklevel=outside())
    return better is not None
