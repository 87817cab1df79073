"""Posterior draws of parameters: the gauge of the continuous groups, and summaries
along and across orbits.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_bnn._checks import argument_error, as_floats, check_finite, unknown_name
from numpyro_bnn._options import Kind
from numpyro_bnn._types import Trees
from numpyro_bnn.symmetry.base import (
    Symmetry,
    UnitAxis,
    as_symmetries,
    axes_without,
    sites_of,
)
from numpyro_bnn.symmetry.groups import (
    JointRescale,
    JointScale,
    Multiplicative,
    Permutation,
    Rescale,
    Scale,
    Shift,
)

# Site -> (n, *shape) in float64, with n draws of all chains.
Points = dict[str, np.ndarray]
S = TypeVar("S", bound=Symmetry)


def read(
    call: str,
    draws: Trees,
    symmetries: Sequence[Symmetry],
    leading: int = 2,
) -> tuple[Points, list[Symmetry], tuple[int, ...]]:
    """Read points of the sites that symmetries act on, the symmetries with the names of
    the draws, and (C, S).

    A site ``net/Dense_0.kernel`` may also be named ``net.Dense_0.kernel``, as in files.
    """
    Kind(
        Mapping, "Pass arrays by site, e.g. `mcmc.get_samples(group_by_chain=True)`."
    ).check(call, "draws", draws)
    symmetries = as_symmetries(call, symmetries)
    names: dict[str, str] = {}
    for symmetry in symmetries:
        for site in symmetry.sites:
            names[site] = site if site in draws else site.replace("/", ".")
            if names[site] not in draws:
                raise unknown_name(call, "symmetries", site, draws)
    sizes: dict[str, tuple[int, ...]] = {}
    points = {}
    for site in names.values():
        value = as_floats(call, "draws", draws[site])
        check_finite(call, "draws", value)
        sizes[site] = value.shape[:leading]
        points[site] = value.reshape((prod(sizes[site]), *value.shape[leading:]))
    size, *further_sizes = set(sizes.values()) or {()}
    if further_sizes or (sizes and len(size) < leading):
        instead = (
            "Pass arrays (chains, draws, ...), e.g. "
            "`mcmc.get_samples(group_by_chain=True)`."
        )
        raise argument_error(call, "draws", f"leading axes {sizes}", instead)
    renamed = [symmetry.rename(names) for symmetry in symmetries]
    for symmetry in renamed:
        symmetry.units(jax.tree.map(lambda value: value[0], points))
    return points, renamed, size


def act(s: Symmetry, points: Points, g: np.ndarray) -> Points:
    """Every point moved by its own group element, g (n, U)."""
    touched = {site: points[site] for site in s.sites}
    new_values = jax.vmap(s.act)(jax.tree.map(jnp.asarray, touched), jnp.asarray(g))
    return points | jax.tree.map(np.asarray, new_values)


def elements(axes: Sequence[UnitAxis], points: Points) -> np.ndarray:
    """All elements of each unit: (n, elements, U)."""
    return np.concatenate([axis.by_unit(points[axis.site]) for axis in axes], 1)


def norms(axes: Sequence[UnitAxis], points: Points) -> np.ndarray:
    """Euclidean norm of the elements of each unit: (n, U)."""
    return np.linalg.norm(elements(axes, points), axis=1)


def in_gauge(symmetries: Sequence[Symmetry], points: Points) -> Points:
    """Bring shifts to mean 0, then scales to their norm; the result is constant on the
    orbits of these groups.
    """
    for s in symmetries:
        if isinstance(s, Shift):
            points = act(s, points, -elements(s.unit_axes, points).mean(1))
    for scale, axes in _gauges(symmetries):
        norm = norms(axes, points)
        gauge_norm = np.sqrt(elements(axes, points).shape[1])
        # A unit whose elements are all 0 has no scale.
        g = np.log(
            np.where(norm > 0.0, gauge_norm / np.where(norm > 0.0, norm, 1.0), 1.0)
        )
        points = act(scale, points, g)
    return points


def _gauges(
    symmetries: Sequence[Symmetry],
) -> list[tuple[Multiplicative, tuple[UnitAxis, ...]]]:
    """The scales in the order of :func:`in_gauge`, and the axes whose norms it sets."""
    waiting: list[Multiplicative] = [
        s for s in symmetries if isinstance(s, Scale | Rescale)
    ]
    gauges: list[tuple[Multiplicative, tuple[UnitAxis, ...]]] = []
    while waiting:
        gauges.append(untouched(waiting, _incoming))
        waiting.remove(gauges[-1][0])
    return gauges


def _incoming(s: Multiplicative) -> tuple[UnitAxis, ...]:
    """Axes that the group multiplies; of a residual stream those of its first layer."""
    incoming = [axis for axis, power in s.powers if power > 0]
    divided = {axis.site for axis, power in s.powers if power < 0}
    return axes_without(incoming, divided) or tuple(incoming)


def untouched(
    waiting: Sequence[S],
    axes_of: Callable[[S], tuple[UnitAxis, ...]],
    changed: Collection[str] = (),
) -> tuple[S, tuple[UnitAxis, ...]]:
    """A symmetry with sites that no other one changes, and their axes; if there is
    none, the first one with all its axes.

    :param changed: sites that will change anyway.
    """
    for s in waiting:
        touched = {*changed, *sites_of(other for other in waiting if other is not s)}
        if free := axes_without(axes_of(s), touched):
            return s, free
    return waiting[0], axes_of(waiting[0])


def invariants(draws: Trees, symmetries: Sequence[Symmetry]) -> dict[str, np.ndarray]:
    r"""Summaries of units that no symmetry changes, so that R-hat and ESS are
    meaningful without relabeling.

    They are computed in the gauge of the scales and shifts (see
    :func:`~numpyro_bnn.symmetry.canonical`), so each is invariant under all the
    symmetries together, signs included.

    - :class:`Rescale`: the effective scale of a unit, :math:`|w_{in}|\,|w_{out}|`. A
      unit between units that rescale too may have none of its own, and is left out:
      theirs contain it.
    - :class:`Scale`: only the direction u of the weights matters; the effective number
      of weights :math:`(\sum_i u_i^2)^2 / \sum_i u_i^4`, from 1 (a single weight) to d
      (all of one size).
    - :class:`Permutation`: the norm of all weights into and out of a unit.

    If a :class:`Permutation` moves the units, they are sorted in each draw, largest
    first.

    :param draws: site -> (C, S, ...), e.g. ``mcmc.get_samples(group_by_chain=True)`` or
        an ArviZ posterior.
    :param symmetries: e.g. ``symmetry.from_network(net, (13,))``.
    :return: name of the symmetry -> (C, S, U).
    :raises ValueError: for unknown sites, NaN or infinite draws, or leading axes other
        than chains and draws.

    >>> draws = {"w": np.array([[[[2.0, 3.0]]]]), "v": np.array([[[[5.0], [7.0]]]])}
    >>> invariants(draws, [Rescale([("w", 1)], [("v", 0)])])["Rescale(w)"].round(
    ...     6
    ... ).tolist()
    [[[10.0, 21.0]]]
    """
    points, symmetries, size = read("symmetry.invariants", draws, symmetries)
    orders = [s for s in symmetries if isinstance(s, Permutation)]
    permuted = {axis for order in orders for axis in order.unit_axes}
    with jax.enable_x64(True):
        points = in_gauge(symmetries, points)
    gauges, summaries = _gauges(symmetries), []
    for s in symmetries:
        summary = _invariant(s, points)
        if summary is not None and _is_fixed(s, gauges, points):
            summary = None
        if summary is not None and not permuted.isdisjoint(s.unit_axes):
            summary = -np.sort(-summary, -1)
        summaries.append(summary)
    return _named(symmetries, summaries, size)


def orbit_coordinates(
    draws: Trees, symmetries: Sequence[Symmetry]
) -> dict[str, np.ndarray]:
    r"""Where on its orbit each draw lies: coordinates that mix slowly under gradient
    samplers, fast by orbit moves.

    - :class:`Scale`: :math:`\log|w|`.
    - :class:`Rescale`: :math:`\log(|w_{in}| / |w_{out}|)`.
    - :class:`JointScale`: log of the scale, in the units of the weights (of a
      precision, minus half its log).
    - :class:`JointRescale`: mean log of its scales, each over its power.
    - :class:`Shift`: mean of the elements.

    :param draws: site -> (C, S, ...), e.g. ``mcmc.get_samples(group_by_chain=True)`` or
        an ArviZ posterior.
    :param symmetries: e.g. ``symmetry.from_network(net, (13,))``; finite groups have no
        coordinate.
    :return: name of the symmetry -> (C, S, U).
    :raises ValueError: for unknown sites, NaN or infinite draws, or leading axes other
        than chains and draws.

    >>> draws = {"w": np.array([[[3.0, 4.0]]])}
    >>> np.exp(orbit_coordinates(draws, [Scale("w")])["Scale(w)"]).round(6).tolist()
    [[[5.0]]]
    """
    points, symmetries, size = read("symmetry.orbit_coordinates", draws, symmetries)
    return _named(symmetries, [_coordinate(s, points) for s in symmetries], size)


def _named(
    symmetries: Sequence[Symmetry], summaries: Sequence[np.ndarray | None], size: tuple
) -> dict[str, np.ndarray]:
    """Summaries (C, S, U) by the name of their symmetry, extended by its last site if
    the name is taken.
    """
    by_name: dict[str, np.ndarray] = {}
    for s, summary in zip(symmetries, summaries, strict=True):
        if summary is not None:
            name = s.name if s.name not in by_name else f"{s.name[:-1]}, {s.sites[-1]})"
            by_name[name] = summary.reshape((*size, -1))
    return by_name


def _invariant(s: Symmetry, points: Points) -> np.ndarray | None:
    if isinstance(s, Rescale):
        return norms(s.incoming, points) * norms(s.outgoing, points)
    if isinstance(s, Permutation):
        return norms(s.unit_axes, points)
    if isinstance(s, Scale):
        squares = elements(s.unit_axes, points) ** 2
        return np.sum(squares, 1) ** 2 / np.sum(squares**2, 1)
    return None


def _is_fixed(
    s: Symmetry,
    gauges: Sequence[tuple[Multiplicative, tuple[UnitAxis, ...]]],
    points: Points,
) -> bool:
    """Whether the gauge fixes the norms of both sides of a unit: then the summaries of
    other groups say all that is left of its scale.
    """
    if not isinstance(s, Rescale):
        return False
    numbers, count = {}, 0  # of all elements
    for site, value in points.items():
        numbers[site] = count + np.arange(value[0].size).reshape(value[:1].shape)
        count += value[0].size
    for side in (s.incoming, s.outgoing):
        members = elements(side, numbers)[0]
        unit, fixed = np.full(count, -1), np.zeros(count, bool)
        unit[members] = np.arange(members.shape[1])
        for place, (_, axes) in enumerate(gauges):
            later_sites = sites_of(later for later, _ in gauges[place + 1 :])
            if axes_without(axes, later_sites) == tuple(axes):
                of_gauge = elements(axes, numbers)[0]
                units = unit[of_gauge]
                within = (units == units[0]).all(axis=0) & (units[0] >= 0)
                fixed[of_gauge[:, within]] = True
        if not fixed[members].all():
            return False
    return True


def _coordinate(s: Symmetry, points: Points) -> np.ndarray | None:
    if isinstance(s, Shift):
        return elements(s.unit_axes, points).mean(1)
    with np.errstate(divide="ignore"):  # weights that are all 0 lie at -infinity
        if isinstance(s, Scale):
            return np.log(norms(s.unit_axes, points))
        if isinstance(s, Rescale):
            return np.log(norms(s.incoming, points)) - np.log(norms(s.outgoing, points))
        if isinstance(s, JointScale | JointRescale):
            scales = s.scales if isinstance(s, JointRescale) else s.powers[-1:]
            logs = [
                np.log(points[axis.site].reshape((len(points[axis.site]), -1))) / power
                for axis, power in scales
            ]
            return np.mean(np.concatenate(logs, -1), -1, keepdims=True)
    return None
