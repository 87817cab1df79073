"""Moves along the symmetries of a model, around any kernel."""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import random
from numpyro.infer.gibbs import GIBBS_SITES_KWARG
from numpyro.infer.hmc import HMC
from numpyro.infer.mcmc import MCMCKernel
from numpyro.infer.util import unconstrain_fn
from numpyro.util import is_prng_key

from numpyro_bnn._errors import argument_error
from numpyro_bnn._keys import split
from numpyro_bnn._plates import full_plates
from numpyro_bnn.infer.placing import place, renew
from numpyro_bnn.symmetry import Symmetry, check
from numpyro_bnn.symmetry.base import as_symmetries
from numpyro_bnn.symmetry.checking import TOLERANCE
from numpyro_bnn.symmetry.moves import move
from numpyro_bnn.symmetry.plan import Plan, plan
from numpyro_bnn.symmetry.prior import Prior

__all__ = ["OrbitMoves", "OrbitState"]

TARGET = 0.44  # acceptance of a random walk in one dimension


class OrbitState(NamedTuple):
    """State of :class:`OrbitMoves`; attributes of the inner state are found on it as well.

    :param base: state of the inner kernel, with the values after the moves.
    :param orbit_accept_prob: mean acceptance probability of the last move of each symmetry; 1 for exact draws.
    :param orbit_width: standard deviation of the random walk of each symmetry on its group.
    :param i: transitions so far.
    :param rng_key: the key that moves and inner kernel get theirs from.
    """

    base: Any
    orbit_accept_prob: jax.Array
    orbit_width: jax.Array
    i: jax.Array
    rng_key: jax.Array

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.base, name)


