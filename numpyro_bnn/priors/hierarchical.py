"""Learned scales: one per layer, or one per input unit (automatic relevance determination)."""

from dataclasses import dataclass, field
from typing import ClassVar

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

from numpyro_bnn.nn import Shape
from numpyro_bnn.priors.base import Prior, check_positive, gaussian, unit_shape

__all__ = ["ARD", "Hierarchical"]


@dataclass(frozen=True)
class _LearnedScale(Prior):
    """w ~ N(0, s^2 / fan_in), s ~ scale_prior, one s per unit of the kernel."""

    unit: ClassVar[str]
    scale_prior: dist.Distribution
    centered: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, scale_prior=self.scale_prior)

    def kernel(self, name: str, shape: Shape) -> dist.Distribution:
        units = unit_shape(name, shape, self.unit)
        site_shape = () if self.unit == "layer" else (max(units),)
        scale = numpyro.sample(f"{name}_scale", self.scale_prior.expand(site_shape).to_event())
        factor = self.fan_in_factor(name, shape)
        return gaussian(shape, jnp.reshape(scale, units if site_shape else ()) * factor, self.centered)


@dataclass(frozen=True)
class Hierarchical(_LearnedScale):
    """One learned scale per kernel: w ~ N(0, s^2 / fan_in), s ~ scale_prior.

    Adds the site ``<kernel>_scale``, a scalar.

    :param scale_prior: distribution of s on (0, inf); HalfNormal(1) by default.
    :param centered: sample w itself. By default w = s z with z ~ N(0, 1) sampled, which gradient samplers mix
        far better where the data say little about single weights.

    Reference: Neal (1996), section 1.2.3; Betancourt & Girolami (2015) on centring.

    >>> from numpyro import handlers
    >>> with handlers.seed(rng_seed=0), handlers.trace() as trace:
    ...     prior = Hierarchical()("Dense_0.kernel", (4, 3))
    >>> list(trace), prior.event_shape
    (['Dense_0.kernel_scale'], (4, 3))
    """

    unit: ClassVar[str] = "layer"
    scale_prior: dist.Distribution = field(default_factory=lambda: dist.HalfNormal(1.0))


@dataclass(frozen=True)
class ARD(_LearnedScale):
    """One learned scale per input unit (or channel): w_ij ~ N(0, s_i^2 / fan_in), s_i ~ scale_prior.

    Inputs that carry nothing get a small s_i. Adds the site ``<kernel>_scale`` of shape (D,). Usually for the
    first layer only: ``BySite({"Dense_0.kernel": ARD()}, default=Hierarchical())``.

    :param scale_prior: distribution of s_i on (0, inf); HalfCauchy(1) by default, with mass near 0.
    :param centered: sample w itself instead of z = w sqrt(fan_in) / s.

    Reference: MacKay (1994); Neal (1996), section 4.3.

    >>> from numpyro import handlers
    >>> with handlers.seed(rng_seed=0), handlers.trace() as trace:
    ...     prior = ARD()("Dense_0.kernel", (4, 3))
    >>> trace["Dense_0.kernel_scale"]["value"].shape
    (4,)
    """

    unit: ClassVar[str] = "input"
    scale_prior: dist.Distribution = field(default_factory=lambda: dist.HalfCauchy(1.0))
