"""How far a chain moved, and at which temperature."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.special import gammaincinv

from numpyro_bnn._options import Level, NonNegative, PositiveInt, checked
from numpyro_bnn._types import Attributes
from numpyro_bnn.infer.phases import Phase, SGMCMCState, Transition, listed
from numpyro_bnn.sgmcmc import State

# A chain of at least so many steps is frozen below these shares of the posterior
# variance, or of acceptance.
MIN_STEPS, MIN_VARIANCE_COVERED, MIN_ACCEPT_PROB = 1000, 0.02, 0.01


@checked("infer.temperature_band")
def temperature_band(
    num_parameters: PositiveInt, temperature: NonNegative = 1.0, level: Level = 0.95
) -> tuple[float, float]:
    r"""Central interval of the temperature statistics of one draw, as a check that a
    chain is at equilibrium.

    The central quantiles of T chi^2_P / P. At stationarity the kinetic temperature m'
    M^-1 m / P of one state has exactly this distribution; the configurational
    temperature has it on a centered Gaussian target with exact gradients. Statistics of
    a draw are means over its steps, so a kinetic value outside indicates a problem:
    gradient noise heats the chain, or it has not converged. The mean may be off even if
    all values lie inside.

    :param num_parameters: P; ``temperature``: T of the target.
    :param level: probability of the band.
    :return: lower and upper bound.
    :raises ValueError: for fewer than one parameter, or a level outside (0, 1).

    Reference: Wenzel et al. (2020), appendix on temperature diagnostics.

    >>> [round(bound, 2) for bound in temperature_band(50)]
    [0.65, 1.43]
    """
    tails = np.array([0.5 - level / 2, 0.5 + level / 2])
    low, high = temperature * gammaincinv(num_parameters / 2, tails)
    return float(2 * low / num_parameters), float(2 * high / num_parameters)


class Movement(NamedTuple):
    """Means over the draws that are kept.

    :param virial: theta' grad U / P, ``position``: theta (P,), ``gradient``: grad U
        (P,), means over their steps.
    :param accept_prob: acceptance probability; ``None`` where nothing is rejected.
    :param refused_steps: fraction of the steps that were not taken.
    """

    virial: Array
    position: Array
    gradient: Array
    accept_prob: Array | None
    refused_steps: Array


@dataclass(frozen=True)
class MeasureMovement(Phase):
    """Of the draws after warm-up: the share of the posterior variance that they cover.

    It is the covariance of theta and grad U, summed over coordinates, divided by P T.

    :param num_warmup: transitions of the warm-up.
    :param exact: whether the dynamics has a Metropolis test.
    """

    num_warmup: int
    exact: bool
    temperature: float
    steps_per_draw: int

    def start(self, engine: State, step_size: Array) -> Movement:
        zeros = jnp.zeros_like(engine.position)
        zero = jnp.zeros((), zeros.dtype)
        accept_prob = zero if self.exact else None
        return Movement(zero, zeros, zeros, accept_prob, zero)

    def after(self, state: SGMCMCState, now: Transition) -> SGMCMCState:
        """Add the means of a draw, if it is kept."""
        old, statistics = self.of(state), state.engine.statistics
        draws = now.i + 1 - self.num_warmup
        weight = jnp.where(draws > 0, 1 / jnp.maximum(draws, 1), 0)
        weight = weight.astype(old.virial.dtype)
        values = (
            statistics.configurational_temperature,
            statistics.position,
            statistics.gradient,
            statistics.accept_prob,
            statistics.refused_share,
        )
        means = jax.tree.map(lambda a, b: a + weight * (b - a), tuple(old), values)
        return state.with_phase(self, Movement(*means))

    def describe(self, state: SGMCMCState) -> Attributes:
        """Attributes of a run, by chain."""
        movement = jax.device_get(self.of(state))
        # a chain that hardly moved in enough steps covers, or accepts, almost nothing
        draws = np.ravel(state.i) - self.num_warmup
        still = np.zeros(draws.size, bool)
        about = {}
        if self.temperature > 0 and draws.min() > 0:
            size = movement.position.shape[-1]
            product = np.sum(movement.position * movement.gradient, -1)
            covered = (movement.virial - product / size) / self.temperature
            still |= np.abs(np.ravel(covered)) < MIN_VARIANCE_COVERED
            about["variance_covered"] = listed(covered)
        if movement.accept_prob is not None:
            still |= np.ravel(movement.accept_prob) < MIN_ACCEPT_PROB
            about["mean_accept_prob"] = listed(movement.accept_prob)
        still &= draws * self.steps_per_draw >= MIN_STEPS
        return {
            **about,
            "frozen_chains": str(np.flatnonzero(still).tolist()),
            "steps_kept": max(int(draws.min()), 0) * self.steps_per_draw,
            "refused_steps": listed(movement.refused_steps),
        }
