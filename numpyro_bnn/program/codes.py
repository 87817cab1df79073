"""Codes among the data that look up levels which do not exist: JAX would answer with
another level, or with NaN.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.extend.core import Literal

from numpyro_bnn._checks import argument_error
from numpyro_bnn._jaxprs import CALLS, subprogram
from numpyro_bnn.program.compiled import is_traced
from numpyro_bnn.program.rows import Rows

# Operations whose results are elements of their operands.
MOVES = {
    *(
        "reshape",
        "squeeze",
        "broadcast_in_dim",
        "expand_dims",
        "transpose",
        "copy",
        "rev",
    ),
    *("slice", "dynamic_slice", "gather", "select_n", "split", "concatenate", "stack"),
    *("convert_element_type", "stop_gradient", "name"),
}
DRAWN = ""  # in place of an argument: the key of the model


class _Value(NamedTuple):
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

    def evaluate(self, program: Any, inputs: Sequence[_Value]) -> list[_Value]:
        jaxpr = getattr(program, "jaxpr", program)
        constants = map(_Value, getattr(program, "consts", ()))
        environment = dict(zip(jaxpr.invars, inputs, strict=True))
        environment.update(zip(jaxpr.constvars, constants, strict=True))

        def read(atom: Any) -> _Value:
            return _Value(atom.val) if isinstance(atom, Literal) else environment[atom]

        for equation in jaxpr.eqns:
            values = self._apply(equation, [read(atom) for atom in equation.invars])
            environment.update(zip(equation.outvars, values, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _apply(self, equation: Any, operands: list[_Value]) -> list[_Value]:
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
        if name == "select_n" and _wraps(operands):
            return [
                operands[1]
            ]  # a negative code among the data does not count from the end
        bound = primitive.get_bind_params(params)
        arrays = primitive.bind(*(operand.array for operand in operands), **bound)
        if not primitive.multiple_results:
            arrays = [arrays]
        if name in ("gather", "dynamic_slice"):
            arrays = [self._look_up(equation, operands[1:], arrays[0])]
        unchanged = name in MOVES and all(operand.unchanged for operand in operands)
        origin = operands[0] if name in ("lt", "add") else None
        return [
            _Value(array, places, unchanged or not places, origin) for array in arrays
        ]

    def _on_disk(self, source: Rows, shape: Any) -> _Value:
        """The extremes of a column of integers, in the place of some rows."""
        if source.ndim > 1 or source.dtype.kind not in "iu":
            return _Value(jnp.zeros(shape.shape, shape.dtype))
        extremes = jnp.asarray(source.extremes[::-1], shape.dtype)
        places = frozenset({self.rows[id(source)]})
        return _Value(jnp.resize(extremes, shape.shape), places)

    def _look_up(self, equation: Any, indices: list[_Value], result: jax.Array) -> Any:
        """Note an operation; what it found, maybe with other answers."""
        params, shape, places = (
            equation.params,
            equation.invars[0].aval.shape,
            _places(indices),
        )
        numbers = params.get("dimension_numbers")
        # The extremes of columns on disk say nothing about what is computed from them.
        computed = not all(index.unchanged for index in indices)
        unclear = DRAWN in places or (
            computed and places.intersection(self.rows.values())
        )
        if not places or unclear or _answers_all(params, numbers, result):
            return result
        if numbers is None:
            axes: Sequence[int] = range(len(shape))
            index = jnp.stack([jnp.asarray(start.array, int) for start in indices])
        else:
            axes, index = numbers.start_index_map, indices[0].array
        last_levels = np.array(
            [shape[axis] - params["slice_sizes"][axis] for axis in axes]
        )
        flat = index.reshape(-1, len(axes))
        if self.answer is None or not flat.size:
            if flat.size:
                self.lookups.append(
                    _Lookup(places, flat.min(axis=0), flat.max(axis=0), last_levels)
                )
            return result
        unknown = ((index < 0) | (index > last_levels)).any(axis=-1)
        if numbers is not None:
            unknown = jnp.expand_dims(unknown, numbers.offset_dims)
        answer: Any = self.answer
        if not jnp.issubdtype(result.dtype, jnp.inexact):  # one that no other level has
            answer = 0 if answer == 0 else jnp.iinfo(result.dtype).max
        return jnp.where(unknown, answer, result)

    def _branches(
        self, branches: Sequence[Any], choice: _Value, *operands: _Value
    ) -> list[_Value]:
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
            array = jnp.stack([value.array for value in values])[branch_index]
            unchanged = all(operand.unchanged for operand in (choice, *values))
            results.append(_Value(array, _places([choice, *values]), unchanged))
        return results

    def _loop(self, params: Mapping[str, Any], operands: list[_Value]) -> list[_Value]:
        """Every step; extremes are those of all of them."""
        body_start = params["cond_nconsts"]
        carry_start = body_start + params["body_nconsts"]
        outer_lookups, start = (
            self.lookups,
            [operand.array for operand in operands[carry_start:]],
        )
        places = [operand.places for operand in operands[carry_start:]]

        def run(name: str, constants: list[_Value], arrays: list) -> list[_Value]:
            self.lookups = []
            carried = [
                _Value(array, origins, not origins)
                for array, origins in zip(arrays, places, strict=True)
            ]
            return self.evaluate(params[name], [*constants, *carried])

        def body(arrays: list) -> list:
            outputs = run("body_jaxpr", operands[body_start:carry_start], arrays)
            for place, output in enumerate(outputs):
                places[place] |= output.places
            return [output.array for output in outputs]

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
        lookups = self.lookups
        zeros = [
            (jnp.zeros(lookup.smallest.shape, lookup.smallest.dtype),) * 2
            for lookup in lookups
        ]
        arrays, extremes = lax.while_loop(goes_on, step, (start, zeros))
        for lookup, (smallest, largest) in zip(lookups, extremes, strict=True):
            outer_lookups.append(lookup._replace(smallest=smallest, largest=largest))
        self.lookups = outer_lookups
        return [
            _Value(array, origins, not origins)
            for array, origins in zip(arrays, places, strict=True)
        ]

    def _scan(self, params: Mapping[str, Any], operands: list[_Value]) -> list[_Value]:
        carry_start = params["num_consts"]
        slice_start = carry_start + params["num_carry"]
        places, outer_lookups = _places(operands), self.lookups

        def step(carry: list, slices: list) -> tuple[list, Any]:
            carried = [_Value(array, places, False) for array in carry]
            scanned = [
                operand._replace(array=array, origin=None)
                for operand, array in zip(operands[slice_start:], slices, strict=True)
            ]
            self.lookups = []
            outputs = self.evaluate(
                params["jaxpr"], [*operands[:carry_start], *carried, *scanned]
            )
            arrays = [output.array for output in outputs]
            extremes = [(lookup.smallest, lookup.largest) for lookup in self.lookups]
            return arrays[: slice_start - carry_start], (
                arrays[slice_start - carry_start :],
                extremes,
            )

        start, slices = (
            [operand.array for operand in values]
            for values in (operands[carry_start:slice_start], operands[slice_start:])
        )
        options = {name: params[name] for name in ("length", "reverse")}
        carry, (stacked, extremes) = lax.scan(step, start, slices, **options)
        for lookup, (smallest, largest) in zip(self.lookups, extremes, strict=True):
            outer_lookups.append(
                lookup._replace(
                    smallest=smallest.min(axis=0), largest=largest.max(axis=0)
                )
            )
        self.lookups = outer_lookups
        return [_Value(array, places, False) for array in (*carry, *stacked)]


def _places(operands: Sequence[_Value]) -> frozenset[str]:
    return frozenset[str]().union(*(operand.places for operand in operands))


def _wraps(operands: Sequence[_Value]) -> bool:
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
    data = {
        variable
        for variable, of_data in zip(jaxpr.invars, marked, strict=True)
        if of_data
    }
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
        programs = [*equation.params.get("branches", ())]
        programs += [equation.params["body_jaxpr"]] if name == "while" else []
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
    return _looks_up(
        reading._closed.jaxpr, [False, *[True] * len(reading._arrays)]
    )  # the first input is a key


def check_codes(reading: Any, leaves: Mapping[str, Any]) -> None:
    """Refuse codes in the arguments of a model that look up a level that is not there.

    JAX answers with the last level, or with NaN. What a model masks, replaces or clips
    is its own affair: refused is what changes a log density. An index that is computed,
    such as ``x[i - 1]``, may count from the end.

    :param reading: the model, on all indices of its plates.
    :param leaves: its arguments by name.
    """
    arrays, names = reading._arrays, {id(leaf): name for name, leaf in leaves.items()}
    if is_traced(arrays):
        return
    rows = {id(leaf): name for name, leaf in leaves.items() if isinstance(leaf, Rows)}
    places = [
        frozenset({names.get(id(arrays[place]), place)}) for place in sorted(arrays)
    ]
    key, noted = random.key(0), list[_Lookup]()

    def evaluate(key: jax.Array, arrays: Any, answer: float | None = None) -> list[Any]:
        evaluator = _Lookups(rows, answer)
        data = map(_Value, jax.tree.leaves(arrays), places)
        outputs = evaluator.evaluate(
            reading._closed, [_Value(key, frozenset({DRAWN})), *data]
        )
        noted[:] = evaluator.lookups
        return [output.array for output in outputs]

    def look_up(on_arrays: Any) -> list[tuple]:
        evaluate(key, on_arrays._arrays)
        return [(lookup.smallest, lookup.largest) for lookup in noted]

    def matters(on_arrays: Any) -> jax.Array:
        densities = []
        for answer in (0.0, np.nan):
            changed = copy(on_arrays)
            changed._programs = {}
            changed._closed = jax.make_jaxpr(evaluate, static_argnums=2)(
                key, arrays, answer
            )
            sites = [site for site in changed.at().values() if site["type"] == "sample"]
            densities.append([site["fn"].log_prob(site["value"]) for site in sites])
        same = [
            jnp.array_equal(a, b, equal_nan=True)
            for a, b in zip(*densities, strict=True)
        ]
        return ~jnp.array(same).all()

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
                f"another level, or NaN. "
            )
            instead += (
                "Give missing and unknown categories a level of their own, mask them, "
                "or `jnp.clip` them in"
            )
            raise argument_error("model", name, got, f"{instead} the model.")
