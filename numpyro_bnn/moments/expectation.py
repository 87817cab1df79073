r"""Mean and variance of a term: in closed form if there is one, otherwise by
Gauss-Legendre quadrature on panels.

The interval m + sqrt(v) z, -8 <= z <= 8, is cut where the function has kinks and steps
(where an argument that is affine in x meets the number it is compared with, or 0 for
functions such as tanh), and on both sides of these, where the argument has changed by
5. It is wider where a break lies further out: the variance of a saturated unit is due
to the break alone. Each panel gets n / 2 nodes with the weight phi(z). Gauss-Hermite
nodes cannot be cut, and are too far apart once sqrt(v) exceeds the width of the step.
"""

import math
from collections.abc import Callable, Hashable
from contextvars import ContextVar
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from numpyro_bnn._types import Operand, Scalar
from numpyro_bnn.moments.terms import Gaussian, Term, terms_among

# Name of an elementwise primitive -> function of the term; ``None`` if the term has
# another form.
CLOSED_FORMS: dict[str, Callable[[Term], Gaussian | None]] = {}
NODES: ContextVar[int] = ContextVar("num_nodes", default=32)

_REACH = 8.0
# Breaks are followed this far, where phi(z) is 1e-37; from further ones four more sd
# are integrated.
_FARTHEST = 13.0
_MAX_BREAKS = 16
# Functions such as tanh change within this distance of a break, measured in their
# argument.
_LAYER = 5.0
# Largest estimated error of a mean, in sd of the function, and of a variance, relative
# to it.
_TOLERANCE = 0.01
# What counts as 0 of a mean and a standard deviation, in sd of the argument.
_NEGLIGIBLE = 1e-5
# Half the nodes of a panel have about four times the error at a kink, and more for
# smooth functions.
_GAIN = 4.0
# Number of evaluations held in memory at once; beyond that the nodes are summed one
# after another.
_AT_ONCE = 2**24
_COMPARED = frozenset({"max", "min", "gt", "ge", "lt", "le", "eq", "ne", "clamp"})


def moments_of(term: Term) -> Gaussian:
    """Mean and variance of a term, computed once."""
    if term.moments is None:
        if not jnp.issubdtype(term.dtype, jnp.floating):
            raise term.equation.refuse(  # type: ignore[union-attr]
                f"turns random numbers into {term.dtype}",
                "Such numbers have moments only inside an elementwise function of one "
                "variable, e.g. `jnp.where(x > 0, x, 0.1 * x)`.",
            )
        if term.base is term:
            form = CLOSED_FORMS.get(term.equation.name)  # type: ignore[union-attr]
            closed = form(term) if form else None
            moments = _quadrature(term, NODES.get()) if closed is None else closed
        else:
            base = moments_of(term.base)
            moments = Gaussian(
                term.slope * base.mean + term.shift, term.slope * term.slope * base.var
            )
        term.moments = jax.tree.map(
            lambda m: jnp.broadcast_to(m, term.shape).astype(term.dtype), moments
        )
    return term.moments


def known_moments(value: Operand) -> Operand:
    """The moments of a term; plain values unchanged."""
    return moments_of(value) if isinstance(value, Term) else value


def is_zero(value: Operand) -> bool:
    """Whether a plain value is known to be 0."""
    return not isinstance(value, jax.core.Tracer) and bool(
        np.all(np.asarray(value) == 0)
    )


