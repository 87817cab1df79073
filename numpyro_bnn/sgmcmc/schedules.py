"""Schedules: functions from the step number 0, 1, 2, ... to a value (step size or
temperature).

Any such callable works, optax schedules included. ``step_size`` eps always means theta
+= (eps / 2) g~ + N(0, eps T), g~ the estimate of the gradient of the log posterior.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import jax.numpy as jnp
from jax import Array

from numpyro_bnn._checks import argument_error
from numpyro_bnn._options import (
    FractionBelow1,
    NonNegative,
    Number,
    Positive,
    PositiveInt,
    check_fields,
)
from numpyro_bnn._types import Scalar

__all__ = ["constant", "polynomial", "cyclical"]

Schedule = Callable[[Array], Any]


@dataclass(frozen=True)
class constant:
    """The same step size at every step: eps_t = value.

    :param value: not negative.

    >>> constant(0.1)(7)
    0.1
    """

    value: NonNegative

    def __post_init__(self) -> None:
        check_fields("schedules.constant", self)

    def __call__(self, step: Scalar) -> Any:
        return self.value


@dataclass(frozen=True)
class polynomial:
    """Step sizes that decrease as a power of the step number: eps_t = a (b + t)^-gamma.

    With gamma in (0.5, 1] the sum of eps_t is infinite and that of eps_t^2 finite, as
    convergence requires.

    :param a: scale, positive.
    :param b: offset, positive.
    :param gamma: power in (0.5, 1].
    :raises ValueError: outside these ranges.

    Reference: Welling and Teh (2011), section 3.

    >>> polynomial(1.0, b=4.0, gamma=1.0)(0)
    0.25
    """

    a: Positive
    b: Positive = 1.0
    gamma: Annotated[float, Number(0.5, strict=True)] = 0.55

    def __post_init__(self) -> None:
        call = "schedules.polynomial"
        check_fields(call, self)
        if self.gamma > 1:
            raise argument_error(
                call,
                "gamma",
                self.gamma,
                "Above 1 the chain freezes: pass a value in (0.5, 1].",
            )

    def __call__(self, step: Scalar) -> Any:
        return self.a * (self.b + step) ** -self.gamma


@dataclass(frozen=True)
class cyclical:
    """Step sizes that decrease along a cosine and restart: eps_k = (eps_0 / 2) [cos(pi
    r_k) + 1].

    The phase is r_k = mod(k - 1, L) / L with cycles of L = ceil(K / M) steps. Step t
    counts from 0, so k = t + 1. Draws are collected where r_k >= beta.

    :param initial: eps_0, positive.
    :param num_steps: K.
    :param num_cycles: M <= K.
    :param explore: beta in [0, 1): the fraction of each cycle that explores and is not
        collected.
    :raises ValueError: outside these ranges.

    Reference: Zhang et al. (2020), equation 1.

    >>> schedule = cyclical(2.0, num_steps=8, num_cycles=2, explore=0.5)
    >>> [bool(schedule.collects(step)) for step in range(4)], float(schedule(4))
    ([False, False, True, True], 2.0)
    """

    initial: Positive
    num_steps: PositiveInt
    num_cycles: PositiveInt
    explore: FractionBelow1 = 0.5

    def __post_init__(self) -> None:
        call = "schedules.cyclical"
        check_fields(call, self)
        if self.num_cycles > self.num_steps:
            raise argument_error(
                call,
                "num_cycles",
                self.num_cycles,
                f"Pass at most num_steps = {self.num_steps}.",
            )

    @property
    def cycle_length(self) -> int:
        """L = ceil(K / M)."""
        return math.ceil(self.num_steps / self.num_cycles)

    def collects(self, step: Scalar) -> Scalar:
        """Return whether the step belongs to the sampling part of its cycle."""
        # Counted in whole steps: a float32 phase may round below `explore`.
        return step % self.cycle_length >= math.ceil(
            self.explore * self.cycle_length - 1e-9
        )

    def temperature(self, step: Scalar) -> Scalar:
        """Return 0 while exploring (optimization without noise) and 1 while sampling; a
        schedule of temperatures.
        """
        return jnp.where(self.collects(step), 1.0, 0.0)

    def __call__(self, step: Scalar) -> Any:
        phase = (step % self.cycle_length) / self.cycle_length
        return 0.5 * self.initial * (jnp.cos(jnp.pi * phase) + 1.0)


def as_schedule(value: NonNegative | Schedule) -> Schedule:
    """Make a constant schedule of a number; keep callables as they are."""
    return value if callable(value) else constant(value)
