"""Find the rows for which a weight may be redrawn, by tracing its random numbers
through the program.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_bnn._axes import RESHAPES, SUMMED, Place, Rows, reshaped, rule_of
from numpyro_bnn.guides.elbo.weight_uses import (
    AFFINE,
    ELEMENTWISE,
    SHAPING,
    Piece,
    Use,
    enters_as,
    grown_axes,
    is_vector,
)
from numpyro_bnn.moments.interpret import Equation, Interpreter


class Label(NamedTuple):
    """One numbering of the random numbers of a site: a piece of an axis of the output
    where the site enters.
    """

    site: str
    axis: int
    piece: int


class WeightUses(NamedTuple):
    """For each site where it is used, or the reason why it must be drawn once for all
    rows.
    """

    uses: dict[str, Use]
    plain: dict[str, str]


def find_uses(
    program: Any,
    needed: Sequence[bool],
    sizes: Mapping[str, int],
    candidates: Collection[str],
    call: str,
) -> WeightUses:
    """Trace every candidate to the place where it enters the program, and its random
    numbers from there on.

    Every row may have its own draw of a weight only if each needed output, a sum of
    terms, depends on one draw. The search starts with a draw for every element of every
    axis that indexes no weights, and drops the draws that turn out to mix, until none
    are left to drop. Nothing is computed. ``sizes`` are those of the inputs, in order.
    """
    search = _Search({site: sizes[site] for site in candidates}, call)
    constants = [_counting(value) for value in program.consts]
    while search.changed:
        search.once(program.jaxpr, constants, needed, list(sizes))
    return search.result()


@dataclass(frozen=True)
class _WeightImage:
    """An affine image of a site, elementwise; ``grown`` holds the axes added by
    broadcasting.
    """

    site: str
    grown: tuple[int, ...] = ()


class _Free:
    """A value that depends on no weight under consideration."""


class _Index(_Free):
    """Indices in which some columns count along an axis: ``x[arange(n), i]`` is a
    lookup in every row.
    """

    def __init__(self, columns: Mapping[int, int]) -> None:
        self.columns = columns  # the axis along which a column counts


FREE = _Free()


class _RowWalk(Interpreter):
    """Equations without random operands are skipped, except those computed from
    counting (``arange``).
    """

    def _evaluate(self, equation: Equation, operands: list[Any]) -> list[Any]:
        if any(isinstance(value, _WeightImage | Rows | _Free) for value in operands):
            return super()._evaluate(equation, operands)
        counts = equation.name == "iota" or any(
            isinstance(value, np.ndarray) for value in operands
        )
        if (
            counts
            and len(equation.outputs) == 1
            and equation.outputs[0].dtype.kind in "iub"
        ):
            with jax.ensure_compile_time_eval():
                output = equation.bind(*operands)
            return [np.asarray(output if isinstance(output, jax.Array) else output[0])]
        return [FREE] * len(equation.outputs)


def _counting(value: Any) -> Any:
    """A constant that is 0, 1, 2, ...; the values of other constants do not matter."""
    has_values = isinstance(value, np.ndarray | jax.Array) and not isinstance(
        value, jax.core.Tracer
    )
    integers = (
        has_values and value.ndim == 1 and jnp.issubdtype(value.dtype, jnp.integer)
    )
    return np.asarray(value) if integers and _counts(np.asarray(value), 0) else FREE


class _Search:
    def __init__(self, sites: dict[str, int], call: str) -> None:
        self.sites = sites
        self.walk = _RowWalk(
            {},
            lambda value: isinstance(value, _WeightImage | Rows | _Free),
            call,
            self.visit,
        )
        self.plain: dict[str, str] = {}
        self.rows: dict[str, dict[int, list[Piece]]] = {}
        self.reasons: dict[str, str] = {}
        self.changed = True

    def once(
        self,
        jaxpr: Any,
        consts: Sequence[Any],
        needed: Sequence[bool],
        inputs: Sequence[str],
    ) -> None:
        """One pass over the program; ``changed`` says whether something was dropped."""
        self.uses: dict[str, Use] = {}
        self.mixed: set[Label] = set()
        self.divided: dict[Label, int] = {}
        self.changed = False
        followed = self.sites.keys() - self.plain.keys()
        values = [_WeightImage(site) if site in followed else FREE for site in inputs]
        for value in self.walk.run(jaxpr, consts, values, needed):
            if isinstance(value, _WeightImage):
                self._give_up(value.site, "its value is a term of the model")
        for site, axis in {
            (label.site, label.axis) for label in self.mixed | self.divided.keys()
        }:
            self.changed = True
            self.rows[site][axis] = list(self._refined(site, axis))

    def result(self) -> WeightUses:
        plain = dict(self.plain)
        for site in self.sites.keys() - plain.keys():
            use = self.uses.get(site)
            if use is None:
                plain[site] = "no likelihood depends on it"
            elif not any(
                piece.varies and piece.size > 1
                for pieces in use.rows.values()
                for piece in pieces
            ):
                plain[site] = self.reasons.get(
                    site, f"it meets a single row at {use.where}"
                )
        return WeightUses(
            {site: use for site, use in self.uses.items() if site not in plain}, plain
        )

    def _give_up(self, site: str, reason: str) -> None:
        if site not in self.plain:
            self.plain[site] = reason
            self.changed = True

    def _mix(self, label: Label, equation: Equation) -> None:
        self.mixed.add(label)
        self.reasons[label.site] = (
            f"its rows mix in `{equation.name}` at {equation.where()}"
        )

    def _refined(self, site: str, axis: int) -> Iterator[Piece]:
        for i, piece in enumerate(self.rows[site][axis]):
            label = Label(site, axis, i)
            if label in self.mixed:
                yield Piece(piece.size, False)
            elif label in self.divided:
                yield from (
                    Piece(piece.size // self.divided[label], True),
                    Piece(self.divided[label], True),
                )
            else:
                yield piece

    def visit(self, equation: Equation, *operands: Any) -> Any:
        """The rule of every primitive: a weight stays one, becomes
        rows, or is dropped.
        """
        values = list(operands)
        result = self._weights(equation, values)
        if result is None:
            result = self._flow(equation, values) or _stacked(equation, values) or FREE
        return (
            [result] * len(equation.outputs)
            if equation.jaxpr_equation.primitive.multiple_results
            else result
        )

    def _flow(self, equation: Equation, values: Sequence[Any]) -> Rows | None:
        """Where the labels lie in the output; a label is dropped if one element needs
        several of its numbers.
        """
        rows = [value if isinstance(value, Rows) else Rows() for value in values]
        if not any(rows):
            return None
        if equation.name in RESHAPES:
            return self._reshaped(equation, rows[0])
        columns = (
            values[1].columns
            if equation.name == "gather" and isinstance(values[1], _Index)
            else {}
        )
        move, linear = rule_of(equation.jaxpr_equation, columns)
        output = Rows()
        for label in {label: None for held in rows for label in held}:
            is_linear = linear(
                [
                    i
                    for i, held in enumerate(rows)
                    if label.site in {at.site for at in held}
                ]
            )
            places = set()
            for i, place in (
                (i, held[label]) for i, held in enumerate(rows) if label in held
            ):
                places.add(
                    place
                    if place is SUMMED or move is None
                    else move(equation.jaxpr_equation, i, place)
                )
            if (
                move is not None
                and len(places) == 1
                and (is_linear or SUMMED not in places)
            ):
                (output[label],) = places
            elif move is not None and is_linear:
                output[label] = SUMMED
            else:  # the expectation would differ from that of one draw
                self._mix(label, equation)
        return output or None

    def _reshaped(self, equation: Equation, rows: Rows) -> Rows | None:
        old_shape, new_shape = (
            equation.jaxpr_equation.invars[0].aval.shape,
            equation.outputs[0].shape,
        )
        output = Rows()
        for label, place in rows.items():
            size = self.rows[label.site][label.axis][label.piece].size
            new_place, inner = (
                (SUMMED, None)
                if place is SUMMED
                else reshaped(place, size, old_shape, new_shape)
            )
            if inner is None:
                output[label] = new_place
            else:
                self.divided[label] = inner  # the search starts again with both parts
        return output or None

    def _weights(self, equation: Equation, values: list[Any]) -> Any:
        """The output if a weight stays one or enters as a whole; otherwise weights in
        ``values`` become values.
        """
        if equation.name in AFFINE or equation.name in (
            "dot_general",
            "conv_general_dilated",
        ):
            self._settle(equation, values)
        weights = [
            i for i, value in enumerate(values) if isinstance(value, _WeightImage)
        ]
        if len(weights) == 1:
            image = self._one_weight(equation, values, weights[0])
            if image is not None:
                return image
        for i in weights:
            values[i] = self._value(equation, values[i], i)
        return None

    def _settle(self, equation: Equation, values: list[Any]) -> None:
        """If two weights meet, one is drawn once: the one that is spread over the
        other, or the smaller.
        """
        if not all(isinstance(value, _WeightImage) for value in values) or all(
            value.grown for value in values
        ):
            return
        first, second = sorted(
            values, key=lambda value: (not value.grown, self.sites[value.site])
        )
        self._give_up(
            first.site, f"it meets the random {second.site!r} at {equation.where()}"
        )
        values[:] = [FREE if value.site == first.site else value for value in values]

    def _one_weight(self, equation: Equation, values: list[Any], i: int) -> Any:
        weight, name, out = values[i], equation.name, equation.outputs[0]
        shape = equation.jaxpr_equation.invars[i].aval.shape
        if name in ELEMENTWISE and jnp.issubdtype(out.dtype, jnp.floating):
            return weight
        affine = name in AFFINE and (name, i) != ("div", 1)
        if affine and not isinstance(values[1 - i], Rows) and out.shape == shape:
            return weight
        if weight.grown:
            return None
        if name in SHAPING:
            return weight
        if name == "broadcast_in_dim":
            grown = grown_axes(equation)
            return (
                _WeightImage(weight.site, grown)
                if is_vector(shape) or not grown
                else None
            )
        use = enters_as(equation, i)
        if use is None or (use.kind == "gather" and isinstance(values[1], Rows)):
            return None
        return self._enter(
            equation,
            weight.site,
            use,
            self._flow(equation, [*values[:i], FREE, *values[i + 1 :]]),
        )

    def _value(self, equation: Equation, weight: _WeightImage, i: int) -> Rows | _Free:
        """A weight as an ordinary value: drawn for every row if it
        has been broadcast.
        """
        shape, out = (
            equation.jaxpr_equation.invars[i].aval.shape,
            equation.outputs[0].shape,
        )
        grown = weight.grown
        if equation.name in AFFINE and shape != out and not grown and is_vector(shape):
            # Elementwise operations repeat numbers, and axes of length 1, by
            # themselves.
            weight_shape = shape or (1,) * len(out)
            grown, shape = (
                tuple(a for a, n in enumerate(out) if n != weight_shape[a]),
                out,
            )
        if not grown:
            self._give_up(
                weight.site, f"it enters `{equation.name}` at {equation.where()}"
            )
            return FREE
        weight_shape = tuple(1 if a in grown else n for a, n in enumerate(shape))
        rows = {axis: [Piece(shape[axis], True)] for axis in grown}
        outputs = tuple(a for a in range(len(shape)) if a not in grown)
        return self._enter(
            equation,
            weight.site,
            Use("broadcast", weight_shape, shape, rows, outputs, equation.where()),
        )

    def _enter(
        self, equation: Equation, site: str, use: Use, data: Rows | None = None
    ) -> Rows | _Free:
        """Record a use, and give its output the labels of its rows."""
        first = self.uses.setdefault(site, use)
        first.entries.append(equation.jaxpr_equation)
        both_broadcast = (
            first.kind == use.kind == "broadcast"
            and first.rows.keys() == use.rows.keys()
        )
        alike = both_broadcast and (first.shape, first.out_shape) == (
            use.shape,
            use.out_shape,
        )
        if first is not use and not alike:
            # two identical broadcasts take the same random numbers
            self._give_up(
                site, f"it is used twice, at {first.where} and at {use.where}"
            )
            return data or FREE
        if self.rows.setdefault(site, use.rows).keys() != use.rows.keys():
            self.rows[site] = (
                use.rows
            )  # another site was dropped, and this one enters elsewhere now
        by_axis = use.rows = first.rows = self.rows[site]
        rows = Rows(data or {})
        for axis, pieces in by_axis.items():
            for i, piece in enumerate(pieces):
                if piece.varies and piece.size > 1:
                    rows[Label(site, axis, i)] = Place(
                        axis, prod(inner.size for inner in pieces[i + 1 :])
                    )
        return rows or FREE


def _stacked(equation: Equation, values: Sequence[Any]) -> _Index | None:
    """The indices of a lookup, one column per indexed axis."""
    if (
        equation.name != "concatenate"
        or equation.params["dimension"] != len(equation.outputs[0].shape) - 1
    ):
        return None
    columns, column = {}, 0
    for value, var in zip(values, equation.jaxpr_equation.invars, strict=True):
        if isinstance(value, np.ndarray) and value.shape[-1] == 1:
            for axis, length in enumerate(value.shape[:-1]):
                if length > 1 and _counts(value[..., 0], axis):
                    columns[column] = axis
        column += var.aval.shape[-1]
    return _Index(columns) if columns else None


def _counts(value: np.ndarray, axis: int) -> bool:
    return bool((np.moveaxis(value, axis, -1) == np.arange(value.shape[axis])).all())
