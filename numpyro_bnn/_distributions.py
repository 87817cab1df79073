"""What stands inside a distribution object."""

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro.distributions.transforms import AffineTransform, IndependentTransform, Transform

__all__ = ["affine_normal", "is_affine_normal", "unwrapped"]


def unwrapped(fn: dist.Distribution, masked: bool = False) -> dist.Distribution:
    """The distribution inside ``to_event`` and ``expand``.

    :param masked: look inside ``mask`` as well.

    >>> type(unwrapped(dist.Normal(0.0, 1.0).expand([3]).to_event(1))).__name__
    'Normal'
    """
    around = (dist.Independent, dist.ExpandedDistribution) + ((dist.MaskedDistribution,) if masked else ())
    while isinstance(fn, around):
        fn = fn.base_dist
    return fn


def is_affine_normal(fn: dist.Distribution, masked: bool = False) -> bool:
    """Whether a distribution is independent normals or an affine function of them; computes nothing.

    :param masked: look inside ``mask`` as well.

    >>> is_affine_normal(dist.Normal(0.0, 1.0).expand([3]).to_event(1)), is_affine_normal(dist.Gamma(1.0, 1.0))
    (True, False)
    """
    base = unwrapped(fn, masked)
    if isinstance(base, dist.TransformedDistribution):
        affine = all(isinstance(_elementwise(t), AffineTransform) for t in base.transforms)
        return affine and is_affine_normal(base.base_dist, masked)
    return type(base) is dist.Normal


def affine_normal(fn: dist.Distribution, masked: bool = False) -> tuple[jax.Array, jax.Array] | None:
    """Loc and scale, shaped like the site, of independent normals and affine functions of them.

    :param masked: look inside ``mask`` as well.
    :return: ``None`` for another distribution. A scale has the sign that the affine functions give it.

    >>> [float(part) for part in affine_normal(dist.TransformedDistribution(
    ...     dist.Normal(1.0, 2.0), dist.transforms.AffineTransform(0.5, -3.0)))]
    [-2.5, -6.0]
    """
    if not is_affine_normal(fn, masked):
        return None
    transforms: list[AffineTransform] = []  # outermost first
    base = unwrapped(fn, masked)
    while isinstance(base, dist.TransformedDistribution):
        transforms += [_elementwise(t) for t in reversed(base.transforms)]
        base = unwrapped(base.base_dist, masked)
    loc, scale = base.loc, base.scale
    for transform in reversed(transforms):
        loc, scale = transform.loc + transform.scale * loc, transform.scale * scale
    return jnp.broadcast_to(loc, fn.shape()), jnp.broadcast_to(scale, fn.shape())


def _elementwise(transform: Transform) -> Transform:
    """The transform inside ``to_event``."""
    while isinstance(transform, IndependentTransform):
        transform = transform.base_transform
    return transform
