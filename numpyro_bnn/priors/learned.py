"""Priors with learned scales: per layer, per input, per weight (horseshoe), or a Gamma
precision per group.
"""

from dataclasses import dataclass, field
from math import prod
from typing import Annotated, ClassVar

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array

from numpyro_bnn._checks import argument_error
from numpyro_bnn._distributions import GroupStudentT
from numpyro_bnn._options import Choice, Positive, Switch
from numpyro_bnn.nn.base import Shape
from numpyro_bnn.priors.base import Prior, ScalePrior, gaussian, unit_shape


@dataclass(frozen=True)
class _LearnedScale(Prior):
    """w ~ N(0, s^2 / fan_in), s ~ scale_prior, one s per unit of the kernel."""

    unit: ClassVar[str]
    scale_prior: ScalePrior
    centered: Switch = False

    def kernel(self, name: str, shape: Shape) -> dist.Distribution:
        units = unit_shape(name, shape, self.unit)
        site_shape = () if self.unit == "layer" else (prod(units),)
        scale = numpyro.sample(
            f"{name}_scale", self.scale_prior.expand(site_shape).to_event()
        )
        factor = self.fan_in_factor(name, shape)
        return gaussian(
            shape,
            jnp.reshape(scale, units if site_shape else ()) * factor,
            self.centered,
        )


@dataclass(frozen=True)
class Hierarchical(_LearnedScale):
    """Normal weights with one learned scale per kernel: w ~ N(0, s^2 / fan_in), s ~
    scale_prior.

    Adds the site ``<kernel>_scale``, a scalar.

    :param scale_prior: distribution of s on (0, inf); HalfNormal(1) by default.
    :param centered: sample w itself. By default z ~ N(0, 1) is sampled with w = s z,
        which gradient samplers mix far better if the data say little about single
        weights.

    Reference: Neal (1996), section 1.2.3; Betancourt & Girolami (2015) on centering.

    >>> from numpyro import handlers
    >>> with handlers.seed(rng_seed=0), handlers.trace() as trace:
    ...     prior = Hierarchical()("Dense_0.kernel", (4, 3))
    >>> list(trace), prior.event_shape
    (['Dense_0.kernel_scale'], (4, 3))
    """

    unit: ClassVar[str] = "layer"
    scale_prior: ScalePrior = field(default_factory=lambda: dist.HalfNormal(1.0))


@dataclass(frozen=True)
class ARD(_LearnedScale):
    """Automatic relevance determination, one learned scale per input: w_ij ~ N(0, s_i^2
    / fan_in), s_i ~ scale_prior.

    Irrelevant inputs (or channels) get a small s_i. Adds the site ``<kernel>_scale`` of
    shape (D,). Usually for the first layer only: ``BySite({"Dense_0.kernel": ARD()},
    default=Hierarchical())``.

    :param scale_prior: distribution of s_i on (0, inf); HalfCauchy(1) by default, with
        mass near 0.
    :param centered: sample w itself instead of z = w sqrt(fan_in) / s.

    Reference: MacKay (1994); Neal (1996), section 4.3.

    >>> from numpyro import handlers
    >>> with handlers.seed(rng_seed=0), handlers.trace() as trace:
    ...     prior = ARD()("Dense_0.kernel", (4, 3))
    >>> trace["Dense_0.kernel_scale"]["value"].shape
    (4,)
    """

    unit: ClassVar[str] = "input"
    scale_prior: ScalePrior = field(default_factory=lambda: dist.HalfCauchy(1.0))


@dataclass(frozen=True)
class GammaPrecision(Prior):
    """Neal's prior: normal weights with one Gamma precision per group, in his notation
    ``width:alpha``.

    tau ~ Gamma(shape = alpha / 2, mean = 1 / scale^2), that is rate = (alpha / 2)
    scale^2, and w ~ N(0, 1 / tau). Each kernel and each bias is a group. With
    ``fan_in_scaling`` the scale of a kernel is divided by sqrt(fan_in), Neal's prefix
    ``x``: ``x0.05:0.5`` is ``GammaPrecision(0.05, 0.5)``, and ``0.05:0.5`` is
    ``GammaPrecision(0.05, 0.5, fan_in_scaling=False)``. Integrated over tau, a weight
    is Student t with alpha degrees of freedom and scale ``scale``. ``bias_scale`` is
    ignored.

    Adds the site ``<parameter>_precision``, a scalar; ``marginal`` adds none.

    :param scale: typical size of a weight, Neal's width: tau has mean 1 / scale^2.
    :param alpha: shape of the hyperprior; small values are vague.
    :param centered: sample w itself, which the conjugate Gibbs update of tau needs. By
        default z = w sqrt(tau) is sampled.
    :param marginal: integrate tau out, for gradient samplers: the weights of a group
        are then a multivariate Student t (:class:`~numpyro_bnn.priors.GroupStudentT`),
        without a funnel between tau and w.
    :raises ValueError: for numbers that are not positive, and for ``centered`` together
        with ``marginal``.

    Reference: Neal (1996), section 3.2.1 (hyperpriors) and appendix A.

    >>> from numpyro import handlers
    >>> with handlers.seed(rng_seed=0), handlers.trace() as trace:
    ...     prior = GammaPrecision(0.05, 0.5)("Dense_0.bias", (3,))
    >>> tau = trace["Dense_0.bias_precision"]["fn"]
    >>> float(tau.concentration), round(float(tau.mean), 3)
    (0.25, 400.0)
    """

    scale: Positive = 1.0
    alpha: Positive = 0.5
    centered: Switch = False
    marginal: Switch = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.centered and self.marginal:
            got = "True with `centered=True`"
            instead = (
                "With the precision integrated out there is nothing to center: pass "
                "only one of them."
            )
            raise argument_error("priors.GammaPrecision", "marginal", got, instead)

    def kernel(self, name: str, shape: Shape) -> dist.Distribution:
        return self._group(name, shape, self.scale * self.fan_in_factor(name, shape))

    def bias(self, name: str, shape: Shape) -> dist.Distribution:
        return self._group(name, shape, self.scale)

    def _group(self, name: str, shape: Shape, scale: float) -> dist.Distribution:
        if self.marginal:
            return GroupStudentT(self.alpha, scale, shape)
        half = self.alpha / 2
        precision = numpyro.sample(
            f"{name}_precision", dist.Gamma(half, half * scale**2)
        )
        return gaussian(shape, precision**-0.5, self.centered)


