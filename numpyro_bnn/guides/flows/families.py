"""Families of blocks made of flows: affine coupling, spline coupling."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.distributions.transforms import (
    AffineTransform,
    IndependentTransform,
    PermuteTransform,
    Transform,
)

from numpyro_bnn._checks import argument_error
from numpyro_bnn.guides.blocks import Block, Family
from numpyro_bnn.guides.flows.conditioner import Conditioner, declare
from numpyro_bnn.guides.flows.coupling import AffineCoupling, CouplingTransform
from numpyro_bnn.guides.flows.masks import Half, halves
from numpyro_bnn.guides.flows.spline import RationalQuadraticCoupling, num_parameters

__all__ = ["Coupling", "SplineCoupling", "placed"]


def placed(block: Block, transforms: Sequence[Transform]) -> dist.TransformedDistribution:
    r"""Declare loc and scale of a block and build q of

    .. math:: \theta = \mu + \sigma \odot f(\epsilon), \qquad \epsilon \sim N(0, I).

    Where f starts as the identity, so does q as the mean field of the block.
    """
    loc = numpyro.param(f"{block.name}_loc", block.loc)
    scale = numpyro.param(f"{block.name}_scale", block.scale, constraint=constraints.softplus_positive)
    base = dist.Normal(jnp.zeros_like(loc), jnp.ones_like(scale)).to_event(1)
    place = IndependentTransform(AffineTransform(loc, scale), 1)
    return dist.TransformedDistribution(base, [*transforms, place])


@dataclass(frozen=True)
class _CouplingFamily(Family):
    """What the coupling families share: layers with their own conditioners, between permutations."""

    num_flows: int = 4
    hidden: Sequence[int] = (32,)
    mask: str = "alternating"
    bound: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        call = self._call
        if isinstance(self.hidden, int):
            object.__setattr__(self, "hidden", (self.hidden,))
        if any(int(width) != width or width < 1 for width in self.hidden):
            raise argument_error(call, "hidden", self.hidden, "Pass positive widths, e.g. `(32,)`.")
        if not self.bound > 0:
            raise argument_error(call, "bound", self.bound, "Pass a positive number.")
        halves(call, 2, self.num_flows, self.mask, self.seed)

    @property
    def _call(self) -> str:
        return f"guides.{type(self).__name__}"

    @property
    @abstractmethod
    def _outputs(self) -> int:
        """Numbers that transform one element."""

    @abstractmethod
    def _layer(self, conditioner: Conditioner, half: Half) -> CouplingTransform:
        """One coupling layer."""

    def transforms(self, name: str, dim: int) -> list[Transform]:
        """Declare the conditioners ``<name>_flow<i>_...`` and build the flow f: R^D -> R^D from them.

        It must be called inside a NumPyro guide or model. The flow starts as the identity, and permutes N(0, I).

        :param name: prefix of the parameters.
        :param dim: D.
        :raises ValueError: for a D it cannot handle.
        """
        layers: list[Transform] = []
        for i, half in enumerate(halves(self._call, dim, self._num_layers(dim), self.mask, self.seed)):
            kept, changed = half.sizes(dim)
            conditioner = declare(f"{name}_flow{i}", kept, changed * self._outputs, self.hidden)
            layers.append(self._layer(conditioner, half))
            if half.then is not None:
                layers.append(PermuteTransform(jnp.asarray(half.then)))
        return layers

    def _num_layers(self, dim: int) -> int:
        return self.num_flows

    def distribution(self, block: Block) -> dist.Distribution:
        return placed(block, self.transforms(block.name, len(block.loc)))


@dataclass(frozen=True)
class Coupling(_CouplingFamily):
    r"""Affine coupling flow: each layer scales and shifts one half of the block given the other half.

    .. math:: \theta = \mu + \sigma \odot f_L \circ \dots \circ f_1(\epsilon), \qquad \epsilon \sim N(0, I),

    with affine coupling layers f that start as the identity. With hidden width h it
    has about L (3/2) h D parameters: linear in the D numbers of the block.

    Affine flows cannot change the tail class: tails stay Gaussian in unconstrained space (log-normal for positive
    sites), so that heavy-tailed sites, like half-Cauchy scales, need a non-centered model. Like every fit of KL(q||p)
    it may find one of several separated modes; start wide (``init_scale``) where there are more.

    :param num_flows: L; 2 let every number depend on others, more bend further.
    :param hidden: widths of the hidden layers of the conditioners.
    :param mask: ``"alternating"`` changes the two halves of the block in turns, ``"random"`` random halves.
    :param bound: each layer changes a scale by at most the factor e^bound.
    :param seed: of the random halves.
    :raises ValueError: for a block of one number, which has no two halves.

    Reference: Dinh, Sohl-Dickstein & Bengio (2017), *Density estimation using Real NVP*.

    >>> import jax, numpyro
    >>> family = Coupling(num_flows=2, hidden=(8,))
    >>> block = Block("auto", {"a": (4,)}, jnp.zeros(4), jnp.ones(4))
    >>> with numpyro.handlers.seed(rng_seed=0):
    ...     q = family.distribution(block)
    >>> round(float(q.log_prob(jnp.zeros(4))), 3)  # at the start: N(0, 1) four times
    -3.676
    """

    @property
    def _outputs(self) -> int:
        return 2

    def _layer(self, conditioner: Conditioner, half: Half) -> CouplingTransform:
        return AffineCoupling(conditioner, half.split, half.swap, self.bound)

    def _num_layers(self, dim: int) -> int:
        if dim < 2:
            raise argument_error(
                self._call,
                "blocks",
                "a block of 1 number",
                "A coupling flow needs two halves: put another site into the block, leave this one to the mean "
                "field, or take `SplineCoupling`, which bends a single number too.",
            )
        return self.num_flows


@dataclass(frozen=True)
class SplineCoupling(_CouplingFamily):
    r"""Rational-quadratic spline coupling flow: skewed, bimodal and kinked shapes in few layers.

    Like :class:`Coupling`, with rational-quadratic layers: monotone splines
    of K bins on [-interval, interval] in units of the base, then a scale and a shift. Linear tails outside keep the
    tail class. A block of one number gets one spline with constant parameters.

    With hidden width h it has about L h D (1 + (3K + 1)) / 2 parameters, linear in D.

    :param num_flows: L.
    :param hidden: widths of the hidden layers of the conditioners.
    :param mask: ``"alternating"`` or ``"random"`` halves.
    :param bound: each layer changes a scale by at most the factor e^bound, beside what splines do.
    :param seed: of the random halves.
    :param num_bins: K.
    :param interval: half-length of the interval that splines bend.

    Reference: Durkan, Bekasov, Murray & Papamakarios (2019), *Neural spline flows*.

    >>> import jax, numpyro
    >>> block = Block("auto", {"a": ()}, jnp.zeros(1), jnp.ones(1))
    >>> with numpyro.handlers.seed(rng_seed=0):
    ...     q = SplineCoupling(num_bins=4).distribution(block)
    >>> round(float(q.log_prob(jnp.zeros(1))), 3)
    -0.919
    """

    num_bins: int = 8
    interval: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_bins < 2:
            raise argument_error(self._call, "num_bins", self.num_bins, "Pass at least 2.")
        if not self.interval > 0:
            raise argument_error(self._call, "interval", self.interval, "Pass a positive number.")

    @property
    def _outputs(self) -> int:
        return num_parameters(self.num_bins)

    def _layer(self, conditioner: Conditioner, half: Half) -> CouplingTransform:
        return RationalQuadraticCoupling(conditioner, half.split, half.swap, self.bound, self.interval)

    def _num_layers(self, dim: int) -> int:
        # With nothing to condition on, a spline of a spline has nothing to add; halves of 1 are (0, 1).
        return self.num_flows if dim > 1 else 1
