"""Groups of shifts: biases before a normalization, a common shift of all class logits."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from numpyro_bnn.symmetry.base import OnElements
from numpyro_bnn.symmetry.parts import Part

__all__ = ["Shift"]


@dataclass(frozen=True)
class Shift(OnElements):
    r"""A number added to all elements of a unit: w -> w + g.

    A bias before batch normalization: the number of each unit is free. Class logits: one number for all classes,
    and one per input of the last layer. Orbit conditional: the prior draw for a unit of one element; for Gaussian
    elements N(m_k, s_k^2)

    .. math:: g \sim N\Big(-\frac{\sum_k (w_k - m_k) / s_k^2}{\sum_k 1 / s_k^2},\ \frac{1}{\sum_k 1 / s_k^2}\Big).

    Log determinant 0. Gauge: the elements of a unit have mean 0.

    :param elements: sites or (site, axis) pairs; the axis runs over the units.

    >>> import jax.numpy as jnp
    >>> Shift([("w", 0)]).act({"w": jnp.zeros((2, 3))}, jnp.array([1.0, 2.0]))["w"][:, 0].tolist()
    [1.0, 2.0]
    """

    def on_part(self, part: Part, value: jax.Array, g: jax.Array) -> jax.Array:
        return value + part.by_element(g, jnp.ndim(value))

    def random(self, rng_key: jax.Array, units: int) -> jax.Array:
        return 3.0 * jax.random.normal(rng_key, (units,))
