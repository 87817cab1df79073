"""Argument checks and shapes of the metrics, and scores with standard errors."""

import warnings
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from numpyro_bnn._checks import (
    argument_error,
    as_array,
    as_floats,
    check_finite,
    check_labels,
    check_rank,
    check_same_length,
)
from numpyro_bnn._types import ArrayLike, Floats

# Rounding errors of float16 and bfloat16 probabilities are smaller, the error of a
# forgotten softmax is larger.
_SUM_TOLERANCE = 1e-2
INPUT_ROWS = 10_000  # of inputs that are read for their standard deviations
# Of each output at least so many rows are read, of more outputs than this only some.
MIN_ROWS, MAX_OUTPUTS = 4, 64


class HealthWarning(UserWarning):
    """What :func:`health` finds wrong in a result that is exported, what a run finds
    wrong in its fit, and chains that scores and figures leave out.

    >>> import warnings
    >>> warnings.simplefilter("ignore", HealthWarning)
    """


class Score(NamedTuple):
    """A score of predictions, averaged over N data points.

    :param value: the score.
    :param standard_error: standard error of ``value`` over data points (NaN for one
        point).
    :param pointwise: (N,) the score of every data point.
    """

    value: float
    standard_error: float
    pointwise: Floats

    def __repr__(self) -> str:
        return (
            f"Score(value={self.value:.5g}, standard_error={self.standard_error:.2g}, "
            f"N={len(self.pointwise)})"
        )


def mean_score(pointwise: Floats) -> Score:
    """The mean of a pointwise score."""
    return Score(float(pointwise.mean()), standard_error(pointwise), pointwise)


def standard_error(values: Floats) -> float:
    """Standard error of the mean of independent values; NaN for one value or infinite
    ones.
    """
    if values.size < 2 or not np.isfinite(values).all():
        return float("nan")
    return float(values.std(ddof=1) / np.sqrt(values.size))


def vector(call: str, argument: str, value: ArrayLike) -> Floats:
    """Finite numbers, one per data point: (N,)."""
    array = as_floats(call, argument, value)
    check_rank(call, argument, array, 1, "(N,)")
    check_finite(call, argument, array)
    return array


def sound_chains(call: str, argument: str, *draws: Any) -> np.ndarray:
    """Which chains of draws (C, S, ...) to use: those not at fault; a warning names the
    others.

    At fault are chains that the export has marked, by the coordinate ``marked``, and
    those with values that are NaN or infinite where other chains have none.
    """
    for each in draws:
        if 0 in np.shape(each):
            got = f"empty data of shape {np.shape(each)}"
            instead = "Pass at least one draw and row."
            raise argument_error(call, argument, got, instead)
    coords = getattr(draws[0], "coords", {})
    labels = np.asarray(coords["chain"] if "chain" in coords else range(len(draws[0])))
    marked = np.array(
        coords["marked"] if "marked" in coords else np.zeros(len(labels)), bool
    )
    finite = np.all(
        [
            (np.asarray(each) < np.inf).reshape(len(labels), -1).all(axis=1)
            for each in draws
        ],
        axis=0,
    )
    sound = finite & ~marked
    if sound.all() or not (sound.any() or marked.any()):
        return np.ones(len(labels), bool)  # without marks the error is about the values
    left_out = ", ".join(map(str, labels[~sound]))
    if not sound.any():
        instead = (
            "They diverged or froze: see `metrics.health(idata)`, and run again with "
            "smaller steps."
        )
        raise argument_error(
            call, argument, f"no chain to use (at fault: {left_out})", instead
        )
    message = (
        f"{call}: left out chains {left_out}, which diverged, froze or hold NaN: see "
        f"`metrics.health`."
    )
    warnings.warn(message, HealthWarning, stacklevel=4)
    return sound


def stacked(call: str, argument: str, value: ArrayLike) -> Floats:
    """Draws (S, N) or (C, S, N), as (S, N) or (C S, N)."""
    array = as_floats(call, argument, value)
    if array.ndim not in (2, 3):
        instead = "Pass draws shaped (S, N), or (C, S, N) by chain."
        raise argument_error(call, argument, f"shape {array.shape}", instead)
    if 0 in array.shape:
        raise argument_error(
            call,
            argument,
            f"empty data of shape {array.shape}",
            "Pass at least one draw and row.",
        )
    array = array[sound_chains(call, argument, value)] if array.ndim == 3 else array
    return array.reshape(-1, array.shape[-1])


def draws_and_targets(
    call: str, draws: ArrayLike, y: ArrayLike
) -> tuple[Floats, Floats]:
    """Finite draws, as (S, N), and the targets (N,) they predict."""
    array, target = stacked(call, "draws", draws), vector(call, "y", y)
    check_finite(call, "draws", array)
    check_same_length(call, draws=array.T, y=target)
    return array, target


