"""``Regressor`` and ``Classifier``: scikit-learn's contract, standardization, answers in the units of the data."""

import ast
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import jax
import numpy as np
import tqdm
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from numpyro_bnn import _arviz, nn, priors
from numpyro_bnn._checks import argument_error, check_choice, check_count, check_flag, check_kind, check_number
from numpyro_bnn.datasets import Scaler
from numpyro_bnn.estimators import methods
from numpyro_bnn.estimators.predictive import Predictive
from numpyro_bnn.priors.base import as_prior
from numpyro_bnn.results.export import about, reported
from numpyro_bnn.results.exporter import Exporter
from numpyro_bnn.results.fit import Fit
from numpyro_bnn.results.replay import bind


class _Network(BaseEstimator):
    """What both estimators share: settings, the fit, the export."""

    def __init__(
        self,
        method: str = "ensemble",
        *,
        widths: Sequence[int] = (50,),
        activation: Any = None,
        prior: Any = None,
        num_chains: int | None = None,
        num_samples: int | None = None,
        effort: float = 1.0,
        callback: Callable[[int, int], Any] | None = None,
        progress_bar: bool = False,
        random_state: Any = None,
    ) -> None:
        self.method, self.widths, self.activation, self.prior = method, widths, activation, prior
        self.num_chains, self.num_samples, self.effort = num_chains, num_samples, effort
        self.callback, self.progress_bar, self.random_state = callback, progress_bar, random_state

    @property
    def _call(self) -> str:
        return f"estimators.{type(self).__name__}"

    @property
    def _activation(self) -> Any:
        return methods.ACTIVATIONS.get(self.method, "relu") if self.activation is None else self.activation

    def _check_settings(self) -> None:
        """Refuse settings before any work."""
        call = self._call
        check_choice(call, "method", self.method, methods.METHODS)
        if not isinstance(self.widths, Sequence) or isinstance(self.widths, str):
            raise argument_error(call, "widths", self.widths, "Pass the hidden widths, e.g. `(50,)`.", TypeError)
        for width in self.widths:
            check_count(call, "widths", width)
        nn.MLP([1, 1], self._activation)
        as_prior(self.prior or {}, call)
        check_number(call, "effort", self.effort, strict=True)
        for name in ("num_chains", "num_samples"):
            if getattr(self, name) is not None:
                check_count(call, name, getattr(self, name))
        callback = print if self.callback is None else self.callback
        check_kind(call, "callback", callback, callable, "Pass a function of (done, total).")
        check_flag(call, "progress_bar", self.progress_bar)

    def _fit(self, x: np.ndarray, y: np.ndarray, outputs: int, likelihood: Callable, y_scaler: Any) -> None:
        """Standardize the inputs, run the method, and keep its draws."""
        x_scaler = Scaler.fit(x)
        x = x_scaler.transform(x)
        net = nn.MLP([*self.widths, outputs], self._activation)
        prior = self.prior or methods.PRIORS.get(self.method, priors.Hierarchical)()
        model = partial(methods.network_model, net=net, prior=prior, likelihood=likelihood)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        with closing(tqdm.tqdm(disable=not self.progress_bar, desc=self.method)) as bar:

            def report(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)
                if self.callback is not None:
                    self.callback(done, total)

            options = (self.effort, self.num_chains, self.num_samples, report)
            padded = methods.padded(x, y)
            task = methods.Task(self._call, model, padded, len(x), jax.random.key(seed), *options)
            draws = methods.METHODS[self.method](task)
        #: Algorithm and settings of the fit, and the chains that were left out (`diverged`, `frozen_chains`).
        self.attrs_ = {**draws.attrs, "method": self.method, "seed": seed}
        self._predictive = draws.predictive or Predictive(model, draws.sites)
        self._x_scaler, self._y_scaler = x_scaler, y_scaler
        self._data, self._idata = (x, y), None

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "_predictive")

    def _summary(self, name: str, X: Any, *by_row: np.ndarray, **options: Any) -> tuple:
        """A summary of the predictive mixture at new rows, which are checked and standardized."""
        check_is_fitted(self)
        rows = self._x_scaler.transform(validate_data(self, X, dtype=np.float64, reset=False))
        return self._predictive(name, rows, *by_row, **options)

    def _components(self, X: Any, num_samples: Any, random_state: Any) -> tuple[tuple, np.random.Generator]:
        """What some draws say of new rows, each draw used as often as the others or once less; and a generator."""
        count = check_count(f"{self._call}.sample", "num_samples", num_samples)
        check_is_fitted(self)
        generator = np.random.default_rng(check_random_state(random_state).randint(2**31 - 1))
        total = self._predictive.num_draws
        orders = [generator.permutation(total) for _ in range(-(-count // total))]
        return self._summary("components", X, chosen=np.concatenate(orders)[:count]), generator

    @property
    def idata_(self) -> Any:
        """The fit for ArviZ, as from :func:`~numpyro_bnn.to_inference_data`; made on first access.

        Weights are those of the standardized network; inputs, targets, predictions and log likelihoods have the units
        of the data.
        """
        check_is_fitted(self)
        if self._idata is None:
            self._idata = self._export()
        return self._idata

    def _export(self) -> Any:
        model, draws = self._predictive.model_of(self._predictive.params), self._predictive.draws
        exporter = Exporter(Fit(model, bind(model, self._data, {}), draws, {}, {}), {}, {}, None)
        key = jax.random.fold_in(jax.random.key(self.attrs_["seed"]), 2)
        with self._predictive.precision():
            groups = exporter.training_groups(key, True, exporter.predicts_training_rows(None))
        lost = {chain for name in ("diverged", "frozen_chains") for chain in ast.literal_eval(self.attrs_[name])}
        kept = [chain for chain in range(self.attrs_.get("num_chains", 1)) if chain not in lost]
        groups = {name: g.assign_coords(chain=kept) if "chain" in g.dims else g for name, g in groups.items()}
        attrs = _arviz.attrs(reported(groups, about(self.attrs_, key, None)))  # judged as it was standardized

        def in_units(name: str, scaler: Scaler) -> None:
            values = {str(k): v * scaler.scale + scaler.mean for k, v in groups[name].data_vars.items()}
            groups[name] = groups[name].assign(values)

        in_units("constant_data", self._x_scaler)
        if scaler := self._y_scaler:
            for name in {"observed_data", "posterior_predictive"} & groups.keys():
                in_units(name, scaler)
            groups["log_likelihood"] = groups["log_likelihood"] - np.sum(np.log(scaler.scale))
        return _arviz.inference_data(groups, attrs)


class Regressor(RegressorMixin, _Network):
    r"""A Bayesian neural network for regression, with scikit-learn's ``fit`` and ``predict``.

    y_n ~ N(f(x_n), s(x_n)^2): mean f and noise s are outputs of one random network, or s is the same for all rows.
    Inputs and targets are standardized inside; every answer is in the units of the data. With M draws of the network
    the predictive distribution of a new row is the mixture

    .. math:: p(y | x, D) = \frac{1}{M} \sum_m N(y; f_m(x), s_m(x)^2).

    :param method: ``"ensemble"`` (microcanonical chains around a deep ensemble, the most accurate), ``"nuts"``,
        ``"laplace"`` (a Gaussian at the mode, of the linearized network), ``"mean_field"`` (Bayes by Backprop), or
        ``"adf"`` (probabilistic backpropagation, the fastest).
    :param widths: units of the hidden layers.
    :param activation: name of the activation, or a layer; ``"relu"`` by default, ``"tanh"`` for ``"laplace"``.
    :param prior: as for :func:`~numpyro_bnn.random_network`; by default ``priors.Hierarchical()``, and for
        ``"laplace"`` ``priors.Normal()``, whose precisions maximize the evidence.
    :param heteroscedastic: let the noise depend on the inputs; by default for ``"ensemble"`` only. ``False`` usually
        gives a smaller RMSE and a lower log likelihood.
    :param num_chains: number of chains, ``num_samples``: draws of each, or of the guide; by default by method.
    :param effort: factor of all numbers of steps and epochs, and of draws by default.
    :param callback: called as ``callback(done, total)`` during the fit.
    :param progress_bar: show a progress bar.
    :param random_state: seed, as everywhere in scikit-learn.
    :raises ValueError: on ``fit``, for wrong settings, NaN, one row, or data on which every chain diverged.

    Several targets, y (N, K), share the network; given its weights they are independent.

    >>> import numpy as np
    >>> from numpyro_bnn.estimators import Regressor
    >>> X = np.linspace(-1, 1, 40)[:, None]
    >>> y = 300 + 100 * X[:, 0] + np.random.default_rng(0).normal(0, 10, 40)
    >>> forecaster = Regressor("adf", widths=(10,), random_state=0).fit(X, y)
    >>> mean, sd = forecaster.predict(X, return_std=True)
    >>> low, high = forecaster.predict_interval(X, level=0.9)
    >>> mean.shape, bool(np.all((low < mean) & (mean < high))), forecaster.score(X, y) > 0.9
    ((40,), True, True)
    """

    def __init__(
        self,
        method: str = "ensemble",
        *,
        widths: Sequence[int] = (50,),
        activation: Any = None,
        prior: Any = None,
        heteroscedastic: bool | None = None,
        num_chains: int | None = None,
        num_samples: int | None = None,
        effort: float = 1.0,
        callback: Callable[[int, int], Any] | None = None,
        progress_bar: bool = False,
        random_state: Any = None,
    ) -> None:
        self.method, self.widths, self.activation, self.prior = method, widths, activation, prior
        self.heteroscedastic, self.num_chains, self.num_samples = heteroscedastic, num_chains, num_samples
        self.effort, self.callback, self.progress_bar = effort, callback, progress_bar
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: Any, y: Any) -> "Regressor":
        """Learn from rows X (N, D) and targets y (N,) or (N, K)."""
        self._check_settings()
        given = self.heteroscedastic
        hetero = self.method in methods.HETEROSCEDASTIC if given is None else given
        check_flag(self._call, "heteroscedastic", hetero)
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True, multi_output=True, ensure_min_samples=2)
        y = np.asarray(y, np.float64)
        self._columns = y.shape[1:]
        y = y[:, 0] if self._columns == (1,) else y
        targets = 1 if y.ndim == 1 else y.shape[1]
        y_scaler = Scaler.fit(y)
        likelihood = partial(
            methods.normal_likelihood, targets, bool(hetero), methods.NOISE_FLOORS.get(self.method, 0.0)
        )
        self._fit(X, y_scaler.transform(y), targets * (1 + bool(hetero)), likelihood, y_scaler)
        return self

    def _in_units(self, values: np.ndarray, shift: bool = True) -> np.ndarray:
        """Standardized values (..., N) or (..., N, K) in the units of the data, shaped like the targets."""
        values = values * self._y_scaler.scale + (self._y_scaler.mean if shift else 0.0)
        return values[..., None] if self._columns == (1,) else values

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The mean of the predictive distribution, shaped like y; with ``return_std`` also its standard deviation.

        The variance is that of a new observation: the mean variance of the noise, plus the variance of the function.
        """
        check_flag(f"{self._call}.predict", "return_std", return_std)
        mean, noise, spread = self._summary("moments", X)
        sd = np.sqrt(noise + spread)
        return (self._in_units(mean), self._in_units(sd, shift=False)) if return_std else self._in_units(mean)

    def predict_interval(self, X: Any, level: float = 0.9) -> tuple[np.ndarray, np.ndarray]:
        """The central interval of probability ``level``, by quantiles of the mixture: lower and upper ends, like y.

        With several targets it is that of each target alone.
        """
        check_number(f"{self._call}.predict_interval", "level", level, strict=True, below=1)
        levels = np.array([(1 - level) / 2, (1 + level) / 2])
        low, high = self._summary("quantiles", X, options=(levels,))
        return self._in_units(low), self._in_units(high)

    def sample(self, X: Any, num_samples: int = 100, *, noise: bool = True, random_state: Any = None) -> np.ndarray:
        """Joint draws (S, N) of new observations at the rows X; with ``noise=False`` of the function.

        All rows of a draw have the same weights, so differences between rows may be computed draw by draw.
        """
        check_flag(f"{self._call}.sample", "noise", noise)
        (means, sds), generator = self._components(X, num_samples, random_state)
        return self._in_units(means + sds * generator.normal(size=sds.shape) if noise else means)

    def log_predictive_density(self, X: Any, y: Any) -> np.ndarray:
        """log p(y_n | x_n, D) of each row, (N,), in the units of the data: larger is better."""
        check_is_fitted(self)
        _, y = validate_data(self, X, y, reset=False, y_numeric=True, multi_output=True)
        if y.shape[1:] != self._columns:
            instead = f"Pass targets shaped {('N', *self._columns)}, as in the fit."
            raise argument_error(f"{self._call}.log_predictive_density", "y", y, instead)
        y = np.asarray(y[:, 0] if self._columns == (1,) else y, np.float64)
        (density,) = self._summary("log_density", X, self._y_scaler.transform(y))
        return density - np.sum(np.log(self._y_scaler.scale))


class Classifier(ClassifierMixin, _Network):
    r"""A Bayesian neural network for classification, with scikit-learn's ``fit``, ``predict``, ``predict_proba``.

    y_n ~ Categorical(softmax f(x_n)), f a random network with one output per class; inputs are standardized inside.
    Class probabilities are means over the draws of the network.

    Parameters are those of :class:`Regressor`, without ``heteroscedastic``.

    :raises ValueError: on ``fit``, as for :class:`Regressor`, and for targets with one class only.

    >>> import numpy as np
    >>> from numpyro_bnn.estimators import Classifier
    >>> X = np.linspace(-1, 1, 40)[:, None]
    >>> y = np.where(X[:, 0] > 0.1, "high", "low")
    >>> classifier = Classifier("adf", widths=(10,), random_state=0).fit(X, y)
    >>> print(classifier.classes_, classifier.predict(X[[0, -1]]), classifier.predict_proba(X).shape)
    ['high' 'low'] ['low' 'high'] (40, 2)
    """

    def fit(self, X: Any, y: Any) -> "Classifier":
        """Learn from rows X (N, D) and labels y (N,), numbers or strings."""
        self._check_settings()
        X, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            got = f"labels of one class, {self.classes_[0]!r}"
            raise argument_error(f"{self._call}.fit", "y", got, "Pass rows of at least two classes.")
        self._fit(X, codes, len(self.classes_), methods.categorical_likelihood, None)
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Class probabilities (N, K), columns in the order of ``classes_``: means over the draws."""
        (probs,) = self._summary("probabilities", X)
        return probs / probs.sum(axis=1, keepdims=True)

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of each row."""
        best = np.argmax(self.predict_proba(X), axis=1)  # refuses before there are classes
        return self.classes_[best]

    def sample(self, X: Any, num_samples: int = 100, *, noise: bool = True, random_state: Any = None) -> np.ndarray:
        """Joint draws (S, N) of labels; with ``noise=False`` of class probabilities (S, N, K)."""
        check_flag(f"{self._call}.sample", "noise", noise)
        (probs,), generator = self._components(X, num_samples, random_state)
        if not noise:
            return probs
        reached = generator.random((*probs.shape[:2], 1)) > np.cumsum(probs, axis=2)[..., :-1]
        return self.classes_[reached.sum(axis=2)]

    def log_predictive_density(self, X: Any, y: Any) -> np.ndarray:
        """Log probability of the label of each row, (N,): larger is better."""
        probs = self.predict_proba(X)
        _, y = validate_data(self, X, y, reset=False)
        unknown = ~np.isin(y, self.classes_)
        if unknown.any():
            got = f"the label {y[unknown][0]!r}, which the fit has not seen"
            instead = f"Known: {', '.join(map(repr, self.classes_))}."
            raise argument_error(f"{self._call}.log_predictive_density", "y", got, instead)
        return np.log(probs[np.arange(len(y)), np.searchsorted(self.classes_, y)])
