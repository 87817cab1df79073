"""What a symmetry is: a group that acts on sites of a model without changing its likelihood."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp

from numpyro_bnn._checks import argument_error
from numpyro_bnn.symmetry.parts import Part, Values

__all__ = ["OnElements", "Symmetry", "as_parts", "as_symmetries"]

Self = TypeVar("Self", bound="Symmetry")


def as_parts(call: str, argument: str, value: Any) -> tuple[Part, ...]:
    """Parts from site names, ``(site, axis)`` pairs or parts."""
    if isinstance(value, str | Part):
        value = [value]
    if not isinstance(value, Iterable):
        value = [None]
    parts = []
    for entry in value:
        if isinstance(entry, str):
            entry = Part(entry)
        elif isinstance(entry, tuple) and 2 <= len(entry) <= 3 and isinstance(entry[0], str):
            entry = Part(*entry)
        else:
            raise argument_error(
                call,
                argument,
                entry,
                'Write a site, or a pair of site and axis, e.g. `("net/Dense_0.kernel", 1)`.',
            )
        parts.append(entry)
    if not parts:
        raise argument_error(call, argument, "nothing", "Name at least one site.")
    return tuple(parts)


class Symmetry(ABC):
    r"""Base of the symmetries: a group acting on constrained values of sites, one element per unit.

    A symmetry is a frozen dataclass that names sites. A group element is an array whose leading axis runs over the
    units U; :meth:`act` applies it, :meth:`log_det` gives log|det| of that map. Along the orbit of a point the
    posterior is the prior,

    .. math:: \pi(g) \propto p(g\theta)\,|\det D(g\theta)|\,dg

    with the Haar measure dg, so moving there needs neither data nor gradients.

    >>> from numpyro_bnn import symmetry
    >>> isinstance(symmetry.Scale([("net/Dense_0.kernel", 1)]), symmetry.Symmetry)
    True
    """

    continuous: ClassVar[bool] = True

    @property
    @abstractmethod
    def parts(self) -> tuple[Part, ...]:
        """All parts it touches."""

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the sites it touches."""
        return tuple(part.site for part in self.parts)

    @property
    def name(self) -> str:
        """Short name for tables: kind and first site."""
        return f"{type(self).__name__}({self.parts[0].site})"

    @abstractmethod
    def act(self, values: Mapping[str, jax.Array], g: jax.Array) -> Values:
        """Values of the touched sites after the group element ``g`` (U,) has acted."""

    @abstractmethod
    def log_det(self, values: Mapping[str, jax.Array], g: jax.Array) -> jax.Array:
        """log|det| of the map theta -> g theta in constrained coordinates, by unit (U,)."""

    @abstractmethod
    def random(self, rng_key: jax.Array, units: int) -> jax.Array:
        """A group element far from the identity, to test invariance with."""

    def units(self, values: Mapping[str, Any]) -> int:
        """Number of units U; refuses parts that disagree.

        :raises ValueError: if a site has no such axis, or parts have different numbers of units.
        """
        counts = {}
        for part in self.parts:
            shape = jnp.shape(values[part.site])
            if part.axis is not None and not -len(shape) <= part.axis < len(shape):
                raise argument_error(
                    f"symmetry.{type(self).__name__}",
                    "parts",
                    f"axis {part.axis} of site {part.site!r} of shape {shape}",
                    "Count the axes of the site.",
                )
            if part.axis is not None and shape[part.axis] % part.repeats:
                raise argument_error(
                    f"symmetry.{type(self).__name__}",
                    "parts",
                    f"{part} of shape {shape}",
                    "Repeats must divide it.",
                )
            counts[part.site] = part.units(shape)
        if len(set(counts.values())) > 1:
            raise argument_error(
                f"symmetry.{type(self).__name__}",
                "parts",
                f"units by site {counts}",
                "All parts must have one number of units along their axes.",
            )
        return next(iter(counts.values()))

    def rename(self: Self, names: Mapping[str, str]) -> Self:
        """The symmetry with other site names."""

        def renamed(value: Any) -> Any:
            if isinstance(value, Part):
                return value._replace(site=names.get(value.site, value.site))
            return tuple(map(renamed, value)) if isinstance(value, tuple) else value

        changed = {entry.name: renamed(getattr(self, entry.name)) for entry in fields(self)}  # type: ignore[arg-type]
        return replace(self, **changed)  # type: ignore[type-var]


@dataclass(frozen=True)
class OnElements(Symmetry):
    """A group that does the same to every element of a unit, and keeps volumes: shifts, signs, orders.

    :param elements: sites, (site, axis) pairs or parts; the axis runs over the units.
    """

    elements: Any

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "elements", as_parts(f"symmetry.{type(self).__name__}", "elements", self.elements)
        )

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.elements

    @abstractmethod
    def on_part(self, part: Part, value: jax.Array, g: jax.Array) -> jax.Array:
        """The value of one part after ``g`` (U,) has acted."""

    def act(self, values: Mapping[str, jax.Array], g: jax.Array) -> Values:
        moved: Values = {}
        for part in self.elements:
            moved[part.site] = self.on_part(part, moved.get(part.site, values[part.site]), g)
        return moved

    def log_det(self, values: Mapping[str, jax.Array], g: jax.Array) -> jax.Array:
        return jnp.zeros(g.shape)


def as_symmetries(call: str, symmetries: Any) -> tuple[Symmetry, ...]:
    """One symmetry or several, as a tuple.

    :raises TypeError: for anything else among them.
    """
    given = (symmetries,) if isinstance(symmetries, Symmetry) else tuple(symmetries)
    for symmetry in given:
        if not isinstance(symmetry, Symmetry):
            raise argument_error(
                call,
                "symmetries",
                symmetry,
                "Pass symmetries such as `symmetry.Scale(...)`, or what `symmetry.find(model, ...)` gives.",
                TypeError,
            )
    return given
