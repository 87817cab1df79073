"""The observation of a model for one data point, and how it follows from the weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_bnn import moments
from numpyro_bnn._distributions import unwrapped
from numpyro_bnn.guides.adf.rows import Arguments, run_model
from numpyro_bnn.guides.adf.sites import Sites, refuse
from numpyro_bnn.guides.adf.split import Split, split
from numpyro_bnn.moments import Gaussian

__all__ = ["Observation", "check_rows", "observe"]

Context = dict[str, Any]


@dataclass(frozen=True)
class Observation:
    """One data point's observation: Gaussian quantities of the network, and a distribution given these.

    :param kind: "normal", "categorical" or "other".
    :param name: of the site.
    :param cut: the program of the distribution's parameters.
    :param build: from these parameters to the distribution, elementwise.
    :param shape: of one observation.
    """

    kind: str
    name: str
    cut: Split
    build: Callable[[Mapping[str, Any]], dist.Distribution]
    shape: tuple[int, ...]

    def quantities(self, weights: Mapping[str, Gaussian], context: Context) -> dict[str, Gaussian]:
        """Moments of the Gaussian quantities from those of the weights."""
        found = moments.propagate(lambda w: self.cut.head(w, context))(dict(weights))
        return {name: _gaussian(value) for name, value in found.items()}

    def parameters(self, quantities: Mapping[str, Any], context: Context) -> dict[str, Any]:
        """Parameters of the distribution, and ``value``, where the quantities are known."""
        return self.cut.tail(quantities, context)


def _gaussian(value: Any) -> Gaussian:
    return value if isinstance(value, Gaussian) else Gaussian(value, jnp.zeros_like(value))


def observe(
    model: Callable, arguments: Arguments, sites: Sites, context: Context, with_value: bool
) -> Observation:
    """Read the observation of one data point from the model.

    :param context: example of ``{"rows", "arrays", "others"}``: one row of the data, the other arrays, and values of
        the sites that are no weights.
    :param with_value: whether the observed value is among the arguments.
    :raises ValueError: for a likelihood that assumed density filtering cannot take.
    """
    weights = {name: weight.loc for name, weight in sites.weights.items()}
    found: dict[str, Any] = {}

    def program(weights: Any, context: Context) -> dict[str, Any]:
        args, kwargs = arguments.row(context["rows"], context["arrays"])
        site = run_model(model, {**weights, **context["others"]}, args, kwargs)[sites.observed]
        base = unwrapped(site["fn"], masked=True)
        shape = site["fn"].shape()
        found["shape"] = shape
        if base.event_dim:
            why = f"a {type(base).__name__}, whose elements are not independent given the network"
            raise refuse(sites.observed, why, "Use independent observations, or MCMC.")
        found["kind"], parameters, found["build"] = _parameters(base, shape)
        found["positive"] = _bounded(base, parameters)
        return parameters | ({"value": site["value"]} if with_value else {})

    cut = split(program, weights, context, keep=("loc", "logits"))
    observation = Observation(found["kind"], sites.observed, cut, found["build"], found["shape"])
    _check(observation, found["positive"])
    return observation


def _parameters(base: dist.Distribution, shape: tuple) -> tuple[str, dict[str, Any], Callable]:
    """Kind, parameters by name, and how the distribution is made of them."""
    if type(base) is dist.Normal:
        given = {"loc": jnp.broadcast_to(base.loc, shape), "scale": jnp.broadcast_to(base.scale, shape)}
        return "normal", given, lambda p: dist.Normal(p["loc"], p["scale"])
    if isinstance(base, dist.CategoricalLogits):
        return "categorical", {"logits": base.logits}, lambda p: dist.Categorical(logits=p["logits"])
    if isinstance(base, dist.BernoulliLogits):
        return "other", {"logits": base.logits}, lambda p: dist.Bernoulli(logits=p["logits"])
    leaves, structure = jax.tree.flatten(base)
    names = [_leaf_name(base, leaf, k) for k, leaf in enumerate(leaves)]
    return (
        "other",
        dict(zip(names, leaves, strict=True)),
        lambda p: jax.tree.unflatten(structure, [p[n] for n in names]),
    )


def _leaf_name(base: dist.Distribution, leaf: Any, index: int) -> str:
    """Name of a parameter; two leaves of the same name (in a distribution inside) are told apart by number."""
    named = [name for name in base.arg_constraints if base.__dict__.get(name) is leaf]
    return f"{named[0]} ({index})" if named else f"parameter {index}"


def _bounded(base: dist.Distribution, parameters: Mapping[str, Any]) -> set[str]:
    """Parameters that do not range over all real numbers."""
    free = {name for name, kind in base.arg_constraints.items() if kind is constraints.real}
    free |= {"logits"}
    return {name for name in parameters if name.split(" (")[0] not in free}


def _check(observation: Observation, bounded: set[str]) -> None:
    cut, site = observation.cut, observation.name
    for name in cut.random & bounded:
        if name in cut.cuts and name not in cut.nonlinear:
            raise refuse(
                site,
                f"whose {name.split(' (')[0]} is no elementwise function of a linear predictor",
                "Write e.g. `Poisson(jnp.exp(f))`, `Categorical(logits=f)` with f straight from the network.",
            )
    closed = {"loc"} if observation.kind == "normal" else set()
    if observation.kind == "categorical":
        return
    if len(set(cut.cuts) - closed) > 2:
        raise refuse(
            site,
            f"with {len(cut.cuts)} parameters that depend on the weights",
            "Two at most can be integrated.",
        )


def check_rows(model: Callable, arguments: Arguments, sites: Sites, others: Mapping[str, Any]) -> None:
    """Refuse a model in which one data point's likelihood depends on other rows (batch statistics, sequences)."""
    random = np.random.default_rng(0)
    weights = {
        n: jnp.asarray(w.loc + w.scale * random.normal(size=w.loc.shape)) for n, w in sites.weights.items()
    }
    arrays = arguments.part("array")

    def parameters(rows: Any) -> list[jax.Array]:
        args, kwargs = arguments.call(rows, arrays)
        site = run_model(model, {**weights, **others}, args, kwargs)[sites.observed]
        return jax.tree.leaves(unwrapped(site["fn"], masked=True))

    def both(rows: Any) -> list[tuple[jax.Array, jax.Array]]:
        alone = [parameters({name: leaf[k : k + 1] for name, leaf in rows.items()}) for k in range(2)]
        found = []
        for whole, first, second in zip(parameters(rows), *alone, strict=True):
            if jnp.shape(first)[:1] == (1,):
                stacked = jnp.concatenate([first, second])
                found.append((jnp.broadcast_to(whole, stacked.shape), stacked))
        return found

    rows = {name: leaf[:2] for name, leaf in arguments.part("row").items()}
    if arguments.num_rows < 2 or any(isinstance(leaf, jax.core.Tracer) for leaf in rows.values()):
        return
    for together, alone in jax.jit(both)(rows):
        if not np.allclose(together, alone, rtol=1e-6, atol=1e-9, equal_nan=True):
            raise refuse(
                sites.observed,
                "whose rows influence each other",
                "Data points are learned one at a time: leave out batch statistics and the like.",
            )
