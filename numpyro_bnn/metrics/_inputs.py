"""Checks of what the metrics take, and the shapes they work on."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from numpyro_bnn import _checks
from numpyro_bnn._checks import argument_error

__all__ = ["draws_and_targets", "predictive", "probabilities", "probs_and_labels", "stacked", "vector"]

# Sums of float16 and bfloat16 probabilities are off by less; a forgotten softmax is off by more.
_SUM_TOLERANCE = 1e-2


def vector(call: str, argument: str, value: ArrayLike) -> NDArray[np.float64]:
    """Finite numbers, one per data point: (N,)."""
    array = np.asarray(value, dtype=np.float64)
    _checks.check_rank(call, argument, array, 1, "(N,)")
    _checks.check_finite(call, argument, array)
    return array


def stacked(call: str, argument: str, value: ArrayLike) -> NDArray[np.float64]:
    """Draws (S, N) or (C, S, N), as (S, N) or (C S, N)."""
    array = np.asarray(value, dtype=np.float64)
    if array.ndim not in (2, 3):
        raise argument_error(
            call, argument, f"shape {array.shape}", "Pass draws shaped (S, N), or (C, S, N) by chain."
        )
    if 0 in array.shape:
        raise argument_error(
            call, argument, f"empty data of shape {array.shape}", "Pass at least one draw and row."
        )
    return array.reshape(-1, array.shape[-1])


def draws_and_targets(
    call: str, draws: ArrayLike, y: ArrayLike
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Finite draws, as (S, N), and the targets (N,) they predict."""
    array, target = stacked(call, "draws", draws), vector(call, "y", y)
    _checks.check_finite(call, "draws", array)
    _checks.check_same_length(call, draws=array.T, y=target)
    return array, target


def probabilities(call: str, probs: ArrayLike, ranks: dict[int, str]) -> NDArray[np.float64]:
    """Class probabilities (..., N, K) that sum to one; ``ranks`` names the shapes that are allowed."""
    array = np.asarray(probs, dtype=np.float64)
    if array.ndim not in ranks:
        raise argument_error(
            call, "probs", f"shape {array.shape}", f"Pass probabilities shaped {' or '.join(ranks.values())}."
        )
    _checks.check_finite(call, "probs", array)
    if array.min() < 0:
        raise argument_error(
            call,
            "probs",
            f"a negative value ({array.min():.3g})",
            "Pass probabilities, e.g. softmax(logits).",
        )
    totals = array.sum(axis=-1)
    worst = float(totals.flat[np.abs(totals - 1).argmax()])
    if abs(worst - 1) > _SUM_TOLERANCE:
        raise argument_error(
            call,
            "probs",
            f"rows that do not sum to 1 (one sums to {worst:.4g})",
            "Normalize over the last axis.",
        )
    return array


def predictive(call: str, probs: ArrayLike) -> NDArray[np.float64]:
    """Predictive probabilities (N, K): draws (S, N, K) or (C, S, N, K) are averaged."""
    array = probabilities(call, probs, {2: "(N, K)", 3: "(S, N, K)", 4: "(C, S, N, K)"})
    return array.reshape(-1, *array.shape[-2:]).mean(axis=0)


def probs_and_labels(
    call: str, probs: ArrayLike, labels: ArrayLike
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Predictive probabilities (N, K) and the labels (N,) in 0..K-1."""
    array, known = predictive(call, probs), np.asarray(labels)
    _checks.check_rank(call, "labels", known, 1, "(N,)")
    _checks.check_same_length(call, probs=array, labels=known)
    _checks.check_labels(call, "labels", known, array.shape[1])
    return array, known.astype(np.int64)
