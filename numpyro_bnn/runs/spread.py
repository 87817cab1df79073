"""How the chains and the rows of a run are spread over devices, of one process or of
several.
"""

import re
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpyro.infer import MCMC

from numpyro_bnn._checks import argument_error, has_rows_elsewhere, outside
from numpyro_bnn._keys import key_numbers
from numpyro_bnn._options import Kind
from numpyro_bnn._types import Arrays, PyTree, Trees
from numpyro_bnn.infer.chain_methods import chain_mesh, parallel_vectorized
from numpyro_bnn.program.batches import refuse_feeds
from numpyro_bnn.program.rows import Rows, refuse_rows
from numpyro_bnn.runs.folder import raw, restored, with_keys

AXES = CHAIN, DATA = "chain", "data"
BY_CHAIN = PartitionSpec(CHAIN)
BY_DRAW = PartitionSpec(None, CHAIN)
SAME = PartitionSpec()
_MOVED = re.compile(
    r"= (.*?) (?:all-gather|all-reduce|all-to-all|collective-permute)(?:-start)?\("
)
_SHAPE = re.compile(r"\[([\d,]+)\]")


class DeviceSpread:
    """Chains along the axis ``"chain"`` of a mesh, rows along its axis ``"data"``; all
    processes run one program.

    What the program needs beyond the chains and rows of its own device it gets by the
    collective operations of XLA. Only the first process writes to the disk; the others
    learn from it what was there.

    :param mesh: ``None`` for one device.
    """

    def __init__(self, call: str, mesh: Mesh | None) -> None:
        self.call = call
        self.mesh: Any = mesh
        self.several = jax.process_count() > 1
        #: Whether this is the process that writes.
        self.leads = jax.process_index() == 0
        self.by_chain = mesh is not None and mesh.shape[CHAIN] > 1
        self.by_rows = mesh is not None and mesh.shape.get(DATA, 1) > 1

    # -- arrays ------------------------------------------------------------------------

    def chains(self, state: PyTree) -> PyTree:
        """States of all chains, each on its devices."""
        if self.mesh is None:
            return state
        spec = BY_CHAIN if self.by_chain else SAME
        return jax.tree.map(lambda leaf: self._placed(leaf, spec), state)

    def local(self, shapes: PyTree) -> PyTree:
        """Shapes of what one device has of arrays (C, ...)."""
        if not self.by_chain:
            return shapes
        shard_shape = NamedSharding(self.mesh, BY_CHAIN).shard_shape
        return jax.tree.map(
            lambda like: jax.ShapeDtypeStruct(shard_shape(like.shape), like.dtype),
            shapes,
        )

    def same(self, value: PyTree) -> PyTree:
        """An array on all devices."""
        return value if self.mesh is None else self._placed(value, SAME)

    def arguments(self, tree: PyTree) -> PyTree:
        """The arguments of a model, with arrays on a mesh as XLA splits programs of
        them: JAX's own meshes ask every operation how it is split.
        """

        def on_mesh(leaf: PyTree) -> PyTree:
            placed = getattr(leaf, "sharding", None)
            if not isinstance(placed, NamedSharding):
                return leaf
            shards = [shard.data for shard in leaf.addressable_shards]
            mesh = Mesh(placed.mesh.devices, placed.mesh.axis_names)
            sharding = NamedSharding(mesh, placed.spec, memory_kind=placed.memory_kind)
            return jax.make_array_from_single_device_arrays(
                leaf.shape, sharding, shards
            )

        return jax.tree.map(on_mesh, tree)

    def rows(self, arrays: Trees, split: Collection[str]) -> Arrays:
        """Data by place, some of them in parts, of which the last one is filled up with
        copies of rows.
        """
        split_places = set(split if self.by_rows else ())
        placed = {}
        for place, array in arrays.items():
            place_array = self._parts if place in split_places else self.same
            placed[place] = place_array(array)
        return placed

    def _parts(self, array: PyTree) -> Array:
        missing = -len(array) % self.mesh.shape[DATA]
        if missing:
            array = np.resize(array, (len(array) + missing, *np.shape(array)[1:]))
        return self._placed(array, PartitionSpec(DATA))

    def cut(self, arrays: Arrays, lengths: Mapping[str, int]) -> Arrays:
        """Inside of the program: rows without the copies."""
        return {
            place: array[: lengths[place]] if place in lengths else array
            for place, array in arrays.items()
        }

    def _placed(self, leaf: PyTree, spec: PartitionSpec) -> Array:
        sharding = NamedSharding(self.mesh, spec)
        if isinstance(leaf, Array) and leaf.sharding.is_equivalent_to(
            sharding, leaf.ndim
        ):
            return leaf
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return with_keys(self._placed(jax.random.key_data(leaf), spec), leaf)
        values = np.asarray(leaf)
        return jax.make_array_from_callback(values.shape, sharding, values.__getitem__)

    def whole(self, tree: PyTree) -> PyTree:
        """Arrays on the devices of all processes as arrays of every process."""
        if not self.several:
            return tree
        numbers = multihost_utils.process_allgather(
            jax.tree.map(key_numbers, tree), tiled=True
        )
        return jax.tree.map(with_keys, numbers, tree)

    # -- programs ----------------------------------------------------------------------

    def compiled(self, advance: Callable, *arguments: PyTree) -> Callable:
        """``advance(state, first, count, inputs)`` for these shapes, every
        device with its own chains.

        Along the axis of the rows, XLA splits the work where the data are split.
        """
        if self.by_chain:
            specs: dict[str, PyTree] = {
                "in_specs": (BY_CHAIN, SAME, SAME, SAME),
                "out_specs": (BY_CHAIN, BY_DRAW),
            }
            advance = jax.shard_map(
                advance, mesh=self.mesh, axis_names={CHAIN}, check_vma=False, **specs
            )
        program = jax.jit(advance).lower(*arguments).compile()
        if self.by_rows:
            self._warn_of_moved_rows(program.as_text() or "", arguments[-1])
        return program

    def _warn_of_moved_rows(self, text: str, inputs: Arrays) -> None:
        """Warn of a program that collects all rows on every device, in each step."""
        by_rows = NamedSharding(self.mesh, PartitionSpec(DATA))
        largest = max(
            (
                a
                for a in inputs.values()
                if a.sharding.is_equivalent_to(by_rows, a.ndim)
            ),
            key=np.size,
        )
        moved_shapes = set()
        for sent in _MOVED.findall(text):
            for sizes in _SHAPE.findall(sent):
                moved_shapes.add(tuple(map(int, sizes.split(","))))
        rows, *row_shape = largest.shape
        # Without the copies at the end it may be shorter.
        if any(
            (length, *row_shape) in moved_shapes
            for length in range(rows - self.mesh.shape[DATA] + 1, rows + 1)
        ):
            text = (
                "Take rows in the model by `numpyro.subsample(x, event_dim)`, as XLA "
                "cannot split `x[index]`."
            )
            warnings.warn(
                f"{self.call}: every step sends all rows to all devices. {text}",
                stacklevel=outside(),
            )

    # -- agreement ---------------------------------------------------------------------

    def from_first(self, find: Callable[[], Any], like: PyTree = None) -> PyTree:
        """What the first process finds, in all of them.

        :param like: a tree of arrays with the shapes and dtypes of what is found; by
            default nothing is sent.
        :raises RuntimeError: in the others, if the first one fails.
        """
        if not self.several:
            return find()
        error, value = None, like
        if self.leads:
            try:
                value = find()
            except Exception as cause:
                error = cause
        if multihost_utils.broadcast_one_to_all(np.int32(error is not None)):
            raise error or RuntimeError(
                f"{self.call}: the first process has stopped, and says why."
            )
        if like is None:
            return value
        # As bytes: JAX would round numbers of 64 bits.
        numbers = jax.tree.map(raw, value)
        sent = multihost_utils.broadcast_one_to_all(jax.tree.map(_bytes, numbers))
        received = jax.tree.map(
            lambda s, n: np.asarray(s).view(n.dtype).reshape(n.shape), sent, numbers
        )
        return jax.tree.map(restored, received, like)


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def with_own_rows(tree: PyTree) -> PyTree:
    """The rows of this process in the place of arrays over several, for an export that
    needs none of the others.
    """

    def own(leaf: PyTree) -> PyTree:
        if not has_rows_elsewhere(leaf):
            return leaf
        parts = {}
        for shard in leaf.addressable_shards:
            parts[shard.index[0].start or 0] = np.asarray(shard.data)
        in_order = [parts[start] for start in sorted(parts)]
        return Rows(in_order[0] if len(parts) == 1 else np.concatenate(in_order))

    return jax.tree.map(own, tree)


