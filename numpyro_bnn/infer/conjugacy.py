"""Which sites have a conjugate conditional given the normal sites that they scale, read
from a model's program.
"""

from collections.abc import Collection
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_bnn._distributions import unwrapped
from numpyro_bnn._jaxprs.primitives import PIECEWISE
from numpyro_bnn._jaxprs.slices import needed_part
from numpyro_bnn._jaxprs.walk import Equation, Follower
from numpyro_bnn._types import Arrays, Site
from numpyro_bnn.infer.linear_structure import density_parts, loc_and_sd
from numpyro_bnn.infer.model_checks import OUTSIDE
from numpyro_bnn.program.posterior import Posterior

POWERS = (-0.5, 0.5, -1.0, 1.0)
# Tolerance of logarithms and exponents in float32, and the logarithms between which sds
# must be powers.
CLOSE, REACH = 1e-3, 40.0


class ScaledSite(NamedTuple):
    """A normal site whose sd is proportional to a power of elements of a scale site.

    :param owner: flat index, for each element of the site, of the element of the scale
        site that scales it.
    :param follows: for each element of the site, whether the scale site scales it at
        all.
    """

    name: str
    owner: np.ndarray
    follows: np.ndarray


class ConjugateSite(NamedTuple):
    """A scale site whose conditional is generalized inverse Gaussian.

    :param power: the sd of its children is proportional to value^power: -1/2 a
        precision, 1/2 a variance, 1 an sd.
    """

    name: str
    power: float
    children: tuple[ScaledSite, ...]


def read(
    reading: Posterior,
    conditioned: Collection[str],
    priors: Collection[tuple[type, bool]],
) -> dict[str, ConjugateSite | str]:
    """By latent site that is not held, how to draw it, or the reason why it cannot be
    drawn.

    :param priors: pairs of a distribution that can be drawn, and whether for sites
        whose values are sds.
    """
    dependences = reading.depends(density_parts)
    conditionals: dict[str, ConjugateSite | str] = {}
    children: dict[str, list[str]] = {}
    pairs = []
    for name in reading.latent:
        if name in conditioned:
            continue
        depending = []
        for kind, child in sorted(dependences):
            # A conjugate draw stays in the support: the factor that is zero within it
            # says nothing of the draw.
            if name in dependences[kind, child] and child != OUTSIDE:
                depending.append((kind, child))
        reason = _reason(reading.sites[name], priors, depending)
        conditionals[name] = reason
        if reason:
            continue
        children[name] = [child for _, child in depending]
        for child in children[name]:
            if not _is_piecewise_in(reading, name, child):
                pairs.append((name, child))
    effects = reading.run(partial(_effects, pairs))
    for name, child_names in children.items():
        size = reading.shapes([name])[name].size
        scaled = []
        for child in child_names:
            scaled.append(_scaled_site(child, effects.get((name, child)), size))
        conditionals[name] = _conjugate(reading.sites[name], priors, scaled)
    return conditionals


def _reason(
    site: Site, priors: Collection[tuple[type, bool]], depending: list[tuple[str, str]]
) -> str:
    """Why a site has no conjugate conditional, as far as the sites that depend on it
    say; empty if they do not.
    """
    prior = type(unwrapped(site["fn"])).__name__
    kinds = sorted({kind.__name__ for kind, _ in priors})
    if prior not in kinds:
        return f"its prior is {prior}, not one of {', '.join(kinds)}"
    for kind, child in depending:
        if kind != "sd":
            reason = f"the {kind} of {child!r} depends on it"
            if kind in ("distribution", "mean"):
                reason += " (a centered prior would not)"
            return reason
    return "" if depending else "no normal site depends on it"


