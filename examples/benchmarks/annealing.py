"""Sequential Monte Carlo over temperature: populations of particles go from the prior
to the posterior.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random

__all__ = ["Clock", "Population", "anneal"]


class Clock:
    """Processor seconds of calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, fn: Callable, *given: Any) -> Any:
        start = time.process_time()
        found = jax.block_until_ready(fn(*given))
        self.seconds += time.process_time() - start
        return found


class Population(NamedTuple):
    """G populations of M particles: positions (G, M, P), log likelihoods (G, M), and by
    population (G,) the inverse temperature, the log evidence up to it, the step size;
    which of the first particles each comes from (G, M); the number of mutations.
    """

    q: np.ndarray
    log_likelihood: np.ndarray
    beta: np.ndarray
    log_evidence: np.ndarray
    step_size: np.ndarray
    root: np.ndarray
    transitions: int = 0


def mutation(
    potential: Callable, prior: Callable, leapfrogs: int, number: int
) -> Callable:
    """HMC transitions of tempered densities: ``mutate(key, q, beta, step_size, sd)``
    for (..., P) positions.
    """

    def tempered(q: jax.Array, beta: jax.Array) -> tuple[jax.Array, jax.Array]:
        energy = prior(q)
        log_likelihood = energy - potential(q)
        return energy - beta * log_likelihood, log_likelihood

    slope = jax.value_and_grad(tempered, has_aux=True)

    def mutate(
        key: jax.Array,
        q: jax.Array,
        beta: jax.Array,
        step_size: jax.Array,
        sd: jax.Array,
    ) -> tuple:
        def leap(_: int, at: tuple, step: jax.Array) -> tuple:
            q, p, _, gradient = at
            p = p - 0.5 * step * gradient
            q = q + step * p
            energy, gradient = slope(q, beta)
            return q, p - 0.5 * step * gradient, energy, gradient

        def move(carry: tuple, key: jax.Array) -> tuple[tuple, jax.Array]:
            q, energy, gradient = carry
            keys = random.split(key, 3)
            p = random.normal(keys[0], q.shape)
            step = step_size * sd * random.uniform(keys[1], minval=0.7, maxval=1.3)
            at = lax.fori_loop(
                0, leapfrogs, partial(leap, step=step), (q, p, energy, gradient)
            )
            new, end, new_energy, new_gradient = at
            error = (
                energy[0] - new_energy[0] + 0.5 * jnp.sum(p**2) - 0.5 * jnp.sum(end**2)
            )
            prob = jnp.nan_to_num(jnp.exp(jnp.minimum(error, 0.0)))
            taken = random.uniform(keys[2]) < prob
            return jax.tree.map(
                partial(jnp.where, taken), (new, new_energy, new_gradient), carry
            ), prob

        (q, (_, log_likelihood), _), probs = lax.scan(
            move, (q, *slope(q, beta)), random.split(key, number)
        )
        return q, log_likelihood, probs.mean()

    particles = jax.vmap(mutate, (0, 0, None, None, None))
    return jax.jit(jax.vmap(particles))


def resampled(now: Population, rng: np.random.Generator, target: float) -> Population:
    """The next temperature, at which the weights have an effective size of ``target``
    of M; then resampling.
    """
    fields = [np.array(field) for field in now[:-1]]
    q, log_likelihood, beta, log_evidence, _, root = fields
    size = q.shape[1]
    for g in range(len(q)):

        def weights(rise: float, g: int = g) -> np.ndarray:
            return rise * np.nan_to_num(log_likelihood[g].astype(float), nan=-np.inf)

        def enough(rise: float) -> bool:
            w = np.exp(weights(rise) - weights(rise).max())
            return w.sum() ** 2 / np.sum(w**2) >= target * size

        low, high = 0.0, 1.0 - beta[g]
        if not enough(high):
            for _ in range(40):
                middle = 0.5 * (low + high)
                low, high = (middle, high) if enough(middle) else (low, middle)
            high = low
        log_w = weights(high)
        w = np.exp(log_w - log_w.max())
        log_evidence[g] += log_w.max() + np.log(w.mean())
        beta[g] = beta[g] + high if beta[g] + high < 1 - 1e-12 else 1.0
        chosen = np.searchsorted(
            np.cumsum(w) / w.sum() * (1 + 1e-9),
            (np.arange(size) + rng.uniform()) / size,
        )
        q[g], root[g], log_likelihood[g] = (
            q[g, chosen],
            root[g, chosen],
            log_likelihood[g, chosen],
        )
    return Population(*fields, now.transitions)


def anneal(
    q: np.ndarray,
    potential: Callable,
    prior: Callable,
    args: argparse.Namespace,
    clock: Clock,
) -> tuple[Population, Callable]:
    """Particles (G, M, P) drawn from the prior, taken to the posterior; and the
    mutation.

    Step sizes follow an acceptance of three quarters; scales are the standard
    deviations of the particles.
    """
    groups, size, _ = q.shape
    move = mutation(potential, prior, args.leapfrogs, args.mutations)
    rng, key = np.random.default_rng(args.seed), random.key(args.seed)
    first = jax.jit(jax.vmap(jax.vmap(lambda one: prior(one) - potential(one))))(q)
    zeros, root = np.zeros(groups), np.tile(np.arange(size), (groups, 1))
    now = Population(
        np.asarray(q), np.asarray(first), zeros, zeros, np.full(groups, 0.05), root
    )

    def mutate(now: Population) -> Population:
        keys = random.split(random.fold_in(key, now.transitions), (groups, size))
        scale = now.q.std(1) + 1e-4
        found = clock(
            move,
            keys,
            *(
                jnp.asarray(a, jnp.float32)
                for a in (now.q, now.beta, now.step_size, scale)
            ),
        )
        q, log_likelihood, prob = map(np.asarray, found)
        step_size = now.step_size * np.exp(prob.mean(1) - 0.75)
        number = now.transitions + 1
        return now._replace(
            q=q, log_likelihood=log_likelihood, step_size=step_size, transitions=number
        )

    mutate(now)  # compiles
    clock.seconds = 0.0
    while now.beta.min() < 1:
        now = mutate(resampled(now, rng, args.effective))
        if now.transitions % 20 == 0:
            print(
                f"  {clock.seconds:.0f} s, inverse temperatures {now.beta.round(4)}",
                flush=True,
            )
    return now, mutate
