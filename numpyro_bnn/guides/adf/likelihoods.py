"""The normalizer Z of a likelihood under Gaussian predictors, predictive moments, and
the quadrature for both.
"""

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

from numpyro_bnn.guides.adf.moment_matching import Hyperparameter, normal_log_density
from numpyro_bnn.guides.adf.observation import ADFObservation, Context
from numpyro_bnn.guides.adf.reading import refuse
from numpyro_bnn.moments import Gaussian
from numpyro_bnn.program.compiled import shared

# The constant that `normal_log_density` leaves out.
NORMAL_CONSTANT = -0.5 * np.log(2 * np.pi)
# Grids as wide as a prior: points, and reach in prior sd, for the first Gaussian and
# for others.
FIRST, OTHERS = (65, 8.0), (25, 7.2)
# Grid around a mode: nested grids to find it, points on each side, reach in prior sd,
# and the smallest t.
ZOOMS, SIDE, REACH, START = 7, 49, 12.0, -2.3
# Largest distance of a mode, in prior sd: data that are further away contradict the
# model.
FARTHEST = 50.0
# Smallest variance, relative to the square of the mean.
SMALLEST = 1e-20
# Largest difference of log Z by a grid and by half of it, on the grid as wide as the
# prior, and around the mode.
WIDE, ALLOWED = 1e-6, 0.05

States = Mapping[str, Any]


@dataclass(frozen=True)
class Likelihood:
    """An observation together with the posterior of its noise sites."""

    observation: ADFObservation
    noise: Mapping[str, Hyperparameter]  # Gaussian in unconstrained space
    gamma: str | None  # the noise precision with a Gamma posterior, if there is one

    def log_z(
        self,
        quantities: Mapping[str, Gaussian],
        states: States,
        context: Context,
        order: int = 0,
    ) -> jax.Array:
        """log Z of one observation, with ``order`` added to the shape of the noise
        precision; 0 where it is masked.

        Elements that share no random number have their own log Z. A Normal likelihood
        is integrated over its mean in closed form, everything else by quadrature.
        """
        mean_parameters = self._parameters(_means(quantities), context)
        mask = mean_parameters["mask"]
        if self.observation.kind == "categorical":
            logits = quantities["logits"]
            return jnp.where(
                mask,
                softmax_log_mean(logits, jnp.where(mask, mean_parameters["value"], 0)),
                0.0,
            )
        if self.observation.kind == "normal":
            loc, noise_variance, integrated = self._normal(
                quantities, states, context, order
            )
            residual = mean_parameters["value"] - loc.mean

            def log_density(values: Mapping[str, Any]) -> jax.Array:
                density = (
                    normal_log_density(residual, loc.var + noise_variance(values))
                    + NORMAL_CONSTANT
                )
                return jnp.where(mask, density, 0.0)

            return log_expectation(log_density, integrated)

        def log_prob(values: Mapping[str, Any]) -> jax.Array:
            parameters = self._parameters(values, context)
            fn = self.observation.build(parameters).mask(mask)
            return fn.log_prob(parameters["value"])

        return log_expectation(log_prob, self._integrated(quantities, states))

    def predictive(
        self,
        quantities: Mapping[str, Gaussian],
        states: States,
        context: Context,
        noise: bool,
    ) -> Gaussian:
        """Mean and variance of one observation, with or without the noise of the
        observation itself.
        """
        if self.observation.kind == "categorical":
            return _class_probabilities(quantities["logits"], noise)
        if self.observation.kind == "normal":
            loc, noise_variance, integrated = self._normal(
                quantities, states, context, 0
            )
            if not noise:
                return loc
            return Gaussian(
                loc.mean, loc.var + expectations(noise_variance, integrated)
            )

        def two_moments(values: Mapping[str, Any]) -> tuple[jax.Array, jax.Array]:
            fn = self.observation.build(self._parameters(values, context))
            if isinstance(fn, dist.CategoricalProbs | dist.CategoricalLogits):
                mean, variance = fn.probs, fn.probs * (1 - fn.probs)
            else:
                mean, variance = fn.mean, fn.variance
            return mean, mean**2 + (variance if noise else 0.0)

        first, second = expectations(two_moments, self._integrated(quantities, states))
        return Gaussian(first, second - first**2)

    def _normal(
        self,
        quantities: Mapping[str, Gaussian],
        states: States,
        context: Context,
        order: int,
    ) -> tuple[Gaussian, Callable[[Mapping[str, Any]], jax.Array], dict[str, Gaussian]]:
        """For a Normal observation: its Gaussian mean, its noise variance, and the
        Gaussians this depends on.
        """
        means = _means(quantities)

        def noise_variance(values: Mapping[str, Any]) -> jax.Array:
            scale = self._parameters({**means, **values}, context)["scale"]
            variance = scale * scale
            if self.gamma is not None:
                variance = variance * states[self.gamma].variance(order)
            return variance

        scale_quantities = dict(quantities)
        loc = scale_quantities.pop("loc", None)
        if loc is None:
            fixed_loc = self._parameters(means, context)["loc"]
            loc = Gaussian(fixed_loc, jnp.zeros_like(fixed_loc))
        return loc, noise_variance, self._integrated(scale_quantities, states)

    def _integrated(
        self, quantities: Mapping[str, Gaussian], states: States
    ) -> dict[str, Gaussian]:
        return {**quantities, **{name: states[name] for name in self.noise}}

    def _parameters(
        self, values: Mapping[str, Any], context: Context
    ) -> dict[str, Any]:
        """Parameters of the distribution and observed value at these quantities and
        noise sites; Gamma is 1.
        """
        hypers = dict(context["hyperparameters"])
        for name, hyper in self.noise.items():
            if name in values:
                hypers[name] = hyper.transform(values[name])
        if self.gamma is not None:
            hypers[self.gamma] = jnp.ones_like(hypers[self.gamma])
        quantities = {n: v for n, v in values.items() if n not in self.noise}
        return self.observation.cut.tail(
            quantities, {**context, "hyperparameters": hypers}
        )

    def check(self, weights: Mapping[str, Gaussian], context: Context) -> None:
        """Refuse what cannot be integrated element by element."""
        name = self.observation.name
        if self.observation.kind == "categorical":
            return
        dimensions = len(self.observation.integrated) + len(self.noise)
        if dimensions > 2:
            reason = f"whose likelihood has {dimensions} random parameters"
            raise refuse(name, reason, "At most two can be integrated.")
        for parameter, quantity in self.observation.quantities(
            weights, context
        ).items():
            if quantity.mean.size > np.prod(self.observation.shape):
                reason = (
                    f"one observation of which uses {quantity.mean.shape} values of "
                    f"{parameter.split(' (')[0]}"
                )
                instead = (
                    "Use observations of one linear predictor each, or "
                    "Categorical(logits=...)."
                )
                raise refuse(name, reason, instead)


