"""What AutoADF reads from a call of the model: its trace, and which arguments hold data."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers

from numpyro_bnn._checks import argument_error, check_finite, check_same_length
from numpyro_bnn._distributions import is_factor
from numpyro_bnn.program.plates import full_trace

Trace = dict[str, dict[str, Any]]

CALL = "guides.AutoADF"


def refuse(site: str, why: str, instead: str) -> Exception:
    """The error for a site that assumed density filtering cannot handle."""
    return argument_error(CALL, "model", f"site {site!r}, {why}", instead)


def run_model(model: Callable, values: Mapping[str, Any], args: tuple, kwargs: Mapping[str, Any]) -> Trace:
    """Trace of a model with full plates and with these values at latent and deterministic sites."""
    # The traced indices of a plate cannot index a NumPy array.
    values, args, kwargs = jax.tree.map(
        lambda leaf: jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf, (dict(values), args, dict(kwargs))
    )
    with handlers.block():  # the guide that reads its model may itself run inside NumPyro's handlers
        return full_trace(model, values, args, kwargs)


def outline(model: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Trace:
    """Trace of a model without any computation: types, shapes, plates; its numbers are placeholders."""
    found: Trace = {}
    jax.eval_shape(lambda: found.update(run_model(model, {}, args, kwargs)))
    return found


def observed_site(trace: Trace) -> str:
    """The one observed site."""
    seen = []
    for name, site in trace.items():
        if site["type"] == "sample" and is_factor(site["fn"]):
            instead = "Write an observed `sample`, whose likelihood has a distribution."
            raise refuse(name, "a `factor` statement", instead)
        if site["type"] == "sample" and site["is_observed"] and not site["infer"].get("is_auxiliary"):
            seen.append(name)
            if is_scaled(site):
                raise refuse(name, "whose likelihood is scaled", "Remove `handlers.scale`.")
    if len(seen) != 1:
        listed = ", ".join(map(repr, seen)) or "none"
        instead = "Pass the targets; exactly one site must be observed."
        raise argument_error(CALL, "model", f"{len(seen)} observed sites ({listed})", instead)
    return seen[0]


def is_scaled(site: Mapping[str, Any]) -> bool:
    """Whether the log density of a site has a factor other than 1."""
    scale = site["scale"]
    return scale is not None and (isinstance(scale, jax.core.Tracer) or bool(np.any(np.asarray(scale) != 1)))


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call in three kinds: arrays with one row per data point, other arrays, everything else.

    :param structure: pytree structure, to reassemble the call.
    :param names: path of each leaf, e.g. ``x`` or ``inputs['x']``.
    :param kinds: "row", "array" or "static" for each leaf.
    :param leaves: the leaves; floating-point arrays are in float64.
    """

    model: Callable
    structure: Any
    names: tuple[str, ...]
    kinds: tuple[str, ...]
    leaves: tuple[Any, ...]

    @classmethod
    def of(
        cls,
        model: Callable,
        args: tuple,
        kwargs: Mapping[str, Any],
        is_row: Callable[[str, Any], bool] = lambda name, leaf: False,
    ) -> "Arguments":
        """Split a call; ``is_row(name, array)`` says which arrays have one row per data point."""
        bound = inspect.signature(model).bind(*args, **kwargs).arguments
        flat, structure = jax.tree_util.tree_flatten_with_path(dict(bound))
        names = tuple(str(path[0].key) + jax.tree_util.keystr(path[1:]) for path, _ in flat)
        kinds, leaves = [], []
        for name, (_, leaf) in zip(names, flat, strict=True):
            array = hasattr(leaf, "dtype")
            kinds.append("row" if array and is_row(name, leaf) else "array" if array else "static")
            leaves.append(_wide(leaf) if array else leaf)
        return cls(model, structure, names, tuple(kinds), tuple(leaves))

    @classmethod
    def read(cls, model: Callable, args: tuple, kwargs: Mapping[str, Any]) -> "Arguments":
        """Split the call on a whole data set: arrays as long as the observation are data."""
        whole = cls.of(model, args, kwargs)
        trace: Trace = {}
        arrays = whole.part("array")
        jax.eval_shape(lambda arrays: trace.update(run_model(model, {}, *whole.call({}, arrays))), arrays)
        observed = observed_site(trace)
        shape = np.shape(trace[observed]["value"])
        if not shape:
            raise refuse(observed, "one number", "Observe an array with one row per data point.")
        num_rows = shape[0]
        found = cls.of(model, args, kwargs, lambda name, leaf: np.shape(leaf)[:1] == (num_rows,))
        if "row" not in found.kinds:
            came = f"no array of length {num_rows}, the length of the observation"
            raise argument_error(CALL, "args", came, "Pass the data as arguments.")
        return found

    def like(self, args: tuple, kwargs: Mapping[str, Any], call: str) -> "Arguments":
        """Split another call in the same way: the arguments that were data before are data again."""
        known = self.part("row")
        found = type(self).of(self.model, args, kwargs, lambda name, leaf: name in known)
        rows = found.part("row")
        if not rows:
            raise argument_error(call, "args", "no data", f"Pass {', '.join(known)}.")
        for name, leaf in rows.items():
            if np.ndim(leaf) == 0 or np.shape(leaf)[1:] != np.shape(known[name])[1:]:
                expected = ", ".join(map(str, np.shape(known[name])[1:]))
                instead = f"Pass (N, {expected}), rows as in the run."
                raise argument_error(call, name, f"shape {np.shape(leaf)}", instead)
        check_same_length(call, **{name.replace("'", ""): leaf for name, leaf in rows.items()})
        return found

    @property
    def num_rows(self) -> int:
        """Number of data points."""
        return np.shape(next(iter(self.part("row").values())))[0]

    def head(self) -> "Arguments":
        """The same call with its first two rows only: enough to read the model again."""
        pairs = zip(self.kinds, self.leaves, strict=True)
        return replace(self, leaves=tuple(leaf[:2] if kind == "row" else leaf for kind, leaf in pairs))

    def part(self, kind: str) -> dict[str, Any]:
        """The leaves of one kind, by name."""
        return {n: leaf for n, k, leaf in zip(self.names, self.kinds, self.leaves, strict=True) if k == kind}

    @property
    def key(self) -> tuple:
        """Everything that a compiled program depends on except the values of the data."""
        shapes = tuple((name, np.shape(leaf), leaf.dtype) for name, leaf in self.part("row").items())
        static = tuple((name, repr(value)) for name, value in self.part("static").items())
        arrays = tuple((name, _fingerprint(value)) for name, value in self.part("array").items())
        return self.structure, self.kinds, shapes, static, arrays

    def call(self, rows: Mapping[str, Any], arrays: Mapping[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Positional and keyword arguments with these rows and arrays."""
        given = {"row": rows, "array": arrays}
        leaves = [
            given[kind][name] if kind in given else leaf
            for name, kind, leaf in zip(self.names, self.kinds, self.leaves, strict=True)
        ]
        bound = inspect.signature(self.model).bind_partial()
        bound.arguments.update(jax.tree.unflatten(self.structure, leaves))
        return bound.args, bound.kwargs

    def row(self, rows: Mapping[str, Any], arrays: Mapping[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """The call for one data point, without the leading axis."""
        return self.call({name: leaf[None] for name, leaf in rows.items()}, arrays)

    def check(self, call: str) -> None:
        """Refuse NaN and infinity in any argument."""
        for name, leaf in zip(self.names, self.leaves, strict=True):
            if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating):
                check_finite(call, name, leaf)


def _fingerprint(value: Any) -> Any:
    """The value itself if it is concrete, because what the guide reads from a model may depend on it."""
    if isinstance(value, jax.core.Tracer) or jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return np.shape(value)
    return np.shape(value), np.asarray(value).tobytes()


def _wide(leaf: Any) -> Any:
    """Convert floating-point arrays to float64, on the host; leave PRNG keys and integers unchanged."""
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    return (leaf if isinstance(leaf, jax.core.Tracer) else np.asarray(leaf)).astype(np.float64)
