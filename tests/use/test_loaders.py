"""Loaders of the examples: shapes and splits as published, test rows that are in no
training set.
"""

import hashlib
import struct
from dataclasses import replace

import numpy as np
import pytest

from examples.loaders import (
    load_images,
    load_sklearn,
    load_uci,
    load_uci_gap,
    standardize,
)

# name: (file, N, D, splits), from the published benchmark.
UCI = {
    "boston": ("bostonHousing", 506, 13, 20),
    "concrete": ("concrete", 1030, 8, 20),
    "energy": ("energy", 768, 8, 20),
    "kin8nm": ("kin8nm", 8192, 8, 20),
    "naval": ("naval-propulsion-plant", 11934, 16, 20),
    "power": ("power-plant", 9568, 4, 20),
    "protein": ("protein-tertiary-structure", 45730, 9, 5),
    "wine": ("wine-quality-red", 1599, 11, 20),
    "yacht": ("yacht", 308, 6, 20),
}
# name: (N, D, classes or 0)
SKLEARN = {
    "diabetes": (442, 10, 0),
    "breast_cancer": (569, 30, 2),
    "wine": (178, 13, 3),
    "digits": (1797, 64, 10),
}


def published_splits(num_rows, num_splits):
    """The generator of the standard splits: independent of the file that lists them."""
    state = np.random.RandomState(1)
    cut = round(num_rows * 0.9)
    for _ in range(num_splits):
        order = state.choice(num_rows, num_rows, replace=False)
        yield order[:cut], order[cut:]


def sorted_rows(x, y):
    table = np.column_stack([x, y])
    return table[np.lexsort(table.T)]


# -- UCI --------------------


@pytest.mark.data
@pytest.mark.parametrize("name", UCI)
def test_uci_has_the_published_rows_and_splits(name, data_folder):
    file, num_rows, num_features, num_splits = UCI[name]
    with np.load(data_folder / "uci" / f"{file}.npz", allow_pickle=False) as raw:
        x, y = raw["X"], raw["y"]
    assert x.shape == (num_rows, num_features)
    splits = list(published_splits(num_rows, num_splits))
    for split in (0, num_splits - 1):
        data = load_uci(name, split, data_folder)
        train, test = splits[split]
        np.testing.assert_array_equal(data.x_train, x[train])
        np.testing.assert_array_equal(data.y_train, y[train])
        np.testing.assert_array_equal(data.x_test, x[test])
        np.testing.assert_array_equal(data.y_test, y[test])
    assert data.x_train.dtype == data.y_train.dtype == np.float64
    assert (data.name, len(data.feature_names)) == (name, num_features)
    with pytest.raises(IndexError):
        load_uci(name, num_splits, data_folder)


def write_uci(folder, **changes):
    """A yacht file of ten rows and two splits; ``changes`` replace arrays."""
    rng = np.random.default_rng(0)
    order = np.stack([rng.permutation(10), rng.permutation(10)])
    arrays = {"X": rng.normal(size=(10, 3)), "y": rng.normal(size=10)}
    arrays |= {"train_idx": order[:, :8], "test_idx": order[:, 8:]} | changes
    (folder / "uci").mkdir(exist_ok=True)
    path = folder / "uci" / "yacht.npz"
    np.savez(path, **{key: value for key, value in arrays.items() if value is not None})
    return path


