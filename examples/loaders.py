"""Data of the examples and benchmarks: sets that scikit-learn ships, and tables and
images read from a data folder.

Tabular arrays are float64 (a model casts them to its own dtype), images float32 (N, H,
W, channel) in [0, 1], class labels int32. The folder is given as ``folder=`` or by the
environment variable ``NUMPYRO_BNN_DATA``, with the files ``uci/<file>.npz``,
``california_housing.npz``, ``image/<name>.npz`` and ``extra/neal_fbm.npz``.
"""

import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from numpyro_bnn._checks import (
    argument_error,
    check_finite,
    check_labels,
    check_rank,
    check_same_length,
)
from numpyro_bnn._options import Choice, Count, Kind, Number
from numpyro_bnn.datasets import Scaler

_FOLDER_VARIABLE = "NUMPYRO_BNN_DATA"
# Name -> arguments of scikit-learn's loader. By default it scales diabetes by all rows,
# test rows included.
_SKLEARN: dict[str, dict] = {
    "diabetes": {"scaled": False},
    "breast_cancer": {},
    "wine": {},
    "digits": {},
}
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
# Name -> (file, parts it holds). KMNIST is used as out-of-distribution test data only.
_IMAGES = {
    "mnist": ("image/mnist.npz", ("train", "test")),
    "fashion_mnist": ("image/fashion_mnist.npz", ("train", "test")),
    "kmnist": ("image/kmnist_test.npz", ("test",)),
}
_IMAGE_CLASSES = 10


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

    >>> Dataset(
    ...     np.ones((4, 2)), np.ones(4), np.ones((1, 2)), np.ones(1), "mine"
    ... ).x_test.shape
    (1, 2)
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
            f"Dataset({self.name!r}, x_train={self.x_train.shape}, "
            f"y_train={self.y_train.shape} {y_type}, "
            f"x_test={self.x_test.shape}, y_test={self.y_test.shape} {y_type})"
        )


def standardize(dataset: Dataset, targets: bool = True) -> Dataset:
    """Scale inputs, and targets too, to mean 0 and standard deviation 1 over the
    training rows.

    The test rows are scaled by the same numbers; the result keeps the scalers as
    ``x_scaler`` and ``y_scaler``.

    :param dataset: a :class:`Dataset` not yet standardized.
    :param targets: whether to scale the targets too; pass ``False`` for class labels.
    :return: a new :class:`Dataset`.
    :raises ValueError: for class labels with ``targets=True``, a set without training
        rows, or one that is already standardized.

    >>> x, y = np.array([[1.0], [3.0]]), np.array([10.0, 50.0])
    >>> data = standardize(Dataset(x, y, x[:1], y[:1], "mine"))
    >>> (
    ...     data.x_test.tolist(),
    ...     data.y_scaler.scale_factor,
    ... )  # one standardized unit, in units of the data
    ([[-1.0]], 20.0)
    """
    Kind(Dataset, "Pass a `datasets.Dataset`.").check("standardize", "dataset", dataset)
    if dataset.x_scaler is not None:
        raise argument_error(
            "standardize",
            "dataset",
            "a standardized data set",
            "Pass it as it was loaded.",
        )
    if len(dataset.x_train) == 0:
        got = f"{dataset.name!r} without training rows"
        raise argument_error(
            "standardize", "dataset", got, "Scale it with the Scaler of another set."
        )
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
            changes[f"{axis}_{part}"] = scaler.transform(
                getattr(dataset, f"{axis}_{part}")
            )
    return replace(dataset, **changes)


