r"""Likelihoods in a Gauss-Newton approximation: a class for each, with its natural
outputs f, a root of their Fisher information, and its predictions.

=================  ===================  ============================================
distribution       outputs f            Fisher information
=================  ===================  ============================================
Normal             loc, log scale       :math:`\mathrm{diag}(\sigma^{-2}, 2)`
StudentT           loc, log scale       :math:`\mathrm{diag}((\nu + 1) \sigma^{-2},
                                        2 \nu) / (\nu + 3)`
Bernoulli          logits               :math:`p (1 - p)`
Binomial           logits               :math:`n p (1 - p)`
Categorical        logits               :math:`\mathrm{diag}(p) - p p^\top`
Poisson            log rate             the rate
Gamma              log mean, log shape  :math:`\mathrm{diag}(a, a^2 \psi'(a) - a)`
NegativeBinomial2  log mean, log shape  :math:`m = \mu a / (\mu + a)`, and :math:`a^2
                                        E[\psi'(a) - \psi'(a + y)] - m`
=================  ===================  ============================================

The Fisher information does not depend on how a model writes its parameters, so that
``probs`` and ``logits`` give the same approximation; for logits, rates and a fixed
scale it is the Hessian of -log p in f.
"""

from abc import ABC, abstractmethod
from math import prod
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from jax.scipy.special import logsumexp, polygamma

from numpyro_bnn._checks import argument_error
from numpyro_bnn._distributions import (
    affine_normal,
    is_affine_normal,
    is_factor,
    unwrapped,
    weights,
)
from numpyro_bnn._types import Shape, Site
from numpyro_bnn.guides.auto_blocks import Values
from numpyro_bnn.guides.blocks import cut

CALL = "guides.AutoLaplace"
# of an integral over one output; four times as many for two, or for several log scales
QUADRATURE_NODES = 64
LOG_STEP = 0.25  # of the nodes of integrals over a logarithm


class ObservedRows(NamedTuple):
    """An observed site with its axis of rows in front, its elements flat.

    :param shape: shape of the site, rows first.
    :param outputs: (B, M) by name, or (B, M, K) for classes.
    :param used: names of the outputs that depend on the weights; others are known.
    :param weight: (B, M) powers of the densities: 0 where masked.
    """

    likelihood: "NaturalOutputs"
    shape: Shape
    outputs: Values
    used: tuple[str, ...]
    weight: Array

    def flat(self) -> Array:
        """(B, E): the used outputs, joined."""
        outputs = [self.outputs[name].reshape(self.shape[0], -1) for name in self.used]
        return jnp.concatenate(outputs, axis=1)

    def roots(self) -> Array:
        """(B, D, E) with sum over d of r_d r_d^T equal to the Fisher information of a
        row.
        """
        return self.likelihood.roots(self)

    def cut(self, flat: Array) -> Values:
        """(..., E) numbers in the shapes of the used outputs."""
        shapes = {name: self.outputs[name].shape[1:] for name in self.used}
        return cut(flat, shapes)

    def variances(self, cov: Array) -> Values:
        """Variances of all outputs, shaped like these, from the covariances (B, E, E)
        of the used ones.
        """
        variances = {name: jnp.zeros_like(f) for name, f in self.outputs.items()}
        return variances | self.cut(jnp.diagonal(cov, axis1=1, axis2=2))

    def rows_of(self, value: Array, axis: int | None) -> Array:
        """(B, M) elements of an array that is shaped like the site."""
        return _rows_first(value, axis).reshape(self.weight.shape)


def _rows_first(value: Array, axis: int | None) -> Array:
    return value[None] if axis is None else jnp.moveaxis(value, axis, 0)


def observed_rows(
    site: Site, axis: int | None, used: tuple[str, ...] = ()
) -> ObservedRows:
    """Read a site; ``axis`` of ``fn.shape()`` indexes the rows (``None``: it is one
    row).
    """
    fn, weight = site["fn"], _rows_first(weights(site), axis)
    flat_shape = (weight.shape[0], prod(weight.shape[1:]))
    likelihood, outputs = likelihood_of(site), {}
    for name, value in likelihood.natural(fn).items():
        classes = value.shape[len(fn.shape()) :]
        outputs[name] = _rows_first(value, axis).reshape(flat_shape + classes)
    return ObservedRows(
        likelihood, weight.shape, outputs, used, weight.reshape(flat_shape)
    )


