"""What every loader returns, and the seeded split of sets that have no standard one."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from numpyro_bnn._checks import argument_error

if TYPE_CHECKING:
    from numpyro_bnn.datasets.scaling import Scaler

__all__ = ["Dataset", "random_split"]


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """A data set cut into training and test rows.

    :param x_train: inputs, (N, D), or (N, H, W, channel) for images.
    :param y_train: float targets (N,), or int32 class labels 0..K-1 (N,).
    :param x_test: inputs of the test rows, shaped alike.
    :param y_test: targets of the test rows.
    :param name: the name it was loaded under.
    :param feature_names: one name per input column; empty for images.
    :param x_scaler: set by :func:`standardize`; undoes the scaling of the inputs.
    :param y_scaler: set by :func:`standardize` where the targets were scaled as well.

    **Example**

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
    x_scaler: "Scaler | None" = None
    y_scaler: "Scaler | None" = None

    def __repr__(self) -> str:
        y_type = self.y_train.dtype
        return (
            f"Dataset({self.name!r}, x_train={self.x_train.shape}, y_train={self.y_train.shape} {y_type}, "
            f"x_test={self.x_test.shape}, y_test={self.y_test.shape} {y_type})"
        )


def random_split(
    call: str,
    name: str,
    x: np.ndarray,
    y: np.ndarray,
    feature_names: tuple[str, ...],
    test_fraction: Any,
    seed: Any,
) -> Dataset:
    """Cut the rows at random (not stratified); the same seed gives the same cut on every machine."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise argument_error(call, "seed", seed, "Pass a non-negative integer.")
    if not isinstance(test_fraction, int | float | np.number) or not 0 < test_fraction < 1:
        raise argument_error(call, "test_fraction", test_fraction, "Pass a number between 0 and 1, e.g. 0.2.")
    num_test = round(len(x) * float(test_fraction))
    if not 0 < num_test < len(x):
        raise argument_error(
            call,
            "test_fraction",
            test_fraction,
            f"It leaves {num_test} of {len(x)} rows for testing: keep at least one row on either side.",
        )
    order = np.random.default_rng(seed).permutation(len(x))
    test, train = order[:num_test], order[num_test:]
    return Dataset(x[train], y[train], x[test], y[test], name, feature_names)
