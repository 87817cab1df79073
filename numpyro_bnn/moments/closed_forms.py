r"""Exact moments of functions of Gaussians: rectifiers, maxima, powers, exponential,
sine and cosine.

The rectifier r = max(x, 0), x ~ N(m, v), is accurate in both tails in float32 and
float64. With alpha = m / sqrt(v), Phi and phi the cdf and pdf of the standard normal at
alpha, Q = 1 - Phi:

.. math::
   E = m \Phi + \sqrt v \phi, \qquad
   V = v \{\Phi + \alpha^2 \Phi Q - \alpha \phi (\Phi - Q) - \phi^2\}.

In this form they lose digits in the tails. With t = |alpha| the integrals

.. math:: e(t) = \int_0^\infty u\, e^{-u^2/2 - t u} du, \qquad h(t) = \int_0^\infty u^2
          e^{-u^2/2 - t u} du

are positive, and so are all terms of Phi(-t) = phi (h + t e), E = sqrt(v) phi e and
E[max(x, 0)^2] = v phi h for m <= 0; m > 0 is the mirror image, max(x, 0) = x + max(-x,
0). Polynomials in the variable y = (t - 4) / (t + 4) give e (t + 4)^2 and h (t + 4)^3
for all t to 1e-14. This costs one exponential, one division and no branch, less than
any normal cdf of the library.

Derivatives have closed forms too: dE/dm = Phi, dE/dv = phi / (2 sqrt v), dV/dm = 2 E Q,
dV/dv = Phi - E phi / sqrt v.
"""

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from numpyro_bnn._types import Operand, Scalar
from numpyro_bnn.moments.expectation import CLOSED_FORMS, is_zero, moments_of
from numpyro_bnn.moments.terms import Gaussian, Term

# Coefficients in y, highest power first: Chebyshev interpolation of the integrals,
# summed in long double.
_CENTER = 4.0
_FIRST = (
    1.3141516319592483e-08,
    -2.3600478016305715e-08,
    -1.611034008419665e-07,
    1.5083901416801382e-07,
    1.0407067634332634e-06,
    -1.2592201414918236e-07,
    -4.816955257780364e-06,
    -3.3623864652554403e-06,
    1.8263964253861786e-05,
    3.0234584469823744e-05,
    -6.21199638652925e-05,
    -0.00018573736483595837,
    0.0002162787176401837,
    0.0010356043597887221,
    -0.0010216592479884573,
    -0.005744863257313895,
    0.008221623683230313,
    0.030028888920872583,
    -0.089671056532252,
    -0.061068933555892435,
    0.8514610658629777,
    -2.475730901241991,
    4.313851553597915,
    -4.988360931375155,
    3.416989974128468,
)
_SECOND = (
    1.1651172826532274e-07,
    -7.926992111606523e-07,
    -2.0289573967602337e-06,
    6.393545390892541e-06,
    1.6477147596560826e-05,
    -2.197857418195781e-05,
    -8.926767374362043e-05,
    2.0810949280303248e-05,
    0.00038165115484645185,
    0.00022347244254916632,
    -0.0014448820776884475,
    -0.0019173250309023615,
    0.0054414677898160235,
    0.01086785303602067,
    -0.0236512918639033,
    -0.05297698215772911,
    0.13391996198012188,
    0.20448702190523102,
    -0.927570670412123,
    0.11054380344022735,
    5.4141110627428715,
    -15.784498769631078,
    24.6825989181218,
    -23.592785901321616,
    11.822340879632078,
)


def _polynomial(coefficients: tuple[float, ...], y: Array) -> Array:
    """By Horner's rule."""
    return reduce(lambda total, c: total * y + c, coefficients, jnp.zeros_like(y))


def _tail_integrals(t: Array) -> tuple[Array, Array]:
    """e(t) and h(t) for t >= 0."""
    inverse = 1 / (t + _CENTER)
    y = 1 - 2 * _CENTER * inverse
    square = inverse * inverse
    return _polynomial(_FIRST, y) * square, _polynomial(_SECOND, y) * (square * inverse)


def normal_cdf_pdf(alpha: Array) -> tuple[Array, Array]:
    """Phi(alpha), accurate in the lower tail, and phi(alpha)."""
    cdf = 0.5 * lax.erfc(-alpha * math.sqrt(0.5))
    return cdf, jnp.exp(-0.5 * alpha * alpha) * (1 / math.sqrt(2 * math.pi))


def standardize(mean: Array, var: Array) -> tuple[Array, Array]:
    """(alpha, sd): m / sqrt(v), cut where both tails are empty in any precision, and
    sqrt(v); safe at v = 0.
    """
    positive = var > 0
    sd = jnp.where(positive, jnp.sqrt(jnp.where(positive, var, 1)), 0)
    alpha = jnp.where(positive, mean / jnp.where(positive, sd, 1), jnp.sign(mean) * 64)
    return jnp.clip(alpha, -64, 64), sd


