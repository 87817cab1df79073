"""Gradient estimators: full data, minibatch, control variates around a mode.

Potentials are functions of the flat position (P,). The minibatch potential is scaled to
the full data: the prior is unscaled, the likelihood times N / B, so that its mean over
minibatches is the full potential U.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from numpyro_bnn._checks import argument_error
from numpyro_bnn._jaxprs.slices import part_of, reached
from numpyro_bnn._jaxprs.walk import needed_equations
from numpyro_bnn._options import Kind
from numpyro_bnn._types import PyTree
from numpyro_bnn.sgmcmc.interfaces import Array, Gradient
from numpyro_bnn.sgmcmc.streams import FullData, Stream

FUNCTION = Kind(callable, "Pass a function.")
Potential: TypeAlias = Annotated[Callable[[Array, Any], Array], FUNCTION]
FullPotential: TypeAlias = Annotated[Callable[[Array], Array], FUNCTION]


def _draws(stream: Any) -> bool:
    return callable(getattr(stream, "draw", None))


Minibatches: TypeAlias = Annotated[
    Stream, Kind(_draws, "Pass a stream, e.g. `sgmcmc.WithReplacement(N, B)`.")
]


@dataclass(frozen=True)
class Full(Gradient):
    """Use the exact gradient, on all data at every step.

    :param potential_fn: ``potential_fn(position) -> U``.

    >>> import jax.numpy as jnp
    >>> potential, gradient = Full(lambda q: 0.5 * q @ q)((), jnp.ones(2), ())
    >>> float(potential), gradient.tolist()
    (1.0, [1.0, 1.0])
    """

    potential_fn: FullPotential
    stream: Stream = field(default=FullData(), init=False)

    def __call__(
        self, state: PyTree, position: Array, batch: PyTree
    ) -> tuple[Array, Array]:
        return jax.value_and_grad(self.potential_fn)(position)


@dataclass(frozen=True)
class Minibatch(Gradient):
    """The plain minibatch gradient: grad prior + (N / B) sum over the batch of grad
    l_i.

    :param potential_fn: ``potential_fn(position, batch) -> U~``, scaled to the full
        data.
    :param stream: source of minibatches.

    Reference: Welling and Teh (2011), equation 4.

    >>> import jax.numpy as jnp
    >>> from numpyro_bnn.sgmcmc import WithReplacement
    >>> data = jnp.arange(10.0)
    >>> estimate = Minibatch(
    ...     lambda q, i: 5.0 * jnp.sum((q - data[i]) ** 2), WithReplacement(10, 2)
    ... )
    >>> estimate((), jnp.zeros(1), jnp.array([1, 2]))[1].tolist()
    [-30.0]
    """

    potential_fn: Potential
    stream: Minibatches

    def __call__(
        self, state: PyTree, position: Array, batch: PyTree
    ) -> tuple[Array, Array]:
        return _value_and_grad(self.potential_fn, position, batch)

    def separate(
        self, position: Array, batch: PyTree
    ) -> tuple[Callable[[PyTree], PyTree], Gradient]:
        prepare, finish = separate(self.potential_fn, position, batch)
        return prepare, replace(self, potential_fn=finish)


class Center(NamedTuple):
    """A position (P,) with the full potential and full gradient (P,) there."""

    position: Array
    potential: Array
    gradient: Array


@dataclass(frozen=True, eq=False)
class ControlVariates(Gradient):
    r"""Minibatch gradients with a control variate at a fixed center, ideally a
    posterior mode.

    .. math:: \tilde g(q) = \nabla U(\hat q) + \nabla \tilde U_b(q) - \nabla \tilde
              U_b(\hat q)

    with the same minibatch b at both points. Unbiased for every center; its variance
    decreases with the squared distance from the center. Start the chain there.

    :param potential_fn: ``potential_fn(position, batch) -> U~``, scaled to the full
        data.
    :param full_potential_fn: ``full_potential_fn(position) -> U``; evaluated once.
    :param stream: source of minibatches.
    :param center: (P,); default the initial position of the chain.

    Reference: Baker, Fearnhead, Fox and Nemeth (2019), section 3.1.

    >>> import jax.numpy as jnp
    >>> from numpyro_bnn.sgmcmc import WithReplacement
    >>> data = jnp.arange(10.0)
    >>> estimate = ControlVariates(
    ...     lambda q, i: 5.0 * jnp.sum((q - data[i]) ** 2),
    ...     lambda q: jnp.sum((q - data) ** 2),
    ...     WithReplacement(10, 2),
    ... )
    >>> state = estimate.init(jnp.zeros(1))
    >>> estimate(state, jnp.ones(1), jnp.array([1, 2]))[
    ...     1
    ... ].tolist()  # exact: the potential is quadratic
    [-70.0]
    """

    potential_fn: Potential
    full_potential_fn: FullPotential
    stream: Minibatches
    center: Array | None = None

    evaluations = 2

    def init(self, position: Array) -> Center:
        center = (
            position
            if self.center is None
            else jnp.asarray(self.center, position.dtype)
        )
        if center.shape != position.shape:
            instead = f"Pass a flat vector like the position, {position.shape}."
            raise argument_error(
                "sgmcmc.ControlVariates", "center", f"shape {center.shape}", instead
            )
        return Center(center, *jax.value_and_grad(self.full_potential_fn)(center))

    def __call__(
        self, state: Center, position: Array, batch: PyTree
    ) -> tuple[Array, Array]:
        here = _value_and_grad(self.potential_fn, position, batch)
        there = _value_and_grad(self.potential_fn, state.position, batch)
        return state.potential + (here[0] - there[0]), state.gradient + (
            here[1] - there[1]
        )

    separate = Minibatch.separate


def _value_and_grad(
    potential_fn: Potential, position: Array, batch: PyTree
) -> tuple[Array, Array]:
    # A minibatch (and its key, if it holds one) is deliberately evaluated at several
    # positions.
    def shared(leaf: PyTree) -> PyTree:
        return (
            jax.random.clone(leaf)
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            else leaf
        )

    return jax.value_and_grad(potential_fn)(position, jax.tree.map(shared, batch))


def separate(
    potential_fn: Potential, position: Array, batch: PyTree
) -> tuple[Callable, Callable]:
    """Split ``potential_fn(position, batch)`` into ``finish(position,
    prepare(batch))``, from an example of both.

    ``prepare`` holds everything that depends only on the minibatch, above all the
    selection of its rows, and can run for many steps at once. Inside the step, that
    cost would grow with the data, because XLA on CPUs takes the size of the whole array
    for the work of a fused gather and hands it to several threads.
    """
    leaves, tree = jax.tree.flatten(batch)
    closed = jax.make_jaxpr(
        lambda q, *parts: potential_fn(q, jax.tree.unflatten(tree, parts))
    )(position, *leaves)
    jaxpr = closed.jaxpr
    needed = [equation for equation, _ in needed_equations(jaxpr, jaxpr.outvars)]
    # Python callbacks stay in the step unless they take batches of steps at once.
    calls = []
    for equation in needed:
        alone = equation.params.get("vmap_method") != "broadcast_all"
        if "callback" in equation.primitive.name and alone:
            calls += equation.outvars
    moving = reached(needed, [jaxpr.invars[0], *calls])
    known = reached(needed, jaxpr.invars[1:]) - moving
    used = list(jaxpr.outvars)
    for equation, _ in needed_equations(jaxpr, jaxpr.outvars, known):
        used += equation.invars
    handed = []
    for atom in used:
        if not isinstance(atom, Literal) and atom in known and atom not in handed:
            handed.append(atom)
    early = part_of(closed, jaxpr.invars[1:], handed)
    late = part_of(closed, [jaxpr.invars[0], *handed], jaxpr.outvars)

    def prepare(batch: PyTree) -> list[Array]:
        return early(*jax.tree.leaves(batch))

    def finish(position: Array, prepared: list[Array]) -> Array:
        return late(position, *prepared)[0]

    return prepare, finish
