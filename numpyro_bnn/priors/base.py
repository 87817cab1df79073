"""Base class of priors: callables (name, shape) -> Distribution, as for NumPyro's
``random_flax_module``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from numpyro import handlers
from numpyro.distributions.constraints import Constraint
from numpyro.distributions.transforms import AffineTransform
from numpyro.infer.reparam import TransformReparam
from numpyro.primitives import _PYRO_STACK

from numpyro_bnn._checks import argument_error, unknown_name
from numpyro_bnn._distributions import unwrapped
from numpyro_bnn._options import (
    Kind,
    Model,
    Number,
    Option,
    Positive,
    Switch,
    check_fields,
    checked,
)
from numpyro_bnn._types import Site
from numpyro_bnn.nn.base import Shape
from numpyro_bnn.priors.layouts import layout

PriorLike: TypeAlias = Callable[[str, Shape], dist.Distribution] | dist.Distribution


@dataclass(frozen=True, kw_only=True)
class Prior(ABC):
    """Base class of the prior families: a callable ``(name, shape) -> Distribution``
    that may sample hyper-sites.

    Role and fan-in of a parameter are those of its layer; where that cannot be seen
    they are read from the name and the shape. A family defines the prior of *kernels*;
    biases are N(0, bias_scale^2) and the gains of normalization layers N(1,
    gain_scale^2).

    :param fan_in_scaling: divide the scale of kernels by sqrt(fan_in), so that the
        prior over functions has a limit as layers get wide.
    :param bias_scale: prior standard deviation of biases.
    :param gain_scale: prior standard deviation of the gains of normalization layers
        around 1.

    >>> import jax
    >>> from numpyro_bnn import priors
    >>> priors.Normal(1.0)("Dense_0.kernel", (4, 2)).scale
    0.5
    """

    fan_in_scaling: Switch = True
    bias_scale: Positive = 1.0
    gain_scale: Positive = 0.5

    def __post_init__(self) -> None:
        check_fields(f"priors.{type(self).__name__}", self)

    def __call__(self, name: str, shape: Shape) -> dist.Distribution:
        shape = tuple(shape)
        by_role = {"kernel": self.kernel, "bias": self.bias, "scale": self.gain}
        return by_role[layout(name, shape).role](name, shape)

    @abstractmethod
    def kernel(self, name: str, shape: Shape) -> dist.Distribution:
        """Prior of weights that multiply inputs."""

    def bias(self, name: str, shape: Shape) -> dist.Distribution:
        """Prior of biases."""
        return dist.Normal(0.0, self.bias_scale)

    def gain(self, name: str, shape: Shape) -> dist.Distribution:
        """Prior of the gains of normalization layers (parameters named ``scale``)."""
        return dist.Normal(1.0, self.gain_scale)

    def fan_in_factor(self, name: str, shape: Shape) -> float:
        """1 / sqrt(fan_in), or 1 without ``fan_in_scaling``."""
        return layout(name, shape).fan_in ** -0.5 if self.fan_in_scaling else 1.0


@dataclass(frozen=True, eq=False)
class PositiveScalar(Option):
    """A distribution of a positive number; with ``fixed`` also such a number."""

    fixed: bool

    def check(self, call: str, argument: str, value: Any) -> Any:
        if self.fixed and not isinstance(value, dist.Distribution):
            return Number(strict=True).check(call, argument, value)
        Kind(
            dist.Distribution, "Pass a distribution, e.g. `dist.HalfNormal(1.0)`."
        ).check(call, argument, value)
        if not is_positive(value.support) or value.shape() != ():
            instead = (
                "Pass a scalar distribution on (0, inf), e.g. `dist.HalfNormal(1.0)`."
            )
            raise argument_error(call, argument, value, instead)
        return value


ScalePrior: TypeAlias = Annotated[dist.Distribution, PositiveScalar(fixed=False)]
Scale: TypeAlias = Annotated[float | dist.Distribution, PositiveScalar(fixed=True)]


def is_positive(support: Constraint) -> bool:
    """Whether all values of a support are positive (or 0)."""
    support = getattr(support, "base_constraint", support)
    if support is dist.constraints.positive or support is dist.constraints.nonnegative:
        return True
    # Of intervals and greater_than: Uniform, Pareto, TruncatedNormal.
    lower = getattr(support, "lower_bound", None)
    if lower is None or support.is_discrete:
        return False
    return isinstance(lower, jax.core.Tracer) or bool(np.all(np.asarray(lower) >= 0))


def unit_shape(name: str, shape: Shape, unit: str) -> Shape:
    """Shape of one value per ``unit`` ("weight", "input", "output", "layer"), ready to
    broadcast.
    """
    if unit == "weight":
        return shape
    weight = layout(name, shape)
    axes = {"layer": (), "input": weight.inputs, "output": weight.outputs}[unit]
    return tuple(size if axis in axes else 1 for axis, size in enumerate(shape))


def gaussian(shape: Shape, scale: Array | float, centered: bool) -> dist.Distribution:
    """Independent N(0, scale^2) of ``shape``; non-centered by default."""
    if centered:
        return dist.Normal(0.0, scale)
    unit = dist.Normal(0.0, 1.0).expand(shape).to_event(len(shape))
    return NonCentered(unit, AffineTransform(0.0, jnp.broadcast_to(scale, shape)))


class NonCentered(dist.TransformedDistribution):
    """A transformed unit normal that :func:`noncenter` samples in the space of its
    base; by itself it is centered.
    """


class Constant(dist.Delta):
    """A value that :func:`noncenter` puts in the place of the site: a weight that is
    not random.
    """

    @property
    def support(self) -> Constraint:
        instead = (
            "Wrap the model once, `NUTS(priors.noncenter(model))`, which takes such "
            "weights out of the sites."
        )
        raise argument_error(
            "priors.Fixed",
            "params",
            "a sample site of NumPyro's module functions",
            instead,
        )


def _noncenter_config(site: Site) -> TransformReparam | None:
    if isinstance(unwrapped(site["fn"]), NonCentered) and not site["is_observed"]:
        return TransformReparam()
    return None


class _NonCenter(handlers.reparam):
    """Reparameterization inside open scopes, which would prefix the name of the
    ``<name>_base`` site twice.
    """

    def process_message(self, msg: Site) -> None:
        if msg["type"] != "sample":
            return
        if isinstance(msg["fn"], Constant):  # outer handlers see no site
            msg["value"] = msg["fn"].v
            msg["stop"] = True
            return
        inside = _PYRO_STACK[_PYRO_STACK.index(self) + 1 :]
        prefix = ""
        for frame in inside:
            if isinstance(frame, handlers.scope) and "sample" not in frame.hide_types:
                prefix = f"{prefix}{frame.prefix}{frame.divider}"
        full = msg["name"]
        msg["name"] = full.removeprefix(prefix)
        super().process_message(msg)
        msg["name"] = full


@checked("priors.noncenter")
def noncenter(model: Model | None = None) -> handlers.reparam:
    """Sample the weights of a hierarchical prior in non-centered form, as scale times a
    unit normal.

    Models with :func:`~numpyro_bnn.random_network` need no call: it does this itself.
    Wrap a model with NumPyro's own ``random_flax_module``, ``random_nnx_module`` or
    ``random_eqx_module`` once. The posterior is the same either way, but a gradient
    sampler sees a different geometry. Weights of :class:`Fixed` and :class:`Learned`
    leave the sites.

    :param model: a NumPyro model; without it the result is a context manager.
    :return: the model with each site ``w`` of a non-centered prior replaced by a sample
        site ``w_base`` ~ N(0, 1) and a deterministic site ``w``.

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


