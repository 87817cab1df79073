"""Argument checks, done before any work, and the common form of error messages, which
say what to write instead.
"""

import inspect
import os
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from numpyro_bnn._types import Kwargs

# a neighbor such as `numpyro_bnn_models` belongs to the user
PACKAGE = f"{Path(__file__).parent}{os.sep}"

MAX_SHOWN_CHARACTERS = 300  # characters of a value in a message
# Values of the data that a program is traced on, by the id of their tracers.
TRACED: ContextVar[Mapping[int, Any]] = ContextVar("traced")


def known(value: object) -> Any:
    """The value of data, also where a model is read; a tracer only where nobody knows
    it yet.
    """
    return TRACED.get({}).get(id(value), value)


def argument_error(
    call: str,
    argument: str,
    got: object,
    instead: str,
    kind: type[Exception] = ValueError,
) -> Exception:
    """Build (the caller raises it) an error that teaches: call, argument, what came,
    what to write instead.

    :param call: the public name that the user wrote, e.g. ``"nn.Dense"``.
    :param argument: the argument at fault, e.g. ``"units"``.
    :param got: what came; strings are quoted as they are, arrays by shape and dtype,
        anything else by ``repr``.
    :param instead: a sentence that says what to write instead.
    :param kind: ``ValueError`` (default) or ``TypeError``.
    """
    return kind(
        f"{call}: argument `{argument}` got "
        f"{got if isinstance(got, str) else shown(got)}. {instead}"
    )


def shown(value: Any) -> str:
    """A value for a message: arrays by shape and dtype, anything else by ``repr``."""
    if hasattr(value, "dtype") and np.ndim(value):
        return f"an array of shape {value.shape} and dtype {value.dtype}"
    if hasattr(value, "columns"):
        return f"a table of {len(value.columns)} columns"
    text = repr(value)
    return f"a {type(value).__name__}" if len(text) > MAX_SHOWN_CHARACTERS else text


def is_list(value: object) -> bool:
    """Whether it is a sequence of things: a text is one of letters, bytes of
    numbers.
    """
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def is_floating(value: object) -> bool:
    """Whether it is an array of floating-point numbers."""
    return hasattr(value, "dtype") and jax.numpy.issubdtype(
        value.dtype, jax.numpy.floating
    )


def unknown_name(call: str, argument: str, got: Any, names: Any) -> Exception:
    """Build the error for a name that is not among the known ``names``, with the
    closest of these first.
    """
    from difflib import get_close_matches

    names = list(map(str, names))
    by_lower = {name.lower(): name for name in names}
    close = get_close_matches(str(got).lower(), by_lower, n=1)
    hint = f"Did you mean {by_lower[close[0]]!r}? " if close else ""
    return argument_error(
        call, argument, repr(got), f"{hint}Known: {', '.join(names)}."
    )


def outside() -> int:
    """The ``stacklevel`` of a warning about the line of the user that called the
    package.
    """
    frame = inspect.currentframe()
    level = 0
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
        level = level + 1
    return level


def as_array(call: str, argument: str, value: object) -> np.ndarray:
    """Convert to NumPy; refuse rows of several lengths."""
    try:
        return np.asarray(value)
    except ValueError as error:
        raise argument_error(
            call, argument, "rows of several lengths", "Pass an array of numbers."
        ) from error


def as_floats(
    call: str, argument: str, value: object, dtype: DTypeLike | None = np.float64
) -> np.ndarray:
    """Convert to float64 (``dtype=None``: keep the dtype); refuse text and other things
    that are no numbers.
    """
    array = as_array(call, argument, value)
    if array.dtype.kind in "USOmMc":
        raise argument_error(
            call,
            argument,
            f"dtype {array.dtype}",
            "Pass an array of numbers.",
            TypeError,
        )
    return np.asarray(array, dtype)


