"""Scaling of data: exact inverses, columns that do not vary, any units."""

import numpy as np
import pytest
from numpy.testing import assert_allclose as close
from sklearn.preprocessing import StandardScaler

from numpyro_bnn.datasets import Scaler


def test_scaler_agrees_with_scikit_learn():
    rng = np.random.default_rng(1)
    train = rng.normal([3, -40, 0.01], [2, 1e-3, 70], (50, 3))
    test = rng.normal(size=(20, 3))
    ours, theirs = Scaler.fit(train), StandardScaler().fit(train)
    close(ours.mean, theirs.mean_, rtol=1e-13)
    close(ours.scale_factor, theirs.scale_, rtol=1e-12)
    close(ours.transform(test), theirs.transform(test), rtol=1e-9)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rounding_is_constant_but_small_variation_is_not(dtype):
    rng = np.random.default_rng(2)
    eps = np.finfo(dtype).eps
    column = dtype(0.3) * (1 + dtype(eps) * rng.integers(0, 2, 400).astype(dtype))
    real = (1 + 1e4 * eps * rng.normal(size=400)).astype(dtype)
    assert len(np.unique(column)) == 2
    scaler = Scaler.fit(np.stack([column, real], axis=1))
    scaled = scaler.transform(np.stack([column, real], axis=1))
    assert scaler.scale[0] == 1
    assert np.abs(scaled[:, 0]).max() < 2 * eps  # not blown up to +-1
    assert abs(scaled[:, 1].std() - 1) < 1e-3


@pytest.mark.parametrize("value", [0.0, 0.1, -1e300, 1e-310, 7])
def test_constant_column_is_centered_exactly(value):
    train = np.full(37, value)
    scaler = Scaler.fit(train)
    assert (scaler.transform(train) == 0).all()
    assert (scaler.scale_factor, type(scaler.scale_factor)) == (1.0, float)
    assert (scaler.inverse(np.zeros(3)) == value).all()


def test_inverse_serves_draws_of_any_rank_and_keeps_dtype():
    rng = np.random.default_rng(3)
    target = Scaler.fit(rng.normal(5, 3, 30))
    inputs = Scaler.fit(rng.normal(5, 3, (30, 4)))
    draws = rng.normal(size=(2, 5, 7)).astype(np.float32)  # (C, S, N)
    assert target.inverse(draws).dtype == np.float32
    close(
        target.transform(target.inverse(draws)), draws, atol=2e-6
    )  # 5 eps |y| / scale
    assert inputs.inverse(np.zeros((2, 5, 7, 4))).shape == (2, 5, 7, 4)
    assert inputs.transform(np.arange(4)).dtype == np.float64
    for method, argument in ((inputs.transform, "x"), (inputs.inverse, "z")):
        with pytest.raises(
            ValueError,
            match=rf"argument `{argument}` got shape \(4, 3\).* ends in \(4,\)",
        ):
            method(np.zeros((4, 3)))
    with pytest.raises(ValueError, match=r"got shape \(\)"):
        inputs.transform(1.0)


@pytest.mark.parametrize("exponent", [-1000, 532])
def test_units_do_not_matter(exponent):
    """Powers of two from 1e-301 to 1e301: the same to the last bit."""
    values = np.random.default_rng(5).normal(3, 2, (20, 3))
    expected = Scaler.fit(values).transform(values)
    scaled = np.ldexp(values, exponent)
    np.testing.assert_array_equal(Scaler.fit(scaled).transform(scaled), expected)


@pytest.mark.parametrize(
    "train", [1.0, np.zeros((0, 3)), [1.0, np.nan], [np.inf, 1.0], [1.7e308, -1.7e308]]
)
def test_scaler_refuses_what_has_no_statistics(train):
    with pytest.raises(ValueError, match=r"^Scaler\.fit: argument `train`"):
        Scaler.fit(train)
