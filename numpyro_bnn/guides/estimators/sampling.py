"""Run a program with random weights: where a weight meets data, what comes out is drawn row by row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_bnn.guides.estimators.noise import Noise
from numpyro_bnn.guides.estimators.uses import AFFINE, ELEMENTWISE, SHAPING, enters_as, grown_axes
from numpyro_bnn.moments.interpret import Equation, Interpreter

__all__ = ["RandomWeight", "run"]


@dataclass(frozen=True)
class RandomWeight:
    """Independent N(mean, sd^2); ``sd`` may be negative, ``grown`` says that broadcasting has repeated it."""

    site: str
    mean: jax.Array
    sd: jax.Array
    grown: bool = False


def run(
    jaxpr: Any,
    consts: Sequence[Any],
    values: Sequence[Any],
    needed: Sequence[bool],
    noise: Mapping[str, Noise],
    call: str,
) -> list[Any]:
    """Outputs of a program some of whose inputs are :class:`RandomWeight`.

    :param noise: the random numbers of the one use of each of them.
    """
    sampler = _Sampler(noise)
    walk = Interpreter({}, lambda value: isinstance(value, RandomWeight), call, sampler.visit)
    return walk.run(jaxpr, consts, values, needed)


@dataclass(frozen=True)
class _Sampler:
    noise: Mapping[str, Noise]

    def visit(self, equation: Equation, *operands: Any) -> Any:
        """The rule of every primitive; which weights come to stay weights was found by ``find_uses``."""
        weights = [i for i, value in enumerate(operands) if isinstance(value, RandomWeight)]
        if len(weights) == 1:
            result = self._one_weight(equation, list(operands), weights[0])
            if result is not None:
                return result
        shape = equation.outputs[0].shape
        return equation.bind(*(self._value(v, shape) if isinstance(v, RandomWeight) else v for v in operands))

    def _one_weight(self, equation: Equation, operands: list[Any], i: int) -> Any:
        weight, name = operands[i], equation.name

        def image(part: jax.Array) -> jax.Array:
            return equation.bind(*operands[:i], part, *operands[i + 1 :])

        same = equation.outputs[0].shape == weight.mean.shape
        if name in ELEMENTWISE or (name in SHAPING and not weight.grown):
            sd = -weight.sd if name == "neg" else image(weight.sd)
            return RandomWeight(weight.site, image(weight.mean), sd, weight.grown)
        if name in AFFINE and same and not (name == "div" and i == 1):
            sd = image(weight.sd) if name in ("mul", "div") else weight.sd
            return RandomWeight(
                weight.site, image(weight.mean), -sd if name == "sub" and i == 1 else sd, weight.grown
            )
        if name == "broadcast_in_dim" and not weight.grown:
            grown = bool(grown_axes(equation))
            return RandomWeight(weight.site, image(weight.mean), image(weight.sd), grown)
        if not weight.grown and enters_as(equation, i) is not None:
            return self._enter(equation, operands, i)
        return None

    def _value(self, weight: RandomWeight, shape: tuple[int, ...]) -> jax.Array:
        """A broadcast weight, drawn for each row."""
        noise = self.noise[weight.site]
        normal = noise.normal if noise.signs_out is None else noise.normal * noise.signs_out
        return weight.mean + weight.sd * normal.astype(weight.mean.dtype)

    def _enter(self, equation: Equation, operands: list[Any], i: int) -> jax.Array:
        """What comes out of a product with data, or of a lookup, drawn for each row."""
        weight, other = operands[i], operands[1 - i]
        noise = self.noise[weight.site]

        def product(x: jax.Array, w: jax.Array) -> jax.Array:
            return equation.bind(*((w, x) if i == 0 else (x, w)))

        if noise.signs_out is not None:
            change = weight.sd * noise.normal.astype(weight.sd.dtype)
            shape = _positions(equation, i, noise)
            if shape is not None:
                return _product_by_row(equation, other.reshape(shape), weight.mean, change, noise)
            signed = other if noise.signs_in is None else other * noise.signs_in.astype(other.dtype)
            moved = product(signed, change)
            return product(other, weight.mean) + moved * noise.signs_out.astype(moved.dtype)
        if equation.name == "gather":
            sd = product(other, weight.sd)
        else:
            sd = _sqrt(product(jnp.square(other), jnp.square(weight.sd)))
        return product(other, weight.mean) + sd * noise.normal.astype(sd.dtype)


def _positions(equation: Equation, operand: int, noise: Noise) -> tuple[int, int, int] | None:
    """Data of a dense layer at several positions as (rows, positions, inputs), if weights are fewer than outputs."""
    if equation.name != "dot_general" or operand != 1:
        return None
    x, w = (var.aval.shape for var in equation.jaxpr_equation.invars)
    contracted, batch = (tuple(map(tuple, axes)) for axes in equation.params["dimension_numbers"])
    if len(w) != 2 or contracted != ((len(x) - 1,), (0,)) or batch != ((), ()):
        return None
    signs = noise.signs_out.shape[:-1]  # type: ignore[union-attr]
    rows = next((axis for axis, n in enumerate(signs) if n != x[axis]), len(signs))
    positions = prod(x[rows:-1])
    return (prod(x[:rows]), positions, x[-1]) if set(signs[rows:]) <= {1} and x[-1] <= positions else None


def _product_by_row(
    equation: Equation, x: jax.Array, mean: jax.Array, change: jax.Array, noise: Noise
) -> jax.Array:
    """Every row with weights of its own, mean + r change t: one product forward and backward instead of two."""
    signs = noise.signs_out.reshape(len(x), 1, -1)  # type: ignore[union-attr]
    if noise.signs_in is not None:
        signs = signs * noise.signs_in.reshape(len(x), -1, 1)
    out = jnp.matmul(x, mean + signs.astype(mean.dtype) * change, precision=equation.params["precision"])
    return out.reshape(equation.outputs[0].shape).astype(equation.outputs[0].dtype)


def _sqrt(var: jax.Array) -> jax.Array:
    """Square root with derivative 0 at 0: where all inputs are 0 the output has no noise."""
    positive = var > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, var, 1)), 0)
