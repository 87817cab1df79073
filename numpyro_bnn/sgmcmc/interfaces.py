"""The contracts of the parts of a sampler (gradient, preconditioner, dynamics) and the
values they exchange.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_bnn._options import check_fields
from numpyro_bnn._types import PyTree


class Evaluation(NamedTuple):
    """The potential and its gradient at one position.

    :param position: (P,); ``potential``: scalar estimate of U.
    :param gradient: (P,) estimate of the gradient of U.
    :param adaptation: state of the preconditioner after it has seen this gradient.
    """

    position: Array
    potential: Array
    gradient: Array
    adaptation: PyTree


class StepContext(NamedTuple):
    """The inputs of one step of a dynamics.

    :param evaluate: ``evaluate(position, batch) -> Evaluation``.
    :param root: ``root(adaptation, v)`` multiplies by L, where the preconditioner is G
        = L L'.
    :param transpose: ``transpose(adaptation, v)`` multiplies by L'.
    :param adaptation: state of the preconditioner at the start of the step;
        ``step_size``: eps of this step.
    :param temperature: T of this step; ``warming``: whether this step is one of the
        warm-up.
    """

    evaluate: Callable[[Array, PyTree], Evaluation]
    root: Callable[[PyTree, Array], Array]
    transpose: Callable[[PyTree, Array], Array]
    adaptation: PyTree
    step_size: Array
    temperature: Array
    warming: Array


class StepRandomness(NamedTuple):
    """The random numbers of one step.

    :param noise: standard normals (rows, P).
    :param batch: a minibatch.
    :param uniform: scalar in (0, 1].
    """

    noise: Array
    batch: PyTree
    uniform: Array


class StepResult(NamedTuple):
    """The outcome of one step.

    :param position: (P,); ``memory``: the state of the dynamics (momenta, cached
        gradients).
    :param evaluation: an evaluation at a position of the chain, for adaptation and
        statistics.
    :param accept_prob: Metropolis acceptance probability, or None without a Metropolis
        test.
    :param energy_error: change of an energy that an exact step would conserve, or None
        if not computed.
    :param refused: whether the step was not taken, or None if the dynamics leaves that
        to the engine.
    """

    position: Array
    memory: PyTree
    evaluation: Evaluation
    accept_prob: Array | None = None
    energy_error: Array | None = None
    refused: Array | None = None


class _Part:
    """A dataclass whose options are checked."""

    def __post_init__(self) -> None:
        check_fields(f"sgmcmc.{type(self).__name__}", self)


class Gradient(_Part):
    """Estimates the potential and its gradient from a minibatch or from
    all the data.
    """

    #: The source of minibatches.
    stream: PyTree
    #: Gradients of the minibatch potential per estimate.
    evaluations: int = 1

    def init(self, position: Array) -> PyTree:
        """Return the state of the estimator; by default there is none."""
        return ()

    def separate(
        self, position: Array, batch: PyTree
    ) -> tuple[Callable[[PyTree], PyTree], "Gradient"]:
        """Return ``prepare``, which can run for many steps at once, and an estimator on
        ``prepare(batch)``.
        """
        return (lambda batch: batch), self

    def __call__(
        self, state: PyTree, position: Array, batch: PyTree
    ) -> tuple[Array, Array]:
        """Return estimates of the potential and of its gradient (P,)."""
        raise NotImplementedError


class Preconditioner(_Part):
    """A symmetric positive definite G = L L', the inverse of a mass matrix."""

    @property
    def adapts(self) -> bool:
        """Whether it needs a warm-up."""
        return False

    @property
    def biased(self) -> bool:
        """Whether it keeps changing after warm-up."""
        return False

    def init(self, position: Array) -> PyTree:
        """Return the state for positions of this shape and type."""
        return ()

    def update(self, state: PyTree, gradient: Array, warming: Array) -> PyTree:
        """Learn from a gradient; by default nothing."""
        return state

    def root(self, state: PyTree, v: Array) -> Array:
        """Multiply by L: standard noise v becomes noise L v of covariance G."""
        raise NotImplementedError

    def transpose(self, state: PyTree, v: Array) -> Array:
        """Return L' v; by default L is symmetric."""
        return self.root(state, v)

    def whiten(self, state: PyTree, v: Array) -> Array:
        """Multiply by L^-1: noise v of covariance G becomes standard noise."""
        raise NotImplementedError


class Dynamics(_Part):
    """Moves the position of a chain by one step."""

    #: Whether a Metropolis test removes the discretization error.
    exact: bool = False
    #: Fields of the memory that `init` computes from the target, by one estimate: they
    #: are renewed when the target changes, all others (momenta, frictions) stay.
    cached_fields: tuple[str, ...] = ()
    #: Whether its steps report their energy error.
    reports_energy: bool = False

    @property
    def rows(self) -> int:
        """Rows of P normals per step."""
        return 1

    @property
    def evaluations(self) -> int:
        """Gradient estimates per step."""
        return 1

    def check(self, gradient: Gradient) -> None:
        """Refuse gradient estimators for which the dynamics would be wrong; by default
        none.
        """

    def init(
        self, context: StepContext, position: Array, draw: StepRandomness
    ) -> PyTree:
        """Return the memory (momenta, cached gradients) of a chain that starts here."""
        return ()

    def step(
        self,
        context: StepContext,
        position: Array,
        memory: PyTree,
        draw: StepRandomness,
    ) -> StepResult:
        """Make one step."""
        raise NotImplementedError

    def momentum(self, memory: PyTree) -> Array | None:
        """Return the whitened momentum (P,), or None."""
        return None

    def in_other_steps(self, memory: PyTree, ratio: Array) -> PyTree:
        """Convert the memory of a chain to another step size: its next steps take other
        times, ``ratio`` = old / new.
        """
        return memory

    def turned_back(self, memory: PyTree, temperature: Array) -> PyTree:
        """Return the memory of a chain that stays because its step was not finite: its
        momentum is reversed.

        At a border of the support that is a Metropolis rejection with the flip that
        persistent momentum needs: the density up to there stays invariant, which with a
        new momentum has too much mass within a step of the border. What a chain that
        explodes has for a momentum is set to 0.
        """
        if (momentum := self.momentum(memory)) is None:
            return memory
        back = jnp.where(
            jnp.abs(momentum) < 100 * jnp.sqrt(temperature), -momentum, 0.0
        )
        return memory._replace(momentum=back)


def squared_norm(v: Array) -> Array:
    """Return v'v."""
    return jnp.vdot(v, v)


def select(condition: Array, new: PyTree, old: PyTree) -> PyTree:
    """Return one of two trees."""

    def chosen(a: Array, b: Array) -> Array:
        # what did not change, such as a key, is not used twice
        return a if a is b else jnp.where(condition, a, b)

    return jax.tree.map(chosen, new, old)
