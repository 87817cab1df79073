"""Predictions of a network that is linearized at the mode."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.scipy.special import logsumexp

from numpyro_bnn._checks import argument_error
from numpyro_bnn.guides.laplace import likelihoods
from numpyro_bnn.guides.laplace.likelihoods import CALL
from numpyro_bnn.guides.laplace.problem import Call, LaplaceProblem, Values

# of an integral over a log scale, log rate or logit; four times as many for several log
# scales
QUADRATURE_NODES = 64


class LaplacePredictive(NamedTuple):
    """Prediction of one observed site.

    :param mean: mean of the observation: of the number, the count, or the probability
        of each class (N, ..., K).
    :param variance: its variance, with the noise.
    :param outputs: means of the natural outputs f (``loc``, ``log_scale``, ``logits``,
        ``log_rate``).
    :param output_variance: variances of these.
    :param covariance: (N, E, E) of the E outputs of a row; (N, E, N, E) with
        ``covariance=True``.
    """

    mean: jax.Array
    variance: jax.Array
    outputs: dict[str, jax.Array]
    output_variance: dict[str, jax.Array]
    covariance: jax.Array


def log_density(
    guide: Any,
    problem: LaplaceProblem,
    params: Mapping[str, Any],
    call: Call,
    name: str,
) -> jax.Array:
    """(N,) log density of the rows of a site, averaged over its outputs."""
    observation, cov, _ = gaussian_outputs(guide, problem, params, call, name)
    site = problem.trace(guide._coordinates(params), None, call)[name]
    axis, used = problem.observed[name]
    if not site["is_observed"]:
        raise argument_error(
            f"{CALL}.log_predictive_density",
            "args",
            "no targets",
            "Pass the targets as well.",
        )
    value = jnp.broadcast_to(site["value"], site["fn"].shape())
    if axis is not None:
        value = jnp.moveaxis(value, axis, 0)
    value = value.reshape(observation.weight.shape)
    unmasked = observation.weight > 0
    if observation.kind == "normal":
        cov = _of_both_outputs(cov, used, value.shape[1])
        fixed = "log_scale" not in used
        return gaussian_log_density(observation.outputs, cov, value, unmasked, fixed)
    f, variance = outputs_by_name(observation, used, cov)
    density = _averaged(observation.kind, f, variance, value)
    return jnp.sum(jnp.where(unmasked, density, 0.0), axis=1)


def _of_both_outputs(cov: jax.Array, used: tuple[str, ...], size: int) -> jax.Array:
    """(B, 2 M, 2 M) of loc and log scale, one of which may be known."""
    width = (0 if "loc" in used else size, 0 if "log_scale" in used else size)
    return jnp.pad(cov, [(0, 0), width, width])


def gaussian_log_density(
    f: Mapping[str, jax.Array],
    cov: jax.Array,
    value: jax.Array,
    unmasked: jax.Array | bool = True,
    fixed: bool = False,
) -> jax.Array:
    """(B,) log density of rows (B, M) whose locs and log scales are jointly Gaussian,
    all elements together.

    :param f: means ``loc`` and ``log_scale`` (B, M).
    :param cov: (B, 2 M, 2 M) of both.
    :param unmasked: (B, M) elements that no mask leaves out.
    :param fixed: whether the log scales are known.
    """
    means, cov, weights = given_log_scales(f, cov, fixed)
    unmasked = jnp.broadcast_to(unmasked, value.shape)
    pairs = unmasked[:, :, None] & unmasked[:, None]
    cov = jnp.where(pairs, cov, jnp.eye(value.shape[1]))
    away = jnp.where(unmasked, value - means, 0.0)
    density = dist.MultivariateNormal(covariance_matrix=cov).log_prob(away)
    unknown = 0.5 * jnp.log(2 * jnp.pi) * jnp.sum(~unmasked, axis=1)
    return logsumexp(density, axis=0, b=weights[:, None]) + unknown


def given_log_scales(
    f: Mapping[str, jax.Array], cov: jax.Array, fixed: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Observations (R, K) as a mixture of M Gaussians, each given the log scales:
    means, covariances, weights.

    Nodes of the log scales are those of Gauss and Hermite for one target, and of a
    Sobol sequence for several.
    """
    from scipy.stats import norm, qmc

    loc, log_scale = f["loc"], f["log_scale"]
    size = loc.shape[1]
    if fixed:
        points, weights = np.zeros((1, size)), np.ones(1)
    elif size == 1:
        hermite, weights = np.polynomial.hermite_e.hermegauss(QUADRATURE_NODES)
        points, weights = hermite[:, None], weights / weights.sum()
    else:
        points = norm.ppf(qmc.Sobol(size, seed=0).random(4 * QUADRATURE_NODES))
        weights = np.full(len(points), 1 / len(points))
    values, vectors = jnp.linalg.eigh(cov[:, size:, size:])
    values = jnp.maximum(values, 0.0)
    root = vectors * jnp.sqrt(values)[:, None]
    positive = values > 0
    inverse = jnp.where(positive, 1 / jnp.sqrt(jnp.where(positive, values, 1.0)), 0.0)
    gain = cov[:, :size, size:] @ vectors * inverse[:, None]
    nodes = jnp.asarray(points, float)
    means = loc + jnp.einsum("rke,me->mrk", gain, nodes)
    noise = jnp.exp(2 * (log_scale + jnp.einsum("rke,me->mrk", root, nodes)))
    left = cov[:, :size, :size] - gain @ jnp.swapaxes(gain, 1, 2)
    return means, left + noise[..., None] * jnp.eye(size), jnp.asarray(weights, float)


