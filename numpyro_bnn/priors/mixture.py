"""The two-component scale mixture of Bayes by Backprop."""

from dataclasses import dataclass, field

import jax.numpy as jnp
import numpyro.distributions as dist

from numpyro_bnn._checks import argument_error
from numpyro_bnn.nn import Shape
from numpyro_bnn.priors.base import Prior, check_positive

__all__ = ["ScaleMixture"]


@dataclass(frozen=True)
class ScaleMixture(Prior):
    """A wide and a narrow normal: w ~ pi N(0, sd_wide^2) + (1 - pi) N(0, sd_narrow^2).

    Kernels and biases alike, and by default without fan-in scaling, as published; ``bias_scale`` is not used.

    :param pi: probability of the wide component.
    :param sd_wide: sd of the wide component.
    :param sd_narrow: sd of the narrow component.

    Reference: Blundell et al. (2015), equation 7.

    >>> prior = ScaleMixture(pi=0.25, sd_wide=1.0, sd_narrow=0.1)("Dense_0.kernel", (4, 1))
    >>> round(float(prior.variance), 4)
    0.2575
    """

    pi: float = 0.5
    sd_wide: float = 1.0
    sd_narrow: float = 0.0025
    # Keyword-only here too: otherwise it would become the first positional argument.
    fan_in_scaling: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, pi=self.pi, sd_wide=self.sd_wide, sd_narrow=self.sd_narrow)
        if not self.pi < 1:
            raise argument_error("priors.ScaleMixture", "pi", self.pi, "Pass a probability inside (0, 1).")

    def _mixture(self, factor: float) -> dist.Distribution:
        sds = jnp.array([self.sd_wide, self.sd_narrow]) * factor
        weights = dist.Categorical(probs=jnp.array([self.pi, 1 - self.pi]))
        return dist.MixtureSameFamily(weights, dist.Normal(0.0, sds))

    def kernel(self, name: str, shape: Shape) -> dist.Distribution:
        return self._mixture(self.fan_in_factor(name, shape))

    def bias(self, name: str, shape: Shape) -> dist.Distribution:
        return self._mixture(1.0)
