"""Dynamics without a Metropolis test: Langevin (overdamped, underdamped, thermostat)
and microcanonical.
"""

from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import jax.numpy as jnp
from jax import lax

from numpyro_bnn._checks import argument_error
from numpyro_bnn._options import (
    Choice,
    NonNegative,
    NonNegativeOrInfinite,
    Positive,
    PositiveOrInfinite,
    Switch,
)
from numpyro_bnn._types import PyTree
from numpyro_bnn.sgmcmc.interfaces import (
    Array,
    Dynamics,
    Evaluation,
    StepContext,
    StepRandomness,
    StepResult,
    select,
    squared_norm,
)

# The thermostat counts no larger kinetic temperature than this multiple of T, plus the
# second divided by P. At equilibrium that happens once in 10^7 steps or less. The
# friction that one step with a gigantic gradient adds could take 10^5 steps to go.
HOTTEST, OF_FEW = 10.0, 20.0
SHORT = 0.1  # probability of a shorter step of dynamics that refuse steps


class Slope(NamedTuple):
    """The whitened gradient L' grad U (P,) at the position."""

    slope: Array


@dataclass(frozen=True)
class _Kicked(Dynamics):
    """Dynamics whose steps grow with the gradient, so that too long a step explodes.

    With ``max_kick`` a step is refused if it ends where eps |L' grad U|^2 / P is above
    (max_kick + 20 / P) T. At equilibrium its mean is eps times curvature plus noise,
    below 1 for every stable step size. The chain stays and turns back, as at a border:
    the density up to there stays invariant. Steps to smaller gradients are taken all
    the same: a chain that begins outside finds its way in, and never leaves again.
    """

    max_kick: PositiveOrInfinite | None = field(default=None, kw_only=True)

    cached_fields = ("slope",)

    def _start(
        self, context: StepContext, position: Array, draw: StepRandomness
    ) -> Array:
        gradient = context.evaluate(position, draw.batch).gradient
        return context.transpose(context.adaptation, gradient)

    def _guarded(
        self, context: StepContext, position: Array, memory: PyTree, move: StepResult
    ) -> StepResult:
        """The move, or the way back if it ends where kicks are far too large."""
        if self.max_kick is None:
            return move
        size, old_norm = position.shape[0], squared_norm(memory.slope)
        new_norm = squared_norm(move.memory.slope)
        limit = (self.max_kick * size + OF_FEW) * context.temperature
        steep = context.step_size * new_norm > limit
        steep &= new_norm >= old_norm
        back = position, self.turned_back(memory, context.temperature)
        position, memory = select(steep, back, (move.position, move.memory))
        return move._replace(position=position, memory=memory, refused=steep)


@dataclass(frozen=True)
class Overdamped(_Kicked):
    r"""Overdamped Langevin dynamics by Euler-Maruyama steps, as in SGLD and its
    preconditioned form.

    .. math:: \theta \leftarrow \theta + \tfrac{\epsilon}{2} G \tilde g + \sqrt{\epsilon
              T}\, L z, \quad G = L L',
              \quad \tilde g = -\nabla \tilde U, \quad z \sim N(0, I)

    The stationary density tends to exp(-U / T) as eps -> 0; T = 0 is gradient descent
    with learning rate eps / 2. On N(0, 1 / lam) with gradient noise of variance V the
    stationary variance at constant step size is (2 eta T + eta^2 V) / (1 - (1 - eta
    lam)^2), eta = eps / 2.

    A step evaluates the gradient at its end, on a new minibatch, and the next step
    begins with it: where a step ends is known before it is taken.

    Reference: Welling and Teh (2011), equation 4; Li et al. (2016), equation 3.

    :param max_kick: refuse steps to where ``eps |L' grad U|^2 / P`` is larger than
        about this multiple of T.

    >>> Overdamped().rows
    1
    """

    def init(
        self, context: StepContext, position: Array, draw: StepRandomness
    ) -> Slope:
        return Slope(self._start(context, position, draw))

    def step(
        self,
        context: StepContext,
        position: Array,
        memory: PyTree,
        draw: StepRandomness,
    ) -> StepResult:
        drift = (-0.5 * context.step_size) * memory.slope
        noise = jnp.sqrt(context.step_size * context.temperature) * draw.noise[0]
        evaluation = context.evaluate(
            position + context.root(context.adaptation, drift + noise), draw.batch
        )
        slope = context.transpose(evaluation.adaptation, evaluation.gradient)
        move = StepResult(evaluation.position, Slope(slope), evaluation)
        return self._guarded(context, position, memory, move)


