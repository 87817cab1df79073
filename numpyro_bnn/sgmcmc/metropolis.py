"""Dynamics with a Metropolis test on the full data: MALA and HMC."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.scipy.stats import norm

from numpyro_bnn._checks import argument_error
from numpyro_bnn._options import Fraction, FractionBelow1, PositiveInt
from numpyro_bnn.sgmcmc.dynamics import refreshed
from numpyro_bnn.sgmcmc.interfaces import (
    Array,
    Dynamics,
    Evaluation,
    Gradient,
    StepContext,
    StepRandomness,
    StepResult,
    select,
    squared_norm,
)
from numpyro_bnn.sgmcmc.streams import FullData


def accept(log_ratio: Array, uniform: Array) -> tuple[Array, Array]:
    """Return (accepted, acceptance probability) of a Metropolis test; a ``log_ratio``
    of NaN counts as -inf.
    """
    log_ratio = jnp.where(jnp.isnan(log_ratio), -jnp.inf, jnp.minimum(log_ratio, 0.0))
    # `uniform` is never 0, so a probability of 0 never accepts.
    return jnp.log(uniform) <= log_ratio, jnp.exp(log_ratio)


def _check_all_data(call: str, gradient: Gradient) -> None:
    """Refuse minibatch gradients, with which a test on their potential would not be
    exact.
    """
    if not isinstance(gradient.stream, FullData):
        raise argument_error(call, "gradient", type(gradient).__name__, "Pass `Full`.")


@dataclass(frozen=True)
class MALA(Dynamics):
    r"""Metropolis-adjusted Langevin algorithm: one leapfrog step from a fresh momentum,
    then accept or reject.

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
    cached = 1

    def check(self, gradient: Gradient) -> None:
        _check_all_data("sgmcmc.MALA", gradient)

    def init(
        self, context: StepContext, position: Array, draw: StepRandomness
    ) -> Evaluation:
        return context.evaluate(position, draw.batch)

    def step(
        self, context: StepContext, position: Array, memory: Any, draw: StepRandomness
    ) -> StepResult:
        h, temperature, adaptation = (
            jnp.sqrt(context.step_size),
            context.temperature,
            context.adaptation,
        )
        start = jnp.sqrt(temperature) * draw.noise[0]
        kicked = start - 0.5 * h * context.transpose(adaptation, memory.gradient)
        seen = context.evaluate(
            position + h * context.root(adaptation, kicked), draw.batch
        )
        end = kicked - 0.5 * h * context.transpose(adaptation, seen.gradient)
        error = (
            seen.potential
            - memory.potential
            + 0.5 * (squared_norm(end) - squared_norm(start))
        )
        accepted, probability = accept(-error / temperature, draw.uniform)
        kept = select(accepted, seen, memory._replace(adaptation=adaptation))
        return StepResult(kept.position, kept, kept, probability)


class Phase(NamedTuple):
    """Whitened momentum r, (P,)."""

    momentum: Array


@dataclass(frozen=True)
class HMC(Dynamics):
    r"""Hamiltonian Monte Carlo with partial refreshment of the momentum.

    With h = sqrt(step_size), G = L L' and a = 1 - momentum_decay, a step is a
    trajectory:

    .. math:: r \leftarrow a r + \sqrt{(1 - a^2) T}\, z, \qquad
              (\theta^*, r^*) = \mathrm{leapfrog}^{L}(\theta, r;\ h), \qquad
              \log\alpha = -[U(\theta^*) - U(\theta) + (r^{*\prime} r^* - r'r) / 2] / T

    On rejection the chain stays and its momentum is flipped; without the flip,
    persistent momentum would not be exact. The step size of a trajectory is h times a
    uniform number in [1 - jitter, 1 + jitter], so that trajectories do not return to
    their start at some frequency of the target.

    Exact: it needs the gradient and potential of the full data (:class:`Full`).

    :param num_steps: L.
    :param momentum_decay: fraction of the momentum that is lost before a trajectory, in
        [0, 1]; 1 is plain HMC.
    :param jitter: in [0, 1).
    :raises ValueError: for numbers outside these ranges.

    Reference: Horowitz (1991); Neal (2011), on partial refreshment and random step
    sizes.

    >>> HMC(10).evaluations
    11
    """

    num_steps: PositiveInt
    momentum_decay: Fraction = 1.0
    jitter: FractionBelow1 = 0.1

    exact = True
    rows = 2

    @property
    def evaluations(self) -> int:
        return self.num_steps + 1

    def check(self, gradient: Gradient) -> None:
        _check_all_data("sgmcmc.HMC", gradient)

    def init(
        self, context: StepContext, position: Array, draw: StepRandomness
    ) -> Phase:
        return Phase(jnp.sqrt(context.temperature) * draw.noise[0])

    def step(
        self, context: StepContext, position: Array, memory: Phase, draw: StepRandomness
    ) -> StepResult:
        temperature = context.temperature
        rate = jnp.asarray(
            math.inf if self.momentum_decay == 1 else -math.log1p(-self.momentum_decay)
        )
        start = refreshed(memory.momentum, draw.noise[0], rate, temperature)
        # Statistics and adaptation use the start, which belongs to the chain whether or
        # not the test accepts.
        here = context.evaluate(position, draw.batch)
        # One uniform number is made from the second row of normals.
        factor = 1 + self.jitter * (2 * norm.cdf(draw.noise[1, 0]) - 1)
        there, end = self._leapfrog(
            context, here, start, factor * jnp.sqrt(context.step_size), draw.batch
        )
        error = (
            there.potential
            - here.potential
            + 0.5 * (squared_norm(end) - squared_norm(start))
        )
        accepted, probability = accept(-error / temperature, draw.uniform)
        kept, momentum = select(accepted, (there.position, end), (position, -start))
        return StepResult(kept, Phase(momentum), here, probability)

    def _leapfrog(
        self,
        context: StepContext,
        here: Evaluation,
        momentum: Array,
        h: Array,
        batch: Any,
    ) -> Any:
        adaptation = context.adaptation

        def kick(r: Array, share: float, seen: Evaluation) -> Array:
            return r - share * h * context.transpose(adaptation, seen.gradient)

        def leap(_: Array, carry: tuple[Evaluation, Array]) -> tuple[Evaluation, Array]:
            seen, r = carry
            seen = context.evaluate(
                seen.position + h * context.root(adaptation, r), batch
            )
            return seen, kick(r, 1.0, seen)

        there, r = lax.fori_loop(
            0, self.num_steps, leap, (here, kick(momentum, 0.5, here))
        )
        return there, kick(r, -0.5, there)

    def momentum(self, memory: Phase) -> Array:
        return memory.momentum
