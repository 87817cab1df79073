"""Dynamics with a Metropolis test on the full data: MALA, and GGMC with minibatch gradients."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

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
from numpyro_bnn.sgmcmc.minibatches import FullData
from numpyro_bnn.sgmcmc.underdamped import refreshed

__all__ = ["MALA", "GGMC", "Trajectory"]


def accept(log_ratio: jax.Array, uniform: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (accepted, acceptance probability) of a Metropolis test.

    :param log_ratio: that is not a number counts as minus infinity.
    :param uniform: in (0, 1].

    >>> accept(jnp.log(0.5), jnp.float32(0.4))[0].item()
    True
    """
    log_ratio = jnp.where(jnp.isnan(log_ratio), -jnp.inf, jnp.minimum(log_ratio, 0.0))
    # `uniform` is never 0, so a probability of 0 never accepts.
    return jnp.log(uniform) <= log_ratio, jnp.exp(log_ratio)


def select(accepted: jax.Array, new: Any, old: Any) -> Any:
    """Return one of two trees.

    >>> select(jnp.asarray(False), 1, 2).item()
    2
    """
    return jax.tree.map(lambda a, b: jnp.where(accepted, a, b), new, old)


def check_all_data(
    call: str, gradient: Gradient, instead: str = "Pass `Full`; `GGMC` is exact with minibatches."
) -> None:
    """Refuse gradients from minibatches, under which a test with their potential would not be exact.

    >>> from numpyro_bnn.sgmcmc import Full
    >>> check_all_data("sgmcmc.MALA", Full(lambda q: q @ q))
    """
    if not isinstance(gradient.stream, FullData):
        raise argument_error(call, "gradient", type(gradient).__name__, instead)


@dataclass(frozen=True)
class MALA(Dynamics):
    r"""Metropolis-adjusted Langevin: one leapfrog step from a fresh momentum, then accept or stay.

    With h = sqrt(step_size), r ~ N(0, T I), G = L L':

    .. math:: r' = r + \tfrac h2 L' g(\theta),\quad \theta^* = \theta + h L r',
              \quad r^* = r' + \tfrac h2 L' g(\theta^*), \\
              \log\alpha = -[U(\theta^*) - U(\theta) + (r^{*\prime} r^* - r'r) / 2] / T

    Exact: it needs the gradient and potential of the full data (:class:`Full`).

    Reference: Roberts and Tweedie (1996); Neal (2011), section 5.2.

    >>> MALA().exact
    True
    """

    exact = True

    def check(self, gradient: Gradient) -> None:
        check_all_data("sgmcmc.MALA", gradient)

    def init(self, environment: StepContext, position: jax.Array, draw: StepRandomness) -> Evaluation:
        return environment.evaluate(position, draw.batch)

    def step(
        self, environment: StepContext, position: jax.Array, memory: Evaluation, draw: StepRandomness
    ) -> StepResult:
        h, temperature = jnp.sqrt(environment.step_size), environment.temperature
        adaptation = environment.adaptation
        start = jnp.sqrt(temperature) * draw.noise[0]
        kicked = start - 0.5 * h * environment.transpose(adaptation, memory.gradient)
        seen = environment.evaluate(position + h * environment.root(adaptation, kicked), draw.batch)
        end = kicked - 0.5 * h * environment.transpose(adaptation, seen.gradient)
        error = seen.potential - memory.potential + 0.5 * (squared_norm(end) - squared_norm(start))
        accepted, probability = accept(-error / temperature, draw.uniform)
        kept = select(accepted, seen, memory._replace(adaptation=adaptation))
        return StepResult(kept.position, kept, kept, probability)


class Trajectory(NamedTuple):
    """Whitened momentum r, (P,), and the full potential at the position."""

    momentum: jax.Array
    potential: jax.Array


