"""Base class of kernels that wrap another kernel and move some of its sites; access to
the wrapped state.
"""

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import jax
from jax import Array
from numpyro.distributions import biject_to
from numpyro.distributions.constraints import Constraint
from numpyro.infer.gibbs import (
    GIBBS_SITES_KWARG,
    CustomGibbs,
    DiscreteGibbs,
    Gibbs,
    with_conditioning,
)
from numpyro.infer.hmc import HMC
from numpyro.infer.mcmc import MCMCKernel
from numpyro.infer.util import unconstrain_fn

from numpyro_bnn._checks import argument_error
from numpyro_bnn._keys import split
from numpyro_bnn._types import Arrays, Attributes, Kwargs, PyTree, Shape, Trees
from numpyro_bnn.infer.model_arguments import (
    ModelKernel,
    Start,
    one_thread,
    over_chains,
)
from numpyro_bnn.infer.precision_gibbs import PrecisionGibbs, held_values
from numpyro_bnn.infer.target import held_parameters
from numpyro_bnn.program.compiled import is_traced
from numpyro_bnn.program.plates import full_plates
from numpyro_bnn.program.posterior import Posterior
from numpyro_bnn.program.row_lengths import check_state, refuse_random
from numpyro_bnn.program.sites import arrays_in

# kernels whose states hold constrained values
CONSTRAINED = CustomGibbs, DiscreteGibbs, PrecisionGibbs


def check_kernel(call: str, kernel: MCMCKernel, methods: tuple[str, ...]) -> None:
    """Refuse anything but a kernel made from a model that implements ``methods``."""
    usable = (
        isinstance(kernel, MCMCKernel) and getattr(kernel, "model", None) is not None
    )
    if not usable or any(
        getattr(type(kernel), name) is getattr(MCMCKernel, name) for name in methods
    ):
        needed = "` and `".join(methods)
        instead = (
            f"Pass a kernel made from a model that has `{needed}`, e.g. `NUTS(model)`."
        )
        raise argument_error(call, "kernel", kernel, instead, TypeError)


def inner_attribute(state: PyTree, name: str) -> PyTree:
    """``__getattr__`` of states: look up other attributes in the state of the inner
    kernel.
    """
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(state.base, name)


def described(kernel: MCMCKernel, state: PyTree) -> Attributes:
    """What a kernel of ours says of its run; others say nothing."""
    return getattr(kernel, "describe", lambda _: {})(state)


class OuterKernel(ModelKernel):
    """A kernel around another one, ``_kernel``, whose model it samples."""

    _kernel: MCMCKernel

    @property
    def kernel(self) -> MCMCKernel:
        """The inner kernel."""
        return self._kernel

    @property
    def model(self) -> Callable:
        return self._kernel.model


