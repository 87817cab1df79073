"""Local latents as a recognition network gives them: sites seen from one row, their posterior, plates and inputs."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from inspect import Parameter, signature
from math import prod
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
from numpyro_bnn.nn import Layer, Shape

__all__ = [
    "CALL",
    "Posterior",
    "RowSite",
    "Without",
    "argument",
    "check_rows_independent",
    "independent",
    "minibatch",
    "plate_of_rows",
    "plate_sizes",
    "point",
    "spread",
]

CALL = "guides.AutoAmortized"


class RowSite(NamedTuple):
    """A local site as seen from one row: the shape it has there, where the plate's axis lies, and where q starts."""

    name: str
    shape: Shape
    axis: int
    event_dim: int
    support: Any
    loc: jax.Array
    raw_scale: jax.Array

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def transform(self) -> Transform:
        return biject_to(self.support)

    @property
    def is_real(self) -> bool:
        return getattr(self.support, "base_constraint", self.support) is dist.constraints.real

    def place(self, flat: jax.Array) -> jax.Array:
        """(..., B, size) -> (..., *site), the rows along the axis of the plate."""
        rows = jnp.reshape(flat, (*flat.shape[:-1], *self.shape))
        return jnp.moveaxis(rows, flat.ndim - 2, self.axis)


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


class Without(Messenger):
    """A model in which some sites, and all deterministic ones, are hidden; they are drawn with a fixed key."""

    def __init__(self, fn: Callable, names: list[str]) -> None:
        self.names = names
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "deterministic" or msg.get("name") in self.names:
            msg["stop"] = True
            if msg["type"] == "sample" and msg["value"] is None:
                msg["kwargs"]["rng_key"] = jax.random.key(0)


def plate_of_rows(latent: Mapping[str, Any], name: str | None) -> str:
    """The plate whose latent sites the network is to give."""
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


def spread(fn: dist.Distribution, transform: Transform) -> tuple[jax.Array, jax.Array]:
    """Center and spread of a prior in unconstrained space: mean and sd of a normal, else median and quartiles."""
    exact = affine_normal(fn, masked=True)
    if exact is not None:
        return jnp.asarray(exact[0], float), jnp.abs(jnp.asarray(exact[1], float))
    draws = transform.inv(fn.sample(jax.random.key(0), (1000,)))
    low, center, high = jnp.quantile(draws, jnp.array([0.25, 0.5, 0.75]), axis=0)
    return center, jnp.maximum((high - low) / 1.349, 1e-3)


def independent(site: RowSite, loc: jax.Array, scale: jax.Array) -> dist.Distribution:
    fn = dist.Normal(site.place(loc), site.place(scale)).to_event(site.event_dim)
    return fn if site.is_real else dist.TransformedDistribution(fn, site.transform)


def point(event_dim: int, site: RowSite, flat: jax.Array) -> dist.Distribution:
    """The value of a site of which the joint density is accounted for already, up to the change of variables."""
    unconstrained = site.place(flat)
    value = site.transform(unconstrained)
    if numpyro.get_mask() is False:
        return dist.Delta(value, event_dim=event_dim)
    log_det = site.transform.log_abs_det_jacobian(unconstrained, value)
    kept = jnp.ndim(value) - event_dim
    return dist.Delta(value, -jnp.sum(log_det, tuple(range(kept, jnp.ndim(log_det)))), event_dim)


def minibatch(rows: jax.Array, plate: numpyro.plate) -> jax.Array:
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


def _layers_of(fn: Any) -> Iterator[Any]:
    """A model and what its handlers wrap."""
    while fn is not None:
        yield fn
        fn = getattr(fn, "fn", None)


def argument(model: Callable, name: str, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """The value of an argument of the model by its name."""
    *_, inner = _layers_of(model)
    known = signature(inner)
    if name not in known.parameters and not any(
        p.kind is Parameter.VAR_KEYWORD for p in known.parameters.values()
    ):
        raise argument_error(
            CALL, "inputs", repr(name), f"Arguments of the model: {', '.join(known.parameters)}."
        )
    bound = known.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments.get(name, kwargs.get(name))


def check_rows_independent(network: Layer, params: Any, rows: jax.Array) -> None:
    if jax.eval_shape(partial(network.statistics, params), rows):
        instead = "Use `nn.LayerNorm`: with batch normalization q of one row would depend on the other rows."
        raise argument_error(CALL, "network", "a network with batch normalization", instead)
