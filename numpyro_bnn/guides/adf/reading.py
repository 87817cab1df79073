"""What AutoADF reads from a model: which arguments hold data, and the role of every site."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro import handlers

from numpyro_bnn._checks import argument_error, check_finite, check_same_length
from numpyro_bnn._dependence import dependence
from numpyro_bnn._distributions import affine_normal, is_affine_normal
from numpyro_bnn._plates import full_trace

Trace = dict[str, dict[str, Any]]

CALL = "guides.AutoADF"
# Suffixes of the sites that NumPyro's reparameterizers sample instead of the original site.
REPARAMETERIZED = ("_base", "_decentered")


def refuse(site: str, why: str, instead: str) -> Exception:
    """The error for a site that assumed density filtering cannot handle."""
    return argument_error(CALL, "model", f"site {site!r}, {why}", instead)


def run_model(model: Callable, values: Mapping[str, Any], args: tuple, kwargs: Mapping[str, Any]) -> Trace:
    """Trace of a model with full plates and with these values at latent and deterministic sites."""
    # The traced indices of a plate cannot index a NumPy array.
    args, kwargs = jax.tree.map(
        lambda leaf: jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf, (args, dict(kwargs))
    )
    with handlers.block():  # the guide that reads its model may itself run inside NumPyro's handlers
        return full_trace(model, values, args, kwargs)


def outline(model: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Trace:
    """Trace of a model without any computation: types, shapes, plates; its numbers are placeholders."""
    found: Trace = {}
    jax.eval_shape(lambda: found.update(run_model(model, {}, args, kwargs)))
    return found


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
        observed = _observed_site(trace)
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
        return self.call({name: jnp.asarray(leaf)[None] for name, leaf in rows.items()}, arrays)

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
    """Convert floating-point arrays to float64; leave PRNG keys and integers unchanged."""
    if isinstance(leaf, np.ndarray) or jnp.issubdtype(leaf.dtype, jnp.floating):
        leaf = jnp.asarray(leaf)
        return leaf.astype(jnp.float64) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
    return leaf


@dataclass(frozen=True)
class Weight:
    """A Gaussian weight site: w ~ N(loc, (scale h^power)^2), with h an element of a hyperparameter, or without h.

    :param latent: the site that the model samples: ``w`` itself, or its non-centered ``w_base``.
    :param loc: prior mean, shaped like the site.
    :param scale: prior sd without its hyperparameter.
    :param hyper: name of the hyperparameter.
    :param power: -1/2 for a precision, 1 for a scale, 1/2 for a variance.
    :param element: for every weight, the index of its element in the flattened hyperparameter.
    """

    latent: str
    loc: np.ndarray
    scale: np.ndarray
    hyper: str | None = None
    power: float = 0.0
    element: np.ndarray | None = None

    @property
    def centered(self) -> bool:
        return not self.latent.endswith(REPARAMETERIZED)


@dataclass(frozen=True)
class Sites:
    """Roles of the sites of a model.

    :param weights: Gaussian weights, by the name of the site whose value enters the network.
    :param hyperparameters: distributions of the other latent sites: scales of weights, noise, and sites that the
        data do not inform.
    :param noise: the hyperparameters that the observation depends on.
    :param observed: name of the observed site.
    """

    weights: Mapping[str, Weight]
    hyperparameters: Mapping[str, dist.Distribution]
    noise: tuple[str, ...]
    observed: str


def find_sites(model: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Sites:
    """The role of every site of ``model``, called with the arguments of one data point; refuse other models."""
    trace = outline(model, args, kwargs)
    latent = {n: s for n, s in trace.items() if s["type"] == "sample" and not s["is_observed"]}
    observed = _observed_site(trace)
    _check_latent(trace, latent, observed)
    bases = _reparameterized(trace, latent)
    hypers = [name for name, site in latent.items() if not is_affine_normal(site["fn"], masked=True)]
    weights = {bases.get(name, name): name for name in latent if name not in hypers}
    if not weights:
        raise argument_error(CALL, "model", "no Gaussian latent site", "Give the weights a Normal prior.")
    run = _Runs(model, args, kwargs, trace, weights, hypers)
    reached = run.reached(observed)
    at, distributions = run.priors()
    found = {name: _weight(name, base, reached[name], at) for name, base in weights.items()}
    noise = tuple(name for name in hypers if name in reached[observed])
    _check_roles(found, reached[observed], noise)
    return Sites(found, distributions, noise, observed)


def _observed_site(trace: Trace) -> str:
    """The one observed site."""
    seen = []
    for name, site in trace.items():
        if site["type"] == "sample" and isinstance(site["fn"], dist.Unit):
            instead = "Write an observed `sample`, whose likelihood has a distribution."
            raise refuse(name, "a `factor` statement", instead)
        if site["type"] == "sample" and site["is_observed"] and not site["infer"].get("is_auxiliary"):
            seen.append(name)
            if site["scale"] is not None and np.any(np.asarray(site["scale"]) != 1):
                raise refuse(name, "whose likelihood is scaled", "Remove `handlers.scale`.")
    if len(seen) != 1:
        listed = ", ".join(map(repr, seen)) or "none"
        instead = "Pass the targets; exactly one site must be observed."
        raise argument_error(CALL, "model", f"{len(seen)} observed sites ({listed})", instead)
    return seen[0]


def _check_latent(trace: Trace, latent: Trace, observed: str) -> None:
    data_plates = {frame.name for frame in trace[observed]["cond_indep_stack"]}
    for name, site in latent.items():
        if site["fn"].support.is_discrete:
            raise refuse(name, "which is discrete", "Sum it out, or use MCMC.")
        local = [f.name for f in site["cond_indep_stack"] if f.size == 1 and f.name in data_plates]
        if local:
            why = f"inside the plate {local[0]!r} of the data"
            raise refuse(name, why, "Each data point would have its own weight.")
    for name, site in trace.items():
        if site["type"] in ("param", "mutable"):
            instead = "Give it a prior, or fix it with `handlers.substitute`."
            raise refuse(name, f"a `{site['type']}` site", instead)


def _reparameterized(trace: Trace, latent: Trace) -> dict[str, str]:
    """``{w_base: w}`` for the sites that a reparameterizer samples in another space."""
    found = {}
    for name in latent:
        for suffix in REPARAMETERIZED:
            whole = name.removesuffix(suffix)
            same = whole != name and trace.get(whole, {}).get("type") == "deterministic"
            if same and jnp.shape(trace[whole]["value"]) == jnp.shape(trace[name]["value"]):
                found[name] = whole
    return found


def _gaussian(fn: dist.Distribution) -> tuple[jax.Array, jax.Array]:
    """Mean and sd of a weight site, which is known to be normal."""
    return cast(tuple[jax.Array, jax.Array], affine_normal(fn, masked=True))


@dataclass(frozen=True)
class _Runs:
    """Runs of the model that show how its sites depend on each other."""

    model: Callable
    args: tuple
    kwargs: Mapping[str, Any]
    trace: Trace
    weights: Mapping[str, str]
    hypers: Sequence[str]

    def __call__(self, values: Mapping[str, Any]) -> Trace:
        return run_model(self.model, values, self.args, self.kwargs)

    def shape(self, name: str) -> tuple[int, ...]:
        return np.shape(self.trace[name]["value"])

    def reached(self, observed: str) -> dict[str, set[str]]:
        """The latent sites from which the prior of each weight, and the observation, are computed."""
        values = {name: np.ones(self.shape(name)) for name in (*self.weights, *self.hypers)}

        def programs(values: Mapping[str, Any]) -> dict[str, Any]:
            prior = self({k: v for k, v in values.items() if k in self.hypers})
            found = {
                name: [_gaussian(prior[latent]["fn"]), prior[name]["value"] if name != latent else 0.0]
                for name, latent in self.weights.items()
            }
            whole = self(values)
            hypers = {f"{name} ": jax.tree.leaves(whole[name]["fn"]) for name in self.hypers}
            return {**found, **hypers, observed: jax.tree.leaves(whole[observed]["fn"])}

        reached = dependence(programs, values)
        for name in self.hypers:
            if parents := reached[f"{name} "]:
                why = f"whose prior depends on {sorted(parents)[0]!r}"
                raise refuse(name, why, "Only one level of hyperparameters is supported.")
        return reached

    def priors(self) -> tuple[list[dict], dict[str, dist.Distribution]]:
        """Prior mean and sd of every weight with hyperparameters 1, 2, 3, and 2, 4, 6, ...; priors of the rest.

        The sd of a weight that is not an affine function of its own base is NaN.
        """
        random = np.random.default_rng(0)
        bases = {w: latent for w, latent in self.weights.items() if w != latent}
        probes = {name: random.normal(size=self.shape(name)) for name in bases}
        points = [{w: np.full(p.shape, number) for w, p in probes.items()} for number in (0.0, 1.0)]

        def prior(values: dict) -> dict[str, Any]:
            sites = self(values)
            found = {w: _gaussian(sites[w]["fn"]) for w, latent in self.weights.items() if w == latent}
            at = [self(values | {bases[w]: p for w, p in point.items()}) for point in (*points, probes)]
            for w, latent in bases.items():
                zero, one, checked = (sites[w]["value"] for sites in at)
                mean, sd = _gaussian(at[0][latent]["fn"])
                plain = jnp.isclose(checked, zero + (one - zero) * probes[w]) & (mean == 0) & (sd == 1)
                found[w] = zero, jnp.where(plain, one - zero, jnp.nan)
            return found

        shapes = {name: self.shape(name) for name in self.hypers}
        counts = {n: 1.0 + np.arange(np.prod(s, dtype=int)).reshape(s) for n, s in shapes.items()}
        values = [
            {name: factor * counts[name] ** spread for name in self.hypers}
            for factor, spread in ((1, 0), (2, 0), (3, 0), (2, 1))
        ]

        def program(values: list[dict]) -> tuple[list, dict]:
            sites = self({})
            return [prior(value) for value in values], {name: sites[name]["fn"] for name in self.hypers}

        return jax.device_get(jax.jit(program)(values))


def _weight(name: str, latent: str, parents: set[str], at: list[dict]) -> Weight:
    """Read the prior of a weight site: its mean and sd, and how its hyperparameter scales it."""
    (loc, scale), (loc_doubled, doubled), (_, tripled), (_, counted) = (values[name] for values in at)
    if not np.all(scale > 0):
        why = f"which is not a multiple of a unit normal {latent!r}"
        raise refuse(name, why, "Use independent weights.")
    if len(parents) > 1:
        why = f"scaled by {' and '.join(map(repr, sorted(parents)))}"
        raise refuse(name, why, "Use one hyperparameter per weight.")
    if not parents:
        return Weight(latent, loc, scale)
    (hyper,) = parents
    if not np.allclose(loc, loc_doubled):
        why = f"whose prior mean depends on {hyper!r}"
        raise refuse(name, why, "Only its scale may have a hyperparameter.")
    power = float(np.log2(doubled.flat[0] / scale.flat[0]))
    element = np.full(loc.shape, -1)
    if power:
        element = np.rint((counted / scale) ** (1 / power) / 2 - 1).astype(int)
    if not (
        np.all(element >= 0)
        and np.allclose(doubled / scale, 2**power)
        and np.allclose(tripled / scale, 3**power)
        and np.allclose(counted / scale, (2.0 * element + 2) ** power)
    ):
        why = f"whose sd is not a constant times a power of {hyper!r}"
        raise refuse(name, why, "Scale it by a scale, a variance or a precision.")
    # 32-bit indices work in either precision of JAX.
    return Weight(latent, loc, scale, hyper, round(power, 6), element.astype(np.int32))


def _check_roles(weights: Mapping[str, Weight], reached: set[str], noise: tuple[str, ...]) -> None:
    if not reached & set(weights):
        came = "an observation that does not depend on any Gaussian weight"
        raise argument_error(CALL, "model", came, "Check the prior of the weights.")
    for name, weight in weights.items():
        if weight.hyper in noise:
            why = f"which scales {name!r} and also enters the likelihood"
            instead = "Write the weight centered, or non-centered with `numpyro.infer.reparam`."
            raise refuse(str(weight.hyper), why, instead)
