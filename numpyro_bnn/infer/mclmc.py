"""Microcanonical Langevin Monte Carlo, unadjusted and with a Metropolis test."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from numpyro_bnn import sgmcmc
from numpyro_bnn._checks import argument_error, check_number
from numpyro_bnn.infer.adaptation import LEAST, autocorrelation_time, smallest_change
from numpyro_bnn.infer.microcanonical import MicrocanonicalKernel
from numpyro_bnn.infer.preconditioning import is_named
from numpyro_bnn.infer.state import SGMCMCState

__all__ = ["MCLMC", "implied_bias"]

EARLY = 100.0  # by how much the first target of the energy variance exceeds the last
NOISE_BATCHES = 32  # minibatches from which the noise of each coordinate is estimated
LEAST_NOISE = 1e-2  # of the mean noise, is assumed where less is seen
LEAST_TOLD = 10  # steps of a draw that tell their energy error, or a tenth of them
DECOHERENCE = 0.4  # decoherence length by the distance traveled per effective draw


def implied_bias(energy_variance: Any) -> Any:
    r"""Relative error of a posterior variance that an energy error implies.

    Leapfrog steps give a Gaussian direction the relative variance 1 + b, and their energy errors the variance

    .. math:: v = \frac{4 b^3}{(1 + b)^2}

    whatever the step size, where momenta are drawn exactly; the inverse of this is returned. Being concave, it bounds
    the mean of b over directions, given the mean of v, the energy variance per parameter. The largest b is at most
    that at P v, where one direction has all of the error. Microcanonical steps, by either integrator, have smaller
    errors on Gaussians at the same v, also below 0 in wide directions. Of other targets this says the order of
    magnitude.

    :param energy_variance: v >= 0.

    >>> round(float(implied_bias(4.5e-4)), 3)
    0.05
    """
    given = np.asarray(energy_variance, np.float64)
    first = np.cbrt(given / 4)
    bias = first * (1 + first) + given / 4  # above the root, from where Newton's method descends to it
    for _ in range(50):
        slope = np.where(bias > 0, 12 * bias**2 - 2 * given * (1 + bias), 1.0)
        bias = bias - (4 * bias**3 - given * (1 + bias) ** 2) / slope
    return bias[()]


class MCLMC(MicrocanonicalKernel):
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
        to the last transition of the first part of warm-up. By default the one that implies ``bias_tolerance``, from
        a hundred times as much.
    :param preconditioner: ``"variance"`` (diagonal, learned from the draws of warm-up), ``"gradient_noise"``
        (diagonal: one over the variance of the minibatch gradients), or as for the other kernels.

    Other parameters: see :class:`~numpyro_bnn.infer.SGMCMCKernel`; ``num_gradients`` counts every gradient.

    Reference: Robnik, De Luca, Silverstein & Seljak (2023); Robnik & Seljak (2024); of networks Sommer et al. (2025).

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
        if self._energy_variance is not None:
            return self._energy_variance, self._energy_variance
        tolerated = self._bias_tolerance
        last = 4 * tolerated**3 / (1 + tolerated) ** 2
        return EARLY * last, last

    def dynamics(self, full_potential: Callable, step_size: Any) -> sgmcmc.interfaces.Dynamics:
        return sgmcmc.Microcanonical(self._length, self._integrator, fresh=self.subsampled)

    @property
    def subsampled(self) -> bool:
        """Whether gradients come from minibatches."""
        return self._target is not None and bool(self._target.plates or self._target.stochastic)

    def run(self, sampler: sgmcmc.Sampler, engine: sgmcmc.State, i: jax.Array) -> sgmcmc.State:
        """Energy errors are told by a part of the steps: without them a step is cheaper."""
        told = min(self._steps_per_draw, max(LEAST_TOLD, self._steps_per_draw // 10))
        if told == self._steps_per_draw:
            return sampler.run(engine, told)
        if not self.subsampled:  # else each step evaluates the potential at its start
            potential = sampler.gradient(engine.estimator, engine.position, ())[0]
            engine = engine._replace(memory=engine.memory._replace(potential=potential))
        engine = sampler.run(engine, told)
        quiet = sgmcmc.Microcanonical(self._length, self._integrator, self.subsampled, energy=False)
        return replace(sampler, dynamics=quiet).run(engine, self._steps_per_draw - told)

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

    def steer(self, state: SGMCMCState, broken: jax.Array, i: jax.Array) -> SGMCMCState:
        """Bring a running mean of the energy variance to its target of this transition."""
        stages, tuning, energy = self.stages, state.tuning, jnp.asarray(state.energy_variance)
        dtype = energy.dtype
        first, last = map(math.log, self.energy_targets)
        share = jnp.clip((i - stages.begin) / max(stages.late - stages.begin, 1), 0.0, 1.0)
        target = jnp.exp(first + (last - first) * share).astype(dtype)
        finite = jnp.isfinite(energy) & ~broken
        # On the way to the typical set a few errors are very large: none may say more than a factor of two.
        seen = jnp.where(finite, jnp.minimum(energy, 64 * target), 64 * target)
        age = tuning.age + 1
        gain = jnp.maximum(1 / age, jnp.where(i < stages.late, 0.1, 0.0).astype(dtype))
        excess = tuning.excess + gain * (seen - tuning.excess)
        factor = smallest_change(excess, target)
        step_size = (state.base_step_size * factor).astype(state.base_step_size.dtype)
        return state._replace(
            base_step_size=step_size, tuning=tuning._replace(excess=excess * factor**6, age=age)
        )

    def finish(self, state: SGMCMCState, i: jax.Array) -> SGMCMCState:
        stages = self.stages
        if self._length is not None or stages.records < 2 * LEAST:
            return state
        return lax.cond(i == stages.last - 1, self._relaxed, lambda s: s, state)

    def _relaxed(self, state: SGMCMCState) -> SGMCMCState:
        """Set the length to a share of the distance traveled per effective draw, where draws are correlated."""
        time = autocorrelation_time(state.tuning.record) * self.stages.stride
        found = DECOHERENCE * time * self._steps_per_draw * state.base_step_size
        # Draws that are almost independent do not tell how much closer they could be.
        memory = state.engine.memory
        length = jnp.where(time > 2, found, memory.length).astype(memory.length.dtype)
        return state._replace(engine=state.engine._replace(memory=memory._replace(length=length)))

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
