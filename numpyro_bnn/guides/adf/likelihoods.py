"""Likelihoods of one data point: the normalizer Z under Gaussian predictors, predictive
moments, and the quadrature for both. A likelihood with formulas of its own is one
class; every other one is integrated numerically.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import lax
from jax.scipy.special import logsumexp
from numpyro.distributions import constraints

from numpyro_bnn import moments
from numpyro_bnn._distributions import unmasked_elements, unwrapped
from numpyro_bnn._jaxprs import dependence
from numpyro_bnn.guides.adf.moment_matching import (
    Gamma,
    Hyperparameter,
    normal_log_density,
)
from numpyro_bnn.guides.adf.observation import Cut
from numpyro_bnn.guides.adf.reading import Data, Roles, Values, refuse
from numpyro_bnn.moments import Gaussian
from numpyro_bnn.program.reading import Reading

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

Gaussians = Mapping[str, Gaussian]


class Point(NamedTuple):
    """One data point under the posterior."""

    quantities: Gaussians  # moments of the Gaussian quantities of the network
    states: Values  # of the hyperparameters
    data: tuple[Any, Any]  # its row, and the other arrays

    @property
    def means(self) -> dict[str, Any]:
        """Means of the quantities."""
        return {name: quantity.mean for name, quantity in self.quantities.items()}


@dataclass(frozen=True)
class Likelihood:
    """Any distribution whose parameters are elementwise functions of at most two random
    numbers: by quadrature.
    """

    name: str  # of the observed site
    shape: tuple[int, ...]  # of one observation
    cut: Cut  # of the program of the parameters, the observed `value`, and its `mask`
    base: dist.Distribution  # without values
    hyperparameters: Mapping[str, Hyperparameter]
    # hyperparameters of the observation that are integrated, and a noise precision
    # with the published updates
    noise: tuple[str, ...]
    gamma: str | None

    #: The distribution that has these formulas, by default every one, and the parameter
    #: that must be Gaussian for them.
    family: ClassVar[type[dist.Distribution] | None] = None
    predictor: ClassVar[str | None] = None

    @staticmethod
    def parameters_of(base: dist.Distribution, shape: tuple) -> dict[str, Any]:
        """Parameters by name; a number distinguishes two parameters of the same name
        (in an inner distribution).
        """
        parameters = {}
        for index, leaf in enumerate(jax.tree.leaves(base)):
            names = (n for n in base.arg_constraints if base.__dict__.get(n) is leaf)
            parameters[f"{next(names, 'parameter')} ({index})"] = leaf
        return parameters

    def build(self, parameters: Values) -> dist.Distribution:
        """The distribution, from its parameters by name."""
        names = self.parameters_of(self.base, self.shape)
        leaves = [parameters[name] for name in names]
        return jax.tree.unflatten(jax.tree.structure(self.base), leaves)

    @property
    def integrated(self) -> list[str]:
        """The quantities that are integrated numerically."""
        return [name for name in self.cut.quantities if name != self.predictor]

    def typical_values(self, states: Values) -> dict[str, jax.Array]:
        """Typical values of the hyperparameters."""
        hypers = self.hyperparameters.items()
        return {name: hyper.value(states[name]) for name, hyper in hypers}

    def point(self, weights: Gaussians, states: Values, data: Any) -> Point:
        """Propagate the moments of the weights to those of the quantities."""
        hypers = self.typical_values(states)
        head = moments.propagate(lambda w: self.cut.head(w, hypers, data))
        quantities = head(dict(weights))
        for name, value in quantities.items():
            if not isinstance(value, Gaussian):
                quantities[name] = Gaussian(value, jnp.zeros_like(value))
        return Point(quantities, states, data)

    def log_z(self, point: Point, order: int = 0) -> jax.Array:
        """log Z of one observation, with ``order`` added to the shape of the noise
        precision; 0 where it is masked.

        Elements that share no random number have their own log Z.
        """

        def log_prob(values: Values) -> jax.Array:
            parameters = self._parameters(values, point)
            fn = self.build(parameters).mask(parameters["mask"])
            return fn.log_prob(parameters["value"])

        return log_expectation(log_prob, self._gaussians(point))

    def predictive(self, point: Point, noise: bool) -> Gaussian:
        """Mean and variance of one observation, with or without the noise of the
        observation itself.
        """

        gaussians = self._gaussians(point)

        def moments_at(values: Values) -> tuple[jax.Array, jax.Array]:
            fn = self.build(self._parameters(values, point))
            if isinstance(fn, dist.CategoricalProbs | dist.CategoricalLogits):
                return fn.probs, fn.probs * (1 - fn.probs)
            return fn.mean, fn.variance

        first, of_noise = expectations(moments_at, gaussians)
        var = expectations(lambda v: (moments_at(v)[0] - first) ** 2, gaussians)
        return self._of_row(Gaussian(first, var + of_noise if noise else var))

    def check(self, point: Point) -> None:
        """Refuse what cannot be integrated element by element."""
        dimensions = len(self.integrated) + len(self.noise)
        if dimensions > 2:
            reason = f"whose likelihood has {dimensions} random parameters"
            refuse(self.name, reason, "At most two can be integrated.")
        for name, quantity in point.quantities.items():
            if quantity.mean.size > np.prod(self.shape):
                reason = (
                    f"one observation of which uses {quantity.mean.shape} values of "
                    f"{name.split(' (')[0]}"
                )
                instead = (
                    "Use observations of one linear predictor each, or "
                    "Categorical(logits=...)."
                )
                refuse(self.name, reason, instead)

    def _gaussians(self, point: Point) -> dict[str, Gaussian]:
        """What is integrated: quantities by parameter, noise by site."""
        gaussians = {name: point.quantities[name] for name in self.integrated}
        return gaussians | {f"site {name}": point.states[name] for name in self.noise}

    def _parameters(self, values: Values, point: Point) -> dict[str, Any]:
        """Parameters of the distribution and observed value at these quantities and
        noise sites; a Gamma is 1.
        """
        hypers = self.typical_values(point.states)
        for name in self.noise:
            if f"site {name}" in values:
                transform = self.hyperparameters[name].transform
                hypers[name] = transform(values[f"site {name}"])
        if self.gamma is not None:
            hypers[self.gamma] = jnp.ones_like(hypers[self.gamma])
        return self.cut.tail(values, hypers, point.data)

    def _of_row(self, result: Gaussian) -> Gaussian:
        """Without the axis of rows; one number may be the predictor of all."""
        shape = jnp.broadcast_shapes(result.mean.shape, self.shape, (1,))
        return jax.tree.map(lambda m: jnp.broadcast_to(m, shape)[0], result)


@dataclass(frozen=True)
class NormalLikelihood(Likelihood):
    """Normal noise around a Gaussian mean, in closed form; its scale by quadrature, or
    with the published updates of a Gamma precision.
    """

    family = dist.Normal
    predictor = "loc"

    @staticmethod
    def parameters_of(base: dist.Distribution, shape: tuple) -> dict[str, Any]:
        """Mean and scale, shaped like the observation."""
        return {
            "loc": jnp.broadcast_to(base.loc, shape),
            "scale": jnp.broadcast_to(base.scale, shape),
        }

    def log_z(self, point: Point, order: int = 0) -> jax.Array:
        parameters = self._parameters(point.means, point)
        mean, var = point.quantities["loc"]
        residual = parameters["value"] - mean

        def log_density(values: Values) -> jax.Array:
            total = var + self._noise_variance(values, point, order)
            density = normal_log_density(residual, total) + NORMAL_CONSTANT
            return jnp.where(parameters["mask"], density, 0.0)

        return log_expectation(log_density, self._gaussians(point))

    def predictive(self, point: Point, noise: bool) -> Gaussian:
        mean, var = point.quantities["loc"]
        if noise:
            variance = partial(self._noise_variance, point=point, order=0)
            var = var + expectations(variance, self._gaussians(point))
        return self._of_row(Gaussian(mean, var))

    def _noise_variance(self, values: Values, point: Point, order: int) -> jax.Array:
        scale = self._parameters({**point.means, **values}, point)["scale"]
        if self.gamma is None:
            return scale * scale
        return scale * scale * point.states[self.gamma].variance(order)


@dataclass(frozen=True)
class CategoricalLikelihood(Likelihood):
    """Classes with Gaussian logits, by a pairwise approximation."""

    family = dist.CategoricalLogits
    predictor = "logits"

    @staticmethod
    def parameters_of(base: dist.Distribution, shape: tuple) -> dict[str, Any]:
        """One logit for each class."""
        return {
            "logits": jnp.broadcast_to(base.logits, (*shape, base.logits.shape[-1]))
        }

    def log_z(self, point: Point, order: int = 0) -> jax.Array:
        parameters = self._parameters(point.means, point)
        value = jnp.where(parameters["mask"], parameters["value"], 0)
        log_mean = softmax_log_mean(point.quantities["logits"], value)
        return jnp.where(parameters["mask"], log_mean, 0.0)

    def predictive(self, point: Point, noise: bool) -> Gaussian:
        """Means and variances of the class indicators, or of the class probabilities.

        The variance of a probability is that of the logistic function of the log odds
        of the class against all others, treated as a Gaussian with the moments of their
        linearization.
        """
        logits = jax.tree.map(lambda moment: moment[0], point.quantities["logits"])
        classes = logits.mean.shape[-1]

        def log_p(k: jax.Array) -> jax.Array:
            return softmax_log_mean(logits, jnp.full(logits.mean.shape[:-1], k))

        log_probs = jax.vmap(log_p, out_axes=-1)(jnp.arange(classes))
        probs = jax.nn.softmax(log_probs, axis=-1)
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

    def check(self, point: Point) -> None:
        """All logits may be random."""


# In this order: the last one takes every distribution.
LIKELIHOODS = (NormalLikelihood, CategoricalLikelihood, Likelihood)


def read_likelihood(
    data: Data,
    reading: Reading,
    roles: Roles,
    hyperparameters: Mapping[str, Hyperparameter] | None = None,
    with_value: bool = True,
) -> Likelihood:
    """Read the likelihood of one data point.

    :param reading: the model of one row.
    :param hyperparameters: as they were read before; otherwise from the roles.
    :param with_value: whether the observed value is among the arguments.
    """
    name, site = roles.observed, reading.sites[roles.observed]
    base, shape = unwrapped(site["fn"], masked=True), site["fn"].shape()
    _check_observed(name, site, base, with_value)
    values = roles.random_values()
    weights = {weight: values.pop(weight) for weight in roles.weights}
    for kind in LIKELIHOODS:
        if kind.family is not None and type(base) is not kind.family:
            continue

        def program(weights: Any, hypers: Any, row: Any, kind: Any = kind) -> Values:
            sites = reading.on(*data.row_call(*row)).at(
                {**weights, **hypers}, only=[name]
            )
            fn, value = sites[name]["fn"], sites[name]["value"]
            parameters = kind.parameters_of(unwrapped(fn, masked=True), shape)
            if with_value:
                mask = jnp.broadcast_to(unmasked_elements(fn), shape)
                parameters |= {"value": value, "mask": mask}
            return parameters

        cut = Cut(program, weights, values, data.first, kind.predictor)
        if kind.predictor is None or cut.is_direct(kind.predictor):
            break
    _check_cut(cut, base, roles, (weights, values, data.first))
    if hyperparameters is None:
        is_noise = kind is NormalLikelihood and len(roles.noise) == 1
        power = None if "scale" in cut.sources or not is_noise else roles.noise_power
        hyperparameters = {}
        for hyper, fn in roles.hyperparameters.items():
            powers: set[Any] = {
                w.power for w in roles.weights.values() if w.hyper == hyper
            }
            if hyper in roles.noise:
                powers.add(power)
            hyperparameters[hyper] = Hyperparameter.of(hyper, fn, powers)
    noise, gamma = [], None
    for hyper in roles.noise:
        if isinstance(hyperparameters[hyper].prior, Gamma):
            gamma = hyper
        else:
            noise.append(hyper)
    return kind(name, shape, cut, base, hyperparameters, tuple(noise), gamma)


def _check_observed(
    name: str, site: Values, base: dist.Distribution, with_value: bool
) -> None:
    if base.event_dim:
        reason = (
            f"a {type(base).__name__}, whose elements are not independent given the "
            f"network"
        )
        refuse(name, reason, "Use independent observations, or MCMC.")
    if not with_value:
        return
    if not site["is_observed"]:
        instead = "Pass the targets among the arguments, e.g. `y`."
        refuse(name, "that has no value", instead)
    shape = np.broadcast_shapes(site["fn"].shape(), np.shape(site["value"]))
    if shape[:1] != (1,):
        instead = "Pass data, targets and masks as arguments of the model."
        refuse(name, f"of shape {shape} for one row of the data", instead)


def _check_cut(cut: Cut, base: dist.Distribution, roles: Roles, example: Any) -> None:
    """Refuse predictors that depend on hyperparameters, and bounded parameters that
    would be treated as Gaussian.
    """
    weights, hypers, row = example
    entering = dependence(lambda hypers: cut.head(weights, hypers, row), hypers)
    for name in set().union(*entering.values()):  # they would not be learned
        prior = type(unwrapped(roles.hyperparameters[name])).__name__
        instead = (
            "Scale weights in their prior, `Normal(0, tau)`; give other sites a prior "
            "on the real line."
        )
        refuse(name, f"a {prior} from which the predictor is computed", instead)
    for name in cut.sources:
        argument = name.split(" (")[0]
        is_real = base.arg_constraints.get(argument) is constraints.real
        if argument == "logits" or is_real or not cut.is_linear(name):
            continue
        reason = (
            f"whose {argument} is not an elementwise function of a linear predictor"
        )
        instead = (
            "Write e.g. `Poisson(jnp.exp(f))` or `Categorical(logits=f)` with f "
            "straight from the network."
        )
        refuse(roles.observed, reason, instead)


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


def _grid(points: int, reach: float) -> tuple[np.ndarray, float]:
    """Points of the trapezoidal rule for a standard normal, and their distance."""
    return np.linspace(-reach, reach, points, retstep=True)


def log_expectation(fn: Callable[[Values], Any], gaussians: Gaussians) -> jax.Array:
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

    def integral(nodes: Values, names: list[str], values: Values) -> jax.Array:
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
    like = jax.ShapeDtypeStruct(shape, value.dtype)
    spread = partial(jnp.broadcast_to, shape=value.shape)
    return jax.linear_transpose(spread, like)(value)[0]


@jax.custom_jvp
def _trusted(value: jax.Array, good: jax.Array) -> jax.Array:
    """The value; its gradient is NaN where it is not good."""
    return value


@_trusted.defjvp
def _trusted_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    value, good = primals
    return value, jnp.where(good, 1.0, jnp.nan) * tangents[0]


def expectations(fn: Callable[[Values], Any], gaussians: Gaussians) -> Any:
    """E[fn(x)] for every leaf of ``fn``, element by element."""
    z, _ = _grid(257 if len(gaussians) == 1 else 33, 8.0)
    grid = np.array(list(itertools.product(z, repeat=len(gaussians))))
    weights = np.exp(-0.5 * (grid**2).sum(axis=-1))

    def at(node: jax.Array) -> Any:
        values = {}
        for z, (name, (mean, var)) in zip(node, gaussians.items(), strict=True):
            values[name] = mean + jnp.sqrt(jnp.maximum(var, SMALLEST)) * z
        return fn(values)

    by_node = jax.vmap(at)(jnp.asarray(grid))
    weights /= weights.sum()
    return jax.tree.map(lambda leaf: jnp.tensordot(weights, leaf, 1), by_node)
