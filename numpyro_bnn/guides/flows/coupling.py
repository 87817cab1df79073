"""Coupling layers as NumPyro transforms: one half of a vector transforms the other."""

from abc import abstractmethod
from typing import Any

import jax
import jax.numpy as jnp
from numpyro.distributions import constraints
from numpyro.distributions.transforms import Transform
from numpyro.distributions.util import array_equiv

from numpyro_bnn.guides.flows.conditioner import Conditioner

__all__ = ["AffineCoupling", "CouplingTransform", "scale_and_shift"]


class CouplingTransform(Transform):
    """What coupling layers share: y_A = x_A, y_B = T(x_B; c(x_A)), with T elementwise and monotone.

    A is the leading part of ``split`` coordinates and B the rest; with ``swap`` the other way round. Inverse and
    log det cost what the forward pass costs. Any number of batch dimensions may stand before the vector.

    Reference: Dinh, Sohl-Dickstein & Bengio (2017), *Density estimation using Real NVP*, equations 4-8.

    :param conditioner: any pytree that maps (..., size of A) to (..., ``num_parameters`` * size of B).
    :param split: size of the leading part.
    :param swap: change the leading part instead of the rest.
    """

    domain = constraints.real_vector
    codomain = constraints.real_vector
    _static: tuple[str, ...] = ("split", "swap")

    def __init__(self, conditioner: Conditioner, split: int, swap: bool = False) -> None:
        self.conditioner = conditioner
        self.split = split
        self.swap = swap

    @abstractmethod
    def forward(self, x: jax.Array, outputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Transform the changed half: (..., D_B) and the conditioner's outputs give y and the log derivatives."""

    @abstractmethod
    def backward(self, y: jax.Array, outputs: jax.Array) -> jax.Array:
        """Inverse of :meth:`forward` in its first argument."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.call_with_intermediates(x)[0]

    def call_with_intermediates(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        kept, changed = self._parts(x)
        changed, log_slopes = self.forward(changed, self.conditioner(kept))
        return self._whole(kept, changed), log_slopes.sum(-1)

    def _inverse(self, y: jax.Array) -> jax.Array:
        kept, changed = self._parts(y)
        return self._whole(kept, self.backward(changed, self.conditioner(kept)))

    def log_abs_det_jacobian(
        self, x: jax.Array, y: jax.Array, intermediates: jax.Array | None = None
    ) -> jax.Array:
        return self.call_with_intermediates(x)[1] if intermediates is None else intermediates

    def _parts(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        leading, rest = x[..., : self.split], x[..., self.split :]
        return (rest, leading) if self.swap else (leading, rest)

    def _whole(self, kept: jax.Array, changed: jax.Array) -> jax.Array:
        return jnp.concatenate([changed, kept] if self.swap else [kept, changed], axis=-1)

    def tree_flatten(self) -> Any:
        return (self.conditioner,), (("conditioner",), {name: getattr(self, name) for name in self._static})

    def eq(self, other: object, static: bool = False) -> Any:
        if type(other) is not type(self):
            return False
        structure: Any = jax.tree.structure(self)
        if structure != jax.tree.structure(other):
            return False
        mine, theirs = jax.tree.leaves(self), jax.tree.leaves(other)
        if any(jnp.shape(a) != jnp.shape(b) for a, b in zip(mine, theirs, strict=True)):
            return False
        same = [array_equiv(a, b, static=static) for a, b in zip(mine, theirs, strict=True)]
        return all(same) if static else jnp.all(jnp.asarray(same))


class AffineCoupling(CouplingTransform):
    r"""Affine coupling with bounded scales, the identity where its conditioner gives zero:

    .. math:: y_A = x_A, \qquad y_B = x_B \odot e^{b \tanh(s(x_A)/b)} + t(x_A).

    Each layer changes a scale by at most the factor e^b, so that no step of an optimizer can overflow it. It keeps
    the tail class of what it transforms: Gaussian tails stay Gaussian, heavy tails stay heavy.

    :param conditioner: maps (..., D_A) to (..., 2 D_B): s, then t.
    :param split: size of the leading part; see :class:`CouplingTransform`.
    :param swap: change the leading part instead of the rest.
    :param bound: b > 0.

    >>> conditioner = Conditioner((jnp.ones((1, 2)),), (jnp.zeros(2),))  # s(x) = t(x) = x
    >>> layer = AffineCoupling(conditioner, split=1, bound=2.0)
    >>> [round(float(v), 3) for v in layer(jnp.array([0.5, 1.0]))]
    [0.5, 2.132]
    >>> [round(float(v), 3) for v in layer.inv(layer(jnp.array([0.5, 1.0])))]
    [0.5, 1.0]
    """

    _static = (*CouplingTransform._static, "bound")

    def __init__(self, conditioner: Conditioner, split: int, swap: bool = False, bound: float = 2.0) -> None:
        super().__init__(conditioner, split, swap)
        self.bound = bound

    def forward(self, x: jax.Array, outputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        log_scale, shift = scale_and_shift(outputs, self.bound)
        return x * jnp.exp(log_scale) + shift, log_scale

    def backward(self, y: jax.Array, outputs: jax.Array) -> jax.Array:
        log_scale, shift = scale_and_shift(outputs, self.bound)
        return (y - shift) * jnp.exp(-log_scale)


def scale_and_shift(outputs: jax.Array, bound: float) -> tuple[jax.Array, jax.Array]:
    """Logarithm of the bounded scale, and shift, each (..., D_B), from (..., 2 D_B)."""
    size = outputs.shape[-1] // 2
    return bound * jnp.tanh(outputs[..., :size] / bound), outputs[..., size:]
