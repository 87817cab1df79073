r"""Mean and variance of a term: in closed form if there is one, otherwise by Gauss-Legendre quadrature on panels.

The interval m + sqrt(v) z, -8 <= z <= 8, is cut where the function has kinks and steps: where an argument that is
affine in x meets the number it is compared with, or 0 for functions such as tanh. Each panel gets n nodes with the
weight phi(z). Gauss-Hermite nodes cannot be cut, and are too far apart once sqrt(v) exceeds the width of the step.
"""

import math
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_bnn.moments.terms import Gaussian, Term

# Name of an elementwise primitive -> function of the term; ``None`` if the term has another form.
CLOSED_FORMS: dict[str, Callable[[Term], Gaussian | None]] = {}
NODES: ContextVar[int] = ContextVar("num_nodes", default=32)

_REACH = 8.0
_MOST_BREAKS = 3
# Number of evaluations held in memory at once; beyond that the nodes are summed one after another.
_AT_ONCE = 2**24
_COMPARED = frozenset({"max", "min", "gt", "ge", "lt", "le", "eq", "ne", "clamp"})


def moments_of(term: Term) -> Gaussian:
    """Mean and variance of a term, computed once."""
    if term.moments is None:
        if not jnp.issubdtype(term.dtype, jnp.floating):
            raise term.equation.refuse(  # type: ignore[union-attr]
                f"turns random numbers into {term.dtype}",
                "Such numbers have moments only inside an elementwise function of one variable, "
                "e.g. `jnp.where(x > 0, x, 0.1 * x)`.",
            )
        term.moments = _affine(term) if term.base is not term else _nonlinear(term)
    return term.moments


def _affine(term: Term) -> Gaussian:
    base = moments_of(term.base)
    mean, var = term.slope * base.mean + term.shift, term.slope * term.slope * base.var
    return Gaussian(*(jnp.broadcast_to(m, term.shape).astype(term.dtype) for m in (mean, var)))


def _nonlinear(term: Term) -> Gaussian:
    form = CLOSED_FORMS.get(term.equation.name)  # type: ignore[union-attr]
    known = form(term) if form else None
    return _quadrature(term, NODES.get()) if known is None else known


def is_zero(value: Any) -> bool:
    """Whether a plain value is known to be 0."""
    return not isinstance(value, jax.core.Tracer) and bool(np.all(np.asarray(value) == 0))


def _quadrature(term: Term, num_nodes: int) -> Gaussian:
    """Mean and variance of a term; for v below eps^(2/3), where differences along the line would be lost in rounding,
    E f = f(m) + f''(m) v / 2 and Var f = f'(m)^2 v.
    """
    x = term.variable.gaussian
    small = x.var <= float(jnp.finfo(x.mean.dtype).eps) ** (2 / 3)
    sd = jnp.sqrt(jnp.where(small, 1, x.var))
    middle, half = _panels(_breaks(term), x.mean, sd)
    sd = jnp.where(small, 0, sd)

    def evaluate(panel: Any, node: Any, weight: Any) -> tuple[jax.Array, jax.Array]:
        z = middle[panel] + half[panel] * node
        value = term.evaluate(x.mean + sd * z).astype(x.mean.dtype)
        return value, weight * half[panel] * jnp.exp(-0.5 * z * z)

    mean, var = _sums(evaluate, _nodes(len(middle), num_nodes, x.mean.dtype), x.mean)
    value, slope, curvature = _derivatives(term.evaluate, x.mean)
    mean = jnp.where(small, value + 0.5 * curvature * x.var, mean)
    var = jnp.where(small, slope * slope * x.var, var)
    return Gaussian(mean.astype(term.dtype), var.astype(term.dtype))


