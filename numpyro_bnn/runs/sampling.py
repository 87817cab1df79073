"""``start``: run an ``MCMC`` in blocks that are kept in a folder, or go on with the run
that is there.
"""

import os
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from typing import Annotated, Any, TypeAlias

import jax
import numpy as np
import tqdm
from jax import Array
from numpyro.infer import MCMC, BarkerMH

from numpyro_bnn._checks import argument_error, outside
from numpyro_bnn._options import Choice, Kind, Positive, RandomKey, Switch, checked
from numpyro_bnn._types import Attributes, HostArrays, PyTree, Sites
from numpyro_bnn.infer.chain_methods import parallel_vectorized
from numpyro_bnn.program.arguments import Call, as_arrays
from numpyro_bnn.program.batches import feeds_in, positions, restore
from numpyro_bnn.program.compiled import refuse_tracers
from numpyro_bnn.program.sites import safe
from numpyro_bnn.runs.blocks import Chains, Recording
from numpyro_bnn.runs.draws import (
    SITES,
    STATISTICS,
    DrawLayout,
    StoredDraws,
    WrittenBlock,
    blocks_in,
    check_names,
    table,
)
from numpyro_bnn.runs.folder import Folder, FolderPath, Saved, digest, import_extra
from numpyro_bnn.runs.identity import (
    begin_feeds,
    described_model,
    described_options,
    described_versions,
    functions_of_data,
    read_model,
)
from numpyro_bnn.runs.spread import spread_of, with_own_rows

CALL = "runs.start"
DTYPES = ("float16", "float32", "float64")


def _is_names(value: Any) -> bool:
    """Whether it is a collection of texts; a text would be one of letters."""
    is_collection = isinstance(value, Collection) and not isinstance(value, str)
    return is_collection and all(isinstance(item, str) for item in value)


Names: TypeAlias = Annotated[Collection[str], Kind(_is_names, "Pass a tuple of names.")]


class Run:
    """A run in a folder: what :func:`start` returns, and what
    :func:`~numpyro_bnn.to_inference_data` takes.

    ``num_draws`` is the number of draws of each chain on disk, ``complete`` whether all
    that were asked for are there, ``last_state`` the state of the kernel after them. It
    can be pickled: the draws stay in the folder.

    >>> Run.__name__
    'Run'
    """

    def __init__(
        self,
        chains: Chains,
        draws: StoredDraws | None,
        state: PyTree,
        num_draws: int,
        complete: bool,
        model_arguments: tuple,
    ) -> None:
        self._mcmc = chains.mcmc
        self._kernel = chains.kernel
        self._draws = draws
        self._model_arguments = model_arguments
        self._names = [name for values in chains.shapes.values() for name in values]
        self.last_state, self.num_draws, self.complete = state, num_draws, complete

    def __repr__(self) -> str:
        return f"Run(num_draws={self.num_draws}, complete={self.complete})"

    @checked("Run.get_samples")
    def get_samples(self, group_by_chain: Switch = False) -> dict[str, np.ndarray]:
        """Draws by site as ``MCMC.get_samples`` returns them, read from disk: (C * S,
        ...), or (C, S, ...).
        """
        return self._read(SITES, group_by_chain)

    @checked("Run.get_extra_fields")
    def get_extra_fields(self, group_by_chain: Switch = False) -> dict[str, np.ndarray]:
        """Statistics of the draws, by field, as
        ``MCMC.get_extra_fields`` returns them.
        """
        return self._read(STATISTICS, group_by_chain)

    def _read(self, group: str, group_by_chain: bool) -> dict[str, np.ndarray]:
        if self._draws is None:
            raise RuntimeError(
                "runs.Run: the first process has the draws: `if jax.process_index() == "
                "0: ...`."
            )
        stored_values = self._draws.read(group)
        values = {}
        for name in self._names:
            if safe(name) in stored_values:
                value = stored_values[safe(name)]
                if not group_by_chain:
                    value = value.reshape(-1, *value.shape[2:])
                values[name] = value
        return values

    @property
    def mcmc(self) -> MCMC:
        """A ``MCMC`` with the draws of this run in memory, for its other methods, such
        as ``print_summary``.
        """
        mcmc = copy(self._mcmc)
        mcmc.sampler = self._kernel
        mcmc._args, mcmc._kwargs = self._model_arguments
        mcmc._states = {
            mcmc._sample_field: self.get_samples(True),
            **self.get_extra_fields(True),
        }
        mcmc._states_flat = None
        mcmc._last_state = self.last_state
        mcmc.num_samples = self.num_draws * mcmc.thinning
        return mcmc


