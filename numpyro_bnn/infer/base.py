"""The adapter between the engine and NumPyro's ``MCMCKernel``; a kernel adds a choice of parts."""

import copy
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from numpyro.infer.initialization import init_to_uniform
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import is_prng_key

from numpyro_bnn import sgmcmc
from numpyro_bnn._checks import argument_error
from numpyro_bnn._keys import split
from numpyro_bnn.infer.chain import Chain
from numpyro_bnn.infer.options import OPTIONS, check_options, warm_start_of
from numpyro_bnn.infer.preconditioning import resolve
from numpyro_bnn.infer.prior_precision import prior_precision
from numpyro_bnn.infer.state import SGMCMCState
from numpyro_bnn.infer.target import Target, bind, given_values, stream_of
from numpyro_bnn.infer.temperature import temperature_band
from numpyro_bnn.infer.tuning import steer_acceptance
from numpyro_bnn.infer.warm_start import WarmStart, check_held_out, members_of

__all__ = ["SGMCMCKernel"]


class SGMCMCKernel(MCMCKernel):
    """Base of the stochastic-gradient kernels: everything but the dynamics.

    One transition runs ``steps_per_draw`` steps inside one compiled loop, so that the host is met once per draw.
    Warm-up transitions optimize first (``warm_start``), then sample while preconditioner and step size adapt.

    Parameters of every kernel:

    :param model: a NumPyro model. A plate with ``subsample_size`` is the minibatch; without one all data are used.
    :param step_size: eps > 0, or a callable step -> eps (:mod:`numpyro_bnn.sgmcmc.schedules`, or an optax schedule),
        the step counted from the end of the warm start; ``None`` chooses it in warm-up from curvature and gradient
        noise.
    :param steps_per_draw: steps per transition of ``MCMC``.
    :param temperature: T; 1 is the Bayes posterior.
    :param gradient: ``"minibatch"``, ``"control_variates"`` (center at the end of the warm start) or ``"svrg"``.
    :param minibatches: ``"with_replacement"`` or ``"epochs"`` (shuffled, without replacement).
    :param preconditioner: ``None``, ``"rmsprop"`` (adapted in warm-up, then frozen), ``"warm_start"`` (from its
        squared gradients), a number, an array (P,) or (P, P), a dictionary of these by site, or an
        :class:`~numpyro_bnn.sgmcmc.interfaces.Preconditioner`.
    :param warm_start: share of the warm-up spent on optimization, in [0, 1), 0 for none; or a
        :class:`~numpyro_bnn.infer.WarmStart` with more to choose.
    :param optimizer: optax transformation of the warm start; by default that of ``WarmStart``.
    :param bias_tolerance: relative error of a posterior variance that ``step_size=None`` aims at.
    :param init_strategy: as for NumPyro's kernels.

    >>> from numpyro_bnn.infer import SGLD, SGMCMCKernel
    >>> isinstance(SGLD(lambda: None), SGMCMCKernel)
    True
    """

    exact = False
    target_accept_prob: float | None = None
    preconditioners: tuple[str, ...] = ()  # names beside those that all kernels know

    def __init__(
        self,
        model: Callable,
        step_size: float | Callable | None = None,
        *,
        steps_per_draw: int = 100,
        temperature: float = 1.0,
        gradient: str = "minibatch",
        minibatches: str = "with_replacement",
        preconditioner: Any = None,
        warm_start: Any = 0.25,
        optimizer: Any = None,
        bias_tolerance: float = 0.05,
        init_strategy: Callable = init_to_uniform,
    ) -> None:
        self._model = model
        self._step_size = step_size
        self._steps_per_draw = steps_per_draw
        self._temperature = temperature
        self._gradient = gradient
        self._minibatches = minibatches
        self._preconditioner = preconditioner
        self._warm_start = warm_start_of(self._call, warm_start, optimizer)
        self._bias_tolerance = bias_tolerance
        self._init_strategy = init_strategy
        self._check_arguments()
        self._reset()

    @property
    def _call(self) -> str:
        return f"infer.{type(self).__name__}"

    def _check_arguments(self) -> None:
        if not callable(self._model):
            raise argument_error(
                self._call, "model", self._model, "Pass a NumPyro model (a function).", TypeError
            )
        options = {name: getattr(self, f"_{name}") for name in OPTIONS} | {"warm_start": self._warm_start}
        check_options(self._call, self.exact, **options, more_preconditioners=self.preconditioners)

    def _reset(self) -> None:
        """Forget what was built for a model and its arguments."""
        self._target: Target | None = None
        self._num_warmup = 0
        self._sample_fn: Callable | None = None
        self._shown = (0.0, "")  # when the progress bar was last told something, and what

    # -- what a kernel chooses -------------------------------------------------------------------------

    @abstractmethod
    def dynamics(self, full_potential: Callable, step_size: Any) -> sgmcmc.interfaces.Dynamics:
        """How the position moves; ``step_size`` is the eps of the first step."""

    def choose_step_size(self, curvature: jax.Array, noise: jax.Array) -> jax.Array:
        """eps for a largest curvature and largest gradient-noise variance (both preconditioned).

        Overdamped: a coordinate of curvature lam and noise V has a variance too large by the share
        (eps / 4) (lam + V / T) to first order. At most a quarter of the limit of stability, whatever is tolerated.
        """
        tolerated = 4 * self._bias_tolerance / (curvature + noise / max(self._temperature, 1e-12))
        return jnp.minimum(1 / curvature, tolerated)

    def stable_step_size(self, curvature: jax.Array, noise: jax.Array) -> jax.Array:
        """eps for traveling: a quarter of the limit of stability where the variance of the gradient, summed, is
        ``noise`` times its square. Far from the mode both grow alike, and larger steps throw a chain ever further.
        """
        return 1 / (curvature * (1 + noise))

    def step_length(self, step_size: jax.Array, size: int) -> jax.Array:
        """The first step size in the kernel's own unit, for P = ``size`` parameters."""
        return step_size

    def start_tuning(self, position: jax.Array, step_size: jax.Array) -> Any:
        """What :meth:`adapt` remembers, at the start."""
        return ()

    def precondition(self, sampler: sgmcmc.Sampler, engine: sgmcmc.State, i: jax.Array) -> sgmcmc.State:
        """Set the preconditioner where noise and curvature are measured, before transition ``i``."""
        return engine

    def adapt(
        self, before: SGMCMCState, after: SGMCMCState, sampler: sgmcmc.Sampler, i: jax.Array
    ) -> SGMCMCState:
        """Change a chain after transition ``i``: here the acceptance of an exact kernel is steered in warm-up.

        :param before: the transition, with caches renewed.
        :param after: it.
        """
        return steer_acceptance(self, after, i)

    # -- the contract of MCMCKernel --------------------------------------------------------------------

    @property
    def model(self) -> Callable:
        return self._model

    @property
    def sample_field(self) -> str:
        return "z"

    @property
    def default_fields(self) -> tuple[str, ...]:
        fields = [
            "z",
            "diverging",
            "step_size",
            "configurational_temperature",
            "gradient_noise",
            "num_gradients",
        ]
        dynamics = self.dynamics(lambda z: z, 1.0)
        if dynamics.reports_energy:
            fields += ["energy_variance", "decoherence_length"]
        if type(dynamics).momentum is not sgmcmc.interfaces.Dynamics.momentum:
            fields.append("kinetic_temperature")
        return (*fields, "accept_prob") if dynamics.exact else tuple(fields)

    def init(
        self,
        rng_key: jax.Array,
        num_warmup: int,
        init_params: Any = None,
        model_args: tuple = (),
        model_kwargs: Mapping[str, Any] | None = None,
    ) -> SGMCMCState:
        chain_key, init_key = split(rng_key)
        self._target, z = bind(
            self._call, self._model, init_key, self._init_strategy, model_args, model_kwargs
        )
        if self._target.stochastic and (self.exact or self._gradient != "minibatch"):
            raise argument_error(
                self._call,
                "model",
                "a model that draws random numbers of its own (`numpyro.prng_key`, as dropout does)",
                "Its potential on all data has no one value: use SGLD, SGHMC or SGNHT with `gradient='minibatch'`.",
            )
        if init_params is None:
            z = jax.tree.map(lambda value: self._warm_start.spread * value, z)
        else:
            z = given_values(self._call, self._target, z, init_params, model_args, model_kwargs)
        one = z if is_prng_key(rng_key) else jax.tree.map(lambda leaf: leaf[0], z)
        check_held_out(self._call, self._warm_start, self._target, one, model_args, model_kwargs)
        self._num_warmup = num_warmup
        chain = Chain(self, model_args, model_kwargs)
        self._sample_fn = chain.transition
        return chain.start(z, chain_key) if is_prng_key(rng_key) else jax.vmap(chain.start)(z, chain_key)

    def sample(
        self, state: SGMCMCState, model_args: tuple, model_kwargs: Mapping[str, Any] | None
    ) -> SGMCMCState:
        chain = Chain(self, model_args, model_kwargs)
        if is_prng_key(state.rng_key):
            return chain.transition(state, state.i)
        i = state.i[0]  # all chains are at the same transition
        return jax.vmap(lambda s: chain.transition(s, i), out_axes=0)(state)

    def postprocess_fn(self, model_args: tuple, model_kwargs: Mapping[str, Any] | None) -> Callable:
        return self.target.postprocess(model_args, model_kwargs)

    def get_constrain_fn(self, model_args: tuple, model_kwargs: Mapping[str, Any] | None) -> Callable:
        return self.target.constrain(model_args, model_kwargs)

    def get_diagnostics_str(self, state: SGMCMCState) -> str:
        """One number per kind: ``{steps} steps of size {step_size}``.

        ``MCMC`` asks after every transition. To wait for the device each time would let it idle between transitions,
        so a state that is not computed yet is waited for ten times a second; else the last answer is given again.
        """
        now = time.monotonic()
        ready = getattr(state.step_size, "is_ready", lambda: True)()
        if ready or now - self._shown[0] > 0.1:
            self._shown = (now, self._diagnostics(state))
        return self._shown[1]

    def _diagnostics(self, state: SGMCMCState) -> str:
        step_size, diverged = jax.device_get((state.step_size, state.engine.first_divergence))
        text = f"{self._steps_per_draw} steps of size {float(np.mean(step_size)):.2e}"
        return f"{text}, DIVERGED at step {int(np.max(diverged))}" if np.max(diverged) >= 0 else text

    def refresh(
        self, state: SGMCMCState, model_args: tuple, model_kwargs: Mapping[str, Any] | None
    ) -> SGMCMCState:
        chain = Chain(self, model_args, model_kwargs)
        return chain.refresh(state) if is_prng_key(state.rng_key) else jax.vmap(chain.refresh)(state)

    def wrap_model(self, wrapper: Callable) -> "SGMCMCKernel":
        kernel = copy.copy(self)
        kernel._model = wrapper(self._model)
        kernel._reset()
        return kernel

    def members(
        self, state: SGMCMCState, model_args: tuple, model_kwargs: Mapping[str, Any] | None
    ) -> dict[str, jax.Array]:
        """Values of the sites where each chain ended its warm start, (C, ...): a deep ensemble."""
        return members_of(self, state, model_args, model_kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_target": None, "_sample_fn": None}

    def describe(self, state: SGMCMCState) -> dict[str, str | float | int]:
        """What :func:`~numpyro_bnn.to_inference_data` writes into the attributes of a run."""
        size = int(state.engine.position.shape[-1])
        low, high = temperature_band(size, self._temperature)
        return {
            "temperature_band_low": low,
            "temperature_band_high": high,
            "steps_per_draw": self._steps_per_draw,
            "temperature": self._temperature,
            "biased": not self.exact,
            "base_step_size": _listed(state.base_step_size),
            "first_divergence": _listed(state.engine.first_divergence),
            "num_parameters": size,
        }

    def divergence_report(self, state: SGMCMCState) -> str | None:
        """Which chains diverged, at which step, and what to change; ``None`` if none did."""
        firsts, eps = jax.device_get((state.engine.first_divergence, state.base_step_size))
        chains = [
            f"chain {chain} at step {first}" for chain, first in enumerate(np.ravel(firsts)) if first >= 0
        ]
        if not chains:
            return None
        return (
            f"{self._call} diverged ({', '.join(chains)}): the draws of these chains are NaN from there on. Use a"
            f" smaller `step_size` (largest here: {np.max(eps):.2g}), or None to have one chosen."
        )

    # -- what a chain reads ----------------------------------------------------------------------------

    @property
    def target(self) -> Target:
        """The model bound to its arguments."""
        if self._target is None:
            raise argument_error(
                self._call, "state", "a kernel that is not initialized", "Call `init` first."
            )
        return self._target

    @property
    def num_warmup(self) -> int:
        return self._num_warmup

    @property
    def steps_per_draw(self) -> int:
        return self._steps_per_draw

    @property
    def preconditioner(self) -> Any:
        return self._preconditioner

    @property
    def warm_start_length(self) -> int:
        """Transitions that optimize."""
        return round(self._warm_start.share * self._num_warmup)

    def usual_steps(self, sampler: sgmcmc.Sampler) -> int:
        """Steps of the optimizer in a transition: as many gradients as sampling would take."""
        return self._steps_per_draw * sampler.dynamics.batches

    @property
    def sampled_warmup(self) -> int:
        """Steps of the engine before the sampling phase."""
        return (self._num_warmup - self.warm_start_length) * self._steps_per_draw

    @property
    def warm_start(self) -> WarmStart:
        """How the warm-up begins."""
        return self._warm_start

    @property
    def chooses_step_size(self) -> bool:
        return self._step_size is None

    @property
    def steers_step_size(self) -> bool:
        """Whether a chosen step size is a first guess, which :meth:`adapt` changes after every transition."""
        return self.target_accept_prob is not None

    @property
    def fixed_step_size(self) -> float | None:
        """The step size where it is one number."""
        return None if callable(self._step_size) else self._step_size

    def schedule(self, step: Any) -> Any:
        """Factor of the base step size at a step of the engine."""
        return self._step_size(step) if callable(self._step_size) else 1.0

    def temperature_at(self, step: Any) -> Any:
        """T at a step of the engine."""
        return self._temperature

    def run(self, sampler: sgmcmc.Sampler, engine: sgmcmc.State, i: jax.Array) -> sgmcmc.State:
        """The steps of transition ``i``."""
        return sampler.run(engine, self._steps_per_draw)

    def sampler(
        self, z: Any, base: jax.Array, args: tuple, kwargs: Mapping[str, Any] | None
    ) -> sgmcmc.Sampler:
        """Put the engine together for these arguments; at trace time, so it costs nothing later."""
        target, unravel = self.target, ravel_pytree(z)[1]
        stream = stream_of(self._call, target, self._minibatches)

        def potential(position: jax.Array, batch: Any) -> jax.Array:
            return target.potential(args, kwargs, batch or {})(unravel(position))

        def full(position: jax.Array) -> jax.Array:
            return target.potential(args, kwargs, "full")(unravel(position))

        prior = partial(prior_precision, self._call, self._model, z, args, kwargs)
        dynamics = self.dynamics(full, base * self.schedule(0))
        return sgmcmc.build(
            self.estimator(potential, full, stream),
            dynamics,
            resolve(self._call, self._preconditioner, z, target.num_data, prior),
            schedule=lambda step: base * self.schedule(step),
            temperature=self.temperature_at,
        )

    def estimator(self, potential: Callable, full: Callable, stream: Any) -> sgmcmc.interfaces.Gradient:
        """The gradient estimator."""
        if isinstance(stream, sgmcmc.streams.FullData):
            return sgmcmc.Full(lambda position: potential(position, {}))
        if self._gradient == "control_variates":
            return sgmcmc.ControlVariates(potential, full, stream)
        if self._gradient == "svrg":
            plate = max(self.target.plates.values())
            return sgmcmc.SVRG(potential, full, stream, period=max(1, plate.size // plate.batch_size))
        return sgmcmc.Minibatch(potential, stream)


def _listed(by_chain: jax.Array) -> str:
    return str(np.ravel(jax.device_get(by_chain)).tolist())