class Momentum(NamedTuple):
    """Whitened momentum r = L' m, (P,), with stationary distribution N(0, T I), and the
    last whitened gradient (P,).
    """

    momentum: Array
    slope: Array


def refreshed(momentum: Array, noise: Array, rate: Array, temperature: Array) -> Array:
    """Solve dr = -r dt + sqrt(2 T) dW over the time ``rate`` exactly; rate 0 leaves r,
    rate inf replaces it.
    """
    spread = jnp.sqrt(-jnp.expm1(-2.0 * rate) * temperature)
    return jnp.exp(-rate) * momentum + spread * noise


@dataclass(frozen=True)
class _Underdamped(_Kicked):
    friction: NonNegativeOrInfinite

    def init(
        self, context: StepContext, position: Array, draw: StepRandomness
    ) -> PyTree:
        start = jnp.sqrt(context.temperature) * draw.noise[0]
        return Momentum(start, self._start(context, position, draw))

    def momentum(self, memory: PyTree) -> Array:
        return memory.momentum

    def _kick(self, context: StepContext, momentum: Array, slope: Array) -> Array:
        return momentum - 0.5 * jnp.sqrt(context.step_size) * slope

    def _last_kick(
        self, context: StepContext, momentum: Array, evaluation: Evaluation
    ) -> tuple[Array, Array]:
        """The momentum after the last kick of a step, and the slope of the next one's
        first, whose preconditioner has seen this gradient.
        """
        slope = context.transpose(context.adaptation, evaluation.gradient)
        next_slope = context.transpose(evaluation.adaptation, evaluation.gradient)
        return self._kick(context, momentum, slope), next_slope

    def _rate(self, context: StepContext) -> Array:
        return self.friction * jnp.sqrt(context.step_size)


@dataclass(frozen=True)
class BAOAB(_Underdamped):
    r"""Underdamped Langevin dynamics (SGHMC): kick, half drift, refresh, half drift,
    kick.

    With time step :math:`h = \sqrt\epsilon`, mass M = G^-1, G = L L' and r = L' m:

    .. math::
        B:\ r \leftarrow r + \tfrac h2 L' \tilde g, \quad
        A:\ \theta \leftarrow \theta + \tfrac h2 L r, \quad
        O:\ r \leftarrow a r + \sqrt{(1 - a^2) T}\, z,\quad a = e^{-\gamma h}

    One gradient per step: the last kick of a step and the first of the next share it;
    each step has a new minibatch. The step size means the same as in every other
    dynamics: at infinite friction :math:`\theta \leftarrow \theta + \tfrac\epsilon2
    \tilde g + \sqrt{\epsilon T} (z_n + z_{n+1}) / 2`, which is SGLD with neighboring
    noises averaged. In the terms of Chen et al. (2014): learning rate eps, momentum
    decay 1 - a. On N(0, 1 / lam) with exact gradients the positions have the exact
    variance T / lam, the momenta after a step T (1 - eps lam / 4). Friction 0 is
    leapfrog; T = 0 is damped gradient descent.

    :param friction: gamma >= 0, per unit of time; ``inf`` draws a fresh momentum each
        step.
    :param max_kick: as of :class:`Overdamped`.
    :raises ValueError: for a negative friction.

    Reference: Leimkuhler and Matthews (2013), section 2; Chen, Fox and Guestrin (2014).

    >>> BAOAB(friction=1.0).rows
    1
    """

    def step(
        self,
        context: StepContext,
        position: Array,
        memory: PyTree,
        draw: StepRandomness,
    ) -> StepResult:
        half = 0.5 * jnp.sqrt(context.step_size)
        kicked = self._kick(context, memory.momentum, memory.slope)
        renewed = refreshed(
            kicked, draw.noise[0], self._rate(context), context.temperature
        )
        # Both half drifts in one product: nothing in between depends on the position.
        end = position + half * context.root(context.adaptation, kicked + renewed)
        evaluation = context.evaluate(end, draw.batch)
        next_memory = Momentum(*self._last_kick(context, renewed, evaluation))
        return self._guarded(
            context, position, memory, StepResult(end, next_memory, evaluation)
        )


