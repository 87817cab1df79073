"""Run SVI: minibatches at O(B), one compilation, interruption, and a stop at the first
NaN.
"""

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Annotated, Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import tqdm
from jax import Array, lax
from numpyro import handlers
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoGuide, AutoGuideList
from numpyro.infer.svi import SVIRunResult, SVIState

from numpyro_bnn._checks import (
    argument_error,
    check_finite,
    check_finite_arguments,
    outside,
)
from numpyro_bnn._options import Choice, Kind, PositiveInt, RandomKey, Switch, checked
from numpyro_bnn._types import HostArrays, PyTree, Trees
from numpyro_bnn.program.arguments import Arguments, as_arrays
from numpyro_bnn.program.batches import feeds_in
from numpyro_bnn.program.compiled import (
    CACHE_SIZE,
    TRACING,
    evaluate,
    is_traced,
    refuse_tracers,
    shared,
)
from numpyro_bnn.program.plates import random_indices
from numpyro_bnn.program.posterior import Posterior
from numpyro_bnn.program.row_lengths import (
    check_feeds,
    check_row_lengths,
    warn_of_slow_gathers,
)
from numpyro_bnn.program.rows import Ahead, read_ahead, rows_in

CALL = "guides.fit"
AHEAD = 64  # steps whose rows are read from disk at once
LARGEST_CHUNK = 4096  # maximum number of steps per compiled chunk
CHUNK_SECONDS = 0.25  # target duration of a chunk, and so the delay of an interruption
WINDOW = 1000  # number of losses in the running mean of the progress bar


class Keeper(Protocol):
    """Where a run is kept."""

    def load(self, like: PyTree) -> tuple[PyTree, HostArrays] | None:
        """The state, of the structure of ``like``, and the records of an earlier call,
        if there was one.
        """

    def save(self, state: PyTree, records: HostArrays, last: bool) -> None:
        """Keep a state and what was recorded before it; unless it is the last one, only
        now and then.
        """


@checked(CALL)
def fit(
    svi: Annotated[SVI, Kind(SVI, "Pass a `numpyro.infer.SVI`.")],
    rng_key: RandomKey,
    num_steps: PositiveInt,
    *args: Any,
    init_state: Annotated[
        SVIState, Kind(SVIState, "Pass the `state` of an earlier result.")
    ]
    | None = None,
    init_params: Annotated[
        Mapping, Kind(Mapping, "Pass a dictionary of values by name.")
    ]
    | None = None,
    progress_bar: Switch = True,
    stable_update: Switch = False,
    keeper: Keeper | None = None,
    **kwargs: Any,
) -> SVIRunResult:
    """Fit a guide by SVI, like ``svi.run``, for long runs and large data.

    - A minibatch of a subsampled plate costs O(B), whatever N is: B distinct indices,
      all equally likely.
    - The steps are compiled once per SVI and argument shapes, and reused when a run is
      continued.
    - Ctrl-C returns the result so far. A step that is NaN or infinite ends the run with
      a warning that names it; the result is that of the steps before.

    :func:`numpyro_bnn.runs.fit` does the same in a folder, from which a run goes on
    that was killed.

    :param svi: model, guide, optimizer and loss.
    :param rng_key: key of the start and of all steps.
    :param num_steps: number of steps.
    :param args: arguments of model and guide.
    :param init_state: the ``state`` of an earlier result, to continue from.
    :param init_params: initial values of parameters.
    :param progress_bar: show a bar with the mean of the last 1000 losses.
    :param stable_update: skip steps that are not finite, as ``svi.run`` does, instead
        of ending the run.
    :param keeper: where the run is kept; :func:`numpyro_bnn.runs.fit` passes one.
    :param kwargs: keyword arguments of model and guide.
    :return: ``params``, ``state`` and ``losses`` (one for each step taken), as from
        ``svi.run``.
    :raises ValueError: for ``num_steps`` below 1, a loss that is not finite at the
        first step, or a state of another model, guide or optimizer.
    :raises TypeError: for something other than an SVI, or inside ``jit`` and ``vmap``.

    >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import Trace_ELBO
    >>> from numpyro.infer.autoguide import AutoNormal
    >>> def model(y, batch_size=None):
    ...     mean = numpyro.sample("mean", dist.Normal(0.0, 10.0))
    ...     with numpyro.plate("data", len(y), subsample_size=batch_size) as i:
    ...         numpyro.sample("y", dist.Normal(mean, 1.0), obs=y[i])
    >>> svi = SVI(model, AutoNormal(model), numpyro.optim.Adam(0.05), Trace_ELBO())
    >>> y = 3.0 + jax.random.normal(jax.random.key(0), (10_000,))
    >>> result = fit(svi, jax.random.key(1), 500, y, batch_size=100, progress_bar=False)
    >>> round(float(result.params["mean_auto_loc"]), 1)
    3.0
    """
    instead = "It runs on the host: inside `jit` or `vmap`, scan over `svi.update`."
    refuse_tracers(CALL, instead, rng_key, args, kwargs, init_state, init_params)
    args, kwargs = as_arrays(args, kwargs, CALL)
    fixed, arrays = Arguments.of(args, kwargs).split()
    with TRACING:
        state = _start(
            svi, rng_key, args, kwargs, init_state, init_params, _expected(svi, fixed)
        )
    losses = np.zeros(0, jnp.result_type(float))
    if keeper is not None and (saved := keeper.load(state)) is not None:
        state, losses = saved[0], saved[1]["losses"]
    take = partial(_compiled(svi, fixed, stable_update), arrays)
    run = _Run(take, num_steps, keeper, (state, losses))
    message = run.go(progress_bar)
    if message:
        warnings.warn(f"{CALL}: {message}", stacklevel=outside())
    state, losses = run.done
    return SVIRunResult(shared(svi.get_params)(state), state, jnp.asarray(losses))


