"""The adapter between the SG-MCMC engine and NumPyro's ``MCMCKernel``; a subclass adds
its dynamics.
"""

import copy
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
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
    checked,
)
from numpyro_bnn.infer.chain import AcceptanceTuner, Chain, Policy, SGMCMCState, Tuner
from numpyro_bnn.infer.model_arguments import ArgumentKernel
from numpyro_bnn.infer.preconditioning import (
    NAMES,
    NoisePreconditioner,
    is_named,
    learns_from_noise,
    resolve,
)
from numpyro_bnn.infer.target import (
    MINIBATCHES,
    Target,
    bind,
    check_start,
    given_values,
    stream_of,
    with_parameters,
)
from numpyro_bnn.infer.tuning import FORGOTTEN, Noise, listed, temperature_band
from numpyro_bnn.infer.warm_start import (
    WarmStart,
    check_held_out,
    learned_parameters,
    warm_start_of,
)
from numpyro_bnn.program.compiled import run
from numpyro_bnn.program.rows import BY_BATCHES, refuse_rows
from numpyro_bnn.sgmcmc.interfaces import Gradient

GRADIENTS = ("minibatch", "control_variates")
MOST_KICK = 3.0  # of steps whose size is chosen; at equilibrium it is a fifth or less


class SGMCMCKernel(ArgumentKernel):
    """Base class of the gradient-based kernels: options, minibatches, warm-up; a
    subclass adds the dynamics.

    A transition runs ``steps_per_draw`` steps in one compiled loop, so that Python is
    involved once per draw. Warm-up transitions optimize first (``warm_start``), then
    sample while preconditioner and step size adapt.

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

    exact = False  # an exact kernel takes no minibatches
    target_accept_prob: float | None = None
    preconditioners: tuple[
        str, ...
    ] = ()  # names in addition to those that all kernels accept
    usual_preconditioner = (
        "identity"  # the default where it is not learned from gradient noise
    )

    @checked("infer.{}")
    def __init__(
        self,
        model: Model,
        step_size: Positive | Callable | None = None,
        *,
        steps_per_draw: PositiveInt = 100,
        temperature: NonNegative = 1.0,
        gradient: Annotated[str, Choice(GRADIENTS)] = "minibatch",
        minibatches: Annotated[str, Choice(MINIBATCHES)] = "with_replacement",
        preconditioner: Any = None,
        warm_start: FractionBelow1 | WarmStart = WarmStart.share,
        optimizer: Any = None,
        bias_tolerance: Positive = 0.05,
        init_strategy: Annotated[
            Callable, Kind(callable, "Pass e.g. `init_to_median`.")
        ] = init_to_uniform,
    ) -> None:
        self._model = model
        self._step_size = step_size
        self._steps_per_draw = steps_per_draw
        self._temperature = temperature
        self._gradient = gradient
        self._minibatches = minibatches
        self._preconditioner = preconditioner
        self._warm_start = warm_start_of(warm_start, optimizer)
        self._warm_start_given = (
            isinstance(warm_start, WarmStart) or warm_start != WarmStart.share
        )
        self._bias_tolerance = bias_tolerance
        self._init_strategy = init_strategy
        self._check_arguments()
        self._reset()

    @property
    def _call(self) -> str:
        return f"infer.{type(self).__name__}"

    def _check_arguments(self) -> None:
        call, preconditioner = self._call, self._preconditioner
        Number(strict=self.exact).check(call, "temperature", self._temperature)
        if isinstance(preconditioner, str):
            Choice((*NAMES, *self.preconditioners)).check(
                call, "preconditioner", preconditioner
            )
        if is_named(preconditioner, "warm_start") and not self._warm_start.share:
            raise argument_error(
                call,
                "preconditioner",
                "'warm_start'",
                "Set `warm_start=0.5` (say) with it.",
            )

    def _reset(self) -> None:
        """Discard what was built for a model and its arguments."""
        self._policy: Policy | None = None
        self._learned: dict[
            str, jax.Array
        ] = {}  # values of `priors.Learned`, once they are learned
        self._sample_fn: Callable | None = (
            None  # `MCMC` initializes a kernel where this is None
        )
        self._shown = (
            0.0,
            "",
        )  # when the text of the progress bar was last updated, and the text

    # -- what a kernel defines ---------------------------------------------------------

    @abstractmethod
    def dynamics(self, step_size: Any) -> sgmcmc.interfaces.Dynamics:
        """The dynamics of the position; ``step_size`` is the eps of the first step."""

    @property
    def schedule(self) -> Callable[[Any], Any]:
        """The factor that multiplies the base step size, as a function of the engine's
        step.
        """
        return (
            self._step_size
            if callable(self._step_size)
            else sgmcmc.schedules.constant(1.0)
        )

    def estimator(
        self, target: Target, potential: Callable, full: Callable, stream: Any
    ) -> Gradient:
        """The gradient estimator."""
        if not target.subsampled:
            return sgmcmc.Full(full)
        if self._gradient == "control_variates":
            return sgmcmc.ControlVariates(potential, full, stream)
        return sgmcmc.Minibatch(potential, stream)

    def choose_step_size(
        self, curvature: jax.Array, noise: Noise, size: int
    ) -> jax.Array:
        """eps for the largest curvature and the gradient noise (both preconditioned).

        Overdamped: to first order a coordinate of curvature lam and noise V has a
        variance too large by the fraction (eps / 4) (lam + V / T). Never more than a
        quarter of the stability limit, whatever the tolerance.
        """
        tolerated = (
            4
            * self._bias_tolerance
            / (curvature + noise.largest / max(self._temperature, 1e-12))
        )
        return jnp.minimum(1 / curvature, tolerated)

    def stable_step_size(
        self, curvature: jax.Array, noise: jax.Array, size: int
    ) -> jax.Array:
        """eps on the way to the typical set: a quarter of the stability limit.

        ``noise`` is the summed variance of the gradient over its squared norm. Far from
        the mode both grow alike, and with larger steps a chain would move ever further
        away.
        """
        return 1 / (curvature * (1 + noise))

    def steps_to_forget(self, step_size: Any, size: int) -> Any:
        """Steps in which a chain forgets its position where the curvature is 1."""
        return 2 / step_size

    def optimizer_steps(self) -> int:
        """Optimizer steps per transition: as many gradients as sampling would take."""
        return self._steps_per_draw

    def make_policy(self, target: Target, num_warmup: int) -> Policy:
        """Everything that the chains of a run need from this kernel."""
        given = self._step_size
        length = round(self._warm_start.share * num_warmup)
        if (
            self._warm_start_given
            and self._warm_start.share
            and num_warmup
            and not length
        ):
            came = (
                f"share={self._warm_start.share}, which of num_warmup={num_warmup} is "
                f"no transition"
            )
            raise argument_error(
                self._call, "warm_start", came, "Take a larger share, or 0 for none."
            )
        tuner, steps = Tuner(), self._steps_per_draw
        if given is None and self.target_accept_prob is not None:
            tuner = AcceptanceTuner(self.target_accept_prob, length, num_warmup)
        return Policy(
            target=target,
            warm_start=self._warm_start,
            num_warmup=num_warmup,
            warm_start_length=length,
            optimizer_steps=self._warm_start.steps_of(length, self.optimizer_steps())
            if length
            else 0,
            engine_warmup=(num_warmup - length) * steps,
            scales_from_gradients=is_named(self._preconditioner, "warm_start"),
            step_size=1.0 if given is None or callable(given) else given,
            chooses_step_size=given is None,
            steers_step_size=self.target_accept_prob is not None,
            schedule=self.schedule,
            choose_step_size=self.choose_step_size,
            stable_step_size=self.stable_step_size,
            sampler=partial(self.sampler, target),
            run=lambda sampler, engine, i: sampler.run(engine, steps),
            tuner=tuner,
        )

    def learning_noise(self, policy: Policy, noise: NoisePreconditioner) -> Policy:
        """A policy that learns its preconditioner from gradient noise: curvatures are
        then 1 / (1 + N / B).
        """
        chosen = self._gradient == "minibatch" and self._step_size is None
        ratio = 1 + noise.ratio if chosen and noise.ratio else 0.0
        return replace(
            policy,
            noise=noise,
            steps_to_forget=lambda *now: ratio * self.steps_to_forget(*now),
        )

    def sampler(
        self, target: Target, z: Any, base: jax.Array, evaluate: Callable
    ) -> sgmcmc.Sampler:
        """Assemble the engine for a potential ``evaluate(z, batch)``; this costs
        nothing at run time.
        """
        unravel, schedule = ravel_pytree(z)[1], self.schedule
        noise, given = self.policy.noise, self._preconditioner
        given = self.usual_preconditioner if given is None else given
        metric = (
            resolve(self._call, given, z, target.num_data)
            if noise is None
            else noise.preconditioner
        )
        stream = stream_of(target, self._minibatches)

        def potential(position: jax.Array, batch: Any) -> jax.Array:
            return evaluate(unravel(position), batch)

        full = partial(potential, batch="full")
        return sgmcmc.build(
            self.estimator(target, potential, full, stream),
            self.dynamics(base * schedule(0)),
            metric,
            schedule=lambda step: base * schedule(step),
            temperature=self._temperature,
        )

    @property
    def max_kick(self) -> float | None:
        """What a step that was chosen in warm-up may not exceed: see
        :class:`~numpyro_bnn.sgmcmc.Overdamped`.
        """
        chosen = self._step_size is None and self._temperature > 0
        return MOST_KICK if chosen else None

    # -- the contract of MCMCKernel ----------------------------------------------------

    @property
    def model(self) -> Callable:
        return with_parameters(self._model, self._learned)

    @property
    def sample_field(self) -> str:
        return "z"

    @property
    def default_fields(self) -> tuple[str, ...]:
        fields = ["z", "diverging", "refused_steps", "step_size"]
        fields += ["configurational_temperature", "gradient_noise", "num_gradients"]
        dynamics = self.dynamics(1.0)
        if dynamics.reports_energy:
            fields += ["energy_variance", "decoherence_length"]
        if type(dynamics).momentum is not sgmcmc.interfaces.Dynamics.momentum:
            fields.append("kinetic_temperature")
        return (*fields, "accept_prob") if dynamics.exact else tuple(fields)

    def learn(
        self, num_warmup: int, model_args: tuple, model_kwargs: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Optimize the parameters of :class:`~numpyro_bnn.priors.Learned`, and hold
        them in ``model`` from now on.
        """
        settings = (
            self._call,
            self._model,
            self._init_strategy,
            self._warm_start,
            num_warmup,
            self.optimizer_steps(),
        )
        self._learned = learned_parameters(
            *settings, model_args, dict(model_kwargs or {})
        )
        return self._learned

    def init(
        self,
        rng_key: jax.Array,
        num_warmup: int,
        init_params: Any = None,
        model_args: tuple = (),
        model_kwargs: Mapping[str, Any] | None = None,
    ) -> SGMCMCState:
        call, single = self._call, is_prng_key(rng_key)
        chain_key, init_key = split(rng_key)
        given = (
            init_key,
            self._init_strategy,
            model_args,
            model_kwargs,
            self._temperature,
        )
        target, z = bind(
            call,
            self._model,
            *given,
            partial(self.learn, num_warmup, model_args, model_kwargs),
        )
        if target.stochastic and (self.exact or self._gradient != "minibatch"):
            came = (
                "a model that draws random numbers of its own (`numpyro.prng_key`, as "
                "dropout does)"
            )
            instead = (
                "Its potential on all data varies: use SGLD, SGHMC or SGNHT with "
                "`gradient='minibatch'`."
            )
            raise argument_error(call, "model", came, instead)
        if init_params is not None:
            z = given_values(call, target, z, init_params, model_args, model_kwargs)
            check_start(
                call, "init_params", target, z, single, model_args, model_kwargs
            )
        elif self._warm_start.spread != 1:
            z = jax.tree.map(lambda value: self._warm_start.spread * value, z)
            check_start(call, "warm_start", target, z, single, model_args, model_kwargs)
        noisy = target.subsampled and not self.exact
        if not noisy or self._gradient != "minibatch" or self._warm_start.held_out:
            refuse_rows(call, BY_BATCHES, model_args, model_kwargs)
        one = z if single else jax.tree.map(lambda leaf: leaf[0], z)
        check_held_out(
            call, target, self._warm_start.held_out, one, model_args, model_kwargs
        )
        policy = self.make_policy(target, num_warmup)
        if learns_from_noise(
            self._call, self._preconditioner, noisy, self._step_size, self._gradient
        ):
            size, begin = ravel_pytree(one)[0].size, policy.warm_start_length // 2
            ratio = max(
                (plate.size / plate.batch_size for plate in target.plates.values()),
                default=0.0,
            )
            noise = NoisePreconditioner.plan(
                size, begin, num_warmup, self._steps_per_draw, ratio
            )
            policy = self.learning_noise(policy, noise)
        self._policy = policy
        self._sample_fn = self.sample

        def start(
            given: tuple[Any, jax.Array], args: tuple, kwargs: Mapping[str, Any]
        ) -> SGMCMCState:
            z, key = given
            begin = Chain(policy, args, kwargs).start
            return begin(z, key) if single else jax.vmap(begin)(z, key)

        return run(start, (z, chain_key), model_args, model_kwargs or {})

    def sample(
        self,
        state: SGMCMCState,
        model_args: tuple,
        model_kwargs: Mapping[str, Any] | None,
    ) -> SGMCMCState:
        chain = Chain(self.policy, model_args, model_kwargs)
        if is_prng_key(state.rng_key):
            return chain.transition(state, state.i)
        i = state.i[0]  # all chains are at the same transition
        return jax.vmap(lambda s: chain.transition(s, i), out_axes=0)(state)

    def refresh(
        self,
        state: SGMCMCState,
        model_args: tuple,
        model_kwargs: Mapping[str, Any] | None,
    ) -> SGMCMCState:
        chain = Chain(self.policy, model_args, model_kwargs)
        return (
            chain.refresh(state)
            if is_prng_key(state.rng_key)
            else jax.vmap(chain.refresh)(state)
        )

    def postprocess_fn(
        self, model_args: tuple, model_kwargs: Mapping[str, Any] | None
    ) -> Callable:
        return self.target.postprocess(model_args, model_kwargs)

    def get_constrain_fn(
        self, model_args: tuple, model_kwargs: Mapping[str, Any] | None
    ) -> Callable:
        return self.target.constrain(model_args, model_kwargs)

    def get_diagnostics_str(self, state: SGMCMCState) -> str:
        """Text for the progress bar, ``{steps} steps of size {step_size}``.

        ``MCMC`` asks after every transition: not to wait for the device, the old text
        is returned for a while.
        """
        now = time.monotonic()
        ready = getattr(state.step_size, "is_ready", lambda: True)()
        if ready or now - self._shown[0] > 0.1:
            step_size, diverged = jax.device_get(
                (state.step_size, state.engine.first_divergence)
            )
            text = (
                f"{self._steps_per_draw} steps of size {float(np.mean(step_size)):.2e}"
            )
            text += (
                f", DIVERGED at step {int(np.max(diverged))}"
                if np.max(diverged) >= 0
                else ""
            )
            self._shown = (now, text)
        return self._shown[1]

    def wrap_model(self, wrapper: Callable) -> "SGMCMCKernel":
        kernel = copy.copy(self)
        kernel._model = wrapper(self._model)
        kernel._reset()
        return kernel

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_policy": None}

    @property
    def policy(self) -> Policy:
        """What the chains of this run do."""
        if self._policy is None:
            raise argument_error(
                self._call,
                "state",
                "a kernel that is not initialized",
                "Call `init` first.",
            )
        return self._policy

    @property
    def target(self) -> Target:
        """The model bound to its arguments."""
        return self.policy.target

    # -- read by the export ------------------------------------------------------------

    def members(
        self,
        state: SGMCMCState,
        model_args: tuple,
        model_kwargs: Mapping[str, Any] | None,
    ) -> dict[str, jax.Array]:
        """Values of the sites where each chain ended its warm start, (C, ...): a deep
        ensemble.

        :raises ValueError: for a kernel without warm start.
        """
        if not self.policy.warm_start_length:
            instead = "Use a warm start: the points where it ends are the members."
            raise argument_error(
                "to_inference_data", "members", "a run without warm start", instead
            )
        first, positions = state.z, jnp.atleast_2d(state.optimizer.position)
        unravel = ravel_pytree(
            jax.tree.map(lambda leaf: leaf[0], first) if state.i.ndim else first
        )[1]
        return jax.vmap(self.postprocess_fn(model_args, model_kwargs))(
            jax.vmap(unravel)(positions)
        )

    def describe(self, state: SGMCMCState) -> dict[str, str | float | int]:
        """What :func:`~numpyro_bnn.to_inference_data` writes into the attributes of a
        run.
        """
        size = int(state.engine.position.shape[-1])
        low, high = temperature_band(size, self._temperature)
        seen, frozen = (
            state.coverage,
            state.coverage.frozen(self._temperature, self._steps_per_draw),
        )
        covered = (
            seen.share(self._temperature) if seen.known(self._temperature) else None
        )
        movement = {"variance_covered": covered, "mean_accept_prob": seen.accept_prob}
        return {
            **{
                name: listed(value)
                for name, value in movement.items()
                if value is not None
            },
            "frozen_chains": str(np.flatnonzero(frozen).tolist()),
            "temperature_band_low": low,
            "temperature_band_high": high,
            "steps_per_draw": self._steps_per_draw,
            "steps_needed": self._steps_needed(state, size),
            "steps_kept": int(np.min(seen.draws)) * self._steps_per_draw,
            "temperature": self._temperature,
            "biased": not self.exact,
            "noisy_gradients": self.target.subsampled,
            "base_step_size": listed(state.base_step_size),
            "first_divergence": listed(state.engine.first_divergence),
            "refused_steps": listed(seen.refused_steps),
            "restarts": listed(state.origin.restarts),
            "num_parameters": size,
        }

    def _steps_needed(self, state: SGMCMCState, size: int) -> float:
        """Steps in which a chain forgets its position often enough; 0 if that is not
        known.
        """
        even = self.choose_step_size(
            jnp.array(0.01), Noise(*jnp.array([1.1, 1.0, 0.0])), size
        )  # where G is known
        steps = np.maximum(jax.device_get(state.base_step_size), even)
        return float(FORGOTTEN * np.max(self.policy.steps_to_forget(steps, size)))
