"""Neal's prior: a Gamma precision for each group of weights."""

from dataclasses import dataclass

import numpyro
import numpyro.distributions as dist

from numpyro_bnn._checks import argument_error
from numpyro_bnn._group_student import GroupStudentT
from numpyro_bnn.nn import Shape
from numpyro_bnn.priors.base import Prior, check_positive, gaussian

__all__ = ["GammaPrecision"]


@dataclass(frozen=True)
class GammaPrecision(Prior):
    """One precision per weight group, in Neal's notation ``width:alpha``.

    tau ~ Gamma(shape = alpha / 2, mean = 1 / width^2), that is rate = (alpha / 2) width^2, and
    w ~ N(0, 1 / tau). Kernels and biases are groups of their own. With ``fan_in_scaling`` the width of a kernel
    is divided by sqrt(fan_in), Neal's prefix ``x``: ``x0.05:0.5`` is ``GammaPrecision(0.05, 0.5)``, and
    ``0.05:0.5`` is ``GammaPrecision(0.05, 0.5, fan_in_scaling=False)``. Integrated over tau a weight is Student t
    with alpha degrees of freedom and scale ``width``. ``bias_scale`` is not used.

    Adds the site ``<parameter>_precision``, a scalar; ``marginal`` adds none.

    :param width: typical size of a weight: tau has mean 1 / width^2.
    :param alpha: shape of the hyperprior; small values are vague.
    :param centered: sample w itself, which the conjugate Gibbs update of tau needs. By default
        z = w sqrt(tau) is sampled.
    :param marginal: integrate tau out: the weights of a group are a multivariate Student t
        (:class:`~numpyro_bnn.priors.GroupStudentT`). For gradient samplers: no funnel is left between tau and w.
    :raises ValueError: for numbers that are not positive, and for ``centered`` together with ``marginal``.

    Reference: Neal (1996), section 3.2.1 (hyperpriors) and appendix A.

    >>> from numpyro import handlers
    >>> with handlers.seed(rng_seed=0), handlers.trace() as trace:
    ...     prior = GammaPrecision(0.05, 0.5)("Dense_0.bias", (3,))
    >>> tau = trace["Dense_0.bias_precision"]["fn"]
    >>> float(tau.concentration), round(float(tau.mean), 3)
    (0.25, 400.0)
    """

    width: float = 1.0
    alpha: float = 0.5
    centered: bool = False
    marginal: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, width=self.width, alpha=self.alpha)
        if self.centered and self.marginal:
            raise argument_error(
                "priors.GammaPrecision",
                "marginal",
                "True with `centered=True`",
                "Without precision there is nothing to center on: pass one of them.",
            )

    def _group(self, name: str, shape: Shape, width: float) -> dist.Distribution:
        if self.marginal:
            return GroupStudentT(self.alpha, width, shape)
        half = self.alpha / 2
        precision = numpyro.sample(f"{name}_precision", dist.Gamma(half, half * width**2))
        return gaussian(shape, precision**-0.5, self.centered)

    def kernel(self, name: str, shape: Shape) -> dist.Distribution:
        return self._group(name, shape, self.width * self.fan_in_factor(name, shape))

    def bias(self, name: str, shape: Shape) -> dist.Distribution:
        return self._group(name, shape, self.width)
