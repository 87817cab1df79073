"""Scales, variances and precisions of normal sites: which of them have a conjugate conditional, and what it is."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import random

from numpyro_bnn._dependence import dependence
from numpyro_bnn._distributions import affine_normal, is_affine_normal, unwrapped
from numpyro_bnn._plates import full_trace
from numpyro_bnn.infer.linear import flat_normal
from numpyro_bnn.symmetry.gig import log_gig

__all__ = ["PRIORS", "Child", "Conjugate", "draw", "independent", "read"]

CLOSE = 1e-3  # of an exponent measured in float32


class Child(NamedTuple):
    """A normal site whose sd is proportional to a power of elements of a scale site.

    :param name: of the child.
    :param owner: for each element of the child, flat, the flat index of the element of the scale that it follows.
    :param follows: whether the element of the child follows any.
    """

    name: str
    owner: np.ndarray
    follows: np.ndarray


class Conjugate(NamedTuple):
    """A site whose conditional is generalized inverse Gaussian, and where that is found.

    :param name: of the site.
    :param power: the sd of its children is proportional to value^power: -1/2 a precision, 1/2 a variance, 1 an sd.
    :param children: sites that depend on it.
    """

    name: str
    power: float
    children: tuple[Child, ...]


class Law(NamedTuple):
    """Density of t > 0 proportional to t^(p - 1) exp(-(a t + b / t) / 2)."""

    p: Any
    a: Any
    b: Any


# ------------------------------------------------------------------------------- hyper-priors: a new one is a row


def _gamma(fn: Any, t: jax.Array, rng_key: jax.Array) -> Law:
    return Law(fn.concentration, 2 * fn.rate, 0.0)


def _exponential(fn: Any, t: jax.Array, rng_key: jax.Array) -> Law:
    return Law(1.0, 2 * fn.rate, 0.0)


def _inverse_gamma(fn: Any, t: jax.Array, rng_key: jax.Array) -> Law:
    return Law(-fn.concentration, 0.0, 2 * fn.rate)


def _half_normal(fn: Any, t: jax.Array, rng_key: jax.Array) -> Law:
    return Law(0.5, fn.scale**-2, 0.0)


def _half_cauchy(fn: Any, t: jax.Array, rng_key: jax.Array) -> Law:
    """t = s^2 is InverseGamma(1/2, r) given r ~ Gamma(1/2, rate = A^2); r is drawn afresh given t each time."""
    rate = random.exponential(rng_key, jnp.shape(t), t.dtype) / (fn.scale**-2 + 1 / t)
    return Law(-0.5, 0.0, 2 * rate)


# (distribution, whether t is the square of the value) -> law of t.
PRIORS: Mapping[tuple[type, bool], Callable[[Any, jax.Array, jax.Array], Law]] = {
    (dist.Gamma, False): _gamma,
    (dist.Chi2, False): _gamma,
    (dist.Exponential, False): _exponential,
    (dist.InverseGamma, False): _inverse_gamma,
    (dist.HalfNormal, True): _half_normal,
    (dist.HalfCauchy, True): _half_cauchy,
}
POWERS = (-0.5, 0.5, -1.0, 1.0)


def draw(
    group: Sequence[Conjugate],
    traced: Mapping[str, dict[str, Any]],
    values: Mapping[str, jax.Array],
    rng_key: jax.Array,
) -> dict[str, jax.Array]:
    r"""One exact draw of scale sites that are independent given everything else.

    With t = value^k, k = 2 \|power\|, elements x_m of the children and their weights :math:`\omega_m` (scales and
    masks of the log density), :math:`n = \sum \omega_m` and
    :math:`S = \sum \omega_m (x_m - \mu_m)^2 / c_m^2` where the sd is :math:`c_m\,t^{\pm 1/2}`, the law (p, a, b) of
    t becomes (p - n/2, a, b + S) for a scale or a variance and (p + n/2, a + S, b) for a precision.

    :param group: what :func:`read` says of the sites, one of :func:`independent`.
    :param traced: trace of the model at the current values of all sites.
    :param values: current values of the sites.
    :return: their new values.
    """
    key, *keys = random.split(rng_key, 1 + len(group))
    laws = [_law(found, traced, values[found.name], k) for found, k in zip(group, keys, strict=True)]
    # One call for all of them: its loop is most of what there is to compile.
    log_t = log_gig(key, *(jnp.concatenate(part) for part in zip(*laws, strict=True)))
    drawn, first = {}, 0
    for found in group:
        value = jnp.asarray(values[found.name])
        each = log_t[first : first + value.size] / (2 * abs(found.power))
        drawn[found.name] = jnp.exp(each).reshape(value.shape).astype(value.dtype)
        first += value.size
    return drawn


def independent(found: Sequence[Conjugate]) -> list[list[Conjugate]]:
    """Neighboring sites without common children: given everything else, they are independent."""
    groups: list[list[Conjugate]] = []
    seen: set[str] = set()
    for one in found:
        children = {child.name for child in one.children}
        if not groups or children & seen:
            groups.append([])
            seen = set()
        groups[-1].append(one)
        seen |= children
    return groups


def _law(found: Conjugate, traced: Mapping[str, dict[str, Any]], value: Any, rng_key: jax.Array) -> Law:
    """Conditional of t, flat, given everything else."""
    flat = jnp.ravel(value)
    number, squares = jnp.zeros_like(flat), jnp.zeros_like(flat)
    for child in found.children:
        observed, mean, sd, weight = flat_normal(traced[child.name])
        weight, square = jnp.where(child.follows, weight, 0.0), ((observed - mean) / sd) ** 2
        powers = jnp.take(flat, child.owner) ** (2 * found.power)  # square is in units of the sd
        number = number.at[child.owner].add(weight)
        squares = squares.at[child.owner].add(jnp.where(weight > 0, weight * square * powers, 0.0))
    k = 2 * abs(found.power)
    base = unwrapped(traced[found.name]["fn"])
    fn = jax.tree.map(lambda leaf: jnp.ravel(jnp.broadcast_to(leaf, jnp.shape(value))), base)
    t = jnp.maximum(flat**k, jnp.finfo(flat.dtype).tiny)
    p, a, b = PRIORS[type(base), k == 2](fn, t, rng_key)
    law = (p - number / 2, a, b + squares) if found.power > 0 else (p + number / 2, a + squares, b)
    return Law(*(jnp.broadcast_to(part, flat.shape) for part in law))


# ------------------------------------------------------------------------------------------------ reading a model


def read(
    model: Callable,
    values: Mapping[str, jax.Array],
    args: tuple,
    kwargs: Mapping[str, Any] | None,
    names: tuple[str, ...],
) -> tuple[dict[str, Conjugate], dict[str, str]]:
    """Find out from the program of a model which sites can be drawn, and why others cannot.

    :param model: a NumPyro model whose ``kwargs`` hold no values of sites.
    :param values: possible constrained values of all latent sites.
    :param names: sites to look at.
    :return: those with a conjugate conditional by name, and for each of the others the reason.
    """

    def parts(at: Mapping[str, jax.Array]) -> dict[tuple[str, str], Any]:
        found: dict[tuple[str, str], Any] = {}
        for name, site in full_trace(model, at, args, kwargs).items():
            if site["type"] != "sample":
                continue
            if is_affine_normal(site["fn"], masked=True):
                loc, scale = affine_normal(site["fn"], masked=True) or (0.0, 1.0)
                found["mean", name], found["sd", name] = loc, scale
            else:
                found["law", name] = site["fn"]
        return found

    used = dependence(parts, values)
    traced = full_trace(model, values, args, kwargs)
    conjugate, reasons = {}, {}
    for name in names:
        found = _read_site(name, traced, used, parts, values)
        if isinstance(found, str):
            reasons[name] = found
        else:
            conjugate[name] = found
    return conjugate, reasons


def _read_site(
    name: str, traced: Mapping[str, Any], used: Mapping[Any, set], parts: Callable, values: Mapping[str, Any]
) -> Conjugate | str:
    law = type(unwrapped(traced[name]["fn"]))
    if law not in {kind for kind, _ in PRIORS}:
        return f"its prior is {law.__name__}, not one of {', '.join(sorted({k.__name__ for k, _ in PRIORS}))}"
    depending = {key for key, sites in used.items() if name in sites}
    for kind, other in sorted(depending):
        if kind != "sd":
            return f"{'the mean of ' if kind == 'mean' else ''}{other!r} depends on it (a centered prior would not)"
    if not depending:
        return "no normal site depends on it"
    followed = [_follow(name, other, parts, values) for _, other in sorted(depending)]
    measured = [found for found in followed if found is not None]
    powers = {power for power, _ in measured}
    if len(measured) < len(followed) or len(powers) != 1:
        return "sds that depend on it are not proportional to one power of one of its elements"
    power = powers.pop()
    if (law, abs(power) == 1) not in PRIORS:
        return f"a {law.__name__} prior is not conjugate where sds are proportional to its power {power:g}"
    return Conjugate(name, power, tuple(child for _, child in measured))


def _follow(name: str, other: str, parts: Callable, values: Mapping[str, Any]) -> tuple[float, Child] | None:
    """Exponent and owners of the sds of ``other``: d log sd / d log value along patterns that spell each index."""
    size = int(np.size(values[name]))
    index = np.arange(size)
    bits = [(index >> bit) & 1 for bit in range(max(1, (size - 1).bit_length()))]
    patterns = np.stack([np.ones(size), *bits, np.cos(index)])

    def log_sd(log_value: jax.Array) -> jax.Array:
        at = {**values, name: jnp.exp(log_value).reshape(jnp.shape(values[name]))}
        return jnp.log(jnp.abs(parts(at)["sd", other])).ravel()

    start = jnp.log(jnp.ravel(values[name]))
    slopes = jax.jit(
        lambda at: jax.vmap(lambda t: jax.jvp(log_sd, (at,), (t,))[1])(jnp.asarray(patterns, start.dtype))
    )
    owners = []
    for shift in (0.0, 0.7 * np.sin(1.0 + index)):
        total, *digits, check = np.asarray(slopes(start + jnp.asarray(shift, start.dtype)), np.float64)
        follows = np.abs(total) > CLOSE
        power = next(
            (p for p in POWERS if follows.any() and np.allclose(total[follows], p, atol=CLOSE)), None
        )
        if power is None:
            return None
        owner = sum((np.rint(digit / power).astype(int) << bit) for bit, digit in enumerate(digits)) * follows
        if owner.min() < 0 or owner.max() >= size:
            return None
        if not np.allclose(check, np.where(follows, power * np.cos(owner), 0.0), atol=CLOSE):
            return None
        owners.append((power, owner, follows))
    (power, owner, follows), again = owners
    if power != again[0] or (owner != again[1]).any():
        return None
    return power, Child(other, owner.astype(np.int32), follows)
