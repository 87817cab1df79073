"""Moves along the symmetries of a model, combined with any kernel."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, random
from numpyro.infer.mcmc import MCMCKernel

from numpyro_bnn._checks import argument_error
from numpyro_bnn._options import Positive, Switch, checked
from numpyro_bnn._types import Arrays, Attributes, Kwargs, PyTree, Shape
from numpyro_bnn.infer.model_arguments import DataVersion
from numpyro_bnn.infer.wrapper import Wrapper, inner_attribute
from numpyro_bnn.program.posterior import Posterior
from numpyro_bnn.program.row_lengths import refuse_random
from numpyro_bnn.symmetry import Symmetry, check
from numpyro_bnn.symmetry.base import as_symmetries
from numpyro_bnn.symmetry.finding import TOLERANCE
from numpyro_bnn.symmetry.moves import Plan, move, plan_moves
from numpyro_bnn.symmetry.prior_program import PriorProgram

TARGET = 0.44  # optimal acceptance rate of a random walk in one dimension


class OrbitState(NamedTuple):
    """State of :class:`OrbitMoves`; it has the attributes of the inner state as well.

    :param base: state of the inner kernel, with the values after the moves.
    :param orbit_accept_prob: mean acceptance probability of the last move of each
        symmetry; 1 for exact draws.
    :param orbit_width: standard deviation of the random walk of each symmetry on its
        group.
    :param i: transitions so far.
    :param rng_key: the key of the next transition.
    :param data: how often they had changed in place; no array.
    """

    base: PyTree
    orbit_accept_prob: Array
    orbit_width: Array
    i: Array
    rng_key: Array
    data: DataVersion = DataVersion()

    def __getattr__(self, name: str) -> PyTree:
        return inner_attribute(self, name)


class OrbitMoves(Wrapper):
    r"""Wrap any kernel so that each of its transitions is followed by moves along the
    symmetries of the model.

    A symmetry g does not change the likelihood, so along an orbit the posterior is the
    prior,

    .. math:: \pi(g) \propto p(g\theta)\,\Big|\frac{\partial
              g\theta}{\partial\theta}\Big|\,dg,

    and a move needs neither data nor gradients. Where that density has a known form,
    the move draws from it exactly: the radius of Gaussian weights before a
    normalization (chi), the scale of ReLU units under Gaussian priors (generalized
    inverse Gaussian), biases without effect, hyper-scales, signs, permutations.
    Otherwise it is a random walk on the group, accepted or rejected under that density;
    its width is adapted in warm-up only. The inner kernel then refreshes its cached
    energy and gradient.

    Moves do not make functions mix faster, and they take a *centered* inner kernel to
    scales at which its step size is wrong: prefer non-centered priors inside.

    The extra field ``orbit_accept_prob`` holds the acceptance probability of every
    symmetry.

    :param kernel: NUTS, HMC, a kernel of :mod:`numpyro_bnn.infer`, or a
        :class:`~numpyro.infer.gibbs.Gibbs`; any kernel with a model and ``refresh``.
    :param symmetries: from :func:`~numpyro_bnn.symmetry.find`, or your own.
    :param exact: whether to leave the likelihood out of every acceptance ratio. The
        symmetries are then first checked numerically on the model, and refused if they
        do not hold (:func:`~numpyro_bnn.symmetry.check`). With ``False`` nothing is
        checked and the likelihood of all the data enters every ratio.
    :param tolerance: of that check.
    :raises ValueError: for symmetries that the model does not have, or that name
        unknown sites.
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

    @checked("infer.{}")
    def __init__(
        self,
        kernel: MCMCKernel,
        symmetries: Sequence[Symmetry],
        *,
        exact: Switch = True,
        tolerance: Positive = TOLERANCE,
    ) -> None:
        super().__init__(kernel)
        self._symmetries = as_symmetries("infer.OrbitMoves", symmetries)
        if not self._symmetries:
            instead = (
                "Declare one, e.g. `symmetry.Permutation(...)`, or run the inner "
                "kernel alone."
            )
            raise argument_error("infer.OrbitMoves", "symmetries", "none", instead)
        self._exact = exact
        self._tolerance = tolerance
        self._plans: tuple[Plan, ...] = ()

    @property
    def default_fields(self) -> tuple[str, ...]:
        return (*self._kernel.default_fields, "orbit_accept_prob")

    def _prepare(self, reading: Posterior, args: tuple, kwargs: Kwargs) -> None:
        if self._exact:
            check(self.model, self._symmetries, args, kwargs, self._tolerance)
        else:  # a ratio of likelihoods needs one value of each
            refuse_random(self._call, "kernel", reading.stochastic)
        self._plans = plan_moves(reading, self._symmetries, self._exact)

    def _start(self, base: PyTree, batch_shape: Shape, rng_key: Array) -> OrbitState:
        ones = jnp.ones((*batch_shape, len(self._plans)))
        return OrbitState(base, ones, ones, jnp.zeros(batch_shape, jnp.int32), rng_key)

    def _move(
        self,
        state: OrbitState,
        values: Arrays,
        rng_key: Array,
        reading: Posterior,
    ) -> tuple[OrbitState, dict[str, Array]]:
        """One move along every orbit."""
        prior = PriorProgram(reading)
        new_values: dict[str, Array] = {}
        probabilities = []
        for i, plan in enumerate(self._plans):
            key, width = random.fold_in(rng_key, i), state.orbit_width[i]
            changed, probability = move(
                plan, key, {**values, **new_values}, prior, width
            )
            new_values |= changed
            probabilities.append(probability)
        accept_prob = jnp.stack(probabilities).astype(state.orbit_accept_prob.dtype)
        # Robbins-Monro on the log width, in warm-up only.
        gain = jnp.where(state.i < self._num_warmup, 2.0 * (state.i + 1.0) ** -0.6, 0.0)
        width = state.orbit_width * jnp.exp(gain * (accept_prob - TARGET))
        state = state._replace(
            orbit_accept_prob=accept_prob, orbit_width=width.astype(accept_prob.dtype)
        )
        return state, new_values

    # -- read by `to_inference_data` ---------------------------------------------------

    def describe(self, state: OrbitState) -> Attributes:
        """Attributes of a run: those of the inner kernel, and the kind of move along
        each symmetry.
        """
        pairs = zip(self._symmetries, self._plans, strict=True)
        moves = [f"{symmetry.name}: {plan.method}" for symmetry, plan in pairs]
        return {**super().describe(state), "orbit_moves": "; ".join(moves)}

    @property
    def stat_coords(self) -> dict[str, tuple[str, list[str]]]:
        """Labels of the axis of ``orbit_accept_prob``."""
        names = [symmetry.name for symmetry in self._symmetries]
        return {**super().stat_coords, "orbit_accept_prob": ("symmetry", names)}
