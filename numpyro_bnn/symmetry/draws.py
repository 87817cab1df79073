"""Posterior draws of parameters, and the gauge of the continuous groups."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_bnn._checks import argument_error, check_finite, unknown_name
from numpyro_bnn.symmetry.additive import Shift
from numpyro_bnn.symmetry.base import Symmetry, as_symmetries
from numpyro_bnn.symmetry.parts import Part
from numpyro_bnn.symmetry.scaling import Multiplicative, Rescale, Scale

__all__ = ["Points", "act", "by_unit", "in_gauge", "mean", "norms", "read"]

# Site -> (n, *shape) in float64, with n draws of all chains.
Points = dict[str, np.ndarray]


def read(
    call: str, draws: Mapping[str, Any], symmetries: Sequence[Symmetry], leading: int = 2
) -> tuple[Points, list[Symmetry], tuple[int, ...]]:
    """Points of the sites that symmetries touch, the symmetries with the names of the draws, and (C, S).

    A site ``net/Dense_0.kernel`` is found under the name ``net.Dense_0.kernel`` that it has in files, too.
    """
    renamed = [
        s.rename({site: _stored(call, site, draws) for site in s.sites})
        for s in as_symmetries(call, symmetries)
    ]
    sizes: dict[str, tuple[int, ...]] = {}
    points = {}
    for site in dict.fromkeys(site for s in renamed for site in s.sites):
        value = np.asarray(draws[site], np.float64)
        check_finite(call, "draws", value)
        sizes[site] = value.shape[:leading]
        points[site] = value.reshape((prod(value.shape[:leading]), *value.shape[leading:]))
    if len(set(sizes.values())) > 1 or any(len(size) < leading for size in sizes.values()):
        raise argument_error(
            call,
            "draws",
            f"leading axes {sizes}",
            "Pass arrays (chains, draws, ...), e.g. `mcmc.get_samples(group_by_chain=True)`.",
        )
    for s in renamed:
        s.units({site: value[0] for site, value in points.items()})
    return points, renamed, next(iter(sizes.values()), ())


def _stored(call: str, site: str, draws: Mapping[str, Any]) -> str:
    for name in (site, site.replace("/", ".")):
        if name in draws:
            return name
    raise unknown_name(call, "symmetries", site, draws)


def act(s: Symmetry, points: Points, g: np.ndarray) -> Points:
    """Every point moved by its own group element, g (n, U)."""
    touched = {site: jnp.asarray(points[site]) for site in dict.fromkeys(s.sites)}
    return {**points, **{site: np.asarray(v) for site, v in jax.vmap(s.act)(touched, jnp.asarray(g)).items()}}


def by_unit(part: Part, value: np.ndarray) -> np.ndarray:
    """Elements of each unit: (n, U, elements)."""
    if part.axis is None:
        return value.reshape((len(value), 1, -1))
    units = part.units(value.shape[1:])
    along = np.moveaxis(value, part.axis % (value.ndim - 1) + 1, -1)
    return np.swapaxes(along.reshape((len(value), -1, units)), 1, 2)


def norms(parts: Sequence[Part], points: Points) -> np.ndarray:
    """Euclidean norm of the elements of each unit: (n, U)."""
    return np.sqrt(sum(np.sum(by_unit(part, points[part.site]) ** 2, -1) for part in parts))


def in_gauge(symmetries: Sequence[Symmetry], points: Points) -> Points:
    """Bring shifts to mean 0, then scales to their norm; the result is constant on the orbits of these groups."""
    for s in symmetries:
        if isinstance(s, Shift):
            points = act(s, points, -mean(s.parts, points))
    waiting: list[Multiplicative] = [s for s in symmetries if isinstance(s, Scale | Rescale)]
    while waiting:
        s, parts = _next(waiting)
        waiting.remove(s)
        norm = norms(parts, points)
        size = sum(part.per_unit(points[part.site].shape[1:]) for part in parts)
        # A unit whose elements are all 0 has no scale.
        points = act(
            s, points, np.where(norm > 0.0, 0.5 * np.log(size) - np.log(np.where(norm > 0.0, norm, 1.0)), 0.0)
        )
    return points


def mean(parts: Sequence[Part], points: Points) -> np.ndarray:
    elements = np.concatenate([by_unit(part, points[part.site]) for part in parts], -1)
    return np.mean(elements, -1)


def _next(waiting: Sequence[Multiplicative]) -> tuple[Multiplicative, list[Part]]:
    """A symmetry whose norm the others leave alone, and the parts that they leave alone.

    What a unit reads is scaled when an earlier layer is; in a residual stream the blocks write to what they read.
    """
    for s in waiting:
        touched = {site for other in waiting if other is not s for site in other.sites}
        touched |= {part.site for part, power in s.powers if power < 0}
        free = [part for part, power in s.powers if power > 0 and part.site not in touched]
        if free:
            return s, free
    return waiting[0], [part for part, power in waiting[0].powers if power > 0]
