r"""Moments of the rectifier max(x, 0) of a Gaussian, accurate in both tails in float32 and float64.

With alpha = m / sqrt(v), Phi and phi the cdf and pdf of the standard normal at alpha, Q = 1 - Phi:

.. math::
   E = m \Phi + \sqrt v \phi, \qquad
   V = v \{\Phi + \alpha^2 \Phi Q - \alpha \phi (\Phi - Q) - \phi^2\}.

Evaluated as they stand they lose their digits in the tails. With t = |alpha| the numbers

.. math:: e(t) = \int_0^\infty u\, e^{-u^2/2 - t u} du, \qquad h(t) = \int_0^\infty u^2 e^{-u^2/2 - t u} du

are positive, and so are all terms of Phi(-t) = phi (h + t e), E = sqrt(v) phi e and E[max(x, 0)^2] = v phi h for
m <= 0; m > 0 is the mirror image, max(x, 0) = x + max(-x, 0). Polynomials in the variable y = (t - 4) / (t + 4) give
e (t + 4)^2 and h (t + 4)^3 for all t to 1e-14. One exponential, one division and no branch: cheaper than any normal
cdf of the library.

Derivatives are closed forms too: dE/dm = Phi, dE/dv = phi / (2 sqrt v), dV/dm = 2 E Q, dV/dv = Phi - E phi / sqrt v.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["normal_cdf_pdf", "rectified"]

# Coefficients in y, highest power first: Chebyshev interpolation of the integrals, which were summed in long double.
_CENTRE = 4.0
# fmt: off
_FIRST = (
    1.3141516319592483e-08, -2.3600478016305715e-08, -1.611034008419665e-07, 1.5083901416801382e-07,
    1.0407067634332634e-06, -1.2592201414918236e-07, -4.816955257780364e-06, -3.3623864652554403e-06,
    1.8263964253861786e-05, 3.0234584469823744e-05, -6.21199638652925e-05, -0.00018573736483595837,
    0.0002162787176401837, 0.0010356043597887221, -0.0010216592479884573, -0.005744863257313895,
    0.008221623683230313, 0.030028888920872583, -0.089671056532252, -0.061068933555892435,
    0.8514610658629777, -2.475730901241991, 4.313851553597915, -4.988360931375155,
    3.416989974128468,
)
_SECOND = (
    1.1651172826532274e-07, -7.926992111606523e-07, -2.0289573967602337e-06, 6.393545390892541e-06,
    1.6477147596560826e-05, -2.197857418195781e-05, -8.926767374362043e-05, 2.0810949280303248e-05,
    0.00038165115484645185, 0.00022347244254916632, -0.0014448820776884475, -0.0019173250309023615,
    0.0054414677898160235, 0.01086785303602067, -0.0236512918639033, -0.05297698215772911,
    0.13391996198012188, 0.20448702190523102, -0.927570670412123, 0.11054380344022735,
    5.4141110627428715, -15.784498769631078, 24.6825989181218, -23.592785901321616,
    11.822340879632078,
)
# fmt: on


def _polynomial(coefficients: tuple[float, ...], y: jax.Array) -> jax.Array:
    total = jnp.full_like(y, coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * y + coefficient
    return total


def _tail_integrals(t: jax.Array) -> tuple[jax.Array, jax.Array]:
    """e(t) and h(t) for t >= 0."""
    inverse = 1 / (t + _CENTRE)
    y = 1 - 2 * _CENTRE * inverse
    square = inverse * inverse
    return _polynomial(_FIRST, y) * square, _polynomial(_SECOND, y) * (square * inverse)


def normal_cdf_pdf(alpha: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Phi(alpha), accurate in the lower tail, and phi(alpha)."""
    cdf = 0.5 * lax.erfc(-alpha * math.sqrt(0.5))
    return cdf, jnp.exp(-0.5 * alpha * alpha) * (1 / math.sqrt(2 * math.pi))


def standardize(mean: jax.Array, var: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(alpha, sd): m / sqrt(v), cut where both tails are empty in any precision, and sqrt(v); safe at v = 0."""
    positive = var > 0
    sd = jnp.where(positive, jnp.sqrt(jnp.where(positive, var, 1)), 0)
    alpha = jnp.where(positive, mean / jnp.where(positive, sd, 1), jnp.sign(mean) * 64)
    return jnp.clip(alpha, -64, 64), sd


@jax.custom_jvp
def rectified(mean: jax.Array, var: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean and variance of max(x, 0), x ~ N(mean, var); var = 0 is allowed.

    >>> import jax.numpy as jnp
    >>> [round(float(moment), 4) for moment in rectified(jnp.array(0.0), jnp.array(1.0))]
    [0.3989, 0.3408]
    """
    first, second, *_ = _rectified(mean, var)
    return first, second


def _rectified(mean: jax.Array, var: jax.Array) -> tuple[jax.Array, ...]:
    alpha, sd = standardize(mean, var)
    t = jnp.abs(alpha)
    pdf = jnp.exp(-0.5 * t * t) * (1 / math.sqrt(2 * math.pi))
    first, second = (pdf * integral for integral in _tail_integrals(t))
    tail = second + t * first
    above = alpha > 0
    spread = jnp.where(above, 1 - second - 2 * t * first, second) - first * first
    return jnp.where(above, mean, 0) + sd * first, var * spread, jnp.where(above, 1 - tail, tail), pdf, sd


@rectified.defjvp
def _rectified_jvp(primals: tuple, tangents: tuple) -> tuple:
    (mean, var), (d_mean, d_var) = primals, tangents
    first, second, cdf, pdf, sd = _rectified(mean, var)
    density = jnp.where(sd > 0, pdf / jnp.where(sd > 0, sd, 1), 0)
    d_first = cdf * d_mean + 0.5 * density * d_var
    d_second = 2 * first * (1 - cdf) * d_mean + (cdf - first * density) * d_var
    return (first, second), (d_first, d_second)