@dataclass(frozen=True)
class Horseshoe(Prior):
    """Sparse weights, most near zero and a few large: w_j ~ N(0, tau^2 lambda_j^2 /
    fan_in).

    Global-local shrinkage with lambda_j ~ C+(0, 1) and tau ~ C+(0, global_scale). Given
    tau the marginal of a weight has a logarithmic spike at 0 and tails w^-2. Adds the
    sites ``<kernel>_local`` and ``<kernel>_global``.

    :param global_scale: scale of the half-Cauchy of tau; small values make layers
        sparse.
    :param unit: which weights share a local scale: ``"weight"``, ``"input"`` or
        ``"output"`` (all of one unit).
    :param centered: sample w itself instead of z = w sqrt(fan_in) / (tau lambda).

    Reference: Carvalho, Polson & Scott (2010), theorem 1; Ghosh, Yao & Doshi-Velez
    (2019) for networks.

    >>> from numpyro import handlers
    >>> with handlers.seed(rng_seed=0), handlers.trace() as trace:
    ...     prior = Horseshoe(unit="input")("Dense_0.kernel", (4, 3))
    >>> {name: site["value"].shape for name, site in trace.items()}
    {'Dense_0.kernel_global': (), 'Dense_0.kernel_local': (4,)}
    """

    global_scale: Positive = 1.0
    unit: Annotated[str, Choice(("weight", "input", "output"))] = "weight"
    centered: Switch = False

    def kernel(self, name: str, shape: Shape) -> dist.Distribution:
        units = unit_shape(name, shape, self.unit)
        site_shape = shape if self.unit == "weight" else (prod(units),)
        tau = numpyro.sample(f"{name}_global", dist.HalfCauchy(self.global_scale))
        local = numpyro.sample(
            f"{name}_local", dist.HalfCauchy(1.0).expand(site_shape).to_event()
        )
        scale = self._shrink(name, tau, local) * self.fan_in_factor(name, shape)
        return gaussian(shape, jnp.reshape(scale, units), self.centered)

    def _shrink(self, name: str, tau: Array, local: Array) -> Array:
        """Scale of the weights, tau * lambda."""
        return tau * local


@dataclass(frozen=True)
class RegularizedHorseshoe(Horseshoe):
    """Horseshoe that also shrinks its large weights, by a slab of finite width.

    w_j ~ N(0, tau^2 l_j^2 / fan_in) with l_j^2 = c^2 lambda_j^2 / (c^2 + tau^2
    lambda_j^2) and c^2 ~ InverseGamma(slab_df / 2, slab_df slab_scale^2 / 2): small
    weights as under :class:`Horseshoe`, large ones Student t with ``slab_df`` degrees
    of freedom and scale ``slab_scale / sqrt(fan_in)``. Adds the site ``<kernel>_slab``
    (c^2, one per kernel).

    :param slab_scale: scale of the slab.
    :param slab_df: degrees of freedom of the slab.

    Reference: Piironen & Vehtari (2017), equations 2.8 and 2.12.

    >>> from numpyro import handlers
    >>> with handlers.seed(rng_seed=0), handlers.trace() as trace:
    ...     prior = RegularizedHorseshoe()("Dense_0.kernel", (4, 3))
    >>> list(trace)
    ['Dense_0.kernel_global', 'Dense_0.kernel_local', 'Dense_0.kernel_slab']
    """

    slab_scale: Positive = 2.0
    slab_df: Positive = 4.0

    def _shrink(self, name: str, tau: Array, local: Array) -> Array:
        half = self.slab_df / 2
        slab = numpyro.sample(
            f"{name}_slab", dist.InverseGamma(half, half * self.slab_scale**2)
        )
        # 1/sd^2 = 1/(tau lambda)^2 + 1/c^2, written so that value and gradient exist
        # for any tau * lambda.
        sd = tau * local
        root = jnp.sqrt(slab)
        small = jnp.minimum(sd, root)
        return small / jnp.sqrt(1 + (small / jnp.maximum(sd, root)) ** 2)
