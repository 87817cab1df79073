"""Dynamics with a Metropolis test on the full data."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.scipy.stats import norm

from numpyro_bnn._checks import argument_error
from numpyro_bnn._options import Fraction, FractionBelow1, PositiveInt
from numpyro_bnn._types import PyTree
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


class PhasePoint(NamedTuple):
    """Whitened momentum r, (P,), and potential and gradient (P,) at the position."""

    momentum: Array
    potential: Array
    gradient: Array


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

    With ``num_steps=1`` and ``jitter=0`` it is the Metropolis-adjusted Langevin
    algorithm (MALA, Roberts and Tweedie, 1996).

    :param num_steps: L.
    :param momentum_decay: fraction of the momentum that is lost before a trajectory, in
        [0, 1]; 1 is plain HMC.
    :param jitter: in [0, 1).
    :raises ValueError: for numbers outside these ranges.

    Reference: Horowitz (1991); Neal (2011), on partial refreshment and random step
    sizes.

    >>> HMC(10).evaluations
    10
    """

    num_steps: PositiveInt
    momentum_decay: Fraction = 1.0
    jitter: FractionBelow1 = 0.1

    exact = True
    cached_fields = ("potential", "gradient")

    @property
    def rows(self) -> int:
        return 2 if self.jitter else 1

    @property
    def evaluations(self) -> int:
        return self.num_steps

    def check(self, gradient: Gradient) -> None:
        if not isinstance(gradient.stream, FullData):
            name = type(gradient).__name__
            raise argument_error("sgmcmc.HMC", "gradient", name, "Pass `Full`.")

    def init(
        self, context: StepContext, position: Array, draw: StepRandomness
    ) -> PhasePoint:
        start = jnp.sqrt(context.temperature) * draw.noise[0]
        evaluation = context.evaluate(position, draw.batch)
        return PhasePoint(start, evaluation.potential, evaluation.gradient)

    def step(
        self,
        context: StepContext,
        position: Array,
        memory: PhasePoint,
        draw: StepRandomness,
    ) -> StepResult:
        temperature = context.temperature
        rate = jnp.asarray(
            math.inf if self.momentum_decay == 1 else -math.log1p(-self.momentum_decay)
        )
        start = refreshed(memory.momentum, draw.noise[0], rate, temperature)
        origin = Evaluation(
            position, memory.potential, memory.gradient, context.adaptation
        )
        h = jnp.sqrt(context.step_size)
        if self.jitter:
            # One uniform number is made from the second row of normals.
            h = h * (1 + self.jitter * (2 * norm.cdf(draw.noise[1, 0]) - 1))
        proposal, end = self._leapfrog(context, origin, start, h, draw.batch)
        error = (
            proposal.potential
            - origin.potential
            + 0.5 * (squared_norm(end) - squared_norm(start))
        )
        accepted, probability = accept(-error / temperature, draw.uniform)
        evaluation, momentum = select(accepted, (proposal, end), (origin, -start))
        next_memory = PhasePoint(momentum, evaluation.potential, evaluation.gradient)
        return StepResult(evaluation.position, next_memory, evaluation, probability)

    def _leapfrog(
        self,
        context: StepContext,
        origin: Evaluation,
        momentum: Array,
        h: Array,
        batch: PyTree,
    ) -> PyTree:
        adaptation = context.adaptation

        def kick(r: Array, share: float, evaluation: Evaluation) -> Array:
            return r - share * h * context.transpose(adaptation, evaluation.gradient)

        def leap(_: Array, carry: tuple[Evaluation, Array]) -> tuple[Evaluation, Array]:
            evaluation, r = carry
            evaluation = context.evaluate(
                evaluation.position + h * context.root(adaptation, r), batch
            )
            return evaluation, kick(r, 1.0, evaluation)

        proposal, r = lax.fori_loop(
            0, self.num_steps, leap, (origin, kick(momentum, 0.5, origin))
        )
        return proposal, kick(r, -0.5, proposal)

    def momentum(self, memory: PhasePoint) -> Array:
        return memory.momentum
