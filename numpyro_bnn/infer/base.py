"""The kernel that all gradient-based kernels share: parts, phases of the warm-up, and
NumPyro's ``MCMCKernel``.
"""

import time
import warnings
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Annotated, ClassVar, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.flatten_util import ravel_pytree
from numpyro.infer.gibbs import GIBBS_SITES_KWARG
from numpyro.infer.initialization import init_to_uniform
from numpyro.util import is_prng_key

from numpyro_bnn import sgmcmc
from numpyro_bnn._checks import argument_error
from numpyro_bnn._keys import split
from numpyro_bnn._options import (
    Choice,
    FractionBelow1,
    Kind,
    Model,
    NonNegative,
    Number,
    Positive,
    PositiveInt,
    check_fields,
)
from numpyro_bnn._types import Attributes, Kwargs, Optimizer, PyTree, Scalar
from numpyro_bnn.infer.diagnostics import MeasureMovement, temperature_band
from numpyro_bnn.infer.model_arguments import (
    MAX_CONSTANT_BYTES,
    ModelArguments,
    Start,
    first_of,
    one_thread,
    over_chains,
)
from numpyro_bnn.infer.phases import (
    NOTHING,
    AdaptAcceptance,
    Phase,
    Rescue,
    SGMCMCState,
    Transition,
    WarmUp,
    listed,
)
from numpyro_bnn.infer.preconditioning import (
    NAMES,
    LearnPreconditioner,
    PreconditionerLike,
    is_named,
    learns_from_noise,
    resolve,
)
from numpyro_bnn.infer.step_size import (
    ChooseStepSize,
    GuessStepSize,
    MeasureNoise,
    Noise,
    RenewCaches,
)
from numpyro_bnn.infer.target import (
    MINIBATCHES,
    Target,
    TargetKernel,
    bind,
    check_start,
    given_values,
    on_minibatch,
    stream_of,
    with_parameters,
)
from numpyro_bnn.infer.warm_start import (
    Optimize,
    WarmStart,
    check_held_out,
    learned_parameters,
    warm_start_of,
)
from numpyro_bnn.program.batches import refuse_feeds
from numpyro_bnn.program.compiled import is_traced, run, shared
from numpyro_bnn.program.posterior import Posterior
from numpyro_bnn.program.row_lengths import refuse_random
from numpyro_bnn.program.rows import BY_BATCHES, refuse_rows

GRADIENTS = ("minibatch", "control_variates")
MAX_KICK = 3.0  # of steps whose size is chosen; at equilibrium it is a fifth or less
# Least number of times that a chain should forget its position after warm-up.
FORGOTTEN = 5
STANDS = 20  # steps refused in a row, on other data, after which it is announced
MIN_SECONDS_SHOWN = 0.1  # of a text of the progress bar

StepSize: TypeAlias = Positive | Callable | None


class RunPlan(NamedTuple):
    """What the chains of a run do, fixed when the kernel is initialized.

    :param target: the model bound to its arguments; ``size``: P.
    :param optimize: the phase that comes before sampling, ``learned``: the one that
        learns a preconditioner from gradient noise; ``None`` without it.
    """

    target: Target
    size: int
    warm_up: WarmUp
    optimize: Optimize | None
    learned: LearnPreconditioner | None
    phases: tuple[Phase, ...] = ()

    @property
    def all_phases(self) -> tuple[Phase, ...]:
        """With the one before sampling."""
        return self.phases if self.optimize is None else (self.optimize, *self.phases)


