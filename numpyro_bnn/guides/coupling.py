"""Coupling flows: the affine coupling layer, the family of a block that is made of
them, and the guide AutoCoupling, also as a transport for NeuTraReparam.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions import constraints
from numpyro.distributions.transforms import Transform
from numpyro.infer.autoguide import AutoContinuous

from numpyro_bnn._checks import argument_error
from numpyro_bnn._options import (
    Choice,
    Count,
    Model,
    Natural,
    PositiveInt,
    PositiveOrInfinite,
    checked,
)
from numpyro_bnn._types import PyTree, Trees
from numpyro_bnn.guides.auto_blocks import AutoBlocks
from numpyro_bnn.guides.blocks import (
    Block,
    Family,
    Patterns,
    cut,
    declare_loc,
    declare_scale,
)
from numpyro_bnn.nn.base import Shape

MASKS = ("alternating", "random")


class Conditioner(NamedTuple):
    """The network of a coupling layer: a multilayer perceptron, as a pytree so that a
    transform can hold it.

    ``kernels[i]`` has shape (H_i, H_{i+1}), ``biases[i]`` (H_{i+1},).
    """

    kernels: tuple[Array, ...]
    biases: tuple[Array, ...]

    def __call__(self, x: Array) -> Array:
        """Map (..., inputs) to (..., outputs)."""
        for kernel, bias in zip(self.kernels[:-1], self.biases[:-1], strict=True):
            # Smooth, for the gradients of NUTS in the flow's space; it grows linearly,
            # as tails need.
            x = jax.nn.silu(x @ kernel + bias)
        return x @ self.kernels[-1] + self.biases[-1]


def declare_conditioner(
    name: str, inputs: int, outputs: int, hidden: Sequence[int]
) -> Conditioner:
    """Declare the parameters ``<name>_kernel<i>`` and ``<name>_bias<i>`` of a
    conditioner with these hidden layers.

    The last layer starts at zero, so that the transform starts as the identity.
    """
    sizes = [inputs, *hidden, outputs]
    kernels, biases = [], []
    for i, (fan_in, fan_out) in enumerate(pairwise(sizes)):
        if i == len(sizes) - 2:
            kernel: Any = jnp.zeros((fan_in, fan_out))
            bias: Any = jnp.zeros(fan_out)
        else:
            kernel = _normal((fan_in, fan_out), fan_in**-0.5)
            # Units that bend at different places can shape the map where it needs to
            # be.
            bias = _normal((fan_out,), 1.0)
        kernels.append(numpyro.param(f"{name}_kernel{i}", kernel))
        biases.append(numpyro.param(f"{name}_bias{i}", bias))
    return Conditioner(tuple(kernels), tuple(biases))


def _normal(shape: Shape, scale: float) -> Callable[[Array], Array]:
    return lambda key: jax.random.normal(key, shape) * scale


class AffineCoupling(Transform):
    r"""Affine coupling layer: one part of a vector scales and shifts the other, by
    bounded scales.

    .. math:: y_A = x_A, \qquad y_B = x_B \odot e^{b \tanh(s(x_A)/b)} + t(x_A).

    A is the leading part of ``split`` coordinates and B the rest; with ``swap`` the
    other way round. The conditioner maps (..., D_A) to (..., 2 D_B): s, then t. Inverse
    and log det cost as much as the forward pass. It is the identity if its conditioner
    gives zero, and changes a scale by at most the factor e^b, so that no step of an
    optimizer can overflow. Reference: Dinh, Sohl-Dickstein & Bengio (2017), equations
    4-8.
    """

    domain = constraints.real_vector
    codomain = constraints.real_vector

    def __init__(
        self,
        conditioner: Conditioner,
        split: int,
        swap: bool = False,
        bound: float = 2.0,
    ) -> None:
        self.conditioner, self.split = conditioner, split
        self.swap, self.bound = swap, bound

    def __call__(self, x: Array) -> Array:
        return self.call_with_intermediates(x)[0]

    def call_with_intermediates(self, x: Array) -> tuple[Array, Array]:
        """The transformed vector, and log |det|, which needs no further work."""
        fixed, changed = self._parts(x)
        log_scale, shift = self._scale_and_shift(fixed)
        y = self._whole(fixed, changed * jnp.exp(log_scale) + shift)
        return y, log_scale.sum(-1)

    def _inverse(self, y: Array) -> Array:
        fixed, changed = self._parts(y)
        log_scale, shift = self._scale_and_shift(fixed)
        return self._whole(fixed, (changed - shift) * jnp.exp(-log_scale))

    def log_abs_det_jacobian(
        self, x: Array, y: Array, intermediates: PyTree = None
    ) -> Array:
        """log |det dy/dx|, (...)."""
        if intermediates is None:
            return self.call_with_intermediates(x)[1]
        return intermediates

    def _scale_and_shift(self, fixed: Array) -> tuple[Array, Array]:
        """Logarithm of the bounded scale, and shift, each (..., D_B)."""
        outputs = self.conditioner(fixed)
        size = outputs.shape[-1] // 2
        log_scale = self.bound * jnp.tanh(outputs[..., :size] / self.bound)
        return log_scale, outputs[..., size:]

    def _parts(self, x: Array) -> tuple[Array, Array]:
        leading, trailing = x[..., : self.split], x[..., self.split :]
        return (trailing, leading) if self.swap else (leading, trailing)

    def _whole(self, fixed: Array, changed: Array) -> Array:
        return jnp.concatenate(
            [changed, fixed] if self.swap else [fixed, changed], axis=-1
        )

    def tree_flatten(self) -> Any:
        return (self.conditioner,), (
            ("conditioner",),
            {"split": self.split, "swap": self.swap, "bound": self.bound},
        )


def permutations(
    dim: int, num_flows: int, mask: str, seed: int = 0
) -> list[np.ndarray | None]:
    """The permutation of D coordinates that follows each layer, or ``None``.

    Layers change the second and the first half of the coordinates in turn. With
    ``"random"`` halves every two layers are followed by a fixed permutation;
    coordinates leave the last layer in their original order, and enter the first in any
    order, which does not matter for independent standard normals.
    """
    by_layer: list[np.ndarray | None] = [None] * num_flows
    if mask == "random":
        draws = np.random.default_rng((seed, dim))
        orders = [draws.permutation(dim) for _ in range(0, num_flows, 2)]
        for i, (order, following) in enumerate(pairwise([*orders, np.arange(dim)])):
            # Coordinate j of an ordered vector is coordinate order[j] of the block.
            by_layer[min(2 * i + 1, num_flows - 1)] = np.argsort(order)[following]
    return by_layer


@dataclass(frozen=True)
class Coupling(Family):
    r"""Affine coupling flow: each layer scales and shifts one half of the block given
    the other half.

    .. math:: \theta = \mu + \sigma \odot f_L \circ \dots \circ f_1(\epsilon), \qquad
              \epsilon \sim N(0, I),

    with affine coupling layers f that start as the identity, so that q starts as the
    mean field of the block. With hidden width h it has about L (3/2) h D parameters:
    linear in the D numbers of the block.

    Affine flows cannot change the tail class: tails stay Gaussian in unconstrained
    space (log-normal for positive sites), so heavy-tailed sites, like half-Cauchy
    scales, need a non-centered model. Like every fit of KL(q||p) it may find only one
    of several separated modes; start wide (``init_scale``) if there may be more.

    :param num_flows: L; with 2 every number can depend on others, more layers make more
        flexible maps.
    :param hidden: widths of the hidden layers of the conditioners.
    :param mask: ``"alternating"`` changes the two halves of the block in turn,
        ``"random"`` random halves.
    :param bound: each layer changes a scale by at most the factor e^bound.
    :param seed: seed of the random halves.
    :raises ValueError: for invalid options, and for a block of one number, which cannot
        be halved.

    Reference: Dinh, Sohl-Dickstein & Bengio (2017), *Density estimation using Real
    NVP*.

    >>> import jax, numpyro
    >>> family = Coupling(num_flows=2, hidden=(8,))
    >>> block = Block("auto", {"a": (4,)}, jnp.zeros(4), jnp.ones(4))
    >>> with numpyro.handlers.seed(rng_seed=0):
    ...     q = family.distribution(block)
    >>> round(float(q.log_prob(jnp.zeros(4))), 3)  # at the start: N(0, 1) four times
    -3.676
    """

    num_flows: PositiveInt = 4
    hidden: Sequence[int] = (32,)
    mask: Annotated[str, Choice(MASKS)] = "alternating"
    bound: PositiveOrInfinite = 2.0
    seed: Natural = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        widths = (self.hidden,) if np.ndim(self.hidden) == 0 else self.hidden
        check = partial(Count().check, "guides.Coupling", "hidden")
        object.__setattr__(self, "hidden", tuple(map(check, widths)))

    def transforms(self, name: str, dim: int) -> list[Transform]:
        """Declare the conditioners ``<name>_flow<i>_...`` and build the flow f: R^D ->
        R^D from them.

        It must be called inside a NumPyro guide or model. The flow starts as the
        identity, and permutes N(0, I).

        :param name: prefix of the parameters.
        :param dim: D.
        :raises ValueError: for a D below 2.
        """
        if dim < 2:
            instead = (
                "A coupling flow needs two halves: add a site to the block, or leave "
                "this one out."
            )
            raise argument_error(
                "guides.Coupling", "blocks", "a block of 1 number", instead
            )
        layers: list[Transform] = []
        split = dim // 2
        for i, permutation in enumerate(
            permutations(dim, self.num_flows, self.mask, self.seed)
        ):
            swap = bool(i % 2)
            read = dim - split if swap else split
            conditioner = declare_conditioner(
                f"{name}_flow{i}", read, 2 * (dim - read), self.hidden
            )
            layers.append(AffineCoupling(conditioner, split, swap, self.bound))
            if permutation is not None:
                # a gather in the program; everything else is slices
                layers.append(
                    dist.transforms.PermuteTransform(jnp.asarray(permutation))
                )
        return layers

    def distribution(self, block: Block) -> dist.TransformedDistribution:
        """The flow of the block, with parameters ``loc``, ``scale`` (D,) and those of
        the conditioners.
        """
        flow = self.transforms(block.name, len(block.loc))
        loc, scale = declare_loc(block), declare_scale(block)
        base = dist.Normal(jnp.zeros_like(loc), jnp.ones_like(scale)).to_event(1)
        standardization = dist.transforms.IndependentTransform(
            dist.transforms.AffineTransform(loc, scale), 1
        )
        return dist.TransformedDistribution(base, [*flow, standardization])


class AutoCoupling(AutoBlocks):
    r"""Approximate learned scales or a last layer by a normalizing flow: affine
    coupling layers over chosen blocks, with mean field for the rest.

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

    def get_transform(self, params: Trees) -> Transform:
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

    def _unpack_latent(self, vector: Array) -> dict[str, Array]:
        shapes: dict[str, Shape] = {}
        for block, _ in self._blocks:
            shapes |= block.shapes
        for name, loc in self._init_locs.items():
            shapes.setdefault(name, jnp.shape(loc))
        return cut(vector, shapes)

    def _unpack_and_constrain(self, vector: Array, params: Trees) -> dict[str, Array]:
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

    def _parts(self, x: Array) -> list[Array]:
        return jnp.split(x, np.cumsum(self.sizes)[:-1], axis=-1)

    def __call__(self, x: Array) -> Array:
        pieces = zip(self.transforms, self._parts(x), strict=True)
        return jnp.concatenate([t(piece) for t, piece in pieces], axis=-1)

    def _inverse(self, y: Array) -> Array:
        pieces = zip(self.transforms, self._parts(y), strict=True)
        return jnp.concatenate([t._inverse(piece) for t, piece in pieces], axis=-1)

    def log_abs_det_jacobian(
        self, x: Array, y: Array, intermediates: PyTree = None
    ) -> Array:
        pieces = zip(self.transforms, self._parts(x), self._parts(y), strict=True)
        return jnp.stack([t.log_abs_det_jacobian(a, b) for t, a, b in pieces]).sum(0)

    def tree_flatten(self) -> Any:
        return (self.transforms,), (("transforms",), {"sizes": self.sizes})
