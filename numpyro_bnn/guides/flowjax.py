"""Any distribution of flowjax as the family of a block."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions import constraints

from numpyro_bnn._checks import argument_error
from numpyro_bnn._options import Switch
from numpyro_bnn._types import Shape
from numpyro_bnn.guides.blocks import Block, Family, declare_loc, declare_scale


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
        """The flow of the block, with parameters ``loc``, ``scale`` (D,), unless
        ``standardized=False``, and those of the flow.
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
        self, flow: Any, loc: Array, scale: Array, *, validate_args: bool | None = None
    ) -> None:
        self.flow, self.loc, self.scale = flow, loc, scale
        super().__init__((), jnp.shape(loc), validate_args=validate_args)

    def sample(self, key: Array, sample_shape: Shape = ()) -> Array:
        return self.loc + self.scale * self.flow.sample(_typed(key), sample_shape)

    def sample_with_intermediates(
        self, key: Array, sample_shape: Shape = ()
    ) -> tuple[Any, list]:
        """Draw together with the density, so that no flow has to be inverted (some need
        a numerical inverse).
        """
        z, log_prob = self.flow.sample_and_log_prob(_typed(key), sample_shape)
        return self.loc + self.scale * z, [log_prob - jnp.log(self.scale).sum()]

    def log_prob(self, value: Array, intermediates: list[Any] | None = None) -> Array:
        if intermediates:
            return intermediates[0]
        return (
            self.flow.log_prob((value - self.loc) / self.scale)
            - jnp.log(self.scale).sum()
        )


def _typed(key: Array) -> Array:
    """A typed key; NumPyro's ``Predictive`` passes raw key data."""
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key
    return jax.random.wrap_key_data(key)
