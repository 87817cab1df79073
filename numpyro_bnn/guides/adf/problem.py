"""Everything that learning needs of a model, and one pass over data."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from numpyro_bnn.guides.adf.likelihoods import Likelihood, noise_powers
from numpyro_bnn.guides.adf.observation import Context, check_rows, observe
from numpyro_bnn.guides.adf.others import Other, describe_others, values_of
from numpyro_bnn.guides.adf.refinement import Factor, refine_gamma, refine_normal
from numpyro_bnn.guides.adf.rows import Arguments
from numpyro_bnn.guides.adf.schedule import make_once
from numpyro_bnn.guides.adf.sites import Sites, find_sites
from numpyro_bnn.guides.adf.updates import Gamma, gamma_update, gaussian_update
from numpyro_bnn.moments import Gaussian

__all__ = ["ADFState", "Pass", "Problem"]


# Refused updates are counted on about this many weights of each site.
SAMPLE = 100


class ADFState(NamedTuple):
    """Posterior approximation while it is learned, in float64.

    :param weights: means and variances by site.
    :param others: of the sites that are no weights, :class:`Gamma` or :class:`Gaussian` in unconstrained space.
    :param factors: approximate prior factor of each weight that has a hyper-site.
    """

    weights: dict[str, Gaussian]
    others: dict[str, Any]
    factors: dict[str, Factor]


class Pass(NamedTuple):
    """Records of one pass over the data.

    :param log_z: sum of the log normalizers.
    :param refused: share of the updates of single weights that were refused, counted on a sample of the weights.
    """

    log_z: jax.Array
    refused: jax.Array


@dataclass(frozen=True)
class Problem:
    """A model read for assumed density filtering.

    :param sites: roles of its sites.
    :param others: representation of those that are no weights.
    :param likelihood: of one data point.
    """

    sites: Sites
    others: Mapping[str, Other]
    likelihood: Likelihood

    @classmethod
    def of(cls, arguments: Arguments, known: "Problem | None" = None, with_value: bool = True) -> "Problem":
        """Read the model from one row of its arguments; roles of sites are taken from a ``known`` problem."""
        rows = {name: leaf[0] for name, leaf in arguments.part("row").items()}
        arrays = arguments.part("array")
        sites = find_sites(arguments.model, *arguments.row(rows, arrays)) if known is None else known.sites
        ones = {name: np.ones(fn.shape()) for name, fn in sites.others.items()}
        context = {"rows": rows, "arrays": arrays, "others": ones}
        observation = observe(arguments.model, arguments, sites, context, with_value)
        if known is not None:
            return cls(sites, known.others, replace(known.likelihood, observation=observation))
        others = describe_others(sites, noise_powers(observation, sites.noise, context))
        gammas = [name for name in sites.noise if others[name].kind == "gamma"]
        normals = {name: others[name] for name in sites.noise if others[name].kind == "normal"}
        problem = cls(sites, others, Likelihood(observation, normals, next(iter(gammas), None)))
        check_rows(arguments.model, arguments, sites, ones)
        jax.eval_shape(lambda: problem.check(rows, arrays))
        return problem

    def check(self, rows: Any, arrays: Any) -> None:
        """Refuse a likelihood that cannot be integrated."""
        state = self.start({name: weight.loc for name, weight in self.sites.weights.items()})
        self.likelihood.check(state.weights, state.others, self.context(state, rows, arrays))

    def context(self, state: ADFState, rows: Any, arrays: Any) -> Context:
        """What a likelihood depends on besides the weights."""
        return {"rows": rows, "arrays": arrays, "others": values_of(self.others, state.others)}

    # -- start -----------------------------------------------------------------------------------------

    def start(self, means: Mapping[str, Any]) -> ADFState:
        """The prior, with these means of the weights."""
        others = {name: other.start() for name, other in self.others.items()}
        weights, factors = {}, {}
        for name, weight in self.sites.weights.items():
            var = jnp.asarray(self._prior_var(name, others))
            weights[name] = Gaussian(jnp.asarray(means[name], float), var)
            if weight.hyper is not None:
                zero = jnp.zeros(var.shape)
                factors[name] = Factor(1 / var, jnp.asarray(weight.loc) / var, zero, zero)
        return ADFState(weights, others, factors)

    def _prior_var(self, name: str, others: Mapping[str, Any]) -> Any:
        weight = self.sites.weights[name]
        if weight.hyper is None:
            return weight.scale**2
        typical = jnp.ravel(self.others[weight.hyper].value(others[weight.hyper]))
        return (weight.scale * typical[weight.element] ** weight.power) ** 2

    def random_means(self, rng_key: jax.Array) -> dict[str, Any]:
        """Means N(loc, prior variance / fan-in), which break the symmetry of the hidden units."""
        others = {name: other.start() for name, other in self.others.items()}
        keys = jax.random.split(rng_key, len(self.sites.weights))
        means = {}
        for key, (name, weight) in zip(keys, self.sites.weights.items(), strict=True):
            shape = weight.loc.shape
            fan_in = np.prod(shape[:-1]) if len(shape) > 1 else max(1, weight.loc.size)
            sd = jnp.sqrt(self._prior_var(name, others) / fan_in)
            means[name] = jnp.asarray(weight.loc) + sd * jax.random.normal(key, shape)
        return means

    # -- learning --------------------------------------------------------------------------------------

    def learn(self, state: ADFState, rows: Any, arrays: Any) -> tuple[ADFState, jax.Array, jax.Array]:
        """One data point; also its log Z and the number of refused updates of weights."""
        likelihood = self.likelihood
        context = self.context(state, rows, arrays)
        noise = {name: state.others[name] for name in likelihood.noise}

        def log_z(weights: Any, noise: Any) -> tuple[jax.Array, Any]:
            quantities = likelihood.observation.quantities(weights, context)
            return likelihood.log_z(quantities, {**state.others, **noise}, context).sum(), quantities

        (value, quantities), gradients = jax.value_and_grad(log_z, argnums=(0, 1), has_aux=True)(
            state.weights, noise
        )
        refused = jnp.zeros(())
        weights = {}
        for name, weight in state.weights.items():
            weights[name], bad = gaussian_update(weight, gradients[0][name])
            refused += _sampled_mean(bad) * bad.size
        others = dict(state.others)
        for name in noise:
            others[name] = gaussian_update(noise[name], gradients[1][name])[0]
        if likelihood.gamma is not None:
            others[likelihood.gamma] = self._learn_precision(quantities, state, context)
        return ADFState(weights, others, state.factors), value, refused

    def _learn_precision(self, quantities: Any, state: ADFState, context: Context) -> Gamma:
        name = self.likelihood.gamma
        assert name is not None
        before = state.others[name]
        shape = before.concentration.shape
        orders = [self.likelihood.log_z(quantities, state.others, context, order) for order in range(3)]
        return gamma_update(before, jnp.stack([_sum_to(z, shape) for z in orders]))

    def sweep(self, state: ADFState, rows: Any, arrays: Any, one: Any) -> tuple[ADFState, Pass]:
        """One pass over rows in the order given; ``one`` is explained in :func:`make_once`."""

        def body(carry: Any, row: Any) -> tuple[Any, tuple[jax.Array, jax.Array]]:
            learn = make_once(
                lambda carry, row: self.learn(ADFState(carry[0], carry[1], {}), row, arrays), one
            )
            after, log_z, refused = learn(carry, row)
            return (after.weights, after.others), (log_z, refused)

        carry, (log_z, refused) = lax.scan(body, (state.weights, state.others), rows)
        size = sum(weight.loc.size for weight in self.sites.weights.values())
        return ADFState(carry[0], carry[1], state.factors), Pass(
            log_z.sum() + self._constant(log_z), refused.mean() / size
        )

    def _constant(self, log_z: jax.Array) -> float:
        """What the normal density leaves out."""
        if self.likelihood.observation.kind != "normal":
            return 0.0
        return -0.5 * np.log(2 * np.pi) * log_z.size * max(1, int(np.prod(self.likelihood.observation.shape)))

    def log_density(self, state: ADFState, row: Any, arrays: Any) -> jax.Array:
        """log Z of one data point, constants included."""
        context = self.context(state, row, arrays)
        quantities = self.likelihood.observation.quantities(state.weights, context)
        log_z = self.likelihood.log_z(quantities, state.others, context).sum()
        return log_z + self._constant(log_z)

    def refine(self, state: ADFState) -> ADFState:
        """The prior factors of all weights with a hyper-site."""
        weights, others, factors = dict(state.weights), dict(state.others), dict(state.factors)
        for hyper in self.sites.hypers:
            names = [name for name, weight in self.sites.weights.items() if weight.hyper == hyper]
            other, given = self.others[hyper], (names, self.sites.weights, weights, factors)
            found: tuple[Any, Any, Any]
            found = (
                refine_gamma(*given, others[hyper]) if other.kind == "gamma" else refine_normal(*given, other)
            )
            weights |= found[0]
            factors |= found[1]
            others[hyper] = found[2]
        return ADFState(weights, others, factors)

    def epoch(self, state: ADFState, rows: Any, arrays: Any, order: Any, one: Any) -> tuple[ADFState, Pass]:
        """A pass over the rows in this order, and the refinement of the prior."""
        shuffled = {name: jnp.asarray(leaf)[order] for name, leaf in rows.items()}
        state, record = self.sweep(state, shuffled, arrays, one)
        return self.refine(state), record


def _sampled_mean(mask: jax.Array) -> jax.Array:
    """Share of True, counted on some slices along the first axis: summing all would cost a fifth of the time."""
    if mask.ndim == 0:
        return mask.astype(float)
    slices = max(1, SAMPLE * mask.shape[0] // mask.size)
    return mask[:: -(-mask.shape[0] // slices)].astype(float).mean()


def _sum_to(value: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Sum over the axes along which ``shape`` was broadcast."""
    extra = value.ndim - len(shape)
    value = value.sum(axis=tuple(range(extra)))
    axes = tuple(k for k, size in enumerate(shape) if size == 1 and value.shape[k] != 1)
    return value.sum(axis=axes, keepdims=True)
