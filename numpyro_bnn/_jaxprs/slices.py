"""Parts of programs: what their outputs are computed from, and the equations that they
need. Nothing is run.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun

from numpyro_bnn._jaxprs.primitives import ADDRESSING, stacked_columns
from numpyro_bnn._jaxprs.walk import (
    Equation,
    Follower,
    needed_equations,
    scan_starts,
    variables_of,
)
from numpyro_bnn._types import Atom, Operand, Trees


def dependence(fn: Callable[[Trees], Mapping], arguments: Trees) -> dict[Any, set]:
    """For each output of ``fn``, the names of the arguments from which it is computed;
    nothing is evaluated.

    :param fn: from a dictionary of arrays (or trees of arrays) to a dictionary of
        arrays.
    :param arguments: example values.
    :return: a superset where a primitive, or a ``while`` loop, mixes arguments.

    >>> import jax.numpy as jnp
    >>> sources = dependence(
    ...     lambda a: {"s": a["x"] + a["y"], "t": 2 * a["y"]},
    ...     {"x": jnp.ones(2), "y": jnp.ones(2)},
    ... )
    >>> {name: sorted(sources[name]) for name in sources}
    {'s': ['x', 'y'], 't': ['y']}
    """
    return program_dependence(
        *jax.make_jaxpr(fn, return_shape=True)(dict(arguments)), arguments
    )


def program_dependence(
    closed: ClosedJaxpr, shapes: Mapping, arguments: Trees
) -> dict[Any, set]:
    """:func:`dependence` of the traced program ``closed``, a jaxpr with an output tree
    ``shapes``.
    """
    owners = [frozenset([name]) for name in _names_of_leaves(dict(arguments))]
    sources_of: dict[Any, set] = {name: set() for name in shapes}
    for name, sources in zip(
        _names_of_leaves(shapes),
        _SourceFollower().follow(closed.jaxpr, owners),
        strict=True,
    ):
        sources_of[name] |= sources
    return sources_of


class _SourceFollower(Follower):
    """Follow sets of names, also through loops and branches."""

    def __init__(self) -> None:
        rules = {"cond": self.branches, "scan": self.scan}
        super().__init__(self.joined, frozenset(), rules)

    def joined(self, equation: Equation, *sources: frozenset) -> frozenset:
        return frozenset().union(*sources)

    def branches(self, equation: Equation, *sources: frozenset) -> list[frozenset]:
        outputs = [sources[0]] * len(equation.outputs)  # those of the predicate
        for branch in equation.params["branches"]:
            results = self.follow(branch.jaxpr, sources[1:])
            outputs = [old | new for old, new in zip(outputs, results, strict=True)]
        return outputs

    def scan(self, equation: Equation, *sources: frozenset) -> list[frozenset]:
        """What is carried has the sources of all steps: they grow until they no longer
        change.
        """
        carry_start, slice_start = scan_starts(equation)
        constants, slices = sources[:carry_start], sources[slice_start:]
        previous, carried = None, list(sources[carry_start:slice_start])
        while carried != previous:
            previous, inputs = carried, [*constants, *carried, *slices]
            outputs = self.follow(equation.params["jaxpr"].jaxpr, inputs)
            # the outputs begin with what is carried
            carried = [old | new for old, new in zip(previous, outputs, strict=False)]
        return [*carried, *outputs[len(carried) :]]


def _names_of_leaves(trees: Mapping) -> list[Operand]:
    """For each leaf the key of its tree."""
    return [path[0].key for path, _ in jax.tree.flatten_with_path(trees)[0]]


def reached(equations: Iterable[JaxprEqn], start: Iterable[Atom]) -> set:
    """The variables ``start`` and all that these equations compute from them."""
    variables = set(start)
    for equation in equations:
        if variables & variables_of(equation.invars):
            variables.update(equation.outvars)
    return variables


def part_of(
    closed: ClosedJaxpr, inputs: Sequence[Operand], outputs: Sequence[Atom]
) -> Callable[..., list]:
    """The part of a program that computes some of its variables from others.

    >>> closed = jax.make_jaxpr(lambda x: jax.numpy.exp(x + 1.0))(0.0)
    >>> late = part_of(closed, closed.jaxpr.eqns[0].outvars, closed.jaxpr.outvars)
    >>> float(late(0.0)[0])
    1.0
    """
    equations = []
    for equation, _ in needed_equations(closed.jaxpr, outputs, frozenset(inputs)):
        equations.append(equation)
    jaxpr = closed.jaxpr.replace(
        invars=list(inputs), outvars=list(outputs), eqns=equations
    )
    return jaxpr_as_fun(closed.replace(jaxpr=jaxpr))


def needed_part(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A program with only the equations and constants that its outputs need."""
    equations = [
        equation for equation, _ in needed_equations(closed.jaxpr, closed.jaxpr.outvars)
    ]
    used = variables_of(closed.jaxpr.outvars)
    for equation in equations:
        used |= variables_of(equation.invars)
    variables = []
    values = []
    for var, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        if var in used:
            variables.append(var)
            values.append(value)
    jaxpr = closed.jaxpr.replace(eqns=equations, constvars=variables)
    return closed.replace(jaxpr=jaxpr, consts=values)