def _quadrature(term: Term, num_nodes: int) -> Gaussian:
    """Mean and variance of a term, refused (under ``jit``: NaN) if the estimated error
    is above ``_TOLERANCE``.

    Where v is below eps^(2/3), differences along the line suffer from rounding: if the
    function is straight there, E f = f(m) + f''(m) v / 2 and Var f = f'(m)^2 v are
    used.
    """
    x = jax.tree.map(lambda m: jnp.broadcast_to(m, term.shape), term.variable.gaussian)
    precision = jnp.finfo(x.mean.dtype)
    constant = x.var <= float(precision.tiny) ** 0.5
    sd = jnp.sqrt(jnp.where(constant, 1, x.var))
    middle, half = _panels(_breaks(term), x.mean, sd)
    sd = jnp.where(constant, 0, sd)

    def evaluate(z: Array) -> Array:
        return term.evaluate(x.mean + sd * z).astype(x.mean.dtype)

    integral, error = _sums(evaluate, middle, half, -(-num_nodes // 2))
    value, slope, curvature = _derivatives(term.evaluate, x.mean)
    line = Gaussian(value + 0.5 * curvature * x.var, slope * slope * x.var)
    width, spread = jnp.sqrt(integral.var), jnp.abs(slope) * sd
    rounding = 32 * precision.eps * (jnp.abs(value) + jnp.abs(slope * x.mean))
    allowed = rounding + float(precision.eps) ** 0.5 * spread
    straight = (jnp.abs(integral.mean - line.mean) <= allowed) & (
        jnp.abs(width - spread) <= allowed
    )
    straight = constant | ((x.var <= float(precision.eps) ** (2 / 3)) & straight)
    # The tail of a saturated unit has no digits to lose: beside what the input varies,
    # its mean and standard deviation are 0.
    absolute = rounding + _NEGLIGIBLE * sd
    limit = _TOLERANCE * width + absolute
    good = (error.mean <= limit) & (error.var <= limit * (width + absolute))
    bad = ~(good | straight) & jnp.isfinite(x.mean) & jnp.isfinite(x.var)
    if not isinstance(bad, jax.core.Tracer) and bad.any():
        raise term.equation.refuse(  # type: ignore[union-attr]
            f"{num_nodes} nodes beside each break do not integrate to {_TOLERANCE:.0%}"
            f" ({bad.sum()} of {bad.size} elements)",
            (
                "Use a function that has moments, or more nodes: `propagate(fn, "
                "num_nodes=...)`."
            ),
        )

    def checked(on_line: Array, by_nodes: Array) -> Array:
        return jnp.where(bad, jnp.nan, jnp.where(straight, on_line, by_nodes))

    return jax.tree.map(checked, line, integral)


def _panels(
    breaks: list[tuple[Scalar, Scalar]], mean: Array, sd: Array
) -> tuple[Array, Array]:
    """Middle and half width of each panel, in z; both (panels, *shape)."""
    low, high = jnp.full_like(mean, -_REACH), jnp.full_like(mean, _REACH)
    cuts = [jnp.zeros_like(mean)]
    for place, slope in breaks:
        center = (place - mean) / sd
        is_far = jnp.abs(center) > _FARTHEST
        center = jnp.where(is_far, _REACH * jnp.sign(center), center)
        layer = jnp.where(
            is_far,
            _REACH / 2,
            _LAYER / jnp.maximum(jnp.abs(slope) * sd, 2 * _LAYER / _REACH),
        )
        margin = jnp.maximum(layer, 1)
        low, high = (
            jnp.minimum(low, center - margin),
            jnp.maximum(high, center + margin),
        )
        for cut in (center, center - layer, center + layer):
            cuts = _insert(cuts, cut)
    edges = jnp.stack([low, *cuts, high])
    return (edges[1:] + edges[:-1]) / 2, (edges[1:] - edges[:-1]) / 2


def _insert(ordered: list[Array], new: Array) -> list[Array]:
    """Put numbers in their places, elementwise: its gradient is several times as fast
    as that of a sort.
    """
    result = []
    for number in ordered:
        result.append(jnp.minimum(number, new))
        new = jnp.maximum(number, new)
    return [*result, new]


def _rules(num_nodes: int, dtype: DTypeLike) -> tuple[Any, Any]:
    """Nodes of a panel; and (2, nodes): the weights of Gauss-Legendre quadrature, and
    of every other node alone.
    """
    nodes, weights = np.polynomial.legendre.leggauss(num_nodes)
    few = nodes[::2]
    powers = np.polynomial.legendre.legvander(few, len(few) - 1).T
    rough = np.zeros(num_nodes)
    rough[::2] = np.linalg.solve(powers, 2.0 * (np.arange(len(few)) == 0))
    return nodes.astype(dtype), np.stack([weights, rough]).astype(dtype)


def _sums(
    evaluate: Callable, middle: Array, half: Array, num_nodes: int
) -> tuple[Gaussian, Gaussian]:
    """Mean and variance of a function of z, standard normal, and the estimated error of
    both.
    """
    nodes, rules = _rules(num_nodes, middle.dtype)

    def powers(
        center: Array, middle: Array, half: Array, node: Operand
    ) -> tuple[Array, Array, Array]:
        z = middle + half * node
        return _powers(half * jnp.exp(-0.5 * z * z), evaluate(z) - center)

    def of_panel(center: Array, ends: Array) -> Array:
        @jax.checkpoint
        def add(sums: Array, node: Operand) -> tuple[Array, None]:
            terms = jnp.stack(powers(center, ends[0], ends[1], node[0]))
            return sums + node[1].reshape(-1, *(1,) * terms.ndim) * terms, None

        start = jnp.zeros((2, 3, *middle.shape[1:]), middle.dtype)
        return jax.lax.scan(add, start, (nodes, rules.T))[0]

    def integrals(center: Array) -> Array:
        """By both rules, of all powers, (2, 3, panels, ...)."""
        if middle.size * num_nodes > _AT_ONCE:
            by_panel = jax.lax.map(partial(of_panel, center), (middle, half))
            return jnp.moveaxis(by_panel, 0, 2)
        of_panels = jax.vmap(partial(powers, center), (0, 0, None))
        terms = jax.vmap(of_panels, (None, None, 0))(middle, half, nodes)
        columns = rules.reshape(2, -1, *(1,) * middle.ndim)
        return jnp.stack(
            [jnp.stack([jnp.sum(rule * term, 0) for term in terms]) for rule in columns]
        )

    # First the mean: squares about any other center would lose digits.
    center = evaluate(middle[len(middle) // 2])
    total, first, _ = integrals(center)[0].sum(1)
    center = jax.lax.stop_gradient(center + first / total)
    fine, rough = integrals(center)
    total, first, second = fine.sum(1)
    mean = first / total

    def powers_at(end: Array) -> Array:
        """A function that grows too fast has not faded at the ends."""
        z = jax.lax.stop_gradient(end)
        away = jnp.abs(jax.lax.stop_gradient(evaluate(z) - center))
        return jnp.stack(_powers(jnp.exp(-0.5 * z * z), away))

    ends = powers_at(middle[0] - half[0]) + powers_at(middle[-1] + half[-1])
    between = jnp.abs(jax.lax.stop_gradient(fine - rough)).sum(1) / _GAIN
    _, of_mean, of_square = (between + ends) / total
    moments = Gaussian(center + mean, jnp.maximum(second / total - mean * mean, 0))
    # about a center that is the mean, up to rounding
    return moments, Gaussian(of_mean, of_square)


def _powers(density: Array, away: Array) -> tuple[Array, Array, Array]:
    return density, density * away, density * away * away


def _derivatives(fn: Callable[[Array], Array], x: Array) -> tuple[Array, Array, Array]:
    """f, f', f'' of an elementwise function."""
    unit = jnp.ones_like(x)

    def first(x: Array) -> tuple[Array, Array]:
        return jax.jvp(fn, (x,), (unit,))

    (value, slope), (_, curvature) = jax.jvp(first, (x,), (unit,))
    return value, slope, curvature


def _breaks(term: Term) -> list[tuple[Scalar, Scalar]]:
    """Where x makes an argument equal to the number it is compared with, or to 0, and
    the slope of that argument.
    """
    breaks: dict[Hashable, tuple[Scalar, Scalar]] = {}
    visited: set[int] = set()

    def visit(node: Operand) -> None:
        if not isinstance(node, Term) or id(node) in visited or node.equation is None:
            return
        visited.add(id(node))
        if node.base is node:
            for place, slope in _places(node):
                key = _identity(place), _identity(slope)
                if not isinstance(key[0], float) or math.isfinite(key[0]):
                    breaks.setdefault(key, (place, slope))
        for operand in node.operands:
            visit(operand)

    visit(term)
    return list(breaks.values())[:_MAX_BREAKS] or [(0.0, 1.0)]


def _identity(value: Operand) -> Operand:
    """Equal for equal known numbers, and for the same array."""
    concrete = not isinstance(value, jax.core.Tracer) and np.size(value) == 1
    return float(np.reshape(value, ())) if concrete else id(value)


def _places(node: Term) -> list[tuple[Scalar, Scalar]]:
    terms = terms_among(node.operands)
    line = _line(terms[0]) if len(terms) == 1 else None
    if line is None or node.equation is None:
        return []
    plain = [operand for operand in node.operands if not isinstance(operand, Term)]
    against = plain if node.equation.name in _COMPARED else [0.0]
    if isinstance(line[1], float) and line[1] == 0 and all(map(is_zero, against)):
        return [(0.0, line[0])]
    return [(_solve(*line, target), line[0]) for target in against]


def _line(term: Term) -> tuple[Scalar, Scalar] | None:
    """(slope, shift) of an affine function of x, also of a clipped one, which is affine
    between its bounds.
    """
    if term.is_normal:
        return term.slope, term.shift
    base = term.base
    inner = terms_among(base.operands)
    if (
        base.equation is None
        or base.equation.name not in ("max", "min", "clamp")
        or len(inner) != 1
    ):
        return None
    line = _line(inner[0])
    return line and (term.slope * line[0], term.slope * line[1] + term.shift)


def _solve(slope: Scalar, shift: Scalar, target: Scalar) -> Scalar:
    """x with slope * x + shift = at; 0 if the argument does not depend on x."""
    if isinstance(slope, float):
        return (target - shift) / slope if slope else 0.0
    return jnp.where(slope == 0, 0, (target - shift) / jnp.where(slope == 0, 1, slope))
