"""Overdamped Langevin dynamics: SGLD and its preconditioned form."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from numpyro_bnn.sgmcmc.interfaces import Dynamics, StepContext, StepRandomness, StepResult

__all__ = ["Overdamped"]


@dataclass(frozen=True)
class Overdamped(Dynamics):
    r"""Euler-Maruyama steps of overdamped Langevin dynamics.

    .. math:: \theta \leftarrow \theta + \tfrac{\epsilon}{2} G \tilde g + \sqrt{\epsilon T}\, L z, \quad G = L L',
              \quad \tilde g = -\nabla \tilde U, \quad z \sim N(0, I)

    The stationary density tends to exp(-U / T) as eps -> 0; T = 0 is gradient descent with learning rate eps / 2.
    On N(0, 1 / lam) with gradient noise of variance V the stationary variance at constant step is
    (2 eta T + eta^2 V) / (1 - (1 - eta lam)^2), eta = eps / 2.

    Reference: Welling and Teh (2011), equation 4; Li et al. (2016), equation 3.

    >>> Overdamped().rows
    1
    """

    def step(
        self, environment: StepContext, position: jax.Array, memory: tuple[()], draw: StepRandomness
    ) -> StepResult:
        seen = environment.evaluate(position, draw.batch)
        drift = (-0.5 * environment.step_size) * environment.transpose(seen.adaptation, seen.gradient)
        noise = jnp.sqrt(environment.step_size * environment.temperature) * draw.noise[0]
        return StepResult(position + environment.root(seen.adaptation, drift + noise), memory, seen)