def _conjugate(
    site: Site, priors: Collection[tuple[type, bool]], children: list
) -> ConjugateSite | str:
    """The conditional of a site given the sites that it scales, with their powers."""
    powers = {child[0] for child in children if child is not None}
    if None in children or len(powers) != 1:
        return (
            "sds that depend on it are not proportional to one power of one of its "
            "elements"
        )
    power, prior = powers.pop(), type(unwrapped(site["fn"]))
    if (prior, abs(power) == 1) not in priors:
        return (
            f"a {prior.__name__} prior is not conjugate where sds are proportional to "
            f"its power {power:g}"
        )
    return ConjugateSite(site["name"], power, tuple(child for _, child in children))


def _log_sds(
    reading: Posterior,
    values: Arrays,
    name: str,
    child: str,
    log_value: Array,
) -> Array:
    """Log sds of the elements of ``other`` at (P,) logarithms of the
    value of ``name``.
    """
    shifted = {**values, name: jnp.exp(log_value).reshape(jnp.shape(values[name]))}
    _, sd = loc_and_sd(reading.at(shifted, only=[child])[child])
    return jnp.log(jnp.abs(sd)).ravel()


def _is_piecewise_in(reading: Posterior, name: str, child: str) -> bool:
    """Whether the program of the sds of ``child`` compares or cuts what depends on the
    values of ``name``, or may do so in programs inside.
    """
    cutting: list[str] = []

    def visit(equation: Equation, *operands: bool) -> bool:
        compares = any(
            not jnp.issubdtype(output.dtype, jnp.inexact) for output in equation.outputs
        )
        nested = any("jaxpr" in name for name in equation.params)
        if compares or nested or equation.name in PIECEWISE:
            cutting.append(equation.name)
        return True

    zeros = reading.zeros()
    log_sds = partial(_log_sds, reading, zeros, name, child)
    closed = needed_part(jax.make_jaxpr(log_sds)(zeros[name].ravel()))
    Follower(visit, False).follow(closed.jaxpr, [True])
    return bool(cutting)


def _steps(size: int) -> tuple[np.ndarray, int]:
    """Steps in log value: the same for all elements, bits that encode their indices,
    and some over most floats.
    """
    index = np.arange(size)
    bits = [(index >> bit) & 1 for bit in range(max(1, (size - 1).bit_length()))]
    wide = REACH * np.cos(np.linspace(0, 3, 33)[:, None] + index)
    return np.stack([np.ones(size), *bits, *wide]), len(bits)


def _effects(
    pairs: Collection[tuple[str, str]], reading: Posterior
) -> dict[tuple[str, str], Array]:
    """Changes of log sds by the steps in the log value of each site, at draws of the
    others from the prior.
    """
    drawn, effects = reading.at(), {}
    values = {name: jnp.asarray(drawn[name]["value"]) for name in reading.latent}
    for name, child in pairs:
        log_sds = partial(_log_sds, reading, values, name, child)
        start = jnp.full(values[name].size, 0.1, values[name].dtype)
        ends = jax.lax.map(
            log_sds, start + jnp.asarray(_steps(start.size)[0], start.dtype)
        )
        effects[name, child] = ends - log_sds(start)
    return effects


def _scaled_site(name: str, effect: Any, size: int) -> tuple[float, ScaledSite] | None:
    """Exponent and owners of the sds of a site, from the changes of their logarithms by
    the steps.

    ``None`` if sds are not products of powers: checked in the program, and at values
    over most of the floats.
    """
    if effect is None or not np.isfinite(effect).all():
        return None
    steps, bits = _steps(size)
    effect = np.asarray(effect, np.float64)
    power = min(POWERS, key=lambda p: np.abs(effect[0] - p).min())
    digits = np.rint(effect[1 : 1 + bits] / power).astype(int)
    follows = np.abs(effect[0]) > CLOSE
    index = sum(digit << bit for bit, digit in enumerate(digits))
    owner = np.clip(index, 0, size - 1) * follows
    expected = np.where(follows, power * steps[:, owner], 0.0)
    if not np.allclose(effect, expected, atol=CLOSE):
        return None
    return power, ScaledSite(name, owner.astype(np.int32), follows)