class Wrapper(OuterKernel):
    """Any kernel, followed by moves of some sites; the inner kernel then refreshes its
    caches.

    The state of a subclass has ``base``, the state of the inner kernel, ``i``, the
    number of transitions so far, ``rng_key`` and ``data``. A subclass implements
    ``_prepare``, ``_start`` and ``_move``.

    :raises TypeError: for anything but a kernel with a model and ``refresh``.
    """

    def __init__(self, kernel: MCMCKernel) -> None:
        check_kernel(self._call, kernel, ("refresh",))
        self._kernel = kernel
        self._num_warmup = 0
        # latent sites whose support depends on others
        self._bounded: tuple[str, ...] = ()
        self._sample_fn: Callable | None = None

    @abstractmethod
    def _prepare(self, reading: Posterior, args: tuple, kwargs: Kwargs) -> None:
        """Plan the moves; refuse a model that they cannot handle."""

    @abstractmethod
    def _start(self, base: PyTree, batch_shape: Shape, rng_key: Array) -> PyTree:
        """The first state of one chain or, if ``batch_shape`` is ``(C,)``, of C
        vectorized chains.
        """

    @abstractmethod
    def _move(
        self,
        state: PyTree,
        values: Arrays,
        rng_key: Array,
        reading: Posterior,
    ) -> tuple[PyTree, dict[str, Array]]:
        """The state with its own fields updated, and the moved sites (constrained).

        :param values: constrained values of all latent sites.
        :param reading: of the model on all its data.
        """

    @property
    def sample_field(self) -> str:
        return self._kernel.sample_field

    def _begin(self, start: Start) -> PyTree:
        # Parallel chains start inside a compiled program; the plan must not keep its
        # tracers.
        with jax.core.eval_context():
            posterior = self._plan_moves(start)
        self._num_warmup = start.num_warmup
        base_key, own_key = split(start.rng_key)
        args, kwargs, inner = start.args, start.kwargs, self._kernel
        in_gibbs = start.init_params is not None and GIBBS_SITES_KWARG in kwargs
        if in_gibbs and isinstance(inner, HMC):
            # Gibbs passes constrained values to kernels it does not recognize.
            values = unconstrain_fn(
                full_plates(self.model), args, kwargs, start.init_params
            )
            start = start._replace(init_params=values)
        of_base = start._replace(rng_key=base_key, posterior=posterior)
        # a class with an `init` of its own is started by that
        if isinstance(inner, ModelKernel) and type(inner).init is ModelKernel.init:
            base = inner.begin(of_base)
        else:
            base = inner.init(*of_base[:-1])
        self._sample_fn = self._transition
        batch_shape = () if start.single else start.rng_key.shape[:1]
        state = self._start(base, batch_shape, own_key)
        return state._replace(data=self._arguments.version)

    def _plan_moves(self, start: Start) -> Posterior:
        """Read the model, and plan moves on all its data."""
        args, kwargs, posterior = start.args, start.kwargs, start.posterior
        conditioned, model_kwargs = held_values(kwargs)
        if is_traced((args, model_kwargs)):
            got = "arrays that are traced by a transformation"
            instead = (
                "Call `init` once outside of `jit` or `vmap`, and refresh its state "
                "with the data inside."
            )
            raise argument_error(self._call, "model_args", got, instead)
        if is_traced(conditioned):
            # as a block of a vectorized `Gibbs`: the plan is the same for all values
            drawn = Posterior(self.model, args, model_kwargs).draw([0])[0]
            values = {name: drawn[name] for name in conditioned}
            kwargs = {**model_kwargs, GIBBS_SITES_KWARG: values}
        if posterior is None:  # the moves read the model that the kernel samples
            posterior = self.learn(start.num_warmup, args, kwargs)
        reading = posterior.with_arguments(args, kwargs).with_all_rows()
        check_state(self._call, "kernel", reading)
        if isinstance(self._kernel, HMC):
            # which would draw them once, and sample another posterior in each chain
            refuse_random(self._call, "kernel", reading.stochastic)
        held_parameters(self._call, reading)
        self._prepare(reading, args, kwargs)
        latent = reading.latent
        bounds = reading.depends(
            lambda sites: {n: arrays_in(sites[n]["fn"].support) for n in latent}
        )
        self._bounded = tuple(name for name in latent if bounds[name])
        self._program = reading.without_data()
        return posterior

    def learn(
        self, num_warmup: int, model_args: tuple, model_kwargs: Kwargs | None
    ) -> Posterior:
        """Let the inner kernel learn the parameters of the model; what the model is
        then, on a minibatch.
        """
        if hasattr(self._kernel, "learn"):
            return self._kernel.learn(num_warmup, model_args, model_kwargs)
        return Posterior(self.model, model_args, model_kwargs, full=False)

    def _transitions(
        self, state: PyTree, model_args: tuple, model_kwargs: Kwargs | None
    ) -> PyTree:
        keys = split(state.rng_key, 3)
        inner = state.base._replace(rng_key=keys[0])
        base = self._kernel.sample(inner, model_args, model_kwargs)
        state = state._replace(base=base, rng_key=keys[1])
        transition = partial(
            self._transition, model_args=model_args, model_kwargs=model_kwargs
        )
        state = over_chains(transition, state, keys[2])
        return self.refresh(state, model_args, model_kwargs)

    def _transition(
        self,
        state: PyTree,
        rng_key: Array,
        model_args: tuple,
        model_kwargs: Kwargs | None,
    ) -> PyTree:
        """The moves of one chain; the caches of the inner kernel are
        stale afterwards.
        """
        kernel = self._kernel
        constrain = kernel.get_constrain_fn(model_args, model_kwargs)
        values = constrain(getattr(state.base, self.sample_field))
        reading = self.posterior(model_args, model_kwargs)
        state, moved_values = self._move(state, values, rng_key, reading)
        # the inner kernel must hold values relative to the new bounds
        new_values = {name: values[name] for name in self._bounded} | moved_values
        sites = reading.at({**values, **moved_values}, only=new_values)
        supports = {name: site["fn"].support for name, site in sites.items()}
        native = _as_held(kernel, new_values, supports)
        base = with_values(kernel, state.base, native)
        return state._replace(base=base, i=state.i + 1)

    @one_thread
    def refresh(
        self, state: PyTree, model_args: tuple, model_kwargs: Kwargs | None
    ) -> PyTree:
        model_args, model_kwargs = self._arguments.restored(model_args, model_kwargs)
        return state._replace(
            base=refreshed(self._kernel, state.base, model_args, model_kwargs)
        )

    def postprocess_fn(
        self, model_args: tuple, model_kwargs: Kwargs | None
    ) -> Callable:
        arguments = self._arguments.restored(model_args, model_kwargs)
        return self._kernel.postprocess_fn(*arguments)

    def get_constrain_fn(
        self, model_args: tuple, model_kwargs: Kwargs | None
    ) -> Callable:
        arguments = self._arguments.restored(model_args, model_kwargs)
        return self._kernel.get_constrain_fn(*arguments)

    def get_diagnostics_str(self, state: PyTree) -> str:
        return self._kernel.get_diagnostics_str(state.base)

    def wrap_model(self, wrapper: Callable) -> "Wrapper":
        kernel = copy.copy(self)
        kernel.__dict__.pop("_arguments", None)
        kernel._kernel = self._kernel.wrap_model(wrapper)
        return kernel

    # -- read by `to_inference_data` ---------------------------------------------------

    @property
    def stat_coords(self) -> dict[str, tuple[str, list[str]]]:
        """Labels of the axes of the statistics of the inner kernel."""
        return dict(getattr(self._kernel, "stat_coords", {}))

    def describe(self, state: PyTree) -> Attributes:
        """Attributes of a run: those of the inner kernel, and its name."""
        inner = described(self._kernel, state.base)
        return {**inner, "inner_kernel": type(self._kernel).__name__}

    def members(
        self, state: PyTree, model_args: tuple, model_kwargs: Kwargs | None
    ) -> Arrays:
        """The members found by the warm start of the inner kernel, before any move."""
        if not hasattr(self._kernel, "members"):
            got = f"moves around {type(self._kernel).__name__}, which has no warm start"
            instead = (
                "Only kernels of `numpyro_bnn.infer` with `warm_start=` have members."
            )
            raise argument_error("to_inference_data", "members", got, instead)
        return self._kernel.members(state.base, model_args, model_kwargs)


