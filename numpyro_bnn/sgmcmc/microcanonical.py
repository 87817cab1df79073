"""Microcanonical dynamics: constant speed, in a direction that turns along the gradient; plain, and with a test."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from numpyro_bnn._checks import argument_error, check_count, check_number, unknown_name
from numpyro_bnn.sgmcmc.interfaces import (
    Dynamics,
    Evaluation,
    Gradient,
    StepContext,
    StepRandomness,
    StepResult,
    squared_norm,
)
from numpyro_bnn.sgmcmc.metropolis import accept, check_all_data, select

__all__ = ["INTEGRATORS", "Direction", "Microcanonical", "MicrocanonicalMetropolis"]

_OUTER = 0.1931833275037836
# Shares of a step: turns of the direction, and the drifts between them.
INTEGRATORS = {
    "leapfrog": ((0.5, 0.5), (1.0,)),
    "mclachlan": ((_OUTER, 1 - 2 * _OUTER, _OUTER), (0.5, 0.5)),
}
# The golden ratio in 32 bits: multiples of it fill the circle evenly.
_GOLDEN = 2654435769
# Largest delta of a turn that can be undone, in units of the logarithm of the precision: 6 in float32.
SHARPEST = 0.375


class Direction(NamedTuple):
    """Memory of microcanonical dynamics.

    :param direction: unit vector (P,).
    :param potential: of the last position.
    :param gradient: (P,) of the last position.
    :param length: decoherence length L.
    :param trajectory: number of the next trajectory.
    """

    direction: jax.Array
    potential: jax.Array
    gradient: jax.Array
    length: jax.Array
    trajectory: jax.Array


def turn(direction: jax.Array, slope: jax.Array, time: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Turn a unit vector (P,) towards ``slope`` for a while; return it, the change of the kinetic energy, and delta.

    With e the unit vector along the slope, delta = time |slope| / (P - 1) and zeta = exp(-delta), the new direction
    is (1 - zeta)(1 + zeta + (u.e)(1 - zeta)) e + 2 zeta u, normalized, and minus the energy is the logarithm of the
    Jacobian of this map of the sphere.
    """
    freedom = slope.shape[0] - 1
    tiny, epsilon = jnp.finfo(slope.dtype).tiny, jnp.finfo(slope.dtype).eps
    norm = jnp.maximum(jnp.sqrt(squared_norm(slope)), tiny)
    delta = time * norm / freedom
    along = jnp.clip(jnp.vdot(direction, slope) / norm, -1.0, 1.0)
    zeta = jnp.exp(-delta)
    # The length of what is normalized; known, so that it need not be measured.
    length = jnp.maximum(1.0 + along + (1.0 - along) * zeta**2, tiny)
    towards = (1.0 - zeta) * (1.0 + zeta + along * (1.0 - zeta)) / (length * norm)
    # log(cosh delta + along sinh delta), without the cancellation of that form.
    left = jnp.maximum(0.5 * (1.0 - along) * jnp.expm1(-2.0 * delta), epsilon - 1.0)
    kinetic = freedom * (delta + jnp.log1p(left))
    return towards * slope + (2.0 * zeta / length) * direction, kinetic, delta


def normalized(v: jax.Array) -> jax.Array:
    """Return v / |v|."""
    return v * lax.rsqrt(squared_norm(v))


