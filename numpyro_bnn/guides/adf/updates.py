"""The updates of assumed density filtering: the posterior moments after one factor, from its log normalizer."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from numpyro_bnn.moments import Gaussian

__all__ = ["Gamma", "gamma_update", "gaussian_update", "normal_log_density"]


class Gamma(NamedTuple):
    """Gamma distribution of a precision, by shape and rate as NumPyro names them."""

    concentration: jax.Array
    rate: jax.Array

    def variance(self, order: int = 0) -> jax.Array:
        """rate / (concentration - 1 + order): what stands for 1 / precision in the normalizer Z_order."""
        return self.rate / (self.concentration + (order - 1))


def normal_log_density(residual: jax.Array, var: jax.Array) -> jax.Array:
    """log N(residual; 0, var) without its constant, -(log 2 pi) / 2.

    >>> float(normal_log_density(jnp.array(2.0), jnp.array(1.0)))
    -2.0
    """
    return -0.5 * (jnp.log(var) + residual * residual / var)


def gaussian_update(before: Gaussian, gradient: Gaussian) -> tuple[Gaussian, jax.Array]:
    r"""Moments after a factor with normalizer Z, and where the update was refused.

    .. math:: m' = m + v \frac{d \log Z}{dm}, \qquad
              v' = v - v^2 \left[\left(\frac{d \log Z}{dm}\right)^2 - 2 \frac{d \log Z}{dv}\right]

    Where v' is not positive and finite, both old moments are kept.

    :param gradient: d log Z / dm and d log Z / dv.
    :return: new moments and a mask.

    Reference: Hernandez-Lobato & Adams (2015), equations 10 and 11; Minka (2001), section 3.2.

    >>> prior, y = Gaussian(jnp.array(0.0), jnp.array(1.0)), 1.0     # y ~ N(w, 1), w ~ N(0, 1)
    >>> log_z = lambda w: normal_log_density(y - w.mean, w.var + 1.0)
    >>> after, refused = gaussian_update(prior, jax.grad(log_z)(prior))
    >>> [float(m) for m in after], bool(refused)
    ([0.5, 0.5], False)
    """
    mean, var = before
    d_mean, d_var = gradient
    new_var = var - var * var * (d_mean * d_mean - 2 * d_var)
    # A finite new variance means that both gradients are finite, and with them the new mean.
    good = (new_var > 0) & (new_var < jnp.inf)
    return Gaussian(jnp.where(good, mean + var * d_mean, mean), jnp.where(good, new_var, var)), ~good


def gamma_update(before: Gamma, log_z: jax.Array) -> Gamma:
    r"""Shape a and rate b after a factor whose normalizers are Z_0 = Z(a, b), Z_1 = Z(a + 1, b), Z_2 = Z(a + 2, b).

    .. math:: a' = \left[\frac{Z_2 Z_0}{Z_1^2} \frac{a + 1}{a} - 1\right]^{-1}, \qquad
              b' = \left[\frac{Z_2}{Z_1} \frac{a + 1}{b} - \frac{Z_1}{Z_0} \frac{a}{b}\right]^{-1}

    They match the first two moments of the precision. An update that is not finite or leaves a <= 1 is refused.

    :param log_z: (3, ...), the logarithms of the three.

    Reference: Hernandez-Lobato & Adams (2015), supplement, section 3.

    >>> [round(float(part), 4) for part in gamma_update(Gamma(jnp.array(6.0), jnp.array(6.0)), jnp.zeros(3))]
    [6.0, 6.0]
    """
    a, b = before
    z0, z1, z2 = log_z
    concentration = 1 / (jnp.exp(z2 - 2 * z1 + z0) * (a + 1) / a - 1)
    rate = 1 / (jnp.exp(z2 - z1) * (a + 1) / b - jnp.exp(z1 - z0) * a / b)
    good = (concentration > 1) & (concentration < jnp.inf) & (rate > 0) & (rate < jnp.inf)
    return Gamma(jnp.where(good, concentration, a), jnp.where(good, rate, b))
