"""Transforms side by side: consecutive parts of a vector, each with its own transform."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from numpyro.distributions import constraints
from numpyro.distributions.transforms import Transform

__all__ = ["Blockwise"]


class Blockwise(Transform):
    """Transform consecutive parts of (..., D) independently; log det is the sum of theirs.

    :param transforms: of vectors.
    :param sizes: lengths of the parts.

    >>> from numpyro.distributions.transforms import PermuteTransform
    >>> whole = Blockwise([PermuteTransform(jnp.array([1, 0]))] * 2, [2, 2])
    >>> whole(jnp.arange(4.0)).tolist()
    [1.0, 0.0, 3.0, 2.0]
    """

    domain = constraints.real_vector
    codomain = constraints.real_vector

    def __init__(self, transforms: Sequence[Transform], sizes: Sequence[int]) -> None:
        self.transforms = tuple(transforms)
        self.sizes = tuple(sizes)

    def _parts(self, x: jax.Array) -> list[jax.Array]:
        parts, start = [], 0
        for size in self.sizes:
            parts.append(x[..., start : start + size])
            start += size
        return parts

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.concatenate([t(p) for t, p in zip(self.transforms, self._parts(x), strict=True)], axis=-1)

    def _inverse(self, y: jax.Array) -> jax.Array:
        parts = zip(self.transforms, self._parts(y), strict=True)
        return jnp.concatenate([t._inverse(p) for t, p in parts], axis=-1)

    def log_abs_det_jacobian(self, x: jax.Array, y: jax.Array, intermediates: Any = None) -> jax.Array:
        parts = zip(self.transforms, self._parts(x), self._parts(y), strict=True)
        return jnp.stack([t.log_abs_det_jacobian(a, b) for t, a, b in parts]).sum(0)

    def tree_flatten(self) -> Any:
        return (self.transforms,), (("transforms",), {"sizes": self.sizes})

    def eq(self, other: object, static: bool = False) -> Any:
        if not isinstance(other, Blockwise) or self.sizes != other.sizes:
            return False
        same = [a.eq(b, static=static) for a, b in zip(self.transforms, other.transforms, strict=False)]
        return all(same) if static else jnp.all(jnp.asarray(same))