@dataclass(frozen=True)
class _Microcanonical(Dynamics):
    length: float | None = None
    integrator: str = "mclachlan"

    def __post_init__(self) -> None:
        call = f"sgmcmc.{type(self).__name__}"
        if self.length is not None:
            check_number(call, "length", self.length, strict=True, infinite=True)
        if self.integrator not in INTEGRATORS:
            raise unknown_name(call, "integrator", self.integrator, INTEGRATORS)

    @property
    def reports_energy(self) -> bool:
        return True

    @property
    def persistent_fields(self) -> tuple[str, ...]:
        return ("direction", "length", "trajectory")

    def init(self, environment: StepContext, position: jax.Array, draw: StepRandomness) -> Direction:
        if position.shape[0] < 2:
            raise argument_error(
                f"sgmcmc.{type(self).__name__}",
                "position",
                f"shape {position.shape}",
                "On a line there are only two directions: it needs at least two parameters.",
            )
        seen = environment.evaluate(position, draw.batch)
        length = jnp.asarray(position.size**0.5 if self.length is None else self.length, position.dtype)
        return Direction(
            normalized(draw.noise[0]), seen.potential, seen.gradient, length, jnp.zeros((), jnp.uint32)
        )

    def _integrate(
        self, environment: StepContext, seen: Evaluation, direction: jax.Array, batch: Any
    ) -> tuple[Evaluation, jax.Array, jax.Array, jax.Array]:
        """One step of the deterministic part: evaluation at its end, direction, energy error, and largest delta."""
        turns, drifts = INTEGRATORS[self.integrator]
        eps, scale = environment.step_size, -1.0 / environment.temperature
        adaptation, start = environment.adaptation, seen.potential

        def slope(gradient: jax.Array) -> jax.Array:
            return scale * environment.transpose(adaptation, gradient)

        direction, kinetic, largest = turn(direction, slope(seen.gradient), turns[0] * eps)
        for share, drift in zip(turns[1:], drifts, strict=True):
            position = seen.position + (drift * eps) * environment.root(adaptation, direction)
            seen = environment.evaluate(position, batch)
            direction, change, delta = turn(direction, slope(seen.gradient), share * eps)
            kinetic, largest = kinetic + change, jnp.maximum(largest, delta)
        # The potentials of neighboring positions: their difference is exact where that of far ones loses digits.
        return seen, direction, kinetic - scale * (seen.potential - start), largest


@dataclass(frozen=True)
class Microcanonical(_Microcanonical):
    r"""Microcanonical Langevin dynamics (MCLMC): unit velocity, turned by the gradient, blurred a little by noise.

    The direction u is a unit vector in the whitened space, G = L_G L_G'; with g = -grad U / T and P parameters,

    .. math:: d\theta = L_G u\,dt, \qquad du = (I - u u') L_G' g\,dt / (P - 1)

    leaves exp(-U / T) with u uniform on the sphere as it is. Turns and drifts are solved exactly and composed
    symmetrically, with a refresh :math:`u \leftarrow (u + \nu z) / |u + \nu z|`,
    :math:`\nu^2 = (e^{2 \epsilon / \ell} - 1) / P`, between steps: the half after one and the half before the next
    in one. ``step_size`` is the *length* eps of a step, and the decoherence length :math:`\ell` the distance after
    which the direction is forgotten.

    The speed cannot grow: a large gradient turns, and never throws. Nothing is rejected, so there is a bias of order
    eps^2, which the energy error of the steps tells.

    :param length: decoherence length, ``inf`` for no refreshes; sqrt(P) by default, right for N(0, I).
    :param integrator: ``"mclachlan"`` (minimal norm, two gradients per step) or ``"leapfrog"`` (one).
    :param fresh: evaluate the start of each step on the minibatch of the step: one gradient more, and the energy
        error is that of the step alone. Needed with minibatches.
    :param energy: tell the energy error of the steps. Without, no potential is evaluated: gradients alone are a
        quarter cheaper where the network is small. A state can go on with either; the potential in its memory is
        stale after steps without.
    :raises ValueError: for a length that is not positive, an unknown integrator, or fewer than two parameters.

    Reference: Robnik, De Luca, Silverstein & Seljak (2023), section 3; Robnik & Seljak (2024), equations 4 to 6.

    >>> Microcanonical(length=2.0).evaluations, Microcanonical(integrator="leapfrog").evaluations
    (2, 1)
    """

    fresh: bool = False
    energy: bool = True

    @property
    def reports_energy(self) -> bool:
        return self.energy

    @property
    def evaluations(self) -> int:
        return len(INTEGRATORS[self.integrator][1]) + self.fresh

    def step(
        self, environment: StepContext, position: jax.Array, memory: Direction, draw: StepRandomness
    ) -> StepResult:
        # Bounded, because an infinite weight of the noise would be no number.
        blur = jnp.minimum(2.0 * environment.step_size / memory.length, 50.0)
        spread = jnp.sqrt(jnp.expm1(blur) / position.shape[0])
        direction = normalized(memory.direction + spread * draw.noise[0])
        here = Evaluation(position, memory.potential, memory.gradient, environment.adaptation)
        if self.fresh:
            here = environment.evaluate(position, draw.batch)
        seen, direction, error, _ = self._integrate(environment, here, direction, draw.batch)
        potential = seen.potential if self.energy else memory.potential
        after = memory._replace(direction=direction, potential=potential, gradient=seen.gradient)
        return StepResult(seen.position, after, seen, energy_error=error if self.energy else None)


