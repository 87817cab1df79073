"""The border to skpro: a regressor and its predictive distributions under its
interfaces.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from jax.typing import ArrayLike
from sklearn.base import clone
from sklearn.frozen import FrozenEstimator

try:
    from skpro.distributions.base import BaseDistribution
    from skpro.regression.base import BaseProbaRegressor
except ImportError as error:
    raise ImportError('It needs skpro: `pip install "numpyro_bnn[skpro]"`.') from error

from numpyro_bnn._checks import argument_error
from numpyro_bnn.estimators.regressor import Regressor

MEASURES = {"counts": "discrete", "ordered": "discrete", "zeros": "mixed"}
NUM_ENERGY_LEVELS = 32  # of the quantiles over which an energy is integrated


class SkproRegressor(BaseProbaRegressor):
    """A :class:`Regressor` as a probabilistic regressor of skpro.

    :param regressor: a ``Regressor``, of which ``fit`` fits a copy, ``regressor_``; by
        default one with default settings.

    >>> import numpy as np, pandas as pd
    >>> from numpyro_bnn.estimators import Regressor
    >>> from numpyro_bnn.estimators.skpro import SkproRegressor
    >>> X = pd.DataFrame({"x": np.linspace(-1, 1, 40)})
    >>> y = X["x"] + np.random.default_rng(0).normal(0, 0.1, 40)
    >>> forecaster = SkproRegressor(Regressor("adf", widths=(5,), random_state=0))
    >>> forecaster.fit(X, y.to_frame("y")).predict_proba(X[:3]).mean().shape
    (3, 1)
    """

    _tags: ClassVar = {"capability:missing": True, "capability:multioutput": False}

    def __init__(self, regressor: Regressor | None = None) -> None:
        self.regressor = regressor
        super().__init__()

    def _fit(self, X: pd.DataFrame, y: pd.DataFrame) -> "SkproRegressor":
        regressor = Regressor() if self.regressor is None else self.regressor
        if y.shape[1] != 1:
            call, got = "estimators.as_skpro.fit", f"{y.shape[1]} columns"
            instead = "Pass one column of targets, or use `Regressor` itself."
            raise argument_error(call, "y", got, instead)
        self.regressor_ = clone(regressor).fit(_named(X), y.iloc[:, 0])
        return self

    def _predict(self, X: pd.DataFrame) -> pd.DataFrame:
        mean = self.regressor_.predict(_named(X))
        return pd.DataFrame(mean, X.index, self._get_columns("predict"))

    def _predict_proba(self, X: pd.DataFrame) -> "RowDistributions":
        columns = self._get_columns("predict")
        # a clone of the distribution keeps the fit
        regressor = FrozenEstimator(self.regressor_)
        return RowDistributions(regressor, _named(X), index=X.index, columns=columns)

    def _predict_quantiles(
        self, X: pd.DataFrame, alpha: Sequence[float]
    ) -> pd.DataFrame:
        columns = self._get_columns("predict_quantiles", alpha=alpha)
        quantiles = self.regressor_.predict_quantiles(_named(X), alpha)
        return pd.DataFrame(quantiles.T, X.index, columns)

    @classmethod
    def get_test_params(
        cls, parameter_set: str = "default"
    ) -> list[dict[str, Regressor]]:
        """Settings with which skpro checks the class."""
        quick: dict[str, Any] = {"widths": (3,), "num_samples": 10, "random_state": 0}
        mean_field = Regressor("mean_field", effort=0.1, **quick)
        return [{"regressor": Regressor("adf", **quick)}, {"regressor": mean_field}]


def _named(X: pd.DataFrame) -> pd.DataFrame:
    """Rows whose columns have text as names if they had text beside numbers, which
    scikit-learn refuses.
    """
    names = X.columns
    is_mixed = names.inferred_type.startswith("mixed")
    return X.set_axis(names.astype(str), axis=1) if is_mixed else X


class RowDistributions(BaseDistribution):
    """The predictive distributions of rows, as a distribution of skpro: each answer is
    that of the regressor, at the rows.

    Draws are joint: all rows of a sample have the same weights.

    :param regressor: a fitted :class:`Regressor`; ``rows``: its new rows, a frame.
    :param index: names of the rows, ``columns``: of the target; none of both for the
        distribution of a single number.

    >>> import numpy as np, pandas as pd
    >>> from numpyro_bnn.estimators import Regressor
    >>> from numpyro_bnn.estimators.skpro import RowDistributions
    >>> X = pd.DataFrame({"x": np.linspace(-1, 1, 40)})
    >>> y = X["x"] + np.random.default_rng(0).normal(0, 0.1, 40)
    >>> fitted = Regressor("adf", widths=(5,), random_state=0).fit(X, y)
    >>> RowDistributions(fitted, X[:3], index=X.index[:3], columns=["y"]).ppf(0.5).shape
    (3, 1)
    """

    _tags: ClassVar = {
        "distr:paramtype": "nonparametric",
        "capabilities:approx": ["energy", "pdfnorm"],
        "capabilities:exact": [
            *("mean", "var", "pdf", "log_pdf", "pmf", "log_pmf", "cdf", "ppf"),
        ],
    }

    def __init__(
        self,
        regressor: Regressor,
        rows: pd.DataFrame,
        index: pd.Index | None = None,
        columns: Sequence | None = None,
    ) -> None:
        self.regressor = regressor
        self.rows = rows
        super().__init__(index=index, columns=columns)
        self._measure = MEASURES.get(regressor.attrs_["target"], "continuous")
        self.set_tags(**{"distr:measuretype": self._measure})

    def _subset_params(
        self, rowidx: ArrayLike, colidx: object, coerce_scalar: bool = False
    ) -> dict[str, object]:
        rows = self.rows
        if rowidx is not None:
            rows = rows.iloc[[rowidx] if np.isscalar(rowidx) else rowidx]
        return {"regressor": self.regressor, "rows": rows}

    def _by_row(self, answer: Callable, *values: np.ndarray) -> np.ndarray:
        """An answer of the regressor to the rows and values of this shape."""
        columns = [np.reshape(value, len(self.rows)) for value in values]
        return np.reshape(answer(self.rows, *columns), self.shape)

    def _mean(self) -> np.ndarray:
        return self._by_row(self.regressor.predict)

    def _var(self) -> np.ndarray:
        return self._by_row(lambda rows: sum(self.regressor.uncertainty(rows)))

    def _cdf(self, x: np.ndarray) -> np.ndarray:
        return self._by_row(self.regressor.cdf, x)

    def _ppf(self, p: np.ndarray) -> np.ndarray:
        levels, place = np.unique(p, return_inverse=True)
        place = np.broadcast_to(place.reshape(-1), len(self.rows))
        quantiles = np.empty(len(self.rows))
        for number, level in enumerate(levels):
            has_level = place == number
            (answer,) = self.regressor.predict_quantiles(self.rows[has_level], [level])
            quantiles[has_level] = answer
        return quantiles.reshape(self.shape)

    def _pdf(self, x: np.ndarray) -> np.ndarray:
        return np.exp(self._log_pdf(x))

    def _log_pdf(self, x: np.ndarray) -> np.ndarray:
        return self._log_density(x, (x != 0) | (self._measure != "mixed"))

    def _pmf(self, x: np.ndarray) -> np.ndarray:
        return np.exp(self._log_pmf(x))

    def _log_pmf(self, x: np.ndarray) -> np.ndarray:
        return self._log_density(x, (x == 0) | (self._measure != "mixed"))

    def _log_density(self, x: np.ndarray, counted: np.ndarray) -> np.ndarray:
        """Log densities or probabilities, where those of x are counted."""
        log_density = self._by_row(self.regressor.log_predictive_density, x)
        return np.where(counted, log_density, -np.inf)

    def _energy_self(self) -> np.ndarray:
        # E|X - X'| is the integral of (4 p - 2) Q(p) over probabilities p
        nodes, weights = np.polynomial.legendre.leggauss(NUM_ENERGY_LEVELS)
        quantiles = self.regressor.predict_quantiles(self.rows, (1 + nodes) / 2)
        return (weights * nodes @ quantiles).reshape(self.shape)

    def _energy_x(self, x: np.ndarray) -> np.ndarray:
        # so that skpro's CRPS is the one of the regressor
        return self._by_row(self.regressor.crps, x) + self._energy_self() / 2

    def _sample(self, n_samples: int | None = None) -> pd.DataFrame | float:
        draws = self.regressor.sample(self.rows, n_samples or 1)
        if self.ndim == 0:
            return draws[0, 0] if n_samples is None else pd.DataFrame(draws)
        index = self.index
        if n_samples is not None:
            index = pd.concat([index.to_frame()] * n_samples, keys=range(n_samples))
            index = index.index
        return pd.DataFrame(draws.reshape(-1, 1), index=index, columns=self.columns)