@dataclass(frozen=True)
class BySite:
    """Different priors for different parameters: the first pattern that matches a name
    determines its prior.

    :param patterns: shell-style patterns (``*``, ``?``, ``[...]``) on names such as
        ``Dense_0.kernel``, in order of preference, each with a prior (a callable of
        (name, shape), or a distribution).
    :param default: prior of parameters that no pattern matches; without it such a
        parameter is an error.

    :raises ValueError: for a parameter without a prior, and, inside
        :func:`~numpyro_bnn.random_network`, for a pattern that matches nothing.

    >>> from numpyro_bnn import priors
    >>> prior = priors.BySite({"Dense_0.*": priors.Laplace()}, default=priors.Normal())
    >>> (
    ...     type(prior("Dense_0.kernel", (4, 2))).__name__,
    ...     type(prior("Dense_1.kernel", (4, 2))).__name__,
    ... )
    ('Laplace', 'Normal')
    """

    patterns: Mapping[str, PriorLike]
    default: PriorLike | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.patterns, Mapping):
            instead = (
                'Pass a dictionary, e.g. `{"Dense_0.*": priors.ARD(), "*": '
                "priors.Normal()}`."
            )
            raise argument_error(
                "priors.BySite", "patterns", self.patterns, instead, TypeError
            )
        by_argument = {
            f"patterns[{pattern!r}]": prior for pattern, prior in self.patterns.items()
        }
        if self.default is not None:
            by_argument["default"] = self.default
        for argument, prior in by_argument.items():
            if isinstance(prior, type) or not callable(prior):
                instead = "Pass an object such as `priors.Normal()`."
                raise argument_error(
                    "priors.BySite", argument, prior, instead, TypeError
                )

    def __call__(self, name: str, shape: Shape) -> dist.Distribution:
        prior = self.default
        for pattern, pattern_prior in self.patterns.items():
            if fnmatchcase(name, pattern):
                prior = pattern_prior
                break
        if prior is None:
            came = (
                f"no pattern for parameter {name!r} (patterns: "
                f"{', '.join(self.patterns) or 'none'})"
            )
            instead = (
                'Add one, or a `default=`; a dictionary may end with `"*": '
                "priors.Normal()`."
            )
            raise argument_error("priors.BySite", "patterns", came, instead)
        return prior if isinstance(prior, dist.Distribution) else prior(name, shape)

    def check(self, names: Iterable[str]) -> None:
        """Refuse patterns that match none of ``names``: most likely a
        misspelled site.
        """
        names = list(names)
        for pattern in self.patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise unknown_name("priors.BySite", "patterns", pattern, names)


