"""Parts of AutoAmortized: local latent sites as the network sees them, their posterior, plates and inputs."""

import inspect
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.distributions.transforms import Transform, biject_to
from numpyro.primitives import Messenger

from numpyro_bnn._checks import argument_error
from numpyro_bnn._distributions import affine_normal
from numpyro_bnn.nn.base import Shape

CALL = "guides.AutoAmortized"


class Posterior(NamedTuple):
    """q of the unconstrained local sites, side by side: loc (B, L) and Cholesky factor (B, L, L) or sds (B, L)."""

    loc: jax.Array
    scale: jax.Array

    @property
    def sd(self) -> jax.Array:
        return self.scale if self.scale.ndim == 2 else jnp.sqrt(jnp.square(self.scale).sum(-1))

    def draw(self, rng_key: jax.Array, sample_shape: Shape) -> jax.Array:
        noise = jax.random.normal(rng_key, (*sample_shape, *self.loc.shape))
        if self.scale.ndim == 2:
            return self.loc + self.scale * noise
        return self.loc + jnp.einsum("...ij,...j->...i", self.scale, noise)


class RowSite(NamedTuple):
    """A local site as seen from one row: its place in vectors of all sites, its shape, and where q starts."""

    name: str
    part: slice
    shape: Shape
    axis: int
    event_dim: int
    support: Any
    loc: jax.Array
    raw_scale: jax.Array

    @property
    def transform(self) -> Transform:
        return biject_to(self.support)

    def place(self, flat: jax.Array) -> jax.Array:
        """Extract this site from all sites (..., B, L), with the rows along the axis of the plate."""
        rows = jnp.reshape(flat[..., self.part], (*flat.shape[:-1], *self.shape))
        return jnp.moveaxis(rows, flat.ndim - 2, self.axis)

    def independent(self, posterior: Posterior) -> dist.Distribution:
        """q of the site, if sites are independent."""
        loc, scale = self.place(posterior.loc), self.place(posterior.scale)
        fn = dist.Normal(loc, scale).to_event(self.event_dim)
        real = getattr(self.support, "base_constraint", self.support) is dist.constraints.real
        return fn if real else dist.TransformedDistribution(fn, self.transform)

    def point(self, flat: jax.Array, event_dim: int) -> dist.Distribution:
        """The site at values (B, L) drawn from a joint density; its density is the change of variables."""
        unconstrained = self.place(flat)
        value = self.transform(unconstrained)
        if numpyro.get_mask() is False:
            return dist.Delta(value, event_dim=event_dim)
        log_det = self.transform.log_abs_det_jacobian(unconstrained, value)
        batch_ndims = jnp.ndim(value) - event_dim
        return dist.Delta(value, -jnp.sum(log_det, tuple(range(batch_ndims, jnp.ndim(log_det)))), event_dim)


def declare_head(name: str, features: jax.Array, start: jax.Array) -> jax.Array:
    """Declare an affine map of the features that starts at a constant, and evaluate it."""
    kernel = numpyro.param(f"{name}.kernel", jnp.zeros((features.shape[-1], start.size)))
    return features @ kernel + numpyro.param(f"{name}.bias", start)[None]


class without(Messenger):
    """Run a model with the sites ``names`` and all deterministic ones hidden; they are drawn with a fixed key."""

    def __init__(self, fn: Callable, names: list[str]) -> None:
        self.names = names
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "deterministic" or msg.get("name") in self.names:
            msg["stop"] = True
            if msg["type"] == "sample" and msg["value"] is None:
                msg["kwargs"]["rng_key"] = jax.random.key(0)


def find_plate(latent: Mapping[str, Any], name: str | None) -> str:
    """The plate of the data points."""
    found = {frame.name: None for site in latent.values() for frame in site["cond_indep_stack"]}
    listed = ", ".join(map(repr, found)) or "none"
    if name is not None and name not in found:
        raise argument_error(CALL, "plate", repr(name), f"Plates with latent sites: {listed}.")
    if not found:
        got = f"one whose latent sites ({', '.join(latent) or 'none'}) lie in no plate"
        raise argument_error(CALL, "model", got, "A local latent is sampled inside a plate over data points.")
    if name is None and len(found) > 1:
        instead = f'Say which holds the data points, e.g. `plate="{next(iter(found))}"`.'
        raise argument_error(CALL, "plate", f"none, and latent sites lie in {listed}", instead)
    return next(iter(found)) if name is None else name


def center_and_spread(fn: dist.Distribution, transform: Transform) -> tuple[jax.Array, jax.Array]:
    """Center and spread of a prior in unconstrained space: mean and sd if normal, else median and scaled IQR."""
    exact = affine_normal(fn, masked=True)
    if exact is not None:
        return jnp.asarray(exact[0], float), jnp.abs(jnp.asarray(exact[1], float))
    draws = transform.inv(fn.sample(jax.random.key(0), (1000,)))
    low, center, high = jnp.quantile(draws, jnp.array([0.25, 0.5, 0.75]), axis=0)
    return center, jnp.maximum((high - low) / 1.349, 1e-3)


def minibatch(rows: jax.Array, plate: numpyro.plate) -> jax.Array:
    """The rows that the plate draws."""
    given, drawn = rows.shape[0], plate.subsample_size
    if given == plate.size:
        return rows if drawn == given else rows[plate._indices]
    if given == drawn:  # the model was given its minibatch
        return rows
    got = f"{given} rows, and plate {plate.name!r} has {plate.size}, of which it draws {drawn}"
    raise argument_error(CALL, "inputs", got, "Give one row per data point.")


def plate_sizes(model: Callable, args: tuple, kwargs: Any) -> dict[str, tuple[int, int | None]]:
    """(size, subsample size) of every plate; the model is run on shapes alone."""
    found = {}

    def run(key: jax.Array) -> None:
        with handlers.block():
            trace = handlers.trace(handlers.seed(model, key)).get_trace(*args, **kwargs)
        found.update({name: site["args"] for name, site in trace.items() if site["type"] == "plate"})

    jax.eval_shape(run, jax.random.key(0))
    return found


def argument_by_name(model: Any, name: str, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """The value of an argument of the model by its name."""
    while getattr(model, "fn", None) is not None:  # inside handlers
        model = model.fn
    signature = inspect.signature(model)
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    if name not in signature.parameters and Parameter.VAR_KEYWORD not in kinds:
        instead = f"Arguments of the model: {', '.join(signature.parameters)}."
        raise argument_error(CALL, "inputs", repr(name), instead)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments.get(name, kwargs.get(name))