class NaturalOutputs(ABC):
    """A row of the table. A new likelihood is a subclass with :meth:`parameters` and
    the three abstract methods, and an entry of :data:`LIKELIHOODS`; everything else
    follows.

    :cvar classes: the distributions it knows, without ``to_event``, ``expand`` and
        ``mask``.
    :cvar constants: names of the outputs that must not depend on the weights.
    """

    classes: ClassVar[tuple[type, ...]] = ()
    constants: ClassVar[tuple[str, ...]] = ()

    def takes(self, fn: dist.Distribution) -> bool:
        """Whether a distribution is of this kind."""
        return isinstance(unwrapped(fn, masked=True), self.classes)

    def natural(self, fn: dist.Distribution) -> Values:
        """The natural outputs by name, each shaped like ``fn.shape()``, with an axis of
        K for classes.
        """
        base = unwrapped(fn, masked=True)
        rank, outputs = len(base.batch_shape), {}
        for name, f in self.parameters(base).items():
            outputs[name] = jnp.broadcast_to(f, fn.shape() + jnp.shape(f)[rank:])
        return outputs

    def parameters(self, base: Any) -> Values:
        """The natural outputs of one of its distributions: a location, then what says
        how much values vary around it.
        """
        raise NotImplementedError

    @abstractmethod
    def distribution(self, f: Values) -> dist.Distribution:
        """p(y | f)."""

    @abstractmethod
    def information(self, f: Values) -> Values:
        """Square root of the Fisher information by output; of classes see
        :meth:`roots`.
        """

    @abstractmethod
    def predicted(self, f: Values, v: Values) -> tuple[Array, Array]:
        """Mean and variance of an observation whose outputs have means f and
        variances v.
        """

    def roots(self, rows: ObservedRows) -> Array:
        """:meth:`ObservedRows.roots`, of outputs whose elements are independent."""
        information, weight = self.information(rows.outputs), jnp.sqrt(rows.weight)
        diagonal = [weight * information[name] for name in rows.used]
        return jax.vmap(jnp.diag)(jnp.concatenate(diagonal, axis=1))

    def log_density(self, rows: ObservedRows, cov: Array, value: Array) -> Array:
        """(B,) log density of the unmasked elements of ``value`` (B, M), averaged over
        Gaussian outputs with these covariances (B, E, E).
        """
        density = self.averaged(rows, cov, value)
        return jnp.sum(jnp.where(rows.weight > 0, density, 0.0), axis=1)

    def averaged(self, rows: ObservedRows, cov: Array, value: Array) -> Array:
        """(B, M) log of the likelihood averaged over the Gaussian outputs of each
        element, by quadrature.
        """
        number, elements = len(rows.used), value.shape[1]
        nodes, weights = gaussian_nodes(number)
        blocks = cov.reshape(-1, number, elements, number, elements)
        root = covariance_root(jnp.diagonal(blocks, axis1=2, axis2=4).swapaxes(1, 3))
        changes = jnp.einsum("bmue,qe->uqbm", root, jnp.asarray(nodes, float))
        at_nodes = dict(rows.outputs)
        for name, change in zip(rows.used, changes, strict=True):
            at_nodes[name] += change
        density = self.distribution(at_nodes).log_prob(value)
        return logsumexp(density + _logs(weights)[:, None, None], axis=0)


class NormalOutputs(NaturalOutputs):
    """Numbers; a log scale that is Gaussian makes the scale log-normal."""

    def takes(self, fn: dist.Distribution) -> bool:
        return is_affine_normal(fn, masked=True)

    def natural(self, fn: dist.Distribution) -> Values:
        loc, scale = affine_normal(fn, masked=True)  # type: ignore[misc]
        return {"loc": loc, "log_scale": jnp.log(jnp.abs(scale))}

    def distribution(self, f: Values) -> dist.Distribution:
        return dist.Normal(f["loc"], jnp.exp(f["log_scale"]))

    def information(self, f: Values) -> Values:
        of_log_scale = jnp.full(f["log_scale"].shape, 2.0**0.5)
        return {"loc": jnp.exp(-f["log_scale"]), "log_scale": of_log_scale}

    def predicted(self, f: Values, v: Values) -> tuple[Array, Array]:
        return f["loc"], v["loc"] + jnp.exp(2 * f["log_scale"] + 2 * v["log_scale"])

    def log_density(self, rows: ObservedRows, cov: Array, value: Array) -> Array:
        """In closed form given the log scales; all elements of a row together."""
        # (B, 2 M, 2 M) of loc and log scale, one of which may be known
        missing = [value.shape[1] * (name not in rows.used) for name in rows.outputs]
        cov = jnp.pad(cov, [(0, 0), missing, missing])
        fixed = "log_scale" not in rows.used
        means, cov, weights = given_log_scales(rows.outputs, cov, fixed)
        unmasked = rows.weight > 0
        pairs = unmasked[:, :, None] & unmasked[:, None]
        cov = jnp.where(pairs, cov, jnp.eye(value.shape[1]))
        away = jnp.where(unmasked, value - means, 0.0)
        fn = dist.MultivariateNormal(covariance_matrix=cov, validate_args=False)
        density = fn.log_prob(away)
        unknown = 0.5 * jnp.log(2 * jnp.pi) * jnp.sum(~unmasked, axis=1)
        return logsumexp(density + _logs(weights)[:, None], axis=0) + unknown


