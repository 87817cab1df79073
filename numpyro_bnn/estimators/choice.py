"""Which kind of targets a table has: `target="auto"`."""

from typing import Any

import numpy as np
from scipy import stats
from scipy.optimize import minimize_scalar
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor

from numpyro_bnn.datasets import Scaler
from numpyro_bnn.estimators import methods
from numpyro_bnn.estimators.targets import TARGETS, NoiseSettings

MIN_ROWS, MAX_ROWS = 100, 2000  # below, "continuous"; above, a part of the rows
# What is taken for frequent zeros, counts, levels, skewness.
MIN_ZERO_SHARE, MIN_ZEROS = 0.05, 10
MAX_COUNT_SD, MAX_LIKELY_LEVELS, MIN_SKEWNESS = 50.0, 10, 1.0
MIN_ROWS_OF_LEVEL = 5  # fewer, and new rows may have another level
# What another kind must gain, in standard errors, and how much of its probability
# "continuous" must give to impossible values.
MIN_GAIN, MIN_IMPOSSIBLE = 2.0, 0.01
NUM_TREES, MIN_ROWS_OF_LEAF = 100, 5
LEVEL_SHARE = 0.02  # of the probabilities of levels, whatever a forest says
MIN_DF = 2.0
LEAST_ERROR = 0.05  # in standard deviations of all errors, where sizes are compared
LOG_CONCENTRATIONS = (-5.0, 8.0)


def chosen(
    X: np.ndarray,
    y: np.ndarray,
    weight: np.ndarray | None,
    noise: NoiseSettings,
    method: str,
    seed: int,
) -> tuple[str, str]:
    """The kind of targets (N,), and why, if there was a choice.

    Candidates are compared with "continuous" by the probability of rows that are out of
    the bag of a random forest, which says the mean on the scale of the candidate.
    Another kind must gain clearly more than the standard error. A forest takes a steep
    mean for noise that grows with it: "positive" and "counts" must also be needed, as
    normal noise would often be below zero. Where a candidate has probabilities, those
    of "continuous" are integrals of its density.

    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(200, 1))
    >>> y = np.exp(X[:, 0] + rng.normal(size=200))
    >>> chosen(X, y, None, NoiseSettings(None, None, None, 0.0), "ensemble", 0)[0]
    'positive'
    """
    if noise.bounds is not None:
        return "bounded", "since it has bounds"
    names = _candidates(y, noise, method)
    if not names:
        return "continuous", ""
    has_zeros = names == ["zeros"]
    if has_zeros:  # amounts only, whose log is to be normal
        X, y, weight = _part(X, y, weight, np.flatnonzero(y > 0))
        names = ["positive"]
    half_gap = 0.0
    if names != ["positive"]:
        half_gap = float(np.diff(np.unique(y)).min() / 2)
    if len(y) > MAX_ROWS:
        rows = np.random.default_rng(seed).permutation(len(y))[:MAX_ROWS]
        X, y, weight = _part(X, y, weight, rows)
    look = _Look(X, y, weight, noise, seed)
    plain, impossible = look.plain(half_gap)
    gains = {name: look.log_density(name) - plain for name in names}
    best = max(gains, key=lambda name: look.mean(gains[name]))
    gain, error = look.mean_and_error(gains[best])
    if has_zeros:
        if gain < -error:
            why = "as the log of the amounts beside its zeros is far from normal"
            return "continuous", why
        return "zeros", "since exact zeros, which have no density, are frequent"
    if gain > MIN_GAIN * error and (best == "ordered" or impossible > MIN_IMPOSSIBLE):
        return best, f"{gain:.2g} nats a row better than continuous in a quick look"
    return "continuous", f"not clearly {' or '.join(names)} in a quick look"


def _part(X: np.ndarray, y: np.ndarray, weight: np.ndarray | None, rows: Any) -> tuple:
    return X[rows], y[rows], None if weight is None else weight[rows]


def _candidates(y: np.ndarray, noise: NoiseSettings, method: str) -> list[str]:
    """Kinds that may describe targets better than "continuous" does."""
    names = []
    for name in _likely(y):
        kind = TARGETS[name]
        fits = kind.is_normal or method in methods.ANY_LIKELIHOOD
        fits &= kind.may_have_heavy_tails or not noise.heavy_tails
        fits &= kind.may_be_heteroscedastic or not noise.heteroscedastic
        if fits:
            names.append(name)
    return names