class _Chunk(NamedTuple):
    """The last finite state, the losses of the steps, and whether they are finite: if
    not, the last one is that of the step that failed.
    """

    state: PyTree
    losses: np.ndarray
    finite: bool


@dataclass
class _Run:
    """A run that may be interrupted at any line: ``done`` always holds a state and the
    losses of the steps to it.
    """

    take: Callable[[PyTree, int], _Chunk]
    num_steps: int
    keeper: Keeper | None
    done: tuple[PyTree, np.ndarray]

    @property
    def count(self) -> int:
        return len(self.done[1])

    def go(self, progress_bar: bool) -> str:
        """Take the remaining steps; return why it stopped early, or ``""``."""
        message = ""
        bar = tqdm.tqdm(
            total=self.num_steps, initial=self.count, disable=not progress_bar
        )
        try:
            with bar:
                message = self._advance(bar)
        except KeyboardInterrupt:  # also while the bar closes
            if not self.count:
                raise
            if self.count < self.num_steps:
                message = (
                    f"interrupted: the result is that of {self.count} of "
                    f"{self.num_steps} steps."
                )
        self._keep(final=True)
        return message

    def _advance(self, bar: tqdm.tqdm) -> str:
        pace = 1
        while self.count < self.num_steps:
            number = min(pace, self.num_steps - self.count)
            started = time.perf_counter()
            chunk = self.take(self.done[0], number)
            if not chunk.finite:
                self._add(chunk._replace(losses=chunk.losses[:-1]))
                return self._failure(chunk.losses[-1])
            self._add(chunk)
            if number == pace:
                target = pace * CHUNK_SECONDS / max(time.perf_counter() - started, 1e-9)
                pace = int(np.clip(target, 1, min(4 * pace, LARGEST_CHUNK)))
            self._keep(final=False)
            recent = self.done[1][-WINDOW:]
            finite = recent[np.isfinite(recent)]
            mean = finite.mean() if len(finite) else np.nan
            bar.set_postfix_str(f"loss {mean:.5g}", refresh=False)
            bar.update(number)
        return ""

    def _add(self, chunk: _Chunk) -> None:
        self.done = chunk.state, np.concatenate([self.done[1], chunk.losses])

    def _keep(self, final: bool) -> None:
        if self.keeper is not None and self.count:
            self.keeper.save(self.done[0], {"losses": self.done[1]}, final)

    def _failure(self, loss: np.floating) -> str:
        """A message that names the step; an error if it is the first."""
        fault = "a gradient that is not finite" if np.isfinite(loss) else f"loss {loss}"
        advice = (
            "Lower the step size or clip gradients (`numpyro.optim.ClippedAdam`); "
            "start from likely values (`init_loc_fn=`, a small `init_scale`); look for "
            "NaN in the data. `stable_update=True` skips such steps."
        )
        if not self.count:
            raise argument_error(
                CALL,
                "args",
                f"data and parameters with {fault} at the first step",
                advice,
            )
        step = self.count + 1
        return (
            f"{fault} at step {step}; the result is that of the {self.count} steps "
            f"before. {advice}"
        )


