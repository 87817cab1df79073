"""The warm-ups of BlackJAX, each as one function of a log density and a position."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax, random

from numpyro_bnn._checks import argument_error
from numpyro_bnn._types import Kwargs, PyTree, Scalar
from numpyro_bnn.infer.target import Target
from numpyro_bnn.program.posterior import Posterior

MAX_TEMPERATURES = 100  # of persistent sampling, which keeps the particles of all


def package(call: str, argument: str) -> Any:
    """BlackJAX."""
    try:
        return import_module("blackjax")
    except ImportError as cause:
        instead = "Install it with `pip install numpyro_bnn[blackjax]`."
        raise argument_error(
            call, argument, "no package blackjax", instead, ImportError
        ) from cause


@dataclass(frozen=True, eq=False)
class LogDensity:
    """The log density of unconstrained values by site, and its parts.

    :param target: the model; ``args``, ``kwargs``: its arguments.
    """

    target: Target
    args: tuple
    kwargs: Kwargs

    @cached_property
    def _evaluate(self) -> Callable:
        return self.target.evaluator(self.args, self.kwargs)

    @cached_property
    def _posterior(self) -> Posterior:
        return Posterior(self.target.model, self.args, self.kwargs)

    def __call__(self, z: PyTree, batch: PyTree = "full") -> Array:
        return -self._evaluate(z, batch)

    def prior(self, z: PyTree) -> Array:
        """The part of the prior, with Jacobians."""
        parts = [self._posterior.log_prior(z), self._posterior.log_jacobian(z)]
        return sum(jax.tree.leaves(parts), jnp.zeros(()))

    def likelihood(self, z: PyTree) -> Array:
        """The part of the data."""
        return self(z) - self.prior(z)

    def draw_prior(self, rng_key: Array) -> dict[str, Array]:
        """Unconstrained values, drawn from the prior."""
        sites = self._posterior.at({}, rng_key, self._posterior.latent)
        values = {name: site["value"] for name, site in sites.items()}
        return self._posterior.unconstrain(values)


def gradients_of_integrator(integrator: object, default: str) -> int:
    """Gradients of one integration step; 0 if they are not known.

    An integrator alternates kicks and drifts, and begins where it ended: a gradient for
    each second coefficient.

    >>> import importlib.util
    >>> if importlib.util.find_spec("blackjax"):
    ...     assert gradients_of_integrator(None, "isokinetic_mclachlan") == 2
    """
    integrators = import_module("blackjax.mcmc.integrators")
    name = default if integrator is None else ""
    for known, value in vars(integrators).items():  # closures without a name
        if value is integrator:
            name = known
    scheme = name.removeprefix("isokinetic_") + "_coefficients"
    return len(getattr(integrators, scheme, ())) // 2


class TunedChain(NamedTuple):
    """What a warm-up leaves behind.

    :param chain: state of the algorithm.
    :param parameters: arguments of the algorithm, by name.
    :param num_gradients: gradients that it took, of one chain.
    """

    chain: PyTree
    parameters: dict[str, PyTree]
    num_gradients: Scalar


def parameters_of(function: Callable) -> Mapping[str, inspect.Parameter]:
    """Parameters by name, of an algorithm those of its factory."""
    function = getattr(function, "differentiable", function)
    return inspect.signature(function).parameters


class WarmUpTask(NamedTuple):
    """A warm-up to do.

    :param algorithm: that of BlackJAX; ``adaptation``: the function that tunes it.
    :param options: of both, by name.
    :param num_steps: number of its transitions.
    """

    algorithm: Callable
    adaptation: Callable
    options: Mapping[str, Any]
    num_steps: int

    def split(self) -> tuple[dict, dict]:
        """Options of the adaptation, and of the algorithm."""
        names = parameters_of(self.adaptation)
        tuning = {name: self.options[name] for name in self.options if name in names}
        return tuning, {n: self.options[n] for n in self.options if n not in names}


class _Trace(NamedTuple):
    """What is kept of a transition of a warm-up.

    :param num_integration_steps: of it.
    :param mu_star: the center that a low-rank metric has found, or ``None``.
    :param position: values of the sites, if there is a center.
    """

    num_integration_steps: Scalar
    mu_star: PyTree
    position: PyTree

    @property
    def adaptation_state(self) -> "_Trace":
        """Where BlackJAX looks for ``mu_star``."""
        return self


def _traced(chain: PyTree, info: PyTree, adaptation_state: PyTree) -> _Trace:
    mu_star = getattr(adaptation_state, "mu_star", None)
    position = None if mu_star is None else chain.position
    return _Trace(info.num_integration_steps, mu_star, position)


def by_windows(
    task: WarmUpTask, log_density: LogDensity, z: PyTree, rng_key: Array
) -> TunedChain:
    """Step size and metric of Hamiltonian kernels, in windows or after Pathfinder.

    The chain goes on from its last state: the center that BlackJAX proposes after a
    low-rank metric would start all chains at one place.
    """
    options = {"adaptation_info_fn": _traced, **task.options}
    adaptation = task.adaptation(task.algorithm, log_density, **options)
    (last, parameters), trace = adaptation.run(rng_key, z, task.num_steps)
    position = last.position
    if trace.mu_star is not None:
        position = jax.tree.map(lambda positions: positions[-1], trace.position)
    if "integrator" in task.options:  # which BlackJAX does not hand on
        parameters = {**parameters, "integrator": task.options["integrator"]}
    chain = task.algorithm(log_density, **parameters).init(position, rng_key)
    per_step = gradients_of_integrator(
        task.options.get("integrator"), "velocity_verlet"
    )
    steps = jnp.sum(trace.num_integration_steps)
    return TunedChain(chain, parameters, per_step * steps + 2)


def _shares(task: WarmUpTask) -> list[float]:
    """Parts of the number of steps that the three stages take."""
    stages = []
    for name in ("frac_tune1", "frac_tune2", "frac_tune3"):
        default = parameters_of(task.adaptation)[name].default
        stages.append(task.options.get(name, default))
    return stages


def of_mclmc(
    task: WarmUpTask, log_density: LogDensity, z: PyTree, rng_key: Array
) -> TunedChain:
    """Length, step size and diagonal metric of the microcanonical kernel."""
    tuning, options = task.split()
    first, second, third = _shares(task)
    if tuning.get("diagonal_preconditioning", True):
        second += second / 3
    init_key, rng_key = random.split(rng_key)
    build = {n: options[n] for n in ("integrator",) if n in options}
    chain, tuned, steps = task.adaptation(
        mclmc_kernel=task.algorithm.build_kernel(**build),  # type: ignore[attr-defined]
        num_steps=round(task.num_steps / (first + second + third)),
        state=task.algorithm.init(z, log_density, init_key),  # type: ignore[attr-defined]
        rng_key=rng_key,
        logdensity_fn=log_density,
        **tuning,
    )
    per_step = gradients_of_integrator(
        options.get("integrator"), "isokinetic_mclachlan"
    )
    return TunedChain(chain, tuned._asdict() | options, per_step * steps + 1)


def of_adjusted_mclmc(
    task: WarmUpTask, log_density: LogDensity, z: PyTree, rng_key: Array
) -> TunedChain:
    """The same of the kernel with a Metropolis test and trajectories of random length
    (MAMS).
    """
    tuning, options = task.split()
    tuning = {"target": 0.9, **tuning}
    first, second, third = _shares(task)
    # step sizes are found again after the second stage, and after the third
    repeats = 1 + bool(second) + bool(third)
    init_key, rng_key = random.split(rng_key)
    module = import_module("blackjax.mcmc.adjusted_mclmc_dynamic")
    steps_fn = module.make_random_trajectory_length_fn(True)
    build = {n: options[n] for n in options if n != "L_proposal_factor"}
    chain, tuned, steps = task.adaptation(
        mclmc_kernel=module.build_kernel(integration_steps_fn=steps_fn, **build),
        logdensity_fn=log_density,
        num_steps=round(task.num_steps / (repeats * first + second + third)),
        state=module.init(z, log_density, init_key),
        rng_key=rng_key,
        **tuning,
    )
    parameters = {
        "step_size": tuned.step_size,
        "inverse_mass_matrix": tuned.inverse_mass_matrix,
        "integration_steps_fn": steps_fn,
        "integration_steps_params": (tuned.L / tuned.step_size,),
        **options,
    }
    per_step = gradients_of_integrator(
        options.get("integrator"), "isokinetic_mclachlan"
    )
    return TunedChain(chain, parameters, per_step * steps + 1)


# -- warm-ups that pool chains ---------------------------------------------------------


def _number_of(z: PyTree) -> int:
    return jax.tree.leaves(z)[0].shape[0]


def of_chees(
    task: WarmUpTask, log_density: LogDensity, z: PyTree, rng_key: Array
) -> TunedChain:
    """Step size and trajectory length of Hamiltonian Monte Carlo, from all chains."""
    import optax

    tuning, options = task.split()
    step_size = options.pop("step_size", 0.1)
    optimizer = options.pop("optim", None) or optax.adam(0.025)
    adaptation = task.adaptation(
        log_density, _number_of(z), adaptation_info_fn=_traced, **tuning
    )
    (chain, parameters), trace = adaptation.run(
        rng_key, z, step_size, optimizer, task.num_steps
    )
    steps = jnp.sum(trace.num_integration_steps) // _number_of(z)
    return TunedChain(chain, parameters | options, steps + 1)


def of_meads(
    task: WarmUpTask, log_density: LogDensity, z: PyTree, rng_key: Array
) -> TunedChain:
    """Step size, metric and damping of generalized Hamiltonian Monte Carlo."""
    tuning, options = task.split()
    adaptation = task.adaptation(
        log_density, _number_of(z), adaptation_info_fn=lambda *_: None, **tuning
    )
    (chain, parameters), _ = adaptation.run(rng_key, z, task.num_steps)
    return TunedChain(chain, parameters | options, jnp.int32(task.num_steps + 1))


def of_tempering(
    task: WarmUpTask, log_density: LogDensity, z: PyTree, rng_key: Array
) -> TunedChain:
    """Particles from the prior that are tempered to the posterior, and resampled: one
    for each chain.

    A round moves them by the algorithm. If there are fewer rounds in the warm-up than
    the temperatures need, or if weights are not finite, the chains are not a number, as
    they have not arrived; nor are single ones whose density is 0.
    """
    tuning, options = task.split()
    number, limit = _number_of(z), task.num_steps
    resample = import_module("blackjax.smc.resampling").systematic
    tuning = {"resampling_fn": resample, "num_mcmc_steps": 10} | tuning
    if "max_iterations" in parameters_of(task.adaptation):  # which has a default ESS
        limit = tuning.setdefault("max_iterations", min(limit, MAX_TEMPERATURES))
    else:
        tuning.setdefault("target_ess", 0.5)
    builder = task.algorithm.build_kernel  # type: ignore[attr-defined]
    build = {n: options[n] for n in options if n in parameters_of(builder)}
    moves = {n: jnp.asarray(options[n])[None] for n in options if n not in build}
    start_key, last_key, init_key, rng_key = random.split(rng_key, 4)
    init, step = task.adaptation(
        logprior_fn=log_density.prior,
        loglikelihood_fn=log_density.likelihood,
        mcmc_step_fn=builder(**build),
        mcmc_init_fn=task.algorithm.init,  # type: ignore[attr-defined]
        mcmc_parameters=moves,
        **tuning,
    )
    particles = jax.vmap(log_density.draw_prior)(random.split(start_key, number))
    particles = jax.tree.map(lambda new, old: new.astype(old.dtype), particles, z)
    first = init(particles)
    if hasattr(first, "weights"):  # the loop needs an array
        first = first._replace(tempering_param=jnp.zeros_like(first.weights[0]))

    per_step = gradients_of_integrator(options.get("integrator"), "velocity_verlet")

    def more(carry: tuple) -> Array:
        state, sound, rounds, _ = carry
        return (state.tempering_param < 1) & (rounds < limit) & sound

    def round_(carry: tuple) -> tuple:
        state, _, rounds, num_gradients = carry
        state, info = step(random.fold_in(rng_key, rounds), state)
        steps = getattr(info.update_info, "num_integration_steps", None)
        if steps is None:
            spent = jnp.int32(tuning["num_mcmc_steps"])
        else:
            spent = per_step * jnp.sum(steps, dtype=jnp.int32) // number
        # of likelihoods 0 at the same temperature
        sound = jnp.all(jnp.isfinite(_weighted(state)[0]))
        return state, sound, rounds + 1, num_gradients + spent + 1

    begin = first, jnp.array(True), jnp.int32(0), jnp.int32(1)
    last, sound, _, num_gradients = lax.while_loop(more, round_, begin)
    weights, particles = _weighted(last)
    chosen = tuning["resampling_fn"](last_key, weights / jnp.sum(weights), number)
    chain_init = task.algorithm(log_density, **options).init

    def arrived(z: PyTree, rng_key: Array) -> PyTree:
        chain = chain_init(z, rng_key)
        is_draw = sound & (last.tempering_param >= 1) & jnp.isfinite(chain.logdensity)
        return jax.tree.map(lambda leaf: jnp.where(is_draw, leaf, jnp.nan), chain)

    position = jax.tree.map(lambda x: x[chosen], particles)
    chain = jax.vmap(arrived)(position, random.split(init_key, number))
    return TunedChain(chain, options, num_gradients)


def _weighted(state: PyTree) -> tuple[Array, dict[str, Array]]:
    """Weights and particles, of persistent sampling those of all temperatures."""
    if hasattr(state, "weights"):
        return state.weights, state.particles
    particles = jax.tree.map(
        lambda x: x.reshape(-1, *x.shape[2:]), state.persistent_particles
    )
    return jnp.ravel(state.persistent_weights), particles


def of_user(
    task: WarmUpTask, log_density: LogDensity, z: PyTree, rng_key: Array
) -> TunedChain:
    """A function of the user's own."""
    init_key, rng_key = random.split(rng_key)
    position, parameters, num_gradients = task.adaptation(
        rng_key, log_density, z, task.num_steps
    )
    parameters = {**task.options, **parameters}
    chain = task.algorithm(log_density, **parameters).init(position, init_key)
    return TunedChain(chain, parameters, jnp.int32(num_gradients))