def _means(quantities: Mapping[str, Gaussian]) -> dict[str, Any]:
    return {name: quantity.mean for name, quantity in quantities.items()}


def noise_powers(
    observation: ADFObservation, noise: tuple[str, ...], context: Context
) -> dict[str, float | None]:
    """Power with which each noise site enters the sd of a Normal observation; ``None``
    if it enters otherwise.
    """
    if (
        observation.kind != "normal"
        or "scale" in observation.cut.random
        or len(noise) != 1
    ):
        return dict.fromkeys(noise)
    name = noise[0]
    hypers = context["hyperparameters"]

    @partial(shared, once=True)
    def log_scales(values: jax.Array) -> jax.Array:
        def log_scale(value: jax.Array) -> jax.Array:
            noise_site = {name: jnp.full(jnp.shape(hypers[name]), value)}
            quantities = dict.fromkeys(
                observation.cut.cuts, jnp.zeros(observation.shape)
            )
            outputs = observation.cut.tail(
                quantities, context | {"hyperparameters": hypers | noise_site}
            )
            return jnp.log(outputs["scale"])

        return jax.vmap(log_scale)(values)

    at_1, at_2, at_5 = np.asarray(log_scales(np.array([1.0, 2.0, 5.0])))
    powers = (at_2 - at_1) / np.log(2.0), (at_5 - at_1) / np.log(5.0)
    power = float(powers[0].flat[0])
    return {name: round(power, 6) if np.allclose(powers, power) else None}


def softmax_log_mean(logits: Gaussian, value: jax.Array) -> jax.Array:
    r"""Approximate log E[softmax(f)_k] for independent f_j ~ N(m_j, v_j).

    .. math:: E[\mathrm{softmax}(f)_k] \approx
              \Big[1 + \sum_{j \ne k}
              \Big(\frac{1}{E[\sigma(f_k - f_j)]} - 1\Big)\Big]^{-1}

    Exact for two classes; the pairwise expectations are integrated by quadrature.

    Reference: Daunizeau (2017), arXiv:1703.00091, section 3.
    """
    index = jnp.asarray(value, int)[..., None]
    observed = jax.tree.map(
        lambda moment: jnp.take_along_axis(moment, index, axis=-1), logits
    )
    difference = Gaussian(observed.mean - logits.mean, observed.var + logits.var)
    won = log_expectation(lambda v: jax.nn.log_sigmoid(v["d"]), {"d": difference})
    # The sum above is that of 1 / E over the K - 1 other classes, less K - 2.
    classes = logits.mean.shape[-1]
    is_other = (jnp.arange(classes) != index).astype(float)
    ones = jnp.ones((*won.shape[:-1], 1))
    terms = jnp.concatenate((0 * ones, -won), axis=-1)
    signs = jnp.concatenate(((2 - classes) * ones, is_other), axis=-1)
    return -logsumexp(terms, axis=-1, b=signs)


