"""Microcanonical Langevin Monte Carlo: the kernel, and its warm-up."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from numpyro_bnn import sgmcmc
from numpyro_bnn._checks import argument_error
from numpyro_bnn._options import Choice, Model, Number, PositiveOrInfinite, checked
from numpyro_bnn.infer.base import SGMCMCKernel
from numpyro_bnn.infer.chain import Policy, SGMCMCState, Tuner
from numpyro_bnn.infer.preconditioning import NoisePreconditioner, is_named
from numpyro_bnn.infer.target import Target
from numpyro_bnn.infer.tuning import (
    Noise,
    Spread,
    Stages,
    autocorrelation_time,
    implied_bias,
    listed,
)

EARLY = 100.0  # the first target of the energy variance, as a multiple of the last
# largest energy error of a step that is taken, in standard deviations of the last
# target
LARGEST = 24.0
LEAST_LARGEST = 15.0  # lower limit of it, in nats
EARLY_LARGEST = 12.0  # lower limit of it, in standard deviations of the first target
# largest energy error that adaptation counts, in standard deviations of the target
COUNTED = 8.0
GROWTH = 1.25  # largest factor by which a transition of warm-up lengthens the steps
# refused steps in a row after which a chain starts again in warm-up, where its steps
# get shorter
PATIENCE = 2000
# maximum number of coordinates from which the autocorrelation time is estimated
RECORDED = 256
LEAST = 10  # minimum number of transitions for a variance
DECOHERENCE = (
    0.4  # decoherence length as a fraction of the distance traveled per effective draw
)
INTEGRATORS = ("mclachlan", "leapfrog")  # the default without and with minibatches
NOISY_LENGTH = 10.0  # decoherence length in steps, where gradient noise limits these


class MCLMC(SGMCMCKernel):
    r"""Microcanonical Langevin Monte Carlo (MCLMC): fast, unadjusted sampling at
    constant speed.

    A velocity of constant size turns along the gradient and is partially refreshed at
    every step:

    .. math:: d\theta = u\,dt, \qquad du = (I - u u')\,\nabla \log p\,dt / (P - 1) +
              \mathrm{noise}, \qquad |u| = 1

    (:class:`~numpyro_bnn.sgmcmc.Microcanonical`; whitened by the preconditioner). A
    large gradient changes the direction, never the speed, so steps can be large.
    ``step_size`` is here the *length* of a step, about h sqrt(P) for a leapfrog step of
    time h. There is no Metropolis test: the bias is of order step_size^2. It is
    controlled by the energy error of the steps, whose variance per parameter
    (``energy_variance``) implies it (:func:`implied_bias`). A step whose error is not
    finite or far outside of its distribution (above :meth:`max_energy_error` nats) is
    refused, and the chain turns back; one that takes no step any more is marked.

    Warm-up, after the warm start: while the chain travels, the step size is adapted to
    an energy variance that falls from at most a hundred times the target; then
    variances of the draws set preconditioner and decoherence length, and their
    autocorrelation time sets that length again.

    With a subsampled plate a step integrates the potential of its own minibatch, for
    one more gradient. Energy errors do not show gradient noise: steps as long as they
    allow follow one minibatch until their direction is all noise. Noise of one size in
    all directions is only another refresh, so the preconditioner is learned from it,
    and what is uneven limits the steps. :class:`~numpyro_bnn.infer.SGNHT` does the same
    with half the gradients: prefer it there.

    :param step_size: length of a step, or a schedule of them; ``None`` chooses it in
        warm-up.
    :param decoherence_length: L, distance after which the direction is forgotten;
        ``None`` chooses it in warm-up.
    :param integrator: ``"mclachlan"`` (two gradients per step) or ``"leapfrog"`` (one;
        the default with minibatches).
    :param energy_variance: target of the variance of a step's energy error, per
        parameter; or a pair: the target at the start and at the end of the first part
        of warm-up. By default it ends at the value that implies ``bias_tolerance`` and
        starts at a hundred times that, or where refusals would become frequent; on
        minibatches steps aim for it only if it is given.
    :param preconditioner: ``"variance"`` (diagonal, learned from the draws of warm-up;
        the default without minibatches or if ``step_size`` is given), or as for the
        other kernels.
    :raises ValueError: for numbers out of range; on initialization, for fewer than two
        parameters.

    Other parameters: see :class:`~numpyro_bnn.infer.SGMCMCKernel`; ``num_gradients``
    counts every gradient.

    Reference: Robnik, De Luca, Silverstein & Seljak (2023); Robnik & Seljak (2024);
    Sommer et al. (2025) for BNNs.

    >>> import jax, numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import MCMC
    >>> def model():
    ...     numpyro.sample("x", dist.Normal(0.0, 2.0).expand([10]).to_event(1))
    >>> mcmc = MCMC(
    ...     MCLMC(model, steps_per_draw=20),
    ...     num_warmup=200,
    ...     num_samples=500,
    ...     progress_bar=False,
    ... )
    >>> mcmc.run(jax.random.key(0))
    >>> bool(abs(mcmc.get_samples()["x"].std() - 2.0) < 0.2)
    True
    """

    preconditioners = ("variance",)
    usual_preconditioner = "variance"

    @checked("infer.{}")
    def __init__(
        self,
        model: Model,
        step_size: Any = None,
        *,
        decoherence_length: PositiveOrInfinite | None = None,
        integrator: Annotated[str, Choice(sorted(INTEGRATORS))] | None = None,
        energy_variance: Any = None,
        **options: Any,
    ) -> None:
        self._decoherence_length = decoherence_length
        self._integrator = integrator
        self._energy_variance = energy_variance
        super().__init__(model, step_size, **options)

    def _check_arguments(self) -> None:
        super()._check_arguments()
        call, pair = self._call, self._energy_variance
        Number(strict=True).check(call, "temperature", self._temperature)
        if isinstance(pair, tuple) and len(pair) != 2:
            raise argument_error(
                call, "energy_variance", pair, "Pass a number or (first, last)."
            )
        for target in self.energy_targets:
            Number(strict=True).check(call, "energy_variance", target)

    @property
    def energy_targets(self) -> tuple[float, float]:
        """First and last target of the energy variance of a step, per parameter."""
        given = self._energy_variance
        if given is not None:
            return given if isinstance(given, tuple) else (given, given)
        tolerated = self._bias_tolerance
        last = 4 * tolerated**3 / (1 + tolerated) ** 2
        return EARLY * last, last

    def max_energy_error(self, num_parameters: int) -> float:
        """Largest energy error of a step that is taken, in nats: beyond errors as large
        as the target's.

        >>> round(MCLMC(lambda: None).max_energy_error(4475), 1)
        34.2
        """
        last = (num_parameters * self.energy_targets[1]) ** 0.5
        return max(LARGEST * last, LEAST_LARGEST)

    def max_warm_up_error(self, num_parameters: int) -> float:
        """The same in warm-up, where a target that is given may begin far above the
        last.
        """
        first = (num_parameters * self.energy_targets[0]) ** 0.5
        early = EARLY_LARGEST * first if self._energy_variance is not None else 0.0
        return max(early, self.max_energy_error(num_parameters))

    def dynamics(self, step_size: Any) -> sgmcmc.interfaces.Dynamics:
        length, integrator = (
            self._decoherence_length,
            self._integrator or INTEGRATORS[0],
        )
        return sgmcmc.Microcanonical(length, integrator, max_energy_error=math.inf)

    def sampler(
        self, target: Target, z: Any, base: jax.Array, evaluate: Callable
    ) -> sgmcmc.Sampler:
        built, size = (
            super().sampler(target, z, base, evaluate),
            sum(map(jnp.size, jax.tree.leaves(z))),
        )
        integrator = self._integrator or INTEGRATORS[target.subsampled]
        dynamics = sgmcmc.Microcanonical(
            self._decoherence_length, integrator, target.subsampled
        )
        dynamics = replace(
            dynamics,
            max_energy_error=self.max_energy_error(size),
            max_warm_up_error=self.max_warm_up_error(size),
        )
        return replace(built, dynamics=dynamics)

    def choose_step_size(
        self, curvature: jax.Array, noise: Noise, size: int
    ) -> jax.Array:
        """A quarter of the stable length, where a time step h has length h sqrt(P), as
        a momentum from N(0, I) has.

        Per step, noise of variance V turns the direction by a squared angle eps^2 V /
        (P T^2), at most that of the refreshes, 2 eps / L; noise V + D makes a variance
        too large by eps^2 D / (eps^2 V + 2 P T^2 eps / L).
        """
        noisy = self._temperature * jnp.sqrt(
            2 * size / NOISY_LENGTH * noise.limit(self._bias_tolerance, 1.0)
        )
        return jnp.minimum(self.stable_step_size(curvature, jnp.zeros(()), size), noisy)

    def steps_to_forget(self, step_size: Any, size: int) -> Any:
        return 0.5 + size * self._temperature**2 / (NOISY_LENGTH * step_size**2)

    def stable_step_size(
        self, curvature: jax.Array, noise: jax.Array, size: int
    ) -> jax.Array:
        return jnp.sqrt(0.25 / (curvature * (1 + noise)) * size)

    def make_policy(self, target: Target, num_warmup: int) -> Policy:
        policy = super().make_policy(target, num_warmup)
        tuner = EnergyTuner(
            stages=Stages.of(policy.warm_start_length, num_warmup),
            steps_per_draw=self._steps_per_draw,
            energy_targets=self.energy_targets,
            max_energy_error=self.max_warm_up_error,
            steers_step_size=policy.chooses_step_size,
            sets_length=self._decoherence_length is None,
            sets_scales=self._preconditioner is None
            or is_named(self._preconditioner, "variance"),
        )
        return replace(policy, steers_step_size=True, tuner=tuner)

    def learning_noise(self, policy: Policy, noise: NoisePreconditioner) -> Policy:
        """Noise limits the steps, unless a target of their energy errors is given."""
        steers, free = (
            self._energy_variance is not None,
            self._decoherence_length is None,
        )
        given = {
            "steers_step_size": steers and policy.chooses_step_size,
            "sets_length": steers and free,
        }
        given |= {"sets_scales": False, "fixes_refreshes": free and not steers}
        policy = replace(super().learning_noise(policy, noise), steers_step_size=steers)
        return replace(policy, tuner=replace(cast(Any, policy.tuner), **given))

    def describe(self, state: SGMCMCState) -> dict[str, str | float | int]:
        """Attributes of a run, with the bias of variances that the energy errors of its
        draws imply.

        For the worst chain: its mean over directions, and a bound, as if one direction
        had all the error.
        """
        lengths, tuning, frozen = jax.device_get(
            (state.engine.memory.length, state.tuning, state.diverging)
        )
        size = int(state.engine.position.shape[-1])
        energies = np.where(
            (np.asarray(state.coverage.draws) > 0) & (tuning.taken == 0),
            np.nan,
            tuning.energy,
        )
        alive = energies[np.isfinite(energies)]  # NaN if no step was taken
        bias, bound = (
            implied_bias(f * alive.max()) if alive.size else math.nan for f in (1, size)
        )
        steered = self.policy.noise is None or self._energy_variance is not None
        target = {"target_energy_variance": self.energy_targets[1]} if steered else {}
        return {
            **super().describe(state),
            "integrator": self._integrator or INTEGRATORS[self.target.subsampled],
            "decoherence_length": listed(lengths),
            "mean_energy_variance": listed(energies),
            **target,
            "max_energy_error": self.max_energy_error(size),
            "frozen": listed(frozen),
            "implied_bias": float(bias),
            "implied_bias_bound": float(bound),
        }


class Tuning(NamedTuple):
    """What a chain accumulates.

    :param excess: running mean of the energy variance of a step, scaled to the current
        step size.
    :param age: number of transitions in it; ``spread``: running variances of whitened
        positions.
    :param record: positions (M, K), for the autocorrelation time.
    :param energy: mean energy variance of the steps taken since warm-up.
    :param taken: fraction of the steps that were taken, summed over these draws.
    """

    excess: jax.Array
    age: jax.Array
    spread: Spread
    record: jax.Array
    energy: jax.Array
    taken: jax.Array


@dataclass(frozen=True)
class EnergyTuner(Tuner):
    """Adapt step size, decoherence length and preconditioner in warm-up.

    :param energy_targets: first and last target of the energy variance.
    :param max_energy_error: the largest energy error in warm-up, in nats, for a number
        of parameters.
    :param steers_step_size: whether the step size is adapted; ``sets_length``: the
        decoherence length.
    :param sets_scales: whether variances of the draws set the preconditioner;
        ``fixes_refreshes``: whether the decoherence length is a number of steps.
    """

    stages: Stages
    steps_per_draw: int
    energy_targets: tuple[float, float]
    max_energy_error: Callable[[int], float]
    steers_step_size: bool
    sets_length: bool
    sets_scales: bool
    fixes_refreshes: bool = False

    patience = PATIENCE

    def start(self, position: jax.Array, step_size: jax.Array) -> Tuning:
        zeros, zero = jnp.zeros_like(position), jnp.zeros((), position.dtype)
        record = jnp.zeros(
            (max(self.stages.records, 1), min(position.size, RECORDED)), position.dtype
        )
        return Tuning(zero, zero, Spread(zeros, zeros, zero), record, zero, zero)

    def adapt(
        self,
        before: SGMCMCState,
        after: SGMCMCState,
        sampler: sgmcmc.Sampler,
        i: jax.Array,
    ) -> SGMCMCState:
        """Adapt the step size after every transition of the warm-up, length and
        preconditioner after some.
        """
        state, refused, warming = after, after.refused_steps, i < self.stages.end
        if self.stages.end > self.stages.begin:
            state = lax.cond(
                warming, lambda: self._adapted(state, sampler, i), lambda: state
            )
        if self.fixes_refreshes:
            memory = state.engine.memory._replace(
                length=NOISY_LENGTH * state.base_step_size
            )
            state = state._replace(engine=state.engine._replace(memory=memory))
        # The mean energy variance of the steps that were taken in the draws that are
        # kept.
        tuning, now = state.tuning, jnp.where(warming, 0.0, 1 - refused)
        taken = tuning.taken + now
        energy = tuning.energy + now / jnp.maximum(taken, 1e-6) * (
            state.energy_variance - tuning.energy
        )
        return self._marked(
            state._replace(tuning=tuning._replace(energy=energy, taken=taken)), sampler
        )

    def _marked(self, state: SGMCMCState, sampler: sgmcmc.Sampler) -> SGMCMCState:
        """Mark a chain as diverging whose steps are lost in the rounding of its
        position.
        """
        engine = state.engine
        white = sampler.preconditioner.whiten(engine.adaptation, engine.position)
        typical = jnp.exp(jnp.mean(jnp.log(jnp.abs(white)))) * white.size**0.5
        frozen = state.base_step_size < jnp.finfo(white.dtype).eps * typical
        since = engine.step - jnp.maximum(engine.refused_in_a_row, 1)
        first = jnp.where(
            frozen & (engine.first_divergence < 0), since, engine.first_divergence
        )
        return state._replace(
            engine=engine._replace(first_divergence=first), diverging=first >= 0
        )

    def _adapted(
        self, state: SGMCMCState, sampler: sgmcmc.Sampler, i: jax.Array
    ) -> SGMCMCState:
        stages = self.stages
        if self.steers_step_size:
            state = self._steered(state, i)
        state = self._recorded(state, sampler, i)
        # All chains are at the same transition, so that this stays a branch under
        # `vmap`.
        due = jnp.any(i == jnp.array([stages.middle - 1, stages.late - 1]))
        state = lax.cond(due, self._rescaled, lambda s: s, state)
        if not self.sets_length or stages.records < 2 * LEAST:
            return state
        return lax.cond(i == stages.last - 1, self._relaxed, lambda s: s, state)

    def _steered(self, state: SGMCMCState, i: jax.Array) -> SGMCMCState:
        """Adapt the step size so that a running mean of the energy variance meets the
        target of this transition.

        Errors have heavy tails, so each is limited to eight standard deviations of the
        target, where those of refused steps count as well: a mean at the target leaves
        at most one step in 64 refused.
        """
        stages, tuning, energy = (
            self.stages,
            state.tuning,
            jnp.asarray(state.energy_variance),
        )
        refused, dtype, size = (
            state.refused_steps,
            energy.dtype,
            tuning.spread.mean.size,
        )
        first, last = self.energy_targets
        early = max(
            last, min(first, (self.max_energy_error(size) / EARLY_LARGEST) ** 2 / size)
        )
        share = jnp.clip(
            (i - stages.begin) / max(stages.late - stages.begin, 1), 0.0, 1.0
        )
        target = (early * (last / early) ** share).astype(dtype)
        largest = COUNTED**2 * target
        seen = (1 - refused) * jnp.minimum(energy, largest) + refused * largest
        age = tuning.age + 1
        gain = jnp.maximum(1 / age, jnp.where(i < stages.late, 0.1, 0.0).astype(dtype))
        excess = tuning.excess + gain * (seen - tuning.excess)
        # The energy variance grows like the sixth power of the step size.
        factor = jnp.clip(
            (target / jnp.maximum(excess, jnp.finfo(excess.dtype).tiny)) ** (1 / 6),
            0.3,
            GROWTH,
        )
        factor = jnp.where(refused > 0.5, jnp.minimum(factor, 0.5), factor)
        # Of a chain that is marked, the step size shows where it was lost.
        factor = jnp.where(state.diverging, 1.0, factor)
        step_size = (state.base_step_size * factor).astype(state.base_step_size.dtype)
        return state._replace(
            base_step_size=step_size,
            tuning=tuning._replace(excess=excess * factor**6, age=age),
        )

    def _recorded(
        self, state: SGMCMCState, sampler: sgmcmc.Sampler, i: jax.Array
    ) -> SGMCMCState:
        """Add the position to variances and record."""
        stages, tuning = self.stages, state.tuning
        white = sampler.preconditioner.whiten(
            state.engine.adaptation, state.engine.position
        )
        counted = i >= stages.early
        spread = jax.tree.map(
            lambda a, b: jnp.where(counted, a, b),
            tuning.spread.add(white),
            tuning.spread,
        )
        row = jnp.clip(
            (i - stages.late) // stages.stride, 0, tuning.record.shape[0] - 1
        )
        chosen = jnp.linspace(0, white.size - 1, tuning.record.shape[1]).astype(
            jnp.int32
        )
        due = (i >= stages.late) & (i < stages.last)
        record = jnp.where(due, tuning.record.at[row].set(white[chosen]), tuning.record)
        return state._replace(tuning=tuning._replace(spread=spread, record=record))

    def _rescaled(self, state: SGMCMCState) -> SGMCMCState:
        """Set the preconditioner to the variances seen, and the length to their root
        sum of squares.
        """
        tuning, engine = state.tuning, state.engine
        enough = tuning.spread.total >= LEAST
        variance, adaptation = tuning.spread.variance(), engine.adaptation
        if self.sets_scales:
            # Only the shape: its scale is absorbed by the step size.
            shape = jnp.exp(0.5 * (jnp.log(variance) - jnp.mean(jnp.log(variance))))
            adaptation = jnp.where(enough, adaptation * shape, adaptation)
            variance = variance / shape**2
        memory = engine.memory
        if self.sets_length:
            length = jnp.where(enough, jnp.sqrt(jnp.sum(variance)), memory.length)
            memory = memory._replace(length=jnp.maximum(length, state.base_step_size))
        blank = Spread(*jax.tree.map(jnp.zeros_like, tuning.spread))
        tuning = tuning._replace(spread=blank, age=jnp.zeros_like(tuning.age))
        return state._replace(
            engine=engine._replace(adaptation=adaptation, memory=memory), tuning=tuning
        )

    def _relaxed(self, state: SGMCMCState) -> SGMCMCState:
        """Set the length to a fraction of the distance traveled per effective draw, if
        draws are correlated.
        """
        time = autocorrelation_time(state.tuning.record) * self.stages.stride
        found = DECOHERENCE * time * self.steps_per_draw * state.base_step_size
        # Nearly independent draws do not show how much closer together they could be.
        memory = state.engine.memory
        length = jnp.where(time > 2, found, memory.length).astype(memory.length.dtype)
        return state._replace(
            engine=state.engine._replace(memory=memory._replace(length=length))
        )
