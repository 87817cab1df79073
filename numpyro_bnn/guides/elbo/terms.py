"""The terms of an evidence lower bound, and the program of the model that computes them."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.distributions.kl import kl_divergence
from numpyro.distributions.util import scale_and_mask
from numpyro.util import check_model_guide_match

from numpyro_bnn._checks import argument_error
from numpyro_bnn._distributions import affine_normal, is_affine_normal, unwrapped
from numpyro_bnn._jaxprs import dependence, program_dependence

Site = dict[str, Any]
Trace = dict[str, Site]


class Terms(NamedTuple):
    """An evidence lower bound as a program."""

    program: Any  # closed jaxpr from the values of the latent sites, in the order of ``values``, to terms
    needed: list[bool]  # which of its outputs add up, with ``rest``, to the bound
    values: dict[str, jax.Array]  # one draw of every latent site of the guide
    sites: list[str]  # latent sites of the model, in the order of the guide
    normals: dict[str, tuple[jax.Array, jax.Array]]  # loc and scale of sites that may be drawn for each row
    plain: dict[str, str]  # why the other sites are drawn once
    rest: jax.Array  # terms of the guide alone


def read_terms(
    rng_key: Any, params: Mapping, model: Callable, guide: Callable, args: tuple, kwargs: Mapping, call: str
) -> Terms:
    """Run the guide once, and read the program of the model."""
    guide_key, model_key = jax.random.split(rng_key)

    def trace(program: Callable, values: Mapping[str, Any]) -> Trace:
        filled = handlers.substitute(program, data={**params, **values})
        return _checked(handlers.trace(filled).get_trace(*args, **kwargs), call)

    def run_guide(values: Mapping[str, Any]) -> Trace:
        return trace(handlers.seed(guide, guide_key), values)

    drawn = run_guide({})
    latent = {name: site for name, site in drawn.items() if _is_latent(site)}
    values = {name: latent[name]["value"] for name in sorted(latent)}  # the order in which JAX flattens them
    followers = _followers(run_guide, values)

    def terms(values: Mapping[str, Any]) -> dict[Any, jax.Array]:
        at = {name: {**site, "value": values.get(name, site["value"])} for name, site in drawn.items()}
        found = trace(handlers.replay(handlers.seed(model, model_key), at), {})
        check_model_guide_match(found, drawn)
        return _model_terms(found, latent, call)

    program, shapes = jax.make_jaxpr(terms, return_shape=True)(values)
    parents = program_dependence(program, shapes, values)
    keys: list[Any] = [path[0].key for path, _ in jax.tree_util.tree_flatten_with_path(shapes)[0]]
    exact = {name for kind, name in keys if kind == "exact" and not parents["exact", name] & followers[name]}
    needed = [kind == "likelihood" or (kind == "exact") == (name in exact) for kind, name in keys]
    priors = {name: parents["sampled", name] for name in latent if ("sampled", name) in parents}
    plain = _plain(latent, followers, priors)
    moments = {name: affine_normal(latent[name]["fn"]) for name in priors if name not in plain}
    normals = {name: found for name, found in moments.items() if found is not None}
    alone = [_log_prob(drawn[name]).sum() for name in drawn if _is_sample(drawn[name]) and name not in priors]
    return Terms(program, needed, values, list(priors), normals, plain, -sum(alone, start=jnp.zeros(())))


def _checked(trace: Trace, call: str) -> Trace:
    for name, site in trace.items():
        if site["type"] == "mutable":
            instead = "Use `Trace_ELBO`, or a layer without running state."
            raise argument_error(call, "model", f"a mutable site {name!r}", instead)
    return trace


def _is_sample(site: Site) -> bool:
    return site["type"] == "sample"


def _is_latent(site: Site) -> bool:
    return _is_sample(site) and not site["is_observed"]


def _log_prob(site: Site, value: Any = None) -> jax.Array:
    """Scaled log density of a site, elementwise."""
    if value is None and site["intermediates"]:
        density = site["fn"].log_prob(site["value"], site["intermediates"])
    else:
        density = site["fn"].log_prob(site["value"] if value is None else value)
    return jnp.asarray(scale_and_mask(density, scale=site["scale"]))


def _followers(run_guide: Callable[[Any], Trace], values: Mapping[str, Any]) -> dict[str, set[str]]:
    """For each latent site of the guide, the others whose draw or density in the guide depends on its value."""

    def sites(values: Mapping[str, Any]) -> dict[str, Any]:
        trace = run_guide(values)
        return {name: (site["value"], _log_prob(site)) for name, site in trace.items() if _is_latent(site)}

    parents = dependence(sites, values)
    return {name: {other for other in values if other != name and name in parents[other]} for name in values}


def _plain(latent: Trace, followers: Mapping[str, set], priors: Mapping[str, set]) -> dict[str, str]:
    """Why sites of the model cannot be redrawn for every term of the likelihood."""
    found = {}
    for name in priors:
        below = sorted(other for other, parents in priors.items() if other != name and name in parents)
        if not is_affine_normal(latent[name]["fn"]):
            kind = type(unwrapped(latent[name]["fn"])).__name__
            found[name] = f"its guide is a {kind}, not independent normals"
        elif followers[name]:
            found[name] = f"the guide of {min(followers[name])!r} depends on it"
        elif below:
            found[name] = f"the prior of {below[0]!r} depends on it"
    return found


def _model_terms(trace: Trace, latent: Trace, call: str) -> dict[Any, jax.Array]:
    """Terms by kind and site: likelihoods elementwise; E_q[log p - log q] from a draw, and by formula."""
    found: dict[Any, jax.Array] = {}
    for name, site in trace.items():
        if not _is_sample(site):
            continue
        if site["is_observed"]:
            found["likelihood", name] = _log_prob(site)
        elif name not in latent:
            instead = "Give it a site in the guide, or sum it out."
            raise argument_error(call, "model", f"the latent site {name!r}, which the guide lacks", instead)
        else:  # at the draw of the guide, even if the model is given another value
            found["sampled", name] = _log_prob(site, latent[name]["value"]).sum() - _log_prob(latent[name]).sum()
            exact = _divergence(latent[name], site)
            if exact is not None:
                found["exact", name] = -exact
    return found


def _divergence(guide: Site, model: Site) -> jax.Array | None:
    """KL(q || p) summed over a site, with its scale; ``None`` if there is no formula."""
    if isinstance(unwrapped(guide["fn"], masked=True), dist.Delta) or not _same(guide["scale"], model["scale"]):
        return None
    q, p = affine_normal(guide["fn"]), affine_normal(model["fn"])
    if q is not None and p is not None:
        ratio = jnp.square(q[1] / p[1])
        each = 0.5 * (ratio + jnp.square((q[0] - p[0]) / p[1]) - 1 - jnp.log(ratio))
        each = each.sum(tuple(range(each.ndim - model["fn"].event_dim, each.ndim)))
    else:
        try:
            each = kl_divergence(guide["fn"], model["fn"])
        except NotImplementedError:
            return None
    return jnp.sum(scale_and_mask(each, scale=model["scale"]))


def _same(a: Any, b: Any) -> bool:
    """Whether two scales are known to be equal."""
    if a is b or isinstance(a, jax.core.Tracer) or isinstance(b, jax.core.Tracer):
        return a is b
    a, b = (1.0 if scale is None else scale for scale in (a, b))
    return np.array_equal(np.asarray(a), np.asarray(b))
