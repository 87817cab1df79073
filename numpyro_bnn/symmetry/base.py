"""Base class of symmetries: groups that act on the sites of a model without changing
its likelihood.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import fields, replace
from math import prod
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_bnn._checks import argument_error
from numpyro_bnn._types import Arrays, PyTree, Shape, Trees

Values = dict[str, Array]
# Sites or (site, axis) pairs as users write them; tuples of `UnitAxis` once checked.
UnitAxes: TypeAlias = Any


class UnitAxis(NamedTuple):
    """The axis of a site that runs over units: one number per unit acts on all elements
    of that unit.

    :param site: name of the sample site, e.g. ``"net/Dense_0.kernel"``.
    :param axis: axis of the site that runs over the units; ``None`` if one number acts
        on the whole site.
    :param repeats: number of repeats of the units along the axis (after ``Flatten``),
        the unit running fastest.
    """

    site: str
    axis: int | None = None
    repeats: int = 1

    def units(self, shape: Shape) -> int:
        """Number of units U of a site of ``shape``."""
        return 1 if self.axis is None else shape[self.axis] // self.repeats

    def per_unit(self, shape: Shape) -> int:
        """Number of elements that belong to each unit."""
        return prod(shape) // self.units(shape)

    def by_unit(self, values: PyTree) -> PyTree:
        """The elements of each unit: (N, elements, U) of N values of the site, of NumPy
        or JAX.
        """
        shape = values.shape[1:]
        if self.axis is not None:
            # NumPy's function transposes arrays of JAX as well
            values = np.moveaxis(values, self.axis % len(shape) + 1, -1)
        return values.reshape((len(values), self.per_unit(shape), self.units(shape)))

    def over_units(self, elements: Array) -> Array:
        """Sum over the elements of each unit: (U,)."""
        return jnp.sum(self.by_unit(elements[None])[0], axis=0)

    def by_element(self, numbers: Array, ndim: int) -> Array:
        """Numbers (U,) in a shape that broadcasts against the site."""
        if self.axis is None:
            return numbers.reshape((1,) * ndim)
        along = jnp.tile(numbers, self.repeats)
        return jnp.expand_dims(
            along, tuple(i for i in range(ndim) if i != self.axis % ndim)
        )

    def permuted(self, value: Array, order: Array) -> Array:
        """The site with its units in another order (U,)."""
        if self.axis is None:
            return value
        index = (
            jnp.arange(self.repeats)[:, None] * order.shape[0] + order[None, :]
        ).reshape(-1)
        return jnp.take(value, index, axis=self.axis)


def as_unit_axes(call: str, argument: str, value: object) -> tuple[UnitAxis, ...]:
    """Unit axes from site names and ``(site, axis)`` or ``(site, axis, repeats)``
    tuples.
    """
    if isinstance(value, str | UnitAxis):
        value = [value]
    if not isinstance(value, Iterable) or isinstance(value, Mapping):
        value = [value]
    axes = []
    for entry in value:
        if isinstance(entry, str):
            axes.append(UnitAxis(entry))
        elif isinstance(entry, tuple) and _is_unit_axis(*entry):
            axes.append(UnitAxis(*entry))
        else:
            instead = (
                'Pass a site, or a pair of site and axis, e.g. `("net/Dense_0.kernel", '
                "1)`."
            )
            raise argument_error(call, argument, entry, instead)
    if not axes:
        raise argument_error(call, argument, "nothing", "Name at least one site.")
    return tuple(axes)


def _is_unit_axis(site: object = None, *numbers: object) -> bool:
    """Whether these are the fields of a :class:`UnitAxis`, two or three."""
    if not isinstance(site, str) or not 1 <= len(numbers) <= 2:
        return False
    axis, repeats = (*numbers, 1)[:2]
    return _is_integer(repeats) and (axis is None or _is_integer(axis))


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


class Symmetry(ABC):
    r"""Base class of the symmetries: a group acting on constrained values of sites, one
    element per unit.

    A symmetry is a frozen dataclass that names sites. A group element is an array whose
    leading axis runs over the units U; :meth:`act` applies it, :meth:`log_det` gives
    log|det| of that map. Along the orbit of a point the posterior is the prior,

    .. math:: \pi(g) \propto p(g\theta)\,|\det D(g\theta)|\,dg

    with the Haar measure dg, so a move along it needs neither data nor gradients.

    >>> from numpyro_bnn import symmetry
    >>> isinstance(symmetry.Scale([("net/Dense_0.kernel", 1)]), symmetry.Symmetry)
    True
    """

    continuous: ClassVar[bool] = True

    @property
    @abstractmethod
    def unit_axes(self) -> tuple[UnitAxis, ...]:
        """The sites it acts on, each with the axis that runs over the units."""

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the sites it acts on."""
        return tuple(axis.site for axis in self.unit_axes)

    @property
    def name(self) -> str:
        """Short name for tables: kind and first site."""
        return f"{type(self).__name__}({self.unit_axes[0].site})"

    @abstractmethod
    def act(self, values: Arrays, g: Array) -> Values:
        """Values of its sites after the group element ``g`` (U,) has acted."""

    @abstractmethod
    def log_det(self, values: Arrays, g: Array) -> Array:
        """log|det| of the map theta -> g theta in constrained coordinates, by unit
        (U,).
        """

    @abstractmethod
    def random(self, rng_key: Array, units: int) -> Array:
        """A random group element; of a finite group it may be the identity."""

    def identity(self, units: int) -> Array:
        """The group element that changes nothing."""
        return jnp.zeros(units)

    def trials(self, rng_key: Array, units: int) -> list[Array]:
        """Group elements at which an invariance is tested; of a finite group enough to
        imply all of it.
        """
        return [self.random(rng_key, units)]

    def units(self, values: Trees) -> int:
        """Number of units U.

        :raises ValueError: if a site has no such axis, or sites have different numbers
            of units.
        """

        def refuse(got: str, instead: str) -> None:
            raise argument_error(
                f"symmetry.{type(self).__name__}", "unit_axes", got, instead
            )

        counts = {}
        for entry in self.unit_axes:
            site, axis, repeats = entry
            shape = jnp.shape(values[site])
            if axis is not None and not -len(shape) <= axis < len(shape):
                refuse(
                    f"axis {axis} of site {site!r} of shape {shape}",
                    "Count the axes of the site.",
                )
            if axis is not None and shape[axis] % repeats:
                refuse(
                    f"{entry} of shape {shape}",
                    "Repeats must divide the length of the axis.",
                )
            counts[site] = entry.units(shape)
        if len(set(counts.values())) > 1:
            refuse(
                f"units by site {counts}",
                "All sites must have the same number of units along their axes.",
            )
        return next(iter(counts.values()))

    def rename(self, names: Mapping[str, str]) -> Self:
        """The symmetry with other site names."""

        def renamed(value: object) -> PyTree:
            if isinstance(value, UnitAxis):
                return value._replace(site=names.get(value.site, value.site))
            return tuple(map(renamed, value)) if isinstance(value, tuple) else value

        return self._with_fields(renamed)

    def without(self, sites: Container[str]) -> Self:
        """The symmetry with some sites left out."""

        def remaining(value: object) -> PyTree:
            return axes_without(value, sites) if isinstance(value, tuple) else value

        return self._with_fields(remaining)

    def _with_fields(self, change: Callable) -> Self:
        changed = {}
        for field in fields(self):  # type: ignore[arg-type]
            changed[field.name] = change(getattr(self, field.name))
        return replace(self, **changed)  # type: ignore[type-var]


def axes_without(axes: Iterable[Any], sites: Container[str]) -> tuple[Any, ...]:
    """The axes of all other sites."""
    return tuple(
        axis
        for axis in axes
        if not isinstance(axis, UnitAxis) or axis.site not in sites
    )


def sites_of(symmetries: Iterable[Symmetry]) -> set[str]:
    """Names of the sites that any of the symmetries changes."""
    return {site for symmetry in symmetries for site in symmetry.sites}


def as_symmetries(call: str, symmetries: object) -> tuple[Symmetry, ...]:
    """Convert one symmetry or several to a tuple; refuse anything else."""
    if isinstance(symmetries, str) or not isinstance(symmetries, Iterable):
        symmetries = (symmetries,)
    symmetries = tuple(symmetries)
    for symmetry in symmetries:
        if not isinstance(symmetry, Symmetry):
            instead = (
                "Pass symmetries such as `symmetry.Scale(...)`, or those of "
                "`symmetry.find(model, ...)`."
            )
            raise argument_error(call, "symmetries", symmetry, instead, TypeError)
    return symmetries
