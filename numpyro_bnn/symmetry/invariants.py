"""Summaries of draws: what does not change along the orbits, and where on them the draws lie."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from numpyro_bnn.symmetry.additive import Shift
from numpyro_bnn.symmetry.base import Symmetry
from numpyro_bnn.symmetry.discrete import Permutation
from numpyro_bnn.symmetry.draws import Points, by_unit, in_gauge, mean, norms, read
from numpyro_bnn.symmetry.scaling import JointRescale, JointScale, Rescale, Scale

__all__ = ["invariants", "orbit_coordinates"]


def invariants(draws: Mapping[str, Any], symmetries: Sequence[Symmetry]) -> dict[str, np.ndarray]:
    r"""Orbit-invariant summaries by unit, whose R-hat and ESS mean something without relabeling.

    They are computed in the gauge of the scales and shifts (see :func:`~numpyro_bnn.symmetry.canonical`), so that
    each is invariant under all the symmetries together, and none notices a sign.

    - :class:`Rescale`: the effective scale of a unit, :math:`|w_{in}|\,|w_{out}|`.
    - :class:`Scale`: only the direction u of the weights matters; the effective number of weights
      :math:`(\sum_i u_i^2)^2 / \sum_i u_i^4`, from 1 (a single weight) to d (all of one size).
    - :class:`Permutation`: the norm of everything that writes to or reads a unit.

    Where a :class:`Permutation` moves the units, they are sorted in each draw, largest first.

    :param draws: site -> (C, S, ...), e.g. ``mcmc.get_samples(group_by_chain=True)`` or an ArviZ posterior.
    :param symmetries: e.g. ``symmetry.from_network(net, (13,))``.
    :return: name of the symmetry -> (C, S, U).
    :raises ValueError: for unknown sites, NaN or infinite draws, other leading axes than chains and draws.

    >>> draws = {"w": np.array([[[[2.0, 3.0]]]]), "v": np.array([[[[5.0], [7.0]]]])}
    >>> invariants(draws, [Rescale([("w", 1)], [("v", 0)])])["Rescale(w)"].round(6).tolist()
    [[[10.0, 21.0]]]
    """
    points, symmetries, size = read("symmetry.invariants", draws, symmetries)
    orders = [s for s in symmetries if isinstance(s, Permutation)]
    found: dict[str, np.ndarray] = {}
    with jax.enable_x64(True):
        points = in_gauge(symmetries, points)
    for s in symmetries:
        summary = _invariant(s, points)
        if summary is not None:
            if any(set(s.parts) & set(order.parts) for order in orders):
                summary = -np.sort(-summary, -1)
            found[_name(s, found)] = summary.reshape((*size, -1))
    return found


def orbit_coordinates(draws: Mapping[str, Any], symmetries: Sequence[Symmetry]) -> dict[str, np.ndarray]:
    r"""Where on its orbit each draw lies: what moves along orbits mix, and gradient samplers do not.

    - :class:`Scale`: :math:`\log|w|`.
    - :class:`Rescale`: :math:`\log(|w_{in}| / |w_{out}|)`.
    - :class:`JointScale`: log of the scale, in the units of the weights (of a precision, minus half its log).
    - :class:`JointRescale`: mean log of its scales, each over its power.
    - :class:`Shift`: mean of the elements.

    :param draws: site -> (C, S, ...), e.g. ``mcmc.get_samples(group_by_chain=True)`` or an ArviZ posterior.
    :param symmetries: e.g. ``symmetry.from_network(net, (13,))``; finite groups have no coordinate.
    :return: name of the symmetry -> (C, S, U).
    :raises ValueError: for unknown sites, NaN or infinite draws, other leading axes than chains and draws.

    >>> draws = {"w": np.array([[[3.0, 4.0]]])}
    >>> np.exp(orbit_coordinates(draws, [Scale("w")])["Scale(w)"]).round(6).tolist()
    [[[5.0]]]
    """
    points, symmetries, size = read("symmetry.orbit_coordinates", draws, symmetries)
    found: dict[str, np.ndarray] = {}
    for s in symmetries:
        coordinate = _coordinate(s, points)
        if coordinate is not None:
            found[_name(s, found)] = coordinate.reshape((*size, -1))
    return found


def _name(s: Symmetry, taken: Mapping[str, Any]) -> str:
    """The name of the symmetry, with its last site where another has the same."""
    return s.name if s.name not in taken else f"{s.name[:-1]}, {s.sites[-1]})"


def _invariant(s: Symmetry, points: Points) -> np.ndarray | None:
    if isinstance(s, Rescale):
        return norms(s.incoming, points) * norms(s.outgoing, points)
    if isinstance(s, Permutation):
        return norms(s.parts, points)
    if isinstance(s, Scale):
        squares = np.concatenate([by_unit(part, points[part.site]) ** 2 for part in s.parts], -1)
        return np.sum(squares, -1) ** 2 / np.sum(squares**2, -1)
    return None


def _coordinate(s: Symmetry, points: Points) -> np.ndarray | None:
    with np.errstate(divide="ignore"):  # weights that are all 0 lie at -infinity
        if isinstance(s, Scale):
            return np.log(norms(s.parts, points))
        if isinstance(s, Rescale):
            return np.log(norms(s.incoming, points)) - np.log(norms(s.outgoing, points))
        if isinstance(s, JointScale | JointRescale):
            scales = s.scales if isinstance(s, JointRescale) else ((s.scale[0], s.power),)
            logs = [np.log(by_unit(part, points[part.site])[:, 0]) / power for part, power in scales]
            return np.mean(np.concatenate(logs, -1), -1, keepdims=True)
    return mean(s.parts, points) if isinstance(s, Shift) else None
