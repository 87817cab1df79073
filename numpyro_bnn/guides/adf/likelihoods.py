"""The normalizer Z of a likelihood under Gaussian predictors, predictive moments, and the quadrature for both."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import lax
from jax.scipy.special import logsumexp
from numpy.polynomial.hermite_e import hermegauss

from numpyro_bnn.guides.adf.moment_matching import Hyperparameter, normal_log_density
from numpyro_bnn.guides.adf.observation import Context, Observation
from numpyro_bnn.guides.adf.reading import refuse
from numpyro_bnn.moments import Gaussian

# The constant that `normal_log_density` leaves out.
NORMAL_CONSTANT = -0.5 * np.log(2 * np.pi)
# Points per dimension: of the trapezoidal rule for one, and of Gauss-Hermite quadrature for two dimensions.
POINTS = {1: 257, 2: 24}
# Panels on each side of the mode of an integrand, how far they reach in prior sd, and nested grids to find the mode.
PANELS, REACH, ZOOMS = 10, 12.0, 4
# Smallest prior variance, relative to the square of the mean; largest relative difference of two rules.
SMALLEST, ALLOWED = 1e-20, 0.05
# Largest second difference, at distance 1 / 2, of the logarithm of an integrand that counts as wide.
BEND = 0.5

States = Mapping[str, Any]


@dataclass(frozen=True)
class Likelihood:
    """An observation together with the posterior of its noise sites.

    :param observation: the observation of the model.
    :param noise: the noise hyperparameters that are Gaussian in unconstrained space.
    :param gamma: the noise precision with a Gamma posterior, if there is one.
    """

    observation: Observation
    noise: Mapping[str, Hyperparameter]
    gamma: str | None

    def log_z(
        self, quantities: Mapping[str, Gaussian], states: States, context: Context, order: int = 0
    ) -> jax.Array:
        """log Z of one observation, elementwise, with ``order`` added to the shape of the noise precision.

        A Normal likelihood is integrated over its mean in closed form, everything else by quadrature. It is 0 for a
        masked observation.
        """
        known = self._parameters(_means(quantities), context)
        mask = known["mask"]
        if self.observation.kind == "categorical":
            logits = quantities["logits"]
            return jnp.where(mask, softmax_log_mean(logits, jnp.where(mask, known["value"], 0)), 0.0)
        if self.observation.kind == "normal":
            loc, noise_variance, integrated = self._normal(quantities, states, context, order)
            residual = known["value"] - loc.mean

            def log_density(values: Mapping[str, Any]) -> jax.Array:
                density = normal_log_density(residual, loc.var + noise_variance(values)) + NORMAL_CONSTANT
                return jnp.where(mask, density, 0.0)

            return log_expectation(log_density, integrated) if integrated else log_density({})

        def log_prob(values: Mapping[str, Any]) -> jax.Array:
            parameters = self._parameters(values, context)
            density = self.observation.build(parameters).mask(mask).log_prob(parameters["value"])
            # All elements of one observation that share their quantities are integrated together.
            return density.sum() if all(part.mean.size == 1 for part in quantities.values()) else density

        return log_expectation(log_prob, self._integrated(quantities, states))

    def predictive(
        self, quantities: Mapping[str, Gaussian], states: States, context: Context, noise: bool
    ) -> Gaussian:
        """Mean and variance of one observation, with or without the noise of the observation itself."""
        if self.observation.kind == "categorical":
            return _class_probabilities(quantities["logits"], noise)
        if self.observation.kind == "normal":
            loc, noise_variance, integrated = self._normal(quantities, states, context, 0)
            return Gaussian(loc.mean, loc.var + expectations(noise_variance, integrated)) if noise else loc

        def two_moments(values: Mapping[str, Any]) -> tuple[jax.Array, jax.Array]:
            fn = self.observation.build(self._parameters(values, context))
            classes = isinstance(fn, dist.CategoricalProbs | dist.CategoricalLogits)
            mean, variance = (fn.probs, fn.probs * (1 - fn.probs)) if classes else (fn.mean, fn.variance)
            return mean, mean**2 + (variance if noise else 0.0)

        first, second = expectations(two_moments, self._integrated(quantities, states))
        return Gaussian(first, second - first**2)

    def _normal(
        self, quantities: Mapping[str, Gaussian], states: States, context: Context, order: int
    ) -> tuple[Gaussian, Callable[[Mapping[str, Any]], jax.Array], dict[str, Gaussian]]:
        """For a Normal observation: its Gaussian mean, its noise variance, and the Gaussians this depends on."""
        means = _means(quantities)

        def noise_variance(values: Mapping[str, Any]) -> jax.Array:
            scale = self._parameters({**means, **values}, context)["scale"]
            variance = scale * scale
            return variance if self.gamma is None else variance * states[self.gamma].variance(order)

        rest = dict(quantities)
        loc = rest.pop("loc", None)
        if loc is None:
            known = self._parameters(means, context)["loc"]
            loc = Gaussian(known, jnp.zeros_like(known))
        return loc, noise_variance, self._integrated(rest, states)

    def _integrated(self, quantities: Mapping[str, Gaussian], states: States) -> dict[str, Gaussian]:
        """The Gaussians to integrate over by quadrature."""
        return {**quantities, **{name: states[name] for name in self.noise}}

    def _parameters(self, values: Mapping[str, Any], context: Context) -> dict[str, Any]:
        """Parameters of the distribution and observed value at these quantities and noise sites; Gamma is 1."""
        hypers = dict(context["hyperparameters"])
        hypers |= {n: hyper.transform(values[n]) for n, hyper in self.noise.items() if n in values}
        if self.gamma is not None:
            hypers[self.gamma] = jnp.ones_like(hypers[self.gamma])
        given = {n: v for n, v in values.items() if n not in self.noise}
        return self.observation.cut.tail(given, {**context, "hyperparameters": hypers})

    def check(self, weights: Mapping[str, Gaussian], states: States, context: Context) -> None:
        """Refuse what cannot be integrated element by element."""
        name = self.observation.name
        if self.observation.kind == "categorical":
            return
        dimensions = len(self.observation.integrated) + len(self.noise)
        if dimensions > 2:
            why = f"whose likelihood has {dimensions} random parameters"
            raise refuse(name, why, "At most two can be integrated.")
        quantities = self.observation.quantities(weights, context)
        log_z = self.log_z(quantities, states, context)
        for parameter, quantity in quantities.items():
            if np.prod(quantity.mean.shape) > np.prod(log_z.shape):
                why = f"one observation of which uses {quantity.mean.shape} values of {parameter.split(' (')[0]}"
                instead = "Use observations of one linear predictor each, or Categorical(logits=...)."
                raise refuse(name, why, instead)


def _means(quantities: Mapping[str, Gaussian]) -> dict[str, Any]:
    return {name: quantity.mean for name, quantity in quantities.items()}


def noise_powers(
    observation: Observation, noise: tuple[str, ...], context: Context
) -> dict[str, float | None]:
    """Power with which each noise site enters the sd of a Normal observation; ``None`` if it enters otherwise."""
    if observation.kind != "normal" or "scale" in observation.cut.random or len(noise) != 1:
        return dict.fromkeys(noise)
    name = noise[0]
    hypers = context["hyperparameters"]

    @jax.jit
    def log_scale(value: jax.Array) -> jax.Array:
        given = {**context, "hyperparameters": hypers | {name: jnp.full(jnp.shape(hypers[name]), value)}}
        quantities = {n: jnp.zeros(observation.shape) for n in observation.cut.cuts}
        return jnp.log(observation.cut.tail(quantities, given)["scale"])

    found = [np.asarray(log_scale(h) - log_scale(1.0)) / np.log(h) for h in (2.0, 5.0)]
    power = float(found[0].flat[0])
    return {name: round(power, 6) if all(np.allclose(f, power) for f in found) else None}


def softmax_log_mean(logits: Gaussian, value: jax.Array) -> jax.Array:
    r"""Approximate log E[softmax(f)_k] for independent f_j ~ N(m_j, v_j).

    .. math:: E[\mathrm{softmax}(f)_k] \approx
              \Big[1 + \sum_{j \ne k} \Big(\frac{1}{E[\sigma(f_k - f_j)]} - 1\Big)\Big]^{-1}

    Exact for two classes; the pairwise expectations are integrated by quadrature.

    Reference: Daunizeau (2017), arXiv:1703.00091, section 3.
    """
    index = jnp.asarray(value, int)[..., None]
    chosen = Gaussian(*(jnp.take_along_axis(part, index, axis=-1) for part in logits))
    difference = Gaussian(chosen.mean - logits.mean, chosen.var + logits.var)
    won = log_expectation(lambda v: jax.nn.log_sigmoid(v["d"]), {"d": difference})
    lost = log_expectation(lambda v: jax.nn.log_sigmoid(-v["d"]), {"d": difference})
    other = jnp.arange(logits.mean.shape[-1]) != index
    odds = jnp.where(other, lost - won, -jnp.inf)
    zero = jnp.zeros((*odds.shape[:-1], 1))
    return -logsumexp(jnp.concatenate([zero, odds], axis=-1), axis=-1)


def _class_probabilities(logits: Gaussian, noise: bool) -> Gaussian:
    """Means and variances of the class indicators, or of the class probabilities.

    The variance of a probability is that of the logistic function of the log odds of the class against all others,
    treated as a Gaussian with the moments of their linearization.
    """
    classes = logits.mean.shape[-1]
    log_p = jnp.stack(
        [softmax_log_mean(logits, jnp.full(logits.mean.shape[:-1], k)) for k in range(classes)], axis=-1
    )
    probs = jax.nn.softmax(log_p, axis=-1)
    if noise:
        return Gaussian(probs, probs * (1 - probs))
    rest = jnp.where(jnp.eye(classes, dtype=bool), -jnp.inf, logits.mean[..., None, :])
    share = jax.nn.softmax(rest, axis=-1)
    odds = Gaussian(
        logits.mean - logsumexp(rest, axis=-1), logits.var + (share**2 * logits.var[..., None, :]).sum(-1)
    )
    first, second = expectations(lambda v: (jax.nn.sigmoid(v["o"]), jax.nn.sigmoid(v["o"]) ** 2), {"o": odds})
    return Gaussian(probs, jnp.maximum(second - first**2, 0.0))


def _safe_sqrt(var: jax.Array) -> jax.Array:
    """Square root whose gradient at 0 is 0 instead of infinite."""
    positive = var > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, var, 1.0)), 0.0)


def _at_nodes(fn: Callable, gaussians: Mapping[str, Gaussian]) -> tuple[Any, np.ndarray]:
    """``fn`` at the nodes of standard normals, and their weights."""
    if not gaussians:
        return jax.tree.map(lambda leaf: leaf[None], fn({})), np.ones(1)
    rules = [hermegauss(POINTS[len(gaussians)]) if len(gaussians) > 1 else _trapezoid() for _ in gaussians]
    grid = np.array(list(itertools.product(*(x for x, _ in rules)))).reshape(-1, len(gaussians))
    weights = np.array([np.prod(part) for part in itertools.product(*(w for _, w in rules))])

    def at(point: jax.Array) -> Any:
        pairs = zip(gaussians.items(), point, strict=True)
        return fn({n: g.mean + _safe_sqrt(g.var) * z for (n, g), z in pairs})

    return jax.vmap(at)(jnp.asarray(grid)), weights / weights.sum()


def _trapezoid() -> tuple[np.ndarray, np.ndarray]:
    z = np.linspace(-8.5, 8.5, POINTS[1])
    return z, np.exp(-0.5 * z * z)


def log_expectation(fn: Callable[[Mapping[str, Any]], Any], gaussians: Mapping[str, Gaussian]) -> jax.Array:
    """log E[exp(fn(x))], element by element, over independent Gaussians by name (at most two).

    The first is integrated on panels, a second one by Gauss-Hermite quadrature. The gradients are those of the
    density of the first at fixed x, so that a kink or step does no harm. Where two rules differ on the panels, the
    gradient is NaN, so that the update is refused, and counted.
    """
    if not gaussians:
        return fn({})
    (name, gaussian), *rest = gaussians.items()
    other, second = rest[0] if rest else ("", Gaussian(0.0, 0.0))
    shape = jax.eval_shape(fn, {n: g.mean for n, g in gaussians.items()}).shape
    mean, var = (jnp.broadcast_to(part, shape) for part in gaussian)
    var = jnp.maximum(var, SMALLEST * jnp.maximum(1.0, mean * mean))
    fixed, sd = lax.stop_gradient((mean, jnp.sqrt(var)))

    def log_density(z: jax.Array, node: Any) -> jax.Array:
        def at(z: jax.Array) -> jax.Array:
            # One Gaussian for several elements: they share the nodes of the first.
            x = jnp.ravel(fixed + sd * z)[: gaussian.mean.size].reshape(gaussian.mean.shape)
            return fn({name: x} | ({other: second.mean + _safe_sqrt(second.var) * node} if other else {}))

        found = jax.vmap(at)(z)
        return jnp.where(jnp.isnan(found), -jnp.inf, found)

    z, rules = _panels(lambda z: lax.stop_gradient(log_density(z, 0.0)) - 0.5 * z * z, shape)
    away = fixed + sd * z - mean
    prior = jnp.log(sd) - 0.5 * (away * away / var + jnp.log(var))
    nodes, weights = hermegauss(POINTS[2]) if other else (np.zeros(1), np.ones(1))
    values = jax.vmap(partial(log_density, z))(jnp.asarray(nodes)) + prior
    outer = np.log(weights / weights.sum()).reshape(-1, *(1,) * len(shape))
    found, rough = (logsumexp(logsumexp(values + rule, axis=1) + outer, axis=0) for rule in rules)
    return _trusted(found, jnp.abs(found - rough) < ALLOWED)


def _panels(
    log_integrand: Callable[[jax.Array], jax.Array], shape: tuple[int, ...]
) -> tuple[jax.Array, list]:
    """Nodes (Q, ...) and log weights, with 1 / sqrt(2 pi), of a rule and of a rougher one with the same nodes.

    Panels have one width if the integrand is as wide as the prior. Otherwise they widen in geometric progression from
    its mode, which is searched on nested grids.
    """

    def column(values: Any) -> jax.Array:
        return jnp.asarray(values).reshape(-1, *(1,) * len(shape))

    equal = jnp.broadcast_to(column(np.linspace(-8.0, 8.0, 2 * PANELS + 1)), (2 * PANELS + 1, *shape))

    def around_the_mode() -> jax.Array:
        z = column(np.sinh(np.linspace(-5.0, 5.0, 33)))
        for _ in range(1 + ZOOMS):
            values = log_integrand(jnp.broadcast_to(z, (len(z), *shape)))
            z = jnp.broadcast_to(z, values.shape)
            best = jnp.argmax(values, axis=0)[None]
            low, mode, high = (
                jnp.take_along_axis(z, jnp.clip(best + step, 0, len(z) - 1), axis=0)[0] for step in (-1, 0, 1)
            )
            z = low + (high - low) * column(np.linspace(0.0, 1.0, 11))
        smallest = high - low
        reaches = smallest * (REACH / smallest) ** column(np.linspace(0.0, 1.0, PANELS))
        return mode + jnp.concatenate([-reaches[::-1], jnp.zeros_like(reaches[:1]), reaches])

    grid = jnp.broadcast_to(column(np.linspace(-8.0, 8.0, 33)), (33, *shape))
    values = jnp.maximum(log_integrand(grid), -1e6)
    matters = (values[1:-1] > values.max(0) - 30) & (jnp.argmax(values, 0) % 32 != 0)
    bend = jnp.where(matters, jnp.abs(values[2:] - 2 * values[1:-1] + values[:-2]), 0)
    wide = (bend < BEND).all() & matters.any(0).all()
    edges = lax.cond(wide, lambda: equal, around_the_mode)
    nodes, weights = np.polynomial.legendre.leggauss(5)
    rough = np.zeros(5)
    rough[::2] = 1 / 3 / nodes[-1] ** 2, 2 - 2 / 3 / nodes[-1] ** 2, 1 / 3 / nodes[-1] ** 2
    half = (edges[1:] - edges[:-1])[:, None] / 2
    z = (edges[1:] + edges[:-1])[:, None] / 2 + half * column(nodes)
    with np.errstate(divide="ignore"):
        rules = [np.log(rule) - 0.5 * np.log(2 * np.pi) for rule in (weights, rough)]
    return z.reshape(-1, *shape), [(jnp.log(half) + column(rule)).reshape(-1, *shape) for rule in rules]


@jax.custom_jvp
def _trusted(value: jax.Array, good: jax.Array) -> jax.Array:
    """The value; its gradient is NaN where it is not good."""
    return value


@_trusted.defjvp
def _trusted_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    value, good = primals
    return value, jnp.where(good, 1.0, jnp.nan) * tangents[0]


def expectations(fn: Callable[[Mapping[str, Any]], Any], gaussians: Mapping[str, Gaussian]) -> Any:
    """E[fn(x)] for every leaf of ``fn``, element by element."""
    values, weights = _at_nodes(fn, gaussians)
    return jax.tree.map(lambda leaf: jnp.tensordot(weights, leaf, 1), values)
