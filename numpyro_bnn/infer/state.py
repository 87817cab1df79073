"""The state of a chain, as ``MCMC`` sees it."""

from typing import Any, NamedTuple

import jax

from numpyro_bnn import sgmcmc

__all__ = ["SGMCMCState"]


class SGMCMCState(NamedTuple):
    """State of these kernels; all but ``z`` and those after ``diverging`` are statistics of the last draw.

    :param z: unconstrained values by site; NaN from a divergence on.
    :param step_size: eps of the last step: theta += (eps / 2) g~ + N(0, eps T).
    :param configurational_temperature: mean of theta' grad U / P over the steps of the draw; its expectation is T.
    :param kinetic_temperature: mean of m' M^-1 m / P likewise; ``None`` without momentum.
    :param gradient_noise: variance of a coordinate of the (preconditioned) gradient estimate, mean over coordinates.
    :param num_gradients: gradient estimates spent by the chain so far, warm-up included.
    :param accept_prob: mean acceptance probability; ``None`` where nothing is rejected.
    :param energy_variance: mean squared energy error of a step, per parameter; microcanonical kernels only.
    :param decoherence_length: L of these kernels.
    :param diverging: whether the chain has met a position or gradient that is not finite.
    :param i: transitions so far.
    :param base_step_size: the chosen or adapted step size that the schedule multiplies.
    :param engine: state of the engine (position, momentum, preconditioner, step number).
    :param optimizer: state of the warm start; empty without one.
    :param tuning: what a kernel remembers of its warm-up; empty for most.
    :param rng_key: the key all random numbers of the chain are made from, together with the step number.
    """

    z: Any
    step_size: jax.Array
    configurational_temperature: jax.Array
    kinetic_temperature: jax.Array | None
    gradient_noise: jax.Array
    num_gradients: jax.Array
    accept_prob: jax.Array | None
    energy_variance: jax.Array | None
    decoherence_length: jax.Array | None
    diverging: jax.Array
    i: jax.Array
    base_step_size: jax.Array
    engine: sgmcmc.State
    optimizer: Any
    tuning: Any
    rng_key: jax.Array