class Thermostat(NamedTuple):
    """Whitened momentum r, (P,), the last whitened gradient (P,), and the thermostat's
    friction xi, scalar.
    """

    momentum: Array
    slope: Array
    friction: Array


@dataclass(frozen=True)
class NoseHoover(_Underdamped):
    r"""Stochastic-gradient Nosé-Hoover thermostat (SGNHT): its friction adapts to the
    unknown gradient noise.

    The equations of Ding et al. (2014), with r'r the squared norm,

    .. math:: dr = -\xi r\,dt + L'\tilde g\,dt + \sqrt{2 A T}\,dW, \quad d\theta = L
              r\,dt, \quad
              Q\,d\xi = (r'r / P - T)\,dt

    by the symmetric splitting kick, half drift, half thermostat, refresh with friction
    xi (exact), and back (B A D O D A B), h = sqrt(step_size): the same first-order
    terms as the Euler steps of that paper, with a smaller error. If gradient noise has
    variance V per coordinate, xi settles near A + h V / (2 T), and positions and
    momenta keep the temperature T; the noise must have the same size in all (whitened)
    coordinates. With A = 0 and exact gradients the motion is deterministic and need not
    be ergodic. r'r / P counts as at most (10 + 20 / P) T, which equilibrium does not
    reach, so that a few steps with gigantic gradients do not leave a friction behind
    that stops the chain.

    :param friction: A >= 0, also the initial value of xi.
    :param mass: Q > 0, 1 in that paper; its unit is a squared time, so it should be a
        multiple of h^2.
    :param max_kick: as of :class:`Overdamped`.
    :raises ValueError: for a negative or infinite friction, or a mass that is not
        positive.

    Reference: Ding et al. (2014), algorithm 2; Leimkuhler and Shang (2016), section 2
    (splitting).

    >>> NoseHoover(friction=1.0).rows
    1
    """

    friction: NonNegative
    mass: Positive = 1.0

    def init(
        self, context: StepContext, position: Array, draw: StepRandomness
    ) -> PyTree:
        start = super().init(context, position, draw)
        return Thermostat(
            start.momentum, start.slope, jnp.asarray(self.friction, position.dtype)
        )

    def step(
        self,
        context: StepContext,
        position: Array,
        memory: PyTree,
        draw: StepRandomness,
    ) -> StepResult:
        h, temperature = jnp.sqrt(context.step_size), context.temperature
        half, size = 0.5 * h, position.shape[0]
        hottest = (HOTTEST + OF_FEW / size) * temperature

        def heat(momentum: Array) -> Array:
            kinetic = jnp.minimum(squared_norm(momentum) / size, hottest)
            return half / self.mass * (kinetic - temperature)

        kicked = self._kick(context, memory.momentum, memory.slope)
        xi = memory.friction + heat(kicked)
        decay = jnp.exp(-xi * h)
        renewed = (
            decay * kicked
            + jnp.sqrt(self._variance(xi, h) * temperature) * draw.noise[0]
        )
        xi = xi + heat(renewed)
        end = position + half * context.root(context.adaptation, kicked + renewed)
        evaluation = context.evaluate(end, draw.batch)
        next_memory = Thermostat(*self._last_kick(context, renewed, evaluation), xi)
        return self._guarded(
            context, position, memory, StepResult(end, next_memory, evaluation)
        )

    def in_other_steps(self, memory: Thermostat, ratio: Array) -> Thermostat:
        # friction is per unit of time; that of a step stays
        friction = (memory.friction * ratio).astype(memory.friction.dtype)
        return memory._replace(friction=friction)

    def _variance(self, xi: Array, h: Array) -> Array:
        """Return A (1 - exp(-2 xi h)) / xi, positive for xi of either sign, 2 A h at xi
        = 0.
        """
        small = jnp.abs(xi) < 1e-4
        safe = jnp.where(small, 1.0, xi)
        exact = -jnp.expm1(-2.0 * safe * h) / safe
        return self.friction * jnp.where(small, 2.0 * h * (1.0 - xi * h), exact)


# --------------------------------------------------------------------------------------
# microcanonical

_OUTER = 0.1931833275037836
# Fractions of a step: turns of the direction, and the drifts between them.
INTEGRATORS = {
    "leapfrog": ((0.5, 0.5), (1.0,)),
    "mclachlan": ((_OUTER, 1 - 2 * _OUTER, _OUTER), (0.5, 0.5)),
}


