"""Which sites have a conjugate conditional given the normal sites that they scale, read from a model's program."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer.gibbs import latent_sample_sites

from numpyro_bnn._distributions import affine_normal, is_affine_normal, unwrapped
from numpyro_bnn._jaxprs import dependence, needed_equations, pruned, reached
from numpyro_bnn.infer.linear_structure import weights
from numpyro_bnn.program.plates import full_trace

POWERS = (-0.5, 0.5, -1.0, 1.0)
# Tolerance of logarithms and exponents in float32, and the logarithms between which sds must be powers.
CLOSE, REACH = 1e-3, 40.0
# Operations besides comparisons, which return booleans, that cut numbers into pieces.
PIECEWISE = {
    *("ceil", "clamp", "cond", "floor", "max", "min", "reduce_max", "reduce_min"),
    *("rem", "round", "sign", "sort", "while"),
}


class ScaledSite(NamedTuple):
    """A normal site whose sd is proportional to a power of elements of a scale site.

    :param owner: flat index, for each element of the site, of the element of the scale site that scales it.
    :param follows: for each element of the site, whether the scale site scales it at all.
    """

    name: str
    owner: np.ndarray
    follows: np.ndarray


class ConjugateSite(NamedTuple):
    """A scale site whose conditional is generalized inverse Gaussian.

    :param power: the sd of its children is proportional to value^power: -1/2 a precision, 1/2 a variance, 1 an sd.
    """

    name: str
    power: float
    children: tuple[ScaledSite, ...]


def read(
    model: Callable, held: Collection[str], priors: Collection[Any], args: tuple, kwargs: Mapping[str, Any]
) -> dict[str, ConjugateSite | str]:
    """By latent site that is not held, how to draw it, or the reason why it cannot be drawn.

    :param priors: pairs of a distribution that can be drawn, and whether for sites whose values are sds.
    """
    traced = full_trace(model, {}, args, kwargs)
    latent = latent_sample_sites(traced)
    values = {name: jnp.asarray(traced[name]["value"]) for name in latent}

    def parts(at: Mapping[str, jax.Array]) -> dict[tuple[str, str], Any]:
        """Whatever may enter the log density of a sample site, besides the value of a latent one."""
        found: dict[tuple[str, str], Any] = {}
        for name, site in full_trace(model, at, args, kwargs).items():
            if site["type"] != "sample":
                continue
            found["scale of the log density", name] = site["scale"]
            if site["is_observed"]:
                found["observed value", name] = site["value"]
            if is_affine_normal(site["fn"], masked=True):
                found["mean", name], found["sd", name] = affine_normal(site["fn"], masked=True) or (0.0, 1.0)
                found["mask", name] = weights({"fn": site["fn"], "scale": None})
            else:
                found["distribution", name] = site["fn"]
        return found

    used = dependence(parts, values)
    found: dict[str, ConjugateSite | str] = {}
    for name in latent:
        if name not in held:
            depending = sorted(key for key, sites in used.items() if name in sites)
            prior = type(unwrapped(traced[name]["fn"]))
            found[name] = _read_site(name, prior, priors, depending, partial(_follow, name, parts, values))
    return found


def _read_site(
    name: str, prior: type, priors: Collection[Any], depending: list[tuple[str, str]], follow: Callable
) -> ConjugateSite | str:
    kinds = sorted({kind.__name__ for kind, _ in priors})
    if prior.__name__ not in kinds:
        return f"its prior is {prior.__name__}, not one of {', '.join(kinds)}"
    for kind, other in depending:
        if kind != "sd":
            hint = " (a centered prior would not)" if kind in ("distribution", "mean") else ""
            return f"the {kind} of {other!r} depends on it{hint}"
    if not depending:
        return "no normal site depends on it"
    followed = [follow(other) for _, other in depending]
    measured = [found for found in followed if found is not None]
    powers = {power for power, _ in measured}
    if len(measured) < len(followed) or len(powers) != 1:
        return "sds that depend on it are not proportional to one power of one of its elements"
    power = powers.pop()
    if (prior, abs(power) == 1) not in priors:
        return f"a {prior.__name__} prior is not conjugate where sds are proportional to its power {power:g}"
    return ConjugateSite(name, power, tuple(child for _, child in measured))


def _follow(name: str, parts: Callable, values: Mapping[str, Any], other: str) -> tuple[float, ScaledSite] | None:
    """Exponent and owners of the sds of ``other``, from the effects of steps in log value that encode indices.

    ``None`` if sds are not products of powers: checked in the program, and at values over most of the floats.
    """
    size = int(np.size(values[name]))
    index = np.arange(size)
    bits = [(index >> bit) & 1 for bit in range(max(1, (size - 1).bit_length()))]
    steps = np.stack([np.ones(size), *bits, *(REACH * np.cos(np.linspace(0, 3, 33)[:, None] + index))])

    def log_sds(log_value: jax.Array) -> jax.Array:
        at = {**values, name: jnp.exp(log_value).reshape(jnp.shape(values[name]))}
        return jnp.log(jnp.abs(parts(at)["sd", other])).ravel()

    start = jnp.full(size, 0.1, values[name].dtype)
    with jax.disable_jit():  # one program without programs inside
        log_sd = pruned(log_sds, start)
    if _is_piecewise(jax.make_jaxpr(log_sd)(start).jaxpr):
        return None
    ends = jax.lax.map(log_sd, start + jnp.asarray(steps, start.dtype))
    moved = np.asarray(ends - log_sd(start), np.float64)
    if not np.isfinite(moved).all():
        return None
    power = min(POWERS, key=lambda p: np.abs(moved[0] - p).min())
    digits = np.rint(moved[1 : 1 + len(bits)] / power).astype(int)
    follows = np.abs(moved[0]) > CLOSE
    owner = np.clip(sum(digit << bit for bit, digit in enumerate(digits)), 0, size - 1) * follows
    expected = np.where(follows, power * steps[:, owner], 0.0)
    found = power, ScaledSite(other, owner.astype(np.int32), follows)
    return found if np.allclose(moved, expected, atol=CLOSE) else None


def _is_piecewise(jaxpr: Any) -> bool:
    """Whether a program compares or cuts what depends on its inputs, or may do so in programs inside."""
    equations = [equation for equation, _ in needed_equations(jaxpr, jaxpr.outvars)]
    depends = reached(equations, jaxpr.invars)
    for equation in equations:
        if depends.intersection(equation.outvars):
            compares = any(not jnp.issubdtype(var.aval.dtype, jnp.inexact) for var in equation.outvars)
            nested = any("jaxpr" in name for name in equation.params)
            if compares or nested or equation.primitive.name in PIECEWISE:
                return True
    return False
