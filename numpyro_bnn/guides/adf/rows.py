"""Arguments of a model, and the model run on one row of them."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.distributions import Unit

from numpyro_bnn import _checks
from numpyro_bnn._checks import argument_error
from numpyro_bnn._plates import full_trace

__all__ = ["Arguments", "outline", "run_model"]

Trace = dict[str, dict[str, Any]]


def run_model(model: Callable, values: Mapping[str, Any], args: tuple, kwargs: Mapping[str, Any]) -> Trace:
    """Trace of a model with plates full and with these values at latent and deterministic sites.

    >>> import numpyro, numpyro.distributions as dist
    >>> run_model(lambda: numpyro.sample("w", dist.Normal(0.0, 1.0)), {"w": 3.0}, (), {})["w"]["value"]
    3.0
    """
    # A NumPy array cannot be indexed with the traced indices of a plate.
    args, kwargs = jax.tree.map(_as_jax, (args, dict(kwargs)))
    with handlers.block():  # a guide that reads its model may itself be running in NumPyro's handlers
        return full_trace(model, values, args, kwargs)


def outline(model: Callable, values: Mapping[str, Any], args: tuple, kwargs: Mapping[str, Any]) -> Trace:
    """The same trace without computing anything: types, shapes, plates; its numbers are placeholders.

    >>> import numpyro, numpyro.distributions as dist
    >>> sites = outline(lambda: numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3])), {}, (), {})
    >>> sites["w"]["value"].shape
    (3,)
    """
    found: Trace = {}
    jax.eval_shape(lambda: found.update(run_model(model, values, args, kwargs)))
    return found


@dataclass(frozen=True)
class Arguments:
    """Arguments of a call in three parts: arrays with one row per data point, other arrays, everything else.

    :param structure: how to put them together again.
    :param names: path of each leaf, e.g. ``x`` or ``inputs['x']``.
    :param kinds: "row", "array" or "static" for each leaf.
    :param leaves: the leaves.

    >>> def model(x, y=None, batch_size=None): ...
    >>> with jax.enable_x64(True):
    ...     found = Arguments.of(model, (np.ones((5, 2)),), {"batch_size": 3}, rows=lambda name, leaf: name == "x")
    >>> dict(zip(found.names, found.kinds)), found.num_rows
    ({'batch_size': 'static', 'x': 'row'}, 5)
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
        rows: Callable[[str, Any], bool] = lambda name, leaf: False,
    ) -> "Arguments":
        """Take a call apart; ``rows`` tells which arrays have a row per data point."""
        bound = inspect.signature(model).bind(*args, **kwargs)
        flat, structure = jax.tree_util.tree_flatten_with_path(dict(bound.arguments))
        names = tuple(_path_name(path) for path, _ in flat)
        kinds, leaves = [], []
        for name, (_, leaf) in zip(names, flat, strict=True):
            array = hasattr(leaf, "dtype")
            kinds.append("row" if array and rows(name, leaf) else "array" if array else "static")
            leaves.append(_wide(leaf) if array else leaf)
        return cls(model, structure, names, tuple(kinds), tuple(leaves))

    @classmethod
    def read(cls, model: Callable, args: tuple, kwargs: Mapping[str, Any]) -> "Arguments":
        """Take the call on a whole data set apart: data are the arrays as long as the observation."""
        whole = cls.of(model, args, kwargs)
        num_rows = _observed_length(whole)
        found = cls.of(
            model, args, kwargs, lambda name, leaf: np.ndim(leaf) > 0 and np.shape(leaf)[0] == num_rows
        )
        if "row" not in found.kinds:
            raise argument_error(
                "guides.AutoADF",
                "args",
                f"no array of length {num_rows}, as the observation",
                "Pass the data as arguments.",
            )
        return found

    def like(self, args: tuple, kwargs: Mapping[str, Any], call: str) -> "Arguments":
        """Take another call apart: data are the arguments that were data before."""
        known = self.part("row")
        found = type(self).of(self.model, args, kwargs, lambda name, leaf: name in known)
        rows = found.part("row")
        if not rows:
            raise argument_error(call, "args", "no data", f"Pass {', '.join(known)}.")
        for name, leaf in rows.items():
            if np.ndim(leaf) == 0 or np.shape(leaf)[1:] != np.shape(known[name])[1:]:
                expected = ", ".join(map(str, np.shape(known[name])[1:]))
                raise argument_error(
                    call, name, f"shape {np.shape(leaf)}", f"Pass (N, {expected}), rows as in the run."
                )
        _checks.check_same_length(call, **{name.replace("'", ""): leaf for name, leaf in rows.items()})
        return found

    @property
    def num_rows(self) -> int:
        """Number of data points."""
        return np.shape(next(iter(self.part("row").values())))[0]

    def head(self) -> "Arguments":
        """The same call with its first two rows: enough to read the model again."""
        pairs = zip(self.kinds, self.leaves, strict=True)
        return replace(self, leaves=tuple(leaf[:2] if kind == "row" else leaf for kind, leaf in pairs))

    def part(self, kind: str) -> dict[str, Any]:
        """The leaves of one kind, by name."""
        return {n: leaf for n, k, leaf in zip(self.names, self.kinds, self.leaves, strict=True) if k == kind}

    @property
    def key(self) -> tuple:
        """What a compiled program depends on besides the values of the data."""
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
        """The call for one data point, whose leaves lack the leading axis."""
        return self.call({name: jnp.asarray(leaf)[None] for name, leaf in rows.items()}, arrays)

    def check(self, call: str) -> None:
        """Refuse NaN and infinity in any argument."""
        for name, leaf in zip(self.names, self.leaves, strict=True):
            if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating):
                _checks.check_finite(call, name, leaf)


