"""Underdamped Langevin dynamics (SGHMC) by symmetric splittings with an exact Ornstein-Uhlenbeck refresh."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from numpyro_bnn._checks import check_number
from numpyro_bnn.sgmcmc.interfaces import Dynamics, StepContext, StepRandomness, StepResult

__all__ = ["BAOAB", "OBABO", "Momentum", "refreshed"]


class Momentum(NamedTuple):
    """Whitened momentum r = L' m, (P,), with stationary law N(0, T I), and the last gradient (P,)."""

    momentum: jax.Array
    gradient: jax.Array


def refreshed(momentum: jax.Array, noise: jax.Array, rate: jax.Array, temperature: jax.Array) -> jax.Array:
    """Solve dr = -r dt + sqrt(2 T) dW over the time ``rate`` exactly; rate 0 leaves r, rate inf replaces it."""
    spread = jnp.sqrt(-jnp.expm1(-2.0 * rate) * temperature)
    return jnp.exp(-rate) * momentum + spread * noise


@dataclass(frozen=True)
class _Underdamped(Dynamics):
    friction: float

    def __post_init__(self) -> None:
        check_number(f"sgmcmc.{type(self).__name__}", "friction", self.friction, infinite=True)

    def init(self, environment: StepContext, position: jax.Array, draw: StepRandomness) -> Momentum:
        start = jnp.sqrt(environment.temperature) * draw.noise[0]
        return Momentum(start, environment.evaluate(position, draw.batch).gradient)

    def momentum(self, memory: Momentum) -> jax.Array:
        return memory.momentum

    def _kick(self, environment: StepContext, momentum: jax.Array, gradient: jax.Array) -> jax.Array:
        half = 0.5 * jnp.sqrt(environment.step_size)
        return momentum - half * environment.transpose(environment.adaptation, gradient)

    def _rate(self, environment: StepContext) -> jax.Array:
        return self.friction * jnp.sqrt(environment.step_size)


@dataclass(frozen=True)
class BAOAB(_Underdamped):
    r"""Underdamped Langevin: kick, half drift, refresh, half drift, kick.

    With time step :math:`h = \sqrt\epsilon`, mass M = G^-1, G = L L' and r = L' m:

    .. math::
        B:\ r \leftarrow r + \tfrac h2 L' \tilde g, \quad A:\ \theta \leftarrow \theta + \tfrac h2 L r, \quad
        O:\ r \leftarrow a r + \sqrt{(1 - a^2) T}\, z,\quad a = e^{-\gamma h}

    One gradient per step: the last kick of a step and the first of the next share it, each step has a new minibatch.
    The step size has the meaning it has everywhere in this package: at infinite friction
    :math:`\theta \leftarrow \theta + \tfrac\epsilon2 \tilde g + \sqrt{\epsilon T} (z_n + z_{n+1}) / 2`, SGLD with
    neighboring noises averaged. In the terms of Chen et al. (2014): learning rate eps, momentum decay 1 - a. On
    N(0, 1 / lam) with exact gradients the positions have the exact variance T / lam, the momenta after a step
    T (1 - eps lam / 4). Friction 0 is leapfrog; T = 0 damped gradient descent.

    :param friction: gamma >= 0, per unit of time; ``inf`` draws a fresh momentum each step.
    :raises ValueError: for a negative friction.

    Reference: Leimkuhler and Matthews (2013), section 2; Chen, Fox and Guestrin (2014).

    >>> BAOAB(friction=1.0).rows
    1
    """

    def step(
        self, environment: StepContext, position: jax.Array, memory: Momentum, draw: StepRandomness
    ) -> StepResult:
        half = 0.5 * jnp.sqrt(environment.step_size)
        kicked = self._kick(environment, memory.momentum, memory.gradient)
        fresh = refreshed(kicked, draw.noise[0], self._rate(environment), environment.temperature)
        # Both half drifts in one product: nothing in between depends on the position.
        position = position + half * environment.root(environment.adaptation, kicked + fresh)
        seen = environment.evaluate(position, draw.batch)
        return StepResult(
            position, Momentum(self._kick(environment, fresh, seen.gradient), seen.gradient), seen
        )


@dataclass(frozen=True)
class OBABO(_Underdamped):
    r"""Underdamped Langevin: half refresh, kick, drift, kick, half refresh; letters as in :class:`BAOAB`.

    Each half refresh uses noise of its own: :math:`r \leftarrow \sqrt a\, r + \sqrt{(1 - a) T}\, z`. Positions
    have an error of order eps = h^2: on N(0, 1 / lam) with exact gradients their variance is
    T / (lam (1 - eps lam / 4)), while the momenta have variance T exactly.

    :param friction: gamma >= 0, per unit of time; ``inf`` draws a fresh momentum each step.
    :raises ValueError: for a negative friction.

    Reference: Bussi and Parrinello (2007), section II.C.

    >>> OBABO(friction=1.0).rows
    2
    """

    rows = 2

    def step(
        self, environment: StepContext, position: jax.Array, memory: Momentum, draw: StepRandomness
    ) -> StepResult:
        h, rate = jnp.sqrt(environment.step_size), 0.5 * self._rate(environment)
        fresh = refreshed(memory.momentum, draw.noise[0], rate, environment.temperature)
        kicked = self._kick(environment, fresh, memory.gradient)
        position = position + h * environment.root(environment.adaptation, kicked)
        seen = environment.evaluate(position, draw.batch)
        kicked = self._kick(environment, kicked, seen.gradient)
        last = refreshed(kicked, draw.noise[1], rate, environment.temperature)
        return StepResult(position, Momentum(last, seen.gradient), seen)
