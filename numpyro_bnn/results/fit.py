"""What an inference result gives to be exported: draws, statistics, the model and its arguments."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from numpyro import handlers
from numpyro.infer import MCMC

from numpyro_bnn._checks import argument_error
from numpyro_bnn._importance import check, log_jacobian, set_up, weight_statistics, weighted_draw
from numpyro_bnn._plates import full_plates
from numpyro_bnn.results.arguments import Arguments, bind
from numpyro_bnn.results.replay import map_draws

__all__ = ["Fit", "from_guide", "from_mcmc", "key_text"]

# Names ArviZ gives to NumPyro's fields.
SAMPLE_STATS = {
    "potential_energy": "lp",
    "adapt_state.step_size": "step_size",
    "num_steps": "n_steps",
    "accept_prob": "acceptance_rate",
}


@dataclass(frozen=True)
class Fit:
    """One inference result.

    :param model: the NumPyro model.
    :param arguments: of the run.
    :param posterior: constrained draws (C, S, ...) by site.
    :param sample_stats: (C, S, ...) by ArviZ's names.
    :param attrs: algorithm and settings.
    :param stat_coords: statistic -> name and labels of its last axis.
    """

    model: Callable
    arguments: Arguments
    posterior: Mapping[str, np.ndarray]
    sample_stats: Mapping[str, np.ndarray]
    attrs: Mapping[str, Any]
    stat_coords: Mapping[str, tuple[str, Sequence[str]]] = field(default_factory=dict)


def from_mcmc(mcmc: MCMC, members: bool = False) -> Fit:
    """Read a run :class:`~numpyro.infer.mcmc.MCMC`.

    :param members: read the ends of its warm start in the place of draws.
    :raises ValueError: if it has not been run, or has no model (a bare potential function).
    """
    if mcmc.last_state is None:
        raise argument_error(
            "to_inference_data", "result", "an MCMC that has not run", "Call `mcmc.run(...)` first."
        )
    if mcmc.sampler.model is None:
        raise argument_error(
            "to_inference_data",
            "result",
            "an MCMC of a potential function",
            "Pass a kernel made from a model, or use `arviz.from_dict`.",
        )
    if members:
        samples, fields = _members(mcmc), {}
    else:
        samples = jax.device_get(mcmc.get_samples(group_by_chain=True))
        fields = jax.device_get(mcmc.get_extra_fields(group_by_chain=True))
    settings = {
        "algorithm": type(mcmc.sampler).__name__,
        "num_warmup": mcmc.num_warmup,
        "num_samples": mcmc.num_samples,
        "num_chains": mcmc.num_chains,
        "thinning": mcmc.thinning,
        "chain_method": getattr(mcmc.chain_method, "__name__", mcmc.chain_method),
        "last_rng_key": key_text(mcmc.last_state.rng_key),
    }
    # A model that hides its data from the sampler names the one that shows them.
    model = getattr(mcmc.sampler.model, "predictive_model", mcmc.sampler.model)
    settings |= {"members_of_warm_start": True, "num_samples": 1} if members else _described(mcmc)
    return Fit(
        model=model,
        arguments=bind(model, mcmc._args, mcmc._kwargs),
        posterior=samples,
        sample_stats=_sample_stats(fields),
        attrs=settings,
        stat_coords=getattr(mcmc.sampler, "stat_coords", {}),
    )


def _members(mcmc: MCMC) -> dict[str, np.ndarray]:
    """Values (C, 1, ...) by site where the chains ended their warm start."""
    if not hasattr(mcmc.sampler, "members"):
        raise argument_error(
            "to_inference_data",
            "members",
            f"{type(mcmc.sampler).__name__}, a kernel without warm start",
            "Only kernels of `numpyro_bnn.infer` with `warm_start=` have members.",
        )
    found = mcmc.sampler.members(mcmc.last_state, mcmc._args, mcmc._kwargs)
    return {name: np.asarray(value)[:, None] for name, value in jax.device_get(found).items()}


def from_guide(
    result: Any,
    guide: Any,
    args: tuple,
    kwargs: Mapping[str, Any],
    rng_key: jax.Array,
    num_samples: int,
    weigh: bool = False,
    draws_per_chunk: int | None = None,
) -> Fit:
    """Draw from a fitted guide.

    :param result: what ``SVI.run`` or ``AutoADF.run`` returned, or anything else with ``params``.
    :param guide: a NumPyro ``AutoGuide``.
    :param args: arguments of the model in the run.
    :param kwargs: its keyword arguments.
    :param rng_key: key of the draws.
    :param num_samples: number of draws, in one chain.
    :param weigh: also compute their log density and importance weights, and from these ELBO and k-hat.
    :param draws_per_chunk: draws evaluated at once.
    :raises ValueError: without draws.
    :raises TypeError: for a guide that cannot be sampled.
    """
    if not (hasattr(guide, "sample_posterior") and hasattr(guide, "model")):
        raise argument_error(
            "to_inference_data",
            "guide",
            type(guide).__name__,
            "Pass the guide of the result, a NumPyro `AutoGuide` such as `AutoNormal` or `AutoADF`.",
            TypeError,
        )
    if not isinstance(num_samples, int) or num_samples < 1:
        raise argument_error("to_inference_data", "num_samples", num_samples, "Pass a whole number of draws.")
    arguments = bind(guide.model, args, kwargs)
    params = _all_params(result)
    settings = {"algorithm": type(guide).__name__, "num_samples": num_samples, **_progress(result)}
    stats: dict[str, np.ndarray] = {}
    if weigh and check("to_inference_data", guide.model, guide, params, args, kwargs).has_density:
        draws, stats = _weighted(guide, params, args, kwargs, rng_key, num_samples, draws_per_chunk)
        settings |= {name: value for name, value in _judged(stats).items() if np.isfinite(value)}
    else:
        set_up(guide, args, kwargs)
        sample = full_plates(guide.sample_posterior)
        drawn = sample(rng_key, result.params, *args, sample_shape=(num_samples,), **kwargs)
        draws = {name: np.asarray(value)[None] for name, value in jax.device_get(drawn).items()}
    return Fit(
        model=handlers.substitute(guide.model, data=params),
        arguments=arguments,
        posterior=draws,
        sample_stats=stats,
        attrs={**settings, "draws_rng_key": key_text(rng_key)},
    )


def _all_params(result: Any) -> dict[str, Any]:
    """Values of parameter sites, and of the mutable ones that an SVI carries along."""
    return {**result.params, **(getattr(getattr(result, "state", None), "mutable_state", None) or {})}


def _progress(result: Any) -> dict[str, Any]:
    """How the run of an SVI went: steps, the last loss and the last key."""
    losses = np.asarray(getattr(result, "losses", []))
    if losses.ndim != 1 or not losses.size:
        return {}
    key = getattr(getattr(result, "state", None), "rng_key", None)
    return {
        "num_steps": losses.size,
        "final_loss": float(losses[-1]),
        **({} if key is None else {"last_rng_key": key_text(key)}),
    }


def _weighted(
    guide: Any,
    params: Mapping[str, Any],
    args: tuple,
    kwargs: Mapping[str, Any],
    rng_key: jax.Array,
    num_samples: int,
    draws_per_chunk: int | None,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Draws of the guide (1, S, ...), their log density (of unconstrained values, as in MCMC) and log weights."""

    def at_draw(_: Any, key: jax.Array) -> dict[str, jax.Array]:
        found = weighted_draw(guide.model, guide, params, args, kwargs, key)
        values = {
            f"posterior:{name}": site["value"] for name, site in found.model.items() if _is_variable(site)
        }
        return values | {
            "lp": found.log_joint + log_jacobian(found.model),
            "log_weight": found.log_joint - found.log_guide,
        }

    values = map_draws(at_draw, {"draw": np.arange(num_samples)[None]}, rng_key, draws_per_chunk)
    stats = {name: values.pop(name) for name in ("lp", "log_weight")}
    return {name.removeprefix("posterior:"): value for name, value in values.items()}, stats


