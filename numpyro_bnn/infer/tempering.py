"""Parallel tempering: replicas of any kernel at several temperatures exchange their
states.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, random
from numpyro.infer.gibbs import GIBBS_SITES_KWARG
from numpyro.infer.mcmc import MCMCKernel
from numpyro.primitives import Messenger
from numpyro.util import is_prng_key

from numpyro_bnn._checks import argument_error
from numpyro_bnn._options import Choice, Count, Level, checked
from numpyro_bnn._types import Arrays, Attributes, Kwargs, PyTree, Scalar, Site, Trees
from numpyro_bnn.infer.model_arguments import DataVersion, Start, first_of, one_thread
from numpyro_bnn.infer.model_checks import weight_jacobians, within_support
from numpyro_bnn.infer.wrapper import (
    OuterKernel,
    check_kernel,
    described,
    refreshed,
    with_values,
)
from numpyro_bnn.program.plates import sites_of_type
from numpyro_bnn.program.posterior import Posterior, log_density
from numpyro_bnn.program.row_lengths import refuse_random

BETA = "_inverse_temperature"
TEMPERED = ("likelihood", "joint")


class TemperingState(NamedTuple):
    """State of :class:`ParallelTempering` with R replicas, the first of which is at the
    posterior's temperature.

    :param z: values of the first replica, as its kernel represents them.
    :param base: states of the inner kernel, (R, ...); ``inverse_temperatures``: from 1
        down, (R,).
    :param swap_accept_prob: acceptance probability of an exchange between neighbors, (R
        - 1,).
    :param diverging: whether the transition of the first replica diverged.
    :param round_trips: round trips of any state from the posterior to the last
        temperature and back, since warm-up.
    :param walk: whether the state at each temperature has visited the last one since
        leaving the first, (R,).
    :param rejections: sum of rejection probabilities since the ladder was last spaced,
        (R - 1,).
    :param i: transitions so far; ``rng_key``: the key of the next exchange.
    :param data: how often they had changed in place; no array.
    """

    z: PyTree
    base: PyTree
    inverse_temperatures: Array
    swap_accept_prob: Array
    diverging: Array
    round_trips: Array
    walk: Array
    rejections: Array
    i: Array
    rng_key: Array
    data: DataVersion = DataVersion()


class ParallelTempering(OuterKernel):
    r"""Sample a posterior with several modes: parallel tempering, whose replicas at
    several temperatures exchange states.

    Replica r targets :math:`p(\theta)\,p(D \mid \theta)^{\beta_r}` with :math:`1 =
    \beta_1 > \dots > \beta_R`, or :math:`p(\theta, D)^{\beta_r}` with
    ``temper="joint"``. After each transition neighbors exchange their states with
    probability

    .. math:: \min\big(1, \exp\{(\beta_r - \beta_{r+1})\,(\ell_{r+1} - \ell_r)\}\big),

    where :math:`\ell` is the tempered log density; even and odd pairs take turns, so
    states travel along the ladder instead of diffusing. All these are densities of
    constrained values: Jacobians of transformations are not tempered. The draws are
    those of the first replica, which targets the posterior exactly. In warm-up the
    ladder is adjusted for equal rejection rates after 2, 4, 8, ... transitions.

    All replicas run in one vectorized program. ``swap_accept_prob`` is a sample
    statistic; aim for 0.3 to 0.8. ``round_trips`` of the last state counts how often a
    state came back from the last temperature: if zero, the weights of the modes are
    unreliable.

    :param kernel: any kernel with a model, ``refresh`` and ``wrap_model``: NUTS, HMC, a
        ``Gibbs`` of blocks, ``OrbitMoves``, a kernel of :mod:`numpyro_bnn.infer` with
        exact gradients.
    :param num_replicas: R.
    :param lowest: the last :math:`\beta_R`, in (0, 1). With a small :math:`\beta` and
        heavy tails a tempered joint density may not be normalizable.
    :param temper: ``"likelihood"`` or ``"joint"``.
    :raises ValueError: for fewer than two replicas, a ``lowest`` outside (0, 1), an
        unknown ``temper``.
    :raises TypeError: for a kernel without model, ``refresh`` or ``wrap_model``.

    Reference: Syed, Bouchard-Cote, Deligiannidis & Doucet (2022), algorithms 1 and 4.

    >>> import numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import HMC, MCMC
    >>> def model():  # modes at -2 and 2
    ...     w = numpyro.sample("w", dist.Normal(0.0, 3.0))
    ...     numpyro.sample("y", dist.Normal(w**2, 0.3), obs=4.0)
    >>> kernel = ParallelTempering(HMC(model, trajectory_length=1.0), num_replicas=5)
    >>> mcmc = MCMC(kernel, num_warmup=200, num_samples=300, progress_bar=False)
    >>> mcmc.run(random.key(0))
    >>> w = mcmc.get_samples()["w"]
    >>> bool(0.2 < (w > 0).mean() < 0.8)
    True
    """

    sample_field = "z"

    @checked("infer.{}")
    def __init__(
        self,
        kernel: MCMCKernel,
        num_replicas: Annotated[int, Count(2)] = 8,
        *,
        lowest: Level = 0.01,
        temper: Annotated[str, Choice(TEMPERED)] = "likelihood",
    ) -> None:
        call = "infer.ParallelTempering"
        check_kernel(call, kernel, ("refresh", "wrap_model"))
        inner: MCMCKernel = kernel
        while inner is not None:
            if (temperature := getattr(inner, "temperature", 1.0)) != 1.0:
                got = f"{type(inner).__name__} with temperature {temperature}"
                instead = "Its replicas set the temperatures: leave it at 1."
                raise argument_error(call, "kernel", got, instead)
            inner = getattr(inner, "kernel", None)
        self._kernel = kernel
        #: The kernel of every replica; its model takes an inverse temperature.
        self._inner = kernel.wrap_model(partial(_Tempered, temper=temper))
        self._num_replicas = num_replicas
        self._lowest = lowest
        self._temper = temper
        self._num_warmup = 0
        self._sample_fn: Callable | None = None

    @property
    def default_fields(self) -> tuple[str, ...]:
        return ("z", "swap_accept_prob", "diverging")

    def _begin(self, start: Start) -> TemperingState:
        args, kwargs, posterior = start.args, start.kwargs, start.posterior
        if posterior is None:
            posterior = Posterior(self.model, args, kwargs, full=False)
        refuse_random("infer.ParallelTempering", "kernel", posterior.stochastic)
        if plates := posterior.plates:
            came = f"a model that subsamples plate {next(iter(plates))!r}"
            instead = (
                "Exchanges need the density of all the data: run without "
                "`subsample_size` (`batch_size`)."
            )
            raise argument_error("infer.ParallelTempering", "kernel", came, instead)
        self._num_warmup = start.num_warmup
        self._program = posterior.with_all_rows().without_data()
        self._sample_fn = self._transition
        started = partial(self._start, args=args, kwargs=kwargs)
        values = start.rng_key, start.init_params
        return started(*values) if start.single else jax.vmap(started)(*values)

    def _start(
        self,
        rng_key: Array,
        init_params: PyTree,
        args: tuple,
        kwargs: Kwargs | None,
    ) -> TemperingState:
        """The first state of one chain."""
        size = self._num_replicas
        rng_key, *keys = random.split(rng_key, 1 + size)
        # At a fixed temperature, so that the kernel stores no tracer.
        kwargs_at_1 = _at(1.0, kwargs)

        def start_replica(key: Array) -> PyTree:
            return self._inner.init(
                key, self._num_warmup, init_params, args, kwargs_at_1
            )

        base = jax.vmap(start_replica)(jnp.stack(keys))
        state = TemperingState(
            z=first_of(getattr(base, self._inner.sample_field)),
            base=base,
            inverse_temperatures=self._lowest ** jnp.linspace(0.0, 1.0, size),
            swap_accept_prob=jnp.ones(size - 1),
            diverging=jnp.zeros((), bool),
            round_trips=jnp.zeros((), jnp.int32),
            walk=jnp.zeros(size, bool),
            rejections=jnp.zeros(size - 1),
            i=jnp.zeros((), jnp.int32),
            rng_key=rng_key,
            data=self._arguments.version,
        )
        return self.refresh(state, args, kwargs)

    def _transition(
        self,
        state: TemperingState,
        model_args: tuple,
        model_kwargs: Kwargs | None,
    ) -> TemperingState:
        rng_key, key = random.split(state.rng_key)
        betas = state.inverse_temperatures

        def advance(base: PyTree, beta: Array) -> PyTree:
            return self._inner.sample(base, model_args, _at(beta, model_kwargs))

        base = jax.vmap(advance)(state.base, betas)
        diverging = getattr(base, "diverging", jnp.zeros(self._num_replicas, bool))[0]
        positions = getattr(base, self._inner.sample_field)
        tempered = self._tempered_density(model_args, model_kwargs)
        source, accept_prob = exchange(
            key, betas, jax.vmap(tempered)(positions), state.i
        )
        positions = jax.tree.map(lambda leaf: leaf[source], positions)
        # which states have been at the last temperature since they left the first
        been = state.walk[source]
        round_trips = state.round_trips + been[0].astype(jnp.int32)
        state = state._replace(
            z=first_of(positions),
            base=jax.vmap(partial(with_values, self._inner))(base, positions),
            swap_accept_prob=accept_prob,
            diverging=diverging,
            round_trips=jnp.where(state.i < self._num_warmup, 0, round_trips),
            walk=been.at[0].set(False).at[-1].set(True),
            rejections=state.rejections + (1 - accept_prob),
            i=state.i + 1,
            rng_key=rng_key,
        )
        return self.refresh(self._respace(state), model_args, model_kwargs)

    def _respace(self, state: TemperingState) -> TemperingState:
        """In warm-up, adjust the ladder whenever the number of transitions is a power
        of two.
        """
        is_power = state.i & (state.i - 1) == 0
        now = is_power & (state.i > 1) & (state.i < self._num_warmup)
        betas = respaced(state.inverse_temperatures, state.rejections)
        return state._replace(
            inverse_temperatures=jnp.where(now, betas, state.inverse_temperatures),
            rejections=jnp.where(now, 0.0, state.rejections),
        )

    def _tempered_density(
        self, args: tuple, kwargs: Kwargs | None
    ) -> Callable[[PyTree], Array]:
        """The log density that the inverse temperature multiplies, of native values."""
        constrain = self._inner.get_constrain_fn(args, _at(1.0, kwargs))
        reading = self.posterior(args, kwargs)

        def total(z: PyTree) -> Array:
            log_densities = jnp.zeros(())
            trace = reading.at(constrain(z))
            for site in sites_of_type(trace, "sample").values():
                if _is_tempered(site, self._temper, reading.held):
                    log_densities += log_density(site, within=True)
            return log_densities

        return total

    @one_thread
    def refresh(
        self,
        state: TemperingState,
        model_args: tuple,
        model_kwargs: Kwargs | None,
    ) -> TemperingState:
        """Recompute energies and gradients of all replicas at their values and
        temperatures.

        The first replica takes the values in ``z``, which a wrapper of this kernel may
        have moved.
        """
        model_args, model_kwargs = self._arguments.restored(model_args, model_kwargs)
        if not is_prng_key(state.rng_key):
            return jax.vmap(
                lambda chain_state: self.refresh(chain_state, model_args, model_kwargs)
            )(state)
        positions = jax.tree.map(
            lambda replicas, first: replicas.at[0].set(first),
            getattr(state.base, self._inner.sample_field),
            state.z,
        )

        def refresh_replica(base: PyTree, z: PyTree, beta: Array) -> PyTree:
            placed = with_values(self._inner, base, z)
            return refreshed(self._inner, placed, model_args, _at(beta, model_kwargs))

        base = jax.vmap(refresh_replica)(
            state.base, positions, state.inverse_temperatures
        )
        return state._replace(base=base)

    def postprocess_fn(
        self, model_args: tuple, model_kwargs: Kwargs | None
    ) -> Callable:
        model_args, model_kwargs = self._arguments.restored(model_args, model_kwargs)
        return self._inner.postprocess_fn(model_args, _at(1.0, model_kwargs))

    def get_constrain_fn(
        self, model_args: tuple, model_kwargs: Kwargs | None
    ) -> Callable:
        model_args, model_kwargs = self._arguments.restored(model_args, model_kwargs)
        return self._inner.get_constrain_fn(model_args, _at(1.0, model_kwargs))

    def get_diagnostics_str(self, state: TemperingState) -> str:
        return (
            f"swaps {float(state.swap_accept_prob.mean()):.2f}, round trips "
            f"{int(state.round_trips)}"
        )

    def wrap_model(self, wrapper: Callable) -> "ParallelTempering":
        return ParallelTempering(
            self._kernel.wrap_model(wrapper),
            self._num_replicas,
            lowest=self._lowest,
            temper=self._temper,
        )

    # -- read by `to_inference_data` ---------------------------------------------------

    def describe(self, state: TemperingState) -> Attributes:
        """Attributes of a run: those of the inner kernel, the number of replicas and
        what is tempered.
        """
        return {
            **described(self._inner, state.base),
            "inner_kernel": type(self._kernel).__name__,
            "num_replicas": self._num_replicas,
            "temper": self._temper,
        }

    @property
    def stat_coords(self) -> dict[str, tuple[str, list[str]]]:
        """Labels of the axis of ``swap_accept_prob``."""
        pairs = [f"{r}-{r + 1}" for r in range(1, self._num_replicas)]
        return {"swap_accept_prob": ("neighbors", pairs)}


def _is_tempered(site: Site, temper: str, conditioned: Arrays) -> bool:
    return temper == "joint" or (
        site["is_observed"] and site["name"] not in conditioned
    )


class _scaled(Messenger):
    """Multiply log densities by an inverse temperature."""

    def __init__(
        self, fn: Callable, beta: Array, temper: str, conditioned: Arrays
    ) -> None:
        super().__init__(fn)
        self.beta = beta
        self.temper = temper
        self.conditioned = conditioned

    def process_message(self, msg: Site) -> None:
        if msg["type"] == "sample" and _is_tempered(msg, self.temper, self.conditioned):
            msg["scale"] = (
                self.beta if msg.get("scale") is None else msg["scale"] * self.beta
            )


def _at(beta: Scalar, kwargs: Kwargs | None) -> Trees:
    """Keyword arguments of a tempered model."""
    return {**(kwargs or {}), BETA: jnp.asarray(beta, float)}


class _Tempered:
    """A model with its inverse temperature as a keyword argument; a class, so that
    kernels can be pickled.
    """

    def __init__(self, model: Callable, temper: str) -> None:
        self.model, self.temper = model, temper

    def __call__(self, *args: Any, **kwargs: Any) -> PyTree:
        scaled = _scaled(
            self.model, kwargs.pop(BETA), self.temper, kwargs.get(GIBBS_SITES_KWARG, {})
        )
        return within_support(weight_jacobians(scaled, 1.0))(*args, **kwargs)


def exchange(
    rng_key: Array, betas: Array, log_density: Array, i: Array
) -> tuple[Array, Array]:
    """Propose exchanges between neighbors: pairs (1, 2), (3, 4), ... in even
    transitions, the others in odd ones.

    :param betas: inverse temperatures (R,).
    :param log_density: tempered log density of the state at each temperature, (R,).
    :return: the temperature that each state comes from, (R,), and acceptance
        probabilities of all pairs, (R - 1,).
    """
    log_ratio = (betas[:-1] - betas[1:]) * (log_density[1:] - log_density[:-1])
    accept_prob = jnp.where(
        jnp.isnan(log_ratio), 0.0, jnp.exp(jnp.minimum(log_ratio, 0.0))
    )
    pair = jnp.arange(betas.size - 1)
    swap = (pair % 2 == i % 2) & (random.uniform(rng_key, pair.shape) < accept_prob)
    none = jnp.zeros(1, bool)
    up, down = jnp.concatenate([swap, none]), jnp.concatenate([none, swap])
    return jnp.arange(betas.size) + up.astype(int) - down.astype(int), accept_prob


def respaced(betas: Array, rejections: Array) -> Array:
    """A ladder with equal rejection rates, by interpolation of their running sum along
    log beta.

    :param betas: inverse temperatures, decreasing, (R,).
    :param rejections: rejection probabilities between neighbors, up to a factor, (R -
        1,).
    """
    # keeps neighbors that always exchange apart
    floor = 0.05 * jnp.mean(rejections) + 1e-6
    barrier = jnp.concatenate([jnp.zeros(1), jnp.cumsum(rejections + floor)])
    levels = jnp.linspace(0.0, 1.0, betas.size) * barrier[-1]
    ladder = jnp.exp(jnp.interp(levels, barrier, jnp.log(betas)))
    return ladder.at[0].set(betas[0]).at[-1].set(betas[-1])
