"""Real data for demos, tests and benchmarks; the package ships none of it.

Tabular arrays stay float64 (a model casts them to its own dtype), images are float32 (N, H, W, channel)
in [0, 1], class labels int32. Sets that scikit-learn ships need ``pip install "numpyro_bnn[examples]"``; all
others are read from a folder, named by ``folder=`` or by the environment variable ``NUMPYRO_BNN_DATA``, laid
out as ``uci/<file>.npz``, ``california_housing.npz``, ``image/<name>.npz`` and ``extra/neal_fbm.npz``.
"""

from numpyro_bnn.datasets.bundled import load_sklearn
from numpyro_bnn.datasets.dataset import Dataset
from numpyro_bnn.datasets.idx import load_idx
from numpyro_bnn.datasets.images import load_images
from numpyro_bnn.datasets.scaling import Scaler, standardize
from numpyro_bnn.datasets.tabular import load_california, load_neal, load_uci

__all__ = [
    "Dataset",
    "Scaler",
    "standardize",
    "load_sklearn",
    "load_uci",
    "load_california",
    "load_neal",
    "load_images",
    "load_idx",
]
