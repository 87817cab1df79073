"""What is exported from an inference result: draws, statistics, the model and its
arguments.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import tqdm
from jax import Array, random
from numpyro.infer import HMC, MCMC, NUTS
from numpyro.infer.autoguide import AutoGuide
from numpyro.infer.mcmc import MCMCKernel
from numpyro.infer.svi import SVIRunResult
from numpyro.util import is_prng_key

from numpyro_bnn._checks import argument_error
from numpyro_bnn._distributions import is_latent
from numpyro_bnn._keys import key_numbers
from numpyro_bnn._types import Arrays, Attributes, HostArrays, Kwargs, PyTree, Trees
from numpyro_bnn.program import compiled
from numpyro_bnn.program.arguments import Arguments, as_numpy, fingerprints
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
from numpyro_bnn.program.rows import rows_in

CALL = "to_inference_data"
# Draws of which this many times more would fit into the memory of a chunk are few.
FEW_DRAWS_FACTOR = 4
# Seconds after which a progress bar appears.
SECONDS_WITHOUT_BAR = 3

# ArviZ's names of NumPyro's fields.
SAMPLE_STATS = {
    "potential_energy": "lp",
    "adapt_state.step_size": "step_size",
    "num_steps": "n_steps",
    "accept_prob": "acceptance_rate",
}
DRAW_NEW_SITES = (
    "`numpyro.infer.Predictive(model, mcmc.get_samples())` draws sites that the run "
    "does not have, such as the future of a series."
)


Draws = Mapping[str, Any]


@dataclass(frozen=True)
class Fit:
    """One inference result.

    :param model: the NumPyro model.
    :param arguments: arguments of the run.
    :param posterior: constrained draws (C, S, ...) by site.
    :param sample_stats: statistics (C, S, ...) by ArviZ's names.
    :param attrs: algorithm and settings.
    :param params: values of the model's parameters by site, where they are known.
    :param stat_coords: statistic -> name and labels of its last axis.
    """

    model: Callable
    arguments: Arguments
    posterior: HostArrays
    sample_stats: HostArrays = field(default_factory=dict)
    attrs: Attributes = field(default_factory=dict)
    params: dict[str, PyTree] = field(default_factory=dict)
    stat_coords: Mapping[str, tuple[str, Sequence[str]]] = field(default_factory=dict)


def bind(model: Callable, args: tuple, kwargs: Kwargs, call: str = CALL) -> Arguments:
    """The arguments of a call by name, in the precision in which they were passed."""
    try:
        return Arguments.of(*as_numpy(args, kwargs), model)
    except TypeError as error:
        instead = "Pass the arguments of the model, as in the run."
        raise argument_error(
            call, "args", f"other arguments than the model takes ({error})", instead
        ) from error


def key_text(key: Array) -> str:
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
    if getattr(kernel, "_plan", kernel) is None:
        state = mcmc.last_state
        model_arguments = {"model_args": mcmc._args, "model_kwargs": mcmc._kwargs}
        values = getattr(state, mcmc.sampler.sample_field)
        mcmc.sampler.init(state.rng_key, mcmc.num_warmup, values, **model_arguments)


def _innermost(kernel: Any) -> Any:
    """The kernel inside of wrappers."""
    while isinstance(getattr(kernel, "kernel", None), MCMCKernel):
        kernel = kernel.kernel
    return kernel


def check_complete(mcmc: MCMC, posterior: Trees) -> None:
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
    on_disk = rows_in(mcmc._args, mcmc._kwargs)  # or of one process
    if has_potential and not on_disk and fingerprints(mcmc._args, mcmc._kwargs):
        if not is_prng_key(state.rng_key):
            state = jax.tree.map(lambda leaf: leaf[0], state)
        old_potential = float(state.potential_energy)
        new_potential = run(
            lambda z, a, k: kernel._potential_fn_gen(*a, **k)(z),
            state.z,
            mcmc._args,
            mcmc._kwargs,
            runs_rarely=True,
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


def members_of(mcmc: MCMC) -> HostArrays:
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


def _described(mcmc: MCMC) -> Attributes:
    """Settings that kernels of :mod:`numpyro_bnn.infer` report, and the largest depth
    of the trees of NUTS.
    """
    described: Attributes = {}
    if hasattr(mcmc.sampler, "describe"):
        described = mcmc.sampler.describe(mcmc.last_state)
    kernel = _innermost(mcmc.sampler)
    if isinstance(kernel, NUTS):
        depth = int(np.ravel(kernel._max_tree_depth)[-1])
        described = {**described, "max_tree_depth": depth}
    return described


def sample_stats(fields: Trees) -> HostArrays:
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
    guide: AutoGuide,
    args: tuple,
    kwargs: Kwargs,
    rng_key: Array,
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
    stats: HostArrays = {}
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

        def sample(key_and_params: tuple, args: tuple, kwargs: Kwargs) -> Arrays:
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


def _check_guide(result: object, guide: AutoGuide) -> None:
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

    guide: AutoGuide
    params: Trees
    args: tuple
    kwargs: Kwargs

    def prepare(self, fn: Callable, runs_rarely: bool) -> Callable:
        """``fn(call, *values)`` as a compiled program, of which parameters and data are
        inputs.
        """
        program = prepare(
            lambda values, call, _: fn(_GuideCall(self.guide, *call), *values),
            tuple(self[1:]),
            {},
            runs_rarely,
        )
        return lambda *values: program(values)


def _weighted(
    call: _GuideCall, _: object, key: Array
) -> tuple[dict[str, Array], dict[str, Array]]:
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


# -- functions at all draws -----------------------------------------------------------


def zero_draws(source: Any, fn: Callable, draws: Draws, rng_key: Array) -> PyTree:
    """Zeros shaped as one chain and draw of the results of :func:`map_draws`; nothing
    is computed.
    """
    first = {name: value[0, 0] for name, value in draws.items()}
    shapes = jax.eval_shape(partial(fn, source), first, rng_key)
    return jax.tree.map(lambda like: np.zeros((1, 1, *like.shape), like.dtype), shapes)


def map_draws(
    source: Any,
    fn: Callable,
    draws: Draws,
    rng_key: Array,
    draws_per_chunk: int | None = None,
    progress_bar: bool = False,
) -> PyTree:
    """Apply ``fn(source, draw, key)`` to every draw and collect the results in host
    memory.

    The function is compiled once for a chunk of draws; memory holds the results and one
    chunk. Each draw has its own key, so results do not depend on the chunk size, by
    default as many as keep working memory near 128 MiB.

    :param source: a reading, or anything with its method ``prepare``.
    :param draws: arrays (C, S, ...); so are the results, in the tree that the function
        returns.
    """
    chains, length = next(iter(draws.values())).shape[:2]
    total = chains * length
    flat = {
        name: np.asarray(value).reshape((total, *value.shape[2:]))
        for name, value in draws.items()
    }
    first = {name: value[0] for name, value in flat.items()}
    fitting = compiled.draws_per_chunk(partial(fn, source), first, rng_key)
    size = min(total, draws_per_chunk or fitting)

    def at_draws(source: Any, draws: Draws, index: PyTree, rng_key: Array) -> PyTree:
        keys = random.split(rng_key, total)[index]
        return jax.vmap(partial(fn, source))(draws, keys)

    # Few draws take less time than a program that is optimized for many.
    program = source.prepare(at_draws, runs_rarely=FEW_DRAWS_FACTOR * total <= fitting)
    results: PyTree = None
    for start in tqdm.trange(
        0,
        total,
        size,
        desc="predictions",
        delay=SECONDS_WITHOUT_BAR,
        disable=not progress_bar or size == total,
    ):
        # The last chunk is padded with the last draw: one shape, one compilation.
        index = np.minimum(np.arange(start, start + size), total - 1)
        inputs = {name: value[index] for name, value in flat.items()}
        chunk = jax.device_get(program(inputs, index, rng_key))
        if results is None:
            results = jax.tree.map(
                lambda value: np.empty((total, *value.shape[1:]), value.dtype), chunk
            )
        count = min(size, total - start)
        for result, value in zip(*map(jax.tree.leaves, (results, chunk)), strict=True):
            result[start : start + count] = value[:count]
    return jax.tree.map(
        lambda value: value.reshape(chains, length, *value.shape[1:]), results
    )
