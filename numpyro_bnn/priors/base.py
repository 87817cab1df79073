"""What a prior is: a callable (name, shape) -> Distribution, as NumPyro's ``random_flax_module`` takes it."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.distributions.transforms import AffineTransform
from numpyro.infer.reparam import TransformReparam
from numpyro.primitives import _PYRO_STACK

from numpyro_bnn._checks import argument_error
from numpyro_bnn._distributions import unwrapped
from numpyro_bnn.nn import Shape, fan_in, input_axis, output_axis, role

__all__ = ["NonCentered", "Prior", "check_positive", "gaussian", "noncenter", "unit_shape"]


class NonCentered(dist.TransformedDistribution):
    """A transformed unit normal that asks to be sampled in the space of its base.

    As a distribution it is the ordinary, centered one. :func:`noncenter` turns a latent site with it into a
    ``<name>_base`` site and a deterministic site.
    """


def _noncenter_config(site: dict[str, Any]) -> TransformReparam | None:
    noncentered = isinstance(unwrapped(site["fn"]), NonCentered) and not site["is_observed"]
    return TransformReparam() if noncentered else None


class _NonCenter(handlers.reparam):
    """Reparameterization that names its sites once where scopes stand inside it.

    NumPyro's module functions open their scope inside the model. The name that arrives here then has the prefix
    already, and the ``<name>_base`` site, sampled while that scope is still active, would get it again.
    """

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] != "sample":
            return
        inside = _PYRO_STACK[_PYRO_STACK.index(self) + 1 :]
        scopes = [f for f in inside if isinstance(f, handlers.scope) and "sample" not in f.hide_types]
        full = msg["name"]
        msg["name"] = full.removeprefix("".join(f"{scope.prefix}{scope.divider}" for scope in scopes))
        super().process_message(msg)
        msg["name"] = full


def noncenter(model: Callable | None = None) -> handlers.reparam:
    """Sample the weights of a hierarchical prior as scale times unit normal.

    Models with :func:`~numpyro_bnn.random_network` need no call: it does this by itself. A model with NumPyro's
    own ``random_flax_module``, ``random_nnx_module`` or ``random_eqx_module`` is wrapped once. The posterior is
    the same with and without; the geometry that a gradient sampler sees is not.

    :param model: a NumPyro model; without it the result is a context manager.
    :return: the model with a site ``w`` of a non-centered prior replaced by a sample site ``w_base`` ~ N(0, 1)
        and a deterministic site ``w``.

    >>> import numpyro
    >>> from numpyro import handlers
    >>> from numpyro_bnn import priors
    >>> def model():
    ...     return numpyro.sample("kernel", priors.Hierarchical()("kernel", (3, 2)))
    >>> trace = handlers.trace(handlers.seed(priors.noncenter(model), 0)).get_trace()
    >>> [(name, site["type"]) for name, site in trace.items()]
    [('kernel_scale', 'sample'), ('kernel_base', 'sample'), ('kernel', 'deterministic')]
    """
    return _NonCenter(model, config=_noncenter_config)


def gaussian(shape: Shape, scale: jax.Array | float, centered: bool) -> dist.Distribution:
    """Independent N(0, scale^2) of ``shape``; non-centered unless asked otherwise."""
    if centered:
        return dist.Normal(0.0, scale)
    unit = dist.Normal(0.0, 1.0).expand(shape).to_event(len(shape))
    return NonCentered(unit, AffineTransform(0.0, jnp.broadcast_to(scale, shape)))


def check_positive(prior: "Prior", **arguments: Any) -> None:
    """Refuse numbers that are not positive and distributions whose support is not positive."""
    for argument, value in arguments.items():
        if isinstance(value, dist.Distribution):
            good = _is_positive(value.support) and value.shape() == ()
            instead = "Pass a scalar distribution on (0, inf), e.g. `dist.HalfNormal(1.0)`."
        else:
            good = isinstance(value, Real) and not isinstance(value, bool) and 0 < float(value) < float("inf")
            instead = "Pass a positive number."
        if not good:
            raise argument_error(f"priors.{type(prior).__name__}", argument, value, instead)


def _is_positive(support: Any) -> bool:
    if support is dist.constraints.positive or support is dist.constraints.nonnegative:
        return True
    lower = getattr(support, "lower_bound", None)  # intervals, greater_than: Uniform, Pareto, TruncatedNormal
    if lower is None or support.is_discrete:
        return False
    return isinstance(lower, jax.core.Tracer) or bool(np.all(np.asarray(lower) >= 0))


def unit_shape(name: str, shape: Shape, unit: str) -> Shape:
    """Shape of one value per ``unit`` ("weight", "input", "output", "layer"), ready to broadcast."""
    if unit == "weight":
        return shape
    ones = [1] * len(shape)
    if unit != "layer":
        axis = input_axis(name, shape) if unit == "input" else output_axis(name, shape)
        ones[axis] = shape[axis]
    return tuple(ones)


@dataclass(frozen=True, kw_only=True)
class Prior(ABC):
    """Base of every prior family: a callable ``(name, shape) -> Distribution`` that may sample hyper-sites.

    The role of a parameter is read from its name (:func:`~numpyro_bnn.nn.role`). Families define what a
    *kernel* gets; biases are N(0, bias_scale^2) and normalization gains N(1, gain_scale^2).

    :param fan_in_scaling: divide the scale of kernels by sqrt(fan_in), so that the prior of functions has a
        limit as layers get wide.
    :param bias_scale: prior sd of biases.
    :param gain_scale: prior sd of the gains of normalization layers around 1.

    >>> import jax
    >>> from numpyro_bnn import priors
    >>> priors.Normal(1.0)("Dense_0.kernel", (4, 2)).scale
    0.5
    """

    fan_in_scaling: bool = True
    bias_scale: float = 1.0
    gain_scale: float = 0.5

    def __post_init__(self) -> None:
        check_positive(self, bias_scale=self.bias_scale, gain_scale=self.gain_scale)

    def __call__(self, name: str, shape: Shape) -> dist.Distribution:
        return getattr(self, role(name, tuple(shape)))(name, tuple(shape))

    @abstractmethod
    def kernel(self, name: str, shape: Shape) -> dist.Distribution:
        """Prior of weights that multiply inputs."""

    def bias(self, name: str, shape: Shape) -> dist.Distribution:
        """Prior of biases."""
        return dist.Normal(0.0, self.bias_scale)

    def scale(self, name: str, shape: Shape) -> dist.Distribution:
        """Prior of the gains of normalization layers."""
        return dist.Normal(1.0, self.gain_scale)

    def fan_in_factor(self, name: str, shape: Shape) -> float:
        """1 / sqrt(fan_in), or 1 where scaling is off."""
        return fan_in(name, shape) ** -0.5 if self.fan_in_scaling else 1.0
