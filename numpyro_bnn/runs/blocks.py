"""Chains of any NumPyro kernel, advanced by one compiled program some transitions at a
time.
"""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatch
from operator import attrgetter
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike
from numpyro.infer import MCMC
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import is_prng_key

from numpyro_bnn._checks import argument_error, unknown_name
from numpyro_bnn._keys import key_numbers
from numpyro_bnn._types import HostArrays, Kwargs, PyTree, Sites, Trees
from numpyro_bnn.program.arguments import Arguments
from numpyro_bnn.program.compiled import NEEDS_VALUES, shared
from numpyro_bnn.runs.draws import MAX_DRAWS_PER_BLOCK, SITES, STATISTICS
from numpyro_bnn.runs.spread import DeviceSpread

BLOCK_BYTES = 1 << 26  # of the draws of all chains that are held until they are written


class Recording(NamedTuple):
    """What is kept of a draw: sites by patterns, ``None`` for all, the dtype of their
    numbers, and statistics.
    """

    sites: Collection[str] | None
    dtype: DTypeLike | None
    fields: tuple[str, ...]


class Chains:
    """The chains of an ``MCMC``, advanced in blocks; the draws are those of
    ``mcmc.run``.

    :param mcmc: settings; neither it nor its kernel is changed.
    :param args: positional and keyword arguments of the model, data as arrays.
    :param row_counts: sizes of plates, along which data are split.
    """

    def __init__(
        self,
        mcmc: MCMC,
        args: tuple,
        kwargs: Mapping,
        recording: Recording,
        spread: DeviceSpread,
        row_counts: Collection[int],
    ) -> None:
        self.call = spread.call
        self.mcmc = mcmc
        self.recording = recording
        self.spread = spread
        self.kernel = fresh(mcmc.sampler)
        self.args, self.kwargs = args, kwargs
        self.in_turn = mcmc.num_chains > 1 and mcmc.chain_method == "sequential"
        self._fixed, self._arrays = Arguments.of(args, kwargs).split()
        #: Numbers of rows of the data that are split, by place.
        self._rows = {
            place: len(a)
            for place, a in self._arrays.items()
            if np.ndim(a) and len(a) in row_counts
        }
        if spread.by_rows and not self._rows:
            got = (
                f'devices along "data", but no array with as many rows as a plate '
                f"({sorted(row_counts)})"
            )
            raise argument_error(
                self.call, "mesh", got, "Give the model a `numpyro.plate` of its rows."
            )

    def start(self, rng_key: Array, init_params: PyTree) -> PyTree:
        """The states of all chains before the first transition, as ``mcmc.run`` starts
        them.
        """
        count = self.mcmc.num_chains
        if count > 1 and is_prng_key(rng_key):
            rng_key = jax.random.split(rng_key, count)

        def init(key: Array, params: PyTree) -> PyTree:
            model_arguments = {"model_args": self.args, "model_kwargs": self.kwargs}
            return self.kernel.init(
                key, self.mcmc.num_warmup, params, **model_arguments
            )

        if self.in_turn:
            state = _stacked(
                [init(rng_key[c], _one(init_params, c)) for c in range(count)]
            )
        else:
            state = init(rng_key, init_params)
        # Weak types would be lost in the first transition and force a second
        # compilation.
        state = jax.tree.map(
            lambda leaf: lax.convert_element_type(leaf, jnp.result_type(leaf)), state
        )
        self._outline(state)
        return state

    def _outline(self, state: PyTree) -> None:
        """Shapes of a draw, how many draws a block may hold, and the program."""
        chain_state = _one(state, 0) if self.in_turn else state
        try:
            shapes = jax.eval_shape(
                lambda s, a: self._kept(s, *self._fixed.call(a)),
                chain_state,
                self._arrays,
            )
            self._inputs = self.spread.rows(self._arrays, self._rows)
        except NEEDS_VALUES as cause:
            self._fix_inputs(cause)
            shapes = jax.eval_shape(
                lambda s: self._kept(s, self.args, self.kwargs), chain_state
            )
        lead = 1 if self.batched else 0
        #: Shape and dtype of one draw of one chain, by group and name.
        self.shapes = jax.tree.map(
            lambda like: jax.ShapeDtypeStruct(like.shape[lead:], like.dtype), shapes
        )
        size = sum(like.size * like.dtype.itemsize for like in jax.tree.leaves(shapes))
        self.capacity = int(
            np.clip(BLOCK_BYTES // max(1, size), 1, MAX_DRAWS_PER_BLOCK)
        )
        self._buffer = shapes
        self._program = self._compiled(state)

    def _fix_inputs(self, cause: Exception) -> None:
        """Make data that shape the model a part of it."""
        if self.spread.by_rows:
            got = (
                'devices along "data" for a model that is shaped by the values of its '
                "data"
            )
            raise argument_error(
                self.call, "mesh", got, 'Leave out its axis "data".'
            ) from cause
        self._inputs = {}

    @property
    def batched(self) -> bool:
        """Whether the states of a program have an axis of chains."""
        return self.mcmc.num_chains > 1 and not self.in_turn

    def _kept(self, state: PyTree, args: tuple, kwargs: Kwargs) -> Sites:
        """What is kept of a state, by group and name."""
        transform = self.mcmc.postprocess_fn or self.kernel.postprocess_fn(args, kwargs)
        values = attrgetter(self.kernel.sample_field)(state)
        values = jax.vmap(transform)(values) if self.batched else transform(values)
        if not isinstance(values, Mapping):
            instead = "Make the kernel from a model, so that its draws have names."
            raise argument_error(
                self.call, "mcmc", "a kernel of a potential function", instead
            )
        return {
            SITES: self._selected(values),
            STATISTICS: {n: self._field(state, n) for n in self.recording.fields},
        }

    def _selected(self, values: Trees) -> dict:
        patterns = self.recording.sites
        for pattern in patterns or ():
            if not any(fnmatch(name, pattern) for name in values):
                raise unknown_name(self.call, "sites", pattern, values)
        selected = {}
        for name, value in values.items():
            if patterns is None or any(fnmatch(name, p) for p in patterns):
                selected[name] = self._in_dtype(value)
        return selected

    def _in_dtype(self, value: Array) -> Array:
        dtype = self.recording.dtype
        if dtype is None or not jnp.issubdtype(value.dtype, jnp.floating):
            return value
        return value.astype(dtype)

    def _field(self, state: PyTree, name: str) -> Array:
        try:
            value = attrgetter(name)(state)
        except AttributeError as cause:
            raise unknown_name(
                self.call, "extra_fields", name, getattr(state, "_fields", ())
            ) from cause
        if not hasattr(value, "dtype"):
            got = f"{name!r}, which is not one array"
            raise argument_error(
                self.call,
                "extra_fields",
                got,
                "Name one of its parts, such as `z.site`.",
            )
        return key_numbers(value)

    # -- programs ----------------------------------------------------------------------

    def _compiled(self, state: PyTree) -> Callable:
        """Some transitions, of which every ``thinning``-th state after the first ones
        is kept.
        """
        thinning = self.mcmc.thinning

        def advance(state: PyTree, first: Array, count: Array, inputs: dict) -> tuple:
            args, kwargs = self.args, self.kwargs
            arrays = self.spread.cut(inputs, self._rows)
            if arrays:
                args, kwargs = self._fixed.call(arrays)

            def transition(i: Array, carry: tuple) -> tuple:
                state, buffer = carry
                state = self.kernel.sample(state, args, kwargs)
                place = i - first

                def write(buffer: PyTree) -> PyTree:
                    new = self._kept(state, args, kwargs)
                    return jax.tree.map(
                        lambda draws, new_draw: draws.at[place // thinning].set(
                            new_draw
                        ),
                        buffer,
                        new,
                    )

                due = (place >= 0) & ((place + 1) % thinning == 0)
                return state, lax.cond(due, write, lambda buffer: buffer, buffer)

            size = self.capacity
            local = self.spread.local(self._buffer)
            buffer = jax.tree.map(
                lambda like: jnp.zeros((size, *like.shape), like.dtype), local
            )
            return lax.fori_loop(0, count, transition, (state, buffer))

        if self.spread.mesh is None:
            return shared(advance)
        zero = self.spread.same(np.int32(0))
        arguments = self.spread.chains(state), zero, zero
        try:
            return self.spread.compiled(advance, *arguments, self._inputs)
        except NEEDS_VALUES as cause:
            self._fix_inputs(cause)
            return self.spread.compiled(advance, *arguments, self._inputs)

    def advance(self, state: PyTree, skipped: int, draws: int) -> tuple[PyTree, PyTree]:
        """Make ``skipped`` transitions, then those of some draws, without waiting for
        them.

        :param draws: at most ``capacity``.
        :return: the states after them, and what :meth:`fetch` takes.
        """
        count = skipped + draws * self.mcmc.thinning
        numbers = [self.spread.same(np.int32(number)) for number in (skipped, count)]
        if not self.in_turn:
            return self._program(self.spread.chains(state), *numbers, self._inputs)
        states = []
        buffers = []
        for c in range(self.mcmc.num_chains):
            chain_state, buffer = self._program(_one(state, c), *numbers, self._inputs)
            states.append(chain_state)
            buffers.append(buffer)
        return _stacked(states), buffers

    def fetch(self, buffers: PyTree, draws: int) -> dict[str, HostArrays]:
        """Wait for the draws of :meth:`advance`, (C, draws, ...) on the host, by group
        and name.
        """
        host_buffers = jax.device_get(self.spread.whole(buffers))
        if self.in_turn:
            return jax.tree.map(
                lambda *by_chain: np.stack(
                    [chain_draws[:draws] for chain_draws in by_chain]
                ),
                *host_buffers,
            )
        if self.batched:
            return jax.tree.map(
                lambda value: np.moveaxis(value[:draws], 1, 0), host_buffers
            )
        return jax.tree.map(lambda value: value[:draws][None], host_buffers)


def fresh(kernel: MCMCKernel) -> MCMCKernel:
    """A copy of a kernel that has not run, with the same model."""
    models, inner = {}, kernel
    while isinstance(inner, MCMCKernel):
        model = getattr(inner, "_model", None)
        models[id(model)] = model
        inner = getattr(inner, "_kernel", None)
    return copy.deepcopy(kernel, models)


def _stacked(trees: Sequence[PyTree]) -> PyTree:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _one(tree: PyTree, chain: int) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[chain], tree)
