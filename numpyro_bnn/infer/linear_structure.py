"""Find sites that enter a model linearly under normal noise, and refuse those that do not."""

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import random
from numpyro.infer.gibbs import latent_sample_sites

from numpyro_bnn._checks import argument_error, unknown_name
from numpyro_bnn._distributions import (
    affine_normal,
    is_affine_normal,
    is_factor,
    unmasked_elements,
    unwrapped,
)
from numpyro_bnn._jaxprs import dependence
from numpyro_bnn.program.plates import full_trace

# Deviations from linearity that are attributed to rounding, relative to the sum of the absolute terms; and the
# sizes of the innovations at which they are measured.
TOLERANCE, SIZES = 1e-3, (1.0, 30.0, 1000.0)
INNOVATIONS = " innovations"  # cannot be the name of a site


class LinearStructure(NamedTuple):
    """Shapes of the linear sites, in the order of the model, and the data whose means depend on them."""

    shapes: dict[str, tuple[int, ...]]
    data: tuple[str, ...]


class LinearGaussian(NamedTuple):
    r"""A linear Gaussian model :math:`y \sim N(f + A u, s^2)^\beta`, :math:`u \sim N(0, d^2)^\gamma`, without A.

    :param prior_sd: (P,) d.
    :param prior_weight: (P,) the power of the prior, 1 unless it is scaled.
    :param value: (N,) y.
    :param mean: (N,) f, with all u = 0.
    :param sd: (N,) s.
    :param weight: (N,) the power of each datum: scales of the log density, 0 where masked.
    """

    prior_sd: jax.Array
    prior_weight: jax.Array
    value: jax.Array
    mean: jax.Array
    sd: jax.Array
    weight: jax.Array


class LinearModel:
    """A model as a function of the *innovations* u of its linear sites: the sites less their prior means.

    Prior means may themselves be linear in other linear sites, as in a hierarchy of locations; innovations remain
    independent.

    :param values: of all other latent sites.
    """

    def __init__(
        self,
        model: Callable,
        structure: LinearStructure,
        values: Mapping[str, Any],
        args: tuple,
        kwargs: Mapping[str, Any],
    ) -> None:
        self._model, self._values, self._args, self._kwargs = model, dict(values), args, dict(kwargs)
        self.structure = structure

    def trace(self, u: jax.Array) -> dict[str, dict[str, Any]]:
        """The trace of the model at (P,) innovations."""
        parts, start = {}, 0
        for name, shape in self.structure.shapes.items():
            parts[name] = u[start : start + prod(shape)].reshape(shape)
            start += prod(shape)

        def value(site: dict[str, Any]) -> Any:
            if site["name"] not in parts:
                return self._values.get(site["name"])
            loc, _ = _normal(site)
            return loc + parts[site["name"]].astype(loc.dtype)

        return full_trace(self._model, value, self._args, self._kwargs)

    def mean(self, u: jax.Array) -> jax.Array:
        """(N,) means of the data."""
        traced = self.trace(u)
        return jnp.concatenate([jnp.ravel(_normal(traced[name])[0]) for name in self.structure.data])

    def jacobian(self) -> jax.Array:
        """(N, P) the linear map A."""
        u = self.zeros()
        rows = jax.eval_shape(self.mean, u).shape[0]
        derivative = jax.jacfwd if u.size <= rows else jax.jacrev
        return derivative(self.mean)(u)

    def gaussian(self) -> LinearGaussian:
        """Everything except the linear map."""
        traced = self.trace(self.zeros())
        prior, data = (
            [flat_normal(traced[name]) for name in names] for names in (self.structure.shapes, self.structure.data)
        )
        _, _, prior_sd, prior_weight = map(jnp.concatenate, zip(*prior, strict=True))
        return LinearGaussian(prior_sd, prior_weight, *map(jnp.concatenate, zip(*data, strict=True)))

    def zeros(self) -> jax.Array:
        """(P,) innovations at the prior means."""
        return jnp.zeros(sum(map(prod, self.structure.shapes.values())))


def read(
    call: str, model: Callable, sites: tuple[str, ...], args: tuple, kwargs: Mapping[str, Any]
) -> LinearStructure:
    """Find where the linear sites enter a model; errors, raised in the name of ``call``, name the site at fault.

    >>> import numpyro, numpyro.distributions as dist
    >>> def model():
    ...     sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    ...     w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    ...     numpyro.sample("y", dist.Normal(2.0 * w, sigma), obs=1.0)
    >>> read("read", model, ("w",), (), {})
    LinearStructure(shapes={'w': ()}, data=('y',))
    """
    traced = full_trace(model, {}, args, kwargs)
    latent = latent_sample_sites(traced)
    for name in sites:
        if name not in latent:
            raise unknown_name(call, "sites", name, latent)
        if not is_affine_normal(traced[name]["fn"]):
            prior = type(unwrapped(traced[name]["fn"])).__name__
            raise argument_error(
                call, "sites", f"{name!r}, a site with a {prior} prior", "Name sites with normal priors."
            )
    values = {name: jnp.asarray(traced[name]["value"]) for name in latent}
    shapes = {name: jnp.shape(values[name]) for name in latent if name in sites}
    others = {name: value for name, value in values.items() if name not in sites}
    linear = LinearModel(model, LinearStructure(shapes, ()), others, args, kwargs)
    linear.structure = linear.structure._replace(data=_data(call, traced, linear, sites))
    _check_linear(call, linear)
    for name in linear.structure.data:
        if not traced[name]["is_observed"]:
            came = f"{sites}, on which the latent site {name!r} depends"
            raise argument_error(call, "sites", came, f"Only data may depend on them: name {name!r} as well.")
    return linear.structure


