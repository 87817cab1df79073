"""The sets that scikit-learn ships with its wheels, so they need neither a folder nor a network."""

import numpy as np

from numpyro_bnn._checks import unknown_name
from numpyro_bnn.datasets.dataset import Dataset, random_split

__all__ = ["load_sklearn"]

# Name -> arguments of scikit-learn's loader. By default it scales diabetes by all rows, test rows included.
_SETS: dict[str, dict[str, bool]] = {
    "diabetes": {"scaled": False},
    "breast_cancer": {},
    "wine": {},
    "digits": {},
}


def load_sklearn(name: str, test_fraction: float = 0.2, seed: int = 0) -> Dataset:
    """Load one of the sets that scikit-learn ships, cut at random into training and test rows.

    :param name: ``"diabetes"`` (regression, D = 10, in original units), ``"breast_cancer"`` (K = 2, D = 30),
        ``"wine"`` (K = 3, D = 13) or ``"digits"`` (K = 10, D = 64 pixels from 0 to 16).
    :param test_fraction: share of the rows kept for testing, between 0 and 1; not stratified by class.
    :param seed: seed of the cut.
    :return: a :class:`Dataset`; inputs (N, D) float64, targets (N,) float64 or int32 labels.
    :raises ValueError: for an unknown name, a fraction that leaves a side empty, or a bad seed.
    :raises ImportError: where scikit-learn is not installed.

    **Example**

    >>> from numpyro_bnn.datasets import load_sklearn
    >>> data = load_sklearn("diabetes", test_fraction=0.1)
    >>> data.x_train.shape, data.x_test.shape, data.feature_names[:3]
    ((398, 10), (44, 10), ('age', 'sex', 'bmi'))
    """
    if name not in _SETS:
        raise unknown_name("load_sklearn", "name", name, _SETS)
    try:
        from sklearn import datasets as sklearn_datasets
    except ImportError as error:
        message = 'load_sklearn: scikit-learn is missing. Run `pip install "numpyro_bnn[examples]"`.'
        raise ImportError(message) from error
    bunch = getattr(sklearn_datasets, f"load_{name}")(**_SETS[name])
    x = np.asarray(bunch.data, np.float64)
    y = np.asarray(bunch.target, np.float64 if name == "diabetes" else np.int32)
    names = tuple(str(feature) for feature in bunch.feature_names)
    return random_split("load_sklearn", name, x, y, names, test_fraction, seed)
