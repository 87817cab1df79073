"""Starting point of a guide: means at the scale of the fan-in, small standard
deviations.
"""

import warnings
from collections.abc import Mapping
from functools import partial
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.infer import init_to_median
from numpyro.util import find_stack_level

from numpyro_bnn._checks import argument_error, unknown_name
from numpyro_bnn._distributions import affine_normal
from numpyro_bnn._options import Kind
from numpyro_bnn._types import PyTree, Shape, Site, Sites, Trees
from numpyro_bnn.guides.blocks import matches
from numpyro_bnn.nn.base import fan_in

# Suffixes that NumPyro's reparameterizers give to the site they sample instead of the
# original one.
BASE_SUFFIXES = ("_base", "_decentered")


def init_to_fan_in(site: Site | None = None) -> Any:
    r"""Start Gaussian weights at the scale of their fan-in, like a network about to be
    trained.

    .. math:: w = m + \min(s, n^{-1/2})\,\epsilon, \qquad \epsilon \sim N(0, 1)

    for a site of at least two axes with prior N(m, s^2) and n inputs per unit; Gaussian
    sites with fewer axes start at their prior mean, all others at their prior median
    (:func:`~numpyro.infer.initialization.init_to_median`). It is an ordinary NumPyro
    initialization strategy, for any kernel or guide. NumPyro's ``init_to_uniform``
    draws from (-2, 2): with n inputs a unit then starts with a variance of 4 n / 3
    instead of about 1.

    The base of a non-centered weight (``w_base``) starts at N(0, 1); the guides of this
    package shrink that to the fan-in scale of the weight itself.

    Reference: He et al. (2015), *Delving deep into rectifiers*; Blundell et al. (2015)
    for guides.

    >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
    >>> from numpyro import handlers
    >>> from numpyro_bnn.guides import init_to_fan_in
    >>> def model():
    ...     numpyro.sample("w", dist.Normal(0.0, 1.0).expand([400, 50]))
    >>> start = handlers.substitute(
    ...     handlers.seed(model, 0), substitute_fn=init_to_fan_in
    ... )
    >>> round(float(jnp.std(handlers.trace(start).get_trace()["w"]["value"])), 2)
    0.05
    """
    if site is None:
        return partial(init_to_fan_in)
    instead = "Pass it as a strategy, `init_strategy=init_to_fan_in`."
    Kind(Mapping, instead).check("guides.init_to_fan_in", "site", site)
    if (
        site["type"] != "sample"
        or site["is_observed"]
        or site["fn"].support.is_discrete
    ):
        return None
    if site["value"] is not None:
        message = (
            f"init_to_fan_in() skipping initialization of site {site['name']!r}, which "
            f"has a value."
        )
        warnings.warn(message, stacklevel=find_stack_level())
        return site["value"]
    moments = affine_normal(site["fn"], masked=True)
    if moments is None:
        return init_to_median(site)
    loc, scale = moments
    shape = (*(site["kwargs"].get("sample_shape") or ()), *loc.shape)
    if len(shape) < 2:
        return jnp.broadcast_to(loc, shape)
    noise = jax.random.normal(site["kwargs"]["rng_key"], shape, loc.dtype)
    return loc + jnp.minimum(jnp.abs(scale), _fan_in_scale(site["name"], shape)) * noise


def _weight(name: str) -> str:
    for suffix in BASE_SUFFIXES:
        name = name.removesuffix(suffix)
    return name


def _fan_in_scale(name: str, shape: Shape) -> float:
    """Scale of a kernel; a base site is in units of its prior, whatever its fan-in."""
    if len(shape) > 1 and _weight(name) == name:
        return fan_in(name, shape) ** -0.5
    return 1.0


def base_sites(trace: Sites, ndim: int = 0) -> dict[str, str]:
    """``{w_base: w}`` for the sites, of at least ``ndim`` axes, that a model samples in
    another space.
    """
    weight_names = {}
    for base, site in trace.items():
        weight = trace.get(_weight(base), {})
        if site["type"] == "sample" and weight.get("type") == "deterministic":
            shape = np.shape(weight["value"])
            if np.shape(site["value"]) == shape and len(shape) >= ndim:
                weight_names[base] = weight["name"]
    return weight_names


