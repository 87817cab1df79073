"""What is exported from an inference result: draws, statistics, the model and its
arguments.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from numpyro.infer import HMC, MCMC, NUTS
from numpyro.infer.mcmc import MCMCKernel
from numpyro.infer.svi import SVIRunResult
from numpyro.util import is_prng_key

from numpyro_bnn._checks import argument_error
from numpyro_bnn._distributions import is_latent
from numpyro_bnn._keys import key_numbers
from numpyro_bnn.program.arguments import fingerprints
from numpyro_bnn.program.compiled import prepare, run
from numpyro_bnn.program.importance import (
    check,
    log_jacobian,
    set_up,
    weight_statistics,
    weighted_draw,
)
from numpyro_bnn.program.plates import full_plates
from numpyro_bnn.program.row_lengths import check_row_lengths
from numpyro_bnn.results.arguments import CALL, bind
from numpyro_bnn.results.draws import Fit, map_draws

# ArviZ's names of NumPyro's fields.
SAMPLE_STATS = {
    "potential_energy": "lp",
    "adapt_state.step_size": "step_size",
    "num_steps": "n_steps",
    "accept_prob": "acceptance_rate",
}


def key_text(key: jax.Array) -> str:
    """The numbers of a random key, legacy or typed, as text."""
    return str(np.asarray(key_numbers(key)).tolist())


def from_mcmc(mcmc: MCMC, members: bool = False) -> Fit:
    """Read an :class:`~numpyro.infer.mcmc.MCMC` that has run.

    :param members: read the end points of its warm start instead of the draws.
    :raises ValueError: if it has not run, or has no model (only a potential function).
    """
    if mcmc.last_state is None:
        instead = (
            "Call `mcmc.run(...)` first; kernels of NumPyro take rows as JAX arrays "
            "only, `jnp.asarray(x)`."
        )
        raise argument_error(CALL, "result", "an MCMC that has not run", instead)
    if mcmc.sampler.model is None:
        instead = "Pass a kernel made from a model, or use `arviz.from_dict`."
        raise argument_error(CALL, "result", "an MCMC of a potential function", instead)
    _initialize(mcmc)
    if members:
        samples, fields = members_of(mcmc), {}
    else:
        samples = jax.device_get(mcmc.get_samples(group_by_chain=True))
        fields = jax.device_get(mcmc.get_extra_fields(group_by_chain=True))
    _check_unchanged(mcmc)
    settings = {
        "algorithm": type(mcmc.sampler).__name__,
        "num_warmup": mcmc.num_warmup,
        "num_samples": mcmc.num_samples,
        "num_chains": mcmc.num_chains,
        "thinning": mcmc.thinning,
        "chain_method": getattr(mcmc.chain_method, "__name__", mcmc.chain_method),
        "last_rng_key": key_text(mcmc.last_state.rng_key),
    }
    # A model that hides its data from the sampler refers to one that contains them.
    model = getattr(mcmc.sampler.model, "predictive_model", mcmc.sampler.model)
    if members:
        settings |= {"members_of_warm_start": True, "num_samples": 1}
    else:
        settings |= _described(mcmc)
    arguments = bind(model, mcmc._args, mcmc._kwargs)
    check_row_lengths(CALL, model, *arguments.call())
    stat_coords = getattr(mcmc.sampler, "stat_coords", {})
    return Fit(
        model,
        arguments,
        samples,
        sample_stats(fields),
        settings,
        stat_coords=stat_coords,
    )


def _initialize(mcmc: MCMC) -> None:
    """Build again what a kernel that was pickled after its run has lost: programs
    cannot be pickled.
    """
    kernel = _innermost(mcmc.sampler)
    if getattr(kernel, "_policy", kernel) is None:
        state = mcmc.last_state
        model_arguments = {"model_args": mcmc._args, "model_kwargs": mcmc._kwargs}
        values = getattr(state, mcmc.sampler.sample_field)
        mcmc.sampler.init(state.rng_key, mcmc.num_warmup, values, **model_arguments)


def _innermost(kernel: Any) -> Any:
    """The kernel inside of wrappers."""
    while isinstance(getattr(kernel, "kernel", None), MCMCKernel):
        kernel = kernel.kernel
    return kernel


def check_complete(mcmc: MCMC, posterior: Mapping[str, Any]) -> None:
    """Refuse to evaluate a model at draws that lack latent sites, whose values would
    come from the prior.
    """
    sites = getattr(mcmc.last_state, mcmc.sampler.sample_field)
    lacking = sorted(sites.keys() - posterior.keys())
    if lacking:
        instead = (
            "Keep all sites, or leave out predictions, `log_likelihood` and "
            "`posterior_predictive` (False)."
        )
        raise argument_error(
            CALL, "result", f"draws without those of {', '.join(lacking)}", instead
        )


def _check_unchanged(mcmc: MCMC) -> None:
    """Refuse data that were changed in place after the run: the draws do not belong to
    them.
    """
    kernel, state = mcmc.sampler, mcmc.last_state
    changed_data = getattr(kernel, "changed_data", lambda *_: ())
    changed = bool(changed_data(mcmc._args, mcmc._kwargs))
    has_potential = isinstance(kernel, HMC) and kernel._potential_fn_gen is not None
    if has_potential and fingerprints(mcmc._args, mcmc._kwargs):
        if not is_prng_key(state.rng_key):
            state = jax.tree.map(lambda leaf: leaf[0], state)
        old_potential = float(state.potential_energy)
        new_potential = run(
            lambda z, a, k: kernel._potential_fn_gen(*a, **k)(z),
            state.z,
            mcmc._args,
            mcmc._kwargs,
            once=True,
        )
        changed = abs(float(new_potential) - old_potential) > 1e-3 * (
            1 + abs(old_potential)
        )
    if changed:
        instead = (
            "Pass copies to `run`, e.g. `x.copy()`, or leave the arrays as they are "
            "until the export."
        )
        raise argument_error(
            CALL, "result", "a run whose data have been changed in place since", instead
        )


def members_of(mcmc: MCMC) -> dict[str, np.ndarray]:
    """Values (C, 1, ...) by site at the end of each chain's warm start; a ValueError if
    there was none.
    """
    if not hasattr(mcmc.sampler, "members"):
        got = f"{type(mcmc.sampler).__name__}, a kernel without warm start"
        instead = "Only kernels of `numpyro_bnn.infer` with `warm_start=` have members."
        raise argument_error(CALL, "members", got, instead)
    members = run(
        lambda state, a, k: mcmc.sampler.members(state, a, k),
        mcmc.last_state,
        mcmc._args,
        mcmc._kwargs,
    )
    return {
        name: np.asarray(value)[:, None]
        for name, value in jax.device_get(members).items()
    }


def _described(mcmc: MCMC) -> dict[str, Any]:
    """Settings that kernels of :mod:`numpyro_bnn.infer` report, and the largest depth
    of the trees of NUTS.
    """
    described: dict[str, Any] = {}
    if hasattr(mcmc.sampler, "describe"):
        described = mcmc.sampler.describe(mcmc.last_state)
    kernel = _innermost(mcmc.sampler)
    if isinstance(kernel, NUTS):
        depth = int(np.ravel(kernel._max_tree_depth)[-1])
        described = {**described, "max_tree_depth": depth}
    return described


def sample_stats(fields: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Fields of a run under the names of ArviZ."""
    stats = {}
    for label, value in fields.items():
        if not isinstance(value, np.ndarray):
            continue  # a tree of values, e.g. a gradient, is not a statistic of a draw
        name = SAMPLE_STATS.get(label, label.replace("/", "."))
        stats[name] = -value if name == "lp" else value
        if name == "n_steps":
            stats["tree_depth"] = np.floor(np.log2(value)).astype(int) + 1
    return stats


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
    """Draw from a fitted guide, in one chain.

    :param result: returned by ``SVI.run`` or ``AutoADF.run``, or anything else with
        ``params``.
    :param weigh: also compute log densities and importance weights of the draws, and
        from these ELBO and k-hat.
    :raises TypeError: for a result without parameters, or a guide that cannot be
        sampled.
    """
    _check_guide(result, guide)
    arguments = bind(guide.model, args, kwargs)
    args, kwargs = arguments.call()
    check_row_lengths(CALL, guide.model, args, kwargs)
    state = getattr(result, "state", None)
    params = {**result.params, **(getattr(state, "mutable_state", None) or {})}
    settings = {
        "algorithm": type(guide).__name__,
        "num_samples": num_samples,
        "independent_draws": True,
    }
    losses = np.asarray(getattr(result, "losses", []))
    if losses.ndim == 1 and losses.size:
        settings |= {"num_steps": losses.size, "final_loss": float(losses[-1])}
        if isinstance(result, SVIRunResult) and losses.size >= 100:
            settings["elbo_rise"] = _elbo_rise(losses)
        if (last_key := getattr(state, "rng_key", None)) is not None:
            settings["last_rng_key"] = key_text(last_key)
    stats: dict[str, np.ndarray] = {}
    if weigh and check(CALL, guide.model, guide, params, args, kwargs).has_density:
        numbers = {"draw": np.arange(num_samples)[None]}
        call = _GuideCall(guide, params, args, kwargs)
        draws, stats = map_draws(call, _weighted, numbers, rng_key, draws_per_chunk)
        log_weights = stats["log_weight"][0].astype(np.float64)
        if log_weights.size > 1 and not np.isnan(log_weights).any():
            judged = weight_statistics(log_weights)
            for name, value in judged.items():
                if np.isfinite(value):
                    settings[name] = value
    else:
        set_up(guide, args, kwargs)

        def sample(
            key_and_params: tuple, args: tuple, kwargs: Mapping[str, Any]
        ) -> dict[str, jax.Array]:
            return full_plates(guide.sample_posterior)(
                *key_and_params, *args, sample_shape=(num_samples,), **kwargs
            )

        drawn = run(sample, (rng_key, result.params), args, kwargs)
        draws = {
            name: np.asarray(value)[None]
            for name, value in jax.device_get(drawn).items()
        }
    return Fit(
        guide.model,
        arguments,
        draws,
        stats,
        {**settings, "draws_rng_key": key_text(rng_key)},
        params,
    )


