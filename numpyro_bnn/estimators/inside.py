"""Estimators inside other interfaces: answers in a pipeline or a search, for the rows
those take, and a regressor of skpro.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

from sklearn.pipeline import Pipeline
from sklearn.utils.validation import check_is_fitted

from numpyro_bnn._checks import argument_error
from numpyro_bnn._options import Kind, checked
from numpyro_bnn.estimators.network import Network
from numpyro_bnn.estimators.regressor import Regressor

CALL = "estimators.inside"
ROWS = ("X", "X_held_out")  # arguments that hold rows


class Inside:
    """The answers of an estimator whose rows are transformed first; see
    :func:`inside`.
    """

    def __init__(self, steps: list[Any], estimator: Network) -> None:
        self._steps = steps
        self._estimator = estimator

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "fit":
            raise AttributeError(name)
        value = getattr(self._estimator, name)
        return self._transformed_first(value) if inspect.ismethod(value) else value

    def __dir__(self) -> list[str]:
        names = dir(self._estimator)
        return [name for name in names if name != "fit" and name[0] != "_"]

    def _transformed_first(self, method: Callable) -> Callable:
        signature = inspect.signature(method)

        @wraps(method)
        def answer(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            for argument in ROWS:
                if argument in bound.arguments:
                    rows = bound.arguments[argument]
                    for step in self._steps:
                        rows = step.transform(rows)
                    bound.arguments[argument] = rows
            result = method(*bound.args, **bound.kwargs)
            return self if result is self._estimator else result

        return answer


def inside(model: Any) -> Any:
    """Get intervals and all other answers from the estimator at the end of a fitted
    ``Pipeline``, or of a search such as ``GridSearchCV``, for rows as the pipeline
    takes them.

    scikit-learn passes on ``predict`` and ``predict_proba`` only. ``calibrate`` changes
    the estimator itself, so predictions of the pipeline follow.

    :param model: a fitted ``Pipeline``, search, or estimator of this package; one may
        be in the other.
    :raises ValueError: if there is no :class:`Regressor` or :class:`Classifier` at the
        end of it.

    >>> import numpy as np
    >>> from sklearn.pipeline import make_pipeline
    >>> from sklearn.preprocessing import StandardScaler
    >>> from numpyro_bnn.estimators import Regressor, inside
    >>> X = np.linspace(-1, 1, 40)[:, None]
    >>> regressor = Regressor("adf", widths=(5,), random_state=0)
    >>> pipeline = make_pipeline(StandardScaler(), regressor).fit(X, X[:, 0])
    >>> low, high = inside(pipeline).predict_interval(X, level=0.9)
    >>> low.shape
    (40,)
    """
    steps: list[Any] = []
    estimator = model
    while not isinstance(estimator, Network):
        if hasattr(estimator, "best_estimator_"):
            estimator = estimator.best_estimator_
        elif isinstance(estimator, Pipeline):
            transformers = [step for _, step in estimator.steps[:-1]]
            steps += [step for step in transformers if hasattr(step, "transform")]
            estimator = estimator.steps[-1][1]
        else:
            got = f"{type(estimator).__name__} in the place of the estimator"
            instead = (
                "Pass a fitted `Pipeline` or search that ends in a `Regressor` or "
                "`Classifier`."
            )
            raise argument_error(CALL, "model", got, instead)
    check_is_fitted(estimator)
    return Inside(steps, estimator)


@checked("estimators.as_skpro")
def as_skpro(
    regressor: Annotated[
        Regressor, Kind(Regressor, "Pass a `Regressor`, e.g. `Regressor(effort=0.1)`.")
    ]
    | None = None,
) -> Any:
    """Use a :class:`Regressor` where skpro takes a probabilistic regressor: its
    pipelines, searches, ensembles, metrics and reductions.

    ``predict_proba`` of the result is a distribution of skpro whose density or mass,
    distribution function, quantiles, moments and scores are those of the regressor.
    Its samples are joint, as those of ``Regressor.sample``. Whole numbers and ratings
    have masses (``log_pmf``) and no density, so skpro's ``LogLoss`` is infinite.

    :param regressor: with your settings, by default ``Regressor()``. It stays as it is:
        the fitted copy is ``regressor_``. It takes one column of targets.
    :return: a ``SkproRegressor`` of ``numpyro_bnn.estimators.skpro``.
    :raises ImportError: without ``pip install "numpyro_bnn[skpro]"``.

    >>> import importlib.util
    >>> import numpy as np, pandas as pd
    >>> from numpyro_bnn.estimators import Regressor, as_skpro
    >>> X = pd.DataFrame({"x": np.linspace(-1, 1, 40)})
    >>> y = X + np.random.default_rng(0).normal(0, 0.1, (40, 1))
    >>> if importlib.util.find_spec("skpro"):
    ...     forecaster = as_skpro(Regressor("adf", widths=(5,), random_state=0))
    ...     prediction = forecaster.fit(X, y).predict_proba(X[:3])
    ...     assert prediction.log_pdf(y[:3]).shape == (3, 1)
    """
    from numpyro_bnn.estimators.skpro import SkproRegressor

    return SkproRegressor(regressor)
