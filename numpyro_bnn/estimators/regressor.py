"""``Regressor``: predictive means, variances, intervals and densities in the units of
the data.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpyro.distributions as dist
from scipy.stats import norm
from sklearn.base import RegressorMixin
from sklearn.utils.validation import check_is_fitted

from numpyro_bnn._checks import argument_error, as_floats
from numpyro_bnn._options import Level, Positive, PositiveInt, Switch, checked
from numpyro_bnn.estimators import methods
from numpyro_bnn.estimators.network import (
    Callback,
    Method,
    Network,
    Uncertainty,
    warn_of_health,
    weighted_scaler,
)
from numpyro_bnn.estimators.tables import check_numbers
from numpyro_bnn.models import repeats_values

EXACT_SD = 1e-3  # of the noise, in standard deviations of the targets
MAX_EXACT_SHARE = 0.1  # of rows predicted as if their noise were smaller
ROUNDING = 4 * np.finfo(float).eps


class Regressor(RegressorMixin, Network):
    r"""A Bayesian neural network for regression, with scikit-learn's ``fit`` and
    ``predict``.

    y_n has the mean f(x_n), a random network, and normal or Student's t noise around
    it, whose scale is another output of the network, or the same for all rows. Inputs
    and targets are standardized inside; every answer is in the units of the data. With
    M draws of the network the predictive distribution of a new row is the mixture

    .. math:: p(y | x, D) = \frac{1}{M} \sum_m p(y | f_m(x), \sigma_m).

    :param method: ``"ensemble"`` (microcanonical chains around a deep ensemble, the
        most accurate), ``"nuts"``, ``"laplace"`` (a Gaussian at the mode, of the
        linearized network), ``"mean_field"`` (Bayes by Backprop), or ``"adf"``
        (probabilistic backpropagation, the fastest).
    :param widths: units of the hidden layers; by default ``(50,)``, for ``"ensemble"``
        on at least 150 rows ``(16, 16, 16)``.
    :param activation: name of the activation, or a layer; ``"relu"`` by default,
        ``"tanh"`` for ``"laplace"``.
    :param prior: as for :func:`~numpyro_bnn.random_network`; by default
        ``priors.Hierarchical()``, for ``"adf"`` ``priors.Normal()``, and for
        ``"laplace"`` the same with precisions that maximize the evidence.
    :param heteroscedastic: let the scale of the noise depend on the inputs; by default
        only for ``"ensemble"`` on at least 150 rows, as fewer would be taken for noise.
    :param heavy_tails: Student's t noise with learned degrees of freedom, which
        survives outliers, not normal noise; for ``"ensemble"`` (the default there),
        ``"nuts"`` and ``"mean_field"``. If most targets are a few repeated values, both
        are refused and not the default: such noise could vanish at these values.
    :param categories: names of columns of a frame whose numbers are names (codes of
        areas), ``dates``: of columns whose text is a date. Others are known by their
        type, see below.
    :param num_chains: number of chains, ``num_samples``: draws of each, or of the
        guide; by default by method.
    :param effort: factor of all numbers of steps and epochs, and of draws by default.
    :param cache: keep compiled programs in the user's cache folder for other processes;
        not if JAX has a cache on disk (``jax_compilation_cache_dir``) or several
        devices.
    :param callback: called as ``callback(done, total)`` during the fit.
    :param progress_bar: show a progress bar.
    :param random_state: seed, as everywhere in scikit-learn.
    :raises ValueError: on ``fit``, for wrong settings, NaN, one row, or data on which
        every chain diverged.

    Several targets, y (N, K), share the network; given its weights they are
    independent.

    X may be an array of numbers, or a frame (pandas, polars) as it is. Of a frame, text
    and categories become one column per level (levels in less than 1 % of the rows are
    joined), dates become days and their place in year and week, missing values the
    median and a column that marks them, and numbers with a heavy tail are compressed by
    asinh. ``repr`` of a fit, and ``attrs_["columns"]``, say what was done.

    >>> import numpy as np
    >>> from numpyro_bnn.estimators import Regressor
    >>> X = np.linspace(-1, 1, 40)[:, None]
    >>> y = 300 + 100 * X[:, 0] + np.random.default_rng(0).normal(0, 10, 40)
    >>> forecaster = Regressor("adf", widths=(10,), random_state=0).fit(X, y)
    >>> mean, sd = forecaster.predict(X, return_std=True)
    >>> low, high = forecaster.predict_interval(X, level=0.9)
    >>> (
    ...     mean.shape,
    ...     bool(np.all((low < mean) & (mean < high))),
    ...     forecaster.score(X, y) > 0.9,
    ... )
    ((40,), True, True)
    """

    _target_options: ClassVar = {"y_numeric": True, "multi_output": True}
    _check_targets = staticmethod(check_numbers)

    def __init__(
        self,
        method: Method = "ensemble",
        *,
        widths: Sequence[int] | None = None,
        activation: Any = None,
        prior: Any = None,
        categories: Sequence[str] | None = None,
        dates: Sequence[str] | None = None,
        heteroscedastic: Switch | None = None,
        heavy_tails: Switch | None = None,
        num_chains: PositiveInt | None = None,
        num_samples: PositiveInt | None = None,
        effort: Positive = 1.0,
        cache: Switch = True,
        callback: Callback | None = None,
        progress_bar: Switch = False,
        random_state: Any = None,
    ) -> None:
        self.method = method
        self.widths = widths
        self.activation = activation
        self.prior = prior
        self.categories = categories
        self.dates = dates
        self.heteroscedastic = heteroscedastic
        self.heavy_tails = heavy_tails
        self.num_chains = num_chains
        self.num_samples = num_samples
        self.effort = effort
        self.cache = cache
        self.callback = callback
        self.progress_bar = progress_bar
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> "Regressor":
        """Learn from rows X (N, D), or a frame, and targets y (N,) or (N, K).

        :param sample_weight: how often each row counts (N,): its likelihood is taken to
            this power, so a row of weight 2 is two equal observations. Weights whose
            sum is not the number of observations make intervals too narrow or wide.
        """
        return self._fitted(X, y, sample_weight)

    def _learn(self, X: Any, y: Any, sample_weight: Any) -> None:
        self._check_settings()
        hetero = self.heteroscedastic
        tails = self.heavy_tails
        if tails and self.method not in methods.HEAVY_TAILS:
            instead = (
                f"Leave it out, or use another `method`: "
                f"{', '.join(methods.HEAVY_TAILS)}."
            )
            raise argument_error(self._call, "heavy_tails", tails, instead)
        X, y, weight = self._training_rows(X, y, sample_weight)
        y = np.asarray(y, np.float64)
        usual = methods.Regression.usual(self.method, len(X))
        widths = usual.widths if self.widths is None else self.widths
        self._check_size(len(X), len(widths))
        self._target_shape = y.shape[1:]
        y = y[:, 0] if self._target_shape == (1,) else y
        targets = 1 if y.ndim == 1 else y.shape[1]
        if repeats_values(y):
            for name in ("heteroscedastic", "heavy_tails"):
                if getattr(self, name):
                    instead = (
                        "Leave it out: most targets are a few repeated values, where "
                        "such noise could vanish."
                    )
                    raise argument_error(self._call, name, True, instead)
            usual = methods.Regression()
        hetero = usual.heteroscedastic if hetero is None else bool(hetero)
        tails = usual.heavy_tails if tails is None else tails
        y_scaler = weighted_scaler(y, weight)
        min_sd = methods.NOISE_FLOORS.get(self.method, 0.0)
        likelihood = partial(methods.noise_likelihood, targets, hetero, tails, min_sd)
        self._run(
            X,
            y_scaler.transform(y),
            targets * (1 + hetero),
            likelihood,
            y_scaler,
            usual.widths,
            weight,
        )
        self._check_fit(weight)

    def _check_size(self, num_rows: int, num_hidden: int) -> None:
        """Refuse too few rows for the evidence, and warn of too few for intervals."""
        min_rows = 2 * num_hidden + 4
        if self.method == "laplace" and num_rows < min_rows:
            instead = (
                f"Pass at least {min_rows} rows, fewer `widths`, or another `method`, "
                f'such as "ensemble".'
            )
            got = (
                f"{num_rows} rows, whose evidence chooses {min_rows - 2} prior "
                f"precisions and the noise"
            )
            raise argument_error(f"{self._call}.fit", "X", got, instead)
        enough = methods.ENOUGH_FOR_INTERVALS.get(self.method, 5)
        if num_rows < enough:
            warn_of_health(
                f"{self._call}.fit: {num_rows} rows hardly show the scale of the "
                f"targets and of their noise: intervals are too narrow. Pass at least "
                f"{enough}."
            )

    def _check_fit(self, weight: np.ndarray | None) -> None:
        """Warn if rows of the fit are predicted badly, or better than noise allows."""
        rows, targets = self._checked_rows()
        constant = norm.logpdf(targets).reshape(len(rows), -1).sum(axis=1)
        log_densities = self._answers("log_density", rows, targets)[0]
        self._warn_if_worse(log_densities, constant, weight)
        exact = np.mean(
            log_densities > norm.logpdf(0, scale=EXACT_SD) * targets[0].size
        )
        if exact > MAX_EXACT_SHARE:
            warn_of_health(
                f"{self._call}.fit: {exact:.0%} of its own rows are predicted as if "
                f"their noise were below {EXACT_SD} standard deviations of the "
                "targets. Unless these are exact, the network reproduces them: trust "
                "densities and intervals only as far as rows that were not in the fit "
                "confirm them."
            )

    def _in_units(self, values: np.ndarray, shift: bool = True) -> np.ndarray:
        """Standardized values (..., N) or (..., N, K) in the units of the data, shaped
        like the targets.
        """
        values = values * self._y_scaler.scale + (self._y_scaler.mean if shift else 0.0)
        return values[..., None] if self._target_shape == (1,) else values

    @checked("estimators.{}.predict")
    def predict(self, X: Any, return_std: Switch = False) -> Any:
        """The mean of the predictive distribution, shaped like y; with ``return_std``
        also its standard deviation.

        The variance is that of a new observation: the mean variance of the noise, plus
        the variance of the function.
        """
        mean, noise, spread = self._summary("moments", X, warn=True)
        sd = self.calibration_ * np.sqrt(noise + spread)
        mean = self._in_units(mean)
        return (mean, self._in_units(sd, shift=False)) if return_std else mean

    @checked("estimators.{}.predict_interval")
    def predict_interval(
        self, X: Any, level: Level = 0.9
    ) -> tuple[np.ndarray, np.ndarray]:
        """The central interval of probability ``level``, by quantiles of the mixture:
        lower and upper ends, like y.

        With several targets it is that of each target alone.
        """
        low, high = self._quantiles(X, np.array([(1 - level) / 2, (1 + level) / 2]))
        return low, high

    def predict_quantiles(self, X: Any, levels: Any = (0.05, 0.5, 0.95)) -> np.ndarray:
        """Quantiles of the predictive distribution, as from ``np.quantile``: (Q, N),
        with several targets (Q, N, K), of each target alone.

        :param levels: probabilities (Q,) in (0, 1).

        >>> import numpy as np
        >>> from numpyro_bnn.estimators import Regressor
        >>> X = np.linspace(-1, 1, 40)[:, None]
        >>> y = X[:, 0] + np.random.default_rng(0).normal(0, 0.1, 40)
        >>> fitted = Regressor("adf", widths=(10,), random_state=0).fit(X, y)
        >>> fitted.predict_quantiles(X[:2], [0.1, 0.5, 0.9]).shape
        (3, 2)
        """
        call = f"{self._call}.predict_quantiles"
        levels = as_floats(call, "levels", levels)
        if levels.ndim != 1 or not np.all((levels > 0) & (levels < 1)):
            instead = "Pass probabilities between 0 and 1, e.g. `[0.1, 0.5, 0.9]`."
            raise argument_error(call, "levels", levels, instead)
        return self._quantiles(X, levels)

    def _quantiles(self, X: Any, levels: np.ndarray) -> np.ndarray:
        quantiles = np.stack(
            self._summary("quantiles", X, warn=True, options=(levels,))
        )
        return self._in_units(self._stretched(X, quantiles, self.calibration_))

    def _stretched(self, X: Any, values: np.ndarray, factor: float) -> np.ndarray:
        """Standardized values (..., N) or (..., N, K), with this many times their
        distance from the predictive mean.
        """
        if factor == 1:
            return values
        mean = self._summary("moments", X)[0]
        return mean + factor * (values - mean)

    def cdf(self, X: Any, y: Any) -> np.ndarray:
        """Predictive probability that the target of each row is at most y, shaped like
        y; of each target alone.

        Of rows that were not in the fit the values are uniform on (0, 1) if the
        predictive distributions are calibrated.
        """
        (below,) = self._at_targets("cdf", X, y)
        return below[..., None] if self._target_shape == (1,) else below

    def crps(self, X: Any, y: Any) -> np.ndarray:
        r"""Continuous ranked probability score of each row, shaped like y and in its
        units: smaller is better.

        .. math:: \int (F(z) - 1\{z \ge y\})^2 dz

        of the predictive distribution function F of each target alone, by quadrature.
        It is the absolute error of a prediction without uncertainty.

        Reference: Gneiting & Raftery (2007), equation 20.
        """
        (score,) = self._at_targets("crps", X, y)
        return self._in_units(self.calibration_ * score, shift=False)

    def _at_targets(self, name: str, X: Any, y: Any) -> tuple:
        """A summary at targets, standardized and moved to where they are in the
        distribution without its calibration.
        """
        y = self._y_scaler.transform(self._targets(X, y, name))
        return self._summary(name, X, self._stretched(X, y, 1 / self.calibration_))

    def predict_dist(self, X: Any) -> dist.Distribution:
        """The predictive distribution of each row, of batch shape (N,): a mixture over
        the draws of the network, with its ``log_prob``, ``cdf``, ``mean``, ``sample``.

        That of a Laplace approximation is a mixture over its draws, too, of which
        :meth:`predict_quantiles` and :meth:`cdf` have the exact one. ``sample`` draws
        from all components before it chooses one: :meth:`sample` needs less memory.

        >>> import jax, numpy as np
        >>> from numpyro_bnn.estimators import Regressor
        >>> X = np.linspace(-1, 1, 40)[:, None]
        >>> y = X[:, 0] + np.random.default_rng(0).normal(0, 0.1, 40)
        >>> fitted = Regressor("adf", widths=(10,), random_state=0).fit(X, y)
        >>> fitted.predict_dist(X[:5]).sample(jax.random.key(0), (3,)).shape
        (3, 5)
        """
        check_is_fitted(self)
        means, sds, *df = self._summary("components", X, warn=True)
        means = self._stretched(X, means, self.calibration_)
        # rows first, draws last but for the targets of a row
        loc = np.moveaxis(self._in_units(means), 0, 1)
        sd = self.calibration_ * np.moveaxis(self._in_units(sds, shift=False), 0, 1)
        component: dist.Distribution = dist.Normal(loc, sd)
        if df:
            degrees = np.moveaxis(df[0].reshape(means.shape), 0, 1).reshape(loc.shape)
            scale = sd * np.sqrt(1 - 2 / degrees)
            component = dist.StudentT(degrees, loc, scale)
        if self._target_shape:
            component = component.to_event(1)
        probs = np.full(loc.shape[1], 1 / loc.shape[1])
        return dist.MixtureSameFamily(dist.Categorical(probs=probs), component)

    @checked("estimators.{}.conformal_interval")
    def conformal_interval(
        self, X: Any, X_held_out: Any, y_held_out: Any, level: Level = 0.9
    ) -> tuple[np.ndarray, np.ndarray]:
        r"""An interval around the mean that holds a new observation with probability
        ``level``, whatever the model.

        .. math:: \hat y(x) \pm q\, s(x), \quad q = \text{the } \lceil (n + 1)\,
                  \mathrm{level} \rceil
            \text{-th smallest of } |y_i - \hat y(x_i)| / s(x_i)

        over n held-out rows, :math:`\hat y` and s being the predictive mean and sd. If
        these and the new row are exchangeable, the probability is at least ``level``
        and at most level + 1 / (n + 1), on average over held-out and new rows, not at
        each x. With several targets it is that of each target alone.

        :param X_held_out: rows (n, D) that were not in the fit. :param y_held_out:
            their targets.
        :return: lower and upper ends, shaped like y.
        :raises ValueError: for fewer than level / (1 - level) held-out rows, whose
            interval is infinite.

        Reference: Lei, G'Sell, Rinaldo, Tibshirani & Wasserman (2018), algorithm 2 and
        section 5.2.
        """
        y = self._targets(X_held_out, y_held_out, "conformal_interval", "_held_out")
        rank = self._conformal_rank("conformal_interval", len(y), level)
        mean, noise, spread = self._alike("moments", X_held_out, X)
        mean = self._in_units(mean)
        sd = self._in_units(np.sqrt(noise + spread), shift=False)
        away = np.abs(y.reshape(-1, *mean.shape[1:]) - mean[: len(y)])
        factor = np.sort(away / sd[: len(y)], axis=0)[rank - 1]
        # Rounding made the factor smaller by at most three halves of an ulp, and makes
        # the product smaller by two halves: with these ulps a target as far away as the
        # one of this rank is never outside.
        half = factor * sd[len(y) :] * (1 + ROUNDING)
        return mean[len(y) :] - half, mean[len(y) :] + half

    def uncertainty(self, X: Any) -> Uncertainty:
        """How much of the predictive variance is noise, and how much more data would
        remove; shaped like y.
        """
        _, noise, spread = self._summary("moments", X)
        scale = self.calibration_**2 * self._y_scaler.scale**2
        like_y = (slice(None), None) if self._target_shape == (1,) else ()
        return Uncertainty((noise * scale)[like_y], (spread * scale)[like_y])

    @checked("estimators.{}.sample")
    def sample(
        self,
        X: Any,
        num_samples: PositiveInt = 100,
        *,
        noise: Switch = True,
        random_state: Any = None,
    ) -> np.ndarray:
        """Joint draws (S, N) of new observations at the rows X; with ``noise=False`` of
        the function.

        All rows of a draw have the same weights, so differences between rows may be
        computed draw by draw.
        """
        (draws, sds, *df), generator = self._components(X, num_samples, random_state)
        if noise:
            if df:
                unit = np.sqrt(1 - 2 / df[0]) * generator.standard_t(df[0])
            else:
                unit = generator.normal(size=sds.shape)
            draws = draws + sds * unit
        return self._in_units(self._stretched(X, draws, self.calibration_))

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """R^2 of the means, as scikit-learn has it."""
        with self._scored(y, sample_weight):
            return super().score(X, y, sample_weight)

    def log_predictive_density(self, X: Any, y: Any) -> np.ndarray:
        """log p(y_n | x_n, D) of each row, (N,), in the units of the data: larger is
        better.
        """
        return self._density_by_factor(X, y, "log_predictive_density")(
            self.calibration_
        )

    def _targets(self, X: Any, y: Any, method: str, suffix: str = "") -> np.ndarray:
        """Targets of rows, checked, (N,) or (N, K); arguments of the method may have a
        suffix.
        """
        check_is_fitted(self)
        _, y = self._rows_and_targets(method, X, y, suffix)
        if y.shape[1:] != self._target_shape:
            instead = (
                f"Pass targets shaped {('N', *self._target_shape)}, as in the fit."
            )
            raise argument_error(f"{self._call}.{method}", f"y{suffix}", y, instead)
        return np.asarray(y[:, 0] if self._target_shape == (1,) else y, np.float64)

    def _density_by_factor(
        self, X: Any, y: Any, method: str
    ) -> Callable[[float], np.ndarray]:
        y = self._targets(X, y, method)
        y = self._y_scaler.transform(y)
        mean = self._summary("moments", X)[0]

        def density(factor: float) -> np.ndarray:
            (log_density,) = self._summary("log_density", X, mean + (y - mean) / factor)
            return log_density - np.sum(np.log(factor * self._y_scaler.scale))

        return density
