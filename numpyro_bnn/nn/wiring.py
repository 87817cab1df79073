"""Which parameters write to the units of a network and which read them: what its symmetries are derived from."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from numpyro_bnn.nn.base import Layer

__all__ = ["Feature", "Reach", "Segment", "Wire", "Wiring"]

Reach = Literal["unit", "layer", "image"]


class Wire(NamedTuple):
    """A parameter and the axis along which it meets the units of a segment.

    :param param: dotted path, e.g. ``"Dense_0.kernel"``.
    :param axis: the axis that runs over the units.
    :param repeats: how often the units are repeated along it (after ``Flatten``), the unit running fastest.
    """

    param: str
    axis: int
    repeats: int = 1


@dataclass
class Segment:
    """A stretch of a network in which the values of every unit keep their meaning up to a common factor.

    It begins where parameters write to the units and ends where others read them; a normalization ends it and
    begins the next.

    :ivar units: number of units or channels.
    :ivar writers: affine parameters whose values are added into the units: kernels (output axis), biases, gains.
    :ivar readers: kernels that take the units as inputs.
    :ivar norms: how far each normalization that reads the units reaches: ``"unit"`` (batch), ``"layer"``,
        or ``"image"``, a layer with its pixels (after ``Flatten``).
    :ivar gains: gains of these normalizations.
    :ivar homogeneous: whether every activation satisfies f(c x) = c f(x) for c > 0.
    :ivar odd: whether every activation satisfies f(-x) = -f(x).
    :ivar linear: whether there is no activation.
    :ivar pointwise: whether no maximum is taken over pixels, which may each be shifted by another number.
    :ivar bound: whether something writes to the units that no parameter scales: inputs, a normalization without gain.
    :ivar fixed: whether the units are inputs or outputs of the network, or pass a layer of unknown kind.
    :ivar before: segments whose normalization begins this one.
    :ivar flipped_with: the segments among them that change sign with it, because their normalization has no gain.

    >>> Segment(3, writers=[Wire("Dense_0.kernel", 1)]).odd
    True
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
    before: list[int] = field(default_factory=list)
    flipped_with: list[int] = field(default_factory=list)


class Feature(NamedTuple):
    """The features of a value inside the network: units of a segment, repeated after ``Flatten``."""

    segment: int
    repeats: int = 1


class Wiring:
    """Record of a symbolic pass through a network; every layer adds what it does with its features.

    :ivar segments: by number; those merged by a residual sum share one entry, see :meth:`find`.
    :ivar output: features of the output.

    >>> from numpyro_bnn import nn
    >>> wiring = nn.Wiring.of(nn.MLP([8, 1], "tanh"), (3,))
    >>> hidden = wiring.segments[1]
    >>> [wire.param for wire in hidden.writers], [wire.param for wire in hidden.readers], hidden.odd
    (['Dense_0.kernel', 'Dense_0.bias'], ['Dense_1.kernel'], True)
    """

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.output = Feature(0)
        self._same: list[int] = []

    @classmethod
    def of(cls, net: "Layer", input_shape: tuple[int, ...]) -> "Wiring":
        """The wiring of a network for data points of ``input_shape``."""
        wiring = cls()
        net.param_shapes(input_shape)  # refuses a shape the network cannot take
        x = wiring.begin(input_shape[-1] if input_shape else 1, bound=True)
        wiring[x].fixed = True
        wiring.output, _ = net.connect(wiring, "", x, tuple(input_shape))
        wiring[wiring.output].fixed = True
        return wiring

    def __getitem__(self, x: Feature | int) -> Segment:
        return self.segments[self.find(x.segment if isinstance(x, Feature) else x)]

    def find(self, segment: int) -> int:
        """Number under which a segment is kept."""
        while self._same[segment] != segment:
            segment = self._same[segment]
        return segment

    def kept(self) -> list[int]:
        """Numbers of all segments, merged ones once."""
        return [i for i, same in enumerate(self._same) if i == same]

    # -- what layers call ------------------------------------------------------------------------------

    def begin(self, units: int, *writers: Wire, bound: bool = False) -> Feature:
        """Begin a segment that ``writers`` write to."""
        self.segments.append(Segment(units, list(writers), bound=bound))
        self._same.append(len(self.segments) - 1)
        return Feature(len(self.segments) - 1)

    def read(self, x: Feature, param: str, axis: int) -> None:
        """A kernel takes the features as its inputs along ``axis``."""
        self[x].readers.append(Wire(param, axis, x.repeats))

    def activate(self, x: Feature, homogeneous: bool, odd: bool) -> None:
        """An elementwise function is applied."""
        segment = self[x]
        segment.homogeneous &= homogeneous
        segment.odd &= odd
        segment.linear = False

    def normalize(self, x: Feature, reach: Reach, gain: str | None, shift: str | None) -> Feature:
        """A normalization reads the features and begins a segment of its own."""
        gains = [Wire(gain, 0, x.repeats)] if gain else []
        shifts = [Wire(shift, 0, x.repeats)] if shift else []
        segment = self[x]
        segment.norms.append("image" if reach == "layer" and x.repeats > 1 else reach)
        segment.gains += gains
        y = self.begin(segment.units, *gains, *shifts, bound=not gain)
        self[y].before.append(x.segment)
        if not gain:
            self[y].flipped_with.append(x.segment)
        return x._replace(segment=y.segment)

    def add(self, a: Feature, b: Feature) -> Feature:
        """Two values are summed: from here on, and therefore before, their units share every factor."""
        i, j = self.find(a.segment), self.find(b.segment)
        if i == j:
            return a
        one, other = self.segments[i], self.segments[j]
        fits = one.units == other.units and a.repeats == b.repeats
        self.segments[i] = replace(
            one,
            writers=one.writers + other.writers,
            readers=one.readers + other.readers,
            norms=one.norms + other.norms,
            gains=one.gains + other.gains,
            homogeneous=one.homogeneous and other.homogeneous,
            odd=one.odd and other.odd,
            linear=one.linear and other.linear,
            pointwise=one.pointwise and other.pointwise,
            bound=one.bound or other.bound,
            fixed=one.fixed or other.fixed or not fits,
            before=one.before + other.before,
            flipped_with=one.flipped_with + other.flipped_with,
        )
        self._same[j] = i
        return a

    def opaque(self, x: Feature, units: int) -> Feature:
        """Something of unknown kind happens: nothing before or after it may be moved through it."""
        self[x].fixed = True
        y = self.begin(units, bound=True)
        self[y].fixed = True
        return y
