"""What a table may hold. Errors name the column, which those of scikit-learn do not."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, timedelta
from typing import Any

import numpy as np

from numpyro_bnn._checks import argument_error, shown

HUGE = 1e300  # sums and differences of larger values overflow
PASS = {"X": "Pass a table of numbers, (N, D).", "y": "Pass one for each row of X."}
DATES = date | timedelta | np.datetime64 | np.timedelta64


@contextmanager
def taught(call: str, argument: str, value: Any) -> Iterator[None]:
    """Put call, argument and value before what scikit-learn or NumPy refuses."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if ": argument `" in str(error):
            raise
        kind = ValueError if isinstance(error, ValueError) else TypeError
        instead = f"{str(error).rstrip('.')}. {PASS.get(argument[:1], '')}"
        raise argument_error(call, argument, shown(value), instead, kind) from error


def check_numbers(call: str, argument: str, table: Any) -> None:
    """Refuse text, dates, complex numbers, and values that are missing or infinite;
    scikit-learn checks all else.
    """
    for where, column in _columns(table):
        if column.dtype.kind in "mM":
            raise _dates(call, argument, column[0], where)
        if column.dtype.kind == "c":
            raise _complex(call, argument, where)
        if column.dtype.kind not in "biufc":
            _check_objects(call, argument, column, where)
            try:
                column = np.array(
                    [np.nan if _is_missing(value) else float(value) for value in column]
                )
            except (
                TypeError,
                ValueError,
            ):
                # neither numbers nor text: scikit-learn says so
                continue
        bad = np.flatnonzero(~(np.abs(column).astype(np.float64) < HUGE))
        if bad.size:
            got = (
                f"{bad.size} values{where} that are NaN, None, infinite or above "
                f"{HUGE:g}, first in row {bad[0]}"
            )
            raise argument_error(
                call, argument, got, "Drop those rows, or impute them."
            )


def _columns(table: Any) -> Iterator[tuple[str, np.ndarray]]:
    """The columns, and words that say which one it is."""
    if hasattr(table, "columns"):
        for name in table.columns:
            yield f" in column {name!r}", np.asarray(table[name])
        return
    values = np.asarray(table)
    if values.ndim == 1 and len(values):
        yield "", values
    if values.ndim == 2 and len(values):
        for place in range(values.shape[1]):
            yield f" in column {place}", values[:, place]


def _check_objects(call: str, argument: str, column: np.ndarray, where: str) -> None:
    for value in column:
        if isinstance(value, DATES):
            raise _dates(call, argument, value, where)
        if isinstance(value, str | bytes):
            try:
                float(value)
            except ValueError:
                instead = (
                    "Pass numbers, or a frame of pandas or polars, which may hold text."
                )
                if argument.startswith("y"):
                    instead = "Pass numbers, or use `Classifier` for classes."
                raise argument_error(
                    call, argument, f"the text {str(value)!r}{where}", instead
                ) from None


def _dates(call: str, argument: str, value: Any, where: str) -> Exception:
    instead = "Pass numbers, such as days since the first date."
    return argument_error(
        call,
        argument,
        f"dates or durations{where}, such as {value}",
        instead,
        TypeError,
    )


def _complex(call: str, argument: str, where: str = "") -> Exception:
    # The first words are those that scikit-learn's `check_estimator` looks for.
    instead = (
        "Complex data not supported: pass real numbers, such as real and imaginary "
        "parts in columns."
    )
    return argument_error(call, argument, f"complex numbers{where}", instead)


def check_labels(call: str, argument: str, y: Any) -> None:
    """Refuse missing labels, which NumPy would turn into the text "nan", and text
    beside numbers.
    """
    labels = np.asarray(y, object)
    if labels.ndim != 1:
        return
    if any(isinstance(label, complex) for label in labels):
        raise _complex(call, argument)
    missing = [row for row, label in enumerate(labels) if _is_missing(label)]
    if missing:
        got = (
            f"{len(missing)} missing labels (NaN, None), the first in row {missing[0]}"
        )
        raise argument_error(
            call, argument, got, "Drop those rows, or give them a label of their own."
        )
    kinds = {isinstance(label, str): label for label in labels}
    if len(kinds) == 2:
        got = (
            f"text beside other labels, such as {str(kinds[True])!r} and "
            f"{kinds[False]!r}"
        )
        raise argument_error(
            call,
            argument,
            got,
            "Pass labels of one type, e.g. `[str(label) for label in y]`.",
        )


def missing_values(values: np.ndarray) -> np.ndarray:
    """Which of targets (N,) or (N, K) are missing."""
    if values.ndim not in (1, 2) or values.dtype.kind not in "fO":
        return np.zeros(values.shape, bool)
    if values.dtype.kind == "f":
        return np.isnan(values)
    missing = [_is_missing(value) for value in values.reshape(-1)]
    return np.array(missing, bool).reshape(values.shape)


def _is_missing(value: Any) -> bool:
    if value is None or type(value).__name__ == "NAType":
        # pandas.NA, which compares as neither true nor false
        return True
    return np.ndim(value) == 0 and bool(value != value)
