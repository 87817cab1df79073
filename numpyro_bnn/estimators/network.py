"""What the estimators share: settings, the fit, standardization, draws of new rows, the
export.
"""

import ast
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from copy import copy
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, NamedTuple, TypeAlias

import jax
import numpy as np
import tqdm
from sklearn.base import BaseEstimator
from sklearn.utils import (
    check_array,
    check_consistent_length,
    check_random_state,
    check_X_y,
)
from sklearn.utils.validation import check_is_fitted, validate_data

from numpyro_bnn import nn, priors
from numpyro_bnn._checks import (
    argument_error,
    as_floats,
    check_finite,
    is_list,
    outside,
)
from numpyro_bnn._options import (
    Choice,
    Count,
    Kind,
    Positive,
    PositiveInt,
    Switch,
    check_option,
    checked,
    options_of,
)
from numpyro_bnn.datasets import Scaler
from numpyro_bnn.estimators import methods, modules
from numpyro_bnn.estimators.effort import needed_effort
from numpyro_bnn.estimators.frames import Columns, is_frame
from numpyro_bnn.estimators.predictive import Predictive
from numpyro_bnn.estimators.process import stored_programs
from numpyro_bnn.estimators.tables import check_numbers, taught
from numpyro_bnn.metrics import HealthWarning
from numpyro_bnn.metrics._inputs import extrapolated
from numpyro_bnn.metrics.health import FAR
from numpyro_bnn.priors.base import as_prior
from numpyro_bnn.program.compiled import refuse_forks
from numpyro_bnn.program.plates import sites_of_type
from numpyro_bnn.program.posterior import Posterior
from numpyro_bnn.results.export import about, reported
from numpyro_bnn.results.exporter import Exporter
from numpyro_bnn.results.fit import Fit, bind, map_draws

MIN_CALIBRATION_ROWS = 10
CALIBRATION_SD = 0.5  # of the prior of the log factor
CHECKED_ROWS = 256  # rows of the fit that are predicted
MAX_LOSS_NATS = 0.1  # a row, against a constant prediction: more is a fault
MAX_COPIES_SHARE = 0.1  # of the rows
IMPORTANCE_ROWS = 1000  # rows of the fit whose columns are permuted


class Uncertainty(NamedTuple):
    """The uncertainty of new rows in two parts: noise, and what more data would remove.

    :param aleatoric: of a regression (N,) or (N, K) the mean variance of the noise, in
        squared units of y; of a classification (N,) the mean entropy of the labels
        given the network, in nats.
    :param epistemic: of a regression the variance of the function, of a classification
        the mutual information of label and network. Both add up to the variance, or the
        entropy, of the prediction.
    """

    aleatoric: np.ndarray
    epistemic: np.ndarray


def warn_of_health(message: str) -> None:
    warnings.warn(message, HealthWarning, stacklevel=outside())


def copied_rows(x: np.ndarray, y: np.ndarray) -> int:
    """How many rows repeat another row, target included; 0 if rows with equal inputs
    agree no more than by chance.

    >>> x = np.arange(4.0)[:, None]
    >>> (
    ...     copied_rows(np.concatenate([x, x]), np.tile(x[:, 0], 2)),
    ...     copied_rows(np.ones((8, 1)), np.arange(8)),
    ... )
    (4, 0)
    """
    place = np.array([hash(row.tobytes()) for row in x + 0.0])  # without negative zeros
    order = np.argsort(place, kind="stable")

    def repeats(array: np.ndarray) -> np.ndarray:
        return (np.diff(array[order].reshape(len(x), -1), axis=0) == 0).all(axis=1)

    equal = repeats(place)
    copies = np.sum(equal & repeats(y))
    by_chance = np.sum((np.unique(y, axis=0, return_counts=True)[1] / len(y)) ** 2)
    return int(copies) if copies > (1 + by_chance) / 2 * equal.sum() else 0


