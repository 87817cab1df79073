"""Finite groups: signs of units and their order."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from numpyro_bnn.symmetry.base import Symmetry, as_parts
from numpyro_bnn.symmetry.parts import Part, Values

__all__ = ["Permutation", "SignFlip"]


@dataclass(frozen=True)
class SignFlip(Symmetry):
    """Units with an odd activation: everything that writes to or reads a unit changes its sign.

    Also weights before a normalisation together with its gain. Orbit conditional: a unit is flipped with probability
    p(g theta) / (p(theta) + p(g theta)), one half under a symmetric prior. Gauge: see
    :func:`~numpyro_bnn.symmetry.canonical`.

    :param elements: (site, axis) pairs; the axis runs over the units.

    >>> import jax.numpy as jnp
    >>> SignFlip([("w", 0)]).act({"w": jnp.ones(2)}, jnp.array([1.0, -1.0]))["w"].tolist()
    [1.0, -1.0]
    """

    elements: Any
    continuous: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "elements", as_parts("symmetry.SignFlip", "elements", self.elements))

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.elements

    def act(self, values: Mapping[str, jax.Array], g: jax.Array) -> Values:
        moved: Values = {}
        for part in self.elements:
            value = moved.get(part.site, values[part.site])
            moved[part.site] = value * part.by_element(g, jnp.ndim(value))
        return moved

    def log_det(self, values: Mapping[str, jax.Array], g: jax.Array) -> jax.Array:
        return jnp.zeros_like(g)

    def random(self, rng_key: jax.Array, units: int) -> jax.Array:
        return jnp.where(jax.random.bernoulli(rng_key, 0.5, (units,)), 1.0, -1.0)


@dataclass(frozen=True)
class Permutation(Symmetry):
    """Hidden units in another order, with everything that writes to or reads them.

    Orbit conditional: a uniform order under an exchangeable prior, which is proposed and otherwise corrected.
    Hyper-parameters that belong to single units (horseshoe, ARD of the next layer) move along. Gauge: see
    :func:`~numpyro_bnn.symmetry.canonical`.

    :param elements: (site, axis) pairs; the axis runs over the units.

    >>> import jax.numpy as jnp
    >>> Permutation([("w", 0)]).act({"w": jnp.array([5.0, 6.0])}, jnp.array([1, 0]))["w"].tolist()
    [6.0, 5.0]
    """

    elements: Any
    continuous: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "elements", as_parts("symmetry.Permutation", "elements", self.elements))

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.elements

    def act(self, values: Mapping[str, jax.Array], g: jax.Array) -> Values:
        moved: Values = {}
        for part in self.elements:
            moved[part.site] = part.permuted(moved.get(part.site, values[part.site]), g)
        return moved

    def log_det(self, values: Mapping[str, jax.Array], g: jax.Array) -> jax.Array:
        return jnp.zeros(g.shape)

    def random(self, rng_key: jax.Array, units: int) -> jax.Array:
        # Random 32-bit keys: ties, which would favour the old order, have a probability below U^2 2^-33.
        return jnp.argsort(jax.random.bits(rng_key, (units,)))