def probabilities(call: str, probs: ArrayLike, ranks: dict[int, str]) -> Floats:
    """Class probabilities (..., N, K) that sum to one; ``ranks`` names the shapes that
    are allowed.
    """
    array = as_floats(call, "probs", probs)
    if array.ndim not in ranks:
        instead = f"Pass probabilities shaped {' or '.join(ranks.values())}."
        raise argument_error(call, "probs", f"shape {array.shape}", instead)
    array = array[sound_chains(call, "probs", probs)] if array.ndim == 4 else array
    check_finite(call, "probs", array)
    if array.min() < 0:
        got = f"a negative value ({array.min():.3g})"
        raise argument_error(
            call, "probs", got, "Pass probabilities, e.g. softmax(logits)."
        )
    totals = array.sum(axis=-1)
    worst = float(totals.flat[np.abs(totals - 1).argmax()])
    if abs(worst - 1) > _SUM_TOLERANCE:
        got = f"rows that do not sum to 1 (one sums to {worst:.4g})"
        raise argument_error(call, "probs", got, "Normalize over the last axis.")
    return array


def probs_and_labels(
    call: str, probs: ArrayLike, labels: ArrayLike
) -> tuple[Floats, NDArray[np.int64]]:
    """Predictive probabilities (N, K), averaged over draws, and the labels (N,) in
    0..K-1.
    """
    array = probabilities(call, probs, {2: "(N, K)", 3: "(S, N, K)", 4: "(C, S, N, K)"})
    array = array.reshape(-1, *array.shape[-2:]).mean(axis=0)
    targets = as_array(call, "labels", labels)
    check_rank(call, "labels", targets, 1, "(N,)")
    check_same_length(call, probs=array, labels=targets)
    check_labels(call, "labels", targets, array.shape[1])
    return array, targets.astype(np.int64)


def table(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1, x.shape[-1] if x.ndim > 1 else 1)


def spread(size: int, limit: int) -> np.ndarray:
    """At most ``limit`` positions of ``size``, evenly spaced."""
    return np.unique(np.linspace(0, size - 1, min(size, limit)).astype(int))


def extrapolated(
    x: np.ndarray, new: np.ndarray, rows: str = " rows"
) -> tuple[float, float, str]:
    """The share of new rows (M, D) that lie far outside the rows x (N, D), its limit,
    and words.
    """
    sd = x[spread(len(x), INPUT_ROWS)].std(axis=0, dtype=np.float64)
    width = 3 * np.maximum(sd, np.median(sd))
    beyond = ~((new >= x.min(axis=0) - width) & (new <= x.max(axis=0) + width)).all(
        axis=1
    )  # or NaN
    words = (
        f"{beyond.sum()} of {len(new)}{rows} lie more than 3 standard deviations "
        f"outside the training rows"
    )
    return beyond.mean(), 0.01, words


def columns(values: Iterable[np.ndarray], limit: int) -> np.ndarray:
    """About ``limit`` columns (C, S, K) of arrays (C, S, ...), spread over the arrays
    and within each.
    """
    flat = [value.reshape(*value.shape[:2], -1) for value in values]
    selected = [
        value[..., spread(value.shape[2], max(limit // len(flat), 1))] for value in flat
    ]
    return np.concatenate(selected, axis=2) if selected else np.zeros((0, 0, 0))


class Entries(NamedTuple):
    """Some values of a function.

    :param draws: (C, S, K). :param outputs: (K,) the number of the output, counted over
        all sites, that each of them belongs to.
    """

    draws: np.ndarray
    outputs: np.ndarray

    @classmethod
    def of(cls, values: Collection[np.ndarray], limit: int) -> "Entries":
        """About ``limit`` entries of arrays (C, S, N, ...), or more: every output is
        read, and each at other rows than the next one.
        """
        if not values:
            return cls(np.zeros((0, 0, 0)), np.zeros(0, int))
        draws, outputs, first = [], [], 0
        for value in values:
            by_row = value.reshape(*value.shape[:2], *(value.shape[2:3] or (1,)), -1)
            num_rows, num_outputs = by_row.shape[2:]
            read = spread(num_outputs, MAX_OUTPUTS)
            each = max(limit // len(values) // len(read), MIN_ROWS)
            positions = np.arange(min(each, num_rows) * len(read))
            rows = positions * num_rows // len(positions)
            output = read[positions % len(read)]
            draws.append(by_row[:, :, rows, output])
            outputs.append(first + output)
            first += num_outputs
        return cls(np.concatenate(draws, axis=2), np.concatenate(outputs))

    def worst(self, statistic: Callable[[np.ndarray], np.ndarray]) -> float:
        """The largest value (K,) of a statistic of draws, for most rows of the worst
        output: of those that are defined (infinite ones too) the 90 % quantile; NaN if
        none is.
        """
        values, quantiles = statistic(self.draws), []
        for output in np.unique(self.outputs[~np.isnan(values)]):
            of_output = values[(self.outputs == output) & ~np.isnan(values)]
            quantiles.append(np.quantile(of_output, 0.9, method="higher"))
        return float(max(quantiles, default=np.nan))
