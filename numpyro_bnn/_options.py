"""Options: how plain arguments are checked, declared by their annotations.

``@checked("infer.ensemble")`` above ``def ensemble(model: Model, num_chains:
PositiveInt = 8)`` checks the arguments of every call, :func:`check_fields` the fields
of a dataclass. What depends on several arguments or on data is checked by code of its
own.
"""

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, wraps
from operator import index
from types import UnionType
from typing import Annotated, Any, TypeAlias, TypeVar, Union, cast, get_args, get_origin

import jax
import numpy as np
from jax import Array

from numpyro_bnn._checks import argument_error, shown, unknown_name
from numpyro_bnn._types import Kwargs

F = TypeVar("F", bound=Callable)


class Option(ABC):
    """How an argument is checked, as a part of its annotation: ``units: Annotated[int,
    Count()]``.
    """

    @abstractmethod
    def check(self, call: str, argument: str, value: Any) -> Any:
        """Return the value in its usual type; refuse any other."""


@dataclass(frozen=True, eq=False)
class Count(Option):
    """An integer (NumPy's too) of at least ``minimum``, as an ``int``."""

    minimum: int = 1

    def check(self, call: str, argument: str, value: Any) -> int:
        count = None
        if not isinstance(value, bool | np.bool):
            with suppress(TypeError):
                count = index(value)
        if count is None or count < self.minimum:
            raise argument_error(
                call,
                argument,
                shown(value),
                f"Pass an integer of at least {self.minimum}.",
            )
        return count


@dataclass(frozen=True, eq=False)
class Number(Option):
    """A finite number of at least (``strict``: above) ``minimum``, ``below`` a limit or
    of at most ``maximum``.
    """

    minimum: float = 0.0
    strict: bool = False
    below: float = math.inf
    maximum: float = math.inf
    infinite: bool = False  # infinity passes too

    def check(self, call: str, argument: str, value: Any) -> Any:
        if isinstance(value, jax.core.Tracer):
            return value  # which number it is, is not known yet
        number = None
        if not isinstance(value, str | bytes | bool | np.bool):
            with suppress(TypeError, ValueError):
                number = float(value)
        if number is None or not self._allows(number):
            kind = TypeError if number is None else ValueError
            raise argument_error(
                call, argument, shown(value), f"Pass a {self!r}.", kind
            )
        return value

    def _allows(self, number: float) -> bool:  # NaN is nowhere
        high_enough = number > self.minimum if self.strict else number >= self.minimum
        small_enough = number < self.below or (self.infinite and number == math.inf)
        return high_enough and small_enough and -math.inf < number <= self.maximum

    def __repr__(self) -> str:
        bounds = []
        if self.minimum > -math.inf:
            bounds = [f"{'above' if self.strict else 'at least'} {self.minimum:g}"]
        limits = ("below", self.below), ("at most", self.maximum)
        bounds += [f"{word} {limit:g}" for word, limit in limits if limit < math.inf]
        return f"finite number {' and '.join(bounds)}".strip()


@dataclass(frozen=True, eq=False)
class Choice(Option):
    """A name in a table; the error suggests the closest one."""

    names: Collection[str]

    def check(self, call: str, argument: str, value: Any) -> str:
        if not isinstance(value, str) or value not in self.names:
            raise unknown_name(call, argument, value, self.names)
        return value

    def __repr__(self) -> str:  # as `help` shows it
        return f"one of {[*self.names]}"


@dataclass(frozen=True, eq=False)
class Kind(Option):
    """An instance of a class or union, or what a function such as
    ``callable`` accepts.
    """

    kind: Any
    instead: str

    def check(self, call: str, argument: str, value: Any) -> Any:
        if isinstance(self.kind, type | UnionType):
            accepts = isinstance(value, self.kind)
        else:
            accepts = self.kind(value)
        if not accepts:
            raise argument_error(call, argument, shown(value), self.instead, TypeError)
        return value

    def __repr__(self) -> str:
        return self.instead


