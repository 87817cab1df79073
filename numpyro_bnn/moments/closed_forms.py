"""Exact moments of functions of one Gaussian: rectifiers, powers, exponential, sine and cosine."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from numpyro_bnn.moments.expectation import closed_form, moments_of
from numpyro_bnn.moments.gaussian import Gaussian
from numpyro_bnn.moments.rectifier import normal_cdf_pdf, rectified, standardize
from numpyro_bnn.moments.term import Term

__all__ = ["leaky_relu"]


def _normal(term: Any) -> Gaussian | None:
    """Moments of an operand that is Gaussian itself, as a closed form needs it."""
    return moments_of(term) if isinstance(term, Term) and term.is_normal else None


# ------------------------------------------------------------------------------------- piecewise linear


@closed_form("max")
def _max(term: Term) -> Gaussian | None:
    return _clipped(term, 1)


@closed_form("min")
def _min(term: Term) -> Gaussian | None:
    return _clipped(term, -1)


def _clipped(term: Term, sign: int) -> Gaussian | None:
    """max(u, c) = c + max(u - c, 0); min(u, c) = c - max(c - u, 0)."""
    left, right = term.operands
    u, bound = (left, right) if isinstance(left, Term) else (right, left)
    x = _normal(u)
    if x is None or isinstance(bound, Term):
        return None
    # A bound of -inf (or +inf of a minimum) leaves the number as it is.
    open_end = bound == -sign * np.inf
    finite = jnp.where(open_end, 0, bound).astype(x.mean.dtype)
    mean, var = rectified(sign * (x.mean - finite), x.var)
    return Gaussian(jnp.where(open_end, x.mean, finite + sign * mean), jnp.where(open_end, x.var, var))


@closed_form("abs")
def _abs(term: Term) -> Gaussian | None:
    x = _normal(term.operands[0])
    return None if x is None else leaky_relu(x, -1.0, 1.0)


def leaky_relu(x: Gaussian, below: Any, above: Any) -> Gaussian:
    """Moments of ``above * x`` for x >= 0 and ``below * x`` for x < 0.

    With r = max(x, 0) it is below * x + (above - below) * r, and Cov(x, r) = v Phi.

    >>> import jax.numpy as jnp
    >>> unit = Gaussian(jnp.array(0.0), jnp.array(1.0))
    >>> [round(float(moment), 4) for moment in leaky_relu(unit, -1.0, 1.0)]  # sqrt(2 / pi), 1 - 2 / pi
    [0.7979, 0.3634]
    """
    mean, var = rectified(x.mean, x.var)
    cdf = normal_cdf_pdf(standardize(x.mean, x.var)[0])[0]
    step = above - below
    return Gaussian(
        below * x.mean + step * mean, (below * below + 2 * below * step * cdf) * x.var + step * step * var
    )


@closed_form("select_n")
def _select(term: Term) -> Gaussian | None:
    """``select_n(u > 0, a * u, b * u)``, as leaky rectifiers are written; any order, any of the comparisons."""
    which, *cases = term.operands
    compared = _compared_with_zero(which)
    if compared is None or len(cases) != 2:
        return None
    u, positive = compared
    slopes = [_multiple(case, u) for case in cases]
    x = _normal(u)
    if x is None or any(slope is None for slope in slopes):
        return None
    below, above = slopes if positive else slopes[::-1]
    return leaky_relu(x, below, above)


_FLIPPED = {"gt": "lt", "ge": "le", "lt": "gt", "le": "ge"}


def _compared_with_zero(which: Any) -> tuple[Term, bool] | None:
    """(u, whether the predicate holds for positive u) of a comparison of a term with the constant 0."""
    if not isinstance(which, Term) or which.equation is None or which.equation.name not in _FLIPPED:
        return None
    name, (left, right) = which.equation.name, which.operands
    if isinstance(right, Term):
        name, left, right = _FLIPPED[name], right, left
    if isinstance(right, Term) or not _is_zero(right):
        return None
    return left, name in ("gt", "ge")


def _is_zero(value: Any) -> bool:
    return not isinstance(value, jax.core.Tracer) and bool(np.all(np.asarray(value) == 0))


def _multiple(case: Any, u: Term) -> Any:
    """The factor c where the expression is c * u, else ``None``."""
    if case is u:
        return 1.0
    if not isinstance(case, Term):
        return 0.0 if _is_zero(case) else None
    name = case.equation.name if case.equation is not None else ""
    if name == "neg" and case.operands[0] is u:
        return -1.0
    if name == "copy":
        return _multiple(case.operands[0], u)
    if name == "mul" and any(operand is u for operand in case.operands):
        factor = case.operands[1] if case.operands[0] is u else case.operands[0]
        return None if isinstance(factor, Term) else factor
    return None


# --------------------------------------------------------------------------------------- smooth functions


@closed_form("exp")
def _exp(term: Term) -> Gaussian | None:
    """Log-normal."""
    x = _normal(term.operands[0])
    if x is None:
        return None
    mean = jnp.exp(x.mean + 0.5 * x.var)
    return Gaussian(mean, mean * mean * jnp.expm1(x.var))


@closed_form("square", "integer_pow")
def _square(term: Term) -> Gaussian | None:
    x = _normal(term.operands[0])
    if x is None or term.equation.params.get("y", 2) != 2:  # type: ignore[union-attr]
        return None
    return Gaussian(x.mean * x.mean + x.var, 2 * x.var * x.var + 4 * x.mean * x.mean * x.var)


@closed_form("sin")
def _sin(term: Term) -> Gaussian | None:
    return _wave(term, lax.sin, 1)


@closed_form("cos")
def _cos(term: Term) -> Gaussian | None:
    return _wave(term, lax.cos, -1)


def _wave(term: Term, wave: Any, sign: int) -> Gaussian | None:
    """E sin x = exp(-v/2) sin m; Var sin x = (1 - exp(-v)) (1 + exp(-v) cos 2m) / 2; cosine: minus."""
    x = _normal(term.operands[0])
    if x is None:
        return None
    var = -0.5 * jnp.expm1(-x.var) * (1 + sign * jnp.exp(-x.var) * jnp.cos(2 * x.mean))
    return Gaussian(jnp.exp(-0.5 * x.var) * wave(x.mean), var)


@closed_form("stop_gradient")
def _stop_gradient(term: Term) -> Gaussian | None:
    x = _normal(term.operands[0])
    return None if x is None else Gaussian(*map(lax.stop_gradient, x))
