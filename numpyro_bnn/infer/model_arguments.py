"""What every kernel does to the arguments of its model before it looks at them."""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import is_prng_key

from numpyro_bnn._checks import argument_error
from numpyro_bnn._options import KEY
from numpyro_bnn.program.arguments import (
    as_arrays,
    fingerprints,
    is_table,
    plain_values,
    with_plain_values,
)
from numpyro_bnn.program.compiled import NEEDS_VALUES, TRACING, is_traced

METHODS = ("init", "sample", "refresh", "postprocess_fn", "get_constrain_fn", "members")


def over_chains(fn: Callable, state: Any, *arguments: Any) -> Any:
    """``fn(state, *arguments)``, for each of vectorized chains if there are several."""
    if not is_prng_key(state.rng_key):
        fn = jax.vmap(fn)
    return fn(state, *arguments)


class ArgumentKernel(MCMCKernel):
    """A kernel whose methods get the arguments of the model as JAX arrays, and its
    integers as integers.

    ``MCMC(jit_model_args=True)`` passes every number as a traced array, also a
    ``batch_size`` that a plate needs to know: the kernel remembers those of ``init``.
    """

    _plain: Mapping[str, int | bool] | None = None  # of the last `init`
    _traced = False  # whether some program took them in place of traced values
    _prints: Mapping[str, bytes] | None = None
    # by identity: data of the last run and a reference to a copy; None where it cannot
    # be read
    _inputs: Any = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in METHODS:
            if name in cls.__dict__:
                setattr(cls, name, _with_arrays(cls.__dict__[name]))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sample_fn": None, "_inputs": None}

    def changed_data(self, args: tuple, kwargs: Mapping[str, Any]) -> list[str]:
        """The places of the arguments whose values have changed since the run began."""
        now = fingerprints(args, kwargs)
        changed = []
        for place, value in (self._prints or {}).items():
            if now.get(place, value) != value:
                changed.append(place)
        return changed

    def _arguments(
        self, method: str, args: tuple, kwargs: Mapping[str, Any] | None
    ) -> tuple[tuple, dict[str, Any]]:
        if method != "init" and self._plain:
            args, kwargs, traced = with_plain_values(args, kwargs, self._plain)
            self._traced |= traced
        arrays = as_arrays(args, kwargs, f"infer.{type(self).__name__}")
        if method == "init":
            self._remember(args, kwargs)
        return arrays

    def _as_inputs(
        self, args: tuple, kwargs: Mapping[str, Any] | None
    ) -> tuple[tuple, dict[str, Any]]:
        """Data read from references: a program that ``MCMC`` compiles has them as
        inputs, not copies as constants.
        """

        def read(leaf: Any) -> Any:
            if id(leaf) not in self._inputs:
                (array,), _ = as_arrays((leaf,), None)
                is_array = isinstance(array, jax.Array) and not is_traced(array)
                if not is_array or jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
                    return leaf
                with jax.core.eval_context():
                    # the leaf too, so that its id is not reused
                    self._inputs[id(leaf)] = leaf, jax.new_ref(array)
            return self._inputs[id(leaf)][1][...]

        return jax.tree.map(read, (args, dict(kwargs or {})), is_leaf=is_table)

    def _remember(self, args: tuple, kwargs: Mapping[str, Any] | None) -> None:
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
        self._plain, self._prints = plain, fingerprints(args, kwargs)


def _with_arrays(method: Callable) -> Callable:
    signature, name = inspect.signature(method), method.__name__

    @wraps(method)
    def call(self: Any, *positional: Any, **keywords: Any) -> Any:
        bound = signature.bind(self, *positional, **keywords)
        bound.apply_defaults()
        args, kwargs = bound.arguments["model_args"], bound.arguments["model_kwargs"]

        def run(args: tuple, kwargs: Mapping[str, Any] | None) -> Any:
            converted = self._arguments(name, args, kwargs)
            bound.arguments["model_args"], bound.arguments["model_kwargs"] = converted
            with TRACING:
                return method(*bound.args, **bound.kwargs)

        if name == "init":
            rng_key = bound.arguments["rng_key"]
            KEY.check(f"infer.{type(self).__name__}", "rng_key", rng_key)
            # `pmap` takes no references
            self._inputs = None if is_traced(rng_key) else self._inputs or {}
            # A new run reads its data again: `MCMC` keeps programs by the identity of
            # data; values may change.
            for leaf in jax.tree.leaves((args, dict(kwargs or {})), is_leaf=is_table):
                if id(leaf) in (self._inputs or ()):
                    self._inputs[id(leaf)][1][...] = as_arrays((leaf,), None)[0][0]
        compiled = name == "sample" and is_traced(bound.arguments["state"])
        if compiled and self._inputs is not None:
            try:
                return run(*self._as_inputs(args, kwargs))
            except NEEDS_VALUES:  # data that shape the model are a part of it
                self._inputs = None
        return run(args, kwargs)

    return call
