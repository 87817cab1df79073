"""Roles of the sites of a model: Gaussian weights, their scales, the noise, the observation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

from numpyro_bnn._checks import argument_error
from numpyro_bnn._dependence import dependence
from numpyro_bnn._distributions import affine_normal, is_affine_normal
from numpyro_bnn.guides.adf.rows import Trace, outline, run_model

__all__ = ["Sites", "Weight", "find_sites", "refuse"]

CALL = "guides.AutoADF"
# Suffixes that NumPyro's reparameterizers give to the site they sample instead of the one in the model.
REPARAMETERizED = ("_base", "_decentered")


@dataclass(frozen=True)
class Weight:
    """A Gaussian weight site: w ~ N(loc, (scale h^power)^2), with h an element of a hyper-site, or no h at all.

    :param latent: the site that the model samples: ``w`` itself, or its non-centered ``w_base``.
    :param loc: prior mean, shaped like the site.
    :param scale: prior sd without its hyper-site.
    :param hyper: name of the hyper-site.
    :param power: -1/2 for a precision, 1 for a scale, 1/2 for a variance.
    :param element: for every weight the index of its element in the flattened hyper-site.
    """

    latent: str
    loc: np.ndarray
    scale: np.ndarray
    hyper: str | None = None
    power: float = 0.0
    element: np.ndarray | None = None

    @property
    def centered(self) -> bool:
        return not self.latent.endswith(REPARAMETERizED)


@dataclass(frozen=True)
class Sites:
    """What :func:`find_sites` finds.

    :param weights: Gaussian weights by the name of the site whose value enters the network.
    :param others: distributions of the other latent sites: hyper-sites, noise, and what the data do not touch.
    :param noise: those of ``others`` that the observation depends on.
    :param observed: name of the observation site.
    """

    weights: Mapping[str, Weight]
    others: Mapping[str, dist.Distribution]
    noise: tuple[str, ...]
    observed: str

    @property
    def hypers(self) -> set[str]:
        """Sites that scale weights."""
        return {weight.hyper for weight in self.weights.values() if weight.hyper}


def refuse(site: str, why: str, instead: str) -> Exception:
    """The error for a site that assumed density filtering cannot take."""
    return argument_error(CALL, "model", f"site {site!r}, {why}", instead)


def _gaussian(fn: dist.Distribution) -> tuple[jax.Array, jax.Array]:
    """Mean and sd of a weight site, which is known to be normal."""
    return cast(tuple[jax.Array, jax.Array], affine_normal(fn, masked=True))


def find_sites(model: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Sites:
    """Find the role of every site of ``model`` called with the arguments of one data point.

    :raises ValueError: naming the site that cannot be handled, and why.

    >>> import numpyro
    >>> def model(x, y=None):
    ...     tau = numpyro.sample("tau", dist.Gamma(6.0, 6.0))
    ...     w = numpyro.sample("w", dist.Normal(0.0, tau**-0.5).expand([2]))
    ...     numpyro.sample("y", dist.Normal(x @ w, 0.1), obs=y)
    >>> found = find_sites(model, (np.ones((1, 2)), np.ones(1)), {})
    >>> found.weights["w"].hyper, found.weights["w"].power, found.observed
    ('tau', -0.5, 'y')
    """
    trace = outline(model, {}, args, kwargs)
    latent = {n: s for n, s in trace.items() if s["type"] == "sample" and not s["is_observed"]}
    observed = _observation(trace)
    _check_latent(trace, latent)
    bases = _reparameterized(trace, latent)
    others = [name for name, site in latent.items() if not is_affine_normal(site["fn"], masked=True)]
    weights = {bases.get(name, name): name for name in latent if name not in others}
    if not weights:
        raise argument_error(CALL, "model", "no Gaussian latent site", "Give the weights a Normal prior.")
    reached = _reached(model, args, kwargs, trace, weights, others, observed)
    at, distributions = _priors(model, args, kwargs, trace, weights, others)
    found = {name: _weight(name, base, reached[name], at) for name, base in weights.items()}
    noise = tuple(name for name in others if name in reached[observed])
    _check_roles(found, reached[observed], noise)
    return Sites(found, distributions, noise, observed)


def _observation(trace: Trace) -> str:
    """The one observed site."""
    seen = [
        n
        for n, s in trace.items()
        if s["type"] == "sample" and s["is_observed"] and not s["infer"].get("is_auxiliary")
    ]
    for name in seen:
        if trace[name]["scale"] is not None and np.any(np.asarray(trace[name]["scale"]) != 1):
            raise refuse(name, "whose likelihood is scaled", "Leave `handlers.scale` away.")
    if len(seen) != 1:
        listed = ", ".join(map(repr, seen)) or "none"
        raise argument_error(
            CALL,
            "model",
            f"{len(seen)} observed sites ({listed})",
            "Pass targets to the model; one site must be observed.",
        )
    return seen[0]


def _check_latent(trace: Trace, latent: Trace) -> None:
    for name, site in latent.items():
        if site["fn"].support.is_discrete:
            raise refuse(name, "which is discrete", "Sum it out, or use MCMC.")
        local = [f.name for f in site["cond_indep_stack"] if f.size == 1 and f.name in _data_plates(trace)]
        if local:
            raise refuse(
                name,
                f"inside the plate {local[0]!r} of the data",
                "Each data point would have a weight of its own.",
            )
    for name, site in trace.items():
        if site["type"] in ("param", "mutable"):
            raise refuse(
                name, f"a `{site['type']}` site", "Give it a prior, or fix it with `handlers.substitute`."
            )


def _data_plates(trace: Trace) -> set[str]:
    observed = [s for s in trace.values() if s["type"] == "sample" and s["is_observed"]]
    return {frame.name for site in observed for frame in site["cond_indep_stack"]}


def _reparameterized(trace: Trace, latent: Trace) -> dict[str, str]:
    """``{w_base: w}`` of the sites that a reparameterizer samples in another space."""
    found = {}
    for name in latent:
        for suffix in REPARAMETERizED:
            whole = name.removesuffix(suffix)
            same = whole != name and trace.get(whole, {}).get("type") == "deterministic"
            if same and jnp.shape(trace[whole]["value"]) == jnp.shape(trace[name]["value"]):
                found[name] = whole
    return found


def _reached(
    model: Callable,
    args: tuple,
    kwargs: Mapping[str, Any],
    trace: Trace,
    weights: Mapping[str, str],
    others: Sequence[str],
    observed: str,
) -> dict[str, set[str]]:
    """Which latent sites the prior of each weight, and the observation, are computed from."""
    values = {name: np.ones(np.shape(trace[name]["value"])) for name in (*weights, *others)}

    def programs(values):
        ahead = run_model(model, {k: v for k, v in values.items() if k in others}, args, kwargs)
        found = {
            name: [_gaussian(ahead[latent]["fn"]), ahead[name]["value"] if name != latent else 0.0]
            for name, latent in weights.items()
        }
        whole = run_model(model, values, args, kwargs)
        hyper = {f"{name} ": jax.tree.leaves(whole[name]["fn"]) for name in others}
        return {**found, **hyper, observed: jax.tree.leaves(whole[observed]["fn"])}

    reached = dependence(programs, values)
    for name in others:
        if parents := reached[f"{name} "]:
            raise refuse(
                name,
                f"whose prior depends on {sorted(parents)[0]!r}",
                "One level of hyper-sites is supported.",
            )
    return reached


def _priors(
    model: Callable,
    args: tuple,
    kwargs: Mapping[str, Any],
    trace: Trace,
    weights: Mapping[str, str],
    others: Sequence[str],
) -> tuple[list[dict], dict[str, dist.Distribution]]:
    """Prior mean and sd of every weight where hyper-sites are 1, are 2, are 3, are 2, 4, 6, ...; priors of the rest.

    The sd of a weight that is more than an affine function of its own base comes out as NaN.
    """
    random = np.random.default_rng(0)
    bases = {w: latent for w, latent in weights.items() if w != latent}
    probes = {name: random.normal(size=np.shape(trace[name]["value"])) for name in bases}
    shapes = {name: np.shape(trace[name]["value"]) for name in others}
    counts = {
        name: 1.0 + np.arange(np.prod(shape, dtype=int)).reshape(shape) for name, shape in shapes.items()
    }
    hypers = [
        {n: factor * counts[n] ** spread for n in others}
        for factor, spread in ((1, 0), (2, 0), (3, 0), (2, 1))
    ]

    def prior(values: dict) -> dict[str, Any]:
        sites = run_model(model, values, args, kwargs)
        found = {w: _gaussian(sites[w]["fn"]) for w, latent in weights.items() if w == latent}
        points = (
            {w: np.zeros(p.shape) for w, p in probes.items()},
            {w: np.ones(p.shape) for w, p in probes.items()},
            probes,
        )
        at = [
            run_model(model, values | {bases[w]: p for w, p in point.items()}, args, kwargs)
            for point in points
        ]
        for w, latent in bases.items():
            zero, one, checked = (sites[w]["value"] for sites in at)
            mean, sd = _gaussian(at[0][latent]["fn"])
            plain = jnp.isclose(checked, zero + (one - zero) * probes[w]) & (mean == 0) & (sd == 1)
            found[w] = zero, jnp.where(plain, one - zero, jnp.nan)
        return found

    def program(hypers: list[dict]) -> tuple[list, dict]:
        sites = run_model(model, {}, args, kwargs)
        return [prior(values) for values in hypers], {name: sites[name]["fn"] for name in others}

    at, distributions = jax.device_get(jax.jit(program)(hypers))
    return at, distributions


def _weight(name: str, latent: str, parents: set[str], at: list[dict]) -> Weight:
    """Read the prior of a weight site: its mean and sd, and how its hyper-site scales it."""
    (loc, scale), (loc_doubled, doubled), (_, tripled), (_, told) = (values[name] for values in at)
    if not np.all(scale > 0):
        raise refuse(name, f"which is no multiple of a unit normal {latent!r}", "Use independent weights.")
    if len(parents) > 1:
        raise refuse(
            name, f"scaled by {' and '.join(map(repr, sorted(parents)))}", "One hyper-site per weight."
        )
    if not parents:
        return Weight(latent, loc, scale)
    (hyper,) = parents
    if not np.allclose(loc, loc_doubled):
        raise refuse(name, f"whose prior mean depends on {hyper!r}", "Only its scale may have a hyper-site.")
    power = float(np.log2(doubled.flat[0] / scale.flat[0]))
    element = np.rint((told / scale) ** (1 / power) / 2 - 1).astype(int) if power else np.full(loc.shape, -1)
    if not (
        np.all(element >= 0)
        and np.allclose(doubled / scale, 2**power)
        and np.allclose(tripled / scale, 3**power)
        and np.allclose(told / scale, (2.0 * element + 2) ** power)
    ):
        raise refuse(
            name,
            f"whose sd is no constant times a power of {hyper!r}",
            "Scale it by a scale, a variance or a precision.",
        )
    # 32 bits index in either precision of JAX.
    return Weight(latent, loc, scale, hyper, round(power, 6), element.astype(np.int32))


def _check_roles(weights: Mapping[str, Weight], reached: set[str], noise: tuple[str, ...]) -> None:
    if not reached & set(weights):
        raise argument_error(
            CALL, "model", "an observation that no Gaussian weight reaches", "Check the prior of the weights."
        )
    for name, weight in weights.items():
        if weight.hyper in noise:
            raise refuse(
                str(weight.hyper),
                f"which scales {name!r} and enters the likelihood as well",
                "Write the weight centered, or non-centered with `numpyro.infer.reparam`.",
            )
