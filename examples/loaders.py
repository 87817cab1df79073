"""Data of the examples and benchmarks: sets that scikit-learn ships, and tables and
images read from a data folder.

Tabular arrays are float64 (a model casts them to its own dtype), images float32 (N, H,
W, channel) in [0, 1], class labels int32. The folder is given as ``folder=`` or by the
environment variable ``NUMPYRO_BNN_DATA``, with the files ``uci/<file>.npz``,
``california_housing.npz``, ``image/<name>.npz`` and ``extra/neal_fbm.npz``.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from numpyro_bnn.datasets import Scaler

_FOLDER_VARIABLE = "NUMPYRO_BNN_DATA"
_UCI = {
    "boston": "bostonHousing",
    "concrete": "concrete",
    "energy": "energy",
    "kin8nm": "kin8nm",
    "naval": "naval-propulsion-plant",
    "power": "power-plant",
    "protein": "protein-tertiary-structure",
    "wine": "wine-quality-red",
    "yacht": "yacht",
}


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """A data set, split into training and test rows.

    :param x_train: inputs, (N, D), or (N, H, W, channel) for images.
    :param y_train: float targets (N,), or int32 class labels 0..K-1 (N,).
    :param x_test: inputs of the test rows, shaped like ``x_train`` except for their
        number.
    :param y_test: targets of the test rows.
    :param name: its name.
    :param feature_names: one name per input column; empty for images.
    :param x_scaler: set by :func:`standardize`; converts inputs back to their units.
    :param y_scaler: set by :func:`standardize` if the targets were scaled too.
    """

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    name: str
    feature_names: tuple[str, ...] = ()
    x_scaler: Scaler | None = None
    y_scaler: Scaler | None = None


def standardize(dataset: Dataset, targets: bool = True) -> Dataset:
    """Scale inputs, and targets too, to mean 0 and standard deviation 1 over the
    training rows.

    The test rows are scaled by the same numbers; the result keeps the scalers as
    ``x_scaler`` and ``y_scaler``.

    :param targets: whether to scale the targets too; pass ``False`` for class labels.
    """
    if targets and not np.issubdtype(dataset.y_train.dtype, np.floating):
        raise ValueError("standardize: pass `targets=False` for class labels.")
    changes: dict[str, Any] = {}
    for axis in "xy" if targets else "x":
        scaler = Scaler.fit(getattr(dataset, f"{axis}_train"))
        changes[f"{axis}_scaler"] = scaler
        for part in (f"{axis}_train", f"{axis}_test"):
            changes[part] = scaler.transform(getattr(dataset, part))
    return replace(dataset, **changes)


def load_sklearn(name: str, test_fraction: float = 0.2, seed: int = 0) -> Dataset:
    """Load one of the sets that scikit-learn ships, split at random into training and
    test rows.

    :param name: ``"diabetes"`` (regression, D = 10, in original units),
        ``"breast_cancer"`` (K = 2, D = 30), ``"wine"`` (K = 3, D = 13) or ``"digits"``
        (K = 10, D = 64 pixels from 0 to 16).
    """
    from sklearn import datasets

    is_regression = name == "diabetes"
    # By default scikit-learn scales diabetes by all rows, test rows included.
    options = {"scaled": False} if is_regression else {}
    bunch = getattr(datasets, f"load_{name}")(**options)
    y = bunch.target.astype(np.float64 if is_regression else np.int32)
    x = np.asarray(bunch.data, np.float64)
    return _random_split(name, x, y, bunch.feature_names, test_fraction, seed)


def load_uci(
    name: str, split: int = 0, folder: str | os.PathLike | None = None
) -> Dataset:
    """Load a UCI regression set with one of its standard splits into 90 % training and
    10 % test rows.

    The file ``uci/<file>.npz`` holds ``X`` (N, D), ``y`` (N,), ``train_idx`` and
    ``test_idx`` (splits, rows). Values are as published, not normalized: see
    :func:`standardize`. The files have no column names, so the columns are named ``x0,
    x1, ...``.

    :param name: boston, concrete, energy, kin8nm, naval, power, protein, wine or yacht.
    :param split: number of the split, from 0; there are 20, for protein 5.

    **Reference:** Hernandez-Lobato and Adams (2015), Probabilistic backpropagation,
    section 6.
    """
    arrays = _read(f"uci/{_UCI[name]}.npz", folder)
    train, test = arrays["train_idx"][split], arrays["test_idx"][split]
    if not np.array_equal(np.sort(np.r_[train, test]), np.arange(len(arrays["y"]))):
        raise ValueError(f"load_uci: split {split} of {name} is no cover of its rows.")
    return _cut(name, arrays["X"], arrays["y"], train, test)


def load_uci_gap(
    name: str, column: int, kind: str = "gap", folder: str | os.PathLike | None = None
) -> Dataset:
    """Load a UCI regression set, split along one of its inputs: the test rows lie where
    there are no training rows.

    The rows are sorted by the input; rows with the same value keep their order in the
    file.

    :param column: number of the input, from 0.
    :param kind: ``"gap"``: the middle third of the sorted rows is the test set;
        ``"tail"``: the sixths at both ends.

    **Reference:** Foong et al. (2019), 'In-between' uncertainty in Bayesian neural
    networks (gap).
    """
    arrays = _read(f"uci/{_UCI[name]}.npz", folder)
    x, rows = arrays["X"], len(arrays["X"])
    order, place = np.argsort(x[:, column], kind="stable"), np.arange(rows)
    is_tested = {
        "gap": (place >= rows // 3) & (place < 2 * rows // 3),
        "tail": (place < -(-rows // 6)) | (place >= 5 * rows // 6),
    }[kind]
    return _cut(name, x, arrays["y"], order[~is_tested], order[is_tested])


def load_california(
    folder: str | os.PathLike | None = None, test_fraction: float = 0.2, seed: int = 0
) -> Dataset:
    """Load California housing (N = 20640, D = 8, targets in 100,000 USD, capped at 5),
    split at random.

    **Reference:** Pace and Barry (1997), Sparse spatial autoregressions.
    """
    arrays = _read("california_housing.npz", folder)
    x, y = (arrays[key].astype(np.float64) for key in "Xy")
    names = arrays["feature_names"]
    return _random_split("california", x, y, names, test_fraction, seed)


def load_neal(name: str, folder: str | os.PathLike | None = None) -> Dataset:
    """Load one of Neal's small examples, with his split into training and test rows.

    :param name: ``"rdata"`` (regression, D = 1), ``"odata"`` (the same with outliers),
        ``"bdata"`` (K = 2, D = 2), ``"cdata"`` (K = 3, D = 4, two inputs irrelevant) or
        ``"xdata"`` (K = 2, D = 2).

    **Reference:** Neal (1996), Bayesian Learning for Neural Networks, with his fbm
    software.
    """
    arrays = _read("extra/neal_fbm.npz", folder)
    x, y = arrays[f"{name}_X"], arrays[f"{name}_y"]
    if name not in ("rdata", "odata"):
        y = y.astype(np.int32)
    train, test = np.split(np.arange(len(x)), [int(arrays[f"{name}_n_train"])])
    return _cut(name, x, y, train, test)


def load_images(name: str, folder: str | os.PathLike | None = None) -> Dataset:
    """Load MNIST, Fashion-MNIST or the test part of KMNIST, with their published order
    and split.

    :param name: ``"mnist"``, ``"fashion_mnist"`` or ``"kmnist"``, which has test rows
        only: its training part is empty.
    :return: images (N, 28, 28, 1) float32 in [0, 1], int32 labels (N,).
    """
    file = "kmnist_test" if name == "kmnist" else name
    arrays = _read(f"image/{file}.npz", folder)
    parts = []
    for part in ("train", "test"):
        if f"x_{part}" in arrays:
            pixels = arrays[f"x_{part}"].astype(np.float32) / np.float32(255)
            parts.append((pixels[..., None], arrays[f"y_{part}"].astype(np.int32)))
    x_test, y_test = parts[-1]
    x_train, y_train = parts[0] if len(parts) == 2 else (x_test[:0], y_test[:0])
    return Dataset(x_train, y_train, x_test, y_test, name)


def _read(file: str, folder: str | os.PathLike | None) -> dict[str, np.ndarray]:
    """The arrays of a file of the data folder; one that needs `pickle` is refused."""
    given = folder or os.environ.get(_FOLDER_VARIABLE)
    path = Path(given or "") / file
    if not given or not path.is_file():
        instead = f"pass the folder of the data, or set {_FOLDER_VARIABLE}"
        raise ValueError(f"No file {file!r} in the folder {given!r}: {instead}.")
    with np.load(path, allow_pickle=False) as archive:
        arrays = dict(archive)
    for name, values in arrays.items():
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise ValueError(f"{file}: {name!r} has NaN or infinite values.")
    return arrays


def _cut(
    name: str, x: np.ndarray, y: np.ndarray, train: np.ndarray, test: np.ndarray
) -> Dataset:
    """Rows by number, of a table without names of columns."""
    x = x.astype(np.float64)
    y = y if y.dtype == np.int32 else y.astype(np.float64)
    columns = tuple(f"x{i}" for i in range(x.shape[1]))
    return Dataset(x[train], y[train], x[test], y[test], name, columns)


def _random_split(
    name: str, x: np.ndarray, y: np.ndarray, names: Any, test_fraction: float, seed: int
) -> Dataset:
    """Split the rows at random (not stratified); the same seed gives the same split on
    every machine.
    """
    num_test = round(len(x) * test_fraction)
    if not 0 < num_test < len(x):
        raise ValueError(f"{name}: a `test_fraction` of {test_fraction} leaves no row.")
    order = np.random.default_rng(seed).permutation(len(x))
    test, train = order[:num_test], order[num_test:]
    columns = tuple(str(feature) for feature in names)
    return Dataset(x[train], y[train], x[test], y[test], name, columns)
