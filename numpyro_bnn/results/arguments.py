"""Arguments of a model: those of the run, those of a prediction, and which of them are observations."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from numpyro_bnn import _checks
from numpyro_bnn._checks import argument_error, unknown_name

__all__ = ["Arguments", "bind", "for_prediction"]

CALL = "to_inference_data"


@dataclass(frozen=True)
class Arguments:
    """Arguments of one call of a model, by name."""

    signature: inspect.Signature
    values: Mapping[str, Any]

    def call(self, values: Mapping[str, Any] | None = None) -> tuple[tuple, dict[str, Any]]:
        """Positional and keyword arguments, with ``values`` in place of their namesakes."""
        bound = self.signature.bind_partial()
        bound.arguments.update(_regroup(self.signature, {**self.values, **(values or {})}))
        return bound.args, bound.kwargs

    @property
    def arrays(self) -> dict[str, Any]:
        """The arguments that are arrays with at least one axis."""
        return {name: value for name, value in self.values.items() if _is_array(value)}


def bind(model: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Arguments:
    """Give every argument of a call its name; those of ``**kwargs`` keep theirs."""
    signature = inspect.signature(model)
    bound = signature.bind(*args, **kwargs)
    values: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            values |= value
        else:
            values[name] = value
    return Arguments(signature, values)


def for_prediction(arguments: Arguments, new: Mapping[str, Any], observed: set[str]) -> Arguments:
    """Arguments of a prediction: new inputs in place of the old, observations dropped where not given.

    :param arguments: those of the run.
    :param new: values by argument name, e.g. ``{"x": x_test, "y": y_test}``.
    :param observed: names of the arguments that carry observations.
    :raises ValueError: for an unknown name, NaN, an array unlike the one of the run, mismatched lengths, or an
        argument of training length that has no new value.
    """
    for name, value in new.items():
        if name not in arguments.values:
            raise unknown_name(CALL, "predictions", name, arguments.values)
        if _is_array(value):
            _check_like(name, value, arguments.values[name])
    arrays = {name: value for name, value in new.items() if _is_array(value)}
    for length in {np.shape(value)[0] for value in arguments.arrays.values()}:
        # Arguments of one length in the run are rows of one table, and stay so.
        together = {k: v for k, v in arrays.items() if np.shape(arguments.values[k])[:1] == (length,)}
        _checks.check_same_length(CALL, **together)
    _check_left_out(arguments, arrays, observed)
    parameters = arguments.signature.parameters
    dropped = {
        name: None for name in observed - set(new) if name in parameters and parameters[name].default is None
    }
    return replace(arguments, values={**arguments.values, **new, **dropped})


def _check_like(name: str, value: Any, old: Any) -> None:
    if np.issubdtype(np.asarray(value).dtype, np.floating):
        _checks.check_finite(CALL, f"predictions[{name!r}]", value)
    if _is_array(old) and np.shape(value)[1:] != np.shape(old)[1:]:
        raise argument_error(
            CALL,
            f"predictions[{name!r}]",
            f"shape {np.shape(value)}",
            f"Pass (M, *{np.shape(old)[1:]}), one row per new point, as in the run's {np.shape(old)}.",
        )


def _check_left_out(arguments: Arguments, new: Mapping[str, Any], observed: set[str]) -> None:
    """An argument with one row per training point cannot serve other points."""
    lengths = {np.shape(arguments.values[name])[0] for name in new if _is_array(arguments.values[name])}
    for name, value in arguments.arrays.items():
        if name not in new and name not in observed and np.shape(value)[0] in lengths:
            raise argument_error(
                CALL,
                "predictions",
                f"no value for {name!r}, which has one row per training point",
                f"Write e.g. `predictions={{..., {name!r}: {name}_test}}`.",
            )


def _is_array(value: Any) -> bool:
    return hasattr(value, "dtype") and np.ndim(value) > 0


def _regroup(signature: inspect.Signature, values: Mapping[str, Any]) -> dict[str, Any]:
    """Put names that are no parameters back into ``**kwargs``."""
    known = {name: value for name, value in values.items() if name in signature.parameters}
    rest = {name: value for name, value in values.items() if name not in signature.parameters}
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD and rest:
            known[name] = rest
    return known
