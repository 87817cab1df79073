"""What every kernel does to the arguments of its model before it looks at them."""

import inspect
import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import jax
from numpyro.infer.mcmc import MCMCKernel

from numpyro_bnn._checks import argument_error, check_key
from numpyro_bnn.program.arguments import as_arrays, fingerprints, plain_values, with_plain_values

METHODS = ("init", "sample", "refresh", "postprocess_fn", "get_constrain_fn", "members")
CONSTANT_BYTES = 2**27  # constants of a program above this size are reported


class ArgumentKernel(MCMCKernel):
    """A kernel whose methods get the arguments of the model as JAX arrays, and its integers as integers.

    ``MCMC(jit_model_args=True)`` passes every number as a traced array, also a ``batch_size`` that a plate needs to
    know: the kernel remembers those of ``init``.
    """

    _plain: Mapping[str, int | bool] | None = None  # of the last `init`
    _traced = False  # whether some program took them in place of traced values
    _prints: Mapping[str, bytes] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in METHODS:
            if name in cls.__dict__:
                setattr(cls, name, _with_arrays(cls.__dict__[name]))

    def changed_data(self, args: tuple, kwargs: Mapping[str, Any]) -> list[str]:
        """The places of the arguments whose values have changed since the run began."""
        now = fingerprints(args, kwargs)
        return [place for place, value in (self._prints or {}).items() if now.get(place, value) != value]

    def _arguments(self, method: str, args: tuple, kwargs: Mapping[str, Any] | None) -> tuple[tuple, dict[str, Any]]:
        if method == "init":
            self._remember(args, kwargs)
        elif self._plain:
            args, kwargs, traced = with_plain_values(args, kwargs, self._plain)
            self._traced |= traced
        return as_arrays(args, kwargs, f"infer.{type(self).__name__}")

    def _remember(self, args: tuple, kwargs: Mapping[str, Any] | None) -> None:
        plain = plain_values(args, kwargs)
        if self._traced and plain != self._plain:
            got = f"{plain} after a run with {self._plain}, for which its program was compiled"
            instead = "With `jit_model_args=True` make a new kernel and `MCMC` for other sizes."
            raise argument_error("MCMC.run", "model arguments", got, instead)
        self._plain, self._prints = plain, fingerprints(args, kwargs)


def _with_arrays(method: Callable) -> Callable:
    signature, name = inspect.signature(method), method.__name__

    @wraps(method)
    def call(self: Any, *given: Any, **named: Any) -> Any:
        bound = signature.bind(self, *given, **named)
        bound.apply_defaults()
        args, kwargs = bound.arguments["model_args"], bound.arguments["model_kwargs"]
        if name == "init":
            check_key(f"infer.{type(self).__name__}", "rng_key", bound.arguments["rng_key"])
        converted = self._arguments(name, args, kwargs)
        bound.arguments["model_args"], bound.arguments["model_kwargs"] = converted
        if name == "sample":
            _report_constants(bound.arguments["state"], converted)
        return method(*bound.args, **bound.kwargs)

    return call


def _report_constants(state: Any, call: Any) -> None:
    """Warn where ``MCMC`` makes large data constants of its program: it compiles several copies of them."""
    if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(state)):
        return
    arrays = [leaf for leaf in jax.tree.leaves(call) if isinstance(leaf, jax.Array)]
    size = sum(leaf.nbytes for leaf in arrays if not isinstance(leaf, jax.core.Tracer))
    if size > CONSTANT_BYTES:
        warnings.warn(
            f"MCMC: {size / 2**30:.2f} GiB of data are constants of its compiled program, which takes several times"
            " this memory. `MCMC(kernel, ..., jit_model_args=True)` passes them as arguments.",
            stacklevel=2,
        )
