"""Codes among the data that look up levels which do not exist: JAX would answer with
another level, or with NaN.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.extend.core import Literal

from numpyro_bnn._checks import argument_error
from numpyro_bnn._jaxprs import CALLS, subprogram
from numpyro_bnn.program.compiled import is_traced
from numpyro_bnn.program.plates import sites_of_type
from numpyro_bnn.program.rows import Rows

# Operations whose results are elements of their operands.
MOVES = {
    *("reshape", "squeeze", "broadcast_in_dim", "expand_dims", "transpose", "copy"),
    *("rev", "slice", "dynamic_slice", "gather", "select_n", "split", "concatenate"),
    *("stack", "convert_element_type", "stop_gradient", "name"),
}
DRAWN = ""  # in place of an argument: the key of the model


class _SourcedValue(NamedTuple):
    """A value, the arguments that it comes from, and whether its elements are theirs.

    :param origin: what it compares with zero, or adds a length to, as JAX does with
        each index.
    """

    array: Any
    places: frozenset[str] = frozenset()
    unchanged: bool = True
    origin: Any = None


class _Lookup(NamedTuple):
    """One operation: the extremes of its indices, and the last ones that exist."""

    places: frozenset[str]
    smallest: jax.Array
    largest: jax.Array
    last_levels: np.ndarray


class _Lookups:
    """Evaluates a program and notes what is looked up by data alone.

    :param rows: names of data on disk, by their ids.
    :param answer: what is answered in the place of what does not exist.
    """

    def __init__(self, rows: Mapping[int, str], answer: float | None) -> None:
        self.rows, self.answer = rows, answer
        self.lookups: list[_Lookup] = []

    def evaluate(
        self, program: Any, inputs: Sequence[_SourcedValue]
    ) -> list[_SourcedValue]:
        jaxpr = getattr(program, "jaxpr", program)
        constants = map(_SourcedValue, getattr(program, "consts", ()))
        environment = dict(zip(jaxpr.invars, inputs, strict=True))
        environment.update(zip(jaxpr.constvars, constants, strict=True))

        def read(atom: Any) -> _SourcedValue:
            return (
                _SourcedValue(atom.val)
                if isinstance(atom, Literal)
                else environment[atom]
            )

        for equation in jaxpr.eqns:
            values = self._apply(equation, list(map(read, equation.invars)))
            environment.update(zip(equation.outvars, values, strict=True))
        return list(map(read, jaxpr.outvars))

    def _apply(
        self, equation: Any, operands: list[_SourcedValue]
    ) -> list[_SourcedValue]:
        primitive, params = equation.primitive, equation.params
        name, places = primitive.name, _places(operands)
        if name in CALLS:
            return self.evaluate(
                params.get("jaxpr", params.get("call_jaxpr")), operands
            )
        if name == "scan":
            return self._scan(params, operands)
        if name == "cond":
            return self._branches(params["branches"], *operands)
        if name == "while":
            return self._loop(params, operands)
        callback = getattr(params.get("callback"), "callback_func", None)
        source = getattr(callback, "__self__", None)
        if isinstance(source, Rows):
            return [self._on_disk(source, equation.outvars[0].aval)]
        # a negative code among the data does not count from the end
        if name == "select_n" and _wraps(operands):
            return [operands[1]]
        bound = primitive.get_bind_params(params)
        arrays = primitive.bind(*_arrays(operands), **bound)
        if not primitive.multiple_results:
            arrays = [arrays]
        if name in ("gather", "dynamic_slice"):
            arrays = [self._look_up(equation, operands[1:], arrays[0])]
        unchanged = not places or (name in MOVES and _all_unchanged(operands))
        origin = operands[0] if name in ("lt", "add") else None
        return [_SourcedValue(array, places, unchanged, origin) for array in arrays]

    def _on_disk(self, source: Rows, shape: Any) -> _SourcedValue:
        """The extremes of a column of integers, in the place of some rows."""
        if source.ndim > 1 or source.dtype.kind not in "iu":
            return _SourcedValue(jnp.zeros(shape.shape, shape.dtype))
        extremes = jnp.asarray(source.extremes[::-1], shape.dtype)
        places = frozenset({self.rows[id(source)]})
        return _SourcedValue(jnp.resize(extremes, shape.shape), places)

    def _look_up(
        self, equation: Any, indices: list[_SourcedValue], result: jax.Array
    ) -> Any:
        """Note an operation; what it found, maybe with other answers."""
        params, shape = equation.params, equation.invars[0].aval.shape
        places = _places(indices)
        numbers = params.get("dimension_numbers")
        # The extremes of columns on disk say nothing about what is computed from them.
        on_disk = places.intersection(self.rows.values())
        unclear = DRAWN in places or (on_disk and not _all_unchanged(indices))
        if not places or unclear or _answers_all(params, numbers, result):
            return result
        if numbers is None:
            axes: Sequence[int] = range(len(shape))
            index = jnp.stack([jnp.asarray(start.array, int) for start in indices])
        else:
            axes, index = numbers.start_index_map, indices[0].array
        axes = list(axes)
        last_levels = np.subtract(shape, params["slice_sizes"])[axes]
        flat = index.reshape(-1, len(axes))
        if not flat.size:
            return result
        if self.answer is None:
            smallest, largest = flat.min(axis=0), flat.max(axis=0)
            self.lookups.append(_Lookup(places, smallest, largest, last_levels))
            return result
        unknown = ((index < 0) | (index > last_levels)).any(axis=-1)
        if numbers is not None:
            unknown = jnp.expand_dims(unknown, numbers.offset_dims)
        answer: Any = self.answer
        if not jnp.issubdtype(result.dtype, jnp.inexact):  # one that no other level has
            answer = 0 if answer == 0 else jnp.iinfo(result.dtype).max
        return jnp.where(unknown, answer, result)

    def _branches(
        self, branches: Sequence[Any], choice: _SourcedValue, *operands: _SourcedValue
    ) -> list[_SourcedValue]:
        """All branches; what is looked up counts in the one that is taken."""
        branch_index = jnp.clip(jnp.asarray(choice.array, int), 0, len(branches) - 1)
        lookups, outputs = self.lookups, []
        for place, branch in enumerate(branches):
            self.lookups = []
            outputs.append(self.evaluate(branch, operands))
            for lookup in self.lookups:
                smallest = jnp.where(branch_index == place, lookup.smallest, 0)
                largest = jnp.where(branch_index == place, lookup.largest, 0)
                lookups.append(lookup._replace(smallest=smallest, largest=largest))
        self.lookups = lookups
        results = []
        for values in zip(*outputs, strict=True):
            array = jnp.stack(_arrays(values))[branch_index]
            sources = [choice, *values]
            unchanged = _all_unchanged(sources)
            results.append(_SourcedValue(array, _places(sources), unchanged))
        return results

    def _loop(
        self, params: Mapping[str, Any], operands: list[_SourcedValue]
    ) -> list[_SourcedValue]:
        """Every step; extremes are those of all of them."""
        body_start = params["cond_nconsts"]
        carry_start = body_start + params["body_nconsts"]
        outer_lookups, start = self.lookups, _arrays(operands[carry_start:])
        places = [operand.places for operand in operands[carry_start:]]

        def run(
            name: str, constants: list[_SourcedValue], arrays: list
        ) -> list[_SourcedValue]:
            self.lookups = []
            return self.evaluate(params[name], [*constants, *_computed(arrays, places)])

        def body(arrays: list) -> list:
            outputs = run("body_jaxpr", operands[body_start:carry_start], arrays)
            for place, output in enumerate(outputs):
                places[place] |= output.places
            return _arrays(outputs)

        def goes_on(carry: tuple) -> jax.Array:
            return run("cond_jaxpr", operands[:body_start], carry[0])[0].array

        def step(carry: tuple) -> tuple[list, list]:
            arrays, extremes = carry
            arrays = body(arrays)
            merged = []
            for lookup, (smallest, largest) in zip(self.lookups, extremes, strict=True):
                smallest = jnp.minimum(smallest, lookup.smallest)
                merged.append((smallest, jnp.maximum(largest, lookup.largest)))
            return arrays, merged

        previous = None
        while previous != places:  # a carried value may come from data later only
            previous = list(places)
            jax.eval_shape(body, start)
        lookups, zeros = self.lookups, []
        for lookup in lookups:
            zero = jnp.zeros(lookup.smallest.shape, lookup.smallest.dtype)
            zeros.append((zero, zero))
        arrays, extremes = lax.while_loop(goes_on, step, (start, zeros))
        for lookup, (smallest, largest) in zip(lookups, extremes, strict=True):
            outer_lookups.append(lookup._replace(smallest=smallest, largest=largest))
        self.lookups = outer_lookups
        return _computed(arrays, places)

    def _scan(
        self, params: Mapping[str, Any], operands: list[_SourcedValue]
    ) -> list[_SourcedValue]:
        carry_start, num_carry = params["num_consts"], params["num_carry"]
        slice_start = carry_start + num_carry
        places, outer_lookups = _places(operands), self.lookups

        def step(carry: list, slices: list) -> tuple[list, Any]:
            carried = [_SourcedValue(array, places, False) for array in carry]
            scanned = [
                operand._replace(array=array, origin=None)
                for operand, array in zip(operands[slice_start:], slices, strict=True)
            ]
            self.lookups = []
            outputs = self.evaluate(
                params["jaxpr"], [*operands[:carry_start], *carried, *scanned]
            )
            arrays = _arrays(outputs)
            stacked = arrays[num_carry:], _extremes(self.lookups)
            return arrays[:num_carry], stacked

        start = _arrays(operands[carry_start:slice_start])
        slices = _arrays(operands[slice_start:])
        carry, (stacked, extremes) = lax.scan(
            step, start, slices, length=params["length"], reverse=params["reverse"]
        )
        for lookup, (smallest, largest) in zip(self.lookups, extremes, strict=True):
            outer_lookups.append(
                lookup._replace(
                    smallest=smallest.min(axis=0), largest=largest.max(axis=0)
                )
            )
        self.lookups = outer_lookups
        return [_SourcedValue(array, places, False) for array in (*carry, *stacked)]


def _places(operands: Sequence[_SourcedValue]) -> frozenset[str]:
    return frozenset[str]().union(*(operand.places for operand in operands))


def _arrays(values: Sequence[_SourcedValue]) -> list[Any]:
    return [value.array for value in values]


def _all_unchanged(values: Sequence[_SourcedValue]) -> bool:
    return all(value.unchanged for value in values)


def _computed(
    arrays: Sequence[Any], places: Sequence[frozenset[str]]
) -> list[_SourcedValue]:
    """Values that are computed from what lies at some places."""
    pairs = zip(arrays, places, strict=True)
    return [_SourcedValue(array, origins, not origins) for array, origins in pairs]


def _extremes(lookups: Sequence[_Lookup]) -> list[tuple[jax.Array, jax.Array]]:
    return [(lookup.smallest, lookup.largest) for lookup in lookups]


def _wraps(operands: Sequence[_SourcedValue]) -> bool:
    """Whether these are codes that JAX counts from the end where they are negative."""
    negative, codes, *wrapped = operands
    return (
        bool(codes.places)
        and codes.unchanged
        and all(operand.origin is codes for operand in (negative, *wrapped))
    )


def _looks_up(jaxpr: Any, marked: Sequence[bool]) -> bool:
    """Whether something is looked up by marked inputs or by data on disk, or may be:
    nothing is evaluated.
    """
    data = set(compress(jaxpr.invars, marked))
    for equation in jaxpr.eqns:
        name, inner = equation.primitive.name, subprogram(equation)
        operands = [
            not isinstance(atom, Literal) and atom in data for atom in equation.invars
        ]
        if name in ("gather", "dynamic_slice") and any(operands[1:]):
            return True
        if inner is not None and _looks_up(
            inner, operands if name in CALLS else [any(operands)] * len(operands)
        ):
            return True
        programs = list(equation.params.get("branches", ()))
        if name == "while":
            programs.append(equation.params["body_jaxpr"])
        for program in programs:
            if _looks_up(program.jaxpr, [any(operands)] * len(program.jaxpr.invars)):
                return True
        if any(operands) or "callback" in equation.params:
            data.update(equation.outvars)
    return False


def _answers_all(params: Mapping[str, Any], numbers: Any, result: jax.Array) -> bool:
    """Whether the model says what unknown codes look up: ``mode="clip"``,
    or a number.
    """
    mode, fill = params.get("mode"), params.get("fill_value")
    if mode == lax.GatherScatterMode.CLIP:
        # also a dynamic slice under `vmap`, which drops no axis
        return bool(numbers.collapsed_slice_dims)
    return (
        fill is not None
        and bool(np.isfinite(fill))
        and jnp.issubdtype(result.dtype, jnp.inexact)
    )


def looks_up_data(reading: Any) -> bool:
    """Whether the model looks up anything by its arguments, or may."""
    # the first input is a key
    return _looks_up(reading._closed.jaxpr, [False, *[True] * len(reading._arrays)])


def check_codes(reading: Any, leaves: Mapping[str, Any]) -> None:
    """Refuse codes in the arguments of a model that look up a level that is not there.

    JAX answers with the last level, or with NaN. What a model masks, replaces or clips
    is its own affair: refused is what changes a log density. An index that is computed,
    such as ``x[i - 1]``, may count from the end.

    :param reading: the model, on all indices of its plates.
    :param leaves: its arguments by name.
    """
    arrays = reading._arrays
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

    def evaluate(key: jax.Array, arrays: Any, answer: float | None = None) -> list[Any]:
        evaluator = _Lookups(rows, answer)
        data = map(_SourcedValue, jax.tree.leaves(arrays), places)
        outputs = evaluator.evaluate(
            reading._closed, [_SourcedValue(key, frozenset({DRAWN})), *data]
        )
        noted[:] = evaluator.lookups
        return _arrays(outputs)

    def look_up(on_arrays: Any) -> list[tuple]:
        evaluate(key, on_arrays._arrays)
        return _extremes(noted)

    def matters(on_arrays: Any) -> jax.Array:
        densities = []
        for answer in (0.0, np.nan):
            changed = copy(on_arrays)
            changed._programs = {}
            changed._closed = jax.make_jaxpr(evaluate, static_argnums=2)(
                key, arrays, answer
            )
            sites = sites_of_type(changed.at(), "sample").values()
            densities.append([site["fn"].log_prob(site["value"]) for site in sites])
        equal = partial(jnp.array_equal, equal_nan=True)
        return ~jnp.array(list(map(equal, *densities))).all()

    jax.eval_shape(lambda: look_up(reading))
    lookups = list(noted)
    for lookup, (smallest, largest) in zip(
        lookups, reading.run(look_up) if lookups else (), strict=True
    ):
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