class StudentTOutputs(NaturalOutputs):
    """Numbers with heavy tails, of known degrees of freedom; the scale is
    log-normal.
    """

    classes = (dist.StudentT,)
    constants = ("df",)

    def parameters(self, base: dist.StudentT) -> Values:
        return {"loc": base.loc, "log_scale": jnp.log(base.scale), "df": base.df}

    def distribution(self, f: Values) -> dist.Distribution:
        return dist.StudentT(f["df"], f["loc"], jnp.exp(f["log_scale"]))

    def information(self, f: Values) -> Values:
        df = f["df"]
        of_loc = jnp.sqrt((df + 1) / (df + 3)) * jnp.exp(-f["log_scale"])
        return {"loc": of_loc, "log_scale": jnp.sqrt(2 * df / (df + 3))}

    def predicted(self, f: Values, v: Values) -> tuple[Array, Array]:
        df, squares = f["df"], jnp.exp(2 * f["log_scale"] + 2 * v["log_scale"])
        return f["loc"], v["loc"] + jnp.where(df > 2, squares * df / (df - 2), jnp.inf)


class LogitOutputs(NaturalOutputs):
    r"""Truth values and classes, predicted by the probit approximation: the mean of
    probabilities is about that of the logits :math:`f / \sqrt{1 + \pi v / 8}`.
    """

    family: ClassVar[Any]

    def parameters(self, base: dist.BernoulliLogits) -> Values:
        return {"logits": base.logits}

    def distribution(self, f: Values) -> dist.Distribution:
        return self.family(f["logits"])

    def predicted(self, f: Values, v: Values) -> tuple[Array, Array]:
        p = self.family(self._probit(f, v)).probs
        return p, p * (1 - p)

    def _probit(self, f: Values, v: Values) -> Array:
        return f["logits"] / jnp.sqrt(1 + jnp.pi / 8 * v["logits"])


class BernoulliOutputs(LogitOutputs):
    """Truth values."""

    family = dist.BernoulliLogits
    classes = (dist.BernoulliLogits, dist.BernoulliProbs)

    def information(self, f: Values) -> Values:
        logits = f["logits"]
        return {"logits": jnp.sqrt(jax.nn.sigmoid(logits) * jax.nn.sigmoid(-logits))}


class BinomialOutputs(BernoulliOutputs):
    """Successes of a known number of trials."""

    classes = (dist.BinomialLogits, dist.BinomialProbs)
    constants = ("trials",)

    def parameters(self, base: dist.BinomialLogits) -> Values:
        trials = jnp.asarray(base.total_count, float)
        return {"logits": base.logits, "trials": trials}

    def distribution(self, f: Values) -> dist.Distribution:
        return dist.Binomial(f["trials"], logits=f["logits"])

    def information(self, f: Values) -> Values:
        return {"logits": jnp.sqrt(f["trials"]) * super().information(f)["logits"]}

    def predicted(self, f: Values, v: Values) -> tuple[Array, Array]:
        """Also the variance of the chance, by its slope at the mean."""
        n, (p, of_one) = f["trials"], super().predicted(f, v)
        return n * p, n * of_one + n * (n - 1) * v["logits"] * jnp.square(of_one)


