"""Canonical representatives of draws, so that summaries of single weights mean something."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import jax
import numpy as np
from scipy.optimize import linear_sum_assignment

from numpyro_bnn._checks import argument_error
from numpyro_bnn.symmetry.base import Symmetry
from numpyro_bnn.symmetry.discrete import Permutation, SignFlip
from numpyro_bnn.symmetry.draws import Points, act, by_unit, in_gauge, norms, read
from numpyro_bnn.symmetry.parts import Part

__all__ = ["canonical"]

# Draws whose tables of scores (units x units) are held at once.
CHUNK = 512


def canonical(
    draws: Mapping[str, Any],
    symmetries: Sequence[Symmetry],
    reference: Mapping[str, Any] | None = None,
    sweeps: int = 10,
) -> dict[str, np.ndarray]:
    r"""Move every draw along its orbits to a canonical representative; the likelihood of no draw changes.

    - :class:`Shift`: the elements of a unit have mean 0 (a bias before batch normalization becomes 0).
    - :class:`Scale` and :class:`Rescale`: the d (incoming) elements of a unit have norm :math:`\sqrt d`; in a
      residual stream those of its first layer.
    - :class:`SignFlip` and :class:`Permutation`: for every draw the signs and the order of units with the largest
      inner product with a reference, by assignment: layer by layer, then in sweeps over the layers.
    - :class:`JointScale`, :class:`JointRescale` and symmetries of your own: left alone.

    Without a reference, the first one is the draw whose norms of units are nearest to the median over all draws, its
    units in the order of their norms with positive sums of cubed weights; after each sweep the mean of the canonical
    draws replaces it. So the result depends neither on the order of the chains nor on where on its orbit a draw lies.
    Where the posterior does not tell units apart, no labeling can: R-hat stays far from 1.

    Hyper-parameters stay as they are: a layer's scale no longer is that of the weights shown. Of a
    non-centered weight the site ``w`` is moved, and ``w_base`` is not. Scales of single units, as of ARD or horseshoe
    priors, are permuted only if a :class:`Permutation` names them.

    The time goes to the assignments: one per draw, layer and sweep, cubic in the number of units.

    :param draws: site -> (C, S, ...), e.g. ``mcmc.get_samples(group_by_chain=True)`` or an ArviZ posterior.
    :param symmetries: e.g. ``symmetry.from_network(net, (13,))``.
    :param reference: site -> (...), one point whose signs and order are to be met.
    :param sweeps: largest number of sweeps over the layers; they stop when no draw changes.
    :return: all sites of ``draws``, as arrays of their dtypes.
    :raises ValueError: for unknown sites, NaN or infinite draws, other leading axes than chains and draws.

    Reference: Ainsworth, Hayase & Srinivasa (2023), "Git Re-Basin", section 3.2 for the assignment by layers.

    >>> from numpyro_bnn import nn, symmetry
    >>> net = nn.Sequential([nn.Dense(2, use_bias=False), "tanh", nn.Dense(1, use_bias=False)])
    >>> kernel = np.array([[[[1.0, -3.0]], [[3.0, 1.0]]]])  # one chain, two draws, shape (1, 2)
    >>> out = np.array([[[[1.0], [-2.0]], [[2.0], [1.0]]]])
    >>> draws = {"net/Dense_0.kernel": kernel, "net/Dense_1.kernel": out}
    >>> canonical(draws, symmetry.from_network(net, (1,)))["net/Dense_0.kernel"].tolist()
    [[[[3.0, 1.0]], [[3.0, 1.0]]]]
    """
    call = "symmetry.canonical"
    if not isinstance(sweeps, int) or sweeps < 1:
        raise argument_error(call, "sweeps", sweeps, "Pass a positive integer, e.g. `sweeps=10`.")
    points, symmetries, size = read(call, draws, symmetries)
    with jax.enable_x64(True):
        points = in_gauge(symmetries, points)
        groups = list(_groups(symmetries, points)) if points else []
        if groups and reference is None:
            points = _matched_to_one_another(groups, points, sweeps)
        elif groups and reference is not None:
            target = _target(call, reference, symmetries, points)
            points = _first_pass(groups, points, target)
            points = _sweep_until_still(groups, points, sweeps, lambda _: target)
    moved = {site: value.reshape((*size, *value.shape[1:])) for site, value in points.items()}
    return {site: _as_before(moved.get(site), value) for site, value in draws.items()}


def _target(
    call: str, reference: Mapping[str, Any], symmetries: Sequence[Symmetry], points: Points
) -> Points:
    """A reference in the gauge, as one draw."""
    target, _, _ = read(
        call, {site: np.asarray(v)[None] for site, v in reference.items()}, symmetries, leading=1
    )
    for site, value in target.items():
        if value.shape[1:] != points[site].shape[1:]:
            raise argument_error(
                call,
                "reference",
                f"site {site!r} of shape {value.shape[1:]}",
                f"The draws are of shape {points[site].shape[1:]}: pass one point.",
            )
    return in_gauge(symmetries, target)


def _as_before(moved: np.ndarray | None, value: Any) -> np.ndarray:
    value = np.asarray(value)
    return value if moved is None else moved.astype(value.dtype)


# -- what is decided together -------------------------------------------------------------------------


class _Group(NamedTuple):
    """Units with their order and signs, decided together.

    :ivar order: the permutation of the units, or ``None``.
    :ivar unit_flips: signs of single units.
    :ivar layer_flips: signs of all units at once.
    :ivar parts: what the units are compared by: no site in which they meet one another.
    """

    order: Permutation | None
    unit_flips: tuple[SignFlip, ...]
    layer_flips: tuple[SignFlip, ...]
    parts: tuple[Part, ...]

    @property
    def members(self) -> tuple[Symmetry, ...]:
        return (*((self.order,) if self.order else ()), *self.unit_flips, *self.layer_flips)


def _groups(symmetries: Sequence[Symmetry], points: Points) -> Iterator[_Group]:
    one = {site: value[0] for site, value in points.items()}
    flips = [s for s in symmetries if isinstance(s, SignFlip)]
    for order in symmetries:
        if isinstance(order, Permutation):
            units = [f for f in flips if set(f.parts) <= set(order.parts)]
            layers = [f for f in flips if f.units(one) == 1 and set(f.sites) <= set(order.sites)]
            flips = [f for f in flips if f not in units and f not in layers]
            yield _Group(order, tuple(units), tuple(layers), _alone(order.parts))
    for flip in flips:
        yield _Group(None, (flip,), (), _alone(flip.parts))


def _alone(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """Parts of sites that meet the units along one axis only; all, if there is none."""
    sites = [part.site for part in parts]
    return tuple(part for part in parts if sites.count(part.site) == 1) or parts


# -- signs and orders of all draws --------------------------------------------------------------------


def _score(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Inner products of units of draws (n, U, d) and of a reference (1, U, d): (n, U of reference, U of draw)."""
    return np.swapaxes(a @ b[0].T, 1, 2)


