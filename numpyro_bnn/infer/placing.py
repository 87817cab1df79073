"""Put moved values of latent sites into the state of a kernel, and renew what it caches."""

from collections.abc import Mapping
from typing import Any

import jax
from numpyro.distributions import biject_to
from numpyro.infer.gibbs import CustomGibbs, DiscreteGibbs, Gibbs, with_conditioning
from numpyro.infer.hmc import HMC
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import is_prng_key

from numpyro_bnn.infer.block import Block

__all__ = ["place", "put", "renew"]

CONSTRAINED = (CustomGibbs, DiscreteGibbs, Block)  # kernels whose values are constrained ones


def place(kernel: MCMCKernel, state: Any, moved: Mapping[str, jax.Array], prior: Mapping[str, Any]) -> Any:
    """Return ``state`` with constrained values ``moved`` of some of its sites.

    The caches of the kernel are not renewed.

    :param kernel: a kernel with unconstrained values, or a ``Gibbs`` whose blocks hold them.
    :param moved: constrained values.
    :param prior: distributions of the sites, whose supports say how to unconstrain.
    """
    return put(kernel, state, _native(kernel, moved, prior))


def _native(
    kernel: MCMCKernel, moved: Mapping[str, jax.Array], prior: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """Constrained values as the kernel, or each block of a ``Gibbs``, represents them."""
    if isinstance(kernel, Gibbs):
        found: dict[str, jax.Array] = {}
        for (block, _), names in zip(kernel.blocks, kernel._sites, strict=True):
            found |= _native(block, {name: moved[name] for name in names if name in moved}, prior)
        return found
    if isinstance(inner := getattr(kernel, "kernel", None), MCMCKernel):  # moves or replicas around it
        return _native(inner, moved, prior)
    if isinstance(kernel, CONSTRAINED):
        return dict(moved)
    return {name: biject_to(prior[name].support).inv(value) for name, value in moved.items()}


def put(kernel: MCMCKernel, state: Any, values: Mapping[str, jax.Array]) -> Any:
    """Return ``state`` with ``values`` of some of its sites, in the representation of the kernel.

    The caches of the kernel are not renewed.
    """
    if isinstance(kernel, Gibbs):
        blocks = [
            put(block, block_state, {name: values[name] for name in names if name in values})
            for (block, _), names, block_state in zip(
                kernel.blocks, kernel._sites, state.block_states, strict=True
            )
        ]
        return state._replace(z={**state.z, **values}, block_states=tuple(blocks))
    field = kernel.sample_field
    if field not in state._fields:
        return state._replace(base=put(kernel.kernel, state.base, values))  # moves around moves
    old = getattr(state, field)
    new = {name: values[name].astype(value.dtype) if name in values else value for name, value in old.items()}
    return state._replace(**{field: new})


def renew(kernel: MCMCKernel, state: Any, args: tuple, kwargs: Mapping[str, Any] | None) -> Any:
    """Return ``state`` with energies and gradients recomputed at its values.

    :param state: of one chain, or of vectorized chains.
    """
    if isinstance(kernel, Gibbs):
        return _renew_blocks(kernel, state, args, kwargs)
    # NumPyro's own kernels refresh one chain at a time.
    if isinstance(kernel, HMC) and not is_prng_key(state.rng_key):
        return jax.vmap(lambda one: kernel.refresh(one, args, kwargs))(state)
    return kernel.refresh(state, args, kwargs)


def _renew_blocks(kernel: Gibbs, state: Any, args: tuple, kwargs: Mapping[str, Any] | None) -> Any:
    # A sweep renews a block only if one before it has moved; here any of them may have.
    values = kernel.get_constrain_fn(args, kwargs)(state.z)
    blocks = []
    for (block, _), names, block_state in zip(kernel.blocks, kernel._sites, state.block_states, strict=True):
        siblings = {name: value for name, value in values.items() if name not in names}
        blocks.append(block.refresh(block_state, args, with_conditioning(kwargs, siblings)))
    return state._replace(block_states=tuple(blocks))
