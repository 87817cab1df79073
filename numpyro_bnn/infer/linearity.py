"""Read from the program of a model that sites enter linearly under normal noise; refuse them where they do not."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import random
from numpyro.infer.gibbs import latent_sample_sites

from numpyro_bnn._checks import argument_error, unknown_name
from numpyro_bnn._dependence import dependence
from numpyro_bnn._distributions import affine_normal, is_affine_normal, unwrapped
from numpyro_bnn._plates import full_trace
from numpyro_bnn.infer.linear import Linear, Structure, log_density, weights

__all__ = ["check_names", "read"]

# Deviations from linearity that are put down to rounding, relative to the sum of the absolute terms; and the sizes of
# the innovations at which they are measured.
TOLERANCE, SIZES = 1e-3, (1.0, 30.0, 1000.0)


def check_names(call: str, argument: str, names: Any, least: int = 0) -> tuple[str, ...]:
    """Refuse what is no sequence of different names of sites."""
    good = not isinstance(names, str) and isinstance(names, Iterable)
    found = tuple(names) if good else ()
    strings = good and all(isinstance(name, str) for name in found)
    if not strings or len(set(found)) < len(found) or len(found) < least:
        some = "at least one different name" if least else "different names"
        raise argument_error(
            call, argument, names, f"Pass a sequence of {some} of sites, e.g. `['beta']`.", TypeError
        )
    return found


def read(
    call: str,
    model: Callable,
    sites: tuple[str, ...],
    collapsed: tuple[str, ...],
    held: set[str],
    args: tuple,
    kwargs: Mapping[str, Any],
) -> Structure:
    """Where the linear sites and the collapsed ones stand in a model.

    :param call: the name that errors give.
    :param model: a NumPyro model whose ``kwargs`` hold no values of sites.
    :param sites: names of the linear ones.
    :param collapsed: names of the collapsed ones.
    :param held: names of sites that others draw.
    :raises ValueError: where the model is not normal or not linear, with the site at fault.

    >>> import numpyro
    >>> def model():
    ...     sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    ...     w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    ...     numpyro.sample("y", dist.Normal(2.0 * w, sigma), obs=1.0)
    >>> found = read("read", model, ("w",), ("sigma",), set(), (), {})
    >>> found.data, found.others, found.fixed, found.common
    (('y',), ('sigma',), True, ((), ('sigma',)))
    """
    traced = full_trace(model, {}, args, kwargs)
    _check_sites(call, traced, sites, collapsed, held)
    latent = latent_sample_sites(traced)
    values = {name: jnp.asarray(traced[name]["value"]) for name in latent}
    shapes = {name: jnp.shape(values[name]) for name in latent if name in sites}
    hypers = {name: values[name] for name in collapsed}
    others = {name: value for name, value in values.items() if name not in (*sites, *collapsed)}
    linear = Linear(model, Structure(shapes, collapsed, (), (), True), others, args, kwargs)
    used = dependence(_read_parts(linear), {INNOVATIONS: linear.zeros(), **hypers})
    data = _data(call, traced, used, sites, collapsed)
    rest = tuple(
        name
        for kind, name in used
        if kind == "law"
        and name not in (*sites, *data)
        and (name in collapsed or used[kind, name] & set(collapsed))
    )
    linear.structure = linear.structure._replace(data=data, others=rest)
    fixed = _check_linear(call, linear, hypers)
    common = _common(linear, hypers, used) if fixed else None
    return linear.structure._replace(fixed=fixed, common=common)


INNOVATIONS = " innovations"  # no site is called so


def _check_sites(
    call: str, traced: Mapping[str, Any], sites: tuple[str, ...], collapsed: tuple[str, ...], held: set[str]
) -> None:
    refused = partial(argument_error, call)
    latent = latent_sample_sites(traced)
    for argument, names in (("sites", sites), ("collapsed", collapsed)):
        for name in names:
            if name not in latent:
                raise unknown_name(call, argument, name, latent)
            if name in held:
                raise refused(
                    argument, repr(name), "Another block of `Gibbs` draws it: name it in one of them."
                )
    for name in sites:
        if not is_affine_normal(traced[name]["fn"]):
            law = type(unwrapped(traced[name]["fn"])).__name__
            raise refused("sites", f"{name!r}, a site with a {law} prior", "Name sites with normal priors.")
    for name in collapsed:
        fn, shape = traced[name]["fn"], jnp.shape(traced[name]["value"])
        if shape != () or not _is_positive(fn.support):
            raise refused(
                "collapsed",
                f"{name!r} of shape {shape} with support {fn.support}",
                "Name scalar sites with a positive support; give others to another block of `Gibbs`.",
            )
    free = [name for name in latent if name not in {*sites, *collapsed, *held}]
    if free:
        raise refused(
            "sites",
            f"no {free[0]!r}, which nothing draws",
            "Make it a block of `numpyro.infer.Gibbs` whose other blocks draw the other sites.",
        )


def _is_positive(support: Any) -> bool:
    if support.is_discrete or support.event_dim:
        return False
    if support is dist.constraints.positive or support is dist.constraints.nonnegative:
        return True
    lower = getattr(support, "lower_bound", None)
    return lower is not None and (isinstance(lower, jax.core.Tracer) or bool(np.all(np.asarray(lower) >= 0)))


def _read_parts(linear: Linear) -> Callable:
    """What is asked of every sample site, as a function of innovations and collapsed sites."""

    def parts(at: Mapping[str, jax.Array]) -> dict[tuple[str, str], Any]:
        hypers = {name: value for name, value in at.items() if name != INNOVATIONS}
        found: dict[tuple[str, str], Any] = {}
        for name, site in linear.trace(hypers, at[INNOVATIONS]).items():
            if site["type"] == "sample":
                found["law", name] = log_density(site)
                if is_affine_normal(site["fn"], masked=True):
                    loc, found["sd", name] = affine_normal(site["fn"], masked=True) or (0.0, 1.0)
                    found["mean", name] = loc
                    found["weight", name], found["value", name] = weights(site), site["value"]
        return found

    return parts


def _data(
    call: str,
    traced: Mapping[str, Any],
    used: Mapping[tuple[str, str], set],
    sites: tuple[str, ...],
    collapsed: tuple[str, ...],
) -> tuple[str, ...]:
    """Sites other than the linear ones whose density depends on those."""
    refused = partial(argument_error, call)
    what = {
        "sd": "the scale",
        "weight": "the scale or mask of the log density",
        "value": "the observed value",
    }
    below = tuple(n for kind, n in used if kind == "law" and n not in sites and INNOVATIONS in used[kind, n])
    for name in (*sites, *below):
        fn = traced[name]["fn"]
        if name in collapsed or not is_affine_normal(fn, masked=True):
            law = type(unwrapped(fn, masked=True)).__name__
            raise refused(
                "sites",
                f"{sites}, on which {name!r} ({law}) depends",
                "Only normal sites may depend on them: sample these sites with another kernel, e.g. `NUTS(model)`.",
            )
        for kind, meaning in what.items():
            if INNOVATIONS in used[kind, name] and (kind != "value" or name in below):
                raise refused(
                    "sites",
                    f"{sites}, on which {meaning} of {name!r} depends",
                    "Only means may depend on them: sample these sites with another kernel, e.g. `NUTS(model)`.",
                )
    if not below:
        raise refused(
            "sites", sites, "No observed normal site depends on them: is the data passed to the model?"
        )
    return below


def _check_linear(call: str, linear: Linear, hypers: dict[str, jax.Array]) -> bool:
    """Refuse means that are not linear; return whether the map is the same for all values of collapsed sites."""

    def slopes(at: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        others = {name: value for name, value in at.items() if name != INNOVATIONS}
        mean = partial(linear.mean, others)
        return {"map": jax.jvp(mean, (at[INNOVATIONS],), (jnp.ones_like(at[INNOVATIONS]),))[1]}

    used = dependence(slopes, {INNOVATIONS: linear.zeros(), **hypers})["map"]
    # Where the program of the derivative has no use for the point, the mean is linear.
    if INNOVATIONS in used:
        _measure(call, linear, hypers)
    return used.isdisjoint(hypers)


def _measure(call: str, linear: Linear, hypers: dict[str, jax.Array]) -> None:
    """Compare means with their linearization at random values."""
    refused = partial(argument_error, call)
    jacobian, start = linear.jacobian(hypers), linear.mean(hypers, linear.zeros())
    for i, size in enumerate(SIZES):
        u = size * random.normal(random.key(i), linear.zeros().shape)
        error = linear.mean(hypers, u) - (start + jacobian @ u)
        if isinstance(error, jax.core.Tracer):
            raise refused(
                "model_args",
                "arrays that are traced by a transformation",
                "Linearity is measured: call `init` once outside of `jit` or `vmap`.",
            )
        close = jnp.abs(error) <= TOLERANCE * (jnp.abs(start) + jnp.abs(jacobian) @ jnp.abs(u))
        if not bool(jnp.all(close)):
            worst = float(jnp.max(jnp.abs(error)))
            raise refused(
                "sites",
                f"{tuple(linear.structure.shapes)}, in which the mean of {linear.structure.data} is not linear"
                f" (off by {worst:.2g} at random values)",
                "Name sites that enter linearly, such as the weights of an output layer.",
            )


def _common(
    linear: Linear, hypers: dict[str, jax.Array], used: Mapping[tuple[str, str], set]
) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """What all prior sds, and all noise, are proportional to; ``None`` where collapsed sites do anything else."""
    structure, names = linear.structure, set(hypers)
    touched = [("mean", n) for n in (*structure.shapes, *structure.data)]
    touched += [("weight", n) for n in (*structure.shapes, *structure.data)]
    touched += [("value", n) for n in structure.data]
    if any(used[key] & names for key in touched):
        return None
    found = []
    for sites in (tuple(structure.shapes), structure.data):
        scaling = tuple(name for name in hypers if any(name in used["sd", site] for site in sites))
        if not all(_proportional(linear, hypers, sites, name) for name in scaling):
            return None
        found.append(scaling)
    return found[0], found[1]


def _proportional(linear: Linear, hypers: dict[str, jax.Array], sites: tuple[str, ...], name: str) -> bool:
    """Whether all sds of some sites are proportional to a collapsed site: linear, and 0 where it is."""

    def sds(at: Mapping[str, jax.Array]) -> jax.Array:
        traced = linear.trace({**hypers, **at}, linear.zeros())
        scales = [affine_normal(traced[site]["fn"], masked=True) or (0.0, 0.0) for site in sites]
        return jnp.concatenate([jnp.ravel(scale) for _, scale in scales])

    def slope(at: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        return {"slope": jax.jvp(sds, (at,), ({name: jnp.ones_like(at[name])},))[1]}

    # The program of a derivative that has no use for the point is that of a linear function.
    if name in dependence(slope, {name: hypers[name]})["slope"]:
        return False
    # NumPyro refuses an sd of 0, but not within a compiled program.
    at_zero = jax.jit(sds)({name: jnp.zeros_like(hypers[name])})
    return not isinstance(at_zero, jax.core.Tracer) and bool(jnp.all(at_zero == 0))