def _class_probabilities(logits: Gaussian, noise: bool) -> Gaussian:
    """Means and variances of the class indicators, or of the class probabilities.

    The variance of a probability is that of the logistic function of the log odds of
    the class against all others, treated as a Gaussian with the moments of their
    linearization.
    """
    classes = logits.mean.shape[-1]
    log_p = jnp.stack(
        [
            softmax_log_mean(logits, jnp.full(logits.mean.shape[:-1], k))
            for k in range(classes)
        ],
        axis=-1,
    )
    probs = jax.nn.softmax(log_p, axis=-1)
    if noise:
        return Gaussian(probs, probs * (1 - probs))
    other_logits = jnp.where(
        jnp.eye(classes, dtype=bool), -jnp.inf, logits.mean[..., None, :]
    )
    share = jax.nn.softmax(other_logits, axis=-1)
    odds = Gaussian(
        logits.mean - logsumexp(other_logits, axis=-1),
        logits.var + (share**2 * logits.var[..., None, :]).sum(-1),
    )
    first, second = expectations(
        lambda v: (jax.nn.sigmoid(v["o"]), jax.nn.sigmoid(v["o"]) ** 2), {"o": odds}
    )
    return Gaussian(probs, jnp.maximum(second - first**2, 0.0))


def _grid(points: int, reach: float) -> tuple[np.ndarray, float]:
    """Points of the trapezoidal rule for a standard normal, and their distance."""
    return np.linspace(-reach, reach, points, retstep=True)


def log_expectation(
    fn: Callable[[Mapping[str, Any]], Any], gaussians: Mapping[str, Gaussian]
) -> jax.Array:
    """log E[exp(fn(x))] over independent Gaussians by name.

    Elements of ``fn`` that share an element of a Gaussian are summed, and integrated
    over it together: the result has the shape of the smallest Gaussian. The first
    Gaussian is integrated on a grid as wide as the prior if that and half of it agree,
    otherwise on a grid around the mode, the others always on a grid as wide as the
    prior.

    Gradients are those of the Gaussian densities at fixed points, so that a kink or
    step does no harm. They are NaN where a grid and half of it disagree, or where the
    mode is far outside of the prior: the update is then refused.
    """
    if not gaussians:
        return fn({})
    name, first = next(iter(gaussians.items()))
    z, step = _grid(*OTHERS)
    points = {
        n: _points(g, _column(z, g), np.log(step))
        for n, g in gaussians.items()
        if n != name
    }
    # The smallest Gaussian is the outermost integral.
    order = sorted(gaussians, key=lambda n: gaussians[n].mean.size)

    def integral(
        nodes: Mapping[str, Any], names: list[str], values: Mapping[str, Any]
    ) -> jax.Array:
        if not names:
            log_value = fn(values)
            return jnp.where(jnp.isnan(log_value), -jnp.inf, log_value)
        outer, *inner = names

        def at(x: jax.Array) -> jax.Array:
            return sum_to(integral(nodes, inner, {**values, outer: x}), x.shape)

        x, log_weights = nodes[outer]
        return logsumexp(jax.vmap(at)(x) + log_weights, axis=0)

    def both(z: jax.Array, spacing: Any) -> jax.Array:
        x, log_weights = _points(first, z, spacing)
        half = jnp.where(
            _column(np.arange(len(z)) % 2, first) == 0, np.log(2.0), -jnp.inf
        )
        rules = jnp.stack([log_weights, log_weights + half])
        return jax.vmap(lambda rule: integral({**points, name: (x, rule)}, order, {}))(
            rules
        )

    def log_integrand(z: jax.Array) -> jax.Array:
        x, log_weights = _points(first, z, 0.0)
        means = {n: g.mean for n, g in gaussians.items() if n != name}
        return (
            jax.vmap(lambda x: sum_to(integral({}, [], {**means, name: x}), x.shape))(x)
            + log_weights
        )

    z, step = _grid(*FIRST)
    wide = both(_column(z, first), np.log(step))
    enough = (jnp.abs(wide[0] - wide[1]) < WIDE).all()

    def narrow() -> jax.Array:
        z, spacing = _around_the_mode(log_integrand, first)
        by_all, by_half = both(z, spacing)
        num_far = sum_to(
            (jnp.abs(z[SIDE - 1] + z[SIDE]) > 2 * FARTHEST).astype(z.dtype),
            by_half.shape,
        )
        return jnp.stack([by_all, jnp.where(num_far > 0, jnp.inf, by_half)])

    log_mean, half = lax.cond(enough, lambda: wide, narrow)
    return _trusted(log_mean, jnp.abs(log_mean - half) < ALLOWED)


