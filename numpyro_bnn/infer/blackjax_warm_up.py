"""The warm-ups of BlackJAX, each as one function of a log density and a position."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import import_module
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax, random
from jax.flatten_util import ravel_pytree

from numpyro_bnn._checks import argument_error
from numpyro_bnn._types import Kwargs, PyTree, Scalar
from numpyro_bnn.infer.target import Target
from numpyro_bnn.program.posterior import Posterior

DECOMPOSING = ("pathfinder_adaptation", "window_adaptation_low_rank")
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
    for attribute, value in vars(integrators).items():  # closures without a name
        if value is integrator:
            name = attribute
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

    On a CPU, warm-ups with decompositions take chains one after the other. In jaxlib
    0.10 a decomposition of several matrices waits for threads of the pool that it runs
    on: as many of them at once as there are cores wait forever.
    """
    options = {"adaptation_info_fn": _traced, **task.options}
    adaptation = task.adaptation(task.algorithm, log_density, **options)
    fixed: dict[str, Any] = {}  # numbers and functions

    def run(rng_key: Array, z: PyTree) -> tuple:
        (end, parameters), trace = adaptation.run(rng_key, z, task.num_steps)
        tuned = {name: parameters.pop(name) for name in _METRIC}
        fixed.update(parameters)
        return end, tuned, trace

    decomposes = name_in(import_module("blackjax"), task.adaptation) in DECOMPOSING
    decomposes |= "metric" in task.options  # of `staged_adaptation`
    if decomposes and jax.default_backend() == "cpu":
        run = jax.custom_batching.sequential_vmap(run)
    end, tuned, trace = run(rng_key, z)
    parameters, position = {**fixed, **tuned}, end.position
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


def of_low_rank_mclmc(
    task: WarmUpTask, log_density: LogDensity, z: PyTree, rng_key: Array
) -> TunedChain:
    """The same with a low-rank metric: a pilot with a diagonal one, the widest and the
    narrowest directions of its draws, and length and step size in their metric. They
    take a seventh, four and two sevenths of the steps.

    The rank is at most half of the effective number of draws: of further directions
    they know nothing. Its eigenvalues are then 1, because the rank of an array is known
    before the draws.
    """
    blackjax, tuning, options = import_module("blackjax"), *task.split()
    estimators = import_module("blackjax.adaptation.metric_estimators")
    energy = {n: options.pop(n) for n in ("desired_energy_var",) if n in options}
    kernel = task.algorithm.build_kernel(**options)  # type: ignore[attr-defined]
    find = partial(
        blackjax.mclmc_find_L_and_step_size, logdensity_fn=log_density, **energy
    )
    init_key, pilot_key, draw_key, last_key = random.split(rng_key, 4)
    seventh, num_draws = task.num_steps // 7, max(4 * task.num_steps // 7, 4)
    chain = task.algorithm.init(z, log_density, init_key)  # type: ignore[attr-defined]
    # a third of these steps are taken
    chain, pilot, of_pilot = find(kernel, 3 * seventh, chain, pilot_key)

    def draw(chain: PyTree, rng_key: Array) -> tuple[PyTree, Array]:
        scales = pilot.inverse_mass_matrix, pilot.L, pilot.step_size
        chain, _ = kernel(rng_key, chain, log_density, *scales)
        return chain, ravel_pytree(chain.position)[0]

    chain, draws = lax.scan(draw, chain, random.split(draw_key, num_draws))
    scales = jnp.std(draws, axis=0)
    scales = jnp.where(scales > 0, scales, 1.0)
    _, values, directions = jnp.linalg.svd(
        (draws - draws.mean(0)) / scales, full_matrices=False
    )
    values = values[: num_draws - 1]  # without that of the mean
    basis, variances = estimators.select_top_eigenvalues_by_informativeness(
        values**2 / num_draws,
        directions[: len(values)].T,
        min(tuning.get("k", 10), len(values)),
        tail_handling="raw",
    )
    resolved = jnp.min(blackjax.ess(draws[None])) / 2 >= jnp.arange(
        1, 1 + len(variances)
    )
    variances = jnp.where(resolved, jnp.maximum(variances, 1e-6), 1.0)
    metrics = import_module("blackjax.mcmc.metrics")
    metric = metrics.LowRankInverseMassMatrix(scales, basis, variances)

    def in_metric(rng_key: Array, state: PyTree, **given: Any) -> PyTree:
        return kernel(rng_key, state, **{**given, "inverse_mass_matrix": metric})

    chain, tuned, num_second = find(
        in_metric, 6 * seventh, chain, last_key, diagonal_preconditioning=False
    )
    settings = {
        "L": tuned.L,
        "step_size": tuned.step_size,
        "inverse_mass_matrix": metric,
    }
    per_step = gradients_of_integrator(
        options.get("integrator"), "isokinetic_mclachlan"
    )
    steps = of_pilot + num_draws + num_second
    return TunedChain(chain, settings | options, per_step * steps + 1)