class Direction(NamedTuple):
    """Unit direction (P,), potential and gradient (P,) at the last position, and
    decoherence length L.
    """

    direction: Array
    potential: Array
    gradient: Array
    length: Array


def turn(direction: Array, slope: Array, time: Array) -> tuple[Array, Array]:
    """Turn a unit vector (P,) towards ``slope`` for some time; return it, and the
    change of the kinetic energy.

    With e the unit vector along the slope, delta = time |slope| / (P - 1) and zeta =
    exp(-delta), the new direction is (1 - zeta)(1 + zeta + (u.e)(1 - zeta)) e + 2 zeta
    u, normalized; the energy is minus the log Jacobian of this map of the sphere.
    """
    freedom = slope.shape[0] - 1
    tiny, epsilon = jnp.finfo(slope.dtype).tiny, jnp.finfo(slope.dtype).eps
    norm = jnp.maximum(jnp.sqrt(squared_norm(slope)), tiny)
    delta = time * norm / freedom
    along = jnp.clip(jnp.vdot(direction, slope) / norm, -1.0, 1.0)
    zeta = jnp.exp(-delta)
    # The length of the unnormalized direction, in closed form.
    length = jnp.maximum(1.0 + along + (1.0 - along) * zeta**2, tiny)
    towards = (1.0 - zeta) * (1.0 + zeta + along * (1.0 - zeta)) / (length * norm)
    # log(cosh delta + along sinh delta), without the cancellation of that form.
    left = jnp.maximum(0.5 * (1.0 - along) * jnp.expm1(-2.0 * delta), epsilon - 1.0)
    kinetic = freedom * (delta + jnp.log1p(left))
    return towards * slope + 2.0 * zeta / length * direction, kinetic


def normalized(v: Array) -> Array:
    """Return v / |v|."""
    return v * lax.rsqrt(squared_norm(v))


