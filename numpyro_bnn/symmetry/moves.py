"""Moves along the orbits of a symmetry: planned once from a trace, drawn exactly or by
Metropolis-Hastings.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random

from numpyro_bnn.program.compiled import shared
from numpyro_bnn.symmetry.base import Symmetry, UnitAxis, Values
from numpyro_bnn.symmetry.gig import log_gig
from numpyro_bnn.symmetry.groups import (
    JointScale,
    Permutation,
    Rescale,
    Scale,
    Shift,
    SignFlip,
)
from numpyro_bnn.symmetry.model_info import (
    ModelInfo,
    PriorProgram,
    as_normal,
    elementwise,
    in_latent,
    log_density,
)

Method = Literal[
    "gig",
    "normal",
    "prior",
    "scale prior",
    "order",
    "hyperprior",
    "shuffle",
    "flip",
    "walk",
]
EXACT: frozenset[Method] = frozenset({"gig", "normal", "prior", "scale prior", "order"})
# What an independent proposal is called if it is always accepted.
ALWAYS_ACCEPTED: dict[str, Method] = {"hyperprior": "scale prior", "shuffle": "order"}
STEPS = 5  # steps of a random walk with one unit


class Plan(NamedTuple):
    """How to move along the orbits of a symmetry on the latent sites of a model.

    :param symmetry: the symmetry, in terms of the latent sites.
    :param method: exact draws: ``"gig"`` (chi and generalized inverse Gaussian),
        ``"normal"``, ``"prior"``, ``"scale prior"`` (the hyperprior, for weights that
        are a scale family), ``"order"`` (a uniform order, for exchangeable priors),
        ``"flip"`` (signs); independent proposals that are corrected: ``"hyperprior"``,
        ``"shuffle"``; ``"walk"``: Metropolis-Hastings on the group.
    :param by_unit: whether the prior factorizes by unit, so that units move
        independently.
    :param affected: sites whose log density may change.
    :param units: number of units U.
    :param exact: whether the likelihood is left out of the ratio.
    """

    symmetry: Symmetry
    method: Method
    by_unit: bool
    affected: tuple[str, ...]
    units: int
    exact: bool = True


def plan(
    info: ModelInfo, symmetries: Sequence[Symmetry], exact: bool = True
) -> tuple[Plan, ...]:
    """Choose how to move along the orbits of symmetries; without ``exact`` the
    likelihood enters every ratio.
    """
    return tuple(
        _plan_of(in_latent(symmetry, info), info, exact) for symmetry in symmetries
    )


def _plan_of(symmetry: Symmetry, info: ModelInfo, exact: bool) -> Plan:
    draws = info.draws
    prior = info.prior
    touched = set(symmetry.sites)
    affected = touched | prior.children(touched)
    distinct = len(touched) == len(symmetry.unit_axes)
    logs = jax.eval_shape(prior.elements, draws[0])
    by_unit = (
        exact
        and affected == touched
        and distinct
        and all(logs[site] is not None for site in touched)
    )
    # Free: the distributions of the moving sites do not change.
    free = by_unit and not prior.children(touched)
    method = _method(symmetry, prior, draws, free)
    candidate = Plan(
        symmetry,
        method,
        by_unit,
        tuple(sorted(affected)),
        symmetry.units(draws[0]),
        exact,
    )
    if (
        exact
        and method in ALWAYS_ACCEPTED
        and _always_accepted(candidate, prior, draws)
    ):
        return candidate._replace(method=ALWAYS_ACCEPTED[method])
    return candidate


def _always_accepted(plan: Plan, prior: PriorProgram, draws: list[dict]) -> bool:
    """Whether the ratio of an independent proposal is 1, up to rounding, at draws from
    the prior.

    Orders of units are tried at generators of the group: a random order of few units is
    often the identity. Where a support has bounds other than 0, densities at a few
    points say too little, and the move stays corrected.
    """
    redrawn = (
        plan.symmetry.scale[0].site if isinstance(plan.symmetry, JointScale) else None
    )

    def log_corrections(seed: jax.Array, values: dict) -> list[jax.Array]:
        rng_key = random.key(seed)
        orbit = _Orbit(plan._replace(by_unit=False), values, prior)
        if isinstance(plan.symmetry, Permutation):
            orders = plan.symmetry.trials(rng_key, plan.units)
            proposals = [(g, jnp.zeros(())) for g in orders]
        else:
            proposals = [orbit.independent_draw(rng_key)]
        fns = prior.distributions(values)
        corrections = []
        for site in plan.affected:
            bounds = [] if site == redrawn else jax.tree.leaves(fns[site].support)
            for bound in bounds:
                corrections.append(jnp.where(jnp.any(bound != 0), jnp.inf, 0.0))
        # Relative to the size of the log densities in a ratio.
        for g, proposal in proposals:
            ends = values, {**values, **orbit.moved(g)}
            size = 1 + sum(jnp.abs(prior.total(point, plan.affected)) for point in ends)
            corrections.append((orbit.log_ratio(g)[0] - proposal) / size)
        return corrections

    program = shared(log_corrections, once=True)
    corrections = []
    for seed, values in enumerate(draws):
        corrections += program(seed, values)
    return bool(np.all(np.abs(np.array(corrections, float)) < 1e-5))


def _method(
    symmetry: Symmetry, prior: PriorProgram, draws: list[dict], free: bool
) -> Method:
    if isinstance(symmetry, SignFlip):
        return "flip"
    if isinstance(symmetry, Permutation):
        return "shuffle"
    if isinstance(symmetry, JointScale):
        hyper = symmetry.scale[0].site
        scalar = jnp.size(draws[0][hyper]) == 1
        if scalar and hyper not in prior.children(set(symmetry.sites)):
            return "hyperprior"
        return "walk"
    if not free:
        return "walk"
    if isinstance(symmetry, Shift) and len(symmetry.unit_axes) == 1:
        axis = symmetry.unit_axes[0]
        if axis.per_unit(jnp.shape(draws[0][axis.site])) == 1:
            return "prior"
    means = shared(partial(_locations, symmetry, prior), once=True)
    locations = []
    for values in draws:
        locations += means(values)
    if any(loc is None for loc in locations):
        return "walk"
    if isinstance(symmetry, Shift):
        return "normal"
    centered = all(np.all(np.asarray(loc) == 0) for loc in locations)
    return "gig" if centered and isinstance(symmetry, Scale | Rescale) else "walk"


def _locations(
    symmetry: Symmetry, prior: PriorProgram, values: dict
) -> list[jax.Array | None]:
    """Means of normal sites; ``None`` for other families."""
    fns = map(prior.distributions(values).get, symmetry.sites)
    return [None if normal is None else normal[0] for normal in map(as_normal, fns)]


def move(
    plan: Plan,
    rng_key: jax.Array,
    values: Mapping[str, jax.Array],
    prior: PriorProgram,
    width: jax.Array,
) -> tuple[Values, jax.Array]:
    """One move along the orbits of a symmetry, for all its units.

    :param values: constrained values of all latent sites.
    :param prior: the prior of the model for its arguments.
    :param width: standard deviation of the random walk on the group.
    :return: new values of the moved sites, and the mean acceptance probability.
    """
    orbit = _Orbit(plan, values, prior)
    if plan.method in EXACT:
        return orbit.moved(orbit.exact_draw(rng_key)), jnp.ones(())
    if plan.method in ("shuffle", "hyperprior"):
        return _independent(orbit, rng_key)
    if plan.method == "walk" and plan.units == 1:
        return _several_steps(orbit, rng_key, width)
    step = _flip if plan.method == "flip" else _walk
    if plan.by_unit or plan.units == 1:
        return step(orbit, rng_key, width, jnp.ones((plan.units,), bool))
    return _one_by_one(step, orbit, rng_key, width)


class _Orbit(NamedTuple):
    """The orbit through a point: where a group element leads, its density, and draws
    that need no correction.
    """

    plan: Plan
    values: Mapping[str, jax.Array]
    prior: PriorProgram

    def moved(self, g: jax.Array) -> Values:
        return self.plan.symmetry.act(self.values, g)

    def log_ratio(self, g: jax.Array) -> jax.Array:
        """log p(g theta) - log p(theta) + log|det|: by unit (U,) or in total (1,);
        minus infinity if undefined.
        """
        difference = self._log_density(
            {**self.values, **self.moved(g)}
        ) - self._log_density(self.values)
        jacobian = self.plan.symmetry.log_det(self.values, g)
        ratio = difference + (
            jacobian if self.plan.by_unit else jnp.sum(jacobian)[None]
        )
        return jnp.where(jnp.isnan(ratio), -jnp.inf, ratio)

    def _log_density(self, values: Mapping[str, jax.Array]) -> jax.Array:
        """The part of the log density that a move changes."""
        plan = self.plan
        prior = self.prior
        if plan.by_unit:
            fns = prior.distributions(values)
            by_unit = jnp.zeros(plan.units)
            for axis in plan.symmetry.unit_axes:
                log = elementwise(fns[axis.site], values[axis.site])
                if log is not None:
                    by_unit = by_unit + axis.over_units(log)
            return by_unit
        total = prior.total(values, plan.affected)
        return (total if plan.exact else total + prior.likelihood(values))[None]

    def independent_draw(self, rng_key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """A group element independent of the place on the orbit, and the log ratio of
        its densities there and here.

        A uniform order of units, or the element that takes a hyperparameter s to a draw
        from its prior, whose density with respect to the Haar measure is p(s) s.
        """
        symmetry = self.plan.symmetry
        if not isinstance(symmetry, JointScale):
            return symmetry.random(rng_key, self.plan.units), jnp.zeros(())
        site = symmetry.scale[0].site
        hyperprior = self.prior.distributions(self.values)[site]
        now = self.values[site]
        then = jnp.reshape(hyperprior.sample(rng_key), jnp.shape(now))
        g = (jnp.log(then / now) / symmetry.power).reshape(1)
        log_then = hyperprior.log_prob(then) + jnp.log(then)
        return g, jnp.sum(log_then - hyperprior.log_prob(now) - jnp.log(now))

    def exact_draw(self, rng_key: jax.Array) -> jax.Array:
        """A group element from the conditional density on the orbit."""
        symmetry = self.plan.symmetry
        method = self.plan.method
        if method == "order":
            return self.independent_draw(rng_key)[0]
        if isinstance(symmetry, JointScale):
            return self._inside(symmetry.scale[0], self.independent_draw(rng_key)[0])
        fns = self.prior.distributions(self.values)
        if method == "prior":
            axis = symmetry.unit_axes[0]
            value = self.values[axis.site]
            draw = jnp.broadcast_to(fns[axis.site].sample(rng_key), value.shape)
            return self._inside(axis, axis.over_units(draw - value))
        if method == "normal":
            return _normal_shift(symmetry, rng_key, self.values, fns)
        squares = {1.0: jnp.zeros(self.plan.units), -1.0: jnp.zeros(self.plan.units)}
        assert isinstance(symmetry, Scale | Rescale)
        for axis, power in symmetry.powers:
            _, scale = as_normal(fns[axis.site])  # type: ignore[misc]
            squares[power] = squares[power] + axis.over_units(
                (self.values[axis.site] / scale) ** 2
            )
        g = 0.5 * log_gig(
            rng_key, symmetry.dimension(self.values) / 2, squares[1.0], squares[-1.0]
        )
        # A unit of zeros has no scale to draw.
        return jnp.where(jnp.isfinite(g), g, 0.0)

    def _inside(self, axis: UnitAxis, g: jax.Array) -> jax.Array:
        """``g``, or the identity for units of a redrawn site that rounding puts on the
        border of its support.
        """
        fn = self.prior.distributions(self.values)[axis.site]
        value = self.moved(g)[axis.site]
        logs = elementwise(fn, value)
        logs = log_density(fn, value) if logs is None else logs
        return jnp.where(jnp.isfinite(axis.over_units(logs)), g, 0.0)


def _normal_shift(
    symmetry: Symmetry, rng_key: jax.Array, values: Mapping, fns: Mapping
) -> jax.Array:
    precision = weighted = jnp.zeros(symmetry.units(values))
    for axis in symmetry.unit_axes:
        loc, scale = as_normal(fns[axis.site])  # type: ignore[misc]
        precision = precision + axis.over_units(scale**-2.0)
        weighted = weighted + axis.over_units((values[axis.site] - loc) / scale**2)
    noise = random.normal(rng_key, jnp.shape(precision), jnp.result_type(weighted))
    return -weighted / precision + noise / jnp.sqrt(precision)


def _independent(orbit: _Orbit, rng_key: jax.Array) -> tuple[Values, jax.Array]:
    """Propose independently of the place on the orbit."""
    propose_key, accept_key = random.split(rng_key)
    g, proposal = orbit.independent_draw(propose_key)
    orbit_of_all = orbit._replace(plan=orbit.plan._replace(by_unit=False))
    ratio = orbit_of_all.log_ratio(g) - proposal
    accepted = jnp.log(random.uniform(accept_key, ratio.shape)) < ratio
    identity = jnp.arange(orbit.plan.units) if orbit.plan.method == "shuffle" else 0.0
    return orbit.moved(jnp.where(accepted, g, identity)), jnp.mean(_probability(ratio))


def _walk(
    orbit: _Orbit, rng_key: jax.Array, width: jax.Array, moving: jax.Array
) -> tuple[Values, jax.Array]:
    """One random-walk step of the moving units."""
    size = moving.shape if orbit.plan.by_unit else (1,)
    return _step(orbit, _noise(rng_key, moving.shape, size), width, moving)


def _noise(rng_key: jax.Array, steps: tuple, tests: tuple) -> tuple:
    """Normal steps, and logs of the uniform numbers that accept them."""
    normal_key, uniform_key = random.split(rng_key)
    uniform = random.uniform(uniform_key, tests)
    return random.normal(normal_key, steps), jnp.log(uniform)


def _step(
    orbit: _Orbit, noise: tuple, width: jax.Array, moving: jax.Array
) -> tuple[Values, jax.Array]:
    g = jnp.where(moving, width * noise[0], 0)
    ratio = orbit.log_ratio(g)
    new_values = orbit.moved(jnp.where(noise[1] < ratio, g, 0.0))
    return new_values, jnp.mean(_probability(ratio))


def _several_steps(
    orbit: _Orbit, rng_key: jax.Array, width: jax.Array
) -> tuple[Values, jax.Array]:
    """Several steps for a single unit: they cost little, and hyperparameters gain from
    long moves.
    """

    def step(orbit: _Orbit, noise: tuple) -> tuple[Values, jax.Array]:
        return _step(orbit, noise, width, jnp.ones((1,), bool))

    return _scan(orbit, step, _noise(rng_key, (STEPS, 1), (STEPS, 1)))


def _one_by_one(
    step: Callable, orbit: _Orbit, rng_key: jax.Array, width: jax.Array
) -> tuple[Values, jax.Array]:
    """Update units that share a factor of the density one after the other."""
    units = jnp.arange(orbit.plan.units)

    return _scan(
        orbit,
        lambda orbit, unit: step(
            orbit, random.fold_in(rng_key, unit), width, units == unit
        ),
        units,
    )


def _scan(orbit: _Orbit, step: Callable, inputs: Any) -> tuple[Values, jax.Array]:
    """Take steps in sequence, each from where the last one ended."""

    def body(last_values: Values, step_input: Any) -> tuple[Values, jax.Array]:
        return step(orbit._replace(values={**orbit.values, **last_values}), step_input)

    start = {site: orbit.values[site] for site in orbit.plan.symmetry.sites}
    last_values, accept_prob = lax.scan(body, start, inputs)
    return last_values, jnp.mean(accept_prob)


def _flip(
    orbit: _Orbit, rng_key: jax.Array, width: jax.Array, moving: jax.Array
) -> tuple[Values, jax.Array]:
    g = jnp.where(moving, -1.0, 1.0)
    probability = jax.nn.sigmoid(orbit.log_ratio(g))
    flipped = random.bernoulli(rng_key, probability)
    return orbit.moved(jnp.where(flipped, g, 1.0)), jnp.mean(probability)


def _probability(log_ratio: jax.Array) -> jax.Array:
    return jnp.exp(jnp.minimum(log_ratio, 0))