@checked(CALL)
def start(
    folder: str | os.PathLike,
    mcmc: Annotated[MCMC, Kind(MCMC, "Pass a `numpyro.infer.MCMC`.")],
    rng_key: RandomKey,
    *args: Any,
    extra_fields: Names = (),
    init_params: PyTree = None,
    sites: Names | None = None,
    dtype: Annotated[str, Choice(DTYPES)] | None = None,
    mesh: jax.sharding.Mesh | None = None,
    block_seconds: Positive = 10.0,
    progress_bar: Switch = True,
    **kwargs: Any,
) -> Run:
    """Run an ``MCMC`` and keep it in a folder; the same call goes on where an earlier
    one ended.

    A run survives whatever ends its process, in warm-up too: at most one block is
    computed again, and the draws are those of a run that was not interrupted, bit for
    bit on the same devices. They are those of ``mcmc.run``. A call with a larger
    ``num_samples`` adds draws. Draws go to disk block by block, so memory does not grow
    with their number. Ctrl-C returns the draws so far.

    The folder holds ``draws.zarr`` (groups ``posterior`` and ``sample_stats``, which
    ``xarray.open_zarr`` reads, also while the run goes on), the last two states, and
    ``run.json``, which says what was started. Blocks of draws have digests, which are
    checked whenever they are read. It needs the extra ``numpyro_bnn[runs]``.

    :param folder: name of the folder, which is made with the first state.
    :param mcmc: kernel, numbers of chains and draws, ``thinning`` and ``chain_method``:
        ``"sequential"``, ``"vectorized"``,
        :func:`~numpyro_bnn.infer.parallel_vectorized`, or ``"parallel"``, which is the
        same.
    :param rng_key: key of the run.
    :param args: arguments of the model.
    :param extra_fields: more fields of the kernel's state to keep, as for ``mcmc.run``.
    :param init_params: initial values, as for ``mcmc.run``.
    :param sites: patterns of the sites to keep, such as ``("sigma", "net/*")``; by
        default all.
    :param dtype: of the kept values of sites, ``"float16"`` to halve the space; by
        default as they are.
    :param mesh: devices, such as ``jax.make_mesh((2, 4), ("chain", "data"))``: chains
        are split along the axis ``"chain"``, rows of plates along ``"data"``. Also over
        several processes, each of which makes the same call after
        ``jax.distributed.initialize``, with all rows or with arrays of which it has its
        own rows; the first one writes.
    :param block_seconds: seconds between two writes, about.
    :param progress_bar: show a bar over the transitions of all chains.
    :param kwargs: keyword arguments of the model.
    :return: the run, which :func:`~numpyro_bnn.to_inference_data` takes.
    :raises ValueError: for a folder of another run (the error names what differs), one
        that another process writes, or one whose files are damaged or lost; OSError:
        for a folder that cannot be written; ImportError: no zarr.

    >>> import tempfile, jax.numpy as jnp, numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import MCMC, BarkerMH
    >>> def model(y):
    ...     mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
    ...     numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)
    >>> mcmc = MCMC(BarkerMH(model), num_warmup=5, num_samples=20)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = start(
    ...         folder, mcmc, jax.random.key(0), jnp.ones(3), progress_bar=False
    ...     )
    ...     run.get_samples()["mean"].shape
    (20,)
    """
    refuse_tracers(
        CALL,
        "It runs on the host: call it outside of `jit` and `vmap`.",
        (rng_key, args, kwargs, init_params),
    )
    _check(mcmc, init_params)
    import_extra(CALL, "zarr")
    fields = dict.fromkeys((*mcmc.sampler.default_fields, *extra_fields))
    fields.pop(mcmc.sampler.sample_field, None)
    recording = Recording(sites, dtype, tuple(fields))
    spread = spread_of(CALL, mesh, mcmc, (args, kwargs))
    model_arguments: Call = spread.arguments(as_arrays(args, kwargs, CALL))
    place = FolderPath.of(CALL, "folder", folder)
    begin_feeds(place, *model_arguments)
    reading = read_model(CALL, mcmc.sampler.model, *model_arguments)
    sizes = {
        site["args"][0] for site in reading.sites.values() if site["type"] == "plate"
    }
    chains = Chains(
        mcmc, *model_arguments, recording, spread, sizes if spread.by_rows else ()
    )
    description = {
        "num_chains": str(mcmc.num_chains),
        "num_warmup": str(mcmc.num_warmup),
        "thinning": str(mcmc.thinning),
        "rng_key": digest(rng_key)[:16],
        "init_params": digest(init_params)[:16],
        "sites": str(sites and sorted(sites)),
        "dtype": str(dtype),
        "extra_fields": ", ".join(extra_fields),
        **described_options("kernel", mcmc.sampler),
        **described_model(reading, *model_arguments),
        **described_versions(),
    }
    # Arrays over several processes need all of them.
    functions = functions_of_data(reading, *model_arguments)
    with ExitStack() as stack:

        def opened() -> Folder:
            run_folder = stack.enter_context(Folder(place, description))
            run_folder.more["functions"] = functions
            return run_folder

        run_folder = spread.from_first(opened)
        loop = _Loop(chains, run_folder, block_seconds)
        loop.begin(rng_key, init_params)
        message = loop.go(progress_bar and spread.leads)
    if message:
        warnings.warn(f"{CALL}: {message}", stacklevel=outside())
    complete = loop.draws_done >= loop.draws_wanted
    given = with_own_rows((args, kwargs))
    return Run(chains, loop.draws, loop.last, loop.draws_done, complete, given)


