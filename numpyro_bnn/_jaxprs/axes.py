"""Where the axes of values go in a program: each primitive moves labels of axes, or
mixes what they number.

A label numbers the elements of an axis, for example the rows of the data. Its place in
a later value says which of its numbers each element depends on; it is ``SUMMED`` where
one element depends on several.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn

from numpyro_bnn._jaxprs.primitives import SUMMED, Place, place_after
from numpyro_bnn._jaxprs.walk import Equation, Follower, scan_starts
from numpyro_bnn._types import Operand


class Axis(NamedTuple):
    """The label of a whole axis of an input, or of a value inside a program."""

    source: str
    axis: int
    size: int


class LabelPlaces(dict[Any, Place | None]):
    """A value that depends on numbered elements: the place of each label."""

    def merge(self, label: Operand, place: Place | None) -> None:
        """Add a label; one that lies at two places is mixed."""
        self[label] = place if self.get(label, place) == place else SUMMED


class AxisFollower(Follower):
    """Follow labels through loops and branches too: carried labels until they no longer
    change.
    """

    def __init__(
        self,
        visit: Callable,
        nothing: Operand,
        marked: Callable[[Operand], bool] = bool,
    ) -> None:
        rules = {"cond": self.branches, "scan": self.scan}
        super().__init__(visit, nothing, rules, marked)

    def joined(self, first: Operand, second: Operand) -> Operand:
        """A value with the labels of two."""
        raise NotImplementedError

    def replaced(
        self, value: Operand, place: Callable[[Place], Place | None]
    ) -> Operand:
        """A value whose labels lie elsewhere."""
        raise NotImplementedError

    def branches(self, equation: Equation, *operands: Operand) -> list[Operand]:
        """The outputs of ``cond``; a predicate is a scalar, so that labels in it are
        those of all elements.
        """
        predicate = self.replaced(operands[0], lambda place: SUMMED)
        outputs = [predicate] * len(equation.outputs)
        for branch in equation.params["branches"]:
            results = self.follow(branch.jaxpr, operands[1:])
            outputs = list(map(self.joined, outputs, results))
        return outputs

    def scan(self, equation: Equation, *operands: Operand) -> list[Operand]:
        """The outputs of ``scan``, which mixes the labels of the axis that it scans."""
        carry_start, slice_start = scan_starts(equation)
        constants = operands[:carry_start]
        slices = [self._shifted(value, -1) for value in operands[slice_start:]]
        previous, carried = None, list(operands[carry_start:slice_start])
        while carried != previous:
            previous = [self.joined(self.nothing, value) for value in carried]
            inputs = [*constants, *previous, *slices]
            outputs = self.follow(equation.params["jaxpr"].jaxpr, inputs)
            # the outputs begin with what is carried
            carried = list(map(self.joined, previous, outputs))
        return [*carried, *(self._shifted(v, 1) for v in outputs[len(carried) :])]

    def _shifted(self, value: Operand, by: int) -> Operand:
        def shifted(place: Place) -> Place | None:
            axis = place.axis + by
            return SUMMED if axis < 0 else place._replace(axis=axis)

        return self.replaced(value, shifted)


class _PlaceFollower(AxisFollower):
    """:func:`follow_axes`."""

    def __init__(self, enter: Callable | None) -> None:
        super().__init__(self._moved, LabelPlaces())
        self.enter = enter

    def _moved(self, equation: Equation, *operands: Operand) -> Operand:
        if all(isinstance(operand, LabelPlaces) for operand in operands):
            return moved(equation.jaxpr_equation, operands)
        assert self.enter is not None  # others have no marks
        return self.enter(equation.jaxpr_equation, operands)

    def _of_labels(
        self, equation: Equation, operands: Sequence[Operand]
    ) -> list[Operand]:
        """What goes into a loop or a branch: marks enter it as a whole."""
        rows = []
        for operand in operands:
            is_mark = not isinstance(operand, LabelPlaces)
            rows.append(self.nothing if is_mark else operand)
        if rows != list(operands) and self.enter is not None:
            self.enter(equation.jaxpr_equation, operands)
        return rows

    def branches(self, equation: Equation, *operands: Operand) -> list[Operand]:
        return super().branches(equation, *self._of_labels(equation, operands))

    def scan(self, equation: Equation, *operands: Operand) -> list[Operand]:
        return super().scan(equation, *self._of_labels(equation, operands))

    def joined(self, first: LabelPlaces, second: LabelPlaces) -> LabelPlaces:
        places = LabelPlaces(first)
        for label, place in second.items():
            places.merge(label, place)
        return places

    def replaced(
        self, value: LabelPlaces, place: Callable[[Place], Place | None]
    ) -> LabelPlaces:
        places = LabelPlaces()
        for label, old in value.items():
            places[label] = SUMMED if old is SUMMED else place(old)
        return places


def follow_axes(
    jaxpr: Jaxpr,
    inputs: Sequence[Operand],
    enter: Callable | None = None,
) -> list[Operand]:
    """The places of labels in the outputs of a program, from those in its inputs;
    nothing is computed.

    :param inputs: :class:`LabelPlaces` for each input, or marks that only ``enter``
        understands.
    :param enter: from an equation one of whose operands has such a mark, and its
        operands, to its output.
    :return: for each output; a label with the value ``SUMMED`` arrives, but not element
        by element.

    >>> import jax, jax.numpy as jnp
    >>> program = jax.make_jaxpr(lambda x, w: (x @ w, x.sum(0)))(
    ...     jnp.ones((3, 2)), jnp.ones((2, 2))
    ... ).jaxpr
    >>> rows = Axis("x", 0, 3)
    >>> [
    ...     places[rows]
    ...     for places in follow_axes(
    ...         program, [LabelPlaces({rows: Place(0, 1)}), LabelPlaces()]
    ...     )
    ... ]
    [Place(axis=0, inner=1), None]
    """
    return _PlaceFollower(enter).follow(jaxpr, inputs)


def moved(equation: JaxprEqn, operands: Sequence[LabelPlaces]) -> LabelPlaces:
    """Where the labels of all operands lie in the output of a primitive."""
    places = LabelPlaces()
    for operand, rows in enumerate(operands):
        for label, place in rows.items():
            places.merge(label, place_after(equation, operand, place, label.size))
    return places
