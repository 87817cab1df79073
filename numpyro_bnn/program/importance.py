"""Importance weights of a guide: draws on all the data, with the log densities of model
and guide.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer.util import log_density

from numpyro_bnn import _arviz
from numpyro_bnn._checks import argument_error
from numpyro_bnn._distributions import (
    is_factor,
    is_latent,
    unmasked_elements,
    unwrapped,
)
from numpyro_bnn._options import Kind
from numpyro_bnn._types import Floats, Kwargs, Sites, Trees
from numpyro_bnn.program.compiled import run
from numpyro_bnn.program.plates import check_observations, full_plates, sites_of_type


class WeightedDraw(NamedTuple):
    """One draw of a guide."""

    model: Sites  # of the model at the draw, with full plates
    log_joint: Array  # log p(D, z), ()
    log_guide: Array  # log q(z), with the auxiliary variables of the guide, ()


def weighted_draw(
    model: Callable,
    guide: Callable,
    params: Mapping,
    args: tuple,
    kwargs: Mapping,
    rng_key: Array,
) -> WeightedDraw:
    """Draw z from the guide and evaluate both densities on the full data; ``params``
    are those of guide and model.
    """
    guide_key, model_key = jax.random.split(rng_key)
    with numpyro.validation_enabled(False):
        # it would compute what is known while this is traced, one by one
        seeded = handlers.seed(full_plates(guide), guide_key)
        log_guide, guide_trace = log_density(seeded, args, kwargs, params)
        values = {**params, **_latent_values(guide_trace)}
        seeded = handlers.seed(full_plates(model), model_key)
        log_joint, model_trace = log_density(seeded, args, kwargs, values)
    return WeightedDraw(model_trace, log_joint, log_guide)


def _latent_values(trace: Sites) -> Trees:
    return {name: site["value"] for name, site in trace.items() if is_latent(site)}


def log_jacobian(trace: Sites) -> Array:
    """log |dz / du| of the latent sites of a trace, with u their
    unconstrained values.
    """
    total = jnp.zeros(())
    for site in trace.values():
        if is_latent(site):
            transform, value = biject_to(site["fn"].support), site["value"]
            total += jnp.sum(
                transform.log_abs_det_jacobian(transform.inv(value), value)
            )
    return total


def weight_statistics(log_weights: Floats) -> dict[str, float]:
    """ELBO, importance-weighted bound, their standard errors, k-hat and effective
    draws.

    :param log_weights: (S,) of independent draws; ``-inf`` is a weight of 0.

    >>> round(
    ...     weight_statistics(np.log([1.0, 3.0]))["iw_bound"], 4
    ... )  # log of the mean weight, 2
    0.6931
    """
    size, largest = len(log_weights), log_weights.max()
    impossible = bool(np.isneginf(log_weights).any())
    elbo = -np.inf if impossible else float(log_weights.mean())
    elbo_se = np.nan if impossible else float(log_weights.std(ddof=1) / np.sqrt(size))
    if np.isneginf(largest):
        return {
            "elbo": elbo,
            "elbo_se": elbo_se,
            "iw_bound": -np.inf,
            "iw_se": np.nan,
            "iw_bias": np.nan,
            "pareto_k": np.nan,
            "ess": 0.0,
        }
    scaled = np.exp(log_weights - largest)
    error = float(scaled.std(ddof=1) / scaled.mean() / np.sqrt(size))
    return {
        "elbo": elbo,
        "elbo_se": elbo_se,
        "iw_bound": float(largest + np.log(scaled.mean())),
        "iw_se": error,
        "iw_bias": -0.5 * error**2,
        "pareto_k": float(_arviz.pareto_smoothed(log_weights)[1]),
        "ess": float(scaled.sum() ** 2 / (scaled**2).sum()),
    }


class WeightedSites(NamedTuple):
    """Number of observed values, over all sites, and whether the guide has a site that
    is not a point mass.
    """

    num_observations: int
    has_density: bool


def set_up(guide: Callable, args: tuple, kwargs: Kwargs) -> None:
    """Let a NumPyro autoguide that has never been called read its model, before
    anything is traced.
    """
    if getattr(guide, "prototype_trace", True) is None:
        with handlers.block(), handlers.seed(rng_seed=0):
            guide(*args, **kwargs)


def check(
    call: str,
    model: Callable,
    guide: Callable,
    params: Mapping,
    args: tuple,
    kwargs: Kwargs,
) -> WeightedSites:
    """Refuse guides, models or parameters of the wrong type, missing parameters, and
    latent sites without a guide.

    Only shapes and masks are computed.
    """
    for name, value in (("guide", guide), ("model", model)):
        instead = "Pass a NumPyro guide and, unless it is an autoguide, its `model=`."
        Kind(callable, instead).check(call, name, value)
    Kind(Mapping, "Pass the parameters of the fit, e.g. `svi.run(...).params`.").check(
        call, "params", params
    )
    set_up(guide, args, kwargs)
    traces: dict[str, Sites] = {}

    def count(key: Array, args: tuple, kwargs: Kwargs) -> Array:
        seeded = handlers.seed(full_plates(guide), key)
        traces["guide"] = handlers.trace(seeded).get_trace(*args, **kwargs)
        seeded = handlers.seed(full_plates(model), key)
        placed = handlers.substitute(seeded, data=_latent_values(traces["guide"]))
        traces["model"] = handlers.trace(placed).get_trace(*args, **kwargs)
        check_observations(traces["model"])
        sizes = []
        for site in sites_of_type(traces["model"], "sample").values():
            if site["is_observed"] and not is_factor(site["fn"]):
                sizes.append(jnp.sum(unmasked_elements(site["fn"])))
        return jnp.sum(jnp.array(sizes, int))

    with numpyro.validation_enabled(False):  # as above
        num_observations = run(count, jax.random.key(0), args, kwargs, runs_rarely=True)
    _check_params(call, traces, params)
    guided = sites_of_type(traces["guide"], "sample")
    left_out = [name for name in _latent_values(traces["model"]) if name not in guided]
    if left_out:
        instead = "Give the guide a sample statement for each latent site of the model."
        raise argument_error(
            call, "guide", f"a guide without the latent sites {left_out}", instead
        )
    has_density = False
    for site in guided.values():
        fn = unwrapped(site["fn"], masked=True)
        has_density |= is_latent(site) and not isinstance(fn, dist.Delta)
    return WeightedSites(int(num_observations), has_density)


def _check_params(call: str, traces: Mapping[str, Sites], params: Trees) -> None:
    """Refuse missing parameters: they would silently take their initial values."""
    required: set[str] = set()
    for trace in traces.values():
        required |= sites_of_type(trace, "param").keys()
    missing = sorted(required.difference(params))
    if missing:
        names = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
        instead = (
            "Pass the parameters of a fit of this guide and model, e.g. "
            "`svi.run(...).params`."
        )
        raise argument_error(call, "params", f"no value for {names}", instead)
