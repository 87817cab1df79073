"""Distributions of flowjax as families of blocks; flowjax is optional and imported here only."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_bnn._checks import argument_error
from numpyro_bnn.guides.blocks import Block, Family

__all__ = ["Flowjax", "FlowjaxDistribution"]

CALL = "guides.Flowjax"


@dataclass(frozen=True, eq=False)
class Flowjax(Family):
    r"""A flowjax distribution as the family of a block:

    .. math:: \theta = \mu + \sigma \odot z, \qquad z \sim \text{flow}.

    Every trainable array of the flow becomes one parameter, named by its place in the flow,
    ``<prefix>_flow<path>``, and starts at the value it has; what is wrapped in ``paramax.NonTrainable`` stays.
    Keys of NumPyro, legacy ones too, are turned into those that flowjax takes, so ``Predictive`` works.

    :param flow: unconditional, of shape (D,) for a block of D numbers, e.g. from ``flowjax.flows.coupling_flow``.
    :param standardized: with ``False``, θ = z: the flow itself has to start near sensible weights.
    :raises ImportError: where flowjax is not installed.
    :raises TypeError: for anything but a flowjax distribution.
    :raises ValueError: for a conditional flow, and, when the guide is first called, for one of another shape.

    Reference: Ward (2023), *FlowJAX: distributions and normalizing flows in JAX*.

    >>> import importlib.util
    >>> if importlib.util.find_spec("flowjax"):
    ...     from flowjax.distributions import StandardNormal
    ...     from flowjax.flows import coupling_flow
    ...     flow = coupling_flow(jax.random.key(0), base_dist=StandardNormal((3,)), flow_layers=2, nn_width=4)
    ...     family = Flowjax(flow)
    """

    flow: Any
    standardized: bool = True

    def __post_init__(self) -> None:
        try:
            from flowjax.distributions import AbstractDistribution
        except ImportError as error:
            raise argument_error(
                CALL, "flow", self.flow, "This family needs flowjax: pip install flowjax", ImportError
            ) from error
        if not isinstance(self.flow, AbstractDistribution):
            raise argument_error(
                CALL,
                "flow",
                self.flow,
                "Pass a flowjax distribution, e.g. `flowjax.flows.coupling_flow(...)`.",
                TypeError,
            )
        if self.flow.cond_shape is not None:
            raise argument_error(
                CALL,
                "flow",
                f"a conditional flow (cond_shape {self.flow.cond_shape})",
                "Pass an unconditional one.",
            )

    def distribution(self, block: Block) -> dist.Distribution:
        dim = len(block.loc)
        if self.flow.shape != (dim,):
            sites = ", ".join(block.shapes)
            raise argument_error(
                CALL,
                "flow",
                f"a flow of shape {self.flow.shape} for the block of {sites}",
                f"Its unconstrained sites have {dim} numbers: build the flow with shape ({dim},).",
            )
        loc, scale = jnp.zeros(dim), jnp.ones(dim)
        if self.standardized:
            loc = numpyro.param(f"{block.name}_loc", block.loc)
            scale = numpyro.param(
                f"{block.name}_scale", block.scale, constraint=constraints.softplus_positive
            )
        return FlowjaxDistribution(declare(f"{block.name}_flow", self.flow), loc, scale)


def declare(name: str, flow: Any) -> Any:
    """Register each trainable array of a flow as a parameter; return the flow with their values."""
    import equinox
    import paramax

    trainable, rest = equinox.partition(
        flow, equinox.is_inexact_array, is_leaf=lambda leaf: isinstance(leaf, paramax.NonTrainable)
    )
    leaves, treedef = jax.tree_util.tree_flatten_with_path(trainable)
    values = [numpyro.param(name + jax.tree_util.keystr(path), leaf) for path, leaf in leaves]
    return equinox.combine(jax.tree.unflatten(treedef, values), rest)


class FlowjaxDistribution(dist.Distribution):
    """Law of loc + scale * z, with z from a flowjax distribution of shape (D,), for NumPyro."""

    support = constraints.real_vector
    pytree_data_fields = ("flow", "loc", "scale")

    def __init__(self, flow: Any, loc: jax.Array, scale: jax.Array, *, validate_args: Any = None) -> None:
        self.flow = flow
        self.loc = loc
        self.scale = scale
        super().__init__((), jnp.shape(loc), validate_args=validate_args)

    @property
    def has_rsample(self) -> bool:
        return True

    def sample(self, key: jax.Array, sample_shape: tuple[int, ...] = ()) -> jax.Array:
        return self.loc + self.scale * self.flow.sample(_typed(key), sample_shape)

    def sample_with_intermediates(
        self, key: jax.Array, sample_shape: tuple[int, ...] = ()
    ) -> tuple[jax.Array, list[Any]]:
        """Draw with the density, so that no flow has to be inverted (some can only be inverted numerically)."""
        z, log_prob = self.flow.sample_and_log_prob(_typed(key), sample_shape)
        return self.loc + self.scale * z, [log_prob - jnp.log(self.scale).sum()]

    def log_prob(self, value: jax.Array, intermediates: list[Any] | None = None) -> jax.Array:
        if intermediates:
            return intermediates[0]
        return self.flow.log_prob((value - self.loc) / self.scale) - jnp.log(self.scale).sum()


def _typed(key: jax.Array) -> jax.Array:
    """NumPyro's ``Predictive`` hands out raw key data; flowjax takes typed keys only."""
    return key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key)
