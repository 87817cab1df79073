"""The warm-up that the microcanonical kernels share."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from numpyro_bnn import sgmcmc
from numpyro_bnn._checks import check_number, unknown_name
from numpyro_bnn.infer.adaptation import LEAST, Averaging, Spread, Stages, Tuning, chosen_coordinates, start
from numpyro_bnn.infer.base import SGMCMCKernel
from numpyro_bnn.infer.preconditioning import is_named
from numpyro_bnn.infer.state import SGMCMCState
from numpyro_bnn.sgmcmc.dynamics import INTEGRATORS

__all__ = ["MicrocanonicalKernel"]


class MicrocanonicalKernel(SGMCMCKernel):
    """Base of the microcanonical kernels: all but their dynamics, and how their step size is steered."""

    preconditioners: tuple[str, ...] = ("variance",)

    def __init__(
        self,
        model: Callable,
        step_size: Any = None,
        *,
        decoherence_length: float | None = None,
        integrator: str = "mclachlan",
        preconditioner: Any = "variance",
        **options: Any,
    ) -> None:
        self._length = decoherence_length
        self._integrator = integrator
        super().__init__(model, step_size, preconditioner=preconditioner, **options)

    @abstractmethod
    def steer(self, state: SGMCMCState, broken: jax.Array, i: jax.Array) -> SGMCMCState:
        """Change the step size after transition ``i`` of the warm-up; ``broken`` if it diverged."""

    def finish(self, state: SGMCMCState, i: jax.Array) -> SGMCMCState:
        """What else is set near the end of warm-up; default nothing."""
        return state

    def _check_arguments(self) -> None:
        super()._check_arguments()
        check_number(self._call, "temperature", self._temperature, strict=True)
        if self._length is not None:
            check_number(self._call, "decoherence_length", self._length, strict=True, infinite=True)
        if self._integrator not in INTEGRATORS:
            raise unknown_name(self._call, "integrator", self._integrator, INTEGRATORS)

    @property
    def steers_step_size(self) -> bool:
        return True

    def choose_step_size(self, curvature: jax.Array, noise: jax.Array) -> jax.Array:
        return 0.25 / curvature

    def step_length(self, step_size: jax.Array, size: int) -> jax.Array:
        """The time step h has the length h sqrt(P): the speed that a momentum of N(0, I) has."""
        return jnp.sqrt(step_size * size)

    @property
    def stages(self) -> Stages:
        """What is adapted when."""
        return Stages.of(self.warm_start_length, self.num_warmup)

    def start_tuning(self, position: jax.Array, step_size: jax.Array) -> Tuning:
        return start(position, step_size, self.stages)

    def adapt(
        self, before: SGMCMCState, after: SGMCMCState, sampler: sgmcmc.Sampler, i: jax.Array
    ) -> SGMCMCState:
        """Steer the step size after every transition of the warm-up, length and preconditioner after some."""
        state = after
        if self.stages.end > self.stages.begin:
            warming = i < self.stages.end
            state = lax.cond(warming, lambda: self._adapted(before, after, sampler, i), lambda: after)
        # The energy variance of draws that are kept.
        tuning = state.tuning
        draws = tuning.draws + jnp.where(i < self.num_warmup, 0, 1)
        mean = tuning.energy + (state.energy_variance - tuning.energy) / jnp.maximum(draws, 1)
        energy = jnp.where(draws > 0, mean, tuning.energy)
        return state._replace(tuning=tuning._replace(energy=energy, draws=draws))

    def _adapted(
        self, before: SGMCMCState, after: SGMCMCState, sampler: sgmcmc.Sampler, i: jax.Array
    ) -> SGMCMCState:
        stages, broken = self.stages, after.diverging
        # A step that was too large for a start from nowhere is no reason to give up: go back, and make it smaller.
        kept, z = jax.tree.map(
            lambda a, b: jnp.where(broken, a, b), (before.engine, before.z), (after.engine, after.z)
        )
        unharmed = jnp.full_like(kept.first_divergence, -1)
        engine = kept._replace(step=after.engine.step, first_divergence=unharmed)
        state = after._replace(z=z, engine=engine, diverging=jnp.zeros_like(broken))
        if self.chooses_step_size:
            state = self.steer(state, broken, i)
        state = self._noted(state, sampler, i)
        # All chains are at the same transition, so that this stays a branch under `vmap`.
        due = jnp.any(i == jnp.array([stages.middle - 1, stages.late - 1]))
        state = lax.cond(due, lambda s: self._spread_out(s, sampler), lambda s: s, state)
        return self.finish(state, i)

    def _noted(self, state: SGMCMCState, sampler: sgmcmc.Sampler, i: jax.Array) -> SGMCMCState:
        """Take the position into variances and record."""
        stages, tuning = self.stages, state.tuning
        white = sampler.preconditioner.whiten(state.engine.adaptation, state.engine.position)
        counted = i >= stages.early
        spread = jax.tree.map(lambda a, b: jnp.where(counted, a, b), tuning.spread.add(white), tuning.spread)
        row = jnp.clip((i - stages.late) // stages.stride, 0, tuning.record.shape[0] - 1)
        recorded = tuning.record.at[row].set(chosen_coordinates(white, tuning.record.shape[1]))
        due = (i >= stages.late) & (i < stages.last)
        record = jnp.where(due, recorded, tuning.record)
        return state._replace(tuning=tuning._replace(spread=spread, record=record))

    def _spread_out(self, state: SGMCMCState, sampler: sgmcmc.Sampler) -> SGMCMCState:
        """Set the preconditioner to the variances seen, and the length to their root sum of squares."""
        tuning, engine = state.tuning, state.engine
        enough = tuning.spread.total >= LEAST
        variance, adaptation = tuning.spread.variance(), engine.adaptation
        if is_named(self._preconditioner, "variance"):
            # Its size is left to the step size.
            shape = jnp.exp(0.5 * (jnp.log(variance) - jnp.mean(jnp.log(variance))))
            adaptation = jnp.where(enough, adaptation * shape, adaptation)
            variance = variance / shape**2
        memory = engine.memory
        if self._length is None:
            length = jnp.where(enough, jnp.sqrt(jnp.sum(variance)), memory.length)
            memory = memory._replace(length=jnp.maximum(length, state.base_step_size))
        blank = Spread(*jax.tree.map(jnp.zeros_like, tuning.spread))
        again = Averaging.at(jnp.exp(tuning.averaging.average))
        tuning = tuning._replace(spread=blank, age=jnp.zeros_like(tuning.age), averaging=again)
        return state._replace(engine=engine._replace(adaptation=adaptation, memory=memory), tuning=tuning)

    def describe(self, state: SGMCMCState) -> dict[str, str | float | int]:
        lengths, energy = jax.device_get((state.engine.memory.length, state.tuning.energy))
        return {
            **super().describe(state),
            "integrator": self._integrator,
            "decoherence_length": str(np.ravel(lengths).tolist()),
            "mean_energy_variance": str(np.ravel(energy).tolist()),
        }
