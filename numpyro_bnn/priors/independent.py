"""Independent priors of one scale: Normal, Laplace, Student t."""

from dataclasses import dataclass

import numpyro.distributions as dist

from numpyro_bnn.nn import Shape
from numpyro_bnn.priors.base import Prior, check_positive

__all__ = ["Laplace", "Normal", "StudentT"]


@dataclass(frozen=True)
class Normal(Prior):
    """Independent normal weights: w ~ N(0, sd^2 / fan_in).

    The prior whose wide limit is the Gaussian process of the network.

    :param sd: sd of a weight times sqrt(fan_in); ``2 ** 0.5`` keeps the variance through ReLU layers.

    Reference: Neal (1996), *Bayesian Learning for Neural Networks*, section 2.1.

    >>> Normal(2.0)("Dense_0.kernel", (16, 3)).scale
    0.5
    """

    sd: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, sd=self.sd)

    def kernel(self, name: str, shape: Shape) -> dist.Distribution:
        return dist.Normal(0.0, self.sd * self.fan_in_factor(name, shape))


@dataclass(frozen=True)
class Laplace(Prior):
    r"""Independent Laplace weights with sd ``sd / sqrt(fan_in)``.

    .. math:: p(w) = \tfrac{1}{2b}\, e^{-|w| / b}, \qquad b = \mathrm{sd} / \sqrt{2\, \mathrm{fan\_in}}

    :param sd: sd of a weight times sqrt(fan_in), so that it means the same as in :class:`Normal`.

    Reference: Williams (1995), *Bayesian regularization and pruning using a Laplace prior*.

    >>> bool(abs(Laplace(1.0)("Dense_0.kernel", (4, 1)).variance - 0.25) < 1e-6)
    True
    """

    sd: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, sd=self.sd)

    def kernel(self, name: str, shape: Shape) -> dist.Distribution:
        return dist.Laplace(0.0, self.sd / 2**0.5 * self.fan_in_factor(name, shape))


@dataclass(frozen=True)
class StudentT(Prior):
    """Independent Student-t weights with ``df`` degrees of freedom and scale ``width / sqrt(fan_in)``.

    ``width`` is the scale of the t distribution, not its sd: that is width sqrt(df / (df - 2)) for df > 2 and
    infinite otherwise.

    :param df: degrees of freedom; small ones have heavy tails.
    :param width: scale of a weight times sqrt(fan_in).

    Reference: Fortuin et al. (2022), *Bayesian neural network priors revisited*, section 3.

    >>> StudentT(3.0)("Dense_0.kernel", (4, 1)).scale
    0.5
    """

    df: float = 3.0
    width: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, df=self.df, width=self.width)

    def kernel(self, name: str, shape: Shape) -> dist.Distribution:
        return dist.StudentT(self.df, 0.0, self.width * self.fan_in_factor(name, shape))
