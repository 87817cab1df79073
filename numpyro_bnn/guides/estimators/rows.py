"""Labels that tell along which axis of a value the random numbers of each row lie."""

from typing import NamedTuple

__all__ = ["SUMMED", "Label", "Place", "Rows"]


class Label(NamedTuple):
    """One numbering of the random numbers of a site: a piece of an axis of the output where they come in."""

    site: str
    axis: int
    piece: int


class Place(NamedTuple):
    """Element i along ``axis`` holds number ``i // inner % size`` of a label."""

    axis: int
    inner: int


# In the place of a place: a sum of terms of which each has one number only, but different terms have different ones.
SUMMED = None


class Rows(dict[Label, Place | None]):
    """A value that depends on random numbers: where each label lies.

    >>> Rows({Label("w", 0, 0): Place(0, 1)}).sites
    {'w'}
    """

    @property
    def sites(self) -> set[str]:
        """Sites whose random numbers the value depends on."""
        return {label.site for label in self}
