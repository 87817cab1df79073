"""Checks of the options that all kernels share."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from numpyro_bnn._checks import argument_error, check_count, check_number, unknown_name
from numpyro_bnn.infer.preconditioning import NAMES, is_warm_start
from numpyro_bnn.infer.target import MINIBATCHES
from numpyro_bnn.infer.warm_start import WarmStart

__all__ = ["OPTIONS", "check_options", "warm_start_of"]

GRADIENTS = ("minibatch", "control_variates", "svrg")
OPTIONS = (
    "step_size",
    "steps_per_draw",
    "temperature",
    "gradient",
    "minibatches",
    "preconditioner",
    "bias_tolerance",
)


def warm_start_of(call: str, warm_start: Any, optimizer: Any) -> WarmStart:
    """What a user writes for ``warm_start=`` and ``optimizer=``, as one.

    :raises ValueError: for a share that is not in [0, 1).
    :raises TypeError: for what is no number.

    >>> warm_start_of("infer.SGLD", 0.5, None).share
    0.5
    """
    if isinstance(warm_start, WarmStart):
        return warm_start if warm_start.optimizer is not None else replace(warm_start, optimizer=optimizer)
    check_number(call, "warm_start", warm_start)
    if warm_start >= 1:
        raise argument_error(call, "warm_start", warm_start, "Pass a share of the warm-up in [0, 1).")
    return WarmStart(warm_start, optimizer=optimizer)


def check_options(
    call: str,
    exact: bool,
    *,
    step_size: float | Callable | None,
    steps_per_draw: int,
    temperature: float,
    gradient: str,
    minibatches: str,
    preconditioner: Any,
    warm_start: Any,
    bias_tolerance: float,
    more_preconditioners: tuple[str, ...] = (),
) -> None:
    """Refuse options of :class:`~numpyro_bnn.infer.SGMCMCKernel` that are out of range.

    :param exact: whether the kernel rejects: then T = 0 has no meaning.
    :param more_preconditioners: names that this kernel knows beside those that all know.
    :raises ValueError: for a number out of range or an unknown name.
    :raises TypeError: for what is no number.
    """
    check_number(call, "temperature", temperature, strict=exact)
    check_number(call, "bias_tolerance", bias_tolerance, strict=True)
    if step_size is not None and not callable(step_size):
        check_number(call, "step_size", step_size, strict=True)
    check_count(call, "steps_per_draw", steps_per_draw)
    if gradient not in GRADIENTS:
        raise unknown_name(call, "gradient", gradient, GRADIENTS)
    if minibatches not in MINIBATCHES:
        raise unknown_name(call, "minibatches", minibatches, MINIBATCHES)
    names = (*NAMES, *more_preconditioners)
    if isinstance(preconditioner, str) and preconditioner not in names:
        raise unknown_name(call, "preconditioner", preconditioner, names)
    if is_warm_start(preconditioner) and not warm_start.share:
        raise argument_error(call, "preconditioner", "'warm_start'", "Set `warm_start=0.5` (say) with it.")