def gaussian_outputs(
    guide: Any,
    problem: LaplaceProblem,
    params: Any,
    call: Call,
    name: str,
    joint: bool = False,
    index: Any = None,
) -> Any:
    """The observation at the mode and the covariances of its outputs."""
    v = guide._coordinates(params)
    trace = problem.trace(v, index, call)
    for site in v:
        if site not in trace:
            raise argument_error(
                CALL,
                "args",
                f"arguments without the site {site!r} of the run",
                "Pass all the model's arguments of the run, except the targets.",
            )
    observation = problem.observations(trace)[name]
    jac = problem.jacobians(v, index, call, name)
    fns: dict[str, Any] = dict(guide._normals(params))
    for (block, _), fn in zip(guide._blocks, guide._families(params), strict=True):
        site = "*" if block.name == guide.prefix else next(iter(block.shapes))
        fns[site] = fn
    if not joint:
        return observation, guide._structure.covariance(jac, fns), None
    half = guide._structure.halves(jac, fns)
    between_rows = jnp.einsum("bdp,cep->bdce", half, half)
    rows = jnp.arange(half.shape[0])
    return observation, between_rows[rows, :, rows], between_rows


class PredictiveOptions(NamedTuple):
    """Of :meth:`AutoLaplace.predictive`."""

    site: str
    linearized: bool
    link: str
    covariance: bool
    num_samples: int


def predict(
    guide: Any,
    problem: LaplaceProblem,
    params: Any,
    key: Any,
    call: Call,
    options: PredictiveOptions,
) -> LaplacePredictive:
    """The prediction of :meth:`AutoLaplace.predictive`."""
    site, linearized, link, joint, num_samples = options
    used = problem.observed[site][1]
    observation, cov, between_rows = gaussian_outputs(
        guide, problem, params, call, site, joint
    )
    f, variance = outputs_by_name(observation, used, cov)
    if linearized and not (link == "sample" and "logits" in f):
        mean, spread = likelihoods.predicted(observation.kind, f, variance)
    else:
        if linearized:
            values, vectors = jnp.linalg.eigh(cov)
            root = vectors * jnp.sqrt(jnp.maximum(values, 0.0))[:, None]
            noise = jax.random.normal(key, (num_samples, *cov.shape[:2]))
            draws = observation.flat(used) + jnp.einsum("bde,sbe->sbd", root, noise)
            draws = {"logits": draws.reshape(num_samples, *f["logits"].shape)}
        else:
            draws = _network_draws(guide, problem, params, key, call, site, num_samples)
        zero = dict.fromkeys(f, jnp.zeros(()))
        means, variances = jax.vmap(
            lambda draw: likelihoods.predicted(observation.kind, draw, zero)
        )(draws)
        mean = jnp.mean(means, axis=0)
        spread = jnp.mean(variances, axis=0) + jnp.var(means, axis=0)
        if not linearized:
            for output, values in draws.items():
                f[output] = jnp.mean(values, axis=0)
                variance[output] = jnp.var(values, axis=0)

    def shaped(value: jax.Array) -> jax.Array:
        return value.reshape(observation.shape + value.shape[2:])

    return LaplacePredictive(
        shaped(mean),
        shaped(spread),
        jax.tree.map(shaped, f),
        jax.tree.map(shaped, variance),
        between_rows if joint else cov,
    )


def _network_draws(
    guide: Any,
    problem: LaplaceProblem,
    params: Any,
    key: Any,
    call: Call,
    name: str,
    number: int,
) -> Any:
    """Outputs (S, B, M) of the network itself at draws of the weights."""
    draws = guide._draw(key, params, (number,))

    def outputs(v: Values) -> Mapping[str, jax.Array]:
        return problem.observations(problem.trace(v, None, call))[name].outputs

    return jax.lax.map(outputs, draws)


def outputs_by_name(
    observation: Any, used: tuple[str, ...], cov: jax.Array
) -> tuple[dict, dict]:
    """Means and variances of all outputs by name, shaped like these; others than the
    used ones are known.
    """
    variance, start = jnp.diagonal(cov, axis1=1, axis2=2), 0
    variances = {name: jnp.zeros_like(f) for name, f in observation.outputs.items()}
    for name in used:
        f = observation.outputs[name]
        width = f[0].size
        variances[name] = variance[:, start : start + width].reshape(f.shape)
        start += width
    return dict(observation.outputs), variances


def _averaged(
    kind: str, f: Mapping[str, jax.Array], v: Mapping[str, jax.Array], value: jax.Array
) -> jax.Array:
    """log of the likelihood averaged over Gaussian outputs."""
    points, weights = np.polynomial.hermite_e.hermegauss(QUADRATURE_NODES)
    log_weights = jnp.log(jnp.asarray(weights / weights.sum(), float)).reshape(-1, 1, 1)
    nodes = jnp.asarray(points, float).reshape(-1, 1, 1)
    if kind == "categorical":
        logits = likelihoods.probit(f["logits"], v["logits"])
        return likelihoods.log_density(kind, {"logits": logits}, value)
    name = "log_rate" if kind == "poisson" else "logits"
    densities = likelihoods.log_density(
        kind, {name: f[name] + jnp.sqrt(v[name]) * nodes}, value
    )
    return logsumexp(densities + log_weights, axis=0)