def of_adjusted_mclmc(
    task: WarmUpTask, log_density: LogDensity, z: PyTree, rng_key: Array
) -> TunedChain:
    """The same of the kernel with a Metropolis test and trajectories of random length
    (MAMS).

    A third of the steps go before, without a test. From a far start the trajectories of
    BlackJAX's first length would have thousands of steps.
    """
    tuning, options = task.split()
    tuning = {"target": 0.9, **tuning}
    first, second, third = _shares(task)
    # step sizes are found again after the second stage, and after the third
    repeats = 1 + bool(second) + bool(third)
    before_init, init_key, before_key, rng_key = random.split(rng_key, 4)
    module = import_module("blackjax.mcmc.adjusted_mclmc_dynamic")
    steps_fn = module.make_random_trajectory_length_fn(True)
    build = {n: options[n] for n in options if n != "L_proposal_factor"}
    blackjax = import_module("blackjax")
    integrator = {n: options[n] for n in ("integrator",) if n in options}
    preconditioned = tuning.get("diagonal_preconditioning", True)
    # a third of the number of steps that it is given are taken
    before, start, steps_before = blackjax.mclmc_find_L_and_step_size(
        blackjax.mclmc.build_kernel(**integrator),
        task.num_steps,
        blackjax.mclmc.init(z, log_density, before_init),
        before_key,
        log_density,
        diagonal_preconditioning=preconditioned,
    )
    num_steps = task.num_steps - task.num_steps // 3
    chain, tuned, steps = task.adaptation(
        mclmc_kernel=module.build_kernel(integration_steps_fn=steps_fn, **build),
        logdensity_fn=log_density,
        num_steps=round(num_steps / (repeats * first + second + third)),
        state=module.init(before.position, log_density, init_key),
        rng_key=rng_key,
        params=start,
        **tuning,
    )
    steps += steps_before
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


def _size_of(z: PyTree) -> int:
    """The parameters of a chain."""
    return sum(leaf[0].size for leaf in jax.tree.leaves(z))


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


