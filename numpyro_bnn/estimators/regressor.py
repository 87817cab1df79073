"""``Regressor``: predictive means, variances, intervals and densities in the units of
the data.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeAlias

import numpy as np
import numpyro.distributions as dist
from scipy.stats import norm
from sklearn.base import RegressorMixin
from sklearn.utils import _safe_indexing, check_random_state
from sklearn.utils.validation import _num_samples, check_is_fitted

from numpyro_bnn._checks import argument_error, as_floats
from numpyro_bnn._options import Choice, Level, PositiveInt, Switch, checked
from numpyro_bnn.estimators import methods, targets
from numpyro_bnn.estimators.choice import chosen
from numpyro_bnn.estimators.network import (
    Network,
    Uncertainty,
    warn_of_health,
    weighted_scaler,
)
from numpyro_bnn.estimators.tables import check_numbers, missing_values, taught
from numpyro_bnn.estimators.targets import ROUNDING, TARGETS, Continuous, NoiseSettings
from numpyro_bnn.models import repeats_values

EXACT_SD = 1e-3  # of the noise, in standard deviations of the targets
MIN_DECIDING_DRAWS = 5  # of a mean that is an average over draws
MAX_EXACT_SHARE = 0.1  # of rows predicted as if their noise were smaller
TargetName: TypeAlias = Annotated[str, Choice(("auto", *TARGETS))]
Center: TypeAlias = Annotated[str, Choice(("mean", "quantiles"))]


@dataclass(eq=False, repr=False, kw_only=True)
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
    :param network: in place of ``widths`` and ``activation``, a function of the number
        of outputs that returns a specification such as ``nn.MLP([50, outputs])``, or a
        module of Flax, NNX or Equinox that keeps no state.
    :param prior: as for :func:`~numpyro_bnn.random_network`. By default
        ``priors.Hierarchical()``, with ``"ensemble"`` and ``"nuts"`` and at least 20
        columns of X a scale of its own for each of them in the first layer of
        ``widths``, so that columns may be irrelevant; for ``"adf"``
        ``priors.Normal()``, and for ``"laplace"`` the same with precisions that
        maximize the evidence.
    :param target: kind of the targets, see below; ``"auto"`` takes another one than
        ``"continuous"`` only where at least 100 targets of one column clearly are that.
        ``bounds``: lower and upper bound, which make targets ``"bounded"``.
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
    :param effort: factor of all numbers of steps and epochs, and of draws by default;
        for ``"ensemble"`` by default a quarter, a half or 1, the more the rows say of
        the function in a quick look (``attrs_["effort"]``). Above 1 predictions of
        targets with little noise go on getting better.
    :param cache: let JAX keep compiled programs in the user's cache folder for other
        processes, unless it has a cache on disk (``jax_compilation_cache_dir``).
    :param callback: called as ``callback(done, total)`` during the fit.
    :param progress_bar: show a progress bar.
    :param random_state: seed, as everywhere in scikit-learn.
    :raises ValueError: on ``fit``, for wrong settings, NaN, one row, or data on which
        every chain diverged. Rows whose target is missing are left out with a warning,
        if there is one target.

    ================  ================================================================
    ``target``        likelihood, and where ``"auto"`` considers it
    ================  ================================================================
    ``"continuous"``  normal or Student's t noise
    ``"positive"``    normal noise of log y; for skewed positive numbers, if normal
                      noise would often be below zero
    ``"bounded"``     noise of the logit of y between its ``bounds``; if there are any
    ``"counts"``      negative binomial, nearly Poisson where the data are; for whole
                      numbers from zero on with a standard deviation below 50, if normal
                      noise would often be below zero
    ``"zeros"``       a chance of zero, and a log-normal part; where at least 5 % of
                      other numbers than counts are exactly zero
    ``"ordered"``     ordered logits of the distinct values; for at most ten of them,
                      each of at least five rows
    ================  ================================================================

    ``"auto"`` compares candidates by log densities of rows that are out of the bag of a
    random forest, on one scale, and takes one that gains two standard errors. All
    answers are those of this distribution: intervals
    and draws stay in its support, and ``predict`` is its mean. ``repr`` and
    ``attrs_["target"]`` say what was chosen. "counts", "zeros" and "ordered" need
    ``"ensemble"``, ``"nuts"`` or ``"mean_field"``.

    Several targets, y (N, K), share the network; given its weights they are
    independent, each with noise of its own. They are "continuous", "positive" or
    "bounded". With ``"ensemble"``, ``"nuts"`` and ``"mean_field"`` some may be missing
    (NaN): the likelihood, and ``log_predictive_density``, is that of the others.

    X may be an array of numbers, or a frame (pandas, polars) as it is. Of a frame, text
    and categories become one column per level (levels in less than 1 % of the rows are
    joined). Where 20 or more levels would be joined, and there are two rows for each
    level, each level also has an effect of its own on the mean, a random effect whose
    spread is learned; that of a level that is new is a draw from its distribution.
    Dates become days and their place in year and week, missing values the median and a
    column that marks them, and numbers with a heavy tail are compressed by asinh.
    ``repr`` of a fit, and ``attrs_["columns"]``, say what was done.

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

    target: TargetName = "auto"
    bounds: Sequence[float] | None = None
    heteroscedastic: Switch | None = None
    heavy_tails: Switch | None = None

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
        self._check_noise()
        known = self._with_targets(X, y, sample_weight)
        X, y, weight = self._training_rows(*known)
        y = np.asarray(y, np.float64)
        usual = methods.Regression.usual(self.method, len(X))
        widths = usual.widths if self.widths is None else self.widths
        self._check_size(len(X), len(widths))
        self._target_shape = y.shape[1:]
        y = y[:, 0] if self._target_shape == (1,) else y
        if y.ndim == 2:
            self._check_known(y)
        name, self._choice = self.target, ""
        if name == "auto":
            seed = check_random_state(self.random_state).randint(2**31)
            name, self._choice = chosen(X, y, weight, self._noise, self.method, seed)
        targets.check_target(self._call, name, y, self._noise, self.method)
        self._y_sd = weighted_scaler(y, weight).scale
        self._target = self._kind(name, y, weight, usual)
        self._run(
            X,
            self._target.observed(y),
            self._target.num_outputs,
            self._target.likelihood(),
            self._target.scaler,
            usual.widths,
            weight,
            self._target.num_scales,
        )
        self.attrs_["target"] = name
        self._mean_summary = self._target.mean_summary
        self._check_fit(y, weight)

    def _usual_prior(self, columns: np.ndarray) -> Any:
        if self.network is None and self.method in methods.BY_COLUMN:
            return methods.prior_by_column(columns)
        return super()._usual_prior(columns)

    def _with_targets(self, X: Any, y: Any, sample_weight: Any) -> tuple:
        """The rows of which a target is known, with a note of the others."""
        missing: np.ndarray
        with taught(f"{self._call}.fit", "y", y):
            missing = missing_values(np.asarray(y))
        if missing.ndim == 2 and missing.any():
            if missing.shape[1] > 1 and self.method not in methods.ANY_LIKELIHOOD:
                got = (
                    f'{missing.sum()} missing values, which "{self.method}" cannot have'
                )
                known = ", ".join(methods.ANY_LIKELIHOOD)
                instead = f"Drop their rows, or use another `method`: {known}."
                raise argument_error(f"{self._call}.fit", "y", got, instead)
            missing = np.all(missing, axis=1)
        if not missing.any() or missing.all() or _num_samples(X) != len(missing):
            return X, y, sample_weight
        warn_of_health(
            f"{self._call}.fit: {missing.sum()} of {len(missing)} targets are missing: "
            "their rows are left out."
        )
        rows = np.flatnonzero(~missing)
        if np.ndim(sample_weight):
            self._check_length(sample_weight, missing)
            sample_weight = np.asarray(sample_weight)[rows]
        return _safe_indexing(X, rows), np.asarray(y)[rows], sample_weight

    def _check_known(self, y: np.ndarray) -> None:
        """Refuse a column of targets without two values."""
        few = np.flatnonzero((~np.isnan(y)).sum(axis=0) < 2)
        if few.size:
            got = f"fewer than two targets in column {few[0]}"
            raise argument_error(
                f"{self._call}.fit", "y", got, "Leave this column out."
            )

    def _filled(self, y: object, method: str) -> tuple[Any, np.ndarray | None]:
        if method not in ("fit", "log_predictive_density", "calibrate"):
            return y, None
        values = np.asarray(y)
        missing = missing_values(values)
        partly = missing.ndim == 2 and missing.any() and not missing.all(axis=1).any()
        if not partly or self.method not in methods.ANY_LIKELIHOOD:
            return y, None
        return np.where(missing, 0, values), missing

    def _check_noise(self) -> None:
        """Refuse settings of the noise that no targets allow."""
        tails, bounds = self.heavy_tails, self.bounds
        if tails and self.method not in methods.ANY_LIKELIHOOD:
            instead = (
                f"Leave it out, or use another `method`: "
                f"{', '.join(methods.ANY_LIKELIHOOD)}."
            )
            raise argument_error(self._call, "heavy_tails", tails, instead)
        if bounds is not None:
            ends = as_floats(self._call, "bounds", bounds)
            if ends.shape != (2,) or not np.isfinite(ends).all() or ends[0] >= ends[1]:
                instead = "Pass the lower and the upper bound, e.g. `(0, 1)`."
                raise argument_error(self._call, "bounds", bounds, instead)

    @property
    def _noise(self) -> NoiseSettings:
        bounds = self.bounds
        if bounds is not None:
            bounds = (float(bounds[0]), float(bounds[1]))
        min_sd = methods.NOISE_FLOORS.get(self.method, 0.0)
        return NoiseSettings(self.heteroscedastic, self.heavy_tails, bounds, min_sd)

    def _kind(
        self,
        name: str,
        y: np.ndarray,
        weight: np.ndarray | None,
        usual: methods.Regression,
    ) -> targets.TargetKind:
        """A kind of targets, and its noise."""
        kind = TARGETS[name]
        density = kind.with_density(y)
        columns = density[:, None] if density.ndim == 1 else density
        known = (column[~np.isnan(column)] for column in columns.T)
        if len(density) and any(map(repeats_values, known)):
            for option in ("heteroscedastic", "heavy_tails"):
                if getattr(self, option):
                    instead = (
                        "Leave it out: most targets are a few repeated values, where "
                        "such noise could vanish."
                    )
                    raise argument_error(self._call, option, True, instead)
            usual = methods.Regression()
        return kind(y, weight, self._noise, usual)

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

    def _check_fit(self, y: np.ndarray, weight: np.ndarray | None) -> None:
        """Warn if rows of the fit are predicted badly, or better than noise allows."""
        rows, _ = self._checked_rows()
        y = y[: len(rows)]
        constant = self._target.constant_log_density(y)

        def ask(name: str, *by_row: np.ndarray, options: Any = ()) -> tuple:
            return self._answers(name, rows, *by_row, options=options)

        log_densities = self._target.log_density(ask, y)(1.0)
        self._warn_if_worse(log_densities, constant, weight)
        if not isinstance(self._target, Continuous):
            return
        slopes = self._target.log_slopes(self._target.observed(y))
        known = (~np.isnan(y)).reshape(len(y), -1).sum(axis=1)
        limit = norm.logpdf(0, scale=EXACT_SD) * known
        exact = np.mean(log_densities - slopes > limit)
        if exact > MAX_EXACT_SHARE:
            warn_of_health(
                f"{self._call}.fit: {exact:.0%} of its own rows are predicted as if "
                f"their noise were below {EXACT_SD} standard deviations of the "
                "targets. Unless these are exact, the network reproduces them: trust "
                "densities and intervals only as far as rows that were not in the fit "
                "confirm them."
            )

    def _log_slopes(self) -> np.ndarray | float:
        assert isinstance(self._target, Continuous)  # others have no scaler
        return self._target.log_slopes(np.asarray(self._data[1]))

    def __repr__(self, *args: Any, **kwargs: Any) -> str:
        words = super().__repr__(*args, **kwargs)
        choice = getattr(self, "_choice", "")
        return f"{words}\n  target: {self._target.name}, {choice}" if choice else words

    def _like_y(self, values: np.ndarray) -> np.ndarray:
        """Values (..., N) of one column as those of y."""
        return values[..., None] if self._target_shape == (1,) else values

    @checked("estimators.{}.predict")
    def predict(self, X: Any, return_std: Switch = False) -> Any:
        """The mean of the predictive distribution, shaped like y; with ``return_std``
        also its standard deviation.

        The variance is that of a new observation: the mean variance of the noise, plus
        the variance of the function.

        Means of ``"positive"`` targets, ``"zeros"`` and ``"counts"`` grow exponentially
        with the output of the network. A warning says if few of its draws decide them,
        as far from the data; medians (``predict_quantiles``) stay sensible there.

        :raises ValueError: for rows where the mean overflows.
        """
        ask = self._asking(X, warn=True)
        mean, noise, spread = self._target.moments(ask, self.calibration_)
        if self._target.is_exponential:
            self._check_means(mean, spread)
        mean = self._like_y(mean)
        return (mean, self._like_y(np.sqrt(noise + spread))) if return_std else mean

    def _check_means(self, mean: np.ndarray, spread: np.ndarray) -> None:
        """Refuse means that overflow; announce those that few draws decide, by Kish's
        number, for which all are equal.
        """
        overflown = _rows_with_any(~np.isfinite(mean))
        if overflown:
            got = f"{overflown} rows so far from those of the fit that means overflow"
            instead = "Leave them out, or ask for medians: `predict_quantiles`."
            raise argument_error(f"{self._call}.predict", "X", got, instead)
        number = self._predictive.num_draws
        with np.errstate(all="ignore"):
            deciding = number / (1 + spread / mean**2)
        few = _rows_with_any(deciding < min(MIN_DECIDING_DRAWS, number / 4))
        if few:
            warn_of_health(
                f"{self._call}.predict: the mean of {few} of {len(mean)} rows is "
                f"decided by fewer than {MIN_DECIDING_DRAWS} of {number} draws of the "
                f"network: use medians there, `predict_quantiles`."
            )

    @checked("estimators.{}.predict_interval")
    def predict_interval(
        self, X: Any, level: Level = 0.9
    ) -> tuple[np.ndarray, np.ndarray]:
        """The central interval of probability ``level``, by quantiles of the mixture:
        lower and upper ends, like y.

        With several targets it is that of each target alone.
        """
        low, high = self._quantiles(X, _ends(level))
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
        is_level = (levels > 0) & (levels < 1)
        if levels.ndim != 1 or not levels.size or not is_level.all():
            instead = "Pass probabilities between 0 and 1, e.g. `[0.1, 0.5, 0.9]`."
            raise argument_error(call, "levels", levels, instead)
        return self._quantiles(X, levels)

    def _quantiles(self, X: Any, levels: np.ndarray) -> np.ndarray:
        ask = self._asking(X, warn=True)
        return self._like_y(self._target.quantiles(ask, levels, self.calibration_))

    def cdf(self, X: Any, y: Any) -> np.ndarray:
        """Predictive probability that the target of each row is at most y, shaped like
        y; of each target alone.

        Of rows that were not in the fit the values are uniform on (0, 1) if the
        predictive distributions are calibrated.
        """
        y = self._targets(X, y, "cdf")
        return self._like_y(self._target.cdf(self._asking(X), y, self.calibration_))

    def crps(self, X: Any, y: Any) -> np.ndarray:
        r"""Continuous ranked probability score of each row, shaped like y and in its
        units: smaller is better.

        .. math:: \int (F(z) - 1\{z \ge y\})^2 dz

        of the predictive distribution function F of each target alone, by quadrature.
        It is the absolute error of a prediction without uncertainty.

        Reference: Gneiting & Raftery (2007), equation 20.
        """
        y = self._targets(X, y, "crps")
        return self._like_y(self._target.crps(self._asking(X), y, self.calibration_))

    def predict_dist(self, X: Any) -> dist.Distribution:
        """The predictive distribution of each row, of batch shape (N,): a mixture over
        the draws of the network, with its ``log_prob``, ``cdf`` and ``sample``; moments
        are those of :meth:`predict`, which alone has those of bounded targets.

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
        ask = self._asking(X, warn=True)

        def ask_like_y(name: str, *by_row: np.ndarray, options: Any = ()) -> tuple:
            answers = ask(name, *by_row, options=options)
            if name == "probabilities" and self._target_shape == (1,):
                return tuple(values[:, None] for values in answers)
            if name not in ("components", "moments"):
                return answers
            return tuple(self._like_y(values) for values in answers)

        return self._target.distribution(ask_like_y, self.calibration_)

    @checked("estimators.{}.conformal_interval")
    def conformal_interval(
        self,
        X: Any,
        X_held_out: Any,
        y_held_out: Any,
        level: Level = 0.9,
        around: Center | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        r"""An interval that holds a new observation with probability ``level``,
        whatever the model.

        .. math:: \hat y(x) \pm q\, s(x), \quad q = \text{the } \lceil (n + 1)\,
                  \mathrm{level} \rceil
            \text{-th smallest of } |y_i - \hat y(x_i)| / s(x_i)

        over n held-out rows, :math:`\hat y` and s being the predictive mean and sd; or,
        around the quantiles a and b of the central interval of this level,

        .. math:: [a(x) - q\, s(x),\; b(x) + q\, s(x)] \quad \text{with scores }
            \max(a(x_i) - y_i,\, y_i - b(x_i)) / s(x_i),

        which follows the skewness of the noise, and is taken on the scale of the noise,
        so that it stays in the support. If
        these and the new row are exchangeable, the probability is at least ``level``
        and at most level + 1 / (n + 1), on average over held-out and new rows, not at
        each x. With several targets it is that of each target alone.

        :param X_held_out: rows (n, D) that were not in the fit. :param y_held_out:
            their targets.
        :param around: ``"mean"``, the default for "continuous" targets, or
            ``"quantiles"``, the only way for others.
        :return: lower and upper ends, shaped like y.
        :raises ValueError: for fewer than level / (1 - level) held-out rows, whose
            interval is infinite.

        Reference: Lei, G'Sell, Rinaldo, Tibshirani & Wasserman (2018), algorithm 2 and
        section 5.2; Romano, Patterson & Candes (2019), theorem 1.
        """
        method = "conformal_interval"
        y = self._targets(X_held_out, y_held_out, method, "_held_out")
        rank = self._conformal_rank(method, len(y), level)
        if around is None:
            around = "mean" if self._target.name == "continuous" else "quantiles"
        if around == "quantiles":
            low, high = self._conformal_quantiles(X, X_held_out, y, rank, level)
            return self._like_y(low), self._like_y(high)
        if self._target.name != "continuous":
            instead = 'Use "quantiles", whose intervals stay in the support.'
            raise argument_error(f"{self._call}.{method}", "around", around, instead)
        ask = self._asking_alike(X_held_out, X)
        mean, noise, spread = self._target.moments(ask, 1.0)
        sd = np.sqrt(noise + spread)
        factor = np.sort(np.abs(y - mean[: len(y)]) / sd[: len(y)], axis=0)[rank - 1]
        # Rounding made the factor smaller by at most three halves of an ulp, and makes
        # the product smaller by two halves: with these ulps a target as far away as the
        # one of this rank is never outside.
        half = factor * sd[len(y) :] * (1 + ROUNDING)
        mean = mean[len(y) :]
        return self._like_y(mean - half), self._like_y(mean + half)

    def _conformal_quantiles(
        self, X: Any, X_held_out: Any, y: np.ndarray, rank: int, level: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ends of the interval that is as far outside the central one, in standard
        deviations, as the held-out target of this rank.
        """
        target = self._target
        misfit = target.misfit(y, target.bounds)
        if misfit is not None:
            call = f"{self._call}.conformal_interval"
            instead = (
                f'Pass targets such as those of the fit, which are "{target.name}".'
            )
            raise argument_error(call, "y_held_out", misfit, instead)
        ask = self._asking_alike(X_held_out, X)
        (low, high), sd = target.central(ask, _ends(level))
        places = target.places(y)
        held_out = slice(None, len(y))
        outside = np.maximum(low[held_out] - places, places - high[held_out])
        factor = np.sort(outside / sd[held_out], axis=0)[rank - 1]
        low, high, sd = low[len(y) :], high[len(y) :], sd[len(y) :]
        # more than the rounding of the factor, see above
        slack = ROUNDING * (np.abs(low) + np.abs(high) + np.abs(factor) * sd)
        low, high = low - factor * sd - slack, high + factor * sd + slack
        # an interval that would be empty is a point
        middle = (low + high) / 2
        return target.ends(np.minimum(low, middle), np.maximum(high, middle))

    def uncertainty(self, X: Any) -> Uncertainty:
        """How much of the predictive variance is noise, and how much more data would
        remove; shaped like y.
        """
        ask = self._asking(X)
        _, noise, spread = self._target.moments(ask, self.calibration_)
        return Uncertainty(self._like_y(noise), self._like_y(spread))

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
        ask, generator = self._asking_for_draws(X, num_samples, random_state)
        draws = self._target.draws(ask, generator, bool(noise), self.calibration_)
        return self._like_y(draws)

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """R^2 of the means, as scikit-learn has it."""
        with self._scored(y, sample_weight):
            return super().score(X, y, sample_weight)

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
        if method == "calibrate" and not self._target.stretches:
            got = f'a fit of "{self._target.name}", which has no scale to be stretched'
            instead = "Use `conformal_interval` for intervals from held-out rows."
            raise argument_error(f"{self._call}.calibrate", "target", got, instead)
        return self._target.log_density(self._asking(X), y)


def _ends(level: float) -> np.ndarray:
    """Probabilities of the ends of a central interval."""
    return np.array([(1 - level) / 2, (1 + level) / 2])


def _rows_with_any(flags: np.ndarray) -> int:
    """Of flags (N,) or (N, K)."""
    return int(flags.reshape(len(flags), -1).any(axis=1).sum())
