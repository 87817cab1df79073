"""One chain: optimize, settle, sample; pure functions of the state for given model arguments."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

from numpyro_bnn import sgmcmc
from numpyro_bnn.infer.plates import Rows
from numpyro_bnn.infer.preconditioning import is_warm_start
from numpyro_bnn.infer.state import SGMCMCState
from numpyro_bnn.infer.tuning import gradient_noise, largest_curvature, optimize
from numpyro_bnn.infer.warm_start import Member, held_out_rows

if TYPE_CHECKING:
    from numpyro_bnn.infer.base import SGMCMCKernel

__all__ = ["Chain"]


@dataclass(frozen=True, eq=False)
class Chain:
    """A kernel on given arguments of its model. It exists while a function is traced, and costs nothing later.

    :param kernel: what to do.
    :param args: positional arguments of the model.
    :param kwargs: its keyword arguments.
    """

    kernel: "SGMCMCKernel"
    args: tuple
    kwargs: Mapping[str, Any] | None

    def start(self, z: Any, rng_key: jax.Array) -> SGMCMCState:
        """The state of a chain at unconstrained values ``z``."""
        kernel, position = self.kernel, ravel_pytree(z)[0]
        base = jnp.asarray(1.0 if kernel.fixed_step_size is None else kernel.fixed_step_size, position.dtype)
        engine = self._sampler(z, base).init(position, rng_key, kernel.sampled_warmup)
        zero = jnp.zeros((), position.dtype)
        return SGMCMCState(
            z=z,
            step_size=jnp.asarray(base * kernel.schedule(engine.step), position.dtype),
            configurational_temperature=zero,
            kinetic_temperature=engine.statistics.kinetic_temperature,
            gradient_noise=zero,
            num_gradients=jnp.int32(0),
            accept_prob=engine.statistics.accept_prob,
            energy_variance=engine.statistics.energy_variance,
            decoherence_length=getattr(engine.memory, "length", None),
            diverging=jnp.asarray(False),
            i=jnp.int32(0),
            base_step_size=base,
            engine=engine,
            optimizer=kernel.warm_start.start(position) if kernel.warm_start_length else (),
            tuning=kernel.start_tuning(position, base),
            rng_key=rng_key,
        )

    def transition(self, state: SGMCMCState, i: jax.Array) -> SGMCMCState:
        """Make transition ``i``, a number that chains under ``vmap`` share, so that stages stay branches."""
        # `MCMC` gives a resumed run another key; numbers come from the key and the step, so never twice.
        state = state._replace(engine=state.engine._replace(seeds=_seeds(state)))
        warm = self.kernel.warm_start_length
        if warm:
            state = lax.cond(i < warm, self._optimize, lambda s: self._sample(s, i), state)
        else:
            state = self._sample(state, i)
        return state._replace(i=i + 1)

    def refresh(self, state: SGMCMCState) -> SGMCMCState:
        """Take up ``state.z`` and the arguments: recompute cached potentials and gradients, keep the momentum."""
        engine = state.engine._replace(position=ravel_pytree(state.z)[0], seeds=_seeds(state))
        return state._replace(engine=self._sampler(state.z, state.base_step_size).refresh(engine))

    def _sampler(self, z: Any, base: jax.Array) -> sgmcmc.Sampler:
        return self.kernel.sampler(z, base, self.args, self.kwargs)

    def _sample(self, state: SGMCMCState, i: jax.Array) -> SGMCMCState:
        # Measured when sampling starts, more and more rarely on the way to the typical set, and for good at the end.
        kernel = self.kernel
        warm, total = kernel.warm_start_length, kernel.num_warmup
        half = (warm + total) // 2
        times = {warm, half, total} | {warm + 2**k for k in range(20) if warm + 2**k < half}
        due = jnp.any(i == jnp.array(sorted(times)))
        state = lax.cond(due, lambda s: self._settle(s, i), lambda s: s, state)
        sampler = self._sampler(state.z, state.base_step_size)
        engine = kernel.run(sampler, sgmcmc.engine.reset_statistics(state.engine), i)
        return kernel.adapt(state, self._collect(state, engine, sampler), sampler, i)

    def _collect(self, state: SGMCMCState, engine: sgmcmc.State, sampler: sgmcmc.Sampler) -> SGMCMCState:
        statistics = engine.statistics
        diverging = engine.first_divergence >= 0
        position = jnp.where(diverging, jnp.nan, engine.position)
        return state._replace(
            z=ravel_pytree(state.z)[1](position),
            step_size=jnp.asarray(sampler.schedule(engine.step - 1), state.step_size.dtype),
            configurational_temperature=statistics.configurational_temperature,
            kinetic_temperature=statistics.kinetic_temperature,
            num_gradients=state.num_gradients + statistics.num_gradients,
            accept_prob=statistics.accept_prob,
            energy_variance=statistics.energy_variance,
            decoherence_length=getattr(engine.memory, "length", None),
            diverging=diverging,
            engine=engine,
        )

    def _optimize(self, state: SGMCMCState) -> SGMCMCState:
        kernel, sampler = self.kernel, self._sampler(state.z, state.base_step_size)
        warm, member = kernel.warm_start, state.optimizer
        if warm.held_out:
            sampler = replace(sampler, gradient=self._learning(state.z))
        steps = warm.steps_of(kernel.warm_start_length, kernel.usual_steps(sampler))
        engine, memory, squares = optimize(
            sampler, state.engine, warm.transformation, member.optimizer, state.i * steps, steps
        )
        if is_warm_start(kernel.preconditioner):
            values = sgmcmc.preconditioners.from_squared_gradients(squares, kernel.target.num_data).values
            # The size of G is left to the step size; its shape is what the gradients tell.
            engine = engine._replace(adaptation=jnp.sqrt(values / jnp.mean(values)))
        member = Member(memory, engine.position, member.score)
        if warm.held_out:
            member = self._better(state.z, member, state.optimizer)
            last = state.i == kernel.warm_start_length - 1
            engine = engine._replace(position=jnp.where(last, member.position, engine.position))
        broken = ~jnp.all(jnp.isfinite(engine.position))
        engine = engine._replace(first_divergence=jnp.where(broken, 0, engine.first_divergence))
        return state._replace(
            z=ravel_pytree(state.z)[1](engine.position),
            engine=engine,
            optimizer=member,
            num_gradients=state.num_gradients + steps * sampler.gradient.evaluations,
            diverging=engine.first_divergence >= 0,
        )

    def _learning(self, z: Any) -> sgmcmc.interfaces.Gradient:
        """Gradients from rows that are not held out."""
        target, unravel = self.kernel.target, ravel_pytree(z)[1]
        rows = {
            name: held_out_rows(size, self.kernel.warm_start.held_out)[0]
            for name, size in target.rows.items()
        }
        parts: dict[str, Any] = {
            name: sgmcmc.WithReplacement(rows[name].size, min(plate.batch_size, rows[name].size))
            for name, plate in target.plates.items()
        }

        def potential(position: jax.Array, batch: Any) -> jax.Array:
            shown = rows | {name: rows[name][batch[name]] for name in parts}
            return target.potential(self.args, self.kwargs, Rows(shown))(unravel(position))

        if not parts:
            return sgmcmc.Full(lambda position: potential(position, {}))
        return sgmcmc.Minibatch(potential, sgmcmc.streams.ProductStream(parts))

    def _better(self, z: Any, new: Member, old: Member) -> Member:
        """Keep the position that predicts the rows held out better."""
        target = self.kernel.target
        held = {
            name: held_out_rows(size, self.kernel.warm_start.held_out)[1]
            for name, size in target.rows.items()
        }
        score = target.log_likelihood(self.args, self.kwargs, held)(ravel_pytree(z)[1](new.position))
        better = score > old.score
        position = jnp.where(better, new.position, old.position)
        return Member(new.optimizer, position, jnp.where(better, score, old.score).astype(old.score.dtype))

    def _settle(self, state: SGMCMCState, i: jax.Array) -> SGMCMCState:
        """Measure gradient noise (and curvature, and choose the step size) at the position; renew caches.

        On the way to the typical set gradients and their noise are large, and a step that is small enough for them
        never arrives: the first half of warm-up uses the largest stable step instead.
        """
        kernel, sampler = self.kernel, self._sampler(state.z, state.base_step_size)
        warm = kernel.warm_start_length
        # Control variates are centered at the end of the warm start and stay there.
        engine = kernel.precondition(sampler, sampler.refresh(state.engine, recenter=i <= warm), i)
        noise = gradient_noise(sampler, engine)
        state = state._replace(engine=engine, gradient_noise=noise.mean)
        if not kernel.chooses_step_size:
            return state
        curvature = largest_curvature(sampler, engine)
        chosen = kernel.choose_step_size(curvature, noise.largest)
        if kernel.steers_step_size:  # a first guess, adapted from there on
            guess = kernel.step_length(chosen, engine.position.size)
            chosen = jnp.where(i <= warm, guess, state.base_step_size)
        elif kernel.num_warmup:
            stable = jnp.maximum(chosen, kernel.stable_step_size(curvature, noise.relative))
            chosen = jnp.where(i < (warm + kernel.num_warmup) // 2, stable, chosen)
        return state._replace(base_step_size=chosen.astype(state.base_step_size.dtype))


def _seeds(state: SGMCMCState) -> sgmcmc.engine.Seeds:
    # The key is used at every transition, but always with other step numbers.
    return sgmcmc.engine.fresh_seeds(jax.random.clone(state.rng_key))
