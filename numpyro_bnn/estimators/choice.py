"""Which kind of targets a table has: `target="auto"`."""

from typing import Any

import numpy as np
from scipy import stats
from scipy.optimize import minimize_scalar
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor

from numpyro_bnn.estimators import methods
from numpyro_bnn.estimators.targets import TARGETS, Continuous, Noise

MIN_ROWS, MAX_ROWS = 100, 2000  # below, "continuous"; above, a part of the rows
# What is taken for frequent zeros, counts, levels, skewness.
MIN_ZERO_SHARE, MIN_ZEROS = 0.05, 10
MAX_COUNT_SD, MAX_LIKELY_LEVELS, MIN_SKEWNESS = 50.0, 10, 1.0
NUM_TREES, MIN_ROWS_OF_LEAF = 100, 5
LEVEL_SHARE = 0.02  # of the probabilities of levels, whatever a forest says
MIN_DF = 2.0
LEAST_ERROR = 0.05  # in standard deviations of all errors, where sizes are compared
LOG_CONCENTRATIONS = (-5.0, 8.0)


def chosen(
    X: np.ndarray,
    y: np.ndarray,
    weight: np.ndarray | None,
    noise: Noise,
    method: str,
    seed: int,
) -> tuple[str, str]:
    """The kind of targets (N,), and why, if there was a choice.

    Of several candidates the one is taken under which rows that are out of the bag of a
    random forest are most probable: the forest says the mean on the scale of the
    candidate, and all rows have the same noise there. Another kind than "continuous"
    must gain more than the standard error. Where a candidate has probabilities, those
    of the others are integrals of their densities.

    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(200, 1))
    >>> y = np.exp(X[:, 0] + rng.normal(size=200))
    >>> chosen(X, y, None, Noise(None, None, None, 0.0), "ensemble", 0)[0]
    'positive'
    """
    names = _candidates(y, noise, method)
    if "zeros" in names:
        return "zeros", "since exact zeros, which have no density, are frequent"
    if not names:
        return "continuous", ""
    if len(y) > MAX_ROWS:
        rows = np.random.default_rng(seed).permutation(len(y))[:MAX_ROWS]
        X, y = X[rows], y[rows]
        weight = None if weight is None else weight[rows]
    step = 0.0
    if {"counts", "ordered"} & set(names):
        step = float(np.diff(np.unique(y)).min() / 2)
    look = _Look(X, y, weight, step, seed)
    scores = {name: look.score(name, noise) for name in ["continuous", *names]}
    gains = {name: scores[name] - scores["continuous"] for name in names}
    best = max(gains, key=lambda name: look.mean(gains[name]))
    gain = look.mean(gains[best])
    error = np.sqrt(look.mean((gains[best] - gain) ** 2) / len(y))
    if gain > error:
        return best, f"{gain:.2g} nats a row better than continuous in a quick look"
    return "continuous", f"as good as {', '.join(names)} in a quick look"


def _candidates(y: np.ndarray, noise: Noise, method: str) -> list[str]:
    """Kinds that may describe targets better than "continuous" does."""
    names = []
    for name in _likely(y, noise.bounds):
        kind = TARGETS[name]
        fits = kind.is_normal or method in methods.HEAVY_TAILS
        fits &= kind.may_have_heavy_tails or not noise.heavy_tails
        fits &= kind.may_be_heteroscedastic or not noise.heteroscedastic
        if fits and kind.misfit(y, noise.bounds) is None:
            names.append(name)
    return names


def _likely(y: np.ndarray, bounds: Any) -> list[str]:
    if y.ndim > 1 or len(y) < MIN_ROWS or np.ptp(y) == 0:
        return []
    if bounds is not None:
        return ["bounded"]
    number = len(np.unique(y))
    names = ["ordered"] if number <= MAX_LIKELY_LEVELS else []
    lowest, zeros = y.min(), np.sum(y == 0)
    if lowest >= 0 and np.all(y == np.round(y)) and y.std() < MAX_COUNT_SD:
        # two values are no counts
        return [*names, "counts"] if number > 2 else names
    if names:
        return names
    if lowest >= 0 and zeros >= max(MIN_ZEROS, MIN_ZERO_SHARE * len(y)):
        return ["zeros"]
    skewed = lowest > 0 and stats.skew(y) > MIN_SKEWNESS
    if skewed and stats.skew(y) > abs(stats.skew(np.log(y))):
        return ["positive"]
    return []


