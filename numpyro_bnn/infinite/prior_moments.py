"""Mean and variance that a prior gives to every parameter of a network, scaled as the
wide limit requires.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro import handlers

from numpyro_bnn._checks import argument_error, unknown_name
from numpyro_bnn._distributions import affine_normal, unwrapped
from numpyro_bnn._types import Scalar
from numpyro_bnn.nn import Layer
from numpyro_bnn.nn.base import Shape, fan_in, role
from numpyro_bnn.priors import Normal
from numpyro_bnn.priors.base import Constant, PriorLike, as_prior

Scales: TypeAlias = Mapping[str, Any] | None  # values of the hyper-sites of a prior


class SiteMoments(NamedTuple):
    """Mean of a parameter, and its variance times the fan-in: scalars, (..., 1) by
    input, or one for each element.
    """

    mean: Scalar
    variance: Scalar


class PriorMoments(NamedTuple):
    """Moments by parameter, and the parameters whose weights are independent and
    normal.
    """

    sites: dict[str, SiteMoments]
    normal: frozenset[str]


def prior_moments(
    call: str,
    net: Layer,
    input_shape: Shape,
    prior: PriorLike | None = None,
    scales: Scales = None,
) -> PriorMoments:
    """Evaluate a prior, its hyper-sites at ``scales``, at every parameter
    of a network.
    """
    shapes = net.param_shapes(input_shape)
    prior = as_prior(Normal() if prior is None else prior)
    if hasattr(prior, "check"):
        prior.check(shapes)
    hyper_values, used = dict(scales or {}), set()
    sites, normal = {}, set()
    for name, shape in shapes.items():
        fn, hyper = _distribution(call, prior, name, shape, hyper_values)
        used.update(hyper)
        sites[name], is_normal = _moments(call, fn, name, shape)
        if is_normal:
            normal.add(name)
    for name in hyper_values.keys() - used:
        raise unknown_name(
            call, "scales", name, used or ["(this prior has no hyper-sites)"]
        )
    return PriorMoments(sites, frozenset(normal))


def weight_fan_in(name: str, shape: Shape) -> int:
    """Fan-in of a kernel; 1 for other parameters."""
    return fan_in(name, shape) if role(name, shape) == "kernel" else 1


def _distribution(
    call: str, prior: PriorLike, name: str, shape: Shape, hyper_values: dict
) -> tuple[Any, list[str]]:
    """The distribution of one parameter at the given values of its hyper-sites, and
    their names.
    """
    seeded = handlers.seed(handlers.substitute(prior, data=hyper_values), rng_seed=0)
    with handlers.block(), handlers.trace() as trace:
        fn = seeded(name, shape)
    hyper = [site for site, message in trace.items() if message["type"] == "sample"]
    if missing := [site for site in hyper if site not in hyper_values]:
        came = f"a prior of {name!r} with the unknown scale {missing[0]!r}"
        choose = (
            f"choose one, `scales={{{missing[0]!r}: 1.0}}`, or a prior without "
            f"hyper-sites, `priors.Normal()`."
        )
        instead = (
            f"Such a prior is a mixture of Gaussian processes, one for each value: "
            f"{choose}"
        )
        raise argument_error(call, "prior", came, instead)
    return fn, hyper


def _moments(
    call: str, fn: dist.Distribution, name: str, shape: Shape
) -> tuple[SiteMoments, bool]:
    """Moments of one parameter, and whether it is normal."""
    if not isinstance(fn, dist.Distribution):
        instead = (
            "A prior is a callable `(name, shape) -> "
            "numpyro.distributions.Distribution`."
        )
        raise argument_error(call, "prior", f"{fn!r} for {name!r}", instead, TypeError)
    if isinstance(fn, Constant):
        if call == "infinite.empirical_ntk":
            return SiteMoments(fn.v, jnp.zeros(())), False  # not trained
        came = f"weights of {name!r} that are not random"
        instead = (
            "The kernel is that of the random rest of the network: pass it, and the "
            "features of the body as x."
        )
        raise argument_error(call, "prior", came, instead)
    normal_moments = affine_normal(fn)
    if normal_moments is None:
        mean, variance = _other_moments(call, fn, name)
    else:
        mean, variance = normal_moments[0], normal_moments[1] ** 2
    any_mean = call == "infinite.empirical_ntk" or role(name, shape) == "scale"
    if not any_mean and _known_not(mean, lambda m: m == 0):
        instead = "The wide limit needs weights and biases of mean 0."
        raise argument_error(
            call, "prior", f"a mean other than 0 for {name!r}", instead
        )
    if _known_not(variance, np.isfinite):
        instead = (
            "Sums of many weights have no Gaussian limit then: use e.g. "
            "`priors.Normal()`."
        )
        raise argument_error(
            call, "prior", f"an infinite variance for {name!r}", instead
        )
    scaled = variance * weight_fan_in(name, shape)
    site = SiteMoments(_reduced(mean, shape), _reduced(scaled, shape))
    return site, normal_moments is not None


def _other_moments(
    call: str, fn: dist.Distribution, name: str
) -> tuple[Scalar, Scalar]:
    """Mean and variance of independent weights of another distribution."""
    try:
        if not unwrapped(fn).event_shape:
            return fn.mean, fn.variance
    except NotImplementedError:
        pass
    came = f"a {type(unwrapped(fn)).__name__} for {name!r}"
    instead = (
        "The wide limit is known for independent weights with a variance, e.g. "
        "`priors.Normal()`."
    )
    raise argument_error(call, "prior", came, instead)


def _known_not(value: object, holds: Callable[[np.ndarray], Any]) -> bool:
    """Whether a condition is violated, as far as the value is known (not traced by
    JAX).
    """
    return not isinstance(value, jax.core.Tracer) and not np.all(
        holds(np.asarray(value))
    )


def _reduced(value: Any, shape: Shape) -> Any:
    """A scalar where all elements are equal, (..., 1) where a kernel's differ by input
    only, else all of them.
    """
    if np.ndim(value) == 0:
        return jnp.asarray(value)
    if isinstance(value, jax.core.Tracer):
        # assumed not to differ by unit, as in every family of ours
        full = jnp.broadcast_to(value, shape)
        return (
            jnp.mean(full, axis=-1, keepdims=True) if len(shape) > 1 else jnp.mean(full)
        )
    array = np.broadcast_to(np.asarray(value), shape)
    if np.all(array == array.flat[0]):
        return jnp.asarray(array.flat[0])
    if len(shape) > 1 and np.all(array == array[..., :1]):
        array = array[..., :1]
    return jnp.asarray(array)
