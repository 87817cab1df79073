"""How chains share the devices of a machine: a ``chain_method`` for NumPyro's
``MCMC``.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Annotated, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from numpyro_bnn._options import Kind, checked
from numpyro_bnn._types import PyTree

OneChain: TypeAlias = Annotated[
    Callable, Kind(callable, "Pass it to MCMC: `chain_method=parallel_vectorized`.")
]


@checked("infer.parallel_vectorized")
def parallel_vectorized(fn: OneChain) -> Callable:
    """Run chains on all local devices: vectorized on each device, the devices in
    parallel.

    A ``chain_method`` for ``numpyro.infer.MCMC`` and any kernel; ``"parallel"`` needs
    one device per chain, and ``"vectorized"`` uses one device only. C chains are split
    evenly over the largest number of devices that divides C; devices do not wait for
    one another. Draws come back on the first device.

    JAX sees a CPU as one device unless you call
    ``numpyro.set_host_device_count(os.cpu_count())`` before JAX is first used. NumPyro
    shows no progress bar with methods of this kind.

    :param fn: function of a tree of arrays, for one chain.
    :return: function of a tree of arrays with a leading axis (C, ...).

    >>> import jax.numpy as jnp
    >>> parallel_vectorized(lambda x: {"double": 2 * x})(jnp.arange(3))[
    ...     "double"
    ... ].tolist()
    [0, 2, 4]
    """
    chunk = jax.vmap(fn)
    on_one_device = jax.jit(chunk)

    @cache
    def program(mesh: Mesh) -> tuple[Callable, NamedSharding]:
        spec = PartitionSpec("chain")
        # The chunks are independent: no values need to agree between devices.
        split = jax.shard_map(
            chunk, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
        return jax.jit(split), NamedSharding(mesh, spec)

    def mapped(chains: PyTree) -> PyTree:
        mesh = chain_mesh(jax.tree.leaves(chains)[0].shape[0], jax.local_devices())
        if mesh is None:
            return on_one_device(chains)
        run, placed = program(mesh)
        return jax.device_put(run(jax.device_put(chains, placed)), mesh.devices[0])

    return mapped


def chain_mesh(num_chains: int, devices: Sequence[jax.Device]) -> Mesh | None:
    """The largest number of devices that divides the number of chains; ``None`` for
    one.
    """
    count = max(n for n in range(1, len(devices) + 1) if num_chains % n == 0)
    return Mesh(np.asarray(devices[:count]), ("chain",)) if count > 1 else None
