"""Likelihoods of one data point: the normalizer Z under Gaussian predictors, and
predictive moments. A likelihood with formulas of its own is one class; every other one
is integrated numerically.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from jax.scipy.special import logsumexp
from numpyro.distributions import constraints

from numpyro_bnn import moments
from numpyro_bnn._distributions import unmasked_elements, unwrapped
from numpyro_bnn._jaxprs.slices import dependence
from numpyro_bnn._types import PyTree, Shape, Trees
from numpyro_bnn.guides.adf.moment_matching import (
    NORMAL_CONSTANT,
    ADFState,
    Gamma,
    Hyperparameter,
    normal_log_density,
)
from numpyro_bnn.guides.adf.observation import Cut
from numpyro_bnn.guides.adf.quadrature import expectations, log_expectation
from numpyro_bnn.guides.adf.reading import Data, Roles, Values, refuse
from numpyro_bnn.moments import Gaussian
from numpyro_bnn.program.posterior import Posterior

Gaussians = Mapping[str, Gaussian]


class Point(NamedTuple):
    """One data point under the posterior."""

    quantities: Gaussians  # moments of the Gaussian quantities of the network
    states: Values  # of the hyperparameters
    data: tuple[Trees, Trees]  # its row, and the other arrays

    @property
    def means(self) -> Trees:
        """Means of the quantities."""
        return {name: quantity.mean for name, quantity in self.quantities.items()}


@dataclass(frozen=True)
class Likelihood:
    """A model read for assumed density filtering: the likelihood of one data point.

    This one is for any distribution whose parameters are elementwise functions of at
    most two random numbers, and goes by quadrature.
    """

    roles: Roles
    hyperparameters: Mapping[str, Hyperparameter]
    base: dist.Distribution  # without values
    shape: Shape  # of one observation
    cut: Cut  # of the program of the parameters, the observed `value`, and its `mask`

    #: The distribution that has these formulas, by default every one, and the parameter
    #: that must be Gaussian for them.
    family: ClassVar[type[dist.Distribution] | None] = None
    predictor: ClassVar[str | None] = None

    @staticmethod
    def parameters_of(base: dist.Distribution, shape: tuple) -> Trees:
        """Parameters by name; a number distinguishes two parameters of the same name
        (in an inner distribution).
        """
        names: dict[int, str] = {}
        for fn in _inner(base):
            names |= {id(fn.__dict__.get(name)): name for name in fn.arg_constraints}
        parameters = {}
        for index, leaf in enumerate(jax.tree.leaves(base)):
            parameters[f"{names.get(id(leaf), 'parameter')} ({index})"] = leaf
        return parameters

    def build(self, parameters: Values) -> dist.Distribution:
        """The distribution, from its parameters by name."""
        names = self.parameters_of(self.base, self.shape)
        leaves = [parameters[name] for name in names]
        return jax.tree.unflatten(jax.tree.structure(self.base), leaves)

    @property
    def gamma(self) -> str | None:
        """The noise precision with the published updates, if there is one."""
        for name in self.roles.noise:
            if isinstance(self.hyperparameters[name].prior, Gamma):
                return name
        return None

    @property
    def noise(self) -> list[str]:
        """The hyperparameters of the observation that are integrated numerically."""
        return [name for name in self.roles.noise if name != self.gamma]

    @property
    def integrated(self) -> list[str]:
        """The quantities that are integrated numerically."""
        return [name for name in self.cut.quantities if name != self.predictor]

    def typical_values(self, states: Values) -> dict[str, Array]:
        """Typical values of the hyperparameters."""
        hypers = self.hyperparameters.items()
        return {name: hyper.value(states[name]) for name, hyper in hypers}

    def on(self, data: Data, with_value: bool) -> "Likelihood":
        """The likelihood of other data, with the same roles.

        :param with_value: whether targets are among the arguments.
        """
        of_row, hypers = data.read_row(), self.hyperparameters
        return read_likelihood(data, of_row, self.roles, hypers, with_value)

    def point(self, state: ADFState, data: tuple[Trees, Trees]) -> Point:
        """Propagate the moments of the weights to those of the quantities.

        :param data: a row, and the other arrays.
        """
        hypers = self.typical_values(state.hyperparameters)
        head = moments.propagate(lambda w: self.cut.head(w, hypers, data))
        quantities = head(state.weights)
        for name, value in quantities.items():
            if not isinstance(value, Gaussian):
                quantities[name] = Gaussian(value, jnp.zeros_like(value))
        return Point(quantities, state.hyperparameters, data)

    def observed(self, data: tuple[Trees, Trees]) -> tuple[Array, Array]:
        """Value and mask of one observation."""
        states = {name: hyper.prior for name, hyper in self.hyperparameters.items()}
        zeros = {}
        for name, quantity in self.cut.quantities.items():
            zeros[name] = jnp.zeros(quantity.aval.shape, quantity.aval.dtype)
        parameters = self._parameters(zeros, Point({}, states, data))
        return parameters["value"], parameters["mask"]

    def inputs(self, data: tuple[Trees, Trees]) -> set[str]:
        """The arrays of a row from which the quantities are computed, and not what is
        observed.
        """
        values, (row, arrays) = self.roles.random_values(), data
        weights = {name: values.pop(name) for name in self.roles.weights}

        def parts(row: Trees) -> Trees:
            quantities = self.cut.head(weights, values, (row, arrays))
            return {**quantities, "": self.observed((row, arrays))[0]}

        used = dependence(parts, row)
        of_value = used.pop("")
        return set().union(*used.values()) - of_value

    def log_z(self, point: Point, order: int = 0) -> Array:
        """log Z of one observation, with ``order`` added to the shape of the noise
        precision; 0 where it is masked.

        Elements that share no random number have their own log Z.
        """

        def log_prob(values: Values) -> Array:
            parameters = self._parameters(values, point)
            fn = self.build(parameters).mask(parameters["mask"])
            return fn.log_prob(parameters["value"])

        return log_expectation(log_prob, self._gaussians(point))

    def predictive(self, point: Point, noise: bool) -> Gaussian:
        """Mean and variance of one observation, with or without the noise of the
        observation itself.
        """

        gaussians = self._gaussians(point)

        def moments_at(values: Values) -> tuple[Array, Array]:
            fn = self.build(self._parameters(values, point))
            if isinstance(fn, dist.CategoricalProbs | dist.CategoricalLogits):
                return fn.probs, fn.probs * (1 - fn.probs)
            try:
                return fn.mean, fn.variance
            except NotImplementedError:  # of NumPyro, for example where values are cut
                reason = f"a {type(fn).__name__}, which has no formula for its moments"
                instead = "Use `log_predictive_density`, or draws by `Predictive`."
                refuse(self.roles.observed, reason, instead)

        first, of_noise = expectations(moments_at, gaussians)
        var = expectations(lambda v: (moments_at(v)[0] - first) ** 2, gaussians)
        return self._of_row(Gaussian(first, var + of_noise if noise else var))

    def check(self, point: Point) -> None:
        """Refuse what cannot be integrated element by element."""
        dimensions = len(self.integrated) + len(self.noise)
        if dimensions > 2:
            reason = f"whose likelihood has {dimensions} random parameters"
            refuse(self.roles.observed, reason, "At most two can be integrated.")
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
                refuse(self.roles.observed, reason, instead)

    def _gaussians(self, point: Point) -> dict[str, Gaussian]:
        """What is integrated: quantities by parameter, noise by site."""
        gaussians = {name: point.quantities[name] for name in self.integrated}
        return gaussians | {f"site {name}": point.states[name] for name in self.noise}

    def _parameters(self, values: Values, point: Point) -> Trees:
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
    def parameters_of(base: dist.Distribution, shape: tuple) -> Trees:
        """Mean and scale, shaped like the observation."""
        return {
            "loc": jnp.broadcast_to(base.loc, shape),
            "scale": jnp.broadcast_to(base.scale, shape),
        }

    def log_z(self, point: Point, order: int = 0) -> Array:
        parameters = self._parameters(point.means, point)
        mean, var = point.quantities["loc"]
        residual = parameters["value"] - mean

        def log_density(values: Values) -> Array:
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

    def _noise_variance(self, values: Values, point: Point, order: int) -> Array:
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
    def parameters_of(base: dist.Distribution, shape: tuple) -> Trees:
        """One logit for each class."""
        return {
            "logits": jnp.broadcast_to(base.logits, (*shape, base.logits.shape[-1]))
        }

    def log_z(self, point: Point, order: int = 0) -> Array:
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

        def log_p(k: Array) -> Array:
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
    reading: Posterior,
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

        def program(
            weights: PyTree, hypers: PyTree, row: PyTree, kind: Any = kind
        ) -> Values:
            sites = reading.with_arguments(*data.row_call(*row)).at(
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
            powers: set[Any] = {power} if hyper in roles.noise else set()
            powers |= {w.power for w in roles.weights.values() if w.hyper == hyper}
            hyperparameters[hyper] = Hyperparameter.of(hyper, fn, powers)
    return kind(roles, hyperparameters, base, shape, cut)


def _inner(fn: dist.Distribution | None) -> Iterator[dist.Distribution]:
    """A distribution, and those of which it is made."""
    while fn is not None:
        yield fn
        fn = getattr(fn, "base_dist", None)


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


def _check_cut(
    cut: Cut, base: dist.Distribution, roles: Roles, example: PyTree
) -> None:
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
        by_distribution = [fn.arg_constraints.get(argument) for fn in _inner(base)]
        is_real = constraints.real in by_distribution
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


def softmax_log_mean(logits: Gaussian, value: Array) -> Array:
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
