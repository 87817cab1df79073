"""Loaders of the examples: test rows are in no training set, and scale nothing."""

from dataclasses import replace

import numpy as np
import pytest

from examples.loaders import load_sklearn, load_uci, standardize

# name: (N, D, classes or 0)
SKLEARN = {"diabetes": (442, 10, 0), "wine": (178, 13, 3)}


def sorted_rows(x, y):
    table = np.column_stack([x, y])
    return table[np.lexsort(table.T)]


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
