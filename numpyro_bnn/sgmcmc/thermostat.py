"""Nosé-Hoover-Langevin dynamics (SGNHT): a friction that learns the unknown noise of the gradient."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from numpyro_bnn._checks import check_number
from numpyro_bnn.sgmcmc.interfaces import Dynamics, StepContext, StepRandomness, StepResult, squared_norm

__all__ = ["NoseHoover", "Thermostat"]


class Thermostat(NamedTuple):
    """Whitened momentum r, (P,), the last gradient (P,), and the thermostat's friction xi, scalar."""

    momentum: jax.Array
    gradient: jax.Array
    friction: jax.Array


@dataclass(frozen=True)
class NoseHoover(Dynamics):
    r"""Stochastic-gradient Nosé-Hoover thermostat.

    The equations of Ding et al. (2014), with r'r the squared norm,

    .. math:: dr = -\xi r\,dt + L'\tilde g\,dt + \sqrt{2 A T}\,dW, \quad d\theta = L r\,dt, \quad
              Q\,d\xi = (r'r / P - T)\,dt

    by the symmetric splitting kick, half drift, half thermostat, refresh with friction xi (exact), and back (B A D O
    D A B), h = sqrt(step_size): same first-order terms as the Euler steps of that paper, smaller error. Where
    gradient noise has variance V per coordinate, xi settles near A + h V / (2 T), and positions and momenta keep the
    temperature T; this holds for noise of one size in all (whitened) coordinates. With A = 0 and exact gradients the
    motion is deterministic and need not be ergodic.

    :param friction: A >= 0, also the start of xi.
    :param mass: Q > 0, 1 in that paper; its scale is a squared time, so it should follow h^2.
    :raises ValueError: for a negative or infinite friction, or a mass that is not positive.

    Reference: Ding et al. (2014), algorithm 2; Leimkuhler and Shang (2016), section 2 (splitting).

    >>> NoseHoover(friction=1.0).rows
    1
    """

    friction: float
    mass: float = 1.0

    def __post_init__(self) -> None:
        check_number("sgmcmc.NoseHoover", "friction", self.friction)
        check_number("sgmcmc.NoseHoover", "mass", self.mass, strict=True)

    def init(self, environment: StepContext, position: jax.Array, draw: StepRandomness) -> Thermostat:
        start = jnp.sqrt(environment.temperature) * draw.noise[0]
        gradient = environment.evaluate(position, draw.batch).gradient
        return Thermostat(start, gradient, jnp.asarray(self.friction, position.dtype))

    def step(
        self, environment: StepContext, position: jax.Array, memory: Thermostat, draw: StepRandomness
    ) -> StepResult:
        h, temperature = jnp.sqrt(environment.step_size), environment.temperature
        half, size = 0.5 * h, position.shape[0]
        kicked = memory.momentum - half * environment.transpose(environment.adaptation, memory.gradient)
        xi = memory.friction + half / self.mass * (squared_norm(kicked) / size - temperature)
        decay = jnp.exp(-xi * h)
        fresh = decay * kicked + jnp.sqrt(self._variance(xi, h) * temperature) * draw.noise[0]
        xi = xi + half / self.mass * (squared_norm(fresh) / size - temperature)
        position = position + half * environment.root(environment.adaptation, kicked + fresh)
        seen = environment.evaluate(position, draw.batch)
        last = fresh - half * environment.transpose(environment.adaptation, seen.gradient)
        return StepResult(position, Thermostat(last, seen.gradient, xi), seen)

    def _variance(self, xi: jax.Array, h: jax.Array) -> jax.Array:
        """Return A (1 - exp(-2 xi h)) / xi, positive for xi of either sign, 2 A h at xi = 0."""
        small = jnp.abs(xi) < 1e-4
        safe = jnp.where(small, 1.0, xi)
        exact = -jnp.expm1(-2.0 * safe * h) / safe
        return self.friction * jnp.where(small, 2.0 * h * (1.0 - xi * h), exact)

    def momentum(self, memory: Thermostat) -> jax.Array:
        return memory.momentum
