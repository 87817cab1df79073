"""What every kernel does to the arguments of its model before it looks at them."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property, wraps
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import is_prng_key

from numpyro_bnn._checks import argument_error
from numpyro_bnn._keys import key_numbers
from numpyro_bnn._options import KEY
from numpyro_bnn._types import Attributes, Kwargs, PyTree
from numpyro_bnn.program.arguments import (
    Call,
    as_arrays,
    fingerprints,
    is_table,
    plain_values,
    with_plain_values,
)
from numpyro_bnn.program.compiled import NEEDS_VALUES, TRACING, is_traced
from numpyro_bnn.program.posterior import Posterior
from numpyro_bnn.program.rows import Rows

M = TypeVar("M", bound=Callable)


def over_chains(fn: Callable, state: PyTree, *arguments: PyTree) -> PyTree:
    """``fn(state, *arguments)``, for each of vectorized chains if there are several."""
    if not is_prng_key(state.rng_key):
        fn = jax.vmap(fn)
    return fn(state, *arguments)


def first_of(values: PyTree) -> PyTree:
    """Values of the first of several chains, or replicas."""
    return jax.tree.map(lambda leaf: leaf[0], values)


def one_thread(method: M) -> M:
    """A method that runs or traces a model, which one thread may do at a time."""

    @wraps(method)
    def locked(*args: Any, **kwargs: Any) -> PyTree:
        with TRACING:
            return method(*args, **kwargs)

    return cast(M, locked)


# Larger data are read from references. A constant of this size costs nothing, and a
# reference has its price: with a progress bar `MCMC` compiles its program twice.
MAX_CONSTANT_BYTES = 2**20


@jax.tree_util.register_static
class DataVersion(int):
    """How often data had changed in place when a run began. It is part of the structure
    of a state, so that a program that holds small data as constants is traced again.
    """


def _leaves(args: tuple, kwargs: Kwargs | None) -> list[Any]:
    return jax.tree.leaves((args, dict(kwargs or {})), is_leaf=is_table)


class ModelArguments:
    """The arguments of a model as JAX arrays, and its integers as integers.

    ``MCMC(jit_model_args=True)`` passes every number as a traced array, also a
    ``batch_size`` that a plate needs to know: a kernel remembers those of ``init``.
    Its ``begin`` starts with :meth:`at_start`, ``sample`` is one call of :meth:`run`,
    and other methods begin with :meth:`restored`.

    :param kernel: name of the kernel, for errors.
    :param max_constant_bytes: smaller data may be constants of a program, because the
        states have ``version``.
    """

    def __init__(self, kernel: str, max_constant_bytes: int = 0) -> None:
        self._call = f"infer.{kernel}"
        self._max_constant_bytes = max_constant_bytes
        self._plain: Mapping[str, int | bool] | None = None  # of the last `init`
        # whether some program took them in place of traced values
        self._traced = False
        self._digests: dict[str, bytes] = {}
        self._started: list[Any] = []
        # by identity: data of all runs, and their hashes
        self._seen: dict[int, tuple[Any, bytes]] = {}
        self.version = DataVersion()
        # by identity: data of the last run and a reference to a copy
        self._references: dict[int, tuple[Any, Any]] = {}
        self._refers = True  # whether programs may read them

    def __getstate__(self) -> Attributes:
        return {**self.__dict__, "_references": {}, "_seen": {}, "_started": []}

    def changed(self, args: tuple, kwargs: Kwargs) -> list[str]:
        """The places of the arguments whose values have changed since the run began."""
        now = fingerprints(args, kwargs)
        changed = []
        for place, digest in self._digests.items():
            if now.get(place, digest) != digest:
                changed.append(place)
        return changed

    def are_others(self, args: tuple, kwargs: Kwargs | None) -> bool:
        """Whether data differ from those of the last ``init``, as far as is known."""
        pairs = zip(self._started, _leaves(args, kwargs), strict=False)
        for started, leaf in pairs:
            if leaf is started or not hasattr(leaf, "dtype") or is_traced(leaf):
                continue
            if isinstance(leaf, Rows):
                return True
            before, now = map(key_numbers, (started, leaf))
            nan_is_nan = jnp.issubdtype(leaf.dtype, jnp.inexact)
            if not np.array_equal(before, now, equal_nan=nan_is_nan):
                return True
        return bool(self.changed(args, dict(kwargs or {})))

    def at_start(self, rng_key: Array, args: tuple, kwargs: Kwargs | None) -> Call:
        """Those of ``init``, which are remembered."""
        KEY.check(self._call, "rng_key", rng_key)
        plain = plain_values(args, kwargs)
        if self._traced and plain != self._plain:
            got = (
                f"{plain} after a run with {self._plain}, for which its program was "
                "compiled"
            )
            instead = (
                "With `jit_model_args=True` make a new kernel and `MCMC` for other "
                "sizes."
            )
            raise argument_error("MCMC.run", "model arguments", got, instead)
        arrays = as_arrays(args, kwargs, self._call)
        self._plain = plain
        leaves = _leaves(args, kwargs)
        self._started = [] if is_traced(leaves) else leaves
        self._note_changes(args, kwargs)
        self._refers = not is_traced(rng_key)  # `pmap` takes no references
        # A new run reads its data again: `MCMC` keeps programs by the identity of
        # data; values may change.
        for leaf in leaves:
            if id(leaf) in self._references:
                self._references[id(leaf)][1][...] = as_arrays((leaf,), None)[0][0]
        return arrays

    def _note_changes(self, args: tuple, kwargs: Kwargs | None) -> None:
        self._digests = fingerprints(args, kwargs)
        leaves, _ = jax.tree_util.tree_flatten_with_path(
            (args, dict(kwargs or {})), is_leaf=is_table
        )
        for path, leaf in leaves:
            digest = self._digests.get(jax.tree_util.keystr(path))
            if digest is not None:
                _, known = self._seen.get(id(leaf), (leaf, digest))
                self.version = DataVersion(self.version + (known != digest))
                # the leaf too, so that its id is not reused
                self._seen[id(leaf)] = leaf, digest

    def restored(self, args: tuple, kwargs: Kwargs | None) -> Call:
        """Those of a later call."""
        if self._plain:
            args, kwargs, traced = with_plain_values(args, kwargs, self._plain)
            self._traced |= traced
        return as_arrays(args, kwargs, self._call)

    def run(
        self,
        fn: Callable,
        state: PyTree,
        args: tuple,
        kwargs: Kwargs | None,
    ) -> PyTree:
        """``fn(state, args, kwargs)``, a transition.

        A program that ``MCMC`` compiles has large data as inputs, which it reads from
        references, not copies as constants.
        """
        with TRACING:
            if is_traced(state) and self._refers:
                try:
                    return fn(state, *self.restored(*self._read(args, kwargs)))
                except NEEDS_VALUES:  # data that shape the model are a part of it
                    self._refers = False
            return fn(state, *self.restored(args, kwargs))

    def _read(self, args: tuple, kwargs: Kwargs | None) -> Call:
        references = self._references

        def read(leaf: PyTree) -> PyTree:
            if id(leaf) not in references:
                (array,), _ = as_arrays((leaf,), None)
                is_array = isinstance(array, Array) and not is_traced(array)
                if not is_array or jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
                    return leaf
                if array.nbytes <= self._max_constant_bytes:
                    return leaf
                with jax.core.eval_context():
                    # the leaf too, so that its id is not reused
                    references[id(leaf)] = leaf, jax.new_ref(array)
            return references[id(leaf)][1][...]

        return jax.tree.map(read, (args, dict(kwargs or {})), is_leaf=is_table)


class Start(NamedTuple):
    """What chains start from.

    :param rng_key: of one chain, or a batch of them for vectorized chains.
    :param posterior: what a kernel around this one has read of the model, on a
        minibatch if there are any.
    """

    rng_key: Array
    num_warmup: int
    init_params: PyTree
    args: tuple
    kwargs: Kwargs
    posterior: Posterior | None = None

    @property
    def single(self) -> bool:
        """Whether there is one chain."""
        return is_prng_key(self.rng_key)


class ModelKernel(MCMCKernel):
    """A kernel of a model, which remembers its arguments, and what it has read."""

    # what the model is on all its data, read by `begin`; it holds no data
    _program: Posterior | None = None

    @one_thread
    def init(
        self,
        rng_key: Array,
        num_warmup: int,
        init_params: PyTree = None,
        model_args: tuple = (),
        model_kwargs: Kwargs | None = None,
    ) -> PyTree:
        call = model_args, model_kwargs or {}
        return self.begin(Start(rng_key, num_warmup, init_params, *call))

    def begin(self, start: Start) -> PyTree:
        """:meth:`init`, also by a kernel around this one."""
        args, kwargs = self._arguments.at_start(start.rng_key, start.args, start.kwargs)
        return self._begin(start._replace(args=args, kwargs=kwargs))

    @abstractmethod
    def _begin(self, start: Start) -> PyTree:
        """The first states; the arguments of the model are arrays."""

    def sample(
        self, state: PyTree, model_args: tuple, model_kwargs: Kwargs | None
    ) -> PyTree:
        return self._arguments.run(self._transitions, state, model_args, model_kwargs)

    def _transitions(self, state: PyTree, args: tuple, kwargs: Kwargs) -> PyTree:
        """One transition of every chain."""
        return over_chains(lambda chain: self._transition(chain, args, kwargs), state)

    def posterior(self, args: tuple, kwargs: Kwargs | None) -> Posterior:
        """The model on all of some data, read anew only if they have other shapes."""
        if self._program is None:
            return Posterior(self.model, args, kwargs)
        return self._program.with_arguments(args, kwargs)

    @property
    def _call(self) -> str:
        """Its name in errors."""
        return f"infer.{type(self).__name__}"

    @cached_property
    def _arguments(self) -> ModelArguments:
        return ModelArguments(type(self).__name__)

    def changed_data(self, args: tuple, kwargs: Kwargs) -> list[str]:
        """The places of the arguments whose values have changed since the run began."""
        return self._arguments.changed(args, kwargs)

    def __getstate__(self) -> Attributes:
        return {**self.__dict__, "_sample_fn": None, "_program": None}