def _match(group: _Group, points: Points, target: Points, parts: Sequence[Part]) -> tuple[Points, bool]:
    """Signs and order of every draw that fit the target best, and whether any changed."""
    n = len(points[parts[0].site])
    elements = []
    for start in range(0, n, CHUNK):
        elements += _best(group, points, target, parts, slice(start, start + CHUNK))
    changed = False
    for number, member in enumerate(group.members):
        g = np.stack([element[number] for element in elements])
        still = np.arange(g.shape[1]) if isinstance(member, Permutation) else np.ones(g.shape[1])
        if np.any(g != still):
            points, changed = act(member, points, g), True
    return points, changed


def _best(
    group: _Group, points: Points, target: Points, parts: Sequence[Part], chunk: slice
) -> list[list[np.ndarray]]:
    """For every draw of the chunk the group elements of the members, to be applied one after the other."""
    scores = [
        _score(by_unit(part, points[part.site][chunk]), by_unit(part, target[part.site])) for part in parts
    ]
    found: list[tuple[float, list[np.ndarray]]] = [(-np.inf, [])] * len(scores[0])
    for layer_signs in product((1.0, -1.0), repeat=len(group.layer_flips)):
        layered = [
            _signed(score, part, group.layer_flips, layer_signs)
            for score, part in zip(scores, parts, strict=True)
        ]
        table, which = _over_unit_signs(group, layered, parts)
        for i, draw in enumerate(table):
            order = _order(draw) if group.order else np.arange(len(draw))
            value = float(draw[np.arange(len(draw)), order].sum())
            if value > found[i][0] + 1e-12 * abs(value):
                found[i] = (value, _elements(group, order, which[i], layer_signs))
    return [elements for _, elements in found]


def _signed(score: np.ndarray, part: Part, flips: Sequence[SignFlip], signs: Sequence[float]) -> np.ndarray:
    """The score of a part after flips by the signs."""
    sign = 1.0
    for flip, s in zip(flips, signs, strict=True):
        sign *= s ** [p.site for p in flip.parts].count(part.site)
    return sign * score


