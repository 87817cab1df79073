"""The prior of a model as a program that never touches the data."""

from collections.abc import Callable, Mapping
from functools import cached_property
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist

from numpyro_bnn._checks import argument_error
from numpyro_bnn._dependence import dependence, pruned
from numpyro_bnn._distributions import affine_normal, unwrapped
from numpyro_bnn._plates import full_trace

__all__ = ["CONDITIONED", "Prior", "as_normal", "elementwise", "log_likelihoods", "prior_sites"]

# Keyword through which NumPyro's Gibbs hands the values of other blocks to a model.
CONDITIONED = "_gibbs_sites"


def prior_sites(traced: Mapping[str, dict], kwargs: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Sites whose density is the prior: latent ones, and those that other blocks of a ``Gibbs`` hold."""
    held = (kwargs or {}).get(CONDITIONED, {})
    return tuple(
        name
        for name, site in traced.items()
        if site["type"] == "sample" and (not site["is_observed"] or name in held)
    )


def log_likelihoods(
    model: Callable, values: Mapping[str, Any], args: tuple, kwargs: Mapping[str, Any] | None
) -> list[jax.Array]:
    """Log density of every observed site at ``values`` of the latent ones, on all data."""
    traced = full_trace(model, values, args, kwargs)
    latent = prior_sites(traced, kwargs)
    observed = [site for name, site in traced.items() if site["type"] == "sample" and name not in latent]
    return [site["fn"].log_prob(site["value"]) for site in observed]


class Prior:
    """Distributions of the latent sites given values of all of them, and the likelihood only where asked for.

    Made while a function is traced, for given arguments of the model; the program holds the equations that the prior
    needs and no others, so its cost does not depend on the data.

    :param model: a NumPyro model.
    :param values: example constrained values of the latent sites.
    :param args: positional arguments of the model.
    :param kwargs: its keyword arguments.

    >>> import numpyro
    >>> def model():
    ...     s = numpyro.sample("s", dist.HalfNormal(1.0))
    ...     numpyro.sample("w", dist.Normal(0.0, s))
    >>> prior = Prior(model, {"s": jnp.ones(()), "w": jnp.ones(())})
    >>> prior.children({"s"})
    {'w'}

    :ivar distributions: values -> distribution of every latent site.
    :ivar likelihood: values -> log likelihood.
    :ivar noncentered: values -> for every site ``w_base`` the parameter ``w`` made from it.
    """

    def __init__(
        self,
        model: Callable,
        values: Mapping[str, Any],
        args: tuple = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.held = dict((kwargs or {}).get(CONDITIONED, {}))

        def distributions(values: Mapping[str, Any]) -> dict[str, Any]:
            traced = full_trace(model, values, args, kwargs)
            return {name: _checked(traced[name]) for name in prior_sites(traced, kwargs)}

        def likelihood(values: Mapping[str, Any]) -> jax.Array:
            return sum(map(jnp.sum, log_likelihoods(model, values, args, kwargs)), jnp.zeros(()))

        def responses(values: Mapping[str, Any]) -> dict[str, jax.Array]:
            traced = full_trace(model, values, args, kwargs)
            held = [
                n for n, site in traced.items() if site["type"] == "deterministic" and f"{n}_base" in values
            ]
            return {f"{name}_base": traced[name]["value"] for name in held}

        self.noncentered = responses
        self._values = dict(values)
        self._distributions = distributions
        self.distributions = pruned(distributions, self._values)
        self.likelihood = likelihood

    def children(self, sites: set[str]) -> set[str]:
        """Sites whose distribution depends on any of ``sites``."""
        return {name for name, used in self._dependence.items() if used & sites}

    @cached_property
    def _dependence(self) -> dict[str, set]:
        return dependence(self._distributions, self._values)

    def total(self, values: Mapping[str, jax.Array], sites: tuple[str, ...]) -> jax.Array:
        """Sum of the log densities of ``sites``."""
        fns, values = self.distributions(values), {**self.held, **values}
        return sum((jnp.sum(fns[name].log_prob(values[name])) for name in sites), jnp.zeros(()))


def _checked(site: Mapping[str, Any]) -> dist.Distribution:
    if site.get("scale") is not None and not site["is_observed"]:
        raise argument_error(
            "symmetry",
            "model",
            f"latent site {site['name']!r} with a scaled log density",
            "A scaled prior is not the prior: take the site out of `handlers.scale` or the subsampled plate.",
        )
    return site["fn"]


def as_normal(fn: dist.Distribution) -> tuple[jax.Array, jax.Array] | None:
    """Mean and sd of a distribution of independent normals, in the shape of the site; ``None`` for others."""
    found = affine_normal(fn)
    return None if found is None else (found[0], jnp.abs(found[1]))


def elementwise(fn: dist.Distribution, value: jax.Array) -> jax.Array | None:
    """Log density of every element of a site; ``None`` where the elements are not independent."""
    normal = as_normal(fn)
    if normal is not None:
        return dist.Normal(*normal).log_prob(value)
    base = unwrapped(fn)
    if base.event_dim:
        return None
    log_prob = base.log_prob(value)
    return log_prob if prod(jnp.shape(log_prob)) == prod(jnp.shape(value)) else None
