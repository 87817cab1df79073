"""Kernels with momentum: underdamped Langevin dynamics (SGHMC) and the Nosé-Hoover
thermostat.
"""

import math
from dataclasses import dataclass, field

import jax.numpy as jnp
from jax import Array

from numpyro_bnn import sgmcmc
from numpyro_bnn._checks import argument_error
from numpyro_bnn._options import Fraction
from numpyro_bnn._types import Scalar
from numpyro_bnn.infer.base import SGMCMCKernel
from numpyro_bnn.infer.step_size import Noise

THERMOSTAT_STEPS = 20


def friction_of(momentum_decay: float, step_size: float) -> float:
    """Friction gamma per unit of time such that exp(-gamma h) = 1 - momentum_decay, h =
    sqrt(step_size).
    """
    return (
        math.inf if momentum_decay == 1 else -math.log1p(-momentum_decay)
    ) / step_size**0.5


@dataclass(eq=False, repr=False)
class _WithMomentum(SGMCMCKernel):
    momentum_decay: Fraction = field(default=0.1, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.momentum_decay == 0 and self.step_size is None:
            raise argument_error(
                self._call,
                "momentum_decay",
                0,
                "Pass a `step_size`, or a decay above 0.",
            )

    def choose_step_size(self, curvature: Array, noise: Noise, size: int) -> Array:
        """eps = h^2: h sqrt(lam) <= 1 is half the stability limit; gradient noise of
        variance V adds h^2 V per step to the variance of the momenta, of which a
        refresh renews the fraction 1 - a^2.
        """
        heat = (
            self._renewed
            * self.temperature
            * self.bias_tolerance
            / jnp.maximum(noise.largest, 1e-30)
        )
        return jnp.minimum(1 / curvature, heat)

    def stable_step_size(self, curvature: Array, noise: Array, size: int) -> Array:
        return 1 / (curvature * (1 + 4 * noise / max(self._renewed, 1e-3)))

    def steps_to_forget(self, step_size: Scalar, size: int) -> Scalar:
        return -math.log(max(1 - self.momentum_decay, 1e-12)) / step_size

    @property
    def _renewed(self) -> float:
        """Fraction of the momentum's variance that a refresh renews, 1 - a^2."""
        return 1 - (1 - self.momentum_decay) ** 2


@dataclass(eq=False, repr=False)
class SGHMC(_WithMomentum):
    r"""Sample a posterior from minibatch gradients with momentum: stochastic-gradient
    HMC, underdamped Langevin dynamics.

    With h = sqrt(step_size), M^{-1} = G, an exact Ornstein-Uhlenbeck refresh of the
    momentum and a new minibatch for every gradient:

    .. math:: B:\ m \leftarrow m + \tfrac h2 \tilde g, \quad A:\ \theta \leftarrow
              \theta + \tfrac h2 M^{-1} m, \quad
              O:\ m \leftarrow a\,m + \sqrt{(1 - a^2) T} M^{1/2} z,\quad a = 1 -
              \mathrm{momentum\_decay}

    A step is B, A, O, A, B. With exact gradients, positions have no bias on Gaussian
    targets, and a bias of order h^2 elsewhere. Gradient noise of variance V raises the
    temperature by the fraction h^2 V / ((1 - a^2) T). At ``momentum_decay=1`` a step is
    one of SGLD with the mean of two successive noises.

    :param momentum_decay: fraction of the momentum lost per step, in [0, 1]; 0 is
        Hamiltonian (give a `step_size`).

    Other parameters: see :class:`~numpyro_bnn.infer.SGMCMCKernel`.

    Reference: Chen, Fox & Guestrin (2014), equation 9; Leimkuhler & Matthews (2013) for
    the splitting.

    >>> SGHMC(lambda: None, momentum_decay=0.2).default_fields[-1]
    'kinetic_temperature'
    """

    def dynamics(
        self, step_size: float, size: int, noisy: bool
    ) -> sgmcmc.interfaces.Dynamics:
        friction = friction_of(self.momentum_decay, step_size)
        return sgmcmc.BAOAB(friction, max_kick=self.max_kick)


@dataclass(eq=False, repr=False)
class SGNHT(_WithMomentum):
    r"""Sample a posterior from minibatch gradients whose noise is unknown: the
    stochastic-gradient Nosé-Hoover thermostat, the first choice for many rows.

    .. math:: dm = (\tilde g - \xi m) dt + \sqrt{2 A T}\,dW, \quad d\theta = M^{-1}
              m\,dt, \quad
              Q\,d\xi = (m' M^{-1} m / P - T)\,dt

    It removes the heating caused by gradient noise that has the same size in all
    (preconditioned) directions. The thermostat's mass is (20 h)^2, so that xi follows
    the temperature within some tens of steps on any scale of the parameters.

    :param momentum_decay: sets A, the noise injected, and the start of xi, as in
        :class:`SGHMC`; in [0, 1).

    Other parameters: see :class:`~numpyro_bnn.infer.SGMCMCKernel`.

    Reference: Ding et al. (2014), algorithm 2.

    >>> SGNHT(lambda: None).default_fields[-1]
    'kinetic_temperature'
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.momentum_decay == 1:
            raise argument_error(
                self._call,
                "momentum_decay",
                1,
                "Pass less than 1: a thermostat needs momentum.",
            )

    def dynamics(
        self, step_size: float, size: int, noisy: bool
    ) -> sgmcmc.interfaces.Dynamics:
        friction = friction_of(self.momentum_decay, step_size)
        mass = THERMOSTAT_STEPS**2 * step_size
        return sgmcmc.NoseHoover(friction, mass, max_kick=self.max_kick)

    def steps_to_forget(self, step_size: Scalar, size: int) -> Scalar:
        return (
            super().steps_to_forget(step_size, size) + 0.5
        )  # noise of size 1 adds h^2 / 2 to the friction per step

    def choose_step_size(self, curvature: Array, noise: Noise, size: int) -> Array:
        """eps = h^2: half the stability limit; gradient noise adds at most T / 5 per
        step to the momenta.

        The thermostat removes the mean V of the noise over directions: with A h =
        -log(1 - momentum_decay), one of noise V + D has the temperature T (1 + h^2 D /
        (2 A h T + h^2 V)).
        """
        refreshed = -2 * math.log1p(-self.momentum_decay)
        limit = noise.limit(self.bias_tolerance, 0.2 / max(refreshed, 1e-30))
        return jnp.minimum(1 / curvature, refreshed * self.temperature * limit)