# What a state of an SVI and its arguments is; empty until `_start` has made one.
_expected: Callable[[SVI, Arguments], dict[str, str]] = lru_cache(maxsize=CACHE_SIZE)(
    lambda svi, fixed: {}
)


def _start(
    svi: SVI,
    rng_key: Array,
    args: tuple,
    kwargs: Mapping,
    init_state: PyTree,
    init_params: PyTree,
    expected: dict[str, str],
) -> Any:
    """The state to start from; refuse a state or parameters of another model, guide or
    optimizer.
    """
    if init_state is not None and init_params is not None:
        got = "values beside `init_state`, which has its own"
        raise argument_error(CALL, "init_params", got, "Pass only one.")
    state = init_state
    # `init` also gives the SVI its constraints, which a state from another process
    # lacks.
    if state is None or svi.constrain_fn is None or not expected:
        # It refuses subsample sizes that are no counts of rows.
        reading = Posterior(svi.model, args, kwargs, full=False)
        if feeds_in(args, kwargs):
            check_feeds(CALL, reading, args, kwargs)
        warn_of_slow_gathers(CALL, reading)
        check_row_lengths(CALL, svi.model, args, kwargs)
        with random_indices():
            if init_params:
                default = _initial_state(svi, rng_key, args, kwargs, None)
                _check_params(init_params, svi.get_params(default))
            state = _initial_state(svi, rng_key, args, kwargs, init_params)
        expected.update(_described(svi, state))
    state = state if init_state is None else init_state
    description = _described(svi, state)
    for name in expected | description:
        value, wanted = description.get(name, "missing"), expected.get(name, "none")
        if value != wanted:
            got = f"a state in which {name} is {value}; this run has {wanted}"
            instead = "Pass the `state` of a fit of this model, guide and optimizer."
            raise argument_error(CALL, "init_state", got, instead)
    return _strong(state)


def _described(svi: SVI, state: PyTree) -> dict[str, str]:
    """Shapes and dtypes of the parameters and of the rest of a state by name, in which
    a given state must agree.
    """
    parts = {
        "parameter": svi.optim.get_params(state.optim_state),
        "state": state._replace(rng_key=None),
    }
    description = {}
    for kind, tree in parts.items():
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            name = f"{kind} {jax.tree_util.keystr(path)}"
            description[name] = f"{leaf.dtype}{list(leaf.shape)}"
    return description


def _strong(state: PyTree) -> Any:
    """Without weak types, which would be lost in the first step and force a second
    compilation.
    """
    return jax.tree.map(lambda leaf: lax.convert_element_type(leaf, leaf.dtype), state)


def _initial_state(
    svi: SVI, rng_key: Array, args: tuple, kwargs: Mapping, init_params: PyTree
) -> Any:
    """``svi.init``, as one program if the guide is NumPyro's or ours.

    Others, and the parts of a list, may keep values of their first call.
    """
    if not isinstance(svi.guide, AutoGuide) or isinstance(svi.guide, AutoGuideList):
        return svi.init(rng_key, *args, init_params=init_params, **kwargs)
    if svi.guide.prototype_trace is None:
        seed = jax.random.split(rng_key, 3)[2]
        try:
            with handlers.block(), handlers.seed(rng_seed=seed):
                svi.guide._setup_prototype(*args, **svi.static_kwargs, **kwargs)
        except ValueError as cause:  # a distribution refuses its parameters
            if ": argument `" not in str(cause):
                check_finite_arguments(CALL, args, kwargs)
            raise
        except RuntimeError as cause:  # NumPyro found no start
            if "valid initial" not in str(cause):
                raise
            got = (
                "data for which the model has no finite log density at any start tried"
            )
            advice = (
                "Look for NaN and infinity in the data, and for values out of support."
            )
            raise argument_error(CALL, "args", got, advice) from cause

    def init(start: tuple, args: tuple, kwargs: Mapping) -> PyTree:
        with numpyro.validation_enabled(False):
            # the first call of the guide has checked what is known
            return _strong(svi.init(start[0], *args, init_params=start[1], **kwargs))

    state = evaluate(init, (rng_key, init_params), args, kwargs, runs_rarely=True)
    if is_traced(svi.constrain_fn.args):  # bounds were computed in that program
        return svi.init(rng_key, *args, init_params=init_params, **kwargs)
    return state


