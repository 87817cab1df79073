"""The symmetries of a network, from what its layers say about their wiring."""

from collections import Counter
from collections.abc import Callable, Iterator

from numpyro_bnn._checks import argument_error
from numpyro_bnn.nn import Layer, Segment, Shape, Wire, Wiring
from numpyro_bnn.symmetry.additive import Shift
from numpyro_bnn.symmetry.base import Symmetry
from numpyro_bnn.symmetry.discrete import Permutation, SignFlip
from numpyro_bnn.symmetry.parts import Part
from numpyro_bnn.symmetry.scaling import Rescale, Scale

__all__ = ["from_network"]


def from_network(net: Layer, input_shape: Shape, name: str = "net", logits: bool = False) -> list[Symmetry]:
    """Derive the symmetries of a network from its layers.

    - :class:`Scale` and :class:`Shift` of what feeds a normalization,
    - :class:`Rescale` of positively homogeneous units, through convolutions, pooling and residual streams,
    - :class:`SignFlip` of units with odd activations, and of a normalized unit with its gain,
    - :class:`Permutation` of hidden units,
    - with ``logits`` a common :class:`Shift` of all outputs.

    Layers of your own take part by :meth:`~numpyro_bnn.nn.Layer.connect`. For the hyper-parameters too, use
    :func:`find`, which reads a whole model.

    :param net: the specification, e.g. ``nn.MLP([50, 1])``.
    :param input_shape: shape of one data point.
    :param name: prefix of the sites, as given to :func:`~numpyro_bnn.random_network`.
    :param logits: whether the outputs are class logits.

    >>> from numpyro_bnn import nn
    >>> [s.name for s in from_network(nn.MLP([8, 1], "relu"), (3,))]
    ['Rescale(net/Dense_0.kernel)', 'Permutation(net/Dense_0.kernel)']
    >>> [s.name for s in from_network(nn.MLP([8, 1], "tanh", norm=nn.LayerNorm(False, False)), (3,))][:2]
    ['Scale(net/Dense_0.kernel)', 'Shift(net/Dense_0.kernel)']
    """
    if not isinstance(net, Layer):
        raise argument_error(
            "symmetry.from_network", "net", net, "Pass a specification such as `nn.MLP([50, 1])`.", TypeError
        )
    wiring = Wiring.of(net, input_shape)
    found: list[Symmetry] = []
    for make in (_scales, _flips, _permutations):
        found += make(wiring, lambda path: f"{name}/{path}")
    if logits:
        found += _logit_shifts(wiring, lambda path: f"{name}/{path}")
    return found


Namer = Callable[[str], str]


def _part(wire: Wire, site: Namer, per_layer: bool = False) -> Part:
    return Part(site(wire.param)) if per_layer else Part(site(wire.param), wire.axis, wire.repeats)


def _parts(wires: list[Wire], site: Namer, per_layer: bool = False) -> tuple[Part, ...]:
    return tuple(dict.fromkeys(_part(wire, site, per_layer) for wire in wires))


def _is(kind: str, wire: Wire) -> bool:
    return wire.param.rsplit(".", 1)[-1] == kind


def _reaches_far(segment: Segment) -> bool:
    """Whether a normalization joins its units, so that only one number for all of them is free."""
    return any(reach != "unit" for reach in segment.norms)


def _scales(wiring: Wiring, site: Namer) -> Iterator[Symmetry]:
    for i in wiring.kept():
        segment = wiring.segments[i]
        if segment.fixed or segment.bound or not segment.homogeneous or not segment.writers:
            continue
        layer = _reaches_far(segment)
        if segment.readers:
            yield Rescale(_parts(segment.writers, site, layer), _parts(segment.readers, site, layer))
        elif segment.norms:
            yield from _before_normalization(segment, site, layer)


def _before_normalization(segment: Segment, site: Namer, layer: bool) -> Iterator[Symmetry]:
    """What feeds nothing but normalizations: its scale, and where no activation intervenes its mean, are free."""
    biases = [wire for wire in segment.writers if _is("bias", wire)]
    factors = [wire for wire in segment.writers if wire not in biases]
    if not segment.linear:
        yield Scale(_parts(segment.writers, site, layer))
    elif layer:
        # One factor for the layer; a shift that all units share, from the bias and from every input.
        yield Scale(_parts(segment.writers, site, True))
        for wire in factors:
            # What an input adds differs by data point and pixel: every normalization must be of one of them alone.
            if _is("kernel", wire) and segment.pointwise and set(segment.norms) == {"layer"}:
                yield Shift((Part(site(wire.param), wire.axis - 1),))
        if biases:
            yield Shift((Part(site(biases[0].param)),))
    else:
        # The mean of each unit is taken away: a bias does nothing at all, so only kernels and gains scale.
        yield Scale(_parts(factors, site))
        yield from (Shift(_parts([wire], site)) for wire in biases)


def _flips(wiring: Wiring, site: Namer) -> Iterator[Symmetry]:
    """Segments whose normalization has no gain change sign with what comes before."""
    for members in _groups(wiring, lambda segment: segment.flipped_with):
        segments = [wiring.segments[i] for i in members]
        if any(s.fixed or not s.odd for s in segments) or not any(s.writers for s in segments):
            continue
        if any(s.bound and not s.flipped_with for s in segments):
            continue
        wires = [wire for s in segments for wire in (*s.writers, *s.readers, *s.gains)]
        layer = any(map(_reaches_far, segments))
        parts = Counter(_part(wire, site, layer) for wire in wires)
        # A kernel between flipped layers, or the gain of a flipped output, changes its sign twice.
        yield SignFlip(tuple(part for part, times in parts.items() if times % 2))


def _permutations(wiring: Wiring, site: Namer) -> Iterator[Symmetry]:
    for members in _groups(wiring, lambda segment: segment.before):
        segments = [wiring.segments[i] for i in members]
        if any(s.fixed for s in segments) or max(s.units for s in segments) < 2:
            continue
        wires = [wire for s in segments for wire in (*s.writers, *s.readers)]
        if wires:
            yield Permutation(_parts(wires, site))


def _groups(wiring: Wiring, linked: Callable[[Segment], list[int]]) -> list[list[int]]:
    """Segments joined by links, in the order of the network."""
    group = {i: {i} for i in wiring.kept()}
    for i in wiring.kept():
        for before in linked(wiring.segments[i]):
            joined = group[i] | group[wiring.find(before)]
            group.update(dict.fromkeys(joined, joined))
    return [sorted(g) for g in dict.fromkeys(map(frozenset, group.values()))]


def _logit_shifts(wiring: Wiring, site: Namer) -> Iterator[Symmetry]:
    """All outputs get one number more: from the bias, and from every input of the last layer."""
    last = wiring[wiring.output]
    if not last.linear or last.bound or last.readers or last.norms:
        return
    for wire in last.writers:
        if _is("bias", wire):
            yield Shift((Part(site(wire.param)),))
        elif _is("kernel", wire) and last.pointwise and wiring.output.repeats == 1:
            yield Shift((Part(site(wire.param), wire.axis - 1),))
