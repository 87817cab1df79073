"""Moment matching: the updates of weights and hyperparameters by one factor, and the
refinement of the prior.

Data points and priors are factors of the posterior. To absorb a factor, the
approximation is set to the first two moments of its product with the factor, which
follow from the logarithm of the normalizer Z.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import lax
from numpyro.distributions.transforms import Transform, biject_to

from numpyro_bnn._distributions import unwrapped
from numpyro_bnn.guides.adf.reading import Roles, Weight, refuse
from numpyro_bnn.guides.blocks import cut
from numpyro_bnn.moments import Gaussian

# Grid on which a prior is matched by a Gaussian in unconstrained space.
REACH, GRID = 60.0, 24_001
# A cavity variance above this many prior variances carries no information: the factor
# is left unchanged.
WIDEST = 1e6
# Grids on which the posterior of a scale is found, each narrower than the previous one.
GRIDS, POINTS, WIDTHS = 3, 64, 8.0


class Gamma(NamedTuple):
    """Gamma distribution of a precision, by shape and rate, named as in NumPyro."""

    concentration: jax.Array
    rate: jax.Array

    def variance(self, order: int = 0) -> jax.Array:
        """rate / (concentration - 1 + order): replaces 1 / precision in the normalizer
        Z_order.
        """
        return self.rate / (self.concentration + (order - 1))


def normal_log_density(residual: jax.Array, var: jax.Array) -> jax.Array:
    """log N(residual; 0, var) without its constant, -(log 2 pi) / 2."""
    return -0.5 * (jnp.log(var) + residual * residual / var)


def gaussian_update(prior: Gaussian, gradient: Gaussian) -> tuple[Gaussian, jax.Array]:
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


def _where(good: jax.Array, new: Any, previous: Any) -> Any:
    return jax.tree.map(
        lambda new, previous: jnp.where(good, new, previous), new, previous
    )


def gamma_update(prior: Gamma, log_z: jax.Array) -> Gamma:
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

    # "gamma" for a precision with the published updates, "normal" for a Gaussian in
    # unconstrained space
    kind: str
    fn: dist.Distribution  # prior
    transform: Transform  # from unconstrained space
    # as the guide represents it: shape and rate, or unconstrained moments
    prior: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, kind: str, fn: dist.Distribution) -> "Hyperparameter":
        """Represent a prior."""
        base = unwrapped(fn, masked=True)
        transform = biject_to(base.support)
        if kind == "gamma":
            prior = base.concentration, base.rate
        else:
            prior = _unconstrained_moments(base, transform)
        shape = fn.shape()
        arrays = (np.broadcast_to(np.asarray(p, float), shape) for p in prior)
        return cls(kind, fn, transform, tuple(arrays))

    def start(self) -> Gamma | Gaussian:
        """The prior as a state."""
        return (Gamma if self.kind == "gamma" else Gaussian)(
            *map(jnp.asarray, self.prior)
        )

    def value(self, state: Gamma | Gaussian) -> jax.Array:
        """A typical value: 1 / E[1 / precision], or the median."""
        if isinstance(state, Gamma):
            return 1 / state.variance()
        return self.transform(state.mean)

    def log_prior(self, u: jax.Array) -> jax.Array:
        """Log density in unconstrained space, elementwise."""
        value = self.transform(u)
        return unwrapped(self.fn, masked=True).log_prob(
            value
        ) + self.transform.log_abs_det_jacobian(u, value)


def _unconstrained_moments(
    base: dist.Distribution, transform: Transform
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of a prior in unconstrained space, by the trapezoidal rule."""
    u = np.linspace(-REACH, REACH, GRID).reshape((-1,) + (1,) * len(base.batch_shape))

    @jax.jit
    def log_density(u: jax.Array) -> jax.Array:
        value = transform(u)
        return base.log_prob(value) + transform.log_abs_det_jacobian(u, value)

    # The parameters of a prior are known also while a guide is traced.
    with jax.core.eval_context():
        log_p = np.asarray(log_density(u))
    log_p = np.where(np.isfinite(log_p), log_p, -np.inf)
    density = np.exp(log_p - log_p.max(axis=0))
    density /= density.sum(axis=0)
    mean = (density * u).sum(axis=0)
    return mean, (density * (u - mean) ** 2).sum(axis=0)