def _judged(stats: Mapping[str, np.ndarray]) -> dict[str, float]:
    log_weights = stats["log_weight"][0].astype(np.float64)
    return weight_statistics(log_weights) if log_weights.size > 1 and not np.isnan(log_weights).any() else {}


def _is_variable(site: Mapping[str, Any]) -> bool:
    return site["type"] == "deterministic" or (site["type"] == "sample" and not site["is_observed"])


def _described(mcmc: MCMC) -> dict[str, Any]:
    """What the kernels of :mod:`numpyro_bnn.infer` tell about a run; they say aloud when a chain diverged."""
    if not hasattr(mcmc.sampler, "describe"):
        return {}
    report = mcmc.sampler.divergence_report(mcmc.last_state)
    if report:
        warnings.warn(report, stacklevel=4)
    return mcmc.sampler.describe(mcmc.last_state)


def _sample_stats(fields: Mapping[str, Any]) -> dict[str, np.ndarray]:
    stats = {}
    for label, value in fields.items():
        if not isinstance(value, np.ndarray):
            continue  # a tree of values, e.g. a gradient: not a statistic of a draw
        name = SAMPLE_STATS.get(label, label.replace("/", "."))
        stats[name] = -value if name == "lp" else value
        if name == "n_steps":
            stats["tree_depth"] = np.floor(np.log2(value)).astype(int) + 1
    return stats


def key_text(key: jax.Array) -> str:
    data = jax.random.key_data(key) if jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    return str(np.asarray(data).tolist())