def load_sklearn(name: str, test_fraction: float = 0.2, seed: int = 0) -> Dataset:
    """Load one of the sets that scikit-learn ships, split at random into training and
    test rows.

    :param name: ``"diabetes"`` (regression, D = 10, in original units),
        ``"breast_cancer"`` (K = 2, D = 30), ``"wine"`` (K = 3, D = 13) or ``"digits"``
        (K = 10, D = 64 pixels from 0 to 16).
    :param test_fraction: fraction of the rows kept for testing, between 0 and 1; not
        stratified by class.
    :param seed: seed of the split.
    :return: a :class:`Dataset`; inputs (N, D) float64, targets (N,) float64 or int32
        labels.
    :raises ValueError: for an unknown name, a fraction that leaves a side empty, or a
        bad seed.
    :raises ImportError: if scikit-learn is not installed.

    >>> from examples.loaders import load_sklearn
    >>> data = load_sklearn("diabetes", test_fraction=0.1)
    >>> data.x_train.shape, data.x_test.shape, data.feature_names[:3]
    ((398, 10), (44, 10), ('age', 'sex', 'bmi'))
    """
    Choice(_SKLEARN).check("load_sklearn", "name", name)
    try:
        from sklearn import datasets as sklearn_datasets
    except ImportError as error:
        message = (
            "load_sklearn: scikit-learn is missing. Run `pip install "
            '"numpyro_bnn[examples]"`.'
        )
        raise ImportError(message) from error
    bunch = getattr(sklearn_datasets, f"load_{name}")(**_SKLEARN[name])
    x = np.asarray(bunch.data, np.float64)
    y = np.asarray(bunch.target, np.float64 if name == "diabetes" else np.int32)
    names = tuple(str(feature) for feature in bunch.feature_names)
    return _random_split("load_sklearn", name, x, y, names, test_fraction, seed)


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
    :param folder: the data folder; by default the environment variable
        ``NUMPYRO_BNN_DATA``.
    :return: a :class:`Dataset`; inputs (N, D) and targets (N,) in float64.
    :raises ValueError: for an unknown name, a missing or damaged file, or a split that
        does not exist.

    **Reference:** Hernandez-Lobato and Adams (2015), Probabilistic backpropagation,
    section 6.

    >>> import os, tempfile
    >>> import numpy as np
    >>> from examples.loaders import load_uci
    >>> with (
    ...     tempfile.TemporaryDirectory() as folder
    ... ):  # a file of four rows instead of the real one
    ...     os.mkdir(f"{folder}/uci")
    ...     table = {"X": np.ones((4, 6)), "y": np.ones(4)}
    ...     np.savez(
    ...         f"{folder}/uci/yacht.npz",
    ...         train_idx=[[0, 1, 2]],
    ...         test_idx=[[3]],
    ...         **table,
    ...     )
    ...     load_uci("yacht", split=0, folder=folder).x_train.shape
    (3, 6)
    """
    Choice(_UCI).check("load_uci", "name", name)
    path = _data_file("load_uci", folder, _UCI[name], _UCI.values())
    arrays = _read_npz("load_uci", path, ("X", "y", "train_idx", "test_idx"))
    x, y = _table("load_uci", path.name, arrays["X"], arrays["y"])
    _check_splits(path.name, arrays["train_idx"], arrays["test_idx"], len(x))
    last = len(arrays["train_idx"]) - 1
    if Count(0).check("load_uci", "split", split) > last:
        raise argument_error(
            "load_uci", "split", split, f"Pass an integer from 0 to {last}."
        )
    train, test = arrays["train_idx"][split], arrays["test_idx"][split]
    return Dataset(x[train], y[train], x[test], y[test], name, _columns(x))


def load_uci_gap(
    name: str, column: int, kind: str = "gap", folder: str | os.PathLike | None = None
) -> Dataset:
    """Load a UCI regression set, split along one of its inputs: the test rows lie where
    there are no training rows.

    The rows are sorted by the input; rows with the same value keep their order in the
    file.

    :param name: one of the sets of :func:`load_uci`.
    :param column: number of the input, from 0.
    :param kind: ``"gap"``: the middle third of the sorted rows is the test set;
        ``"tail"``: the sixths at both ends.
    :param folder: the data folder; by default the environment variable
        ``NUMPYRO_BNN_DATA``.
    :return: a :class:`Dataset`; inputs (N, D) and targets (N,) in float64.
    :raises ValueError: for an unknown name or kind, a missing or damaged file, or a
        column that does not exist.

    **Reference:** Foong et al. (2019), 'In-between' uncertainty in Bayesian neural
    networks (gap).
    """
    Choice(_UCI).check("load_uci_gap", "name", name)
    Choice(("gap", "tail")).check("load_uci_gap", "kind", kind)
    path = _data_file("load_uci_gap", folder, _UCI[name], _UCI.values())
    arrays = _read_npz("load_uci_gap", path, ("X", "y"))
    x, y = _table("load_uci_gap", path.name, arrays["X"], arrays["y"])
    if Count(0).check("load_uci_gap", "column", column) >= x.shape[1]:
        raise argument_error(
            "load_uci_gap",
            "column",
            column,
            f"Pass an integer from 0 to {x.shape[1] - 1}.",
        )
    order = np.argsort(x[:, column], kind="stable")
    place, rows = np.arange(len(x)), len(x)
    if kind == "gap":
        tested = (place >= rows // 3) & (place < 2 * rows // 3)
    else:
        tested = (place < -(-rows // 6)) | (place >= 5 * rows // 6)
    train, test = order[~tested], order[tested]
    return Dataset(x[train], y[train], x[test], y[test], name, _columns(x))


def load_california(
    folder: str | os.PathLike | None = None, test_fraction: float = 0.2, seed: int = 0
) -> Dataset:
    """Load California housing (N = 20640, D = 8, targets in 100,000 USD, capped at 5),
    split at random.

    The file ``california_housing.npz`` holds ``X`` (N, D), ``y`` (N,) and
    ``feature_names`` (D,).

    :param folder: the data folder; by default the environment variable
        ``NUMPYRO_BNN_DATA``.
    :param test_fraction: fraction of the rows kept for testing, between 0 and 1.
    :param seed: seed of the split.
    :return: a :class:`Dataset`; inputs (N, D) and targets (N,) in float64.
    :raises ValueError: for a missing or damaged file, a fraction that leaves a side
        empty, or a bad seed.

    **Reference:** Pace and Barry (1997), Sparse spatial autoregressions.

    >>> import tempfile
    >>> import numpy as np
    >>> from examples.loaders import load_california
    >>> with (
    ...     tempfile.TemporaryDirectory() as folder
    ... ):  # a file of five rows instead of the real one
    ...     table = {"X": np.ones((5, 2)), "y": np.ones(5)}
    ...     np.savez(
    ...         f"{folder}/california_housing.npz",
    ...         feature_names=["MedInc", "HouseAge"],
    ...         **table,
    ...     )
    ...     load_california(folder).feature_names
    ('MedInc', 'HouseAge')
    """
    path = _data_file("load_california", folder, _CALIFORNIA, [_CALIFORNIA])
    arrays = _read_npz("load_california", path, ("X", "y", "feature_names"))
    x, y = _table("load_california", path.name, arrays["X"], arrays["y"])
    names = tuple(str(feature) for feature in arrays["feature_names"])
    if len(names) != x.shape[1]:
        argument, instead = f"{path.name}[feature_names]", f"Store {x.shape[1]} names."
        raise argument_error(
            "load_california", argument, f"{len(names)} names", instead
        )
    return _random_split(
        "load_california", "california", x, y, names, test_fraction, seed
    )


def load_neal(name: str, folder: str | os.PathLike | None = None) -> Dataset:
    """Load one of Neal's small examples, with his split into training and test rows.

    The file ``extra/neal_fbm.npz`` holds for each name ``<name>_X`` (N, D),
    ``<name>_y`` (N,) and ``<name>_n_train`` (): the first n_train rows are the training
    set.

    :param name: ``"rdata"`` (regression, D = 1), ``"odata"`` (the same with outliers),
        ``"bdata"`` (K = 2, D = 2), ``"cdata"`` (K = 3, D = 4, two inputs irrelevant) or
        ``"xdata"`` (K = 2, D = 2).
    :param folder: the data folder; by default the environment variable
        ``NUMPYRO_BNN_DATA``.
    :return: a :class:`Dataset`; inputs (N, D) float64, targets (N,) float64 or int32
        labels.
    :raises ValueError: for an unknown name, or a missing or damaged file.

    **Reference:** Neal (1996), Bayesian Learning for Neural Networks, with his fbm
    software.

    >>> import os, tempfile
    >>> import numpy as np
    >>> from examples.loaders import load_neal
    >>> with (
    ...     tempfile.TemporaryDirectory() as folder
    ... ):  # a file of four rows instead of the real one
    ...     os.mkdir(f"{folder}/extra")
    ...     table = {
    ...         "rdata_X": np.ones((4, 1)),
    ...         "rdata_y": np.ones(4),
    ...         "rdata_n_train": 3,
    ...     }
    ...     np.savez(f"{folder}/extra/neal_fbm.npz", **table)
    ...     load_neal("rdata", folder).x_train.shape
    (3, 1)
    """
    Choice(_NEAL_SETS).check("load_neal", "name", name)
    path = _data_file("load_neal", folder, _NEAL, [_NEAL])
    keys = (f"{name}_X", f"{name}_y", f"{name}_n_train")
    inputs, targets, count = _read_npz("load_neal", path, keys).values()
    x, y = _table(
        "load_neal", path.name, inputs, targets, classes=name not in ("rdata", "odata")
    )
    if count.shape != () or count.dtype.kind not in "iu" or not 0 < int(count) < len(x):
        argument, instead = (
            f"{path.name}[{keys[2]}]",
            f"Store a number between 1 and {len(x) - 1}.",
        )
        raise argument_error("load_neal", argument, count.tolist(), instead)
    cut = int(count)
    return Dataset(x[:cut], y[:cut], x[cut:], y[cut:], name, _columns(x))


def load_images(name: str, folder: str | os.PathLike | None = None) -> Dataset:
    """Load MNIST, Fashion-MNIST or the test part of KMNIST, with their published order
    and split.

    The file ``image/<name>.npz`` (``image/kmnist_test.npz``) holds ``x_train``,
    ``x_test`` (N, 28, 28) uint8 and ``y_train``, ``y_test`` (N,).

    :param name: ``"mnist"``, ``"fashion_mnist"`` or ``"kmnist"``, which has test rows
        only: its training part is empty.
    :param folder: the data folder; by default the environment variable
        ``NUMPYRO_BNN_DATA``.
    :return: a :class:`Dataset`; images (N, 28, 28, 1) float32 in [0, 1], int32 labels
        (N,) with K = 10.
    :raises ValueError: for an unknown name, or a missing or damaged file.

    >>> import os, tempfile
    >>> import numpy as np
    >>> from examples.loaders import load_images
    >>> with (
    ...     tempfile.TemporaryDirectory() as folder
    ... ):  # a file of two images instead of the real one
    ...     os.mkdir(f"{folder}/image")
    ...     images = np.full((2, 28, 28), 255, np.uint8)
    ...     np.savez(
    ...         f"{folder}/image/kmnist_test.npz",
    ...         x_test=images,
    ...         y_test=np.array([3, 7]),
    ...     )
    ...     load_images("kmnist", folder).x_test.shape
    (2, 28, 28, 1)
    """
    Choice(_IMAGES).check("load_images", "name", name)
    file, parts = _IMAGES[name]
    path = _data_file(
        "load_images", folder, file, [known for known, _ in _IMAGES.values()]
    )
    arrays = _read_npz(
        "load_images", path, [f"{axis}_{part}" for part in parts for axis in "xy"]
    )
    x_test, y_test = _images(path, arrays["x_test"], arrays["y_test"])
    if "train" in parts:
        x_train, y_train = _images(path, arrays["x_train"], arrays["y_train"])
    else:
        x_train, y_train = x_test[:0], y_test[:0]
    return Dataset(x_train, y_train, x_test, y_test, name)


def _random_split(
    call: str,
    name: str,
    x: np.ndarray,
    y: np.ndarray,
    names: tuple[str, ...],
    test_fraction: Any,
    seed: Any,
) -> Dataset:
    """Split the rows at random (not stratified); the same seed gives the same split on
    every machine.
    """
    seed = Count(0).check(call, "seed", seed)
    Number(strict=True, below=1).check(call, "test_fraction", test_fraction)
    num_test = round(len(x) * float(test_fraction))
    if not 0 < num_test < len(x):
        instead = (
            f"It leaves {num_test} of {len(x)} rows for testing: keep at least one row "
            f"on either side."
        )
        raise argument_error(call, "test_fraction", test_fraction, instead)
    order = np.random.default_rng(seed).permutation(len(x))
    test, train = order[:num_test], order[num_test:]
    return Dataset(x[train], y[train], x[test], y[test], name, names)


def _check_splits(
    file: str, train: np.ndarray, test: np.ndarray, num_rows: int
) -> None:
    """Every split must be a disjoint cover of the rows: a wrong index would leak test
    rows into training.
    """
    for key, index in (("train_idx", train), ("test_idx", test)):
        check_rank("load_uci", f"{file}[{key}]", index, 2, "(splits, rows)")
        if not np.issubdtype(index.dtype, np.integer):
            raise argument_error(
                "load_uci",
                f"{file}[{key}]",
                f"dtype {index.dtype}",
                "Store integer row numbers.",
            )
    check_same_length("load_uci", train_idx=train, test_idx=test)
    rows = np.sort(np.concatenate([train, test], axis=1), axis=1)
    if rows.shape[1] != num_rows or not (rows == np.arange(num_rows)).all():
        got = f"{file}, whose splits are not disjoint covers of its {num_rows} rows"
        raise argument_error(
            "load_uci", "folder", got, "Replace it with an intact file."
        )


def _data_file(
    call: str, folder: str | os.PathLike | None, relative: str, siblings: Iterable[str]
) -> Path:
    """Find ``relative`` in the data folder; ``siblings`` are the files to list as
    present if it is missing.
    """
    given = os.environ.get(_FOLDER_VARIABLE) if folder is None else folder
    if not given:
        instead = (
            f"Pass the folder of the data, or set the variable {_FOLDER_VARIABLE}."
        )
        raise argument_error(call, "folder", folder, instead)
    Kind(str | os.PathLike, "Pass the path of a folder.").check(call, "folder", given)
    root = Path(given)
    if not root.is_dir():
        raise argument_error(
            call,
            "folder",
            repr(str(root)),
            "No such folder: pass the one that holds the data.",
        )
    path = root / relative
    if not path.is_file():
        present = (
            ", ".join(name for name in siblings if (root / name).is_file())
            or "no file known here"
        )
        raise argument_error(
            call,
            "folder",
            repr(str(root)),
            f"It holds no file {relative!r}. Present: {present}.",
        )
    return path


def _read_npz(call: str, path: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Read the arrays ``names``; a damaged, pickled or unrelated file, NaN and infinity
    are errors.
    """
    try:
        # Opened here, because NumPy leaves the file open if the archive is damaged;
        # allow_pickle stays False, because a data file must not be able to run code.
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("it holds a single array, not an npz archive")
            with archive:
                arrays = {name: archive[name] for name in names}
    except KeyError as error:
        got, instead = f"{str(path)!r} ({error})", f"It must hold {sorted(names)}."
        raise argument_error(call, "folder", got, instead) from error
    except (
        ValueError,
        OSError,
        EOFError,
        BadZipFile,
        zlib.error,
        NotImplementedError,
    ) as error:
        got = f"{str(path)!r}, which cannot be read ({error})"
        raise argument_error(
            call, "folder", got, "Replace it with an intact npz file."
        ) from error
    for name, array in arrays.items():
        if np.issubdtype(array.dtype, np.inexact):
            check_finite(call, f"{path.name}[{name}]", array)
    return arrays


