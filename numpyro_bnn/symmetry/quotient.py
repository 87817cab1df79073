"""Sampling modulo the symmetries: the sampler works in a gauge, and the orbit
coordinates are drawn afterwards.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import lax, random
from numpyro import handlers
from numpyro.primitives import Messenger

from numpyro_bnn._distributions import is_affine_normal, is_latent
from numpyro_bnn._keys import key_from
from numpyro_bnn.program.arguments import as_arrays
from numpyro_bnn.program.plates import PARAMETERS, isolated
from numpyro_bnn.program.reading import Reading
from numpyro_bnn.symmetry.base import Symmetry, as_symmetries, sites_of
from numpyro_bnn.symmetry.finding import check
from numpyro_bnn.symmetry.model_info import PriorProgram, as_normal, model_info
from numpyro_bnn.symmetry.moves import Plan, move, plan


def quotient(
    model: Callable, symmetries: Sequence[Symmetry], *args: Any, **kwargs: Any
) -> Callable:
    r"""Remove the symmetries from a model, so that the sampler need not move along
    them.

    Along an orbit the posterior is the prior; the posterior of the orbits is L(theta)
    M(theta), with M the prior integrated over the orbit. So the sampler only needs to
    find the orbit; the place on it is drawn afterwards, exactly, from the prior and
    independently for each draw:

    - sites that the likelihood ignores and that are independent a priori are not
      sampled: hyper-scales of weights before a normalization (:class:`JointScale`, with
      :math:`w \sim N(0, I)` in their place), biases before batch normalization
      (:class:`Shift`);
    - the other sites of the symmetries are sampled in standard form, ``<site>_gauge``,
      normal ones as N(0, 1); the coordinate on the orbit has its prior distribution
      while sampling, and is replaced by the one drawn afterwards (radii of
      :class:`Scale`, factors of :class:`Rescale`, signs, orders).

    The original sites become deterministic, so draws, ``Predictive``, guides and
    :func:`~numpyro_bnn.to_inference_data` show them as if they had been sampled. The
    random numbers of the exact draws come from the bits of the draw itself: the model
    stays a function of its latent sites, and equal draws give equal results.

    :param model: a NumPyro model. Non-centered priors are used as they are; centered
        Gaussian ones are standardized.
    :param symmetries: e.g. ``symmetry.find(model, x, y)``. They are verified first, as
        by :func:`check`.
    :param args: positional arguments of the model, with the data.
    :param kwargs: its keyword arguments.
    :return: a model with the signature of ``model``.
    :raises ValueError: for symmetries that the model does not have.

    >>> import jax, jax.numpy as jnp
    >>> from numpyro.infer import MCMC, NUTS
    >>> from numpyro_bnn import models, nn, priors, symmetry
    >>> x = jnp.linspace(-1, 1, 8)[:, None]
    >>> model = models.regression(
    ...     nn.MLP([3, 1], "tanh", norm=nn.BatchNorm()), priors.Hierarchical()
    ... )
    >>> free = symmetry.quotient(model, symmetry.find(model, x, x[:, 0]), x, x[:, 0])
    >>> mcmc = MCMC(NUTS(free), num_warmup=5, num_samples=5, progress_bar=False)
    >>> mcmc.run(jax.random.key(0), x, x[:, 0])
    >>> mcmc.get_samples()["net/Dense_0.kernel_scale"].shape
    (5,)
    """
    symmetries = as_symmetries("symmetry.quotient", symmetries)
    args, kwargs = as_arrays(args, kwargs)
    with jax.core.eval_context():
        check(model, symmetries, args, kwargs)
        gauge = _gauge(model, symmetries, args, kwargs)

    @wraps(model)
    def on_quotient(*args: Any, **kwargs: Any) -> Any:
        run = _InGauge(gauge)
        with run:
            result = model(*args, **kwargs)
        if run.values.keys() >= gauge.touched:  # not while an outer handler hides sites
            _fill_in(handlers.substitute(model, data=run.parameters), run, args, kwargs)
        return result

    return on_quotient


class Gauge(NamedTuple):
    """Decided once: how to move, which sites are not sampled, and which need not be
    recomputed.

    :param plans: moves that fill in the orbits.
    :param removed: latent sites that are not sampled, with the values that they take
        while sampling.
    :param touched: latent sites that moves change.
    :param normal: touched sites that are standardized.
    :param constant: deterministic sites that are not computed from touched ones.
    """

    plans: tuple[Plan, ...]
    removed: Mapping[str, np.ndarray]
    touched: frozenset[str]
    normal: frozenset[str]
    constant: frozenset[str]


def _gauge(
    model: Callable,
    symmetries: Sequence[Symmetry],
    args: tuple,
    kwargs: Mapping[str, Any],
) -> Gauge:
    reading = Reading(model, args, kwargs)
    info = model_info(reading)
    values = info.draws[0]
    sites = reading.sites
    # Sites that are not sampled are drawn first: the other moves read their densities.
    plans = tuple(
        sorted(plan(info, symmetries), key=lambda entry: not _removed(entry, values))
    )
    removed: dict[str, np.ndarray] = {}
    for entry in plans:
        removed |= _removed(entry, values)
    touched = frozenset(sites_of(entry.symmetry for entry in plans))
    normal = frozenset(site for site in touched if is_affine_normal(sites[site]["fn"]))
    computed = [name for name, site in sites.items() if site["type"] == "deterministic"]
    used = reading.depends(
        lambda sites: {name: sites[name]["value"] for name in computed}
    )
    constant = frozenset(name for name, sites in used.items() if not sites & touched)
    return Gauge(plans, removed, touched, normal, constant)


def _removed(entry: Plan, values: Mapping) -> dict[str, np.ndarray]:
    """Sites that are drawn from their prior afterwards, whatever the sampler does."""
    if entry.method == "prior":
        return {
            site: np.zeros(jnp.shape(values[site])) for site in entry.symmetry.sites
        }
    if entry.method == "scale prior":
        site = entry.symmetry.scale[0].site  # type: ignore[attr-defined]
        return {site: np.ones(jnp.shape(values[site]))}
    return {}


class _InGauge(Messenger):
    """Run a model with the touched sites in the gauge, under other names, and record
    the run.

    :ivar values: values of the latent sites; ``plates``: indices of the plates;
        ``parameters``: their values.
    :ivar keys: keys of the model's own randomness, as of dropout, in order.
    :ivar hidden: deterministic sites whose value is that of the gauge.
    """

    def __init__(self, gauge: Gauge) -> None:
        self.gauge = gauge
        self.values: dict[str, jax.Array] = {}
        self.plates: dict[str, jax.Array] = {}
        self.parameters: dict[str, Any] = {}
        self.keys: list[jax.Array | None] = []
        self.hidden: list[str] = []
        super().__init__(None)

    def process_message(self, msg: dict[str, Any]) -> None:
        name = msg.get("name", "")
        gauge = self.gauge
        if msg["type"] == "deterministic" and name not in gauge.constant:
            msg["stop"] = True
            self.hidden.append(name)
        if not is_latent(msg) or msg["value"] is not None:
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
        # Outer handlers have seen the site of the gauge; the model gets the
        # corresponding original value.
        if "_gauged" in msg:
            name, fn = msg.pop("_gauged")
            if name in self.gauge.normal:
                loc, scale = as_normal(fn)  # type: ignore[misc]
                msg["value"] = loc + scale * msg["value"]
            msg["name"] = name
            msg["fn"] = fn
        if is_latent(msg):
            self.values[msg["name"]] = msg["value"]
        elif msg["type"] in PARAMETERS:
            self.parameters[msg["name"]] = msg["value"]
        elif msg["type"] == "plate":
            self.plates[msg["name"]] = msg["value"]
        elif msg["type"] == "prng_key":
            self.keys.append(msg["value"])


class _SameKeys(Messenger):
    """Run a model with the keys of another run."""

    def __init__(self, model: Callable, keys: Sequence[jax.Array | None]) -> None:
        self.keys = iter(keys)
        super().__init__(model)

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "prng_key":
            msg["value"] = next(self.keys)


def _fill_in(
    model: Callable, run: _InGauge, args: tuple, kwargs: Mapping[str, Any]
) -> None:
    """Draw the orbit coordinates, and record the original sites."""
    values = lax.stop_gradient(jax.tree.map(jnp.asarray, run.values))
    rng_key = key_from(values)
    with isolated():
        prior = PriorProgram(Reading(model, args, kwargs))
        for i, entry in enumerate(run.gauge.plans):
            values |= move(
                entry, random.fold_in(rng_key, i), values, prior, jnp.ones(())
            )[0]
        rerun = handlers.substitute(
            _SameKeys(model, run.keys), {**run.plates, **values}
        )
        traced = handlers.trace(rerun).get_trace(*args, **kwargs)
    for name in sorted(run.gauge.touched):
        numpyro.deterministic(name, values[name])
    for name in run.hidden:
        numpyro.deterministic(name, traced[name]["value"])
