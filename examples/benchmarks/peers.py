"""What people take for a table of numbers and text: for `examples.benchmarks.tables`.

A method learns from a frame and its targets, and returns a function of new rows. Its
answer is a forecast of numbers, or class probabilities (N, K). CatBoost and LightGBM
get the frame as it is; the others get text as switches, gaps as the median with a
switch, and standardized columns. Targets are standardized for all. Boosting runs on one
thread.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from examples.shared import early_stopped

__all__ = ["PEERS", "Method", "NormalMixture", "Quantiles"]

Fit = Callable[..., Callable[[Any], Any]]

MEMBERS = 5  # of ensembles, and parts of which each leaves out one
MAX_TREES, PATIENCE = 2000, 50
DEPTHS = (3, 6)
LEVELS = np.arange(0.05, 1.0, 0.1)  # midpoints of ten parts of (0, 1)
HELD_OUT = 0.2
LEAST_SD = 0.01  # of the noise of a deep ensemble, in standard deviations of the target
ROWS_OF_KERNEL = 500  # from which a Gaussian process learns its kernel
ENSEMBLE_STEPS = 2000


class Method(NamedTuple):
    """A function for each task, ``None`` if there is none.

    :param package: what pip installs for it.
    """

    regression: Fit | None
    classification: Fit | None = None
    package: str = ""


# -- forecasts -------------------------------------------------------------------------


class NormalMixture(NamedTuple):
    """The mean of M normal densities, by row: their means and sds (M, N)."""

    means: np.ndarray
    sds: np.ndarray

    def scaled(self, center: float, scale: float) -> "NormalMixture":
        return NormalMixture(center + scale * self.means, scale * self.sds)

    def point(self) -> np.ndarray:
        return self.means.mean(0)

    def log_density(self, y: np.ndarray) -> np.ndarray:
        from scipy import special, stats

        log_densities = stats.norm.logpdf(y, self.means, self.sds)
        return special.logsumexp(log_densities, axis=0) - np.log(len(self.means))

    def cdf(self, y: np.ndarray) -> np.ndarray:
        from scipy import stats

        return stats.norm.cdf(y, self.means, self.sds).mean(0)

    def crps(self, y: np.ndarray) -> np.ndarray:
        """E|X - y| - E|X - X'| / 2 (Grimit et al. 2006, equation 5)."""
        apart = self.means[:, None] - self.means
        sds = np.sqrt(self.sds[:, None] ** 2 + self.sds**2)
        distance = _mean_absolute(self.means - y, self.sds).mean(0)
        return distance - _mean_absolute(apart, sds).mean((0, 1)) / 2

    def interval(self, level: float) -> tuple[np.ndarray, np.ndarray]:
        low, high = (self._quantile((1 + sign * level) / 2) for sign in (-1, 1))
        return low, high

    def _quantile(self, level: float) -> np.ndarray:
        """By bisection between the quantiles of all components."""
        from scipy import stats

        ends = self.means + stats.norm.ppf(level) * self.sds
        low, high = ends.min(0), ends.max(0)
        for _ in range(60):
            middle = (low + high) / 2
            is_below = self.cdf(middle) < level
            low, high = (
                np.where(is_below, middle, low),
                np.where(is_below, high, middle),
            )
        return (low + high) / 2


def _mean_absolute(mean: np.ndarray, sd: np.ndarray) -> np.ndarray:
    """E|Z| of a normal variable."""
    from scipy import stats

    unit = mean / sd
    return mean * (2 * stats.norm.cdf(unit) - 1) + 2 * sd * stats.norm.pdf(unit)


class Quantiles(NamedTuple):
    """Quantiles (10, N) at ``LEVELS``, and intervals of their own.

    There is no density.
    """

    values: np.ndarray
    low: np.ndarray
    high: np.ndarray

    def scaled(self, center: float, scale: float) -> "Quantiles":
        return Quantiles(*(center + scale * part for part in self))

    def point(self) -> np.ndarray:
        return self.values.mean(0)

    def log_density(self, y: np.ndarray) -> None:
        return None

    def crps(self, y: np.ndarray) -> np.ndarray:
        """Twice the mean quantile loss."""
        error = y - self.values
        level = LEVELS[:, None]
        return 2 * np.maximum(level * error, (level - 1) * error).mean(0)

    def interval(self, level: float) -> tuple[np.ndarray, np.ndarray]:
        return self.low, self.high


