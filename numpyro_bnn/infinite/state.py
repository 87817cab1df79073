"""What is carried from layer to layer: the inputs themselves, then covariances of infinitely many units."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

__all__ = ["Covariance", "Given", "Inputs", "State", "Units", "full", "outer", "variance", "within"]


class Inputs(NamedTuple):
    """Data points before the first weights: fixed numbers, (N1, ...) and (N2, ...)."""

    x1: jax.Array
    x2: jax.Array


class Covariance(NamedTuple):
    """Second moments of one of infinitely many independent units (channels), at all pairs of data points.

    P stands for the pairs of pixels: nothing behind dense layers, (h, w) where only equal pixels matter, and
    (h, w, h, w), those of the first data point in front, where averages over pixels follow. S is () or (h, w).

    :param nngp: E f(x1) f(x2), (N1, N2, *P).
    :param ntk: sum over standardized parameters of the products of their derivatives, like ``nngp``; or ``None``.
    :param own1: ``nngp`` of every first data point with itself, (N1, *P).
    :param own2: the same of the second ones, (N2, *P).
    :param mean1: E f(x1), (N1, *S).
    :param mean2: E f(x2), (N2, *S).
    """

    nngp: jax.Array
    ntk: jax.Array | None
    own1: jax.Array
    own2: jax.Array
    mean1: jax.Array
    mean2: jax.Array

    def map(
        self, fn: Callable[[jax.Array], jax.Array], mean: Callable[[jax.Array], jax.Array]
    ) -> "Covariance":
        """Apply a linear operation on pixels: ``fn`` to pairs, ``mean`` to single ones, with leading axis only."""
        pairs = self.nngp.shape[:2]

        def cross(k: jax.Array) -> jax.Array:
            out = fn(k.reshape((-1, *k.shape[2:])))
            return out.reshape((*pairs, *out.shape[1:]))

        return Covariance(
            cross(self.nngp),
            None if self.ntk is None else cross(self.ntk),
            fn(self.own1),
            fn(self.own2),
            mean(self.mean1),
            mean(self.mean2),
        )


class Given(NamedTuple):
    """Second moments given each of G values of something random that all data points share: the gain of a unit.

    :param weights: probabilities of the values, (G,).
    :param k: moments with a leading axis of G.
    """

    weights: jax.Array
    k: Covariance


class Units(NamedTuple):
    """Infinitely many units of a layer.

    :param k: their second moments.
    :param gaussian: whether they are normal, as behind weights; activations need it.
    :param given: where they are normal given the value of something random, moments for each value.
    """

    k: Covariance
    gaussian: bool = True
    given: Given | None = None


State = Inputs | Units


def full(k: Covariance) -> bool:
    """Whether covariances of different pixels are kept."""
    return k.own1.ndim == 5


def variance(own: jax.Array) -> jax.Array:
    """Second moments at single pixels, (N, *S)."""
    return jnp.einsum("nabab->nab", own) if own.ndim == 5 else own


def outer(v1: jax.Array, v2: jax.Array, pixels: bool) -> tuple[jax.Array, jax.Array]:
    """Values at single pixels, (N1, *S) and (N2, *S), ready to broadcast against (N1, N2, *P).

    :param pixels: whether P holds pairs of different pixels.

    >>> a, b = outer(jnp.ones(2), jnp.ones(3), False)
    >>> (a * b).shape
    (2, 3)
    """
    one, other = v1[:, None], v2[None, :]
    return (one[..., None, None], other[:, :, None, None]) if pixels else (one, other)


def within(v: jax.Array, pixels: bool) -> tuple[jax.Array, jax.Array]:
    """The same for the pairs of pixels of one data point, (N, *P)."""
    return (v[..., None, None], v[:, None, None]) if pixels else (v, v)
