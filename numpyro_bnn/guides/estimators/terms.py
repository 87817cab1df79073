"""The terms of an evidence lower bound, and the program of the model that they come from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.distributions.kl import kl_divergence
from numpyro.distributions.util import scale_and_mask
from numpyro.util import check_model_guide_match

from numpyro_bnn._checks import argument_error
from numpyro_bnn._dependence import dependence, program_dependence
from numpyro_bnn._distributions import affine_normal, is_affine_normal, unwrapped

__all__ = ["Terms", "read_terms"]

Site = dict[str, Any]
Trace = dict[str, Site]


@dataclass(frozen=True)
class Terms:
    """What :func:`read_terms` finds.

    :param jaxpr: program from the values of the latent sites, in the order of ``values``, to terms.
    :param consts: its constants.
    :param needed: which of its outputs add up, with ``rest``, to the evidence lower bound.
    :param values: one draw of every latent site of the guide.
    :param sites: latent sites of the model, in the order of the guide.
    :param normals: loc and scale of the sites of which, as far as guide and priors go, each term of the likelihood
        may have its own draw.
    :param plain: why the other sites are drawn once.
    :param rest: terms of the guide alone.
    """

    jaxpr: Any
    consts: list[Any]
    needed: list[bool]
    values: dict[str, jax.Array]
    sites: list[str]
    normals: dict[str, tuple[jax.Array, jax.Array]]
    plain: dict[str, str]
    rest: jax.Array


@dataclass(frozen=True)
class _Programs:
    """Guide and model as functions of the values of latent sites, always under the same seeds."""

    rng_key: jax.Array
    params: Mapping[str, jax.Array]
    guide: Callable
    model: Callable
    args: tuple
    kwargs: Mapping[str, Any]
    call: str

    def run_guide(self, values: Mapping[str, Any]) -> Trace:
        seeded = handlers.seed(self.guide, jax.random.split(self.rng_key)[0])
        return self._trace(handlers.substitute(seeded, data={**self.params, **values}))

    def run_model(self, drawn: Trace, values: Mapping[str, Any]) -> Trace:
        at = {name: {**site, "value": values.get(name, site["value"])} for name, site in drawn.items()}
        seeded = handlers.seed(self.model, jax.random.split(self.rng_key)[1])
        return self._trace(handlers.substitute(handlers.replay(seeded, at), data=dict(self.params)))

    def _trace(self, program: Callable) -> Trace:
        found = handlers.trace(program).get_trace(*self.args, **self.kwargs)
        for name, site in found.items():
            if site["type"] == "mutable":
                raise argument_error(
                    self.call,
                    "model",
                    f"a mutable site {name!r}",
                    "Use `Trace_ELBO`, or a layer without running state.",
                )
        return found


def read_terms(
    rng_key: jax.Array,
    params: Mapping[str, jax.Array],
    model: Callable,
    guide: Callable,
    args: tuple,
    kwargs: Mapping[str, Any],
    call: str,
) -> Terms:
    """Run the guide once, and read the program of the model."""
    programs = _Programs(rng_key, params, guide, model, args, kwargs, call)
    drawn = programs.run_guide({})
    latent = {name: site for name, site in drawn.items() if _is_latent(site)}
    values = {name: latent[name]["value"] for name in sorted(latent)}  # the order in which JAX flattens them
    followers = _followers(programs, values)

    def terms(values: Mapping[str, Any]) -> dict[Any, jax.Array]:
        trace = programs.run_model(drawn, values)
        check_model_guide_match(trace, drawn)
        return _model_terms(trace, latent, call)

    closed, shapes = jax.make_jaxpr(terms, return_shape=True)(values)
    parents = program_dependence(closed, shapes, values)
    keys: list[Any] = [path[0].key for path, _ in jax.tree_util.tree_flatten_with_path(shapes)[0]]
    exact = {name for kind, name in keys if kind == "exact" and not parents["exact", name] & followers[name]}
    needed = [kind == "likelihood" or (kind == "exact") == (name in exact) for kind, name in keys]
    priors = {name: parents["sampled", name] for name in latent if ("sampled", name) in parents}
    plain = _plain(latent, followers, priors)
    moments = {name: affine_normal(latent[name]["fn"]) for name in priors if name not in plain}
    normals = {name: found for name, found in moments.items() if found is not None}
    alone = [_log_prob(site).sum() for name, site in drawn.items() if _is_sample(site) and name not in priors]
    rest = sum(alone, start=jnp.zeros(()))
    return Terms(closed.jaxpr, closed.consts, needed, values, list(priors), normals, plain, -rest)


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


def _followers(programs: _Programs, values: Mapping[str, Any]) -> dict[str, set[str]]:
    """For each latent site of the guide the others whose draw or density there depends on its value."""

    def sites(values: Mapping[str, Any]) -> dict[str, Any]:
        trace = programs.run_guide(values)
        return {name: (site["value"], _log_prob(site)) for name, site in trace.items() if _is_latent(site)}

    parents = dependence(sites, values)
    return {name: {other for other in values if other != name and name in parents[other]} for name in values}


def _plain(latent: Trace, followers: Mapping[str, set], priors: Mapping[str, set]) -> dict[str, str]:
    """Why sites of the model cannot be drawn anew for every term of the likelihood."""
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
    """Terms by kind and site: likelihoods elementwise; E_q[log p - log q] from a draw, and by formula.

    A prior is taken at the draw of the guide, whatever value the model is given: it may be another one.
    """
    found: dict[Any, jax.Array] = {}
    for name, site in trace.items():
        if not _is_sample(site):
            continue
        if site["is_observed"]:
            found["likelihood", name] = _log_prob(site)
        elif name not in latent:
            instead = "Give it a site in the guide, or sum it out."
            raise argument_error(call, "model", f"the latent site {name!r}, which the guide lacks", instead)
        else:
            value = latent[name]["value"]
            found["sampled", name] = _log_prob(site, value).sum() - _log_prob(latent[name]).sum()
            exact = _divergence(latent[name], site)
            if exact is not None:
                found["exact", name] = -exact
    return found


def _divergence(guide: Site, model: Site) -> jax.Array | None:
    """KL(q || p) summed over a site, with its scale; ``None`` where there is no formula."""
    if not _same(guide["scale"], model["scale"]) or isinstance(
        unwrapped(guide["fn"], masked=True), dist.Delta
    ):
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
    if a is b:
        return True
    if isinstance(a, jax.core.Tracer) or isinstance(b, jax.core.Tracer):
        return False
    a, b = (1.0 if scale is None else scale for scale in (a, b))
    return np.array_equal(np.asarray(a), np.asarray(b))
