"""Measurements from which a step size is chosen: largest curvature, and size of the gradient noise."""

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from numpyro_bnn.infer.state import SGMCMCState
from numpyro_bnn.sgmcmc import Sampler, State

if TYPE_CHECKING:
    from numpyro_bnn.infer.base import SGMCMCKernel

__all__ = ["Noise", "gradient_noise", "largest_curvature", "optimize", "steer_acceptance"]

POWER_STEPS = 24
NOISE_BATCHES = 16


def largest_curvature(sampler: Sampler, state: State) -> jax.Array:
    """Largest |eigenvalue| of the preconditioned Hessian L' H L at the position of a chain.

    Power iteration with a fresh minibatch per step; the Rayleigh quotients of the second half are averaged.
    """

    def iterate(number: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        direction, total = carry
        batch = sampler.gradient.stream.draw(state.seeds.probe, state.step * POWER_STEPS + number)

        def gradient(position: jax.Array) -> jax.Array:
            return sampler.gradient(state.estimator, position, batch)[1]

        along = sampler.preconditioner.root(state.adaptation, direction)
        product = sampler.preconditioner.transpose(
            state.adaptation, jax.jvp(gradient, (state.position,), (along,))[1]
        )
        quotient = jnp.abs(jnp.vdot(direction, product))
        norm = jnp.linalg.norm(product)
        unit = jnp.where(norm > 0, product / jnp.where(norm > 0, norm, 1), direction)
        return unit, total + jnp.where(number >= POWER_STEPS // 2, quotient, 0)

    size = state.position.shape[0]
    # Irrational steps: a start that is orthogonal to no eigenvector of a structured problem.
    start = jnp.sin(1.0 + 1.7 * jnp.arange(size, dtype=state.position.dtype))
    start = start / jnp.linalg.norm(start)
    total = lax.fori_loop(0, POWER_STEPS, iterate, (start, jnp.zeros((), state.position.dtype)))[1]
    return total / (POWER_STEPS - POWER_STEPS // 2)


class Noise(NamedTuple):
    """Size of the noise of the preconditioned gradient estimate.

    :param largest: variance along its noisiest direction.
    :param mean: variance, mean over coordinates.
    :param relative: variance, summed over coordinates, by the squared length of the gradient itself.
    """

    largest: jax.Array
    mean: jax.Array
    relative: jax.Array


def gradient_noise(sampler: Sampler, state: State) -> Noise:
    """Measure the noise of the gradient at the position of a chain."""

    def one(number: jax.Array) -> jax.Array:
        # Other counters than those of the power iteration.
        counter = 2**30 + state.step * NOISE_BATCHES + number
        batch = sampler.gradient.stream.draw(state.seeds.probe, counter)
        gradient = sampler.gradient(state.estimator, state.position, batch)[1]
        return sampler.preconditioner.transpose(state.adaptation, gradient)

    gradients = lax.map(one, lax.iota(jnp.int32, NOISE_BATCHES))
    mean = jnp.mean(gradients, axis=0)
    centered = gradients - mean
    # The small Gram matrix has the eigenvalues of the covariance that the sample can show.
    eigenvalues = jnp.linalg.eigvalsh(centered @ centered.T) / (NOISE_BATCHES - 1)
    total, tiny = jnp.sum(eigenvalues), jnp.finfo(mean.dtype).tiny
    return Noise(eigenvalues[-1], total / mean.size, total / jnp.maximum(jnp.vdot(mean, mean), tiny))


def optimize(
    sampler: Sampler, state: State, optimizer: Any, memory: Any, start: jax.Array, num_steps: int
) -> tuple[State, Any, jax.Array]:
    """Descend on the minibatch potential.

    :param optimizer: an optax gradient transformation.
    :param memory: its state.
    :param start: number of the first step; minibatches are numbered by it.
    :return: the chain at the new position, the memory, and the mean squared gradient (P,) of these steps.
    """

    def descend(
        number: jax.Array, carry: tuple[jax.Array, Any, jax.Array]
    ) -> tuple[jax.Array, Any, jax.Array]:
        position, memory, squares = carry
        batch = sampler.gradient.stream.draw(state.seeds.start_batch, start + number)
        gradient = sampler.gradient(state.estimator, position, batch)[1]
        update, memory = optimizer.update(gradient, memory, position)
        return position + update, memory, squares + gradient**2 / num_steps

    begin = (state.position, memory, jnp.zeros_like(state.position))
    position, memory, squares = lax.fori_loop(0, num_steps, descend, begin)
    return state._replace(position=position), memory, squares


def steer_acceptance(kernel: "SGMCMCKernel", state: SGMCMCState, i: jax.Array) -> SGMCMCState:
    """Bring the acceptance of an exact kernel to its target in warm-up (Robbins-Monro on log eps).

    It begins anew in the middle: what the way to the typical set has taught is forgotten there.
    """
    target = kernel.target_accept_prob
    if target is None or not kernel.chooses_step_size or state.accept_prob is None:
        return state
    begin, end = kernel.warm_start_length, kernel.num_warmup
    age = jnp.where(i < (begin + end) // 2, jnp.maximum(i - begin, 0), i - (begin + end) // 2) + 1
    gain = 2.0 * age.astype(state.accept_prob.dtype) ** -0.6
    adapted = state.base_step_size * jnp.exp(gain * (state.accept_prob - target))
    return state._replace(base_step_size=jnp.where(i < end, adapted, state.base_step_size))
