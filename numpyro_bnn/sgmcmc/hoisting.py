"""The part of a minibatch potential that needs no position: evaluated for many steps at once, ahead of them."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.extend.core import Literal

__all__ = ["separate"]


def separate(potential_fn: Callable, position: jax.Array, batch: Any) -> tuple[Callable, Callable]:
    """Split ``potential_fn(position, batch)`` into ``finish(position, prepare(batch))``.

    ``prepare`` holds all that depends on the minibatch alone: picking its rows out of the data, above all. As part
    of the step that costs more the larger the data are, because XLA on CPUs takes the size of the whole array for
    the work of a fused gather and hands it to several threads.

    :param potential_fn: pure function of the flat position (P,) and a minibatch.
    :param position: an example.
    :param batch: an example.

    >>> import jax.numpy as jnp
    >>> data = jnp.arange(10.0)
    >>> prepare, finish = separate(lambda q, i: jnp.sum((q - data[i]) ** 2), jnp.ones(1), jnp.array([2, 3]))
    >>> [part.tolist() for part in prepare(jnp.array([4, 5]))]
    [[4.0, 5.0]]
    >>> float(finish(jnp.ones(1), prepare(jnp.array([4, 5]))))
    25.0
    """
    leaves, tree = jax.tree.flatten(batch)
    closed = jax.make_jaxpr(lambda q, *parts: potential_fn(q, jax.tree.unflatten(tree, parts)))(
        position, *leaves
    )
    jaxpr, constants = closed.jaxpr, dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    needed = _needed(jaxpr)
    # Calls back into Python stay in the step: they may not know how to run for many steps at once.
    calls = [v for equation in needed if "callback" in equation.primitive.name for v in equation.outvars]
    moving = _reached(needed, [jaxpr.invars[0], *calls])
    known = _reached(needed, jaxpr.invars[1:]) - moving
    late = [equation for equation in needed if not known.intersection(equation.outvars)]
    early = [equation for equation in needed if not moving.intersection(equation.outvars)]
    used = [v for equation in late for v in _variables(equation.invars)] + _variables(jaxpr.outvars)
    handed = [v for v in dict.fromkeys(used) if v in known]

    def prepare(batch: Any) -> list[jax.Array]:
        values = {**constants, **dict(zip(jaxpr.invars[1:], jax.tree.leaves(batch), strict=True))}
        return _evaluate(early, values, handed)

    def finish(position: jax.Array, prepared: list[jax.Array]) -> jax.Array:
        values = {**constants, jaxpr.invars[0]: position, **dict(zip(handed, prepared, strict=True))}
        return _evaluate(late, values, jaxpr.outvars)[0]

    return prepare, finish


def _variables(atoms: Iterable[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def _needed(jaxpr: Any) -> list[Any]:
    """Equations that the output needs: a traced model holds many others."""
    wanted, kept = set(_variables(jaxpr.outvars)), []
    for equation in reversed(jaxpr.eqns):
        if wanted.intersection(equation.outvars):
            kept.append(equation)
            wanted.update(_variables(equation.invars))
    return kept[::-1]


def _reached(equations: Iterable[Any], start: Iterable[Any]) -> set:
    """The variables ``start`` and all that are computed from them."""
    found = set(start)
    for equation in equations:
        if found.intersection(_variables(equation.invars)):
            found.update(equation.outvars)
    return found


def _evaluate(equations: Iterable[Any], values: dict[Any, Any], outputs: Iterable[Any]) -> list[Any]:
    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in equations:
        primitive = equation.primitive
        parameters = primitive.get_bind_params(equation.params)
        result = primitive.bind(*map(read, equation.invars), **parameters)
        values.update(zip(equation.outvars, result if primitive.multiple_results else [result], strict=True))
    return [read(atom) for atom in outputs]
