"""Gradient estimators: full data, minibatch, control variates around a mode, SVRG.

Potentials are functions of the flat position (P,); the minibatch potential is scaled to the full data: prior part
unscaled, likelihood part times N / B, so that its mean over minibatches is the full potential U.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from numpyro_bnn._checks import argument_error, check_count
from numpyro_bnn.sgmcmc.hoisting import separate
from numpyro_bnn.sgmcmc.interfaces import Gradient
from numpyro_bnn.sgmcmc.minibatches import FullData, Stream

__all__ = ["Full", "Minibatch", "ControlVariates", "SVRG", "Center"]

Potential = Callable[[jax.Array, Any], jax.Array]
FullPotential = Callable[[jax.Array], jax.Array]


def _value_and_grad(potential_fn: Potential, position: jax.Array, batch: Any) -> tuple[jax.Array, jax.Array]:
    # The same minibatch (and its key, if it holds one) may be used at several positions: that is the point of it.
    shared = jax.tree.map(
        lambda leaf: jax.random.clone(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf,
        batch,
    )
    return jax.value_and_grad(potential_fn)(position, shared)


@dataclass(frozen=True)
class Full(Gradient):
    """The exact gradient on all data.

    :param potential_fn: ``potential_fn(position) -> U``.

    >>> import jax.numpy as jnp
    >>> potential, gradient = Full(lambda q: 0.5 * q @ q)((), jnp.ones(2), ())
    >>> float(potential), gradient.tolist()
    (1.0, [1.0, 1.0])
    """

    potential_fn: FullPotential
    stream: Stream = field(default=FullData(), init=False)

    def __call__(self, state: Any, position: jax.Array, batch: Any) -> tuple[jax.Array, jax.Array]:
        return jax.value_and_grad(self.potential_fn)(position)


@dataclass(frozen=True)
class Minibatch(Gradient):
    """The plain minibatch gradient: grad prior + (N / B) sum over the batch of grad l_i.

    :param potential_fn: ``potential_fn(position, batch) -> U~``, scaled to the full data.
    :param stream: source of minibatches.

    Reference: Welling and Teh (2011), equation 4.

    >>> import jax.numpy as jnp
    >>> from numpyro_bnn.sgmcmc.minibatches import WithReplacement
    >>> data = jnp.arange(10.0)
    >>> estimate = Minibatch(lambda q, i: 5.0 * jnp.sum((q - data[i]) ** 2), WithReplacement(10, 2))
    >>> estimate((), jnp.zeros(1), jnp.array([1, 2]))[1].tolist()
    [-30.0]
    """

    potential_fn: Potential
    stream: Stream

    def __call__(self, state: Any, position: jax.Array, batch: Any) -> tuple[jax.Array, jax.Array]:
        return _value_and_grad(self.potential_fn, position, batch)

    def separate(self, position: jax.Array, batch: Any) -> tuple[Callable, "Minibatch"]:
        return _separate(self, position, batch)


class Center(NamedTuple):
    """A position (P,) with the full potential and full gradient (P,) there."""

    position: jax.Array
    potential: jax.Array
    gradient: jax.Array


@dataclass(frozen=True, eq=False)
class ControlVariates(Gradient):
    r"""Minibatch gradients with a control variate at a fixed center, best a posterior mode.

    .. math:: \tilde g(q) = \nabla U(\hat q) + \nabla \tilde U_b(q) - \nabla \tilde U_b(\hat q)

    with the same minibatch b at both points. Unbiased for every center; its variance falls with the squared distance
    from the center. Start the chain there.

    :param potential_fn: ``potential_fn(position, batch) -> U~``, scaled to the full data.
    :param full_potential_fn: ``full_potential_fn(position) -> U``; evaluated once.
    :param stream: source of minibatches.
    :param center: (P,); default the initial position of the chain.

    Reference: Baker, Fearnhead, Fox and Nemeth (2019), section 3.1.

    >>> import jax.numpy as jnp
    >>> from numpyro_bnn.sgmcmc.minibatches import WithReplacement
    >>> data = jnp.arange(10.0)
    >>> estimate = ControlVariates(lambda q, i: 5.0 * jnp.sum((q - data[i]) ** 2),
    ...                            lambda q: jnp.sum((q - data) ** 2), WithReplacement(10, 2))
    >>> state = estimate.init(jnp.zeros(1))
    >>> estimate(state, jnp.ones(1), jnp.array([1, 2]))[1].tolist()  # exact: the potential is quadratic
    [-70.0]
    """

    potential_fn: Potential
    full_potential_fn: FullPotential
    stream: Stream
    center: jax.Array | None = None

    evaluations = 2

    def init(self, position: jax.Array) -> Center:
        center = position if self.center is None else jnp.asarray(self.center, position.dtype)
        if center.shape != position.shape:
            raise argument_error(
                "sgmcmc.ControlVariates",
                "center",
                f"shape {center.shape}",
                f"Pass a flat vector like the position, {position.shape}.",
            )
        return _center_at(self.full_potential_fn, center)

    def __call__(self, state: Center, position: jax.Array, batch: Any) -> tuple[jax.Array, jax.Array]:
        here = _value_and_grad(self.potential_fn, position, batch)
        there = _value_and_grad(self.potential_fn, state.position, batch)
        return state.potential + (here[0] - there[0]), state.gradient + (here[1] - there[1])

    def separate(self, position: jax.Array, batch: Any) -> tuple[Callable, "ControlVariates"]:
        return _separate(self, position, batch)


@dataclass(frozen=True, eq=False)
class SVRG(ControlVariates):
    """Control variates whose center is renewed, with one full gradient, every ``period`` steps.

    The estimate depends on the history of the chain, so the exact minibatch samplers refuse it. Chains run under
    ``jax.vmap`` pay the full gradient at every step; run such chains one after the other.

    :param period: m, a positive integer; about N / B makes the full gradients half the work.

    Other parameters as for :class:`ControlVariates`.
    Reference: Dubey et al. (2016), algorithm 2.

    >>> import jax.numpy as jnp
    >>> from numpyro_bnn.sgmcmc.minibatches import FullData
    >>> estimate = SVRG(lambda q, batch: q @ q, lambda q: q @ q, FullData(), period=2)
    >>> state, count = estimate.refresh(estimate.init(jnp.zeros(1)), jnp.ones(1), jnp.int32(2))
    >>> state.gradient.tolist(), int(count)
    ([2.0], 1)
    """

    period: int = 100

    def __post_init__(self) -> None:
        check_count("sgmcmc.SVRG", "period", self.period)

    markov = False

    def refresh(self, state: Center, position: jax.Array, step: jax.Array) -> tuple[Center, jax.Array]:
        due = (step > 0) & (step % self.period == 0)
        renewed = lax.cond(due, lambda: _center_at(self.full_potential_fn, position), lambda: state)
        return renewed, due.astype(jnp.int32)


def _separate(estimator: Any, position: jax.Array, batch: Any) -> tuple[Callable, Any]:
    prepare, finish = separate(estimator.potential_fn, position, batch)
    return prepare, replace(estimator, potential_fn=finish)


def _center_at(full_potential_fn: FullPotential, position: jax.Array) -> Center:
    return Center(position, *jax.value_and_grad(full_potential_fn)(position))
