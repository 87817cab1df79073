"""Real data for demos, tests and benchmarks; the package itself contains none.

Tabular arrays stay float64 (a model casts them to its own dtype), images are float32 (N, H, W, channel)
in [0, 1], class labels int32. The sets from scikit-learn need ``pip install "numpyro_bnn[examples]"``; all
others are read from a folder, given as ``folder=`` or by the environment variable ``NUMPYRO_BNN_DATA``, with the
files ``uci/<file>.npz``, ``california_housing.npz``, ``image/<name>.npz`` and ``extra/neal_fbm.npz``.
"""

from numpyro_bnn.datasets.dataset import Dataset, Scaler, standardize
from numpyro_bnn.datasets.loaders import load_california, load_images, load_neal, load_sklearn, load_uci

__all__ = [
    "Dataset",
    "Scaler",
    "standardize",
    "load_sklearn",
    "load_uci",
    "load_california",
    "load_neal",
    "load_images",
]
