"""Tables read from a folder: the UCI benchmark, California housing, Neal's examples."""

import os
from typing import Any

import numpy as np

from numpyro_bnn._checks import argument_error, check_rank, check_same_length, unknown_name
from numpyro_bnn.datasets.dataset import Dataset, random_split
from numpyro_bnn.datasets.files import data_file, read_npz

__all__ = ["load_uci", "load_california", "load_neal"]

_UCI = {
    "boston": "uci/bostonHousing.npz",
    "concrete": "uci/concrete.npz",
    "energy": "uci/energy.npz",
    "kin8nm": "uci/kin8nm.npz",
    "naval": "uci/naval-propulsion-plant.npz",
    "power": "uci/power-plant.npz",
    "protein": "uci/protein-tertiary-structure.npz",
    "wine": "uci/wine-quality-red.npz",
    "yacht": "uci/yacht.npz",
}
_CALIFORNIA = "california_housing.npz"
_NEAL = "extra/neal_fbm.npz"
_NEAL_SETS = ("rdata", "odata", "bdata", "cdata", "xdata")


def _columns(num_features: int) -> tuple[str, ...]:
    """Names for tables whose files carry none."""
    return tuple(f"x{i}" for i in range(num_features))


def _table(
    call: str, file: str, x: np.ndarray, y: np.ndarray, classes: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Check inputs (N, D) and targets (N,); both become float64, but ``classes`` int32."""
    for key, array in (("X", x), ("y", y)):
        if array.dtype.kind not in "iuf":
            raise argument_error(call, f"{file}[{key}]", f"dtype {array.dtype}", "Store numbers.")
    check_rank(call, f"{file}[X]", x, 2, "(N, D)")
    check_rank(call, f"{file}[y]", y, 1, "(N,)")
    check_same_length(call, X=x, y=y)
    return x.astype(np.float64), y.astype(np.int32 if classes else np.float64)


def _check_splits(file: str, train: np.ndarray, test: np.ndarray, num_rows: int) -> None:
    """Every split must be a disjoint cover of the rows: a wrong index would leak test rows into training."""
    for key, index in (("train_idx", train), ("test_idx", test)):
        check_rank("load_uci", f"{file}[{key}]", index, 2, "(splits, rows)")
        if not np.issubdtype(index.dtype, np.integer):
            raise argument_error(
                "load_uci", f"{file}[{key}]", f"dtype {index.dtype}", "Store integer row numbers."
            )
    check_same_length("load_uci", train_idx=train, test_idx=test)
    rows = np.sort(np.concatenate([train, test], axis=1), axis=1)
    if rows.shape[1] != num_rows or not (rows == np.arange(num_rows)).all():
        raise argument_error(
            "load_uci",
            "folder",
            f"{file}, whose splits are not disjoint covers of its {num_rows} rows",
            "Replace it by an intact file.",
        )


def _choose_split(split: Any, num_splits: int) -> int:
    if isinstance(split, bool) or not isinstance(split, int | np.integer) or not 0 <= split < num_splits:
        raise argument_error("load_uci", "split", split, f"Pass an integer from 0 to {num_splits - 1}.")
    return int(split)


def load_uci(name: str, split: int = 0, folder: str | os.PathLike | None = None) -> Dataset:
    """Load a UCI regression set with one of its standard splits into 90 % training and 10 % test rows.

    The file ``uci/<file>.npz`` holds ``X`` (N, D), ``y`` (N,), ``train_idx`` and ``test_idx`` (splits, rows).
    Values are as published, not normalized: see :func:`standardize`. The files carry no column names, hence
    ``x0, x1, ...``.

    :param name: boston, concrete, energy, kin8nm, naval, power, protein, wine or yacht.
    :param split: number of the split, from 0; there are 20, for protein 5.
    :param folder: the data folder; by default the environment variable ``NUMPYRO_BNN_DATA``.
    :return: a :class:`Dataset`; inputs (N, D) and targets (N,) in float64.
    :raises ValueError: for an unknown name, an absent or damaged file, or a split that does not exist.

    **Reference:** Hernandez-Lobato and Adams (2015), Probabilistic backpropagation, section 6.

    **Example**

    >>> import os, tempfile
    >>> import numpy as np
    >>> from numpyro_bnn.datasets import load_uci
    >>> with tempfile.TemporaryDirectory() as folder:      # a file of four rows in place of the real one
    ...     os.mkdir(f"{folder}/uci")
    ...     table = {"X": np.ones((4, 6)), "y": np.ones(4)}
    ...     np.savez(f"{folder}/uci/yacht.npz", train_idx=[[0, 1, 2]], test_idx=[[3]], **table)
    ...     load_uci("yacht", split=0, folder=folder)
    Dataset('yacht', x_train=(3, 6), y_train=(3,) float64, x_test=(1, 6), y_test=(1,) float64)
    """
    if name not in _UCI:
        raise unknown_name("load_uci", "name", name, _UCI)
    path = data_file("load_uci", folder, _UCI[name], _UCI.values())
    arrays = read_npz("load_uci", path, ("X", "y", "train_idx", "test_idx"))
    x, y = _table("load_uci", path.name, arrays["X"], arrays["y"])
    _check_splits(path.name, arrays["train_idx"], arrays["test_idx"], len(x))
    chosen = _choose_split(split, len(arrays["train_idx"]))
    train, test = arrays["train_idx"][chosen], arrays["test_idx"][chosen]
    return Dataset(x[train], y[train], x[test], y[test], name, _columns(x.shape[1]))


def load_california(
    folder: str | os.PathLike | None = None, test_fraction: float = 0.2, seed: int = 0
) -> Dataset:
    """Load California housing (N = 20640, D = 8, targets in 100,000 USD, capped at 5), cut at random.

    The file ``california_housing.npz`` holds ``X`` (N, D), ``y`` (N,) and ``feature_names`` (D,).

    :param folder: the data folder; by default the environment variable ``NUMPYRO_BNN_DATA``.
    :param test_fraction: share of the rows kept for testing, between 0 and 1.
    :param seed: seed of the cut.
    :return: a :class:`Dataset`; inputs (N, D) and targets (N,) in float64.
    :raises ValueError: for an absent or damaged file, a fraction that leaves a side empty, or a bad seed.

    **Reference:** Pace and Barry (1997), Sparse spatial autoregressions.

    **Example**

    >>> import tempfile
    >>> import numpy as np
    >>> from numpyro_bnn.datasets import load_california
    >>> with tempfile.TemporaryDirectory() as folder:      # a file of five rows in place of the real one
    ...     table = {"X": np.ones((5, 2)), "y": np.ones(5)}
    ...     np.savez(f"{folder}/california_housing.npz", feature_names=["MedInc", "HouseAge"], **table)
    ...     load_california(folder).feature_names
    ('MedInc', 'HouseAge')
    """
    path = data_file("load_california", folder, _CALIFORNIA, [_CALIFORNIA])
    arrays = read_npz("load_california", path, ("X", "y", "feature_names"))
    x, y = _table("load_california", path.name, arrays["X"], arrays["y"])
    names = tuple(str(feature) for feature in arrays["feature_names"])
    if len(names) != x.shape[1]:
        raise argument_error(
            "load_california",
            f"{path.name}[feature_names]",
            f"{len(names)} names",
            f"Store {x.shape[1]} names.",
        )
    return random_split("load_california", "california", x, y, names, test_fraction, seed)


def load_neal(name: str, folder: str | os.PathLike | None = None) -> Dataset:
    """Load one of Neal's small examples, with his division into training and test rows.

    The file ``extra/neal_fbm.npz`` holds for each name ``<name>_X`` (N, D), ``<name>_y`` (N,) and
    ``<name>_n_train`` (): the first n_train rows are the training set.

    :param name: ``"rdata"`` (regression, D = 1), ``"odata"`` (the same with outliers), ``"bdata"`` (K = 2,
        D = 2), ``"cdata"`` (K = 3, D = 4, two inputs irrelevant) or ``"xdata"`` (K = 2, D = 2).
    :param folder: the data folder; by default the environment variable ``NUMPYRO_BNN_DATA``.
    :return: a :class:`Dataset`; inputs (N, D) float64, targets (N,) float64 or int32 labels.
    :raises ValueError: for an unknown name, or an absent or damaged file.

    **Reference:** Neal (1996), Bayesian Learning for Neural Networks, with his fbm software.

    **Example**

    >>> import os, tempfile
    >>> import numpy as np
    >>> from numpyro_bnn.datasets import load_neal
    >>> with tempfile.TemporaryDirectory() as folder:      # a file of four rows in place of the real one
    ...     os.mkdir(f"{folder}/extra")
    ...     table = {"rdata_X": np.ones((4, 1)), "rdata_y": np.ones(4), "rdata_n_train": 3}
    ...     np.savez(f"{folder}/extra/neal_fbm.npz", **table)
    ...     load_neal("rdata", folder)
    Dataset('rdata', x_train=(3, 1), y_train=(3,) float64, x_test=(1, 1), y_test=(1,) float64)
    """
    if name not in _NEAL_SETS:
        raise unknown_name("load_neal", "name", name, _NEAL_SETS)
    path = data_file("load_neal", folder, _NEAL, [_NEAL])
    keys = (f"{name}_X", f"{name}_y", f"{name}_n_train")
    inputs, targets, count = read_npz("load_neal", path, keys).values()
    x, y = _table("load_neal", path.name, inputs, targets, classes=name not in ("rdata", "odata"))
    if count.shape != () or count.dtype.kind not in "iu" or not 0 < int(count) < len(x):
        raise argument_error(
            "load_neal",
            f"{path.name}[{name}_n_train]",
            count.tolist(),
            f"Store a number between 1 and {len(x) - 1}.",
        )
    cut = int(count)
    return Dataset(x[:cut], y[:cut], x[cut:], y[cut:], name, _columns(x.shape[1]))