def as_prior(
    prior: PriorLike, call: str = "random_network"
) -> Callable[[str, Shape], dist.Distribution]:
    """Convert what NumPyro accepts as ``prior=`` into a callable: a callable, a
    distribution, or a dict of these.

    :raises TypeError: for anything else; for a string the error names the closest
        family.
    """
    if isinstance(prior, dist.Distribution):
        return lambda name, shape: prior
    if isinstance(prior, Mapping):
        return BySite(prior)
    if isinstance(prior, type) or not callable(prior):
        families = [*_families(Prior), "BySite", "Fixed", "Learned"]
        if isinstance(prior, type):
            example = "e.g. `priors.Normal()`"
            if prior.__name__ in families:
                example = f"`priors.{prior.__name__}()`"
            raise argument_error(
                call,
                "prior",
                f"the class {prior.__name__}",
                f"Pass an object, {example}.",
                TypeError,
            )
        error = unknown_name(call, "prior", str(prior), families)
        raise TypeError(f"{error} Pass an object, e.g. `priors.Normal()`.")
    return prior


def _families(parent: type) -> Iterator[str]:
    """Names of the families derived from a class."""
    children: list[type] = parent.__subclasses__()
    for family in children:
        if not family.__name__.startswith("_"):
            yield family.__name__
        yield from _families(family)
