"""Posterior draws of parameters: the gauge of the continuous groups, and summaries
along and across orbits.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_bnn._checks import argument_error, as_floats, check_finite, unknown_name
from numpyro_bnn._options import Kind
from numpyro_bnn.symmetry.base import Symmetry, UnitAxis, as_symmetries, sites_of
from numpyro_bnn.symmetry.groups import (
    JointRescale,
    JointScale,
    Multiplicative,
    Permutation,
    Rescale,
    Scale,
    Shift,
    axes_without,
)

# Site -> (n, *shape) in float64, with n draws of all chains.
Points = dict[str, np.ndarray]


def read(
    call: str,
    draws: Mapping[str, Any],
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
    names = {}
    for s in symmetries:
        for site in s.sites:
            names[site] = _stored(call, site, draws)
    renamed = [s.rename(names) for s in symmetries]
    sizes: dict[str, tuple[int, ...]] = {}
    points = {}
    for site in names.values():
        value = as_floats(call, "draws", draws[site])
        check_finite(call, "draws", value)
        sizes[site] = value.shape[:leading]
        points[site] = value.reshape(
            (prod(value.shape[:leading]), *value.shape[leading:])
        )
    different = set(sizes.values())
    if len(different) > 1 or min(map(len, different), default=leading) < leading:
        instead = (
            "Pass arrays (chains, draws, ...), e.g. "
            "`mcmc.get_samples(group_by_chain=True)`."
        )
        raise argument_error(call, "draws", f"leading axes {sizes}", instead)
    first_draw = jax.tree.map(lambda value: value[0], points)
    for s in renamed:
        s.units(first_draw)
    return points, renamed, next(iter(sizes.values()), ())


def _stored(call: str, site: str, draws: Mapping[str, Any]) -> str:
    for name in (site, site.replace("/", ".")):
        if name in draws:
            return name
    raise unknown_name(call, "symmetries", site, draws)


def act(s: Symmetry, points: Points, g: np.ndarray) -> Points:
    """Every point moved by its own group element, g (n, U)."""
    touched = {site: points[site] for site in s.sites}
    new_values = jax.vmap(s.act)(jax.tree.map(jnp.asarray, touched), jnp.asarray(g))
    return points | jax.tree.map(np.asarray, new_values)


def by_unit(axis: UnitAxis, value: np.ndarray) -> np.ndarray:
    """Elements of each unit: (n, U, elements)."""
    if axis.axis is None:
        return value.reshape((len(value), 1, -1))
    units = axis.units(value.shape[1:])
    along = np.moveaxis(value, axis.axis % (value.ndim - 1) + 1, -1)
    return np.swapaxes(along.reshape((len(value), -1, units)), 1, 2)


def norms(axes: Sequence[UnitAxis], points: Points) -> np.ndarray:
    """Euclidean norm of the elements of each unit: (n, U)."""
    return np.sqrt(
        sum(np.sum(by_unit(axis, points[axis.site]) ** 2, -1) for axis in axes)
    )


def in_gauge(symmetries: Sequence[Symmetry], points: Points) -> Points:
    """Bring shifts to mean 0, then scales to their norm; the result is constant on the
    orbits of these groups.
    """
    for s in symmetries:
        if isinstance(s, Shift):
            points = act(s, points, -mean(s.unit_axes, points))
    waiting: list[Multiplicative] = [
        s for s in symmetries if isinstance(s, Scale | Rescale)
    ]
    while waiting:
        s, axes = _next(waiting)
        waiting.remove(s)
        norm = norms(axes, points)
        size = sum(axis.per_unit(points[axis.site].shape[1:]) for axis in axes)
        log_norm = np.log(np.where(norm > 0.0, norm, 1.0))
        # A unit whose elements are all 0 has no scale.
        points = act(
            s, points, np.where(norm > 0.0, 0.5 * np.log(size) - log_norm, 0.0)
        )
    return points


def mean(axes: Sequence[UnitAxis], points: Points) -> np.ndarray:
    return np.mean(
        np.concatenate([by_unit(axis, points[axis.site]) for axis in axes], -1), -1
    )


def _next(
    waiting: Sequence[Multiplicative],
) -> tuple[Multiplicative, tuple[UnitAxis, ...]]:
    """A symmetry with sites whose norm no other symmetry changes (rescaling changes the
    next layer), and those.
    """
    for s in waiting:
        touched = sites_of(other for other in waiting if other is not s)
        touched |= {axis.site for axis, power in s.powers if power < 0}
        if free := axes_without(_incoming(s), touched):
            return s, free
    return waiting[0], _incoming(waiting[0])


def _incoming(s: Multiplicative) -> tuple[UnitAxis, ...]:
    return tuple(axis for axis, power in s.powers if power > 0)


def invariants(
    draws: Mapping[str, Any], symmetries: Sequence[Symmetry]
) -> dict[str, np.ndarray]:
    r"""Summaries of units that no symmetry changes, so that R-hat and ESS are
    meaningful without relabeling.

    They are computed in the gauge of the scales and shifts (see
    :func:`~numpyro_bnn.symmetry.canonical`), so each is invariant under all the
    symmetries together, signs included.

    - :class:`Rescale`: the effective scale of a unit, :math:`|w_{in}|\,|w_{out}|`.
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
    permuted: set[UnitAxis] = set()
    for s in symmetries:
        if isinstance(s, Permutation):
            permuted.update(s.unit_axes)
    with jax.enable_x64(True):
        points = in_gauge(symmetries, points)
    summaries = []
    for s in symmetries:
        summary = _invariant(s, points)
        if summary is not None and not permuted.isdisjoint(s.unit_axes):
            summary = -np.sort(-summary, -1)
        summaries.append(summary)
    return _named(symmetries, summaries, size)


def orbit_coordinates(
    draws: Mapping[str, Any], symmetries: Sequence[Symmetry]
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
        squares = np.concatenate(
            [by_unit(axis, points[axis.site]) ** 2 for axis in s.unit_axes], -1
        )
        return np.sum(squares, -1) ** 2 / np.sum(squares**2, -1)
    return None


def _coordinate(s: Symmetry, points: Points) -> np.ndarray | None:
    with np.errstate(divide="ignore"):  # weights that are all 0 lie at -infinity
        if isinstance(s, Scale):
            return np.log(norms(s.unit_axes, points))
        if isinstance(s, Rescale):
            return np.log(norms(s.incoming, points)) - np.log(norms(s.outgoing, points))
        if isinstance(s, JointScale | JointRescale):
            scales = (
                s.scales if isinstance(s, JointRescale) else ((s.scale[0], s.power),)
            )
            logs = [
                np.log(by_unit(axis, points[axis.site])[:, 0]) / power
                for axis, power in scales
            ]
            return np.mean(np.concatenate(logs, -1), -1, keepdims=True)
    return mean(s.unit_axes, points) if isinstance(s, Shift) else None
