"""Hamiltonian dynamics with a Metropolis test: long trajectories, momentum that may persist between them."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.stats import norm

from numpyro_bnn._checks import argument_error, check_count, check_number
from numpyro_bnn.sgmcmc.interfaces import (
    Dynamics,
    Evaluation,
    Gradient,
    StepContext,
    StepRandomness,
    StepResult,
    squared_norm,
)
from numpyro_bnn.sgmcmc.metropolis import accept, check_all_data, select
from numpyro_bnn.sgmcmc.underdamped import refreshed

__all__ = ["HMC", "Phase"]


class Phase(NamedTuple):
    """Whitened momentum r, (P,)."""

    momentum: jax.Array


@dataclass(frozen=True)
class HMC(Dynamics):
    r"""Hamiltonian Monte Carlo with partial refreshment of the momentum.

    With h = sqrt(step_size), G = L L' and a = 1 - momentum_decay, a step is a trajectory:

    .. math:: r \leftarrow a r + \sqrt{(1 - a^2) T}\, z, \qquad
              (\theta^*, r^*) = \mathrm{leapfrog}^{L}(\theta, r;\ h), \qquad
              \log\alpha = -[U(\theta^*) - U(\theta) + (r^{*\prime} r^* - r'r) / 2] / T

    On rejection the chain stays and its momentum is flipped, without which a momentum that persists would not be
    exact. The step size of a trajectory is h times a uniform number in [1 - jitter, 1 + jitter]: no frequency of the
    target returns to its start again and again.

    Exact: it needs the gradient and potential of the full data (:class:`~numpyro_bnn.sgmcmc.gradients.Full`).

    :param num_steps: L.
    :param momentum_decay: share of the momentum that a trajectory forgets, in [0, 1]; 1 is plain HMC.
    :param jitter: in [0, 1).
    :raises ValueError: for numbers outside these ranges.

    Reference: Horowitz (1991); Neal (2011), on partial refreshment and random step sizes.

    >>> HMC(10).evaluations
    11
    """

    num_steps: int
    momentum_decay: float = 1.0
    jitter: float = 0.1

    exact = True

    def __post_init__(self) -> None:
        call = "sgmcmc.HMC"
        check_count(call, "num_steps", self.num_steps)
        check_number(call, "momentum_decay", self.momentum_decay)
        check_number(call, "jitter", self.jitter)
        if self.momentum_decay > 1:
            raise argument_error(call, "momentum_decay", self.momentum_decay, "Pass a share in [0, 1].")
        if self.jitter >= 1:
            raise argument_error(call, "jitter", self.jitter, "Pass a share in [0, 1), 0 for none.")

    @property
    def rows(self) -> int:
        return 2

    @property
    def evaluations(self) -> int:
        return self.num_steps + 1

    def check(self, gradient: Gradient) -> None:
        check_all_data("sgmcmc.HMC", gradient)

    def init(self, environment: StepContext, position: jax.Array, draw: StepRandomness) -> Phase:
        return Phase(jnp.sqrt(environment.temperature) * draw.noise[0])

    def step(
        self, environment: StepContext, position: jax.Array, memory: Phase, draw: StepRandomness
    ) -> StepResult:
        temperature = environment.temperature
        rate = jnp.asarray(math.inf if self.momentum_decay == 1 else -math.log1p(-self.momentum_decay))
        start = refreshed(memory.momentum, draw.noise[0], rate, temperature)
        # Statistics and adaptation see the start, which belongs to the chain whatever becomes of the trajectory.
        here = environment.evaluate(position, draw.batch)
        # The second row of normals gives one uniform number.
        factor = 1 + self.jitter * (2 * norm.cdf(draw.noise[1, 0]) - 1)
        there, end = self._leapfrog(environment, here, start, factor * jnp.sqrt(environment.step_size), draw)
        error = there.potential - here.potential + 0.5 * (squared_norm(end) - squared_norm(start))
        accepted, probability = accept(-error / temperature, draw.uniform)
        kept, momentum = select(accepted, (there.position, end), (position, self.after_rejection(start)))
        return StepResult(kept, Phase(momentum), here, probability)

    def after_rejection(self, momentum: jax.Array) -> jax.Array:
        """Return the momentum with which a rejected trajectory goes on: minus the one it started with."""
        return -momentum

    def _leapfrog(
        self,
        environment: StepContext,
        here: Evaluation,
        momentum: jax.Array,
        h: jax.Array,
        draw: StepRandomness,
    ) -> tuple[Evaluation, jax.Array]:
        adaptation = environment.adaptation

        def kick(r: jax.Array, share: float, seen: Evaluation) -> jax.Array:
            return r - share * h * environment.transpose(adaptation, seen.gradient)

        def leap(_: jax.Array, carry: tuple[Evaluation, jax.Array]) -> tuple[Evaluation, jax.Array]:
            seen, r = carry
            seen = environment.evaluate(seen.position + h * environment.root(adaptation, r), draw.batch)
            return seen, kick(r, 1.0, seen)

        there, r = lax.fori_loop(0, self.num_steps, leap, (here, kick(momentum, 0.5, here)))
        return there, kick(r, -0.5, there)

    def momentum(self, memory: Phase) -> jax.Array:
        return memory.momentum