@jax.custom_jvp
def rectified(mean: Array, var: Array) -> tuple[Array, Array]:
    """Mean and variance of max(x, 0), x ~ N(mean, var); var = 0 is allowed."""
    first, second, *_ = _rectified(mean, var)
    return first, second


def _rectified(mean: Array, var: Array) -> tuple[Array, ...]:
    alpha, sd = standardize(mean, var)
    t = jnp.abs(alpha)
    pdf = jnp.exp(-0.5 * t * t) * (1 / math.sqrt(2 * math.pi))
    first, second = (pdf * integral for integral in _tail_integrals(t))
    tail = second + t * first
    above = alpha > 0
    spread = jnp.where(above, 1 - second - 2 * t * first, second) - first * first
    return (
        jnp.where(above, mean, 0) + sd * first,
        var * spread,
        jnp.where(above, 1 - tail, tail),
        pdf,
        sd,
    )


@rectified.defjvp
def _rectified_jvp(primals: tuple, tangents: tuple) -> tuple:
    (mean, var), (d_mean, d_var) = primals, tangents
    first, second, cdf, pdf, sd = _rectified(mean, var)
    density = jnp.where(sd > 0, pdf / jnp.where(sd > 0, sd, 1), 0)
    d_first = cdf * d_mean + 0.5 * density * d_var
    d_second = 2 * first * (1 - cdf) * d_mean + (cdf - first * density) * d_var
    return (first, second), (d_first, d_second)


def leaky_relu(x: Gaussian, below: float, above: float) -> Gaussian:
    """Moments of ``above * x`` for x >= 0 and ``below * x`` for x < 0.

    With r = max(x, 0) it is below * x + (above - below) * r, and Cov(x, r) = v Phi.
    """
    mean, var = rectified(x.mean, x.var)
    cdf = normal_cdf_pdf(standardize(x.mean, x.var)[0])[0]
    step = above - below
    spread = (below * below + 2 * below * step * cdf) * x.var + step * step * var
    return Gaussian(below * x.mean + step * mean, spread)


def maximum(x: Gaussian, y: Gaussian) -> Gaussian:
    r"""Moments of max(x, y) of two independent Gaussians, elementwise.

    With d = m_1 - m_2, theta^2 = v_1 + v_2, alpha = d / theta, Phi and phi at alpha, Q
    = 1 - Phi:

    .. math::
       E = m_1 \Phi + m_2 Q + \theta \phi, \qquad
       V = v_1 \Phi + v_2 Q
       + \theta^2 \{\alpha^2 \Phi Q - \alpha \phi (\Phi - Q) - \phi^2\}.

    Reference: Clark (1961), The greatest of a finite set of random variables, equations
    2 and 3.
    """
    total = x.var + y.var
    alpha, theta = standardize(x.mean - y.mean, total)
    cdf, pdf = normal_cdf_pdf(alpha)
    upper = normal_cdf_pdf(-alpha)[0]
    mean = x.mean * cdf + y.mean * upper + theta * pdf
    cross = alpha * (alpha * cdf * upper - pdf * (cdf - upper)) - pdf * pdf
    return Gaussian(mean, x.var * cdf + y.var * upper + total * cross)


def maximum_of(
    mean: Array, var: Array, present: Scalar = True, num_nodes: int = 32
) -> Gaussian:
    r"""Moments of the largest of n independent Gaussians along the leading axis.

    The largest, y, has the cdf F(t), the product of n normal cdfs. With an upper bound
    b, E(b - y) = int F dt and E(b - y)^2 = 2 int (b - t) F dt: Gauss-Legendre on both
    sides of the largest mean. Pairwise maxima would lose the skewness: the variance
    would be 5 % too small with 4 equal Gaussians, 43 % with 64.

    ``mean`` and ``var`` are (n, ...); ``present`` is False for elements to leave out;
    ``num_nodes`` are per side.
    """
    mean, var = jnp.where(present, mean, -jnp.inf), jnp.where(present, var, 0)
    fixed_mean, reach = lax.stop_gradient((mean, 8 * jnp.sqrt(var)))
    low, middle = (fixed_mean - reach).max(0), fixed_mean.max(0)
    high = (fixed_mean + reach).max(0)
    nodes, weights = np.polynomial.legendre.leggauss(num_nodes)

    def integrals(node: ArrayLike, weight: ArrayLike) -> tuple[Array, Array]:
        total = below = jnp.zeros_like(high)
        for start, end in ((low, middle), (middle, high)):
            half = (end - start) / 2
            t = (start + end) / 2 + half * node
            alpha, _ = standardize(jnp.where(present, t - mean, 1), var)
            cdf = jnp.prod(jnp.where(present, normal_cdf_pdf(alpha)[0], 1), axis=0)
            total += weight * half * cdf
            below += weight * half * 2 * (high - t) * cdf
        return total, below

    by_node = jax.vmap(integrals)(nodes.astype(mean.dtype), weights.astype(mean.dtype))
    first, second = (jnp.sum(integral, 0) for integral in by_node)
    return Gaussian(high - first, jnp.maximum(second - first * first, 0))