def spread_of(call: str, mesh: Any, mcmc: MCMC, arguments: PyTree) -> DeviceSpread:
    """The mesh of a run, as given or for the chain method; refuse one that cannot be
    used.

    :param arguments: of the model.
    """
    split = mcmc.chain_method in ("parallel", parallel_vectorized)
    if mesh is None:
        mesh = chain_mesh(mcmc.num_chains, jax.devices()) if split else None
        spread = DeviceSpread(call, mesh)
    else:
        Kind(Mesh, 'Pass e.g. `jax.make_mesh((2, 4), ("chain", "data"))`.').check(
            call, "mesh", mesh
        )
        if not set(AXES) >= set(mesh.axis_names) >= {CHAIN}:
            instead = 'Name its axes "chain", and "data" for rows.'
            raise argument_error(call, "mesh", f"axes {mesh.axis_names}", instead)
        spread = DeviceSpread(
            call, Mesh(mesh.devices, mesh.axis_names)
        )  # XLA finds how values in between are split
        if mcmc.num_chains > 1 and mcmc.chain_method == "sequential":
            got = "chain_method='sequential' with a mesh"
            raise argument_error(
                call, "mcmc", got, "Use 'vectorized': every device has its own chains."
            )
    _check(spread, mcmc.num_chains, arguments)
    return spread


