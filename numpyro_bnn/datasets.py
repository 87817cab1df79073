"""Standardization of data by the statistics of the training rows."""

from dataclasses import dataclass

import numpy as np

from numpyro_bnn._checks import argument_error, as_floats, check_finite
from numpyro_bnn._types import ArrayLike

__all__ = ["Scaler"]


@dataclass(frozen=True, eq=False)
class Scaler:
    r"""Standardization of columns: z = (x - mean) / scale, one mean and scale per
    column.

    A log density or an error of standardized targets is converted back to the units of
    the data by

    .. math:: \log p(y) = \log p(z) - \sum \log c, \qquad \mathrm{RMSE}(y) = c\,
              \mathrm{RMSE}(z),

    with c the :attr:`scale_factor`.

    :param mean: (D,) float64, or () for targets shaped (N,).
    :param scale: standard deviations (divisor N), shaped like ``mean``; 1 for constant
        columns.

    >>> import numpy as np
    >>> from numpyro_bnn.datasets import Scaler
    >>> train = np.array([1.0, 3.0, 5.0, 7.0])
    >>> scaler = Scaler.fit(train)
    >>> print(scaler.mean, round(scaler.scale_factor, 3))
    4.0 2.236
    >>> np.allclose(scaler.inverse(scaler.transform(train)), train)
    True
    """

    mean: np.ndarray
    scale: np.ndarray

    def __post_init__(self) -> None:
        for name in ("mean", "scale"):
            object.__setattr__(
                self, name, as_floats("Scaler", name, getattr(self, name))
            )
            check_finite("Scaler", name, getattr(self, name))
        if self.scale.shape != self.mean.shape or not np.all(self.scale > 0):
            instead = (
                f"Pass positive numbers of shape {self.mean.shape}, one for each mean."
            )
            raise argument_error("Scaler", "scale", self.scale, instead)

    @classmethod
    def fit(cls, train: ArrayLike) -> "Scaler":
        """Estimate mean and standard deviation over the first axis of ``train``, (N, D)
        or (N,).

        A constant column has its value as mean and the scale 1, so that it becomes
        exactly 0.

        :return: the :class:`Scaler`.
        :raises ValueError: for no rows, NaN or infinity.
        """
        values = np.asarray(train)
        if values.ndim == 0:
            raise argument_error(
                "Scaler.fit",
                "train",
                "a scalar",
                "Pass an array with one row per data point.",
            )
        check_finite("Scaler.fit", "train", values)
        values = _floating(values)
        # Differences from the first row keep all digits if the offset is large, and are
        # 0 in constant columns.
        first = values[0].astype(np.float64)
        with np.errstate(over="ignore"):
            constant = _constant(values)
            shifted = values - first
        if not np.isfinite(shifted).all():
            got = "values whose differences exceed the range of float64"
            raise argument_error("Scaler.fit", "train", got, "Change their unit.")
        # In units near the largest difference, squares neither overflow nor vanish;
        # powers of two cost no digits.
        largest = np.where(constant, 1.0, np.abs(shifted).max(axis=0))
        unit = np.exp2(np.floor(np.log2(largest)))
        shifted = shifted / unit
        mean = first + np.where(constant, 0.0, unit * shifted.mean(axis=0))
        return cls(
            np.asarray(mean),
            np.asarray(np.where(constant, 1.0, unit * shifted.std(axis=0))),
        )

    @property
    def scale_factor(self) -> np.ndarray | float:
        """Units of the data per standardized unit: a float for targets (N,), otherwise
        an array (D,).
        """
        return float(self.scale) if self.scale.ndim == 0 else self.scale

    def transform(self, x: ArrayLike) -> np.ndarray:
        """Standardize ``x``, (..., D); floating dtypes are kept, integers become
        float64.
        """
        values = self._checked("transform", "x", x)
        return ((values - self.mean) / self.scale).astype(values.dtype)

    def inverse(self, z: ArrayLike) -> np.ndarray:
        """Convert ``z``, (..., D), e.g. predictive draws (C, S, N) of a target, back to
        the units of the data.
        """
        values = self._checked("inverse", "z", z)
        return (values * self.scale + self.mean).astype(values.dtype)

    def _checked(self, method: str, argument: str, x: ArrayLike) -> np.ndarray:
        values = as_floats(f"Scaler.{method}", argument, x, None)
        columns = self.mean.shape
        if (
            values.ndim < len(columns)
            or values.shape[values.ndim - len(columns) :] != columns
        ):
            instead = f"Pass an array whose shape ends in {columns}."
            raise argument_error(
                f"Scaler.{method}", argument, f"shape {values.shape}", instead
            )
        return _floating(values)


def _floating(values: np.ndarray) -> np.ndarray:
    if np.issubdtype(values.dtype, np.floating):
        return values
    return values.astype(np.float64)


def _constant(values: np.ndarray) -> np.ndarray:
    """Columns whose values differ only by rounding: their std is a rounding error too,
    and often not 0.
    """
    largest = values.max(axis=0).astype(np.float64)
    smallest = values.min(axis=0).astype(np.float64)
    return largest - smallest <= 8 * np.finfo(values.dtype).eps * np.maximum(
        np.abs(largest), np.abs(smallest)
    )
