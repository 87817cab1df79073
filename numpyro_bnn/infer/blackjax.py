"""The bridge to BlackJAX: its algorithms as kernels of NumPyro, and kernels as pairs of
functions.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from jax.flatten_util import ravel_pytree
from numpyro.infer.barker import BarkerMH
from numpyro.infer.gibbs import GIBBS_SITES_KWARG
from numpyro.infer.initialization import init_to_uniform
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import is_prng_key

from numpyro_bnn._checks import argument_error, unknown_name
from numpyro_bnn._keys import key_numbers, split
from numpyro_bnn._options import (
    Count,
    Kind,
    Model,
    Natural,
    Number,
    PositiveInt,
    checked,
)
from numpyro_bnn._types import Attributes, Kwargs, PyTree, Shape, Trees
from numpyro_bnn.infer.blackjax_warm_up import (
    MANAGED,
    USERS_OWN,
    LogDensity,
    WarmUpTask,
    gradients_of_integrator,
    name_in,
    package,
    parameters_of,
    warm_up_row,
)
from numpyro_bnn.infer.model_arguments import (
    MAX_CONSTANT_BYTES,
    DataVersion,
    ModelArguments,
    Start,
    first_of,
    over_chains,
)
from numpyro_bnn.infer.phases import listed
from numpyro_bnn.infer.target import Target, TargetKernel, bind, given_values, stream_of
from numpyro_bnn.program.compiled import run
from numpyro_bnn.program.row_lengths import refuse_random
from numpyro_bnn.program.rows import BY_BATCHES, refuse_rows
from numpyro_bnn.sgmcmc.streams import seeds

CALL = "infer.BlackJAX"
# Algorithms of minibatches, with the arguments of their steps. BlackJAX's `sghmc` draws
# momenta of temperature 1, whatever its argument says.
STOCHASTIC = {
    "sgld": ("step_size", "temperature"),
    "sghmc": ("step_size",),
    "sgnht": ("step_size", "temperature"),
}
UNADJUSTED = (*STOCHASTIC, "mclmc")
MICROCANONICAL = ("mclmc", "adjusted_mclmc", "adjusted_mclmc_dynamic")
# The algorithms that are chains, with the gradients of a step; or with the default
# integrator, if a step has as many integration steps as its information says; or with
# `None`, if the number is not known.
ALGORITHMS: dict[str, int | str | None] = {
    **dict.fromkeys(("nuts", "hmc", "mhmc", "dhmc", "dmhmc"), "velocity_verlet"),
    **dict.fromkeys(MICROCANONICAL, "isokinetic_mclachlan"),
    **dict.fromkeys((*STOCHASTIC, "ghmc", "barker", "mala"), 1),
    **dict.fromkeys(("rmh", "additive_step_random_walk", "normal_random_walk"), 0),
    **dict.fromkeys(("slice_sampling", "coordinate_slice"), 0),
    **dict.fromkeys(("rmhmc", "gist_step_size", "gist_trajectory_length"), None),
}
# Of algorithms and warm-ups of BlackJAX.
NUMBERS = {
    **dict.fromkeys(
        ("step_size", "initial_step_size", "temperature", "num_folds"),
        Number(strict=True),
    ),
    **dict.fromkeys(("num_integration_steps", "k", "steps_per_sample"), Count()),
    **dict.fromkeys(
        ("target_acceptance_rate", "acc_prob"), Number(strict=True, below=1)
    ),
}
# Parts of a chain that follow from its position, and those that stay when it is moved.
CACHES = ("position", "logdensity", "logdensity_grad")
AUXILIARY = ("momentum", "slice", "random_generator_arg")
# Algorithms that are no chain of one density, and why they are refused.
OTHERS = {
    "csgld": "its draws have unequal weights, which `MCMC` cannot hold: use "
    "`blackjax.sgld`, or `infer.ParallelTempering` for several modes",
    "elliptical_slice": "it needs the likelihood without its Gaussian prior: give a "
    "function `log_density -> SamplingAlgorithm` that takes the prior off",
    "irmh": "its proposals need a distribution of your own: give a function "
    "`log_density -> SamplingAlgorithm`",
}


class BlackJAXState(NamedTuple):
    """State of :class:`BlackJAX`.

    :param z: unconstrained values by site.
    :param chain: the algorithm's own state.
    :param tuned: what the warm-up has found, by argument of the algorithm.
    :param accept_prob: mean acceptance probability of the steps of the last draw; 1
        where nothing is rejected.
    :param diverging: whether one of them diverged, or was not finite.
    :param num_gradients: gradients of the chain so far, with those of the warm-up. It
        does not count evaluations without a gradient, nor those of Pathfinder's
        optimizer.
    :param i: transitions so far; ``rng_key``: the key of the next transition.
    :param data: how often they had changed in place; no array.
    """

    z: PyTree
    chain: PyTree
    tuned: dict[str, PyTree]
    accept_prob: Array
    diverging: Array
    num_gradients: Array
    i: Array
    rng_key: Array
    data: DataVersion = DataVersion()

    @property
    def step_size(self) -> Array | None:
        """The step size that the warm-up has found; ``None`` if it is given."""
        return self.tuned.get("step_size")


class _Plan(NamedTuple):
    """What the chains of a run do.

    :param fixed: what the warm-up gives to the algorithm beside arrays, by argument.
    """

    target: Target
    num_warmup: int
    fixed: dict[str, PyTree]


class BlackJAX(TargetKernel[_Plan]):
    """Run an algorithm of BlackJAX on a NumPyro model: with chains, minibatches, runs
    that resume and a health report.

    A transition takes ``steps_per_draw`` steps of the algorithm. With an ``adaptation``
    the first transition of the warm-up does all of it, in ``num_warmup *
    steps_per_draw`` steps, and the others rest; without one the warm-up takes steps
    like those that follow. ``mclmc`` and ``adjusted_mclmc_dynamic`` tune each chain by
    itself, as Hamiltonian kernels do; ``chees_adaptation``, ``meads_adaptation`` and
    ``laps`` tune one set of arguments from all chains, which must be vectorized: two or
    more, four for each of the ``num_folds`` of ``meads_adaptation``, 16 for ``laps``.
    With ``adaptive_tempered_smc`` and ``adaptive_persistent_sampling_smc`` the chains
    are particles: drawn from the prior, tempered to the posterior by the algorithm and
    resampled, so at first they are not independent. The warm-up then has at most
    ``num_warmup * steps_per_draw`` temperatures. Particles that have not arrived, or
    whose density is 0, are not a number.

    The caches of a chain are computed again at the start of each transition, for one
    more gradient, because data and other blocks may have changed. Take
    ``steps_per_draw=10`` or more for algorithms with one gradient per step.

    ``sgld``, ``sghmc`` and ``sgnht`` take the minibatches of the model's plate (fresh
    rows with replacement); all others take all rows.

    :param model: the NumPyro model.
    :param algorithm: e.g. ``blackjax.nuts``; or a function of a log density of
        unconstrained values by site, and of ``options``, that returns a
        ``blackjax.SamplingAlgorithm``. Its states are dictionaries of such values, or
        named tuples with the field ``position``. Fields ``logdensity`` and
        ``logdensity_grad`` are computed again by ``init``; ``momentum``, ``slice`` and
        ``random_generator_arg`` stay. Other fields are refused.
    :param adaptation: ``blackjax.window_adaptation``, ``window_adaptation_low_rank``,
        ``staged_adaptation``, ``pathfinder_adaptation``,
        ``mclmc_find_L_and_step_size``, ``mclmc_lrd_warmup``,
        ``adjusted_mclmc_find_L_and_step_size``, ``blackjax.adaptation.laps.laps``,
        ``chees_adaptation``, ``meads_adaptation``, ``adaptive_tempered_smc`` or
        ``adaptive_persistent_sampling_smc``; or a function ``(rng_key, log_density,
        position, num_steps) -> (position, parameters, num_gradients)``; ``None`` if
        ``options`` has all that the algorithm needs.
    :param steps_per_draw: steps per transition.
    :param init_strategy: as for NumPyro's kernels.
    :param options: arguments of the algorithm and of the adaptation, under BlackJAX's
        names.
    :raises ImportError: if BlackJAX is not installed.
    :raises ValueError: for options that neither takes, an algorithm whose arguments are
        missing, an adaptation that tunes other algorithms; on initialization, for
        models that it cannot sample. TypeError: for other objects.

    Reference: Cabezas et al. (2024), "BlackJAX: composable Bayesian inference in JAX".

    >>> import importlib.util
    >>> from numpyro.infer import MCMC
    >>> import numpyro, numpyro.distributions as dist
    >>> def model():
    ...     numpyro.sample("x", dist.Normal(0.0, 2.0).expand([3]).to_event(1))
    >>> if importlib.util.find_spec("blackjax"):
    ...     import blackjax
    ...
    ...     kernel = BlackJAX(model, blackjax.nuts, blackjax.window_adaptation)
    ...     mcmc = MCMC(kernel, num_warmup=50, num_samples=20, progress_bar=False)
    ...     mcmc.run(jax.random.key(0))
    ...     assert mcmc.get_samples()["x"].shape == (20, 3)
    """

    sample_field = "z"

    @checked(CALL)
    def __init__(
        self,
        model: Model,
        algorithm: Callable,
        adaptation: Callable | None = None,
        *,
        steps_per_draw: PositiveInt = 1,
        init_strategy: Annotated[
            Callable, Kind(callable, "Pass e.g. `init_to_median`.")
        ] = init_to_uniform,
        **options: Any,
    ) -> None:
        blackjax = package(CALL, "algorithm")
        self.algorithm, self.adaptation = algorithm, adaptation
        self.steps_per_draw, self.init_strategy = steps_per_draw, init_strategy
        self.options = options
        # copies and pickles of an algorithm are other objects
        self._algorithm_name = name_in(blackjax, algorithm)
        _check_algorithm(algorithm, self._algorithm_name)
        # what a run in a folder is known by: another version is another algorithm
        self._algorithm = self._algorithm_name or algorithm, blackjax.__version__
        self._warm_up, self._adaptation_name = None, "none"
        if adaptation is not None:
            if self._stochastic:
                instead = "It takes no warm-up: give `step_size` instead."
                came = f"one for `{self._algorithm_name}`"
                raise argument_error(CALL, "adaptation", came, instead)
            name = name_in(blackjax, adaptation)
            self._adaptation_name = name or getattr(adaptation, "__name__", "own")
            self._warm_up = warm_up_row(CALL, adaptation, self._algorithm_name)
        self._check_options()
        self._reset(model)

    def _reset(self, model: Callable) -> None:
        """Discard what was built for a model and its arguments."""
        self._model = model
        self._plan = None
        self._sample_fn: Callable | None = None
        # in place of the cached property of the base class
        self.__dict__["_arguments"] = ModelArguments("BlackJAX", MAX_CONSTANT_BYTES)

    def _check_options(self) -> None:
        step_arguments = STOCHASTIC.get(self._algorithm_name, ())
        parameters = list(parameters_of(self.algorithm).values())[1:]
        needed = {p.name for p in parameters if p.default is p.empty and _is_named(p)}
        needed |= {"step_size"} & set(step_arguments)
        accepted = {p.name for p in parameters if _is_named(p)} | set(step_arguments)
        if self.adaptation is not None and self._warm_up is not None:
            accepted -= set(self._warm_up.tuned)
            needed -= set(self._warm_up.tuned)
            if self._warm_up is USERS_OWN:  # what it finds is not known yet
                needed = set()
            else:
                given = self._warm_up.given
                accepted |= {*parameters_of(self.adaptation), *given} - MANAGED
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        for name, value in self.options.items():
            if name not in accepted and not takes_all:
                raise unknown_name(CALL, "options", name, sorted(accepted))
            if name in NUMBERS and self._algorithm_name:
                NUMBERS[name].check(CALL, name, value)
            if name == "inverse_mass_matrix":
                _check_metric(name, value)
        missing = sorted(needed - self.options.keys())
        if missing:
            names = ", ".join(map(repr, missing))
            instead = f"`{self._algorithm_name or 'the algorithm'}` needs them"
            instead += ": give values, or an `adaptation` that finds them."
            raise argument_error(CALL, "options", f"no {names}", instead)

    @property
    def _stochastic(self) -> bool:
        return self._algorithm_name in STOCHASTIC

    @property
    def model(self) -> Callable:
        return self._model

    # -- the algorithm on a model ------------------------------------------------------

    def _built(
        self, log_density: LogDensity, options: Mapping[str, Any]
    ) -> "Functions":
        """The functions of the algorithm with all its arguments."""
        if self._stochastic:
            return self._on_minibatches(log_density)
        built = self.algorithm(log_density, **options)
        if not (hasattr(built, "init") and hasattr(built, "step")):
            came = f"a function that returns a {type(built).__name__}"
            instead = "Let it return a `blackjax.SamplingAlgorithm`."
            raise argument_error(CALL, "algorithm", came, instead, TypeError)
        return Functions(built.init, built.step)

    def _on_minibatches(self, log_density: LogDensity) -> "Functions":
        target, names = log_density.target, STOCHASTIC[self._algorithm_name]
        options = dict(self.options)
        of_step = {name: options.pop(name) for name in names if name in options}
        stream = stream_of(target, "with_replacement")
        init, algorithm_step = self.algorithm(jax.grad(log_density), **options)

        def step(rng_key: Array, chain: PyTree) -> tuple[Any, None]:
            batch_key, rng_key = random.split(rng_key)
            batch: PyTree = "full"
            if target.subsampled:
                batch = stream.draw(seeds(batch_key, 1)[0], jnp.uint32(0))
            return algorithm_step(rng_key, chain, batch, **of_step), None

        return Functions(init, step)

    def _gradients_with(self, options: Mapping[str, Any]) -> int | None:
        """Gradients of a step, or of each of its integration steps; ``None`` if they
        are not known.
        """
        gradients = ALGORITHMS.get(self._algorithm_name)
        if isinstance(gradients, str):
            integrator = options.get("integrator")
            return gradients_of_integrator(integrator, gradients) or None
        if self._algorithm_name == "sghmc":
            return options.get("num_integration_steps", 10)
        return gradients

    @property
    def _gradients_of_caches(self) -> int:
        """Gradients that it takes to compute the caches of a chain."""
        return int(not self._stochastic and self._gradients_with(self.options) != 0)

    # -- the contract of MCMCKernel ----------------------------------------------------

    @property
    def default_fields(self) -> tuple[str, ...]:
        fields = ("z", "diverging", "accept_prob")
        counts = self._gradients_with(self.options) is not None
        return (*fields, "num_gradients") if counts else fields

    def _begin(self, start: Start) -> BlackJAXState:
        num_warmup, single = start.num_warmup, start.single
        num_chains = 1 if single else start.rng_key.shape[0]
        self._check_warm_up(num_warmup, num_chains, start.kwargs)
        chain_key, init_key = split(start.rng_key)
        target, z = self._bound(start._replace(rng_key=init_key))
        one_chain = z if single else first_of(z)
        size = ravel_pytree(one_chain)[0].size
        self._check_size(size)
        plan = _Plan(target, num_warmup, {})

        def started(values: PyTree, args: tuple, kwargs: Kwargs) -> BlackJAXState:
            log_density = LogDensity(target, args, kwargs)
            begin = partial(self._start, plan, log_density)
            if single or self._pools:
                return begin(*values)
            return jax.vmap(begin)(*values)

        state = run(started, (z, chain_key), start.args, start.kwargs)
        self._plan, self._sample_fn = plan, self.sample
        return state

    def _check_size(self, size: int) -> None:
        shapes: tuple[Shape, ...] = (size,), (size, size)
        if self._algorithm_name in MICROCANONICAL:
            shapes = (), *shapes
            if size < 2:
                instead = "Its velocity needs two directions: use `blackjax.nuts`."
                raise argument_error(CALL, "model", f"{size} parameter", instead)
        metric: Any = self.options.get("inverse_mass_matrix")
        is_array = _is_array(metric) or np.isscalar(metric)
        if is_array and np.shape(metric) not in shapes:
            instead = f"The model has {size} parameters: pass ({size},) variances."
            raise argument_error(CALL, "inverse_mass_matrix", metric, instead)

    def _check_warm_up(self, num_warmup: int, num_chains: int, kwargs: Kwargs) -> None:
        if self.adaptation is None or self._warm_up is None:
            return
        if not num_warmup:
            instead = "Give `MCMC` a `num_warmup`, or the kernel the tuned arguments."
            raise argument_error(CALL, "adaptation", "no warm-up to run in", instead)
        if GIBBS_SITES_KWARG in kwargs:
            instead = (
                "It would tune for the first values of the other blocks: give "
                "`step_size` and the like instead of an adaptation."
            )
            raise argument_error(CALL, "adaptation", "a block of `Gibbs`", instead)
        if self._pools:
            self._check_chains(self.adaptation, self._warm_up.min_chains, num_chains)

    def _check_chains(self, adaptation: Callable, least: int, num_chains: int) -> None:
        """Refuse too few chains, or chains that do not make folds of one size."""
        folds = 1
        if "num_folds" in parameters_of(adaptation):
            default = parameters_of(adaptation)["num_folds"].default
            folds = self.options.get("num_folds", default)
        least = least * folds
        if num_chains >= least and num_chains % folds == 0:
            return
        multiple = f", a multiple of `num_folds={folds}`," if folds > 1 else ""
        instead = (
            f'Run {least} or more{multiple} with `chain_method="vectorized"`: it tunes '
            "from all of them."
        )
        raise argument_error(CALL, "adaptation", f"{num_chains} chain(s)", instead)

    @property
    def _pools(self) -> bool:
        return self._warm_up is not None and self._warm_up.min_chains > 1

    def _bound(self, start: Start) -> tuple[Target, dict[str, Array]]:
        """The model bound to its arguments, and where its chains start."""
        temperature = self.options.get("temperature", 1.0) if self._stochastic else 1.0
        target, z = bind(CALL, self._model, start, self.init_strategy, temperature)
        if not self._stochastic:
            refuse_random(CALL, "model", target.stochastic)
        if start.init_params is not None:
            z = given_values(CALL, target, z, start)
        if not (target.subsampled and self._stochastic):
            refuse_rows(CALL, BY_BATCHES, start.args, start.kwargs)
        return target, z

    def _start(
        self, plan: _Plan, log_density: LogDensity, z: PyTree, rng_key: Array
    ) -> BlackJAXState:
        """The state of a chain, or of all chains whose warm-up pools them."""
        chain_key, rng_key = split(rng_key)
        tuned: dict[str, PyTree] = {}
        if self.adaptation is None:
            chain = self._built(log_density, self.options).init(z, chain_key)
        else:
            chain, tuned = self._outlined(plan, log_density, z, rng_key)
        if not self._stochastic:
            _check_state(chain, z)
        batch = () if is_prng_key(rng_key) else rng_key.shape[:1]
        begun = self._gradients_of_caches if self.adaptation is None else 0
        return BlackJAXState(
            z=z,
            chain=chain,
            tuned=tuned,
            accept_prob=jnp.ones(batch, jnp.result_type(float)),
            diverging=jnp.zeros(batch, bool),
            num_gradients=jnp.full(batch, begun, jnp.int32),
            i=jnp.zeros(batch, jnp.int32),
            rng_key=rng_key,
            data=self._arguments.version,
        )

    def _outlined(
        self, plan: _Plan, log_density: LogDensity, z: PyTree, rng_key: Array
    ) -> tuple[PyTree, dict[str, PyTree]]:
        """Zeros for what the warm-up will find: only shapes are known yet. The plan
        gets what is no array.
        """

        def tune(z: PyTree, rng_key: Array) -> tuple[PyTree, dict[str, PyTree]]:
            tuned = self._tune(plan, log_density, z, rng_key)
            for name, value in tuned.parameters.items():
                plan.fixed[name] = jax.tree.map(
                    lambda leaf: None if _is_array(leaf) else leaf, value
                )
            return tuned.chain, _arrays(tuned.parameters)

        def zeros(like: jax.ShapeDtypeStruct) -> Array:
            if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
                return random.split(random.key(0), like.shape)
            return jnp.zeros(like.shape, like.dtype)

        chain, tuned = jax.tree.map(zeros, jax.eval_shape(tune, z, rng_key))
        if self._pools:
            count = rng_key.shape[0]
            tuned = jax.tree.map(
                lambda a: jnp.broadcast_to(a, (count, *a.shape)), tuned
            )
        return chain, tuned

    def _tune(
        self, plan: _Plan, log_density: LogDensity, z: PyTree, rng_key: Array
    ) -> PyTree:
        assert self._warm_up is not None
        assert self.adaptation is not None
        steps = plan.num_warmup * self.steps_per_draw
        task = WarmUpTask(self.algorithm, self.adaptation, self.options, steps)
        rng_key = rng_key if is_prng_key(rng_key) else rng_key[0]
        return self._warm_up.tune(task, log_density, z, rng_key)

    def _transitions(
        self, state: BlackJAXState, args: tuple, kwargs: Kwargs
    ) -> BlackJAXState:
        log_density = LogDensity(self.target, args, kwargs)
        # all chains are at the same transition
        i = state.i if is_prng_key(state.rng_key) else state.i[0]

        def transition(chain: BlackJAXState) -> BlackJAXState:
            chain = self._transition(chain, log_density)
            return chain._replace(i=chain.i + 1)

        if self.adaptation is None:
            return over_chains(transition, state)
        # A loop of one or no round: under `vmap` a branch would always be computed.
        _, state = lax.while_loop(
            lambda carry: carry[0],
            lambda carry: (
                jnp.zeros_like(carry[0]),
                self._tuned(carry[1], log_density),
            ),
            (i == 0, state),
        )
        rests = i < self.plan.num_warmup
        return lax.cond(
            rests,
            lambda s: s._replace(i=s.i + 1),
            lambda s: over_chains(transition, s),
            state,
        )

    def _tuned(self, state: BlackJAXState, log_density: LogDensity) -> BlackJAXState:
        """The state after the warm-up, of all chains."""
        if self._pools:
            return self._tuned_chain(state, log_density)
        return over_chains(lambda s: self._tuned_chain(s, log_density), state)

    def _tuned_chain(
        self, state: BlackJAXState, log_density: LogDensity
    ) -> BlackJAXState:
        tune_key, rng_key = split(state.rng_key)
        chain, parameters, num_gradients = self._tune(
            self.plan, log_density, state.z, tune_key
        )
        tuned = jax.tree.map(
            lambda new, old: jnp.broadcast_to(new, old.shape),
            _arrays(parameters),
            state.tuned,
        )
        changed = {"z": _position(chain), "chain": chain, "tuned": tuned}
        before = {name: getattr(state, name) for name in changed}
        changed = jax.tree.map(_in_dtype, changed, before)
        spent = jnp.asarray(num_gradients, jnp.int32)
        return state._replace(
            **changed, num_gradients=state.num_gradients + spent, rng_key=rng_key
        )

    def _transition(
        self, state: BlackJAXState, log_density: LogDensity
    ) -> BlackJAXState:
        """Some steps of one chain."""
        step_key, refresh_key, rng_key = random.split(state.rng_key, 3)
        options = self.options
        if self._warm_up is not None:
            options = _merged(state.tuned, self.plan.fixed)
        functions = self._built(log_density, options)
        per_step = jnp.int32(self._gradients_with(options) or 0)
        chain = self._moved(functions, state, refresh_key)

        def step(n: Array, carry: tuple) -> tuple:
            chain, accept_prob, diverging, num_gradients = carry
            new_chain, info = functions.step(random.fold_in(step_key, n), chain)
            new_chain = jax.tree.map(_in_dtype, new_chain, chain)
            accepted, diverged = _outcome(info, new_chain)
            accept_prob += accepted.astype(accept_prob.dtype)
            num_steps = getattr(info, "num_integration_steps", 1)
            num_gradients += per_step * jnp.asarray(num_steps, jnp.int32)
            return new_chain, accept_prob, diverging | diverged, num_gradients

        spent = state.num_gradients + jnp.int32(self._gradients_of_caches)
        begin = chain, jnp.zeros_like(state.accept_prob), jnp.array(False), spent
        chain, accepted, diverging, spent = lax.fori_loop(
            0, self.steps_per_draw, step, begin
        )
        return state._replace(
            z=_position(chain),
            chain=chain,
            accept_prob=accepted / self.steps_per_draw,
            diverging=diverging,
            num_gradients=spent,
            rng_key=rng_key,
        )

    def _moved(
        self, functions: "Functions", state: BlackJAXState, rng_key: Array
    ) -> PyTree:
        """The algorithm's state at ``state.z``: only what does not follow from the
        position is kept.
        """
        old = state.chain
        if isinstance(old, dict):
            return state.z
        if self._stochastic:  # which has no caches
            return old._replace(position=state.z)
        fresh = functions.init(state.z, rng_key)
        kept = {n: getattr(old, n) for n in AUXILIARY if n in old._fields}
        return jax.tree.map(_in_dtype, fresh._replace(**kept), old)

    def refresh(
        self,
        state: BlackJAXState,
        model_args: tuple,
        model_kwargs: Kwargs | None,
    ) -> BlackJAXState:
        """Adopt ``state.z`` and the arguments; each transition does so by itself."""
        return state

    def get_diagnostics_str(self, state: BlackJAXState) -> str:
        """Text for the progress bar: step size and acceptance."""
        accept_prob = float(np.mean(jax.device_get(state.accept_prob)))
        text = f"{self.steps_per_draw} steps, acc. prob={accept_prob:.2f}"
        if state.step_size is None:
            return text
        return f"{text}, size {np.mean(jax.device_get(state.step_size)):.2e}"

    def describe(self, state: BlackJAXState) -> Attributes:
        """What :func:`~numpyro_bnn.to_inference_data` writes into the attributes of a
        run.
        """
        name = self._algorithm_name or getattr(self.algorithm, "__name__", "own")
        about = {
            "blackjax_algorithm": name,
            "blackjax_adaptation": self._adaptation_name,
            "blackjax_version": package(CALL, "algorithm").__version__,
            "steps_per_draw": self.steps_per_draw,
            "noisy_gradients": self._stochastic and self.target.subsampled,
            "temperature": self.target.temperature,
        }
        if self._algorithm_name:
            about["biased"] = name in UNADJUSTED
        if state.step_size is not None:
            about["base_step_size"] = listed(state.step_size)
        return about


class Functions(NamedTuple):
    """A sampler as two functions, as BlackJAX has them.

    :param init: ``init(position, rng_key)``: its first state.
    :param step: ``step(rng_key, state)``: the next state, and information on the step.
    """

    init: Callable[..., Any]
    step: Callable[..., Any]


@checked("infer.as_blackjax")
def as_blackjax(
    kernel: Annotated[MCMCKernel, Kind(MCMCKernel, "Pass a kernel.")],
    *args: Any,
    num_warmup: Natural = 0,
    **kwargs: Any,
) -> Functions:
    """Write the loop yourself: any kernel as a pair of functions ``(init, step)``.

    ``init(position, rng_key)`` starts one chain, or as many as there are keys;
    ``position`` holds unconstrained values by site, and with ``None`` the kernel finds
    them. It reads the model, so call it outside of ``jit``. ``step(rng_key, state)``
    is a pure function for ``lax.scan``: it returns the next state and a dictionary of
    the kernel's statistics. The first ``num_warmup`` steps are the warm-up.

    With ``step(state.rng_key, state)`` the chain is that of ``MCMC``, bit for bit; any
    other keys give another chain of the same kernel. ``kernel.postprocess_fn(args,
    kwargs)(state.z)`` has the values of the sites of a chain.

    :param kernel: a kernel of :mod:`numpyro_bnn.infer` or of NumPyro; ``init`` prepares
        it for these arguments.
    :param args: arguments of the model.
    :param num_warmup: number of steps of the warm-up.
    :param kwargs: keyword arguments of the model, such as ``batch_size``.

    >>> import numpyro, numpyro.distributions as dist
    >>> from numpyro_bnn.infer import SGHMC
    >>> def model():
    ...     numpyro.sample("x", dist.Normal(0.0, 2.0))
    >>> kernel = SGHMC(model, 0.1, steps_per_draw=5, warm_start=0.0)
    >>> init, step = as_blackjax(kernel)
    >>> def one_step(state, rng_key):
    ...     state, info = step(rng_key, state)
    ...     return state, state.z["x"]
    >>> keys = random.split(random.key(1), 20)
    >>> _, draws = lax.scan(one_step, init(None, random.key(0)), keys)
    >>> draws.shape
    (20,)
    """
    fields = [name for name in kernel.default_fields if name != kernel.sample_field]

    def init(position: PyTree, rng_key: Array) -> PyTree:
        if position is not None and isinstance(kernel, BarkerMH):
            got = "initial values for BarkerMH, which ignores them"
            instead = "Give it an `init_strategy`, `init_to_value(values=...)`."
            raise argument_error("infer.as_blackjax", "position", got, instead)
        return kernel.init(rng_key, num_warmup, position, args, kwargs)

    def step(rng_key: Array, state: PyTree) -> tuple[PyTree, dict[str, PyTree]]:
        state = kernel.sample(_with_key(state, rng_key), args, kwargs)
        return state, {name: attrgetter(name)(state) for name in fields}

    return Functions(init, step)


def _with_key(state: PyTree, rng_key: Array) -> PyTree:
    """A state with another key. The keys of states inside it become others too, unless
    the key is that which the state has.
    """

    def folded(leaf: Array, rng_key: Array, own_key: Array) -> Array:
        fold = random.fold_in
        for _ in range(leaf.ndim - rng_key.ndim):  # replicas
            fold = jax.vmap(fold, in_axes=(0, None))
        is_own = jnp.all(key_numbers(rng_key) == key_numbers(own_key))
        return jnp.where(is_own, leaf, fold(leaf, random.bits(rng_key)))

    if not is_prng_key(rng_key):
        folded = jax.vmap(folded)

    def keyed(path: tuple, leaf: PyTree) -> PyTree:
        if len(path) == 1 or getattr(path[-1], "name", None) != "rng_key":
            return leaf
        return folded(leaf, rng_key, state.rng_key)

    inner = jax.tree_util.tree_map_with_path(keyed, state)
    return inner._replace(rng_key=rng_key)


def _check_metric(name: str, value: PyTree) -> None:
    """Refuse variances with which no chain would move; its shape is checked later."""
    if isinstance(value, list | str):
        raise argument_error(CALL, name, value, "Pass an array of it.")
    for leaf in jax.tree.leaves(value):
        if isinstance(leaf, jax.core.Tracer) or callable(leaf):
            continue
        floating = jnp.issubdtype(np.asarray(leaf).dtype, jnp.floating)
        if not floating or not np.isfinite(leaf).all():
            came = "integers, or values that are not finite"
            raise argument_error(CALL, name, came, "Pass finite floats.")
        least = np.min(leaf, initial=np.inf) if np.ndim(leaf) < 2 else np.inf
        if leaf is value and np.ndim(leaf) == 2:
            least = np.linalg.eigvalsh(leaf).min()
        if least <= 0:
            came = "variances that are 0 or negative"
            raise argument_error(CALL, name, came, "Pass variances above 0.")


def _check_algorithm(algorithm: object, name: str) -> None:
    """Refuse what is no Markov chain of one log density."""
    if name in OTHERS:
        got = f"`blackjax.{name}`"
        raise argument_error(CALL, "algorithm", got, f"Not here: {OTHERS[name]}.")
    if name and name not in ALGORITHMS:
        instead = (
            "It is not known as a chain of equally weighted draws of one log density; "
            "`program.Posterior` has "
            "`potential`, `log_prior` and `log_likelihood` to run it by hand."
        )
        raise argument_error(CALL, "algorithm", f"`blackjax.{name}`", instead)
    if not callable(algorithm) or isinstance(algorithm, type | MCMCKernel):
        instead = (
            "Pass `blackjax.nuts`, say, or a function `log_density -> "
            "SamplingAlgorithm`; the kernel gives it the density of the model."
        )
        raise argument_error(CALL, "algorithm", algorithm, instead, TypeError)


def _check_state(chain: PyTree, z: PyTree) -> None:
    """Refuse a state of which it is not known what follows from the position."""
    unknown = sorted({*getattr(chain, "_fields", ())} - {*CACHES, *AUXILIARY})
    place = chain if isinstance(chain, dict) else getattr(chain, "position", None)
    if not unknown and jax.tree.structure(place) == jax.tree.structure(z):  # type: ignore[operator]
        return
    came = f"states with {', '.join(unknown) or 'other positions than it was given'}"
    kept = ", ".join(f"`{name}`" for name in AUXILIARY)
    instead = (
        "Let its state be the dictionary of values by site, or a named tuple of it, "
        "`position`, with what `init` computes again for a chain that was moved, "
        f"`logdensity` and `logdensity_grad`, and with what stays: {kept}."
    )
    raise argument_error(CALL, "algorithm", came, instead)


def _is_named(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (
        parameter.POSITIONAL_OR_KEYWORD,
        parameter.KEYWORD_ONLY,
    )


def _is_array(leaf: PyTree) -> bool:
    return isinstance(leaf, Array | np.ndarray | jax.ShapeDtypeStruct)


def _arrays(parameters: Trees) -> dict[str, PyTree]:
    """Parameters with ``None`` for what is no array: functions, and plain numbers."""
    return jax.tree.map(lambda leaf: leaf if _is_array(leaf) else None, parameters)


def _merged(tuned: Trees, fixed: Trees) -> dict[str, PyTree]:
    return jax.tree.map(
        lambda array, other: other if array is None else array,
        tuned,
        fixed,
        is_leaf=lambda leaf: leaf is None,
    )


def _in_dtype(new: PyTree, old: PyTree) -> PyTree:
    """A value in the type of the one before: loops need that."""
    return new if new.dtype == old.dtype else new.astype(old.dtype)


def _position(chain: PyTree) -> PyTree:
    """Unconstrained values by site; some algorithms have no other state."""
    return chain if isinstance(chain, dict) else chain.position


def _outcome(info: PyTree, chain: PyTree) -> tuple[Array, Array]:
    """Acceptance probability of a step, and whether it diverged."""
    accept_prob = getattr(info, "acceptance_rate", None)
    if accept_prob is None:
        accept_prob = getattr(info, "is_accepted", jnp.array(1.0))
    values = ravel_pytree(_position(chain))[0]
    diverging = ~jnp.all(jnp.isfinite(values))
    if hasattr(info, "is_divergent"):
        diverging |= info.is_divergent
    if hasattr(info, "nonans"):
        diverging |= ~info.nonans
    return jnp.asarray(accept_prob), diverging