def _parts(linear: LinearModel, at: Mapping[str, jax.Array]) -> dict[tuple[str, str], Any]:
    """For every sample site, the quantities that innovations may or may not change."""
    found: dict[tuple[str, str], Any] = {}
    for name, site in linear.trace(at[INNOVATIONS]).items():
        if site["type"] == "sample":
            found["density", name] = log_density(site)
            if is_affine_normal(site["fn"], masked=True):
                found["sd", name] = _normal(site)[1]
                found["weight", name], found["value", name] = weights(site), site["value"]
    return found


def _data(call: str, traced: Mapping[str, Any], linear: LinearModel, sites: tuple[str, ...]) -> tuple[str, ...]:
    """Other sites whose density depends on the linear ones."""
    refused = partial(argument_error, call, "sites")
    what = {
        "sd": "the scale",
        "weight": "the scale or mask of the log density",
        "value": "the observed value",
    }
    used = dependence(partial(_parts, linear), {INNOVATIONS: linear.zeros()})
    below = tuple(name for kind, name in used if kind == "density" and name not in sites and used[kind, name])
    for name in (*sites, *below):
        fn = traced[name]["fn"]
        if not is_affine_normal(fn, masked=True):
            raise refused(
                f"{sites}, on which {name!r} ({type(unwrapped(fn, masked=True)).__name__}) depends",
                "Only normal sites may depend on them: sample these sites with another kernel, e.g. `NUTS(model)`.",
            )
        for kind, meaning in what.items():
            if used[kind, name] and (kind != "value" or name in below):
                raise refused(
                    f"{sites}, on which {meaning} of {name!r} depends",
                    "Only means may depend on them: sample these sites with another kernel, e.g. `NUTS(model)`.",
                )
    if not below:
        raise refused(sites, "No observed normal site depends on them: is the data passed to the model?")
    return below


def _check_linear(call: str, linear: LinearModel) -> None:
    """Refuse means that are not linear."""

    def slope(at: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        u = at[INNOVATIONS]
        return {"map": jax.jvp(linear.mean, (u,), (jnp.ones_like(u),))[1]}

    # If the program of the derivative does not use the point, the mean is linear.
    if not dependence(slope, {INNOVATIONS: linear.zeros()})["map"]:
        return
    # Otherwise compare means with their linearization at random values.
    jacobian, start = linear.jacobian(), linear.mean(linear.zeros())
    for i, size in enumerate(SIZES):
        u = size * random.normal(random.key(i), linear.zeros().shape)
        error = linear.mean(u) - (start + jacobian @ u)
        if isinstance(error, jax.core.Tracer):
            instead = "Linearity is measured: call it once outside of `jit` or `vmap`."
            raise argument_error(call, "model_args", "arrays that are traced by a transformation", instead)
        close = jnp.abs(error) <= TOLERANCE * (jnp.abs(start) + jnp.abs(jacobian) @ jnp.abs(u))
        if not bool(jnp.all(close)):
            worst = float(jnp.max(jnp.abs(error)))
            raise argument_error(
                call,
                "sites",
                f"{tuple(linear.structure.shapes)}, in which the mean of {linear.structure.data} is not linear"
                f" (off by {worst:.2g} at random values)",
                "Name sites that enter linearly, such as the weights of an output layer.",
            )


def log_density(site: Mapping[str, Any]) -> jax.Array:
    """Log density of a site, with its scale; minus infinity outside of the support.

    >>> import numpyro.distributions as dist
    >>> density = jax.jit(lambda value: log_density({"fn": dist.Uniform(0.0, 0.5), "value": value, "scale": None}))
    >>> round(float(density(0.25)), 2), float(density(3.0))
    (0.69, -inf)
    """
    fn, value = site["fn"], site["value"]
    log_prob = fn.log_prob(value)
    if not is_factor(fn):
        log_prob = jnp.where(jnp.all(fn.support(value)), log_prob, -jnp.inf)
    return jnp.sum(log_prob if site["scale"] is None else site["scale"] * log_prob)


def weights(site: Mapping[str, Any]) -> jax.Array:
    """The factor by which scales and masks multiply the log density of every element of a site.

    >>> import numpyro.distributions as dist
    >>> fn = dist.Normal(jnp.zeros((2, 3)), 1.0).to_event(1).mask(jnp.array([True, False]))
    >>> weights({"fn": fn, "scale": 0.5}).tolist()
    [[0.5, 0.5, 0.5], [0.0, 0.0, 0.0]]
    """
    fn = site["fn"]
    scale = jnp.broadcast_to(1.0 if site["scale"] is None else site["scale"], fn.batch_shape)
    return scale.reshape(fn.batch_shape + (1,) * fn.event_dim) * unmasked_elements(fn)


def _normal(site: Mapping[str, Any]) -> tuple[jax.Array, jax.Array]:
    found = affine_normal(site["fn"], masked=True)
    assert found is not None  # callers have checked
    return found


def flat_normal(site: Mapping[str, Any]) -> tuple[jax.Array, ...]:
    """Value, mean, sd and weight of every element of a normal site, flat."""
    loc, scale = _normal(site)
    value = jnp.broadcast_to(site["value"], loc.shape)
    dtype = jnp.result_type(float)
    return tuple(jnp.ravel(part).astype(dtype) for part in (value, loc, jnp.abs(scale), weights(site)))
