"""Sampling modulo the symmetries: the sampler works in a gauge, and the orbit coordinates are drawn afterwards."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import lax, random
from numpyro.primitives import Messenger

from numpyro_bnn._keys import key_from
from numpyro_bnn._plates import full_trace, isolated
from numpyro_bnn.symmetry.base import Symmetry, as_symmetries
from numpyro_bnn.symmetry.finding import check
from numpyro_bnn.symmetry.model_info import PriorProgram, as_normal, model_info
from numpyro_bnn.symmetry.moves import Plan, move, plan_in


def quotient(model: Callable, symmetries: Sequence[Symmetry], *args: Any, **kwargs: Any) -> Callable:
    r"""Remove the symmetries from a model, so that the sampler need not move along them.

    Along an orbit the posterior is the prior; the posterior of the orbits is L(theta) M(theta), with M the prior
    integrated over the orbit. So the sampler only needs to find the orbit; the place on it is drawn afterwards,
    exactly, from the prior and independently for each draw:

    - sites that the likelihood ignores and that are independent a priori are not sampled: hyper-scales of weights
      before a normalization (:class:`JointScale`, with :math:`w \sim N(0, I)` in their place), biases before batch
      normalization (:class:`Shift`);
    - the other sites of the symmetries are sampled in standard form, ``<site>_gauge``, normal ones as N(0, 1); the
      coordinate on the orbit has its prior distribution while sampling, and is replaced by the one drawn afterwards
      (radii of :class:`Scale`, factors of :class:`Rescale`, signs, orders).

    The original sites become deterministic, so draws, ``Predictive``, guides and
    :func:`~numpyro_bnn.to_inference_data` show them as if they had been sampled. The random numbers of the exact
    draws come from the bits of the draw itself: the model stays a function of its latent sites, and equal draws give
    equal results.

    :param model: a NumPyro model. Non-centered priors are used as they are; centered Gaussian ones are standardized.
    :param symmetries: e.g. ``symmetry.find(model, x, y)``. They are verified first, as by :func:`check`.
    :param args: positional arguments of the model, with the data.
    :param kwargs: its keyword arguments.
    :return: a model with the signature of ``model``.
    :raises ValueError: for symmetries that the model does not have.

    >>> import jax, jax.numpy as jnp
    >>> from numpyro.infer import MCMC, NUTS
    >>> from numpyro_bnn import models, nn, priors, symmetry
    >>> x = jnp.linspace(-1, 1, 8)[:, None]
    >>> model = models.regression(nn.MLP([3, 1], "tanh", norm=nn.BatchNorm()), priors.Hierarchical())
    >>> free = symmetry.quotient(model, symmetry.find(model, x, x[:, 0]), x, x[:, 0])
    >>> mcmc = MCMC(NUTS(free), num_warmup=5, num_samples=5, progress_bar=False)
    >>> mcmc.run(jax.random.key(0), x, x[:, 0])
    >>> mcmc.get_samples()["net/Dense_0.kernel_scale"].shape
    (5,)
    """
    symmetries = as_symmetries("symmetry.quotient", symmetries)
    with jax.ensure_compile_time_eval():
        check(model, symmetries, args, kwargs)
        gauge = _gauge(model, symmetries, args, kwargs)

    @wraps(model)
    def on_quotient(*args: Any, **kwargs: Any) -> Any:
        run = _InGauge(gauge)
        with run:
            result = model(*args, **kwargs)
        if run.values.keys() >= gauge.touched:  # not while an outer handler hides sites
            _fill_in(model, gauge, run.values, args, kwargs)
        return result

    return on_quotient


class Gauge(NamedTuple):
    """Decided once: how to move, which sites are not sampled, and which have to be recomputed.

    :param plans: moves that fill in the orbits.
    :param removed: latent sites that are not sampled, with the values that they take while sampling.
    :param touched: latent sites that moves change.
    :param normal: touched sites that are standardized.
    :param variant: deterministic sites that are not constant on orbits.
    """

    plans: tuple[Plan, ...]
    removed: Mapping[str, np.ndarray]
    touched: frozenset[str]
    normal: frozenset[str]
    variant: frozenset[str]


def _gauge(model: Callable, symmetries: Sequence[Symmetry], args: tuple, kwargs: Mapping[str, Any]) -> Gauge:
    info = model_info(model, args, kwargs)
    values, prior = info.draws[0], info.prior
    plans = plan_in(info, symmetries)
    removed = {site: value for entry in plans for site, value in _removed(entry, values).items()}
    touched = frozenset(site for entry in plans for site in entry.symmetry.sites)
    fns = prior.distributions(values)
    normal = frozenset(site for site in touched if as_normal(fns[site]) is not None)

    @jax.jit
    def at_two_points_of_an_orbit(values: dict) -> list[dict[str, jax.Array]]:
        points = values, _moved(plans, random.key, values, prior)
        traces = [full_trace(model, point, args, kwargs) for point in points]
        return [{n: s["value"] for n, s in trace.items() if s["type"] == "deterministic"} for trace in traces]

    before, after = at_two_points_of_an_orbit(values)
    variant = frozenset(name for name in before if not np.allclose(before[name], after[name], 1e-3, 1e-3))
    return Gauge(plans, removed, touched, normal, variant)


def _removed(entry: Plan, values: Mapping) -> dict[str, np.ndarray]:
    """Sites that are drawn from their prior afterwards, whatever the sampler does."""
    if entry.method == "prior":
        return {site: np.zeros(jnp.shape(values[site])) for site in entry.symmetry.sites}
    if entry.method == "scale prior":
        site = entry.symmetry.scale[0].site  # type: ignore[attr-defined]
        return {site: np.ones(jnp.shape(values[site]))}
    return {}


def _moved(plans: Sequence[Plan], key_of: Callable, values: Mapping, prior: PriorProgram) -> dict:
    """Values after one move along each symmetry."""
    values = dict(values)
    for i, entry in enumerate(plans):
        values |= move(entry, key_of(i), values, prior, jnp.ones(()))[0]
    return values


class _InGauge(Messenger):
    """Run a model with the touched sites in the gauge, under other names, and record all its latent values."""

    def __init__(self, gauge: Gauge) -> None:
        self.gauge = gauge
        self.values: dict[str, jax.Array] = {}
        super().__init__(None)

    def process_message(self, msg: dict[str, Any]) -> None:
        name, gauge = msg["name"], self.gauge
        if msg["type"] == "deterministic" and name in gauge.variant:
            msg["stop"] = True  # its value here is that of the gauge
        if msg["type"] != "sample" or msg["is_observed"] or msg["value"] is not None:
            return
        if name in gauge.removed:
            self.values[name] = msg["value"] = jnp.asarray(gauge.removed[name], float)
            msg["stop"] = True
        elif name in gauge.touched:
            msg["_gauged"] = (name, msg["fn"])
            msg["name"] = f"{name}_gauge"
            if name in gauge.normal:
                unit = dist.Normal(0.0, 1.0).expand(msg["fn"].shape())
                msg["fn"] = unit.to_event(msg["fn"].event_dim)

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        # Outer handlers have seen the site of the gauge; the model gets the corresponding original value.
        if "_gauged" in msg:
            name, fn = msg.pop("_gauged")
            if name in self.gauge.normal:
                loc, scale = as_normal(fn)  # type: ignore[misc]
                msg["value"] = loc + scale * msg["value"]
            msg["name"], msg["fn"] = name, fn
        if msg["type"] == "sample" and not msg["is_observed"]:
            self.values[msg["name"]] = msg["value"]


def _fill_in(model: Callable, gauge: Gauge, values: Mapping, args: tuple, kwargs: Mapping[str, Any]) -> None:
    """Draw the orbit coordinates, and record the original sites."""
    values = {name: lax.stop_gradient(jnp.asarray(value)) for name, value in values.items()}
    rng_key = key_from(values)
    with isolated():
        prior = PriorProgram(model, values, args, kwargs)
        values = _moved(gauge.plans, partial(random.fold_in, rng_key), values, prior)
        traced = full_trace(model, values, args, kwargs)
    for name in sorted(gauge.touched):
        numpyro.deterministic(name, values[name])
    for name in sorted(gauge.variant):
        numpyro.deterministic(name, traced[name]["value"])
