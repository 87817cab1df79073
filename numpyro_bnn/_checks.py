"""Checks of user data: they run before any work and raise errors that teach."""

from typing import Any

import jax
import numpy as np

from numpyro_bnn._errors import argument_error

__all__ = ["finite", "labels", "rank", "same_length"]


def finite(call: str, argument: str, value: Any) -> None:
    """Refuse empty data and, where the values are known (not traced by JAX), NaN and infinity."""
    if 0 in np.shape(value):
        raise argument_error(
            call, argument, f"empty data of shape {np.shape(value)}", "Pass at least one row."
        )
    if isinstance(value, jax.core.Tracer):
        return
    bad = ~np.isfinite(np.asarray(value))
    if bad.any():
        first = tuple(int(i) for i in np.argwhere(bad)[0])
        raise argument_error(
            call,
            argument,
            f"{int(bad.sum())} NaN or infinite values (the first at index {first})",
            "Drop or impute those rows first.",
        )


def rank(call: str, argument: str, value: Any, expected: int, meaning: str) -> None:
    """Refuse an array of another rank; ``meaning`` names the axes, e.g. ``"(N, D)"``."""
    shape = np.shape(value)
    if len(shape) != expected:
        raise argument_error(
            call, argument, f"shape {shape}", f"Pass an array of rank {expected}, shaped {meaning}."
        )


def same_length(call: str, **arrays: Any) -> None:
    """Refuse arrays whose leading axes differ."""
    sizes = {name: np.shape(value)[0] for name, value in arrays.items()}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        raise argument_error(
            call,
            next(reversed(sizes)),
            f"mismatched lengths ({listed})",
            "Pass one row per data point in each.",
        )


def labels(call: str, argument: str, value: Any, num_classes: int) -> None:
    """Refuse class labels that are not integers 0..K-1."""
    if isinstance(value, jax.core.Tracer):
        return
    array = np.asarray(value)
    if not (np.issubdtype(array.dtype, np.integer) or array.dtype == bool):
        raise argument_error(
            call, argument, f"dtype {array.dtype}", "Pass integer class labels 0..K-1, e.g. `y.astype(int)`."
        )
    if array.min() < 0 or array.max() >= num_classes:
        raise argument_error(
            call,
            argument,
            f"labels from {array.min()} to {array.max()}",
            f"With {num_classes} classes pass labels 0..{num_classes - 1}.",
        )