@dataclass(frozen=True)
class MicrocanonicalMetropolis(_Microcanonical):
    r"""Microcanonical trajectories with a Metropolis test: exact.

    A step draws a new direction (or a part of one), follows the dynamics of :class:`Microcanonical` without noise for
    n steps, and accepts with

    .. math:: \log\alpha = -\sum_{l=1}^n \Delta_l, \qquad
              \Delta_l = \tfrac1T [U(\theta_l) - U(\theta_{l-1})] + (P - 1) \sum_{\mathrm{turns}}
              \log(\cosh\delta + (u \cdot e) \sinh\delta)

    the change of the energy, in which the turns' terms are minus the logarithms of their Jacobians. On rejection the
    direction is flipped. Trajectories have lengths spread evenly over (0, 2 length): n is a golden-ratio sequence in
    the number of the trajectory, the same for all chains of equal tuning, which then waste nothing on one another.

    :param length: mean length of a trajectory, n eps; sqrt(P) by default.
    :param integrator: as for :class:`Microcanonical`.
    :param momentum_decay: share of the direction that a new trajectory forgets, in (0, 1]; 1 draws it anew.
    :param max_steps: bound of n.
    :raises ValueError: for numbers out of range, a minibatch gradient, or fewer than two parameters.

    Reference: Robnik, Cohn-Gordon & Seljak (2025), section 3.

    >>> MicrocanonicalMetropolis(length=2.0).exact
    True
    """

    momentum_decay: float = 1.0
    max_steps: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        call = "sgmcmc.MicrocanonicalMetropolis"
        check_number(call, "momentum_decay", self.momentum_decay, strict=True)
        if self.momentum_decay > 1:
            raise argument_error(call, "momentum_decay", self.momentum_decay, "Pass a share in (0, 1].")
        check_count(call, "max_steps", self.max_steps)

    exact = True

    def check(self, gradient: Gradient) -> None:
        instead = "Pass `Full`: its test needs the potential of all the data."
        check_all_data("sgmcmc.MicrocanonicalMetropolis", gradient, instead)

    def num_steps(self, memory: Direction, step_size: jax.Array) -> jax.Array:
        """Steps of the trajectory that comes next: 2 length / step_size times an even sequence on (0, 1)."""
        turn = memory.trajectory * jnp.uint32(_GOLDEN)
        share = (turn.astype(step_size.dtype) + 0.5) * 2.0**-32
        most = jnp.asarray(self.max_steps, step_size.dtype)
        return jnp.clip(jnp.ceil(2.0 * share * memory.length / step_size), 1.0, most).astype(jnp.int32)

    def step(
        self, environment: StepContext, position: jax.Array, memory: Direction, draw: StepRandomness
    ) -> StepResult:
        keep = 1.0 - self.momentum_decay
        spread = ((1.0 - keep**2) / position.shape[0]) ** 0.5
        direction = normalized(keep * memory.direction + spread * draw.noise[0])
        here = Evaluation(position, memory.potential, memory.gradient, environment.adaptation)

        def advance(_: jax.Array, carry: tuple) -> tuple:
            seen, direction, error = carry
            seen, direction, change, delta = self._integrate(environment, seen, direction, draw.batch)
            change = jnp.where(delta < limit, change, jnp.inf)
            return seen._replace(adaptation=environment.adaptation), normalized(direction), error + change

        # A direction that was turned further has lost its digits, and with them the way back: refused, on either way.
        limit = -SHARPEST * jnp.log(jnp.finfo(position.dtype).eps)
        number = self.num_steps(memory, environment.step_size)
        start = (here, direction, jnp.zeros((), position.dtype))
        seen, end, error = lax.fori_loop(0, number, advance, start)
        accepted, probability = accept(-error, draw.uniform)
        kept, direction = select(accepted, (seen, end), (here, -direction))
        after = memory._replace(
            direction=direction,
            potential=kept.potential,
            gradient=kept.gradient,
            trajectory=memory.trajectory + 1,
        )
        spent = number * len(INTEGRATORS[self.integrator][1])
        return StepResult(kept.position, after, kept, probability, error, spent)
