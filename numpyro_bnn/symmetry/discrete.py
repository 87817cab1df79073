"""Finite groups: signs of units and their order."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from numpyro_bnn.symmetry.base import OnElements
from numpyro_bnn.symmetry.parts import Part

__all__ = ["Permutation", "SignFlip"]


@dataclass(frozen=True)
class SignFlip(OnElements):
    """Units with an odd activation: everything that writes to or reads a unit changes its sign.

    Also weights before a normalization together with its gain. Orbit conditional: a unit is flipped with probability
    p(g theta) / (p(theta) + p(g theta)), one half under a symmetric prior. Gauge: see
    :func:`~numpyro_bnn.symmetry.canonical`.

    :param elements: (site, axis) pairs; the axis runs over the units.

    >>> import jax.numpy as jnp
    >>> SignFlip([("w", 0)]).act({"w": jnp.ones(2)}, jnp.array([1.0, -1.0]))["w"].tolist()
    [1.0, -1.0]
    """

    continuous: ClassVar[bool] = False

    def on_part(self, part: Part, value: jax.Array, g: jax.Array) -> jax.Array:
        return value * part.by_element(g, jnp.ndim(value))

    def random(self, rng_key: jax.Array, units: int) -> jax.Array:
        return jnp.where(jax.random.bernoulli(rng_key, 0.5, (units,)), 1.0, -1.0)


@dataclass(frozen=True)
class Permutation(OnElements):
    """Hidden units in another order, with everything that writes to or reads them.

    Orbit conditional: a uniform order under an exchangeable prior, which is proposed and otherwise corrected.
    Hyper-parameters that belong to single units (horseshoe, ARD of the next layer) move along. Gauge: see
    :func:`~numpyro_bnn.symmetry.canonical`.

    :param elements: (site, axis) pairs; the axis runs over the units.

    >>> import jax.numpy as jnp
    >>> Permutation([("w", 0)]).act({"w": jnp.array([5.0, 6.0])}, jnp.array([1, 0]))["w"].tolist()
    [6.0, 5.0]
    """

    continuous: ClassVar[bool] = False

    def on_part(self, part: Part, value: jax.Array, g: jax.Array) -> jax.Array:
        return part.permuted(value, g)

    def random(self, rng_key: jax.Array, units: int) -> jax.Array:
        # Random 32-bit keys: ties, which would favor the old order, have a probability below U^2 2^-33.
        return jnp.argsort(jax.random.bits(rng_key, (units,)))
