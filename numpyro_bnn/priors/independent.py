"""Independent priors of fixed scale: normal, Laplace, Student t, and a mixture of two
normals.
"""

from dataclasses import dataclass, field

import jax.numpy as jnp
import numpyro.distributions as dist

from numpyro_bnn._options import Level, Positive, Switch
from numpyro_bnn.nn.base import Shape
from numpyro_bnn.priors.base import Prior


@dataclass(frozen=True)
class Normal(Prior):
    """Independent normal weights: w ~ N(0, scale^2 / fan_in).

    As layers get wide the prior over functions becomes a Gaussian process.

    :param scale: standard deviation of a weight times sqrt(fan_in); ``2 ** 0.5``
        preserves the variance through ReLU layers.

    Reference: Neal (1996), *Bayesian Learning for Neural Networks*, section 2.1.

    >>> Normal(2.0)("Dense_0.kernel", (16, 3)).scale
    0.5
    """

    scale: Positive = 1.0

    def kernel(self, name: str, shape: Shape) -> dist.Distribution:
        return dist.Normal(0.0, self.scale * self.fan_in_factor(name, shape))


@dataclass(frozen=True)
class Laplace(Prior):
    r"""Independent Laplace weights with standard deviation ``scale / sqrt(fan_in)``.

    .. math:: p(w) = \tfrac{1}{2b}\, e^{-|w| / b}, \qquad b = \mathrm{scale} / \sqrt{2\,
              \mathrm{fan\_in}}

    :param scale: standard deviation of a weight times sqrt(fan_in), as in
        :class:`Normal`.

    Reference: Williams (1995), *Bayesian regularization and pruning using a Laplace
    prior*.

    >>> bool(abs(Laplace(1.0)("Dense_0.kernel", (4, 1)).variance - 0.25) < 1e-6)
    True
    """

    scale: Positive = 1.0

    def kernel(self, name: str, shape: Shape) -> dist.Distribution:
        return dist.Laplace(0.0, self.scale / 2**0.5 * self.fan_in_factor(name, shape))


@dataclass(frozen=True)
class StudentT(Prior):
    """Independent, heavy-tailed Student-t weights with ``df`` degrees of freedom and
    scale ``scale / sqrt(fan_in)``.

    ``scale`` is the scale of the t distribution. Its standard deviation is scale
    sqrt(df / (df - 2)) for df > 2 and infinite otherwise.

    :param df: degrees of freedom; the smaller, the heavier the tails.
    :param scale: scale of a weight times sqrt(fan_in).

    Reference: Fortuin et al. (2022), *Bayesian neural network priors revisited*,
    section 3.

    >>> StudentT(3.0)("Dense_0.kernel", (4, 1)).scale
    0.5
    """

    df: Positive = 3.0
    scale: Positive = 1.0

    def kernel(self, name: str, shape: Shape) -> dist.Distribution:
        return dist.StudentT(self.df, 0.0, self.scale * self.fan_in_factor(name, shape))


@dataclass(frozen=True)
class ScaleMixture(Prior):
    """Mixture of a wide and a narrow normal: w ~ weight N(0, wide_scale^2) + (1 -
    weight) N(0, narrow_scale^2).

    The prior of Bayes by Backprop. It applies to kernels and biases alike, and by
    default without fan-in scaling, as published; ``bias_scale`` is ignored.

    :param weight: probability of the wide component.
    :param wide_scale: standard deviation of the wide component.
    :param narrow_scale: standard deviation of the narrow component.

    Reference: Blundell et al. (2015), equation 7.

    >>> prior = ScaleMixture(weight=0.25, wide_scale=1.0, narrow_scale=0.1)(
    ...     "Dense_0.kernel", (4, 1)
    ... )
    >>> round(float(prior.variance), 4)
    0.2575
    """

    weight: Level = 0.5
    wide_scale: Positive = 1.0
    narrow_scale: Positive = 0.0025
    # Keyword-only here too: otherwise it would become the first positional argument.
    fan_in_scaling: Switch = field(default=False, kw_only=True)

    def kernel(self, name: str, shape: Shape) -> dist.Distribution:
        return self._mixture(self.fan_in_factor(name, shape))

    def bias(self, name: str, shape: Shape) -> dist.Distribution:
        return self._mixture(1.0)

    def _mixture(self, factor: float) -> dist.Distribution:
        scales = jnp.array([self.wide_scale, self.narrow_scale]) * factor
        weights = dist.Categorical(probs=jnp.array([self.weight, 1 - self.weight]))
        return dist.MixtureSameFamily(weights, dist.Normal(0.0, scales))