def probabilities(call: str, quantiles: object) -> Any:
    """Quantiles that a guide is asked for."""
    if isinstance(quantiles, jax.core.Tracer):
        return quantiles
    levels = as_floats(call, "quantiles", quantiles)
    if not ((levels >= 0) & (levels <= 1)).all():
        raise argument_error(
            call, "quantiles", quantiles, "Pass probabilities, from 0 to 1."
        )
    return jax.numpy.asarray(levels, float)


def has_rows_elsewhere(value: Any) -> bool:
    """Whether it is an array of which this process has a part."""
    is_known = isinstance(value, Array) and not isinstance(value, jax.core.Tracer)
    return is_known and not value.is_fully_addressable


def check_finite(call: str, argument: str, value: object) -> None:
    """Refuse empty data and, if the values are known (not traced by JAX), NaN and
    infinity.
    """
    numbers = known(value)
    if has_rows_elsewhere(numbers):
        with jax.core.eval_context():
            finite = bool(jnp.isfinite(numbers).all())
        numbers = np.full(1, 0.0 if finite else np.nan)
    if not isinstance(numbers, jax.core.Tracer):
        numbers = as_floats(call, argument, numbers, None)
    if 0 in np.shape(numbers):
        raise argument_error(
            call,
            argument,
            f"empty data of shape {np.shape(numbers)}",
            "Pass at least one row.",
        )
    if isinstance(numbers, jax.core.Tracer):
        return
    bad = ~np.isfinite(numbers)
    if bad.any():
        first = tuple(np.argwhere(bad)[0].tolist())
        came = f"{int(bad.sum())} NaN or infinite values (the first at index {first})"
        raise argument_error(call, argument, came, "Drop or impute those rows first.")


def check_finite_arguments(call: str, args: tuple, kwargs: Kwargs) -> None:
    """Refuse arguments of a model with NaN or infinite numbers, as the cause of what
    failed with them.
    """
    for place, leaf in jax.tree_util.tree_leaves_with_path((args, kwargs)):
        is_array = isinstance(leaf, Array | np.ndarray)  # rows on disk are not
        if is_array and jnp.issubdtype(leaf.dtype, jnp.floating):
            check_finite(call, f"args{jax.tree_util.keystr(place)}", leaf)


def check_rank(
    call: str, argument: str, value: Any, expected: int, meaning: str
) -> None:
    """Refuse an array of another rank; ``meaning`` names the axes, e.g.
    ``"(N, D)"``.
    """
    shape = np.shape(value)
    if len(shape) != expected:
        raise argument_error(
            call,
            argument,
            f"shape {shape}",
            f"Pass an array of rank {expected}, shaped {meaning}.",
        )


def check_same_length(call: str, **arrays: Any) -> None:
    """Refuse arrays whose leading axes differ, and numbers without an axis."""
    sizes = {}
    for name, value in arrays.items():
        if np.ndim(value) == 0:
            instead = "Pass one row per data point."
            raise argument_error(call, name, shown(value), instead)
        sizes[name] = np.shape(value)[0]
    if len(set(sizes.values())) > 1:
        lengths = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        instead = "Pass one row per data point in each."
        raise argument_error(
            call, next(reversed(sizes)), f"mismatched lengths ({lengths})", instead
        )


def check_labels(call: str, argument: str, value: object, num_classes: int) -> None:
    """Refuse class labels that are not integers 0..K-1."""
    if isinstance(value := known(value), jax.core.Tracer):
        return
    array = as_array(call, argument, value)
    if array.dtype.kind not in "iub":
        instead = "Pass integer class labels 0..K-1, e.g. `y.astype(int)`."
        raise argument_error(call, argument, f"dtype {array.dtype}", instead)
    if array.min() < 0 or array.max() >= num_classes:
        instead = f"With {num_classes} classes pass labels 0..{num_classes - 1}."
        raise argument_error(
            call, argument, f"labels from {array.min()} to {array.max()}", instead
        )
