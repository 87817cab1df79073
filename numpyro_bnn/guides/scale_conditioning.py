"""Sites whose prior sd is itself unknown: their loc and scale, read from the model at values of the hyper-sites."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from numpyro import handlers

from numpyro_bnn._distributions import affine_normal, is_affine_normal
from numpyro_bnn._jaxprs import dependence, pruned
from numpyro_bnn.program.plates import full_plates

# Parents of each site whose prior N(loc, scale^2) has a scale that depends on other latent sites.
Scaled: TypeAlias = Mapping[str, frozenset[str]]
# Maps values of sites to prior loc and scale by site.
Program: TypeAlias = Callable[[Mapping[str, Any]], Mapping[str, tuple[jax.Array, jax.Array]]]


def _moments(
    model: Callable, names: Iterable, examples: Mapping, args: tuple, kwargs: Mapping, plates: Mapping | None
) -> Program:
    """Prior loc and scale of the sites ``names`` at values of latent sites; other sites are at ``examples``."""

    def program(values: Mapping[str, Any]) -> dict[str, tuple[jax.Array, jax.Array]]:
        given = {**examples, **values, **(plates or {})}
        placed = handlers.substitute(full_plates(model) if plates is None else model, data=given)
        with handlers.block():
            trace = handlers.trace(handlers.seed(placed, 0)).get_trace(*args, **kwargs)
        found = {name: affine_normal(trace[name]["fn"], masked=True) for name in names}
        return {name: pair for name, pair in found.items() if pair is not None}

    return program


def scaled_sites(
    model: Callable, trace: Mapping[str, dict], local: set[str], args: tuple, kwargs: Mapping[str, Any]
) -> Scaled:
    """Find the Gaussian sites whose prior sd depends on other latent sites, and those sites.

    :param trace: trace of the model, at values where it can be run.
    :param local: sites inside subsampled plates; sites that depend on one of them are left out.

    >>> import numpyro, numpyro.distributions as dist
    >>> def model():
    ...     s = numpyro.sample("s", dist.HalfNormal(1.0))
    ...     numpyro.sample("w", dist.Normal(0.0, s).expand([3]))
    >>> trace = handlers.trace(handlers.seed(model, 0)).get_trace()
    >>> scaled_sites(model, trace, set(), (), {})
    {'w': frozenset({'s'})}
    """
    latent = {n: s for n, s in trace.items() if s["type"] == "sample" and not s["is_observed"]}
    names = [name for name, site in latent.items() if is_affine_normal(site["fn"], masked=True)]
    plates = {n: site["value"] for n, site in trace.items() if site["type"] == "plate"}
    program = _moments(model, names, {}, args, kwargs, plates)
    values = {name: jnp.asarray(site["value"]) for name, site in latent.items()}

    def parts(values: Mapping[str, Any]) -> dict[tuple[str, int], jax.Array]:
        return {(name, part): pair[part] for name, pair in program(values).items() for part in (0, 1)}

    parents = dependence(parts, values)
    of_both = {name: parents[name, 0] | parents[name, 1] for name in names}
    return {n: frozenset(of_both[n]) for n in names if parents[n, 1] and not of_both[n] & local}


def prior_program(
    model: Callable, scaled: Scaled, examples: Mapping, args: tuple, kwargs: Mapping, plates: Any = None
) -> Program:
    """A function from values of hyper-sites to prior loc and scale of the sites they scale, without the likelihood.

    :param examples: values of the sites outside subsampled plates, used if a value is not known yet.
    :param plates: indices of plates; without them every plate is full.
    """
    needed = sorted(set().union(*scaled.values()))
    parents = {name: jnp.asarray(examples[name], float) for name in needed}
    run = pruned(_moments(model, tuple(scaled), examples, args, kwargs, plates), parents)

    def program(values: Mapping[str, Any]) -> Mapping[str, tuple[jax.Array, jax.Array]]:
        return run({name: jnp.asarray(values.get(name, parent), float) for name, parent in parents.items()})

    return program