def weighted_scaler(values: np.ndarray, weight: np.ndarray | None) -> Scaler:
    """Mean and standard deviation of rows (N, ...) that count ``weight`` times (N,), of
    several columns those of the values that are not missing.

    >>> values, weight = np.array([1.0, 2.0, 4.0]), np.array([1.0, 3.0, 2.0])
    >>> scaler = weighted_scaler(values, weight)
    >>> repeated = np.repeat(values, [1, 3, 2])
    >>> bool(np.isclose(scaler.scale, repeated.std()))
    True
    """
    missing = np.isnan(values)
    if missing.any():
        scalers = []
        for column, is_missing in zip(values.T, missing.T, strict=True):
            counts = None if weight is None else weight[~is_missing]
            scalers.append(weighted_scaler(column[~is_missing], counts))
        moments = np.array([(scaler.mean, scaler.scale) for scaler in scalers])
        return Scaler(moments[:, 0], moments[:, 1])
    unweighted = Scaler.fit(values)
    if weight is None:
        return unweighted
    standardized = unweighted.transform(values)
    mean = np.average(standardized, axis=0, weights=weight)
    variance = np.average((standardized - mean) ** 2, axis=0, weights=weight)
    scale = np.where(variance > 0, np.sqrt(variance), 1.0)
    return Scaler(unweighted.mean + unweighted.scale * mean, unweighted.scale * scale)