class CategoricalOutputs(LogitOutputs):
    """Classes; they are scored by the probit approximation as well."""

    family = dist.CategoricalLogits
    classes = (dist.CategoricalLogits, dist.CategoricalProbs)

    def information(self, f: Values) -> Values:
        """(B, M, K, K) factors of diag(p) - p p^T."""
        p = jax.nn.softmax(f["logits"])
        centered = jnp.eye(p.shape[-1]) - p[..., None, :]
        return {"logits": jnp.sqrt(p)[..., None] * centered}

    def roots(self, rows: ObservedRows) -> Array:
        weight = jnp.sqrt(rows.weight)[..., None, None]
        factors = weight * self.information(rows.outputs)["logits"]
        _, elements, classes, _ = factors.shape
        blocks = jnp.einsum("bmde,mn->bmdne", factors, jnp.eye(elements))
        return blocks.reshape(-1, elements * classes, elements * classes)

    def averaged(self, rows: ObservedRows, cov: Array, value: Array) -> Array:
        probit = self._probit(rows.outputs, rows.variances(cov))
        return self.family(probit).log_prob(value)


class PoissonOutputs(NaturalOutputs):
    """Counts; a log rate that is Gaussian makes the rate log-normal."""

    classes = (dist.Poisson,)

    def parameters(self, base: dist.Poisson) -> Values:
        return {"log_rate": jnp.log(base.rate)}

    def distribution(self, f: Values) -> dist.Distribution:
        return dist.Poisson(jnp.exp(f["log_rate"]))

    def information(self, f: Values) -> Values:
        return {"log_rate": jnp.exp(f["log_rate"] / 2)}

    def predicted(self, f: Values, v: Values) -> tuple[Array, Array]:
        rate = jnp.exp(f["log_rate"] + v["log_rate"] / 2)
        return rate, rate + rate**2 * jnp.expm1(v["log_rate"])


class GammaOutputs(NaturalOutputs):
    """Positive numbers of mean mu and variance mu^2 / a, for any link; mean and shape a
    are log-normal.
    """

    classes = (dist.Gamma,)

    def parameters(self, base: dist.Gamma) -> Values:
        log_shape = jnp.log(base.concentration)
        return {"log_mean": log_shape - jnp.log(base.rate), "log_shape": log_shape}

    def distribution(self, f: Values) -> dist.Distribution:
        shape = jnp.exp(f["log_shape"])
        return dist.Gamma(shape, shape * jnp.exp(-f["log_mean"]))

    def information(self, f: Values) -> Values:
        a = jnp.exp(f["log_shape"])
        # a^2 psi'(a) - a, of large numbers by its expansion, where digits would cancel
        small, large = jnp.minimum(a, 30.0), jnp.maximum(a, 30.0)
        exact = small**2 * polygamma(1, small) - small
        expansion = 0.5 + (1 - 0.2 / large**2) / (6 * large)
        of_shape = jnp.where(a < 30.0, exact, expansion)
        return {"log_mean": jnp.sqrt(a), "log_shape": jnp.sqrt(of_shape)}

    def predicted(self, f: Values, v: Values) -> tuple[Array, Array]:
        mean = jnp.exp(f["log_mean"] + v["log_mean"] / 2)
        noise = jnp.exp(v["log_mean"] - f["log_shape"] + v["log_shape"] / 2)
        return mean, mean**2 * (jnp.expm1(v["log_mean"]) + noise)


class NegativeBinomialOutputs(GammaOutputs):
    """Counts of mean mu and variance mu + mu^2 / a, a the concentration: Poisson of
    Gamma rates.
    """

    classes = (dist.GammaPoisson,)

    def distribution(self, f: Values) -> dist.Distribution:
        rate = super().distribution(f).rate
        return dist.GammaPoisson(jnp.exp(f["log_shape"]), rate)

    def information(self, f: Values) -> Values:
        """Trigamma functions are Laplace transforms of t / (1 - exp(-t)), so that their
        means over counts follow from the generating function of these.

        The integral over a t > 0 is one over its logarithm, by the trapezoidal rule.
        """
        mean = jnp.exp(f["log_mean"])
        # above it, counts are Poisson, and float32 would overflow
        a = jnp.exp(jnp.minimum(f["log_shape"], 30.0))
        logs = jnp.arange(-30.0, 5.0, LOG_STEP).reshape(-1, *[1] * mean.ndim)
        scaled = jnp.exp(logs)
        t, left = scaled / a, -jnp.expm1(-scaled / a)
        seen = -jnp.expm1(-a * jnp.log1p(mean / a * left))
        mass = scaled * jnp.exp(-scaled) * (t / left * seen + jnp.expm1(-mean * t))
        of_shape = LOG_STEP * a * jnp.sum(mass, axis=0)
        return {
            "log_mean": jnp.sqrt(1 / (1 / mean + 1 / a)),
            "log_shape": jnp.sqrt(jnp.maximum(of_shape, 0.0)),
        }

    def predicted(self, f: Values, v: Values) -> tuple[Array, Array]:
        rate, variance = super().predicted(f, v)
        return rate, rate + variance


