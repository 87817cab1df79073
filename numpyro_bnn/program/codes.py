"""Codes among the data that look up levels which do not exist: JAX would answer with
another level, or with NaN.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from jax.extend.core import ClosedJaxpr

from numpyro_bnn._checks import argument_error
from numpyro_bnn._jaxprs.primitives import VIEWS, names_of
from numpyro_bnn._jaxprs.walk import Equation, Follower, Interpreter, Rule, scan_starts
from numpyro_bnn._types import Arrays, Operand, Trees
from numpyro_bnn.program.compiled import is_traced
from numpyro_bnn.program.plates import log_densities
from numpyro_bnn.program.rows import Rows

LOOKUPS = names_of("lookup")
# Operations whose results are elements of their operands.
MOVES = (
    VIEWS
    | LOOKUPS
    | {"copy", "select_n", "convert_element_type", "stop_gradient", "name"}
)
DRAWN = ""  # in place of an argument: the key of the model


class _SourcedValue(NamedTuple):
    """A value, the arguments that it comes from, and whether its elements are theirs.

    :param origin: what it compares with zero, or adds a length to, as JAX does with
        each index.
    """

    array: Operand
    places: frozenset[str] = frozenset()
    unchanged: bool = True
    origin: Any = None


class _Lookup(NamedTuple):
    """One operation: the extremes of its indices, and the last ones that exist.

    :param reach: (2, axes) minus the smallest index and the largest, so that the reach
        of several operations is their maximum.
    """

    places: frozenset[str]
    reach: Array
    last_levels: np.ndarray


class _Lookups(Interpreter):
    """Evaluates a program and notes what is looked up by data alone.

    :param rows: names of data on disk, by their ids.
    :param answer: what is answered in the place of what does not exist.
    """

    def __init__(self, rows: Mapping[int, str], answer: float | None) -> None:
        self.rows, self.answer = rows, answer
        self.lookups: list[_Lookup] = []
        rules: dict[str, Rule] = {
            "scan": self._scan,
            "cond": self._branches,
            "while": self._loop,
            "shard_map": self._on_devices,
            "select_n": self._select,
            "pure_callback": self._on_disk,
            **dict.fromkeys(LOOKUPS, self._look_up),
        }
        super().__init__(rules, lambda value: True, "", self.plain)

    def constant(self, value: Operand) -> _SourcedValue:
        return _SourcedValue(value)

    def evaluate(
        self, program: ClosedJaxpr, inputs: Sequence[_SourcedValue]
    ) -> list[_SourcedValue]:
        return self.run(program.jaxpr, program.consts, inputs)

    def _inside(
        self, program: ClosedJaxpr, inputs: Sequence[_SourcedValue]
    ) -> tuple[list[_SourcedValue], list[_Lookup]]:
        """The outputs of a program in a loop or branch, and what it looks up."""
        outer, self.lookups = self.lookups, []
        outputs = self.evaluate(program, inputs)
        inner, self.lookups = self.lookups, outer
        return outputs, inner

    def _note(self, lookups: Sequence[_Lookup], reaches: Sequence[Array]) -> None:
        """Note operations in a loop or branch, with the reach that they have in all."""
        for lookup, reach in zip(lookups, reaches, strict=True):
            self.lookups.append(lookup._replace(reach=reach))

    def plain(self, equation: Equation, *operands: _SourcedValue) -> Operand:
        """The rule of all other operations."""
        results = equation.bind(*_arrays(operands))
        places = _places(operands)
        unchanged = not places or (equation.name in MOVES and _all_unchanged(operands))
        origin = operands[0] if equation.name in ("lt", "add") else None
        if not equation.several:
            return _SourcedValue(results, places, unchanged, origin)
        return [_SourcedValue(array, places, unchanged, origin) for array in results]

    def _select(self, equation: Equation, *operands: _SourcedValue) -> _SourcedValue:
        """A negative code among the data does not count from the end."""
        negative, codes, *wrapped = operands
        wraps = all(operand.origin is codes for operand in (negative, *wrapped))
        if wraps and codes.places and codes.unchanged:
            return codes
        return self.plain(equation, *operands)

    def _on_disk(self, equation: Equation, *operands: _SourcedValue) -> Operand:
        """The extremes of a column of integers, in the place of some rows."""
        callback = getattr(equation.params["callback"], "callback_func", None)
        source = getattr(callback, "__self__", None)
        if not isinstance(source, Rows):
            return self.plain(equation, *operands)
        shape = equation.outputs[0]
        if source.ndim > 1 or source.dtype.kind not in "iu":
            return [_SourcedValue(jnp.zeros(shape.shape, shape.dtype))]
        extremes = jnp.asarray(source.extremes[::-1], shape.dtype)
        places = frozenset({self.rows[id(source)]})
        return [_SourcedValue(jnp.resize(extremes, shape.shape), places)]

    def _look_up(self, equation: Equation, *operands: _SourcedValue) -> _SourcedValue:
        """Note an operation; what it found, maybe with other answers."""
        result, indices = self.plain(equation, *operands), operands[1:]
        places = _places(indices)
        # The extremes of columns on disk say nothing about what is computed from them.
        on_disk = places.intersection(self.rows.values())
        unclear = DRAWN in places or (on_disk and not _all_unchanged(indices))
        if not places or unclear or _answers_all(equation):
            return result
        shape = operands[0].array.shape
        if equation.name == "gather":
            numbers = equation.params["dimension_numbers"]
            axes, index = list(numbers.start_index_map), indices[0].array
        else:
            axes = list(range(len(shape)))
            index = jnp.stack([jnp.asarray(start.array, int) for start in indices])
        last_levels = np.subtract(shape, equation.params["slice_sizes"])[axes]
        if not index.size:
            return result
        if self.answer is None:
            flat = index.astype(int).reshape(-1, len(axes))
            reach = jnp.stack([-flat.min(axis=0), flat.max(axis=0)])
            self.lookups.append(_Lookup(places, reach, last_levels))
            return result
        unknown = ((index < 0) | (index > last_levels)).any(axis=-1)
        if equation.name == "gather":
            unknown = jnp.expand_dims(unknown, numbers.offset_dims)
        answer: Operand = self.answer
        dtype = equation.outputs[0].dtype
        if not jnp.issubdtype(dtype, jnp.inexact):  # one that no other level has
            answer = 0 if answer == 0 else jnp.iinfo(dtype).max
        return result._replace(array=jnp.where(unknown, answer, result.array))

    def _branches(
        self, equation: Equation, choice: _SourcedValue, *operands: _SourcedValue
    ) -> list[_SourcedValue]:
        """All branches; what is looked up counts in the one that is taken."""
        branches, outputs = equation.params["branches"], []
        branch_index = jnp.clip(jnp.asarray(choice.array, int), 0, len(branches) - 1)
        for place, branch in enumerate(branches):
            results, lookups = self._inside(branch, operands)
            outputs.append(results)
            taken = branch_index == place
            self._note(lookups, [jnp.where(taken, reach, 0) for _, reach, _ in lookups])
        merged = []
        for values in zip(*outputs, strict=True):
            array = jnp.stack(_arrays(values))[branch_index]
            sources = (choice, *values)
            merged.append(
                _SourcedValue(array, _places(sources), _all_unchanged(sources))
            )
        return merged

    def _loop(self, equation: Equation, *operands: _SourcedValue) -> Operand:
        """Every step; extremes are those of all of them."""
        params = equation.params
        body_start = params["cond_nconsts"]
        carry_start = body_start + params["body_nconsts"]
        carried = operands[carry_start:]
        places = [operand.places for operand in carried]
        noted: list[_Lookup] = []

        def run(name: str, start: int, end: int, arrays: list) -> list[_SourcedValue]:
            inputs = [*operands[start:end], *_of_places(arrays, places)]
            outputs, noted[:] = self._inside(params[name], inputs)
            return outputs

        def body(arrays: list) -> list:
            outputs = run("body_jaxpr", body_start, carry_start, arrays)
            for position, output in enumerate(outputs):
                places[position] |= output.places
            return _arrays(outputs)

        def goes_on(carry: tuple) -> Array:
            return run("cond_jaxpr", 0, body_start, carry[0])[0].array

        def step(carry: tuple) -> tuple[list, list]:
            arrays, reaches = body(carry[0]), carry[1]
            pairs = zip(reaches, noted, strict=True)
            return arrays, [jnp.maximum(reach, lookup.reach) for reach, lookup in pairs]

        previous = None
        while previous != places:  # a carried value may come from data later only
            previous = list(places)
            jax.eval_shape(body, _arrays(carried))
        lookups = list(noted)
        zeros = [jnp.zeros(reach.shape, reach.dtype) for _, reach, _ in lookups]
        start = _arrays(carried), zeros
        arrays, reaches = lax.while_loop(goes_on, step, start)
        self._note(lookups, reaches)
        return _of_places(arrays, places)

    def _scan(self, equation: Equation, *operands: _SourcedValue) -> Any:
        params = equation.params
        carry_start, slice_start = scan_starts(equation)
        num_carry = slice_start - carry_start
        places, noted = _places(operands), list[_Lookup]()

        def of_all(arrays: Sequence[Operand]) -> list[_SourcedValue]:
            return [_SourcedValue(array, places, False) for array in arrays]

        def step(carry: list, slices: list) -> tuple[list, Any]:
            scanned = [
                operand._replace(array=array, origin=None)
                for operand, array in zip(operands[slice_start:], slices, strict=True)
            ]
            inputs = [*operands[:carry_start], *of_all(carry), *scanned]
            outputs, noted[:] = self._inside(params["jaxpr"], inputs)
            arrays = _arrays(outputs)
            reaches = [lookup.reach for lookup in noted]
            return arrays[:num_carry], (arrays[num_carry:], reaches)

        arrays = _arrays(operands)
        carry, (stacked, reaches) = lax.scan(
            step,
            arrays[carry_start:slice_start],
            arrays[slice_start:],
            length=params["length"],
            reverse=params["reverse"],
        )
        self._note(noted, [reach.max(axis=0) for reach in reaches])
        return of_all([*carry, *stacked])

    def _on_devices(self, equation: Equation, *operands: _SourcedValue) -> Any:
        """Every device; extremes are those of all of them."""
        params, noted = equation.params, list[_Lookup]()
        places: list[frozenset[str]] = []

        def part(*arrays: Any) -> tuple[list, list]:
            inputs = [
                operand._replace(array=array, origin=None)
                for operand, array in zip(operands, arrays, strict=True)
            ]
            outputs, noted[:] = self._inside(ClosedJaxpr(params["jaxpr"], ()), inputs)
            places[:] = [output.places for output in outputs]
            return _arrays(outputs), [lookup.reach[None] for lookup in noted]

        axes = params.get("newly_manual_axes", params.get("manual_axes"))
        arrays, reaches = jax.shard_map(
            part,
            mesh=params["mesh"],
            in_specs=tuple(params["in_specs"]),
            out_specs=(list(params["out_specs"]), jax.P(tuple(axes))),
            axis_names=axes,
            check_vma=params["check_vma"],
        )(*_arrays(operands))
        self._note(noted, [reach.max(axis=0) for reach in reaches])
        return _of_places(arrays, places)


def _places(operands: Sequence[_SourcedValue]) -> frozenset[str]:
    return frozenset[str]().union(*(operand.places for operand in operands))


def _arrays(values: Sequence[_SourcedValue]) -> list[Any]:
    return [value.array for value in values]


def _all_unchanged(values: Sequence[_SourcedValue]) -> bool:
    return all(value.unchanged for value in values)


def _of_places(
    arrays: Sequence[Operand], places: Sequence[frozenset[str]]
) -> list[_SourcedValue]:
    """Values that are computed from what lies at some places."""
    pairs = zip(arrays, places, strict=True)
    return [_SourcedValue(array, origins, not origins) for array, origins in pairs]


def _answers_all(equation: Equation) -> bool:
    """Whether the model says what unknown codes look up: ``mode="clip"``,
    or a number.
    """
    mode, fill = equation.params.get("mode"), equation.params.get("fill_value")
    if mode == lax.GatherScatterMode.CLIP:
        # also a dynamic slice under `vmap`, which drops no axis
        return bool(equation.params["dimension_numbers"].collapsed_slice_dims)
    return (
        fill is not None
        and bool(np.isfinite(fill))
        and jnp.issubdtype(equation.outputs[0].dtype, jnp.inexact)
    )


def looks_up_data(reading: Any) -> bool:
    """Whether the model looks up anything by its arguments or by data on disk, or may:
    nothing is evaluated.
    """
    lookups: list[str] = []

    def visit(equation: Equation, *operands: bool) -> bool:
        if equation.name in LOOKUPS and any(operands[1:]):
            lookups.append(equation.name)
        params = equation.params
        has_data = any(operands) or "callback" in params
        programs = [*params.get("branches", ())]
        programs += [params[key] for key in ("jaxpr", "body_jaxpr") if key in params]
        for program in programs:
            jaxpr = getattr(program, "jaxpr", program)  # `shard_map` has an open one
            has_data |= any(walk.follow(jaxpr, [has_data] * len(jaxpr.invars)))
        return has_data

    walk = Follower(visit, False, marked=lambda value: True)
    # the first input is a key
    walk.follow(reading._closed.jaxpr, [False, *[True] * len(reading.data)])
    return bool(lookups)


# a guide reads the prior inside the program that draws from it
@jax.core.eval_context()
def check_codes(reading: Any, leaves: Trees) -> None:
    """Refuse codes in the arguments of a model that look up a level that is not there.

    JAX answers with the last level, or with NaN. What a model masks, replaces or clips
    is its own affair: refused is what changes a log density. An index that is computed,
    such as ``x[i - 1]``, may count from the end.

    :param reading: the model, on all indices of its plates.
    :param leaves: its arguments by name.
    """
    arrays = reading.data
    if is_traced(arrays):
        return
    names, rows = {}, {}
    for name, leaf in leaves.items():
        names[id(leaf)] = name
        if isinstance(leaf, Rows):
            rows[id(leaf)] = name
    places = [
        frozenset({names.get(id(arrays[place]), place)}) for place in sorted(arrays)
    ]
    key, noted = random.key(0), list[_Lookup]()

    def evaluate(key: Array, arrays: Arrays, answer: float | None = None) -> list[Any]:
        evaluator = _Lookups(rows, answer)
        data = map(_SourcedValue, jax.tree.leaves(arrays), places)
        outputs = evaluator.evaluate(
            reading._closed, [_SourcedValue(key, frozenset({DRAWN})), *data]
        )
        noted[:] = evaluator.lookups
        return _arrays(outputs)

    def look_up(on_arrays: Any) -> list[Array]:
        evaluate(key, on_arrays.data)
        return [lookup.reach for lookup in noted]

    def matters(on_arrays: Any) -> Array:
        densities = []
        for answer in (0.0, np.nan):
            changed = copy(on_arrays)
            changed._programs = {}
            changed._closed = jax.make_jaxpr(evaluate, static_argnums=2)(
                key, arrays, answer
            )
            densities.append(log_densities(changed.at()))
        equal = partial(jnp.array_equal, equal_nan=True)
        return ~jnp.array(list(map(equal, *densities))).all()

    jax.eval_shape(lambda: look_up(reading))
    lookups = list(noted)
    if not lookups:
        return
    for lookup, reach in zip(lookups, reading.run(look_up), strict=True):
        smallest, largest = -reach[0], reach[1]
        wrong = np.flatnonzero((smallest < 0) | (largest > lookup.last_levels))
        if wrong.size and reading.run(matters):
            axis, name = wrong[0], " and ".join(sorted(lookup.places))
            levels = lookup.last_levels[axis] + 1
            got = (
                f"codes from {smallest[axis]} to {largest[axis]}, which look up "
                f"{levels} levels"
            )
            instead = (
                f"Pass codes from 0 to {levels - 1}: JAX would answer others with "
                "another level, or NaN. Give missing and unknown categories a level of "
                "their own, mask them, or `jnp.clip` them in the model."
            )
            raise argument_error("model", name, got, instead)
