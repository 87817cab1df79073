"""The temperature band against SciPy's quantiles."""

import numpy as np
import pytest
from scipy import stats

from numpyro_bnn import infer

pytestmark = pytest.mark.core


@pytest.mark.parametrize("size", [3, 20, 500, 10_000])
@pytest.mark.parametrize("level", [0.5, 0.95])
def test_band_is_the_one_of_chi_squared(size, level):
    exact = 0.5 * stats.chi2.ppf([0.5 - level / 2, 0.5 + level / 2], size) / size
    # Wilson and Hilferty's cube root is good to about 0.02 / P on this scale.
    np.testing.assert_allclose(infer.temperature_band(size, 0.5, level), exact, atol=0.05 / size)


def test_bad_band_is_refused():
    with pytest.raises(ValueError, match="temperature_band"):
        infer.temperature_band(0)
    with pytest.raises(ValueError, match="level"):
        infer.temperature_band(5, level=1.0)