def _over_unit_signs(
    group: _Group, scores: Sequence[np.ndarray], parts: Sequence[Part]
) -> tuple[np.ndarray, np.ndarray]:
    """The largest score of every pair of units over the signs of the unit, and which signs: (n, U, U)."""
    table, which = None, None
    for number, signs in enumerate(product((1.0, -1.0), repeat=len(group.unit_flips))):
        total = sum(
            _signed(score, part, group.unit_flips, signs) for score, part in zip(scores, parts, strict=True)
        )
        if table is None or which is None:
            table, which = np.array(total), np.zeros(np.shape(total), int)
        else:
            better = total > table
            table, which = np.where(better, total, table), np.where(better, number, which)
    assert table is not None
    assert which is not None
    return table, which


def _order(score: np.ndarray) -> np.ndarray:
    """The unit of the draw that each unit of the reference gets."""
    return linear_sum_assignment(score, maximize=True)[1]


def _elements(
    group: _Group, order: np.ndarray, which: np.ndarray, layer_signs: Sequence[float]
) -> list[np.ndarray]:
    """Order first; the signs are those of the units in their new order."""
    signs = np.array(list(product((1.0, -1.0), repeat=len(group.unit_flips))))[
        which[np.arange(len(order)), order]
    ]
    elements = [order] if group.order else []
    elements += list(signs.T)
    return elements + [np.full(1, sign) for sign in layer_signs]


# -- references -----------------------------------------------------------------------------------------


def _free(parts: Sequence[Part], later: Sequence[Symmetry]) -> tuple[Part, ...]:
    """Parts whose sites nothing later touches; all, if there is none."""
    touched = {site for member in later for site in member.sites}
    return tuple(part for part in parts if part.site not in touched) or tuple(parts)


def _with_later(groups: Sequence[_Group]) -> Iterator[tuple[_Group, list[Symmetry]]]:
    for number, group in enumerate(groups):
        yield group, [member for later in groups[number + 1 :] for member in later.members]


def _first_pass(groups: Sequence[_Group], points: Points, target: Points) -> Points:
    """Match layer by layer, each by what earlier layers have settled: independent of where the draws start."""
    for group, later in _with_later(groups):
        points, _ = _match(group, points, target, _free(group.parts, later))
    return points


def _sweep_until_still(groups: Sequence[_Group], points: Points, sweeps: int, target_of: Any) -> Points:
    for _ in range(sweeps):
        target, any_changed = target_of(points), False
        for group in groups:
            points, changed = _match(group, points, target, group.parts)
            any_changed |= changed
        if not any_changed:
            break
    return points


def _matched_to_one_another(groups: Sequence[_Group], points: Points, sweeps: int) -> Points:
    target = _absolute(groups, _middle(groups, points))
    points = _first_pass(groups, points, target)
    return _sweep_until_still(groups, points, sweeps, _mean)


def _mean(points: Points) -> Points:
    return {site: np.mean(value, 0, keepdims=True) for site, value in points.items()}


def _middle(groups: Sequence[_Group], points: Points) -> Points:
    """The draw whose norms of units, in order of size, are nearest to the median over the draws."""
    sizes = np.concatenate([np.sort(norms(group.parts, points), -1) for group in groups], -1)
    nearest = int(np.argmin(np.sum((sizes - np.median(sizes, 0)) ** 2, -1)))
    return {site: value[nearest : nearest + 1] for site, value in points.items()}


def _absolute(groups: Sequence[_Group], point: Points) -> Points:
    """A point with signs and orders from itself alone: odd and symmetric functions of the weights of each unit."""
    for group, later in _with_later(groups):
        flips: list[SignFlip] = [*group.layer_flips, *group.unit_flips]
        for _ in range(len(flips)):
            flip, parts = _settled(flips, later)
            flips.remove(flip)
            odd = sum(np.sum(by_unit(part, point[part.site]) ** 3, -1) for part in parts)
            point = act(flip, point, np.where(odd < 0.0, -1.0, 1.0))
        if group.order:
            point = act(group.order, point, np.argsort(-norms(group.parts, point), -1))
    return point


def _settled(flips: Sequence[SignFlip], later: Sequence[Symmetry]) -> tuple[SignFlip, tuple[Part, ...]]:
    """A flip with parts that no other touches, and those."""
    for flip in flips:
        others = [*(other for other in flips if other is not flip), *later]
        free = _free(_alone(flip.parts), others)
        if not any(free[0].site in other.sites for other in others):
            return flip, free
    return flips[0], flips[0].parts
