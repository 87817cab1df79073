"""Record of which parameters write to the units of a network and which read them, to
derive its symmetries.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Reach = Literal["unit", "layer", "image"]


class Wire(NamedTuple):
    """A parameter, its axis that runs over the units, and how often they repeat along
    it (units run fastest).
    """

    param: str
    axis: int
    repeats: int = 1


@dataclass
class Segment:
    """A stretch of a network along which every unit keeps its value up to a factor of
    its own.

    It begins where parameters write to the units and ends where others read them. A
    normalization ends it and begins the next.

    :ivar units: number of units or channels.
    :ivar writers: affine parameters whose values are added into the units: kernels
        (output axis), biases, gains.
    :ivar readers: kernels that take the units as inputs.
    :ivar norms: how far each normalization that reads the units reaches: ``"unit"``
        (batch), ``"layer"``, or ``"image"``, a layer with its pixels (after
        ``Flatten``).
    :ivar gains: gains of these normalizations.
    :ivar homogeneous: whether every activation satisfies f(c x) = c f(x) for c > 0.
    :ivar odd: whether every activation satisfies f(-x) = -f(x).
    :ivar linear: whether there is no activation.
    :ivar pointwise: whether no maximum is taken over pixels, each of which may be
        shifted by another number.
    :ivar bound: whether anything without a scaling parameter writes to the units:
        inputs, a normalization without gain.
    :ivar fixed: whether the units are inputs or outputs of the network, or pass a layer
        of unknown kind.
    :ivar normalized: segments whose normalization begins this one.
    :ivar flipped_with: those of them that change sign with it, because their
        normalization has no gain.
    """

    units: int
    writers: list[Wire] = field(default_factory=list)
    readers: list[Wire] = field(default_factory=list)
    norms: list[Reach] = field(default_factory=list)
    gains: list[Wire] = field(default_factory=list)
    homogeneous: bool = True
    odd: bool = True
    linear: bool = True
    pointwise: bool = True
    bound: bool = False
    fixed: bool = False
    normalized: list[int] = field(default_factory=list)
    flipped_with: list[int] = field(default_factory=list)

    def absorb(self, segment: "Segment") -> None:
        """Merge with another segment whose units are added to these: a property must
        hold for both.
        """
        for name in (
            "writers",
            "readers",
            "norms",
            "gains",
            "normalized",
            "flipped_with",
        ):
            getattr(self, name).extend(getattr(segment, name))
        for name in ("homogeneous", "odd", "linear", "pointwise"):
            setattr(self, name, getattr(self, name) and getattr(segment, name))
        self.bound |= segment.bound
        self.fixed |= segment.fixed or self.units != segment.units


class Feature(NamedTuple):
    """The features of a value inside the network: units of a segment, repeated after
    ``Flatten``.
    """

    segment: int
    repeats: int = 1


class Wiring:
    """Record of a symbolic pass through a network: every layer adds how its parameters
    meet the features.

    Made by :meth:`numpyro_bnn.nn.Layer.wiring`.

    :ivar segments: by number; those merged by a residual sum share one entry, see
        :meth:`find`.
    :ivar output: features of the output.

    >>> from numpyro_bnn import nn
    >>> wiring = nn.MLP([8, 1], "tanh").wiring((3,))
    >>> hidden = wiring.segments[1]
    >>> (
    ...     [wire.param for wire in hidden.writers],
    ...     [wire.param for wire in hidden.readers],
    ...     hidden.odd,
    ... )
    (['Dense_0.kernel', 'Dense_0.bias'], ['Dense_1.kernel'], True)
    """

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.output = Feature(0)
        self._same: list[int] = []

    def __getitem__(self, x: Feature | int) -> Segment:
        return self.segments[self.find(x.segment if isinstance(x, Feature) else x)]

    def find(self, segment: int) -> int:
        """Number under which a segment is stored."""
        while self._same[segment] != segment:
            segment = self._same[segment]
        return segment

    def distinct(self) -> list[int]:
        """Numbers of all segments, merged ones once."""
        return [i for i, same in enumerate(self._same) if i == same]

    def begin(self, units: int, *writers: Wire, bound: bool = False) -> Feature:
        """Begin a segment that ``writers`` write to."""
        self.segments.append(Segment(units, list(writers), bound=bound))
        self._same.append(len(self.segments) - 1)
        return Feature(len(self.segments) - 1)

    def read(self, x: Feature, param: str, axis: int) -> None:
        """Record that a kernel takes the features as its inputs along ``axis``."""
        self[x].readers.append(Wire(param, axis, x.repeats))

    def activate(self, x: Feature, homogeneous: bool, odd: bool) -> None:
        """Record that an elementwise function is applied."""
        segment = self[x]
        segment.homogeneous &= homogeneous
        segment.odd &= odd
        segment.linear = False

    def normalize(
        self, x: Feature, reach: Reach, gain: str | None, shift: str | None
    ) -> Feature:
        """Record that a normalization reads the features; it begins a new segment."""
        gains = [Wire(gain, 0, x.repeats)] if gain else []
        shifts = [Wire(shift, 0, x.repeats)] if shift else []
        segment = self[x]
        segment.norms.append("image" if reach == "layer" and x.repeats > 1 else reach)
        segment.gains += gains
        y = self.begin(segment.units, *gains, *shifts, bound=not gain)
        self[y].normalized.append(x.segment)
        if not gain:
            self[y].flipped_with.append(x.segment)
        return x._replace(segment=y.segment)

    def add(self, a: Feature, b: Feature) -> Feature:
        """Record that two values are summed: here and everywhere before, their units
        share every factor.
        """
        i, j = self.find(a.segment), self.find(b.segment)
        if i != j:
            self.segments[i].absorb(self.segments[j])
            self.segments[i].fixed |= a.repeats != b.repeats
            self._same[j] = i
        return a

    def opaque(self, x: Feature, units: int) -> Feature:
        """Record an unknown operation, through which no symmetry passes."""
        self[x].fixed = True
        y = self.begin(units, bound=True)
        self[y].fixed = True
        return y
