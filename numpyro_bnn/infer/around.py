"""What kernels share that follow another kernel with moves of their own."""

import copy
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
from numpyro.infer.gibbs import GIBBS_SITES_KWARG
from numpyro.infer.hmc import HMC
from numpyro.infer.mcmc import MCMCKernel
from numpyro.infer.util import unconstrain_fn
from numpyro.util import is_prng_key

from numpyro_bnn._checks import argument_error
from numpyro_bnn._keys import split
from numpyro_bnn._plates import full_plates
from numpyro_bnn.infer.placing import place, renew

__all__ = ["Around"]


class Around(MCMCKernel):
    """Any kernel, followed by moves of some sites; the inner kernel then refreshes what it caches.

    A subclass has a state with ``base``, the state of the inner kernel, ``i``, transitions so far, and ``rng_key``;
    it says in ``_prepare`` what it decides once, in ``_start`` the other fields, and in ``_move`` how it moves.

    :param kernel: NUTS, HMC, a kernel of :mod:`numpyro_bnn.infer`, or a :class:`~numpyro.infer.gibbs.Gibbs`; any
        kernel with a model and ``refresh``.
    :raises TypeError: for another one.
    """

    def __init__(self, kernel: MCMCKernel) -> None:
        usable = isinstance(kernel, MCMCKernel) and getattr(kernel, "model", None) is not None
        if not usable or type(kernel).refresh is MCMCKernel.refresh:
            raise argument_error(
                self._call,
                "kernel",
                kernel,
                "Pass a kernel made from a model that has `refresh`, e.g. `NUTS(model)` or `SGLD(model)`.",
                TypeError,
            )
        self._kernel = kernel
        self._num_warmup = 0
        self._sample_fn: Callable | None = None

    @abstractmethod
    def _prepare(self, args: tuple, kwargs: Mapping[str, Any]) -> None:
        """Decide, from the model, what the kernel does; refuse what it cannot do."""

    @abstractmethod
    def _start(self, base: Any, many: tuple[int, ...], rng_key: jax.Array) -> Any:
        """The first state, of one chain or, with ``many`` their number, of vectorized ones."""

    @abstractmethod
    def _move(
        self, state: Any, values: dict[str, jax.Array], rng_key: jax.Array, args: tuple, kwargs: Any
    ) -> tuple[Any, dict[str, jax.Array], Mapping[str, Any]]:
        """The state with its own fields anew, constrained values that have moved, and distributions of their sites.

        :param values: constrained values of all latent sites.
        """

    @property
    def _call(self) -> str:
        return f"infer.{type(self).__name__}"

    @property
    def kernel(self) -> MCMCKernel:
        """The inner kernel."""
        return self._kernel

    @property
    def model(self) -> Callable:
        return self._kernel.model

    @property
    def sample_field(self) -> str:
        return self._kernel.sample_field

    def init(
        self,
        rng_key: jax.Array,
        num_warmup: int,
        init_params: Any = None,
        model_args: tuple = (),
        model_kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        model_kwargs = dict(model_kwargs or {})
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((model_args, model_kwargs))):
            raise argument_error(
                self._call,
                "model_args",
                "arrays that are traced by a transformation",
                "Call `init` once outside of `jit` or `vmap`, and refresh its state with the data inside.",
            )
        # Parallel chains start inside a compiled program; what is decided here must not belong to it.
        with jax.ensure_compile_time_eval():
            self._prepare(model_args, model_kwargs)
        self._num_warmup = num_warmup
        keys = split(rng_key)
        if init_params is not None and GIBBS_SITES_KWARG in model_kwargs and isinstance(self._kernel, HMC):
            # Gibbs passes constrained values to kernels it does not know.
            init_params = unconstrain_fn(full_plates(self.model), model_args, model_kwargs, init_params)
        base = self._kernel.init(
            keys[0], num_warmup, init_params, model_args=model_args, model_kwargs=model_kwargs
        )
        self._sample_fn = self._transition
        return self._start(base, () if is_prng_key(rng_key) else rng_key.shape[:1], keys[1])

    def sample(self, state: Any, model_args: tuple, model_kwargs: Mapping[str, Any] | None) -> Any:
        single = is_prng_key(state.rng_key)
        keys = split(state.rng_key, 3)
        inner = state.base._replace(rng_key=keys[0])
        base = self._kernel.sample(inner, model_args, model_kwargs)
        state = state._replace(base=base, rng_key=keys[1])
        transition = partial(self._transition, model_args=model_args, model_kwargs=model_kwargs)
        state = transition(state, keys[2]) if single else jax.vmap(transition)(state, keys[2])
        return self.refresh(state, model_args, model_kwargs)

    def _transition(
        self, state: Any, rng_key: jax.Array, model_args: tuple, model_kwargs: Mapping[str, Any] | None
    ) -> Any:
        """The moves, of one chain; the inner caches are stale afterwards."""
        kernel = self._kernel
        values = kernel.get_constrain_fn(model_args, model_kwargs)(getattr(state.base, self.sample_field))
        state, moved, prior = self._move(state, values, rng_key, model_args, model_kwargs)
        return state._replace(base=place(kernel, state.base, moved, prior), i=state.i + 1)

    def refresh(self, state: Any, model_args: tuple, model_kwargs: Mapping[str, Any] | None) -> Any:
        return state._replace(base=renew(self._kernel, state.base, model_args, model_kwargs))

    def postprocess_fn(self, model_args: tuple, model_kwargs: Mapping[str, Any] | None) -> Callable:
        return self._kernel.postprocess_fn(model_args, model_kwargs)

    def get_constrain_fn(self, model_args: tuple, model_kwargs: Mapping[str, Any] | None) -> Callable:
        return self._kernel.get_constrain_fn(model_args, model_kwargs)

    def get_diagnostics_str(self, state: Any) -> str:
        return self._kernel.get_diagnostics_str(state.base)

    def wrap_model(self, wrapper: Callable) -> "Around":
        kernel = copy.copy(self)
        kernel._kernel = self._kernel.wrap_model(wrapper)
        kernel._sample_fn = None
        return kernel

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sample_fn": None}

    # -- what an export reads ----------------------------------------------------------------------------

    def describe(self, state: Any) -> dict[str, Any]:
        """Attributes of a run: those of the inner kernel, and its name."""
        inner: dict[str, Any] = getattr(self._kernel, "describe", lambda _: {})(state.base)
        return {**inner, "inner_kernel": type(self._kernel).__name__}

    def members(
        self, state: Any, model_args: tuple, model_kwargs: Mapping[str, Any] | None
    ) -> dict[str, jax.Array]:
        """Where the inner kernel ended its warm start; moves come later."""
        if not hasattr(self._kernel, "members"):
            raise argument_error(
                "to_inference_data",
                "members",
                f"moves around {type(self._kernel).__name__}, which has no warm start",
                "Only kernels of `numpyro_bnn.infer` with `warm_start=` have members.",
            )
        found: dict[str, jax.Array] = self._kernel.members(state.base, model_args, model_kwargs)
        return found

    def divergence_report(self, state: Any) -> str | None:
        """What the inner kernel reports."""
        return getattr(self._kernel, "divergence_report", lambda _: None)(state.base)
