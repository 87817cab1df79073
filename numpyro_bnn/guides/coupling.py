"""Guides made of coupling flows, over all sites or chosen blocks."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro.distributions.transforms import (
    AffineTransform,
    ComposeTransform,
    IndependentTransform,
    Transform,
)
from numpyro.infer.autoguide import AutoContinuous

from numpyro_bnn._checks import argument_error
from numpyro_bnn.guides.base import AutoBlocks
from numpyro_bnn.guides.blocks import Family, Patterns
from numpyro_bnn.guides.flows.blockwise import Blockwise
from numpyro_bnn.guides.flows.families import Coupling, SplineCoupling

__all__ = ["AutoCoupling", "AutoSplineCoupling"]

Chosen = Patterns | Sequence[Patterns] | None


class _FlowGuide(AutoBlocks):
    """Blocks with one family of flows, and what :class:`~numpyro.infer.reparam.NeuTraReparam` asks of a guide."""

    def __init__(self, model: Callable, blocks: Chosen, family: Family, options: Mapping[str, Any]) -> None:
        super().__init__(model, [(patterns, family) for patterns in _listed(blocks)], **options)

    # -- the guide as a transport of N(0, I) -------------------------------------------------------------

    @property
    def latent_dim(self) -> int:
        """Number of unconstrained numbers of all latent sites."""
        self._check_called("latent_dim")
        return sum(jnp.size(value) for value in self._init_locs.values())

    def get_base_dist(self) -> dist.Distribution:
        """N(0, I) over all unconstrained numbers, which :meth:`get_transform` maps to the guide."""
        zeros = jnp.zeros(self.latent_dim)
        return dist.Normal(zeros, jnp.ones_like(zeros)).to_event(1)

    def get_transform(self, params: Mapping[str, Any]) -> Transform:
        """The map from N(0, I) to the unconstrained sites: those of the blocks, then the mean field.

        It is what :class:`~numpyro.infer.reparam.NeuTraReparam` runs NUTS behind.

        :param params: of the fitted guide.
        :raises ValueError: with ``condition_on_scales``, where the map depends on the data.
        """
        self._check_called("get_transform")
        if self._scaled:
            raise argument_error(
                f"{self._call}.get_transform",
                "condition_on_scales",
                True,
                "The map would read the model's arguments: make the guide without it.",
            )
        transforms: list[Transform] = []
        sizes = []
        for (block, _), fn in zip(self._blocks, self._families(params), strict=True):
            assert isinstance(fn, dist.TransformedDistribution)
            transforms.append(ComposeTransform(list(fn.transforms)))
            sizes.append(block.size)
        for fn in self._normals(params).values():
            affine = AffineTransform(jnp.ravel(fn.loc), jnp.ravel(fn.scale))
            transforms.append(IndependentTransform(affine, 1))
            sizes.append(jnp.size(fn.loc))
        return transforms[0] if len(transforms) == 1 else Blockwise(transforms, sizes)

    def _unpack_latent(self, vector: jax.Array) -> dict[str, jax.Array]:
        values: dict[str, jax.Array] = {}
        start = 0
        for block, _ in self._blocks:
            values |= block.unflatten(vector[..., start : start + block.size])
            start += block.size
        for name in [name for name in self._init_locs if name not in values]:
            shape = jnp.shape(self._init_locs[name])
            end = start + jnp.size(self._init_locs[name])
            values[name] = vector[..., start:end].reshape((*vector.shape[:-1], *shape))
            start = end
        return values

    def _unpack_and_constrain(self, vector: jax.Array, params: Mapping[str, Any]) -> dict[str, jax.Array]:
        return self._sites(self._unpack_latent(vector), vector.shape[:-1])


# NeuTraReparam takes subclasses of AutoContinuous only, of which it uses the methods above. Real inheritance would
# bring another way to sample, and refuse the local latent sites that the mean field of the rest can take.
AutoContinuous.register(_FlowGuide)


class AutoCoupling(_FlowGuide):
    r"""Affine coupling flow over all sites or chosen blocks, the rest mean field.

    In each block :math:`\theta = \mu + \sigma \odot f_L \circ \dots \circ f_1(\epsilon)`,
    :math:`\epsilon \sim N(0, I)`; every f scales and shifts one half of the numbers given the other half,

    .. math:: y_A = x_A, \qquad y_B = x_B \odot e^{b \tanh(s(x_A)/b)} + t(x_A).

    It starts as the mean field guide and has a number of parameters that is linear in the number of sites. One flow
    over all weights of a network is rarely worth its cost: put it on the hyper-scales, or on the last layer. Affine
    flows keep the tail class: half-Cauchy scales need a non-centered model or :mod:`~numpyro_bnn.priors` that are so.

    A fitted guide is also a change of variables for NUTS: ``NeuTraReparam(guide, params)``.

    :param model: a NumPyro model.
    :param blocks: sites that share a flow, by shell-style pattern or tuple of patterns, e.g.
        ``("*_scale", "sigma")``; a list of these makes several blocks, each with its own flow. ``None``: all sites.
    :param num_flows: L, layers of the flow.
    :param hidden: widths of the hidden layers of the networks that give s and t.
    :param mask: ``"alternating"`` or ``"random"`` halves.
    :param bound: b; a layer changes a scale by at most e^b.
    :param seed: of the random halves.
    :param options: of :class:`~numpyro_bnn.guides.AutoBlocks`: ``init_scale``, ``init_loc_fn``,
        ``condition_on_scales``, ``prefix``, ``create_plates``.
    :raises ValueError: for options it cannot use; when first called, for a block of one number.

    Reference: Dinh, Sohl-Dickstein & Bengio (2017), *Density estimation using Real NVP*.

    >>> import jax, numpyro, optax
    >>> from numpyro.infer import SVI, Trace_ELBO
    >>> from numpyro_bnn import guides
    >>> def banana():
    ...     x = numpyro.sample("x", dist.Normal(0.0, 1.0))
    ...     numpyro.sample("y", dist.Normal(x**2, 0.5))
    >>> guide = guides.AutoCoupling(banana, num_flows=2)
    >>> svi = SVI(banana, guide, optax.adam(0.01), Trace_ELBO())
    >>> fit = svi.run(jax.random.key(0), 10, progress_bar=False)
    >>> draws = guide.sample_posterior(jax.random.key(1), fit.params, sample_shape=(100,))
    >>> draws["y"].shape
    (100,)
    """

    def __init__(
        self,
        model: Callable,
        blocks: Chosen = None,
        *,
        num_flows: int = 4,
        hidden: Sequence[int] = (32,),
        mask: str = "alternating",
        bound: float = 2.0,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(model, blocks, Coupling(num_flows, hidden, mask, bound, seed), options)


class AutoSplineCoupling(_FlowGuide):
    """Rational-quadratic spline coupling flow over all sites or chosen blocks, the rest mean field.

    Like :class:`AutoCoupling`, but each layer bends its half by monotone splines before it scales and shifts it:
    closer for skewed, kinked and bimodal posteriors, at more parameters and time. It also bends a block of a single
    number.

    :param model: a NumPyro model.
    :param blocks: as in :class:`AutoCoupling`.
    :param num_flows: layers of the flow.
    :param hidden: widths of the hidden layers of the networks that give the splines.
    :param mask: ``"alternating"`` or ``"random"`` halves.
    :param bound: scales after the spline change by at most e^bound.
    :param seed: of the random halves.
    :param num_bins: K, bins of each spline.
    :param interval: splines bend [-interval, interval], in units of the base.
    :param options: of :class:`~numpyro_bnn.guides.AutoBlocks`.
    :raises ValueError: for options it cannot use.

    Reference: Durkan, Bekasov, Murray & Papamakarios (2019), *Neural spline flows*.

    >>> import jax, numpyro, optax
    >>> from numpyro.infer import SVI, Trace_ELBO
    >>> from numpyro_bnn import guides
    >>> def model():
    ...     numpyro.sample("rate", dist.Gamma(0.5, 1.0))
    ...     numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    >>> guide = guides.AutoSplineCoupling(model, "rate", num_bins=4)
    >>> svi = SVI(model, guide, optax.adam(0.01), Trace_ELBO())
    >>> state = svi.init(jax.random.key(0))
    >>> [name for name in sorted(svi.get_params(state)) if name.endswith("loc")]
    ['auto_rate_loc', 'w_auto_loc']
    """

    def __init__(
        self,
        model: Callable,
        blocks: Chosen = None,
        *,
        num_flows: int = 4,
        hidden: Sequence[int] = (32,),
        mask: str = "alternating",
        bound: float = 2.0,
        seed: int = 0,
        num_bins: int = 8,
        interval: float = 5.0,
        **options: Any,
    ) -> None:
        family = SplineCoupling(num_flows, hidden, mask, bound, seed, num_bins, interval)
        super().__init__(model, blocks, family, options)


def _listed(blocks: Chosen) -> list[Patterns]:
    """The patterns of each block."""
    if blocks is None:
        return ["*"]
    return [blocks] if isinstance(blocks, str | tuple) else list(blocks)