class _Loop:
    """Blocks of a run: transitions of the warm-up, then draws; after each of them
    everything is on disk.

    :param folder: ``None`` in all processes but the first one.
    """

    def __init__(self, chains: Chains, folder: Any, block_seconds: float) -> None:
        self.chains = chains
        self.spread = chains.spread
        self.folder = folder
        self.seconds = block_seconds
        self.warmup = chains.mcmc.num_warmup
        self.draws_wanted = chains.mcmc.num_samples // chains.mcmc.thinning
        self.warmed = self.draws_done = self.number = self.diverging = 0
        self.feeds = feeds_in(chains.args, chains.kwargs)
        # seconds per transition, and when the last block ended; 0 if not known
        self.pace = self.ended = 0.0

    def begin(self, rng_key: Array, init_params: PyTree) -> None:
        """The first state, or the last one on disk."""
        self.state = self.chains.start(rng_key, init_params)
        self.draws = self.spread.from_first(self._described)
        numbers, self.state = self.spread.from_first(
            self._saved, (np.zeros(4, np.int64), self.state)
        )
        self.number, self.warmed, self.draws_done, self.diverging = map(int, numbers)
        self.last = self.state  # on the host of every process

    def _described(self) -> StoredDraws:
        check_names(CALL, self.chains.shapes)
        likes = _on_disk(self.chains.shapes)
        variables: dict[str, dict[str, list]] = {}
        for group, values in likes.items():
            variables[group] = {}
            for name, like in values.items():
                variables[group][name] = [str(like.dtype), list(like.shape)]
        self.folder.more["variables"] = variables
        return StoredDraws(self.folder.place, self.chains.mcmc.num_chains, likes)

    def _saved(self) -> tuple[np.ndarray, PyTree]:
        """Of the last state on disk: its number, steps of the warm-up, draws, and
        divergences; and that state.
        """
        saved = self.folder.latest(self.state, self._is_whole)
        if saved is None:
            return np.zeros(4, np.int64), self.state
        self.draws.check(slice(-1))
        notes = saved.notes
        restore(self.feeds, notes.get("feeds", []))
        numbers = saved.number, notes["warmed"], notes["draws"], notes["diverging"]
        return np.array(numbers), saved.tree

    def _is_whole(self, saved: Saved) -> bool:
        """Whether the last block of draws before a state is on disk; the earlier ones
        cannot be made again.
        """
        self.draws.blocks = blocks_in(saved.arrays)
        try:
            self.draws.check(slice(-1, None))
        except ValueError:
            return False
        return True

    def _agreed(self, find: Callable[[Any], int], value: float) -> int:
        """A number that the first process finds, in all processes."""
        return int(self.spread.from_first(lambda: np.int64(find(value)), np.int64(0)))

    def go(self, progress_bar: bool) -> str:
        """Take the remaining blocks; return why it stopped early, or ``""``."""
        thinning = self.chains.mcmc.thinning
        total = self.warmup + self.draws_wanted * thinning
        done = self.warmed + self.draws_done * thinning
        options = {"total": total, "initial": done, "unit": "step", "desc": "compiling"}
        try:
            with tqdm.tqdm(**options, disable=not progress_bar or done >= total) as bar:
                self._warm_up(bar)
                self._sample(bar)
        except KeyboardInterrupt:  # also while the bar closes
            if not self.draws_done or self.spread.several:
                raise
            if self.draws_done < self.draws_wanted:
                return (
                    f"interrupted: {self.draws_done} of {self.draws_wanted} draws; the "
                    f"same call goes on."
                )
        except jax.errors.JaxRuntimeError as cause:
            if not self.spread.several:
                raise
            text = (
                "Start all processes again: the same call goes on from the last block."
            )
            raise RuntimeError(
                f"{CALL}: another process of this run may have ended. {text}"
            ) from cause
        return ""

    def _warm_up(self, bar: tqdm.tqdm) -> None:
        while self.warmed < self.warmup:
            count = min(
                self._agreed(self._steps_in, self.seconds), self.warmup - self.warmed
            )
            state, _ = jax.block_until_ready(self.chains.advance(self.state, count, 0))
            self._note_pace(count)
            feeds = self._positions_after(state)
            self._commit(state, warmed=self.warmed + count, feeds=feeds)
            self._show(bar, "warm-up", count)

    def _sample(self, bar: tqdm.tqdm) -> None:
        thinning, total = self.chains.mcmc.thinning, self.draws_wanted
        if self.draws_done >= total:
            return
        first_feeds = self._positions_after(self.state)
        while not self.pace:  # without warm-up: time some transitions, and discard them
            jax.block_until_ready(self.chains.advance(self.state, 1, 0))
            self._note_pace(1)
            restore(self.feeds, first_feeds)
        longest = min(self.chains.capacity, total)
        proposed = int(
            np.clip(self._agreed(self._steps_in, self.seconds) // thinning, 1, longest)
        )
        block = self._agreed(
            lambda number: self.draws.draws_per_block(int(number)), proposed
        )
        layout = DrawLayout(self.chains.mcmc.num_chains, total, block)
        start: int = self.draws_done
        launched: Any = None
        while start < total:
            stop = min((start // block + 1) * block, total)
            state, buffers = launched or self.chains.advance(
                self.state, 0, stop - start
            )
            next_stop = min(stop + block, total)
            # The device goes on while this block is written.
            launched = None
            feeds = self._positions_after(state)
            if next_stop > stop:
                launched = self.chains.advance(state, 0, next_stop - stop)
            draws = self.chains.fetch(buffers, stop - start)
            self._check_range(draws[SITES])
            # draws without a state would be taken for a run that has lost its states
            if not self.number:
                self._commit(self.state, feeds=first_feeds)
            blocks = (
                self.draws.write(start, stop, _on_disk(draws), layout)
                if self.draws
                else ()
            )
            self.diverging += int(np.sum(draws[STATISTICS].get("diverging", 0)))
            self._commit(state, draws=stop, blocks=blocks, feeds=feeds)
            self._show(bar, "sampling", (stop - start) * thinning)
            start = stop

    def _positions_after(self, state: PyTree) -> Sequence[PyTree]:
        """Where the loaders are when a state is computed."""
        if self.feeds:
            jax.block_until_ready(state)
        return positions(self.feeds)

    def _note_pace(self, steps: int) -> None:
        """Seconds per transition since the last block ended; unknown after the first
        one, which compiles.
        """
        now = time.perf_counter()
        self.pace = (now - self.ended) / steps if self.ended else 0.0
        self.ended = now

    def _steps_in(self, seconds: float) -> int:
        """Transitions in some seconds; few until their time is known."""
        return max(1, int(seconds / self.pace)) if self.pace else 1

    def _check_range(self, values: HostArrays) -> None:
        for name, value in values.items():
            if self.chains.recording.dtype == "float16" and np.isinf(value).any():
                got = f"'float16', in which a draw of {name!r} would be infinite"
                raise argument_error(
                    CALL,
                    "dtype",
                    got,
                    "Keep this run in another folder with `dtype='float32'`.",
                )

    def _commit(
        self,
        state: PyTree,
        warmed: int | None = None,
        draws: int = 0,
        blocks: tuple[WrittenBlock, ...] = (),
        feeds: Sequence[PyTree] = (),
    ) -> None:
        warmed = self.warmed if warmed is None else warmed
        notes: Attributes = {
            "warmed": warmed,
            "draws": draws,
            "diverging": self.diverging,
        }
        notes |= {"feeds": list(feeds)}
        host_state = self.spread.whole(state)
        if self.folder:
            self.folder.commit(self.number + 1, host_state, notes, table(blocks))
            self.draws.blocks = blocks
        # An interruption before this line leaves the block before, on disk and here.
        progress = self.number + 1, warmed, draws, state, host_state
        self.number, self.warmed, self.draws_done, self.state, self.last = progress

    def _show(self, bar: tqdm.tqdm, phase: str, steps: int) -> None:
        text = ""
        for name in STEP_SIZES:
            size = _value(self.last, name)
            if size is not None:
                text = f"step size {float(np.median(size)):.2e}"
                break
        text += f", {self.diverging} diverging" if self.diverging else ""
        bar.set_description(phase, refresh=False)
        bar.set_postfix_str(text, refresh=False)
        bar.update(steps)


def _on_disk(groups: Mapping[str, Mapping[str, Any]]) -> Sites:
    """Values by the names that they have on disk."""
    on_disk = {}
    for group, values in groups.items():
        on_disk[group] = {safe(name): value for name, value in values.items()}
    return on_disk


STEP_SIZES = ("step_size", "adapt_state.step_size")  # where states have it


def _value(state: PyTree, name: str) -> PyTree:
    for attribute in name.split("."):
        state = getattr(state, attribute, None)
    return state


def _check(mcmc: MCMC, init_params: PyTree) -> None:
    """Refuse what cannot be run in blocks, before any work."""
    if init_params is not None and isinstance(mcmc.sampler, BarkerMH):
        got = "initial values for BarkerMH, which ignores them"
        instead = "Give it an `init_strategy`, `init_to_value(values=...)`."
        raise argument_error(CALL, "init_params", got, instead)
    got = instead = ""
    methods = ("sequential", "vectorized", "parallel", parallel_vectorized, jax.vmap)
    if mcmc.sampler.model is None:
        got = "an MCMC of a potential function"
        instead = "Make the kernel from a model, so that its draws have names."
    elif mcmc.post_warmup_state is not None:
        got = "an MCMC with a `post_warmup_state`"
        instead = "Pass a new `MCMC`: the folder keeps the state to go on from."
    elif mcmc.num_samples % mcmc.thinning:
        got = f"num_samples={mcmc.num_samples} with thinning={mcmc.thinning}"
        instead = "Take a multiple of `thinning`, so that draws can be added later."
    elif mcmc.num_chains > 1 and mcmc.chain_method not in methods:
        got = f"chain_method={mcmc.chain_method!r}"
        instead = "Use 'vectorized' or `infer.parallel_vectorized`."
    if got:
        raise argument_error(CALL, "mcmc", got, instead)