class WarmUpRow(NamedTuple):
    """A warm-up of BlackJAX.

    :param tune: does it; ``algorithms``: those that it tunes, by name.
    :param tuned: the arguments that it chooses.
    :param min_chains: how many it needs at once, in each of its folds; 1 if it tunes
        each chain by itself.
    :param given: arguments of its run.
    """

    tune: Callable[[WarmUpTask, LogDensity, PyTree, Array], TunedChain]
    algorithms: tuple[str, ...]
    tuned: tuple[str, ...]
    min_chains: int = 1
    given: tuple[str, ...] = ()


_HAMILTONIAN = ("nuts", "hmc", "mhmc")
_METRIC = ("step_size", "inverse_mass_matrix")
_MOVERS = ("hmc", "mala", "barker")
WARM_UPS: dict[str, WarmUpRow] = {
    "window_adaptation": WarmUpRow(by_windows, _HAMILTONIAN, _METRIC),
    "window_adaptation_low_rank": WarmUpRow(by_windows, _HAMILTONIAN, _METRIC),
    "staged_adaptation": WarmUpRow(by_windows, _HAMILTONIAN, _METRIC),
    "pathfinder_adaptation": WarmUpRow(by_windows, _HAMILTONIAN, _METRIC),
    "mclmc_find_L_and_step_size": WarmUpRow(of_mclmc, ("mclmc",), ("L", *_METRIC)),
    "adjusted_mclmc_find_L_and_step_size": WarmUpRow(
        of_adjusted_mclmc,
        ("adjusted_mclmc_dynamic",),
        (*_METRIC, "integration_steps_fn", "integration_steps_params"),
    ),
    "chees_adaptation": WarmUpRow(
        of_chees,
        ("dhmc",),
        (
            *_METRIC,
            "next_random_arg_fn",
            "integration_steps_fn",
            "integration_steps_params",
        ),
        min_chains=2,
        given=("optim", "step_size"),
    ),
    "meads_adaptation": WarmUpRow(
        of_meads,
        ("ghmc",),
        ("step_size", "momentum_inverse_scale", "alpha", "delta"),
        min_chains=4,
    ),
    "adaptive_tempered_smc": WarmUpRow(of_tempering, _MOVERS, (), min_chains=2),
    "adaptive_persistent_sampling_smc": WarmUpRow(
        of_tempering, _MOVERS, (), min_chains=2
    ),
}
# Arguments of warm-ups that the kernel gives.
MANAGED = {
    "logprior_fn",
    "loglikelihood_fn",
    "mcmc_step_fn",
    "mcmc_init_fn",
    "mcmc_parameters",
    "algorithm",
    "logdensity_fn",
    "mclmc_kernel",
    "num_steps",
    "state",
    "rng_key",
    "params",
    "num_chains",
    "n_chains",
    "adaptation_info_fn",
    "extra_parameters",
}
USERS_OWN = WarmUpRow(of_user, (), ())