LIKELIHOODS: tuple[NaturalOutputs, ...] = (
    NormalOutputs(),
    StudentTOutputs(),
    BernoulliOutputs(),
    BinomialOutputs(),
    CategoricalOutputs(),
    PoissonOutputs(),
    GammaOutputs(),
    NegativeBinomialOutputs(),
)


def likelihood_of(site: Site) -> NaturalOutputs:
    """Row of the table; refuses all other likelihoods."""
    fn = site["fn"]
    for likelihood in LIKELIHOODS:
        if likelihood.takes(fn):
            return likelihood
    name = type(unwrapped(fn, masked=True)).__name__
    noun = "factor" if is_factor(fn) else f"{name} likelihood"
    got = f"the observed site {site['name']!r} with a {noun}"
    names = [type(row).__name__.removesuffix("Outputs") for row in LIKELIHOODS]
    instead = (
        f"It knows {', '.join(names)}; `AutoLaplaceApproximation` of NumPyro takes "
        "others."
    )
    raise argument_error(CALL, "model", got, instead)


def _logs(weights: np.ndarray) -> Array:
    """Logarithms of the weights of nodes, also of far ones, which would be 0 in
    float32.
    """
    return jnp.asarray(np.log(weights), float)


def covariance_root(cov: Array) -> Array:
    """(..., E, E) roots of covariances, which may be singular."""
    values, vectors = jnp.linalg.eigh(cov)
    return vectors * jnp.sqrt(jnp.maximum(values, 0.0))[..., None, :]


def gaussian_nodes(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes (Q, E) of E standard normals, and weights (Q,): of Gauss and Hermite for
    one or two, and of a Sobol sequence for more.
    """
    from scipy.stats import norm, qmc

    if size > 2:
        points = norm.ppf(qmc.Sobol(size, seed=0).random(4 * QUADRATURE_NODES))
        shares = np.full(points.shape, len(points) ** (-1 / size))
    else:
        count = QUADRATURE_NODES if size == 1 else round((4 * QUADRATURE_NODES) ** 0.5)
        hermite, weights = np.polynomial.hermite_e.hermegauss(count)
        grid = np.stack(np.meshgrid(*[np.arange(count)] * size), -1).reshape(-1, size)
        points, shares = hermite[grid], (weights / weights.sum())[grid]
    return points, shares.prod(axis=1)


def given_log_scales(
    f: Values, cov: Array, fixed: bool = False
) -> tuple[Array, Array, np.ndarray]:
    """Observations (R, K) as a mixture of M Gaussians, each given the log scales:
    means, covariances, weights.

    :param f: means ``loc`` and ``log_scale`` (R, K).
    :param cov: (R, 2 K, 2 K) of both.
    :param fixed: whether the log scales are known.
    """
    loc, log_scale = f["loc"], f["log_scale"]
    size = loc.shape[1]
    points, weights = np.zeros((1, size)), np.ones(1)
    if not fixed:
        points, weights = gaussian_nodes(size)
    nodes = jnp.asarray(points, float)
    values, vectors = jnp.linalg.eigh(cov[:, size:, size:])
    values = jnp.maximum(values, 0.0)
    root = vectors * jnp.sqrt(values)[:, None]
    positive = values > 0
    inverse = jnp.where(positive, 1 / jnp.sqrt(jnp.where(positive, values, 1.0)), 0.0)
    gain = cov[:, :size, size:] @ vectors * inverse[:, None]
    means = loc + jnp.einsum("rke,me->mrk", gain, nodes)
    noise = jnp.exp(2 * (log_scale + jnp.einsum("rke,me->mrk", root, nodes)))
    left = cov[:, :size, :size] - gain @ jnp.swapaxes(gain, 1, 2)
    return means, left + noise[..., None] * jnp.eye(size), weights