def counted_rows(
    X: np.ndarray, y: np.ndarray, weight: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Without the rows of weight 0."""
    if weight is None:
        return X, y, None
    counted = weight > 0
    return X[counted], y[counted], weight[counted]


Method: TypeAlias = Annotated[str, Choice(methods.METHODS)]
Callback: TypeAlias = Annotated[
    Callable[[int, int], Any], Kind(callable, "Pass a function of (done, total).")
]


@dataclass(eq=False, repr=False)
class Settings:
    """The settings that both estimators have."""

    method: Method = "ensemble"
    _: KW_ONLY
    widths: Sequence[int] | None = None
    activation: Any = None
    network: Callable[[int], Any] | None = None
    prior: Any = None
    categories: Sequence[str] | None = None
    dates: Sequence[str] | None = None
    num_chains: PositiveInt | None = None
    num_samples: PositiveInt | None = None
    effort: Positive | None = None
    cache: Switch = True
    callback: Callback | None = None
    progress_bar: Switch = False
    random_state: Any = None


class Network(Settings, BaseEstimator):
    """What both estimators share."""

    #: Standard deviations of the targets of a regression.
    _y_sd: Any
    #: The summary that is a prediction without its noise.
    _mean_summary: str = "moments"
    #: What was done with the columns of a frame; an array has none.
    _columns_of_x: Columns | None
    #: What scikit-learn is to check of targets, and how we check them before.
    _target_options: ClassVar[Mapping[str, Any]] = {}
    _check_targets: Callable[[str, str, Any], None]

    @property
    def _call(self) -> str:
        return f"estimators.{type(self).__name__}"

    @property
    def _activation(self) -> Any:
        if self.activation is None:
            return methods.ACTIVATIONS.get(self.method, "relu")
        return self.activation

    def _usual_prior(self, columns: np.ndarray) -> Any:
        """The prior of methods that have none of their own, by the place of the column
        for each input (D,).
        """
        return priors.Hierarchical()

    def _places_of_columns(self, num_inputs: int) -> np.ndarray:
        """For each input, the place of the column of X from which it was made."""
        if self._columns_of_x is None:
            return np.arange(num_inputs)
        return self._columns_of_x.groups

    @property
    def _levels(self) -> tuple[tuple[str, int], ...]:
        """Columns whose codes are the last inputs, and how many codes have effects."""
        if self._columns_of_x is None:
            return ()
        numbers = self._columns_of_x.num_levels
        return tuple((name, methods.padded_length(size)) for name, size in numbers)

    def _numeric(self, x: np.ndarray) -> np.ndarray:
        """Inputs of the network: those that are not codes."""
        return x[:, : x.shape[1] - len(self._levels)]

    def _check_settings(self) -> None:
        """Refuse settings before any work."""
        call = self._call
        for name in options_of(init := type(self).__init__):
            check_option(call, init, name, getattr(self, name))
        widths = () if self.widths is None else self.widths
        if not is_list(widths):
            raise argument_error(
                call,
                "widths",
                self.widths,
                "Pass the hidden widths, e.g. `(50,)`.",
                TypeError,
            )
        for width in widths:
            Count().check(call, "widths", width)
        for option in ("categories", "dates"):
            names = getattr(self, option)
            if names is not None and not is_list(names):
                instead = f"Pass names of columns, e.g. `{option}=[{'zip'!r}]`."
                raise argument_error(call, option, names, instead, TypeError)
        if self.network is not None:
            self._check_network()
        nn.MLP([1, 1], self._activation)
        as_prior({} if self.prior is None else self.prior, call)
        with taught(call, "random_state", self.random_state):
            check_random_state(self.random_state)

    def _check_network(self) -> None:
        is_module = isinstance(self.network, nn.Layer) or modules.library(self.network)
        if is_module or not callable(self.network):
            raise argument_error(
                self._call, "network", self.network, modules.INSTEAD, TypeError
            )
        for option in ("widths", "activation"):
            if getattr(self, option) is not None:
                instead = "Leave it out: `network` says what the network is."
                raise argument_error(self._call, option, getattr(self, option), instead)

    def _network(self, outputs: int, widths: Sequence[int]) -> Any:
        """The network of the user, or one with these widths if there are no others."""
        if self.network is None:
            widths = widths if self.widths is None else self.widths
            return nn.MLP([*widths, outputs], self._activation)
        return modules.own_network(self._call, self.network, outputs)

    def _fitted(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """Fit a copy and take over all of it at once: a refused or interrupted fit
        leaves the earlier one.
        """
        refuse_forks(f"{self._call}.fit")
        self._check_settings()
        fitted = copy(self)
        with self._stored_programs():
            fitted._learn(X, y, sample_weight)
        self.__dict__ = fitted.__dict__
        return self

    def _stored_programs(self) -> AbstractContextManager:
        """Where compiled programs are kept for other processes."""
        return stored_programs() if self.cache else nullcontext()

    def _learn(self, X: Any, y: Any, sample_weight: Any) -> None:
        """Check the data, run the method, and set all attributes of a fit."""
        raise NotImplementedError

    def _weights(self, y: Any, sample_weight: Any) -> np.ndarray | None:
        """How often each row counts (N,), ``None`` if each counts once."""
        if sample_weight is None:
            return None
        call, y = f"{self._call}.fit", np.asarray(y)
        weight = as_floats(call, "sample_weight", sample_weight)
        if weight.ndim == 0:
            weight = np.full(y.shape[:1], float(weight))
        self._check_length(weight, y)
        check_finite(call, "sample_weight", weight)
        if np.any(weight < 0) or np.sum(weight > 0) < 2:
            got = f"{np.sum(weight < 0)} negative and {np.sum(weight > 0)} positive"
            instead = "Pass how often each row counts; two weights must be above zero."
            raise argument_error(call, "sample_weight", got, instead)
        if self.method == "adf":
            instead = (
                'Leave it out, or use another `method`: "adf" counts every row once.'
            )
            raise argument_error(call, "sample_weight", "weights", instead)
        return None if np.all(weight == 1) else weight

    def _check_length(self, weight: Any, y: np.ndarray) -> None:
        shape = np.asarray(weight).shape
        if shape == y.shape[:1]:
            return
        # The first words are those that scikit-learn's checks look for.
        got = f"shape {shape}, for targets of shape {y.shape}"
        instead = "Sample weights must be 1D array or scalar: one for each row."
        raise argument_error(f"{self._call}.fit", "sample_weight", got, instead)

    def _training_rows(
        self, X: Any, y: Any, sample_weight: Any
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """The rows of a fit that count, their targets and weights."""
        weight = self._weights(y, sample_weight)
        rows, targets = self._rows_and_targets(
            "fit",
            X,
            y,
            counted=None if weight is None else weight > 0,
            reset=True,
            ensure_min_samples=2,
        )
        return counted_rows(rows, targets, weight)

    def _run(
        self,
        x: np.ndarray,
        y: np.ndarray,
        outputs: int,
        likelihood: Callable,
        y_scaler: Any,
        widths: Sequence[int],
        weight: np.ndarray | None,
        num_scales: int = 0,
    ) -> None:
        """Standardize the inputs, run the method, and keep its draws; ``widths`` are
        for users who give none, the last ``num_scales`` outputs are scales of noise.
        """
        if (copies := copied_rows(x, y)) > MAX_COPIES_SHARE * len(x):
            warn_of_health(
                f"{self._call}.fit: {copies} of {len(x)} rows repeat another, target "
                "included. If they are copies, not observations of their own, leave "
                "them out: copies count as evidence, noise would be taken to be too "
                "small, and a row that has a copy in the fit gets too good a score."
            )
        x_scaler = self._input_scaler(x, weight)
        x = x_scaler.transform(x)
        model = partial(
            methods.network_model,
            net=self._network(outputs, widths),
            prior=self._prior_of(x),
            likelihood=likelihood,
            outputs=outputs,
            call=self._call,
            levels=self._levels,
            num_scales=num_scales,
            has_gaps=bool(y.dtype.kind == "f" and np.isnan(y).any()),
        )
        seed = int(check_random_state(self.random_state).randint(2**31))
        with closing(tqdm.tqdm(disable=not self.progress_bar, desc=self.method)) as bar:

            def report(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)
                if self.callback is not None:
                    self.callback(done, total)

            effort = self.effort
            if effort is None:
                is_adaptive = self.method in methods.ADAPTIVE
                effort = needed_effort(x, y) if is_adaptive else 1.0
            options = (effort, self.num_chains, self.num_samples, report)
            padded = methods.padded(x, y, weight)
            task = methods.Task(
                self._call, model, padded, len(x), jax.random.key(seed), *options
            )
            draws = methods.METHODS[self.method](task)
        predictive = draws.predictive
        if predictive is None:  # a linearized network has exact effects
            codes = x[:, self._numeric(x).shape[1] :]
            generator = np.random.default_rng(seed)
            methods.redraw_effects(self._levels, codes, draws.sites, generator)
            # what the model computes from them would double a pickle
            latent = Posterior(model, padded).latent
            sites = {name: draws.sites[name] for name in latent}
            predictive = Predictive(model, sites)
        settings = {"method": self.method, "effort": effort, "seed": seed}
        #: Algorithm and settings of the fit, and the chains that were left out
        # (`diverged`, `frozen_chains`).
        self.attrs_ = {**draws.attrs, **settings}
        if self._columns_of_x is not None:
            self.attrs_["columns"] = str(self._columns_of_x.described)
        self._predictive = predictive
        self._x_scaler = x_scaler
        self._y_scaler = y_scaler
        self._data = (x, y)
        self._idata = None
        #: Factor on predictive standard deviations, or temperature of class
        # probabilities; 1 before `calibrate`.
        self.calibration_ = 1.0

    def _prior_of(self, x: np.ndarray) -> Any:
        """The prior of the user, or the usual one of the method."""
        if self.prior is not None:
            return self.prior
        if self.method in methods.PRIORS:
            return methods.PRIORS[self.method]()
        columns = self._places_of_columns(x.shape[1])
        return self._usual_prior(columns[: self._numeric(x).shape[1]])

    def _input_scaler(self, x: np.ndarray, weight: np.ndarray | None) -> Scaler:
        """Numbers are standardized; columns of 0 and 1 that a frame was made into have
        scales of their own, and codes stay as they are.
        """
        scaler = weighted_scaler(x, weight)
        if self._columns_of_x is None:
            return scaler
        mean, scale = self._columns_of_x.mean_and_scale
        return Scaler(
            np.where(np.isnan(mean), scaler.mean, mean),
            np.where(np.isnan(scale), scaler.scale, scale),
        )

    def _checked_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows of the fit that are predicted to judge it, and their targets."""
        x, y = self._data
        return x[:CHECKED_ROWS], y[:CHECKED_ROWS]

    def _warn_if_worse(
        self, predicted: np.ndarray, constant: np.ndarray, weight: np.ndarray | None
    ) -> None:
        """Log densities of rows of the fit, predicted and by a constant prediction."""
        counts = None if weight is None else weight[: len(predicted)]
        lost = float(np.average(constant - predicted, weights=counts))
        if not lost < MAX_LOSS_NATS:
            warn_of_health(
                f"{self._call}.fit: its own rows are predicted {lost:.2g} nats a row "
                f"worse than by a constant."
                ' Do not use it: take another `method`, such as "ensemble", more '
                "`effort`, or more rows."
            )

    def __repr__(self, *args: Any, **kwargs: Any) -> str:
        words = super().__repr__(*args, **kwargs)
        columns = getattr(self, "_columns_of_x", None)
        if columns is None:
            return words
        lines = [f"  {name}: {what}" for name, what in columns.described.items()]
        return "\n".join([words, *lines])

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "_predictive")

    def _asking(
        self, X: Any, *, warn: bool = False, draw_index: Any = None
    ) -> Callable[..., tuple]:
        """``ask(name, *by_row, options=())``: summaries of the predictive mixture at
        new rows, which are checked and standardized once.

        :param warn: whether to warn of rows that lie far outside those of the fit.
        :param draw_index: draws whose components are asked for, by default all.
        """
        rows = self._rows(X, warn=warn)
        unchecked = [rows] if warn else []

        def ask(name: str, *by_row: np.ndarray, options: Any = ()) -> tuple:
            index = draw_index if name.endswith("components") else None
            answers = self._answers(
                name, rows, *by_row, draw_index=index, options=options
            )
            while unchecked:
                known, new = map(self._numeric, (self._data[0], unchecked.pop()))
                share, limit, words = extrapolated(known, new)
                if share > limit:
                    warn_of_health(f"{self._call}: {words}. {FAR}")
            return answers

        return ask

    def _rows(self, X: Any, argument: str = "X", *, warn: bool = False) -> np.ndarray:
        """New rows, checked and standardized."""
        check_is_fitted(self)
        refuse_forks(self._call)
        with taught(self._call, argument, X):
            numbers, notes = self._numbers(self._call, argument, X, reset=False)
            if numbers is None:
                rows = validate_data(self, X, dtype=np.float64, reset=False)
            else:
                rows = check_array(numbers)
        if notes and warn:
            warn_of_health(f"{self._call}: {'; '.join(notes)}.")
        return self._x_scaler.transform(rows)

    def _numbers(
        self,
        call: str,
        argument: str,
        X: Any,
        reset: bool,
        counted: np.ndarray | None = None,
    ) -> tuple[np.ndarray | None, list[str]]:
        """The numbers of a frame, and what is new about its rows; ``None`` for a plain
        table of numbers, which is checked.
        """
        if reset:
            self._columns_of_x = None
            if is_frame(X):
                validate_data(self, X, skip_check_array=True)
                self._columns_of_x = Columns(
                    call, X, self.categories, self.dates, counted
                )
                return self._columns_of_x.numbers(call, X)
            for option in ("categories", "dates"):
                if getattr(self, option) is not None:
                    got = "an array, whose columns have no names"
                    instead = f"Pass a frame, or leave out `{option}`."
                    raise argument_error(call, argument, got, instead)
        if self._columns_of_x is None:
            check_numbers(call, argument, X)
            return None, []
        # scikit-learn refuses other columns, and warns if there are no names
        validate_data(self, X, skip_check_array=True, reset=False)
        frame = X if is_frame(X) else self._columns_of_x.named(np.asarray(X))
        return self._columns_of_x.numbers(call, frame)

    def _rows_and_targets(
        self,
        method: str,
        X: Any,
        y: Any,
        suffix: str = "",
        counted: np.ndarray | None = None,
        **options: Any,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rows and their targets, checked.

        :param method: what the user called; its arguments may have a ``suffix``.
        :param counted: which rows say what the columns of a frame are, by default all.
        :param options: of scikit-learn's ``validate_data``.
        """
        call = f"{self._call}.{method}"
        options = {"dtype": np.float64, "reset": False, **options}
        reset = options["reset"]
        with taught(call, f"X{suffix}", X):
            if counted is not None:
                check_consistent_length(X, counted)
            numbers, _ = self._numbers(call, f"X{suffix}", X, reset, counted)
            if numbers is None:
                validate_data(self, X, **options)
        y, gaps = self._filled(y, method)
        with taught(call, f"y{suffix}", y):
            self._check_targets(call, f"y{suffix}", y)
            options |= self._target_options
            if numbers is None:
                rows, targets = validate_data(self, X, y, **options)
            else:
                del options["reset"]
                rows, targets = check_X_y(numbers, y, **options)
        return rows, targets if gaps is None else np.where(gaps, np.nan, targets)

    def _filled(self, y: object, method: str) -> tuple[Any, np.ndarray | None]:
        """Targets, and which of them are missing, if the method may have such; these
        are zero then.
        """
        return y, None

    @contextmanager
    def _scored(self, y: Any, sample_weight: Any) -> Iterator[None]:
        """Check targets of a score, which scikit-learn then computes."""
        check_is_fitted(self)
        call = f"{self._call}.score"
        argument = "y" if sample_weight is None else "y, sample_weight"
        with taught(call, argument, y):
            self._check_targets(call, "y", y)
            yield

    def _answers(
        self, name: str, rows: np.ndarray, *by_row: np.ndarray, **options: Any
    ) -> tuple:
        """A summary at standardized rows."""
        # overflow of float32
        with self._stored_programs(), np.errstate(over="ignore"):
            answers = self._predictive(name, rows, *by_row, **options)
        if any(np.isnan(values).any() for values in answers):
            got = "rows so far from those of the fit that the network overflows"
            raise argument_error(
                self._call,
                "X",
                got,
                "Check the units of these rows, or leave them out.",
            )
        return answers

    def _asking_alike(self, X_held_out: Any, X: Any) -> Callable[..., tuple]:
        """:meth:`_asking` at held-out and new rows: equal rows have equal values, to
        the last bit.

        A program may round a row differently in another place of its chunk, so each row
        is computed once.
        """
        tables = self._rows(X_held_out, "X_held_out"), self._rows(X)
        rows, place = np.unique(np.concatenate(tables), axis=0, return_inverse=True)

        def ask(name: str, options: Any = ()) -> tuple:
            answers = self._answers(name, rows, options=options)
            return tuple(values[place.reshape(-1)] for values in answers)

        return ask

    def uncertainty(self, X: Any) -> Uncertainty:
        """How much of the uncertainty about new observations is noise, and how much
        more data would remove.
        """
        raise NotImplementedError

    @checked("estimators.{}.most_uncertain")
    def most_uncertain(self, X: Any, num_rows: PositiveInt = 1) -> np.ndarray:
        """Indices of the rows about which the network knows least, the largest
        epistemic uncertainty first.

        Several targets count by the sum of their variances in standardized units.
        """
        epistemic = self.uncertainty(X).epistemic
        if epistemic.ndim == 2:
            epistemic = np.sum(epistemic / self._y_sd**2, axis=1)
        if num_rows > len(epistemic):
            got = f"{num_rows} of {len(epistemic)} rows"
            raise argument_error(
                f"{self._call}.most_uncertain", "num_rows", got, "Ask for fewer rows."
            )
        return np.argsort(-epistemic, kind="stable")[:num_rows]

    def importances(self, random_state: Any = None) -> dict[str, float]:
        r"""The share of the variance of the predictions that each column has, the
        largest first.

        .. math:: S_j = \frac{E[(f(x) - f(x^{(j)}))^2]}{2\,\mathrm{Var} f(x)}

        f is the predictive mean, or the probabilities of classes or levels, summed over
        targets or these; of "positive" and "bounded" targets the mean of their log or
        logit. In :math:`x^{(j)}` the values of column j come from another row of the
        fit. Shares of interacting columns add up to more than 1. It is what the network
        uses: of two columns that say the same, each may have any part.

        :param random_state: seed of the permutations, by default that of the fit.
        :return: shares by name, of arrays ``x0``, ``x1``, ...

        Reference: Saltelli et al. (2010), equation (f) of table 2, for independent
        columns.
        """
        check_is_fitted(self)
        seed = self.attrs_["seed"] if random_state is None else random_state
        with taught(f"{self._call}.importances", "random_state", random_state):
            generator = check_random_state(seed)
        rows = self._data[0][:IMPORTANCE_ROWS]
        groups = self._places_of_columns(rows.shape[1])
        names = [f"x{place}" for place in range(rows.shape[1])]
        if self._columns_of_x is not None:
            names = self._columns_of_x.names
        predicted = self._answers(self._mean_summary, rows)[0]
        total = 2 * np.sum(np.var(predicted, axis=0))
        shares = {}
        for place, name in enumerate(names):
            changed = rows.copy()
            # A shift of a random order: no row keeps its own values.
            order = generator.permutation(len(rows))
            columns = np.flatnonzero(groups == place)
            changed[np.ix_(order, columns)] = rows[np.ix_(np.roll(order, 1), columns)]
            moved = self._answers(self._mean_summary, changed)[0]
            change = np.sum(np.mean((moved - predicted) ** 2, axis=0))
            shares[name] = float(change / total) if total > 0 else 0.0
        return dict(sorted(shares.items(), key=lambda item: -item[1]))

    def calibrate(self, X: Any, y: Any) -> Any:
        """Scale the predictive distribution by the factor under which held-out rows are
        most probable.

        The factor, ``calibration_``, multiplies the distance of an observation from its
        predictive mean (regression), or is the temperature T of the class
        probabilities, in proportion to p^(1 / T). It maximizes the log density plus
        that of a prior, log factor ~ N(0, 0.5^2): without it a few rows that are all
        classified right would make it 0. Means and predicted classes do not change.
        Intervals and probabilities do, but not ``idata_``, which is the posterior. Use
        held-out rows: training rows give a factor that is too small. A further ``fit``
        removes it.

        :param X: at least ten rows that were not in the fit. :param y: their targets.
        :return: the estimator itself.
        """
        from scipy.optimize import minimize_scalar

        check_is_fitted(self)
        rows, _ = self._rows_and_targets("calibrate", X, y)
        if len(rows) < MIN_CALIBRATION_ROWS:
            got = f"{len(rows)} rows"
            raise argument_error(
                f"{self._call}.calibrate",
                "X",
                got,
                f"Hold out at least {MIN_CALIBRATION_ROWS} rows.",
            )
        density = self._density_by_factor(X, y, "calibrate")

        def loss(log: float) -> float:
            return 0.5 * (log / CALIBRATION_SD) ** 2 - density(np.exp(log)).sum()

        if not np.isfinite(loss(0.0)):
            got = "targets so far from the predictions that their densities vanish"
            raise argument_error(
                f"{self._call}.calibrate", "y", got, "Check their units."
            )
        optimum = minimize_scalar(loss, bounds=(-5.0, 5.0), method="bounded")
        self.calibration_ = float(np.exp(optimum.x))
        return self

    def log_predictive_density(self, X: Any, y: Any) -> np.ndarray:
        """log p(y_n | x_n, D) of each row, (N,), of targets in the units of the data:
        larger is better. Of several targets it is that of those that are not NaN.
        """
        density = self._density_by_factor(X, y, "log_predictive_density")
        return density(self.calibration_)

    def _density_by_factor(
        self, X: Any, y: Any, method: str
    ) -> Callable[[float], np.ndarray]:
        """Log densities (N,) of rows as a function of the factor of :meth:`calibrate`.

        :param method: what the user called.
        """
        raise NotImplementedError

    def _conformal_rank(self, method: str, num_rows: int, level: float) -> int:
        """The rank of a held-out score that the score of a new row exceeds with
        probability 1 - ``level``.
        """
        rank = int(np.ceil((num_rows + 1) * level - 1e-9))
        if rank > num_rows:
            minimum = int(np.ceil(level / (1 - level) - 1e-9))
            instead = f"Hold out at least {minimum} rows for this level."
            raise argument_error(
                f"{self._call}.{method}", "X_held_out", f"{num_rows} rows", instead
            )
        return rank

    def _asking_for_draws(
        self, X: Any, count: int, random_state: Any
    ) -> tuple[Callable[..., tuple], np.random.Generator]:
        """:meth:`_asking` for the components of some draws, each draw used as often as
        the others or once less; and a generator.
        """
        check_is_fitted(self)
        with taught(f"{self._call}.sample", "random_state", random_state):
            source = check_random_state(random_state)
        generator = np.random.default_rng(source.randint(2**31))
        total = self._predictive.num_draws
        orders = [generator.permutation(total) for _ in range(-(-count // total))]
        draw_index = np.concatenate(orders)[:count]
        return self._asking(X, draw_index=draw_index), generator

    def _log_slopes(self) -> np.ndarray | float:
        """Log derivatives of what the network is trained on by the targets of the fit:
        one, or one for each row.
        """
        return 0.0

    @property
    def idata_(self) -> Any:
        """The fit for ArviZ, as from :func:`~numpyro_bnn.to_inference_data`; made on
        first access.

        Weights are those of the standardized network; inputs, targets, predictions and
        log likelihoods have the units of the data. Targets and predictions of the kinds
        "positive" and "bounded" are logs and logits of the data, ratings are numbered.
        """
        check_is_fitted(self)
        if self._idata is None:
            self._idata = self._export()
        return self._idata

    def _computed_sites(self, model: Callable) -> dict[str, np.ndarray]:
        """Values (C, S, ...) that the model computes from the draws, such as weights
        from their standardized values.
        """
        reading, draws = Posterior(model, self._data), self._predictive.draws
        names = sites_of_type(reading.sites, "deterministic").keys() - draws.keys()

        def values(posterior: Posterior, draws: dict) -> dict:
            def of_one(draw: dict) -> dict:
                sites = posterior.at(draw, only=sorted(names))
                return {name: site["value"] for name, site in sites.items()}

            return jax.vmap(jax.vmap(of_one))(draws)

        return jax.device_get(reading.run(values, draws))

    def _export(self) -> Any:
        model = self._predictive.model_of(self._predictive.params)
        bound = bind(model, self._data, {})
        key = jax.random.fold_in(jax.random.key(self.attrs_["seed"]), 2)
        evaluate = partial(map_draws, progress_bar=self.progress_bar)
        with self._predictive.precision():
            draws = {**self._predictive.draws, **self._computed_sites(model)}
            fit = Fit(model, bound, draws)
            groups, judged = Exporter(fit, {}, {}, evaluate).training_groups(key)
        chains = np.arange(self.attrs_.get("num_chains", 1))
        for name in ("diverged", "frozen_chains"):
            chains = np.setdiff1d(chains, ast.literal_eval(self.attrs_[name]))
        for name, data in groups.items():
            if "chain" in data.dims:
                groups[name] = data.assign_coords(chain=chains)

        def in_units(name: str, scaler: Scaler) -> None:
            values = {
                str(k): v * scaler.scale + scaler.mean
                for k, v in groups[name].data_vars.items()
            }
            groups[name] = groups[name].assign(values)

        in_units("constant_data", self._x_scaler)
        if scaler := self._y_scaler:
            for name in {"observed_data", "posterior_predictive"} & groups.keys():
                in_units(name, scaler)
            # the model has zeros where targets are missing
            known = ~np.isnan(self._data[1])
            groups["observed_data"] = groups["observed_data"].where(known)
            slopes = self._log_slopes()
            log_likelihood = groups["log_likelihood"]
            values = {name: log_likelihood[name] + slopes for name in log_likelihood}
            groups["log_likelihood"] = log_likelihood.assign(values)
        return reported(
            groups,
            about({**self.attrs_, "standardized_inside": True, **judged}, key, None),
        )
