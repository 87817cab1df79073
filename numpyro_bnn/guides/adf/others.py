"""Sites that are no weights: how the guide represents them, and their values."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions.transforms import Transform, biject_to

from numpyro_bnn._distributions import unwrapped
from numpyro_bnn.guides.adf.sites import Sites, refuse
from numpyro_bnn.guides.adf.updates import Gamma
from numpyro_bnn.moments import Gaussian

__all__ = ["Other", "describe_others", "values_of"]

# Grid over which a prior is matched by a Gaussian in unconstrained space.
REACH, GRID = 60.0, 24_001


@dataclass(frozen=True)
class Other:
    """A latent site that is no weight.

    :param kind: "gamma" for a precision with its published updates, "normal" for a Gaussian in unconstrained space.
    :param fn: prior.
    :param transform: from unconstrained space.
    :param prior: the prior as the guide represents it: shape and rate, or mean and variance in unconstrained space.
    """

    kind: str
    fn: dist.Distribution
    transform: Transform
    prior: tuple[np.ndarray, np.ndarray]

    @classmethod
    def of(cls, kind: str, fn: dist.Distribution) -> "Other":
        """Represent a prior."""
        base = unwrapped(fn, masked=True)
        transform = biject_to(base.support)
        prior = (
            (base.concentration, base.rate) if kind == "gamma" else _unconstrained_moments(base, transform)
        )
        first, second = (np.broadcast_to(np.asarray(part, float), fn.shape()) for part in prior)
        return cls(kind, fn, transform, (first, second))

    def start(self) -> Gamma | Gaussian:
        """The prior as a state."""
        return (Gamma if self.kind == "gamma" else Gaussian)(*map(jnp.asarray, self.prior))

    def value(self, state: Gamma | Gaussian) -> jax.Array:
        """A typical value: 1 / E[1 / precision], or the median."""
        if isinstance(state, Gamma):
            return 1 / state.variance()
        return self.transform(state.mean)

    def log_prior(self, u: jax.Array) -> jax.Array:
        """Log density in unconstrained space, elementwise."""
        value = self.transform(u)
        return unwrapped(self.fn, masked=True).log_prob(value) + self.transform.log_abs_det_jacobian(u, value)


def _unconstrained_moments(base: dist.Distribution, transform: Transform) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of a prior in unconstrained space, by the trapezoidal rule."""
    u = np.linspace(-REACH, REACH, GRID).reshape((-1,) + (1,) * len(base.batch_shape))

    @jax.jit
    def log_density(u: jax.Array) -> jax.Array:
        value = transform(u)
        return base.log_prob(value) + transform.log_abs_det_jacobian(u, value)

    found = np.asarray(log_density(u))
    found = np.where(np.isfinite(found), found, -np.inf)
    density = np.exp(found - found.max(axis=0))
    density /= density.sum(axis=0)
    mean = (density * u).sum(axis=0)
    return mean, (density * (u - mean) ** 2).sum(axis=0)


def describe_others(sites: Sites, noise_powers: Mapping[str, float | None]) -> dict[str, Other]:
    """Choose how each site that is no weight is represented.

    :param noise_powers: power with which a noise site enters the sd of a Normal observation; ``None`` for any other
        dependence.
    """
    found = {}
    for name, fn in sites.others.items():
        base = unwrapped(fn, masked=True)
        if base.event_dim or base.support.is_discrete:
            raise refuse(
                name,
                f"a {type(base).__name__}",
                "Beside the weights, sites must be real or positive numbers.",
            )
        powers: list[float | None] = [w.power for w in sites.weights.values() if w.hyper == name]
        powers += [noise_powers[name]] if name in sites.noise else []
        conjugate = type(base) is dist.Gamma and all(power == -0.5 for power in powers)
        if conjugate and not np.all(np.asarray(base.concentration) > 1):
            raise refuse(
                name,
                f"a Gamma with concentration {np.min(base.concentration):.3g}",
                "Give it a concentration above 1: below, the prior variance of what it scales is infinite.",
            )
        found[name] = Other.of("gamma" if conjugate else "normal", fn)
    return found


def values_of(others: Mapping[str, Other], states: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Typical values of all sites."""
    return {name: other.value(states[name]) for name, other in others.items()}
