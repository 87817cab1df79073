"""Which outputs of a program depend on which inputs, read from its jaxpr without
running it.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

# Operations after which an index is still an index.
ADDRESSING = {
    *("add", "sub", "copy", "reshape", "select_n", "squeeze"),
    *("broadcast_in_dim", "concatenate", "convert_element_type"),
}

# Operations that call a program once.
CALLS = {
    "jit",
    "pjit",
    "closed_call",
    "checkpoint",
    "remat2",
    "custom_jvp_call",
    "custom_vjp_call",
}

# Functions of single elements, with which the rules of moments begin. Those with
# infinitely many steps (floor, round, rem) are left out: no fixed number of nodes
# integrates them.
ELEMENTWISE = {
    *(
        "add",
        "add_any",
        "sub",
        "mul",
        "div",
        "neg",
        "abs",
        "sign",
        "max",
        "min",
        "clamp",
        "select_n",
    ),
    *("integer_pow", "pow", "square", "sqrt", "rsqrt", "cbrt"),
    *("copy", "convert_element_type", "reduce_precision", "stop_gradient"),
    *("and", "or", "not", "xor", "eq", "ne", "ge", "gt", "le", "lt", "is_finite"),
    *(
        "exp",
        "exp2",
        "expm1",
        "log",
        "log1p",
        "logistic",
        "lgamma",
        "digamma",
        "erf",
        "erfc",
        "erf_inv",
    ),
    *("sin", "cos", "tan", "asin", "acos", "atan", "atan2"),
    *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
    *("bessel_i0e", "bessel_i1e"),
}


def dependence(
    fn: Callable[[Mapping[str, Any]], Mapping[Any, Any]], arguments: Mapping[str, Any]
) -> dict[Any, set]:
    """For each output of ``fn``, the names of the arguments from which it is computed;
    nothing is evaluated.

    :param fn: from a dictionary of arrays (or trees of arrays) to a dictionary of
        arrays.
    :param arguments: example values.
    :return: a superset if a loop or a branch mixes arguments.

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
    closed: Any, shapes: Mapping[Any, Any], arguments: Mapping[str, Any]
) -> dict[Any, set]:
    """:func:`dependence` of the traced program ``closed``, a jaxpr with an output tree
    ``shapes``.
    """
    owners = [{name} for name in _names_of_leaves(dict(arguments))]
    outputs = _names_of_leaves(shapes)
    sources_of: dict[Any, set] = {name: set() for name in shapes}
    for name, sources in zip(outputs, _sources(closed.jaxpr, owners), strict=True):
        sources_of[name] |= sources
    return sources_of


def _names_of_leaves(trees: Mapping) -> list[Any]:
    """For each leaf the key of its tree."""
    return [path[0].key for path, _ in jax.tree.flatten_with_path(trees)[0]]


def _sources(jaxpr: Any, arguments: list[set]) -> list[set]:
    """For each output of a jaxpr, the union of the sets of those ``arguments`` from
    which it is computed.
    """
    sources: dict[Any, set] = dict(zip(jaxpr.invars, arguments, strict=True))

    def read(variables: Any) -> list[set]:
        return [
            set() if isinstance(v, Literal) else sources.get(v, set())
            for v in variables
        ]

    for equation in jaxpr.eqns:
        used = read(equation.invars)
        inner = called(equation)
        mixed = [set().union(*used)] * len(equation.outvars)
        outputs = mixed if inner is None else _sources(inner, used)
        sources.update(zip(equation.outvars, outputs, strict=True))
    return read(jaxpr.outvars)


def subprogram(equation: Any) -> Any:
    """The jaxpr of an equation that applies one to its operands, else ``None``."""
    inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    inner = getattr(inner, "jaxpr", inner)
    if inner is None or len(inner.invars) != len(equation.invars):
        return None
    return inner


def called(equation: Any) -> Any:
    """The jaxpr that an equation calls once, else ``None``."""
    return subprogram(equation) if equation.primitive.name in CALLS else None


def variables_of(atoms: Iterable[Any]) -> set:
    """The variables among the operands of an equation, of which some are literals."""
    return {atom for atom in atoms if not isinstance(atom, Literal)}