def _column(values: np.ndarray, like: Gaussian) -> jax.Array:
    """The same values for every element: (Q, ...)."""
    return jnp.broadcast_to(
        values.reshape(-1, *(1,) * like.mean.ndim), (len(values), *like.mean.shape)
    )


def _points(
    gaussian: Gaussian, z: jax.Array, spacing: Any
) -> tuple[jax.Array, jax.Array]:
    """Fixed points, ``z`` sd from the mean, and their log weights, which carry the
    gradients.

    :param spacing: logarithm of the distance of points.
    """
    mean = gaussian.mean
    var = jnp.maximum(gaussian.var, SMALLEST * jnp.maximum(1.0, mean * mean))
    fixed, sd = lax.stop_gradient((mean, jnp.sqrt(var)))
    density = normal_log_density(sd * z + (fixed - mean), var) + NORMAL_CONSTANT
    return fixed + sd * z, density + jnp.log(sd) + spacing


def _around_the_mode(
    log_integrand: Callable[[jax.Array], jax.Array], like: Gaussian
) -> tuple[jax.Array, jax.Array]:
    """Points and the logarithms of their distances, which grow with the distance from
    the mode on both sides.

    The mode is searched on nested grids. With a = width exp(t - exp(-t)), for
    equidistant t, a kink at the mode does no harm, and integrands of any width between
    that of the last grid and that of the prior are resolved.
    """

    def zoom(_: Any, grid: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        z, _, width = grid
        values = lax.stop_gradient(log_integrand(z))
        best = jnp.argmax(values, axis=0)[None]

        def beside_best(array: jax.Array, step: int) -> jax.Array:
            place = jnp.clip(best + step, 0, len(z) - 1)
            return jnp.take_along_axis(array, place, axis=0)[0]

        low, high = beside_best(z, -1), beside_best(z, 1)
        ends = jnp.minimum(beside_best(values, -1), beside_best(values, 1))
        width = jnp.where(beside_best(values, 0) - ends > 1, high - low, width)
        finer = low + (high - low) * _column(np.linspace(0.0, 1.0, 17), like)
        return finer, beside_best(z, 0), width

    z = _column(np.sinh(np.linspace(-7.0, 7.0, 41)), like)
    first = zoom(0, (z, z[0], jnp.full_like(z[0], REACH)))
    _, mode, width = lax.fori_loop(1, ZOOMS, zoom, first)
    step = (jnp.log(REACH / width) - START) / (SIDE - 1)
    t = START + step * _column(np.arange(SIDE), like)
    away = width * jnp.exp(t - jnp.exp(-t))
    spacing = jnp.log(away * (1 + jnp.exp(-t)) * step)
    points = jnp.concatenate([mode - away[::-1], mode + away])
    return points, jnp.concatenate([spacing[::-1], spacing])


def sum_to(value: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Sum over the elements for which ``shape`` was broadcast."""
    if value.size == np.prod(shape):
        return value.reshape(shape)
    if np.prod(shape) == 1:
        return value.sum().reshape(shape)
    value = value.sum(axis=tuple(range(value.ndim - len(shape))))
    axes = tuple(k for k, size in enumerate(shape) if size == 1 and value.shape[k] != 1)
    return value.sum(axis=axes, keepdims=True)


@jax.custom_jvp
def _trusted(value: jax.Array, good: jax.Array) -> jax.Array:
    """The value; its gradient is NaN where it is not good."""
    return value


@_trusted.defjvp
def _trusted_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    value, good = primals
    return value, jnp.where(good, 1.0, jnp.nan) * tangents[0]


def expectations(
    fn: Callable[[Mapping[str, Any]], Any], gaussians: Mapping[str, Gaussian]
) -> Any:
    """E[fn(x)] for every leaf of ``fn``, element by element."""
    z, _ = _grid(257 if len(gaussians) == 1 else 33, 8.0)
    weights = np.exp(-0.5 * z * z) / np.exp(-0.5 * z * z).sum()

    def integral(names: list[str], values: Mapping[str, Any]) -> Any:
        if not names:
            return fn(values)
        name, *remaining = names
        mean, var = gaussians[name]
        by_node = jax.vmap(
            lambda z: integral(
                remaining,
                {**values, name: mean + jnp.sqrt(jnp.maximum(var, SMALLEST)) * z},
            )
        )(jnp.asarray(z))
        return jax.tree.map(lambda leaf: jnp.tensordot(weights, leaf, 1), by_node)

    return integral(list(gaussians), {})