def base_spread(name: str, base: Array, weight: Array) -> Array:
    """The spread of a non-centered site z that gives its weight w the fan-in scale; a
    scalar, at most 1.

    w is proportional to z, so sd(w) / sd(z) over the elements is the factor on z,
    however the model computes it.
    """
    weight_sd, sd = jnp.std(weight), jnp.std(base)
    fan_in_scale = _fan_in_scale(_weight(name), weight.shape)
    factor = sd * fan_in_scale / jnp.where(weight_sd > 0, weight_sd, 1.0)
    return jnp.where((weight_sd > 0) & (sd > 0), jnp.minimum(1.0, factor), 1.0)


def initial_spread(site: Site, local: bool) -> Array | float:
    """Initial scale of a site in unconstrained space; the initial sd of a guide is a
    fraction of it.

    :param local: whether each data point has its own value, so that the axes of the
        site are not inputs of a layer.
    :return: min(prior sd, fan_in^-1/2) for Gaussian weights, 1 for all others.
    """
    moments = affine_normal(site["fn"], masked=True)
    if moments is None:
        return 1.0
    scale = jnp.abs(moments[1])
    if local:
        return jnp.minimum(1.0, jnp.min(scale))
    return jnp.minimum(scale, _fan_in_scale(site["name"], scale.shape))


def check_imputed(call: str, trace: Sites) -> None:
    """Refuse observations imputed by ``obs_mask``: without density where data are
    given, they unbound the ELBO.
    """
    for name in trace:
        if (
            name.endswith("_unobserved")
            and f"{name.removesuffix('_unobserved')}_observed" in trace
        ):
            got = f"the site {name!r} of `obs_mask`, a part of which has no density"
            instead = (
                "Leave rows out by `handlers.mask(mask=...)`, or impute them with a "
                "kernel of MCMC."
            )
            raise argument_error(call, "model", got, instead)


def check_init_scale(call: str, init_scale: PyTree) -> None:
    """Refuse anything but a positive number, or a mapping from patterns to positive
    numbers or arrays.
    """
    by_pattern = init_scale if isinstance(init_scale, Mapping) else {"*": init_scale}
    texts = all(isinstance(pattern, str) for pattern in by_pattern)
    if not (by_pattern and texts and all(map(_is_positive, by_pattern.values()))):
        instead = (
            "Pass a positive number, or positive standard deviations by pattern, "
            'e.g. `{"*.kernel": 0.01}`.'
        )
        raise argument_error(call, "init_scale", repr(init_scale), instead)


def _is_positive(value: object) -> bool:
    """Whether it is a positive finite number, or an array of them."""
    if isinstance(value, bool) or not isinstance(value, Real | np.ndarray | Array):
        return False
    array = np.asarray(value)
    return array.dtype.kind in "iuf" and bool(np.all((array > 0) & (array < np.inf)))


def initial_scales(
    call: str,
    init_scale: PyTree,
    spreads: Trees,
    shapes: Mapping[str, Shape],
) -> dict[str, Array]:
    """Initial standard deviation of every site, in unconstrained space.

    :param init_scale: a number that multiplies the spreads, or standard deviations by
        pattern; a site that matches no pattern gets 0.1 times its spread.
    :raises ValueError: for a pattern that matches no site, and an array that does not
        fit its site.
    """
    by_pattern = init_scale if isinstance(init_scale, Mapping) else {}
    factor = 0.1 if isinstance(init_scale, Mapping) else init_scale
    for pattern in by_pattern:
        if not any(matches(name, pattern) for name in shapes):
            raise unknown_name(call, "init_scale", pattern, shapes)
    scales = {}
    for name, shape in shapes.items():
        value = factor * spreads[name]
        for pattern, sd in by_pattern.items():
            if matches(name, pattern):
                value = sd
                break
        try:
            scales[name] = jnp.broadcast_to(jnp.asarray(value, float), shape)
        except ValueError:
            got = f"an array of shape {np.shape(value)} for site {name!r}"
            instead = (
                f"The site has unconstrained shape {shape}: pass a number, or an array "
                f"of that shape."
            )
            raise argument_error(call, "init_scale", got, instead) from None
    return scales