def needed_equations(
    jaxpr: Any, outputs: Iterable[Any], constants: Collection[Any] = frozenset()
) -> list[tuple[Any, list[bool]]]:
    """The equations that compute the variables ``outputs`` of a jaxpr, in order, and
    which of their outputs are used.

    Variables in ``constants`` have known values, and so do literals.
    """
    needed = variables_of(outputs).difference(constants)
    equations = []
    for equation in reversed(jaxpr.eqns):
        if needed.intersection(equation.outvars):
            equations.append((equation, [var in needed for var in equation.outvars]))
            needed |= variables_of(equation.invars).difference(constants)
    return equations[::-1]


def reached(equations: Iterable[Any], start: Iterable[Any]) -> set:
    """The variables ``start`` and all that these equations compute from them."""
    variables = set(start)
    for equation in equations:
        if variables & variables_of(equation.invars):
            variables.update(equation.outvars)
    return variables


def evaluate_equations(
    equations: Iterable[Any], values: dict[Any, Any], outputs: Iterable[Any]
) -> list[Any]:
    """The values of ``outputs``, from those of the inputs and constants
    in ``values``.
    """

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in equations:
        primitive = equation.primitive
        result = primitive.bind(
            *map(read, equation.invars), **primitive.get_bind_params(equation.params)
        )
        values.update(
            zip(
                equation.outvars,
                result if primitive.multiple_results else [result],
                strict=True,
            )
        )
    return [read(atom) for atom in outputs]


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
    equations = []
    for equation in closed.jaxpr.eqns:
        is_name = equation.primitive.name == "name"
        key = names.get(equation.params["name"]) if is_name else None
        if key is None:
            equations.append(equation)
        else:
            places.append((key, equation.outvars[0]))
    jaxpr = closed.jaxpr.replace(
        eqns=equations, invars=[*(var for _, var in places), *closed.jaxpr.invars]
    )
    run = jaxpr_as_fun(needed_part(closed.replace(jaxpr=jaxpr)))

    def call(values: Mapping[str, Any], *inputs: Any) -> list:
        return run(
            *(jnp.asarray(values[key], var.aval.dtype) for key, var in places), *inputs
        )

    return call


def indexed_lengths(fn: Callable[[jax.Array], Any], indices: jax.Array) -> set[int]:
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
    closed = jax.make_jaxpr(fn)(indices)
    lengths: set[int] = set()
    _follow(closed.jaxpr, set(closed.jaxpr.invars), lengths)
    return lengths


def _follow(jaxpr: Any, marked: set, lengths: set[int]) -> set:
    """Propagate marks through a jaxpr, collect axes gathered with marked indices;
    return the marked outputs.
    """
    made_by: dict[Any, Any] = {}
    for equation in jaxpr.eqns:
        made_by.update(dict.fromkeys(equation.outvars, equation))
        inputs = [
            not isinstance(var, Literal) and var in marked for var in equation.invars
        ]
        if not any(inputs):
            continue
        inner = subprogram(equation)
        if equation.primitive.name == "gather":
            shape = equation.invars[0].aval.shape
            lengths |= {shape[axis] for axis in _marked_axes(equation, made_by, marked)}
        elif inner is not None:
            out = _follow(inner, set(compress(inner.invars, inputs)), lengths)
            marked |= {
                a
                for a, b in zip(equation.outvars, inner.outvars, strict=False)
                if b in out
            }
        elif equation.primitive.name in ADDRESSING:
            marked |= set(equation.outvars)
    return variables_of(jaxpr.outvars) & marked


def _marked_axes(gather: Any, made_by: dict[Any, Any], marked: set) -> list[int]:
    """The axes that a gather indexes with marked numbers: `x[i, j]` stacks i and j into
    one operand.
    """
    axes = gather.params["dimension_numbers"].start_index_map
    index = gather.invars[1]
    if isinstance(index, Literal) or index not in marked:
        return []
    maker = made_by.get(index)
    if len(axes) == 1:
        return list(axes)
    if maker is None or maker.primitive.name != "concatenate":
        return []
    if maker.params["dimension"] != len(index.aval.shape) - 1:
        return []
    columns: list[Any] = []
    for operand in maker.invars:
        columns += [operand] * operand.aval.shape[-1]
    pairs = zip(axes, columns, strict=True)
    return [
        axis
        for axis, column in pairs
        if not isinstance(column, Literal) and column in marked
    ]
