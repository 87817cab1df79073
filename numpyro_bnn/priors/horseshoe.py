"""Horseshoe priors: most weights near zero, a few free."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

from numpyro_bnn._checks import unknown_name
from numpyro_bnn.nn import Shape
from numpyro_bnn.priors.base import Prior, check_positive, gaussian, unit_shape

__all__ = ["Horseshoe", "RegularizedHorseshoe"]

UNITS = ("weight", "input", "output")


@dataclass(frozen=True)
class Horseshoe(Prior):
    """Global-local shrinkage: w_j ~ N(0, tau^2 lambda_j^2 / fan_in), lambda_j ~ C+(0, 1), tau ~ C+(0, global_scale).

    Given tau the marginal of a weight has a logarithmic spike at 0 and tails w^-2. Adds the sites
    ``<kernel>_local`` and ``<kernel>_global``.

    :param global_scale: scale of the half-Cauchy of tau; small values ask for sparse layers.
    :param unit: what shares a local scale: ``"weight"``, ``"input"`` or ``"output"`` (all weights of one unit).
    :param centered: sample w itself instead of z = w sqrt(fan_in) / (tau lambda).

    Reference: Carvalho, Polson & Scott (2010), theorem 1; Ghosh, Yao & Doshi-Velez (2019) for networks.

    >>> from numpyro import handlers
    >>> with handlers.seed(rng_seed=0), handlers.trace() as trace:
    ...     prior = Horseshoe(unit="input")("Dense_0.kernel", (4, 3))
    >>> {name: site["value"].shape for name, site in trace.items()}
    {'Dense_0.kernel_global': (), 'Dense_0.kernel_local': (4,)}
    """

    global_scale: float = 1.0
    unit: str = "weight"
    centered: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, global_scale=self.global_scale)
        if self.unit not in UNITS:
            raise unknown_name(f"priors.{type(self).__name__}", "unit", self.unit, UNITS)

    def kernel(self, name: str, shape: Shape) -> dist.Distribution:
        units = unit_shape(name, shape, self.unit)
        site_shape = shape if self.unit == "weight" else (max(units),)
        tau = numpyro.sample(f"{name}_global", dist.HalfCauchy(self.global_scale))
        local = numpyro.sample(f"{name}_local", dist.HalfCauchy(1.0).expand(site_shape).to_event())
        scale = self._shrink(name, tau, local) * self.fan_in_factor(name, shape)
        return gaussian(shape, jnp.reshape(scale, units), self.centered)

    def _shrink(self, name: str, tau: jax.Array, local: jax.Array) -> jax.Array:
        """Scale of the weights, tau * lambda."""
        return tau * local


@dataclass(frozen=True)
class RegularizedHorseshoe(Horseshoe):
    """Horseshoe whose large weights meet a slab of finite width.

    w_j ~ N(0, tau^2 l_j^2 / fan_in) with l_j^2 = c^2 lambda_j^2 / (c^2 + tau^2 lambda_j^2) and
    c^2 ~ InverseGamma(slab_df / 2, slab_df slab_scale^2 / 2): small weights as under :class:`Horseshoe`, large
    ones Student t with ``slab_df`` degrees of freedom and scale ``slab_scale / sqrt(fan_in)``. Adds the site
    ``<kernel>_slab`` (c^2, one per kernel).

    :param slab_scale: scale of the slab.
    :param slab_df: degrees of freedom of the slab.

    Reference: Piironen & Vehtari (2017), equations 2.8 and 2.12.

    >>> from numpyro import handlers
    >>> with handlers.seed(rng_seed=0), handlers.trace() as trace:
    ...     prior = RegularizedHorseshoe()("Dense_0.kernel", (4, 3))
    >>> list(trace)
    ['Dense_0.kernel_global', 'Dense_0.kernel_local', 'Dense_0.kernel_slab']
    """

    slab_scale: float = 2.0
    slab_df: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, slab_scale=self.slab_scale, slab_df=self.slab_df)

    def _shrink(self, name: str, tau: jax.Array, local: jax.Array) -> jax.Array:
        half = self.slab_df / 2
        slab = numpyro.sample(f"{name}_slab", dist.InverseGamma(half, half * self.slab_scale**2))
        # 1/sd^2 = 1/(tau lambda)^2 + 1/c^2, written so that value and gradient exist for any tau * lambda.
        sd, root = tau * local, jnp.sqrt(slab)
        small = jnp.minimum(sd, root)
        return small / jnp.sqrt(1 + (small / jnp.maximum(sd, root)) ** 2)