def standardized(fit: Fit) -> Fit:
    """Learn standardized targets, and answer in their units."""

    def fit_scaled(x: Any, y: np.ndarray, seed: int) -> Callable[[Any], Any]:
        center, scale = y.mean(), y.std() or 1.0
        predict = fit(x, (y - center) / scale, seed)
        return lambda x_new: predict(x_new).scaled(center, scale)

    return fit_scaled


# -- inputs ----------------------------------------------------------------------------


def numbers_of(x: Any) -> Callable[[Any], np.ndarray]:
    """Learn from a frame how frames become standardized numbers."""
    from sklearn.compose import ColumnTransformer, make_column_selector
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    switches = OneHotEncoder(
        min_frequency=0.01, handle_unknown="infrequent_if_exist", sparse_output=False
    )
    gaps = SimpleImputer(strategy="median", add_indicator=True)
    by_kind = ColumnTransformer(
        [
            ("text", switches, make_column_selector(dtype_exclude="number")),
            ("numbers", gaps, make_column_selector(dtype_include="number")),
        ]
    )
    pipeline = make_pipeline(by_kind, StandardScaler()).fit(without_gaps_in_text(x))
    return lambda frame: pipeline.transform(without_gaps_in_text(frame))


def without_gaps_in_text(x: Any) -> Any:
    names = x.select_dtypes(exclude="number").columns
    return x.assign(**{name: x[name].astype(object).fillna("?") for name in names})


