"""Moment matching: the updates of weights and hyperparameters by one factor, and the
refinement of the prior.

Data points and priors are factors of the posterior. To absorb a factor, the
approximation is set to the first two moments of its product with the factor, which
follow from the logarithm of the normalizer Z.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, lax
from numpyro.distributions.transforms import Transform, biject_to

from numpyro_bnn._distributions import unwrapped
from numpyro_bnn._types import PyTree
from numpyro_bnn.guides.adf.reading import Weight, refuse
from numpyro_bnn.moments import Gaussian

# The constant that `normal_log_density` leaves out.
NORMAL_CONSTANT = -0.5 * np.log(2 * np.pi)
# Grid on which a prior is matched by a Gaussian in unconstrained space.
REACH, GRID = 60.0, 24_001
# A cavity variance above this many prior variances carries no information.
WIDEST = 1e6
# Grids on which the posterior of a scale is found, each narrower than the previous one.
GRIDS, POINTS, WIDTHS = 3, 64, 8.0


class Gamma(NamedTuple):
    """Gamma distribution of a precision, by shape and rate, named as in NumPyro."""

    concentration: Array
    rate: Array

    def variance(self, order: int = 0) -> Array:
        """rate / (concentration - 1 + order): replaces 1 / precision in the normalizer
        Z_order.
        """
        return self.rate / (self.concentration + (order - 1))


def normal_log_density(residual: Array, var: Array) -> Array:
    """log N(residual; 0, var) without its constant, -(log 2 pi) / 2."""
    return -0.5 * (jnp.log(var) + residual * residual / var)


def gaussian_update(prior: Gaussian, gradient: Gaussian) -> tuple[Gaussian, Array]:
    r"""Moments of a Gaussian after a factor with normalizer Z, and a mask of the
    refused updates.

    .. math:: m' = m + v \frac{d \log Z}{dm}, \qquad
              v' = v - v^2 \left[\left(\frac{d \log Z}{dm}\right)^2
              - 2 \frac{d \log Z}{dv}\right]

    If v' is not positive and finite, both old moments are kept.

    :param gradient: d log Z / dm and d log Z / dv.

    Reference: Hernandez-Lobato & Adams (2015), equations 10 and 11; Minka (2001),
    section 3.2.
    """
    mean, var = prior
    d_mean, d_var = gradient
    new_var = var - var * var * (d_mean * d_mean - 2 * d_var)
    # If the new variance is finite, so are both gradients, and hence the new mean.
    good = (new_var > 0) & (new_var < jnp.inf)
    return _where(good, Gaussian(mean + var * d_mean, new_var), prior), ~good


def _where(good: Array, new: PyTree, previous: PyTree) -> PyTree:
    return jax.tree.map(
        lambda new, previous: jnp.where(good, new, previous), new, previous
    )


def gamma_update(prior: Gamma, log_z: Array) -> Gamma:
    r"""Shape a and rate b of a Gamma after a factor with normalizers Z_k = Z(a + k, b),
    k = 0, 1, 2.

    .. math:: a' = \left[\frac{Z_2 Z_0}{Z_1^2} \frac{a + 1}{a} - 1\right]^{-1}, \qquad
              b' = \left[\frac{Z_2}{Z_1} \frac{a + 1}{b}
              - \frac{Z_1}{Z_0} \frac{a}{b}\right]^{-1}

    They match the first two moments of the precision. An update that is not finite or
    has a' <= 1 is refused.

    :param log_z: (3, ...), the logarithms of Z_0, Z_1 and Z_2.

    Reference: Hernandez-Lobato & Adams (2015), supplement, section 3.
    """
    a, b = prior
    z0, z1, z2 = log_z
    concentration = 1 / (jnp.exp(z2 - 2 * z1 + z0) * (a + 1) / a - 1)
    rate = 1 / (jnp.exp(z2 - z1) * (a + 1) / b - jnp.exp(z1 - z0) * a / b)
    good = (
        (concentration > 1) & (concentration < jnp.inf) & (rate > 0) & (rate < jnp.inf)
    )
    return _where(good, Gamma(concentration, rate), prior)


@dataclass(frozen=True)
class Hyperparameter:
    """A latent site other than the weights."""

    fn: dist.Distribution  # prior
    transform: Transform  # from unconstrained space
    # as the guide represents it: a precision with the published updates by a Gamma, any
    # other site by a Gaussian in unconstrained space
    prior: Gamma | Gaussian

    @classmethod
    def of(cls, name: str, fn: dist.Distribution, powers: set) -> "Hyperparameter":
        """Choose how a site is represented.

        :param powers: those of it with which the scales of weights and noise grow;
            ``None`` for any other use.
        """
        base = unwrapped(fn, masked=True)
        if base.event_dim or base.support.is_discrete:
            instead = "Sites other than the weights must be real or positive."
            refuse(name, f"a {type(base).__name__}", instead)
        transform = biject_to(base.support)
        prior: Gamma | Gaussian
        if type(base) is dist.Gamma and powers <= {-0.5}:
            if not np.all(np.asarray(base.concentration) > 1):
                reason = f"a Gamma with concentration {np.min(base.concentration):.3g}"
                instead = (
                    "Pass a concentration above 1; otherwise the prior variance of "
                    "what it scales is infinite."
                )
                refuse(name, reason, instead)
            prior = Gamma(base.concentration, base.rate)
        else:
            prior = _unconstrained_moments(base, transform)

        def full(moment: Any) -> np.ndarray:
            return np.broadcast_to(np.asarray(moment, float), fn.shape())

        return cls(fn, transform, jax.tree.map(full, prior))

    def value(self, state: Gamma | Gaussian) -> Array:
        """A typical value: 1 / E[1 / precision], or the median."""
        if isinstance(state, Gamma):
            return 1 / state.variance()
        return self.transform(state.mean)

    def log_prior(self, u: Array) -> Array:
        """Log density in unconstrained space, elementwise."""
        return _log_density(unwrapped(self.fn, masked=True), self.transform, u)


def _log_density(base: dist.Distribution, transform: Transform, u: Array) -> Array:
    value = transform(u)
    return base.log_prob(value) + transform.log_abs_det_jacobian(u, value)


def _unconstrained_moments(base: dist.Distribution, transform: Transform) -> Gaussian:
    """Mean and variance of a prior in unconstrained space, by the trapezoidal rule."""
    u = np.linspace(-REACH, REACH, GRID).reshape((-1,) + (1,) * len(base.batch_shape))
    # The parameters of a prior are known also while a guide is traced.
    with jax.core.eval_context():
        log_p = np.asarray(jax.jit(partial(_log_density, base, transform))(u))
    log_p = np.where(np.isfinite(log_p), log_p, -np.inf)
    density = np.exp(log_p - log_p.max(axis=0))
    density /= density.sum(axis=0)
    mean = (density * u).sum(axis=0)
    return Gaussian(mean, (density * (u - mean) ** 2).sum(axis=0))


class PriorFactor(NamedTuple):
    """Approximate prior factor of weights, by natural parameters: exp(-precision w^2 /
    2 + shift w).

    ``concentration`` and ``rate`` are its contribution to the Gamma of the precision
    that scales the weights.
    """

    precision: Array
    shift: Array
    concentration: Array
    rate: Array


class ADFState(NamedTuple):
    """State of a run: the posterior approximation and the approximate prior factors, in
    float64.

    :param weights: means and variances by site.
    :param hyperparameters: the other sites, a ``Gamma`` or a ``Gaussian`` in
        unconstrained space.
    :param factors: approximate prior factor of each weight that has a hyperparameter.
    """

    weights: dict[str, Gaussian]
    hyperparameters: dict[str, PyTree]
    factors: dict[str, PriorFactor]


class WeightSite(NamedTuple):
    """Weights of one site with a hyperparameter."""

    prior: Weight
    posterior: Gaussian
    factor: PriorFactor


Refined = tuple[dict[str, tuple[Gaussian, PriorFactor]], Gamma | Gaussian]


def refine_gamma(sites: Mapping[str, WeightSite], state: Gamma) -> Refined:
    """Refine the prior factors of all weights that share a precision, one weight at a
    time, as published.

    Reference: Hernandez-Lobato & Adams (2015), section 3.2 and supplement.

    :return: weights and factors by site, and the new state of the precision.
    """

    def body(
        gamma: Gamma, inputs: PyTree
    ) -> tuple[Gamma, tuple[Gaussian, PriorFactor]]:
        element, *weight = inputs
        current = jax.tree.map(lambda leaf: leaf[element], gamma)
        new, factor, updated = _refine_one(current, *weight)
        gamma = jax.tree.map(
            lambda leaf, value: leaf.at[element].set(value), gamma, updated
        )
        return gamma, (new, factor)

    gamma, refined = jax.tree.map(jnp.ravel, state), {}
    for name, (prior, *posterior) in sites.items():
        inputs = prior.element, prior.loc, prior.scale, *posterior
        gamma, flat = lax.scan(body, gamma, jax.tree.map(jnp.ravel, inputs))
        refined[name] = _shaped_like(prior.loc, flat)
    return refined, _shaped_like(state.concentration, gamma)


def _shaped_like(array: PyTree, tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf.reshape(np.shape(array)), tree)


def _refine_one(
    gamma: Gamma,
    loc: Array,
    scale: Array,
    weight: Gaussian,
    factor: PriorFactor,
) -> tuple[Gaussian, PriorFactor, Gamma]:
    precision = 1 / weight.var - factor.precision
    mean = (weight.mean / weight.var - factor.shift) / precision
    cavity = Gaussian(mean, 1 / precision)
    cavity_gamma = Gamma(
        gamma.concentration - factor.concentration, gamma.rate - factor.rate
    )
    unit = scale * scale

    def log_z(cavity: Gaussian, order: int) -> Array:
        return normal_log_density(
            cavity.mean - loc, cavity.var + unit * cavity_gamma.variance(order)
        )

    new, refused = gaussian_update(cavity, jax.grad(log_z)(cavity, 0))
    updated = gamma_update(
        cavity_gamma, jnp.stack([log_z(cavity, order) for order in range(3)])
    )
    good = (
        (cavity.var > 0) & (cavity.var < WIDEST * unit) & jnp.isfinite(mean) & ~refused
    )
    good &= (cavity_gamma.rate > 0) & (cavity_gamma.concentration > 1)
    share = PriorFactor(
        1 / new.var - precision,
        new.mean / new.var - mean * precision,
        updated.concentration - cavity_gamma.concentration,
        updated.rate - cavity_gamma.rate,
    )
    refined = _where(good, (new, share, updated), (weight, factor, gamma))
    # no row knows anything of it: the prior
    var = unit * gamma.variance()
    zero = jnp.zeros_like(var)
    alone = (
        Gaussian(loc + zero, var),
        PriorFactor(1 / var, loc / var, zero, zero),
        gamma,
    )
    return _where(jnp.abs(precision) * unit * WIDEST <= 1, alone, refined)


def refine_normal(sites: Mapping[str, WeightSite], hyper: Hyperparameter) -> Refined:
    r"""Refine the prior factors of all weights of a scale at once, for a scale with any
    prior.

    Given the cavities N(m_i, v_i) the posterior of u, the scale in unconstrained space,
    is one-dimensional,

    .. math:: q(u) \propto p(u) \prod_i N(m_i;\, loc_i,\, v_i + s_i(u)^2),

    and is summed on a grid; each weight gets the moments of its posterior, averaged
    over this grid. A weight of which no row knows anything says nothing of the scale,
    and gets the moments of its prior.

    :return: weights and factors by site, and the new state of the scale.
    """
    shape = hyper.prior[0].shape
    count = max(1, int(np.prod(shape)))
    cavities = {}
    for name, (prior, posterior, factor) in sites.items():
        precision = 1 / posterior.var - factor.precision
        information = precision * prior.scale**2 * WIDEST
        known = information > 1
        precision = jnp.where(known, precision, 0.0)
        shift = jnp.where(known, posterior.mean / posterior.var - factor.shift, 0.0)
        cavities[name] = known, information >= -1, shift, precision

    def prior_var(prior: Weight, u: Array) -> Array:
        """(G, count) -> (G, ...)."""
        return jax.vmap(prior.sd_at)(hyper.transform(u)) ** 2

    def log_posterior(u: Array) -> Array:
        total = hyper.log_prior(u.reshape((-1, *shape))).reshape(u.shape)
        for name, (known, _, shift, precision) in cavities.items():
            prior = sites[name].prior
            cavity_var = 1 / jnp.where(known, precision, 1.0)
            residual = shift * cavity_var - prior.loc
            var = cavity_var + prior_var(prior, u)
            terms = jnp.where(known, normal_log_density(residual, var), 0.0)
            by_weight = terms.reshape((len(u), -1)).T
            total += jax.ops.segment_sum(by_weight, jnp.ravel(prior.element), count).T
        return total

    def narrow(_: object, grid: tuple[Array, ...]) -> tuple[Array, ...]:
        center, half = grid[:2]
        u = center + half * np.linspace(-1.0, 1.0, POINTS)[:, None]
        share = jax.nn.softmax(log_posterior(u), axis=0)
        center = (share * u).sum(axis=0)
        var = (share * (u - center) ** 2).sum(axis=0)
        spacing = 2 * half / (POINTS - 1)
        return center, WIDTHS * jnp.maximum(jnp.sqrt(var), spacing / 2), var, u, share

    mean0, var0 = map(jnp.ravel, hyper.prior)
    blank = jnp.zeros((POINTS, count))
    center, _, var, u, share = lax.fori_loop(
        0, GRIDS, narrow, (mean0, WIDTHS * jnp.sqrt(var0), var0, blank, blank)
    )
    refined = {}
    for name, (_, good, shift, precision) in cavities.items():
        prior, posterior, factor = sites[name]
        weight, prior_vars = share[:, prior.element], prior_var(prior, u)
        tilted_var = 1 / (precision + 1 / prior_vars)
        tilted_mean = tilted_var * (shift + prior.loc / prior_vars)
        new_mean = (weight * tilted_mean).sum(axis=0)
        new_var = (weight * (tilted_var + (tilted_mean - new_mean) ** 2)).sum(axis=0)
        updated = factor._replace(
            precision=1 / new_var - precision,
            shift=new_mean / new_var - shift,
        )
        new = Gaussian(new_mean, new_var), updated
        refined[name] = _where(good, new, (posterior, factor))
    return refined, _shaped_like(hyper.prior[0], Gaussian(center, var))
