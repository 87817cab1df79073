"""Rows that a guide predicts from all others, against the simplest models: what a run
says of a fit that they beat.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpyro.distributions as dist

from numpyro_bnn._checks import outside
from numpyro_bnn._types import ArrayLike
from numpyro_bnn.metrics import HealthWarning
from numpyro_bnn.metrics.left_out import behind


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
    y = np.asarray(targets, np.float64)
    y = y.reshape(len(y), -1)
    tables = [np.zeros((len(y), 0))]
    for array in map(np.asarray, inputs):
        if array.dtype.kind in "fiub":
            tables.append(array.reshape(len(y), -1).astype(np.float64))
    kind = "numbers"
    if fn.support.is_discrete:
        kind = "classes" if fn.has_enumerate_support else "counts"
    better = behind(np.asarray(scores, np.float64), np.column_stack(tables), y, kind)
    if better is not None:
        message = (
            f"{call}: {better.model}, which predicts each row from the others, is "
            f"better by {better.nats:.2g} nats a row: do not rely on this fit. "
            f"{instead}"
        )
        warnings.warn(message, HealthWarning, stacklevel=outside())
    return better is not None
