"""``Classifier``: class probabilities and labels."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpyro.distributions as dist
from scipy.special import log_softmax
from sklearn.base import ClassifierMixin
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted

from numpyro_bnn import priors
from numpyro_bnn._checks import argument_error
from numpyro_bnn._options import Level, PositiveInt, Switch, checked
from numpyro_bnn.estimators import methods
from numpyro_bnn.estimators.network import Network, Uncertainty, counted_rows
from numpyro_bnn.estimators.tables import check_labels, taught


@dataclass(eq=False, repr=False, kw_only=True)
class Classifier(ClassifierMixin, Network):
    r"""A Bayesian neural network for classification, with scikit-learn's ``fit``,
    ``predict``, ``predict_proba``.

    y_n ~ Categorical(softmax f(x_n)), f a random network with one output per class;
    inputs are standardized inside. Class probabilities are means over the draws of the
    network.

    Parameters are those of :class:`Regressor`, without those of the noise. Scales of
    weights have a wider prior, ``priors.Hierarchical(dist.HalfCauchy(1.0))``, which all
    columns share: classes that are far apart need large weights.

    :param class_weight: weights by label, or ``"balanced"``: each row counts as often
        as its class, so probabilities are those of a population that has the classes in
        these proportions.
    :raises ValueError: on ``fit``, as for :class:`Regressor`, and for targets with one
        class only.

    >>> import numpy as np
    >>> from numpyro_bnn.estimators import Classifier
    >>> X = np.linspace(-1, 1, 40)[:, None]
    >>> y = np.where(X[:, 0] > 0.1, "high", "low")
    >>> classifier = Classifier("adf", widths=(10,), random_state=0).fit(X, y)
    >>> print(
    ...     classifier.classes_,
    ...     classifier.predict(X[[0, -1]]),
    ...     classifier.predict_proba(X).shape,
    ... )
    ['high' 'low'] ['low' 'high'] (40, 2)
    """

    _check_targets = staticmethod(check_labels)
    _mean_summary = "probabilities"

    class_weight: Any = None

    def _usual_prior(self, columns: np.ndarray) -> Any:
        return priors.Hierarchical(dist.HalfCauchy(1.0))

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> "Classifier":
        """Learn from rows X (N, D), or a frame, and labels y (N,), numbers or strings.

        :param sample_weight: how often each row counts, as for :class:`Regressor`.
        """
        return self._fitted(X, y, sample_weight)

    def _learn(self, X: Any, y: Any, sample_weight: Any) -> None:
        X, y, weight = self._training_rows(X, y, sample_weight)
        with taught(f"{self._call}.fit", "y", y):
            check_classification_targets(y)
        if self.class_weight is not None:
            with taught(self._call, "class_weight", self.class_weight):
                by_class = compute_sample_weight(self.class_weight, y)
            weight = self._weights(y, by_class if weight is None else weight * by_class)
            X, y, weight = counted_rows(X, y, weight)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            got = f"labels of one class, {self.classes_[0]!r}"
            raise argument_error(
                f"{self._call}.fit", "y", got, "Pass rows of at least two classes."
            )
        likelihood = methods.categorical_likelihood
        num_classes = len(self.classes_)
        self._run(X, codes, num_classes, likelihood, None, (50,), weight)
        rows, labels = self._checked_rows()
        probs = self._answers("probabilities", rows)[0][np.arange(len(rows)), labels]
        counts = np.bincount(codes, weights=weight)
        constant = counts[labels] / counts.sum()
        self._warn_if_worse(_log(probs), np.log(constant), weight)

    def predict_proba(self, X: Any) -> np.ndarray:
        """Class probabilities (N, K), columns in the order of ``classes_``: means over
        the draws.
        """
        check_is_fitted(self)
        return np.exp(self._log_probs(X, self.calibration_, warn=True))

    def _log_probs(self, X: Any, temperature: float, warn: bool = False) -> np.ndarray:
        (probs,) = self._asking(X, warn=warn)("probabilities")
        return log_softmax(_log(probs) / temperature, axis=1)

    def uncertainty(self, X: Any) -> Uncertainty:
        """How uncertain each label is, and why, (N,) in nats: the mean entropy of
        labels given the network, and the mutual information of label and network, which
        more data would remove.

        A temperature does not change it: it is no property of the draws.
        """
        total, aleatoric = self._asking(X)("entropies")
        return Uncertainty(aleatoric, np.maximum(total - aleatoric, 0.0))

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of each row."""
        probs = self.predict_proba(X)  # refuses before there are classes
        return self.classes_[np.argmax(probs, axis=1)]

    @checked("estimators.{}.conformal_set")
    def conformal_set(
        self, X: Any, X_held_out: Any, y_held_out: Any, level: Level = 0.9
    ) -> np.ndarray:
        r"""Sets of classes that hold the label of a new row with probability ``level``,
        whatever the model.

        .. math:: C(x) = \{k : p(k | x, D) \ge q\}, \quad q = \text{the } \lceil (n +
                  1)\, \mathrm{level} \rceil
            \text{-th largest of } p(y_i | x_i, D)

        over n held-out rows. If these and the new row are exchangeable, the probability
        is at least ``level``, on average over rows and classes, not for each of them.
        Of all such sets these have the fewest classes; a row unlike those held out may
        have none.

        :param X_held_out: rows (n, D) that were not in the fit. :param y_held_out:
            their labels.
        :return: which classes, in the order of ``classes_``, are in the sets: (N, K)
            booleans.
        :raises ValueError: for fewer than level / (1 - level) held-out rows.

        Reference: Sadinle, Lei & Wasserman (2019), sections 2.1 and 3.
        """
        codes = self._codes(X_held_out, y_held_out, "conformal_set", "_held_out")
        rank = self._conformal_rank("conformal_set", len(codes), level)
        (probs,) = self._asking_alike(X_held_out, X)("probabilities")
        label_probs = np.sort(probs[np.arange(len(codes)), codes])
        return probs[len(codes) :] >= label_probs[-rank]

    @checked("estimators.{}.sample")
    def sample(
        self,
        X: Any,
        num_samples: PositiveInt = 100,
        *,
        noise: Switch = True,
        random_state: Any = None,
    ) -> np.ndarray:
        """Joint draws (S, N) of labels; with ``noise=False`` of class probabilities (S,
        N, K).

        :raises ValueError: after :meth:`calibrate`, as a temperature of the mean
            probabilities has no joint draws.
        """
        if getattr(self, "calibration_", 1) != 1:
            got = f"a temperature of {self.calibration_:.3g}"
            instead = "Set `calibration_ = 1.0` for draws without it."
            raise argument_error(f"{self._call}.sample", "calibration_", got, instead)
        ask, generator = self._asking_for_draws(X, num_samples, random_state)
        (probs,) = ask("components")
        if not noise:
            return probs
        uniform = generator.random((*probs.shape[:2], 1))
        exceeded = uniform > np.cumsum(probs, axis=2)[..., :-1]
        return self.classes_[exceeded.sum(axis=2)]

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """The fraction of rows whose label is predicted, as scikit-learn has it."""
        with self._scored(y, sample_weight):
            self._check_kind(f"{self._call}.score", "y", y)
            return super().score(X, y, sample_weight)

    def _check_kind(self, call: str, argument: str, y: Any) -> None:
        """Refuse dates in the place of other labels: to NumPy one day equals 1."""
        dates = np.asarray(y).dtype.kind in "mM"
        if dates != (self.classes_.dtype.kind in "mM"):
            instead = f"Pass labels such as {self.classes_[0]!r}, as in the fit."
            raise argument_error(call, argument, y, instead)

    def _codes(self, X: Any, y: Any, method: str, suffix: str = "") -> np.ndarray:
        """Places of the labels of rows in ``classes_``; arguments of the method may
        have a suffix.
        """
        check_is_fitted(self)
        call = f"{self._call}.{method}"
        _, y = self._rows_and_targets(method, X, y, suffix)
        self._check_kind(call, f"y{suffix}", y)
        unknown = ~np.isin(y, self.classes_)
        if unknown.any():
            got = f"the label {y[unknown].tolist()[0]!r}, which the fit has not seen"
            instead = f"Known: {', '.join(map(repr, self.classes_.tolist()))}."
            raise argument_error(call, f"y{suffix}", got, instead)
        return np.searchsorted(self.classes_, y)

    def _density_by_factor(
        self, X: Any, y: Any, method: str
    ) -> Callable[[float], np.ndarray]:
        codes = self._codes(X, y, method)
        label_entries = np.arange(len(codes)), codes
        log_probs = self._log_probs(X, 1.0)
        return lambda temperature: log_softmax(log_probs / temperature, axis=1)[
            label_entries
        ]


def _log(probs: np.ndarray) -> np.ndarray:
    return np.log(np.maximum(probs, np.finfo(float).tiny))
