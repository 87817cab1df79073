"""Microcanonical Langevin kernels: unadjusted, and with a Metropolis test."""

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from numpyro_bnn import sgmcmc
from numpyro_bnn._errors import argument_error, unknown_name
from numpyro_bnn.infer.adaptation import (
    LEAST,
    Averaging,
    Spread,
    Stages,
    Tuning,
    autocorrelation_time,
    chosen_coordinates,
    smallest_change,
    start,
)
from numpyro_bnn.infer.base import SGMCMCKernel
from numpyro_bnn.infer.preconditioning import is_named
from numpyro_bnn.infer.state import SGMCMCState
from numpyro_bnn.sgmcmc.microcanonical import INTEGRATORS
from numpyro_bnn.sgmcmc.parts import check_number

__all__ = ["AdjustedMCLMC", "MCLMC", "implied_bias"]

EARLY = 100.0  # by how much the first target of the energy variance exceeds the last
NOISE_BATCHES = 32  # minibatches from which the noise of each coordinate is estimated
LEAST_NOISE = 1e-2  # of the mean noise, is assumed where less is seen
DECOHERENCE = 0.4  # decoherence length by the distance travelled per effective draw


def implied_bias(energy_variance: Any) -> Any:
    r"""Relative error of a posterior variance that an energy error implies.

    Leapfrog steps of angle h on a Gaussian give it the variance 1 + b, b = h^2 / 4 to first order, and their energy
    errors have the variance 4 b^3: so

    .. math:: b = (v / 4)^{1/3}

    for energy variance v per parameter. Being concave, it bounds the mean over directions of unequal b; the largest
    is at most :math:`P^{1/3}` times it, where all of the error comes from one direction. McLachlan's integrator does
    better on a Gaussian at the same energy error.

    :param energy_variance: v >= 0.

    >>> round(float(implied_bias(5e-4)), 4)
    0.05

    The kernels of this package aim at v = 4 bias_tolerance^3.
    """
    return np.cbrt(np.asarray(energy_variance, np.float64) / 4)[()]