def of_laps(
    task: WarmUpTask, log_density: LogDensity, z: PyTree, rng_key: Array
) -> TunedChain:
    """Microcanonical chains that learn one length, step size and diagonal metric from
    all of them, first without a Metropolis test, until their means stand still or half
    of the gradients are spent, then with one (LAPS).
    """
    sizes = import_module("blackjax.adaptation.step_size")
    integrators = import_module("blackjax.mcmc.integrators")
    tuning, options = task.split()
    number, size = _number_of(z), _size_of(z)
    per_sample = tuning.get("steps_per_sample", 15)
    scheme, target = ("omelyan", 0.9) if size > 200 else ("mclachlan", 0.7)
    options = {"integrator": getattr(integrators, f"isokinetic_{scheme}"), **options}
    per_step = gradients_of_integrator(options["integrator"], "")
    num_samples = -(-task.num_steps // 2)
    limit = max((task.num_steps - num_samples) * per_sample * per_step, 2)
    first_key, last_key = random.split(rng_key)
    chains, settings, count = _burnt_in(tuning, log_density, z, limit, first_key)
    metric = jnp.ones_like(settings.inverse_mass_matrix)
    if tuning.get("diagonal_preconditioning", True):
        metric = settings.inverse_mass_matrix
    step_size = settings.step_size / jnp.sqrt(jnp.mean(metric))
    of_step = {
        "inverse_mass_matrix": metric,
        "L_proposal_factor": options.pop("L_proposal_factor", 1.25),
        "integration_steps_params": (per_sample,),
    }
    algorithm: Any = task.algorithm
    adjusted = algorithm.build_kernel(**options)
    # BlackJAX's bisection may end at a step size that it has not tried
    begin, update, final = sizes.dual_averaging_adaptation(
        tuning.get("acc_prob", target)
    )

    def transition(carry: tuple, rng_key: Array) -> tuple:
        chains, tuned = carry
        step = partial(
            adjusted,
            logdensity_fn=log_density,
            step_size=jnp.exp(tuned.log_step_size),
            **of_step,
        )
        chains, info = jax.vmap(step)(random.split(rng_key, number), chains)
        return (chains, update(tuned, jnp.mean(info.acceptance_rate))), None

    init = partial(algorithm.init, logdensity_fn=log_density)
    first = begin(step_size)._replace(mu=jnp.log(step_size))
    carry = jax.vmap(init)(chains.position), first
    keys = random.split(last_key, num_samples)
    (chains, tuned), _ = lax.scan(transition, carry, keys)
    spent = count + num_samples * per_sample * per_step + 2
    parameters = {**options, **of_step, "step_size": final(tuned)}
    return TunedChain(chains, parameters, spent)


def _burnt_in(
    tuning: Kwargs, log_density: LogDensity, z: PyTree, limit: int, rng_key: Array
) -> tuple[PyTree, PyTree, Array]:
    """Chains after steps without a test, what they have learned, and their number."""
    burn_in = import_module("blackjax.adaptation.laps_burn_in")
    chains = _along_gradients(log_density, z)
    number, size = _number_of(z), _size_of(z)
    names = {"alpha": 1.9, "C": 0.1, "r_end": 0.01, "bias_type": 3}
    collective = burn_in.Adaptation(
        size,
        True,
        save_num=max(round(tuning.get("save_frac", 0.2) * limit), 2),
        **{name: tuning.get(name, default) for name, default in names.items()},
    )
    kernel = jax.vmap(burn_in.build_kernel(log_density, size), (0, 0, None))
    summaries = jax.vmap(collective.summary_statistics_fn, (0, 0, None))

    def burn(carry: tuple) -> tuple:
        chains, settings, count, _ = carry
        keys = random.split(random.fold_in(rng_key, count), number + 1)
        chains, info = kernel(keys[1:], chains, settings)
        means = jax.tree.map(
            lambda leaf: jnp.mean(leaf, axis=0), summaries(chains, info, keys[0])
        )
        settings, info = collective.update(settings, means)
        return chains, settings, count + 1, collective.while_cond(info, count)

    begin = chains, collective.initial_state, jnp.int32(0), jnp.array(True)
    return lax.while_loop(lambda carry: carry[3] & (carry[2] < limit), burn, begin)[:3]


def _along_gradients(log_density: LogDensity, z: PyTree) -> PyTree:
    """Chains that move up the density in coordinates where they are too wide, and down
    where they are too narrow.
    """
    states = import_module("blackjax.mcmc.integrators")
    values, gradients = jax.vmap(jax.value_and_grad(log_density))(z)
    norms = jax.vmap(lambda tree: jnp.linalg.norm(ravel_pytree(tree)[0]))(gradients)

    def velocity(x: Array, gradient: Array) -> Array:
        too_narrow = jnp.mean(-x * gradient, axis=0) < 1
        shape = (len(norms), *(1,) * (x.ndim - 1))
        direction = gradient / jnp.maximum(norms, 1e-30).reshape(shape)
        return jnp.where(too_narrow, -direction, direction)

    return states.IntegratorState(
        z, jax.tree.map(velocity, z, gradients), values, gradients
    )


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
    end, sound, _, num_gradients = lax.while_loop(more, round_, begin)
    weights, particles = _weighted(end)
    chosen = tuning["resampling_fn"](last_key, weights / jnp.sum(weights), number)
    chain_init = task.algorithm(log_density, **options).init

    def arrived(z: PyTree, rng_key: Array) -> PyTree:
        chain = chain_init(z, rng_key)
        is_draw = sound & (end.tempering_param >= 1) & jnp.isfinite(chain.logdensity)
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
    "mclmc_lrd_warmup": WarmUpRow(
        of_low_rank_mclmc, ("mclmc",), ("L", *_METRIC), given=("desired_energy_var",)
    ),
    "laps": WarmUpRow(
        of_laps,
        ("adjusted_mclmc",),
        (*_METRIC, "integration_steps_params", "num_integration_steps"),
        min_chains=16,
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
    # of `mclmc_lrd_warmup`
    "position",
    "pilot_num_warmup",
    "pilot_num_samples",
    "lrd_num_steps",
    "inner_kernel",
    "floor_factor",
    "adjusted_num_steps",
    "adjusted_target",
    "warmup_step_init",
    # of `laps`
    "sample_init",
    "ndims",
    "num_steps1",
    "num_steps2",
    "mesh",
    "microcanonical",
    "early_stop",
    "integrator_coefficients",
    "observables_for_bias",
    "all_chains_info",
    "diagnostics",
    "contract",
    "superchain_size",
}
USERS_OWN = WarmUpRow(of_user, (), ())


def name_in(module: Any, value: object) -> str:
    """The first name of a function in a module, or ``""``. Copies and pickles of an
    algorithm are equal to it.
    """
    if callable(value):
        for name, attribute in vars(module).items():
            if attribute == value:
                return name
    return ""


def warm_up_row(call: str, adaptation: PyTree, algorithm: str) -> WarmUpRow:
    """The row of an adaptation; refuse one that cannot run inside a kernel, or that
    tunes other algorithms.
    """
    blackjax = package(call, "adaptation")
    laps = import_module("blackjax.adaptation.laps")
    name = name_in(blackjax, adaptation) or name_in(laps, adaptation)
    row = WARM_UPS.get(name)
    if row is None:
        return _users_own(call, adaptation, name)
    if algorithm not in row.algorithms:
        tuned = ", ".join(f"`blackjax.{algorithm}`" for algorithm in row.algorithms)
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
        f"Pass one of BlackJAX ({', '.join(WARM_UPS)}), with "
        "its options beside it, or a function `(rng_key, log_density, position, "
        "num_steps) -> (position, parameters, num_gradients)`."
    )
    came = f"`blackjax.{name}`" if name else adaptation
    raise argument_error(call, "adaptation", came, instead, TypeError)