class OrbitMoves(MCMCKernel):
    r"""Any kernel, followed by moves along the symmetries of the model.

    A symmetry g leaves the likelihood as it is, so along an orbit the posterior is the prior,

    .. math:: \pi(g) \propto p(g\theta)\,\Big|\frac{\partial g\theta}{\partial\theta}\Big|\,dg,

    and a move needs neither data nor gradients. Where that density is known it is drawn from: the radius of
    Gaussian weights before a normalisation (chi), the scale of ReLU units under Gaussian priors (generalised inverse
    Gaussian), biases without effect, hyper-scales, signs, orders. Elsewhere a random walk on the group is corrected
    with it; its width is adapted in warm-up only. The inner kernel then refreshes its cached energy and gradient.

    Moves do not make functions mix faster, and they take a *centred* inner kernel to radii its step size does not
    fit: prefer non-centred priors inside, or :func:`~numpyro_bnn.symmetry.quotient`.

    ``orbit_accept_prob`` holds the acceptance of every symmetry.

    :param kernel: NUTS, HMC, a kernel of :mod:`numpyro_bnn.infer`, or a :class:`~numpyro.infer.gibbs.Gibbs`; any
        kernel with a model and ``refresh``.
    :param symmetries: what :func:`~numpyro_bnn.symmetry.find` or :func:`~numpyro_bnn.symmetry.of` gives, or your own.
    :param exact: leave the likelihood out of every ratio. The symmetries are measured on the model first and refused
        where they do not hold (:func:`~numpyro_bnn.symmetry.check`). With ``False`` nothing is measured and the
        likelihood of all the data enters every ratio.
    :param tolerance: of that check.
    :raises ValueError: for symmetries that the model does not have, or that name unknown sites.
    :raises TypeError: for a kernel without model or ``refresh``.

    >>> import jax, jax.numpy as jnp
    >>> from numpyro.infer import MCMC, NUTS
    >>> from numpyro_bnn import models, nn, symmetry
    >>> x = jnp.linspace(-1, 1, 8)[:, None]
    >>> model = models.regression(nn.MLP([3, 1], "relu"))
    >>> kernel = OrbitMoves(NUTS(model), symmetry.find(model, x, x[:, 0]))
    >>> mcmc = MCMC(kernel, num_warmup=5, num_samples=5, progress_bar=False)
    >>> mcmc.run(jax.random.key(0), x, x[:, 0])
    >>> mcmc.get_extra_fields()["orbit_accept_prob"].shape
    (5, 2)
    """

    def __init__(
        self,
        kernel: MCMCKernel,
        symmetries: Sequence[Symmetry],
        *,
        exact: bool = True,
        tolerance: float = TOLERANCE,
    ) -> None:
        usable = isinstance(kernel, MCMCKernel) and getattr(kernel, "model", None) is not None
        if not usable or type(kernel).refresh is MCMCKernel.refresh:
            raise argument_error(
                "infer.OrbitMoves",
                "kernel",
                kernel,
                "Pass a kernel made from a model that has `refresh`, e.g. `NUTS(model)` or `SGLD(model)`.",
                TypeError,
            )
        self._kernel = kernel
        self._symmetries = as_symmetries("infer.OrbitMoves", symmetries)
        self._exact = exact
        self._tolerance = tolerance
        self._reset()

    def _reset(self) -> None:
        self._plans: tuple[Plan, ...] = ()
        self._num_warmup = 0
        self._sample_fn: Callable | None = None

    @property
    def kernel(self) -> MCMCKernel:
        """The inner kernel."""
        return self._kernel

    @property
    def model(self) -> Callable:
        return self._kernel.model

    @property
    def sample_field(self) -> str:
        return self._kernel.sample_field

    @property
    def default_fields(self) -> tuple[str, ...]:
        return (*self._kernel.default_fields, "orbit_accept_prob")

    def init(
        self,
        rng_key: jax.Array,
        num_warmup: int,
        init_params: Any = None,
        model_args: tuple = (),
        model_kwargs: Mapping[str, Any] | None = None,
    ) -> OrbitState:
        model_kwargs = dict(model_kwargs or {})
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((model_args, model_kwargs))):
            raise argument_error(
                "infer.OrbitMoves",
                "model_args",
                "arrays that are traced by a transformation",
                "Call `init` once outside of `jit` or `vmap`, and refresh its state with the data inside.",
            )
        # Parallel chains start inside a compiled program; what is decided here must not belong to it.
        with jax.ensure_compile_time_eval():
            if self._exact:
                check(self.model, self._symmetries, model_args, model_kwargs, self._tolerance)
            self._plans = plan(self.model, self._symmetries, model_args, model_kwargs, self._exact)
        self._num_warmup = num_warmup
        single = is_prng_key(rng_key)
        keys = split(rng_key)
        if init_params is not None and GIBBS_SITES_KWARG in model_kwargs and isinstance(self._kernel, HMC):
            # Gibbs passes constrained values to kernels it does not know.
            init_params = unconstrain_fn(full_plates(self.model), model_args, model_kwargs, init_params)
        base = self._kernel.init(
            keys[0], num_warmup, init_params, model_args=model_args, model_kwargs=model_kwargs
        )
        self._sample_fn = self._transition
        many = () if single else rng_key.shape[:1]
        ones = jnp.ones((*many, len(self._plans)))
        return OrbitState(base, ones, ones, jnp.zeros(many, jnp.int32), keys[1])

    def sample(
        self, state: OrbitState, model_args: tuple, model_kwargs: Mapping[str, Any] | None
    ) -> OrbitState:
        single = is_prng_key(state.rng_key)
        keys = split(state.rng_key, 3)
        inner = state.base._replace(rng_key=keys[0])
        base = self._kernel.sample(inner, model_args, model_kwargs)
        state = state._replace(base=base, rng_key=keys[1])
        transition = partial(self._transition, model_args=model_args, model_kwargs=model_kwargs)
        state = transition(state, keys[2]) if single else jax.vmap(transition)(state, keys[2])
        return self.refresh(state, model_args, model_kwargs)

    def _transition(
        self, state: OrbitState, rng_key: jax.Array, model_args: tuple, model_kwargs: Mapping[str, Any] | None
    ) -> OrbitState:
        """Move along every orbit, once; the inner caches are stale afterwards."""
        kernel = self._kernel
        values = kernel.get_constrain_fn(model_args, model_kwargs)(getattr(state.base, self.sample_field))
        prior = Prior(self.model, values, model_args, model_kwargs)
        moved: dict[str, jax.Array] = {}
        accepted = []
        for i, plan_ in enumerate(self._plans):
            changed, accept_prob = move(
                plan_, random.fold_in(rng_key, i), {**values, **moved}, prior, state.orbit_width[i]
            )
            moved |= changed
            accepted.append(accept_prob)
        accept_prob = jnp.stack(accepted).astype(state.orbit_accept_prob.dtype) if accepted else jnp.zeros(0)
        # Robbins-Monro on the log width, in warm-up only.
        gain = jnp.where(state.i < self._num_warmup, 2.0 * (state.i + 1.0) ** -0.6, 0.0)
        width = state.orbit_width * jnp.exp(gain * (accept_prob - TARGET))
        base = place(kernel, state.base, moved, prior.distributions({**values, **moved}))
        return state._replace(
            base=base,
            orbit_accept_prob=accept_prob,
            orbit_width=width.astype(accept_prob.dtype),
            i=state.i + 1,
        )

    def refresh(
        self, state: OrbitState, model_args: tuple, model_kwargs: Mapping[str, Any] | None
    ) -> OrbitState:
        return state._replace(base=renew(self._kernel, state.base, model_args, model_kwargs))

    def postprocess_fn(self, model_args: tuple, model_kwargs: Mapping[str, Any] | None) -> Callable:
        return self._kernel.postprocess_fn(model_args, model_kwargs)

    def get_constrain_fn(self, model_args: tuple, model_kwargs: Mapping[str, Any] | None) -> Callable:
        return self._kernel.get_constrain_fn(model_args, model_kwargs)

    def get_diagnostics_str(self, state: OrbitState) -> str:
        return self._kernel.get_diagnostics_str(state.base)

    def wrap_model(self, wrapper: Callable) -> "OrbitMoves":
        kernel = copy.copy(self)
        kernel._kernel = self._kernel.wrap_model(wrapper)
        kernel._reset()
        return kernel

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sample_fn": None}

    # -- what an export reads ----------------------------------------------------------------------------

    def describe(self, state: OrbitState) -> dict[str, Any]:
        """Attributes of a run: those of the inner kernel, and how each symmetry was moved along."""
        inner: dict[str, Any] = getattr(self._kernel, "describe", lambda _: {})(state.base)
        moves = [f"{s.name}: {p.method}" for s, p in zip(self._symmetries, self._plans, strict=True)]
        return {**inner, "inner_kernel": type(self._kernel).__name__, "orbit_moves": "; ".join(moves)}

    def members(
        self, state: OrbitState, model_args: tuple, model_kwargs: Mapping[str, Any] | None
    ) -> dict[str, jax.Array]:
        """Where the inner kernel ended its warm start; moves come later."""
        if not hasattr(self._kernel, "members"):
            raise argument_error(
                "to_inference_data",
                "members",
                f"moves around {type(self._kernel).__name__}, which has no warm start",
                "Only kernels of `numpyro_bnn.infer` with `warm_start=` have members.",
            )
        return self._kernel.members(state.base, model_args, model_kwargs)

    def divergence_report(self, state: OrbitState) -> str | None:
        """What the inner kernel reports."""
        return getattr(self._kernel, "divergence_report", lambda _: None)(state.base)

    @property
    def stat_coords(self) -> dict[str, tuple[str, list[str]]]:
        """Names of the axis of statistics that runs over the symmetries."""
        return {"orbit_accept_prob": ("symmetry", [s.name for s in self._symmetries])}