class _Microcanonical(SGMCMCKernel):
    """What both kernels share: warm-up."""

    preconditioners = ("variance",)

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
        stages = self.stages
        if stages.end == stages.begin:
            return after._replace(tuning=self._observed(after, i))
        adapted = lax.cond(i < stages.end, lambda: self._adapted(before, after, sampler, i), lambda: after)
        return adapted._replace(tuning=self._observed(adapted, i))

    def _observed(self, state: SGMCMCState, i: jax.Array) -> Tuning:
        """Note the energy variance of a draw that is kept."""
        tuning = state.tuning
        draws = tuning.draws + jnp.where(i < self.num_warmup, 0, 1)
        mean = tuning.energy + (state.energy_variance - tuning.energy) / jnp.maximum(draws, 1)
        return tuning._replace(energy=jnp.where(draws > 0, mean, tuning.energy), draws=draws)

    def _adapted(
        self, before: SGMCMCState, after: SGMCMCState, sampler: sgmcmc.Sampler, i: jax.Array
    ) -> SGMCMCState:
        stages, broken = self.stages, after.diverged
        # A step that was too large for a start from nowhere is no reason to give up: go back, and make it smaller.
        kept = jax.tree.map(lambda a, b: jnp.where(broken, a, b), before.engine, after.engine)
        engine = kept._replace(step=after.engine.step, first_divergence=jnp.full_like(kept.first_divergence, -1))
        z = jax.tree.map(lambda a, b: jnp.where(broken, a, b), before.z, after.z)
        state = after._replace(z=z, engine=engine, diverged=jnp.zeros_like(broken))
        if self.chooses_step_size:
            state = self._steered(state, broken, i)
        state = self._noted(state, sampler, i)
        # All chains are at the same transition, so that these stay branches under `vmap`.
        ends = jnp.array([stages.middle - 1, stages.late - 1])
        state = lax.cond(jnp.any(i == ends), lambda s: self._spread_out(s, sampler), lambda s: s, state)
        if self._length is None and stages.records >= 2 * LEAST:
            state = lax.cond(i == stages.last - 1, self._relaxed, lambda s: s, state)
        if self.chooses_step_size:
            state = state._replace(base_step_size=self._final(state, i))
        return state

    def _noted(self, state: SGMCMCState, sampler: sgmcmc.Sampler, i: jax.Array) -> SGMCMCState:
        """Take the position into variances and record."""
        stages, tuning = self.stages, state.tuning
        white = sampler.preconditioner.whiten(state.engine.adaptation, state.engine.position)
        counted = i >= stages.early
        spread = jax.tree.map(
            lambda a, b: jnp.where(counted, a, b), tuning.spread.add(white), tuning.spread
        )
        row = jnp.clip((i - stages.late) // stages.stride, 0, tuning.record.shape[0] - 1)
        recorded = tuning.record.at[row].set(chosen_coordinates(white, tuning.record.shape[1]))
        due = (i >= stages.late) & (i < stages.last)
        record = jnp.where(due, recorded, tuning.record)
        return state._replace(tuning=tuning._replace(spread=spread, record=record))

    def _spread_out(self, state: SGMCMCState, sampler: sgmcmc.Sampler) -> SGMCMCState:
        """Set the preconditioner to the variances seen, and the length to their root sum of squares."""
        spread, engine = state.tuning.spread, state.engine
        enough = spread.count >= LEAST
        variance, adaptation = spread.variance(), engine.adaptation
        if is_named(self._preconditioner, "variance"):
            # Its size is left to the step size.
            shape = jnp.exp(0.5 * (jnp.log(variance) - jnp.mean(jnp.log(variance))))
            adaptation = jnp.where(enough, adaptation * shape, adaptation)
            variance = variance / shape**2
        memory = engine.memory
        if self._length is None:
            length = jnp.where(enough, jnp.sqrt(jnp.sum(variance)), memory.length)
            memory = memory._replace(length=jnp.maximum(length, state.base_step_size))
        blank = jax.tree.map(jnp.zeros_like, spread)
        tuning = state.tuning._replace(spread=Spread(*blank), age=jnp.zeros_like(state.tuning.age))
        tuning = tuning._replace(averaging=Averaging.at(jnp.exp(tuning.averaging.average)))
        return state._replace(engine=engine._replace(adaptation=adaptation, memory=memory), tuning=tuning)

    def _relaxed(self, state: SGMCMCState) -> SGMCMCState:
        """Set the length to a share of the distance travelled per effective draw, where draws are correlated."""
        time = autocorrelation_time(state.tuning.record) * self.stages.stride
        found = DECOHERENCE * time * self._distance(state)
        # Draws that are almost independent do not tell how much closer they could be.
        length = jnp.where(time > 2, found, state.engine.memory.length)
        memory = state.engine.memory._replace(length=length.astype(state.engine.memory.length.dtype))
        return state._replace(engine=state.engine._replace(memory=memory))

    @abstractmethod
    def _steered(self, state: SGMCMCState, broken: jax.Array, i: jax.Array) -> SGMCMCState:
        """Change the step size after a transition."""

    @abstractmethod
    def _distance(self, state: SGMCMCState) -> jax.Array:
        """Length of the way from one draw to the next."""

    def _final(self, state: SGMCMCState, i: jax.Array) -> jax.Array:
        """The step size, which is another one when warm-up ends."""
        return state.base_step_size

    def describe(self, state: SGMCMCState) -> dict[str, str | float | int]:
        lengths = np.ravel(jax.device_get(state.engine.memory.length)).tolist()
        energy = np.ravel(jax.device_get(state.tuning.energy)).tolist()
        return {
            **super().describe(state),
            "integrator": self._integrator,
            "decoherence_length": str(lengths),
            "mean_energy_variance": str(energy),
        }


class MCLMC(_Microcanonical):
    r"""Microcanonical Langevin Monte Carlo (MCLMC), unadjusted.

    A velocity of constant size turns along the gradient and is refreshed a little at every step:

    .. math:: d\theta = u\,dt, \qquad du = (I - u u')\,\nabla \log p\,dt / (P - 1) + \mathrm{noise}, \qquad |u| = 1

    (:class:`~numpyro_bnn.sgmcmc.Microcanonical`; whitened by the preconditioner). Large gradients turn the motion
    instead of throwing it, so steps can be large. ``step_size`` is here the *length* of a step, about h sqrt(P) for a
    leapfrog step of time h. Nothing is rejected: the bias is of order step_size^2, and steered by the energy error of
    the steps, whose variance per parameter (``energy_variance``) implies it (:func:`implied_bias`).

    Warm-up, after the warm start: the step size goes to an energy variance that falls, from a hundred times the
    target, while the chain travels; then variances of the draws give preconditioner and decoherence length, and their
    autocorrelation time gives that length once more. A chain that diverges in warm-up goes back and takes smaller
    steps.

    With a subsampled plate each step integrates the potential of its own minibatch, for one gradient more. The noise
    of these gradients is a further bias, which the energy error does not tell; where it has one size in all
    directions it mostly blurs the direction, which ``preconditioner="gradient_noise"`` is for.

    :param step_size: length of a step, or a schedule of them; ``None`` has it chosen.
    :param decoherence_length: L, distance after which the direction is forgotten; ``None`` has it chosen.
    :param integrator: ``"mclachlan"`` (two gradients per step) or ``"leapfrog"`` (one).
    :param energy_variance: target of the variance of a step's energy error, per parameter; or a pair, from the first
        to the last transition of the first part of warm-up. By default ``4 * bias_tolerance**3``, which implies that
        bias, from a hundred times as much.
    :param preconditioner: ``"variance"`` (diagonal, learned from the draws of warm-up), ``"gradient_noise"``
        (diagonal: one over the variance of the minibatch gradients), or as for the other kernels.

    Other parameters: see :class:`~numpyro_bnn.infer.SGMCMCKernel`; ``num_gradients`` counts every gradient.

    Reference: Robnik, De Luca, Silverstein & Seljak (2023); Robnik & Seljak (2024); for networks Sommer et al. (2025).

    >>> import jax, numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import MCMC
    >>> def model():
    ...     numpyro.sample("x", dist.Normal(0.0, 2.0).expand([10]).to_event(1))
    >>> mcmc = MCMC(MCLMC(model, steps_per_draw=20), num_warmup=200, num_samples=500, progress_bar=False)
    >>> mcmc.run(jax.random.key(0))
    >>> bool(abs(mcmc.get_samples()["x"].std() - 2.0) < 0.2)
    True
    """

    preconditioners = ("variance", "gradient_noise")

    def __init__(
        self, model: Callable, step_size: Any = None, *, energy_variance: Any = None, **options: Any
    ) -> None:
        self._energy_variance = energy_variance
        super().__init__(model, step_size, **options)

    def _check_arguments(self) -> None:
        super()._check_arguments()
        if isinstance(self._energy_variance, tuple) and len(self._energy_variance) != 2:
            raise argument_error(
                self._call, "energy_variance", self._energy_variance, "Pass a number or (first, last)."
            )
        for target in self.energy_targets:
            check_number(self._call, "energy_variance", target, strict=True)

    @property
    def energy_targets(self) -> tuple[float, float]:
        """First and last target of the energy variance of a step, per parameter."""
        if isinstance(self._energy_variance, tuple):
            return self._energy_variance
        last = 4 * self._bias_tolerance**3 if self._energy_variance is None else self._energy_variance
        return (EARLY * last, last) if self._energy_variance is None else (last, last)

    def dynamics(self, full_potential: Callable, step_size: Any) -> sgmcmc.Dynamics:
        return sgmcmc.Microcanonical(self._length, self._integrator, fresh=self.subsampled)

    @property
    def subsampled(self) -> bool:
        """Whether gradients come from minibatches."""
        return self._target is not None and bool(self._target.plates or self._target.stochastic)

    def precondition(self, sampler: sgmcmc.Sampler, engine: sgmcmc.State, i: jax.Array) -> sgmcmc.State:
        if not is_named(self._preconditioner, "gradient_noise"):
            return engine
        if not self.subsampled:
            raise argument_error(
                self._call,
                "preconditioner",
                "gradient_noise",
                "Gradients of all the data have no noise: give the model a `subsample_size`, or take 'variance'.",
            )
        noise = sampler.gradient_noise(engine, NOISE_BATCHES)
        scale = -0.5 * jnp.log(noise + LEAST_NOISE * jnp.mean(noise))
        adaptation = jnp.exp(scale - jnp.mean(scale)).astype(engine.position.dtype)
        return engine._replace(adaptation=jnp.where(i < self.num_warmup, adaptation, engine.adaptation))

    def _steered(self, state: SGMCMCState, broken: jax.Array, i: jax.Array) -> SGMCMCState:
        stages, tuning, dtype = self.stages, state.tuning, state.energy_variance.dtype
        first, last = map(math.log, self.energy_targets)
        share = jnp.clip((i - stages.begin) / max(stages.late - stages.begin, 1), 0.0, 1.0)
        target = jnp.exp(first + (last - first) * share).astype(dtype)
        finite = jnp.isfinite(state.energy_variance) & ~broken
        # On the way to the typical set a few errors are very large: none may say more than a factor of two.
        seen = jnp.where(finite, jnp.minimum(state.energy_variance, 64 * target), 64 * target)
        age = tuning.age + 1
        gain = jnp.maximum(1 / age, jnp.where(i < stages.late, 0.1, 0.0).astype(dtype))
        excess = tuning.excess + gain * (seen - tuning.excess)
        factor = smallest_change(excess, target)
        tuning = tuning._replace(excess=excess * factor**6, age=age)
        step_size = (state.base_step_size * factor).astype(state.base_step_size.dtype)
        return state._replace(base_step_size=step_size, tuning=tuning)

    def _distance(self, state: SGMCMCState) -> jax.Array:
        """Length of the way from one draw to the next."""

    def _final(self, state: SGMCMCState, i: jax.Array) -> jax.Array:
        """The step size, which is another one when warm-up ends."""
        return state.base_step_size

    def describe(self, state: SGMCMCState) -> dict[str, str | float | int]:
        lengths = np.ravel(jax.device_get(state.engine.memory.length)).tolist()
        energy = np.ravel(jax.device_get(state.tuning.energy)).tolist()
        return {
            **super().describe(state),
            "integrator": self._integrator,
            "decoherence_length": str(lengths),
            "mean_energy_variance": str(energy),
        }


class MCLMC(_Microcanonical):
    r"""Microcanonical Langevin Monte Carlo (MCLMC), unadjusted.

    A velocity of constant size turns along the gradient and is refreshed a little at every step:

    .. math:: d\theta = u\,dt, \qquad du = (I - u u')\,\nabla \log p\,dt / (P - 1) + \mathrm{noise}, \qquad |u| = 1

    (:class:`~numpyro_bnn.sgmcmc.Microcanonical`; whitened by the preconditioner). Large gradients turn the motion
    instead of throwing it, so steps can be large. ``step_size`` is here the *length* of a step, about h sqrt(P) for a
    leapfrog step of time h. Nothing is rejected: the bias is of order step_size^2, and steered by the energy error of
    the steps, whose variance per parameter (``energy_variance``) implies it (:func:`implied_bias`).

    Warm-up, after the warm start: the step size goes to an energy variance that falls, from a hundred times the
    target, while the chain travels; then variances of the draws give preconditioner and decoherence length, and their
    autocorrelation time gives that length once more. A chain that diverges in warm-up goes back and takes smaller
    steps.

    With a subsampled plate each step integrates the potential of its own minibatch, for one gradient more. The noise
    of these gradients is a further bias, which the energy error does not tell; where it has one size in all
    directions it mostly blurs the direction, which ``preconditioner="gradient_noise"`` is for.

    :param step_size: length of a step, or a schedule of them; ``None`` has it chosen.
    :param decoherence_length: L, distance after which the direction is forgotten; ``None`` has it chosen.
    :param integrator: ``"mclachlan"`` (two gradients per step) or ``"leapfrog"`` (one).
    :param energy_variance: target of the variance of a step's energy error, per parameter; or a pair, from the first
        to the last transition of the first part of warm-up. By default ``4 * bias_tolerance**3``, which implies that
        bias, from a hundred times as much.
    :param preconditioner: ``"variance"`` (diagonal, learned from the draws of warm-up), ``"gradient_noise"``
        (diagonal: one over the variance of the minibatch gradients), or as for the other kernels.

    Other parameters: see :class:`~numpyro_bnn.infer.SGMCMCKernel`; ``num_gradients`` counts every gradient.

    Reference: Robnik, De Luca, Silverstein & Seljak (2023); Robnik & Seljak (2024); for networks Sommer et al. (2025).

    >>> import jax, numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import MCMC
    >>> def model():
    ...     numpyro.sample("x", dist.Normal(0.0, 2.0).expand([10]).to_event(1))
    >>> mcmc = MCMC(MCLMC(model, steps_per_draw=20), num_warmup=200, num_samples=500, progress_bar=False)
    >>> mcmc.run(jax.random.key(0))
    >>> bool(abs(mcmc.get_samples()["x"].std() - 2.0) < 0.2)
    True
    """

    preconditioners = ("variance", "gradient_noise")

    def __init__(
        self, model: Callable, step_size: Any = None, *, energy_variance: Any = None, **options: Any
    ) -> None:
        self._energy_variance = energy_variance
        super().__init__(model, step_size, **options)

    def _check_arguments(self) -> None:
        super()._check_arguments()
        if isinstance(self._energy_variance, tuple) and len(self._energy_variance) != 2:
            raise argument_error(
                self._call, "energy_variance", self._energy_variance, "Pass a number or (first, last)."
            )
        for target in self.energy_targets:
            check_number(self._call, "energy_variance", target, strict=True)

    @property
    def energy_targets(self) -> tuple[float, float]:
        """First and last target of the energy variance of a step, per parameter."""
        if isinstance(self._energy_variance, tuple):
            return self._energy_variance
        last = 4 * self._bias_tolerance**3 if self._energy_variance is None else self._energy_variance
        return (EARLY * last, last) if self._energy_variance is None else (last, last)

    def dynamics(self, full_potential: Callable, step_size: Any) -> sgmcmc.Dynamics:
        return sgmcmc.Microcanonical(self._length, self._integrator, fresh=self.subsampled)

    @property
    def subsampled(self) -> bool:
        """Whether gradients come from minibatches."""
        return self._target is not None and bool(self._target.plates or self._target.stochastic)

    def precondition(self, sampler: sgmcmc.Sampler, engine: sgmcmc.State, i: jax.Array) -> sgmcmc.State:
        if not is_named(self._preconditioner, "gradient_noise"):
            return engine
        if not self.subsampled:
            raise argument_error(
                self._call,
                "preconditioner",
                "gradient_noise",
                "Gradients of all the data have no noise: give the model a `subsample_size`, or take 'variance'.",
            )
        noise = sampler.gradient_noise(engine, NOISE_BATCHES)
        scale = -0.5 * jnp.log(noise + LEAST_NOISE * jnp.mean(noise))
        adaptation = jnp.exp(scale - jnp.mean(scale)).astype(engine.position.dtype)
        return engine._replace(adaptation=jnp.where(i < self.num_warmup, adaptation, engine.adaptation))

    def _steered(self, state: SGMCMCState, broken: jax.Array, i: jax.Array) -> SGMCMCState:
        stages, tuning, dtype = self.stages, state.tuning, state.energy_variance.dtype
        first, last = map(math.log, self.energy_targets)
        share = jnp.clip((i - stages.begin) / max(stages.late - stages.begin, 1), 0.0, 1.0)
        target = jnp.exp(first + (last - first) * share).astype(dtype)
        finite = jnp.isfinite(state.energy_variance) & ~broken
        # On the way to the typical set a few errors are very large: none may say more than a factor of two.
        seen = jnp.where(finite, jnp.minimum(state.energy_variance, 64 * target), 64 * target)
        age = tuning.age + 1
        gain = jnp.maximum(1 / age, jnp.where(i < stages.late, 0.1, 0.0).astype(dtype))
        excess = tuning.excess + gain * (seen - tuning.excess)
        factor = smallest_change(excess, target)
        tuning = tuning._replace(excess=excess * factor**6, age=age)
        step_size = (state.base_step_size * factor).astype(state.base_step_size.dtype)
        # Until draws tell a length: that of a standard normal posterior.
        memory = state.engine.memory
        if self._length is None:
            assumed = jnp.asarray(state.engine.position.size**0.5, memory.length.dtype)
            length = jnp.where(jnp.isfinite(memory.length), memory.length, jnp.maximum(assumed, step_size))
            memory = memory._replace(length=length)
        engine = state.engine._replace(memory=memory)
        return state._replace(base_step_size=step_size, tuning=tuning, engine=engine)

    def _distance(self, state: SGMCMCState) -> jax.Array:
        return state.base_step_size * self._steps_per_draw

    def describe(self, state: SGMCMCState) -> dict[str, str | float | int]:
        """With the bias of variances that the energy errors of the draws imply (largest of the chains): its mean over
        directions, and at most, were all of the error in one direction."""
        energy = float(np.max(jax.device_get(state.tuning.energy)))
        size = int(state.engine.position.shape[-1])
        return {
            **super().describe(state),
            "target_energy_variance": self.energy_targets[1],
            "implied_bias": float(implied_bias(energy)),
            "implied_bias_bound": float(implied_bias(size * energy)),
        }


class AdjustedMCLMC(_Microcanonical):
    r"""Metropolis-adjusted microcanonical Monte Carlo: exact.

    Trajectories of :class:`MCLMC` without noise, of random length, from a new direction, each with a Metropolis test
    on the change of the energy, in which the turns of the direction enter by their Jacobians
    (:class:`~numpyro_bnn.sgmcmc.MicrocanonicalMetropolis`). On rejection the chain stays, and its direction is flipped. A
    ``subsample_size`` of the model is set aside: it uses all the data.

    Warm-up: dual averaging of the step size to ``target_accept``; preconditioner and length as for :class:`MCLMC`.

    :param step_size: length of a step; ``None`` has it chosen.
    :param decoherence_length: L, mean length of a trajectory; ``None`` has it chosen.
    :param integrator: as for :class:`MCLMC`.
    :param target_accept: acceptance that the step size is chosen for.
    :param momentum_decay: share of the direction that a new trajectory forgets, in (0, 1]; 1 draws it anew.
    :param max_steps: bound of the steps of a trajectory.
    :param steps_per_draw: trajectories per draw.

    Other parameters: see :class:`~numpyro_bnn.infer.SGMCMCKernel`.

    Reference: Robnik, Cohn-Gordon & Seljak (2025).

    >>> AdjustedMCLMC(lambda: None).default_fields[-1]
    'accept_prob'
    """

    exact = True

    def __init__(
        self,
        model: Callable,
        step_size: Any = None,
        *,
        target_accept: float = 0.9,
        momentum_decay: float = 1.0,
        max_steps: int = 1000,
        steps_per_draw: int = 5,
        **options: Any,
    ) -> None:
        if options.get("gradient", "minibatch") != "minibatch" or "bias_tolerance" in options:
            raise argument_error(
                "infer.AdjustedMCLMC",
                "gradient or bias_tolerance",
                "a value",
                "It uses the full gradient and has no bias: leave them.",
            )
        self.target_accept = target_accept
        self._momentum_decay = momentum_decay
        self._max_steps = max_steps
        super().__init__(model, step_size, steps_per_draw=steps_per_draw, **options)

    def _check_arguments(self) -> None:
        super()._check_arguments()
        check_number(self._call, "target_accept", self.target_accept, strict=True)
        if self.target_accept is not None and self.target_accept >= 1:
            raise argument_error(self._call, "target_accept", self.target_accept, "Pass a number in (0, 1).")
        self.dynamics(lambda z: z, 1.0)  # the part checks the rest

    def dynamics(self, full_potential: Callable, step_size: Any) -> sgmcmc.Dynamics:
        return sgmcmc.MicrocanonicalMetropolis(
            self._length, self._integrator, momentum_decay=self._momentum_decay, max_steps=self._max_steps
        )

    def estimator(self, potential: Callable, full: Callable, stream: Any) -> sgmcmc.Gradient:
        return sgmcmc.Full(full)

    def _steered(self, state: SGMCMCState, broken: jax.Array, i: jax.Array) -> SGMCMCState:
        tuning, memory = state.tuning, state.engine.memory
        # The first guess came after the start of this memory.
        begun = jax.tree.map(
            lambda a, b: jnp.where(i == self.stages.begin, a, b),
            Averaging.at(state.base_step_size),
            tuning.averaging,
        )
        accept = jnp.where(broken | ~jnp.isfinite(state.accept_prob), 0.0, state.accept_prob)
        averaging = begun.update(self.target_accept - accept)
        step_size = jnp.exp(averaging.value).astype(state.base_step_size.dtype)
        if self._length is None:  # until draws tell one: of a standard normal posterior, or ten steps
            assumed = jnp.minimum(state.engine.position.size**0.5, 10 * step_size)
            length = jnp.where(i < self.stages.middle, assumed, memory.length).astype(memory.length.dtype)
            memory = memory._replace(length=length)
        engine = state.engine._replace(memory=memory)
        return state._replace(
            base_step_size=step_size, tuning=tuning._replace(averaging=averaging), engine=engine
        )

    def _final(self, state: SGMCMCState, i: jax.Array) -> jax.Array:
        average = jnp.exp(state.tuning.averaging.average).astype(state.base_step_size.dtype)
        return jnp.where(i == self.stages.end - 1, average, state.base_step_size)

    def _distance(self, state: SGMCMCState) -> jax.Array:
        return state.engine.memory.length * self._steps_per_draw
