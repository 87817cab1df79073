"""Estimators for scikit-learn: ``fit`` and ``predict`` over the models, kernels and
guides of this package.
"""

try:
    import sklearn as _sklearn  # noqa: F401
except ImportError as error:
    raise ImportError(
        'It needs scikit-learn: `pip install "numpyro_bnn[estimators]"`.'
    ) from error

from numpyro_bnn.estimators.classifier import Classifier
from numpyro_bnn.estimators.inside import as_skpro, inside
from numpyro_bnn.estimators.network import Uncertainty
from numpyro_bnn.estimators.regressor import Regressor

__all__ = ["Regressor", "Classifier", "Uncertainty", "inside", "as_skpro"]
