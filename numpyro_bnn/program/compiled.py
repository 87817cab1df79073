"""Programs compiled once: kept by what they compute, or by the call of a model, whose
arrays are inputs.
"""

import hashlib
import os
import re
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import nullcontext
from threading import RLock
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun, jaxprs_in_params

from numpyro_bnn._checks import argument_error
from numpyro_bnn._jaxprs.slices import needed_part
from numpyro_bnn._keys import key_numbers
from numpyro_bnn._types import Atom, Kwargs, PyTree
from numpyro_bnn.program.arguments import Arguments

# Number of programs kept for later calls: few, since each keeps its guide and the
# guide's data alive.
CACHE_SIZE = 8

# Working memory of one chunk of draws; large enough to amortize its launch, small
# compared with any result.
CHUNK_BYTES = 128 * 2**20

# Number of programs kept by what they compute.
MAX_SHARED_PROGRAMS = 256
# Numbers in a product of matrices up to which a program is small for a CPU.
MAX_SMALL_PRODUCT = 2**16
# What the data are wanted for while a model is traced, if it computes shapes or
# branches from them.
NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)

# NumPyro keeps its handlers in one list for all threads: whoever runs or traces a model
# holds this lock. Compiled programs run without it, so that predictions in one thread
# do not wait for the fit of another.
TRACING = RLock()

_SHARED: dict[Hashable, Callable] = {}
# The process that ran the first program; one that is forked from it inherits the entry,
# and not the threads of JAX.
_STARTED: list[int] = []


def run(
    fn: Callable,
    values: PyTree,
    args: tuple,
    kwargs: Kwargs,
    runs_rarely: bool = False,
) -> PyTree:
    """``fn(given, args, kwargs)`` by one compiled program, which any equal computation
    uses again.

    Programs are compared by their equations, so two functions that compute the same
    share one, and a function whose surroundings have changed gets another. The arrays
    in ``args`` and ``kwargs`` are inputs of the program, unless ``fn`` needs their
    values while it is traced.
    """
    return prepare(fn, args, kwargs, runs_rarely)(values)


def evaluate(
    fn: Callable,
    values: PyTree,
    args: tuple,
    kwargs: Kwargs,
    runs_rarely: bool = False,
) -> PyTree:
    """:func:`run` for a result with leaves that are not computed, which are those of
    ``fn`` as it is traced.
    """
    leaves: list = []
    tree: PyTree = None

    def computed(values: PyTree, args: tuple, kwargs: Kwargs) -> list:
        nonlocal leaves, tree
        leaves, tree = jax.tree.flatten(fn(values, args, kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, jax.core.Tracer)]

    arrays = iter(run(computed, values, args, kwargs, runs_rarely))
    return jax.tree.unflatten(
        tree, [next(arrays) if isinstance(x, jax.core.Tracer) else x for x in leaves]
    )


def prepare(
    fn: Callable, args: tuple, kwargs: Kwargs, runs_rarely: bool = False
) -> Callable:
    """:func:`run` as a function of ``values``, which reads ``fn`` once for all values
    of one shape.
    """
    fixed, arrays = Arguments.of(args, kwargs).split()
    of_arrays = shared(
        lambda values, arrays: fn(values, *fixed.call(arrays)), runs_rarely
    )
    of_values = shared(lambda values: fn(values, args, kwargs), runs_rarely)

    def call(values: PyTree) -> PyTree:
        try:
            return of_arrays(values, arrays)
        except NEEDS_VALUES:
            return of_values(values)

    return call


def shared(fn: Callable, runs_rarely: bool = False, is_large: bool = False) -> Callable:
    """Like ``jax.jit``, but equal functions share their compiled programs, and what
    ``fn`` reads is read once.

    :param runs_rarely: so rarely that compiling the program quickly matters more than
        its speed.
    :param is_large: its speed matters more, whatever the products of matrices in it.
    """
    programs: dict[Hashable, tuple[Callable, PyTree, bool]] = {}

    def read(leaves: list, tree: PyTree, inside: bool) -> tuple[Callable, PyTree, bool]:
        flat = jax.make_jaxpr(
            lambda *flat: fn(*jax.tree.unflatten(tree, flat)), return_shape=True
        )
        closed, shapes = flat(*leaves)
        closed = closed if closed.effects else needed_part(closed)
        traced = inside or is_traced(closed.consts)
        return (
            _compiled(closed, traced, runs_rarely, is_large),
            jax.tree.structure(shapes),
            traced,
        )

    def call(*values: PyTree) -> PyTree:
        refuse_forks("numpyro_bnn")
        if not _STARTED:
            _STARTED.append(os.getpid())
        leaves, tree = jax.tree.flatten(values)
        inside = is_traced(leaves)
        settings = (
            inside,
            jnp.result_type(float),
            jax.config.jax_default_matmul_precision,  # type: ignore[attr-defined]
        )
        key = tree, settings, jax.sharding.get_abstract_mesh(), *map(jax.typeof, leaves)
        entry = programs.get(key)
        if entry is None:
            with TRACING:
                entry = read(leaves, tree, inside)
            if entry[2] == inside:
                programs[key] = entry
        program, out, traced = entry
        # Parallel chains start inside a compiled program, whose tracers no caller may
        # keep.
        with nullcontext() if traced else jax.core.eval_context():
            return jax.tree.unflatten(out, program(*leaves))

    return call