@pytest.mark.parametrize(
    ("kind", "tested"),
    [("gap", [3, 4, 5]), ("tail", [0, 1, 8, 9])],
    ids=["middle third", "outer sixths"],
)
def test_gap_and_tail_splits_sort_by_one_input(kind, tested, tmp_path):
    order = np.random.default_rng(1).permutation(10)
    # the row with the smallest value is tested or not by its place
    x = np.stack([np.zeros(10), order], axis=1)
    write_uci(tmp_path, X=x, y=10.0 * order)
    data = load_uci_gap("yacht", 1, kind, tmp_path)
    assert data.x_test[:, 1].tolist() == tested
    assert data.y_test.tolist() == [10 * value for value in tested]
    assert data.x_train[:, 1].tolist() == [
        value for value in range(10) if value not in tested
    ]
    # equal values keep the order of the file
    ties = load_uci_gap("yacht", 0, kind, tmp_path)
    assert ties.y_test.tolist() == (10.0 * order[tested]).tolist()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"test_idx": np.zeros((2, 2), int)}, "no cover of its rows"),
        ({"X": np.full((10, 3), np.nan)}, "'X' has NaN"),
        ({"y": np.array([{}] * 10)}, "allow_pickle=False"),
    ],
)
def test_wrong_arrays_are_refused(changes, message, tmp_path):
    """A leak of test rows, gaps, and objects, which would run code."""
    write_uci(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        load_uci("yacht", 0, tmp_path)


def test_without_data_the_variable_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("NUMPYRO_BNN_DATA", raising=False)
    for folder in (None, tmp_path):
        with pytest.raises(ValueError, match=r"No file 'uci/yacht.*NUMPYRO_BNN_DATA"):
            load_uci("yacht", folder=folder)


def test_standardize_uses_training_rows_only_and_leaves_labels():
    raw = load_sklearn("diabetes")
    raw = replace(
        raw,
        x_train=np.c_[raw.x_train, np.ones(len(raw.x_train))],
        x_test=np.c_[raw.x_test, raw.y_test],
    )
    scaled = standardize(raw)
    np.testing.assert_allclose(scaled.x_train[:, :-1].mean(0), 0, atol=1e-12)
    np.testing.assert_allclose(scaled.x_train[:, :-1].std(0), 1)
    assert (scaled.x_train[:, -1] == 0).all()  # a constant column
    assert scaled.x_scaler.scale[-1] == 1
    assert scaled.y_train.std() == pytest.approx(1)
    np.testing.assert_allclose(
        scaled.y_scaler.inverse(scaled.y_test), raw.y_test, rtol=1e-12
    )
    moved = standardize(replace(raw, x_test=raw.x_test + 1e6, y_test=raw.y_test - 1e6))
    np.testing.assert_array_equal(scaled.x_train, moved.x_train)
    assert scaled.y_scaler.scale_factor == moved.y_scaler.scale_factor
    labeled = load_sklearn("wine")
    scaled = standardize(labeled, targets=False)
    assert scaled.y_train is labeled.y_train
    assert scaled.y_scaler is None
    with pytest.raises(ValueError, match="`targets=False` for class labels"):
        standardize(labeled)


# -- scikit-learn --------------------


@pytest.mark.parametrize("name", SKLEARN)
def test_sklearn_sets_are_cut_into_disjoint_covers(name):
    from sklearn import datasets as sklearn_datasets

    num_rows, num_features, num_classes = SKLEARN[name]
    kwargs = {"scaled": False} if name == "diabetes" else {}
    bunch = getattr(sklearn_datasets, f"load_{name}")(**kwargs)
    data = load_sklearn(name, test_fraction=0.25, seed=3)
    num_test = round(0.25 * num_rows)
    assert data.x_train.shape == (num_rows - num_test, num_features)
    assert data.x_test.shape == (num_test, num_features)
    assert data.x_train.dtype == np.float64
    assert data.y_train.dtype == (np.int32 if num_classes else np.float64)
    assert len(data.feature_names) == num_features
    together = sorted_rows(
        np.r_[data.x_train, data.x_test], np.r_[data.y_train, data.y_test]
    )
    np.testing.assert_array_equal(together, sorted_rows(bunch.data, bunch.target))
    if num_classes:
        assert set(data.y_train) == set(data.y_test) == set(range(num_classes))


# -- images --------------------

# name: (test images, test labels): md5 sums of the original IDX files.
ORIGINALS = {
    "mnist": ("2646ac647ad5339dbf082846283269ea", "27ae3e4e09519cfbb04c329615203637"),
    "fashion_mnist": (
        "8181f5470baa50b63fa0f6fddb340f0a",
        "15d484375f8d13e6eb1aabb0c3f46965",
    ),
}


def as_idx(array):
    """The IDX file of an array of bytes."""
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.tobytes()


@pytest.mark.data
@pytest.mark.parametrize("name", ORIGINALS)
def test_images_are_the_originals(name, data_folder):
    data = load_images(name, data_folder)
    assert (data.x_train.shape, data.x_test.shape) == (
        (60000, 28, 28, 1),
        (10000, 28, 28, 1),
    )
    assert (data.x_test.dtype, data.y_train.dtype) == (np.float32, np.int32)
    assert (data.x_train.min(), data.x_train.max()) == (0, 1)
    # it has test rows only
    assert load_images("kmnist", data_folder).x_train.shape == (
        0,
        28,
        28,
        1,
    )
    pixels = np.rint(data.x_test[..., 0] * 255).astype(np.uint8)
    contents = as_idx(pixels), as_idx(data.y_test.astype(np.uint8))
    assert (
        tuple(hashlib.md5(c, usedforsecurity=False).hexdigest() for c in contents)
        == ORIGINALS[name]
    )
