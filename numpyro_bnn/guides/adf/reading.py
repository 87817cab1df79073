"""What AutoADF reads from a call of the model: its trace, and which arguments hold data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers

from numpyro_bnn._checks import argument_error, check_finite, check_same_length
from numpyro_bnn._distributions import is_factor
from numpyro_bnn.program.arguments import Arguments, Call
from numpyro_bnn.program.reading import Reading, Site, Sites

CALL = "guides.AutoADF"


def refuse(site: str, why: str, instead: str) -> Exception:
    """The error for a site that assumed density filtering cannot handle."""
    return argument_error(CALL, "model", f"site {site!r}, {why}", instead)


def read(model: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Reading:
    """What a model is; the guide that reads it may itself run inside NumPyro's handlers."""
    with handlers.block():
        return Reading(model, args, kwargs)


def observed_site(sites: Sites) -> str:
    """The one observed site."""
    seen = []
    for name, site in sites.items():
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
class Data:
    """A call of a model on a data set; its floating-point arrays are in float64."""

    model: Callable
    fixed: Arguments  # without arrays
    rows: dict[str, Any]  # arrays with one row per data point, by place
    arrays: dict[str, Any]  # all other arrays

    @classmethod
    def of(
        cls, model: Callable, args: tuple, kwargs: Mapping[str, Any], is_row: Callable[[str, Any], bool]
    ) -> "Data":
        """Split a call; ``is_row(place, array)`` says which arrays have one row per data point."""
        fixed, arrays = Arguments.of(args, kwargs, model).split()
        arrays = {name: _wide(leaf) for name, leaf in arrays.items()}
        rows = {name: arrays.pop(name) for name in list(arrays) if is_row(name, arrays[name])}
        return cls(model, fixed, rows, arrays)

    @classmethod
    def read(cls, model: Callable, args: tuple, kwargs: Mapping[str, Any]) -> "Data":
        """Split the call on a whole data set: arrays as long as the observation are data."""
        sites = read(model, args, kwargs).sites
        observed = observed_site(sites)
        length = np.shape(sites[observed]["value"])[:1]
        if not length:
            raise refuse(observed, "one number", "Observe an array with one row per data point.")
        found = cls.of(model, args, kwargs, lambda name, leaf: np.shape(leaf)[:1] == length)
        if not found.rows:
            came = f"no array of length {length[0]}, the length of the observation"
            raise argument_error(CALL, "args", came, "Pass the data as arguments.")
        return found

    def like(self, args: tuple, kwargs: Mapping[str, Any], call: str) -> "Data":
        """Split another call in the same way: the arguments that were data before are data again."""
        found = self.of(self.model, args, kwargs, lambda name, leaf: name in self.rows)
        if not found.rows:
            raise argument_error(call, "args", "no data", f"Pass {', '.join(self.rows)}.")
        for name, leaf in found.rows.items():
            of_row = np.shape(self.rows[name])[1:]
            if np.ndim(leaf) == 0 or np.shape(leaf)[1:] != of_row:
                instead = f"Pass (N, {', '.join(map(str, of_row))}), rows as in the run."
                raise argument_error(call, name, f"shape {np.shape(leaf)}", instead)
        check_same_length(call, **{name.replace("'", ""): leaf for name, leaf in found.rows.items()})
        return found

    @property
    def num_rows(self) -> int:
        """Number of data points."""
        return np.shape(next(iter(self.rows.values())))[0]

    def head(self) -> "Data":
        """The same call with its first two rows only: enough to read the model again."""
        return replace(self, rows={name: leaf[:2] for name, leaf in self.rows.items()})

    @property
    def key(self) -> tuple:
        """Everything that a compiled program depends on except the values of the data."""
        shapes = tuple((name, np.shape(leaf), leaf.dtype) for name, leaf in self.rows.items())
        arrays = tuple((name, _fingerprint(value)) for name, value in self.arrays.items())
        return self.fixed, shapes, arrays

    def call(self, rows: Mapping[str, Any], arrays: Mapping[str, Any]) -> Call:
        """Positional and keyword arguments with these rows and arrays."""
        return self.fixed.call({**rows, **arrays})

    def row(self, rows: Mapping[str, Any], arrays: Mapping[str, Any]) -> Call:
        """The call for one data point, without the leading axis."""
        return self.call({name: leaf[None] for name, leaf in rows.items()}, arrays)

    def site(self, name: str, values: Mapping[str, Any], call: Call) -> Site:
        """One site of the model, called in this way, at values of others."""
        return read(self.model, *call).at(values, only=[name])[name]

    def check(self, call: str) -> None:
        """Refuse NaN and infinity in any array."""
        for name, leaf in {**self.rows, **self.arrays}.items():
            if jnp.issubdtype(leaf.dtype, jnp.floating):
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
