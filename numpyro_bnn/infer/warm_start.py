"""The warm start: each chain optimizes before it samples; the end points form a deep
ensemble.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from jax.flatten_util import ravel_pytree
from numpyro import handlers

from numpyro_bnn import sgmcmc
from numpyro_bnn._checks import argument_error
from numpyro_bnn._options import (
    FractionBelow1,
    Kind,
    Positive,
    PositiveInt,
    check_fields,
)
from numpyro_bnn._types import Arrays, Kwargs, Optimizer, PyTree, Scalar
from numpyro_bnn.infer.model_arguments import Start
from numpyro_bnn.infer.model_checks import KEY, RowSubset
from numpyro_bnn.infer.phases import Phase, SGMCMCState, Transition
from numpyro_bnn.infer.target import Target, bind, stream_of
from numpyro_bnn.program.compiled import is_traced, run
from numpyro_bnn.program.plates import PARAMETERS
from numpyro_bnn.program.posterior import Posterior
from numpyro_bnn.sgmcmc.engine import Purpose
from numpyro_bnn.sgmcmc.interfaces import select
from numpyro_bnn.sgmcmc.streams import Keys, ProductStream, seeds

NUM_KEYS = 32  # draws of a model's own randomness in the score of held-out rows


def _is_optimizer(value: object) -> bool:
    return all(hasattr(value, method) for method in ("init", "update"))


@dataclass(frozen=True)
class WarmStart:
    """Optimize each chain from its own start before it samples, with early stopping on
    held-out rows.

    The end points are a deep ensemble, from which ``to_inference_data(mcmc,
    members=True)`` predicts. Weights w of a family with location m and a random scale
    s are at the mode of (w - m) / s, whether or not the model is centered.

    :param share: fraction of the warm-up transitions that optimize, in [0, 1); 0 for
        none.
    :param num_steps: total number of optimizer steps; by default as many as sampling
        would take.
    :param optimizer: optax transformation; by default Adam with learning rate 0.01 on
        gradients clipped to norm 1: at a random start one gradient may be a billion
        times larger than the others, and Adam's second moment would never recover.
    :param held_out: fraction of the rows withheld from the optimizer, in [0, 1). If it
        is not 0, sampling starts at the end of the transition that predicts these rows
        best: early stopping in retrospect. All chains hold out the same rows; sampling
        then uses all rows. Models with dropout are scored at the same few masks each
        time.
    :param spread: factor of the initial unconstrained values, for overdispersed starts.
    :raises ValueError: for numbers outside these ranges.

    >>> WarmStart(0.5, num_steps=1000).steps_of(20, 100)
    50
    """

    share: FractionBelow1 = 0.25
    num_steps: PositiveInt | None = None
    optimizer: (
        Annotated[
            Any, Kind(_is_optimizer, "Pass one of optax, e.g. `optax.adam(0.01)`.")
        ]
        | None
    ) = None
    held_out: FractionBelow1 = 0.0
    spread: Positive = 1.0

    def __post_init__(self) -> None:
        check_fields("infer.WarmStart", self)

    @property
    def transformation(self) -> Optimizer:
        """The optimizer, as a gradient transformation of optax."""
        import optax

        usual = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.01))
        return usual if self.optimizer is None else self.optimizer

    def steps_of(self, transitions: int, usual: int) -> int:
        """Optimizer steps in each of some transitions, in which sampling would take
        ``usual`` steps.
        """
        return usual if self.num_steps is None else -(-self.num_steps // transitions)


def warm_start_of(warm_start: float | WarmStart, optimizer: Optimizer) -> WarmStart:
    """Combine what a user passes for ``warm_start=`` and ``optimizer=``."""
    if isinstance(warm_start, WarmStart):
        return (
            warm_start
            if warm_start.optimizer is not None
            else replace(warm_start, optimizer=optimizer)
        )
    return WarmStart(warm_start, optimizer=optimizer)


class Descent(NamedTuple):
    """A descent at a position where potential and gradient are not known yet.

    :param known: the last position where they were finite; ``memory``: the optimizer's
        state there.
    :param shrinkage: factor of the steps: half for each that ended where they were not,
        and recovering.
    """

    position: PyTree
    memory: PyTree
    known: PyTree
    shrinkage: Array

    @classmethod
    def start(cls, position: PyTree, memory: PyTree) -> "Descent":
        """Nothing is known but the start."""
        return cls(position, memory, position, jnp.ones(()))

    def step(
        self,
        optimizer: Optimizer,
        potential: Array,
        gradient: PyTree,
        rate: Scalar = 1.0,
    ) -> "Descent":
        """One step from the position or, where the density has ended, a shorter one
        from the last before it.
        """
        finite = jnp.isfinite(potential)
        for leaf in jax.tree.leaves(gradient):
            finite &= jnp.all(jnp.isfinite(leaf))
        gradient = jax.tree.map(lambda leaf: jnp.where(finite, leaf, 0.0), gradient)
        known = select(finite, self.position, self.known)
        update, memory = optimizer.update(gradient, self.memory, known)
        shrinkage = jnp.where(
            finite, jnp.minimum(1.0, 1.1 * self.shrinkage), 0.5 * self.shrinkage
        )
        size = rate * shrinkage
        position = jax.tree.map(
            lambda value, step: value + (size * step).astype(value.dtype), known, update
        )
        return Descent(position, memory, known, shrinkage)


def optimize(
    sampler: sgmcmc.Sampler,
    state: sgmcmc.State,
    optimizer: Optimizer,
    memory: PyTree,
    start: Array,
    num_steps: int,
) -> tuple[Descent, Array]:
    """Descend on the minibatch potential; ``start`` is the number of the first step and
    selects the minibatches.

    :return: the end, which is its ``known`` position, after ``num_steps + 1``
        gradients; their mean square (P,).
    """

    seed = state.seeds[Purpose.START_BATCH]

    def descend(number: Array, carry: tuple[Descent, Array]) -> tuple[Descent, Array]:
        descent, squares = carry
        batch = sampler.gradient.stream.draw(seed, start + number)
        potential, gradient = sampler.gradient(state.estimator, descent.position, batch)
        new = descent.step(optimizer, potential, gradient)
        more = (
            number < num_steps
        )  # the last gradient only shows whether the end is known
        new = new._replace(memory=select(more, new.memory, descent.memory))
        return new, squares + jnp.where(
            more & jnp.isfinite(gradient), gradient**2 / num_steps, 0.0
        )

    begin = (Descent.start(state.position, memory), jnp.zeros_like(state.position))
    return lax.fori_loop(0, num_steps + 1, descend, begin)


class Member(NamedTuple):
    """State of a warm start: the optimizer's state, the position (the best on held-out
    rows) and its score there; ``None`` without them.
    """

    optimizer: Optimizer
    position: Array
    score: Array | None


@dataclass(frozen=True, eq=False)
class Optimize(Phase):
    """The first transitions, which optimize instead of sampling.

    :param length: number of them, with ``num_steps`` optimizer steps in each.
    :param scales: whether the squared gradients make the preconditioner.
    """

    warm_start: WarmStart
    target: Target
    length: int
    num_steps: int
    scales: bool

    def start(self, engine: sgmcmc.State, step_size: Array) -> Member:
        worst = jnp.full((), -jnp.inf, engine.position.dtype)
        score = worst if self.warm_start.held_out else None
        memory = self.warm_start.transformation.init(engine.position)
        return Member(memory, engine.position, score)

    def run(self, state: SGMCMCState, now: Transition) -> SGMCMCState:
        """The optimizer steps of one transition."""
        sampler, engine = self._learning(state, now), state.engine
        optimizer, begin = self.warm_start.transformation, engine.position
        member = self.of(state)
        descent, squares = optimize(
            sampler,
            engine,
            optimizer,
            member.optimizer,
            now.i * self.num_steps,
            self.num_steps,
        )
        if self.scales:
            values = 1 / (1e-5 + jnp.sqrt(squares) / self.target.num_data)
            # Only the shape of G comes from the gradients; its scale is absorbed by the
            # step size.
            engine = engine._replace(adaptation=jnp.sqrt(values / jnp.mean(values)))
        # If no step ended where the density is known, the optimizer starts again.
        broken = (descent.shrinkage < 1) & jnp.all(descent.known == begin)
        memory = select(broken, optimizer.init(begin), descent.memory)
        position = descent.known
        new = Member(memory, position, member.score)
        if self.warm_start.held_out:
            new = self._better(state, new, now)
            last = now.i == self.length - 1
            position = jnp.where(last, new.position, position)
        state = state._replace(
            engine=engine._replace(position=position),
            shrinkage=state.shrinkage * jnp.where(broken, 0.5, 1.0),
            restarts=state.restarts + jnp.where(broken, 1, 0),
        )
        state = state.spend((self.num_steps + 1) * sampler.gradient.evaluations)
        return state.with_phase(self, new)

    def _learning(self, state: SGMCMCState, now: Transition) -> sgmcmc.Sampler:
        """The engine with gradients from the rows that are not held out, of the density
        of standardized weights.
        """
        sampler, share = now.sampler(state), self.warm_start.held_out
        gradient, unravel = sampler.gradient, ravel_pytree(state.z)[1]
        call = now.args, now.kwargs

        def potential(position: Array, batch: PyTree = "full") -> Array:
            return self.target.potential(*call, batch, standardized=True)(
                unravel(position)
            )

        if share:
            gradient = learning_gradient(self.target, share, unravel, *call)
        elif isinstance(gradient, sgmcmc.Full):
            gradient = sgmcmc.Full(potential)
        else:  # the center of control variates is far away
            gradient = sgmcmc.Minibatch(potential, gradient.stream)
        return replace(sampler, gradient=gradient)

    def _better(self, state: SGMCMCState, new: Member, now: Transition) -> Member:
        """Whichever position predicts the held-out rows better, the new one or the best
        so far.
        """
        old, share = self.of(state), self.warm_start.held_out
        held_out = held_out_score(self.target, share, now.args, now.kwargs)
        rng_key = random.fold_in(random.clone(state.rng_key), 0)
        score = held_out(ravel_pytree(state.z)[1](new.position), rng_key)
        better = score > old.score
        position = jnp.where(better, new.position, old.position)
        score = jnp.where(better, score, old.score).astype(old.score.dtype)
        return Member(new.optimizer, position, score)


# parallel chains start inside a compiled program; a kernel must not keep its tracers
@jax.core.eval_context()
def learned_parameters(
    call: str,
    reading: Posterior,
    init_strategy: Callable,
    warm_start: WarmStart,
    num_warmup: int,
    usual: int,
    args: tuple,
    kwargs: Kwargs,
) -> Arrays:
    """Values of the parameters of ``priors.Learned`` after as many steps as a warm
    start takes.

    The random sites are optimized along with them; the last steps get ever smaller.
    Nothing depends on the keys of the chains: all have one model.

    :raises ValueError: inside a ``Gibbs`` or tempering, whose parts would learn
        different values, inside ``jit``, and if a value is not finite.
    """
    length = round(warm_start.share * num_warmup)
    if not length or not reading.learned:
        return {}
    optimizer, num_steps = (
        warm_start.transformation,
        length * warm_start.steps_of(length, usual),
    )
    instead = (
        "Learn it first by SVI, and pass `handlers.substitute(model, result.params)`."
    )
    inside = any(
        name.startswith("_") for name in kwargs
    )  # the values of other blocks, a temperature
    if inside or is_traced((args, kwargs)):
        came = (
            f"the learned parameter {reading.learned[0]!r} inside another kernel, or "
            f"`jit`"
        )
        raise argument_error(call, "model", came, instead)
    begin = Start(random.key(0), num_warmup, None, args, kwargs)
    target, z = bind(call, reading.model, begin, init_strategy)
    stream, starts = (
        stream_of(target, "with_replacement"),
        reading.draw([0], PARAMETERS)[0],
    )

    def optimized(given: tuple, args: tuple, kwargs: Kwargs) -> Arrays:
        seed = seeds(random.key(0), 1)[0]

        def potential(position: tuple, batch: PyTree) -> Array:
            at = replace(
                target, model=handlers.substitute(target.model, data=position[0])
            )
            return at.potential(args, kwargs, batch or {}, standardized=True)(
                position[1]
            )

        def descend(i: Array, descent: Descent) -> Descent:
            batch = stream.draw(seed, i)
            energy_and_slope = jax.value_and_grad(potential)(descent.position, batch)
            return descent.step(
                optimizer,
                *energy_and_slope,
                rate=jnp.minimum(1.0, 2.0 - 2.0 * i / num_steps),
            )

        return lax.fori_loop(
            0, num_steps + 1, descend, Descent.start(given, optimizer.init(given))
        ).known[0]

    learned = run(
        optimized, ({name: starts[name] for name in reading.learned}, z), args, kwargs
    )
    if not all(bool(jnp.isfinite(value).all()) for value in learned.values()):
        raise argument_error(
            call, "model", "learned parameters that become infinite or NaN", instead
        )
    return learned


def held_out_rows(size: int, share: float) -> tuple[Array, Array]:
    """Split rows into training and held-out rows; the split depends only on ``size``
    and ``share``.

    >>> learned, held = held_out_rows(10, 0.2)
    >>> len(learned), len(held)
    (8, 2)
    """
    order = np.random.default_rng(0).permutation(size)
    held = min(max(1, round(share * size)), size - 1)
    return jnp.asarray(np.sort(order[held:])), jnp.asarray(np.sort(order[:held]))


def learning_gradient(
    target: Target,
    share: float,
    unravel: Callable,
    args: tuple,
    kwargs: Kwargs | None,
) -> sgmcmc.interfaces.Gradient:
    """Gradients from the rows that are not held out."""
    rows = {name: held_out_rows(size, share)[0] for name, size in target.rows.items()}
    streams: dict[str, PyTree] = {
        name: sgmcmc.WithReplacement(
            rows[name].size, min(plate.batch_size, rows[name].size)
        )
        for name, plate in target.plates.items()
    }
    if target.stochastic:
        streams[KEY] = Keys()

    def potential(position: Array, batch: PyTree) -> Array:
        shown = rows | {name: rows[name][batch[name]] for name in target.plates}
        rows_shown = RowSubset(shown, batch)
        return target.potential(args, kwargs, rows_shown, standardized=True)(
            unravel(position)
        )

    if not streams:
        return sgmcmc.Full(lambda position: potential(position, {}))
    return sgmcmc.Minibatch(potential, ProductStream(streams))


def held_out_score(
    target: Target, share: float, args: tuple, kwargs: Kwargs | None
) -> Callable:
    """The function from unconstrained values and a key to the mean log density of the
    held-out rows over keys.
    """
    held = {name: held_out_rows(size, share)[1] for name, size in target.rows.items()}
    score = target.log_likelihood(args, kwargs, held)
    number = NUM_KEYS if target.stochastic else 1
    return lambda z, rng_key: jnp.mean(
        jax.vmap(lambda key: score(z, key))(random.split(rng_key, number))
    )


def check_held_out(
    call: str,
    target: Target,
    share: float,
    z: PyTree,
    args: tuple,
    kwargs: Kwargs | None,
) -> None:
    """Refuse to hold out rows of a model that needs all of them; ``z`` are
    unconstrained values of one chain.
    """
    if not share:
        return
    instead = (
        "Observe inside a plate and index the data by it: `with plate(...) as i: ... "
        "obs=y[i]`."
    )
    if not target.rows:
        raise argument_error(
            call, "warm_start", "held_out of a model without a plate of data", instead
        )
    if min(target.rows.values()) < 2:
        raise argument_error(
            call, "warm_start", "held_out of a plate with one row", "Set `held_out=0`."
        )
    try:
        jax.eval_shape(held_out_score(target, share, args, kwargs), z, random.key(0))
    except (TypeError, ValueError) as error:
        raise argument_error(
            call, "warm_start", "held_out of a model that needs all rows", instead
        ) from error