def name_in(module: Any, value: object) -> str:
    """The first name of a function in a module, or ``""``. Copies and pickles of an
    algorithm are equal to it.
    """
    if callable(value):
        for name, known in vars(module).items():
            if known == value:
                return name
    return ""


def warm_up_row(call: str, adaptation: PyTree, algorithm: str) -> WarmUpRow:
    """The row of an adaptation; refuse one that cannot run inside a kernel, or that
    tunes other algorithms.
    """
    blackjax = package(call, "adaptation")
    name = name_in(blackjax, adaptation)
    row = WARM_UPS.get(name)
    if row is None:
        return _users_own(call, adaptation, name)
    if algorithm not in row.algorithms:
        tuned = ", ".join(f"`blackjax.{known}`" for known in row.algorithms)
        raise argument_error(
            call,
            "adaptation",
            f"`blackjax.{name}` for {algorithm or 'an algorithm of your own'}",
            f"It tunes {tuned}.",
        )
    return row


def _users_own(call: str, adaptation: PyTree, name: str) -> WarmUpRow:
    function = getattr(adaptation, "func", adaptation)
    of_blackjax = getattr(function, "__module__", "").split(".")[0] == "blackjax"
    takes_four = False
    if callable(adaptation) and not name and not of_blackjax:
        try:
            inspect.signature(adaptation).bind(*"abcd")
            takes_four = True
        except (TypeError, ValueError):
            pass
    if takes_four:
        return USERS_OWN
    instead = (
        f"Pass one of {', '.join(f'`blackjax.{known}`' for known in WARM_UPS)}, with "
        "its options beside it, or a function `(rng_key, log_density, position, "
        "num_steps) -> (position, parameters, num_gradients)`."
    )
    came = f"`blackjax.{name}`" if name else adaptation
    raise argument_error(call, "adaptation", came, instead, TypeError)