def describe(
    sites: Roles, noise_powers: Mapping[str, float | None]
) -> dict[str, Hyperparameter]:
    """Choose how each hyperparameter is represented; for ``noise_powers`` see the
    likelihoods.
    """
    hyperparameters = {}
    for name, fn in sites.hyperparameters.items():
        base = unwrapped(fn, masked=True)
        if base.event_dim or base.support.is_discrete:
            raise refuse(
                name,
                f"a {type(base).__name__}",
                "Sites other than the weights must be real or positive.",
            )
        powers: set[float | None] = {
            w.power for w in sites.weights.values() if w.hyper == name
        }
        if name in sites.noise:
            powers.add(noise_powers[name])
        conjugate = type(base) is dist.Gamma and powers <= {-0.5}
        if conjugate and not np.all(np.asarray(base.concentration) > 1):
            reason = f"a Gamma with concentration {np.min(base.concentration):.3g}"
            instead = (
                "Pass a concentration above 1; otherwise the prior variance of what it "
                "scales is infinite."
            )
            raise refuse(name, reason, instead)
        hyperparameters[name] = Hyperparameter.of(
            "gamma" if conjugate else "normal", fn
        )
    return hyperparameters


class PriorFactor(NamedTuple):
    """Approximate prior factor of weights, by natural parameters: exp(-precision w^2 /
    2 + shift w).

    ``concentration`` and ``rate`` are its contribution to the Gamma of the precision
    that scales the weights.
    """

    precision: jax.Array
    shift: jax.Array
    concentration: jax.Array
    rate: jax.Array


class _Flat(NamedTuple):
    """All weights of one hyperparameter, flattened and concatenated."""

    weights: Gaussian
    factor: PriorFactor
    loc: Any
    scale: Any
    element: Any


def _unflatten(
    flat: Any, names: Sequence[str], sites: Mapping[str, Weight]
) -> dict[str, Any]:
    shapes = {name: sites[name].loc.shape for name in names}
    fields = [cut(leaf, shapes) for leaf in flat]
    return {name: type(flat)(*(field[name] for field in fields)) for name in names}


def refine(
    names: Sequence[str],
    sites: Mapping[str, Weight],
    weights: Any,
    factors: Any,
    hyper: Hyperparameter,
    state: Gamma | Gaussian,
) -> tuple[dict[str, Gaussian], dict[str, PriorFactor], Gamma | Gaussian]:
    """Refine the prior factors of all weights of one hyperparameter: new weights,
    factors and hyperparameter.
    """
    by_site = [
        _Flat(weights[n], factors[n], sites[n].loc, sites[n].scale, sites[n].element)
        for n in names
    ]
    flat = jax.tree.map(
        lambda *leaves: jnp.concatenate([jnp.ravel(leaf) for leaf in leaves]), *by_site
    )
    if isinstance(state, Gamma):
        new, factor, state = _refine_gamma(flat, state)
    else:
        power: Any = sites[names[0]].power
        if any(sites[name].power != power for name in names):
            power = jnp.concatenate(
                [jnp.full(sites[n].loc.size, sites[n].power) for n in names]
            )
        new, factor, state = _refine_normal(flat, power, hyper)
    return _unflatten(new, names, sites), _unflatten(factor, names, sites), state


def _refine_gamma(flat: _Flat, state: Gamma) -> tuple[Gaussian, PriorFactor, Gamma]:
    """One weight at a time, as published: all share the Gamma of their precision.

    Reference: Hernandez-Lobato & Adams (2015), section 3.2 and supplement.
    """

    def body(
        gamma: Gamma, flat_weight: _Flat
    ) -> tuple[Gamma, tuple[Gaussian, PriorFactor]]:
        element = flat_weight.element
        current = jax.tree.map(lambda leaf: leaf[element], gamma)
        new, factor, updated = _refine_one(flat_weight, current)
        gamma = jax.tree.map(
            lambda leaf, value: leaf.at[element].set(value), gamma, updated
        )
        return gamma, (new, factor)

    gamma, (new, factor) = lax.scan(body, jax.tree.map(jnp.ravel, state), flat)
    shape = state.concentration.shape
    return new, factor, jax.tree.map(lambda leaf: leaf.reshape(shape), gamma)