def _is_key(value: Any) -> bool:
    """Whether it is a random key, typed or raw, or an array of keys."""
    dtype = getattr(value, "dtype", None)
    typed = dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)
    return typed or (dtype == np.uint32 and np.ndim(value) > 0)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


KEY = Kind(_is_key, "Pass a key, e.g. `jax.random.key(0)`.")
PositiveInt: TypeAlias = Annotated[int, Count()]
Natural: TypeAlias = Annotated[int, Count(0)]
Positive: TypeAlias = Annotated[float, Number(strict=True)]
PositiveOrInfinite: TypeAlias = Annotated[float, Number(strict=True, infinite=True)]
NonNegative: TypeAlias = Annotated[float, Number()]
NonNegativeOrInfinite: TypeAlias = Annotated[float, Number(infinite=True)]
Fraction: TypeAlias = Annotated[float, Number(maximum=1)]
FractionBelow1: TypeAlias = Annotated[float, Number(below=1)]
Level: TypeAlias = Annotated[float, Number(strict=True, below=1)]
# The text "no" would be true.
Switch: TypeAlias = Annotated[bool, Kind(bool | np.bool, "Pass True or False.")]
RandomKey: TypeAlias = Annotated[Array, KEY]
NetworkName: TypeAlias = Annotated[str, Kind(_is_name, 'Pass a string, e.g. `"net"`.')]
Prefix: TypeAlias = Annotated[str, Kind(_is_name, 'Pass a string, e.g. `"auto"`.')]
Args: TypeAlias = Annotated[
    tuple, Kind(tuple | list, "Pass the arguments of the model, e.g. `(x, y)`.")
]
KwargsOption: TypeAlias = Annotated[Kwargs, Kind(Mapping, "Pass a dictionary.")]
Model: TypeAlias = Annotated[
    Callable, Kind(callable, "Pass a NumPyro model (a function).")
]


def declared_option(annotation: Any) -> tuple[tuple[type, ...], Option] | None:
    """The option that an annotation declares, if any, and the classes whose instances
    pass unchecked.
    """
    is_union = get_origin(annotation) in (Union, UnionType)
    members = get_args(annotation) if is_union else (annotation,)
    classes = tuple(
        get_origin(member) or member
        for member in members
        if get_origin(member) is not Annotated
    )
    for member in members:
        for metadata in getattr(member, "__metadata__", ()):
            if isinstance(metadata, Option):
                return classes, metadata
    return None


@cache
def options_of(function: Callable) -> dict[str, tuple[tuple[type, ...], Option]]:
    """The declared options of a function, by argument."""
    options = {}
    for name, annotation in function.__annotations__.items():
        option = declared_option(annotation)
        if option is not None:
            options[name] = option
    return options


def check_option(call: str, function: Callable, argument: str, value: Any) -> Any:
    """Check one argument by its annotation; return it in its usual type."""
    classes, option = options_of(function)[argument]
    return value if isinstance(value, classes) else option.check(call, argument, value)


def check_fields(call: str, owner: Any) -> None:
    """Check the fields of a dataclass by their annotations, and set them in their usual
    type.
    """
    init = type(owner).__init__
    for field in options_of(init):
        object.__setattr__(
            owner, field, check_option(call, init, field, getattr(owner, field))
        )


def checked(call: str) -> Callable[[F], F]:
    """Check the arguments of a function by their annotations before each call.

    :param call: the name of the function in errors; ``{}`` stands for the class of the
        object of a method.
    """

    def decorate(function: F) -> F:
        parameters = inspect.signature(function).parameters.values()
        places = {
            p.name: place
            for place, p in enumerate(parameters)
            if p.kind is p.POSITIONAL_OR_KEYWORD
        }
        declared = options_of(function)

        @wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            values = list(args)
            name = call.format(*[type(owner).__name__ for owner in args[:1]])
            for argument in declared:
                if argument in kwargs:
                    kwargs[argument] = check_option(
                        name, function, argument, kwargs[argument]
                    )
                elif (place := places.get(argument, len(values))) < len(values):
                    values[place] = check_option(
                        name, function, argument, values[place]
                    )
            return function(*values, **kwargs)

        return cast(F, wrapper)

    return decorate
