"""Microcanonical Langevin Monte Carlo: the kernel, and its warm-up."""

from dataclasses import dataclass
from typing import Annotated

import jax.numpy as jnp
from jax import Array

from numpyro_bnn import sgmcmc
from numpyro_bnn._checks import argument_error
from numpyro_bnn._options import Choice, Number, PositiveOrInfinite
from numpyro_bnn._types import Scalar
from numpyro_bnn.infer.base import RunPlan, SGMCMCKernel
from numpyro_bnn.infer.energy import (
    NOISY_LENGTH,
    AdaptEnergy,
    FixRefreshes,
    LearnScales,
    MeasureEnergy,
    Stages,
)
from numpyro_bnn.infer.phases import Phase, SGMCMCState
from numpyro_bnn.infer.preconditioning import is_named
from numpyro_bnn.infer.step_size import Noise

EARLY = 100.0  # the first target of the energy variance, as a multiple of the last
# largest energy error of a step that is taken, in standard deviations of the last
# target
LARGEST = 24.0
LEAST_LARGEST = 15.0  # lower limit of it, in nats
EARLY_LARGEST = 12.0  # lower limit of it, in standard deviations of the first target
INTEGRATORS = ("mclachlan", "leapfrog")  # the default without and with minibatches


@dataclass(eq=False, repr=False, kw_only=True)
class MCLMC(SGMCMCKernel):
    r"""Sample functions that mix slowly, with a small bias that is measured:
    microcanonical Langevin Monte Carlo, at constant speed.

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
    takes_random_models = False  # its energy errors would not show their noise
    patience = 2000  # its steps get shorter in warm-up

    decoherence_length: PositiveOrInfinite | None = None
    integrator: Annotated[str, Choice(sorted(INTEGRATORS))] | None = None
    energy_variance: float | tuple[float, float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        call, pair = self._call, self.energy_variance
        Number(strict=True).check(call, "temperature", self.temperature)
        if isinstance(pair, tuple) and len(pair) != 2:
            raise argument_error(
                call, "energy_variance", pair, "Pass a number or (first, last)."
            )
        for target in self.energy_targets:
            Number(strict=True).check(call, "energy_variance", target)

    @property
    def energy_targets(self) -> tuple[float, float]:
        """First and last target of the energy variance of a step, per parameter."""
        variance = self.energy_variance
        if variance is not None:
            return variance if isinstance(variance, tuple) else (variance, variance)
        tolerated = self.bias_tolerance
        last = 4 * tolerated**3 / (1 + tolerated) ** 2
        return EARLY * last, last

    def max_energy_error(self, num_parameters: int) -> float:
        """Energy error in nats beyond which a step is refused: well above errors of the
        target's size.

        >>> round(MCLMC(lambda: None).max_energy_error(4475), 1)
        34.2
        """
        last = (num_parameters * self.energy_targets[1]) ** 0.5
        return max(LARGEST * last, LEAST_LARGEST)

    def max_warm_up_error(self, num_parameters: int) -> float:
        """Energy error beyond which a step of the warm-up is refused, where a target
        that is given may begin far above the last.
        """
        first = (num_parameters * self.energy_targets[0]) ** 0.5
        early = EARLY_LARGEST * first if self.energy_variance is not None else 0.0
        return max(early, self.max_energy_error(num_parameters))

    def dynamics(
        self, step_size: float, size: int, noisy: bool
    ) -> sgmcmc.interfaces.Dynamics:
        return sgmcmc.Microcanonical(
            self.decoherence_length,
            self.integrator or INTEGRATORS[noisy],
            noisy,
            max_energy_error=self.max_energy_error(size),
            max_warm_up_error=self.max_warm_up_error(size),
        )

    def choose_step_size(self, curvature: Array, noise: Noise, size: int) -> Array:
        """Choose the length of the first steps: a quarter of the longest stable one,
        where a time step h has length h sqrt(P), as a momentum from N(0, I) has.

        Per step, noise of variance V turns the direction by a squared angle eps^2 V /
        (P T^2), at most that of the refreshes, 2 eps / L; noise V + D makes a variance
        too large by eps^2 D / (eps^2 V + 2 P T^2 eps / L).
        """
        noisy = self.temperature * jnp.sqrt(
            2 * size / NOISY_LENGTH * noise.limit(self.bias_tolerance, 1.0)
        )
        return jnp.minimum(self.stable_step_size(curvature, jnp.zeros(()), size), noisy)

    def steps_to_forget(self, step_size: Scalar, size: int) -> Scalar:
        return 0.5 + size * self.temperature**2 / (NOISY_LENGTH * step_size**2)

    def stable_step_size(self, curvature: Array, noise: Array, size: int) -> Array:
        return jnp.sqrt(0.25 / (curvature * (1 + noise)) * size)

    def adapting(self, plan: RunPlan) -> list[Phase]:
        """Phases of warm-up in which energy errors choose the step size; on minibatches
        the gradient noise does, unless a target of the energy errors is given.
        """
        stages = Stages.of(plan.warm_up.begin, plan.warm_up.end)
        limited, size = self._is_limited_by_noise(plan), plan.size
        phases: list[Phase] = []
        if self.step_size is None and not limited:
            first, last = self.energy_targets
            # Where refusals would become frequent, or at the target.
            refused = (self.max_warm_up_error(size) / EARLY_LARGEST) ** 2 / size
            most = self.max_energy_error(size) ** 2 / size
            first = max(last, min(first, refused))
            phases.append(AdaptEnergy(stages, first, last, most))
        free = self.decoherence_length is None
        named = self.preconditioner is None or is_named(self.preconditioner, "variance")
        sets_scales = named and plan.learned is None
        if limited and free:
            phases.append(FixRefreshes())
        elif sets_scales or free:
            phases.append(LearnScales(stages, self.steps_per_draw, sets_scales, free))
        return [*phases, MeasureEnergy(plan.warm_up.end)]

    def _is_limited_by_noise(self, plan: RunPlan) -> bool:
        return plan.learned is not None and self.energy_variance is None

    def describe(self, state: SGMCMCState) -> dict[str, str | float | int]:
        plan = self.plan
        about = super().describe(state) | {
            "integrator": self.integrator or INTEGRATORS[plan.target.subsampled],
            "max_energy_error": self.max_energy_error(plan.size),
        }
        if not self._is_limited_by_noise(plan):
            about["target_energy_variance"] = self.energy_targets[1]
        return about
