"""Turn the ``preconditioner=`` that a user passes into a part of the engine; the one
learned from gradient noise.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.scipy.linalg import solve_triangular
from jax.typing import ArrayLike

from numpyro_bnn._checks import argument_error, unknown_name
from numpyro_bnn._types import Arrays, PyTree, Scalar
from numpyro_bnn.infer.phases import Phase, SGMCMCState, Transition, WarmUp, when
from numpyro_bnn.infer.step_size import (
    BENDING_STEPS,
    LONGEST_STEP,
    Noise,
    bending,
    gradients_on,
)
from numpyro_bnn.sgmcmc import Dense, Diagonal, RMSProp, State
from numpyro_bnn.sgmcmc.interfaces import Preconditioner, select
from numpyro_bnn.sgmcmc.preconditioners import Blocks, Factor, Identity

NAMES = ("identity", "rmsprop", "warm_start", "gradient_noise")
PreconditionerLike: TypeAlias = str | ArrayLike | Mapping | Preconditioner | None
# Diagonals that start at ones and are set later, by the warm start or by kernels that
# know these names.
LEARNED = ("warm_start", "variance")


# largest number of parameters with a dense preconditioner of the gradient noise
DENSE_LIMIT = 1000
# gradients collected for each direction, if no more than the steps of the warm-up
PER_DIRECTION = 10
PER_COORDINATE = (
    128  # gradients collected if only their variances by coordinate are needed
)
# exponent with which past gradients are forgotten: weights (s / t)^(RECENT - 1) at
# transition t
RECENT = 2
LEAST, MOST = 1e-5, 0.5  # limits of the weight of the diagonal
# Bending at which the bound is whole; ReLU networks have 2e-2, tanh networks 1e-4.
BENT = 0.003


class SecondMoment(NamedTuple):
    """Mean of g g' (P, P), or of g^2 (P,), over recent gradients, and the number of
    gradients it is worth.
    """

    mean: Array
    worth: Array


@dataclass(frozen=True)
class LearnPreconditioner(Phase):
    r"""Learn G = E[g g']^{-1} of minibatch gradients, which makes curvature plus noise
    equal to 1 in all directions.

    At a stationary point the noise of covariance V dominates; averaged over the
    posterior, E[g g'] = H + V with H the mean Hessian. The excess of a variance, (eps /
    4) G (H + V), is then the same in all directions, so one step size fits all. As V is
    close to (N / B) H for a likelihood that fits, it also relaxes them in the same
    time.

    Up to ``DENSE_LIMIT`` parameters G is dense. The sample of n gradients is shrunk to
    its diagonal with the weight (P / n)^3 / 100, small as soon as n exceeds P: the
    relative error of the sample is then equal in all directions, however different they
    are, and much of the posterior may lie in directions with very little noise.

    Some directions of a network have neither curvature nor noise where they are
    measured: along the orbits of a rescaling the likelihood is constant, and units that
    are off have only their prior. The inverse would take long steps there. But orbits
    are curved: a step of length d along one of radius r ends d^2 / (2 r) beside it,
    where the potential is higher by H d^4 / (8 r^2). With steps d^2 = eps G this is at
    most 1 in the direction of the largest curvature H if

    .. math:: G \le \frac{r}{\epsilon} \sqrt{\frac{8}{H}}

    so where gradients are found to bend (:func:`bending`), eps sqrt(H / 8) / r is
    added to E[g g']. H is taken from the noise, which is N / B times as large, and r is
    the root mean square of the position.

    :param dense: whether G is dense or diagonal.
    :param begin: first transition that collects gradients.
    :param count: gradients collected after each of these, at new minibatches.
    :param ratio: N / B, the noise of a likelihood that fits, in units of its curvature.

    Reference: Ahn, Korattikara & Welling (2012), for gradient noise as a
    preconditioner.
    """

    warm_up: WarmUp
    dense: bool
    begin: int
    count: int
    ratio: float

    @classmethod
    def for_warm_up(
        cls, warm_up: WarmUp, size: int, limit: int, ratio: float
    ) -> "LearnPreconditioner":
        """What to collect in a warm-up, for ``size`` parameters: at most ``limit``
        gradients in each transition, from the middle of the warm start on.
        """
        dense, begin = size <= DENSE_LIMIT, warm_up.begin // 2
        needed = PER_DIRECTION * size if dense else PER_COORDINATE
        count = min(limit, -(-needed // max(warm_up.settled - begin, 1)))
        return cls(warm_up, dense, begin, count, ratio)

    @property
    def preconditioner(self) -> Preconditioner:
        """The part of the engine, whose state :meth:`adapted` sets."""
        return Factor() if self.dense else Diagonal(1.0)

    def start(self, engine: State, step_size: Array) -> SecondMoment:
        """Nothing collected."""
        start = engine.position
        shape = start.shape * (2 if self.dense else 1)
        return SecondMoment(jnp.zeros(shape, start.dtype), jnp.zeros((), start.dtype))

    def before(self, state: SGMCMCState, now: Transition) -> SGMCMCState:
        due = self.warm_up.measures(now.i)
        return when(due, self._used, state, now)

    def _used(self, state: SGMCMCState, now: Transition) -> SGMCMCState:
        """Take the preconditioner, bounded if gradients bend along its steps."""
        sampler, moment = now.sampler(state), self.of(state)
        engine = state.engine._replace(adaptation=self.adapted(moment))
        share = bending(sampler, engine) / BENT
        bound = self.bound(moment, engine.position)
        bound = bound * jnp.where(share < 1, share, 1.0)  # NaN is the worst
        engine = state.engine._replace(adaptation=self.adapted(moment, bound))
        state = state._replace(engine=engine)
        return state.spend(3 * BENDING_STEPS * sampler.gradient.evaluations)

    def end(self, state: SGMCMCState, now: Transition) -> SGMCMCState:
        due = (now.i >= self.begin) & (now.i < self.warm_up.settled)
        return when(due, self._collected, state, now)

    def _collected(self, state: SGMCMCState, now: Transition) -> SGMCMCState:
        """Add gradients at the position of a chain."""
        moment, sampler = self.of(state), now.sampler(state)
        counters = -2 - now.i * self.count - lax.iota(jnp.int32, self.count)
        gradients = gradients_on(sampler, state.engine, counters)
        added = gradients.T @ gradients if self.dense else jnp.sum(gradients**2, axis=0)
        weight = jnp.minimum(1.0, RECENT / (now.i - self.begin + 1)).astype(added.dtype)
        weight = jnp.where(moment.worth > 0, weight, 1.0)
        old = jnp.where(
            moment.worth > 0, (1 - weight) ** 2 / jnp.maximum(moment.worth, 1), 0.0
        )
        mean = (
            (1 - weight) * moment.mean + weight / self.count * added
        )  # a difference would lose small directions
        new = SecondMoment(mean, 1 / (old + weight**2 / self.count))
        finite = jnp.all(jnp.isfinite(added))
        state = state.with_phase(self, select(finite, new, moment))
        return state.spend(self.count * sampler.gradient.evaluations)

    def averaged(self, state: SGMCMCState, here: Noise) -> Noise:
        """The noise averaged over recent positions: a dense G makes it 1 in all
        directions, 1 / (1 - P / n) if new.

        At one position of a network one direction has tens of times as much, and
        another direction at the next one.
        """
        if not self.dense:
            return here
        moment = self.of(state)
        share = 1 - moment.mean.shape[0] / jnp.maximum(moment.worth, 1)
        largest = jnp.where(share > 0.5, 1 / share, jnp.inf).astype(here.largest.dtype)
        return here._replace(
            largest=jnp.minimum(here.largest, largest), mean=jnp.minimum(here.mean, 1.0)
        )

    def bound(self, moment: SecondMoment, position: Array) -> Array:
        """What is added to E[g g'] where gradients bend, at a position (P,): an inverse
        bound of G.
        """
        squares = jnp.diagonal(moment.mean) if self.dense else moment.mean
        curvature = jnp.linalg.norm(moment.mean) / (
            1 + self.ratio
        )  # that of the largest direction, or above
        radius = jnp.maximum(
            jnp.sqrt(jnp.mean(position**2)), jnp.finfo(position.dtype).tiny
        )
        # At a position near 0 the inverse of the mean is enough.
        return jnp.minimum(
            LONGEST_STEP * jnp.sqrt(curvature / 8) / radius, jnp.mean(squares)
        )

    def adapted(self, moment: SecondMoment, bound: Scalar = 0.0) -> Array:
        """The state of the preconditioner: L lower triangular with G = L L', or the
        root of a diagonal G.
        """
        mean, worth = moment
        squares = jnp.diagonal(mean) if self.dense else mean
        floor = jnp.maximum(1e-10 * jnp.mean(squares), jnp.finfo(mean.dtype).tiny)
        scale = jnp.where(worth > 0, jnp.sqrt(jnp.maximum(squares + bound, floor)), 1.0)
        if not self.dense:
            return 1 / scale
        size, identity = scale.size, jnp.eye(scale.size, dtype=mean.dtype)
        weight = jnp.clip(0.01 * (size / jnp.maximum(worth, 1)) ** 3, LEAST, MOST)
        bounded = mean + bound * identity
        correlation = (1 - weight) * bounded / jnp.outer(
            scale, scale
        ) + weight * identity
        correlation = jnp.where(worth > 0, correlation, identity)
        # From the last coordinate to the first, so that the inverse of an upper
        # triangle is, transposed, lower.
        root = jnp.linalg.cholesky(correlation[::-1, ::-1])
        inverse = solve_triangular(root, identity, lower=True)
        return inverse[::-1, ::-1].T / scale[:, None]


def learns_from_noise(
    call: str, given: PreconditionerLike, noisy: bool, step_size: object, gradient: str
) -> bool:
    """Whether gradient noise makes the preconditioner: by default if it limits a step
    size to be chosen.

    That of control variates is 0 where it is measured first, at their center, and says
    nothing about other positions.
    """
    named = is_named(given, "gradient_noise")
    if named and not noisy:
        instead = (
            "Gradients of all the data have no noise: give the model a "
            "`subsample_size`, or leave it out."
        )
        raise argument_error(call, "preconditioner", "'gradient_noise'", instead)
    return named or (
        given is None and step_size is None and noisy and gradient == "minibatch"
    )


def is_named(spec: PreconditionerLike, name: str) -> bool:
    """Whether a preconditioner is the one of this name; it may also be an array."""
    return isinstance(spec, str) and spec == name


def resolve(
    call: str, spec: PreconditionerLike, z: Arrays, num_data: int
) -> Preconditioner:
    """Make the preconditioner of a flat position.

    :param spec: ``None``, a name, a number, an array (P,) or (P, P), a dictionary of
        numbers and arrays by site (unconstrained shape: scalar, diagonal of its size,
        or dense matrix; sites left out get 1), or a
        :class:`~numpyro_bnn.sgmcmc.interfaces.Preconditioner`.
    :param z: unconstrained values by site; the flat position holds them in the order of
        their names.
    :param num_data: N, for RMSProp.
    :raises ValueError: for an unknown name or site, or a shape that does not fit.
    """
    if spec is None or is_named(spec, "identity"):
        return Identity()
    if isinstance(spec, Preconditioner):
        return spec
    sizes = {site: int(np.size(z[site])) for site in sorted(z)}
    if isinstance(spec, str):
        if spec == "rmsprop":
            return RMSProp(num_data=num_data)
        if spec in LEARNED:
            return Diagonal(jnp.ones(sum(sizes.values())))
        raise unknown_name(call, "preconditioner", spec, NAMES)
    if isinstance(spec, Mapping):
        for site in spec:
            if site not in z:
                raise unknown_name(call, "preconditioner", site, z)
        return Blocks(
            tuple(
                (size, _fixed(call, spec.get(site, 1.0), size))
                for site, size in sizes.items()
            )
        )
    return _fixed(call, spec, sum(sizes.values()))


def _fixed(call: str, value: PyTree, size: int) -> Preconditioner:
    shape = np.shape(value)
    if shape == (size, size):
        return Dense(value)
    if shape in ((), (size,)):
        return Diagonal(value)
    instead = f"Pass a number, a diagonal ({size},) or a matrix ({size}, {size})."
    raise argument_error(call, "preconditioner", f"shape {shape}", instead)
