"""How wide the prior of each site is, given the sites that other blocks hold."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro.distributions import biject_to, constraints

from numpyro_bnn._checks import argument_error
from numpyro_bnn._dependence import dependence
from numpyro_bnn._plates import full_trace

__all__ = ["prior_precision"]


def prior_precision(
    call: str, model: Callable, z: Mapping[str, jax.Array], args: tuple, kwargs: Mapping[str, Any] | None
) -> jax.Array:
    """Prior precision of each coordinate of a flat position: 1 / variance, 0 where there is none.

    None have sites that are not real (their unconstrained density has another curvature), and those whose variance is
    not finite or not known.

    :param call: name of the kernel, for error messages.
    :param z: unconstrained values of the sites that the kernel draws; the flat position holds them by name.
    :return: (P,), at least 0.
    :raises ValueError: if a variance depends on a site in ``z``.

    >>> import numpyro, numpyro.distributions as dist
    >>> model = lambda: numpyro.sample("w", dist.Normal(0.0, 0.5).expand([2]))
    >>> prior_precision("call", model, {"w": jnp.zeros(2)}, (), None).tolist()
    [4.0, 4.0]
    """
    read = partial(_precisions, model, args, kwargs)
    for site, sources in dependence(read, z).items():
        if sources:
            raise argument_error(
                call,
                "preconditioner",
                f"'prior', where the prior variance of {site!r} depends on {sorted(sources)}, which it also draws",
                "Hold these sites in another block of `Gibbs` (`PrecisionGibbs`), or pass another preconditioner.",
            )
    found = read(z)
    return jnp.concatenate([jnp.ravel(found[name]) for name in sorted(z)])


def _precisions(
    model: Callable,
    args: tuple,
    kwargs: Mapping[str, Any] | None,
    z: Mapping[str, jax.Array],
) -> dict[str, jax.Array]:
    def placed(site: dict[str, Any]) -> Any:
        return biject_to(site["fn"].support)(z[site["name"]]) if site["name"] in z else None

    traced = full_trace(model, placed, args, kwargs)
    return {name: _precision(traced[name]["fn"], value) for name, value in z.items()}


def _precision(fn: dist.Distribution, z: jax.Array) -> jax.Array:
    while isinstance(fn, dist.Independent):
        fn = fn.base_dist
    if fn.support not in (constraints.real, constraints.real_vector):
        return jnp.zeros_like(z)
    try:
        variance = jnp.broadcast_to(fn.variance, z.shape)
    except NotImplementedError:
        return jnp.zeros_like(z)
    known = jnp.isfinite(variance) & (variance > 0)
    return jnp.where(known, 1 / jnp.where(known, variance, 1), 0).astype(z.dtype)
