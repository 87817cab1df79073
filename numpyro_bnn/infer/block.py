"""What kernels share that draw sites from their conditionals: constrained values, nothing cached."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import random
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import identity, is_prng_key

from numpyro_bnn._keys import split
from numpyro_bnn._plates import full_trace
from numpyro_bnn.symmetry.model_info import CONDITIONED

__all__ = ["Block", "BlockState", "held_values"]


class BlockState(NamedTuple):
    """State of a :class:`Block`.

    :param z: constrained values of its sites.
    :param rng_key: the key of the next sweep.
    """

    z: dict[str, jax.Array]
    rng_key: jax.Array


def held_values(model_kwargs: Mapping[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Values that other blocks of a ``Gibbs`` hold, and the keyword arguments of the model.

    >>> held_values({"y": 1.0, "_gibbs_sites": {"w": 2.0}})
    ({'w': 2.0}, {'y': 1.0})
    """
    kwargs = dict(model_kwargs or {})
    return dict(kwargs.pop(CONDITIONED, {})), kwargs


class Block(MCMCKernel, ABC):
    """A block of ``numpyro.infer.Gibbs``, or a kernel of its own, whose sites are drawn given all others.

    A subclass says in ``_prepare`` which sites it draws, and in ``_draw`` how.

    :param model: the NumPyro model.
    """

    sample_field = "z"

    def __init__(self, model: Callable) -> None:
        self._model = model
        self._sample_fn: Callable | None = None

    @abstractmethod
    def _prepare(self, held: set[str], args: tuple, kwargs: Mapping[str, Any]) -> tuple[str, ...]:
        """Decide, from the model's program, what the kernel does; return its sites."""

    @abstractmethod
    def _draw(
        self,
        rng_key: jax.Array,
        z: dict[str, jax.Array],
        held: dict[str, Any],
        args: tuple,
        kwargs: Mapping[str, Any],
    ) -> dict[str, jax.Array]:
        """One sweep over the sites of the kernel, given the values of those that others hold."""

    @property
    def model(self) -> Callable:
        return self._model

    @property
    def default_fields(self) -> tuple[str, ...]:
        return (self.sample_field,)

    def init(
        self,
        rng_key: jax.Array,
        num_warmup: int,
        init_params: Mapping[str, Any] | None = None,
        model_args: tuple = (),
        model_kwargs: Mapping[str, Any] | None = None,
    ) -> BlockState:
        held, kwargs = held_values(model_kwargs)
        # Parallel chains start inside a compiled program; what is decided here must not belong to it.
        with jax.ensure_compile_time_eval():
            names = self._prepare(set(held), model_args, kwargs)
        keys = split(rng_key)
        given = dict(init_params or {})

        def start(key: jax.Array) -> dict[str, jax.Array]:
            traced = full_trace(self._model, held, model_args, kwargs, key)
            return {name: jnp.asarray(traced[name]["value"]) for name in names}

        drawn = start(keys[0]) if is_prng_key(rng_key) else jax.vmap(start)(keys[0])
        z = {name: jnp.asarray(given.get(name, drawn[name]), drawn[name].dtype) for name in names}
        self._sample_fn = self._transition
        return BlockState(z, keys[1])

    def sample(
        self, state: BlockState, model_args: tuple, model_kwargs: Mapping[str, Any] | None
    ) -> BlockState:
        transition = partial(self._transition, model_args=model_args, model_kwargs=model_kwargs)
        return transition(state) if is_prng_key(state.rng_key) else jax.vmap(transition)(state)

    def _transition(
        self, state: BlockState, model_args: tuple, model_kwargs: Mapping[str, Any] | None
    ) -> BlockState:
        held, kwargs = held_values(model_kwargs)
        rng_key, key = random.split(state.rng_key)
        drawn = self._draw(key, dict(state.z), held, model_args, kwargs)
        return BlockState({name: drawn[name].astype(old.dtype) for name, old in state.z.items()}, rng_key)

    def refresh(
        self, state: BlockState, model_args: tuple, model_kwargs: Mapping[str, Any] | None
    ) -> BlockState:
        """Nothing is cached."""
        return state

    def get_constrain_fn(self, model_args: tuple, model_kwargs: Mapping[str, Any] | None) -> Callable:
        """Values are constrained already."""
        return identity

    def postprocess_fn(self, model_args: tuple, model_kwargs: Mapping[str, Any] | None) -> Callable:
        """Values of the sites, and of deterministic ones."""
        held, kwargs = held_values(model_kwargs)

        def replay(z: dict[str, jax.Array]) -> dict[str, jax.Array]:
            traced = full_trace(self._model, {**held, **z}, model_args, kwargs)
            made = {name: site["value"] for name, site in traced.items() if site["type"] == "deterministic"}
            return {**z, **made}

        return replay

    def wrap_model(self, wrapper: Callable) -> "Block":
        kernel = copy.copy(self)
        kernel._model = wrapper(self._model)
        kernel._sample_fn = None
        return kernel

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sample_fn": None}
