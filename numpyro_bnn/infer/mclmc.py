"""Microcanonical Langevin Monte Carlo: the kernel, and its warm-up."""

from typing import Annotated, Any

import jax
import jax.numpy as jnp
from numpyro.infer.initialization import init_to_uniform

from numpyro_bnn import sgmcmc
from numpyro_bnn._checks import argument_error
from numpyro_bnn._options import (
    Choice,
    Model,
    NonNegative,
    Number,
    Positive,
    PositiveInt,
    PositiveOrInfinite,
    checked,
)
from numpyro_bnn.infer.base import (
    GradientName,
    InitStrategy,
    MinibatchName,
    Plan,
    SGMCMCKernel,
    Share,
    StepSize,
)
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
from numpyro_bnn.infer.warm_start import WarmStart

EARLY = 100.0  # the first target of the energy variance, as a multiple of the last
# largest energy error of a step that is taken, in standard deviations of the last
# target
LARGEST = 24.0
LEAST_LARGEST = 15.0  # lower limit of it, in nats
EARLY_LARGEST = 12.0  # lower limit of it, in standard deviations of the first target
# refused steps in a row after which a chain starts again in warm-up, where its steps
# get shorter
PATIENCE = 2000
INTEGRATORS = ("mclachlan", "leapfrog")  # the default without and with minibatches


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
        step_size: StepSize = None,
        *,
        decoherence_length: PositiveOrInfinite | None = None,
        integrator: Annotated[str, Choice(sorted(INTEGRATORS))] | None = None,
        energy_variance: Any = None,
        steps_per_draw: PositiveInt = 100,
        temperature: NonNegative = 1.0,
        gradient: GradientName = "minibatch",
        minibatches: MinibatchName = "with_replacement",
        preconditioner: Any = None,
        warm_start: Share = WarmStart.share,
        optimizer: Any = None,
        bias_tolerance: Positive = 0.05,
        init_strategy: InitStrategy = init_to_uniform,
    ) -> None:
        self._decoherence_length = decoherence_length
        self._integrator = integrator
        self._energy_variance = energy_variance
        super().__init__(
            model,
            step_size,
            steps_per_draw=steps_per_draw,
            temperature=temperature,
            gradient=gradient,
            minibatches=minibatches,
            preconditioner=preconditioner,
            warm_start=warm_start,
            optimizer=optimizer,
            bias_tolerance=bias_tolerance,
            init_strategy=init_strategy,
        )

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

    def dynamics(
        self, step_size: Any, size: int = 2, noisy: bool = False
    ) -> sgmcmc.interfaces.Dynamics:
        return sgmcmc.Microcanonical(
            self._decoherence_length,
            self._integrator or INTEGRATORS[noisy],
            noisy,
            max_energy_error=self.max_energy_error(size),
            max_warm_up_error=self.max_warm_up_error(size),
        )

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

    def phases(self, plan: Plan) -> list[Phase]:
        """Energy errors steer the step size; on minibatches noise limits it, unless a
        target of their energy errors is given.
        """
        warm_up, learned = plan.warm_up, plan.learned
        stages = Stages.of(warm_up.begin, warm_up.end)
        free = self._decoherence_length is None
        limited = self._is_limited_by_noise(plan)
        steered = self._step_size is None and not limited
        sets_scales = learned is None and (
            self._preconditioner is None or is_named(self._preconditioner, "variance")
        )
        sets_length = free and not limited
        adapting: list[Phase] = []
        if steered and warm_up.end > warm_up.begin:
            first, last = self.energy_targets
            size = plan.size
            # Where refusals would become frequent, or at the target.
            refused = (self.max_warm_up_error(size) / EARLY_LARGEST) ** 2 / size
            adapting.append(AdaptEnergy(stages, max(last, min(first, refused)), last))
        if (sets_scales or sets_length) and warm_up.end > warm_up.begin:
            adapting.append(
                LearnScales(stages, self._steps_per_draw, sets_scales, sets_length)
            )
        phases = self.usual_phases(plan, adapting, steered, PATIENCE)
        if free and limited:
            phases.append(FixRefreshes())
        return [*phases, MeasureEnergy(warm_up.end)]

    def _is_limited_by_noise(self, plan: Plan) -> bool:
        return plan.learned is not None and self._energy_variance is None

    def describe(self, state: SGMCMCState) -> dict[str, str | float | int]:
        plan = self.plan
        about = super().describe(state) | {
            "integrator": self._integrator or INTEGRATORS[plan.target.subsampled],
            "max_energy_error": self.max_energy_error(plan.size),
        }
        if not self._is_limited_by_noise(plan):
            about["target_energy_variance"] = self.energy_targets[1]
        return about
