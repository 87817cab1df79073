"""What a run is of: a description in words and hashes, compared before a run is resumed."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer.mcmc import MCMCKernel

from numpyro_bnn._checks import argument_error
from numpyro_bnn.program.reading import Reading
from numpyro_bnn.runs.folder import DENSITY, digest

PACKAGES = ("numpyro_bnn", "numpyro", "jax", "jaxlib")
SEEDS = range(3)  # of prior draws at which the density of a model is compared
DEEPEST = 12  # levels of values in values that are described
LONGEST = 60  # characters of a value in a description


def read_model(call: str, model: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Reading:
    """The model on its data; an error about arguments that it does not take."""
    try:
        return Reading(model, args, kwargs, full=False)
    except (TypeError, NotImplementedError, AttributeError) as cause:
        got = f"arguments with which the model fails ({cause})"
        raise argument_error(call, "args", got, "Pass those that the model takes.") from cause


def described_model(reading: Reading, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, str]:
    """Sites by name with shape and support, data by place, and the log density at three draws from the prior."""
    found = {}
    for name, site in reading.sites.items():
        if site["type"] == "sample":
            kind = "observed" if site["is_observed"] else "latent"
            value = jax.eval_shape(lambda v: v, site["value"])
            found[f"site {name}"] = f"{kind}, {value.dtype}{list(value.shape)}, {type(site['fn'].support).__name__}"
        elif site["type"] == "plate":
            found[f"plate {name}"] = f"{site['args']}"
    leaves, _ = jax.tree_util.tree_flatten_with_path((args, dict(kwargs)))
    for path, leaf in leaves:
        place = jax.tree_util.keystr(path)
        if hasattr(leaf, "dtype"):
            found[f"argument {place}"] = f"{leaf.dtype}{list(leaf.shape)} {digest(leaf)[:16]}"
        else:
            found[f"argument {place}"] = described_value(leaf)
    return found | {DENSITY: _density(reading)}


def _density(reading: Reading) -> str:
    """The summed log density at some draws from the prior: it changes with any part of the model."""

    def total(reading: Reading, values: dict[str, jax.Array]) -> jax.Array:
        sites = [site for site in reading.at(values).values() if site["type"] == "sample"]
        terms = [jnp.asarray(site["fn"].log_prob(site["value"]), float) for site in sites]
        scales = [1.0 if site["scale"] is None else site["scale"] for site in sites]
        return sum((jnp.sum(scale * term) for scale, term in zip(scales, terms, strict=True)), jnp.zeros(()))

    numbers = [float(reading.run(total, values)) for values in reading.draw(SEEDS)]
    return " ".join(f"{number:.9g}" for number in numbers)


def described_options(what: str, method: Any) -> dict[str, str]:
    """Type and options of a kernel or a guide, and of the kernels in it.

    :param what: ``"kernel"`` or ``"guide"``.
    """
    found = {what: type(method).__name__}
    kinds = [kind for kind in type(method).__mro__ if kind is not object]
    names = {name for kind in kinds for name in inspect.signature(kind).parameters}
    for name in sorted(names - {"model"}):
        value = getattr(method, f"_{name}", getattr(method, name, None))
        if isinstance(value, MCMCKernel):
            found |= {f"inner {key}": text for key, text in described_options(what, value).items()}
        elif value is not None:
            found[f"option {name}"] = described_value(value)
    return found


def described_versions() -> dict[str, str]:
    """Versions of packages and the precision: draws are the same bit for bit only in the same ones."""
    return {f"version of {name}": version(name) for name in PACKAGES} | {"precision": str(jnp.result_type(float))}


def described_value(value: Any, depth: int = 0) -> str:
    """A value in a few words: the same in every process, different for different settings."""
    if depth > DEEPEST:
        return "…"
    text = partial(described_value, depth=depth + 1)
    if isinstance(value, MCMCKernel):
        return str(described_options("kernel", value))
    if isinstance(value, jax.Array | np.ndarray):
        return f"{value.dtype}{list(value.shape)} {digest(value)[:16]}"
    if value is None or isinstance(value, str | bytes | bool | int | float | complex | np.generic):
        return repr(value)
    if isinstance(value, Mapping):
        parts = [f"{text(key)}: {text(part)}" for key, part in value.items()]
    elif isinstance(value, list | tuple):
        parts = [text(part) for part in value]
    elif isinstance(value, set | frozenset):
        parts = sorted(text(part) for part in value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [f"{field.name}={text(getattr(value, field.name))}" for field in dataclasses.fields(value)]
    elif isinstance(value, partial):
        parts = [text(value.func), text(value.args), text(value.keywords)]
    elif inspect.isfunction(value):
        return _short(f"{value.__qualname__}{text(_given(value))}")
    elif inspect.ismethod(value):
        return _short(f"{value.__qualname__} of {text(value.__self__)}")
    else:
        return getattr(value, "__qualname__", type(value).__qualname__)
    return _short(f"{type(value).__name__}({', '.join(parts)})")


def _given(function: Callable) -> dict[Any, Any]:
    """The numbers with which a function was made, such as the rate of an optimizer."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    found: dict[Any, Any] = {}
    for name, cell in cells:
        with suppress(ValueError):  # a cell that is not filled yet
            found[name] = cell.cell_contents
    return found | dict(enumerate(function.__defaults__ or ())) | (function.__kwdefaults__ or {})


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 18]}… {digest(text)[:16]}"