def held_out(size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows to fit, and a random fifth."""
    order = np.random.default_rng(seed).permutation(size)
    cut = max(1, round(HELD_OUT * size))
    return order[cut:], order[:cut]


# -- methods ---------------------------------------------------------------------------


def catboost_models(
    x: Any, y: np.ndarray, seed: int, make: Callable, loss: str
) -> list[Any]:
    """Five models, each stopped by the fifth that it leaves out, of the depth that is
    best there.
    """
    from sklearn.model_selection import KFold

    text = [x.columns.get_loc(name) for name in x.select_dtypes(exclude="number")]
    rows = without_gaps_in_text(x)
    folds = list(KFold(MEMBERS, shuffle=True, random_state=seed).split(rows))
    best, least = [], np.inf
    for depth in DEPTHS:
        models = []
        for old, new in folds:
            model = make(
                loss_function=loss,
                iterations=MAX_TREES,
                learning_rate=0.05,
                depth=depth,
                cat_features=text,
                early_stopping_rounds=PATIENCE,
                random_seed=seed,
                thread_count=1,
                verbose=False,
                allow_writing_files=False,
            )
            aside = rows.iloc[new], y[new]
            models.append(model.fit(rows.iloc[old], y[old], eval_set=aside))
        found = np.mean(
            [model.get_best_score()["validation"][loss] for model in models]
        )
        if found < least:
            best, least = models, found
    return best


def catboost_regression(x: Any, y: np.ndarray, seed: int) -> Callable[[Any], Any]:
    from catboost import CatBoostRegressor

    models = catboost_models(x, y, seed, CatBoostRegressor, "RMSEWithUncertainty")

    def predict(x_new: Any) -> NormalMixture:
        rows = without_gaps_in_text(x_new)
        moments = np.stack([model.predict(rows) for model in models])
        return NormalMixture(moments[..., 0], np.sqrt(moments[..., 1]))

    return predict


def catboost_classification(x: Any, y: np.ndarray, seed: int) -> Callable[[Any], Any]:
    from catboost import CatBoostClassifier

    models = catboost_models(x, y, seed, CatBoostClassifier, "MultiClass")

    def predict(x_new: Any) -> np.ndarray:
        rows = without_gaps_in_text(x_new)
        return np.mean([model.predict_proba(rows) for model in models], axis=0)

    return predict


def ngboost_fitted(x: Any, y: np.ndarray, seed: int, make: Callable) -> tuple:
    """A model, its best number of trees, and what makes numbers of frames."""
    numbers = numbers_of(x)
    rows, aside = held_out(len(y), seed)
    known = numbers(x)
    model = make(
        n_estimators=MAX_TREES,
        learning_rate=0.03,
        random_state=seed,
        verbose=False,
    )
    model.fit(
        known[rows],
        y[rows],
        X_val=known[aside],
        Y_val=y[aside],
        early_stopping_rounds=PATIENCE,
    )
    return model, int(model.best_val_loss_itr) + 1, numbers


def ngboost_regression(x: Any, y: np.ndarray, seed: int) -> Callable[[Any], Any]:
    from ngboost import NGBRegressor

    model, trees, numbers = ngboost_fitted(x, y, seed, NGBRegressor)

    def predict(x_new: Any) -> NormalMixture:
        normal = model.pred_dist(numbers(x_new), max_iter=trees)
        return NormalMixture(normal.loc[None], normal.scale[None])

    return predict


def ngboost_classification(x: Any, y: np.ndarray, seed: int) -> Callable[[Any], Any]:
    from functools import partial

    from ngboost import NGBClassifier
    from ngboost.distns import k_categorical

    make = partial(NGBClassifier, Dist=k_categorical(int(y.max()) + 1))
    model, trees, numbers = ngboost_fitted(x, y, seed, make)
    return lambda x_new: model.predict_proba(numbers(x_new), max_iter=trees)


def lightgbm_quantiles(x: Any, y: np.ndarray, seed: int) -> Callable[[Any], Any]:
    """A model for each level, and 90 % intervals that a held-out fifth makes wider or
    narrower (Romano et al. 2019).
    """
    from lightgbm import LGBMRegressor

    text = x.select_dtypes(exclude="number").columns
    known = {name: sorted(set(x[name].dropna())) for name in text}

    def as_categories(frame: Any) -> Any:
        import pandas as pd

        columns = {
            name: pd.Categorical(frame[name], levels) for name, levels in known.items()
        }
        return frame.assign(**columns)

    rows, aside = held_out(len(y), seed)
    table = as_categories(x)
    models = [
        LGBMRegressor(
            objective="quantile",
            alpha=level,
            n_estimators=150,
            learning_rate=0.05,
            num_leaves=8,
            random_state=seed,
            n_jobs=1,
            verbose=-1,
        ).fit(table.iloc[rows], y[rows])
        for level in LEVELS
    ]

    def curves(frame: Any) -> np.ndarray:
        """Those of separate models may cross."""
        return np.sort([model.predict(frame) for model in models], axis=0)

    ends = curves(table.iloc[aside])[[0, -1]]
    missed = np.sort(np.maximum(ends[0] - y[aside], y[aside] - ends[1]))
    rank = int(np.ceil(0.9 * (len(aside) + 1)))
    margin = missed[min(rank, len(aside)) - 1]

    def predict(x_new: Any) -> Quantiles:
        values = curves(as_categories(x_new))
        low, high = values[0] - margin, values[-1] + margin
        return Quantiles(values, np.minimum(low, high), np.maximum(low, high))

    return predict


def gaussian_process(x: Any, y: np.ndarray, seed: int) -> Callable[[Any], Any]:
    """A length scale for each column, learned from some rows; all rows predict."""
    from sklearn.gaussian_process import GaussianProcessRegressor, kernels

    numbers = numbers_of(x)
    rows = numbers(x)
    some = np.random.default_rng(seed).permutation(len(y))[:ROWS_OF_KERNEL]
    scales = np.full(rows.shape[1], rows.shape[1] ** 0.5)
    kernel = kernels.ConstantKernel(1.0) * kernels.RBF(scales, (0.1, 1e4))
    kernel += kernels.WhiteKernel(0.3, (1e-4, 10.0))
    learned = GaussianProcessRegressor(kernel).fit(rows[some], y[some])
    process = GaussianProcessRegressor(learned.kernel_, optimizer=None).fit(rows, y)

    def predict(x_new: Any) -> NormalMixture:
        mean, sd = process.predict(numbers(x_new), return_std=True)
        return NormalMixture(mean[None], sd[None])

    return predict


def ridge(x: Any, y: np.ndarray, seed: int) -> Callable[[Any], Any]:
    """The penalty, and the sd of the noise, by leaving one row out."""
    from sklearn.linear_model import RidgeCV

    numbers = numbers_of(x)
    rows = numbers(x)
    model = RidgeCV(np.logspace(-3, 4, 15), store_cv_results=True).fit(rows, y)
    errors = model.cv_results_[:, list(model.alphas).index(model.alpha_)]
    sd = np.sqrt(errors.mean())

    def predict(x_new: Any) -> NormalMixture:
        mean = model.predict(numbers(x_new))[None]
        return NormalMixture(mean, np.full(mean.shape, sd))

    return predict


def logistic(x: Any, y: np.ndarray, seed: int) -> Callable[[Any], Any]:
    from sklearn.linear_model import LogisticRegressionCV

    numbers = numbers_of(x)
    model = LogisticRegressionCV(
        Cs=np.logspace(-3, 2, 11),
        l1_ratios=(0,),
        use_legacy_attributes=False,
        scoring="neg_log_loss",
        max_iter=1000,
    ).fit(numbers(x), y)
    return lambda x_new: model.predict_proba(numbers(x_new))


def ensemble_outputs(
    x: Any, y: np.ndarray, seed: int, num_outputs: int, log_density: Callable
) -> Callable[[Any], np.ndarray]:
    """Outputs (5, N, outputs) of networks with two layers of 50 units; a tenth of the
    rows, another for each, stops the training.
    """
    import jax
    import jax.numpy as jnp
    import optax

    from numpyro_bnn import nn

    numbers = numbers_of(x)
    rows, targets = jnp.asarray(numbers(x), jnp.float32), jnp.asarray(y)
    net = nn.MLP([50, 50, num_outputs], "relu")

    def train(key: Any) -> Any:
        order = jax.random.permutation(key, len(y))
        aside, used = order[: len(y) // 10 + 1], order[len(y) // 10 + 1 :]

        def loss(params: Any, chosen: Any) -> Any:
            return -log_density(net.apply(params, rows[chosen]), targets[chosen]).mean()

        return early_stopped(
            lambda params: loss(params, used),
            lambda params: loss(params, aside),
            net.init(key, rows.shape[1:]),
            optax.adamw(0.003, weight_decay=1e-3),
            ENSEMBLE_STEPS,
        )[0]

    keys = jax.random.split(jax.random.key(seed), MEMBERS)
    members = jax.block_until_ready(jax.jit(jax.vmap(train))(keys))

    def predict(x_new: Any) -> np.ndarray:
        new_rows = jnp.asarray(numbers(x_new), jnp.float32)
        return np.asarray(jax.vmap(net.apply, (0, None))(members, new_rows), float)

    return predict


def ensemble_regression(x: Any, y: np.ndarray, seed: int) -> Callable[[Any], Any]:
    """Outputs for the mean and the log of the sd of normal noise."""
    import jax.numpy as jnp
    from jax.scipy import stats

    def log_density(outputs: Any, targets: Any) -> Any:
        sd = LEAST_SD + jnp.exp(outputs[:, 1])
        return stats.norm.logpdf(targets, outputs[:, 0], sd)

    answers = ensemble_outputs(x, y, seed, 2, log_density)

    def predict(x_new: Any) -> NormalMixture:
        outputs = answers(x_new)
        return NormalMixture(outputs[..., 0], LEAST_SD + np.exp(outputs[..., 1]))

    return predict


def ensemble_classification(x: Any, y: np.ndarray, seed: int) -> Callable[[Any], Any]:
    import optax
    from scipy.special import softmax

    def log_density(outputs: Any, targets: Any) -> Any:
        return -optax.softmax_cross_entropy_with_integer_labels(outputs, targets)

    answers = ensemble_outputs(x, y, seed, int(y.max()) + 1, log_density)
    return lambda x_new: softmax(answers(x_new), axis=-1).mean(0)


PEERS = {
    "CatBoost, 5 models": Method(
        standardized(catboost_regression), catboost_classification, "catboost"
    ),
    "NGBoost": Method(
        standardized(ngboost_regression), ngboost_classification, "ngboost"
    ),
    "LightGBM, conformal": Method(standardized(lightgbm_quantiles), package="lightgbm"),
    "deep ensemble": Method(standardized(ensemble_regression), ensemble_classification),
    "Gaussian process": Method(standardized(gaussian_process)),
    "linear": Method(standardized(ridge), logistic),
}


def missing_packages(names: Sequence[str]) -> list[str]:
    """Of methods, what has to be installed first."""
    packages = {PEERS[name].package for name in names if name in PEERS} - {""}
    return [name for name in sorted(packages) if not is_installed(name)]


def is_installed(package: str) -> bool:
    try:
        importlib.import_module(package)
    except ImportError:
        return False
    return True