def _likely(y: np.ndarray) -> list[str]:
    if y.ndim > 1 or len(y) < MIN_ROWS or np.ptp(y) == 0:
        return []
    levels, counts = np.unique(y, return_counts=True)
    is_ordered = len(levels) <= MAX_LIKELY_LEVELS and counts.min() >= MIN_ROWS_OF_LEVEL
    names = ["ordered"] if is_ordered else []
    lowest, zeros = levels[0], np.sum(y == 0)
    if lowest >= 0 and np.all(y == np.round(y)) and y.std() < MAX_COUNT_SD:
        # two values are no counts
        return [*names, "counts"] if len(levels) > 2 else names
    if names:
        return names
    if lowest >= 0 and zeros >= max(MIN_ZEROS, MIN_ZERO_SHARE * len(y)):
        return ["zeros"] if np.sum(y > 0) >= MIN_ROWS / 2 else []
    skewed = lowest > 0 and stats.skew(y) > MIN_SKEWNESS
    if skewed and stats.skew(y) > abs(stats.skew(np.log(y))):
        return ["positive"]
    return []


class _Look:
    """Log densities of rows out of the bag."""

    def __init__(
        self,
        X: np.ndarray,
        y: np.ndarray,
        weight: np.ndarray | None,
        noise: NoiseSettings,
        seed: int,
    ) -> None:
        self._X = Scaler.fit(X).transform(X)  # trees have float32
        self._y, self._noise = y, noise
        self._weight = np.ones(len(y)) if weight is None else weight
        self._settings: dict[str, Any] = {
            "n_estimators": NUM_TREES,
            "min_samples_leaf": MIN_ROWS_OF_LEAF,
            "max_features": 0.5,
            "oob_score": True,
            "random_state": seed,
        }

    def mean(self, values: np.ndarray) -> float:
        return float(np.average(values, weights=self._weight))

    def mean_and_error(self, values: np.ndarray) -> tuple[float, float]:
        mean = self.mean(values)
        variance = self.mean((values - mean) ** 2)
        shares = self._weight / self._weight.sum()
        return mean, float(np.sqrt(variance * np.sum(shares**2)))

    def plain(self, half_gap: float) -> tuple[np.ndarray, float]:
        """Under "continuous": log densities (N,), or log probabilities of the intervals
        around targets, and the mean probability of less than zero.
        """
        predicted, size, residual = self._fitted(self._y, True)

        def below(value: Any) -> np.ndarray:
            return residual.cdf((value - predicted) / size)

        impossible = self.mean(below(-half_gap))
        if half_gap == 0:
            unit = (self._y - predicted) / size
            return residual.logpdf(unit) - np.log(size), impossible
        mass = below(self._y + half_gap) - below(self._y - half_gap)
        return np.log(np.maximum(mass, np.finfo(float).tiny)), impossible

    def log_density(self, name: str) -> np.ndarray:
        """Log densities or probabilities (N,) under another kind of targets."""
        if name == "counts":
            return self._counts()
        if name == "ordered":
            return self._ordered()
        logs = np.log(self._y)
        predicted, size, residual = self._fitted(logs, False)
        return residual.logpdf((logs - predicted) / size) - np.log(size) - logs

    def _forest(self, values: np.ndarray) -> np.ndarray:
        scaler = Scaler.fit(values)  # trees do not split tiny numbers
        forest = RandomForestRegressor(**self._settings)
        forest.fit(self._X, scaler.transform(values), self._weight)
        return scaler.inverse(forest.oob_prediction_)

    def _fitted(self, values: np.ndarray, may_have_heavy_tails: bool) -> tuple:
        """Predictions (N,), sizes of their errors (N,), and a distribution of errors in
        these.
        """
        predicted = self._forest(values)
        error = values - predicted
        least = methods.MIN_SD * float(values.std() or 1.0)
        size = np.full(len(error), max(error.std(), least))
        if error.std() < least:  # exact
            return predicted, size, stats.norm()
        if self._noise.heteroscedastic is not False:
            size = np.exp(self._forest(np.log(np.abs(error) + LEAST_ERROR * size)))
        unit = error / size
        if may_have_heavy_tails and self._noise.heavy_tails is not False:
            df, loc, scale = stats.t.fit(unit)
            return predicted, size, stats.t(max(df, MIN_DF), loc, scale)
        return predicted, size, stats.norm(unit.mean(), unit.std())

    def _counts(self) -> np.ndarray:
        means = np.maximum(self._forest(self._y), 1 / len(self._y))

        def log_mass(log_concentration: float) -> np.ndarray:
            concentration = np.exp(log_concentration)
            success = concentration / (concentration + means)
            return stats.nbinom.logpmf(self._y, concentration, success)

        optimum = minimize_scalar(
            lambda log: -self.mean(log_mass(log)),
            bounds=LOG_CONCENTRATIONS,
            method="bounded",
        )
        return log_mass(optimum.x)

    def _ordered(self) -> np.ndarray:
        _, codes, counts = np.unique(self._y, return_inverse=True, return_counts=True)
        forest = RandomForestClassifier(**self._settings)
        forest.fit(self._X, codes, self._weight)
        shares = counts / counts.sum()
        probs = forest.oob_decision_function_
        probs = LEVEL_SHARE * shares + (1 - LEVEL_SHARE) * probs
        return np.log(probs[np.arange(len(codes)), codes])