class _Look:
    """Log densities of rows out of the bag.

    :param step: half width of the interval of a probability, 0 for densities.
    """

    def __init__(
        self,
        X: np.ndarray,
        y: np.ndarray,
        weight: np.ndarray | None,
        step: float,
        seed: int,
    ) -> None:
        self._X, self._y, self._weight = X, y, weight
        self._step = step
        self._settings: dict[str, Any] = {
            "n_estimators": NUM_TREES,
            "min_samples_leaf": MIN_ROWS_OF_LEAF,
            "max_features": 0.5,
            "oob_score": True,
            "random_state": seed,
        }

    def mean(self, values: np.ndarray) -> float:
        return float(np.average(values, weights=self._weight))

    def score(self, name: str, noise: Noise) -> np.ndarray:
        """Log densities (N,) under a kind of targets."""
        if name == "counts":
            return self._counts()
        if name == "ordered":
            return self._ordered()
        return self._transformed(TARGETS[name], noise)

    def _forest(self, targets: np.ndarray) -> np.ndarray:
        forest = RandomForestRegressor(**self._settings)
        return forest.fit(self._X, targets, self._weight).oob_prediction_

    def _transformed(self, kind: type[Continuous], noise: Noise) -> np.ndarray:
        scale = kind.of_bounds(noise.bounds)
        u = scale.forward(self._y)
        predicted = self._forest(u)
        error = u - predicted
        size = np.ones(len(u))
        if noise.heteroscedastic is not False:
            least = LEAST_ERROR * error.std()
            size = np.exp(self._forest(np.log(np.abs(error) + least)))
        heavy = kind.may_have_heavy_tails and noise.heavy_tails is not False
        residual = _fitted_noise(error / size, heavy)
        if not self._step:
            density = residual.logpdf(error / size) - np.log(size)
            return density + scale.log_slope(u)
        with np.errstate(divide="ignore", invalid="ignore"):
            ends = [scale.forward(self._y + side * self._step) for side in (-1, 1)]
        low, high = (np.nan_to_num(end, nan=-np.inf) - predicted for end in ends)
        low, high = low / size, high / size
        mass = residual.cdf(high) - residual.cdf(low)
        return np.log(np.maximum(mass, np.finfo(float).tiny))

    def _counts(self) -> np.ndarray:
        means = np.maximum(self._forest(self._y), 1 / len(self._y))

        def log_mass(log_concentration: float) -> np.ndarray:
            concentration = np.exp(log_concentration)
            success = concentration / (concentration + means)
            return stats.nbinom.logpmf(self._y, concentration, success)

        found = minimize_scalar(
            lambda log: -self.mean(log_mass(log)),
            bounds=LOG_CONCENTRATIONS,
            method="bounded",
        )
        return log_mass(found.x)

    def _ordered(self) -> np.ndarray:
        _, codes, counts = np.unique(self._y, return_inverse=True, return_counts=True)
        forest = RandomForestClassifier(**self._settings)
        forest.fit(self._X, codes, self._weight)
        shares = counts / counts.sum()
        probs = forest.oob_decision_function_
        probs = LEVEL_SHARE * shares + (1 - LEVEL_SHARE) * probs
        return np.log(probs[np.arange(len(codes)), codes])


def _fitted_noise(errors: np.ndarray, heavy_tails: bool) -> Any:
    """A normal, or Student's t with a variance, that fits errors best."""
    if not heavy_tails or errors.std() == 0:
        return stats.norm(errors.mean(), max(errors.std(), methods.MIN_SD))
    df, loc, scale = stats.t.fit(errors)
    return stats.t(max(df, MIN_DF), loc, scale)