@dataclass(frozen=True)
class GGMC(Dynamics):
    r"""Gradient-guided Monte Carlo: OBABO steps on independent minibatches, then one test on the full data.

    Each of the L steps takes one minibatch for both of its kicks. With r_l^O the momentum after a step's first O and
    r_l^B after its second B,

    .. math::
        \log\alpha = -\tfrac1T [U(\theta_L) - U(\theta_0) + \sum_l (r_l^{B\prime} r_l^B - r_l^{O\prime} r_l^O) / 2]

    On rejection the chain returns to (theta_0, **-r_0**). The flip is what makes it exact: without it E[x^2] on a
    unit Gaussian is wrong by several per cent. Exact whatever the step size and the minibatch noise, which cost
    acceptance only; it needs minibatches that are independent of each other and of the chain's past.

    :param full_potential_fn: ``full_potential_fn(position) -> U``, evaluated once per trajectory.
    :param num_steps: L.
    :param friction: gamma >= 0 as for :class:`OBABO`.
    :raises ValueError: for a negative friction or L < 1.

    Reference: Garriga-Alonso and Fortuin (2021), section 3 and algorithm 1.

    >>> GGMC(lambda q: 0.5 * q @ q, num_steps=5, friction=1.0).evaluations
    10
    """

    full_potential_fn: Callable[[jax.Array], jax.Array]
    num_steps: int
    friction: float

    def __post_init__(self) -> None:
        check_count("sgmcmc.GGMC", "num_steps", self.num_steps)
        check_number("sgmcmc.GGMC", "friction", self.friction, infinite=True)

    @property
    def rows(self) -> int:
        return 2 * self.num_steps

    @property
    def batches(self) -> int:
        return self.num_steps

    @property
    def evaluations(self) -> int:
        return 2 * self.num_steps

    exact = True

    def check(self, gradient: Gradient) -> None:
        if not (gradient.markov and gradient.stream.independent):
            raise argument_error(
                "sgmcmc.GGMC",
                "gradient",
                f"{type(gradient).__name__} on {type(gradient.stream).__name__}",
                "Its minibatches depend on the past of the chain: sample with replacement, without SVRG.",
            )

    def init(self, environment: StepContext, position: jax.Array, draw: StepRandomness) -> Trajectory:
        start = jnp.sqrt(environment.temperature) * draw.noise[0]
        return Trajectory(start, self.full_potential_fn(position))

    def step(
        self, environment: StepContext, position: jax.Array, memory: Trajectory, draw: StepRandomness
    ) -> StepResult:
        end, momentum, work, seen = self._simulate(environment, position, memory.momentum, draw)
        potential = self.full_potential_fn(end)
        error = potential - memory.potential + work
        accepted, probability = accept(-error / environment.temperature, draw.uniform)
        back = (position, Trajectory(self.after_rejection(memory.momentum), memory.potential))
        kept, trajectory = select(accepted, (end, Trajectory(momentum, potential)), back)
        return StepResult(kept, trajectory, seen, probability)

    def after_rejection(self, momentum: jax.Array) -> jax.Array:
        """Return the momentum with which a rejected trajectory goes on: minus the one it started with."""
        return -momentum

    def _simulate(
        self, environment: StepContext, position: jax.Array, momentum: jax.Array, draw: StepRandomness
    ) -> tuple[jax.Array, jax.Array, jax.Array, Evaluation]:
        """Return the end (theta_L, r_L), the sum of kinetic changes, and the first evaluation."""
        h, adaptation = jnp.sqrt(environment.step_size), environment.adaptation
        rate = 0.5 * self.friction * h

        def kick(r, gradient):
            return r - 0.5 * h * environment.transpose(adaptation, gradient)

        def obabo(step, carry):
            theta, r, work, first = carry
            batch = jax.tree.map(lambda leaf: leaf[step] if self.num_steps > 1 else leaf, draw.batch)
            fresh = refreshed(r, draw.noise[2 * step], rate, environment.temperature)
            here = environment.evaluate(theta, batch)
            kicked = kick(fresh, here.gradient)
            theta = theta + h * environment.root(adaptation, kicked)
            kicked = kick(kicked, environment.evaluate(theta, batch).gradient)
            work = work + 0.5 * (squared_norm(kicked) - squared_norm(fresh))
            last = refreshed(kicked, draw.noise[2 * step + 1], rate, environment.temperature)
            # Statistics and adaptation see the start of the trajectory, which belongs to the chain in any case.
            return theta, last, work, select(step == 0, here, first)

        zero = jnp.zeros((), position.dtype)
        blank = Evaluation(position, zero, jnp.zeros_like(position), adaptation)
        return lax.fori_loop(0, self.num_steps, obabo, (position, momentum, zero, blank))

    def momentum(self, memory: Trajectory) -> jax.Array:
        return memory.momentum
