"""Candidates for permutations and signs of hidden units in models that are not made of our layers."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from numpyro_bnn.symmetry.base import Symmetry, UnitAxis
from numpyro_bnn.symmetry.groups import Permutation, SignFlip

MOST_AXES = 8  # axes of one length of which all subsets are tried


def hidden_units(
    shapes: Mapping[str, Any], left_out: Collection[str], valid: Callable[[list[Symmetry]], list[Symmetry]]
) -> list[Symmetry]:
    """Permutations and sign flips of axes of one length in two or more sites that leave the likelihood as it is.

    Every set of such axes is tried, and the smallest that hold are kept: sets that contain another are left out.

    :param shapes: the latent sites, as arrays or their shapes and dtypes.
    :param left_out: sites whose symmetries are known.
    :param valid: returns those of some symmetries that hold, by evaluating the model.
    """
    by_length: dict[int, list[UnitAxis]] = defaultdict(list)
    for site, value in shapes.items():
        for axis, length in enumerate(value.shape if site not in left_out else ()):
            if length > 1:
                by_length[length].append(UnitAxis(site, axis))
    candidates: list[Symmetry] = [Permutation(axes) for found in by_length.values() for axes in _subsets(found)]
    kept: list[Symmetry] = []
    for symmetry in sorted(valid(candidates) if candidates else [], key=lambda entry: len(entry.unit_axes)):
        if not any(set(known.unit_axes) <= set(symmetry.unit_axes) for known in kept):
            kept.append(symmetry)
    # An axis that may be permuted alone, as of hyperparameters, does not enter the likelihood.
    kept = [symmetry for symmetry in kept if len(symmetry.unit_axes) > 1]
    signs: list[Symmetry] = [SignFlip(symmetry.unit_axes) for symmetry in kept]
    return kept + (valid(signs) if signs else [])


def _subsets(axes: Sequence[UnitAxis]) -> Iterator[tuple[UnitAxis, ...]]:
    """Sets of axes of different sites."""
    if len(axes) <= MOST_AXES:
        for size in range(1, len(axes) + 1):
            for chosen in combinations(axes, size):
                if len({axis.site for axis in chosen}) == size:
                    yield chosen