def _refine_one(
    flat_weight: _Flat, gamma: Gamma
) -> tuple[Gaussian, PriorFactor, Gamma]:
    weight, factor = flat_weight.weights, flat_weight.factor
    precision = 1 / weight.var - factor.precision
    mean = (weight.mean / weight.var - factor.shift) / precision
    cavity = Gaussian(mean, 1 / precision)
    cavity_gamma = Gamma(
        gamma.concentration - factor.concentration, gamma.rate - factor.rate
    )
    unit = flat_weight.scale * flat_weight.scale

    def log_z(cavity: Gaussian, order: int) -> jax.Array:
        return normal_log_density(
            cavity.mean - flat_weight.loc,
            cavity.var + unit * cavity_gamma.variance(order),
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

    return (
        _where(good, new, weight),
        _where(good, share, factor),
        _where(good, updated, gamma),
    )


def _refine_normal(
    flat: _Flat, power: Any, hyper: Hyperparameter
) -> tuple[Gaussian, PriorFactor, Gaussian]:
    r"""All weights of a scale at once, for a scale with any prior.

    Given the cavities N(m_i, v_i) the posterior of u, the scale in unconstrained space,
    is one-dimensional,

    .. math:: q(u) \propto p(u) \prod_i N(m_i;\, loc_i,\, v_i + s_i(u)^2),

    and is summed on a grid; each weight gets the moments of its posterior, averaged
    over this grid.
    """
    precision = 1 / flat.weights.var - flat.factor.precision
    good = precision * flat.scale**2 * WIDEST > 1
    precision = jnp.where(good, precision, 1.0)
    mean = (flat.weights.mean / flat.weights.var - flat.factor.shift) / precision
    start = Gaussian(*map(jnp.asarray, hyper.prior))
    count = max(1, int(np.prod(start.mean.shape)))

    def prior_var(u: jax.Array) -> jax.Array:
        """(G, count) -> (G, P)."""
        value = hyper.transform(u)[:, flat.element]
        return (flat.scale * value**power) ** 2

    def log_posterior(u: jax.Array) -> jax.Array:
        terms = normal_log_density(mean - flat.loc, 1 / precision + prior_var(u))
        sums = jax.ops.segment_sum(jnp.where(good, terms, 0.0).T, flat.element, count).T
        shaped = u.reshape((-1, *start.mean.shape))
        return sums + hyper.log_prior(shaped).reshape(u.shape)

    def narrow(_: Any, grid: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        center, half = grid[:2]
        u = center + half * np.linspace(-1.0, 1.0, POINTS)[:, None]
        share = jax.nn.softmax(log_posterior(u), axis=0)
        center = (share * u).sum(axis=0)
        var = (share * (u - center) ** 2).sum(axis=0)
        spacing = 2 * half / (POINTS - 1)
        return center, WIDTHS * jnp.maximum(jnp.sqrt(var), spacing / 2), var, u, share

    mean0, var0 = start.mean.reshape(-1), start.var.reshape(-1)
    blank = jnp.zeros((POINTS, count))
    center, _, var, u, share = lax.fori_loop(
        0, GRIDS, narrow, (mean0, WIDTHS * jnp.sqrt(var0), var0, blank, blank)
    )
    prior_vars = prior_var(u)
    tilted_var = 1 / (precision + 1 / prior_vars)
    tilted_mean = tilted_var * (precision * mean + flat.loc / prior_vars)
    element_share = share[:, flat.element]
    new_mean = (element_share * tilted_mean).sum(axis=0)
    new_var = (element_share * (tilted_var + (tilted_mean - new_mean) ** 2)).sum(axis=0)
    new = _where(good, Gaussian(new_mean, new_var), flat.weights)
    updated = flat.factor._replace(
        precision=1 / new.var - precision, shift=new.mean / new.var - mean * precision
    )
    shape = start.mean.shape
    state = Gaussian(center.reshape(shape), var.reshape(shape))
    return new, _where(good, updated, flat.factor), state