def _check(spread: DeviceSpread, num_chains: int, arguments: PyTree) -> None:
    call, mesh = spread.call, spread.mesh
    if mesh is not None:
        refuse_feeds(call, "mesh", "devices would take them in no order", arguments)
    if spread.by_rows:
        refuse_rows(call, "Rows on disk are not split over devices", arguments)
    if mesh is not None and num_chains % mesh.shape[CHAIN]:
        got = f'{mesh.shape[CHAIN]} devices along "chain" for {num_chains} chains'
        raise argument_error(
            call, "mesh", got, "Take a number of chains that they divide."
        )
    for leaf in filter(has_rows_elsewhere, jax.tree.leaves(arguments)):
        by_rows = spread.by_rows and NamedSharding(mesh, PartitionSpec(DATA))
        if not by_rows or not leaf.sharding.is_equivalent_to(by_rows, leaf.ndim):
            got = f"an array of which this process has a part, {leaf.sharding}"
            instead = (
                'Split its rows along the axis "data" of `mesh`: '
                "`jax.make_array_from_process_local_data(NamedSharding(mesh, "
                'PartitionSpec("data")), rows)`.'
            )
            raise argument_error(call, "args", got, instead)
    used = {0}
    if mesh is not None:
        used = {device.process_index for device in mesh.devices.flat}
    if len(used) < jax.process_count():
        got = (
            f"{num_chains} chains for {jax.process_count()} processes, of which "
            f"{len(used)} would have work"
        )
        instead = (
            "Use `chain_method='parallel'` with a multiple of the number of devices, "
            "or pass `mesh`."
        )
        raise argument_error(call, "mcmc", got, instead)
