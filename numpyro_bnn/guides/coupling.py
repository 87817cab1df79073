"""AutoCoupling: a guide made of coupling flows, over all sites or chosen blocks."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.distributions.transforms import Transform
from numpyro.infer.autoguide import AutoContinuous

from numpyro_bnn._checks import argument_error
from numpyro_bnn._options import (
    Choice,
    Model,
    Natural,
    PositiveInt,
    PositiveOrInfinite,
    checked,
)
from numpyro_bnn.guides.auto_blocks import AutoBlocks
from numpyro_bnn.guides.blocks import Patterns, cut
from numpyro_bnn.guides.flows import MASKS, Coupling
from numpyro_bnn.nn.base import Shape


class AutoCoupling(AutoBlocks):
    r"""Affine coupling flow over all sites or chosen blocks, with mean field for the
    rest.

    In each block :math:`\theta = \mu + \sigma \odot f_L \circ \dots \circ
    f_1(\epsilon)`, :math:`\epsilon \sim N(0, I)`; every f scales and shifts one half of
    the numbers given the other half,

    .. math:: y_A = x_A, \qquad y_B = x_B \odot e^{b \tanh(s(x_A)/b)} + t(x_A).

    It starts as the mean field guide, and its number of parameters is linear in the
    number of sites. One flow over all weights of a network is rarely worth its cost:
    use it for the hyper-scales, or the last layer. Affine flows keep the tail class:
    half-Cauchy scales need a non-centered model, e.g. :mod:`~numpyro_bnn.priors`.

    A fitted guide is also a change of variables for NUTS: ``NeuTraReparam(guide,
    params)``.

    :param model: a NumPyro model.
    :param blocks: sites that share a flow, by shell-style pattern or tuple of patterns,
        e.g. ``("*_scale", "sigma")``; a list of these makes several blocks, each with
        its own flow. ``None``: all sites.
    :param num_flows: L, layers of the flow.
    :param hidden: widths of the hidden layers of the networks that give s and t.
    :param mask: ``"alternating"`` or ``"random"`` halves.
    :param bound: b; a layer changes a scale by at most e^b.
    :param seed: seed of the random halves.
    :param options: options of :class:`~numpyro_bnn.guides.AutoBlocks`: ``init_scale``,
        ``init_loc_fn``, ``condition_on_scales``, ``prefix``, ``create_plates``.
    :raises ValueError: for invalid options; when first called, for a block of one
        number.

    Reference: Dinh, Sohl-Dickstein & Bengio (2017), *Density estimation using Real
    NVP*.

    >>> import jax, numpyro, optax
    >>> from numpyro.infer import SVI, Trace_ELBO
    >>> from numpyro_bnn import guides
    >>> def banana():
    ...     x = numpyro.sample("x", dist.Normal(0.0, 1.0))
    ...     numpyro.sample("y", dist.Normal(x**2, 0.5))
    >>> guide = guides.AutoCoupling(banana, num_flows=2)
    >>> svi = SVI(banana, guide, optax.adam(0.01), Trace_ELBO())
    >>> fit = svi.run(jax.random.key(0), 10, progress_bar=False)
    >>> draws = guide.sample_posterior(
    ...     jax.random.key(1), fit.params, sample_shape=(100,)
    ... )
    >>> draws["y"].shape
    (100,)
    """

    @checked("guides.{}")
    def __init__(
        self,
        model: Model,
        blocks: Patterns | Sequence[Patterns] | None = None,
        *,
        num_flows: PositiveInt = 4,
        hidden: Sequence[int] = (32,),
        mask: Annotated[str, Choice(MASKS)] = "alternating",
        bound: PositiveOrInfinite = 2.0,
        seed: Natural = 0,
        **options: Any,
    ) -> None:
        family = Coupling(num_flows, hidden, mask, bound, seed)
        if blocks is None:
            blocks = "*"
        groups = [blocks] if isinstance(blocks, str | tuple) else blocks
        super().__init__(model, [(patterns, family) for patterns in groups], **options)

    # -- the guide as a transport of N(0, I), as NeuTraReparam requires it -------------

    @property
    def latent_dim(self) -> int:
        """Total number of unconstrained values of all latent sites."""
        self._check_called("latent_dim")
        return sum(jnp.size(value) for value in self._init_locs.values())

    def get_base_dist(self) -> dist.Distribution:
        """N(0, I) over all unconstrained values, which :meth:`get_transform` maps to
        the guide.
        """
        zeros = jnp.zeros(self.latent_dim)
        return dist.Normal(zeros, jnp.ones_like(zeros)).to_event(1)

    def get_transform(self, params: Mapping[str, Any]) -> Transform:
        """The map from N(0, I) to the unconstrained sites: those of the blocks, then
        the mean field.

        :class:`~numpyro.infer.reparam.NeuTraReparam` runs NUTS in the space that it
        maps from.

        :param params: parameters of the fitted guide.
        :raises ValueError: with ``condition_on_scales``, where the map depends on the
            data.
        """
        self._check_called("get_transform")
        if self._scaled:
            instead = (
                "The map would depend on the model's arguments: make the guide without "
                "it."
            )
            raise argument_error(
                f"{self._call}.get_transform", "condition_on_scales", True, instead
            )
        transforms: list[Transform] = []
        sizes = []
        for (block, _), fn in zip(self._blocks, self._families(params), strict=True):
            transforms.append(dist.transforms.ComposeTransform(list(fn.transforms)))
            sizes.append(block.size)
        for fn in self._normals(params).values():
            affine = dist.transforms.AffineTransform(
                jnp.ravel(fn.loc), jnp.ravel(fn.scale)
            )
            transforms.append(dist.transforms.IndependentTransform(affine, 1))
            sizes.append(jnp.size(fn.loc))
        return transforms[0] if len(transforms) == 1 else Blockwise(transforms, sizes)

    def _unpack_latent(self, vector: jax.Array) -> dict[str, jax.Array]:
        shapes: dict[str, Shape] = {}
        for block, _ in self._blocks:
            shapes |= block.shapes
        for name, loc in self._init_locs.items():
            shapes.setdefault(name, jnp.shape(loc))
        return cut(vector, shapes)

    def _unpack_and_constrain(
        self, vector: jax.Array, params: Mapping[str, Any]
    ) -> dict[str, jax.Array]:
        return self._sites(self._unpack_latent(vector), vector.shape[:-1])


# NeuTraReparam accepts only subclasses of AutoContinuous, of which it uses the methods
# above. Real inheritance would add another way to sample, and refuse local latent
# sites, which the mean field part can handle.
AutoContinuous.register(AutoCoupling)


class Blockwise(Transform):
    """Transform consecutive parts of (..., D), of lengths ``sizes``, independently; log
    det is the sum over parts.
    """

    domain = constraints.real_vector
    codomain = constraints.real_vector

    def __init__(self, transforms: Sequence[Transform], sizes: Sequence[int]) -> None:
        self.transforms = tuple(transforms)
        self.sizes = tuple(sizes)

    def _parts(self, x: jax.Array) -> list[jax.Array]:
        return jnp.split(x, np.cumsum(self.sizes)[:-1], axis=-1)

    def __call__(self, x: jax.Array) -> jax.Array:
        pieces = zip(self.transforms, self._parts(x), strict=True)
        return jnp.concatenate([t(piece) for t, piece in pieces], axis=-1)

    def _inverse(self, y: jax.Array) -> jax.Array:
        pieces = zip(self.transforms, self._parts(y), strict=True)
        return jnp.concatenate([t._inverse(piece) for t, piece in pieces], axis=-1)

    def log_abs_det_jacobian(
        self, x: jax.Array, y: jax.Array, intermediates: Any = None
    ) -> jax.Array:
        pieces = zip(self.transforms, self._parts(x), self._parts(y), strict=True)
        return jnp.stack([t.log_abs_det_jacobian(a, b) for t, a, b in pieces]).sum(0)

    def tree_flatten(self) -> Any:
        return (self.transforms,), (("transforms",), {"sizes": self.sizes})

    def eq(self, other: object, static: bool = False) -> Any:
        if not isinstance(other, Blockwise) or self.sizes != other.sizes:
            return False
        pairs = zip(self.transforms, other.transforms, strict=False)
        same = [a.eq(b, static=static) for a, b in pairs]
        return all(same) if static else jnp.all(jnp.asarray(same))
