"""Generalized Hamiltonian Monte Carlo, on all the data."""

from dataclasses import dataclass

from jax import Array

from numpyro_bnn import sgmcmc
from numpyro_bnn._checks import argument_error
from numpyro_bnn._options import Fraction, FractionBelow1, PositiveInt
from numpyro_bnn.infer.base import SGMCMCKernel
from numpyro_bnn.infer.step_size import Noise


@dataclass(eq=False, repr=False, kw_only=True)
class GHMC(SGMCMCKernel):
    r"""Sample a posterior exactly by long trajectories: generalized Hamiltonian Monte
    Carlo, whose momentum may persist from one to the next.

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

    With ``num_steps=1, jitter=0.0`` a step is one of the Metropolis-adjusted Langevin
    algorithm (MALA); its step size is adapted to an acceptance of 0.574.

    Reference: Horowitz (1991) for persistent momentum; Neal (1996), chapter 3, for
    networks; Roberts & Rosenthal (1998) for the acceptance rate of one step.

    >>> GHMC(lambda: None, num_steps=200, momentum_decay=0.5).exact
    True
    """

    num_steps: PositiveInt = 100
    momentum_decay: Fraction = 1.0
    jitter: FractionBelow1 = 0.1
    steps_per_draw: PositiveInt = 1

    exact = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gradient != "minibatch":
            instead = "Leave it out: this kernel uses the gradient of all the data."
            raise argument_error(self._call, "gradient", self.gradient, instead)

    @property
    def target_accept_prob(self) -> float:
        return 0.574 if self.num_steps == 1 else 0.8

    def dynamics(
        self, step_size: float, size: int, noisy: bool
    ) -> sgmcmc.interfaces.Dynamics:
        return sgmcmc.HMC(self.num_steps, self.momentum_decay, self.jitter)

    def choose_step_size(self, curvature: Array, noise: Noise, size: int) -> Array:
        return 1 / curvature

    def optimizer_steps(self) -> int:
        return self.steps_per_draw * self.num_steps