def _check_guide(result: Any, guide: Any) -> None:
    if not hasattr(result, "params"):
        instead = (
            "Pass a run `numpyro.infer.MCMC`, or the result of `SVI.run` or "
            "`AutoADF.run` and `guide=`."
        )
        raise argument_error(CALL, "result", type(result).__name__, instead, TypeError)
    if guide is None:
        instead = (
            "An SVI or ADF result needs `guide=` and `args=`: its guide and the "
            "model's arguments."
        )
        raise argument_error(CALL, "guide", None, instead)
    if not (hasattr(guide, "sample_posterior") and hasattr(guide, "model")):
        instead = (
            "Pass the guide of the result, a NumPyro `AutoGuide` such as `AutoNormal` "
            "or `AutoADF`."
        )
        raise argument_error(CALL, "guide", type(guide).__name__, instead, TypeError)


def _elbo_rise(losses: np.ndarray) -> float:
    """Nats by which the ELBO rises from the ninth to the last tenth of a fit, four
    standard errors taken off.
    """
    size = len(losses) // 100
    batches = losses[-20 * size :].reshape(20, size).mean(axis=1, dtype=np.float64)
    rise = batches[:10].mean() - batches[10:].mean()
    error = np.sqrt(np.square(np.diff(batches)).mean() / 10)
    return float(np.sign(rise) * max(abs(rise) - 4 * error, 0.0))


class _GuideCall(NamedTuple):
    """A guide, its parameters, and the arguments of its model."""

    guide: Any
    params: Mapping[str, Any]
    args: tuple
    kwargs: Mapping[str, Any]

    def prepare(self, fn: Callable, once: bool) -> Callable:
        """``fn(call, *values)`` as a compiled program, of which parameters and data are
        inputs.
        """
        program = prepare(
            lambda values, call, _: fn(_GuideCall(self.guide, *call), *values),
            tuple(self[1:]),
            {},
            once,
        )
        return lambda *values: program(values)


def _weighted(
    call: _GuideCall, _: Any, key: jax.Array
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """One draw of the guide; its log density (of unconstrained values, as in MCMC) and
    its log weight.
    """
    draw = weighted_draw(call.guide.model, *call, key)
    values = {}
    for name, site in draw.model.items():
        if site["type"] == "deterministic" or is_latent(site):
            values[name] = site["value"]
    lp = draw.log_joint + log_jacobian(draw.model)
    return values, {"lp": lp, "log_weight": draw.log_joint - draw.log_guide}