def _columns(x: np.ndarray) -> tuple[str, ...]:
    """Column names for tables whose files have none."""
    return tuple(f"x{i}" for i in range(x.shape[1]))


def _table(
    call: str, file: str, x: np.ndarray, y: np.ndarray, classes: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Check inputs (N, D) and targets (N,); both become float64, but
    ``classes`` int32.
    """
    for key, array in (("X", x), ("y", y)):
        if array.dtype.kind not in "iuf":
            raise argument_error(
                call, f"{file}[{key}]", f"dtype {array.dtype}", "Store numbers."
            )
    check_rank(call, f"{file}[X]", x, 2, "(N, D)")
    check_rank(call, f"{file}[y]", y, 1, "(N,)")
    check_same_length(call, X=x, y=y)
    return x.astype(np.float64), y.astype(np.int32 if classes else np.float64)


def _images(
    path: Path, images: np.ndarray, labels: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Check one part; bytes become float32 (N, H, W, 1) in [0, 1] and int32 labels."""
    call, file = "load_images", path.name
    check_rank(call, f"{file}[x]", images, 3, "(N, H, W)")
    check_rank(call, f"{file}[y]", labels, 1, "(N,)")
    check_same_length(call, x=images, y=labels)
    if images.dtype != np.uint8:
        raise argument_error(
            call,
            f"{file}[x]",
            f"dtype {images.dtype}",
            "Store pixels as uint8 from 0 to 255.",
        )
    if images.size == 0:
        raise argument_error(
            call, f"{file}[x]", f"shape {images.shape}", "Store at least one image."
        )
    check_labels(call, f"{file}[y]", labels, _IMAGE_CLASSES)
    return (images.astype(np.float32) / np.float32(255))[..., None], labels.astype(
        np.int32
    )