def _check_params(init_params: Trees, params: Trees) -> None:
    """Refuse initial values of other parameters, of other shapes, or that are not
    finite.
    """
    for name, value in init_params.items():
        Choice(params).check(CALL, "init_params", name)
        leaves = jax.tree.leaves(value)
        shapes = list(map(np.shape, leaves))
        expected = list(map(np.shape, jax.tree.leaves(params[name])))
        if shapes != expected:
            got = f"shape {shapes} for {name!r}"
            raise argument_error(
                CALL, "init_params", got, f"Pass a value of shape {expected}."
            )
        for leaf in leaves:
            check_finite(CALL, f"init_params[{name!r}]", leaf)


@lru_cache(maxsize=CACHE_SIZE)
def _compiled(svi: SVI, fixed: Arguments, stable: bool) -> Callable:
    """Some steps, from the arrays of a call, a state and their number."""
    update = svi.stable_update if stable else svi.update

    @shared
    def steps(state: PyTree, number: int, arrays: dict) -> tuple:
        args, kwargs = fixed.call(arrays)

        def go_on(carry: tuple) -> Array:
            _, _, count, finite = carry
            return (count < number) & finite

        def update_once(state: PyTree, key: Array) -> tuple[PyTree, Array, Array]:
            with random_indices():
                state, loss = update(state._replace(rng_key=key), *args, **kwargs)
            return state.rng_key, state._replace(rng_key=None), loss

        def is_finite(state: Any, loss: Array) -> Array:
            if stable:
                return jnp.array(True)
            params = jax.tree.leaves(svi.optim.get_params(state.optim_state))
            return jnp.stack([jnp.isfinite(p).all() for p in [loss, *params]]).all()

        advance = partial(_step, update_once, is_finite)
        if rows_in(args, kwargs):
            keyless = state._replace(rng_key=None)
            ahead = read_ahead(update_once, keyless, state.rng_key)
            if ahead is not None:
                advance = partial(_block, ahead, is_finite, go_on)
        begin = state, jnp.zeros(LARGEST_CHUNK, float), jnp.int32(0), True
        return lax.while_loop(go_on, advance, begin)

    def take(arrays: dict, state: PyTree, number: int) -> _Chunk:
        state, *outputs = steps(state, number, arrays)
        losses, count, finite = jax.device_get(outputs)
        return _Chunk(state, losses[:count], bool(finite))

    return take


def _step(take: Callable, is_finite: Callable, carry: tuple) -> tuple:
    """One step; the state stays as it was if the step is not finite. (It could not be
    taken again: a loader brings other rows.)
    """
    state, losses, count, _ = carry
    key, new_state, loss = take(state._replace(rng_key=None), state.rng_key)
    new_state = new_state._replace(rng_key=key)
    finite = is_finite(new_state, loss)
    state = jax.tree.map(partial(jnp.where, finite), new_state, state)
    return state, losses.at[count].set(loss), count + 1, finite


def _block(ahead: Ahead, is_finite: Callable, go_on: Callable, carry: tuple) -> tuple:
    """Some steps, whose rows are read from disk at once."""
    begin = carry[2]
    keys = lax.scan(
        lambda key, _: (ahead.follow(key), key), carry[0].rng_key, length=AHEAD
    )[1]
    rows = jax.vmap(ahead.read)(keys)

    def step(carry: tuple) -> tuple:
        now = [array[carry[2] - begin] for array in rows]
        return _step(lambda state, key: ahead.finish(state, key, now), is_finite, carry)

    return lax.while_loop(
        lambda carry: go_on(carry) & (carry[2] < begin + AHEAD), step, carry
    )
