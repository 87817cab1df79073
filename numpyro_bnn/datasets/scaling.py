"""Standardization by the statistics of the training rows."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from numpyro_bnn._checks import argument_error, check_finite
from numpyro_bnn.datasets.dataset import Dataset

__all__ = ["Scaler", "standardize"]


def _constant(values: np.ndarray) -> np.ndarray:
    """Columns whose values differ by rounding only: their std is rounding error too, and often not 0."""
    largest, smallest = values.max(axis=0).astype(np.float64), values.min(axis=0).astype(np.float64)
    rounding = 8 * np.finfo(values.dtype).eps * np.maximum(np.abs(largest), np.abs(smallest))
    return largest - smallest <= rounding


@dataclass(frozen=True, eq=False)
class Scaler:
    r"""The affine map z = (x - mean) / scale, one mean and scale per column.

    A density or an error on standardized targets goes back to the units of the data by

    .. math:: \log p(y) = \log p(z) - \sum \log c, \qquad \mathrm{RMSE}(y) = c\, \mathrm{RMSE}(z),

    c the :attr:`scale_factor`.

    :param mean: (D,) float64, or () for targets shaped (N,).
    :param scale: standard deviations (divisor N), shaped like ``mean``; 1 for constant columns.

    **Example**

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

    @classmethod
    def fit(cls, train: ArrayLike) -> "Scaler":
        """Take mean and standard deviation over the first axis of ``train``, (N, D) or (N,).

        A column that does not vary gets its own value as mean and the scale 1, so that it becomes exactly 0.

        :return: the :class:`Scaler`.
        :raises ValueError: for no rows, NaN or infinity.
        """
        values = np.asarray(train)
        if values.ndim == 0:
            raise argument_error(
                "Scaler.fit", "train", "a scalar", "Pass an array with one row per data point."
            )
        check_finite("Scaler.fit", "train", values)
        if not np.issubdtype(values.dtype, np.floating):
            values = values.astype(np.float64)
        constant = _constant(values)
        # Measured from the first row: a large offset then costs no digits, and a constant column is exactly 0.
        first = values[0].astype(np.float64)
        shifted = values - first
        mean = first + np.where(constant, 0.0, shifted.mean(axis=0))
        scale = np.where(constant, 1.0, shifted.std(axis=0))
        return cls(np.asarray(mean), np.asarray(scale))

    @property
    def scale_factor(self) -> np.ndarray | float:
        """Units of the data per standardized unit: a float for targets (N,), otherwise an array (D,)."""
        return float(self.scale) if self.scale.ndim == 0 else self.scale

    def transform(self, x: ArrayLike) -> np.ndarray:
        """Map ``x``, (..., D), to standardized units; floating dtypes are kept, integers become float64."""
        values = self._checked("transform", x)
        return ((values - self.mean) / self.scale).astype(values.dtype)

    def inverse(self, z: ArrayLike) -> np.ndarray:
        """Map ``z``, (..., D), e.g. predictive draws (C, S, N) of a target, back to the units of the data."""
        values = self._checked("inverse", z)
        return (values * self.scale + self.mean).astype(values.dtype)

    def _checked(self, method: str, x: ArrayLike) -> np.ndarray:
        values = np.asarray(x)
        columns = self.mean.shape
        if values.ndim < len(columns) or values.shape[values.ndim - len(columns) :] != columns:
            argument = "x" if method == "transform" else "z"
            raise argument_error(
                f"Scaler.{method}",
                argument,
                f"shape {values.shape}",
                f"Pass an array whose shape ends in {columns}.",
            )
        return values if np.issubdtype(values.dtype, np.floating) else values.astype(np.float64)


def standardize(dataset: Dataset, targets: bool = True) -> Dataset:
    """Scale inputs, and targets too, to mean 0 and standard deviation 1 over the training rows.

    The test rows are scaled by the same numbers; the fitted maps are kept as ``x_scaler`` and ``y_scaler``.

    :param dataset: a :class:`Dataset` not yet standardized.
    :param targets: also scale the targets; pass ``False`` for class labels.
    :return: a new :class:`Dataset`.
    :raises ValueError: for class labels with ``targets=True``, a set without training rows, or one already
        standardized.

    **Example**

    >>> from numpyro_bnn.datasets import load_sklearn, standardize
    >>> data = standardize(load_sklearn("diabetes"))
    >>> bool(abs(data.x_train.mean(0)).max() < 1e-12)
    True
    >>> print(round(data.y_scaler.scale_factor))     # one standardized unit, in units of the data
    77
    """
    if dataset.x_scaler is not None:
        raise argument_error("standardize", "dataset", "a standardized data set", "Pass it as it was loaded.")
    if len(dataset.x_train) == 0:
        raise argument_error(
            "standardize",
            "dataset",
            f"{dataset.name!r} without training rows",
            "Scale it by another set's Scaler.",
        )
    if targets and not np.issubdtype(dataset.y_train.dtype, np.floating):
        raise argument_error(
            "standardize",
            "targets",
            f"True for class labels ({dataset.y_train.dtype})",
            "Pass `targets=False`.",
        )
    x_scaler = Scaler.fit(dataset.x_train)
    scaled = replace(
        dataset,
        x_train=x_scaler.transform(dataset.x_train),
        x_test=x_scaler.transform(dataset.x_test),
        x_scaler=x_scaler,
    )
    if not targets:
        return scaled
    y_scaler = Scaler.fit(dataset.y_train)
    return replace(
        scaled,
        y_train=y_scaler.transform(dataset.y_train),
        y_test=y_scaler.transform(dataset.y_test),
        y_scaler=y_scaler,
    )
