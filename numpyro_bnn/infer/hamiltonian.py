"""Hamiltonian Monte Carlo with long trajectories, persistent momentum and step sizes by group."""

from collections.abc import Callable
from typing import Any

from numpyro_bnn import sgmcmc
from numpyro_bnn.infer.exact import AllDataKernel

__all__ = ["GHMC"]


class GHMC(AllDataKernel):
    r"""Hamiltonian Monte Carlo in long trajectories; momentum may persist, and step sizes follow groups of sites.

    A step is a trajectory of ``num_steps`` leapfrogs, of random step size, whose momentum is
    :math:`a\,r + \sqrt{1 - a^2}\,z,\ a = 1 - \mathrm{momentum\_decay}`. With ``preconditioner="prior"``, as a block
    of ``numpyro.infer.Gibbs`` beside :class:`~numpyro_bnn.infer.PrecisionGibbs`, every sweep has its own step sizes:

    .. math:: G_i = 1 / (1 / \mathrm{Var}[z_i \mid \text{held sites}] + c_i)

    from the prior variance of a site given the scales that other blocks hold, and the mean curvature c of the
    likelihood, learned in warm-up from squared gradients. Weights of a group whose scale is small take small steps,
    without a trajectory of which one half is spent on others. For given held sites G is fixed: the kernel is exact.

    It uses all the data: a ``subsample_size`` of the model is set aside. ``step_size=None`` (h^2, the square of the
    leapfrog step) is adapted in warm-up to an acceptance of 0.8.

    :param num_steps: L, leapfrogs per trajectory.
    :param momentum_decay: share of the momentum that a trajectory forgets, in [0, 1]; 1 is plain HMC.
    :param jitter: leapfrog steps of a trajectory are h times a uniform number in [1 - jitter, 1 + jitter].
    :param preconditioner: ``"prior"`` as above, or as for all kernels: one step size for all by default.
    :raises ValueError: for numbers out of range; on initialization, where a prior variance depends on a site that
        this kernel draws.

    Other parameters: see :class:`~numpyro_bnn.infer.SGMCMCKernel`; ``steps_per_draw`` counts trajectories.

    Reference: Neal (1996), chapter 3, for step sizes by group; Horowitz (1991) for persistence.

    >>> GHMC(lambda: None, num_steps=200, momentum_decay=0.5).exact
    True
    """

    target_accept_prob = 0.8
    preconditioners: tuple[str, ...] = ("prior",)

    def __init__(
        self,
        model: Callable,
        step_size: Any = None,
        *,
        num_steps: int = 100,
        momentum_decay: float = 1.0,
        jitter: float = 0.1,
        steps_per_draw: int = 1,
        preconditioner: Any = None,
        **options: Any,
    ) -> None:
        self._num_steps, self._momentum_decay, self._jitter = num_steps, momentum_decay, jitter
        super().__init__(
            model, step_size, steps_per_draw=steps_per_draw, preconditioner=preconditioner, **options
        )

    def _check_arguments(self) -> None:
        super()._check_arguments()
        self.dynamics(lambda z: z, 1.0)  # the part checks its numbers

    def dynamics(self, full_potential: Callable, step_size: Any) -> sgmcmc.interfaces.Dynamics:
        return sgmcmc.HMC(self._num_steps, self._momentum_decay, self._jitter)

    def usual_steps(self, sampler: sgmcmc.Sampler) -> int:
        return self._steps_per_draw * self._num_steps
