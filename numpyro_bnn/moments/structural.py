"""Rules that move elements without computing: reshapes, slices, gathers with constant indices, concatenation."""

from typing import Any

import jax.numpy as jnp

from numpyro_bnn.moments.gaussian import Gaussian
from numpyro_bnn.moments.interpret import Equation
from numpyro_bnn.moments.registry import register

__all__ = ["STRUCTURAL"]

# Name -> how many of the leading operands are data (None: all); the others are indices, which must be plain.
STRUCTURAL: dict[str, int | None] = {
    "broadcast_in_dim": 1,
    "concatenate": None,
    "dynamic_slice": 1,
    "dynamic_update_slice": 2,
    "gather": 1,
    "optimization_barrier": None,
    "pad": None,
    "reshape": 1,
    "rev": 1,
    "slice": 1,
    "split": 1,
    "squeeze": 1,
    "stack": None,
    "tile": 1,
    "transpose": 1,
}


@register(*STRUCTURAL, view=True)
def _move(equation: Equation, *operands: Any) -> Any:
    """Means and variances move alike; plain data has variance 0."""
    count = STRUCTURAL[equation.name]
    data, indices = operands[:count], operands[len(operands[:count]) :]
    return _alike(equation, data, lambda parts: equation.bind(*parts, *plain_indices(equation, indices)))


@register("scatter", "scatter-add", view=True)
def _scatter(equation: Equation, operand: Any, indices: Any, updates: Any) -> Any:
    (indices,) = plain_indices(equation, (indices,))
    return _alike(equation, (operand, updates), lambda parts: equation.bind(parts[0], indices, parts[1]))


def _alike(equation: Equation, data: tuple[Any, ...], move: Any) -> Any:
    means = move([d.mean if isinstance(d, Gaussian) else d for d in data])
    variances = move([d.var if isinstance(d, Gaussian) else jnp.zeros_like(d) for d in data])
    if isinstance(means, list | tuple):
        return [Gaussian(*pair) for pair in zip(means, variances, strict=True)]
    return Gaussian(means, variances)


def plain_indices(equation: Equation, indices: tuple[Any, ...]) -> tuple[Any, ...]:
    """Refuse random indices."""
    if any(isinstance(index, Gaussian) for index in indices):
        raise equation.refuse("looks up with random indices", "Index with plain integers.")
    return indices