def named_inputs(closed: ClosedJaxpr, names: Mapping[str, str]) -> Callable:
    """A program, without equations that it does not need, in which given values replace
    some that it names.

    :param names: keys of the given values, by their names (``checkpoint_name``) in the
        program.
    :return: a function of a dictionary of values, and of the inputs of ``closed``, to a
        list.

    >>> from jax.ad_checkpoint import checkpoint_name
    >>> closed = jax.make_jaxpr(lambda x: 2.0 * checkpoint_name(x + 1.0, "y"))(3.0)
    >>> [
    ...     float(named_inputs(closed, names)({"it": 5.0}, 3.0)[0])
    ...     for names in ({}, {"y": "it"})
    ... ]
    [8.0, 10.0]
    """
    places = []
    for equation in closed.jaxpr.eqns:
        if equation.primitive.name == "name" and equation.params["name"] in names:
            places.append((names[equation.params["name"]], equation.outvars[0]))
    inputs = [*(var for _, var in places), *closed.jaxpr.invars]
    run = part_of(closed, inputs, closed.jaxpr.outvars)

    def call(values: Trees, *inputs: Operand) -> list:
        return run(
            *(jnp.asarray(values[key], var.aval.dtype) for key, var in places), *inputs
        )

    return call


@dataclass(frozen=True)
class _IndexMark:
    """What the argument indexes with; of several indices, what each column holds."""

    columns: tuple[Operand, ...] = ()


def indexed_lengths(fn: Callable[[Array], Any], indices: Array) -> set[int]:
    """Lengths of the axes that ``fn`` indexes with its integer argument, also after
    shifts and reshapes.

    A value looked up with the argument is data, not an index: for ``effect[group[i]]``
    only ``group`` is reported.

    >>> import jax.numpy as jnp
    >>> indexed_lengths(
    ...     lambda i: jnp.ones(5)[i] + jnp.ones((7, 2))[i, 0], jnp.arange(3)
    ... )
    {5, 7}
    """
    lengths: set[int] = set()

    def visit(equation: Equation, *operands: Operand) -> _IndexMark | None:
        table = equation.jaxpr_equation.invars[0].aval
        if equation.name == "gather" and operands[1] is not None:
            axes = equation.params["dimension_numbers"].start_index_map
            columns = operands[1].columns if len(axes) > 1 else [operands[1]]
            for axis, column in zip(axes, columns, strict=False):
                if column is not None:
                    lengths.add(table.shape[axis])
        if equation.name not in ADDRESSING:
            return None
        return _IndexMark(tuple(stacked_columns(equation.jaxpr_equation, operands)))

    walk = Follower(
        visit,
        None,
        {"scan": Equation.descend},
        lambda value: value is not None,
    )
    jaxpr = jax.make_jaxpr(fn)(indices).jaxpr
    walk.follow(jaxpr, [_IndexMark()] * len(jaxpr.invars))
    return lengths
