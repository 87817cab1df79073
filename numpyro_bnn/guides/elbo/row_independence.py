"""Find the rows for which a weight may be redrawn, by tracing its random numbers
through the program.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import ClosedJaxpr, Jaxpr

from numpyro_bnn._jaxprs.axes import LabelPlaces
from numpyro_bnn._jaxprs.primitives import (
    AFFINE,
    RESHAPES,
    SUMMED,
    Place,
    gathered,
    is_affine,
    names_of,
    primitive_of,
    reshaped,
    stacked_columns,
)
from numpyro_bnn._jaxprs.walk import Equation, Interpreter
from numpyro_bnn._types import Arrays, Operand
from numpyro_bnn.guides.elbo.weight_uses import (
    Piece,
    Use,
    axes_except,
    enters_as,
    grown_axes,
    is_vector,
    whole_axes,
)

# Where two weights meet, one of them is drawn once.
MEETINGS = AFFINE | names_of("contraction")


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
    program: ClosedJaxpr,
    values: Arrays,
    candidates: Collection[str],
    call: str,
) -> WeightUses:
    """Trace every candidate to the place where it enters the program, and its random
    numbers from there on.

    Every row may have its own draw of a weight only if each output, a sum of
    terms, depends on one draw. The search starts with a draw for every element of every
    axis that indexes no weights, and drops the draws that turn out to mix, until none
    are left to drop. Nothing is computed. ``values`` are the inputs, in order.
    """
    search = _UseSearch(values, candidates, call)
    constants = list(map(_counting, program.consts))
    while search.changed:
        search.pass_through(program.jaxpr, constants)
    return search.result()


@dataclass(frozen=True)
class _WeightImage:
    """An affine image of a site, elementwise; ``grown`` holds the axes added by
    broadcasting.
    """

    site: str
    grown: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Index:
    """Indices in which some columns count along an axis: ``x[arange(n), i]`` is a
    lookup in every row.

    :param columns: column -> the axis along which it counts.
    """

    columns: Mapping[int, int]


FREE = LabelPlaces()  # a value that depends on no weight under consideration


def _counting(value: Operand) -> Any:
    """A constant that is 0, 1, 2, ...; the values of other constants do not matter."""
    has_values = isinstance(value, np.ndarray | Array) and not isinstance(
        value, jax.core.Tracer
    )
    integers = (
        has_values and value.ndim == 1 and jnp.issubdtype(value.dtype, jnp.integer)
    )
    return np.asarray(value) if integers and _counts(np.asarray(value), 0) else FREE


class _UseSearch(Interpreter):
    def __init__(self, values: Arrays, candidates: Collection[str], call: str) -> None:
        followed = _WeightImage | LabelPlaces | _Index
        super().__init__({}, lambda v: isinstance(v, followed), call, self.visit)
        self.values, self.sites = values, set(candidates)
        self.plain_sites: dict[str, str] = {}
        self.rows: dict[str, dict[int, list[Piece]]] = {}
        self.reasons: dict[str, str] = {}
        self.changed = True

    def pass_through(self, jaxpr: Jaxpr, consts: Sequence[Operand]) -> None:
        """One pass over the program; ``changed`` says whether something was dropped."""
        self.uses: dict[str, Use] = {}
        self.mixed: set[Label] = set()
        self.divided: dict[Label, int] = {}
        self.changed = False
        inputs = []
        for site in self.values:
            followed = site in self.sites and site not in self.plain_sites
            inputs.append(_WeightImage(site) if followed else FREE)
        for value in self.run(jaxpr, consts, inputs):
            if isinstance(value, _WeightImage):
                self._give_up(value.site, "its value is a term of the model")
        self.changed |= bool(self.mixed or self.divided)
        for site, axes in self.rows.items():
            for axis in axes:
                axes[axis] = list(self._refined(site, axis))

    def result(self) -> WeightUses:
        uses, plain = {}, dict(self.plain_sites)
        for site in self.sites - plain.keys():
            use = self.uses.get(site)
            if use is None:
                plain[site] = "no likelihood depends on it"
            elif all(piece.draws <= 1 for piece in chain(*use.rows.values())):
                single = f"it meets a single row at {use.where}"
                plain[site] = self.reasons.get(site, single)
        for site, use in self.uses.items():
            if site not in plain:
                uses[site] = use
        return WeightUses(uses, plain)

    def _give_up(self, site: str, reason: str) -> None:
        if site not in self.plain_sites:
            self.plain_sites[site] = reason
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
                inner = self.divided[label]
                yield Piece(piece.size // inner, True)
                yield Piece(inner, True)
            else:
                yield piece

    def plain(self, equation: Equation, *operands: Operand) -> Operand:
        """Equations without random operands are skipped, except those computed from
        counting (``arange``).
        """
        value: Operand = FREE
        outputs = equation.outputs
        counts = equation.name == "iota" or any(
            isinstance(operand, np.ndarray) for operand in operands
        )
        if counts and len(outputs) == 1 and outputs[0].dtype.kind in "iub":
            with jax.ensure_compile_time_eval():
                results = equation.bind(*operands)
            value = np.asarray(results[0] if equation.several else results)
        return [value] * len(outputs) if equation.several else value

    def visit(self, equation: Equation, *operands: Operand) -> Operand:
        """The rule of every primitive: a weight stays one, becomes rows, or is
        dropped.
        """
        values = list(operands)
        result = self._weights(equation, values)
        if result is None:
            result = self._flow(equation, values) or _stacked(equation, values)
        return [result] * len(equation.outputs) if equation.several else result

    def _flow(self, equation: Equation, values: Sequence[Operand]) -> LabelPlaces:
        """Where the labels lie in the output; a label is dropped if one element needs
        several of its numbers.
        """
        rows = [value if isinstance(value, LabelPlaces) else FREE for value in values]
        if equation.name in RESHAPES:
            return self._reshaped(equation, rows[0])
        primitive = primitive_of(equation.jaxpr_equation)
        columns: Mapping[int, int] = {}
        if equation.name == "gather" and isinstance(values[1], _Index):
            columns = values[1].columns

        def moved(operand: int, place: Place | None) -> Place | None:
            if place is SUMMED or primitive.move is None:
                return SUMMED
            if equation.name == "gather":
                return gathered(equation.jaxpr_equation, operand, place, columns)
            return primitive.move(equation.jaxpr_equation, operand, place)

        output = LabelPlaces()
        for label in dict.fromkeys(chain(*rows)):
            operands, places = [], set()
            for i, labels in enumerate(rows):
                if any(label.site == site for site, _, _ in labels):
                    operands.append(i)
                if label in labels:
                    places.add(moved(i, labels[label]))
            single = len(places) == 1
            if primitive.move is None or not (
                primitive.linear(operands) or (single and SUMMED not in places)
            ):
                # the expectation would differ from that of one draw
                self._mix(label, equation)
            else:
                output[label] = places.pop() if single else SUMMED
        return output

    def _reshaped(self, equation: Equation, rows: LabelPlaces) -> LabelPlaces:
        output = LabelPlaces()
        for label, place in rows.items():
            size = self.rows[label.site][label.axis][label.piece].size
            inner = None
            if place is not SUMMED:
                place, inner = reshaped(equation.jaxpr_equation, place, size)
            if inner is None:
                output[label] = place
            else:
                self.divided[label] = inner  # the search starts again with both parts
        return output

    def _weights(self, equation: Equation, values: list[Operand]) -> Operand:
        """The output if a weight stays one or enters as a whole; otherwise weights in
        ``values`` become values.
        """
        weights = _weights_among(values)
        if equation.name in MEETINGS and len(weights) == len(values) == 2:
            self._settle(equation, values)
            weights = _weights_among(values)
        if len(weights) == 1:
            image = self._one_weight(equation, values, weights[0])
            if image is not None:
                return image
        for i in weights:
            values[i] = self._value(equation, values[i], i)
        return None

    def _settle(self, equation: Equation, values: list[Operand]) -> None:
        """If two weights meet, one is drawn once: the one that is spread over the
        other, or the smaller.
        """
        if all(value.grown for value in values):
            return
        first, second = sorted(
            values, key=lambda value: (not value.grown, self.values[value.site].size)
        )
        self._give_up(
            first.site, f"it meets the random {second.site!r} at {equation.where()}"
        )
        values[:] = [FREE if value.site == first.site else value for value in values]

    def _one_weight(self, equation: Equation, values: list[Operand], i: int) -> Operand:
        weight, out = values[i], equation.outputs[0]
        shape = equation.jaxpr_equation.invars[i].aval.shape
        keeps = out.shape == shape and jnp.issubdtype(out.dtype, jnp.floating)
        by_rows = any(isinstance(value, LabelPlaces) and value for value in values)
        if keeps and is_affine(equation.name, i) and not by_rows:
            return weight
        if weight.grown:
            return None
        if equation.name in RESHAPES | {"transpose"}:
            return weight
        if equation.name == "broadcast_in_dim":
            grown = grown_axes(equation)
            if grown and not is_vector(shape):
                return None
            return _WeightImage(weight.site, grown)
        use = enters_as(equation, i)
        if use is None or (use.kind == "gather" and by_rows):
            return None
        data = self._flow(equation, [*values[:i], FREE, *values[i + 1 :]])
        return self._enter(equation, weight.site, use, data)

    def _value(self, equation: Equation, weight: _WeightImage, i: int) -> LabelPlaces:
        """A weight as an ordinary value: drawn for every row if it was broadcast."""
        shape = equation.jaxpr_equation.invars[i].aval.shape
        out = equation.outputs[0].shape
        grown = weight.grown
        if equation.name in AFFINE and shape != out and not grown and is_vector(shape):
            # Elementwise operations repeat numbers, and axes of length 1, by
            # themselves.
            lengths = shape or (1,) * len(out)
            grown = tuple(axis for axis, n in enumerate(out) if n != lengths[axis])
            shape = out
        if not grown:
            reason = f"it enters `{equation.name}` at {equation.where()}"
            self._give_up(weight.site, reason)
            return FREE
        weight_shape = list(shape)
        for axis in grown:
            weight_shape[axis] = 1
        use = Use(
            "broadcast",
            tuple(weight_shape),
            shape,
            whole_axes(shape, grown),
            axes_except(shape, grown),
            equation.where(),
        )
        return self._enter(equation, weight.site, use, FREE)

    def _enter(
        self, equation: Equation, site: str, use: Use, data: LabelPlaces
    ) -> LabelPlaces:
        """Record a use, and give its output the labels of its rows."""
        first = self.uses.setdefault(site, use)
        first.entries.append(equation.jaxpr_equation)
        # two identical broadcasts take the same random numbers
        alike = first.kind == use.kind == "broadcast" and (
            (first.shape, first.out_shape, first.rows.keys())
            == (use.shape, use.out_shape, use.rows.keys())
        )
        if first is not use and not alike:
            reason = f"it is used twice, at {first.where} and at {use.where}"
            self._give_up(site, reason)
            return data
        if self.rows.setdefault(site, use.rows).keys() != use.rows.keys():
            # another site was dropped, and this one enters elsewhere now
            self.rows[site] = use.rows
        use.rows = first.rows = self.rows[site]
        rows = LabelPlaces(data)
        for axis, pieces in use.rows.items():
            for i, piece in enumerate(pieces):
                if piece.draws > 1:
                    inner = prod(piece.size for piece in pieces[i + 1 :])
                    rows[Label(site, axis, i)] = Place(axis, inner)
        return rows


def _weights_among(values: Sequence[Operand]) -> list[int]:
    return [i for i, value in enumerate(values) if isinstance(value, _WeightImage)]


def _stacked(equation: Equation, values: Sequence[Operand]) -> _Index | LabelPlaces:
    """The indices of a lookup, one column per indexed axis."""
    columns = {}
    for i, value in enumerate(stacked_columns(equation.jaxpr_equation, values)):
        if isinstance(value, np.ndarray) and value.shape[-1] == 1:
            for axis, length in enumerate(value.shape[:-1]):
                if length > 1 and _counts(value[..., 0], axis):
                    columns[i] = axis
    return _Index(columns) if columns else FREE


def _counts(value: np.ndarray, axis: int) -> bool:
    return bool((np.moveaxis(value, axis, -1) == np.arange(value.shape[axis])).all())