def _compiled(
    closed: ClosedJaxpr, traced: bool, runs_rarely: bool, is_large: bool
) -> Callable:
    # Inside another program XLA has only that one's options.
    options = None if traced else _options(closed, runs_rarely, is_large)
    fingerprint = _fingerprint(closed, traced)
    key = fingerprint and (*fingerprint, str(options), runs_rarely)
    program = _SHARED.pop(key, None) or jax.jit(
        jaxpr_as_fun(closed), compiler_options=options
    )
    if key is not None:
        _SHARED[key] = program  # the last used comes last
        if len(_SHARED) > MAX_SHARED_PROGRAMS:
            _SHARED.pop(next(iter(_SHARED)))
    return program


def _options(
    closed: ClosedJaxpr, runs_rarely: bool, is_large: bool
) -> dict[str, int | bool] | None:
    """XLA's options with which a CPU compiles in little time; elsewhere they are
    unproven.

    Level 1 of LLVM takes a fifth less time than level 3. The older generator of code,
    which JAX 0.11 has no more, makes fewer kernels. Small programs are nearly as fast
    with both, others up to twice as slow. Fewer than 32 parts are less work, and no
    slower where there are fewer cores.
    """
    if jax.default_backend() != "cpu":
        return None
    config: Any = jax.config
    quick = runs_rarely or config.read("jax_disable_most_optimizations")
    number = min(32, os.cpu_count() or 1)
    options: dict[str, int | bool] = {"xla_cpu_parallel_codegen_split_count": number}
    if quick or not (is_large or _largest_product(closed.jaxpr) >= MAX_SMALL_PRODUCT):
        options["xla_backend_optimization_level"] = 0 if quick else 1
        if jax.__version_info__ < (0, 11):
            options["xla_cpu_use_fusion_emitters"] = False
    flags = os.environ.get("XLA_FLAGS", "")  # the user's come first
    return {name: value for name, value in options.items() if name not in flags}


def _largest_product(jaxpr: Jaxpr) -> int:
    """Numbers in the largest product of matrices of a program."""
    largest = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            product: Any = equation.outvars[0].aval
            largest = max(largest, product.size)
        for inner in jaxprs_in_params(equation.params):
            largest = max(largest, _largest_product(inner))
    return largest


def _fingerprint(closed: ClosedJaxpr, traced: bool) -> tuple | None:
    """Equal for programs that compute the same; ``None`` where that cannot be told."""
    text = str(closed.jaxpr)
    if "callback" in text or (traced and "custom_" in text):
        # the text does not show an author's derivative
        return None
    digest = hashlib.sha256(re.sub("0x[0-9a-f]+", "", text).encode())
    for constant in _constants(closed):
        if isinstance(constant, jax.core.Tracer):
            return None
        with jax.core.eval_context():
            # also inside the program in which parallel chains start
            array = np.asarray(key_numbers(constant))
        digest.update(f"{array.dtype} {array.shape}".encode() + array.tobytes())
    inputs = tuple(
        (v.aval.shape, str(v.aval.dtype), v.aval.weak_type) for v in closed.jaxpr.invars
    )
    # chains in parallel are traced in a mesh
    return digest.digest(), inputs, jax.sharding.get_abstract_mesh()


def _constants(program: ClosedJaxpr | Jaxpr) -> Iterator[Any]:
    """The numbers of a program that its text does not show in full: its constants, and
    arrays among its literals.
    """
    if isinstance(program, ClosedJaxpr):
        yield from program.consts
        program = program.jaxpr
    yield from _literals(program.outvars)
    for equation in program.eqns:
        yield from _literals(equation.invars)
        for inner in jax.tree.leaves(list(equation.params.values())):
            if isinstance(inner, ClosedJaxpr | Jaxpr):
                yield from _constants(inner)
            elif isinstance(inner, Array | np.ndarray):
                yield inner


def _literals(atoms: Iterable[Atom]) -> Iterator[Atom]:
    for atom in atoms:
        if isinstance(atom, Literal):
            yield atom.val


def refuse_forks(call: str) -> None:
    """Refuse to work in a process that was forked from one with programs: it would wait
    for JAX's threads forever.
    """
    if _STARTED and _STARTED[0] != os.getpid():
        got = "a process that was forked after JAX had started"
        instead = (
            'Use threads, the backend "loky" of joblib, or '
            '`multiprocessing.get_context("spawn")`.'
        )
        raise argument_error(call, "process", got, instead, RuntimeError)


def is_traced(values: PyTree) -> bool:
    """Whether a transformation of JAX traces a leaf of these values."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values))


def refuse_tracers(call: str, instead: str, *trees: PyTree) -> None:
    """Refuse values that JAX is tracing: the call runs on the host."""
    if is_traced(trees):
        raise argument_error(
            call, "args", "values traced by `jit`, `vmap` or `grad`", instead, TypeError
        )


def draws_per_chunk(fn: Callable, *example: PyTree) -> int:
    """Number of draws whose intermediate values fit into the memory of a chunk, even if
    none are freed.
    """
    with TRACING:
        equations = jax.make_jaxpr(fn)(*example).jaxpr.eqns
    num_bytes = 0
    for equation in equations:
        for var in equation.outvars:
            num_bytes += var.aval.size * var.aval.dtype.itemsize
    return max(1, CHUNK_BYTES // max(1, num_bytes))


def map_keys(fn: Callable, keys: Array, chunk: int | None = None) -> PyTree:
    """Apply a function to every key, (S,) typed or (S, 2) legacy, on the device,
    ``chunk`` draws at a time.

    By default a chunk has as many draws as fit into 128 MiB.
    """
    size = draws_per_chunk(fn, keys[0]) if chunk is None else chunk
    return lax.map(fn, keys, batch_size=min(size, keys.shape[0]))