def _panels(breaks: list[Any], mean: jax.Array, sd: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Middle and half width of each panel, in z; both (panels, *shape)."""
    cuts = [jnp.clip((at - mean) / sd, -_REACH, _REACH) for at in breaks] or [jnp.zeros_like(mean)]
    inner = jnp.sort(jnp.stack(cuts), axis=0) if len(cuts) > 1 else cuts[0][None]
    end = jnp.full_like(mean, _REACH)[None]
    edges = jnp.concatenate([-end, inner, end])
    return (edges[1:] + edges[:-1]) / 2, (edges[1:] - edges[:-1]) / 2


def _nodes(num_panels: int, num_nodes: int, dtype: Any) -> tuple[Any, Any, Any]:
    """(panel, node, weight) of every evaluation."""
    nodes, weights = np.polynomial.legendre.leggauss(num_nodes)
    panel = np.repeat(np.arange(num_panels), num_nodes)
    return panel, np.tile(nodes, num_panels).astype(dtype), np.tile(weights, num_panels).astype(dtype)


def _sums(evaluate: Callable, nodes: tuple[Any, Any, Any], like: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Weighted mean and variance of the values at the nodes."""
    if like.size * len(nodes[0]) <= _AT_ONCE:
        values, weights = jax.vmap(evaluate)(*nodes)
        weights = weights / weights.sum(0)
        mean = jnp.sum(weights * values, 0)
        return mean, jnp.sum(weights * jnp.square(values - mean), 0)
    center = evaluate(*(a[len(a) // 2] for a in nodes))[0]

    @jax.checkpoint
    def add(sums: tuple, node: tuple) -> tuple:
        value, weight = evaluate(*node)
        away = value - center
        return (sums[0] + weight, sums[1] + weight * away, sums[2] + weight * away * away), None

    (total, first, second), _ = jax.lax.scan(add, (jnp.zeros_like(like),) * 3, nodes)
    mean = first / total
    return center + mean, jnp.maximum(second / total - mean * mean, 0)


def _derivatives(fn: Callable[[Any], Any], x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """f, f', f'' of an elementwise function."""
    one = jnp.ones_like(x)

    def first(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.jvp(fn, (x,), (one,))

    (value, slope), (_, curvature) = jax.jvp(first, (x,), (one,))
    return value, slope, curvature


def _breaks(term: Term) -> list[Any]:
    """Where x makes an argument equal to the number it is compared with, or to 0; equal constants once."""
    found: dict[Any, Any] = {}
    seen: set[int] = set()

    def visit(node: Any) -> None:
        if not isinstance(node, Term) or id(node) in seen or node.equation is None:
            return
        seen.add(id(node))
        if node.base is node:
            for place in _places(node):
                known = not isinstance(place, jax.core.Tracer) and np.size(place) == 1
                found.setdefault(float(np.reshape(place, ())) if known else id(place), place)
        for operand in node.operands:
            visit(operand)

    visit(term)
    finite = [at for key, at in found.items() if not isinstance(key, float) or math.isfinite(key)]
    return finite[:_MOST_BREAKS]


def _places(node: Term) -> list[Any]:
    terms = [operand for operand in node.operands if isinstance(operand, Term)]
    line = _line(terms[0]) if len(terms) == 1 else None
    if line is None or node.equation is None:
        return []
    plain = [operand for operand in node.operands if not isinstance(operand, Term)]
    against = plain if node.equation.name in _COMPARED else [0.0]
    if isinstance(line[1], float) and line[1] == 0 and all(is_zero(at) for at in against):
        return [0.0]
    return [_solve(*line, at) for at in against]


def _line(term: Term) -> tuple[Any, Any] | None:
    """(slope, shift) of an affine function of x, also of a clipped one, which is affine between its bounds."""
    if term.is_normal:
        return term.slope, term.shift
    base = term.base
    inner = [operand for operand in base.operands if isinstance(operand, Term)]
    if base.equation is None or base.equation.name not in ("max", "min", "clamp") or len(inner) != 1:
        return None
    line = _line(inner[0])
    return line and (term.slope * line[0], term.slope * line[1] + term.shift)


def _solve(slope: Any, shift: Any, at: Any) -> Any:
    """x with slope * x + shift = at; 0 if the argument does not depend on x."""
    if isinstance(slope, float):
        return (at - shift) / slope if slope else 0.0
    return jnp.where(slope == 0, 0, (at - shift) / jnp.where(slope == 0, 1, slope))
