"""Flows as families of blocks: affine coupling layers, and any distribution
of flowjax.
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
from numpyro.distributions import constraints
from numpyro.distributions.transforms import Transform
from numpyro.distributions.util import array_equiv

from numpyro_bnn._checks import argument_error
from numpyro_bnn._options import (
    Choice,
    Count,
    Natural,
    PositiveInt,
    PositiveOrInfinite,
    Switch,
)
from numpyro_bnn.guides.blocks import Block, Family, declare_loc, declare_scale

MASKS = ("alternating", "random")


class Conditioner(NamedTuple):
    """The network of a coupling layer: a multilayer perceptron, as a pytree so that a
    transform can hold it.

    ``kernels[i]`` has shape (H_i, H_{i+1}), ``biases[i]`` (H_{i+1},).
    """

    kernels: tuple[jax.Array, ...]
    biases: tuple[jax.Array, ...]

    def __call__(self, x: jax.Array) -> jax.Array:
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


def _normal(shape: tuple[int, ...], scale: float) -> Callable[[jax.Array], jax.Array]:
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

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.call_with_intermediates(x)[0]

    def call_with_intermediates(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The transformed vector, and log |det|, which needs no further work."""
        fixed, changed = self._parts(x)
        log_scale, shift = self._scale_and_shift(fixed)
        y = self._whole(fixed, changed * jnp.exp(log_scale) + shift)
        return y, log_scale.sum(-1)

    def _inverse(self, y: jax.Array) -> jax.Array:
        fixed, changed = self._parts(y)
        log_scale, shift = self._scale_and_shift(fixed)
        return self._whole(fixed, (changed - shift) * jnp.exp(-log_scale))

    def log_abs_det_jacobian(
        self, x: jax.Array, y: jax.Array, intermediates: Any = None
    ) -> jax.Array:
        """log |det dy/dx|, (...)."""
        if intermediates is None:
            return self.call_with_intermediates(x)[1]
        return intermediates

    def _scale_and_shift(self, fixed: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Logarithm of the bounded scale, and shift, each (..., D_B)."""
        outputs = self.conditioner(fixed)
        size = outputs.shape[-1] // 2
        log_scale = self.bound * jnp.tanh(outputs[..., :size] / self.bound)
        return log_scale, outputs[..., size:]

    def _parts(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        leading, trailing = x[..., : self.split], x[..., self.split :]
        return (trailing, leading) if self.swap else (leading, trailing)

    def _whole(self, fixed: jax.Array, changed: jax.Array) -> jax.Array:
        return jnp.concatenate(
            [changed, fixed] if self.swap else [fixed, changed], axis=-1
        )

    def tree_flatten(self) -> Any:
        return (self.conditioner,), (
            ("conditioner",),
            {"split": self.split, "swap": self.swap, "bound": self.bound},
        )

    def eq(self, other: object, static: bool = False) -> Any:
        structure: Any = jax.tree.structure(self)
        if type(other) is not type(self) or structure != jax.tree.structure(other):
            return False
        pairs = list(zip(jax.tree.leaves(self), jax.tree.leaves(other), strict=True))
        if any(jnp.shape(a) != jnp.shape(b) for a, b in pairs):
            return False
        same = [array_equiv(a, b, static=static) for a, b in pairs]
        return all(same) if static else jnp.all(jnp.asarray(same))


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
        """Parameters ``loc``, ``scale`` (D,) and those of the conditioners."""
        flow = self.transforms(block.name, len(block.loc))
        loc, scale = declare_loc(block), declare_scale(block)
        base = dist.Normal(jnp.zeros_like(loc), jnp.ones_like(scale)).to_event(1)
        standardization = dist.transforms.IndependentTransform(
            dist.transforms.AffineTransform(loc, scale), 1
        )
        return dist.TransformedDistribution(base, [*flow, standardization])


@dataclass(frozen=True, eq=False)
class Flowjax(Family):
    r"""Any unconditional flow or distribution of flowjax, e.g. a spline flow, as the
    family of a block.

    .. math:: \theta = \mu + \sigma \odot z, \qquad z \sim \text{flow}.

    Every trainable array of the flow becomes one parameter, named by its path in the
    flow, ``<prefix>_flow<path>``, with its value as the initial value; arrays wrapped
    in ``paramax.NonTrainable`` stay fixed. NumPyro's legacy keys are converted to the
    typed ones that flowjax expects, so ``Predictive`` works.

    :param flow: unconditional, of shape (D,) for a block of D numbers, e.g. from
        ``flowjax.flows.coupling_flow``.
    :param standardized: with ``False``, θ = z: the flow itself must start near sensible
        weights.
    :raises ImportError: if flowjax is not installed.
    :raises TypeError: for anything but a flowjax distribution.
    :raises ValueError: for a conditional flow; when the guide is first called, for a
        flow of the wrong shape.

    Reference: Ward (2023), *FlowJAX: distributions and normalizing flows in JAX*.

    >>> import importlib.util
    >>> if importlib.util.find_spec("flowjax"):
    ...     from flowjax.distributions import StandardNormal
    ...     from flowjax.flows import coupling_flow
    ...
    ...     flow = coupling_flow(
    ...         jax.random.key(0),
    ...         base_dist=StandardNormal((3,)),
    ...         flow_layers=2,
    ...         nn_width=4,
    ...     )
    ...     family = Flowjax(flow)
    """

    flow: Any
    standardized: Switch = True

    def __post_init__(self) -> None:
        call, flow = "guides.Flowjax", self.flow
        try:
            from flowjax.distributions import AbstractDistribution
        except ImportError as error:
            instead = "This family needs flowjax: pip install flowjax"
            raise argument_error(
                call, "flow", repr(flow), instead, ImportError
            ) from error
        if not isinstance(flow, AbstractDistribution):
            instead = (
                "Pass a flowjax distribution, e.g. `flowjax.flows.coupling_flow(...)`."
            )
            raise argument_error(call, "flow", repr(flow), instead, TypeError)
        if flow.cond_shape is not None:
            got = f"a conditional flow (cond_shape {flow.cond_shape})"
            raise argument_error(call, "flow", got, "Pass an unconditional one.")
        super().__post_init__()

    def distribution(self, block: Block) -> dist.Distribution:
        """Parameters ``loc``, ``scale`` (D,), unless ``standardized=False``, and those
        of the flow.
        """
        dim = len(block.loc)
        if self.flow.shape != (dim,):
            got = (
                f"a flow of shape {self.flow.shape} for the block of "
                f"{', '.join(block.shapes)}"
            )
            instead = (
                f"Its unconstrained sites have {dim} numbers: build the flow with "
                f"shape ({dim},)."
            )
            raise argument_error("guides.Flowjax", "flow", got, instead)
        loc, scale = jnp.zeros(dim), jnp.ones(dim)
        if self.standardized:
            loc, scale = declare_loc(block), declare_scale(block)
        return FlowjaxDistribution(
            _declare_flow(f"{block.name}_flow", self.flow), loc, scale
        )


def _declare_flow(name: str, flow: Any) -> Any:
    """Register each trainable array of a flow as a parameter; return the flow with
    their values.
    """
    import equinox
    import paramax

    fixed = {"is_leaf": lambda leaf: isinstance(leaf, paramax.NonTrainable)}
    trainable, static = equinox.partition(flow, equinox.is_inexact_array, **fixed)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(trainable)
    values = [
        numpyro.param(name + jax.tree_util.keystr(path), leaf) for path, leaf in leaves
    ]
    return equinox.combine(jax.tree.unflatten(treedef, values), static)


class FlowjaxDistribution(dist.Distribution):
    """NumPyro distribution of loc + scale * z, with z from a flowjax distribution of
    shape (D,).
    """

    support = constraints.real_vector
    pytree_data_fields = ("flow", "loc", "scale")

    def __init__(
        self, flow: Any, loc: jax.Array, scale: jax.Array, *, validate_args: Any = None
    ) -> None:
        self.flow, self.loc, self.scale = flow, loc, scale
        super().__init__((), jnp.shape(loc), validate_args=validate_args)

    def sample(self, key: jax.Array, sample_shape: tuple[int, ...] = ()) -> jax.Array:
        return self.loc + self.scale * self.flow.sample(_typed(key), sample_shape)

    def sample_with_intermediates(
        self, key: jax.Array, sample_shape: tuple[int, ...] = ()
    ) -> tuple[Any, list]:
        """Draw together with the density, so that no flow has to be inverted (some need
        a numerical inverse).
        """
        z, log_prob = self.flow.sample_and_log_prob(_typed(key), sample_shape)
        return self.loc + self.scale * z, [log_prob - jnp.log(self.scale).sum()]

    def log_prob(
        self, value: jax.Array, intermediates: list[Any] | None = None
    ) -> jax.Array:
        if intermediates:
            return intermediates[0]
        return (
            self.flow.log_prob((value - self.loc) / self.scale)
            - jnp.log(self.scale).sum()
        )


def _typed(key: jax.Array) -> jax.Array:
    """A typed key; NumPyro's ``Predictive`` passes raw key data."""
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key
    return jax.random.wrap_key_data(key)
