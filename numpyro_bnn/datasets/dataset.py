"""A data set with training and test rows, and its standardization by the statistics of the training rows."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from numpyro_bnn._checks import argument_error, check_finite, check_kind


@dataclass(frozen=True, eq=False)
class Scaler:
    r"""Standardization of columns: z = (x - mean) / scale, one mean and scale per column.

    A log density or an error of standardized targets is converted back to the units of the data by

    .. math:: \log p(y) = \log p(z) - \sum \log c, \qquad \mathrm{RMSE}(y) = c\, \mathrm{RMSE}(z),

    with c the :attr:`scale_factor`.

    :param mean: (D,) float64, or () for targets shaped (N,).
    :param scale: standard deviations (divisor N), shaped like ``mean``; 1 for constant columns.

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
        """Estimate mean and standard deviation over the first axis of ``train``, (N, D) or (N,).

        A constant column has its value as mean and the scale 1, so that it becomes exactly 0.

        :return: the :class:`Scaler`.
        :raises ValueError: for no rows, NaN or infinity.
        """
        values = np.asarray(train)
        if values.ndim == 0:
            raise argument_error("Scaler.fit", "train", "a scalar", "Pass an array with one row per data point.")
        check_finite("Scaler.fit", "train", values)
        values = _floating(values)
        constant = _constant(values)
        # Differences from the first row keep all digits if the offset is large, and are 0 in constant columns.
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
        """Standardize ``x``, (..., D); floating dtypes are kept, integers become float64."""
        values = self._checked("transform", "x", x)
        return ((values - self.mean) / self.scale).astype(values.dtype)

    def inverse(self, z: ArrayLike) -> np.ndarray:
        """Convert ``z``, (..., D), e.g. predictive draws (C, S, N) of a target, back to the units of the data."""
        values = self._checked("inverse", "z", z)
        return (values * self.scale + self.mean).astype(values.dtype)

    def _checked(self, method: str, argument: str, x: ArrayLike) -> np.ndarray:
        values = np.asarray(x)
        columns = self.mean.shape
        if values.ndim < len(columns) or values.shape[values.ndim - len(columns) :] != columns:
            instead = f"Pass an array whose shape ends in {columns}."
            raise argument_error(f"Scaler.{method}", argument, f"shape {values.shape}", instead)
        return _floating(values)


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """A data set, split into training and test rows.

    :param x_train: inputs, (N, D), or (N, H, W, channel) for images.
    :param y_train: float targets (N,), or int32 class labels 0..K-1 (N,).
    :param x_test: inputs of the test rows, shaped like ``x_train`` except for their number.
    :param y_test: targets of the test rows.
    :param name: the name under which it was loaded.
    :param feature_names: one name per input column; empty for images.
    :param x_scaler: set by :func:`standardize`; converts inputs back to their units.
    :param y_scaler: set by :func:`standardize` if the targets were scaled too.

    >>> from numpyro_bnn.datasets import load_sklearn
    >>> load_sklearn("wine")
    Dataset('wine', x_train=(142, 13), y_train=(142,) int32, x_test=(36, 13), y_test=(36,) int32)
    """

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    name: str
    feature_names: tuple[str, ...] = ()
    x_scaler: Scaler | None = None
    y_scaler: Scaler | None = None

    def __repr__(self) -> str:
        y_type = self.y_train.dtype
        return (
            f"Dataset({self.name!r}, x_train={self.x_train.shape}, y_train={self.y_train.shape} {y_type}, "
            f"x_test={self.x_test.shape}, y_test={self.y_test.shape} {y_type})"
        )


def standardize(dataset: Dataset, targets: bool = True) -> Dataset:
    """Scale inputs, and targets too, to mean 0 and standard deviation 1 over the training rows.

    The test rows are scaled by the same numbers; the result keeps the scalers as ``x_scaler`` and ``y_scaler``.

    :param dataset: a :class:`Dataset` not yet standardized.
    :param targets: whether to scale the targets too; pass ``False`` for class labels.
    :return: a new :class:`Dataset`.
    :raises ValueError: for class labels with ``targets=True``, a set without training rows, or one that is already
        standardized.

    >>> from numpyro_bnn.datasets import load_sklearn, standardize
    >>> data = standardize(load_sklearn("diabetes"))
    >>> bool(abs(data.x_train.mean(0)).max() < 1e-12)
    True
    >>> print(round(data.y_scaler.scale_factor))     # one standardized unit, in units of the data
    77
    """
    check_kind("standardize", "dataset", dataset, Dataset, "Pass a data set, e.g. of `load_uci`.")
    if dataset.x_scaler is not None:
        raise argument_error("standardize", "dataset", "a standardized data set", "Pass it as it was loaded.")
    if len(dataset.x_train) == 0:
        got = f"{dataset.name!r} without training rows"
        raise argument_error("standardize", "dataset", got, "Scale it with the Scaler of another set.")
    if targets and not np.issubdtype(dataset.y_train.dtype, np.floating):
        got = f"True for class labels ({dataset.y_train.dtype})"
        raise argument_error("standardize", "targets", got, "Pass `targets=False`.")
    scalers = {"x": Scaler.fit(dataset.x_train)}
    if targets:
        scalers["y"] = Scaler.fit(dataset.y_train)
    changes: dict[str, Any] = {}
    for axis, scaler in scalers.items():
        changes[f"{axis}_scaler"] = scaler
        for part in ("train", "test"):
            changes[f"{axis}_{part}"] = scaler.transform(getattr(dataset, f"{axis}_{part}"))
    return replace(dataset, **changes)


def _floating(values: np.ndarray) -> np.ndarray:
    return values if np.issubdtype(values.dtype, np.floating) else values.astype(np.float64)


def _constant(values: np.ndarray) -> np.ndarray:
    """Columns whose values differ only by rounding: their std is a rounding error too, and often not 0."""
    largest, smallest = values.max(axis=0).astype(np.float64), values.min(axis=0).astype(np.float64)
    rounding = 8 * np.finfo(values.dtype).eps * np.maximum(np.abs(largest), np.abs(smallest))
    return largest - smallest <= rounding
