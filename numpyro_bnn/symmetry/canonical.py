"""Canonical representatives of draws, for meaningful summaries of single weights."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import jax
import numpy as np

from numpyro_bnn._checks import argument_error
from numpyro_bnn._options import PositiveInt, checked
from numpyro_bnn._types import HostArrays, Trees
from numpyro_bnn.symmetry.base import Symmetry, UnitAxis, axes_without, sites_of
from numpyro_bnn.symmetry.draws import (
    Points,
    act,
    elements,
    in_gauge,
    norms,
    read,
    untouched,
)
from numpyro_bnn.symmetry.groups import Permutation, SignFlip

# Number of draws whose score tables (units x units) are held at once.
CHUNK = 512


@checked("symmetry.canonical")
def canonical(
    draws: Trees,
    symmetries: Sequence[Symmetry],
    reference: Trees | None = None,
    sweeps: PositiveInt = 10,
) -> HostArrays:
    r"""Align draws, so that a weight means the same in all of them; the likelihood of
    each draw is unchanged.

    Every draw is moved along its orbits to a canonical representative:

    - :class:`Shift`: the elements of a unit have mean 0 (a bias before batch
      normalization becomes 0).
    - :class:`Scale` and :class:`Rescale`: the d (incoming) elements of a unit have norm
      :math:`\sqrt d`; in a residual stream those of its first layer.
    - :class:`SignFlip` and :class:`Permutation`: each draw gets the signs and the order
      of units with the largest inner product with a reference, by assignment: layer by
      layer, then in sweeps over the layers.
    - :class:`JointScale`, :class:`JointRescale` and user-defined symmetries: not
      applied.

    Without ``reference``, the first reference is the draw whose unit norms are closest
    to the median over all draws, with its units ordered by norm and positive sums of
    cubed weights; after each sweep the mean of the canonical draws replaces it. So the
    result depends neither on the order of the chains nor on where on its orbit a draw
    lies. If the posterior does not distinguish the units, no labeling can, and R-hat
    stays far from 1.

    Hyperparameters are unchanged: a layer's scale is then no longer that of the weights
    shown. For a non-centered weight the site ``w`` is moved, and ``w_base`` is not.
    Scales of single units, as in ARD or horseshoe priors, are permuted only if a
    :class:`Permutation` names them.

    The assignments take most of the time: one per draw, layer and sweep, cubic in the
    number of units.

    :param draws: site -> (C, S, ...), e.g. ``mcmc.get_samples(group_by_chain=True)`` or
        an ArviZ posterior.
    :param symmetries: e.g. ``symmetry.from_network(net, (13,))``.
    :param reference: site -> (...), one point whose signs and unit order the draws
        adopt.
    :param sweeps: maximum number of sweeps over the layers; they stop when no draw
        changes.
    :return: all sites of ``draws``, as arrays of the original dtypes.
    :raises ValueError: for unknown sites, NaN or infinite draws, or leading axes other
        than chains and draws.

    Reference: Ainsworth, Hayase & Srinivasa (2023), "Git Re-Basin", section 3.2 for the
    layerwise assignment.

    >>> from numpyro_bnn import nn, symmetry
    >>> net = nn.Sequential(
    ...     [nn.Dense(2, use_bias=False), "tanh", nn.Dense(1, use_bias=False)]
    ... )
    >>> kernel = np.array(
    ...     [[[[1.0, -3.0]], [[3.0, 1.0]]]]
    ... )  # one chain, two draws, shape (1, 2)
    >>> out = np.array([[[[1.0], [-2.0]], [[2.0], [1.0]]]])
    >>> draws = {"net/Dense_0.kernel": kernel, "net/Dense_1.kernel": out}
    >>> canonical(draws, symmetry.from_network(net, (1,)))[
    ...     "net/Dense_0.kernel"
    ... ].tolist()
    [[[[3.0, 1.0]], [[3.0, 1.0]]]]
    """
    call = "symmetry.canonical"
    points, symmetries, _ = read(call, draws, symmetries)
    with jax.enable_x64(True):
        points = in_gauge(symmetries, points)
        groups = list(_groups(symmetries, points)) if points else []
        if groups:
            target = None
            if reference is not None:
                target = _target(call, reference, symmetries, points)
            points = _aligned(groups, points, target, sweeps)
    arrays = {site: np.asarray(value) for site, value in draws.items()}
    for site, value in points.items():
        arrays[site] = value.reshape(arrays[site].shape).astype(arrays[site].dtype)
    return arrays


def _target(
    call: str,
    reference: Trees,
    symmetries: Sequence[Symmetry],
    points: Points,
) -> Points:
    """The reference in the gauge, as one draw."""
    point = {site: np.asarray(value)[None] for site, value in reference.items()}
    target, _, _ = read(call, point, symmetries, leading=1)
    for site, value in target.items():
        if value.shape[1:] != points[site].shape[1:]:
            instead = (
                f"The draws are of shape {points[site].shape[1:]}: pass one point."
            )
            raise argument_error(
                call, "reference", f"site {site!r} of shape {value.shape[1:]}", instead
            )
    return in_gauge(symmetries, target)


class _Group(NamedTuple):
    """Units whose order and signs are decided together."""

    order: Permutation | None
    unit_flips: tuple[SignFlip, ...]  # of single units
    layer_flips: tuple[SignFlip, ...]  # of all units at once
    axes: tuple[
        UnitAxis, ...
    ]  # of the sites by which units are compared, over which no other axis runs

    @property
    def members(self) -> tuple[Symmetry, ...]:
        order = (self.order,) if self.order else ()
        return (*order, *self.unit_flips, *self.layer_flips)


def _groups(symmetries: Sequence[Symmetry], points: Points) -> Iterator[_Group]:
    first_draw = jax.tree.map(lambda value: value[0], points)
    flips = [s for s in symmetries if isinstance(s, SignFlip)]
    for order in symmetries:
        if not isinstance(order, Permutation):
            continue
        units = []
        layers = []
        for flip in flips.copy():
            if set(flip.unit_axes) <= set(order.unit_axes):
                units.append(flip)
            elif flip.units(first_draw) == 1 and set(flip.sites) <= set(order.sites):
                layers.append(flip)
            else:
                continue
            flips.remove(flip)
        yield _Group(order, tuple(units), tuple(layers), _alone(order.unit_axes))
    for flip in flips:
        yield _Group(None, (flip,), (), _alone(flip.unit_axes))


def _alone(axes: tuple[UnitAxis, ...]) -> tuple[UnitAxis, ...]:
    """Axes of sites in which no other axis runs over the units; all axes if there is no
    such site.
    """
    sites = [axis.site for axis in axes]
    return tuple(axis for axis in axes if sites.count(axis.site) == 1) or axes


def _aligned(
    groups: Sequence[_Group], points: Points, target: Points | None, sweeps: int
) -> Points:
    """Match all layers to a target, or to the mean of the draws, until no draw changes.

    Before, layer by layer, each by sites that later layers do not change, so that the
    start does not matter.
    """
    first = target or _absolute(groups, _middle(groups, points))
    for group, later_sites in _with_later_sites(groups):
        axes = axes_without(group.axes, later_sites) or group.axes
        points, _ = _match(group, points, first, axes)
    for _ in range(sweeps):
        means = {site: np.mean(v, 0, keepdims=True) for site, v in points.items()}
        any_changed = False
        for group in groups:
            points, changed = _match(group, points, target or means, group.axes)
            any_changed |= changed
        if not any_changed:
            break
    return points


def _match(
    group: _Group, points: Points, target: Points, axes: Sequence[UnitAxis]
) -> tuple[Points, bool]:
    """Find the signs and order of every draw that fit the target best; return whether
    any changed.
    """
    best = []
    for start in range(0, len(points[axes[0].site]), CHUNK):
        best += _best(group, points, target, axes, slice(start, start + CHUNK))
    changed = False
    for member, by_draw in zip(group.members, zip(*best, strict=True), strict=True):
        g = np.stack(by_draw)
        if np.any(g != np.asarray(member.identity(g.shape[1]))):
            points = act(member, points, g)
            changed = True
    return points, changed


def _best(
    group: _Group,
    points: Points,
    target: Points,
    axes: Sequence[UnitAxis],
    chunk: slice,
) -> list[list[np.ndarray]]:
    """For every draw of the chunk, the group elements of the members, to be applied one
    after the other.
    """
    from scipy.optimize import linear_sum_assignment

    # Inner products of units of a reference and of draws: (sites, n, U of reference, U
    # of draw).
    scores = []
    for axis in axes:
        reference = axis.by_unit(target[axis.site])[0]
        scores.append(reference.T @ axis.by_unit(points[axis.site][chunk]))

    def signs_of(flips: Sequence[SignFlip]) -> tuple[np.ndarray, np.ndarray]:
        """All choices of signs, (choices, flips), and those of the sites."""
        signs = np.array(list(product((1.0, -1.0), repeat=len(flips))))
        times = [[flip.sites.count(axis.site) for axis in axes] for flip in flips]
        powers = np.array(times, int).reshape((1, len(flips), len(axes)))
        return signs, np.prod(signs[:, :, None] ** powers, axis=1)

    unit_signs, of_units = signs_of(group.unit_flips)
    layer_signs, of_layers = signs_of(group.layer_flips)
    draws, units = len(scores[0]), np.arange(scores[0].shape[-1])
    best: list[list[np.ndarray]] = [[]] * draws
    best_values = np.full(draws, -np.inf)
    for layer, of_sites in zip(layer_signs, of_layers, strict=True):
        totals = np.tensordot(of_units * of_sites, np.stack(scores), axes=1)
        tables, choices = totals.max(0), totals.argmax(0)
        for i, table in enumerate(tables):
            order = units
            if group.order:
                order = linear_sum_assignment(table, maximize=True)[1]
            value = float(table[units, order].sum())
            if value > best_values[i] + 1e-12 * abs(value):
                # Order first; the signs belong to the units in their new order.
                signs = unit_signs[choices[i][units, order]].T
                best[i] = [*([order] if group.order else []), *signs, *layer[:, None]]
                best_values[i] = value
    return best


def _middle(groups: Sequence[_Group], points: Points) -> Points:
    """The draw whose unit norms, sorted, are closest to the median over the draws."""
    sizes = np.concatenate(
        [np.sort(norms(group.axes, points), -1) for group in groups], -1
    )
    nearest = int(np.argmin(np.sum((sizes - np.median(sizes, 0)) ** 2, -1)))
    return {site: value[nearest : nearest + 1] for site, value in points.items()}


def _absolute(groups: Sequence[_Group], point: Points) -> Points:
    """Fix signs and orders without a reference: by odd and symmetric functions of the
    weights of each unit.
    """
    for group, later_sites in _with_later_sites(groups):
        flips: list[SignFlip] = [*group.layer_flips, *group.unit_flips]
        while flips:
            flip, axes = untouched(
                flips, lambda flip: _alone(flip.unit_axes), later_sites
            )
            flips.remove(flip)
            cubes = np.sum(elements(axes, point) ** 3, 1)
            point = act(flip, point, np.where(cubes < 0.0, -1.0, 1.0))
        if group.order:
            point = act(group.order, point, np.argsort(-norms(group.axes, point), -1))
    return point


def _with_later_sites(groups: Sequence[_Group]) -> Iterator[tuple[_Group, set[str]]]:
    """Each group, and the sites that the groups after it change."""
    for number, group in enumerate(groups):
        later_sites = set()
        for later in groups[number + 1 :]:
            later_sites |= sites_of(later.members)
        yield group, later_sites
