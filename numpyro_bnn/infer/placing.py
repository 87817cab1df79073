"""Put moved values of latent sites into the state of a kernel, and renew what it caches."""

from collections.abc import Mapping
from typing import Any

import jax
from numpyro.distributions import biject_to
from numpyro.infer.gibbs import CustomGibbs, DiscreteGibbs, Gibbs, with_conditioning
from numpyro.infer.hmc import HMC
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import is_prng_key

__all__ = ["place", "renew"]


def place(kernel: MCMCKernel, state: Any, moved: Mapping[str, jax.Array], prior: Mapping[str, Any]) -> Any:
    """Return ``state`` with constrained values ``moved`` of some of its sites.

    The caches of the kernel are not renewed.

    :param kernel: a kernel with unconstrained values, or a ``Gibbs`` whose blocks hold them.
    :param moved: constrained values.
    :param prior: distributions of the sites, whose supports say how to unconstrain.
    """
    if isinstance(kernel, Gibbs):
        return _place_in_blocks(kernel, state, moved, prior)
    if isinstance(kernel, CustomGibbs | DiscreteGibbs):
        new = dict(moved)
    else:
        new = {name: biject_to(prior[name].support).inv(value) for name, value in moved.items()}
    field = kernel.sample_field
    old = getattr(state, field)
    values = {name: new[name].astype(value.dtype) if name in new else value for name, value in old.items()}
    if hasattr(type(state), "_fields") and field in state._fields:
        return state._replace(**{field: values})
    return state._replace(base=place(kernel.kernel, state.base, moved, prior))  # moves around moves


def _place_in_blocks(
    kernel: Gibbs, state: Any, moved: Mapping[str, jax.Array], prior: Mapping[str, Any]
) -> Any:
    blocks, merged = [], dict(state.z)
    for (block, _), names, block_state in zip(kernel.blocks, kernel._sites, state.block_states, strict=True):
        own = {name: moved[name] for name in names if name in moved}
        placed = place(block, block_state, own, prior)
        values = getattr(placed, block.sample_field)
        merged |= {name: values[name] for name in names}
        blocks.append(placed)
    return state._replace(z=merged, block_states=tuple(blocks))


def renew(kernel: MCMCKernel, state: Any, args: tuple, kwargs: Mapping[str, Any] | None) -> Any:
    """Return ``state`` with energies and gradients recomputed at its values.

    :param state: of one chain, or of vectorised chains.
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