@dataclass(frozen=True)
class Microcanonical(Dynamics):
    r"""Microcanonical Langevin dynamics (MCLMC): constant speed, in a direction that
    the gradient turns.

    The direction u is a unit vector in the whitened space, G = L_G L_G'; with g = -grad
    U / T and P parameters,

    .. math:: d\theta = L_G u\,dt, \qquad du = (I - u u') L_G' g\,dt / (P - 1)

    leaves exp(-U / T) with u uniform on the sphere invariant. Turns and drifts are
    solved exactly and composed symmetrically, with a refresh :math:`u \leftarrow (u +
    \nu z) / |u + \nu z|`, :math:`\nu^2 = (e^{2 \epsilon / \ell} - 1) / P`, between
    steps: the half after one and the half before the next in one. ``step_size`` is the
    *length* eps of a step, and the decoherence length :math:`\ell` the distance after
    which the direction is forgotten.

    A large gradient changes the direction, never the speed. There is a bias of order
    eps^2, which the energy error of the steps measures. With ``max_energy_error`` a
    step whose error is larger, or not finite, is refused: the chain stays and turns
    back, u <- -u. Steps and their reversals have errors of the same size, so whether
    one is refused does not change the stationary density: what bias there is comes from
    the steps that are taken. One step in ten, chosen at random, has a quarter, 1/16 or
    1/64 of the length: where only short steps are taken, a chain walks on instead of
    turning to and fro. In warm-up, steps that lower the potential are taken whatever
    their error.

    :param length: decoherence length, ``inf`` for no refreshes; sqrt(P) by default,
        right for N(0, I).
    :param integrator: ``"mclachlan"`` (minimal norm, two gradients per step) or
        ``"leapfrog"`` (one).
    :param fresh: evaluate the start of each step on the minibatch of the step, at the
        cost of one more gradient, so that the energy error is that of the step alone.
        Needed with minibatches.
    :param max_energy_error: in nats; ``None`` refuses only steps whose error is not
        finite.
    :param max_warm_up_error: the same in warm-up, if it is another.
    :raises ValueError: for a length that is not positive, an unknown integrator, or
        fewer than two parameters.

    Reference: Robnik, De Luca, Silverstein & Seljak (2023), section 3; Robnik & Seljak
    (2024), equations 4 to 6.

    >>> (
    ...     Microcanonical(length=2.0).evaluations,
    ...     Microcanonical(integrator="leapfrog").evaluations,
    ... )
    (2, 1)
    """

    length: PositiveOrInfinite | None = None
    integrator: Annotated[str, Choice(INTEGRATORS)] = "mclachlan"
    fresh: Switch = False
    max_energy_error: PositiveOrInfinite | None = None
    max_warm_up_error: PositiveOrInfinite | None = None

    cached_fields = ("potential", "gradient")
    reports_energy = True

    @property
    def evaluations(self) -> int:
        return len(INTEGRATORS[self.integrator][1]) + self.fresh

    def init(
        self, context: StepContext, position: Array, draw: StepRandomness
    ) -> Direction:
        if position.shape[0] < 2:
            instead = (
                "On a line there are only two directions: it needs at least two "
                "parameters."
            )
            raise argument_error(
                "sgmcmc.Microcanonical", "position", f"shape {position.shape}", instead
            )
        evaluation = context.evaluate(position, draw.batch)
        length = jnp.asarray(
            position.size**0.5 if self.length is None else self.length, position.dtype
        )
        return Direction(
            normalized(draw.noise[0]), evaluation.potential, evaluation.gradient, length
        )

    def step(
        self,
        context: StepContext,
        position: Array,
        memory: PyTree,
        draw: StepRandomness,
    ) -> StepResult:
        if self.max_energy_error is not None:
            shorter = 4.0 ** -jnp.ceil(3 * draw.uniform / SHORT)
            share = jnp.where(draw.uniform <= SHORT, shorter, 1.0).astype(
                position.dtype
            )
            context = context._replace(step_size=share * context.step_size)
        # Bounded, because an infinite weight of the noise would give NaN.
        blur = jnp.minimum(2.0 * context.step_size / memory.length, 50.0)
        spread = jnp.sqrt(jnp.expm1(blur) / position.shape[0])
        direction = normalized(memory.direction + spread * draw.noise[0])
        start = Evaluation(
            position, memory.potential, memory.gradient, context.adaptation
        )
        if self.fresh:
            start = context.evaluate(position, draw.batch)
        evaluation, end, error = self._integrate(context, start, direction, draw.batch)
        accepted = jnp.isfinite(error)
        if self.max_energy_error is not None:
            largest = jnp.asarray(self.max_energy_error, error.dtype)
            if self.max_warm_up_error is not None:
                early = self.max_warm_up_error
                largest = jnp.where(context.warming, early, largest)
            descends = context.warming & (evaluation.potential < start.potential)
            accepted &= descends | (jnp.abs(error) <= largest)
        evaluation, end = select(accepted, (evaluation, end), (start, -direction))
        next_memory = memory._replace(
            direction=end, potential=evaluation.potential, gradient=evaluation.gradient
        )
        shown = (
            start if self.fresh else evaluation
        )  # the end of a step depends on the noise of its minibatch
        return StepResult(
            evaluation.position,
            next_memory,
            shown,
            energy_error=error,
            refused=~accepted,
        )

    def _integrate(
        self, context: StepContext, start: Evaluation, direction: Array, batch: PyTree
    ) -> tuple:
        """The deterministic part of a step: the evaluation at its end, direction, and
        energy error.
        """
        turns, drifts = INTEGRATORS[self.integrator]
        eps, scale = context.step_size, -1.0 / context.temperature
        adaptation = context.adaptation

        def slope(gradient: Array) -> Array:
            return scale * context.transpose(adaptation, gradient)

        def move(carry: tuple, shares: tuple[Array, Array]) -> tuple[tuple, None]:
            evaluation, direction, kinetic = carry
            share, drift = shares
            position = evaluation.position + (drift * eps) * context.root(
                adaptation, direction
            )
            evaluation = context.evaluate(position, batch)
            direction, change = turn(direction, slope(evaluation.gradient), share * eps)
            return (evaluation, direction, kinetic + change), None

        direction, kinetic = turn(direction, slope(start.gradient), turns[0] * eps)
        # A loop, so that the gradient is compiled once.
        shares = (jnp.array(turns[1:], eps.dtype), jnp.array(drifts, eps.dtype))
        carry, _ = lax.scan(move, (start, direction, kinetic), shares)
        evaluation, direction, kinetic = carry
        # A difference of neighbors: that of distant potentials would lose digits.
        return (
            evaluation,
            direction,
            kinetic - scale * (evaluation.potential - start.potential),
        )
