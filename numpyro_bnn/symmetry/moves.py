"""Moves along the orbits of a symmetry: planned once from a trace, drawn exactly or by
Metropolis-Hastings.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random

from numpyro_bnn._distributions import affine_normal, is_affine_normal
from numpyro_bnn._types import Arrays
from numpyro_bnn.program.posterior import Posterior
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
from numpyro_bnn.symmetry.prior_program import (
    PriorProgram,
    elementwise,
    in_latent,
    log_density,
    log_likelihoods,
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


def plan_moves(
    reading: Posterior, symmetries: Sequence[Symmetry], exact: bool = True
) -> tuple[Plan, ...]:
    """Choose how to move along the orbits of symmetries; without ``exact`` the
    likelihood enters every ratio.
    """
    prior, draws = PriorProgram(reading), reading.draw([0, 1])
    logs = jax.eval_shape(prior.elements, draws[0])
    factored = {site for site, log in logs.items() if log is not None}
    plans = []
    for symmetry in symmetries:
        latent = in_latent(symmetry, prior, draws[0])
        plans.append(_plan_of(latent, prior, draws, factored, exact))
    return tuple(plans)


def _plan_of(
    symmetry: Symmetry,
    prior: PriorProgram,
    draws: list[Values],
    factored: set[str],
    exact: bool,
) -> Plan:
    """The plan of one symmetry; ``factored`` are the sites of independent elements."""
    touched = set(symmetry.sites)
    children = prior.children(touched)
    distinct = len(touched) == len(symmetry.unit_axes)
    by_unit = exact and distinct and touched <= factored and children <= touched
    # Free: the distributions of the moving sites do not change.
    method = _method(symmetry, prior, draws, free=by_unit and not children)
    candidate = Plan(
        symmetry,
        method,
        by_unit and method in ("flip", "walk"),
        tuple(sorted(touched | children)),
        symmetry.units(draws[0]),
        exact,
    )
    if candidate.by_unit and children and not _separate(candidate, prior, draws):
        candidate = candidate._replace(by_unit=False)
    corrected = method not in ALWAYS_ACCEPTED or not exact
    if corrected or not _always_accepted(candidate, prior, draws):
        return candidate
    return candidate._replace(method=ALWAYS_ACCEPTED[method])


def _separate(plan: Plan, prior: PriorProgram, draws: list[Values]) -> bool:
    """Whether no unit enters the prior of another, at draws from the prior.

    Those move whose number has a 1, or a 0, at some binary digit: any two units differ
    in one.
    """
    units, symmetry = np.arange(plan.units), plan.symmetry

    def densities(reading: Posterior, values: Values, moving: Array) -> Array:
        orbit = _Orbit(plan, values, PriorProgram(reading))
        proposals, _ = orbit.proposals(random.key(0), jnp.ones(()))
        g = jnp.where(moving, proposals[0], symmetry.identity(plan.units))
        return orbit._log_density({**values, **orbit.moved(g)})

    compute = prior.reading.prepare(densities)
    for values in draws:
        still = compute(values, units < 0)
        for digit in range((plan.units - 1).bit_length()):
            for moving in (units >> digit & 1 == 0, units >> digit & 1 == 1):
                if np.any((compute(values, moving) != still)[~moving]):
                    return False
    return True


def _method(
    symmetry: Symmetry, prior: PriorProgram, draws: list[Values], free: bool
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
    first, *further_axes = symmetry.unit_axes
    shift = isinstance(symmetry, Shift)
    if shift and not further_axes and first.per_unit(draws[0][first.site].shape) == 1:
        return "prior"
    sites = prior.reading.sites
    if not all(is_affine_normal(sites[name]["fn"]) for name in symmetry.sites):
        return "walk"
    if shift:
        return "normal"
    if isinstance(symmetry, Scale | Rescale) and _centered(symmetry, prior, draws):
        return "gig"
    return "walk"


def _centered(symmetry: Symmetry, prior: PriorProgram, draws: list[Values]) -> bool:
    """Whether the means of its normal sites are 0 at all draws."""

    def means(reading: Posterior, values: Values) -> list[Array]:
        fns = PriorProgram(reading).distributions(values)
        return [affine_normal(fns[name])[0] for name in symmetry.sites]  # type: ignore[index]

    compute = prior.reading.prepare(means)
    return not any(np.any(mean) for values in draws for mean in compute(values))


def _always_accepted(plan: Plan, prior: PriorProgram, draws: list[Values]) -> bool:
    """Whether the ratio of an independent proposal is 1, up to rounding, at draws from
    the prior.

    Orders of units are tried at generators of the group: a random order of few units is
    often the identity. Where a support has bounds other than 0, densities at a few
    points say too little, and the move stays corrected.
    """
    symmetry = plan.symmetry
    redrawn = symmetry.scale[0].site if isinstance(symmetry, JointScale) else None

    def log_corrections(reading: Posterior, seed: Array, values: Values) -> list:
        prior, rng_key = PriorProgram(reading), random.key(seed)
        proposals = [_Orbit(plan, values, prior).independent_draw(rng_key)]
        if isinstance(symmetry, Permutation):
            orders = symmetry.trials(rng_key, plan.units)
            proposals = [(g, jnp.zeros(())) for g in orders]
        corrections = []
        log_density_now = prior.total(values, plan.affected)
        for g, proposal in proposals:
            point = {**values, **symmetry.act(values, g)}
            new_log_density = prior.total(point, plan.affected)
            log_det = jnp.sum(symmetry.log_det(values, g))
            ratio = new_log_density - log_density_now + log_det
            size = 1 + jnp.abs(log_density_now) + jnp.abs(new_log_density)
            corrections.append((ratio - proposal) / size)
        fns = prior.distributions(values)
        for site in plan.affected:
            bounds = [] if site == redrawn else jax.tree.leaves(fns[site].support)
            for bound in bounds:
                corrections.append(jnp.where(jnp.any(bound != 0), jnp.inf, 0.0))
        return corrections

    compute = prior.reading.prepare(log_corrections)
    corrections = []
    for seed, values in enumerate(draws):
        corrections += compute(seed, values)
    return bool(np.all(np.abs(np.array(corrections, float)) < 1e-5))


def move(
    plan: Plan,
    rng_key: Array,
    values: Arrays,
    prior: PriorProgram,
    width: Array,
) -> tuple[Values, Array]:
    """One move along the orbits of a symmetry, for all its units.

    :param values: constrained values of all latent sites.
    :param prior: the prior of the model for its arguments.
    :param width: standard deviation of the random walk on the group.
    :return: new values of the moved sites, and the mean acceptance probability.
    """
    symmetry, orbit = plan.symmetry, _Orbit(plan, values, prior)
    if plan.method in EXACT:
        return orbit.moved(orbit.exact_draw(rng_key)), jnp.ones(())
    propose_key, accept_key = random.split(rng_key)
    proposals, correction = orbit.proposals(propose_key, width)
    tests = (len(proposals), plan.units if plan.by_unit else 1)

    def step(site_values: Values, proposed: tuple) -> tuple[Values, Array]:
        g, uniform = proposed
        orbit_now = orbit._replace(values={**values, **site_values})
        ratio = orbit_now.log_ratio(g) - correction
        if plan.method == "flip":
            probability = jax.nn.sigmoid(ratio)
        else:
            probability = jnp.exp(jnp.minimum(ratio, 0))
        g = jnp.where(uniform < probability, g, symmetry.identity(plan.units))
        return orbit_now.moved(g), jnp.mean(probability)

    start = {site: values[site] for site in symmetry.sites}
    uniforms = random.uniform(accept_key, tests)
    new_values, accept_prob = lax.scan(step, start, (proposals, uniforms))
    return new_values, jnp.mean(accept_prob)


class _Orbit(NamedTuple):
    """The orbit through a point: where a group element leads, its density, and group
    elements that are drawn or proposed.
    """

    plan: Plan
    values: Arrays
    prior: PriorProgram

    def moved(self, g: Array) -> Values:
        return self.plan.symmetry.act(self.values, g)

    def log_ratio(self, g: Array) -> Array:
        """log p(g theta) - log p(theta) + log|det|: by unit (U,) or in total (1,);
        minus infinity if undefined.
        """
        new_log_density = self._log_density({**self.values, **self.moved(g)})
        jacobian = self.plan.symmetry.log_det(self.values, g)
        if not self.plan.by_unit:
            jacobian = jnp.sum(jacobian)[None]
        ratio = new_log_density - self._log_density(self.values) + jacobian
        return jnp.where(jnp.isnan(ratio), -jnp.inf, ratio)

    def _log_density(self, values: Arrays) -> Array:
        """The part of the log density that a move changes."""
        plan, prior = self.plan, self.prior
        if not plan.by_unit:
            total = prior.total(values, plan.affected)
            if not plan.exact:
                logs = log_likelihoods(prior.reading, values)
                total = total + sum(map(jnp.sum, logs))
            return total[None]
        fns = prior.distributions(values)
        by_unit = jnp.zeros(plan.units)
        for axis in plan.symmetry.unit_axes:
            densities = elementwise(fns[axis.site], values[axis.site])
            assert densities is not None  # as planned
            by_unit = by_unit + axis.over_units(densities)
        return by_unit

    def proposals(self, rng_key: Array, width: Array) -> tuple[Array, Array]:
        """Group elements to be tried one after the other, (rounds, U), and the log
        ratio of the densities of proposing them there and here.
        """
        plan = self.plan
        if plan.method in ("shuffle", "hyperprior"):
            g, correction = self.independent_draw(rng_key)
            return g[None], correction
        if plan.method == "flip":
            g = jnp.full((1, plan.units), -1.0)
        else:
            # Steps of a single unit cost little, and hyperparameters gain from them.
            rounds = STEPS if plan.units == 1 else 1
            g = width * random.normal(rng_key, (rounds, plan.units))
        if not plan.by_unit and plan.units > 1:
            # Units that share a factor of the density move one after the other.
            one_unit = jnp.eye(plan.units, dtype=bool)
            g = jnp.where(one_unit, g, plan.symmetry.identity(plan.units))
        return g, jnp.zeros(())

    def independent_draw(self, rng_key: Array) -> tuple[Array, Array]:
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

    def exact_draw(self, rng_key: Array) -> Array:
        """A group element from the conditional density on the orbit."""
        symmetry, method = self.plan.symmetry, self.plan.method
        if isinstance(symmetry, JointScale):
            return self._inside(symmetry.scale[0], self.independent_draw(rng_key)[0])
        if method == "order":
            return self.independent_draw(rng_key)[0]
        fns = self.prior.distributions(self.values)
        if method == "prior":
            (axis,) = symmetry.unit_axes
            value = self.values[axis.site]
            draw = jnp.broadcast_to(fns[axis.site].sample(rng_key), value.shape)
            return self._inside(axis, axis.over_units(draw - value))
        if method == "normal":
            return _normal_shift(symmetry, rng_key, self.values, fns)
        assert isinstance(symmetry, Scale | Rescale)
        squares = {1.0: jnp.zeros(self.plan.units), -1.0: jnp.zeros(self.plan.units)}
        for axis, power in symmetry.powers:
            _, scale = affine_normal(fns[axis.site])  # type: ignore[misc]
            squares[power] += axis.over_units((self.values[axis.site] / scale) ** 2)
        order = symmetry.dimension(self.values) / 2
        g = 0.5 * log_gig(rng_key, order, squares[1.0], squares[-1.0])
        # A unit of zeros has no scale to draw.
        return jnp.where(jnp.isfinite(g), g, 0.0)

    def _inside(self, axis: UnitAxis, g: Array) -> Array:
        """``g``, or the identity for units of a redrawn site that rounding puts on the
        border of its support.
        """
        fn = self.prior.distributions(self.values)[axis.site]
        value = self.moved(g)[axis.site]
        logs = elementwise(fn, value)
        logs = log_density(fn, value) if logs is None else logs
        return jnp.where(jnp.isfinite(axis.over_units(logs)), g, 0.0)


def _normal_shift(
    symmetry: Symmetry, rng_key: Array, values: Mapping, fns: Mapping
) -> Array:
    precision = weighted = jnp.zeros(symmetry.units(values))
    for axis in symmetry.unit_axes:
        loc, scale = affine_normal(fns[axis.site])  # type: ignore[misc]
        precision = precision + axis.over_units(scale**-2.0)
        weighted = weighted + axis.over_units((values[axis.site] - loc) / scale**2)
    noise = random.normal(rng_key, jnp.shape(precision), jnp.result_type(weighted))
    return -weighted / precision + noise / jnp.sqrt(precision)
