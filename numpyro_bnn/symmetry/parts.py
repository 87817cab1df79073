"""Which elements of a site move together with one unit."""

from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp

__all__ = ["Part", "Values"]

Values = dict[str, jax.Array]


class Part(NamedTuple):
    """The elements of a site that one number per unit acts on.

    :param site: name of the sample site, e.g. ``"net/Dense_0.kernel"``.
    :param axis: axis of the site that runs over the units; ``None`` if one number moves the whole site.
    :param repeats: how often the units are repeated along the axis (behind ``Flatten``), the unit running fastest.

    >>> import jax.numpy as jnp
    >>> part = Part("kernel", axis=1)
    >>> part.over_units(jnp.array([[1.0, 2.0], [3.0, 4.0]])).tolist(), part.units((3, 2))
    ([4.0, 6.0], 2)
    """

    site: str
    axis: int | None = None
    repeats: int = 1

    def units(self, shape: tuple[int, ...]) -> int:
        """Number of units U of a site of ``shape``."""
        return 1 if self.axis is None else shape[self.axis] // self.repeats

    def per_unit(self, shape: tuple[int, ...]) -> int:
        """Elements that belong to each unit."""
        return prod(shape) // self.units(shape)

    def over_units(self, elements: jax.Array) -> jax.Array:
        """Sum over the elements of each unit: (U,)."""
        if self.axis is None:
            return jnp.sum(elements)[None]
        rows = jnp.moveaxis(elements, self.axis, -1).reshape((-1, self.units(elements.shape)))
        return jnp.sum(rows, axis=0)

    def by_element(self, numbers: jax.Array, ndim: int) -> jax.Array:
        """Numbers (U,) in a shape that broadcasts against the site."""
        if self.axis is None:
            return numbers.reshape((1,) * ndim)
        along = jnp.tile(numbers, self.repeats)
        return jnp.expand_dims(along, tuple(i for i in range(ndim) if i != self.axis % ndim))

    def permuted(self, value: jax.Array, order: jax.Array) -> jax.Array:
        """The site with its units in another order (U,)."""
        if self.axis is None:
            return value
        units = order.shape[0]
        index = (jnp.arange(self.repeats)[:, None] * units + order[None, :]).reshape(-1)
        return jnp.take(value, index, axis=self.axis)