def _normal(term: Operand) -> Gaussian | None:
    """Moments of an operand that is itself Gaussian, as a closed form requires."""
    return moments_of(term) if isinstance(term, Term) and term.is_normal else None


def _name(term: Term) -> str:
    """The primitive that computed a term; empty for the variable itself."""
    return term.equation.name if term.equation is not None else ""


def _clipped(term: Term) -> Gaussian | None:
    """max(u, c) = c + max(u - c, 0); min(u, c) = c - max(c - u, 0)."""
    sign = 1 if _name(term) == "max" else -1
    left, right = term.operands
    u, bound = (left, right) if isinstance(left, Term) else (right, left)
    x = _normal(u)
    if x is None or isinstance(bound, Term):
        return None
    # A bound of -inf (or +inf for a minimum) leaves the number unchanged.
    open_end = bound == -sign * np.inf
    finite = jnp.where(open_end, 0, bound).astype(x.mean.dtype)
    mean, var = rectified(sign * (x.mean - finite), x.var)
    return Gaussian(
        jnp.where(open_end, x.mean, finite + sign * mean),
        jnp.where(open_end, x.var, var),
    )


def _select(term: Term) -> Gaussian | None:
    """``select_n(u > 0, a * u, b * u)``, the usual form of leaky rectifiers; any order,
    any of the comparisons.
    """
    predicate, *cases = term.operands
    compared = _compared_with_zero(predicate)
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


def _compared_with_zero(predicate: Operand) -> tuple[Term, bool] | None:
    """(u, whether the predicate holds for positive u) of a comparison of a term with
    the constant 0.
    """
    if not isinstance(predicate, Term) or _name(predicate) not in _FLIPPED:
        return None
    name, (left, right) = _name(predicate), predicate.operands
    if isinstance(right, Term):
        name, left, right = _FLIPPED[name], right, left
    if isinstance(right, Term) or not is_zero(right):
        return None
    return left, name in ("gt", "ge")


def _multiple(case: Operand, u: Term) -> Operand:
    """The factor c if the expression is c * u, else ``None``."""
    if case is u:
        return 1.0
    if not isinstance(case, Term):
        return 0.0 if is_zero(case) else None
    name = _name(case)
    if name == "neg" and case.operands[0] is u:
        return -1.0
    if name == "copy":
        return _multiple(case.operands[0], u)
    if name == "mul" and any(operand is u for operand in case.operands):
        factor = case.operands[1] if case.operands[0] is u else case.operands[0]
        return None if isinstance(factor, Term) else factor
    return None


def _smooth(term: Term) -> Gaussian | None:
    """Functions of one operand that is itself Gaussian."""
    x = _normal(term.operands[0])
    power = 2 if term.equation is None else term.equation.params.get("y", 2)
    return _SMOOTH[_name(term)](x) if x is not None and power == 2 else None


def _exp(x: Gaussian) -> Gaussian:
    """Log-normal."""
    mean = jnp.exp(x.mean + 0.5 * x.var)
    return Gaussian(mean, mean * mean * jnp.expm1(x.var))


def _square(x: Gaussian) -> Gaussian:
    return Gaussian(
        x.mean * x.mean + x.var, 2 * x.var * x.var + 4 * x.mean * x.mean * x.var
    )


def _wave(x: Gaussian, wave: Any, sign: int) -> Gaussian:
    """E sin x = exp(-v/2) sin m; Var sin x = (1 - exp(-v)) (1 + exp(-v) cos 2m) / 2;
    with a minus for the cosine.
    """
    var = -0.5 * jnp.expm1(-x.var) * (1 + sign * jnp.exp(-x.var) * jnp.cos(2 * x.mean))
    return Gaussian(jnp.exp(-0.5 * x.var) * wave(x.mean), var)


_SMOOTH: dict[str, Callable[[Gaussian], Gaussian]] = {
    "abs": lambda x: leaky_relu(x, -1.0, 1.0),
    "exp": _exp,
    "square": _square,
    "integer_pow": _square,
    "sin": lambda x: _wave(x, lax.sin, 1),
    "cos": lambda x: _wave(x, lax.cos, -1),
    "stop_gradient": lambda x: Gaussian(*map(lax.stop_gradient, x)),
}
CLOSED_FORMS.update(
    max=_clipped, min=_clipped, select_n=_select, **dict.fromkeys(_SMOOTH, _smooth)
)
