"""Exact kernels: the Metropolis-adjusted Langevin algorithm, and GGMC with minibatch gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_bnn import sgmcmc
from numpyro_bnn._checks import argument_error
from numpyro_bnn.infer.base import SGMCMCKernel
from numpyro_bnn.infer.momentum import check_momentum_decay, friction_of

__all__ = ["GGMC", "MALA", "AllDataKernel"]


class AllDataKernel(SGMCMCKernel):
    """Base of exact kernels whose gradients use all the data.

    >>> issubclass(MALA, AllDataKernel)
    True
    """

    exact = True

    def _check_arguments(self) -> None:
        if self._gradient != "minibatch":
            raise argument_error(
                self._call, "gradient", self._gradient, "It uses the full gradient: leave it."
            )
        super()._check_arguments()

    def estimator(self, potential: Callable, full: Callable, stream: Any) -> sgmcmc.interfaces.Gradient:
        return sgmcmc.Full(full)

    def choose_step_size(self, curvature: jax.Array, noise: jax.Array) -> jax.Array:
        return 1 / curvature


class MALA(AllDataKernel):
    r"""Metropolis-adjusted Langevin algorithm: one leapfrog step from a fresh momentum, then accept or stay.

    .. math:: \theta^* = \theta + \tfrac\epsilon2 G g(\theta) + \sqrt{\epsilon T}\,L\,\xi

    Exact for every step size. It uses all the data: a ``subsample_size`` of the model is set aside.
    ``step_size=None`` is adapted in warm-up to an acceptance of 0.574.

    Parameters: see :class:`~numpyro_bnn.infer.SGMCMCKernel`.

    Reference: Roberts & Tweedie (1996); Roberts & Rosenthal (1998) for the acceptance rate.

    >>> MALA(lambda: None).default_fields[-1]
    'accept_prob'
    """

    target_accept_prob = 0.574

    def __init__(
        self, model: Callable, step_size: Any = None, *, steps_per_draw: int = 10, **options: Any
    ) -> None:
        super().__init__(model, step_size, steps_per_draw=steps_per_draw, **options)

    def dynamics(self, full_potential: Callable, step_size: Any) -> sgmcmc.interfaces.Dynamics:
        return sgmcmc.MALA()


class GGMC(SGMCMCKernel):
    r"""Gradient-guided Monte Carlo: exact sampling with minibatch gradients.

    ``num_steps`` steps of underdamped Langevin dynamics (OBABO), each with a minibatch of its own, then one
    Metropolis test on all the data:

    .. math:: \log\alpha = -\tfrac1T \Big[U(\theta_L) - U(\theta_0) + \sum_l
              \big(K(m_l^{\text{after 2nd B}}) - K(m_l^{\text{after 1st O}})\big)\Big]

    On rejection the chain stays and its momentum is flipped, without which it would not be exact. Gradient noise
    costs acceptance, never exactness. ``step_size=None`` is adapted in warm-up to an acceptance of 0.65.

    :param num_steps: L, steps per test.
    :param momentum_decay: share of the momentum that a step forgets, in [0, 1].

    Other parameters: see :class:`~numpyro_bnn.infer.SGMCMCKernel`; ``steps_per_draw`` counts tests.

    Reference: Garriga-Alonso & Fortuin (2021), section 3.

    >>> GGMC(lambda: None, num_steps=5).exact
    True
    """

    exact = True
    target_accept_prob = 0.65

    def __init__(
        self,
        model: Callable,
        step_size: Any = None,
        *,
        num_steps: int = 10,
        momentum_decay: float = 0.1,
        steps_per_draw: int = 10,
        **options: Any,
    ) -> None:
        call = "infer.GGMC"
        if (
            options.get("minibatches", "with_replacement") != "with_replacement"
            or options.get("gradient") == "svrg"
        ):
            raise argument_error(
                call,
                "minibatches or gradient",
                (options.get("minibatches"), options.get("gradient")),
                "It is exact with independent minibatches only: draw them with replacement, and not by SVRG.",
            )
        self._num_steps = num_steps
        self._momentum_decay = momentum_decay
        super().__init__(model, step_size, steps_per_draw=steps_per_draw, **options)

    def _check_arguments(self) -> None:
        super()._check_arguments()
        check_momentum_decay(self._call, self._momentum_decay)
        self.dynamics(lambda z: z, 1.0)  # the part checks the number of steps

    def dynamics(self, full_potential: Callable, step_size: Any) -> sgmcmc.interfaces.Dynamics:
        return sgmcmc.GGMC(full_potential, self._num_steps, friction_of(self._momentum_decay, step_size))

    def choose_step_size(self, curvature: jax.Array, noise: jax.Array) -> jax.Array:
        return jnp.minimum(1 / curvature, self._temperature / jnp.maximum(noise, 1e-30))
