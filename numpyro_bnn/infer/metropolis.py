"""Kernels with a Metropolis test, on all the data: MALA and generalized HMC."""

from typing import Any

import jax
from numpyro.infer.initialization import init_to_uniform

from numpyro_bnn import sgmcmc
from numpyro_bnn._checks import argument_error
from numpyro_bnn._options import (
    Fraction,
    FractionBelow1,
    Model,
    NonNegative,
    Positive,
    PositiveInt,
    checked,
)
from numpyro_bnn.infer.base import (
    GradientName,
    InitStrategy,
    MinibatchName,
    SGMCMCKernel,
    Share,
    StepSize,
)
from numpyro_bnn.infer.step_size import Noise
from numpyro_bnn.infer.warm_start import WarmStart


class _AllDataKernel(SGMCMCKernel):
    """Base class of Metropolis-adjusted kernels whose gradients use all the data."""

    exact = True

    def _check_arguments(self) -> None:
        super()._check_arguments()
        if self._gradient != "minibatch":
            instead = "Leave it out: this kernel uses the gradient of all the data."
            raise argument_error(self._call, "gradient", self._gradient, instead)

    def choose_step_size(
        self, curvature: jax.Array, noise: Noise, size: int
    ) -> jax.Array:
        return 1 / curvature


class MALA(_AllDataKernel):
    r"""Metropolis-adjusted Langevin algorithm: a gradient step with noise, then accept
    or reject.

    .. math:: \theta^* = \theta + \tfrac\epsilon2 G g(\theta) + \sqrt{\epsilon
              T}\,L\,\xi

    Exact for every step size. It uses all the data and ignores a ``subsample_size`` of
    the model. ``step_size=None`` is adapted in warm-up to an acceptance of 0.574.

    Parameters: see :class:`~numpyro_bnn.infer.SGMCMCKernel`.

    Reference: Roberts & Tweedie (1996); Roberts & Rosenthal (1998) for the acceptance
    rate.

    >>> MALA(lambda: None).default_fields[-1]
    'accept_prob'
    """

    target_accept_prob = 0.574

    @checked("infer.{}")
    def __init__(
        self,
        model: Model,
        step_size: StepSize = None,
        *,
        steps_per_draw: PositiveInt = 10,
        temperature: NonNegative = 1.0,
        gradient: GradientName = "minibatch",
        minibatches: MinibatchName = "with_replacement",
        preconditioner: Any = None,
        warm_start: Share = WarmStart.share,
        optimizer: Any = None,
        bias_tolerance: Positive = 0.05,
        init_strategy: InitStrategy = init_to_uniform,
    ) -> None:
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

    def dynamics(
        self, step_size: Any, size: int = 2, noisy: bool = False
    ) -> sgmcmc.interfaces.Dynamics:
        return sgmcmc.MALA()


class GHMC(_AllDataKernel):
    r"""Generalized Hamiltonian Monte Carlo: long trajectories whose momentum may
    persist from one to the next.

    A step is a trajectory of ``num_steps`` leapfrog steps of random size, whose initial
    momentum is :math:`a\,r + \sqrt{1 - a^2}\,z,\ a = 1 - \mathrm{momentum\_decay}`.
    Useful as a block of ``numpyro.infer.Gibbs`` alongside
    :class:`~numpyro_bnn.infer.PrecisionGibbs`, or where trajectories must be longer
    than those of NUTS.

    It uses all the data and ignores a ``subsample_size`` of the model.
    ``step_size=None`` (h^2, the square of the leapfrog step) is adapted in warm-up to
    an acceptance of 0.8.

    :param num_steps: L, leapfrog steps per trajectory.
    :param momentum_decay: fraction of the momentum that is lost before a trajectory, in
        [0, 1]; 1 is plain HMC.
    :param jitter: the leapfrog step of a trajectory is h times a uniform number in [1 -
        jitter, 1 + jitter].
    :raises ValueError: for numbers out of range.

    Other parameters: see :class:`~numpyro_bnn.infer.SGMCMCKernel`; ``steps_per_draw``
    counts trajectories.

    Reference: Horowitz (1991) for persistent momentum; Neal (1996), chapter 3, for
    networks.

    >>> GHMC(lambda: None, num_steps=200, momentum_decay=0.5).exact
    True
    """

    target_accept_prob = 0.8

    @checked("infer.{}")
    def __init__(
        self,
        model: Model,
        step_size: StepSize = None,
        *,
        num_steps: PositiveInt = 100,
        momentum_decay: Fraction = 1.0,
        jitter: FractionBelow1 = 0.1,
        steps_per_draw: PositiveInt = 1,
        temperature: NonNegative = 1.0,
        gradient: GradientName = "minibatch",
        minibatches: MinibatchName = "with_replacement",
        preconditioner: Any = None,
        warm_start: Share = WarmStart.share,
        optimizer: Any = None,
        bias_tolerance: Positive = 0.05,
        init_strategy: InitStrategy = init_to_uniform,
    ) -> None:
        self._num_steps = num_steps
        self._momentum_decay = momentum_decay
        self._jitter = jitter
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

    def dynamics(
        self, step_size: Any, size: int = 2, noisy: bool = False
    ) -> sgmcmc.interfaces.Dynamics:
        return sgmcmc.HMC(self._num_steps, self._momentum_decay, self._jitter)

    def optimizer_steps(self) -> int:
        return self._steps_per_draw * self._num_steps