@dataclass(eq=False, repr=False)
class SGMCMCKernel(TargetKernel[RunPlan]):
    """Base class of the gradient-based kernels: a subclass chooses the dynamics, the
    rules for its step size, and what else warm-up does.

    A transition runs ``steps_per_draw`` steps in one compiled loop, so that Python is
    involved once per draw. Warm-up transitions optimize first (``warm_start``), then
    sample while preconditioner and step size adapt: see :meth:`phases`.

    Parameters of every kernel:

    :param model: a NumPyro model. A plate with ``subsample_size`` is the minibatch;
        without one all data are used.
    :param step_size: eps > 0, or a callable step -> eps
        (:mod:`numpyro_bnn.sgmcmc.schedules`, or an optax schedule), where steps count
        from the end of the warm start; ``None`` chooses it in warm-up from curvature
        and gradient noise.
    :param steps_per_draw: steps per transition of ``MCMC``.
    :param temperature: T of the density :math:`p(\\theta, D)^{1/T}` of constrained
        values; 1 is the Bayes posterior.
    :param gradient: ``"minibatch"`` or ``"control_variates"`` (center at the end of the
        warm start).
    :param minibatches: ``"with_replacement"`` or ``"epochs"`` (shuffled, without
        replacement).
    :param preconditioner: ``"gradient_noise"`` (learned in warm-up, so that the noise
        of minibatches has one size in all directions; the default with minibatches if
        the step size is chosen), ``"identity"`` (the default otherwise), ``"rmsprop"``
        (adapted in warm-up, then frozen), ``"warm_start"`` (from its squared
        gradients), a number, an array (P,) or (P, P), a dictionary of these by site, or
        an :class:`~numpyro_bnn.sgmcmc.interfaces.Preconditioner`.
    :param warm_start: fraction of the warm-up spent on optimization, in [0, 1), 0 for
        none; or a :class:`~numpyro_bnn.infer.WarmStart` with more options.
    :param optimizer: optax transformation of the warm start; by default that of
        ``WarmStart``.
    :param bias_tolerance: target of ``step_size=None``: the relative error of a
        posterior variance.
    :param init_strategy: as for NumPyro's kernels.
    :raises ValueError: for an option out of range or an unknown name; on
        initialization, for models whose minibatches would be silently wrong; TypeError
        for options that are not numbers.

    >>> from numpyro_bnn.infer import SGLD, SGMCMCKernel
    >>> isinstance(SGLD(lambda: None), SGMCMCKernel)
    True
    """

    model: Model
    step_size: StepSize = None
    _: KW_ONLY
    steps_per_draw: PositiveInt = 100
    temperature: NonNegative = 1.0
    gradient: Annotated[str, Choice(GRADIENTS)] = "minibatch"
    minibatches: Annotated[str, Choice(MINIBATCHES)] = "with_replacement"
    preconditioner: PreconditionerLike = None
    warm_start: FractionBelow1 | WarmStart = WarmStart.share
    optimizer: Optimizer = None
    bias_tolerance: Positive = 0.05
    # not a plain default, which would make it a method of the class
    init_strategy: Annotated[
        Callable, Kind(callable, "Pass e.g. `init_to_median`.")
    ] = field(default_factory=lambda: init_to_uniform)

    exact = False  # an exact kernel takes no minibatches
    # whether it takes models with random numbers of their own, a fresh one per gradient
    takes_random_models = True
    # names in addition to those that all kernels accept
    preconditioners: ClassVar[tuple[str, ...]] = ()
    # the default where it is not learned from gradient noise
    usual_preconditioner = "identity"
    # refused steps in a row after which a chain starts again in warm-up
    patience = sgmcmc.engine.LOST

    def __post_init__(self) -> None:
        call, preconditioner = self._call, self.preconditioner
        check_fields(call, self)
        Number(strict=self.exact).check(call, "temperature", self.temperature)
        if isinstance(preconditioner, str):
            Choice((*NAMES, *self.preconditioners)).check(
                call, "preconditioner", preconditioner
            )
        self._warm_start = warm_start_of(self.warm_start, self.optimizer)
        if is_named(preconditioner, "warm_start") and not self._warm_start.share:
            raise argument_error(
                call,
                "preconditioner",
                "'warm_start'",
                "Set `warm_start=0.5` (say) with it.",
            )
        self._reset(self.model)

    def _reset(self, model: Callable) -> None:
        """Discard what was built for a model and its arguments."""
        # `model` has the values of `priors.Learned` as well, once they are learned
        self._model = self.model = model
        self._plan = None
        self._arguments = ModelArguments(type(self).__name__, MAX_CONSTANT_BYTES)
        # `MCMC` initializes a kernel where this is None
        self._sample_fn: Callable | None = None
        # when the text of the progress bar was last updated, and the text
        self._shown = (0.0, "")

    # -- parts -------------------------------------------------------------------------

    @abstractmethod
    def dynamics(
        self, step_size: float, size: int, noisy: bool
    ) -> sgmcmc.interfaces.Dynamics:
        """How a step moves the weights: an integrator with its own noise.

        :param step_size: eps of the first step.
        :param size: number of parameters.
        :param noisy: whether gradients are those of minibatches.
        """

    @property
    def schedule(self) -> Callable[[Scalar], Scalar]:
        """How the step size changes over a run: a factor of the base step size, as a
        function of the engine's step.
        """
        if callable(self.step_size):
            return self.step_size
        return sgmcmc.schedules.constant(1.0)

    def estimator(
        self, target: Target, potential: Callable
    ) -> sgmcmc.interfaces.Gradient:
        """How the gradient is estimated: on all rows, or on minibatches."""
        full = partial(potential, batch="full")
        if self.exact or not target.subsampled:
            return sgmcmc.Full(full)
        stream = stream_of(target, self.minibatches)
        if self.gradient == "control_variates":
            return sgmcmc.ControlVariates(potential, full, stream)
        return sgmcmc.Minibatch(potential, stream)

    def sampler(self, evaluate: Callable, z: PyTree, base: Array) -> sgmcmc.Sampler:
        """Build the sampler of a chain, from a potential ``evaluate(z, batch)`` and a
        base step size; this costs nothing at run time.
        """
        target, learned = self.plan.target, self.plan.learned
        unravel, schedule = ravel_pytree(z)[1], self.schedule
        named = self.preconditioner

        def potential(position: Array, batch: PyTree) -> Array:
            return evaluate(unravel(position), batch)

        if learned is not None:
            metric = learned.preconditioner
        else:
            named = self.usual_preconditioner if named is None else named
            metric = resolve(self._call, named, z, target.num_data)
        return sgmcmc.build(
            self.estimator(target, potential),
            # a number that the program computes passes the checks of options
            self.dynamics(base * schedule(0), self.plan.size, target.subsampled),  # type: ignore[arg-type]
            metric,
            schedule=lambda step: base * schedule(step),
            temperature=self.temperature,
        )

    def steps(
        self, sampler: sgmcmc.Sampler, engine: sgmcmc.State, i: Array
    ) -> sgmcmc.State:
        """Make the steps of transition ``i``, and return the state after them."""
        return sampler.run(engine, self.steps_per_draw)

    def steps_of(self, transitions: int) -> int:
        """Number of steps in the first transitions that sample."""
        return transitions * self.steps_per_draw

    @property
    def target_accept_prob(self) -> float | None:
        """Acceptance probability to which step sizes are adapted; ``None`` for a kernel
        without a test.
        """
        return None

    def optimizer_steps(self) -> int:
        """Optimizer steps per transition: as many gradients as sampling would take."""
        return self.steps_per_draw

    @property
    def max_kick(self) -> float | None:
        """Longest kick that a step takes if its size was chosen in warm-up, ``None``
        for no bound: see :class:`~numpyro_bnn.sgmcmc.Overdamped`.
        """
        adapts = self.step_size is None and self.temperature > 0
        return MAX_KICK if adapts else None

    # -- rules for the step size -------------------------------------------------------

    def choose_step_size(self, curvature: Array, noise: Noise, size: int) -> Array:
        """Choose the step size eps by the largest curvature and the gradient noise
        (both preconditioned).

        Overdamped: to first order a coordinate of curvature lam and noise V has a
        variance too large by the fraction (eps / 4) (lam + V / T). Never more than a
        quarter of the stability limit, whatever the tolerance.
        """
        tolerated = (
            4
            * self.bias_tolerance
            / (curvature + noise.largest / max(self.temperature, 1e-12))
        )
        return jnp.minimum(1 / curvature, tolerated)

    def stable_step_size(self, curvature: Array, noise: Array, size: int) -> Array:
        """Step size eps while a chain is still far from the posterior: a quarter of the
        stability limit.

        ``noise`` is the summed variance of the gradient over its squared norm. Far from
        the mode both grow alike, and with larger steps a chain would move ever further
        away.
        """
        return 1 / (curvature * (1 + noise))

    def steps_to_forget(self, step_size: Scalar, size: int) -> Scalar:
        """Steps in which a chain forgets its position where the curvature is 1."""
        return 2 / step_size

    # -- phases ------------------------------------------------------------------------

    def adapting(self, plan: RunPlan) -> list[Phase]:
        """The phases that are special to a kernel; by default, one that adapts the step
        size to an acceptance.
        """
        if self.step_size is not None or self.target_accept_prob is None:
            return []
        return [AdaptAcceptance(plan.warm_up, self.target_accept_prob)]

    def phases(self, plan: RunPlan) -> list[Phase]:
        """What a transition does before, between and after its steps, in this order."""
        warm_up, learned, adapting = plan.warm_up, plan.learned, self.adapting(plan)
        learning = [] if learned is None else [learned]
        adapts, renews = self.step_size is None, False
        measure = MeasureNoise(warm_up)
        if adapts:
            averaged = (lambda _, noise: noise) if learned is None else learned.averaged
            guesses = any(phase.steers for phase in adapting)
            renews = guesses and not (self.exact or plan.target.subsampled)
            measure = (GuessStepSize if renews else ChooseStepSize)(
                warm_up,
                self.choose_step_size,
                self.stable_step_size,
                averaged,
                first_guess=guesses,
            )
        movement = MeasureMovement(
            warm_up.end, self.exact, self.temperature, self.steps_per_draw
        )
        # exact kernels renew them in each transition
        renew = [] if self.exact or renews else [RenewCaches(warm_up)]
        phases = [*learning, *renew, measure, *adapting, movement]
        if warm_up.begin < warm_up.end:
            parts = tuple(learning), tuple(adapting)
            phases.insert(0, Rescue(warm_up, adapts, *parts, self.patience))
        return phases

    def _make_plan(self, target: Target, num_warmup: int, size: int) -> RunPlan:
        length = self._transitions_of_warm_start(num_warmup)
        learns = learns_from_noise(
            self._call,
            self.preconditioner,
            target.subsampled and not self.exact,
            self.step_size,
            self.gradient,
        )
        sampling = num_warmup - length
        travels = 3 * sampling // 4 if learns else sampling // 2
        warm_up = WarmUp(length, length + travels, num_warmup, self.steps_of(sampling))
        optimize = learned = None
        if length:
            optimize = Optimize(
                self._warm_start,
                target,
                length,
                self._warm_start.steps_of(length, self.optimizer_steps()),
                is_named(self.preconditioner, "warm_start"),
            )
        if learns:
            ratios = [plate.size / plate.batch_size for plate in target.plates.values()]
            learned = LearnPreconditioner.for_warm_up(
                warm_up, size, self.steps_per_draw, max(ratios, default=0.0)
            )
        plan = RunPlan(target, size, warm_up, optimize, learned)
        return plan._replace(phases=tuple(self.phases(plan)))

    def _transitions_of_warm_start(self, num_warmup: int) -> int:
        share = self._warm_start.share
        length = round(share * num_warmup)
        if self.warm_start != WarmStart.share and share and num_warmup and not length:
            came = f"share={share}, which of num_warmup={num_warmup} is no transition"
            raise argument_error(
                self._call, "warm_start", came, "Take a larger share, or 0 for none."
            )
        return length

    # -- the contract of MCMCKernel ----------------------------------------------------

    sample_field = "z"

    @property
    def default_fields(self) -> tuple[str, ...]:
        fields = ["z", "diverging", "refused_steps", "step_size"]
        fields += ["configurational_temperature", "gradient_noise", "num_gradients"]
        dynamics = self.dynamics(1.0, size=2, noisy=False)
        if dynamics.reports_energy:
            fields += ["energy_variance", "decoherence_length"]
        if type(dynamics).momentum is not sgmcmc.interfaces.Dynamics.momentum:
            fields.append("kinetic_temperature")
        return (*fields, "accept_prob") if dynamics.exact else tuple(fields)

    def learn(
        self, num_warmup: int, model_args: tuple, model_kwargs: Kwargs | None
    ) -> Posterior:
        """Optimize the parameters of :class:`~numpyro_bnn.priors.Learned`, and hold
        them in ``model`` from now on.

        :return: what the model is then, on a minibatch.
        """
        args, kwargs = model_args, dict(model_kwargs or {})
        posterior = on_minibatch(self._call, self._model, args, kwargs)
        return self._learned(num_warmup, args, kwargs, posterior)

    def _learned(
        self, num_warmup: int, args: tuple, kwargs: Kwargs, posterior: Posterior
    ) -> Posterior:
        values = learned_parameters(
            self._call,
            posterior,
            self.init_strategy,
            self._warm_start,
            num_warmup,
            self.optimizer_steps(),
            args,
            kwargs,
        )
        self.model = with_parameters(self._model, values)
        if not values:
            return posterior
        return Posterior(self.model, args, kwargs, full=False)

    def _begin(self, start: Start) -> SGMCMCState:
        args, kwargs = start.args, start.kwargs
        # not as separate small programs
        chain_key, init_key = shared(lambda key: tuple(split(key)), True)(start.rng_key)
        target, z = self._bound(start._replace(rng_key=init_key))
        one = z if start.single else jax.eval_shape(first_of, z)
        check_held_out(self._call, target, self._warm_start.held_out, one, args, kwargs)
        size = sum(leaf.size for leaf in jax.tree.leaves(one))
        self._plan = self._make_plan(target, start.num_warmup, size)
        self._sample_fn = self.sample

        def started(values: PyTree, args: tuple, kwargs: Kwargs) -> SGMCMCState:
            begin = partial(self._start, args=args, kwargs=kwargs)
            return begin(*values) if start.single else jax.vmap(begin)(*values)

        return run(started, (z, chain_key), args, kwargs, runs_rarely=True)

    def _bound(self, start: Start) -> tuple[Target, dict[str, Array]]:
        """The model bound to its arguments, and where its chains start."""
        call, args, kwargs = self._call, start.args, start.kwargs
        learn = partial(self._learned, start.num_warmup, args, kwargs)
        spread = self._warm_start.spread
        has_values = start.init_params is not None
        search = not has_values and (spread == 1 or is_traced(start.rng_key))
        settings = self._model, start, self.init_strategy, self.temperature
        target, z = bind(call, *settings, learn, search)
        by_batches = not self.exact and self.gradient == "minibatch"
        if not (by_batches and self.takes_random_models):
            refuse_random(call, "model", target.stochastic)
        if has_values:
            z = given_values(call, target, z, start)
        elif spread != 1:
            scaled = shared(partial(jax.tree.map, lambda value: spread * value))
            try:
                check_start(call, "warm_start", target, z := scaled(z), start)
            except ValueError:
                z = bind(call, *settings, learn)[1]  # by a search
                check_start(call, "warm_start", target, z := scaled(z), start)
        if not (target.subsampled and by_batches) or self._warm_start.held_out:
            refuse_rows(call, BY_BATCHES, args, kwargs)
        if self.minibatches == "epochs":
            refuse_feeds(call, "minibatches", "it has its own order", args, kwargs)
        return target, z

    def _start(
        self, z: PyTree, rng_key: Array, args: tuple, kwargs: Kwargs
    ) -> SGMCMCState:
        """The state of a chain at unconstrained values ``z``."""
        plan, position = self.plan, ravel_pytree(z)[0]
        step_size = self.step_size
        number = 1.0 if step_size is None or callable(step_size) else step_size
        base = jnp.asarray(number, position.dtype)
        sampler = self.sampler(plan.target.evaluator(args, kwargs), z, base)
        # The first transition that samples refreshes the engine: here nothing is
        # evaluated.
        engine = replace(sampler, gradient=NOTHING).init(
            position, rng_key, plan.warm_up.steps
        )
        engine = engine._replace(estimator=sampler.gradient.init(position))
        phases = {}
        for phase in plan.all_phases:
            value = phase.start(engine, base)
            if value is not None:
                phases[phase.name] = value
        return SGMCMCState(
            z=z,
            step_size=jnp.asarray(base * self.schedule(engine.step), position.dtype),
            base_step_size=base,
            shrinkage=jnp.ones_like(base),
            restarts=jnp.int32(0),
            gradient_noise=jnp.zeros((), position.dtype),
            num_gradients=jnp.int32(0),
            i=jnp.int32(0),
            engine=engine,
            phases=phases,
            data=self._arguments.version,
            rng_key=rng_key,
        )

    def sample(
        self,
        state: SGMCMCState,
        model_args: tuple,
        model_kwargs: Kwargs | None,
    ) -> SGMCMCState:
        new = self._arguments.run(self._transitions, state, model_args, model_kwargs)
        if is_traced(state) and self._arguments.are_others(model_args, model_kwargs):
            announce = partial(_announce, self._call)
            refused = (each.engine.refused_in_a_row for each in (state, new))
            jax.debug.callback(announce, *refused)
        return new

    def _transitions(
        self, state: SGMCMCState, args: tuple, kwargs: Kwargs
    ) -> SGMCMCState:
        evaluate = self.plan.target.evaluator(args, kwargs)
        # all chains are at the same transition
        i = state.i if is_prng_key(state.rng_key) else state.i[0]
        now = Transition(i, self._sampler_of(evaluate), args, kwargs)
        return self._transition(state, now)

    def _sampler_of(
        self, evaluate: Callable
    ) -> Callable[[SGMCMCState], sgmcmc.Sampler]:
        return lambda state: self.sampler(evaluate, state.z, state.base_step_size)

    def _transition(self, state: SGMCMCState, now: Transition) -> SGMCMCState:
        """One transition of all chains."""
        plan, optimize = self.plan, self.plan.optimize

        def finished(state: SGMCMCState) -> SGMCMCState:
            for phase in plan.phases:
                state = phase.end(state, now)
            position = jnp.where(state.diverging, jnp.nan, state.engine.position)
            return state._replace(z=ravel_pytree(state.z)[1](position), i=now.i + 1)

        state = over_chains(_with_seeds, state)
        sample = partial(over_chains, partial(self._sampled, now=now))
        if optimize is None:
            state = sample(state)
        else:
            # The branches are over chains, not the branching: JAX reads those that it
            # has to batch several times.
            learn = partial(over_chains, partial(optimize.run, now=now))
            state = lax.cond(now.i < plan.warm_up.begin, learn, sample, state)
        return over_chains(finished, state)

    def _sampled(self, state: SGMCMCState, now: Transition) -> SGMCMCState:
        for phase in self.plan.phases:
            state = phase.before(state, now)
        sampler = now.sampler(state)
        engine = sgmcmc.engine.reset_statistics(state.engine)
        if self.exact:
            # `MCMC.run` may go on with other data: their potential, compared with the
            # one before, would refuse all steps, or take wrong ones
            engine = sampler.refresh(engine)
            state = state.spend(sampler.refresh_cost)
        engine = self.steps(sampler, engine, now.i)
        step_size = jnp.asarray(sampler.schedule(engine.step - 1))
        state = state._replace(
            engine=engine, step_size=step_size.astype(state.step_size.dtype)
        )
        state = state.spend(engine.statistics.num_gradients)
        for phase in self.plan.phases:
            state = phase.after(state, now)
        return state

    @one_thread
    def refresh(
        self,
        state: SGMCMCState,
        model_args: tuple,
        model_kwargs: Kwargs | None,
    ) -> SGMCMCState:
        """Adopt ``state.z`` and the arguments: recompute cached potentials and
        gradients, keep the momentum.

        In a ``Gibbs``, exact kernels only adopt ``z``: it calls ``sample`` next, which
        recomputes them.
        """
        args, kwargs = self._arguments.restored(model_args, model_kwargs)
        later = self.exact and GIBBS_SITES_KWARG in kwargs
        evaluate = self.plan.target.evaluator(args, kwargs)

        def refreshed(state: SGMCMCState) -> SGMCMCState:
            sampler, state = self._sampler_of(evaluate)(state), _with_seeds(state)
            engine = state.engine._replace(position=ravel_pytree(state.z)[0])
            if later:
                return state._replace(engine=engine)
            state = state._replace(engine=sampler.refresh(engine))
            return state.spend(sampler.refresh_cost)

        return over_chains(refreshed, state)

    def get_diagnostics_str(self, state: SGMCMCState) -> str:
        """Text for the progress bar, ``{steps} steps of size {step_size}``.

        ``MCMC`` asks after every transition: not to wait for the device, the old text
        is returned for a while.
        """
        now = time.monotonic()
        ready = getattr(state.step_size, "is_ready", lambda: True)()
        if ready or now - self._shown[0] > MIN_SECONDS_SHOWN:
            step_size, diverged = jax.device_get(
                (state.step_size, state.engine.first_divergence)
            )
            text = (
                f"{self.steps_per_draw} steps of size {float(np.mean(step_size)):.2e}"
            )
            text += (
                f", DIVERGED at step {int(np.max(diverged))}"
                if np.max(diverged) >= 0
                else ""
            )
            self._shown = (now, text)
        return self._shown[1]

    # -- read by the export ------------------------------------------------------------

    def members(
        self,
        state: SGMCMCState,
        model_args: tuple,
        model_kwargs: Kwargs | None,
    ) -> dict[str, Array]:
        """Values of the sites where each chain ended its warm start, (C, ...): a deep
        ensemble.

        :raises ValueError: for a kernel without warm start.
        """
        if self.plan.optimize is None:
            instead = "Use a warm start: the points where it ends are the members."
            raise argument_error(
                "to_inference_data", "members", "a run without warm start", instead
            )
        first, positions = state.z, self.plan.optimize.of(state).position
        if state.i.ndim:
            first = first_of(first)
        unravel = ravel_pytree(first)[1]
        return jax.vmap(self.postprocess_fn(model_args, model_kwargs))(
            jax.vmap(unravel)(jnp.atleast_2d(positions))
        )

    def describe(self, state: SGMCMCState) -> dict[str, str | float | int]:
        """What :func:`~numpyro_bnn.to_inference_data` writes into the attributes of a
        run.
        """
        size = self.plan.size
        low, high = temperature_band(size, self.temperature)
        attributes: Attributes = {
            "temperature_band_low": low,
            "temperature_band_high": high,
            "steps_per_draw": self.steps_per_draw,
            "steps_needed": self._steps_needed(state, size),
            "temperature": self.temperature,
            "biased": not self.exact,
            "noisy_gradients": self.target.subsampled,
            "base_step_size": listed(state.base_step_size),
            "first_divergence": listed(state.engine.first_divergence),
            "restarts": listed(state.restarts),
            "num_parameters": size,
        }
        for phase in self.plan.phases:
            attributes |= phase.describe(state)
        return attributes

    def _steps_needed(self, state: SGMCMCState, size: int) -> float:
        """Steps in which a chain forgets its position often enough; 0 if that is not
        known.

        With a preconditioner learned from gradient noise curvatures are 1 / (1 + N /
        B).
        """
        learned = self.plan.learned
        chosen = self.gradient == "minibatch" and self.step_size is None
        if learned is None or not learned.ratio or not chosen:
            return 0.0
        even = self.choose_step_size(
            jnp.array(0.01), Noise(*jnp.array([1.1, 1.0, 0.0])), size
        )  # where G is known
        steps = np.maximum(jax.device_get(state.base_step_size), even)
        needed = (1 + learned.ratio) * self.steps_to_forget(steps, size)
        return float(FORGOTTEN * np.max(needed))


def _announce(call: str, before: np.ndarray, after: np.ndarray) -> None:
    """Warn when a chain that goes on with other data takes no steps any more. After
    many its draws are NaN.
    """
    if np.any(after >= STANDS) and not np.any(before >= STANDS):
        warnings.warn(
            f"{call}: a chain took none of {STANDS} steps on other data than those of "
            "its warm-up, for which its step size was chosen. If it goes on so, it "
            "stays where it is, or its draws are NaN: run a new `MCMC` on these data.",
            stacklevel=2,
        )


def _with_seeds(state: SGMCMCState) -> SGMCMCState:
    # `MCMC` gives a resumed run a new key. The key is the same at every transition, the
    # step numbers never are, so no random number is used twice.
    seeds = sgmcmc.engine.fresh_seeds(jax.random.clone(state.rng_key))
    return state._replace(engine=state.engine._replace(seeds=seeds))
