"""A rewriting of the program of one update that changes no number, only what the compiler may merge.

The gradient of a matrix of weights is an outer product, and the whole update of the matrix is elementwise in it.
The compiler for CPUs merges everything elementwise into one loop, and with it the making of the two vectors, which it
then repeats for every element of the matrix. It merges no division into a loop that would repeat it: so the vectors
are divided by a number that is 1, which only the running program knows, for it is an argument of it.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from numpyro_bnn.moments import Equation, Interpreter

__all__ = ["make_once"]


def make_once(fn: Callable, one: jax.Array) -> Callable:
    """The same function, in which operands of outer products are made once.

    :param fn: a function of arrays, already differentiated.
    :param one: the number 1, an argument of the compiled program; the same for all runs that are mapped over.

    >>> import jax.numpy as jnp
    >>> outer = lambda a, b: jnp.exp(a)[:, None] @ jnp.sin(b)[None, :]
    >>> a, b = jnp.arange(3.0), jnp.arange(2.0)
    >>> bool((make_once(outer, jnp.ones(()))(a, b) == outer(a, b)).all())
    True
    """
    walk = Interpreter({"dot_general": _divided(one)}, lambda value: True, "guides.AutoADF", default=_plain)

    def rewritten(*arguments: Any) -> Any:
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*arguments)
        outputs = walk.run(closed.jaxpr, closed.consts, jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return rewritten


def _divided(one: jax.Array) -> Callable:
    def rule(equation: Equation, *operands: Any) -> Any:
        size = np.prod(equation.outputs[0].shape)
        if size > max(np.prod(np.shape(operand)) for operand in operands):
            operands = tuple(operand / one for operand in operands)
        return equation.bind(*operands)

    return rule


def _plain(equation: Equation, *operands: Any) -> Any:
    return equation.bind(*operands)