def _as_held(
    kernel: MCMCKernel, values: Arrays, supports: Mapping[str, Constraint]
) -> Arrays:
    """Constrained values in the form in which the kernel, or each block of a ``Gibbs``,
    stores them.
    """
    if isinstance(kernel, CONSTRAINED):
        return dict(values)
    if isinstance(kernel, Gibbs):
        stored: dict[str, Array] = {}
        for (block, _), names in zip(kernel.blocks, kernel._sites, strict=True):
            stored |= _as_held(block, _selected(values, names), supports)
        return stored
    if isinstance(inner := getattr(kernel, "kernel", None), MCMCKernel):
        # a wrapper or replicas
        return _as_held(inner, values, supports)
    transforms = {name: biject_to(supports[name]) for name in values}
    return {name: transforms[name].inv(value) for name, value in values.items()}


def _selected(values: Arrays, names: Iterable[str]) -> Trees:
    return {name: values[name] for name in names if name in values}


def with_values(kernel: MCMCKernel, state: PyTree, values: Arrays) -> PyTree:
    """Return ``state`` with ``values`` of some of its sites, in the kernel's own form;
    its caches become stale.
    """
    if isinstance(kernel, Gibbs):

        def moved(
            block: MCMCKernel, names: Sequence[str], block_state: PyTree
        ) -> PyTree:
            return with_values(block, block_state, _selected(values, names))

        return _by_block(kernel, moved, state._replace(z={**state.z, **values}))
    field = kernel.sample_field
    if field not in state._fields:
        # a wrapper in a wrapper
        return state._replace(base=with_values(kernel.kernel, state.base, values))
    new_values = dict(getattr(state, field))
    for name in new_values.keys() & values.keys():
        new_values[name] = values[name].astype(new_values[name].dtype)
    return state._replace(**{field: new_values})


def refreshed(
    kernel: MCMCKernel, state: PyTree, args: tuple, kwargs: Kwargs | None
) -> PyTree:
    """Return ``state``, of one chain or of vectorized chains, with energies and
    gradients recomputed.
    """
    if isinstance(kernel, Gibbs):
        # In a sweep, a block is refreshed only if an earlier one has moved; here any of
        # them may have moved.
        values = kernel.get_constrain_fn(args, kwargs)(state.z)

        def fresh(
            block: MCMCKernel, names: Sequence[str], block_state: PyTree
        ) -> PyTree:
            siblings = {n: value for n, value in values.items() if n not in names}
            conditioned = with_conditioning(kwargs, siblings)
            return block.refresh(block_state, args, conditioned)

        return _by_block(kernel, fresh, state)
    if isinstance(kernel, HMC):
        # NumPyro's own kernels refresh one chain at a time.
        return over_chains(lambda chain: kernel.refresh(chain, args, kwargs), state)
    return kernel.refresh(state, args, kwargs)


def _by_block(kernel: Gibbs, change: Callable, state: PyTree) -> PyTree:
    """The state of a ``Gibbs`` with the states of its blocks changed."""
    blocks = [block for block, _ in kernel.blocks]
    states = map(change, blocks, kernel._sites, state.block_states)
    return state._replace(block_states=tuple(states))