def _observed_length(arguments: Arguments) -> int:
    """Length of the observed site, without running the model."""
    found: dict[str, tuple] = {}

    def shapes(arrays: Mapping[str, Any]) -> None:
        trace = run_model(arguments.model, {}, *arguments.call({}, arrays))
        for name, site in trace.items():
            if site["type"] == "sample" and isinstance(site["fn"], Unit):
                instead = "Its likelihood has no distribution; write an observed `sample`."
                raise argument_error(
                    "guides.AutoADF", "model", f"site {name!r}, a `factor` statement", instead
                )
            if site["type"] == "sample" and site["is_observed"] and not site["infer"].get("is_auxiliary"):
                found[name] = np.shape(site["value"])

    jax.eval_shape(shapes, arguments.part("array"))
    if len(found) != 1:
        listed = ", ".join(map(repr, found)) or "none"
        raise argument_error(
            "guides.AutoADF",
            "model",
            f"{len(found)} observed sites ({listed})",
            "Pass the targets; one site must be observed.",
        )
    ((name, shape),) = found.items()
    if not shape:
        raise argument_error(
            "guides.AutoADF",
            "model",
            f"site {name!r}, one number",
            "Observe an array with one row per data point.",
        )
    return shape[0]


def _path_name(path: tuple) -> str:
    return str(path[0].key) + jax.tree_util.keystr(path[1:])


def _as_jax(leaf: Any) -> Any:
    return jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf


def _fingerprint(value: Any) -> Any:
    """The value itself where it can be known: what the guide reads from a model may depend on it."""
    if isinstance(value, jax.core.Tracer) or jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return np.shape(value)
    return np.shape(value), np.asarray(value).tobytes()


def _wide(leaf: Any) -> Any:
    """Floating arrays in float64; a PRNG key and integers as they are."""
    if isinstance(leaf, np.ndarray) or jnp.issubdtype(leaf.dtype, jnp.floating):
        leaf = jnp.asarray(leaf)
        return leaf.astype(jnp.float64) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
    return leaf
