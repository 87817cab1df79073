r"""The larger of two independent Gaussians in closed form, the largest of many by integration.

With d = m_1 - m_2, theta^2 = v_1 + v_2, alpha = d / theta, Phi and phi at alpha, Q = 1 - Phi:

.. math::
   E = m_1 \Phi + m_2 Q + \theta \phi, \qquad
   V = v_1 \Phi + v_2 Q + \theta^2 \{\alpha^2 \Phi Q - \alpha \phi (\Phi - Q) - \phi^2\}.

Taken pair by pair for more than two it would lose their skewness: for 4 of the same law the variance comes out 5 %
too small, for 64 43 %. So more than two are integrated.

Reference: Clark (1961), The greatest of a finite set of random variables, equations 2 and 3.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from numpyro_bnn.moments.gaussian import Gaussian
from numpyro_bnn.moments.rectifier import normal_cdf_pdf, standardize

__all__ = ["maximum", "maximum_of"]


def maximum(x: Gaussian, y: Gaussian) -> Gaussian:
    """Moments of max(x, y), elementwise.

    >>> import jax.numpy as jnp
    >>> unit = Gaussian(jnp.array(0.0), jnp.array(1.0))
    >>> [round(float(moment), 4) for moment in maximum(unit, unit)]
    [0.5642, 0.6817]
    """
    total = x.var + y.var
    alpha, theta = standardize(x.mean - y.mean, total)
    cdf, pdf = normal_cdf_pdf(alpha)
    upper = normal_cdf_pdf(-alpha)[0]
    mean = x.mean * cdf + y.mean * upper + theta * pdf
    cross = alpha * (alpha * cdf * upper - pdf * (cdf - upper)) - pdf * pdf
    return Gaussian(mean, x.var * cdf + y.var * upper + total * cross)


def maximum_of(mean: jax.Array, var: jax.Array, present: Any = True, num_nodes: int = 32) -> Gaussian:
    r"""Moments of the largest of n independent Gaussians along the leading axis.

    The largest, y, has the cdf F(t), the product of n normal cdfs. With an upper end b of the line,
    E(b - y) = int F dt and E(b - y)^2 = 2 int (b - t) F dt: Gauss-Legendre on both sides of the largest mean.

    :param mean: (n, ...).
    :param var: (n, ...), 0 allowed.
    :param present: False where an element is left out; broadcasts against ``mean``.
    :param num_nodes: nodes on each side.

    >>> import jax.numpy as jnp
    >>> [round(float(moment), 4) for moment in maximum_of(jnp.zeros(4), jnp.ones(4))]
    [1.0294, 0.4917]
    """
    mean, var = jnp.where(present, mean, -jnp.inf), jnp.where(present, var, 0)
    fixed_mean, reach = lax.stop_gradient((mean, 8 * jnp.sqrt(var)))
    low, middle, high = (m.max(0) for m in (fixed_mean - reach, fixed_mean, fixed_mean + reach))
    nodes, weights = (a.astype(mean.dtype) for a in np.polynomial.legendre.leggauss(num_nodes))

    def integrals(node: Any, weight: Any) -> tuple[jax.Array, jax.Array]:
        total = below = jnp.zeros_like(high)
        for start, end in ((low, middle), (middle, high)):
            half = (end - start) / 2
            t = (start + end) / 2 + half * node
            alpha, _ = standardize(jnp.where(present, t - mean, 1), var)
            cdf = jnp.prod(jnp.where(present, normal_cdf_pdf(alpha)[0], 1), axis=0)
            total += weight * half * cdf
            below += weight * half * 2 * (high - t) * cdf
        return total, below

    first, second = (jnp.sum(part, 0) for part in jax.vmap(integrals)(nodes, weights))
    return Gaussian(high - first, jnp.maximum(second - first * first, 0))
